#!/bin/sh
# One checkpoint of --tp N --attn-tp K runs with any number of groups that divides its own: its ranks have the bytes, and logits the bits, of
# a conversion for that shape, and logits are near those of one rank. SHAPES=N takes N more random shapes, MM_SEED=N others.
cd "$(dirname "$0")/../.."
. tests/model/scratch.sh

# hold NAME SCHEME TP ATTN-TP GROUPS [OPTION…]
hold() {
  name=$1 quant=$2 tp=$3 attn=$4 groups=$5
  shift 5
  echo "$name $quant --tp $tp --attn-tp $attn $* --dp $groups"
  ranks=$((tp / groups))
  rm -rf "$work/groups" "$work/direct"
  minimax-convert tests/data/"$name" -o "$work/groups" --tp "$tp" --attn-tp "$attn" --quant "$quant" -q "$@"
  [ "$groups" = 1 ] || set -- "$@" --attn-tp "$ranks"
  minimax-convert tests/data/"$name" -o "$work/direct" --tp "$tp" --quant "$quant" -q "$@"
  one=$work/one-$name-$quant
  [ -d "$one" ] || minimax-convert tests/data/"$name" -o "$one" --quant "$quant" -q
  "$BUILD"/tests/model/reshaped "$work/groups" "$groups" "$work/direct" "$one"
}

while read -r shape; do
  # shellcheck disable=SC2086
  hold $shape
done <<END
tiny-m1 none 2 1 1
tiny-m1 block_fp8 4 1 1 --ep 2
tiny-m1 nvfp4 4 2 1
tiny-m1 w4a16 4 1 2 --pp 2
tiny-m2 none 4 1 1
tiny-m2 block_fp8 2 1 1
tiny-m2 block_fp8 4 1 1 --ep 4
tiny-m2 block_fp8 8 1 1
tiny-m2 nvfp4 4 2 1 --ep 2 --pp 2
tiny-m2 mxfp8 4 1 2
tiny-m3-random none 4 1 1
tiny-m3-random none 4 2 1 --ep 2
tiny-m3-random block_fp8 4 1 1
tiny-m3-random mxfp4 4 1 1
END

seed=${MM_SEED:-$$}
echo "seed $seed"
python3 - "$seed" "${SHAPES:-4}" >"$work/shapes" <<END
import random, sys
draw = random.Random(int(sys.argv[1]))
schemes = ("none", "block_fp8", "channel_fp8", "tensor_wise_fp8", "nvfp4", "nvfp4a16", "w4a16", "w4afp8", "w4a8", "int8", "mxfp4", "mxfp8")
for _ in range(int(sys.argv[2])):
    tp = draw.choice((2, 4, 8))
    attn = draw.choice([k for k in (1, 2, 4) if k < tp])
    groups = draw.choice([g for g in (1, 2, 4) if tp // attn % g == 0 and g < tp // attn])
    name = draw.choice(("tiny-m1", "tiny-m2", "tiny-m3-random"))
    print(name, draw.choice(schemes), tp, attn, groups, *draw.choice(((), ("--ep", "2"), ("--pp", "2"))))
END
while read -r shape; do
  # shellcheck disable=SC2086
  hold $shape
done <"$work/shapes"
