#!/usr/bin/env python3
"""Files that options name: --collect, --logits, --report. Devices, FIFOs, links, the checkpoint's own files, what killed runs left."""
import json
import os
import stat
import struct
import subprocess

import convert_files as cf
from convert_files import Scratch, tree, write_st

EVAL, VERIFY, CONVERT = "minimax-eval", "minimax-verify", "minimax-convert"
SRC = "tests/data/tiny-m2"


def collect(root, out, **options):
    return cf.run(EVAL, root + "/out", "--ids", root + "/ids.json", "--window", "8", "--collect", out, **options)


def logits(root, out, **options):
    return cf.run(EVAL, root + "/out", "--logits", out, "--ids-from", root + "/ids.safetensors", **options)


def report(root, out, **options):
    return cf.run(VERIFY, "-q", root + "/out", "--source", SRC, "--report", out, **options)


def prepare(root):
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/out", "--quant", "block_fp8")
    with open(root + "/ids.json", "w", encoding="utf-8") as f:
        json.dump([1 + i % 7 for i in range(40)], f)
    write_st(root + "/ids.safetensors", {"ids.a": ("I32", [4], struct.pack("<4i", 1, 2, 3, 4))})


def refusals(root):
    """Nothing is touched, and it is said before the work."""
    os.mkfifo(root + "/pipe")
    os.mkfifo(root + "/pipe.safetensors")
    os.symlink("out/manifest.json", root + "/link.json")
    os.symlink("absent", root + "/dangling.json")
    os.symlink("out", root + "/door")
    os.mkdir(root + "/dir.json")
    device = root + "/device"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        device = "/dev/null"
    before = tree(root)
    inside = "inside the checkpoint"
    for write in (collect, logits):
        for out, says in ((device, "device"), (root + "/pipe", "FIFO"), (root + "/out/manifest.json", inside), (root + "/out/new.safetensors", inside),
                          (root + "/link.json", inside), (root + "/door/new", inside), (root + "/dangling.json", "link to nothing"),
                          (root + "/dir.json", "directory"), ("/dev/stdout", "own output")):
            cf.assert_error(write(root, out), EVAL, 2, "E_OUTPUT", says)
    for out, says in ((root + "/out/report.json", inside), (root + "/link.json", inside), (root + "/door/r.csv", inside), (root + "/dir.json", "directory"),
                      (root + "/dangling.json", "link to nothing"), (os.path.join(os.path.abspath(SRC), "report.json"), inside)):
        cf.assert_error(report(root, out), VERIFY, 2, "E_OUTPUT", says)
    assert tree(root) == before
    cf.ok(VERIFY, "-q", root + "/out")


def written(root):
    """A new file, an old one, one behind a link, after a killed run, into a FIFO."""
    for write, name in ((collect, "c"), (logits, "l"), (report, "r.json")):
        out = f"{root}/{name}"
        program = VERIFY if write is report else EVAL
        assert write(root, out).returncode == 0
        first = open(out, "rb").read()
        for left in (f"{root}/.{name}.partial-{program}", out + ".partial"):
            open(left, "w").write("left")
        os.symlink(name, root + "/via-" + name)
        done = write(root, root + "/via-" + name)
        assert done.returncode == 0, done.stderr
        assert open(out, "rb").read() == first and os.path.islink(root + "/via-" + name)
        assert not os.path.exists(f"{root}/.{name}.partial-{program}") and open(out + ".partial").read() == "left"
    os.mkfifo(root + "/fifo.json")
    with subprocess.Popen(["cat", root + "/fifo.json"], stdout=subprocess.PIPE) as reader:
        assert report(root, root + "/fifo.json").returncode == 0
        assert reader.communicate()[0] == open(root + "/r.json", "rb").read()
    assert stat.S_ISFIFO(os.stat(root + "/fifo.json").st_mode)


def whole():
    with Scratch() as root:
        prepare(root)
        refusals(root)
        written(root)


if __name__ == "__main__":
    cf.main([whole])
