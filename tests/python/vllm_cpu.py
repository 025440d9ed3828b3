"""vllm_cpu.py SOURCE PACKED TP NAMES.json: vLLM's own model on the CPU, once filled by its own loader from SOURCE, once by --load-format
minimax from PACKED under SOURCE's quantization_config. Parameters must be those of NAMES and hold the same bytes. Weights are loaded and
compared, nothing is computed: the kernels that vLLM would choose need a GPU, so their choice is left out (mock)."""
import contextlib
import json
import multiprocessing
import os
import socket
import sys
import traceback
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", VLLM_TARGET_DEVICE="cpu")


LAYERS = "vllm.model_executor.layers.quantization."
CHOICES = [(LAYERS + "fp8.init_fp8_linear_kernel", 0), (LAYERS + "fp8.select_fp8_moe_backend", 2),
           (LAYERS + "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_int8.select_int8_moe_backend", 2),
           (LAYERS + "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8.select_fp8_moe_backend", 2),
           (LAYERS + "modelopt.select_nvfp4_moe_backend", 2), (LAYERS + "modelopt.init_nvfp4_linear_kernel", 0)]


def without_kernels():
    """Their choice answers something, or a pair of things."""
    stack = contextlib.ExitStack()
    for name, several in CHOICES:
        stack.enter_context(mock.patch(name, return_value=(mock.MagicMock(),) * several) if several else mock.patch(name))
    return stack


def config(path, load_format, tp, source):
    from vllm.engine.arg_utils import EngineArgs

    with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
        quantization = json.load(f).get("quantization_config")
    return EngineArgs(model=path, skip_tokenizer_init=True, load_format=load_format, enforce_eager=True, max_model_len=128, dtype="bfloat16",
                      tensor_parallel_size=tp, distributed_executor_backend="mp",
                      hf_overrides={"quantization_config": quantization}).create_engine_config()


def filled(cfg):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(cfg), torch.device("cpu"), without_kernels():
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=cfg, model_config=cfg.model_config)
        for _, p in model.named_parameters():
            p.data.view(torch.uint8).fill_(0x55) if p.dim() else None  # what nobody fills is seen
        get_model_loader(cfg.load_config).load_weights(model, cfg.model_config)
    return dict(model.named_parameters())


def rank(r, source, packed, tp, names, port):
    try:
        import torch
        import vllm
        from vllm.config import set_current_vllm_config
        from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        own = config(source, "auto", tp, source)
        with set_current_vllm_config(own):
            init_distributed_environment(world_size=tp, rank=r, local_rank=r, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo")
            ensure_model_parallel_initialized(tp, 1)
        theirs, ours = filled(own), filled(config(packed, "minimax", tp, source))
        from minimax.vllm import parameters

        class Module:
            named_parameters = staticmethod(lambda: ours.items())

        found = {n: [p.dtype, list(p.shape)] for n, p in parameters(Module).items()}
        assert not names or found == names, {n: (found.get(n), names.get(n)) for n in set(found) | set(names) if found.get(n) != names.get(n)}
        for name, p in ours.items():
            a, b = (x.data.reshape(-1).contiguous().view(torch.uint8) for x in (p, theirs[name]))
            assert torch.equal(a, b), name
        print(f"rank {r} of {tp}: vLLM {vllm.__version__}: {len(ours)} parameters equal", flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    source, packed, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(sys.argv[4], encoding="utf-8") as f:
        names = json.load(f)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(r, source, packed, tp, names, port)) for r in range(tp)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    sys.exit(any(p.exitcode for p in ranks))


if __name__ == "__main__":
    main()
