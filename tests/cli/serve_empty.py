#!/usr/bin/env python3
"""Replies without text: that end at once, whose first token is a control token or a part of a character, that a stop text takes away; in every API,
whole and streamed, with logprobs, choices, echo and tools; and replies of a model without a token to end them, which end where their form does. The
sanitizers' build runs this too (check/san/serve_empty)."""
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, convert  # noqa: E402

USER = [{"role": "user", "content": "In the beginning"}]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]}
EMPTY = {"chat": {"thinking": {"type": "disabled"}}, "messages": {"thinking": {"type": "disabled"}}, "responses": {"reasoning": {"effort": "none"}}}
APIS = {"completions": ("/v1/completions", {"prompt": "In the beginning"}), "chat": ("/v1/chat/completions", {"messages": USER}),
        "messages": ("/v1/messages", {"messages": USER}), "responses": ("/v1/responses", {"input": "In the beginning"})}


def texts(path, reply):
    if "choices" in reply:
        return [c["text"] if "text" in c else c["message"]["content"] or "" for c in reply["choices"]]
    if path == "/v1/messages":
        return [b["text"] for b in reply["content"] if b["type"] == "text"]
    return [p["text"] for x in reply["output"] if x["type"] == "message" for p in x["content"]]


def deltas(data):
    """The text of all events of a stream."""
    said = ""
    for line in data.decode().split("\n"):
        if not line.startswith("data: {"):
            continue
        e = json.loads(line[6:])
        assert not e.get("error"), e
        for c in e.get("choices", []):
            said += c.get("text") or (c.get("delta") or {}).get("content") or ""
        if e.get("type") in ("content_block_delta", "response.output_text.delta"):
            said += e["delta"] if isinstance(e["delta"], str) else e["delta"].get("text", "")
    return said


with Server(convert("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--max-model-len", "512") as s:
    end, word = s.post("/tokenize", {"prompt": "[e~[", "parse_special": True})["tokens"][0], s.post("/tokenize", {"prompt": " God"})["tokens"][-1]
    part = next(i for i in range(256) if s.post("/detokenize", {"tokens": [i]})["prompt"] == "\ufffd")  # a byte that is no character alone
    count = 0
    for name, (path, body) in APIS.items():
        limit = "max_output_tokens" if name == "responses" else "max_tokens"
        stop = "stop_sequences" if name == "messages" else "stop"
        for forced in ({"logit_bias": {str(end): 100}, limit: 3}, {"logit_bias": {str(end): 100}, limit: 1, "ignore_eos": True},
                       {"logit_bias": {str(part): 100}, limit: 1}, {"logit_bias": {str(word): 100}, limit: 4, stop: [" God"]}):
            more = [{}]
            if name in ("completions", "chat"):
                more += [{"n": 2}, {"logprobs": 1} if name == "completions" else {"logprobs": True, "top_logprobs": 1}]
            more += {"completions": [{"echo": True}, {"echo": True, "logprobs": 1}], "chat": [{**TOOLS, "parallel_tool_calls": False}, {"reasoning_split": False}]}.get(name, [])
            for extra in more:
                request = {**body, **EMPTY.get(name, {}), "temperature": 0, **forced, **extra}
                whole = s.post(path, request)
                echoed = "In the beginning" if extra.get("echo") else ""
                got = texts(path, whole)
                assert all(t.removeprefix(echoed).strip("\ufffd\n") in ("", "<think>\n\n</think>") for t in got), (request, got)
                if {"echo", "logprobs"} <= set(extra):
                    continue  # a stream has no logprobs of its prompt
                status, _, data = s.request("POST", path, {**request, "stream": True})
                assert status == 200 and deltas(data) == "".join(got), (request, got, data)
                count += 2
os.makedirs(f"{TMP}/endless")
shutil.copy("tests/data/tiny-m2/config.json", f"{TMP}/endless")  # without a tokenizer: ids below 256 are bytes
with Server(f"{TMP}/endless", "--load-format", "dummy", "--max-model-len", "128", "--drafts", "3") as s:
    for form in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "[a-c]{3}d"}, {"grammar": 'root ::= "Ur" "Uz"'}, {"guided_json": {"const": "x"}}):
        for more in ({}, {"n": 2}, {"stop": ["q", "U"]}, {"logprobs": 1}):
            whole = s.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 40, **form, **more})
            for c in whole["choices"]:
                assert c["finish_reason"] == "stop" and len(c["text"].strip()) in (2, 3, 4) or "stop" in more and c["text"] == "" and c["stop_reason"] == "U", (form, more, c)
            events = s.events("/v1/completions", {"prompt": [5, 6], "max_tokens": 40, "seed": 1, **form, **more})
            assert {c["finish_reason"] for e in events for c in e["choices"]} - {None} == {"stop"}, (form, more, events)
print(f"{count} replies without text, as whole and streamed")
