#!/bin/sh
# minimax-eval --device: the CPU by its name, one that no build has, and a GPU where there is none or no code for one.
set -eu
export LC_ALL=C
cd "$(dirname "$0")/../.."
"$BUILD"/bin/minimax-convert tests/data/tiny-m2 -o "$TMPDIR/packed" --quant block_fp8 -q
# eval_on DEVICE: the first window of the held-out text
eval_on() {
  "$BUILD"/bin/minimax-eval "$TMPDIR/packed" --device "$1" --ids tests/data/tiny-m2/held-out-ids.json --window 64 --limit 1 -q
}
"$BUILD"/bin/minimax-eval "$TMPDIR/packed" --ids tests/data/tiny-m2/held-out-ids.json --window 64 --limit 1 -q >"$TMPDIR/plain"
eval_on cpu >"$TMPDIR/cpu"
cmp "$TMPDIR/plain" "$TMPDIR/cpu"
grep -q '^nll [0-9.]*' "$TMPDIR/cpu"

# refused STATUS WORD DEVICE
refused() {
  found=0
  eval_on "$3" >"$TMPDIR/out" 2>"$TMPDIR/err" || found=$?
  [ $found -eq "$1" ] && [ "$(wc -l <"$TMPDIR/err")" -eq 1 ] && grep -q "^minimax-eval: error: $2" "$TMPDIR/err" && [ ! -s "$TMPDIR/out" ] ||
    { echo "$3: status $found"; cat "$TMPDIR/err"; exit 1; }
}
refused 2 E_USAGE abacus
[ ! -e /dev/nvidiactl ] || { echo "the CPU by its name; a GPU is there (scripts/gpu.sh)"; exit 0; }
grep -qa cudaGetDevice "$BUILD/bin/minimax-eval" && refused 5 E_CUDA cuda || refused 4 E_DEVICE cuda
echo "likelihood by the CPU's name; other devices are refused by theirs"
