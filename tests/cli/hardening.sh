#!/bin/sh
# Every program is position independent, fully bound at start with read-only relocations, has no executable stack and no run path, uses
# the stack protector and the fortified libc calls (read with readelf). A program built without all this must be found out.
set -eu

# Prints what is wrong with one program; nothing if it is as it should be.
faults() {
  readelf -hldW "$1" >"$TMPDIR/elf"
  readelf -sW --dyn-syms "$1" >"$TMPDIR/symbols"
  grep -q 'Type: *DYN' "$TMPDIR/elf" && grep -q 'FLAGS_1.*PIE' "$TMPDIR/elf" || echo "not a PIE"
  grep -q 'GNU_RELRO' "$TMPDIR/elf" || echo "no RELRO"
  grep -q 'FLAGS_1.*NOW' "$TMPDIR/elf" || echo "symbols bound lazily"
  grep -q 'GNU_STACK.* RW ' "$TMPDIR/elf" || echo "executable stack"
  ! grep -qE '\((RPATH|RUNPATH|TEXTREL)\)' "$TMPDIR/elf" || echo "run path or text relocations"
  grep -q '__stack_chk_fail' "$TMPDIR/symbols" || echo "no stack protector"
  grep -qE ' __[a-z]+_chk(@|$)' "$TMPDIR/symbols" || echo "no fortified libc call"
}

count=0
for program in "$BUILD"/bin/*; do
  found=$(faults "$program")
  [ -z "$found" ] || { echo "$program: $found"; exit 1; }
  count=$((count + 1))
done
[ "$count" -gt 0 ]

printf '#include <stdio.h>\nint main(int c, char **v) { char b[64]; return sprintf(b, "%%s %%d", v[0], c); }\n' >"$TMPDIR/soft.c"
gcc -no-pie -fno-stack-protector -U_FORTIFY_SOURCE -Wl,-z,norelro,-z,lazy,-z,execstack,-rpath,/tmp "$TMPDIR/soft.c" -o "$TMPDIR/soft" 2>"$TMPDIR/ld.log"
[ "$(faults "$TMPDIR/soft" | wc -l)" -eq 7 ] || { echo "a program without hardening was not found out:"; faults "$TMPDIR/soft"; exit 1; }
echo "$count programs hardened"
