#!/bin/sh
# scripts/demo.sh BUILD: from two small trained checkpoints to text. Converts each (two ranks, block FP8), verifies the result against
# its source, lists it and generates from it; then scores both on held-out text. Every command is printed before it runs.
set -eu
demo=$1/demo
export PATH="$1/bin:$PATH"
rm -rf "$demo"
mkdir -p "$demo"

show() {
  printf '\n$ %s\n' "$1"
  eval "$1"
}

for model in tiny-m1 tiny-m2; do
  source=tests/data/$model
  packed=$demo/$model
  show "minimax-convert $source -o $packed --tp 2 --quant block_fp8"
  show "minimax-verify $packed --source $source"
  show "minimax-inspect $packed --match layers.0."
  show "minimax-run $packed -p 'In the beginning' --max-tokens 60"
done
for model in tiny-m1 tiny-m2; do
  show "minimax-eval $demo/$model --ids tests/data/$model/held-out-ids.json --window 512 --limit 40"
done
echo
echo "built in $1/bin: $(minimax --version)"
echo "next: $1/bin/minimax run $demo/tiny-m1 --chat --max-tokens 60, or docs/from-download-to-chat.md for the released models"
