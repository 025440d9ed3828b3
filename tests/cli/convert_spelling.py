#!/usr/bin/env python3
"""A source under other names, fused another way, in another type or spread over other files gives the same packed tensors, byte for byte:
each spelling that checkpoints of these families are found in, on both small models, for tp 1 and 4."""
import json
import re
import shutil
import struct

import convert_files as cf
from convert_files import SINGLE, Checkpoint, Scratch

CONVERT = shutil.which("minimax-convert")
TINY = {"m1": "tests/data/tiny-m1", "m2": "tests/data/tiny-m2"}
MOE = ".block_sparse_moe."


def renamed(c, *pairs):
    """A copy with regular expressions replaced in every name."""
    def new(name):
        for old, by in pairs:
            name = re.sub(old, by, name)
        return name
    out = Checkpoint(c.config, {new(k): v for k, v in c.tensors.items()}, {new(k): v for k, v in c.file.items()})
    assert out.tensors.keys() != c.tensors.keys() and len(out.tensors) == len(c.tensors)
    return out


def joined(c, groups):
    """A copy where each group (new name, [old names], shape) is one tensor: the old ones' bytes in that order."""
    out = Checkpoint(c.config, dict(c.tensors), dict(c.file))
    for name, old, shape in groups:
        parts = [out.tensors.pop(k) for k in old]
        out.tensors[name] = (parts[0][0], shape, b"".join(p[2] for p in parts))
        out.file[name] = out.file[old[0]]
    return out


def experts_of(c):
    """(prefix, experts) of every layer."""
    for layer in range(c.config["num_hidden_layers"]):
        yield f"model.layers.{layer}{MOE}experts.", range(c.config["num_local_experts"])


def fused_experts(c, w13, w2, scale):
    """Stacks [E, 2·I, H] and [E, H, I] under the given names; their scales under the name with `scale` behind it."""
    groups = []
    for at, experts in experts_of(c):
        for name, parts in ((w13, ("w1", "w3")), (w2, ("w2",))):
            for theirs, ours in ((".weight", ""), (".weight_scale_inv", scale)):
                old = [f"{at}{e}.{w}{theirs}" for e in experts for w in parts]
                if old[0] in c.tensors:
                    rows, cols = c.tensors[old[0]][1]
                    groups.append((at + name + ours, old, [len(experts), len(parts) * rows, cols]))
    return joined(c, groups)


def fused_qkv(c):
    """One [q; k; v] in layers that have the three."""
    groups = []
    for layer in range(c.config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn."
        for end in (".weight", ".weight_scale_inv"):
            old = [f"{at}{x}_proj{end}" for x in "qkv"]
            if old[0] in c.tensors:
                groups.append((f"{at}qkv_proj{end}", old, [sum(c.tensors[k][1][0] for k in old), c.tensors[old[0]][1][1]]))
    assert groups
    return joined(c, groups)


def to_mlp(c):
    return renamed(c, (r"\.block_sparse_moe\.", ".mlp."))


def fp8_only(spell):
    return lambda c: spell(c) if "quantization_config" in c.config else None


SPELLINGS = {
    ".mlp.": to_mlp,
    "gate/up/down": lambda c: renamed(c, (r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj.")),
    ".mlp. and gate/up/down": lambda c: renamed(to_mlp(c), (r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj.")),
    "w13_weight": lambda c: fused_experts(c, "w13_weight", "w2_weight", "_scale_inv"),
    "w13.weight": lambda c: fused_experts(c, "w13.weight", "w2.weight", "_scale_inv"),
    "gate_up_proj": lambda c: to_mlp(fused_experts(c, "gate_up_proj", "down_proj", "_scale_inv")),
    "gate_up_proj_scales_inv": fp8_only(lambda c: to_mlp(fused_experts(c, "gate_up_proj", "down_proj", "_scales_inv"))),
    "gate_up_proj.weight": lambda c: fused_experts(c, "gate_up_proj.weight", "down_proj.weight", "_scale_inv"),
    "only w13 fused": lambda c: joined(c, [(at + "w13_weight" + o, [f"{at}{e}.{w}.weight{o}" for e in n for w in ("w1", "w3")],
                                            [len(n), 2 * c.tensors[f"{at}0.w1.weight{o}"][1][0], c.tensors[f"{at}0.w1.weight{o}"][1][1]])
                                           for at, n in experts_of(c) for o in ("", "_scale_inv") if f"{at}0.w1.weight{o}" in c.tensors]),
    "routed_experts": lambda c: renamed(c, (r"\.experts\.", ".experts.routed_experts.")),
    "routed_experts fused": lambda c: renamed(fused_experts(c, "w13_weight", "w2_weight", "_scale_inv"),
                                              (r"\.experts\.", ".experts.routed_experts.")),
    "qkv fused": fused_qkv,
    "everything fused": lambda c: to_mlp(fused_qkv(fused_experts(c, "gate_up_proj", "down_proj", "_scale_inv"))),
    "scales in a file of their own": fp8_only(lambda c: Checkpoint(c.config, c.tensors, {
        k: "scales.safetensors" if k.endswith("_scale_inv") else "model-00000-of-00130.safetensors" for k in c.tensors})),
    "buffers and layers past the last": lambda c: Checkpoint(c.config, {
        **c.tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2], bytes(8)), "model.layers.0.self_attn.slope_rate": ("F32", [1], bytes(4)),
        "model.layers.77.embed_tokens.weight": ("I64", [1], bytes(8))}),
}


def same(reference, out):
    """Tensors of every rank; and the manifest but for what says where it came from."""
    (a, m), (b, n) = cf.packed(reference), cf.packed(out)
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x.keys() == y.keys(), x.keys() ^ y.keys()
        for name in x:
            assert x[name] == y[name], f"{name} differs on rank {rank}"
    for key in m.keys() | n.keys():
        if key not in ("plan", "sources", "ranks", "sha256"):
            assert m[key] == n[key], key


def names_alone():
    """The index's total counts what is left out too; then it says nothing of what is used. Layers past the last are told of, once."""
    note = "note: layers past the last, for multi-token prediction, are left out (tensors: 1)\n"
    for keep in ("buffers and layers past the last", "kv_scales", None):
        c = Checkpoint.load(TINY["m2"])
        if keep == "kv_scales":
            c = Checkpoint(c.config, c.tensors | {"model.layers.0.self_attn.k_scale": ("F32", [1], bytes(3) + b"?")})
        elif keep:
            c = SPELLINGS[keep](c)
        total = sum(len(data) for _, _, data in c.tensors.values())
        with Scratch() as root:
            for wrong in (0, 1):
                c.index = json.dumps({"metadata": {"total_size": total + wrong}, "weight_map": {k: c.file[k] for k in c.tensors}})
                c.save(root + "/src")
                options = ["--kv-scales", "drop"] if keep == "kv_scales" else []
                done = cf.run(CONVERT, root + "/src", "--dry-run", "--names-only", *options)
                if wrong and not keep:
                    cf.assert_error(done, "minimax-convert", 3, "E_IDX", str(total), str(total + 1))
                else:
                    assert done.returncode == 0, done
                    assert done.stderr.decode() == (note if keep and keep != "kv_scales" else ""), done
                shutil.rmtree(root + "/src")
            c.index = None
            c.save(root + "/src")
            done = cf.ok(CONVERT, root + "/src", "-o", root + "/out", *([] if keep != "kv_scales" else ["--kv-scales", "drop"]))
            assert done.stderr.decode().count(note) == (keep is not None and keep != "kv_scales"), done


def names():
    for model, path in TINY.items():
        original = Checkpoint.load(path)
        with Scratch() as root:
            original.save(root + "/src")
            wanted = [(1, "none"), (4, "none")] + ([(4, "block_fp8")] if model == "m1" else [(4, "bf16")])
            for tp, quant in wanted:
                cf.ok(CONVERT, "-q", root + "/src", "-o", f"{root}/{tp}{quant}", "--tp", tp, "--quant", quant)
            for spelling, spell in SPELLINGS.items():
                c = spell(original)
                if c is None:
                    continue
                c.save(root + "/other")
                for tp, quant in wanted if spelling == "everything fused" else wanted[:2]:
                    cf.ok(CONVERT, "-q", root + "/other", "-o", root + "/out", "--tp", tp, "--quant", quant)
                    try:
                        same(f"{root}/{tp}{quant}", root + "/out")
                    except AssertionError as e:
                        raise AssertionError(f"{model} as {spelling}, tp {tp}, {quant}: {e}") from e
                    shutil.rmtree(root + "/out")
                shutil.rmtree(root + "/other")


def one_file():
    for path in TINY.values():
        c = Checkpoint.load(path)
        with Scratch() as root:
            c.save(root + "/src")
            c.file = dict.fromkeys(c.tensors, SINGLE)
            c.save(root + "/indexed")
            c.index = ""
            c.save(root + "/single")
            for name in ("src", "indexed", "single"):
                cf.ok(CONVERT, "-q", f"{root}/{name}", "-o", f"{root}/{name}-out", "--tp", 4)
            same(root + "/src-out", root + "/indexed-out")
            same(root + "/src-out", root + "/single-out")


def types():
    """The same numbers in F16 and F32: the same BF16 and FP8 weights."""
    original = Checkpoint.load(TINY["m1"])
    matrices = [k for k, (_, shape, _) in original.tensors.items()
                if len(shape) == 2 and "embed" not in k and "lm_head" not in k and "moe.gate" not in k]

    def rewritten(dtype, fn):
        t = dict(original.tensors)
        for k in matrices:
            _, shape, data = t[k]
            t[k] = (dtype, shape, fn(data))
        return Checkpoint(original.config, t, original.file)

    # Numbers that F16 holds: exponents of a byte in [-14, 15], everything smaller set to 0 (no weight is larger).
    table = {}
    for u in range(65536):
        e = (u >> 7 & 0xFF) - 127
        table[u] = (u, (u >> 15) << 15 | (e + 15) << 10 | (u & 0x7F) << 3) if -14 <= e <= 15 else (u & 0x8000, u & 0x8000)

    def translate(data, which):
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return struct.pack(f"<{len(words)}H", *[table[w][which] for w in words])

    def to_f32(data):
        out = bytearray(2 * len(data))
        out[2::4], out[3::4] = data[::2], data[1::2]
        return bytes(out)

    with Scratch() as root:
        rewritten("BF16", lambda d: translate(d, 0)).save(root + "/bf16")
        rewritten("F16", lambda d: translate(d, 1)).save(root + "/f16")
        rewritten("F32", lambda d: to_f32(translate(d, 0))).save(root + "/f32")
        for quant, tp in (("bf16", 1), ("bf16", 4), ("block_fp8", 1), ("block_fp8", 4), ("f32", 4)):
            for dtype in ("bf16", "f16", "f32"):
                cf.ok(CONVERT, "-q", f"{root}/{dtype}", "-o", f"{root}/{dtype}-out", "--tp", tp, "--quant", quant)
            same(root + "/bf16-out", root + "/f16-out")
            same(root + "/bf16-out", root + "/f32-out")
            for dtype in ("bf16", "f16", "f32"):
                shutil.rmtree(f"{root}/{dtype}-out")
        for dtype in ("f16", "f32"):  # kept as they are
            cf.ok(CONVERT, "-q", f"{root}/{dtype}", "-o", f"{root}/{dtype}-out", "--tp", 2)
            cf.ok("minimax-verify", "-q", f"{root}/{dtype}-out", "--source", f"{root}/{dtype}")
            (rank, _), _ = cf.packed(f"{root}/{dtype}-out")
            assert rank["model.layers.0.self_attn.output_gate.weight"][0] == dtype.upper()


if __name__ == "__main__":
    cf.main([names_alone, names, one_file, types])
