#!/usr/bin/env python3
"""torture.py CONVERT SRC [--every N] [--kill] [--seed S] [--options "…"]: fails (or kills at) one system call after another of a small conversion.

The conversion is traced once. Then, for each system call after the configuration is first read, for each occurrence and each errno that it
may give, the conversion runs again with that one call failing (strace -e inject). Each run must end with a documented status, with exactly
one line on stderr unless it succeeded, and with nothing or a complete checkpoint under the final name; then --resume must complete it byte
for byte. With --resumed the conversion is one that was killed before and goes on. With --kill the process is killed on entering the call instead. --every N takes every N-th case, from a random start."""
import argparse
import collections
import multiprocessing.pool
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

from resumed import wrong

ERRORS = {
    "openat": ["EACCES", "EMFILE", "EIO"], "pread64": ["EIO", "EINTR"], "pwrite64": ["ENOSPC", "EIO", "EINTR"],
    "fsync": ["EIO"], "fdatasync": ["EIO"], "renameat2": ["EIO", "EEXIST"], "mkdirat": ["EACCES", "ENOSPC"], "fallocate": ["ENOSPC"],
    "newfstatat": ["EIO"], "flock": ["EINTR", "ENOLCK"], "getdents64": ["EIO"], "close": ["EIO"], "fchmod": ["EPERM"], "mmap": ["ENOMEM"],
    "unlinkat": ["EIO"], "fstatfs": ["EIO"], "lseek": ["EIO"],
}
ALLOWED = {0, 2, 3, 5, 6, 7, 8}  # 1 would be a bug of ours

parser = argparse.ArgumentParser()
parser.add_argument("convert")
parser.add_argument("source")
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--kill", action="store_true")
parser.add_argument("--resumed", action="store_true")
parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
parser.add_argument("--options", default="", help="more options of the conversion, in one word")
args = parser.parse_args()
goes_on = ["--resume"] if args.resumed else []
rng = random.Random(args.seed)
work = tempfile.mkdtemp(prefix="mm-torture-")


def command(out, *more):
    return [args.convert, args.source, "-o", out, "--tp", "2", "--quant", "block_fp8", "-q", "-j", "1", "--part-size", "1M",
            "--journal-every", "1M", *args.options.split(), *more]


def begin(name):
    """A new directory for the output, with the interrupted conversion in it when there is one."""
    parent = os.path.join(work, name)
    if args.resumed:
        shutil.copytree(stopped, parent)
    else:
        os.mkdir(parent)
    return parent


def occurrences():
    """system call -> (first, last): its occurrences from the first look at the configuration on."""
    log = os.path.join(work, "trace")
    subprocess.run(["strace", "-f", "-o", log, *command(os.path.join(begin("traced"), "out"), *goes_on)], check=True)
    started, before, after = False, collections.Counter(), collections.Counter()
    with open(log, errors="replace") as f:
        for line in f:
            m = re.match(r"\d+ +(\w+)\(", line)
            if not m:
                continue
            started = started or "config.json" in line
            (after if started else before)[m[1]] += 1
    return {call: (before[call] + 1, before[call] + after[call]) for call in ERRORS if after[call]}


def attempt(number, call, when, what):
    parent = begin(f"run{number}")
    out = os.path.join(parent, "out")
    p = subprocess.run(["strace", "-f", "-o", "/dev/null", "-e", f"inject={call}:{what}:when={when}", *command(out, *goes_on)], capture_output=True, check=False)
    lines = p.stderr.decode(errors="replace").splitlines()
    found = None
    if p.returncode not in ((0, -9, 137) if args.kill else ALLOWED):
        found = f"status {p.returncode}"
    elif not args.kill and p.returncode != 0 and len(lines) != 1:
        found = f"{len(lines)} lines on stderr"
    found = found or wrong(out, reference, command(out, "--resume"))
    shutil.rmtree(parent)
    if found:
        print(f"{call} {what} when={when}: {found}: {' | '.join(lines[:3])}")
    return not found


try:
    reference = os.path.join(work, "reference")
    subprocess.run(command(reference), check=True)
    stopped = os.path.join(work, "stopped")
    os.mkdir(stopped)
    if args.resumed:
        half = ["strace", "-f", "-o", "/dev/null", "-e", "inject=fdatasync:signal=KILL:when=5", *command(os.path.join(stopped, "out"))]
        subprocess.run(half, stderr=subprocess.DEVNULL, check=False)
        assert ".out.partial.journal" in os.listdir(stopped), "the conversion was over before it was killed"
    cases = []
    for call, (first, last) in occurrences().items():
        for when in range(first, last + 1):
            cases += [(call, when, w) for w in (["signal=KILL"] if args.kill else [f"error={e}" for e in ERRORS[call]])]
    chosen = cases[rng.randrange(args.every) :: args.every]
    with multiprocessing.pool.ThreadPool(os.cpu_count()) as pool:
        good = sum(pool.starmap(attempt, [(i, *case) for i, case in enumerate(chosen)], 1))
    print(f"{'kill at' if args.kill else 'failing'} each system call{' of a resumed run' if args.resumed else ''}: {good} of {len(chosen)} right ({len(cases)} cases, seed {args.seed})")
    sys.exit(good != len(chosen))
finally:
    shutil.rmtree(work)
