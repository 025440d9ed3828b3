#!/usr/bin/env python3
"""Planted faults: changes one operator or constant at a random place in a copy of the tree, builds it, runs a make target, and counts the faults
that the tests find.

    scripts/plant.py [--count 20] [--seed 1] [--only REGEX] [--target quick] [--work build/plant] [--log FILE]

A fault counts when it compiles and changes the machine code of its file. One line for each: found by which tests, or UNSEEN with file, line and
change. The last line is the share found. Exit status 0; a figure, not a test."""
import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys

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


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--count", type=int, default=20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--target", default="quick", help="make targets, with spaces between them")
    p.add_argument("--only", default="", help="plant in files whose path this expression matches")
    p.add_argument("--work", default="build/plant")
    p.add_argument("--log")
    p.add_argument("--limit", type=int, default=600, help="seconds for one fault")
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


def make(root, limit, *words):
    p = subprocess.Popen(["make", "CUDA=0", *words], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                         start_new_session=True)
    try:
        out, _ = p.communicate(timeout=limit)
        return p.returncode, out
    except subprocess.TimeoutExpired:
        os.killpg(p.pid, signal.SIGKILL)
        out, _ = p.communicate()
        return 124, out + "\nfail time ran out: -"


def main():
    a = arguments()
    rng = random.Random(a.seed)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    root = os.path.abspath(a.work)
    os.environ.setdefault("VENV", os.path.join(here, "build", "venv"))
    os.environ["MAKELEVEL"] = "0"
    shutil.rmtree(root, ignore_errors=True)
    names = subprocess.run(["git", "ls-files"], cwd=here, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        os.makedirs(os.path.dirname(os.path.join(root, name)) or root, exist_ok=True)
        shutil.copy2(os.path.join(here, name), os.path.join(root, name))
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)  # scripts that ask git about the tree find one
    status, out = make(root, a.limit, *a.target.split())
    if status:
        sys.exit(f"plant: `make {a.target}` fails before any fault is planted:\n{out[-2000:]}")
    files = [f for f in sources(root) if re.search(a.only, f)]
    texts = {f: open(os.path.join(root, f), encoding="utf-8").read() for f in files}
    every = [(f, *p) for f in files for p in places(texts[f])]
    log = open(a.log, "a", encoding="utf-8") if a.log else None
    tried = found = 0
    while tried < a.count:
        file, start, end, to = rng.choice(every)
        text = texts[file]
        path = os.path.join(root, file)
        line = text.count("\n", 0, start) + 1
        target = "build/" + file[:-2] + ".o"
        before = code_of(os.path.join(root, target))
        with open(path, "w", encoding="utf-8") as f:
            f.write(text[:start] + to + text[end:])
        status, out = make(root, a.limit, target)
        if status == 0 and code_of(os.path.join(root, target)) != before:
            status, out = make(root, a.limit, "-k", *a.target.split())
            by = re.findall(r"^fail +[\d.]* *s? *(\S+):", out, re.M) or (["the build"] if status else [])
            tried += 1
            found += bool(status)
            what = f"{file}:{line}: {text[start:end] or '(nothing)'} -> {to or '(nothing)'}"
            row = f"found by {' '.join(by[:4])}: {what}" if status else f"UNSEEN {what}: {text.splitlines()[line - 1].strip()}"
            print(row, flush=True)
            if log:
                print(row, file=log, flush=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)
        make(root, a.limit, target)
    print(f"{found} of {tried} planted faults found by `make {a.target}` (seed {a.seed}, {len(every)} places)")


if __name__ == "__main__":
    main()
