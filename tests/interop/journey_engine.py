#!/usr/bin/env python3
"""The way of one who writes an engine: the programs of docs/library.md as they stand there, on shards that were cut for one number of ranks, cut
again for another, and written with Hugging Face names, without the source at hand."""
import os
import re
import shutil
import subprocess
import sys

BUILD, TMP = os.environ["BUILD"], os.environ["TMPDIR"]
PAGE = open("docs/library.md", encoding="utf-8").read()


def run(*args, status=0, **how):
    done = subprocess.run([str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300, check=False, **how)
    assert done.returncode == status, (args, done.returncode, done.stdout, done.stderr)
    return done


def block(language):
    return re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S).group(1)


def shards():
    """tp 8 from the source, which then goes away; tp 2 and Hugging Face names from that."""
    convert = f"{BUILD}/bin/minimax-convert"
    source = shutil.copytree("tests/data/tiny-m2", f"{TMP}/source")
    run(convert, source, "-o", f"{TMP}/tp8", "--tp", 8, "--quant", "block_fp8", "-q")
    shutil.rmtree(source)
    run(convert, f"{TMP}/tp8", "-o", f"{TMP}/tp2", "--tp", 2, "-q")
    run(convert, f"{TMP}/tp8", "-o", f"{TMP}/hf", "--layout", "hf", "-q")
    run(f"{BUILD}/bin/minimax-verify", f"{TMP}/tp2", "--source", f"{TMP}/tp8", "-q")


def in_c():
    usr = f"{TMP}/usr"
    run("scripts/install_library.sh", usr, usr, os.path.realpath(f"{BUILD}/lib/libminimax.so"))
    command = re.search(r"`cc (first\.c .*?)`", PAGE).group(1)
    with open(f"{TMP}/first.c", "w", encoding="utf-8") as f:
        f.write(block("c"))
    here = {**os.environ, "PKG_CONFIG_PATH": f"{usr}/lib/pkgconfig", "LD_LIBRARY_PATH": f"{usr}/lib"}
    run("sh", "-c", f"cd {TMP} && cc -Wall -Wextra -Werror {command}", env=here)
    said = run(f"{TMP}/first", f"{TMP}/tp2", env=here).stdout.splitlines()
    assert len(said) == 2 and "w13_weight F8_E4M3 at 0x" in said[0] and "w13_weight_scale_inv F32 at 0x" in said[1], said
    assert said[0].endswith("a cell is 1 x 1") and re.search(r"a cell is \d+ x 128$", said[1]), said
    line = run(f"{TMP}/first", f"{TMP}/absent", status=1, env=here).stderr
    assert line.startswith("E_FS_MISSING: ") and line.count("\n") == 1, line


def in_python():
    program = block("python").replace('"DIR"', repr(f"{TMP}/tp2"))
    program += ("    assert w.shape == (64, 256) and w.dtype == 'float32' and q.shape == (512, 256)\n"
                "    assert codes.shape == (8, 192, 256) and not codes.flags.owndata and sorted(planes) == ['', '_scale_inv']\n"
                "    assert (abs(w) > 0).any() and codes[3, 0, 0] == r[next(iter(n for n in r if n.endswith('w13_weight')))][3, 0, 0]\n")
    run(sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": "loader/python", "PYTHONDONTWRITEBYTECODE": "1",
                                            "MINIMAX_LIBRARY": f"{BUILD}/lib/libminimax.so"})


shards()
in_c()
in_python()
print("the page's programs in C and Python ran on shards cut again from shards")
