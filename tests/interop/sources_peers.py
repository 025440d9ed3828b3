#!/usr/bin/env python3
"""Checkpoints quantised and written by the formats' own libraries (compressed-tensors, safetensors), read back: in f32 our numbers are those
of the library's own decompression, bit for bit. (engine_libraries.py has what it needs.)"""
import json
import os
import subprocess

from engine_libraries import need

need("torch", "compressed_tensors")

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from packed import Packed
from published import Checkpoint, awq, is_linear
from safetensors.torch import save_file

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
MODEL = Checkpoint("tests/data/tiny-m1")
INT = {"type": "int", "symmetric": True, "dynamic": False}
FLOAT = {"type": "float", "symmetric": True, "dynamic": False}
E8M0 = {"scale_dtype": torch.uint8}

SCHEMES = {
    "int4 g128": ("pack-quantized", dict(INT, num_bits=4, strategy="group", group_size=128), "BF16"),
    "int4 g32": ("pack-quantized", dict(INT, num_bits=4, strategy="group", group_size=32), "F32"),
    "int4 asymmetric": ("pack-quantized", dict(INT, num_bits=4, strategy="group", group_size=64, symmetric=False), "F32"),
    "int4 channel": ("pack-quantized", dict(INT, num_bits=4, strategy="channel"), "F32"),
    "int8 packed": ("pack-quantized", dict(INT, num_bits=8, strategy="group", group_size=64), "F32"),
    "int8 asymmetric": ("pack-quantized", dict(INT, num_bits=8, strategy="channel", symmetric=False), "F32"),
    "int8": ("int-quantized", dict(INT, num_bits=8, strategy="channel"), "F32"),
    "fp8 tensor": ("float-quantized", dict(FLOAT, num_bits=8, strategy="tensor"), "F32"),
    "fp8 channel": ("float-quantized", dict(FLOAT, num_bits=8, strategy="channel"), "BF16"),
    "fp8 block": ("float-quantized", dict(FLOAT, num_bits=8, strategy="block", block_structure=[128, 128]), "F32"),
    "nvfp4": ("nvfp4-pack-quantized", dict(FLOAT, num_bits=4, strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn), None),
    "mxfp4": ("mxfp4-pack-quantized", dict(FLOAT, num_bits=4, strategy="group", group_size=32, **E8M0), None),
    "mxfp8": ("mxfp8-quantized", dict(FLOAT, num_bits=8, strategy="group", group_size=32, **E8M0), None),
}


def ranges(w, args):
    """(least, largest) weights of each scale's share."""
    strategy = args.strategy
    if strategy == "tensor":
        return w.min().reshape(1), w.max().reshape(1)
    if strategy == "channel":
        return w.min(1, keepdim=True).values, w.max(1, keepdim=True).values
    if strategy == "block":
        n, k = args.block_structure
        b = w.reshape(w.shape[0] // n, n, w.shape[1] // k, k)
        return b.amin((1, 3)), b.amax((1, 3))
    g = w.reshape(w.shape[0], -1, args.group_size)
    return g.amin(2), g.amax(2)


def state(w, args, scale_dtype):
    """What the library's compressors start from."""
    out = {"weight": w}
    if args.strategy == "tensor_group":
        out["weight_global_scale"] = generate_gparam(w.min().reshape(1), w.max().reshape(1))
    scale, zero = calculate_qparams(*ranges(w, args), args, out.get("weight_global_scale"))
    out["weight_scale"] = scale.to(torch.bfloat16) if scale_dtype == "BF16" else scale
    if not args.symmetric:
        out["weight_zero_point"] = zero.to(torch.int8)
    return out


def decompressed(compressor, made, scheme):
    """The library's weights in f32; its own decompress rounds to the type of the scales, for FP4 always to bf16."""
    if "weight_packed" in made and made["weight_packed"].dtype == torch.uint8:
        rows, pairs = made["weight_packed"].shape
        scale = made["weight_scale"]
        scale = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
        return dequantize(unpack_fp4_from_uint8(made["weight_packed"], rows, 2 * pairs, dtype=torch.float32), scale.to(torch.float32),
                          args=scheme.weights, global_scale=made.get("weight_global_scale"), dtype=torch.float32)
    wide = {k: t.to(torch.float32) if t.dtype == torch.bfloat16 else t for k, t in made.items()}
    return compressor.decompress(wide, scheme)["weight"].to(torch.float32)


def build(path, fmt, args, scale_dtype):
    """Writes the checkpoint; returns the library's decompressed weights."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    tensors, values = {}, {}
    for name, w in MODEL.weights.items():
        w = torch.from_numpy(np.array(w))
        if not is_linear(name):
            tensors[name] = w
            continue
        made = compressor.compress(state(w, args, scale_dtype), scheme)
        for suffix, t in made.items():
            tensors[name[:-len("weight")] + suffix] = t.contiguous()
        values[name] = decompressed(compressor, made, scheme).numpy()
    os.makedirs(path)
    save_file(tensors, os.path.join(path, "model.safetensors"))
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=fmt, quantization_status="compressed")
    with open(os.path.join(path, "config.json"), "w") as f:
        json.dump({**MODEL.config, "quantization_config": json.loads(config.model_dump_json())}, f)
    return values


def check(what, source, values):
    """Our f32 weights of a checkpoint are these."""
    subprocess.run([CONVERT, source, "-o", source + "-f32", "--quant", "f32", "--quiet"], check=True)
    pack, count = Packed(source + "-f32"), 0
    for t in pack.manifest["tensors"]:
        for p, stack in pack.whole(t, t["planes"][0]):
            for e in range(t["whole_lead"] or 1):
                name = p.replace("{e}", str(e))
                if name not in values:
                    continue
                got, want = stack[e].view("f4"), values[name]
                if not (got.view("u4") == want.view("u4")).all():
                    n, k = np.argwhere(got.view("u4") != want.view("u4"))[0]
                    sys.exit(f"{what}: {name}[{n}, {k}]: found {got[n, k]!r}, expected {want[n, k]!r}")
                count += 1
    assert count == len(values), what
    print(f"{what}: {count} matrices equal")


def check_awq():
    """AWQ's words as compressed-tensors' converter reads them."""
    args = QuantizationArgs(**dict(INT, num_bits=4, strategy="group", group_size=64, symmetric=False))
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    tensors, _ = MODEL.encoded(awq(64))
    source = os.path.join(os.environ["TMPDIR"], "awq")
    MODEL.write(source, tensors, {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}})
    values, compressor = {}, BaseCompressor.get_value_from_registry("pack-quantized")
    for name in MODEL.weights:
        if is_linear(name):
            stem = name[:-len("weight")]
            raw = {stem + s: torch.from_numpy(tensors[stem + s][1]) for s in ("qweight", "qzeros")}
            raw[stem + "scales"] = torch.from_numpy(tensors[stem + "scales"][1].view("f2"))
            made = {k[len(stem):]: v for k, v in AutoAWQConverter(4, 64).process(raw).items()}
            made["weight_scale"] = made["weight_scale"].to(torch.float32)
            values[name] = decompressed(compressor, made, scheme).numpy()
    check("AWQ", source, values)


for name, (fmt, args, scale_dtype) in SCHEMES.items():
    source = os.path.join(os.environ["TMPDIR"], name.replace(" ", "-"))
    check(name, source, build(source, fmt, QuantizationArgs(**args), scale_dtype))
check_awq()
print(f"{len(SCHEMES)} schemes of compressed-tensors, and AWQ: exact")
