#!/usr/bin/env python3
"""--layout hf in the libraries that other engines load it with: compressed-tensors dequantises every file set to our weights bit for bit
(rounded to bf16 where it computes in bf16), its ModelOpt converter turns that dialect into our compressed-tensors files, and transformers'
logits under the dequantised weights, and from the files themselves where its CPU path reads them, equal ours. (engine_libraries.py has what it needs.)"""
import json
import os
import shutil
import subprocess

from engine_libraries import need

need("accelerate", "compressed_tensors", "torch", "transformers")

import compressed_tensors
import numpy as np
import torch
import transformers
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer
from safetensors.torch import load_file, safe_open, save_file
from unsharded import Unsharded

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
CT = ["block_fp8", "channel_fp8", "tensor_wise_fp8", "int8", "w4a16", "nvfp4a16", "mxfp4", "mxfp8", "fp8_attention_nvfp4_experts"]
BF16 = {"w4a16", "nvfp4a16", "fp8_attention_nvfp4_experts"}  # dequantised in the library's bf16
# What transformers' own loader dequantises on a CPU. It takes a block for rows/scale rows, so that 192 rows under two scales are misread
# as 2 x 96: of tiny-m2 only attention is given to it in block FP8.
LOADED = [("bf16", None), ("bf16; *self_attn.*_proj.weight=block_fp8", "fp8"), ("channel_fp8", "ct"), ("tensor_wise_fp8", "ct")]
LIMIT = {"tiny-m1": 2e-4, "tiny-m2": 1e-4}  # of logits, both sides in f32; lightning's as in tests/model/golden.c


def convert(model, name, scheme, *options):
    out = os.path.join(TMP, name)
    shutil.rmtree(out, ignore_errors=True)
    keep = ["--override", "*.w2.weight=bf16"] if (model, scheme) == ("tiny-m2", "w4a16") else []  # 192 columns are not groups of 128
    subprocess.run([os.path.join(BIN, "minimax-convert"), f"tests/data/{model}", "-o", out, "--quant", scheme, "--quiet", *keep, *options],
                   check=True)
    return out


def unsharded(model, scheme, dialect):
    return convert(model, "hf", scheme, "--layout", "hf", "--part-size", "2M", *(["--dialect", dialect] if dialect else []))


def tensors(path):
    return {k: v for name in sorted(os.listdir(path)) if name.endswith(".safetensors") for k, v in load_file(os.path.join(path, name)).items()}


def same_weights(model, scheme):
    """compressed-tensors' dequantiser, which also checks that targets and ignore cover exactly the quantised modules."""
    path = unsharded(model, scheme, "ct")
    dense = CompressedTensorsDequantizer(path, dtype=torch.float32).validate(tensors(path))
    hf = Unsharded(path)
    assert dense.keys() == {m + "." + s for m, t in hf.modules.items() for s in (t if len(t) == 1 else ["weight"])}
    for module in hf.quantised():
        want = torch.from_numpy(hf.weight(module))
        got = dense[module + ".weight"]
        assert torch.equal(got, want) or (scheme in BF16 and torch.equal(got, want.bfloat16().float())), (model, scheme, module)
    print(f"{model} {scheme}: compressed-tensors {compressed_tensors.__version__} gives our {len(hf.quantised())} matrices")


def same_conversion(model):
    """ModelOpt's spelling through the library's converter is our own compressed-tensors spelling."""
    path = unsharded(model, "nvfp4a16", "modelopt")
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        ignore = json.load(f)["quantization_config"]["ignore"]
    got = ModelOptNvfp4Converter(ignore=ignore, targets=["re:.*"]).process(tensors(path))
    want = tensors(unsharded(model, "nvfp4a16", "ct"))
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, w in want.items():
        g = got[name].reshape(w.shape)
        assert g.dtype == w.dtype and torch.equal(g.contiguous().view(torch.uint8), w.contiguous().view(torch.uint8)), name
    print(f"{model}: ModelOpt's NVFP4 converts to our compressed-tensors files")


def ours(packed, golden):
    """Our logits of the prompts."""
    out = os.path.join(TMP, "logits.safetensors")
    subprocess.run([os.path.join(BIN, "minimax-eval"), packed, "--act-quant", "off", "--logits", out, "--ids-from", golden], check=True, stdout=subprocess.DEVNULL)
    return load_file(out)


def worst(llm, golden, wanted):
    most = 0.0
    with safe_open(golden, "pt") as f, torch.no_grad():
        for name in f.keys():
            if name.startswith("ids.") and f.get_slice(name).get_shape()[0] <= 300:
                logits = llm(f.get_tensor(name).reshape(1, -1).long()).logits[0]
                most = max(most, (logits - wanted["logits." + name[4:]]).abs().max().item())
    return most


def as_minimax(config, weights):
    """MiniMax-M1 in the spelling of transformers' MiniMax class. That class rotates whole heads in halves: rows of q and k are put in another order,
    the same for both, so that what M1 rotates comes first in each half; `load` gives the other rows a frequency of 0."""
    spelling = {f"layernorm_{long}_{end}": f"{short}_{end}_factor" for end in ("alpha", "beta")
                for long, short in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))}
    config = {spelling.get(key, key): value for key, value in config.items()}
    config |= {"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax",
               "layer_types": [("linear_attention", "full_attention")[kind] for kind in config["attn_type_list"]]}
    dim, rotary = config["head_dim"], config["rotary_dim"]
    kept = torch.arange(rotary, dim)
    order = torch.cat((torch.arange(rotary // 2), kept[:len(kept) // 2], torch.arange(rotary // 2, rotary), kept[len(kept) // 2:]))
    for name, w in weights.items():
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            weights[name] = w.view(-1, dim, w.shape[1])[:, order].reshape(w.shape).contiguous()
    return config, weights


def dense_copy(hf):
    """The unsharded checkpoint dequantised to f32, as one more directory that transformers reads."""
    out = os.path.join(TMP, "dense")
    shutil.rmtree(out, ignore_errors=True)
    os.mkdir(out)
    config = dict(hf.config)
    config.pop("quantization_config", None)
    plain = tensors(hf.path)
    weights = {m + ".weight": torch.from_numpy(np.ascontiguousarray(hf.weight(m))) for m in hf.quantised()}
    quantised = {m + "." + s for m in hf.quantised() for s in hf.modules[m]}
    weights |= {n: t.float() for n, t in plain.items() if n not in quantised}
    if config["model_type"] == "minimax_m1":
        config, weights = as_minimax(config, weights)
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    save_file(weights, os.path.join(out, "model.safetensors"), {"format": "pt"})
    return out


def auto_class(path):
    """transformers' class of a checkpoint: MiniMax-M3's is the one with its vision tower."""
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        return transformers.AutoModelForImageTextToText if "text_config" in json.load(f) else transformers.AutoModelForCausalLM


def load(path, **more):
    llm, info = auto_class(path).from_pretrained(path, dtype=torch.float32, output_loading_info=True, **more)
    info["missing_keys"] = {name for name in info["missing_keys"] if not name.endswith(("slope_rate", "_decay"))}  # constants of lightning
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    if llm.config.model_type == "minimax":
        rotary, frequency = llm.config.rotary_dim, llm.model.rotary_emb.inv_freq
        frequency.zero_()[:rotary // 2] = llm.config.rope_parameters["rope_theta"] ** (torch.arange(0, rotary, 2) / -rotary)
    return llm.eval()


def same_logits(model, scheme, dialect):
    """transformers' logits under our dequantised weights."""
    golden = f"tests/data/{model}/golden.safetensors"
    hf = Unsharded(unsharded(model, scheme, dialect))
    wanted = ours(convert(model, "packed", scheme), golden)
    most = worst(load(dense_copy(hf)), golden, wanted)
    print(f"{model} {scheme} {dialect}: logits of transformers {transformers.__version__} differ by {most:.1e} <= {LIMIT[model]:.0e}")
    assert most <= LIMIT[model]


def loads(model, scheme, dialect):
    """transformers' own reading of the files: every parameter is ours (or ours in bf16, where it computes so), then the logits."""
    golden = f"tests/data/{model}/golden.safetensors"
    hf = Unsharded(unsharded(model, scheme, dialect))
    more = {}
    if method := hf.config.get("quantization_config", {}).get("quant_method"):
        kind = transformers.FineGrainedFP8Config if method == "fp8" else transformers.CompressedTensorsConfig
        more["quantization_config"] = kind(dequantize=True, **{k: v for k, v in hf.config["quantization_config"].items() if k != "quant_method"})
    llm, dense = load(hf.path, **more), load(dense_copy(hf))
    want = dict(dense.named_parameters())
    for name, p in llm.named_parameters():
        assert torch.equal(p, want[name].to(p.dtype)), (model, scheme, name)
    words = f"{len(want)} parameters"
    if all(p.dtype == torch.float32 for p in llm.parameters()):
        most = worst(llm, golden, ours(convert(model, "packed", scheme), golden))
        words += f" and logits within {most:.1e} <= {LIMIT[model]:.0e}"
        assert most <= LIMIT[model]
    print(f"{model} {scheme} {dialect or ''}: transformers reads {words}")


def main():
    torch.set_num_threads(2)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for model in ("tiny-m1", "tiny-m2"):
        for scheme in CT:
            same_weights(model, scheme)
        same_conversion(model)
    for model in ("tiny-m1", "tiny-m2"):
        for scheme in CT:
            same_logits(model, scheme, "ct")
    same_logits("tiny-m2", "nvfp4a16", "modelopt")
    same_logits("tiny-m2", "tensor_wise_fp8", "fp8")
    for scheme, dialect in LOADED:
        loads("tiny-m2", scheme, dialect)
    print("other engines' libraries read our files to our weights and logits")


if __name__ == "__main__":
    main()
