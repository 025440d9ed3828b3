#!/usr/bin/env python3
"""scripts/bench_split.py measures two servers; SIGINT and SIGTERM at random moments end it with one line and their status, and no server is left."""
import glob
import os
import random
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, convert  # noqa: E402

packed = convert("tests/data/tiny-m2")
command = [sys.executable, "scripts/bench_split.py", f"{BIN}/minimax-serve", packed, "-t", "1", "--max-num-seqs", "6", "--kv-cache-tokens", "40000"]


def left():
    """Servers of this checkpoint that run."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().split(b"\0")
        except OSError:
            continue
        found += [path] if words[0].endswith(b"minimax-serve") and packed.encode() in words else []
    return found


def run(seconds, kind, **environment):
    p = subprocess.Popen(command, env={**os.environ, "STREAMS": "2", "PROMPT": "300", "OFFLOAD_MB": "64", **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if seconds is not None:
        time.sleep(seconds)
        p.send_signal(kind)
    out, errors = p.communicate(timeout=200)
    assert not left(), (left(), errors)
    return p.returncode, out, errors


status, out, errors = run(None, None, SHAPES="split", SECONDS="1")
assert status == 0 and errors == "" and out.startswith("split") and "x idle" in out, (status, out, errors)
for i, seconds in enumerate((0.3, 1, 2.5, 4, random.uniform(0.1, 5), random.uniform(0.1, 5))):
    kind = (signal.SIGINT, signal.SIGTERM)[i % 2]
    status, out, errors = run(seconds, kind, SHAPES=("split", "single split")[i % 3 > 0], SECONDS="30")
    lines = errors.splitlines()
    assert status == 128 + kind and len(lines) == 1 and "the servers have been ended" in lines[0], (seconds, status, errors)
