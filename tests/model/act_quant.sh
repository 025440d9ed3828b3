#!/bin/sh
# Activation quantisation through whole models: likelihood of the held-out text under every scheme, weights alone (off) and with the
# activations that the scheme defines (on): near, and not the same where the scheme has activations of its own. On does not depend on tp, held
# up on single tokens: the last bit of a sum seldom changes a rounding there, and what follows does not hang on it.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh

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

# pieces MODEL SCHEME: activations in groups, and in groups under a scale for the row. Of eight pieces of text seven are the same: in the last
# one of a million roundings may fall the other way.
pieces() {
  for tp in 2 8; do minimax-convert tests/data/"$1" -o "$work/$1-$2-$tp" --quant "$2" --tp $tp -q; done
  for piece in 0 1 2 3 4 5 6 7; do
    sed 's/[][]//g' tests/data/"$1"/held-out-ids.json | tr -d '\n ' | cut -d, -f$((10 * piece + 1))-$((10 * piece + 11)) | sed 's/.*/[&]/' >"$work/$1-ids.json"
    for packed in "$1-$2" "$1-$2-2" "$1-$2-8"; do
      minimax-eval "$work/$packed" --threads 1 --act-quant on --ids "$work/$1-ids.json" --window 1 | awk '{ sub(",", "", $2); printf "%s ", $2 }'
    done
    echo
  done | awk -v model="$1" -v scheme="$2" '
    function off(x) { return x > 2e-6 || x < -2e-6 }
    { two += off($2 - $1); eight += off($3 - $1); good += $1 > 1 }
    END { ok = good == 8 && two <= 1 && eight <= 1
          printf "%s %-16s %d pieces of text: at tp 2 %d are not as at tp 1, at tp 8 %d, limit 1 %s\n", model, scheme, good, two, eight, ok ? "ok" : "FAILED"
          exit !ok }'
}

both() {
  table "$1"
  pieces "$1" mxfp4
  pieces "$1" nvfp4
}
both tiny-m1 &
both tiny-m2
wait $!
