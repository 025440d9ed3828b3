#!/bin/sh
# One libFuzzer run: scripts/fuzz.sh BUILD fuzz_NAME SECONDS. Starts from the saved inputs in tests/fuzz/corpus/NAME, keeps what it
# finds in BUILD/corpus/NAME and a crashing input in BUILD. The last line says how many inputs were run.
set -eu
build=$1 program=$2 seconds=$3
name=${program#fuzz_}
saved=tests/fuzz/corpus/$name
mkdir -p "$build/corpus/$name"
[ -n "$(ls "$saved" 2>/dev/null)" ] || { echo "$saved: no saved inputs to start from"; exit 1; }
dict=
[ ! -f "tests/fuzz/$name.dict" ] || dict=-dict=tests/fuzz/$name.dict
"$build/tests/fuzz/$program" -runs=0 "$saved"
"$build/tests/fuzz/$program" -max_total_time="$seconds" -max_len=16384 -timeout=5 -rss_limit_mb=2048 -malloc_limit_mb=512 \
  -print_final_stats=1 -artifact_prefix="$build/$name-" $dict "$build/corpus/$name" "$saved" >"$build/$name.log" 2>&1 ||
  { tail -n 60 "$build/$name.log"; exit 1; }
sed -n 's/^stat::number_of_executed_units: */inputs run without a finding: /p' "$build/$name.log"
