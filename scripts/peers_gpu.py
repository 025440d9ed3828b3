#!/usr/bin/env python3
"""The CUDA backend and llama.cpp on one GPU, on layers of the same sizes with the whole head, taking turns: tokens a second of one sequence, of
many, and of a long prompt.

  peers_gpu.py MINIMAX_BENCH LLAMA_BENCH LLAMA_BATCHED_BENCH WORK [--writer GGUF_PEER] [--model m2] [--layers 8] [--rounds 3] [--seconds N]
               [--only block_fp8,w4a16,…]

MINIMAX_BENCH makes its weights on the device. LLAMA_BENCH and LLAMA_BATCHED_BENCH are llama.cpp's, built for the GPU; WORK is a folder for its
models, of one at a time (M2's eight layers: 33 GB in Q8_0, 19 GB in Q4_0), best in memory. GGUF_PEER (gguf_peer.py, in this folder) writes them
with random weights: GGUF_PEER MODEL TYPE OUT LAYERS. Its router has to spread tokens over the experts as ours does, of M2 218 of 256 at 64
sequences: a model that reaches fewer is read sooner.

A turn is, by each side, a decode of one sequence and of many that hold --context tokens, and one step of a prompt. Printed are tokens a second,
medians of the turns; their ratio; the least ratio of one turn; and ours as a share of what the device's copy rate and the rates of large
products allow (minimax-bench's floor), with that copy rate itself. The experts are in the scheme named; the attention's matrices are block_fp8
against Q8_0, caches BF16 against F16, and the head block_fp8 against Q8_0. Ours with a BF16 head is measured once, before the turns.

llama.cpp runs with the settings that suit it: the best -ub for each model's prompt, and for all models whether many sequences go faster in one cache or in one
each. Both sides compute the logits of a prompt's last token alone; llama.cpp then leaves the last layer's experts out for the others, ours does
not. llama.cpp's figures are without choosing a token, ours with it.

--seconds ends the turns of a model when its share of that time is used up; the table tells how many there were, one at least."""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time

PEER = {"block_fp8": "Q8_0", "w4a16": "Q4_0", "nvfp4": "NVFP4", "mxfp4": "MXFP4"}
SIZE = {"block_fp8": 2, "w4a16": 1, "nvfp4": 1, "mxfp4": 1}  # of a model, and so its share of the time
VOCAB, STEPS = "200064", 64  # rows of the head, also of the models that the writer makes; decode steps that count
LIMIT = 120  # seconds that one program may take


class Failed(Exception):
    pass


def run(command):
    """The objects that it prints as lines of JSON; other lines are not ours."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} took more than {LIMIT} s")
    except OSError as e:
        raise Failed(f"{command[0]}: {e.strerror}")
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
        raise Failed(f"{os.path.basename(command[0])} ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def only(rows, **wanted):
    """The one row that has these values."""
    found = [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]
    if len(found) != 1:
        raise Failed(f"{len(found)} results with {wanted}, expected one")
    return found[0]


class Ours:
    """Of one scheme: rates, and shares of the floor."""

    def __init__(self, a, scheme):
        self.a, self.scheme, self.copy_rate = a, scheme, []

    def bench(self, subject, head, *more):
        a = self.a
        rows = run([a.bench, subject, "--model", a.model, "--layers", a.layers, "--quant", "block_fp8", "--expert-quant", self.scheme, "--head", head,
                    "--vocab", VOCAB, "--json", *more])
        self.copy_rate += [r["copy_bytes_per_s"] for r in rows if "copy_bytes_per_s" in r]
        r = only(rows, subject=subject, model=a.model, layers=a.layers, expert_quant=self.scheme, head=head)
        return r["tokens_per_s"], r["floor_s"] / r["seconds"]

    def decode(self, head, batch):
        return self.bench("layers", head, "--batch", batch, "--context", self.a.context, "--steps", STEPS)

    def turn(self, head):
        return [self.decode(head, 1), self.decode(head, self.a.batch), self.bench("prefill", head, "--tokens", self.a.prompt)]


class Theirs:
    """Of one model file: rates. The file is read, not mapped, which loads it sooner and changes nothing after that."""

    unified = None  # one cache for all sequences; the same for all models

    def __init__(self, a, path):
        self.a, self.path = a, path
        prompts = self.bench("-p", a.prompt, "-n", 0, "-ub", ",".join(map(str, a.ubatch)), "-r", 1)
        self.ubatch = max(a.ubatch, key=lambda n: only(prompts, n_ubatch=n)["avg_ts"])
        if Theirs.unified is None:
            Theirs.unified = self.many(True) > self.many(False)

    def bench(self, *more):
        return run([self.a.llama, "-m", self.path, "-lm", "none", "-ngl", 99, "-fa", 1, "-b", self.a.prompt, "-o", "jsonl", *more])

    def one(self):
        """Of one sequence and of a prompt, from one load of the model: the prompt behind a context, and the sequence without one, come along
        unasked."""
        a = self.a
        rows = self.bench("-p", a.prompt, "-n", STEPS, "-d", f"0,{a.context}", "-ub", self.ubatch, "-r", a.repeats)
        return [statistics.median(only(rows, n_prompt=p, n_gen=n, n_depth=d)["samples_ts"]) for p, n, d in ((0, STEPS, a.context), (a.prompt, 0, 0))]

    def many(self, unified):
        a = self.a
        rows = run([a.batched, "-m", self.path, "-lm", "none", "-ngl", 99, "-fa", "on", "-kvu" if unified else "-no-kvu",
                    "-c", a.batch * (a.context + STEPS), "-b", 2048, "-ub", 2048, "-npp", a.context, "-ntg", STEPS, "-npl", a.batch,
                    "--output-format", "jsonl"])
        return only(rows, pp=a.context, tg=STEPS, pl=a.batch)["speed_tg"]

    def turn(self):
        one, prompt = self.one()
        return [one, self.many(Theirs.unified), prompt]


def write_model(a, peer):
    path = f"{a.work}/{a.model}-{peer}-{a.layers}.gguf"
    try:
        subprocess.run([sys.executable, a.writer, a.model, peer, path, str(a.layers)], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
    except (OSError, subprocess.SubprocessError) as e:
        if os.path.exists(path):
            os.remove(path)
        raise Failed(f"{a.writer}: {e}")
    return path


def take_turns(a, ours, theirs, end):
    """Of each turn both sides' rates, and ours of the floor: [turn](rates, shares, their rates)."""
    turns, took = [], 0
    while len(turns) < a.rounds and (not turns or time.monotonic() + took <= end):
        begin = time.monotonic()
        rates, shares = zip(*ours.turn("block_fp8"))
        turns.append((rates, shares, theirs.turn()))
        took = time.monotonic() - begin
    return turns


def figure(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def compare(a, scheme, end):
    """Prints a model's lines of the table."""
    begin = time.monotonic()
    ours, path = Ours(a, scheme), write_model(a, PEER[scheme])
    written = time.monotonic() - begin
    try:
        wide = [rate for rate, _ in ours.turn("bf16")]
        theirs = Theirs(a, path)
        settled = time.monotonic() - begin - written
        turns = take_turns(a, ours, theirs, end)
    finally:
        os.remove(path)
    names = [(f"one sequence, context {a.context:,}", 2.5), (f"{a.batch} sequences, context {a.context:,}", 1.8), (f"prompt of {a.prompt:,}", 8)]
    for i, (name, wanted) in enumerate(names):
        mine, floor, other = ([t[side][i] for t in turns] for side in range(3))
        m = statistics.median
        cells = [f"{scheme} / {PEER[scheme]}", name, figure(m(mine)), figure(wide[i]), figure(m(other)), f"{m(mine) / m(other):.2f}",
                 f"{min(x / y for x, y in zip(mine, other)):.2f}", f"{wanted}", f"{m(floor):.2f}", f"{len(mine)}"]
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"peers_gpu.py: {scheme}: {written:.0f} s to write {PEER[scheme]}, {settled:.0f} before the turns, {time.monotonic() - begin:.0f} in all; "
          f"-ub {theirs.ubatch}, {'one cache' if Theirs.unified else 'a cache for each'}", file=sys.stderr, flush=True)
    return ours.copy_rate


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("bench")
    p.add_argument("llama")
    p.add_argument("batched")
    p.add_argument("work")
    p.add_argument("--writer", default=os.path.join(os.path.dirname(__file__), "gguf_peer.py"))
    p.add_argument("--model", default="m2", choices=["m2", "m1"])
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--repeats", type=int, default=2, help="of llama-bench in one turn")
    p.add_argument("--seconds", type=float, default=math.inf)
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--batch", type=int, default=64, help="many sequences")
    p.add_argument("--prompt", type=int, default=8192)
    p.add_argument("--ubatch", type=lambda s: [int(n) for n in s.split(",")], default=[512, 2048, 8192])
    p.add_argument("--only", type=lambda s: s.split(","), default=list(PEER))
    a = p.parse_args()
    for scheme in a.only:
        if scheme not in PEER:
            p.error(f'found --only "{scheme}", expected some of {",".join(PEER)}')
    if a.rounds < 1 or a.repeats < 1:
        p.error("expected one round and one repeat at least")
    return a


def main():
    a = arguments()
    end = time.monotonic() + a.seconds
    print(f"{a.model}, {a.layers} layers, head of {int(VOCAB):,} rows, load {os.getloadavg()[0]:.1f} at the start; tokens a second, medians of the turns\n")
    heads = ["ours / llama.cpp", "what", "ours", "ours, head bf16", "llama.cpp", "ratio", "least", "wanted", "of the floor", "turns"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    copy_rate, failed = [], False
    for i, scheme in enumerate(a.only):
        share = SIZE[scheme] / sum(SIZE[s] for s in a.only[i:])
        try:
            copy_rate += compare(a, scheme, time.monotonic() + (end - time.monotonic()) * share)
        except Failed as e:
            failed = True
            print(f"peers_gpu.py: {scheme} / {PEER[scheme]}: {e}", file=sys.stderr, flush=True)
    if copy_rate:
        print(f"\ndevice copy {statistics.median(copy_rate) / 1e9:,.0f} GB/s, read + write (least {min(copy_rate) / 1e9:,.0f}, most {max(copy_rate) / 1e9:,.0f})")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
