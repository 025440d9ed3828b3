#!/usr/bin/env python3
"""MiniMax-M3's chat format. Prompts: the digests of the specification, prompts that the tree keeps, and, where the released template is
at hand ($SHARED/templates/MiniMax-M3.jinja), random conversations rendered by jinja2. Replies: random calls by random schemas, written by
this script and parsed in random cuts, and random documents of tags compared with a second parser. usage: m3_chat.py [--write] [COUNT]"""
import hashlib
import json
import os
import random
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import chat  # noqa: E402

KEPT = os.path.join(chat.ROOT, "tests", "data", "chat", "rendered_m3.json")
TEMPLATE = f"{chat.SHARED}/templates/MiniMax-M3.jinja"
NS, THINK, END = "]<]minimax[>[", "<mm:think>", "</mm:think>"
chat.WORDS += [NS, THINK, END, NS + "<tool_call>", "</item>", "developer"]

# ---- Prompts

WEATHER = {"name": "get_weather", "description": "Wetter für", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
B = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"},
     {"role": "assistant", "content": "Looking.", "reasoning_content": "need tool", "tool_calls": [{"id": "c", "function": {
         "name": "get_weather", "arguments": '{"city": "Köln", "days": 3, "ok": true, "x": null, "o": {"a": [1, 2.5], "e": {}}, "l": []}'}}]},
     {"role": "tool", "content": "sunny"}, {"role": "tool", "content": "windy"}, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks"}]
HI = [{"role": "user", "content": "Hi"}]
DIGESTS = [(HI, [], "adaptive", 866, "128d8148b153f0fe85a7c4d6d705bf19d8d3cc075a5e4919f8f0030122d1cbbf"),
           (HI, [], "", 866, "128d8148b153f0fe85a7c4d6d705bf19d8d3cc075a5e4919f8f0030122d1cbbf"),
           (HI, [], "enabled", 855, "19b3a8091e93937ec2298b3cce276b4969341774ac55559352326e1936791e98"),
           (HI, [], "disabled", 793, "247683b7d14bc24865f4baebd323a3d8d8fbcf061e19f7ce6dc747603faf5000"),
           (B, [WEATHER], "adaptive", 2422, "45a7db0925764338fee227ae02b5e5b5d36ce6f836a29c15353327c1ce5ebcf2")]


def digests(lines):
    for messages, tools, mode, n, digest in DIGESTS:
        tools = [json.dumps({"type": "function", "function": t}, ensure_ascii=False) for t in tools]
        got = lines.ask(chat.line_of("minimax-m3", messages, tools, {"add_generation_prompt": True, **({"thinking_mode": mode} if mode else {})}))
        assert (len(got["text"]), hashlib.sha256(got["text"].encode()).hexdigest()) == (n, digest), got["text"]
        assert got["in_reasoning"] == (mode == "enabled")


def conversation(seed):
    """A conversation of the other formats' test, with M3's roles and modes."""
    rng = random.Random(seed)
    messages, tools, options = chat.Maker(seed, plain=seed % 2 == 0).conversation()
    if messages[0]["role"] == "system" and rng.random() < 0.3:
        messages[0]["role"] = "developer"
    if rng.random() < 0.4:
        messages.insert(0, {"role": "root", "content": rng.choice(["", "You are M3.", [], [{"type": "text", "text": "a"}, {"type": "text", "text": "\n"}]])})
    if rng.random() < 0.7:
        options["thinking_mode"] = rng.choice(["adaptive", "enabled", "disabled"])
    return messages, tools, options


def expected(template, messages, tools, options):
    import jinja2
    given = {"tools": [chat.loads(t) for t in tools]} if tools else {}
    try:
        return chat.spelled(template.render(messages=chat.for_template("minimax-m3", messages), **given, **options))
    except jinja2.exceptions.TemplateError:
        return None


def prompts(lines, count):
    if not os.path.isfile(TEMPLATE):
        return "not run: random conversations, the released template MiniMax-M3.jinja is not in ../shared/templates"
    text = open(TEMPLATE, encoding="utf-8", newline="").read()
    assert lines.ask(json.dumps({"op": "template", "text": text}))["format"] == "minimax-m3"
    template = chat.environment().from_string(text)
    total = 0
    for seed in range(count):
        one = conversation(seed)
        total += chat.compare(lines, "minimax-m3", expected(template, *one), one)
    return f"{count} random conversations of {total} characters as jinja2 renders them"


def write_kept():
    template = chat.environment().from_string(open(TEMPLATE, encoding="utf-8", newline="").read())
    rows = []
    for seed in range(40):
        messages, tools, options = conversation(seed)
        rows.append({"messages": messages, "tools": tools, "options": options, "text": expected(template, messages, tools, options)})
    with open(KEPT, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(v, ensure_ascii=True) for v in rows) + "\n]\n")


# ---- Replies

def ask_reply(lines, pieces, tools, whole, in_reasoning, calls=True):
    """(reasoning, content, [[name, arguments, ended]])"""
    got = lines.ask(json.dumps({"op": "reply", "format": "minimax-m3", "tools": tools, "calls": calls, "in_reasoning": in_reasoning,
                                "whole": whole, "pieces": [[-1, p] for p in pieces]}))
    reasoning = content = ""
    found = []
    for kind, call, text in got["events"]:
        if kind == "reasoning":
            reasoning += text
        elif kind == "content":
            content += text
        elif kind == "call":
            found.append([text, "", False])
        elif kind == "arguments":
            found[call][1] += text
        else:
            found[call][2] = True
    return reasoning, content, found


def cuts(rng, text):
    out = []
    while text:
        n = rng.choice([1, 1, 2, 5, 17, 200])
        out.append(text[:n])
        text = text[n:]
    return out


def typed(rng, depth):
    """(schema, value): the value follows the schema; its text in the format is that of one value alone."""
    kind = rng.randrange(9 if depth else 7)
    if kind <= 1:
        return {"type": "string"}, rng.choice(["", "null", "true", "12", "a<b>&amp;</c>", "  x\n", "é北京", "{\"a\": 1}", "]<]", "</item>", "\""])
    if kind == 2:
        return {"type": rng.choice(["integer", "number"])}, rng.choice([0, -7, 12345678901234567890])
    if kind == 3:
        return {"type": "number"}, rng.choice([1.5, -0.25])
    if kind == 4:
        return {"type": "boolean"}, rng.random() < 0.5
    if kind == 5:
        return rng.choice([{"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}]), rng.choice([None, "nul", "x", " null?", "nullx"])
    if kind == 6:
        return {}, rng.choice(["521", "", "x", True, False])
    if kind == 7:
        items, _ = one = typed(rng, depth - 1)
        values = [typed_value(rng, items, one[1], depth) for _ in range(rng.randrange(4))]
        return rng.choice([{"type": "array", "items": items}, {"oneOf": [{"type": "array", "items": items}]}]), values
    keys = rng.sample(["city", "a b", "ü", "item", "x-1", "tool_call"], rng.randrange(1, 4))
    pairs = {k: typed(rng, depth - 1) for k in keys}
    schema = {"type": "object", "properties": {k: s for k, (s, _) in pairs.items()}}
    return schema, {k: v for k, (_, v) in pairs.items() if rng.random() < 0.8}


def typed_value(rng, schema, value, depth):
    return value


def element(value):
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "".join(f"{NS}<{k}>{element(v)}{NS}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{NS}<item>{element(v)}{NS}</item>" for v in value)
    return value if isinstance(value, str) else json.dumps(value)


def replies(lines, count):
    calls = 0
    for seed in range(count):
        rng = random.Random(seed)
        text, want, tools = "", [], []
        for i in range(rng.choice([0, 1, 1, 2, 3])):
            pairs = {k: typed(rng, 3) for k in rng.sample(["city", "b", "größe", "x y", "tool_call", "1"], rng.randrange(5))}
            tools.append({"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": {k: s for k, (s, _) in pairs.items()}}}})
            arguments = {k: v for k, (_, v) in pairs.items()}
            quote = rng.choice(['"', "'", ""])
            space = rng.choice(["", "", "\n", " "])
            text += f"{NS}<invoke name={quote}f{i}{quote}>{space}" + space.join(f"{NS}<{k}>{element(v)}{NS}</{k}>" for k, v in arguments.items()) + f"{space}{NS}</invoke>\n"
            want.append([f"f{i}", arguments, True])
        reasoning, content = rng.choice(["", "why <b>\n", "北"]), rng.choice(["", "Looking.", "\n\nSo:\n", "<tool_call>", "]<]mini"])
        inside = rng.random() < 0.5
        whole = (reasoning + END if inside else THINK + reasoning + END if reasoning else rng.choice(["", END])) + content
        if want:
            whole += f"{NS}<tool_call>\n{text}{NS}</tool_call>"
        got = ask_reply(lines, cuts(rng, whole), tools, True, inside)
        found = [[name, json.loads(arguments), ended] for name, arguments, ended in got[2]]
        assert (got[0], got[1], found) == (reasoning, content, want), f"{seed}: {whole!r}\ntools {tools}\nwant {(reasoning, content, want)}\ngot  {(got[0], got[1], found)}"
        assert [list(a) for _, a, _ in found] == [list(a) for _, a, _ in want]
        calls += len(want)
    return f"{count} replies with {calls} calls"


# ---- A second parser, of whole documents

MARK = "\x01"
TAG = re.compile(MARK + r"[ \n\r\t]{0,64}<(/?)([^>\x01]{0,4095})>", re.S)
HEADER = re.compile(r"invoke name=(.*)", re.S)


def header(closing, name):
    m = None if closing else HEADER.fullmatch(name)
    if not m:
        return None
    name, empty = m[1], m[1].endswith("/")
    name = (name[:-1] if empty else name).strip(" \n\r\t")
    if len(name) >= 2 and name[0] in "\"'" and name[-1] == name[0]:
        name = name[1:-1]
    return (name, empty) if name else None


def untyped(content):
    """The value of content whose schema names no type."""
    if MARK not in content:
        return {"true": True, "false": False, "null": None}.get(content, content)
    children, text, at = [], "", 0
    while at < len(content):
        mark = content.find(MARK, at)
        piece = content[at:mark if mark >= 0 else len(content)]
        text += piece if piece.strip(" \n\r\t") else ""
        if mark < 0:
            break
        tag = TAG.match(content, mark)
        level, end = 1, tag.end()
        while level:
            inner = TAG.search(content, end)
            level += -1 if inner[1] else 1
            end = inner.end()
        children.append((tag[2], untyped(content[tag.end():inner.start()])))
        at = end
    if children[0][0] == "item" and not text:
        return [v for _, v in children]
    out = {}
    for name, _ in children:
        same = [v for n, v in children if n == name]
        out[name] = same if len(same) > 1 else same[0]
    return {**out, **({"$text": text} if text else {})}


def parse_call(s, at):
    """From behind a call's header: (arguments or None, the end, whether the document ended inside)."""
    arguments = []
    while True:
        at += len(s[at:]) - len(s[at:].lstrip(" \n\r\t"))
        tag = TAG.match(s, at)
        if at == len(s):
            return arguments, at, True
        if not tag:
            return None, at, False
        if tag[1] and tag[2] == "invoke":
            return arguments, tag.end(), False
        if header(tag[1], tag[2]):
            return arguments, at, False
        if tag[1]:
            return (arguments, at, False) if tag[2] == "tool_call" else (None, at, False)
        names, start, at = [tag[2]], tag.end(), tag.end()
        while names:
            mark = s.find(MARK, at)
            inner = TAG.match(s, mark) if mark >= 0 else None
            if not inner or (inner[1] and inner[2] != names[-1]) or len(names) > 64:
                return None, at, False
            names = names[:-1] if inner[1] else names + [inner[2]]
            at = inner.end()
        arguments.append((tag[2], untyped(s[start:inner.start()])))


def second(document):
    """(content, [[name, arguments, True]]) of a reply that is content and blocks of calls, without types."""
    s = document.replace(NS, MARK)
    content, calls, at, block, shown, literal, called = "", [], 0, False, "", False, False
    opening, closing = (re.compile(MARK + r"[ \n\r\t]{0,64}<%stool_call>" % c) for c in ("", "/"))
    piece = ""
    while at < len(s):
        if not block:
            m = opening.search(s, at)
            piece = s[at:m.start() if m else len(s)]
            content += piece if piece.strip(" \n\r\t") else ""
            at = m.end() if m else len(s)
            block, shown, literal, called = bool(m), m[0] if m else "", False, False
            stray = False
            continue
        if not stray:
            space = len(s[at:]) - len(s[at:].lstrip(" \n\r\t"))
            shown += s[at:at + space] if shown and not called else ""
            at += space
            if at == len(s):
                break
        end, again = closing.match(s, at), opening.match(s, at)
        if end:
            content += end[0] if literal else ""
            at, block, shown = end.end(), False, ""
            continue
        if again:
            at, shown, literal, called, stray = again.end(), again[0], False, False, False
            continue
        tag = TAG.match(s, at)
        head = header(tag[1], tag[2]) if tag else None
        if head:
            name, empty = head
            arguments, after, _ = ([], tag.end(), False) if empty else parse_call(s, tag.end())
            if arguments is None:
                # The call's text is content, up to the next call or the end of the block.
                calls.append([name, None, False])
                content += shown + s[at:after]
                literal, shown, at, stray, called = literal or bool(shown), "", after, True, True
                continue
            calls.append([name, dict(arguments), True])
            shown, literal, called, stray, at = "", False, True, False, after
            continue
        if tag and called and not stray and tag[1] and tag[2] == "invoke":
            at = tag.end()
            continue
        if not stray:
            content += shown
            literal, shown, stray = literal or bool(shown), "", True
            continue
        content += s[at]
        at += 1
    content += shown
    return content.replace(MARK, NS), calls


SOUP = [NS, NS, NS + "<tool_call>", NS + "</tool_call>", NS + '<invoke name="f">', NS + "<invoke name=g>", NS + "</invoke>", NS + "<a>", NS + "</a>", NS + "<item>",
        NS + "</item>", NS + "<tool_call>\n" + NS + '<invoke name="f">', NS + "<a>1" + NS + "</a>", NS + "</invoke>\n" + NS + "</tool_call>", "\n", " ", "x", "true",
        "<tool_call>", "</a>", "]<]mini", "<", NS + " \n<b>", NS + "</b>", NS + "<>", NS + "</>", "é"]


def documents(lines, count):
    called = 0
    for seed in range(count):
        rng = random.Random(seed)
        text = ("" if rng.random() < 0.2 else NS + "<tool_call>\n") + "".join(rng.choice(SOUP) for _ in range(rng.randrange(1, 25)))
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        whole = ask_reply(lines, [text], tools, True, False)
        assert ask_reply(lines, cuts(rng, text), tools, True, False) == whole, text
        assert ask_reply(lines, list(text), tools, True, False) == whole, text
        content, calls = second(text)
        found = [[name, json.loads(a) if ended else None, ended] for name, a, ended in whole[2]]
        assert (whole[1], found) == (content, calls), f"{seed}: {text!r}\nwant {(content, calls)}\ngot  {(whole[1], found)}"
        called += len(calls)
    return f"{count} documents of tags with {called} calls"


def main():
    words = [w for w in sys.argv[1:] if w != "--write"]
    if "--write" in sys.argv:
        return write_kept()
    count = int(words[0]) if words else 400
    lines = chat.Lines()
    digests(lines)
    kept = json.load(open(KEPT, encoding="utf-8"))
    for v in kept:
        chat.compare(lines, "minimax-m3", v["text"], (v["messages"], v["tools"], v["options"]))
    print(f"{len(DIGESTS)} digests, {len(kept)} kept prompts; {replies(lines, count)}; {documents(lines, count)}; {prompts(lines, count)}")


main()
