#!/usr/bin/env python3
"""Weights at the ends of f32 through every scheme and search: what is written is proven, and is a source again. Cut for other ranks it is the
directory that its own source gives; written with Hugging Face names it comes back; quantised again it is proven too.

  SEED=N to repeat a run, ROUNDS=N for more than one model."""
import os
import random
import struct

import convert_files as cf
from convert_files import Scratch

CONVERT, VERIFY = "minimax-convert", "minimax-verify"
SEED, ROUNDS = int(os.environ.get("SEED", random.randrange(1 << 32))), int(os.environ.get("ROUNDS", 1))
SCHEMES = ["bf16", "f32", "block_fp8", "tensor_wise_fp8", "channel_fp8", "mxfp8", "int8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16", "w4afp8", "w4a8"]
SEARCHES = {"int8": ["absmax"], "nvfp4": ["absmax", "four_six"], "nvfp4a16": ["four_six"], "mxfp4": ["absmax"], "w4a16": ["absmax"], "w4afp8": ["absmax"],
            "w4a8": ["absmax"]}
FIRST, LAST = 0x00000001, 0x7F7FFFFF  # magnitudes of f32, as bits


def magnitude(rng, kind):
    if kind == "huge":
        return rng.randint(0x7E000000, LAST)
    if kind == "largest":
        return LAST - rng.choice([0, 0, 1, 2, 0x8000, 0x10000])
    if kind == "tiny":
        return rng.randint(FIRST, 0x01000000)
    if kind == "any":
        return rng.randint(FIRST, LAST)
    return 0 if rng.random() < 0.9 else rng.choice([LAST, FIRST, rng.randint(0x7B000000, LAST)])  # sparse


def model(rng, path, dtype):
    """One layer; each matrix of one kind, and rows of another in some."""
    c = cf.small(hidden=160, heads=4, kv=2, dim=16, experts=3, inter=96, fp8=False)
    for name, (_, shape, _) in list(c.tensors.items()):
        if len(shape) != 2 or ".gate." in name or "embed" in name or "lm_head" in name:
            continue
        kind, bits = rng.choice(["huge", "largest", "any", "sparse", "tiny"]), []
        for row in range(shape[0]):
            k = kind if row % 5 or row == 0 else rng.choice(["huge", "tiny", "sparse", "any", "largest"])
            bits += [magnitude(rng, k) | rng.getrandbits(1) << 31 for _ in range(shape[1])]
        if dtype == "BF16":
            data = b"".join(struct.pack("<H", b >> 16) for b in bits)
        else:
            data = struct.pack(f"<{len(bits)}I", *bits)
        c.tensors[name] = (dtype, shape, data)
    return c.save(path)


def too_large_for(done, scheme):
    """A number beyond the largest of BF16 is refused by name where that is the target."""
    return scheme == "bf16" and done.returncode == 4 and b"E_Q_SCALE" in done.stderr


def again(rng, source, root, scheme, search):
    options = ["--quant", scheme, *(["--search", search] if search else [])]
    tp = rng.sample([1, 2], 2)
    what = f"seed {SEED}: {os.path.basename(source)} {scheme} {search}: "
    done = cf.run(CONVERT, "-q", source, "-o", root + "/a", "--tp", tp[0], *options)
    if too_large_for(done, scheme):
        return
    assert done.returncode == 0, what + done.stderr.decode()
    cf.ok(VERIFY, "-q", root + "/a", "--source", source)
    for out, tail in (("b", ["--tp", tp[1]]), ("hf", ["--layout", "hf"])):
        done = cf.run(CONVERT, "-q", root + "/a", "-o", f"{root}/{out}", *tail)
        if out == "hf" and done.returncode == 4:  # no engine's words for it
            continue
        assert done.returncode == 0, what + f"{tail} of its own output: " + done.stderr.decode()
        cf.ok(VERIFY, "-q", f"{root}/{out}")
    cf.ok(CONVERT, "-q", source, "-o", root + "/direct", "--tp", tp[1], *options)
    assert cf.same_files(root + "/b", root + "/direct"), what + "cut again"
    if os.path.exists(root + "/hf"):
        done = cf.run(CONVERT, "-q", root + "/hf", "-o", root + "/back")
        assert done.returncode == 0, what + "back from Hugging Face names: " + done.stderr.decode()
        cf.ok(VERIFY, "-q", root + "/back")
    other = rng.choice(SCHEMES)
    done = cf.run(CONVERT, "-q", root + "/a", "-o", root + "/other", "--quant", other)
    if not too_large_for(done, other):
        assert done.returncode == 0, what + f"quantised again as {other}: " + done.stderr.decode()
        cf.ok(VERIFY, "-q", root + "/other")


def all_schemes():
    for i in range(ROUNDS):
        rng = random.Random(f"{SEED} {i}")
        with Scratch() as root:
            sources = [model(rng, root + "/" + t, t) for t in ("BF16", "F32")]
            for scheme in SCHEMES:
                for search in [None, *SEARCHES.get(scheme, [])]:
                    for source in sources if ROUNDS > 1 else [rng.choice(sources)]:
                        with Scratch() as work:
                            again(rng, source, work, scheme, search)


def bf16(values):
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def one_of_a_row():
    """Rows of one weight of about 1 and 127 that are below half a step of it in four bits."""
    c = cf.small(hidden=128, heads=4, kv=2, dim=32, experts=2, inter=128, fp8=False)
    for n, (name, (dtype, shape, _)) in enumerate(list(c.tensors.items())):
        if len(shape) != 2 or ".gate." in name or "embed" in name or "lm_head" in name:
            continue
        rows = [[(0.058 + (i * 7 + j * 13 + n) % 5 * 1e-3) * (-1) ** (i + j + n) for j in range(128)] for i in range(shape[0])]
        for i, row in enumerate(rows):
            row[(i * 37 + n) % 128] = 1 + i % 3 / 4
        c.tensors[name] = (dtype, shape, bf16(v for row in rows for v in row))
    return c


def moments(path, columns=128, experts=2):
    """Second moments of inputs that go together."""
    t = {}
    for name in ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "block_sparse_moe.experts.w13_weight", "block_sparse_moe.experts.w2_weight"):
        lead = [experts] if "experts" in name else []
        h = [(1.0 if i == j else 0.97) * (1 + i % 4 / 4) ** 0.5 * (1 + j % 4 / 4) ** 0.5 for i in range(columns) for j in range(i + 1)]
        h = struct.pack(f"<{len(h)}f", *h)
        square = struct.pack(f"<{columns}f", *(1 + i % 4 / 4 for i in range(columns)))
        copies = experts if lead else 1
        name = "model.layers.0." + name
        t[name + ".rows"] = ("I64", [copies], struct.pack("<q", 4096) * copies)
        t[name + ".mean_square"] = ("F32", [*lead, columns], square * copies)
        t[name + ".moments"] = ("F32", [*lead, 1, columns * (columns + 1) // 2], h * copies)
    cf.write_st(path, t)


def one_weight_of_a_row():
    """Nearest codes lose all weights of such rows but one, error feedback spreads that one's error over the others: both are proven. Tensors that
    are exchanged are refused."""
    with Scratch() as root:
        c = one_of_a_row()
        source, other = c.save(root + "/src"), root + "/other"
        at = "model.layers.0."
        a, b = at + "block_sparse_moe.experts.0.w1.weight", at + "block_sparse_moe.experts.1.w1.weight"
        c.tensors[a], c.tensors[b] = c.tensors[b], c.tensors[a]
        c.save(other)
        moments(root + "/moments")
        for scheme in ("w4a16", "nvfp4a16", "mxfp4", "int8", "mxfp8"):
            for method in ([], ["--importance", root + "/moments"], ["--method", "gptq", "--importance", root + "/moments"]):
                for layout in (["--tp", 2], ["--layout", "hf"]):
                    out, words = f"{root}/{scheme}{len(method)}{layout[1]}", ["--quant", scheme, *method, *layout]
                    done = cf.run(CONVERT, "-q", source, "-o", out, *words)
                    if (layout[0] == "--layout" and done.returncode == 4) or (len(method) == 2 and done.returncode == 2):
                        continue  # no engine's words for it; nothing to weigh
                    assert done.returncode == 0, (words, done.stderr)
                    cf.ok(VERIFY, "-q", out, "--source", source)
                    cf.assert_error(cf.run(VERIFY, "-q", out, "--source", other), VERIFY, 6, "E_SOURCE", "experts")


def beyond_moments():
    """Squares of inputs beyond F32, of a model whose likelihood is a number: no file of them, which no conversion would read."""
    with Scratch() as root:
        c = cf.small(fp8=False)
        for scale, status in ((1.0, 0), (1e25, 6)):
            name = "model.layers.0.input_layernorm.weight"
            c.tensors[name] = ("BF16", [10], bf16([scale] * 10))
            cf.ok(CONVERT, "-q", c.save(f"{root}/{status}"), "-o", f"{root}/packed{status}")
            with open(root + "/ids.json", "w", encoding="utf-8") as f:
                f.write("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]")
            run = lambda *more: cf.run("minimax-eval", "-q", f"{root}/packed{status}", "--ids", root + "/ids.json", "--window", 8, *more)
            assert run().returncode == 0
            for more in ([], ["--moments", 128]):
                done, out = run("--collect", f"{root}/collected", *more), f"{root}/collected"
                if status:
                    cf.assert_error(done, "minimax-eval", 6, "E_NONFINITE", "model.layers.0.self_attn.qkv_proj.weight.mean_square")
                    assert not os.path.exists(out)
                else:
                    assert done.returncode == 0, done.stderr
                    os.remove(out)


def beyond_f16():
    """Schemes whose scales are F16 refuse weights that none reaches."""
    name = "model.layers.0.self_attn.o_proj.weight"
    for scheme, most in (("w4a16_zero", 491280), ("w4a16_f16", 491280), ("w8a16_zero", 8.35176e6), ("w8a16_f16", 8.35176e6)):
        for dtype, value, fits in (("BF16", 4e5, True), ("BF16", 3e38, False), ("F32", most * 0.999, True), ("F32", -most * 1.001, False)):
            with Scratch() as root:
                c = cf.small(fp8=False)
                _, shape, _ = c.tensors[name]
                row = [0.0] * (shape[0] * shape[1] - 1) + [value]
                c.tensors[name] = (dtype, shape, bf16(row) if dtype == "BF16" else struct.pack(f"<{len(row)}f", *row))
                done = cf.run(CONVERT, "-q", c.save(root + "/src"), "-o", root + "/out", "--quant", scheme)
                if fits:
                    assert done.returncode == 0, done.stderr
                    cf.ok(VERIFY, "-q", root + "/out", "--source", root + "/src")
                else:
                    cf.assert_error(done, CONVERT, 4, "E_Q_SCALE", name, f"row {shape[0] - 1}, column {shape[1] - 1}", scheme)


if __name__ == "__main__":
    cf.main([all_schemes, one_weight_of_a_row, beyond_moments, beyond_f16])
    print(f"seed {SEED}")
