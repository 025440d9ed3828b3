#!/bin/sh
# Ranks in several processes of mpirun: the text of one process, whatever is cut between them; a process that is killed, cannot open its
# checkpoint, has another one or is another build ends all of them in time; a server drains, and ends where its worker hangs.
set -eu
cd "$(dirname "$0")/../.."
if ! command -v mpirun >/dev/null || ! pkg-config --exists ompi-c; then
  echo "Open MPI is not installed, so mpirun was not tried"
  exit 77
fi
work=$(mktemp -d "${TMPDIR:-/tmp}/world.XXXXXX")
trap 'rm -rf "$work"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
make -s MPI=1 CUDA=0 SAN=0 BUILD="$BUILD/mpi" all >/dev/null
bin=$BUILD/mpi/bin
prompt='And it came to pass, that'

# many DIR WORKERS: the text of the first process and so many others.
many() {
  timeout -k 5 60 mpirun --oversubscribe -n 1 "$bin/minimax-run" "$1" -p "$prompt" -n 24 --temperature 0.8 --seed 5 -q --threads 1 : \
    -n "$2" "$bin/minimax-worker" "$1" --threads 1 </dev/null
}

for model in tiny-m1 tiny-m2; do
  while read -r name workers cut; do
    to=$work/$model-$name
    # shellcheck disable=SC2086
    [ -e "$to" ] || "$bin/minimax-convert" tests/data/$model -o "$to" --quant block_fp8 $cut -q
    "$bin/minimax-run" "$to" -p "$prompt" -n 24 --temperature 0.8 --seed 5 -q --threads 1 >"$work/one.txt"
    many "$to" "$workers" >"$work/many.txt"
    cmp "$work/one.txt" "$work/many.txt"
    echo "$model $cut, $((workers + 1)) processes: the text of one"
  done <<END
tp2 1 --tp 2
pp2 1 --pp 2
both 1 --tp 2 --pp 2
both 3 --tp 2 --pp 2
experts 3 --tp 4 --ep 2
END
done

# ends WHAT PATTERN COMMAND…: it fails within a minute, and says so.
ends() {
  what=$1 pattern=$2 status=0 began=$(date +%s)
  shift 2
  timeout -k 5 60 "$@" >"$work/out.txt" 2>&1 || status=$?
  [ $status -ne 0 ] && [ $status -ne 139 ] && [ $(($(date +%s) - began)) -lt 60 ] && grep -q -- "$pattern" "$work/out.txt" || { cat "$work/out.txt"; echo "FAIL $what: status $status"; exit 1; }
  echo "$what: status $status"
}
run="mpirun --oversubscribe -n 1 $bin/minimax-run $work/tiny-m2-tp2 -p x -q"
# shellcheck disable=SC2086
{
  ends "a checkpoint that is not there" E_ $run : -n 1 "$bin/minimax-worker" "$work/none"
  ends "another checkpoint" E_MPI $run : -n 1 "$bin/minimax-worker" "$work/tiny-m1-tp2"
  ends "a checkpoint of more ranks" E_MPI $run : -n 1 "$bin/minimax-worker" "$work/tiny-m2-both"
  [ $status -eq 6 ]
  ends "too many processes" E_PARALLEL $run : -n 2 "$bin/minimax-worker" "$work/tiny-m2-tp2"
  ends "a first one that only helps" E_MPI mpirun --oversubscribe -n 1 "$bin/minimax-run" --help : -n 1 "$bin/minimax-worker" "$work/tiny-m2-tp2"
  ends "a server that only says its version" E_MPI mpirun --oversubscribe -n 1 "$bin/minimax-serve" --version : \
    -n 1 "$bin/minimax-worker" "$work/tiny-m2-tp2"
  ends "a worker that only helps" E_MPI $run : -n 1 "$bin/minimax-worker" --help
  ends "two checkpoints compared" "nor with --against" mpirun --oversubscribe -n 1 "$bin/minimax-eval" "$work/tiny-m2-tp2" --text tests/data/held-out.txt \
    --against "$work/tiny-m2-pp2" : -n 1 "$bin/minimax-worker" "$work/tiny-m2-tp2"
  ends "no worker" E_MPI $run : -n 1 "$bin/minimax-run" "$work/tiny-m2-tp2" -p x -q
  ends "a worker that is killed" . mpirun --oversubscribe -n 1 "$bin/minimax-run" "$work/tiny-m2-tp2" -p x -q -n 100000 --ignore-eos : \
    -n 1 sh -c "timeout -s KILL 3 $bin/minimax-worker $work/tiny-m2-tp2"
}

# Where several processes fail at once one of them aborts: mpirun crashes or hangs now and then where more do.
one_aborts() { if grep 'more process.* mpi-abort' "$work/out.txt"; then exit 1; fi; }
run="mpirun --oversubscribe -n 1 $bin/minimax-run $work/tiny-m2-both -p x -q"
# shellcheck disable=SC2086
for _ in 1 2 3; do
  ends "workers without a checkpoint" E_FS_MISSING $run : -n 3 "$bin/minimax-worker" "$work/none"
  one_aborts
  ends "threads pinned to the same CPUs" E_LIMITS $run --pin --threads 1 : -n 3 "$bin/minimax-worker" "$work/tiny-m2-both" --threads 1
  one_aborts
done

# serves: starts a server of two processes; their ids lie in server.pid and worker.pid.
serves() {
  : >"$work/serve.txt"
  timeout -k 5 120 mpirun --oversubscribe -n 1 sh -c "echo \$\$ >$work/server.pid; exec $bin/minimax-serve $work/tiny-m2-both --port 0 --threads 1" : \
    -n 1 sh -c "echo \$\$ >$work/worker.pid; exec $bin/minimax-worker $work/tiny-m2-both" >"$work/serve.txt" 2>&1 &
  server=$!
  i=0
  until grep -q 'ready after' "$work/serve.txt"; do
    i=$((i + 1))
    [ $i -lt 300 ] && kill -0 $server || { cat "$work/serve.txt"; exit 1; }
    sleep 0.1
  done
  port=$(sed -n 's/.*listening on .*:\([0-9]*\)$/\1/p' "$work/serve.txt")
}
complete() { curl -sf "127.0.0.1:$port/v1/completions" -d "{\"prompt\": \"And it came\", \"max_tokens\": $1, \"ignore_eos\": true}"; }

serves
complete 2000 >"$work/reply.json" &
reply=$!
sleep 0.5
for signal in HUP ALRM USR1 USR2 PROF XCPU; do kill -s $signal "$(cat "$work/worker.pid")"; done
kill -s USR1 "$(cat "$work/server.pid")"
kill "$(cat "$work/server.pid")" "$(cat "$work/worker.pid")" # as launchers do
wait $reply
grep -q '"completion_tokens":2000' "$work/reply.json"
status=0
wait $server || status=$?
echo "a server of two processes that were signalled ended its reply, and then with status $status"
[ $status -eq 0 ]

serves
kill -s STOP "$(cat "$work/worker.pid")"
kill "$(cat "$work/server.pid")"
sleep 0.5
kill "$(cat "$work/server.pid")" 2>/dev/null
status=0
wait $server || status=$?
echo "two signals end a server whose worker hangs: status $status"
[ $status -eq 143 ]

timeout -k 5 90 mpirun --oversubscribe -n 1 sh -c "echo \$\$ >$work/run.pid; exec $bin/minimax-run $work/tiny-m2-both -p x -q -n 8000 --ignore-eos --threads 1" : \
  -n 1 sh -c "echo \$\$ >$work/worker.pid; exec $bin/minimax-worker $work/tiny-m2-both --threads 1" </dev/null >"$work/text.txt" 2>"$work/note.txt" &
runs=$!
until [ -s "$work/text.txt" ]; do sleep 0.1; done
kill -s STOP "$(cat "$work/worker.pid")"
sleep 25
kill "$(cat "$work/run.pid")"
status=0
wait $runs || status=$?
grep -q 'note: process 1: process 0 has waited 20 s' "$work/note.txt"
echo "a run whose worker hangs says so, and ends with its signal: status $status"
[ $status -eq 143 ]

run="mpirun --oversubscribe -n 1 $bin/minimax-run $work/tiny-m2-tp2 -p x -q"
make -s MPI=1 CUDA=0 SAN=0 BUILD="$BUILD/mpi" COMMIT=another "$BUILD/mpi/bin/minimax-worker" >/dev/null
# shellcheck disable=SC2086
ends "a worker of another build" "E_MPI: process 1: found a build of .*another" $run : -n 1 "$bin/minimax-worker" "$work/tiny-m2-tp2"
