#!/usr/bin/env python3
"""Checkpoints whose tensors, experts, ranks, parts, rows, bits, companions or fingerprints somebody exchanged and sealed again: minimax-verify
--source refuses every one with status 6. Most pass without --source, since digests prove only what the manifest says. Whole checkpoints of
every scheme pass, also where another version is said to have packed them.

  RESEALED=N for another number (24; 138 is all kinds on all bases), SEED=N to repeat a run."""
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, "tests/fault")
import packed_files as pf

BIN = os.environ["BUILD"] + "/bin/"
COUNT, SEED = int(os.environ.get("RESEALED", 24)), int(os.environ.get("SEED", random.randrange(1 << 32)))
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
BASES = [("m2", ("--quant", "none", "--tp", "2", "--part-size", "40K")), ("m1", ("--quant", "none", "--tp", "2", "--ep", "2")),
         ("m2", ("--quant", "block_fp8", "--tp", "2")), ("m1", ("--quant", "nvfp4", "--part-size", "60K")), ("m2", ("--quant", "int8", "--tp", "4")),
         ("m1", ("--quant", "w4a16", "--head", "block_fp8", "--tp", "2", "--pp", "2")), ("m2", ("--quant", "bf16", "--tp", "2")), ("m3", ("--quant", "mxfp8", "--tp", "2"))]
PLAIN = 6
SCHEMES = ["bf16", "block_fp8", "tensor_wise_fp8", "channel_fp8", "mxfp8", "int8", "nvfp4", "mxfp4", "w4a16", "w4afp8", "w4a8"]


def verify(path, *options):
    r = subprocess.run([BIN + "minimax-verify", "-q", "-j", "2", path, *options], capture_output=True, text=True, timeout=60, check=False)
    assert r.returncode >= 0 and (r.returncode == 0 or r.stderr.count("\n") == 1), r.stderr
    return r.returncode, r.stderr


# ---- what is changed; each returns False where there is nothing of its kind

def named(p, name):
    """Every [dtype, shape, data] of this name, one a rank that holds it."""
    return [part.tensors[name] for part in p.parts.values() if name in part.tensors]


def swap(a, b, at, bt, n):
    """n bytes of two buffers; False where they are the same."""
    x, y = bytes(a[at:at + n]), bytes(b[bt:bt + n])
    a[at:at + n], b[bt:bt + n] = y, x
    return x != y


def suffixes(t):
    return [x["suffix"] for x in t["planes"]]


def tensors(rng, p):
    """Two tensors of one shape, such as o_proj of two layers, with all their planes."""
    shape = lambda t: (t["scheme"], t["rows"], t["cols"], t["lead"], t["stage"], t["name"].split(".")[-2])
    pairs = [(a, b) for a in p.manifest["tensors"] for b in p.manifest["tensors"] if a["name"] < b["name"] and shape(a) == shape(b)]
    if not pairs:
        return False
    a, b = rng.choice(pairs)
    changed = False
    for s in suffixes(a):
        for x, y in zip(named(p, a["name"] + s), named(p, b["name"] + s)):
            changed |= swap(x[2], y[2], 0, 0, len(x[2]))
    return changed


def experts(rng, p):
    t = rng.choice([t for t in p.manifest["tensors"] if t["lead"] > 1])
    i, j = rng.sample(range(t["lead"]), 2)
    changed = False
    for s in suffixes(t):
        for _, _, data in named(p, t["name"] + s):
            n = len(data) // t["lead"]
            changed |= swap(data, data, i * n, j * n, n)
    return changed


def ranks(rng, p):
    """A tensor of two ranks of a stage."""
    several = [t for t in p.manifest["tensors"] if len(named(p, t["name"] + suffixes(t)[0])) > 1]
    if not several:
        return False
    t = rng.choice(several)
    i, j = rng.sample(range(len(named(p, t["name"] + suffixes(t)[0]))), 2)
    changed = False
    for s in suffixes(t):
        held = named(p, t["name"] + s)
        changed |= swap(held[i][2], held[j][2], 0, 0, len(held[i][2]))
    return changed


def parts(rng, p):
    """All that two parts of a rank hold alike, in their order."""
    pairs = [(a, b) for a in p.parts for b in p.parts if a < b and a[:16] == b[:16]]
    rng.shuffle(pairs)
    for a, b in pairs:
        changed = False
        for x, y in zip(p.parts[a].tensors.values(), p.parts[b].tensors.values()):
            if x[:2] == y[:2]:
                changed |= swap(x[2], y[2], 0, 0, len(x[2]))
        if changed:
            return True
    return False


def rows(rng, p):
    """Two rows of codes, with their scales where each row has its own."""
    t = rng.choice([t for t in p.manifest["tensors"] if not t["vector"] and t["rows"] > 1])
    i, j = rng.sample(range(t["rows"]), 2)
    changed = False
    for plane in t["planes"]:
        n = plane["cell"][0]
        if n == 0 or i // n == j // n:
            continue
        for _, _, data in named(p, t["name"] + plane["suffix"]):
            row = len(data) // max(t["lead"], 1) // -(-t["rows"] // n)
            changed |= swap(data, data, i // n * row, j // n * row, row)
    return changed


def bits(rng, p):
    """One low bit of one code or scale, the same on every rank that holds the bytes alike."""
    t = rng.choice(p.manifest["tensors"])
    held = named(p, t["name"] + rng.choice(suffixes(t)))
    at = rng.randrange(len(held[0][2]))
    old, bit = bytes(held[0][2]), 1 << rng.choice([0, 1])
    for _, _, data in held:
        if bytes(data) == old:
            data[at] ^= bit
    return True


def companions(rng, p):
    name = rng.choice(sorted(p.files))
    data = p.files[name]
    kind = rng.choice(["space", "removed", "added"]) if name != "config.json" else "space"
    if kind == "removed":
        del p.files[name]
        p.manifest["files"] = [f for f in p.manifest["files"] if f["name"] != name]
        return name != "tokenizer.bin"  # made from tokenizer.json, and need not be there
    if kind == "added":
        new = rng.choice([n for n in ("vocab.json", "NOTICE", "merges.txt", "modeling_x.py") if n not in p.files])
        p.files[new] = b"{}"
        p.manifest["files"].append({"name": new, "size": 2, "sha256": pf.sha256(b"{}")})
        return True
    p.files[name] = data[:-1] + bytes([data[-1] ^ 1]) if name == "tokenizer.bin" else data + b" "
    return True


def fingerprints(rng, p):
    s = rng.choice(p.manifest["sources"])
    kind = rng.choice(["name", "size", "header_sha256", "less", "more"])
    if kind == "less":
        p.manifest["sources"].remove(s)
    elif kind == "more":
        p.manifest["sources"].append(dict(s, name="another.safetensors"))
    elif kind == "name":
        s["name"] = "x" + s["name"]
    else:
        s[kind] = s["size"] + 1 if kind == "size" else pf.sha256(s["header_sha256"].encode())
    return True


def inputs(rng, p):
    t = rng.choice([t for t in p.manifest["tensors"] if t["scheme"] in ("nvfp4", "tensor_wise_fp8", "w4afp8")] or [None])
    if t is None:
        return False
    t["input_scale"] = 0.25
    return True


def left_out(rng, p):
    """What the packed checkpoint is said to lack."""
    if "left_out" not in p.manifest:
        return False
    kind, x = rng.choice(["less", "tensors", "bytes", "prefix"]), rng.choice(p.manifest["left_out"])
    if kind == "less":
        p.manifest["left_out"].remove(x)
    else:
        x[kind] = "x" + x[kind] if kind == "prefix" else x[kind] + 1
    return True


KINDS = [tensors, experts, ranks, parts, rows, bits, companions, fingerprints, inputs, left_out]


def attack(i):
    """(what, whether it passed without --source)"""
    rng = random.Random(f"{SEED} {i}")
    for _ in range(100):
        kind = KINDS[i % len(KINDS)]
        base = PLAIN if kind in (rows, bits) and i < len(KINDS) else rng.randrange(len(BASES))
        p = copy.deepcopy(LOADED[base])
        if kind(rng, p):
            break
    else:
        raise AssertionError(f"nothing to change: {kind.__name__}")
    plain = "bf16" in BASES[base][1]  # every version rounds alike
    if kind in (tensors, experts, ranks, parts) and rng.random() < 0.3 or plain and kind in (rows, bits):
        p.manifest["tool"] = "minimax-convert 0.0.9"
    path = f"{work}/{i}"
    p.save(path)
    plain, _ = verify(path)
    found, said = verify(path, "--source", f"{work}/{BASES[base][0]}")
    assert plain in (0, 6) and found == 6 and (plain or "E_SOURCE" in said), \
        f"case {i} of seed {SEED}: {kind.__name__} in {BASES[base]}: {p.manifest['tool']}: status {found} ({said.strip()}), without --source {plain}"
    shutil.rmtree(path)
    return plain == 0


def whole():
    """Nothing is refused that nobody changed."""
    for scheme in SCHEMES if COUNT > 100 else random.Random(SEED).sample(SCHEMES, 3):
        for family in ("m1", "m2"):
            pf.convert(BIN + "minimax-convert", f"{work}/{family}", work + "/whole", "--quant", scheme, "--tp", "2")
            assert verify(work + "/whole", "--source", f"{work}/{family}") == (0, ""), scheme
            p = pf.Packed(work + "/whole")
            p.manifest["tool"] = "minimax-convert 0.0.9"
            p.save(work + "/older")
            assert verify(work + "/older", "--source", f"{work}/{family}") == (0, ""), (scheme, "older")
            shutil.rmtree(work + "/whole")
            shutil.rmtree(work + "/older")


LOADED = []
shutil.copytree("tests/data/tiny-m3-random", work + "/m3")
for f in ("m1", "m2"):
    pf.source(f"{work}/{f}", family=f, **({} if f == "m1" else {"num_hidden_layers": 2, "attn_type_list": [1, 1]}))
    for extra, text in (("generation_config.json", '{"eos_token_id": 2}'), ("chat_template.jinja", "{{ messages }}"), ("tokenizer_config.json", "{}")):
        with open(f"{work}/{f}/{extra}", "w", encoding="utf-8") as file:
            file.write(text)
for n, (f, options) in enumerate(BASES):
    pf.convert(BIN + "minimax-convert", f"{work}/{f}", f"{work}/base{n}", *options)
    assert verify(f"{work}/base{n}", "--source", f"{work}/{f}") == (0, ""), BASES[n]
    LOADED.append(pf.Packed(f"{work}/base{n}"))
whole()
passed = sum(attack(i) for i in range(COUNT))
assert passed > COUNT // 2, f"{passed} of {COUNT} passed without --source: digests were not sealed again"
shutil.rmtree(work)
print(f"{COUNT} checkpoints with exchanged contents refused with --source (seed {SEED}); {passed} of them pass without")
