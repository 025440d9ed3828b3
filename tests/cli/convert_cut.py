#!/usr/bin/env python3
"""What lies in the part files, byte for byte, computed again here from the source and the rules of tensor parallelism: codes copied, scales
that say the same about every element, zeros where nobody owns anything; for whole and partial blocks, every tp, split and padded."""
import math
import os
import shutil
import struct

import convert_files as cf
from convert_files import Checkpoint, Scratch, small

CONVERT = shutil.which("minimax-convert")
TINY_M1, TINY_M2 = "tests/data/tiny-m1", "tests/data/tiny-m2"


def rules(c):
    """(packed name, experts stacked, [(source name, rows, how rows are cut)], columns, how columns are cut) of every packed tensor."""
    hidden, vocab, inter = c["hidden_size"], c["vocab_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    m2 = c["architectures"] == ["MiniMaxM2ForCausalLM"]
    yield "model.embed_tokens.weight", False, [("model.embed_tokens.weight", vocab, "vocab")], hidden, None
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attn, moe = at + "self_attn.", at + "block_sparse_moe."

        def plain(name, rows, row_cut, cols=1, col_cut=None):
            return name, False, [(name, rows, row_cut)], cols, col_cut

        yield plain(at + "input_layernorm.weight", hidden, None)
        yield plain(at + "post_attention_layernorm.weight", hidden, None)
        if not m2 and c["attn_type_list"][layer] == 0:
            yield plain(attn + "qkv_proj.weight", 3 * q, "equal", hidden)
            yield plain(attn + "output_gate.weight", q, "equal", hidden)
            yield plain(attn + "norm.weight", q, "equal")
            yield plain(attn + "out_proj.weight", hidden, None, q, "equal")
        else:
            yield (attn + "qkv_proj.weight", False,
                   [(attn + "q_proj.weight", q, "equal"), (attn + "k_proj.weight", kv, "kv"), (attn + "v_proj.weight", kv, "kv")], hidden, None)
            yield plain(attn + "o_proj.weight", hidden, None, q, "equal")
        if m2:
            yield plain(attn + "q_norm.weight", q, "equal")
            yield plain(attn + "k_norm.weight", kv, "kv")
            yield plain(moe + "e_score_correction_bias", c["num_local_experts"], None)
        yield plain(moe + "gate.weight", c["num_local_experts"], None, hidden)
        one = moe + "experts.{e}."
        yield moe + "experts.w13_weight", True, [(one + "w1.weight", inter, "inter"), (one + "w3.weight", inter, "inter")], hidden, None
        yield moe + "experts.w2_weight", True, [(one + "w2.weight", hidden, None)], inter, "inter"
    yield "model.norm.weight", False, [("model.norm.weight", hidden, None)], 1, None
    yield "lm_head.weight", False, [("lm_head.weight", vocab, "vocab")], hidden, None


def cut(how, whole, rank, tp, c, align):
    """(local extent, local start, whole start, count): what a rank owns of an axis."""
    if how is None:
        return whole, 0, 0, whole
    if how == "kv":
        heads, d = c["num_key_value_heads"], c["head_dim"]
        local = max(1, heads // tp) * d
        return local, 0, rank * heads // tp * d, local
    if how == "vocab":
        local = -(-whole // math.lcm(64, tp)) * math.lcm(64, tp) // tp
        start = min(rank * local, whole)
        return local, 0, start, min(local, whole - start)
    share = whole // tp
    if how == "inter" and align == "pad":
        spans = [(r * share // 128 * 128, -(-(r + 1) * share // 128) * 128) for r in range(tp)]
        return max(b - a for a, b in spans), rank * share - spans[rank][0], rank * share, share
    return share, 0, rank * share, share


def place(data, size, cols, rows_cut, cols_cut):
    """One matrix of `cols` columns cut both ways; zeros around what is owned."""
    local, at, start, count = rows_cut
    width, left, first, n = cols_cut
    blank = bytes(width * size)
    row = lambda r: bytes(left * size) + data[(r * cols + first) * size : (r * cols + first + n) * size] + bytes((width - left - n) * size)
    if width == cols:
        body = data[start * cols * size : (start + count) * cols * size]
    else:
        body = b"".join(row(r) for r in range(start, start + count))
    return blank * at + body + blank * (local - at - count)


def scale_values(dtype, data):
    if dtype == "F32":
        return data
    if dtype == "BF16":
        return b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    return b"".join(struct.pack("<f", 2.0 ** (b - 127)) for b in data)  # E8M0


def check_scales(name, found, grid, leads, columns, col_cut, block):
    """Every stored scale is that of each element under it. `leads`: per expert, [(row cut, f32 scales of the whole matrix)]."""
    gn, gk = grid
    assert block % gn == 0 and block % gk == 0, (name, grid)
    width, left, first, n = col_cut
    rows = sum(r[0] for r, _ in leads[0])
    down, across = -(-rows // gn), -(-width // gk)
    dtype, shape, data = found
    assert dtype == "F32" and shape[-2:] == [down, across] and len(data) == len(leads) * down * across * 4, (name, shape)
    source_across = -(-columns // block)
    column = []  # block column of each stored column, None where nobody owns anything
    for j in range(across):
        owned = {(k - left + first) // block for k in range(j * gk, min((j + 1) * gk, width)) if left <= k < left + n}
        assert len(owned) <= 1, f"{name}: stored scale column {j} covers two blocks"
        column.append(owned.pop() if owned else None)
    for e, pieces in enumerate(leads):
        want, base = {}, 0
        for (local, at, start, count), scale in pieces:
            for r in range(base + at, base + at + count):
                b = (r - base - at + start) // block
                for j, k in enumerate(column):
                    v = bytes(4) if k is None else scale[(b * source_across + k) * 4 :][:4]
                    assert want.setdefault((r // gn, j), v) == v, f"{name}: stored scale {r // gn}, {j} covers two blocks"
            base += local
        for i in range(down):
            for j in range(across):
                at = ((e * down + i) * across + j) * 4
                assert data[at : at + 4] == want.get((i, j), bytes(4)), f"{name}: expert {e}, scale {i}, {j}"


def check(source, out, tp, align):
    """Every tensor of every rank of out, a conversion with --quant none."""
    ranks, manifest = cf.packed(out)
    c, t = source.config, source.tensors
    assert len(ranks) == tp
    grids = {x["name"]: [p["cell"] for p in x["planes"]] for x in manifest["tensors"]}
    for rank, found in enumerate(ranks):
        expected = set()
        for name, stacked, pieces, columns, how in rules(c):
            experts = range(c["num_local_experts"]) if stacked else [0]
            col_cut = cut(how, columns, rank, tp, c, align)
            row_cuts = [cut(h, rows, rank, tp, c, align) for _, rows, h in pieces]
            dtype = t[pieces[0][0].format(e=0)][0]
            data = b"".join(place(t[s.format(e=e)][2], cf.SIZE[dtype], columns, r, col_cut)
                            for e in experts for (s, _, _), r in zip(pieces, row_cuts))
            shape = [sum(r[0] for r in row_cuts)] + ([] if len(t[pieces[0][0].format(e=0)][1]) == 1 else [col_cut[0]])
            assert found[name][:2] == (dtype, [len(experts)] * stacked + shape), (name, found[name][:2], dtype, shape)
            assert found[name][2] == data, f"{name} on rank {rank} of {tp}"
            expected.add(name)
            if dtype == "F8_E4M3":
                leads = [[(r, scale_values(*t[s.format(e=e) + "_scale_inv"][::2])) for (s, _, _), r in zip(pieces, row_cuts)] for e in experts]
                check_scales(name, found[name + "_scale_inv"], grids[name][1], leads, columns, col_cut,
                             c["quantization_config"]["weight_block_size"][0])
                expected.add(name + "_scale_inv")
        assert set(found) == expected, set(found) ^ expected
    return grids


def convert_and_check(source, path, root, tp, align="split"):
    out = f"{root}/out-{tp}-{align}"
    cf.ok(CONVERT, "-q", path, "-o", out, "--tp", tp, "--tp-align", align)
    grids = check(source, out, tp, align)
    done = cf.ok("minimax-verify", "-q", out, "--source", path)
    exact = done.stdout.split()
    assert exact[-5] == exact[-3], done.stdout  # "N of N tensors exact"
    return grids


def tiny():
    m1, m2 = Checkpoint.load(TINY_M1), Checkpoint.load(TINY_M2)
    with Scratch() as root:
        for tp in (1, 2, 4, 8):
            convert_and_check(m1, TINY_M1, root + "", tp)
    with Scratch() as root:
        for tp in (1, 2, 4, 8):
            grids = convert_and_check(m2, TINY_M2, root, tp)
            w13, w2 = (grids[f"model.layers.3.block_sparse_moe.experts.{w}_weight"][1] for w in ("w13", "w2"))
            assert w13 == [math.gcd(192 // tp, 128), 128] and w2 == [128, math.gcd(192 // tp, 128) if tp > 1 else 128], (tp, w13, w2)


def padded():
    """192 rows at tp 8 are blocks of 24 rows: each rank holds the whole blocks that its rows lie in, and scales keep their 128 x 128 grid."""
    m2 = Checkpoint.load(TINY_M2)
    with Scratch() as root:
        for tp in (1, 2, 4, 8):
            grids = convert_and_check(m2, TINY_M2, root, tp, "pad")
            for w in ("w13", "w2"):
                assert grids[f"model.layers.0.block_sparse_moe.experts.{w}_weight"][1] == [128, 128], (tp, w)
            # What is owned is what the equal split gives: rows and columns put back together are those of the source (check above).


def refused():
    with Scratch() as root:
        for tp in (2, 4, 8):
            done = cf.run(CONVERT, "-q", TINY_M2, "-o", root + "/out", "--tp", tp, "--tp-align", "error")
            cf.assert_error(done, "minimax-convert", 4, "E_TP_ALIGN", "model.layers.0.", f"tp {tp}", "--tp-align split")
        small(fp8=False, inter=7).save(root + "/plain")  # q, k and v end inside a block where they lie side by side, at every --tp
        done = cf.run(CONVERT, "-q", root + "/plain", "-o", root + "/out", "--quant", "block_fp8", "--tp-align", "error")
        cf.assert_error(done, "minimax-convert", 4, "E_TP_ALIGN", "qkv_proj", "found the end of a matrix at tp 1 inside", "expected --tp-align split or another --quant\n")
        done = cf.run(CONVERT, "-q", root + "/plain", "-o", root + "/out", "--quant", "w4a16")
        cf.assert_error(done, "minimax-convert", 4, "E_TP_ALIGN", "w2_weight", "found the end of a matrix at tp 1 inside", "expected another --quant\n")
        for tiny_model in (TINY_M1, TINY_M2):
            for tp in (3, 5, 6, 7, 16, 64):
                done = cf.run(CONVERT, "-q", tiny_model, "-o", root + "/out", "--tp", tp)
                cf.assert_error(done, "minimax-convert", 4, "E_TP", f"--tp {tp}", "num_attention_heads 8", "expected one of 1, 2, 4, 8")
        odd = small(heads=8, kv=8, inter=12)
        odd.save(root + "/odd")
        done = cf.run(CONVERT, "-q", root + "/odd", "-o", root + "/out", "--tp", 8)
        cf.assert_error(done, "minimax-convert", 4, "E_TP", "intermediate_size 12", "expected one of 1, 2, 4")
        odd = small(heads=12, kv=3)
        odd.save(root + "/odd3")
        done = cf.run(CONVERT, "-q", root + "/odd3", "-o", root + "/out", "--tp", 2)
        cf.assert_error(done, "minimax-convert", 4, "E_TP", "num_key_value_heads 3", "expected one of 1, 3, 6")
        cf.ok(CONVERT, "-q", TINY_M1, "-o", root + "/out", "--tp", 8, "--tp-align", "error")  # nothing to align


def partial_blocks():
    """D09: rows and columns that end 1 or 127 past a block, alone and cut."""
    for hidden, inter in ((129, 255), (255, 129), (127, 1), (1, 127), (257, 383)):
        with Scratch() as root:
            source = small(hidden=hidden, inter=inter, heads=3, dim=86, kv=3, experts=2, vocab=70)
            source.save(root + "/src")
            for align in ("split", "pad"):
                convert_and_check(source, root + "/src", root, 1, align)
            if inter % 3 == 0:
                for align in ("split", "pad"):
                    convert_and_check(source, root + "/src", root, 3, align)


def scale_types():
    """D04: BF16 and E8M0 scales become F32 ones of the same value."""
    for dtype in ("BF16", "F8_E8M0", "U8"):
        with Scratch() as root:
            source = small(hidden=140, inter=130, heads=2, dim=130, kv=1, experts=2, vocab=64)
            for name, (_, shape, data) in source.tensors.items():
                if name.endswith("_scale_inv"):
                    raw = cf.values(name, "BF16", len(data) // 4) if dtype == "BF16" else bytes(100 + b % 40 for b in cf.noise(name, len(data) // 4))
                    if dtype == "BF16":
                        raw = bytes(b & 0x7F if i % 2 else b for i, b in enumerate(raw))  # no signs
                    source.tensors[name] = (dtype, shape, raw)
            source.save(root + "/src")
            for tp in (1, 2):
                convert_and_check(source, root + "/src", root, tp)


def from_e4m3(code):
    e, m = code >> 3 & 15, code & 7
    v = (1 + m / 8) * 2.0 ** (e - 7) if e else m * 2.0**-9
    return -v if code & 128 else v


def f32(v):
    return struct.unpack("<f", struct.pack("<f", v))[0]


def to_bf16(v):
    (u,) = struct.unpack("<I", struct.pack("<f", v))
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16


def dequantised():
    """FP8 to bf16 over partial blocks: code times scale in f32, rounded once, to nearest even."""
    with Scratch() as root:
        source = small(hidden=129, inter=130, heads=1, dim=258, kv=1, experts=1, vocab=1, block=64)
        source.save(root + "/src")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "bf16")
        (found,), _ = cf.packed(root + "/out")
        at = "model.layers.0.block_sparse_moe.experts."
        for name, sources in ((at + "w2_weight", [at + "0.w2.weight"]), (at + "w13_weight", [at + "0.w1.weight", at + "0.w3.weight"]),
                              ("model.layers.0.self_attn.o_proj.weight", ["model.layers.0.self_attn.o_proj.weight"])):
            want = []
            for s in sources:
                _, (rows, cols), codes = source.tensors[s]
                scale = [x for (x,) in struct.iter_unpack("<f", source.tensors[s + "_scale_inv"][2])]
                across = -(-cols // 64)
                want += [to_bf16(f32(from_e4m3(codes[r * cols + k]) * scale[r // 64 * across + k // 64])) for r in range(rows) for k in range(cols)]
            assert found[name][2] == struct.pack(f"<{len(want)}H", *want), name


def zero_blocks():
    """D08: a block of zeros has a scale of 1 and decodes to zeros, whatever lies beside it."""
    with Scratch() as root:
        source = small(hidden=256, inter=130, heads=1, dim=200, kv=1, experts=1, vocab=64, fp8=False)
        name = "model.layers.0.self_attn.o_proj.weight"  # [256, 200]: 2 x 2 blocks
        dtype, shape, data = source.tensors[name]
        rows = [bytearray(data[i : i + 400]) for i in range(0, len(data), 400)]
        for row in rows[128:]:
            row[256:] = bytes(144)
        source.tensors[name] = (dtype, shape, b"".join(rows))
        source.save(root + "/src")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--quant", "block_fp8")
        cf.ok("minimax-verify", "-q", root + "/out")
        (found,), _ = cf.packed(root + "/out")
        scale = struct.unpack("<4f", found[name + "_scale_inv"][2])
        assert scale[3] == 1 and all(s < 1 for s in scale[:3]), scale
        assert all(found[name][2][r * 200 + 128 : r * 200 + 200] == bytes(72) for r in range(128, 256))


def vocabulary():
    """Padded to whole multiples of 64 for every rank; rows of zeros in the head are noted, padding and embedding are not."""
    for vocab, tp in ((1, 1), (12, 2), (65, 2), (128, 2), (130, 1), (200, 2)):
        with Scratch() as root:
            source = small(vocab=vocab)
            dead = [v for v in range(vocab) if v % 5 == 0]
            for name in ("lm_head.weight", "model.embed_tokens.weight"):
                dtype, shape, data = source.tensors[name]
                source.tensors[name] = (dtype, shape, b"".join(bytes(20) if r in dead else data[r * 20 : r * 20 + 20] for r in range(vocab)))
            source.save(root + "/src")
            convert_and_check(source, root + "/src", root, tp)
            assert cf.packed(f"{root}/out-{tp}-split")[1]["dead_rows"] == dead


def some_ranks():
    """What none of --ranks has is not read: a NaN there is another run's to find. The files are those of all ranks."""
    for options, mine, others, tensor in ((("--tp", "2", "--ep", "2"), "0", "1", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
                                          (("--pp", "2"), "1", "0", "model.layers.0.self_attn.q_proj.weight"),
                                          (("--tp", "4",), "0,1", "3", "model.layers.1.self_attn.o_proj.weight")):
        with Scratch() as root:
            c = small(layers=2, experts=4, heads=4, kv=4, inter=8, fp8=False)
            c.save(root + "/src")
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/all", *options, "--quant", "none")
            cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/some", *options, "--quant", "none", "--ranks", mine)
            names = [n for n in os.listdir(root + "/some") if n.startswith("model-")]
            assert names and all(open(f"{root}/all/{n}", "rb").read() == open(f"{root}/some/{n}", "rb").read() for n in names)
            dtype, shape, data = c.tensors[tensor]
            c.tensors[tensor] = (dtype, shape, data[:-2] + b"\xc0\x7f")
            c.save(root + "/nan")
            if options != ("--tp", "4"):  # one strip has the columns of all ranks
                cf.ok(CONVERT, "-q", root + "/nan", "-o", root + "/out", *options, "--quant", "none", "--ranks", mine)
            cf.assert_error(cf.run(CONVERT, "-q", root + "/nan", "-o", root + "/bad", *options, "--quant", "none", "--ranks", others), "minimax-convert", 3,
                            "E_NONFINITE", tensor)


if __name__ == "__main__":
    cf.main([tiny, padded, refused, partial_blocks, scale_types, dequantised, zero_blocks, vocabulary, some_ranks])
