#!/bin/sh
# scripts/gpu.sh BUILD [PART ...]: all tests that need a GPU, with the programs in BUILD, which may come from another machine. Every part has
# a budget of wall time and runs whatever became of those before it. One line for each row that is held to a limit, of hundreds those that
# fail, a line for each part, and a last one. Logs: BUILD/gpu/PART.log.
#
#   prepare    the checkpoints that others read, by the CPU alone: BUILD/gpu/models and /ranks; kept if they are there. NAME_head: the
#              head in 8 bits; nvfp4a16 comes last, so that parts find the others in the same folders
#   peers      streams of ranks that share a GPU, whose kernels run at the same time; sums over ranks, and rows between groups of them, bit for bit; index keys of MiniMax-M3 scanned in parts, one for each rank: the blocks of the whole scan; ranks that do not come; inputs rounded under scales of rows that are cut
#   forks      slots: forked, restored, chunks, page borders; schedules of MM_STEPS (10,000) steps among poison; 10,000 draws; scores; of
#              MiniMax-M3 too
#   invariant  --batch-invariant: every row's bits the same alone and in a crowd, both models in every scheme
#   verify     rows of proposals: each one's logits those of a single token in a step of as many rows, bit for bit, recorded and not; M2 and M3; random requests to two servers
#              with --batch-invariant, of which one has proposals: the same replies; a DFlash draft's blocks compared with the CPU's, recorded and not, on two and eight ranks too
#   four       four ranks on two GPUs or one: a draft's blocks and chains compared with the CPU's; servers that propose by DFlash, EAGLE-3 and lookup: the replies without
#   steps      recorded steps, warming, refusals
#   ranks      checkpoints cut for two to eight ranks, --ep, --pp and --attn-tp among them, compared with one rank and the CPU; a rank that fails; MM_STEPS (10,000)
#              steps after which the ranks of a stage hold the same rows; rows between groups as codes: the logits of rows as they are, bit for bit
#   processes  ranks of a stage in processes of their own (mpirun, NCCL, two GPUs, a build with MPI=1): the logits and texts of one process
#              to the bit
#   lost       such a process that is killed, stopped or finds no NCCL; tokens/s of two compared with one
#   load       what is loaded, bit for bit; short and changed files, digests; a damaged checkpoint that is checked, and served
#   hold       minimax-hold: the same text from held weights, after users that were killed, of two ranks; others' weights are refused;
#              a server whose holder is killed while it streams ends with its error
#   capacity   minimax-serve with its defaults: memory in use is at most 90 % of each GPU's, two starts have the same KV cache, and that is what
#              minimax-convert --gpu-memory says; a sequence, or --kv-cache-tokens, that does not fit is refused in time
#   eval       minimax-eval: the likelihood of held-out text on the GPU within 2e-3 of the CPU's, every scheme, both models; with inputs
#              rounded, which a last bit may turn, the mean over windows within 2e-3 and three of its standard errors
#   collect    minimax-eval --collect: sums over inputs on the GPU compared with the CPU's, in chunks of 33 tokens and 1; rounded inputs are seen as
#              they were before
#   kernels    each kernel compared with doubles
#   sequences  random steps of random models compared with doubles
#   models     both models in every scheme compared with the CPU (four processes)
#   text       minimax-run: the same text on both devices from weights as stored or bf16; of others a difference is shown
#   extended   MiniMax-M3 (tests/data/tiny-m3-random, random ids): every op compared with the CPU's on the GPU's own numbers, blocks forced where near
#              ties make them others; chunks, recorded steps and queued choices bit for bit; a sequence of its own longer than its blocks gives the
#              CPU's likelihood within 0.05
#   start      by name alone: a process that loads every kernel, with an empty cache of translated PTX and with a full one (limit 2 s); device
#              memory that is left with all kernels loaded and with none; which code runs
#   speed      decode steps compared with the copy rate; a mixed step at most 1.10 times its two parts as steps
#
# GPUs of CUDA_VISIBLE_DEVICES are a rank each as far as there are some; else ranks share them. BUDGET=N gives each part N percent of its
# time (100). MM_TEST_SMEM=N: blocks of all programs have N KiB of shared memory (99: sm_86, 89 and 120; 163: sm_80); code of sm_90a refuses
# to run then. MM_TEST_NO_PEER=1: ranks of one process write to host memory. MM_SEED=N repeats the random numbers of a run of that seed.
# Exit status 1 after a failure, 77 without a GPU.
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 2
[ $# -gt 0 ] || { echo "usage: scripts/gpu.sh BUILD [PART ...]" >&2; exit 2; }
build=$1 work=$1/gpu
shift
parts=${*:-prepare peers forks invariant verify four steps ranks processes lost load hold capacity eval collect kernels sequences models extended text speed}
schemes='none bf16 block_fp8 channel_fp8 tensor_wise_fp8 w4a16 w4afp8 w4a8 nvfp4 mxfp4 mxfp8'
prompt='And it came to pass, that the king said unto his servant, What'
gpu=$build/tests/ops/gpu
mkdir -p "$work"

# row STATUS TEXT: a line of its own.
row() {
  printf '%-4s %s\n' "$1" "$2"
}

prepare() {
  i=0
  for name in $(for model in tiny-m1 tiny-m2; do printf "$model-%s " $schemes; done) tiny-m1-nvfp4a16 tiny-m2-nvfp4a16; do
    to=$work/models/$((i % 4))/$name
    mkdir -p "$work/models/$((i % 4))"
    i=$((i + 1))
    [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/"${name%-*}" -o "$to" --quant "${name##*-}" -q || row FAIL "prepare: $to"
  done
  # A head in 8 bits, with products of codes and with 4-bit experts.
  for pair in 2/tiny-m1-block_fp8 3/tiny-m2-w4a16; do
    to=$work/models/${pair}_head model=${pair#*/}
    [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/"${model%-*}" -o "$to" --quant "${model##*-}" --head block_fp8 -q || row FAIL "prepare: $to"
  done
  mkdir -p "$work/ranks"
  # Experts of M2's own width: eight ranks have 192 rows each. 2,112 ids: of an 8-bit head two ranks have scales for 32 rows, eight for 8.
  wide=$work/tiny-m2-wide
  [ -e "$wide" ] || python3 scripts/bench_checkpoint.py "$wide" --layers 2 --experts 16 --hidden 1024 --inter 1536 --heads 16 --vocab 2112 >"$work/wide.log" ||
    row FAIL "prepare: $wide"
  for source in tests/data/tiny-m1 tests/data/tiny-m2 tests/data/tiny-m3-random "$wide"; do
    for scheme in bf16 block_fp8 w4a16 nvfp4 w4a16_head channel_fp8 tensor_wise_fp8 w4afp8 w4a8 mxfp4 mxfp8; do
      case ${source##*/}-$scheme in tiny-m3-random-bf16 | tiny-m3-random-channel_fp8) ;; tiny-m3-*) continue ;; esac
      case $scheme in *_head) [ "$source" = "$wide" ] || continue; head='--head block_fp8' ;; *) head='' ;; esac
      for tp in 1 2 8; do
        [ "$tp-${source##*/}" != 8-tiny-m3-random ] || continue # 28 columns of a dense layer on each rank: refused by name
        case $tp-$scheme in 8-channel_fp8 | 8-tensor_wise_fp8 | 8-w4afp8 | 8-w4a8 | 8-mx*) continue ;; esac
        [ "${source##*/}-$scheme-$tp" != tiny-m2-nvfp4-8 ] || continue # eight columns of a group of 16 on each rank: refused by name
        to=$work/ranks/${source##*/}-$scheme-$tp
        [ -e "$to" ] || "$build"/bin/minimax-convert "$source" -o "$to" --tp $tp --quant "${scheme%_head}" $head -q || row FAIL "prepare: $to"
      done
    done
  done
  # Groups of attention: dpG has G groups of one rank each, dpGtpN G groups of N ranks in all; ep2: ranks with experts of their own, pp2:
  # stages. On four ranks tiny-m3's experts have 12 columns each: refused by name.
  for name in tiny-m1-bf16 tiny-m1-nvfp4 tiny-m2-bf16 tiny-m2-block_fp8 tiny-m2-nvfp4 tiny-m2-channel_fp8 tiny-m3-random-bf16 tiny-m2-wide-block_fp8 tiny-m2-wide-bf16; do
    source=tests/data/${name%-*}
    case $name in *-wide-block_fp8) cuts='dp2 dp2tp4 dp2ep2' source=$wide ;; *-wide-*) cuts='dp2 dp2tp4' source=$wide ;; tiny-m3-*) cuts=dp2 ;; tiny-m1-bf16) cuts='dp2 dp2tp4 dp8 dp2pp2' ;; tiny-m2-block_fp8) cuts='dp2 dp2tp4 dp2ep2' ;; *) cuts='dp2 dp2tp4' ;; esac
    for cut in $cuts; do
      case $cut in dp2) how='--tp 2 --attn-tp 1' ;; dp2ep2) how='--tp 2 --attn-tp 1 --ep 2' ;; dp2pp2) how='--tp 2 --attn-tp 1 --pp 2' ;; dp8) how='--tp 8 --attn-tp 1' ;; *) how='--tp 4 --attn-tp 2' ;; esac
      to=$work/ranks/$name-$cut
      [ -e "$to" ] || "$build"/bin/minimax-convert "$source" -o "$to" $how --quant "${name##*-}" -q || row FAIL "prepare: $to"
    done
  done
  # Ranks with experts of their own, and stages: of one rank, and of two. Experts' columns in whole blocks, of which other ranks have a part.
  for name in tiny-m1-bf16 tiny-m1-nvfp4 tiny-m2-block_fp8 tiny-m2-w4a16 tiny-m2-channel_fp8 tiny-m2-wide-block_fp8; do
    source=tests/data/${name%-*}
    case $name in *-wide-*) cuts=pad8 source=$wide ;; *-channel_fp8) cuts='ep2pp2 pad2' ;; *) cuts='ep2 pp2 tp2pp2 ep2pp2 ep2placed ep2pp2placed' ;; esac
    for cut in $cuts; do
      case $cut in ep2 | ep2placed) how='--tp 2 --ep 2' ;; pp2) how='--pp 2' ;; tp2pp2) how='--tp 2 --pp 2' ;; ep2pp2*) how='--tp 4 --ep 2 --pp 2' ;; *) how="--tp ${cut#pad} --tp-align pad" ;; esac
      case $cut in *placed) how="$how --place $work/$name-load.json" ;; esac
      to=$work/ranks/$name-$cut
      [ -e "$to" ] || "$build"/bin/minimax-convert "$source" -o "$to" $how --quant "${name##*-}" -q || row FAIL "prepare: $to"
      [ "$cut" != ep2 ] || python3 scripts/placement.py --sample "$to" --alpha 1 >"$work/$name-load.json"
    done
  done
}

# soon PID COMMAND …: waits until the command succeeds, while the process runs, a minute at most; i: tenths of seconds
soon() {
  pid=$1 i=0
  shift
  while ! "$@" && [ $i -lt 600 ] && kill -0 "$pid" 2>"$work/kill.err"; do
    sleep 0.1
    i=$((i + 1))
  done
}

# held CHECKPOINT DEVICES: a holder of it at $socket, as $holder
held() {
  socket=$work/hold.sock
  rm -f "$socket"
  "$build"/bin/minimax-hold "$1" "$socket" --devices "$2" 2>"$work/holder.err" &
  holder=$!
  soon $holder [ -S "$socket" ]
}

# hold_row CHECKPOINT OTHER DEVICES
hold_row() {
  name=${1##*/}
  answer() { timeout 60 "$build"/bin/minimax-run "$1" --device cuda --devices "$2" -n 24 -p "$prompt" -v $3 2>"$work/hold.err"; }
  answer "$1" "$3" '' >"$work/hold-read.txt"
  held "$1" "$3"
  for i in 1 2 3; do
    "$build"/bin/minimax-run "$1" --device cuda --devices "$3" --attach "$socket" -n 4000 --ignore-eos -q -p "$prompt" >"$work/hold-long.txt" 2>&1 &
    user=$!
    answer "$1" "$3" "--attach $socket" >"$work/hold-$i.txt"
    kill -9 $user 2>"$work/kill.err"
    wait $user 2>"$work/kill.err"
    cmp -s "$work/hold-read.txt" "$work/hold-$i.txt" && [ -s "$work/hold-$i.txt" ] && status=ok || status=FAIL
    row $status "hold $name, user $i of a killed one's weights: the text of its own load; $(grep -o 'opened in .*' "$work/hold.err")"
  done
  answer "$2" "$3" "--attach $socket" >"$work/hold-other.txt"
  found=$?
  [ $found -eq 4 ] && grep -q E_HELD "$work/hold.err" && status=ok || status=FAIL
  row $status "hold $name: ${2##*/} is refused: $(tail -n 1 "$work/hold.err")"
  kill $holder
  wait $holder
  found=$?
  [ $found -eq 0 ] && [ ! -e "$socket" ] && status=ok || status=FAIL
  row $status "hold $name: the holder ends with $found: $(grep ready "$work/holder.err")"
}

# orphan_row CHECKPOINT DEVICES: a server whose holder is killed while a reply streams says so in it, and ends without another request.
orphan_row() {
  name=${1##*/}
  held "$1" "$2"
  "$build"/bin/minimax-serve "$1" --device cuda --devices "$2" --attach "$socket" --port 0 2>"$work/orphan.log" &
  server=$!
  soon $server grep -q 'ready after' "$work/orphan.log"
  python3 - "$(sed -n 's/.*listening on //p' "$work/orphan.log")" $holder >"$work/orphan.txt" 2>&1 <<'END'
import os, signal, sys, urllib.request
body = b'{"prompt": "In", "max_tokens": 8000, "ignore_eos": true, "stream": true}'
reply = urllib.request.urlopen(sys.argv[1] + "/v1/completions", body, 30)
begins = reply.readline()
os.kill(int(sys.argv[2]), signal.SIGKILL)
print("error" if b'"error"' in reply.read() and b'"text"' in begins else "no error")
END
  wait $holder 2>"$work/kill.err"
  soon $server false
  kill -9 $server 2>"$work/kill.err"
  wait $server
  found=$?
  [ $found -eq 5 ] && [ $i -lt 150 ] && [ "$(cat "$work/orphan.txt")" = error ] && tail -n 1 "$work/orphan.log" | grep -q E_HELD && status=ok || status=FAIL
  row $status "hold $name: a server whose holder is killed ends with $found after $((i / 10)) s, a stream got $(tail -n 1 "$work/orphan.txt"): $(tail -n 1 "$work/orphan.log")"
}

hold_part() {
  hold_row "$work/models/2/tiny-m1-block_fp8" "$work/models/1/tiny-m2-block_fp8" 0
  hold_row "$work/models/3/tiny-m2-nvfp4" "$work/models/0/tiny-m1-nvfp4" 0
  if [ "$devices" -gt 1 ]; then pair=0,1; else pair=0,0; fi
  hold_row "$work/ranks/tiny-m2-w4a16-2" "$work/ranks/tiny-m2-bf16-2" $pair
  orphan_row "$work/models/2/tiny-m1-block_fp8" 0
  orphan_row "$work/models/3/tiny-m2-nvfp4" 0
}

# started CHECKPOINT RANKS: a server with its defaults; what it logs of its cache in $work/capacity.txt, of its GPUs' memory the largest share
started() {
  "$gpu" memory >"$work/memory-before.txt"
  "$build"/bin/minimax-serve "$1" --device cuda --port 0 2>"$work/capacity.log" &
  server=$!
  soon $server grep -q 'ready after' "$work/capacity.log"
  "$gpu" memory >"$work/memory.txt"
  kill $server
  wait $server
  sed -n 's/.*KV cache: \([0-9]*\) tokens.*/\1/p' "$work/capacity.log" >"$work/capacity.txt"
  paste "$work/memory-before.txt" "$work/memory.txt" | awk -v ranks="$2" '$2 < ranks { s = ($3 - $7) / $4; if (s > most) most = s } END { printf "%.4f", most }'
}

# capacity_row SOURCE RANKS: more cache is wanted than there is memory for.
capacity_row() {
  checkpoint=$work/capacity-$2
  [ -e "$checkpoint" ] || "$build"/bin/minimax-convert "$1" -o "$checkpoint" --tp "$2" --quant bf16 -q || row FAIL "capacity: $checkpoint"
  share=$(started "$checkpoint" "$2")
  first=$(cat "$work/capacity.txt")
  again=$(started "$checkpoint" "$2")
  total=$(awk 'NR == 1 || $4 < least { least = $4 } END { printf "%.0f", least }' "$work/memory.txt")
  planned=$("$build"/bin/minimax-convert "$1" --tp "$2" --quant bf16 --dry-run --json --gpu-memory "$total" | sed -n 's/.*"kv_tokens": *\([0-9]*\).*/\1/p')
  # Large GPUs have room for the most that 16 sequences can use; any share of their memory is right then.
  least=0.8
  [ "$first" != $((16 * 196608)) ] || least=0
  awk -v a="$share" -v b="$again" -v least=$least 'BEGIN { exit !(a > least && a <= 0.9 && b > least && b <= 0.9) }' && status=ok || status=FAIL
  row $status "capacity of $2 GPU(s): $share and $again of the memory in use (limit 0.9): $(tail -n 1 "$work/capacity.log")"
  [ -n "$first" ] && [ "$first" = "$(cat "$work/capacity.txt")" ] && [ "$first" = "$planned" ] && status=ok || status=FAIL
  row $status "capacity of $2 GPU(s): $first and $(cat "$work/capacity.txt") tokens of KV cache, minimax-convert says $planned"
}

capacity_part() {
  deep=$work/tiny-m2-deep
  [ -e "$deep" ] || python3 scripts/bench_checkpoint.py "$deep" --layers 12 --experts 16 --hidden 1024 --inter 1536 --heads 16 --vocab 2112 >"$work/deep.log" ||
    row FAIL "capacity: $deep"
  cp tests/data/tiny-m2/tokenizer.json "$deep"
  capacity_row "$deep" 1
  [ "$devices" -lt 2 ] || capacity_row "$deep" 2
  served 8 'a sequence that does not fit' "$work/capacity-1" --gpu-memory-utilization 0.05 --check
  grep -q 'E_MEMORY.*bytes of KV cache.*bytes free of.*--max-model-len' "$work/served.txt" && status=ok || status=FAIL
  row $status "capacity: the refusal says bytes wanted, bytes free and the option"
  served 8 'more tokens than there is memory for' "$work/capacity-1" --kv-cache-tokens 2000000000 --check
}

# served STATUS WHAT OPTION…: a server that ends by itself, with this exit status
served() {
  wanted=$1 what=$2
  shift 2
  timeout --kill-after=5 30 "$build"/bin/minimax-serve "$@" --device cuda --verify-on-load >"$work/served.txt" 2>&1
  found=$?
  [ $found -eq "$wanted" ] && status=ok || status=FAIL
  row $status "load: $what: $found, $(tail -n 1 "$work/served.txt")"
}

# One byte of the weights is another: who checks and who serves says so, without a request.
damaged_rows() {
  good=$work/models/1/tiny-m2-block_fp8 bad=$work/damaged
  rm -rf "$bad"
  cp -r "$good" "$bad"
  part=$(find "$bad" -name '*part-00000.safetensors')
  printf '\276' | dd of="$part" bs=1 seek=3000000 conv=notrunc 2>"$work/dd.txt"
  served 0 'a good checkpoint is checked' "$good" --check
  served 6 'a damaged one is checked' "$bad" --check
  served 6 'a damaged one is served' "$bad" --port 0
}

# The likelihood of each window, a line each: nll CHECKPOINT MODEL DEVICE WINDOWS OPTION…
nll() {
  checkpoint=$1 model=$2 device=$3 windows=$4
  shift 4
  "$build"/bin/minimax-eval "$checkpoint" --device "$device" --ids tests/data/"$model"/held-out-ids.json --window 512 --limit "$windows" --json -q "$@" |
    sed -n 's/.*"window_nll":\[\(.*\)\].*/\1/p' | tr ',' '\n'
}

# eval_row NAME ERRORS CHECKPOINT MODEL WINDOWS OPTION…: both devices; standard errors of the windows' differences that the limit grows by
eval_row() {
  title=$1 errors=$2
  shift 2
  checkpoint=$1 model=$2
  shift 2
  nll "$checkpoint" "$model" cpu "$@" >"$work/cpu.nll"
  nll "$checkpoint" "$model" cuda "$@" >"$work/cuda.nll"
  paste "$work/cpu.nll" "$work/cuda.nll" | awk -v name="$title" -v errors="$errors" -v windows="$1" '
    NF == 2 { n++; cpu += $1; cuda += $2; d = $2 - $1; sum += d; squares += d * d }
    END {
      if (n) { mean = sum / n; apart = mean < 0 ? -mean : mean; cpu /= n; cuda /= n }
      if (n > 1) error = sqrt((squares > n * mean * mean ? squares - n * mean * mean : 0) / (n - 1) / n)
      limit = 2e-3 + errors * error
      printf "%-4s eval %s: nll %.6f on the GPU, %.6f on the CPU, off by %.1e (limit %.1e), standard error %.1e, %d windows\n",
             n == windows && apart <= limit ? "ok" : "FAIL", name, cuda, cpu, apart, limit, error, n }'
}

eval_part() {
  for checkpoint in "$work"/models/[0-3]/*; do
    name=${checkpoint##*/}
    model=${name%-*}
    eval_row "$name, act-quant off" 0 "$checkpoint" "$model" 4 --act-quant off
    eval_row "$name, act-quant on" 3 "$checkpoint" "$model" 32 --act-quant on # rounded where the device and the scheme can
  done
  [ "$devices" -gt 1 ] || return 0
  for checkpoint in "$work"/ranks/*-2; do
    name=${checkpoint##*/} model=${name%-*-2}
    case $name in tiny-m3-*) continue ;; esac # it has no text
    eval_row "$name, two GPUs" 0 "$checkpoint" "${model%-wide}" 4 --act-quant off
  done
}

# moments NAME CHECKPOINT MODEL DEVICE OPTION…: what it collects, in $work/collect-NAME.safetensors
moments() {
  to=$work/collect-$1.safetensors checkpoint=$2 model=$3 device=$4
  shift 4
  rm -f "$to"
  "$build"/bin/minimax-eval "$checkpoint" --device "$device" --ids tests/data/"$model"/held-out-ids.json --window 100 --limit 16 --collect "$to" -q "$@" >"$work/collect.txt"
}

collect_row() {
  title=$1
  shift
  moments cpu "$1" "$2" cpu --act-quant off
  moments cuda "$1" "$2" cuda --act-quant off --chunk 33
  python3 tests/ops/moments.py "$title" "$work/collect-cpu.safetensors" "$work/collect-cuda.safetensors" || row FAIL "collect $title: nothing to compare"
}

collect_part() {
  for checkpoint in "$work"/models/[0-3]/*; do
    name=${checkpoint##*/}
    case $name in *-none | *-block_fp8 | *-w4a16 | *-nvfp4 | *_head) collect_row "$name" "$checkpoint" "${name%-*}" ;; esac
  done
  if [ "$devices" -gt 1 ]; then
    for name in tiny-m1-bf16 tiny-m2-w4a16; do
      collect_row "$name, two GPUs" "$work/ranks/$name-2" "${name%-*}"
    done
  fi
  # Twice the same bits; and what the first product is given is the same whether it is rounded then or not.
  for checkpoint in "$work"/models/[0-3]/*-block_fp8; do
    name=${checkpoint##*/}
    for i in 1 2 3; do
      [ $i -lt 3 ] && on=off || on=on
      moments again-$i "$checkpoint" "${name%-*}" cuda --act-quant $on
    done
    cmp "$work/collect-again-1.safetensors" "$work/collect-again-2.safetensors" && status=ok || status=FAIL
    row $status "collect $name: twice the same bits"
    python3 tests/ops/moments.py --first "$work/collect-again-1.safetensors" "$work/collect-again-3.safetensors" && status=ok || status=FAIL
    row $status "collect $name: the first inputs are seen as they are before they are rounded"
  done
}

# many CHECKPOINT PROCESSES PROGRAM OPTION…: the program and so many processes less one with it, each with one rank, on two GPUs.
many() {
  packed=$1 count=$2 program=$3
  shift 3
  set -- -n 1 "$build/bin/$program" "$packed" --device cuda "$@"
  i=1
  while [ $i -lt "$count" ]; do
    set -- "$@" : -n 1 "$build/bin/minimax-worker" "$packed" --devices $((i % 2))
    i=$((i + 1))
  done
  timeout --kill-after=5 60 mpirun --oversubscribe --bind-to none "$@" </dev/null
}

# same_text CHECKPOINT PROCESSES DEVICES
same_text() {
  name=${1##*/}
  set -- "$1" "$2" "$3" -p "$prompt" -n 24 --temperature 0.8 --seed 5 --ignore-eos --act-quant off -q
  packed=$1 count=$2 list=$3
  shift 3
  "$build"/bin/minimax-run "$packed" --device cuda --devices "$list" "$@" >"$work/$name.one" 2>"$work/$name.err"
  many "$packed" "$count" minimax-run "$@" >"$work/$name.many" 2>>"$work/$name.err"
  cmp -s "$work/$name.one" "$work/$name.many" && [ -s "$work/$name.one" ] && status=ok || status=FAIL
  row $status "processes $name: $count processes draw one's text; $(tail -n 1 "$work/$name.err")"
}

# same_logits CHECKPOINT CHUNK: of two processes; every row of 60, fed in chunks of so many
same_logits() {
  name=${1##*/}-$2
  "$build"/bin/minimax-eval "$1" --device cuda --ids-from "$work/ids.safetensors" --logits "$work/$name.one" --chunk "$2" --act-quant off -q 2>"$work/$name.err"
  many "$1" 2 minimax-eval --ids-from "$work/ids.safetensors" --logits "$work/$name.many" --chunk "$2" --act-quant off -q 2>>"$work/$name.err"
  cmp "$work/$name.one" "$work/$name.many" >>"$work/$name.err" 2>&1 && [ -s "$work/$name.one" ] && status=ok || status=FAIL
  row $status "processes ${1##*/}: logits of two processes are one's, bit for bit, in chunks of $2; $(tail -n 1 "$work/$name.err")"
}

# fails WHAT SIGNAL PATTERN: the worker of a long run is sent a signal; the others say so within five seconds, and all end.
fails() {
  what=$1 signal=$2 pattern=$3
  rm -f "$work/worker.pid"
  : >"$work/long.txt"
  : >"$work/long.err"
  timeout --kill-after=5 60 mpirun --oversubscribe --bind-to none -n 1 "$build/bin/minimax-run" "$work/ranks/tiny-m2-bf16-2" --device cuda -p "$prompt" \
    -n 100000 --ignore-eos -q : -n 1 sh -c "echo \$\$ >$work/worker.pid; exec $build/bin/minimax-worker $work/ranks/tiny-m2-bf16-2 --devices 1" \
    >"$work/long.txt" 2>"$work/long.err" </dev/null &
  runs=$!
  i=0
  while [ "$(wc -c <"$work/long.txt")" -lt 200 ] && [ $i -lt 400 ] && kill -0 $runs 2>"$work/kill.err"; do
    sleep 0.1
    i=$((i + 1))
  done
  from=$(date +%s%N)
  kill "-$signal" "$(cat "$work/worker.pid")"
  took=0
  until grep -q -- "$pattern" "$work/long.err" || [ $took -gt 20000 ]; do
    sleep 0.05
    took=$((($(date +%s%N) - from) / 1000000))
  done
  wait $runs
  ended=$? all=$((($(date +%s%N) - from) / 1000000))
  [ $took -le 5000 ] && [ $ended -ne 0 ] && [ $ended -ne 124 ] && [ $all -lt 10000 ] && status=ok || status=FAIL
  row $status "lost: a worker that is $what is reported after $took ms (limit 5000), all end after $all (limit 10000) with $ended: $(grep -m 1 -- "$pattern" "$work/long.err")"
}

# Two GPUs, mpirun and programs built for it.
has_processes() {
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  [ "$devices" -gt 1 ] && command -v mpirun >"$work/mpirun.txt" && ldd "$build/bin/minimax-worker" | grep -q libmpi && return
  row -- "$1: nothing without two GPUs, mpirun and a build with MPI=1"
  return 1
}

processes_part() {
  has_processes processes || return 0
  python3 - "$work/ids.safetensors" <<'END'
import json, struct, sys
ids = [(i * i * 7 + i * 13) % 200 for i in range(60)]
head = json.dumps({"ids.a": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [0, 4 * len(ids)]}}).encode()
head += b" " * (-len(head) % 8)
open(sys.argv[1], "wb").write(struct.pack("<Q", len(head)) + head + struct.pack(f"<{len(ids)}i", *ids))
END
  # Three at a time: each takes seconds to start, and on the devices they are in each other's way.
  {
    for name in tiny-m1-bf16 tiny-m2-block_fp8 tiny-m2-w4a16; do same_logits "$work/ranks/$name-2" 1; done
    for name in tiny-m1-nvfp4 tiny-m2-w4a16; do same_logits "$work/ranks/$name-2" 60; done
  } &
  pids=$!
  for scheme in bf16 block_fp8 w4a16; do
    for model in tiny-m1 tiny-m2; do same_text "$work/ranks/$model-$scheme-2" 2 0,1; done
  done &
  pids="$pids $!"
  same_text "$work/ranks/tiny-m1-nvfp4-2" 2 0,1
  same_text "$work/ranks/tiny-m2-nvfp4-2" 2 0,1
  same_text "$work/ranks/tiny-m1-nvfp4-ep2" 2 0,1
  same_text "$work/ranks/tiny-m2-block_fp8-ep2" 2 0,1
  same_text "$work/ranks/tiny-m1-bf16-tp2pp2" 4 0,1,0,1
  same_text "$work/ranks/tiny-m2-w4a16-tp2pp2" 4 0,1,0,1
  for pid in $pids; do wait "$pid"; done
}

lost_part() {
  has_processes lost || return 0
  fails killed KILL 'signal 9'
  fails stopped STOP 'E_RANK'
  MM_NCCL_SO=/nothing many "$work/ranks/tiny-m2-bf16-2" 2 minimax-run -p x -q >"$work/none.txt" 2>&1
  ended=$?
  [ $ended -ne 0 ] && grep -q E_NCCL "$work/none.txt" && status=ok || status=FAIL
  row $status "lost: without NCCL: $ended, $(grep -m 1 E_NCCL "$work/none.txt")"
  name=tiny-m2-block_fp8
  set -- -p "$prompt" -n 400 --ignore-eos --act-quant off --json
  "$build"/bin/minimax-run "$work/ranks/$name-2" --device cuda --devices 0,1 "$@" >"$work/one.json" 2>"$work/one.err"
  many "$work/ranks/$name-2" 2 minimax-run "$@" >"$work/many.json" 2>"$work/many.err"
  row -- "lost $name, nothing lost: one process $(rate "$work/one.json") tokens/s, two $(rate "$work/many.json")"
}
rate() { python3 -c 'import json, sys; r = json.load(open(sys.argv[1])); print("%.0f" % (r["tokens"] / r["decode_s"]))' "$1"; }

models_part() {
  pids=''
  for part in 0 1 2 3; do
    MM_GPU_MODELS=$work/models/$part "$gpu" test models rounded >"$work/models-$part.log" 2>&1 &
    pids="$pids $!"
  done
  part=0
  for pid in $pids; do
    wait "$pid" || row FAIL "models: process $part ended with status $?: $(grep -v '^ok ' "$work/models-$part.log" | tail -n 1)"
    cat "$work/models-$part.log"
    part=$((part + 1))
  done
}

text_part() {
  for packed in "$work"/models/[0-3]/*; do
    for device in cpu cuda; do
      "$build"/bin/minimax-run "$packed" --device "$device" --act-quant off -n 24 -q -p "$prompt" >"$work/$device.txt" || row FAIL "text ${packed##*/}: $device"
    done
    if cmp -s "$work/cpu.txt" "$work/cuda.txt"; then
      row ok "text ${packed##*/}: the CPU's"
    else
      case $packed in *-none | *-bf16) status=FAIL ;; *) status=-- ;; esac
      row $status "text ${packed##*/}: $(tr '\n' ' ' <"$work/cuda.txt")| CPU: $(tr '\n' ' ' <"$work/cpu.txt")"
    fi
  done
}

forks_part() {
  mkdir -p "$work/forks"
  for scheme in none mxfp8; do
    to=$work/forks/tiny-m3-$scheme
    [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/tiny-m3-random -o "$to" --quant $scheme -q || row FAIL "forks: $to"
  done
  ended=0
  for models in models/0 forks; do
    MM_STEPS=${MM_STEPS:-10000} MM_GPU_MODELS=$work/$models "$gpu" test forks || ended=1
  done
  return $ended
}

extended_models() {
  mkdir -p "$work/extended"
  for scheme in none mxfp8 block_fp8 nvfp4 mxfp8_attention_nvfp4_experts; do
    to=$work/extended/tiny-m3-$scheme
    [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/tiny-m3-random -o "$to" --quant $scheme -q || row FAIL "extended: $to"
  done
}

extended_part() {
  extended_models
  MM_GPU_MODELS=$work/extended "$gpu" test extended
  ended=$?
  python3 - >"$work/extended-ids.json" <<'END'
import json
print(json.dumps([(i * i * 7 + i * 13 + i // 5) % 519 for i in range(1500)]))
END
  for index in auto fp8; do
    for device in cpu cuda; do
      "$build"/bin/minimax-eval "$work/extended/tiny-m3-none" --device $device --ids "$work/extended-ids.json" --window 300 --limit 4 --act-quant off --index-cache-dtype $index --json -q |
        sed -n 's/.*"window_nll":\[\(.*\)\].*/\1/p' | tr ',' '\n' >"$work/extended-$device.nll"
    done
    paste "$work/extended-cpu.nll" "$work/extended-cuda.nll" | awk -v index_keys=$index '
      NF == 2 { n++; d += $2 - $1; cpu += $1 }
      END { d = n ? d / n : 9; d = d < 0 ? -d : d; printf "%-4s extended tiny-m3-none, index keys %s: nll %.4f on the CPU, off %.1e (limit 5e-2), %d windows\n", n == 4 && d <= 0.05 ? "ok" : "FAIL", index_keys, n ? cpu / n : 0, d, n }'
  done
  split_scan
  return $ended
}

# Two ranks on two GPUs that scan index keys in parts: the likelihoods of the whole scan, of single tokens, recorded.
split_scan() {
  [ "$devices" -gt 1 ] || { row -- "extended, two ranks: nothing without two GPUs"; return 0; }
  to=$work/extended-2/tiny-m3-bf16
  mkdir -p "$work/extended-2"
  [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/tiny-m3-random -o "$to" --tp 2 --quant bf16 -q || row FAIL "extended: $to"
  for index in auto fp8; do
    for split in 0 1 150; do
      "$build"/bin/minimax-eval "$to" --device cuda --ids "$work/extended-ids.json" --window 300 --limit 2 --chunk 1 --index-split $split --index-cache-dtype $index --json -q |
        sed -n 's/.*"window_nll":\[\(.*\)\].*/\1/p' >"$work/split-$split.nll"
    done
    [ -s "$work/split-0.nll" ] && cmp -s "$work/split-0.nll" "$work/split-1.nll" && cmp -s "$work/split-0.nll" "$work/split-150.nll" && status=ok || status=FAIL
    row $status "extended, two ranks, index keys $index: the scan in parts has the likelihoods of the whole one: $(cat "$work/split-1.nll")"
  done
}

speed_part() {
  "$build"/bin/minimax-bench mixed || row FAIL "speed: minimax-bench mixed ended with status $?"
  "$build"/bin/minimax-bench layers || row FAIL "speed: minimax-bench layers ended with status $?"
}

# start_ms: of a process that has every kernel loaded; sets `left` to the bytes that are free then
start_ms() {
  from=$(date +%s%N)
  left=$(CUDA_CACHE_PATH=$work/translated CUDA_CACHE_MAXSIZE=4294967296 CUDA_MODULE_LOADING=$1 "$gpu" memory | awk '$1 == "memory" && $2 == 0 { print $3 }')
  took=$((($(date +%s%N) - from) / 1000000))
}
start_part() {
  rm -rf "$work/translated"
  start_ms EAGER
  row -- "start, every kernel loaded: first $took ms, $left bytes of device memory left"
  start_ms EAGER
  [ "$took" -le 2000 ] && [ -n "$left" ] && status=ok || status=FAIL
  row $status "start, every kernel loaded: second $took ms (limit 2000)"
  start_ms LAZY
  row -- "start, no kernel loaded: $took ms, $left bytes of device memory left"
  "$build"/bin/minimax-run "$work"/models/1/tiny-m2-block_fp8 --device cuda -n 4 -p In 2>&1 >"$work/start.txt" | grep 'tokens at' | sed 's/.*, on /--   start: on /'
}

# servers NAME SECONDS DEVICES TEXT SCRIPT [ARGUMENT …]: a test of servers on these devices, in a folder of its own
servers() {
  name=$1 limit=$2 list=$3 text=$4
  shift 4
  mkdir -p "$work/$name"
  DEVICE=cuda DEVICES=$list BUILD=$build TMPDIR=$work/$name timeout "$limit" python3 "$@" >"$work/$name.txt" 2>&1 && status=ok || status=FAIL
  row $status "$text: $(tail -n 1 "$work/$name.txt")"
}

# Four ranks, two of them on each of two GPUs: blocks of drafts, servers with a draft of each kind, random requests to servers with and without.
four_part() {
  four=$work/four-ranks
  mkdir -p "$four"
  to=$four/tiny-m2-bf16-4
  [ -e "$to" ] || "$build"/bin/minimax-convert tests/data/tiny-m2 -o "$to" --tp 4 --quant bf16 -q || row FAIL "four: $to"
  [ "$devices" -gt 1 ] && four_on=0,0,1,1 || four_on=0,0,0,0
  servers four-draft 60 $four_on 'four: servers that propose by a draft' tests/cli/convert_draft.py 4
  for kind in dflash lookup eagle3 lookup-m1; do
    servers "four-$kind" 60 $four_on "four: random requests to servers with proposals by $kind and without" tests/fault/serve_sequences.py "${FOUR:-24}" 7 4 $kind
  done
  MM_GPU_MODELS=$four timeout 60 "$gpu" test draft
}

ranks_part() {
  [ "$devices" -gt 1 ] && pair=0,1 || pair=0
  [ "$devices" -lt 2 ] || servers run-groups 300 $pair 'ranks: --dp over checkpoints of --attn-tp' tests/cli/run_groups.py
  servers groups 120 $pair 'ranks: servers of groups of attention' tests/cli/serve_groups.py
  servers offload 120 $pair 'ranks: pages of groups of attention in host memory' tests/cli/serve_offload.py
  MM_GPU_RANKS=$work/ranks "$gpu" test ranks
}

verify_part() {
  extended_models
  ended=0
  for models in "$work/models/1" "$work/models/3" "$work/extended"; do MM_GPU_MODELS=$models "$gpu" test verify draft || ended=1; done
  mkdir -p "$work/draft-ranks"
  for cut in bf16-2 block_fp8-2 w4a16-ep2 bf16-8; do [ -d "$work/ranks/tiny-m2-$cut" ] && ln -sfn "$(realpath "$work/ranks/tiny-m2-$cut")" "$work/draft-ranks/tiny-m2-$cut"; done
  MM_GPU_MODELS=$work/draft-ranks "$gpu" test draft || ended=1
  [ "$devices" -gt 1 ] && pair=0,1 || pair=0,0
  servers draft 120 $pair 'verify: servers that propose by a draft, on one rank and two' tests/cli/convert_draft.py
  servers drafts 200 $pair 'verify: random requests to servers with proposals and without' tests/fault/serve_sequences.py 120
  return $ended
}

invariant_part() {
  for i in 0 1 2 3; do
    MM_GPU_MODELS=$work/models/$i "$gpu" test invariant >"$work/invariant-$i.log" 2>&1 ||
      row FAIL "invariant: process $i ended with status $?: $(grep -v '^ok ' "$work/invariant-$i.log" | tail -n 1)"
    cat "$work/invariant-$i.log"
  done
}

# Bench lines as rows: a mixed step has a limit, others none.
speed_rows() {
  awk '/ratio/ { printf "%-4s speed %s (limit 1.10)\n", $NF <= 1.10 ? "ok" : "FAIL", $0; next } /decode|copy/ { print "--   speed " $0 }'
}

run_part() {
  case $1 in
    prepare) prepare ;;
    start) start_part ;;
    peers) "$gpu" test peers cut across groups scan ;;
    forks) forks_part ;;
    invariant) invariant_part ;;
    verify) verify_part ;;
    four) four_part ;;
    steps) MM_GPU_MODELS=$work/models/0 "$gpu" test steps ;;
    ranks) ranks_part ;;
    processes) processes_part ;;
    lost) lost_part ;;
    load)
      MM_LOAD_DIR=$work MM_GPU_MODELS=$work/models/0 "$gpu" test load && damaged_rows # files that another run's tests may not find
      ;;
    hold) hold_part ;;
    capacity) capacity_part ;;
    eval) eval_part ;;
    collect) collect_part ;;
    kernels) "$gpu" test linear codes experts few shared widened mx attention blocks lightning rows choice edges ;;
    sequences) "$gpu" test sequences ;;
    models) models_part ;;
    text) text_part ;;
    extended) extended_part ;;
    speed) speed_part | speed_rows ;;
  esac
}

# Seconds that a part may take: on an H100 with 16 cores, twice what it is expected to, or more.
budget_of() {
  case $1 in
    prepare) echo 120 ;; start) echo 200 ;; peers) echo 200 ;; forks) echo 480 ;; invariant) echo 240 ;; verify) echo 240 ;; four) echo 300 ;; steps) echo 60 ;; ranks) echo 200 ;; processes) echo 200 ;; lost) echo 90 ;; load) echo 60 ;; hold) echo 120 ;; capacity) echo 120 ;; eval) echo 240 ;; collect) echo 90 ;;
    kernels) echo 360 ;; sequences) echo 90 ;; models) echo 180 ;; text) echo 120 ;; speed) echo 120 ;; extended) echo 300 ;;
    *) echo 0 ;;
  esac
}

# A part in a process of its own, which timeout can end with all that it started: scripts/gpu.sh BUILD --run PART.
if [ "${1:-}" = --run ]; then
  devices=$MM_GPU_COUNT
  # PyTorch's NCCL, where the dynamic linker finds none.
  if [ -z "${MM_NCCL_SO:-}" ] && ! ldconfig -p | grep -q libnccl.so.2; then
    MM_NCCL_SO=$(python3 -c 'import glob, site; print(*[p for d in site.getsitepackages() for p in glob.glob(d + "/nvidia/nccl/lib/libnccl.so.2")][:1])')
    export MM_NCCL_SO
  fi
  run_part "$2"
  exit
fi

"$gpu" count >"$work/count.log" 2>&1
[ $? -ne 77 ] || { cat "$work/count.log"; exit 77; }
MM_GPU_COUNT=$(awk '$1 == "devices" { print $2 }' "$work/count.log")
export MM_GPU_COUNT
cat "$work/count.log"

failed=0 rows=0
for part in $parts; do
  limit=$(budget_of "$part")
  [ "$limit" -gt 0 ] || { echo "FAIL part $part: there is none"; failed=$((failed + 1)); continue; }
  limit=$((limit * ${BUDGET:-100} / 100))
  log=$work/$part.log start=$(date +%s)
  timeout --kill-after=10 "$limit" scripts/gpu.sh "$build" --run "$part" >"$log" 2>&1 </dev/null
  status=$?
  took=$(($(date +%s) - start)) good=$(grep -c '^ok ' "$log") bad=$(grep -c '^FAIL' "$log")
  case $part in
    kernels | sequences | models) grep -E '^FAIL' "$log" ;; # hundreds of rows
    *) grep -E '^(ok|FAIL|--) ' "$log" ;;
  esac
  case $status in
    0) word=ok what='' ;;
    124 | 137) word=FAIL what=", over its budget" ;;
    *) word=FAIL what=", exit status $status: $(grep -v '^ok ' "$log" | tail -n 1)" ;;
  esac
  [ "$bad" -eq 0 ] || word=FAIL
  [ $word = FAIL ] || [ "$part" = prepare ] || grep -qE '^(ok|--) ' "$log" || word=FAIL what=', not one row'
  [ $word = ok ] || failed=$((failed + 1))
  rows=$((rows + good + bad))
  echo "$word part $part: $good of $((good + bad)) rows, $took of $limit s$what"
done
[ $failed -eq 0 ] && echo "gpu: all passed, $rows rows" || echo "gpu: FAILED, $failed part(s)"
[ $failed -eq 0 ]
