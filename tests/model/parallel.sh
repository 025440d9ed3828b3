#!/bin/sh
# Expert and pipeline parallel shards run: the likelihood of the held-out text is that of tp 1, inputs rounded or not, in schemes whose scales
# are of rows, blocks and whole experts; so is the text that a seed draws.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/parallel.XXXXXX")
trap 'rm -rf "$work"' EXIT

nll() {
  minimax-eval "$work/$1" --threads 1 --act-quant "$3" --ids tests/data/"$2"/held-out-ids.json --window "$4" --limit 8 |
    awk '{ sub(",", "", $2); print $2 }'
}

# apart MODEL SCHEME CUT on|off WINDOW LIMIT
apart() {
  awk -v what="$1 $2 $3, act-quant $4" -v one="$(nll one "$1" "$4" "$5")" -v cut="$(nll cut "$1" "$4" "$5")" -v limit="$6" '
    BEGIN { d = cut < one ? one - cut : cut - one
            printf "%s: nll %.6f, tp 1 %.6f, apart %.1e <= %s\n", what, cut, one, d, limit
            exit !(one > 1 && d <= limit) }'
}

text() {
  minimax-run "$work/$1" -p "The quick" -n 24 --ignore-eos --temperature 0.8 --seed 3 --act-quant off --threads 1 -q
}

for model in tiny-m1 tiny-m2; do
  for scheme in none block_fp8 nvfp4; do
    rm -rf "$work/one"
    minimax-convert tests/data/$model -o "$work/one" --quant $scheme -q
    while read -r cut; do
      rm -rf "$work/cut"
      # shellcheck disable=SC2086
      minimax-convert tests/data/$model -o "$work/cut" --quant $scheme $cut -q
      apart $model $scheme "$cut" off 32 2e-6
      # single tokens: too few roundings for the last bit of a sum to change one
      apart $model $scheme "$cut" on 1 2e-6
      [ $scheme != none ] || [ "$(text one)" = "$(text cut)" ]
    done <<END
--tp 2 --ep 2
--tp 4 --ep 2
--tp 1 --pp 4
--tp 4 --ep 2 --pp 2
END
  done
done
echo "2 models, 3 schemes, 4 cuts: as tp 1"
