#!/usr/bin/env python3
"""The CPU backend and llama.cpp on layers of the same sizes, taking turns: tokens a second of one sequence and of a prompt.

  peers_cpu.py BENCH_CPU LLAMA_BENCH WORK [--writer GGUF_PEER] [--model m2] [--layers 3] [--experts 32] [--rounds 7] [--prompts 512]
               [--prompt-rounds 7] [--only bf16,int8+act,…] [--keep] [--mapped]

BENCH_CPU is build/tests/bench/bench_cpu (make bench-cpu builds it), LLAMA_BENCH llama.cpp's llama-bench, WORK a folder for its models, which
GGUF_PEER (gguf_peer.py, in this folder) writes with random weights: GGUF_PEER MODEL TYPE OUT LAYERS EXPERTS VOCAB. Ours stays loaded and answers
in the turns between runs of llama-bench; a turn is a reading of memory, tokens after 64 others, and a prompt, by each side. Printed are
medians, their ratio, and the share of the floor: what one reading of memory in the same turns allows for the bytes that a token needs. "+act"
rounds inputs as the scheme says, as llama.cpp does for all its types but BF16, and "+bf16" to BF16, as it does for that.

Both sides' weights lie in memory of large pages, which llama.cpp is given by "-lm none" and the C library's tunable; --mapped leaves it its
default, a mapped file, whose pages are small.

M1 takes eight layers, of which the last has full attention: where none has, llama.cpp aborts, since its graph then has no use for the input of
cache indices, which gets no buffer and is filled all the same.

--user-time is for a machine that others use: one thread each, and tokens a second of user time, which other load changes little. llama-bench's
is that of a run that repeats its work less that of one that does not."""
import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time

PEER = {"bf16": "BF16", "block_fp8": "Q8_0", "block_fp8+act": "Q8_0", "int8": "Q8_0", "int8+act": "Q8_0", "w4a8+act": "Q4_0", "w4a16": "Q4_0", "nvfp4": "NVFP4",
        "nvfp4+act": "NVFP4", "mxfp4": "MXFP4", "mxfp4+act": "MXFP4"}
PEER.update({f"{scheme}+bf16": PEER[scheme] for scheme in ("bf16", "block_fp8", "int8", "w4a16", "nvfp4", "mxfp4")})
VOCAB, CONTEXT, STEPS = 512, 64, 16
OTHERS, TRIES = 0.1, 20  # CPUs that others may use in a turn; how often one is taken at most


class Ours:
    def __init__(self, a, scheme):
        one = ["taskset", "-c", str(min(os.sched_getaffinity(0)))] if a.user_time else []
        self.column = 1 if a.user_time else 0
        self.process = subprocess.Popen(one + [a.bench, a.model, str(a.layers), str(a.experts), scheme, "-"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.bytes = float(self.answer()[0])

    def cpu_time(self):
        with open(f"/proc/{self.process.pid}/stat") as f:
            return sum(map(int, f.read().rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("peers_cpu.py: bench_cpu ended")
        return line.split()

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        return float(answer[0 if what == "read" else self.column])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Quiet:
    """Turns in which other processes, or other guests of the host as far as it says so, used CPUs are taken again."""

    def __init__(self, ours, share):
        self.ours, self.share, self.again = ours, share, 0

    def others(self):
        with open("/proc/stat") as f:
            used = list(map(int, f.readline().split()[1:9]))
        t = os.times()
        own = t.user + t.system + t.children_user + t.children_system + self.ours.cpu_time()
        return (sum(used) - used[3] - used[4]) / os.sysconf("SC_CLK_TCK") - own

    def __call__(self, turn):
        for _ in range(TRIES):
            begin, before = time.monotonic(), self.others()
            rate = turn()
            wall = time.monotonic() - begin
            if self.others() - before <= self.share * wall + 0.02:  # two ticks of the clock
                return rate
            self.again += 1
            time.sleep(1)
        sys.exit("peers_cpu.py: others use the CPUs")


def whole_prompt(n):
    """A prompt in one step. Where logits of the last token alone are wanted, llama.cpp leaves the last layer's experts out for all others,
    which of 62 layers is little and of 3 a quarter of the work: "-embd 1" asks for all, as ours computes them here."""
    return ["-p", str(n), "-n", "0", "-b", str(n), "-ub", str(n), "-embd", "1"]


def llama_bench(a, path, what):
    pages, env = (["-lm", "mmap"], {}) if a.mapped else (["-lm", "none"], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    return subprocess.run([a.llama, "-m", path] + pages + what, check=True, capture_output=True, text=True, env={**os.environ, **env}).stdout


def user_time(a, path, what, times):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    llama_bench(a, path, ["-r", str(times), "--no-warmup", "-t", "1"] + what)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def theirs_by_user_time(a, path, prompt):
    tokens, more = (prompt, 2) if prompt else (STEPS, 5)
    what = whole_prompt(prompt) if prompt else ["-p", "0", "-n", str(STEPS)]
    return more * tokens / max(user_time(a, path, what, 1 + more) - user_time(a, path, what, 1), 1e-9)


def theirs(a, path, prompt):
    """Tokens a second of one run of llama-bench: a prompt, or STEPS tokens after CONTEXT others."""
    if a.user_time:
        return theirs_by_user_time(a, path, prompt)
    what = whole_prompt(prompt) if prompt else ["-p", "0", "-n", str(STEPS), "-d", str(CONTEXT)]
    return json.loads(llama_bench(a, path, ["-r", "1", "-o", "json", "-t", str(os.cpu_count())] + what))[0]["avg_ts"]


def model_of(a, peer):
    path = f"{a.work}/{a.model}-{peer}-{a.layers}-{a.experts}.gguf"
    if not os.path.exists(path):
        subprocess.run([sys.executable, a.writer, a.model, peer, path, str(a.layers), str(a.experts), str(VOCAB)], check=True, stdout=subprocess.DEVNULL)
    return path


def compare(a, scheme):
    peer = PEER[scheme]
    path, ours = model_of(a, peer), Ours(a, scheme)
    rate, token, peer_token = [], [], []
    prompts = {n: ([], []) for n in a.prompts}
    ours.ask("token")
    quiet = Quiet(ours, math.inf if a.user_time else a.others)
    for i in range(max(a.rounds, a.prompt_rounds)):
        if i < a.rounds:
            rate.append(quiet(lambda: ours.ask("read")))
            token.append(quiet(lambda: ours.ask("token")))
            peer_token.append(quiet(lambda: theirs(a, path, 0)))
        for n, (mine, other) in prompts.items():
            if i < a.prompt_rounds:
                mine.append(quiet(lambda n=n: ours.ask(f"prompt {n}")))
                other.append(quiet(lambda n=n: theirs(a, path, n)))
    ours.close()
    if not a.keep:
        os.remove(path)
    m = lambda x: statistics.median(x) if x else math.nan  # of no turns
    cells = [f"{scheme} / {peer}", f"{m(token):.1f}", f"{m(peer_token):.1f}", f"{m(token) / m(peer_token):.2f}", f"{m(rate) / 1e9:.1f}",
             f"{m(token) * ours.bytes / m(rate):.2f}"]
    for mine, other in prompts.values():
        cells += [f"{m(mine):.0f}", f"{m(other):.0f}", f"{m(mine) / m(other):.2f}"]
    print("| " + " | ".join(cells) + " |", flush=True)
    if quiet.again:
        print(f"peers_cpu.py: {scheme}: {quiet.again} turns taken again, as others used the CPUs", file=sys.stderr)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("bench")
    p.add_argument("llama")
    p.add_argument("work")
    p.add_argument("--writer", default=os.path.join(os.path.dirname(__file__), "gguf_peer.py"))
    p.add_argument("--model", default="m2", choices=["m2", "m1"])
    p.add_argument("--layers", type=int, help="3 of M2, 8 of M1")
    p.add_argument("--experts", type=int, help="32 of M2, 3 of M1")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--prompt-rounds", type=int, default=7)
    p.add_argument("--prompts", type=lambda s: [int(n) for n in s.split(",") if n], default=[512])
    p.add_argument("--only", type=lambda s: s.split(","), default=list(PEER))
    p.add_argument("--keep", action="store_true", help="leave the models in WORK")
    p.add_argument("--mapped", action="store_true", help="llama.cpp maps its file")
    p.add_argument("--others", type=float, default=OTHERS, help="CPUs that others may use in a turn")
    p.add_argument("--user-time", action="store_true")
    a = p.parse_args()
    a.layers = a.layers or (3 if a.model == "m2" else 8)
    a.experts = a.experts or (32 if a.model == "m2" else 3)
    heads = ["ours / llama.cpp", "tok/s", "theirs", "ratio", "GB/s read", "of the floor"]
    for n in a.prompts:
        heads += [f"prompt of {n}, tok/s", "theirs", "ratio"]
    load = os.getloadavg()[0]
    print(f"{a.model}, {a.layers} layers, {a.experts} experts, {os.cpu_count()} CPUs, load {load:.1f} at the start{', one thread, user time' if a.user_time else ''}; medians of {a.rounds} turns "
          f"({a.prompt_rounds} for prompts)\n")
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    for scheme in a.only:
        compare(a, scheme)


if __name__ == "__main__":
    main()
