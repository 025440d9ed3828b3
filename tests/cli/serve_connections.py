#!/usr/bin/env python3
"""Connections of minimax-serve: HTTP/1.0, clients that send no more or have left, the limits of bodies and descriptors, pages of other origins, fields
that come twice, what the log says of a request and where nobody reads it, and a server that drains."""
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
GOOD = {"prompt": "In the beginning", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
PACKED = convert("tests/data/tiny-m2")


def raw(s, data=b""):
    c = socket.create_connection(("127.0.0.1", s.port), timeout=120)
    c.sendall(data)
    return c


def rest(c):
    got = b""
    while part := c.recv(1 << 16):
        got += part
    return got


def request_of(body, version=b"1.1", more=b"", path=COMPLETIONS):
    text = json.dumps(body).encode()
    return b"POST %s HTTP/%s\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s" % (path.encode(), version, len(text), more, text)


def until(fn):
    end = time.monotonic() + 120
    while not fn():
        assert time.monotonic() < end
        time.sleep(0.02)


def metric(s, name):
    return s.metrics()[name]


def old_clients(s):
    """HTTP/1.0: a stream ends with the connection, and has neither a length nor chunks; a whole reply keeps the connection if that is asked."""
    stream = request_of({**GOOD, "stream": True}, b"1.0", b"Connection: keep-alive\r\n")
    head, body = rest(raw(s, stream)).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200 ") and b"\r\nConnection: close" in head, head
    assert b"Content-Length" not in head and b"Transfer-Encoding" not in head, head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n"), body
    whole = request_of(GOOD, b"1.0", b"Connection: keep-alive\r\n")
    got = rest(raw(s, whole + whole + request_of(GOOD, b"1.0")))
    assert [x.split()[0] for x in got.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 3 and got.count(b"Connection: keep-alive") == 2 and got.count(b"Connection: close") == 1, got
    modern = raw(s, request_of({**GOOD, "stream": True}) + request_of(GOOD, more=b"Connection: close\r\n"))
    got = rest(modern)
    assert got.count(b"HTTP/1.1 200") == 2 and b"\r\n0\r\n\r\nHTTP/1.1 200" in got, got


def half_closed(s):
    """A client that sends no more has its replies; one that has left has not, and its request is cancelled."""
    want = s.post(COMPLETIONS, GOOD)["choices"][0]["text"]
    for i in range(24):
        body = {**GOOD, "stream": i % 3 == 1}
        data = request_of(body, b"1.0" if i % 4 == 3 else b"1.1") + (request_of(body, more=b"a: b\r\n") if i % 3 == 2 and i % 4 != 3 else b"")
        c = raw(s, data)
        time.sleep(0.01 * (i % 3))
        c.shutdown(socket.SHUT_WR)
        got = rest(c)
        assert got.count(b"HTTP/1.1 200 OK\r\n") == data.count(b"POST ") and got.startswith(b"HTTP/1.1 200 OK\r\n"), got
        if not body["stream"]:
            assert json.loads(got.split(b"\r\n\r\n")[1].split(b"HTTP/")[0])["choices"][0]["text"] == want, got
    for size in (60000, 70000, 200000, 900000):  # more than the server reads ahead
        c = raw(s, request_of({**GOOD, "max_tokens": 300}) + request_of({"prompt": "x" * size}, path="/tokenize") + request_of(GOOD))
        c.shutdown(socket.SHUT_WR)
        got = rest(c)
        assert got.count(b"HTTP/1.1 200 OK\r\n") == 3, (size, got[-300:])
    c = raw(s, request_of(GOOD)[:-1])  # a part of a request
    c.shutdown(socket.SHUT_WR)
    assert rest(c) == b""
    long = {**GOOD, "max_tokens": 8000}
    for leave in ("close", "reset", "close behind more"):
        c = raw(s, request_of(long) + (b"x" * 300000 if leave == "close behind more" else b""))
        until(lambda: metric(s, "requests_running") == 1)
        if leave == "reset":
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        cancelled = open(s.log).read().count(" 499 ")
        begun = time.monotonic()
        c.close()
        until(lambda: open(s.log).read().count(" 499 ") == cancelled + 1)
        until(lambda: metric(s, "requests_running") == 0)  # it is counted after the step
        assert time.monotonic() - begun < 5, leave


def too_long(s):
    """A body beyond the limit is refused at once, whether its client waits to be told to go on, or not, and in the API's own form."""
    for path in (COMPLETIONS, MESSAGES, MESSAGES + "?beta=true", "/nowhere"):
        for more in (b"", b"Expect: 100-continue\r\n"):
            begun = time.monotonic()
            c = raw(s, b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048577\r\n%s\r\n" % (path.encode(), more))
            got = c.recv(1 << 16)
            head, body = got.split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 413 ") and b"Connection: close" in head and time.monotonic() - begun < 10, got
            assert json.loads(body)["error"]["message"] and ("request_id" in json.loads(body)) == (MESSAGES in path), got
            c.close()
    c = raw(s, request_of(GOOD, more=b"Expect: 100-continue\r\nConnection: close\r\n").split(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert c.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    c.sendall(json.dumps(GOOD).encode())
    assert rest(c).startswith(b"HTTP/1.1 200 ")
    got = rest(raw(s, b"POST /v1/messages?beta=true HTTP/1.1\r\n\r\n"))
    assert got.startswith(b"HTTP/1.1 400 ") and b'"request_id"' in got, got
    # All of a body that is refused can be sent: its client reads why.
    assert s.request("POST", COMPLETIONS, b" " * 2_000_000)[0] == 413
    got = rest(raw(s, b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"100000;x\r\n" + b" " * (1 << 20) + b"\r\n1\r\n"))
    assert got.startswith(b"HTTP/1.1 413 "), got


def beside_long_ones():
    """Long texts are tokenised and sent back while others are answered, those of 20 KB too; one whose client has
    left is not tokenised."""
    with Server(PACKED, "--max-body", "16M") as s:
        body = json.dumps({"prompt": "In the beginning God created. " * 200000}).encode()
        some = json.dumps({"prompt": "And God said. " * 1500})
        seconds = []

        def long():
            begun = time.monotonic()
            assert s.post("/tokenize", body)["count"] > 1000000
            seconds.append(time.monotonic() - begun)

        def worst(until):
            most = 0.0
            while not until():
                begun = time.monotonic()
                s.get("/health")
                s.post("/tokenize", some)
                most = max(most, time.monotonic() - begun)
                time.sleep(0.002)
            return most

        threads = [threading.Thread(target=long) for _ in range(2)]
        for t in threads:
            t.start()
        until(lambda: metric(s, "calls") == 2)
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        left = [raw(s, head + body) for _ in range(4)]
        for c in left:
            c.close()
        most = worst(lambda: not any(t.is_alive() for t in threads))
        assert most < min(seconds) / 2, (most, seconds)
        begun = time.monotonic()
        until(lambda: metric(s, "calls") == 0)
        assert time.monotonic() - begun < min(seconds), seconds


def schemas_aside(s):
    """Schemas take none of the loop's time, by which all others would wait: neither their forms nor, for the first, the lexicon."""
    def seconds(task):
        return int(open(f"/proc/{s.process.pid}/task/{task}/schedstat").read().split()[0]) / 1e9
    one = lambda i, j: {"type": "object", "properties": {f"k{i}": {"const": j}}, "required": [f"k{i}"]}
    schema = {"allOf": [{"oneOf": [one(i, j) for j in range(3)]} for i in range(3)]}  # is refused after long search, each time
    tasks = os.listdir(f"/proc/{s.process.pid}/task")
    before = {t: seconds(t) for t in tasks}
    for name, fields in (("guided_json", {"guided_json": schema}), ("json_schema", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})):
        for _ in range(4):
            status, _, data = s.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **fields})
            assert status == 400 and name.encode() in data, data
    spent = {t: seconds(t) - before[t] for t in tasks}
    loop = spent.pop(str(s.process.pid))
    assert loop < 0.25 * max(spent.values()), (loop, spent)


def long_reply():
    """A whole reply of many logprobs is written by a worker: requests of others do not wait for the loop's thread."""
    with Server(PACKED, "--max-model-len", "2048", "--threads", "1") as s:
        workers = sorted(int(t) for t in os.listdir(f"/proc/{s.process.pid}/task"))[1:4]  # those that are made first

        def seconds():
            return sum(int(open(f"/proc/{s.process.pid}/task/{t}/schedstat").read().split()[0]) for t in workers) / 1e9

        before = seconds()
        got = s.post(COMPLETIONS, {"prompt": [20 + i % 1900 for i in range(1000)], "max_tokens": 1, "n": 100, "echo": True, "logprobs": 20})
        assert [len(c["logprobs"]["top_logprobs"]) for c in got["choices"]] == [1001] * 100
        assert seconds() - before > 0.01, seconds() - before


def long_echo():
    """Fields that each response repeats may be long: a client that reads has its stream."""
    with Server(PACKED, "--chat-format", "minimax-m2") as s:
        said = "\u0001" * 1_500_000 + "x" * 1_000_000
        body = {"input": "x", "metadata": {"a": said}, "max_output_tokens": 1, "stream": True}
        status, _, data = s.request("POST", "/v1/responses", body)
        events = [json.loads(x.split("data: ", 1)[1]) for x in data.decode().split("\n\n")[:-1]]
        echoed = [e["response"]["metadata"]["a"] == said for e in events if "response" in e]
        assert status == 200 and events[-1]["type"] == "response.incomplete" and echoed == [True] * 3, (status, events[-1]["type"], echoed)


def room(limit, *options):
    """A server under a limit of descriptors: how many connections it says there is room for, and has; 0 where it refuses the limit."""
    command = ["prlimit", f"--nofile={limit}:{limit}", f"{BIN}/minimax-serve", PACKED, "--port", "0", *options]
    p = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    line = p.stderr.readline()
    found = re.search(rf"--max-connections lowered from 4096: the limit of {limit} descriptors allows (\d+)$", line)
    if not found:
        assert p.wait(60) == 5 and p.stderr.read() == "" and re.search(rf"error: E_IO: .*limit (is|of) {limit} descriptors \(ulimit -n\)", line), (limit, line)
        return 0
    said, log = int(found[1]), p.stderr.readline()
    port = int(re.search(r"listening on http://\S+:(\d+)", log)[1])
    many = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(said + 2)]  # while it loads
    while "ready after" not in (log := p.stderr.readline()):
        assert log and "E_IO" not in log, (limit, log)
    for c in many[:said]:
        c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert all(c.recv(12) == b"HTTP/1.1 200" for c in many[:said]), limit
    many[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    until(lambda: b"minimax_resident_bytes" in many[0].recv(1 << 16))
    for c in many[:said]:
        c.close()
    for c in many[said:]:
        c.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert c.recv(12) == b"HTTP/1.1 200", limit
        c.close()
    p.terminate()
    assert "accept" not in p.stderr.read() and p.wait(60) == 0
    return said


def few_descriptors():
    """Connections are bounded by the descriptors that there are, which the log says once: so many can be had at any limit, also while the server loads.
    More wait. A limit that allows none is refused."""
    found = {limit: room(limit) for limit in (*range(4, 24), 32, 40, 64)}
    assert all(found[limit] in (found[limit - 1], found[limit - 1] + 1) for limit in range(5, 24)) and found[8] == 0 and found[23] > 0 and found[64] >= 40, found
    # A file of pages, another server's prompts: what these open is set aside too.
    for options in (("--kv-offload-dir", TMP, "--kv-offload-disk", "64M"), ("--kv-listen", "127.0.0.1:0")):
        said = {limit: room(limit, "--kv-offload", "16M", *options) for limit in (18, 20, 36, 40)}
        assert said[40] > 0 and said[40] < found[40], (options, said)


def no_descriptors():
    """Where descriptors run out all the same, that is said now and then, and connections wait."""
    with Server(PACKED) as s:
        used = len(os.listdir(f"/proc/{s.process.pid}/fd"))
        os.system(f"prlimit --pid {s.process.pid} --nofile={used + 5}:{used + 5}")
        many = [raw(s) for _ in range(12)]
        s.wait_for("accept: .*")
        before = ticks(s)
        time.sleep(1)
        assert ticks(s) - before < 30, "the loop is busy"
        for c in many:
            c.close()
        until(lambda: metric(s, "connections") == 1)
        assert open(s.log).read().count("accept") == 1


def ticks(s):
    """Hundredths of a second that the process has computed."""
    return sum(map(int, open(f"/proc/{s.process.pid}/stat").read().rsplit(")", 1)[1].split()[11:13]))


def idle():
    """A server with room for a million connections computes nothing while nobody asks."""
    with Server(PACKED, "--max-connections", "1048576") as s:
        time.sleep(0.3)
        before = ticks(s)
        time.sleep(2)
        assert ticks(s) - before <= 4, ticks(s) - before


def origins():
    """Pages of allowed origins may read replies, those of others not; a browser asks first, without a key."""
    page = "https://app.example:8443"
    ask = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for options, key in ((("--allow-origin", page), {}), (("--allow-origin", "http://other", "--allow-origin", page, "--api-key", "k"), {"Authorization": "Bearer k"})):
        with Server(PACKED, *options) as s:
            for path in (COMPLETIONS, "/v1/models", "/health"):
                status, headers, data = s.request("OPTIONS", path, headers=ask)
                assert (status, data) == (204, b"") and headers["access-control-allow-origin"] == page and headers["access-control-allow-headers"] == ask["Access-Control-Request-Headers"]
                assert "POST" in headers["access-control-allow-methods"] and "Origin" in headers["vary"] and "content-length" not in headers, headers.items()
            for body, given, want in ((GOOD, key, 200), ({}, key, 400), (GOOD, {"Authorization": "Bearer x"}, 401 if key else 200), ("x" * (33 << 20), key, 413)):
                status, headers, _ = s.request("POST", COMPLETIONS, body, {"Origin": page, **given})
                assert status == want and headers["access-control-allow-origin"] == page and "X-Request-Id" in headers["access-control-expose-headers"], (status, want)
            status, headers, _ = s.request("OPTIONS", COMPLETIONS, headers={**ask, "Origin": "https://evil.example"})
            assert status == (204 if key else 403) and not [x for x in headers if x.lower().startswith("access-control")] and headers["vary"] == "Origin"
            assert s.request("OPTIONS", "/nowhere", headers={**ask, **key})[0] == 404
            assert s.request("OPTIONS", "*")[0] == 204
            with http_events(s, {"Origin": page, **key}) as r:
                assert r.headers["access-control-allow-origin"] == page
    with Server(PACKED, "--allow-origin", "*") as s:
        assert s.request("POST", COMPLETIONS, GOOD, {"Origin": "null"})[1]["access-control-allow-origin"] == "*"
    with Server(PACKED, "--allow-origin", page.upper()) as s:  # a browser compares byte for byte with its own
        headers = s.request("POST", COMPLETIONS, GOOD, {"Origin": page})[1]
        assert headers["access-control-allow-origin"] == page, headers
    with Server(PACKED) as s:
        status, headers, _ = s.request("OPTIONS", COMPLETIONS, headers={**ask, "Origin": f"http://127.0.0.1:{s.port}"})
        assert status == 204 and headers["allow"] == "POST, OPTIONS" and "access-control-allow-origin" not in headers and "vary" not in headers
        assert s.request("POST", COMPLETIONS, GOOD, {"Origin": page})[0] == 403


def several():
    """A list that comes as several fields is read whole, a field that is none is refused, whatever its values are, and two traces are none."""
    page, trace = b"https://app.example", b"traceparent: 00-%s-00f067aa0ba902b7-01\r\n"
    with Server(PACKED, "--allow-origin", page.decode(), "--api-key", "k", "--log-format", "json") as s:
        def head_of(more, path=COMPLETIONS):
            c = raw(s, request_of({**GOOD, "max_tokens": 1}, more=more + b"Connection: close\r\n", path=path))
            return rest(c)

        key = b"x-api-key: k\r\n"
        for more, status in [(key, 200), (key + key, 400), (key + b"X-Api-Key: other\r\n", 400), (b"x-api-key: other\r\n" + key, 400), (b"Authorization: Bearer k\r\n" * 2, 400),
                             (key + b"Content-Type: application/json\r\nContent-Type: text/plain\r\n", 400), (key + b"Origin: %s\r\n" % page * 2, 400),
                             (key + b"endpoint-load-metrics-format: TEXT\r\n" * 2, 400), (key + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415),
                             (key + b"Content-Encoding: identity\r\n" * 2, 200), (key + b"Expect: 100-continue\r\n" * 2, 200),
                             (key + b"Expect: , 100-Continue ,\t100-continue,\r\n", 200), (key + b"Expect: 100-continue\r\nExpect: x\r\n", 417),
                             (key + b"Expect: 100-continue, x\r\n", 417), (key + b"Expect: 100-continue x\r\n", 417), (key + b"Expect: 100-continued\r\n", 417)]:
            got = head_of(more)
            assert b"HTTP/1.1 %d " % status in got, (more, got)
            assert status != 400 or b": found two, expected one" in got, (more, got)
        for traces in ([b"1" * 32], [b"1" * 32, b"2" * 32]):
            assert b"HTTP/1.1 200 " in head_of(key + b"".join(trace % x for x in traces))
        until(lambda: open(s.log).read().count('"request"') == 18)
        lines = [json.loads(x) for x in open(s.log) if '"request"' in x]
        assert [x.get("traceparent", "")[3:5] for x in lines[-2:]] == ["11", ""], lines[-2:]
        ask = b"Origin: %s\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: a\r\nAccess-Control-Request-Headers: b, c\r\n" % page
        got = rest(raw(s, b"OPTIONS /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + ask + b"\r\n"))
        assert re.findall(rb"Access-Control-Allow-Headers: (.*)\r", got) == [b"a", b"b, c"], got


def http_events(s, headers):
    c = s.connect()
    c.request("POST", COMPLETIONS, json.dumps({**GOOD, "stream": True}), headers)
    return c.getresponse()


def said():
    """Each line of the log has the method, the path, the client and the status, whatever was refused."""
    want = []
    with Server(PACKED, "--api-key", "k", "--log-format", "json") as s:
        for data, method, path, status in [
            (request_of(GOOD), "POST", COMPLETIONS, 401), (request_of(GOOD, more=b"x-api-key: k\r\n"), "POST", COMPLETIONS, 200),
            (request_of({}, path=MESSAGES, more=b"x-api-key: k\r\n"), "POST", MESSAGES, 400), (request_of(GOOD, more=b"Authorization: Bearer k\0evil\r\n"), "POST", COMPLETIONS, 400),
            (request_of(GOOD, more=b"Authorization: k\r\n"), "POST", COMPLETIONS, 401),
            (b'BREW /a"b\\c?secret=1 HTTP/1.1\r\nHost: localhost\r\nx-api-key: k\r\n\r\n', "BREW", '/a"b\\c', 404),
            (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nx-api-key: k\r\n\r\n", "DELETE", "/v1/models", 405),
            (b"GET //metrics?key=k HTTP/1.1\r\nHost: localhost\r\n\r\n", "GET", "//metrics", 400),
            (b"GET /v1/models?key=k HTTP/1.1\r\n\r\n", "GET", "/v1/models", 400), (b"\0", "-", "-", 400), (b"GET /" + b"x" * 70000, "-", "-", 431),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20000, "GET", "/health", 431), (b"GET /health HTTP/3.0\r\n", "GET", "/health", 505),
        ]:
            c = raw(s, data)
            peer = "%s:%d" % c.getsockname()
            assert b" %d " % status in c.recv(1 << 16)[:15], data[:80]
            c.close()
            want.append((method, path, peer, status))
        until(lambda: open(s.log).read().count('"request"') == len(want))
        lines = [json.loads(x) for x in open(s.log)]
    assert [(x["method"], x["path"], x["peer"], x["status"]) for x in lines if "request" in x] == want, lines
    assert all(x["error"] for x in lines if "request" in x and x["status"] != 200)


def no_reader():
    """Requests do not wait for a log that nobody reads: lines are dropped, and their number is said when somebody reads again."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    process = subprocess.Popen([f"{BIN}/minimax-serve", PACKED, "--port", "0"], stderr=writer)
    os.close(writer)
    try:
        log = b""
        while b"ready after" not in log:
            log += os.read(reader, 4096)
        c = http.client.HTTPConnection("127.0.0.1", int(re.search(rb"http://\S+:(\d+)", log)[1]), timeout=60)
        for count in (80, 1):
            for _ in range(count):
                c.request("POST", COMPLETIONS, "{}")
                assert c.getresponse().read()
            log = os.read(reader, 1 << 16).decode()
        dropped = int(re.search(r"log: (\d+) lines dropped, nobody read them\n", log)[1])
        assert 20 < dropped < 80 and log.count(" 400 ") == 1, log
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    os.close(reader)


def drains():
    """A server that is about to end still answers, with 503, until the last request has ended."""
    with Server(PACKED) as s:
        c = raw(s, request_of({**GOOD, "max_tokens": 2500, "stream": True}))
        kept = s.connect()
        kept.request("GET", "/ready")
        assert kept.getresponse().read()
        c.recv(10)
        s.process.send_signal(signal.SIGTERM)
        s.wait_for("draining")
        for connection in (kept, s.connect()):
            connection.request("GET", "/ready")
            r = connection.getresponse()
            assert (r.status, json.loads(r.read())["status"], r.headers["connection"]) == (503, "draining", "close")
        error = s.post(COMPLETIONS, GOOD, 503)["error"]
        assert "about to end" in error["message"] and s.request("POST", COMPLETIONS, GOOD)[1]["retry-after"]
        assert json.loads(s.get("/health"))["status"] == "draining"
        assert rest(c).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and s.process.wait(60) == 0
    with Server(PACKED) as s:  # and whoever asks on and on does not keep it
        c = raw(s, request_of({**GOOD, "max_tokens": 500}))
        stop = threading.Event()

        def ask():
            while not stop.is_set():
                try:
                    s.request("POST", COMPLETIONS, GOOD)
                except (OSError, http.client.HTTPException):
                    pass

        threads = [threading.Thread(target=ask) for _ in range(3)]
        time.sleep(0.05)
        s.process.send_signal(signal.SIGTERM)
        for t in threads:
            t.start()
        assert rest(c).startswith(b"HTTP/1.1 200 ") and s.process.wait(30) == 0
        stop.set()
        for t in threads:
            t.join()


def hangs():
    """A second signal ends a server whose thread never comes back."""
    hang = os.path.join(os.environ["BUILD"], "tests", "fault", "preload", "hang_open.so")
    if b"__asan_init" in open(f"{BIN}/minimax-serve", "rb").read():
        return  # it must be the first library
    for number in (signal.SIGTERM, signal.SIGINT):
        s = Server(PACKED, ready=False, prefix=("env", f"LD_PRELOAD={hang}"))
        assert s.request("GET", "/ready")[0] == 503
        s.process.send_signal(number)
        s.wait_for("draining")
        time.sleep(0.2)
        assert s.process.poll() is None
        s.process.send_signal(number)
        assert s.process.wait(30) == 128 + number and "ended without waiting" in open(s.log).read()


with Server(PACKED, "--max-body", "1M") as server:
    old_clients(server)
    half_closed(server)
    too_long(server)
    schemas_aside(server)
beside_long_ones()
long_echo()
long_reply()
few_descriptors()
no_descriptors()
idle()
origins()
several()
said()
no_reader()
drains()
hangs()
print("HTTP/1.0, half-closed and leaving clients, limits, origins, the log, a server that drains")
