#!/usr/bin/env python3
"""What placing experts by their load is expected to gain: the fullest rank over the mean of ranks, in order of ids and placed, of a load file, or of
routers whose experts are chosen by Zipf's law.

    scripts/placement.py [--ep 4] [--experts 256] [--top-k 8] [--layers 62] [--alpha 0.5,0.8,1.0] [--tokens 1,16,64,256,1024]
    scripts/placement.py --load load.json
    scripts/placement.py --sample PACKED > load.json

Zipf: expert number n of a layer, in a random order, has weight n^-alpha, and a token chooses top-k of them without repetition. Half of the tokens are
the load that placement sees, the other half is timed. Two figures of a step: rows, the (token, expert) pairs of the fullest rank over the mean, which
bound prompts and large batches; and experts, the distinct experts of the rank that reads most of them, which bound decode steps. "ratio" is
the time in order over the time placed, by either. --sample
writes a load file for the model of a packed checkpoint, by Zipf's law with the first alpha. Standard library alone; one seed, so the figures repeat."""
import argparse
import bisect
import hashlib
import itertools
import json
import random


def place(load, groups):
    """Experts of each group: minimax-convert's rule."""
    each, held, sums = len(load) // groups, [[] for _ in range(groups)], [0] * groups
    for e in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        g = min((g for g in range(groups) if len(held[g]) < each), key=lambda g: (sums[g], g))
        held[g].append(e)
        sums[g] += load[e]
    in_order = [list(range(g * each, (g + 1) * each)) for g in range(groups)]
    return held if max(sums) < max(sum(load[e] for e in g) for g in in_order) else in_order


def choose(rng, cumulative, top_k):
    picked = set()
    while len(picked) < top_k:
        picked.add(min(bisect.bisect(cumulative, rng.random() * cumulative[-1]), len(cumulative) - 1))
    return picked


def group_of(groups):
    return {e: g for g, held in enumerate(groups) for e in held}


def fullest(step, of, groups):
    """(pairs, distinct experts) of the fullest rank over their mean."""
    rows, used = [0] * groups, [set() for _ in range(groups)]
    for picked in step:
        for e in picked:
            rows[of[e]] += 1
            used[of[e]].add(e)
    return max(rows) * groups / sum(rows), max(map(len, used)) * groups / sum(map(len, used))


def zipf(args):
    print(f"{args.experts} experts, top-{args.top_k}, {args.layers} layers, --ep {args.ep}: fullest rank over the mean, mean of layers and steps")
    print("| alpha | tokens | rows in order | placed | ratio | experts in order | placed | ratio |\n|---|---|---|---|---|---|---|---|")
    for alpha in args.alpha:
        sums = {t: [0.0] * 4 for t in args.tokens}
        steps = {t: 0 for t in args.tokens}
        for layer in range(args.layers):
            rng = random.Random(f"{alpha} {layer}")
            weight = [(n + 1) ** -alpha for n in range(args.experts)]
            rng.shuffle(weight)
            cumulative = list(itertools.accumulate(weight))
            tokens = [choose(rng, cumulative, args.top_k) for _ in range(2 * max(args.tokens))]
            seen, timed = tokens[:len(tokens) // 2], tokens[len(tokens) // 2:]
            load = [0] * args.experts
            for e in itertools.chain.from_iterable(seen):
                load[e] += 1
            each = args.experts // args.ep
            order = group_of([range(g * each, (g + 1) * each) for g in range(args.ep)])
            placed = group_of(place(load, args.ep))
            for t in args.tokens:
                for at in range(0, min(len(timed) - t, 15 * t) + 1, t):
                    found = (*fullest(timed[at:at + t], order, args.ep), *fullest(timed[at:at + t], placed, args.ep))
                    sums[t] = [a + b for a, b in zip(sums[t], found)]
                    steps[t] += 1
        for t in args.tokens:
            rows, used, placed_rows, placed_used = (x / steps[t] for x in sums[t])
            print(f"| {alpha} | {t} | {rows:.3f} | {placed_rows:.3f} | {rows / placed_rows:.2f} | {used:.3f} | {placed_used:.3f} | {used / placed_used:.2f} |")


def of_file(args):
    with open(args.load, encoding="utf-8") as f:
        layers = json.load(f)["load"]
    each = len(layers[0]) // args.ep
    before = sum(max(sum(x[g * each:(g + 1) * each]) for g in range(args.ep)) for x in layers)
    after = sum(max(sum(x[e] for e in g) for g in place(x, args.ep)) for x in layers)
    mean = sum(map(sum, layers)) / args.ep
    print(f"--ep {args.ep}: fullest rank over the mean {before / mean:.4f} in order, {after / mean:.4f} placed, ratio {before / after:.2f}")


def sample(args):
    """The digest is that of the manifest's line of its model."""
    with open(args.sample + "/manifest.json", encoding="utf-8") as f:
        line = next(x for x in f if x.startswith('"model":'))[len('"model":'):].rstrip().removesuffix(",")
    model, rng = json.loads(line), random.Random(1)
    weights = [int(1e6 * (n + 1) ** -args.alpha[0]) for n in range(model["experts"])]
    print(json.dumps({"format": "minimax-expert-load", "version": 1, "model": hashlib.sha256(line.encode()).hexdigest(), "architecture": model["architecture"],
                      "load": [rng.sample(weights, len(weights)) for _ in range(model["layers"])]}))


def numbers(kind):
    return lambda text: [kind(x) for x in text.split(",")]


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--load", metavar="FILE", help="a load file instead of Zipf's law")
parser.add_argument("--sample", metavar="PACKED", help="write a load file for this checkpoint")
parser.add_argument("--alpha", type=numbers(float), default=[0.5, 0.8, 1.0])
parser.add_argument("--tokens", type=numbers(int), default=[1, 16, 64, 256, 1024])
for name, default in (("ep", 4), ("experts", 256), ("top-k", 8), ("layers", 62)):
    parser.add_argument(f"--{name}", type=int, default=default)
ARGS = parser.parse_args()
(sample if ARGS.sample else of_file if ARGS.load else zipf)(ARGS)
