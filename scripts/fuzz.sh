#!/bin/sh
# One libFuzzer run: scripts/fuzz.sh BUILD fuzz_NAME SECONDS [-OPTION=VALUE…]. Starts from the saved inputs in tests/fuzz/corpus/NAME, keeps
# what it finds in FUZZ_CORPUS/NAME (BUILD/corpus) and a crashing input in BUILD. The last line says how many inputs were run.
set -eu
build=$1 program=$2 seconds=$3
shift 3
name=${program#fuzz_}
saved=tests/fuzz/corpus/$name corpus=${FUZZ_CORPUS:-$build/corpus}/$name
mkdir -p "$corpus"
[ -n "$(ls "$saved" 2>/dev/null)" ] || { echo "$saved: no saved inputs to start from"; exit 1; }
dict=
[ ! -f "tests/fuzz/$name.dict" ] || dict=-dict=tests/fuzz/$name.dict
# Half the time of an input, or more, went into freed memory that is kept for long, into stacks of allocations, and into giving memory back and
# getting it again. A stack is had by running the input that is reported.
export ASAN_OPTIONS="quarantine_size_mb=8:thread_local_quarantine_size_kb=64:malloc_context_size=0:allocator_release_to_os_interval_ms=-1:${ASAN_OPTIONS-}"
"$build/tests/fuzz/$program" -runs=0 "$saved" >"$build/$name.log" 2>&1 &&
  "$build/tests/fuzz/$program" -max_total_time="$seconds" -max_len=16384 -timeout=5 -rss_limit_mb=2048 -malloc_limit_mb=512 -reload=0 \
    -print_final_stats=1 -artifact_prefix="$build/$name-" $dict "$@" "$corpus" "$saved" >"$build/$name.log" 2>&1 ||
  { tail -n 60 "$build/$name.log"; exit 1; }
sed -n 's/^stat::number_of_executed_units: */inputs run without a finding: /p' "$build/$name.log"
