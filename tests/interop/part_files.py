#!/usr/bin/env python3
"""Part files open with the Python safetensors package and with json and byte offsets alone, with equal tensors; parts and manifest keep
every rule of formats/FORMAT.md; what is packed unquantised is the source's bytes."""
import hashlib
import json
import os
import subprocess

import numpy as np
import safetensors
from packed import ELEMENT, Packed, Part, cells

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
# model, scheme, tp, further options: one part and many, every kind of cut, padding, replicas, sub-byte codes
CASES = [("tiny-m1", "none", 1), ("tiny-m1", "none", 4, "--part-size", "512K"), ("tiny-m1", "block_fp8", 2, "--part-size", "100K"),
         ("tiny-m2", "none", 8), ("tiny-m2", "none", 2, "--part-size", "1M"), ("tiny-m2", "block_fp8", 8, "--tp-align", "pad"),
         ("tiny-m2", "none", 4, "--ep", "2", "--pp", "3"), ("tiny-m2", "nvfp4", 4), ("tiny-m2", "w4a16", 8, "--part-size", "200K")]


def check_part(path, rank, number, pack):
    """One part file, and as the safetensors package sees it. Returns the names in file order."""
    part = Part(path)
    assert part.data % 4096 == 0, "data start"
    text = part.bytes[8:part.data].decode()
    assert text.rstrip(" ") == text.strip() and text[0] == "{", "the header is padded with spaces alone"
    manifest = pack.manifest
    assert part.metadata == {"format": "minimax-packed", "version": str(pack.manifest["version"]), "rank": str(rank), "tp": str(pack.tp), "part": str(number),
                             "plan": manifest["plan"]}, part.metadata
    at, last_class = part.data, 0
    for name, (_, _, begin, end) in part.tensors.items():
        size = end - begin
        align = next(a for a in (4096, 256, 16, 1) if size % a == 0)
        klass = (4096, 256, 16, 1).index(align)
        assert begin == at and size > 0 and begin % align == 0 and klass >= last_class, f"{path}: {name}: place"
        at, last_class = end, klass
    assert at == len(part.bytes), "trailing bytes"

    theirs = dict(safetensors.deserialize(part.bytes))
    assert theirs.keys() == part.tensors.keys()
    with safetensors.safe_open(path, "np") as f:
        assert f.metadata() == part.metadata and set(f.keys()) == part.tensors.keys()
        for name, (dtype, shape, begin, end) in part.tensors.items():
            assert (theirs[name]["dtype"], theirs[name]["shape"]) == (dtype, shape), name
            assert f.get_slice(name).get_dtype() == dtype and f.get_slice(name).get_shape() == shape, name
            assert bytes(theirs[name]["data"]) == part.bytes[begin:end], name
            if dtype == "F32":
                assert f.get_tensor(name).tobytes() == part.bytes[begin:end], name
    return list(part.tensors), part


def check_ranks(pack):
    """Digests, names and sizes of all parts; every plane once on every rank, in its manifest shape."""
    tensor_of = {t["name"] + p["suffix"]: i for i, t in enumerate(pack.manifest["tensors"]) for p in t["planes"]}
    for rank, entry in enumerate(pack.manifest["ranks"]):
        planes = {t["name"] + p["suffix"]: (p["dtype"], pack.plane_shape(t, p))
                  for t in pack.manifest["tensors"] if t["stage"] == rank // pack.tp for p in t["planes"]}
        assert entry.keys() == {"parts"}
        seen, home = {}, {}
        for number, listed in enumerate(entry["parts"]):
            assert listed.keys() == {"file", "size", "root", "blocks"}
            assert listed["file"] == f"model-rank-{rank:05d}-part-{number:05d}.safetensors"
            names, part = check_part(os.path.join(pack.path, listed["file"]), rank, number, pack)
            digests = part.block_digests()
            assert listed["size"] == len(part.bytes) and listed["blocks"] == [d.hex() for d in digests]
            assert listed["root"] == hashlib.sha256(b"".join(digests)).hexdigest()
            for name in names:
                assert name not in seen, f"{name} twice on rank {rank}"
                seen[name] = tuple(part.tensors[name][:2])
                assert home.setdefault(tensor_of[name], number) == number, f"{name}: its planes lie in two parts"
        assert seen == planes, f"rank {rank}: names, dtypes or shapes are not the manifest's"
        assert [home[i] for i in sorted(home)] == sorted(home.values()), "parts do not follow layer order"


def check_manifest(pack, source):
    m, tp = pack.manifest, pack.tp
    assert list(m) == ["format", "version", "tool", "quant", "tp_align", "plan", "model", "parallel", "cuts", "tensors", "ranks", "sources",
                       "files", "dead_rows", "sha256"], list(m)
    grids = [plane["grid"] for t in m["tensors"] for plane in t["planes"] if "grid" in plane]
    assert (m["format"], m["version"]) == ("minimax-packed", 2 if grids else 1) and m["parallel"].keys() == {"tp", "ep", "pp"}
    assert tp % pack.ep == 0 and len(m["ranks"]) == pack.pp * tp
    for cut in m["cuts"]:
        if cut["axis"] == "none":
            assert cut.keys() == {"axis"}
            continue
        assert cut.keys() == {"axis", "whole", "local", "ranks"} and cut["axis"] in ("rows", "cols") and len(cut["ranks"]) == tp
        end = 0
        for at, start, count in cut["ranks"]:
            assert at + count <= cut["local"] and start <= end and start + count <= cut["whole"], cut
            end = max(end, start + count)
        assert end == cut["whole"], cut
    for t in m["tensors"]:
        assert t.keys() == {"name", "scheme", "vector", "stage", "lead", "whole_lead", "rows", "cols", "whole_cols", "planes", "pieces"}
        assert t["stage"] < pack.pp and t["lead"] * pack.ep == t["whole_lead"], t["name"]
        assert not t["vector"] or (t["lead"], t["cols"], [p["cell"] for p in t["planes"]]) == (0, 1, [[1, 1]]), t["name"]
        row = 0
        for piece in t["pieces"]:
            assert piece.keys() == {"source", "rows", "at", "local_rows", "cut"} and piece["at"] == row
            row += piece["local_rows"]
            cut = m["cuts"][piece["cut"]]
            by_rows = cut["axis"] == "rows"
            by_cols = cut["axis"] == "cols"
            assert (piece["rows"], piece["local_rows"]) == ((cut["whole"], cut["local"]) if by_rows else (piece["rows"], piece["rows"]))
            assert (t["whole_cols"], t["cols"]) == ((cut["whole"], cut["local"]) if by_cols else (t["cols"], t["cols"]))
        assert row == t["rows"], t["name"]
    for listed in m["sources"]:
        with open(os.path.join(source, listed["name"]), "rb") as f:
            head = f.read(8)
            head += f.read(int.from_bytes(head, "little"))
        assert listed["size"] == os.path.getsize(f.name) and listed["header_sha256"] == hashlib.sha256(head).hexdigest()
    for listed in m["files"]:
        if listed["name"] == "tokenizer.bin":  # made, not copied
            continue
        with open(os.path.join(pack.path, listed["name"]), "rb") as f, open(os.path.join(source, listed["name"]), "rb") as g:
            copy = f.read()
            assert copy == g.read() and (listed["size"], listed["sha256"]) == (len(copy), hashlib.sha256(copy).hexdigest())
    expected = {"manifest.json"} | {f["name"] for f in m["files"]} | {p["file"] for r in m["ranks"] for p in r["parts"]}
    assert set(os.listdir(pack.path)) == expected


def source_tensors(source):
    """Every tensor of a source directory: name -> elements; FP8 scales one per weight."""
    tensors = {}
    for name in sorted(os.listdir(source)):
        if name.startswith("model-") and name.endswith(".safetensors"):
            part = Part(os.path.join(source, name))
            tensors |= {t: part.elements(t) for t in part.tensors}
    return tensors


def check_values(pack, source):
    """Of `none`: each piece of each plane is the source's; scales are compared weight by weight."""
    theirs = source_tensors(source)
    used = set()
    for t in pack.manifest["tensors"]:
        for plane in t["planes"]:
            for name, got in pack.whole(t, plane):
                suffix = plane["suffix"]
                for e in range(t["whole_lead"] or 1):
                    key = name.replace("{e}", str(e)) + suffix
                    want = theirs[key]
                    used.add(key)
                    if suffix:
                        rows, cols = got.shape[1:]
                        assert want.shape == (cells(rows, 128), cells(cols, 128)), key
                        want = want[np.arange(rows)[:, None] // 128, np.arange(cols)[None, :] // 128]
                    assert ELEMENT[plane["dtype"]] == want.dtype and (want.reshape(got[e].shape) == got[e]).all(), key
    assert used == theirs.keys(), f"not packed: {sorted(theirs.keys() - used)[:3]}"


for number, (model, quant, tp, *options) in enumerate(CASES):
    source, out = f"tests/data/{model}", os.path.join(os.environ["TMPDIR"], str(number))
    subprocess.run([CONVERT, source, "-o", out, "--quant", quant, "--tp", str(tp), "--quiet", *options], check=True)
    pack = Packed(out)
    check_manifest(pack, source)
    check_ranks(pack)
    if quant == "none":
        check_values(pack, source)
    print(f"{model} {quant} tp {tp} {' '.join(options)}: {sum(len(r) for r in pack.parts)} parts, {len(pack.manifest['tensors'])} tensors")
print(f"{len(CASES)} packed checkpoints read by safetensors {safetensors.__version__} and by offsets alone")
