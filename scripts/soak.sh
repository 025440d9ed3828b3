#!/bin/sh
# One part of `make soak`: scripts/soak.sh PART. BUILD is the build folder; the part's log is BUILD/soak/PART.log, and what it prints the last
# line of each program in it: the figures.
#   clang    unit tests built by clang at -O2, without sanitizers
#   calls    each system call of a conversion fails, each occurrence, each errno, and it is killed there
#   alloc    each allocation of each program fails
#   kill     kill -9 at random moments
#   resume   runs of changing options over one output, interrupted at random, journals altered between them
#   sequences  chains of conversions (cut again, to Hugging Face names and back, packed twice, archived), interrupted and resumed
#   believed  manifests with one value changed and sealed again: refused, or read as before
#   power    states of a disk after power failed
#   races    two programs and a user at one name, stopped at random calls
#   flips    every bit of a small packed checkpoint, random bits of a larger one
#   mutations  5,000 packed checkpoints with changes resealed, through every program that reads one, with sanitizers (make check-san builds them)
#   mpi      several processes, one of them killed: of a conversion, of a run
#   speed    conversions of GB (9) of block FP8 and twice that of BF16 compared with cp and the disk; hashing's share (60 GB of disk)
#   memory   peak memory of a conversion far larger than its limit
#   layer    one real-size layer of M1 and of M2, converted and verified against its source (17 GB of disk; LAYER=m2: 8 GB)
#   schedules  100 times SCALE random steps of the engine on each cut and model, compared with the oracle of test_schedules
#   scheduler  SCALE times the random requests of the scheduler's unit tests
#   serve    64 streams for SERVE_SECONDS (600), a good client among 1,000 slow connections, 100 times SCALE mutated requests, two servers of which one
#            is killed, and random requests
#            of which each must get what it gets alone
#   fuzz     inputs to each fuzz target until tests/fuzz/RUNS.md counts FUZZ_RUNS (100,000,000), at most FUZZ_LIMIT seconds (14,400)
# SCALE=N (100) does N percent of the cases of each part but mpi, speed, memory, layer and fuzz. SOAK_DIR is where they write (BUILD/soak/tmp); on a tmpfs they are faster.
set -u
part=$1 scale=${SCALE:-100}
log=$BUILD/soak/$part.log
mkdir -p "$BUILD/soak"
TMPDIR=${SOAK_DIR:-$BUILD/soak/tmp}/$part.$$
mkdir -p "$TMPDIR"
trap 'rm -rf "$TMPDIR"' EXIT
trap 'exit 130' INT TERM
export TMPDIR BUILD PATH="$BUILD/bin:${VENV:-build/venv}/bin:$PATH" FUZZ_RUNS="${FUZZ_RUNS:-100000000}" FUZZ_LIMIT="${FUZZ_LIMIT:-14400}"
convert=$BUILD/bin/minimax-convert tiny=tests/data/tiny-m2
every=$(((99 + scale) / scale))
archive="--tp 2 --quant block_fp8 --part-size 4M --compress zstd"

random() { od -An -N4 -tu4 /dev/urandom | tr -d ' '; }

# Prints what it runs, then runs it: python3 tests/fault/NAME ARGUMENTS.
fault() {
  echo "\$ $*"
  name=$1
  shift
  python3 "tests/fault/$name" "$@"
}

# A server with sanitizers where make check-san built one.
hostile() {
  seed=${SERVE_SEED:-$(random)}
  [ ! -x "$BUILD/san/bin/minimax-serve" ] || BUILD=$BUILD/san
  echo "$ BUILD=$BUILD SERVE_MUTATIONS=$1 SERVE_AFTER=1 SERVE_SEED=$seed serve_hostile.py"
  SERVE_MUTATIONS=$1 SERVE_AFTER=1 SERVE_SEED=$seed python3 tests/cli/serve_hostile.py
}

run() {
  case $part in
    clang) (unset MAKELEVEL MAKEFLAGS MAKEOVERRIDES MFLAGS && make -k BUILD="${BUILD#"$PWD"/}" check-clang) ;;
    calls)
      fault torture.py "$convert" $tiny --every $every && fault torture.py "$convert" $tiny --every $every --resumed && fault torture.py "$convert" $tiny --every $every --kill &&
        fault torture.py "$convert" $tiny --every $((4 * every)) --options "--compress zstd" ;;
    alloc) fault alloc.py --every $every ;;
    kill)
      fault kill.py "$convert" tests/data/tiny-m1 $(((scale + 1) / 2)) -- $archive && fault kill.py "$convert" $tiny $((5 * scale)) &&
        fault follow.py "$convert" $scale && fault follow_disk.py "$convert" ;;
    resume) fault resume_options.py $((20 * scale)) ;;
    sequences) fault sequences.py $((20 * scale)) "$(random)" ;;
    believed) fault believed.py $((20 * scale)) "$(random)" ;;
    power)
      fault power.py "$convert" $tiny $((2 * scale)) --options "--compress zstd" && fault power.py "$convert" $tiny $((20 * scale)) &&
        fault power.py "$convert" tests/data/tiny-m2 $((5 * scale)) --follow ;;
    races) fault races.py $((5 * scale)) ;;
    flips) FLIPS=$((100 * scale)) fault flips.py ;;
    mutations) MUTATIONS=$((50 * scale)) fault mutations.py ;;
    mpi) sh tests/fault/shares.sh && sh tests/fault/processes.sh ;;
    speed) python3 scripts/bench_convert.py "$BUILD/bin" --gb "${GB:-9}" ;;
    memory) python3 scripts/bench_memory.py "$convert" --gb "${GB:-4}" ;;
    serve) fault serve_load.py "${SERVE_SECONDS:-600}" && fault serve_sequences.py $((50 * scale)) "$(random)" && SOAK=$(((19 + scale) / 20)) python3 tests/cli/serve_split.py && fault serve_split_faults.py $((2 * scale)) "$(random)" && hostile $((100 * scale)) ;;
    layer) sh scripts/real_layer.sh "${LAYER:-both}" ;;
    schedules) echo "$ STEPS=$((100 * scale)) test_schedules" && STEPS=$((100 * scale)) "$BUILD/tests/unit/runtime/test_schedules" ;;
    scheduler)
      for t in scheduler ahead drafts transfer offload; do
        echo "$ ROUNDS=$scale test_$t"
        ROUNDS=$scale "$BUILD/tests/unit/runtime/test_$t" || return 1
      done ;;
    fuzz) scripts/fuzz_runs.sh "$BUILD" ;;
    *) echo "no such part: $part"; return 2 ;;
  esac
}

start=$(date +%s)
run >"$log" 2>&1 </dev/null
status=$?
figures=$(awk '/^\$ / { if (last) print last; last = ""; next } { last = $0 } END { print last }' "$log" | paste -sd ';' | sed 's/;/; /g')
printf '%-6s %6d s  %s\n' "$part" $(($(date +%s) - start)) "$figures"
[ $status -eq 0 ] || { echo "soak-$part: exit status $status, log: $log" >&2; exit 1; }
