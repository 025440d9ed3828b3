#!/usr/bin/env python3
"""MiniMax-M3 as other tools publish it: M3.1-Flash (MXFP8 with NVFP4 experts and a bundled draft), ModelOpt's mixed precision, FP8 of
compressed-tensors, AWQ. Every weight is the number that published.py computes; --quant none keeps the stored bits or says that it cannot."""
import copy
import json
import os
import subprocess
import sys

import numpy as np
from decoded import decode, planes
from packed import Packed
from published import Checkpoint, awq, ct_float, fp8, method, modelopt, nvfp4, to_bf16

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
PREFIX, INDEX = "language_model.", ("index_q_proj", "index_k_proj")


def text(name):
    return name.removeprefix(PREFIX)


def module(name):
    return name.removesuffix(".weight")


class M3(Checkpoint):
    """tiny-m3-random: its text model quantised as `kind` says, all else as in the file."""

    def __init__(self):
        super().__init__("tests/data/tiny-m3-random", range(5))
        self.linears = [n for n in self.weights if n.startswith(PREFIX) and "_proj." in n or ".experts." in n]

    def made(self, kind):
        """(tensors, values by name without prefix); kind(name) is an encoding, or None."""
        tensors, values, rng = {}, {}, np.random.default_rng(3)
        for name, w in self.weights.items():
            encode = kind(name) if name in self.linears else None
            if encode is None:
                plain = "F32" if "gate.weight" in name or "bias" in name and name.startswith(PREFIX) else "BF16"
                tensors[name] = (plain, w if plain == "F32" else to_bf16(w), 0)
                continue
            made, values[text(name)] = encode(w, rng)
            for suffix, t in made.items():
                tensors[name[:-len("weight")] + suffix] = t
        return tensors, values


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == status, (program, args, done)
    return done.stderr


def stored(out):
    """{name without prefix: (scheme, planes)}"""
    return {name: (scheme, p) for name, scheme, p in planes(Packed(out))}


def check(what, model, tensors, values, config, schemes):
    """schemes: {part of a name: what --quant none stores it as}."""
    source = f"{TMP}/{what}"
    model.write(source, tensors, config)
    for tp in (1, 4):
        run("minimax-convert", source, "-o", f"{source}-f32-{tp}", "-q", "--quant", "f32", "--override", "*index_?_proj*=f32", "--tp", tp)
        found = stored(f"{source}-f32-{tp}")
        for name, want in values.items():
            scheme, p = found[name]
            assert scheme == "f32" and (p[0].view("u4") == want.astype("f4").view("u4")).all(), (what, tp, name)
    for tp in (1, 8):
        run("minimax-convert", source, "-o", f"{source}-none-{tp}", "-q", "--tp", tp)
        run("minimax-verify", f"{source}-none-{tp}", "-q", "--source", source)
        for name, (scheme, p) in stored(f"{source}-none-{tp}").items():
            if name not in values:
                continue
            want = values[name]
            assert scheme == next(s for part, s in schemes.items() if part in name), (what, name, scheme)
            got = decode(scheme, p)
            near = 2.0**-22 if scheme.startswith("nvfp4") and "flash" in what else 0  # the reciprocal of a global scale is rounded once
            assert (np.abs(got - want) <= near * np.abs(want)).all(), (what, tp, name)
    run("minimax-convert", source, "-o", source + "-hf", "-q", "--layout", "hf")
    run("minimax-verify", source + "-hf", "-q", "--source", source)
    run("minimax-convert", source + "-hf", "-o", source + "-back", "-q")
    for name, (scheme, p) in stored(source + "-back").items():
        if name in values:  # compressed-tensors stores a global scale as its inverse
            near = 2.0**-21 if scheme.startswith("nvfp4") else 0
            assert (np.abs(decode(scheme, p) - values[name]) <= near * np.abs(values[name])).all(), (what, "unsharded", name)
    return len(values)


def flash(model):
    """All layers sparse, experts NVFP4 under compressed-tensors' names, all other projections MXFP8, the index branch's too; a draft."""
    model = copy.deepcopy(model)
    t = model.config["text_config"]
    sparse = t["sparse_attention_config"]
    sparse["sparse_attention_freq"] = sparse["sparse_disable_index_value"] = [1] * 5
    for name in list(model.weights):
        if ".layers.1.self_attn.index_" in name:
            other = name.replace(".1.", ".0.")
            model.weights[other] = model.weights[name][::-1].copy()
            model.linears += [other] if "_proj." in name else []
    config = method("mxfp8", moe_quant_algo="NVFP4", moe_quant_format="nvfp4-pack-quantized", group_size=16, weight_block_size=[1, 32],
                    activation_scheme="dynamic", kv_cache_quant_algo="FP8", attention_quant_algo="FP8", index_k_quant_type="nvfp4",
                    ignored_layers=["lm_head", "model.embed_tokens", "model.layers.3.block_sparse_moe.gate"])
    expert, rest = nvfp4("ct"), fp8("weight_scale_inv", "U8", 1, 32)
    tensors, values = model.made(lambda n: expert if ".experts." in n else rest)
    tensors[PREFIX + "model.dspark.layers.0.decoder_layer.mlp.gate_proj.weight"] = ("BF16", np.arange(6, dtype="u2").reshape(2, 3), 0)
    count = check("flash", model, tensors, values, config, {".experts.": "nvfp4", "": "mxfp8"})
    left = json.load(open(f"{TMP}/flash-none-1/manifest.json"))["left_out"]
    assert left[0] == {"prefix": "model.dspark.", "tensors": 1, "bytes": 12}, left
    return count


def mixed(model):
    """ModelOpt: quantized_layers says which of the two each module has."""
    expert, rest = nvfp4("modelopt"), fp8("weight_scale", "U8", 1, 32)
    tensors, values = model.made(lambda n: None if "index_k_proj" in n else expert if ".experts." in n else rest)
    layers = {module(n): {"quant_algo": "NVFP4", "group_size": 16} if ".experts." in n else {"quant_algo": "MXFP8"}
              for n in model.linears if "index_k_proj" not in n}
    own = modelopt("MIXED_PRECISION", quantized_layers=layers, exclude_modules=["lm_head", "vision_tower*", "*gate"])
    inline = method("modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers, exclude_modules=["lm_head", "vision_tower*", "*gate"])
    schemes = {".experts.": "nvfp4", "": "mxfp8"}
    return check("mixed", model, tensors, values, own, schemes) + check("mixed-inline", model, tensors, values, inline, schemes)


def ct_fp8(model):
    """EmbeddedLLM's FP8-dynamic: a scale a row, activations by token."""
    encode = fp8("weight_scale", "BF16", 1, 0)
    tensors, values = model.made(lambda n: None if any(x in n for x in INDEX) else encode)
    config = ct_float("float-quantized", 8, "channel")
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*vision_tower.*", "re:.*index_.*", "re:.*gate$"]
    return check("ct-fp8", model, tensors, values, config, {"": "channel_fp8"})


def community_awq(model):
    """Experts alone in four bits with zero points, groups of 16."""
    tensors, values = model.made(lambda n: awq(16) if ".experts." in n else None)
    config = method("awq", bits=4, group_size=16, zero_point=True, version="gemm", modules_to_not_convert=["self_attn", "gate", "vision_tower"])
    return check("awq", model, tensors, values, config, {".experts.": "w4a16_zero"})


def main():
    model = M3()
    counts = {f.__name__: f(model) for f in (flash, mixed, ct_fp8, community_awq)}
    print("MiniMax-M3 as published by others, matrices compared:", counts)


if __name__ == "__main__":
    sys.exit(main())
