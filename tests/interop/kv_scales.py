#!/usr/bin/env python3
"""KV-cache scales beside the weights, under every name that calibrating tools give them: kept, cast or dropped, under the one name that
engines look for, and cut with the KV heads. Weights and logits do not notice."""
import json
import os
import shutil
import subprocess
import sys

import numpy as np
from packed import Packed
from safetensors.numpy import save_file
from unsharded import Unsharded

sys.path.insert(0, "tests/fault")
import packed_files  # noqa: E402

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
HEADS, QUERY_HEADS = 2, 8


def source(model, name, scales):
    """A copy of a tiny checkpoint with {what follows "self_attn.": numbers} in each of its layers `at`."""
    out = os.path.join(TMP, name)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(f"tests/data/{model}", out)
    save_file(scales, os.path.join(out, "kv.safetensors"))
    path = os.path.join(out, "model.safetensors.index.json")
    with open(path, encoding="utf-8") as f:
        index = json.load(f)
    index["weight_map"].update({k: "kv.safetensors" for k in scales})
    index["metadata"]["total_size"] += sum(v.nbytes for v in scales.values())
    with open(path, "w", encoding="utf-8") as f:
        json.dump(index, f)
    return out


def layers(of, names, layer_count=4):
    """Another number in every tensor: `of` gives its shape and type."""
    return {f"model.layers.{i}.self_attn.{n}": of(1 + i + 10 * j) for i in range(layer_count) for j, n in enumerate(names)}


def scalar(x):
    return np.array(0.125 * x, np.float32)


def one(x):
    return np.array([0.125 * x], np.float16)


def heads(x):
    return np.array([0.125 * x + 0.5 * h for h in range(HEADS)], np.float32)


def heads_of_tokens(x):
    """As compressed-tensors' strategy attn_head stores them: [heads, 1, 1]."""
    return heads(x).reshape(HEADS, 1, 1)


def all_heads(x):
    """attn_head of queries, too: the first of the names, with a number for each of their heads."""
    return np.array([[[0.125 * x + 0.5 * h]] for h in range(QUERY_HEADS)], np.float32) if x <= 10 else heads_of_tokens(x)


def convert(src, name, *options, status=0):
    out = os.path.join(TMP, name)
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run([f"{BIN}/minimax-convert", src, "-o", out, "--quiet", *options], stderr=subprocess.PIPE, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr if status else out


def found(packed):
    """The KV scales of a packed checkpoint, put together: name -> (type, numbers)."""
    out = {}
    for t in packed.manifest["tensors"]:
        if ".self_attn.attn." not in t["name"]:
            continue
        assert t["vector"] and t["planes"][0]["suffix"] == ""
        dtype = t["planes"][0]["dtype"]
        (_, bits), = packed.whole(t, t["planes"][0])
        out[t["name"]] = (dtype, bits.reshape(-1).view({"F32": np.float32, "F16": np.float16}[dtype]))
    return out


def check(spelling, of, want, *options, tps=("1", "2", "8")):
    """spelling: names in the source; want: ours -> the name it comes from, and the type."""
    given = layers(of, spelling)
    src = source("tiny-m2", "src", given)
    for tp in tps:
        path = convert(src, "out", "--tp", tp, *options)
        got = found(Packed(path))
        assert got.keys() == {f"model.layers.{i}.self_attn.attn.{n}" for i in range(4) for n in want}, (spelling, got.keys())
        for i in range(4):
            for ours, (theirs, dtype) in want.items():
                t, values = got[f"model.layers.{i}.self_attn.attn.{ours}"]
                numbers = given[f"model.layers.{i}.self_attn.{theirs}"].reshape(-1)
                assert t == dtype and (values == numbers.astype(values.dtype)).all(), (spelling, tp, ours, values, numbers)
        subprocess.run([f"{BIN}/minimax-verify", path, "--source", src, "-q"], check=True, stdout=subprocess.DEVNULL)


def nll(packed):
    done = subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", "tests/data/tiny-m2/held-out-ids.json", "--window", "64", "--limit", "1",
                           "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)["nll"]


if __name__ == "__main__":
    for k in ("k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale", "k_cache.scale", "k_scale", "attn.k_scale"):
        v = k.replace("k_proj", "v_proj").replace("qv_proj", "qkv_proj").replace("k_cache", "v_cache").replace("k_scale", "v_scale")
        assert v != k
        check([k, v], scalar, {"k_scale": (k, "F32"), "v_scale": (v, "F32")}, tps=("1",))
    two = {"k_scale": ("k_scale", "F32"), "v_scale": ("v_scale", "F32")}
    check(["k_scale", "v_scale"], heads, two)
    check(["k_scale", "v_scale"], heads_of_tokens, two)
    for theirs in ("q_scale", "attn.q_scale"):
        check([theirs, "k_scale", "v_scale"], all_heads, {"q_scale": (theirs, "F32"), **two})
    check(["k_scale", "v_scale"], one, {n: (n, "F16") for n in two})
    check(["k_scale", "v_scale"], one, two, "--kv-scales", "f32", tps=("2",))
    check(["kv_scale"], scalar, {n: ("kv_scale", "F32") for n in two}, tps=("1", "2"))
    check(["attn.q_scale", "k_scale", "v_scale", "k_proj.k_zero_point", "attn.v_zero_point"], scalar,
          {"q_scale": ("attn.q_scale", "F32"), "k_zero_point": ("k_proj.k_zero_point", "F32"), "v_zero_point": ("attn.v_zero_point", "F32"), **two},
          tps=("8",))

    # Dropped, there is nothing of them; and nothing else is another for them.
    src = source("tiny-m2", "src", layers(heads, ["k_scale", "v_scale"]))
    with_them, without = convert(src, "with", "--tp", "2"), convert(src, "without", "--tp", "2", "--kv-scales", "drop")
    assert len(found(Packed(with_them))) == 8 and not found(Packed(without))
    subprocess.run([f"{BIN}/minimax-verify", without, "--source", src, "-q"], check=True, stdout=subprocess.DEVNULL)
    assert nll(with_them) == nll(without)

    # Per head of queries too: cut anew, and back under the names of Hugging Face.
    per_head = source("tiny-m2", "per-head", layers(all_heads, ["q_scale", "k_scale", "v_scale"]))
    packed, again = convert(per_head, "packed", "--tp", "8"), convert(per_head, "direct", "--tp", "2")
    assert {t: list(v[1]) for t, v in found(Packed(convert(packed, "again", "--tp", "2"))).items()} == {t: list(v[1]) for t, v in found(Packed(again)).items()}
    hf = Unsharded(convert(packed, "hf", "--layout", "hf"))
    assert (hf.tensors["model.layers.3.self_attn.q_scale"][0].view(np.float32).reshape(-1) == all_heads(4).reshape(-1)).all()
    assert "E_SHAPE" in convert(source("tiny-m2", "odd-src", layers(lambda x: np.ones(QUERY_HEADS - 1, np.float32), ["q_scale"])), "odd", status=3)

    # Unsharded, under the name that compressed-tensors gives them; one for both stays one.
    hf = Unsharded(convert(src, "hf", "--layout", "hf"))
    assert (hf.tensors["model.layers.3.self_attn.v_scale"][0].view(np.float32) == heads(14)).all()
    hf = Unsharded(convert(source("tiny-m2", "src", layers(scalar, ["attn.kv_scale"])), "hf", "--layout", "hf"))
    assert sum("_scale" in n and "_inv" not in n for n in hf.tensors) == 4 and "model.layers.0.self_attn.kv_scale" in hf.tensors

    # Two for the same, another shape than one or the heads', and those of layers without a cache are refused.
    assert "E_DUP_TENSOR" in convert(source("tiny-m2", "src", layers(scalar, ["k_scale", "k_proj.k_scale"])), "no", status=3)
    for own in ("k_scale", "v_scale"):
        for layout in ("packed", "hf"):
            said = convert(source("tiny-m2", "src", layers(scalar, [own, "kv_scale"])), "no", "--layout", layout, status=3)
            assert "E_DUP_TENSOR" in said and f'found 1.375 for the keys and values of head 0, expected 0.125 as "model.layers.0.self_attn.{own}"' in said, said
            convert(TMP + "/src", "dropped", "--layout", layout, "--kv-scales", "drop")
    assert "E_SHAPE" in convert(source("tiny-m2", "src", layers(scalar, ["k_scale"]) | layers(lambda x: np.full(3, x, np.float32), ["kv_scale"])), "no", status=3)

    # The same number under both names is one scale: the other's, where k or v alone has its own.
    def same(x):
        return np.array(0.125, np.float32)
    for own in (["k_scale"], ["v_scale"], ["k_scale", "v_scale"], ["k_proj.k_scale", "q_scale"]):
        src = source("tiny-m2", "src", layers(same, [*own, "attn.kv_scale"]))
        for options in ([], ["--kv-scales", "f32"]):
            packed = convert(src, "out", "--tp", "2", *options)
            got = found(Packed(packed))
            assert len(got) == 4 * (3 if "q_scale" in own else 2) and all((v == 0.125).all() for _, v in got.values()), (own, got)
            subprocess.run([f"{BIN}/minimax-verify", packed, "--source", src, "-q"], check=True, stdout=subprocess.DEVNULL)
        again = convert(convert(packed, "hf", "--layout", "hf"), "again", "--tp", "2")
        assert found(Packed(again)).keys() == got.keys()
        hf = Unsharded(convert(src, "hf", "--layout", "hf"))
        assert "model.layers.1.self_attn.v_scale" in hf.tensors or "model.layers.1.self_attn.kv_scale" in hf.tensors, hf.tensors.keys()
        convert(src, "dropped", "--kv-scales", "drop")
    src = source("tiny-m2", "src", layers(lambda x: np.full(HEADS, 0.5, np.float16), ["k_scale"]) | layers(lambda x: np.array(0.5, np.float32), ["kv_scale"]))
    assert all((v == 0.5).all() for _, v in found(Packed(convert(src, "out"))).values())
    for shape in ((3,), (HEADS, 1), (1, HEADS, 1), (HEADS, 1, 2), (1, HEADS, 1, 1)):
        assert "E_SHAPE" in convert(source("tiny-m2", "src", layers(lambda x: np.full(shape, x, np.float32), ["k_scale"])), "no", status=3)
    assert "E_DTYPE" in convert(source("tiny-m2", "src", layers(lambda x: np.full(1, x, np.int32), ["k_scale"])), "no", status=3)

    # Engines divide by a scale: none is 0, negative or not finite, also not by way of --allow-nonfinite.
    for number in (0, -0.5, np.nan, np.inf):
        src = source("tiny-m2", "src", layers(lambda x: np.array([1, number], np.float16), ["k_scale", "v_scale"]))
        for options in ([], ["--kv-scales", "f32", "--allow-nonfinite"], ["--layout", "hf"]):
            said = convert(src, "no", *options, status=3)
            assert "E_Q_SCALE" in said and "at row 1, expected a positive number; --kv-scales drop" in said, said
        convert(src, "dropped", "--kv-scales", "drop")
    packed = packed_files.Packed(convert(source("tiny-m2", "src", layers(heads, ["k_scale", "v_scale"])), "out", "--tp", "2"))
    packed.save(TMP + "/whole")
    subprocess.run([f"{BIN}/minimax-verify", TMP + "/whole", "-q"], check=True)
    _, stored = next(packed.planes(packed.tensor("attn.v_scale")))
    stored[2][:] = bytes(len(stored[2]))
    packed.save(TMP + "/zero")
    done = subprocess.run([f"{BIN}/minimax-verify", TMP + "/zero", "-q"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 6 and "E_SCALE" in done.stderr and "found scale 0 of a KV cache at element 0" in done.stderr, done
    assert "E_NONFINITE" in convert(source("tiny-m2", "src", layers(lambda x: np.full(1, np.nan, np.float32), ["k_zero_point"])), "no", status=3)
    assert "E_UNKNOWN" in convert(source("tiny-m1", "src", layers(scalar, ["k_scale"], 1)), "no", status=3)
    m1 = {f"model.layers.2.self_attn.{n}": scalar(7) for n in ("k_proj.k_scale", "v_proj.v_scale")}
    assert len(found(Packed(convert(source("tiny-m1", "src", m1), "m1", "--tp", "2")))) == 2
    assert "E_RECIPE" in convert("tests/data/tiny-m2", "no", "--quant", "bf16; kv_scales=maybe", status=2)
    print("KV scales: every spelling kept under one name, cut with the heads, cast and dropped on request")
