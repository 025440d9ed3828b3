#!/bin/sh
# `pip install .` makes the package, whose wheel is the same when it is made again, and its own tests pass with what was installed.
set -eu
export MINIMAX_LIBRARY="$(readlink -f "$BUILD/lib/libminimax.so")" # this build's: pip would build one of its own
pip="$VENV/bin/pip --quiet --disable-pip-version-check --no-cache-dir"
$pip wheel --no-deps -w "$TMPDIR/a" .
$pip wheel --no-deps -w "$TMPDIR/b" .
cmp "$TMPDIR"/a/*.whl "$TMPDIR"/b/*.whl
$pip install --no-deps --no-index --target "$TMPDIR/site" "$TMPDIR"/a/*.whl
unset MINIMAX_LIBRARY # the package has its own now
export PYTHONPATH="$TMPDIR/site" PYTHONDONTWRITEBYTECODE=1
"$VENV/bin/python" -m pytest -q -p no:cacheprovider --basetemp "$TMPDIR/pytest" tests/python
