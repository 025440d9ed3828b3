#!/usr/bin/env python3
"""Calls of tools that minimax-serve begins, ends, cuts off or gives up: what a reply then says. The small checkpoints know no chat: what
they say is scripted by logit_bias and guided_choice. The tags of M2 are no special tokens, as in the released tokenizer."""
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, convert  # noqa: E402

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASK = [{"role": "user", "content": "In the beginning"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def tagged(model):
    """The checkpoint with tags that are no special tokens."""
    path = os.path.join(TMP, "source", os.path.basename(model))
    shutil.copytree(model, path)
    with open(path + "/tokenizer.json", encoding="utf-8") as f:
        tokenizer = json.load(f)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"] and "tool_call" not in token["content"]
    with open(path + "/tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    return convert(path)


def id_of(s, text):
    one, = s.post("/tokenize", {"prompt": text, "parse_special": True})["tokens"]
    return one


def reply(s, **how):
    """The one choice of a whole reply, whose stream says the same."""
    body = {"messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 60, **how}
    choice, = s.post(CHAT, body)["choices"]
    text, finish = {}, None
    for event in s.events(CHAT, body):
        for c in event["choices"]:
            finish = c["finish_reason"] or finish
            for key in ("content", "reasoning_content"):
                text[key] = text.get(key, "") + (c["delta"].get(key) or "")
    message = choice["message"]
    assert finish == choice["finish_reason"] and all(v == (message.get(k) or "") for k, v in text.items()), (choice, text, finish)
    return choice


def calls(choice):
    return [(x["function"]["name"], x["function"]["arguments"]) for x in choice["message"].get("tool_calls") or []]


def begun_in_reasoning(s):
    """The model would only ever begin a call: one that is required, or that may stand for a form, is begun within the reasoning."""
    call = {"logit_bias": {str(id_of(s, BEGIN)): 100}}
    required = reply(s, tool_choice="required", **call)
    assert [x[0] for x in calls(required)] == ["get_weather"] and not required["message"].get("reasoning_content"), required
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    either = reply(s, response_format=form, **call)
    assert (either["message"]["content"] or "").startswith(BEGIN) and not either["message"].get("reasoning_content"), either
    # A content of given texts is no call: none begins before it.
    given = reply(s, guided_choice=["In"], logit_bias={**call["logit_bias"], str(id_of(s, "</think>")): 50})
    assert given["message"]["content"] == "In" and not calls(given), given


with Server(tagged("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--max-model-len", "1024") as server:
    begun_in_reasoning(server)
print("calls begun in the reasoning")
