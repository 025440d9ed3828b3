"""A reader of unsharded checkpoints (--layout hf), written from the conventions of the engines that load them: json, byte offsets and
numpy, no code of the project. Which dialect a module is spelt in is read off the names, types and shapes of its tensors alone."""
import json
import os

import numpy as np
from packed import Part

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3_table():
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, (code & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0**(exponent - 10.0))
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


E4M3 = e4m3_table()
E8M0 = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan)).astype(np.float32)


def bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def nibbles(x):
    """The two codes of each byte, low first."""
    return np.stack([x & 15, x >> 4], -1).reshape(*x.shape[:-1], 2 * x.shape[-1])


def numbers(x, dtype):
    """Elements as Part.elements gives them, as f32."""
    if dtype == "F32":
        return x.view(np.float32)
    return {"BF16": bf16, "F8_E4M3": lambda c: E4M3[c], "U8": lambda c: E8M0[c]}[dtype](x)


class Unsharded:
    """tensor name -> (elements, dtype name); modules -> their tensors by suffix."""

    def __init__(self, path):
        self.path = path
        with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
            self.config = json.load(f)
        with open(os.path.join(path, "model.safetensors.index.json"), encoding="utf-8") as f:
            self.index = json.load(f)
        self.files = {name: Part(os.path.join(path, name)) for name in sorted(set(self.index["weight_map"].values()))}
        self.tensors = {name: (part.elements(name), part.tensors[name][0]) for part in self.files.values() for name in part.tensors}
        self.modules = {}
        for name, tensor in self.tensors.items():
            module, _, suffix = name.rpartition(".")
            self.modules.setdefault(module, {})[suffix] = tensor

    def quantised(self):
        return [m for m, t in self.modules.items() if "weight_scale" in t or "weight_scale_inv" in t]

    def weight(self, module):
        """The module's weights in f32, as its reader computes them: code · (scale · scale of the whole matrix)."""
        t = self.modules[module]
        if len(t) == 1:
            return numbers(*t["weight"])
        codes, dtype = t["weight_packed"] if "weight_packed" in t else t["weight"]
        if dtype == "F8_E4M3":
            value = E4M3[codes]
        elif dtype == "I8":
            value = codes.view(np.int8).astype(np.float32)
        elif dtype == "I32":  # value + 8, element i at bits 4 i
            value = (codes[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(codes.shape[0], -1).astype(np.float32) - 8
            assert t["weight_shape"][1] == "I64" and list(t["weight_shape"][0]) == list(value.shape), module
        else:
            assert dtype == "U8", (module, dtype)
            value = E2M1[nibbles(codes)]
        scale = numbers(*t["weight_scale_inv" if "weight_scale_inv" in t else "weight_scale"])
        if "weight_scale_2" in t:
            scale = scale * numbers(*t["weight_scale_2"])
        if "weight_global_scale" in t:
            scale = scale / numbers(*t["weight_global_scale"])
        return (value * spread(scale, value.shape)).astype(np.float32)


def spread(scale, shape):
    """One scale for each weight; blocks are 128 x 128, or what divides a row evenly."""
    rows, cols = shape
    if scale.size == 1:
        return scale.reshape(1, 1)
    assert scale.ndim == 2, scale.shape
    if scale.shape[0] == rows:
        assert cols % scale.shape[1] == 0, (scale.shape, shape)
        return np.repeat(scale, cols // scale.shape[1], 1)
    assert scale.shape == (-(-rows // 128), -(-cols // 128)), (scale.shape, shape)
    return np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :cols]
