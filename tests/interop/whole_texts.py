#!/usr/bin/env python3
"""Regular expressions and grammars that hold a whole reply: which random texts they accept, and replies of noise, compared with Python's re
and with a matcher of GBNF that is written here. What is not served, or would take too long, is refused by name at once.
usage: whole_texts.py [ROUNDS] [SEED]"""
import json
import os
import random
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
LINES = os.path.join(os.environ.get("BUILD", "build"), "tests/interop/schema_lines")
ROUNDS, SEED = (int(x) for x in sys.argv[1:] + ["40", "1"][len(sys.argv) - 1:])
LETTERS = "ab1 é-"


def ask(asked):
    lines = "".join(json.dumps(x) + "\n" for x in asked)
    out = subprocess.run([LINES, f"{ROOT}/tests/data/tiny-m2/tokenizer.json", "2048"], input=lines, capture_output=True, text=True, check=True).stdout
    got = [json.loads(x) for x in out.splitlines()]
    assert len(got) == len(asked)
    return got


# ---- regular expressions ----

def regex(r, depth=3):
    kind = r.randrange(9 if depth else 4)
    if kind < 2:
        return r.choice(LETTERS)
    if kind == 2:
        return r.choice(["[ab]", "[^a]", "[a-c1]", "\\d", "\\w", "\\s", ".", "[\\d-]", "[^\\W1]", "[^\\D]", "[^\\S]"])
    if kind == 3:
        return r.choice(["ab", "a1", "é "])
    if kind < 6:
        return "".join(regex(r, depth - 1) for _ in range(r.randrange(1, 4)))
    if kind == 6:
        return "(" + "|".join(regex(r, depth - 1) for _ in range(r.randrange(1, 4))) + ")"
    return "(?:" + regex(r, depth - 1) + ")" + r.choice(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])


# ---- grammars ----

class Grammar:
    """Rules: name -> alternatives of parts (kind, value). Random ones never begin with themselves: a part that may be empty is not before
    a rule of the same or an earlier name."""

    def __init__(self, r):
        self.r, self.names = r, ["root", "one", "two", "three"]
        self.rules = {n: self.alternatives(i, 2) for i, n in enumerate(self.names)}
        if r.random() < 0.5:
            self.rules["one"].append([("text", "("), ("rule", r.choice(self.names)), ("text", ")")])

    def alternatives(self, i, depth):
        return [self.sequence(i, depth) for _ in range(self.r.randrange(1, 4))]

    def sequence(self, i, depth):
        r = self.r
        parts = [self.part(i, depth, False)] + [self.part(i, depth, r.random() < 0.6) for _ in range(r.randrange(3))]
        return parts if r.random() < 0.85 else []

    def part(self, i, depth, inner):
        """inner: a character was read before, so that any rule may follow."""
        r = self.r
        kind = r.randrange(7 if depth else 3)
        later = self.names[i + 1:]
        if kind == 0:
            return ("class", r.choice([("ab", False), ("a1", True), ("é ", False), ("", True)]))
        if kind in (1, 2):
            return ("text", "".join(r.choice(LETTERS) for _ in range(r.randrange(1, 3))))
        if kind == 3 and later:
            return ("rule", r.choice(later))
        if kind == 4 and inner:
            return ("seq", [("text", r.choice(LETTERS)), ("rule", r.choice(self.names))])
        if kind == 5:
            return ("group", self.alternatives(i, depth - 1))
        lo, hi = r.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 3)])
        return ("repeat", (self.part(i, depth - 1, inner), lo, hi))

    def text(self):
        return "".join(f"{n} ::= {self.shown(a, ' | ')}\n" for n, a in self.rules.items()) + "# the end"

    def shown(self, alternatives, between):
        return between.join(" ".join(self.shown_part(p) for p in s) or '""' for s in alternatives)

    def shown_part(self, p):
        kind, v = p
        if kind == "class":
            return "." if v == ("", True) else "[" + ("^" if v[1] else "") + v[0] + "]"
        if kind == "text":
            return '"' + v + '"'
        if kind == "rule":
            return v
        if kind == "seq":
            return "(" + " ".join(self.shown_part(x) for x in v) + ")"
        if kind == "group":
            return "(" + self.shown(v, "\n  | ") + ")"
        part, lo, hi = v
        sign = {(0, None): "*", (1, None): "+", (0, 1): "?", (2, 2): "{2}", (1, 3): "{1,3}"}[lo, hi]
        return self.shown_part(part) + sign

    # The matcher: all places where a part that begins at `at` may end.
    def ends(self, kind, v, text, at, memo):
        key = (kind, id(v) if kind != "rule" else v, at)
        if key in memo:
            return memo[key]
        memo[key] = set()
        if kind == "class":
            out = {at + 1} if at < len(text) and (text[at] in v[0]) != v[1] else set()
        elif kind == "text":
            out = {at + len(v)} if text.startswith(v, at) else set()
        elif kind == "rule":
            out = self.any(self.rules[v], text, at, memo)
        elif kind == "seq":
            out = self.any([v], text, at, memo)
        elif kind == "group":
            out = self.any(v, text, at, memo)
        else:
            part, lo, hi = v
            out, now, count = set(), {at}, 0
            while now and (hi is None or count <= hi) and count <= len(text) + lo:
                if count >= lo:
                    out |= now
                now, count = set().union(*(self.ends(*part, text, a, memo) for a in now)), count + 1
        memo[key] = out
        return out

    def any(self, alternatives, text, at, memo):
        out = set()
        for s in alternatives:
            now = {at}
            for p in s:
                now = set().union(*(self.ends(*p, text, a, memo) for a in now)) if now else now
            out |= now
        return out

    def matches(self, text):
        return len(text) in self.any(self.rules["root"], text, 0, {})


def compare(what, asked, truth):
    taken = refused = whole = 0
    for a, got in zip(asked, ask(asked), strict=True):
        if "error" in got:
            assert re.search("no text fits|too large|has no text", got["error"]), (a, got)
            refused += 1
            continue
        for text, found in zip(a["texts"], got["accepts"], strict=True):
            assert found == truth(a, text), f"{what}: {a[what]!r}: {text!r}: found {found}"
            taken += found
        for text in got["whole"]:
            assert truth(a, text), f"{what}: {a[what]!r}: the reply {text!r}"
        whole += len(got["whole"])
        assert not got["stuck"] and got["ms"] < 1000, (a, got)
    assert refused * 4 < len(asked) and taken > len(asked) and whole > len(asked), (what, taken, whole, refused)
    return f"{taken} texts and {whole} replies of {len(asked)} {what}s"


def texts(r, more):
    return [t for t in (more() for _ in range(20)) if t] + ["".join(r.choice(LETTERS) for _ in range(r.randrange(6))) for _ in range(30)]


def refusals():
    deep = "root ::= " + "(" * 30 + '"a"' + ")" * 30
    doubling = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + '\nr60 ::= "a"\nroot ::= r0'
    wide = "root ::= " + " | ".join(f'"{i}"' for i in range(900))
    wrong = [("regex", "(a", "without its end"), ("regex", "a\\b", "\\\\b"), ("regex", "(?i)a", "such a group"), ("regex", "(a)\\1", "reference"),
             ("regex", "((a{900}){900}){900}", "too large"), ("regex", "[ab]*a[ab]{30}", "too large"), ("regex", "^(?!a)a$", "no text fits"),
             ("grammar", "rooot ::= \"a\"", "no rule \"root\""), ("grammar", "root ::= x", "no rule \"x\""), ("grammar", "root ::= \"a", "line 1"),
             ("grammar", "root ::= root \"a\" | \"a\"", "left recursion"), ("grammar", "root ::= e? x\ne ::= \"e\"?\nx ::= e root | \"a\"", "left recursion"),
             ("grammar", "root ::= \"a\" root", "has no text that ends"), ("grammar", "root ::= <think>", "tokens"), ("grammar", deep, "groups"),
             ("grammar", "root ::= \"a\"\n\nroot ::= \"b\"", "line 3: a second rule"), ("grammar", "root ::= [z-a]", "larger to a smaller"),
             ("grammar", "root ::= (\"a\"{60000}){60000}", "too large"), ("grammar", "", "root"), ("grammar", "root ::= \"\\q\"", "escape"),
             ("grammar", "root ::= [ab]* \"a\" [ab]{30}", "too large"), ("grammar", "root ::= " + "\"\" | " * 20000 + "\"a\"", "65,536 bytes")]
    good = [("grammar", doubling, None), ("grammar", wide, "77"), ("grammar", "root ::= \"a\" |\n  \"b\"\n  | \"c\" # d\n", "c"),
            ("regex", "^(?=.*1)[a1]+$", "a1a"), ("grammar", "root ::= \"a\" root | \"b\"", "a" * 300 + "b"),
            ("grammar", "root ::= x* \"b\"\nx ::= \"a\"? | \"(\" x \")\"", "a(a)()b"),
            ("grammar", "root ::= \"(\" root \")\" | x\nx ::= [^()\\n]* \"\\u00e9\\x41\\\"\"", "((zéA\"))")]
    for (kind, text, why), got in zip(wrong + good, ask([{kind: t, "tokens": 0, "replies": 0, "seed": 1, "texts": [w or ""]} for kind, t, w in wrong + good]),
                                      strict=True):
        assert got["ms"] < 1500, (text[:80], got)
        if (kind, text, why) in wrong:
            assert why in got.get("error", ""), (text[:80], why, got)
        elif why:
            assert got["accepts"] == [True], (text[:80], got)


def main():
    r = random.Random(SEED)
    patterns = [regex(r) for _ in range(ROUNDS)]
    asked = [{"regex": p, "tokens": 30, "replies": 6, "seed": i, "texts": texts(r, lambda p=p: "".join(r.choice(LETTERS + p) for _ in range(r.randrange(8))))}
             for i, p in enumerate(patterns)]
    one = compare("regex", asked, lambda a, text: re.fullmatch(a["regex"], text, re.ASCII) is not None)
    grammars = [Grammar(r) for _ in range(ROUNDS)]
    asked = [{"grammar": g.text(), "tokens": 30, "replies": 6, "seed": i, "texts": texts(r, lambda: "".join(r.choice(LETTERS + "()") for _ in range(r.randrange(8))))}
             for i, g in enumerate(grammars)]
    by_text = {g.text(): g for g in grammars}
    two = compare("grammar", asked, lambda a, text: by_text[a["grammar"]].matches(text))
    refusals()
    print(f"{one}, {two}")


main()
