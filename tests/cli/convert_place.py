#!/usr/bin/env python3
"""Experts placed by their load: a server writes the load, --place balances ranks by it, and logits keep their bits on CPU ranks. A placed
checkpoint is verified, resumed, archived, cut anew in the order of ids, and exported; load files that do not fit are refused."""
import ctypes
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server  # noqa: E402

RANDOM = random.Random(7)


def run(status, says, *words):
    done = subprocess.run([f"{BIN}/{words[0]}", *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == status and says in done.stdout, (words, done.returncode, done.stdout)
    return done.stdout


def convert(source, name, *options, status=0, says=""):
    run(status, says, "minimax-convert", source, "-o", f"{TMP}/{name}", "-q", *options)
    return f"{TMP}/{name}"


def manifest(path):
    with open(path + "/manifest.json", encoding="utf-8") as f:
        return json.load(f)


def files(path):
    return {name: open(f"{path}/{name}", "rb").read() for name in sorted(os.listdir(path))}


def model_digest(path):
    """Of the model's line of the manifest, which is what the digest is taken of."""
    line = next(x for x in open(path + "/manifest.json", encoding="utf-8") if x.startswith('"model":'))
    return hashlib.sha256(line[len('"model":'):-2].encode()).hexdigest()


def save(name, **changes):
    with open(f"{TMP}/{name}", "w", encoding="utf-8") as f:
        f.write(json.dumps(changes))
    return f"{TMP}/{name}"


def skewed(path):
    """A load file of the model with a few experts that take most."""
    m = manifest(path)["model"]
    rows = [[int(1000 / (1 + RANDOM.randrange(m["experts"])) ** 2) + RANDOM.randrange(9) for _ in range(m["experts"])] for _ in range(m["layers"])]
    return {"format": "minimax-expert-load", "version": 1, "model": model_digest(path), "architecture": m["architecture"], "load": rows}


def balanced(load, groups):
    """Experts by index: the largest load first to the lightest group with room, then ascending in each group; None where that gains nothing."""
    each = len(load) // groups
    held = [[] for _ in range(groups)]
    for e in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        min((g for g in held if len(g) < each), key=lambda g: sum(load[i] for i in g)).append(e)
    order = [e for g in held for e in sorted(g)]

    def most(of):
        return max(sum(load[e] for e in of[g * each:(g + 1) * each]) for g in range(groups))

    return order if most(order) < most(range(len(load))) else None


def logits(path, prompts, name):
    run(0, "", "minimax-eval", path, "--ids-from", prompts, "--logits", f"{TMP}/{name}", "--chunk", "37", "--threads", "1", "-q", "--force")
    return open(f"{TMP}/{name}", "rb").read()


def write_prompts(vocab):
    """Prompts of one token, of a few, and of more than a chunk."""
    head, data = {}, b""
    for i, n in enumerate((1, 9, 50)):
        raw = struct.pack(f"<{n}i", *(RANDOM.randrange(vocab) for _ in range(n)))
        head[f"ids.{i}"] = {"dtype": "I32", "shape": [n], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    with open(f"{TMP}/prompts.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    return f"{TMP}/prompts.safetensors"


def same_bits(model, quant, tp, ep, pp=1, *more):
    """Logits of the placed checkpoint are those of the unplaced one."""
    cut = ("--tp", str(tp), "--ep", str(ep), "--pp", str(pp), *more)
    plain = convert(f"tests/data/{model}", f"{model}-{tp}-{ep}-{pp}", *cut, "--quant", quant)
    load = skewed(plain)
    placed = convert(plain, f"{model}-{tp}-{ep}-{pp}-placed", *cut, "--place", save("load.json", **load))
    moved = manifest(placed)["version"] == 4
    assert moved == (ep < manifest(plain)["model"]["experts"]) and moved == (files(placed) != files(plain)), (model, tp, ep)
    for t in (t for t in manifest(placed)["tensors"] if t["whole_lead"]):
        layer = int(t["name"].split(".")[2])
        assert t.get("experts") == balanced(load["load"][layer], ep), (t["name"], t.get("experts"))
    prompts = write_prompts(manifest(plain)["model"]["vocab"])
    assert logits(plain, prompts, "plain") == logits(placed, prompts, "placed"), (model, tp, ep)
    return plain, placed


def listed(placed):
    """minimax-inspect's experts of each rank are the manifest's."""
    m = manifest(placed)
    m |= m["parallel"]
    each, ranks = m["tp"] // m["ep"], m["tp"] * m["pp"]
    for rank in None, 0, ranks - 1:
        of = () if rank is None else ("--rank", str(rank))
        text, found = run(0, "--place, ", "minimax-inspect", placed, *of), json.loads(run(0, "", "minimax-inspect", placed, "--json", *of))
        lines, experts = [x.strip() for x in text.splitlines() if ": experts " in x], {t["name"]: t.get("experts") for t in found["tensors"]}
        expected, shown = {}, []
        for t in m["tensors"]:
            for group in range(m["ep"]) if "experts" in t else ():
                held = [r for r in range(t["stage"] * m["tp"] + group * each, t["stage"] * m["tp"] + (group + 1) * each) if rank in (None, r)]
                if held:
                    ids = t["experts"][group * t["lead"]:(group + 1) * t["lead"]]
                    expected.setdefault(t["name"], []).append({"ranks": held, "experts": ids})
                    shown.append((held, ids))
        assert {k: v for k, v in experts.items() if v} == expected and expected, (placed, rank)
        assert len(lines) == len(shown)
        for line, (held, ids) in zip(lines, shown):
            head, runs = line.split(": experts ")
            wide = [list(range(int(x.split("-")[0]), int(x.split("-")[-1]) + 1)) for x in runs.split(",")]
            assert sum(wide, []) == ids, (line, ids)
            assert head == (f"rank {held[0]}" if len(held) == 1 else f"ranks {held[0]}-{held[-1]}"), (head, held)


def whole_way(plain, placed, load, source):
    """Verify, resume, archive, back to the order of ids, export."""
    cut = ("--tp", "2", "--ep", "2")
    run(0, "exact", "minimax-verify", placed, "--source", source)
    run(6, ", other experts on some ranks", "minimax-inspect", plain, "--diff", placed, "--data")
    run(0, "", "minimax-inspect", placed, "--diff", placed, "--data")
    library, error = ctypes.CDLL(f"{BIN}/../lib/libminimax.so"), ctypes.create_string_buffer(1 << 14)
    library.minimax_open.restype = ctypes.c_void_p
    assert not library.minimax_open(placed.encode(), error) and b"found experts placed by --place" in error.raw, error.raw.strip(b"\0")
    assert files(convert(placed, "back", *cut)) == files(plain), "cut anew without --place"
    assert files(convert(source, "direct", *cut, "--quant", "block_fp8", "--place", load)) == files(placed), "placed from the source itself"
    follow = ("--follow", "--follow-quiet", "0")
    assert files(convert(source, "followed", *cut, "--quant", "block_fp8", "--place", load, *follow)) == files(placed), "followed"
    for part in ("0/2", "1/2"):
        convert(plain, "resumed", *cut, "--place", load, "--part", part, *(() if part == "0/2" else ("--resume",)))
    convert(plain, "resumed", *cut, "--resume", "--place", save("other.json", **skewed(plain)), status=2, says="E_RESUME")
    assert files(convert(plain, "resumed", *cut, "--place", load, "--resume")) == files(placed), "resumed"
    convert(plain, "resumed", *cut, "--resume", status=2, says="E_RESUME")
    run(0, "", "minimax-archive", "pack", placed, "-o", f"{TMP}/archive", "-q")
    run(0, "", "minimax-archive", "unpack", f"{TMP}/archive", "-o", f"{TMP}/unpacked", "-q")
    assert files(f"{TMP}/unpacked") == files(placed), "archived"
    assert files(convert(placed, "hf-placed", "--layout", "hf")) == files(convert(plain, "hf-plain", "--layout", "hf")), "exported"


def collected(plain):
    """The load that a server counts, as a file; each row of a request chose top_k experts of each layer."""
    with Server(plain, "--threads", "1") as s:
        s.post("/v1/completions", {"prompt": list(range(1, 41)), "max_tokens": 4, "temperature": 0})
        end, rows, text = time.monotonic() + 30, 43 * manifest(plain)["model"]["top_k"], s.get("/expert_load")
        while any(sum(x) != rows for x in json.loads(text)["load"]):  # it is read once nothing runs
            assert time.monotonic() < end, text
            time.sleep(0.02)
            text = s.get("/expert_load")
    assert json.loads(text)["model"] == model_digest(plain)
    with open(f"{TMP}/collected.json", "wb") as f:
        f.write(text)
    return f"{TMP}/collected.json"


def refusals(plain, other):
    cut = ("--tp", "2", "--ep", "2")
    good = skewed(plain)
    rows = good["load"]
    convert(plain, "no", "--tp", "2", "--place", save("bad.json", **good), status=2, says="--place without --ep")
    convert(plain, "no", "--layout", "hf", "--place", f"{TMP}/bad.json", status=2, says="--place without --ep")
    for says, changes in (("found the load of another model", {"model": model_digest(other)}), ("key \"format\"", {"format": "x"}),
                          ("key \"version\"", {"version": 2}), (f"found {len(rows) - 1} layers", {"load": rows[1:]}),
                          (f"layer 1: found {len(rows[1]) - 1} experts", {"load": [rows[0], rows[1][1:], *rows[2:]]}),
                          ("layer 0: expert 2: found -1", {"load": [[*rows[0][:2], -1, *rows[0][3:]], *rows[1:]]}),
                          ("layer 0: expert 2: found -0.5", {"load": [[*rows[0][:2], -0.5, *rows[0][3:]], *rows[1:]]}),
                          ("layer 0: expert 2: found \"7\"", {"load": [[*rows[0][:2], "7", *rows[0][3:]], *rows[1:]]}),
                          ("E_JSON", {"load": [[*rows[0][:2], float("nan"), *rows[0][3:]], *rows[1:]]}),
                          ("E_JSON", {"load": [[*rows[0][:2], float("inf"), *rows[0][3:]], *rows[1:]]}),
                          ("found 0 everywhere", {"load": [[0] * len(x) for x in rows]}), ("unknown key \"more\"", {"more": 1})):
        convert(plain, "no", *cut, "--place", save("bad.json", **{**good, **changes}), status=3, says=says)
    convert(plain, "no", *cut, "--place", f"{TMP}/absent.json", status=3, says="absent.json")
    least = save("least.json", **{**good, "load": [[5e-324] * len(x) for x in rows]})
    found = json.loads(run(0, "", "minimax-convert", plain, *cut, "--place", least, "--dry-run", "--json", "-q"))
    assert found["placed_peak"] == found["unplaced_peak"] == 1, found


def hostile(placed):
    """A manifest whose stacks have other orders, or an order that is none."""
    text = open(placed + "/manifest.json", encoding="utf-8").read()
    tensor = next(t for t in manifest(placed)["tensors"] if "experts" in t)
    order = tensor["experts"]
    swapped = [order[1], order[0], *order[2:]]
    for wrong, says in (([order[0], *order[:-1]], "once"), (order[:-1], "entries"), ([*order[:-1], len(order)], "once"), (swapped, "another order")):
        changed = text.replace(f'"experts":{json.dumps(order, separators=(",", ":"))}', f'"experts":{json.dumps(wrong, separators=(",", ":"))}', 1)
        assert changed != text
        body = changed[:-78]
        shutil.copytree(placed, f"{TMP}/hostile", dirs_exist_ok=True)
        with open(f"{TMP}/hostile/manifest.json", "w", encoding="utf-8") as f:
            f.write(f'{body}"sha256":"{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')
        run(6, says, "minimax-run", f"{TMP}/hostile", "-p", "x", "-n", "1")


PLAIN, PLACED = same_bits("tiny-m2", "block_fp8", 2, 2)
LOAD = save("kept.json", **json.load(open(f"{TMP}/load.json", encoding="utf-8")))
OTHER, _ = same_bits("tiny-m1", "bf16", 2, 2)
for case in (("tiny-m2", "nvfp4", 4, 4), ("tiny-m2", "w4a16", 4, 2, 2), ("tiny-m1", "block_fp8", 4, 2, 1, "--attn-tp", "2"), ("tiny-m1", "bf16", 4, 4), ("tiny-m3-random", "bf16", 2, 2),
             ("tiny-m3-random", "mxfp8", 4, 2)):
    _, placed_here = same_bits(*case)
    if case[1] in ("nvfp4", "w4a16"):
        listed(placed_here)
listed(PLACED)
convert(PLAIN, "by-server", "--tp", "2", "--ep", "2", "--place", collected(PLAIN))
whole_way(PLAIN, PLACED, LOAD, "tests/data/tiny-m2")
refusals(PLAIN, OTHER)
hostile(PLACED)
print("placed experts: bits of logits, load of a server, verify, resume, archive, back, export; refusals by name")
