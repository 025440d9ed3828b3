#!/bin/sh
# minimax-bench where there is no GPU: what it refuses, in one line by name.
set -eu
# refused STATUS CODE ARGUMENT…
refused() {
  status=$1 code=$2
  shift 2
  found=0
  "$BUILD/bin/minimax-bench" "$@" >"$TMPDIR/out" 2>"$TMPDIR/err" || found=$?
  [ "$found" -eq "$status" ] && [ "$(wc -l <"$TMPDIR/err")" -eq 1 ] && grep -q "^minimax-bench: error: $code: " "$TMPDIR/err" ||
    { echo "$*: status $found"; cat "$TMPDIR/err"; exit 1; }
}
refused 2 E_USAGE
refused 2 E_USAGE everything
refused 2 E_USAGE layers decode
refused 2 E_USAGE layers --model m3
refused 2 E_USAGE layers --quant int3
refused 2 E_USAGE layers --head int3
refused 2 E_USAGE layers --batch 257
[ ! -e /dev/nvidiactl ] || { echo "options refused; a GPU is there"; exit 0; }
for subject in kernels layers decode prefill mixed; do
  refused "$(grep -qa cudaGetDevice "$BUILD/bin/minimax-bench" && echo 5 || echo 4)" E_CUDA $subject
done
[ ! -s "$TMPDIR/out" ]
echo "refused by name without a GPU"
