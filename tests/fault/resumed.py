"""What a conversion that was cut short has left, and what --resume makes of it."""
import filecmp
import hashlib
import os
import subprocess


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
