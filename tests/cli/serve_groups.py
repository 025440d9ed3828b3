#!/usr/bin/env python3
"""A checkpoint of --attn-tp behind minimax-serve: replies of crowds are those of one rank, requests are spread over the groups of attention, prefixes
are found in the group that has them; runs that need one group are refused by name before weights are read. DEVICE=cuda DEVICES=0,1: the same on
GPUs, where replies are those of the same crowd before, with --batch-invariant, and not those of another cut."""
import concurrent.futures
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server  # noqa: E402

DEVICE = ("--device", os.environ["DEVICE"], "--batch-invariant") if "DEVICE" in os.environ else ()


def devices(ranks):
    """The option for so many ranks, which take turns on the GPUs of $DEVICES."""
    given = os.environ.get("DEVICES", "0").split(",")
    return ("--devices", ",".join(given[r % len(given)] for r in range(ranks))) if DEVICE else ()


def convert(model, name, *options, quant="none"):
    subprocess.run([f"{BIN}/minimax-convert", f"tests/data/{model}", "-o", f"{TMP}/{name}", "--quant", quant, "-q", *options], check=True)
    return f"{TMP}/{name}"


def body(i):
    """Prompts of 3 to 150 ids, pairs of which begin alike; drawn and greedy replies."""
    prompt = [3 + (t * t + 5 * t + (i // 2 if t < 70 else i) * 7) % 400 for t in range(3 + 21 * i)]
    return {"prompt": prompt, "max_tokens": 12 + i, "temperature": i % 3 * 0.7, "seed": i, "n": 1 + i % 2, "ignore_eos": True, "priority": i % 2}


def crowd(packed, *options):
    """The texts of eight requests at a time, twice, and the requests that a group ran at a time, at most."""
    with Server(packed, "-t", "1", "--act-quant", "off", "--max-model-len", "256", *DEVICE, *options) as s, concurrent.futures.ThreadPoolExecutor(8) as pool:
        said, seen = [], [0, 0]
        for _ in range(2):
            waiting = [pool.submit(s.post, "/v1/completions", body(i)) for i in range(8)]
            while not all(w.done() for w in waiting):
                found = s.metrics()
                seen = [max(seen[g], found.get(f'group_tokens{{group="{g}"}}', 0)) for g in range(2)]
                time.sleep(0.002)
            said.append([[c["text"] for c in w.result()["choices"]] for w in waiting])
        while (found := s.metrics())["requests_running"]:
            pass
        assert found.get('group_tokens{group="1"}', 0) == 0 and found["pages_free"] + found["pages_cached"] == found["pages"], found
        cached = [s.post("/v1/completions", body(7))["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
        assert said[0] == said[1] and cached[1] > 100, cached
        return said[0], seen, open(s.log).read()


def shared(packed, *options):
    """Eight replies to a prompt of 400 ids, and eight prompts that begin so: each group computes it once, and other requests of the group wait for that."""
    top = json.load(open(packed + "/config.json", encoding="utf-8"))["num_experts_per_tok"]
    with Server(packed, "-t", "1", "--max-model-len", "512", "--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--kv-cache-tokens", "16384", "--drafts", "0", *DEVICE, *options) as s, \
            concurrent.futures.ThreadPoolExecutor(8) as pool:
        def rows():
            time.sleep(0.2)  # the server counts once a second while it runs, and when nothing does
            return max(sum(layer) for layer in json.loads(s.get("/expert_load"))["load"]) / top

        first = [5 + t * t % 300 for t in range(400)]
        before = rows()
        s.post("/v1/completions", {"prompt": first, "n": 8, "max_tokens": 4, "ignore_eos": True})
        several = rows()
        list(pool.map(lambda i: s.post("/v1/completions", {"prompt": [6] + first[1:] + [i], "max_tokens": 4, "ignore_eos": True}), range(8)))
        alike = rows()
        assert several - before <= 2 * 399 + 8 * 4 and alike - several <= 2 * 400 + 8 * 4, (packed, before, several, alike)


def refused(says, *words):
    done = subprocess.run([f"{BIN}/{words[0]}", *words[1:]], capture_output=True, text=True)
    assert done.returncode == 4 and "E_PARALLEL" in done.stderr and says in done.stderr and "--attn-tp" in done.stderr, (words, done.returncode, done.stderr)


for model, shape in (("tiny-m1", ["--tp", "2", "--attn-tp", "1", "--ep", "2"]), ("tiny-m2", ["--tp", "4", "--attn-tp", "2", *([] if DEVICE else ["--pp", "2"])])):
    one, groups = convert(model, model + "-one"), convert(model, model + "-groups", *shape)
    alone, none, _ = crowd(one, "--max-num-seqs", "4", *devices(1))
    spread, seen, log = crowd(groups, "--max-num-seqs", "4", "--kv-cache-tokens", "1024", *devices(int(shape[1])))
    assert (spread == alone or DEVICE) and none == [0, 0] and min(seen) > 0 and "2 groups of ranks" in log, (seen, log)
    assert "equal part of the KV cache; unrounded rows between them" in log, log
    shared(groups, *devices(int(shape[1])))
    # A sequence lies in one group: its part of the cache has to hold --max-model-len.
    short = subprocess.run([f"{BIN}/minimax-serve", groups, "--port", "0", "--kv-cache-tokens", "192", "--max-model-len", "160", "--check"], capture_output=True, text=True)
    assert short.returncode == 2 and "found 192 (128 for each of 2 groups), fewer than one sequence of --max-model-len 160" in short.stderr, (short.returncode, short.stderr)
    subprocess.run([f"{BIN}/minimax-serve", groups, "--port", "0", "--kv-cache-tokens", "257", "--max-model-len", "160", "--check", *DEVICE, *devices(int(shape[1]))], check=True, capture_output=True)
    refused("collecting inputs", "minimax-eval", groups, "--text", "tests/data/held-out.txt", "--collect", f"{TMP}/moments")
codes = convert("tiny-m2", "tiny-m2-codes", "--tp", "2", "--attn-tp", "1", quant="block_fp8")
with Server(codes, "-t", "1", "--act-quant", "on", "--max-model-len", "256", *DEVICE, *devices(2)) as s:
    s.post("/v1/completions", body(1))
    log = open(s.log).read()
    assert DEVICE or "; rows between them as E4M3 codes with a scale for each 128 numbers, 296 bytes a row\n" in log, log
print("crowds over groups of attention: replies of one rank, spread by tokens; refusals by name")
