#!/usr/bin/env python3
"""NVFP4 of compressed-tensors stores the reciprocal of the scale that is packed. Under --quant none --layout hf gives every such number back bit
for bit, also those that are not the reciprocal of their reciprocal, from every cut; what is packed is the reciprocal, whatever was stored."""
import hashlib
import json
import os
import shutil
import struct
import subprocess
import time

from convert_files import noise, ok, read_st, run, same_files, small

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
LAYERS, EXPERTS = 3, 256
GROUP = {"format": "nvfp4-pack-quantized", "targets": ["Linear"], "input_activations": None, "output_activations": None,
         "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16, "dynamic": False}}
QUANTIZATION = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
                "config_groups": {"group_0": GROUP}, "ignore": ["lm_head", "model.embed_tokens", "re:.*gate$"]}


def single(x):
    """x, which is exact in double precision or a quotient of two singles, as the nearest F32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x):
    return struct.unpack("<i", struct.pack("<f", x))[0]


def steps(g):
    """From the reciprocal of g's reciprocal to g."""
    return bits(g) - bits(single(1 / single(1 / g)))


def source(name, number):
    """A model whose matrices have the global scale number(stem), those that share a packed tensor the same."""
    c = small(hidden=32, heads=8, kv=2, dim=16, experts=EXPERTS, inter=128, vocab=64, layers=LAYERS, fp8=False)
    c.config["quantization_config"] = QUANTIZATION
    for key, (_, shape, _) in list(c.tensors.items()):
        stem, _, last = key.removesuffix(".weight").rpartition(".")
        if last not in ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"):
            continue
        rows, cols = shape
        del c.tensors[key]
        packed = {"_packed": ("U8", [rows, cols // 2], noise(key, rows * cols // 2)),
                  "_scale": ("F8_E4M3", [rows, cols // 16], bytes(b % 126 + 1 for b in noise(key + "s", rows * cols // 16))),
                  "_global_scale": ("F32", [1], struct.pack("<f", number(stem + (last if last in ("o_proj", "w2") else ""))))}
        for end, tensor in packed.items():
            c.tensors[key + end], c.file[key + end] = tensor, c.file[key]
    return c.save(os.path.join(TMP, name))


def anything(stem):
    """A number from 2^-12 to 2^20 with a random mantissa."""
    mantissa, power = struct.unpack("<IB", noise("global" + stem, 5))
    return struct.unpack("<f", struct.pack("<I", (115 + power % 32) << 23 | mantissa & 0x7fffff))[0]


def returning(stem):
    """A number that is the reciprocal of its reciprocal."""
    g = anything(stem)
    while steps(g):
        g = struct.unpack("<f", struct.pack("<i", bits(g) + 1))[0]
    return g


def convert(of, name, *options):
    out = os.path.join(TMP, name)
    ok(f"{BIN}/minimax-convert", of, "-o", out, "-q", "--quant", "none", *options)
    return out


def manifest(path):
    with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
        return json.load(f)


def weights(path):
    return {k: v for name in sorted(os.listdir(path)) if name.endswith(".safetensors") for k, v in read_st(os.path.join(path, name))[0].items()}


def returned(path, of):
    """Every tensor of the source, bit for bit."""
    found, expected = weights(path), weights(of)
    assert found.keys() == expected.keys()
    wrong = [k for k in found if found[k] != expected[k]]
    assert not wrong, f"{len(wrong)} of {len(found)} tensors differ: {wrong[:3]}"


def recorded(packed):
    """{(layer, expert, source's name of the piece): steps} of a manifest."""
    out = {}
    for t in manifest(packed)["tensors"]:
        for expert, piece, n in t.get("global_steps", []):
            out[t["pieces"][piece]["source"].replace("{e}", str(expert))] = n
    return out


def killed(of, name, *options):
    """A conversion that is killed when its folder is there, and resumed."""
    out = os.path.join(TMP, name)
    with subprocess.Popen([f"{BIN}/minimax-convert", of, "-o", out, "-q", "--quant", "none", *options]) as process:
        while process.poll() is None and not os.path.exists(out):
            time.sleep(0.001)
        process.kill()
    return convert(of, name, "--resume", *options)


def change_step(path):
    """The manifest with another step, sealed again."""
    with open(os.path.join(path, "manifest.json"), "rb") as f:
        text = f.read()[:-78].replace(b",-1]", b",1]", 1)
    with open(os.path.join(path, "manifest.json"), "wb") as f:
        f.write(text + f'"sha256":"{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode())


def main():
    src = source("source", anything)
    expected = {k[:-len("_global_scale")]: steps(struct.unpack("<f", v[2])[0]) for k, v in weights(src).items() if k.endswith("_global_scale")}
    off = {k: n for k, n in expected.items() if n}
    assert len(expected) > 2000 and set(off.values()) == {1, -1} and len(off) > len(expected) / 10, (len(expected), len(off))
    eight = ["--tp", "8", "--ep", "2"]
    from_one = convert(src, "one")
    from_eight = convert(src, "eight", *eight)
    assert same_files(convert(from_one, "again", *eight), from_eight) and same_files(convert(from_eight, "back"), from_one)
    for name, of in (("source", src), ("one", from_one), ("eight", from_eight)):
        returned(convert(of, "hf-" + name, "--layout", "hf"), src)
    for out in (from_one, from_eight, os.path.join(TMP, "hf-eight")):
        ok(f"{BIN}/minimax-verify", out, "--source", src, "-q")
    assert recorded(from_one) == recorded(from_eight) == off and manifest(from_one)["version"] == 5
    assert same_files(killed(src, "killed", *eight), from_eight) and same_files(convert(src, "eight", "--resume", *eight), os.path.join(TMP, "killed"))

    # A checkpoint that needs no steps has no new key. What is packed is the reciprocal of either.
    plain = convert(source("returning", returning), "plain")
    assert manifest(plain)["version"] == 1 and not recorded(plain)
    at = "model.layers.1.block_sparse_moe.experts."
    for out, number in ((from_one, anything), (plain, returning)):
        stored = struct.unpack(f"<{EXPERTS}f", weights(out)[at + "w2_weight_scale_2"][2])
        assert stored == tuple(single(1 / number(f"{at}{e}w2")) for e in range(EXPERTS)), out

    other = os.path.join(TMP, "other")
    shutil.copytree(from_one, other)
    change_step(other)
    for args, says in ((["minimax-verify", other, "--source", src, "-q"], "found other global_steps than"),
                       (["minimax-inspect", from_one, "--diff", other, "--data"], ", other global_steps")):
        done = run(f"{BIN}/{args[0]}", *args[1:])
        assert done.returncode == 6 and says.encode() in done.stdout + done.stderr, (args, done)
    print(f"{len(expected)} global scales, {len(off)} of them no reciprocal of their reciprocal, came back bit for bit from 1 and 8 ranks")


main()
