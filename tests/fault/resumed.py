"""What a conversion that was cut short has left, and what --resume makes of it."""
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, "tests/cli")
from convert_files import Checkpoint  # noqa: E402


def same(a, b):
    """Whether two directories hold the same files, byte for byte."""
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def files(path):
    """{name: SHA-256} of a directory's files."""
    found = {}
    for name in sorted(os.listdir(path)):
        with open(os.path.join(path, name), "rb") as f:
            found[name] = hashlib.sha256(f.read()).hexdigest()
    return found


def wrong(out, reference, resume):
    """What is wrong with `out` as it is, or after the command `resume`: it must be the reference then, and alone in its folder."""
    if os.path.exists(out) and not same(out, reference):
        return "something incomplete has the final name"
    p = subprocess.run(resume, capture_output=True, check=False)
    parent = os.path.dirname(out)
    left = [x for x in os.listdir(parent) if x not in (os.path.basename(out), "source")]
    if os.path.isdir(parent + "/source"):  # of --follow --delete-source
        left += [x for x in os.listdir(parent + "/source") if x.endswith(".safetensors")]
    if p.returncode == 0 and same(out, reference) and not left:
        return None
    return f"--resume: status {p.returncode}, left {left}: {p.stderr.decode(errors='replace')}"


def split(source, path, files, total=True):
    """The checkpoint in the order of its layers, in so many files of about one size."""
    c = Checkpoint.load(source)
    layer = lambda k: (int(re.search(r"layers\.(\d+)", k)[1]) if "layers." in k else -1 if "embed" in k else 999, k)
    c.tensors = {k: c.tensors[k] for k in sorted(c.tensors, key=layer)}
    size, at, c.file = sum(len(t[2]) for t in c.tensors.values()), 0, {}
    for k, t in c.tensors.items():
        c.file[k] = f"model-{min(files, at * files // size + 1):05d}-of-{files:05d}.safetensors"
        at += len(t[2])
    c.index = json.dumps({"metadata": {"total_size": size} if total else {}, "weight_map": dict(sorted(c.file.items()))})
    c.save(path)
    shutil.copy(source + "/tokenizer.json", path)
    return path
