#!/usr/bin/env python3
"""Masks of the everyday schemas (tests/data/schemas.json) by llguidance and xgrammar, where they are installed, next to bench_masks: schemas
that are served, microseconds a mask over replies of noise, at the 200,064 ids of tests/bench/large_tokenizer.h.
usage: peers_schemas.py BUILD [TOKENS [ROUNDS]]"""
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

from xgrammar_stand_in import stand_in

BUILD, TOKENS, ROUNDS = sys.argv[1], *(int(x) for x in sys.argv[2:] + ["200", "3"][len(sys.argv) - 2:])
VOCAB, END = 200064, 0
CLOSERS = [ord(c) for c in "\"}],:"]


def pick(r, ids, has):
    """As bench_masks picks: the end, or what closes something, each half of the time."""
    if has(END) and r.random() < 0.5:
        return END
    closing = [c for c in CLOSERS if has(c)]
    return r.choice(closing) if closing and r.random() < 0.5 else int(ids[r.randrange(len(ids))])


def llguidance(path):
    import llguidance
    import llguidance.numpy as masks
    import numpy
    tokenizer = llguidance.LLTokenizer(path, n_vocab=VOCAB, eos_token=END)
    bitmask = masks.allocate_token_bitmask(1, VOCAB)

    def compile_schema(schema):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        if llguidance.LLMatcher.validate_grammar(grammar, tokenizer):
            return None
        return lambda: llguidance.LLMatcher(tokenizer, grammar)

    def mask(m):
        masks.fill_next_token_bitmask(m, bitmask, 0)
        return numpy.unpackbits(bitmask[0].view(numpy.uint8), bitorder="little")

    return compile_schema, lambda m: masks.fill_next_token_bitmask(m, bitmask, 0), mask, lambda m, i: m.consume_token(i), lambda m: m.is_stopped()


def xgrammar(path):
    import numpy
    stand_in()
    import xgrammar
    with open(path, encoding="utf-8") as f:
        vocabulary = json.load(f)["model"]["vocab"]
    words = [w for w, _ in sorted(vocabulary.items(), key=lambda x: x[1])]
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.BYTE_LEVEL, vocab_size=VOCAB, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info)
    bitmask = numpy.zeros((1, (VOCAB + 31) // 32), dtype=numpy.int32)

    def compile_schema(schema):
        try:
            grammar = compiler.compile_json_schema(json.dumps(schema))
        except Exception as e:  # of which it has several, by version
            assert "schema" in str(e).lower() or "pattern" in str(e).lower() or "regex" in str(e).lower(), e
            return None
        return lambda: xgrammar.GrammarMatcher(grammar)

    def fill(m):
        if not m.fill_next_token_bitmask(bitmask, 0):
            bitmask.fill(-1)  # anything may follow

    def mask(m):
        return numpy.unpackbits(bitmask[0].view(numpy.uint8), bitorder="little")

    return compile_schema, fill, mask, lambda m, i: m.accept_token(i), lambda m: m.is_terminated()


def measure(name, engine):
    compile_schema, fill, mask, accept, ended = engine
    r, took, compiling, served = random.Random(1), [], [], 0
    with open("tests/data/schemas.json", encoding="utf-8") as f:
        corpus = json.load(f)
    for case in corpus:
        begun = time.process_time()
        make = compile_schema(case["schema"])
        compiling.append(time.process_time() - begun)
        served += make is not None
        for _ in range(ROUNDS if make else 0):
            m = make()
            for _ in range(TOKENS):
                begun = time.process_time_ns()
                fill(m)
                took.append((time.process_time_ns() - begun) / 1e3)
                bits = mask(m)
                i = pick(r, bits.nonzero()[0], lambda k, bits=bits: bits[k])
                if i == END or not accept(m, i) or ended(m):
                    break
    took.sort()
    print(f"{name}: {served} of {len(corpus)} schemas, compiled in {1e3 * statistics.mean(compiling):.2f} ms, {len(took)} masks: mean "
          f"{statistics.mean(took):.1f} us, median {took[len(took) // 2]:.1f}, p99 {took[len(took) * 99 // 100]:.1f}, most {took[-1]:.1f}")


def main():
    subprocess.run([f"{BUILD}/tests/bench/bench_masks", str(TOKENS), str(ROUNDS)], check=True)
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "tokenizer.json")
        subprocess.run([f"{BUILD}/tests/bench/bench_tokenizer", path], check=True)
        for name, engine in (("llguidance", llguidance), ("xgrammar", xgrammar)):
            if importlib.util.find_spec(name):
                measure(f"{name} {importlib.metadata.version(name)}", engine(path))
            else:
                print(f"{name} is not installed")


main()
