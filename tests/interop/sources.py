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
from decoded import decode, nibbles, planes
from packed import Packed
from published import CASES, E2M1, E4M3, Checkpoint, from_bf16, fuse_experts, modelopt, nvfp4, to_bf16

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


def check(what, tensors, values, config, keep, numbers=None):
    """numbers: what another scheme gives for the same numbers in f32, made where None; returns it."""
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
    other = "mxfp4" if keep != "mxfp4" else "nvfp4a16"
    if not numbers:
        plain = os.path.join(TMP, what + "-plain")
        MODEL.write(plain, {**tensors_of(values), **{n: t for n, t in MODEL.plain().items() if n not in values}}, {})
        numbers = plain + "-other"
        convert(plain, numbers, other)
    convert(source, source + "-other", other)
    assert same_parts(source + "-other", numbers), f"{what} --quant {other}: not the bytes of the same numbers in f32"
    return numbers


def tensors_of(values):
    return {name: ("F32", v) for name, v in values.items()}


def check_case(name):
    encode, config, keep, stacks = CASES[name]
    tensors, values = MODEL.encoded(encode)
    numbers = check(name, tensors, values, config, keep)
    if not stacks:
        return 1
    for spelling in STACKS:
        check(f"{name}-{spelling[0][:-1]}", fuse_experts(tensors, EXPERTS, spelling), values, config, keep, numbers)
    return 1 + len(STACKS)


def differing(ratio):
    """NVFP4 where w3 has a global scale of its own, 1 / ratio of the others'."""
    tensors, values = MODEL.encoded(nvfp4("modelopt"), {".w3.": nvfp4("modelopt", top=np.float32(1 / ratio))})
    source = os.path.join(TMP, f"globals-{ratio}")
    MODEL.write(source, tensors, modelopt("NVFP4", group_size=16))
    return source, values


def check_global_scales():
    """w1 and w3 share a global scale: `--quant none` keeps the numbers where the ratio is a power of two and refuses the others;
    `--quant nvfp4a16` puts both under the larger one, which is as near as the refusal says."""
    for ratio, exact in ((2, True), (8, True), (1.37, False), (3, False), (40, False)):
        source, values = differing(ratio)
        if exact:
            convert(source, source + "-none", "none")
        else:
            said = convert(source, source + "-none", "none", 4)
            assert "E_Q_KEEP" in said and "w1.weight_scale_2" in said and "31 to 35 dB" in said and "nvfp4a16" in said, said
        convert(source, source + "-nvfp4a16", "nvfp4a16")
        out = source + ("-none" if exact else "-nvfp4a16")
        for name, scheme, p in planes(Packed(out)):
            if name not in values:
                continue
            got, want = decode(scheme, p), values[name]
            if exact or ".w3." not in name:
                assert same(got, want).all(), (ratio, name)
            else:
                assert 30 < decibels([(got, want)]) < 36, (ratio, name, decibels([(got, want)]))


def check_common_scale():
    """A common scale is found wherever there is one, not only under the largest: block scales of w1 too small to be halved again, and
    global scales in a ratio of 3 to 2 whose block scales have room for it. Where a single block has none, the source is refused, before
    anything is written where the ratio is no power of two."""
    def spoilt(ratio, change, status):
        tensors, values = MODEL.encoded(nvfp4("modelopt", inputs=False), {".w3.": nvfp4("modelopt", inputs=False, top=np.float32(1 / ratio))})
        name = "model.layers.1.block_sparse_moe.experts.2."
        for w in ("w1.", "w3."):
            change(w, tensors[name + w + "weight_scale"][1])
        source = os.path.join(TMP, f"common-{ratio}-{status}-{change.__name__}")
        MODEL.write(source, tensors, modelopt("W4A16_NVFP4", group_size=16))
        said = convert(source, source + "-none", "none", status)
        if status:
            assert "E_Q_KEEP" in said and name in said, said
            return
        verify = subprocess.run([CONVERT.replace("minimax-convert", "minimax-verify"), source + "-none", "--source", source],
                                capture_output=True, text=True, check=True)
        assert "19 of 19 tensors exact" in verify.stdout, verify.stdout
        for stored, scheme, p in planes(Packed(source + "-none")):
            if stored in (name + "w1.weight", name + "w3.weight"):
                stem = stored[:-len("weight")]
                code = nibbles(np.repeat(tensors[stem + "weight"][1], 2, 1))
                scale = np.repeat(E4M3[tensors[stem + "weight_scale"][1]], 16, 1) * np.float32(tensors[stem + "weight_scale_2"][1])
                assert same(decode(scheme, p), E2M1[code] * scale).all(), (ratio, stored)

    def odd_subnormals(w, block):  # of the smaller one: halved they are no E4M3; the larger one's have room to be doubled
        block[...] = 0x01 if w == "w3." else np.minimum(block, 0x70)

    def no_room(w, block):  # the larger one's cannot be doubled either
        block[0, 0] = 0x01 if w == "w3." else 0x7e

    spoilt(2, odd_subnormals, 0)
    spoilt(2, no_room, 4)


def decibels(pairs_of):
    """Signal over error of [(found, expected)]."""
    error = sum(((a.astype("f8") - b)**2).sum() for a, b in pairs_of)
    signal = sum((b.astype("f8")**2).sum() for _, b in pairs_of)
    return 10 * np.log10(signal / error)


def check_choices():
    """The losses that E_Q_KEEP names are those of the schemes, within a decibel or what it says of single sources."""
    said = {"bf16": (55, 57), "int8": (43, 45.5), "block_fp8": (31, 32.5), "nvfp4a16": (21.5, 23.5), "w4a16": (20, 25)}
    for name in ("awq_g32", "gptq_v1"):
        tensors, values = MODEL.encoded(CASES[name][0])
        source = os.path.join(TMP, "choices-" + name)
        MODEL.write(source, tensors, CASES[name][1])
        for quant, (least, most) in said.items():
            convert(source, f"{source}-{quant}", quant)
            found = [(from_bf16(p[0]) if quant == "bf16" else decode(scheme, p), values[n])
                     for n, scheme, p in planes(Packed(f"{source}-{quant}")) if n in values]
            db = decibels(found)
            assert (48 < db < 50) if (quant, name) == ("w4a16", "gptq_v1") else least < db < most, (name, quant, db)
    text = convert(os.path.join(TMP, "ct_int4_actorder"), source + "-none", "none", 4)
    for word in ("desc_act", "f32 (exact)", "bf16 (56 dB of SQNR against the source)", "int8 (44)", "block_fp8 (32)", "nvfp4a16 (22)",
                 "w4a16 (21, but 49 for"):
        assert word in text, text


HEADS = ("awq", "gptq_v1", "block_fp8", "nvfp4_modelopt", "tensor_fp8", "ct_int4_g128", "int8")


def check_heads():
    """A quantised head, embedding and router: BF16, BF16 and F32 by default; --head keeps the codes where it names the source's scheme."""
    modules = [n for n in MODEL.weights if n in ("lm_head.weight", "model.embed_tokens.weight") or n.endswith(".gate.weight")]
    assert len(modules) == 2 + MODEL.config["num_hidden_layers"]
    for case in HEADS:
        encode, config, keep, _ = CASES[case]
        tensors, values, rng = dict(MODEL.plain()), {}, np.random.default_rng(5)
        for name in modules:
            made, values[name] = encode(tensors.pop(name)[1], rng)
            tensors |= {name[:-len("weight")] + suffix: t for suffix, t in made.items()}
        source = os.path.join(TMP, "head-" + case)
        MODEL.write(source, tensors, config)
        p = subprocess.run([CONVERT, source, "--dry-run"], capture_output=True, text=True, check=True)
        assert '"model.embed_tokens.weight" is ' in p.stderr and "stored as bf16; --head" in p.stderr and "(tensors: 2)" in p.stderr, p.stderr
        assert f"stored as f32 (tensors: {len(modules) - 2})" in p.stderr, p.stderr
        convert(source, source + "-none", "none")
        subprocess.run([CONVERT.replace("minimax-convert", "minimax-verify"), "-q", source + "-none", "--source", source], check=True, capture_output=True)
        found = {name: (scheme, p) for name, scheme, p in planes(Packed(source + "-none"))}
        for name in modules:
            scheme, p = found[name]
            if name.endswith(".gate.weight"):
                assert scheme == "f32" and same(p[0].view("f4"), values[name]).all(), (case, name)
            else:
                assert scheme == "bf16" and (p[0][:values[name].shape[0]] == to_bf16(values[name])).all(), (case, name)
        if keep:
            head = keep if keep != "nvfp4" else "nvfp4a16"
            convert(source, source + "-head", "none; lm_head.weight=" + head)
            ((scheme, p),) = [(s, p) for n, s, p in planes(Packed(source + "-head")) if n == "lm_head.weight"]
            assert scheme == head and same(decode(scheme, p)[:values["lm_head.weight"].shape[0]], values["lm_head.weight"]).all(), case
    return len(HEADS)


names = sys.argv[1:] or list(CASES)
count = sum(check_case(name) for name in names)
check_global_scales()
check_common_scale()
if "ct_int4_actorder" in names:
    check_choices()
check_heads()
print(f"{len(names)} encodings, {count} checkpoints: exact")
