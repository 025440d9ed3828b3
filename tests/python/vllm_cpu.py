"""vllm_cpu.py SOURCE PACKED TP NAMES.json: vLLM's own model on the CPU, once filled by its own loader from SOURCE, once by --load-format
minimax from PACKED under SOURCE's quantization_config. Parameters must be those of NAMES and hold the same bytes.

vllm_cpu.py --loads DIR…: whether its own loader fills the model from DIR, a line of JSON each, {"parameters": N} or {"error": "KIND: text"}.

Weights are loaded and compared, nothing is computed: the kernels that vLLM would choose need a GPU, so their choice is left out (mock), and
schemes are those of capability 9.0."""
import contextlib
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import socket
import sys
import traceback
from unittest import mock

os.environ.update(CUDA_VISIBLE_DEVICES="", VLLM_TARGET_DEVICE="cpu")


QUANTIZATION = "vllm.model_executor.layers.quantization"
CHOICES = [(re.compile(r"init_\w+_kernel$|choose_\w+_kernel$"), 0), (re.compile(r"select_\w+_backend$"), 2)]


def schemes():
    """The modules in which kernels are chosen."""
    for package in ("compressed_tensors.schemes", "compressed_tensors.compressed_tensors_moe"):
        found = importlib.import_module(f"{QUANTIZATION}.{package}")
        for info in pkgutil.iter_modules(found.__path__):
            with contextlib.suppress(ImportError):  # for devices of others
                yield importlib.import_module(f"{found.__name__}.{info.name}")
    for name in ("fp8", "modelopt"):
        yield importlib.import_module(f"{QUANTIZATION}.{name}")
    yield importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")


def without_kernels():
    """Their choice answers something, or a pair of things."""
    stack = contextlib.ExitStack()
    for module in schemes():
        for name in list(vars(module)):
            for pattern, several in CHOICES:
                if pattern.match(name):
                    something = mock.MagicMock(__name__="kernel")
                    stack.enter_context(mock.patch.object(module, name, return_value=(something,) * several if several else something))
    supported = staticmethod(lambda capability, error=True, match_exact=False: capability == 90 if match_exact else capability <= 90)
    config_class = importlib.import_module(f"{QUANTIZATION}.compressed_tensors.compressed_tensors").CompressedTensorsConfig
    stack.enter_context(mock.patch.object(config_class, "_check_scheme_supported", supported))
    return stack


def config(path, load_format, tp, source):
    from vllm.engine.arg_utils import EngineArgs

    with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
        quantization = json.load(f).get("quantization_config")
    return EngineArgs(model=path, skip_tokenizer_init=True, load_format=load_format, enforce_eager=True, max_model_len=128, dtype="bfloat16",
                      tensor_parallel_size=tp, distributed_executor_backend="mp",
                      hf_overrides={"quantization_config": quantization}).create_engine_config()


UNFILLED = 0x55


def filled(cfg):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_current_vllm_config(cfg), torch.device("cpu"), without_kernels():
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=cfg, model_config=cfg.model_config)
        for name, p in model.named_parameters():
            if p.dim() and "input_scale" not in name:  # vLLM's loader compares these with what they begin with
                p.data.view(torch.uint8).fill_(UNFILLED)  # what nobody fills is seen
        get_model_loader(cfg.load_config).load_weights(model, cfg.model_config)
    return dict(model.named_parameters())


def meet(cfg, r, tp, port):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with set_current_vllm_config(cfg):
        init_distributed_environment(world_size=tp, rank=r, local_rank=r, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo")
        ensure_model_parallel_initialized(tp, 1)


def rank(r, source, packed, tp, names, port):
    try:
        import torch
        import vllm
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        own = config(source, "auto", tp, source)
        meet(own, r, tp, port)
        theirs, ours = filled(own), filled(config(packed, "minimax", tp, source))
        from minimax_packed.vllm import parameters

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


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def loads(paths):
    import torch

    for path in paths:
        try:
            cfg = config(path, "auto", 1, path)
            if not torch.distributed.is_initialized():
                meet(cfg, 0, 1, free_port())
            found = filled(cfg)
            # Scales of inputs and of the KV cache begin with numbers of their own.
            own = [n for n, p in found.items() if p.dim() and ".attn." not in n and "input_" not in n]
            left = [n for n in own if (found[n].data.reshape(-1).contiguous().view(torch.uint8) == UNFILLED).all()]
            if left:
                raise ValueError(f"{len(left)} parameters were not filled, {left[0]} among them")
            print(json.dumps({"parameters": len(found)}), flush=True)
        except Exception as error:  # noqa: BLE001  (whatever it is goes into the page)
            print(json.dumps({"error": f"{type(error).__name__}: {error}".rstrip(": ")}), flush=True)
    os._exit(0)


def main():
    if sys.argv[1] == "--loads":
        loads(sys.argv[2:])
    source, packed, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(sys.argv[4], encoding="utf-8") as f:
        names = json.load(f)
    port = free_port()
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(r, source, packed, tp, names, port)) for r in range(tp)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join()
    sys.exit(any(p.exitcode for p in ranks))


if __name__ == "__main__":
    main()
