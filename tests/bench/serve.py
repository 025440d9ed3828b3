#!/usr/bin/env python3
"""serve.py BUILD [PACKED DEVICE STREAMS PROMPT REPLY]: minimax-serve on tests/data/tiny-m2 and the CPU. From exec to /health and to the first token (and
with a vocabulary of the released size), beside what starting a process costs;
tokens/s of 1, 8 and 64 streams over HTTP beside the bare engine's steps of as many rows and the scheduler without HTTP; a prompt again beside
the prompt when it is new. What else the machine does is in every figure, so each has its own ceiling of the same run. With a packed checkpoint: its
streams on the device alone, over HTTP, a process for each client, beside bench_scheduler's bare steps."""
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

BUILD = os.path.abspath(sys.argv[1])
ROUNDS, PROMPT, REPLY = 15, 32, 96
os.environ.update(BUILD=BUILD, TMPDIR=tempfile.mkdtemp())
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import BIN, Server, convert  # noqa: E402


def exchange(port, data, until):
    """The reply, until it has these bytes, from a server that may not listen yet."""
    end = time.monotonic() + 60
    while True:
        try:
            c = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.0002)
    c.sendall(data)
    got = b""
    while until not in got and (part := c.recv(65536)):
        got += part
    c.close()
    return got


def post(body):
    text = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def start(packed):
    health, first, bare = [], [], []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        subprocess.run([f"{BIN}/minimax-serve", "--version"], stdout=subprocess.DEVNULL, check=True)
        bare.append(time.monotonic() - begun)
        port = free_port()
        begun = time.monotonic()
        process = subprocess.Popen([f"{BIN}/minimax-serve", packed, "--port", str(port), "--log-format", "json"], stderr=subprocess.DEVNULL)
        exchange(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"}")
        health.append(time.monotonic() - begun)
        while b"503" in exchange(port, post({"prompt": "And", "max_tokens": 1}), b"}")[:20]:
            time.sleep(0.001)
        first.append(time.monotonic() - begun)
        process.terminate()
        process.wait()
    for name, took in ("a process that starts and ends (--version)", bare), ("exec to /health", health), ("exec to the first token", first):
        print(f"{name}: {1000 * min(took):.1f} ms at best, {1000 * statistics.median(took):.1f} in the middle of {ROUNDS}")


def streams(s, count):
    """Tokens/s of so many streams, from the first request to the last event."""
    def one(i):
        got = exchange(s.port, post({"prompt": [(i * 97 + t * 31) % 900 + 5 for t in range(PROMPT)], "max_tokens": REPLY, "ignore_eos": True, "stream": True,
                                     "temperature": 0}), b"[DONE]")
        assert b'"finish_reason":"length"' in got, got[-300:]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    begun = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return count * REPLY / (time.monotonic() - begun)


def large_vocabulary():
    """A small model with a vocabulary of the released size, packed."""
    source = os.path.join(os.environ["TMPDIR"], "source-large")
    make = [f"--{k}={v}" for k, v in (("layers", 2), ("experts", 4), ("vocab", 200064), ("hidden", 256), ("inter", 128), ("heads", 8))]
    subprocess.run([sys.executable, "scripts/bench_checkpoint.py", source, "--bf16", *make], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([f"{BUILD}/tests/bench/bench_tokenizer", f"{source}/tokenizer.json"], check=True)
    packed = f"{source}-packed"
    subprocess.run([f"{BIN}/minimax-convert", source, "-o", packed, "--quant", "none", "-q"], check=True)
    return packed


def client(port, i, prompt, reply, ready, results):
    """When each event of a stream came."""
    body = {"prompt": [(i * 97 + t * 31) % 900 + 5 for t in range(prompt)], "max_tokens": reply, "ignore_eos": True, "stream": True, "temperature": 0}
    c = socket.create_connection(("127.0.0.1", port))
    ready.wait()
    c.sendall(post(body))
    times, tail = [], b""
    while b"[DONE]" not in tail and (part := c.recv(1 << 16)):
        times += [time.monotonic()] * part.count(b"data: {")
        tail = tail[-16:] + part
    results.put(times)


def on_device(packed, device, count, prompt, reply):
    """Tokens/s of all streams while all decode, and of the whole time."""
    port = free_port()
    args = [f"{BIN}/minimax-serve", packed, "--device", device, "--port", str(port), "--drafts", "0", "--max-num-seqs", str(count), "--max-num-batched-tokens", "2048",
            "--max-model-len", str(prompt + reply + 1), "--prefix-cache", "off", "-q"]
    process = subprocess.Popen(args)
    try:
        while b"503" in exchange(port, post({"prompt": [5, 6], "max_tokens": 1}), b"}")[:20]:
            time.sleep(0.01)
        for _ in range(2):  # the second has every graph
            ready, results = multiprocessing.Barrier(count), multiprocessing.Queue()
            clients = [multiprocessing.Process(target=client, args=(port, i, prompt, reply, ready, results)) for i in range(count)]
            for c in clients:
                c.start()
            times = [results.get(timeout=300) for _ in clients]
            for c in clients:
                c.join()
        begun, ended = max(t[0] for t in times), min(t[-1] for t in times)
        tokens = sum(reply * sum(begun < at <= ended for at in t) / len(t) for t in times)
        whole = max(t[-1] for t in times) - min(t[0] for t in times)
        print(f"{count} streams over HTTP, {prompt} + {reply} tokens, {device}: {tokens / (ended - begun):.0f} tokens/s while all decode, "
              f"{count * reply / whole:.0f} from the first token to the last")
    finally:
        process.terminate()
        process.wait()
    subprocess.run([f"{BUILD}/tests/bench/bench_scheduler", packed, device, str(count), str(prompt), str(reply), "2048"])


if len(sys.argv) > 2:
    on_device(sys.argv[2], sys.argv[3], *(int(a) for a in sys.argv[4:7]))
    shutil.rmtree(os.environ["TMPDIR"])
    sys.exit(0)
packed = convert("tests/data/tiny-m2")
start(packed)
print("with a vocabulary of 200,064 tokens:")
start(large_vocabulary())
with Server(packed, "--drafts", "0", "--max-num-seqs", "64", "--max-model-len", "1024", "--prefix-cache", "off") as server:
    for count in (1, 8, 64):
        print(f"{count} streams over HTTP, prompts of {PROMPT} and replies of {REPLY} tokens: {max(streams(server, count) for _ in range(3)):.0f} tokens/s, best of 3")
        sys.stdout.flush()
        subprocess.run([f"{BUILD}/tests/bench/bench_scheduler", packed, "cpu", str(count), str(PROMPT), str(REPLY)])
subprocess.run([f"{BUILD}/tests/bench/bench_reuse"])
shutil.rmtree(os.environ["TMPDIR"])
