#!/usr/bin/env python3
"""Programs under small limits of the process (prlimit): a small stack is enough for each of them, threads included; a limit that is not is one line that
names it, with the documented status."""
import os
import re
import resource
import signal
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server  # noqa: E402

M2 = "tests/data/tiny-m2"
DIR, HF, ARCHIVE = (os.path.join(TMP, name) for name in ("m2-small", "m2-hf", "m2-archive"))
STACKS = 40 << 10, 64 << 10, 128 << 10


def under(limit, program, *args, status=0, stdin=""):
    p = subprocess.run(["prlimit", *limit, f"{BIN}/minimax-{program}", *args], capture_output=True, text=True, timeout=120, input=stdin)
    assert p.returncode == status, (limit, program, args, p.returncode, p.stdout[-500:], p.stderr[-2000:])
    return p


for stack in STACKS:
    limit = [f"--stack={stack}:{stack}"]
    under(limit, "convert", M2, "-o", DIR, "--tp", "2", "--quant", "block_fp8", "-q", "--force", "--events", os.path.join(TMP, "events"))
    under(limit, "convert", M2, "-o", HF, "--layout", "hf", "--quant", "block_fp8", "-q", "--force")
    under(limit, "verify", DIR, "--source", M2)
    under(limit, "verify", HF, "--source", M2)
    under(limit, "inspect", DIR)
    under(limit, "inspect", M2, "--diff", DIR, status=6)
    under(limit, "archive", "pack", DIR, "-o", ARCHIVE + str(stack))
    under(limit, "run", DIR, "-p", "In the beginning", "--max-tokens", "5")
    under(limit, "run", DIR, "--chat", "--chat-format", "minimax-m2", "--max-tokens", "5", stdin="Hi\n")
    under(limit, "eval", DIR, "--text", "tests/data/held-out.txt", "--window", "64", "--limit", "2")
    under(limit, "serve", DIR, "--check")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with Server(DIR, "--chat-format", "minimax-m2", prefix=("prlimit", *limit)) as s:
            s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "response_format": {"type": "json_object"}})
            s.process.send_signal(number)
            assert s.process.wait(30) == 0
    for p in ("hold", "worker", "bench"):
        under(limit, p, "--help")
print("small stacks: each program, and servers that signals end")
