#!/usr/bin/env python3
"""System calls of a conversion that a signal interrupts are made again: the conversion is done, with the bytes of an undisturbed one."""
from resume_cases import CONVERT, M2, cf, killed, same

OPTIONS = ("--tp", "2", "--part-size", "1M")


def interrupted(out, inject, *how):
    log = ("strace", "-f", "-qq", "-o", "/dev/null")
    traced = ",".join(sorted({i.split(":")[0] for i in inject}))
    cf.ok(*log, "-e", "trace=" + traced, *[x for i in inject for x in ("-e", "inject=" + i)], CONVERT, "-q", "-j", "1", "--journal-every", "100K", M2, "-o", out,
          *OPTIONS, *how)


def calls():
    with cf.Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/whole", *OPTIONS)
        for name, *inject in (("fallocate", "fallocate:error=EINTR:when=1+2"), ("fdatasync", "fdatasync:error=EINTR:when=1+2"),
                              ("ftruncate", "fallocate:error=EOPNOTSUPP", "ftruncate:error=EINTR:when=1+2"), ("fsync", "fsync:error=EINTR:when=1+2"),
                              ("pwrite64", "pwrite64:error=EINTR:when=1+2")):
            interrupted(f"{root}/{name}", inject)
            same(root, name, "whole")
        killed("fdatasync", 3, M2, "-o", root + "/out", *OPTIONS)
        interrupted(root + "/out", ["ftruncate:error=EINTR:when=1"], "--resume")
        same(root, "out", "whole")


if __name__ == "__main__":
    cf.main([calls])
