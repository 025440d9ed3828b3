#!/bin/sh
# scripts/bench_device.sh BUILD WORK [LAYERS [PART]]: layers of real size on a GPU, from the files to HTTP. Makes M2 in block FP8 (6 layers: 24.5 GB)
# and two layers of M1 below WORK, which has room for three times that (/dev/shm measures the page cache without a disk), and prints, of PART
# first the first line alone, of PART load the first two,
#   exec to the first token (minimax-run, four times), with digests checked, and with weights that minimax-hold keeps: ok where the first token
#   came before 60 % of the bytes and the texts of one token and of eight are those of the held weights, which were all there; else FAIL
#   the same files by safetensors' load_file, where Python has it
#   decode through the scheduler compared with bare steps, with --batch-invariant, and over HTTP; a prompt of 32k tokens again compared with new
# `gpu bench load` has the ceilings of loading: pinned copies, reads alone, O_DIRECT.
set -u
cd "$(dirname "$0")/.." || exit 2
[ $# -ge 2 ] || { echo "usage: scripts/bench_device.sh BUILD WORK [LAYERS [first|load|all]]" >&2; exit 2; }
build=$1 work=$2 layers=${3:-6} part=${4:-all} failed=0
prompt='And it came to pass'

# make_model NAME QUANT OPTION…
make_model() {
  [ ! -e "$work/$1" ] || return 0
  name=$1 quant=$2
  shift 2
  python3 scripts/bench_checkpoint.py "$work/$name-source" "$@" || exit 1
  "$build"/tests/bench/bench_tokenizer "$work/$name-source/tokenizer.json" || exit 1
  "$build"/bin/minimax-convert "$work/$name-source" -o "$work/$name" --quant "$quant" -q || exit 1
}

# run WORDS TEXT OPTION…: seconds from exec to the end of one token, whose text goes to the file TEXT
run() {
  words=$1 text=$2
  shift 2
  start=$(date +%s.%N)
  timeout 300 "$build"/bin/minimax-run "$work/m2" --device cuda -n 1 -v -p "$prompt" "$@" 2>"$work/run.err" >"$text" || { cat "$work/run.err"; exit 1; }
  end=$(date +%s.%N)
  echo "$start $end" | awk -v words="$words" '{ printf "%s: %.2f s from exec to the end; ", words, $2 - $1 }'
  grep -o 'loaded .*, on' "$work/run.err" | tr '\n' ' '
  grep -o 'opened in .*' "$work/run.err"
  grep '^seconds' "$work/run.err" | sed 's/^/  /'
}

# row TEXT: ok or FAIL by the command before
row() {
  [ $? -eq 0 ] && word=ok || { word=FAIL failed=1; }
  echo "$word   $1"
}

mkdir -p "$work" || exit 1
make_model m2 none --layers "$layers" --experts 256 --vocab 200064
du -sh "$work/m2"
for i in 1 2 3 4; do
  run "read, $i" "$work/read-$i"
  grep -o 'with .* GB read ([0-9]* %)' "$work/run.err" | grep -o '([0-9]*' | awk -F'(' '{ n++; early = $2 < 60 } END { exit !(n && early) }'
  row "first token before 60 % of the bytes, run $i"
done
"$build"/bin/minimax-run "$work/m2" --device cuda -n 8 --ignore-eos -q -p "$prompt" >"$work/eight-read"
[ "$part" = first ] || run "read, digests checked" "$work/read-5" --verify-on-load
"$build"/bin/minimax-hold "$work/m2" "$work/hold.sock" -q &
holder=$!
i=0
while [ ! -S "$work/hold.sock" ] && [ $i -lt 600 ] && kill -0 $holder; do
  sleep 0.1
  i=$((i + 1))
done
for i in 1 2 3; do run "attached, $i" "$work/held" --attach "$work/hold.sock"; done
"$build"/bin/minimax-run "$work/m2" --device cuda -n 8 --ignore-eos -q -p "$prompt" --attach "$work/hold.sock" >"$work/eight-held"
kill $holder
wait $holder
for text in "$work"/read-[1-5]; do
  cmp "$text" "$work/held"
  row "${text##*/}: the token of weights that were all there"
done
cmp "$work/eight-read" "$work/eight-held" && [ -s "$work/eight-held" ]
row "eight tokens, the first of them while weights arrived: those of weights that were all there"
[ "$part" != first ] || exit $failed
python3 -c 'import safetensors.torch' 2>"$work/python.err" && python3 - "$work"/m2-source/*.safetensors <<'P'
import sys, time, torch
from safetensors.torch import load_file
torch.zeros(1).cuda()
torch.cuda.synchronize()
start = time.monotonic()
kept = [load_file(f, device="cuda") for f in sys.argv[1:]]
torch.cuda.synchronize()
took = time.monotonic() - start
size = sum(t.numel() * t.element_size() for file in kept for t in file.values())
print(f"safetensors load_file: {size / 1e9:.1f} GB in {took:.2f} s, {size / took / 1e9:.1f} GB/s")
P
[ "$part" != load ] || exit $failed
INVARIANT=1 "$build"/tests/bench/bench_scheduler "$work/m2" cuda 64 1024 1024
VENV=${VENV:-} python3 tests/bench/serve.py "$build" "$work/m2" cuda 64 1024 1024
"$build"/tests/bench/bench_reuse "$work/m2" cuda 32768 8192
make_model m1 block_fp8 --m1 --layers 2 --vocab 200064
"$build"/tests/bench/bench_reuse "$work/m1" cuda 32768 8192
exit $failed
