#!/bin/sh
# A new op touches two files and the backends: in a copy of the sources, `scale` is declared in runtime/engine/ops.h, called once in runtime/engine/forward.c
# and done in runtime/cpu/cpu_backend.c. It doubles what the head is given, so every logit is exactly twice what it was, at every cut.
set -eu
. tests/cli/copied_tree.sh
# put FILE BEFORE LINE: LINE goes before the line that begins with BEFORE, which FILE has once.
put() {
  [ "$(grep -c "^ *$2" "$new/$1")" = 1 ]
  awk -v before="$2" -v line="$3" '{ t = $0; sub(/^ */, "", t) } index(t, before) == 1 { print line } 1' "$1" >"$new/$1.new"
  mv "$new/$1.new" "$new/$1"
}
put runtime/engine/ops.h 'bool act_quant; /' '  void (*scale)(mm_backend *b, mm_act x, float by); /* x *= by */'
put runtime/engine/forward.c 'last ? ops->logits' '  if (last) ops->scale(b, s.n, 2);'
put runtime/cpu/cpu_backend.c '.act_quant = true' '    .scale = cpu_scale,'
cp "$new/runtime/cpu/cpu_backend.c" "$TMPDIR/table.c"
awk '/^const mm_ops mm_ops_cpu/ { print "static void cpu_scale(mm_backend *b, mm_act x, float by) {\n" \
  "  for (size_t i = 0; i < (size_t)b->batch->tokens * x.width; i++) ((float *)x.data)[i] *= by;\n}\n" } 1' \
  "$TMPDIR/table.c" >"$new/runtime/cpu/cpu_backend.c"
for floor in formats quant loader convert runtime; do diff -rq "$floor" "$new/$floor" || :; done >"$TMPDIR/touched"
[ "$(wc -l <"$TMPDIR/touched")" = 3 ]

rm -r "$new"/runtime/serve/*.c "$new/runtime/minimax_serve.c" "$built/runtime/serve" "$built/libruntime.a" # minimax-eval does without
eval=$built/bin/minimax-eval
remake 'runtime/engine/\(ops.h\|forward.c\)' "$eval"

python3 - "$TMPDIR/ids.safetensors" <<'END'
import json, struct, sys
ids = [1 + 37 * i % 300 for i in range(11)]
header = json.dumps({"ids.a": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [0, 4 * len(ids)]}}).encode()
open(sys.argv[1], "wb").write(struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(ids)}i", *ids))
END
for model in tiny-m1 tiny-m2; do
  for tp in 1 2; do
    out=$TMPDIR/$model-$tp
    "$BUILD/bin/minimax-convert" "tests/data/$model" -o "$out" --quant block_fp8 --tp $tp --quiet
    "$BUILD/plain/bin/minimax-eval" "$out" --ids-from "$TMPDIR/ids.safetensors" --logits "$out.before.safetensors" --quiet
    "$eval" "$out" --ids-from "$TMPDIR/ids.safetensors" --logits "$out.after.safetensors" --quiet
    python3 - "$out.before.safetensors" "$out.after.safetensors" <<'END'
import struct, sys
def floats(path):
    data = open(path, "rb").read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    return struct.unpack(f"<{(len(data) - start) // 4}f", data[start:])
before, after = map(floats, sys.argv[1:])
assert len(before) == len(after) > 1000 and len(set(before)) > 1000
assert all(2 * x == y for x, y in zip(before, after)), "logits are not twice what they were"
END
  done
done
echo "two files and the backend: a new op runs in both families, whole and cut"
