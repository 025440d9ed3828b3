#!/usr/bin/env python3
"""Casts and packed planes against ml_dtypes and numpy, bit for bit.

Casts: one of 31 f32 patterns of each format, spread over all of them, and every pattern within 16 places of a rounding boundary;
with --all every one of the 2^32. Planes: scales by each format's own rule in f32, codes by ml_dtypes' cast of w/s."""
import os
import subprocess
import sys

import ml_dtypes
import numpy as np

CODES = os.path.join(os.environ["BUILD"], "tests", "interop", "quant_codes")
F32 = np.dtype("<f4")
CHUNK = 1 << 24
STRIDE = 1 if sys.argv[1:] == ["--all"] else 31
E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu


def plain_cast(dtype, largest=None):
    def cast(x):
        if largest:
            x = np.clip(x, -largest, largest)  # NaN stays
        return x.astype(dtype).view("u2" if dtype == ml_dtypes.bfloat16 else "u1")
    return cast


def nan_codes(dtype):
    """NaN codes are compared as NaN: which one a library picks is its own affair."""
    return (lambda c: np.isnan(c.view(dtype))) if dtype is not E2M1 else (lambda c: np.zeros(c.shape, bool))


CASTS = {"e4m3": (E4M3, plain_cast(E4M3, 448)), "e2m1": (E2M1, plain_cast(E2M1)), "bf16": (ml_dtypes.bfloat16, plain_cast(ml_dtypes.bfloat16))}


def ours(name, first, stride, count):
    out = subprocess.run([CODES, "cast", name, str(first), str(stride), str(count)], check=True, stdout=subprocess.PIPE).stdout
    return np.frombuffer(out, "<u2" if name == "bf16" else "u1")


def patterns(first, stride, count):
    return (first + stride * np.arange(count, dtype="u8")).astype("u4")


def compare(name, first, stride, count):
    u = patterns(first, stride, count)
    x, dtype, got = u.view(F32), CASTS[name][0], ours(name, first, stride, count)
    want = CASTS[name][1](x)
    is_nan = nan_codes(dtype)
    ok = (got == want) | (np.isnan(x) & is_nan(got) & is_nan(want))
    if dtype is E2M1:
        ok |= np.isnan(x)  # has no NaN: callers refuse it
    if not ok.all():
        i = int(np.argmin(ok))
        sys.exit(f"{name}: {(~ok).sum()} differ, first {u[i]:08x} ({x[i]!r}): found {got[i]:#x}")
    return count


def edges(name):
    """Where a cast changes: its finite values, halfway between them and beyond the largest; powers of two for the wide formats; infinities."""
    if name == "bf16":
        x = np.exp2(np.arange(-149, 128, dtype="f8")).astype("<f4")
    else:
        dtype = CASTS[name][0]
        x = np.arange(16 if dtype is E2M1 else 256, dtype="u1").view(dtype).astype("<f4")
        x = np.unique(x[np.isfinite(x)])
        x = np.concatenate([x, (x[1:] + x[:-1]) / 2, x[[0, -1]] * F32.type(1.5) - x[[1, -2]] * F32.type(0.5)])
    return np.concatenate([x, np.array([np.inf, -np.inf, -0.0], "<f4")])


def check_casts():
    total = 0
    for name in CASTS:
        tried = sum(compare(name, first * STRIDE, STRIDE, min(CHUNK, (1 << 32) // STRIDE - first)) for first in range(0, (1 << 32) // STRIDE, CHUNK))
        tried += sum(compare(name, (int(at.view("u4")) - 16) & 0xFFFFFFFF, 1, 33) for at in edges(name))
        print(f"f32 to {name}: {tried} patterns equal", flush=True)
        total += tried
    return total


# ---- planes ----

def pack(scheme, search, w, *planes):
    out = subprocess.run([CODES, "pack", scheme, str(search), *map(str, w.shape)], input=w.tobytes(), check=True, stdout=subprocess.PIPE).stdout
    parts = []
    for shape, dtype in planes:
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        parts.append(np.frombuffer(out[:n], dtype).reshape(shape))
        out = out[n:]
    assert not out
    return parts


def nibbles(codes):
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype("u1")


def groups(w, g):
    return np.abs(w).reshape(len(w), -1, g).max(2)


def spread(s, g):
    return np.repeat(s, g, 1)


def one_if_zero(s):
    return np.where(s == 0, F32.type(1), s)


def cells(n, c):
    return -(-n // c)


def block_amax(w):
    return np.array([[np.abs(w[i:i + 128, j:j + 128]).max() for j in range(0, w.shape[1], 128)] for i in range(0, w.shape[0], 128)], F32)


def expect_fp8(w, scheme):
    if scheme == "block_fp8":
        scale = one_if_zero(block_amax(w) / F32.type(448))
        s = np.repeat(np.repeat(scale, 128, 0)[:len(w)], 128, 1)[:, :w.shape[1]]
    elif scheme == "channel_fp8":
        scale = s = one_if_zero(np.abs(w).max(1, keepdims=True) / F32.type(448))
    else:
        scale = s = one_if_zero(np.abs(w).max(keepdims=True).reshape(1, 1) / F32.type(448))
    return (w / s).clip(-448, 448).astype(E4M3).view("u1"), scale


def expect_mx(w, scheme):
    mantissa, e = np.frexp(groups(w, 32))  # amax = mantissa · 2^e, mantissa in [0.5, 1)
    biased = e - 1 + 127 - 8 + (mantissa > 0.875) if scheme == "mxfp8" else e - 1 + 127 - 2 + (mantissa >= 0.875)
    biased = np.where(mantissa == 0, 127, biased).clip(0, 254).astype("u1")
    y = w / spread(biased.view(E8M0).astype("f4"), 32)
    if scheme == "mxfp8":
        return y.clip(-448, 448).astype(E4M3).view("u1"), biased
    return nibbles(y.clip(-6, 6).astype(E2M1).view("u1")), biased


def expect_nvfp4(w):
    s2 = np.abs(w).max() / F32.type(2688)
    amax = groups(w, 16)
    block = np.where(amax == 0, 1, (amax / (F32.type(6) * s2)).clip(2.0**-9, 448)).astype(F32).astype(E4M3)
    codes = (w / spread(block.astype("f4") * s2, 16)).clip(-6, 6).astype(E2M1).view("u1")
    return nibbles(codes), block.view("u1"), np.array([s2], F32)


def expect_int(w, scheme):
    if scheme == "w4a16":
        scale = (groups(w, 128) / F32.type(7.5)).astype(ml_dtypes.bfloat16)
        scale = np.where(scale == 0, ml_dtypes.bfloat16(1), scale)
        codes = np.rint(w / spread(scale.astype("f4"), 128)).clip(-8, 7).astype("i1") + 8
        return nibbles(codes.view("u1")), scale.view("u2")
    top = 127 if scheme == "int8" else 7
    scale = one_if_zero(np.abs(w).max(1, keepdims=True) / F32.type(top))
    codes = np.rint(w / scale).clip(-top, top).astype("i1")
    return (codes.view("u1") if top == 127 else nibbles(codes.view("u1") & 15)), scale


def same(what, got, want):
    for i, (g, e) in enumerate(zip(got, want, strict=True)):
        bad = g.view(f"u{g.itemsize}") != np.ascontiguousarray(e).view(f"u{e.itemsize}").reshape(g.shape)
        if bad.any():
            at = np.unravel_index(np.argmax(bad), bad.shape)
            sys.exit(f"{what}: plane {i} differs at {bad.sum()} of {bad.size} elements, first {at}: {g[at]} instead of {np.asarray(e).reshape(g.shape)[at]}")


def matrices():
    rng = np.random.default_rng(5)
    for n, k in ((384, 512), (130, 640), (7, 256)):
        for name, w in (("Gaussian", rng.normal(0, 0.02, (n, k))), ("Student-t", 0.02 * rng.standard_t(3, (n, k))),
                        ("FP8 grid", rng.integers(-240, 241, (n, k)) * 2.0**-13), ("rows of all sizes", rng.normal(0, 1, (n, k)) * 2.0**rng.integers(-40, 40, (n, 1)))):
            w = w.astype(F32)
            w[0, :128] = 0
            yield f"{n}x{k} {name}", w
            yield f"{n}x{k} {name} bf16", w.astype(ml_dtypes.bfloat16).astype("f4")


def check_planes():
    count = 0
    for name, w in matrices():
        n, k = w.shape
        for scheme, shape in (("block_fp8", (cells(n, 128), cells(k, 128))), ("channel_fp8", (n, 1)), ("tensor_wise_fp8", (1, 1))):
            same(f"{scheme} {name}", pack(scheme, 0, w, ((n, k), "u1"), (shape, "<f4")), expect_fp8(w, scheme))
        same(f"mxfp8 {name}", pack("mxfp8", 0, w, ((n, k), "u1"), ((n, k // 32), "u1")), expect_mx(w, "mxfp8"))
        same(f"mxfp4 {name}", pack("mxfp4", 0, w, ((n, k // 2), "u1"), ((n, k // 32), "u1")), expect_mx(w, "mxfp4"))
        same(f"nvfp4 {name}", pack("nvfp4", 0, w, ((n, k // 2), "u1"), ((n, k // 16), "u1"), ((1,), "<f4")), expect_nvfp4(w))
        same(f"w4a16 {name}", pack("w4a16", 0, w, ((n, k // 2), "u1"), ((n, k // 128), "<u2")), expect_int(w, "w4a16"))
        same(f"int8 {name}", pack("int8", 0, w, ((n, k), "u1"), ((n, 1), "<f4")), expect_int(w, "int8"))
        same(f"w4a8 {name}", pack("w4a8", 0, w, ((n, k // 2), "u1"), ((n, 1), "<f4")), expect_int(w, "w4a8"))
        count += 9
    return count


if __name__ == "__main__":
    np.seterr(all="ignore")  # NaN and overflow are tried on purpose
    planes = check_planes()
    print(f"{check_casts()} casts to {len(CASTS)} formats and {planes} packed matrices equal")
