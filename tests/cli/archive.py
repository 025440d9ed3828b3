#!/usr/bin/env python3
"""minimax-archive from outside: a packed checkpoint comes back byte for byte; what is not shuffled is plain zstd for `zstd -d`; hostile
archives, full disks and kills leave nothing under the target's name; memory does not follow what an archive claims."""
import filecmp
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BIN = os.environ["BUILD"] + "/bin/"
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
os.chdir(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def run(*args, expect=0, **more):
    r = subprocess.run([BIN + args[0], *args[1:]], capture_output=True, text=True, **more)
    assert r.returncode == expect, (args, r.returncode, r.stderr)
    if expect:
        assert r.stderr.count("\n") == 1 and r.stderr.startswith(args[0] + ": error: E_") and not r.stdout, (args, r.stderr)
    return r


def same(a, b):
    names = sorted(os.listdir(a))
    return names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names


def nothing_left(*known):
    assert sorted(os.listdir(work)) == sorted(known), os.listdir(work)


checked = 0
# Every level has the memory that it needs by default, whatever the number of threads.
for level, jobs in ((1, "64"), (2, "4"), (9, "16"), (15, "5"), (19, "4")):
    small = ("minimax-convert", "tests/data/tiny-m2", "-o", work + "/packed", "-q", "-j", jobs, "--compress", f"zstd:{level}")
    if level in (2, 19):
        run(*small)
        shutil.rmtree(work + "/packed")
    need = int(re.search(r"expected at least (\d+)", run(*small, "--mem-limit", "1M", expect=8).stderr)[1])
    limit = (256 << 20) + int(jobs) * ((78 if level == 1 else 142) << 20)
    assert need <= limit, (level, jobs, need, limit)
nothing_left()
for model, quant in (("tiny-m2", "nvfp4"), ("tiny-m1", "block_fp8"), ("tiny-m1", "bf16")):
    a, b, c = work + "/packed", work + "/archive", work + "/back"
    run("minimax-convert", "tests/data/" + model, "-o", a, "--tp", "2", "--quant", quant, "--part-size", "5M", "-q")
    run("minimax-archive", "pack", a, "-o", b, "-j", "3")
    listing = run("minimax-archive", "list", b).stdout.splitlines()
    parts = [f for f in sorted(os.listdir(a)) if f.endswith(".safetensors")]
    assert [line.split()[0] for line in listing] == parts
    run("minimax-archive", "unpack", b, "-o", c, "-q")
    assert same(a, c), (model, quant)
    convert = ("minimax-convert", "tests/data/" + model, "-o", work + "/direct", "--tp", "2", "--quant", quant, "--part-size", "5M", "-q")
    run(*convert, "--compress", "zstd")
    assert same(work + "/direct", b), (model, quant)
    run(*convert, "--compress", "zstd", "--resume")  # complete already
    run(*convert, "--resume", expect=2)  # an archive is not the checkpoint
    for tool, more in (("minimax-verify", ()), ("minimax-inspect", ()), ("minimax-run", ("-p", "x"))):
        assert "minimax-archive unpack" in run(tool, work + "/direct", *more, expect=4).stderr
    open(work + "/direct/extra", "w").close()
    assert "extra" in run(*convert, "--compress", "zstd:3", "--force", expect=2).stderr
    os.remove(work + "/direct/extra")
    run(*convert, "--compress", "zstd:3", "--force")
    assert not same(work + "/direct", b)
    run("minimax-archive", "unpack", work + "/direct", "-o", work + "/again", "-q")
    assert same(a, work + "/again")
    run(*convert, "--force")
    assert same(a, work + "/direct")
    shutil.rmtree(work + "/direct")
    shutil.rmtree(work + "/again")
    run("minimax-verify", c, "-q")
    table = json.load(open(b + "/archive.json"))
    for part, entry in zip(parts, table["parts"]):
        assert os.path.getsize(f"{b}/{entry['file']}") == sum(n for n, _ in entry["frames"])
        decoded = subprocess.run(["zstd", "-dc", f"{b}/{entry['file']}"], capture_output=True, check=True).stdout
        whole = open(f"{a}/{part}", "rb").read()
        assert len(decoded) == len(whole)
        for k, (_, stride) in enumerate(entry["frames"]):  # byte planes, undone the slow way
            block, planes = whole[k << 22:(k + 1) << 22], decoded[k << 22:(k + 1) << 22]
            count = len(block) // stride
            assert all(planes[i * count:(i + 1) * count] == block[i:count * stride:stride] for i in range(stride))
            assert planes[count * stride:] == block[count * stride:]
            checked += 1
    if quant != "bf16":
        for d in (a, b, c):
            shutil.rmtree(d)
shutil.rmtree(c)

# Command lines.
for word in ("gzip", "zstd:", "zstd:0", "zstd:20", "zstd:3x"):
    run("minimax-convert", "tests/data/tiny-m2", "-o", c, "--compress", word, expect=2)
run("minimax-convert", "tests/data/tiny-m2", "-o", c, "--compress", "zstd", "--layout", "hf", expect=2)
run("minimax-archive", "pack", a, expect=2)
run("minimax-archive", "unpack", b, expect=2)
run("minimax-archive", "list", b, "-o", c, expect=2)
run("minimax-archive", "pack", a, "-o", c, "--key", "k", expect=2)
run("minimax-archive", "sign", a, expect=2)
run("minimax-archive", "repack", a, "-o", c, expect=2)
run("minimax-archive", "pack", a, "-o", b, expect=2)
run("minimax-archive", "pack", a, "-o", work + "/no/c", expect=5)
run("minimax-archive", "pack", b, "-o", c, expect=4)
run("minimax-archive", "unpack", a, "-o", c, expect=6)
run("minimax-archive", "unpack", work, "-o", c, expect=3)
nothing_left("packed", "archive")

# Hostile archives: one file replaced.
part = sorted(f for f in os.listdir(b) if f.endswith(".zst"))[0]
good = open(f"{b}/{part}", "rb").read()
table = open(b + "/archive.json").read()
first = json.loads(table)["parts"][0]["frames"]
raw = subprocess.run(["zstd", "-dc", f"{b}/{part}"], capture_output=True, check=True).stdout


def zstd(data, *options):
    return subprocess.run(["zstd", "-qc", *options], input=data, capture_output=True, check=True).stdout


def hostile(content, frames, what):
    """The part's file and its row of the table replaced: refused, within memory, nothing left."""
    other = json.loads(table)
    other["parts"][0]["frames"] = frames
    open(f"{b}/{part}", "wb").write(content)
    json.dump(other, open(b + "/archive.json", "w"))
    r = run("minimax-archive", "unpack", b, "-o", c, "-j", "1", expect=6,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (96 << 20, 96 << 20)) if "san" not in BIN else None)
    assert part in r.stderr or "archive.json" in r.stderr, (what, r.stderr)
    nothing_left("packed", "archive")


n = first[0][0]
stride, rest = first[0][1], first[1:]
head, tail = good[:n], good[n:]
zeros = bytes(256 << 20)
frame = zstd(raw[:4 << 20], "--stream-size=4194304")
cases = [
    (good[:-1], first, "cut file"), (good + b"\0", first, "longer file"), (b"", first, "empty file"),
    (zstd(zeros), [[len(zstd(zeros)), stride]] + rest, "bomb of 256 MiB"),
    (zstd(zeros, "--long=27") + tail, [[len(zstd(zeros, "--long=27")), stride]] + rest, "bomb with a large window"),
    (zstd(raw[:4 << 20], "--long=27") + tail, [[len(zstd(raw[:4 << 20], "--long=27")), stride]] + rest, "no content size"),
    (frame + tail, [[len(frame), stride]] + rest, "a window beside the content size"),
    (zstd(raw[:4 << 20], "--no-check", "--stream-size=4194304") + tail,
     [[len(zstd(raw[:4 << 20], "--no-check", "--stream-size=4194304")), stride]] + rest, "no checksum"),
    (zstd(raw[:1 << 20]) + zstd(raw[1 << 20:4 << 20]) + tail,
     [[len(zstd(raw[:1 << 20])) + len(zstd(raw[1 << 20:4 << 20])), stride]] + rest, "two frames"),
    (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + head + tail, [[n + 12, stride]] + rest, "skippable frame"),
    (head + b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + tail, [[n + 12, stride]] + rest, "skippable frame behind"),
    (tail + head, [rest[0], first[0]] + rest[1:], "frames in another order"),
    (head[:n // 2] + bytes([head[n // 2] ^ 1]) + head[n // 2 + 1:] + tail, first, "changed bit"),
    (head[:-1] + bytes([head[-1] ^ 1]) + tail, first, "changed checksum"),
    (good, [[n - 1, stride], [rest[0][0] + 1, rest[0][1]]] + rest[1:], "frames that end elsewhere"),
    (good, [[n, 4 if stride != 4 else 1]] + rest, "other planes"),
    (good, first + [[1, 1]], "a frame too many"), (good, first[:-1], "a frame too few"),
    (good, [[2**62, 1]] + rest, "a frame of 2^62 bytes"), (good, [[n, 1 << 40]] + rest, "elements of 2^40 bytes"),
]
for content, frames, what in cases:
    hostile(content, frames, what)
open(f"{b}/{part}", "wb").write(good)
open(b + "/archive.json", "w").write(table)
for name, text in (("manifest.json", b"{}"), ("archive.json", b"[" * 100000), ("archive.json", b""), ("config.json", b"{}"), ("extra", b"")):
    kept = open(f"{b}/{name}", "rb").read() if name != "extra" else None
    open(f"{b}/{name}", "wb").write(text)
    r = run("minimax-archive", "unpack", b, "-o", c, expect=6)
    assert name in r.stderr
    os.remove(f"{b}/{name}")
    if kept is not None:
        open(f"{b}/{name}", "wb").write(kept)
r = run("minimax-archive", "unpack", work + "/packed", "-o", c, expect=6)
assert "E_ARCHIVE" in r.stderr and "found a packed checkpoint" in r.stderr and "minimax-archive pack" in r.stderr
for other in "nowhere", "README.md", "tests/data/tiny-m1":
    for words in ["list", other], ["unpack", other, "-o", work + "/never"]:
        assert f"E_FS_MISSING: {other}: found no archive.json there" in run("minimax-archive", *words, expect=3).stderr
assert not os.path.exists(work + "/never")
nothing_left("packed", "archive")

# Files that may not grow (SIGXFSZ ignored): I/O error, nothing left.
r = run("minimax-archive", "unpack", b, "-o", c, expect=5, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
assert "File too large" in r.stderr
nothing_left("packed", "archive")

# A signal while a part is packed (slowly) stops at the next block, in a state that can be resumed.
p = subprocess.Popen([BIN + "minimax-convert", "tests/data/tiny-m1", "-o", c, "--compress", "zstd:19", "-j", "1", "-q"], stderr=subprocess.PIPE, text=True)
while not (os.path.isdir(work + "/.back.partial") and [f for f in os.listdir(work + "/.back.partial") if f.endswith(".zst")]):
    assert p.poll() is None
    time.sleep(0.001)
p.send_signal(signal.SIGTERM)
assert "E_INTERRUPTED" in p.communicate()[1] and p.returncode == 75 and not os.path.exists(c)
run("minimax-convert", "tests/data/tiny-m1", "-o", c, "-q", "--resume", expect=2)  # not an archive
run("minimax-convert", "tests/data/tiny-m1", "-o", c, "-q", "--resume", "--compress", "zstd", expect=2)  # another level
run("minimax-convert", "tests/data/tiny-m1", "-o", c, "-q", "--restart")
shutil.rmtree(c)
nothing_left("packed", "archive")

# Killed at any moment: the name is not there, or is complete; the next run starts afresh.
start = time.monotonic()
run("minimax-archive", "unpack", b, "-o", c, "-q")
usual = time.monotonic() - start
shutil.rmtree(c)
for verb, source, target, reference in (("unpack", b, c, a), ("pack", a, c, b)):
    for k in range(12):
        p = subprocess.Popen([BIN + "minimax-archive", verb, source, "-o", target, "-q"], stderr=subprocess.DEVNULL)
        time.sleep(usual * k / 11)
        p.send_signal(signal.SIGKILL)
        p.wait()
        if not os.path.exists(target):
            run("minimax-archive", verb, source, "-o", target, "-q")
        assert same(target, reference)
        shutil.rmtree(target)
    # Killed behind the rename, a run leaves its mark, which the next run of that name takes away.
    run("minimax-archive", verb, source, "-o", target, "-q")
    shutil.rmtree(target)
for leftover in os.listdir(work):
    assert leftover in ("packed", "archive"), leftover
# Stopped by a signal while it works: one line, status 75, and nothing is left.
for verb, source, target, more in (("unpack", b, c, []), ("pack", a, c, ["--level", "19"])):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        p = subprocess.Popen(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "inject=pwrite64:delay_enter=300000", BIN + "minimax-archive", verb, source,
                              "-o", target, "-q", "-j", "1", *more], stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 30
        staged = f"{work}/.back.partial-{verb}"
        while not (os.path.isdir(staged) and os.listdir(staged)):
            assert time.monotonic() < until and p.poll() is None
            time.sleep(0.01)
        child = int(open(f"/proc/{p.pid}/task/{p.pid}/children").read().split()[0])
        os.kill(child, number)
        said = p.communicate(timeout=60)[1]
        assert p.returncode == 75 and said == "minimax-archive: error: E_INTERRUPTED: stopped by a signal; nothing of this run is left\n", (verb, number, said)
        assert sorted(os.listdir(work)) == ["archive", "packed"], os.listdir(work)
shutil.rmtree(work)
print(f"{checked} frames read by zstd itself; {len(cases) + 5} hostile archives refused; 24 kills")
