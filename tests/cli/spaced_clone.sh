#!/bin/sh
# make compiles in a clone whose folder has a name with a space, without a word on stderr.
set -eu
new="$TMPDIR/my clone"
mkdir "$new" "$new/tests"
cp -a Makefile formats quant loader convert runtime "$new"
cp tests/tests.mk "$new/tests"
(unset MAKELEVEL MAKEFLAGS MAKEOVERRIDES MFLAGS BUILD VENV && make -s -C "$new" CUDA=0 build/formats/text.o) 2> "$TMPDIR/err" || { cat "$TMPDIR/err"; exit 1; }
if [ -s "$TMPDIR/err" ]; then cat "$TMPDIR/err"; exit 1; fi
test -s "$new/build/formats/text.o"
echo "compiled in $(basename "$new")"
