#!/usr/bin/env python3
"""Cutting commutes with packing: for each small checkpoint, one with experts of 1536 rows as MiniMax-M2's (192 of them for a rank of eight),
each scheme and way to divide it over ranks, the shards put back together from part files and manifest alone equal the tp 1 shard bit for
bit, scales compared weight by weight through their cells."""
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

sys.path.insert(0, "tests/cli")
from convert_files import small  # noqa: E402
from packed import Packed  # noqa: E402

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
M3 = "tests/data/tiny-m3-random"
MODELS = ["tests/data/tiny-m1", "tests/data/tiny-m2", M3, os.path.join(os.environ["TMPDIR"], "m2-1536")]
CUTS = ["--tp 2", "--tp 4", "--tp 8", "--tp 8 --tp-align pad", "--tp 4 --ep 2", "--tp 8 --ep 4 --pp 2"]
M3_CUTS = ["--tp 8", "--tp 8 --tp-align pad", "--tp 4 --ep 2 --pp 3"]
with open("quant/registry.c", encoding="utf-8") as f:
    ALIKE = {"w4a16_zero_bf16", "w8a16_f16", "w8a16_zero_bf16"}  # planes of the types and cells of others
    SCHEMES = [s for s in ["none"] + re.findall(r"ROW\((\w+)\)", f.read()) if s not in ALIKE]


def convert(model, quant, cut):
    out = os.path.join(os.environ["TMPDIR"], f"{os.path.basename(model)}-{quant}{cut.replace(' ', '')}")
    subprocess.run([CONVERT, model, "-o", out, "--quant", quant, "--quiet", *cut.split()], check=True)
    packed = Packed(out)
    shutil.rmtree(out)
    return packed


def whole_of(one, tensor, plane):
    """The uncut checkpoint is put together once for all cuts."""
    known = one.__dict__.setdefault("known", {})
    key = tensor["name"], plane["suffix"]
    if key not in known:
        known[key] = list(one.whole(tensor, plane))
    return known[key]


def differences(one, many):
    """Names of planes whose pieces differ; also tensors, schemes or planes that are not the same."""
    found = []
    first, second = one.manifest["tensors"], many.manifest["tensors"]
    if [(t["name"], t["scheme"]) for t in first] != [(t["name"], t["scheme"]) for t in second]:
        return ["the tensors or their schemes"]
    for a, b in zip(first, second):
        assert len(a["planes"]) == len(b["planes"])
        for plane_a, plane_b in zip(a["planes"], b["planes"]):
            assert (plane_a["suffix"], plane_a["dtype"]) == (plane_b["suffix"], plane_b["dtype"])
            for (source_a, x), (source_b, y) in zip(whole_of(one, a, plane_a), many.whole(b, plane_b), strict=True):
                if source_a != source_b or x.shape != y.shape or not (x == y).all():
                    found.append(f"{source_a}: plane \"{plane_a['suffix']}\"")
    return found


def finds_one_wrong_bit(one, many):
    """Damages the last byte of the last rank in memory: an element of its own, or a replica that no longer agrees."""
    part = many.parts[-1][-1]
    part.bytes = part.bytes[:-1] + bytes([part.bytes[-1] ^ 1])
    try:
        return bool(differences(one, many))
    except AssertionError:
        return True


def check(model, quant):
    """One model and scheme: what was found wrong, or nothing."""
    one = convert(model, quant, "--tp 1")
    for cut in M3_CUTS if model == M3 else CUTS:
        if quant.startswith("w4a16") and "pad" in cut:
            continue  # refused: its zero byte is not a zero weight
        many = convert(model, quant, cut)
        found = differences(one, many)
        if found:
            return f"{model} {quant} {cut}: differs from tp 1: {found}"
    return "" if finds_one_wrong_bit(one, many) else f"{model} {quant}: one wrong bit was not found"


if __name__ == "__main__":
    small(hidden=128, heads=8, kv=8, dim=16, experts=4, inter=1536, vocab=64, layers=2).save(MODELS[-1])
    with ProcessPoolExecutor() as pool:
        cases = [(model, quant) for model in MODELS for quant in SCHEMES]
        wrong = [line for line in pool.map(check, *zip(*cases)) if line]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(cases)} models and schemes, each cut in {len(CUTS)} ways (MiniMax-M3: {len(M3_CUTS)}), equal tp 1 bit for bit")
