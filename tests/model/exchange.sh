#!/bin/sh
# Rows between groups of attention as codes, compared with rows as they are: the same logits to the bit (exchange.c), for every scheme whose
# experts round their inputs to codes of floats, experts over ranks, and stages. Others say that their rows do not go so.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh

# exchange STATUS MODEL OPTION…
exchange() {
  status=$1 model=$2
  shift 2
  rm -rf "$work/cut"
  minimax-convert tests/data/"$model" -o "$work/cut" "$@" -q
  code=0
  "$BUILD"/tests/model/exchange "$work/cut" >"$work/out" || code=$?
  printf '%s %s: %s\n' "$model" "$*" "$(sed 's/^[^:]*: //' "$work/out")"
  [ "$code" -eq "$status" ] || { echo "found status $code, expected $status"; exit 1; }
}

exchange 0 tiny-m2 --tp 2 --attn-tp 1 --quant block_fp8
exchange 0 tiny-m2 --tp 4 --attn-tp 2 --quant channel_fp8
exchange 0 tiny-m2 --tp 4 --attn-tp 1 --ep 2 --quant mxfp8
exchange 0 tiny-m2 --tp 2 --attn-tp 1 --quant nvfp4
exchange 0 tiny-m1 --tp 4 --attn-tp 2 --ep 2 --pp 2 --quant block_fp8
exchange 0 tiny-m1 --tp 2 --attn-tp 1 --quant mxfp4
exchange 3 tiny-m2 --tp 2 --attn-tp 1 --quant bf16
exchange 3 tiny-m2 --tp 2 --attn-tp 1 --quant w4a8
exchange 3 tiny-m2 --tp 2 --quant block_fp8
exchange 3 tiny-m3-random --tp 2 --attn-tp 1 --quant mxfp8
