#!/usr/bin/env python3
"""minimax-run from outside: the reference's greedy text, where it stops, sampling, and what it refuses."""
import json
import os
import re
import shutil
import signal
import struct
import subprocess

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]


def convert(source, name, tp=1, pp=1):
    target = os.path.join(TMP, name)
    subprocess.run([f"{BIN}/minimax-convert", source, "-o", target, "--tp", str(tp), "--pp", str(pp), "--quant", "none", "-q"], check=True)
    return target


def run(*args, status=0, **how):
    """stdout of a run that ends with this status, without its final newline; stderr holds one line at most."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    done = subprocess.run([f"{BIN}/minimax-run", *args], timeout=120, **how)
    err = done.stderr.decode()
    assert done.returncode == status and err.count("\n") <= 1, (args, done.returncode, err)
    run.err = err
    if done.stdout is None or status:
        return None
    assert done.stdout.endswith(b"\n")
    return done.stdout.decode()[:-1]


def refused(status, text, *args, **how):
    run(*args, status=status, **how)
    assert run.err.startswith("minimax-run: error: E_") and text in run.err, run.err


def tensor(path, name):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        entry = json.loads(f.read(n))[name]
        begin, end = entry["data_offsets"]
        f.seek(8 + n + begin)
        return struct.unpack(f"<{(end - begin) // 4}i", f.read(end - begin))


def texts(model, ids):
    """The text of each id, by GPT-2's byte alphabet."""
    doc = json.load(open(f"{model}/tokenizer.json"))
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    byte = {**{chr(b): b for b in own}, **{chr(256 + i): b for i, b in enumerate(rest)}}
    text = {i: bytes(byte[c] for c in token).decode(errors="replace") for token, i in doc["model"]["vocab"].items()}
    text.update({t["id"]: t["content"] for t in doc["added_tokens"]})
    return [text[i] for i in ids]


def changed_source(model, name, files):
    """A copy of a source with some JSON files replaced."""
    source = os.path.join(TMP, name)
    shutil.copytree(model, source)
    for file, content in files.items():
        with open(f"{source}/{file}", "w") as f:
            json.dump(content, f)
    return source


for model in ("tests/data/tiny-m1", "tests/data/tiny-m2"):
    prompt, out = ("".join(texts(model, tensor(f"{model}/golden.safetensors", f"greedy.{x}"))) for x in ("prompt", "out"))
    for tp in (1, 2, 8):
        packed = convert(model, f"{os.path.basename(model)}-{tp}", tp)
        assert run(packed, "-p", prompt, "--added-tokens", "-n", "48", "--act-quant", "off") == out
        assert re.match(r"prompt 24 tokens at [\d.]+/s, 48 new tokens at [\d.]+/s up to --max-tokens, loaded in [\d.]+ s, on cpu, --act-quant off\n$",
                        run.err), run.err
        run(packed, "-p", prompt, "-n", "1")
        assert run.err.endswith(", --act-quant on\n"), run.err

model, packed = "tests/data/tiny-m1", os.path.join(TMP, "tiny-m1-1")
golden = tensor(f"{model}/golden.safetensors", "greedy.out")
prompt, out = ("".join(texts(model, tensor(f"{model}/golden.safetensors", f"greedy.{x}"))) for x in ("prompt", "out"))
greedy = [packed, "-p", prompt, "--added-tokens", "-n", "48", "-q"]

# Other ways to the same text.
with open(f"{TMP}/prompt", "w") as f:
    f.write(prompt)
assert run(packed, "--prompt-file", f"{TMP}/prompt", "--added-tokens", "-n48", "-q") == out and run.err == ""
assert run(*greedy, "--threads", "3", "--device", "cpu") == out
assert run(*greedy, "--threads", "1", "--pin") == out
refused(2, "E_LIMITS: found 1024 threads to pin after 0 others", *greedy, "--threads", "1024", "--pin")
# Threads by default: as many as there are CPUs, over all ranks, those of other stages among them.
stages = convert(model, "tiny-m1-pp2", pp=2)
if len(os.sched_getaffinity(0)) > 1:
    assert run(stages, *greedy[1:], "--pin") == out
assert run(*greedy, "--top-k", "1", "--temperature", "1") == out
assert run(*greedy, "--min-p", "1", "--temperature", "1") == out
for penalty in ("repetition", "presence", "frequency"):
    assert run(*greedy, f"--{penalty}-penalty", "1" if penalty == "repetition" else "0") == out
    assert run(*greedy, f"--{penalty}-penalty", "50") != out
assert run(*greedy, "--top-p", "1e-9", "--temperature", "5", "--seed", "18446744073709551615") == out
assert run(*greedy, preexec_fn=lambda: os.close(0)) == out
run(packed, "-p", prompt, "-n", "1")  # a control token that nobody asked to read as one is text
assert int(re.match(r"prompt (\d+) tokens", run.err)[1]) > 24

# GPUs by number: the CPU has none to choose from, and who forgets --device cuda hears of it (test_engine_open has the forms of the list).
refused(2, "E_USAGE: --devices: found numbers of GPUs with --device cpu", os.path.join(TMP, "tiny-m1-2"), "-p", prompt, "-n", "1", "-q", "--devices", "1,0")

# Digests while loading: on the CPU all files before the first step.
assert run(packed, "-p", prompt, "--added-tokens", "-n", "48", "--verify-on-load") == out
assert re.search(r"loaded in [\d.]+ s, digests checked, ", run.err), run.err
flipped = shutil.copytree(packed, f"{TMP}/flipped")
with open(f"{flipped}/model-rank-00000-part-00000.safetensors", "r+b") as f:
    f.seek(-5000, os.SEEK_END)
    byte = f.read(1)[0]
    f.seek(-5000, os.SEEK_END)
    f.write(bytes([byte ^ 1]))
run(flipped, "-p", prompt, "-n", "1", "-q")
refused(6, "E_DIGEST", flipped, "-p", prompt, "-n", "1", "-q", "--verify-on-load")

# Draws.
drawn = [run(packed, "-p", "And", "-n", "40", "-q", "--temperature", "1", "--seed", seed) for seed in ("1", "1", "2")]
assert drawn[0] == drawn[1] != drawn[2] and drawn[0] != run(packed, "-p", "And", "-n", "40", "-q")
assert run(packed, "-p", "And", "-n", "300", "-q", "--temperature", "1000").count("\ufffd") > 0  # bytes at random, still UTF-8

# End tokens: of generation_config.json, then of config.json, then by name; never by a fixed number.
stop = golden[9]
before = "".join(texts(model, golden[: golden.index(stop)]))
assert 0 < len(before) < len(out)
config = json.load(open(f"{model}/config.json"))
tokenizer = json.load(open(f"{model}/tokenizer.json"))
vocab = tokenizer["model"]["vocab"]
spelled = next(k for k, v in vocab.items() if v == stop)
named = json.loads(json.dumps(tokenizer))
del named["model"]["vocab"][spelled]
named["model"]["merges"] = [m for m in named["model"]["merges"] if spelled not in (m[0], m[1], m[0] + m[1])]
next(t for t in named["added_tokens"] if t["content"] == "<end_of_sentence>")["id"] = stop
for name, files in {
    "generation": {"generation_config.json": {"eos_token_id": stop}, "config.json": {**config, "eos_token_id": golden[0]}},
    "generation-list": {"generation_config.json": {"eos_token_id": [7, stop]}},
    "generation-null": {"generation_config.json": {"eos_token_id": None}, "config.json": {**config, "eos_token_id": stop}},
    "config": {"config.json": {**config, "eos_token_id": stop}},
    "named": {"tokenizer.json": named},
}.items():
    other = convert(changed_source(model, f"{name}-source", files), name)
    args = [other, "-p", prompt, "--added-tokens", "-n", "48"]
    assert run(*args) == before and "up to an end token" in run.err, (name, run.err)
    assert len(run(*args, "--ignore-eos", "-q")) > len(before)
for bad in (-1, 2048, 1.5, "7", True, [stop, 2048]):
    other = os.path.join(TMP, "generation")
    with open(f"{other}/generation_config.json", "w") as f:
        json.dump({"eos_token_id": bad}, f)
    refused(6, "expected ids below 2048", other, "-p", "And")
for text in ("[]", '{"top_k": 2.0}', '{"temperature": "x"}'):
    with open(f"{other}/generation_config.json", "w") as f:
        f.write(text)
    refused(6, f"E_CFG_TYPE: {other}/generation_config.json: ", other, "-p", "And", "--chat")
sampled = convert(changed_source(model, "sampled-source", {"generation_config.json": {"top_k": 2.0}}), "sampled")
refused(3, f"E_CFG_TYPE: {sampled}/generation_config.json: ", sampled, "-p", "And", "--chat")
# Text that is no JSON is damage, as in the other programs, unless the source had it, of which its conversion warns.
source = changed_source(model, "broken-source", {"generation_config.json": {}})
with open(f"{source}/generation_config.json", "w") as f:
    f.write('{"eos_token_id": ')
said = subprocess.run([f"{BIN}/minimax-convert", source, "-o", f"{TMP}/broken"], capture_output=True, text=True, check=True).stderr
assert f"note: minimax-run (without --ignore-eos) and minimax-serve will refuse the output: E_JSON: {source}/generation_config.json: offset 17: " in said, said
refused(3, f"{TMP}/broken/generation_config.json: ", f"{TMP}/broken", "-p", "And")
for text in ('{"eos_token_id": ', '{"a": 1, "a": 2}', "\0" * 30, '{"top_k": 111111111111111111111111}'):
    with open(f"{other}/generation_config.json", "w") as f:
        f.write(text)
    refused(6, f"{other}/generation_config.json: ", other, "-p", "And")
# So is a template's file that is no JSON.
templated = changed_source(model, "templated-source", {"chat_template.json": {"chat_template": "x"}})
subprocess.run([f"{BIN}/minimax-convert", templated, "-o", f"{TMP}/templated", "-q"], check=True)
with open(f"{TMP}/templated/chat_template.json", "w") as f:
    f.write('{"chat_template": ')
refused(6, f"E_JSON: {TMP}/templated/chat_template.json: offset 18", f"{TMP}/templated", "--chat", "-p", "And", "-n", "1", "-q")
# Settings out of range are the file's fault, which is named.
chat = ("--chat", "--chat-format", "minimax-m2", "-p", "And", "-n", "2", "-q")
for text, code, why in (({"temperature": -1}, "E_CFG_RANGE", "temperature: found -1"), ({"top_p": 0}, "E_CFG_RANGE", "top-p: found 0"), ({"top_p": 1.0000001}, "E_CFG_RANGE", "top-p: found 1.0000001, expected"), ({"min_p": 2}, "E_CFG_RANGE", "min-p: found 2"),
                        ({"top_k": -2}, "E_CFG_RANGE", "found -2"), ({"top_k": 1.5}, "E_CFG_TYPE", "top_k"), ({"repetition_penalty": 0}, "E_CFG_RANGE", "penalty: found 0"),
                        ([], "E_CFG_TYPE", "found a list")):
    with open(f"{other}/generation_config.json", "w") as f:
        json.dump(text, f)
    refused(6, f"{code}: {other}/generation_config.json: ", other, *chat)
    refused(6, why, other, *chat)
with open(f"{other}/generation_config.json", "w") as f:
    json.dump({"top_k": -1, "temperature": 0}, f)
run(other, *chat)

# Lengths.
assert len(run(packed, "-p", prompt, "--added-tokens", "--max-model-len", "30")) < len(out) and "6 new tokens" in run.err
assert "up to --max-model-len" in run.err
refused(2, "expected fewer than 24", packed, "-p", prompt, "--added-tokens", "--max-model-len", "24")
refused(2, "the model has 8192 positions", packed, "-p", "And", "--max-model-len", "8193")
refused(2, "the prompt is empty", packed, "-p", "")

# Stop texts of any length at any place of tokens, of several the one that ends first; prompts from standard input.
args = [packed, "-p", prompt, "--added-tokens", "-n", "48"]
for begin in range(2, len(out) - 9, 5):
    for length in (1, 3, 9):
        word = out[begin:begin + length]
        assert run(*args, "--stop", "not in it", "--stop", word) == out[:out.index(word)] and "up to a stop text" in run.err, (word, run.err)
assert run(*args, "--stop", out[-4:] + "x") == out and run(*args, "--stop", out[20:30], "--stop", out[8:11]) == out[:min(out.index(out[20:30]), out.index(out[8:11]))]
assert json.loads(run(*args, "--stop", out[8:11], "--json", "-q"))["end"] == "stop"
for how in (["-p", "-"], ["--prompt-file", "-"]):
    assert run(packed, *how, "--added-tokens", "-n", "48", input=prompt.encode()) == out
    refused(2, "the prompt is empty", packed, *how, input=b"")
refused(2, "--stop: found an empty text", *args, "--stop", "")
refused(2, "--stop: found a text that is not UTF-8", *args, "--stop", b"e\xa9")
refused(2, "one of --prompt and --prompt-file", packed)
refused(2, "one of --prompt and --prompt-file", packed, "-p", "And", "--prompt-file", f"{TMP}/prompt")
refused(2, "--max-tokens", packed, "-p", "And", "-n", "0")
refused(2, "min-p", packed, "-p", "And", "--min-p", "1.5")
refused(2, "repetition penalty", packed, "-p", "And", "--repetition-penalty", "-1")
refused(2, "temperature", packed, "-p", "And", "--temperature", "-1")
refused(2, "top-p", packed, "-p", "And", "--top-p", "0")
refused(2, "--device", packed, "-p", "And", "--device", "abacus")
refused(3, "E_FS_MISSING", packed, "--prompt-file", f"{TMP}/absent")

# Text is written token by token, and a failing stdout ends the run.
child = subprocess.Popen([f"{BIN}/minimax-run", packed, "-p", "And", "-n", "400", "-q", "--ignore-eos"], stdout=subprocess.PIPE)
first = os.read(child.stdout.fileno(), 1 << 16)
rest = child.stdout.read()
assert child.wait() == 0 and 0 < len(first) < len(rest)
with open("/dev/full", "w") as full:
    refused(5, "E_IO: stdout: ", *greedy, stdout=full)
reader, writer = os.pipe()
os.close(reader)
run(*greedy, status=-signal.SIGPIPE, stdout=writer)  # a reader that has gone, as in "| head": quietly
assert run.err == "", run.err
os.close(writer)

# The packed checkpoint's own tokenizer: changed, cut or gone, though its image is there; then the image damaged.
damaged = os.path.join(TMP, "config")
with open(f"{damaged}/tokenizer.json") as f:
    whole = f.read()
with open(f"{damaged}/tokenizer.json", "w") as f:
    f.write(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
refused(6, "tokenizer.json: found", damaged, "-p", "And")
os.remove(f"{damaged}/tokenizer.json")
refused(6, "E_FS_MISSING", damaged, "-p", "And")
with open(f"{damaged}/tokenizer.json", "w") as f:
    f.write(whole)
with open(f"{damaged}/tokenizer.bin", "r+b") as f:
    f.seek(70)
    f.write(b"\xff\xff\xff\xff")
refused(6, "E_TOKENIZER", damaged, "-p", "And")
os.truncate(f"{damaged}/tokenizer.bin", 1000)
refused(6, "E_SIZE", damaged, "-p", "And")
os.remove(f"{damaged}/tokenizer.bin")
refused(6, "E_FS_MISSING", damaged, "-p", "And")

# A tokenizer that the runtime does not read converts all the same, with a note and without an image.
odd = os.path.join(TMP, "odd")
os.mkdir(odd)
for name in os.listdir(model):
    if name != "tokenizer.json":
        os.symlink(os.path.abspath(f"{model}/{name}"), f"{odd}/{name}")
with open(f"{odd}/tokenizer.json", "w") as f:
    f.write(json.dumps({**tokenizer, "normalizer": {"type": "NFC"}}))
noted = subprocess.run(["minimax-convert", odd, "-o", f"{odd}-packed", "--allow-outside-links", "-q"], capture_output=True, text=True)
assert noted.returncode == 0 and noted.stderr.startswith("note: the output will take no text, only ids: E_TOKENIZER: tokenizer.json: normalizer"), noted
assert not os.path.exists(f"{odd}-packed/tokenizer.bin")
refused(4, "normalizer is not null", f"{odd}-packed", "-p", "And")

# Random weights of a config.json: the same model however cut, and another in other schemes; its ids are words, those below 256 bytes.
for family, quant, cut in (("m2", "w4a16", "--dummy-tp 2 --dummy-ep 2"), ("m3-random", "mxfp8", "--dummy-tp 4")):
    bare = os.path.join(TMP, f"bare-{family}")
    os.mkdir(bare)
    shutil.copy(f"tests/data/tiny-{family}/config.json", bare)
    dummy = [bare, "-p", "And so", "--temperature", "0", "--max-tokens", "12", "--load-format", "dummy", "--threads", "1", "-q"]
    replies = [run(*dummy, "--dummy-quant", quant, *how.split()) for how in ("", cut)]
    assert replies[0] == replies[1] and re.search(r" \d{3}", replies[0]) and len(set(replies[0].split())) > 3, replies
assert replies[0] != run(*dummy, "--dummy-quant", quant, "--dummy-skew", "0.9")
refused(2, "E_TP", *dummy, "--dummy-tp", "3")
refused(2, "--dummy-skew: found 1", *dummy, "--dummy-skew", "1")
refused(2, "random weights have no digests", *dummy, "--verify-on-load")
refused(2, "--dummy-quant: found \"int3\"", *dummy, "--dummy-quant", "int3")
refused(2, "bf16 is not quantised", *dummy, "--dummy-quant", "none")
refused(2, "--dummy-tp: only with --load-format dummy", bare, "-p", "And", "--dummy-tp", "2")
refused(3, "config.json", TMP, "-p", "And", "--load-format", "dummy")
