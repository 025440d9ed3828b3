"""A small MiniMax-M2 in the released form (block FP8 of 128 x 128, heads of 128), every byte drawn at random."""
import json
import os
import struct

import numpy as np

CONFIG = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1, 1], "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 512, "num_attention_heads": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
    "tie_word_embeddings": False, "vocab_size": 512, "torch_dtype": "bfloat16",
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
                            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}}


def tensors(seed=1):
    """name -> (dtype as safetensors spells it, array of its bits)."""
    rng, c, out = np.random.default_rng(seed), CONFIG, {}
    h, i, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d

    def bf16(name, *shape):
        out[name] = "BF16", (rng.normal(0, 1, shape).astype("<f4").view("<u4") >> 16).astype("<u2")

    def f32(name, *shape):
        out[name] = "F32", rng.normal(0, 1, shape).astype("<f4")

    def fp8(name, rows, cols):
        codes = rng.integers(0, 256, (rows, cols), "u1")
        out[name] = "F8_E4M3", np.where(codes & 127 == 127, codes ^ 1, codes).astype("u1")
        out[name + "_scale_inv"] = "F32", rng.uniform(1e-4, 1e-3, (-(-rows // 128), -(-cols // 128))).astype("<f4")

    bf16("model.embed_tokens.weight", c["vocab_size"], h)
    bf16("lm_head.weight", c["vocab_size"], h)
    bf16("model.norm.weight", h)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        bf16(at + "input_layernorm.weight", h)
        bf16(at + "post_attention_layernorm.weight", h)
        for name, rows in ("q", q), ("k", kv), ("v", kv):
            fp8(f"{at}self_attn.{name}_proj.weight", rows, h)
        fp8(at + "self_attn.o_proj.weight", h, q)
        bf16(at + "self_attn.q_norm.weight", q)
        bf16(at + "self_attn.k_norm.weight", kv)
        f32(at + "block_sparse_moe.gate.weight", c["num_local_experts"], h)
        f32(at + "block_sparse_moe.e_score_correction_bias", c["num_local_experts"])
        for e in range(c["num_local_experts"]):
            for name, rows, cols in ("w1", i, h), ("w3", i, h), ("w2", h, i):
                fp8(f"{at}block_sparse_moe.experts.{e}.{name}.weight", rows, cols)
    return out


def write(path, extra=None):
    """The checkpoint, and further tensors, as a directory; returns its tensors."""
    os.makedirs(path, exist_ok=True)
    header, at, all_tensors = {}, 0, {**tensors(), **(extra or {})}
    for name, (dtype, a) in all_tensors.items():
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, a in all_tensors.values():
            f.write(a.tobytes())
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
        json.dump(CONFIG, f)
    return all_tensors
