#!/usr/bin/env python3
"""Mixed checkpoints as vLLM and SGLang read their quantization_config: engines ask for modules that they fuse (qkv_proj; the experts of a
layer, by names that no file has), and must find the scheme of the parts. The rules below are those of vLLM 0.11 and SGLang 0.5.23
(compressed_tensors/utils.py: find_matched_target, should_ignore_layer; get_scheme_dict and the MoE method above them), written anew. With
SGLANG naming that package's folder, its own functions are asked too, and must agree."""
import ast
import json
import os
import re
import shutil
import subprocess

CONVERT, TMP = os.path.join(os.environ["BUILD"], "bin", "minimax-convert"), os.environ["TMPDIR"]
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def equal(target, name, within=False):
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target.lower() in name.lower() if within else target == name


def ignored(name, ignore):
    """Whether a layer is left unquantised: a fused one by its parts, which must agree."""
    last = name.rsplit(".", 1)[-1]
    if last in FUSED and name not in ignore:
        parts = {any(equal(t, name.replace(last, p)) for t in ignore) for p in FUSED[last]}
        assert len(parts) == 1, f"{name}: parts differ"
        return parts.pop()
    return any(equal(t, name) for t in ignore)


def matched(name, kind, targets):
    """By name, then by the class's name, then by the parts of a fused layer: the first of each that fits."""
    for target in targets:
        if equal(target, name):
            return target
    for target in targets:
        if equal(target, kind, True):
            return target
    fused = next((f for f in FUSED if name.endswith(f)), None)
    parts = [next((t for t in targets if equal(t, name.replace(fused, p))), None) for p in FUSED.get(fused, [])]
    return parts[0] if parts and all(parts) else None


def theirs(folder):
    """SGLang's own two functions, without torch."""
    path = os.path.join(folder, "srt/layers/quantization/compressed_tensors/utils.py")
    with open(path, encoding="utf-8") as f:
        tree = ast.parse(f.read())
    wanted = {"should_ignore_layer", "check_equal_or_regex_match", "find_matched_target", "_find_first_match", "_is_equal_or_regex_match",
              "_match_fused_layer", "_is_equal", "is_activation_quantization_format"}
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    import types
    import typing
    scope = {"re": re, "Module": object, "MappingProxyType": types.MappingProxyType, **{n: getattr(typing, n) for n in typing.__all__}}
    exec(compile(tree, path, "exec"), scope)  # noqa: S102  (an installed package's functions)
    return scope


SGLANG = theirs(os.environ["SGLANG"]) if "SGLANG" in os.environ else None


def scheme(config, name, kind):
    """The config group of a layer; None where it stays as it is."""
    targets = {t: g for g, group in config["config_groups"].items() for t in group["targets"]}
    if "Linear" in targets:
        targets["FusedMoE"] = targets["Linear"]
    left = ignored(name, config["ignore"])
    found = None if left else matched(name, kind, targets)
    if SGLANG:
        module = type(kind, (), {})()
        assert SGLANG["should_ignore_layer"](name, ignore=config["ignore"], fused_mapping=FUSED) == left, name
        assert left or SGLANG["find_matched_target"](name, module, targets.keys(), FUSED) == found, name
    assert left or found, f"{name}: no group"
    return None if left else targets[found]


def experts(config, layer, moe):
    """Of a layer's experts: engines ask for three projections of expert 0 by transformers' names, and they must agree."""
    parts = {scheme(config, f"model.layers.{layer}.{moe}.experts.0.{p}", "FusedMoE") for p in ("gate_proj", "up_proj", "down_proj")}
    assert len(parts) == 1, (layer, moe, parts)
    return parts.pop()


def config_of(model, quant, *options):
    out = os.path.join(TMP, "hf")
    subprocess.run([CONVERT, f"tests/data/{model}", "-o", out, "-q", "--layout", "hf", "--dialect", "ct", "--quant", quant, *options], check=True)
    with open(os.path.join(out, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    shutil.rmtree(out)
    return config["quantization_config"], config["num_hidden_layers"]


def bits(config, group):
    """(bits, type, strategy) of a group's weights; None for none."""
    w = group and config["config_groups"][group]["weights"]
    return w and (w["num_bits"], w["type"], w["strategy"])


BLOCK, NVFP4, INT4, CHANNEL = (8, "float", "block"), (4, "float", "tensor_group"), (4, "int", "group"), (8, "float", "channel")
CASES = [  # model, quant, options, scheme of attention, of experts, of the experts of layer 0
    ("tiny-m2", "fp8_attention_nvfp4_experts", [], BLOCK, NVFP4, NVFP4),
    ("tiny-m1", "fp8_attention_int4_experts", [], BLOCK, INT4, INT4),
    ("tiny-m2", "block_fp8; *.experts.*=bf16", [], BLOCK, None, None),
    ("tiny-m2", "nvfp4a16", ["--override", "*self_attn.*_proj.weight=bf16"], None, NVFP4, NVFP4),
    ("tiny-m2", "nvfp4a16", ["--override", "model.layers.0.*.experts.*=channel_fp8"], NVFP4, NVFP4, CHANNEL),
    ("tiny-m2", "nvfp4a16", ["--override", "model.layers.0.*.experts.*=bf16"], NVFP4, NVFP4, None),
    ("tiny-m2", "none; *.experts.*=int8; *self_attn.*_proj.weight=channel_fp8", [], CHANNEL, (8, "int", "channel"), (8, "int", "channel")),
]


def main():
    asked = 0
    for model, quant, options, attention, stacked, first in CASES:
        config, layers = config_of(model, quant, *options)
        for layer in range(layers):
            for moe in ("block_sparse_moe", "mlp"):
                assert bits(config, experts(config, layer, moe)) == (first if layer == 0 else stacked), (quant, layer, moe)
                assert scheme(config, f"model.layers.{layer}.{moe}.gate", "ReplicatedLinear") is None, (quant, layer, moe)
                asked += 4
            for name, kind in (("qkv_proj", "QKVParallelLinear"), ("o_proj" if model == "tiny-m2" else "qkv_proj", "RowParallelLinear")):
                found = bits(config, scheme(config, f"model.layers.{layer}.self_attn.{name}", kind))
                assert found == attention, (quant, layer, name, found)
                asked += 1
        assert scheme(config, "lm_head", "ParallelLMHead") is None
    print(f"{asked} layers of {len(CASES)} mixed checkpoints find their scheme{', by SGLang itself too' if SGLANG else ''}")


if __name__ == "__main__":
    main()
