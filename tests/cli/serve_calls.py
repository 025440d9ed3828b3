#!/usr/bin/env python3
"""Calls of tools that minimax-serve begins, ends, cuts off or gives up: what a reply then says; biases beside constraints, schemas
without an end, and forms that are compiled once. The small checkpoints know no chat: what
they say is scripted by logit_bias and guided_choice. The tags of M2 are no special tokens, as in the released tokenizer."""
import concurrent.futures
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, comes_back, convert, turn_with_calls  # noqa: E402

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK = [{"role": "user", "content": "In the beginning"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
FLAT = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


WRONG = "<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ur\", \"odd\": NaN}}\n</tool_calls>"
RIGHT = "<tool_calls>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Ur\"}}\n</tool_calls>"
SCRIPT = f"\n\nSo.\n{BEGIN}\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Ur</parameter>\n</invoke>\n<invoke name=\"get_weather\">\n<parameter name=\"city\">Eridu <b></parameter>\n</invoke>\n{END}"


def changed(model, said=None):
    """The checkpoint with tags that are no special tokens; its last ordinary token is the text `said`."""
    path = os.path.join(TMP, "source", os.path.basename(model))
    shutil.copytree(model, path)
    with open(path + "/tokenizer.json", encoding="utf-8") as f:
        tokenizer = json.load(f)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"] and "tool_call" not in token["content"]
    if said:
        vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
        last = max(vocab, key=vocab.get)
        tokenizer["model"]["merges"] = [m for m in merges if "".join(m.split(" ") if isinstance(m, str) else m) != last]
        vocab[said.replace("\n", "\u010a").replace(" ", "\u0120")] = vocab.pop(last)
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


def streamed(s, path, body):
    """The events of a stream that ends without [DONE]."""
    _, _, data = s.request("POST", path, {**body, "stream": True})
    return [json.loads(x.split("data: ", 1)[1]) for x in data.decode().split("\n\n")[:-1]]


def calls(choice):
    return [(x["function"]["name"], x["function"]["arguments"]) for x in choice["message"].get("tool_calls") or []]


def begun_in_reasoning(s):
    """The model would only ever begin a call: one that is required, or that may stand for a form, is begun within the reasoning."""
    call = {"logit_bias": {str(id_of(s, BEGIN)): 100}}
    required = reply(s, tool_choice="required", **call)
    assert [x[0] for x in calls(required)] == ["get_weather"] and not required["message"].get("reasoning_content"), required
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER}}
    either = reply(s, response_format=form, **call)
    assert [x[0] for x in calls(either)] == ["get_weather"] and not either["message"].get("reasoning_content") and not either["message"]["content"], either
    # The tag that ends the reasoning so is behind it: a stop string acts on it, in every API.
    body = {"messages": ASK, "max_tokens": 60, "temperature": 0, **call}
    for stop, choice in ((BEGIN, "auto"), ("<", "required"), ("l>", "auto")):
        got = reply(s, stop=stop, tool_choice=choice, **call)
        assert (got["finish_reason"], got["stop_reason"]) == ("stop", stop) and got["message"]["content"] == "", got
    tools = [{"name": "get_weather", "input_schema": WEATHER}]
    got = s.post(MESSAGES, {**body, "tools": tools, "stop_sequences": [BEGIN]})
    assert (got["stop_reason"], got["content"]) == ("stop_sequence", []), got
    # A content of given texts is no call: none begins before it.
    given = reply(s, guided_choice=["In"], logit_bias={**call["logit_bias"], str(id_of(s, "</think>")): 50})
    assert given["message"]["content"] == "In" and not calls(given), given


def cut_off(s):
    """A stop string, or an id of the request, within a call cuts it off as the limit does; after a call it does not."""
    how = {"guided_choice": [SCRIPT], "logit_bias": {str(id_of(s, "</think>")): 100}, "max_tokens": 300}
    whole = reply(s, **how)
    assert whole["finish_reason"] == "tool_calls" and [json.loads(x[1])["city"] for x in calls(whole)] == ["Ur", "Eridu <b>"], whole
    token = next(x for x in s.post("/tokenize", {"prompt": "Eridu"})["tokens"] if s.post("/detokenize", {"tokens": [x]})["prompt"] in ("E", "Er", "Eri", "Erid", "Eridu"))
    for end in ({"stop": ["<b>"]}, {"stop": ["u <b"]}, {"stop_token_ids": [token]}):
        got = reply(s, **how, **end)
        first, second = calls(got)
        assert got["finish_reason"] == "stop" and first == calls(whole)[0] and second[1] and not second[1].endswith("}"), (end, got)
    first = reply(s, **how, stop="<b>")
    assert calls(first)[1][1] == '{"city": "Eridu ' and first["stop_reason"] == "<b>", first
    after = reply(s, **how, stop=END)
    assert after["finish_reason"] == "tool_calls" and calls(after) == calls(whole), after
    # Messages have no scripts: a call that is begun within the reasoning, then strokes, of which one is the end.
    stroke = id_of(s, "~")
    body = {"messages": ASK, "max_tokens": 60, "tools": [{"name": "get_weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}, "temperature": 0,
            "logit_bias": {str(id_of(s, BEGIN)): 100, str(stroke): 80}, "frequency_penalty": 2}
    for end, reason in (({"stop_token_ids": [stroke]}, "end_turn"), ({"stop_sequences": ["~"]}, "stop_sequence")):
        got = s.post(MESSAGES, {**body, **end})
        assert got["stop_reason"] == reason and [x["input"] for x in got["content"] if x["type"] == "tool_use"] == [{}], got
    body = {"input": "In the beginning", "max_output_tokens": 60, "tools": FLAT, "tool_choice": "required", **{k: body[k] for k in ("temperature", "logit_bias", "frequency_penalty")}}
    for end in ({"stop_token_ids": [stroke]}, {"stop": ["~"]}, {}):
        got = s.post(RESPONSES, {**body, **end})
        assert [x["status"] for x in got["output"] if x["type"] == "function_call"] == ["incomplete"], got
        events = streamed(s, RESPONSES, {**body, **end})
        ended = [x["item"]["status"] for x in events if x["type"] == "response.output_item.done" and x["item"]["type"] == "function_call"]
        done = [(x["name"], x["arguments"]) for x in events if x["type"] == "response.function_call_arguments.done"]
        call = [(x["name"], x["arguments"]) for x in events[-1]["response"]["output"] if x["type"] == "function_call"]
        assert ended == ["incomplete"] and len(done) == 1 and done == call, events


def back(s):
    """The tokens of a reply with calls stand in the next turn's prompt, with reasoning and without. Those of a reply that the request began do not: without
    the request's part they are not what the message's tokens were."""
    think = {"logit_bias": {str(id_of(s, "</think>")): 100}}
    how = {"messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 300, "guided_choice": [SCRIPT]}
    comes_back(s, {**how, **think})
    comes_back(s, {**how, "chat_template_kwargs": {"enable_thinking": False}})
    # A reply that its one call ends lacks the end of the block, which the next prompt has.
    for i, form in enumerate(({}, {"guided_choice": [SCRIPT.replace("</invoke>\n", "</invoke>")]})):
        comes_back(s, {**how, **think, **form, "messages": [{"role": "user", "content": f"And {i}"}], "parallel_tool_calls": False})
    begun = {"messages": [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Hm, hm."}], "add_generation_prompt": False, "continue_final_message": True}
    _, next_turn = turn_with_calls(s, {**how, **think, **begun})

    def unknown(message):
        for i, call in enumerate(message["tool_calls"]):
            call["id"] = f"unknown-{i}"

    assert next_turn()["prompt_tokens"] == next_turn(unknown)["prompt_tokens"]


def cut_before_name(s, **how):
    """A required call that the limit cuts off before its name is whole leaves no content."""
    for n in range(1, 14):
        got = reply(s, tool_choice="required", max_tokens=n, **how)
        assert got["finish_reason"] == "length" and not got["message"]["content"], (n, got)


def one_call(s):
    """With parallel_tool_calls false nothing behind the one call is content, and equal requests have equal replies, alone and in a crowd."""
    body = {"messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 300, "guided_choice": [SCRIPT], "logit_bias": {str(id_of(s, "</think>")): 100},
            "parallel_tool_calls": False}

    def ask(_):
        got = s.post(CHAT, body)
        choice, = got["choices"]
        return calls(choice), choice["message"]["content"], choice["finish_reason"], got["usage"]["completion_tokens"]

    alone = ask(0)
    assert alone[:3] == ([("get_weather", '{"city": "Ur"}')], "So.", "tool_calls"), alone
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(map(repr, pool.map(ask, range(24)))) == {repr(alone)}
    streamed_one = reply(s, **body)
    assert calls(streamed_one) == alone[0], streamed_one


def stops_behind_reasoning(s):
    """A stop string acts behind the reasoning, in every API; newlines that the template puts there are none of the reply."""
    stroke, end = str(id_of(s, "~")), str(id_of(s, "</think>"))
    how = {"temperature": 0, "logit_bias": {stroke: 80, end: 60}, "frequency_penalty": 2}
    plain = reply(s, guided_choice=["I~H"], **how)["message"]
    assert plain["content"] == "I~H" and set(plain["reasoning_content"]) == {"~"}, plain
    got = reply(s, guided_choice=["I~H"], stop="~", **how)
    assert got["message"]["content"] == "I" and got["message"]["reasoning_content"] == plain["reasoning_content"], got
    assert got["finish_reason"] == "stop" and got["stop_reason"] == "~", got
    lines = reply(s, guided_choice=["\n\nI\n\nH"], stop="\n\n", **how)
    assert lines["message"]["content"] == "I" and lines["stop_reason"] == "\n\n", lines
    # Control tokens in the reasoning are not shown, and are tokens of it.
    hidden = s.post(CHAT, {"messages": ASK, "max_tokens": 5, "temperature": 0, "logit_bias": {str(id_of(s, "]~b]")): 100}})
    assert "reasoning_content" not in hidden["choices"][0]["message"] and hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5, hidden
    never = {"temperature": 0, "logit_bias": {stroke: 100}}
    assert reply(s, stop=["~", "~~"], **never)["finish_reason"] == "length"
    got = s.post(RESPONSES, {"input": "x", "max_output_tokens": 20, "stop": "~", **never})
    assert got["status"] == "incomplete" and got["output"][0]["content"][0]["text"] == "~" * 20, got
    got = s.post(MESSAGES, {"messages": ASK, "max_tokens": 20, "stop_sequences": ["~"], **never})
    assert got["stop_reason"] == "max_tokens" and got["content"][0]["thinking"] == "~" * 20, got
    got = s.post("/v1/completions", {"prompt": "x", "max_tokens": 20, "stop": "~", **never})["choices"][0]
    assert got["finish_reason"] == "stop" and got["text"] == "", got


def biased(s):
    """A bias of -100 forbids nothing that alone may follow; what is allowed beside it comes before it."""
    call = str(id_of(s, BEGIN))
    got = reply(s, tool_choice="required", logit_bias={str(id_of(s, "</think>")): 100, call: -100})
    assert [x[0] for x in calls(got)] == ["get_weather"], got
    for seed in range(4):
        how = {"guided_choice": ["I", "H"], "temperature": 1e6, "seed": seed}
        for never, said in (("I", "H"), ("H", "I"), ("IH", "IH")):
            got = reply(s, logit_bias={call: -100, **{str(id_of(s, x)): -100 for x in never}}, chat_template_kwargs={"enable_thinking": False}, **how)
            assert got["message"]["content"] in list(said), (never, got)


def white_space_held(s, reasons):
    """White space that the content is held to is in the content, also directly behind the reasoning and where nothing else is; tags in it are text."""
    end = {"logit_bias": {str(id_of(s, "</think>")): 100}} if reasons else {}
    for form, texts in (({"regex": "\n\nI"}, ["\n\nI"]), ({"grammar": 'root ::= "\\n"'}, ["\n"]), ({"guided_choice": [" ", "\n"]}, [" ", "\n"]),
                        ({"regex": "<think>I</think>H"}, ["<think>I</think>H"])):
        for how in (end, {"chat_template_kwargs": {"enable_thinking": False}})[:1 + reasons]:
            got = reply(s, tools=[], **form, **how)
            assert got["message"]["content"] in texts and got["finish_reason"] == "stop", (form, got)
    if reasons:
        got = reply(s, tools=[], regex="\n\nI", stop="\n\n", **end)
        assert (got["message"]["content"], got["stop_reason"]) == ("", "\n\n"), got


def unserved(s):
    """A call that must be made, or of a strict tool, is held to the whole schema, or the request is refused by the tool and the keyword."""
    odd = {"type": "object", "properties": {"city": {"type": "string", "pattern": "(?<=a)b"}}}

    def ask(strict, **how):
        tools = [*TOOLS, {"type": "function", "function": {"name": "odd one", "parameters": odd, "strict": strict}}]
        status, _, data = s.request("POST", CHAT, {"messages": ASK, "tools": tools, "max_tokens": 1, **how})
        return status, data.decode()

    for strict, how in ((True, {}), (False, {"tool_choice": "required"}), (None, {"tool_choice": {"type": "function", "function": {"name": "odd one"}}})):
        status, text = ask(strict, **how)
        assert status == 400 and "odd one" in text and "pattern" in text, (status, text)
    assert ask(False)[0] == 200 and ask(True, tool_choice="none")[0] == 200
    assert ask(False, tool_choice={"type": "function", "function": {"name": "get_weather"}})[0] == 200
    status, text = ask("yes")
    assert status == 400 and "strict" in text, text
    beside = {"type": "function", "function": {"name": "odd one", "parameters": odd}, "strict": True}
    assert "odd one" in s.post(CHAT, {"messages": ASK, "tools": [beside], "max_tokens": 1}, 400)["error"]["message"]


def endless(s):
    """A schema of values that never end is the client's fault, whole and within a stream."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    dense = {str(id_of(s, x)): 100 for x in '{"a:'}  # no blanks
    body = {"messages": ASK, "temperature": 0, "max_tokens": 600, "logit_bias": dense, "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    error = s.post(CHAT, body, 400)["error"]
    assert "schema" in error["message"] and error["type"] == "invalid_request_error", error
    assert "schema" in s.post(CHAT, {**body, "max_tokens": 300, "ignore_eos": True}, 400)["error"]["message"]
    _, _, data = s.request("POST", CHAT, {**body, "stream": True})
    last = json.loads(data.decode().rstrip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == error["message"] and last["error"]["type"] == error["type"], last
    body = {"messages": ASK, "temperature": 0, "max_tokens": 600, "logit_bias": dense, "thinking": {"type": "disabled"}, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert s.post(MESSAGES, body, 400)["error"]["type"] == "invalid_request_error"


def refused_among_others(s):
    """Of two choices one gets stuck, which is the answer: the other, a long text, goes no further."""
    loop = {"type": "array", "items": {"$ref": "#/$defs/loop"}, "minItems": 1}
    schema = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string", "minLength": 900}], "$defs": {"loop": loop}}
    body = {"messages": ASK, "temperature": 5, "n": 2, "max_tokens": 900, "logit_bias": {str(id_of(s, x)): 100 for x in '["'},
            "chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for seed in range(8):
        if s.metrics()['finished_total{reason="cancelled"}']:
            return
        s.request("POST", CHAT, {**body, "seed": seed})
    raise AssertionError(s.get("/metrics"))


def gone_wrong(s):
    """A call of M1 whose arguments turn out to be no JSON is not offered; one beside it is."""
    for script, good in ((WRONG, 0), (RIGHT, 1), (RIGHT + "\n" + WRONG, 1), (WRONG + "\n" + RIGHT, 1)):
        got = reply(s, guided_choice=[script], max_tokens=400)
        assert got["finish_reason"] == ("tool_calls" if good else "stop"), got
        assert calls(got) == [("get_weather", '{"city": "Ur"}')] * good and ("NaN" in (got["message"]["content"] or "")) == (WRONG in script), got
    last = s.post("/v1/completions", {"prompt": [2043], "echo": True, "max_tokens": 1})["choices"][0]["text"]
    assert last.startswith(WRONG), last
    body = {"messages": ASK, "max_tokens": 60, "tools": [{"name": "get_weather", "input_schema": WEATHER}], "temperature": 0, "frequency_penalty": 2,
            "logit_bias": {"2043": 60, str(id_of(s, "<end_of_sentence>")): 50}}
    got = s.post(MESSAGES, body)
    assert got["stop_reason"] == "end_turn" and {x["type"] for x in got["content"]} == {"text"} and "NaN" in got["content"][0]["text"], got
    _, _, data = s.request("POST", MESSAGES, {**body, "stream": True})
    assert b'"stop_reason":"end_turn"' in data and b'"partial_json"' in data, data
    body = {"input": "In the beginning", "max_output_tokens": 60, "tools": FLAT, **{k: body[k] for k in ("temperature", "logit_bias", "frequency_penalty")}}
    got = s.post(RESPONSES, body)
    assert got["status"] == "completed" and {x["type"] for x in got["output"]} == {"message"}, got
    events = streamed(s, RESPONSES, body)
    kinds = [x["type"] for x in events]
    assert events[-1]["response"]["output"] and {x["type"] for x in events[-1]["response"]["output"]} == {"message"}, events
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" not in kinds, events
    # What follows it is cut off, the call is not.
    for script, good in ((WRONG, 0), (RIGHT + "\n" + WRONG, 1)):
        got = reply(s, guided_choice=[script + "\nAnd then more"], max_tokens=400, stop="more")
        assert calls(got) == [("get_weather", '{"city": "Ur"}')] * good and got["finish_reason"] == ("tool_calls" if good else "stop"), got
    # Of one call alone the first that is whole is it.
    for script in (RIGHT + "\n" + RIGHT, RIGHT + "\n" + WRONG, WRONG + "\n" + RIGHT, WRONG + "\n" + RIGHT + "\n" + RIGHT):
        got = reply(s, guided_choice=[script], max_tokens=500, parallel_tool_calls=False)
        assert calls(got) == [("get_weather", '{"city": "Ur"}')] and got["finish_reason"] == "tool_calls", got
    # A stop string counts in a reply that ends, by itself or by the limit, within what may begin a tag.
    for how in ({"guided_choice": ["\n<th"]}, {"guided_choice": ["<think "], "max_tokens": 2}):
        got = reply(s, stop="<", **how)
        assert (got["message"]["content"], got["finish_reason"], got["stop_reason"]) == ("", "stop", "<"), got


def said_again(s):
    """A call of M1 that gives its arguments or its name twice: a whole reply has the last ones, a stream and its last event the first."""
    again = RIGHT.replace('"Ur"}', '"Ur"}, "name": "get_weather", "arguments": {"city": {"x": 1, "x": 2}}')
    got = reply(s, guided_choice=[again], max_tokens=400)
    assert calls(got) == [("get_weather", '{"city": {"x": 2}}')] and got["finish_reason"] == "tool_calls", got
    events = s.events(CHAT, {"messages": ASK, "tools": TOOLS, "guided_choice": [again], "max_tokens": 400})
    pieces = [x["function"] for e in events for c in e["choices"] for x in c["delta"].get("tool_calls") or []]
    assert "".join(x.get("arguments", "") for x in pieces) == '{"city": "Ur"}', pieces


def compiled_once(s):
    """A schema, a grammar or a required call that an earlier request had is not compiled again; the reply is the same."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}}, "required": ["n", "s"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    held = ({"response_format": form}, {"guided_regex": "[a-f]{1,9}"}, {"grammar": 'root ::= "a" | "b" root'}, {"tools": tools, "tool_choice": "required"},
            {"tools": [{**tools[0], "function": {**tools[0]["function"], "strict": True}}]})
    body = {"messages": ASK, "max_tokens": 24, "temperature": 1.5, "seed": 7, "chat_template_kwargs": {"enable_thinking": False}}

    def message(how):
        got, = s.post(CHAT, {**body, **how})["choices"]
        for call in got["message"].get("tool_calls") or []:
            del call["id"]
        return got

    found = []
    for turn in (0, 1):
        before = s.metrics()
        found.append([message(how) for how in held])
        after = s.metrics()
        changes = [after[f"form_cache_{name}"] - before[f"form_cache_{name}"] for name in ("misses_total", "hits_total", "forms")]
        assert changes == ([0, len(held), 0] if turn else [len(held), 0, len(held)]), (turn, changes)
    assert found[0] == found[1], found
    values = s.metrics()
    assert 0 < values["form_cache_bytes"] <= values["form_cache_bytes_max"] == 1 << 26, values


with Server(changed("tests/data/tiny-m2"), "--chat-format", "minimax-m2", "--max-model-len", "1024") as server:
    begun_in_reasoning(server)
    cut_off(server)
    back(server)
    cut_before_name(server, chat_template_kwargs={"enable_thinking": False})
    one_call(server)
    stops_behind_reasoning(server)
    biased(server)
    white_space_held(server, True)
    unserved(server)
    endless(server)
    refused_among_others(server)
    compiled_once(server)
with Server(changed("tests/data/tiny-m1", WRONG), "--chat-format", "minimax-m1", "--max-model-len", "1024") as server:
    gone_wrong(server)
    said_again(server)
    cut_before_name(server)
    white_space_held(server, False)
    unserved(server)
print("calls begun in the reasoning, cut off, gone wrong; biases, schemas without an end; forms that are compiled once")
