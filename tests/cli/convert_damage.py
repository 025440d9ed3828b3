#!/usr/bin/env python3
"""minimax-verify finds every damage to a packed checkpoint: flipped bits anywhere, files cut, grown, swapped, missing, added, of another
run or of another kind. Exit status 6 and one line; and parts of any size are in layer order and whole."""
import hashlib
import json
import os
import random
import re
import shutil
import struct
import subprocess

import convert_files as cf
from convert_files import Scratch, small

CONVERT, VERIFY = shutil.which("minimax-convert"), shutil.which("minimax-verify")
MANIFEST = "manifest.json"


def damaged(out, *says, status=6, code=None):
    done = cf.run(VERIFY, "-q", "-j", 1, out)
    found = re.match(rb"minimax-verify: error: (E_[A-Z0-9_]+): ", done.stderr)
    assert found, f"{says}: status {done.returncode}, {done.stderr[:300]}"
    # What this version does not know is not damage that it could tell from a later format.
    if found[1] in (b"E_VERSION", b"E_SCHEME") and done.returncode == 4:
        status = 4
    cf.assert_error(done, "minimax-verify", status, code or found[1].decode(), *says)


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def read(path):
    with open(path, "rb") as f:
        return f.read()


def flip(path, at, mask):
    with open(path, "r+b") as f:
        f.seek(at)
        (b,) = f.read(1)
        f.seek(at)
        f.write(bytes([b ^ mask]))


class Packed(Scratch):
    """root/src and its conversion root/out: two ranks of several parts, with companions."""

    def __enter__(self):
        root = super().__enter__()
        self.source = small(layers=3)
        self.source.save(root + "/src")
        write(root + "/src/tokenizer.json", b'{"model": 1}')
        write(root + "/src/chat_template.jinja", b"{{ messages }}")
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out", "--tp", 2, "--part-size", "6K")
        cf.ok(VERIFY, "-q", root + "/out")
        return root


def parts_of(out):
    """{rank: [paths in order]}"""
    with open(f"{out}/{MANIFEST}", encoding="utf-8") as f:
        return [[f"{out}/{p['file']}" for p in rank["parts"]] for rank in json.load(f)["ranks"]]


def part_sizes():
    with Scratch() as root:
        source = small(layers=4, hidden=64, inter=96, experts=4, vocab=256)
        source.save(root + "/src")
        whole = cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/whole", "--tp", 2)
        assert whole and [len(r) for r in parts_of(root + "/whole")] == [1, 1]
        for size in (1, 20000, 50000, 120000):
            out = f"{root}/{size}"
            cf.ok(CONVERT, "-q", root + "/src", "-o", out, "--tp", 2, "--part-size", size)
            cf.ok(VERIFY, "-q", out, "--source", root + "/src")
            assert cf.packed(out)[0] == cf.packed(root + "/whole")[0]
            names = [t["name"] for t in cf.packed(out)[1]["tensors"]]  # in layer order
            for rank in parts_of(out):
                assert len(rank) > 1
                last = -1
                for i, part in enumerate(rank):
                    assert os.path.basename(part).endswith(f"-part-{i:05d}.safetensors")
                    tensors, meta = cf.read_st(part)
                    held = sorted({names.index(re.sub("_scale_inv$", "", t)) for t in tensors})
                    assert held == list(range(last + 1, last + 1 + len(held))), "parts follow layer order"
                    last = held[-1]
                    assert os.path.getsize(part) <= size or len(held) == 1, (size, os.path.getsize(part), held)
                    assert meta["part"] == str(i)
                assert last == len(names) - 1


def flips():
    rng = random.Random(20)
    with Packed() as root:
        out = root + "/out"
        files = sorted(os.listdir(out))
        places = [(name, at) for name in files for at in range(os.path.getsize(f"{out}/{name}"))]
        chosen = rng.sample(places, 300)
        part = os.path.basename(parts_of(out)[1][1])
        with open(f"{out}/{part}", "rb") as f:
            (n,) = struct.unpack("<Q", f.read(8))
            text = f.read(n).rstrip(b" ")
        chosen += [(part, at) for at in range(8 + len(text))]
        chosen += [(part, at) for at in (8 + len(text), 7 + n, 8 + n, os.path.getsize(f"{out}/{part}") - 1)]
        size = os.path.getsize(f"{out}/{MANIFEST}")
        chosen += [(MANIFEST, at) for at in range(size - 80, size)] + [(MANIFEST, at) for at in range(0, 400, 2)]
        if os.environ.get("SAN") == "1":
            chosen = chosen[::10]
        for name, at in chosen:
            mask = rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 255, 0x0D))  # 0x0d: a line feed becomes a bell, a blank a minus …
            flip(f"{out}/{name}", at, mask)
            try:
                damaged(out)
            except AssertionError as e:
                raise AssertionError(f"{name}, byte {at} of {os.path.getsize(f'{out}/{name}')}, mask {mask}: {e}") from e
            flip(f"{out}/{name}", at, mask)
        cf.ok(VERIFY, "-q", out)
        print(f"{len(chosen)} of {len(places)} bytes flipped")


def blanks():
    """Other white space in the manifest says the same, and is found all the same."""
    with Packed() as root:
        path = f"{root}/out/{MANIFEST}"
        text = read(path)
        for at in (m.start() for m in list(re.finditer(rb"\n", text))[::9]):
            write(path, text[:at] + b" " + text[at + 1 :])
            damaged(root + "/out", MANIFEST)
        for spoilt in (text + b"\n", b" " + text, text.replace(b":", b": ", 1), text[:-1]):
            write(path, spoilt)
            damaged(root + "/out", MANIFEST)


def lengths():
    with Packed() as root:
        out = root + "/out"
        for name in sorted(os.listdir(out)):
            data = read(f"{out}/{name}")
            for cut in {data[:-1], data[: len(data) // 2], data[:100], data[:7], b"", data + b"\0", data + bytes(4096), data + data[-1:]}:
                if cut == data:
                    continue
                write(f"{out}/{name}", cut)
                damaged(out, name)
            write(f"{out}/{name}", data)
        cf.ok(VERIFY, "-q", out)


def places():
    """Every file is whole, but in the wrong place."""
    with Packed() as root:
        out = root + "/out"
        ranks = parts_of(out)

        def swap(a, b):
            os.rename(a, a + "~")
            os.rename(b, a)
            os.rename(a + "~", b)

        for a, b in ((ranks[0][0], ranks[1][0]), (ranks[0][0], ranks[0][1]), (ranks[0][-1], ranks[1][-1]), (ranks[0][2], ranks[1][1]),
                     (out + "/config.json", out + "/tokenizer.json"), (ranks[0][0], out + "/config.json")):
            swap(a, b)
            damaged(out)
            swap(a, b)
        cf.ok(VERIFY, "-q", out)
        # A part of another run of the same shape, and a whole rank of it.
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/bf16", "--tp", 2, "--part-size", "6K", "--quant", "bf16")
        other = small(layers=3)
        other.tensors = {k: (d, shape, cf.values(k + "other", d, len(b) // cf.SIZE[d])) for k, (d, shape, b) in other.tensors.items()}
        other.save(root + "/src2")
        cf.ok(CONVERT, "-q", root + "/src2", "-o", root + "/other", "--tp", 2, "--part-size", "6K")
        swapped = 0
        for theirs in (root + "/bf16", root + "/other"):
            for rank in ranks:
                for part in rank:
                    mine, other = read(part), f"{theirs}/{os.path.basename(part)}"
                    if not os.path.exists(other) or read(other) == mine:  # nothing but padding
                        continue
                    shutil.copy(other, part)
                    damaged(out)
                    write(part, mine)
                    swapped += 1
        assert swapped > 40, swapped
        manifest = read(f"{out}/{MANIFEST}")
        shutil.copy(f"{root}/other/{MANIFEST}", f"{out}/{MANIFEST}")
        damaged(out)
        write(f"{out}/{MANIFEST}", manifest)
        cf.ok(VERIFY, "-q", out)


def missing_and_added():
    with Packed() as root:
        out = root + "/out"
        for name in sorted(os.listdir(out)):
            os.rename(f"{out}/{name}", root + "/away")
            damaged(out, name)
            os.mkdir(f"{out}/{name}")
            damaged(out, name)
            os.rmdir(f"{out}/{name}")
            os.mkfifo(f"{out}/{name}")
            damaged(out, name)
            os.remove(f"{out}/{name}")
            os.symlink(name, f"{out}/{name}")
            damaged(out, name)
            os.remove(f"{out}/{name}")
            os.rename(root + "/away", f"{out}/{name}")
        for name in ("notes.txt", ".hidden", "model-rank-00002-part-00000.safetensors", "model.safetensors", "manifest.json~", "\x1b[31m"):
            write(f"{out}/{name}", b"x")
            damaged(out, code="E_EXTRA")
            os.remove(f"{out}/{name}")
        os.mkdir(out + "/sub")
        damaged(out, "sub", code="E_EXTRA")
        os.rmdir(out + "/sub")
        cf.ok(VERIFY, "-q", out)
        for path in (root + "/nothing", out + "/config.json"):
            done = cf.run(VERIFY, "-q", path)
            assert done.returncode == 3 and done.stderr.count(b"\n") == 1, done


def resealed(out, old, new):
    """The manifest with a word replaced and its own digest put right."""
    text = read(f"{out}/{MANIFEST}")
    assert old in text
    body = text.replace(old, new, 1)[:-78]
    write(f"{out}/{MANIFEST}", body + f'"sha256":"{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode())
    return text


def companions_gone():
    """A file that the manifest lists is absent, or is none: status 6 from every program that reads it."""
    with Scratch() as root:
        shutil.copytree("tests/data/tiny-m2", root + "/src")
        for name, text in (("generation_config.json", b"{}"), ("chat_template.jinja", b"{{ x }}")):
            write(f"{root}/src/{name}", text)
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/out")
        own = ("minimax-run", root + "/out", "--chat", "-p", "x", "-n", 1)
        chat = (*own, "--chat-format", "minimax-m2")
        again = ("minimax-convert", root + "/out", "-o", root + "/again", "-q", "--tp", 2)
        for name, programs in (("config.json", (chat, again)), ("generation_config.json", (chat, again)), ("tokenizer.json", (chat, again)),
                               ("tokenizer.bin", (chat, again)), ("chat_template.jinja", (own, again))):
            path = f"{root}/out/{name}"
            os.rename(path, root + "/kept")
            for make, code in ((lambda: None, "E_FS_MISSING"), (lambda: os.mkdir(path), "E_FS_TYPE"), (lambda: os.mkfifo(path), "E_FS_TYPE"),
                               (lambda: os.symlink("nothing", path), "E_FS_MISSING")):
                make()
                for program in programs:
                    cf.assert_error(cf.run(*program), program[0], 6, code, name)
                if os.path.isdir(path):
                    os.rmdir(path)
                elif os.path.lexists(path):
                    os.remove(path)
            os.rename(root + "/kept", path)
        write(root + "/out/config.json", b"{")
        cf.assert_error(cf.run(*again), again[0], 6, "E_JSON", "config.json")


def against_source():
    """--source names what does not belong together, and never says yes to options that it does not know."""
    with Packed() as root:
        out = root + "/out"
        done = cf.ok(VERIFY, "-q", out, "--source", root + "/src")
        assert re.search(rb"(\d+) of \1 tensors exact", done.stdout), done
        for old, new in ((b'"quant":"none"', b'"quant":"zzz"'), (b'"quant":"none"', b'"quant":"block_fp8;;="'),
                         (b'"tp_align":"split"', b'"tp_align":"pad"'), (b'"quant":"none"', b'"quant":"bf16"')):
            text = resealed(out, old, new)
            done = cf.run(VERIFY, "-q", out, "--source", root + "/src")
            assert done.returncode in (4, 6) and done.stderr.count(b"\n") == 1, (new, done)
            write(f"{out}/{MANIFEST}", text)
        small(layers=2).save(root + "/fewer")
        small(layers=3, hidden=12).save(root + "/wider")
        for other in ("fewer", "wider"):
            done = cf.run(VERIFY, "-q", out, "--source", f"{root}/{other}")
            assert done.returncode in (3, 6) and done.stderr.count(b"\n") == 1 and not done.stdout, done
        done = cf.run(VERIFY, "-q", out, "--source", root + "/nothing")
        cf.assert_error(done, "minimax-verify", 3, "E_FS_MISSING", "no such directory")
        # The same shapes with one other number: a weight that is kept as stored is not the source's.
        name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
        c = cf.Checkpoint.load(root + "/src")
        dtype, shape, data = c.tensors[name]
        c.tensors[name] = (dtype, shape, data[:30] + bytes([data[30] ^ 0x80]) + data[31:])
        c.save(root + "/near")
        for file in os.listdir(root + "/src"):
            if not os.path.exists(f"{root}/near/{file}"):
                shutil.copy(f"{root}/src/{file}", root + "/near")
        shutil.copy(root + "/src/config.json", root + "/near")
        done = cf.run(VERIFY, "-q", out, "--source", root + "/near")
        cf.assert_error(done, "minimax-verify", 6, "E_SOURCE", "layers.1.block_sparse_moe.experts.w2_weight", "kept as stored", f"of {name}, rows from")


def inspect():
    """minimax-inspect lists both kinds of checkpoint and tells two apart; what it and verify cannot print is a failure."""
    with Packed() as root:
        inspector = shutil.which("minimax-inspect")
        done = json.loads(cf.ok(inspector, root + "/src", "--json").stdout)
        c = cf.Checkpoint.load(root + "/src")
        assert done["kind"] == "source"
        assert {t["name"]: (t["type"], t["shape"], t["bytes"]) for t in done["tensors"]} == \
            {k: (d, shape, len(data)) for k, (d, shape, data) in c.tensors.items()}
        done = json.loads(cf.ok(inspector, root + "/out", "--json", "--match", "w13").stdout)
        assert done["kind"] == "packed" and [t["name"] for t in done["tensors"]] == \
            [f"model.layers.{i}.block_sparse_moe.experts.w13_weight" for i in range(3)]
        assert all(t["type"].startswith("block_fp8") and t["shape"] == [3, 6, 10] for t in done["tensors"]), done
        cf.ok(CONVERT, "-q", root + "/src", "-o", root + "/bf16", "--tp", 2, "--quant", "bf16")
        cf.ok(inspector, root + "/out", "--diff", root + "/out", "--data")
        cf.ok(inspector, root + "/src", "--diff", root + "/src", "--data")
        name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
        dtype, shape, data = c.tensors[name]
        c.tensors[name] = (dtype, shape, data[:-1] + bytes([data[-1] ^ 1]))
        c.save(root + "/near")
        for a, b, more, status in (("src", "near", (), 0), ("src", "near", ("--data",), 6), ("out", "bf16", (), 6), ("out", "src", ("--data",), 2)):
            done = cf.run(inspector, f"{root}/{a}", "--diff", f"{root}/{b}", *more)
            assert done.returncode == status, (a, b, more, done)
            assert more == () or status == 2 or name.encode() in done.stdout, done
        for command in ((inspector, root + "/src"), (inspector, root + "/out", "--json"), (VERIFY, "-q", root + "/out", "--source", root + "/src"),
                        (VERIFY, "-q", root + "/out", "--source", root + "/src", "--json"), (inspector, root + "/out", "--diff", root + "/out")):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
            assert done.returncode == 5 and done.stderr.count(b"\n") == 1, (command, done)


def absent():
    """A checkpoint that is not there, or is a file, ends every program with 3; a companion that has grown is of another size."""
    with Packed() as root:
        key, ids = root + "/key.pem", root + "/ids.json"
        cf.ok("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
        write(ids, json.dumps(list(range(12)) * 9).encode())
        for path, code in ((root + "/none", "E_FS_MISSING"), (key, "E_FS_TYPE")):
            for program, *args in (("archive", "sign", path, "--key", key), ("archive", "pack", path, "-o", root + "/a"), ("verify", path),
                                   ("verify", root + "/out", "--source", path), ("convert", path, "-o", root + "/a"),
                                   ("eval", path, "--ids", ids), ("eval", root + "/out", "--ids", ids, "--window", 16, "--against", path)):
                cf.assert_error(cf.run("minimax-" + program, *args, "-q"), "minimax-" + program, 3, code, path)
        with open(root + "/out/chat_template.jinja", "ab") as f:
            f.write(b" ")
        damaged(root + "/out", "chat_template.jinja", "found 15 bytes, expected 14", code="E_SIZE")


if __name__ == "__main__":
    cf.main([absent, part_sizes, flips, blanks, lengths, places, missing_and_added, against_source, companions_gone, inspect])
