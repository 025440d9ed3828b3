#!/bin/sh
# scripts/gpu.sh without a GPU: programs that only print stand for the real ones. A part that fails or takes too long is told and ends no other;
# rows and limits are counted; no GPU is exit status 77.
set -eu
cd "$(dirname "$0")/../.."
fake=$TMPDIR/fake
mkdir -p "$fake/bin" "$fake/tests/ops"
# program NAME: what it does, from standard input
program() {
  { echo '#!/bin/sh'; cat; } >"$fake/$1"
  chmod +x "$fake/$1"
}
program tests/ops/gpu <<'END'
case "$1 $2" in
  'count '*) echo 'devices 2' ;;
  'test peers') echo 'ok   sums (limit 0)' ;;
  'test forks') echo "ok   schedules of $MM_STEPS"; sleep 30 ;;
  'test steps') echo 'ok   graphs'; echo 'FAIL warmed'; exit 1 ;;
  'test invariant') ;;
  'test ranks') echo 'ok   ranks'; echo 'cuda: gone' >&2; exit 3 ;;
  *) i=0; while [ $i -lt 300 ]; do echo "ok   row $i"; i=$((i + 1)); done ;;
esac
END
program bin/minimax-convert <<'END'
mkdir -p "$3"
END
# The GPU is off by 1e-3 everywhere, by 3e-3 for one checkpoint.
program bin/minimax-eval <<'END'
case "$1 $3" in
  *tiny-m2-mxfp4*cuda) nll=2.003 ;;
  *cuda) nll=2.001 ;;
  *) nll=2.000 ;;
esac
[ -e "$5" ] || exit 3
case $5 in *"/$(basename "$1" | cut -c 1-7)/"*) ;; *) exit 3 ;; esac
list=$nll i=1
while [ $i -lt "$9" ]; do list=$list,$nll i=$((i + 1)); done
echo "{\"window_nll\":[$list]}"
END
program bin/minimax-run <<'END'
case "$1" in *tiny-m1-bf16) echo "on $3" ;; *) echo text ;; esac
END
program bin/minimax-bench <<'END'
[ "$1" = mixed ] && echo 'm2 x 8, 63 tokens with a prefill chunk of 512: ratio 1.050' || echo 'm2 x 8, decode B=1: 1.4 x floor'
END

expect() {
  grep -qxE -e "$1" "$TMPDIR/out" || { echo "not found: $1"; cat "$TMPDIR/out"; exit 1; }
}
# gpu STATUS BUDGET PART…
gpu() {
  wanted=$1 percent=$2 found=0
  shift 2
  BUDGET=$percent MM_STEPS=5 scripts/gpu.sh "$fake" "$@" >"$TMPDIR/out" 2>&1 || found=$?
  [ $found -eq "$wanted" ] || { echo "exit status $found"; cat "$TMPDIR/out"; exit 1; }
}

gpu 1 1 forks nothing
expect 'ok   schedules of 5'
expect 'FAIL part forks: 1 of 1 rows, [0-9]+ of 4 s, over its budget'
expect 'FAIL part nothing: there is none'
gpu 1 50 prepare peers steps ranks eval kernels sequences models text speed
expect 'ok   sums \(limit 0\)'
expect 'ok part peers: 1 of 1 rows, [0-9]+ of 100 s'
expect 'FAIL warmed'
expect 'FAIL part steps: 1 of 2 rows, .* exit status 1: FAIL warmed'
expect 'FAIL part ranks: 1 of 4 rows, .* exit status 3: cuda: gone'
expect 'FAIL eval tiny-m2-mxfp4, act-quant on: nll 2.003000 on the GPU, 2.000000 on the CPU, off by 3.0e-03 \(limit 2.0e-03\).*'
expect 'ok   eval tiny-m1-none, act-quant off: nll 2.001000 .*, 4 windows'
expect 'ok   eval tiny-m1-block_fp8_head, act-quant on: .*, 32 windows'
expect 'ok   eval tiny-m1-w4a16-2, two GPUs: .*'
expect 'ok   eval tiny-m2-wide-w4a16_head-2, two GPUs: .*'
expect 'ok   eval tiny-m2-nvfp4a16, act-quant on: .*, 32 windows'
expect 'FAIL part eval: 80 of 83 rows, .*'
expect 'ok part kernels: 300 of 300 rows, .*'
expect 'FAIL text tiny-m1-bf16: on cuda . CPU: on cpu '
expect 'ok   speed m2 x 8, 63 tokens .*ratio 1.050 \(limit 1.10\)'
expect 'gpu: FAILED, 4 part\(s\)'

gpu 1 50 peers invariant
expect 'FAIL part invariant: 0 of 0 rows, [0-9]+ of 120 s, not one row'

gpu 0 50 peers kernels
expect 'gpu: all passed, 301 rows'
program tests/ops/gpu <<'END'
echo 'gpu: no CUDA device' >&2
exit 77
END
gpu 77 50
expect 'gpu: no CUDA device'
echo "parts that fail or hang end no other"
