"""Which array of a packed rank fills which parameter of an engine that fuses weights as the packed names do (vLLM, SGLang).

The packed names are those of the engine's fused parameters, so a name maps to itself, but for three spellings:

* newer vLLM holds experts in ``experts.routed_experts``;
* compressed-tensors calls block scales ``weight_scale``, DeepSeek's FP8 format ``weight_scale_inv``;
* static scales of activations are ``input_scale``, ``w13_input_scale``, ``w2_input_scale``.

No number changes on the way. A scale may be repeated, on a finer grid or for each of the matrices that were fused; BF16 and F16 may be
widened to F32, and a KV-cache scale is made BF16 where that loses nothing. Whatever else differs, and every parameter or array that is left over, is an error: an engine that reads half of a
checkpoint gives wrong answers, not none. Neither torch nor the engine is needed here."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Tuple, Union

import numpy as np

from minimax_packed.checkpoint import Plane, Rank, Tensor
from minimax_packed.native import Error

# What an engine creates for a quantised KV cache and sets itself where a checkpoint is silent.
_KV = (".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point")
_WIDENS = {("BF16", "F32"), ("F16", "F32")}


@dataclass(frozen=True)
class Parameter:
    """A parameter as the engine has it on one rank: its type as safetensors spells it, and its shape."""
    dtype: str
    shape: Tuple[int, ...]


@dataclass(frozen=True)
class Fill:
    """How one parameter is filled: from a plane, or with the static scale of a tensor's activations."""
    parameter: str
    tensor: Tensor
    plane: Optional[Plane]
    shape: Tuple[int, ...]
    dtype: str
    how: str  # "copy", "widen", "narrow", "repeat" or "constant"

    def array(self) -> np.ndarray:
        """What the parameter becomes: its shape, its type's bits (F32 as float32). A view where how is "copy"."""
        if self.plane is None:
            return np.full(self.shape, self.tensor.input_scale, np.float32)
        a = self.plane.array
        if self.how == "widen":
            a = (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if self.plane.dtype == "BF16" else a.astype(np.float32)
        elif self.how == "narrow":
            a = (a.view(np.uint32) >> 16).astype(np.uint16)
        elif self.how == "repeat":
            return self._repeated(self.plane)
        elif self.how == "constant":
            return np.broadcast_to(a.reshape((self.tensor.matrices, *[1] * (len(self.shape) - 1)) if self.tensor.matrices else ()), self.shape)
        return a.reshape(self.shape)

    def _repeated(self, plane: Plane) -> np.ndarray:
        rows = _factor(self.tensor.rows, plane.cell[0], self.shape[-2]) or 1
        cols = _factor(self.tensor.cols, plane.cell[1], self.shape[-1]) or 1
        out = np.repeat(np.repeat(plane.array, rows, -2), cols, -1)
        return out[..., :self.shape[-2], :self.shape[-1]]


def _factor(extent: int, cell: int, wanted: int) -> Optional[int]:
    """How often each scale stands on a grid of `wanted` cells, or None: cells of a divisor of `cell` that make so many."""
    cell = cell or extent
    for times in range(1, cell + 1):
        if cell % times == 0 and -(-extent // (cell // times)) == wanted:
            return times
        if -(-extent // (cell // times or 1)) > wanted:
            return None
    return None


def spellings(name: str) -> List[str]:
    """Names that an engine may have for an array of this name, the likeliest first."""
    out = [name]
    if name.endswith("_scale_inv"):
        out.append(name[:-len("_inv")])
    return out + [n.replace(".experts.w", ".experts.routed_experts.w") for n in out if ".experts.w" in n]


def input_spellings(tensor: str) -> List[str]:
    """The same for the static scale of a tensor's activations: "….input_scale", "….experts.w13_input_scale"."""
    return spellings(tensor[:-len("weight")] + "input_scale")


def _how(tensor: Tensor, plane: Plane, want: Parameter) -> Optional[str]:
    """How the plane becomes the parameter, or None."""
    if tensor.name.endswith(_KV) and (plane.dtype, want.dtype) == ("F32", "BF16") and int(np.prod(want.shape)) == tensor.rows:
        return None if (plane.array.view(np.uint32) & 0xFFFF).any() else "narrow"
    if plane.dtype != want.dtype:
        return "widen" if (plane.dtype, want.dtype) in _WIDENS and plane.shape == want.shape else None
    if plane.shape == want.shape:
        return "copy"
    if plane.suffix == "":
        return None
    if plane.cell == (0, 0):  # one number for each matrix: of all that were fused into it
        fits = not tensor.matrices or want.shape[:1] == (tensor.matrices,)
        return "constant" if fits and all(extent >= 0 for extent in want.shape) else None
    if tensor.vector:
        return "copy" if int(np.prod(want.shape)) == tensor.rows == 1 else None
    grid = zip((tensor.rows, tensor.cols), plane.cell, want.shape[-2:])
    lead_same = want.shape[:-2] == plane.shape[:-2] and len(want.shape) == len(plane.shape)
    return "repeat" if lead_same and all(_factor(*g) for g in grid) else None


def _refuse(code: str, name: str, text: str) -> Error:
    return Error(4, code, f'{code}: tensor "{name}": {text}')


def _take(tensor: Tensor, plane: Optional[Plane], names: Iterable[str], parameters: Mapping[str, Parameter]) -> Fill:
    own = plane.name if plane else tensor.name
    name = next((n for n in names if n in parameters), None)
    if name is None:
        raise _refuse("E_EXTRA", own, f"found no parameter of the engine for it (scheme {tensor.scheme}; looked for {', '.join(names)})")
    want = parameters[name]
    if plane is None:
        if want.dtype != "F32":
            raise _refuse("E_DTYPE", name, f"found {want.dtype} in the engine, expected F32")
        return Fill(name, tensor, None, want.shape, want.dtype, "constant")
    how = _how(tensor, plane, want)
    if how is None:
        raise _refuse("E_SHAPE", own, f"found {plane.dtype} {list(plane.shape)} of {tensor.scheme}, cell {list(plane.cell)}; the engine's "
                      f"{name} is {want.dtype} {list(want.shape)}")
    return Fill(name, tensor, plane, want.shape, want.dtype, how)


def plan(rank: Rank, parameters: Mapping[str, Parameter]) -> List[Fill]:
    """One Fill for every parameter of the engine and for every array of the rank, or an Error that names the first that has none."""
    out: Dict[str, Fill] = {}
    for tensor in rank.tensors:
        found: List[Tuple[Optional[Plane], List[str]]] = [(p, spellings(p.name)) for p in tensor.planes]
        has_input = any(n in parameters for n in input_spellings(tensor.name)) if tensor.name.endswith("weight") else False
        if tensor.input_scale is not None and has_input:  # an engine of dynamic scales has no parameter for a static one
            found.append((None, input_spellings(tensor.name)))
        for plane, names in found:
            fill = _take(tensor, plane, names, parameters)
            if fill.parameter in out:
                raise _refuse("E_DUP_TENSOR", fill.parameter, f"found {out[fill.parameter].tensor.name} for it already")
            out[fill.parameter] = fill
    for name in parameters:
        if name not in out and not name.endswith(_KV):
            raise _refuse("E_MISSING", name, f"found nothing for this parameter of the engine on rank {rank.rank}")
    return list(out.values())
