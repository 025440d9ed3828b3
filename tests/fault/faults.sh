#!/bin/sh
# A sample of the fault tests for every run; `make soak` runs them whole.
set -e
command -v strace >/dev/null || { echo "strace is not installed" >&2; exit 1; }
convert=$BUILD/bin/minimax-convert
python3 tests/fault/kill.py "$convert" tests/data/tiny-m2 10
python3 tests/fault/kill.py "$convert" tests/data/tiny-m2 10 -- --layout hf --quant nvfp4a16 --part-size 1M
python3 tests/fault/kill.py "$convert" tests/data/tiny-m1 10 -- --tp 2 --quant block_fp8 --part-size 4M --compress zstd
python3 tests/fault/follow.py "$convert" 1
python3 tests/fault/torture.py "$convert" tests/data/tiny-m2 --every 40
python3 tests/fault/torture.py "$convert" tests/data/tiny-m2 --every 80 --options "--compress zstd"
python3 tests/fault/torture.py "$convert" tests/data/tiny-m2 --every 80 --resumed
python3 tests/fault/torture.py "$convert" tests/data/tiny-m2 --every 20 --kill
[ "$SAN" = 1 ] || python3 tests/fault/alloc.py --every 120 # the sanitizers have an allocator of their own
python3 tests/fault/power.py "$convert" tests/data/tiny-m2 100
python3 tests/fault/power.py "$convert" tests/data/tiny-m2 30 --options "--compress zstd"
