#!/usr/bin/env python3
"""Shares of a conversion that is continued: what a whole run or shares of another number have finished is kept, and shares that start at the
same time over what other options left all begin."""
import fcntl
import os
import shutil
import subprocess
import time

from resume_cases import CONVERT, LOCKED, M2, cf, killed, refused, same

OPTIONS = ("--tp", "2", "--part-size", "512K")


def links(staged, into):
    """The part files that are there, kept under other names: {name: link}."""
    os.mkdir(into)
    found = {}
    for name in os.listdir(staged):
        if name.startswith("model-"):
            os.link(f"{staged}/{name}", f"{into}/{name}")
            found[name] = f"{into}/{name}"
    assert len(found) > 4, found
    return found



def number_changed():
    """Parts that shares of another number, or a run without --part, have made are not made again."""
    for options in (OPTIONS, (*OPTIONS, "--compress", "zstd")):
        for before in (lambda root, o: [cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *o, "--part", f"{i}/3") for i in range(3)],
                       lambda root, o: killed("renameat2", 1, M2, "-o", root + "/out", *o)):
            with cf.Scratch() as root:
                cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *options)
                before(root, options)
                made = links(root + "/.out.partial", root + "/made")
                for i in range(2):
                    cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *options, "--part", f"{i}/2", "--resume")
                for name, link in made.items():
                    assert os.path.samefile(link, f"{root}/.out.partial/{name}"), f"{name} was made again"
                cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *options, "--resume")
                same(root, "out", "whole")


def other_number_at_work():
    """A share does not begin beside one of another number that is at work."""
    with cf.Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "0/3")
        with open(root + "/.out.partial.journal.0-3", "rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            refused(root, LOCKED, "E_LOCKED", ".out.partial.journal.0-3", args=(M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--resume"))
            cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "1/3")
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--resume")


def together(root, number, *options):
    """Shares that start at the same time: exit statuses and what they say."""
    runs = [subprocess.Popen([CONVERT, "-q", M2, "-o", root + "/out", *options, "--part", f"{i}/{number}"], stderr=subprocess.PIPE) for i in range(number)]
    said = [p.communicate(timeout=60)[1].decode() for p in runs]
    return [p.returncode for p in runs], said


def restarted_together():
    """Shares with --restart over what other options left all begin, whichever comes first, and none loses what another has made."""
    for _ in range(4):
        with cf.Scratch() as root:
            cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *OPTIONS)
            killed("fdatasync", 2, M2, "-o", root + "/out", "--tp", "4", "--part-size", "512K")
            statuses, said = together(root, 6, *OPTIONS, "--restart")
            assert statuses == [0] * 6, said
            made = links(root + "/.out.partial", root + "/made")
            assert len(made) == len([n for n in os.listdir(root + "/whole") if n.startswith("model-")]), "a share has removed another's parts"
            cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--resume")
            same(root, "out", "whole")
            assert all(os.path.samefile(link, f"{root}/out/{name}") for name, link in made.items())
            assert sorted(os.listdir(root)) == ["made", "out", "whole"]


def restarted_beside_others():
    """What is left by a run that is at work is not discarded."""
    with cf.Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--tp", "4", "--part-size", "512K", "--part", "0/2")
        with open(root + "/.out.partial.journal.0-2", "rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            refused(root, LOCKED, "E_LOCKED", ".out.partial.journal.0-2", args=(M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--restart"))
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--restart")


def cut_meanwhile():
    """A share reads the journal of another while that one cuts its torn tail."""
    if not shutil.which("strace") or os.environ.get("SAN") == "1":
        return
    with cf.Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "0/2")
        journal = root + "/.out.partial.journal.0-2"
        size = os.path.getsize(journal)
        with open(journal, "ab") as f:
            f.write(b"\xff" * 1000)
        p = subprocess.Popen(["strace", "-f", "-qq", "-o", root + "/trace", "-P", journal, "-e", "trace=pread64,openat", "-e",
                              "inject=pread64:delay_enter=500000", CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--resume"],
                             stderr=subprocess.PIPE)
        end = time.monotonic() + 60
        while not os.path.exists(root + "/.out.partial.journal.1-2"):  # made before the others are merged
            assert p.poll() is None and time.monotonic() < end
            time.sleep(0.005)
        time.sleep(1)  # the second look at the header is done, the journal is about to be read
        os.truncate(journal, size)
        said = p.communicate(timeout=60)[1]
        assert p.returncode == 0, said
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *OPTIONS)
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--resume")
        same(root, "out", "whole")


if __name__ == "__main__":
    cf.main([number_changed, other_number_at_work, restarted_together, restarted_beside_others, cut_meanwhile])
