#!/usr/bin/env python3
"""Time between tokens of replies while long prompts arrive, of one server and of two with prefill and decode split (docs/scale-out.md):
bench_split.py SERVER DIR [OPTION ...]

SERVER: the program; DIR and the options are given to it. STREAMS (4) replies run all the time, SECONDS (8) idle and as long while prompts of PROMPT
(2048) tokens arrive, AT_A_TIME (1), each new to every cache. CPUS "0,1": the server that decodes, or the single one, has the first CPU and the one
of prompts the second; DEVICES "0,1": the same of GPUs; PREFILL_OPTIONS: more options of the one of prompts. SHAPES "single split": what is measured, in turns, ROUNDS (1) times.
Prints milliseconds between two pieces of a reply, their ratio to idle, and what the prompts took; --json FILE has all. SIGINT and SIGTERM end the
servers and then the script, with one line and status 130 or 143."""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

args = sys.argv[1:]
json_to = args.pop(args.index("--json") + 1) if "--json" in args else None
args = [a for a in args if a != "--json"]
server, folder, options = args[0], args[1], args[2:]
number = {k: float(os.environ.get(k, v)) for k, v in {"STREAMS": 4, "SECONDS": 8, "PROMPT": 2048, "AT_A_TIME": 1, "ROUNDS": 1, "OFFLOAD_MB": 1024}.items()}
count, pins, devices = int(number["PROMPT"]), os.environ.get("CPUS"), os.environ.get("DEVICES")
prompts = 0


class Interrupted(BaseException):
    """A signal came."""


class Signals:
    """SIGINT and SIGTERM raise Interrupted, but for the time in which a server starts: it would be lost. Later ones are ignored."""

    number, held = 0, False

    @classmethod
    def come(cls, number, _frame):
        if not cls.number:
            cls.number = number
            cls.check()

    @classmethod
    def check(cls):
        if cls.number and not cls.held:
            raise Interrupted

    @classmethod
    def hold(cls, held):
        cls.held = held
        cls.check()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """role 0 decodes, 1 computes prompts. running: all that have not ended."""

    running = []

    def __init__(self, role, *more):
        pin = ["taskset", "-c", pins.split(",")[role]] if pins else []
        place = ["--devices", devices.split(",")[role]] if devices else []
        self.port, self.log = free_port(), tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [*pin, server, folder, "--port", str(self.port), "--drafts", "0", "--max-model-len", str(count + 4096), *place, *options, *more]
        Signals.hold(True)
        try:
            self.process = subprocess.Popen(command, stderr=self.log, stdout=self.log, start_new_session=True)
            Server.running.append(self)
        finally:
            Signals.hold(False)

    def wait(self):
        end = time.monotonic() + 300
        while "ready after" not in open(self.log.name).read():
            assert self.process.poll() is None and time.monotonic() < end, open(self.log.name).read()[-3000:]
            time.sleep(0.05)
        return float(re.search(r"ready after ([0-9.]+) s", open(self.log.name).read())[1])

    def open(self, body):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request("POST", "/v1/completions", json.dumps(body))
        r = c.getresponse()
        assert r.status == 200, r.read()
        return r

    def metrics(self):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        c.request("GET", "/metrics")
        return {k: float(v) for k, v in re.findall(r"^minimax_(\w+)\{[^},]*\} (\S+)$", c.getresponse().read().decode(), re.M)}

    def end(self):
        """At once where a signal came: a second SIGTERM tells a server not to wait for its requests."""
        try:
            for _ in range(2 if Signals.number else 1):
                self.process.terminate()
                time.sleep(0.1)
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self in Server.running:
            Server.running.remove(self)


def quiet(run, stop, *more):
    """A thread's work; once all is to end nobody wants to know that its server has gone."""
    try:
        run(*more)
    except (OSError, http.client.HTTPException, AssertionError):
        if not stop.is_set():
            raise


def stream(s, i, stop, seen):
    """Replies one after another; the times at which pieces of each came."""
    while not stop.is_set():
        r = s.open({"prompt": [5 + i, 6, 7], "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True})
        times = []
        seen.append(times)
        while not stop.is_set() and (line := r.fp.readline()):
            if line.startswith(b"data: {"):
                times.append(time.monotonic())
        r.close()


def send_prompts(s, stop, taken):
    global prompts
    while not stop.is_set():
        prompts += 1
        own = prompts
        start = time.monotonic()
        s.open({"prompt": [3 + (t * 7919 + own * 104729 + own * own * t) % 199 for t in range(count)], "max_tokens": 1, "temperature": 0}).read()
        taken.append((start, time.monotonic() - start))


def figures(seen, begin, end):
    gaps = sorted(b - a for times in seen for a, b in zip(times, times[1:]) if begin <= b <= end)
    assert gaps, "no piece of a reply came"
    return {name: 1e3 * gaps[min(len(gaps) - 1, int(len(gaps) * q))] for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1))} | {"pieces": len(gaps)}


def measure(shape):
    memory = ["--kv-offload", f"{int(number['OFFLOAD_MB'])}M"]
    both, seen, stop, taken, threads = [], [], threading.Event(), [], []
    try:
        if shape == "split":
            port = free_port()
            both.append(Server(0, *memory, "--prefill-from", f"127.0.0.1:{port}"))
            both.append(Server(1, *memory, "--kv-listen", f"127.0.0.1:{port}", *os.environ.get("PREFILL_OPTIONS", "").split()))
        else:
            both.append(Server(0))
        began = time.monotonic()
        ready = [s.wait() for s in both]
        started = time.monotonic() - began
        threads = [threading.Thread(target=quiet, args=(stream, stop, both[0], i, stop, seen)) for i in range(int(number["STREAMS"]))]
        for t in threads:
            t.start()
        time.sleep(2)
        begin = time.monotonic()
        time.sleep(number["SECONDS"])
        middle = time.monotonic()
        senders = [threading.Thread(target=quiet, args=(send_prompts, stop, both[0], stop, taken)) for _ in range(int(number["AT_A_TIME"]))]
        for t in senders:
            t.start()
        time.sleep(number["SECONDS"])
        end = time.monotonic()
        stop.set()
        for t in threads + senders:
            t.join()
        idle, loaded = figures(seen, begin, middle), figures(seen, middle, end)
        whole = [seconds for start, seconds in taken if start + seconds <= end] or [seconds for _, seconds in taken]
        found = {"shape": shape, "idle": idle, "loaded": loaded, "p99_ratio": loaded["p99"] / idle["p99"], "prompts": len(whole), "prompt_seconds": sum(whole) / len(whole),
                 "start_seconds": started, "ready_after": ready}
        if shape == "split":
            m = both[0].metrics()
            found |= {k: m[f"prefill_{k}"] for k in ("fetched_total", "fallbacks_total", "pages_in_total", "bytes_in_total")}
            assert not m["prefill_fallbacks_total"], open(both[0].log.name).read()[-2000:]
        return found
    finally:
        stop.set()
        for s in list(Server.running):
            s.end()


def all_rounds():
    results = []
    for _ in range(int(number["ROUNDS"])):
        for shape in os.environ.get("SHAPES", "single split").split():
            results.append(r := measure(shape))
            Signals.check()
            show(shape, r)
    return results


def show(shape, r):
    print(f"{shape:6}  idle p50 {r['idle']['p50']:.2f} p99 {r['idle']['p99']:.2f} ms; with prompts p50 {r['loaded']['p50']:.2f} p99 {r['loaded']['p99']:.2f} "
          f"max {r['loaded']['max']:.2f} ms; p99 {r['p99_ratio']:.2f} x idle; {r['prompts']} prompts of {count} in {r['prompt_seconds']:.3f} s each"
          + f"; started in {r['start_seconds']:.1f} s" + (f"; {r['bytes_in_total'] / 1e6:.1f} MB received" if shape == "split" else ""), flush=True)


for one in signal.SIGINT, signal.SIGTERM:
    signal.signal(one, Signals.come)
try:
    results = all_rounds()
except Interrupted:
    for one in list(Server.running):
        one.end()
    print(f"bench_split.py: {signal.Signals(Signals.number).name}: the servers have been ended; nothing more is measured", file=sys.stderr)
    sys.stdout.flush()
    os._exit(128 + Signals.number)  # threads may wait for a server that does not answer any more
if json_to:
    with open(json_to, "w", encoding="utf-8") as f:
        json.dump({"options": options, **number, "results": results}, f, indent=1)
