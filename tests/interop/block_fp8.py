#!/usr/bin/env python3
"""block_fp8 against numbers computed here: codes and scales of an FP8 source are its own bytes at every tp; of a BF16 source the scale of
each 128 x 128 block is amax/448 in f32 and the code the E4M3 value nearest to w/scale, ties to the even code."""
import os
import subprocess
import sys

import numpy as np
from packed import Packed, Part

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")

# The 127 finite magnitudes of E4M3 by code: sign, 4 exponent bits of bias 7, 3 mantissa bits.
MAGNITUDE = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0**(e - 10) for e in range(16) for m in range(8)][:127])


def nearest_e4m3(x):
    """Codes of f64 values within ±448."""
    a = np.abs(x)
    high = np.clip(np.searchsorted(MAGNITUDE, a), 1, 126)
    low = high - 1
    to_low, to_high = a - MAGNITUDE[low], MAGNITUDE[high] - a
    code = np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype("u1")


def blocks(w):
    """(scale of each block spread over its weights, codes) of a matrix of f32."""
    scale = np.empty_like(w)
    for i in range(0, w.shape[0], 128):
        for j in range(0, w.shape[1], 128):
            amax = np.abs(w[i:i + 128, j:j + 128]).max()
            scale[i:i + 128, j:j + 128] = amax / np.float32(448) if amax else 1
    return scale, nearest_e4m3((w / scale).astype("f8"))  # the quotient is rounded to f32 first


def expected(parts, name):
    """(codes, scales per weight) of a source matrix, or None if it is kept as it is."""
    part = next(p for p in parts if name in p.tensors)
    dtype, elements = part.tensors[name][0], part.elements(name)
    if dtype == "F8_E4M3":
        scale = next(p for p in parts if name + "_scale_inv" in p.tensors).elements(name + "_scale_inv").view("<f4")
        return elements, np.repeat(np.repeat(scale, 128, 0)[:len(elements)], 128, 1)[:, :elements.shape[1]]
    linear = elements.ndim == 2 and ("_proj" in name or "output_gate" in name or ".experts." in name)
    if not linear:
        return None
    scale, codes = blocks((elements.astype("u4") << 16).view("<f4"))
    return codes, scale


def check(model, tp):
    out, source = os.path.join(os.environ["TMPDIR"], f"{model}-{tp}"), f"tests/data/{model}"
    subprocess.run([CONVERT, source, "-o", out, "--quant", "block_fp8", "--tp", str(tp), "--quiet"], check=True)
    pack = Packed(out)
    parts = [Part(os.path.join(source, f)) for f in sorted(os.listdir(source)) if f.startswith("model-")]
    count = 0
    for t in pack.manifest["tensors"]:
        got = [list(pack.whole(t, plane)) for plane in t["planes"]]
        for p, (source_name, codes) in enumerate(got[0]):
            for e in range(t["whole_lead"] or 1):
                name = source_name.replace("{e}", str(e))
                want = expected(parts, name)
                if want is None:
                    assert t["scheme"] != "block_fp8", name
                    continue
                assert t["scheme"] == "block_fp8", name
                scales = got[1][p][1][e].view("<f4")
                if not (codes[e] == want[0]).all() or not (scales == want[1]).all():
                    sys.exit(f"{model} tp {tp}: {name}: {(codes[e] != want[0]).sum()} codes and {(scales != want[1]).sum()} scales differ")
                count += 1
    print(f"{model} tp {tp}: {count} matrices equal, codes and scales")


for tp in (1, 2, 4, 8):
    check("tiny-m2", tp)
check("tiny-m1", 1)
print("block_fp8 codes and scales are exact")
