#!/usr/bin/env python3
"""A directory that cannot be listed, or only in part, is the operating system's error (status 5): no other checkpoint's file is told to be in it,
and what was not seen is not taken for absent."""
import os
import subprocess
import sys
import tempfile

BIN = os.path.join(os.environ["BUILD"], "bin", "")
SRC = "tests/data/tiny-m2"


def failing(call, errno, where, *command):
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", where, "-e", f"trace={call}", "-e", f"inject={call}:error={errno}:when=1"]
    return subprocess.run([*inject, BIN + command[0], *command[1:]], capture_output=True, text=True, check=False)


with tempfile.TemporaryDirectory(prefix="mm-listing-") as work:
    wrong = cases = 0
    for name, options in (("unsharded", ["--quant", "block_fp8", "--layout", "hf"]), ("packed", ["--quant", "block_fp8"])):
        out = os.path.join(work, name)
        convert = ["minimax-convert", SRC, "-o", out, "-q", *options]
        subprocess.run([BIN + convert[0], *convert[1:]], check=True)
        for p in (failing("openat", "EMFILE", out, *convert, "--force"), failing("getdents64", "EIO", out, "minimax-verify", "-q", out)):
            cases += 1
            if p.returncode != 5 or p.stderr.count("\n") != 1 or f"E_IO: {out}" not in p.stderr:
                print(f"{name}: status {p.returncode}: {p.stderr.strip()}")
                wrong += 1
        subprocess.run([BIN + "minimax-verify", "-q", out], check=True)
    print(f"directories that cannot be listed: {cases - wrong} of {cases} right")
    sys.exit(wrong != 0)
