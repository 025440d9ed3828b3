#!/usr/bin/env python3
"""minimax-serve --chat-format minimax-m3 over all three APIs: thinking modes, calls as elements whole and streamed, a history with calls,
required and strict calls, schemas, root messages, image and video refused by name. The checkpoint writes noise: constraints hold it."""
import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, comes_back, convert, with_m3_tokens  # noqa: E402

NS = "]<]minimax[>["
ASK = [{"role": "user", "content": "In the beginning"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                                           "o": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}}, "required": ["city", "o"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": SCHEMA}}
FLAT = {"name": "get_weather", "description": "weather"}
ARGUMENTS = {"city": "Ur é <b>", "days": [1, 1], "o": {"ok": True}}
# One value alone follows it.
FIXED = {"type": "object", "properties": {"city": {"const": "Ur é <b>"}, "days": {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2},
                                          "o": {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}}, "required": ["city", "days", "o"]}
SCRIPT = (f'Looking.{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Ur é <b>{NS}</city>{NS}<days>{NS}<item>1{NS}</item>{NS}<item>1{NS}</item>{NS}</days>'
          f"{NS}<o>{NS}<ok>true{NS}</ok>{NS}</o>{NS}</invoke>\n{NS}</tool_call>")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def prompt_tokens(s, **fields):
    return s.post(CHAT, {"messages": ASK, "max_tokens": 1, **fields})["usage"]["prompt_tokens"]


def modes(s):
    """Each way to name a mode gives the prompt of that mode; in the mode enabled the reply begins in the reasoning."""
    kwargs = lambda mode: {"chat_template_kwargs": {"thinking_mode": mode}}
    want = {mode: prompt_tokens(s, **kwargs(mode)) for mode in ("adaptive", "enabled", "disabled")}
    assert len(set(want.values())) == 3, want
    for mode, fields in (("adaptive", {}), ("adaptive", {"reasoning_effort": "high"}), ("adaptive", {"thinking": {"type": "adaptive"}}),
                         ("enabled", {"thinking": {"type": "enabled"}}), ("enabled", {"chat_template_kwargs": {"enable_thinking": True}}),
                         ("disabled", {"thinking": {"type": "disabled"}}), ("disabled", {"reasoning_effort": "none"}), ("disabled", {"reasoning_effort": "minimal"}),
                         ("disabled", {"chat_template_kwargs": {"enable_thinking": False}}), ("disabled", {"reasoning": {"effort": "minimal"}})):
        assert prompt_tokens(s, **fields) == want[mode], (mode, fields)
    refused = s.post(CHAT, {"messages": ASK, **kwargs("sometimes")}, status=400)
    assert "thinking_mode" in refused["error"]["message"], refused
    for mode, thinking in (("adaptive", None), ("enabled", {"type": "enabled", "budget_tokens": 1024}), ("disabled", {"type": "disabled"}), ("adaptive", {"type": "adaptive"})):
        count = s.post("/v1/messages/count_tokens", {"messages": ASK, **({"thinking": thinking} if thinking else {})})["input_tokens"]
        assert count == want[mode], (mode, thinking, count)
    for mode, reasoning in (("adaptive", {"effort": "low"}), ("disabled", {"effort": "none"}), ("disabled", {"effort": "minimal"})):
        got = s.post(RESPONSES, {"input": "In the beginning", "max_output_tokens": 1, "reasoning": reasoning})
        assert got["usage"]["input_tokens"] == want[mode], (mode, got)
    message = lambda mode: s.post(CHAT, {"messages": ASK, "max_tokens": 8, "temperature": 0, **kwargs(mode)})["choices"][0]["message"]
    assert message("enabled").get("reasoning_content") and not message("enabled")["content"], message("enabled")
    assert message("disabled")["content"] and not message("disabled").get("reasoning_content"), message("disabled")


def budgets(s):
    """The reasoning ends after its budget and the tag, in the mode enabled and where an adaptive reply begins with one; what follows is free, or a form."""
    think = s.post("/tokenize", {"prompt": "<mm:think>", "parse_special": True})["tokens"][0]
    ask = lambda **how: s.post(CHAT, {"messages": ASK, "max_tokens": 12, "temperature": 0, **how})
    spent = lambda got: (got["usage"]["completion_tokens_details"]["reasoning_tokens"], bool(got["choices"][0]["message"]["content"]))
    enabled, adaptive = {"thinking": {"type": "enabled"}}, {"logit_bias": {think: 100}}
    free = ask(**enabled)["choices"][0]["message"]["reasoning_content"]
    for n in (0, 1, 5):
        got = ask(thinking={"type": "enabled", "budget_tokens": n}, reasoning={"max_tokens": 7})
        assert spent(got) == (n + 1, True) and free.startswith(got["choices"][0]["message"].get("reasoning_content") or ""), (n, got)
        got = ask(thinking_token_budget=n, guided_choice=["a", "b"], **enabled)
        assert spent(got) == (n + 1, True) and got["choices"][0]["message"]["content"] in ("a", "b"), (n, got)
    seen = [spent(ask(**adaptive, **how)) for how in ({}, {"thinking_token_budget": 4}, {"thinking_token_budget": 0})]
    assert seen[1] == seen[2] != seen[0], seen  # the bias begins another reasoning at once


def scripted(s):
    """A reply that is held to a call, whole and streamed, in all APIs; its message comes back in a history."""
    how = {"temperature": 0, "max_tokens": 300, "guided_choice": [SCRIPT]}
    whole = s.post(CHAT, {"messages": ASK, "tools": [TOOL], **how})["choices"][0]
    call, = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Looking.", whole
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS), call
    content = arguments = ""
    pieces = 0
    for e in s.events(CHAT, {"messages": ASK, "tools": [TOOL], **how}):
        for choice in e["choices"]:
            content += choice["delta"].get("content") or ""
            for c in choice["delta"].get("tool_calls") or []:
                arguments += c["function"].get("arguments") or ""
                pieces += bool(c["function"].get("arguments"))
    assert (content, arguments) == ("Looking.", call["function"]["arguments"]) and pieces > 4, (content, arguments, pieces)
    history = [{"role": "root", "content": "You are M3."}, {"role": "system", "content": "Be brief."}, *ASK, whole["message"],
               {"role": "tool", "tool_call_id": call["id"], "content": "hot"}, {"role": "user", "content": "And?"}]
    assert s.post(CHAT, {"messages": history, "tools": [TOOL], "max_tokens": 1})["usage"]["prompt_tokens"] > prompt_tokens(s, tools=[TOOL])
    one = {"temperature": 0, "parallel_tool_calls": False}
    message = s.post(MESSAGES, {"messages": ASK, "tools": [{**FLAT, "input_schema": FIXED}], "temperature": 0, "max_tokens": 300,
                                "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    assert [(b["type"], b.get("input")) for b in message["content"]] == [("tool_use", ARGUMENTS)], message
    response = s.post(RESPONSES, {"input": "In the beginning", "tools": [{"type": "function", **FLAT, "parameters": FIXED}],
                                  "max_output_tokens": 300, "tool_choice": "required", **one})
    assert [(x["type"], json.loads(x["arguments"])) for x in response["output"]] == [("function_call", ARGUMENTS)], response
    # Without its block's end, and with text that breaks the grammar, it is content as written.
    broken = SCRIPT.replace(f"{NS}</city>", f"{NS}</town>")
    got = s.post(CHAT, {"messages": ASK, "tools": [TOOL], **how, "guided_choice": [broken]})["choices"][0]
    assert got["finish_reason"] == "stop" and not got["message"].get("tool_calls") and got["message"]["content"] == broken, got


def back(s):
    """The tokens of a reply with calls stand in the next turn's prompt, in every mode."""
    end = s.post("/tokenize", {"prompt": "</mm:think>", "parse_special": True})["tokens"][0]
    how = {"messages": ASK, "tools": [TOOL], "temperature": 0, "max_tokens": 300, "guided_choice": [SCRIPT]}
    for mode, more in (("adaptive", {}), ("enabled", {"logit_bias": {str(end): 100}}), ("disabled", {})):
        comes_back(s, {**how, **more, "chat_template_kwargs": {"thinking_mode": mode}})
    comes_back(s, {**how, "messages": [{"role": "user", "content": "And"}], "parallel_tool_calls": False})


def held(s):
    """Required and strict calls, and schemas: what noise is held to."""
    mark, end = (s.post("/tokenize", {"prompt": x, "parse_special": True})["tokens"][0] for x in (NS, "</mm:think>"))
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "thinking": {"type": "enabled"}}):
        ended = 0
        for seed in range(3):
            got = s.post(CHAT, {"messages": ASK, "tools": [TOOL], "temperature": 1, "seed": seed, "max_tokens": 200, "logit_bias": {str(mark): 8, str(end): 12}, "parallel_tool_calls": False, **fields})["choices"][0]
            if got["finish_reason"] == "length":
                continue
            assert got["finish_reason"] == "tool_calls", got
            arguments = json.loads(got["message"]["tool_calls"][0]["function"]["arguments"])
            assert len(arguments["city"]) <= 9 and isinstance(arguments["o"]["ok"], bool) and all(isinstance(d, int) for d in arguments.get("days", [])), got
            ended += 1
        assert ended, fields
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"]}}}
    got = [s.post(CHAT, {"messages": ASK, "max_tokens": 100, "temperature": 1, "seed": seed, "response_format": form})["choices"][0] for seed in range(5)]
    got = [json.loads(x["message"]["content"])["n"] for x in got if x["finish_reason"] == "stop"]
    assert got and set(got) <= {"a", "b"}, got


def refusals(s):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    for path, body, word in ((CHAT, {"messages": [{"role": "user", "content": [picture]}]}, "image_url"),
                             (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]}, "video_url"),
                             (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
                             (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]}, "video"),
                             (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
                             (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_video", "video_url": "x"}]}]}, "input_video"),
                             (CHAT, {"messages": [*ASK, {"role": "root", "content": "x"}]}, "root")):
        got = s.post(path, body, status=400)
        assert word in got["error"]["message"], (body, got)
    for value, word in (({"propertyNames": {"enum": ["a"]}}, "propertyNames"), ({"patternProperties": {"^a": {}}, "additionalProperties": False}, "patternProperties"),
                        ({"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "alternatives of objects")):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"p": {"type": "object", **value}}}}}
        got = s.post(CHAT, {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 1}, status=400)
        assert word in got["error"]["message"] and "in this format's calls" in got["error"]["message"], got
    # The keys of any object are strings; keys of other makers that begin with x- restrict nothing.
    for more in ({"propertyNames": {"type": "string"}, "additionalProperties": {}}, {"properties": {"p": {"type": "object", "propertyNames": {"type": "string"}, "x-order": 1}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **more}}}
        assert s.post(CHAT, {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 1})["choices"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}}
    got = s.post(CHAT, {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 1}, status=400)
    assert "alternatives of its parameters" in got["error"]["message"], got
    for prompt, word in (("x]<]image[>[y", "token 1 of the prompt is ]<]image[>["), ([5, 6, s.post("/tokenize", {"prompt": "]<]video[>[", "parse_special": True})["tokens"][0]], "]<]video[>[")):
        got = s.post("/v1/completions", {"prompt": prompt, "parse_special": True, "max_tokens": 1}, status=400)
        assert word in got["error"]["message"], (prompt, got)
    assert s.post(CHAT, {"messages": [{"role": "user", "content": "]<]image[>["}], "max_tokens": 1})["choices"]  # a user's text is text


with Server(convert(with_m3_tokens("tests/data/tiny-m2", os.path.join(TMP, "source", "like-m3"))), "--chat-format", "minimax-m3", "--max-model-len", "2048") as server:
    modes(server)
    budgets(server)
    scripted(server)
    back(server)
    held(server)
    refusals(server)
print("MiniMax-M3: modes, calls whole and streamed in three APIs, their tokens in the next turn, required calls, a schema, refusals")
