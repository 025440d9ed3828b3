#!/usr/bin/env python3
"""The way of one who automates: listings, errors and progress that programs read, options that mean the same everywhere, pipes that end."""
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

BIN, TMP, DATA = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"], "tests/data"
SOURCE = f"{DATA}/tiny-m2"
PROGRAMS = ["minimax-" + p for p in ("archive", "bench", "convert", "eval", "hold", "inspect", "run", "serve", "verify", "worker")]


def run(program, *args, status=0, **how):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    done = subprocess.run([f"{BIN}/{program}", *map(str, args)], text=True, timeout=120, **how)
    assert done.returncode == status, (program, args, done.returncode, done.stdout, done.stderr)
    return done


def load(program, *args, **how):
    return json.loads(run(program, *args, "--json", **how).stdout)


def size(path):
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def header(path):
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        return json.loads(f.read(n)), 8 + n


def inspect():
    """One file, a source, its index alone, a packed checkpoint and one rank of it."""
    file = f"{SOURCE}/model-00001-of-00002.safetensors"
    tensors, start = header(file)
    tensors.pop("__metadata__", None)
    one = load("minimax-inspect", file)
    assert one["kind"] == "file" and one["size"] == os.path.getsize(file)
    assert {t["name"]: (t["type"], t["shape"], t["offset"] - start) for t in one["tensors"]} == \
        {k: (v["dtype"], v["shape"], v["data_offsets"][0]) for k, v in tensors.items()}
    assert f"{file}: safetensors, {len(tensors)} tensors" in run("minimax-inspect", file).stdout
    assert "3 differ" not in run("minimax-inspect", file, "--diff", file).stdout

    source = load("minimax-inspect", SOURCE)
    with open(file, "rb") as f:
        digest = hashlib.sha256(f.read(start)).hexdigest()
    assert source["files"][0] == {"file": os.path.basename(file), "size": os.path.getsize(file), "header_sha256": digest}
    summary = load("minimax-inspect", SOURCE, "--summary")
    assert "tensors" not in summary and summary == {k: v for k, v in source.items() if k != "tensors"}
    light = shutil.copytree(SOURCE, f"{TMP}/light")
    os.remove(f"{light}/model-00002-of-00002.safetensors")
    assert "--names-only" in run("minimax-inspect", light, status=3).stderr
    index = json.load(open(f"{SOURCE}/model.safetensors.index.json"))["weight_map"]
    assert {t["name"]: t["file"] for t in load("minimax-inspect", light, "--names-only")["tensors"]} == index

    run("minimax-convert", SOURCE, "-o", f"{TMP}/packed", "--tp", 2, "--pp", 2, "--quant", "nvfp4a16", "-q")
    packed, manifest = load("minimax-inspect", f"{TMP}/packed"), json.load(open(f"{TMP}/packed/manifest.json"))
    assert (packed["tp"], packed["pp"], packed["quant"], len(packed["ranks"])) == (2, 2, "nvfp4a16", 4)
    for rank in packed["ranks"]:
        for part in rank["parts"]:
            data = open(f"{TMP}/packed/{part['file']}", "rb").read()
            blocks = [hashlib.sha256(data[i:i + (4 << 20)]).digest() for i in range(0, len(data), 4 << 20)]
            assert part["size"] == len(data) and part["sha256_tree"] == hashlib.sha256(b"".join(blocks)).hexdigest()
    for f in packed["companions"]:
        assert f["sha256"] == hashlib.sha256(open(f"{TMP}/packed/{f['file']}", "rb").read()).hexdigest()
    for rank in range(4):
        shard = shutil.copytree(f"{TMP}/packed", f"{TMP}/rank{rank}", ignore=lambda d, names: [
            n for n in names if n.startswith("model-rank-") and not n.startswith(f"model-rank-{rank:05d}-")])
        own = load("minimax-inspect", shard, "--rank", rank)
        assert [r["rank"] for r in own["ranks"]] == [rank]
        stored = {}
        for part in own["ranks"][0]["parts"]:
            stored |= header(f"{shard}/{part['file']}")[0]
        stored.pop("__metadata__")
        listed = {t["name"] + p["suffix"]: (p["dtype"], p["shape"]) for t in own["tensors"] for p in t["planes"]}
        assert listed == {k: (v["dtype"], v["shape"]) for k, v in stored.items()}
        assert len(own["tensors"]) == own["tensor_count"] < packed["tensor_count"] == len(manifest["tensors"])
    run("minimax-inspect", f"{TMP}/packed", "--rank", 4, status=2)
    run("minimax-inspect", SOURCE, "--rank", 0, status=2)


def errors():
    """With --json the error line is an object, for every program and kind of error."""
    for program in PROGRAMS:
        line = run(program, "--json", "--no-such-option", status=2).stderr
        assert line.count("\n") == 1
        error = json.loads(line)
        assert error["program"] == program and error["error"] == "E_USAGE" and error["status"] == 2 and "see " + program in error["message"]
    for args, code, status in (((f"{TMP}/none",), "E_FS_MISSING", 3), ((f"{TMP}/packed", "--rank", 99), "E_RANKS", 2)):
        done = run("minimax-inspect", *args, "--json", status=status)
        assert done.stdout == "" and json.loads(done.stderr)["error"] == code


def results():
    """With --json every program's result is JSON on stdout, as its lines on stderr say it without."""
    table = json.loads(run("minimax-convert", "--quant", "help", "--json").stdout)
    rows = re.findall(r"^(\w+) +([\d.]+|-) +([\d.]+|-)  \S", run("minimax-convert", "--quant", "help").stdout, re.M)
    said = [(s["name"], f"{s['bits']:.2f}" if "bits" in s else "-", f"{s['sqnr_db']:.1f}" if "sqnr_db" in s else "-") for s in table["schemes"]]
    assert said == rows and len(table["presets"]) == 7 and "int4" in next(s for s in table["schemes"] if s["name"] == "w4a16")["synonyms"]
    manifest = json.load(open(f"{TMP}/packed/manifest.json"))
    parts = [p for r in manifest["ranks"] for p in r["parts"]]
    proven = load("minimax-verify", f"{TMP}/packed")
    assert proven["kind"] == "packed" and proven["level"] == "full" and proven["ranks"] == 4 and proven["signed"] is False
    assert proven["bytes"] == sum(p["size"] for p in parts) and proven["blocks"] == proven["hashed_blocks"] == sum(-(-p["size"] // (4 << 20)) for p in parts)
    assert load("minimax-verify", f"{TMP}/packed", "--level", "header")["hashed_blocks"] == 0
    assert load("minimax-verify", f"{TMP}/packed", "--level", "sample", "--seed", 7)["seed"] == 7
    run("minimax-convert", SOURCE, "-o", f"{TMP}/hf", "--layout", "hf", "-q")
    assert load("minimax-verify", f"{TMP}/hf")["kind"] == "unsharded"
    packed = load("minimax-archive", "pack", f"{TMP}/packed", "-o", f"{TMP}/archive")
    listed = load("minimax-archive", "list", f"{TMP}/archive")["parts"]
    assert packed["bytes"] == sum(p["bytes"] for p in listed) == proven["bytes"] and packed["packed"] == sum(p["packed"] for p in listed)
    assert load("minimax-archive", "unpack", f"{TMP}/archive", "-o", f"{TMP}/unpacked")["bytes"] == proven["bytes"]
    same = load("minimax-inspect", f"{TMP}/packed", "--diff", f"{TMP}/unpacked", "--data")
    assert same == {"same": True, "tensor_count": len(manifest["tensors"]), "data": True, "differences": []}, same
    run("minimax-convert", SOURCE, "-o", f"{TMP}/other", "--tp", 2, "--pp", 2, "-q")
    json.dump([1, 2, 3], open(f"{TMP}/ids.json", "w", encoding="utf-8"))
    done = run("minimax-inspect", f"{TMP}/packed", "--diff", f"{TMP}/other", "--json", status=6)
    found = json.loads(done.stdout)["differences"]
    lines = run("minimax-inspect", f"{TMP}/packed", "--diff", f"{TMP}/other", status=6).stdout.splitlines()
    assert [f"~ {d['name']}: {d['first']['type']} {d['first']['shape']}, {d['second']['type']} {d['second']['shape']}" for d in found] == lines and found
    assert json.loads(done.stderr)["error"] == "E_DIFFER" and {d["what"] for d in found} == {"form"}
    gone = {d["name"]: d["what"] for d in json.loads(run("minimax-inspect", SOURCE, "--diff", f"{TMP}/packed", "--json", status=6).stdout)["differences"]}
    assert gone["model.layers.0.self_attn.q_proj.weight"] == "removed" and gone["model.layers.0.self_attn.qkv_proj.weight"] == "added"
    ready = load("minimax-serve", f"{TMP}/packed", "--check")
    assert ready["positions"] == json.load(open(f"{SOURCE}/config.json"))["max_position_embeddings"]
    assert load("minimax-convert", SOURCE, "-o", f"{TMP}/shares", "--part", "0/2", "-q")["part"] == "0/2"
    answer = load("minimax-run", f"{TMP}/packed", "-p", "x", "-n", 2, "-q")
    assert answer["tokens"] == 2 and answer["end"] == "max_tokens"


def idle():
    """An option that would do nothing is refused, not taken in silence."""
    packed = f"{TMP}/packed"
    for program, *args in (("minimax-inspect", SOURCE, "--data"), ("minimax-inspect", packed, "--names-only"), ("minimax-inspect", packed, "--diff", SOURCE, "--summary"),
                           ("minimax-inspect", packed, "--diff", packed, "--match", "x"), ("minimax-convert", SOURCE, "--dry-run", "--gpu-memory", 0),
                           ("minimax-convert", SOURCE, "--dry-run", "--part-size", "0"), ("minimax-convert", SOURCE, "--dry-run", "--mem-limit", "0G"),
                           ("minimax-convert", SOURCE, "--dry-run", "--journal-every", "0"), ("minimax-convert", SOURCE, "-o", f"{TMP}/x", "--resume", "--restart"),
                           ("minimax-convert", SOURCE, "--dry-run", "--recipe", f"{TMP}/recipe.json", "--quant", "int8"), ("minimax-verify", packed, "--report", f"{TMP}/r.html"),
                           ("minimax-verify", packed, "--list"), ("minimax-verify", packed, "--samples", 2), ("minimax-verify", packed, "--seed", 1, "--level", "full"),
                           ("minimax-archive", "list", f"{TMP}/archive", "-o", f"{TMP}/x"), ("minimax-archive", "list", f"{TMP}/archive", "--level", 3),
                           ("minimax-archive", "unpack", f"{TMP}/archive", "-o", f"{TMP}/x", "--level", 1), ("minimax-convert", SOURCE, "--dry-run", "--part", "0/2"),
                           ("minimax-convert", SOURCE, "--dry-run", "--events", f"{TMP}/e"), ("minimax-convert", SOURCE, "--dry-run", "--mem-limit", "1G"),
                           ("minimax-convert", SOURCE, "-o", f"{TMP}/x", "--list", "-q")):
        assert "E_USAGE" in run(program, *args, status=2).stderr, (program, args)
    assert "--part-size: found \"0\", expected bytes, at least 1" in run("minimax-convert", SOURCE, "--dry-run", "--part-size", "0", status=2).stderr


def words():
    """-q, --json, -j and -t are the same options wherever they are; the help has every option under a heading or none."""
    meaning = {}
    for program in PROGRAMS:
        text = run(program, "--help").stdout
        for letter, name in re.findall(r"^  -(\w), --([a-z-]+)", text, re.M):
            assert meaning.setdefault(letter, name) == name, (program, letter, name, meaning[letter])
        names = re.findall(r"^  (?:-\w, |    )--([a-z-]+)", text, re.M)
        manual = run(program, "--help-man").stdout
        assert ("MINIMAX_JOBS" in text) == ("jobs" in names) == ("MINIMAX_JOBS" in manual), program
        assert (".SH ENVIRONMENT\n" in manual) == ("\nenvironment:\n" in text), program
        assert {"json", "quiet", "help", "version"} <= set(names), (program, names)
        for name, letter in (("quiet", "q"), ("jobs", "j"), ("threads", "t"), ("output", "o")):
            assert name not in names or f"-{letter}, --{name}" in text, (program, name)
    assert meaning["q"] == "quiet" and meaning["j"] == "jobs" and meaning["t"] == "threads"
    done = run("minimax-convert", SOURCE, "--dry-run", status=2, env={**os.environ, "MINIMAX_JOBS": "many"})
    assert "MINIMAX_JOBS" in done.stderr
    run("minimax-convert", SOURCE, "-o", f"{TMP}/one", "-q", env={**os.environ, "MINIMAX_JOBS": "1", "NO_COLOR": "1"})


def pipes():
    """A reader that goes away ends a program without a word, as it does others; what cannot be written at all is an error."""
    packed, text = f"{TMP}/packed", ("-p", "In", "-n", 1)
    for program, *args in (("minimax-inspect", SOURCE), ("minimax-inspect", SOURCE, "--json"), ("minimax-inspect", packed, "--rank", 0),
                           ("minimax-inspect", packed, "--diff", f"{TMP}/other"), ("minimax-inspect", packed, "--diff", f"{TMP}/other", "--json"),
                           ("minimax-convert", SOURCE, "--dry-run", "--list", "-q"), ("minimax-convert", "--help"), ("minimax-convert", "--quant", "help"),
                           ("minimax-verify", packed, "--json", "-q"), ("minimax-verify", packed, "--source", SOURCE, "--list", "--min-sqnr", 90, "-q"),
                           ("minimax-archive", "list", f"{TMP}/archive"), ("minimax-run", packed, *text, "-q"), ("minimax-run", packed, *text, "--json", "-q"),
                           ("minimax-eval", packed, "--ids", f"{TMP}/ids.json", "--window", 2, "-q"), ("minimax-serve", packed, "--check"),
                           ("minimax-serve", packed, "--check", "--json"), ("minimax-bench", "--help"), ("minimax-hold", "--version")):
        reader, writer = os.pipe()
        os.close(reader)
        done = run(program, *args, stdout=writer, status=-signal.SIGPIPE)
        os.close(writer)
        assert done.stderr == "", (program, args, done.stderr)
        with open("/dev/full", "w", encoding="utf-8") as full:
            assert "No space left" in run(program, *args, stdout=full, status=5).stderr, (program, args)
    with open("/dev/full", "w", encoding="utf-8") as full:  # a log that takes no more ends no conversion
        subprocess.run([f"{BIN}/minimax-convert", SOURCE, "-o", f"{TMP}/unlogged"], stderr=full, check=True)


def events():
    """A run's events, one object a line; what a resumed run kept."""
    def lines():
        return [json.loads(line) for line in open(f"{TMP}/events")]
    args = (SOURCE, "-o", f"{TMP}/watched", "--tp", 2, "--quant", "int8", "--events", f"{TMP}/events")
    summary = load("minimax-convert", *args, "-q")
    begin, *_, done = lines()
    assert (begin["event"], done["event"], begin["source_bytes"]) == ("begin", "done", summary["source_bytes"])
    assert done["manifest_sha256"] == summary["manifest_sha256"] and begin["time"] <= done["time"] and done["kept_bytes"] == summary["kept_bytes"] == 0
    again = run("minimax-convert", *args, "--resume").stderr
    assert re.search(r"^kept of the run before: .*\(100\.0 %\)$", again, re.M), again
    run("minimax-convert", *args, "-q", status=2)  # exists: an error, and an event of it
    failed = lines()[-1]
    assert (failed["event"], failed["error"], failed["status"]) == ("failed", "E_OUTPUT", 2)
    assert [e["event"] for e in lines() if e["event"] != "progress"] == ["begin", "done", "begin", "done", "begin", "failed"]
    assert load("minimax-convert", SOURCE, "-o", f"{TMP}/shared", "--part", "1/2", "-q", "--events", f"{TMP}/events")["part"] == "1/2"
    assert [e["event"] for e in lines()][-2:] == ["begin", "share_done"]
    # Into a pipe; a run that is stopped for a second says how far it is.
    os.mkfifo(f"{TMP}/pipe")
    for attempt in range(20):
        child = subprocess.Popen([f"{BIN}/minimax-convert", SOURCE, "-o", f"{TMP}/piped", "--quant", "nvfp4", "-j", "1", "-q", "--force", "--events", f"{TMP}/pipe"])
        with open(f"{TMP}/pipe", encoding="utf-8") as pipe:
            begin = json.loads(pipe.readline())
            child.send_signal(signal.SIGSTOP)
            time.sleep(1.1)
            child.send_signal(signal.SIGCONT)
            middle = [json.loads(line) for line in pipe]
        assert child.wait() == 0 and middle[-1]["event"] == "done"
        if len(middle) > 1:
            break
    progress = middle[0]
    assert progress.keys() == {"event", "time", "seconds", "source_bytes", "done_bytes", "kept_bytes", "rss_bytes"} and progress["event"] == "progress"
    assert progress["seconds"] > 1 and progress["source_bytes"] == begin["source_bytes"] >= progress["done_bytes"] >= progress["kept_bytes"] == 0
    # Interrupted when the journal has grown, by a record behind its header, then continued: what it held is kept, and said.
    out = f"{TMP}/stopped"
    slow = ("-j", 1, "--journal-every", 1, "--mem-limit", "200M", "-q")
    for attempt in range(50):
        child = subprocess.Popen([f"{BIN}/minimax-convert", SOURCE, "-o", out, "--quant", "nvfp4", *map(str, slow), "--events", f"{TMP}/events"], stderr=subprocess.DEVNULL)
        journal = f"{TMP}/.stopped.partial.journal"
        first = 0
        while child.poll() is None and (not first or size(journal) <= first):
            first = first or size(journal)
        child.send_signal(signal.SIGTERM)
        if child.wait() == 75:
            break
        shutil.rmtree(out)
    else:
        raise AssertionError("no run was interrupted")
    assert (lines()[-1]["event"], lines()[-1]["error"], lines()[-1]["status"]) == ("failed", "E_INTERRUPTED", 75)
    assert "kept of the run before: 0.00 of 0.01 GB (0.0 %)" in run("minimax-convert", SOURCE, "-o", f"{TMP}/fresh", "--resume").stderr
    kept = load("minimax-convert", SOURCE, "-o", out, "--quant", "nvfp4", "-q", "--resume")
    assert 0 < kept["kept_bytes"] <= kept["source_bytes"], kept
    run("minimax-convert", SOURCE, "-o", f"{TMP}/full", "--events", "/dev/full", "-q")  # the conversion is done all the same
    assert "events are missing" in run("minimax-convert", SOURCE, "-o", f"{TMP}/full", "--force", "--events", "/dev/full", "-q").stderr
    run("minimax-convert", SOURCE, "-o", f"{TMP}/none", "--events", f"{TMP}/no/such", "-q", status=5)


if __name__ == "__main__":
    for step in (inspect, errors, results, idle, words, pipes, events):
        step()
    print("listings, errors, options, pipes, events: as a script meets them")
