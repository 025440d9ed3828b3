"""Packed MiniMax checkpoints as numpy and torch views, over libminimax.

    import minimax_packed

    with minimax_packed.open("DIR") as c:
        r = c.rank(0)
        codes = r["model.layers.0.block_sparse_moe.experts.w13_weight"]              # a view of the mapped file
        scales = r["model.layers.0.block_sparse_moe.experts.w13_weight_scale_inv"]
        w = r.dequantize("model.layers.0.block_sparse_moe.experts.w13_weight", matrix=3)   # float32
        q = c.unshard("model.layers.0.self_attn.q_proj.weight")                      # float32, from all ranks
        c.verify()

numpy has no BF16 and no FP8: such arrays are views of their bits, uint16 and uint8, unless ``open`` is asked for ml_dtypes' types.
Views are read-only and keep the mapping alive."""
from __future__ import annotations

from minimax_packed.checkpoint import Checkpoint, Info, Piece, Plane, Rank, Tensor, open, verify
from minimax_packed.native import Error, version

__all__ = ["Checkpoint", "Error", "Info", "Piece", "Plane", "Rank", "Tensor", "open", "verify", "version"]
__version__ = version()
