#!/usr/bin/env python3
"""minimax-eval --collect from outside: the same numbers for every way of cutting a checkpoint, those of the first layer's attention as numpy
computes them from the source, and as many rows as tokens (for experts, as tokens times the experts that each takes)."""
import json
import os
import subprocess

import numpy as np
from safetensors.numpy import load_file

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
WINDOW, WINDOWS = 96, 2


def convert(model, name, *options):
    out = os.path.join(TMP, name)
    subprocess.run([f"{BIN}/minimax-convert", f"tests/data/{model}", "-o", out, "--quiet", *options], check=True)
    return out


def collect(model, packed):
    out = packed + ".safetensors"
    subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", f"tests/data/{model}/held-out-ids.json", "--window", str(WINDOW), "--limit",
                    str(WINDOWS), "--act-quant", "off", "--collect", out], check=True, stdout=subprocess.DEVNULL)
    return load_file(out)


def source(model, name):
    """A BF16 tensor of the source as f64."""
    with open(f"tests/data/{model}/model.safetensors.index.json", encoding="utf-8") as f:
        path = f"tests/data/{model}/" + json.load(f)["weight_map"][name]
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        t = json.loads(f.read(n))[name]
        f.seek(8 + n + t["data_offsets"][0])
        words = np.frombuffer(f.read(t["data_offsets"][1] - t["data_offsets"][0]), "<u2")
    assert t["dtype"] == "BF16"
    return (words.astype("<u4") << 16).view("<f4").astype("f8").reshape(t["shape"])


def first_inputs(model):
    """What layer 0's attention is given: normalised embeddings of the ids."""
    with open(f"tests/data/{model}/held-out-ids.json", encoding="utf-8") as f:
        ids = json.load(f)[:WINDOW * WINDOWS]
    with open(f"tests/data/{model}/config.json", encoding="utf-8") as f:
        eps = json.load(f)["rms_norm_eps"]
    x = source(model, "model.embed_tokens.weight")[ids]
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * source(model, "model.layers.0.input_layernorm.weight")


def check(model, top_k):
    one = collect(model, convert(model, f"{model}-1"))
    x = first_inputs(model)
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    np.testing.assert_allclose(one[qkv + ".mean_square"], (x * x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(one[qkv + ".amax"], [np.abs(x).max()], rtol=1e-5)
    for name, t in one.items():
        if name.endswith(".rows"):
            tokens = WINDOW * WINDOWS * (top_k if ".experts." in name else 1)
            assert t.dtype == np.int64 and t.sum() == tokens, (name, t)
        else:
            assert np.isfinite(t).all() and (t >= 0).all() and t.any(), name
    for options in (["--tp", "2"], ["--tp", "8"], ["--tp", "8", "--tp-align", "pad"]):
        many = collect(model, convert(model, f"{model}{''.join(options)}", *options))
        assert many.keys() == one.keys()
        for name, t in one.items():
            np.testing.assert_allclose(many[name], t, rtol=2e-3, atol=1e-6 * float(t.max()), err_msg=name)
    print(f"{model}: {len(one)} tensors of inputs, the same at tp 1, 2, 8 and padded")


if __name__ == "__main__":
    check("tiny-m1", 2)
    check("tiny-m2", 4)
