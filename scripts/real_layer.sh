#!/bin/sh
# One layer of real size, converted for real and verified against its source: scripts/real_layer.sh m1|m2|both. Synthetic weights, the released
# model's shapes and names. M1 takes 17 GB of TMPDIR, M2 8 GB; what was made is removed.
set -eu
which=${1:-both}
work=${TMPDIR:-/tmp}/layer.$$
mkdir "$work"
trap 'rm -rf "$work"' EXIT

# layer NAME GB OPTION…: OPTIONs are those of bench_checkpoint.py.
layer() {
  name=$1 gb=$2
  shift 2
  free=$(df -k --output=avail "$work" | tail -n 1)
  [ "$free" -gt $((gb * 1000000)) ] || { echo "$name: found $free KiB free, expected $gb GB"; exit 1; }
  python3 scripts/bench_checkpoint.py "$work/src" --layers 1 "$@"
  minimax-convert "$work/src" -o "$work/out" --tp 8 --quant block_fp8 2>&1 | tail -n 2
  minimax-verify "$work/out" --source "$work/src" --level source
  bytes=$(du -sb "$work/src" | cut -f 1)
  rm -r "$work/src" "$work/out"
  done="${done:-}$name $bytes bytes, "
}

case $which in m2 | both) layer M2 8 --experts 256 ;; esac
case $which in m1 | both) layer M1 17 --m1 ;; esac
echo "real layer: ${done}--tp 8 --quant block_fp8, verified at level source"
