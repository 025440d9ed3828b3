#!/bin/sh
# scripts/reproducible.sh BIN MAKE ARGUMENT…: builds a copy of the tree in another folder with `MAKE ARGUMENT… all` and compares the
# programs with those in BIN, byte for byte.
set -eu
bin=$1
shift
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r Makefile formats quant loader convert runtime tests "$copy"
"$@" --no-print-directory -C "$copy" BUILD=build all >/dev/null
count=0
for program in "$bin"/*; do
  cmp "$program" "$copy/build/bin/${program##*/}"
  count=$((count + 1))
done
[ "$count" -gt 0 ]
echo "$count programs built twice, byte-identical"
