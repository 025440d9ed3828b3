#!/bin/sh
# libminimax as a user has it: installed, found by pkg-config, the example built against it, shared and static. And its ABI: what was compiled
# with the header first published under this soname (tests/library/minimax-0.h) runs on the library of today.
set -eu
usr=$TMPDIR/usr lib=$BUILD/lib/libminimax.so cc=${CC:-cc}
scripts/install_library.sh "$usr" "$usr" "$(readlink -f "$lib")"
export PKG_CONFIG_PATH="$usr/lib/pkgconfig" LD_LIBRARY_PATH="$usr/lib"
fail() {
  echo "$1"
  exit 1
}

# Visible are the functions of minimax.h and nothing else, in the shared library and in the static one.
sed -nE 's/^MINIMAX_API .*[ *](minimax_[a-z_]+)\(.*/\1/p' loader/minimax.h | sort >"$TMPDIR/declared"
[ "$(wc -l <"$TMPDIR/declared")" -ge 20 ]
nm -D --defined-only "$lib" | awk '{print $3}' | sort >"$TMPDIR/shared"
cmp "$TMPDIR/declared" "$TMPDIR/shared" || fail "libminimax.so shows other symbols than minimax.h declares"
nm --defined-only "$usr/lib/libminimax.a" | awk '$2 ~ /[A-Z]/ {print $3}' | sort >"$TMPDIR/static"
cmp "$TMPDIR/declared" "$TMPDIR/static" || fail "libminimax.a shows other symbols than minimax.h declares"
readelf -d "$lib" | grep -q 'soname: \[libminimax.so.0\]' || fail "no soname libminimax.so.0"

# Every function and every field of the first header is still there, where it was.
sed -nE 's/^MINIMAX_API .*[ *](minimax_[a-z_]+)\(.*/\1/p' tests/library/minimax-0.h | sort | comm -23 - "$TMPDIR/declared" >"$TMPDIR/gone"
[ ! -s "$TMPDIR/gone" ] || fail "gone from minimax.h: $(tr '\n' ' ' <"$TMPDIR/gone")"
mkdir "$TMPDIR/first"
cp tests/library/minimax-0.h "$TMPDIR/first/minimax.h"
$cc -I"$TMPDIR/first" tests/library/abi_layout.c -o "$TMPDIR/layout-first"
$cc -I"$usr/include" tests/library/abi_layout.c -o "$TMPDIR/layout-now"
"$TMPDIR/layout-first" >"$TMPDIR/first.txt"
"$TMPDIR/layout-now" >"$TMPDIR/now.txt"
diff "$TMPDIR/first.txt" "$TMPDIR/now.txt" || fail "a struct of minimax.h changed under the same soname"

# One version: the programs', the header's, the man page's.
version=$(sed -n 's/^#define MM_VERSION "\(.*\)"/\1/p' formats/system/base.h)
[ -n "$version" ] || fail "no MM_VERSION in formats/system/base.h"
grep -qx "#define MINIMAX_HEADER_VERSION \"$version\"" loader/minimax.h || fail "loader/minimax.h: another version than $version"
head -n 1 docs/libminimax.3 | grep -qF "\"minimax $version\"" || fail "docs/libminimax.3: another version than $version"

# The header is C11 and C++17, and the example has no warning.
example=$usr/share/doc/minimax/examples/list_tensors.c
printf '#include <minimax.h>\n' >"$TMPDIR/only.cc"
c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror $(pkg-config --cflags libminimax) -c "$TMPDIR/only.cc" -o "$TMPDIR/only.o"
$cc -std=c11 -Wall -Wextra -Wpedantic -Werror $(pkg-config --cflags libminimax) "$example" $(pkg-config --libs libminimax) -o "$TMPDIR/shared-now"
$cc "$example" $(pkg-config --cflags libminimax) "$usr/lib/libminimax.a" $(pkg-config --static --libs-only-l libminimax | sed 's/-lminimax //') -o "$TMPDIR/static-now"
$cc -I"$TMPDIR/first" -c "$example" -o "$TMPDIR/first.o" && $cc "$TMPDIR/first.o" -L"$usr/lib" -lminimax -o "$TMPDIR/shared-first"

minimax-convert tests/data/tiny-m2 -o "$TMPDIR/out" --tp 2 --quant nvfp4 -q
name=model.layers.0.block_sparse_moe.experts.w13_weight
for program in shared-now static-now shared-first; do
  "$TMPDIR/$program" "$TMPDIR/out" 1 >"$TMPDIR/$program.txt"
  "$TMPDIR/$program" "$TMPDIR/out" 1 $name >>"$TMPDIR/$program.txt"
  cmp "$TMPDIR/shared-now.txt" "$TMPDIR/$program.txt" || fail "$program says something else"
  status=0
  "$TMPDIR/$program" "$TMPDIR/out" 7 2>"$TMPDIR/line" || status=$?
  [ $status -eq 2 ] && grep -q '^list_tensors: E_RANKS: .*found rank 7, expected less than 2$' "$TMPDIR/line" || fail "$program: $(cat "$TMPDIR/line")"
done
man -l "$usr/share/man/man3/libminimax.3" >/dev/null 2>&1 || ! command -v man >/dev/null || fail "libminimax.3 is no man page"
while read -r symbol; do
  grep -q "$symbol" "$usr/share/man/man3/libminimax.3" || fail "libminimax.3 says nothing of $symbol"
done <"$TMPDIR/declared"
echo "$(wc -l <"$TMPDIR/declared") functions, $(wc -l <"$TMPDIR/first.txt") fields, $(wc -l <"$TMPDIR/shared-now.txt") lines of three builds of the example"
