#!/usr/bin/env python3
"""Static scales of activations: those of --act-scales and those that a source has itself are in the packed manifest and in every
--layout hf dialect that has them, and go from one to the other unchanged."""
import json
import os
import shutil
import sys

import numpy as np
from layout_hf import CONFIGS, FLOAT8, HF_FP8, check_config, convert, ct, refused
from packed import Packed
from unsharded import Unsharded, numbers

MODEL = "tests/data/tiny-m2"
TMP = os.environ["TMPDIR"]
TENSOR = {"strategy": "tensor", "dynamic": False}
NVFP4 = CONFIGS["nvfp4a16", "ct"][0]["config_groups"]["group_0"]["weights"]
MODELOPT4 = CONFIGS["nvfp4a16", "modelopt"][0]["config_groups"]["group_0"]["weights"]
# scheme, dialect -> quantization_config, its list of modules left out, suffix and shape of the scale
SPELT = {
    ("tensor_wise_fp8", "fp8"): (HF_FP8 | {"activation_scheme": "static", "weight_block_size": None}, "modules_to_not_convert", "activation_scale", []),
    ("tensor_wise_fp8", "ct"): (ct("float-quantized", FLOAT8 | TENSOR, FLOAT8 | TENSOR), "ignore", "input_scale", [1]),
    ("nvfp4", "ct"): (ct("nvfp4-pack-quantized", NVFP4, NVFP4 | {"dynamic": "local"}), "ignore", "input_global_scale", [1]),
    ("nvfp4", "modelopt"): (CONFIGS["nvfp4a16", "modelopt"][0] | {"quant_algo": "NVFP4", "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": MODELOPT4, "input_activations": MODELOPT4}}}, "ignore", "input_scale", []),
}
LARGEST = {"tensor_wise_fp8": np.float32(448), "nvfp4": np.float32(2688)}


def group(module):
    """The modules that share a scale: q, k and v; w1 and w3 of one expert, or of all experts of a layer."""
    own = module.replace(".k_proj", ".q_proj").replace(".v_proj", ".q_proj").replace(".w3", ".w1")
    head, _, tail = own.partition(".experts.")
    return own, f"{head}.experts.{tail.partition('.')[2]}" if tail else own


def amaxes(source):
    """A largest magnitude for every module, no two alike."""
    modules = [m for m in source.modules if ".experts." in m or m.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
    return {m: np.float32(1 + 7 * i % 64 + i / 4096) for i, m in enumerate(sorted(modules))}


def largest(values, level):
    most = {}
    for module, v in values.items():
        most[group(module)[level]] = max(most.get(group(module)[level], np.float32(0)), v)
    return {m: most[group(m)[level]] for m in values}


def static(hf, suffix):
    """module -> its scale as a multiplier."""
    found = {m: numbers(*hf.modules[m][suffix]).reshape(-1)[0] for m in hf.quantised()}
    return {m: np.float32(1) / v if suffix == "input_global_scale" else v for m, v in found.items()}


def near(found, want):
    assert found.keys() == want.keys()
    wrong = [m for m in want if abs(found[m] / want[m] - 1) > 2.0**-22]  # 1 / (1 / x) may cost a rounding each way
    assert not wrong, (wrong[:3], [(found[m], want[m]) for m in wrong[:3]])


def in_manifest(path):
    return {t["name"]: t["input_scale"] for t in Packed(path).manifest["tensors"] if "input_scale" in t}


def given(scheme, dialect):
    """--act-scales, into packed shards and into a dialect, and from there back."""
    source = Unsharded(MODEL)
    scales = os.path.join(TMP, "scales.json")
    amax = amaxes(source)
    with open(scales, "w", encoding="utf-8") as f:
        json.dump({m + ".activation_scale": float(v) for m, v in amax.items()}, f)
    config, key, suffix, shape = SPELT[scheme, dialect]
    hf = Unsharded(convert(MODEL, "hf", "--layout", "hf", "--dialect", dialect, "--quant", scheme, "--act-scales", scales))
    check_config_static(hf, source, config, key)
    want = {m: v / LARGEST[scheme] for m, v in largest(amax, 1).items()}
    near(static(hf, suffix), want)
    assert all(list(hf.modules[m][suffix][0].shape) == shape and hf.modules[m][suffix][1] == "F32" for m in hf.quantised())
    direct = in_manifest(convert(MODEL, "direct", "--quant", scheme, "--act-scales", scales))
    assert len(direct) == 16 and sorted(direct.values()) == sorted({float(v) for v in want.values()}), direct
    if scheme == "nvfp4":  # tensor-wise pieces with scales of their own are kept per channel, whose inputs have scales per token
        again = in_manifest(convert(hf.path, "again", "--quant", "none", "--tp", "4"))
        near(again, direct)
        assert dialect == "ct" or again == direct
        changed(hf, suffix)
    for name in ("hf", "direct", "again"):
        shutil.rmtree(os.path.join(TMP, name), ignore_errors=True)
    print(f"{scheme} {dialect}: {len(want)} modules with {suffix}")


def check_config_static(hf, source, config, key):
    """As for weights alone; hf_quant_config.json has the same algorithm."""
    if key == "ignore" and config["quant_method"] == "modelopt":
        with open(os.path.join(hf.path, "hf_quant_config.json"), encoding="utf-8") as f:
            assert json.load(f)["quantization"]["quant_algo"] == config["quant_algo"] == "NVFP4"
        found = dict(hf.config["quantization_config"])
        assert found.pop("ignore") and found == config, found
    else:
        check_config(hf, source, config, key)


def patch(hf, module, suffix, bits):
    name = f"{module}.{suffix}"
    file = hf.index["weight_map"][name]
    _, _, begin, end = hf.files[file].tensors[name]
    with open(os.path.join(hf.path, file), "r+b") as f:
        f.seek(begin)
        f.write(np.float32(bits).tobytes())
    assert end - begin == 4


def changed(hf, suffix):
    """A source with a scale of its own for every module, and an expert that calibration never reached."""
    reciprocal = suffix == "input_global_scale"
    own = {m: v / np.float32(2688) for m, v in amaxes(hf).items()}
    lost = "model.layers.1.block_sparse_moe.experts.5."
    own |= {m: np.float32(0) for m in own if m.startswith(lost)}
    for m, v in own.items():
        patch(hf, m, suffix, np.float32(1) / v if reciprocal and v else v)
    by_layer, by_expert = largest(own, 1), largest(own, 0)
    again = in_manifest(convert(hf.path, "own", "--quant", "none"))
    assert np.allclose(sorted(again.values()), sorted({float(v) for v in by_layer.values()}), rtol=2e-7, atol=0)
    dialect = "ct" if reciprocal else "modelopt"
    out = Unsharded(convert(hf.path, "own-hf", "--layout", "hf", "--dialect", dialect, "--quant", "none"))
    near(static(out, suffix), {m: v or by_layer[m] for m, v in by_expert.items()})
    shutil.rmtree(out.path)
    for bad in (-1, np.nan, np.inf):
        patch(hf, lost + "w2", suffix, bad)
        refused(3, "E_Q_SCALE", [lost + "w2." + suffix], "--quant", "none", source=hf.path)
    shutil.rmtree(os.path.join(TMP, "own"))


def mixed():
    """Experts of one layer under several schemes: each has the scale of its own scheme, and those without static activations have none."""
    source = Unsharded(MODEL)
    amax = amaxes(source)
    scales = os.path.join(TMP, "scales.json")
    with open(scales, "w", encoding="utf-8") as f:
        json.dump({m + ".activation_scale": float(v) for m, v in amax.items()}, f)
    most = largest(amax, 1)
    for rule, first in (("*.experts.0.*=nvfp4", LARGEST["nvfp4"]), ("*.experts.1.*=nvfp4", LARGEST["nvfp4"]), ("*.experts.0.*=bf16", None)):
        hf = Unsharded(convert(MODEL, "hf", "--layout", "hf", "--dialect", "ct", "--quant", "tensor_wise_fp8; " + rule, "--act-scales", scales))
        other = rule.split("*")[1]
        for m, parts in hf.modules.items():
            if m not in amax:
                continue
            if other in m + "." and first is None:
                assert not [s for s in parts if s.startswith("input_")], (m, list(parts))
            elif other in m + ".":
                assert abs(np.float32(1) / numbers(*parts["input_global_scale"]).reshape(-1)[0] / (most[m] / first) - 1) < 1e-6, m
            else:
                assert abs(numbers(*parts["input_scale"]).reshape(-1)[0] / (most[m] / LARGEST["tensor_wise_fp8"]) - 1) < 1e-6, m
        shutil.rmtree(hf.path)
    hf = convert(MODEL, "hf", "--layout", "hf", "--dialect", "ct", "--quant", "nvfp4", "--act-scales", scales)
    out = Unsharded(convert(hf, "own-hf", "--layout", "hf", "--dialect", "ct", "--override", "*.experts.5.*=block_fp8"))
    for m in amax:
        assert any(s.startswith("input_") for s in out.modules[m]) == (".experts.5." not in m), (m, list(out.modules[m]))
    shutil.rmtree(hf)
    shutil.rmtree(out.path)


def main():
    mixed()
    for scheme, dialect in SPELT:
        given(scheme, dialect)
    refused(4, "E_DIALECT", ["nvfp4,", "nvfp4 with static scales"], "--layout", "hf", "--quant", "nvfp4", "--dialect", "modelopt")
    print(f"static scales of {len(SPELT)} spellings hold, and what a source has is kept")


if __name__ == "__main__":
    sys.exit(main())
