#!/usr/bin/env python3
"""Shares of a conversion that is continued: what a whole run or shares of another number have finished is kept, and shares that start at the
same time over what other options left all begin; a kill at any moment loses nothing."""
import fcntl
import os
import random
import shutil
import subprocess
import time

from resume_cases import CONVERT, LOCKED, M2, cf, killed, refused, same

OPTIONS = ("--tp", "2", "--part-size", "512K")


def staged(partial):
    """The part files in a staging directory and the folders of shards in it: {name: path}; each is in one of them."""
    found = [(name, f"{folder}/{name}") for folder, _, names in os.walk(partial) for name in names if name.startswith("model-")]
    assert len(dict(found)) == len(found), found
    return dict(found)


def links(partial, into):
    """The part files that are there, kept under other names: {name: link}."""
    os.mkdir(into)
    found = {name: f"{into}/{name}" for name in staged(partial)}
    for name, path in staged(partial).items():
        os.link(path, found[name])
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
                now = staged(root + "/.out.partial")
                for name, link in made.items():
                    assert os.path.samefile(link, now[name]), f"{name} was made again"
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
        folder = os.open(root + "/.out.partial/1-2", os.O_RDONLY)  # what a run of the same share holds
        fcntl.flock(folder, fcntl.LOCK_EX)
        refused(root, LOCKED, "E_LOCKED", ".out.partial/1-2", args=(M2, "-o", root + "/out", *OPTIONS, "--part", "1/2", "--restart"))
        os.close(folder)


def killed_at_random():
    """Shares of changing numbers and whole runs, killed at random moments, the moment when parts are taken over among them: in the end the output
    is that of an undisturbed run, and nothing else is left."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    with cf.Scratch() as root:
        start = time.monotonic()
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *OPTIONS)
        usual = time.monotonic() - start
        for attempt in range(3):
            out = (CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--journal-every", "16K", "--resume")
            for _ in range(5):
                number = rng.choice((1, 2, 3))
                runs = [subprocess.Popen([*out, *(("--part", f"{i}/{number}") if number > 1 else ())], stderr=subprocess.PIPE) for i in range(number)]
                for p in rng.sample(runs, len(runs)):
                    time.sleep(rng.random() * usual / len(runs))
                    if rng.random() < 0.8:
                        p.kill()
                said = [(p.wait(timeout=60), p.stderr.read()) for p in runs]
                assert all(status in (0, -9) for status, _ in said), (seed, attempt, said)
                assert not os.path.exists(root + "/out") or cf.same_files(root + "/out", root + "/whole"), (seed, attempt)
            cf.ok(*out)
            same(root, "out", "whole")
            assert sorted(os.listdir(root)) == ["out", "whole"], (seed, attempt)
            shutil.rmtree(root + "/out")


def killed_taking_over():
    """A run that is killed between two parts that it takes from the folders of shards leaves all of them to the next."""
    if not shutil.which("strace") or os.environ.get("SAN") == "1":
        return
    with cf.Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *OPTIONS)
        for i in range(3):
            cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--part", f"{i}/3")
        made = links(root + "/.out.partial", root + "/made")
        for when, *how in ((1, "--part", "1/2"), (3, "--part", "0/2"), (4,), (2,)):
            killed("renameat", when, M2, "-o", root + "/out", *OPTIONS, "--resume", *how)
            assert {n: os.stat(path).st_ino for n, path in staged(root + "/.out.partial").items()} == {n: os.stat(path).st_ino for n, path in made.items()}, when
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", *OPTIONS, "--resume")
        same(root, "out", "whole")
        assert all(os.path.samefile(link, f"{root}/out/{name}") for name, link in made.items())
        assert sorted(os.listdir(root)) == ["made", "out", "whole"]


def killed_restarting():
    """A share with --restart that is killed while it discards what other options left: one of the two can be continued."""
    if not shutil.which("strace") or os.environ.get("SAN") == "1":
        return
    other = ("--tp", "4", "--part-size", "512K")
    with cf.Scratch() as root:
        killed("fdatasync", 2, M2, "-o", root + "/out", *other)
        for call, when in (("unlinkat", 1), ("unlinkat", 2), ("unlinkat", 3), ("unlinkat", 4), ("unlinkat", 5), ("fsync", 1), ("fsync", 2), ("fsync", 3)):
            shutil.copytree(root, root + "-now")
            killed(call, when, M2, "-o", root + "-now/out", *OPTIONS, "--part", "0/2", "--restart")
            runs = [cf.run(CONVERT, "-q", M2, "-o", root + "-now/out", *how, "--resume") for how in (other, (*OPTIONS, "--part", "0/2"))]
            assert 0 in [p.returncode for p in runs], (call, when, runs)
            shutil.rmtree(root + "-now")


if __name__ == "__main__":
    cf.main([number_changed, other_number_at_work, restarted_together, restarted_beside_others, killed_at_random, killed_taking_over, killed_restarting])
