#!/bin/sh
# `pip install .` makes the package, whose wheel is the same when it is made again, and its own tests pass with what was installed. It brings the
# programs. The former name, minimax, is the same module.
set -eu
export MINIMAX_BUILD="$BUILD/plain" # pip would build one of its own; code for GPUs took most of the time to compress
pip="$VENV/bin/pip --quiet --disable-pip-version-check --no-cache-dir"
$pip wheel --no-deps -w "$TMPDIR/a" .
$pip wheel --no-deps -w "$TMPDIR/b" .
cmp "$TMPDIR"/a/*.whl "$TMPDIR"/b/*.whl
$pip install --no-deps --no-index --target "$TMPDIR/site" "$TMPDIR"/a/*.whl
for program in "$MINIMAX_BUILD"/bin/*; do cmp "$program" "$TMPDIR/site/bin/${program##*/}" && [ -x "$TMPDIR/site/bin/${program##*/}" ]; done
export PYTHONPATH="$TMPDIR/site" PYTHONDONTWRITEBYTECODE=1
"$VENV/bin/python" -m pytest -q -p no:cacheprovider --basetemp "$TMPDIR/pytest" tests/python
"$VENV/bin/python" -c 'import minimax, minimax.native, minimax_packed as p; assert minimax is p and minimax.native.Error is p.Error'
mkdir -p "$TMPDIR/others/minimax" && touch "$TMPDIR/others/minimax/__init__.py" && cp "$TMPDIR/site/minimax.py" "$TMPDIR/others"
PYTHONPATH="$TMPDIR/others:$TMPDIR/site" "$VENV/bin/python" -c 'import minimax; assert not hasattr(minimax, "open")' # of others: it wins
