#!/usr/bin/env python3
"""follow.py CONVERT [RUNS [SEED]]: minimax-convert --follow --delete-source while a checkpoint is being downloaded.

Each run puts the files of a checkpoint into a directory in a random order, at random times and in the ways of downloaders (a temporary name
next to the file or in the Hub client's folder, then a rename; or growing in place), kills the converter at random moments, and goes on with
--resume. The output must be byte for byte that of a plain conversion, no weight file may be left, and what has the final name is complete
whenever it is looked at. Then single cases: a download that stops, a damaged output whose source is gone, --restart, headers that differ from
the plan. Exit status 1 unless all hold."""
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, "tests/cli")
from convert_files import INDEX, Checkpoint  # noqa: E402
from resumed import same, split  # noqa: E402

convert = sys.argv[1]
runs = int(sys.argv[2]) if len(sys.argv) > 2 else 3
seed = int(sys.argv[3]) if len(sys.argv) > 3 else int.from_bytes(os.urandom(4), "little")
work = tempfile.mkdtemp(prefix="mm-follow-")
TEXTS = ("config.json", INDEX)
OPTIONS = (["--tp", "2", "--quant", "nvfp4a16", "--part-size", "400K"], ["--quant", "block_fp8", "--part-size", "300K"],
           ["--tp", "2", "--pp", "2", "--part-size", "1M"], ["--quant", "w4a16", "--search", "absmax", "--head", "block_fp8", "--part-size", "500K"],
           ["--tp", "4", "--ep", "2", "--quant", "nvfp4", "--part-size", "700K"])


def weights(path):
    return sorted(n for n in os.listdir(path) if n.startswith("model-"))


def run(*args, status=0, says=()):
    quiet = ["--follow-quiet", "0"] if "--follow" in args and "--follow-quiet" not in args else []
    p = subprocess.run([convert, *args, "--quiet", *quiet], capture_output=True, text=True, timeout=120)
    if p.returncode != status or any(s not in p.stderr for s in says) or p.stderr.count("\n") > 1 + p.stderr.count("note:"):
        raise AssertionError(f"{args}: status {p.returncode}, expected {status} {says}\n{p.stderr}")
    return p.stderr


class Download(threading.Thread):
    """Puts files into a directory as downloaders do. A client of the Hub puts texts first and the tokenizer last."""

    def __init__(self, source, to, rng, seconds):
        super().__init__()
        self.source, self.to, self.rng, self.names = source, to, rng, weights(source)
        os.makedirs(to + "/.cache/huggingface/download")
        for i in range(len(self.names)):  # in order, a little out of order, or in none
            j = min(len(self.names) - 1, i + rng.choice((0, 0, 1, 3, 99)))
            self.names[i], self.names[j] = self.names[j], self.names[i]
        self.waits = [rng.random() * 2 * seconds / len(self.names) for _ in self.names]

    def run(self):
        for name in TEXTS:
            shutil.copy(f"{self.source}/{name}", f"{self.to}/.{name}")
            os.rename(f"{self.to}/.{name}", f"{self.to}/{name}")
        for name, wait in zip(self.names, self.waits):
            way = self.rng.randrange(3)
            temporary = f"{self.to}/{name}" if way == 2 else f"{self.to}/.cache/huggingface/download/{name}.incomplete" if way else f"{self.to}/{name}.incomplete"
            with open(f"{self.source}/{name}", "rb") as f:
                data = f.read()
            with open(temporary, "wb") as f:
                cuts = [0, *sorted(self.rng.randrange(len(data)) for _ in range(3)), len(data)]
                for a, b in zip(cuts, cuts[1:]):
                    f.write(data[a:b])
                    f.flush()
                    time.sleep(wait / 4)
            if way != 2:
                os.rename(temporary, f"{self.to}/{name}")
        shutil.copy(self.source + "/tokenizer.json", self.to)


def kind_of(kind, parent):
    """(source, more options): a draft beside the model, scales searched by importance, a source of 4-bit codes; each needs files of its own."""
    model, build = "tests/data/tiny-m2", os.path.dirname(convert)
    os.makedirs(parent)
    if kind == "draft":
        os.environ.update(BUILD=os.path.dirname(build), TMPDIR=os.environ.get("TMPDIR", work))
        import convert_draft
        return model, ["--draft", convert_draft.save(parent + "/draft", convert_draft.CONFIG, convert_draft.weights())]
    if kind == "importance":
        run(model, "-o", parent + "/none")
        subprocess.run([build + "/minimax-eval", parent + "/none", "--ids", model + "/held-out-ids.json", "--window", "32", "--limit", "2", "--quiet", "--collect",
                        parent + "/inputs.safetensors"], check=True, stdout=subprocess.DEVNULL, timeout=120)
        return model, ["--importance", parent + "/inputs.safetensors"]
    run(model, "-o", parent + "/codes", "--layout", "hf", "--quant", "nvfp4a16", "--dialect", "modelopt")
    return parent + "/codes", []


def attempt(number):
    rng = random.Random(f"{seed} {number}")
    family, options = rng.choice(("m1", "m2", "m2")), rng.choice(OPTIONS)
    parent = f"{work}/run{number}"
    source, plain, out, to = (f"{parent}/{n}" for n in ("source", "plain", "out", "download"))
    kind = rng.choice(("plain", "plain", "draft", "importance", "codes"))
    model, more = (f"tests/data/tiny-{family}", []) if kind == "plain" else kind_of(kind, f"{work}/{kind}{number}")
    options = {"codes": ["--tp", "2", "--part-size", "400K"], "importance": OPTIONS[0]}.get(kind, options)
    options = [*options, *more]
    os.makedirs(parent)
    split(model, source, rng.randrange(2, 14))
    run(source, "-o", plain, *options)
    given = options[:-2] if options[-1] == "1M" else options  # the default part of so small an output under --delete-source
    command = [convert, to, "-o", out, *given, "--follow", "--delete-source", "--follow-quiet", "0", "--resume", "--quiet"]
    os.makedirs(to)
    download = Download(source, to, rng, rng.choice((0.1, 0.5, 1)))
    download.start()
    kills = 0
    for _ in range(30):
        p = subprocess.Popen([*command, "--jobs", str(rng.randrange(1, 5)), "--journal-every", rng.choice(("100K", "1M", "64M"))], stderr=subprocess.PIPE)
        if kills < 6 and rng.random() < 0.8:
            try:
                p.wait(rng.random() * rng.choice((0.1, 0.4, 1.2)))
            except subprocess.TimeoutExpired:
                p.kill()
                kills += 1
        err = p.communicate(timeout=120)[1].decode()
        assert not os.path.exists(out) or same(out, plain), f"{options}: something else than the whole output has the final name"
        if p.returncode == 0:
            break
        assert p.returncode == -9, f"{options}: status {p.returncode}: {err}"
    download.join()
    assert same(out, plain), f"{options}: differs"
    left = sorted(os.listdir(parent)), weights(to)
    assert left == (["download", "out", "plain", "source"], []), f"left: {left}"
    command[command.index("--resume")] = "--resume"  # once more: the sources are gone, the output is what they gave
    # Types of m1's router and of 4-bit codes are not those of a released model: without the sources it is not known what they would give.
    again = subprocess.run(command, timeout=60, check=False, stderr=subprocess.PIPE, text=True)
    known = again.returncode == 0 or (again.returncode == 2 and (kind == "codes" or family == "m1") and "E_FREED" in again.stderr and "minimax-verify" in again.stderr)
    assert known, ("finished, and then not", kind, family, again)
    shutil.rmtree(parent)
    return kills


def stopped(name, files, arrive, more=()):
    """A download of which `arrive` files came, converted until it waits in vain: (source, directory, arguments)."""
    parent = f"{work}/{name}"
    source = split("tests/data/tiny-m2", parent + "/source", files)
    to, args = parent + "/download", [parent + "/download", "-o", parent + "/out", "--tp", "2", "--quant", "nvfp4a16", "--part-size", "300K", "--follow", *more]
    os.makedirs(to)
    for n in (*TEXTS, *weights(source)[:arrive]):
        shutil.copy(f"{source}/{n}", to)
    err = run(*args, "--follow-timeout", "1", status=75, says=("E_FOLLOW", f"of {files} files, {files - arrive} are not there"))
    assert any(n in err for n in weights(source)[arrive:]), err  # several steps wait, each for a file
    assert "--resume" in err and not os.path.exists(parent + "/out")
    run(source, "-o", parent + "/plain", *args[3:9])
    return source, to, args, parent


def finish(source, to, args, parent, *more):
    """The rest comes; the output is that of a plain conversion."""
    for n in weights(source):
        if not os.path.exists(f"{to}/{n}") and n in finish.missing:
            shutil.copy(f"{source}/{n}", to)
    shutil.copy(source + "/tokenizer.json", to)
    run(*args, *more)
    assert same(parent + "/out", parent + "/plain"), parent


def missing(source, to):
    finish.missing = [n for n in weights(source) if not os.path.exists(f"{to}/{n}")]


def single():
    """A checkpoint of one file has no index: the file is whole, then nothing more comes; one that grows, or has a companion, is waited for."""
    parent = work + "/single"
    source, to = f"{parent}/source", f"{parent}/download"
    c = Checkpoint.load("tests/data/tiny-m2")
    c.file, c.index = dict.fromkeys(c.file, "model.safetensors"), ""
    c.save(source)
    shutil.copy("tests/data/tiny-m2/tokenizer.json", source)
    run(source, "-o", parent + "/plain", "--tp", "2", "--quant", "nvfp4a16", "--part-size", "300K")
    os.makedirs(to)
    args = [to, "-o", parent + "/out", "--tp", "2", "--quant", "nvfp4a16", "--part-size", "300K", "--follow"]
    shutil.copy(source + "/config.json", to)
    data = open(source + "/model.safetensors", "rb").read()
    for n in (100, len(data) - 1):
        with open(to + "/model.safetensors", "wb") as f:
            f.write(data[:n])
        run(*args, "--follow-timeout", "1", status=75, says=["E_FOLLOW", INDEX])
    child = subprocess.Popen([convert, *args, "--follow-quiet", "1", "--follow-timeout", "60"], stderr=subprocess.PIPE)
    with open(to + "/model.safetensors", "ab") as f:
        f.write(data[-1:])
    shutil.copy(source + "/tokenizer.json", to)
    assert child.wait(60) == 0, child.stderr.read()
    assert same(parent + "/out", parent + "/plain")
    shutil.rmtree(parent + "/out")
    open(to + "/model.safetensors.aria2", "w").close()
    run(*args, "--follow-timeout", "1", status=75, says=["E_FOLLOW", INDEX])
    os.unlink(to + "/model.safetensors.aria2")
    run(*args, "--delete-source", status=2, says=["E_USAGE", "a checkpoint of one file"])
    with open(to + "/model.safetensors", "wb") as f:
        f.write(data[:8] + b"x" + data[9:])
    run(*args, "--follow-timeout", "60", status=3, says=["model.safetensors"])


def in_place():
    """Texts that are written in place, and stand still for a while: what is no JSON yet is waited for until the folder is quiet."""
    parent = work + "/in_place"
    source, to = split("tests/data/tiny-m2", parent + "/source", 5), parent + "/download"
    shutil.copytree(source, to)
    run(source, "-o", parent + "/plain")
    for name in ("config.json", INDEX):
        whole = open(f"{source}/{name}", "rb").read()
        with open(f"{to}/{name}", "wb") as f:
            f.write(whole[:-40])
        child = subprocess.Popen([convert, to, "-o", f"{parent}/out-{name}", "--follow", "--follow-quiet", "6", "-q"], stderr=subprocess.PIPE, text=True)
        time.sleep(2.5)
        assert child.poll() is None, child.stderr.read()
        with open(f"{to}/{name}", "wb") as f:
            f.write(whole)
        assert child.wait(60) == 0, child.stderr.read()
        assert same(f"{parent}/out-{name}", parent + "/plain")
        with open(f"{to}/{name}", "wb") as f:
            f.write(whole[:-40])
        run(to, "-o", parent + "/never", "--follow", "--follow-quiet", "1", "--follow-timeout", "60", status=3, says=["E_JSON", name])
        shutil.copy(f"{source}/{name}", to)


def another():
    """Two models of one family: the same names, files and headers, other numbers. All that came of the first is converted and gone; the
    second one's folder neither goes on with it nor discards it. The first folder does, under another name too."""
    parent = work + "/another"
    source, second, to = (f"{parent}/{n}" for n in ("source", "second", "download"))
    c = Checkpoint.load("tests/data/tiny-m2")
    layer = {k: re.search(r"layers\.(\d)", k) for k in c.tensors}
    c.file = {k: f"model-{2 + int(layer[k][1]) if layer[k] else 1 if 'embed' in k else 6:05}-of-00006.safetensors" for k in c.tensors}
    c.index = json.dumps({"metadata": {"total_size": sum(len(t[2]) for t in c.tensors.values())}, "weight_map": c.file})
    for path in source, second:
        c.save(path)
        shutil.copy("tests/data/tiny-m2/tokenizer.json", path)
        c.tensors = {k: (d, s, bytes(b ^ 1 if b & 126 != 126 else b for b in data) if "experts" in k and d == "F8_E4M3" else data)
                     for k, (d, s, data) in c.tensors.items()}
    os.makedirs(to)
    for n in (*TEXTS, *weights(source)[:3]):
        shutil.copy(f"{source}/{n}", to)
    args = ["-o", parent + "/out", "--part-size", "50K", "--follow", "--delete-source"]
    run(to, *args, "--follow-timeout", "1", status=75)
    assert weights(to) == [], weights(to)
    run(second, *args, "--resume", status=2, says=["E_RESUME", "another source"])
    run(second, *args, "--restart", status=2, says=["E_FREED"])
    run(second, "-o", parent + "/out", "--restart", status=2, says=["E_FREED"])
    assert weights(second) == weights(source)
    os.rename(to, to + "-renamed")
    for n in ("tokenizer.json", *weights(source)[3:]):
        shutil.copy(f"{source}/{n}", to + "-renamed")
    run(to + "-renamed", *args, "--resume")
    run(source, "-o", parent + "/plain", "--part-size", "50K")
    assert same(parent + "/out", parent + "/plain")


def once_more():
    """Finished and freed: done again under each set of options; with the files fetched again, of this source or of another one."""
    for i, options in enumerate(OPTIONS):
        parent = f"{work}/more{i}"
        source, other, to = split("tests/data/tiny-m2", parent + "/source", 5), parent + "/other", parent + "/download"
        shutil.copytree(source, to)
        c = Checkpoint.load(source)
        c.tensors = {k: (d, s, bytes(b ^ 1 if b & 126 != 126 else b for b in data) if "experts" in k and d == "F8_E4M3" else data)
                     for k, (d, s, data) in c.tensors.items()}
        c.save(other)
        args = [to, "-o", parent + "/out", *options, "--follow", "--delete-source", "--resume"]
        run(*args)
        assert weights(to) == []
        run(*args)
        for n in weights(source):
            shutil.copy(f"{source}/{n}", to)
        run(*args[:-2], "--resume")
        for n in weights(source):
            shutil.copy(f"{other}/{n}", to)
        run(*args[:-2], "--resume", status=2, says=["E_RESUME", "another source"])


def unrecorded():
    """A run that is refused for what another one left makes no record of sources, which would stay behind a finished output."""
    parent = work + "/unrecorded"
    os.mkdir(parent)
    args = ["tests/data/tiny-m1", "-o", parent + "/out", "--tp", "2", "--part-size", "1M"]
    run(*args, "--part", "1/2")
    before = sorted(os.listdir(parent))
    run(*args, "--follow", "--resume", status=2, says=["E_RESUME", "without --follow"])
    run(*args, "--follow", status=2, says=["E_LEFTOVER"])
    assert sorted(os.listdir(parent)) == before, os.listdir(parent)
    run(*args, "--resume")
    assert os.listdir(parent) == ["out"], os.listdir(parent)


def reciprocals():
    """Global scales that compressed-tensors stored as reciprocals are numbers that the plan needs, where the recipe keeps them."""
    parent = work + "/reciprocals"
    source, out = parent + "/source", parent + "/out"
    os.mkdir(parent)
    run("tests/data/tiny-m2", "-o", source, "--layout", "hf", "--quant", "nvfp4a16", "--dialect", "ct")
    for more in (), ("--quant", "nvfp4a16", "--tp", "2"):
        run(source, "-o", out, "--follow", "--follow-timeout", "60", *more, status=4, says=["E_FOLLOW", "weight_global_scale"])
    run(source, "-o", out, "--follow", "--follow-timeout", "60", "--quant", "bf16")


def cases():
    once_more()
    reciprocals()
    unrecorded()
    # A download that stops, with and without removal, goes on.
    source, to, args, parent = stopped("stops", 9, 5)
    missing(source, to)
    assert len(weights(to)) == 5
    finish(source, to, args, parent, "--resume")
    source, to, args, parent = stopped("frees", 9, 6, ["--delete-source"])
    gone = [n for n in weights(source)[:6] if not os.path.exists(f"{to}/{n}")]
    assert 2 <= len(gone) < 6, gone
    # Other options, a plain run, --restart: none takes away what the sources gave.
    run(*("block_fp8" if a == "nvfp4a16" else a for a in args), "--resume", status=2, says=["E_RESUME"])
    run(*args, status=2, says=["E_LEFTOVER"])
    run(*args, "--restart", status=2, says=["E_FREED", gone[0]])
    run(*args[:-2], "--restart", status=3, says=["E_FS_MISSING"])
    for more in ((), ("--part", "0/2"), ("--part", "0/2", "--quant", "int8"), ("--follow",), ("--compress", "zstd")):
        run("tests/data/tiny-m2", "-o", parent + "/out", "--restart", *more, status=2, says=["E_FREED", "files of another source"])
    # A block of the output is damaged whose source is gone: said by name; with the file fetched again all is well.
    staged = f"{parent}/.out.partial"
    part = sorted(n for n in os.listdir(staged) if n.endswith(".safetensors"))[0]
    with open(f"{staged}/{part}", "r+b") as f:
        f.seek(-100, 2)
        f.write(b"damage")
    err = run(*args, "--resume", "--follow-timeout", "1", status=6, says=["E_FREED", "fetch this file again"])
    named = re.search(r"model-\d+-of-\d+\.safetensors", err)[0]
    assert named in gone, err
    for n in gone:
        shutil.copy(f"{source}/{n}", to)
    finish.missing = weights(source)[6:]
    finish(source, to, args, parent, "--resume")
    assert weights(to) == []
    # All of it fetched again: --restart may.
    source, to, args, parent = stopped("again", 9, 6, ["--delete-source"])
    finish.missing = weights(source)
    finish(source, to, args, parent, "--restart")
    # Without a total in the index nothing is removed before all headers were seen.
    parent = work + "/unproven"
    source = split("tests/data/tiny-m2", parent + "/source", 6, total=False)
    os.makedirs(parent + "/download")
    for n in (*TEXTS, *weights(source)[:5]):
        shutil.copy(f"{source}/{n}", parent + "/download")
    args = [parent + "/download", "-o", parent + "/out", "--part-size", "300K", "--follow", "--delete-source"]
    run(*args, "--follow-timeout", "1", status=75)
    assert len(weights(parent + "/download")) == 5
    # A header that is not that of other layers.
    parent = work + "/other"
    c = Checkpoint.load(split("tests/data/tiny-m2", parent + "/source", 4))
    name = [k for k in c.tensors if k.endswith("input_layernorm.weight")][-1]
    dtype, shape, data = c.tensors[name]
    c.tensors[name] = ("F32", shape, b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
    c.index = open(parent + "/source/" + INDEX, encoding="utf-8").read()
    c.save(parent + "/source2")
    os.makedirs(parent + "/download")
    args = [parent + "/download", "-o", parent + "/out", "--part-size", "300K", "--follow", "--delete-source", "--resume"]
    for n in (*TEXTS, *weights(parent + "/source2")[:2]):
        shutil.copy(f"{parent}/source2/{n}", parent + "/download")
    run(*args, "--follow-timeout", "1", status=75)
    for n in weights(parent + "/source2")[2:]:
        shutil.copy(f"{parent}/source2/{n}", parent + "/download")
    run(*args, status=4, says=["E_FOLLOW", name, "found F32", "expected BF16"])
    assert os.path.exists(parent + "/.out.partial"), "the only copy of what was freed"
    # A damaged record of sources says so; a run of the other kind does not continue this one.
    source, to, args, parent = stopped("damaged", 9, 6, ["--delete-source"])
    with open(parent + "/.out.partial.sources", "r+b") as f:
        f.seek(60)
        f.write(b"x")
    for how in ("--resume", "--restart"):
        run(*args, how, status=6, says=["E_DIGEST", ".out.partial.sources"])
    source, to, args, parent = stopped("plainly", 4, 2)
    for n in weights(source):
        shutil.copy(f"{source}/{n}", to)
    run(*args[:-1], "--resume", status=2, says=["E_RESUME", "with --follow"])
    # A file that changed since it was read; a link.
    source, to, args, parent = stopped("changed", 5, 3)
    os.utime(f"{to}/{weights(source)[0]}", (1, 1))
    run(*args, "--resume", status=2, says=["E_RESUME", weights(source)[0]])
    parent = work + "/links"
    source = split("tests/data/tiny-m2", parent + "/blobs", 3)
    os.makedirs(parent + "/snapshots/abc")
    for n in os.listdir(source):
        os.symlink(f"../../blobs/{n}", f"{parent}/snapshots/abc/{n}")
    run(parent, "-o", parent + "/out", "--follow", "--delete-source", status=2, says=["a link"])
    run(parent, "-o", parent + "/out", "--follow", "--restart")
    run(source, "-o", parent + "/plain")
    assert same(parent + "/out", parent + "/plain")
    # A failure ends the run at once, though other threads wait for files that never come.
    parent = work + "/fails"
    c = Checkpoint.load(split("tests/data/tiny-m2", parent + "/source", 9))
    name = next(k for k in c.tensors if k.endswith("layers.0.self_attn.o_proj.weight"))
    dtype, shape, data = c.tensors[name]
    c.tensors[name] = (dtype, shape, b"\x7f" * len(data))
    c.save(parent + "/download")
    for n in weights(parent + "/download")[4:]:
        os.unlink(f"{parent}/download/{n}")
    start = time.monotonic()
    run(parent + "/download", "-o", parent + "/out", "--quant", "bf16", "--follow", "--follow-timeout", "60", "--jobs", "8", status=3, says=[name])
    assert time.monotonic() - start < 30
    single()
    in_place()
    another()
    # Rules between options.
    for wrong in (["--delete-source"], ["--follow", "--dry-run"], ["--follow", "--layout", "hf"], ["--follow", "--compress", "zstd"], ["--follow", "--part", "0/2"],
                  ["--follow", "--delete-source", "--ranks", "0"], ["--follow", "--follow-timeout", "9", "--follow-quiet", "9"], ["--follow", "--delete-source", "--allow-outside-links"]):
        run(source, "-o", work + "/wrong", *wrong, status=2, says=["E_USAGE", next(w for w in reversed(wrong) if w.startswith("--"))])


try:
    kills = sum(attempt(i) for i in range(runs))
    cases()
    print(f"follow: {runs} downloads, {kills} kills, each output as a plain conversion's, no source left (seed {seed})")
finally:
    shutil.rmtree(work)
