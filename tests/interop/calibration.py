#!/usr/bin/env python3
"""Calibration from outside. minimax-eval --collect gives the same numbers for every way of cutting a checkpoint, those of the first layer's
attention as numpy computes them from the source, and as many rows as tokens (for experts, as tokens times the experts that each takes).
minimax-convert takes them, and the same written as llama.cpp's importance matrices, to the same bytes; the error that the text meets gets
less, a changed file is not the one that a run was begun with, and static scales are those of the collected maxima whoever spells them.
Second moments are numpy's too; what --method gptq makes of them has the same bytes for every --tp and --jobs and after an interruption, less
error in the outputs, and takes experts that saw no token, one or ten; so does what moments of gradients make of it."""
import json
import os
import struct
import subprocess

import numpy as np
from packed import Packed
from safetensors.numpy import load_file, save_file
from unsharded import Unsharded

BIN, TMP = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"]
WINDOW, WINDOWS = 96, 2


def convert(model, name, *options, status=0):
    """The directory made; with a status, the line of the refusal."""
    out = os.path.join(TMP, name)
    done = subprocess.run([f"{BIN}/minimax-convert", f"tests/data/{model}", "-o", out, "--quiet", *options], stderr=subprocess.PIPE, text=True)
    assert done.returncode == status, done.stderr
    return done.stderr if status else out


def collect(model, packed, *options):
    out = packed + ".safetensors"
    subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", f"tests/data/{model}/held-out-ids.json", "--window", str(WINDOW), "--limit",
                    str(WINDOWS), "--act-quant", "off", "--collect", out, "--quiet", *options], check=True, stdout=subprocess.DEVNULL)
    return load_file(out)


def source(model, name):
    """A BF16 tensor of the source as f64."""
    with open(f"tests/data/{model}/model.safetensors.index.json", encoding="utf-8") as f:
        path = f"tests/data/{model}/" + json.load(f)["weight_map"][name]
    with open(path, "rb") as f:
        n = int.from_bytes(f.read(8), "little")
        t = json.loads(f.read(n))[name]
        f.seek(8 + n + t["data_offsets"][0])
        words = np.frombuffer(f.read(t["data_offsets"][1] - t["data_offsets"][0]), "<u2")
    assert t["dtype"] == "BF16"
    return (words.astype("<u4") << 16).view("<f4").astype("f8").reshape(t["shape"])


def first_inputs(model):
    """What layer 0's attention is given: normalised embeddings of the ids."""
    with open(f"tests/data/{model}/held-out-ids.json", encoding="utf-8") as f:
        ids = json.load(f)[:WINDOW * WINDOWS]
    with open(f"tests/data/{model}/config.json", encoding="utf-8") as f:
        eps = json.load(f)["rms_norm_eps"]
    x = source(model, "model.embed_tokens.weight")[ids]
    return x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * source(model, "model.layers.0.input_layernorm.weight")


def check(model, top_k):
    one = collect(model, convert(model, f"{model}-1"))
    x = first_inputs(model)
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    np.testing.assert_allclose(one[qkv + ".mean_square"], (x * x).mean(0), rtol=1e-5)
    np.testing.assert_allclose(one[qkv + ".amax"], [np.abs(x).max()], rtol=1e-5)
    for name, t in one.items():
        if name.endswith(".rows"):
            tokens = WINDOW * WINDOWS * (top_k if ".experts." in name else 1)
            assert t.dtype == np.int64 and t.sum() == tokens, (name, t)
        else:
            assert np.isfinite(t).all() and (t >= 0).all() and t.any(), name
    for options in (["--tp", "2"], ["--tp", "8"], ["--tp", "8", "--tp-align", "pad"]):
        many = collect(model, convert(model, f"{model}{''.join(options)}", *options))
        assert many.keys() == one.keys()
        for name, t in one.items():
            np.testing.assert_allclose(many[name], t, rtol=2e-3, atol=1e-6 * float(t.max()), err_msg=name)
    print(f"{model}: {len(one)} tensors of inputs, the same at tp 1, 2, 8 and padded")


def text(s):
    return struct.pack("<Q", len(s)) + s.encode()


def gguf(tensors):
    """llama.cpp's form of {name: (moments [E, k], tokens [E])}, sums and counts, as its writer lays them out."""
    flat = {}
    for name, (moments, tokens) in tensors.items():
        flat[name + ".in_sum2"] = (moments * tokens[:, None]).astype("<f4")
        flat[name + ".counts"] = tokens.astype("<f4")[:, None]
    pairs = text("general.type") + struct.pack("<I", 8) + text("imatrix")
    pairs += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("held-out.txt")
    pairs += text("imatrix.chunk_count") + struct.pack("<II", 4, 8) + text("imatrix.chunk_size") + struct.pack("<II", 4, 512)
    infos, data = b"", b""
    for name, x in flat.items():
        data += bytes(-len(data) % 32)
        infos += text(name) + struct.pack("<IQQIQ", 2, x.shape[1], x.shape[0], 0, len(data))
        data += x.tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(flat), 4) + pairs + infos
    return head + bytes(-len(head) % 32) + data


def dat(tensors):
    """The older form: means times calls, experts one after another."""
    out = struct.pack("<i", len(tensors))
    for name, (moments, _) in tensors.items():
        values = (moments * 8).astype("<f4").tobytes()
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 8, len(values) // 4) + values
    return out + struct.pack("<ii", 8, 12) + b"held-out.txt"


def as_llama(collected, layers):
    """tiny-m2's moments under llama.cpp's names; as many tokens in every matrix, so that sums are exact multiples of means."""
    out = {}
    for layer in range(layers):
        theirs = f"model.layers.{layer}."
        for ours, names in {"self_attn.qkv_proj.weight": ["attn_q", "attn_k", "attn_v"], "self_attn.o_proj.weight": ["attn_output"],
                            "block_sparse_moe.experts.w13_weight": ["ffn_gate_exps", "ffn_up_exps"],
                            "block_sparse_moe.experts.w2_weight": ["ffn_down_exps"]}.items():
            x = collected[theirs + ours + ".mean_square"]
            x = x.reshape(-1, x.shape[-1])
            for name in names:
                out[f"blk.{layer}.{name}.weight"] = (x, np.full(len(x), 64.0))
    return out


def same(a, b):
    for part_a, part_b in zip(Packed(a).parts[0], Packed(b).parts[0], strict=True):
        assert all((part_a.elements(name) == part_b.elements(name)).all() for name in part_a.tensors)


def write(name, data):
    path = os.path.join(TMP, name)
    with open(path, "wb") as f:
        f.write(data)
    return path


def weighed_error(model, path, plain, collected):
    """Squared errors of all quantised matrices, each column weighed by what the text shows it."""
    total = 0
    for module in path.quantised():
        layer = module.split("self_attn")[0].split("block_sparse_moe")[0]
        last = module.rsplit(".", 1)[-1]
        ours = {"o_proj": "self_attn.o_proj", "w1": "block_sparse_moe.experts.w13_", "w3": "block_sparse_moe.experts.w13_",
                "w2": "block_sparse_moe.experts.w2_"}.get(last, "self_attn.qkv_proj")
        x = collected[f"{layer}{ours}{'' if ours.endswith('_') else '.'}weight.mean_square"]
        x = x[int(module.split(".")[-2])] if x.ndim == 2 else x
        e = path.weight(module).astype("f8") - plain.weight(module)
        total += (e * e * x).sum() / len(e)
    return total


def importance():
    """Weighed searches of tiny-m2."""
    model, file = "tiny-m2", os.path.join(TMP, "tiny-m2-1.safetensors")
    collected = load_file(file)
    even = {k: (np.full_like(v, 64) if k.endswith(".rows") else v) for k, v in collected.items()}
    save_file(even, os.path.join(TMP, "even.safetensors"))
    llama = as_llama(collected, 4)
    want = convert(model, "st", "--quant", "w4a8", "--importance", os.path.join(TMP, "even.safetensors"))
    same(want, convert(model, "gguf", "--quant", "w4a8", "--importance", write("imatrix.gguf", gguf(llama))))
    same(want, convert(model, "dat", "--quant", "w4a8", "--importance", write("imatrix.dat", dat(llama))))
    subprocess.run([f"{BIN}/minimax-verify", want, "--source", f"tests/data/{model}"], check=True, stdout=subprocess.DEVNULL)
    hf = ["--layout", "hf", "--override", "*.w2.weight=bf16"]  # 192 columns are no groups of 128
    exact = Unsharded(convert(model, "exact", "--quant", "bf16", "--layout", "hf"))
    exact.weight = lambda module: np.ascontiguousarray((exact.modules[module]["weight"][0].astype("<u4") << 16).view("<f4"))
    for scheme in ("w4a16", "nvfp4a16", "mxfp4"):
        plain = weighed_error(model, Unsharded(convert(model, scheme, "--quant", scheme, *hf)), exact, collected)
        less = weighed_error(model, Unsharded(convert(model, scheme + "-w", "--quant", scheme, *hf, "--importance", file)), exact, collected)
        assert less < plain, (scheme, less, plain)
        print(f"{model} {scheme}: error in the outputs {100 * (1 - less / plain):.2f} % less under importance")

    # A run is continued with the file that it was begun with, and no other.
    other = write("other.dat", dat({name: (x * 2 + 1, n) for name, (x, n) in llama.items()}))
    part = ["--quant", "w4a8", "--part-size", "256K", "--part", "0/2"]
    convert(model, "begun", *part, "--importance", file)
    assert "E_RESUME" in convert(model, "begun", *part, "--resume", "--importance", other, status=2)
    assert "E_RESUME" in convert(model, "begun", *part, "--resume", status=2)
    same(convert(model, "begun", "--quant", "w4a8", "--part-size", "256K", "--resume", "--importance", file),
         convert(model, "whole", "--quant", "w4a8", "--part-size", "256K", "--importance", file))

    # What would change nothing, or is of another model, is refused.
    assert "E_IMPORTANCE" in convert(model, "none", "--quant", "block_fp8", "--importance", file, status=2)
    assert "E_IMPORTANCE" in convert("tiny-m1", "m1", "--quant", "w4a8", "--importance", file, status=3)
    assert "E_IMPORTANCE" in convert(model, "text", "--quant", "w4a8", "--importance", "tests/data/held-out.txt", status=3)
    with open(os.path.join(want, "manifest.json"), encoding="utf-8") as f:
        line = json.load(f)["quant"]
    assert line.startswith("w4a8; importance=") and "E_RECIPE" in convert(model, "line", "--quant", line, status=2)


def nll(model, packed):
    done = subprocess.run([f"{BIN}/minimax-eval", packed, "--ids", f"tests/data/{model}/held-out-ids.json", "--window", "128", "--limit", "3",
                           "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)["nll"]


def square(triangles, k):
    """[blocks, b (b + 1) / 2] as the whole matrix, zero between blocks."""
    b = int((8 * triangles.shape[1] + 1) ** 0.5) // 2
    out = np.zeros((len(triangles) * b, len(triangles) * b))
    for i, t in enumerate(triangles):
        lower = np.zeros((b, b))
        lower[np.tril_indices(b)] = t
        out[i * b:(i + 1) * b, i * b:(i + 1) * b] = lower + np.tril(lower, -1).T
    assert not out[k:].any()
    return out[:k, :k]


def output_error(path, plain, collected):
    """Squared errors of the outputs of all quantised matrices on the collected text."""
    total = 0
    for module in path.quantised():
        at, _, last = module.rpartition(".")
        ours = {"o_proj": at + ".o_proj.", "w1": "w13_", "w3": "w13_", "w2": "w2_"}.get(last, at + ".qkv_proj.")
        ours = ours if ours.endswith(".") else f"{at.rpartition('.')[0]}.{ours}"
        x, e = collected[ours + "weight.moments"], path.weight(module).astype("f8") - plain.weight(module)
        h = square(x[int(at.rpartition(".")[2])] if x.ndim == 3 else x, e.shape[1])
        total += ((e @ h) * e).sum() / len(e)
    return total


def joined(a, b):
    """The same weights; b, of a checkpoint that was cut, may repeat scales on a finer grid."""
    for part_a, part_b in zip(Packed(a).parts[0], Packed(b).parts[0], strict=True):
        for name in part_a.tensors:
            x, y = part_a.elements(name), part_b.elements(name)
            for axis in range(x.ndim):
                times = -(-y.shape[axis] // x.shape[axis])
                x = np.repeat(x, times, axis).take(range(y.shape[axis]), axis)
            assert (x == y).all(), name


def first_moments():
    """Of the first layer's attention, as numpy has them."""
    collected = collect("tiny-m1", os.path.join(TMP, "tiny-m1-1"), "--moments", "128")
    x, h = first_inputs("tiny-m1"), square(collected["model.layers.0.self_attn.qkv_proj.weight.moments"], 256)
    want = np.kron(np.eye(2), np.ones((128, 128))) * (x.T @ x) / len(x)
    np.testing.assert_allclose(h, want, rtol=1e-4, atol=1e-5 * want.max())
    for name, t in collected.items():
        if name.endswith(".moments"):
            mean = collected[name.replace(".moments", ".mean_square")]
            for one, squares in zip(t.reshape(-1, *t.shape[-2:]), mean.reshape(-1, mean.shape[-1])):
                np.testing.assert_allclose(np.diag(square(one, len(squares))), squares, rtol=1e-5, err_msg=name)
    for options, status in ((["--collect", "x", "--moments", "192"], 2), (["--moments", "128"], 2)):
        assert subprocess.run([f"{BIN}/minimax-eval", os.path.join(TMP, "tiny-m1-1"), "--ids", "x", *options], stderr=subprocess.DEVNULL).returncode == status
    done = subprocess.run([f"{BIN}/minimax-eval", os.path.join(TMP, "tiny-m1--tp2"), "--ids", "tests/data/tiny-m1/held-out-ids.json", "--moments",
                           "128", "--collect", os.path.join(TMP, "two.safetensors")], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 4 and "E_PARALLEL" in done.stderr and "--tp 2" in done.stderr, done.stderr


def feedback():
    """--method gptq of tiny-m2."""
    model = "tiny-m2"
    collected = collect(model, os.path.join(TMP, "tiny-m2-1"), "--moments", "128")
    file = os.path.join(TMP, "tiny-m2-1.safetensors")
    gptq = ["--method", "gptq", "--importance", file]
    for scheme in ("w4a16", "w4a8", "nvfp4a16", "mxfp4"):
        want = convert(model, "fed", "--quant", scheme, *gptq, "--jobs", "1", "--force")
        same(want, convert(model, "jobs", "--quant", scheme, *gptq, "--jobs", "8", "--force"))
        for tp in ("2", "4", "8") if scheme in ("w4a16", "nvfp4a16") else ("8",):
            cut = convert(model, "cut", "--quant", scheme, *gptq, "--tp", tp, "--jobs", "3" if tp == "8" else "2", "--force")
            joined(want, convert(os.path.relpath(cut, "tests/data"), "joined", "--force"))
    hf = ["--layout", "hf", "--override", "*.w2.weight=bf16"]
    exact = Unsharded(os.path.join(TMP, "exact"))
    exact.weight = lambda module: np.ascontiguousarray((exact.modules[module]["weight"][0].astype("<u4") << 16).view("<f4"))
    for scheme in ("w4a16", "nvfp4a16", "mxfp4"):
        plain = output_error(Unsharded(os.path.join(TMP, scheme + "-w")), exact, collected)
        less = output_error(Unsharded(convert(model, scheme + "-fed", "--quant", scheme, *hf, *gptq)), exact, collected)
        assert less < 0.75 * plain, (scheme, less, plain)
        print(f"{model} {scheme}: error in the outputs {100 * (1 - less / plain):.1f} % less by gptq than under importance")

    # After an interruption, and with another method.
    part = ["--quant", "w4a8", "--part-size", "256K"]
    whole = convert(model, "fed-whole", *part, *gptq)
    convert(model, "fed-begun", *part, *gptq, "--part", "0/2")
    other = convert(model, "fed-begun", *part, "--resume", "--importance", file, status=2)
    assert "E_RESUME" in other and "--method gptq --kv-scales keep, expected --search mse --method nearest" in other, other
    same(whole, convert(model, "fed-begun", *part, *gptq, "--resume"))

    # Experts that saw no token, one, and ten; a channel that is always 0; numbers that are none.
    few = {k: v.copy() for k, v in collected.items()}
    rng = np.random.default_rng(7)
    for name, t in collected.items():
        if name.endswith("w13_weight.moments") or name.endswith("w2_weight.moments"):
            stem, k = name[:-len("moments")], collected[name[:-len("moments")] + "mean_square"].shape[1]
            for e, tokens in ((0, 0), (1, 1), (2, 10)):
                x = rng.standard_normal((tokens, k)) * (np.arange(k) % 9 != 4)
                h = x.T @ x / max(tokens, 1)
                few[stem + "rows"][e], few[stem + "mean_square"][e] = tokens, np.diag(h)
                for b in range(t.shape[1]):
                    cut = np.zeros((128, 128))
                    part_h = h[b * 128:(b + 1) * 128, b * 128:(b + 1) * 128]
                    cut[:len(part_h), :len(part_h)] = part_h
                    few[name][e, b] = cut[np.tril_indices(128)]
    path = os.path.join(TMP, "few.safetensors")
    save_file(few, path)
    found = convert(model, "few", "--quant", "w4a16", "--method", "gptq", "--importance", path)
    subprocess.run([f"{BIN}/minimax-verify", found, "--source", f"tests/data/{model}"], check=True, stdout=subprocess.DEVNULL)
    assert nll(model, found) < nll(model, os.path.join(TMP, "tiny-m2-1")) + 0.1
    name = "model.layers.2.self_attn.o_proj.weight"
    few[name + ".moments"][1, 77] = np.nan
    save_file(few, path)
    refused = convert(model, "nan", "--quant", "w4a16", "--method", "gptq", "--importance", path, status=3)
    assert "E_IMPORTANCE" in refused and name in refused and "expected a finite one" in refused and "few.safetensors" in refused, refused
    save_file({k: v for k, v in collected.items() if not k.endswith(".moments")}, path)
    assert "E_IMPORTANCE" in convert(model, "no", "--quant", "w4a16", "--method", "gptq", "--importance", path, status=2)
    assert "E_USAGE" in convert(model, "no", "--quant", "w4a16", "--method", "gptq", status=2)


def coupled_error(path, plain, collected):
    """tr(G E H Et) of all quantised matrices, in the blocks collected; G mixed with 0.4 of its mean."""
    total = 0
    for module in path.quantised():
        at, _, last = module.rpartition(".")
        ours = {"o_proj": at + ".o_proj.", "w1": "w13_", "w3": "w13_", "w2": "w2_"}.get(last, at + ".qkv_proj.")
        ours = ours if ours.endswith(".") else f"{at.rpartition('.')[0]}.{ours}"
        e = path.weight(module).astype("f8") - plain.weight(module)
        x, g = collected[ours + "weight.moments"], collected[ours + "weight.fisher"]
        if x.ndim == 3:
            expert = int(at.rpartition(".")[2])
            x, g = x[expert], g[expert]
        first = {"k_proj": 4, "v_proj": 5, "w3": 2}.get(last, 0)
        g = square(g[first:first + -(-len(e) // 128)], len(e))
        g = g / np.trace(g) * len(e) * 0.6 + 0.4 * np.eye(len(e)) if np.trace(g) > 0 else np.eye(len(e))
        total += np.trace(g @ e @ square(x, e.shape[1]) @ e.T) / len(e)
    return total


def coupled():
    """--method gptq of tiny-m2 with moments of gradients."""
    model, file = "tiny-m2", os.path.join(TMP, "tiny-m2-1.safetensors")
    before = {k: v for k, v in load_file(file).items()}
    collected = collect(model, os.path.join(TMP, "tiny-m2-1"), "--moments", "128", "--fisher", "128")
    for name, t in before.items():  # what there was before is as it was
        np.testing.assert_array_equal(t, collected[name], err_msg=name)
    for name, t in collected.items():
        if name.endswith(".fisher_rows"):
            np.testing.assert_array_equal(t, collected[name.replace("fisher_rows", "rows")], err_msg=name)
    assert len(collected) == len(before) + 2 * 16 and "lm_head.weight.fisher" not in collected
    gptq = ["--method", "gptq", "--importance", file]
    hf = ["--layout", "hf", "--override", "*.w2.weight=bf16"]
    exact = Unsharded(os.path.join(TMP, "exact"))
    exact.weight = lambda module: np.ascontiguousarray((exact.modules[module]["weight"][0].astype("<u4") << 16).view("<f4"))
    for scheme in ("w4a16", "nvfp4a16"):
        want = convert(model, "coupled", "--quant", scheme, *gptq, "--jobs", "1", "--force")
        same(want, convert(model, "jobs", "--quant", scheme, *gptq, "--jobs", "8", "--force"))
        for tp in ("2", "8") if scheme == "w4a16" else ("4",):
            joined(want, convert(os.path.relpath(convert(model, "cut", "--quant", scheme, *gptq, "--tp", tp, "--force"), "tests/data"), "joined", "--force"))
        alone = coupled_error(Unsharded(os.path.join(TMP, scheme + "-fed")), exact, collected)
        less = coupled_error(Unsharded(convert(model, scheme + "-coupled", "--quant", scheme, *hf, *gptq)), exact, collected)
        assert less < 0.85 * alone, (scheme, less, alone)
        print(f"{model} {scheme}: error that all outputs share {100 * (1 - less / alone):.1f} % less by coupled rows")
    convert(model, "words", "--quant", "w4a16_f16", *hf, "--dialect", "gptq", *gptq, "--mem-limit", "1G", "--jobs", "2")  # strips of all rows
    part = ["--quant", "mxfp4", "--part-size", "256K"]
    whole = convert(model, "coupled-whole", *part, *gptq)
    convert(model, "coupled-begun", *part, *gptq, "--part", "0/2")
    same(whole, convert(model, "coupled-begun", *part, *gptq, "--resume"))

    # Experts with gradients of no token, one, and ten; outputs that are always 0; numbers that are none.
    few, rng = {k: v.copy() for k, v in collected.items()}, np.random.default_rng(7)
    for name, t in collected.items():
        if name.endswith("_weight.fisher"):
            for e, tokens in ((0, 0), (1, 1), (2, 10)):
                few[name + "_rows"][e] = tokens
                for b in range(t.shape[1]):
                    dy = rng.standard_normal((tokens, 128)) * (np.arange(128) % 9 != 4) * (np.arange(128) < np.count_nonzero(square(t[e, b:b + 1], 128).any(1)))
                    few[name][e, b] = (dy.T @ dy / max(tokens, 1))[np.tril_indices(128)]
    path = os.path.join(TMP, "few-gradients.safetensors")
    save_file(few, path)
    found = convert(model, "few-gradients", "--quant", "w4a16", "--method", "gptq", "--importance", path)
    subprocess.run([f"{BIN}/minimax-verify", found, "--source", f"tests/data/{model}"], check=True, stdout=subprocess.DEVNULL)
    assert nll(model, found) < nll(model, os.path.join(TMP, "tiny-m2-1")) + 0.1
    name = "model.layers.2.self_attn.o_proj.weight"
    few[name + ".fisher"][1, 77] = np.inf
    save_file(few, path)
    refused = convert(model, "nan", "--quant", "w4a16", "--method", "gptq", "--importance", path, status=3)
    assert "E_IMPORTANCE" in refused and name in refused and "expected a finite one" in refused and "few-gradients.safetensors" in refused, refused
    few[name + ".fisher"][1, 76:78] = 1e6, 1  # a product of rows 10 and 11 that their squares do not allow
    save_file(few, path)
    refused = convert(model, "none", "--quant", "w4a16", "--method", "gptq", "--importance", path, status=3)
    assert "E_IMPORTANCE" in refused and name in refused and "no second moments at row" in refused, refused
    for options in (["--collect", "x", "--fisher", "128"], ["--collect", "x", "--moments", "128", "--fisher", "192"]):
        assert subprocess.run([f"{BIN}/minimax-eval", os.path.join(TMP, "tiny-m2-1"), "--ids", "x", *options], stderr=subprocess.DEVNULL).returncode == 2


def scales(packed):
    with open(os.path.join(packed, "manifest.json"), encoding="utf-8") as f:
        return {t["name"]: t["input_scale"] for t in json.load(f)["tensors"] if "input_scale" in t}


def static_scales():
    model, file = "tiny-m2", os.path.join(TMP, "tiny-m2-1.safetensors")
    collected = load_file(file)
    amax = {k[:-len(".amax")]: np.float32(v.max()) for k, v in collected.items() if k.endswith(".amax") and "lm_head" not in k}
    for scheme, top in (("tensor_wise_fp8", 448), ("w4afp8", 448), ("nvfp4", 2688)):
        for tp in ("1", "8"):
            packed = convert(model, f"{scheme}-{tp}", "--quant", scheme, "--act-scales", file, "--tp", tp)
            found = scales(packed)
            assert found == {k: float(v / np.float32(top)) for k, v in amax.items()}, scheme
        fixed, dynamic = (nll(model, convert(model, f"{scheme}-{n}", "--quant", scheme, *o)) for n, o in (("s", ["--act-scales", file]), ("d", [])))
        assert fixed != dynamic and abs(fixed - dynamic) < 0.05, (scheme, fixed, dynamic)
        print(f"{model} {scheme}: nll {dynamic:.4f} with scales for each token, {fixed:.4f} with static ones")

    # The same in the spellings of other tools: one number for each matrix, the largest of those that share a tensor.
    theirs = {}
    for layer in range(4):
        at = f"model.layers.{layer}."
        for i, p in enumerate("qkv"):
            theirs[f"{at}self_attn.{p}_proj."] = amax[at + "self_attn.qkv_proj.weight"] / np.float32(1 + i)
        theirs[f"{at}self_attn.o_proj."] = amax[at + "self_attn.o_proj.weight"]
        for e in range(7):  # and one that calibration never reached
            for w in ("w1", "w3", "w2"):
                ours = at + f"block_sparse_moe.experts.{'w2' if w == 'w2' else 'w13'}_weight"
                theirs[f"{at}block_sparse_moe.experts.{e}.{w}."] = amax[ours] / np.float32(1 + (e + ord(w[1])) % 3)
    spelt = {"activation_scale": lambda x: x, "input_scale": lambda x: x / np.float32(2688), "input_global_scale": lambda x: np.float32(2688) / x}
    want = {k: float(v / np.float32(2688)) for k, v in amax.items()}
    for suffix, of in spelt.items():
        numbers = {k + suffix: float(of(v)) for k, v in theirs.items()}
        path = write("scales.json", json.dumps(numbers).encode())
        found = scales(convert(model, f"json-{suffix}", "--quant", "nvfp4", "--act-scales", path))
        assert found.keys() == want.keys() and all(abs(found[k] / want[k] - 1) < 2e-7 for k in want), suffix
        save_file({k: np.array(v, np.float32) for k, v in numbers.items()}, os.path.join(TMP, "scales.safetensors"))
        assert scales(convert(model, f"st-{suffix}", "--quant", "nvfp4", "--act-scales", os.path.join(TMP, "scales.safetensors"))) == found

    done = subprocess.run([f"{BIN}/minimax-convert", f"tests/data/{model}", "--quant", "nvfp4", "--act-scales", path, "--dry-run", "--json"],
                          check=True, stdout=subprocess.PIPE)
    assert (json.loads(done.stdout)["scaled_tensors"], json.loads(done.stdout)["unreached_experts"]) == (16, 8)
    numbers.pop("model.layers.2.self_attn.o_proj." + suffix)
    refused = convert(model, "less", "--quant", "nvfp4", "--act-scales", write("less.json", json.dumps(numbers).encode()), status=3)
    assert "E_ACT_SCALES" in refused and "model.layers.2.self_attn.o_proj.weight" in refused
    for bad in (b"[]", b"{}", b'{"a.input_scale": -1}', b'{"a.input_scale": "1"}', b'{"a.scale": 1}', b""):
        assert "error: E_" in convert(model, "bad", "--quant", "nvfp4", "--act-scales", write("bad.json", bad), status=3), bad
    assert "E_ACT_SCALES" in convert(model, "no", "--quant", "int8", "--act-scales", file, status=2)


if __name__ == "__main__":
    check("tiny-m1", 2)
    check("tiny-m2", 4)
    importance()
    first_moments()
    feedback()
    coupled()
    static_scales()
    print("calibration: collected, weighed and scaled as numpy has it")
