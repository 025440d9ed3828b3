#!/usr/bin/env python3
"""Packed planes compared with those of torch, compressed-tensors and NVIDIA ModelOpt on the same tensors: how many scales and codes differ.

  peers_exact.py BUILD

BUILD/tests/interop/quant_codes packs for us. What is not installed (pip install torch compressed-tensors nvidia-modelopt ml_dtypes) is left
out and said so. A row adds up four matrices of 1024 x 2048: Gaussian and Student-t, each exact in bf16 and in f32. Where a rule of arithmetic
differs the row names it; the others must be byte-equal, or the exit status is 1."""
import os
import sys

os.environ.setdefault("BUILD", sys.argv[1])
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "interop"))

import ml_dtypes
import numpy as np
from quant_oracles import cells, pack

def matrices():
    rng = np.random.default_rng(11)
    for w in (rng.normal(0, 0.02, (1024, 2048)), 0.02 * rng.standard_t(5, (1024, 2048))):
        yield w.astype(ml_dtypes.bfloat16).astype("<f4")
        yield w.astype("<f4")


def count(name, ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs).reshape(np.asarray(ours).shape)
    return name, int((ours != theirs).sum()), ours.size


def nibbles(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def no_minus_zero(codes):  # its two codes are one number
    return np.where(codes == 8, 0, codes)


def with_torch(torch, w):
    t = torch.from_numpy(w)
    n, k = w.shape
    blocks = t.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).reshape(n, k)
    ours = pack("block_fp8", 0, w, ((n, k), "u1"), ((cells(n, 128), cells(k, 128)), "<f4"))
    yield "block_fp8", [count("codes", ours[0], codes.numpy()), count("scales", ours[1], scale.numpy())], ""


def with_compressed_tensors(torch, w):
    from compressed_tensors.compressors import pack_fp4_to_uint8, pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    t = torch.from_numpy(w)
    n, k = w.shape

    def run(x, args, group, global_scale=None, scale_dtype=None):
        g = x.reshape(n, k // group, group)
        scale, zero = calculate_qparams(g.amin(-1), g.amax(-1), args, global_scale=global_scale)
        if scale_dtype:
            scale = scale.to(scale_dtype).to(x.dtype)
        return scale, quantize(x, scale, zero, args, global_scale=global_scale)

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[128, 128])
    b = t.view(n // 128, 128, k // 128, 128)
    scale, zero = calculate_qparams(b.amin((1, 3)), b.amax((1, 3)), args)
    codes = quantize(t, scale, zero, args, dtype=torch.float8_e4m3fn).view(torch.uint8)
    ours = pack("block_fp8", 0, w, ((n, k), "u1"), ((n // 128, k // 128), "<f4"))
    yield "block_fp8", [count("codes", ours[0], codes.numpy()), count("scales", ours[1], scale.numpy())], ""

    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    scale, zero = calculate_qparams(t.amin(1, keepdim=True), t.amax(1, keepdim=True), args)
    codes = quantize(t, scale, zero, args, dtype=torch.float8_e4m3fn).view(torch.uint8)
    ours = pack("channel_fp8", 0, w, ((n, k), "u1"), ((n, 1), "<f4"))
    yield "channel_fp8", [count("codes", ours[0], codes.numpy()), count("scales", ours[1], scale.numpy())], ""

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
    scale, codes = run(t, args, 128, scale_dtype=torch.bfloat16)
    words = pack_to_int32(codes.to(torch.int8), 4).numpy().view("u1").reshape(n, k // 2)
    ours = pack("w4a16", 0, w, ((n, k // 2), "u1"), ((n, k // 128), "<u2"))
    yield ("w4a16", [count("codes", nibbles(ours[0]), nibbles(words)), count("scales", ours[1].astype("u4") << 16, scale.numpy().view("u4"))], "")
    half = t.to(torch.bfloat16)
    scale, codes = run(half, args, 128)
    yield ("w4a16", [count("codes", nibbles(pack("w4a16", 0, half.float().numpy(), ((n, k // 2), "u1"), ((n, k // 128), "<u2"))[0]),
                           codes.to(torch.int8).numpy() + 8)], "given bf16, it rounds w / s to bf16 before it rounds to an integer")

    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8)
    scale, codes = run(t, args, 32)
    from compressed_tensors.quantization.utils import maybe_convert_from_mx_exp
    exponent = scale if scale.dtype == torch.uint8 else (torch.log2(scale.float()) + 127).to(torch.uint8)
    if scale.dtype == torch.uint8:
        g = maybe_convert_from_mx_exp(args, scale)
        codes = quantize(t, g.to(t.dtype), torch.zeros_like(g, dtype=t.dtype), args)
    packed = pack_fp4_to_uint8(codes.to(torch.bfloat16)).numpy()
    ours = pack("mxfp4", 0, w, ((n, k // 2), "u1"), ((n, k // 32), "u1"))
    yield ("mxfp4", [count("codes", no_minus_zero(nibbles(ours[0])), no_minus_zero(nibbles(packed))), count("scales", ours[1], exponent.numpy())], "")

    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    top = generate_gparam(t.amin().reshape(1), t.amax().reshape(1))
    scale, codes = run(t, args, 16, global_scale=top)
    packed = pack_fp4_to_uint8(codes.to(torch.bfloat16)).numpy()
    ours = pack("nvfp4", 0, w, ((n, k // 2), "u1"), ((n, k // 16), "u1"), ((1,), "<f4"))
    yield ("nvfp4", [count("codes", no_minus_zero(nibbles(ours[0])), no_minus_zero(nibbles(packed))),
                     count("scales", ours[1], scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy())],
           "it multiplies by the reciprocal 2688 / amax; ours divides by amax / 2688, as ModelOpt")


def with_modelopt(torch, w):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    n, k = w.shape
    q, scale, scale2 = NVFP4QTensor.quantize(torch.from_numpy(w), 16)
    ours = pack("nvfp4", 0, w, ((n, k // 2), "u1"), ((n, k // 16), "u1"), ((1,), "<f4"))
    yield ("nvfp4", [count("codes", no_minus_zero(nibbles(ours[0])), no_minus_zero(nibbles(q._quantized_data.numpy()))),
                     count("scales", ours[1], scale.view(torch.uint8).numpy()), count("scale_2", ours[2], scale2.numpy())], "")


def main():
    try:
        import torch
    except ImportError:
        sys.exit("peers_exact.py: torch is not installed: nothing to compare with")
    failed = []
    print("| scheme | peer | codes and scales | rule that differs |\n|---|---|---|---|")
    for module, compare in (("torch", with_torch), ("compressed_tensors", with_compressed_tensors), ("modelopt", with_modelopt)):
        try:
            version = __import__(module).__version__
        except ImportError:
            print(f"| | {module} | not installed | |")
            continue
        total = {}  # (scheme, rule): {plane: [differ, of]}
        for w in matrices():
            for scheme, differ, rule in compare(torch, w):
                for plane, bad, size in differ:
                    one = total.setdefault((scheme, rule), {}).setdefault(plane, [0, 0])
                    one[0] += bad
                    one[1] += size
        for (scheme, rule), planes in total.items():
            bad = [f"{x} of {size} {plane} differ" for plane, (x, size) in planes.items() if x]
            if bad and not rule:
                failed.append(f"{scheme} {module}")
            of = ", ".join(f"{size} {plane}" for plane, (_, size) in planes.items())
            print(f"| {scheme} | {module} {version} | {'; '.join(bad) or 'equal: ' + of} | {rule} |", flush=True)
    print("\n".join(f"differs: {x}" for x in failed) or "all that must be equal is equal")
    return 1 if failed else 0


sys.exit(main())
