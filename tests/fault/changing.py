#!/usr/bin/env python3
"""Files that change under a program. A source that is cut, written to, replaced or removed while it is converted, a part that is cut while it is
mapped: status 5, one line that names the file, nothing under the final name. strace holds the program at the moment when it has read the
headers (or mapped the part), and the test changes the file meanwhile."""
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, "tests/cli")
from convert_files import write_st  # noqa: E402

if not shutil.which("strace") or not shutil.which("openssl") or os.environ.get("SAN") == "1":
    print("needs strace and openssl, and no sanitizer")
    sys.exit(77)
BIN = os.environ["BUILD"] + "/bin/"
work = os.path.realpath(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
SOURCE, PACKED, OTHER = work + "/source", work + "/packed", work + "/other"
SHARD, PART = "model-00002-of-00002.safetensors", "model-rank-00000-part-00000.safetensors"
count = 0


def wait_for(holds, p):
    end = time.monotonic() + 60
    while not holds():
        assert p.poll() is None and time.monotonic() < end, p.communicate()
        time.sleep(0.005)


def judge(name, p, file):
    global count
    out, err = p.communicate(timeout=60)
    line = "".join(x for x in err.decode().splitlines(True) if not x.startswith("strace: "))  # which says when threads end in a delay
    wrong = p.returncode != 5 or line.count("\n") != 1 or file not in line or not ("E_CHANGED" in line or "E_SHORT_READ" in line)
    if wrong or os.path.exists(work + "/out") or (out and "run" not in name):
        sys.exit(f"{name}: status {p.returncode}, stdout {out[:100]}, stderr {line}")
    count += 1


def cut(path):
    os.truncate(path, 8192)


def longer(path):
    with open(path, "ab") as f:
        f.write(b"x")


def written(path):
    with open(path, "r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)
        f.seek(-1, 2)
        f.write(last)


def replaced(path):
    shutil.copy(path, path + ".new")
    os.rename(path + ".new", path)


def converting(*options):
    """A conversion that writes its journal's first record for a while: the plan is made, no weight has been read."""
    p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=pwrite64:delay_enter=300000:when=1", BIN + "minimax-convert", SOURCE, "-o",
                          work + "/out", "--tp", "2", *options, "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: any(n.startswith(".out.partial.journal") for n in os.listdir(work)), p)
    return p


def take_away():
    for path in [work + "/" + n for n in os.listdir(work) if n.startswith(".out.partial")] + [SOURCE]:
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.unlink(path)


for change in (cut, longer, written, replaced, os.unlink):
    for file in (SHARD, "config.json"):
        if change is cut and file == "config.json":
            continue  # shorter than that
        shutil.copytree("tests/data/tiny-m2", SOURCE)
        p = converting("--quant", "block_fp8")
        change(f"{SOURCE}/{file}")
        judge(f"minimax-convert, {file} {change.__name__}", p, file)
        take_away()


def importance(path):
    """Second moments of every expert, in a file of several pages."""
    moments = {}
    for layer in range(4):
        for stack, k in (("w13_weight", 256), ("w2_weight", 192)):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{stack}"
            moments[name + ".mean_square"] = ("F32", [8, k], struct.pack(f"<{8 * k}f", *[1 + i % 50 for i in range(8 * k)]))
            moments[name + ".rows"] = ("I64", [8], struct.pack("<8q", *[1000] * 8))
    write_st(path, moments)
    assert os.path.getsize(path) > 16384


for part in ([], ["--part", "0/2"]):
    for change in (cut, longer, written, replaced, os.unlink):
        shutil.copytree("tests/data/tiny-m2", SOURCE)
        importance(work + "/moments")
        p = converting("--quant", "nvfp4", "--importance", work + "/moments", *part)
        change(work + "/moments")
        judge(f"minimax-convert, --importance {change.__name__} {part}", p, work + "/moments")
        take_away()

# What was packed by altered moments is not continued when the right ones are back.
shutil.copytree("tests/data/tiny-m2", SOURCE)
importance(work + "/moments")
right = open(work + "/moments", "rb").read()
p = converting("--quant", "nvfp4", "--importance", work + "/moments")
written(work + "/moments")
judge("minimax-convert, --importance altered", p, work + "/moments")
with open(work + "/moments", "r+b") as f:
    f.write(right)
p = subprocess.run([BIN + "minimax-convert", SOURCE, "-o", work + "/out", "--tp", "2", "--quant", "nvfp4", "--importance", work + "/moments", "-q", "--resume"],
                   stderr=subprocess.PIPE, check=False)
assert p.returncode == 2 and b"E_RESUME" in p.stderr and work.encode() + b"/moments" in p.stderr and not os.path.exists(work + "/out"), p.stderr
take_away()

subprocess.run([BIN + "minimax-convert", "tests/data/tiny-m2", "-o", OTHER, "-q"], check=True)
for change, file in [(c, PART) for c in (cut, longer, written, replaced, os.unlink)] + [(longer, "tokenizer.json"), (longer, "config.json")]:
    shutil.copytree(OTHER, SOURCE)
    p = converting()
    change(f"{SOURCE}/{file}")
    judge(f"minimax-convert of a packed one, {file} {change.__name__}", p, file)
    take_away()
shutil.rmtree(OTHER)

for target in (PACKED, OTHER):
    subprocess.run([BIN + "minimax-convert", "tests/data/tiny-m2", "-o", target, "-q"], check=True)


def maps_part(strace):
    """The traced child has the part mapped."""
    for pid in open(f"/proc/{strace}/task/{strace}/children", encoding="ascii").read().split():
        try:
            if PACKED + "/" + PART in open(f"/proc/{pid}/maps", encoding="utf-8").read():
                return True
        except OSError:
            pass
    return False


whole = open(f"{PACKED}/{PART}", "rb").read()
for command in (["minimax-run", PACKED, "-p", "In the", "-n", "4", "-q"], ["minimax-verify", PACKED, "-q"], ["minimax-inspect", PACKED, "--diff", OTHER, "--data"],
                ["minimax-eval", PACKED, "--ids", "tests/data/tiny-m2/held-out-ids.json", "--limit", "1"]):
    p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-P", f"{PACKED}/{PART}", "-e", "inject=mmap:delay_exit=300000:when=1", BIN + command[0],
                          *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: maps_part(p.pid), p)
    cut(f"{PACKED}/{PART}")
    judge(command[0], p, PART)
    with open(f"{PACKED}/{PART}", "wb") as f:
        f.write(whole)
shutil.rmtree(work + "/out", ignore_errors=True)
subprocess.run(["openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", work + "/key.pem"], check=True)
for command in (["minimax-verify", PACKED, "-q"], ["minimax-verify", PACKED, "-q", "--level", "header"], ["minimax-archive", "sign", PACKED, "--key", work + "/key.pem"]):
    for change in (written, replaced, os.unlink):
        p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-P", f"{PACKED}/{PART}", "-e", "inject=mmap:delay_exit=300000:when=1", BIN + command[0],
                              *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(lambda: maps_part(p.pid), p)
        change(f"{PACKED}/{PART}")
        judge(" ".join(command), p, PART)
        with open(f"{PACKED}/{PART}", "wb") as f:
            f.write(whole)
assert not os.path.exists(PACKED + "/model.sig")

# The manifest becomes another one, sealed as well, between the parts that were opened by it and the second time that it is read.
MANIFEST = PACKED + "/manifest.json"
text = open(MANIFEST, "rb").read()
other = text[:-78].replace(b'"tool":"minimax-convert ', b'"tool":"minimax-konvert ')
other += b'"sha256":"' + hashlib.sha256(other).hexdigest().encode() + b'"\n}\n'
assert len(other) == len(text) and other != text
subprocess.run(["openssl", "ec", "-in", work + "/key.pem", "-pubout", "-out", work + "/key.pub"], check=True, stderr=subprocess.DEVNULL)
subprocess.run([BIN + "minimax-archive", "sign", PACKED, "--key", work + "/key.pem"], check=True)
for command in (["minimax-archive", "pack", PACKED, "-o", work + "/out"], ["minimax-archive", "sign", PACKED, "--key", work + "/key.pem"],
                ["minimax-verify", PACKED, "-q", "--key", work + "/key.pub"], ["minimax-verify", PACKED, "-q", "--source", "tests/data/tiny-m2"]):
    p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-P", MANIFEST, "-e", "inject=openat:delay_enter=500000:when=2", BIN + command[0], *command[1:]],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: maps_part(p.pid), p)
    with open(work + "/manifest", "wb") as f:
        f.write(other)
    os.rename(work + "/manifest", MANIFEST)
    judge(" ".join(command), p, "manifest.json")
    with open(MANIFEST, "wb") as f:
        f.write(text)

# --force puts another directory in the place of the one that is being opened: both are whole, nothing is damaged.
shutil.rmtree(OTHER)
HF, HF_OTHER = work + "/hf", work + "/hf-other"
for directory, options in ((OTHER, ["--quant", "bf16", "--tp", "2"]), (HF, ["--layout", "hf"]), (HF_OTHER, ["--layout", "hf", "--quant", "bf16"]), (work + "/third", [])):
    subprocess.run([BIN + "minimax-convert", "tests/data/tiny-m2", "-o", directory, "-q", *options], check=True)
subprocess.run([BIN + "minimax-archive", "sign", OTHER, "--key", work + "/key.pem", "-q"], check=True)
for directory, packed in ((OTHER, work + "/arc"), (PACKED, work + "/arc-other")):
    subprocess.run([BIN + "minimax-archive", "pack", directory, "-o", packed, "-q"], check=True)


def has_open(strace, path):
    for pid in open(f"/proc/{strace}/task/{strace}/children", encoding="ascii").read().split():
        try:
            if path in [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]:
                return True
        except OSError:
            pass
    return False


for old, new, file, command in (
        (PACKED, OTHER, "manifest.json", ["minimax-verify", PACKED, "-q"]), (PACKED, OTHER, "manifest.json", ["minimax-inspect", PACKED]),
        (PACKED, OTHER, "manifest.json", ["minimax-run", PACKED, "-p", "In the", "-n", "1", "-q"]),
        (PACKED, OTHER, "manifest.json", ["minimax-serve", PACKED, "--check"]),
        (PACKED, OTHER, "manifest.json", ["minimax-eval", PACKED, "--ids", "tests/data/tiny-m2/held-out-ids.json", "--limit", "1"]),
        (PACKED, OTHER, "manifest.json", ["minimax-convert", PACKED, "-o", work + "/out", "--quant", "nvfp4", "-q"]),
        (PACKED, OTHER, "manifest.json", ["minimax-archive", "pack", PACKED, "-o", work + "/out"]),
        (PACKED, OTHER, "manifest.json", ["minimax-inspect", work + "/third", "--diff", PACKED]),
        (PACKED, OTHER, "tokenizer.json", ["minimax-run", PACKED, "-p", "In the", "-n", "1", "-q"]),
        (PACKED, OTHER, "config.json", ["minimax-run", PACKED, "-p", "In the", "-n", "1", "-q"]),
        (PACKED, OTHER, "tokenizer.json", ["minimax-eval", PACKED, "--text", "README.md", "--limit", "1", "--window", "8"]),
        (PACKED, OTHER, "config.json", ["minimax-verify", PACKED, "-q"]), (PACKED, OTHER, "config.json", ["minimax-serve", PACKED, "--check"]),
        (work + "/arc", work + "/arc-other", "archive.json", ["minimax-archive", "unpack", work + "/arc", "-o", work + "/out", "-q"]),
        (work + "/arc", work + "/arc-other", "tokenizer.json", ["minimax-archive", "unpack", work + "/arc", "-o", work + "/out", "-q"]),
        (HF, HF_OTHER, "minimax-digests.json", ["minimax-verify", HF, "-q"]), (HF, HF_OTHER, "config.json", ["minimax-verify", HF, "-q"]),
        (HF, HF_OTHER, "config.json", ["minimax-convert", HF, "-o", work + "/out", "-q"]),
        (HF, HF_OTHER, "config.json", ["minimax-verify", work + "/third", "-q", "--source", HF])):
    p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-P", f"{old}/{file}", "-e", "inject=openat:delay_exit=300000:when=1", BIN + command[0],
                          *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: has_open(p.pid, f"{old}/{file}"), p)
    os.rename(old, work + "/aside")
    os.rename(new, old)
    judge(" ".join(command), p, old)
    os.rename(old, new)
    os.rename(work + "/aside", old)
shutil.rmtree(work)
print(f"{count} files changed under a program: each named, status 5")
