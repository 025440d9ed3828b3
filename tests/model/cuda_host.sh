#!/bin/sh
# The host's side of the CUDA backend, on both small models whole, cut for two ranks, in two stages, both, and in many files, over a runtime that has no device.
set -eu
cd "$(dirname "$0")/../.."
code=0
"$BUILD"/tests/ops/host >/dev/null 2>&1 || code=$?
[ $code -ne 77 ] || { echo "this build has no CUDA backend"; exit 77; }
for model in tiny-m1 tiny-m2; do
  for tp in 1 2; do
    "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-$tp" --tp $tp --quant bf16 -q
  done
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-many" --part-size 128K --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-stages" --pp 2 --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-both" --tp 2 --pp 2 --quant bf16 -q
  "$BUILD"/tests/ops/host_world "$TMPDIR/$model-2" "$BUILD/tests/ops/preload/fake_nccl.so"
  "$BUILD"/tests/ops/host "$TMPDIR/$model-1" "$TMPDIR/$model-2" "$TMPDIR/$model-stages" "$TMPDIR/$model-both" "$TMPDIR/$model-many"
done
