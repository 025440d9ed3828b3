#!/usr/bin/env python3
"""resume_options.py [INTERRUPTIONS] [SEED]: runs of changing options over one output, interrupted at random, journals altered between them.

An attempt is a few conversions into one directory, each with some options changed (ranks, tp, ep, pp, quant, the head's scheme, layout, part
size, compression, --follow, nonfinite weights, shares, threads, memory, --resume, --restart, --force), most of them ended by SIGTERM or SIGKILL at a
random moment. Now and then a journal is altered with its checks made right: steps and blocks renumbered, records dropped or repeated. What is asked of each run:

  status 0       the output is byte for byte that of an undisturbed run of these options
  a refusal      one line, a documented status, the one an undisturbed run would give or 2; no file of ours is another than before
  interrupted    what has the final name is the output that was there, or that of these options, whole

and at the end that the conversion which lies there can be continued by the options that began it, or, where a journal was altered, refused.
INTERRUPTIONS (30) are counted as runs that a signal ended; exit status 1 when anything else was seen."""
import collections
import json
import multiprocessing.pool
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from journal_records import header_bytes, records, sealed
import resumed

CONVERT = os.path.join(os.environ.get("BUILD", "build"), "bin", "minimax-convert")
wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 30
seed = int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4), "little")
work = tempfile.mkdtemp(prefix="mm-resume-")
guard, figures, oracles = threading.Lock(), collections.Counter(), {}

# What alters the output or who makes what of it: name -> choices.
SPACE = {
    "source": ["tests/data/tiny-m2", "tests/data/tiny-m1", work + "/nan"],
    "quant": ["none", "block_fp8", "experts_int4", "nvfp4a16"],
    "head": [None, None, "block_fp8", "int8"],
    "shape": [("1", None), ("2", None), ("2", "0"), ("2", "1"), ("4", None), ("4", "0-2"), ("4", "1,3"), ("hf", None)],
    "ep": ["1", "1", "2"],
    "pp": ["1", "2"],
    "attn": [None, None, "1"],
    "part": ["512K", "1M", "9M"],
    "compress": [False, False, True],
    "follow": [False, False, False, True],
    "nonfinite": [False, True],
}


def key(o):
    return tuple(o[k] for k in SPACE)


def arguments(o):
    tp, ranks = o["shape"]
    words = ["--quant", o["quant"], "--part-size", o["part"]]
    if tp == "hf":
        words += ["--layout", "hf"]
    else:
        words += ["--tp", tp, "--ep", o["ep"], "--pp", o["pp"]] + (["--ranks", ranks] if ranks else []) + (["--attn-tp", o["attn"]] if o["attn"] else []) + (["--compress", "zstd"] if o["compress"] else [])
    words += ["--head", o["head"]] if o["head"] else []
    words += ["--follow", "--follow-quiet", "0"] if o["follow"] else []
    return words + (["--allow-nonfinite"] if o["nonfinite"] else [])


def contents(path):
    """{name: SHA-256} of a directory's files; None when there is none."""
    return resumed.files(path) if os.path.isdir(path) else None


def oracle(o):
    """(status, contents, what it says) of an undisturbed run of these options, once for each."""
    with guard:
        mine = oracles.setdefault(key(o), [threading.Lock(), None])
    with mine[0]:
        if mine[1] is None:
            out = tempfile.mkdtemp(dir=work) + "/out"
            p = subprocess.run([CONVERT, o["source"], "-o", out, *arguments(o)], capture_output=True, check=False)
            mine[1] = (p.returncode, contents(out), lost(p.stderr))
            shutil.rmtree(os.path.dirname(out))
        return mine[1]


def lost(stderr):
    """The line that counts weights stored as 0."""
    return [line for line in stderr.splitlines() if b"NaN or infinite" in line]


def files(parent):
    """{path: (size, time)} of all files: what a refusal must leave alone."""
    found = {}
    for where, _, names in os.walk(parent):
        for name in names:
            s = os.stat(os.path.join(where, name))
            found[os.path.join(where, name)] = (s.st_size, s.st_mtime_ns, s.st_ino)
    return found


def journals(parent):
    return [os.path.join(parent, n) for n in sorted(os.listdir(parent)) if n.startswith(".out.partial.journal")]


def alter(rng, path):
    """Another journal with right checks; what it says of steps, blocks and ranks is not what was done."""
    with open(path, "rb") as f:
        text = f.read()
    if not header_bytes(text):
        return None
    head, found = records(text)
    steps, blocks = [s for _, done in found for s in done], [e for entries, _ in found for e in entries]
    how = rng.choice(["step + n", "steps swapped", "puts swapped", "put's rank", "unchecked puts", "blocks", "block's rank", "dropped", "repeated", "cut"])
    if how == "step + n":
        n = rng.randrange(1, 40)
        for s in steps:
            s[0] += n
    elif how == "steps swapped" and len(steps) > 1:
        a, b = rng.sample(steps, 2)
        a[0], b[0] = b[0], a[0]
    elif how == "puts swapped" and len(steps) > 1:
        a, b = rng.sample(steps, 2)
        a[2], b[2] = b[2], a[2]
    elif how == "put's rank":
        for s in steps:
            for x in s[2]:
                x[0] = (x[0] + 1) % 4
    elif how == "unchecked puts":
        for s in steps:
            for x in s[2]:
                x[3] = 0
    elif how == "blocks":
        for e in blocks:
            e[2] += rng.randrange(3)
    elif how == "block's rank":
        for e in blocks:
            e[0] = (e[0] + 1) % 4
    elif how == "dropped" and found:
        del found[rng.randrange(len(found))]
    elif how == "repeated" and found:
        found.append(rng.choice(found))
    text = sealed(head, found)
    with open(path, "wb") as f:
        f.write(text[: rng.randrange(len(head), len(text) + 1)] if how == "cut" else text)
    return how


class Attempt:
    def __init__(self, number):
        self.rng = random.Random(f"{seed} {number}")
        self.number, self.log, self.altered = number, [], False
        self.parent = tempfile.mkdtemp(dir=work)
        self.out = self.parent + "/out"
        self.there = None  # what has the final name
        self.used = {}

    def fail(self, what):
        raise AssertionError(f"attempt {self.number}: {what}\n  " + "\n  ".join(self.log[-8:]))

    def one(self, o, how, kill=None, little=False):
        """A run of these options; how: --resume and the like, shares; little: perhaps with too little memory."""
        rng = self.rng
        pace = ["-j", str(rng.randrange(1, 4)), "--journal-every", rng.choice(["16K", "200K", "1M"])]
        if rng.random() < 0.3:
            pace += ["--mem-limit", rng.choice(["300M", "600M", "16M" if little else "400M"])]
        before = files(self.parent)
        command = [CONVERT, o["source"], "-o", self.out, *arguments(o), *pace, *how]
        start = time.monotonic()
        p = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if kill:
            time.sleep(rng.uniform(0.05, 1) * usual)
            p.send_signal(kill)
        err = p.communicate()[1]
        rc, now = p.returncode, contents(self.out)
        self.log.append(f"{rc} after {time.monotonic() - start:.3f} s: {' '.join(command[1:])}: {err.decode().splitlines()[-1:]}")
        share = "--part" in how
        with guard:
            figures["runs"] += 1
            figures[rc] += 1
            figures["interruptions"] += rc in (75, -9, -15)
        if rc == 0 and share:
            if now != self.there:
                self.fail("a share changed what has the final name")
        elif rc == 0:
            status, expected, says = oracle(o)
            if status != 0 or now != expected:
                self.fail("status 0 and not the bytes of an undisturbed run: " + str([n for n in (now or {}) if now[n] != (expected or {}).get(n)]))
            if self.there != now and lost(err) != says:
                self.fail(f"{lost(err)} where an undisturbed run says {says}")
        elif rc in (75, -9, -15):
            if now != self.there and now != oracle(o)[1]:
                self.fail("something incomplete has the final name")
        else:
            if rc not in (2, 8) and rc != oracle(o)[0]:
                self.fail("a status that an undisturbed run does not give")
            if len([x for x in err.splitlines() if x.startswith(b"minimax-convert: error: ")]) != 1 or now != self.there:
                self.fail("a refusal with other than one line, or with the output changed")
            after = files(self.parent)
            replacing = self.parent + "/.out.partial.replaced" in before  # what a killed --force had begun is finished first, whoever comes
            if rc in (2, 8) and "--restart" not in how and after != before and not replacing:
                self.fail("a refusal that changed files: " + str(set(after.items()) ^ set(before.items())))
        self.there = now
        return rc

    def change(self, o):
        o = dict(o)
        for name in self.rng.sample(list(SPACE), self.rng.choice([0, 0, 1, 1, 2])):
            if name != "source" or self.rng.random() < 0.3:
                o[name] = self.rng.choice(SPACE[name])
        return o

    def end(self):
        """The options that began what lies there continue it; then a new start gives what it should."""
        lies = bool(journals(self.parent))
        taken = False
        for o in reversed(list(self.used.values())):
            rc = self.one(o, ["--resume", "--force"])
            taken = rc == 0 or (rc != 2 and rc == oracle(o)[0])
            if taken:
                break
        if lies and not taken and not self.altered:
            self.fail("no options continue what lies there")
        o = self.rng.choice(list(self.used.values()))
        if self.one(o, ["--restart", "--force"]) == 0 and os.listdir(self.parent) != ["out"]:
            self.fail(f"left: {os.listdir(self.parent)}")

    def run(self):
        rng = self.rng
        o = {name: rng.choice(choices) for name, choices in SPACE.items()}
        for _ in range(rng.randrange(3, 10)):
            how = rng.choice([["--resume"]] * 6 + [["--resume", "--force"], ["--restart"], ["--restart", "--force"], []])
            if rng.random() < 0.2:
                how = how + ["--part", rng.choice(["0/2", "1/2", "0/3", "2/3"])]
            self.used[key(o)] = o
            self.one(o, how, rng.choice([None, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]), little=True)
            left = journals(self.parent)
            if left and rng.random() < 0.15:
                how = alter(rng, rng.choice(left))
                self.altered = self.altered or how is not None
                self.log.append(f"altered: {how}")
            o = self.change(o) if rng.random() < 0.6 else rng.choice(list(self.used.values()))
        self.end()
        shutil.rmtree(self.parent)


def attempt(number):
    with guard:
        if figures["interruptions"] >= wanted or figures["wrong"] >= 5:
            return
        figures["attempts"] += 1
    try:
        Attempt(number).run()
    except AssertionError as wrong:
        with guard:
            figures["wrong"] += 1
            print(wrong, flush=True)


def not_a_number(source, target):
    """A copy whose weights are NaN here and there."""
    shutil.copytree(source, target)
    rng = random.Random(1)
    for name in sorted(os.listdir(target)):
        if not name.startswith("model-"):
            continue
        with open(os.path.join(target, name), "r+b") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(n))
            plain = sorted(k for k, v in header.items() if k != "__metadata__" and v["dtype"] == "BF16" and "layers" in k and k.endswith("weight") and "norm" not in k)
            for tensor in rng.sample(plain, min(5, len(plain))):
                start, end = header[tensor]["data_offsets"]
                f.seek(8 + n + rng.randrange(start, end, 2))
                f.write(b"\xc0\x7f")


try:
    not_a_number("tests/data/tiny-m2", work + "/nan")
    first = {name: choices[0] for name, choices in SPACE.items()}
    oracle(first)
    begun = time.monotonic()
    subprocess.run([CONVERT, first["source"], "-q", "-o", work + "/usual", *arguments(first)], check=True)
    usual = max(0.04, time.monotonic() - begun)
    with multiprocessing.pool.ThreadPool(2 * os.cpu_count()) as pool:
        for _ in pool.imap_unordered(attempt, range(20 * wanted)):
            pass
    refused = sum(n for status, n in figures.items() if isinstance(status, int) and status > 0 and status != 75)
    print(f"{figures['interruptions']} interruptions in {figures['runs']} runs of {len(oracles)} option sets, {figures['attempts']} outputs: {figures[0]} runs done with the bytes "
          f"of an undisturbed run, {refused} refused, {figures['wrong']} wrong (seed {seed})")
    sys.exit(figures["wrong"] > 0)
finally:
    shutil.rmtree(work, ignore_errors=True)
