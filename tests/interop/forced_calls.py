#!/usr/bin/env python3
"""Calls that must be made, and those of strict tools, beside jsonschema: random schemas, all formats, all APIs, and small checkpoints that
write noise. Every call parses and is valid, or the reply ends by its length and says so. First noise of allowed tokens alone, then by the
server. usage: forced_calls.py [SCHEMAS OF NOISE] [REQUESTS] [SEED]"""
import concurrent.futures
import json
import os
import random
import re
import shutil
import subprocess
import sys

import jsonschema

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import BIN, TMP, Server, convert, with_m3_tokens  # noqa: E402

NOISE, COUNT, SEED = (int(x) for x in sys.argv[1:] + ["250", "6", "1"][len(sys.argv) - 1:])
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# Texts that the checkpoints get as tokens: noise does not spell the end of a parameter.
SAID = ["</parameter>", "</parameter>\n", "</invoke>", "</invoke>\n", "<tool_calls>", "</tool_calls>", "<parameter name=\"", "null", "true", "Yes", "12", "-7",
        "\"}", "{\"", "</", "\">", "</parameter>\n</invoke>", "1e", "\": "]
MARK = "]<]minimax[>["
KEYS = ["city", "n", "kind", "a b", "naïve", "x/y", "\"q\"", "list", "null", "~0", "é" * 9, "</p", "p&amp;", "A"]
PATTERNS = ["^[a-z]{1,4}$", "^\\d{2,3}(-\\d)?$", "a|b", "^(true|1e5|[{]x|null|-7|yes)$", "^(?!ab)[ab]+$", "^ ?\\d", "^[^a-z]{2}$"]
WORDS = ["red", "green", "", "null", "true", "No", "12", "1.5", "{}", "[1]", "</parameter>", "a\nb", " x ", "naïve ☃", "\"q\"", "<b>", "</invoke>"]


def changed(model):
    """A checkpoint with tags that are no special tokens, and with SAID as its last ordinary tokens."""
    path = os.path.join(TMP, "said", f"tiny-{model}")
    if model == "m3":
        with_m3_tokens("tests/data/tiny-m2", path)
    else:
        shutil.copytree(f"tests/data/tiny-{model}", path)
    with open(path + "/tokenizer.json", encoding="utf-8") as f:
        tokenizer = json.load(f)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and "think" not in token["content"] and "tool_call" not in token["content"]
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    last = sorted(vocab, key=vocab.get)[-len(SAID):]
    tokenizer["model"]["merges"] = [m for m in merges if "".join(m.split(" ") if isinstance(m, str) else m) not in last]
    for old, new in zip(last, SAID):
        vocab[new.replace("\n", "\u010a").replace(" ", "\u0120")] = vocab.pop(old)
    with open(path + "/tokenizer.json", "w", encoding="utf-8") as f:
        json.dump(tokenizer, f, ensure_ascii=False)
    return path


class Schemas:
    """Random schemas of what is served."""

    def __init__(self, rng):
        self.rng = rng

    def some(self, values, most):
        return self.rng.sample(values, self.rng.randint(1, min(most, len(values))))

    def string(self):
        least = self.rng.choice([None, None, 0, 1, 3])
        most = self.rng.choice([None, None, 3, 8])
        return {"type": "string", **({} if least is None else {"minLength": least}), **({} if most is None else {"maxLength": most})}

    def scalar(self):
        pick = self.rng.randrange(12)
        if pick < 3:
            return self.string()
        if pick == 9:
            return {"type": "string", **self.rng.choice([{"pattern": self.rng.choice(PATTERNS)}, {"format": self.rng.choice(["date", "uuid", "ipv4"])}])}
        if pick == 10:
            low = self.rng.randint(-50, 50)
            return {"type": self.rng.choice(["integer", "number"]), "minimum": low, "exclusiveMaximum": low + self.rng.randint(1, 500)}
        if pick == 11:
            return {"type": ["integer", "null"], "exclusiveMinimum": 0, "multipleOf": self.rng.randint(1, 9)}
        if pick < 7:
            return {"type": ["integer", "number", "boolean", "null"][pick - 3]}
        values = self.some(WORDS + [0, 1, 2.5, -3, True, False, None, 12], 5)
        return {"enum": values} if pick == 7 else {"const": values[0]}

    def mixed(self, depth):
        """Several types: the text of a parameter then says of which one it is."""
        pick = self.rng.randrange(7)
        if pick == 5:
            return {"anyOf": [{"type": "string", "pattern": self.rng.choice(PATTERNS)}, {"type": self.rng.choice(["null", "null", "integer", "number"])}]}
        if pick == 6:
            return {"anyOf": [self.object(0), self.object(0), {"type": "null"}]}
        if pick == 0:
            return {"type": self.some(["string", "integer", "number", "boolean", "null"], 3)}
        if pick == 1:
            return {"anyOf": [self.string(), {"type": self.rng.choice(["null", "integer", "number", "boolean"])}]}
        if pick == 2:
            return {"anyOf": [self.string(), self.object(depth - 1), {"type": "null"}]}
        if pick == 3:
            return {"oneOf": [{"enum": ["auto", "none", "12"]}, {"type": "boolean"}, {"type": "integer"}, {"type": "array", "items": self.scalar()}]}
        return {"type": ["string", "null"], "enum": self.some(WORDS, 4) + [None]}

    def value(self, depth):
        pick = self.rng.randrange(10 if depth else 7)
        if pick < 4:
            return self.scalar()
        if pick < 6:
            return self.mixed(depth)
        if pick == 6:
            return self.rng.choice([{}, {"description": "of any type"}, True, {"$ref": "#/$defs/word"}, {"$ref": "#/$defs/a%25b~1c"}, {"enum": ["b", []]}])
        if pick == 7:
            least = self.rng.randrange(2)
            return {"type": "array", "items": self.value(depth - 1), "minItems": least, "maxItems": least + self.rng.randrange(3)}
        if pick == 8:
            return {"type": "object", "additionalProperties": self.value(depth - 1)}
        return self.object(depth - 1)

    def object(self, depth):
        keys = self.rng.sample(KEYS, self.rng.randrange(1, 5))
        out = {"type": "object", "properties": {k: self.value(max(depth, 0)) for k in keys}, "required": [k for k in keys if self.rng.random() < 0.6]}
        if self.rng.random() < 0.5:
            out["additionalProperties"] = self.rng.choice([False, False, self.scalar()])
        return out

    def parameters(self):
        pick = self.rng.randrange(12)
        out = self.object(2)
        if pick == 0:
            out = {"type": "object", "additionalProperties": self.value(1)}
        if pick == 1:
            out = self.rng.choice([{"type": "object"}, {"type": "object", "properties": {}}, {}])
        out["$defs"] = {"word": self.string(), "a%b/c": self.scalar()}
        if pick == 2:
            out = {"$ref": "#/$defs/all", "$defs": {**out.pop("$defs"), "all": out}}
        return out


def once(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def made(api, reply):
    """(finish reason, calls as name, arguments or None of one that was cut off) of a reply."""
    if api == CHAT:
        choice, = reply["choices"]
        calls = [(x["function"]["name"], x["function"]["arguments"]) for x in choice["message"].get("tool_calls") or []]
        return {"stop": "stop"}.get(choice["finish_reason"], choice["finish_reason"]), calls
    if api == MESSAGES:
        calls = [(x["name"], json.dumps(x["input"])) for x in reply["content"] if x["type"] == "tool_use"]
        return {"tool_use": "tool_calls", "max_tokens": "length"}.get(reply["stop_reason"], reply["stop_reason"]), calls
    calls = [(x["name"], x["arguments"]) for x in reply["output"] if x["type"] == "function_call"]
    cut = [x for x in reply["output"] if x["type"] == "function_call" and x["status"] != "completed"]
    assert not cut or reply["status"] == "incomplete", reply
    return {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[reply["status"]], calls


def body_of(api, tools, choice, name, strict, how):
    """The request in the words of the API."""
    ask = [{"role": "user", "content": "In the beginning"}]
    marks = {"strict": True} if strict else {}
    if api == CHAT:
        word = {"type": "function", "function": {"name": name}} if choice == "named" else choice
        return {"messages": ask, "max_tokens": 100, "tool_choice": word,
                "tools": [{"type": "function", "function": {"name": n, "parameters": p, **marks}} for n, p in tools.items()], **how}
    if api == MESSAGES:
        word = {"named": {"type": "tool", "name": name}, "required": {"type": "any"}, "auto": {"type": "auto"}}[choice]
        return {"messages": ask, "max_tokens": 100, "tool_choice": word, "tools": [{"name": n, "input_schema": p, **marks} for n, p in tools.items()], **how}
    word = {"type": "function", "name": name} if choice == "named" else choice
    return {"input": "In the beginning", "max_output_tokens": 100, "tool_choice": word,
            "tools": [{"type": "function", "name": n, "parameters": p, **marks} for n, p in tools.items()], **how}


def whole(text):
    assert -2 ** 63 <= int(text) < 2 ** 63, text
    return int(text)


def real(text):
    digits = re.sub(r"[eE].*|\D", "", text).lstrip("0")
    assert len(digits) <= 17 and abs(float(text)) < float("inf"), text
    return float(text)


def never(text):
    raise ValueError(text)


def check(tools, called, arguments, model):
    """The arguments of a whole call."""
    pairs = once if model != "m1" and not re.search("\"additionalProperties\": (?!false)", json.dumps(tools[called])) else dict  # of free keys one may come twice
    value = json.loads(arguments, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=never)
    jsonschema.Draft202012Validator(tools[called]).validate(value)


REFUSALS = "cannot hold", "can hold", "do not distinguish", "maxLength", "names no type", "type its schema", "begin alike", "is not served", "not served", "alternatives of", "no such text"


def noise(path, model):
    """NOISE schemas: what the constraint allows, token by token, is taken apart as a valid call."""
    counts = {}
    asked = []
    for seed in range(SEED, SEED + NOISE):
        rng = random.Random(seed)
        schemas = Schemas(rng)
        tools = {n: schemas.parameters() for n in rng.sample(["get", "f-2", "Now", "né", "a b"], rng.randint(1, 3))}
        must = rng.random() < 0.7  # otherwise strict tools under auto
        strict = {n: must or n == min(tools) or rng.random() < 0.5 for n in tools}
        likely = [[x, 12] for x in SAID + list("\"}]:,{[ \n1230-eE.")] + [[x, 120] for x in ("</parameter>", "</parameter>\n", "\"", "}", "]", "</invoke>")]
        likely += [["<tool_calls>", 400 if not must else 4]]
        likely += [[x, 2000] for x in ("<minimax:tool_call>", "</minimax:tool_call>", "[e~[", "<end_of_sentence>")]
        likely += [[MARK, 2000]] if must else [[MARK, 300], ["[e~[", 100]] if model == "m3" else []
        asked.append((seed, tools, strict, {
            "format": f"minimax-{model}", "must": must, "only": rng.choice(list(tools)) if must and rng.random() < 0.3 else None, "one_call": rng.random() < 0.3, "tokens": 400, "seed": seed,
            "likely": likely, "tools": [{"strict": strict[n], "json": {"type": "function", "function": {"name": n, "parameters": p}}} for n, p in tools.items()]}))
    lines = "".join(json.dumps(x[3]) + "\n" for x in asked)
    said = subprocess.run([f"{BIN}/../tests/interop/call_lines", f"{path}/tokenizer.json", "2048"], input=lines, capture_output=True, text=True, check=True).stdout
    for (seed, tools, strict, line), text in zip(asked, said.split("\n"), strict=False):
        got = json.loads(text)
        told = f"seed {seed}: {json.dumps(line)}\n{text}"
        if "error" in got:
            assert any(x in got["error"] for x in REFUSALS), told
            counts["refused"] = counts.get("refused", 0) + 1
            continue
        counts[got["finish"]] = counts.get(got["finish"], 0) + 1
        assert got["finish"] != "stuck" and (got["finish"] == "length" or got["calls"] or not line["must"]), told
        assert not line["must"] or not got["content"], told
        for i, (called, arguments, ended) in enumerate(got["calls"]):
            assert called in tools and (not line["only"] or called == line["only"]), told
            assert ended or (got["finish"] == "length" and i + 1 == len(got["calls"])), told
            if not ended or not strict[called]:
                json.loads(arguments) if ended else None
                continue
            try:
                check(tools, called, arguments, model)
            except (ValueError, AssertionError, jsonschema.ValidationError) as e:
                raise AssertionError(f"{e}\n{told}") from e
            counts["valid"] = counts.get("valid", 0) + 1
    print(model, NOISE, "schemas:", ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    assert counts.get("valid", 0) > NOISE / 3 and counts.get("refused", 0) < NOISE / (2 if model == "m3" else 4), counts  # M3: patterns


class Trial:
    def __init__(self, server, model):
        self.s, self.model = server, model
        self.counts = {}

    def prepare(self, source):
        with open(source + "/tokenizer.json", encoding="utf-8") as f:
            tokenizer = json.load(f)
        vocab = {**tokenizer["model"]["vocab"], **{x["content"]: x["id"] for x in tokenizer["added_tokens"]}}

        def ids(*texts):
            return [str(vocab[y]) for y in (x.replace("\n", "\u010a").replace(" ", "\u0120") for x in texts) if y in vocab]

        self.bias = dict.fromkeys(ids(*SAID, *"\"}]:,0123456789{[ "), 3)
        self.bias.update(dict.fromkeys(ids("</parameter>", "</parameter>\n", "\"", "}", "]", "</invoke>"), 6))
        self.bias.update(dict.fromkeys(ids("</think>", "<minimax:tool_call>", "</minimax:tool_call>", "[e~[", "<end_of_sentence>", "</tool_calls>", "</mm:think>", MARK), 12))

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    def one(self, seed):
        rng = random.Random(seed)
        schemas = Schemas(rng)
        tools = {n: schemas.parameters() for n in rng.sample(["get", "f-2", "Now", "né", "a b"], rng.randint(1, 2))}
        name = rng.choice(list(tools))
        choice = rng.choice(["required", "named", "auto"])
        api = rng.choice([CHAT, MESSAGES, RESPONSES])
        how = {"temperature": 1.0, "seed": seed, "logit_bias": self.bias}
        if rng.random() < 0.5 and api != MESSAGES:
            how["parallel_tool_calls"] = False
        if choice == "auto" or rng.random() < 0.5:  # no reasoning first, or hardly any
            how["thinking" if api == MESSAGES else "chat_template_kwargs"] = {"type": "disabled"} if api == MESSAGES else {"enable_thinking": self.model == "m1"}
        if api == RESPONSES:
            how.pop("chat_template_kwargs", None)
        body = body_of(api, tools, choice, name, choice == "auto" or rng.random() < 0.3, how)
        status, _, data = self.s.request("POST", api, body)
        reply = json.loads(data)
        if status != 200:
            text = json.dumps(reply)
            assert status == 400 and any(x in text for x in REFUSALS), (reply, json.dumps(body))
            return self.count("refused")
        finish, calls = made(api, reply)
        assert finish in ("tool_calls", "length") or (choice == "auto" and finish in ("stop", "end_turn")), (body, reply)
        assert finish == "length" or calls or choice == "auto", (body, reply)
        assert len(calls) <= 1 or "parallel_tool_calls" not in how, (body, reply)
        for i, (called, arguments) in enumerate(calls):
            assert called in tools and (choice != "named" or called == name), (body, reply)
            if finish == "length" and i + 1 == len(calls):
                self.count("cut")  # the last may be the beginning of one
                continue
            try:
                check(tools, called, arguments, self.model)
            except (ValueError, AssertionError, jsonschema.ValidationError) as e:
                raise AssertionError(f"seed {seed}: {e}\n{json.dumps(body)}\n{json.dumps(reply)}") from e
            self.count("valid")
        self.count(finish)


for model in ("m2", "m1", "m3"):
    source = changed(model)
    noise(source, model)
    if not COUNT:
        continue
    with Server(convert(source), "--chat-format", f"minimax-{model}", "--max-model-len", "4096") as server:
        trial = Trial(server, model)
        trial.prepare(source)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(trial.one, range(SEED, SEED + COUNT)))
        print(model, COUNT, "requests:", ", ".join(f"{n} {what}" for what, n in sorted(trial.counts.items())))
