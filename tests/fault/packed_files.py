"""A packed checkpoint as a value that tests may change at will, its digests made right again when it is saved; and very small ones to start
from."""
import hashlib
import json
import os
import struct
import subprocess
import sys

sys.path.insert(0, "scripts")
import sparse_m3
from bench_checkpoint import Bytes
from sparse_checkpoint import M2_CONFIG, size_of, tensors

BLOCK = 4 << 20
SIZE = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F16": 2}


def write_source(path, config):
    """config.json, and every tensor that it asks for with values of its own."""
    os.mkdir(path)
    header, at = {}, 0
    m3 = "sparse_attention_config" in config
    for name, dtype, shape in sparse_m3.text("quantization_config" in config, config) if m3 else tensors(config):
        end = at + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    values = Bytes(1)
    with open(path + "/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in header.values():
            values.write(f, t["dtype"], t["data_offsets"][1] - t["data_offsets"][0])
    with open(path + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def m3_config(**changes):
    """The text model alone: dense layers first, then sparse ones of experts. MXFP8 where mxfp8 is true."""
    mxfp8 = changes.pop("mxfp8", False)
    config = dict(sparse_m3.CONFIG["text_config"], architectures=["MiniMaxM3SparseForCausalLM"], num_hidden_layers=2, num_local_experts=4,
                  num_experts_per_tok=2, vocab_size=264, hidden_size=64, intermediate_size=64, dense_intermediate_size=96, shared_intermediate_size=64,
                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, rotary_dim=16, max_position_embeddings=64)
    config.update(changes)
    del config["partial_rotary_factor"]
    sparse = [int(layer > 0) for layer in range(config["num_hidden_layers"])]
    config["moe_layer_freq"] = sparse
    config["sparse_attention_config"] = dict(config["sparse_attention_config"], sparse_attention_freq=sparse, sparse_disable_index_value=sparse,
                                             sparse_num_index_heads=config["num_key_value_heads"], sparse_index_dim=32, sparse_block_size=16,
                                             sparse_topk_blocks=2)
    return dict(config, quantization_config=sparse_m3.MXFP8) if mxfp8 else config


def source(path, **changes):
    """An M2 of one layer, an M1 (family="m1") of two kinds, or an M3 (family="m3") of two, with a tokenizer of single bytes."""
    family = changes.pop("family", "m2")
    m1 = family == "m1"
    base = json.load(open("tests/data/tiny-m1/config.json", encoding="utf-8")) if m1 else M2_CONFIG
    config = dict(base, num_hidden_layers=2 if m1 else 1, attn_type_list=[0, 1] if m1 else [1], num_local_experts=4, num_experts_per_tok=2,
                  vocab_size=264, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                  rotary_dim=16, max_position_embeddings=64)
    config.update(changes)
    write_source(path, m3_config(**changes) if family == "m3" else config)
    tokenizer = json.load(open("tests/data/tiny-m2/tokenizer.json", encoding="utf-8"))
    letters = sorted(t for t in tokenizer["model"]["vocab"] if len(t) == 1)
    tokenizer["model"].update(vocab={t: i for i, t in enumerate(letters)}, merges=[])
    for i, t in enumerate(tokenizer["added_tokens"]):
        t["id"] = 256 + i
    with open(path + "/tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(tokenizer, f)


def convert(program, src, out, *options):
    subprocess.run([program, src, "-o", out, "-q", *options], check=True)


def sha256(data):
    return hashlib.sha256(data).hexdigest()


class Part:
    """name -> [dtype, shape, bytearray], in file order."""

    def __init__(self, data):
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        self.metadata = header.pop("__metadata__")
        self.tensors = {}
        for name, t in sorted(header.items(), key=lambda x: x[1]["data_offsets"]):
            at, end = t["data_offsets"]
            self.tensors[name] = [t["dtype"], t["shape"], bytearray(data[start + at:start + end])]

    def bytes(self):
        header, at = {"__metadata__": self.metadata}, 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        return struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in self.tensors.values())


class Packed:
    def __init__(self, path):
        self.manifest = json.load(open(path + "/manifest.json", encoding="utf-8"))
        self.parts, self.files = {}, {}
        for rank in self.manifest["ranks"]:
            for p in rank["parts"]:
                self.parts[p["file"]] = Part(open(f"{path}/{p['file']}", "rb").read())
        for f in self.manifest["files"]:
            self.files[f["name"]] = open(f"{path}/{f['name']}", "rb").read()

    def seal(self, data):
        """The manifest's entries of parts and companions as they now are; data: what parts hold."""
        for rank in self.manifest["ranks"]:
            for p in rank["parts"]:
                if p["file"] not in data:
                    continue
                d = data[p["file"]]
                p["size"] = len(d)
                p["blocks"] = [sha256(d[i:i + BLOCK]) for i in range(0, len(d), BLOCK)]
                p["root"] = sha256(b"".join(bytes.fromhex(b) for b in p["blocks"]))
        for f in self.manifest["files"]:
            if f["name"] in self.files:
                f["size"], f["sha256"] = len(self.files[f["name"]]), sha256(self.files[f["name"]])

    def save(self, path, edit=None):
        """Into a fresh directory. `edit` may change the manifest's text before its own digest is made."""
        os.mkdir(path)
        data = {name: part.bytes() for name, part in self.parts.items()}
        self.seal(data)
        for name, d in [*data.items(), *self.files.items()]:
            with open(f"{path}/{name}", "wb") as f:
                f.write(d)
        self.manifest.pop("sha256", None)
        text = json.dumps(self.manifest, ensure_ascii=False)
        if edit:
            text = edit(text)
        text = text.encode("utf-8", "surrogatepass")[:-1] + b",\n"
        with open(path + "/manifest.json", "wb") as f:
            f.write(text + b'"sha256":"' + sha256(text).encode() + b'"\n}\n')

    def tensor(self, ending):
        return next(t for t in self.manifest["tensors"] if t["name"].endswith(ending))

    def planes(self, t):
        """Every stored [dtype, shape, data] of a tensor: one a plane and part."""
        for p in t["planes"]:
            for part in self.parts.values():
                if t["name"] + p["suffix"] in part.tensors:
                    yield p, part.tensors[t["name"] + p["suffix"]]

    def reshape(self, t):
        """The planes of t in the parts as its extents and cells say, data cut or repeated."""
        for p, stored in self.planes(t):
            n, k = p["cell"]
            rows, cols = -(-t["rows"] // n) if n else 1, -(-t["cols"] // k) if k else 1
            shape = [rows] if t["vector"] else [t["lead"], rows, cols] if t["lead"] else [rows, cols]
            size = SIZE.get(p["dtype"], 1)
            for s in shape:
                size *= s
            if size > 1 << 24:
                raise ValueError("too large for a test")
            old = stored[2] or bytearray(1)
            stored[:] = [p["dtype"], shape, (old * (size // len(old) + 1))[:size]]
