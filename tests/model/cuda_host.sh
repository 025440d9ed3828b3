#!/bin/sh
# The host's side of the CUDA backend, on both small models whole, cut for two ranks, in two groups, in two stages, both, and in many files, over a runtime that has no device.
set -eu
cd "$(dirname "$0")/../.."
code=0
"$BUILD"/tests/ops/host >/dev/null 2>&1 || code=$?
[ $code -ne 77 ] || { echo "this build has no CUDA backend"; exit 77; }
run() {
  model=$1
  # Cut, inputs are rounded under scales of whole rows, which the ranks tell each other.
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-1" --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-2" --tp 2 --quant channel_fp8 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-many" --part-size 128K --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-cut" --tp 2 --part-size 128K --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-cut-stages" --pp 2 --part-size 128K --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-stages" --pp 2 --quant bf16 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-both" --tp 2 --pp 2 --quant channel_fp8 -q
  "$BUILD"/bin/minimax-convert tests/data/$model -o "$TMPDIR/$model-groups" --tp 2 --attn-tp 1 --quant channel_fp8 -q
  "$BUILD"/tests/ops/host "$TMPDIR/$model-groups" || return 1
  "$BUILD"/tests/ops/host_fixture "$TMPDIR/$model-2" "$BUILD/tests/ops/preload/fake_nccl.so" || return 1
  "$BUILD"/tests/ops/host "$TMPDIR/$model-1" "$TMPDIR/$model-2" "$TMPDIR/$model-stages" "$TMPDIR/$model-both" "$TMPDIR/$model-many" "$TMPDIR/$model-cut" "$TMPDIR/$model-cut-stages"
}
# Sparse attention, dense layers and a shared expert; cut, scales of whole rows. Groups of 16 do not survive the cut.
extended() {
  "$BUILD"/bin/minimax-convert tests/data/tiny-m3-random -o "$TMPDIR/tiny-m3-1" --quant mxfp8_attention_nvfp4_experts -q
  "$BUILD"/bin/minimax-convert tests/data/tiny-m3-random -o "$TMPDIR/tiny-m3-2" --tp 2 --quant channel_fp8 -q
  "$BUILD"/tests/ops/host "$TMPDIR/tiny-m3-1" "$TMPDIR/tiny-m3-2"
}
# At once, since they wait for most of their time; each by itself where it keeps files and sockets.
mkdir "$TMPDIR/m1" "$TMPDIR/m2"
(TMPDIR=$TMPDIR/m1 && export TMPDIR && run tiny-m1 >"$TMPDIR/log" 2>&1) &
m1=$!
code=0
(TMPDIR=$TMPDIR/m2 && export TMPDIR && run tiny-m2) || code=1
extended || code=1
wait $m1 || code=1
cat "$TMPDIR/m1/log"
exit $code
