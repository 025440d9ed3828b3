#!/bin/sh
# scripts/release_test.sh OUT [ROOT…]: each artefact of scripts/package.sh, from its installation to text and a reply from the small checkpoint
# (it prints the seconds) to its removal, after which the tree is as before: paths, modes, owners, links and SHA-256 of all files. As root in a copy
# of each ROOT, a folder named for a release (bookworm, trixie, noble): a bare root of it, with python3-venv, that debootstrap makes if it is absent;
# by default those three in build/release. Where debootstrap cannot make one (no root, no mirror, no keyring), it says so and goes on; with none at
# all, the artefacts are unpacked into an empty folder and the wheel is installed by the pip of a virtual environment on this machine.
set -eu
cd "$(dirname "$0")/.."
out=$(readlink -f "$1")
shift
. scripts/bare_root.sh
if [ "${TRY-}" = "" ]; then
  # shellcheck disable=SC2086 # a word each
  [ $# -gt 0 ] || set -- $roots
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
else
  mkdir "$root"
fi
mkdir "$root/try"
cp -r tests/data/tiny-m2 "$root/try/source"
if [ -d "$root/etc" ]; then try=/try; else try=$root/try; fi
# unchanged WORDS: the tree is that of $work/before.
unchanged() { tree | diff "$work/before" - || fail "$1 leaves another tree"; }

seconds='' start=0
begin() { start=$(date +%s%N); }
# took WORD: notes the time since begin.
took() {
  tenths=$((($(date +%s%N) - start) / 100000000))
  seconds="$seconds${seconds:+, }$1 $((tenths / 10)).$((tenths % 10)) s"
}

tree >"$work/before"
begin
mkdir -p "$root/opt"
tar -C "$root/opt" -xzf "$out"/minimax-*-linux-*.tar.gz
top=$(ls "$root/opt")
if [ -d "$root/etc" ]; then at=/opt/$top; else at=$root/opt/$top; fi
text "/opt/$top/bin" "$at/tiny-m2"
took tarball
rm -r "$root"/opt/minimax-*
[ -d "$root/etc" ] || rmdir "$root/opt"
unchanged tarball

if [ -x "$root/usr/bin/dpkg" ]; then
  cp "$out"/*.deb "$root/try"
  begin
  in_root sh -c 'dpkg -i /try/*.deb' >"$work/dpkg" 2>&1 || fail "$(cat "$work/dpkg")"
  text /usr/bin
  took packages
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
  begin
  in_root python3 -m venv /try/venv
  in_root sh -c '/try/venv/bin/pip --disable-pip-version-check --no-cache-dir -q install --no-deps --no-index /try/*.whl'
  text /try/venv/bin
  took wheel
  in_root /try/venv/bin/python -c "$loads"
  in_root /try/venv/bin/pip --disable-pip-version-check -q uninstall -y minimax-packed
  [ -z "$(find "$root/try/venv" -name '*minimax*')" ] || fail "pip uninstall leaves $(find "$root/try/venv" -name '*minimax*')"
  rm -r "$root/try/venv" "$root"/try/*.whl
  unchanged "pip uninstall"
  echo "$(basename "$bare"): tarball, packages and wheel: text and a reply from each ($seconds), the tree as before"
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
