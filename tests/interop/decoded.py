"""Packed weights as numbers: what the planes of every scheme stand for, from formats/FORMAT.md."""
import numpy as np
from published import E2M1, E4M3, from_bf16, from_e8m0


GROUPED = ("w4a16_f16", "w4a16_zero", "w4a16_zero_bf16", "w8a16_f16", "w8a16_zero", "w8a16_zero_bf16")


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
    if scheme in GROUPED:
        code = p[0].view("i1").astype("i4") if scheme.startswith("w8") else nibbles(p[0]).astype("i4") - 8
        if scheme.endswith("_f16"):
            return code.astype("f4") * p[1].view("f2").astype("f4")
        word = p[1].view("u4")
        return (code - (word & 255).astype("u1").view("i1")).astype("f4") * (word & 0xffffe000).astype("u4").view("f4")
    code = nibbles(p[0]).astype("i4")
    return ((code if scheme == "w4a16" else code ^ 8) - 8).astype("f4") * from_bf16(p[1])
