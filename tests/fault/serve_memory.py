#!/usr/bin/env python3
"""minimax-serve while one allocation after another fails, libevent's included: each request gets a reply, an error or the end of its connection, the
next one is answered as ever, and SIGTERM ends the server, also where a client closed its side and the reply then failed."""
import http.client
import json
import mmap
import os
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../cli"))
from serve_client import TMP, Server, convert  # noqa: E402

PRELOAD = os.path.join(os.environ["BUILD"], "tests/fault/preload/fail_next.so")
BODY = json.dumps({"prompt": "In the", "max_tokens": 3, "temperature": 0, "stream": True, "stop": "~"}).encode()


def ask(s, half_close):
    """The status and the body, as far as they came."""
    c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=30)
    try:
        c.request("POST", "/v1/completions", BODY)
        if half_close:
            c.sock.shutdown(socket.SHUT_WR)
        r = c.getresponse()
        return r.status, r.read()
    except http.client.IncompleteRead as e:
        return 200, e.partial
    except (http.client.HTTPException, OSError):  # the connection has ended, before half of it was closed too
        return 0, b""
    finally:
        c.close()


control = os.path.join(TMP, "fail-next")
with open(control, "wb") as f:
    f.write(bytes(4))
cases = whole = 0
with open(control, "r+b") as f, mmap.mmap(f.fileno(), 4) as left:
    with Server(convert("tests/data/tiny-m2"), "--write-timeout", "1", prefix=["env", "LD_PRELOAD=" + PRELOAD, "FAIL_NEXT=" + control]) as server:
        usual = [x["choices"][0]["text"] for x in server.events("/v1/completions", json.loads(BODY))]
        for half in (False, True):
            failed, n = True, 0
            while failed:  # up to the first allocation that the request does not reach
                n += 1
                left[:] = struct.pack("I", n)
                reply = ask(server, half)
                failed, left[:] = struct.unpack("I", left[:])[0] == 0, bytes(4)
                cases += failed
                whole += failed and reply[1].endswith(b"[DONE]\n\n")
                assert server.process.poll() is None, (half, n, server.process.returncode, open(server.log).read()[-1000:])
                if n % 10 == 0 or not failed:
                    assert [x["choices"][0]["text"] for x in server.events("/v1/completions", json.loads(BODY))] == usual, (half, n)
        start = time.monotonic()
    assert time.monotonic() - start < 20, "the server did not end"
print(f"{cases} allocations failed, one a request; {whole} replies were whole")
assert cases > 60 and whole < cases, (cases, whole)
