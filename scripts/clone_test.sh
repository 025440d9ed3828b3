#!/bin/sh
# scripts/clone_test.sh [ROOT…]: a clone of this commit, in a copy of each bare ROOT (scripts/release_test.sh), to text by README's commands:
# scripts/bootstrap.sh demo, make install; after make uninstall the tree is as before. Then the packages that bootstrap.sh installed are purged, after
# which it is that of the bare root. As root; minutes for each ROOT.
set -eu
cd "$(dirname "$0")/.."
. scripts/bare_root.sh
fail() { echo "clone_test: $1" >&2; exit 1; }
# shellcheck disable=SC2086 # a word each
[ $# -gt 0 ] || set -- $roots
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT
try=/try
for bare; do
  [ -d "$bare" ] || make_root "$bare"
  root=$work/root
  cp -a "$bare" "$root"
  # shellcheck disable=SC2016 # words of dpkg-query
  packages() { in_root dpkg-query -W -f '${Package}\n' | sort; }
  in_clone() { in_root sh -c "cd /clone && $1" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; fail "$1"; }; }
  packages >"$work/packages"
  tree >"$work/bare"
  start=$(date +%s)
  git clone -q . "$root/clone"
  in_clone './scripts/bootstrap.sh demo'
  grep -q 'of the LORD' "$work/log" || fail 'the demo: no text'
  echo Hello | in_root /clone/build/bin/minimax run /clone/build/demo/tiny-m1 --chat --max-tokens 60 >"$work/log" 2>&1
  reply "$work/log" || fail "found the reply \"$(cat "$work/log")\""
  seconds=$(($(date +%s) - start))
  mkdir "$root/try"
  cp -r tests/data/tiny-m2 "$root/try/source"
  tree ./clone >"$work/before"
  in_clone 'make install'
  text /usr/local/bin
  in_clone 'make uninstall'
  tree ./clone | diff "$work/before" - || fail 'make uninstall leaves another tree'
  rm -r "$root/clone" "$root/try"
  # shellcheck disable=SC2046 # a word for each package
  in_root env DEBIAN_FRONTEND=noninteractive apt-get purge -qy --allow-remove-essential $(packages | comm -13 "$work/packages" -) >"$work/log" 2>&1 ||
    { tail -n 20 "$work/log" >&2; fail 'apt-get purge'; }
  tree | diff "$work/bare" - || fail 'apt-get purge leaves another tree'
  rm -rf --one-file-system "$root"
  echo "$(basename "$bare"): clone: text and a reply after $seconds s, the tree as before after make uninstall, and that of the root after apt-get purge"
done
