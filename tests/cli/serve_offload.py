#!/usr/bin/env python3
"""minimax-serve --kv-offload: a prompt whose pages left the device comes back from host memory, or from disk, with the reply that it had, also
where the file was damaged or cut; with groups of attention also in another group than the one that it left; a request that needs all pages
costs others none, and one that comes from disk neither; pages that others took or had no room for come all the same; the metrics count pages and bytes, of an idle server too; tenants do not share it; starts that cannot are refused. DEVICE=cuda DEVICES=0,1: the groups of attention alone, on GPUs."""
import concurrent.futures
import glob
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server, convert  # noqa: E402

PACKED = {m: convert(f"tests/data/{m}", *extra) for m, extra in (("tiny-m1", []), ("tiny-m2", ["--tp", "2"]))}
DEVICE = ["--device", os.environ["DEVICE"], "--batch-invariant"] if "DEVICE" in os.environ else []
RANKS = {"tiny-m1": 2, "tiny-m2": 2 if DEVICE else 4}
PAGE = {"tiny-m1": 128 << 10, "tiny-m2": 256 << 10}
GROUPS = {m: convert(f"tests/data/{m}", "--tp", str(tp), "--attn-tp", str(tp // 2)) for m, tp in RANKS.items()}


def devices(model):
    """Options for the ranks, which take turns on the GPUs of $DEVICES."""
    given = os.environ.get("DEVICES", "0").split(",")
    return [*DEVICE, "--devices", ",".join(given[r % len(given)] for r in range(RANKS[model]))] if DEVICE else []


def metrics(s):
    return {name.removeprefix("offload_"): value for name, value in s.metrics().items() if name.startswith("offload_")}


def complete(s, prompt, **fields):
    """(tokens that were cached, reply) of a prompt of ids."""
    said = s.post("/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 1, "seed": 3, "logprobs": 2, **fields})
    return said["usage"]["prompt_tokens_details"]["cached_tokens"], said["choices"][0]


def text(first, count):
    return [first] + [3 + (i * i + 5 * i) % 200 for i in range(count - 1)]


def evicted(model):
    """Prompts A, B, A, each of more than half of the pages."""
    with Server(PACKED[model], "--kv-cache-tokens", "192", "--max-model-len", "150", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "64M", "--drafts", "2") as s:
        assert ("--drafts: this model's lightning states" in open(s.log).read()) == (model == "tiny-m1")
        first = complete(s, text(5, 100))
        assert first[0] == 0 and complete(s, text(6, 100))[0] == 0
        again = complete(s, text(5, 100))
        assert again == (99, first[1]), (model, first, again)
        found = metrics(s)
        assert found["hits_total"] == 1 and found["in_bytes_total"] > 0, found
        assert found["out_bytes_total"] >= found["in_bytes_total"] and found["bytes"] <= found["bytes_max"] <= 64 << 20, found
        assert complete(s, text(6, 100))[0] == 99 and complete(s, text(5, 66), cache_salt="other")[0] == 0


def alone(model):
    """Prompts that begin alike, each of all pages: the page that a request writes next leaves, and what others have behind the common ones stays."""
    with Server(PACKED[model], "--kv-cache-tokens", "320", "--max-model-len", "300", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "64M", "--drafts", "0") as s:
        texts = [text(5, 70) + text(first, 220) for first in (6, 7)]
        first = [complete(s, t) for t in texts]
        for want, t in zip(first + first, texts + texts):
            assert complete(s, t) == (289, want[1]), (model, metrics(s))


def turns(packed, page, cache, count, *options):
    """More prompts in turn than the device and host memory have room for: what gives way for one that comes from disk, or from another server, goes to
    the disk, and is not lost."""
    with Server(packed, "--kv-cache-tokens", str(cache), "--max-model-len", "300", "--max-num-seqs", "2", "-t", "1", "--kv-offload", str(12 * page), "--drafts", "0",
                "--kv-offload-dir", TMP, "--kv-offload-disk", "64M", *options) as s:
        def everywhere():
            found = s.metrics()
            return found["pages_cached"] + (found["offload_bytes"] + found["offload_disk_bytes"]) / page

        for first in range(count):
            complete(s, text(5 + first, 290))
        time.sleep(1)
        before, had = everywhere(), []
        for first in range(2 * count):
            had.append(complete(s, text(5 + first % count, 290))[0])
            end = time.monotonic() + 10
            while everywhere() < before:
                assert time.monotonic() < end, (packed, first, before, everywhere(), had)
                time.sleep(0.02)
        # Fewer: the disk took more than 50 ms for a page while a prompt was computed.
        assert before >= 5 * count and min(had) == 289 or (before < 5 * count and not options), (packed, before, had)


def across(model):
    """While a reply runs in the group that a prompt was computed in, the other has the prompt's pages: from that group's device, then from host memory."""
    with Server(GROUPS[model], "--kv-cache-tokens", "1536", "--max-model-len", "700", "--max-num-seqs", "2", "-t", "1", "--kv-offload", "64M", "--act-quant", "off", *devices(model)) as s:
        first = complete(s, text(5, 100))
        assert first[0] == 0
        for gone in False, True:
            if gone:  # each group has room for 12 pages and one request
                with concurrent.futures.ThreadPoolExecutor(2) as pool:
                    list(pool.map(lambda i: complete(s, text(10 + i, 650)), range(2)))
            c = s.connect()
            c.request("POST", "/v1/completions", json.dumps({"prompt": text(8 + gone, 200), "max_tokens": 480, "stream": True, "ignore_eos": True}))
            c.getresponse().read1(100)
            before = s.metrics()
            again = complete(s, text(5, 100))
            after = s.metrics()
            busy = [after[f'group_tokens{{group="{g}"}}'] > 200 for g in range(2)]
            found = {k: after[k] - before[k] for k in ("offload_hits_total", "offload_in_bytes_total", "offload_out_bytes_total")}
            assert again == (99, first[1]), (model, gone, first, again)
            assert found["offload_hits_total"] == 1 and sum(busy) == 1, (found, busy)
            assert gone or found["offload_out_bytes_total"] == found["offload_in_bytes_total"] > 0, found
            c.close()
            while s.metrics()["requests_running"]:
                time.sleep(0.01)


def on_disk(packed, tokens):
    """Five prompts again and again, with room for two in memory: some come from disk, and are computed when the file was damaged, then cut."""
    with Server(packed, "--kv-cache-tokens", str(tokens), "--max-model-len", "150", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "1M",
                "--kv-offload-dir", TMP, "--kv-offload-disk", "20M") as s:
        assert not [f for f in os.listdir(TMP) if f.startswith("minimax-kv")]  # the file has no name
        file = [f for f in glob.glob(f"/proc/{s.process.pid}/fd/*") if "minimax-kv" in os.readlink(f)]
        assert len(file) == 1 and os.stat(file[0]).st_mode & 0o777 == 0o600, file
        first = [complete(s, text(i, 70)) for i in range(5)]
        assert [cached for cached, _ in first] == [0] * 5
        for damage in (None, flip, lambda f, size: f.truncate(1000)):
            with open(file[0], "r+b") as f:
                size = f.seek(0, os.SEEK_END)
                if damage:
                    damage(f, size)
            before = metrics(s)
            again = [complete(s, text(i, 70)) for i in range(5)]
            assert [reply for _, reply in again] == [reply for _, reply in first]
            found = metrics(s)
            change = {k: found[k] - before[k] for k in found}
            assert 0 < size <= found["disk_bytes_max"] <= 20 << 20 and found["disk_bytes"] <= found["disk_bytes_max"], found
            assert damage or (change["disk_read_bytes_total"] > 0 and change["disk_failed_total"] == 0), (change, again)
            assert not damage or change["disk_failed_total"] > 0, (change, again)
        assert "E_DIGEST" in open(s.log).read()


def taken(model):
    """Two prompts in two groups, each with pages for one of them: what comes back for a request and is taken by one that had the slot first comes again."""
    top = json.load(open(GROUPS[model] + "/config.json", encoding="utf-8"))["num_experts_per_tok"]
    prompts = [text(5, 174), text(6, 186)]
    with Server(GROUPS[model], "--kv-cache-tokens", "640", "--max-model-len", "300", "--max-num-seqs", "2", "--max-num-batched-tokens", "200", "-t", "1", "--kv-offload", "64M",
                "--drafts", "0", *devices(model)) as s, concurrent.futures.ThreadPoolExecutor(6) as pool:
        def rows():
            time.sleep(0.2)  # the server counts once a second while it runs, and when nothing does
            return max(sum(layer) for layer in json.loads(s.get("/expert_load"))["load"]) / top

        for p in prompts:
            complete(s, p)
        before = rows()
        for _ in range(4):
            for found in [pool.submit(complete, s, prompts[i % 2], n=n, max_tokens=m, ignore_eos=True) for i, (n, m) in enumerate(((5, 5), (5, 5), (2, 40), (1, 5), (1, 5)))]:
                found.result()
        assert rows() - before <= 4 * (60 + 80) + 20, (model, rows() - before)


def pushed(model):
    """A prompt in host memory that has no room next to a reply of lower priority: that gives way before the prompt comes back."""
    with Server(PACKED[model], "--kv-cache-tokens", "704", "--max-model-len", "700", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "64M", "--drafts", "0") as s:
        first = complete(s, text(5, 537))
        complete(s, text(6, 600))
        c = s.connect()
        c.request("POST", "/v1/completions", json.dumps({"prompt": text(8, 217), "max_tokens": 480, "stream": True, "ignore_eos": True}))
        c.getresponse().read1(100)
        assert complete(s, text(5, 537), priority=1) == (536, first[1]), (model, metrics(s))
        assert s.metrics()["requests_preempted_total"] == 1
        c.close()


def idle():
    """Pages that were on their way to host memory when the last request ended are free soon after, without another request."""
    with Server(PACKED["tiny-m2"], "--kv-cache-tokens", "1024", "--max-model-len", "300", "--max-num-seqs", "1", "-t", "1", "--kv-offload", "64M") as s:
        for i in range(12):
            complete(s, text(i, 150 + 9 * i), max_tokens=1 + i % 3)
            end = time.monotonic() + 5
            while (found := s.metrics())["kv_cache_usage"] > 0 or found["requests_running"]:
                assert time.monotonic() < end, found
                time.sleep(0.01)


def counted():
    """Copies to disk that end while nothing runs are counted within a second: the file, of which no block was used twice, is as long."""
    with Server(PACKED["tiny-m2"], "--kv-cache-tokens", "1024", "--max-model-len", "1024", "--max-num-seqs", "1", "--kv-offload", "2M",
                "--kv-offload-dir", TMP, "--kv-offload-disk", "200M") as s:
        file, = [f for f in glob.glob(f"/proc/{s.process.pid}/fd/*") if "minimax-kv" in os.readlink(f)]
        for i in range(8):
            complete(s, text(i, 900), max_tokens=1)
            end = time.monotonic() + 1
            while (found := metrics(s)["disk_written_bytes_total"]) != os.stat(file).st_size or not found and i == 7:
                assert time.monotonic() < end, (i, found, os.stat(file).st_size)
                time.sleep(0.05)


def flip(f, size):
    """Another bit in every block."""
    for at in range(1000, size, 65536):
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes([byte[0] ^ 1]))


for name in PACKED:
    across(name)
    taken(name)
    if not DEVICE:
        evicted(name)
        alone(name)
        pushed(name)
        turns(PACKED[name], PAGE[name], 320, 6)
        with Server(GROUPS[name], "--max-model-len", "300", "-t", "1", "--kv-offload", "64M", "--drafts", "0", "--kv-listen", "127.0.0.1:0") as there:
            turns(GROUPS[name], PAGE[name], 768, 8, "--prefill-from", "127.0.0.1:" + there.wait_for(r"computed for other servers at \S+:(\d+)"), "--prefill-min", "1")
if DEVICE:
    print("pages of groups of attention: from the other group's device, and from host memory")
    sys.exit()
on_disk(PACKED["tiny-m2"], 192)
on_disk(GROUPS["tiny-m2"], 384)
idle()
counted()
for options, code, word in ((["--kv-offload", "1K"], 2, "E_LIMITS: --kv-offload: found 1024 bytes"), (["--kv-offload", "5000000T"], 2, "those of one page, to "), (["--kv-offload", "1M", "--prefix-cache", "off"], 2, "E_USAGE"),
                            (["--kv-offload", "100T"], 8, "E_MEMORY: --kv-offload: found "),
                            (["--kv-offload", "1M", "--kv-offload-dir", TMP], 2, "E_USAGE"),
                            (["--kv-offload", "1M", "--kv-offload-dir", TMP, "--kv-offload-disk", "1K"], 2, "E_LIMITS: --kv-offload-disk: found 1024 bytes"),
                            (["--kv-offload", "1M", "--kv-offload-dir", TMP + "/none", "--kv-offload-disk", "1M"], 5, "E_IO"),
                            (["--kv-offload", "1M", "--kv-offload-dir", PACKED["tiny-m2"], "--kv-offload-disk", "1M"], 2, "E_OUTPUT")):
    done = subprocess.run([f"{BIN}/minimax-serve", PACKED["tiny-m2"], "--port", "0", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and word in done.stderr, done
# A file system that keeps the name of an open file that is removed: the line says so, and nothing is left.
refused = subprocess.run(["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=rmdir", "-e", "inject=rmdir:error=ENOTEMPTY:when=1", f"{BIN}/minimax-serve", PACKED["tiny-m2"],
                          "--port", "0", "--kv-offload", "1M", "--kv-offload-dir", TMP, "--kv-offload-disk", "8M"], capture_output=True, text=True, timeout=60)
assert refused.returncode == 5 and "keeps the name of an open file that is removed" in refused.stderr, refused
assert not [n for n in os.listdir(TMP) if n.startswith("minimax-kv-")], os.listdir(TMP)
