#!/usr/bin/env python3
"""A DFlash or EAGLE-3 draft next to a packed checkpoint: --draft packs it as stored or with --draft-quant quantised, minimax-verify holds it to its digest and to the model, a packed
source hands it on, and replies of a server that proposes by it are those without. Drafts that do not fit are refused by name.

convert_draft.py RANKS: only replies of servers with so many ranks, next to a draft of each kind; DEVICES names the GPU of each rank."""
import bisect
import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))
from serve_client import Server  # noqa: E402

BIN = os.environ["BUILD"] + "/bin/"
with open("tests/data/tiny-m2/config.json", encoding="utf-8") as config_file:
    TARGET = json.load(config_file)
H, HEADS, KV, D, I, LAYERS = TARGET["hidden_size"], 4, 2, 32, 48, 2
CONFIG = {"num_hidden_layers": LAYERS, "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D,
          "intermediate_size": I, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "block_size": 8, "hidden_act": "silu", "sliding_window": 32,
          "layer_types": ["sliding_attention", "full_attention"],
          "dflash_config": {"target_layer_ids": [0, TARGET["num_hidden_layers"] - 2], "mask_token_id": 5}}
RANDOM = random.Random(1)
DEVICE = ("--device", os.environ["DEVICE"], "--batch-invariant") if "DEVICE" in os.environ else ()


def shapes():
    yield from (("fc.weight", (H, 2 * H)), ("hidden_norm.weight", (H,)), ("norm.weight", (H,)))
    for at in range(LAYERS):
        for name, shape in (("input_layernorm", (H,)), ("post_attention_layernorm", (H,)), ("self_attn.q_proj", (HEADS * D, H)),
                            ("self_attn.k_proj", (KV * D, H)), ("self_attn.v_proj", (KV * D, H)), ("self_attn.o_proj", (H, HEADS * D)),
                            ("self_attn.q_norm", (D,)), ("self_attn.k_norm", (D,)), ("mlp.gate_proj", (I, H)), ("mlp.up_proj", (I, H)),
                            ("mlp.down_proj", (H, I))):
            yield f"layers.{at}.{name}.weight", shape


def bf16(n, vector):
    """Random numbers, of which no two tensors have the same."""
    numbers = [(1 if vector else 0) + RANDOM.uniform(-0.3, 0.3) for _ in range(n)]
    return b"".join(struct.pack("<f", x)[2:] for x in numbers)


def save(path, config, tensors, types=None):
    os.makedirs(path)
    head, data = {}, b""
    for name, (shape, raw) in tensors.items():
        head[name] = {"dtype": {"d2t": "I64", "t2d": "BOOL", **(types or {})}.get(name, "BF16"), "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    with open(path + "/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    with open(path + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)
    return path


def weights():
    tensors = {name: (shape, bf16(shape[0] * (shape[1] if len(shape) > 1 else 1), len(shape) == 1)) for name, shape in shapes()}
    return {**tensors, "lm_head.weight": ((VOCAB, H), bytes(2 * VOCAB * H))}


VOCAB, DRAFT_VOCAB = TARGET["vocab_size"], 300
EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": H, "target_hidden_size": H, "num_attention_heads": HEADS,
         "num_key_value_heads": KV, "head_dim": D, "intermediate_size": I, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "vocab_size": VOCAB,
         "draft_vocab_size": DRAFT_VOCAB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}


def eagle_weights(steps):
    """As SpecForge names them; head id i is the model's i + steps[i]."""
    names = {"fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (len(steps), H)}
    for name, shape in (("input_layernorm", (H,)), ("hidden_norm", (H,)), ("post_attention_layernorm", (H,)), ("self_attn.q_proj", (HEADS * D, 2 * H)),
                        ("self_attn.k_proj", (KV * D, 2 * H)), ("self_attn.v_proj", (KV * D, 2 * H)), ("self_attn.o_proj", (H, HEADS * D)),
                        ("mlp.gate_proj", (I, H)), ("mlp.up_proj", (I, H)), ("mlp.down_proj", (H, I))):
        names[f"midlayer.{name}.weight"] = shape
    tensors = {name: (shape, bf16(shape[0] * (shape[1] if len(shape) > 1 else 1), len(shape) == 1)) for name, shape in names.items()}
    named = {i + step for i, step in enumerate(steps)}
    return {**tensors, "d2t": ((len(steps),), struct.pack(f"<{len(steps)}q", *steps)), "t2d": ((VOCAB,), bytes(i in named for i in range(VOCAB)))}


def run(program, *args):
    r = subprocess.run([BIN + "minimax-" + program, *args], capture_output=True, text=True, check=False, timeout=60)
    return r.returncode, r.stderr


def refused(code, status, program, *args):
    got = run(program, *args)
    assert got[0] == status and code in got[1], (args, got)


def stored(path):
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        head = json.loads(f.read(size))
        data = f.read()
    return {k: (v["shape"], data[slice(*v["data_offsets"])]) for k, v in head.items() if k != "__metadata__"}


def fused(tensors, at, *names):
    return b"".join(tensors[f"layers.{at}.{n}.weight"][1] for n in names)


def packed(tmp, draft, tensors):
    """The file has the source's bytes; a changed one is found, and so is a draft of another model."""
    out = tmp + "/packed"
    assert run("convert", "tests/data/tiny-m2", "-o", out, "--draft", draft, "-q") == (0, "")
    assert run("verify", out, "-q")[0] == 0
    status, said = run("convert", "tests/data/tiny-m2", "-o", draft + "/x", "--draft", draft, "-q")
    assert status == 2 and "E_OUTPUT" in said and "inside a checkpoint" in said and not os.path.exists(draft + "/x"), (status, said)
    os.makedirs(draft + "/sub/deeper")
    os.symlink(draft + "/sub", tmp + "/sub")
    for inside in (draft + "/sub/x", draft + "/sub/deeper/x", tmp + "/sub/x"):
        for way in ([], ["--dry-run"]):
            status, said = run("convert", "tests/data/tiny-m2", "-o", inside, "--draft", draft, "-q", *way)
            assert status == 2 and "E_OUTPUT" in said and "lies in the draft" in said and not os.path.exists(inside), (status, said)
    os.remove(tmp + "/sub")
    os.removedirs(draft + "/sub/deeper")
    found = stored(out + "/draft.safetensors")
    assert len(found) == 3 + 8 * LAYERS and found["fc.weight"] == ([H, 2 * H], tensors["fc.weight"][1])
    for at in range(LAYERS):
        assert found[f"layers.{at}.self_attn.qkv_proj.weight"][1] == fused(tensors, at, *(f"self_attn.{x}_proj" for x in "qkv"))
        assert found[f"layers.{at}.mlp.gate_up_proj.weight"][1] == fused(tensors, at, "mlp.gate_proj", "mlp.up_proj")
    assert run("convert", out, "-o", tmp + "/again", "--tp", "2", "-q") == (0, "")
    with open(out + "/draft.safetensors", "rb") as a, open(tmp + "/again/draft.safetensors", "rb") as b:
        assert a.read() == b.read()
    assert run("convert", out, "-o", tmp + "/stages", "--pp", "2", "-q") == (0, "")
    refused("E_PARALLEL", 4, "serve", tmp + "/stages", "--drafts", "7", "--port", "0")
    served(tmp + "/again", *(("--devices", os.environ.get("DEVICES", "0,0")) if DEVICE else ()))
    with open(tmp + "/again/draft.safetensors", "r+b") as f:
        f.seek(-1, 2)
        last = f.read(1)[0]
        f.seek(-1, 2)
        f.write(bytes([last ^ 1]))
    refused("E_DIGEST", 6, "verify", tmp + "/again")
    refused("E_DIGEST", 6, "serve", tmp + "/again", "--drafts", "7", "--port", "0", "--verify-on-load", *DEVICE)
    return out


def misfits(tmp, tensors):
    flash = CONFIG["dflash_config"]
    cases = [({"hidden_size": H + 1}, "E_DRAFT", 3), *(({"vocab_size": v}, "E_DRAFT", 3) for v in (VOCAB + 1, 0, "many")), ({"hidden_act": "gelu"}, "E_DRAFT", 4), ({"rope_scaling": {"factor": 2}}, "E_DRAFT", 4),
             ({"dflash_config": {**flash, "target_layer_ids": [1, TARGET["num_hidden_layers"] - 1]}}, "E_DRAFT", 3),
             ({"dflash_config": {**flash, "mask_token_id": TARGET["vocab_size"]}}, "E_DRAFT", 3), ({"intermediate_size": I - 1}, "E_DRAFT", 3),
             ({"rope_parameters": {"rope_theta": 5}}, "E_CFG_RANGE", 3), ({"rope_parameters": {"rope_type": "yarn"}}, "E_CFG_FEATURE", 4),
             ({"rope_parameters": {"factor": 2}}, "E_CFG_FEATURE", 4), ({"partial_rotary_factor": 0.5}, "E_CFG_FEATURE", 4),
             ({"layer_types": ["full_attention"]}, "E_DRAFT", 3), ({"layer_types": ["full_attention", 0]}, "E_DRAFT", 4),
             ({"hidden_act": 1}, "E_DRAFT", 4), ({"attention_bias": "true"}, "E_DRAFT", 4),
             ({"is_causal": True, "dflash_config": {**flash, "causal": False}}, "E_DRAFT", 3),
             ({"dflash_config": {**flash, "swa_window_size": 31}}, "E_DRAFT", 3), ({"is_causal": 1}, "E_DRAFT", 3),
             ({"dflash_config": {**flash, "swa_window_size": "32"}}, "E_DRAFT", 3),
             ({"dflash_config": {"mask_token_id": 5}}, "E_DRAFT", 4), ({"num_hidden_layers": LAYERS - 1, "layer_types": ["full_attention"]}, "E_DRAFT", 3)]
    for i, (change, code, status) in enumerate(cases):
        refused(code, status, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft", save(f"{tmp}/bad{i}", {**CONFIG, **change}, tensors), "--dry-run")
    q, k = (f"layers.0.self_attn.{x}_proj.weight" for x in "qk")
    refused(q, 3, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft", save(tmp + "/rows", CONFIG, {**tensors, q: tensors[k], k: tensors[q]}), "--dry-run")
    shape, data = tensors[k]
    wide = {**tensors, k: (shape, bytes(2 * len(data)))}
    for i, (given, types, says) in enumerate(((tensors, {q: "F16"}, f'"{q}": found weights of F16, expected BF16 or F32\n'),
                                              (wide, {k: "F32"}, f'"{k}": found weights of F32, expected BF16 as in "{q}", with which they are joined\n'),
                                              ({**tensors, q: tensors["norm.weight"]}, {}, f'"{q}": found shape [{H}], expected [{HEADS * D}, {H}] as in the config\n'))):
        refused(says, 3, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft", save(f"{tmp}/typed{i}", CONFIG, given, types), "--dry-run")
    refused("E_USAGE", 2, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft", tmp + "/draft", "--layout", "hf", "--dry-run")
    for name, says in (("lm_head.weight", "found BF16 [2, 3], expected BF16 or F32"), ("lm_head.bias", "found a tensor that such a draft does not have")):
        refused(f'"{name}": {says}', 3, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft",
                save(f"{tmp}/{name}", CONFIG, {**tensors, name: ((2, 3), bytes(12))}), "--dry-run")


def finished(tmp, draft, tensors):
    """--resume over a finished output is done only if its draft is the one that is wanted."""
    out, source = tmp + "/finished", "tests/data/tiny-m2"
    other = save(tmp + "/other", CONFIG, {**tensors, "norm.weight": ((H,), bf16(H, True))})
    for made, wanted in ((None, draft), (draft, other), (draft, None), (draft, draft), (None, None)):
        assert run("convert", source, "-o", out, "--force", "-q", *(["--draft", made] if made else []))[0] == 0
        again = ("convert", source, "-o", out, "--resume", *(["--draft", wanted] if wanted else []))
        if made == wanted:
            assert run(*again)[0] == 0
        else:
            refused("E_RESUME", 2, *again)
    shutil.rmtree(out)
    assert run("convert", source, "-o", out, "--draft", draft, "--part", "0/2", "-q")[0] == 0
    for wanted in (other, None):  # what is begun, too
        named = ("convert", source, "-o", out, *(["--draft", wanted] if wanted else []))
        refused("--draft", 2, *named, "--part", "1/2")
        refused("--draft", 2, *named, "--resume")
    assert run("convert", source, "-o", out, "--draft", draft, "--resume", "-q")[0] == 0


def no_room(tmp, draft):
    """Free space that the weights have, but not the draft or the tokenizer, is found before anything is written."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0:
        print("no_room: not run: needs unshare -rm")
        return
    out = tmp + "/packed/"
    weights_alone = sum(os.path.getsize(out + x) for x in os.listdir(out) if x.startswith("model-")) // 4096 + 64
    assert os.path.getsize(out + "draft.safetensors") > 64 * 4096 * 2
    os.makedirs(tmp + "/small")
    made = "mount -t tmpfs -o size=$1 none $2/small && $3 tests/data/tiny-m2 -o $2/small/o --draft $4 -q; got=$?; ls -A $2/small; exit $got"
    r = subprocess.run(["unshare", "-rm", "sh", "-c", made, "sh", str(weights_alone * 4096), tmp, BIN + "minimax-convert", draft], capture_output=True, text=True, check=False, timeout=60)
    assert r.returncode == 5 and "E_SPACE" in r.stderr and not r.stdout, r
    archive, unpack = tmp + "/archive", "mount -t tmpfs -o size=$1 none $2/small && $3 unpack $2/archive -o $2/small/o -q; got=$?; ls -A $2/small; exit $got"
    assert run("archive", "pack", out, "-o", archive, "-q")[0] == 0
    for size, status in ((weights_alone, 5), (weights_alone + os.path.getsize(out + "draft.safetensors") // 4096 + 512, 0)):
        r = subprocess.run(["unshare", "-rm", "sh", "-c", unpack, "sh", str(size * 4096), tmp, BIN + "minimax-archive"], capture_output=True, text=True, check=False, timeout=60)
        assert r.returncode == status and ("E_SPACE" in r.stderr) == (status == 5) and r.stdout == ("" if status else "o\n"), r
    shutil.rmtree(archive)
    tokenizer = os.path.getsize("tests/data/tiny-m2/tokenizer.json") // 4096
    assert tokenizer > 24
    for more, status in ((-64 + 12, 5), (-64 + 4 * tokenizer, 0)):  # pages behind those of the weights
        r = subprocess.run(["unshare", "-rm", "sh", "-c", made.replace(" --draft $4", ""), "sh", str((weights_alone + more) * 4096), tmp, BIN + "minimax-convert"], capture_output=True, text=True, check=False, timeout=60)
        assert r.returncode == status and ("E_SPACE" in r.stderr) == (status == 5) and r.stdout == ("" if status else "o\n"), (more, r)


def no_room_again(tmp):
    """A run that failed as it published has staged all its files: --resume wants no space for them again, be they an archive's."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0:
        print("no_room_again: not run: needs unshare -rm")
        return
    os.makedirs(tmp + "/full_disk")
    script = """mount -t tmpfs -o size=64m none $1/full_disk && cd $1/full_disk || exit 9
    $2 "$3" -o o -q -j 1 $4 & run=$!
    until [ -d .o.partial ]; do kill -0 $run || exit 8; done
    mkdir o && touch o/strange || exit 8 # a run does not replace it
    wait $run
    [ $? -eq 5 ] && ls .o.partial/tokenizer.json >/dev/null || exit 7
    rm -r o
    head -c 64m /dev/zero >fill 2>/dev/null
    truncate -s -64K fill
    exec $2 "$3" -o o -q $4 --resume"""
    for more in ("", "--compress zstd"):
        for _ in range(5):  # until the directory came in time
            r = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", tmp, os.path.abspath(BIN) + "/minimax-convert", os.path.abspath("tests/data/tiny-m2"), more],
                               capture_output=True, text=True, check=False, timeout=120)
            if r.returncode != 8:
                break
        assert r.returncode == 0, (more, r)
    # An archive's part that is damaged is made again, for which there must be room.
    again = script[:script.rindex("    exec")] + """    for f in .o.partial/*.zst; do printf x | dd of=$f bs=1 seek=5000 conv=notrunc 2>/dev/null; done
    $2 "$3" -o o -q $4 --resume; [ $? -eq 5 ] || exit 6
    rm fill
    exec $2 "$3" -o o -q $4 --resume"""
    for _ in range(5):
        r = subprocess.run(["unshare", "-rm", "sh", "-c", again, "sh", tmp, os.path.abspath(BIN) + "/minimax-convert", os.path.abspath("tests/data/tiny-m2"), "--compress zstd"],
                           capture_output=True, text=True, check=False, timeout=120)
        if r.returncode != 8:
            break
    assert r.returncode == 0 and "E_SPACE" in r.stderr and "No space left" not in r.stderr, r


def changing(folder, tensors):
    """A draft that changes while the model is converted, here as the run waits for tokenizer.json, is not packed."""
    source, draft = folder + "/came", save(folder + "/changing", CONFIG, tensors)
    shutil.copytree("tests/data/tiny-m2", source)
    os.remove(source + "/tokenizer.json")
    with subprocess.Popen([BIN + "minimax-convert", source, "-o", folder + "/changed", "--draft", draft, "--follow", "--follow-quiet", "0"], stderr=subprocess.PIPE, text=True) as p:
        for _ in range(200):
            if os.path.exists(folder + "/.changed.partial"):
                break
            time.sleep(0.05)
        with open(draft + "/model.safetensors", "r+b") as f:
            f.seek(-2 * VOCAB * H - 1, 2)  # before lm_head.weight, which is not packed
            f.write(b"\0")
        shutil.copy("tests/data/tiny-m2/tokenizer.json", source)
        said = p.communicate(timeout=60)[1]
    assert p.returncode == 5 and "E_CHANGED" in said, said


def exact(folder, tensors):
    """NaN is refused, or zeroed and counted, as in the model; --source compares drafts; --layout hf says that it leaves one out."""
    source, name = "tests/data/tiny-m2", "layers.1.mlp.up_proj.weight"
    shape, raw = tensors[name]
    for i, x in enumerate((b"\x80\x7f", b"\xc1\xff")):  # infinity, NaN
        wrong = save(f"{folder}/nan{i}", CONFIG, {**tensors, name: (shape, raw[:6] + x + raw[8:]), "lm_head.weight": ((VOCAB, H), x * (VOCAB * H))})
        refused("E_NONFINITE", 3, "convert", source, "-o", folder + "/no", "--draft", wrong)
    said = run("convert", source, "-o", folder + "/zeroed", "--draft", wrong, "--allow-nonfinite")
    assert said[0] == 0 and "1 weights were NaN or infinite" in said[1], said
    assert fused(tensors, 1, "mlp.gate_proj") + raw[:6] + b"\0\0" + raw[8:] == stored(folder + "/zeroed/draft.safetensors")["layers.1.mlp.gate_up_proj.weight"][1]
    made, other = folder + "/exact", folder + "/exact-other"
    for out, draft in ((made, folder + "/draft"), (other, folder + "/other")):
        assert run("convert", source, "-o", out, "--draft", draft, "-q", "--force")[0] == 0
    assert run("convert", made, "-o", folder + "/exact-2", "--tp", "2", "-q")[0] == 0
    for of, draft, status in ((made, None, 0), (other, None, 6), (source, None, 0), (source, folder + "/draft", 0), (source, folder + "/other", 6), (other, folder + "/draft", 0)):
        found = run("verify", folder + "/exact-2", "--source", of, *(["--draft", draft] if draft else []))
        assert found[0] == status and ("E_SOURCE" in found[1]) == (status == 6) and ("draft is not compared" in found[1]) == (of == source and not draft), found
    assert run("verify", folder + "/zeroed", "--source", source, "--draft", wrong, "-q")[0] == 0
    refused("E_USAGE", 2, "verify", made, "--draft", folder + "/draft")
    path = other + "/draft.safetensors"  # as a version that looked at no numbers packed it
    with open(path, "rb") as f:
        old = f.read()
    for fresh, code in ((old[:-2] + b"\x80\x7f", "E_NONFINITE"), (old.replace(rb'{\"kind', rb'[\"kind', 1), "E_JSON")):
        rewritten(other, lambda _, fresh=fresh: fresh)
        refused(code, 6, "verify", other)
    said = run("convert", made, "-o", folder + "/hf", "--layout", "hf")
    assert said[0] == 0 and "the draft of the source" in said[1], said


def agree(s, prompt, **more):
    """The reply with proposals, which is that without."""
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, **more}
    plain, drafted = (s.post("/v1/completions", {**body, "speculative": x}) for x in (False, True))
    assert plain["choices"] == drafted["choices"], (plain, drafted)
    return plain["choices"]


def served(out, *options):
    """Greedy and drawn, with penalties and logprobs; on a GPU, where a row's bits depend on its step, for rows that do not."""
    with Server(out, "--max-model-len", "256", "--drafts", "7", "-t", "1", *DEVICE, *options) as s:
        for more in ({"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "logprobs": 2}):
            agree(s, "In the beginning", **more)
        # A server soon finds that this draft does not pay, and tries it now and then.
        assert s.metrics()["draft_model_tokens_total"] > 0, options


def evicted(out):
    """Three prompts of more than half of the pages, in turn: pages with cells of the draft come back from host memory."""
    with Server(out, "--kv-cache-tokens", "192", "--max-model-len", "160", "--max-num-seqs", "1", "--kv-offload", "64M", "--drafts", "7", "-t", "1", *DEVICE) as s:
        texts = [[first] + [3 + (i * i + 5 * i) % 200 for i in range(99)] for first in (5, 6, 7)]
        first, again = ([agree(s, t, temperature=1, seed=3, logprobs=2) for t in texts] for _ in range(2))
        found = s.metrics()
        assert first == again and found["offload_hits_total"] > 0 and found["draft_model_tokens_total"] > 0, found


def by_default(out, tmp):
    """A server that was not asked for proposals uses the draft where this run can have it, else says why not; it starts in any case."""
    def said(packed, *options):
        with Server(packed, "--max-model-len", "256", "-t", "1", *options) as s:
            agree(s, "In the beginning", temperature=0)
            assert (s.metrics()["draft_model_tokens_total"] > 0) == ("and the checkpoint's draft" in open(s.log).read()), packed
            return open(s.log).read()

    log = said(out, *DEVICE)
    assert "proposals: up to 7 tokens" in log and "by prompt lookup and the checkpoint's draft" in log and "left out" not in log, log
    log = said(out, "--kv-listen", "127.0.0.1:0", "--kv-offload", "64M", *DEVICE)
    assert "draft is left out: E_DRAFT" in log and "proposals: up to 7 tokens" in log, log
    assert "proposals" not in (log := said(out, "--drafts", "0", *DEVICE)) and "left out" not in log, log
    log = said(tmp + "/again", "--verify-on-load", *(DEVICE and (*DEVICE, "--devices", os.environ.get("DEVICES", "0,0"))))  # whose draft is damaged
    assert "draft is left out: E_DIGEST" in log and "proposals: up to 7 tokens" in log, log
    if DEVICE:
        return
    assert "draft is left out: E_PARALLEL" in (log := said(tmp + "/stages")) and "by prompt lookup\n" in log, log
    assert run("convert", out, "-o", tmp + "/halves", "--tp", "2", "--attn-tp", "1", "-q") == (0, "")
    assert "draft is left out: E_PARALLEL" in (log := said(tmp + "/halves", "--dp", "2")) and "by prompt lookup\n" in log, log
    # Memory for a sequence, but not for the draft's cells too.
    given = ("serve", out, "--check", "--max-model-len", "256", "-t", "1", "--gpu-memory-utilization")
    page, ram = (int(run(*given, "1e-9", "--drafts", "0")[1].split(word)[at].split()[0].strip(",")) for word, at in ((" needs ", 1), ("bytes free of ", 1)))
    small = ("--gpu-memory-utilization", repr((page + 1000) / ram))
    refused("E_MEMORY", 8, *given, small[1], "--drafts", "7")
    assert "no tokens are proposed: memory for that" in (log := said(out, *small)) and "proposals: up to" not in log, log


def renamed(out):
    """What the file says of itself in other words: none of a type that is not known is taken for another."""
    path = out + "/draft.safetensors"
    with open(path, "rb") as f:
        good = f.read()
    for old, new, status in ((b"[true,false]", b"[true,    0]", 6), (b"dflash", b"eagle4", 4)):
        assert old in good, old
        with open(path, "wb") as f:
            f.write(good.replace(old, new))
        refused("E_DRAFT", status, "serve", out, "--drafts", "7", "--port", "0", *DEVICE)
    with Server(out, "--max-model-len", "256", "-t", "1", *DEVICE) as s:
        assert "draft is left out: E_DRAFT" in open(s.log).read()
    os.remove(path)  # which the manifest lists
    refused("E_FS_MISSING", 6, "serve", out, "--drafts", "7", "--port", "0", *DEVICE)
    os.mkdir(path)
    refused("E_FS_TYPE", 6, "serve", out, "--drafts", "7", "--port", "0", *DEVICE)
    os.rmdir(path)
    with open(path, "wb") as f:
        f.write(good)


def held(out, socket):
    """Weights that another process holds; the draft's are the server's own."""
    with subprocess.Popen([BIN + "minimax-hold", out, socket, "--device", "cuda", "-q"]) as holder:
        for _ in range(600):
            if os.path.exists(socket) or holder.poll() is not None:
                break
            time.sleep(0.1)
        served(out, "--attach", socket)
        holder.terminate()
    assert holder.returncode == 0, holder.returncode


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


E4M3 = [(code % 8 if code < 8 else 8 + code % 8) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)]


def code_of(x):
    """The nearest code, of two as near the even one."""
    m = abs(x)
    at = min(bisect.bisect_left(E4M3, m), 126)
    if at and (m - E4M3[at - 1] < E4M3[at] - m or (m - E4M3[at - 1] == E4M3[at] - m and at % 2)):
        at -= 1
    return at | (128 if x < 0 else 0)


def block_fp8(shape, raw):
    """Codes and scales of a BF16 matrix by the formula of docs/quantisation.md: amax / 448 of each block of 128 x 128."""
    n, k = shape
    w = [f32(struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0]) for i in range(0, len(raw), 2)]
    scales = [f32(max(abs(w[r * k + c]) for r in range(at, min(at + 128, n)) for c in range(col, min(col + 128, k))) / 448) for at in range(0, n, 128) for col in range(0, k, 128)]
    across = (k + 127) // 128
    codes = bytes(code_of(f32(w[r * k + c] / scales[r // 128 * across + c // 128])) for r in range(n) for c in range(k))
    return codes, struct.pack(f"<{len(scales)}f", *scales)


def rewritten(out, change):
    """The draft with other bytes, under a manifest that has their digest."""
    path = out + "/draft.safetensors"
    with open(path, "rb") as f:
        old = f.read()
    new = change(old)
    with open(path, "wb") as f:
        f.write(new)
    with open(out + "/manifest.json", "r+b") as f:
        text = f.read()[:-78].replace(*(hashlib.sha256(x).hexdigest().encode() for x in (old, new)))
        f.seek(0)
        f.write(text + f'"sha256":"{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode())


def quantised(tmp, draft, tensors):
    """--draft-quant: the bytes of the formula; what verifies, is handed on, requantised, resumed and refused; replies are those without."""
    out, source = tmp + "/fp8", "tests/data/tiny-m2"
    pack = lambda to, *args: run("convert", *args, "-o", to, "-q")
    same = lambda a, b: stored(a + "/draft.safetensors") == stored(b + "/draft.safetensors")
    said = subprocess.run([BIN + "minimax-convert", source, "--draft", draft, "--draft-quant", "block_fp8", "--dry-run", "--json"], capture_output=True, text=True, check=True, timeout=60)
    assert pack(out, source, "--draft", draft, "--draft-quant", "block_fp8") == (0, "")
    assert json.loads(said.stdout)["draft"] == {"kind": "dflash", "quant": "block_fp8", "bytes": os.path.getsize(out + "/draft.safetensors")}, said.stdout
    found, plain = stored(out + "/draft.safetensors"), stored(tmp + "/packed/draft.safetensors")
    for name, (shape, raw) in plain.items():
        if len(shape) == 1:
            assert found.pop(name) == (shape, raw), name
            continue
        codes, scales = block_fp8(shape, raw)
        assert found.pop(name) == (shape, codes), name
        assert found.pop(name + "_scale_inv") == ([(x + 127) // 128 for x in shape], scales), name
    assert not found, found
    with open(out + "/draft.safetensors", "rb") as f:
        assert b'\\"quant\\":\\"block_fp8\\"' in f.read(8192)
    assert run("verify", out, "-q")[0] == 0
    for of, other, status in ((draft, None, 0), (tmp + "/other", None, 6), (None, out, 0), (None, tmp + "/packed", 0)):
        got = run("verify", out, "--source", other or source, *(["--draft", of] if of else []), "-q")
        assert got[0] == status and ("E_SOURCE" in got[1]) == (status == 6), (of, other, got)
    for blanks in (1, 2):  # a header of any length: numbers lie at odd bytes, too
        shutil.copytree(draft, f"{tmp}/longer{blanks}")
        with open(f"{tmp}/longer{blanks}/model.safetensors", "r+b") as f:
            size, whole = struct.unpack("<Q", f.read(8))[0], f.read()
            f.seek(0)
            f.write(struct.pack("<Q", size + blanks) + whole[:size] + b" " * blanks + whole[size:])
        assert pack(f"{tmp}/fp8-longer{blanks}", source, "--draft", f"{tmp}/longer{blanks}", "--draft-quant", "block_fp8") == (0, "") and same(f"{tmp}/fp8-longer{blanks}", out)
    # Handed on, and what is quantised of a packed source: its numbers, once more if they are codes already.
    for i, (of, args) in enumerate(((out, ()), (out, ("--draft-quant", "block_fp8")), (out, ("--draft-quant", "none")), (tmp + "/packed", ("--draft-quant", "block_fp8")))):
        assert pack(f"{tmp}/fp8-{i}", of, "--tp", "2", *args) == (0, "") and same(f"{tmp}/fp8-{i}", out), args
    assert pack(tmp + "/channels", out, "--draft-quant", "channel_fp8") == (0, "") and run("verify", tmp + "/channels", "--source", out, "-q")[0] == 0
    rows = stored(tmp + "/channels/draft.safetensors")
    assert rows["fc.weight_scale"][0] == [H, 1] and not same(tmp + "/channels", out) and run("verify", tmp + "/channels", "--source", tmp + "/packed", "-q")[0] == 6
    # Another scheme than what was begun or finished.
    named = ("convert", source, "-o", out, "--draft", draft, "--resume")
    assert run(*named, "--draft-quant", "block_fp8")[0] == 0
    for args in ((), ("--draft-quant", "none"), ("--draft-quant", "channel_fp8")):
        refused("E_RESUME", 2, *named, *args)
    begun = ("convert", source, "-o", tmp + "/begun", "--draft", draft)
    assert run(*begun, "--draft-quant", "block_fp8", "--part", "0/2", "-q")[0] == 0
    refused("--draft-quant", 2, *begun, "--resume")
    assert run(*begun, "--draft-quant", "block_fp8", "--resume", "-q")[0] == 0 and same(tmp + "/begun", out)
    # Without a draft, for files that have none, and shapes that do not fit.
    refused("E_USAGE", 2, "convert", source, "-o", tmp + "/no", "--draft-quant", "block_fp8", "--dry-run")
    refused("E_USAGE", 2, "convert", out, "-o", tmp + "/no", "--draft-quant", "block_fp8", "--layout", "hf", "--dry-run")
    for name, change, shape in (("odd", {"intermediate_size": 44}, lambda n, s: (44, H) if "gate" in n or "up_proj" in n else (H, 44) if "down" in n else s),
                                ("heads", {"num_attention_heads": 2}, lambda n, s: (64, H) if "q_proj" in n else (H, 64) if "o_proj" in n else s)):
        other = {n: (shape(n, s), bf16(shape(n, s)[0] * (shape(n, s)[1] if len(s) > 1 else 1), len(s) == 1)) for n, s in shapes()}
        named = ("convert", source, "-o", tmp + "/no", "--dry-run", "--draft", save(f"{tmp}/misfit-{name}", {**CONFIG, **change}, other))
        refused('layers.0.mlp.down_proj.weight": found 44 columns' if name == "odd" else 'layers.0.self_attn.qkv_proj.weight": found 64 rows of queries', 4, *named, "--draft-quant", "block_fp8")
        assert run(*named)[0] == 0
    # Numbers that are none.
    name = "layers.1.mlp.up_proj.weight"
    wrong = save(tmp + "/fp8-nan", CONFIG, {**tensors, name: (tensors[name][0], b"\xc1\xff" + tensors[name][1][2:])})
    refused("E_NONFINITE", 3, "convert", source, "-o", tmp + "/no", "--draft", wrong, "--draft-quant", "block_fp8")
    assert pack(tmp + "/fp8-zero", source, "--draft", wrong, "--draft-quant", "block_fp8", "--allow-nonfinite")[0] == 0
    assert stored(tmp + "/fp8-zero/draft.safetensors")["layers.1.mlp.gate_up_proj.weight"][1][I * H] == 0
    served(tmp + "/fp8-0", *(("--devices", os.environ.get("DEVICES", "0,0")) if DEVICE else ()))
    served(tmp + "/channels")
    with Server(out, "--max-model-len", "256", "--drafts", "7", "-t", "1", *DEVICE) as a, Server(tmp + "/packed", "--max-model-len", "256", "--drafts", "7", "-t", "1", *DEVICE) as b:
        assert [agree(s, "In the beginning", temperature=0) for s in (a,)] == [agree(s, "In the beginning", temperature=0) for s in (b,)]
    # Damage: a code that is no number, a scale that is none, a scheme that is not known.
    last = len(struct.pack("<f", 1)) * len(stored(out + "/draft.safetensors")[f"layers.{LAYERS - 1}.mlp.down_proj.weight_scale_inv"][1]) // 4
    rewritten(out, lambda x: x[:-last - 1] + b"\x7f" + x[-last:])
    refused("E_NONFINITE", 6, "verify", out)
    rewritten(out, lambda x: x[:-last - 1] + b"\x01" + x[-last:-4] + struct.pack("<f", -1))
    refused("E_SCALE", 6, "verify", out)
    rewritten(out, lambda x: x.replace(b"block_fp8", b"block_fp9"))
    refused("block_fp9", 4, "serve", out, "--drafts", "7", "--port", "0", *DEVICE)


def eagle(tmp):
    """An EAGLE-3 draft, whole and next to cut weights; what does not fit."""
    steps = [i // 2 for i in range(DRAFT_VOCAB)]
    tensors, out = eagle_weights(steps), tmp + "/eagle-packed"
    assert run("convert", "tests/data/tiny-m2", "-o", out, "--draft", save(tmp + "/eagle", EAGLE, tensors), "-q") == (0, "")
    assert run("verify", out, "-q")[0] == 0
    found = stored(out + "/draft.safetensors")
    assert len(found) == 11 and found["d2t"] == ([DRAFT_VOCAB], tensors["d2t"][1]) and found["lm_head.weight"][1] == tensors["lm_head.weight"][1]
    assert found["hidden_norm.weight"][1] == tensors["midlayer.hidden_norm.weight"][1]
    assert found["layers.0.self_attn.qkv_proj.weight"] == ([(HEADS + 2 * KV) * D, 2 * H], b"".join(tensors[f"midlayer.self_attn.{x}_proj.weight"][1] for x in "qkv"))
    served(out, "--max-num-seqs", "2")
    assert run("convert", out, "-o", tmp + "/eagle-2", "--tp", "2", "-q") == (0, "")
    served(tmp + "/eagle-2", *(("--devices", os.environ.get("DEVICES", "0,0")) if DEVICE else ()))
    assert run("convert", out, "-o", tmp + "/eagle-fp8", "--tp", "2", "--draft-quant", "block_fp8", "-q") == (0, "")
    codes = stored(tmp + "/eagle-fp8/draft.safetensors")
    assert all(codes[x] == found[x] for x in ("d2t", "lm_head.weight", "hidden_norm.weight")) and len(codes) == 16
    served(tmp + "/eagle-fp8", *(("--devices", os.environ.get("DEVICES", "0,0")) if DEVICE else ()))
    if DEVICE:
        evicted(out)
    config = EAGLE["eagle_config"]
    cases = [({"num_hidden_layers": 2}, {}, 4), ({"draft_vocab_size": VOCAB + 1}, {}, 3), ({"draft_vocab_size": DRAFT_VOCAB - 1}, {}, 3), ({"vocab_size": VOCAB + 64}, {}, 3),
             ({"attention_bias": True}, {}, 4), ({"eagle_config": {**config, "use_aux_hidden_state": False}}, {}, 4), ({"target_hidden_size": H + 1}, {}, 4),
             ({"eagle_config": {}}, {}, 4), ({"eagle_config": [0, 1, 2]}, {}, 3), ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, {}, 4), ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, {}, 3), ({"norm_before_residual": 1}, {}, 3),
             ({}, {"d2t": None}, 3), ({}, {"d2t": eagle_weights([VOCAB] * DRAFT_VOCAB)["d2t"]}, 3), ({}, {"d2t": ((DRAFT_VOCAB - 1,), tensors["d2t"][1][8:])}, 3),
             ({}, {"t2d": ((VOCAB,), bytes(5) + b"\1" + bytes(VOCAB - 6))}, 3), ({}, {"t2d": ((VOCAB - 1,), tensors["t2d"][1][1:])}, 3),
             ({}, {"midlayer.hidden_norm.weight": None}, 3), ({}, {"more.weight": ((H,), bf16(H, True))}, 3)]
    for i, (change, other, status) in enumerate(cases):
        changed = {k: v for k, v in {**tensors, **other}.items() if v}
        refused("E_DRAFT", status, "convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--draft", save(f"{tmp}/no-eagle{i}", {**EAGLE, **change}, changed), "--dry-run")
    masks(tmp, tensors)


def cut(tmp, ranks):
    """A draft of each kind next to weights that are cut for so many ranks."""
    devices = ("--devices", os.environ["DEVICES"]) if DEVICE else ()
    flash, chain = save(tmp + "/draft", CONFIG, weights()), save(tmp + "/eagle", EAGLE, eagle_weights([i // 2 for i in range(DRAFT_VOCAB)]))
    for draft in (flash, chain):
        assert run("convert", "tests/data/tiny-m2", "-o", draft + "-cut", "--tp", ranks, "--draft", draft, "-q") == (0, "")
        served(draft + "-cut", *devices)


def masks(tmp, tensors):
    """t2d without d2t: a head of all ids has them in their order, so that t2d marks all; which ids one of some has, and in which order, nothing says."""
    pack = lambda name, change, t: ("convert", "tests/data/tiny-m2", "-o", tmp + "/no", "--dry-run", "--draft", save(tmp + name, {**EAGLE, **change}, {k: v for k, v in t.items() if v}))
    for i, mask in enumerate((tensors["t2d"], None)):
        refused("a head of 300 of 2048 ids without d2t", 3, *pack(f"/head{i}", {}, {**tensors, "d2t": None, "t2d": mask}))
    every = {"draft_vocab_size": VOCAB}
    full = eagle_weights([0] * VOCAB)
    for i, steps in enumerate((full["d2t"], None)):
        assert run(*pack(f"/whole{i}", every, {**full, "d2t": steps}))[0] == 0
        refused('"t2d": found 0 at id 9, expected 1', 3, *pack(f"/hole{i}", every, {**full, "d2t": steps, "t2d": ((VOCAB,), bytes(x != 9 for x in range(VOCAB)))}))


def main(folder):
    tensors = weights()
    out = packed(folder, save(folder + "/draft", CONFIG, tensors), tensors)
    no_room(folder, folder + "/draft")
    no_room_again(folder)
    misfits(folder, tensors)
    finished(folder, folder + "/draft", tensors)
    exact(folder, tensors)
    changing(folder, tensors)
    served(out)
    served(out, "--kv-cache-dtype", "fp8" if DEVICE else "bf16")
    evicted(out)
    by_default(out, folder)
    renamed(out)
    quantised(folder, folder + "/draft", tensors)
    eagle(folder)
    if DEVICE:
        held(out, folder + "/held")
    else:
        cut(folder + "/four", "4")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        if len(sys.argv) > 1:
            cut(work, sys.argv[1])
            print(f"DFlash and EAGLE-3 on {sys.argv[1]} ranks: replies are those without")
        else:
            main(work)
            print("a draft packed, verified, handed on, refused where it does not fit; replies are those without")
