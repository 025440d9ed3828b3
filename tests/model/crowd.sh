#!/bin/sh
# Both tiny checkpoints served to a crowd of requests: each gets the tokens that it gets alone.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/crowd.XXXXXX")
trap 'rm -rf "$work"' EXIT

for name in tiny-m1 tiny-m2; do
  minimax-convert tests/data/$name -o "$work/$name" --tp 2 --quant block_fp8 -q
  printf '%s, tp 2, ' $name
  "$BUILD"/tests/model/crowd "$work/$name" tests/data/$name/held-out-ids.json 1
done
