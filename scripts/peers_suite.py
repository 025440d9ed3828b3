#!/usr/bin/env python3
"""JSON-Schema-Test-Suite by minimax-serve's schemas and, where they are installed, by xgrammar and llguidance: groups whose schema is served;
of these the ones of which every invalid instance is refused; and replies of noise by minimax-serve, each of which must be valid. The suite
comes with the sources of the package jsonschema: `pip download --no-binary jsonschema jsonschema==4.26.0`, then its folder json.
usage: peers_suite.py BUILD SUITE [DRAFT]"""
import collections
import glob
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import jsonschema

from xgrammar_stand_in import stand_in

BUILD, SUITE = sys.argv[1:3]
DRAFT = sys.argv[3] if len(sys.argv) > 3 else "draft2020-12"
VOCAB = 2048
VALIDATOR = jsonschema.validators.validator_for({"$schema": {"draft7": "http://json-schema.org/draft-07/schema#"}.get(DRAFT, "")}, jsonschema.Draft202012Validator)


def groups():
    """(keyword, schema, [(instance, valid), …]) of the suite's required tests."""
    for path in sorted(glob.glob(f"{SUITE}/tests/{DRAFT}/*.json")):
        with open(path, encoding="utf-8") as f:
            for group in json.load(f):
                yield os.path.basename(path)[:-5], group["schema"], [(t["data"], t["valid"]) for t in group["tests"]]


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
    suite = list(groups())
    results = ours(suite)
    tables = {"minimax-serve": report("minimax-serve", suite, results)}
    replies = 0
    for (keyword, schema, _), got in zip(suite, results, strict=True):
        for text in got[1] if got else []:
            VALIDATOR(schema).validate(json.loads(text)), keyword
            replies += 1
    print(f"minimax-serve: {replies} whole replies, each valid")
    for name, engine in (("xgrammar", xgrammar), ("llguidance", llguidance)):
        if importlib.util.find_spec(name):
            tables[name] = report(f"{name} {importlib.metadata.version(name)}", suite, list(engine(suite)))
        else:
            print(f"{name} is not installed")
    for keyword in tables["minimax-serve"]:
        print(f"{keyword}: " + ", ".join(f"{name} {t[keyword][0]}" for name, t in tables.items()) + f", of {tables['minimax-serve'][keyword][1]}")


main()
