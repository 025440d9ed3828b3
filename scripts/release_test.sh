#!/bin/sh
# scripts/release_test.sh OUT [ROOT]: each artefact of scripts/package.sh, from its installation to text from the small checkpoint to its removal,
# after which the tree is as before. As root in a copy of ROOT, a bare Debian root that debootstrap makes if it is absent; without a ROOT and
# debootstrap, unpacked into an empty folder. The wheel is installed by the pip of a virtual environment on this machine.
set -eu
cd "$(dirname "$0")/.."
out=$(readlink -f "$1") bare=${2-build/release/root}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "release_test: $1" >&2; exit 1; }
(cd "$out" && sha256sum --quiet -c SHA256SUMS)

root=$work/root
if [ "$(id -u)" = 0 ] && { [ -d "$bare" ] || command -v debootstrap >/dev/null; }; then
  [ -d "$bare" ] || debootstrap --variant=minbase bookworm "$bare" >"$work/debootstrap" || fail "$(tail -n 3 "$work/debootstrap")"
  cp -a "$bare" "$root"
  in_root() {
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C unshare -m sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" "$@"
  }
else
  mkdir "$root"
  in_root() { program=$1; shift; (cd "$root" && env -i LC_ALL=C "$root$program" "$@"); }
fi
mkdir "$root/try"
cp -r tests/data/tiny-m2 "$root/try/source"
if [ -d "$root/etc" ]; then try=/try; else try=$root/try; fi
# text BIN: converts, verifies and runs by the programs in BIN; prints the text.
text() {
  in_root "$1/minimax-convert" $try/source -o $try/packed --tp 2 --quant block_fp8 -q >/dev/null
  in_root "$1/minimax" verify $try/packed -q >/dev/null
  in_root "$1/minimax-run" $try/packed -p 'In the beginning' --max-tokens 40 2>/dev/null >"$work/text"
  grep -q 'of the LORD' "$work/text" || fail "$1: found the text \"$(cat "$work/text")\""
  rm -rf "$root/try/packed"
}
tree() { (cd "$root" && find . \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache \) -prune -o -printf '%p %y %m %l\n' | sort); }
# unchanged WORDS: the tree is that of $work/before.
unchanged() { tree | diff "$work/before" - || fail "$1 leaves another tree"; }

tree >"$work/before"
mkdir -p "$root/opt"
tar -C "$root/opt" -xzf "$out"/minimax-*-linux-*.tar.gz
text "/opt/$(ls "$root/opt")/bin"
rm -r "$root"/opt/minimax-*
[ -d "$root/etc" ] || rmdir "$root/opt"
unchanged tarball

if [ -x "$root/usr/bin/dpkg" ]; then
  cp "$out"/*.deb "$root/try"
  in_root sh -c 'dpkg -i /try/*.deb' >"$work/dpkg" 2>&1 || fail "$(cat "$work/dpkg")"
  text /usr/bin
  in_root ldconfig -p | grep -q 'libminimax.so.0 .*=> /' || fail "the dynamic linker finds no libminimax.so.0"
  in_root dpkg --purge minimax libminimax-dev libminimax0 >"$work/dpkg" 2>&1 || fail "$(cat "$work/dpkg")"
  rm "$root"/try/*.deb
  unchanged "dpkg --purge"
else
  for deb in "$out"/*.deb; do dpkg-deb -x "$deb" "$root/debs"; done
  text /debs/usr/bin
  rm -r "$root/debs"
fi

python3 -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check -q install --no-deps --no-index "$out"/minimax_packed-*.whl
"$work/venv/bin/minimax-convert" tests/data/tiny-m2 -o "$work/packed" -q >/dev/null
"$work/venv/bin/minimax" run "$work/packed" -p 'In the beginning' --max-tokens 40 2>/dev/null | grep -q 'of the LORD' || fail "no text by the wheel"
"$work/venv/bin/python" -c 'import ctypes, sys; import importlib.util as u; p = u.find_spec("minimax_packed").submodule_search_locations[0]
ctypes.CDLL(p + "/libminimax.so.0").minimax_version'
"$work/venv/bin/pip" --disable-pip-version-check -q uninstall -y minimax-packed
[ -z "$(find "$work/venv" -name '*minimax*')" ] || fail "pip uninstall leaves $(find "$work/venv" -name '*minimax*')"
if [ -d "$root/etc" ]; then how="a bare Debian root"; else how="an empty folder"; fi
echo "tarball and packages in $how, the wheel in a virtual environment: text from each, nothing left behind"
