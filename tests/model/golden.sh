#!/bin/sh
# Both tiny checkpoints at tp 1, 2, 4 and 8, kept as stored, against their reference results: logits, greedy text, every way of
# feeding; and the likelihood of the held-out text through minimax-eval.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/golden.XXXXXX")
trap 'rm -rf "$work"' EXIT

# likelihood NAME TP EXPECTED
likelihood() {
  minimax-eval "$work/$1-$2" --act-quant off --ids tests/data/"$1"/held-out-ids.json --window 512 --limit 40 >"$work/nll" || return 1
  awk -v name="$1" -v tp="$2" -v expected="$3" '
    { difference = $2 - expected; if (difference < 0) difference = -difference
      printf "%s, tp %s: nll %.6f, reference %s, difference %.1e <= 1e-4\n", name, tp, $2, expected, difference
      ok = $1 == "nll" && difference <= 1e-4 }
    END { exit !ok }' "$work/nll"
}

for name in tiny-m1 tiny-m2; do
  for tp in 1 2 4 8; do
    minimax-convert tests/data/$name -o "$work/$name-$tp" --tp $tp --quant none -q
    "$BUILD"/tests/model/golden "$work/$name-$tp" tests/data/$name/golden.safetensors
  done
done
likelihood tiny-m1 1 2.763680
likelihood tiny-m2 2 2.652365
