#!/usr/bin/env python3
"""What one conversion writes, another reads: for every spelling of --layout hf and every scheme after it, the second conversion gives a
checkpoint that minimax-verify passes. Without arguments a sample: the pairs whose
scales may be of either sign on both models, and of the others a third on one, another third with each ROUND; with --all every pair."""
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
SPELLINGS = [("block_fp8", "fp8"), ("tensor_wise_fp8", "fp8"), ("block_fp8", "ct"), ("channel_fp8", "ct"), ("tensor_wise_fp8", "ct"), ("int8", "ct"),
             ("w4a16", "ct"), ("nvfp4a16", "ct"), ("mxfp4", "ct"), ("mxfp8", "ct"), ("nvfp4a16", "modelopt")]
SCHEMES = ["none", "bf16", "f16", "f32", "block_fp8", "tensor_wise_fp8", "channel_fp8", "mxfp8", "int8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16",
           "w4afp8", "w4a8"]
ALL, ROUND = sys.argv[1:] == ["--all"], int(os.environ.get("ROUND", "0"))


def run(program, *args):
    return subprocess.run([os.path.join(BIN, program), *args], capture_output=True, text=True, check=False)


def first(model, scheme, dialect):
    """The unsharded checkpoint. 192 columns of tiny-m2's w2 are no whole groups of 128; tiny-m1's 128 are one group, a row's only scale."""
    out = os.path.join(TMP, f"{model}-{scheme}-{dialect}")
    shutil.rmtree(out, ignore_errors=True)
    options = ["--override", "*.w2.weight=bf16"] if (model, scheme) == ("tiny-m2", "w4a16") else []
    done = run("minimax-convert", f"tests/data/{model}", "-o", out, "--quiet", "--quant", scheme, "--layout", "hf", "--dialect", dialect, *options)
    assert done.returncode == 0, f"{model} {scheme} {dialect}: {done.stderr}"
    return out


def second(source, scheme):
    out = f"{source}-{scheme}"
    shutil.rmtree(out, ignore_errors=True)
    done = run("minimax-convert", source, "-o", out, "--quiet", "--quant", scheme)
    if done.returncode:
        return f"{os.path.basename(out)}: convert: {done.stderr.strip()}"
    done = run("minimax-verify", out)
    shutil.rmtree(out)
    return f"{os.path.basename(out)}: verify: {done.stderr.strip()}" if done.returncode else None


def main():
    pairs = []
    for model in ("tiny-m2", "tiny-m1"):
        for i, (scheme, dialect) in enumerate(SPELLINGS):
            signed = scheme == "w4a16"
            if ALL or signed or model == "tiny-m2":
                source = first(model, scheme, dialect)
                pairs += [(source, s) for j, s in enumerate(SCHEMES) if ALL or signed or (i + j + ROUND) % 3 == 0]
    with ThreadPoolExecutor(2) as pool:
        wrong = [x for x in pool.map(lambda p: second(*p), pairs) if x]
    assert not wrong, "\n".join(wrong)
    print(f"{len(pairs)} pairs of schemes: all verify")


main()
