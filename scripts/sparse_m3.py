"""MiniMax-M3 for sparse_checkpoint.py: config, and every tensor of the release with its vision tower, in BF16 or in MXFP8."""
FILES = 161

CONFIG = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl", "image_token_index": 200025,
    "video_token_index": 200026, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "minimax_m2", "hidden_act": "swigluoai", "hidden_size": 6144, "num_hidden_layers": 60, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072,
        "n_shared_experts": 1, "num_local_experts": 128, "num_experts_per_tok": 4, "scoring_func": "sigmoid", "use_routing_bias": True,
        "routed_scaling_factor": 2.0, "moe_layer_freq": [0] * 3 + [1] * 57, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-06,
        "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head", "attention_output_gate": False, "rope_theta": 5000000,
        "rotary_dim": 64, "partial_rotary_factor": 0.5, "max_position_embeddings": 524288, "vocab_size": 200064, "tie_word_embeddings": False,
        "num_mtp_modules": 7, "num_nextn_predict_layers": 1,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_num_index_heads": 4, "sparse_index_dim": 128,
            "sparse_block_size": 128, "sparse_topk_blocks": 16, "sparse_local_block": 1, "sparse_init_block": 0, "sparse_score_type": "max",
            "sparse_disable_index_value": [0] * 3 + [1] * 57}},
    "vision_config": {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "num_hidden_layers": 32, "patch_size": 14},
}
MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "ignored_layers": ["lm_head", "model.embed_tokens"]}


def vision():
    def both(name, rows, *cols):
        yield name + ".weight", "BF16", [rows, *cols]
        yield name + ".bias", "BF16", [rows]

    at = "vision_tower.vision_model."
    yield at + "embeddings.patch_embedding.weight", "F32", [1280, 3, 2, 14, 14]
    yield from both(at + "pre_layrnorm", 1280)
    for layer in range(32):
        one = f"{at}encoder.layers.{layer}."
        yield from both(one + "layer_norm1", 1280)
        yield from both(one + "layer_norm2", 1280)
        for name in "qkv":
            yield from both(f"{one}self_attn.{name}_proj", 1280, 1280)
        yield from both(one + "self_attn.out_proj", 1280, 1280)
        yield from both(one + "mlp.fc1", 5120, 1280)
        yield from both(one + "mlp.fc2", 1280, 5120)
    yield from both("multi_modal_projector.linear_1", 6144, 1280)
    yield from both("multi_modal_projector.linear_2", 6144, 6144)
    yield from both("patch_merge_mlp.linear_1", 6144, 24576)
    yield from both("patch_merge_mlp.linear_2", 6144, 6144)


def text(mxfp8, c=CONFIG["text_config"]):
    """The text model of this config, without a prefix."""
    hidden, d, vocab = c["hidden_size"], c["head_dim"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    sparse = c["sparse_attention_config"]
    index = sparse["sparse_index_dim"]

    def matrix(name, rows, cols):
        yield name + ".weight", "F8_E4M3" if mxfp8 else "BF16", [rows, cols]
        if mxfp8:
            yield name + ".weight_scale_inv", "U8", [rows, -(-cols // 32)]

    yield "model.embed_tokens.weight", "BF16", [vocab, hidden]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", "BF16", [hidden]
        yield at + "post_attention_layernorm.weight", "BF16", [hidden]
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield from matrix(f"{at}self_attn.{name}_proj", rows, hidden)
        yield from matrix(at + "self_attn.o_proj", hidden, q)
        for name in ("q_norm", "k_norm"):
            yield f"{at}self_attn.{name}.weight", "BF16", [d]
        if sparse["sparse_attention_freq"][layer]:
            for name in ("index_q_norm", "index_k_norm"):
                yield f"{at}self_attn.{name}.weight", "BF16", [index]
            yield at + "self_attn.index_q_proj.weight", "BF16", [sparse["sparse_num_index_heads"] * index, hidden]
            yield at + "self_attn.index_k_proj.weight", "BF16", [index, hidden]
        if not c["moe_layer_freq"][layer]:
            block, width = at + "mlp.", c["dense_intermediate_size"]
        else:
            experts, inner = c["num_local_experts"], c["intermediate_size"]
            moe = at + "block_sparse_moe."
            yield moe + "gate.weight", "F32", [experts, hidden]
            yield moe + "e_score_correction_bias", "F32", [experts]
            for expert in range(experts):
                for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                    yield from matrix(f"{moe}experts.{expert}.{name}", *shape)
            block, width = moe + "shared_experts.", c["shared_intermediate_size"]
        yield from matrix(block + "gate_proj", width, hidden)
        yield from matrix(block + "up_proj", width, hidden)
        yield from matrix(block + "down_proj", hidden, width)
    yield "model.norm.weight", "BF16", [hidden]
    yield "lm_head.weight", "BF16", [vocab, hidden]


def tensors(mxfp8):
    yield from vision()
    for name, dtype, shape in text(mxfp8):
        yield "language_model." + name, dtype, shape
