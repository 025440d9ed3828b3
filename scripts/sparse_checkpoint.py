#!/usr/bin/env python3
"""Makes a full-size checkpoint directory whose weights are holes: real names, shapes, dtypes, headers and file sizes, a few MB on disk.

  sparse_checkpoint.py OUT --config config.json --index model.safetensors.index.json    a released M1 (names are compared with the index)
  sparse_checkpoint.py OUT --m2                                                         MiniMax-M2: 96,103 tensors in 125 files
  sparse_checkpoint.py OUT --m3 | --m3-mxfp8                                            MiniMax-M3 with its vision tower: 23,416 tensors in BF16

For dry runs and planning: every header is real, every weight reads as zero.
"""
import argparse
import json
import os
import re
import struct

import sparse_m3

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}

M2_CONFIG = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * 62, "hidden_act": "silu",
    "hidden_size": 3072, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True,
    "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0, "mlp_intermediate_size": 8192, "use_mtp": True,
    "num_mtp_modules": 3, "mtp_transformer_layers": 1, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 200064,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
}
M2_FILES, M2_OF = 125, 130


def tensors(config):
    """Yields (name, dtype, shape) of every tensor in layer order."""
    c = config
    hidden, inner, vocab, experts = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_local_experts"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    m2 = c["architectures"] == ["MiniMaxM2ForCausalLM"]

    def matrix(name, rows, cols):
        if not m2:
            yield name + ".weight", "BF16", [rows, cols]
            return
        yield name + ".weight", "F8_E4M3", [rows, cols]
        yield name + ".weight_scale_inv", "F32", [-(-rows // 128), -(-cols // 128)]

    yield "model.embed_tokens.weight", "BF16", [vocab, hidden]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", "BF16", [hidden]
        if c["attn_type_list"][layer] == 0:
            yield from matrix(at + "self_attn.qkv_proj", 3 * q, hidden)
            yield from matrix(at + "self_attn.output_gate", q, hidden)
            yield from matrix(at + "self_attn.out_proj", hidden, q)
            yield at + "self_attn.norm.weight", "BF16", [q]
        else:
            yield from matrix(at + "self_attn.q_proj", q, hidden)
            yield from matrix(at + "self_attn.k_proj", kv, hidden)
            yield from matrix(at + "self_attn.v_proj", kv, hidden)
            yield from matrix(at + "self_attn.o_proj", hidden, q)
        if m2:
            yield at + "self_attn.q_norm.weight", "BF16", [q]
            yield at + "self_attn.k_norm.weight", "BF16", [kv]
        yield at + "post_attention_layernorm.weight", "BF16", [hidden]
        yield at + "block_sparse_moe.gate.weight", "F32", [experts, hidden]
        if m2:
            yield at + "block_sparse_moe.e_score_correction_bias", "F32", [experts]
        for expert in range(experts):
            one = at + f"block_sparse_moe.experts.{expert}."
            yield from matrix(one + "w1", inner, hidden)
            yield from matrix(one + "w2", hidden, inner)
            yield from matrix(one + "w3", inner, hidden)
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [vocab, hidden]


def size_of(dtype, shape):
    n = DTYPE_BYTES[dtype]
    for d in shape:
        n *= d
    return n


def write_sparse(path, members):
    """One safetensors file; wider types first, then by name, as the reference writer orders them."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in sorted(members, key=lambda t: (-DTYPE_BYTES[t[1]], t[0])):
        end = at + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a directory that does not exist yet")
    parser.add_argument("--config", help="config.json of the model")
    parser.add_argument("--index", help="model.safetensors.index.json: which file holds which name")
    parser.add_argument("--m2", action="store_true", help="the shapes of MiniMax-M2, spread over its 125 files")
    parser.add_argument("--m3", action="store_true", help="the shapes of MiniMax-M3 in BF16")
    parser.add_argument("--m3-mxfp8", action="store_true", help="the same in MXFP8")
    args = parser.parse_args()
    if [args.m2, args.m3, args.m3_mxfp8, bool(args.config)].count(True) != 1 or bool(args.config) != bool(args.index):
        parser.error("give either --m2, --m3 or --m3-mxfp8, or --config and --index")

    if args.m2:
        config = M2_CONFIG
    elif not args.config:
        config = sparse_m3.CONFIG | ({"quantization_config": sparse_m3.MXFP8} if args.m3_mxfp8 else {})
    else:
        with open(args.config, encoding="utf-8") as f:
            config = json.load(f)
    everything = list(tensors(config) if args.m2 or args.config else sparse_m3.tensors(args.m3_mxfp8))
    total = sum(size_of(dtype, shape) for _, dtype, shape in everything)

    if not args.config:
        count, of = (M2_FILES, M2_OF) if args.m2 else (sparse_m3.FILES, sparse_m3.FILES)
        place, at = {}, 0
        for name, dtype, shape in everything:
            place[name] = f"model-{at * count // total:05d}-of-{of:05d}.safetensors"
            at += size_of(dtype, shape)
    else:
        with open(args.index, encoding="utf-8") as f:
            place = json.load(f)["weight_map"]
        odd = place.keys() ^ {name for name, _, _ in everything}
        if odd:
            raise SystemExit(f"{args.index} and the shapes of {args.config} disagree on {len(odd)} names, first {min(odd)}")

    os.mkdir(args.out)
    with open(os.path.join(args.out, "config.json"), "x", encoding="utf-8") as f:
        json.dump(config, f, indent=2)
    with open(os.path.join(args.out, "model.safetensors.index.json"), "x", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": place}, f, indent=2)
    files = {}
    for member in everything:
        name = place[member[0]]
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise SystemExit(f"{args.index}: {name!r} is not a plain file name")
        files.setdefault(name, []).append(member)
    for name, members in files.items():
        write_sparse(os.path.join(args.out, name), members)
    print(f"{args.out}: {len(everything):,} tensors in {len(files)} files, {total:,} tensor bytes (sparse)")


if __name__ == "__main__":
    main()
