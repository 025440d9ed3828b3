#!/usr/bin/env python3
"""--layout hf, read back from the conventions of other engines alone: for both small checkpoints and every scheme that a dialect spells,
files, index and config are what those engines expect, and every weight equals that of the packed checkpoint of the same scheme bit for bit.
Our own files as a source give the packed checkpoint of the original. What a dialect cannot hold is refused by name."""
import copy
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import safetensors
from packed import Packed
from unsharded import E2M1, E4M3, Unsharded, numbers

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
TMP = os.environ["TMPDIR"]
PART = 1 << 20  # --part-size


def group(fmt, weights, inputs):
    """A compressed-tensors config group for every linear module."""
    return {"targets": ["Linear"], "format": fmt, "weights": weights, "input_activations": inputs, "output_activations": None}


def ct(fmt, weights, inputs):
    return {"quant_method": "compressed-tensors", "format": fmt, "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group(fmt, weights, inputs)}}


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
MX = {"symmetric": True, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": None}
PER_TOKEN = {"strategy": "token", "dynamic": True}
BLOCK = ct("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128], "group_size": None, "dynamic": False},
           FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True})
NVFP4 = ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
                                    "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}, None)
HF_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "float8_e4m3fn"}

# scheme, dialect -> quantization_config but for the list of modules left out, which stands under the given key
CONFIGS = {
    ("block_fp8", "fp8"): (HF_FP8 | {"weight_block_size": [128, 128]}, "modules_to_not_convert"),
    ("tensor_wise_fp8", "fp8"): (HF_FP8 | {"weight_block_size": None}, "modules_to_not_convert"),
    ("block_fp8", "ct"): (BLOCK, "ignore"),
    ("channel_fp8", "ct"): (ct("float-quantized", FLOAT8 | {"strategy": "channel", "dynamic": False}, FLOAT8 | PER_TOKEN), "ignore"),
    ("tensor_wise_fp8", "ct"): (ct("float-quantized", FLOAT8 | {"strategy": "tensor", "dynamic": False}, FLOAT8 | PER_TOKEN), "ignore"),
    ("int8", "ct"): (ct("int-quantized", INT8 | {"strategy": "channel", "dynamic": False}, INT8 | PER_TOKEN), "ignore"),
    ("w4a16", "ct"): (ct("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
                                            "dynamic": False, "actorder": None}, None), "ignore"),
    ("w4afp8", "ct"): (ct("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
                                             "dynamic": False, "actorder": None}, FLOAT8 | PER_TOKEN), "ignore"),
    ("nvfp4a16", "ct"): (NVFP4, "ignore"),
    ("mxfp4", "ct"): (ct("mxfp4-pack-quantized", {"num_bits": 4, "dynamic": False} | MX, {"num_bits": 4, "dynamic": True} | MX), "ignore"),
    ("mxfp8", "ct"): (ct("mxfp8-quantized", {"num_bits": 8, "dynamic": False} | MX, {"num_bits": 8, "dynamic": True} | MX), "ignore"),
    ("nvfp4a16", "modelopt"): ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4",
                                "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                                    "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
                                "producer": {"name": "modelopt", "version": "0.41.0"}}, "ignore"),
}
# Suffixes of a quantised module, with types.
SPELT = {
    ("block_fp8", "fp8"): {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    ("tensor_wise_fp8", "fp8"): {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    ("block_fp8", "ct"): {"weight": "F8_E4M3", "weight_scale": "F32"},
    ("channel_fp8", "ct"): {"weight": "F8_E4M3", "weight_scale": "F32"},
    ("tensor_wise_fp8", "ct"): {"weight": "F8_E4M3", "weight_scale": "F32"},
    ("int8", "ct"): {"weight": "I8", "weight_scale": "F32"},
    ("w4a16", "ct"): {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    ("w4afp8", "ct"): {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    ("nvfp4a16", "ct"): {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32"},
    ("mxfp4", "ct"): {"weight_packed": "U8", "weight_scale": "U8"},
    ("mxfp8", "ct"): {"weight": "F8_E4M3", "weight_scale": "U8"},
    ("nvfp4a16", "modelopt"): {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
}


def scale_shape(scheme, dialect, rows, cols):
    return {"block_fp8": [-(-rows // 128), -(-cols // 128)], "channel_fp8": [rows, 1], "int8": [rows, 1], "tensor_wise_fp8": [] if dialect == "fp8" else [1],
            "w4a16": [rows, cols // 128], "w4afp8": [rows, cols // 128], "nvfp4a16": [rows, cols // 16], "mxfp4": [rows, cols // 32], "mxfp8": [rows, cols // 32]}[scheme]


def run(source, out, *options):
    return subprocess.run([CONVERT, source, "-o", out, "--quiet", *options], capture_output=True, text=True, check=False)


def convert(source, name, *options):
    out = os.path.join(TMP, name)
    done = run(source, out, *options)
    assert done.returncode == 0, done.stderr
    return out


def packed_weights(pack):
    """source name -> weights in f32, code · (scale · scale), from the packed format's own description."""
    for t in pack.manifest["tensors"]:
        planes = [list(pack.whole(t, plane)) for plane in t["planes"]]
        for i, (source, codes) in enumerate(planes[0]):
            if len(planes) == 1:
                value = numbers(codes, t["planes"][0]["dtype"])
            else:
                if t["planes"][0]["cell"] == [1, 2]:  # a byte of two stands under both
                    codes = codes >> (4 * (np.arange(codes.shape[2]) & 1)).astype(np.uint8) & 15
                if t["scheme"] == "w4a16":
                    value = codes.astype(np.float32) - 8
                elif t["scheme"] == "w4afp8":  # two's complement
                    value = (codes ^ 8).astype(np.float32) - 8
                elif t["scheme"] == "int8":
                    value = codes.view(np.int8).astype(np.float32)
                else:
                    value = (E2M1 if t["planes"][0]["cell"] == [1, 2] else E4M3)[codes]
                scale = numbers(planes[1][i][1], t["planes"][1]["dtype"])
                for plane, elements in zip(t["planes"][2:], planes[2:]):
                    scale = scale * numbers(elements[i][1], plane["dtype"])
                value = value * scale
            for e in range(t["whole_lead"] or 1):
                yield source.replace("{e}", str(e)), value[e]


def check_files(hf, model):
    """Names, sizes, index, metadata; and the safetensors package sees the same."""
    listed = list(hf.files)
    count = len(listed)
    assert listed == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] and count > 3, listed
    total = 0
    for name, part in hf.files.items():
        assert len(part.bytes) <= PART or len(part.tensors) == 1, f"{name}: {len(part.bytes)} bytes"
        assert part.metadata["format"] == "pt", "what transformers loads"
        theirs = dict(safetensors.deserialize(part.bytes))
        assert theirs.keys() == part.tensors.keys() == {t for t, f in hf.index["weight_map"].items() if f == name}, name
        for tensor, (dtype, shape, begin, end) in part.tensors.items():
            assert (theirs[tensor]["dtype"], theirs[tensor]["shape"]) == (dtype, shape) and bytes(theirs[tensor]["data"]) == part.bytes[begin:end]
            total += end - begin
    assert hf.index["metadata"]["total_size"] == total
    layers = [[int(t.split(".")[2]) for t in part.tensors if t.startswith("model.layers.")] for part in hf.files.values()]
    layers = [x for x in layers if x]
    assert all(max(x) <= min(y) for x, y in zip(layers, layers[1:])), "files follow layer order"
    extra = {"hf_quant_config.json"} if hf.config.get("quantization_config", {}).get("quant_method") == "modelopt" else set()
    kept = {f for f in ("tokenizer.json", "generation_config.json", "chat_template.jinja") if os.path.exists(f"tests/data/{model}/{f}")}
    assert set(os.listdir(hf.path)) == set(listed) | {"config.json", "model.safetensors.index.json", "minimax-digests.json", "README.md"} | kept | extra
    for name in kept:
        with open(os.path.join(hf.path, name), "rb") as f, open(f"tests/data/{model}/{name}", "rb") as g:
            assert f.read() == g.read(), name


def left_out(hf, source):
    """Modules of matrices that are not quantised, by full name and by those that engines give them: q, k and v as one, experts of a layer as
    one where none of them is quantised, "mlp" for "block_sparse_moe"."""
    quantised = set(hf.quantised())
    plain = {m for m, t in source.modules.items() if t.get("weight", t.get("e_score_correction_bias"))[0].ndim == 2 and m not in quantised}
    for layer in {m.split(".experts.")[0] for m in source.modules if ".experts." in m}:
        if not any(m.startswith(layer + ".experts.") for m in quantised):
            plain |= {layer + ".experts", layer.replace("block_sparse_moe", "mlp") + ".experts"}
            if hf.config["quantization_config"]["quant_method"] == "compressed-tensors":
                plain.add("re:^" + layer.replace(".", r"\.").replace("block_sparse_moe", "(block_sparse_moe|mlp)") + r"\.experts\..*$")
    fused = {m[:-len("q_proj")] + "qkv_proj" for m in plain if m.endswith("q_proj")}
    gates = {m.replace(".block_sparse_moe.", ".mlp.") for m in plain if m.endswith(".gate")}
    return plain | fused | gates


def check_config(hf, source, expected, key):
    theirs, ours = copy.deepcopy(source.config), copy.deepcopy(hf.config)
    theirs.pop("quantization_config", None)
    found = ours.pop("quantization_config", None)
    assert theirs == ours, "the rest of config.json"
    if expected is None:
        assert found is None, found
        return
    listed = found.pop(key)
    assert len(listed) == len(set(listed)) and set(listed) == left_out(hf, source), set(listed) ^ left_out(hf, source)
    assert found == expected, found
    # every way in which engines match the list gives the same answer
    for module in source.modules:
        exact = module in listed
        assert any(entry in module for entry in listed if not entry.startswith("re:")) == exact or "norm" in module or module.endswith("block_sparse_moe"), module
        assert any(module == entry or module.endswith("." + entry) for entry in listed) == exact, module
    if key == "ignore" and found["quant_method"] == "modelopt":
        with open(os.path.join(hf.path, "hf_quant_config.json"), encoding="utf-8") as f:
            own = json.load(f)
        assert own == {"producer": {"name": "modelopt", "version": "0.41.0"},
                       "quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": listed}}


def check_spelling(hf, source, scheme, dialect):
    quantised = hf.quantised()
    assert quantised
    for module in quantised:
        rows, cols = source.modules[module]["weight"][0].shape
        t = hf.modules[module]
        assert {s: d for s, (_, d) in t.items()} == SPELT[scheme, dialect], module
        shape = {s: list(x.shape) for s, (x, _) in t.items()}
        assert shape.get("weight_scale", shape.get("weight_scale_inv")) == scale_shape(scheme, dialect, rows, cols), (module, shape)
        codes = {"U8": [rows, cols // 2], "I32": [rows, cols // 8]}.get(t.get("weight_packed", t.get("weight"))[1], [rows, cols])
        assert shape.get("weight_packed", shape.get("weight")) == codes, (module, shape)
        assert shape.get("weight_global_scale", [1]) == [1] and shape.get("weight_scale_2", []) == [], (module, shape)


def differences(hf, wanted):
    """Modules whose weights are not the packed ones. A global scale that is stored as its inverse may cost one rounding each way."""
    wrong = []
    for name, want in wanted.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight":
            got = numbers(*hf.modules[module][suffix])
        else:
            got = hf.weight(module)
        want = want.reshape(got.shape)
        if "weight_global_scale" in hf.modules[module]:
            same = np.abs(got.astype(np.float64) - want) <= 2.0**-22 * np.abs(want)
        else:
            same = got == want
        if not same.all():
            wrong.append(name)
    return wrong


def check_groups(hf):
    """One global scale for q, k and v and for w1 and w3 of an expert."""
    for module, t in hf.modules.items():
        for suffix in ("weight_global_scale", "weight_scale_2"):
            for here, there in (("q_proj", "k_proj"), ("q_proj", "v_proj"), (".w1", ".w3")):
                if suffix in t and module.endswith(here):
                    assert (t[suffix][0] == hf.modules[module[:-len(here)] + there][suffix][0]).all(), module


def one(model, scheme, dialect, *options):
    source_dir = f"tests/data/{model}"
    source = Unsharded(source_dir)
    out = convert(source_dir, "hf", "--layout", "hf", "--quant", scheme, "--part-size", str(PART), *(["--dialect", dialect] if dialect else []),
                  *options)
    packed = convert(source_dir, "packed", "--quant", scheme, *options)
    hf = Unsharded(out)
    wanted = dict(packed_weights(Packed(packed)))
    assert wanted.keys() == {m + "." + s for m, t in source.modules.items() for s in t if not s.endswith("_scale_inv")}
    check_files(hf, model)
    if (scheme, dialect) in CONFIGS:
        check_config(hf, source, *CONFIGS[scheme, dialect])
        check_spelling(hf, source, scheme, dialect)
    wrong = differences(hf, wanted)
    assert not wrong, f"{model} {scheme} {dialect}: {wrong[:3]}"
    check_groups(hf)
    shutil.rmtree(packed)
    return hf, wanted


def finds_one_wrong_bit(hf, wanted):
    """The comparison sees a bit of the last tensor of the first file."""
    name, (elements, dtype) = next((n, t) for n, t in hf.tensors.items() if n.endswith(("weight", "weight_packed")) and t[0].ndim == 2)
    module, _, suffix = name.rpartition(".")
    damaged = elements.copy()
    damaged[-1, -1] ^= 1
    hf.modules[module][suffix] = (damaged, dtype)
    return differences(hf, wanted) == [module + ".weight"]


def round_trip(model, scheme, dialect=None):
    """Packed shards of our own unsharded files are those of the original, byte for byte."""
    layout = ["--layout", "hf", "--part-size", "700K", *(["--dialect", dialect] if dialect else [])]
    hf = convert(f"tests/data/{model}", "trip", *layout, "--quant", scheme)
    a = Packed(convert(f"tests/data/{model}", "direct", "--quant", scheme, "--tp", "2"))
    b = Packed(convert(hf, "again", "--quant", "none", "--tp", "2"))
    assert [t["name"] for t in a.manifest["tensors"]] == [t["name"] for t in b.manifest["tensors"]]
    for x, y in zip(a.manifest["tensors"], b.manifest["tensors"]):
        assert x == y, (x["name"], x, y)
        for r in range(2):
            for plane in x["planes"]:
                assert (a.stored(r, x, plane) == b.stored(r, y, plane)).all(), x["name"]
    c = Unsharded(convert(hf, "twice", *layout))
    first = Unsharded(hf)
    assert first.tensors.keys() == c.tensors.keys() and first.config == c.config
    assert all((first.tensors[n][0] == c.tensors[n][0]).all() and first.tensors[n][1] == c.tensors[n][1] for n in c.tensors)
    for name in ("trip", "direct", "again", "twice"):
        shutil.rmtree(os.path.join(TMP, name))


def refused(status, code, words, *options, source="tests/data/tiny-m2"):
    out = os.path.join(TMP, "refused")
    done = run(source, out, *options)
    assert (done.returncode, done.stdout) == (status, "") and done.stderr.count("\n") == 1 and code in done.stderr, (options, done)
    assert all(word in done.stderr for word in words), (options, done.stderr)
    assert [n for n in os.listdir(TMP) if "refused" in n] == [], os.listdir(TMP)


def mixed():
    """Two schemes in one checkpoint: each module is matched by exactly one config group, by name before by class."""
    hf, _ = one("tiny-m2", "fp8_attention_nvfp4_experts", None)
    config = hf.config["quantization_config"]
    named, general = config["config_groups"]["group_0"], config["config_groups"]["group_1"]
    assert config["format"] == "mixed-precision" and len(config["config_groups"]) == 2
    assert named == BLOCK["config_groups"]["group_0"] | {"targets": [
        rf"re:^model\.layers\.\d+\.self_attn\.{p}$" for p in ("q_proj", "qkv_proj", "k_proj", "v_proj", "o_proj")]}
    assert general == NVFP4["config_groups"]["group_0"]
    for module in hf.quantised():
        assert ("weight_packed" in hf.modules[module]) == (".experts." in module), module
    shutil.rmtree(hf.path)
    # a scheme for some tensors of a rule only: by name
    hf, _ = one("tiny-m2", "none", None, "--override", "model.layers.2.self_attn.o_proj.weight=channel_fp8")
    groups = hf.config["quantization_config"]["config_groups"]
    assert groups["group_0"]["targets"] == ["model.layers.2.self_attn.o_proj"] and groups["group_1"]["targets"] == ["Linear"]
    shutil.rmtree(hf.path)
    print("mixed schemes hold")


def keeping(model):
    """Modules that the user keeps are listed, and the experts of a layer also as one module."""
    for dialect in ("ct", "modelopt"):
        options = ["--override", "model.layers.1.block_sparse_moe.experts.*=bf16", "--override", "*.layers.0.*.experts.0.*=bf16", "--override", "*self_attn.*_proj.weight=bf16"]
        out = convert(f"tests/data/{model}", "hf", "--layout", "hf", "--quant", "nvfp4a16", "--dialect", dialect, "--part-size", str(PART), *options)
        hf = Unsharded(out)
        expected, key = CONFIGS["nvfp4a16", dialect]
        check_config(hf, Unsharded(f"tests/data/{model}"), expected, key)
        listed = hf.config["quantization_config"][key]
        assert "model.layers.1.block_sparse_moe.experts" in listed and "model.layers.0.block_sparse_moe.experts" not in listed
        assert "model.layers.1.block_sparse_moe.experts.3.w2" in listed
        shutil.rmtree(out)


def main():
    for model in ("tiny-m1", "tiny-m2"):
        for scheme, dialect in [("none", None), ("bf16", None), ("f32", None), *CONFIGS]:
            options = []
            if model == "tiny-m2" and scheme in ("w4a16", "w4afp8"):  # 192 columns are not groups of 128
                options = ["--override", "*.w2.weight=bf16"]
            hf, wanted = one(model, scheme, dialect, *options)
            assert finds_one_wrong_bit(hf, wanted), (model, scheme, dialect)
            print(f"{model} {scheme} {dialect or ''}: {len(hf.files)} files, {len(hf.tensors)} tensors, {len(hf.quantised())} modules quantised")
            shutil.rmtree(hf.path)
        keeping(model)
    mixed()
    round_trip("tiny-m1", "none")
    round_trip("tiny-m2", "none")
    for scheme, dialect in [("bf16", None), *CONFIGS]:
        # not: a reader cannot know before it reads that w1 and w3 share their tensor-wise scale, and 1/(1/x) is not x
        # and whose the inputs' rounding is, no file of W4A8 says: its codes are w4a16's
        if scheme not in ("tensor_wise_fp8", "w4afp8") and (scheme, dialect) != ("nvfp4a16", "ct"):
            round_trip("tiny-m1", scheme, dialect)
            if scheme not in ("w4a16", "w4afp8"):
                round_trip("tiny-m2", scheme, dialect)
    print("our own unsharded files give the packed shards of their source")
    layout = ["--layout", "hf"]
    for scheme in ("nvfp4", "w4a8"):
        refused(4, "E_DIALECT", [scheme, "nvfp4a16"], *layout, "--quant", scheme)
    for scheme, dialect in [("int8", "fp8"), ("nvfp4a16", "fp8"), ("block_fp8", "modelopt"), ("mxfp4", "modelopt"), ("nvfp4", "modelopt")]:
        refused(4, "E_DIALECT", [scheme, dialect], *layout, "--quant", scheme, "--dialect", dialect)
    refused(4, "E_DIALECT", ["w4a16", "192", "128", "experts.0.w2.weight"], *layout, "--quant", "w4a16")
    refused(4, "E_DIALECT", ["lm_head"], *layout, "--quant", "int8", "--override", "lm_head.weight=int8")
    refused(4, "E_DIALECT", ["tensor_wise_fp8", "block_fp8"], *layout, "--dialect", "fp8", "--override", "*.w2.weight=tensor_wise_fp8")
    refused(2, "E_USAGE", ["--tp 2"], *layout, "--tp", "2")
    refused(2, "E_USAGE", ["--dialect"], "--dialect", "ct")
    print("what no dialect holds is refused by name")
    replaced()
    print(f"{len(CONFIGS)} spellings of both models hold, safetensors {safetensors.__version__}")


def replaced():
    """--force replaces an unsharded checkpoint of ours, and nothing that holds more."""
    options = ["--layout", "hf", "--quant", "bf16"]
    out = convert("tests/data/tiny-m1", "forced", *options)
    assert run("tests/data/tiny-m1", out, *options).returncode == 2
    assert run("tests/data/tiny-m1", out, *options, "--resume").returncode == 0, "complete already"
    with open(os.path.join(out, "notes.txt"), "w", encoding="utf-8") as f:
        f.write("mine")
    done = run("tests/data/tiny-m1", out, "--layout", "hf", "--quant", "int8", "--force")
    assert done.returncode == 2 and "notes.txt" in done.stderr and os.path.exists(f.name), done
    os.remove(f.name)
    assert run("tests/data/tiny-m1", out, "--layout", "hf", "--quant", "int8", "--force").returncode == 0
    assert Unsharded(out).config["quantization_config"]["format"] == "int-quantized"
    assert run("tests/data/tiny-m1", out, "--force").returncode == 0 and "manifest.json" in os.listdir(out)


if __name__ == "__main__":
    sys.exit(main())
