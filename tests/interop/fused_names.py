#!/usr/bin/env python3
"""Mixed checkpoints as vLLM and SGLang read their quantization_config: engines ask for modules that they fuse (qkv_proj; the experts of a
layer, by names that no file has), and must find the scheme of the parts. The rules below are those of vLLM 0.33.0 and SGLang 0.5.23
(compressed_tensors/utils.py: find_matched_target, should_ignore_layer; get_scheme_dict and the MoE method above them), written anew. With
VLLM or SGLANG naming the folder of that package, its own functions are asked too, and must agree."""
import ast
import fnmatch
import functools
import json
import os
import re
import shutil
import subprocess
import types
import typing

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
    """By name, then in vLLM by the parts of a fused layer, then by the class's name; in SGLang by the class before the parts."""
    named = next((t for t in targets if equal(t, name)), None)
    fused = next((f for f in FUSED if name.endswith(f)), None)
    parts = [next((t for t in targets if equal(t, name.replace(fused, p))), None) for p in FUSED.get(fused, [])]
    part = parts[0] if parts and all(parts) else None
    classes = {engine: next((t for t in targets if equal(t, class_of(kind, engine), True)), None) for engine in ("vLLM", "SGLang")}
    return {"vLLM": named or part or classes["vLLM"], "SGLang": named or classes["SGLang"] or part}


def class_of(kind, engine):
    return "RoutedExperts" if (kind, engine) == ("FusedMoE", "vLLM") else kind


MATCHING = {"should_ignore_layer", "check_equal_or_regex_match", "find_matched_target", "_find_first_match", "_is_equal_or_regex_match",
            "_match_fused_layer", "_is_equal", "is_activation_quantization_format"}
WANTED = {"SGLang": ("srt/layers/quantization", {"compressed_tensors/utils.py": MATCHING,
                                                 "utils.py": {"is_layer_skipped", "_module_path_match", "_FALLBACK_FUSED_SHARDS"},
                                                 "modelopt_quant.py": {"is_layer_excluded", "_compile_exclusion_pattern"}}),
          "vLLM": ("model_executor/layers/quantization", {"utils/config_utils.py": {"find_matching_patterns", "is_equal_or_regex_match"},
                                                          "compressed_tensors/utils.py": MATCHING, "utils/quant_utils.py": {"is_layer_skipped"},
                                                          "modelopt.py": {"is_layer_excluded"}})}


def theirs(engine):
    """An engine's own functions, without torch; None where its folder is not named."""
    package = os.environ.get(engine.upper())
    if not package:
        return None
    folder, wanted = WANTED[engine]
    scope = {"re": re, "Module": object, "MappingProxyType": types.MappingProxyType, "lru_cache": functools.lru_cache, "functools": functools,
             "fnmatch": fnmatch.fnmatch, **{n: getattr(typing, n) for n in typing.__all__}}
    for name, names in wanted.items():
        path = os.path.join(package, folder, name)
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read())
        tree.body = [n for top in tree.body for n in ([top] + getattr(top, "body", []) * isinstance(top, ast.ClassDef)) if (isinstance(n, ast.FunctionDef) and n.name in names) or
                     (isinstance(n, (ast.Assign, ast.AnnAssign)) and getattr(getattr(n, "target", None) or n.targets[0], "id", None) in names)]
        exec(compile(tree, path, "exec"), scope)  # noqa: S102  (an installed package's functions)
    return scope


OWN = {engine: own for engine in WANTED if (own := theirs(engine))}


def scheme(config, name, kind):
    """The config group of a layer; None where it stays as it is."""
    targets = {t: g for g, group in config["config_groups"].items() for t in group["targets"]}
    if "Linear" in targets:
        targets["FusedMoE"] = targets["RoutedExperts"] = targets["Linear"]
    left = ignored(name, config["ignore"])
    found = matched(name, kind, targets)
    for engine, own in OWN.items():
        module = type(class_of(kind, engine), (), {})()
        assert own["should_ignore_layer"](name, ignore=config["ignore"], fused_mapping=FUSED) == left, (engine, name)
        assert left or own["find_matched_target"](name, module, targets.keys(), FUSED) == found[engine], (engine, name)
    if left:
        return None
    groups = {targets.get(target) for target in found.values()}
    assert len(groups) == 1 and None not in groups, f"{name}: {groups}"
    return groups.pop()


def left_out(config, name):
    """Under fp8 and modelopt, which have one scheme and a list of what stays as it is: whether a layer does. vLLM: is_layer_skipped of
    quant_utils.py, and is_layer_excluded of modelopt.py, whose entries are patterns and parts of names too."""
    entries = config.get("modules_to_not_convert", config.get("ignore", []))
    parts = [name.replace("qkv_proj", p) for p in FUSED["qkv_proj"]] if name.endswith("qkv_proj") else [name]
    listed = {any(name in e for e in entries if "experts" in e) if name.endswith("experts") else part in entries for part in parts}
    assert len(listed) == 1, f"{name}: parts differ"
    modelopt = config["quant_method"] == "modelopt"
    left = listed.pop() or (modelopt and any(e in name or fnmatch.fnmatch(name, e) for e in entries))
    for engine, own in OWN.items():
        quant = types.SimpleNamespace(exclude_modules=entries, packed_modules_mapping=FUSED)
        if not modelopt:
            answer = own["is_layer_skipped"](name, entries, FUSED)
        else:
            answer = own["is_layer_excluded"](quant, name) or \
                (engine == "SGLang" and not name.endswith("experts") and own["is_layer_skipped"](name, entries, FUSED))
        assert answer == left, f"{name}: {answer} in {engine}, {left} by the rules here"
    return left


def experts(config, layer, moe):
    """Of a layer's experts: engines ask for three projections of expert 0 by transformers' names or the checkpoint's, and they must agree."""
    parts = {scheme(config, f"model.layers.{layer}.{moe}.experts.0.{p}", "FusedMoE") for p in ("gate_proj", "up_proj", "down_proj", "w1", "w3", "w2")}
    assert len(parts) == 1, (layer, moe, parts)
    return parts.pop()


def config_of(model, quant, *options, dialect="ct"):
    out = os.path.join(TMP, "hf")
    subprocess.run([CONVERT, f"tests/data/{model}", "-o", out, "-q", "--layout", "hf", "--dialect", dialect, "--quant", quant, *options], check=True)
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


ATTENTION = ["self_attn.qkv_proj", "self_attn.o_proj"]
LISTS = [  # model, quant, dialect, options, what stays as it is
    ("tiny-m2", "block_fp8", "fp8", [], []),
    ("tiny-m2", "block_fp8; *self_attn.*_proj.weight=bf16", "fp8", [], ATTENTION),
    ("tiny-m2", "block_fp8; *.experts.*=bf16", "fp8", [], ["block_sparse_moe.experts"]),
    ("tiny-m2", "block_fp8; model.layers.1.*.experts.*=bf16", "fp8", [], ["1.block_sparse_moe.experts"]),
    ("tiny-m2", "nvfp4a16", "modelopt", [], []),
    ("tiny-m2", "nvfp4a16; *self_attn.*_proj.weight=bf16", "modelopt", [], ATTENTION),
    ("tiny-m2", "nvfp4a16; model.layers.1.*.experts.*=bf16", "modelopt", [], ["1.block_sparse_moe.experts"]),
]


def main():
    asked = 0
    for model, quant, options, attention, stacked, first in CASES:
        config, layers = config_of(model, quant, *options)
        for layer in range(layers):
            for moe in ("block_sparse_moe", "mlp"):
                assert bits(config, experts(config, layer, moe)) == (first if layer == 0 else stacked), (quant, layer, moe)
                assert scheme(config, f"model.layers.{layer}.{moe}.gate", "ReplicatedLinear") is None, (quant, layer, moe)
                asked += 7
            for name, kind in (("qkv_proj", "QKVParallelLinear"), ("o_proj" if model == "tiny-m2" else "qkv_proj", "RowParallelLinear")):
                found = bits(config, scheme(config, f"model.layers.{layer}.self_attn.{name}", kind))
                assert found == attention, (quant, layer, name, found)
                asked += 1
        assert scheme(config, "lm_head", "ParallelLMHead") is None
    # The dialects with one scheme and a list of exceptions.
    for model, quant, dialect, options, stays in LISTS:
        config, layers = config_of(model, quant, *options, dialect=dialect)
        for layer in range(layers):
            for name in ("self_attn.qkv_proj", "self_attn.o_proj", "block_sparse_moe.experts", "mlp.experts"):
                ours = name.replace("mlp", "block_sparse_moe")
                assert left_out(config, f"model.layers.{layer}.{name}") == (f"{layer}.{ours}" in stays or ours in stays), (quant, layer, name)
                asked += 1
        assert left_out(config, "lm_head")
    print(f"{asked} layers of {len(CASES) + len(LISTS)} mixed checkpoints find their scheme{''.join(f', by {engine} itself too' for engine in OWN)}")


if __name__ == "__main__":
    main()
