#!/usr/bin/env python3
"""Negative log-likelihood of the two small checkpoints for every scheme and search on their held-out text.

  quality.py BIN [--limit WINDOWS] [--schemes A,B] [--models A,B]

BIN is the folder of the programs. One row for each model, scheme and search: NLL a token, its distance from the unquantised checkpoint, and
from the same scheme's absmax, each with the standard error of that distance (over stretches of two windows of 512 tokens, pairwise). A search
minimises squared error, not NLL; on models this small a few thousandths either way are the text's. Exit status 1 if a search is worse than
absmax by more than three standard errors. nvfp4a16 has nvfp4's weights, w4afp8 has w4a16's."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

SEARCHES = {"block_fp8": [], "channel_fp8": [], "tensor_wise_fp8": [], "mxfp8": [], "int8": ["mse"], "nvfp4": ["mse", "four_six"],
            "mxfp4": ["mse"], "w4a16": ["mse"], "w4a8": ["mse"]}
STRETCH = 1024


def stretches(model, tokens, folder):
    """Files of ids: each stretch and the id that follows it."""
    with open(f"tests/data/{model}/held-out-ids.json", encoding="utf-8") as f:
        ids = json.load(f)
    paths = []
    for at in range(0, min(tokens, len(ids) - 1) - STRETCH + 1, STRETCH):
        paths.append(os.path.join(folder, f"{model}-{at}.json"))
        with open(paths[-1], "w", encoding="utf-8") as f:
            json.dump(ids[at:at + STRETCH + 1], f)
    return paths


def nll(args, model, scheme, search, texts, folder):
    """Of each stretch."""
    out = os.path.join(folder, f"{model}-{scheme}-{search}")
    extra = ["--search", search] if search else []
    subprocess.run([f"{args.bin}/minimax-convert", f"tests/data/{model}", "-o", out, "--quant", scheme, "--quiet", *extra], check=True)
    return [json.loads(subprocess.run([f"{args.bin}/minimax-eval", out, "--ids", text, "--window", "512", "--act-quant", "off", "--json"], check=True,
                                      stdout=subprocess.PIPE).stdout)["nll"] for text in texts]


def distance(x, y):
    """Mean of x - y and its standard error."""
    d = [a - b for a, b in zip(x, y)]
    return statistics.mean(d), statistics.stdev(d) / len(d) ** 0.5


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("--limit", type=int, default=40)
    p.add_argument("--schemes", default=",".join(SEARCHES))
    p.add_argument("--models", default="tiny-m1,tiny-m2")
    args = p.parse_args()
    worse = []
    print("| model | scheme | search | NLL | - none | - absmax |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            texts = stretches(model, args.limit * 512, folder)
            none = nll(args, model, "bf16", None, texts, folder)
            print(f"| {model} | `bf16` | | {statistics.mean(none):.4f} | {len(texts) * STRETCH} tokens | |", flush=True)
            for scheme in args.schemes.split(","):
                absmax = None
                for search in ["absmax", *SEARCHES[scheme]]:
                    x = nll(args, model, scheme, search, texts, folder)
                    line = f"| {model} | `{scheme}` | {search} | {statistics.mean(x):.4f} | {'%+.4f ± %.4f' % distance(x, none)} |"
                    if search == "absmax":
                        absmax = x
                        print(line + " |", flush=True)
                        continue
                    mean, error = distance(x, absmax)
                    print(line + f" {mean:+.4f} ± {error:.4f} |", flush=True)
                    if search == "mse" and mean > 3 * error:
                        worse.append(f"{model} {scheme}: mse is worse than absmax by {mean:.4f} ± {error:.4f}")
    print("\n".join(worse) or "no search is worse than absmax by more than three standard errors")
    return 1 if worse else 0


sys.exit(main())
