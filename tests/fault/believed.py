#!/usr/bin/env python3
"""believed.py [CHANGES] [SEED]: one value of a manifest becomes another, sealed again, in checkpoints of several schemes and cuts.

minimax-verify refuses it, or what reads the checkpoint computes what it did before: the likelihood of a text on its ranks, and that of the same
checkpoint cut for one rank, are those of the manifest that was not changed, or a refusal in one line. Left out are the values that nothing but a
source can prove: static scales of activations, what wrote the checkpoint, the recipe, and the fingerprints of the source."""
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

sys.path.insert(0, "tests/fault")
import packed_files as pf

BIN = os.path.join(os.environ.get("BUILD", "build"), "bin/")
COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 60
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 7
ONLY = os.environ.get("ONLY")
work = tempfile.mkdtemp(prefix="mm-believed-", dir=os.environ.get("TMPDIR"))
BASES = [("m2", "block_fp8", "--tp", "4"), ("m2", "nvfp4", "--tp", "2", "--ep", "2"), ("m1", "w4a16", "--tp", "2"), ("m2", "none", "--tp", "4", "--tp-align", "pad"),
         ("m1", "mxfp8", "--tp", "4", "--ep", "2"), ("m2", "none; lm_head*=int8", "--tp", "1", "--pp", "2")]


def leaves(node, path=()):
    """Paths of all values that may change."""
    if isinstance(node, dict):
        for key, value in node.items():
            if not (path == () and key in ("tool", "quant", "sources", "files", "ranks", "sha256", "format", "version")) and key != "input_scale":
                yield from leaves(value, (*path, key))
    elif isinstance(node, list):
        yield path
        for i, value in enumerate(node):
            yield from leaves(value, (*path, i))
    else:
        yield path


def change(rng, m):
    """One of them becomes another; what and how."""
    kind = rng.choice(sorted({p[0] for p in leaves(m)}))
    path = rng.choice([p for p in leaves(m) if p[0] == kind])
    node = m
    for key in path[:-1]:
        node = node[key]
    old = node[path[-1]]
    alike = [v for p in leaves(m) if p[-1] == path[-1] and p[0] == kind for v in [at(m, p)] if type(v) is type(old)]
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, list):
        new = rng.choice([old[::-1], old + old[-1:], old[:-1], rng.choice(alike), [rng.randrange(200)]])
    elif isinstance(old, int):
        new = rng.choice([old + 1, max(0, old - 1), old * 2, old // 2, 0, rng.choice(alike)])
    elif isinstance(old, float):
        new = rng.choice([old * 2, old / 3, old + 1])
    else:
        new = rng.choice([*alike, old + "x", old[::-1]])
    node[path[-1]] = copy.deepcopy(new)
    return f"{'.'.join(map(str, path))}: {json.dumps(old)[:80]} -> {json.dumps(new)[:80]}"


def at(m, path):
    for key in path:
        m = m[key]
    return m


def call(program, *args):
    r = subprocess.run([BIN + program, *args], capture_output=True, text=True, timeout=60)
    if r.returncode not in (0, 2, 3, 4, 6, 8) or r.returncode and (r.stderr.count("\n") != 1 or ": error: E_" not in r.stderr):
        raise RuntimeError(f"{program} {' '.join(args)}: status {r.returncode}: {r.stderr[:2000]}")
    return r.returncode, r.stdout, r.stderr


def scores(path, pp):
    """Likelihood on the checkpoint's own ranks and after a cut for one, or why not."""
    ids = ["--ids", work + "/ids.json", "--window", "16", "-t", "1", "--act-quant", "off", "--json", "-q"]
    own = call("minimax-eval", path, *ids) if pp == 1 else (0, "", "")
    cut = path + ".cut"
    rc, _, err = call("minimax-convert", path, "-o", cut, "-q")
    one = (rc, "", err) if rc else call("minimax-eval", cut, *ids)
    shutil.rmtree(cut, ignore_errors=True)
    return own, one


def case(i):
    rng = random.Random(f"{SEED} {i}")
    base = rng.randrange(len(BASES))
    p = copy.deepcopy(LOADED[base][0])
    p.manifest.pop("sha256")
    before = copy.deepcopy(p.manifest)
    what = change(rng, p.manifest)
    while p.manifest == before:
        what = change(rng, p.manifest)
    path = f"{work}/{i}"
    p.save(path)
    try:
        if call("minimax-verify", path, "-q")[0]:
            return "refused"
        for found, expected in zip(scores(path, p.manifest["parallel"]["pp"]), LOADED[base][1]):
            if found[0] == 0 and found[1] != expected[1]:
                return f"change {i} of seed {SEED}, {BASES[base]}: {what}: verify passed it, and now {found[1].strip()[:200]} instead of {expected[1].strip()[:200]}"
        return "passed"
    except RuntimeError as e:
        return f"change {i} of seed {SEED}, {BASES[base]}: {what}: {e}"
    finally:
        if not ONLY:
            shutil.rmtree(path, ignore_errors=True)


with open(work + "/ids.json", "w", encoding="utf-8") as f:
    json.dump([(7 * i * i + 3) % 264 for i in range(48)], f)
LOADED = []
for n, (family, quant, *options) in enumerate(BASES):
    source = f"{work}/{family}"
    if not os.path.exists(source):
        pf.source(source, family=family, num_hidden_layers=2, attn_type_list=[0, 1] if family == "m1" else [1, 1])
    pf.convert(BIN + "minimax-convert", source, f"{work}/base{n}", "--quant", quant, *options)
    expected = scores(f"{work}/base{n}", 2 if "--pp" in options else 1)
    if any(x[0] for x in expected):
        sys.exit(f"{BASES[n]}: {expected}")
    LOADED.append((pf.Packed(f"{work}/base{n}"), expected))
with ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count() or 2))) as pool:
    results = list(pool.map(case, [int(ONLY)] if ONLY else range(COUNT)))
wrong = [r for r in results if r not in ("refused", "passed")]
print(*wrong, sep="\n", end="\n" if wrong else "")
print(f"{len(results)} manifests with a value changed and sealed again (seed {SEED}): {results.count('refused')} refused by verify, {results.count('passed')} passed and "
      f"computed the same, {len(wrong)} believed and wrong")
if not ONLY:
    shutil.rmtree(work)
sys.exit(bool(wrong))
