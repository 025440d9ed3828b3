#!/usr/bin/env python3
"""Fields of a request that say the same thing, and fields that bind its reply, in pairs, over the formats M1, M2 and M3 and three chat APIs: of
two limits the smaller counts, two that contradict each other are refused by name, and of two that bind a reply both do, or one is refused by
name. Timings of a prompt are those of its computation, also of one that waited."""
import concurrent.futures
import json
import os
import random
import re
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import TMP, Server, convert, with_m3_tokens  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "12"))
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "In the beginning"}]
BASE = {CHAT: {"messages": ASK, "max_tokens": 2}, RESPONSES: {"input": "In the beginning", "max_output_tokens": 2}, MESSAGES: {"messages": ASK, "max_tokens": 2}}

# ---- Fields that say the same thing ----

# Whether the model reasons: the field, its value, what it says; "level" contradicts an effort of none alone, "any" is reasoning of whichever mode.
KWARGS = [("chat_template_kwargs", {"enable_thinking": True}, "enabled"), ("chat_template_kwargs", {"enable_thinking": False}, "disabled"),
          *(("chat_template_kwargs", {"thinking_mode": m}, m) for m in ("adaptive", "enabled", "disabled"))]
THINKING = [("thinking", {"type": m}, m) for m in ("adaptive", "enabled", "disabled")]
REASONING = [("reasoning", {"effort": "none"}, "no effort"), ("reasoning", {"effort": "high"}, "level"), ("reasoning", {"enabled": False}, "no effort"),
             ("reasoning", {"enabled": True}, "any")]
SAME = {
    CHAT: [*KWARGS, *THINKING, *REASONING, ("reasoning_effort", "none", "no effort"), ("reasoning_effort", "low", "level"), ("enable_thinking", True, "any")],
    RESPONSES: [*KWARGS, *REASONING, ("thinking", {"type": "enabled"}, "any"), ("enable_thinking", True, "any")],
    MESSAGES: [*KWARGS, *THINKING, ("enable_thinking", True, "any")],
}
OFF = ("disabled", "no effort")


def agree(a, b, model):
    if a == b:
        return True
    if "level" in (a, b):
        return "no effort" not in (a, b)
    if a in OFF or b in OFF:
        return a in OFF and b in OFF
    return model != "m3" or "any" in (a, b)


def error(reply):
    return reply["error"]["message"], reply["error"].get("param")


def merged(base, *fields):
    """The body with these fields; objects are joined. None where two of them are one value."""
    body = dict(base)
    for name, value, *_ in fields:
        if name in body and name not in base:
            if not isinstance(value, dict) or set(value) & set(body[name]):
                return None
            value = {**body[name], **value}
        body[name] = value
    return body


def ask(s, path, body):
    status, _, data = s.request("POST", path, body)
    return status, json.loads(data)


def prompt_of(got):
    used = got["usage"]
    return used.get("prompt_tokens", 0) + used.get("input_tokens", 0) + used.get("cache_read_input_tokens", 0) if "cache_read_input_tokens" in used else \
        used.get("prompt_tokens", used.get("input_tokens"))


def reasoning(s, model, rng):
    """Every pair of fields of reasoning: they contradict each other and one is named, or the reply is the one that the stronger field alone has."""
    for path, table in SAME.items():
        for a in table:  # M1 has no reply without reasoning
            status, got = ask(s, path, merged(BASE[path], a))
            refused = model == "m1" and a[2] in OFF and not (path == MESSAGES and a[0] == "thinking")
            assert status == (400 if refused else 200), (model, path, a, got)
            if refused:
                key = a[0] if isinstance(a[1], str) else f"{a[0]}.{next(iter(a[1]))}"
                assert error(got)[0].startswith(key + ": "), (path, a, got)
                assert path == MESSAGES or error(got)[1] == a[0], (path, a, got)
        for a in table:
            for b in table:
                body = merged(BASE[path], a, b)
                if a is b or body is None or rng.random() > 0.3:
                    continue
                status, got = ask(s, path, body)
                if not agree(a[2], b[2], model):
                    assert status == 400 and "contradicts" in error(got)[0] and error(got)[1] in (None, a[0], b[0]), (model, path, a, b, got)
                    assert a[0] in error(got)[0] and b[0] in error(got)[0], (path, a, b, got)
                elif model != "m1":
                    alone = [prompt_of(ask(s, path, merged(BASE[path], x))[1]) for x in (a, b)]
                    rank = {"disabled": 3, "no effort": 3, "enabled": 2, "adaptive": 1, "any": 0, "level": 0}
                    assert status == 200 and prompt_of(got) == alone[rank[b[2]] > rank[a[2]]], (model, path, a, b, got)


def limits(s, rng):
    """Of two limits of tokens the smaller one counts; null is none."""
    for path, other in ((CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens")):
        for _ in range(6):
            a, b = (rng.choice([None, *range(1, 7)]) for _ in range(2))
            if a is None and b is None:
                continue
            body = {**BASE[path], "ignore_eos": True, "max_tokens": a, other: b}
            used = s.post(path, body)["usage"]
            assert used.get("completion_tokens", used.get("output_tokens")) == min(x for x in (a, b) if x), (path, a, b, used)


def others(s):
    """Other fields that say the same thing."""
    f = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool = {"type": "function", "function": f}
    schema = {"type": "object"}
    chat = BASE[CHAT]
    for path, more, name in [
        (CHAT, {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": schema}}}, "response_format"),
        (CHAT, {"response_format": {"type": "text", "schema": schema}}, "response_format"),
        (RESPONSES, {"text": {"format": {"type": "text", "schema": schema}}}, "text"),
        (MESSAGES, {"output_config": {"format": {"type": "text", "schema": schema}}}, "output_config"),
        (CHAT, {"function_call": "none", "tools": [tool]}, "function_call"),
        *((CHAT, {"tools": [tool], "tool_choice": word, **form}, name) for word in ("required", {"type": "function", "function": {"name": "f"}})
          for form, name in (({"guided_choice": ["aaa", "bbb"]}, "guided_choice"), ({"guided_choice": ["aaa"]}, "guided_choice"),
                             ({"structured_outputs": {"choice": ["aaa", "bbb"]}}, "structured_outputs"))),
        (CHAT, {"tools": [{**tool, "strict": True, "function": {**f, "strict": False}}]}, "tools"),
        (CHAT, {"include_reasoning": False, "reasoning_split": False}, "include_reasoning"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ]:
        status, got = ask(s, path, {**BASE[path], **more})
        assert status == 400 and name in error(got)[0] and error(got)[1] in (None, name), (path, more, got)
    for more in ({"response_format": {"type": "text", "json_schema": None}}, {"function_call": "none"}, {"function_call": "auto", "tools": [tool]},
                 {"function_call": "none", "tools": [tool], "tool_choice": "none"}, {"tools": [{**tool, "strict": True, "function": {**f, "strict": True}}]},
                 {"chat_template_kwargs": {"enable_thinking": None, "thinking_mode": None}, "reasoning": None, "reasoning_effort": None, "thinking": None}):
        assert ask(s, CHAT, {**chat, **more})[0] == 200, more


# ---- Fields that bind a reply ----

TOOL = {"name": "get", "parameters": {"type": "object", "properties": {"city": {"enum": ["Ur", "Uz"]}}, "required": ["city"], "additionalProperties": False}}
OTHER = {"name": "set", "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}}
SCHEMA = {"type": "object", "properties": {"k": {"enum": ["one", "two"]}}, "required": ["k"], "additionalProperties": False}


def tools(path, strict=False):
    more = {"strict": True} if strict else {}
    if path == CHAT:
        return {"tools": [{"type": "function", "function": {**f, **more}} for f in (TOOL, OTHER)]}
    if path == RESPONSES:
        return {"tools": [{"type": "function", **f, **more} for f in (TOOL, OTHER)]}
    return {"tools": [{"name": f["name"], "input_schema": f["parameters"], **more} for f in (TOOL, OTHER)]}


def choice(path, word, name=None):
    if path == MESSAGES:
        return {"type": {"required": "any", "named": "tool"}.get(word, word), **({"name": name} if name else {})}
    if word != "named":
        return word
    return {"type": "function", "name": name} if path == RESPONSES else {"type": "function", "function": {"name": name}}


def is_json(text):
    try:
        return json.loads(text)
    except ValueError:
        return None


def fits(text):
    v = is_json(text)
    return isinstance(v, dict) and set(v) == {"k"} and v["k"] in ("one", "two")


def valid(call):
    name, arguments = call
    v = is_json(arguments)
    return v in ({"city": "Ur"}, {"city": "Uz"}) if name == "get" else v in ({"n": 1}, {"n": 2}) if name == "set" else False


def binding(path):
    """(kind, fields, whether a whole reply (reasoning, content, calls) is bound so). Of one kind at most one is sent."""
    held = lambda test: lambda r, c, calls: not c.strip() and calls or test(c.strip(" \n")) and not calls
    alone = lambda test: lambda r, c, calls: test(c) and not calls
    out = [("choice", {"tool_choice": choice(path, "required")}, lambda r, c, calls: not c and calls and all(map(valid, calls))),
           ("choice", {"tool_choice": choice(path, "named", "set")}, lambda r, c, calls: not c and calls and all(valid(x) and x[0] == "set" for x in calls)),
           ("choice", {"tool_choice": choice(path, "none")}, lambda r, c, calls: not calls),
           ("choice", {"tool_choice": choice(path, "auto")}, lambda r, c, calls: True),
           ("strict", tools(path, True), lambda r, c, calls: all(map(valid, calls))),
           ("off", {"chat_template_kwargs": {"enable_thinking": False}}, lambda r, c, calls: not r),
           ("budget", {"thinking_token_budget": 0}, lambda r, c, calls: not r)]
    if path == CHAT:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        out += [("form", {"response_format": form}, held(fits)), ("form", {"guided_json": SCHEMA}, held(fits)), ("form", {"json_schema": SCHEMA}, held(fits)),
                ("form", {"response_format": {"type": "json_object"}}, held(lambda c: isinstance(is_json(c), dict))),
                ("form", {"guided_regex": "ab|cd"}, held(lambda c: c in ("ab", "cd"))), ("form", {"regex": "ab|cd"}, held(lambda c: c in ("ab", "cd"))),
                ("form", {"grammar": 'root ::= "x" | "y"'}, held(lambda c: c in ("x", "y"))), ("form", {"ebnf": 'root ::= "x" | "y"'}, held(lambda c: c in ("x", "y"))),
                ("form", {"guided_choice": ["aaa", "bbb"]}, alone(lambda c: c in ("aaa", "bbb"))), ("form", {"guided_choice": ["aaa"]}, alone(lambda c: c == "aaa")),
                ("form", {"structured_outputs": {"choice": ["aaa", "bbb"]}}, alone(lambda c: c in ("aaa", "bbb"))),
                ("form", {"structured_outputs": {"json": SCHEMA}}, held(fits)),
                ("one", {"parallel_tool_calls": False}, lambda r, c, calls: len(calls) < 2), ("off", {"reasoning_effort": "none"}, lambda r, c, calls: not r),
                ("off", {"thinking": {"type": "disabled"}}, lambda r, c, calls: not r), ("hidden", {"include_reasoning": False}, lambda r, c, calls: not r),
                ("continued", {"messages": [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Let me think"}], "continue_final_message": True}, lambda r, c, calls: True)]
    if path == RESPONSES:
        out += [("form", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}, held(fits)),
                ("one", {"parallel_tool_calls": False}, lambda r, c, calls: len(calls) < 2), ("off", {"reasoning": {"effort": "none"}}, lambda r, c, calls: not r),
                ("off", {"reasoning": {"enabled": False}}, lambda r, c, calls: not r)]
    if path == MESSAGES:
        out += [("form", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, held(fits)), ("off", {"thinking": {"type": "disabled"}}, lambda r, c, calls: not r),
                ("continued", {"messages": [*ASK, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Let me think"}]}]}, lambda r, c, calls: True)]
    return out


def parts(path, got):
    """(reasoning, content, calls, whether the reply was cut)"""
    if path == CHAT:
        m = got["choices"][0]["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or []]
        return m.get("reasoning_content") or "", m["content"] or "", calls, got["choices"][0]["finish_reason"] == "length"
    if path == RESPONSES:
        text = lambda kind: "".join(p["text"] for x in got["output"] if x["type"] == kind for p in x["content"])
        return text("reasoning"), text("message"), [(x["name"], x["arguments"]) for x in got["output"] if x["type"] == "function_call"], got["status"] != "completed"
    text = lambda kind: "".join(x[kind] for x in got["content"] if x["type"] == kind)
    return text("thinking"), text("text"), [(x["name"], json.dumps(x["input"])) for x in got["content"] if x["type"] == "tool_use"], got["stop_reason"] == "max_tokens"


def held_together(s, model, rng, count):
    """Of two or three fields that bind a reply all do, or the request is refused by the name of one of them."""
    for k in range(count):
        path = rng.choice([CHAT, CHAT, RESPONSES, MESSAGES])
        kinds = {}
        for b in rng.sample(binding(path), rng.choice([2, 2, 3])):
            kinds.setdefault(b[0], b)
        body = {**BASE[path], **tools(path)} if rng.random() < 0.8 or "choice" in kinds else dict(BASE[path])
        for _, fields, _ in kinds.values():
            body.update(fields)
        body.update({("max_output_tokens" if path == RESPONSES else "max_tokens"): 120, "temperature": rng.choice([0.5, 1, 3]), "seed": k})
        names = {n for _, fields, _ in kinds.values() for n in fields} | {"tools"}
        status, got = ask(s, path, body)
        where = (model, path, [b[1] for b in kinds.values()], k, got)
        if status == 400:
            message, param = error(got)
            assert any(n in message for n in names) and (param is None or param in names), where
            continue
        assert status == 200, where
        r, c, calls, cut = parts(path, got)
        for kind, fields, test in kinds.values():
            if kind == "choice" and "form" in kinds and fields["tool_choice"] not in (choice(path, "auto"), choice(path, "none")):
                raise AssertionError(("both were taken", where))
            if cut and kind in ("choice", "strict", "form", "one"):
                continue
            if kind == "off" and model == "m1" or kind in ("off", "budget") and "continued" in kinds and r == "":
                continue
            assert test(r, c, calls), (kind, where)
        # A call that was begun in place of the form is whole, whether its tool is strict or not.
        if "form" in kinds and not cut and "tools" in body and not re.search("tool_call|minimax", c) is None:
            raise AssertionError(("neither a form nor a call", where))


def begun_reasoning(s):
    """A continued message ends within its reasoning: it goes on, unless the request leaves the reasoning empty; then it ends at once."""
    last = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "Let me think"}]
    body = {"messages": last, "continue_final_message": True, "max_tokens": 30, "temperature": 1, "seed": 3, "ignore_eos": True}
    spent = lambda **how: s.post(CHAT, {**body, **how})["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert spent() > 1
    for how in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": {"type": "disabled"}}, {"thinking_token_budget": 0}):
        assert spent(**how) <= 1, (how, s.post(CHAT, {**body, **how}))


def form_or_call(s):
    """Content of the form, or calls that are well formed, also of tools that are not strict and where the call begins within the reasoning."""
    seen = set()
    for k in range(12):
        off = {"chat_template_kwargs": {"enable_thinking": k % 4 > 0}} if k % 2 else {"thinking": {"type": "disabled"}}
        form = [{"guided_json": SCHEMA}, {"response_format": {"type": "json_object"}}, {"guided_regex": "ab|cd"}][k % 3]
        body = {"messages": ASK, **tools(CHAT), **form, **off, "max_tokens": 150, "seed": k, "temperature": 1}
        r, c, calls, cut = parts(CHAT, s.post(CHAT, body))
        assert not ("minimax" in c or calls and c), (body, c)
        seen.add((bool(calls), cut))
        assert cut or (all(isinstance(is_json(a), dict) and name in ("get", "set") for name, a in calls) if calls else c.strip() in ("ab", "cd") or isinstance(is_json(c), dict)), (body, c, calls)
    assert (False, False) in seen and any(called for called, _ in seen), seen


# ---- Timings ----

def timings(packed):
    """The time in the queue is none of the prompt's, in replies, in streams, of a later choice and in the metrics."""
    with Server(packed, "--max-model-len", "1024", "--max-num-seqs", "1", "--metric-names", "llama.cpp") as s, concurrent.futures.ThreadPoolExecutor(1) as pool:
        long = {"prompt": "a", "max_tokens": 700, "ignore_eos": True, "timings_per_token": True}
        short = {"prompt": "In the beginning", "max_tokens": 2, "timings_per_token": True, "ignore_eos": True}
        running = pool.submit(s.post, "/v1/completions", long)
        while not s.metrics()["requests_running"]:
            time.sleep(0.01)
        waited = s.post("/v1/completions", short)["timings"]
        took = running.result()["timings"]["predicted_ms"]
        assert waited["prompt_ms"] < took / 3, (waited, took)
        events = s.events("/v1/completions", {**short, "n": 2, "max_tokens": 300})
        second = [e for e in events if e["choices"] and e["choices"][0]["index"] == 1 and "timings" in e][0]["timings"]
        first = [e for e in events if e["choices"] and e["choices"][0]["index"] == 0 and "timings" in e][-1]["timings"]
        assert second["prompt_ms"] < first["predicted_ms"] / 3, (first, second)
        told = {k: float(v) for k, v in re.findall(r"^llamacpp:(\w+) (\S+)$", s.get("/metrics").decode(), re.M)}
        assert told["prompt_seconds_total"] < took / 3e3, (told, took)


def main():
    rng = random.Random(int(os.environ.get("SEED", "5")))
    m2 = convert("tests/data/tiny-m2")
    models = {"m1": (convert("tests/data/tiny-m1"), "minimax-m1"), "m2": (m2, "minimax-m2"),
              "m3": (convert(with_m3_tokens("tests/data/tiny-m2", os.path.join(TMP, "source", "like-m3"))), "minimax-m3")}
    for model, (packed, chat_format) in models.items():
        with Server(packed, "--chat-format", chat_format, "--max-model-len", "1024") as s:
            reasoning(s, model, rng)
            limits(s, rng)
            others(s)
            if model != "m1":
                form_or_call(s)
            if model == "m2":
                begun_reasoning(s)
            held_together(s, model, rng, ROUNDS)
    timings(m2)
    print("fields that say the same agree or are refused, two that bind a reply both do, and a prompt's time has no queue in it")


main()
