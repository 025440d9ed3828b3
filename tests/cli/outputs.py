#!/usr/bin/env python3
"""Files that options name: --collect, --logits, --report, --events. One rule for all: an output never is an input, by whatever name, and takes the
place only of an empty file or of one that the program made, or with --force of any. Devices, FIFOs, links, what killed runs left."""
import json
import os
import shutil
import stat
import struct
import subprocess
import tempfile

import convert_files as cf
from convert_files import Scratch, tree, write_st

ARCHIVE, CONVERT, EVAL, VERIFY = "minimax-archive", "minimax-convert", "minimax-eval", "minimax-verify"
SRC = "tests/data/tiny-m2"


def collect(root, out, **options):
    return cf.run(EVAL, root + "/out", "--ids", root + "/ids.json", "--window", "8", "--collect", out, **options)


def logits(root, out, **options):
    return cf.run(EVAL, root + "/out", "--logits", out, "--ids-from", root + "/ids.safetensors", **options)


def report(root, out, **options):
    return cf.run(VERIFY, "-q", root + "/out", "--source", SRC, "--report", out, **options)


def events(root, out, **options):
    options.setdefault("timeout", 60)
    target = root + "/made"
    shutil.rmtree(target, ignore_errors=True)
    return subprocess.run([CONVERT, "-q", root + "/source", "-o", target, "--events", out, "--recipe", root + "/recipe.json", "--allow-outside-links"],
                          stdin=subprocess.DEVNULL, capture_output=True, check=False, **options)


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
    cf.assert_error(cf.run("minimax-hold", root + "/out", root + "/door/sock"), "minimax-hold", 2, "E_OUTPUT", inside)
    for write in (collect, logits, report):  # its temporary file has a longer name
        cf.assert_error(write(root, root + "/" + "n" * 240 + ".json"), VERIFY if write is report else EVAL, 5, "E_IO", "create: File name too long")
    assert tree(root) == before
    checkpoints(root)
    cf.ok(VERIFY, "-q", root + "/out")


def checkpoints(root):
    """No output lies in a checkpoint that is no input either: its list of files does not have it."""
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/packed")
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/hf", "--layout", "hf")
    for arc in ("/arc", "/other.arc"):
        cf.ok("minimax-archive", "-q", "pack", root + "/packed", "-o", root + arc)
    shutil.copytree(SRC, root + "/source")
    with open(root + "/recipe.json", "w", encoding="utf-8") as f:
        f.write(cf.ok(CONVERT, "--print-recipe").stdout.decode())
    for here in ("packed", "hf", "arc"):
        os.symlink(here, root + "/door-" + here)
    before = tree(root)
    programs = ((collect, EVAL, "x"), (logits, EVAL, "x"), (report, VERIFY, "x.html"), (report, VERIFY, "config.json"), (events, CONVERT, "x"),
                (lambda root, out: cf.run(CONVERT, "-q", SRC, "-o", out), CONVERT, "x"),
                (lambda root, out: cf.run("minimax-archive", "pack", root + "/out", "-o", out), "minimax-archive", "x"),
                (lambda root, out: cf.run("minimax-archive", "unpack", root + "/other.arc", "-o", out), "minimax-archive", "x"),
                (lambda root, out: cf.run("minimax-hold", root + "/out", out), "minimax-hold", "x"),
                (lambda root, out: cf.run("minimax-serve", root + "/out", "--kv-offload", "20M", "--kv-offload-disk", "20M", "--kv-offload-dir",
                                          os.path.dirname(out)), "minimax-serve", "x"))
    for write, program, name in programs:
        for here in ("packed", "door-packed", "hf", "door-hf", "arc", "door-arc"):
            cf.assert_error(write(root, f"{root}/{here}/{name}"), program, 2, "E_OUTPUT", "checkpoint, expected one elsewhere")
    assert tree(root) == before
    downloads(root, [(write, program) for write, program, name in programs[:3] + programs[4:5] + programs[8:9] if name != "config.json"])
    os.mkdir(root + "/web")  # any other manifest.json
    with open(root + "/web/manifest.json", "w", encoding="utf-8") as f:
        json.dump({"name": "minimax-packed"}, f)
    assert report(root, root + "/web/r.json").returncode == 0
    for path in ("packed", "hf"):
        cf.ok(VERIFY, "-q", f"{root}/{path}")
        os.mkdir(f"{root}/{path}/sub")
        cf.assert_error(report(root, f"{root}/{path}/sub/r.json"), VERIFY, 2, "E_OUTPUT", "checkpoint, expected one elsewhere")


def downloads(root, programs):
    """Nor next to the weights of a download that is no input, with --force either; one of links, as in the Hub's cache, and a packed one of links."""
    shutil.copytree(SRC, root + "/download")
    os.mkdir(root + "/blobs")
    for source, links in (("download", "snapshot"), ("packed", "packed-links")):
        os.mkdir(f"{root}/{links}")
        for name in os.listdir(f"{root}/{source}"):
            shutil.copy(f"{root}/{source}/{name}", f"{root}/blobs/{links}-{name}")
            os.symlink(f"../blobs/{links}-{name}", f"{root}/{links}/{name}")
        os.symlink(f"{links}/config.json", f"{root}/to-{links}.html")
    with open(root + "/p.safetensors", "wb") as f:
        f.write(open(root + "/ids.safetensors", "rb").read())
    before = tree(root)
    forced = [(lambda root, out: cf.run(EVAL, root + "/out", "--logits", out, "--ids-from", root + "/p.safetensors", "--force"), EVAL),
              (lambda root, out: cf.run(EVAL, root + "/out", "--ids", root + "/ids.json", "--window", "8", "--collect", out, "--force"), EVAL)]
    reported = [(lambda root, out: cf.run(VERIFY, "-q", root + "/out", "--source", SRC, "--report", out, "--force"), VERIFY)]
    for write, program in programs + forced + reported:
        names = ["download/new.html", "snapshot/new.html", "packed-links/new.html"]
        if program != "minimax-hold":
            names += ["to-snapshot.html", "to-packed-links.html"]
        if (write, program) in forced:
            names += ["download/config.json", "download/model-00001-of-00002.safetensors", "snapshot/config.json", "packed-links/config.json"]
        for name in names:
            cf.assert_error(write(root, f"{root}/{name}"), program, 2, "E_OUTPUT", "checkpoint, expected one elsewhere")
    assert tree(root) == before
    shutil.rmtree(root + "/blobs")


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


def inputs(root):
    """What each of them reads: by its name, another spelling, a symbolic link, a hard link; files of directories, and what they lead to."""
    os.mkdir(root + "/blobs")
    shutil.copytree(SRC, root + "/source")
    shutil.copytree(root + "/out", root + "/linked")  # a checkpoint of links, as in the Hub's cache
    for here in ("linked", "source"):
        for name in os.listdir(f"{root}/{here}"):
            if name.endswith((".safetensors", "config.json")):
                os.rename(f"{root}/{here}/{name}", f"{root}/blobs/{here}-{name}")
                os.symlink(f"../blobs/{here}-{name}", f"{root}/{here}/{name}")
    with open(root + "/text.txt", "w", encoding="utf-8") as f:
        f.write("The quick brown fox jumps over the lazy dog. " * 9)
    with open(root + "/recipe.json", "w", encoding="utf-8") as f:
        f.write(cf.ok(CONVERT, "--print-recipe", "--quant", "int8").stdout.decode())
    ours = {}  # files that the programs made, so that it is the rule about inputs that refuses
    for write, name in ((collect, "c"), (logits, "l"), (report, "r.json")):
        ours[name] = f"{root}/own-{name}"
        assert write(root, ours[name]).returncode == 0
    text = lambda out: cf.run(EVAL, root + "/linked", "--text", root + "/text.txt", "--window", "8", "--limit", "1", "--collect", out, "--force")
    ids = lambda out: cf.run(EVAL, root + "/linked", "--ids", root + "/ids.json", "--window", "8", "--collect", out, "--force")
    prompts = lambda out: cf.run(EVAL, root + "/linked", "--ids-from", root + "/ids.safetensors", "--logits", out, "--force")
    with open(root + "/divergence.json", "wb") as f:
        f.write(cf.ok(EVAL, root + "/out", "--ids", root + "/ids.json", "--window", "8", "--against", root + "/out", "--json").stdout)
    diverges = lambda out: cf.run(VERIFY, root + "/out", "--source", root + "/source", "--divergence", root + "/divergence.json", "--report", out, "--force")
    errors = lambda out: cf.run(VERIFY, root + "/out", "--source", root + "/source", "--report", out, "--force")
    watched = lambda out: events(root, out)
    part = "model-rank-00000-part-00000.safetensors"
    shard = next(n for n in sorted(os.listdir(SRC)) if n.endswith(".safetensors"))
    tried = 0
    for write, program, read in ((text, EVAL, "text.txt"), (ids, EVAL, "ids.json"), (prompts, EVAL, "ids.safetensors"), (ids, EVAL, "blobs/linked-" + part),
                                 (text, EVAL, "blobs/linked-" + part), (prompts, EVAL, "blobs/linked-config.json"), (errors, VERIFY, "blobs/source-config.json"),
                                 (diverges, VERIFY, "divergence.json"), (watched, CONVERT, "recipe.json"), (watched, CONVERT, "blobs/source-" + shard), (watched, CONVERT, "blobs/source-config.json"),
                                 (watched, CONVERT, "source/tokenizer.json"), (watched, CONVERT, "source/new")):
        file = root + "/" + read
        suffix = ".html" if write in (errors, diverges) else ""
        names = [file] if os.path.basename(file) == "new" else [file, f"{root}/../{os.path.basename(root)}/{read}", f"{root}/s-{tried}{suffix}", f"{root}/h-{tried}{suffix}"]
        if len(names) > 1:
            os.symlink(read, names[2])
            os.link(file, names[3])
        before = tree(root)
        for out in names[2:] if suffix else names:
            done = write(out)
            says = "inside the checkpoint" if "source/" in os.path.relpath(os.path.realpath(out), root) else "found the file that is read as"
            cf.assert_error(done, program, 2, "E_OUTPUT", says)
            assert tree(root) == before, out
            tried += 1
    assert tried > 35, tried
    # A temporary file of a killed run has a name of its own; an input may have it.
    for write, program, read in ((ids, EVAL, "ids.json"), (prompts, EVAL, "ids.safetensors"), (errors, VERIFY, "blobs/source-config.json")):
        out = f"{root}/taken" + (".html" if write is errors else "")
        os.link(f"{root}/{read}", f"{root}/.{os.path.basename(out)}.partial-{program}")
        before = tree(root)
        cf.assert_error(write(out), program, 2, "E_OUTPUT", "found the file that is read as")
        assert tree(root) == before
        os.remove(f"{root}/.{os.path.basename(out)}.partial-{program}")


def strangers(root):
    """A file that the program did not make stays, byte for byte; an empty one and one of its own are replaced, any with --force."""
    forced = [(collect, EVAL, "st", lambda out: cf.run(EVAL, root + "/out", "--ids", root + "/ids.json", "--window", "8", "--collect", out, "--force")),
              (logits, EVAL, "st", lambda out: cf.run(EVAL, root + "/out", "--logits", out, "--ids-from", root + "/ids.safetensors", "--force"))]
    for end in ("json", "csv", "html"):
        forced.append((report, VERIFY, end, lambda out: cf.run(VERIFY, "-q", root + "/out", "--source", SRC, "--report", out, "--force")))
    forced.append((events, CONVERT, "log", None))
    for i, (write, program, end, with_force) in enumerate(forced):
        out = f"{root}/stranger{i}.{end}"
        quoted = b'See {"__metadata__":{"format":"minimax-calibration"} and "format":"minimax-logits", "event":"begin", ' \
            b'"compared_by": "minimax-verify ", name,scheme,count,nonfinite,sqnr_db, <title>Error of a packed checkpoint</title>\n'
        for content in (quoted, b'{"event":"begin","user":"x","time":1}\n', b'{"error":"E1","event":"x"}\n', b"my notes\n", b"{}", b"name,scheme\n1,2\n", b"<!DOCTYPE html>\n<title>Mine</title>", open(root + "/ids.safetensors", "rb").read(), b"\0" * 200000):
            with open(out, "wb") as f:
                f.write(content)
            os.utime(out, (1, 1))
            cf.assert_error(write(root, out), program, 2, "E_OUTPUT", os.path.basename(out), "did not make")
            assert open(out, "rb").read() == content and os.stat(out).st_mtime == 1
        if with_force:
            assert with_force(out).returncode == 0
            first = open(out, "rb").read()
        else:
            os.truncate(out, 0)
            first = b""
        done = write(root, out)
        assert done.returncode == 0, done.stderr
        fresh = open(out, "rb").read()
        assert len(fresh) > 400 and (fresh == first or not first), (program, end)
        open(root + "/empty." + end, "w").close()
        assert write(root, root + "/empty." + end).returncode == 0
    # Events are appended; a run's own standard error may be the file.
    old = open(root + "/empty.log", "rb").read()
    assert events(root, root + "/empty.log").returncode == 0
    new = open(root + "/empty.log", "rb").read()
    assert new.startswith(old) and len(new) > len(old) and [json.loads(line)["event"] for line in new.splitlines()].count("begin") == 2
    # A line that a killed run left cut stays one: the next run begins on its own.
    os.truncate(root + "/empty.log", len(new) - 9)
    assert events(root, root + "/empty.log").returncode == 0
    lines = open(root + "/empty.log", "rb").read().splitlines()
    cut = new.splitlines()[:-1] + [new.splitlines()[-1][:-8]]
    assert lines[:len(cut)] == cut and [json.loads(line)["event"] for line in lines[len(cut):]] == ["begin", "done"], lines
    # Nor does a first line that a full disk cut, or two, keep the next runs away; a stranger's line does.
    head = old.splitlines()[0]
    for start in (head[:1], head[:9], head[:40], head[:9] + b"\n" + head[:30], b'{"error":"E_'):
        open(root + "/first.log", "wb").write(start)
        for runs in (1, 2):
            done = events(root, root + "/first.log")
            assert done.returncode == 0, (start, done.stderr)
            lines = open(root + "/first.log", "rb").read().splitlines()
            cuts = start.splitlines()
            assert lines[:len(cuts)] == cuts and [json.loads(line)["event"] for line in lines[len(cuts):]] == ["begin", "done"] * runs, lines
    for start in (head[:9] + b"x", b'{"architecture":"x"}', b'{"architecture":"x"}\n', head[:40] + b"\nhers\n", b"{\n}\n", b"\n" + head[:9], b"x"):
        open(root + "/first.log", "wb").write(start)
        done = events(root, root + "/first.log")
        cf.assert_error(done, CONVERT, 2, "E_OUTPUT", "did not make")
        assert open(root + "/first.log", "rb").read() == start
    # Not under a name of the output's own, which is a directory or a run's journal.
    for name in ("new", "new/", ".new.partial", ".new.partial.journal", ".new.partial.journal.0-2", ".new.partial.sources"):
        done = cf.run(CONVERT, "-q", SRC, "-o", root + "/new", "--events", f"{root}/{name}")
        cf.assert_error(done, CONVERT, 2, "E_OUTPUT", "a name of the output's own")
        assert not any("new" in x for x in os.listdir(root)), name
    # Nor into what a run has staged, which --resume would refuse to go on with.
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/new", "--part", "0/2")
    for name in (".new.partial", ".new.partial/0-2"):
        done = cf.run(CONVERT, "-q", SRC, "-o", root + "/new", "--resume", "--events", f"{root}/{name}/log")
        cf.assert_error(done, CONVERT, 2, "E_OUTPUT", "a name of the output's own")
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/new", "--resume")
    # Not into the output, old or new.
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/old")
    before = tree(root + "/old")
    done = cf.run(CONVERT, "-q", SRC, "-o", root + "/old", "--force", "--quant", "int8", "--events", root + "/old/events")
    cf.assert_error(done, CONVERT, 2, "E_OUTPUT", "inside the checkpoint")
    assert tree(root + "/old") == before


def beside_weights(root):
    """A checkpoint is not written into the folder of another one's weights, which may be none that is read."""
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/whole")
    cf.ok(ARCHIVE, "pack", root + "/whole", "-o", root + "/archived")
    shutil.copytree(SRC, root + "/others")
    before = tree(root + "/others")
    for args in ([CONVERT, "-q", SRC], [CONVERT, "-q", SRC, "--layout", "hf"],
                 [ARCHIVE, "pack", root + "/whole"], [ARCHIVE, "unpack", root + "/archived"]):
        done = cf.run(*args, "-o", root + "/others/x")
        cf.assert_error(done, args[0], 2, "E_OUTPUT", "inside a checkpoint, expected one elsewhere")
        assert tree(root + "/others") == before


def replaced(root):
    """--force does not take away what the run reads, nor what its source leads to."""
    cf.ok(CONVERT, "-q", SRC, "-o", root + "/replaced", "--tp", 2)
    os.mkdir(root + "/via")
    for name in os.listdir(root + "/replaced"):
        os.symlink("../replaced/" + name, root + "/via/" + name)
    os.symlink("replaced", root + "/door-to-replaced")
    before = tree(root + "/replaced")
    for out in ("/replaced", "/door-to-replaced/"):
        done = cf.run(CONVERT, "-q", root + "/via", "-o", root + out, "--force", "--allow-outside-links")
        cf.assert_error(done, CONVERT, 2, "E_OUTPUT", "in it, which is read")
        for option, name in (("--recipe", "manifest.json"), ("--recipe", "config.json")):
            done = cf.run(CONVERT, "-q", SRC, "-o", root + out, "--force", option, f"{root}/replaced/{name}")
            assert done.returncode != 0
        assert tree(root + "/replaced") == before
    cf.ok(CONVERT, "-q", root + "/via", "-o", root + "/beside", "--tp", 1, "--allow-outside-links")


def fifo(root):
    """Nobody reads it yet: a line says so; a signal ends the waiting."""
    os.mkfifo(root + "/events")
    for read in (True, False):
        with subprocess.Popen([CONVERT, "-q", SRC, "-o", f"{root}/fifo{read}", "--events", root + "/events"], stderr=subprocess.PIPE, text=True) as run:
            said = run.stderr.readline()
            if not said.endswith("/events: waiting for a reader of this FIFO\n"):
                run.kill()
                raise AssertionError(said)
            if read:
                with open(root + "/events", encoding="utf-8") as f:
                    lines = [json.loads(line)["event"] for line in f]
                assert (lines[0], lines[-1]) == ("begin", "done"), lines
                assert run.wait() == 0
            else:
                run.terminate()
                assert run.wait(20) == 75 and "E_INTERRUPTED" in run.stderr.read()
                assert not os.path.exists(f"{root}/fifo{read}")


def kept_in_place(root):
    """What the sticky bit, chattr or a mount keeps from being replaced is refused before work, and nothing is left; events append to it."""
    folder = tempfile.mkdtemp(dir="/tmp", prefix="mm-kept-")
    other = ["setpriv", "--reuid=1002", "--regid=1002", "--clear-groups"]
    try:
        for name in ("out", "ids.json"):
            (shutil.copytree if name == "out" else shutil.copy)(f"{root}/{name}", f"{folder}/{name}")
        os.mkdir(folder + "/t")
        os.chmod(folder, 0o755)
        os.chmod(folder + "/t", 0o1777)
        target = folder + "/t/c"
        made = [EVAL, folder + "/out", "--ids", folder + "/ids.json", "--window", "8", "--force", "--collect", target]
        cf.ok(*other, *made)
        cf.ok(*other, *made)
        os.chown(target, 1001, 1001)
        cf.ok(*made)
        os.chown(target, 1001, 1001)

        def refused(command, words):
            done = cf.run(*command)
            assert done.returncode == 2 and b"E_OUTPUT: " in done.stderr and words in done.stderr and not done.stdout, done
            assert os.listdir(folder + "/t") == ["c"], os.listdir(folder + "/t")

        refused([*other, *made], b"a file of another user (uid 1001) in a folder with the sticky bit")
        mounted = cf.run("unshare", "-m", "sh", "-c", 'mount --bind "$1" "$1" && shift && exec "$@"', "sh", target, *made)
        assert mounted.returncode in (1, 32) or (mounted.returncode == 2 and b"found a mounted file" in mounted.stderr), mounted
        if cf.run("chattr", "+a", target).returncode == 0:
            refused(made, b"append-only file")
            assert events(root, target).returncode == 2  # no file of events
            cf.ok("chattr", "-a", target)
            cf.ok("chattr", "+a", folder + "/t")
            refused([*made[:-1], folder + "/t/new"], b"append-only (lsattr -d), where nothing can be renamed")
            for _ in range(2):
                done = events(root, folder + "/t/events")
                assert done.returncode == 0, done
    finally:
        cf.run("chattr", "-R", "-a", folder)
        shutil.rmtree(folder)


def rule():
    with Scratch() as root:
        prepare(root)
        inputs(root)
        strangers(root)
        beside_weights(root)
        replaced(root)
        fifo(root)
        if os.geteuid() == 0:
            kept_in_place(root)


def whole():
    with Scratch() as root:
        prepare(root)
        refusals(root)
        written(root)


if __name__ == "__main__":
    cf.main([whole, rule])
