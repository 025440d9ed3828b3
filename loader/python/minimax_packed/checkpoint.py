"""A packed checkpoint, its ranks, and their tensors."""
from __future__ import annotations

import ctypes
import itertools
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union

import numpy as np

from minimax_packed.native import Error, ErrorStruct, GridStruct, check, lib

if TYPE_CHECKING:
    import torch

# Stored types as numpy has them; those that it has not are views of their bits.
_NUMPY = {"F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1", "U32": "<u4", "BF16": "<u2", "F8_E4M3": "u1"}
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
_TORCH = {"F32": "float32", "F16": "float16", "I8": "int8", "U8": "uint8", "U32": "uint32", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


def _c_string(text: bytes) -> bytes:
    """As an argument of C, which would end at a NUL byte."""
    if b"\0" in text:
        raise ValueError(f"found a NUL character in {text!r}")
    return text


class _Handle:
    """Owns the open checkpoint. Every view holds it, so that nothing is unmapped under one."""

    def __init__(self, path: Union[str, "os.PathLike[str]"], ranks: Optional[Iterable[int]]) -> None:
        self.pointer = None
        err, name = ErrorStruct(), _c_string(os.fsencode(path))
        if ranks is None:
            self.pointer = lib.minimax_open(name, err)
        else:
            wanted = list(ranks)
            if any(not 0 <= r < 1 << 32 for r in wanted):
                raise Error(2, "E_RANKS", f"E_RANKS: {os.fspath(path)}: found ranks {wanted}, expected numbers from 0 on")
            self.pointer = lib.minimax_open_ranks(name, (ctypes.c_uint32 * max(1, len(wanted)))(*wanted), len(wanted), err)
        if not self.pointer:
            check(err.status, err)

    def call(self, function: str, *arguments: Any) -> Any:
        """A function of the library on this checkpoint, which stays open until it returns, also where another thread closes it."""
        return getattr(lib, function)(self.pointer, *arguments)

    def __reduce__(self) -> Any:
        raise TypeError("an open checkpoint cannot be copied or pickled: open its directory again")

    def __del__(self) -> None:
        if self.pointer:
            lib.minimax_close(self.pointer)
            self.pointer = None


def _range(rows: Optional[slice], total: int) -> Tuple[int, int]:
    """First row and number of rows of a slice of so many; None: all."""
    if rows is not None and not isinstance(rows, slice):
        raise TypeError(f"found rows {rows!r}, expected a slice")
    first, end, step = (slice(None) if rows is None else rows).indices(total)
    if step != 1:
        raise ValueError(f"found rows with step {step}, expected 1")
    return first, max(0, end - first)


@dataclass(frozen=True)
class Info:
    """What the manifest says of all of it. Ranks: ``pp * tp`` of them, rank = stage * tp + tensor-parallel rank."""
    dir: str
    tool: str
    quant: str
    architecture: str
    plan: str
    tp: int
    ep: int
    pp: int
    ranks: int
    layers: int
    hidden: int
    vocab: int
    experts: int
    top_k: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Piece:
    """One source matrix (one for each expert, with "{e}" in its name) inside a tensor. ``axis``: 0 every rank has all of it, 1 cut by rows,
    2 by columns; lines ``at … at + count - 1`` here are lines ``from_ … from_ + count - 1`` of the uncut matrix."""
    source: str
    rows: int
    local_at: int
    local_rows: int
    axis: int
    at: int
    from_: int
    count: int


class Plane:
    """One stored array of a tensor: codes, plain numbers or scales. ``cell`` is the rows and columns of the matrix under one element, 0 for
    all of them; ``file`` and ``offset`` say where it lies."""

    def __init__(self, handle: _Handle, plane: Any, dtypes: Dict[str, np.dtype]) -> None:
        self._handle, self._dtypes = handle, dtypes
        self.name: str = plane.name.decode()
        self.suffix: str = plane.suffix.decode()
        self.dtype: str = plane.dtype.decode()
        self.shape: Tuple[int, ...] = tuple(plane.shape[:plane.dims])
        self.cell: Tuple[int, int] = tuple(plane.cell)
        self.file: str = plane.file.decode()
        self.offset: int = plane.offset
        self.nbytes: int = plane.bytes
        self._address: int = plane.data

    def _buffer(self) -> Any:
        buffer: Any = (ctypes.c_ubyte * self.nbytes).from_address(self._address)
        buffer.handle = self._handle  # lives as long as any view of it
        return buffer

    @property
    def array(self) -> np.ndarray:
        """A read-only view, nothing copied."""
        return np.frombuffer(memoryview(self._buffer()).toreadonly(), self._dtypes[self.dtype]).reshape(self.shape)

    @property
    def torch(self) -> "torch.Tensor":
        """The same as a torch tensor on the CPU, of torch's own BF16 and FP8 types. Nothing is copied, and the file is mapped read-only:
        writing to the tensor ends the program."""
        import torch

        return torch.frombuffer(self._buffer(), dtype=getattr(torch, _TORCH[self.dtype])).reshape(self.shape)

    def __repr__(self) -> str:
        return f"Plane({self.name!r}, {self.dtype} {list(self.shape)}, cell {list(self.cell)})"


class Tensor:
    """A tensor as one rank holds it: a matrix [rows, cols] as in y = x · Wᵀ, a vector [rows], or a stack of ``matrices`` experts, the first
    of which is expert ``first_matrix``. A weight is the value of its code (plane 0) times the scales over it."""

    def __init__(self, handle: _Handle, pointer: Any, dtypes: Dict[str, np.dtype]) -> None:
        t = pointer.contents
        self._handle, self._pointer = handle, pointer
        self.name: str = t.name.decode()
        self.scheme: str = t.scheme.decode()
        self.rank, self.stage, self.vector = int(t.rank), int(t.stage), bool(t.vector)
        self.matrices, self.first_matrix, self.whole_matrices = int(t.matrices), int(t.first_matrix), int(t.whole_matrices)
        self.rows, self.cols, self.whole_cols = int(t.rows), int(t.cols), int(t.whole_cols)
        self.input_scale: Optional[float] = t.input_scale or None
        self.planes: List[Plane] = [Plane(handle, lib.minimax_plane_at(pointer, i).contents, dtypes) for i in range(t.planes)]
        self.pieces: List[Piece] = [self._piece(i) for i in range(t.pieces)]

    def _piece(self, i: int) -> Piece:
        p = lib.minimax_piece_at(self._pointer, i).contents
        return Piece(p.source.decode(), p.rows, p.local_at, p.local_rows, p.axis, p.at, getattr(p, "from"), p.count)

    @property
    def shape(self) -> Tuple[int, ...]:
        """Of the weights: [rows], [rows, cols] or [matrices, rows, cols]."""
        if self.vector:
            return (self.rows,)
        return (self.matrices, self.rows, self.cols) if self.matrices else (self.rows, self.cols)

    def _unpack(self, matrix: int, row: int, rows: int, out: np.ndarray) -> None:
        err = ErrorStruct()
        check(lib.minimax_unpack(self._pointer, matrix, row, rows, out.ctypes.data, err), err)

    def dequantize(self, matrix: Optional[int] = None, rows: Optional[slice] = None) -> np.ndarray:
        """Weights as float32: all of them, or one matrix of the stack, or some rows of one."""
        if matrix is None and rows is None:
            out = np.empty(self.shape, np.float32)
            for i in range(self.matrices or 1):
                self._unpack(i, 0, self.rows, out[i] if self.matrices else out)
            return out
        first, count = _range(rows, self.rows)
        matrix = None if matrix is None else operator.index(matrix)
        if matrix is None and self.matrices:
            raise ValueError(f"{self.name} is a stack of {self.matrices} matrices: rows of which?")
        if matrix is not None and not 0 <= matrix < max(1, self.matrices):
            raise IndexError(f"{self.name}: found matrix {matrix}, expected less than {max(1, self.matrices)}")
        out = np.empty((count,) if self.vector else (count, self.cols), np.float32)
        self._unpack(matrix or 0, first, count, out)
        return out

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.scheme} {list(self.shape)})"


class Rank(Mapping[str, np.ndarray]):
    """The arrays of one rank by the names they have in its files, in layer order: ``rank["….w13_weight"]`` is a read-only numpy view."""

    def __init__(self, handle: _Handle, rank: int, dtypes: Dict[str, np.dtype]) -> None:
        self.rank = rank
        count = handle.call("minimax_tensor_count", rank)
        self._tensors = [Tensor(handle, handle.call("minimax_tensor_at", rank, i), dtypes) for i in range(count)]
        self._by_name = {t.name: t for t in self._tensors}
        self._planes = {p.name: p for t in self._tensors for p in t.planes}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._planes[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self._planes)

    def __len__(self) -> int:
        return len(self._planes)

    def __contains__(self, name: object) -> bool:
        return name in self._planes

    @property
    def tensors(self) -> List[Tensor]:
        """In layer order."""
        return list(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """By its name without a plane's suffix."""
        return self._by_name[name]

    def plane(self, name: str) -> Plane:
        return self._planes[name]

    def torch(self, name: str) -> "torch.Tensor":
        """The array of that name as a torch tensor that shares its memory (``Plane.torch``)."""
        return self._planes[name].torch

    def dequantize(self, name: str, matrix: Optional[int] = None, rows: Optional[slice] = None) -> np.ndarray:
        """``Tensor.dequantize`` of the tensor of that name."""
        return self._by_name[name].dequantize(matrix, rows)


class Checkpoint:
    """An open packed checkpoint; ``minimax_packed.open`` makes it. Closing it, or the end of a ``with``, ends its own hold on the mappings; views
    keep theirs."""

    def __init__(self, path: Union[str, "os.PathLike[str]"], ranks: Optional[Iterable[int]] = None, ml_dtypes: bool = False) -> None:
        self._dtypes = {name: np.dtype(code) for name, code in _NUMPY.items()}
        if ml_dtypes:
            import ml_dtypes as types

            self._dtypes.update({name: np.dtype(getattr(types, word)) for name, word in _ML_DTYPES.items()})
        self._handle: Optional[_Handle] = _Handle(path, ranks)
        info = self._handle.call("minimax_get_info").contents
        values: Dict[str, Any] = {name: getattr(info, name) for name, _ in info._fields_}
        values.update({name: os.fsdecode(v) if name == "dir" else v.decode() for name, v in values.items() if isinstance(v, bytes)})
        self.info = Info(**values)

    @property
    def _open(self) -> _Handle:
        if self._handle is None:
            raise ValueError("the checkpoint is closed")
        return self._handle

    def close(self) -> None:
        self._handle = None

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ranks(self) -> List[int]:
        """Those whose files are open."""
        return [r for r in range(self.info.ranks) if self._open.call("minimax_has_rank", r)]

    def rank(self, rank: int) -> Rank:
        rank = operator.index(rank)
        if rank not in self.ranks:
            raise IndexError(f"{self.info.dir}: found rank {rank} not open, expected one of {self.ranks}")
        return Rank(self._open, rank, self._dtypes)

    def verify(self, threads: int = 0) -> None:
        """Proves every byte of the open ranks and companion files by their digests, that nothing else lies there, that numbers are finite
        and scales allowed. Raises ``Error`` with the first damage. threads 0: as many as CPUs."""
        threads = operator.index(threads)
        if not 0 <= threads < 1 << 32:
            raise ValueError(f"found {threads} threads, expected a number from 0 on")
        err = ErrorStruct()
        check(self._open.call("minimax_verify", threads, err), err)

    @property
    def sources(self) -> List[str]:
        """Names of the source checkpoint's matrices, each expert by its own."""
        out, err, handle = [], ErrorStruct(), self._open
        for i in range(handle.call("minimax_source_count")):
            name = handle.call("minimax_source_name", i, err)
            check(err.status, err)
            out.append(ctypes.string_at(name).decode())
            lib.minimax_free(name)
        return out

    def _shape(self, source: str) -> Tuple[int, int]:
        shape, err = (ctypes.c_uint32 * 2)(), ErrorStruct()
        check(self._open.call("minimax_source_shape", _c_string(source.encode()), shape, err), err)
        return shape[0], shape[1]

    def unshard(self, source: str, rows: Optional[slice] = None) -> np.ndarray:
        """A source matrix, or some rows of it, put together from the ranks: float32 [rows, columns]; a vector has one column."""
        total, cols = self._shape(source)
        first, count = _range(rows, total)
        out, err = np.empty((count, cols), np.float32), ErrorStruct()
        check(self._open.call("minimax_unshard", source.encode(), first, count, out.ctypes.data, err), err)
        return out

    def unshard_planes(self, source: str) -> Dict[str, np.ndarray]:
        """What is stored of a source matrix, put together from the ranks, bit for bit: its codes under "", its scales under their suffixes,
        each [lines, elements of a line] on the stored grid."""
        out: Dict[str, np.ndarray] = {}
        handle = self._open
        self._shape(source)
        for i in itertools.count():
            grid, err = GridStruct(), ErrorStruct()
            status = handle.call("minimax_source_plane", source.encode(), i, grid, err)
            if status == 2:  # past the last
                break
            check(status, err)
            plane = np.empty((grid.lines, grid.width), self._dtypes[grid.dtype.decode()])
            check(handle.call("minimax_unshard_plane", source.encode(), i, plane.ctypes.data, err), err)
            out[grid.suffix.decode()] = plane
        return out

    def __repr__(self) -> str:
        i = self.info
        return f"Checkpoint({i.dir!r}, {i.architecture} {i.quant}, tp {i.tp}, ep {i.ep}, pp {i.pp})"


def open(path: Union[str, "os.PathLike[str]"], ranks: Optional[Iterable[int]] = None, ml_dtypes: bool = False) -> Checkpoint:
    """Opens a packed checkpoint, or some of its ranks, and checks its manifest and headers; no weight is read. With ml_dtypes, BF16 and FP8
    arrays have that package's types instead of the bits as uint16 and uint8."""
    return Checkpoint(path, ranks, ml_dtypes)


def verify(path: Union[str, "os.PathLike[str]"], threads: int = 0) -> None:
    """Opens and proves a checkpoint (``Checkpoint.verify``)."""
    Checkpoint(path).verify(threads)
