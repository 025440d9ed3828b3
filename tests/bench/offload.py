#!/usr/bin/env python3
"""Time to the first token of a prompt that is new, of the same prompt again, and of the same again after other prompts took its pages:
offload.py SERVER DIR PROMPT [OPTION ...]

SERVER: the program; DIR and the options are given to it; PROMPT: tokens. ROUNDS (3) of prompts; the first warms the device up, the best of
the others counts. OTHERS (1) prompts take the pages in each. --kv-cache-tokens has room for one prompt and a little, --kv-offload for two; for
the disk's time that has room for one and a little too, and OTHERS is 3."""
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time

server, folder, count, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
rounds, others = int(os.environ.get("ROUNDS", 3)), int(os.environ.get("OTHERS", 1))
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
process = subprocess.Popen([server, folder, "--port", str(port), "--drafts", "0", "--max-num-seqs", "2", "--max-model-len", str(count + 64), *options])


def get(path, body=None):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    c.request("POST" if body else "GET", path, body)
    r = c.getresponse()
    return r.status, r.read().decode()


def ask(text):
    """Seconds until the reply of one token, and the tokens of the prompt that were cached."""
    body = json.dumps({"prompt": [3 + (t * 7919 + text * 104729) % 1999 for t in range(count)], "max_tokens": 1, "temperature": 0})
    start = time.monotonic()
    status, said = get("/v1/completions", body)
    taken = time.monotonic() - start
    assert status == 200, said
    return taken, json.loads(said)["usage"]["prompt_tokens_details"]["cached_tokens"]


def moved():
    return {k: float(v) for k, v in re.findall(r"^minimax_offload_(\w+)\{[^}]*\} (\S+)$", get("/metrics")[1], re.M)}


try:
    while process.poll() is None:
        try:
            if get("/v1/completions", json.dumps({"prompt": [5, 6], "max_tokens": 1}))[0] == 200:
                break
        except OSError:
            pass
        time.sleep(0.05)
    best = {}
    for i in range(rounds):
        text = (1 + others) * i
        times = {"new": ask(text), "again": ask(text)}
        for k in range(others):
            ask(text + 1 + k)
        time.sleep(0.3)  # the figures are published after a step
        before = moved()
        times["after others"] = ask(text)
        time.sleep(0.3)
        came, read = (moved()[k] - before[k] for k in ("in_bytes_total", "disk_read_bytes_total"))
        print(f"round {i}: " + ", ".join(f"{k} {1e3 * t:.1f} ms ({n} cached)" for k, (t, n) in times.items()) +
              f"; {came / 1e9:.3f} GB came back, {read / 1e9:.3f} GB of it from disk", flush=True)
        for k, (t, _) in times.items():
            best[k] = min(best.get(k, t), t) if i > 1 else t
    print(f"{count} tokens: new {1e3 * best['new']:.1f} ms, again {100 * best['again'] / best['new']:.2f} %, "
          f"after others {100 * best['after others'] / best['new']:.2f} %; {moved()}")
finally:
    process.terminate()
    process.wait()
