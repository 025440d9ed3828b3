"""vLLM loads packed checkpoints: ``vllm serve DIR --load-format minimax --tensor-parallel-size N``.

Each worker maps its own rank's files and copies them into vLLM's fused parameters; nothing is read, cut or fused again. vLLM finds this
module through its entry point group ``vllm.general_plugins``. ``--model-loader-extra-config '{"verify": true}'`` proves the rank's bytes by
their digests first.

The checkpoint's tensor- and pipeline-parallel sizes must be vLLM's, its expert-parallel size 1, or that of vLLM's expert parallelism. The
quantisation that config.json (or --hf-overrides) declares must be the one that is stored: names, types and shapes are compared, and what does
not fit is refused."""
from __future__ import annotations

from typing import Any, Dict

import minimax_packed
from minimax_packed.fused import Fill, Parameter, plan

LOAD_FORMAT = "minimax"


def _dtypes() -> Dict[Any, str]:
    import torch

    return {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8",
            torch.int8: "I8"}


def parameters(model: Any) -> Dict[str, Parameter]:
    """Those of a torch module, by name."""
    words = _dtypes()
    return {name: Parameter(words.get(p.dtype, str(p.dtype)), tuple(p.shape)) for name, p in model.named_parameters()}


def _copy(target: Any, fill: Fill) -> None:
    import torch

    if fill.how == "copy" and fill.plane is not None:
        source = fill.plane.torch.reshape(fill.shape)
    else:
        a = fill.array()
        source = torch.from_numpy(a.copy())
        if source.dtype != target.dtype:
            source = source.view(target.dtype)
    target.data.copy_(source)


def load(model: Any, directory: str, rank: int, verify: bool = False) -> int:
    """Fills every parameter of a module from one rank; returns how many. Raises ``minimax_packed.Error`` before the first is written if any does
    not fit."""
    with minimax_packed.open(directory, ranks=[rank]) as c:
        if verify:
            c.verify()
        fills = plan(c.rank(rank), parameters(model))
        targets = dict(model.named_parameters())
        for fill in fills:
            _copy(targets[fill.parameter], fill)
    return len(fills)


def check_layout(info: minimax_packed.Info, tp: int, pp: int, ep: int, placement: str) -> None:
    """Refuses a checkpoint that was cut for other ranks. ep: 1, or vLLM's expert-parallel size."""
    found, want = (info.tp, info.pp, info.ep), (tp, pp, ep)
    if found != want:
        raise minimax_packed.Error(4, "E_PARALLEL", f"E_PARALLEL: {info.dir}: found tp {found[0]}, pp {found[1]}, ep {found[2]}; "
                                   f"vLLM runs with tp {tp}, pp {pp}, ep {ep} (minimax-convert {info.dir} -o NEW --tp {tp} --pp {pp} --ep {ep} cuts it so)")
    if ep > 1 and placement != "linear":
        raise minimax_packed.Error(4, "E_PARALLEL", f"E_PARALLEL: {info.dir}: found expert placement {placement} in vLLM, expected linear")


def register() -> None:
    """vLLM's entry point. May be called more than once."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class MinimaxLoader(BaseModelLoader):
        """--load-format minimax."""

        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            extra = dict(load_config.model_loader_extra_config or {})
            self.verify = bool(extra.pop("verify", False))
            if extra:
                raise ValueError(f"found {sorted(extra)} in --model-loader-extra-config, expected verify")

        def download_model(self, model_config: Any) -> None:
            """Nothing to download: the model is a directory."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            from vllm.config import get_current_vllm_config
            from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

            parallel = get_current_vllm_config().parallel_config
            tp, pp = get_tensor_model_parallel_world_size(), get_pp_group().world_size
            ep = tp if parallel.enable_expert_parallel else 1
            if parallel.data_parallel_size > 1 and ep > 1:
                raise minimax_packed.Error(
                    4, "E_PARALLEL", "E_PARALLEL: found data-parallel experts in vLLM, which packed checkpoints are not cut for")
            directory = getattr(model_config, "model_weights", None) or model_config.model
            with minimax_packed.open(directory, ranks=[]) as c:
                check_layout(c.info, tp, pp, ep, getattr(parallel, "expert_placement_strategy", "linear"))
            load(model, directory, get_pp_group().rank_in_group * tp + get_tensor_model_parallel_rank(), self.verify)

    register_model_loader(LOAD_FORMAT)(MinimaxLoader)
