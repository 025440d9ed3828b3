#!/usr/bin/env python3
"""A head in 8 bits, --head block_fp8, on 1, 2 and 4 ranks, whose rows are whole blocks of 128 (tiny-m1, tiny-m2) and are not (160 or 320 of
tiny-m1's first 600 ids). The shards put together hold the source's numbers within half a step of E4M3, the same on every number of ranks;
nothing else of the checkpoint changes. Logits under --act-quant on are those of the same hidden states, which the BF16 head's logits give
by least squares, times the dequantised head: so the head's inputs are not rounded. Text and likelihood do not depend on the ranks. And what
--head is to the other options."""
import json
import os
import shutil
import subprocess
import sys

import numpy as np

sys.path.insert(0, "tests/cli")
from convert_files import INDEX, read_st, write_st  # noqa: E402
from packed import Packed  # noqa: E402

BIN, TMP, HEAD = os.path.join(os.environ["BUILD"], "bin"), os.environ["TMPDIR"], "lm_head.weight"


def run(program, *args, status=0):
    done = subprocess.run([f"{BIN}/{program}", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, (program, args, done.returncode, done.stderr)
    return done.stderr if status else done.stdout


def convert(source, *options):
    out = os.path.join(TMP, "-".join([os.path.basename(source), *options]).replace("/", "").replace("*", ""))
    run("minimax-convert", source, "-o", out, "-q", *options)
    run("minimax-verify", "-q", out)
    return out


def floats(raw, dtype, shape):
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape).astype("f8")
    return np.frombuffer(raw, "<f4").reshape(shape).astype("f8")


def e4m3():
    """Values of the 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0 ** -9)
    return np.where(code & 127 == 127, np.nan, np.where(code & 128, -value, value))


def source_head(source):
    with open(os.path.join(source, INDEX), encoding="utf-8") as f:
        file = json.load(f)["weight_map"][HEAD]
    dtype, shape, raw = read_st(os.path.join(source, file))[0][HEAD]
    return floats(raw, dtype, shape)


def packed_head(path):
    """Dequantised from the ranks' files: codes times scales; also the grid of the scales."""
    p = Packed(path)
    (t,) = (t for t in p.manifest["tensors"] if t["name"] == HEAD)
    assert t["scheme"] == "block_fp8", t
    codes, scales = (list(p.whole(t, plane))[0][1][0] for plane in t["planes"])
    return e4m3()[codes] * scales.view("<f4").astype("f8"), t["planes"][1]["cell"]


def others(path):
    """Every stored plane but the head's, by rank."""
    p = Packed(path)
    return [{name: part.elements(name).tobytes() for part in rank for name in part.tensors if not name.startswith(HEAD)} for rank in p.parts]


def cut_vocabulary(source, vocab):
    """A copy of a checkpoint that knows its first ids alone."""
    out = os.path.join(TMP, f"{os.path.basename(source)}-{vocab}")
    shutil.copytree(source, out)
    with open(f"{out}/config.json", encoding="utf-8") as f:
        config = json.load(f)
    with open(f"{out}/config.json", "w", encoding="utf-8") as f:
        json.dump({**config, "vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 1}, f)
    os.remove(f"{out}/tokenizer.json")
    for name in os.listdir(out):
        if name.startswith("model-0"):
            tensors = read_st(f"{out}/{name}")[0]
            for t in (HEAD, "model.embed_tokens.weight"):
                if t in tensors:
                    dtype, (rows, cols), raw = tensors[t]
                    tensors[t] = (dtype, [vocab, cols], raw[:len(raw) // rows * vocab])
            write_st(f"{out}/{name}", tensors)
    return out


def logits(path, ids):
    out = f"{TMP}/logits.safetensors"
    run("minimax-eval", path, "--logits", out, "--ids-from", ids, "--act-quant", "on", "-q")
    dtype, shape, raw = read_st(out)[0]["logits.text"]
    return floats(raw, dtype, shape)


def check(source, vocab, grids):
    """grids: rows of a scale's cell for 1, 2 and 4 ranks."""
    random = np.random.default_rng(7)
    ids = f"{TMP}/ids.safetensors"
    write_st(ids, {"ids.text": ("I32", [48], random.integers(2, vocab, 48).astype("<i4").tobytes())})
    want, first = source_head(source), None
    for tp, grid in zip(("1", "2", "4"), grids):
        plain, small = (convert(source, "--quant", "block_fp8", "--tp", tp, *head) for head in ([], ["--head", "block_fp8"]))
        assert others(plain) == others(small), "another tensor changed"
        head, cell = packed_head(small)
        assert cell == [grid, 128], cell
        first = head if first is None else first
        assert (head == first).all(), f"{source}: the head of {tp} ranks is another"
        largest = np.repeat(np.repeat([[np.abs(want[n:n + 128, k:k + 128]).max() for k in range(0, want.shape[1], 128)]
                                       for n in range(0, vocab, 128)], 128, 0)[:vocab], 128, 1)[:, :want.shape[1]]
        assert (np.abs(head - want) <= np.maximum(np.abs(want) / 16, largest / 448 / 512)).all() and (head != want).any()
        before, after = logits(plain, ids), logits(small, ids)
        hidden = np.linalg.lstsq(want, before.T, rcond=None)[0].T
        size = np.abs(before).max()
        assert np.abs(hidden @ want.T - before).max() <= 1e-5 * size, "no hidden states give the BF16 head's logits"
        apart, moved = np.abs(hidden @ head.T - after).max() / size, np.abs(after - before).max() / size
        assert apart <= 1e-5 < 1e-3 < moved, (source, tp, apart, moved)
        print(f"{os.path.basename(source)}, {tp} ranks: scales of {grid} x 128, logits move by {moved:.1e} of the largest, "
              f"off the dequantised head's by {apart:.1e}")


def check_text(source):
    """Greedy text and likelihood with the 8-bit head; likelihood within 1e-3 of the BF16 head's, and not the same."""
    found = []
    for tp in ("1", "2", "4"):
        path = convert(source, "--quant", "none", "--head", "block_fp8", "--tp", tp)
        said = run("minimax-run", path, "-n", "24", "-q", "--act-quant", "off", "-p", "And it came to pass, that the king said")
        found.append((said, nll(path, source)))
    plain = nll(convert(source, "--quant", "none"), source)
    assert len({text for text, _ in found}) == 1 and found[0][0], found
    assert max(abs(n - found[0][1]) for _, n in found) <= 2e-6, found
    assert 1e-6 < abs(found[0][1] - plain) < 1e-2, (found, plain)
    print(f"{os.path.basename(source)}: the same text on 1, 2 and 4 ranks, nll {found[0][1]:.6f}, {plain:.6f} with the head as stored")


def nll(path, source):
    return json.loads(run("minimax-eval", path, "--ids", f"{source}/held-out-ids.json", "--limit", "2", "--act-quant", "off", "--json", "-q"))["nll"]


def rules(*options):
    return json.loads(run("minimax-convert", "--print-recipe", "--quant", "w4a16", *options))["rules"]


def same_files(a, b):
    x, y = ({name: open(os.path.join(d, name), "rb").read() for name in sorted(os.listdir(d))} for d in (a, b))
    assert x.keys() == y.keys() and all(x[name] == y[name] for name in x), (a, b)


def check_options(source):
    last = {"match": HEAD, "scheme": "block_fp8"}
    for options in ([], ["--ignore", "lm_head*"], ["--override", "lm_head*=int8"]):
        assert rules("--head", "block_fp8", *options)[-1] == last, options
    assert rules() == []
    for word in ("int3", "fp8", "experts_int4", "bf16; *.experts.*=nvfp4"):
        assert f'"{word}"' in run("minimax-convert", source, "--dry-run", "--head", word, status=2)
    refused = run("minimax-convert", source, "--dry-run", "--layout", "hf", "--head", "block_fp8", status=4)
    assert "E_DIALECT" in refused and HEAD in refused, refused
    refused = run("minimax-convert", source, "--dry-run", "--tp", "8", "--tp-align", "error", "--head", "block_fp8", status=4)
    assert "E_TP_ALIGN" in refused, refused
    direct = convert(source, "--head", "block_fp8", "--tp", "2")
    again = os.path.join(TMP, "again")
    run("minimax-convert", convert(source, "--head", "block_fp8", "--tp", "1"), "-o", again, "-q", "--tp", "2")
    same_files(direct, again)
    later = os.path.join(TMP, "later")
    run("minimax-convert", convert(source, "--tp", "1"), "-o", later, "-q", "--tp", "2", "--head", "block_fp8")
    assert (packed_head(later)[0] == packed_head(direct)[0]).all()


if __name__ == "__main__":
    some = cut_vocabulary("tests/data/tiny-m1", 600)
    check("tests/data/tiny-m1", 2048, (128, 128, 128))
    check("tests/data/tiny-m2", 2048, (128, 128, 128))
    check(some, 600, (128, 64, 32))
    check_text("tests/data/tiny-m1")
    check_text("tests/data/tiny-m2")
    check_options(some)
    print("--head is the last rule; no dialect holds it, another cut does")
