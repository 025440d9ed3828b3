#!/usr/bin/env python3
"""headless.py: an interrupted run may leave part files in their full size before anything is in them, not even a header, while its journal
tells of others. After --resume it is as if it had not."""
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile

convert = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
work = tempfile.mkdtemp(prefix="mm-headless-")
wrong = cases = 0


def command(out, options, *more):
    return [convert, "tests/data/tiny-m2", "-o", out, "-q", "-j", "1", "--part-size", "1M", "--journal-every", "1M", *options, *more]


try:
    for options, sync in ((["--tp", "2", "--quant", "block_fp8"], 5), (["--layout", "hf", "--quant", "nvfp4a16"], 3)):
        reference, parent = os.path.join(work, f"reference{cases}"), os.path.join(work, f"run{cases}")
        subprocess.run(command(reference, options), check=True)
        names = sorted(os.listdir(reference))
        out, staging = os.path.join(parent, "out"), os.path.join(parent, ".out.partial")
        os.mkdir(parent)
        kill = ["strace", "-f", "-o", "/dev/null", "-e", f"inject=fdatasync:signal=KILL:when={sync}"]
        subprocess.run([*kill, *command(out, options)], stderr=subprocess.DEVNULL, check=False)
        absent = [n for n in names if n.endswith(".safetensors") and not os.path.exists(os.path.join(staging, n))]
        assert absent and os.path.getsize(staging + ".journal") > 80, f"{options}: nothing is left to do, or nothing done: {absent}"
        for n in absent:
            with open(os.path.join(staging, n), "wb") as f:
                f.truncate(os.path.getsize(os.path.join(reference, n)))
        subprocess.run(command(out, options, "--resume"), check=True)
        differ = [n for n in names if not filecmp.cmp(os.path.join(out, n), os.path.join(reference, n), shallow=False)]
        if differ or sorted(os.listdir(out)) != names:
            print(f"{' '.join(options)}, {len(absent)} files: differs: {differ}")
            wrong += 1
        cases += 1
    print(f"part files without a header: {cases - wrong} of {cases} runs identical after --resume")
    sys.exit(wrong != 0)
finally:
    shutil.rmtree(work)
