#!/bin/sh
# A scheme is one file and one row: in a copy of the sources, 7-bit integers from quant/int8.c as quant/int7.c and one row of
# quant/registry.c are enough for every program to know them: converted and cut, verified against the source, run.
set -eu
. tests/cli/copied_tree.sh
sed '/uint8_t/!s/int8/int7/g; s/127/63/g; s/ \.synonym = {[^}]*},//' quant/int8.c >"$new/quant/int7.c"
sed 's/ROW(int8)/& ROW(int7)/' quant/registry.c >"$new/quant/registry.c"
for floor in formats quant loader convert runtime; do diff -rq "$floor" "$new/$floor" || :; done >"$TMPDIR/touched"
[ "$(wc -l <"$TMPDIR/touched")" = 2 ]
bin=$built/bin
remake quant/registry.c "$bin/minimax-convert" "$bin/minimax-verify" "$bin/minimax-inspect" "$bin/minimax-eval"
nll() {
  "$1/minimax-eval" "$2" --ids "tests/data/$model/held-out-ids.json" --window 96 --limit 2 | sed 's/^nll \([0-9.]*\),.*/\1/'
}
for model in tiny-m1 tiny-m2; do
  "$bin/minimax-convert" "tests/data/$model" -o "$TMPDIR/$model-8" --quant int8 --quiet
  int8=$(nll "$BUILD/bin" "$TMPDIR/$model-8")
  for tp in 1 4; do
    out=$TMPDIR/$model-$tp
    "$bin/minimax-convert" "tests/data/$model" -o "$out" --quant int7 --tp $tp --quiet
    "$bin/minimax-verify" "$out" --source "tests/data/$model" --min-sqnr 30 >"$TMPDIR/verified"
    "$bin/minimax-inspect" "$out" >"$TMPDIR/listed"
    grep -q ' int7 ' "$TMPDIR/listed"
    echo "$(nll "$bin" "$out") $int8" | awk '{ exit !($1 > 0 && ($1 - $2) ^ 2 < 0.01 ^ 2) }'
  done
done
if "$BUILD/bin/minimax-convert" tests/data/tiny-m1 -o "$TMPDIR/refused" --quant int7 --quiet 2>"$TMPDIR/err"; then
  echo "int7 is known without its row" >&2
  exit 1
fi
echo "one file and one row: int7 is converted, cut, verified and run"
