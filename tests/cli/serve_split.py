#!/usr/bin/env python3
"""minimax-serve --kv-listen and --prefill-from: prompts computed by one server and replies by another are those of a single server, their usage and
logprobs too, for choices, schemas, seeds and prompts that either has in its cache; the server that decodes computes no prompt of them; a server of
prompts that is killed costs no reply, and a server of replies that is killed leaves the other as it was; what does not fit is refused;
a server of prompts without descriptors waits for some. SOAK=N: N rounds of
kills, and M3. GPUS=0,1: on these GPUs, the replies alone; with groups of attention each server on both."""
import concurrent.futures
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

PREFILL_MIN = 32
SHORT = ["-t", "1", "--max-model-len", "512", "--max-num-seqs", "4", "--act-quant", "off"]
OFFLOAD = [*SHORT, "--kv-offload", "32M"]
gpus = os.environ.get("GPUS")
if gpus:
    OFFLOAD += ["--device", "cuda", "--batch-invariant", "--kv-cache-tokens", "4096"]
DEVICES = [["--devices", g] for g in gpus.split(",")] if gpus else [[], []]
seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
print("seed", seed)
chance = random.Random(seed)


def prefill(packed, *options, port=0):
    s = Server(packed, *OFFLOAD, *DEVICES[1], "--kv-listen", f"127.0.0.1:{port}", *options)
    s.kv_port = int(s.wait_for(r"computed for other servers at \S+:(\d+)"))
    return s


def decode(packed, port, *options):  # other tests may have the cores for seconds
    return Server(packed, *OFFLOAD, *DEVICES[0], "--prefill-from", f"127.0.0.1:{port}", "--prefill-min", str(PREFILL_MIN), *options)


def kill(s):
    s.process.kill()
    s.process.wait()


def split(s):
    return {k.removeprefix("prefill_"): v for k, v in s.metrics().items() if k.startswith("prefill_") and "seconds_" not in k or k == "prefill_wait_seconds_total"}


def rows(s, packed):
    """Rows that the server computed, by its experts' load."""
    load = json.loads(s.get("/expert_load"))["load"]
    config = json.load(open(f"{packed}/config.json"))
    top = config.get("text_config", config)["num_experts_per_tok"]
    return max(sum(layer) for layer in load) / top


def body(i):
    """Requests of 33 to 390 ids; every other one begins like the one before. None has 142: the server of prompts, which is sent 141, would keep M1's states at
    140, where the next one parts from it, and compute less than the other server's cache says."""
    length = 33 + chance.randrange(358)
    prompt = [3 + (t * t + 5 * t + (i // 2 if t < 140 else i) * 7) % 200 for t in range(length + (length == 142))]
    more = {}
    if i % 3 == 1:
        more = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"enum": ["b", 1]}}, "required": ["a"]}}}}
        more = {"guided_regex": "[a-c]{1,4}x"}
    return {"prompt": prompt, "max_tokens": 6, "temperature": i % 2, "seed": i, "n": 1 + i % 3 % 2, "logprobs": 2, "repetition_penalty": 1 + i % 2 / 5, **more}


def answer(s, request):
    said = s.post("/v1/completions", request)
    return said["choices"], said["usage"]["completion_tokens"]


def equal(packed, model, *options):
    with Server(packed, *OFFLOAD, *DEVICES[0], *options) as single, prefill(packed, *options) as there, decode(packed, there.kv_port, *options) as here:
        sent_away = kept = 0  # tokens in no cache here of prompts that go to the other server, and of those that do not
        for i in range(6):
            request = body(i)
            want, got = (s.post("/v1/completions", request) for s in (single, here))
            assert (want["choices"], want["usage"]) == (got["choices"], got["usage"]), (model, i, want, got)
            new = len(request["prompt"]) - got["usage"]["prompt_tokens_details"]["cached_tokens"]
            sent_away, kept = (sent_away + new, kept) if new >= PREFILL_MIN else (sent_away, kept + new)
        while (sent := split(there))["sending"] or split(here)["fetching"]:
            time.sleep(0.01)
        found = split(here)
        assert found["fetched_total"] == sent["sent_total"] >= 3 and found["fallbacks_total"] == sent["dropped_total"] == 0, (found, sent)
        assert found["pages_in_total"] == sent["pages_out_total"] > 0 and found["bytes_in_total"] == sent["bytes_out_total"] > 0, (found, sent)
        assert found["wait_seconds_total"] > 0 and found["fetching"] == sent["sending"] == 0, (found, sent)
        # Of prompts that were sent away, and of second choices, at most the last tokens and the replies' rows were computed here.
        assert rows(here, packed) <= kept + 12 * 8 and rows(there, packed) >= sent_away - 6 * 8, (rows(here, packed), rows(there, packed), kept, sent_away)
        # A crowd, and a prompt that is sent to the server of prompts by itself.
        requests = [body(i) for i in range(6, 12)]
        there.post("/v1/completions", requests[0])
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            got = list(pool.map(lambda r: answer(here, r), requests))
        assert got == [answer(single, r) for r in requests], model


def killed(packed, rounds):
    """Either side is killed at random moments while six requests run at a time: those of the other are answered."""
    single, there = Server(packed, *OFFLOAD), prefill(packed)
    here = decode(packed, there.kv_port)
    port, fallbacks = there.kv_port, 0
    with single, concurrent.futures.ThreadPoolExecutor(6) as pool:
        for r in range(rounds):
            requests = [body(100 + 6 * r + i) for i in range(6)]
            want = [answer(single, q) for q in requests]
            waiting = [pool.submit(answer, here, q) for q in requests]
            time.sleep(chance.random() * 0.08)
            kill(there)
            assert [w.result() for w in waiting] == want
            assert answer(here, requests[0]) == want[0]
            fallbacks += split(here)["fallbacks_total"]
            assert not fallbacks or "E_PREFILL" in open(here.log).read()
            there = prefill(packed, port=port)
            time.sleep(0.05)
            waiting = [pool.submit(answer, here, q) for q in [body(500 + 6 * r + i) for i in range(6)]]
            time.sleep(chance.random() * 0.08)
            kill(here)
            concurrent.futures.wait(waiting)
            end = time.monotonic() + 10
            while (found := there.metrics())["prefill_sending"] or found["requests_running"] or found["requests_waiting"]:
                assert time.monotonic() < end, found
                time.sleep(0.01)
            assert found["pages_free"] + found["pages_cached"] == found["pages"], found
            here = decode(packed, port)
            assert answer(here, requests[1]) == want[1]
    for s in here, there:
        s.process.send_signal(signal.SIGTERM)
        assert s.process.wait(20) == 0, open(s.log).read()
    return fallbacks


def no_descriptors(s):
    """A connection for which the server has no descriptor waits, without a busy loop."""
    limits = resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{s.process.pid}/fd")), limits[1]))
    with socket.create_connection(("127.0.0.1", s.kv_port)) as c:
        used = [int(x) for _ in range(2) for x in (time.sleep(0.5), open(f"/proc/{s.process.pid}/stat").read().split()[13:15])[1]]
        assert sum(used[2:]) - sum(used[:2]) < 25, used  # hundredths of a second
        resource.prlimit(s.process.pid, resource.RLIMIT_NOFILE, limits)
        c.settimeout(60)
        c.sendall(b"GET / HTTP/1.1\r\n" * 4)
        said = b""
        while b"begin no message" not in said:
            came = c.recv(1000)
            assert came, said
            said += came


def refused(packed, status, word, *options):
    done = subprocess.run([f"{BIN}/minimax-serve", packed, "--port", "0", *(SHORT if "--kv-offload" in options else OFFLOAD), *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and word in done.stderr, (options, done)


long = os.environ.get("SOAK")
m2, m1 = convert("tests/data/tiny-m2"), convert("tests/data/tiny-m1")
equal(m2, "m2")
equal(m1, "m1")
groups = [convert("tests/data/tiny-m2", *(("--tp", "2", "--attn-tp", "1") if gpus else ("--tp", "4", "--attn-tp", "2"))),
          convert("tests/data/tiny-m1", "--tp", "2", "--attn-tp", "1", *([] if gpus else ["--pp", "2"]))]
one_each, DEVICES = DEVICES, [["--devices", gpus]] * 2 if gpus else DEVICES
equal(groups[0], "m2 in groups")
equal(groups[1], "m1 in groups")
DEVICES = one_each
if long or gpus:
    equal("tests/data/tiny-m3-random", "m3", "--load-format", "dummy", "--dummy-quant", "bf16")
if gpus:
    sys.exit()
fallbacks = sum(killed(p, int(long) if long else 1) for p in ((m2, m1, *groups) if long else (m2, groups[0])))
assert fallbacks or not long
with prefill(m2) as there:
    address = f"127.0.0.1:{there.kv_port}"
    refused(m1, 2, "E_PREFILL", "--prefill-from", address)
    refused(m2, 2, "--kv-cache-dtype: found auto there, expected bf16 as here", "--prefill-from", address, "--kv-cache-dtype", "bf16")
    two = TMP + "/two"
    subprocess.run([f"{BIN}/minimax-convert", "tests/data/tiny-m2", "-o", two, "--quant", "none", "-q", "--tp", "2", "--attn-tp", "1"], check=True)
    refused(two, 2, "ranks: found 1 there, expected 2 as here", "--prefill-from", address)
    with prefill(two) as other:  # pages of as many bytes, which lie otherwise
        refused(two, 2, "groups of attention (--attn-tp, --dp): found 2 there, expected 1 as here", "--prefill-from", f"127.0.0.1:{other.kv_port}", "--dp", "1")
    refused(m2, 5, "E_IO", "--kv-listen", address)
    no_descriptors(there)
refused(m2, 2, "expected one of them", "--prefill-from", "127.0.0.1:9", "--kv-listen", "127.0.0.1:0")
refused(m2, 2, "expected one of them", "--prefill-from", "127.0.0.1:9", "--kv-offload", "0")
refused(m2, 2, "expected 2 to 3600 seconds", "--kv-listen", "127.0.0.1:0", "--prefill-timeout", "1")
refused(m2, 2, "HOST:PORT", "--kv-listen", "9000")
refused(m2, 2, "E_LIMITS: --kv-offload", "--kv-listen", "127.0.0.1:0", "--kv-offload", "300K")
with decode(m2, 9) as alone:  # nobody is there: every prompt is computed here, and the log says so
    assert "E_PREFILL" in open(alone.log).read() or "E_IO" in open(alone.log).read()
    assert answer(alone, body(1)) and split(alone)["fallbacks_total"] > 0 and "is computed here" in open(alone.log).read()
