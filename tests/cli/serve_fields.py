#!/usr/bin/env python3
"""Every field of requests that tests/data/request_fields.tsv lists, sent to every API of minimax-serve: a served one changes the reply and is
refused by its name where its type is wrong; a refused one is refused by its name, unless it asks for nothing; what has no effect and what
nobody knows leaves the reply as it is. docs/request-fields.md is what the tables say (--write makes it). Schemas beside json_object, template
arguments in all chat APIs, and the status of cut replies."""
import copy
import itertools
import json
import os
import re
import subprocess
import sys

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, Server, convert  # noqa: E402

USER = [{"role": "user", "content": "In the beginning"}]
APIS = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "temperature": 0}),
    "completions": ("/v1/completions", {"prompt": "In the beginning", "max_tokens": 4, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "In the beginning", "max_output_tokens": 4, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 4, "temperature": 0}),
}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
# Values of the right type show no difference in a reply of few tokens: other tests have them.
QUIET = {"cache_salt", "priority", "timeout", "parallel_tool_calls", "tool_choice.disable_parallel_tool_use", "tools.strict", "tools.function.strict"}

PAGE = "docs/request-fields.md"
SAID = {}


def rows():
    with open("tests/data/request_fields.tsv", encoding="utf-8") as f:
        names = f.readline().rstrip("\n").split("\t")
        for line in f:
            row = dict(zip(names, line.rstrip("\n").split("\t"), strict=True))
            yield {**row, **{k: json.loads(row[k]) if row[k] else None for k in ("value", "nothing", "with")}}


def with_field(body, name, value):
    """The body with a field set, of which a dotted one lies within objects."""
    body = copy.deepcopy(body)
    *outer, last = name.split(".")
    place = body
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = value
    return body


def essence(value):
    """A reply without what differs from one request to the next."""
    if isinstance(value, list):
        return [essence(v) for v in value]
    if isinstance(value, dict):
        names = ("id", "item_id", "call_id", "created", "created_at", "request_id", "signature", "metadata", "instructions", "tools", "tool_choice",
                 "prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens")
        whole = {"input_tokens": value["input_tokens"] + value["cache_read_input_tokens"]} if "cache_read_input_tokens" in value else {}
        return {**{k: essence(v) for k, v in value.items() if k not in names}, **whole}
    return value


def ask(s, path, body):
    """(status, what the reply says), of a stream its events. All requests are sent over one connection, and none is sent again."""
    text = json.dumps(body)
    if (path, text) not in SAID:
        SAID[path, text] = said(s, path, text)
    return SAID[path, text]


def said(s, path, text):
    s.one = getattr(s, "one", None) or s.connect()
    s.one.request("POST", path, text)
    response = s.one.getresponse()
    status, headers, data = response.status, response.headers, response.read()
    if not headers["content-type"].startswith("text/event-stream"):
        return status, essence(json.loads(data))
    lines = [x[6:] for x in data.decode().splitlines() if x.startswith("data: ")]
    return status, [essence(json.loads(x)) for x in lines if x != "[DONE]"]


def refusal(s, path, body, name, where):
    status, reply = ask(s, path, body)
    error = reply.get("error", {}) if isinstance(reply, dict) else {}
    said = error.get("message", "")
    assert status == (404 if name == "model" and "model" in said and isinstance(body["model"], str) else 400), (where, status, reply)
    assert name in said or error.get("param") == name or (name == "prompt" and "the prompt is empty" in said), (where, error)
    if "param" in error:
        assert error["param"] == name.split(".")[0], (where, error)


def served(s, row, path, body):
    name, where = row["field"], (row["field"], path)
    if row["value"] is not None:
        assert ask(s, path, with_field(body, name, row["value"])) != ask(s, path, body), where
    else:
        assert name in QUIET, where
    if "." not in name:
        refusal(s, path, {**body, name: [[]]}, name, where)


def refused(s, row, path, body):
    name, where = row["field"], (row["field"], path)
    assert row["value"] is not None, where
    refusal(s, path, with_field(body, name, row["value"]), name, where)
    if path == APIS["messages"][0]:
        counted = {k: v for k, v in body.items() if k not in ("max_tokens", "temperature")}
        refusal(s, path + "/count_tokens", with_field(counted, name, row["value"]), name, where)


def unchanged(s, path, base, fields):
    """Fields that have no effect have none together. If they do, one of them does alone."""
    want = ask(s, path, base)
    assert want[0] == 200, want
    if ask(s, path, {**base, **fields}) != want:
        for name, value in fields.items():
            assert ask(s, path, {**base, name: value}) == want, (path, name, value)
        raise AssertionError((path, "fields that have no effect alone"))


def drafts(s):
    """The reply does not depend on proposals; usage has their numbers where the request names them."""
    body = {**APIS["completions"][1], "max_tokens": 60, "ignore_eos": True}
    plain = s.post("/v1/completions", body)
    assert "num_draft_tokens" not in json.dumps(plain)
    for value, most in ((False, 0), (0, 0), (True, 420), (2, 120)):
        got = s.post("/v1/completions", {**body, "speculative": value})
        usage = got["usage"]["completion_tokens_details"]
        proposed, right = usage["num_draft_tokens"], usage["num_accepted_tokens"]
        assert got["choices"][0]["text"] == plain["choices"][0]["text"] and right <= proposed <= most, (value, usage)
        assert (proposed > 0) == (most > 0), (value, usage)


def by_default():
    """A server proposes what followed before, and its replies are those of one that does not; nothing is said of a model that cannot."""
    repeated = {"prompt": "the cat sat on the mat and the dog sat on the rug; " * 6, "max_tokens": 100, "ignore_eos": True}
    found = []
    for options in ((), ("--drafts", "auto"), ("--drafts", "0")):
        with Server(checkpoint, "--max-model-len", "512", *options) as s:
            found.append([s.post("/v1/completions", {**repeated, **more})["choices"] for more in ({"temperature": 0}, {"temperature": 1, "seed": 5, "logprobs": 1})])
            proposed = s.metrics()["drafted_tokens_total"]
            assert (proposed > 0) == ("proposals: up to 7 tokens" in open(s.log).read()) == (options != ("--drafts", "0")), (options, proposed)
    assert found[0] == found[1] == found[2], found
    with Server(convert("tests/data/tiny-m1"), "--max-model-len", "512") as s:
        assert "propos" not in open(s.log).read()
    refused = subprocess.run([f"{BIN}/minimax-serve", checkpoint, "--drafts", "8"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "--drafts" in refused.stderr and "auto" in refused.stderr, refused


def all_fields(s):
    table = list(rows())
    for api, (path, base) in APIS.items():
        nothing, null, idle = {}, {}, {"no_such_field": [{"a": 1}]}
        for row in table:
            fate, body = row[api], {**base, **(row["with"] or {})}
            if fate == "served":
                served(s, row, path, body)
            elif fate == "refused":
                refused(s, row, path, body)
                null[row["field"]] = None
                if row["nothing"] is not None:
                    nothing[row["field"]] = row["nothing"]
            elif fate == "none":
                assert row["why"], row
                if "." not in row["field"] and not row["with"]:
                    idle[row["field"]] = row["value"]
                elif row["value"] is not None:
                    assert ask(s, path, with_field(body, row["field"], row["value"])) == ask(s, path, body), (row["field"], path)
            else:
                assert fate == ".", row
        for fields in (nothing, null, idle):
            unchanged(s, path, base, fields)


def every_field_in_every_api():
    """A field has one fate in each API, on one of its rows."""
    fates = {}
    for row in rows():
        for api in APIS:
            if row[api] != ".":
                assert (row["field"], api) not in fates, row
                fates[row["field"], api] = row[api]
    for name in {n for n, _ in fates if "." not in n}:
        assert all((name, api) in fates for api in APIS), name


def documented():
    """docs/serving.md has a row for each served field, and no other."""
    with open("docs/serving.md", encoding="utf-8") as f:
        section = re.search(r"\n## Fields\n(.*?)\n## ", f.read(), re.S).group(1)
    named = set(re.findall(r"`(\w+(?:\.\w+)*)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M))))
    fates = {}
    for row in rows():
        fates.setdefault(row["field"], set()).update(row[api] for api in APIS)
    served_names = {n for n, f in fates.items() if "served" in f}
    assert named <= served_names and {n for n in served_names if "." not in n} <= named, named ^ served_names


def page(said):
    """docs/request-fields.md: each field, what becomes of it in each API, and the server's own words for what is served in its place."""
    words = {"served": "served", "refused": "refused", "none": "no effect"}
    schemas = [said["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path, _ in APIS.values()]
    instead = {name: x["description"] for schema in schemas for name, x in schema["x-refused"].items()}
    table = {}
    for row in rows():
        cells, why = table.setdefault(row["field"], ({}, []))
        cells.update({api: words[row[api]] for api in APIS if row[api] != "."})
        if row["why"] and row["why"] not in why:
            why.append(row["why"])
    for name, (cells, _) in table.items():  # the server says the same of those that are no parts of others
        for api, schema in zip(APIS, schemas, strict=True):
            place = {"served": "properties", "refused": "x-refused", "no effect": "x-without-effect"}.get(cells.get(api))
            assert "." in name or (place and name in schema[place]), (name, api, cells)
    assert all(set(x) <= set(table) for schema in schemas for x in (schema["properties"], schema["x-refused"], schema["x-without-effect"]))
    lines = [f"| `{name}` | " + " | ".join(cells.get(api, "") for api in APIS) + " | "
             + "; ".join([instead[name]] + why if name in instead else why).replace("|", "\\|") + " |" for name, (cells, why) in table.items()]
    return """# Fields of requests

The treatment of each field of the APIs of OpenAI, Anthropic, vLLM, SGLang and llama.cpp. The tables are the server's own: `/openapi.json` has them, and
`tests/cli/serve_fields.py --write` makes this page from it. A refused field is status 400 with its name, unless it is null or has a value that
asks for nothing, as `"min_tokens": 0`. A field that is not listed is ignored. A dot leads into an object. How served ones work: [serving.md](serving.md#fields).

| field | chat | completions | responses | messages | served in its place, or why it has no effect |
|---|---|---|---|---|---|
""" + "\n".join(lines) + "\n"


def nothings(s):
    """The edges of values that ask for nothing."""
    path, base = APIS["completions"]
    for name, taken, not_taken in [
        ("min_tokens", [0, 0.0, None], [1, False, "", [], "0"]), ("n_predict", [-1], [0, True, "-1"]), ("t_max_predict_ms", [0, -1], [1, False]),
        ("typical_p", [1, 1.0], [0.99, True, "1"]), ("bad_words", [[], "", {}], [[""], 0, False]), ("use_beam_search", [False], [0, True, "false"]),
        ("parse_tool_calls", [True], [1, False]), ("best_of", [1], [2, 0, "1"]),
        ("tool_choice", ["auto", "none"], ["", "auto none", "aut", "no", {}]),
        ("response_format", [{"type": "text"}],
         [{}, "text", {"type": "json_object"}, {"type": "structural_tag", "format": {}}, {"type": "grammar", "grammar": "x"}]),
        ("modalities", [["text"], []], ["text", ["text", "audio"], [1]]),
        ("include", [[], ["a"]], ["message.output_text.logprobs", ["a", "message.output_text.logprobs"]]),
        ("thinking", [True, {"type": "enabled"}, {"type": "adaptive"}], [False, {}, {"type": "disabled"}, {"type": 1}]), ("suffix", [""], ["a", 1]),
        ("repeat_last_n", [0, 64, -1], ["64", True, []]), ("reasoning_format", ["auto", "deepseek"], ["none", "deepseek-legacy"]),
    ]:
        for value in taken:
            assert ask(s, path, {**base, name: value})[0] == 200, (name, value)
        for value in not_taken:
            refusal(s, path, {**base, name: value}, name, (name, value))
    assert ask(s, path, {**base, "n": 2, "best_of": 2})[0] == 200
    refusal(s, path, {**base, "n": 2, "best_of": 1}, "best_of", "best_of")
    # A window of penalties asks for nothing where nothing is penalised.
    assert ask(s, path, {**base, "repeat_last_n": 64, "repetition_penalty": 1.0, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0.0})[0] == 200
    for penalty in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -1}):
        refusal(s, path, {**base, "repeat_last_n": 64, **penalty}, "repeat_last_n", penalty)
    # Of equal keys the last value counts.
    for last, status in (("1", 400), ("0", 200)):
        body = '{"prompt": "a", "max_tokens": 1, "min_tokens": %d, "min_tokens": %s}' % (1 - int(last), last)
        assert s.request("POST", path, body)[0] == status, last


def formats(s):
    """A schema beside the type json_object, or beside json_schema without an object of its own, is kept to as the one of OpenAI's form is."""
    path, base = APIS["chat"]
    schema = {"type": "object", "properties": {"Ur": {"enum": [17, 31]}}, "required": ["Ur"], "additionalProperties": False}
    forms = [{"type": "json_object", "schema": schema}, {"type": "json_schema", "schema": schema},
             {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}]
    for form in forms:
        body = {**base, **NO_THINKING, "max_tokens": 100, "temperature": 2, "seed": 1, "response_format": form}
        text = s.post(path, body)["choices"][0]["message"]["content"]
        assert re.match(r'\s*\{\s*"Ur"\s*:\s*(17|31)', text), (form, text)
    for form in ({"type": "json_object", "json_schema": {"schema": schema}}, {**forms[1], "json_schema": {"schema": schema}},
                 {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}, {"schema": schema}, {"type": 1}, {},
                 {"type": "json_object", "schema": {"type": "strange"}},
                 {"type": "structural_tag", "structures": [], "triggers": []}, {"type": "json_schema", "json_schema": [schema]}):
        assert s.request("POST", path, {**base, "response_format": form})[0] == 400, form


def excluded(s):
    """OpenRouter's reasoning.exclude: the model reasons, and the reply has what follows alone, with the same tokens."""
    shut = {"thinking_token_budget": 5, "temperature": 1, "seed": 3}
    path, base = APIS["chat"]
    base = {**base, **shut, "max_tokens": 20}
    want, got, none = (s.post(path, {**base, **more}) for more in ({}, {"reasoning": {"exclude": True}}, {"reasoning": {"exclude": False}, "include_reasoning": False}))
    say = lambda r: (r["choices"][0]["message"]["content"], r["usage"]["completion_tokens"], r["usage"]["completion_tokens_details"]["reasoning_tokens"])
    assert say(want) == say(got) == say(none) and say(want)[2] > 0, (want, got)
    assert "reasoning" in want["choices"][0]["message"] and not any("reasoning" in k for r in (got, none) for k in r["choices"][0]["message"])
    deltas = [c["delta"] for e in s.events(path, {**base, "reasoning": {"exclude": True}}) for c in e["choices"]]
    assert not any("reasoning" in d for d in deltas) and "".join(d.get("content") or "" for d in deltas) == say(want)[0]
    path, base = APIS["responses"]
    base = {**base, **shut, "max_output_tokens": 20}
    want, got = (s.post(path, {**base, **more}) for more in ({}, {"reasoning": {"exclude": True, "effort": "high"}}))
    assert [x["type"] for x in want["output"]] == ["reasoning", "message"] and [x["type"] for x in got["output"]] == ["message"], got
    assert got["output"][0]["content"] == want["output"][1]["content"] and got["usage"]["output_tokens_details"] == want["usage"]["output_tokens_details"]


def within(s):
    """Fields within messages, items and choices of tools that bind a reply elsewhere, and two that would bind it at once."""
    chat, base = APIS["chat"]
    responses, flat = APIS["responses"]
    anthropic, own = APIS["messages"]
    f, flat_f = [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}]

    def turn(**said):
        return {**base, "messages": [*USER, {"role": "assistant", "content": None, **said}, *USER]}

    call = {"name": "f", "arguments": "{}"}
    for path, body, name in [
        (chat, turn(function_call=call), "function_call"), (chat, turn(audio={"id": "a"}), "audio"),
        (chat, turn(reasoning_content=["hm"]), "reasoning_content"), (chat, turn(reasoning=7), "reasoning"),
        (chat, turn(refusal=["no"]), "refusal"), (chat, turn(reasoning_details="hm"), "reasoning_details"),
        (chat, turn(reasoning_details=[{"data": "hm"}]), "reasoning_details"), (chat, {**base, "thinking": {"type": "on"}}, "thinking"),
        (APIS["messages"][0], {**APIS["messages"][1], "thinking": {"type": "on"}}, "thinking"),
        (chat, {**base, "guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
        (chat, {**base, "tools": f, "tool_choice": {"type": "mcp", "function": {"name": "f"}}}, "tool_choice"),
        (responses, {**flat, "tools": flat_f, "tool_choice": {"type": "allowed_tools", "name": "f"}}, "tool_choice"),
        (responses, {**flat, "input": [{"role": "assistant", "type": "computer_call", "content": "x"}, *USER]}, "input"),
        (responses, {**flat, "reasoning": {"effort": 5}}, "effort"), (responses, {**flat, "reasoning": {"enabled": 0}}, "enabled"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "with_pieces": 1}, "with_pieces"), ("/tokenize", {"prompt": "x", "messages": USER}, "messages"),
        ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/tokenize", {"content": "x", "tools": f}, "tools"), ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ("/tokenize", {"prompt": "a", "content": "b b b"}, "content: not next to prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, 'prompt: found "a", expected ids'), ("/v1/completions", {"prompt": [1.5]}, "prompt: found 1.5, expected ids"),
        ("/v1/completions", {"prompt": [["a"]]}, 'prompt: found "a", expected ids'), (chat, turn(content=[{"type": "te\0xt", "text": "x"}]), "te\\x00xt"),
        (chat, turn(tool_calls=[{"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"a":' + "[" * 300 + "]" * 300 + "}"}}]), "at most 256 levels"),
        ("/tokenize", {}, "prompt"), ("/tokenize", {"messages": USER, "chat_template": "x"}, "chat_template"),
        (chat + "/input_tokens", {"messages": USER, "min_tokens": 1}, "min_tokens"), (responses + "/input_tokens", {"input": "x", "messages": USER}, "messages"),
        ("/detokenize", {"tokens": [5], "skip_special_tokens": True}, "skip_special_tokens"),
        (chat, {**base, "messages": [{**USER[0], "tool_calls": [{"function": call}]}]}, "tool_calls is no field of such a message"),
        (chat, {**base, "messages": [{"role": "system", "content": "x", "reasoning_content": "y"}, *USER]}, "reasoning_content is no field"),
        (responses, {**flat, "input": [*USER, {"role": "assistant", "content": "x", "tool_calls": [{"function": call}]}, *USER]}, "tool_calls is no field"),
        (responses, {**flat, "input": [{**USER[0], "type": "message", "tools": f}]}, "give tools in the request"),
        (anthropic, {**own, "messages": [*USER, {"role": "assistant", "content": "x", "tool_calls": [{"function": call}]}, *USER]}, "blocks of the types"),
        (anthropic, {**own, "messages": [{**USER[0], "tools": f}]}, "give tools in the request"),
        (anthropic, {**own, "tools": [{"name": "f", "parameters": {}}]}, "found parameters, expected input_schema"),
        (chat, {**base, "tools": [{**f[0], "parameters": {}}]}, "found parameters, expected function.parameters"),
        (chat, {**base, "tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]}, "found input_schema, expected function"),
        (responses, {**flat, "tools": [{**flat_f[0], "input_schema": {}}]}, "found input_schema, expected parameters"),
        (responses, {**flat, "tools": [{**flat_f[0], "function": {}}]}, "found function, expected parameters"),
        (anthropic, {**own, "output_config": {"type": "json_schema", "schema": {"const": 1}}}, "output_config: found type, expected it within format"),
        (responses, {**flat, "text": {"schema": {"const": 1}}}, "text: found schema, expected it within format"),
        (responses, {**flat, "text": {"format": {"type": "text", "schema": {"const": 1}}}}, "text: found a schema next to the type text"),
        (chat, {**base, "response_format": {"type": "text", "json_schema": {"name": "x", "schema": {"const": 1}}}}, "found a schema next to the type text"),
        (chat, turn(prefix=True), "prefix of a message is not served, continue_final_message"), (chat, turn(partial=True), "partial of a message"),
        (chat, {**base, "messages": [{**USER[0], "images": ["aGk="]}]}, "images is no field of such a message here, texts"),
        (anthropic, {**own, "messages": [{**USER[0], "images": ["aGk="]}]}, "images is no field"),
        (anthropic, {**own, "tools": [{"name": "f", "inputSchema": {}}]}, "found inputSchema, expected input_schema"),
        (responses, {**flat, "tools": [{**flat_f[0], "inputSchema": {}}]}, "found inputSchema, expected parameters"),
        (chat, {**base, "tools": [{"type": "function", "function": {"name": "f", "inputSchema": {}}}]}, "found inputSchema, expected function"),
        (anthropic, {**own, "system": 1}, "system: found a number"), (anthropic, {**own, "system": [{"type": "image"}]}, 'system: content of type "image"'),
        (anthropic, {**own, "messages": [{"role": "tool", "content": "x"}]}, "expected user, assistant or system"),
        (anthropic, {**own, "output_config": {"format": {"type": "text", "regex": "a"}}}, "output_config.regex: not served there"),
        (responses, {**flat, "text": {"format": {"type": "text", "grammar": "root ::= \"a\""}}}, "text.grammar: not served there"),
        (anthropic, {**own, "tools": [{"name": "f"}], "tool_choice": {"type": "auto", "name": "f"}}, "tool_choice: found name"),
        (anthropic, {**own, "tools": [{"name": "f"}], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice: found name"),
        (anthropic, {**own, "tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f", "function": {"name": "f"}}}, "tool_choice: found function"),
        (anthropic, {**own, "tools": [{"name": "f"}], "tool_choice": {"type": "any", "tools": [{"name": "f"}]}}, "tool_choice: found tools"),
        (chat, {**base, "reasoning": {"exclude": True}, "include_reasoning": True}, "include_reasoning: contradicts reasoning.exclude"),
        (chat, {**base, "reasoning": {"exclude": True}, "reasoning_split": False}, "reasoning.exclude: reasoning_split"),
        (chat, {**base, "reasoning": {"exclude": 1}}, "reasoning.exclude"), (responses, {**flat, "reasoning": {"exclude": "a"}}, "reasoning.exclude"),
        (chat, {**base, "reasoning": {"enable": False}, "reasoning_effort": "high"}, "contradicts"),
        (chat, {**base, "reasoning": {"reasoning_effort": "none", "effort": "high"}}, "contradicts"),
    ]:
        error = s.post(path, body, 400)["error"]
        assert name in error["message"], (path, name, error)
    excluded(s)
    plain = ask(s, chat, turn())
    for same in ({"tool_calls": [], "reasoning_content": "", "audio": None}, {"tools": None, "refusal": "", "images": [], "prefix": False}):
        assert ask(s, chat, {**base, "messages": [{**USER[0], **same}]}) == ask(s, chat, base)
    alpha = {"role": "system", "content": "Alpha."}
    counted = {k: s.post("/v1/messages/count_tokens", {**more, "messages": m})["input_tokens"] for k, m, more in (
        ("field", USER, {"system": "Alpha."}), ("first", [alpha, *USER], {}), ("last", [*USER, alpha], {}), ("none", USER, {}))}
    wanted = s.post(chat + "/input_tokens", {"messages": [*USER, alpha]})["input_tokens"]
    assert counted["none"] != counted["field"] == counted["first"] != counted["last"] == wanted, (counted, wanted)
    assert plain[0] == 200 and plain == ask(s, chat, turn(function_call=None, audio=None, refusal=None, reasoning=None))
    assert plain != ask(s, chat, turn(refusal="I do not.")) == ask(s, chat, turn(content="I do not."))
    used = [{"id": "c", "type": "function", "function": call}]

    def thought(**said):
        return ask(s, chat, {**base, "tools": f, "messages": [*USER, {"role": "assistant", "tool_calls": used, **said}, {"role": "tool", "tool_call_id": "c", "content": "x"}]})

    parts = [{"type": "reasoning.text", "text": "I "}, {"text": "see."}]
    assert thought() != thought(reasoning_content="I see.") == thought(reasoning_details=parts) == thought(reasoning_details=parts[:1], reasoning="I see.")
    assert ask(s, chat, {**base, "response_format": {"type": "text", "schema": {}, "json_schema": None}}) == ask(s, chat, base)
    off = ask(s, responses, {**flat, "reasoning": {"effort": "none"}})
    assert ask(s, responses, {**flat, "reasoning": {"enabled": False}}) == off != ask(s, responses, flat)
    with open("tests/data/tiny-m2/tokenizer.json", encoding="utf-8") as f:
        tokenizer = json.load(f)
    entry = {i: word for word, i in tokenizer["model"]["vocab"].items()} | {x["id"]: x["content"] for x in tokenizer["added_tokens"]}
    entries = ask(s, "/tokenize", {"prompt": "In the \u00e9\u2603\n\x7f</think>", "parse_special": True, "return_token_strs": True})[1]
    assert entries["token_strs"] == [entry[i] for i in entries["tokens"]] and "</think>" in entries["token_strs"], entries
    for none in ({"return_token_strs": False, "with_pieces": None}, {}, {"add_special_tokens": False, "messages": None, "tools": [], "add_special": True}):
        assert ask(s, "/tokenize", {"prompt": "x", **none}) == ask(s, "/tokenize", {"prompt": "x"})


def sets_of_tools(s):
    """tool_choice allowed_tools: the request without the other tools. Two tools of one name are the same tool."""
    def tool(api, name, **more):
        of = {"name": name, **more}
        return {"type": "function", "function": of} if api == "chat" else {"type": "function", **of} if api == "responses" else of

    for api in ("chat", "responses"):
        path, base = APIS[api]
        f, g = tool(api, "f"), tool(api, "g")

        def choice(mode, *tools, api=api):
            of = {"mode": mode, "tools": list(tools)}
            return {"type": "allowed_tools", **({"allowed_tools": of} if api == "chat" else of)}

        base = {**base, **NO_THINKING, "max_tokens" if api == "chat" else "max_output_tokens": 40}
        alone, required = ask(s, path, {**base, "tools": [g]}), ask(s, path, {**base, "tools": [g], "tool_choice": "required"})
        assert alone[0] == required[0] == 200 and alone != required != ask(s, path, {**base, "tools": [f, g], "tool_choice": "required"}), api
        assert ask(s, path, {**base, "tools": [f, g, f], "tool_choice": choice("auto", g)}) == alone, api
        assert ask(s, path, {**base, "tools": [f, g, f], "tool_choice": choice("required", g, g)}) == required, api
        for wrong in (choice("auto"), choice("none", g), choice("auto", tool(api, "h")), choice("required", g, {"type": "mcp"}), choice("auto", 5)):
            refusal(s, path, {**base, "tools": [f, g], "tool_choice": wrong}, "tool_choice", wrong)
    for api in ("chat", "responses", "messages"):
        path, base = APIS[api]
        own = "input_schema" if api == "messages" else "parameters"
        one, other = tool(api, "f", **{own: {"type": "object"}}), tool(api, "f", **{own: {"type": "object", "properties": {"a": {}}}})
        refusal(s, path, {**base, "tools": [one, tool(api, "g", **{own: {}}), other]}, "tools", api)
        assert ask(s, path, {**base, "tools": [one, one]})[0] == 200, api


def templates(s):
    """Template arguments are the same in all APIs: each changes the prompt as it does in chat."""
    system = {"chat": {"messages": [{"role": "system", "content": "Alpha."}, *USER]}, "responses": {"instructions": "Alpha."},
              "messages": {"system": "Alpha."}}

    def tokens(api, kwargs):
        path, base = APIS[api]
        more = {} if "model_identity" in kwargs else system[api]  # a system message stands for the identity, and has the date
        usage = s.post(path, {**base, **more, "chat_template_kwargs": kwargs})["usage"]
        return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)

    for kwargs in ({"enable_thinking": False}, {"model_identity": "You are the king of Ur."}, {"current_date": "2026-01-02"},
                   {"current_location": "Ur of the Chaldees"}, {"nobody": "knows"}):
        want = tokens("chat", kwargs)
        assert (want == tokens("chat", {k: None for k in kwargs})) == ("nobody" in kwargs), kwargs
        assert tokens("responses", kwargs) == tokens("messages", kwargs) == want, kwargs
        counted = {"messages": USER, **({} if "model_identity" in kwargs else system["messages"]), "chat_template_kwargs": kwargs}
        assert s.post("/v1/messages/count_tokens", counted)["input_tokens"] == want, kwargs
    for api in ("chat", "responses", "messages"):
        path, base = APIS[api]
        for kwargs in ([], "x", {"enable_thinking": "no"}, {"current_date": 7}):
            assert s.request("POST", path, {**base, "chat_template_kwargs": kwargs})[0] == 400, (api, kwargs)


def streamed(s, path, body):
    _, _, data = s.request("POST", path, {**body, "stream": True})
    return [json.loads(x[6:]) for x in data.decode().splitlines() if x.startswith("data: ")]


def cut(s):
    """The last item of a reply that a limit or a failure ends is incomplete, whole and streamed; those before it are complete."""
    path, base = APIS["responses"]
    think = s.post("/tokenize", {"prompt": "</think>", "parse_special": True})["tokens"][0]
    for seed in range(60):  # the reasoning ends, and not at once
        both = {"logit_bias": {str(think): 14}, "temperature": 2, "seed": seed, "max_output_tokens": 16}
        if [x["type"] for x in s.post(path, {**base, **both})["output"]] == ["reasoning", "message"]:
            break
    seven = {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 7}}}}
    for more, kinds, status, last in [
        ({}, ["reasoning"], "incomplete", "incomplete"), (NO_THINKING, ["message"], "incomplete", "incomplete"),
        (both, ["reasoning", "message"], "incomplete", "incomplete"),
        ({**NO_THINKING, **seven, "max_output_tokens": 300, "temperature": 2, "seed": 1}, ["message"], "completed", "completed"),
        ({**NO_THINKING, "stop": ["e"]}, ["message"], "completed", "completed"),
    ]:
        body = {**base, **more}
        whole = s.post(path, body)
        statuses = ["completed"] * (len(kinds) - 1) + [last]
        assert (whole["status"], [x["type"] for x in whole["output"]]) == (status, kinds), (more, whole)
        assert [x["status"] for x in whole["output"]] == statuses, (more, whole)
        events = streamed(s, path, body)
        final = events[-1]
        assert final["type"] == "response." + status and final["response"]["status"] == status, final
        assert [x["status"] for x in final["response"]["output"]] == statuses, final
        assert [x["item"]["status"] for x in events if x["type"] == "response.output_item.done"] == statuses, (more, events)
        assert {x["item"]["status"] for x in events if x["type"] == "response.output_item.added"} == {"in_progress"}
    for time in (0.05, 0.1, 0.2, 0.5, 1, 2, 5):  # some of the reply comes in it, not all
        final = streamed(s, path, {**base, **NO_THINKING, "timeout": time, "max_output_tokens": 4000, "ignore_eos": True})[-1]
        if final["type"] == "response.failed" and final["response"]["output"]:
            break
    assert final["type"] == "response.failed" and [x["status"] for x in final["response"]["output"]] == ["incomplete"], final


def openapi(s):
    """/openapi.json has the paths that answer, and the fields of each API with what becomes of them."""
    said = json.loads(s.get("/openapi.json"))
    assert said["openapi"] == "3.1.0" and set(said) == {"openapi", "info", "paths"}
    table = [r for r in rows() if "." not in r["field"]]
    for api, (path, _) in APIS.items():
        schema = said["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for key, fate in (("properties", "served"), ("x-refused", "refused"), ("x-without-effect", "none")):
            assert set(schema[key]) == {r["field"] for r in table if r[api] == fate}, (path, key)
        assert set(schema["required"]) < set(schema["properties"])
    pages = {p for p, v in said["paths"].items() if "get" in v}
    name = json.loads(s.get("/v1/models"))["data"][0]["id"]
    assert {"/", "/health", "/metrics", "/openapi.json", "/v1/models"} < pages and all(s.get(p.format(name=name)) for p in pages), pages
    # The paths are those of the docs, and no other.
    with open("docs/serving.md", encoding="utf-8") as f:
        listed = set(re.findall(r"`((?:GET|POST) /\S*)`", f.read().split("## Paths", 1)[1].split("## Fields", 1)[0]))
    found = {f"{method.upper()} {p.format(name='NAME')}" for p, v in said["paths"].items() for method in v}
    assert found == listed, found ^ listed
    wanted = page(said)
    if sys.argv[1:] == ["--write"]:
        with open(PAGE, "w", encoding="utf-8") as f:
            f.write(wanted)
    with open(PAGE, encoding="utf-8") as f:
        for want, line in itertools.zip_longest(wanted.splitlines(), f.read().splitlines()):
            assert line == want, f"{PAGE} has {line!r}, the server's tables say {want!r}: write it again with --write"


def progress(s):
    """return_progress: how far the prompt is when its first step begins and after each one, up to all of it, before any token."""
    def reports(path, body, i=0):
        events = (streamed if path == "/v1/responses" else Server.events)(s, path, {"temperature": 0, **body, "return_progress": True, "timings_per_token": True})
        own = [e for e in events if "choices" not in e or e["choices"][0]["index"] == i]
        at = [j for j, e in enumerate(own) if "prompt_progress" in e]
        found = [own[j]["prompt_progress"] for j in at]
        done = [p["processed"] for p in found]
        assert all(set(p) == {"total", "cache", "processed", "time_ms"} and (p["total"], p["cache"]) == (done[-1], done[0]) for p in found), found
        assert found[0]["time_ms"] == 0 and all(0 < y - x <= 16 for x, y in zip(done, done[1:])) and at[-1] - at[0] == len(at) - 1, found
        assert all(e.get("type", "response.in_progress") == "response.in_progress" for e in (own[j] for j in at)), own
        assert all(not e["choices"][0].get("delta") and not e["choices"][0].get("text") for e in (own[j] for j in at) if "choices" in e), own
        timed = [e for e in own if "timings" in e]
        assert timed[0] in own[at[-1] + 1:] and len(timed) >= 3 and timed[-1] == own[-1] and timed[-1]["timings"]["cache_n"] == done[0], own
        return done

    text = "In the beginning " * 20
    done = reports("/v1/completions", {"prompt": text, "max_tokens": 3, "n": 2, "echo": True})
    assert done[0] == 0 and len(done) >= 7, done
    cached = reports("/v1/completions", {"prompt": text, "max_tokens": 3, "n": 2}, 1)
    assert 0 < cached[0] and cached[-1] == done[-1], cached
    assert len(reports("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 3})) >= 7
    assert len(reports("/v1/responses", {"input": text + "x", "max_output_tokens": 3})) >= 2
    quiet = [s.events("/v1/completions", {"prompt": text, "max_tokens": 1, "return_progress": False}), s.post("/v1/completions", {"prompt": text, "max_tokens": 1, "return_progress": True})]
    assert "prompt_progress" not in json.dumps(quiet)
    # Only the reply's status differs where llama.cpp's forms are wanted.
    assert s.post("/v1/responses", {"input": "x", "max_output_tokens": 3})["status"] == "completed"
    assert streamed(s, "/v1/responses", {"input": "x", "max_output_tokens": 3})[-1]["type"] == "response.completed"


def as_others(s):
    """What the servers' tests of llama.cpp and vLLM look for: paths without /v1, their names of fields, usage in every chunk."""
    prompt = {"prompt": "In the beginning", "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0}
    short, whole = (s.post(path, chat) for path in ("/chat/completions", "/v1/chat/completions"))
    assert short["choices"] == whole["choices"] and short["system_fingerprint"] == whole["system_fingerprint"] == f"build-{json.loads(s.get('/version'))['version']}"
    assert s.get("/models") == s.get("/v1/models") and s.get("/models/tiny-m2") == s.get("/v1/models/tiny-m2")
    model = json.loads(s.get("/v1/models"))["data"][0]
    assert model["root"] == "tiny-m2" and model["parent"] is None
    assert s.post("/completions", prompt, 404)["error"]["message"] == "there is no POST /completions"
    text = "In the beginning"
    ids = s.post("/tokenize", {"content": text})["tokens"]
    assert ids == s.post("/tokenize", {"prompt": text})["tokens"] and s.post("/detokenize", {"tokens": ids}) == {"prompt": text, "content": text}
    assert s.post("/detokenize", {"tokens": ids, "model": "tiny-m2"}) == {"prompt": text}
    # The first chunk has no content yet; a whole reply of chat says that it has no logprobs of the prompt.
    assert s.events("/v1/chat/completions", chat)[0]["choices"][0]["delta"] == {"role": "assistant", "content": None} and whole["prompt_logprobs"] is None
    # A number beyond its range has pydantic's code, another wrong value has none; keys that are no ids are named, all of them.
    for field, value, code in (("seed", 2**63, "less_than_equal"), ("seed", -2**63 - 1, "greater_than_equal"), ("seed", 1.5, None), ("temperature", -1, "greater_than_equal"),
                               ("n", 0, "greater_than_equal"), ("n", 129, "less_than_equal"), ("n", 1e40, "less_than_equal"), ("top_p", "x", None), ("top_p", 1.01, "less_than_equal")):
        error = s.post("/v1/chat/completions", {**chat, field: value}, 400)["error"]
        assert (error["param"], error["code"]) == (field, code) and "equal" not in error["message"], error
    # llama.cpp's timings: in whole replies, in the chunk of usage and in those of tokens, but not in that of the role.
    timed = {**chat, "timings_per_token": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
    events = s.events("/v1/chat/completions", timed)
    assert "timings" not in events[0] and [e["timings"]["predicted_n"] for e in events[1:]] == [1, 2, 3, 4, 5, 5, 5], events
    for got in (events[-1], s.post("/v1/chat/completions", {**timed, "stream_options": None}), s.post("/v1/completions", {**prompt, "max_tokens": 5, "timings_per_token": True})):
        t, used = got["timings"], got["usage"]
        assert (t["cache_n"], t["cache_n"] + t["prompt_n"], t["predicted_n"]) == (used["prompt_tokens_details"]["cached_tokens"], used["prompt_tokens"], 5), got
        assert abs(t["predicted_ms"] / 4 - t["predicted_per_token_ms"]) < 0.01 and min(t["prompt_ms"], t["prompt_per_second"], t["predicted_per_second"]) > 0, t
    assert s.post("/v1/completions", {**prompt, "max_tokens": 1, "timings_per_token": True})["timings"]["predicted_per_second"] == 0
    error = s.post("/v1/completions", {**prompt, "logit_bias": {"5": 1, "bad": 1, "9999999": 1, "6": 1, "x": 1}}, 400)["error"]["message"]
    assert 'found the keys "bad", "9999999", "x", expected' in error, error
    assert s.post("/v1/completions", {**prompt, "logit_bias": {str(i) + 50 * "x": 1 for i in range(1000)}}, 400)["error"]["param"] == "logit_bias"
    for path, body in (("/v1/completions", {**prompt, "n": 2, "max_tokens": 3}), ("/v1/chat/completions", chat)):
        events = s.events(path, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        used = [e["usage"] for e in events]
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] and u["prompt_tokens"] == used[0]["prompt_tokens"] for u in used), used
        assert used[-1]["completion_tokens"] == body.get("n", 1) * used[-2]["completion_tokens"] == body.get("n", 1) * body["max_tokens"], used
    # A token that is made where none is wanted is none of the reply's, in chunks either.
    none = {**prompt, "max_tokens": 0, "echo": True, "timings_per_token": True}
    for got in (*s.events("/v1/completions", {**none, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}), s.post("/v1/completions", none)):
        assert (got["usage"]["completion_tokens"], got["timings"]["predicted_n"]) == (0, 0) and got["timings"]["prompt_ms"] > 0, got
    # How long a prompt would be, before it is sent; its tokens, each with its text.
    long = {"messages": [{"role": "system", "content": "Ur"}, {"role": "user", "content": "\U0001f917 of Ur"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
    want = s.post("/v1/chat/completions", {**long, "max_tokens": 1})["usage"]["prompt_tokens"]
    counted = [s.post(path + "/chat/completions/input_tokens", long) for path in ("/v1", "")]
    tokens = s.post("/tokenize", {**long, "with_pieces": True})
    assert counted[0] == counted[1] == {"object": "response.input_tokens", "input_tokens": want} and tokens["count"] == want == len(tokens["tokens"]), (counted, want)
    pieces = b"".join(bytes(x["piece"]) if isinstance(x["piece"], list) else x["piece"].encode() for x in tokens["tokens"])
    assert any(isinstance(x["piece"], list) for x in tokens["tokens"]) and "\U0001f917 of Ur".encode() in pieces, tokens
    assert pieces.decode() == s.post("/detokenize", {"tokens": [x["id"] for x in tokens["tokens"]]})["prompt"]
    flat = {"input": "In the beginning", "instructions": "Ur"}
    want = s.post("/v1/responses", {**flat, "max_output_tokens": 1})["usage"]["input_tokens"]
    assert s.post("/v1/responses/input_tokens", flat)["input_tokens"] == want
    # Reasoning has two names, with the same text under both.
    message = s.post("/v1/chat/completions", chat)["choices"][0]["message"]
    deltas = [e["choices"][0]["delta"] for e in s.events("/v1/chat/completions", chat)]
    assert message["reasoning"] == message["reasoning_content"] == "".join(d.get("reasoning", "") for d in deltas) == "".join(d.get("reasoning_content", "") for d in deltas) != ""
    hidden, ended = {**chat, "include_reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}
    without = s.post("/v1/chat/completions", hidden)
    assert without["usage"] == {**without["usage"], "completion_tokens": 2} and without["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}, without
    assert all(set(e["choices"][0]["delta"]) <= {"role", "content"} for e in s.events("/v1/chat/completions", hidden))
    assert s.post("/v1/chat/completions", {**hidden, **ended})["choices"] == s.post("/v1/chat/completions", {**chat, **ended})["choices"]
    assert s.post("/v1/chat/completions", {**hidden, "reasoning_split": False}, 400)["error"]["param"] == "include_reasoning"
    empty = s.post("/v1/completions", {**prompt, "structured_outputs": {"grammar": ""}}, 400)["error"]
    assert empty["param"] == "structured_outputs" and "structured_outputs.grammar" in empty["message"], empty
    # The token itself is among the likeliest, if only as one more (OpenAI's reference: up to logprobs + 1 elements).
    for k in (0, 1, 3):
        choice = s.post("/v1/completions", {**prompt, "echo": True, "temperature": 1.5, "seed": 5, "max_tokens": 12, "logprobs": k})["choices"][0]
        got = choice["logprobs"]
        assert choice["prompt_logprobs"] is None and got["top_logprobs"][0] is None
        for token, value, top in list(zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True))[1:]:
            assert top[token] == value and max(k, 1) <= len(top) <= k + 1, (k, token, value, top)


def held_texts(s):
    """A regular expression, a grammar or a choice holds the whole text, at a temperature at which the model writes noise."""
    pattern, grammar = "[A-Z][a-z]{2,5}( [a-z]{2}){1,2}\\.", 'root ::= list # nested\nlist ::= "[" (item ("," item)*)? "]"\nitem ::= list | [1-9] [0-9]{0,2}'
    for path, base in ((APIS["chat"][0], {**APIS["chat"][1], **NO_THINKING}), APIS["completions"]):
        def text(path=path, base=base, **fields):
            reply = s.post(path, {**base, "max_tokens": 60, "temperature": 3, **fields})["choices"][0]
            return reply["finish_reason"], reply["message"]["content"] if "message" in reply else reply["text"]
        for seed in range(3):
            for fields in ({"guided_regex": pattern}, {"structured_outputs": {"regex": pattern, "json": None}}):
                finish, got = text(seed=seed, **fields)
                assert finish == "stop" and re.fullmatch(pattern, got), (path, got)
            finish, got = text(seed=seed, grammar=grammar)
            assert finish == "length" or isinstance(json.loads(got), list), (path, got)
            assert text(seed=seed, structured_outputs={"choice": ["Ur", "Uz and more"]})[1] in ("Ur", "Uz and more")
        for name, fields in (("regex", {"regex": "(a"}), ("guided_grammar", {"guided_grammar": "root ::= root"}), ("grammar", {"grammar": "a", "regex": "a"}),
                             ("structured_outputs", {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}),
                             ("structured_outputs.regex", {"structured_outputs": {"regex": "a", "choice": ["a"]}})):
            status, reply = ask(s, path, {**base, **fields})
            assert status == 400 and name in reply["error"]["message"], (name, status, reply)


def named(s):
    """An error names the request's own field, and the place within it; schemas, grammars, tools and conversations that cannot be served too."""
    tool = lambda **more: [{"type": "function", "function": {"name": "f", **more}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": 5, "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    schema = {"type": "object", "odd": 1}
    ask_chat, say = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, {"role": "user", "content": "x"}
    for path, fields, param, place in (
            ("/v1/chat/completions", {"reasoning": {"max_tokens": "x"}}, "reasoning", "reasoning.max_tokens: found a string"),
            ("/v1/chat/completions", {"reasoning": {"max_tokens": -2}}, "reasoning", "reasoning.max_tokens: found -2"),
            ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking", "thinking.budget_tokens: found 1.5"),
            ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "chat_template_kwargs.enable_thinking: found a number"),
            ("/v1/chat/completions", {"messages": [say, call]}, "messages", "messages.id: found a number"),
            ("/v1/chat/completions", {"messages": [say, {"role": "tool", "content": "x"}]}, "messages", "a tool's"),
            ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "x", "tools": tool()}, say]}, "messages", "tools of a message"),
            ("/v1/chat/completions", {"tools": tool(strict="x")}, "tools", "tools.strict: found a string"),
            ("/v1/chat/completions", {"tools": tool(strict=True, parameters=schema)}, "tools", "tool f"),
            ("/v1/chat/completions", {"structured_outputs": {"json": schema}}, "structured_outputs", "structured_outputs.json: "),
            ("/v1/chat/completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "structured_outputs.regex"),
            ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "stream_options.include_usage: found a number"),
            ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}, "response_format", "odd"),
            ("/v1/chat/completions", {"guided_regex": "(a"}, "guided_regex", "guided_regex"),
            ("/v1/completions", {"guided_json": schema}, "guided_json", "odd"),
            ("/v1/completions", {"grammar": "root"}, "grammar", "grammar"),
            ("/v1/completions", {"guided_json": False}, "guided_json", "no value fits"), ("/v1/completions", {"guided_json": []}, "guided_json", "found an array"),
            ("/v1/completions", {"json_schema": False}, "json_schema", "no value fits"), ("/v1/completions", {"regex": False}, "regex", "found a boolean"),
            ("/v1/chat/completions", {"structured_outputs": {"json": False}}, "structured_outputs", "structured_outputs.json: "),
            ("/v1/chat/completions", {"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs.choice: found no text"),
            ("/v1/chat/completions", {"guided_choice": []}, "guided_choice", "found no text"),
            ("/v1/responses", {"text": {"format": 5}}, "text", "text.format: found a number"),
            ("/v1/responses", {"text": {"format": {"type": "json_schema", "schema": schema}}}, "text", "odd"),
            ("/v1/responses", {"reasoning": {"effort": 5}}, "reasoning", "reasoning.effort: found a number"),
            ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: found 0")):
        base = {"prompt": "x"} if path == "/v1/completions" else {"input": "x"} if path == "/v1/responses" else ask_chat
        error = s.post(path, {**base, **fields}, 400)["error"]
        assert error["param"] == param and place in error["message"], (path, fields, error)


def keys_with_nul(s):
    """A NUL is part of a key: one that ends in it is another field, keyword or id."""
    base = {"prompt": "In the", "max_tokens": 1, "temperature": 0}
    for field in ("logit_bias", "grammar", "echo", "best_of", "images"):
        assert ask(s, "/v1/completions", {**base, field + "\0": "x"})[1]["choices"] == ask(s, "/v1/completions", base)[1]["choices"], field
    for field, value, key in (("logit_bias", {"5\0b": 1}, "5\\x00b"), ("structured_outputs", {"regex\0b": "a"}, "regex\\x00b"),
                              ("guided_json", {"minLength\0b": 1}, "minLength\\x00b")):
        status, reply = ask(s, "/v1/completions", {**base, field: value})
        assert status == 400 and reply["error"]["param"] in (field, None) and key in reply["error"]["message"], (field, status, reply)
    schema = {"type": "object", "properties": {"a": {"$ref": "#b"}}, "required": ["a"], "$defs": {"b": {"$anchor": "b", "enum": [12]}}}
    assert ask(s, "/v1/completions", {**base, "max_tokens": 40, "guided_json": schema})[0] == 200
    text = json.dumps(schema)
    for word in ("type", "properties", "required", "$ref", "enum", "#b"):
        status, reply = ask(s, "/v1/completions", {**base, "guided_json": json.loads(text.replace(word + '"', word + '\\u0000"'))})
        assert status == 400, (word, status, reply)


every_field_in_every_api()
documented()
checkpoint = convert("tests/data/tiny-m2")
with Server(checkpoint, "--chat-format", "minimax-m2", "--max-model-len", "512", "--drafts", "7") as server:
    for test in (drafts, all_fields, nothings, formats, openapi, held_texts, within, sets_of_tools, templates, cut, as_others, named, keys_with_nul):
        test(server)
with Server(checkpoint, "--chat-format", "minimax-m2", "--max-num-batched-tokens", "16", "--max-num-seqs", "2", "--compat", "llama.cpp") as server:
    progress(server)
by_default()
print("every field of every API is served, refused by name, or has no effect; replies as others' tests want them")
