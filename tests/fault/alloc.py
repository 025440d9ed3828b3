#!/usr/bin/env python3
"""alloc.py [--every N] [--seed S] [--only NAME]: one allocation after another fails, once or from then on (preload/fail_alloc.c).

Each program does a small piece of work: a conversion, a resumed one, verify, inspect, archive, generating text. Its allocations are counted;
then it runs again with the N-th failing, libraries' own included; those that write no files run a few times only, and fork before each
allocation, as long as they have one thread. Each case must end with status 8 and exactly one line on stderr, with nothing
incomplete under the final name and nothing on stdout that is not the beginning of the result; or, where the allocation was not needed, with the result of
an undisturbed run. An interrupted conversion must be complete after --resume (tried for a sample). --every N takes every N-th case, from a
random start. The last line is the figure; exit status 1 unless all were right."""
import argparse
import collections
import filecmp
import json
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
CONVERT = ["minimax-convert", SRC, "-o", OUT, "--tp", "2", "--quant", "nvfp4a16", "--search", "absmax", "-q", "-j", "1", "--part-size", "128K",
           "--journal-every", "16K", "--override", "re:embed_.*=mxfp8"]
RUNS = 8  # of a program that forks
# name -> (command, what it makes, the directory it starts from); those that make nothing fork
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
    "eval": (["minimax-eval", work + "/text", "--ids", work + "/ids.json", "--window", "8", "--limit", "1", "--threads", "1"], None, None),
}


def start(command, root, **environment):
    command = [BIN + command[0]] + [a.format(root) for a in command[1:]]
    return subprocess.run(command, capture_output=True, env=dict(os.environ, **environment), check=False)


def need(*command):
    subprocess.run([BIN + command[0], *command[1:]], check=True)


def same(a, b):
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def judge(name, root, status, stdout, stderr, expected):
    """What is wrong with how a case ended, or None."""
    command, made, begin = JOBS[name]
    out, lines = OUT.format(root), stderr.count(b"\n")
    if status == 0:
        return "status 0 with another result" if stdout != expected or (made and not same(out, made)) else None
    begins = (command[0].encode() + b": error: E_", b'{"program":"' + command[0].encode() + b'","error":"E_')  # the second one with --json
    if status != 8 or lines != 1 or not stderr.startswith(begins[:1 + ("--json" in command)]):
        return f"status {status}, {lines} lines"
    if os.path.exists(out) and not same(out, made) and not (begin == FORCED and same(out, FORCED + "/out")):  # what fails after the rename leaves it complete
        return "status 8, and something incomplete has the final name"
    return None if expected.startswith(stdout) else "status 8, and something else on stdout"


def which(case):
    """Case 0: the first allocation fails; 1: it and all after it; 2: the second …"""
    return f"{case // 2 + 1}{'+' if case % 2 else ''}"


def attempt(job):
    """Runs one case: what went wrong, or None."""
    number, name, case, expected = job
    command, made, begin = JOBS[name]
    root = f"{work}/run{number}"
    if begin:
        shutil.copytree(begin, root)
    else:
        os.mkdir(root)
    p = start(command, root, LD_PRELOAD=SHIM, FAIL_ALLOC=which(case))
    wrong = judge(name, root, p.returncode, p.stdout, p.stderr, expected)
    if not wrong and p.returncode and number % 20 == 0 and name in ("convert", "convert --compress"):
        after = start(command + ["--resume"], root)
        if after.returncode or not same(OUT.format(root), made) or os.listdir(root) != ["out"]:
            wrong = f"--resume: status {after.returncode}, left {os.listdir(root)}: {after.stderr.decode()}"
    shutil.rmtree(root)
    return wrong and f"{name}, allocation {which(case)}: {wrong}: {p.stderr.decode(errors='replace').strip()[:300]}"


def attempt_forking(job):
    """Runs every step-th case from `first` on, as far as the program forks: (name, cases tried, what went wrong)."""
    name, first, step, expected = job
    command = JOBS[name][0]
    stem = f"{work}/{name}-{first}".replace(" ", "")
    with open(stem + ".out", "w+b") as out, open(stem + ".err", "w+b") as err:
        forks = {"ALLOC_FORK": stem + ".cases", "ALLOC_CASES": f"{first},{step}", "LD_PRELOAD": SHIM}
        p = subprocess.run([BIN + command[0]] + command[1:], stdout=out, stderr=err, env=dict(os.environ, **forks), check=False)
        out.seek(0)
        err.seek(0)
        wrong = [] if p.returncode == 0 and out.read() == expected else [f"{name}, forking: status {p.returncode}: {err.read()}"]
    tried = []
    with open(stem + ".cases", "rb") as f:
        for line in f:
            case, status, n, m = map(int, line.split())
            stdout, stderr = f.read(n), f.read(m)
            tried.append(case)
            bad = judge(name, work + "/none", status, stdout, stderr, expected)
            if bad:
                wrong.append(f"{name}, allocation {which(case)}: {bad}: {stderr.decode(errors='replace').strip()[:300]}")
    return name, tried, wrong


def prepare():
    small = ["--layers", "1", "--experts", "4", "--hidden", "128", "--inter", "64", "--heads", "8", "--vocab", "256", "--files", "2", "--bf16"]
    subprocess.run([sys.executable, "scripts/bench_checkpoint.py", SRC, *small], check=True, stdout=subprocess.DEVNULL)
    convert = [a.format(work) for a in CONVERT]
    need(*convert)
    os.rename(work + "/out", PACKED)
    os.mkdir(FORCED)
    need("minimax-convert", "tests/data/tiny-m2", "-o", FORCED + "/out", "-q")
    need("minimax-archive", "pack", PACKED, "-o", ARCHIVE, "-q")
    need("minimax-convert", "tests/data/tiny-m2", "-o", work + "/text", "-q")
    with open("tests/data/tiny-m2/held-out-ids.json", encoding="ascii") as f, open(work + "/ids.json", "w", encoding="ascii") as short:
        json.dump(json.load(f)[:64], short)
    os.mkdir(STOPPED)
    stopped = [BIN + CONVERT[0]] + [a.format(STOPPED) for a in CONVERT[1:]]
    subprocess.run(["strace", "-f", "-o", "/dev/null", "-e", "inject=fdatasync:signal=KILL:when=3", *stopped], check=False, stderr=subprocess.DEVNULL)
    assert ".out.partial" in os.listdir(STOPPED), os.listdir(STOPPED)


def main():
    prepare()
    cases, forks, counts = [], [], collections.Counter()  # cases: (name, case, expected stdout)
    for name, (command, made, begin) in JOBS.items():
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
        first = rng.randrange(args.every)
        cases += [(name, case, p.stdout) for case in range(first, 2 * counts[name], args.every)]
        forks += [] if made else [(name, first + k * args.every, RUNS * args.every, p.stdout) for k in range(RUNS)]
    bad, done = [], set()
    with multiprocessing.Pool() as pool:
        for name, tried, wrong in pool.imap_unordered(attempt_forking, forks):
            bad += wrong
            done |= {(name, case) for case in tried}
        rest = [(i, *c) for i, c in enumerate(cases) if c[:2] not in done]
        bad += [w for w in pool.imap_unordered(attempt, rest, 16) if w]
    for line in bad[:40]:
        print(line)
    print("allocations: " + ", ".join(f"{n} {c}" for n, c in counts.items()))
    print(f"failing each allocation: {len(cases) - len(bad)} of {len(cases)} right ({2 * sum(counts.values())} cases, {len(done)} in forks, seed {args.seed})")
    return len(bad) > 0


try:
    sys.exit(main())
finally:
    shutil.rmtree(work)
