#!/usr/bin/env python3
"""What a manifest, sealed again, may not say, and what weights may not be though their digests are right: padding that is not zero, a scale of
0 over weights, ranks that hold other copies of the same, a model that is not config.json's, rows called dead that are not. minimax-verify refuses
each by name; without the change it passes, in every scheme, with a vocabulary that the ranks do not divide."""
import copy
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, "tests/fault")
import packed_files as pf

BIN = os.path.join(os.environ["BUILD"], "bin/")
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
cases = 0


def verify(packed, expected, says=""):
    global cases
    cases += 1
    shutil.rmtree(work + "/case", ignore_errors=True)
    packed.save(work + "/case")
    r = subprocess.run([BIN + "minimax-verify", work + "/case", "-q"], stderr=subprocess.PIPE, text=True, check=False)
    code = r.stderr.split(": ")[2] if r.returncode else ""
    assert (r.returncode, code) == ((6, expected) if expected else (0, "")) and says in r.stderr, (expected, r.returncode, r.stderr)


def part(packed, rank, name):
    return next(p.tensors[name] for f, p in packed.parts.items() if f"rank-{rank:05}" in f and name in p.tensors)[2]


def load(family, scheme, *options, **changes):
    source = f"{work}/{family}" + "".join(f".{x}" for x in changes.values())
    shutil.rmtree(work + "/out", ignore_errors=True)
    if not os.path.exists(source):
        pf.source(source, family=family, **changes)
    pf.convert(BIN + "minimax-convert", source, work + "/out", "--quant", scheme, *options)
    return pf.Packed(work + "/out")


def changed(packed, change):
    p = copy.deepcopy(packed)
    change(p)
    return p


def padded_vocabulary():
    for scheme in pf_schemes:
        for align in ("split", "pad"):
            verify(load("m2", "none", "--override", "lm_head*=" + scheme, "--override", "*embed*=" + scheme, "--tp", "4", "--tp-align", align,
                        vocab_size=265, intermediate_size=512), None)


def padding():
    p = load("m2", "block_fp8", "--tp", "4", "--tp-align", "pad", vocab_size=265)  # experts of 64 columns: 16 on each of four, in blocks of 128
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.block_sparse_moe.experts.w2_weight"):
        data = part(p, 3, name)
        at = len(data) - 1
        assert data[at] == 0 and data[at - 1] == 0, name
        verify(changed(p, lambda c, n=name, i=at: part(c, 3, n).__setitem__(i, 1)), "E_PADDING", name)


def scales():
    for align in ("split", "pad"):
        p = load("m2", "block_fp8", "--tp", "2", "--tp-align", align)
        name = "model.layers.0.self_attn.qkv_proj.weight_scale_inv"
        verify(changed(p, lambda c: part(c, 1, name).__setitem__(slice(0, 4), bytes(4))), "E_SCALE", "qkv_proj")


def copies():
    p = load("m2", "block_fp8", "--tp", "4")  # two heads of keys on four ranks
    for name, at in (("model.norm.weight", 8), ("model.layers.0.block_sparse_moe.gate.weight", 8), ("model.layers.0.self_attn.k_norm.weight", 0)):
        verify(changed(p, lambda c, n=name, i=at: part(c, 3, n).__setitem__(i, part(c, 3, n)[i] ^ 1)), "E_COPIES", name)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    keys = 32 * 64  # behind one head of queries of 32 rows
    verify(changed(p, lambda c: part(c, 1, name).__setitem__(keys, part(c, 1, name)[keys] ^ 1)), "E_COPIES", "qkv_proj.weight\": piece 1")
    verify(changed(p, lambda c: part(c, 1, name).__setitem__(0, part(c, 1, name)[0] ^ 1)), None)  # of its own, no copy


def models():
    for family in ("m1", "m2"):
        p = load(family, "none", "--tp", "2")
        for key, value in (("rope_theta", 123.0), ("norm_eps", 0.5), ("top_k", 1), ("max_positions", 32), ("rotary_dim", 8), ("deepnorm_mlp", {"alpha": 2.0, "beta": 1.0})):
            verify(changed(p, lambda c, k=key, v=value: c.manifest["model"].update({k: v})), "E_CONFIG", f'key "{key}"')


def pieces():
    """What a conversion takes a piece for is what the runtime does."""
    p = load("m2", "none", "--tp", "2", num_hidden_layers=2, attn_type_list=[1, 1])

    def swap(c, a, i, b, j):
        x, y = c.tensor(a)["pieces"][i], c.tensor(b)["pieces"][j]
        x["source"], y["source"] = y["source"], x["source"]

    for a, i, b, j in (("0.block_sparse_moe.experts.w13_weight", 0, "0.block_sparse_moe.experts.w13_weight", 1), ("0.input_layernorm.weight", 0, "0.post_attention_layernorm.weight", 0),
                       ("0.self_attn.qkv_proj.weight", 1, "0.self_attn.qkv_proj.weight", 2), ("0.self_attn.o_proj.weight", 0, "1.self_attn.o_proj.weight", 0)):
        verify(changed(p, lambda c: swap(c, a, i, b, j)), "E_CONFIG", a)
    verify(changed(p, lambda c: c.tensor("1.block_sparse_moe.experts.w2_weight")["pieces"][0].update(source="model.layers.1.block_sparse_moe.experts.{e}.w2")), "E_CONFIG")


def dead_rows():
    for scheme in ("none", "nvfp4", "w4a16"):
        p = load("m2", "none", "--override", "lm_head*=" + scheme, "--tp", "2")
        assert p.manifest["dead_rows"] == [], p.manifest["dead_rows"]
        verify(changed(p, lambda c: c.manifest.update(dead_rows=[5])), "E_DEAD_ROWS", "row 5 in dead_rows")
        verify(changed(p, lambda c: c.manifest.update(dead_rows=[263])), "E_DEAD_ROWS", "row 263 in dead_rows")
    p = load("m2", "none", "--tp", "2")

    def blank(c):
        part(c, 1, "lm_head.weight")[128:256] = bytes(128)  # the second row of 64 numbers, of 160 on a rank

    verify(changed(p, blank), "E_DEAD_ROWS", "row 161 all zero")
    verify(changed(changed(p, blank), lambda c: c.manifest.update(dead_rows=[161])), None)


pf_schemes = ("bf16", "block_fp8", "channel_fp8", "tensor_wise_fp8", "mxfp8", "int8", "w4a8", "w4afp8", "w4a16", "mxfp4", "nvfp4", "nvfp4a16")
for part_of_it in (padded_vocabulary, padding, scales, copies, models, pieces, dead_rows):
    part_of_it()
shutil.rmtree(work)
print(f"{cases} checkpoints sealed again: what agrees passes, the others are refused by name")
