#!/usr/bin/env python3
"""The first commands of a new user: minimax runs the other programs, --help ends with examples that the programs take, words that are nearly an
option's are answered with it, and the options of other engines by name."""
import glob
import os
import re
import shutil
import signal
import subprocess
import time

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
WORDS = sorted(n.removeprefix("minimax-") for n in os.listdir(BIN) if n.startswith("minimax-"))


def run(*args, status=0, cwd=None):
    p = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)
    assert p.returncode == status, (args, p)
    return p


def options(*program):
    """Every long option of a program, its other names included."""
    found = set()
    for line in run(f"{BIN}/{program[0]}", *program[1:], "--help").stdout.splitlines():
        if re.match(r" +(-\w, )?--\w", line):
            found |= set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", re.split(r"  +", line.strip())[0]))
    return found


def front():
    """minimax WORD … is minimax-WORD …: the same bytes, the same status, the same process."""
    shown = run(f"{BIN}/minimax", "--help").stdout
    assert WORDS == sorted(re.findall(r"^  ([a-z]+) ", shown.split("programs:\n")[1].split("\n\n")[0], re.M)), shown
    assert run(f"{BIN}/minimax", "help").stdout == shown
    for word in WORDS:
        for args in (["--help"], ["a", "--bogus"]):
            direct, through = (subprocess.run([*p, *args], capture_output=True, check=False) for p in ([f"{BIN}/minimax-{word}"], [f"{BIN}/minimax", word]))
            assert (direct.returncode, direct.stdout, direct.stderr) == (through.returncode, through.stdout, through.stderr), (word, args, through)
    assert run(f"{BIN}/minimax", "help", "run").stdout == run(f"{BIN}/minimax-run", "--help").stdout
    odd = run(f"{BIN}/minimax", "inspect", "a b'\"c", status=3).stderr
    assert odd.startswith("minimax-inspect: error: E_FS_MISSING: a b'\\\"c: ") or "a b'" in odd, odd
    for args, text in (([], "found no program's word"), (["srve"], "did you mean serve?"), (["help", "verfy"], "did you mean verify?"), (["xyzzy"], 'found "xyzzy"'),
                       (["../bin/minimax-run"], "expected a program's word"), (["--tp", "2"], "unknown option"), (["-x"], "unknown option")):
        p = run(f"{BIN}/minimax", *args, status=2)
        assert text in p.stderr and p.stderr.count("\n") == 1 and not p.stdout, p
    # By a link, or from any directory, the programs of the same build are found; a program that is not there is named.
    os.symlink(f"{BIN}/minimax", f"{TMP}/linked")
    assert run(f"{TMP}/linked", "run", "--version", cwd="/").stdout.startswith("minimax-run ")
    shutil.copy(f"{BIN}/minimax", f"{TMP}/minimax")
    assert f"{TMP}/minimax-run: no such program" in run(f"{TMP}/minimax", "run", status=3).stderr
    open(f"{TMP}/minimax-run", "w").close()
    assert "E_IO" in run(f"{TMP}/minimax", "run", status=5).stderr  # it cannot be run
    child = subprocess.Popen([f"{BIN}/minimax", "archive", "pack", "/dev/null", "-o", TMP + "/x"], stderr=subprocess.PIPE)
    child.wait(30)
    held = subprocess.Popen([f"{BIN}/minimax", "run", "tests/data/tiny-m2", "-p", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.2)
    name = open(f"/proc/{held.pid}/comm").read().strip() if held.poll() is None else "minimax-run"
    held.send_signal(signal.SIGKILL)
    held.communicate()
    assert name == "minimax-run", name


def examples():
    """--help ends with three examples or more, of options that exist."""
    known = {f"minimax-{w}": options(f"minimax-{w}") for w in WORDS}
    for word in ["", *WORDS]:
        program = f"minimax-{word}" if word else "minimax"
        shown = run(f"{BIN}/{program}", "--help").stdout
        assert "\n\nexamples:\n" in shown, program
        lines = shown.split("\n\nexamples:\n")[1].splitlines()
        assert len(lines) >= 3 and all(re.match("  [a-z]", x) for x in lines), (program, lines)
        assert any(re.search(rf"\b{program}\b", x) for x in lines), (program, lines)
        for part in (p for x in lines for p in re.split(r" [|:&] ", x)):
            found = re.search(r"\bminimax[- ]([a-z]+)\b", part)
            have = options("minimax-bench", "serve") if "bench serve" in part else known[f"minimax-{found[1]}"] if found else set()
            for option in re.findall(r"(?<!\S)--([a-z][a-z-]*)", part[found.end():] if found else ""):
                assert option in have, (program, part, option)
    serve = run(f"{BIN}/minimax-bench", "serve", "--help").stdout.split("\n\nexamples:\n")[1].splitlines()
    assert len(serve) == 3 and all(o in options("minimax-bench", "serve") for x in serve for o in re.findall(r"--([a-z-]+)", x)), serve
    return known


def statuses():
    """A source where a packed checkpoint is expected is status 3, which --help says to be bad input."""
    source = "tests/data/tiny-m2"
    for word, args in (("archive", ["pack", source, "-o", f"{TMP}/none"]), ("verify", [source]), ("run", [source, "-p", "x"]), ("serve", [source, "--check"]),
                       ("eval", [source, "--ids", f"{source}/held-out-ids.json"])):
        assert "E_KIND" in run(f"{BIN}/minimax-{word}", *args, status=3).stderr
        shown = " ".join(run(f"{BIN}/minimax-{word}", "--help").stdout.split())
        assert re.search(r"Exit status: .*, 3 bad input\b", shown), word


def foreign(known):
    """Each row of formats/option_unknown.c: its answer names programs and options that exist, and no row is of no use."""
    rows = re.findall(r'^    \{"([a-z-]+)", (?:"([a-z-]+)"|NULL), ', open("formats/option_unknown.c").read(), re.M)
    assert len(rows) > 30
    for name, own in rows:
        answers = 0
        lacks = [f"minimax-{w}" for w in WORDS if name not in known[f"minimax-{w}"]]
        for program in {*[p for p in lacks if own in known[p]][:2], *[p for p in lacks if own not in known[p]][len(name) % 3 :][:1]}:
            line = run(f"{BIN}/{program}", f"--{name}=1", status=2).stderr
            assert line.startswith(f'{program}: error: E_USAGE: unknown option "--{name}=1"; ') and "see minimax" not in line.lower(), line
            answers += 1
            if own in known[program]:
                assert line.endswith(f"; here it is --{own}\n"), line
            for other, rest in re.findall(r"(minimax-[a-z]+)((?: and minimax-[a-z]+)?[^:;,(]*(?:, by the name [^;(]*)?)", line.split("; ", 1)[1]):
                for option in re.findall(r"--([a-z-]+)", rest):
                    assert option in known[other], (line, other, option)
        assert answers, name
    vllm = ("tensor-parallel-size", "pipeline-parallel-size", "model", "dtype", "max-num-seqs", "served-model-name", "max-model-len", "gpu-memory-utilization",
            "quantization", "trust-remote-code", "enable-prefix-caching", "tool-call-parser", "enforce-eager")
    for name in vllm:
        assert any(name in known[f"minimax-{w}"] for w in WORDS) or name in dict(rows), name


def completion():
    """bash completes the programs' words, and behind one that program's options."""
    script = "".join(run(f"{BIN}/{p}", "--help-bash").stdout for p in ("minimax", "minimax-serve"))
    for words, want in ((["minimax", "ser"], "serve"), (["minimax", "serve", "--max-num-s"], "--max-num-seqs"),
                        (["minimax", "serve", "--prefix-cache", "of"], "off")):
        line = f"{script}\nCOMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n_minimax\necho \"${{COMPREPLY[*]}}\""
        assert run("bash", "-c", line).stdout.split() == [want], (words, run("bash", "-c", line))


def bootstrap():
    """The demo is built without GPU code where nvcc is but no GPU, and says so in a line, unless CUDA is given; the check is as nvcc is."""
    tools = f"{TMP}/tools"
    os.makedirs(tools)
    for name, body in (("dpkg-query", "echo install ok installed"), ("make", 'echo "make $*"'), ("nvcc", ""), ("nvidia-smi", "exit $NO_GPU")):
        with open(f"{tools}/{name}", "w") as f:
            f.write(f"#!/bin/sh\n{body}\n")
        os.chmod(f.name, 0o755)
    bare = {k: v for k, v in os.environ.items() if k not in ("CUDA", "NVCC")} | {"PATH": f"{tools}:{os.environ['PATH']}"}
    no = not glob.glob("/dev/nvidia[0-9]*")
    for args, more, made in (("demo", {"NO_GPU": "1"}, "CUDA=0" if no else ""), ("demo V=1", {"NO_GPU": "1"}, "CUDA=0 V=1" if no else "V=1"),
                             ("demo", {"NO_GPU": "0"}, ""), ("demo CUDA=1", {"NO_GPU": "1"}, "CUDA=1"), ("demo", {"NO_GPU": "1", "CUDA": "1"}, ""),
                             ("check", {"NO_GPU": "1"}, ""), ("demo", {"NO_GPU": "1", "NVCC": "absent"}, "")):
        out = subprocess.run(["scripts/bootstrap.sh", *args.split()], env=bare | more, capture_output=True, text=True, check=True).stdout.splitlines()
        without = made.startswith("CUDA=0")
        assert out[-1].split() == ["make", args.split()[0], *made.split()] and len(out) == 1 + without, (args, more, out)
        assert not without or "CUDA=1" in out[0], out


front()
statuses()
KNOWN = examples()
foreign(KNOWN)
completion()
bootstrap()
print(f"minimax runs {len(WORDS)} programs; their help ends with examples; options of other engines are answered by name")
