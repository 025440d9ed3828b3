#!/usr/bin/env python3
"""The words of a GPTQ source mean other numbers in its second format: a conversion that began under one is not continued, called done or filled up
under the other."""
import json
import os
import shutil
import struct

from resume_cases import CONVERT, M2, USAGE, cf, killed, refused, same

GROUP = 32


def gptq(path):
    """A model whose linears are words of 4 bits with zero points of their own."""
    c = cf.small(hidden=64, heads=2, kv=1, dim=32, inter=64, layers=2, fp8=False)
    for name in [n for n in c.tensors if n.endswith("_proj.weight") or ".experts." in n]:
        _, (rows, cols), _ = c.tensors.pop(name)
        stem, groups = name[:-len("weight")], cols // GROUP
        c.tensors[stem + "qweight"] = ("I32", [cols // 8, rows], cf.noise(name, cols // 8 * rows * 4))
        zeros = [0x11111111 * (1 + (i % 13)) for i in range(groups * rows // 8)]
        c.tensors[stem + "qzeros"] = ("I32", [groups, rows // 8], struct.pack(f"<{len(zeros)}I", *zeros))
        scales = [0.01 + (i % 7) / 1024 for i in range(groups * rows)]
        c.tensors[stem + "scales"] = ("F16", [groups, rows], struct.pack(f"<{len(scales)}e", *scales))
        c.tensors[stem + "g_idx"] = ("I32", [cols], struct.pack(f"<{cols}i", *[k // GROUP for k in range(cols)]))
    c.file = {name: "model-00001-of-00001.safetensors" for name in c.tensors}
    c.save(path)
    declare(path, "gptq")


def declare(path, form):
    with open(path + "/config.json", encoding="utf-8") as f:
        config = json.load(f)
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": form}
    with open(path + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def parts(path):
    return {n: open(f"{path}/{n}", "rb").read() for n in os.listdir(path) if n.endswith(".safetensors")}


def two_formats():
    for layout in (("--tp", "2", "--quant", "int8"), ("--layout", "hf", "--quant", "int8")):
        with cf.Scratch() as root:
            source, out = root + "/src", root + "/out"
            gptq(source)
            killed("fdatasync", 3, source, "-o", out, *layout)
            declare(source, "gptq_v2")
            refused(root, USAGE, "E_RESUME", args=(source, "-o", out, *layout, "--resume"))
            declare(source, "gptq")
            cf.ok(CONVERT, "-q", source, "-o", out, *layout, "--resume")
            declare(source, "gptq_v2")
            refused(root, USAGE, "E_RESUME", args=(source, "-o", out, *layout, "--resume"))
            cf.ok(CONVERT, "-q", source, "-o", root + "/second", *layout)
            assert parts(out) != parts(root + "/second")
            cf.ok("minimax-verify", "-q", root + "/second", "--source", source)


def quantization_changed():
    """Also where the plan does not tell."""
    with cf.Scratch() as root:
        source = root + "/src"
        shutil.copytree(M2, source)
        killed("fdatasync", 2, source, "-o", root + "/out", "--quant", "int8")
        with open(source + "/config.json", encoding="utf-8") as f:
            config = json.load(f)
        whole = dict(config)
        config["quantization_config"] = config["quantization_config"] | {"quant_method": "quark"}
        with open(source + "/config.json", "w", encoding="utf-8") as f:
            json.dump(config, f)
        refused(root, USAGE, "E_RESUME", "config.json", "another quantization", args=(source, "-o", root + "/out", "--quant", "int8", "--resume"))
        with open(source + "/config.json", "w", encoding="utf-8") as f:
            json.dump(whole | {"torch_dtype": "bfloat16"}, f)  # what no number depends on may change
        cf.ok(CONVERT, "-q", source, "-o", root + "/out", "--quant", "int8", "--resume")
        cf.ok(CONVERT, "-q", source, "-o", root + "/whole", "--quant", "int8")
        same(root, "out", "whole")


def cut_again():
    """A packed checkpoint remembers the format of its source."""
    with cf.Scratch() as root:
        gptq(root + "/src")
        declare(root + "/src", "gptq_v2")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/two", "--tp", "2", "--quant", "int8")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/one", "--quant", "int8")
        cf.ok(CONVERT, "-q", root + "/two", "-o", root + "/again")
        same(root, "one", "again")
        with open(root + "/one/manifest.json", encoding="utf-8") as f:
            assert json.load(f)["tool"].endswith(", from gptq_v2")


if __name__ == "__main__":
    cf.main([two_formats, quantization_changed, cut_again])
