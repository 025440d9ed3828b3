#!/bin/sh
# A model family is one file and one row: in a copy of the sources, M2's rules under another name as convert/model/arch_minimax_x.c and one row
# of convert/model/rule.h are enough to convert, cut, verify and run a checkpoint of that name, with the likelihood that M2 gives it.
set -eu
. tests/cli/copied_tree.sh
sed 's/MiniMaxM2ForCausalLM/MiniMaxXForCausalLM/; s/minimaxm2/minimaxx/; s/mm_arch_minimax_m2/mm_arch_minimax_x/' convert/model/arch_minimax_m2.c \
  >"$new/convert/model/arch_minimax_x.c"
sed 's/ROW(mm_arch_minimax_m2)/& ROW(mm_arch_minimax_x)/' convert/model/rule.h >"$new/convert/model/rule.h"
for floor in formats quant loader convert runtime; do diff -rq "$floor" "$new/$floor" || :; done >"$TMPDIR/touched"
[ "$(wc -l <"$TMPDIR/touched")" = 2 ]
[ "$(diff convert/model/rule.h "$new/convert/model/rule.h" | grep -c '^>')" = 1 ]

cp -r tests/data/tiny-m2 "$TMPDIR/source"
sed 's/MiniMaxM2ForCausalLM/MiniMaxXForCausalLM/; s/"minimax_m2"/"minimax_x"/' tests/data/tiny-m2/config.json >"$TMPDIR/source/config.json"
convert=$built/bin/minimax-convert
remake convert/model/rule.h "$convert" "$built/bin/minimax-verify"
for tp in 1 2; do
  out=$TMPDIR/x-$tp
  "$convert" "$TMPDIR/source" -o "$out" --quant block_fp8 --tp $tp --quiet
  "$BUILD/bin/minimax-verify" "$out" --source "$TMPDIR/source" 2>"$TMPDIR/err" && exit 1 # the source's family is unknown to the tree as it is
  grep -q 'E_ARCH.*MiniMaxXForCausalLM' "$TMPDIR/err"
  "$built/bin/minimax-verify" "$out" >"$TMPDIR/verified"
  "$BUILD/bin/minimax-convert" tests/data/tiny-m2 -o "$TMPDIR/m2-$tp" --quant block_fp8 --tp $tp --quiet
  for made in x m2; do
    "$BUILD/bin/minimax-eval" "$TMPDIR/$made-$tp" --ids tests/data/tiny-m2/held-out-ids.json --limit 2 >"$TMPDIR/$made.nll"
  done
  cmp "$TMPDIR/x.nll" "$TMPDIR/m2.nll"
done
if "$BUILD/bin/minimax-convert" "$TMPDIR/source" -o "$TMPDIR/refused" --quiet 2>"$TMPDIR/err"; then
  echo "MiniMaxXForCausalLM is known without its row" >&2
  exit 1
fi
echo "one file and one row: a model family is converted, cut, verified and run"
