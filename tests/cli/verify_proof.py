#!/usr/bin/env python3
"""What minimax-verify may call proven: only ranks whose files are there, compared once each."""
import ctypes
import json
import os
import shutil
import struct
import sys

import convert_files as cf
from convert_files import Scratch

sys.path.insert(0, "tests/fault")
import packed_files as pf

CONVERT, VERIFY = "minimax-convert", "minimax-verify"
M1, M2 = "tests/data/tiny-m1", "tests/data/tiny-m2"


def report(path, source):
    return json.loads(cf.ok(VERIFY, "-q", path, "--source", source, "--json").stdout)


def some_ranks():
    """Tensors of a stage whose files are not in the directory are in no list and no count."""
    with Scratch() as root:
        out = root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", out, "--tp", 2, "--pp", 2, "--ranks", "0,1")
        done = cf.ok(VERIFY, out, "--source", M2, "--min-sqnr", 90)
        stages = [t["stage"] for t in cf.packed(out)[1]["tensors"]]
        here, absent = stages.count(0), stages.count(1)
        assert f"{here} of {here} tensors exact; {absent} tensors are not in this directory" in done.stdout.decode(), done.stdout
        assert b"ranks 0-1 of 4, " in done.stderr, done.stderr
        found = report(out, M2)
        assert (found["exact_tensors"], found["absent_tensors"], len(found["tensors"])) == (here, absent, here), found
        assert all(t["count"] > 0 for t in found["tensors"])
        assert json.loads(cf.ok(VERIFY, "-q", out, "--json").stdout)["absent_ranks"] == [2, 3]
        cf.ok(VERIFY, "-q", out, "--source", M2, "--report", root + "/r.html")
        page = open(root + "/r.html", encoding="utf-8").read()
        assert "Every weight in this directory is that of the source. " in page and f"{absent} tensors are not in this directory" in page
        cf.ok(CONVERT, "-q", M2, "-o", root + "/all", "--tp", 2)
        assert "absent_tensors" not in report(root + "/all", M2)
        source = cf.Checkpoint.load(M2)  # scales of the absent stage are not judged, neither by a conversion nor by a proof
        for name, (dtype, shape, data) in list(source.tensors.items()):
            if name.startswith("model.layers.3.") and name.endswith("weight_scale_inv"):
                source.tensors[name] = (dtype, shape, b"\0\0\x80\x7f" * (len(data) // 4))
        source.save(root + "/source")
        cf.ok(CONVERT, "-q", root + "/source", "-o", root + "/some", "--tp", 2, "--pp", 2, "--ranks", "0,1")
        found = report(root + "/some", root + "/source")
        assert (found["exact_tensors"], found["absent_tensors"]) == (here, absent), found


def library():
    class Error(ctypes.Structure):
        _fields_ = [("status", ctypes.c_int32), ("code", ctypes.c_char * 28), ("text", ctypes.c_char * 4064)]

    lib = ctypes.CDLL(os.environ["BUILD"] + "/lib/libminimax.so.0")
    lib.minimax_open.restype = ctypes.c_void_p
    return lib, Error()


def no_rank():
    """A manifest that lists no part proves nothing."""
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--tp", 2)
        p = pf.Packed(root + "/out")
        p.parts = {}
        for rank in p.manifest["ranks"]:
            rank["parts"] = []
        p.save(root + "/none")
        for more in ([], ["--level", "header"], ["--source", M2]):
            cf.assert_error(cf.run(VERIFY, root + "/none", *more), VERIFY, 6, "E_RANKS", "manifest.json", "found no part of any rank")
        lib, why = library()
        c = ctypes.c_void_p(lib.minimax_open((root + "/none").encode(), ctypes.byref(why)))
        assert c.value, why.text
        assert lib.minimax_verify(c, 1, ctypes.byref(why)) == 6 and why.code == b"E_RANKS" and b"manifest.json" in why.text, why.text
        lib.minimax_close(c)


def replaced():
    """A part that is replaced by an equal one after the library opened it: minimax_verify read the other one."""
    lib, why = library()
    with Scratch() as root:
        out = root + "/out"
        cf.ok(CONVERT, "-q", M2, "-o", out)
        c = ctypes.c_void_p(lib.minimax_open(out.encode(), ctypes.byref(why)))
        assert c.value, why.text
        assert lib.minimax_verify(c, 1, ctypes.byref(why)) == 0, why.text
        part = out + "/model-rank-00000-part-00000.safetensors"
        shutil.copy(part, root + "/new")
        os.rename(root + "/new", part)
        assert lib.minimax_verify(c, 1, ctypes.byref(why)) == 5 and why.code == b"E_CHANGED" and part.encode() in why.text, why.text
        lib.minimax_close(c)


SPLIT = (("channel_fp8", "_scale"), ("tensor_wise_fp8", "_scale"), ("nvfp4", "_scale_2"))


def doubled(part, name):
    dtype, _, data = part.tensors[name]
    assert dtype == "F32" and len(data) % 4 == 0, (name, dtype)
    data[:] = struct.pack(f"<{len(data) // 4}f", *(2 * v for v in struct.unpack(f"<{len(data) // 4}f", data)))


def split_scales():
    """A scale that stands over columns of both ranks is the same on both; otherwise another cut would take one of the two."""
    for scheme, suffix in SPLIT:
        for tensor in ("model.layers.1.self_attn.o_proj.weight", "model.layers.2.block_sparse_moe.experts.w2_weight"):
            with Scratch() as root:
                cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--tp", 2, "--quant", scheme)
                p = pf.Packed(root + "/out")
                doubled(p.parts["model-rank-00001-part-00000.safetensors"], tensor + suffix)
                p.save(root + "/other")
                cf.ok(VERIFY, "-q", root + "/out")
                cf.assert_error(cf.run(VERIFY, root + "/other"), VERIFY, 6, "E_COPIES", tensor, "model-rank-00001", "than on rank 0")


def cut_inside(change, scheme, plane):
    """tiny-m2 with the experts' w2, 192 columns, on two ranks; `change` makes its manifest another."""
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--tp", 2, "--quant", scheme)
        p = pf.Packed(root + "/out")
        changed = [t for t in p.manifest["tensors"] if t["name"].endswith("experts.w2_weight")]
        for t in changed:
            change(p.manifest["cuts"][t["pieces"][0]["cut"]], t)
            p.reshape(t)
        p.save(root + "/other")
        for program in ([VERIFY, root + "/other", "--level", "header"], [CONVERT, root + "/other", "-o", root + "/again", "-q"]):
            cf.assert_error(cf.run(*program), program[0], 6, "E_SCHEME", changed[0]["name"], f"plane {plane}", "expected it along cells of")


def cells_along_cuts():
    """A cell that begins with each rank's own columns is not one of the whole matrix; codes of two weights stand for weights of one rank."""
    def coarse(_, t):
        t["planes"][1]["cell"][1] = 128  # the cut at 96 is inside

    def odd(cut, t):
        cut.update(local=97, ranks=[[0, 0, 95], [0, 95, 97]])
        t["cols"] = 97

    cut_inside(coarse, "block_fp8", 1)
    cut_inside(odd, "nvfp4", 0)


def unsharded_number():
    """NaN in an unsharded checkpoint is no weight of its source, be it 0 there or not finite."""
    name = "model.layers.2.self_attn.o_proj.weight"
    with Scratch() as root:
        source = cf.Checkpoint.load(M1)
        dtype, shape, data = source.tensors[name]
        source.tensors[name] = (dtype, shape, data[:6] + b"\xc0\x7f" + data[8:])
        source.save(root + "/source")
        cf.ok(CONVERT, "-q", root + "/source", "-o", root + "/out", "--layout", "hf", "--allow-nonfinite")
        assert report(root + "/out", root + "/source")["exact_tensors"] > 0
        with open(root + "/out/minimax-digests.json", encoding="utf-8") as f:
            digests = json.load(f)
        part = next(p for p in digests["parts"] if name in cf.read_st(f"{root}/out/{p['file']}")[0])
        tensors, _ = cf.read_st(f"{root}/out/{part['file']}")
        file = open(f"{root}/out/{part['file']}", "rb").read()
        at = file.index(tensors[name][2])
        assert file[at + 6:at + 8] == b"\0\0"
        for place in (at + 6, at + 8):
            fresh = file[:place] + b"\x80\xff" + file[place + 2:]
            with open(f"{root}/out/{part['file']}", "wb") as f:
                f.write(fresh)
            part["blocks"] = [pf.sha256(fresh[i:i + pf.BLOCK]) for i in range(0, len(fresh), pf.BLOCK)]
            part["root"] = pf.sha256(b"".join(bytes.fromhex(b) for b in part["blocks"]))
            digests.pop("sha256", None)
            text = json.dumps(digests)[:-1].encode() + b",\n"
            with open(root + "/out/minimax-digests.json", "wb") as f:
                f.write(text + b'"sha256":"' + pf.sha256(text).encode() + b'"\n}\n')
            cf.ok(VERIFY, "-q", root + "/out")
            done = cf.run(VERIFY, "-q", root + "/out", "--source", root + "/source")
            cf.assert_error(done, VERIFY, 6, "E_SOURCE", part["file"], name, f"offset {place}")


def seal(root, digests):
    """The digests of an unsharded checkpoint as its files now are."""
    for part in digests["parts"]:
        file = open(f"{root}/{part['file']}", "rb").read()
        part["size"] = len(file)
        part["blocks"] = [pf.sha256(file[i:i + pf.BLOCK]) for i in range(0, len(file), pf.BLOCK)]
        part["root"] = pf.sha256(b"".join(bytes.fromhex(b) for b in part["blocks"]))
    for f in digests["files"]:
        data = open(f"{root}/{f['name']}", "rb").read()
        f["size"], f["sha256"] = len(data), pf.sha256(data)
    digests.pop("sha256", None)
    text = json.dumps(digests)[:-1].encode() + b",\n"
    with open(root + "/minimax-digests.json", "wb") as f:
        f.write(text + b'"sha256":"' + pf.sha256(text).encode() + b'"\n}\n')


def unsharded_exchanged():
    """Two layers' o_proj exchanged in an unsharded checkpoint, another tokenizer, other fingerprints, all sealed again."""
    def exchange(root, digests):
        a, b = (f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 2))
        files = {p["file"]: bytearray(open(f"{root}/{p['file']}", "rb").read()) for p in digests["parts"]}
        at = {n: (f, data.index(t[2]), t[2]) for f, data in files.items() for n, t in cf.read_st(f"{root}/{f}")[0].items() if n in (a, b)}
        for name, other in ((a, b), (b, a)):
            f, offset, _ = at[name]
            files[f][offset:offset + len(at[other][2])] = at[other][2]
        for f, data in files.items():
            open(f"{root}/{f}", "wb").write(data)

    def tokenizer(root, _):
        open(root + "/tokenizer.json", "ab").write(b" ")

    def fingerprint(_, digests):
        digests["sources"][0]["size"] += 1

    for scheme in ("none", "int8"):
        for change in (exchange, tokenizer, fingerprint):
            with Scratch() as root:
                cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--layout", "hf", "--quant", scheme)
                cf.ok(VERIFY, "-q", root + "/out", "--source", M2)
                with open(root + "/out/minimax-digests.json", encoding="utf-8") as f:
                    digests = json.load(f)
                change(root + "/out", digests)
                seal(root + "/out", digests)
                cf.ok(VERIFY, "-q", root + "/out")
                cf.assert_error(cf.run(VERIFY, "-q", root + "/out", "--source", M2), VERIFY, 6, "E_SOURCE")


def unsharded_damaged():
    """An index, a config and names of files that contradict the weights are damage of the checkpoint, not a bad source."""
    def index(root, edit):
        with open(root + "/model.safetensors.index.json", encoding="utf-8") as f:
            made = json.load(f)
        edit(made["weight_map"])
        with open(root + "/model.safetensors.index.json", "w", encoding="utf-8") as f:
            json.dump(made, f)

    def metadata(edit):
        def change(root):
            with open(root + "/model.safetensors.index.json", encoding="utf-8") as f:
                made = json.load(f)
            edit(made["metadata"])
            with open(root + "/model.safetensors.index.json", "w", encoding="utf-8") as f:
                json.dump(made, f)
        return change

    def header(edit):
        """Of one weight file, its metadata changed."""
        def change(root):
            path = f"{root}/{min(f for f in os.listdir(root) if f.endswith('.safetensors'))}"
            data = open(path, "rb").read()
            n = struct.unpack("<Q", data[:8])[0]
            fields = json.loads(data[8:8 + n])
            edit(fields)
            text = json.dumps(fields).encode()
            open(path, "wb").write(struct.pack("<Q", len(text)) + text + data[8 + n:])
        return change

    def exchange(root):
        a, b = sorted(f for f in os.listdir(root) if f.endswith(".safetensors"))[:2]
        for old, new in ((a, "x"), (b, a), ("x", b)):
            os.rename(f"{root}/{old}", f"{root}/{new}")

    def cut(name):
        def edit(root):
            data = open(f"{root}/{name}", "rb").read()
            open(f"{root}/{name}", "wb").write(data[:len(data) // 2])
        return edit

    def scheme(root):
        with open(root + "/config.json", encoding="utf-8") as f:
            made = json.load(f)
        made["quantization_config"]["weight_block_size"] = [128]
        with open(root + "/config.json", "w", encoding="utf-8") as f:
            json.dump(made, f)

    changes = ((lambda r: index(r, lambda m: m.pop("model.layers.0.self_attn.o_proj.weight")), "E_IDX_TENSOR"),
               (lambda r: index(r, lambda m: m.update({"lm_head.weight": "none.safetensors"})), "E_FS_MISSING"),
               (lambda r: index(r, lambda m: m.update({"lm_head.weight": 1})), "E_IDX"), (exchange, "E_DUP_TENSOR"), (cut("model.safetensors.index.json"), "E_JSON"),
               (cut("config.json"), "E_JSON"), (scheme, "E_Q_CONFIG"), (metadata(lambda m: m.update(plan="0" * 64)), "E_IDX"), (metadata(lambda m: m.pop("plan")), "E_IDX"),
               (metadata(lambda m: m.update(total_size=m["total_size"] + 1)), "E_IDX"), (metadata(lambda m: m.pop("total_size")), "E_IDX"),
               (header(lambda h: h.pop("__metadata__")), "E_PART"), (header(lambda h: h["__metadata__"].update(format="np")), "E_PART"),
               (header(lambda h: h["__metadata__"].update(plan="0" * 64)), "E_PART"))
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--layout", "hf", "--part-size", "2M")
        with open(root + "/out/minimax-digests.json", encoding="utf-8") as f:
            digests = json.load(f)
        for change, code in changes:
            made = root + "/made"
            shutil.copytree(root + "/out", made)
            change(made)
            seal(made, json.loads(json.dumps(digests)))
            for more in (["--source", M2], [], ["--level", "sample"], ["--level", "header"]):
                cf.assert_error(cf.run(VERIFY, "-q", made, *more), VERIFY, 6, code, made)
            shutil.rmtree(made)


def unsharded_card():
    """The model card may be edited or absent, but is a file."""
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out", "--layout", "hf")
        card = root + "/out/README.md"
        with open(card, "a", encoding="utf-8") as f:
            f.write("edited")
        cf.ok(VERIFY, "-q", root + "/out")
        os.unlink(card)
        cf.ok(VERIFY, "-q", root + "/out")
        for make, remove, code in ((os.mkdir, os.rmdir, "E_FS_TYPE"), (os.mkfifo, os.unlink, "E_FS_TYPE"), (lambda c: os.symlink("nothing", c), os.unlink, "E_FS_MISSING")):
            make(card)
            for more in ([], ["--level", "header"]):
                cf.assert_error(cf.run(VERIFY, "-q", root + "/out", *more), VERIFY, 6, code, "README.md")
            remove(card)


def unsharded_inputs():
    """Weights next to static scales of a file that is not at hand are compared to the byte, and experts of a layer have one scale."""
    with Scratch() as root:
        names = [n[:-len("weight")] for f in sorted(os.listdir(M2)) if f.startswith("model-") for n in cf.read_st(f"{M2}/{f}")[0] if n.endswith(".weight")]
        with open(root + "/scales.json", "w", encoding="utf-8") as f:
            json.dump({n + "activation_scale": 0.5 + i % 13 / 8 for i, n in enumerate(names)}, f)
        for target, words in (("ct", ("nvfp4; *experts*=bf16",)), ("modelopt", ("nvfp4",)), ("fp8", ("tensor_wise_fp8",))):
            out = f"{root}/{target}"
            cf.ok(CONVERT, "-q", M2, "-o", out, "--layout", "hf", "--dialect", target, "--act-scales", root + "/scales.json", "--quant", *words)
            cf.ok(VERIFY, "-q", out, "--source", M2)
            cf.ok(CONVERT, "-q", M2, "-o", out + "-2", "--tp", "2", "--act-scales", root + "/scales.json", "--quant", *words)
            cf.ok(CONVERT, "-q", out + "-2", "-o", out + "-3", "--layout", "hf", "--dialect", target)
            cf.ok(VERIFY, "-q", out + "-3", "--source", M2)
            cf.ok(VERIFY, "-q", out + "-3", "--source", out + "-2")
            with open(out + "/minimax-digests.json", encoding="utf-8") as f:
                digests = json.load(f)
            part = next(p["file"] for p in digests["parts"] if any(".experts.1.w2." in n for n in cf.read_st(f"{out}/{p['file']}")[0]))
            tensors, _ = cf.read_st(f"{out}/{part}")
            ends = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "input_scale", "input_global_scale", "activation_scale")
            changed = [n for n in tensors if n.split(".w2.")[0].endswith(".experts.1") and n.split(".w2.")[1] in ends][:8]
            changed += [n for n in tensors if n.endswith(("q_proj.input_global_scale", "k_proj.input_scale", "v_proj.activation_scale"))][:1]
            assert len(changed) >= 2, (target, changed)
            file = open(f"{out}/{part}", "rb").read()
            for name in changed:
                at = 8 + struct.unpack("<Q", file[:8])[0] + json.loads(file[8:8 + struct.unpack("<Q", file[:8])[0]])[name]["data_offsets"][0]
                with open(f"{out}/{part}", "wb") as f:
                    f.write(file[:at] + bytes([file[at] ^ 1]) + file[at + 1:])
                seal(out, digests)
                cf.assert_error(cf.run(VERIFY, "-q", out, "--source", M2), VERIFY, 6, "E_SOURCE", name.split("experts")[0])


def exchange_rows(data, rows, i, j):
    """Of `rows` rows of equal size."""
    n = len(data) // rows
    data[i * n:(i + 1) * n], data[j * n:(j + 1) * n] = data[j * n:(j + 1) * n], data[i * n:(i + 1) * n]


def moved_rows():
    """Error feedback moves weights, but two rows that are exchanged are none that it gives: on ranks, on one alone, and unsharded."""
    name = "model.layers.1.self_attn.o_proj."
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/none")
        cf.ok("minimax-eval", "-q", root + "/none", "--ids", M2 + "/held-out-ids.json", "--window", 64, "--limit", 1, "--act-quant", "off", "--collect",
              root + "/moments", "--moments", 128)
        words = ["--quant", "w4a16", "--method", "gptq", "--importance", root + "/moments"]
        for i, more in enumerate((["--tp", 2], ["--tp", 2, "--ranks", 1])):
            cf.ok(CONVERT, "-q", M2, "-o", f"{root}/{i}", *words, *more)
            cf.ok(VERIFY, "-q", f"{root}/{i}", "--source", M2)
            p = pf.Packed(f"{root}/{i}")
            t = p.tensor(name + "weight")
            for _, (_, shape, data) in p.planes(t):
                exchange_rows(data, shape[-2], 9, 77)
            p.save(f"{root}/{i}-other")
            cf.ok(VERIFY, "-q", f"{root}/{i}-other")
            cf.assert_error(cf.run(VERIFY, "-q", f"{root}/{i}-other", "--source", M2), VERIFY, 6, "E_SOURCE", name, "in a row or matrix")
        cf.ok(CONVERT, "-q", M2, "-o", root + "/hf", *words, "--layout", "hf", "--override", "*w2*=bf16")
        cf.ok(VERIFY, "-q", root + "/hf", "--source", M2)
        with open(root + "/hf/minimax-digests.json", encoding="utf-8") as f:
            digests = json.load(f)
        path = next(f"{root}/hf/{p['file']}" for p in digests["parts"] if name + "weight_packed" in cf.read_st(f"{root}/hf/{p['file']}")[0])
        file = open(path, "rb").read()
        for plane in ("weight_packed", "weight_scale"):
            _, shape, data = cf.read_st(path)[0][name + plane]
            fresh = bytearray(data)
            exchange_rows(fresh, shape[0], 9, 77)
            file = file.replace(data, bytes(fresh))
        open(path, "wb").write(file)
        seal(root + "/hf", digests)
        cf.ok(VERIFY, "-q", root + "/hf")
        cf.assert_error(cf.run(VERIFY, "-q", root + "/hf", "--source", M2), VERIFY, 6, "E_SOURCE", name, "in a row or matrix")


def once():
    """Rows that several ranks hold count once: the figures of tiny-m1, with 2 KV heads, are the same on 1 and on 4 ranks."""
    with Scratch() as root:
        rows = []
        for i, options in enumerate((["--tp", 1], ["--tp", 4], ["--tp", 8], ["--tp", 4, "--ep", 2, "--tp-align", "pad"])):
            cf.ok(CONVERT, "-q", M1, "-o", f"{root}/{i}", "--quant", "int8", *options)
            rows.append({t["name"]: t for t in report(f"{root}/{i}", M1)["tensors"]})
        for other in rows[1:]:
            assert other.keys() == rows[0].keys()
            for name, x in rows[0].items():
                for key, value in x.items():
                    near = isinstance(value, float) and abs(other[name][key] - value) <= 1e-11 * abs(value)  # sums of doubles in another order
                    assert other[name][key] == value or near, (name, key, value, other[name][key])
        assert sum(t["count"] for t in rows[0].values()) == sum(len(d) // cf.SIZE[k] for k, _, d in cf.Checkpoint.load(M1).tensors.values())
        # Of ranks that hold the same K and V rows one is enough.
        cf.ok(CONVERT, "-q", M1, "-o", root + "/some", "--quant", "int8", "--tp", 4, "--ranks", "1")
        some = {t["name"]: t["count"] for t in report(root + "/some", M1)["tensors"]}
        name = "model.layers.2.self_attn.qkv_proj.weight"
        assert some[name] == (512 // 4 + 64 + 64) * 256 and rows[0][name]["count"] == (512 + 128 + 128) * 256, some[name]


def companions_by_header():
    """--level header looks at the sizes of companions, too."""
    with Scratch() as root:
        cf.ok(CONVERT, "-q", M2, "-o", root + "/out")
        for name in ("config.json", "tokenizer.json"):
            path = f"{root}/out/{name}"
            data = open(path, "rb").read()
            for changed in (data[:-1], data + b"\n", b""):
                open(path, "wb").write(changed)
                done = cf.run(VERIFY, root + "/out", "--level", "header")
                cf.assert_error(done, VERIFY, 6, "E_SIZE", name, f"found {len(changed)} bytes, expected {len(data)}")
            os.unlink(path)
            cf.assert_error(cf.run(VERIFY, root + "/out", "--level", "header"), VERIFY, 6, "E_FS_MISSING", name)
            open(path, "wb").write(data)
        cf.ok(VERIFY, root + "/out", "--level", "header")


if __name__ == "__main__":
    cf.main([some_ranks, no_rank, replaced, split_scales, cells_along_cuts, unsharded_number, unsharded_exchanged, unsharded_damaged, unsharded_card, unsharded_inputs, moved_rows, once, companions_by_header])
