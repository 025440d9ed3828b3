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
    return scheme == "bf16" and done.returncode == 3 and b"E_NONFINITE" in done.stderr


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


if __name__ == "__main__":
    cf.main([all_schemes])
    print(f"seed {SEED}")
