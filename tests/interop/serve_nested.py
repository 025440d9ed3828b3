#!/usr/bin/env python3
"""No field within a request is ignored without a word. Each optional field of each object that the packages of OpenAI and Anthropic have types
for, at any depth, is put into a request that lacks it. Either the reply changes, or the request is refused, or docs/request-fields.md or
docs/serving.md name the field. Objects whose types are not served are refused with all that they hold."""
import collections
import collections.abc
import copy
import json
import os
import re
import sys
import types
import typing

import typing_extensions
from anthropic.types import message_create_params as anthropic_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

DEPTH = 7
USER = {"role": "user", "content": "In the beginning"}
IDS = {"tool_call_id": "c1", "call_id": "c1", "tool_use_id": "c1"}
REQUIRED = (typing.Required, typing_extensions.Required)
WRAPPERS = (*REQUIRED, typing.NotRequired, typing_extensions.NotRequired, typing.Annotated)
SCHEMA = {"type": "object", "properties": {"Ur": {"type": "string"}}}


# ---- Types ----

def bare(t):
    while typing.get_origin(t) in WRAPPERS:
        t = typing.get_args(t)[0]
    return t


def members(t):
    """The types of a union, or the one type."""
    t = bare(t)
    t = bare(t.__value__) if isinstance(t, typing_extensions.TypeAliasType) else t
    if typing.get_origin(t) in (typing.Union, types.UnionType):
        return [m for a in typing.get_args(t) for m in members(a)]
    return [t]


def item_of(t):
    origin = typing.get_origin(t)
    lists = (list, collections.abc.Iterable, collections.abc.Sequence)
    return typing.get_args(t)[0] if origin in lists or "SequenceNotStr" in str(origin) else None


def is_object(t):
    return isinstance(t, type) and hasattr(t, "__required_keys__")


FIELDS = {}


def fields_of(t):
    """{key: (type, whether it is required)}"""
    if t not in FIELDS:
        hints = typing.get_type_hints(t, include_extras=True)
        FIELDS[t] = {k: (bare(v), typing.get_origin(v) in REQUIRED) for k, v in hints.items()}
    return FIELDS[t]


def value_of(t, key, depth=0):
    """Some value of the type."""
    if key in ("schema", "parameters", "input_schema"):
        return SCHEMA
    if key in ("arguments", "input") and dict not in members(t):
        return '{"Ur": "1"}' if key == "arguments" else {"Ur": "1"}
    for m in members(t):
        origin, item = typing.get_origin(m), item_of(m)
        if origin is typing.Literal:
            return typing.get_args(m)[0]
        plain = {str: IDS.get(key, "odd value"), bool: True, int: 5, float: 0.5}
        if m in plain:
            return plain[m]
        if is_object(m):
            return smallest(m, depth + 1)
        if item is not None:
            return [value_of(item, key, depth + 1)] if depth < DEPTH else []
        if m is not type(None):
            return {"k": "v"}
    return "odd value"


def smallest(t, depth=0):
    return {k: value_of(v, k, depth) for k, (v, required) in fields_of(t).items() if required}


def kind_of(t):
    return "/".join(str(typing.get_args(v)[0]) for k, (v, _) in fields_of(t).items()
                    if k in ("role", "type") and typing.get_origin(v) is typing.Literal) or t.__name__


def walk(t, path, within, seen, depth=0):
    """(place, key, body without the key, body with it) of the object's fields and of those within it."""
    base = smallest(t)
    for key, (v, required) in fields_of(t).items():
        if not required:
            yield f"{path}.{key}", key, within(base), within({**base, key: value_of(v, key)})
        for m in members(v) if depth < DEPTH else ():
            item = item_of(m)
            for inner in members(item) if item is not None else [m]:
                if is_object(inner) and (inner, t, key) not in seen:
                    seen.add((inner, t, key))
                    several = item is not None
                    yield from walk(inner, f"{path}.{key}<{kind_of(inner)}>",
                                    lambda o, key=key, several=several: within({**base, key: [o] if several else o}), seen, depth + 1)


# ---- Requests ----

def get(value, key):
    return value.get(key) if isinstance(value, dict) else None


def chat(body):
    """The conversation that a single message can stand in."""
    def call(i):
        return {"id": i, "type": "function", "function": {"name": "odd value", "arguments": "{}"}}

    said = []
    for m in body.get("messages", [USER]):
        role, calls = get(m, "role"), get(m, "tool_calls")
        results = [{"role": "tool", "tool_call_id": get(c, "id"), "content": "r"} for c in calls] if isinstance(calls, list) else []
        said += [USER, m, *results, USER] if role == "assistant" else [m, USER] if role in ("system", "developer") else [m]
        if role == "tool":
            said[-1:] = [USER, {"role": "assistant", "content": None, "tool_calls": [call(get(m, "tool_call_id"))]}, m]
    more = {"stream": True} if "stream_options" in body else {}
    tools = {"tools": [{"type": "function", "function": {"name": "odd value"}}]} if "tool_choice" in body else {}
    return {**tools, **body, **more, "messages": said, "max_tokens": 4, "temperature": 0}


def responses(body):
    call, output = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c1", "output": "r"}
    said = body.get("input", "In the beginning")
    for m in said if isinstance(said, list) else ():
        around = {"function_call": ([USER], [{**output, "call_id": get(m, "call_id")}]),
                  "function_call_output": ([USER, {**call, "call_id": get(m, "call_id")}], []), "reasoning": ([USER], [call, output])}
        before, behind = around.get(get(m, "type"), ([], [USER]))
        said = [*before, m, *behind]
    tools = {"tools": [{"type": "function", "name": "odd value"}]} if "tool_choice" in body else {}
    return {**tools, **body, "input": said, "max_output_tokens": 4, "temperature": 0}


def messages(body):
    said = []
    for m in body.get("messages", [USER]):
        content = get(m, "content")
        blocks = content if isinstance(content, list) else []
        kinds = [get(b, "type") for b in blocks]
        if "thinking" in kinds or "redacted_thinking" in kinds:
            blocks, kinds = [*blocks, {"type": "tool_use", "id": "c1", "name": "f", "input": {}}], [*kinds, "tool_use"]
        if "tool_use" in kinds:
            uses = [b for b in blocks if get(b, "type") == "tool_use"]
            said += [USER, {**m, "role": "assistant", "content": blocks},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": b["id"], "content": "r"} for b in uses]}]
        elif "tool_result" in kinds:
            said += [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {}}]}, {**m, "role": "user"}]
        else:
            said += [USER, m, USER] if get(m, "role") == "assistant" else [m]
    tools = {"tools": [{"name": "odd value", "input_schema": SCHEMA}]} if "tool_choice" in body else {}
    return {**tools, **body, "messages": said, "max_tokens": 4, "temperature": 0}


APIS = {"/v1/chat/completions": (chat, chat_params.CompletionCreateParamsNonStreaming),
        "/v1/responses": (responses, responses_params.ResponseCreateParamsNonStreaming),
        "/v1/messages": (messages, anthropic_params.MessageCreateParamsNonStreaming)}


# ---- Replies ----

def essence(value, echoed=("metadata", "instructions", "tools", "tool_choice", "text", "reasoning")):
    """Without what differs from one request to the next, and what the reply repeats of the request."""
    names = ("id", "item_id", "call_id", "created", "created_at", "signature", "prompt_tokens_details", "input_tokens_details",
             "cache_read_input_tokens", "cache_creation_input_tokens", *echoed)
    if isinstance(value, list):
        return [essence(v, ()) for v in value]
    if not isinstance(value, dict):
        return value
    prompt = {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]} if "cache_read_input_tokens" in value else {}
    return {**{k: essence(v, ()) for k, v in value.items() if k not in names}, **prompt}


SAID = {}


def ask(connection, path, body):
    text = json.dumps({k: v for k, v in body.items() if k != "model"}, default=str)
    if (path, text) not in SAID:
        connection.request("POST", path, text)
        r = connection.getresponse()
        data = r.read().decode()
        events = [x[6:] for x in data.splitlines() if x.startswith("data: {")] if r.headers["content-type"].startswith("text/event-stream") else [data]
        SAID[path, text] = r.status, [essence(json.loads(x)) for x in events]
    return SAID[path, text]


def said_in_docs():
    """What the docs say: {field: whether it is said to have no effect}, and the names of fields of messages that have none."""
    with open("docs/request-fields.md", encoding="utf-8") as f:
        fields = {k: "no effect" in v for k, v in re.findall(r"^\| `([\w.]+)` \|(.*)", f.read(), re.M)}
    with open("docs/serving.md", encoding="utf-8") as f:
        section = re.search(r"\nFields within a message for which.*?\n\n", f.read(), re.S).group(0)
    return fields, set(re.findall(r"`(\w+)`", section))


def main():
    fields, names = said_in_docs()
    counts, wrong = collections.Counter(), []
    with Server(convert("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--max-model-len", "1024", "--drafts", "0") as s:
        connection = s.connect()
        for path, (whole, params) in APIS.items():
            for place, key, without, with_it in walk(params, "", lambda o: o, set()):
                outer = re.sub(r"<[^>]*>", "", place).lstrip(".")
                if "." not in outer:  # tests/cli/serve_fields.py has those
                    continue
                plain, got = (ask(connection, path, whole(copy.deepcopy(b))) for b in (without, with_it))
                words = json.dumps(got[1])
                if plain[0] != 200:
                    assert plain[0] == 400, (place, plain)
                    counts["within what is refused"] += 1
                elif got[0] != 200:
                    counts["refused"] += 1
                    assert got[0] == 400 and (key in words or outer.split(".")[0] in words), (path, place, got)
                elif got != plain:
                    counts["served"] += 1
                elif outer in fields or any(fields.get(outer.rsplit(".", i)[0]) for i in range(1, outer.count(".") + 1)) or names & set(outer.split(".")):
                    counts["that the docs name"] += 1
                elif value_is_default(place):
                    counts["the value that it has without it"] += 1
                else:
                    wrong.append((path, place))
    assert not wrong, "ignored without a word:\n" + "\n".join(" ".join(x) for x in wrong)
    assert counts["served"] >= 15 and counts["that the docs name"] >= 40 and counts["within what is refused"] >= 500, counts
    print("; ".join(f"{n} fields {what}" for what, n in sorted(counts.items())))


def value_is_default(place):
    """Types and ids that say what the objects are anyway, reasoning that a summary stands for, and an id that only one call can have."""
    return place in (".input<user/message>.type", ".tools<ToolParam>.type", ".input<function_call_output>.call_id", ".input<reasoning>.content")


main()
