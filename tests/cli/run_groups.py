#!/usr/bin/env python3
"""--dp: one checkpoint of --attn-tp runs with as many groups of attention as divide its own. Files of logits and of collected inputs are those of
a conversion for that shape, byte for byte; texts are those of one rank; other numbers are refused by name; auto says what it took and why.
DEVICE=cuda DEVICES=0,1: logits on GPUs, of two ranks."""
import json
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import BIN, TMP, Server  # noqa: E402

DEVICE = os.environ.get("DEVICE")
ON = ("--device", DEVICE, "--devices", os.environ.get("DEVICES", "0,1")) if DEVICE else ("-t", "1")


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == status, (program, args, done)
    return done


def convert(model, name, quant, *options):
    run("minimax-convert", f"tests/data/{model}", "-o", f"{TMP}/{name}", "--quant", quant, "-q", "--force", *options)
    return f"{TMP}/{name}"


def read(path):
    with open(path, "rb") as f:
        return f.read()


def logits(packed, model, *options):
    out = f"{TMP}/logits"
    run("minimax-eval", packed, "--ids-from", f"tests/data/{model}/golden.safetensors", "--logits", out, "--force", "-q", *ON, *options)
    return read(out)


def as_converted():
    """(model, scheme, ranks, groups): logits to the bit, of groups as they were made, and of fewer."""
    shapes = [("tiny-m2", "block_fp8", 2, 1), *([("tiny-m1", "none", 2, 1), ("tiny-m2", "none", 2, 1)] if DEVICE else [("tiny-m1", "nvfp4", 4, 2), ("tiny-m3-random", "mxfp8", 4, 1)])]
    for model, quant, tp, groups in shapes:
        made = convert(model, "made", quant, "--tp", str(tp), "--attn-tp", "1")
        direct = convert(model, "direct", quant, "--tp", str(tp), *([] if groups == 1 else ["--attn-tp", str(tp // groups)]))
        whole, cut = logits(made, model), logits(made, model, "--dp", str(groups))
        assert cut == logits(direct, model) == logits(direct, model, "--dp", str(groups)), (model, quant, tp, groups)
        assert whole == logits(made, model, "--dp", str(tp)) != cut, (model, quant, tp, groups)


def collected():
    """What inputs of linears look like, which groups cannot say."""
    text = ("--text", "tests/data/held-out.txt", "--window", "64", "--limit", "2", "-t", "1", "-q", "--force")
    made, direct = convert("tiny-m2", "made", "none", "--tp", "2", "--attn-tp", "1"), convert("tiny-m2", "direct", "none", "--tp", "2")
    for packed, name, dp in ((made, "a", "1"), (made, "b", "auto"), (direct, "c", "1")):
        run("minimax-eval", packed, *text, "--collect", f"{TMP}/{name}", "--dp", dp)
    found = []
    for name in "abc":
        data = read(f"{TMP}/{name}")
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + size])
        header.pop("__metadata__")
        found.append((header, data[8 + size:]))
    assert found[0] == found[1] == found[2]
    said = run("minimax-eval", made, *text, "--collect", f"{TMP}/a", status=4).stderr
    assert "E_PARALLEL" in said and "collecting inputs needs --dp 1, or a conversion without --attn-tp" in said, said


def texts():
    one, made = convert("tiny-m2", "one", "none"), convert("tiny-m2", "made", "none", "--tp", "4", "--attn-tp", "1", "--ep", "2")
    prompt = ("-p", "And it came to pass", "-n", "24", "-t", "1")
    said = {dp: run("minimax-run", made, *prompt, "--dp", dp) for dp in ("1", "2", "4", "auto")}
    assert {d.stdout for d in said.values()} == {run("minimax-run", one, *prompt).stdout}, said
    lines = {dp: d.stderr.split("\n")[0] for dp, d in said.items()}
    assert lines["1"] == "attention: 1 group of 4 ranks by --dp 1: the checkpoint was made for 4", lines
    assert lines["2"] == "attention: 2 groups of 2 ranks by --dp 2: the checkpoint was made for 4", lines
    assert lines["auto"] == "attention: 4 groups of 1 rank by --dp auto: as the checkpoint was made; there are no times of device cpu", lines
    assert "attention:" not in run("minimax-run", made, *prompt).stderr + run("minimax-run", made, *prompt, "--dp", "2", "-q").stderr
    for dp, status, code, says in (("3", 4, "E_PARALLEL", "found --dp 3; expected a divisor of 4, the groups of attention that the checkpoint"),
                                   ("8", 4, "E_PARALLEL", "found --dp 8; expected a divisor of 4"), ("0", 2, "E_USAGE", 'found "0", expected a number'),
                                   ("two", 2, "E_USAGE", 'found "two", expected a number from 1 to 1024 or auto'), ("1x", 2, "E_USAGE", 'found "1x"')):
        found = run("minimax-run", made, *prompt, "--dp", dp, status=status).stderr
        assert code in found and says in found, (dp, found)
    found = run("minimax-run", one, *prompt, "--dp", "2", status=4).stderr
    assert "found --dp 2; expected a divisor of 1" in found, found
    assert run("minimax-run", one, *prompt, "--dp", "auto").stderr.startswith("attention: 1 group of 1 rank by --dp auto: the checkpoint was made for one")
    dummy = ("tests/data/tiny-m2", "--load-format", "dummy", "--dummy-tp", "4", *prompt)
    assert len({run("minimax-run", *dummy, "--dp", dp, "-q").stdout for dp in ("1", "2", "4")}) == 1
    assert "found --dp 3; expected a divisor of 4, the groups of attention that --dummy-tp has" in run("minimax-run", *dummy, "--dp", "3", status=4).stderr


def inside_blocks():
    """Scales of 128 rows, heads of 64: the finer grid that a conversion would store, or its refusal."""
    made = convert("tiny-m2", "made", "block_fp8; *.experts.*=bf16", "--tp", "4", "--attn-tp", "1", "--tp-align", "error")
    found = run("minimax-run", made, "-p", "And", "-n", "1", "--dp", "1", status=4).stderr
    assert "E_TP_ALIGN" in found and "qkv_proj" in found and "cut inside a block_fp8 cell of 128 x 128 (the finest grid that fits is 64 x 128)" in found, found
    assert "expected --dp 4, or a conversion with --tp-align split" in found, found
    run("minimax-run", made, "-p", "And", "-n", "1", "--dp", "4")


def damage():
    """Digests of a checkpoint whose planes were copied; a rank whose files are absent, and from which another one takes heads."""
    some = convert("tiny-m2", "some", "none", "--tp", "4", "--attn-tp", "2", "--ranks", "1-3")
    found = run("minimax-run", some, "-p", "And", "-n", "1", "--dp", "1", status=6).stderr
    assert "E_MISSING" in found and "found none on rank 0, expected one, as rank 1 takes some of it under --dp 1" in found, found
    made = convert("tiny-m2", "made", "none", "--tp", "2", "--attn-tp", "1")
    part = f"{made}/model-rank-00001-part-00000.safetensors"
    run("minimax-run", made, "-p", "And", "-n", "1", "--dp", "1", "--verify-on-load")
    with open(part, "r+b") as f:
        f.seek(-5, 2)
        byte = f.read(1)
        f.seek(-5, 2)
        f.write(bytes([byte[0] ^ 1]))
    assert "E_DIGEST" in run("minimax-run", made, "-p", "And", "-n", "1", "--dp", "1", "--verify-on-load", status=6).stderr


def served():
    made = convert("tiny-m2", "made", "none", "--tp", "2", "--attn-tp", "1")
    common = ("--max-model-len", "128", "-t", "1")
    check = ("minimax-serve", made, "--check", "--kv-offload", "64M", "--dp", "1", *common)
    assert run(*check).stdout.endswith("\nattention: 1 group of 2 ranks by --dp 1: the checkpoint was made for 2\n")
    assert json.loads(run(*check, "--json").stdout)["groups"] == 1
    assert json.loads(run("minimax-serve", made, "--check", "--json", *common).stdout)["groups"] == 2
    body = {"prompt": [5, 9, 200, 31], "max_tokens": 20, "temperature": 0}
    replies = []
    for dp, says, groups in (("1", "1 group of 2 ranks by --dp 1", 1), ("auto", "2 groups of 1 rank by --dp auto: as the checkpoint was made", 2)):
        with Server(made, *common, "--dp", dp) as s:
            replies.append(s.post("/v1/completions", body)["choices"][0]["text"])
            assert ('group_tokens{group="1"}' in s.metrics()) == (groups == 2)
            with open(s.log) as f:
                assert says in f.read()
    with Server(made, *common, "--dp", "auto", "--kv-offload", "64M") as s, open(s.log) as f:
        assert "2 groups of 1 rank by --dp auto: as the checkpoint was made" in f.read()
        assert s.post("/v1/completions", body)["choices"][0]["text"] == replies[0]
    assert replies[0] == replies[1], replies


def on_gpus():
    """The rest of what two GPUs have: auto by sequences, digests, weights that are held, random weights."""
    made = convert("tiny-m2", "made", "block_fp8", "--tp", "2", "--attn-tp", "1")
    check = ("minimax-serve", made, "--port", "0", "--check", *ON, "--max-model-len", "128", "--dp", "auto", "--max-num-seqs")
    few, many = (run(*check, n).stdout for n in ("16", "256"))
    times = "sequences at a time at most; measured: groups in 1 of one's time for 16, 0.99 for 64, 1.01 for 128, 0.96 for 256, 1 for 1024 (M2 on two H200)"
    assert f"1 group of 2 ranks by --dp auto: 16 {times}" in few and f"2 groups of 1 rank by --dp auto: 256 {times}" in many, (few, many)
    say = ("minimax-run", made, "-p", "And it came to pass", "-n", "24", *ON)
    alone = {dp: run(*say, "--dp", dp, "--verify-on-load").stdout for dp in ("1", "2")}
    socket = f"{TMP}/held"
    with subprocess.Popen([f"{BIN}/minimax-hold", made, socket, *ON, "--dp", "1", "--verify-on-load", "-q"]) as holder:
        try:
            end = time.monotonic() + 60
            while not os.path.exists(socket) and holder.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert run(*say, "--dp", "1", "--attach", socket).stdout == alone["1"]
            assert "cut (--dp)" in run(*say, "--attach", socket, status=4).stderr
        finally:
            holder.terminate()
    for dp in ("1", "2"):
        run("minimax-run", "tests/data/tiny-m2", "--load-format", "dummy", "--dummy-tp", "2", "--dp", dp, "-p", "And", "-n", "8", *ON)


as_converted()
if DEVICE:
    on_gpus()
else:
    collected(), texts(), inside_blocks(), damage(), served()
print("one checkpoint, several numbers of groups: logits of its conversions to the bit")
