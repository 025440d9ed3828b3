#!/usr/bin/env python3
"""Divergence of 4-bit checkpoints by this tool and by others from the BF16 checkpoint that all of them were given.

  peers_quality.py BIN WORK [--models tiny-m1,tiny-m2] [--limit 40] [--only NAME,…]

BIN is the folder of the programs, WORK an empty folder. Needs torch, transformers, safetensors, datasets, llmcompressor and auto-round; GPTQModel wants
other versions of torch, so PEERS_GPTQMODEL names the Python of an environment with gptqmodel. Peers that are not installed, or fail, are named.

Everybody calibrates on the same windows of 512 ids: those of held-out-ids.json behind the scored ones. Files of the peers are dequantised to F32
by compressed-tensors or, where the dialect is GPTQ's, by minimax-convert --quant f32, and scored as ours are: mean negative log-likelihood (NLL)
less the BF16 checkpoint's, and Kullback-Leibler divergence (KL) of the next token's distribution from it, with standard errors over pairs of
windows. w4a16 is symmetric, in groups of 128 columns; of 192 columns (w2 of tiny-m2) ours are 128 and 64, llm-compressor's 96 and 96,
those of AutoRound and GPTQModel three times 64. tiny-m1, whose heads transformers turns in another order, is given to llm-compressor alone."""
import argparse
import json
import os
import subprocess
import sys

import numpy as np

WINDOW, BATCH = 512, 8
SCHEMES = {"w4a16": "W4A16", "nvfp4a16": "NVFP4A16", "mxfp4": "MXFP4A16"}
SHORT = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."), (".mlp.", ".block_sparse_moe."))


# ---- the peers, each in a process of its own ----

def calibration(path):
    with open(path, encoding="utf-8") as f:
        ids = json.load(f)
    return [ids[i:i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def llm_compressor(src, out, ids, method, scheme):
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.awq.mappings import AWQMapping
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.Tensor.pin_memory = lambda self, *_: self  # which AWQ calls without a GPU, too
    with load_quantizable_moe():
        llm = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
    more = {"ignore": ["lm_head", "re:.*gate$"]}
    if scheme == "W4A16":
        def group(columns):
            return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": columns}
        w2 = 96 if llm.config.intermediate_size % 128 else 128
        more["config_groups"] = {"most": {"targets": ["re:.*(qkv|q|k|v|o|gate|up|out)_proj", "re:.*output_gate"], "weights": group(128)},
                                 "w2": {"targets": ["re:.*down_proj"], "weights": group(w2)}}
    else:
        more |= {"scheme": scheme, "targets": "Linear"}
    if method == "gptq":
        recipe = [GPTQModifier(**more)]
    elif method == "nearest":
        recipe = [QuantizationModifier(**more)]
    else:  # the norms of M1 have other readers, too
        pairs = [("up_proj", ["down_proj"])]
        if llm.config.model_type == "minimax_m2":
            pairs += [("input_layernorm", ["q_proj", "k_proj", "v_proj"]), ("v_proj", ["o_proj"]),
                      ("post_attention_layernorm", ["mlp.gate", "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"])]
        recipe = [AWQModifier(mappings=[AWQMapping(f"re:.*{a}$", [f"re:.*{x}$" for x in b]) for a, b in pairs]), QuantizationModifier(**more)]
    rows = calibration(ids)
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * WINDOW] * len(rows)})
    oneshot(model=llm, dataset=data, recipe=recipe, num_calibration_samples=len(rows), max_seq_length=WINDOW, shuffle_calibration_samples=False)
    llm.save_pretrained(out, save_compressed=True)


def auto_round(src, out, ids, iterations, rate):
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    llm = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16)
    rows = calibration(ids)
    data = [{"input_ids": torch.tensor(x)[None], "attention_mask": torch.ones(1, WINDOW, dtype=torch.long)} for x in rows]
    ragged = {r".*down_proj": {"bits": 4, "group_size": 64, "sym": True}} if llm.config.intermediate_size % 128 else {}
    more = {"lr": float(rate)} if rate else {}
    AutoRound(llm, PreTrainedTokenizerFast(tokenizer_file=src + "/tokenizer.json"), scheme="W4A16", group_size=128, layer_config=ragged, dataset=data,
              iters=int(iterations), seqlen=WINDOW, nsamples=len(rows), batch_size=8, device_map="cpu", enable_torch_compile=False,
              **more).quantize_and_save(out, format="auto_round:auto_gptq")


def gptqmodel(src, out, ids):
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.models.definitions.minimax_m2 import MiniMaxM2GPTQ
    from gptqmodel.models.moe_lifecycle import GateUpDownMoELifecycleHooks

    torch.set_num_threads(1)
    tree = MiniMaxM2GPTQ.module_tree[3]  # its names of experts are not transformers' own: as shipped (7.7.0) it leaves all experts as they are
    if "block_sparse_moe:moe" in tree:
        tree["mlp:moe"] = tree.pop("block_sparse_moe:moe")
        tree["mlp:moe"]["experts"]["#"] = ("gate_proj:0", "up_proj:0", "down_proj:1")
        MiniMaxM2GPTQ.moe_lifecycle_hooks = GateUpDownMoELifecycleHooks()
    config = QuantizeConfig(bits=4, group_size=128, sym=True, quant_method="gptq", format="gptq", device="cpu",
                            dynamic={r"+:.*\.down_proj": {"group_size": 64}})
    llm = GPTQModel.load(src, config)
    llm.quantize([{"input_ids": x, "attention_mask": [1] * WINDOW} for x in calibration(ids)], batch_size=1)
    llm.save(out)


PEERS = {"llm-compressor nearest": ("w4a16", llm_compressor, ("nearest", "W4A16")),
         **{f"llm-compressor gptq {mine}": (mine, llm_compressor, ("gptq", theirs)) for mine, theirs in SCHEMES.items()},
         "llm-compressor awq": ("w4a16", llm_compressor, ("awq", "W4A16")),
         "auto-round 50": ("w4a16", auto_round, ("50", "0.005")), "auto-round 200": ("w4a16", auto_round, ("200", "")),
         "gptqmodel": ("w4a16", gptqmodel, ())}


# ---- names and rows of transformers' classes ----

def row_order(config):
    """Rows of a head of tiny-m1 in the order that transformers' MiniMax class rotates, which turns whole heads in halves."""
    import torch
    dim, rotary = config["head_dim"], config["rotary_dim"]
    rest = torch.arange(rotary, dim)
    return torch.cat((torch.arange(rotary // 2), rest[:len(rest) // 2], torch.arange(rotary // 2, rotary), rest[len(rest) // 2:]))


def reordered(weights, config, order):
    for name, w in weights.items():
        if name.endswith((".q_proj.weight", ".k_proj.weight")):
            weights[name] = w.view(-1, config["head_dim"], w.shape[1])[:, order].reshape(w.shape).contiguous()


def folder(path):
    from safetensors.torch import load_file
    found = {k: v for name in sorted(os.listdir(path)) if name.endswith(".safetensors") for k, v in load_file(os.path.join(path, name)).items()}
    with open(path + "/config.json", encoding="utf-8") as f:
        return json.load(f), found


def save(path, config, weights, tokenizer):
    from safetensors.torch import save_file
    os.makedirs(path, exist_ok=True)
    with open(path + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
    save_file(weights, path + "/model.safetensors", {"format": "pt"})
    subprocess.run(["cp", tokenizer, path + "/tokenizer.json"], check=True)


def for_transformers(plain, out):
    """The BF16 checkpoint as transformers before 5.18 reads it, with the rotated part of a head in its own words."""
    config, weights = folder(plain)
    if config["model_type"] == "minimax_m1":
        reordered(weights, config, row_order(config))
        spelling = {f"layernorm_{a}_{end}": f"{b}_{end}_factor" for end in ("alpha", "beta")
                    for a, b in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))}
        config = {spelling.get(key, key): value for key, value in config.items()}
        config |= {"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax",
                   "layer_types": [("linear_attention", "full_attention")[kind] for kind in config["attn_type_list"]]}
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": config["rotary_dim"] / config["head_dim"]}
    config["pad_token_id"] = 0
    save(out, config, weights, plain + "/tokenizer.json")
    token = next(iter(json.load(open(out + "/tokenizer.json", encoding="utf-8"))["added_tokens"]))["content"]
    with open(out + "/tokenizer_config.json", "w", encoding="utf-8") as f:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", **{f"{x}_token": token for x in ("pad", "eos", "bos", "unk")}}, f)


def dequantised(plain, out):
    """A compressed-tensors file set in F32 under the release's names, by that library's own reader."""
    import torch
    from compressed_tensors.entrypoints.convert.converters.ct_dequantizer import CompressedTensorsDequantizer
    config, wanted = folder(plain)
    dense = CompressedTensorsDequantizer(out, dtype=torch.float32).validate(folder(out)[1])
    if config["model_type"] == "minimax_m1":
        reordered(dense, config, torch.argsort(row_order(config)))
    weights = {}
    for name, w in dense.items():
        for theirs, release in SHORT:
            name = name.replace(theirs, release) if ".experts." in name or theirs == ".mlp." else name
        weights[name] = (w.float() if w.is_floating_point() else w).contiguous()
    assert weights.keys() >= wanted.keys(), sorted(wanted.keys() - weights.keys())[:4]
    save(out + "-f32", config, {name: weights[name] for name in wanted}, plain + "/tokenizer.json")
    return out + "-f32"


# ---- scores ----

def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def log_p(args, packed, ids):
    """log p of every next id, window by window."""
    from safetensors.numpy import load_file, save_file
    prompts, logits = (os.path.join(args.work, name) for name in ("prompts.safetensors", "logits.safetensors"))
    for begin in range(0, len(ids), BATCH):
        count = min(BATCH, len(ids) - begin)
        save_file({f"ids.{i}": ids[begin + i, :WINDOW].copy() for i in range(count)}, prompts)
        subprocess.run([f"{args.bin}/minimax-eval", packed, "--logits", logits, "--force", "--ids-from", prompts, "--act-quant", "off"], check=True,
                       stdout=subprocess.DEVNULL)
        found = load_file(logits)
        yield from (log_softmax(found[f"logits.{i}"]) for i in range(count))


def score(args, source, convert, ids, plain):
    """NLL and KL of pairs of windows."""
    packed, nll, kl = os.path.join(args.work, "packed"), [], []
    subprocess.run([f"{args.bin}/minimax-convert", source, "-o", packed, "--force", "--quiet", *convert], check=True)
    for i, found in enumerate(log_p(args, packed, ids)):
        if len(plain) == i:
            plain.append(found)
        nll.append(-found[np.arange(WINDOW), ids[i, 1:]].mean(dtype="f8"))
        kl.append((np.exp(plain[i]) * (plain[i] - found)).sum(1).mean(dtype="f8"))
    return np.reshape(nll, (-1, 2)).mean(1), np.reshape(kl, (-1, 2)).mean(1)


def peer(args, name, src, plain, rest, out):
    """Runs one peer; the folder that minimax-convert reads."""
    python = os.environ.get("PEERS_GPTQMODEL", sys.executable) if name == "gptqmodel" else sys.executable
    with open(out + ".log", "w", encoding="utf-8") as log:
        subprocess.run([python, __file__, "--child", name, src, out, rest], check=True, stdout=log, stderr=log)
    if name.startswith("llm-compressor"):
        return dequantised(plain, out)
    return next(path for path, _, files in os.walk(out) if "model.safetensors" in files)


def main():
    if sys.argv[1:2] == ["--child"]:
        _, run, more = PEERS[sys.argv[2]]
        return run(*sys.argv[3:], *more)
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("work")
    p.add_argument("--models", default="tiny-m1,tiny-m2")
    p.add_argument("--limit", type=int, default=40)
    p.add_argument("--only", default=",".join(PEERS))
    args = p.parse_args()
    print("| model | scheme | who | NLL less `bf16` | KL |\n|---|---|---|---|---|")
    for model in args.models.split(","):
        data = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/data", model)
        base = os.path.join(args.work, model)
        plain, src, none, rest, moments = (f"{base}-{end}" for end in ("bf16", "src", "none", "rest.json", "moments.safetensors"))
        with open(data + "/held-out-ids.json", encoding="utf-8") as f:
            text = np.array(json.load(f), "i4")
        ids = np.stack([text[i * WINDOW:(i + 1) * WINDOW + 1] for i in range(args.limit)])
        with open(rest, "w", encoding="utf-8") as f:
            json.dump(text[args.limit * WINDOW + 1:].tolist(), f)
        subprocess.run([f"{args.bin}/minimax-convert", data, "-o", plain, "--layout", "hf", "--quant", "bf16", "--quiet"], check=True)
        subprocess.run([f"{args.bin}/minimax-convert", plain, "-o", none, "--quiet"], check=True)
        subprocess.run([f"{args.bin}/minimax-eval", none, "--ids", rest, "--act-quant", "off", "--quiet", "--collect", moments, "--moments", "512"],
                       check=True, stdout=subprocess.DEVNULL)
        for_transformers(plain, src)
        reference = []
        nll, _ = score(args, plain, [], ids, reference)
        for scheme in SCHEMES:
            runs = {"ours " + word: (plain, ["--quant", scheme, *more]) for word, more in (
                ("absmax", ["--search", "absmax"]), ("mse", []), ("gptq", ["--method", "gptq", "--importance", moments]))}
            for name in args.only.split(","):
                if PEERS[name][0] == scheme and (name.startswith("llm-compressor") or model != "tiny-m1"):
                    runs[name] = (None, ["--quant", "f32"])
            for name, (source, convert) in runs.items():
                try:
                    found = score(args, source or peer(args, name, src, plain, rest, f"{base}-{name.replace(' ', '-')}"), convert, ids, reference)
                except (subprocess.CalledProcessError, StopIteration, AssertionError) as e:
                    print(f"| {model} | `{scheme}` | {name} | failed: {e} | |"[:240], flush=True)
                    continue
                rise, error = found[0] - nll, len(nll) ** -0.5
                print(f"| {model} | `{scheme}` | {name} | {rise.mean():+.4f} ± {rise.std(ddof=1) * error:.4f} "
                      f"| {found[1].mean():.5f} ± {found[1].std(ddof=1) * error:.5f} |", flush=True)
    return 0


sys.exit(main())
