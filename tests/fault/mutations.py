#!/usr/bin/env python3
"""Packed checkpoints that an attacker wrote: 80 (soak: 5,000) in several schemes and cuts with one to four things changed, in manifest, headers,
scales, weights and companions, often so that they agree with each other, and every digest made right again. Each goes through verify, and what
verify passes through inspect, run, eval and eval --collect (of the others one by lot): whatever verify passes, the others run, or refuse with
one line and a documented status; nothing ends by a signal, a sanitizer or a clock. Programs with sanitizers are used where they were built.

  MUTATIONS=N for another number, SEED=N to repeat a run, ONLY=I for case I of it alone (left in place), JOBS=N at once."""
import copy
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, "tests/fault")
import packed_files as pf

BUILD = os.environ["BUILD"]
SAN = os.path.exists(BUILD + "/san/bin/minimax-verify")
BIN = BUILD + ("/san/bin/" if SAN else "/bin/")
COUNT, SEED = int(os.environ.get("MUTATIONS", 80)), int(os.environ.get("SEED", random.randrange(1 << 32)))
JOBS, SECONDS = int(os.environ.get("JOBS", os.cpu_count() or 2)), 30
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
os.environ["ASAN_OPTIONS"] = "allocator_may_return_null=1:max_allocation_size_mb=512:detect_leaks=0:" + os.environ.get("ASAN_OPTIONS", "")

BASES = [("m2", "block_fp8", 1, ()), ("m2", "nvfp4", 2, ()), ("m2", "mxfp4", 1, ("--tp-align", "pad")), ("m1", "w4a16", 1, ("--head", "block_fp8")), ("m1", "int8", 2, ()),
         ("m2", "mxfp8", 2, ("--tp-align", "pad")), ("m1", "nvfp4", 1, ("--tp-align", "pad")), ("m2", "w4afp8", 1, ("--head", "int8")), ("m1", "tensor_wise_fp8", 2, ()),
         ("m2", "none", 1, ())]
NUMBERS = [0, 1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 1000, 4096, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53]
SCHEMES = {"bf16": [("", "BF16", 1, 1)], "f16": [("", "F16", 1, 1)], "f32": [("", "F32", 1, 1)], "block_fp8": [("", "F8_E4M3", 1, 1), ("_scale_inv", "F32", 128, 128)],
           "channel_fp8": [("", "F8_E4M3", 1, 1), ("_scale", "F32", 1, 0)], "tensor_wise_fp8": [("", "F8_E4M3", 1, 1), ("_scale", "F32", 0, 0)],
           "mxfp8": [("", "F8_E4M3", 1, 1), ("_scale", "U8", 1, 32)], "int8": [("", "I8", 1, 1), ("_scale", "F32", 1, 0)],
           "w4a8": [("", "U8", 1, 2), ("_scale", "F32", 1, 0)], "w4afp8": [("", "U8", 1, 2), ("_scale_inv", "BF16", 1, 128)],
           "w4a16": [("", "U8", 1, 2), ("_scale", "BF16", 1, 128)], "mxfp4": [("", "U8", 1, 2), ("_scale", "U8", 1, 32)],
           "nvfp4": [("", "U8", 1, 2), ("_scale", "F8_E4M3", 1, 16), ("_scale_2", "F32", 0, 0)],
           "nvfp4a16": [("", "U8", 1, 2), ("_scale", "F8_E4M3", 1, 16), ("_scale_2", "F32", 0, 0)]}
LEGAL = {0, 3, 4, 6, 8}


# ---- what is changed

def number(rng, p, old=None):
    """One that stands somewhere in the model, one near `old`, or one from the list."""
    own = [v for v in p.manifest["model"].values() if type(v) is int]
    near = [old + 1, old - 1, old * 2, old // 2] if type(old) is int else []
    return rng.choice([rng.choice(NUMBERS), rng.choice(own), *near])


def model_field(rng, p):
    m = p.manifest["model"]
    key = rng.choice(sorted(m))
    old = m[key]
    if type(old) is bool:
        m[key] = not old
    elif type(old) is int:
        m[key] = number(rng, p, old)
    elif type(old) is float:
        m[key] = rng.choice([0.0, -old, 1e-300, 1e300, 1e-45, old * 1e6])
    elif key == "attn":
        m[key] = rng.choice([old + [1], old[:-1], [1 - a for a in old], old * 2])
    elif key in ("family", "router"):
        m[key] = rng.choice(["m1", "m2", "softmax", "sigmoid_bias"])
    elif isinstance(old, dict):
        old[rng.choice(["alpha", "beta"])] = rng.choice([0, -1, 1e308, 1e-308])


def reshaped(p, t):
    """Whether the planes of a tensor could be given the shape that it says."""
    try:
        p.reshape(t)
    except ValueError:
        return False
    return True


def tensor_field(rng, p):
    """An extent, and often all that hangs on it: pieces, cuts, planes in the parts."""
    t = rng.choice(p.manifest["tensors"])
    key = rng.choice(["rows", "cols", "whole_cols", "lead", "whole_lead", "stage"])
    old, t[key] = t[key], number(rng, p, t[key])
    if rng.random() < 0.8:
        agree(rng, p, t, key, old)


def agree(rng, p, t, key, old):
    if key == "rows":
        rest = t["rows"] - sum(x["local_rows"] for x in t["pieces"][:-1])
        last, whole = t["pieces"][-1], t["pieces"][-1]["rows"]
        c = dict(p.manifest["cuts"][last["cut"]])
        last["local_rows"] = rest
        if c["axis"] == "rows":
            own_cut(p, last, dict(c, local=rest))
        else:
            last["rows"] = rest
    elif key == "cols":
        for x in t["pieces"]:
            c = p.manifest["cuts"][x["cut"]]
            if c["axis"] == "cols":
                own_cut(p, x, dict(c, local=t["cols"]))
            else:
                t["whole_cols"] = t["cols"]
    elif key == "lead":
        t["whole_lead"] = t["lead"] * p.manifest["parallel"]["ep"]
    if max(t["rows"], t["cols"]) < 1 << 20:
        reshaped(p, t)


def own_cut(p, piece, cut):
    piece["cut"] = len(p.manifest["cuts"])
    p.manifest["cuts"].append(copy.deepcopy(cut))


def everywhere(rng, p):
    """One extent becomes another in model, tensors, cuts and data, as if the model had been of that size."""
    m = p.manifest["model"]
    key = rng.choice(["hidden", "heads", "kv_heads", "head_dim", "experts", "intermediate", "vocab", "rotary_dim", "top_k"])
    d = m["head_dim"]
    old, new = m[key], rng.choice([1, 2, 3, 5, 8, 16, 17, 24, 33, 48, 96, 100, 130])
    m[key] = new
    swap = {old: new}
    if key in ("heads", "kv_heads", "head_dim"):
        swap = {x * (old if key == "head_dim" else d): x * (new if key == "head_dim" else d) for x in (m["heads"], m["kv_heads"])}
        swap[3 * m["heads"] * d] = 3 * m["heads"] * m["head_dim"]
    if rng.random() < 0.3 and swap:
        swap.pop(rng.choice(sorted(swap)))
    for t in p.manifest["tensors"]:
        for k in ("rows", "cols", "whole_cols", "lead", "whole_lead"):
            t[k] = swap.get(t[k], t[k])
        at = 0
        for x in t["pieces"]:
            x["rows"], x["local_rows"] = swap.get(x["rows"], x["rows"]), swap.get(x["local_rows"], x["local_rows"])
            x["at"] = at
            at += x["local_rows"]
        t["rows"] = at
    for c in p.manifest["cuts"]:
        for k in ("whole", "local"):
            if k in c:
                c[k] = swap.get(c[k], c[k])
        for r in c.get("ranks", []):
            r[2] = min(c["whole"], c["local"]) if rng.random() < 0.7 else swap.get(r[2], r[2])
            r[1] = min(r[1], c["whole"] - r[2]) if c["whole"] >= r[2] else 0
    for t in p.manifest["tensors"]:
        if not reshaped(p, t):
            return


def other_scheme(rng, p):
    t = rng.choice(p.manifest["tensors"])
    scheme = rng.choice(sorted(SCHEMES))
    old = [stored for _, stored in p.planes(t)]
    size = max((len(s[2]) for s in old), default=1)
    holders = [part for part in p.parts.values() if t["name"] + t["planes"][0]["suffix"] in part.tensors]
    for part in holders:
        for x in t["planes"]:
            part.tensors.pop(t["name"] + x["suffix"], None)
    t["scheme"] = scheme
    t["planes"] = [{"suffix": s, "dtype": d, "cell": [n, k]} for s, d, n, k in SCHEMES[scheme]]
    for part in holders:
        for x in t["planes"]:
            value = {"F32": struct.pack("<f", 0.01), "BF16": b"\x20\x3c", "F8_E4M3": b"\x38", "U8": b"\x7a"}.get(x["dtype"], b"\x11")
            part.tensors[t["name"] + x["suffix"]] = [x["dtype"], [1], bytearray(value * (size if x["suffix"] else size // len(value) + 1))]
    reshaped(p, t)


def finer_cells(rng, p):
    t = rng.choice(p.manifest["tensors"])
    x = rng.choice(t["planes"])
    i = rng.randrange(2)
    x["cell"][i] = rng.choice([0, 1, 2, 3, 4, 8, 16, 64, 128, 256, max(1, x["cell"][i] // 2)])
    reshaped(p, t)


def cut(rng, p):
    c = rng.choice(p.manifest["cuts"])
    if c["axis"] == "none":
        return
    what = rng.randrange(6)
    if what == 0:
        c[rng.choice(["whole", "local"])] = number(rng, p, c["whole"])
    elif what == 1:
        c["axis"] = rng.choice(["none", "rows", "cols"])
    elif what == 2:
        rng.shuffle(c["ranks"])
    else:
        r = rng.choice(c["ranks"])
        i = rng.randrange(3)
        r[i] = number(rng, p, r[i])
        if what > 3:  # padding before the columns, within bounds
            r[0] = rng.randrange(max(1, c["local"]))
            r[2] = min(r[2], c["local"] - r[0])
        if what == 5:
            r[1] = rng.randrange(max(1, r[0] + 1))


def swap_names(rng, p):
    a, b = rng.sample(p.manifest["tensors"], 2)
    for part in p.parts.values():
        moved = {}
        for t, other in ((a, b), (b, a)):
            for x in t["planes"]:
                if t["name"] + x["suffix"] in part.tensors:
                    moved[other["name"] + x["suffix"]] = part.tensors.pop(t["name"] + x["suffix"])
        part.tensors.update(moved)
    a["name"], b["name"] = b["name"], a["name"]


def vector(rng, p):
    t = rng.choice(p.manifest["tensors"])
    t["vector"] = not t["vector"]
    if rng.random() < 0.7:
        t["lead"] = t["whole_lead"] = 0
        old, t["cols"] = t["cols"], 1
        agree(rng, p, t, "cols", old)


def drop_or_repeat(rng, p):
    tensors = p.manifest["tensors"]
    t = rng.choice(tensors)
    if rng.random() < 0.5:
        tensors.remove(t)
        name = None
    else:
        name = t["name"] + ".again"
        tensors.append(dict(copy.deepcopy(t), name=name))
    for part in p.parts.values():
        for x in t["planes"]:
            if t["name"] + x["suffix"] not in part.tensors:
                continue
            if name:
                part.tensors[name + x["suffix"]] = copy.deepcopy(part.tensors[t["name"] + x["suffix"]])
            else:
                part.tensors.pop(t["name"] + x["suffix"])


def scales(rng, p):
    planes = [s for t in p.manifest["tensors"] for x, s in p.planes(t) if x["suffix"] and s[2]]
    if not planes:
        return
    s = rng.choice(planes)
    width = pf.SIZE.get(s[0], 1)
    value = {"F32": [struct.pack("<f", v) for v in (0, -1, 1e-45, 1e-38, 3e38, float("inf"), float("nan"), 1e10)],
             "BF16": [b"\0\0", b"\x80\x3f", b"\x80\x7f", b"\xc0\x7f", b"\x7f\x7f", b"\x01\0"]}.get(s[0], [bytes([b]) for b in (0, 1, 0x7F, 0x80, 0xFE, 0xFF)])
    for _ in range(rng.choice([1, 1, len(s[2]) // width])):
        at = rng.randrange(len(s[2]) // width) * width
        s[2][at:at + width] = rng.choice(value)


def weights(rng, p):
    s = rng.choice([s for part in p.parts.values() for s in part.tensors.values() if s[2]])
    for _ in range(rng.choice([1, 4, 64, 1024])):
        s[2][rng.randrange(len(s[2]))] = rng.choice([0, 0x7F, 0x80, 0xFF, rng.randrange(256)])


def companion(rng, p):
    name = rng.choice(sorted(p.files))
    text = p.files[name]
    try:
        root = json.loads(text)
    except ValueError:
        root = None
    if not isinstance(root, dict) or rng.random() < 0.3:
        b = bytearray(text)
        for _ in range(rng.choice([1, 3])):
            b[rng.randrange(len(b))] = rng.randrange(256)
        p.files[name] = bytes(b)
        return
    node = root
    while True:
        key = rng.choice(sorted(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        node[key] = rng.choice([None, 0, -1, 2**31, 1e300, "", "\u202e\x1b[2J", [], {}, True, [0, 10**9], ["a", "b"], "a" * 1000])
        break
    if rng.random() < 0.3:
        root["eos_token_id"] = rng.choice([0, 263, 264, -1, [1, 2, 10**9], "x"])
    p.files[name] = json.dumps(root).encode("utf-8", "surrogatepass")


def parallel(rng, p):
    key = rng.choice(["tp", "ep", "pp"])
    old = p.manifest["parallel"][key]
    p.manifest["parallel"][key] = rng.choice([1, 2, 3, 4, 1024, 0])
    new = p.manifest["parallel"][key]
    if key == "tp" and 0 < new < 5 and rng.random() < 0.8:
        for part in p.parts.values():
            part.metadata["tp"] = str(new)
        for c in p.manifest["cuts"]:
            if "ranks" in c:
                c["ranks"] = (c["ranks"] * new)[:new]
        p.manifest["ranks"] = [p.manifest["ranks"][i] if i < min(old, new) else {"parts": []} for i in range(new)]
    elif key == "pp" and 0 < new < 5:
        p.manifest["ranks"] += [{"parts": []}] * (p.manifest["parallel"]["tp"] * (new - old))
    elif key == "ep":
        for t in p.manifest["tensors"]:
            if t["lead"] and new:
                t["lead"] = t["whole_lead"] // new
                p.reshape(t)


def odds(rng, p):
    what = rng.randrange(6)
    t = rng.choice(p.manifest["tensors"])
    if what == 0:
        p.manifest["dead_rows"] = rng.choice([[0], [0, 263], [264], list(range(264)), [5, 5], [10**6]])
    elif what == 1:
        t["input_scale"] = rng.choice([0.5, 1e-45, 3e38, 0.1, -1.0, 2.0**-120])
    elif what == 2:
        t["name"] = rng.choice(["\x1b[2J", "\u202e", "a" * 2000, "", "model.norm.weight", t["name"] + "\0"])
    elif what == 3:
        p.manifest[rng.choice(["tool", "quant", "tp_align"])] = rng.choice(["re:((a", "none; re:" + "(" * 1000 + "=none", "pad", "\x9b", "x" * 100000])
    elif what == 4:
        part = rng.choice(sorted(p.parts))
        s = p.parts[part].tensors[rng.choice(sorted(p.parts[part].tensors))]
        s[1] = rng.choice([s[1][::-1], s[1] + [1], [1] + s[1], [n * 2 for n in s[1]], []])
    else:
        x = rng.choice(t["planes"])
        x[rng.choice(["suffix", "dtype"])] = rng.choice(["", "_scale", "_scale_inv", "F32", "BF16", "U8", "F8_E4M3", "I64"])


def experts_wider(rng, p):
    """The model's width of an expert, or its head, hidden, vocabulary, less than what is stored."""
    m = p.manifest["model"]
    key = rng.choice(["intermediate", "intermediate", "vocab", "hidden", "experts", "head_dim"])
    m[key] = max(1, m[key] // rng.choice([2, 4, 64]))


KINDS = [model_field, model_field, tensor_field, tensor_field, everywhere, everywhere, other_scheme, other_scheme, finer_cells, cut, cut, swap_names, vector,
         drop_or_repeat, scales, scales, weights, companion, companion, parallel, odds, experts_wider]

CONFIG = {"hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "experts": "num_local_experts", "top_k": "num_experts_per_tok",
          "intermediate": "intermediate_size", "vocab": "vocab_size", "layers": "num_hidden_layers", "max_positions": "max_position_embeddings", "head_dim": "head_dim",
          "rotary_dim": "rotary_dim", "rope_theta": "rope_theta", "norm_eps": "rms_norm_eps", "attn": "attn_type_list"}


def same_config(rng, p):
    """config.json says what the manifest's model now does, so that verify looks further."""
    try:
        config, m = json.loads(p.files["config.json"]), p.manifest["model"]
        config.update({theirs: m[ours] for ours, theirs in CONFIG.items()})
        for kind, word in (("lightning", "linear_attention"), ("full", "full_attention"), ("mlp", "mlp")):
            for x in ("alpha", "beta"):
                if f"layernorm_{word}_{x}" in config:
                    config[f"layernorm_{word}_{x}"] = m[f"deepnorm_{kind}"][x]
        p.files["config.json"] = json.dumps(config).encode("utf-8", "surrogatepass")
    except (ValueError, AttributeError, KeyError, UnicodeDecodeError):
        pass


# ---- what the programs do with it


def show(program, args, r):
    return f"{program} {' '.join(args)}: exit status {r.returncode}\n{r.stderr.decode(errors='replace')[:6000]}"


def call(program, *args):
    """Exit status, code of the error; a finding is an exception."""
    try:
        r = subprocess.run([BIN + program, *args], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{program} {' '.join(args)}: more than {SECONDS} s") from None
    text = re.sub(r"==\d+==WARNING: AddressSanitizer failed to allocate .*\n", "", r.stderr.decode(errors="replace"))  # and the program says so
    clean = not any(ord(c) < 32 and c != "\n" or 0x7F <= ord(c) < 0xA0 or c in "\u202e\ufeff" for c in text)
    line = text.count("\n") == 1 and text.startswith(program + ": error: E_")
    short = r.returncode == 2 and (": E_LENGTH: " in text or ": E_USAGE: the prompt has" in text)  # a model of fewer positions than the prompt
    if (r.returncode not in LEGAL and not short) or "Sanitizer" in text or "runtime error" in text or not clean or (r.returncode and not line):
        raise RuntimeError(show(program, args, r))
    return r.returncode, text.split(": ")[2] if line else ""


def others(path):
    return {"inspect": ("minimax-inspect", path), "run": ("minimax-run", path, "-p", "ab", "-n", "2", "-t", "1", "-q"),
            "eval": ("minimax-eval", path, "--ids", work + "/ids.json", "--window", "8", "--threads", "1"),
            "plain": ("minimax-eval", path, "--ids", work + "/ids.json", "--window", "8", "--threads", "1", "--act-quant", "off", "--input-dtype", "bf16"),
            "collect": ("minimax-eval", path, "--ids", work + "/ids.json", "--window", "8", "--threads", "1", "--collect", path + ".cal")}


def case(i):
    """(passed, ran, refused, changes)"""
    rng = random.Random(f"{SEED} {i}")
    base = rng.choice(range(len(BASES)))
    p = copy.deepcopy(LOADED[base])
    changes = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        kind = rng.choice(KINDS)
        try:
            kind(rng, p)
        except (ValueError, ZeroDivisionError, IndexError, OverflowError, MemoryError, KeyError):
            pass  # what two changes left no longer fits the third
        changes.append(kind.__name__)
    if rng.random() < 0.8:
        same_config(rng, p)
    path = f"{work}/{i}"
    try:
        p.save(path)
    except (ValueError, OverflowError, RecursionError):
        shutil.rmtree(path, ignore_errors=True)
        return None
    try:
        status, _ = call("minimax-verify", path, "-q", "-j", "1")
        calls = others(path)
        names = sorted(calls) if status == 0 else [rng.choice(sorted(calls))]
        ran = refused = 0
        for name in names:
            s, code = call(*calls[name])
            ran += s == 0
            refused += s != 0
            if status == 0 and (code in ("E_SHAPE", "E_MISSING", "E_TP", "E_EXTRA", "E_DIGEST") or s and name == "inspect"):
                raise RuntimeError(f"verify passed what {name} refuses: {code}")
    except RuntimeError as e:
        return f"case {i} of seed {SEED} ({BASES[base]}, {', '.join(changes)}): {e}"
    finally:
        if "ONLY" not in os.environ:
            shutil.rmtree(path, ignore_errors=True)
        if os.path.exists(path + ".cal"):
            os.remove(path + ".cal")
    return status == 0, ran, refused


with open(work + "/ids.json", "w", encoding="utf-8") as ids:
    json.dump([(7 * i) % 264 for i in range(17)], ids)
LOADED = []
for n, (family, scheme, tp, options) in enumerate(BASES):
    if not os.path.exists(f"{work}/{family}"):
        pf.source(f"{work}/{family}", family=family)
    pf.convert(BUILD + "/bin/minimax-convert", f"{work}/{family}", f"{work}/base{n}", "--tp", str(tp), "--quant", scheme, *options)
    if call("minimax-verify", f"{work}/base{n}", "-q")[0] or any(call(*c)[0] for c in others(f"{work}/base{n}").values()):
        sys.exit(f"{BASES[n]}: not whole before anything was changed")
    LOADED.append(pf.Packed(f"{work}/base{n}"))


def narrow(p):
    p.manifest["model"]["intermediate"] = p.manifest["parallel"]["tp"]


def padding_in_front(p):
    """Columns 0 … of the experts at 128 … of what is stored: more padding in front than there are columns before, in whole cells."""
    for t in (p.tensor("experts.w2_weight"), p.tensor("experts.w13_weight")):
        at = 0
        for x in t["pieces"]:
            c = copy.deepcopy(p.manifest["cuts"][x["cut"]])
            c["local"] = max(c["local"], c["whole"] + 128)
            c["ranks"][0] = [128, 0, c["whole"]]
            own_cut(p, x, c)
            if c["axis"] == "rows":
                x["local_rows"] = c["local"]
            else:
                t["cols"] = c["local"]
            x["at"], at = at, at + x["local_rows"]
        t["rows"] = at
        p.reshape(t)


# What was found once: refused by name by verify, and by what would run it.
for n, scheme in ((1, "nvfp4"), (2, "mxfp4"), (0, "block_fp8")):
    for attack in (narrow, padding_in_front):
        if attack is padding_in_front and BASES[n][2] != 1:
            continue
        p = copy.deepcopy(LOADED[n])
        attack(p)
        p.save(f"{work}/attack")
        for program, *args in (("minimax-verify", f"{work}/attack", "-q"), *others(f"{work}/attack").values()):
            found = call(program, *args)
            if program != "minimax-inspect" and found != (6, "E_SHAPE"):
                sys.exit(f"{program}: {attack.__name__} in {scheme}: found {found}, expected exit status 6 and E_SHAPE")
        shutil.rmtree(f"{work}/attack")
only = os.environ.get("ONLY")
with ThreadPoolExecutor(JOBS) as pool:
    results = list(pool.map(case, [int(only)] if only else range(COUNT)))
findings = [r for r in results if isinstance(r, str)]
done = [r for r in results if isinstance(r, tuple)]
for finding in findings:
    print(finding, flush=True)
print(f"{len(done)} checkpoints with changes resealed ({'' if SAN else 'no '}sanitizers, seed {SEED}): verify passed {sum(r[0] for r in done)}; of what was "
      f"tried after it {sum(r[1] for r in done)} ran, {sum(r[2] for r in done)} refused in one line; {len(findings)} findings")
if not only:
    shutil.rmtree(work)
sys.exit(1 if findings else 0)
