#!/usr/bin/env python3
"""hardware.py BIN DIR [--check PAGE N]: the tables of docs/hardware.md, computed by minimax-convert --gpu-memory from checkpoints of full size.

DIR gets sparse checkpoints (scripts/sparse_checkpoint.py): m2, m3, and m1 where SHARED has the released config and index. --check compares N rows
of PAGE, drawn by MM_SEED, with what is computed now.
"""
import json
import os
import random
import re
import subprocess
import sys

GPUS = (("80 GB", "80GB"), ("141 GB", "141GB"), ("192 GB", "192GB"))
SCHEMES = {
    "m2": ("block_fp8", "experts_int4", "fp8_attention_nvfp4_experts", "nvfp4", "bf16"),
    "m1": ("bf16", "block_fp8", "experts_int4", "fp8_attention_nvfp4_experts"),
    "m3": ("block_fp8", "mxfp8", "experts_int4", "fp8_attention_nvfp4_experts"),
}
TITLES = {"m2": "MiniMax-M2, M2.1, M2.5, M2.7: up to 196,608 tokens a sequence", "m1": "MiniMax-M1, Text-01: up to 10,240,000 tokens a sequence",
          "m3": "MiniMax-M3: up to 524,288 tokens a sequence, text only"}
HEAD = "| scheme | in all | " + " | ".join(name for name, _ in GPUS) + " |\n|---|---|" + "---|" * len(GPUS)


def sources(directory):
    """The checkpoints that are there, made where they are not."""
    shared = os.path.join(os.environ.get("SHARED", "../shared"), "released/minimax-m1")
    how = {"m2": ["--m2"], "m3": ["--m3"], "m1": ["--config", f"{shared}/config.json", "--index", f"{shared}/model.safetensors.index.json"]}
    for name, options in how.items():
        path = os.path.join(directory, name)
        if not os.path.exists(path) and (name != "m1" or os.path.exists(shared)):
            subprocess.run([sys.executable, "scripts/sparse_checkpoint.py", path, *options], check=True, stdout=subprocess.DEVNULL)
    return {name: path for name in how if os.path.exists(path := os.path.join(directory, name))}


def plan(bin_, source, scheme, tp, memory, *more):
    p = subprocess.run([f"{bin_}/minimax-convert", source, "--names-only", "--dry-run", "--json", "-q", "--quant", scheme, "--tp", str(tp), "--gpu-memory", memory, *more],
                       stdout=subprocess.PIPE, check=True)
    return json.loads(p.stdout)


def row(bin_, source, scheme):
    """GPUs and the tokens of cache that they hold together: the fewest, and the fewest for a sequence of full length."""
    cells, size = [], 0
    for _, memory in GPUS:
        found = []
        for tp in (1, 2, 4, 8):
            p = plan(bin_, source, scheme, tp, memory)
            v, size = p["verdict"], p["output_bytes"]
            if v["kv_tokens"] and (not found or v["fits"]):
                found.append(f"**{tp}**: {v['kv_tokens']:,}")
            if v["fits"] or (found and v.get("smallest_tp", tp) == tp):
                break
        cells.append(", ".join(found) if found else "–")
    return f"| `{scheme}` | {size / 1e9:.0f} GB | " + " | ".join(cells) + " |"


def main():
    bin_, directory = sys.argv[1:3]
    found = sources(directory)
    if sys.argv[3:4] == ["--check"]:
        page, count = open(sys.argv[4], encoding="utf-8").read(), int(sys.argv[5])
        some = random.Random(os.environ.get("MM_SEED", "1")).sample([(n, s) for n in found for s in SCHEMES[n]], count)
        for name, scheme in some:
            line = row(bin_, found[name], scheme)
            assert line in page.split(TITLES[name])[1].split("\n\n###")[0], f"{sys.argv[4]} lacks, of {name}: {line}"
        fp8 = re.findall(r"^\| `(\w+)`, (\d) of (\d+) GB \| (\S+) \| (\S+) \| (\S+) \|$", page, re.M)
        scheme, tp, size, *tokens = fp8[int(os.environ.get("MM_SEED", "1")) % len(fp8)]  # of caches in FP8
        index, both = ["--index-cache-dtype", "fp8"], ["--index-cache-dtype", "fp8", "--kv-cache-dtype", "fp8"]
        held = [f"{plan(bin_, found['m3'], scheme, tp, size + 'GB', *x)['verdict']['kv_tokens']:,}" for x in ([], index, both)]
        assert held == tokens, f"{sys.argv[4]}: {scheme}, {tp} of {size} GB: found {tokens}, expected {held}"
        short = re.findall(r"\b(\d) GPUs?: ([\d,]+\d)", open("README.md", encoding="utf-8").read().split("## Hardware")[1].split("\n## ")[0])
        assert len(short) > 8 and all(f"**{tp}**: {tokens}" in page for tp, tokens in short), short
        return print(f"{count} rows of {sys.argv[4]} as computed")
    for name, source in found.items():
        print(f"### {TITLES[name]}\n\n{HEAD}")
        for scheme in SCHEMES[name]:
            print(row(bin_, source, scheme), flush=True)
        print()


main()
