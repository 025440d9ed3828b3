#!/usr/bin/env python3
"""Shares of a conversion that is continued: what a whole run or shares of another number have finished is kept, and shares that start at the
same time over what other options left all begin."""
import fcntl
import os

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


if __name__ == "__main__":
    cf.main([number_changed, other_number_at_work])
