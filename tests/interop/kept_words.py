#!/usr/bin/env python3
"""Integers of AWQ, GPTQ and compressed-tensors stay as their tools made them: packed for eight ranks, cut again for one, written back by
`--layout hf`, every tensor of the source comes back bit for bit, in its own naming scheme. The numbers in between are those of published.py:
By itself two of them; "all" for every one. minimax-verify finds the source in the packed checkpoint, f32 from the packed one is the source's numbers, and logits of the kept and of the
f32 checkpoint agree within 2e-4. Any number of jobs gives the same bytes, as does a run that is killed and resumed; what cannot be written is
refused by name."""
import filecmp
import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys

import numpy as np
from decoded import planes
from packed import Packed, Part
from published import CASES, Checkpoint, awq, ct_int, ct_packed, gptq, gptq_config, method, write_safetensors

BIN = os.path.join(os.environ["BUILD"], "bin")
TMP = os.environ["TMPDIR"]
MODEL = Checkpoint("tests/data/tiny-m1")
KEPT = [name for name, case in CASES.items() if case[2] and re.match(r"w[48]a16_", case[2])]
AWQ = {"bits": 4, "group_size": 64, "version": "gemm"}
RUN = {"awq", "gptq_v1", "gptq_v1_asym", "gptq_8bit_asym"}  # whose logits are computed


def run(program, *words, status=0):
    p = subprocess.run([os.path.join(BIN, program), *words, "-q"], capture_output=True, text=True)
    assert p.returncode == status, (program, words, p.returncode, p.stderr)
    return p.stdout + p.stderr


def tensors(path):
    return {name: (dtype, shape, part.bytes[begin:end]) for file in sorted(glob.glob(path + "/*.safetensors"))
            for part in [Part(file)] for name, (dtype, shape, begin, end) in part.tensors.items()}


def same_files(a, b):
    names = sorted(os.listdir(a))
    assert names == sorted(os.listdir(b)) and filecmp.cmpfiles(a, b, names, shallow=False)[0] == names, (a, b)


def logits(path):
    ids = np.arange(1, 40, dtype="<i4")
    header = json.dumps({"ids.one": {"dtype": "I32", "shape": [len(ids)], "data_offsets": [0, ids.nbytes]}}).encode()
    with open(TMP + "/ids.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + ids.tobytes())
    run("minimax-eval", path, "--ids-from", TMP + "/ids.safetensors", "--logits", path + "-logits", "-t", "2")
    return np.frombuffer(Part(path + "-logits").elements("logits.one").tobytes(), "f4")


def check_followed(source):
    """--follow, which plans before it reads, gives the bytes of a plain conversion. Waited for before there is a plan: a file with the only
    weights of their kind, whose types follow from no rule, and the file that describes the quantization where config.json does not."""
    indexed = source + "-indexed"
    shutil.copytree(source, indexed)
    shutil.copy("tests/data/tiny-m1/tokenizer.json", indexed)
    part = Part(os.path.join(indexed, "model.safetensors"))
    os.unlink(os.path.join(indexed, "model.safetensors"))
    file_of = {t: "second" if "layers.1." in t else "first" for t in part.tensors}
    for file in "first", "second":
        write_safetensors(os.path.join(indexed, file), {t: (part.tensors[t][0], part.elements(t)) for t in file_of if file_of[t] == file})
    total = sum(end - begin for _, _, begin, end in part.tensors.values())
    with open(os.path.join(indexed, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": file_of}, f)
    run("minimax-convert", indexed, "-o", indexed + "-8", "--tp", "8")
    os.rename(os.path.join(indexed, "second"), source + "-second")
    follow = [indexed, "-o", indexed + "-followed", "--tp", "8", "--follow", "--follow-quiet"]
    said = run("minimax-convert", *follow, "0", "--follow-timeout", "1", status=75)
    assert "E_FOLLOW" in said and "second" in said, said
    os.rename(source + "-second", os.path.join(indexed, "second"))
    late = os.path.join(indexed, "quantize_config.json")
    if os.path.exists(late):
        os.rename(late, source + "-late")
        child = subprocess.Popen([os.path.join(BIN, "minimax-convert"), *follow, "2"], stderr=subprocess.PIPE, text=True)
        said = child.stderr.readline()
        assert said == "waiting for hf_quant_config.json, which the plan needs\n", said
        os.rename(source + "-late", late)
        assert child.wait(60) == 0, child.stderr.read()
    else:
        run("minimax-convert", *follow, "0", "--follow-timeout", "20", "--resume")
    same_files(indexed + "-8", indexed + "-followed")


def check_values(out, values):
    count = 0
    for n, _, p in planes(Packed(out)):
        if n in values:
            assert (p[0].view("u4") == values[n].view("u4")).all(), (out, n)
            count += 1
    assert count == len(values)


def check(name):
    encode, config, scheme, _ = CASES[name]
    source = os.path.join(TMP, name)
    made, values = MODEL.encoded(encode)
    MODEL.write(source, made, config)
    run("minimax-convert", source, "-o", source + "-8", "--tp", "8")
    run("minimax-verify", source + "-8", "--source", source)
    check_followed(source)
    run("minimax-convert", source + "-8", "-o", source + "-1")
    run("minimax-convert", source, "-o", source + "-once")
    same_files(source + "-1", source + "-once")
    run("minimax-convert", source + "-8", "-o", source + "-hf", "--layout", "hf", "--jobs", "3")
    run("minimax-convert", source, "-o", source + "-hf1", "--layout", "hf", "--jobs", "1")
    wanted = tensors(source)
    for out in ("-hf", "-hf1"):
        found = tensors(source + out)
        differing = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        assert not differing, (name, out, differing[:3])
    run("minimax-verify", source + "-hf", "--source", source + "-8")
    run("minimax-convert", source + "-hf", "-o", source + "-back")
    found = {n: s for n, s, _ in planes(Packed(source + "-back")) if n in values}
    assert len(found) == len(values) and set(found.values()) == {scheme}, (name, found)
    run("minimax-convert", source + "-8", "-o", source + "-f32", "--quant", "f32")
    check_values(source + "-f32", values)
    if name not in RUN:
        return 0
    worst = 0
    for tp in ("-8", "-1"):
        a, b = logits(source + tp), logits(source + "-f32")
        worst = max(worst, np.abs(a - b).max())
        assert np.abs(b).max() > 1 and worst < 2e-4, (name, tp, worst)
    return worst


def check_killed():
    """A run that is killed after some steps and resumed gives the bytes of one that was not."""
    source = os.path.join(TMP, "awq")
    for layout in ([], ["--layout", "hf"]):
        whole = source + "-whole" + "".join(layout)
        run("minimax-convert", source, "-o", whole, "--jobs", "1", *layout)
        for calls in (9, 40):
            out = f"{whole}-{calls}"
            p = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject=pwrite64:signal=KILL:when={calls}", BIN + "/minimax-convert", source, "-o", out, "--jobs", "1", "-q", *layout],
                               capture_output=True, text=True)
            if p.returncode == 0:
                continue
            run("minimax-convert", source, "-o", out, "--resume", "--jobs", "2", *layout)
            same_files(whole, out)


def check_mixed():
    """Symmetric groups and groups with zero points in one file: the configuration says which modules have zero points, and those of the others
    have to be the middle, since engines pass over them."""
    def config(targets, base="Linear", **second):
        made = ct_int(4, 32)
        (first,) = made["quantization_config"]["config_groups"].values()
        made["quantization_config"]["config_groups"] = {"group_0": {**first, "targets": base if isinstance(base, list) else [base]}, "group_1": {
            **first, "targets": targets, "weights": {**first["weights"], "symmetric": False, **second}}}
        return made

    both, all_zeros, w2 = ct_packed(4, 32), ct_packed(4, 32, symmetric=False), [r"re:.*\.experts\.\d+\.(w2|down_proj)$"]
    names = sorted({n[:-len(".weight_packed")] for n in MODEL.encoded(both)[0] if ".w2.weight_packed" in n})
    rules = {"bits": 4, "group_size": 64, "sym": True}
    zeros, none = gptq(4, 64, 1, symmetric=False), gptq(4, 64, 1)
    auto = {"packing_format": "auto_round:auto_gptq", "extra_config": {n: {"sym": False} for n in names}, **rules}
    cases = ((both, all_zeros, config(w2), None), (both, all_zeros, config(names), None),
             (all_zeros, all_zeros, config(w2), "E_Q_ZERO"), (both, both, config(w2), "E_Q_MISSING"), (both, all_zeros, config(w2, w2), "E_Q_CONFIG"),
             (both, all_zeros, config(w2, "re:.*w1"), "E_Q_CONFIG"), (both, all_zeros, config(["re:(w2"]), "E_Q_CONFIG"),
             (both, all_zeros, config([r"re:(.+)+(.+)+[0-9]$"]), "config.json: found an expression that takes too long"),
             (both, all_zeros, config(None), "E_Q_CONFIG"), (both, all_zeros, config(w2, type="float"), "E_Q_ZERO"),
             (none, zeros, method("gptq", dynamic={"+:.*w2": {"sym": False}}, **rules), None),
             (zeros, zeros, method("gptq", dynamic={"+:.*w2": {"sym": False}}, **rules), "E_Q_ZERO"),
             (none, zeros, method("auto-round", **auto), None), (zeros, zeros, method("auto-round", **auto), "E_Q_ZERO"))
    for i, (encode, of_w2, declared, code) in enumerate(cases):
        source = os.path.join(TMP, f"mixed-{i}")
        made, values = MODEL.encoded(encode, {".w2.": of_w2})
        MODEL.write(source, made, declared)
        said = run("minimax-convert", source, "-o", source + "-1", "--quant", "f32", status=3 if code else 0)
        assert not code or code in said, (i, said)
        if not code:
            check_values(source + "-1", values)


def check_two_sizes():
    """Groups of two sizes, in the rules of GPTQModel and of AutoRound and in two config groups of compressed-tensors, come back bit for bit
    and are read again; so do groups of 32 alone. AWQ's config has no place for them."""
    rules = {"bits": 4, "group_size": 64, "sym": True}
    groups = ct_int(4, 64)
    (first,) = groups["quantization_config"]["config_groups"].values()
    second = {**first, "targets": ["re:.*(w2|down_proj)$"], "weights": {**first["weights"], "group_size": 32}}
    groups["quantization_config"]["config_groups"] = {"group_0": second, "group_1": first}
    cases = {"dynamic": (gptq(4, 64, 1), gptq(4, 32, 1), method("gptq", desc_act=False, dynamic={"+:.*w2": {"group_size": 32}}, **rules)),
             "extra": (gptq(4, 64, 1), gptq(4, 32, 1), method("auto-round", packing_format="auto_round:auto_gptq", **rules,
                                                             extra_config={".*w2": {"group_size": 32}, "lm_head": {"bits": 16}})),
             "groups": (ct_packed(4, 64), ct_packed(4, 32), groups),
             "one": (ct_packed(4, 32), ct_packed(4, 32), ct_int(4, 32))}
    for name, (encode, of_w2, config) in cases.items():
        source = os.path.join(TMP, name)
        MODEL.write(source, MODEL.encoded(encode, {".w2.": of_w2})[0], config)
        run("minimax-convert", source, "-o", source + "-8", "--tp", "8")
        run("minimax-convert", source + "-8", "-o", source + "-hf", "--layout", "hf")
        wanted, found = tensors(source), tensors(source + "-hf")
        differing = [n for n in {**wanted, **found} if wanted.get(n) != found.get(n)]
        assert not differing, (name, differing[:3])
        run("minimax-verify", source + "-hf", "--source", source + "-8")
        run("minimax-convert", source + "-hf", "-o", source + "-hf8", "--tp", "8")
        packed = [[[(n, p.elements(n).tobytes()) for n in sorted(p.tensors)] for rank in Packed(out).parts for p in rank]
                  for out in (source + "-8", source + "-hf8")]
        assert packed[0] == packed[1], name
    awqs = os.path.join(TMP, "awqs")
    MODEL.write(awqs, MODEL.encoded(awq(64), {".w2.": awq(32)})[0], method("auto-round", bits=4, group_size=64, packing_format="auto_round:auto_awq",
                                                                          extra_config={".*w2": {"group_size": 32}}))
    said = run("minimax-convert", awqs, "-o", awqs + "-hf", "--layout", "hf", "--dialect", "awq", status=4)
    assert "E_DIALECT" in said and "groups of 32 columns and others of 64" in said, said


def check_groups_beside():
    """Groups of 96 columns, which do not divide a scheme's 128, repeat their scales on the coarsest grid in both: every number stays, from every
    cut, and comes back in groups of 32. A grid below 16 columns has no kernel, and is refused."""
    plain = os.path.join(TMP, "plain-m2")
    run("minimax-convert", "tests/data/tiny-m2", "-o", plain, "--layout", "hf", "--quant", "bf16")
    model = Checkpoint(plain, (0, 3))
    config = ct_int(4, 64)
    groups = config["quantization_config"]["config_groups"]
    (first,) = groups.values()
    for g, kept in (96, 32), (24, 0):
        groups["group_1"] = {**first, "targets": ["re:.*w2$"], "weights": {**first["weights"], "group_size": g}}
        source = os.path.join(TMP, f"beside-{g}")
        made, values = model.encoded(ct_packed(4, 64), {".w2.": ct_packed(4, g)})
        model.write(source, made, config)
        said = run("minimax-convert", source, "-o", source + "-8", "--tp", "8", status=0 if kept else 4)
        if not kept:
            assert "E_Q_KEEP" in said and f"scales of BF16 for 1 x {g}," in said, said
            continue
        run("minimax-verify", source + "-8", "--source", source)
        run("minimax-convert", source + "-8", "-o", source + "-1")
        run("minimax-convert", source, "-o", source + "-once")
        same_files(source + "-1", source + "-once")
        run("minimax-convert", source + "-8", "-o", source + "-hf", "--layout", "hf")
        found, wanted = tensors(source + "-hf"), tensors(source)
        for name, (dtype, shape, data) in wanted.items():
            if name.endswith(".w2.weight_scale"):
                data = np.frombuffer(data, "u2").reshape(shape).repeat(g // kept, 1).tobytes()
                shape = [shape[0], shape[1] * g // kept]
            assert found[name] == (dtype, shape, data), (name, found[name][:2], shape)
        for of in source + "-8", source + "-hf":
            run("minimax-convert", of, "-o", source + "-f32", "--quant", "f32", "--force")
            for n, _, p in planes(Packed(source + "-f32")):
                assert n not in values or (p[0].view("u4") == values[n].view("u4")).all(), (of, n)
        a, b = logits(source + "-8"), logits(source + "-f32")
        assert np.abs(b).max() > 1 and np.abs(a - b).max() < 2e-4, np.abs(a - b).max()


def check_groups_of_experts():
    """Experts of one stack with groups of two sizes, or of which one has zero points, are stored alike in a packed checkpoint. What --layout hf
    writes of it is proven against the packed checkpoint and against the first source, also in a format that the first source does not fit."""
    groups, one = ct_int(4, 128), "re:.*experts[.]0[.].*"
    (first,) = groups["quantization_config"]["config_groups"].values()
    groups["quantization_config"]["config_groups"] = {"group_0": {**first, "targets": [one], "weights": {**first["weights"], "group_size": 32}},
                                                      "group_1": first}
    rules = dict(bits=4, group_size=64, desc_act=False, sym=True)
    cases = {"ct": (ct_packed(4, 128), ct_packed(4, 32), groups),
             "gptq": (gptq(4, 64, 1), gptq(4, 32, 1), method("gptq", dynamic={"+:.*experts[.]0[.].*": {"group_size": 32}}, **rules)),
             "zeros": (gptq(4, 64, 1), gptq(4, 64, 1, False), method("gptq", dynamic={"+:.*experts[.]0[.].*": {"sym": False}}, **rules)),
             "awq": (awq(32), awq(64), method("auto-round", bits=4, group_size=32, packing_format="auto_round:auto_awq",
                                              extra_config={".*experts[.]0[.].*": {"group_size": 64}}))}
    for name, (encode, of_one, config) in cases.items():
        source = os.path.join(TMP, "experts-" + name)
        MODEL.write(source, MODEL.encoded(encode, {".experts.0.": of_one})[0], config)
        run("minimax-convert", source, "-o", source + "-8", "--tp", "8")
        for made in [source + "-8"] if name == "awq" else [source, source + "-8"]:  # awq's config has one size alone
            out = made + "-hf"
            run("minimax-convert", made, "-o", out, "--layout", "hf")
            for against in source, source + "-8":
                if made != source or against == source:
                    run("minimax-verify", out, "--source", against)


def check_modules():
    """Each module's groups are of the size that its config says to a reader which takes the first rule that fits: of a lightning layer's
    qkv_proj too, which is what engines call the fused q_proj, k_proj and v_proj of other layers."""
    for most, other in (("layers.0.", "layers.1."), ("layers.1.", "layers.0.")):
        source = os.path.join(TMP, "modules-" + most[-2])
        made, values = MODEL.encoded(gptq(4, 64, 1), {other: gptq(4, 32, 1)})
        MODEL.write(source, made, method("gptq", bits=4, group_size=64, sym=True, desc_act=False, dynamic={"+:.*" + other: {"group_size": 32}}))
        for target in "ct", "gptq":
            run("minimax-convert", source, "-o", source + target, "--layout", "hf", "--dialect", target)
            with open(source + target + "/config.json") as f:
                config = json.load(f)["quantization_config"]
            rules = [(r.removeprefix("+:"), rule["group_size"]) for r, rule in config.get("dynamic", {}).items() if r.startswith("+:")]
            for group in config.get("config_groups", {}).values():
                rules += [(t[3:] if t.startswith("re:") else ".*" if t == "Linear" else re.escape(t) + "$", group["weights"]["group_size"]) for t in group["targets"]]
            for name in values:
                wanted = 32 if other in name else 64
                for module in {name[:-len(".weight")], name[:-len(".weight")].replace("q_proj", "qkv_proj")}:
                    found = next((size for rule, size in rules if re.match(rule, module)), config.get("group_size"))
                    assert found == wanted, (target, module, found, wanted, rules)


def check_refusals():
    """AWQ has no 8-bit integers; an order of columns is found when it is read."""
    said = run("minimax-convert", TMP + "/gptq_8bit", "-o", TMP + "/gptq_8bit-awq", "--layout", "hf", "--dialect", "awq", status=4)
    assert "E_DIALECT" in said and "w8a16_f16" in said, said
    source = os.path.join(TMP, "order")
    made, _ = MODEL.encoded(gptq(4, 64, 1, act_order=True))
    MODEL.write(source, made, gptq_config(4, 64, sym=True))
    said = run("minimax-convert", source, "-o", source + "-1", status=4)
    assert "E_Q_KEEP" in said and "desc_act" in said and "g_idx" in said, said
    run("minimax-convert", source, "-o", source + "-int8", "--quant", "int8")
    # Zero points that the configuration denies, which engines then pass over.
    for name, encode, config in ("ct", ct_packed(4, 32, symmetric=False), ct_int(4, 32)), ("awq", awq(64), dict(AWQ, zero_point=False)):
        source = os.path.join(TMP, "denied-" + name)
        MODEL.write(source, MODEL.encoded(encode)[0], config if name == "ct" else method("awq", **config))
        for quant in "none", "bf16":
            said = run("minimax-convert", source, "-o", source + "-1", "--quant", quant, status=3)
            assert "E_Q_ZERO" in said and "expected 8 of a symmetric quantization" in said and "checkpoint_format" not in said, said
    made = MODEL.encoded(gptq(4, 64, 1, symmetric=False))[0]
    for i, (code, key, rules) in enumerate((("E_Q_ZERO", "zero point", {"dynamic": {"-:.*gate": {"sym": False}}}),
                                            ("E_Q_CONFIG", "sym", {"dynamic": {"+:.*w2": {"sym": "no"}}}), ("E_Q_CONFIG", "dynamic", {"dynamic": ["+:.*w2"]}))):
        source = os.path.join(TMP, f"rules-{i}")
        MODEL.write(source, made, gptq_config(4, 64, sym=True, **rules))
        said = run("minimax-convert", source, "-o", source + "-1", status=3)
        assert code in said and key in said, said
    config = ct_int(4, 32, symmetric=False)
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = 0
    source = os.path.join(TMP, "number")
    MODEL.write(source, MODEL.encoded(ct_packed(4, 32, symmetric=False))[0], config)
    said = run("minimax-convert", source, "-o", source + "-1", status=3)
    assert "E_Q_CONFIG" in said and "symmetric" in said, said


assert len(KEPT) >= 12, KEPT
names = KEPT if sys.argv[1:] == ["all"] else sys.argv[1:] or ["awq", "gptq_8bit"]
worst = max(check(name) for name in names)
if "awq" in names and "gptq_8bit" in names:
    check_killed()
    check_two_sizes()
    check_mixed()
    check_groups_beside()
    check_groups_of_experts()
    check_modules()
    check_refusals()
    late = CASES["gptq_v1_asym"]
    MODEL.write(TMP + "/late", MODEL.encoded(late[0])[0], late[1])
    check_followed(TMP + "/late")
print(f"{len(names)} checkpoints in words: packed, cut and written back with every bit; logits within {worst:.1e}")
