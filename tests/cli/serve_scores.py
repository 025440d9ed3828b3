#!/usr/bin/env python3
"""Logprobs of prompts: /v1/completions with echo, as lm-evaluation-harness asks for loglikelihoods, compared with minimax-eval and with the
logprobs of the same tokens as a reply; in chunks of any size, next to other requests, and behind a cached prefix. Every token that usage counts
has its entry, whatever of it is shown."""
import concurrent.futures
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def evaluated(packed, ids):
    """The mean negative log-likelihood of ids[1:] by minimax-eval."""
    path = os.path.join(TMP, "ids.json")
    with open(path, "w") as f:
        json.dump(ids, f)
    done = subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", path, "--window", str(len(ids) - 1), "--json"], check=True, capture_output=True)
    return json.loads(done.stdout)


def loglikelihood(s, context, continuation):
    """As lm_eval.models.openai_completions.LocalCompletionsAPI: the sum over the continuation, and whether it is the greedy one."""
    body = {"prompt": context + continuation, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    got = s.post(COMPLETIONS, body)["choices"][0]["logprobs"]
    begin = len(context)
    tokens, values, top = got["tokens"][begin:-1], got["token_logprobs"][begin:-1], got["top_logprobs"][begin:-1]
    return sum(values), all(t == max(x, key=x.get) for t, x in zip(tokens, top, strict=True))


def scores(s, packed, ids):
    body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 2}
    whole = s.post(COMPLETIONS, body)
    got = whole["choices"][0]["logprobs"]
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == len(ids)
    assert len(got["tokens"]) == len(got["token_logprobs"]) == len(got["top_logprobs"]) == len(got["text_offset"]) == len(ids)
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    text = whole["choices"][0]["text"]
    assert text == "".join(got["tokens"]) and got["text_offset"] == [sum(map(len, got["tokens"][:i])) for i in range(len(ids))]
    mean = -sum(got["token_logprobs"][1:]) / (len(ids) - 1)
    result = evaluated(packed, ids)
    wanted = result.get("nll", result.get("mean_nll"))
    assert wanted is not None, result
    assert abs(mean - wanted) < 2e-6 * wanted, (mean, wanted)
    again = s.post(COMPLETIONS, body)["choices"][0]["logprobs"]  # the prompt is in the prefix cache now
    assert max(abs(a - b) for a, b in zip(got["token_logprobs"][1:], again["token_logprobs"][1:], strict=True)) < 1e-4
    return got["token_logprobs"]


def prompt_logprobs(s, ids):
    """vLLM's form: of each token of the prompt but the first, it and the likeliest, with ranks where they are known; as echo has them."""
    echo = s.post(COMPLETIONS, {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 3})["choices"][0]["logprobs"]
    for k in (0, 1, 3):
        got = s.post(COMPLETIONS, {"prompt": ids, "max_tokens": 2, "prompt_logprobs": k})["choices"][0]
        assert got["logprobs"] is None and got["prompt_logprobs"][0] is None and len(got["prompt_logprobs"]) == len(ids), got
        for i, entry in list(enumerate(got["prompt_logprobs"]))[1:]:
            own = entry[str(ids[i])]
            assert abs(own["logprob"] - echo["token_logprobs"][i]) < 1e-4 and own["decoded_token"] == echo["tokens"][i], (i, own)
            assert k <= len(entry) <= k + 1 and next(iter(entry)) == str(ids[i])
            ranked = sorted((e["rank"], e["logprob"]) for e in entry.values() if e["rank"])
            assert [r for r, _ in ranked][:k] == list(range(1, k + 1)) and [x for _, x in ranked] == sorted((x for _, x in ranked), reverse=True)
            top = sorted(echo["top_logprobs"][i].values(), reverse=True)[:k]
            assert all(abs(x - y) < 1e-4 for (_, x), y in zip(ranked, top, strict=False)), (i, entry, top)
    both = s.post(COMPLETIONS, {"prompt": ids[:9], "max_tokens": 2, "prompt_logprobs": 3, "logprobs": 1, "echo": True})["choices"][0]
    assert len(both["logprobs"]["tokens"]) == 11 and len(both["prompt_logprobs"]) == 9 and len(both["logprobs"]["top_logprobs"][1]) <= 2
    assert "prompt_logprobs" in s.post(COMPLETIONS, {"prompt": ids[:9], "prompt_logprobs": 1, "stream": True}, 400)["error"]["message"]


def replies(s, ids):
    """A greedy reply's logprobs are those of the same tokens in a prompt."""
    asked = {"prompt": ids, "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True}
    whole = s.post(COMPLETIONS, asked)["choices"][0]
    got = whole["logprobs"]
    assert len(got["tokens"]) == len(ids) + 12 and whole["text"] == "".join(got["tokens"])
    assert got["text_offset"] == [sum(map(len, got["tokens"][:i])) for i in range(len(got["tokens"]))]
    reply = s.post("/tokenize", {"prompt": "".join(got["tokens"][len(ids):])})["tokens"]
    total, greedy = loglikelihood(s, ids, reply)
    if len(reply) == 12:
        assert greedy and abs(total - sum(got["token_logprobs"][len(ids):])) < 1e-3, (total, got)
    wrong, greedy = loglikelihood(s, ids, list(reversed(ids[:5])))
    assert not greedy and wrong < total


def several(s, packed, ids):
    """Several choices have the prompt's logprobs of one alone, and the prompt is read once for all of them."""
    top = json.load(open(packed + "/config.json", encoding="utf-8"))["num_experts_per_tok"]

    def rows():
        time.sleep(0.2)  # the server counts once a second while it runs, and when nothing does
        return max(sum(layer) for layer in json.loads(s.get("/expert_load"))["load"]) / top

    body = {"prompt": [ids, ids[1:]], "max_tokens": 3, "seed": 5, "temperature": 1, "ignore_eos": True, "echo": True, "logprobs": 2, "prompt_logprobs": 1}
    before = rows()
    got = s.post(COMPLETIONS, {**body, "n": 4})["choices"]
    assert rows() - before <= 2 * len(ids) + 8 * 4, rows() - before
    for i, c in enumerate(got):
        alone = s.post(COMPLETIONS, {**body, "prompt": body["prompt"][i // 4]})["choices"][0]
        count = len(body["prompt"][i // 4])
        assert c["prompt_logprobs"] == alone["prompt_logprobs"] and len(c["logprobs"]["tokens"]) == count + 3, (i, c)
        assert all(c["logprobs"][k][:count] == alone["logprobs"][k][:count] for k in alone["logprobs"]), (i, c, alone)
        assert c["text"] == "".join(c["logprobs"]["tokens"]) and c["logprobs"]["text_offset"] == [sum(map(len, c["logprobs"]["tokens"][:k])) for k in range(count + 3)], c
        assert i % 4 or c["logprobs"] == alone["logprobs"], (i, c, alone)


def once(pairs):
    """An object of JSON, of which no key comes twice."""
    assert len({k for k, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def alike(s):
    """Tokens that are no UTF-8 by themselves are all written as U+FFFD: such a key stands once, and of the token itself with its own value."""
    broken = 0
    for prompt in ("a", "b", "\u65e5"):
        body = {"prompt": prompt, "max_tokens": 40, "logprobs": 20, "seed": 1, "logit_bias": {str(i): 4 for i in range(100, 300)}}
        got = json.loads(s.request("POST", COMPLETIONS, body)[2], object_pairs_hook=once)["choices"][0]["logprobs"]
        for token, value, top in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True):
            assert top[token] == value and 10 < len(top) <= 21, (token, value, top)
            broken += token == "\ufffd" and len(top) < 21
    assert broken, "no token of the reply was written as another one"


def entries(path, choices):
    """Entries of a reply's tokens, in order: those of each choice of a whole reply, or of all chunks of a stream."""
    found = {}
    for c in choices:
        logged = c.get("logprobs")
        lists = [] if not logged else logged["content"] if path == CHAT else zip(logged["tokens"], logged["token_logprobs"], logged["top_logprobs"], logged["text_offset"])
        found.setdefault(c["index"], []).extend(lists)
    return found


def every_token(s):
    """Tokens that a stop string cuts, that end the reply, are hidden or of the reasoning have entries too: as many as usage counts, whole and streamed."""
    rng, cut = random.Random(11), 0
    for i in range(60):
        path = rng.choice([COMPLETIONS, CHAT])
        body = {"max_tokens": rng.choice([1, 7, 25]), "seed": i, "temperature": 1, "logit_bias": {"2047": rng.choice([0, 20]), "2041": rng.choice([0, 5])},
                "stop": rng.choice([["e"], [" t", "on"], ["he", "n t", "th"], ["zz"]]), "include_stop_str_in_output": rng.random() < 0.3, "n": rng.choice([1, 1, 3])}
        if path == CHAT:
            body.update(messages=[{"role": "user", "content": "And God"}], logprobs=True, top_logprobs=1, chat_template_kwargs={"enable_thinking": rng.random() < 0.4},
                        include_reasoning=rng.random() < 0.7)
        else:
            body.update(prompt="And God said", logprobs=1)
        whole, events = s.post(path, body), s.events(path, body)
        found = entries(path, whole["choices"])
        assert sum(map(len, found.values())) == whole["usage"]["completion_tokens"], (body, whole)
        assert entries(path, [c for e in events for c in e["choices"]]) == found, (body, whole, events)
        for c in whole["choices"] if path == COMPLETIONS else []:
            tokens = c["logprobs"]["tokens"]
            cut += c["finish_reason"] == "stop" and c["stop_reason"] is not None
            if not any("\ufffd" in t or t[0] in "<[]" for t in tokens):  # no part of a character, no hidden token
                assert "".join(tokens).startswith(c["text"]) and len(c["text"]) > c["logprobs"]["text_offset"][-1] - 1, (body, c)
    assert cut > 5, cut
    echo = {"prompt": "And God said", "logprobs": 0, "stop": "e", "max_tokens": 25, "seed": 1, "temperature": 1}
    plain, echoed = (s.post(COMPLETIONS, {**echo, "echo": e})["choices"][0]["logprobs"] for e in (False, True))
    assert echoed["token_logprobs"][-len(plain["tokens"]):] == plain["token_logprobs"]


def never_sampled():
    """An id without a text, which no step samples, has the number of the least likely ones: every logprob but the first is a number."""
    folder = os.path.join(TMP, "wide")
    shutil.copytree("tests/data/tiny-m2", folder, ignore=lambda _, names: [n for n in names if n.endswith(".safetensors")])
    with open(folder + "/config.json", encoding="utf-8") as f:
        config = json.load(f)
    with open(folder + "/config.json", "w", encoding="utf-8") as f:
        json.dump({**config, "vocab_size": 2304}, f)
    with Server(folder, "--load-format", "dummy") as s:
        c = s.post(COMPLETIONS, {"prompt": [5, 2303, 7], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 1})["choices"][0]
        assert c["logprobs"]["token_logprobs"][1] == -9999 == c["logprobs"]["top_logprobs"][1][""] == c["prompt_logprobs"][1]["2303"]["logprob"], c
        assert all(isinstance(x, (int, float)) for x in c["logprobs"]["token_logprobs"][1:]), c


PACKED = convert("tests/data/tiny-m2")
never_sampled()
with Server(PACKED, "--chat-format", "minimax-m2") as server:
    every_token(server)
with Server("tests/data/tiny-m2", "--load-format", "dummy") as server:
    alike(server)
with open("tests/data/tiny-m2/held-out-ids.json") as f:
    IDS = json.load(f)[40:]
for options in (["--max-num-seqs", "3"], ["--max-num-seqs", "1", "--max-num-batched-tokens", "64"]):
    with Server(PACKED, *options) as server:
        alone = scores(server, PACKED, IDS[:90])
        replies(server, IDS[:33])
        prompt_logprobs(server, IDS[:40])
        several(server, PACKED, IDS[100:300])
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for values in pool.map(lambda i: scores(server, PACKED, IDS[:90]) if i % 2 else server.post(COMPLETIONS, {"prompt": "And", "max_tokens": 20}), [0, 2, 1, 4]):
                assert isinstance(values, dict) or max(abs(a - b) for a, b in zip(values[1:], alone[1:], strict=True)) < 1e-4
        one = server.post(COMPLETIONS, {"prompt": [[7], IDS[:9]], "max_tokens": 0, "echo": True, "logprobs": 0})["choices"]
        assert one[0]["logprobs"]["token_logprobs"] == [None] and len(one[1]["logprobs"]["token_logprobs"]) == 9
        # A prompt that ends within a character: offsets of the reply are those of the text.
        cut = server.post("/tokenize", {"prompt": "\U0001f600"})["tokens"][0]
        assert server.post("/detokenize", {"tokens": [cut]})["prompt"] == "\ufffd"
        one.append(server.post(COMPLETIONS, {"prompt": [7, cut], "max_tokens": 3, "echo": True, "logprobs": 0, "logit_bias": {IDS[0]: 100}})["choices"][0])
        offset = one[2]["logprobs"]["text_offset"]
        assert one[2]["text"][offset[2]:offset[3]] == one[2]["logprobs"]["tokens"][2], one[2]
        # The token that is made where none is wanted does not end the reply.
        none = {"prompt": [7], "max_tokens": 0, "echo": True, "logprobs": 0, "stop_token_ids": [IDS[0]], "logit_bias": {IDS[0]: 100}}
        ended = server.post(COMPLETIONS, none)["choices"][0]
        assert (ended["finish_reason"], ended["stop_reason"]) == ("length", None), ended
        assert all(x < 0 and math.isfinite(x) for x in one[1]["logprobs"]["token_logprobs"][1:])
        assert server.request("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 0})[0] == 400
        assert server.request("POST", COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True})[0] == 400
print("logprobs of prompts are those of minimax-eval")
