"""Checkpoints as values, for the convert_*.py tests: safetensors files read and written with nothing but struct and json, a small
checkpoint made from nothing, directories compared, programs run."""
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile

SIZE = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_st(path):
    """{name: (dtype, shape, bytes)} in file order, and the metadata."""
    with open(path, "rb") as f:
        data = f.read()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n])
    meta = header.pop("__metadata__", {})
    start = 8 + n
    named = sorted(header.items(), key=lambda kv: kv[1]["data_offsets"])
    return {k: (v["dtype"], v["shape"], data[start + v["data_offsets"][0] : start + v["data_offsets"][1]]) for k, v in named}, meta


def write_st(path, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


class Checkpoint:
    """A source: config, tensors, and which file holds each of them."""

    def __init__(self, config, tensors, file=None, files=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
        self.config = config
        self.tensors = tensors
        self.file = file or {name: files[i % len(files)] for i, name in enumerate(tensors)}
        self.index = None  # text to write instead of the true one; "" for none

    @staticmethod
    def load(path):
        with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        with open(os.path.join(path, INDEX), encoding="utf-8") as f:
            place = json.load(f)["weight_map"]
        tensors = {}
        for name in sorted(set(place.values())):
            tensors.update(read_st(os.path.join(path, name))[0])
        return Checkpoint(config, tensors, place)

    def save(self, path):
        os.makedirs(path)
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
            json.dump(self.config, f)
        if self.index is None:
            with open(os.path.join(path, INDEX), "w", encoding="utf-8") as f:
                json.dump({"metadata": {}, "weight_map": {k: self.file[k] for k in self.tensors}}, f)
        elif self.index:
            with open(os.path.join(path, INDEX), "w", encoding="utf-8") as f:
                f.write(self.index)
        for file in sorted({self.file[k] for k in self.tensors}):
            write_st(os.path.join(path, file), {k: v for k, v in self.tensors.items() if self.file[k] == file})
        return path


def noise(seed, n):
    """n bytes that look random and are the same everywhere."""
    return hashlib.shake_128(seed.encode()).digest(n)


NO_NAN = bytes(b ^ 1 if b & 0x7F == 0x7F else b for b in range(256))
SMALL_EXPONENT = bytes((b & 0x80) | 0x3C | b & 1 for b in range(256))  # high byte of BF16: magnitudes in [2^-7, 2^-3)


def values(name, dtype, n):
    """n finite numbers of the type, neighbours different."""
    raw = bytearray(noise(name, n * SIZE[dtype]))
    if dtype == "F8_E4M3":
        return bytes(raw).translate(NO_NAN)
    if dtype == "F32":  # [2^-8, 2^-7)
        raw[2::4] = bytes(b | 0x80 for b in raw[2::4])
        raw[3::4] = b"\x3b" * n
    if dtype == "BF16":
        raw[1::2] = bytes(raw[1::2]).translate(SMALL_EXPONENT)
    return bytes(raw)


def small(hidden=10, heads=2, kv=1, dim=4, experts=3, inter=6, vocab=12, layers=1, block=128, fp8=True):
    """A MiniMax-M2 of any size; in block FP8, or in BF16."""
    config = {
        "architectures": ["MiniMaxM2ForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "head_dim": dim, "intermediate_size": inter, "num_local_experts": experts, "num_experts_per_tok": 1,
        "rotary_dim": 2, "vocab_size": vocab,
    }
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    t = {}

    def add(name, dtype, *shape):
        n = 1
        for d in shape:
            n *= d
        t[name] = (dtype, list(shape), values(name, dtype, n))

    def matrix(name, rows, cols):
        add(name, "F8_E4M3" if fp8 else "BF16", rows, cols)
        if fp8:
            add(name + "_scale_inv", "F32", -(-rows // block), -(-cols // block))

    add("model.embed_tokens.weight", "BF16", vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        add(at + "input_layernorm.weight", "BF16", hidden)
        matrix(at + "self_attn.q_proj.weight", heads * dim, hidden)
        matrix(at + "self_attn.k_proj.weight", kv * dim, hidden)
        matrix(at + "self_attn.v_proj.weight", kv * dim, hidden)
        matrix(at + "self_attn.o_proj.weight", hidden, heads * dim)
        add(at + "self_attn.q_norm.weight", "BF16", heads * dim)
        add(at + "self_attn.k_norm.weight", "BF16", kv * dim)
        add(at + "post_attention_layernorm.weight", "BF16", hidden)
        add(at + "block_sparse_moe.gate.weight", "F32", experts, hidden)
        add(at + "block_sparse_moe.e_score_correction_bias", "F32", experts)
        for e in range(experts):
            one = at + f"block_sparse_moe.experts.{e}."
            matrix(one + "w1.weight", inter, hidden)
            matrix(one + "w2.weight", hidden, inter)
            matrix(one + "w3.weight", inter, hidden)
    add("model.norm.weight", "BF16", hidden)
    add("lm_head.weight", "BF16", vocab, hidden)
    return Checkpoint(config, t)


def packed(path):
    """[{name: (dtype, shape, bytes)}] of each rank, and the manifest."""
    with open(os.path.join(path, "manifest.json"), encoding="utf-8") as f:
        manifest = json.load(f)
    ranks = []
    for rank in manifest["ranks"]:
        tensors = {}
        for part in rank["parts"]:
            tensors.update(read_st(os.path.join(path, part["file"]))[0])
        ranks.append(tensors)
    return ranks, manifest


def tree(path):
    """What lies below a path: names, types, modes, contents, link targets."""
    out = {}
    for top, dirs, files in os.walk(path):
        for name in dirs + files:
            p = os.path.join(top, name)
            s = os.lstat(p)
            if stat.S_ISLNK(s.st_mode):
                what = os.readlink(p)
            elif stat.S_ISREG(s.st_mode):
                try:
                    with open(p, "rb") as f:
                        what = hashlib.sha256(f.read()).hexdigest()
                except PermissionError:
                    what = "unreadable"
            else:
                what = stat.S_IFMT(s.st_mode)
            out[os.path.relpath(p, path)] = (s.st_mode, what)
    return out


def same_files(a, b):
    """Byte-identical directories."""
    return tree(a) == tree(b)


def run(*args, **options):
    return subprocess.run([str(a) for a in args], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, **options)


def ok(*args, **options):
    done = run(*args, **options)
    assert done.returncode == 0, f"{args}: exit status {done.returncode}: {done.stderr.decode(errors='replace')}"
    return done


def documented(code, status):
    """docs/errors.md has this exit status in the code's row."""
    with open("docs/errors.md", encoding="utf-8") as f:
        row = next(line for line in f if line.startswith(f"| `{code}` |"))
    assert str(status) in row.split("|")[2].replace(" ", "").split(","), f"docs/errors.md lacks status {status} of {code}"


def assert_error(done, program, status, code, *says):
    """The exit status, nothing on stdout, and exactly one line on stderr: program, code, all of `says`, nothing raw."""
    err = done.stderr
    documented(code, status)
    shown = f"status {done.returncode}, stdout {done.stdout[:200]}, stderr {err[:1000]}"
    assert done.returncode == status, f"expected status {status} {code}; found {shown}"
    assert done.stdout == b"", shown
    assert err.count(b"\n") == 1 and err.endswith(b"\n") and len(err) < 3200, shown
    assert err.startswith(f"{program}: error: {code}: ".encode()), f"expected {code}; found {shown}"
    assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", err), shown
    for s in says:
        assert s.encode() in err, f"expected {s!r}; found {shown}"


class Scratch:
    """A fresh directory that goes away."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"), prefix="convert-")
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)


def main(tests):
    """Runs every test; prints how many there were. A failure is an exception with the test's name before it."""
    sys.stdout.reconfigure(errors="replace")
    only = sys.argv[1:]
    tests = [t for t in tests if not only or t.__name__ in only]
    for test in tests:
        try:
            test()
        except BaseException:
            print(f"in {test.__name__}:", flush=True)
            raise
    print(f"{len(tests)} tests passed")
