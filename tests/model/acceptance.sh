#!/bin/sh
# A trained DFlash draft of tiny-m2 gives 1.45 tokens a step on held-out beginnings: taps, positions, anchor and block are those that it was trained with.
# With the tap one layer off it gives 1.28, with the tap two layers off 1.16.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh
minimax-convert tests/data/tiny-m2 -o "$work/packed" --draft tests/data/tiny-m2-dflash --quant none -q
"$BUILD"/tests/model/acceptance "$work/packed" tests/data/tiny-m2/held-out-ids.json 7 20 1.40
# At temperature 1 proposals are drawn by the numbers that draw the tokens: 1.24 tokens a step, where the likeliest ones give 1.17.
"$BUILD"/tests/model/acceptance "$work/packed" tests/data/tiny-m2/held-out-ids.json 7 12 1.20 1
