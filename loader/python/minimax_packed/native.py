"""libminimax by ctypes: minimax.h's structs and functions, field for field."""
from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p

SONAME = "libminimax.so.0"


class ErrorStruct(ctypes.Structure):
    _fields_ = [("status", c_int32), ("code", ctypes.c_char * 28), ("text", ctypes.c_char * 4064)]


class InfoStruct(ctypes.Structure):
    _fields_ = ([(n, c_char_p) for n in ("dir", "tool", "quant", "architecture", "plan")] +
                [(n, c_uint32) for n in ("tp", "ep", "pp", "ranks", "layers", "hidden", "vocab", "experts", "top_k", "intermediate", "heads",
                                         "kv_heads", "head_dim")])


class PlaneStruct(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("suffix", c_char_p), ("dtype", c_char_p), ("data", c_void_p), ("bytes", c_uint64), ("dims", c_uint32),
                ("shape", c_uint64 * 3), ("cell", c_uint32 * 2), ("file", c_char_p), ("offset", c_uint64)]


class PieceStruct(ctypes.Structure):
    _fields_ = [("source", c_char_p)] + [(n, c_uint32) for n in ("rows", "local_at", "local_rows", "axis", "at", "from", "count")]


class TensorStruct(ctypes.Structure):
    _fields_ = ([("name", c_char_p), ("scheme", c_char_p)] +
                [(n, c_uint32) for n in ("rank", "stage", "vector", "matrices", "first_matrix", "whole_matrices", "rows", "cols", "whole_cols",
                                         "planes", "pieces")] + [("input_scale", c_float)])


class GridStruct(ctypes.Structure):
    _fields_ = [("dtype", c_char_p), ("suffix", c_char_p), ("lines", c_uint32), ("width", c_uint32), ("cell", c_uint32 * 2),
                ("bytes", c_uint64)]


class Error(Exception):
    """Why libminimax refused. ``status`` is the exit status the programs give (2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 integrity,
    8 memory or limit), ``code`` is stable ("E_DIGEST"), ``text`` is the whole line."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text

    def __reduce__(self) -> tuple[type["Error"], tuple[int, str, str]]:
        """As pools of processes hand it on; an exception's own would call the class with the text alone."""
        return type(self), (self.status, self.code, self.text)


def _load() -> ctypes.CDLL:
    """$MINIMAX_LIBRARY, the library beside this file, or the system's."""
    given = os.environ.get("MINIMAX_LIBRARY")
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), SONAME)
    return ctypes.CDLL(given or (beside if os.path.exists(beside) else SONAME))


_ERROR = POINTER(ErrorStruct)
_FUNCTIONS = {
    "minimax_version": (c_char_p, []),
    "minimax_open": (c_void_p, [c_char_p, _ERROR]),
    "minimax_open_ranks": (c_void_p, [c_char_p, POINTER(c_uint32), c_size_t, _ERROR]),
    "minimax_close": (None, [c_void_p]),
    "minimax_get_info": (POINTER(InfoStruct), [c_void_p]),
    "minimax_verify": (c_int, [c_void_p, c_uint, _ERROR]),
    "minimax_has_rank": (c_int, [c_void_p, c_uint32]),
    "minimax_tensor_count": (c_size_t, [c_void_p, c_uint32]),
    "minimax_tensor_at": (POINTER(TensorStruct), [c_void_p, c_uint32, c_size_t]),
    "minimax_find": (POINTER(TensorStruct), [c_void_p, c_uint32, c_char_p]),
    "minimax_plane_at": (POINTER(PlaneStruct), [POINTER(TensorStruct), c_uint32]),
    "minimax_piece_at": (POINTER(PieceStruct), [POINTER(TensorStruct), c_uint32]),
    "minimax_unpack": (c_int, [POINTER(TensorStruct), c_uint32, c_uint32, c_uint32, c_void_p, _ERROR]),
    "minimax_source_count": (c_size_t, [c_void_p]),
    "minimax_source_name": (c_void_p, [c_void_p, c_size_t, _ERROR]),
    "minimax_source_shape": (c_int, [c_void_p, c_char_p, POINTER(c_uint32), _ERROR]),
    "minimax_source_plane": (c_int, [c_void_p, c_char_p, c_uint32, POINTER(GridStruct), _ERROR]),
    "minimax_unshard": (c_int, [c_void_p, c_char_p, c_uint32, c_uint32, c_void_p, _ERROR]),
    "minimax_unshard_plane": (c_int, [c_void_p, c_char_p, c_uint32, c_void_p, _ERROR]),
    "minimax_free": (None, [c_void_p]),
}

lib = _load()
for _name, (_result, _arguments) in _FUNCTIONS.items():
    getattr(lib, _name).restype = _result
    getattr(lib, _name).argtypes = _arguments


def check(status: int, err: ErrorStruct) -> None:
    """Raises what err says, unless status is 0."""
    if status:
        raise Error(err.status, err.code.decode(), err.text.decode("utf-8", "replace"))


def version() -> str:
    """Of the library that is loaded."""
    return lib.minimax_version().decode()
