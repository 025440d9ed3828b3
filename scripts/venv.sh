#!/bin/sh
# scripts/venv.sh DIR PACKAGE…: a Python virtual environment with pinned packages from PyPI, whose modules Python compiles when they are
# imported. DIR/ready appears when it is complete.
set -eu
dir=$1
shift
rm -rf "$dir"
python3 -m venv "$dir"
"$dir/bin/pip" install --quiet --disable-pip-version-check --no-compile "$@" >"$dir/pip.log" 2>&1 || {
  echo "scripts/venv.sh: cannot install $* from PyPI ($(tail -n 1 "$dir/pip.log")): the interop tests need them" >&2
  exit 1
}
touch "$dir/ready"
