#!/usr/bin/env python3
"""minimax-convert from outside, on broken sources and forbidden outputs: the documented exit status, exactly one line on stderr, nothing
on stdout, and every file as it was, nothing left. The rows' marks (B01, …) are those of the fault catalogue."""
import contextlib
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time

import convert_files as cf
from convert_files import INDEX, SINGLE, Checkpoint, Scratch, small

CONVERT = shutil.which("minimax-convert")
SHARD1, SHARD2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
USAGE, BAD, UNSUPPORTED, IO, LOCKED = 2, 3, 4, 5, 7


def convert(*args, **options):
    return cf.run(CONVERT, "-q", "-j", "2", *args, **options)


def refused(root, status, code, *says, args=(), source="src", output="out", **options):
    """A conversion below root that must fail at once and change nothing."""
    before = cf.tree(root)
    done = convert(os.path.join(root, source), "-o", os.path.join(root, output), *args, **options)
    cf.assert_error(done, "minimax-convert", status, code, *says)
    assert cf.tree(root) == before, f"{code}: found {sorted(set(cf.tree(root)) ^ set(before))}"
    if code in ("E_OUTPUT", "E_LEFTOVER", "E_RESUME", "E_FS_TYPE", "E_FS_OUTSIDE", "E_FS_MISSING"):  # a dry run says the same
        dry = convert(os.path.join(root, source), "-o", os.path.join(root, output), "--dry-run", *args, **options)
        dry.stderr = dry.stderr.replace(b"; --names-only does with config.json and the index alone", b"")
        assert (dry.returncode, dry.stderr, dry.stdout) == (done.returncode, done.stderr, b""), (done, dry)
        assert cf.tree(root) == before, code


@contextlib.contextmanager
def source(spoil=None, after=None):
    """A fresh root with root/src: spoil(checkpoint) before it is written, after(path of src)."""
    with Scratch() as root:
        c = small()
        if spoil:
            spoil(c)
        c.save(os.path.join(root, "src"))
        if after:
            after(os.path.join(root, "src"))
        yield root


def check(status, code, *says, spoil=None, after=None, args=(), **options):
    with source(spoil, after) as root:
        refused(root, status, code, *says, args=args, **options)


def whole():
    """The source that the others spoil converts, and the result is proven."""
    with source() as root:
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        cf.ok("minimax-verify", "-q", root + "/out", "--source", root + "/src")
        assert sorted(os.listdir(root)) == ["out", "src"]


def index_and_files():
    def put(file):
        def spoil(c):
            c.file["lm_head.weight"] = file
        return spoil

    def drop(c):
        c.file["lm_head.weight"] = SHARD1
        c.index = json.dumps({"weight_map": {k: v for k, v in c.file.items() if k != "lm_head.weight"}})

    for bad in ("../x", "/etc/passwd", "a\\b", "", "..", "\x1b[2J"):
        c = small()
        text = json.dumps({"weight_map": {**c.file, "lm_head.weight": bad}})
        check(BAD, "E_IDX_PATH", "lm_head.weight", INDEX, spoil=lambda c, t=text: setattr(c, "index", t))
    check(BAD, "E_FS_MISSING", SHARD2, "download seems unfinished",
          after=lambda s: os.rename(f"{s}/{SHARD2}", f"{s}/{SHARD2}.incomplete"))
    check(BAD, "E_FS_MISSING", SHARD2, after=lambda s: os.remove(f"{s}/{SHARD2}"))
    check(BAD, "E_IDX_TENSOR", "lm_head.weight", "found in this file, but not in the index", spoil=drop)
    check(BAD, "E_AMBIGUOUS", INDEX, SINGLE, after=lambda s: shutil.copy(f"{s}/{SHARD1}", f"{s}/{SINGLE}"))
    check(BAD, "E_DUP_KEY", spoil=lambda c: setattr(c, "index", '{"weight_map":{"a":"x","b":"x","a":"x"}}'))
    check(BAD, "E_JSON", INDEX, spoil=lambda c: setattr(c, "index", '{"weight_map":{"a":"x"'))
    check(BAD, "E_FS_MISSING", "config.json", after=lambda s: os.remove(s + "/config.json"))
    check(BAD, "E_FS_MISSING", "no such directory", after=shutil.rmtree)

    def only(*files):
        def after(path):
            for name in os.listdir(path):
                if name != "config.json":
                    os.remove(f"{path}/{name}")
            for name in files:
                with open(f"{path}/{name}", "wb") as f:
                    f.write(b"GGUF")
        return after
    check(BAD, "E_FS_MISSING", "found no weight file, expected this index or model.safetensors", after=only("notes.txt"))
    for first, *more in (("model-Q4_K.gguf", "x.gguf"), ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"), ("consolidated.00.pth",)):
        check(BAD, "E_FS_MISSING", f"found {first}, expected this index or model.safetensors: give the original", after=only(first, *more))
    for name, code, shown in (("\x1b[31mred", "E_NAME", r"\x1b[31mred"), ("été\u202e", "E_UNKNOWN", "été")):
        check(BAD, code, shown, spoil=lambda c, n=name: (c.tensors.update({n: ("U8", [1], b"1")}), c.file.update({n: SHARD1})))


def replace(path, make):
    os.remove(path)
    make(path)


def write_text(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as s:
        old = os.getcwd()
        os.chdir(os.path.dirname(path))  # the address is short
        s.bind(os.path.basename(path))
        os.chdir(old)


def file_types():
    """B09, B10, B11: a FIFO must not hang."""
    for name in (SHARD1, INDEX, "config.json"):
        for make, code, says in (
            (os.mkfifo, "E_FS_TYPE", "a FIFO"),
            (os.mkdir, "E_FS_TYPE", "a directory"),
            (make_socket, "E_FS_TYPE", "a socket"),
            (lambda p: os.symlink(os.path.basename(p), p), "E_FS_TYPE", "loop"),
            (lambda p: os.symlink("nothing", p), "E_FS_MISSING", "link to nothing"),
        ):
            check(BAD, code, name, says, after=lambda s, n=name, m=make: replace(f"{s}/{n}", m))
    check(BAD, "E_FS_TYPE", "a device", after=lambda s: replace(f"{s}/{SHARD1}", lambda p: os.symlink("/dev/zero", p)),
          args=("--allow-outside-links",))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for name in (SHARD1, INDEX, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "vocab.json",
                 "merges.txt", "LICENSE"):
        check(BAD, "E_NOT_ST" if name == SHARD1 else "E_JSON", "git lfs pull", name, after=lambda s, n=name: write_text(f"{s}/{n}", pointer))


def layer_types():
    """An M1 that says nowhere which layers are lightning attention: the defaults of its two classes, where the weights are of these."""
    for name, layer in (("MiniMaxM1ForCausalLM", "layer 0 is full attention"), ("MiniMaxForCausalLM", "layer 0 is full attention")):
        for change in ({}, {"attn_type_list": None}, {"layer_types": None}):
            with Scratch() as root:
                shutil.copytree("tests/data/tiny-m1", root + "/src")
                with open(root + "/src/config.json", encoding="utf-8") as f:
                    config = json.load(f)
                del config["attn_type_list"]
                write_text(root + "/src/config.json", json.dumps(config | change | {"architectures": [name]} | {"model_type": "minimax"}))
                refused(root, BAD, "E_CFG_MISSING", "config.json", 'key "attn_type_list"', layer)


def links():
    """B12, B14"""
    with source() as root:
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/plain")
        os.makedirs(root + "/hub/blobs")
        os.makedirs(root + "/hub/snapshots")
        os.rename(root + "/src", root + "/hub/snapshots/rev")
        for i, name in enumerate(sorted(os.listdir(root + "/hub/snapshots/rev"))):
            at = f"{root}/hub/snapshots/rev/{name}"
            os.rename(at, f"{root}/hub/blobs/{i:064x}")
            os.symlink(f"../../blobs/{i:064x}", at)
        cf.ok(CONVERT, "-q", root + "/hub/snapshots/rev", "-o", root + "/hub-out")
        assert cf.same_files(root + "/plain", root + "/hub-out")
        refused(root, USAGE, "E_OUTPUT", source="hub/snapshots/rev", output="hub/snapshots/rev/out")

    def outside(name):
        def after(s):
            os.rename(f"{s}/{name}", f"{s}/../{name}")
            os.symlink(f"../{name}", f"{s}/{name}")
        return after

    for name in (SHARD1, INDEX, "config.json"):
        check(BAD, "E_FS_OUTSIDE", name, "--allow-outside-links", after=outside(name))
        with source(after=outside(name)) as root:
            cf.ok(CONVERT, "-q", "--allow-outside-links", root + "/src", "-o", root + "/out")
            cf.ok("minimax-verify", "-q", root + "/out", "--source", root + "/src")


def companions():
    """Files that are copied along are files of the checkpoint too."""
    def add(make):
        return lambda s: make(s + "/tokenizer.json")

    check(BAD, "E_FS_TYPE", "tokenizer.json", "a FIFO", after=add(os.mkfifo))
    check(BAD, "E_FS_TYPE", "tokenizer.json", "a directory", after=add(os.mkdir))
    check(BAD, "E_FS_OUTSIDE", "tokenizer.json", after=add(lambda p: os.symlink("/etc/passwd", p)))
    check(BAD, "E_FS_TYPE", "tokenizer.json", "a loop of symbolic links", after=add(lambda p: os.symlink("tokenizer.json", p)))
    check(BAD, "E_FS_MISSING", "tokenizer.json", "a symbolic link to nothing", after=add(lambda p: os.symlink("nothing", p)))
    with source(after=add(lambda p: open(p, "w").write("{ }"))) as root:
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        assert open(root + "/out/tokenizer.json").read() == "{ }"
        for name in os.listdir(root + "/out"):
            assert os.stat(f"{root}/out/{name}").st_mode & 0o111 == 0, name


def permissions():
    """B15: as nobody, who may not read one shard, then not look into the folder."""
    if os.geteuid() != 0:
        def as_nobody():
            pass
    else:
        def as_nobody():
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="convert-") as root:
        program = shutil.copy(CONVERT, root + "/program")
        small().save(root + "/src")
        os.chmod(root, 0o777)

        def attempt(*says):
            before = cf.tree(root)
            done = cf.run(program, "-q", root + "/src", "-o", root + "/out", preexec_fn=as_nobody)
            cf.assert_error(done, "minimax-convert", IO, "E_IO", "Permission denied", *says)
            assert cf.tree(root) == before

        os.chmod(f"{root}/src/{SHARD2}", 0)
        attempt(SHARD2)
        os.chmod(root + "/src", 0o000)
        attempt("config.json")
        os.chmod(root + "/src", 0o755)
        os.chmod(f"{root}/src/{SHARD2}", 0o644)
        os.chmod(root, 0o555)  # nowhere to write
        attempt(".out.partial")
        os.chmod(root, 0o755)


def descriptors():
    """B16: 300 shards under RLIMIT_NOFILE 64; the same bytes as without."""
    c = small(experts=50)
    c.file = {name: f"m-{i}" for i, name in enumerate(c.tensors)}
    assert len(c.file) > 300
    with Scratch() as root:
        c.save(root + "/src")
        c.file = dict.fromkeys(c.tensors, SHARD1)
        c.save(root + "/one")
        def few():
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        for jobs in (1, 8):
            cf.ok(CONVERT, "-q", "-j", jobs, root + "/src", "-o", f"{root}/out{jobs}", preexec_fn=few)
        cf.ok(CONVERT, "-q", root + "/one", "-o", root + "/out")
        assert cf.same_files(root + "/out1", root + "/out8")
        assert cf.packed(root + "/out")[0] == cf.packed(root + "/out1")[0]


def source_paths():
    """B17"""
    for name in ("with space", "new\nline", "ünïcode ✓", "-dash", "quote\"'$(x)`", "a" * 255):
        with Scratch() as root:
            small().save(os.path.join(root, name))
            output = f"out of {name}"[:200].replace("\n", "_")
            cf.ok(CONVERT, "-q", "-o", "out", "--", name, cwd=root)
            cf.ok(CONVERT, "-q", f"./{name}/", "-o", f"./{output}/", cwd=root)
            cf.ok("minimax-verify", "-q", "out", cwd=root)
            assert cf.same_files(f"{root}/out", f"{root}/{output}")
    for path in ("x" * 4095, "./" * 2047 + "x", "y" * 300, "no/such/dir", ""):
        with Scratch() as root:
            before = cf.tree(root)
            done = convert(path, "-o", "out", cwd=root)
            assert done.returncode in (BAD, IO), (path[:20], done)
            cf.assert_error(done, "minimax-convert", done.returncode, "E_IO" if done.returncode == IO else "E_FS_MISSING")
            assert cf.tree(root) == before


def output_overlaps():
    """B18: the output is the source, holds it or lies in it, however the paths are spelt."""
    with source(after=lambda s: (os.mkdir(s + "/sub"), os.symlink("src", s + "/../link"))) as root:
        overlap = "is, holds or lies in the source"
        for output in ("src", "src/", "./src", "src/out", "src/sub", "src/sub/out", "src/../src", "link/out", "link/sub/../out"):
            refused(root, USAGE, "E_OUTPUT", overlap, output=output)
        refused(root, USAGE, "E_OUTPUT", overlap, output="src", args=("--force",))
        refused(root, USAGE, "E_OUTPUT", overlap, source="link", output="src/out")
        refused(root, USAGE, "E_OUTPUT", "not a directory", output="link")
        before = cf.tree(root)
        for output, says in ((root, overlap), (root + "/", overlap), ("../src", overlap), ("..", "name"), (".", "name"), ("/", "name")):
            cf.assert_error(convert(".", "-o", output, cwd=root + "/src"), "minimax-convert", USAGE, "E_OUTPUT", says)  # from inside
        assert cf.tree(root) == before


def output_exists():
    """B19: what has the output's name already is never touched."""
    with source(after=lambda s: (
        os.mkdir(s + "/../full"), open(s + "/../full/precious", "w").close(), os.mkfifo(s + "/../fifo"), os.mkdir(s + "/../real"),
        open(s + "/../file", "w").close(), os.symlink("real", s + "/../link"), os.symlink("nothing", s + "/../dangling"),
        os.symlink("/dev/null", s + "/../device"), make_socket(s + "/../socket"),
        os.mkdir(s + "/../theirs"), open(s + "/../theirs/manifest.json", "w").write("{}"))) as root:
        for output in ("full", "fifo", "file", "link", "link/", "dangling", "dangling/", "device", "socket", "theirs"):
            for args in ((), ("--force",), ("--restart",), ("--resume",)):
                refused(root, USAGE, "E_OUTPUT", output=output, args=args)
        for output in ("", ".", ".."):
            before = cf.tree(root)
            cf.assert_error(convert("src", "-o", output, cwd=root), "minimax-convert", USAGE, "E_OUTPUT")
            assert cf.tree(root) == before
        refused(root, IO, "E_IO", "No such file", output="nowhere/out")
        refused(root, IO, "E_IO", output="file/out")
        for name in ("n" * 256, "new\nline", "back\\slash"):
            refused(root, USAGE, "E_OUTPUT", "no usable directory name", output=name)
        refused(root, IO, "E_IO", "too long", output="n" * 250)
        cf.assert_error(convert(root + "/src", "-o", "/dev/null"), "minimax-convert", USAGE, "E_OUTPUT")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/real")  # an empty directory may be filled


def force():
    """--force replaces a checkpoint of ours, and nothing else that lies there."""
    with source() as root:
        out = root + "/out"
        cf.ok(CONVERT, "-q", root + "/src", "-o", out)
        first = cf.tree(out)
        refused(root, USAGE, "E_OUTPUT", "--force")
        cf.ok(CONVERT, "-q", root + "/src", "-o", out, "--force", "--quant", "bf16")
        assert cf.tree(out) != first and sorted(os.listdir(root)) == ["out", "src"]
        cf.ok(CONVERT, "-q", root + "/src", "-o", out, "--force")
        assert cf.tree(out) == first
        part = next(n for n in os.listdir(out) if n.startswith("model-rank"))
        os.remove(f"{out}/{part}")  # a damaged one too
        cf.ok(CONVERT, "-q", root + "/src", "-o", out, "--force")
        assert cf.tree(out) == first
        open(out + "/notes.txt", "w").write("precious")
        refused(root, USAGE, "E_OUTPUT", "notes.txt", args=("--force",))
        os.remove(out + "/notes.txt")
        os.mkdir(out + "/sub")
        refused(root, USAGE, "E_OUTPUT", "sub", args=("--force",))


def failing_force():
    """A conversion that fails with --force leaves the old checkpoint as it was."""
    with source() as root:
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        c = Checkpoint.load(root + "/src")
        dtype, shape, data = c.tensors["lm_head.weight"]
        c.tensors["lm_head.weight"] = (dtype, shape, data[:-2] + b"\x80\x7f")
        shutil.rmtree(root + "/src")
        c.save(root + "/src")
        refused(root, BAD, "E_NONFINITE", "lm_head.weight", args=("--force",))


def locked():
    """Another run holds the staging directory: exit 7 at once. And what only looks like one is not emptied."""
    with source() as root:
        os.mkdir(root + "/.out.partial", 0o700)
        open(root + "/.out.partial/part", "w").write("theirs")
        fd = os.open(root + "/.out.partial", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        for args in ((), ("--restart",), ("--resume",)):
            refused(root, LOCKED, "E_LOCKED", ".out.partial", args=args)
        if b"MPI_Init" not in open(shutil.which(CONVERT), "rb").read():  # one of several processes, which cannot meet in this build
            for name, count in (("OMPI_COMM_WORLD_SIZE", 2), ("PMI_SIZE", 2), ("PMIX_SIZE", 2), ("PMI_SIZE", 1)):
                says = ["this build has no MPI", "build with MPI=1"] if count > 1 else ["another run writing this output\n"]
                refused(root, LOCKED, "E_LOCKED", *says, env={**os.environ, name: str(count)})
        os.close(fd)
        refused(root, USAGE, "E_OUTPUT", ".out.partial")
        shutil.rmtree(root + "/.out.partial")
        os.mkdir(root + "/elsewhere")
        open(root + "/elsewhere/precious", "w").close()
        os.symlink("elsewhere", root + "/.out.partial")  # planted
        refused(root, USAGE, "E_OUTPUT", ".out.partial", "no directory")
        os.remove(root + "/.out.partial")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        # A run that finds its output complete does not clear what another one is staging there.
        os.mkdir(root + "/.out.partial", 0o700)
        open(root + "/.out.partial/part", "w").write("theirs")
        fd = os.open(root + "/.out.partial", os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        cf.assert_error(cf.run(CONVERT, "-q", root + "/src", "-o", root + "/out", "--resume"), "minimax-convert", LOCKED, "E_LOCKED", ".out.partial")
        assert os.listdir(root + "/.out.partial") == ["part"]
        os.close(fd)
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--resume")
        assert sorted(os.listdir(root)) == [".out.partial", "elsewhere", "out", "src"], os.listdir(root)
        assert os.listdir(root + "/.out.partial") == ["part"]  # no journal: not ours


def lock_race():
    """A second run that opened the staging directory just before the first published it must not take the published one for it."""
    strace = shutil.which("strace")
    if not strace or os.environ.get("SAN") == "1":
        print("lock_race: not run: needs strace, and no sanitizer")
        return
    with source() as root:
        # The first sleeps before it publishes; the second, between its open and its flock.
        first = subprocess.Popen([strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=renameat2", "-e",
                                  "inject=renameat2:delay_enter=400000", CONVERT, "-q", root + "/src", "-o", root + "/out"])
        while not os.path.exists(root + "/.out.partial") and first.poll() is None:
            time.sleep(0.002)
        second = cf.run(strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=flock", "-e", "inject=flock:delay_enter=900000",
                        CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "bf16")
        assert first.wait() == 0
        cf.assert_error(second, "minimax-convert", LOCKED, "E_LOCKED", ".out.partial")
        cf.ok("minimax-verify", "-q", root + "/out", "--source", root + "/src")
        assert sorted(os.listdir(root)) == ["out", "src"], os.listdir(root)


def strangers():
    """Files of others under the names that runs use next to the output stay, whatever is asked for."""
    with source() as root:
        for name in (".out.partial", ".out.partial.journal", ".out.partial.journal.1-2", ".out.partial.replaced", ".out.partial.sources"):
            path = f"{root}/{name}"
            for make in (lambda p: open(p, "w").write("my notes"), os.mkdir, os.mkfifo, lambda p: os.symlink("src", p)):
                make(path)
                says = ("no directory",) if name == ".out.partial" else ("what no run of this program wrote",)
                for args in ((), ("--restart",), ("--resume",), ("--part", "0/2"), ("--part", "0/2", "--restart")):
                    if not (name == ".out.partial" and make is os.mkdir):
                        done = convert(root + "/src", "-o", root + "/out", *args) if "--part" in args else refused(root, USAGE, "E_OUTPUT", name, *says, args=args)
                        if done:
                            cf.assert_error(done, "minimax-convert", USAGE, "E_OUTPUT", name, *says)
                if os.path.islink(path) or not os.path.isdir(path):
                    os.remove(path)
                else:
                    os.rmdir(path)
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        open(root + "/.out.partial.journal.3-4", "w").write("my notes")  # a finished output is not in its way
        open(root + "/.out.partial.journal", "w").write("my notes")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--resume")
        for name in (".out.partial.journal.3-4", ".out.partial.journal"):
            assert open(f"{root}/{name}").read() == "my notes"
            os.remove(f"{root}/{name}")
        open(root + "/.new.partial-pack.mark", "w").write("my notes")
        before = cf.tree(root)
        cf.assert_error(cf.run("minimax-archive", "pack", root + "/out", "-o", root + "/new"), "minimax-archive", USAGE, "E_OUTPUT", ".mark")
        assert cf.tree(root) == before, sorted(set(cf.tree(root)) ^ set(before))


def hangup():
    """A terminal that closes, which may say so twice, stops a run as SIGTERM does; under nohup nothing happens."""
    with source() as root:
        os.mkfifo(root + "/pipe")
        for ignored in (False, True):
            p = subprocess.Popen([CONVERT, "-q", root + "/src", "-o", root + "/out", "--events", root + "/pipe"], stderr=subprocess.PIPE,
                                 preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL))
            assert b"waiting for a reader" in p.stderr.readline()
            for _ in range(2):
                p.send_signal(signal.SIGHUP)
            if ignored:
                with open(root + "/pipe", "rb") as f:
                    assert b'"done"' in f.read()
            assert p.wait(30) == (0 if ignored else 75), p
            assert ignored or b"E_INTERRUPTED" in p.stderr.read()


def interrupted():
    """What an interrupted run has done is kept until it is continued or discarded, whatever is tried meanwhile."""
    with Scratch() as root:
        small(hidden=256, inter=256, experts=8, vocab=512).save(root + "/src")
        parts = ("--part-size", "300K")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/whole", *parts)
        done = convert(root + "/src", "-o", root + "/out", *parts,  # the experts' part is larger than files may be
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600 << 10, 600 << 10)))
        cf.assert_error(done, "minimax-convert", IO, "E_IO", "too large")
        assert sorted(os.listdir(root)) == [".out.partial", ".out.partial.journal", "src", "whole"], os.listdir(root)
        assert len(os.listdir(root + "/.out.partial")) >= 2
        refused(root, USAGE, "E_LEFTOVER", "--resume", args=parts)
        for other in ((*parts, "--tp", "2"), (*parts, "--quant", "bf16"), ("--part-size", "2M")):
            refused(root, USAGE, "E_RESUME", "--restart", args=("--resume", *other))
        os.rename(root + "/src", root + "/away")
        small(hidden=256, inter=256, experts=8, vocab=512, layers=2).save(root + "/src")
        refused(root, USAGE, "E_RESUME", args=(*parts, "--resume"))
        shutil.rmtree(root + "/src")
        os.rename(root + "/away", root + "/src")
        with open(f"{root}/src/{SHARD1}", "r+b") as f:  # the same header, other weights
            f.seek(-1, os.SEEK_END)
            last = f.read(1)
            f.seek(-1, os.SEEK_END)
            f.write(bytes([last[0] ^ 1]))
        refused(root, USAGE, "E_RESUME", args=(*parts, "--resume"))
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--restart", *parts)
        assert not cf.same_files(root + "/out", root + "/whole") and sorted(os.listdir(root)) == ["out", "src", "whole"]


def resumed():
    """Continued, an interrupted run gives what an uninterrupted one does."""
    with Scratch() as root:
        small(hidden=256, inter=256, experts=8, vocab=512).save(root + "/src")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/whole", "--part-size", "300K")
        done = convert(root + "/src", "-o", root + "/out", "--part-size", "300K",
                       preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (600 << 10, 600 << 10)))
        cf.assert_error(done, "minimax-convert", IO, "E_IO", "too large")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--resume", "--part-size", "300K")
        assert cf.same_files(root + "/out", root + "/whole") and sorted(os.listdir(root)) == ["out", "src", "whole"]


def no_space():
    """A32, K05: sparse files of 4 TiB each, whose headers are right: refused by the space check at once, and nothing is left to resume."""
    vocab = 2**31 - 1
    c = small(hidden=1024, heads=2, dim=512)
    c.config["vocab_size"] = vocab
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    for name in ends:
        c.tensors[name] = ("BF16", [0], b"")
        c.file[name] = name
    with Scratch() as root:
        c.save(root + "/src")
        for name in ends:
            size = vocab * 1024 * 2
            header = json.dumps({name: {"dtype": "BF16", "shape": [vocab, 1024], "data_offsets": [0, size]}}).encode()
            with open(f"{root}/src/{name}", "wb") as f:
                f.write(struct.pack("<Q", len(header)) + header)
                try:
                    f.truncate(8 + len(header) + size)
                except OSError as e:
                    print(f"no_space: not run: {e}")
                    return
        for args in ((), ("--quant", "bf16"), ("--resume",)):
            done = convert(root + "/src", "-o", root + "/out", *args)
            cf.assert_error(done, "minimax-convert", IO, "E_SPACE", "bytes free")
            assert os.listdir(root) == ["src"], os.listdir(root)


def parallel_degree():
    """C13"""
    for tp in ("0", "-1", "2147483648", "4294967297", "8x", "", "1.5", "1025"):
        check(USAGE, "E_USAGE", "--tp", args=(f"--tp={tp}",))
    check(UNSUPPORTED, "E_TP", "num_attention_heads 2", "expected one of 1, 2", args=("--tp", "3"))
    check(UNSUPPORTED, "E_TP", args=("--tp", "1024"))
    for ranks in ("", "0,", ",0", "0,,1", "2", "1-0", "0-2", "0;1", "x", "+0", " 0", "-0", "0, 1", "0--1", "0-+1", "0- 1"):
        check(USAGE, "E_RANKS", args=("--tp", "2", f"--ranks={ranks}"))
    for part in ("", "0", "2/2", "0/0", "0/-1", "-0/2", "+0/2", " 0/2", "0/ 2", "0/2x", "0/4294967297"):
        check(USAGE, "E_USAGE", "--part", args=(f"--part={part}",))
    for level in ("0", "20", "+3", " 3", "-3", "3x", ""):
        check(USAGE, "E_USAGE", "--compress", args=(f"--compress=zstd:{level}",))
    for option in ("--follow-quiet=0", "--follow-quiet=10", "--follow-timeout=3600"):  # as given as their defaults
        check(USAGE, "E_USAGE", "without --follow", args=(option,))


def values():
    """What is found only when weights are read leaves nothing either."""
    def spoil(name, at, new):
        def edit(c):
            dtype, shape, data = c.tensors[name]
            c.tensors[name] = (dtype, shape, data[:at] + new + data[at + len(new) :])
        return edit

    one = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    for args in ((), ("--quant", "bf16"), ("--quant", "block_fp8"), ("--tp", "2")):
        check(BAD, "E_NONFINITE", one, "row 3, column 5", spoil=spoil(one, 3 * 6 + 5, b"\x7f"), args=args)
        check(BAD, "E_Q_SCALE", one + "_scale_inv", "block row 0, column 0", spoil=spoil(one + "_scale_inv", 0, struct.pack("<f", 0)), args=args)
    check(BAD, "E_NONFINITE", "lm_head.weight", spoil=spoil("lm_head.weight", 0, b"\x80\xff"))
    check(BAD, "E_Q_MISSING", one, spoil=lambda c: c.tensors.pop(one + "_scale_inv"))
    o_proj = "model.layers.0.self_attn.o_proj.weight"
    check(BAD, "E_Q_ORPHAN", o_proj + "_scale_inv", spoil=lambda c: c.tensors.update({o_proj: ("BF16", [10, 8], bytes(160))}))
    check(UNSUPPORTED, "E_MIXED", one, spoil=lambda c: (c.tensors.update({one: ("BF16", [10, 6], bytes(120))}), c.tensors.pop(one + "_scale_inv")))
    check(UNSUPPORTED, "E_Q_METHOD", "exl9", spoil=lambda c: c.config["quantization_config"].update(quant_method="exl9"))
    check(UNSUPPORTED, "E_ARCH", "MiniMax-VL-01", spoil=lambda c: c.config.update(architectures=["MiniMaxVL01ForConditionalGeneration"]))
    check(BAD, "E_CFG_MISSING", "hidden_act", spoil=lambda c: c.config.update(architectures=["MiniMaxM3SparseForCausalLM"]))


def allowed():
    """--allow-nonfinite: the bytes are those of a source with 0 in these places, and the run says how many there were."""
    one = "model.layers.0.block_sparse_moe.experts.2.w2.weight"

    def source(root, name, at_one, at_head):
        c = small()
        for tensor, at, new in ((one, 3 * 6 + 5, at_one), (one, 7, at_one), ("lm_head.weight", 238, at_head)):
            dtype, shape, data = c.tensors[tensor]
            c.tensors[tensor] = (dtype, shape, data[:at] + new + data[at + len(new) :])
        c.save(f"{root}/{name}")

    with Scratch() as root:
        source(root, "bad", b"\xff", b"\x80\x7f")
        source(root, "zero", b"\0", b"\0\0")
        for i, args in enumerate(((), ("--quant", "bf16"), ("--quant", "nvfp4"), ("--tp", "2"))):
            done = cf.ok(CONVERT, root + "/bad", "-o", f"{root}/a{i}", "--allow-nonfinite", *args)
            assert b"3 weights were NaN or infinite and are stored as 0\n" in done.stderr, done
            cf.ok(CONVERT, "-q", root + "/zero", "-o", f"{root}/b{i}", *args)
            assert cf.packed(f"{root}/a{i}")[0] == cf.packed(f"{root}/b{i}")[0], args


def narrowing():
    """Numbers that the stored type does not hold are refused, not turned into infinity."""
    big = small(fp8=False)
    name = "model.layers.0.self_attn.o_proj.weight"
    dtype, shape, data = big.tensors[name]
    with Scratch() as root:
        big.tensors[name] = (dtype, shape, data[:4] + struct.pack("<H", 0x4780) + data[6:])  # 65536
        big.save(root + "/src")
        says = (name, "found 65536 at row 0, column 2, expected at most 65504, the largest number in F16; expected another --quant")
        refused(root, UNSUPPORTED, "E_Q_SCALE", *says, args=("--quant", "f16"))
        refused(root, UNSUPPORTED, "E_Q_SCALE", *says, args=("--quant", "f16", "--allow-nonfinite"))
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "bf16")
    with Scratch() as root:
        wide = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        big.tensors[name] = ("F32", shape, wide[:8] + struct.pack("<I", 0x7F7FFFFF) + wide[12:])
        big.save(root + "/src")
        refused(root, UNSUPPORTED, "E_Q_SCALE", name, "found 3.40282e+38 at row 0, column 2, expected at most 3.38953e+38", "in BF16",
                args=("--quant", "bf16"))


def streams():
    """Progress and results that nobody can take; the error line is one line without -q too."""
    with source(spoil=lambda c: c.tensors.update(
        {"lm_head.weight": ("BF16", [12, 10], b"\x80\x7f" * 120)})) as root:
        done = cf.run(CONVERT, root + "/src", "-o", root + "/out")
        lines = done.stderr.decode().splitlines()
        assert done.returncode == BAD and sum("error:" in x for x in lines) == 1 and "error:" in lines[-1], done
        with open("/dev/full", "w") as full:
                    done = subprocess.run([CONVERT, root + "/src", "--dry-run", "--json"], stdout=full, stderr=subprocess.PIPE, check=False)
        lines = [x for x in done.stderr.splitlines() if not x.startswith(b"note: ")]
        assert done.returncode == IO and len(lines) == 1, done
        assert os.listdir(root) == ["src"]


def code():
    """No code of a checkpoint runs: a module that auto_map names and a chat template, each of which would make a file, whatever reads them."""
    with Scratch() as root:
        made, source, out = root + "/made", root + "/src", root + "/out"
        shutil.copytree("tests/data/tiny-m2", source)
        with open(source + "/config.json", encoding="utf-8") as f:
            config = json.load(f)
        module = {"AutoConfig": "modeling_bait.Bait", "AutoModelForCausalLM": "modeling_bait.Bait", "AutoTokenizer": ["modeling_bait.Bait", None]}
        with open(source + "/config.json", "w", encoding="utf-8") as f:
            json.dump(config | {"auto_map": module}, f)
        with open(source + "/modeling_bait.py", "w", encoding="utf-8") as f:
            f.write(f"open({made!r}, 'w').close()\nclass Bait:\n    pass\n")
        template = "{{ cycler.__init__.__globals__.os.system('touch " + made + "') }}"
        with open(source + "/tokenizer_config.json", "w", encoding="utf-8") as f:
            json.dump({"chat_template": template, "auto_map": module, "tokenizer_class": "Bait"}, f)
        with open(source + "/chat_template.jinja", "w", encoding="utf-8") as f:
            f.write(template)
        subprocess.run(["python3", source + "/modeling_bait.py"], check=True)
        os.remove(made)  # the bait works
        cf.ok(CONVERT, "-q", source, "-o", out, "--tp", "2")
        assert os.path.exists(out + "/modeling_bait.py") and os.path.exists(out + "/chat_template.jinja")
        cf.ok(CONVERT, "-q", out, "-o", root + "/hf", "--layout", "hf")
        cf.ok("minimax-verify", "-q", out, "--source", source)
        cf.ok("minimax-inspect", out)
        cf.ok("minimax-run", out, "-p", "In the", "-n", "2", "-q")
        cf.ok("minimax-run", out, "--chat", "--chat-format", "minimax-m2", "-p", "In the", "-n", "2", "-q")
        cf.assert_error(cf.run("minimax-run", out, "--chat", "-p", "In the"), "minimax-run", UNSUPPORTED, "E_CHAT_FORMAT")
        cf.ok("minimax-serve", out, "--check")
        assert not os.path.exists(made)


if __name__ == "__main__":
    cf.main([whole, code, index_and_files, file_types, layer_types, links, companions, permissions, descriptors, source_paths, output_overlaps, output_exists,
             force, failing_force, locked, lock_race, strangers, hangup, interrupted, resumed, no_space, parallel_degree, values, allowed, narrowing, streams])
