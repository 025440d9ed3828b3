#!/usr/bin/env python3
"""minimax-serve --kv-offload: a prompt whose pages left the device comes back from host memory, with the reply that it had; the metrics
count pages and bytes; tenants do not share it; starts that cannot are refused."""
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, Server, convert  # noqa: E402

PACKED = {m: convert(f"tests/data/{m}", *extra) for m, extra in (("tiny-m1", []), ("tiny-m2", ["--tp", "2"]))}


def metrics(s):
    return {name.removeprefix("offload_"): value for name, value in s.metrics().items() if name.startswith("offload_")}


def complete(s, prompt, **fields):
    """(tokens that were cached, reply) of a prompt of ids."""
    said = s.post("/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 1, "seed": 3, "logprobs": 2, **fields})
    return said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"][0]


def text(first, count=200):
    return [first] + [3 + (i * i + 5 * i) % 200 for i in range(count - 1)]


def evicted(model):
    """Prompts A, B, A, each of more than half of the pages."""
    with Server(PACKED[model], "--kv-cache-tokens", "320", "--max-model-len", "300", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "64M") as s:
        first = complete(s, text(5))
        assert first[0] == 0 and complete(s, text(6))[0] == 0
        again = complete(s, text(5))
        assert again == (199, first[1]), (model, first, again)
        found = metrics(s)
        assert found["hits_total"] == 1 and found["in_bytes_total"] > 0, found
        assert found["out_bytes_total"] >= found["in_bytes_total"] and found["bytes"] <= found["bytes_max"] <= 64 << 20, found
        assert complete(s, text(6))[0] == 199 and complete(s, text(5), cache_salt="other")[0] == 0


for name in PACKED:
    evicted(name)
for options, code, word in ((["--kv-offload", "1K"], 2, "E_LIMITS"), (["--kv-offload", "1M", "--prefix-cache", "off"], 2, "E_USAGE"),
                            (["--kv-offload", "100T"], 8, "E_MEMORY")):
    done = subprocess.run([f"{BIN}/minimax-serve", PACKED["tiny-m2"], "--port", "0", *options], capture_output=True, text=True)
    assert done.returncode == code and word in done.stderr, done
