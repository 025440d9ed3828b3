#!/usr/bin/env python3
"""Planted faults: changes one operator or constant at a random place in a copy of the tree and runs the tests that execute the line, the quickest
first, until one fails. Counts the faults found.

    scripts/plant.py [--count 20] [--seed 1] [--only REGEX] [--check] [--replay LOG] [--work build/plant] [--log FILE]

The tests are those of `make quick` without lint; with --check, those of `make check` after them: the units again under the sanitizers, then the
other programs of tests/. A build with coverage says once which test executes which line (kept in WORK/map.json, brought up to date when the tree
changes); a test that never executes a line cannot see a fault in it and is not run. A test that takes ten times its usual time has found the
fault. A fault counts when it compiles and changes the machine code of its file. One line for each: found by which test, or UNSEEN with file,
line and change. The last line is the share found. --replay plants the faults of an earlier log again. Exit status 0; a figure, not a test."""
import argparse
import glob
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

FOLDERS = ("formats", "quant", "loader", "convert", "runtime")
SWAPS = [
    (r"(?<=[\w)\]] )<(?= [\w(*&])", "<="), (r"(?<=[\w)\]] )<=(?= )", "<"), (r"(?<=[\w)\]] )>(?= [\w(*&])", ">="), (r"(?<=[\w)\]] )>=(?= )", ">"),
    (r"(?<= )==(?= )", "!="), (r"(?<= )!=(?= )", "=="), (r"(?<= )\+(?= )", "-"), (r"(?<= )-(?= )", "+"),
    (r"(?<=[\w)\]] )\*(?= [\w(])", "/"), (r"(?<=[\w)\]] )/(?= [\w(])", "*"), (r"(?<= )%(?= )", "/"),
    (r"(?<= )&&(?= )", "||"), (r"(?<= )\|\|(?= )", "&&"), (r"(?<= )<<(?= )", ">>"), (r"(?<= )>>(?= )", "<<"),
    (r"(?<= )\+=(?= )", "-="), (r"(?<= )\|=(?= )", "&="), (r"\+\+(?=[;)\]])", "--"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
    (r"(?<=[ (\[])0(?=[;)\],])", "1"), (r"(?<=[ (\[])1(?=[;)\],])", "2"), (r"(?<=[ (\[])1(?=[;)\],])", "0"),
    (r"!(?=[a-z(])", ""),
]
COVERAGE = ["BUILD=build/cov", "CFLAGS=-std=c11 -O1 -g -fPIE --coverage -fprofile-update=atomic", "LDFLAGS=-pie --coverage"]
SANITIZED = ["CC=clang", "SAN=1", "FUZZ=fast", "CUDA=0", "BUILD=build/san"]
SLOWEST = 60  # seconds with coverage: a slower test of make check is left out


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--count", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--check", action="store_true", help="go on with the tests of make check where make quick finds nothing")
    p.add_argument("--only", default="", help="plant in files whose path this expression matches")
    p.add_argument("--replay", help="plant the faults of this log again, those that its lines say are UNSEEN first")
    p.add_argument("--unseen", action="store_true", help="of --replay, only those UNSEEN")
    p.add_argument("--budget", type=float, default=20, help="seconds of tests, by their usual time, that one fault may cost")
    p.add_argument("--work", default="build/plant")
    p.add_argument("--log")
    return p.parse_args()


def sources(root):
    found = []
    for folder in FOLDERS:
        for place, _, names in os.walk(os.path.join(root, folder)):
            if "cuda" not in place.split(os.sep):
                found += [os.path.relpath(os.path.join(place, n), root) for n in names if n.endswith(".c")]
    return sorted(found)


def places(text):
    """(start, end, replacement) of every change, outside comments, strings, character constants and preprocessor lines."""
    hidden = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*',
                    lambda m: re.sub(r"[^\n]", "\x00", m.group()), text, flags=re.S | re.M)
    return [(m.start(), m.end(), to) for pattern, to in SWAPS for m in re.finditer(pattern, hidden)]


def code_of(path):
    """The machine code and constants of an object, without its debugging information."""
    stripped = path + ".stripped"
    subprocess.run(["objcopy", "--strip-debug", "--strip-unneeded", path, stripped], check=True)
    with open(stripped, "rb") as f:
        return f.read()


def make(root, *words):
    p = subprocess.run(["make", "-j1", "CUDA=0", *words], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return p.returncode, p.stdout


def bring(here, root):
    """Copies what git knows of, and what it would add, into the copy; what did not change keeps its time, so that make builds only the rest."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=here, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        a, b = os.path.join(here, name), os.path.join(root, name)
        if not os.path.exists(a):
            continue
        os.makedirs(os.path.dirname(b), exist_ok=True)
        if not os.path.exists(b) or open(a, "rb").read() != open(b, "rb").read():
            shutil.copy(a, b)  # its time is now
    if not os.path.exists(os.path.join(root, ".git")):
        subprocess.run(["git", "init", "-q"], cwd=root, check=True)  # scripts that ask git about the tree find one


class Test:
    """One program of make quick or make check: what to make and what to run."""

    def __init__(self, root, name, quick):
        self.root, self.name, self.quick = root, name, quick
        self.script = os.path.splitext(name)[1] in (".py", ".sh")
        self.record = None  # {"seconds": of a run that passes, "lines": {file: [line]}}

    def build(self, extra=()):
        """Makes what the test needs; false when that fails."""
        build = next((w[6:] for w in extra if w.startswith("BUILD=")), "build")
        if not self.script:
            return make(self.root, *extra, f"{build}/tests/{self.name}")
        beside = [p for d in ("model", "ops", "fault", "interop") for p in glob.glob(f"tests/{d}/*.c", root_dir=self.root)]  # what scripts run
        return make(self.root, *extra, "all", *(f"{build}/{p[:-2]}" for p in beside))

    def run(self, build, limit):
        """The exit status, 124 when the time ran out."""
        build = os.path.join(self.root, build)
        os.makedirs(os.path.join(build, "check"), exist_ok=True)
        tmp = tempfile.mkdtemp(dir=os.path.join(build, "check"))
        env = dict(os.environ, BUILD=build, TMPDIR=tmp, SAN="0", PATH=f"{build}/bin:{os.environ['VENV']}/bin:{os.environ['PATH']}",
                   ASAN_OPTIONS="detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1:allocator_may_return_null=1",
                   UBSAN_OPTIONS="halt_on_error=1", GCOV_ERROR_FILE="/dev/null")
        p = subprocess.Popen([f"tests/{self.name}" if self.script else f"{build}/tests/{self.name}"], cwd=self.root, env=env,
                             stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            return p.wait(limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            try:
                os.killpg(p.pid, signal.SIGKILL)  # and what it left running
            except ProcessLookupError:
                pass
            p.wait()
            shutil.rmtree(tmp, ignore_errors=True)


def tests_of(root, check):
    def listed(*targets):
        said = subprocess.run(["make", "-n", "CUDA=0", *targets], cwd=root, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"scripts/test\.sh check/(\S+) ", said)  # builds by other compilers among them
        return [n for n in found if any(os.path.isfile(os.path.join(root, "tests", n + end)) for end in ("", ".c"))]
    quick = listed("quick")
    others = [n for n in listed("unit", "model", "cli") if n not in quick] if check else []
    return [Test(root, n, True) for n in quick] + [Test(root, n, False) for n in others]


def executed(root):
    """{file: [line]} of what ran since the last call, from the coverage build."""
    found = [os.path.join(p, n) for p, _, names in os.walk(os.path.join(root, "build/cov")) for n in names if n.endswith(".gcda")]
    found = [f for f in found if os.path.relpath(f, os.path.join(root, "build/cov")).split(os.sep)[0] in (*FOLDERS, "pic")]
    lines = {}
    if found:
        said = subprocess.run(["gcov", "--json-format", "--stdout", *found], cwd=root, capture_output=True, text=True, check=True).stdout
        for part in said.splitlines():
            for file in json.loads(part)["files"] if part else []:
                lines.setdefault(file["file"], set()).update(x["line_number"] for x in file["lines"] if x["count"])
    for f in found:
        os.remove(f)
    return {f: sorted(n) for f, n in lines.items()}


def digest(root, paths):
    """Of the text of the C files among these, and of scripts."""
    h = hashlib.sha256()
    for path in sorted(p for p in paths if p.endswith((".c", ".h", ".py", ".sh"))):
        with open(path, "rb") as f:
            h.update(os.path.relpath(path, root).encode() + b"\0" + f.read())
    return h.hexdigest()[:16]


def known(root, tests):
    """Fills in each test's record; runs those whose program or script changed since."""
    path = os.path.join(root, "map.json")
    kept = json.load(open(path, encoding="utf-8")) if os.path.exists(path) else {}
    of_sources = digest(root, [os.path.join(root, p, n) for f in FOLDERS for p, _, ns in os.walk(os.path.join(root, f)) for n in ns])
    executed(root)
    for t in tests:
        if not t.script and not os.path.exists(os.path.join(root, "build/cov/tests", t.name)):
            status, out = t.build(COVERAGE)
            if status:
                sys.exit(f"plant: the coverage build fails:\n{out[-2000:]}")
        own = os.path.join(root, "tests", t.name if t.script else t.name + ".c")
        beside = [os.path.join(os.path.dirname(own), n) for n in os.listdir(os.path.dirname(own)) if n.endswith(".h")]
        stamp = of_sources + digest(root, [own, *beside])
        if kept.get(t.name, {}).get("stamp") != stamp:
            limit = 600 if t.quick else SLOWEST
            start = time.monotonic()
            status = t.run("build", limit)
            seconds = time.monotonic() - start
            if status == 0:
                t.run("build/cov", 2 * limit)
            record = {"stamp": stamp, "seconds": seconds, "status": status, "lines": executed(root)}
            print(f"# {t.name}: {record['seconds']:.1f} s, exit status {status}, {len(record['lines'])} files", flush=True)
            kept[t.name] = record
            with open(path, "w", encoding="utf-8") as f:
                json.dump(kept, f)
        t.record = kept[t.name]
    return [t for t in tests if t.record["status"] == 0]


def statement(lines, line):
    """The lines with code nearest to a line of the source: its own, or the one that its statement starts at."""
    before = [n for n in lines if n <= line]
    return {line, before[-1]} if before else {line}


def fits(t, file):
    """Order of the tests: those named after the file, then the quickest."""
    named = os.path.splitext(os.path.basename(file))[0] in t.name
    return (not t.quick, not named, t.record["seconds"])


def within(tests, budget):
    """The first test, and those after it that the budget has room for."""
    taken, spent = [], 0
    for t in tests:
        if not taken or spent + t.record["seconds"] <= budget:
            taken.append(t)
            spent += t.record["seconds"]
    return taken


def search(root, tests, every, file, line, budget):
    """The name of the first test that fails, or None; and how many of those that execute the line were tried."""
    at = statement(every.get(file, []), line)
    able = [t for t in tests if at & set(t.record["lines"].get(file, ()))] or [t for t in tests if not t.record["lines"] and t.name != "cli/layers.sh"]
    able.sort(key=lambda t: fits(t, file))
    stages = [("", "build", [], [t for t in able if t.quick]),
              ("san/", "build/san", SANITIZED, [t for t in able if t.quick and not t.script]),
              ("", "build", [], [t for t in able if not t.quick])]
    if all(t.quick for t in tests):
        stages = stages[:1]
    tried = set()
    for mark, build, extra, those in stages:
        for t in within(those, budget):
            tried.add(t.name)
            status, out = t.build(extra)
            if status:
                return "the build", ""
            status = t.run(build, 10 + (30 if mark else 10) * t.record["seconds"])
            if status not in (0, 77):
                return f"{'quick' if t.quick and not mark else 'check'} {mark}{t.name}{' (time)' if status == 124 else ''}", ""
    return None, f"{len(tried)} of {len(able)}"


def faults(a, root, files):
    """(file, start, end, replacement) of each fault to plant, without end where they are drawn."""
    texts = {f: open(os.path.join(root, f), encoding="utf-8").read() for f in files}
    every = [(f, *p) for f in files for p in places(texts[f])]
    if not a.replay:
        rng = random.Random(a.seed)
        while True:
            yield rng.choice(every)
    for row in open(a.replay, encoding="utf-8"):
        m = re.match(r"(found by .*|UNSEEN by .*): (\S+):(\d+):(\d+): (.*) -> (.*?): (.*)", row.rstrip("\n"))
        if not m or a.unseen and row.startswith("found by quick"):
            continue
        _, file, line, column, was, to, said = m.groups()
        was, to = was.replace("(nothing)", ""), to.replace("(nothing)", "")
        rows = texts[file].splitlines(keepends=True)
        at = next((n for n in sorted(range(len(rows)), key=lambda n: abs(n + 1 - int(line))) if rows[n].strip() == said), None)
        if at is None:
            print(f"# gone: {row.strip()}")
            continue
        start = sum(map(len, rows[:at])) + int(column) - 1
        yield file, start, start + len(was), to


def main():
    a = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what puts the text back
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.abspath(a.work)
    os.environ.setdefault("VENV", os.path.join(here, "build", "venv"))
    os.environ["MAKELEVEL"] = "1"  # one job at a time
    os.makedirs(root, exist_ok=True)
    bring(here, root)
    for extra in ([], COVERAGE, *([SANITIZED] if a.check else [])):
        status, out = make(root, *extra, "all", "tests")
        if status:
            sys.exit(f"plant: `make {' '.join(extra)}` fails before any fault is planted:\n{out[-2000:]}")
    tests = known(root, tests_of(root, a.check))
    files = [f for f in sources(root) if re.search(a.only, f)]
    every = {f: sorted(set().union(*(t.record["lines"].get(f, ()) for t in tests))) for f in files}
    log = open(a.log, "a", encoding="utf-8") if a.log else None
    tried = quick = found = 0
    for file, start, end, to in faults(a, root, files):
        if not a.replay and tried == a.count:
            break
        path = os.path.join(root, file)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        line = text.count("\n", 0, start) + 1
        target = "build/" + file[:-2] + ".o"
        make(root, target)
        before = code_of(os.path.join(root, target))
        kept = os.stat(path)
        try:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text[:start] + to + text[end:])
            status, out = make(root, target)
            if status == 0 and code_of(os.path.join(root, target)) != before:
                by, able = search(root, tests, every, file, line, a.budget)
                tried += 1
                quick += bool(by and by.startswith(("quick", "the build")))
                found += bool(by)
                column = start - text.rfind("\n", 0, start)
                what = f"{file}:{line}:{column}: {text[start:end] or '(nothing)'} -> {to or '(nothing)'}: {text.splitlines()[line - 1].strip()}"
                row = f"found by {by}: {what}" if by else f"UNSEEN by {able} tests: {what}"
                print(row, flush=True)
                if log:
                    print(row, file=log, flush=True)
        finally:
            with open(path, "w", encoding="utf-8") as f:
                f.write(text)
            for build in ("build", "build/san"):
                o = os.path.join(root, build, file[:-2] + ".o")
                if os.path.exists(o) and os.stat(o).st_mtime_ns > kept.st_mtime_ns:
                    os.utime(o, (0, 0))  # made again from the text that is back
            os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    print(f"{quick} of {tried} planted faults found by make quick" + (f", {found} by make check" if a.check else "") +
          (f" (seed {a.seed})" if not a.replay else ""))


if __name__ == "__main__":
    main()
