#!/usr/bin/env python3
"""Likelihood of small checkpoints' held-out text for every scheme and search.

  quality.py BIN [--limit WINDOWS] [--schemes A,B] [--models A,B] [--searches A,B] [--act-quant on] [--calibration IDS]

BIN is the folder of the programs. A model is a folder of tests/data, or a path to one; a scheme may be a preset or a recipe's line, too. One row for
each model, scheme and search: negative log-likelihood (NLL) a token over windows of 512, its distance from the unquantised checkpoint and from the
same scheme's absmax; then the Kullback-Leibler divergence (KL) of the next token's distribution from the unquantised checkpoint's, which is how much
likelihood the quantisation costs on text that the checkpoint itself would write, and its distance from absmax. The row gptq is --method gptq after
the search mse, calibrated on the held-out ids that are not scored, or on the ids of --calibration; coupled is the same with --fisher 512. Standard errors of distances are over stretches
of two windows, pairwise. What the next word of this text happens to be moves NLL by a few thousandths either way; KL does not have that noise. Exit
status 1 if a search is worse than absmax in either by more than three standard errors. nvfp4a16 has nvfp4's weights, w4afp8 has w4a16's.

A second table compares the rises of each further model with the first's where both have the same held-out ids: the difference of their distances
from their unquantised checkpoints, pairwise over stretches, and how many standard errors it is."""
import argparse
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file, save_file

SEARCHES = {"block_fp8": [], "channel_fp8": [], "tensor_wise_fp8": [], "mxfp8": [], "int8": ["mse"], "nvfp4": ["mse", "four_six", "gptq", "coupled"],
            "mxfp4": ["mse", "gptq", "coupled"], "w4a16": ["mse", "gptq", "coupled"], "w4a8": ["mse", "gptq", "coupled"]}
WINDOW, BATCH = 512, 8


def log_softmax(x):
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def place(model):
    return model if "/" in model else f"tests/data/{model}"


def calibration(args, model, scored, folder, coupled):
    """Second moments over the ids of --calibration, or over those behind the scored windows."""
    name = os.path.basename(model) + (".coupled" if coupled else "")
    out, rest, packed = (os.path.join(folder, f"{name}.{end}") for end in ("safetensors", "json", "none"))
    if os.path.exists(out):
        return out
    with open(args.calibration or f"{place(model)}/held-out-ids.json", encoding="utf-8") as f, open(rest, "w", encoding="utf-8") as to:
        json.dump(json.load(f)[0 if args.calibration else scored * WINDOW + 1:], to)
    subprocess.run([f"{args.bin}/minimax-convert", place(model), "-o", packed, "--quiet"], check=True)
    subprocess.run([f"{args.bin}/minimax-eval", packed, "--ids", rest, "--act-quant", "off", "--quiet", "--collect", out, "--moments", "512",
                    *(["--fisher", "512"] if coupled else [])], check=True, stdout=subprocess.DEVNULL)
    return out


def windows(args, model, scheme, search, ids, folder):
    """log p of every next id, window by window."""
    out, prompts, logits = (os.path.join(folder, name) for name in ("packed", "prompts.safetensors", "logits.safetensors"))
    extra = ["--search", search] if search else []
    if search in ("gptq", "coupled"):
        extra = ["--method", "gptq", "--importance", calibration(args, model, len(ids), folder, search == "coupled")]
    subprocess.run([f"{args.bin}/minimax-convert", place(model), "-o", out, "--force", "--quant", scheme, "--quiet", *extra], check=True)
    for begin in range(0, len(ids), BATCH):
        count = min(BATCH, len(ids) - begin)
        save_file({f"ids.{i}": ids[begin + i, :WINDOW].copy() for i in range(count)}, prompts)
        subprocess.run([f"{args.bin}/minimax-eval", out, "--logits", logits, "--ids-from", prompts, "--act-quant", args.act_quant], check=True,
                       stdout=subprocess.DEVNULL)
        of = load_file(logits)
        yield from (log_softmax(of[f"logits.{i}"]) for i in range(count))


def measure(args, model, scheme, search, ids, plain, folder):
    """NLL and KL of each stretch of two windows."""
    nll, kl = [], []
    for i, log_p in enumerate(windows(args, model, scheme, search, ids, folder)):
        nll.append(-log_p[np.arange(WINDOW), ids[i, 1:]].mean(dtype="f8"))
        if len(plain) == i:
            plain.append(log_p)
        kl.append((np.exp(plain[i]) * (plain[i] - log_p)).sum(1).mean(dtype="f8"))
    return np.reshape(nll, (-1, 2)).mean(1), np.reshape(kl, (-1, 2)).mean(1)


def distance(x, y):
    """Mean of x - y and its standard error."""
    return (x - y).mean(), (x - y).std(ddof=1) / len(x) ** 0.5


def compare(rises):
    """Print the second table. rises: {(model, its ids as bytes): {(scheme, search): [NLL less bf16's, KL] by stretch}}."""
    (first, text), of_first = next(iter(rises.items()))
    for (model, ids), of in list(rises.items())[1:]:
        if ids != text:
            continue
        print(f"\n| scheme | search | {first}: less `bf16`; KL | {model}: less `bf16`; KL | NLL: difference | in standard errors | KL: difference |\n"
              "|---|---|---|---|---|---|---|")
        for name, (nll, kl) in of.items():
            if name not in of_first:
                continue
            than = [distance(x, y) for x, y in zip((nll, kl), of_first[name])]
            both = ["{:+.4f} ± {:.4f}; {:.5f}".format(*distance(x[0], 0), x[1].mean()) for x in (of_first[name], (nll, kl))]
            print(f"| `{name[0]}` | {name[1]} | {both[0]} | {both[1]} | {than[0][0]:+.4f} ± {than[0][1]:.4f} | {than[0][0] / than[0][1]:+.1f} "
                  f"| {than[1][0]:+.5f} ± {than[1][1]:.5f} |")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("--limit", type=int, default=40)
    p.add_argument("--schemes", default=",".join(SEARCHES))
    p.add_argument("--models", default="tiny-m1,tiny-m2")
    p.add_argument("--searches", default="absmax,mse,four_six,gptq,coupled", help="of those that a scheme has; absmax always")
    p.add_argument("--act-quant", choices=("on", "off"), default="off", help="inputs rounded as the scheme defines, or not; never for the moments")
    p.add_argument("--calibration", help="a JSON list of ids for the moments of gptq")
    args = p.parse_args()
    worse, rises = [], {}
    print("| model | scheme | search | NLL | less `bf16` | less absmax | KL | less absmax |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models.split(","):
            with open(f"{place(model)}/held-out-ids.json", encoding="utf-8") as f:
                text = np.array(json.load(f), "i4")
            count = min(args.limit, (len(text) - 1) // WINDOW) // 2 * 2
            ids = np.stack([text[i * WINDOW:(i + 1) * WINDOW + 1] for i in range(count)])
            plain = []
            none, _ = measure(args, model, "bf16", None, ids, plain, folder)
            name = os.path.basename(model)
            print(f"| {name} | `bf16` | | {none.mean():.4f} | {count * WINDOW} tokens | | | |", flush=True)
            for scheme in args.schemes.split(","):
                absmax = None
                for search in ["absmax", *(x for x in SEARCHES.get(scheme, ["mse", "gptq", "coupled"]) if x in args.searches.split(","))]:
                    found = measure(args, model, scheme, search, ids, plain, folder)
                    absmax = absmax or found
                    rises.setdefault((name, ids.tobytes()), {})[scheme, search] = [found[0] - none, found[1]]
                    than = [distance(x, y) for x, y in zip(found, absmax)]
                    words = ["", ""] if search == "absmax" else [f"{than[0][0]:+.4f} ± {than[0][1]:.4f}", f"{than[1][0]:+.5f} ± {than[1][1]:.5f}"]
                    print(f"| {name} | `{scheme}` | {search} | {found[0].mean():.4f} | {'%+.4f ± %.4f' % distance(found[0], none)} | {words[0]} "
                          f"| {found[1].mean():.5f} | {words[1]} |", flush=True)
                    worse += [f"{model} {scheme}: {what} of {search} is worse than absmax by {mean:.5f} ± {error:.5f}"
                              for what, (mean, error) in zip(("NLL", "KL"), than) if search == "mse" and mean > 3 * error]
    compare(rises)
    print("\n".join(worse) or "no search is worse than absmax by more than three standard errors")
    return 1 if worse else 0


sys.exit(main())
