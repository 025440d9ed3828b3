#!/bin/sh
# Both tiny checkpoints served to a crowd of requests: each gets the tokens that it gets alone.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh

for name in tiny-m1 tiny-m2; do
  minimax-convert tests/data/$name -o "$work/$name" --tp 2 --quant block_fp8 -q
  printf '%s, tp 2, ' $name
  "$BUILD"/tests/model/crowd "$work/$name" tests/data/$name/held-out-ids.json 1
done
