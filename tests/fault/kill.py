#!/usr/bin/env python3
"""kill.py CONVERT SRC RUNS [SEED] [-- OPTION…]: kill -9 at random moments, resume, compare with an undisturbed run byte for byte.

Each run starts a conversion into a fresh directory, kills it after a random part of the time that an undisturbed run takes, and goes on
with --resume, which is killed again now and then. OPTIONs are those of the conversion (by default block FP8 at tp 2). Prints how many of the runs ended identical; exit status 1 unless all did."""
import filecmp
import multiprocessing.pool
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
convert, source, runs, *seed = sys.argv[1:split]
runs, seed = int(runs), int(seed[0]) if seed else int.from_bytes(os.urandom(4), "little")
options = sys.argv[split + 1:] or ["--tp", "2", "--quant", "block_fp8", "--part-size", "48M"]
work = tempfile.mkdtemp(prefix="mm-kill-")


def command(out, *more):
    return [convert, source, "-o", out, *options, "-q", "-j", "3", "--journal-every", "1M", *more]


def same(a, b):
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def attempt(number):
    """True when the output equals the reference and nothing else is left beside it."""
    parent = os.path.join(work, f"run{number}")
    out = os.path.join(parent, "out")
    os.mkdir(parent)
    rng, kills = random.Random(f"{seed} {number}"), 0
    for _ in range(60):
        p = subprocess.Popen(command(out, "--resume"), stderr=subprocess.PIPE)
        if kills < 6 and rng.random() < 0.8:
            time.sleep(rng.random() * usual)
            p.kill()
            kills += 1
        err = p.communicate()[1]
        if p.returncode == 0:
            break
        if p.returncode != -9:
            print(f"run {number}: exit status {p.returncode}: {err.decode()}")
            return False
        if os.path.exists(out) and not same(out, reference):
            print(f"run {number}: something incomplete has the final name")
            return False
    ok = os.path.isdir(out) and same(out, reference) and os.listdir(parent) == ["out"]
    if not ok:
        print(f"run {number}: differs; left: {os.listdir(parent)}")
    shutil.rmtree(parent)
    return ok


try:
    reference = os.path.join(work, "reference")
    start = time.monotonic()
    subprocess.run(command(reference), check=True)
    usual = time.monotonic() - start
    with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
        good = sum(pool.imap_unordered(attempt, range(runs)))
    print(f"kill -9: {good} of {runs} runs identical after --resume (seed {seed}, {usual * 1000:.0f} ms undisturbed)")
    sys.exit(good != runs)
finally:
    shutil.rmtree(work)
