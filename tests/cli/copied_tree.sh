# A copy of the sources in $new, and in $built what check/plain/build made of them, so that what a change does not touch is not compiled again. Read by
# tests of what a new model, scheme or op takes.
new=$TMPDIR/tree built=$TMPDIR/b
mkdir "$new" "$new/tests" "$built"
cp -a Makefile formats quant loader convert runtime "$new"
cp tests/tests.mk "$new/tests"
for made in formats quant loader convert runtime flags commit libformats.a libquant.a libloader.a libconvert.a libruntime.a; do
  cp -a "$BUILD/plain/$made" "$built"
done

# remake FILE PROGRAM…: in the copy, compiles again what FILE, changed there, is part of (their .d files name another directory).
remake() {
  grep -rl --include='*.d' -e "$1" "$built" | sed 's/d$/o/' | xargs rm -f
  shift
  repo=$PWD
  (unset MAKELEVEL MAKEFLAGS MAKEOVERRIDES MFLAGS && make -s -C "$new" CURDIR="$repo" CC=clang CUDA=0 FAST=1 BUILD="$built" "$@")
}
