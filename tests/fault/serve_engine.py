#!/usr/bin/env python3
"""A whole minimax-serve whose engine fails (failing_engine.c): streams that run end with the error, requests that come wait, an engine that works again
goes on, and one that does not ends the server with its status; so does a server that ends while its engine fails, by SIGTERM at any time."""
import http.client
import json
import os
import signal
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../cli"))
from serve_client import TMP, Server, convert  # noqa: E402

FAILING = os.path.join(TMP, "failing")
PACKED = convert("tests/data/tiny-m2")
LONG = {"prompt": "In the", "max_tokens": 4000, "temperature": 0, "stream": True, "ignore_eos": True}


def start(*options):
    return Server(PACKED, *options, prefix=("env", "FAILING=" + FAILING), program="../tests/fault/failing_engine")


def fail():
    with open(FAILING, "w"):
        pass


class Stream(threading.Thread):
    """A reply that is read to its end, which is an error or [DONE]."""

    def __init__(self, s, body):
        super().__init__()
        self.s, self.body, self.data, self.status, self.began = s, body, b"", 0, threading.Event()
        self.start()

    def run(self):
        c = http.client.HTTPConnection("127.0.0.1", self.s.port, timeout=60)
        try:
            c.request("POST", "/v1/completions", json.dumps(self.body))
            r = c.getresponse()
            self.status = r.status
            while True:
                some = r.read1(4096)
                self.data += some
                self.began.set()
                if not some:
                    return
        except (http.client.HTTPException, OSError) as e:
            self.data += repr(e).encode()
        finally:
            self.began.set()
            c.close()

    def ended(self, timeout=30):
        self.join(timeout)
        assert not self.is_alive(), "a stream without an end"
        return self.data


def ends(s, status, within):
    """The server ends by itself, with the engine's error as its last line."""
    begun = time.monotonic()
    found = s.process.wait(30)
    log = open(s.log).read()
    assert found == status and time.monotonic() - begun < within, (found, time.monotonic() - begun, log[-2000:])
    last = log.strip().split("\n")[-1]
    assert ("E_CUDA" in last) == (status == 5), log[-2000:]


# Streams that run, and requests that wait, end with the error; the server says so and ends with its status.
s = start("--max-num-seqs", "2")
streams = [Stream(s, LONG) for _ in range(2)]
assert all(x.began.wait(30) for x in streams)
fail()
for x in streams:
    assert b"the engine failed" in x.ended() and b"[DONE]" not in x.data, x.data[-300:]
late = Stream(s, {**LONG, "stream": False, "max_tokens": 2})
ends(s, 5, 12)
assert late.ended() and late.status == 500 and b"the engine failed" in late.data, (late.status, late.data)
assert "the engine has failed, and runs no step any more" in open(s.log).read()

# One that works again: who came meanwhile is answered, and the end is a good one.
os.remove(FAILING)
with start() as s:
    first = Stream(s, LONG)
    assert first.began.wait(30)
    fail()
    assert b"the engine failed" in first.ended()
    waits = Stream(s, {**LONG, "stream": False, "max_tokens": 2})
    time.sleep(1.2)
    assert waits.is_alive() and s.request("GET", "/health")[0] == 200
    os.remove(FAILING)
    waits.ended()
    assert waits.status == 200, waits.data

# The last request of a drain, and a server that has none left: the status is that of the engine.
for signals, runs in ((1, True), (1, False), (2, True), (2, False)):
    s = start()
    stream = Stream(s, LONG)
    assert stream.began.wait(30)
    if runs:
        s.process.send_signal(signal.SIGTERM)
        s.wait_for("draining: 1 requests")
        fail()
    else:
        fail()
        stream.ended()
        s.process.send_signal(signal.SIGTERM)
    if signals > 1:
        stream.ended()
        try:
            s.process.send_signal(signal.SIGTERM)
        except ProcessLookupError:
            pass
    ends(s, 5, 12)
    assert b"the engine failed" in stream.ended(), stream.data[-300:]
    os.remove(FAILING)

# A checkpoint that was replaced after the load is not why the engine fails: its own error is said.
moved = os.path.join(TMP, "moved")
os.rename(PACKED, moved)
PACKED = convert("tests/data/tiny-m2")
s = Server(PACKED, prefix=("env", "FAILING=" + FAILING, "DAMAGED=1"), program="../tests/fault/failing_engine")
stream = Stream(s, LONG)
assert stream.began.wait(30)
os.rename(PACKED, PACKED + "-old")
os.rename(moved, PACKED)
fail()
assert b"the engine failed" in stream.ended(), stream.data[-300:]
ends(s, 6, 12)
last = open(s.log).read().strip().split("\n")[-1]
assert "E_DIGEST" in last and "fallen out" in last, last
print("failing engines: 7 servers, each with the engine's status or a good end")
