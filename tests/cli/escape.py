#!/usr/bin/env python3
"""No program lets a byte of a file command the terminal: names and words of manifests, headers, configs and recipes with escape sequences,
C1 controls, direction overrides and invisible characters come out escaped, in results and in error lines; other scripts stay readable."""
import json
import os
import subprocess
import sys
import tempfile
import unicodedata

sys.path[:0] = ["tests/fault"]
import packed_files as pf

BIN = os.environ["BUILD"] + "/bin/"
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
EVIL = ["\x1b[2J", "\x7f", "\u009b31m", "\u202egnp.exe", "\u2066x\u2069", "\u200b", "\u200e", "\ufeff", "\u2028", "\U000e0041", "\u00ad"]
FINE = "é漢字עברית"
seen = 0


def commands(text):
    """Characters that may not reach a terminal."""
    return [c for c in text if c not in "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")]


def run(program, *args, fine=True, status=None):
    global seen
    r = subprocess.run([BIN + program, *args], capture_output=True)
    answer = b"" if program == "minimax-run" else r.stdout  # the model's own words are not a file's
    out = (answer + r.stderr).decode("utf-8")  # invalid UTF-8 fails here
    assert r.returncode in (0, 3, 4, 6) and (status is None or r.returncode == status), (program, args, r.returncode, out)
    assert not commands(out), (program, args, commands(out), out)
    assert not r.returncode or r.stderr.count(b"\n") == 1, r.stderr
    if fine:
        assert FINE in out and "\\x" in out, (program, args, out)
    seen += 1
    return out


pf.source(work + "/src")
pf.convert(BIN + "minimax-convert", work + "/src", work + "/good", "--tp", "2", "--quant", "block_fp8")
pf.source(work + "/m3-src", family="m3")
pf.convert(BIN + "minimax-convert", work + "/m3-src", work + "/m3", "--tp", "2")
for i, evil in enumerate(EVIL):
    word, path = FINE + evil, f"{work}/evil{i}"
    p = pf.Packed(work + "/good")
    p.manifest["tool"] = p.manifest["quant"] = word
    control = any(unicodedata.category(c) == "Cc" for c in evil)  # no header may have these
    extra = json.loads(json.dumps(p.tensor("model.norm.weight")))  # one more tensor, which the model does not use
    extra["name"] = word
    if not control:
        p.manifest["tensors"].append(extra)
    for part in [] if control else p.parts.values():
        part.tensors[word] = part.tensors["model.norm.weight"]
    p.save(path)
    run("minimax-inspect", path, status=0)
    run("minimax-inspect", path, "--summary", status=0)
    run("minimax-inspect", path, "--json", fine=False, status=0)
    run("minimax-inspect", path, "--diff", work + "/good", fine=not control, status=0 if control else 6)
    run("minimax-verify", path, fine=False, status=0)
    run("minimax-verify", "-q", path, "--source", work + "/src", fine=False)
    if not control or evil == "\x7f":  # a folder's name, in results and in reports
        os.symlink(work + "/src", f"{work}/{word}")
        assert f"against {work}/{FINE}\\x" in run("minimax-verify", "-q", work + "/good", "--source", f"{work}/{word}", "--report", path + ".html", status=0)
        page = open(path + ".html", encoding="utf-8").read()
        assert f"{work}/{FINE}\\x" in page and not commands(page), commands(page)
    run("minimax-archive", "pack", path, "-o", path + ".arc", fine=False, status=0)
    run("minimax-archive", "list", path + ".arc", fine=False, status=0)
    for edit in (lambda m: m.update({word: 1}), lambda m: m.update(format=word), lambda m: m["tensors"][0].update(scheme=word),
                 lambda m: m["tensors"][0].update(name=word), lambda m: m["files"][0].update(name=word), lambda m: m["model"].update(family=word),
                 lambda m: m["model"].update(architecture=word),
                 lambda m: m["tensors"][0]["planes"][0].update(dtype=word)):
        q = pf.Packed(work + "/good")
        edit(q.manifest)
        first = f"{path}-{seen}"
        q.save(first)
        for program, *args in (("minimax-inspect",), ("minimax-verify",), ("minimax-run", "-p", "a"), ("minimax-eval", "--ids", "tests/data/tiny-m2/held-out-ids.json")):
            run(program, first, *args, fine=False)
    q = pf.Packed(work + "/m3")
    q.manifest["left_out"] = [{"prefix": word, "tensors": 1, "bytes": 2}]
    q.save(path + "-m3")
    run("minimax-convert", path + "-m3", "-o", path + "-out", "--dry-run", status=0)
    run("minimax-convert", path + "-m3", "-o", path + "-out", "--dry-run", "--layout", "hf", status=4)
    config = json.load(open(work + "/src/config.json", encoding="utf-8"))
    os.mkdir(path + "-src")
    for name in ("model.safetensors", "tokenizer.json"):
        os.symlink(f"{work}/src/{name}", f"{path}-src/{name}")
    for key, value in (("architectures", [word]), ("hidden_act", word), ("scoring_func", word), ("model_type", word)):
        with open(path + "-src/config.json", "w", encoding="utf-8") as f:
            json.dump(dict(config, **{key: value}), f, ensure_ascii=False)
        run("minimax-convert", path + "-src", "-o", path + "-out", "--dry-run", "--allow-outside-links", fine=False)
    with open(path + ".recipe", "w", encoding="utf-8") as f:
        json.dump({"default": "block_fp8", "rules": [{"match": word, "scheme": "none"}]}, f, ensure_ascii=False)
    run("minimax-convert", work + "/src", "-o", path + "-out", "--dry-run", "--allow-unmatched", "--recipe", path + ".recipe", status=0)
# A folder whose name is no UTF-8 is in JSON as messages show it: \\xff.
folder = os.fsencode(work) + b"/\xff"
os.rename(work + "/good", folder)
with open(work + "/ids.json", "w", encoding="utf-8") as f:
    json.dump(list(range(20)), f)
subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", work + "/key.pem"], check=True, capture_output=True)
for program, *args in (("minimax-inspect", folder), ("minimax-verify", folder), ("minimax-verify", folder, "--source", work + "/src"),
                       ("minimax-archive", "pack", folder, "-o", folder + b".arc"), ("minimax-archive", "unpack", folder + b".arc", "-o", folder + b".2"),
                       ("minimax-serve", folder, "--check"), ("minimax-eval", folder, "--ids", work + "/ids.json", "--window", "9", "--against", folder),
                       ("minimax-archive", "sign", folder, "--key", work + "/key.pem")):
    done = subprocess.run([BIN + program, *args, "--json"], capture_output=True)
    assert done.returncode == 0, (program, args, done)
    if "--source" in args:
        done = subprocess.run([BIN + program, *args, "-q", "--json", "--report", work + "/page.html", "--force"], capture_output=True)
        assert done.returncode == 0 and work + "/\\xff" in open(work + "/page.html", encoding="utf-8").read(), done
    said = json.loads(done.stdout)
    assert any(str(x).startswith(work + "/\\xff") for x in said.values()), (program, args, done)
    seen += 1
evil = folder + b"\x1b[2J"
os.rename(folder, evil)
for program, *args in (("minimax-verify", evil), ("minimax-serve", evil, "--check"), ("minimax-archive", "sign", evil, "--key", work + "/key.pem"),
                       ("minimax-archive", "pack", evil, "-o", work + "/arc")):
    done = subprocess.run([BIN + program, *args], capture_output=True)
    assert done.returncode == 0 and b"/\\xff\\x1b[2J" in done.stdout + done.stderr and b"\x1b" not in done.stdout + done.stderr, (program, args, done)
    seen += 1
print(f"{seen} outputs of 7 programs from {len(EVIL)} kinds of hostile names: nothing that a terminal obeys")
