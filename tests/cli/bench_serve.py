#!/usr/bin/env python3
"""minimax-bench serve: against minimax-serve every request has its lengths; against a server of known delays, which cuts its bytes anywhere, the
figures are those that the server's own clock gives; replies that break off are failures and count for nothing else."""
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server  # noqa: E402


def bench(url, *args, status=0, env=None):
    p = subprocess.run([f"{BIN}/minimax-bench", "serve", url, *map(str, args)], capture_output=True, text=True, timeout=120, check=False,
                       env={**os.environ, **(env or {})})
    assert p.returncode == status, (args, p)
    return p


def figures(url, *args, **how):
    return json.loads(bench(url, "--json", *args, **how).stdout)


def percentile(values, p):
    values, at = sorted(values), p / 100 * (len(values) - 1)
    low = int(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


class Known:
    """A server whose delays are drawn, and which notes when it sent each piece."""

    def __init__(self, fault=None):
        self.fault, self.seen, self.lock = fault, [], threading.Lock()
        self.s = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.s.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                c = self.s.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.served, args=(c, time.monotonic()), daemon=True).start()

    def served(self, c, came):
        try:
            self.answer(c, came)
        except OSError:
            pass  # the client gave this reply up

    def answer(self, c, came):
        rng, got = random.Random(), b""
        while b"\r\n\r\n" not in got:
            got += c.recv(65536)
        head, body = got.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) if b"content-length" in head.lower() else 0
        while len(body) < length:
            body += c.recv(65536)
        if head.startswith(b"GET"):
            text = json.dumps({"data": [{"id": "known" + "\x1b[2J" * (self.fault == "words")}]}).encode()
            c.sendall(b"HTTP/1.1 103 Early Hints\r\n\r\n" if self.fault == "odd" else b"")
            c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return c.close()
        o = json.loads(body)
        with self.lock:
            number = len(self.seen)
            self.seen.append({"request": o, "head": head, "came": came, "sent": []})
        fault = self.fault if number % 3 == 1 else None
        if fault == "status":
            c.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
            return c.close()
        if fault == "words":  # that a terminal would obey, and that end within a character where they are cut
            text = b"busy\x1b[2J\xff" + "é京".encode() * 99
            c.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return c.close()
        chat = "messages" in o
        tokens = o["max_tokens"]
        events = [{"choices": [{"delta": {"role": "assistant"}} if chat else {"text": ""}]}]
        events += [{"choices": [{"delta": {"reasoning_content" if i < 2 else "content": f"t{i}"}} if chat else {"text": f"é{i}"}]} for i in range(tokens)]
        events += [{"choices": [{"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}]},
                   {"choices": [], "usage": {"prompt_tokens": 7 + number, "completion_tokens": tokens}}]
        c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.fault == "odd":  # lawful: interim replies, a byte order mark
            c.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"3\r\n\xef\xbb\xbf\r\n" if self.fault == "odd" else b""))
        for i, e in enumerate([*events, None]):
            if fault == "early" and i == 3:
                return c.close()
            if fault == "error" and i == 3:
                e = {"error": {"message": "overloaded"}}
            if fault == "json" and i == 3:
                text = b"data: {\r\n\r\n"
            elif e is None:
                text = b"" if fault == "done" else b": comment\n\ndata: [DONE]\n\n"
            else:
                text = b"data: " + json.dumps(e, ensure_ascii=False).encode() + rng.choice([b"\n\n", b"\r\n\r\n"])
                if self.fault == "odd":  # an error of null, an event of two lines of data
                    text = text.replace(b"data: {", b'data: {"error": null,\ndata:')
            if self.fault == "odd" and e is None:
                text = b"data: [DONE]"
            if 0 < i <= tokens:
                time.sleep(rng.choice([0, 0.002, 0.01]) + (0.05 if i == 1 else 0))
                self.seen[number]["sent"].append(time.monotonic())
            cut = rng.randrange(len(text) + 1)
            data = b"".join(b"%x%s\r\n%s\r\n" % (len(x), rng.choice([b"", b";a=b"]), x) for x in (text[:cut], text[cut:]) if x)
            at = rng.randrange(len(data) + 1)
            c.sendall(data[:at])
            c.sendall(data[at:])
        c.sendall(b"0\r\nTrailer: x\r\n\r\n")
        c.close()


def known():
    for chat in (False, True):
        s = Known()
        v = figures(s.url, "--num-prompts", 12, "--input-len", 9, "--output-len", 6, "--range-ratio", 0.5, "--max-concurrency", 4, "--seed", 3, "--vocab", 800,
                    *(["--endpoint", "chat"] if chat else []), env={"MINIMAX_API_KEY": "k"})
        assert (v["completed"], v["failed"], v["model_id"], v["max_concurrency"], v["request_rate"]) == (12, 0, "known", 4, "inf"), v
        wanted = [x["request"]["max_tokens"] for x in s.seen]
        assert sorted(v["output_lens"]) == sorted(wanted) and sum(v["input_lens"]) == v["total_input_tokens"] == sum(7 + i for i in range(12))
        assert set(wanted) <= set(range(3, 10)) and len(set(wanted)) > 2 and v["total_output_tokens"] == sum(wanted)
        for x in s.seen:
            assert x["request"]["stream"] and x["request"]["ignore_eos"] and b"\r\nAuthorization: Bearer k\r\n" in x["head"] and x["request"]["model"] == "known"
            if not chat:
                assert 4 <= len(x["request"]["prompt"]) <= 14 and all(100 <= t < 800 for t in x["request"]["prompt"]), x
        # The client's times are the server's, late by no more than a busy machine makes them.
        for got, sent in ((v["mean_ttft_ms"], [x["sent"][0] - x["came"] for x in s.seen]),
                          (v["mean_e2el_ms"], [x["sent"][-1] - x["came"] for x in s.seen])):
            assert -2 < got - 1e3 * sum(sent) / 12 < 150, (got, sent)
        # And each figure is what its definition makes of the lists.
        itl = [g for one in v["itls"] for g in one]
        assert len(itl) == sum(wanted) - 12
        e2el = [t + sum(g) for t, g in zip(v["ttfts"], v["itls"])]
        tpot = [sum(g) / (n - 1) for g, n in zip(v["itls"], v["output_lens"])]
        for name, values in (("ttft", v["ttfts"]), ("itl", itl), ("tpot", tpot), ("e2el", e2el)):
            for p in (50, 90, 95, 99):
                assert abs(v[f"p{p}_{name}_ms"] - 1e3 * percentile(values, p)) < 1e-6, (name, p)
            assert abs(v[f"mean_{name}_ms"] - 1e3 * sum(values) / len(values)) < 1e-6 and v[f"median_{name}_ms"] == v[f"p50_{name}_ms"]
        assert abs(v["output_throughput"] * v["duration"] - sum(wanted)) < 1e-6 and abs(v["request_throughput"] * v["duration"] - 12) < 1e-6
    goals = {"ttft": percentile(v["ttfts"], 40), "e2el": percentile(e2el, 60)}
    s = Known()
    v = figures(s.url, "--num-prompts", 12, "--output-len", 3, "--input-len", 2, "--goodput", ",".join(f"{k}:{1e3 * x}" for k, x in goals.items()), "--request-rate", 200)
    good = sum(t <= goals["ttft"] and t + sum(g) <= goals["e2el"] for t, g in zip(v["ttfts"], v["itls"]))
    assert abs(v["request_goodput"] * v["duration"] - good) < 1e-6 and v["request_rate"] == 200, v
    came = sorted(x["came"] for x in s.seen)
    assert came[-1] - came[0] > 0.01, came  # 200 a second at random times


def sharegpt():
    """Prompts of a file: each conversation once a round, in an order by the seed; what is no such file is refused."""
    path, texts = os.path.join(TMP, "sharegpt.json"), [f'question {i}: "é\n\\' for i in range(5)]

    def write(o):
        with open(path, "w", encoding="utf-8") as f:
            json.dump(o, f)

    write([{"id": str(i), "conversations": [{"from": "human", "value": t}, {"from": "gpt", "value": "reply"}]} for i, t in enumerate(texts)])
    orders = []
    for endpoint, seed in (("completions", 1), ("chat", 1), ("chat", 2)):
        s = Known()
        v = figures(s.url, "--num-prompts", 10, "--output-len", 2, "--dataset-path", path, "--endpoint", endpoint, "--seed", seed, "--max-concurrency", 1)
        got = [x["request"]["messages"][0]["content"] if endpoint == "chat" else x["request"]["prompt"] for x in s.seen]
        assert v["completed"] == 10 and sorted(got[:5]) == sorted(got[5:]) == sorted(texts), got
        orders.append(got)
    assert orders[0] == orders[1] != orders[2] and orders[0][:5] != texts
    for bad in ({}, [], [1], [{"conversations": []}], [{"conversations": [{"from": "human"}]}]):
        write(bad)
        assert "E_JSON" in bench(s.url, "--model", "m", "--dataset-path", path, status=3).stderr, bad


def faults():
    for fault, text in (("status", "status 503: busy"), ("early", "ended early"), ("error", "overloaded"), ("json", "no JSON"), ("done", "no [DONE]"),
                        ("words", "busy\\x1b[2J\\xffé京")):
        s = Known(fault)
        p = bench(s.url, "--num-prompts", 6, "--output-len", 4, "--input-len", 3, "--json", "--max-concurrency", 1)
        v = json.loads(p.stdout)
        assert (v["completed"], v["failed"]) == (4, 2) and text in p.stderr and sum(text in e for e in v["errors"]) == 2, (fault, p)
        assert v["total_output_tokens"] == 16 and [bool(e) for e in v["errors"]] == [n == 0 for n in v["output_lens"]]
    said = bench(Known("words").url, "--num-prompts", 3, "--output-len", 2, "--input-len", 3, "--max-concurrency", 1)
    assert "known\\x1b[2J at " in said.stdout and "\x1b" not in said.stdout + said.stderr, said
    few = ["prlimit", "--nofile=20:4096", f"{BIN}/minimax-bench", "serve", Known().url, "--num-prompts", "40", "--output-len", "2", "--input-len", "3", "--json"]
    said = subprocess.run(few, capture_output=True, text=True, timeout=120)
    assert json.loads(said.stdout)["completed"] == 40, said
    few[1] = "--nofile=40:40"
    said = subprocess.run(few, capture_output=True, text=True, timeout=120)
    assert said.returncode == 8 and "E_LIMIT: found 40 requests at a time, the limit of 40 open files allows 8; " in said.stderr, said
    names = os.path.join(TMP, "hosts")  # the first address of this name has no server
    with open(names, "w", encoding="utf-8") as f:
        f.write("127.0.0.9 twice\n127.0.0.1 twice\n")
    here = ["unshare", "-rm", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', names]
    if subprocess.run([*here, "true"], capture_output=True, check=False).returncode == 0:
        said = subprocess.run([*here, f"{BIN}/minimax-bench", "serve", Known().url.replace("127.0.0.1", "twice"), "--num-prompts", "2", "--output-len", "2", "--json"],
                              capture_output=True, text=True, timeout=120)
        assert said.returncode == 0 and json.loads(said.stdout)["completed"] == 2, said
    s = Known("odd")
    v = figures(s.url, "--num-prompts", 6, "--output-len", 4, "--input-len", 3, "--max-concurrency", 1)
    assert (v["completed"], v["total_output_tokens"], [len(x) for x in v["itls"]]) == (6, 24, [3] * 6), v
    with socket.create_server(("127.0.0.1", 0)) as quiet:  # accepts, and never answers
        url = f"http://127.0.0.1:{quiet.getsockname()[1]}"
        assert "--timeout has passed" in bench(url, "--model", "m", "--num-prompts", 2, "--timeout", 0.3, status=5).stderr
    assert all("refused" in bench(url, *how, status=5).stderr for how in ([], ["--model", "m"]))
    name = b'{"data": [{"id": "a%s"}]}'
    for head, text, said in ((b"Content-Length: 99", name % b"", "ended early"), (b"Content-Length: x", b"", "Content-Length is no number"),
                             (b"Content-Length: -1", name % b"", "Content-Length is no number"),
                             (b"Content-Length: 18446744073709551616", name % b"", "Content-Length is no number"), (b"A: b", name % b"\\u0000b", "no name"),
                             *((b"Transfer-Encoding: chunked", b"%s\r\n%s\r\n0\r\n\r\n" % (size, name % b""), "a chunk has no size")
                               for size in (b"-1", b"+16", b" 16", b"ffffffffffffffff", b"10000000000000016", b"16x", b"\0", b"16\0"))):
        with socket.create_server(("127.0.0.1", 0)) as models:
            threading.Thread(target=once, args=(models, b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head, text)), daemon=True).start()
            got = bench(f"http://127.0.0.1:{models.getsockname()[1]}", status=5).stderr
            assert said in got, (said, got)
    for bad in ("https://x", "127.0.0.1:8000", "http://", "http://:80", "http://x:", "http://x:999999", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://x/v1", "http://[::1"):
        assert "expected http://HOST:PORT" in bench(bad, status=2).stderr, bad
    for args in (("--goodput", "ttft"), ("--goodput", "ttft:-1"), ("--goodput", "x:1"), ("--range-ratio", "1"), ("--request-rate", "-1"), ("--timeout", "0")):
        said = bench("http://127.0.0.1:1", *args, status=2).stderr
        assert f"E_USAGE: {args[0]}: found " in said, (args, said)


def once(server, reply):
    """Answers one connection."""
    c = server.accept()[0]
    c.recv(65536)
    c.sendall(reply)
    c.close()


def real():
    """A model of random weights that nobody converted, cut over two ranks."""
    with Server("tests/data/tiny-m2", "--load-format", "dummy", "--dummy-tp", "2", "--chat-format", "minimax-m2", "--api-key", "k") as s:
        url, key = f"http://127.0.0.1:{s.port}", {"MINIMAX_API_KEY": "k"}
        for more in (["--vocab", 300], ["--endpoint", "chat"]):
            v = figures(url, "--num-prompts", 8, "--input-len", 40, "--output-len", 12, "--range-ratio", 0.5, "--max-concurrency", 3, *more, env=key)
            assert (v["completed"], v["failed"], v["model_id"]) == (8, 0, "tiny-m2"), v
            assert all(6 <= n <= 18 for n in v["output_lens"]) and all(v["input_lens"]) and (more[0] != "--vocab" or all(20 <= n <= 60 for n in v["input_lens"])), v
        shown = bench(url, "--num-prompts", 2, "--input-len", 4, "--output-len", 4, "--vocab", 300, env=key).stdout
        assert "2 of 2 requests" in shown and "time to first token" in shown, shown
        assert "(--vocab gives " in bench(url, "--num-prompts", 1, "--input-len", 500, env=key, status=5).stderr  # ids that the small model lacks
        long = bench(url, "--num-prompts", 1, "--input-len", 9000, "--vocab", 300, env=key, status=5).stderr
        assert "(--input-len and --output-len give the lengths)" in long and "--vocab" not in long, long
        assert "status 401" in bench(url, "--model", "m", "--num-prompts", 1, status=5).stderr


known()
sharegpt()
faults()
real()
print("load tests: lengths, times, percentiles, goodput, failures; completions and chat")
