#!/usr/bin/env python3
"""A directory that cannot be listed, or only in part, is the operating system's error (status 5): no other checkpoint's file is told to be in it,
what was not seen is not taken for absent, and nothing is published over it."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

BIN = os.path.join(os.environ["BUILD"], "bin", "")
SRC = "tests/data/tiny-m2"


def failing(call, errno, where, *command):
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", where, "-e", f"trace={call}", "-e", f"inject={call}:error={errno}:when=1"]
    return subprocess.run([*inject, BIN + command[0], *command[1:]], capture_output=True, text=True, check=False)


def listing(where, *command):
    return failing("getdents64", "EIO", where, *command)


with tempfile.TemporaryDirectory(prefix="mm-listing-") as work:
    wrong = cases = 0

    def broken(name, p, where):
        global wrong, cases
        cases += 1
        if p.returncode != 5 or p.stderr.count("\n") != 1 or f"E_IO: {where}" not in p.stderr:
            print(f"{name}: status {p.returncode}: {p.stderr.strip()}")
            wrong += 1

    for name, options in (("unsharded", ["--quant", "block_fp8", "--layout", "hf"]), ("packed", ["--quant", "block_fp8"])):
        out = os.path.join(work, name)
        convert = ["minimax-convert", SRC, "-o", out, "-q", *options]
        subprocess.run([BIN + convert[0], *convert[1:]], check=True)
        broken(name, failing("openat", "EMFILE", out, *convert, "--force"), out)
        broken(name, listing(out, "minimax-verify", "-q", out), out)
        broken(name, listing(out, *convert, "--force"), out)
        subprocess.run([BIN + "minimax-verify", "-q", out], check=True)

    # The target, what lies beside it, the source's code, a cache's snapshots, and what an archive is unpacked to.
    source, new, cache = (os.path.join(work, d) for d in ("source", "new/out", "cache"))
    shutil.copytree(SRC, source)
    config = json.load(open(source + "/config.json", encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": "code.C"}
    json.dump(config, open(source + "/config.json", "w", encoding="utf-8"))
    open(source + "/code.py", "w", encoding="utf-8").write("class C:\n    pass\n")
    os.makedirs(new)
    os.makedirs(cache + "/snapshots")
    shutil.copytree(source, cache + "/snapshots/0123abcd")
    convert = ["minimax-convert", source, "-o", new, "-q", "--quant", "none"]
    for name, where, told, command in (("target", new, new, convert), ("code", source, source, convert), ("beside", work + "/new", work + "/new", convert),
                                       ("snapshots", cache + "/snapshots", cache + "/snapshots", ["minimax-convert", cache, "-o", new, "-q"])):
        broken(name, listing(where, *command), told)
        if os.listdir(new) or sorted(os.listdir(source)) != sorted(os.listdir(SRC) + ["code.py"]):
            print(f"{name}: something was published")
            wrong += 1
    subprocess.run([BIN + convert[0], *convert[1:], "--restart"], check=True)
    assert os.path.exists(new + "/code.py")
    archive, staged = work + "/archive", work + "/unpacked"
    subprocess.run([BIN + "minimax-archive", "pack", work + "/packed", "-o", archive, "-q"], check=True)
    os.mkdir(work + "/.unpacked.partial-unpack")  # a run that ended at once left it
    broken("archive", listing(work + "/.unpacked.partial-unpack", "minimax-archive", "unpack", archive, "-o", staged, "-q"), work)
    assert not os.path.exists(staged)
    print(f"directories that cannot be listed: {cases - wrong} of {cases} right")
    sys.exit(wrong != 0)
