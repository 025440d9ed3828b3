#!/bin/sh
# scripts/install_library.sh ROOT PREFIX LIBRARY.so.VERSION: libminimax below ROOT (DESTDIR and PREFIX), with header, pkg-config file, man
# page and example. PREFIX is where it will be found when it is used.
set -eu
root=$1 prefix=$2 so=$3
from=${so%/*} version=${so##*.so.}
install -d "$root/lib/pkgconfig" "$root/include" "$root/share/man/man3" "$root/share/doc/minimax/examples"
install -m 755 "$so" "$root/lib/"
ln -sf "${so##*/}" "$root/lib/libminimax.so.0"
ln -sf "${so##*/}" "$root/lib/libminimax.so"
install -m 644 "$from/libminimax.a" "$root/lib/"
install -m 644 loader/minimax.h "$root/include/"
install -m 644 docs/libminimax.3 "$root/share/man/man3/"
install -m 644 tests/library/list_tensors.c "$root/share/doc/minimax/examples/"
cat >"$root/lib/pkgconfig/libminimax.pc" <<END
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: libminimax
Description: Reads packed MiniMax checkpoints
Version: $version
Requires.private: libcrypto
Libs: -L\${libdir} -lminimax
Libs.private: -lm -lpthread
Cflags: -I\${includedir}
END
