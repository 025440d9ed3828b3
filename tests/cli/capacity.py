#!/usr/bin/env python3
"""The size of the KV cache. minimax-convert --gpu-memory and the engine say the same, to the page, on GPUs of simulated sizes, for random cuts,
schemes and sizes; on a CPU a share of RAM holds the cache; one that holds no sequence is refused before a weight is read. ROUNDS=N (2)."""
import itertools
import json
import os
import random
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

SEED = os.environ.get("MM_SEED", "1")
CUTS = ([], ["--tp", "2"], ["--tp", "4"], ["--tp", "8"], ["--pp", "2"], ["--tp", "2", "--pp", "2"], ["--tp", "2", "--ep", "2"], ["--tp", "4", "--ep", "2"],
        ["--tp", "2", "--attn-tp", "1"], ["--tp", "4", "--attn-tp", "2"])
SCHEMES = ("none", "bf16", "block_fp8", "w4a16", "nvfp4", "mxfp4", "mxfp8", "channel_fp8", "none; *.experts.*=w4afp8")


def run(*args, status=0):
    done = subprocess.run([f"{BIN}/{args[0]}", *map(str, args[1:])], capture_output=True, text=True, timeout=120)
    assert done.returncode == status, (args, done)
    return done


def agreement(rng, source, cut, scheme):
    """Sizes around those at which the cache begins, holds one sequence, and holds all requests."""
    packed = os.path.join(TMP, f"capacity-{os.path.basename(source)}-{rng.random()}")
    align = rng.choice([[], ["--tp-align", "pad"]]) if "w4a16" not in scheme else []  # whose zero bytes are no zeros
    run("minimax-convert", source, "-o", packed, "--quant", scheme, *cut, *align, "-q")
    config = json.load(open(f"{source}/config.json"))
    extended = "text_config" in config  # MiniMax-M3, which has index keys
    types = [("auto", "auto"), ("fp8", "auto")] + ([("auto", "fp8"), ("fp8", "fp8")] if extended else [])

    def verdict(n, kv, index):
        dtypes = ("--kv-cache-dtype", kv, *(["--index-cache-dtype", index] if extended else []))
        return json.loads(run("minimax-convert", source, "--quant", scheme, *cut, *align, "--dry-run", "--json", "--gpu-memory", n, *dtypes).stdout)["verdict"]

    largest = verdict("80G", "auto", "auto")
    if "refused" in largest:  # no kernel for these slices: the engine would not open
        assert "E_SCHEME" in largest["refused"] and not largest["fits"], largest
        return None
    whole = largest["kv_tokens"]

    def simulated(sizes, t):
        return [int(x) for x in run("../tests/model/simulated_gpu", packed, *t, *sizes).stdout.split()]

    coarse = [(1 << 28) * i for i in range(2, 40)]  # of which some hold nothing and some all
    found = simulated(coarse, types[0])
    low, high = max(n for n, x in zip(coarse, found) if x == 0), min(n for n, x in zip(coarse, found) if x == max(found))
    size = [rng.randrange(1 << 30, 3 << 30) for _ in range(3)] + [1 << 20, 1 << 30, 80 << 30]
    size += [low + (high - low) * i // 10 + rng.randrange(1 << 20) for i in range(11)]
    if extended:  # whose cache is small
        size += [low + (high - low) * (2 * i + 1) // 20 for i in range(5)]
    positions = config.get("text_config", config)["max_position_embeddings"]
    held = [simulated(size, t) for t in types]
    for t, found in zip(types, held):
        some = range(len(size)) if t == types[0] else rng.sample(range(len(size) - 8), 3) + [*range(len(size) - 8, len(size))][::1 if extended else 4]
        for n, got in [(size[i], found[i]) for i in some]:
            v = verdict(n, *t)
            assert v["fits"] == (v["kv_tokens"] >= positions), (n, v)
            assert got == (v["kv_tokens"] if v["fits"] else 0), (source, cut, scheme, align, t, n, v, got)
        assert all(small >= large for small, large in zip(found, held[0])), (t, found, held[0])
    if extended:  # each type by itself changes the size of the cache
        assert all(sum(a) != sum(b) for a, b in itertools.combinations(held, 2)), held
    assert max(held[0]) == whole == 16 * positions and 0 in held[0], held
    return sorted(set(held[0]))


def cards(source):
    """A card's verdict is that of its size; one that no code is built for is refused."""
    judged = {n: json.loads(run("minimax-convert", source, "--dry-run", "--json", "--gpu-memory", n).stdout)["verdict"] for n in ("rtx 4090", "24GB", "V100")}
    assert judged["rtx 4090"] == {**judged["24GB"], "gpu": "RTX-4090", "sm": 89, "runs": judged["rtx 4090"]["runs"], "tried": judged["rtx 4090"]["tried"]}, judged
    assert judged["V100"]["refused"] == "V100 is sm_70, and the kernels need sm_80 or newer" and not judged["V100"]["fits"], judged


def share_of_ram(packed):
    """More than a sequence and less than all, by the share; the same in the log, in /metrics and in --check."""
    ram = int(run("minimax-serve", packed, "--check", "--gpu-memory-utilization", "1e-9", status=8).stderr.split("bytes free of ")[1].split(",")[0])
    config = json.load(open(f"{packed}/config.json"))
    page = 64 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4  # f32
    wanted = 3 * config["max_position_embeddings"] // 64 + 5
    share = repr((wanted + 0.5) * page / ram)
    found = json.loads(run("minimax-serve", packed, "--check", "--json", "--gpu-memory-utilization", share).stdout)
    assert (found["kv_cache_tokens"], found["kv_cache_bytes"]) == (64 * wanted, page * wanted), (found, wanted, page)
    half = json.loads(run("minimax-serve", packed, "--check", "--json", "--kv-cache-dtype", "bf16", "--gpu-memory-utilization", share).stdout)
    assert half["kv_cache_tokens"] in (128 * wanted, 128 * wanted + 64), half
    with Server(packed, "--gpu-memory-utilization", share) as s:
        log = open(s.log).read()
        assert f"KV cache: {64 * wanted} tokens (" in log and f"a full sequence of {config['max_position_embeddings']} fits 3 times" in log, log
        metrics = s.metrics()
        assert metrics["kv_cache_tokens"] == 64 * wanted and metrics["pages"] == wanted, metrics
    given = json.loads(run("minimax-serve", packed, "--check", "--json", "--kv-cache-tokens", 1000, "--gpu-memory-utilization", "1e-9").stdout)
    assert given["kv_cache_tokens"] == given["positions"] == 1024, given
    run("minimax-serve", packed, "--check", "--kv-cache-tokens", 64, "--max-model-len", 65, status=2)
    assert "expected fewer --kv-cache-tokens" in run("minimax-serve", packed, "--check", "--kv-cache-tokens", 2 ** 31 - 64, status=8).stderr
    for bad in ("0", "-0.5", "1.01"):
        assert "more than 0 and at most 1" in run("minimax-run", packed, "-p", "x", "--gpu-memory-utilization", bad, status=2).stderr


def index_keys(packed):
    """M3's index keys in e4m3: a scale and a byte for each number, in --check and in /metrics; refused for a model that has none, before digests are checked."""
    c = json.load(open("tests/data/tiny-m3-random/config.json"))["text_config"]
    sparse, dim = sum(c["sparse_attention_config"]["sparse_attention_freq"]), c["sparse_attention_config"]["sparse_index_dim"]
    kv = c["num_hidden_layers"] * 2 * c["num_key_value_heads"] * c["head_dim"] * 4
    options = ("tests/data/tiny-m3-random", "--load-format", "dummy", "--dummy-quant", "bf16", "--max-model-len", "512", "--kv-cache-tokens", "1024")
    for word, key in (("auto", 4 * dim), ("fp8", 4 + dim)):
        found = json.loads(run("minimax-serve", *options, "--check", "--json", "--index-cache-dtype", word).stdout)
        assert found["kv_cache_bytes"] == 1024 * (kv + sparse * key), (word, found)
    with Server(*options, "--index-cache-dtype", "fp8", "-t", "1") as s:
        assert s.metrics()["kv_cache_bytes"] == 1024 * (kv + sparse * (4 + dim))
        assert s.post("/v1/completions", {"prompt": list(range(300)), "max_tokens": 4, "ignore_eos": True})["usage"]["completion_tokens"] == 4
    for words in (("--index-cache-dtype", "fp8"), ("--kv-cache-dtype", "fp8")):
        assert words[0] in run("minimax-convert", packed, "--dry-run", *words, status=2).stderr
    line = run("minimax-convert", "tests/data/tiny-m2", "--dry-run", "--gpu-memory", "80G", "--index-cache-dtype", "fp8", status=4).stderr
    assert "E_SCHEME" in line and "has no index keys" in line, line
    said = run("minimax-convert", "tests/data/tiny-m3-random", "--dry-run", "--gpu-memory", "80G", "--kv-cache-dtype", "fp8", "--index-cache-dtype", "fp8").stdout
    assert "tokens of FP8 cache with index keys in FP8; " in said, said
    line = run("minimax-serve", packed, "--check", "--verify-on-load", "--index-cache-dtype", "fp8", status=4).stderr
    assert "E_SCHEME" in line and "has no index keys" in line, line


def refused_first(packed):
    """Before digests are checked, which reads every weight: the data is damaged, and that is not what is said."""
    part = next(f"{packed}/{n}" for n in os.listdir(packed) if n.startswith("model-rank"))
    with open(part, "r+b") as f:
        f.seek(-4096, os.SEEK_END)
        damaged = bytes(x ^ 1 for x in f.read())
        f.seek(-4096, os.SEEK_END)
        f.write(damaged)
    small = ("--gpu-memory-utilization", "1e-6", "--verify-on-load")
    ids = os.path.join(TMP, "capacity-ids.json")
    with open(ids, "w") as f:
        json.dump(list(range(1, 20)), f)
    for args, option in ((("minimax-serve", packed, "--check", *small), "--max-model-len"), (("minimax-run", packed, "-p", "In the", *small), "--max-tokens"),
                         (("minimax-eval", packed, "--ids", ids, "--window", 8, *small[:2]), "--window")):
        line = run(*args, status=8).stderr
        assert "E_MEMORY" in line and option in line and "bytes of KV cache" in line and "bytes free of" in line and "--gpu-memory-utilization" in line, line
    assert "E_DIGEST" in run("minimax-serve", packed, "--check", "--verify-on-load", status=6).stderr


def regrouped(source, scheme):
    """A checkpoint of groups that runs with fewer has the cache of a conversion for that shape."""
    sizes = [(1 << 27) * i for i in range(2, 60)]
    made, direct = os.path.join(TMP, "capacity-made"), os.path.join(TMP, "capacity-direct")
    run("minimax-convert", source, "-o", made, "--quant", scheme, "--tp", 4, "--attn-tp", 1, "-q", "--force")
    found = {}
    for groups in (4, 2, 1):
        run("minimax-convert", source, "-o", direct, "--quant", scheme, "--tp", 4, *([] if groups == 1 else ["--attn-tp", 4 // groups]), "-q", "--force")
        os.environ["MM_DP"] = str(groups)
        found[groups] = run("../tests/model/simulated_gpu", made, "auto", "auto", *sizes).stdout
        del os.environ["MM_DP"]
        assert found[groups] == run("../tests/model/simulated_gpu", direct, "auto", "auto", *sizes).stdout, (source, scheme, groups)
    assert len(set(found.values())) > 1, found


rng = random.Random(SEED)
regrouped(*rng.choice([("tests/data/tiny-m1", "nvfp4"), ("tests/data/tiny-m2", "block_fp8")]))
for source in ("tests/data/tiny-m1", "tests/data/tiny-m2"):
    seen = set()
    for cut in rng.sample(CUTS, int(os.environ.get("ROUNDS", "2"))):
        while (tokens := agreement(rng, source, cut, rng.choice(SCHEMES))) is None:
            pass
        seen |= set(tokens)
    assert len(seen) > 2, seen  # some between none and all
agreement(rng, "tests/data/tiny-m3-random", rng.choice([[], ["--tp", "2"]]), rng.choice(["none", "mxfp8", "block_fp8"]))
PACKED = convert("tests/data/tiny-m2")
cards("tests/data/tiny-m2")
share_of_ram(PACKED)
refused_first(PACKED)
index_keys(PACKED)  # whose data is damaged now
