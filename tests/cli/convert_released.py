#!/usr/bin/env python3
"""The released MiniMax-M1, by its real config and index alone: every name is used once, the bytes add up to the published total, and the
plan for tp 8 and 16 holds what it must. Exit status 77 where the files are not here; they may not be passed on."""
import json
import os
import shutil
import sys

import convert_files as cf
from convert_files import INDEX, Scratch

CONVERT = shutil.which("minimax-convert")
RELEASED = os.path.join(os.environ.get("SHARED", "../shared"), "released/minimax-m1")
NAMES, BYTES = 8243, 912_210_767_872


def plan(path, *args):
    done = cf.ok(CONVERT, path, "--dry-run", "--names-only", "--json", *args)
    assert done.stderr == b""
    return json.loads(done.stdout)


def released():
    for tp in (1, 2, 4, 8, 16, 32, 64):
        p = plan(RELEASED, "--tp", tp, "--quant", "block_fp8")
        assert (p["source_tensors"], p["source_bytes"], p["tp"]) == (NAMES, BYTES, tp), p
        assert len(p["rank_bytes"]) == tp and len(set(p["rank_bytes"])) == 1 and sum(p["rank_bytes"]) == p["output_bytes"]
    p = plan(RELEASED, "--tp", 1)
    # As stored: the same weights, and headers of less than a thousandth.
    assert BYTES <= p["output_bytes"] < BYTES * 1.001 and p["source_bytes"] == BYTES
    for tp in (3, 7, 128):
        done = cf.run(CONVERT, RELEASED, "--dry-run", "--names-only", "--tp", tp)
        cf.assert_error(done, "minimax-convert", 4, "E_TP", "num_attention_heads 64", "expected one of 1, 2, 4, 8, 16, 32, 64")
    done = cf.run(CONVERT, RELEASED, "--dry-run", "--names-only", "--tp", 16, "--quant", "block_fp8", "--tp-align", "error")
    cf.assert_error(done, "minimax-convert", 4, "E_TP_ALIGN", "experts.w13_weight", "tp 16", "64 x 128")  # 576 rows: 4.5 blocks
    cf.ok(CONVERT, RELEASED, "--dry-run", "--names-only", "--tp", 8, "--quant", "block_fp8", "--tp-align", "error")  # 1152: 9 blocks


def listed():
    """--list at tp 8: shapes and bytes of every packed tensor, by the table of dimensions."""
    p = plan(RELEASED, "--tp", 8, "--list", "--quant", "block_fp8")
    t = {x["name"]: x for x in p["tensors"]}
    layer = "model.layers.{}."
    for l in range(80):
        at = layer.format(l)
        full = l % 8 == 7
        shapes = {
            "self_attn.qkv_proj.weight": (0, 1024 + 2 * 128 if full else 3072, 6144),
            "block_sparse_moe.gate.weight": (0, 32, 6144),
            "block_sparse_moe.experts.w13_weight": (32, 2 * 1152, 6144),
            "block_sparse_moe.experts.w2_weight": (32, 6144, 1152),
            "input_layernorm.weight": (0, 6144, 1),
            "post_attention_layernorm.weight": (0, 6144, 1),
            **({"self_attn.o_proj.weight": (0, 6144, 1024)} if full else {
                "self_attn.out_proj.weight": (0, 6144, 1024), "self_attn.output_gate.weight": (0, 1024, 6144), "self_attn.norm.weight": (0, 1024, 1)}),
        }
        for name, shape in shapes.items():
            x = t.pop(at + name)
            assert (x["lead"], x["rows"], x["cols"]) == shape, x
            if name.endswith("w13_weight"):
                assert x["scheme"] == "block_fp8" and x["bytes"] == 32 * (2304 * 6144 + 18 * 48 * 4), x
            if name.endswith("moe.gate.weight"):
                assert x["scheme"] == "f32" and x["bytes"] == 32 * 6144 * 4, x
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        x = t.pop(name)
        assert (x["scheme"], x["rows"], x["cols"]) == ("bf16", 25008, 6144), x
    assert t.pop("model.norm.weight")["rows"] == 6144
    assert not t, list(t)


def spoilt():
    """One name less, one more, another total: found, and named."""
    with open(f"{RELEASED}/{INDEX}", encoding="utf-8") as f:
        index = json.load(f)
    with Scratch() as root:
        shutil.copy(RELEASED + "/config.json", root)

        def refused(code, *says):
            with open(f"{root}/{INDEX}", "w", encoding="utf-8") as f:
                json.dump(index, f)
            cf.assert_error(cf.run(CONVERT, root, "--dry-run", "--names-only"), "minimax-convert", 3, code, *says)

        names, name = index["weight_map"], "model.layers.41.block_sparse_moe.experts.17.w3.weight"
        file = names.pop(name)
        refused("E_MISSING", name, "found no such tensor\n")
        names[name] = file
        names["model.layers.41.block_sparse_moe.experts.32.w3.weight"] = file
        refused("E_UNKNOWN", "experts.32.w3")
        del names["model.layers.41.block_sparse_moe.experts.32.w3.weight"]
        index["metadata"]["total_size"] += 1
        refused("E_IDX", str(BYTES), str(BYTES + 1))
        index["metadata"]["total_size"] -= 1
        names[name] = "../" + file
        refused("E_IDX_PATH", name)


if __name__ == "__main__":
    if not os.path.exists(f"{RELEASED}/{INDEX}"):
        print(f"{RELEASED} is not here")
        sys.exit(77)
    cf.main([released, listed, spoilt])
