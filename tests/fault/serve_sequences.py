#!/usr/bin/env python3
"""serve_sequences.py [REQUESTS] [SEED] [RANKS [KIND]]: random requests to a server that has too little of everything, beside one that has time.

Two servers of one checkpoint: the one runs a few requests at a time in steps of few tokens, keeps prompts, also in host memory and on disk, drafts by
lookup or by a packed draft, has prompts computed by a third server, which is killed now and then, and has so few cache tokens that requests are taken out and begun again; the other runs one request at a time, without proposals, and keeps
nothing. Some requests go on where an earlier reply ended. Requests of every API begin alike, go on differently,
come in bursts, are streamed or not, have several choices, stop strings, penalties, biases, schemas, tools, priorities; some clients go away in the
middle, some read slowly, some give too little time; the last ones are under way when the server is told to end. What is asked: texts, reasoning,
calls, reasons and logprobs of every request are those of the second server, whatever ran beside; nothing is left behind; and both servers end
well. RANKS: every model is cut for so many ranks and the first server has proposals of each kind, by lookup, DFlash and EAGLE-3; KIND: of this one
alone (dflash, lookup, eagle3; lookup-m1: of tiny-m1; groups, groups-m1: with two groups of attention)."""
import collections
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("BUILD", "build")
os.environ.setdefault("TMPDIR", "/tmp")
sys.path.insert(0, "tests/cli")
from convert_draft import DRAFT_VOCAB, EAGLE, eagle_weights, save
from serve_client import BIN, Server, convert

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 24
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 7
RANKS = sys.argv[3] if len(sys.argv) > 3 else None
KIND = sys.argv[4] if len(sys.argv) > 4 else None
figures = collections.Counter()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy", None]}, "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
          "required": ["a", "b"], "additionalProperties": False}


class Patient(Server):
    """A request of low priority waits while others come."""

    def connect(self, timeout=1000):
        return super().connect(timeout)


def request(rng, starts, vocab):
    """(path, body) of one request; every choice in it is from rng."""
    chat = rng.random() < 0.6
    body = {"max_tokens": rng.choice([1, 2, 5, 9, 17, 30, 70]), "seed": rng.randrange(-5, 1 << 40), "temperature": rng.choice([0, 0, 0.7, 1, 3]),
            "logprobs": rng.choice([None, True if chat else rng.randrange(6)])}
    if body["logprobs"] is None:
        del body["logprobs"]
    elif chat:
        body["top_logprobs"] = rng.randrange(6)
    for key, values in (("top_p", [0, 0.3, 0.95]), ("top_k", [-1, 1, 7]), ("min_p", [0.1]), ("presence_penalty", [-2, 1.5]), ("frequency_penalty", [0.8]),
                        ("repetition_penalty", [0.5, 1.3]), ("ignore_eos", [True]), ("stop", ["e", [" t", "on", "\n"]]), ("include_stop_str_in_output", [True]),
                        ("n", [2, 3, 6]), ("cache_salt", ["a", "b"]), ("speculative", [False, True]), ("logit_bias", [{"5": 100}, {"7": -100, "9": 3.5}]), ("priority", [-1, 5]), ("stop_token_ids", [[5, 9, 300]]), ("skip_special_tokens", [False])):
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
    turns = [{"role": "user", "content": said[:40] or "?"}, {"role": "assistant", "content": "ok"}, {"role": "user", "content": said[40:] or "?"}][: rng.choice([1, 3])]
    form = rng.choice([{"type": "json_object"}, {"type": "json_schema", "name": "s", "strict": True, "schema": SCHEMA}]) if rng.random() < 0.3 else None
    # In a context that has no room for them the request is refused, by both.
    choice = rng.choice(["auto", "auto", "none", "required"]) if rng.random() < 0.4 else None
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    api = rng.choice(["/v1/chat/completions"] * 2 + ["/v1/messages", "/v1/responses"])
    if api == "/v1/chat/completions":
        body["messages"] = turns
        if form:
            body["response_format"] = {"type": "json_schema", "json_schema": form} if form["type"] == "json_schema" else form
        if choice:
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            body["tool_choice"] = choice
        return api, body
    for key in ("n", "logprobs", "top_logprobs", "echo", "cache_salt"):
        body.pop(key, None)
    if api == "/v1/messages":
        body["messages"] = turns
        if "stop" in body:
            stop = body.pop("stop")
            body["stop_sequences"] = stop if isinstance(stop, list) else [stop]
        if rng.random() < 0.3:
            body["thinking"] = {"type": "disabled"}
        if form and form["type"] == "json_schema":
            body["output_config"] = {"format": form}
        if choice:
            body["tools"] = [{"name": "f", "input_schema": parameters}]
            body["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
        return api, body
    body["max_output_tokens"] = body.pop("max_tokens")
    body["input"] = turns
    if form:
        body["text"] = {"format": form}
    if choice:
        body["tools"] = [{"type": "function", "name": "f", "parameters": parameters}]
        body["tool_choice"] = choice
    return api, body


def continued(rng, job, reply):
    """The request that goes on where a reply ended, whose pages are kept; None: it has no text to go on with."""
    path, body, how = job
    status, got = reply
    choice = got["choices"][0] if status == 200 and "choices" in got else {}
    if path == "/v1/completions" and choice.get("text") and not body.get("echo") and not isinstance(body["prompt"][0], list):
        return path, {**body, "prompt": [body["prompt"], choice["text"], rng.choice(["", " and", "\nThe"])]}, how
    said = (choice.get("message") or {}).get("content")
    if path == "/v1/chat/completions" and said:
        return path, {**body, "messages": [*body["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": rng.choice(["more", "And the"])}]}, how
    return None


def prompt_of(server, body):
    """A continued completion's prompt as ids: those of its prompt, then those of the texts behind it."""
    ids, *texts = body["prompt"]
    return {**body, "prompt": ids + [x for text in texts if text for x in server.post("/tokenize", {"prompt": text})["tokens"]]}


def plain(reply):
    """What must be the same: no names, times or what was kept of the prompt."""
    if "error" in reply and reply["error"]:
        return {k: v for k, v in reply.items() if k != "request_id"}
    if reply.get("type") == "message":
        usage = reply["usage"]
        blocks = [{k: v for k, v in b.items() if k not in ("id", "signature")} for b in reply["content"]]
        return {"content": blocks, "stop": (reply["stop_reason"], reply["stop_sequence"]), "in": usage["input_tokens"] + usage["cache_read_input_tokens"],
                "out": usage["output_tokens"]}
    if reply.get("object") == "response":
        output = [{k: v for k, v in x.items() if k not in ("id", "call_id")} for x in reply["output"]]
        usage = {k: v for k, v in reply["usage"].items() if not k.endswith("details")}
        return {"output": output, "status": reply["status"], "usage": usage}
    usage = {k: v for k, v in reply["usage"].items() if not k.endswith("details")}
    choices = sorted(reply["choices"], key=lambda c: c["index"])
    for c in choices:
        for call in (c.get("message") or {}).get("tool_calls") or []:
            call.pop("id", None)
    return {"choices": choices, "usage": usage}


def ask(server, path, body):
    status, _, data = server.request("POST", path, body)
    reply = json.loads(data)
    if status == 200 and body.get("logprobs") not in (None, False):  # every token has its entry, and so has every one of an echoed prompt
        usage, entries = reply["usage"], sum(len(logged(c)) for c in reply["choices"])
        assert entries == usage["completion_tokens"] + (usage["prompt_tokens"] * body.get("n", 1) if body.get("echo") else 0), (body, reply)
    return status, plain(reply)


def received(server, path, body, slow):
    """(status, body) of a stream; slow: through a small window, with pauses."""
    c = server.connect()
    if slow:
        c.sock = socket.socket()
        c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        c.sock.settimeout(1000)
        c.sock.connect(("127.0.0.1", server.port))
    c.request("POST", path, json.dumps({**body, "stream": True}))
    r = c.getresponse()
    data = b""
    while part := r.read1(300 if slow else 1 << 16):
        data += part
        if slow:
            time.sleep(0.002)
    c.close()
    return r.status, data


def joined(server, path, body, slow=False):
    """[status, what of each choice] of a stream; an error within it is [its status, None]; one that is refused is (status, error) as it is at once."""
    status, data = received(server, path, body, slow)
    if status != 200:
        return status, plain(json.loads(data))
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    if any("error" in e for e in events) or any(e.get("type") in ("error", "response.failed") for e in events):
        return [504, None]
    if path == "/v1/messages":
        return [status, blocks_of(events)]
    if path == "/v1/responses":
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        return [status, items_of(events)]
    assert data.endswith(b"data: [DONE]\n\n"), data[-300:]
    found = collections.defaultdict(lambda: {"text": "", "reasoning": "", "calls": {}, "why": None, "logged": []})
    for c in (c for e in events for c in e["choices"]):
        one, delta = found[c["index"]], c.get("delta") or {}
        one["text"] += c.get("text") or delta.get("content") or ""
        one["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            name, arguments = one["calls"].get(call["index"], ("", ""))
            one["calls"][call["index"]] = name + call["function"].get("name", ""), arguments + call["function"].get("arguments", "")
        one["logged"] += logged(c)
        one["why"] = c["finish_reason"] or one["why"]
    return [status, {i: {**x, "calls": list(x["calls"].values())} for i, x in found.items()}]


def logged(choice):
    """Its tokens' entries, one behind the other."""
    lists = choice.get("logprobs") or {}
    return lists["content"] if "content" in lists else [list(x) for x in zip(*(lists[k] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")))] if lists else []


def blocks_of(events):
    """Anthropic's: [type, text or name, partial JSON] of each block, and how it ended."""
    blocks = []
    for e in events:
        if e["type"] == "content_block_start":
            assert e["index"] == len(blocks)
            blocks.append([e["content_block"]["type"], e["content_block"].get("name", ""), ""])
        if e["type"] == "content_block_delta":
            blocks[e["index"]][2] += e["delta"].get("text") or e["delta"].get("thinking") or e["delta"].get("partial_json") or ""
    end, = [e for e in events if e["type"] == "message_delta"]
    assert events[-1]["type"] == "message_stop"
    return blocks, (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]), end["usage"]["output_tokens"]


def items_of(events):
    """OpenAI's responses: deltas of each item, which are what the item has at its end and what the last event has."""
    deltas = collections.defaultdict(str)
    for e in events:
        if e["type"].endswith(".delta"):
            deltas[e["output_index"]] += e["delta"]
    last = events[-1]["response"]
    texts = [x["arguments"] if x["type"] == "function_call" else x["content"][0]["text"] for x in last["output"]]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [deltas[i] for i in range(len(texts))] == texts and done == last["output"], (deltas, last)
    return plain(last)


def whole(path, reply):
    """The same of a reply at once."""
    status, x = reply
    if status != 200 or path == "/v1/responses":
        return reply
    if path == "/v1/messages":
        blocks = [[b["type"], b.get("name", ""), b["text"] if "text" in b else b["thinking"] if "thinking" in b else json.dumps(b["input"])] for b in x["content"]]
        return status, (blocks, x["stop"], x["out"])
    return status, {c["index"]: {
        "text": c["text"] if "text" in c else c["message"]["content"] or "", "reasoning": (c.get("message") or {}).get("reasoning_content") or "",
        "calls": [(k["function"]["name"], k["function"]["arguments"]) for k in (c.get("message") or {}).get("tool_calls") or []], "why": c["finish_reason"],
        "logged": logged(c)} for c in x["choices"]}


def alike(path, got, want):
    """Anthropic's unfinished calls have no input in the reply at once, and what there was of it in the stream."""
    if path != "/v1/messages" or got[0] != 200 or want[0] != 200:
        return got == want
    (blocks, *rest), (expected, *others) = got[1], want[1]
    return rest == others and len(blocks) == len(expected) and all(
        a[:2] == b[:2] and (a[2] == b[2] or a[0] == "tool_use" and (b[2] == "{}" or json.loads(a[2]) == json.loads(b[2]))) for a, b in zip(blocks, expected))


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
    if how == "late":
        body = {**body, "timeout": rng.choice([0.01, 0.1, 0.5])}
        return joined(server, path, body) if number % 2 else ask(server, path, body)
    return ask(server, path, body) if how == "at once" else joined(server, path, body, how == "slow")


def last_one(job):
    """A request while the server is told to end: it may be refused or not be heard."""
    try:
        return one(job)
    except OSError:
        return None
    except http.client.HTTPException:
        return None


def settled(server, descriptors):
    """Nothing of what came is left."""
    end = time.monotonic() + 60
    while True:
        v = server.metrics()
        open_now = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        if not (v["requests_running"] or v["requests_waiting"] or v["calls"]) and v["pages_free"] + v["pages_cached"] == v["pages"] and open_now <= descriptors + 2:
            break
        assert time.monotonic() < end, (v, open_now, descriptors)
        time.sleep(0.05)
    finished = sum(n for k, n in v.items() if k.startswith("finished_total"))
    assert finished == v["requests_total"] and v["first_token_seconds_count"] + v["between_tokens_seconds_count"] <= v["reply_tokens_total"], v
    return v


def judge(job, got, want, where):
    path, body, how = job
    figures[how] += 1
    if got is None or (how == "late" and got[0] == 504):
        return
    streamed = isinstance(got, list)
    expected = whole(path, want) if streamed else want
    if alike(path, tuple(got), expected) if streamed else got == expected:
        return
    figures["wrong"] += 1
    print(f"request of seed {SEED}, {where}, {how}: {path} {json.dumps(body)}\n  found    {got}\n  expected {expected}", flush=True)


def with_draft(source, *options):
    packed = os.path.join(os.environ["TMPDIR"], "drafted-" + os.path.basename(options[-1]))
    if not os.path.exists(packed):
        subprocess.run([f"{BIN}/minimax-convert", source, "-o", packed, "--quant", "none", "-q", *options], check=True)
    return packed


def dummy_m3():
    """A folder of which `--load-format dummy` makes a MiniMax-M3 of tiny-m2's ids."""
    folder = os.path.join(os.environ["TMPDIR"], "dummy-m3")
    os.makedirs(folder, exist_ok=True)
    config = json.load(open("tests/data/tiny-m3-random/config.json", encoding="utf-8"))
    config["text_config"]["vocab_size"] = 2048
    json.dump(config, open(folder + "/config.json", "w", encoding="utf-8"))
    shutil.copy("tests/data/tiny-m2/tokenizer.json", folder)
    return folder


class Prompts:
    """A server that computes prompts for another one; killed and begun again, at the same port, while a block runs. off: there is none."""

    def __init__(self, packed, options, off):
        self.packed, self.options, self.off, self.kv_port = packed, options, off, 0
        self.begin()

    def begin(self):
        if not self.off:
            self.server = Patient(self.packed, *self.options, "--kv-listen", f"127.0.0.1:{self.kv_port}")
            self.kv_port = int(self.server.wait_for(r"computed for other servers at \S+:(\d+)"))

    def kill(self, after):
        time.sleep(after)
        if not self.off:
            self.server.process.kill()
            self.server.process.wait()
            self.begin()

    def __enter__(self):
        return self

    def __exit__(self, *why):
        if not self.off:
            self.server.__exit__(*why)


def model(source, chat, options, count):
    rng = random.Random(f"{SEED} {source} {options}")
    packed = dummy_m3() if "dummy" in options else with_draft(source, *options) if "--draft" in options else convert(source, *options)
    config = json.load(open(packed + "/config.json", encoding="utf-8"))
    vocab = config.get("text_config", config)["vocab_size"] - 100
    text = json.load(open(source + "/held-out-ids.json", encoding="utf-8"))
    at = rng.randrange(len(text) - 400)
    shared, other = text[at:at + 90], text[at + 200:at + 270]
    starts = [shared[:rng.randrange(20, 91)] for _ in range(3)] + [other] + [[rng.randrange(vocab) for _ in range(rng.randrange(1, 70))]]
    jobs = []
    for i in range(count):
        path, body = request(rng, starts, vocab)
        how = rng.choice(["at once", "at once", "at once", "stream", "stream", "stream", "slow", "late", "leave"])
        jobs.append((path, body, "at once" if "echo" in body and "logprobs" in body else how))  # a stream has no logprobs of its prompt
    length = rng.choice([160, 720])
    kv = str(rng.choice([160, 192, 256]) * length // 160 * (2 if "--attn-tp" in options else 1))  # each of two groups has a half
    drafts = rng.choice(["3", "7"]) if "--draft" in options or RANKS else rng.choice(["0", "3", "7", "auto"])
    host, disk = ["--kv-offload", rng.choice(["1M" if RANKS else "512K", "64M"])], ["--kv-offload-dir", os.environ["TMPDIR"], "--kv-offload-disk", "8M"]
    offload = rng.choice([[], host, host, host + disk])
    common = ["--batch-invariant", "-t", "1", "--chat-format", chat, "--device", os.environ.get("DEVICE", "cpu")]
    if "dummy" in options:
        common += [*options, "--index-cache-dtype", rng.choice(["auto", "fp8"])]
    if "--attn-tp" in options:
        common += rng.choice([[], ["--dp", "1"], ["--dp", "auto"]])
    if "DEVICES" in os.environ:  # one for each rank, as many as a checkpoint has
        given, ranks = os.environ["DEVICES"].split(","), int(options[options.index("--tp") + 1]) if "--tp" in options else 1
        common += ["--devices", ",".join(given[r % len(given)] for r in range(ranks))]
    small = ["--max-num-seqs", rng.choice(["2", "3", "5"]), "--max-num-batched-tokens", rng.choice(["8", "17", "64"]), "--kv-cache-tokens", kv, "--max-model-len", str(length),
             "--prefix-cache-memory", rng.choice(["512K", "1M", "64M"]), "--drafts", drafts, *offload, *common]
    plenty = ["--max-num-seqs", "1", "--drafts", "0", "--prefix-cache", "off", "--form-cache", "0", "--max-model-len", str(length), *common]
    there = ["--max-num-seqs", "4", "--kv-cache-tokens", str(4 * length), "--max-model-len", str(length), "--drafts", drafts, "--kv-offload", "64M", *common]
    with Prompts(packed, there, not offload or rng.random() < 0.3) as prompts, Patient(packed, *plenty) as calm, \
            Patient(packed, *small, *([] if prompts.off else ["--prefill-from", f"127.0.0.1:{prompts.kv_port}", "--prefill-min", rng.choice(["1", "20", "80"])])) as busy:
        descriptors = len(os.listdir(f"/proc/{busy.process.pid}/fd"))
        expected = [ask(calm, path, body) for path, body, _ in jobs]
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(one, [(busy, i, *job) for i, job in enumerate(jobs)]))
        if os.environ.get("SHOW"):
            print(collections.Counter(str((w[1].get("error") or {}).get("message"))[:90] for w in expected if w[0] != 200))
        where = f"{source} {small}"
        for job, got, want in zip(jobs, found, expected):
            figures[want[0]] += 1
            judge(job, got, want, where)
        more = [c for job, want in zip(jobs, expected) if (c := continued(rng, job, want))]
        more = [(path, prompt_of(calm, body) if path == "/v1/completions" else body, how) for path, body, how in more]
        wanted = [ask(calm, path, body) for path, body, _ in more]
        with ThreadPoolExecutor(7) as pool:
            killed = pool.submit(prompts.kill, rng.choice([0.01, 0.1, 0.3]))
            found = list(pool.map(one, [(busy, i, *job) for i, job in enumerate(more)]))
            killed.result()
        for job, got, want in zip(more, found, wanted):
            figures["continued"] += 1
            judge(job, got, want, where + ", continued")
        v = settled(busy, descriptors)
        figures["preempted"] += int(v["requests_preempted_total"])
        figures["accepted"] += int(v["accepted_tokens_total"])
        figures["fetched"] += int(v["offload_hits_total"])
        figures["elsewhere"] += int(v["prefill_fetched_total"])
        figures["lost"] += int(v["prefill_fallbacks_total"])
        last = [j for j in jobs if j[2] in ("at once", "stream", "slow")][:8]
        with ThreadPoolExecutor(8) as pool:
            ends = [pool.submit(last_one, (busy, i, *job)) for i, job in enumerate(last)]
            time.sleep(rng.choice([0, 0.01, 0.1, 0.3]))
            busy.process.send_signal(signal.SIGTERM)
            answers = [e.result() for e in ends]
        for job, got in zip(last, answers):
            want = expected[jobs.index(job)]
            if got is not None and got[0] == 503:
                continue
            figures["ending"] += got is not None
            judge(job, got, want, where + ", told to end")


def models():
    """(source, format, options of the conversion, or of a server with random weights); a draft comes last."""
    m2, m1, flash = ("tests/data/tiny-m2", "minimax-m2"), ("tests/data/tiny-m1", "minimax-m1"), ["--draft", "tests/data/tiny-m2-dflash"]
    if not RANKS:
        groups = ["--tp", "2", "--attn-tp", "1"] if "DEVICE" in os.environ else ["--tp", "4", "--attn-tp", "2"]
        return [(*m2, ["--tp", "2"]), (*m1, []), (*m2, groups), (*m1, ["--tp", "2", "--attn-tp", "1"]), (*m2, flash), ("tests/data/tiny-m2", "minimax-m3", ["--load-format", "dummy", "--dummy-quant", "bf16"])]
    chain = os.path.join(os.environ["TMPDIR"], "eagle")
    if not os.path.exists(chain):
        save(chain, EAGLE, eagle_weights([i // 2 for i in range(DRAFT_VOCAB)]))
    cut = ["--tp", RANKS]
    kinds = {"dflash": (*m2, cut + flash), "lookup": (*m2, cut), "eagle3": (*m2, [*cut, "--draft", chain]), "lookup-m1": (*m1, cut),
             "groups": (*m2, [*cut, "--attn-tp", str(int(RANKS) // 2)]), "groups-m1": (*m1, [*cut, "--attn-tp", str(int(RANKS) // 2)])}
    return [kinds[KIND]] if KIND else [kinds[k] for k in kinds if not k.startswith("groups")]


MODELS = models()
for source, chat, how in MODELS:
    model(source, chat, how, COUNT // len(MODELS))
print(f"{COUNT} requests, {figures[200]} answered, {figures['stream']} streamed, {figures['slow']} slowly, {figures['late']} with little time, {figures['leave']} clients went "
      f"away, {figures['continued']} went on with a reply, "
      f"{figures['preempted']} times a request was taken out, {figures['accepted']} proposed tokens were right, {figures['fetched']} came back from memory or disk, {figures['elsewhere']} prompts were computed elsewhere and {figures['lost']} not, {figures['ending']} answered while the server ended: {figures['wrong']} other than alone (seed {SEED})")
sys.exit(figures["wrong"] > 0)
