#!/bin/sh
# The tiny checkpoints at tp 1, 2, 4 and 8 (MiniMax-M3's at three cuts), and with groups of attention, kept as stored, against their reference results: logits, greedy text, every way of
# feeding; and the likelihood of the held-out text through minimax-eval.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh

# likelihood NAME TP EXPECTED LIMIT [OPTION…]
likelihood() {
  name=$1 tp=$2 expected=$3 limit=$4
  shift 4
  minimax-eval "$work/$name-$tp" --act-quant off --ids tests/data/"$name"/held-out-ids.json --window 512 --limit 40 "$@" >"$work/nll" || return 1
  awk -v name="$name" -v tp="$tp" -v expected="$expected" -v limit="$limit" '
    { difference = $2 - expected; if (difference < 0) difference = -difference
      printf "%s, tp %s: nll %.6f, reference %s, difference %.1e <= %s\n", name, tp, $2, expected, difference, limit
      ok = $1 == "nll" && difference <= limit + 0 }
    END { exit !ok }' "$work/nll"
}

for name in tiny-m1 tiny-m2; do
  for tp in 1 2 4 8; do
    minimax-convert tests/data/$name -o "$work/$name-$tp" --tp $tp --quant none -q
    "$BUILD"/tests/model/golden "$work/$name-$tp" tests/data/$name/golden.safetensors
  done
done
while read -r name cut; do
  rm -rf "$work/cut"
  # shellcheck disable=SC2086
  minimax-convert tests/data/"$name" -o "$work/cut" $cut --quant none -q
  "$BUILD"/tests/model/golden "$work/cut" tests/data/"$name"/golden.safetensors
done <<END
tiny-m3-random --tp 1
tiny-m3-random --tp 8
tiny-m3-random --tp 4 --ep 2 --pp 2
tiny-m3-random --tp 4 --attn-tp 2 --ep 2
tiny-m1 --tp 4 --attn-tp 2 --ep 2 --pp 2
tiny-m2 --tp 2 --attn-tp 1
END
likelihood tiny-m1 1 2.763680 1e-4
likelihood tiny-m2 2 2.652365 1e-4
likelihood tiny-m2 2 2.652365 1e-3 --input-dtype bf16
