#!/usr/bin/env python3
"""draft_acceptance.py BUILD PACKED HELD_OUT: tokens a step of a packed checkpoint with a draft, served by minimax-serve on a CPU.

HELD_OUT has token ids of held-out documents. Their beginnings are continued at temperatures 0, 0.7 and 1 (each document has its own seed), with proposals and
without; the exit status is 1 if a reply differs. A step gives a token and the proposals that were right. Lookup makes proposals too where it finds more than the
draft, in the sequence alone: a salt keeps other replies away. The end of a line says how many of the proposals are the draft's."""
import argparse
import json
import os
import sys
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build")
parser.add_argument("packed")
parser.add_argument("held_out")
parser.add_argument("--drafts", default="7")
parser.add_argument("--prompt", type=int, default=64)
parser.add_argument("--reply", type=int, default=128)
parser.add_argument("--start", type=int, default=2040, help="id that begins a document")
args = parser.parse_args()
os.environ.update(BUILD=os.path.abspath(args.build), TMPDIR=tempfile.mkdtemp())
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests", "cli"))
from serve_client import Server  # noqa: E402

COUNTS = ("drafts_total", "drafted_tokens_total", "accepted_tokens_total", "draft_model_tokens_total")


def prompts():
    with open(args.held_out, encoding="utf-8") as f:
        ids = json.load(f)
    starts = [i for i, x in enumerate(ids) if x == args.start]
    return [ids[i:i + args.prompt] for i, end in zip(starts, [*starts[1:], len(ids)]) if end - i >= args.prompt]


def measured(server, temperature):
    """Counts of all prompts with proposals, and how many replies are those without."""
    before, same = server.metrics(), 0
    texts = prompts()
    for seed, prompt in enumerate(texts):
        body = {"prompt": prompt, "max_tokens": args.reply, "ignore_eos": True, "temperature": temperature, "seed": seed, "logprobs": 1}
        plain, drafted = (server.post("/v1/completions", {**body, "speculative": x, "cache_salt": f"{temperature} {seed} {x}"})["choices"]
                          for x in (False, True))
        same += plain == drafted
    after = server.metrics()
    return len(texts), same, {k: after[k] - before[k] for k in COUNTS}


def main():
    wrong = 0
    with Server(args.packed, "--max-model-len", str(args.prompt + args.reply), "--drafts", args.drafts, "-t", "1") as server:
        for temperature in (0, 0.7, 1):
            n, same, found = measured(server, temperature)
            wrong += n - same
            steps, proposed, right, learned = (found[k] for k in COUNTS)
            print(f"temperature {temperature}: {same} of {n} replies equal; {1 + right / steps:.3f} tokens in each of {steps:.0f} steps with proposals, "
                  f"{right:.0f} of {proposed:.0f} right, {learned:.0f} of them the draft's", flush=True)
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
