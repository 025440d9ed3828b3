"""minimax-serve under load: python3 serve_load.py SECONDS [STREAMS] [SLOW]. Streams for so long without an error, memory and descriptors flat;
then how long a good client waits while slow connections are open, beside how long it waits without them (SLOW 0: not asked)."""
import http.client
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "cli"))
from serve_client import Server, convert  # noqa: E402

SECONDS, STREAMS, SLOW = float(sys.argv[1]), *(int(x) for x in (sys.argv[2:] + ["64", "1000"][len(sys.argv) - 2 :])[:2])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def stream(s, end, counts, i):
    """Streams one after the other; every fourth leaves in the middle."""
    n = 0
    while time.monotonic() < end:
        c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=120)
        c.request("POST", "/v1/completions", json.dumps({"prompt": f"And God said {i} {n % 7}", "max_tokens": 40, "stream": True, "ignore_eos": True,
                                                         "seed": n}))
        r = c.getresponse()
        n += 1
        if n % 4 == 0:
            r.read(200)
            c.close()
            continue
        data = r.read()
        c.close()
        good = r.status == 200 and data.endswith(b"data: [DONE]\n\n") and data.count(b'"finish_reason":"length"') == 1
        counts["good" if good else "bad"] += 1


def memory(s):
    status = open(f"/proc/{s.process.pid}/status").read()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024, len(os.listdir(f"/proc/{s.process.pid}/fd"))


def waits(s, seconds):
    """Sorted seconds of small requests, one at a time."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        assert s.post("/v1/completions", {"prompt": "And", "max_tokens": 2, "temperature": 0})["choices"]
        took.append(time.monotonic() - start)
    return sorted(took)


def beside_slow(s):
    """By turns, since other work comes and goes: the middle of the turns' p99."""
    p99 = (lambda took: 1000 * took[int(0.99 * len(took))])
    idle, busy = [], []
    for _ in range(7):
        idle.append(p99(waits(s, 2)))
        slow = [socket.create_connection(("127.0.0.1", s.port)) for _ in range(SLOW)]
        for c in slow[::2]:
            c.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.5)
        busy.append(p99(waits(s, 2)))
        for c in slow:
            c.close()
        time.sleep(0.5)
    alone, beside = statistics.median(idle), statistics.median(busy)
    print(f"a good client's p99: {alone:.1f} ms alone, {beside:.1f} ms beside {SLOW} slow connections, in the middle of {len(idle)} turns of each "
          f"({min(idle):.1f} to {max(idle):.1f}, {min(busy):.1f} to {max(busy):.1f})")
    assert beside <= 2 * alone + 5


with Server(convert("tests/data/tiny-m2"), "--max-num-seqs", "64", "--max-model-len", "1024", "--max-connections", "8192",
            "--kv-cache-tokens", "16384") as server:  # so few that all were used, and their memory touched, long before half of the time
    counts = {"good": 0, "bad": 0}
    end = time.monotonic() + SECONDS
    threads = [threading.Thread(target=stream, args=(server, end, counts, i)) for i in range(STREAMS)]
    for t in threads:
        t.start()
    time.sleep(SECONDS / 2)
    early = memory(server)
    for t in threads:
        t.join()
    for _ in range(300):  # until those that left are closed too
        late = memory(server)
        if late[1] < 40:
            break
        time.sleep(0.1)
    print(f"{STREAMS} streams for {SECONDS:g} s: {counts['good']} replies, {counts['bad']} wrong; memory {early[0]:.1f} MiB half way, {late[0]:.1f} at the end; "
          f"{late[1]} descriptors")
    assert counts["bad"] == 0 and counts["good"] > 0
    assert late[0] <= early[0] * 1.02 + (1 if SECONDS >= 120 else 100) and late[1] < 40, (early, late)
    if SLOW:
        beside_slow(server)
