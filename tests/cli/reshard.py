#!/usr/bin/env python3
"""A packed checkpoint converts again without its source: cut for other ranks, or written with Hugging Face names, it is the directory that the
source itself would have given, file for file. Damage is found before it is copied."""
import ctypes
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess

from convert_files import read_st, write_st

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
DATA = "tests/data/"
same = 0


def convert(source, name, *options, status=0):
    out = os.path.join(TMP, name)
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run([f"{BIN}/minimax-convert", source, "-o", out, "-q", *options], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status, (options, done.stderr)
    return done.stderr if status else out


def files(path):
    return {name: open(os.path.join(path, name), "rb").read() for name in sorted(os.listdir(path))}


def equal(a, b, what):
    global same
    x, y = files(a), files(b)
    assert list(x) == list(y), (what, list(x), list(y))
    for name in x:
        assert x[name] == y[name], f"{what}: {name} differs"
    same += 1


def again(source, before, after, *both):
    """source -> before -> after is source -> after; `both` are options of the source's conversions."""
    packed = convert(source, "packed", *both, *before)
    equal(convert(source, "direct", *both, *after), convert(packed, "again", *[o for o in after]), (source, both, before, after))
    return packed


def manifest(path):
    with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
        return json.load(f)


def read_source(path):
    return {k: v for name in sorted(os.listdir(path)) if name.startswith("model-") for k, v in read_st(os.path.join(path, name))[0].items()}


def source_with(name, block, extra, alike=0):
    """tiny-m2 with its scales on a grid of `block`, no two of which are alike unless they lie in one cell of `alike`, and further tensors."""
    out = os.path.join(TMP, name)
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    tensors = read_source(DATA + "tiny-m2")
    for key, (dtype, shape, data) in list(tensors.items()):
        if not key.endswith("_scale_inv"):
            continue
        rows, cols = tensors[key[:-len("_scale_inv")]][1]
        down, across, same = -(-rows // block), -(-cols // block), max(alike // block, 1)
        old = struct.unpack(f"<{shape[0] * shape[1]}f", data)
        fresh = [old[(i * block // 128) * shape[1] + j * block // 128] * (1 + (7 * (i // same) + 3 * (j // same)) % 16 / 16) for i in range(down)
                 for j in range(across)]
        tensors[key] = (dtype, [down, across], struct.pack(f"<{len(fresh)}f", *fresh))
    tensors.update(extra)
    write_st(os.path.join(out, "model.safetensors"), tensors)
    with open(DATA + "tiny-m2/config.json", encoding="utf-8") as f:
        config = json.load(f)
    config["quantization_config"]["weight_block_size"] = [block, block]
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    shutil.copy(DATA + "tiny-m2/tokenizer.json", out)
    return out


def schemes():
    for q in ("none", "tensor_wise_fp8", "nvfp4", "w4afp8"):
        again(DATA + "tiny-m2", ["--tp", "8"], ["--tp", "4"], "--quant", q)
    for q in ("channel_fp8", "mxfp4"):
        again(DATA + "tiny-m1", ["--tp", "4"], ["--tp", "2"], "--quant", q)
    for q in ("none", "int8"):
        again(DATA + "tiny-m2", ["--tp", "8"], ["--layout", "hf"], "--quant", q)


def layouts():
    m2 = DATA + "tiny-m2"
    again(m2, ["--tp", "4", "--ep", "2", "--pp", "2"], ["--tp", "2"], "--quant", "nvfp4")
    again(m2, ["--tp", "2", "--part-size", "300K"], ["--tp", "4", "--ep", "4", "--pp", "4"], "--quant", "w4a16")
    again(m2, ["--tp", "8", "--tp-align", "pad"], ["--tp", "4"], "--quant", "block_fp8")
    again(m2, ["--tp", "4"], ["--tp", "8", "--tp-align", "pad"], "--quant", "block_fp8")
    again(m2, ["--tp", "8"], ["--tp", "1", "--compress", "zstd"], "--quant", "none")
    groups = again(m2, ["--tp", "4", "--attn-tp", "2", "--ep", "2"], ["--tp", "2"], "--quant", "nvfp4")
    assert manifest(groups)["version"] == 4 and manifest(groups)["parallel"] == {"tp": 4, "ep": 2, "pp": 1, "attn_tp": 2}
    subprocess.run([f"{BIN}/minimax-verify", groups, "--source", m2, "-q"], check=True)
    library, error = ctypes.CDLL(f"{BIN}/../lib/libminimax.so"), ctypes.create_string_buffer(1 << 14)
    library.minimax_open.restype = ctypes.c_void_p
    assert not library.minimax_open(groups.encode(), error) and b"found attention cut for 2 of 4 ranks" in error.raw, error.raw.strip(b"\0")
    other = subprocess.run([f"{BIN}/minimax-convert", m2, "-o", groups, "-q", "--tp", "4", "--ep", "2", "--quant", "nvfp4", "--resume"], capture_output=True, text=True)
    assert other.returncode == 2 and "with --tp 4 --attn-tp 2 --ep 2 --pp 1" in other.stderr and "expected --tp 4 --ep 2" in other.stderr, other
    again(m2, ["--tp", "2"], ["--tp", "8", "--attn-tp", "1", "--pp", "2", "--compress", "zstd"], "--quant", "block_fp8")
    again(DATA + "tiny-m1", ["--tp", "4", "--attn-tp", "2"], ["--layout", "hf"], "--quant", "nvfp4a16")
    again(DATA + "tiny-m1", ["--tp", "4"], ["--layout", "hf"], "--quant", "nvfp4a16; *qkv_proj*=int8")


def grids():
    """Finer blocks than the scheme's: what a cut made finer still comes back, what the source had finer stays."""
    again(source_with("fine", 32, {}), ["--tp", "8"], ["--tp", "1"], "--quant", "none")
    source = source_with("alike", 64, {}, alike=128)
    for before, after in (("1", "1"), ("8", "1"), ("1", "8"), ("8", "4")):
        packed = again(source, ["--tp", before], ["--tp", after], "--quant", "none")
        assert [64, 64] in [plane.get("grid") for t in manifest(packed)["tensors"] for plane in t["planes"]]
        assert manifest(packed)["version"] == 2
        subprocess.run([f"{BIN}/minimax-verify", os.path.join(TMP, "again"), "--source", source, "-q"], check=True)
    source = int8_groups("groups", 64)
    for before, after in (("2", "1"), ("4", "2"), ("1", "4")):
        again(source, ["--tp", before], ["--tp", after], "--quant", "none")
        subprocess.run([f"{BIN}/minimax-verify", os.path.join(TMP, "again"), "--source", source, "-q"], check=True)
    assert manifest(convert(DATA + "tiny-m2", "packed", "--tp", "8", "--quant", "none"))["version"] == 1
    wrong_grid()


def reseal(path, change):
    """The manifest with another text, sealed again."""
    with open(os.path.join(path, "manifest.json"), "rb") as f:
        text = change(f.read()[:-78])
    with open(os.path.join(path, "manifest.json"), "wb") as f:
        f.write(text + f'"sha256":"{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode())


def wrong_grid():
    """A grid on which the scales do not repeat, or that is none."""
    source = source_with("fine", 32, {})
    for grid, status, said in ((b"[64,64]", 6, "found scales that differ within a cell of the grid [64, 64]"), (b"[48,32]", 6, "found a grid of [48, 32]"),
                               (b"[16,16]", 6, "found a grid of [16, 16]"), (b"[256,128]", 6, "found a grid of [256, 128]")):
        packed = convert(source, "packed", "--tp", "8", "--quant", "none")
        reseal(packed, lambda text: text.replace(b'"grid":[32,32]', b'"grid":' + grid))
        line = convert(packed, "again", "--tp", "1", status=status)
        assert said in line, line


def int8_groups(name, group):
    """tiny-m2 with experts of int8 words under scales of their own for each group of columns, as compressed-tensors packs them."""
    out = source_with(name, 128, {})
    tensors = read_st(os.path.join(out, "model.safetensors"))[0]
    for key in [k for k in tensors if k.endswith("_scale_inv")]:
        stem = key[:-len("weight_scale_inv")]
        rows, cols = tensors[stem + "weight"][1]
        tensors[stem + "weight_packed"] = ("I32", [rows, cols // 4], tensors.pop(stem + "weight")[2])
        scales = [0.01 + (5 * i + 3 * j) % 64 / 4096 for i in range(rows) for j in range(-(-cols // group))]
        tensors[stem + "weight_scale"] = ("F32", [rows, -(-cols // group)], struct.pack(f"<{len(scales)}f", *scales))
        tensors[stem + "weight_shape"] = ("I64", [2], struct.pack("<2q", rows, cols))
        del tensors[key]
    write_st(os.path.join(out, "model.safetensors"), tensors)
    with open(os.path.join(out, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                     "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    return out


def beside():
    """KV cache scales, and static scales of activations."""
    f32 = lambda *x: struct.pack(f"<{len(x)}f", *x)
    extra = {}
    for i in range(4):
        extra[f"model.layers.{i}.self_attn.k_scale"] = ("F32", [2], f32(0.5 + i, 0.25 + i))
        extra[f"model.layers.{i}.self_attn.v_scale"] = ("F32", [1], f32(1.5 + i))
    again(source_with("kv", 128, extra), ["--tp", "4"], ["--tp", "2"], "--quant", "nvfp4")
    extra = {f"model.layers.{i}.self_attn.kv_scale": ("F32", [], f32(2.5 + i)) for i in range(4)}
    again(source_with("kv", 128, extra), ["--tp", "2", "--pp", "2"], ["--tp", "4"], "--quant", "none")
    scales = os.path.join(TMP, "scales.json")
    with open(scales, "w", encoding="utf-8") as f:
        json.dump({name[:-len(".weight")] + ".activation_scale": 1 + i / 8 for i, name in enumerate(read_source(DATA + "tiny-m2"))
                   if name.endswith("proj.weight") or ".experts." in name and name.endswith(".weight")}, f)
    packed = again_static(scales)
    assert sum("input_scale" in t for t in manifest(packed)["tensors"]) == 16


def again_static(scales):
    options = ["--quant", "nvfp4", "--act-scales", scales]
    packed = convert(DATA + "tiny-m2", "packed", *options, "--tp", "8")
    equal(convert(DATA + "tiny-m2", "direct", *options, "--tp", "4"), convert(packed, "again", "--tp", "4"), "static scales")
    return packed


def packed_again():
    """A second quantisation is of the numbers that are there, and says so."""
    packed = convert(DATA + "tiny-m2", "packed", "--quant", "nvfp4", "--tp", "4")
    wide = manifest(convert(packed, "again", "--quant", "bf16", "--tp", "2"))
    assert wide["tool"].endswith(", from nvfp4") and wide["quant"] == "bf16", wide["tool"]
    direct = manifest(convert(DATA + "tiny-m2", "direct", "--quant", "bf16", "--tp", "2"))
    assert wide["plan"] != direct["plan"], "files of two different conversions would fit together"
    done = subprocess.run([f"{BIN}/minimax-verify", os.path.join(TMP, "again"), "--source", packed, "--json", "-q"], capture_output=True, text=True,
                          check=True)
    worst = min(t["sqnr_db"] for t in json.loads(done.stdout)["tensors"] if t.get("sqnr_db") is not None)
    assert worst > 45, worst  # what BF16 costs, not what NVFP4 did
    thrice = manifest(convert(convert(os.path.join(TMP, "again"), "cut", "--tp", "1"), "again", "--tp", "2"))
    assert (thrice["tool"], thrice["plan"]) == (wide["tool"], wide["plan"]), "cut again, it forgets that it was packed twice"
    reshard = convert(packed, "direct", "--tp", "8")
    subprocess.run([f"{BIN}/minimax-verify", reshard, "--source", DATA + "tiny-m2", "-q"], check=True)


def dead_rows():
    """Ids whose lm_head row is zero: the numbers decide, in whatever codes they come."""
    tensors = read_source(DATA + "tiny-m2")
    dtype, shape, data = tensors["lm_head.weight"]
    width, dead = len(data) // shape[0], [3, 700, 1023]
    head = bytearray(data)
    for i, row in enumerate(dead):
        head[row * width:(row + 1) * width] = bytes(width) if i else b"\0\x80" * (width // 2)  # -0 is 0
    source = source_with("dead", 128, {"lm_head.weight": (dtype, shape, bytes(head))})
    for q in ("none", "bf16", "int8", "w4a16", "mxfp4", "nvfp4", "block_fp8"):
        packed = again(source, ["--tp", "4"], ["--tp", "2"], "--quant", "none", "--override", "lm_head*=" + q)
        assert manifest(packed)["dead_rows"] == dead, (q, manifest(packed)["dead_rows"])
        assert manifest(os.path.join(TMP, "again"))["dead_rows"] == dead, q
        subprocess.run([f"{BIN}/minimax-verify", os.path.join(TMP, "again"), "-q"], check=True)


def hub_cache():
    """A packed checkpoint that came through the Hub's cache: its folder is named, its files are links."""
    packed = convert(DATA + "tiny-m2", "packed", "--tp", "4", "--quant", "mxfp8")
    root = os.path.join(TMP, "models--org--name")
    shutil.rmtree(root, ignore_errors=True)
    snapshot = os.path.join(root, "snapshots", "0123")
    for folder in (snapshot, os.path.join(root, "refs"), os.path.join(root, "blobs")):
        os.makedirs(folder)
    with open(os.path.join(root, "refs", "main"), "w", encoding="utf-8") as f:
        f.write("0123")
    for i, name in enumerate(sorted(os.listdir(packed))):
        shutil.move(os.path.join(packed, name), os.path.join(root, "blobs", str(i)))
        os.symlink(f"../../blobs/{i}", os.path.join(snapshot, name))
    equal(convert(DATA + "tiny-m2", "direct", "--tp", "2", "--quant", "mxfp8"), convert(root, "again", "--tp", "2"), "from the Hub's cache")
    done = subprocess.run([f"{BIN}/minimax-verify", root, "-q"], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3 and "E_KIND" in done.stderr and "give a snapshot" in done.stderr, done.stderr


def code():
    """What auto_map names comes through the packed checkpoint."""
    source = source_with("code", 128, {})
    with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(os.path.join(source, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, f)
    for name in ("modeling_x.py", "helper.py", "LICENSE"):
        with open(os.path.join(source, name), "w", encoding="utf-8") as f:
            f.write(f"# {name}\n")
    packed = again(source, ["--tp", "2"], ["--layout", "hf"], "--quant", "none")
    assert {"modeling_x.py", "helper.py", "LICENSE"} <= set(os.listdir(packed)) & set(os.listdir(os.path.join(TMP, "again")))
    subprocess.run([f"{BIN}/minimax-verify", packed, "-q"], check=True)
    again(source, ["--tp", "2"], ["--tp", "1"], "--quant", "none")


def refusals():
    packed = convert(DATA + "tiny-m2", "packed", "--quant", "nvfp4", "--tp", "4")
    name = "model-rank-00002-part-00000.safetensors"
    path = os.path.join(packed, name)
    whole = open(path, "rb").read()
    with open(path, "wb") as f:
        f.write(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    line = convert(packed, "again", "--tp", "2", status=6)
    assert "E_DIGEST" in line and name in line, line
    assert not os.path.exists(os.path.join(TMP, "again"))
    with open(path, "wb") as f:
        f.write(whole)
    equal(convert(packed, "again", "--tp", "2", "--resume"), convert(DATA + "tiny-m2", "direct", "--quant", "nvfp4", "--tp", "2"), "resumed")
    line = convert(packed, "again", "--dry-run", "--names-only", status=2)
    assert "found --names-only with a packed checkpoint" in line, line
    some = convert(DATA + "tiny-m2", "packed", "--quant", "nvfp4", "--tp", "4", "--ranks", "0,2")
    line = convert(some, "again", status=3)
    assert "E_RANKS" in line and "found no files of rank 1, expected those of all 4 ranks" in line, line
    with open(os.path.join(convert(DATA + "tiny-m2", "packed", "--tp", "2"), "tokenizer.json"), "a", encoding="utf-8") as f:
        f.write(" ")
    line = convert(os.path.join(TMP, "packed"), "again", status=6)
    assert "tokenizer.json" in line, line


def other_config():
    """A manifest in order, with a config.json of another model: the extents are compared, never trusted."""
    packed = convert(DATA + "tiny-m2", "packed", "--tp", "2")
    with open(os.path.join(packed, "config.json"), "rb") as f:
        config = f.read().replace(b'"intermediate_size": 192', b'"intermediate_size": 384')
    old = manifest(packed)
    entry = next(f for f in old["files"] if f["name"] == "config.json")
    assert hashlib.sha256(config).hexdigest() != entry["sha256"]
    reseal(packed, lambda text: text.replace(entry["sha256"].encode(), hashlib.sha256(config).hexdigest().encode()))
    with open(os.path.join(packed, "config.json"), "wb") as f:
        f.write(config)
    line = convert(packed, "again", "--tp", "1", status=6)
    assert "E_CONFIG" in line and re.search(r'manifest.json: key "intermediate": found \d+, expected \d+ from config.json', line), line


schemes()
layouts()
grids()
beside()
packed_again()
dead_rows()
hub_cache()
code()
refusals()
other_config()
print(f"{same} directories converted from packed ones are those of the source itself")
