#!/usr/bin/env python3
"""JSON schemas and replies of noise to them, compared with jsonschema: schemas as pydantic, zod and LangChain write them (tests/data/schemas.json),
and random ones of everything that is served. Each whole reply is valid, and no reply comes to a dead end. The keywords in docs/serving.md are
those of the code. usage: schemas.py [RANDOM SCHEMAS] [SEED]"""
import datetime
import json
import os
import random
import subprocess
import sys

import jsonschema

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
LINES = os.path.join(os.environ.get("BUILD", "build"), "tests/interop/schema_lines")
ROUNDS, SEED = (int(x) for x in sys.argv[1:] + ["60", "1"][len(sys.argv) - 1:])
REFUSED = {"tags": "uniqueItems"}
VALUES = [{"a": [1, "x"], "né": {}}, {"a": 2}, {}, [], [[False], {"k": None}], ["<", 1.5], 7, "a", None, True]
PATTERNS = ["^[a-z]{1,4}$", "^\\d{2,3}(-\\d)?$", "a|b", "^(?=.*\\d)[a-f0-9]{2,6}$", "^(?!ab)[ab]+$", "^\\S+ \\S+$", "^[^\"a-z]{2}", "\\.$", "^(x|é|☃|\\\\|\")*$"]
FORMATS = ["date", "date-time", "time", "uuid", "email", "ipv4", "other"]
FIXED = [  # a reading of one of these that is too wide gives invalid replies at once
    {"allOf": [{"type": "array", "contains": {"const": "x"}}, {"minContains": 0, "maxContains": 5}]},
    {"type": "array", "items": {"enum": [1, "x"]}, "contains": {"const": 1}, "minContains": 2, "maxContains": 2},
    {"allOf": [{"if": {"const": 0}}, {"then": {"const": 1}}, {"type": "null"}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
               {"type": "object", "properties": {"k": {"minimum": 5}}, "required": ["k"]}]},
    {"oneOf": [{"const": 1.5}, {"type": ["string", "number"], "not": {"type": "string"}}]},
    {"oneOf": [{"const": {"a": [1]}}, {"const": {"a": [2]}}]},
    {"$id": "http://a.example/x/one", "items": {"$ref": "two#n"}, "type": "array",
     "$defs": {"n": {"$id": "two", "$ref": "#/$defs/n", "$defs": {"n": {"$anchor": "n", "const": 5}}}, "o": {"$anchor": "n", "const": 6}}},
    {"properties": {"a": {"$ref": "urn:x:y"}, "b": {"$ref": "#k"}}, "required": ["a", "b"], "$defs": {"k": {"$anchor": "k", "type": "null"},
     "y": {"$id": "urn:x:y", "$ref": "#k", "$defs": {"k": {"$dynamicAnchor": "k", "type": "boolean"}}}}},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}, "dependentRequired": {"a": ["b"], "c": ["a"]}},
    {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["b"], "dependentSchemas": {"a": False, "b": {"properties": {"b": {"type": "integer"}}}}},
    {"type": "number", "multipleOf": 0.75, "minimum": -3},
    {"enum": [{"a": {"b": [{}]}}, [[]], {"a": 1}]},
    {"type": "array", "items": {"enum": ["b", "a", 1, 1.0, None, "\u0061", 10]}, "uniqueItems": True, "minItems": 3, "maxItems": 4},
    {"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True, "minItems": 2},
    {"prefixItems": [{"type": "boolean"}, {"enum": ["x", 1]}, {"type": "string"}], "uniqueItems": True, "type": "array", "minItems": 1},
    {"properties": {"a": {"type": "string"}}, "not": {"properties": {"b": {"type": "string"}}, "required": ["b"]}, "unevaluatedProperties": False},
    {"type": "object", "properties": {"k": {"enum": ["a", "b"]}, "v": {}}, "required": ["k", "v"], "if": {"properties": {"k": {"const": "a"}}},
     "then": {"properties": {"v": {"type": "string"}}}, "else": {"properties": {"v": {"type": "integer", "multipleOf": 0.0001}}}},
    {"oneOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}, {"const": 3}]},
    {"allOf": [{"properties": {"foo": True}, "unevaluatedProperties": False}, {"anyOf": [{"properties": {"bar": True}}, {"required": ["foo"]}]}]},
    {"$id": "http://a.example/r", "$ref": "list", "$defs": {"s": {"$dynamicAnchor": "i", "const": "x"}, "list": {"$id": "list", "type": "array",
     "minItems": 1, "items": {"$dynamicRef": "#i"}, "$defs": {"i": {"$dynamicAnchor": "i", "type": "integer"}}}}},
    {"type": "object", "properties": {"a": False, "b": True}, "unevaluatedProperties": {"type": "null"}},
    {"prefixItems": [{"const": 1}, False, True], "unevaluatedItems": False},
    {"type": "array", "prefixItems": [{"type": "null"}], "anyOf": [{"prefixItems": [True, {"const": 2}]}, {"maxItems": 1}], "unevaluatedItems": {"const": 3}},
]
KEYS = ["a", "ab", "b", "né", "x y", "\"q\"", "kind", "n"]


def ask(asked):
    lines = "".join(json.dumps(x) + "\n" for x in asked)
    out = subprocess.run([LINES, f"{ROOT}/tests/data/tiny-m2/tokenizer.json", "2048"], input=lines, capture_output=True, text=True, check=True).stdout
    got = [json.loads(x) for x in out.splitlines()]
    assert len(got) == len(asked)
    return got


def formats():
    """jsonschema's own checks, and stricter ones where it has none without further packages."""
    checker = jsonschema.FormatChecker(["date", "uuid", "email", "ipv4"])
    checker.checks("date-time", ValueError)(lambda x: not isinstance(x, str) or bool(datetime.datetime.fromisoformat(x).tzinfo))
    checker.checks("time", ValueError)(lambda x: not isinstance(x, str) or bool(datetime.time.fromisoformat(x).tzinfo))
    return checker


def validate(schema, text):
    cls = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    cls.check_schema(schema)
    cls(schema, format_checker=formats()).validate(json.loads(text))


def check(name, schema, got):
    for text in got["whole"]:
        try:
            validate(schema, text)
        except (ValueError, jsonschema.ValidationError) as e:
            raise AssertionError(f"{name}: {json.dumps(schema)}\n{text}\n{e}") from e
    assert not got["stuck"], f"{name}: {got['stuck']} replies came to a dead end: {json.dumps(schema)}"
    assert got["ms"] < 2000, f"{name}: {got['ms']} ms"


def everyday():
    with open(f"{ROOT}/tests/data/schemas.json", encoding="utf-8") as f:
        corpus = json.load(f)
    served = 0
    for case, got in zip(corpus, ask([{"schema": c["schema"], "tokens": 400, "replies": 12, "seed": i} for i, c in enumerate(corpus)]), strict=True):
        name = case["name"]
        if "error" in got:
            assert f"\"{REFUSED.get(name)}\" is not served" in got["error"], f"{name}: {got['error']}"
            continue
        check(name, case["schema"], got)
        assert got["whole"] and name not in REFUSED, f"{name}: {got}"
        served += 1
    print(f"{served} of {len(corpus)} everyday schemas are served")
    assert len(corpus) == 35 and served >= 34


class Schemas:
    """Random schemas of what is served."""

    def __init__(self, rng):
        self.rng = rng

    def string(self):
        r, s = self.rng, {"type": "string"}
        if r.random() < 0.3:
            s["pattern"] = r.choice(PATTERNS)
        if r.random() < 0.2:
            s["format"] = r.choice(FORMATS)
        if r.random() < 0.3:
            s["minLength"] = r.randint(0, 4)
        if r.random() < 0.3:
            s["maxLength"] = s.get("minLength", 0) + r.randint(0, 40)
        return s

    def number(self):
        r = self.rng
        s = {"type": r.choice(["integer", "number"])}
        low = r.choice([-1e3, -17, -2.5, -1, 0, 0, 0.1, 1, 3, 99, 1e6, r.randint(-10**6, 10**6), round(r.uniform(-9, 9), r.randint(0, 5))])
        if r.random() < 0.5:
            s[r.choice(["minimum", "exclusiveMinimum"])] = low
        if r.random() < 0.5:
            s[r.choice(["maximum", "exclusiveMaximum"])] = low + r.choice([0, 1, 1.5, 7, 0.25, 1000, r.randint(0, 10**9)])
        if r.random() < 0.2:
            s["multipleOf"] = r.choice([1, 2, 3, 7, 10, 12, 100, 365, 0.5, 1.25, 0.0625])
        return s

    def object(self, depth):
        r = self.rng
        if r.random() < 0.2:
            s = {"type": "object", "additionalProperties": r.choice([False, True, self.any(depth)])}
            if r.random() < 0.3:
                s["propertyNames"] = r.choice([self.string(), {"enum": r.sample(KEYS, 2)}])
            if r.random() < 0.3:
                s["maxProperties"] = r.randint(1, 3)
            if r.random() < 0.2:
                s["minProperties"] = 1
            if r.random() < 0.1:
                s["patternProperties"] = {r.choice(PATTERNS): self.any(depth)}
            return s
        keys = r.sample(KEYS, r.randint(1, 5))
        s = {"type": "object", "properties": {k: self.any(depth) for k in keys}, "required": [k for k in keys if r.random() < 0.5]}
        if r.random() < 0.5:
            s["additionalProperties"] = r.choice([False, False, self.any(depth)])
        if r.random() < 0.15:
            s["required"].append("more")
        if r.random() < 0.15:
            s["properties"][r.choice([k for k in KEYS if k not in keys])] = False
        if r.random() < 0.15:
            s["dependentRequired"] = {r.choice(keys): r.sample(keys, 1) + ["dep"], r.choice(KEYS): r.sample(KEYS, 1)}
        if r.random() < 0.1:
            s["dependentSchemas"] = {r.choice(keys): {"properties": {r.choice(keys): self.any(0), "z2": {"const": 2}}, "required": ["z2"]}, r.choice(KEYS): False}
        if r.random() < 0.15 and "additionalProperties" not in s:
            s["unevaluatedProperties"] = r.choice([False, self.any(depth)])
        if r.random() < 0.2:
            s["minProperties"] = r.randint(0, len(keys))
        if r.random() < 0.2:
            s["maxProperties"] = r.randint(max(1, len(s["required"])), len(keys) + 1)
        return s

    def array(self, depth):
        r = self.rng
        s = {"type": "array", "items": self.any(depth)}
        if r.random() < 0.3:
            s["prefixItems"] = [self.any(depth) for _ in range(r.randint(1, 3))]
            s["items"] = r.choice([False, s["items"]])
        if r.random() < 0.4:
            s["minItems"] = r.randint(0, 2)
        if r.random() < 0.4:
            s["maxItems"] = s.get("minItems", 0) + r.randint(0, 3)
        if r.random() < 0.3:
            s["contains"] = r.choice([self.any(0), {"const": r.choice(VALUES)}])
            if r.random() < 0.4:
                s["minContains"] = r.randint(0, 2)
            if r.random() < 0.3:
                s["maxContains"] = r.randint(1, 4)
        elif r.random() < 0.3:
            s["unevaluatedItems"] = s.pop("items")
        if r.random() < 0.15:
            s["uniqueItems"] = True
            s["items"] = r.choice([{"enum": r.sample(VALUES + [7.0, 1, "b"], 5)}, {"type": "boolean"}, {"const": 1}])
        return s

    def part(self, depth):
        """A schema without a type, as a condition has it."""
        r = self.rng
        key = r.choice(KEYS)
        return r.choice([
            lambda: {"properties": {key: r.choice([{"const": r.choice(VALUES)}, self.any(0)])}},
            lambda: {"properties": {key: {"enum": r.sample([1, 2, "a", "x", None, True], 2)}}, "required": [key]},
            lambda: {"required": r.sample(KEYS, r.randint(1, 2))}, lambda: {"type": r.choice(["object", "string", ["integer", "null"]])},
            lambda: {"minLength": r.randint(0, 3)}, lambda: {"maximum": r.randint(-5, 5)}, lambda: {"exclusiveMinimum": 0}, lambda: {"pattern": r.choice(PATTERNS)},
            lambda: {"items": self.any(0)}, lambda: {"prefixItems": [self.any(0), {"const": 1}]}, lambda: {"contains": {"type": "string"}}, lambda: {"maxItems": r.randint(0, 2)},
            lambda: {"enum": r.sample(VALUES, 3)}, lambda: self.any(depth), lambda: {"not": self.part(0)}, lambda: {"additionalProperties": r.choice([False, self.any(0)])},
            lambda: {"minProperties": 1}, lambda: {"patternProperties": {r.choice(["^a", "b$", "[x-z]"]): self.any(0)}}, lambda: {"uniqueItems": False},
            lambda: {"anyOf": [self.part(0), self.part(0)]}, lambda: {"oneOf": [self.part(0), self.part(0)]}, lambda: {"allOf": [self.part(0), self.part(0)]},
            lambda: {"if": self.part(0), "then": self.part(0), "else": self.part(0)}, lambda: {"multipleOf": r.choice([2, 3])}, lambda: r.choice([True, False])])()

    def mixed(self, depth):
        """Conditions, and unevaluatedProperties and unevaluatedItems next to and within them."""
        r = self.rng
        s = r.choice([{}, self.object(depth), self.array(depth), self.part(depth), self.string(), self.number()])
        s = s if isinstance(s, dict) else {}
        if r.random() < 0.4:
            s["if"] = self.part(depth)
            s.update(r.choice([{"then": self.part(depth)}, {"else": self.part(depth)}, {"then": self.part(depth), "else": self.part(depth)}]))
        for key in ("anyOf", "oneOf", "allOf"):
            if r.random() < 0.25:
                s[key] = [self.part(depth) for _ in range(r.randint(1, 3))]
        if r.random() < 0.25:
            s["not"] = self.part(depth)
        for key in ("unevaluatedProperties", "unevaluatedItems"):
            if r.random() < 0.25:
                s[key] = r.choice([False, False, True, self.any(0)])
        if r.random() < 0.2:
            s = {"allOf": [s, self.part(depth), {r.choice(["unevaluatedProperties", "unevaluatedItems"]): r.choice([False, self.any(0)])}]}
        return s

    def conditions(self, depth):
        """Keywords that say nothing, and those that stand in other schemas of allOf, where they mean nothing either."""
        r = self.rng
        return r.choice([
            {"allOf": [{"if": {"const": 1}}, {"then": False}, {"else": False}, self.any(depth)]},
            {"allOf": [self.array(depth), {"type": "array", "minContains": r.randint(0, 1), "maxContains": r.randint(0, 2)}]},
            {"not": {"type": r.choice(["string", ["array", "object"], ["number", "null"]])}},
            {"type": ["string", "integer", "null", "array"], "not": {"type": r.choice(["string", ["array", "null"], "number"])}},
            {"anyOf": [False, self.any(depth), False]},
        ])

    def union(self, depth):
        r = self.rng
        if r.random() < 0.4:
            tag = r.choice(KEYS)
            return {r.choice(["oneOf", "anyOf"]): [{"type": "object", "properties": {"a": self.any(depth), tag: {"const": f"t{i}"}, "z": self.any(depth)},
                                                    "required": sorted({tag, r.choice(["a", "z"])})} for i in range(r.randint(2, 4))]}
        return {"anyOf": [self.any(depth) for _ in range(r.randint(2, 4))]}

    def both(self, depth):
        parts = [self.object(depth), {"type": "object", "properties": {"extra": self.any(depth), "a": self.any(0)}, "required": ["extra"]}]
        return {"allOf": parts}

    def any(self, depth):
        r = self.rng
        if depth == 0 or r.random() < 0.3:
            return r.choice([self.string, self.number, lambda: {"type": "boolean"}, lambda: {"enum": r.sample([1, 2.5, "x", "a", "é", None, True], 3)},
                             lambda: {"type": [r.choice(["string", "integer"]), "null"]}, lambda: {"const": r.choice(VALUES)},
                             lambda: {"enum": r.sample(VALUES, 4)}])()
        return r.choice([self.object, self.object, self.array, self.array, self.union, self.both, self.conditions, self.mixed])(depth - 1)


def generated():
    asked = [{"schema": s, "tokens": 60, "replies": 20, "seed": 1} for s in FIXED]
    asked += [{"schema": Schemas(random.Random(s)).any(3), "tokens": 160, "replies": 5, "seed": s} for s in range(SEED, SEED + ROUNDS)]
    counts = {"served": 0, "refused": 0, "replies": 0}
    for case, got in zip(asked, ask(asked), strict=True):
        if "error" in got:
            assert got["error"].startswith("E_SCHEMA: json_schema: "), f"{json.dumps(case['schema'])}\n{got}"  # many contradict themselves
            counts["refused"] += 1
            continue
        check(f"seed {case['seed']}", case["schema"], got)
        counts["served"] += 1
        counts["replies"] += len(got["whole"])
    print(", ".join(f"{n} {what}" for what, n in counts.items()))
    assert counts["replies"] > counts["served"] > ROUNDS / 3, counts


def documented():
    said = subprocess.run([LINES, "--keywords"], capture_output=True, text=True, check=True).stdout
    with open(f"{ROOT}/docs/serving.md", encoding="utf-8") as f:
        assert said in f.read(), f"docs/serving.md does not list the keywords of runtime/constrain/schema_compile.c:\n{said}"


documented()
everyday()
generated()
