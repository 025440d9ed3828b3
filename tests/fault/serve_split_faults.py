#!/usr/bin/env python3
"""serve_split_faults.py [SECONDS] [SEED] [KIND]: prefill and decode in three servers of one checkpoint, with little of everything.

One computes prompts for two others, all three answer clients, and all have host memory and a file for pages. Meanwhile the one of prompts is stopped
and goes on, it and one of the others are killed or told to end, and begun again, clients go away, and the files are damaged and cut. Every reply is
that of a server that runs one request at a time and keeps nothing; at the end nothing is left behind, and all end well. SECONDS are for each KIND:
m2, m1, m3 (random weights), drafts (a packed draft), m2-groups and m1-groups (groups of attention)."""
import collections
import glob
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

os.environ.setdefault("BUILD", "build")
os.environ.setdefault("TMPDIR", "/tmp")
sys.path.insert(0, "tests/cli")
from serve_client import BIN, TMP, Server, convert  # noqa: E402

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 20
SEED = int(sys.argv[2]) if len(sys.argv) > 2 else 7
MODELS = {"m2": ("tiny-m2", ["--tp", "2"]), "m1": ("tiny-m1", []), "m3": ("tiny-m3-random", None), "drafts": ("tiny-m2", ["--draft", "tests/data/tiny-m2-dflash"]),
          "m2-groups": ("tiny-m2", ["--tp", "4", "--attn-tp", "2"]), "m1-groups": ("tiny-m1", ["--tp", "2", "--attn-tp", "1"])}
KINDS = sys.argv[3:] or list(MODELS)
CLIENTS, BODIES, LENGTH = 7, 60, 420


def body(kind, i):
    """Prompts of six families, which part after 70 to 200 ids."""
    r = random.Random(f"{SEED} {kind} {i}")
    family, cut = r.randrange(6), r.choice([70, 140, 200])
    b = {"prompt": [3 + (t * t + 5 * t + (family if t < cut else 100 + i) * 7) % 200 for t in range(r.randrange(5, 380))], "max_tokens": r.choice([1, 3, 9, 25]),
         "temperature": r.choice([0, 1]), "seed": i, "n": r.choice([1, 1, 2]), "logprobs": 2, "priority": r.choice([0, 0, 1, -1]), "ignore_eos": r.random() < 0.5}
    for share, more in ((0.2, {"guided_regex": "[a-c]{1,4}x"}), (0.2, {"repetition_penalty": 1.2}), (0.1, {"cache_salt": "s"}), (0.1, {"echo": True})):
        if r.random() < share:
            b |= more
    return b


def link_of(descriptor):
    """What a descriptor of another process is; nothing where it has been closed since it was listed."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


class Place:
    """A server that may be killed and begun again. begun: how often; odd while it is not there."""

    def __init__(self, packed, *options):
        self.packed, self.options, self.begun, self.server = packed, list(options), 0, None
        self.begin()

    def begin(self):
        self.server = Server(self.packed, *self.options)
        if "--kv-listen" in self.options:
            self.options[self.options.index("--kv-listen") + 1] = "127.0.0.1:" + self.server.wait_for(r"computed for other servers at \S+:(\d+)")

    def again(self, kind):
        self.begun += 1
        self.server.process.send_signal(kind)
        assert self.server.process.wait(60) in (0, -kind), open(self.server.log).read()[-3000:]
        self.begin()
        self.begun += 1

    def damage(self, rng):
        file, = [f for f in glob.glob(f"/proc/{self.server.process.pid}/fd/*") if "minimax-kv" in link_of(f)]
        with open(file, "r+b") as f:
            size = f.seek(0, os.SEEK_END)
            for _ in range(5 if size else 0):
                f.seek(rng.randrange(size))
                f.write(os.urandom(rng.choice([1, 5000])))
            if rng.random() < 0.3:
                f.truncate(rng.randrange(size + 1))


class Round:
    def __init__(self, kind):
        self.kind, self.rng, self.figures, self.wrong = kind, random.Random(f"{SEED} {kind}"), collections.Counter(), []
        model, options = MODELS[kind]
        self.packed, more = f"tests/data/{model}", ["--load-format", "dummy", "--dummy-quant", "bf16"] if options is None else []
        if options is not None:
            self.packed = convert(self.packed, *options) if kind != "drafts" else self.drafted(model, options)
        self.common = ["-t", "1", "--max-model-len", str(LENGTH), "--act-quant", "off", *more]

    @staticmethod
    def drafted(model, options):
        packed = f"{TMP}/{model}-drafted"
        if not os.path.exists(packed):
            subprocess.run([f"{BIN}/minimax-convert", f"tests/data/{model}", "-o", packed, "--quant", "none", "-q", *options], check=True)
        return packed

    def options(self):
        """Of a server that has too little."""
        r, groups = self.rng, 2 if "groups" in self.kind else 1
        return [*self.common, "--drafts", "0" if "m1" in self.kind else r.choice(["3", "7"] if self.kind == "drafts" else ["0", "3", "7"]), "--max-num-seqs", r.choice(["2", "3", "5"]), "--max-num-batched-tokens", r.choice(["17", "64", "200"]),
                "--kv-cache-tokens", str(groups * r.choice([448, 640, 1500])), "--kv-offload", r.choice(["2M", "3M", "16M"]), "--kv-offload-dir", TMP, "--kv-offload-disk", "40M",
                "--prefix-cache-memory", r.choice(["2M", "64M"]), "--prefill-timeout", "2"]

    def ask(self, place, i, r):
        """Judges one reply; a server that is not there now, or has no room, has none."""
        begun = place.begun
        try:
            c = http.client.HTTPConnection("127.0.0.1", place.server.port, timeout=120)
            c.request("POST", "/v1/completions", json.dumps(self.bodies[i]))
            if r.random() < 0.1:
                time.sleep(r.random() * 0.2)
                c.close()
                self.figures["left"] += 1
                return
            reply = c.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as e:
            time.sleep(0.5)  # it may have been killed just now
            if place.begun == begun and begun % 2 == 0:
                self.wrong.append((i, repr(e)))
            self.figures["lost"] += 1
            return
        if reply.status in (429, 503):
            self.figures["refused"] += 1
            time.sleep(0.05)
        elif reply.status != 200 or json.loads(data)["choices"] != self.want[i]:
            self.wrong.append((i, self.bodies[i], data, self.want[i]))
        else:
            self.figures["answered"] += 1

    def client(self, number, end):
        r = random.Random(f"{SEED} {self.kind} client {number}")
        while time.monotonic() < end and not self.wrong:
            self.ask(r.choice([*self.decode, *self.decode, self.prefill]), r.randrange(BODIES), r)

    def harm(self, end):
        r = self.rng
        while time.monotonic() < end and not self.wrong:
            time.sleep(r.random() * 1.2)
            act = r.choice(["stopped", "begun again", "damaged", "damaged"])
            self.figures[act] += 1
            if act == "stopped":
                self.prefill.server.process.send_signal(signal.SIGSTOP)
                time.sleep(r.choice([0.05, 0.5, 3]))
                self.prefill.server.process.send_signal(signal.SIGCONT)
            elif act == "begun again":
                r.choice([self.prefill, self.decode[1]]).again(r.choice([signal.SIGKILL, signal.SIGTERM]))
            else:
                r.choice([self.prefill, *self.decode]).damage(r)

    def settled(self, places):
        end = time.monotonic() + 60
        while True:
            v = [p.server.metrics() for p in places]
            if all(m["pages_free"] + m["pages_cached"] == m["pages"] and not any(m[k] for k in ("requests_running", "requests_waiting", "prefill_sending", "prefill_fetching")) for m in v):
                break
            assert time.monotonic() < end, v
            time.sleep(0.1)
        for name, key in (("came back", "offload_hits_total"), ("blocks failed", "offload_disk_failed_total"), ("computed elsewhere", "prefill_fetched_total"), ("not", "prefill_fallbacks_total")):
            self.figures[name] += int(sum(m[key] for m in v))

    def serve(self, places):
        """Appends the servers that begin to the places."""
        places.append(Place(self.packed, *self.options(), "--kv-listen", "127.0.0.1:0"))
        least = self.rng.choice(["1", "32", "100"])
        for _ in range(2):
            places.append(Place(self.packed, *self.options(), "--prefill-from", places[0].options[-1], "--prefill-min", least))
        self.prefill, self.decode = places[0], places[1:]
        end = time.monotonic() + SECONDS
        threads = [threading.Thread(target=self.client, args=(i, end)) for i in range(CLIENTS)]
        for t in threads:
            t.start()
        self.harm(end)
        for t in threads:
            t.join()
        self.settled(places)

    def run(self):
        self.bodies = [body(self.kind, i) for i in range(BODIES)]
        with Server(self.packed, *self.common, "--max-num-seqs", "1", "--drafts", "0", "--prefix-cache", "off") as calm:
            self.want = [calm.post("/v1/completions", b)["choices"] for b in self.bodies]
        places = []
        try:
            self.serve(places)
        finally:
            for p in places:
                p.server.process.send_signal(signal.SIGTERM)
        for p in places:
            status = p.server.process.wait(60)
            assert status == 0, (status, open(p.server.log).read()[-3000:])
        print(f"{self.kind}: {', '.join(f'{v} {k}' for k, v in self.figures.items())}; {len(self.wrong)} other than alone (seed {SEED})", flush=True)
        for w in self.wrong[:3]:
            print(str(w)[:3000], flush=True)
        return len(self.wrong)


sys.exit(sum(Round(k).run() for k in KINDS) > 0)
