"""sglang_schemes.py FOLDER DIR…: which of its schemes SGLang (the package's FOLDER) chooses for the layers of compressed-tensors checkpoints, on
a GPU of capability 9.0: a line of JSON each, {"schemes": [class, …]} or {"error": "KIND: text"}. Its own chooser and the constructors of what it
chooses run; the rest of SGLang (kernels, servers, platforms) is made of names that do nothing."""
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types

REAL = "sglang.srt.layers.quantization.compressed_tensors"


class Names(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Nothing(metaclass=Names):
    """Has every attribute, takes every call and is false; as a decorator it leaves a class as it is."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and isinstance(args[0], type) else Nothing()

    def __bool__(self):
        return False

    def __iter__(self):
        return iter((Nothing(), Nothing()))

    def __le__(self, other):
        return True

    __lt__ = __ge__ = __gt__ = __le__


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Names(name, (Nothing,), {}))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in ("sglang", "sgl_kernel", "flashinfer", "aiter"):
            return None
        file = os.path.join(self.folder, *name.split(".")[1:])
        if (name + ".").startswith(REAL + "."):
            for real in (file + ".py", os.path.join(file, "__init__.py")):
                if os.path.exists(real):
                    within = [file] if os.path.isdir(file) else None
                    return importlib.util.spec_from_file_location(name, real, submodule_search_locations=within)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def chosen(config_class, path):
    import torch

    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    quant = config_class.from_config(config["quantization_config"])
    quant.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"],
                                    "index_qkv_proj": ["index_q_proj", "index_k_proj"]}
    column, row, experts = (type(n, (torch.nn.Module,), {})() for n in ("QKVParallelLinear", "RowParallelLinear", "FusedMoE"))
    found = []
    for layer, sparse in enumerate(config.get("text_config", {}).get("moe_layer_freq", [])):  # MiniMax-M3
        at = f"language_model.model.layers.{layer}."
        mlp = at + ("mlp.shared_experts." if sparse else "mlp.")
        own = [quant.get_linear_scheme(column, at + "self_attn.qkv_proj"), quant.get_linear_scheme(row, at + "self_attn.o_proj"),
               quant.get_linear_scheme(column, mlp + "gate_up_proj"), quant.get_linear_scheme(row, mlp + "down_proj"),
               *([quant.get_moe_scheme(experts, at + "mlp.experts"), quant.get_linear_scheme(column, at + "self_attn.index_qkv_proj")] if sparse else [])]
        assert None not in own, f"{at}* would be read as unquantised"
        found += own
    if found:
        for name in ("vision_tower.vision_model.encoder.layers.0.mlp.fc1", "multi_modal_projector.linear_1", "patch_merge_mlp.linear_1"):
            assert quant.get_linear_scheme(column, name) is None, f"{name} would be read as quantised"
    for layer in range(config.get("num_hidden_layers", 0)):
        at = f"model.layers.{layer}."
        found += [quant.get_linear_scheme(column, at + "self_attn.qkv_proj"), quant.get_linear_scheme(row, at + "self_attn.o_proj"),
                  quant.get_moe_scheme(experts, at + "block_sparse_moe.experts")]
    return sorted({type(scheme).__name__ for scheme in found if scheme is not None})


def main():
    sys.meta_path.insert(0, Finder(sys.argv[1]))
    logging.Logger.warning_once = logging.Logger.info_once = lambda *_, **__: None
    config_class = importlib.import_module(REAL + ".compressed_tensors").CompressedTensorsConfig
    config_class._check_scheme_supported = lambda self, capability, error=True: capability <= 90
    for path in sys.argv[2:]:
        try:
            print(json.dumps({"schemes": chosen(config_class, path)}))
        except Exception as error:  # noqa: BLE001  (whatever it is goes into the page)
            print(json.dumps({"error": f"{type(error).__name__}: {error}".rstrip(": ")}))


if __name__ == "__main__":
    main()
