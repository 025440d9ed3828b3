#!/usr/bin/env python3
"""minimax-verify of --layout hf: the digests are those of the files, every change of a byte is found and named, the error against the source is
that of the packed checkpoint of the same recipe. And what comes along: code that auto_map names, the licence, a model card."""
import csv
import hashlib
import json
import os
import random
import re
import shutil
import subprocess

from published import CASES, Checkpoint, modelopt, nvfp4

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
BLOCK = 4 << 20


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == status, (program, args, done)
    return done


def digests(path):
    """Of every file but themselves and the card, by hashlib."""
    doc = json.load(open(f"{path}/minimax-digests.json"))
    for part in doc["parts"]:
        data = open(f"{path}/{part['file']}", "rb").read()
        blocks = [hashlib.sha256(data[i:i + BLOCK]) for i in range(0, len(data), BLOCK)]
        assert part["size"] == len(data) and part["blocks"] == [b.hexdigest() for b in blocks]
        assert part["root"] == hashlib.sha256(b"".join(b.digest() for b in blocks)).hexdigest()
    for f in doc["files"]:
        data = open(f"{path}/{f['name']}", "rb").read()
        assert (f["size"], f["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert {p["file"] for p in doc["parts"]} | {f["name"] for f in doc["files"]} | {"minimax-digests.json", "README.md"} == set(os.listdir(path))
    return doc


def same_error(model, quant, *options):
    """Against the source: the figures of the packed checkpoint, worst experts too."""
    source = f"tests/data/{model}"
    run("minimax-convert", source, "-o", f"{TMP}/hf", "-q", "--layout", "hf", "--quant", quant, "--part-size", "1500K", *options)
    run("minimax-convert", source, "-o", f"{TMP}/packed", "-q", "--quant", quant)
    digests(f"{TMP}/hf")
    reports = [json.loads(run("minimax-verify", f"{TMP}/{d}", "--source", source, "--json", "-q").stdout) for d in ("hf", "packed")]
    rows = [{t["name"]: t for t in r["tensors"]} for r in reports]
    assert rows[0].keys() == rows[1].keys() and reports[0]["exact_tensors"] == reports[1]["exact_tensors"]
    for name, a in rows[0].items():
        b = rows[1][name]
        for key in ("count", "scheme", "nonfinite", "worst_expert"):
            assert a.get(key) == b.get(key), (model, quant, name, key, a, b)
        assert not {"clipped_share", "least_scale", "most_scale"} & a.keys() and {"clipped_share", "most_scale"} <= b.keys()  # not looked at
        for key in ("sqnr_db", "rmse", "max_abs", "cosine", "worst_expert_sqnr_db"):
            near = 1e-4 if "nvfp4" in quant else 1e-9  # a global scale stored as its inverse costs a rounding
            assert a.get(key) == b.get(key) or abs(a[key] - b[key]) <= near * abs(b[key]), (model, quant, name, key, a, b)
    run("minimax-verify", f"{TMP}/hf", "--source", source, "--report", f"{TMP}/errors.csv", "-q")
    with open(f"{TMP}/errors.csv", encoding="utf-8", newline="") as f:
        assert all(t["clipped_share"] == t["most_scale"] == "" != t["flushed_share"] for t in csv.DictReader(f))
    shutil.rmtree(f"{TMP}/packed")


def other_format(text):
    """Whether it is JSON of another format or version."""
    try:
        doc = json.loads(text)
    except ValueError:  # bytes that are no UTF-8 among them
        return False
    return isinstance(doc.get("format"), str) and isinstance(doc.get("version"), int) and (doc["format"], doc["version"]) != ("minimax-digests", 1)


def damage(rng):
    """A byte changed, a file gone, longer, or one more: each is found; the card may change."""
    path = f"{TMP}/hf"
    names = [n for n in os.listdir(path) if n != "README.md"]
    for name in names:
        file = f"{path}/{name}"
        data = open(file, "rb").read()
        at = rng.randrange(len(data))
        for changed in (data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:], data[:-1], data + b"\n"):
            open(file, "wb").write(changed)
            # One byte of the format's name or of its version makes another format: refused as such.
            other = name == "minimax-digests.json" and other_format(changed)
            line = run("minimax-verify", path, "-q", status=4 if other else 6).stderr
            assert line.count("\n") == 1 and name in line and ("E_VERSION" in line) == other, line
        os.remove(file)
        run("minimax-verify", path, "-q", status=3 if name == "minimax-digests.json" else 6)
        open(file, "wb").write(data)
    part = sorted(n for n in names if n.startswith("model-"))[0]
    data = bytearray(open(f"{path}/{part}", "rb").read())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name, entry = next((k, v) for k, v in header.items() if k != "__metadata__")
    data[start + entry["data_offsets"][0]] ^= 1
    open(f"{path}/{part}", "wb").write(data)
    assert name in run("minimax-verify", path, "-q", status=6).stderr
    run("minimax-verify", path, "-q", "--level", "header")
    data[start + entry["data_offsets"][0]] ^= 1
    open(f"{path}/{part}", "wb").write(data)
    open(f"{path}/README.md", "a").write("edited\n")
    open(f"{path}/evil.py", "w").close()
    assert "evil.py" in run("minimax-verify", path, "-q", status=6).stderr
    os.remove(f"{path}/evil.py")
    assert "blocks hashed, --seed 5" in run("minimax-verify", path, "--level", "sample", "--seed", 5).stderr
    shutil.rmtree(path)


def companions():
    """The code of a repository with auto_map, its licence, and a card; a converted one is whole for a second conversion."""
    source = shutil.copytree("tests/data/tiny-m1", f"{TMP}/src")
    config = json.load(open(f"{source}/config.json"))
    config["auto_map"] = {"AutoConfig": "configuration_minimax_m1.MiniMaxM1Config", "AutoModelForCausalLM": "modeling_minimax_m1.MiniMaxM1ForCausalLM"}
    json.dump(config, open(f"{source}/config.json", "w"))
    texts = {"configuration_minimax_m1.py": "class MiniMaxM1Config: pass\n", "modeling_minimax_m1.py": "from .helper import x\n", "helper.py": "x = 1\n",
             "LICENSE": "Apache\n", "LICENSE-MODEL": "Model\n", "generation_config.json": "{}\n"}
    for name, text in {**texts, "notes.txt": "no\n", "README.md": "theirs\n", "odd name.py": "no\n"}.items():
        open(f"{source}/{name}", "w").write(text)
    done = run("minimax-convert", source, "-o", f"{TMP}/out", "--layout", "hf", "--quant", "nvfp4a16", "--dialect", "ct")
    assert "note: transformers 5.24 leaves out the global scales" in done.stderr
    for name, text in texts.items():
        assert open(f"{TMP}/out/{name}").read() == text, name
    assert not {"notes.txt", "odd name.py"} & set(os.listdir(f"{TMP}/out"))
    assert json.load(open(f"{TMP}/out/config.json"))["auto_map"] == config["auto_map"]
    card = open(f"{TMP}/out/README.md").read()
    for words in ("MiniMaxM1ForCausalLM", "`nvfp4a16`", "vllm serve", "sglang.launch_server", "**Note:** transformers", "library_name"):
        assert words in card, words
    for f in digests(f"{TMP}/out")["sources"]:
        assert f["header_sha256"] in card
    run("minimax-verify", f"{TMP}/out", "-q", "--source", source)
    run("minimax-convert", source, "-o", f"{TMP}/out", "-q", "--layout", "hf", "--quant", "nvfp4a16", "--dialect", "ct", "--resume")  # whole
    file = f"{TMP}/out/model-00001-of-00001.safetensors"
    data = bytearray(open(file, "rb").read())
    data[-1] ^= 1
    open(file, "wb").write(data)
    again = run("minimax-convert", source, "-o", f"{TMP}/out", "-q", "--layout", "hf", "--quant", "nvfp4a16", "--dialect", "ct", "--resume", status=6)
    assert "E_DIGEST" in again.stderr
    run("minimax-convert", source, "-o", f"{TMP}/out", "-q", "--layout", "hf", "--force")
    # A packed checkpoint keeps the code too: unsharded again it is what the source gives at once, card and all.
    run("minimax-convert", source, "-o", f"{TMP}/packed", "-q")
    run("minimax-convert", f"{TMP}/packed", "-o", f"{TMP}/again", "-q", "--layout", "hf")
    assert [(n, open(f"{TMP}/out/{n}", "rb").read()) for n in sorted(os.listdir(f"{TMP}/out"))] == \
        [(n, open(f"{TMP}/again/{n}", "rb").read()) for n in sorted(os.listdir(f"{TMP}/again"))]
    os.remove(f"{source}/modeling_minimax_m1.py")
    assert "note: auto_map in config.json names modeling_minimax_m1.py, which the source lacks" in run("minimax-convert", source, "--dry-run").stdout
    config["auto_map"]["AutoModelForCausalLM"] = "org/repo--modeling_minimax_m1.MiniMaxM1ForCausalLM"
    json.dump(config, open(f"{source}/config.json", "w"))
    assert "note:" not in run("minimax-convert", source, "--dry-run").stdout


def seal(path):
    """Makes the digests fit the files again."""
    doc = json.load(open(f"{path}/minimax-digests.json"))
    for part in doc["parts"]:
        data = open(f"{path}/{part['file']}", "rb").read()
        blocks = [hashlib.sha256(data[i:i + BLOCK]) for i in range(0, len(data), BLOCK)]
        part.update(size=len(data), blocks=[b.hexdigest() for b in blocks], root=hashlib.sha256(b"".join(b.digest() for b in blocks)).hexdigest())
    for f in doc["files"]:
        data = open(f"{path}/{f['name']}", "rb").read()
        f.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    del doc["sha256"]
    text = json.dumps(doc).encode()[:-1] + b",\n"
    open(f"{path}/minimax-digests.json", "wb").write(text + b'"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n')


def zeroed(model):
    """A copy of which one matrix is zero."""
    source = shutil.copytree(f"tests/data/{model}", f"{TMP}/zeroed")
    with open(f"{source}/model.safetensors.index.json", encoding="utf-8") as f:
        matrix, name = next((k, v) for k, v in json.load(f)["weight_map"].items() if k.endswith("_proj.weight"))
    data = bytearray(open(f"{source}/{name}", "rb").read())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    a, b = (start + x for x in header[matrix]["data_offsets"])
    data[a:b] = bytes(b - a)
    open(f"{source}/{name}", "wb").write(data)
    return source, matrix


def resealed(rng, model, quant, *options):
    """Bits of any tensor, configs and totals changed and sealed again: only --source can refuse them, but for the index, and does."""
    source, matrix = zeroed(model)
    run("minimax-convert", source, "-o", f"{TMP}/good", "-q", "--layout", "hf", "--quant", quant, *options)
    run("minimax-verify", f"{TMP}/good", "-q", "--source", source)
    part = next(n for n in os.listdir(f"{TMP}/good") if n.startswith("model-"))
    data = open(f"{TMP}/good/{part}", "rb").read()
    start = 8 + int.from_bytes(data[:8], "little")
    header = {k: [start + x for x in v["data_offsets"]] for k, v in json.loads(data[8:start]).items() if k != "__metadata__"}
    kinds = sorted({k.rsplit(".", 1)[1] for k in header if k.rsplit(".", 1)[1] != "weight_shape"})
    changes = []
    for kind in kinds:
        changed = bytearray(data)
        changed[rng.randrange(*header[rng.choice([k for k in header if k.endswith(kind)])])] ^= 1
        changes.append((part, bytes(changed)))
    minus = bytearray(data)
    minus[header.get(matrix, [start])[0] + 1] ^= 0x80  # the first weight of the zero matrix: -0
    changes.append((part, bytes(minus)))
    for name in ("config.json", "hf_quant_config.json", "model.safetensors.index.json"):
        if not os.path.exists(f"{TMP}/good/{name}"):
            continue
        text = open(f"{TMP}/good/{name}").read()
        doc = json.loads(text)
        for key, value in {"config.json": (("rope_theta", 12345), ("added", 1), ("num_experts_per_tok", 1)),
                           "hf_quant_config.json": (("added", 1),), "model.safetensors.index.json": ()}[name]:
            changes.append((name, json.dumps({**doc, key: value}).encode()))
        if "quantization_config" in doc:
            changes.append((name, json.dumps({**doc, "quantization_config": {**doc["quantization_config"], "added": 1}}).encode()))
        if "metadata" in doc:
            changes += [(name, json.dumps({**doc, "metadata": {**doc["metadata"], key: value}}).encode())
                        for key, value in (("total_size", 1), ("plan", "0" * 64))]
    for name, changed in changes:
        shutil.copytree(f"{TMP}/good", f"{TMP}/bad", copy_function=os.link)
        for file in (name, "minimax-digests.json"):
            os.remove(f"{TMP}/bad/{file}")
        shutil.copy(f"{TMP}/good/minimax-digests.json", f"{TMP}/bad")
        open(f"{TMP}/bad/{name}", "wb").write(changed)
        seal(f"{TMP}/bad")
        index = name.endswith(".index.json")  # is held to the parts without the source, too
        assert not index or "E_IDX" in run("minimax-verify", f"{TMP}/bad", "-q", status=6).stderr
        index or run("minimax-verify", f"{TMP}/bad", "-q")
        line = run("minimax-verify", f"{TMP}/bad", "-q", "--source", source, status=6).stderr
        assert ("E_IDX" if index else "E_SOURCE") in line and name in line, (name, line)
        shutil.rmtree(f"{TMP}/bad")
    shutil.rmtree(f"{TMP}/good")
    shutil.rmtree(source)
    return len(changes)


def other_version(model, quant, *options):
    """An output of another version: its description of the quantization is to say the same, with keys in any order."""
    source = f"tests/data/{model}"
    run("minimax-convert", source, "-o", f"{TMP}/good", "-q", "--layout", "hf", "--quant", quant, *options)
    text = open(f"{TMP}/good/minimax-digests.json").read()
    open(f"{TMP}/good/minimax-digests.json", "w").write(re.sub('"tool": ?"[^"]*"', '"tool":"minimax-convert 0.1.9"', text))
    config = json.load(open(f"{TMP}/good/config.json"))

    def attempt(name, doc, status):
        json.dump(doc, open(f"{TMP}/good/{name}", "w"))
        seal(f"{TMP}/good")
        done = subprocess.run([f"{BIN}/minimax-verify", f"{TMP}/good", "-q", "--source", source], capture_output=True, text=True, check=False)
        refused = "E_SOURCE: " in done.stderr or "error: E_Q_" in done.stderr  # E_Q: a method, format or width that is not read at all
        assert done.returncode in (status, 4 if status else 0) and (status == 0 or (refused and name in done.stderr)), (model, quant, doc, done)

    def leaves(j, at=()):
        for k, v in list(j.items() if isinstance(j, dict) else enumerate(j)):
            yield at + (k,)
            if isinstance(v, (dict, list)):
                yield from leaves(v, at + (k,))

    def turned(j):
        return {k: turned(j[k]) for k in reversed(j)} if isinstance(j, dict) else [turned(x) for x in j] if isinstance(j, list) else j

    attempt("config.json", {**config, "quantization_config": turned(config["quantization_config"])}, 0)
    places = list(leaves(config["quantization_config"]))
    for place in [p for p in places if p[-1] in ("ignore", "modules_to_not_convert", "num_bits", "format", "quant_method", "fmt")] + random.sample(places, 3):
        changed = json.loads(json.dumps(config))
        j = changed["quantization_config"]
        for k in place[:-1]:
            j = j[k]
        j[place[-1]] = ["re:.*"] if isinstance(j[place[-1]], list) else "other" if isinstance(j[place[-1]], str) else 4 if j[place[-1]] != 4 else 8
        attempt("config.json", changed, 6)
    attempt("config.json", {k: v for k, v in config.items() if k != "quantization_config"}, 6)
    attempt("config.json", config, 0)
    if os.path.exists(f"{TMP}/good/hf_quant_config.json"):
        doc = json.load(open(f"{TMP}/good/hf_quant_config.json"))
        attempt("hf_quant_config.json", turned(doc), 0)
        attempt("hf_quant_config.json", {**doc, "quantization": {**doc["quantization"], "exclude_modules": ["*"]}}, 6)
    shutil.rmtree(f"{TMP}/good")


def flipped(path, ending):
    """The last bit of the first tensor of that name's scale changed, and sealed."""
    part = next(f"{path}/{n}" for n in os.listdir(path) if n.startswith("model-"))
    data = bytearray(open(part, "rb").read())
    start = 8 + int.from_bytes(data[:8], "little")
    at = next(t["data_offsets"][0] for n, t in json.loads(data[8:start]).items() if n.endswith(ending))
    data[start + at] ^= 1
    open(part, "wb").write(data)
    seal(path)


def published_scales():
    """Sources with a scale for each matrix where a scheme has one for several: of weights, which are rounded again, and of activations, of
    which a packed checkpoint holds the largest; its export is proven against the first source too."""
    model = Checkpoint("tests/data/tiny-m1")
    several = model.encoded(nvfp4("modelopt"), {".w3.": nvfp4("modelopt", top=0.73)})[0]
    for name, config, tensors, quant, ending in (("tensor_fp8", *CASES["tensor_fp8"][1:2], model.encoded(CASES["tensor_fp8"][0])[0], "tensor_wise_fp8", ".activation_scale"),
                                                 ("nvfp4", modelopt("NVFP4", group_size=16), several, "nvfp4", ".weight_scale")):
        model.write(f"{TMP}/{name}", tensors, config)
        run("minimax-convert", f"{TMP}/{name}", "-o", f"{TMP}/whole", "-q", "--quant", quant)
        for source, out in ((f"{TMP}/{name}", f"{TMP}/direct"), (f"{TMP}/whole", f"{TMP}/joint")):
            run("minimax-convert", source, "-o", out, "-q", "--layout", "hf", *(["--quant", quant] if source != f"{TMP}/whole" else []))
            run("minimax-verify", out, "-q", "--source", f"{TMP}/{name}")
            flipped(out, f"experts.1.w1{ending}")
            run("minimax-verify", out, "-q")
            assert "E_SOURCE" in run("minimax-verify", out, "-q", "--source", f"{TMP}/{name}", status=6).stderr
        for path in ("whole", "direct", "joint"):
            shutil.rmtree(f"{TMP}/{path}")


def main():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    for model, quant, options in (("tiny-m1", "int8", []), ("tiny-m2", "fp8_attention_nvfp4_experts", []), ("tiny-m2", "tensor_wise_fp8", ["--dialect", "fp8"]),
                                  ("tiny-m1", "w4afp8", []), ("tiny-m2", "none", [])):
        same_error(model, quant, *options)
        if quant != "none":
            shutil.rmtree(f"{TMP}/hf")
    damage(random.Random(seed))
    rng = random.Random(f"{seed} sealed")
    tried = [resealed(rng, *x) for x in (("tiny-m1", "nvfp4a16", "--dialect", "modelopt"), ("tiny-m2", "channel_fp8"), ("tiny-m3-random", "block_fp8"), ("tiny-m1", "none"))]
    assert sum(tried) > 25, tried
    for x in (("tiny-m1", "nvfp4a16", "--dialect", "modelopt"), ("tiny-m2", "channel_fp8", "--dialect", "ct"), ("tiny-m2", "block_fp8"), ("tiny-m1", "int8")):
        other_version(*x)
    companions()
    published_scales()
    print("unsharded checkpoints are proven by their digests and against their source, and hold code, licence and card")


main()
