#!/usr/bin/env python3
"""Makes an M2-shaped checkpoint with real bytes, for benchmarks and fault tests.

  bench_checkpoint.py OUT [--layers 2] [--experts 64] [--vocab 2048] [--hidden 3072] [--inter 1536] [--heads 48] [--bf16] [--files 8]
  bench_checkpoint.py OUT --m1 [--layers 2]    layers of M1's own size, all lightning attention, in BF16

Block FP8 by default, as M2 is released; --bf16 gives the same tensors in BF16. Values come from a seeded generator: the same arguments
make the same bytes. Pairs of weight and scale, and of w1 and w3, fall into different files on purpose.
"""
import argparse
import json
import os
import random
import struct

from sparse_checkpoint import M2_CONFIG, size_of, tensors

M1_CONFIG = dict(json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/data/tiny-m1/config.json"), encoding="utf-8")), head_dim=128,
                 num_key_value_heads=8, rotary_dim=64, num_experts_per_tok=2, max_position_embeddings=10240000)
M1_SIZES = {"experts": 32, "hidden": 6144, "inter": 9216, "heads": 64}
POOL = 1 << 24
NO_NAN = bytes(b if b & 0x7F != 0x7F else b - 1 for b in range(256))
# High bytes of BF16 numbers of ordinary size: ±2^-7 to ±2^-3.
ORDINARY = bytes((b & 0x80) | (0x3C, 0x3C, 0x3D, 0x3D)[b & 3] for b in range(256))


class Bytes:
    """Endless bytes of each dtype from pools whose start moves with every tensor."""

    def __init__(self, seed):
        rng = random.Random(seed)
        raw = rng.randbytes(POOL)
        self.pool = {"F8_E4M3": raw.translate(NO_NAN)}
        bf16 = bytearray(raw)
        bf16[1::2] = raw[1::2].translate(ORDINARY)
        self.pool["BF16"] = bytes(bf16)
        self.pool["U8"] = bytes(112 + b % 8 for b in raw[:1 << 16])  # exponents
        self.pool["F32"] = b"".join(struct.pack("<f", rng.uniform(0.0001, 0.001)) for _ in range(1 << 18))
        self.moved = 0

    def write(self, f, dtype, size):
        pool = self.pool[dtype]
        self.moved = (self.moved + 1_000_004) % len(pool) // 4 * 4
        at = self.moved
        while size:
            n = min(size, len(pool) - at)
            f.write(memoryview(pool)[at : at + n])
            size -= n
            at = 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="a directory that does not exist yet")
    for name, default in (("layers", 2), ("experts", 64), ("vocab", 2048), ("hidden", 3072), ("inter", 1536), ("heads", 48), ("files", 8), ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--m1", action="store_true")
    if parser.parse_known_args()[0].m1:
        parser.set_defaults(**M1_SIZES)
    args = parser.parse_args()
    config = dict(M1_CONFIG if args.m1 else M2_CONFIG, num_hidden_layers=args.layers, num_local_experts=args.experts, vocab_size=args.vocab, hidden_size=args.hidden,
                  intermediate_size=args.inter, num_attention_heads=args.heads, attn_type_list=[0 if args.m1 else 1] * args.layers,
                  num_experts_per_tok=min(2 if args.m1 else 8, args.experts))
    everything = [t for t in tensors(config)]
    if args.bf16 and not args.m1:
        del config["quantization_config"]
        everything = [(n, "BF16" if d == "F8_E4M3" else d, s) for n, d, s in everything if not n.endswith("_scale_inv")]
    os.mkdir(args.out)
    name_of = "model-{:05d}-of-{:05d}.safetensors".format
    files = [[] for _ in range(args.files)]
    for i, member in enumerate(everything):
        files[i % args.files].append(member)
    source = Bytes(args.seed)
    place, total = {}, 0
    for i, members in enumerate(files):
        header, at = {}, 0
        for name, dtype, shape in members:
            end = at + size_of(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            place[name] = name_of(i, args.files)
            at = end
        total += at
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        with open(os.path.join(args.out, name_of(i, args.files)), "xb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for _, dtype, shape in members:
                source.write(f, dtype, size_of(dtype, shape))
    with open(os.path.join(args.out, "config.json"), "x", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
    with open(os.path.join(args.out, "model.safetensors.index.json"), "x", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": place}, f, indent=1)
    print(f"{args.out}: {len(everything):,} tensors in {args.files} files, {total:,} tensor bytes")


if __name__ == "__main__":
    main()
