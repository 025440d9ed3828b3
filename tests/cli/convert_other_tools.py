#!/usr/bin/env python3
"""Sources as other tools leave them: totals of the index that are floats, null or wrong, prefixes of merges, names of MLX, block sizes that
nobody declares, widths that are not read, static scales without calibration, scales without their weight. Each is read, read with a note, or
refused by its own name."""
import json
import os
import shutil

import convert_files as cf
from convert_files import Checkpoint, Scratch

CONVERT = shutil.which("minimax-convert")
LAYER = "model.layers.0."
ATTN, MOE = LAYER + "self_attn.", LAYER + "block_sparse_moe."


def copy(c, config=None, tensors=None):
    return Checkpoint(dict(c.config, **(config or {})), dict(tensors if tensors is not None else c.tensors))


def notes(c, *options):
    """Notes of a conversion and of a dry run, which are equal; not those on the tokenizer and template that small sources lack."""
    with Scratch() as root:
        c.save(root + "/src")
        said = [[line for line in cf.ok(CONVERT, root + "/src", *way, *options).stderr.decode().splitlines() if line.startswith("note: ") and "the source has no" not in line]
                for way in (["--dry-run"], ["-o", root + "/out"], ["-q", "-o", root + "/quiet"])]
        cf.ok("minimax-verify", "-q", root + "/out", "--source", root + "/src")
    assert said[0] == said[1] and said[2] == [], said
    return said[0]


def refused(c, status, code, *says):
    with Scratch() as root:
        c.save(root + "/src")
        done = cf.run(CONVERT, root + "/src", "-o", root + "/out")
        cf.assert_error(done, "minimax-convert", status, code, *says)
        assert b"and 0 more" not in done.stderr, done.stderr
        return done.stderr.decode()


def totals():
    c = cf.small()
    total = sum(len(data) for _, _, data in c.tensors.values())
    assert total > 1000

    def index(value):
        c.index = '{"metadata": %s, "weight_map": %s}' % (value, json.dumps({k: c.file[k] for k in c.tensors}))
        return c
    for right in (f'{{"total_size": {total}}}', f'{{"total_size": {total}.0}}', f'{{"total_size": {total / 1e3}e3}}',
                  f'{{"total_size": {total}.00e+0}}', '{"total_size": null}', "{}", "null"):
        assert notes(index(right)) == [], right
    for wrong in (2 * total, total - 1, total + 1, 0, 10**17):
        for text in (f"{wrong}", f"{wrong}.0"):
            assert notes(index(f'{{"total_size": {text}}}')) == [f"note: the index says total_size {wrong}, its tensors have {total} bytes"], text
    for bad in ("1.5", "-1.0", "1e30", "-1", '"5"', "1e999", "18446744073709551616", "0." + "0" * 70 + "1"):
        refused(index(f'{{"total_size": {bad}}}'), 3, "E_NUMBER", "model.safetensors.index.json")


def prefixes():
    c = cf.small()
    for prefix in ("base_model.model.", "module.", "_orig_mod.", "language_model.", "a.b.c."):
        refused(copy(c, None, {prefix + k: v for k, v in c.tensors.items()}), 3, "E_MISSING",
                f'it is there as "{prefix}model.embed_tokens.weight": take the prefix "{prefix}" off all names')
    inside = {k.replace("model.layers.0.", "model.layers.0._orig_mod."): v for k, v in c.tensors.items()}
    refused(copy(c, None, inside), 3, "E_MISSING", "torch.compile's \"_orig_mod.\"")
    one = dict(c.tensors)
    del one["model.norm.weight"]
    for more in ({}, {"mtp.model.norm.weight": ("BF16", [1], bytes(2))}):  # one such name is no prefix
        line = refused(copy(c, None, one | more), 3, "E_MISSING", "model.norm.weight", "found no such tensor")
        assert "more" not in line and "prefix" not in line, line
    del one["lm_head.weight"]
    refused(copy(c, None, one), 3, "E_MISSING", "(and 1 more is missing)")
    del one["model.embed_tokens.weight"]
    refused(copy(c, None, one), 3, "E_MISSING", "(and 2 more are missing)")


def mlx():
    c = cf.small(fp8=False)
    own = {"group_size": 64, "bits": 4}
    for config in ({"quantization": own}, {"quantization_config": own}, {"quantization": own, "quantization_config": own},
                   {"quantization": dict(own, mode="affine", **{"lm_head": {"group_size": 32, "bits": 8}})}):
        refused(copy(c, config), 4, "E_Q_METHOD", "MLX")
    t = {k: v for k, v in c.tensors.items() if ".experts." not in k}
    for ours, w in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        parts = [c.tensors[f"{MOE}experts.{e}.{ours}.weight"] for e in range(3)]
        t[f"{MOE}switch_mlp.{w}.weight"] = (parts[0][0], [3, *parts[0][1]], b"".join(p[2] for p in parts))
    refused(copy(c, None, t), 3, "E_MISSING", "switch_mlp", "are MLX's")


def past_last():
    """Layers for multi-token prediction by number and by name."""
    c = cf.small()
    more = {"mtp.fc.weight": ("BF16", [2, 2], bytes(8)), "mtp.layers.0.mlp.experts.0.w1.weight": ("F8_E4M3", [2, 2], bytes(4)),
            "model.mtp.layers.0.norm.weight": ("F32", [1], bytes(4)), "model.layers.1.embed_tokens.weight": ("BF16", [1], bytes(2))}
    line = "note: layers past the last, for multi-token prediction, are left out (tensors: %d)"
    assert notes(copy(c, None, c.tensors | more)) == [line % 4]
    for name, value in more.items():
        assert notes(copy(c, None, c.tensors | {name: value})) == [line % 1], name
    for name in ("mtp_fc.weight", "mtp", "model.mtpx.norm.weight", "xmtp.fc.weight", "model.layers.0.mtp.fc.weight"):
        refused(copy(c, None, c.tensors | {name: ("F32", [1], bytes(4))}), 3, "E_UNKNOWN", name, "that this architecture does not have")


def blocks():
    """A size that is not declared is taken where the scales have no other explanation, and not where they have."""
    note = "note: no weight_block_size is declared; blocks of 128 x 128 are taken, the only ones that fit all scales"
    bare = {"quantization_config": {"quant_method": "fp8"}}
    c = cf.small(hidden=300, heads=4, dim=64, inter=260)
    with Scratch() as root:
        c.save(root + "/src")
        copy(c, bare).save(root + "/bare")
        for name in ("src", "bare"):
            cf.ok(CONVERT, "-q", f"{root}/{name}", "-o", f"{root}/{name}-out")
        (a, _), (b, _) = cf.packed(root + "/src-out"), cf.packed(root + "/bare-out")
        assert a == b
    assert notes(copy(c, bare)) == [note] and notes(c) == []
    for other in (cf.small(hidden=300, heads=4, dim=64, inter=260, block=64), cf.small(hidden=300, heads=4, dim=64, inter=260, block=256),
                  cf.small(), cf.small(hidden=100, heads=2, dim=32, inter=100)):
        refused(copy(other, bare), 3, "E_Q_CONFIG", "weight_block_size")
    one = dict(c.tensors)  # all but one of the matrices fit
    name = MOE + "experts.1.w2.weight_scale_inv"
    one[name] = ("F32", [5, 5], cf.values(name, "F32", 25))
    refused(copy(c, bare, one), 3, "E_Q_CONFIG", "weight_block_size")
    refused(copy(c, {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}), 3, "E_Q_SHAPE", "[1, 1]")
    for other in (None, {"quant_method": "awq", "version": "gemm"}):
        refused(copy(c, {"quantization_config": other}), 3, "E_Q_CONFIG")


def widths():
    c = cf.small(fp8=False)

    def ct(bits, kind="int"):
        return {"quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"type": kind, "num_bits": bits, "group_size": 64, "symmetric": True}}}}
    for bits in (1, 2, 3, 5, 6, 16):
        for key, config in (("num_bits", ct(bits)), ("num_bits", ct(bits, "float")),
                            ("bits", {"quant_method": "gptq", "bits": bits, "group_size": 64}),
                            ("bits", {"quant_method": "awq", "bits": bits, "group_size": 64}), ("w_bit", {"quant_method": "awq", "w_bit": bits}),
                            ("bits", {"quant_method": "auto-round", "bits": bits, "packing_format": "auto_round:auto_gptq"}),
                            ("bits", {"quant_method": "auto-round", "bits": bits, "packing_format": "auto_round"})):
            refused(copy(c, {"quantization_config": config}), 4, "E_Q_METHOD", f'key "{key}": found {bits}, expected 4 or 8')
    modules = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq"}
    refused(copy(c, {"quantization_config": modules | {"extra_config": {"lm_head": {"bits": 16}, "a.b": {"bits": 3}}}}), 4, "E_Q_METHOD", "found 3")
    dynamic = {"quant_method": "gptq", "bits": 8, "group_size": 64, "dynamic": {"-:a": {}, "+:b": {"bits": 2}}}
    refused(copy(c, {"quantization_config": dynamic}), 4, "E_Q_METHOD", "found 2")
    refused(copy(c, {"quantization_config": {"quant_method": "gptq", "bits": "4"}}), 3, "E_Q_CONFIG", "bits")
    for config in (ct(4), ct(8), modules, modules | {"extra_config": {"lm_head": {"bits": 16}}}):  # nothing is quantised, and so nothing is wrong
        assert notes(copy(c, {"quantization_config": config})) == []
    for config, *says in (({"quant_method": "awq", "w_bit": 4, "bits": 8}, "w_bit", "found 4", "expected 8"),
                          ({"quant_method": "awq", "group_size": 64, "q_group_size": 128}, "q_group_size", "found 128", "expected 64"),
                          ({"quant_method": "gptq_v2", "checkpoint_format": "gptq", "group_size": 64}, "checkpoint_format", "gptq_v2")):
        refused(copy(c, {"quantization_config": config}), 3, "E_Q_CONFIG", *says)
    first = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for other in ({"compression_config": first | {"weight_block_size": [64, 128]}}, {"compression_config": first | {"weight_block_size": [128]}},
                  {"compression_config": first | {"weight_block_size": [128, 128, 128]}}, {"compression_config": first | {"fmt": "e4m3"}},
                  {"text_config": {"quantization_config": {"quant_method": "awq"}}}):
        refused(copy(c, {"quantization_config": first} | other), 3, "E_Q_CONFIG", "differs")
    for same in (dict(first), dict(reversed(first.items())), first | {"weight_block_size": [128, 128.0], "modules_to_not_convert": None}):
        assert notes(copy(c, {"quantization_config": first, "compression_config": same})) == []
    quark = dict(c.tensors)
    quark[ATTN + "q_proj.weight"] = ("I32", [8, 2], bytes(64))
    refused(copy(c, {"quantization_config": {"quant_method": "quark"}}, quark), 4, "E_Q_METHOD", "Quark's packed words of I32", "q_proj.weight")
    refused(copy(c, None, quark), 3, "E_DTYPE", "found I32")


def names_alone():
    """--names-only plans where types follow from names, and says so elsewhere, not that something is wrong with the source."""
    plain, fp8 = cf.small(fp8=False), cf.small()
    kinds = (("qweight", "qzeros", "scales"), ("weight_packed", "weight_scale"), ("weight", "weight_scale"), ("weight", "weight_scale", "weight_scale_2"))
    with Scratch() as root:
        for i, c in enumerate((plain, fp8)):
            c.save(f"{root}/{i}")
            cf.ok(CONVERT, f"{root}/{i}", "--dry-run", "--names-only")
        sources = [copy(fp8, {"quantization_config": {"quant_method": "mxfp8"}})]
        for kind in kinds:
            t = {k: v for k, v in plain.tensors.items() if "_proj." not in k}
            for k in plain.tensors.keys() - t.keys():
                t |= {k[:-len("weight")] + suffix: ("U8", [1], b"x") for suffix in kind}
            sources.append(copy(plain, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, t))
        for i, c in enumerate(sources):
            c.save(f"{root}/other{i}")
            for quant in ("none", "bf16"):
                done = cf.run(CONVERT, f"{root}/other{i}", "--dry-run", "--names-only", "--quant", quant)
                cf.assert_error(done, "minimax-convert", 2, "E_USAGE", "found --names-only with a quantised weight", "expected BF16 or block FP8")
        # Where a file is missing, --names-only is proposed to a dry run of the former alone.
        for name in ["0", "1"] + [f"other{i}" for i in range(len(sources))]:
            for file in [f for f in os.listdir(f"{root}/{name}") if f.endswith(".safetensors")]:
                os.remove(f"{root}/{name}/{file}")
            done = cf.run(CONVERT, f"{root}/{name}", "--dry-run")
            cf.assert_error(done, "minimax-convert", 3, "E_FS_MISSING", "are missing")
            assert (b"--names-only" in done.stderr) == (name in "01"), (name, done.stderr)


def static_scales():
    def source(values):
        c = cf.small()
        t = {}
        for i, (k, v) in enumerate(c.tensors.items()):
            if k.endswith("_scale_inv"):
                stem = k[:-len("weight_scale_inv")]
                t[stem + "weight_scale"] = ("F32", [], cf.values(k, "F32", 1))
                t[stem + "input_scale"] = ("F32", [], bytes.fromhex(values[i % len(values)]))
            else:
                t[k] = v
        return copy(c, {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, t)
    one, other = "0000803f", "0100803f"
    ones = "note: all static scales of activations are 1 (matrices: 4), as without calibration; --act-scales gives others"
    assert notes(source([one])) == [ones]
    assert notes(source([one, other])) == [] and notes(source([other])) == []
    assert notes(source([one]), "--quant", "bf16") == []
    refused(source(["00000000"]), 3, "E_Q_SCALE", "o_proj.input_scale", "found static scale 0 of activations, as all others")
    assert notes(source(["00000000"]), "--quant", "bf16") == []
    own = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    taken = "note: the source declares dynamic scales of activations, but has static ones, which are taken (matrices: 4)"
    dynamic = copy(source([other]), {"quantization_config": own})
    assert notes(dynamic) == [taken] and notes(dynamic, "--quant", "bf16") == []
    bare = copy(source([other]), None, {k: v for k, v in source([other]).tensors.items() if not k.endswith("input_scale")})
    lacks = "note: the source declares static scales of activations, but has none; each token gets its own (tensors: "
    assert len(notes(bare)) == 1 and notes(bare)[0].startswith(lacks) and notes(bare, "--quant", "bf16") == [], notes(bare)
    for quiet in (own, {"quant_method": "fp8"}):
        assert notes(copy(bare, {"quantization_config": quiet})) == []
    some = notes(source([other, "00000000", "00000000"]))
    assert all("static scales" in n for n in some), some


def act_scales():
    """Names and numbers in JSON were chosen one by one: each is of a tensor of the model, of whatever scheme."""
    c = cf.small()
    right = {LAYER + "self_attn.qkv_proj.weight.amax": 3, ATTN + "o_proj.input_scale": 0.5, MOE + "experts.w13_weight.amax": 4, MOE + "experts.w2_weight.amax": 5}
    more = {MOE + "experts.2.w1.activation_scale": 4, ATTN + "k_proj.weight.amax": 3, "lm_head.weight.amax": 1}
    for layout in ("packed", "hf"):
        for wrong, status in ((None, 0), ("lm_head.amax", 3), (ATTN + "x_proj.input_scale", 3), ("model.layers.1.self_attn.o_proj.input_scale", 3),
                              (MOE + "experts.3.w1.input_scale", 3), ("blk.0.ffn.weight.amax", 3)):
            with Scratch() as root:
                c.save(root + "/src")
                with open(root + "/scales.json", "w") as f:
                    json.dump(right | more | ({wrong: 1} if wrong else {}), f)
                for way in (["-o", root + "/out"], ["--dry-run"]):
                    done = cf.run(CONVERT, "-q", root + "/src", *way, "--layout", layout, "--quant", "tensor_wise_fp8", "--act-scales", root + "/scales.json")
                    if wrong:
                        cf.assert_error(done, "minimax-convert", status, "E_ACT_SCALES", wrong)
                    else:
                        assert done.returncode == 0, done


def types():
    """config.json of --layout hf names the type of the linears, under the keys that it has, where they have one and are not quantised."""
    def made(config, recipe, fp8, *words):
        with Scratch() as root:
            source = copy(cf.small(fp8=fp8), config).save(root + "/src")
            cf.ok(CONVERT, "-q", source, "-o", root + "/packed", *recipe)
            for way in ([source, "-o", root + "/hf", *recipe], [root + "/packed", "-o", root + "/again"]):
                cf.ok(CONVERT, "-q", *way, "--layout", "hf")
                with open(way[2] + "/config.json") as f:
                    found = json.load(f)
                assert (found.get("torch_dtype"), found.get("dtype")) == words, (config, recipe, found)
                cf.ok("minimax-verify", "-q", way[2], "--source", source)
    for key, at in (("torch_dtype", 0), ("dtype", 1)):
        for fp8 in (False, True):
            for scheme, word in (("f16", "float16"), ("f32", "float32"), ("bf16", "bfloat16")):
                for before in ("bfloat16", "float32"):
                    made({key: before}, ("--quant", scheme), fp8, *[word if i == at else None for i in range(2)])
    made({}, ("--quant", "f16"), False, None, None)
    made({"dtype": "bfloat16"}, ("--quant", "f16", "--override", "*.o_proj.weight=bf16"), False, None, "bfloat16")
    made({"torch_dtype": "bfloat16"}, ("--quant", "block_fp8"), False, "bfloat16", None)


def two_files():
    """hf_quant_config.json next to a quantization_config: both mean the same, or the source is refused."""
    def source(algo, root, own=None):
        c = copy(cf.small(), own and {"quantization_config": own})
        c.save(root + "/src")
        with open(root + "/src/hf_quant_config.json", "w") as f:
            f.write(algo if algo.startswith("{") else json.dumps({"quantization": {"quant_algo": algo}}))
        return cf.run(CONVERT, "-q", root + "/src", "-o", root + "/out")
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    for algo, own in (("NVFP4", None), ("W4A16_AWQ", None), ("FP8", modelopt), ("MIXED_PRECISION", modelopt)):
        with Scratch() as root:
            cf.assert_error(source(algo, root, own), "minimax-convert", 3, "E_Q_CONFIG", "hf_quant_config.json",
                            f'"quant_algo": found "{algo}", expected one that means "{"FP8_PB_WO" if own else "fp8"}", as config.json says')
    for algo, own in (("FP8_PB_WO", None), ("FP8", None), ("FP8_BLOCK_SCALES", None), ("FP8_PB_WO", modelopt), ("{}", None)):
        with Scratch() as root:
            done = source(algo, root, own)
            assert done.returncode == 0, done.stderr
    with Scratch() as root:
        cf.assert_error(source('{"quant', root), "minimax-convert", 3, "E_JSON", "hf_quant_config.json")


def other_width():
    """Four-bit words under a description of eight bits."""
    def source(bits):
        c, t = cf.small(hidden=16, dim=8, inter=16, fp8=False), {}
        for k, v in c.tensors.items():
            if ".experts." not in k and "_proj" not in k:
                t[k] = v
                continue
            (rows, cols), stem = v[1], k[:-len("weight")]
            t[stem + "weight_packed"] = ("I32", [rows, cols // 8], bytes(range(256))[:rows * cols // 2])
            t[stem + "weight_scale"] = ("BF16", [rows, 1], b"\x80\x3f" * rows)
            t[stem + "weight_shape"] = ("I64", [2], rows.to_bytes(8, "little") + cols.to_bytes(8, "little"))
        weights = {"type": "int", "num_bits": bits, "strategy": "channel", "symmetric": True}
        return copy(c, {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}}, t)
    assert notes(source(4)) == []
    refused(source(8), 3, "E_Q_CONFIG", "weight_packed", "found codes of 4 bits, expected 8 as ", "config.json says")


def descriptions():
    """What a description says of the weights' kind, type, width and groups is held against tensors and the other file."""
    def nvfp4(config, root, more=None):
        c, t = cf.small(hidden=32, dim=16, inter=32, fp8=False), {}
        for k, v in c.tensors.items():
            if ".experts." not in k:
                t[k] = v
                continue
            (rows, cols), stem = v[1], k[:-len("weight")]
            t[k] = ("U8", [rows, cols // 2], (bytes(range(256)) * 2)[:rows * cols // 2])
            t[stem + "weight_scale"] = ("F8_E4M3", [rows, cols // 16], b"\x38" * (rows * cols // 16))
            t[stem + "weight_scale_2"] = ("F32", [], b"\0\0\x80\x3a")
        copy(c, config and {"quantization_config": config} if config else None, t).save(root + "/src")
        for name, text in (more or {}).items():
            with open(f"{root}/src/{name}", "w") as f:
                f.write(text)
        return cf.run(CONVERT, "-q", root + "/src", "-o", root + "/out")

    for algo, right in (("NVFP4", True), ("W4A16_NVFP4", True), ("MIXED_PRECISION", True), ("W4A8_NVFP4_FP8", True), ("FP8", False), ("W4A16_AWQ", False),
                        ("FP8_PB_WO", False), ("W8A16", False)):
        with Scratch() as root:
            done = nvfp4({"quant_method": "modelopt", "quant_algo": algo}, root)
            if right:
                assert done.returncode == 0, done
            else:
                cf.assert_error(done, "minimax-convert", 3, "E_Q_CONFIG", "experts.0.w1.weight", "found weights in FP4, expected them in", "config.json says")

    # compressed-tensors' groups next to ModelOpt's file, as its converter leaves it: the same kind of weights is no contradiction.
    def groups(kind, bits, size=16):
        weights = {"type": kind, "num_bits": bits, "group_size": size, "strategy": "tensor_group", "symmetric": True}
        return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}}
    for algo, right in (("NVFP4", True), ("W4A16_NVFP4", True), ("FP8", False), ("W4A16_AWQ", False)):
        with Scratch() as root:
            c = copy(cf.small(fp8=False), {"quantization_config": groups("float", 4)})
            c.save(root + "/src")
            with open(root + "/src/hf_quant_config.json", "w") as f:
                json.dump({"quantization": {"quant_algo": algo}}, f)
            done = cf.run(CONVERT, "-q", root + "/src", "-o", root + "/out")
            if right:
                assert done.returncode == 0, done
            else:
                cf.assert_error(done, "minimax-convert", 3, "E_Q_CONFIG", "hf_quant_config.json", f'found "{algo}", expected one of weights in FP4, as config.json says')

    fp8 = cf.small()
    own = fp8.config["quantization_config"]
    for word in ("float8_e5m2", "e5m2"):
        refused(copy(fp8, {"quantization_config": own | {"fmt": word}}), 3, "E_Q_CONFIG", "found F8_E4M3, expected F8_E5M2", 'key "fmt"')
    for word in ("float8_e4m3fn", "e4m3", None):
        assert notes(copy(fp8, {"quantization_config": own | {"fmt": word}})) == []

    plain = cf.small(fp8=False)
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        own = {"quant_method": method, "bits": 4, "group_size": 128, "version": "gemm"} if method == "awq" else {"quant_method": method, "bits": 4, "group_size": 128}
        for more, says in (({"bits": 8}, 'key "bits": found 8, expected 4'), ({"w_bit": 8}, 'key "w_bit": found 8, expected 4'),
                           ({"group_size": 64}, 'key "group_size": found 64, expected 128'), ({"q_group_size": -1}, 'key "q_group_size": found -1, expected 128'),
                           ({"bits": 4, "group_size": 128, "desc_act": False}, None), ({"w_bit": 4, "q_group_size": 128, "version": "GEMM"}, None), ({}, None)):
            with Scratch() as root:
                copy(plain, {"quantization_config": own}).save(root + "/src")
                with open(f"{root}/src/{name}", "w") as f:
                    json.dump(more, f)
                done = cf.run(CONVERT, "-q", root + "/src", "-o", root + "/out")
                if says:
                    cf.assert_error(done, "minimax-convert", 3, "E_Q_CONFIG", name, says + " as config.json says")
                else:
                    assert done.returncode == 0, done


def orphans():
    c = cf.small()
    scale = ("F32", [1, 1], cf.values("x", "F32", 1))
    there = f'found a tensor of a quantised weight, but "{ATTN}q_norm.weight" is BF16 and is read without it'
    refused(copy(c, None, c.tensors | {ATTN + "q_norm.weight_scale": scale}), 3, "E_Q_ORPHAN", there)
    refused(copy(c, None, c.tensors | {MOE + "experts.3.w1.weight_scale_inv": scale}), 3, "E_Q_ORPHAN",
            "found a tensor of a quantised weight that is not there, expected none\n")
    both = {MOE + "experts.3.w1.weight_scale_inv": scale, MOE + "experts.3.w1.weight": ("F8_E4M3", [1, 1], b"\x40")}
    line = refused(copy(c, None, c.tensors | both), 3, "E_UNKNOWN", "that this architecture does not have (and 1 more tensors that are not read)")
    assert "quantised weight" not in line, line


if __name__ == "__main__":
    cf.main([totals, prefixes, mlx, past_last, blocks, widths, names_alone, static_scales, act_scales, types, two_files, other_width, descriptions, orphans])
