#!/usr/bin/env python3
"""A model of the real layer sizes with random weights for llama.cpp's benchmarks, as GGUF.

  gguf_peer.py m2|m1 TYPE OUT [LAYERS (8)] [EXPERTS (256, 32)] [VOCAB (200064)]

TYPE is that of the experts: BF16, Q8_0, Q4_0, NVFP4 or MXFP4; attention and head are Q8_0, or BF16 with BF16 experts. Numbers have the statistics of
minimax-bench's: codes of any value with the mean zero, norms of about one, a router whose logits are of about one and no bias, so that tokens
choose their experts evenly. Matrices are stretches of one pool of random blocks, each from a place of its own: with one place for all, gate
equals up and layers repeat, and 64 sequences reach a tenth of the experts.
"""
import concurrent.futures
import os
import struct
import sys

import numpy as np

# Type numbers and sizes are ggml's (ggml.h): number, values of a block, bytes of a block.
TYPES = {"F32": (0, 1, 4), "Q4_0": (2, 32, 18), "Q8_0": (8, 32, 34), "BF16": (30, 1, 2), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36)}
KINDS = {**TYPES, "router": TYPES["F32"], "zero": TYPES["F32"], "norm": TYPES["F32"]}
POOL = 1 << 18  # blocks
SIZES = {  # hidden, of an expert, heads, KV heads, of a head
    "m2": (3072, 1536, 48, 8, 128, "minimax-m2"),
    "m1": (6144, 9216, 64, 8, 128, "minimax-01"),
}


def pool_of(kind, rng, hidden):
    """Random blocks of a kind, as bytes."""
    blocks = rng.integers(0, 256, (POOL, KINDS[kind][2]), dtype=np.uint8)
    if kind in ("Q4_0", "Q8_0"):
        blocks[:, 0], blocks[:, 1] = 0, 0x18 if kind == "Q4_0" else 0x0C  # the scale in f16: 2^-9, 2^-12
    if kind == "Q4_0":  # 0, which stands for -8, becomes 8, which stands for 0
        low, high = blocks[:, 2:] & 15 == 0, blocks[:, 2:] < 16
        blocks[:, 2:] |= (low * 8 + high * 128).astype(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 119  # the scale: 2^-8
    if kind == "NVFP4":
        blocks[:, :4] = 0x18  # the scales in E4M3: 2^-4
    if kind == "BF16":
        return ((rng.standard_normal(POOL * 8).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if kind == "router":
        return (rng.standard_normal(POOL * 4) * hidden**-0.5).astype(np.float32).tobytes()
    if kind == "zero":
        return bytes(POOL)
    if kind == "norm":
        return (0.99 + 0.02 * rng.random(POOL * 4)).astype(np.float32).tobytes()
    if kind == "F32":
        return rng.standard_normal(POOL).astype(np.float32).tobytes()
    return blocks.tobytes()


def tensors_of(model, kind, layers, experts, vocab):
    """Name, kind and shape of every tensor, in the order of the file."""
    hidden, inter, heads, kv_heads, dim, _ = SIZES[model]
    dense = "BF16" if kind == "BF16" else "Q8_0"
    all_heads, all_kv = heads * dim, kv_heads * dim
    yield "token_embd.weight", dense, [hidden, vocab]
    yield "output_norm.weight", "norm", [hidden]
    yield "output.weight", dense, [hidden, vocab]
    for layer in range(layers):
        at = f"blk.{layer}."
        yield at + "attn_norm.weight", "norm", [hidden]
        yield at + "ffn_norm.weight", "norm", [hidden]
        yield at + "ffn_gate_inp.weight", "router", [hidden, experts]
        yield at + "attn_output.weight", dense, [all_heads, hidden]
        if model == "m2" or layer % 8 == 7:
            yield at + "attn_q.weight", dense, [hidden, all_heads]
            yield at + "attn_k.weight", dense, [hidden, all_kv]
            yield at + "attn_v.weight", dense, [hidden, all_kv]
        else:
            yield at + "attn_norm_2.weight", "norm", [all_heads]
            yield at + "attn_qkv.weight", dense, [hidden, 3 * all_heads]
            yield at + "attn_gate.weight", dense, [hidden, all_heads]
        if model == "m2":
            yield at + "attn_q_norm.weight", "norm", [all_heads]
            yield at + "attn_k_norm.weight", "norm", [all_kv]
            yield at + "exp_probs_b.bias", "zero", [experts]
        yield at + "ffn_gate_exps.weight", kind, [hidden, inter, experts]
        yield at + "ffn_up_exps.weight", kind, [hidden, inter, experts]
        yield at + "ffn_down_exps.weight", kind, [inter, hidden, experts]


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def values_of(model, layers, experts, vocab):
    """The file's keys and values, packed."""
    hidden, inter, heads, kv_heads, dim, arch = SIZES[model]
    u32 = lambda key, v: text(f"{arch}.{key}") + struct.pack("<II", 4, v)
    f32 = lambda key, v: text(f"{arch}.{key}") + struct.pack("<If", 6, v)
    yield text("general.architecture") + struct.pack("<I", 8) + text(arch)
    yield u32("block_count", layers)
    yield u32("context_length", 204800)
    yield u32("embedding_length", hidden)
    yield u32("feed_forward_length", inter)
    yield u32("attention.head_count", heads)
    yield u32("attention.head_count_kv", kv_heads)
    yield u32("attention.key_length", dim)
    yield u32("attention.value_length", dim)
    yield f32("attention.layer_norm_rms_epsilon", 1e-6)
    yield f32("rope.freq_base", 5e6)
    yield u32("rope.dimension_count", 64)
    yield u32("expert_count", experts)
    yield u32("expert_used_count", 8 if model == "m2" else 2)
    yield u32("expert_feed_forward_length", inter)
    yield u32("expert_gating_func", 2 if model == "m2" else 1)
    yield u32("vocab_size", vocab)
    if model == "m1":
        yield f32("residual_scale", 3.5565588200778455)
    yield text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("no_vocab")


def bytes_of(kind, shape):
    _, values, size = KINDS[kind]
    return int(np.prod(shape, dtype=np.int64)) // values * size


def write(path, pieces, size):
    f = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    os.ftruncate(f, size)

    def put(piece):
        at, what = piece
        while what:
            n = os.pwrite(f, what, at)
            at, what = at + n, what[n:]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(put, pieces))
    os.close(f)


def main():
    args = sys.argv[1:]
    if not 3 <= len(args) <= 6 or args[0] not in SIZES or args[1] not in TYPES or not all(n.isdigit() and int(n) for n in args[3:]):
        sys.exit(__doc__.split("\n\n")[1].strip())
    model, kind, path = args[:3]
    layers, experts, vocab = [int(n) for n in args[3:]] + [8, 256 if model == "m2" else 32, 200064][len(args) - 3 :]
    rng = np.random.default_rng(1)
    tensors = list(tensors_of(model, kind, layers, experts, vocab))
    pools = {k: memoryview(pool_of(k, rng, SIZES[model][0])) for k in sorted({kind, "F32", "BF16", "Q8_0", "router", "zero", "norm"})}
    values = list(values_of(model, layers, experts, vocab))
    head, at = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(values), 0
    for name, k, shape in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, KINDS[k][0], at)
        at += (bytes_of(k, shape) + 31) // 32 * 32
    head += b"\0" * (-len(head) % 32)
    pieces, end = [(0, memoryview(head))], len(head)
    for name, k, shape in tensors:
        pool, left, to = pools[k], bytes_of(k, shape), end
        end += (left + 31) // 32 * 32
        start = int(rng.integers(POOL // 64)) * 64 * KINDS[k][2] % len(pool)
        while left:
            n = min(left, len(pool) - start)
            pieces.append((to, pool[start : start + n]))
            to, left, start = to + n, left - n, 0
    write(path, pieces, end)
    print(f"{path}: {end} bytes")


if __name__ == "__main__":
    main()
