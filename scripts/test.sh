#!/bin/sh
# Runs one test program and keeps its result, or counts the results of many.
#   scripts/test.sh check/NAME COMMAND…    runs COMMAND with PATH, BUILD and TMPDIR set; prints one line, and the whole log of a failure.
#                                          Exit status 77 of COMMAND: it could not run here and said why on its last line.
#   scripts/test.sh --count BUILD check/NAME…    prints what was not run, also within tests that passed, their CPU time and "N passed, N failed" as its last
#                                          line; exit status 1 if any failed.
# Results lie in BUILD/check/NAME.{log,result}; each line of BUILD/check/times has the seconds of CPU time and of the clock that a test took.
set -u

if [ "$1" = --count ]; then
  build=$2 passed=0 failed=0
  shift 2
  for name; do
    case $(cat "$build/$name.result" 2>/dev/null) in
      pass)
        passed=$((passed + 1))
        part=$(grep -hE 'SKIPPED TEST|[0-9] skipped|not run|not tried' "$build/$name.log" | tail -n 1 | cut -c 1-200)
        [ -z "$part" ] || echo "not all run: ${name#check/}: $part" ;;
      skip) echo "not run: ${name#check/}: $(tail -n 1 "$build/$name.log")" ;;
      *) failed=$((failed + 1)); echo "failed: ${name#check/} (log: $build/$name.log)" ;;
    esac
  done
  printf '%s\n' "$@" | awk 'NR == FNR { cpu["check/" $3] = $1; next } { sum += cpu[$1] } END { printf "%.0f s of CPU time in tests\n", sum }' \
    "$build/check/times" -
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ]
  exit
fi

name=$1
shift
log=$BUILD/$name.log
mkdir -p "$(dirname "$log")"
rm -f "$BUILD/$name.result"
TMPDIR=$(mktemp -d "$BUILD/$name.XXXXXX") || exit 1
# Threads that numpy's products wait in, turning, took four fifths of a test's time.
export OPENBLAS_NUM_THREADS=1
export BUILD TMPDIR PATH="$BUILD/bin:$VENV/bin:$PATH"
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1:allocator_may_return_null=1:allow_addr2line=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:allow_addr2line=1

# A test that hangs ends after ten minutes; a build of everything may take longer where other work runs.
case $name in */build) limit=1800 ;; *) limit=600 ;; esac
start=$(date +%s%N)
timeout "$limit" "$@" >"$log" 2>&1 </dev/null
status=$?
ms=$((($(date +%s%N) - start) / 1000000))
times >"$log.times" # its second line: user and system time of what was run
awk -v ms=$ms -v name="${name#check/}" 'NR == 2 { gsub(/[ms]/, " "); printf "%.1f %.1f %s\n", $1 * 60 + $2 + $3 * 60 + $4, ms / 1000, name }' \
  "$log.times" >>"$BUILD/check/times"
rm "$log.times"
rm -rf "$TMPDIR"
case $status in
  0) result=pass ;;
  77) result=skip ;;
  *) result=fail; cat "$log" ;;
esac
echo "$result" >"$BUILD/$name.result"
if [ $result = fail ]; then
  note="exit status $status"
else # CMocka's count, or the last line
  note=$(grep -E '^\[  PASSED|SKIPPED TEST' "$log" | tr '\n' ' ')
  note=${note:-$(tail -n 1 "$log" | cut -c 1-140)}
fi
printf '%-4s %4d.%03d s  %s: %s\n' "$result" $((ms / 1000)) $((ms % 1000)) "${name#check/}" "$note"
