#!/bin/sh
# README.md says what the tree does: every error code has its row and every row its code; every file, name, make target, program and
# option that it names exists.
set -eu
sources='formats quant loader convert runtime'
wrong=$TMPDIR/wrong
: >"$wrong"
# absent WHAT: notes each line of stdin.
absent() {
  sed "s|^|README.md: $1: |" >>"$wrong"
}

grep -rhoE '"E_[A-Z0-9_]+"' --include='*.[ch]' --include='*.cu' $sources | tr -d '"' | sort -u >"$TMPDIR/codes"
sed -n 's/^| `\(E_[A-Z0-9_]*\)`.*/\1/p' README.md | sort >"$TMPDIR/rows"
[ -s "$TMPDIR/codes" ] && [ -s "$TMPDIR/rows" ]
comm -23 "$TMPDIR/codes" "$TMPDIR/rows" | absent "no row for the error code"
comm -13 "$TMPDIR/codes" "$TMPDIR/rows" | absent "a row for a code that no source has"

grep -oE '`[a-z]+/[A-Za-z0-9_./-]+`' README.md | tr -d '`' | sort -u | while read -r path; do
  case $path in build/*) ;; *) [ -e "$path" ] || echo "$path" ;; esac
done | absent "no such file"
grep -oE '\bmm_[a-z0-9_]+' README.md | sort -u | while read -r name; do
  grep -rqw "$name" --include='*.[ch]' --include='*.cu' $sources || echo "$name"
done | absent "no such name in the sources"
grep -oE '(^\$ |`)make [a-z-]+' README.md | sed 's/.*make //' | sort -u | while read -r target; do
  grep -q "^$target:.*## " Makefile || echo "$target"
done | absent "no such make target"

# Command lines: those that begin with a program's name, after a prompt or in backticks.
grep -oE '(^\$ |`)minimax-[a-z]+( [^`]*)?($|`)' README.md | tr -d '`' | sed 's/^\$ //' | while read -r program words; do
  if [ ! -x "$BUILD/bin/$program" ]; then
    echo "$program"
    continue
  fi
  "$BUILD/bin/$program" --help >"$TMPDIR/help"
  for word in $words; do
    case $word in --[a-z]*) grep -qE -e "(^|[ ,])${word%%=*}([ ,=]|\$)" "$TMPDIR/help" || echo "$program $word" ;; esac
  done
done | absent "no such program or option"

cat "$wrong"
[ ! -s "$wrong" ]
echo "README.md: $(wc -l <"$TMPDIR/rows") error codes, and all that it names, are there"
