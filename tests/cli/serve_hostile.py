#!/usr/bin/env python3
"""minimax-serve among hostile clients: mutated bodies always get a 4xx of the right form, or a reply, and a good request right after
succeeds; slow, silent, leaving and pipelining connections cost themselves alone; many connections wait their turn."""
import json
import os
import random
import select
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, Server, convert  # noqa: E402

ROUNDS = int(os.environ.get("SERVE_MUTATIONS", "250"))
SEED = int(os.environ.get("SERVE_SEED", "4"))
EVERY = int(os.environ.get("SERVE_AFTER", "10"))  # a good request after every so many
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
GOOD = {"prompt": "In the beginning", "temperature": 0, "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}
SCHEMA = {"type": "object", "required": ["a", "b"], "additionalProperties": False, "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
          "properties": {"a": {"enum": ["x", 1, -1.5e3, None, True]}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}, "c": {"const": "k"},
                         "d": {"type": ["integer", "string"]}, "e": {"type": "string", "minLength": 1, "maxLength": 3}}}
SEEDS = {
    COMPLETIONS: {**GOOD, "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "logprobs": 2, "seed": 1, "n": 2, "stop_token_ids": [3]},
    CHAT: {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "é\\u00e9"}]},
                        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1e3}"}}]},
                        {"role": "tool", "tool_call_id": "c", "content": "r"}, {"role": "user", "content": "x"}],
           "tools": [TOOL], "max_tokens": 2, "top_logprobs": 1, "logprobs": True, "tool_choice": "auto"},
    MESSAGES: {"system": [{"type": "text", "text": "s"}], "max_tokens": 2, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
               "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]}]},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "max_output_tokens": 2,
                      "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "reasoning": {"effort": "low"}},
    "/v1/responses?tools": {"input": "x", "max_output_tokens": 2,
                            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}]},
    "/v1/chat/completions?schema": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "temperature": 0,
                                    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": SCHEMA}}},
    "/v1/chat/completions?grammar": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "grammar": "root ::= \"a\" root | [b-d]{2}"},
    "/v1/completions?regex": {"prompt": "x", "max_tokens": 2, "prompt_logprobs": 1, "structured_outputs": {"regex": "(a|b){2,}c", "json": None}},
    "/tokenize": {"prompt": "x"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}
ODD = [None, float("nan"), float("-inf"), float("inf"), True, 0, -1, 1e308, 10**40, 0.5, "", "x", "\u0000", "\ud800", [], {}, [[]], {"a": {}}, ["x"] * 50, "x" * 3000, "]~b]user", "<think>"]


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, path + (key,))


def mutated(value, rng):
    """A copy with one value changed, lost, doubled or nested."""
    value = json.loads(json.dumps(value))
    path = rng.choice([p for p in places(value) if p] or [()])
    if not path:
        return rng.choice(ODD)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    how = rng.randrange(4)
    if how == 0:
        inner[path[-1]] = rng.choice(ODD)
    elif how == 1:
        del inner[path[-1]]
    elif how == 2:
        inner[path[-1]] = [inner[path[-1]]] * rng.choice([1, 3])
    else:
        for _ in range(rng.choice([1, 40, 300])):
            inner[path[-1]] = {"x": inner[path[-1]]}
    return value


def damaged(body, rng):
    """The text of a body with bytes changed, cut or put in."""
    text = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([1, 1, 3])):
        at = rng.randrange(len(text) + 1)
        if rng.random() < 0.4:
            text[at : at + rng.choice([1, 5])] = b""
        else:
            text[at:at] = rng.choice([b'"', b"\\", b"{", b"]", b"\xff", b"\0", b"1e999", b"\\ud800", b",", b"nan", b"[" * 300, bytes([rng.randrange(256)])])
    return bytes(text)


def check_reply(path, body, status, data):
    if status == 200:
        return
    assert 400 <= status < 500, (path, body, status, data)
    error = json.loads(data)
    if path.startswith(MESSAGES):
        assert error["type"] == "error" and error["error"]["type"] and error["error"]["message"], (path, body, data)
    else:
        assert error["error"]["message"] and error["error"]["type"], (path, body, data)


def mutations(s):
    rng = random.Random(SEED)
    c = s.connect(600)  # a long prompt with sanitizers, on a machine with other work
    counts = {}
    for path, body in SEEDS.items():
        c.request("POST", path.split("?")[0], json.dumps(body))
        r = c.getresponse()
        assert (r.read(), r.status)[1] == 200, path
    for i in range(ROUNDS):
        path = rng.choice(list(SEEDS))
        body = SEEDS[path]
        for _ in range(rng.choice([1, 2])):
            body = mutated(body, rng)
        text = json.dumps(body).encode() if rng.random() < 0.6 else damaged(body, rng)
        few = b'"max_output_tokens": 2' if path.startswith("/v1/responses") else b'"max_tokens": 2'
        if few not in text:  # or it runs to the end of the context
            text = text.replace(b"{", b"{" + few + b", ", 1)
        if rng.random() < 0.1:  # a long one is read in another thread
            text = text.replace(b"{", b'{"pad": "' + b"x" * 20000 + b'", ', 1)
        c.request("POST", path.split("?")[0], text)
        r = c.getresponse()
        data = r.read()
        check_reply(path, text, r.status, data)
        counts[r.status] = counts.get(r.status, 0) + 1
        if i % EVERY == 0:
            c.request("POST", COMPLETIONS, json.dumps(GOOD))
            assert c.getresponse().read().count(b"text_completion") == 1
    assert counts[200] > ROUNDS / 20 and counts[400] > ROUNDS / 5, counts
    return counts


def raw(s, data=b""):
    c = socket.create_connection(("127.0.0.1", s.port), timeout=20)
    c.sendall(data)
    return c


def request_of(body, path=COMPLETIONS, more=b""):
    text = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s" % (path.encode(), len(text), more, text)


def odd_http(s):
    for data in [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01" * 50, b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20000 + b"\r\n",
                 b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"GET /%00%ff/../../etc/passwd HTTP/1.1\r\n\r\n"]:
        c = raw(s)
        try:
            c.sendall(data)
            c.shutdown(socket.SHUT_WR)
            answer = c.recv(100)
        except OSError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.") and answer.split()[1][:1] in b"45", (data[:60], answer)
        c.close()
    # More of the next request while one is answered; an answer for each, in order.
    c = raw(s, request_of({**GOOD, "max_tokens": 60}) + request_of({"prompt": ""}) + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    got = b""
    while part := c.recv(65536):
        got += part
    assert [x.split()[0] for x in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"], got
    c = raw(s, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
        b"1\r\n%c\r\n" % x for x in json.dumps(GOOD).encode()) + b"0\r\n\r\n")
    assert c.recv(15) == b"HTTP/1.1 200 OK"
    assert s.post(COMPLETIONS, b" " * (3 << 19), 413)["error"]["code"] == "request_too_large"
    assert s.request("POST", COMPLETIONS, b" " * (5 << 19))[0] == 413


def answers(s, data):
    """What a connection says to these bytes until it ends."""
    c = raw(s)
    got = b""
    try:
        c.sendall(data)
        while part := c.recv(65536):
            got += part
    except OSError:
        pass
    c.close()
    return got


def two_readings(s):
    """What HTTP forbids since two servers could read different messages in it: refused, and what follows in the same bytes is not answered."""
    text = json.dumps(GOOD).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    next_one = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    size = b"Content-Length: %d\r\n" % len(text)
    for name, data in {
        "two lengths": size + b"Content-Length: 5\r\n\r\n" + text,
        "a length and a coding": size + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "space before the colon": size.replace(b":", b" :") + b"\r\n" + text,
        "a sign": size.replace(b": ", b": +") + b"\r\n" + text,
        "another coding": b"Transfer-Encoding: xchunked\r\n\r\n" + text,
        "two codings": b"Transfer-Encoding: gzip, chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(text), text),
        "no name": b": a\r\n" + size + b"\r\n" + text,
    }.items():
        got = answers(s, head + data + next_one)
        assert got.count(b"HTTP/1.1 ") == 1 and got.startswith(b"HTTP/1.1 400 "), (name, got)
    got = answers(s, b"GET /health HTTP/-1.-1\r\nHost: localhost\r\n\r\n" + next_one)
    assert got.startswith(b"HTTP/1.1 400 ") and b"invalid_request_error" in got, got
    same = answers(s, head + size + size + b"Connection: close\r\n\r\n" + text)
    assert same.startswith(b"HTTP/1.1 200 "), same


def heads(s):
    """The reply to HEAD has the headers of GET and no body: the next reply of the connection begins right behind them."""
    for path in ("/health", "/v1/models"):
        get = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode()
        head, rest = answers(s, get.replace(b"GET", b"HEAD").replace(b"Connection: close\r\n", b"") + get).split(b"\r\n\r\n", 1)
        assert rest.startswith(b"HTTP/1.1 "), (path, head, rest)
        whole = rest.split(b"\r\n\r\n", 1)[1]
        assert b"Content-Length: %d\r\n" % len(whole) in head + b"\r\n", (path, head, rest)


def resident(s):
    return int(open(f"/proc/{s.process.pid}/status").read().split("VmRSS:")[1].split()[0]) >> 10


def endless(s):
    """A line between chunks, or behind the last, that does not end: the connection ends, and no memory is kept for it."""
    before = resident(s)
    for data in (b"1;", b"1\r\na", b"1\r\na\r\n0\r\nx: "):
        c = raw(s, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
        sent = 0
        try:
            while sent < 48 << 20:
                sent += c.send(b"a" * (1 << 18))
            raise AssertionError(f"{sent} bytes were taken behind {data}")
        except OSError:
            pass
        c.close()
        assert resident(s) < before + 24, (data, before, resident(s))


def many_choices(s):
    """The choices of a request share its tools: however many they are, the tools are read once. Equal keys leave a short prompt."""
    def peak():
        return int(open(f"/proc/{s.process.pid}/status").read().split("VmHWM:")[1].split()[0]) >> 10

    tool = '{"type": "function", "function": {"name": "f", "parameters": {%s"type": "object"}}}' % ('"a": 1, ' * 40000)
    before = peak()
    whole = s.post(CHAT, '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "n": 128, "tools": [%s]}' % tool)
    assert len(whole["choices"]) == 128 and peak() < before + 200, (before, peak())


def running(s):
    values = s.metrics()
    return [int(values["requests_waiting"]), int(values["requests_running"])]


def leavers(s):
    """Clients that leave, before and while a reply is made: nothing goes on for them."""
    for body in ({**GOOD, "prompt": "In the beginning " * 450, "pad": "x" * 20000}, {**GOOD, "max_tokens": 8000, "ignore_eos": True},
                 {**GOOD, "max_tokens": 8000, "ignore_eos": True, "stream": True}):
        cs = [raw(s, request_of(body)) for _ in range(6)]
        time.sleep(0.1)
        for c in cs:
            c.close()
    end = time.monotonic() + 60
    while running(s) != [0, 0]:
        assert time.monotonic() < end, running(s)
        time.sleep(0.02)


def failing(s):
    """Requests whose time is over before their reply is whole leave no memory behind, what they kept of logprobs included."""
    body = {**GOOD, "n": 64, "logprobs": 20, "max_tokens": 1900, "ignore_eos": True, "timeout": 0.6}
    for _ in range(4):
        s.post(COMPLETIONS, body, 504)
    before = resident(s)
    for _ in range(16):
        s.post(COMPLETIONS, body, 504)
    # The address sanitizer keeps freed memory for a while, and tells at the end what was lost.
    sanitized = b"__asan_init" in open(f"{BIN}/minimax-serve", "rb").read()
    assert sanitized or resident(s) < before + 8, (before, resident(s))


def slow(packed):
    """At their time connections that send nothing are closed, and those that send a byte now and then are told so (408); those that read
    nothing do not hold others up, who would else wait for the write timeout."""
    with Server(packed, "--read-timeout", "1", "--write-timeout", "40", "--max-connections", "300") as s:
        silent = [raw(s) for _ in range(200)]
        trickle = [raw(s, b"POST /v1/completions HTTP/1.1\r\n") for _ in range(60)]
        readers = [raw(s, request_of({**GOOD, "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": True})) for _ in range(2)]
        start = time.monotonic()
        while time.monotonic() - start < 2.2:
            began = time.monotonic()
            assert s.post("/tokenize", {"prompt": "x"})["count"] == 1
            assert time.monotonic() - began < 20
            for c in trickle:
                try:
                    c.sendall(b"a")
                except OSError:
                    pass
            time.sleep(0.1)
        for c in silent + trickle:
            c.settimeout(30)
            try:
                got = c.recv(1000)
                assert got.startswith(b"HTTP/1.1 408 ") and b"\r\nConnection: close\r\n" in got if c in trickle else got == b"", (c in trickle, got)
            except ConnectionError:
                assert c in silent, "a slow request was not answered"
            c.close()
        for c in readers:
            c.close()
        # More connections than may be open: they wait, and are served when others go.
        many = [raw(s) for _ in range(400)]
        assert s.post("/tokenize", {"prompt": "x"})["count"] == 1
        for c in many:
            c.close()
        assert s.post(COMPLETIONS, GOOD)["usage"]["completion_tokens"] == 2


def idle(packed):
    """The time of a request begins with its first byte, not where the reply before it ended."""
    request = request_of(GOOD, more=b"a: b\r\n")
    with Server(packed, "--read-timeout", "5") as s:
        for more in (b"", request):  # a fresh connection, and one that had a reply
            c = raw(s, more)
            if more:
                assert c.recv(65536).startswith(b"HTTP/1.1 200 ")
            for part in (request[:30], request[30:]):
                time.sleep(3)
                c.sendall(part)
            assert c.recv(65536).startswith(b"HTTP/1.1 200 "), more
            c.close()
        c, end = raw(s, b"POST /v1/completions HTTP/1.1\r\n"), time.monotonic() + 20
        while not select.select([c], [], [], 0.4)[0]:  # whole lines, now and then, do not begin it anew
            c.sendall(b"a: b\r\n")
            assert time.monotonic() < end, "a slow request was not cut"
        assert c.recv(65536).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        c.close()
        # A part of a body, behind a reply; and no part of a next request.
        body = raw(s, request + request[:-1])
        kept = raw(s, request)
        for c in (body, kept):
            c.settimeout(30)
            got = b""
            while part := c.recv(65536):
                got += part
            assert [x.split()[0] for x in got.split(b"HTTP/1.1 ")[1:]] == [b"200"] + [b"408"] * (c is body), got
            c.close()
        line = [x for x in open(s.log) if " 408 " in x]
        assert len(line) == 2 and all(" POST /v1/completions 408 " in x for x in line), line


PACKED = convert("tests/data/tiny-m2")
with Server(PACKED, "--chat-format", "minimax-m2", "--max-body", "1M", "--max-model-len", "2048") as server:
    seen = mutations(server)
    odd_http(server)
    two_readings(server)
    heads(server)
    endless(server)
    many_choices(server)
    leavers(server)
    failing(server)
    before = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    for _ in range(50):
        assert server.post(COMPLETIONS, GOOD)["usage"]["completion_tokens"] == 2
    end = time.monotonic() + 30
    while len(os.listdir(f"/proc/{server.process.pid}/fd")) > before + 1:
        assert time.monotonic() < end, (before, os.listdir(f"/proc/{server.process.pid}/fd"))
        time.sleep(0.05)
slow(PACKED)
idle(PACKED)
print(f"{ROUNDS} mutated bodies: {seen}; odd HTTP, leaving and slow clients cost themselves alone")
