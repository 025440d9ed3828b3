#!/bin/sh
# scripts/release_test.sh OUT [ROOT…]: each artefact of scripts/package.sh, from its installation to text from the small checkpoint to its removal,
# after which the tree is as before. As root in a copy of each ROOT, a folder named for a release (bookworm, trixie, noble): a bare root of it, with
# python3-venv, that debootstrap makes if it is absent; by default those three in build/release. Where debootstrap cannot make one (no root, no
# mirror, no keyring), it says so and goes on; with none at all, the artefacts are unpacked into an empty folder and the wheel is installed by the
# pip of a virtual environment on this machine.
set -eu
cd "$(dirname "$0")/.."
out=$(readlink -f "$1")
shift
# make_root ROOT: false, with the last words of debootstrap, where there can be none.
make_root() {
  suite=$(basename "$1") log=$(mktemp) mirror='' script=''
  if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then echo "release_test: no $suite: not root, or no debootstrap" >&2; return 1; fi
  case $suite in noble | jammy) mirror=http://archive.ubuntu.com/ubuntu script=/usr/share/debootstrap/scripts/gutsy ;; esac
  # shellcheck disable=SC2086 # empty, or one word each
  if debootstrap --variant=minbase --include=python3-venv ${mirror:+--components=main,universe} "$suite" "$1.new" $mirror $script >"$log" 2>&1; then
    mv "$1.new" "$1" && rm "$log"
  else
    echo "release_test: no $suite: $(tail -n 1 "$log")" >&2
    rm -rf "$1.new" "$log"
    return 1
  fi
}
if [ "${TRY-}" = "" ]; then
  [ $# -gt 0 ] || set -- build/release/bookworm build/release/trixie build/release/noble
  tried=0
  for bare; do
    [ -d "$bare" ] || make_root "$bare" || continue
    TRY=$bare "$0" "$out"
    tried=$((tried + 1))
  done
  [ $tried -gt 0 ] || TRY=none "$0" "$out"
  exit
fi
bare=$TRY
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "release_test: $1" >&2; exit 1; }
(cd "$out" && sha256sum --quiet -c SHA256SUMS)

root=$work/root
if [ "$(id -u)" = 0 ] && [ -d "$bare" ]; then
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

# The library of the wheel, without numpy, which its module needs.
loads='import ctypes, sys; import importlib.util as u; p = u.find_spec("minimax_packed").submodule_search_locations[0]
ctypes.CDLL(p + "/libminimax.so.0").minimax_version'
if [ -x "$root/usr/bin/python3" ]; then
  cp "$out"/minimax_packed-*.whl "$root/try"
  in_root python3 -m venv /try/venv
  in_root sh -c '/try/venv/bin/pip --disable-pip-version-check --no-cache-dir -q install --no-deps --no-index /try/*.whl'
  text /try/venv/bin
  in_root /try/venv/bin/python -c "$loads"
  in_root /try/venv/bin/pip --disable-pip-version-check -q uninstall -y minimax-packed
  [ -z "$(find "$root/try/venv" -name '*minimax*')" ] || fail "pip uninstall leaves $(find "$root/try/venv" -name '*minimax*')"
  rm -r "$root/try/venv" "$root"/try/*.whl
  unchanged "pip uninstall"
  echo "$(basename "$bare"): tarball, packages and wheel: text from each, the tree as before"
  exit
fi
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --disable-pip-version-check -q install --no-deps --no-index "$out"/minimax_packed-*.whl
"$work/venv/bin/minimax-convert" tests/data/tiny-m2 -o "$work/packed" -q >/dev/null
"$work/venv/bin/minimax" run "$work/packed" -p 'In the beginning' --max-tokens 40 2>/dev/null | grep -q 'of the LORD' || fail "no text by the wheel"
"$work/venv/bin/python" -c "$loads"
"$work/venv/bin/pip" --disable-pip-version-check -q uninstall -y minimax-packed
[ -z "$(find "$work/venv" -name '*minimax*')" ] || fail "pip uninstall leaves $(find "$work/venv" -name '*minimax*')"
echo "tarball and packages in an empty folder, the wheel in a virtual environment: text from each, nothing left behind"
