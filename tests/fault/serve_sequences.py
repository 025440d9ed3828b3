#!/usr/bin/env python3
"""serve_sequences.py [REQUESTS] [SEED]: random requests to a server that has too little of everything, beside one that has time.

Two servers of one checkpoint: the one runs a few requests at a time in steps of few tokens, keeps prompts, drafts, and has so few cache tokens that
requests are taken out and begun again; the other runs one request at a time and keeps nothing. Requests begin alike, go on differently, come in
bursts, are streamed or not, have several choices, stop strings, penalties, biases, schemas, tools, priorities; some clients go away in the middle. What is
asked: texts, reasons and logprobs of every request are those of the second server, whatever ran beside; and the first server ends well."""
import collections
import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("BUILD", "build")
os.environ.setdefault("TMPDIR", "/tmp")
sys.path.insert(0, "tests/cli")
from serve_client import Server, convert

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 24
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 7
figures, guard = collections.Counter(), threading.Lock()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", None]}, "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
          "required": ["a", "b"], "additionalProperties": False}


class Patient(Server):
    """A request of low priority waits while others come."""

    def connect(self, timeout=1000):
        return super().connect(timeout)


def request(rng, starts, vocab):
    """(path, body) of one request; every choice in it is from rng."""
    chat = rng.random() < 0.4
    body = {"max_tokens": rng.choice([1, 2, 5, 9, 17, 30]), "seed": rng.randrange(-5, 1 << 40), "temperature": rng.choice([0, 0, 0.7, 1, 3]),
            "logprobs": rng.choice([None, True if chat else rng.randrange(6)])}
    if body["logprobs"] is None:
        del body["logprobs"]
    elif chat:
        body["top_logprobs"] = rng.randrange(6)
    for key, values in (("top_p", [0, 0.3, 0.95]), ("top_k", [-1, 1, 7]), ("min_p", [0.1]), ("presence_penalty", [-2, 1.5]), ("frequency_penalty", [0.8]),
                        ("repetition_penalty", [0.5, 1.3]), ("ignore_eos", [True]), ("stop", ["e", [" t", "on", "\n"]]), ("include_stop_str_in_output", [True]),
                        ("n", [2, 3]), ("logit_bias", [{"5": 100}, {"7": -100, "9": 3.5}]), ("priority", [-1, 5]), ("stop_token_ids", [[5, 9, 300]]), ("skip_special_tokens", [False])):
        if rng.random() < 0.15:
            body[key] = rng.choice(values)
    ids = list(rng.choice(starts))
    ids = ids[:rng.randrange(1, len(ids) + 1)] + [rng.randrange(vocab) for _ in range(rng.choice([0, 0, 1, 5]))]
    if not chat:
        body["prompt"] = rng.choice([ids, ids, [ids, ids[: len(ids) // 2 + 1]]])
        if rng.random() < 0.1:
            body["echo"] = True
        return "/v1/completions", body
    said = "".join(chr(97 + x % 26) if x % 5 else " " for x in ids)
    body["messages"] = [{"role": "user", "content": said[:40]}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": said[40:] or "?"}][: rng.choice([1, 3])]
    if rng.random() < 0.3:
        body["response_format"] = rng.choice([{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}])
    if rng.random() < 0.4:  # in a context that has no room for them the request is refused, by both
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
        body["tool_choice"] = rng.choice(["auto", "auto", "none", "required"])
    return "/v1/chat/completions", body


def plain(reply):
    """What must be the same: no names, times or what was kept of the prompt."""
    if "choices" not in reply:
        return reply
    usage = {k: v for k, v in reply["usage"].items() if not k.endswith("details")}
    choices = sorted(reply["choices"], key=lambda c: c["index"])
    for c in choices:
        for call in (c.get("message") or {}).get("tool_calls") or []:
            call.pop("id", None)
    return {"choices": choices, "usage": usage}


def ask(server, path, body):
    status, _, data = server.request("POST", path, body)
    return status, plain(json.loads(data))


def joined(server, path, body):
    """(status, text of each choice, reason of each) of a stream."""
    status, headers, data = server.request("POST", path, {**body, "stream": True})
    if status != 200:
        return status, plain(json.loads(data))
    parts = data.decode().split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]", data[-300:]
    text, why = collections.defaultdict(str), {}
    for part in parts:
        for c in json.loads(part.removeprefix("data: "))["choices"]:
            text[c["index"]] += c.get("text") or (c.get("delta") or {}).get("content") or ""
            why[c["index"]] = c["finish_reason"] or why.get(c["index"])
    return status, dict(text), why


def whole(reply):
    """The same of a reply at once."""
    status, x = reply
    if status != 200:
        return reply
    return status, {c["index"]: c["text"] if "text" in c else c["message"]["content"] or "" for c in x["choices"]}, {c["index"]: c["finish_reason"] for c in x["choices"]}


def leave(server, path, body, after):
    """A client that goes away."""
    c = server.connect()
    c.request("POST", path, json.dumps({**body, "stream": True}))
    try:
        c.sock.settimeout(after)
        c.sock.recv(200)
    except OSError:
        pass
    c.close()


def one(job):
    server, number, path, body, how = job
    rng = random.Random(f"{SEED} {number} {how}")
    if how == "leave":
        leave(server, path, body, rng.choice([0.001, 0.02, 0.2]))
        return None
    return joined(server, path, body) if how == "stream" else ask(server, path, body)


def model(source, chat, options, count):
    rng = random.Random(f"{SEED} {source}")
    packed = convert(source, *options)
    vocab = json.load(open(packed + "/config.json", encoding="utf-8"))["vocab_size"] - 100
    shared = [rng.randrange(vocab) for _ in range(90)]
    starts = [shared[:rng.randrange(20, 91)] for _ in range(3)] + [[rng.randrange(vocab) for _ in range(rng.randrange(1, 70))] for _ in range(2)]
    jobs = []
    for i in range(count):
        path, body = request(rng, starts, vocab)
        jobs.append((path, body, rng.choice(["at once", "at once", "stream", "stream", "leave"])))
    length = rng.choice([160, 720])
    kv = str(rng.choice([160, 192, 256]) * length // 160)
    small = ["--max-num-seqs", rng.choice(["2", "3", "5"]), "--max-num-batched-tokens", rng.choice(["8", "17", "64"]), "--kv-cache-tokens", kv, "--max-model-len", str(length),
             "--prefix-cache-memory", rng.choice(["512K", "1M", "64M"]), "--drafts", rng.choice(["0", "3"]), "--batch-invariant", "-t", "1", "--chat-format", chat]
    plenty = ["--max-num-seqs", "1", "--prefix-cache", "off", "--max-model-len", str(length), "--batch-invariant", "-t", "1", "--chat-format", chat]
    with Patient(packed, *plenty) as calm, Patient(packed, *small) as busy:
        expected = [ask(calm, path, body) for path, body, _ in jobs]
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(one, [(busy, i, *job) for i, job in enumerate(jobs)]))
        if os.environ.get("SHOW"):
            print(collections.Counter(str(w[1].get("error", {}).get("message")) for w in expected if w[0] != 200))
        for i, ((path, body, how), got, want) in enumerate(zip(jobs, found, expected)):
            figures[how] += 1
            figures[want[0]] += 1
            if how == "leave":
                continue
            if how == "stream":
                want = whole(want)
            if got != want:
                figures["wrong"] += 1
                print(f"request {i} of seed {SEED}, {source} {small}, {how}: {path} {json.dumps(body)}\n  found    {got}\n  expected {want}", flush=True)
        figures["preempted"] += sum(int(float(line.split()[-1])) for line in busy.get("/metrics").decode().splitlines()
                                    if "preempt" in line and not line.startswith("#"))


model("tests/data/tiny-m2", "minimax-m2", ["--tp", "2"], COUNT // 2)
model("tests/data/tiny-m1", "minimax-m1", [], COUNT - COUNT // 2)
print(f"{COUNT} requests, {figures[200]} answered, {figures['stream']} streamed, {figures['leave']} clients went away, {figures['preempted']} times a request was taken out: "
      f"{figures['wrong']} other than alone (seed {SEED})")
sys.exit(figures["wrong"] > 0)
