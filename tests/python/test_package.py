"""The Python package beside a reader written from formats/FORMAT.md alone (tests/interop/packed.py) and ml_dtypes' numbers."""
import copy
import ctypes
import gc
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "interop"))
import minimax_packed  # noqa: E402
from minimax_packed import native  # noqa: E402
from packed import Packed, cells  # noqa: E402

BUILD = os.environ["BUILD"]
CONVERT = os.path.join(BUILD, "bin", "minimax-convert")
DATA = os.path.join(os.path.dirname(__file__), "..", "data")
SCHEMES = ["none", "bf16", "block_fp8", "channel_fp8", "tensor_wise_fp8", "mxfp8", "int8", "w4a8", "w4afp8", "w4a16", "mxfp4", "nvfp4",
           "w4a16_f16", "w4a16_zero", "w8a16_zero_bf16"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def convert(folder, model, *options):
    out = os.path.join(folder, "-".join([model, *options]).replace("/", "_"))
    if not os.path.exists(out):
        subprocess.run([CONVERT, os.path.join(DATA, model), "-o", out, "-q", *options], check=True)
    return out


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("packed"))


def numbers(scheme, dtype, stored):
    """f32 values of one plane's elements, spread to one for each weight already; the column's parity picks the nibble."""
    if dtype == "BF16":
        return stored.view(ml_dtypes.bfloat16).astype(np.float32)
    if dtype == "F16":
        return stored.view(np.float16).astype(np.float32)
    if dtype == "F32":
        return stored.view(np.float32)
    if dtype == "F8_E4M3":
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if dtype == "I8":
        return stored.view(np.int8).astype(np.float32)
    return np.ldexp(np.float32(1), stored.astype(np.int32) - 127).astype(np.float32)  # a scale in U8


def weights(tensor, planes):
    """f32 weights from the planes, each [..., rows, cols] with one stored element for each weight."""
    first = tensor["planes"][0]
    if first["cell"] == [1, 2]:
        nibble = np.where(np.arange(planes[0].shape[-1]) % 2 == 0, planes[0] & 15, planes[0] >> 4).astype(np.int32)
        if tensor["scheme"] in ("mxfp4", "nvfp4", "nvfp4a16"):
            out = E2M1[nibble]
        else:
            out = ((nibble ^ 8) - 8 if tensor["scheme"] in ("w4a8", "w4afp8") else nibble - 8).astype(np.float32)
    else:
        out = numbers(tensor["scheme"], first["dtype"], planes[0])
    scale = np.ones((), np.float32)
    if tensor["planes"][-1]["dtype"] == "U32":  # a zero point in the low byte, an f32 in the upper 19 bits
        word = planes[-1].view(np.uint32)
        return (out - word.astype(np.uint8).view(np.int8)) * (word & np.uint32(0xFFFFE000)).view(np.float32)
    for plane, stored in zip(tensor["planes"][1:], planes[1:]):
        scale = scale * numbers(tensor["scheme"], plane["dtype"], stored)
    return out * scale


@pytest.mark.parametrize("scheme", SCHEMES)
def test_views_and_dequantize(folder, scheme):
    path = convert(folder, "tiny-m2", "--tp", "2", "--quant", scheme)
    reader = Packed(path)
    with minimax_packed.open(path) as c:
        assert c.ranks == [0, 1]
        for r in c.ranks:
            rank = c.rank(r)
            assert list(rank) == [t["name"] + p["suffix"] for t in reader.manifest["tensors"] for p in t["planes"]]
            for t in reader.manifest["tensors"]:
                tensor = rank.tensor(t["name"])
                assert (tensor.scheme, tensor.rows, tensor.cols, tensor.matrices) == (t["scheme"], t["rows"], t["cols"], t["lead"])
                for plane, p in zip(tensor.planes, t["planes"]):
                    a = rank[t["name"] + p["suffix"]]
                    stored = reader.stored(r, t, p)
                    assert not a.flags.owndata and not a.flags.writeable and a.ctypes.data == plane._address
                    assert a.shape == stored.shape and a.tobytes() == stored.tobytes() and list(plane.cell) == p["cell"]
                want = weights(t, [reader.spread(r, t, p) for p in t["planes"]])
                got = rank.dequantize(t["name"])
                assert got.shape == tensor.shape and (got.reshape(want.shape) == want).all(), t["name"]
                if t["lead"]:
                    e = t["lead"] - 1
                    assert (rank.dequantize(t["name"], e, slice(1, 4)) == want[e, 1:4]).all()


@pytest.mark.parametrize("model,options", [
    ("tiny-m2", ["--tp", "4", "--quant", "block_fp8"]), ("tiny-m2", ["--tp", "4", "--quant", "nvfp4"]),
    ("tiny-m2", ["--tp", "4", "--ep", "2", "--quant", "w4a16"]), ("tiny-m2", ["--tp", "2", "--pp", "2", "--quant", "int8"]),
    ("tiny-m2", ["--tp", "4", "--quant", "block_fp8", "--tp-align", "pad"]), ("tiny-m1", ["--tp", "4", "--quant", "tensor_wise_fp8"])])
def test_unshard(folder, model, options):
    path = convert(folder, model, *options)
    reader = Packed(path)
    names = []
    with minimax_packed.open(path) as c:
        for t in reader.manifest["tensors"]:
            spread = [{name: x for name, x in reader.whole(t, p)} for p in t["planes"]]
            for piece in t["pieces"]:
                source = piece["source"]
                want = weights(t, [s[source] for s in spread])
                for e in range(t["whole_lead"] or 1):
                    name = source.replace("{e}", str(e))
                    names.append(name)
                    if e % 3:
                        continue
                    assert (c.unshard(name) == want[e]).all(), name
                    assert (c.unshard(name, slice(3, 5)) == want[e][3:5]).all(), name
                    planes = c.unshard_planes(name)
                    for p, s in zip(t["planes"], spread):
                        n, k = (cell or extent for cell, extent in zip(p["cell"], want[e].shape))
                        rows, cols = np.arange(cells(want[e].shape[0], n)) * n, np.arange(cells(want[e].shape[1], k)) * k
                        grid = s[source][e][np.ix_(rows, cols)]
                        assert planes[p["suffix"]].tobytes() == grid.tobytes(), name + p["suffix"]
        assert c.sources == names


def test_ml_dtypes(folder):
    path = convert(folder, "tiny-m2", "--tp", "2", "--quant", "block_fp8")
    plain, typed = minimax_packed.open(path).rank(0), minimax_packed.open(path, ml_dtypes=True).rank(0)
    for name, code in [("model.embed_tokens.weight", "bfloat16"), ("model.layers.0.self_attn.o_proj.weight", "float8_e4m3fn")]:
        assert typed[name].dtype == getattr(ml_dtypes, code)
        assert typed[name].tobytes() == plain[name].tobytes() and plain[name].dtype.kind == "u"


def test_views_outlive_the_checkpoint(folder):
    path = convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4")
    c = minimax_packed.open(path)
    view, tensor = c.rank(1)["lm_head.weight"], c.rank(1).tensor("model.layers.0.self_attn.o_proj.weight")
    before, weights_before = view.tobytes(), tensor.dequantize()
    c.close()
    gc.collect()
    assert view.tobytes() == before and (tensor.dequantize() == weights_before).all()
    with pytest.raises(ValueError, match="closed"):
        c.rank(0)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 0


def test_some_ranks(folder, tmp_path):
    path = str(tmp_path / "some")
    shutil.copytree(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"), path)
    for name in os.listdir(path):
        if name.startswith("model-rank-00000"):
            os.remove(os.path.join(path, name))
    with minimax_packed.open(path, ranks=[1]) as c:
        assert c.ranks == [1] and len(c.rank(1)) > 0
        with pytest.raises(IndexError, match="rank 0 not open"):
            c.rank(0)
        with pytest.raises(minimax_packed.Error) as e:
            c.unshard("model.layers.0.self_attn.q_proj.weight")
        assert (e.value.status, e.value.code) == (2, "E_RANKS") and "rank 0" in e.value.text
        assert c.unshard("model.norm.weight").shape == (c.info.hidden, 1)  # every rank has all of it
        c.verify()
        name = c.rank(1).plane("lm_head.weight").file
    with open(os.path.join(path, name), "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(b"?")
    with minimax_packed.open(path, ranks=[1]) as c, pytest.raises(minimax_packed.Error) as e:
        c.verify()
    assert e.value.code == "E_DIGEST"
    with minimax_packed.open(path, ranks=[]) as c:
        assert c.ranks == [] and c.info.tp == 2
    for ranks, code in ([5], "E_RANKS"), ([-1], "E_RANKS"), (None, "E_FS_MISSING"):
        with pytest.raises(minimax_packed.Error) as e:
            minimax_packed.open(path, ranks=ranks)
        assert e.value.code == code
    again = pickle.loads(pickle.dumps(e.value))  # as a pool of processes hands it on, which waits for ever where that fails
    assert type(again) is minimax_packed.Error and vars(again) == vars(e.value) and str(again) == str(e.value)


def test_refusals(folder):
    c = minimax_packed.open(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"))
    experts = "model.layers.0.block_sparse_moe.experts."
    for name in [experts + "8.w1.weight", experts + "03.w1.weight", experts + "{e}.w1.weight", experts + ".w1.weight", "model.nothing.weight"]:
        with pytest.raises(minimax_packed.Error) as e:
            c.unshard(name)
        assert (e.value.status, e.value.code) == (2, "E_MISSING")
    tensor = c.rank(0).tensor(experts + "w13_weight")
    with pytest.raises(IndexError):
        tensor.dequantize(8)
    with pytest.raises(ValueError, match="rows of which"):
        tensor.dequantize(rows=slice(0, 1))
    with pytest.raises(KeyError):
        c.rank(0)["nothing"]
    out, err = np.empty(1, np.float32), native.ErrorStruct()  # what Python checks first, the library checks too
    assert native.lib.minimax_unpack(tensor._pointer, 8, 0, 1, out.ctypes.data, err) == 2 and b"expected them below 8" in err.text
    assert native.lib.minimax_unpack(tensor._pointer, 0, 1, 0xFFFFFFFF, out.ctypes.data, err) == 2 and err.code == b"E_USAGE"
    assert native.lib.minimax_unshard(c._handle.pointer, b"model.norm.weight", 250, 7, out.ctypes.data, err) == 2


def test_names(folder, tmp_path):
    """A path that is not UTF-8 is one as any other; a NUL character ends neither a path nor a name."""
    path = convert(folder, "tiny-m2")
    odd = os.fsencode(tmp_path) + b"/\xff"
    os.symlink(path, odd)
    with minimax_packed.open(odd) as c:
        assert os.fsencode(c.info.dir) == odd and c.ranks == [0]
        for ask in (lambda: minimax_packed.open(path + "\0x"), lambda: c.unshard(c.sources[0] + "\0x"), lambda: c.unshard_planes(c.sources[0] + "\0x")):
            with pytest.raises(ValueError, match="NUL"):
                ask()


def test_working_directory(folder, tmp_path, monkeypatch):
    """A relative path is that of the moment of opening, whatever directory the process is in afterwards."""
    shutil.copytree(convert(folder, "tiny-m2"), tmp_path / "here" / "rel")
    shutil.copytree(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"), tmp_path / "there" / "rel")
    for other in ("/", tmp_path / "there"):
        monkeypatch.chdir(tmp_path / "here")
        with minimax_packed.open("rel") as c:
            assert c.info.dir == str(tmp_path / "here" / "rel")
            monkeypatch.chdir(other)
            c.verify()
            c.unshard(c.sources[0])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with minimax_packed.open("../here/rel") as c:  # no path from the root leads there
        assert c.info.dir == "../here/rel"
        c.verify()


def test_closed_ancestor(folder, tmp_path):
    """A relative path opens too where the process may not search a directory above the working one."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    shutil.copytree(convert(folder, "tiny-m2"), tmp_path / "rel")
    with tempfile.TemporaryDirectory(dir="/tmp") as closed:
        os.mkdir(closed + "/in")
        shutil.copytree(tmp_path / "rel", closed + "/in/rel")
        os.chmod(closed + "/in", 0o755)
        child = os.fork()
        if child == 0:
            os.chdir(closed + "/in")
            os.setuid(65534)
            os._exit(0 if native.lib.minimax_open(b"rel", native.ErrorStruct()) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_replaced(folder, tmp_path):
    """A directory that takes the place of the one that was opened has nothing to say of it: changed, not damaged; once it is back, right."""
    here, other, aside = (str(tmp_path / name) for name in ("here", "other", "aside"))
    shutil.copytree(convert(folder, "tiny-m2"), here)
    shutil.copytree(here, other)
    with open(other + "/config.json", "a", encoding="utf-8") as f:
        f.write("\n")
    with minimax_packed.open(here) as c:
        os.rename(here, aside)
        for there in (True, False):
            if there:
                os.rename(other, here)
            with pytest.raises(minimax_packed.Error) as e:
                c.verify()
            assert (e.value.status, e.value.code) == (5, "E_CHANGED"), e.value
            if there:
                os.rename(here, other)
        os.rename(aside, here)
        c.verify()
    with minimax_packed.open(other) as c, pytest.raises(minimax_packed.Error) as e:
        c.verify()
    assert (e.value.status, e.value.code) == (6, "E_SIZE"), e.value


def test_null(folder):
    """NULL for what the library must have is a usage error, never a crash."""
    c, lib = minimax_packed.open(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4")), native.lib
    p, t, name = c._handle.pointer, c.rank(0).tensors[3]._pointer, c.sources[3].encode()
    err = native.ErrorStruct()
    assert not lib.minimax_open(None, err) and err.status == 2
    assert not lib.minimax_open_ranks(c.info.dir.encode(), None, 1, err) and err.status == 2
    assert not lib.minimax_get_info(None) and not lib.minimax_find(None, 0, name) and not lib.minimax_find(p, 0, None)
    assert lib.minimax_has_rank(None, 0) == lib.minimax_tensor_count(None, 0) == lib.minimax_source_count(None) == 0
    assert not lib.minimax_tensor_at(None, 0, 0) and not lib.minimax_plane_at(None, 0) and not lib.minimax_piece_at(None, 0)
    assert not lib.minimax_source_name(None, 0, err) and err.status == 2
    grid, shape = native.GridStruct(), (ctypes.c_uint32 * 2)()
    for status in [lib.minimax_verify(None, 1, err), lib.minimax_unpack(None, 0, 0, 1, shape, err), lib.minimax_unpack(t, 0, 0, 1, None, err),
                   lib.minimax_source_shape(p, None, shape, err), lib.minimax_source_shape(p, name, None, err),
                   lib.minimax_source_plane(None, name, 0, grid, err), lib.minimax_source_plane(p, name, 0, None, err),
                   lib.minimax_unshard(p, None, 0, 1, shape, None), lib.minimax_unshard(p, name, 0, 1, None, None),
                   lib.minimax_unshard_plane(p, name, 0, None, None)]:
        assert status == 2
    assert lib.minimax_unshard(p, name, 0, 0, None, err) == 0


def test_wrong_arguments(folder, tmp_path):
    path = convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4")
    odd = os.fsencode(tmp_path) + b"/\xff"  # a path as any other
    os.symlink(path, odd)
    assert os.fsencode(minimax_packed.open(odd).info.dir) == odd
    c = minimax_packed.open(path)
    source, tensor = c.sources[0], c.rank(0).tensors[1]
    for call in [lambda: minimax_packed.open(path + "\0.py"), lambda: minimax_packed.open(path.encode() + b"\0", ranks=[0]),
                 lambda: c.unshard(source + "\0.weight"), lambda: c.unshard_planes(source + "\0")]:
        with pytest.raises(ValueError, match="NUL"):
            call()
    for call in [lambda: c.unshard(source, 0), lambda: c.unshard(source, []), lambda: tensor.dequantize(rows=0), lambda: tensor.dequantize(0.0),
                 lambda: c.rank(0.0), lambda: c.verify(1.5)]:
        with pytest.raises(TypeError):
            call()
    for threads in -1, 1 << 32:
        with pytest.raises(ValueError, match="threads"):
            c.verify(threads)


def test_handles_are_not_copied(folder):
    """A copy of a handle would unmap the files under the first one, and a pickled one is another process's address."""
    c = minimax_packed.open(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"))
    rank = c.rank(0)
    for made in c, rank, rank.tensors[0], rank.tensors[0].planes[0]:
        for copied in copy.deepcopy, pickle.dumps:
            with pytest.raises((TypeError, ValueError)):
                copied(made)
    with pytest.raises(ValueError, match="WRITEABLE"):
        rank["lm_head.weight"].flags.writeable = True


def test_closed_during_a_call(folder, monkeypatch):
    """What another thread does while a function of the library runs, one function after the other."""
    calls = {"minimax_verify": lambda c: c.verify(1), "minimax_source_count": lambda c: c.sources, "minimax_has_rank": lambda c: c.ranks,
             "minimax_tensor_count": lambda c: c.rank(0), "minimax_source_shape": lambda c: c._shape("model.norm.weight"),
             "minimax_unshard": lambda c: c.unshard("model.norm.weight"), "minimax_unshard_plane": lambda c: c.unshard_planes("model.norm.weight")}
    for name, call in calls.items():
        c = minimax_packed.open(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"))
        function, handle, seen = getattr(native.lib, name), weakref.ref(c._handle), []

        def closing(pointer, *arguments):
            c.close()
            gc.collect()
            seen.append(handle() is not None)
            return function(pointer, *arguments) if seen[-1] else 0

        with monkeypatch.context() as m:
            m.setattr(native.lib, name, closing)
            try:
                call(c)
            except ValueError as e:
                assert "closed" in str(e)
        assert seen and all(seen), name


def test_verify(folder, tmp_path):
    path = str(tmp_path / "damaged")
    shutil.copytree(convert(folder, "tiny-m2", "--tp", "2", "--quant", "nvfp4"), path)
    minimax_packed.verify(path)
    with minimax_packed.open(path) as c:
        plane = c.rank(1).plane("model.layers.1.self_attn.o_proj.weight")
    with open(os.path.join(path, plane.file), "r+b") as f:
        f.seek(plane.offset)
        byte = f.read(1)[0]
        f.seek(plane.offset)
        f.write(bytes([byte ^ 1]))
    with minimax_packed.open(path) as c, pytest.raises(minimax_packed.Error) as e:
        c.verify(threads=2)
    assert (e.value.status, e.value.code) == (6, "E_DIGEST") and plane.file in e.value.text
    with open(os.path.join(path, "extra"), "w"), pytest.raises(minimax_packed.Error) as e:
        minimax_packed.verify(path)
    assert e.value.code == "E_EXTRA"


def test_structs_are_those_of_the_header(tmp_path):
    """native.py's fields lie where a C compiler puts those of minimax.h."""
    here = os.path.dirname(__file__)
    program = str(tmp_path / "layout")
    subprocess.run(["cc", "-I", os.path.join(here, "..", "..", "loader"), os.path.join(here, "..", "library", "abi_layout.c"), "-o", program],
                   check=True)
    struct = {"minimax_" + s.__name__[:-6].lower(): s for s in
              (native.ErrorStruct, native.InfoStruct, native.PlaneStruct, native.PieceStruct, native.TensorStruct, native.GridStruct)}
    seen = 0
    for line in subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines():
        name, *values = line.split()
        if "." not in name:
            assert ctypes.sizeof(struct[name]) == int(values[0])
            continue
        owner, field = name.split(".")
        f = getattr(struct[owner], field)
        assert [f.offset, f.size] == [int(v) for v in values], name
        seen += 1
    assert seen == sum(len(s._fields_) for s in struct.values())


def test_torch(folder):
    torch = pytest.importorskip("torch")
    rank = minimax_packed.open(convert(folder, "tiny-m2", "--tp", "2", "--quant", "block_fp8")).rank(0)
    for name, a in rank.items():
        t = rank.torch(name)
        assert t.data_ptr() == a.ctypes.data and tuple(t.shape) == a.shape
        assert t.contiguous().view(torch.uint8).numpy().tobytes() == a.tobytes()
    assert rank.torch("model.embed_tokens.weight").dtype == torch.bfloat16
    assert rank.torch("model.layers.0.self_attn.o_proj.weight").dtype == torch.float8_e4m3fn
