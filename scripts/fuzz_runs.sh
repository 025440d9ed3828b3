#!/bin/sh
# Runs inputs until FUZZ_LOG (tests/fuzz/RUNS.md) counts FUZZ_RUNS of every fuzz target, or FUZZ_LIMIT seconds are over: scripts/fuzz_runs.sh
# BUILD [TARGET…]. What was run is added to the log every minute, so that runs add up. As many targets at once as there are CPUs (FUZZ_JOBS).
# Of each minute an eighth goes to the program that watches comparisons (BUILD/soak-fuzz) with inputs of up to 16 KiB, the rest to the one that
# does not (BUILD/san), twice as fast, with inputs of up to 1.5 KiB chosen evenly, not by rarity; they share a corpus. Prints the
# sums; exit status 1 after a finding, or when too few ran.
set -u
build=$1 log=${FUZZ_LOG:-tests/fuzz/RUNS.md}
shift
[ $# -gt 0 ] || set -- $(ls tests/fuzz/fuzz_*.c | sed 's/.*fuzz_\(.*\)\.c/\1/')
end=$(($(date +%s) + FUZZ_LIMIT)) commit=$(git rev-parse --short HEAD)
[ -z "$(git status --porcelain -- formats quant loader convert runtime tests/fuzz/*.c)" ] || commit=$commit+
export FUZZ_CORPUS="$build/corpus"

# Inputs wanted of a target: a tenth where each is a whole checkpoint.
wanted() { [ "$1" = packed ] && echo $((FUZZ_RUNS / 10)) || echo "$FUZZ_RUNS"; }

sum() { awk -F '|' -v t=" $1 " '$4 == t { n += $5 } END { printf "%d", n }' "$log"; }

# A minute of one target: "INPUTS SECONDS FINDINGS" into BUILD/NAME.slice.
slice() {
  begin=$(date +%s) found=0
  {
    scripts/fuzz.sh "$build/soak-fuzz" "fuzz_$1" 7 &&
      ASAN_OPTIONS=quarantine_size_mb=1 scripts/fuzz.sh "$build/san" "fuzz_$1" 52 -max_len=1536 -entropic=0
  } >"$build/$1.out" 2>&1 || found=1
  inputs=$(awk '/^inputs run without/ || /^stat::number_of_executed_units/ { n += $NF } END { printf "%d", n }' "$build/$1.out")
  echo "$inputs $(($(date +%s) - begin)) $found" >"$build/$1.slice"
  [ $found -eq 0 ] || { echo "$1: a FINDING"; cat "$build/$1.out"; }
}

# One row for a day, a commit and a target.
add() {
  read -r inputs seconds found <"$build/$1.slice"
  awk -F ' [|] ' -v OFS=' | ' -v key="| $(date -u +%F) | $commit | $1 | " -v n="$inputs" -v s="$seconds" -v f="$found" '
    index($0, key) == 1 { $4 += n; $5 += s; sub(/ [|]$/, "", $6); $6 = $6 + f " |"; done = 1 }
    { print }
    END { if (!done) print key n OFS s OFS f " |" }' "$log" >"$log.new" && mv "$log.new" "$log"
  return "$found"
}

status=0
while [ "$(date +%s)" -lt "$end" ] && [ $status -eq 0 ]; do
  running=
  for name in $(for t in "$@"; do echo "$(sum "$t") $t $(wanted "$t")"; done | sort -n | awk '$1 < $3 { print $2 }' | head -n "${FUZZ_JOBS:-$(nproc)}"); do
    slice "$name" &
    running="$running $name"
  done
  [ -n "$running" ] || break
  wait
  for name in $running; do add "$name" || status=1; done
done
enough=1 total=0
for name in "$@"; do
  n=$(sum "$name") total=$((total + $(sum "$name")))
  echo "$name: $n inputs"
  [ "$n" -ge "$(wanted "$name")" ] || enough=0
done
verdict="no finding"
[ $enough -eq 1 ] || verdict="no finding, but time ran out"
[ $status -eq 0 ] || verdict="a FINDING"
echo "fuzz: $total inputs to $# targets, at least $FUZZ_RUNS wanted of each, $verdict"
[ $enough$status = 10 ]
