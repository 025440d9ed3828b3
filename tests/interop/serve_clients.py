#!/usr/bin/env python3
"""minimax-serve through the packages that OpenAI and Anthropic publish: chat, streams, logprobs, json_schema, n, tools, errors,
cancellation, count_tokens. The small checkpoints know no chat: what they say is scripted by logit_bias and constraints where it matters."""
import json
import os
import re
import sys
import time

import anthropic
import openai

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

ASK = [{"role": "user", "content": "In the beginning"}]
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "sex": {"enum": ["f", "m", None]}},
          "required": ["name", "age", "sex"], "additionalProperties": False}
TOOL = {"name": "get_weather", "description": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


def joined(stream):
    """(reasoning, content, finish_reason, usage) of a stream of one choice."""
    reasoning = content = ""
    finish = usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return reasoning, content, finish, usage


def chat(c, thinks):
    whole = c.chat.completions.create(model="m", messages=ASK, temperature=0, max_completion_tokens=30)
    message = whole.choices[0].message
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert bool(reasoning) == thinks and whole.choices[0].finish_reason in ("length", "stop") and whole.usage.completion_tokens <= 30
    assert bool(whole.usage.completion_tokens_details.reasoning_tokens) == thinks
    stream = c.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=30, stream=True, stream_options={"include_usage": True})
    got = joined(stream)
    assert got[:3] == (reasoning, message.content, whole.choices[0].finish_reason), (got, whole)
    assert got[3].completion_tokens == whole.usage.completion_tokens and got[3].prompt_tokens == whole.usage.prompt_tokens
    assert got[3].prompt_tokens_details.cached_tokens > 0
    three = c.chat.completions.create(model="m", messages=ASK, temperature=1, seed=3, n=3, max_tokens=12)
    again = c.chat.completions.create(model="m", messages=ASK, temperature=1, seed=3, n=3, max_tokens=12)
    texts = [x.message.content + (getattr(x.message, "reasoning_content", None) or "") for x in three.choices]
    assert len(set(texts)) == 3 and [x.message.content for x in three.choices] == [x.message.content for x in again.choices]


def logprobs(c):
    r = c.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    content = r.choices[0].logprobs.content
    assert len(content) == 5
    for t in content:
        assert len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token and t.logprob == t.top_logprobs[0].logprob <= 0
        assert bytes(t.bytes).decode(errors="replace") == t.token
    streamed = []
    for chunk in c.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=5, logprobs=True, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert [(t.token, t.logprob) for t in streamed] == [(t.token, t.logprob) for t in content]


def schema(c, extra):
    """Constrained replies are JSON of the schema, at any temperature."""
    fits = 0
    for seed in range(6):
        r = c.chat.completions.create(model="m", messages=ASK, temperature=1.3, seed=seed, max_tokens=400, extra_body=extra,
                                      response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}})
        if r.choices[0].finish_reason == "length":
            continue
        person = json.loads(r.choices[0].message.content)
        assert list(person) == ["name", "age", "sex"] and isinstance(person["age"], int) and person["sex"] in ("f", "m", None), person
        assert len(person["name"]) <= 12
        fits += 1
    assert fits >= 4, fits
    try:
        c.chat.completions.create(model="m", messages=ASK, response_format={
            "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?<=a)b"}}})
        raise AssertionError("a pattern is not served")
    except openai.BadRequestError as e:
        assert "pattern" in e.message, e


def form_or_call(c, server, extra):
    """Beside tools a reply is of the schema or a call, whose first token alone decides; M1's calls begin with text: refused."""
    how = dict(model="m", messages=ASK, temperature=1, max_tokens=400, tools=[{"type": "function", "function": TOOL}], extra_body=extra,
               response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}})
    if not extra:  # M1
        try:
            c.chat.completions.create(**how)
            raise AssertionError("not served beside tools")
        except openai.BadRequestError as e:
            assert "not together with tools" in e.message, e
        return
    call, = server.post("/tokenize", {"prompt": "<minimax:tool_call>", "parse_special": True}, headers={"x-api-key": "k"})["tokens"]
    formed = 0
    for seed in range(4):
        r = c.chat.completions.create(seed=seed, logit_bias={str(call): -100}, **how).choices[0]
        if r.finish_reason != "length":
            formed += list(json.loads(r.message.content)) == ["name", "age", "sex"]
    assert formed >= 2, formed
    r = c.chat.completions.create(seed=1, logit_bias={str(call): 100}, **{**how, "max_tokens": 40}).choices[0]
    assert not (r.message.content or "").lstrip().startswith("{"), r


def called(message, thinks):
    """The tool whose call the reply begins. One of M1 that is cut before its arguments are JSON is no call yet, but its text."""
    if thinks:
        assert message.tool_calls and message.tool_calls[0].id.startswith("call_"), message
        return message.tool_calls[0].function.name
    begun = re.match(r'<tool_calls>\n\{"name": "(\w+)", "arguments": ', message.content or "")
    assert begun or message.tool_calls, message
    return begun[1] if begun else message.tool_calls[0].function.name


def tools(c, extra):
    """A required call begins with a tool's name, whole and streamed."""
    thinks = bool(extra)
    spec = [{"type": "function", "function": TOOL}, {"type": "function", "function": {**TOOL, "name": "get_time"}}]
    how = dict(model="m", messages=ASK, tools=spec, temperature=0, max_tokens=160, parallel_tool_calls=False, extra_body=extra)
    named = c.chat.completions.create(tool_choice={"type": "function", "function": {"name": "get_time"}}, **how)
    assert called(named.choices[0].message, thinks) == "get_time", named
    whole = c.chat.completions.create(tool_choice="required", **how).choices[0]
    assert called(whole.message, thinks) in ("get_time", "get_weather"), whole
    names, arguments, finish, content = {}, {}, None, ""
    for chunk in c.chat.completions.create(tool_choice="required", stream=True, **how):
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.function.name:
                    assert call.id and call.index not in names
                    names[call.index] = call.function.name
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    whole_calls = whole.message.tool_calls or []
    assert len(names) >= thinks
    assert list(names.values()) == [x.function.name for x in whole_calls] and all(x in ("get_time", "get_weather") for x in names.values())
    assert list(arguments.values()) == [x.function.arguments for x in whole_calls] and finish == whole.finish_reason
    assert content == (whole.message.content or "")
    none = c.chat.completions.create(tool_choice="none", **how).choices[0].message
    assert none.tool_calls is None
    # What comes back: calls and results.
    history = ASK + [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Ur"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"}]
    assert c.chat.completions.create(model="m", messages=history, tools=spec, max_tokens=4).usage.prompt_tokens > 20


SCRIPT = {
    "minimax-m2": "\n\nLooking.\n<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Ur é <b></parameter>\n</invoke>\n</minimax:tool_call>",
    "minimax-m1": "Looking.\n<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ur é <b>\"}}\n</tool_calls>",
}


def scripted(c, server, chat_format):
    """A reply that is held to a call: the call whole and streamed; in the next turn the prompt has its very tokens."""
    spec = [{"type": "function", "function": TOOL}]
    thinks = chat_format == "minimax-m2"
    think = server.post("/tokenize", {"prompt": "</think>", "parse_special": True}, headers={"x-api-key": "k"})["tokens"]
    how = dict(model="m", messages=ASK, tools=spec, temperature=0, max_tokens=300,
               extra_body={"guided_choice": [SCRIPT[chat_format]], "logit_bias": {str(think[0]): 100} if thinks else {}})
    whole = c.chat.completions.create(**how)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls" and message.content == "Looking.", whole
    assert [(x.function.name, json.loads(x.function.arguments)) for x in message.tool_calls] == [("get_weather", {"city": "Ur é <b>"})]
    name = arguments = ""
    pieces = 0
    for chunk in c.chat.completions.create(stream=True, **how):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
                pieces += bool(call.function.arguments)
    assert name == "get_weather" and arguments == message.tool_calls[0].function.arguments and pieces >= (2 if thinks else 1)
    history = ASK + [message.model_dump(exclude_none=True, exclude={"refusal"}), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "hot"}]
    again = c.chat.completions.create(model="m", messages=history, tools=spec, max_tokens=1)
    known = whole.usage.prompt_tokens + whole.usage.completion_tokens - 1
    cached = again.usage.prompt_tokens_details.cached_tokens
    if thinks:
        assert known - 1 <= cached <= again.usage.prompt_tokens, (cached, known, again)
    changed = json.loads(json.dumps(history))
    changed[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Eridu"}'
    other = c.chat.completions.create(model="m", messages=changed, tools=spec, max_tokens=1)
    assert other.usage.prompt_tokens_details.cached_tokens < known - 4


def openai_errors(c, server):
    for status, kind, what in [
        (400, openai.BadRequestError, dict(messages=[])), (400, openai.BadRequestError, dict(messages=ASK, temperature=-1)),
        (400, openai.BadRequestError, dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
        (400, openai.BadRequestError, dict(messages=[{"role": "judge", "content": "x"}])),
        (400, openai.BadRequestError, dict(messages=ASK, tool_choice="required")),
        (400, openai.BadRequestError, dict(messages=[{"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}])),
        (404, openai.NotFoundError, dict(messages=ASK, model="other"))]:
        try:
            c.chat.completions.create(**{"model": "m", **what})
            raise AssertionError(what)
        except kind as e:
            assert e.status_code == status and e.body["message"], (what, e.body)
    bare = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong", max_retries=0)
    try:
        bare.models.list()
        raise AssertionError("a wrong key was taken")
    except openai.AuthenticationError:
        pass
    assert [m.id for m in c.models.list().data] == ["m"] and c.models.retrieve("m").id == "m"
    try:
        c.models.retrieve("other")
        raise AssertionError("there is one model")
    except openai.NotFoundError:
        pass


def cancellation(c, server):
    """A client that leaves frees its place at once."""
    stream = c.chat.completions.create(model="m", messages=ASK, max_tokens=8000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for _ in range(200):
        if not server.metrics()["requests_running"]:
            break
        time.sleep(0.02)
    else:
        raise AssertionError(server.get("/metrics"))


def messages(a, thinks):
    how = dict(model="m", messages=ASK, max_tokens=30, extra_body={"temperature": 0})
    whole = a.messages.create(**how)
    kinds = [b.type for b in whole.content]
    assert kinds == (["thinking"] if thinks else ["text"]) and whole.stop_reason == "max_tokens", whole
    with a.messages.stream(**how) as stream:
        events = [e.type for e in stream]
        final = stream.get_final_message()
    assert [b.type for b in final.content] == kinds and final.stop_reason == "max_tokens"
    text = (lambda m: "".join(b.thinking if b.type == "thinking" else b.text for b in m.content))
    assert text(final) == text(whole) and events[0] == "message_start" and events[-1] == "message_stop"
    usage = final.usage
    assert usage.output_tokens == 30 and usage.input_tokens + usage.cache_read_input_tokens == a.messages.count_tokens(model="m", messages=ASK).input_tokens
    # The line that changes with every request is not part of the prompt.
    bill = (lambda cch: a.messages.count_tokens(model="m", messages=ASK, system=[
        {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={cch};\nBe brief."}]).input_tokens)
    plain = a.messages.count_tokens(model="m", messages=ASK, system="Be brief.").input_tokens
    assert bill("1") == bill("22222222222") == plain
    tools = [{"name": "f", "description": "d", "input_schema": TOOL["parameters"]}]
    history = ASK + [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "so"},
                                          {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Ur"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "noon"}]},
                                     {"type": "text", "text": "And?"}]}]
    assert a.messages.create(model="m", messages=history, tools=tools, max_tokens=3).usage.output_tokens == 3
    if thinks:  # a stop sequence does not act within the reasoning
        assert text(a.messages.create(**{**how, "stop_sequences": [text(whole)[8:12]]})) == text(whole)
        how["thinking"] = {"type": "disabled"}
        whole = a.messages.create(**how)
    stopped = a.messages.create(**{**how, "stop_sequences": [text(whole)[8:12]]})
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text(whole)[8:12]
    for kind, what in [(anthropic.BadRequestError, {"messages": []}), (anthropic.NotFoundError, {"model": "other"}),
                       (anthropic.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})]:
        try:
            a.messages.create(**{**how, **what})
            raise AssertionError(what)
        except kind as e:
            assert e.body["type"] == "error" and e.body["error"]["message"], e.body


def responses(c, thinks):
    how = dict(model="m", input="In the beginning", temperature=0, max_output_tokens=20, instructions="Be brief.")
    whole = c.responses.create(**how)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens" and whole.usage.output_tokens == 20
    assert [x.type for x in whole.output] == (["reasoning"] if thinks else ["message"])
    deltas, final, numbers = "", None, []
    for e in c.responses.create(stream=True, **how):
        numbers.append(e.sequence_number)
        if e.type.endswith("_text.delta"):
            deltas += e.delta
        final = getattr(e, "response", final)
    assert numbers == list(range(len(numbers))) and final.status == "incomplete"
    assert deltas == "".join(p.text for x in whole.output for p in x.content) == "".join(p.text for x in final.output for p in x.content)
    counted = c.responses.input_tokens.count(model="m", input=how["input"], instructions=how["instructions"])
    assert counted.object == "response.input_tokens" and counted.input_tokens == whole.usage.input_tokens, counted
    tool = {"type": "function", "strict": False, **TOOL}
    history = [{"role": "user", "content": "x"}, {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
               {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "c", "output": "noon"}]
    assert c.responses.create(model="m", input=history, tools=[tool], max_output_tokens=2).usage.output_tokens == 2
    with c.responses.stream(model="m", input="x", tools=[tool], tool_choice="required", max_output_tokens=150, temperature=0) as stream:
        kinds = {e.type for e in stream}
    assert "response.output_item.added" in kinds
    try:
        c.responses.create(model="m", input="x", previous_response_id="resp_1")
        raise AssertionError("nothing is stored")
    except openai.BadRequestError as e:
        assert e.param == "previous_response_id"


def listed():
    """tests/data/request_fields.tsv has every field that the packages' methods take."""
    with open("tests/data/request_fields.tsv", encoding="utf-8") as f:
        rows = [line.split("\t") for line in f]
    column = {name: i for i, name in enumerate(rows[0])}
    for api, of, types in [
        ("chat", "openai", [openai.types.chat.completion_create_params.CompletionCreateParamsStreaming]),
        ("completions", "openai", [openai.types.completion_create_params.CompletionCreateParamsStreaming]),
        ("responses", "openai", [openai.types.responses.response_create_params.ResponseCreateParamsStreaming]),
        ("messages", "anthropic", [anthropic.types.message_create_params.MessageCreateParamsStreaming, anthropic.types.beta.message_create_params.MessageCreateParamsStreaming,
                                   anthropic.types.message_count_tokens_params.MessageCountTokensParams]),
    ]:
        fields = {name for t in types for name in t.__annotations__}
        known = {r[0] for r in rows if r[column[api]] != "." and of in r[column["of"]].split()}
        assert len(fields) > 10 and fields <= known, (api, fields - known)


listed()
for model, chat_format, thinks in (("tests/data/tiny-m2", "minimax-m2", True), ("tests/data/tiny-m1", "minimax-m1", False)):
    extra = NO_THINKING if thinks else {}
    with Server(convert(model), "--chat-format", chat_format, "--served-model-name", "m", "--api-key", "k") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0)
        claude = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="k", max_retries=0)
        chat(client, thinks)
        logprobs(client)
        schema(client, extra)
        form_or_call(client, server, extra)
        tools(client, extra)
        scripted(client, server, chat_format)
        openai_errors(client, server)
        cancellation(client, server)
        messages(claude, thinks)
        responses(client, thinks)
print(f"openai {openai.__version__} and anthropic {anthropic.__version__}: chat, streams, logprobs, schemas, tools, responses, errors, cancellation, counts")
