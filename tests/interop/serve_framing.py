#!/usr/bin/env python3
"""HTTP requests as the server reads them, compared with h11: what h11 refuses is refused, what it takes is the same request, or is refused by
one of the rules listed here. Sequences of requests, most of them damaged, divided anywhere; to the reader alone, and to a running server.

    serve_framing.py [--cases N] [--live N] [--seed N]"""
import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading

import h11

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

BODY_MAX = 4096  # framing_lines's
READER = os.path.join(os.environ["BUILD"], "tests", "interop", "framing_lines")
HOST = b"Host: localhost\r\n"

# Fields that this server reads: those that come once (RFC 9110, section 5.3), and lists.
ONCE = [b"authorization", b"x-api-key", b"content-type", b"origin", b"access-control-request-method", b"access-control-request-private-network",
        b"endpoint-load-metrics-format"]
LISTS = [b"Connection", b"Expect", b"Access-Control-Request-Headers", b"traceparent", b"Accept"]

# Requests that are each wrong, or odd, in one way. True: it is taken.
TABLE = [
    (b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", True),
    (b"GET /health HTTP/1.0\r\n\r\n", True),
    (b"HEAD /health HTTP/1.1\r\n" + HOST + b"Content-Length: 43\r\n\r\n" + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n...", True),
    (b"TRACE /health HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nGET /\r\n0\r\n\r\n", True),
    (b"PROPFIND /health HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nGET /", True),
    (b"F-O~O /health HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n\r\nGET /", True),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"Authorization: Bearer SECRET\0evil\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"x-api\0-key: SECRET\r\n\r\n", False),
    (b"GET /health\0 HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\x0bc\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\x7fc\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a: \xe9 \t b \t \r\n\r\n", True),
    (b"GET /health HTTP/1.1\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.1\r\nHost: localhost\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\rc\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a: b\r\n c\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n a: b\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"a : b\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b": b\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"ab\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.0\r\n" + HOST + b"Host: b\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\nHost: user@localhost\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\nHost: localhost, evil\r\n\r\n", False),
    (b"GET /health HTTP/1.1\r\nHost: localhost,evil\r\n\r\n", True),  # a name that nobody has
    (b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", True),
    (b"GET //metrics HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET http://evil/metrics HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET http://LOCALHOST/metrics?x HTTP/1.1\r\n" + HOST + b"\r\n", True),
    (b"GET http://localhost HTTP/1.1\r\n" + HOST + b"\r\n", True),
    (b"GET http://localhost//metrics HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET http://localhost/metrics HTTP/1.0\r\n\r\n", False),
    (b"GET metrics HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /metrics#x HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", True),
    (b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET  /health HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /health  HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.1 \r\n" + HOST + b"\r\n", False),
    (b"GET /health\tHTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /health http/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/1.10\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/2.0\r\n" + HOST + b"\r\n", False),
    (b"GET /health HTTP/0.9\r\n" + HOST + b"\r\n", False),
    (b"GET /health\r\n\r\n", False),
    (b"\r\nGET /health HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", False),
    (b"G\xc9T /health HTTP/1.1\r\n" + HOST + b"\r\n", False),
    (b"GET /h\xe9alth HTTP/1.1\r\n" + HOST + b"\r\n", False),
] + [(b"GET /health HTTP/1.1\r\n" + HOST + name + b": a\r\nb: c\r\n" + name.upper() + b": " + value + b"\r\n\r\n", False) for name in ONCE for value in (b"a", b"b", b"")
] + [(b"GET /health HTTP/1.1\r\n" + HOST + name + b": a\r\n" + name + b": b\r\n\r\n", True) for name in LISTS
] + [(b"POST /x HTTP/1.1\r\n" + HOST + more + rest, taken) for more, rest, taken in [
    (b"Content-Length: 5\r\n\r\n", b"hello", True), (b"Content-Length: 005\r\n\r\n", b"hello", True), (b"Content-Length: 5\r\nContent-Length: 5\r\n\r\n", b"hello", True),
    (b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"hello!", False), (b"Content-Length: 5, 5\r\n\r\n", b"hello", False),
    (b"Content-Length: +5\r\n\r\n", b"hello", False), (b"Content-Length: -5\r\n\r\n", b"hello", False), (b"Content-Length: 0x5\r\n\r\n", b"hello", False),
    (b"Content-Length: 5 5\r\n\r\n", b"hello", False), (b"Content-Length:\r\n\r\n", b"", False), (b"Content-Length: 99999999999999999999\r\n\r\n", b"", False),
    (b"Content-Length: 18446744073709551621\r\n\r\n", b"hello", False), (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\n", False),
    (b"Transfer-Encoding: gzip, chunked\r\n\r\n", b"0\r\n\r\n", False), (b"Transfer-Encoding: xchunked\r\n\r\n", b"0\r\n\r\n", False),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\n\r\n", False), (b"Transfer-Encoding:\r\n\r\n", b"0\r\n\r\n", False),
    (b"Transfer-Encoding: identity\r\n\r\n", b"", False), (b"transfer-ENCODING: Chunked\r\n\r\n", b"0\r\n\r\n", True),
    (b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", b"hello", True),
]] + [(b"POST /x HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + rest, taken) for rest, taken in [
    (b"5\r\nhello\r\n0\r\n\r\n", True), (b"5;a=b\r\nhello\r\n0;c\r\n\r\n", True), (b'5;a="b c";d\r\nhello\r\n0\r\n\r\n', True), (b"05\r\nhello\r\n000\r\n\r\n", True),
    (b"A\r\nhello hell\r\n0\r\n\r\n", True), (b"5\r\nhello\r\n0\r\na: b\r\nc:d\r\n\r\n", True),
    (b"0x5\r\nhello\r\n0\r\n\r\n", False), (b"+5\r\nhello\r\n0\r\n\r\n", False), (b"5 junk\r\nhello\r\n0\r\n\r\n", False), (b"-0\r\n\r\n", False), (b"\r\n\r\n", False),
    (b"5 \r\nhello\r\n0\r\n\r\n", False), (b"5\r\nhello0\r\n\r\n", False), (b"5\r\nhelloXX0\r\n\r\n", False), (b"5\nhello\r\n0\r\n\r\n", False), (b"5\r\nhello\n0\r\n\r\n", False),
    (b"5\r\nhello\r\n0\n\r\n", False), (b"5\r\nhello\r\n0\r\n\n", False), (b"5;a\rb\r\nhello\r\n0\r\n\r\n", False), (b"5;a\0b\r\nhello\r\n0\r\n\r\n", False),
    (b"5\r\nhello\r\n0\r\nContent-Length: 5\r\n\r\n", False), (b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", False), (b"5\r\nhello\r\n0\r\na b: c\r\n\r\n", False),
    (b"5\r\nhello\r\n0\r\na: b\r\n c\r\n\r\n", False), (b"FFFFFFFFFFFFFFFFF5\r\nhello\r\n0\r\n\r\n", False), (b"10000000000000005\r\nhello\r\n0\r\n\r\n", False),
    (b"000000000000000000005\r\nhello\r\n0\r\n\r\n", False), (b"5;" + b"a" * 70000 + b"\r\nhello\r\n0\r\n\r\n", False),
]] + [(b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", False)]

PIECES = [b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"0", b"5", b"ffffffffffffffff", b"\r\n\r\n", b"\x0b", b"\x85", b"\xe9", b"Host: evil\r\n",
          b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"GET /y HTTP/1.1\r\nHost: localhost\r\n\r\n", b"chunked", b"HTTP/1.0", b"http://evil",
          b"//", b"#", b"+", b"-", b"0x", b"Connection: close\r\n", b"Authorization: Bearer x\r\n", b";a=b", b" \r\n", b"\r\n ", b"identity", b"close"]


def some_request(rng, number):
    """A request that is in order; its path says which it is."""
    method = rng.choice([b"GET", b"POST", b"POST", b"POST", b"HEAD", b"PUT", b"TRACE", b"PROPFIND", b"FOO", b"OPTIONS"])
    path = b"/x%d" % number
    body = bytes(rng.randrange(256) for _ in range(rng.choice([1, 4, 30]))) if rng.random() < 0.6 else b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
    host = rng.choice([b"localhost", b"localhost:80", b"127.0.0.1", b"[::1]:9"])
    lines = [b"Host: " + host]
    lines += rng.sample([b"a: b", b"Accept:*/*", b"X-Long:  \t" + b"v" * rng.randrange(300), b"Empty:", b"Connection: keep-alive", b"Expect: 100-continue", b"Upgrade: h2c", b"x-api-key: k", b"authorization: Bearer k"], rng.randrange(4))
    if rng.random() < 0.05:
        lines.append(rng.choice([b"Connection: close", b"connection: x, Close"]))
    how = rng.random()
    if how < 0.35:
        lines.append(b"Content-Length: %d" % len(body))
    elif how < 0.75:
        lines.append(rng.choice([b"Transfer-Encoding: chunked", b"transfer-encoding:Chunked"]))
        data, body, at = body, b"", 0
        while at < len(data):
            n = rng.randrange(1, len(data) - at + 1)
            body += rng.choice([b"%x", b"%X", b"0%x"]) % n + rng.choice([b"", b"", b";a", b';a="b c"']) + b"\r\n" + data[at : at + n] + b"\r\n"
            at += n
        body += b"0\r\n" + rng.choice([b"", b"", b"Trailer: x\r\n", b"a: b\r\nc: d\r\n"]) + b"\r\n"
    else:
        body = b""
    rng.shuffle(lines)
    version = b"HTTP/1.0" if rng.random() < 0.06 else b"HTTP/1.1"
    target = rng.choice([path, path, path, path + b"?q=//", b"http://" + host + path])
    return method + b" " + target + b" " + version + b"\r\n" + b"".join(x + b"\r\n" for x in lines) + b"\r\n" + body


def damaged(rng, data):
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.3:  # where lines meet
            at = rng.choice([m.start() + k for m in re.finditer(b"\r\n", data) for k in (0, 1, 2)] or [at])
        how = rng.randrange(5)
        if how == 0:
            data = data[:at] + rng.choice(PIECES) + data[at:]
        elif how == 1:
            data = data[:at] + data[at + rng.choice([1, 1, 2, 9]) :]
        elif how == 2:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif how == 3:
            data = data[:at] + rng.choice(PIECES) + data[at + rng.choice([1, 2]) :]
        else:
            lines = data.split(b"\r\n")
            at = rng.randrange(len(lines))
            lines.insert(rng.randrange(len(lines)), lines[at]) if rng.random() < 0.5 else lines.pop(at)
            data = b"\r\n".join(lines)
    return data


def some_case(rng):
    if rng.random() < 0.1:
        taken = [x for x, ok in TABLE if ok and len(x) < 1000]
        return rng.choice(taken) + damaged(rng, rng.choice(taken))
    data = b"".join(some_request(rng, i) for i in range(rng.choice([1, 1, 2, 3])))
    return data if rng.random() < 0.2 else damaged(rng, data)


# ---- what h11 reads, and what is refused beyond it


def by_h11(data):
    """(request, its headers, its body, what is behind it) of the first request; "refused", or "part"."""
    if not data:  # to h11 the end of the connection
        return "part"
    c = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 30)
    c.receive_data(data)
    request, body = None, b""
    try:
        while True:
            event = c.next_event()
            if event is h11.NEED_DATA:
                return "part"
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return request, list(request.headers.raw_items()), body, c.trailing_data[0]
    except h11.RemoteProtocolError:
        return "refused"


def framing_lines_of(raw, chunked):
    """The lines of a request that h11 took, with their ends, without its body: of the head, and between and behind chunks."""
    end = re.search(b"\n\r?\n", raw).end()
    head, rest, lines = raw[:end], raw[end:], []
    while chunked:
        line, rest = rest[: rest.index(b"\r\n") + 2], rest[rest.index(b"\r\n") + 2 :]
        lines.append(line)
        size = int(re.match(b"[0-9a-fA-F]+", line)[0], 16)
        if size == 0:
            return head, lines, rest
        rest = rest[size + 2 :]
    return head, lines, b""


def why_strict(raw, request, headers, body):
    """The rules by which a request that h11 takes is refused; the first one that holds, or None."""
    values = [(k.lower(), v) for k, v in headers]
    chunked = any(k == b"transfer-encoding" for k, v in values)
    head, chunks, trailers = framing_lines_of(raw, chunked)
    host = [v for k, v in values if k == b"host"]
    text = head + b"".join(chunks) + trailers
    target = bytes(request.target)
    absolute = re.fullmatch(rb"(?i:http)://([^/?]+)(/[^?]*)?(\?.*)?", target)
    path = absolute[2] or b"/" if absolute else target
    rules = {
        "a line that does not end with CR LF": re.search(b"(?<!\r)\n|\r(?!\n)", text),
        "a control character": re.search(b"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text),
        "a header on two lines": re.search(b"\n[ \t]", head + trailers),
        "not HTTP/1": request.http_version[:1] != b"1",
        "a version above 1.1 without Host": request.http_version > b"1.1" and not host,
        "a field twice": any(sum(k == name for k, v in values) > 1 for name in ONCE),
        "Content-Length as a list": re.search(b"(?im)^content-length:.*,", head),
        "a length and a coding": chunked and any(k == b"content-length" for k, v in values),
        "a coding in HTTP/1.0": chunked and request.http_version == b"1.0",
        "Host that is none": host and not re.fullmatch(rb"(\[[0-9A-Fa-f:.]*\]|[-A-Za-z0-9._~!$&'()*+,;=%]*)(:[0-9]*)?", host[0]),
        "a target that is no path": not (target == b"*" and request.method == b"OPTIONS") and not re.match(b"/(?!/)", path),
        "a fragment": b"#" in target,
        "a URI of another host": absolute and (not host or absolute[1].lower() != host[0].lower()),
        "white space behind the size of a chunk": any(re.match(b"[0-9a-fA-F]+[ \t]", x) for x in chunks),
        "a trailer for the head": re.search(b"(?im)^(content-length|transfer-encoding|host):", trailers),
        "a long body": len(body) > BODY_MAX,
        "long lines": len(head) > 64 << 10 or sum(map(len, chunks)) + len(trailers) > 64 << 10,
    }
    return next((name for name, holds in rules.items() if holds), None)


def keeps(request, headers):
    options = {x.strip().lower() for k, v in headers if k.lower() == b"connection" for x in v.split(b",")}
    return b"close" not in options and (request.http_version != b"1.0" or b"keep-alive" in options)


def compare(data, got):
    """What the reader made of these bytes is what h11 makes of them. The strict rules that it met."""
    at, strict = 0, []
    for mine in got["requests"]:
        theirs = by_h11(data[at:])
        assert not isinstance(theirs, str), (f"h11: {theirs}", data, at, got)
        request, headers, body, rest = theirs
        target = bytes(request.target)
        path = re.sub(rb"^(?i:http)://[^/?]*", b"", target).split(b"?")[0] or b"/"
        text = {k: bytes.fromhex(mine[k]) for k in ("method", "path", "body")}
        assert text == {"method": bytes(request.method), "path": path, "body": body}, (data, at, text, theirs)
        # h11 drops the second of two equal lengths.
        fields = [(bytes.fromhex(k), bytes.fromhex(v)) for k, v in mine["fields"]]
        lengths = [x for x in fields if x[0].lower() == b"content-length"]
        fields = [x for x in fields if x not in lengths] + lengths[:1]
        theirs = [x for x in headers if x[0].lower() != b"content-length"] + [x for x in headers if x[0].lower() == b"content-length"]
        lower = [(k.lower(), v.lower() if k.lower() == b"transfer-encoding" else v) for k, v in theirs]
        assert [(k.lower(), v.lower() if k.lower() == b"transfer-encoding" else v) for k, v in fields] == lower, (data, fields, theirs)
        assert mine["end"] == len(data) - len(rest) and mine["keep"] == keeps(request, headers), (data, mine, rest)
        assert not why_strict(data[at : mine["end"]], request, headers, body), (data, at, "was to be refused")
        at = mine["end"]
        if not mine["keep"]:
            assert mine is got["requests"][-1] and not got["refused"] and not got["begun"], (data, got)
            return strict
    theirs = by_h11(data[at:])
    if not isinstance(theirs, str):  # h11 takes one more
        request, headers, body, rest = theirs
        rule = why_strict(data[at : len(data) - len(rest)], request, headers, body)
        assert got["refused"] and rule, (f"refused {got['why']}", data[at:], theirs)
        strict.append(rule)
    elif theirs == "refused":
        assert got["refused"] or got["begun"], (data[at:], got)
    else:
        assert got["refused"] or got["begun"] == (at < len(data)), (data[at:], got)
    return strict


def read_by_reader(cases, rng):
    """What framing_lines makes of each case, whole; divided anywhere, and byte by byte, it is the same."""
    lines = []
    for data in cases:
        cuts = sorted(rng.randrange(1, len(data) + 1) for _ in range(rng.choice([1, 2, 5]))) if rng.random() < 0.8 or len(data) > 2000 else range(1, len(data) + 1)
        lines += [data.hex(), data.hex() + " " + " ".join(map(str, cuts))]
    done = subprocess.run([READER], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    got = [json.loads(x) for x in done.stdout.splitlines()]
    assert len(got) == len(lines)
    for i, data in enumerate(cases):
        assert got[2 * i] == got[2 * i + 1], (data, lines[2 * i + 1].split()[1:], got[2 * i], got[2 * i + 1])
    return got[::2]


# ---- a running server


def replies_of(data, methods):
    """(status, headers, body) of each reply; methods: of the requests, for HEAD has no body."""
    out = []
    while data:
        head, data = data.split(b"\r\n\r\n", 1)
        lines = head.decode().split("\r\n")
        assert re.fullmatch(r"HTTP/1\.1 \d{3} .*", lines[0]), (lines, data)
        status = int(lines[0].split()[1])
        if status == 100:
            continue
        headers = {k.lower(): v for k, v in (x.split(": ", 1) for x in lines[1:])}
        method = methods[len(out)] if len(out) < len(methods) else b""
        n = 0 if status == 204 or method == b"HEAD" else int(headers["content-length"])
        assert len(data) >= n, (lines, data)
        out.append((status, headers, data[:n]))
        data = data[n:]
    return out


def talk(port, data, cuts):
    """All that the server says to these bytes, sent in pieces by a client that then sends no more."""
    c = socket.create_connection(("127.0.0.1", port), timeout=30)
    c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    got = b""
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(data)]):
            c.sendall(data[begin:end])
        c.shutdown(socket.SHUT_WR)
    except OSError:  # it was refused before its end
        pass
    while part := c.recv(1 << 16):
        got += part
    c.close()
    return got


def live(server, cases, expected, rng):
    """A reply to each request that the reader takes, in order; one refusal at most, at the end."""
    counts = {}
    work = [(data, want, sorted(rng.randrange(1, len(data) + 1) for _ in range(rng.choice([0, 1, 3])))) for data, want in zip(cases, expected)]
    failed = []

    def one(data, want, cuts):
        methods = [bytes.fromhex(x["method"]) for x in want["requests"]]
        got = talk(server.port, data, cuts)
        replies = replies_of(got, [*methods, bytes.fromhex(want["method"])])
        assert len(replies) == len(methods) + (want["refused"] > 0), (data, want, got)
        for request, (status, headers, body) in zip(want["requests"], replies):
            method, path = bytes.fromhex(request["method"]).decode(), bytes.fromhex(request["path"]).decode()
            assert status < 500 and ("connection" in headers) == (not request["keep"] or request["minor"] == 0), (data, status, headers)
            assert status != 400 or path in ("/tokenize", "/detokenize"), (data, status, body)
            if status == 404 and method != "HEAD" and len(path) < 100:
                assert json.loads(body)["error"]["message"] == f"there is no {method[:20]} {path}", (data, body)
            counts[status] = counts.get(status, 0) + 1
        if want["refused"]:
            status, headers, body = replies[-1]
            assert status == want["refused"] and headers["connection"] == "close", (data, replies)
            assert bytes.fromhex(want["method"]) == b"HEAD" or json.loads(body)["error"]["message"] == want["why"], (data, replies)
            counts[status] = counts.get(status, 0) + 1

    def run(part):
        try:
            for x in part:
                one(*x)
        except BaseException as e:  # noqa: B036
            failed.append(e)

    threads = [threading.Thread(target=run, args=(work[i::4],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]
    return counts


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--cases", type=int, default=4000)
    p.add_argument("--live", type=int, default=400)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    rng = random.Random(a.seed)
    rules, taken, refused = {}, 0, 0
    table = read_by_reader([x for x, _ in TABLE], rng)
    for (data, ok), got in zip(TABLE, table):
        assert (len(got["requests"]) == 1 and not got["refused"] if ok else not got["requests"] and got["refused"]), (data, ok, got)
        compare(data, got)
    for done in range(0, a.cases, 1000):
        cases = [some_case(rng) for _ in range(min(1000, a.cases - done))]
        for data, got in zip(cases, read_by_reader(cases, rng)):
            taken += len(got["requests"])
            refused += got["refused"] > 0
            for rule in compare(data, got):
                rules[rule] = rules.get(rule, 0) + 1
    assert taken > a.cases / 3 and refused > a.cases / 4, (taken, refused)
    cases = [x for x, _ in TABLE if len(x) < 2000] + [some_case(rng) for _ in range(a.live)]
    with Server(convert("tests/data/tiny-m2"), "--max-body", str(BODY_MAX), "--max-model-len", "64") as server:
        counts = live(server, cases, read_by_reader(cases, rng), rng)
    print(f"{a.cases} sequences: {taken} requests as h11 reads them, {refused} refused, beyond h11: {rules}; {len(cases)} to a server: {counts}")


main()
