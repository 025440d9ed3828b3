#!/bin/sh
# scripts/package.sh BUILD OUT [GZIP-LEVEL]: what was built in BUILD as minimax-VERSION-linux-ARCH.tar.gz, three Debian packages (minimax,
# libminimax0, libminimax-dev) and the wheel of minimax-packed, into OUT. The same build gives the same bytes.
set -eu
cd "$(dirname "$0")/.."
build=$(readlink -f "$1") out=$2 level=${3-9}
version=$(sed -n 's/^#define MM_VERSION "\(.*\)"/\1/p' formats/system/base.h)
so=$build/lib/libminimax.so.$version
mkdir -p "$out"
out=$(readlink -f "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH-$(git log -1 --format=%ct 2>/dev/null || echo 0)}"
umask 022

# stage ROOT PREFIX: what `make install` puts there, without its lists of folders, which are for `make uninstall`.
stage() {
  scripts/install.sh "$1$2" "$build"/bin/*
  scripts/install_library.sh "$1$2" "$2" "$so"
  scripts/install_unit.sh "$1$2" "$2"
  rm "$1$2"/share/doc/minimax/folders-of-*
  strip --strip-unneeded "$1$2"/bin/* "$1$2/lib/libminimax.so.$version"
}

# notices: the licences of the libraries that STATIC=1 linked into the programs, which BUILD/flags has, from the packages that have those libraries.
notices() {
  for name in $(tr ' ' '\n' <"$build/flags" 2>/dev/null | sed -n '/^-Wl,-Bstatic$/,/^-Wl,-Bdynamic$/s/^-l//p' | sort -u); do
    archive=$(readlink -f "$(gcc -print-file-name="lib$name.a")")
    owner=$(dpkg -S "$archive" | cut -d: -f1) text=/usr/share/doc/$owner/copyright
    if [ ! -r "$text" ]; then # libssl-dev of Ubuntu 24.04 has a link to nowhere: the package of the shared library has the file
      owner=$(dpkg -S "$(readlink -f "$(gcc -print-file-name="lib$name.so")")" | cut -d: -f1) text=/usr/share/doc/$owner/copyright
    fi
    [ -r "$text" ] || { echo "package: no licence of $archive ($text)" >&2; return 1; }
    printf '\n==== %s, linked into the programs: the copyright file of %s ====\n\n' "lib$name" "$owner"
    cat "$text"
  done
}
notices >"$work/notices"
cat LICENSE "$work/notices" >"$work/copyright"

top=minimax-$version-linux-$(uname -m)
stage "$work/tar/$top" /usr/local
mv "$work/tar/$top/usr/local"/* "$work/tar/$top"
rmdir -p "$work/tar/$top/usr/local" 2>/dev/null || :
cp README.md CHANGELOG.md "$work/tar/$top"
# what README's commands and links need
cp -r docs "$work/tar/$top"
mkdir "$work/tar/$top/tiny-m2"
cp tests/data/tiny-m2/*.json tests/data/tiny-m2/model-*.safetensors "$work/tar/$top/tiny-m2"
chmod -R u=rwX,go=rX "$work/tar/$top/docs" "$work/tar/$top/tiny-m2"
install -m 644 "$work/copyright" "$work/tar/$top/LICENSE"
tar -C "$work/tar" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -c "$top" | gzip "-${level}n" >"$out/$top.tar.gz"

stage "$work/all" /usr
libc=$(objdump -T "$work/all/usr/bin"/* "$so" | sed -n 's/.*(\{0,1\}GLIBC_\([0-9.]*\).*/\1/p' | sort -uV | tail -1)
arch=$(dpkg --print-architecture)
# package NAME DEPENDS SECTION DESCRIPTION, with the paths below /usr on stdin: moves them into the package.
package() {
  root=$work/$1
  while read -r path; do
    mkdir -p "$root/usr/$(dirname "$path")"
    mv "$work/all/usr/"$path "$root/usr/$(dirname "$path")/" # a pattern
  done
  install -D -m 644 "$work/copyright" "$root/usr/share/doc/$1/copyright"
  mkdir "$root/DEBIAN"
  cat >"$root/DEBIAN/control" <<END
Package: $1
Version: $version
Architecture: $arch
Section: $3
Priority: optional
Maintainer: The minimax project <minimax@localhost>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: $2
Description: $4
END
  [ ! -e "$root/usr/lib/libminimax.so.0" ] || echo 'activate-noawait ldconfig' >"$root/DEBIAN/triggers"
  find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
  dpkg-deb --root-owner-group -Zgzip "-z$level" --build "$root" "$out/$1_${version}_$arch.deb" >/dev/null
}
package libminimax0 "libc6 (>= $libc)" libs "reads packed MiniMax checkpoints, shared library" <<END
lib/libminimax.so.*
END
package libminimax-dev "libminimax0 (= $version)" libdevel "reads packed MiniMax checkpoints, header and static library" <<END
lib/libminimax.*
lib/pkgconfig
include
share/man/man3
share/doc/minimax/examples
END
package minimax "libc6 (>= $libc)" science "converts, verifies and serves MiniMax checkpoints" <<END
bin
lib/systemd
share/man
share/bash-completion
share/zsh
share/fish
END
left=$(find "$work/all" ! -type d)
[ -z "$left" ] || { echo "package: in no package: $left" >&2; exit 1; }

mkdir -p "$work/wheel/bin" "$work/wheel/lib"
cp "$work/minimax/usr/bin"/* "$work/wheel/bin"
cp "$work/libminimax0/usr/lib/libminimax.so.$version" "$work/wheel/lib"
cp "$work/copyright" "$work/wheel/LICENSE"
MINIMAX_BUILD="$work/wheel" python3 -c 'import sys; sys.path.insert(0, "loader/python"); import package; package.build_wheel(sys.argv[1])' "$out"
(cd "$out" && sha256sum ./*"$version"* >SHA256SUMS)
