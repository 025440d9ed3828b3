#!/usr/bin/env python3
"""JSON-Schema-Test-Suite by minimax-serve's schemas and, where they are installed, by xgrammar and llguidance: groups whose schema is served;
of these the ones of which every invalid instance is refused; and replies of noise by minimax-serve, each of which must be valid. Documents that a
schema refers to (the suite's remotes, the metaschemas) are embedded in its $defs, as JSON Schema 2020-12 bundles them: no engine fetches any;
--alone leaves them out. The suite comes with the sources of the package jsonschema: `scripts/sdist.py DIR jsonschema==4.26.0`, then its folder json.
usage: peers_suite.py BUILD SUITE [DRAFT] [--alone]"""
import collections
import copy
import glob
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse

import jsonschema
import jsonschema_specifications
import referencing.jsonschema

from xgrammar_stand_in import stand_in

ALONE = "--alone" in sys.argv
ARGUMENTS = [x for x in sys.argv[1:] if x != "--alone"]
BUILD, SUITE = ARGUMENTS[:2]
DRAFT = ARGUMENTS[2] if len(ARGUMENTS) > 2 else "draft2020-12"
VOCAB = 2048
VALIDATOR = jsonschema.validators.validator_for({"$schema": {"draft7": "http://json-schema.org/draft-07/schema#"}.get(DRAFT, "")}, jsonschema.Draft202012Validator)


def remotes():
    """The documents that schemas of the suite may refer to, by their URIs."""
    documents = {uri: resource.contents for uri, resource in jsonschema_specifications.REGISTRY.items()}
    for path in glob.glob(f"{SUITE}/remotes/**/*.json", recursive=True):
        place = os.path.relpath(path, f"{SUITE}/remotes")
        if not place.startswith("draft") or place.startswith(DRAFT):
            with open(path, encoding="utf-8") as f:
                documents[f"http://localhost:1234/{place}"] = json.load(f)
    return documents


def references(value, base):
    """The URIs that $ref and $dynamicRef of the schema lead to, without fragments."""
    if isinstance(value, list):
        for x in value:
            yield from references(x, base)
    if isinstance(value, dict):
        base = urllib.parse.urljoin(base, value["$id"]) if isinstance(value.get("$id"), str) else base
        for key, x in value.items():
            if key in ("$ref", "$dynamicRef") and isinstance(x, str):
                yield urllib.parse.urldefrag(urllib.parse.urljoin(base, x)).url
            yield from references(x, base)


def bundled(schema, documents):
    """The schema with the documents that it refers to, each with the URI that leads to it."""
    needed, found = list(references(schema, "")), {}
    while needed:
        uri = needed.pop()
        if uri not in documents or uri in found or (isinstance(schema, dict) and schema.get("$id") == uri):
            continue
        found[uri] = copy.deepcopy(documents[uri])
        own = found[uri].setdefault("$id", uri)
        needed += references(found[uri], uri)
        if own.rstrip("#") != uri:  # it was fetched from another place than its name
            found[uri] = {"$id": uri, "$ref": own, "$defs": {"named": found[uri]}}
    if not found:
        return schema
    return {**schema, "$defs": {**schema.get("$defs", {}), **{f"document {i}": x for i, x in enumerate(found.values())}}}


def groups(documents):
    """(keyword, schema with the documents that it needs, [(instance, valid), …]) of the suite's required tests."""
    for path in sorted(glob.glob(f"{SUITE}/tests/{DRAFT}/*.json")):
        with open(path, encoding="utf-8") as f:
            for group in json.load(f):
                yield os.path.basename(path)[:-5], bundled(group["schema"], documents), [(t["data"], t["valid"]) for t in group["tests"]]


def ours(suite):
    """For each group None, or (accepted instances, whole replies)."""
    lines = "".join(json.dumps({"schema": schema, "tokens": 60, "replies": 6, "seed": i, "texts": [json.dumps(x) for x, _ in tests]}) + "\n"
                    for i, (_, schema, tests) in enumerate(suite))
    out = subprocess.run([f"{BUILD}/tests/interop/schema_lines", "tests/data/tiny-m2/tokenizer.json", str(VOCAB)], input=lines, capture_output=True, text=True, check=True)
    return [None if "error" in got else (got["accepts"], got["whole"]) for got in map(json.loads, out.stdout.splitlines())]


def xgrammar(suite):
    stand_in()
    import xgrammar
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + ["</s>"], xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info)
    for _, schema, tests in suite:
        try:
            grammar = compiler.compile_json_schema(json.dumps(schema))
        except Exception:  # of which it has several, by version
            yield None
            continue
        accepted = []
        for x, _ in tests:
            m = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
            accepted.append(m.accept_string(json.dumps(x, ensure_ascii=False)) and m.is_terminated())
        yield accepted, []


def llguidance(suite):
    import llguidance
    with tempfile.TemporaryDirectory() as d:
        words = {chr(i) if 32 < i < 127 else chr(256 + i): i for i in range(256)}
        path = os.path.join(d, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"version": "1.0", "added_tokens": [{"id": 256, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
                                                           "rstrip": False, "normalized": False}], "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False,
                       "trim_offsets": True, "use_regex": False}, "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}, "model": {"type": "BPE", "vocab": words, "merges": []}}, f)
        tokenizer = llguidance.LLTokenizer(path, n_vocab=257, eos_token=256)
    for _, schema, tests in suite:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        if llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
            yield None
            continue
        accepted = []
        for x, _ in tests:
            m = llguidance.LLMatcher(tokenizer, grammar)
            ids = tokenizer.tokenize_str(json.dumps(x, ensure_ascii=False))
            accepted.append(m.validate_tokens(ids) == len(ids) and m.consume_tokens(ids) and m.is_accepting())
        yield accepted, []


def report_outside(name, suite, results, alone):
    """Of the schemas that refer to other documents, given as they stand."""
    outside = [(tests, got) for (_, schema, tests), (_, whole, _), got in zip(alone, suite, results, strict=True) if schema != whole]
    served = [(tests, got) for tests, got in outside if got is not None]
    held = sum(not any(a and not valid for a, (_, valid) in zip(got[0], tests, strict=True)) for tests, got in served)
    wrong = sum(a and not valid for tests, got in served for a, (_, valid) in zip(got[0], tests, strict=True))
    print(f"{name}: of {len(outside)} schemas that refer to other documents, given without these, {len(served)} served; {held} of them let no invalid instance pass ({wrong} do)")


def report(name, suite, results):
    served = exact = wrong = narrow = instances = 0
    by = collections.defaultdict(lambda: [0, 0])
    for (keyword, _, tests), got in zip(suite, results, strict=True):
        by[keyword][1] += 1
        if got is None:
            continue
        served += 1
        by[keyword][0] += 1
        bad = sum(a and not valid for a, (_, valid) in zip(got[0], tests, strict=True))
        narrow += sum(not a and valid for a, (_, valid) in zip(got[0], tests, strict=True))
        instances += len(tests)
        wrong += bad
        exact += bad == 0
    print(f"{name}: {served} of {len(suite)} schemas served, {exact} of them let no invalid instance pass ({wrong} do); "
          f"{narrow} of {instances} instances are valid and not generated")
    return by


def main():
    documents = remotes()
    suite = list(groups({} if ALONE else documents))
    results = ours(suite)
    tables = {"minimax-serve": report("minimax-serve", suite, results)}
    alone, whole = list(groups({})), list(groups(documents))
    if ALONE:
        report_outside("minimax-serve", whole, results, alone)
    replies = 0
    registry = referencing.Registry().with_resources((uri, referencing.jsonschema.DRAFT202012.create_resource(x)) for uri, x in documents.items())
    for (_, schema, _), got in zip(groups({}), results, strict=True):
        for text in got[1] if got else []:
            VALIDATOR(schema, registry=registry).validate(json.loads(text))
            replies += 1
    print(f"minimax-serve: {replies} whole replies, each valid")
    for name, engine in (("xgrammar", xgrammar), ("llguidance", llguidance)):
        if importlib.util.find_spec(name):
            got, title = list(engine(suite)), f"{name} {importlib.metadata.version(name)}"
            tables[name] = report(title, suite, got)
            if ALONE:
                report_outside(title, whole, got, alone)
        else:
            print(f"{name} is not installed")
    for keyword in tables["minimax-serve"]:
        print(f"{keyword}: " + ", ".join(f"{name} {t[keyword][0]}" for name, t in tables.items()) + f", of {tables['minimax-serve'][keyword][1]}")


main()
