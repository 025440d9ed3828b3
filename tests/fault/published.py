#!/usr/bin/env python3
"""What a user put beside an output survives, and an output is published on file systems that lack something. Needs nothing but the programs
and tests/fault/preload/lacks.c. Mount points, bind mounts and a full disk need unshare -rm: without it they are named as not run."""
import os
import shutil
import signal
import subprocess
import sys
import time

BUILD = os.environ.get("BUILD", "build")
os.environ["PATH"] = os.path.abspath(BUILD) + "/bin:" + os.environ["PATH"]
sys.path.insert(0, "tests/cli")
import convert_files as cf
from convert_files import Scratch, small

LACKS = os.path.abspath(os.path.join(BUILD, "tests/fault/preload/lacks.so"))
CONVERT, ARCHIVE, VERIFY = "minimax-convert", "minimax-archive", "minimax-verify"
counted = {"cases": 0}


def start(*command, **environment):
    counted["cases"] += 1
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "LD_PRELOAD": LACKS, **environment})


def end(p, status=0):
    out, err = p.communicate(timeout=60)
    assert p.returncode == status, (p.args, p.returncode, err)
    return err.decode()


def run(*command, status=0, **environment):
    return end(start(*command, **environment), status)


def stopped(p):
    """Waits until it has stopped itself; False when it ended without."""
    for _ in range(6000):
        pid, status = os.waitpid(p.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            return True
        if pid:
            p.returncode = os.waitstatus_to_exitcode(status)
            return False
        time.sleep(0.01)
    raise AssertionError("neither stopped nor ended")


def source():
    scratch = Scratch()
    root = scratch.__enter__()
    small().save(root + "/src")
    return scratch, root


def put(path, text="theirs"):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def theirs(root):
    """Where the user's files are by now, below root."""
    found = []
    for at, _, files in os.walk(root):
        for f in files:
            if open(os.path.join(at, f), "rb").read() == b"theirs":
                found.append(os.path.relpath(os.path.join(at, f), root))
    return sorted(found)


def clean(root, *more):
    assert sorted(os.listdir(root)) == sorted(["out", "src", *more]), os.listdir(root)
    cf.ok(VERIFY, "-q", root + "/out")


def into_an_empty_target():
    """Files and directories put into an empty target while a conversion works stay there; --resume publishes once they are moved."""
    for what in ("note", "deep/er/note", "config.json", "manifest.json"):
        scratch, root = source()
        with scratch:
            os.mkdir(root + "/out")
            p = start(CONVERT, root + "/src", "-o", root + "/out", "-q", PAUSE="rename:1")
            assert stopped(p)
            put(f"{root}/out/{what}")
            os.kill(p.pid, signal.SIGCONT)
            assert "move it away" in end(p, 5)
            assert theirs(root) == ["out/" + what]
            os.rename(root + "/out", root + "/away")
            run(CONVERT, root + "/src", "-o", root + "/out", "-q", "--resume")
            clean(root, "away")


def added_under_force():
    """The same under --force, before and after the exchange: kept beside the new checkpoint, and said; two renames instead of one too."""
    for lacks in ("", "flags"):
        for when in ("PAUSE", "PAUSE_AFTER"):
            for n in (1, 2) if lacks else (1,):
                for what in ("note", "deep/er/note", "config.json"):
                    scratch, root = source()
                    with scratch:
                        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "bf16")
                        p = start(CONVERT, root + "/src", "-o", root + "/out", "-q", "--force", **{when: f"rename:{n}"}, LACKS=lacks)
                        assert stopped(p)
                        where = next(d for d in (".out.partial.old", "out" if when == "PAUSE" else ".out.partial") if os.path.isdir(f"{root}/{d}"))
                        if os.path.exists(f"{root}/{where}/{what}"):
                            os.remove(f"{root}/{where}/{what}")
                        put(f"{root}/{where}/{what}")
                        os.kill(p.pid, signal.SIGCONT)
                        assert 'kept, in "out.kept"' in end(p)
                        assert theirs(root) == ["out.kept/" + what], (lacks, when, n, theirs(root))
                        clean(root, "out.kept")
                        run(CONVERT, root + "/src", "-o", root + "/out", "-q", "--resume")
                        clean(root, "out.kept")


def killed_while_replacing():
    """--force killed before and after each rename and each removal: the next run ends with one whole checkpoint and nothing beside it."""
    for lacks in ("", "flags"):
        for call, at in (("rename", (1, 2)), ("unlink", (1, 2, 5, 9))):
            for n in at:
                for when in ("DIE", "DIE_AFTER"):
                    scratch, root = source()
                    with scratch:
                        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "bf16")
                        p = start(CONVERT, root + "/src", "-o", root + "/out", "-q", "--force", **{when: f"{call}:{n}"}, LACKS=lacks)
                        p.communicate()
                        if p.returncode == 0:
                            continue
                        run(CONVERT, root + "/src", "-o", root + "/out", "-q", "--force", "--resume", LACKS=lacks)
                        clean(root)


def lacking():
    """Convert, resume, --force, pack and unpack where the file system lacks something, and where it lacks all."""
    cases = [({"LACKS": "flags"}, None), ({"LACKS": "direct"}, None), ({"LACKS": "fallocate"}, None), ({"LACKS": "locks", "LOCK_ERRNO": "ENOLCK"}, "no locks"),
             ({"LACKS": "locks"}, "no locks"), ({"LACKS": "flags,direct,fallocate,locks"}, "no locks")]
    for environment, note in cases:
        scratch, root = source()
        with scratch:
            out = root + "/out"
            said = run(CONVERT, root + "/src", "-o", out, "-q", **environment)
            assert (note in said) if note else said == "", said
            clean(root)
            run(CONVERT, root + "/src", "-o", out, "-q", "--force", "--quant", "bf16", **environment)
            clean(root)
            run(CONVERT, root + "/src", "-o", root + "/two", "-q", "--part", "0/2", "--quant", "bf16", **environment)
            run(CONVERT, root + "/src", "-o", root + "/two", "-q", "--part", "0/2", "--restart", **environment)
            p = start(CONVERT, root + "/src", "-o", root + "/two", "-q", "--resume", **environment, DIE="rename:1")
            end(p, -9)
            run(CONVERT, root + "/src", "-o", root + "/two", "-q", "--resume", **environment)
            run(ARCHIVE, "pack", out, "-o", root + "/packed", "-q", **environment)
            os.mkdir(root + "/back")
            run(ARCHIVE, "unpack", root + "/packed", "-o", root + "/back", "-q", **environment)
            assert cf.same_files(out, root + "/back")
            clean(root, "two", "packed", "back")


def late_to_the_lock():
    """A second run that opened the staging directory before the first one published it, and locks it after, does not empty it."""
    for what in ("convert", "pack", "unpack"):
        scratch, root = source()
        with scratch:
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/made")
            cf.ok(ARCHIVE, "pack", root + "/made", "-o", root + "/packed", "-q")
            command = {"convert": [CONVERT, root + "/src"], "pack": [ARCHIVE, "pack", root + "/made"], "unpack": [ARCHIVE, "unpack", root + "/packed"]}[what]
            first, second = (start(*command, "-o", root + "/out", "-q", PAUSE=at) for at in ("rename:1", "flock:1"))
            assert stopped(first) and stopped(second)
            for p, status in ((first, 0), (second, 7)):
                os.kill(p.pid, signal.SIGCONT)
                said = end(p, status)
            assert "E_LOCKED" in said and cf.same_files(root + "/out", root + ("/packed" if what == "pack" else "/made")), said
            assert sorted(os.listdir(root)) == ["made", "out", "packed", "src"], os.listdir(root)


def marked():
    """pack and unpack clear what a killed run of theirs left, and nothing else."""
    scratch, root = source()
    with scratch:
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        end(start(ARCHIVE, "pack", root + "/out", "-o", root + "/packed", "-q", DIE="rename:1"), -9)
        assert sorted(os.listdir(root)) == [".packed.partial-pack", ".packed.partial-pack.mark", "out", "src"]
        put(root + "/.packed.partial-pack/note")
        assert "move it away" in run(ARCHIVE, "pack", root + "/out", "-o", root + "/packed", "-q", status=2)
        assert theirs(root) == [".packed.partial-pack/note"]
        os.remove(root + "/.packed.partial-pack/note")
        run(ARCHIVE, "pack", root + "/out", "-o", root + "/packed", "-q")
        clean(root, "packed")
        put(root + "/.other.partial-pack/config.json")
        assert "no interrupted run" in run(ARCHIVE, "pack", root + "/out", "-o", root + "/other", "-q", status=2)
        assert theirs(root) == [".other.partial-pack/config.json"]
        # the converter's own staging directory is not the archive's, whatever the output is called
        end(start(CONVERT, root + "/src", "-o", root + "/new.pack", "-q", DIE="rename:1"), -9)
        run(ARCHIVE, "pack", root + "/out", "-o", root + "/new", "-q")
        run(CONVERT, root + "/src", "-o", root + "/new.pack", "-q", "--resume")
        assert "lies in the source" in run(ARCHIVE, "pack", root + "/out", "-o", root + "/out/x", "-q", status=2)
        assert "lies in the source" in run(ARCHIVE, "unpack", root + "/new", "-o", root + "/new/x", "-q", status=2)


def dangling_tokenizer():
    """A link to nothing where a companion should be is an incomplete cache, not an absent companion."""
    scratch, root = source()
    with scratch:
        os.symlink("../blobs/absent", root + "/src/tokenizer.json")
        assert "tokenizer.json" in run(CONVERT, root + "/src", "-o", root + "/out", "-q", status=3)
        assert os.listdir(root) == ["src"]


def signed_elsewhere():
    """A checkpoint that is removed, or takes another's name, while it is signed: nothing of it is signed, and nothing is left."""
    for replaced in (False, True):
        scratch, root = source()
        with scratch:
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
            shutil.copytree(root + "/out", root + "/other")
            subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", root + "/key.pem"], check=True)
            p = start(ARCHIVE, "sign", root + "/out", "--key", root + "/key.pem", PAUSE="fsync:1")
            assert stopped(p)
            if replaced:
                os.rename(root + "/out", root + "/old")
                os.rename(root + "/other", root + "/out")
            else:
                shutil.rmtree(root + "/out")
            os.kill(p.pid, signal.SIGCONT)
            said = end(p, 5)
            assert "E_CHANGED" in said and said.count("\n") == 1, said
            assert not os.path.exists(root + "/out/model.sig") and not [n for n in os.listdir(root) if n.startswith(".")], os.listdir(root)


MOUNTS = r"""
set -eu
cd "$1"
mkdir -p disk bound point
mount -t tmpfs -o size=200k none disk
fails() { want=$1 says=$2; shift 2; got=0; "$@" 2>err || got=$?; [ $got = $want ] && grep -q "$says" err || { echo "status $got: $*"; cat err; exit 1; }; }
mount --bind src bound
fails 2 "lies in the source" minimax-convert src -o bound/out -q
mkdir bound/sub && mkdir sub
mount --bind bound/sub sub
fails 2 "lies in the source" minimax-convert src -o sub/out -q
umount sub && rmdir src/sub
fails 2 "mount point" minimax-convert src -o disk -q
mount --bind point point
fails 2 "mount point" minimax-convert src -o point -q --force
minimax-convert src -o disk/fits -q
minimax-verify -q disk/fits
dd if=/dev/zero of=disk/full bs=1k count=1000 2>/dev/null || true
before=$(ls -A disk)
fails 5 "E_SPACE\|No space" minimax-convert src -o disk/out -q
fails 5 "E_SPACE\|No space" minimax-archive pack disk/fits -o disk/packed -q
rm disk/full
minimax-convert src -o disk/out -q --resume
minimax-verify -q disk/out
"""


def mounts():
    """A mount point, a bind mount of the source and of a directory in it, a full disk."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0:
        print("mounts: not run: needs unshare -rm")
        return
    scratch, root = source()
    with scratch:
        counted["cases"] += 8
        done = subprocess.run(["unshare", "-rm", "sh", "-c", MOUNTS, "sh", root], capture_output=True, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)


if __name__ == "__main__":
    cf.main([into_an_empty_target, added_under_force, killed_while_replacing, lacking, late_to_the_lock, marked, dangling_tokenizer, signed_elsewhere, mounts])
    print(f"{counted['cases']} runs: nothing of the user's lost, one whole output each")
