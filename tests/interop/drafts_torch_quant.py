#!/usr/bin/env python3
"""Numbers of drafts that minimax-convert --draft-quant packs, against torch in f32: the target, the drafts and the mathematics of drafts_torch.py, each draft in
block_fp8 and in channel_fp8. torch quantises the weights of the source by itself, by the published rule: E4M3 codes of w / s, to nearest and ties to even, under
s = amax / 448 of 128 x 128 weights or of a row. Codes and scales of the packed draft are these, bit for bit, and its other tensors are those of the source.
Tapped outputs and logits differ by at most LIMIT, and by more with any one of the mistakes that are planted in one draft of each kind. (It takes 10 GB of
disk, 12 GB of memory and 7 minutes.)"""
import shutil

from drafts_torch import CUTS, compare, converted, each_draft, reference

import torch
from safetensors import safe_open

SCALES = {"block_fp8": ".weight_scale_inv", "channel_fp8": ".weight_scale"}
BLOCK, MOST = 128, 448
PLANTED = (("DFlash L3H5, block 16", "block_fp8"), ("EAGLE-3 of M2.5", "channel_fp8"))  # all others have no mistakes planted, for the time they take
MATRICES = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}

# ---- quantisation ----


def cells(w, quant):
    """w as [rows of cells, rows, columns of cells, columns] of the weights under one scale."""
    rows, cols = w.shape
    return w.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK) if quant == "block_fp8" else w.view(rows, 1, 1, cols)


def by_scale(w, scale, quant, op):
    """Applies an operation in place to every weight and the scale over it."""
    op(cells(w, quant), scale[:, None, :, None])
    return w


def quantised(w, quant):
    """(E4M3 codes, f32 scales)."""
    scale = cells(w, quant).abs().amax((1, 3)).float() / MOST
    return by_scale(w.to(torch.float32, copy=True), scale, quant, torch.Tensor.div_).clamp_(-MOST, MOST).to(torch.float8_e4m3fn), scale


def numbers(codes, scale, quant):
    return by_scale(codes.float(), scale, quant, torch.Tensor.mul_)


def cut_off(w, quant):
    """Numbers whose codes are not rounded but cut towards zero, a planted mistake."""
    codes, scale = quantised(w, quant)
    beyond = codes.float().abs() > by_scale(w.to(torch.float32, copy=True), scale, quant, torch.Tensor.div_).abs()
    return numbers((codes.view(torch.uint8) - beyond.to(torch.uint8)).view(torch.float8_e4m3fn), scale, quant)


def module(name):
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


# ---- the packed file ----


def of_source(name):
    """The name in draft.safetensors of what a source calls `name`, without .weight."""
    name = name.removesuffix(".weight").replace("midlayer.hidden_norm", "hidden_norm").replace("midlayer.", "layers.0.")
    head, _, last = name.rpartition(".")
    return f"{head}.{JOINED[last]}" if last in JOINED else name


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def expected_file(weights, packed, quant):
    """The tensors that draft.safetensors should have; the `packed` pair of each matrix's source name gives codes and scales."""
    parts = {}
    for name, w in weights.items():
        to = of_source(name)
        if name in packed:
            parts.setdefault(to + ".weight", []).append(packed[name][0])
            parts.setdefault(to + SCALES[quant], []).append(packed[name][1])
        elif name != "t2d":
            parts[name if name == "d2t" else to + ".weight"] = [w]
    return {name: torch.cat([x.view(torch.uint8) for x in all_of]).view(all_of[0].dtype) if len(all_of) > 1 else all_of[0] for name, all_of in parts.items()}


def check_file(name, weights, packed, quant, path):
    wanted = expected_file(weights, packed, quant)
    with safe_open(path, "pt") as f:
        found = sorted(f.keys())
        assert found == sorted(wanted), f"{name}: found tensors {found}, expected {sorted(wanted)}"
        wrong = [n for n in found if not same_bits(f.get_tensor(n), wanted[n])]
    count = sum(codes.numel() for codes, _ in packed.values())
    print(f"{name}: {count} codes in {len(packed)} matrices, their scales and the other tensors of the file: {'all equal' if not wrong else f'{wrong} differ'}", flush=True)
    assert not wrong, name


# ---- mistakes ----


def exchanged(packed, a, b, quant):
    """Matrices a and b, each with the scales of the other."""
    return {a: numbers(packed[a][0], packed[b][1], quant), b: numbers(packed[b][0], packed[a][1], quant)}


def mistakes(s, weights, packed, quant):
    """(cut, what, settings, weights) of every mistake that is planted in the reference: in fc and the first layer."""
    first = {module(name): name for name in reversed(packed)}
    other = "channel_fp8" if quant == "block_fp8" else "block_fp8"

    def all_of(make):
        return {name: make(weights[name], *packed[name]) for name in first.values()}

    def pair(a, b):
        return exchanged(packed, first[a], first[b], quant)

    wrong = {f"{name} as it was": lambda name=name: {name: weights[name].float()} for name in first.values()}
    wrong |= {f"codes of {other}": lambda: all_of(lambda w, c, x: numbers(*quantised(w, other), other)),
              "codes cut towards zero": lambda: all_of(lambda w, c, x: cut_off(w, quant)),
              "scales in BF16": lambda: all_of(lambda w, c, x: numbers(c, x.bfloat16().float(), quant)),
              "scales of the rows before": lambda: all_of(lambda w, c, x: numbers(c, x.roll(1, 0), quant)),
              "scales of k and v exchanged": lambda: pair("k_proj", "v_proj"),
              "scales of gate and up exchanged": lambda: pair("gate_proj", "up_proj")}
    if quant == "block_fp8":
        wrong["scales of the columns before"] = lambda: all_of(lambda w, c, x: numbers(c, x.roll(1, 1), quant))
    if s["kind"] == "eagle":
        wrong["a quantised head"] = lambda: {"lm_head.weight": numbers(*quantised(weights["lm_head.weight"], quant), quant)}
    for what, make in wrong.items():
        yield CUTS[0], what, {}, make()


def in_schemes(name, s, weights, work, target):
    for quant in SCALES:
        what = f"{name} in {quant}"
        path = converted(work, quant)
        packed = {n: quantised(w, quant) for n, w in weights.items() if module(n) in MATRICES}
        check_file(what, weights, packed, quant, path + "/draft.safetensors")
        own = reference({n: w for n, w in weights.items() if n not in packed}) | {n: numbers(*pair, quant) for n, pair in packed.items()}
        compare(what, s, own, path, target, mistakes(s, weights, packed, quant) if (name, quant) in PLANTED else (), fewer=False)
        shutil.rmtree(path)


if __name__ == "__main__":
    with torch.no_grad():
        each_draft(in_schemes)
