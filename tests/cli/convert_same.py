#!/usr/bin/env python3
"""The same source and options give the same directory, byte for byte: whatever the number of threads, the journal's pace, the contents of
fresh memory, and when it is made again. Large tensors are among them, so that whole 4 MiB blocks are assembled in memory."""
import os
import resource
import shutil

import convert_files as cf
from convert_cut import check as check_parts
from convert_files import Scratch, small

CONVERT = shutil.which("minimax-convert")
SAN = os.environ.get("SAN") == "1"


def convert(source, out, *args, env=None):
    cf.ok(CONVERT, "-q", source, "-o", out, *args, env={**os.environ, **(env or {})})


def few_descriptors():
    """More threads than there are descriptors for: the limit is raised, or fewer threads work. As on machines of 256 CPUs under a limit of 1,024."""
    with Scratch() as root:
        c = small(hidden=64, heads=2, kv=1, dim=32, experts=48, inter=64, layers=2, fp8=False)
        c.file = {name: f"model-{i % 16:05}.safetensors" for i, name in enumerate(c.tensors)}
        source = c.save(root + "/source")
        convert(source, root + "/whole", "--quant", "int8", "--layout", "hf")
        for hard in (4096, 40):
            def limit(most=hard):
                resource.setrlimit(resource.RLIMIT_NOFILE, (40, most))
            out = f"{root}/{hard}"
            cf.ok(CONVERT, "-q", source, "-o", out, "-j", 64, "--quant", "int8", "--layout", "hf", preexec_fn=limit)
            assert cf.same_files(root + "/whole", out)
            cf.ok(shutil.which("minimax-verify"), "-q", out, "--source", source, "-j", 64, preexec_fn=limit)


def large():
    """40 MB: experts of 10 MB a stack, embedding of 7."""
    return small(hidden=512, heads=8, kv=2, dim=64, experts=16, inter=640, vocab=6800, layers=2)


def threads():
    source = large()
    with Scratch() as root:
        source.save(root + "/src")
        for args in (("--tp", 2, "--part-size", "6M"), ("--tp", 8, "--tp-align", "pad"), ("--tp", 4, "--quant", "bf16")):
            for i, more in enumerate((("-j", 1), ("-j", 2), ("-j", 7, "--journal-every", "1M"))):
                convert(root + "/src", f"{root}/{i}", *args, *more)
                assert i == 0 or cf.same_files(root + "/0", f"{root}/{i}"), (args, more)
            if "--quant" not in args:
                check_parts(source, root + "/0", args[1], "pad" if "pad" in args else "split")
            cf.ok("minimax-verify", "-q", root + "/0", "--source", root + "/src")
            for i in range(3):
                shutil.rmtree(f"{root}/{i}")


def again():
    """Made anew from a copy of the source elsewhere: paths and times are in no file."""
    source = small(fp8=False, hidden=140, inter=200)
    with Scratch() as root:
        source.save(root + "/src")
        source.save(root + "/other/place/of/it")
        for quant in ("none", "block_fp8", "nvfp4", "w4a16", "mxfp4", "channel_fp8"):
            convert(root + "/src", root + "/a", "--quant", quant, "--tp", 2)
            cf.ok(CONVERT, "-q", "it", "-o", "../b", "--quant", quant, "--tp", 2, "-j", 5, cwd=root + "/other/place/of")
            assert cf.same_files(root + "/a", root + "/other/place/b"), quant
            shutil.rmtree(root + "/a")
            shutil.rmtree(root + "/other/place/b")


def fresh_memory():
    """D15: what malloc leaves in new memory reaches no file."""
    for source, args in ((small(hidden=129, inter=130), ("--tp", 2)), (small(hidden=129, inter=130), ("--tp", 2, "--tp-align", "pad")),
                         (small(fp8=False, hidden=140, inter=66), ("--tp", 2, "--quant", "block_fp8")),
                         (small(fp8=False, hidden=140, inter=64), ("--tp", 1, "--quant", "nvfp4"))):
        with Scratch() as root:
            source.save(root + "/src")
            for perturb in ("1", "254"):
                convert(root + "/src", f"{root}/{perturb}", *args, env={"MALLOC_PERTURB_": perturb})
            assert cf.same_files(root + "/1", root + "/254"), args


def uninitialised():
    """D15: valgrind sees no byte written that nobody set, and nothing else that is wrong."""
    valgrind = shutil.which("valgrind")
    if not valgrind or SAN:
        print("uninitialised: not run: needs valgrind, and no sanitizer")
        return
    for source, args in ((small(hidden=129, inter=130, experts=2, vocab=65), ("--tp", 2)),
                         (small(hidden=129, inter=130, experts=2, vocab=65), ("--tp", 2, "--tp-align", "pad")),
                         (small(fp8=False, hidden=140, inter=66, experts=2), ("--tp", 1, "--quant", "block_fp8"))):
        with Scratch() as root:
            source.save(root + "/src")
            cf.ok(valgrind, "-q", "--error-exitcode=99", CONVERT, "-q", root + "/src", "-o", root + "/out", *args)
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/plain", *args)
            assert cf.same_files(root + "/out", root + "/plain")


if __name__ == "__main__":
    cf.main([threads, few_descriptors, again, fresh_memory, uninitialised])
