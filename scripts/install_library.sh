#!/bin/sh
# scripts/install_library.sh [--remove] ROOT PREFIX LIBRARY.so.VERSION: libminimax below ROOT (DESTDIR and PREFIX), with header, pkg-config
# file, man page and example. PREFIX is where it will be found when it is used.
# --remove: removes those files, and the folders that were made for them and are empty.
set -eu
umask 022 # for all users, whatever the umask of the one that installs
[ "$1" = --remove ] && remove=1 && shift || remove=
root=$1 prefix=$2 so=$3
from=${so%/*} version=${so##*.so.} folders=share/doc/minimax/folders-of-library
if [ "$remove" ]; then
  (cd "$root" 2>/dev/null && rm -f "lib/${so##*/}" lib/libminimax.so.0 lib/libminimax.so lib/libminimax.a lib/pkgconfig/libminimax.pc \
    include/minimax.h share/man/man3/libminimax.3 share/doc/minimax/examples/list_tensors.c) || :
  exec scripts/install_folders.sh --remove "$root" $folders
fi
scripts/install_folders.sh "$root" $folders lib/pkgconfig include share/man/man3 share/doc/minimax/examples
old=$(readlink "$root/lib/libminimax.so.0" || :)
case $old in libminimax.so.*) rm -f "$root/lib/$old" ;; esac # of the release that this one replaces
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
Libs: -L"\${libdir}" -lminimax
Libs.private: -lm -lpthread
Cflags: -I"\${includedir}"
END
