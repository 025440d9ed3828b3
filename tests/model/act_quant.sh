#!/bin/sh
# Activation quantisation through whole models: likelihood of the held-out text under every scheme, weights alone (off) and with the
# activations that the scheme defines (on): near, and not the same where the scheme has activations of its own. On does not depend on tp, held
# up on single tokens: there are too few roundings for the last bit of a sum to change one, which would change all that follow.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/act_quant.XXXXXX")
trap 'rm -rf "$work"' EXIT

# nll MODEL DIR on|off WINDOW LIMIT
nll() {
  minimax-eval "$work/$2" --threads 1 --act-quant "$3" --ids tests/data/"$1"/held-out-ids.json --window "$4" --limit "$5" |
    awk '{ sub(",", "", $2); print $2 }'
}

# table MODEL
table() {
  while read -r scheme limit; do
    minimax-convert tests/data/"$1" -o "$work/$1-$scheme" --quant "$scheme" -q
    off=$(nll "$1" "$1-$scheme" off 128 3)
    on=$(nll "$1" "$1-$scheme" on 128 3)
    awk -v model="$1" -v scheme="$scheme" -v limit="$limit" -v off="$off" -v on="$on" '
      BEGIN { apart = on < off ? off - on : on - off
              good = off > 1 && (limit == 0 ? apart == 0 : apart > 0 && apart <= limit)
              printf "%s %-16s off %.6f, on %.6f: %+.6f, limit %s %s\n", model, scheme, off, on, on - off, limit, good ? "ok" : "FAILED"
              exit !good }'
  done <<END
bf16 0
block_fp8 0.02
channel_fp8 0.02
tensor_wise_fp8 0.02
mxfp8 0.02
int8 0.02
nvfp4 0.05
nvfp4a16 0
mxfp4 0.1
w4a16 0
w4afp8 0.02
w4a8 0.02
END
}

# cut MODEL SCHEME: activations in groups, and in groups under a scale for the row
cut() {
  one=$(nll "$1" "$1-$2" on 1 80)
  for tp in 2 8; do
    minimax-convert tests/data/"$1" -o "$work/$1-$2-$tp" --quant "$2" --tp $tp -q
    awk -v model="$1" -v scheme="$2" -v tp=$tp -v one="$one" -v many="$(nll "$1" "$1-$2-$tp" on 1 80)" '
      BEGIN { apart = one < many ? many - one : one - many
              printf "%s %-16s tp 1 %.6f, tp %d %+.6f, limit 2e-6 %s\n", model, scheme, one, tp, many - one, apart <= 2e-6 ? "ok" : "FAILED"
              exit !(one > 1 && apart <= 2e-6) }'
  done
}

both() {
  table "$1"
  cut "$1" mxfp4
  cut "$1" nvfp4
}
both tiny-m1 &
both tiny-m2
wait $!
