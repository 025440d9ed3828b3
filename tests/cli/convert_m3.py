#!/usr/bin/env python3
"""MiniMax-M3 as a source: names of the release, of the text model alone and of transformers, both forms of the config, MXFP8 with exponents under
"weight_scale_inv"; what is left out is said and told in the manifest, and every other name is refused."""
import copy
import json
import os
import re
import shutil
import subprocess

from convert_files import Checkpoint, Scratch, main, noise, read_st, run, NO_NAN

CONVERT, VERIFY = shutil.which("minimax-convert"), shutil.which("minimax-verify")
TINY = "tests/data/tiny-m3-random"
PREFIX = "language_model."


def convert(source, out, *options):
    done = subprocess.run([CONVERT, source, "-o", out, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def refused(source, out, status, *says, options=()):
    done = run(CONVERT, source, "-o", out, *options)
    text = done.stderr.decode()
    assert done.returncode == status and all(s in text for s in says), (done.returncode, text)


def manifest(path):
    with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
        return json.load(f)


def stored(path):
    """Every tensor of every rank, by rank and name."""
    return {(name[11:16], k): v for name in sorted(os.listdir(path)) if name.startswith("model-rank-")
            for k, v in read_st(os.path.join(path, name))[0].items()}


def same_numbers(a, b):
    x, y = stored(a), stored(b)
    assert x.keys() == y.keys() and all(x[k] == y[k] for k in x), [k for k in x if x[k] != y.get(k)]
    assert manifest(a)["model"] | {"architecture": ""} == manifest(b)["model"] | {"architecture": ""}


def renamed(source, spell, keep=lambda name: True):
    out = copy.copy(source)
    out.tensors = {spell(name): t for name, t in source.tensors.items() if keep(name)}
    out.file = {name: "model-00001-of-00001.safetensors" for name in out.tensors}
    return out


def text_only(name):
    return name.removeprefix(PREFIX)


def fused(source):
    """The names of transformers' own class: experts stacked, gate and up in one."""
    old = {text_only(k): v for k, v in source.tensors.items() if k.startswith(PREFIX)}
    new, experts = {}, source.config["text_config"]["num_local_experts"]
    for name, (dtype, shape, data) in old.items():
        at = name.replace("block_sparse_moe.e_score", "mlp.gate.e_score").replace("block_sparse_moe.", "mlp.").replace(".index_", ".indexer.")
        if ".experts." in name:
            if ".experts.0.w2." in name:
                parts = [old[name.replace(".0.", f".{e}.", 1) if name.count(".0.") == 1 else name.replace("experts.0", f"experts.{e}")]
                         for e in range(experts)]
                new[at.replace("experts.0.w2.weight", "experts.down_proj")] = (dtype, [experts, *shape], b"".join(p[2] for p in parts))
            elif ".experts.0.w1." in name:
                both = [old[name.replace("experts.0.w1", f"experts.{e}.{w}")] for e in range(experts) for w in ("w1", "w3")]
                new[at.replace("experts.0.w1.weight", "experts.gate_up_proj")] = (dtype, [experts, 2 * shape[0], shape[1]],
                                                                                  b"".join(p[2] for p in both))
        elif ".gate_proj." in name:
            up = old[name.replace("gate_proj", "up_proj")]
            new[at.replace("gate_proj", "gate_up_proj")] = (dtype, [2 * shape[0], shape[1]], data + up[2])
        elif ".up_proj." not in name:
            new[at] = (dtype, shape, data)
    out = copy.copy(source)
    out.tensors, out.file = new, {name: "model.safetensors" for name in new}
    return out


def saved_form(config):
    """As transformers writes the config back: other keys, and "silu" where swigluoai is meant."""
    new = copy.deepcopy(config)
    t = new["text_config"]
    s = t.pop("sparse_attention_config")
    t.update(model_type="minimax_m3_vl_text", hidden_act="silu", index_n_heads=s["sparse_num_index_heads"], index_head_dim=s["sparse_index_dim"],
             index_block_size=s["sparse_block_size"], index_topk_blocks=s["sparse_topk_blocks"], index_local_blocks=s["sparse_local_block"])
    t["layer_types"] = [("full_attention", "minimax_m3_sparse")[f] for f in s["sparse_attention_freq"]]
    t["mlp_layer_types"] = [("dense", "sparse")[f] for f in t.pop("moe_layer_freq")]
    t["rope_parameters"] = {"rope_theta": t.pop("rope_theta"), "partial_rotary_factor": t.pop("partial_rotary_factor"), "rope_type": "default"}
    return new


def test_forms():
    source = Checkpoint.load(TINY)
    with Scratch() as tmp:
        convert(TINY, tmp + "/released", "--tp", "4")
        text = renamed(source, text_only, lambda name: name.startswith(PREFIX))
        text.config = {"architectures": ["MiniMaxM3SparseForCausalLM"], **source.config["text_config"]}
        native = fused(source)
        native.config = source.config | {"architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text"}
        inside = renamed(source, lambda n: n.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm"))
        saved = copy.copy(source)
        saved.config = saved_form(source.config)
        for name, c in (("text", text), ("native", native), ("inside", inside), ("saved", saved)):
            c.save(f"{tmp}/{name}-source")
            convert(f"{tmp}/{name}-source", f"{tmp}/{name}", "--tp", "4", "-q")
            same_numbers(tmp + "/released", f"{tmp}/{name}")
        assert manifest(tmp + "/text")["left_out"] == []


def test_left_out():
    source = Checkpoint.load(TINY)
    expected = []
    for prefix in ("multi_modal_projector.", "patch_merge_mlp.", "vision_tower."):
        tensors = [t for name, t in source.tensors.items() if name.startswith(prefix)]
        expected.append({"prefix": prefix, "tensors": len(tensors), "bytes": sum(len(t[2]) for t in tensors)})
    with Scratch() as tmp:
        said = convert(TINY, tmp + "/one")
        line = f"note: {sum(x['tensors'] for x in expected)} tensors ({sum(x['bytes'] for x in expected)} bytes) are left out"
        assert line in said and "vision_tower.*" in said, said
        assert manifest(tmp + "/one")["left_out"] == expected and manifest(tmp + "/one")["version"] == 3
        convert(tmp + "/one", tmp + "/again", "--tp", "2", "-q")  # from packed to packed: told again
        convert(TINY, tmp + "/direct", "--tp", "2", "-q")
        for name in os.listdir(tmp + "/direct"):
            with open(f"{tmp}/direct/{name}", "rb") as a, open(f"{tmp}/again/{name}", "rb") as b:
                assert a.read() == b.read(), name
        drafts = copy.copy(source)
        extra = {PREFIX + "model.mtp.layers.0.x.weight": ("BF16", [2], b"abcd"), PREFIX + "model.dspark.fc.weight": ("BF16", [1], b"ab")}
        drafts.tensors, drafts.file = source.tensors | extra, source.file | dict.fromkeys(extra, "model-00001-of-00003.safetensors")
        drafts.save(tmp + "/drafts")
        convert(tmp + "/drafts", tmp + "/d", "-q")
        told = manifest(tmp + "/d")["left_out"]
        assert told[:2] == [{"prefix": "model.dspark.", "tensors": 1, "bytes": 2}, {"prefix": "model.mtp.", "tensors": 1, "bytes": 4}], told


def test_preset():
    """A preset divides M3 as M3.1-Flash is: experts in four bits, attention, dense layers and shared experts in MXFP8, all else as stored."""
    with Scratch() as tmp:
        convert(TINY, tmp + "/out", "-q", "--tp", "2", "--quant", "mxfp8_attention_nvfp4_experts")
        for t in manifest(tmp + "/out")["tensors"]:
            what = t["name"].removesuffix(".weight").removesuffix("_weight").rsplit(".", 1)[-1]
            wanted = ("nvfp4a16" if what in ("w13", "w2") else "mxfp8" if what in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") else
                      "f32" if what in ("gate", "e_score_correction_bias") else "bf16")
            assert t["scheme"] == wanted, (t["name"], t["scheme"])


def test_unsharded_texts():
    """What a source may have and no release has: names with quotes among copied tensors, the quantization in the text model's config alone."""
    source = Checkpoint.load(TINY)
    name = 'vision_tower.a"b\\c\u00e9.weight'
    source.tensors[name], source.file[name] = ("BF16", [2, 2], bytes(8)), "model-00001-of-00003.safetensors"
    source.config["text_config"]["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with Scratch() as tmp:
        source.save(tmp + "/source")
        for scheme in ("none", "block_fp8"):
            out = f"{tmp}/{scheme}"
            convert(tmp + "/source", out, "--layout", "hf", "--quant", scheme, "-q")
            for more in ([], ["--source", tmp + "/source"]):
                done = run(VERIFY, "-q", out, *more)
                assert done.returncode == 0, done.stderr
            with open(out + "/model.safetensors.index.json", encoding="utf-8") as f:
                assert json.load(f)["weight_map"][name].startswith("model-0000")
            with open(out + "/config.json", encoding="utf-8") as f:
                made = json.load(f)
            assert "quantization_config" not in made["text_config"] and ("quantization_config" in made) == (scheme == "block_fp8")
            convert(out, out + "-packed", "-q", "--tp", "2")


def test_followed():
    """A finished output is done under --follow, too, with all that is left out: under the release's names and where drafts are among it."""
    source = Checkpoint.load(TINY)
    extra = {f"{PREFIX}model.mtp.layers.{i}.x.weight": ("BF16", [2 + i], bytes(4 + 2 * i)) for i in range(3)}
    source.tensors, source.file = source.tensors | extra, source.file | dict.fromkeys(extra, "model-00001-of-00003.safetensors")
    with Scratch() as tmp:
        source.save(tmp + "/source")
        shutil.copy("tests/data/tiny-m2/tokenizer.json", tmp + "/source")
        convert(tmp + "/source", tmp + "/plain", "-q", "--tp", "2")
        for name in ("made", "made", "plain"):
            convert(tmp + "/source", f"{tmp}/{name}", "-q", "--tp", "2", "--follow", "--follow-quiet", "0", "--follow-timeout", "9", "--resume")
        for name in os.listdir(tmp + "/plain"):
            with open(f"{tmp}/plain/{name}", "rb") as a, open(f"{tmp}/made/{name}", "rb") as b:
                assert a.read() == b.read(), name
        refused(tmp + "/source", tmp + "/made", 2, "E_RESUME", "--tp 2", options=("-q", "--tp", "4", "--follow", "--follow-quiet", "0", "--resume"))


def test_refused():
    source = Checkpoint.load(TINY)
    with Scratch() as tmp:
        for i, name in enumerate(("audio_tower.x.weight", "vision_towers.weight", PREFIX + "model.layers.0.self_attn.index_q_proj.weight",
                                  PREFIX + "model.layers.1.mlp.gate_proj.weight", PREFIX + "vision_tower.x", "language_model.x")):
            bad = copy.copy(source)
            bad.tensors, bad.file = source.tensors | {name: ("BF16", [2], b"abcd")}, source.file | {name: "model-00001-of-00003.safetensors"}
            bad.save(f"{tmp}/bad{i}")
            if name.endswith("vision_tower.x"):
                continue  # behind the text model's prefix it is none of the vision tower
            refused(f"{tmp}/bad{i}", tmp + "/out", 3, name, "this architecture does not have")
        for i, name in enumerate(("model.layers.1.self_attn.index_k_proj.weight", "model.layers.0.mlp.up_proj.weight",
                                  "model.layers.2.block_sparse_moe.shared_experts.down_proj.weight", "model.layers.3.self_attn.q_norm.weight")):
            bad = copy.copy(source)
            bad.tensors = {k: v for k, v in source.tensors.items() if k != PREFIX + name}
            bad.save(f"{tmp}/gone{i}")
            refused(f"{tmp}/gone{i}", tmp + "/out", 3, "E_MISSING", name)
        for prefix in ("base_model.model.", "module.", "_orig_mod.", "model."):  # of all names, the vision tower's too
            renamed(source, lambda name, prefix=prefix: prefix + name).save(tmp + "/" + prefix)
            refused(tmp + "/" + prefix, tmp + "/out", 3, "E_MISSING", f'take the prefix "{prefix}" off all names')
        past = copy.copy(source)
        past.tensors = source.tensors | {name: ("BF16", [2], b"abcd") for name in ("mtp.x.weight", PREFIX + "mtp.y.weight")}
        past.file = source.file | dict.fromkeys(past.tensors.keys() - source.tensors.keys(), "model-00001-of-00003.safetensors")
        past.save(tmp + "/past")
        assert "for multi-token prediction, are left out (tensors: 2)" in convert(tmp + "/past", tmp + "/past-out")
        refused(TINY, tmp + "/out", 4, "E_TP", "num_attention_heads 8", options=("--tp", "16"))
        wide = copy.copy(source)
        wide.config = copy.deepcopy(source.config)
        wide.config["text_config"]["shared_intermediate_size"] = 63
        wide.save(tmp + "/wide")
        refused(tmp + "/wide", tmp + "/out", 4, "E_TP", "shared_intermediate_size 63", options=("--tp", "2"))


def unsharded(path):
    return {k: v for name in sorted(os.listdir(path)) if name.endswith(".safetensors") for k, v in read_st(os.path.join(path, name))[0].items()}


def test_layout_hf():
    """Unsharded: the release's names, the vision tower and drafts byte for byte; and back again as a source."""
    source = Checkpoint.load(TINY)
    with Scratch() as tmp:
        assert "vLLM" not in convert(TINY, tmp + "/none", "--layout", "hf", "--part-size", "1M")
        assert unsharded(tmp + "/none") == source.tensors
        for quant in ("block_fp8", "mxfp8_attention_nvfp4_experts", "channel_fp8"):
            said = convert(TINY, f"{tmp}/{quant}", "--layout", "hf", "--quant", quant)
            assert ("--dialect ct is what it reads" if quant == "block_fp8" else "fuses the index projections of MiniMax-M3") in said, said
            subprocess.run([VERIFY, f"{tmp}/{quant}", "-q", "--source", TINY], check=True, stdout=subprocess.DEVNULL)
            made = unsharded(f"{tmp}/{quant}")
            with open(f"{tmp}/{quant}/config.json", encoding="utf-8") as f:
                config = json.load(f)
            quantised = {name.rsplit(".", 1)[0] for name in made if name.endswith(("scale", "scale_inv"))}
            plain = {name.removesuffix(".weight") for name, t in source.tensors.items() if name.endswith(".weight") and len(t[1]) > 1} - quantised
            assert all(made[n] == t for n, t in source.tensors.items() if n.rsplit(".", 1)[0] not in quantised) and len(quantised) == 20 + 3 + 4 * 21
            q = config.pop("quantization_config")
            assert config == source.config
            left_out = q.get("ignore", q.get("modules_to_not_convert"))
            # compressed-tensors passes over weights of modules that end with "norm", and over no others.
            plain |= {name.removesuffix(".weight") for name in source.tensors if re.match(r"vision_tower\..*(?<!norm)\.weight$", name)}
            plain |= {name.replace(".mlp.fc", ".fc") for name in plain if name.startswith("vision_tower.")}  # vLLM's names
            assert plain <= set(left_out) and not quantised & set(left_out), plain - set(left_out)
            for group in list(q.get("config_groups", {}).values())[:-1]:  # the last one takes every other module
                fits = {m for m in quantised | plain if any(re.match(t[3:], m) for t in group["targets"])}
                four = "nvfp4" in group["format"]
                assert fits == {m for m in quantised if (".experts." in m) == four}, group
            if quant != "mxfp8_attention_nvfp4_experts":  # compressed-tensors rounds the inverse of a global scale
                convert(f"{tmp}/{quant}", f"{tmp}/back", "-q", "--tp", "2", "--ep", "2")
                convert(TINY, f"{tmp}/packed", "-q", "--tp", "2", "--ep", "2", "--quant", quant)
                same_numbers(f"{tmp}/back", f"{tmp}/packed")
                shutil.rmtree(f"{tmp}/back")
                shutil.rmtree(f"{tmp}/packed")
        said = convert(TINY, f"{tmp}/alike", "--layout", "hf", "--quant", "fp8_attention_nvfp4_experts", "--override", "*index_?_proj.weight=block_fp8")
        with open(f"{tmp}/alike/config.json", encoding="utf-8") as f:
            targets = json.load(f)["quantization_config"]["config_groups"]["group_0"]["targets"]
        # SGLang fuses both index projections.
        assert "fuses the index" not in said and any(re.match(t[3:], "language_model.model.layers.1.self_attn.index_qkv_proj") for t in targets), targets
        text = renamed(source, text_only, lambda name: name.startswith(PREFIX))
        text.config = {"architectures": ["MiniMaxM3SparseForCausalLM"], **source.config["text_config"]}
        inside = renamed(source, lambda n: n.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm"))
        drafts = copy.copy(source)
        extra = {PREFIX + "model.mtp.layers.0.x.weight": ("F32", [1, 1, 2], b"abcdefgh"), PREFIX + "model.dspark.fc.weight": ("BF16", [1], b"ab")}
        drafts.tensors, drafts.file = source.tensors | extra, source.file | dict.fromkeys(extra, "model-00001-of-00003.safetensors")
        for name, c, expected in (("text", text, text.tensors), ("inside", inside, source.tensors), ("drafts", drafts, drafts.tensors)):
            c.save(f"{tmp}/{name}")
            convert(f"{tmp}/{name}", f"{tmp}/{name}-hf", "-q", "--layout", "hf")
            assert unsharded(f"{tmp}/{name}-hf") == expected, name
            subprocess.run([VERIFY, f"{tmp}/{name}-hf", "-q", "--source", f"{tmp}/{name}"], check=True, stdout=subprocess.DEVNULL)
        convert(tmp + "/text", tmp + "/packed-text", "-q", "--tp", "2")
        convert(tmp + "/packed-text", tmp + "/again", "-q", "--layout", "hf")
        assert unsharded(tmp + "/again") == text.tensors
        # Not where the vision tower is gone, or where names are those that transformers gives its own classes.
        convert(TINY, tmp + "/packed", "-q")
        refused(tmp + "/packed", tmp + "/out", 4, "E_ARCH", "leaves out multi_modal_projector.*", options=("--layout", "hf"))
        native = fused(source)
        native.config = source.config | {"architectures": ["MiniMaxM3VLForCausalLM"], "model_type": "minimax_m3_vl_text"}
        native.save(tmp + "/native")
        refused(tmp + "/native", tmp + "/out", 4, "E_ARCH", "transformers' own", options=("--layout", "hf"))
        odd = copy.copy(source)
        odd.tensors = source.tensors | {"vision_tower.position_ids": ("I64", [1], b"abcdefgh")}
        odd.file = source.file | {"vision_tower.position_ids": "model-00001-of-00003.safetensors"}
        odd.save(tmp + "/odd")
        refused(tmp + "/odd", tmp + "/out", 4, "E_DTYPE", "vision_tower.position_ids", options=("--layout", "hf"))


def test_mxfp8():
    """The release in MXFP8: attention, MLPs and experts as codes, one exponent for 32 columns of a row, kept bit for bit and multiplied."""
    source = Checkpoint.load(TINY)
    released = copy.copy(source)
    released.tensors, released.file = {}, {}
    for name, (dtype, shape, data) in source.tensors.items():
        where, last = source.file[name], name.rsplit(".", 2)[-2]
        quantised = name.startswith(PREFIX) and len(shape) == 2 and "index_" not in last and last not in ("gate", "embed_tokens", "lm_head")
        if not quantised:
            released.tensors[name], released.file[name] = (dtype, shape, data), where
            continue
        blocks = -(-shape[1] // 32)
        codes = noise(name, shape[0] * shape[1]).translate(NO_NAN)
        exponents = bytes(118 + b % 4 for b in noise(name + "!", shape[0] * blocks))
        released.tensors[name], released.file[name] = ("F8_E4M3", shape, codes), where
        released.tensors[name + "_scale_inv"], released.file[name + "_scale_inv"] = ("U8", [shape[0], blocks], exponents), where
    released.config = copy.deepcopy(source.config)
    released.config["quantization_config"] = {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
        "ignored_layers": ["lm_head", "model.embed_tokens", "model.layers.3.block_sparse_moe.gate", "model.layers.1.self_attn.index_q_proj"]}
    with Scratch() as tmp:
        released.save(tmp + "/source")
        for tp in (1, 8):
            convert(tmp + "/source", f"{tmp}/tp{tp}", "-q", "--tp", str(tp))
            said = subprocess.run([VERIFY, f"{tmp}/tp{tp}", "--source", tmp + "/source"], capture_output=True, text=True, check=True)
            assert "75 of 75 tensors exact" in said.stdout, said.stdout
        one, t = stored(tmp + "/tp1"), released.tensors
        for ours, theirs in (("model.layers.0.mlp.gate_up_proj.weight", ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")),
                             ("model.layers.2.self_attn.o_proj.weight", ("model.layers.2.self_attn.o_proj", )),
                             ("model.layers.4.block_sparse_moe.shared_experts.down_proj.weight",
                              ("model.layers.4.block_sparse_moe.shared_experts.down_proj", ))):
            for suffix, stored_as in (("", ""), ("_scale_inv", "_scale")):
                whole = b"".join(t[f"{PREFIX}{name}.weight{suffix}"][2] for name in theirs)
                assert one["00000", ours + stored_as][2] == whole, ours + suffix
        schemes = {x["name"]: x["scheme"] for x in manifest(tmp + "/tp1")["tensors"]}
        assert schemes["model.layers.1.self_attn.qkv_proj.weight"] == schemes["model.layers.1.block_sparse_moe.experts.w13_weight"] == "mxfp8"
        assert schemes["model.layers.1.self_attn.index_q_proj.weight"] == "bf16" and schemes["model.layers.1.block_sparse_moe.gate.weight"] == "f32"


if __name__ == "__main__":
    main([test_forms, test_left_out, test_preset, test_unsharded_texts, test_followed, test_refused, test_layout_hf, test_mxfp8])
