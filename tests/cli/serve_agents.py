#!/usr/bin/env python3
"""What agents and browsers send to minimax-serve beside plain requests: several system messages, results of tools in any order, long lists of
tools, histories that are too long, fields of other servers; pages from elsewhere; failures within streams. And that /metrics adds up."""
import json
import math
import os
import re
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import Server, convert  # noqa: E402

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ONE = {"temperature": 0, "max_tokens": 6}
LOGGED = {**ONE, "logprobs": True, "top_logprobs": 3}


def user(text):
    return {"role": "user", "content": text}


def said(s, messages, **more):
    """What decides between two prompts: their lengths, and the logprobs after them."""
    r = s.post(CHAT, {**LOGGED, "messages": messages, **more})
    return r["usage"]["prompt_tokens"], r["choices"][0]["logprobs"], r["choices"][0]["message"].get("reasoning_content"), r["choices"][0]["message"]["content"]


def systems(s):
    """Those at the beginning are one, as an agent's instructions and its developer's are; a later one keeps its place."""
    a, b = {"role": "system", "content": "Alpha."}, {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "ta."}]}
    empty = {"role": "system", "content": ""}
    one = said(s, [{"role": "system", "content": "Alpha.\n\nBeta."}, user("x")])
    assert said(s, [a, b, user("x")]) == said(s, [a, empty, b, user("x")]) == said(s, [empty, a, b, user("x")]) == one
    assert said(s, [a, user("x")]) != one
    assert said(s, [user("x"), {"role": "assistant", "content": "y"}, b]) == said(s, [user("x"), {"role": "assistant", "content": "y"}, user("Beta.")])
    thinks = {"role": "assistant", "content": "", "reasoning_content": "hm " * 40, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    chain = [user("x"), thinks, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    prompt = (lambda messages: s.post(CHAT, {**ONE, "messages": messages})["usage"]["prompt_tokens"])
    note, turn = prompt(chain + [b]) - prompt(chain), prompt(chain + [user("Beta.")]) - prompt(chain)
    assert note > 0 and (turn < 0 or note == turn), (note, turn)  # M2: the reasoning of a chain stays, until the user speaks
    text = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Beta."}]}, {"role": "user", "content": "x"}]
    whole = {"instructions": "Alpha.\n\nBeta.", "input": "x", "max_output_tokens": 6, "temperature": 0}
    got, want = (s.post(RESPONSES, {**whole, **x}) for x in ({"instructions": "Alpha.", "input": text}, {}))
    assert got["usage"]["input_tokens"] == want["usage"]["input_tokens"] and [x.get("content") for x in got["output"]] == [x.get("content") for x in want["output"]]


def results(s):
    """Results come in any order; a model that sees no ids is shown the calls' own."""
    call = (lambda i: {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {i}}}'}})
    result = (lambda i: {"role": "tool", "tool_call_id": f"c{i}", "content": f"result {i}"})
    history = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call(i) for i in range(3)]}]
    want = said(s, history + [result(i) for i in (0, 1, 2)] + [user("y")])
    assert said(s, history + [result(i) for i in (2, 0, 1)] + [user("y")]) == want
    unnamed = [{"role": "tool", "content": x["content"]} for x in (result(2), result(0), result(1))]  # nobody knows which they answer: as they came
    assert said(s, history + unnamed + [user("y")]) != want
    assert said(s, history + [result(1), result(0), user("y")]) == said(s, history + [result(0), result(1), user("y")])
    again = [{**history[1], "tool_calls": [{**call(i), "id": "same"} for i in range(3)]}]  # calls of one id are answered in turn
    same = [{**result(i), "tool_call_id": "same"} for i in range(3)]
    assert said(s, history[:1] + again + same + [user("y")]) == want

    def refused(messages, why, id):
        error = s.post(CHAT, {**ONE, "messages": messages}, 400)["error"]
        assert error["param"] == "messages" and why in error["message"] and f'"{id}"' in error["message"], error

    refused(history + [result(2), {**result(0), "tool_call_id": "other"}, result(1)], "answers no call", "other")
    refused(history + [result(0), result(1), result(0)], "comes twice", "c0")
    refused(history + [result(0), result(2), user("y")], "behind a call without a result", "c2")
    refused(history[:1] + again + same + [same[0]], "comes twice", "same")
    refused(history + [result(0), user("y"), {**result(1), "tool_call_id": "c9"}], "answers no call", "c9")
    refused(history + [result(0), user("y"), result(0)], "comes twice", "c0")
    refused([user("x"), result(0)], "follows no message with calls", "c0")
    refused([*history, *map(result, range(3)), {"role": "assistant", "content": "done"}, result(0)], "follows no message with calls", "c0")
    use = [{"type": "tool_use", "id": f"t{i}", "name": "f", "input": {"a": i}} for i in range(2)]
    block = (lambda i: {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"result {i}"})
    reply = (lambda order: s.post(MESSAGES, {**ONE, "messages": [user("x"), {"role": "assistant", "content": use}, {"role": "user", "content": [block(i) for i in order]}]})["content"])
    plain = [[x.get("thinking"), x.get("text")] for x in reply((0, 1))]
    assert [[x.get("thinking"), x.get("text")] for x in reply((1, 0))] == plain
    error = s.post("/v1/messages/count_tokens", {"messages": [user("x"), {"role": "assistant", "content": use}, {"role": "user", "content": [block(0), block(3)]}]}, 400)
    assert "messages: the result for the call \"t3\" answers no call" in error["error"]["message"], error
    item = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "b", "output": "r"}]
    for path in (RESPONSES, RESPONSES + "/input_tokens"):
        error = s.post(path, {"input": [user("x"), *item]}, 400)["error"]
        assert error["param"] == "input" and error["message"] == 'input: the result for the call "b" answers no call of the message before it', error


def types(s):
    """Within messages, items and blocks a value of the wrong type is refused, not read as if it were absent; arguments may be an object, as in chat."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = {"messages": [user("x"), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d"}}]}
    items = {"input": [user("x"), {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}, {"type": "function_call_output", "call_id": "c", "output": "r"}],
             "tools": [{"type": "function", "name": "f", "description": "d"}]}
    blocks = {"messages": [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
                           {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}], "tools": [{"name": "f", "description": "d"}]}

    def replaced(body, path, value):
        body = json.loads(json.dumps(body))
        within = body
        for key in path[:-1]:
            within = within[key]
        within[path[-1]] = value
        return body

    for path, body, places in (
            (CHAT + "/input_tokens", chat, [("messages", 1, "tool_calls", 0, "id"), ("messages", 1, "tool_calls", 0, "type"), ("messages", 1, "tool_calls", 0, "function", "arguments"),
                                            ("messages", 2, "tool_call_id"), ("tools", 0, "function", "description")]),
            (RESPONSES + "/input_tokens", items, [("input", 1, "call_id"), ("input", 1, "arguments"), ("input", 2, "call_id"), ("tools", 0, "description")]),
            (MESSAGES + "/count_tokens", blocks, [("messages", 1, "content", 0, "thinking"), ("messages", 1, "content", 1, "id"), ("messages", 2, "content", 0, "tool_use_id"),
                                                  ("tools", 0, "description")])):
        want = s.post(path, body)
        for place in places:
            for value in (7, True, [], {}, ["c"]):
                if place[-1] == "arguments" and value == {}:
                    assert s.post(path, replaced(body, place, {"a": 1})) == want != s.post(path, replaced(body, place, {})), place
                    continue
                message = s.post(path, replaced(body, place, value), 400)["error"]["message"]
                assert place[-1] in message, (place, value, message)


def agent(s):
    """The request of a coding agent: many tools, cache marks, a billing line that changes, fields nobody here knows."""
    tools = [{"name": f"tool_{i}", "description": "d" * 30, "cache_control": {"type": "ephemeral"}, "input_schema": {
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {f"p{k}": {"type": "string", "description": "é"} for k in range(9)}}}
        for i in range(5)]
    body = {"model": "tiny-m2", "max_tokens": 4, "stream": True, "tools": tools, "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"},
            "thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {"edits": []}, "output_config": {"effort": "high"},
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=%d;"}, {"type": "text", "text": "You are.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>r</system-reminder>"},
                                                      {"type": "text", "text": "do", "cache_control": {"type": "ephemeral"}}]}]}
    seen = []
    for turn in range(2):
        text = json.dumps(body).replace("cch=%d", f"cch={turn * 77777}")
        status, _, data = s.request("POST", MESSAGES + "?beta=true", text, {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "Content-Type": "application/json"})
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
        assert status == 200 and events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop", data
        seen.append([e for e in events if e["type"] == "message_delta"][0]["usage"])
    assert seen[0]["input_tokens"] > 2000 and seen[1]["input_tokens"] <= 2 and seen[1]["cache_read_input_tokens"] > 2000, seen


def declined(s):
    """A refusal of an earlier model is the assistant's text, in chat and responses alike."""
    of = lambda kind: [{"role": "user", "content": "Ur?"}, {"role": "assistant", "content": [{"type": kind, kind.split("_")[-1]: "No."}]}, {"role": "user", "content": "Why?"}]
    counts = [s.post("/v1/chat/completions/input_tokens", {"messages": of(kind)}) for kind in ("text", "refusal")]
    counts += [s.post("/v1/responses/input_tokens", {"input": of(kind)}) for kind in ("output_text", "refusal")]
    assert all(x == counts[0] for x in counts), counts


def formed(s):
    """Anthropic's own field for a schema."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = {"max_tokens": 300, "thinking": {"type": "disabled"}, "messages": [user("x")], "temperature": 1.5}
    text = s.post(MESSAGES, {**body, "output_config": {"format": {"type": "json_schema", "schema": schema}}})["content"][-1]["text"]
    assert json.loads(text)["a"] in (1, 2), text
    assert "output_config" in s.post(MESSAGES, {**body, "output_config": {"format": {"type": "xml"}}}, 400)["error"]["message"]


def thoughts(s):
    """Items of reasoning of one message are joined, one without a content says its summary, and blank arguments and null are none, as no arguments are."""
    def tokens(reasoning, arguments="{}", **more):
        items = [{"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": x}], **more} for x in reasoning]
        call = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}, {"type": "function_call_output", "call_id": "c", "output": "r"}]
        return s.post(RESPONSES, {"input": [user("x"), *items, *call], "max_output_tokens": 1})["usage"]["input_tokens"]

    assert tokens(["Alpha ", "beta ", "gamma."]) == tokens(["Alpha beta gamma."]) > tokens(["gamma."])
    summary = [{"type": "summary_text", "text": "Alpha "}, {"type": "summary_text", "text": "beta gamma."}]
    for content in (None, [], ""):
        assert tokens(["x"], summary=summary, content=content) == tokens(["Alpha beta gamma."])
    assert tokens(["gamma."], summary=summary) == tokens(["gamma."])
    said = [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]
    for blank in ("", " ", " \n\t", "null", " null\n"):
        assert tokens(["x"], blank) == tokens(["x"])
        other = json.loads(json.dumps(said).replace('"{}"', json.dumps(blank)))
        a, b = (s.post(CHAT, {**ONE, "messages": [user("x"), *m, {"role": "tool", "tool_call_id": "c", "content": "r"}]}) for m in (said, other))
        assert a["usage"]["prompt_tokens"] == b["usage"]["prompt_tokens"], blank


def many_thoughts(s):
    """Blocks of thinking of one message are joined, in memory that grows as their text does."""
    def used(thoughts):
        blocks = [{"type": "thinking", "thinking": x, "signature": ""} for x in thoughts]
        s.post(MESSAGES + "/count_tokens", {"messages": [user("x"), {"role": "assistant", "content": [*blocks, {"type": "text", "text": "y"}]}, user("z")]})
        return int(re.search(r"VmHWM:\s+(\d+) kB", open(f"/proc/{s.process.pid}/status").read())[1])
    before = used(["y"])
    assert used(["y" * 60] * 4000) - before < 100_000, before
    of = lambda thoughts: [user("x"), {"role": "assistant", "content": [{"type": "thinking", "thinking": x} for x in thoughts] + [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                           {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}]
    counts = [s.post(MESSAGES + "/count_tokens", {"messages": of(x)})["input_tokens"] for x in (["Alpha ", "", "beta ", "gamma."], ["Alpha beta gamma."], ["gamma."])]
    assert counts[0] == counts[1] > counts[2], counts


def reasons(s):
    """stop_reason of a chat, whole and streamed."""
    id = s.post("/tokenize", {"prompt": "x"})["tokens"][0]
    for more, reason in (({"stop_token_ids": [id]}, id), ({"stop_token_ids": [id], "max_tokens": 1, "logit_bias": {}}, None)):
        body = {**ONE, "messages": [user("x")], "logit_bias": {str(id): 100}, **more}
        assert (s.post(CHAT, body)["choices"][0]["stop_reason"], s.events(CHAT, body)[-1]["choices"][0]["stop_reason"]) == (reason, reason), more


def placeless(s):
    """Fields within a message that docs/serving.md calls without effect: the prompt is as long as without them."""
    text, use = {"type": "text", "text": "x"}, {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}

    def chat(message):
        return s.post("/v1/chat/completions/input_tokens", {"messages": [message]})["input_tokens"]

    def messages(assistant, answer):
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": assistant}, {"role": "user", "content": [answer]}]
        return s.post("/v1/messages/count_tokens", {"messages": history})["input_tokens"]

    def responses(*items):
        return s.post("/v1/responses/input_tokens", {"input": [{"role": "user", "content": "x"}, *items]})["input_tokens"]

    plain, cached = {"role": "user", "content": "x"}, {"cache_control": {"type": "ephemeral"}}
    assert chat(plain) == chat({**plain, "name": "me"}) == chat({**plain, "content": [{**text, **cached}]})
    want = messages([use], result)
    for assistant, answer in (([use], {**result, "is_error": True}), ([{"type": "redacted_thinking", "data": "e"}, use], {**result, **cached})):
        assert messages(assistant, answer) == want
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    noted = {**said, "status": "incomplete", "phase": "commentary", "content": [{"type": "output_text", "text": "a", "annotations": [{"x": 1}]}]}
    assert messages([text], text) == messages([{**text, "citations": [{"x": 1}]}], text)
    assert responses(said) == responses(noted) == responses({"type": "reasoning", "summary": [], "encrypted_content": "e"}, said)


def pretty(s):
    """A body over several lines: what a stream gives back of it stands on one line, as events need it."""
    body = {"input": "x", "max_output_tokens": 3, "stream": True, "metadata": {"a": "b\n", "c": "d", "e": math.nan, "f": [-math.inf]}, "tool_choice": "auto",
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]}
    status, _, data = s.request("POST", RESPONSES, json.dumps(body, indent=2).replace("\n", "\r\n"))
    assert status == 200
    for event in data.decode().rstrip().split("\n\n"):
        name, line = event.split("\n")
        assert name.startswith("event: ") and line.startswith("data: ") and "\r" not in line, event
    last = json.loads(line[6:], parse_constant=lambda word: [word])["response"]
    assert last["metadata"] == {**body["metadata"], "e": None, "f": [None]} and last["tools"] == body["tools"]


def refusals(s):
    long = "In the beginning " * 2000
    for path, body in ((CHAT, {"messages": [user(long)]}), (RESPONSES, {"input": long}), ("/v1/completions", {"prompt": long})):
        error = s.post(path, body, 400)["error"]
        assert error["code"] == "context_length_exceeded" and re.search(r"prompt is too long: \d+ tokens > 4095 maximum", error["message"]), error
        assert error["param"] in body, error
        assert error["type"] == "invalid_request_error" and error["n_ctx"] == 4096 and f"{error['n_prompt_tokens']} tokens > " in error["message"], error
    assert s.post(MESSAGES, {**ONE, "messages": [user(long)]}, 400)["error"]["message"].startswith("prompt is too long: ")
    assert s.post(CHAT, {"model": "gpt", "messages": [user("x")]}, 404)["error"]["code"] == "model_not_found"
    for field in ("functions", "chat_template", "guided_json", "guided_whitespace_pattern", "structured_outputs"):
        error = s.post(CHAT, {**ONE, "messages": [user("x")], field: "x"}, 400)["error"]
        assert error["param"] == field, error
        s.post(CHAT, {**ONE, "messages": [user("x")], field: None})
    for method, path, allow in (("GET", CHAT, "POST, OPTIONS"), ("POST", "/health", "GET, HEAD, OPTIONS"),
                                ("DELETE", "/v1/models/x", "GET, HEAD, OPTIONS")):
        status, headers, _ = s.request(method, path, "{}" if method == "POST" else None)
        assert (status, headers["Allow"]) == (405, allow), (method, path, status, headers["Allow"])
    assert s.request("POST", CHAT, "{}", {"Expect": "200-ok"})[0] == 417
    # A body that is coded is not read, and its refusal says so.
    for path, coding, want in ((CHAT, "gzip", 415), (MESSAGES, "br, gzip", 415), (CHAT, "identity", 200)):
        status, _, data = s.request("POST", path, json.dumps({**ONE, "messages": [user("x")]}), {"Content-Encoding": coding})
        assert status == want and (want == 200 or f"Content-Encoding: found {coding}, expected none" in json.loads(data)["error"]["message"]), (status, data)


def failing_streams(s):
    """A request whose time is over within its stream: an event of the API's own form, and the stream ends."""
    for path, field, body in ((CHAT, "max_tokens", {"messages": [user("x")]}), (MESSAGES, "max_tokens", {"messages": [user("x")]}),
                              (RESPONSES, "max_output_tokens", {"input": "x"})):
        status, _, data = s.request("POST", path, {**body, field: 4000, "ignore_eos": True, "stream": True, "timeout": 0.3})
        last = data.decode().rstrip().split("\n\n")[-1].split("\n")
        event, error = last[0].removeprefix("event: "), json.loads(last[-1].removeprefix("data: "))
        if path == RESPONSES:
            assert event == error["type"] == "response.failed" and error["response"]["status"] == "failed" and error["response"]["error"]["message"], last
            assert error["sequence_number"] == data.count(b"data: ") - 1
        else:
            assert status == 200 and "time is over" in error["error"]["message"] and (path == CHAT or event == error["type"] == "error"), last


def same_tools(s):
    """A tool makes the same prompt in all APIs, in whichever of its fields are there or null: a reply in chat has the prompt of messages and responses cached."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    for i, fields in enumerate(({}, {"strict": False}, {"strict": True}, {"strict": None}, {"description": None}, {"parameters": None}, {"description": "d", "strict": False})):
        f = {"name": f"weather_{i}", "description": "It says how the weather is. " * 12, "parameters": schema, **fields}
        anthropic = {"input_schema" if k == "parameters" else k: v for k, v in f.items()}
        usage = s.post(CHAT, {**ONE, "messages": [user("x")], "tools": [{"type": "function", "function": f}]})["usage"]
        counts = [s.post(RESPONSES + "/input_tokens", {"input": "x", "tools": [{"type": "function", **f}]})["input_tokens"],
                  s.post(MESSAGES + "/count_tokens", {"messages": [user("x")], "tools": [anthropic]})["input_tokens"]]
        assert counts == [usage["prompt_tokens"]] * 2, (fields, counts, usage)
        again = s.post(RESPONSES, {"input": "x", "max_output_tokens": 1, "tools": [{"type": "function", **f}]})["usage"]["input_tokens_details"]
        assert again == {"cached_tokens": counts[0] - 1, "cache_write_tokens": 0}, (fields, again, counts)


def same_tools_otherwise_written(s):
    """Two tools of one name may be spaced and ordered otherwise; where they say something else, they are refused."""
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Ur", "Uz"]}, "n": {"type": "number", "maximum": 10}}, "required": ["city"]}
    turned = {"required": ["city"], "properties": {"n": {"maximum": 10.0, "type": "number"}, "city": {"enum": ["Ur", "Uz"], "type": "string"}}, "type": "object"}
    other = {**schema, "required": ["n"]}
    listed = {**schema, "properties": {**schema["properties"], "city": {"type": "string", "enum": ["Uz", "Ur"]}}}
    forms = [("/v1/chat/completions/input_tokens", {"messages": [user("x")]}, lambda p, **k: {"type": "function", "function": {"name": "f", "description": "d", "parameters": p, **k}}),
             (RESPONSES + "/input_tokens", {"input": "x"}, lambda p, **k: {"type": "function", "name": "f", "parameters": p, "description": "d", **k}),
             (MESSAGES + "/count_tokens", {"messages": [user("x")]}, lambda p, **k: {"name": "f", "input_schema": p, "description": "d", **k})]
    for path, body, tool in forms:
        for two, status in (((schema, turned), 200), ((turned, schema, turned), 200), ((schema, other), 400), ((schema, turned, listed), 400)):
            text = json.dumps({**body, "tools": [tool(p) for p in two]}, indent=1 if len(two) > 2 else None)
            got, _, data = s.request("POST", path, text)
            assert got == status and (status == 200 or b'two of the name' in data), (path, two, data)
        assert b"two of the name" in s.request("POST", path, {**body, "tools": [tool(schema), tool(turned, strict=True)]})[2]
    path, body, tool = forms[0]
    many = [json.dumps(tool(schema), indent=i % 40, separators=("," + " " * (i // 40), ": ")) for i in range(4096)]
    begun = time.monotonic()
    s.request("POST", path, '{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % ", ".join(many))
    assert time.monotonic() - begun < 30


def built_in_tools(s):
    """Codex sends tools that OpenAI's servers or it itself has built in next to its functions: the model sees the functions alone."""
    f = {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
    own = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
           {"type": "namespace", "name": "mcp__a", "tools": [{**f, "name": "g"}]}, {"type": "local_shell"}, {"type": "mcp", "server_label": "a", "server_url": "http://a"}]
    body = {"input": "x", "max_output_tokens": 4, "temperature": 0, "tool_choice": "auto"}
    want = s.post(RESPONSES, {**body, "tools": [f]})
    got = s.post(RESPONSES, {**body, "tools": [own[0], f, *own[1:]]})
    assert got["tools"] == want["tools"] == [f] and got["usage"]["input_tokens"] == want["usage"]["input_tokens"], got
    assert [x.get("content") for x in got["output"]] == [x.get("content") for x in want["output"]]
    none = s.post(RESPONSES, {**body, "tools": own})
    assert none["tools"] == [] and none["usage"]["input_tokens"] == s.post(RESPONSES, body)["usage"]["input_tokens"]
    for more in ({"tools": own, "tool_choice": "required"}, {"tools": [f, *own], "tool_choice": {"type": "custom", "name": "apply_patch"}},
                 {"tools": [f, *own], "tool_choice": {"type": "function", "name": "g"}}, {"tools": [f, {"type": "functional", "name": "g"}]}, {"tools": [{**f, "type": None}]}):
        assert s.post(RESPONSES, {**body, **more}, 400)["error"]["param"] in ("tools", "tool_choice"), more
    assert "web_search" in s.post(CHAT, {**ONE, "messages": [user("x")], "tools": own[:1]}, 400)["error"]["message"]


def cut_calls(s):
    """A call that the limit cut off comes back as it was sent: the model sees as much of it as was said."""
    def forms(arguments):
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        chat = [user("x"), {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}]
        results = {"role": "tool", "tool_call_id": "c", "content": "cut"}, {"type": "function_call_output", "call_id": "c", "output": "cut"}
        yield CHAT + "/input_tokens", {"messages": [*chat, results[0]]}
        yield CHAT + "/input_tokens", {"messages": [*chat, user("go on")]}
        yield RESPONSES + "/input_tokens", {"input": [user("x"), call, results[1]]}

    for cut, whole in (('{"path": "a b", "text": "one\\ntwo \\"thr', '{"path": "a b", "text": "one\\ntwo \\"thr"}'), ('{"text": "one\\', '{"text": "one"}'), ('{"a": [1, {"b": "c', '{"a": [1, {"b": "c"}]}'),
                       ('{"a": 1, "te', '{"a": 1}'), ('{"a": 1, "n": 12', '{"a": 1}'), ("{", "{}")):
        for (path, body), (_, same) in zip(forms(cut), forms(whole), strict=True):
            assert s.post(path, body) == s.post(path, same), (cut, body)
    for wrong in ('{"a": 1 "b": ', '{"a": "b" c', "[1, 2", "it is", '{"a": 1}}', '{"a": }'):
        for path, body in forms(wrong):
            assert "the arguments of a call" in s.post(path, body, 400)["error"]["message"], wrong
    tool = {"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}}}
    seen = 0
    for limit in range(1, 60, 2):  # M2 reasons first; some of the calls have begun
        body = {"messages": [user("x")], "tools": [tool], "tool_choice": "required", "thinking_token_budget": 0, "max_tokens": limit, "temperature": 1, "seed": limit}
        choice = s.post(CHAT, body)["choices"][0]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            seen += call["function"]["arguments"].startswith('{"text')
            s.post(CHAT, {**ONE, "messages": [user("x"), choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "cut"}], "tools": [tool]})
    assert seen > 3, seen


def roles_of_agents(s):
    """Claude Code has two more roles, which are the user's."""
    blocks = [{"type": "text", "text": "Alpha "}, {"type": "text", "text": "beta."}]
    want = s.post(MESSAGES + "/count_tokens", {"messages": [user("x"), {"role": "user", "content": blocks}]})
    assert all(s.post(MESSAGES + "/count_tokens", {"messages": [user("x"), {"role": role, "content": blocks}]}) == want for role in ("ctx", "msg"))


def listed_thoughts(s):
    """Reasoning in lists, as OpenRouter and LiteLLM send it back: texts, summaries, and what only its maker can read, which has none."""
    call = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}

    def tokens(**said):
        result = {"role": "tool", "tool_call_id": "c", "content": "r"}
        return s.post(CHAT + "/input_tokens", {"messages": [user("x"), {"role": "assistant", "content": None, **call, **said}, result]})

    want, none = tokens(reasoning_content="Alpha beta."), tokens()
    assert want != none
    text, summary = {"type": "reasoning.text", "text": "Alpha ", "signature": None, "index": 0}, {"type": "reasoning.summary", "summary": "beta."}
    encrypted, redacted = {"type": "reasoning.encrypted", "data": "abc", "id": "r"}, {"type": "redacted_thinking", "data": "abc"}
    assert tokens(reasoning_details=[text, encrypted, summary]) == tokens(reasoning_details=[{"text": "Alpha beta."}]) == want
    assert tokens(thinking_blocks=[{"type": "thinking", "thinking": "Alpha beta.", "signature": "s"}, redacted]) == want
    assert tokens(thinking_blocks=[{"type": "thinking", "thinking": "gamma"}], reasoning_content="Alpha beta.") == want
    assert tokens(reasoning_details=[encrypted]) == tokens(thinking_blocks=[redacted]) == tokens(reasoning_details=[{"type": "reasoning.text", "text": None}]) == none
    for wrong in ({"reasoning_details": [{"data": "a"}]}, {"reasoning_details": ["a"]}, {"thinking_blocks": [{"type": "thinking", "thinking": 5}]}, {"thinking_blocks": "a"}):
        message = {"role": "assistant", "content": "y", **wrong}
        assert list(wrong)[0] in s.post(CHAT, {**ONE, "messages": [user("x"), message, user("z")]}, 400)["error"]["message"], wrong
    assert "thinking_blocks" in s.post(CHAT, {**ONE, "messages": [{**user("x"), "thinking_blocks": [redacted]}]}, 400)["error"]["message"]


def no_such_tool(s):
    """Every API names the tool that is asked for and is none."""
    f = {"name": "f", "parameters": {"type": "object"}}
    for path, body, name in ((CHAT, {**ONE, "messages": [user("x")], "tools": [{"type": "function", "function": f}]}, lambda n: {"type": "function", "function": {"name": n}}),
                             (RESPONSES, {"input": "x", "max_output_tokens": 1, "tools": [{"type": "function", **f}]}, lambda n: {"type": "function", "name": n}),
                             (MESSAGES, {"messages": [user("x")], "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}, lambda n: {"type": "tool", "name": n})):
        for choice, words in ((name("h"), 'tool_choice: there is no tool "h"'), (name(""), "the name of a tool")):
            assert words in s.post(path, {**body, "tool_choice": choice}, 400)["error"]["message"], (path, choice)
        got = s.post(path, {**body, "tools": [], "tool_choice": name("f")}, 400)
        assert "tool_choice: there are no tools" in got["error"]["message"], got


def strangers(packed):
    """A page of another site asks a server without a key: by its own name, which it made to point here, or as a form."""
    def status(s, **headers):
        return s.request("GET", "/v1/models", None, headers)[0]

    with Server(packed, "--allow-host", "llm.example.com", "--max-model-len", "64") as s:
        for host in ("127.0.0.1", "localhost:8000", "LocalHost", "[::1]:80", "127.1.2.3", "a.localhost", "0.0.0.0:8000", "[::]:80", "llm.example.com", "llm.example.com:443"):
            assert status(s, Host=host) == 200, host
        for host in ("evil.example", "127.evil.example", "localhost.evil.example", "evil-localhost", "[::2]", "127.0.0.1.evil.example", "", ":80"):
            assert status(s, Host=host) == 403, host
        assert status(s, Host="127.0.0.1:80:x") == 400
        for origin in ("http://127.0.0.1:8000", "https://localhost", "https://llm.example.com"):
            assert status(s, Origin=origin) == 200, origin
        for origin in ("https://evil.example", "null", "http://localhost.evil.example:80"):
            assert status(s, Origin=origin) == 403, origin
        got, headers, data = s.request("POST", "/v1/completions", {"prompt": "x"}, {"Origin": "https://evil.example", "Content-Type": "text/plain"})
        assert got == 403 and json.loads(data)["error"]["type"] == "permission_error" and "Access-Control-Allow-Origin" not in headers
    with Server(packed, "--api-key", "k", "--max-model-len", "64") as s:
        assert status(s, Host="llm.example.com", Authorization="Bearer k") == 200 and status(s, Host="llm.example.com") == 401


def values(s):
    return s.metrics()


def idle(s):
    end = time.monotonic() + 120
    while (v := values(s))["requests_running"] or v["requests_waiting"] or v["calls"]:
        assert time.monotonic() < end, v
        time.sleep(0.02)
    return v


def metrics(packed):
    """What was counted by all of them is one another's sum, and nothing runs or is held at the end."""
    model = json.load(open(packed + "/config.json", encoding="utf-8"))
    with Server(packed, "--chat-format", "minimax-m2", "--max-model-len", "512", "--max-queue", "1", "--max-num-seqs", "1") as s:
        begun = time.monotonic()
        prompt = reply = cached = choices = 0
        for i in range(12):
            n = 1 + i % 3 if i % 4 == 0 else 1
            r = s.post("/v1/completions", {"prompt": f"And God said {i % 5}", "max_tokens": 3 + i, "ignore_eos": True, "seed": i})
            prompt, reply = prompt + r["usage"]["prompt_tokens"], reply + r["usage"]["completion_tokens"]
            cached, choices = cached + r["usage"]["prompt_tokens_details"]["cached_tokens"], choices + 1
        long = s.connect()
        long.request("POST", "/v1/completions", json.dumps({"prompt": "x", "n": 2, "max_tokens": 400, "ignore_eos": True}))
        while (now := s.metrics())["requests_running"] + now["requests_waiting"] < 2:
            time.sleep(0.01)
        refused, headers, data = s.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
        long.close()
        assert refused == 429 and headers["Retry-After"] and json.loads(data)["error"]["code"] == "queue_full", data
        for body in ({"prompt": "x", "n": 3}, {"prompt": ["x"] * 3}):  # more than may ever run and wait: nobody is told to try again
            refused, headers, data = s.request("POST", "/v1/completions", {**body, "max_tokens": 1})
            assert refused == 400 and "Retry-After" not in headers and b"--max-queue" in data, data
        # All replies of a request find room, or none is begun, and each of them is refused.
        before = idle(s)["requests_total"]
        long = s.connect()
        long.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True}))
        while s.metrics()["requests_running"] < 1:
            time.sleep(0.01)
        refused, _, data = s.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 2, "priority": 5})
        assert refused == 429 and s.metrics()["requests_total"] == before + 1 and s.metrics()["requests_preempted_total"] == 0, data
        assert s.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["choices"], "one finds room, behind the other"
        assert long.getresponse().status == 200
        long.close()
        v = idle(s)
        choices += 2
        finished = sum(n for k, n in v.items() if k.startswith("finished_total"))
        assert v["requests_total"] == finished and v["requests_refused_total"] == 3 and v['finished_total{reason="length"}'] == choices, v
        assert v["first_token_seconds_count"] <= finished and v["first_token_seconds_count"] + v["between_tokens_seconds_count"] == v["reply_tokens_total"], v
        assert v["reply_tokens_total"] >= reply and v["prompt_tokens_total"] >= prompt and v["cached_tokens_total"] >= cached > 0
        assert 0 < v["step_seconds_total"] < time.monotonic() - begun and v["resident_bytes"] > 1 << 20
        assert v["pages_free"] + v["pages_cached"] == v["pages"], v  # what is not free, the cache has
        layers = model["num_hidden_layers"]
        peaks = [v[f'expert_peak{{layer="{i}"}}'] for i in range(layers)]
        assert all(1 <= x <= model["num_local_experts"] / model["num_experts_per_tok"] for x in peaks), peaks
        before = v["expert_rows_total"]
        r = s.post("/v1/completions", {"prompt": "zeta", "max_tokens": 7, "ignore_eos": True, "cache_salt": "new", "speculative": 0})
        v = idle(s)
        rows = r["usage"]["prompt_tokens"] + 7 - 1  # the last token of a reply is never fed
        assert v["expert_rows_total"] - before == rows * layers * model["num_experts_per_tok"], (v["expert_rows_total"], before, rows)


def leaves_in_prompt(packed):
    """A client goes away while its prompt is read: once the server has seen that, no more of the prompt is read."""
    text = "In the beginning " * 1500
    with Server(packed, "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-model-len", "8192", "-t", "1") as s:
        whole = s.post("/tokenize", {"prompt": text})["count"] / 8
        c = socket.create_connection(("127.0.0.1", s.port))
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        c.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        end = time.monotonic() + 120
        while (v := values(s))["steps_total"] < 5:
            assert time.monotonic() < end, v
            time.sleep(0.005)
        c.close()
        # This request's own connection is one; the request is cancelled with the end of the other.
        while (v := values(s))["connections"] > 1:
            assert time.monotonic() < end, v
        steps = idle(s)["steps_total"]
        assert steps - v["steps_total"] <= 2 and steps < whole, (v["steps_total"], steps, whole)
        assert s.post("/v1/completions", {"prompt": "x", "max_tokens": 1})["usage"]["completion_tokens"] == 1


def efforts_of_m1(s):
    """M1 decides for itself whether it reasons: what would leave its reasoning out or end it is refused by name, but for Anthropic's own words."""
    chat = {"messages": [user("In the beginning")], **ONE}
    want = s.post(CHAT, chat)["choices"]
    for how in ({"reasoning_effort": "high"}, {"reasoning": {"max_tokens": 3}}, {"thinking": {"type": "enabled", "budget_tokens": 3}}, {"thinking_budget_tokens": -1}):
        assert s.post(CHAT, {**chat, **how})["choices"] == want, how
    for how in ({"reasoning_effort": "none"}, {"reasoning": {"enabled": False}}, {"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert "minimax-m1 has no form for a reply without reasoning" in s.post(CHAT, {**chat, **how}, 400)["error"]["message"], how
    for name in ("thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"):
        assert s.post(CHAT, {**chat, name: 3}, 400)["error"]["param"] == name
    texts = [s.post(MESSAGES, {**chat, **how})["content"][0]["text"] for how in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}})]
    assert texts[0] == texts[1] == texts[2] == want[0]["message"]["content"], texts


PACKED = convert("tests/data/tiny-m2")
with Server(PACKED, "--chat-format", "minimax-m2", "--max-model-len", "4096") as server:
    systems(server)
    results(server)
    types(server)
    declined(server)
    formed(server)
    placeless(server)
    pretty(server)
    thoughts(server)
    many_thoughts(server)
    reasons(server)
    refusals(server)
    same_tools(server)
    same_tools_otherwise_written(server)
    built_in_tools(server)
    cut_calls(server)
    roles_of_agents(server)
    listed_thoughts(server)
    no_such_tool(server)
    failing_streams(server)
with Server(PACKED, "--chat-format", "minimax-m2") as server:
    agent(server)
with Server(convert("tests/data/tiny-m1"), "--chat-format", "minimax-m1", "--max-model-len", "4096") as server:
    systems(server)
    results(server)
    efforts_of_m1(server)
strangers(PACKED)
metrics(PACKED)
leaves_in_prompt(PACKED)
print("system messages, results in any order, an agent's request, refusals by code, strangers, failures in streams, sums of metrics, a client that leaves a prompt")
