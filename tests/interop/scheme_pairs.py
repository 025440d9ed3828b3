#!/usr/bin/env python3
"""What one conversion writes, another reads: for every spelling of --layout hf and every scheme after it, the second conversion gives a
checkpoint that minimax-verify passes. Without arguments a sample: the pairs whose
scales may be of either sign on both models, and of the others a third on one, another third with each ROUND; with --all every pair.
Scales without zero points become scales with zero points of 0 bit for bit."""
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from decoded import decode, planes
from packed import Packed
from published import CASES, Checkpoint

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


def packed(source, out, *options):
    """{name of a linear: its numbers} of the packed checkpoint that is made, and its schemes."""
    shutil.rmtree(out, ignore_errors=True)
    done = run("minimax-convert", source, "-o", out, "--quiet", *options)
    assert done.returncode == 0, f"{out}: {done.stderr}"
    done = run("minimax-verify", out, "--source", source)
    assert done.returncode == 0, f"{out}: {done.stderr}"
    linears = [(name, scheme, p) for name, scheme, p in planes(Packed(out)) if len(p) > 1]
    return {name: decode(scheme, p) for name, scheme, p in linears}, {scheme for _, scheme, _ in linears}


def check_zeros(source, scheme, zeros):
    """Scales of F16 and BF16 under a scheme with zero points: the same numbers, of a packed source and of another tool's."""
    before, schemes = packed(source, source + "-0", "--tp", "2", "--quant", scheme)
    after, with_zeros = packed(source + "-0" if scheme != "none" else source, source + "-1", "--quant", zeros)
    assert with_zeros == {zeros} != schemes, (scheme, zeros, schemes, with_zeros)
    for name, w in before.items():
        assert (w.view("u4") == after[name].view("u4")).all(), (scheme, zeros, name)


def check_all_zeros():
    here = os.path.join(TMP, "tiny-m1")
    shutil.copytree("tests/data/tiny-m1", here, dirs_exist_ok=True)
    kinds = [("w4a16", "w4a16_zero_bf16"), ("w4afp8", "w4a16_zero_bf16"), ("w4a16_f16", "w4a16_zero"), ("w8a16_f16", "w8a16_zero")]
    for scheme, zeros in kinds:
        check_zeros(here, scheme, zeros)
    model = Checkpoint(here)
    for case, zeros in ("int8", "w8a16_zero_bf16"), ("ct_int4_g32", "w4a16_zero_bf16"):
        encode, config = CASES[case][:2]
        model.write(os.path.join(TMP, case), model.encoded(encode)[0], config)
        check_zeros(os.path.join(TMP, case), "none", zeros)
    return len(kinds) + 2


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
    print(f"{len(pairs)} pairs of schemes: all verify; {check_all_zeros()} took zero points without a change")


main()
