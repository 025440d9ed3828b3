"""Quantised weights as other tools publish them, and the numbers they stand for: numpy and the formats' own definitions, no code of the
project. Quantisation here is the plainest there is; what matters is that every encoding holds the numbers that its reference says.

An encoding is a function of a matrix [N, K] of f32 that returns its tensors {suffix: (dtype, array, axis of the rows or None)} and the
f32 matrix that they stand for. Arrays hold raw elements: BF16 as uint16, FP8 and packed codes as uint8."""
import json
import os
import re
import struct

import numpy as np

f32 = np.float32
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0**(e - 10) for e in range(16) for m in range(8)][:127] + [np.nan], f32)
E4M3 = np.concatenate([E4M3, -E4M3])
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], f32)
AWQ_COLUMN = [0, 2, 4, 6, 1, 3, 5, 7]  # of nibble i


def nearest(x, magnitude):
    """Codes of the values of a sign-magnitude table (any of the nearest: nothing here depends on ties)."""
    a = np.minimum(np.abs(x), magnitude[-1])
    high = np.clip(np.searchsorted(magnitude, a), 1, len(magnitude) - 1)
    code = np.where(a - magnitude[high - 1] < magnitude[high] - a, high - 1, high)
    return (code + np.signbit(x) * (len(magnitude) + (len(magnitude) == 127))).astype("u1")


def to_e4m3(x):
    return nearest(x, E4M3[:127])


def to_e2m1(x):
    return nearest(x, E2M1[:8])


def to_bf16(x):
    u = np.asarray(x, f32).view("u4")
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype("u2")


def from_bf16(h):
    return (h.astype("u4") << 16).view(f32)


def to_e8m0(x):
    return (np.ceil(np.log2(x)) + 127).astype("u1")


def from_e8m0(e):
    return np.ldexp(f32(1), e.astype("i4") - 127).astype(f32)


def stored(x, dtype):
    """(raw elements, their values in f32) of positive numbers in a type of scales."""
    if dtype == "BF16":
        raw = to_bf16(x)
        return raw, from_bf16(raw)
    if dtype == "F16":
        raw = x.astype("f2")
        return raw.view("u2"), raw.astype(f32)
    if dtype in ("F8_E8M0", "U8"):
        raw = to_e8m0(x)
        return raw, from_e8m0(raw)
    return x.astype(f32), x.astype(f32)


def amax(w, n, k):
    """Largest magnitude of each n x k block (0: all), at least something."""
    n, k = n or w.shape[0], k or w.shape[1]
    rows, cols = -(-w.shape[0] // n), -(-w.shape[1] // k)
    padded = np.zeros((rows * n, cols * k), f32)
    padded[:w.shape[0], :w.shape[1]] = np.abs(w)
    return np.maximum(padded.reshape(rows, n, cols, k).max((1, 3)), f32(1e-6))


def spread(s, w, n, k):
    """One scale per weight."""
    n, k = n or w.shape[0], k or w.shape[1]
    return s[np.arange(w.shape[0])[:, None] // n, np.arange(w.shape[1])[None, :] // k]


def pairs(code, axis):
    """Two nibbles to a byte along an axis, the even one low."""
    code = code & 15
    low, high = (code[:, 0::2], code[:, 1::2]) if axis else (code[0::2], code[1::2])
    return (low | high << 4).astype("u1")


def words(u, bits, axis, order=None):
    """Unsigned numbers to int32 words along an axis; nibble i of a word is column order[i]."""
    u = u.T if axis == 0 else u
    per = 32 // bits
    u = np.concatenate([u, np.zeros((u.shape[0], -u.shape[1] % per), u.dtype)], 1)
    u = u.reshape(u.shape[0], -1, per).astype("u4")
    w = np.zeros(u.shape[:2], "u4")
    for i in range(per):
        w |= u[:, :, order[i] if order else i] << np.uint32(bits * i)
    return np.ascontiguousarray((w.T if axis == 0 else w).view("i4"))


# ---- FP8

def fp8(suffix, dtype, n, k, shape=lambda s: s, extra=None):
    def encode(w, rng):
        raw, s = stored(amax(w, n, k) / f32(448), dtype)
        each = spread(s, w, n, k)
        code = to_e4m3(w / each)
        tensors = {"weight": ("F8_E4M3", code, 0), suffix: (dtype, shape(raw), None if n == 0 else 0)}
        if extra:
            tensors[extra] = ("F32", np.array(rng.uniform(0.01, 0.1), f32), None)
        return tensors, E4M3[code] * each
    return encode


def int8(smooth):
    def encode(w, rng):
        pre = rng.uniform(0.5, 2, w.shape[1]).astype(f32)
        v = w / pre if smooth else w
        raw, s = stored(amax(v, 1, 0) / f32(127.5), "BF16")
        code = np.clip(np.rint(v / s), -128, 127).astype("i1")
        tensors = {"weight": ("I8", code, 0), "weight_scale": ("BF16", raw, 0)}
        value = code.astype(f32) * s
        if smooth:
            tensors["pre_quant_scale"] = ("F32", pre, None)
            value = value * pre
        return tensors, value
    return encode


# ---- FP4

def nvfp4(dialect, smooth=False, inputs=True, top=f32(1)):
    """All matrices under one global scale (top: what it takes for the largest magnitude), as those that are multiplied together must be."""
    def encode(w, rng):
        pre = stored(rng.uniform(0.5, 2, w.shape[1]), "BF16")
        v = w / pre[1] if smooth else w
        names = {"modelopt": ("weight", "weight_scale_2", "input_scale"), "ct": ("weight_packed", "weight_global_scale", "input_global_scale")}
        codes_name, global_name, input_name = names[dialect]
        number = f32(2688) / top if dialect == "ct" else top / f32(2688)
        under = number if dialect == "ct" else f32(1) / number
        block = np.maximum(to_e4m3(amax(v, 1, 16) / f32(6) * under), 1)
        s = E4M3[block] / number if dialect == "ct" else E4M3[block] * number
        each = spread(s, v, 1, 16)
        code = to_e2m1(v / each)
        tensors = {codes_name: ("U8", pairs(code, 1), 0), "weight_scale": ("F8_E4M3", block, 0),
                   global_name: ("F32", np.array([number]) if dialect == "ct" else np.array(number), None)}
        value = E2M1[code] * each
        if inputs:
            tensors[input_name] = ("F32", np.array([rng.uniform(1, 2)], f32), None)
        if smooth:
            tensors["pre_quant_scale"] = ("BF16", pre[0], None)
            value = value * pre[1]
        return tensors, value
    return encode


def mxfp4(name, dtype="U8", scale_dtype="U8"):
    def encode(w, rng):
        raw, s = stored(amax(w, 1, 32) / f32(6), scale_dtype)
        each = spread(s, w, 1, 32)
        code = to_e2m1(w / each)
        return {name: (dtype, pairs(code, 1), 0), "weight_scale": (scale_dtype, raw, 0)}, E2M1[code] * each
    return encode


# ---- integers

def groups(w, g, bits, symmetric, negative=False):
    """(codes u, scales, zeros) with w ≈ (u - z) · s; symmetric: z in the middle."""
    g = g or w.shape[1]
    v = w.reshape(w.shape[0], -1, g)
    top, half = 2**bits - 1, 2**(bits - 1)
    if symmetric:
        s = np.maximum(np.abs(v).max(2), 1e-6) / (half - 0.5)
        s = np.where(np.arange(s.size).reshape(s.shape) % 3 == 0, -s, s) if negative else s
        z = np.full(s.shape, half)
    else:
        low, high = np.minimum(v.min(2), 0), np.maximum(v.max(2), 0)
        low[0] = 0  # zero points of 0 borrow from their neighbours in GPTQ's words
        s = np.maximum(high - low, 1e-5) / top
        z = np.clip(-np.rint(low / s), 0, top)
    return s.astype(f32), z.astype("u1"), lambda s: np.clip(np.rint(v / s[:, :, None]) + z[:, :, None], 0, top).astype("u1").reshape(w.shape)


def column_order(k, g, act_order, rng):
    """Group of each column: in order, or g columns of each anywhere."""
    return rng.permutation(np.arange(k) // g) if act_order else np.arange(k) // g


def grouped(w, g, bits, symmetric, dtype, act_order, rng, negative=False):
    """(u, raw scales, zeros, column order, values); with act_order, group i takes the columns that the order gives it."""
    order = column_order(w.shape[1], g or w.shape[1], act_order, rng)
    by_group = np.argsort(order, kind="stable")
    s, z, code = groups(w[:, by_group], g, bits, symmetric, negative)
    if dtype in ("BF16", "F16"):
        sign = np.sign(s)
        raw, s = stored(np.abs(s), dtype)
        raw, s = raw | np.where(sign < 0, 0x8000, 0).astype("u2"), s * sign.astype(f32)
    else:
        raw = s
    u = np.empty(w.shape, "u1")
    u[:, by_group] = code(s)
    return u, raw, z, order, (u.astype("i4") - z[:, order]).astype(f32) * s[:, order]


def ct_packed(bits, g, dtype="BF16", symmetric=True, act_order=False):
    def encode(w, rng):
        u, raw, z, order, value = grouped(w, g, bits, symmetric, dtype, act_order, rng, negative=symmetric and not act_order)
        tensors = {"weight_packed": ("I32", words(u, bits, 1), 0), "weight_scale": (dtype, raw, 0),
                   "weight_shape": ("I64", np.array(w.shape, "i8"), None)}
        if not symmetric:
            tensors["weight_zero_point"] = ("I32", words(z, bits, 0), 0)
        if act_order:
            tensors["weight_g_idx"] = ("I32", order.astype("i4"), None)
        return tensors, value
    return encode


def gptq(bits, g, version, symmetric=True, act_order=False):
    def encode(w, rng):
        u, raw, z, order, value = grouped(w, g, bits, symmetric, "F16", act_order, rng)
        zeros = words(z, bits, 0).view("u4") - np.uint32((2**32 - 1) // (2**bits - 1) if version == 1 else 0)
        return {"qweight": ("I32", np.ascontiguousarray(words(u, bits, 1).T), 1), "scales": ("F16", np.ascontiguousarray(raw.T), 1),
                "qzeros": ("I32", np.ascontiguousarray(zeros.view("i4").T), 1), "g_idx": ("I32", order.astype("i4"), None)}, value
    return encode


def awq(g):
    def encode(w, rng):
        u, raw, z, _, value = grouped(w, g, 4, False, "F16", False, rng)
        return {"qweight": ("I32", np.ascontiguousarray(words(u, 4, 0, AWQ_COLUMN).T), 1), "scales": ("F16", np.ascontiguousarray(raw.T), 1),
                "qzeros": ("I32", np.ascontiguousarray(words(z, 4, 0, AWQ_COLUMN).T), 1)}, value
    return encode


def sglang_w4afp8(dtype):
    def encode(w, rng):
        u, raw, _, _, value = grouped(w, 128, 4, True, dtype, False, rng, negative=True)
        return {"weight": ("I8", pairs(u ^ 8, 1), 0), "weight_scale_inv": (dtype, raw, 0),
                "input_scale": ("BF16", to_bf16(np.array([0.5], f32)), None)}, value
    return encode


def modelopt_int4(g, w4a8):
    def encode(w, rng):
        pre = rng.uniform(0.5, 2, w.shape[1]).astype(f32)
        u, raw, _, _, value = grouped(w / pre, g, 4, True, "F32", False, rng)
        tensors = {"weight": ("U8", pairs(u ^ 8, 0), 0), "weight_scale": ("F32", raw, 0), "pre_quant_scale": ("F32", pre, None)}
        if w4a8:
            tensors["weight_scale_2"] = ("F32", np.array(0.25, f32), None)
            tensors["input_scale"] = ("F32", np.array(0.5, f32), None)
        return tensors, value * pre
    return encode


def ct_config(fmt, weights):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed",
                                    "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None}}


def ct_int(bits, g, symmetric=True, act_order=False):
    return ct_config("pack-quantized", {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if g else "channel",
                                        "group_size": g or None, "dynamic": False, "actorder": "group" if act_order else None})


def ct_float(fmt, bits, strategy, **more):
    return ct_config(fmt, {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more})


def method(name, **more):
    return {"quantization_config": {"quant_method": name, **more}}


def modelopt(algo, **more):
    return {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo, "kv_cache_quant_algo": None, **more}}}


def gptq_config(bits, g, **more):
    return method("gptq", bits=bits, group_size=g, desc_act=False, **more)


# name: (encode, configuration, what `--quant none` stores it as (None: refused), whether stacks of experts are published)
CASES = {
    "block_fp8": (fp8("weight_scale_inv", "F32", 128, 128), method("fp8", weight_block_size=[128, 128]), "block_fp8", True),
    "block_fp8_ue8m0": (fp8("weight_scale_inv", "F8_E8M0", 128, 128), method("fp8", weight_block_size=[128, 128]), "block_fp8", True),
    "block_fp8_256": (fp8("weight_scale_inv", "BF16", 256, 128), method("fp8", weight_block_size=[256, 128]), "block_fp8", False),
    "block_fp8_64": (fp8("weight_scale_inv", "F32", 64, 32), method("fp8", weight_block_size=[64, 32]), "block_fp8", False),
    "ct_block_fp8": (fp8("weight_scale", "BF16", 128, 128), ct_float("float-quantized", 8, "block", block_structure=[128, 128]), "block_fp8", True),
    "modelopt_pb_wo": (fp8("weight_scale", "F32", 128, 128, lambda s: s[:, None, :, None]), modelopt("FP8_PB_WO"), "block_fp8", False),
    "tensor_fp8": (fp8("weight_scale", "F32", 0, 0, lambda s: s[0, 0], "input_scale"), method("fp8", activation_scheme="static"),
                   "tensor_wise_fp8", True),
    "tensor_fp8_1": (fp8("weight_scale", "BF16", 0, 0, lambda s: s[0]), modelopt("FP8"), "tensor_wise_fp8", False),
    "channel_fp8": (fp8("weight_scale", "BF16", 1, 0), ct_float("float-quantized", 8, "channel"), "channel_fp8", True),
    "channel_fp8_flat": (fp8("weight_scale", "F32", 1, 0, lambda s: s[:, 0]), modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "channel_fp8", True),
    "mxfp8": (fp8("weight_scale", "U8", 1, 32), ct_float("mxfp8-quantized", 8, "group", group_size=32), "mxfp8", True),
    "mxfp8_inv": (fp8("weight_scale_inv", "F8_E8M0", 1, 32), method("mxfp8", ignored_layers=["lm_head"]), "mxfp8", True),
    "nvfp4_modelopt": (nvfp4("modelopt"), modelopt("NVFP4", group_size=16), "nvfp4", True),
    "nvfp4_modelopt_a16": (nvfp4("modelopt", inputs=False), method("modelopt", quant_algo="W4A16_NVFP4"), "nvfp4a16", False),
    "nvfp4_ct": (nvfp4("ct"), ct_float("nvfp4-pack-quantized", 4, "tensor_group", group_size=16), "nvfp4", True),
    "nvfp4_awq": (nvfp4("modelopt", smooth=True), modelopt("NVFP4_AWQ", group_size=16), None, False),
    "mxfp4_ct": (mxfp4("weight_packed"), ct_float("mxfp4-pack-quantized", 4, "group", group_size=32), "mxfp4", True),
    "mxfp4_quark": (mxfp4("weight"), method("quark"), "mxfp4", True),
    "mxfp4_f4": (mxfp4("weight", "F4", "F8_E8M0"), method("mxfp4"), "mxfp4", True),
    "ct_int4_g128": (ct_packed(4, 128), ct_int(4, 128), "w4a16", True),
    "ct_int4_g32": (ct_packed(4, 32), ct_int(4, 32), "w4a16", True),
    "ct_int4_f16": (ct_packed(4, 64, "F16"), ct_int(4, 64), "w4a16_f16", False),
    "ct_int4_channel": (ct_packed(4, 0), ct_int(4, 0), "w4a16", False),
    "ct_int4_asym": (ct_packed(4, 32, symmetric=False), ct_int(4, 32, symmetric=False), "w4a16_zero_bf16", True),
    "ct_int4_actorder": (ct_packed(4, 32, act_order=True), ct_int(4, 32, act_order=True), None, False),
    "ct_int4_asym_actorder": (ct_packed(4, 64, "F32", False, True), ct_int(4, 64, False, True), None, False),
    "ct_int8": (ct_packed(8, 0), ct_int(8, 0), "int8", True),
    "ct_int8_g64": (ct_packed(8, 64), ct_int(8, 64), "int8", False),
    "ct_int8_asym": (ct_packed(8, 64, symmetric=False), ct_int(8, 64, symmetric=False), "w8a16_zero_bf16", False),
    "int8": (int8(False), ct_config("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}), "int8", True),
    "int8_smoothquant": (int8(True), modelopt("W8A8_SQ_PER_CHANNEL"), None, False),
    "awq": (awq(128), method("awq", bits=4, group_size=128, zero_point=True, version="gemm"), "w4a16_zero", True),
    "awq_g32": (awq(32), {"quant_config.json": {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}}, "w4a16_zero", True),
    "gptq_v1": (gptq(4, 128, 1), gptq_config(4, 128, sym=True, checkpoint_format="gptq"), "w4a16_f16", True),
    "gptq_v1_asym": (gptq(4, 64, 1, symmetric=False), {"quantize_config.json": {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}},
                     "w4a16_zero", False),
    "gptq_v2": (gptq(4, 32, 2, symmetric=False), gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"), "w4a16_zero", True),
    "gptq_v2_sym": (gptq(4, 32, 2), method("gptq_v2", bits=4, group_size=32, sym=True), "w4a16_f16", False),
    "gptq_desc_act": (gptq(4, 64, 1, symmetric=False, act_order=True), method("gptq", bits=4, group_size=64, desc_act=True, sym=False), None, False),
    "gptq_whole": (gptq(4, 0, 1), gptq_config(4, -1, sym=True), "w4a16_f16", False),
    "gptq_8bit_asym": (gptq(8, 32, 1, symmetric=False), gptq_config(8, 32, sym=False), "w8a16_zero", False),
    "gptq_8bit": (gptq(8, 64, 1), gptq_config(8, 64, sym=True), "w8a16_f16", False),
    "auto_round": (gptq(4, 128, 1), method("auto-round", bits=4, group_size=128, sym=True, packing_format="auto_round:auto_gptq"), "w4a16_f16", False),
    "sglang_w4afp8": (sglang_w4afp8("BF16"), method("w4afp8", weight_block_size=[128, 128]), "w4afp8", True),
    "sglang_w4afp8_f32": (sglang_w4afp8("F32"), method("w4afp8", weight_block_size=[128, 128]), None, False),
    "modelopt_w4a16_awq": (modelopt_int4(128, False), modelopt("W4A16_AWQ", group_size=128), None, False),
    "modelopt_w4a8_awq": (modelopt_int4(128, True), modelopt("W4A8_AWQ", group_size=128), None, False),
}


# ---- checkpoints

def write_safetensors(path, tensors):
    """tensors: {name: (dtype, array)}"""
    header, at, data = {}, 0, []
    for name, (dtype, a) in tensors.items():
        raw = np.ascontiguousarray(a).tobytes()
        shape = list(a.shape[:-1]) + [2 * a.shape[-1]] if dtype == "F4" else list(a.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(data))


def is_linear(name):
    return name.endswith(".weight") and ("_proj." in name or "output_gate" in name or ".experts." in name)


class Checkpoint:
    """A tiny model's plain weights, {name: f32}, and its configuration: of its layers these alone, one with each kind of attention."""

    def __init__(self, path, layers=(1, 2)):
        with open(os.path.join(path, "config.json")) as f:
            self.config = json.load(f)
        if "attn_type_list" in self.config:
            self.config.update(num_hidden_layers=len(layers), attn_type_list=[self.config["attn_type_list"][i] for i in layers])
        self.weights = {}
        for file in sorted(os.listdir(path)):
            if not file.startswith("model-"):
                continue
            with open(os.path.join(path, file), "rb") as f:
                (n,) = struct.unpack("<Q", f.read(8))
                header, data = json.loads(f.read(n)), f.read()
            for name, t in header.items():
                if name == "__metadata__":
                    continue
                if "layers." in name:
                    before, layer, after = re.match(r"(.*layers\.)(\d+)(\..*)", name).groups()
                    if int(layer) not in layers:
                        continue
                    name = f"{before}{layers.index(int(layer))}{after}"
                raw = data[t["data_offsets"][0]:t["data_offsets"][1]]
                kind = {"BF16": "<u2", "F32": "<f4"}[t["dtype"]]
                a = np.frombuffer(raw, kind).reshape(t["shape"])
                self.weights[name] = from_bf16(a) if t["dtype"] == "BF16" else a

    def plain(self):
        return {name: ("F32", w) for name, w in self.weights.items()}

    def encoded(self, encode, others={}, seed=1):
        """(tensors, values by weight name) with every linear quantised; others: {part of a name: its own encoding}."""
        tensors, values, rng = {}, {}, np.random.default_rng(seed)
        for name, w in self.weights.items():
            if not is_linear(name):
                tensors[name] = ("F32", w)
                continue
            made, values[name] = next((e for part, e in others.items() if part in name), encode)(w, rng)
            for suffix, (dtype, a, axis) in made.items():
                tensors[name[:-len("weight")] + suffix] = (dtype, a, axis)
        return tensors, values

    def write(self, path, tensors, config):
        os.makedirs(path)
        beside = {k: v for k, v in config.items() if k.endswith(".json")}
        for file, content in {"config.json": {**self.config, **{k: v for k, v in config.items() if k not in beside}}, **beside}.items():
            with open(os.path.join(path, file), "w") as f:
                json.dump(content, f)
        write_safetensors(os.path.join(path, "model.safetensors"), {name: t[:2] for name, t in tensors.items()})


def fuse_experts(tensors, experts, spelling):
    """Experts stacked as engines hold them: w1 over w3 along rows, then [E, …]; spelling names the stacks of w13 and w2."""
    fused, done = {}, set()
    for name, t in tensors.items():
        if ".experts." not in name:
            fused[name] = t
            continue
        head, rest = name.split(".experts.")
        _, w, suffix = rest.split(".", 2)
        if w == "w3" or (head, w, suffix) in done:
            continue
        done.add((head, w, suffix))
        part = lambda e, w: tensors[f"{head}.experts.{e}.{w}.{suffix}"]
        dtype, _, axis = t
        stack = []
        for e in range(experts):
            pieces = [part(e, p)[1] for p in (("w1", "w3") if w == "w1" and suffix not in ("g_idx", "weight_shape") else (w,))]
            stack.append(np.concatenate(pieces, axis) if axis is not None else np.concatenate([p.reshape(-1) for p in pieces]))
        stack = np.stack(stack)
        fused[f"{head}.experts.{spelling[w == 'w2']}{suffix}"] = (dtype, stack, axis)
    return fused
