#!/usr/bin/env python3
"""Chat formats beside the templates themselves, rendered by jinja2 with transformers' tojson: random conversations, byte for byte.

The released templates lie outside the tree (../shared); without them only tests/data/chat is compared, which they rendered.
usage: chat.py [--write] [COUNT]"""
import json
import os
import random
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SHARED = os.environ.get("SHARED", os.path.join(ROOT, "..", "shared"))
VECTORS = os.path.join(ROOT, "tests", "data", "chat", "rendered.json")
# A number keeps its spelling: it goes through the template as text between these.
OPEN, CLOSE = "\ue000", "\ue001"


class Lines:
    """chat_lines, asked one line at a time."""

    def __init__(self):
        path = os.path.join(os.environ["BUILD"], "tests", "interop", "chat_lines")
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, line):
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# ---- Templates

def environment():
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    e = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    e.filters["tojson"] = tojson
    e.globals["raise_exception"] = raise_exception
    return e


def templates():
    """name of the format -> its template's text"""
    m2 = open(f"{SHARED}/templates/MiniMax-M2.jinja", encoding="utf-8", newline="").read()
    text = {
        "minimax-m1": open(f"{SHARED}/templates/MiniMax-M1.jinja", encoding="utf-8", newline="").read(),
        "minimax-m1-released": json.load(open(f"{SHARED}/released/minimax-m1/tokenizer_config.json"))["chat_template"],
        "minimax-m2": m2,
    }
    for x in "157":
        identity = "You are a helpful assistant."
        assert m2.count(identity) == 1
        text[f"minimax-m2.{x}"] = m2.replace(identity, f"{identity} Your name is MiniMax-M2.{x} and is built by MiniMax.")
    return text


def spelled(text):
    """What a template rendered, with the numbers as they were."""
    return re.sub(f'"?{OPEN}([^{CLOSE}]*){CLOSE}"?', r"\1", text)


def loads(text):
    keep = lambda s: OPEN + s + CLOSE
    return json.loads(text, parse_float=keep, parse_int=keep)


# ---- Random conversations

WORDS = ["", "a", "Hello", "weather in São Paulo", "中文字符", "😀", "e\u0301", " ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "\u2028", "\u2029\u202f", "\u205f\u1680", "\x85\u2003", "\u180e", "\x1f", "\x7f", "\x00", "\\",
         '"', "'", "<b>&amp;</b>", "</think>", "<think>", "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=\"f\">", "</parameter>", "]~b]user",
         "[e~[", "]~!b[", "<end_of_sentence>", "<beginning_of_sentence>", "<tool_calls>", "</tool_calls>", "{{ x }}", "{% if %}", "<response>", "\u200b", "ﬁ", "\ufeff", "null", "1e3",
         "line one\nline two\n", "  both ends  ", "\r\n"]
NUMBERS = ["0", "-0", "1", "-17", "1.0", "1.50", "1e3", "1E+3", "-2.5e-7", "123456789012345678901234567890", "0.1", "3.14159265358979323846264338327950288", "1e400"]
PLAIN = ["0", "1", "-17", "1.5", "0.1", "123456789012345678901234567890", "-2.5e-07", "1000.0"]


class Maker:
    def __init__(self, seed, plain):
        self.r = random.Random(seed)
        self.numbers = PLAIN if plain else NUMBERS
        self.gap = [""] if plain else ["", " ", "\n ", "\t"]

    def text(self):
        return "".join(self.r.choice(WORDS) for _ in range(self.r.choice([0, 1, 1, 2, 3, 5])))

    def key(self):
        return self.r.choice(["city", "a", "b", "größe", "x y", "", "z", "content", "items", 'q"q', "\n", "中"])

    def string(self, s):
        return json.dumps(s, ensure_ascii=self.r.random() < 0.5)

    def json(self, depth):
        """Text of a random JSON value, with numbers and gaps of any spelling."""
        kind = self.r.randrange(7 if depth else 5)
        gap = lambda: self.r.choice(self.gap)
        if kind <= 1:
            return self.string(self.text())
        if kind == 2:
            return self.r.choice(self.numbers)
        if kind in (3, 4):
            return self.r.choice(["true", "false", "null"])
        if kind == 5:
            return "[" + ",".join(gap() + self.json(depth - 1) + gap() for _ in range(self.r.randrange(4))) + gap() + "]"
        return self.object(depth)

    def object(self, depth):
        gap = lambda: self.r.choice(self.gap)
        return "{" + ",".join(f"{gap()}{self.string(self.key())}{gap()}:{gap()}{self.json(depth - 1)}{gap()}" for _ in range(self.r.randrange(5))) + gap() + "}"

    def tool(self):
        name = self.string(self.r.choice(["get_weather", "f", "übung", "a.b-c"]))
        fields = [f'"name": {name}', f'"description":{self.string(self.text())}', f'"parameters": {self.object(4)}']
        self.r.shuffle(fields)
        return '{"type": "function","function" : {' + ", ".join(fields) + "}}"

    def content(self, lists=True):
        if not lists or self.r.random() < 0.6:
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self.r.randrange(4))]

    def answer(self):
        """Content of a tool's message: its parts may name the tool."""
        content = self.content()
        for part in content if isinstance(content, list) else []:
            if self.r.random() < 0.3:
                part["name"] = self.text()
        return content

    def calls(self):
        calls = []
        for _ in range(self.r.choice([1, 1, 2, 3])):
            self.ids += 1
            calls.append({"id": f"call_{self.ids}", "type": "function",
                          "function": {"name": self.r.choice(["f", "get_weather", "ü", "a<b"]), "arguments": self.object(3)}})
        return calls

    def assistant(self):
        m = {"role": "assistant"}
        if self.r.random() < 0.85:
            m["content"] = self.content()
        if self.r.random() < 0.5:
            m["reasoning_content"] = self.text()
        if self.r.random() < 0.4:
            m["tool_calls"] = self.calls()
        return m

    def conversation(self):
        """messages with "arguments" as JSON text, tools as JSON text, options"""
        self.ids, messages, called = 0, [], False
        if self.r.random() < 0.6:
            m = {"role": "system", "content": self.content()}
            for key in ("current_date", "current_location"):
                if self.r.random() < 0.3:
                    m[key] = self.r.choice(["2026-11-23", "Zürich", ""])
            messages.append(m)
        for _ in range(self.r.randrange(8)):
            kind = self.r.random()
            if kind < 0.4:
                messages.append({"role": "user", "content": self.content()})
            elif kind < 0.75:
                messages.append(self.assistant())
                called = "tool_calls" in messages[-1]
                for call in messages[-1].get("tool_calls", []):
                    if self.r.random() < 0.8:
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": self.answer()})
            elif kind < 0.8:
                messages.append({"role": "system", "content": self.content()})
            elif called or self.r.random() < 0.1:
                messages.append({"role": "tool", "content": self.answer()})
        messages = messages or [{"role": "user", "content": self.content()}]
        options = {"add_generation_prompt": self.r.random() < 0.7}
        if self.r.random() < 0.2:
            options["model_identity"] = self.r.choice(["You are 42.", ""])
        return messages, [self.tool() for _ in range(self.r.choice([0, 0, 1, 2]))], options


# ---- The two sides

def line_of(name, messages, tools, options):
    line = json.dumps({"op": "render", "format": name, "messages": messages, "tools": [f"{OPEN}{i}{OPEN}" for i in range(len(tools))], **options}, ensure_ascii=False)
    for i, tool in enumerate(tools):
        line = line.replace(f'"{OPEN}{i}{OPEN}"', tool.replace("\n", " "))
    return line


def joined(content):
    """One part where the template takes one."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return [{"type": "text", "text": content}]


def for_template(name, messages):
    """What the template gets: arguments as objects, and the parts joined where it would lose all but the first."""
    names, out = {}, []
    for i, m in enumerate(messages):
        m = dict(m)
        if "tool_calls" in m:
            m["tool_calls"] = [{**c, "function": {"name": c["function"]["name"], "arguments": loads(c["function"]["arguments"])}} for c in m["tool_calls"]]
            names.update({c["id"]: c["function"]["name"] for c in m["tool_calls"]})
        if name == "minimax-m1" and m["role"] == "system" and i == 0 and isinstance(m["content"], list):
            m["content"] = joined(m["content"])
        if name == "minimax-m1" and m["role"] == "assistant" and "content" not in m:
            m["content"] = ""
        if name == "minimax-m1-released":
            m["content"] = m.get("content", "")
            if m["role"] in ("system", "user"):
                m["content"] = joined(m["content"])
            elif isinstance(m["content"], str):
                m["content"] = joined(m["content"]) if m["content"] or m["role"] == "tool" else []
            if m["role"] == "tool":
                m["content"] = [{"name": names.get(m.get("tool_call_id"), ""), **part} for part in m["content"]]
        out.append(m)
    return out


def expected(name, template, messages, tools, options):
    """The template's text, or None where it raises."""
    import jinja2
    given = {"tools": [loads(t) for t in tools]} if tools else {}
    try:
        return spelled(template.render(messages=for_template(name, messages), **given, **options))
    except jinja2.exceptions.TemplateError:
        return None


def owners(text, pieces, name):
    """Control tokens in a prompt without user text that spells one are all in trusted pieces."""
    at = 0
    for owner, n in pieces:
        yield owner, text[at:at + n]
        at += n
    assert at == len(text), name


def compare(lines, name, want, conversation):
    got = lines.ask(line_of(name, *conversation))
    if want is None:
        assert "error" in got and "E_CHAT" in got["error"], (name, conversation, got)
        return 0
    assert got.get("text") == want, f"{name}\n{conversation}\nwant {want!r}\ngot  {got.get('text', got)!r}"
    pieces = list(owners(got["text"].encode(), got["pieces"], name))
    own = b"".join(text for owner, text in pieces if owner == 1)
    # Nothing that a user wrote stands in the format's own pieces.
    for word in ("Hello", "São", "中文", "{{ x }}", "&amp;"):
        assert word.encode() not in own
    return len(want)


def random_conversations(count):
    for seed in range(count):
        yield Maker(seed, plain=seed % 2 == 0).conversation()


def check_all(lines, count):
    env, total, compared, refused = environment(), 0, 0, 0
    texts = templates()
    for name, text in texts.items():
        got = lines.ask(json.dumps({"op": "template", "text": text}))["format"]
        assert got == name, (got, name)
        assert lines.ask(json.dumps({"op": "template", "text": text + " "}))["format"] == ""
    # Another spelling of M2's, which renders the same.
    other = texts["minimax-m2.1"].replace("tool_calls[-1].function.name", "tool_calls[-1].name")
    assert other != texts["minimax-m2.1"] and lines.ask(json.dumps({"op": "template", "text": other}))["format"] == "minimax-m2.1"
    texts["minimax-m2.1"] = other
    compiled = {name: env.from_string(text) for name, text in texts.items()}
    for i, conversation in enumerate(random_conversations(count)):
        for name in ("minimax-m1", "minimax-m1-released", ("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7")[i % 4]):
            want = expected(name, compiled[name], *conversation)
            total += compare(lines, name, want, conversation)
            compared += want is not None
            refused += want is None
    return f"{compared} prompts of {total} characters equal jinja2's, {refused} refused by both"


# ---- Replies: what a template writes for an assistant is told apart into what it was made of

TOKENIZER = os.path.join(ROOT, "tests", "data", "tiny-m2", "tokenizer.json")
MARKERS = ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"]


def marker_ids():
    added = {t["content"]: t["id"] for t in json.load(open(TOKENIZER, encoding="utf-8"))["added_tokens"]}
    return {m: added[m] for m in MARKERS}


def schema_type(value):
    return next(name for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"), (type(None), "null"))
                if isinstance(value, kind))


def blank(text):
    return text if text.strip(" \n\r\t") else ""


def make_reply(make, ids):
    """pieces [id, text] in random cuts, the tools, and what they say: reasoning, content, [(name, arguments)]"""
    text = lambda: make.text().replace("</parameter>", "").replace("\x00", "")
    reasoning, content, calls, tools = text(), text(), [], []
    pieces = [(-1, reasoning + "\n"), (ids["</think>"], "</think>"), (-1, "\n\n" + content)]
    for i in range(make.r.choice([0, 1, 2, 3])):
        arguments = {k: json.loads(make.json(2).replace("</parameter>", "")) for k in make.r.sample(["city", "größe", "x y", "a\"b", "中", "1"], make.r.randrange(5))}
        calls.append((f"tool {i}", arguments))
        tools.append({"type": "function", "function": {"name": f"tool {i}", "parameters": {"properties": {k: {"type": schema_type(v)} for k, v in arguments.items()}}}})
    if calls:
        write = lambda v: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
        body = "".join(f'<invoke name="{name}">\n' + "".join(f'<parameter name="{k}">{write(v)}</parameter>\n' for k, v in arguments.items()) + "</invoke>\n"
                       for name, arguments in calls)
        pieces += [(-1, "\n"), (ids["<minimax:tool_call>"], "<minimax:tool_call>"), (-1, "\n" + body), (ids["</minimax:tool_call>"], "</minimax:tool_call>")]
    cut = []
    for id, piece in pieces:
        while id < 0 and piece:
            n = make.r.choice([1, 2, 5, 40, 1000])
            cut.append((-1, piece[:n]))
            piece = piece[n:]
        if id >= 0:
            cut.append((id, piece))
    return cut, tools, (blank(reasoning), blank(content), calls)


def check_replies(lines, count):
    ids, calls, cuts = marker_ids(), 0, 0
    for seed in range(count):
        make = Maker(seed, plain=True)
        pieces, tools, want = make_reply(make, ids)
        got = lines.ask(json.dumps({"op": "reply", "format": "minimax-m2", "tokenizer": TOKENIZER, "tools": tools, "calls": True, "in_reasoning": True, "whole": True, "pieces": pieces}))
        joined = {"reasoning": "", "content": ""}
        found = []
        for kind, call, text in got["events"]:
            if kind in joined:
                joined[kind] += text
            elif kind == "call":
                found.append([text, ""])
            elif kind == "arguments":
                found[call][1] += text
        found = [(name, json.loads(arguments)) for name, arguments in found]
        assert (joined["reasoning"], joined["content"], found) == want, f"{pieces}\nwant {want}\ngot  {got}"
        assert [list(a) for _, a in found] == [list(a) for _, a in want[2]]
        calls += len(found)
        cuts += len(pieces)
    return f"{count} replies in {cuts} pieces with {calls} calls told apart"


def write_vectors():
    env, vectors = environment(), []
    compiled = {name: env.from_string(text) for name, text in templates().items()}
    for i, conversation in enumerate(random_conversations(40)):
        for name in ("minimax-m1", "minimax-m1-released", ("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7")[i % 4]):
            messages, tools, options = conversation
            vectors.append({"format": name, "messages": messages, "tools": tools, "options": options, "text": expected(name, compiled[name], *conversation)})
    with open(VECTORS, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(v, ensure_ascii=True) for v in vectors) + "\n]\n")
    print(f"{len(vectors)} prompts written")


def main():
    words = [w for w in sys.argv[1:] if w != "--write"]
    if "--write" in sys.argv:
        return write_vectors()
    lines = Lines()
    vectors = json.load(open(VECTORS, encoding="utf-8"))
    for v in vectors:
        compare(lines, v["format"], v["text"], (v["messages"], v["tools"], v["options"]))
    kept = f"{check_replies(lines, 1000)}; {len(vectors)} kept prompts"
    if not os.path.isdir(f"{SHARED}/templates"):
        print(f"{kept}; not run: random conversations, the released templates (../shared/templates) are not here")
    else:
        print(f"{kept}; {check_all(lines, int(words[0]) if words else 2000)}")


if __name__ == "__main__":
    main()
