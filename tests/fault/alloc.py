#!/usr/bin/env python3
"""alloc.py [--every N] [--seed S] [--only NAME]: one allocation after another fails, once or from then on (preload/fail_alloc.c).

Each program does a small piece of work: a conversion, a resumed one, verify, inspect, archive, generating text. Its allocations are counted;
then it runs again with the N-th failing, libraries' own included. Each run must end with status 8 and exactly one line on stderr, with nothing
incomplete under the final name and nothing on stdout that is not the beginning of the result; or, where the allocation was not needed, with the result of
an undisturbed run. An interrupted conversion must be complete after --resume (tried for a sample). --every N takes every N-th case, from a
random start. The last line is the figure; exit status 1 unless all were right."""
import argparse
import collections
import filecmp
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
parser.add_argument("--only")
args = parser.parse_args()
BIN, SHIM = os.environ["BUILD"] + "/bin/", os.environ["BUILD"] + "/tests/fault/preload/fail_alloc.so"
rng = random.Random(args.seed)
work = tempfile.mkdtemp(prefix="mm-alloc-", dir=os.environ.get("TMPDIR"))
SRC, PACKED, ARCHIVE, STOPPED, FORCED = (work + name for name in ("/src", "/packed", "/archive", "/stopped", "/forced"))
OUT = "{}/out"
CONVERT = ["minimax-convert", SRC, "-o", OUT, "--tp", "2", "--quant", "nvfp4a16", "-q", "-j", "1", "--part-size", "512K", "--journal-every", "64K",
           "--override", "re:embed_.*=mxfp8"]
# name -> (command, what it makes, the directory it starts from)
JOBS = {
    "convert": (CONVERT, PACKED, None),
    "convert --compress": (CONVERT + ["--compress", "zstd"], ARCHIVE, None),
    "convert --resume": (CONVERT + ["--resume"], PACKED, STOPPED),
    "convert --force": (CONVERT + ["--force"], PACKED, FORCED),
    "verify": (["minimax-verify", PACKED, "-j", "1"], None, None),
    "verify --source": (["minimax-verify", PACKED, "--source", SRC, "-j", "1", "-q"], None, None),
    "inspect": (["minimax-inspect", PACKED, "--json"], None, None),
    "archive pack": (["minimax-archive", "pack", PACKED, "-o", OUT, "-j", "1", "-q"], ARCHIVE, None),
    "archive unpack": (["minimax-archive", "unpack", ARCHIVE, "-o", OUT, "-j", "1", "-q"], PACKED, None),
    "run": (["minimax-run", work + "/text", "-p", "In the", "-n", "2", "-q", "-t", "1"], None, None),
    "eval": (["minimax-eval", work + "/text", "--ids", "tests/data/tiny-m2/held-out-ids.json", "--window", "8", "--limit", "1", "--threads", "1"], None, None),
}


def start(command, root, **environment):
    command = [BIN + command[0]] + [a.format(root) for a in command[1:]]
    return subprocess.run(command, capture_output=True, env=dict(os.environ, **environment), check=False)


def need(*command):
    subprocess.run([BIN + command[0], *command[1:]], check=True)


def same(a, b):
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def attempt(case):
    """What went wrong, or None."""
    number, name, which, again, expected = case
    command, made, begin = JOBS[name]
    root = f"{work}/run{number}"
    if begin:
        shutil.copytree(begin, root)
    else:
        os.mkdir(root)
    p = start(command, root, LD_PRELOAD=SHIM, FAIL_ALLOC=which)
    out, lines, wrong = OUT.format(root), p.stderr.count(b"\n"), None
    if p.returncode == 0:
        if p.stdout != expected or (made and not same(out, made)):
            wrong = "status 0 with another result"
    elif p.returncode != 8 or lines != 1 or not p.stderr.startswith(command[0].encode() + b": error: E_"):
        wrong = f"status {p.returncode}, {lines} lines"
    elif os.path.exists(out) and not same(out, made) and not (begin == FORCED and same(out, FORCED + "/out")):  # what fails after the rename leaves it complete
        wrong = "status 8, and something incomplete has the final name"
    elif not expected.startswith(p.stdout):
        wrong = "status 8, and something else on stdout"
    elif again and name in ("convert", "convert --compress"):
        after = start(command + ["--resume"], root)
        if after.returncode or not same(out, made) or os.listdir(root) != ["out"]:
            wrong = f"--resume: status {after.returncode}, left {os.listdir(root)}: {after.stderr.decode()}"
    shutil.rmtree(root)
    return wrong and f"{name}, allocation {which}: {wrong}: {p.stderr.decode(errors='replace').strip()[:300]}"


def prepare():
    small = ["--layers", "1", "--experts", "4", "--hidden", "256", "--inter", "128", "--heads", "8", "--vocab", "512", "--files", "2", "--bf16"]
    subprocess.run([sys.executable, "scripts/bench_checkpoint.py", SRC, *small], check=True, stdout=subprocess.DEVNULL)
    convert = [a.format(work) for a in CONVERT]
    need(*convert)
    os.rename(work + "/out", PACKED)
    os.mkdir(FORCED)
    need("minimax-convert", "tests/data/tiny-m2", "-o", FORCED + "/out", "-q")
    need("minimax-archive", "pack", PACKED, "-o", ARCHIVE, "-q")
    need("minimax-convert", "tests/data/tiny-m2", "-o", work + "/text", "-q")
    os.mkdir(STOPPED)
    stopped = [BIN + CONVERT[0]] + [a.format(STOPPED) for a in CONVERT[1:]]
    subprocess.run(["strace", "-f", "-o", "/dev/null", "-e", "inject=fdatasync:signal=KILL:when=3", *stopped], check=False, stderr=subprocess.DEVNULL)
    assert ".out.partial" in os.listdir(STOPPED), os.listdir(STOPPED)


def main():
    prepare()
    cases, counts = [], collections.Counter()
    for name, (command, _, begin) in JOBS.items():
        if args.only not in (None, name):
            continue
        root = work + "/count"
        if begin:
            shutil.copytree(begin, root)
        else:
            os.mkdir(root)
        p = start(command, root, LD_PRELOAD=SHIM, ALLOC_COUNT=work + "/number")
        assert p.returncode == 0, (name, p.stderr)
        shutil.rmtree(root)
        with open(work + "/number", encoding="ascii") as f:
            counts[name] = int(f.read())
        cases += [(name, f"{n}{more}", p.stdout) for n in range(1, counts[name] + 1) for more in ("", "+")]
    total = len(cases)
    cases = cases[rng.randrange(args.every) :: args.every]
    with multiprocessing.Pool() as pool:
        bad = [w for w in pool.imap_unordered(attempt, [(i, n, w, i % 20 == 0, e) for i, (n, w, e) in enumerate(cases)], 16) if w]
    for line in bad[:40]:
        print(line)
    print("allocations: " + ", ".join(f"{n} {c}" for n, c in counts.items()))
    print(f"failing each allocation: {len(cases) - len(bad)} of {len(cases)} right ({total} cases, seed {args.seed})")
    return len(bad) > 0


try:
    sys.exit(main())
finally:
    shutil.rmtree(work)
