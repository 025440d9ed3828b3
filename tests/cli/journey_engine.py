#!/usr/bin/env python3
"""The way of one who writes an engine: a rank's tensors by what minimax-inspect lists, their bytes by the files' own headers, likelihoods and
logits to compare with, and how far those of a quantised checkpoint are."""
import json
import math
import os
import struct
import subprocess

from convert_files import read_st, write_st

BIN, TMP, DATA = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"], "tests/data"
SOURCE = f"{DATA}/tiny-m2"


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == status, (program, args, done.returncode, done.stdout, done.stderr)
    return done


def shards():
    """Every plane that is listed for a rank lies in one of its files, with as many bytes as its shape says."""
    for name, quant in (("exact", "none"), ("four", "nvfp4a16")):
        run("minimax-convert", SOURCE, "-o", f"{TMP}/{name}", "--tp", 2, "--quant", quant, "-q")
    size = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    for rank in range(2):
        listed = json.loads(run("minimax-inspect", f"{TMP}/four", "--rank", rank, "--json").stdout)
        stored = {}
        for part in listed["ranks"][0]["parts"]:
            stored |= {k: v[2] for k, v in read_st(f"{TMP}/four/{part['file']}")[0].items()}
        for t in listed["tensors"]:
            for p in t["planes"]:
                assert len(stored.pop(t["name"] + p["suffix"])) == size[p["dtype"]] * math.prod(p["shape"]), t
        assert not stored


def likelihood():
    """A text and its ids (a separator stands before them) give the same; one of three things is asked for."""
    text = open(f"{DATA}/held-out.txt", encoding="utf-8").read().split("\0")[0]
    open(f"{TMP}/text", "w", encoding="utf-8").write(text)
    ids = json.load(open(f"{SOURCE}/held-out-ids.json"))
    by_text = json.loads(run("minimax-eval", f"{TMP}/exact", "--text", f"{TMP}/text", "--window", 64, "--limit", 4, "--json").stdout)
    json.dump(ids[1:64 * 4 + 2], open(f"{TMP}/ids.json", "w"))
    assert by_text == json.loads(run("minimax-eval", f"{TMP}/exact", "--ids", f"{TMP}/ids.json", "--window", 64, "--json").stdout)
    open(f"{TMP}/empty", "w").close()
    assert "E_IDS" in run("minimax-eval", f"{TMP}/exact", "--text", f"{TMP}/empty", status=3).stderr
    with open(f"{TMP}/pointer", "w") as f:
        f.write("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    for option in ("--text", "--conversations", "--ids"):
        assert "git lfs pull" in run("minimax-eval", f"{TMP}/exact", option, f"{TMP}/pointer", "--window", 2, status=3).stderr, option
    assert "found an object, expected a list of ids" in run("minimax-eval", f"{TMP}/exact", "--ids", f"{TMP}/exact/config.json", status=3).stderr
    assert "--conversations" in run("minimax-eval", f"{TMP}/exact", "--text", "x", "--ids", "y", status=2).stderr
    both = ("--text", f"{TMP}/text", "--ids", f"{TMP}/ids.json")
    for found, code in ((f"{TMP}/absent", "E_FS_MISSING"), (f"{TMP}/text", "E_FS_TYPE")):  # where a checkpoint belongs
        assert code in run("minimax-eval", f"{TMP}/exact", "--against", found, "--text", f"{TMP}/text", status=3).stderr
    for wrong in ((), both, ("--logits", f"{TMP}/l"), ("--ids-from", f"{TMP}/p"),
                  ("--logits", f"{TMP}/l", "--against", f"{TMP}/l", "--ids-from", f"{TMP}/p")):
        assert "E_USAGE" in run("minimax-eval", f"{TMP}/exact", *wrong, status=2).stderr


def text_against(ids):
    """A text against a checkpoint: as its windows are as prompts against the stored logits, which divergence() has computed in Python."""
    options = ("--act-quant", "off", "--chunk", 4, "--json")
    json.dump(ids[3:31], open(f"{TMP}/windows.json", "w"))
    windows = {f"ids.{i}": ids[3 + 9 * i:12 + 9 * i] for i in range(3)}
    write_st(f"{TMP}/windows", {k: ("I32", [9], struct.pack("<9i", *v)) for k, v in windows.items()})
    run("minimax-eval", f"{TMP}/exact", "--ids-from", f"{TMP}/windows", "--logits", f"{TMP}/windows.logits", "--act-quant", "off", "--chunk", 4, "-q")
    stored = json.loads(run("minimax-eval", f"{TMP}/four", "--ids-from", f"{TMP}/windows", "--against", f"{TMP}/windows.logits", *options).stdout)
    live = json.loads(run("minimax-eval", f"{TMP}/four", "--ids", f"{TMP}/windows.json", "--window", 9, "--against", f"{TMP}/exact", *options).stdout)
    assert (stored.pop("reference"), live.pop("reference")) == (f"{TMP}/windows.logits", f"{TMP}/exact") and live["checkpoint"] == f"{TMP}/four"
    assert stored.pop("prompts") == live.pop("windows") == 3 and live == stored and live["tokens"] == 27, (live, stored)
    text = json.loads(run("minimax-eval", f"{TMP}/four", "--text", f"{TMP}/text", "--window", 9, "--limit", 2, "--against", f"{TMP}/exact", *options).stdout)
    assert text["windows"] == 2 and text["kl"] > 1e-4, text
    assert "E_USAGE" in run("minimax-eval", f"{TMP}/four", "--ids", f"{TMP}/windows.json", "--against", f"{TMP}/exact", "--collect", f"{TMP}/c", status=2).stderr


def divergence():
    """KL of the four-bit checkpoint from the exact one, computed again in Python; 0 from itself."""
    ids = json.load(open(f"{SOURCE}/held-out-ids.json"))
    prompts = {"ids.a": ids[:9], "ids.b": ids[40:45]}
    write_st(f"{TMP}/prompts", {k: ("I32", [len(v)], struct.pack(f"<{len(v)}i", *v)) for k, v in prompts.items()})
    for name in ("exact", "four"):
        run("minimax-eval", f"{TMP}/{name}", "--ids-from", f"{TMP}/prompts", "--logits", f"{TMP}/{name}.logits", "--act-quant", "off", "-q")
    own = json.loads(run("minimax-eval", f"{TMP}/exact", "--ids-from", f"{TMP}/prompts", "--against", f"{TMP}/exact.logits", "--act-quant", "off", "--json").stdout)
    assert own["kl"] == 0 and own["kl_most"] == 0 and own["first_choice_share"] == 1 and (own["tokens"], own["prompts"]) == (14, 2), own
    found = json.loads(run("minimax-eval", f"{TMP}/four", "--ids-from", f"{TMP}/prompts", "--against", f"{TMP}/exact.logits", "--act-quant", "off", "--json").stdout)
    p, q = ({k: v[2] for k, v in read_st(f"{TMP}/{x}.logits")[0].items()} for x in ("exact", "four"))
    kl, agree = [], 0
    for name, prompt in prompts.items():
        n = len(p["logits" + name[3:]]) // 4
        a, b = (struct.unpack(f"<{n}f", x["logits" + name[3:]]) for x in (p, q))
        vocab = n // len(prompt)
        for t in range(len(prompt)):
            x, y = a[t * vocab:(t + 1) * vocab], b[t * vocab:(t + 1) * vocab]
            agree += max(range(vocab), key=x.__getitem__) == max(range(vocab), key=y.__getitem__)
            lx, ly = (max(v) + math.log(math.fsum(math.exp(i - max(v)) for i in v)) for v in (x, y))
            kl.append(math.fsum(math.exp(i - lx) * ((i - lx) - (j - ly)) for i, j in zip(x, y)))
    assert abs(found["kl"] - sum(kl) / len(kl)) < 1e-9 and abs(found["kl_most"] - max(kl)) < 1e-9 and found["kl"] > 1e-4, (found, kl)
    for p in (50, 90, 99):  # the nearest rank
        assert abs(found[f"kl_p{p}"] - sorted(kl)[math.ceil(p / 100 * len(kl)) - 1]) < 1e-9, (p, found, kl)
    assert found["first_choice_share"] == agree / len(kl)
    text_against(ids)
    write_st(f"{TMP}/other", {"ids.c": ("I32", [2], struct.pack("<2i", 1, 2))})
    assert "logits.c" in run("minimax-eval", f"{TMP}/four", "--ids-from", f"{TMP}/other", "--against", f"{TMP}/exact.logits", status=3).stderr
    return found


def report():
    """The divergence stands in the report of the weights' errors, of the same checkpoint alone."""
    said = run("minimax-eval", f"{TMP}/four", "--text", f"{TMP}/text", "--window", 9, "--limit", 2, "--against", f"{TMP}/exact", "--json").stdout
    open(f"{TMP}/kl.json", "w").write(said)
    want, verify = json.loads(said), ("minimax-verify", f"{TMP}/four", "--source", SOURCE, "-q", "--divergence", f"{TMP}/kl.json")
    run(*verify, "--report", f"{TMP}/r.html")
    run(*verify, "--report", f"{TMP}/r.json")
    assert json.load(open(f"{TMP}/r.json"))["divergence"] == want == json.loads(run(*verify, "--json").stdout)["divergence"]
    page = open(f"{TMP}/r.html", encoding="utf-8").read()
    for text in (f"<dd>{want['kl']:.6f} nats", f"p50 {want['kl_p50']:.6f}, p90 {want['kl_p90']:.6f}, p99 {want['kl_p99']:.6f}, largest {want['kl_most']:.4f}",
                 f"<dd>{100 * want['first_choice_share']:.2f} % of 18 tokens", f"<dd>{TMP}/exact\n"):
        assert text in page, text
    assert "goes with --report FILE or --json" in run(*verify, status=2).stderr  # nothing would show it
    shown = (*verify, "--report", f"{TMP}/none.json")
    assert "E_USAGE" in run("minimax-verify", f"{TMP}/exact", *shown[2:], status=2).stderr
    assert "E_USAGE" in run(*verify, "--report", f"{TMP}/r.csv", status=2).stderr
    for key in want.keys() - {"checkpoint", "windows"}:
        json.dump({k: v for k, v in want.items() if k != key}, open(f"{TMP}/kl.json", "w"))
        assert f'no "{key}"' in run(*shown, status=3).stderr
    for key, value in (("kl", -1), ("kl", "x"), ("kl", want["kl_most"] + 1), ("kl_p90", want["kl_p50"] / 2), ("first_choice_share", 1.5), ("tokens", 0), ("tokens", 1.5)):
        open(f"{TMP}/kl.json", "w").write(json.dumps({**want, key: value}))
        done = run(*shown, status=3)  # before the weights are compared
        assert f'key "{key}": found ' in done.stderr and not done.stdout, done
    open(f"{TMP}/kl.json", "w").write(json.dumps({**want, "reference": "<img src=x onerror=y>"}))
    run(*verify, "--report", f"{TMP}/r.html")
    assert "<img" not in open(f"{TMP}/r.html", encoding="utf-8").read()
    dummy = run("minimax-eval", SOURCE, "--load-format", "dummy", "--text", f"{TMP}/text", "--window", 9, "--limit", 1, "--against", f"{TMP}/exact", "--json").stdout
    assert json.loads(dummy)["tokens"] == 9 and "manifest_sha256" not in dummy  # random weights have no manifest


if __name__ == "__main__":
    shards()
    likelihood()
    kl = divergence()
    report()
    print(f"shards, likelihood, divergence: as one who writes an engine reads them; KL {kl['kl']:.5f} nats")
