#!/usr/bin/env python3
"""minimax-inspect: every line and every JSON field of a listing beside what lies in the files, read here with struct and json; comparisons of
two checkpoints, form and bytes; what goes together and what does not."""
import hashlib
import json
import os
import shutil
import struct
import sys

import convert_files as cf
from convert_files import Scratch, read_st, tree, write_st

sys.path.insert(0, "tests/fault")
import packed_files as pf

INSPECT, CONVERT, SRC = "minimax-inspect", "minimax-convert", "tests/data/tiny-m2"


def lines(*args):
    return cf.ok(INSPECT, *args).stdout.decode().splitlines()


def listed(*args):
    return json.loads(cf.ok(INSPECT, *args, "--json").stdout)


def header_digest(path):
    with open(path, "rb") as f:
        (n,) = struct.unpack("<Q", f.read(8))
        f.seek(0)
        return hashlib.sha256(f.read(8 + n)).hexdigest()


def row(name, kind, shape, size):
    return f"  {name:<68} {kind:<20} {str(list(shape)):<20} {size:>12}"


def one_file(root):
    """Offsets, metadata, and a shape of every rank."""
    path = root + "/one.safetensors"
    tensors = {"b": ("I32", [3], b"x" * 12), "a": ("BF16", [2, 5], b"y" * 20), "scalar": ("F32", [], b"z" * 4)}
    write_st(path, tensors)
    data = open(path, "rb").read()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + n]) | {"__metadata__": {"of": "nothing", "by\n": "a\ttest"}}
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data[8 + n :])
    got = lines(path)
    assert got[0] == f"{path}: safetensors, 3 tensors, 36 bytes", got
    assert got[1:3] == ["  by\\x0a: a\\x09test", "  of: nothing"] and len(got) == 6, got
    assert sorted(got[3:]) == sorted(row(k, v[0], v[1], len(v[2])) for k, v in tensors.items()), got
    assert lines(path, "--match", "cal") == got[:3] + [x for x in got if "scalar" in x] and lines(path, "--summary") == got[:3]
    j = listed(path)
    assert (j["kind"], j["path"], j["tensor_count"], j["bytes"], j["size"]) == ("file", path, 3, 36, os.path.getsize(path)), j
    assert j["header_sha256"] == header_digest(path) and j["metadata"] == header["__metadata__"], j
    for x in j["tensors"]:
        dtype, shape, content = tensors[x["name"]]
        at = 8 + len(text) + header[x["name"]]["data_offsets"][0]
        assert x == {"name": x["name"], "type": dtype, "shape": shape, "bytes": len(content), "offset": at}, x
    assert "tensors" not in listed(path, "--summary") and [x["name"] for x in listed(path, "--match", "b")["tensors"]] == ["b"]


def source(_):
    index = json.load(open(f"{SRC}/model.safetensors.index.json", encoding="utf-8"))["weight_map"]
    every = {}
    for name in sorted(set(index.values())):
        every |= {k: (name, *v) for k, v in read_st(f"{SRC}/{name}")[0].items()}
    size = sum(len(v[3]) for v in every.values())
    got = lines(SRC)
    assert got[0] == f"{SRC}: source, {len(every)} tensors in {len(set(index.values()))} files, {size} bytes", got[0]
    assert sorted(got[1:]) == sorted(row(k, v[1], v[2], len(v[3])) for k, v in every.items())
    j = listed(SRC)
    assert (j["kind"], j["tensor_count"], j["bytes"], j["architecture"]) == ("source", len(every), size, "MiniMaxM2ForCausalLM"), j
    assert {(f["file"], f["size"], f["header_sha256"]) for f in j["files"]} == \
        {(n, os.path.getsize(f"{SRC}/{n}"), header_digest(f"{SRC}/{n}")) for n in index.values()}, j["files"]
    assert {x["name"]: (x["file"], x["type"], x["shape"], x["bytes"]) for x in j["tensors"]} == \
        {k: (v[0], v[1], v[2], len(v[3])) for k, v in every.items()}
    assert lines(SRC, "--names-only", "--summary") == [f"{SRC}: source, {len(every)} tensors in {len(set(index.values()))} files, by the index alone"]
    j = listed(SRC, "--names-only")
    assert {x["name"]: x["file"] for x in j["tensors"]} == index and all(len(x) == 2 for x in j["tensors"]) and "header_sha256" not in j["files"][0]


def stored(path, manifest, tensor, rank):
    """(bytes, [(suffix, dtype, shape)]) of a packed tensor in one rank's parts."""
    size, planes = 0, []
    for part in manifest["ranks"][rank]["parts"]:
        for name, (dtype, shape, data) in read_st(f"{path}/{part['file']}")[0].items():
            suffix = name[len(tensor["name"]) :] if name.startswith(tensor["name"]) else None
            if suffix is not None and suffix in [p["suffix"] for p in tensor["planes"]]:
                size += len(data)
                planes.append((suffix, dtype, shape))
    return size, planes


def packed(root):
    """Two stages of two ranks: what a rank lists, with its parts."""
    out = root + "/out"
    cf.ok(CONVERT, "-q", SRC, "-o", out, "--tp", "2", "--pp", "2", "--quant", "nvfp4")
    m = json.load(open(out + "/manifest.json", encoding="utf-8"))
    assert len(m["ranks"]) == 4 and {t["stage"] for t in m["tensors"]} == {0, 1}
    for rank in (None, 0, 3):
        args = [out] + ([] if rank is None else ["--rank", str(rank)])
        kept = [t for t in m["tensors"] if rank is None or t["stage"] == rank // 2]
        sizes = {t["name"]: stored(out, m, t, 2 * t["stage"]) for t in kept}
        total = sum(n for n, _ in sizes.values())
        parts = [p for r, x in enumerate(m["ranks"]) if rank in (None, r) for p in x["parts"]]
        got = lines(*args)
        assert got[0] == (f'{out}: packed by {m["tool"]}, MiniMaxM2ForCausalLM, --tp 2 --ep 1 --pp 2 --quant "nvfp4" --tp-align split, '
                          f"{len(kept)} tensors, {total} bytes a rank"), got[0]
        assert got[1 : 1 + len(parts)] == [f"  {p['file']}  {os.path.getsize(out + '/' + p['file'])} bytes" for p in parts], got
        shapes = {t["name"]: [t["rows"]] if t["vector"] else [t["lead"], t["rows"], t["cols"]] if t["lead"] else [t["rows"], t["cols"]] for t in kept}
        types = {t["name"]: " ".join([t["scheme"]] + [f"{p['cell'][0]}x{p['cell'][1]}" for p in t["planes"][1:]]) for t in kept}
        assert got[1 + len(parts) :] == [row(t["name"], types[t["name"]], shapes[t["name"]], sizes[t["name"]][0]) for t in kept]
        j = listed(*args)
        assert (j["kind"], j["tensor_count"], j["bytes"], j["tp"], j["ep"], j["pp"], j["quant"], j["tp_align"], j["plan"], j["tool"]) == \
            ("packed", len(kept), total, 2, 1, 2, "nvfp4", "split", m["plan"], m["tool"]), j
        assert j["ranks"] == [{"rank": r, "parts": [{"file": p["file"], "size": p["size"], "sha256_tree": p["root"]} for p in x["parts"]]}
                              for r, x in enumerate(m["ranks"]) if rank in (None, r)], j["ranks"]
        assert {(f["file"], f["size"], f["sha256"]) for f in j["companions"]} == \
            {(n, os.path.getsize(f"{out}/{n}"), hashlib.sha256(open(f"{out}/{n}", "rb").read()).hexdigest())
             for n in ("config.json", "tokenizer.json", "tokenizer.bin")}, j["companions"]
        assert [x["name"] for x in j["tensors"]] == [t["name"] for t in kept]
        for x, t in zip(j["tensors"], kept):
            assert (x["type"], x["shape"], x["bytes"], x["scheme"], x["stage"]) == \
                (types[t["name"]], shapes[t["name"]], sizes[t["name"]][0], t["scheme"], t["stage"]), x
            assert sorted((p["suffix"], p["dtype"], p["shape"]) for p in x["planes"]) == sorted(sizes[t["name"]][1]), x
            assert [p["cell"] for p in x["planes"]] == [p["cell"] for p in t["planes"]], x
    os.remove(f"{out}/{m['ranks'][0]['parts'][0]['file']}")  # the other ranks need it for nothing
    assert lines(out, "--rank", "1") and cf.run(INSPECT, out).returncode == 6


def companions(a, b):
    """One byte of the configuration, a tokenizer that only one has: another checkpoint of the same weights. b is put back."""
    kept = {name: open(f"{b}/{name}", "rb").read() for name in ("config.json", "tokenizer.json")}
    with open(b + "/config.json", "wb") as f:
        f.write(kept["config.json"].replace(b"5000000", b"5000001"))
    done = cf.run(INSPECT, a, "--diff", b, "--data")
    assert (done.returncode, done.stdout) == (6, b"~ file config.json: other bytes\n"), done
    assert b"found 0 tensors and 1 files that differ" in done.stderr and cf.ok(INSPECT, a, "--diff", b)
    if not os.path.exists(b + "/manifest.json"):
        os.remove(b + "/tokenizer.json")
        for x, y, sign, what in ((a, b, "-", "removed"), (b, a, "+", "added")):
            done = cf.run(INSPECT, x, "--diff", y, "--data")
            assert (done.returncode, done.stdout.decode().splitlines()) == (6, ["~ file config.json: other bytes", f"{sign} file tokenizer.json"]), done
            done = json.loads(cf.run(INSPECT, x, "--diff", y, "--data", "--json").stdout)
            assert not done["same"] and done["differences"] == [{"name": "config.json", "what": "file"},
                                                                {"name": "tokenizer.json", "what": "file " + what}], done
    for name, text in kept.items():
        with open(f"{b}/{name}", "wb") as f:
            f.write(text)


def differences(root):
    """Same, other bytes, other form, a tensor that only one of them has; of sources and of packed checkpoints."""
    other = root + "/other"
    shutil.copytree(SRC, other)
    n = len(listed(SRC)["tensors"])
    assert lines(SRC, "--diff", other) == [f"same: {n} tensors (names, types, shapes)"]
    assert lines(SRC, "--diff", other, "--data") == [f"same: {n} tensors and 2 files, every byte"]
    companions(SRC, other)
    name = other + "/model-00002-of-00002.safetensors"
    tensors = read_st(name)[0]
    last = max((k for k in tensors if len(tensors[k][2]) > 4), key=lambda k: len(tensors[k][2]))
    dtype, shape, data = tensors[last]
    tensors[last] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))  # the last byte of all
    write_st(name, tensors)
    assert cf.ok(INSPECT, SRC, "--diff", other)
    done = cf.run(INSPECT, SRC, "--diff", other, "--data")
    form = f"{dtype} {list(shape)}"
    assert (done.returncode, done.stdout.decode().splitlines()) == (6, [f"~ {last}: {form}, {form}, other bytes"]), done
    assert b"E_DIFFER" in done.stderr and b"found 1 tensors that differ" in done.stderr, done.stderr
    done = cf.run(INSPECT, SRC, "--diff", other, "--data", "--json")
    said = {"type": dtype, "shape": list(shape)}
    assert json.loads(done.stdout) == {"same": False, "tensor_count": n, "data": True,
                                       "differences": [{"name": last, "what": "bytes", "first": said, "second": said}]}, done.stdout
    assert listed(SRC, "--diff", SRC) == {"same": True, "tensor_count": n, "data": False, "differences": []}
    for out, tp, quant in (("/p", "2", "channel_fp8"), ("/q", "2", "channel_fp8"), ("/r", "2", "bf16"), ("/s", "1", "channel_fp8")):
        cf.ok(CONVERT, "-q", SRC, "-o", root + out, "--tp", tp, "--quant", quant)
    count = len(listed(root + "/p")["tensors"])
    assert lines(root + "/p", "--diff", root + "/q", "--data") == [f"same: {count} tensors and 3 files, every byte"]
    companions(root + "/p", root + "/q")
    part = root + "/q/model-rank-00001-part-00000.safetensors"  # of the second rank, its last byte
    with open(part, "r+b") as f:
        (h,) = struct.unpack("<Q", f.read(8))
        end = {k: v["data_offsets"][1] for k, v in json.loads(f.read(h)).items() if k != "__metadata__"}
        f.seek(8 + h + max(end.values()) - 1)
        byte = f.read(1)[0]
        f.seek(-1, 1)
        f.write(bytes([byte ^ 255]))
    done = cf.run(INSPECT, root + "/p", "--diff", root + "/q", "--data")
    got = done.stdout.decode().splitlines()
    assert done.returncode == 6 and len(got) == 1 and max(end, key=end.get).startswith(got[0][2:].split(":")[0]), done
    done = cf.run(INSPECT, root + "/p", "--diff", root + "/r")
    got = done.stdout.decode().splitlines()
    assert done.returncode == 6 and got and all(x.startswith("~ ") and "channel_fp8" in x and x.endswith("]") for x in got), done
    done = cf.run(INSPECT, root + "/p", "--diff", root + "/s", "--data")  # other cuts are another checkpoint, even where a tensor is whole
    assert done.returncode == 6 and b"~ model.norm.weight:" in done.stdout and len(done.stdout.splitlines()) == count, done


def one_sided(root):
    """A tensor more at the front, in the middle, at the end of the names."""
    a, b = root + "/a.safetensors", root + "/b.safetensors"
    one = ("U8", [1], b"1")
    write_st(a, {"d": one, "b": one, "e": one})
    write_st(b, {"f": one, "c": one, "b": ("U8", [2], b"12"), "a": one, "d": one})
    done = cf.run(INSPECT, a, "--diff", b)
    want = ["+ a: U8 [1]", "~ b: U8 [1], U8 [2]", "+ c: U8 [1]", "- e: U8 [1]", "+ f: U8 [1]"]
    assert (done.returncode, done.stdout.decode().splitlines()) == (6, want) and b"found 5 tensors" in done.stderr, done
    d = json.loads(cf.run(INSPECT, a, "--diff", b, "--json").stdout)["differences"]
    u8 = {"type": "U8", "shape": [1]}
    assert d[0] == {"name": "a", "what": "added", "second": u8} and d[3] == {"name": "e", "what": "removed", "first": u8}, d
    assert d[1] == {"name": "b", "what": "form", "first": u8, "second": {"type": "U8", "shape": [2]}}, d


def refusals(root):
    path = root + "/one.safetensors"
    write_st(path, {"a": ("U8", [1], b"1")})
    before = tree(root)
    for args in ([path, "--data"], [path, "--diff", path, "--match", "a"], [path, "--diff", path, "--summary"], [path, "--diff", path, "--data"],
                 [path, "--rank", "0"], [SRC, "--rank", "0"], [path, "--names-only"], [SRC, "--diff", path, "--data"],
                 [SRC, "--diff", SRC, "--data", "--names-only"]):
        cf.assert_error(cf.run(INSPECT, *args), INSPECT, 2, "E_USAGE", "found")
    assert tree(root) == before


def scratched(test):
    def run():
        with Scratch() as root:
            test(root)
    run.__name__ = test.__name__
    return run


def ranks_here(root):
    """Bytes of ranks that are not there are not the same; without any there is nothing to compare."""
    for name, ranks in (("a", "0"), ("b", "1"), ("c", "0"), ("d", "0,1")):
        cf.ok(CONVERT, SRC, "-o", f"{root}/{name}", "-q", "--tp", "2", "--ranks", ranks)
    n, files = (len(cf.packed(root + "/a")[1][key]) for key in ("tensors", "files"))
    for other in "bd":
        done = cf.run(INSPECT, root + "/a", "--diff", f"{root}/{other}", "--data")
        found = done.stdout.decode().splitlines()
        assert done.returncode == 6 and len(found) == n and all(x.endswith(", on other ranks") for x in found), done
    assert lines(root + "/a", "--diff", root + "/c", "--data") == [f"same: {n} tensors and {files} files, every byte of the 1 of 2 ranks that are here"]
    assert listed(root + "/a", "--diff", root + "/c", "--data")["ranks_compared"] == 1
    assert lines(root + "/d", "--diff", root + "/d", "--data") == [f"same: {n} tensors and {files} files, every byte"]
    assert lines(root + "/d", "--diff", root + "/c", "--data", "--rank", "0") == [f"same: {n} tensors and {files} files, every byte of the 1 of 2 ranks that are here"]
    empty = pf.Packed(root + "/a")
    empty.parts, empty.manifest["ranks"] = {}, [{"parts": []}] * 2
    empty.save(root + "/e")
    cf.assert_error(cf.run(INSPECT, root + "/e", "--diff", root + "/e", "--data"), INSPECT, 6, "E_RANKS", "found no part of any rank")
    assert lines(root + "/e", "--diff", root + "/a") == [f"same: {n} tensors (names, types, shapes)"]


def static_scales(root):
    """The static scale of a tensor's activations lies in the manifest alone."""
    names = [k for k in cf.Checkpoint.load(SRC).tensors if k.endswith("proj.weight") or ".experts." in k and k.endswith(".weight")]
    for i, name in enumerate(("a", "b")):
        with open(f"{root}/{name}.json", "w", encoding="utf-8") as f:
            json.dump({k[:-len(".weight")] + ".activation_scale": 1 + i for k in names}, f)
        cf.ok(CONVERT, SRC, "-o", f"{root}/{name}", "-q", "--quant", "nvfp4", "--act-scales", f"{root}/{name}.json")
    tensors = cf.packed(root + "/a")[1]["tensors"]
    static = {t["name"] for t in tensors if "input_scale" in t}
    done = cf.run(INSPECT, root + "/a", "--diff", root + "/b", "--data", "--json")
    assert done.returncode == 6 and static, done
    assert {(d["name"], d["what"]) for d in json.loads(done.stdout)["differences"]} == {(k, "input_scale") for k in static}
    assert b", another input_scale\n" in cf.run(INSPECT, root + "/a", "--diff", root + "/b", "--data").stdout
    assert lines(root + "/a", "--diff", root + "/b") == [f"same: {len(tensors)} tensors (names, types, shapes)"]


cf.main([scratched(t) for t in (one_file, source, packed, differences, one_sided, refusals, ranks_here, static_scales)])
