#!/usr/bin/env python3
"""Every encoding of source weights against numbers computed in published.py: converted to f32 the weights are those numbers bit for bit, to
bf16 their rounding; `--quant none` keeps the stored bits or says that it cannot; another scheme gives the bytes that it gives for the same
numbers in f32. Experts by their own names and in stacks; matrices whose global scales differ."""
import filecmp
import json
import os
import subprocess
import sys

import numpy as np
from packed import Packed
from published import CASES, E2M1, E4M3, Checkpoint, from_bf16, from_e8m0, fuse_experts, modelopt, nvfp4, to_bf16

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
TMP = os.environ["TMPDIR"]
MODEL = Checkpoint("tests/data/tiny-m1")
EXPERTS = MODEL.config["num_local_experts"]
STACKS = (("w13_", "w2_"), ("gate_up_proj.", "down_proj."))


def convert(source, out, quant, status=0):
    p = subprocess.run([CONVERT, source, "-o", out, "--quant", quant, "--tp", "2", "--quiet"], capture_output=True, text=True)
    if p.returncode != status:
        sys.exit(f"{source} --quant {quant}: exit status {p.returncode}, expected {status}\n{p.stderr}")
    return p.stderr


def planes(pack):
    """(scheme, {expert's or matrix' weight name: [plane spread over its weights]}) of every linear."""
    for t in pack.manifest["tensors"]:
        parts = [list(pack.whole(t, plane)) for plane in t["planes"]]
        for i, (source, stack) in enumerate(parts[0]):
            for e in range(t["whole_lead"] or 1):
                yield source.replace("{e}", str(e)), t["scheme"], [p[i][1][e] for p in parts]


def nibbles(code):
    """Bytes spread over two columns each to the column's own nibble."""
    return np.where(np.arange(code.shape[1]) % 2, code >> 4, code & 15)


def decode(scheme, p):
    """What kept planes stand for."""
    if scheme in ("block_fp8", "channel_fp8", "tensor_wise_fp8"):
        return E4M3[p[0]] * p[1].view("f4")
    if scheme == "mxfp8":
        return E4M3[p[0]] * from_e8m0(p[1])
    if scheme == "int8":
        return p[0].view("i1").astype("f4") * p[1].view("f4")
    if scheme == "mxfp4":
        return E2M1[nibbles(p[0])] * from_e8m0(p[1])
    if scheme in ("nvfp4", "nvfp4a16"):
        return E2M1[nibbles(p[0])] * (E4M3[p[1]] * p[2].view("f4"))
    code = nibbles(p[0]).astype("i4")
    return ((code if scheme == "w4a16" else code ^ 8) - 8).astype("f4") * from_bf16(p[1])


def same(a, b):
    return a.view("u4") == b.view("u4")


def check_values(out, quant, values, what):
    count = 0
    for name, scheme, p in planes(Packed(out)):
        if name not in values:
            continue
        want = values[name]
        if quant == "bf16":
            equal = p[0] == to_bf16(want)
        elif quant == "f32":
            equal = same(p[0].view("f4"), want)
        elif "ct" in what and scheme.startswith("nvfp4"):  # the reciprocal of the global scale is rounded once
            equal = np.abs(decode(scheme, p) - want) <= 2.0**-22 * np.abs(want)
        else:
            equal = same(decode(scheme, p), want)
        if not equal.all():
            n, k = np.argwhere(~equal)[0]
            sys.exit(f"{what} --quant {quant}: {name}: {(~equal).sum()} of {equal.size} differ, first [{n}, {k}], expected {want[n, k]!r}")
        count += 1
    assert count == len(values), (what, quant, count, len(values))


def same_parts(a, b):
    files = sorted(f for f in os.listdir(a) if f.endswith(".safetensors"))
    tensors = lambda d: [(n, part.elements(n).tobytes()) for rank in Packed(d).parts for part in rank for n in sorted(part.tensors)]
    return files and tensors(a) == tensors(b)


def kept_scheme(keep, name):
    """Matrices of tensor-wise FP8 that share a packed tensor keep scales of their own."""
    several = any(x in name for x in ("q_proj", "k_proj", "v_proj", ".w1.", ".w3.")) and "qkv_proj" not in name
    return "channel_fp8" if keep == "tensor_wise_fp8" and several else keep


def check(what, tensors, values, config, keep):
    source = os.path.join(TMP, what)
    MODEL.write(source, tensors, config)
    for quant in ("f32", "bf16"):
        convert(source, f"{source}-{quant}", quant)
        check_values(f"{source}-{quant}", quant, values, what)
    if keep is None:
        assert "E_Q_KEEP" in convert(source, source + "-none", "none", 4)
    else:
        convert(source, source + "-none", "none")
        check_values(source + "-none", "none", values, what)
        for name, scheme, p in planes(Packed(source + "-none")):
            assert name not in values or scheme == kept_scheme(keep, name), (what, name, scheme)
    plain = os.path.join(TMP, what + "-plain")
    MODEL.write(plain, {**tensors_of(values), **{n: t for n, t in MODEL.plain().items() if n not in values}}, {})
    other = "mxfp4" if keep != "mxfp4" else "nvfp4a16"
    convert(source, source + "-other", other)
    convert(plain, plain + "-other", other)
    assert same_parts(source + "-other", plain + "-other"), f"{what} --quant {other}: not the bytes of the same numbers in f32"


def tensors_of(values):
    return {name: ("F32", v) for name, v in values.items()}


def check_case(name):
    encode, config, keep, stacks = CASES[name]
    tensors, values = MODEL.encoded(encode)
    check(name, tensors, values, config, keep)
    if not stacks:
        return 1
    for spelling in STACKS:
        check(f"{name}-{spelling[0][:-1]}", fuse_experts(tensors, EXPERTS, spelling), values, config, keep)
    return 1 + len(STACKS)


def check_global_scales():
    """w1 and w3 get the larger of their global scales: the other's numbers stay where the ratio is a power of two, else nearly."""
    for ratio, exact in ((2, True), (8, True), (1.37, False), (40, False)):
        tensors, values = MODEL.encoded(nvfp4("modelopt"), {".w3.": nvfp4("modelopt", top=np.float32(1 / ratio))})
        source = os.path.join(TMP, f"globals-{ratio}")
        MODEL.write(source, tensors, modelopt("NVFP4", group_size=16))
        convert(source, source + "-none", "none")
        for name, scheme, p in planes(Packed(source + "-none")):
            if name not in values:
                continue
            got, want = decode(scheme, p), values[name]
            error = np.sqrt(((got - want)**2).sum() / (want**2).sum())
            if exact or ".w3." not in name:
                assert same(got, want).all(), (ratio, name)
            else:
                assert 0 < error < 0.06, (ratio, name, error)


def check_finer_unsharded():
    """A grid finer than the scheme's is kept, but no dialect writes it."""
    source = os.path.join(TMP, "ct_int4_g32")
    p = subprocess.run([CONVERT, source, "-o", source + "-hf", "--layout", "hf", "--quiet"], capture_output=True, text=True)
    assert p.returncode == 4 and "E_DIALECT" in p.stderr and "1 x 32" in p.stderr, p.stderr


names = sys.argv[1:] or list(CASES)
count = sum(check_case(name) for name in names)
check_global_scales()
if "ct_int4_g32" in names:
    check_finer_unsharded()
print(f"{len(names)} encodings, {count} checkpoints: exact")
