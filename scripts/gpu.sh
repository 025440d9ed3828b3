#!/bin/sh
# scripts/gpu.sh BUILD: all tests that need a GPU, with the programs in BUILD, which may come from another machine. First every kernel and random
# sequences of steps; then the two small checkpoints, packed in each scheme, whole models beside the CPU backend (four processes; logs in BUILD/gpu), and what
# minimax-run writes from them on both devices: the same from weights as stored or bf16, of other schemes a difference is shown. MM_SEED=N
# repeats a run of that seed. Exit status 77 without a GPU.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.."
build=$1 work=$1/gpu prompt='And it came to pass, that the king said unto his servant, What'
schemes='none bf16 block_fp8 channel_fp8 tensor_wise_fp8 w4a16 w4afp8 w4a8 nvfp4 mxfp4 mxfp8'

"$build"/tests/ops/gpu test peers linear experts attention lightning rows choice edges sequences
status=$?
[ $status -ne 77 ] || exit 77

rm -rf "$work"
mkdir -p "$work/ranks"
i=0
for model in tiny-m1 tiny-m2; do
  for scheme in $schemes; do
    mkdir -p "$work/$((i % 4))"
    "$build"/bin/minimax-convert tests/data/$model -o "$work/$((i % 4))/$model-$scheme" --quant $scheme -q || exit 1
    i=$((i + 1))
  done
done

MM_GPU_MODELS=$work/0 "$build"/tests/ops/gpu test steps forks load || status=1

for part in 0 1 2 3; do
  MM_GPU_MODELS=$work/$part "$build"/tests/ops/gpu test models rounded >"$work/$part.log" 2>&1 &
  eval "pid$part=$!"
done
for part in 0 1 2 3; do
  eval "wait \$pid$part" || status=1
  cat "$work/$part.log"
done

# Cut for two ranks, on two GPUs or both on one.
for model in tiny-m1 tiny-m2; do
  for scheme in bf16 block_fp8 w4a16 nvfp4; do
    for tp in 1 2; do
      "$build"/bin/minimax-convert tests/data/$model -o "$work/ranks/$model-$scheme-$tp" --tp $tp --quant $scheme -q || exit 1
    done
  done
done
MM_GPU_RANKS=$work/ranks "$build"/tests/ops/gpu test ranks || status=1

same=0
for packed in "$work"/[0-3]/*; do
  for device in cpu cuda; do
    "$build"/bin/minimax-run "$packed" --device $device --act-quant off -n 24 -q -p "$prompt" >"$work/$device.txt" || status=1
  done
  if cmp -s "$work/cpu.txt" "$work/cuda.txt"; then
    same=$((same + 1))
  else
    case $packed in *-none | *-bf16) status=1 ;; esac
    printf '%s: cpu:  %s\n' "${packed##*/}" "$(tr '\n' ' ' <"$work/cpu.txt")" "${packed##*/}" "$(tr '\n' ' ' <"$work/cuda.txt")" | sed '2s/cpu: /cuda:/'
  fi
done
echo "minimax-run: the CPU's text on the GPU from $same of $i checkpoints; others, if any, are above"
[ $status -eq 0 ] && echo "gpu: all passed" || echo "gpu: FAILED"
exit $status
