#!/bin/sh
# FUZZ_RUNS inputs to every fuzz target in BUILD, in as many processes as there are CPUs that share one corpus, at most FUZZ_LIMIT seconds each:
# scripts/fuzz_runs.sh BUILD. Prints how many were run and how fast; exit status 1 after a finding, or when time ran out before.
set -u
build=$1 status=0 total=0 targets=0 verdict="no finding"
export ASAN_OPTIONS=quarantine_size_mb=4:malloc_context_size=1 # half as fast again
cpus=$(nproc)
for program in "$build"/tests/fuzz/fuzz_*; do
  [ -x "$program" ] && [ -f "$program" ] || continue
  case $program in *.o | *.d) continue ;; esac
  name=${program##*/fuzz_}
  mkdir -p "$build/corpus/$name"
  dict=
  [ ! -f "tests/fuzz/$name.dict" ] || dict=-dict=tests/fuzz/$name.dict
  start=$(date +%s)
  for i in $(seq "$cpus"); do
    "$program" -runs=$(((FUZZ_RUNS + cpus - 1) / cpus)) -max_total_time="$FUZZ_LIMIT" -max_len=4096 -timeout=5 -rss_limit_mb=2048 -malloc_limit_mb=512 -reload=60 \
      -print_final_stats=1 -artifact_prefix="$build/$name-" $dict "$build/corpus/$name" "tests/fuzz/corpus/$name" >"$build/$name-$i.log" 2>&1 ||
      echo "$i" >"$build/$name-found" &
  done
  wait
  seconds=$(($(date +%s) - start))
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$name"-[0-9]*.log | awk '{ n += $1 } END { printf "%d", n }')
  echo "$name: $runs inputs in $seconds s, $((runs / (seconds + 1)))/s"
  [ ! -e "$build/$name-found" ] || { echo "$name: a finding, see $build/$name-*.log"; rm "$build/$name-found"; status=1 verdict="a FINDING"; }
  [ "$runs" -ge "$FUZZ_RUNS" ] || { status=1; [ "$verdict" != "no finding" ] || verdict="no finding, but time ran out"; }
  total=$((total + runs)) targets=$((targets + 1))
done
echo "fuzz: $total inputs to $targets targets, at least $FUZZ_RUNS wanted of each, $verdict"
exit $status
