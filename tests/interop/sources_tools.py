#!/usr/bin/env python3
"""Configurations as the newest tools write them (compressed-tensors 0.20, auto-round 0.16, GPTQModel 7.7, ModelOpt 0.47, Quark 0.13): read to
the numbers of published.py, with a note where inputs are rounded otherwise than the scheme does, or refused by name as not supported."""
import filecmp
import json
import os
import subprocess
import sys
import time

import numpy as np
from decoded import planes
from packed import Packed
from published import (CASES, Checkpoint, ct_config, ct_float, ct_int, fp8, gptq, gptq_config, grouped, method, modelopt, mxfp4, nvfp4, stored)

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
MODEL = Checkpoint("tests/data/tiny-m1")
count = 0


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *args], capture_output=True, text=True, check=False)
    assert done.returncode == status, (args, done)
    return done.stderr


def source(tensors, config):
    global count
    count += 1
    path = f"{TMP}/{count}"
    MODEL.write(path, tensors, config)
    return path


def notes(path):
    return [line for line in run("minimax-convert", path, "--dry-run").splitlines() if line.startswith("note: ") and "the source has no" not in line]


def exact(encode, config, scheme, want_notes=()):
    """Under f32 the numbers are the reference's; none keeps them in `scheme`."""
    tensors, values = MODEL.encoded(encode)
    path = source(tensors, config)
    run("minimax-convert", path, "-o", path + "-f32", "--quant", "f32", "-q", "--tp", "2")
    found = {name: p[0].view("f4") for name, _, p in planes(Packed(path + "-f32"))}
    for name, want in values.items():
        assert ((found[name].view("u4") == want.view("u4")) | (want == 0)).all(), (config, name)
    run("minimax-convert", path, "-o", path + "-none", "-q", "--tp", "2")
    run("minimax-verify", path + "-none", "-q", "--source", path)
    kept = {s for name, s, _ in planes(Packed(path + "-none")) if name in values}
    assert kept == {scheme}, kept
    assert [n.split(",")[0] for n in notes(path)] == list(want_notes), notes(path)
    return path + "-none"


def bytes_in_groups(g, bits):
    """compressed-tensors stores integers whose inputs are floats as int-quantized: a byte each, also those of four bits."""
    def encode(w, rng):
        u, raw, _, _, value = grouped(w, g, bits, True, "BF16", False, rng)
        return {"weight": ("I8", (u.astype("i2") - (1 << bits - 1)).astype("i1"), 0), "weight_scale": ("BF16", raw, 0)}, value
    return encode


def bytes_of_a_matrix(w, rng):
    raw, s = stored(np.array([np.abs(w).max() / 127], "f4"), "BF16")
    code = np.clip(np.rint(w / s), -128, 127).astype("i1")
    return {"weight": ("I8", code, 0), "weight_scale": ("BF16", raw, None)}, code.astype("f4") * s


def with_inputs(config, **inputs):
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs or None
    return config


def integers_in_bytes():
    ints = {"type": "int", "symmetric": True}
    said = "note: the source declares inputs of its int8 in groups weights in FP8"
    fp8_inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    for bits in (4, 8):
        weights = {**ints, "num_bits": bits, "strategy": "group", "group_size": 32}
        exact(bytes_in_groups(32, bits), with_inputs(ct_config("int-quantized", weights), **fp8_inputs), "int8", [said])
    int8_inputs = {"num_bits": 8, "type": "int", "dynamic": True}
    exact(bytes_of_a_matrix, with_inputs(ct_config("int-quantized", {**ints, "num_bits": 8, "strategy": "tensor"}), **int8_inputs), "int8")


def inputs():
    """A note where the scheme that keeps the weights rounds inputs otherwise, and none where it does not."""
    plain = "note: the source declares inputs of its compressed-tensors MXFP4 weights as they are"
    exact(mxfp4("weight_packed"), ct_float("mxfp4-pack-quantized", 4, "group", group_size=32), "mxfp4", [plain])
    both = with_inputs(ct_float("mxfp4-pack-quantized", 4, "group", group_size=32), num_bits=4, type="float", group_size=32, dynamic=True)
    exact(mxfp4("weight_packed"), both, "mxfp4")
    encode = CASES["ct_int4_g32"][0]

    def static(w, rng):  # int4 with static int8 inputs
        tensors, value = encode(w, rng)
        return {**tensors, "input_scale": ("BF16", np.array([0x3f00], "u2"), None), "input_zero_point": ("I8", np.zeros(1, "i1"), None)}, value
    exact(static, with_inputs(ct_int(4, 32), num_bits=8, type="int", strategy="tensor"), "w4a16",
          ["note: the source declares inputs of its compressed-tensors int4 weights in INT8"])
    exact(CASES["auto_round"][0], method("auto-round", bits=4, group_size=128, sym=True, packing_format="auto_round:auto_gptq", act_bits=8,
                                         data_type="int"), "w4a16_f16", ["note: the source declares inputs of its GPTQ int4 weights in INT8"])
    exact(fp8("weight_scale", "F32", 128, 128, lambda s: s[:, None, :, None]), modelopt("FP8_PB_WO"), "block_fp8",
          ["note: the source declares inputs of its ModelOpt FP8_PB_WO weights as they are"])


def static_scales():
    """A static scale of inputs in FP8 is the largest input over 448, that of NVFP4 over 2688: the one is not kept as the other."""
    said = "note: the source declares inputs of its ModelOpt NVFP4 weights in FP8"
    tensors = lambda out: json.load(open(out + "/manifest.json", encoding="utf-8"))["tensors"]
    out = exact(nvfp4("modelopt"), modelopt("W4A8_NVFP4_FP8", group_size=16), "nvfp4a16", [said])
    assert not any("input_scale" in t for t in tensors(out))
    out = exact(nvfp4("modelopt"), modelopt("NVFP4", group_size=16), "nvfp4")
    assert any("input_scale" in t for t in tensors(out))
    layers = {"a": {"quant_algo": "W4A16_NVFP4"}, "b": {"quant_algo": "W4A8_NVFP4_FP8"}}
    out = exact(nvfp4("modelopt"), modelopt("MIXED_PRECISION", quantized_layers=layers), "nvfp4a16")
    assert not any("input_scale" in t for t in tensors(out))
    layers = {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "W4A8_NVFP4_FP8"}}
    refused(nvfp4("modelopt"), modelopt("MIXED_PRECISION", quantized_layers=layers), "E_Q_METHOD", "next to such with inputs in FP4")


def zero_points():
    """GPTQ's format of zero points that no key says, and that quantize_config.json alone says."""
    said = "note: no checkpoint_format is declared; zero points are taken as GPTQ's first format stores them"
    asymmetric = gptq(4, 32, 1, symmetric=False)
    exact(asymmetric, gptq_config(4, 32, sym=False), "w4a16_zero", [said])
    exact(asymmetric, gptq_config(4, 32, sym=False, checkpoint_format="gptq"), "w4a16_zero")
    exact(gptq(4, 32, 1), gptq_config(4, 32, sym=True), "w4a16_f16")
    own = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"}
    exact(gptq(4, 32, 2, symmetric=False), {**gptq_config(4, 32, sym=False), "quantize_config.json": own}, "w4a16_zero")


def resumed():
    """A format of zero points that changed since: said of an interrupted and of a finished conversion."""
    own = lambda f: {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": f}
    path = source(MODEL.encoded(gptq(4, 32, 1, symmetric=False))[0], {**gptq_config(4, 32, sym=False), "quantize_config.json": own("gptq")})

    def told(form, *options, status=0):
        with open(path + "/quantize_config.json", "w", encoding="utf-8") as f:
            json.dump(own(form), f)
        return run("minimax-convert", path, "-o", path + "-out", "-q", *options, status=status)
    told("gptq", "--part", "0/2")
    said = told("gptq_v2", "--resume", status=2)
    assert "E_RESUME" in said and "found a run with another quantization of the source" in said, said
    told("gptq", "--resume")
    told("gptq", "--resume")
    said = told("gptq_v2", "--resume", status=2)
    assert "E_RESUME" in said and "found a finished conversion with another quantization of the source" in said, said


def followed():
    """--follow waits for quantize_config.json where config.json leaves the format of zero points open, and refuses one that comes too late.
    Zero points of symmetric weights show their format, so it does not wait there, and refuses the one that it did not plan with."""
    second, late = "found zero points of GPTQ's second format", "another format of zero points"
    for sym, is_late, stated, error in ((False, False, {}, None), (False, True, {"checkpoint_format": "gptq"}, late), (False, True, {}, late),
                                        (True, True, {}, second)):
        own = {"bits": 4, "group_size": 32, "sym": sym, "desc_act": False, "checkpoint_format": "gptq_v2"}
        tensors = MODEL.encoded(gptq(4, 32, 2, symmetric=sym))[0]
        path = source(tensors, gptq_config(4, 32, sym=sym, **stated))
        with open(path + "/model.safetensors.index.json", "w", encoding="utf-8") as f:
            json.dump({"metadata": {}, "weight_map": {name: "model.safetensors" for name in tensors}}, f)
        os.rename(path + "/model.safetensors", path + "/weights.incomplete" if not is_late else path + "/model.safetensors")
        args = ["minimax-convert", path, "-o", path + "-out", "--follow", "--follow-quiet", "1" if is_late else "10", "--follow-timeout", "60"]
        with subprocess.Popen([f"{BIN}/{args[0]}", *args[1:]], stderr=subprocess.PIPE, text=True) as p:
            time.sleep(2.5)  # late: it waits for the tokenizer
            for name, text in (("quantize_config.json", json.dumps(own)), ("tokenizer.json", "{}")):
                with open(f"{path}/{name}", "w", encoding="utf-8") as f:
                    f.write(text)
            if not is_late:
                os.rename(path + "/weights.incomplete", path + "/model.safetensors")
            said = p.communicate(timeout=60)[1]
        if is_late:
            assert p.returncode == 4 and "E_FOLLOW" in said and error in said, (sym, stated, p.returncode, said)
            run("minimax-convert", path, "-o", path + "-plain", "-q", status=3 if stated else 0)
            continue
        assert p.returncode == 0 and "waiting for quantize_config.json, which the plan needs" in said, said
        run("minimax-convert", path, "-o", path + "-plain", "-q")
        for name in os.listdir(path + "-plain"):
            assert filecmp.cmp(f"{path}-plain/{name}", f"{path}-out/{name}", shallow=False), name


def refused(encode, config, code, *says):
    path = source(MODEL.encoded(encode)[0], config)
    said = run("minimax-convert", path, "-o", path + "-out", "-q", status=4)
    assert code in said and all(s in said for s in says), said


def refusals():
    ints = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}
    for config in (ct_config("int-quantized", ints), with_inputs(ct_config("mixed-precision", ints))):
        config["quantization_config"]["config_groups"]["group_0"]["format"] = "int-quantized"
        refused(CASES["int8"][0], config, "E_Q_METHOD", "zero points", "pack-quantized")
    refused(gptq(4, 32, 1), gptq_config(4, 32, sym=True, pack_dtype="int64"), "E_Q_METHOD", 'pack_dtype "int64"')
    exact(gptq(4, 32, 1), gptq_config(4, 32, sym=True, pack_dtype="int32"), "w4a16_f16")
    block = fp8("weight_scale", "BF16", 128, 128)
    dynamic = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    exact(block, with_inputs(ct_float("float-quantized", 8, "block", block_structure="128x128"), **dynamic), "block_fp8")
    for key in ("spinquant_config", "rotation_config", "online_hadamard", "quarot"):
        for empty in (None, False, {}, [], 0, "", "none", "None", {"config_groups": {}}, {"enabled": False, "r1": True}):
            run("minimax-convert", source(MODEL.encoded(gptq(4, 32, 1))[0], gptq_config(4, 32, sym=True, **{key: empty})), "--dry-run")
        refused(gptq(4, 32, 1), gptq_config(4, 32, sym=True, **{key: {"r1": True}}), "E_Q_TRANSFORM", f'weights rotated by "{key}"')
        refused(gptq(4, 32, 1), {**gptq_config(4, 32, sym=True), key: {"r1": True}}, "E_Q_TRANSFORM", f'weights rotated by "{key}"')
    for name in ("rotation", "svdquant"):
        for config in ({"algo_config": [{"name": "awq"}, {"name": name}]}, {"algo_config": {"name": name}}, {"pre_quant_opt_config": [{"name": name}]}):
            refused(block, method("quark", **config), "E_Q_TRANSFORM", name)
    for config in ({"algo_config": [{"name": "awq"}]}, {"algo_config": None, "pre_quant_opt_config": []}, {"algo_config": {"name": "gptq"}}):
        run("minimax-convert", source(MODEL.encoded(CASES["int8"][0])[0], method("quark", **config)), "--dry-run")


if __name__ == "__main__":
    for check in (integers_in_bytes, inputs, static_scales, zero_points, resumed, followed, refusals):
        check()
    print(f"{count} sources as the newest tools write them: read exactly, or refused by name")
