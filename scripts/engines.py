#!/usr/bin/env python3
"""docs/engines.md again: which engine reads what --layout hf writes, measured here on a CPU.

  ENGINES_VENV=DIR VLLM_PYTHON=DIR2/bin/python scripts/engines.py BUILD > docs/engines.md

`make engines` installs both, with what tests/interop/engine_libraries.py names, and does this. What is not there is not tried, and the page says
so. Takes some minutes."""
import collections
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
INPUTS = (".input_scale", ".input_global_scale", ".activation_scale")
STATIC = " with static scales of the inputs"
PAIRS = [("none", None), ("block_fp8", "fp8"), ("tensor_wise_fp8", "fp8"), ("tensor_wise_fp8" + STATIC, "fp8"), ("block_fp8", "ct"), ("channel_fp8", "ct"),
         ("tensor_wise_fp8", "ct"), ("tensor_wise_fp8" + STATIC, "ct"), ("int8", "ct"), ("mxfp8", "ct"), ("w4a16", "ct"), ("w4afp8", "ct"),
         ("nvfp4a16", "ct"), ("nvfp4" + STATIC, "ct"), ("mxfp4", "ct"), ("nvfp4a16", "modelopt"), ("nvfp4" + STATIC, "modelopt"),
         ("fp8_attention_nvfp4_experts", "ct"), ("fp8_attention_int4_experts", "ct")]
M3 = os.path.join(os.environ.get("SHARED", "../shared"), "models", "tiny-m3")  # with a vision tower
INDEX = {"mxfp8_attention_nvfp4_experts": "mxfp8", "fp8_attention_nvfp4_experts": "block_fp8", "fp8_attention_int4_experts": "block_fp8"}
M3_PAIRS = [("none", None), ("block_fp8", "fp8"), ("block_fp8", "ct"), ("channel_fp8", "ct"), ("mxfp8", "ct"), ("w4a16", "ct"), ("mxfp8_attention_nvfp4_experts", "ct"),
            ("fp8_attention_nvfp4_experts", "ct"), ("fp8_attention_int4_experts", "ct")]


def source(path):
    """A block FP8 MiniMax-M2 of four layers whose experts have whole blocks, as the released ones do (those of tests/data do not)."""
    sys.path.insert(0, "tests/cli")
    from convert_files import small
    c = small(hidden=256, heads=4, kv=2, dim=64, experts=4, inter=256, vocab=512, layers=4)
    with open("tests/data/tiny-m2/config.json", encoding="utf-8") as f:
        c.config = json.load(f) | c.config | {"rotary_dim": 32, "num_experts_per_tok": 2, "attn_type_list": [1] * 4}
    return c.save(path)


def one_line(error, log=""):
    """The first exception of what an engine raised or logged: its first sentence, without lists, paths and table bars."""
    kind, text = type(error).__name__, str(error)
    inner = re.findall(r"^(\w+(?:Error|Exception)): (.*)$", log, re.M)
    if inner:
        kind, text = collections.Counter(inner).most_common(1)[0][0]
    return "fails: " + one_sentence(f"{kind}: {text}")


def one_sentence(text):
    text = re.sub(r"\s+", " ", re.split(r": \[|\. |\n", text)[0]).replace("|", "/")
    return re.sub(r"/[^ ]+/", "", text).rstrip(": .")


@contextlib.contextmanager
def logged(text):
    """What transformers logs meanwhile is appended to text: the causes of a failure stand there, not in its exception."""
    logger, handler = logging.getLogger("transformers"), logging.StreamHandler(text)
    others, level = logger.handlers[:], logger.level
    logger.handlers[:], logger.level = [handler], logging.WARNING
    logging.Logger.manager._clear_cache()
    try:
        yield
    finally:
        logger.handlers[:], logger.level = others, level
        logging.Logger.manager._clear_cache()


def transformers_cell(engines, path, scheme, dialect):
    """Its parameters compared with our weights, and how often both prefer the same token."""
    import torch
    import transformers
    hf = engines.Unsharded(path)
    more, method = {}, hf.config.get("quantization_config", {}).get("quant_method")
    if method and method not in transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        return f"not read: it has no quantizer `{method}`"
    if method:
        kind = transformers.FineGrainedFP8Config if method == "fp8" else transformers.CompressedTensorsConfig
        more["quantization_config"] = kind(dequantize=True, **{k: v for k, v in hf.config["quantization_config"].items() if k != "quant_method"})
    log = io.StringIO()
    try:
        with logged(log):
            llm, info = engines.auto_class(path).from_pretrained(path, dtype=torch.float32, output_loading_info=True, **more)
    except Exception as error:  # noqa: BLE001  (whatever it is goes into the table)
        return one_line(error, re.sub(r"\x1b\[[0-9;]*m", "", log.getvalue()))
    unread = [k for k in info["unexpected_keys"] if k.endswith(INPUTS)]  # of static inputs; without kernels for them they have no use
    info["unexpected_keys"] = [k for k in info["unexpected_keys"] if k not in unread]
    lost = {k: len(v) for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")}
    if lost:
        return "loads wrongly: " + ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in lost.items())
    want = dict(engines.load(engines.dense_copy(hf)).named_parameters())
    wrong = [n for n, p in llm.named_parameters() if not torch.equal(p.float(), want[n]) and not torch.equal(p.float(), want[n].bfloat16().float())]
    said = f"loads wrongly: {len(wrong)} of {len(want)} parameters differ" if wrong else "loads, every parameter equal"
    return said + (", scales of inputs not read" if unread else "")


def library_cell(engines, path, scheme, dialect):
    """compressed-tensors' own dequantiser."""
    import torch
    if dialect != "ct":
        return "-"
    try:
        stored = engines.tensors(path)
        weights = {k: v for k, v in stored.items() if not k.endswith(INPUTS)}  # which it would call orphans
        kept = "" if len(weights) == len(stored) else ", without the scales of inputs"
        dense = engines.CompressedTensorsDequantizer(path, dtype=torch.float32).validate(weights)
    except Exception as error:  # noqa: BLE001
        return one_line(error)
    hf = engines.Unsharded(path)
    wrong = 0
    for module in hf.quantised():
        want = torch.from_numpy(hf.weight(module))
        got = dense[module + ".weight"]
        wrong += not (torch.equal(got, want) or torch.equal(got, want.bfloat16().float()))
    return (f"wrong: {wrong} matrices differ" if wrong else "equal") + kept


def asked(command, paths):
    """A line of JSON for each path."""
    done = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(paths), done.stderr[-3000:]
    return lines


def sglang_cell(fused, path, scheme, dialect, chosen):
    """Whether the names are matched, and in compressed-tensors what its own chooser makes of them."""
    names = names_cell(fused, path, scheme, dialect)
    if names != FOUND or chosen is None:
        return names
    return "fails: " + one_sentence(chosen["error"]) if "error" in chosen else "takes every layer"


def vllm_cell(loaded):
    return "fails: " + one_sentence(loaded["error"]) if "error" in loaded else "loads, every parameter filled"


FOUND = "finds every layer's scheme"


def names_cell(fused, path, scheme, dialect):
    """Whether every layer that an engine asks for finds the scheme that its files are written in."""
    with open(os.path.join(path, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    q, layers = config.get("quantization_config"), config["num_hidden_layers"]
    if not q:
        return FOUND
    if dialect == "fp8" and not q.get("weight_block_size"):
        return "not read: its scales are `weight_scale` there; `ct` is read"
    try:
        if dialect != "ct":
            for layer in range(layers):
                for name in ("self_attn.qkv_proj", "self_attn.o_proj", "block_sparse_moe.experts", "mlp.experts"):
                    assert not fused.left_out(q, f"model.layers.{layer}.{name}"), f"{name} would be read as unquantised"
            assert fused.left_out(q, "lm_head"), "lm_head would be read as quantised"
            return FOUND
        found = collections.Counter()
        for layer in range(layers):
            for moe in ("block_sparse_moe", "mlp"):
                found[fused.bits(q, fused.experts(q, layer, moe))] += 1
                assert fused.scheme(q, f"model.layers.{layer}.{moe}.gate", "ReplicatedLinear") is None
            for name, kind in (("qkv_proj", "QKVParallelLinear"), ("o_proj", "RowParallelLinear")):
                found[fused.bits(q, fused.scheme(q, f"model.layers.{layer}.self_attn.{name}", kind))] += 1
        assert None not in found and len(found) == len(q["config_groups"]), found
    except AssertionError as error:
        return one_line(error)
    return FOUND


def m3_rows(build, tmp, engines, others):
    """MiniMax-M3 with its vision tower, in the engines that load it on a CPU."""
    print("""
MiniMax-M3, small, with its vision tower (`tiny-m3`); under `ct` the index projections are quantised as attention is, since vLLM fuses them with q, k and v. SGLang was
asked for its schemes of compressed-tensors alone. transformers' class is `MiniMaxM3SparseForConditionalGeneration`.

| scheme | `--dialect` | transformers | compressed-tensors | SGLang | vLLM |
|---|---|---|---|---|---|""")
    sglang, vllm = others
    outs = [os.path.join(tmp, f"m3-{i}") for i in range(len(M3_PAIRS))]
    for (scheme, dialect), out in zip(M3_PAIRS, outs):
        subprocess.run([f"{build}/bin/minimax-convert", M3, "-o", out, "-q", "--quant", scheme, "--layout", "hf", *(["--dialect", dialect] if dialect else []),
                        *(["--override", f"*index_?_proj.weight={INDEX.get(scheme, scheme)}"] if dialect == "ct" else [])], check=True)
    loaded = asked([vllm, "tests/python/vllm_cpu.py", "--loads"], outs) if vllm else [None] * len(outs)
    ct_outs = [out for (_, dialect), out in zip(M3_PAIRS, outs) if dialect == "ct"]
    chosen = dict(zip(ct_outs, asked([sys.executable, "tests/interop/sglang_schemes.py", sglang], ct_outs))) if sglang and engines else {}
    for (scheme, dialect), out, load in zip(M3_PAIRS, outs, loaded):
        own = chosen.get(out)
        sg = "not tried" if own is None else "fails: " + one_sentence(own["error"]) if "error" in own else "takes every layer"
        cells = [f(engines, out, scheme, dialect) if engines else "not tried" for f in (transformers_cell, library_cell)]
        print(f"| `{scheme}` | {f'`{dialect}`' if dialect else '-'} | {' | '.join(cells)} | {sg} | {vllm_cell(load) if load else 'not tried'} |", flush=True)


def load_module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    build = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "build")
    venv = os.environ.get("ENGINES_VENV")
    if venv and os.path.realpath(sys.prefix) != os.path.realpath(venv):
        python = os.path.join(venv, "bin", "python")
        os.execv(python, [python, os.path.abspath(__file__), build])
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as tmp:
        os.environ |= {"BUILD": build, "TMPDIR": tmp}
        sys.path.insert(0, "tests/interop")
        sys.argv = sys.argv[:1]
        engines = versions = None
        with contextlib.suppress(ImportError):
            import compressed_tensors
            import torch
            import transformers
            torch.set_num_threads(2)
            transformers.utils.logging.set_verbosity_error()
            transformers.utils.logging.disable_progress_bar()
            engines = load_module("engines", "tests/interop/engines.py")
            versions = (transformers.__version__, compressed_tensors.__version__)
        if spec := importlib.util.find_spec("sglang"):
            os.environ["SGLANG"] = spec.submodule_search_locations[0]
        if vllm := os.environ.get("VLLM_PYTHON"):
            find = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
            os.environ["VLLM"] = subprocess.run([vllm, "-c", find], capture_output=True, text=True, check=True).stdout.strip()
        page(build, tmp, engines, versions, load_module("fused_names", "tests/interop/fused_names.py"))


def installed(engine):
    """Its version, by which the page names it."""
    folder = os.environ.get(engine.upper())
    found = folder and next(importlib.metadata.distributions(name=engine, path=[os.path.dirname(folder)]), None)
    return found.version if found else "(not here)"


def page(build, tmp, engines, versions, fused):
    version = subprocess.run([f"{build}/bin/minimax-convert", "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    tf, ct = versions or ("not here", "not here")
    print(f"""# Engines

Which engine reads what `minimax-convert --layout hf` writes. This page is made by `scripts/engines.py`, which converts a small block FP8 MiniMax-M2
with version {version} and asks each engine as far as it runs on a CPU; run it again when an engine changes.

- **transformers {tf}** loads the checkpoint (dequantised while it is loaded, as its CPU path does) and every parameter is compared with ours,
  rounded to BF16 where it computes so.
- **compressed-tensors {ct}** is the library behind `ct`: its dequantiser's matrices are compared with ours. Static scales of inputs are kept from it,
  since it takes them for orphans.
- **vLLM {installed("vllm")}** makes its own model on a CPU and fills it by its own loader, without choosing kernels (`tests/python/vllm_cpu.py`).
- **SGLang {installed("sglang")}** is asked by which scheme it would read each layer, the fused ones too: its own matching functions
  (`tests/interop/fused_names.py`, which asks vLLM's too), and for `ct` its own choice of schemes (`tests/interop/sglang_schemes.py`). Its weight loaders
  were not run.
- vLLM and SGLang answer as on a GPU of capability 9.0 (H100, H200). Their kernels were not run.

| scheme | `--dialect` | transformers | compressed-tensors | SGLang | vLLM |
|---|---|---|---|---|---|""")
    notes, model, scales = {}, source(os.path.join(tmp, "source")), os.path.join(tmp, "scales.json")
    with open(os.path.join(model, "model.safetensors.index.json"), encoding="utf-8") as f:
        scaled = sorted(n.removesuffix("_scale_inv") for n in json.load(f)["weight_map"] if n.endswith("_scale_inv"))
    with open(scales, "w", encoding="utf-8") as f:
        json.dump({n.removesuffix("weight") + "input_scale": (1 + i / len(scaled)) / 64 for i, n in enumerate(scaled)}, f)
    outs = [os.path.join(tmp, f"hf-{i}") for i in range(len(PAIRS))]
    for (scheme, dialect), out in zip(PAIRS, outs):
        done = subprocess.run([f"{build}/bin/minimax-convert", model, "-o", out, "--quant", scheme.removesuffix(STATIC), "--layout", "hf",
                               *(["--dialect", dialect] if dialect else []), *(["--act-scales", scales] if scheme.endswith(STATIC) else [])],
                              capture_output=True, text=True, check=True)
        for line in done.stderr.splitlines():
            if line.startswith("note: "):
                notes[line[6:]] = None
    sglang, vllm = os.environ.get("SGLANG"), os.environ.get("VLLM_PYTHON")
    ct_outs = [out for (_, dialect), out in zip(PAIRS, outs) if dialect == "ct"]
    chosen = dict(zip(ct_outs, asked([sys.executable, "tests/interop/sglang_schemes.py", sglang], ct_outs))) if sglang and engines else {}
    loaded = asked([vllm, "tests/python/vllm_cpu.py", "--loads"], outs) if vllm else [None] * len(outs)
    for (scheme, dialect), out, load in zip(PAIRS, outs, loaded):
        tf_cell = transformers_cell(engines, out, scheme, dialect) if engines else "not tried"
        ct_cell = library_cell(engines, out, scheme, dialect) if engines else "not tried"
        sg = sglang_cell(fused, out, scheme, dialect, chosen.get(out)) if "SGLang" in fused.OWN else "not tried"
        vl = vllm_cell(load) if load else "not tried"
        word = f"`{scheme.removesuffix(STATIC)}`{STATIC if scheme.endswith(STATIC) else ''}"
        print(f"| {word} | {f'`{dialect}`' if dialect else '-'} | {tf_cell} | {ct_cell} | {sg} | {vl} |", flush=True)
        print(f"{scheme} {dialect}", file=sys.stderr)
    if os.path.isdir(M3):
        m3_rows(build, tmp, engines, (sglang, vllm))
    print("\n`minimax-convert` notes with such a conversion, and in its model card:\n")
    for note in notes:
        print(f"- {note}")
    print("""
Not tried: generation in vLLM and SGLang (GPUs), transformers' own FP8 and FP4 kernels (GPUs), checkpoints of real size. `tensor_wise_fp8`
and `block_fp8` under `--dialect fp8` are what their readers' source names (`weight_scale_inv`); of the two, vLLM and SGLang read the block-wise one.""")


main()
