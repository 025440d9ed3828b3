#!/usr/bin/env python3
"""The structural criteria of the vendor's deployment test, on scripted replies: every query succeeds, every call that is in a reply comes out as
a call, its arguments fit the tool's schema with keys in the order in which they were written, none is doubled or lost, no reply is reasoning
alone, and a stream says what the whole reply says."""
import json
import os
import random
import sys

import openai

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

ROUNDS = int(os.environ.get("VENDOR_ROUNDS", "8"))
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict, "null": type(None)}
TEXTS = ["Ur", "", "a \"b\" \\ c", "two\nlines", "<b>é</b> 北京", "12", "true", "null", "{\"x\": 1}", " spaced "]
VALUES = {"string": TEXTS, "integer": [0, -7, 10**15], "number": [1.5, -2e3, 4], "boolean": [True, False], "array": [[], [1, "x"], [{"a": [None]}]],
          "object": [{}, {"z": 1, "a": {"k": "v"}}]}


def tools(rng):
    """Functions with parameters in an order that is no alphabet's."""
    made = []
    for i in range(rng.randint(1, 3)):
        names = rng.sample(["zeta", "alpha", "mid", "Unit", "x_1", "city"], rng.randint(1, 5))
        properties = {n: {"type": rng.choice(list(VALUES)), "description": "d"} for n in names}
        made.append({"type": "function", "function": {"name": f"tool_{i}", "description": "does", "parameters": {
            "type": "object", "properties": properties, "required": names, "additionalProperties": False}}})
    return made


def reply(rng, made):
    """(text of a reply of M2 that calls tools, what it calls)."""
    text, calls = "\n\nLet me see.\n<minimax:tool_call>\n", []
    for tool in rng.choices(made, k=rng.randint(1, 2)):
        f = tool["function"]
        properties = list(f["parameters"]["properties"].items())
        rng.shuffle(properties)
        arguments = {name: rng.choice(VALUES[p["type"]]) for name, p in properties}
        calls.append((f["name"], arguments))
        text += f"<invoke name=\"{f['name']}\">\n"
        for name, value in arguments.items():
            text += f"<parameter name=\"{name}\">{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</parameter>\n"
        text += "</invoke>\n"
    return text + "</minimax:tool_call>", calls


def fits(arguments, parameters):
    return set(parameters["required"]) <= set(arguments) <= set(parameters["properties"]) and all(
        isinstance(v, TYPES[parameters["properties"][k]["type"]]) and not (isinstance(v, bool) and parameters["properties"][k]["type"] != "boolean")
        for k, v in arguments.items())


def gathered(stream):
    """The message of a stream: content, and [name, arguments] of its calls."""
    content, calls, finish = "", {}, None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for c in choice.delta.tool_calls or []:
                call = calls.setdefault(c.index, ["", ""])
                assert not (c.function.name and call[0]), "a name came twice"
                call[0] += c.function.name or ""
                call[1] += c.function.arguments or ""
    return content, [tuple(calls[i]) for i in sorted(calls)], finish


rng, counts = random.Random(11), {"queries": 0, "calls": 0, "valid": 0, "schema": 0}
with Server(convert("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--served-model-name", "m") as server:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="-", max_retries=0)
    think = server.post("/tokenize", {"prompt": "</think>", "parse_special": True})["tokens"][0]
    for _ in range(ROUNDS):
        made = tools(rng)
        text, calls = reply(rng, made)
        how = dict(model="m", messages=[{"role": "user", "content": "go"}], tools=made, temperature=0, max_tokens=1500,
                   extra_body={"guided_choice": [text], "logit_bias": {str(think): 100}})
        whole = client.chat.completions.create(**how).choices[0]
        streamed = gathered(client.chat.completions.create(stream=True, **how))
        counts["queries"] += 1
        counts["calls"] += len(calls)
        got = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
        assert streamed == (whole.message.content, got, whole.finish_reason) and whole.finish_reason == "tool_calls", (text, streamed, whole)
        assert whole.message.content, "a reply of reasoning alone"
        parameters = {t["function"]["name"]: t["function"]["parameters"] for t in made}
        for (name, arguments), (want_name, want) in zip(got, calls, strict=True):
            value = json.loads(arguments)
            counts["valid"] += name == want_name and value == want and list(value) == list(want)
            counts["schema"] += fits(value, parameters[name])
            assert name == want_name and json.dumps(value) == json.dumps(want), (arguments, want)
assert counts["valid"] == counts["schema"] == counts["calls"], counts
print(f"{counts['queries']} queries of {counts['queries']}, {counts['valid']} valid calls of {counts['calls']}, {counts['schema']} of their schema, keys in order")
