"""A packed rank against the fused parameters of vLLM 0.33.0.

Names, types and shapes were transcribed from what vLLM 0.33.0 makes of the model (vllm/model_executor/models/minimax_m2.py and
layers/quantization/fp8.py, compressed_tensors); tests/python/vllm_cpu.py compares them with an installed vLLM. What each parameter must hold
is computed here from the source checkpoint, by vLLM's rules."""
import json
import os
import subprocess

import numpy as np
import pytest
from m2_source import CONFIG, write

import minimax_packed
from minimax_packed.fused import Parameter, plan, spellings
from minimax_packed.vllm import check_layout

CONVERT = os.path.join(os.environ["BUILD"], "bin", "minimax-convert")
H, I, D = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
HEADS, KV, E, LAYERS = (CONFIG[k] for k in ("num_attention_heads", "num_key_value_heads", "num_local_experts", "num_hidden_layers"))


def vllm_parameters(tp, scheme):
    """name -> Parameter of one rank of vLLM 0.33.0, for schemes "block_fp8" (quant_method fp8) and "bf16"."""
    out = {"model.embed_tokens.weight": Parameter("BF16", (CONFIG["vocab_size"] // tp, H)),
           "lm_head.weight": Parameter("BF16", (CONFIG["vocab_size"] // tp, H)), "model.norm.weight": Parameter("BF16", (H,))}
    inter, fp8 = I // tp, scheme == "block_fp8"
    qkv, o = (HEADS // tp + 2 * max(1, KV // tp)) * D, HEADS // tp * D
    n = k = 128
    if inter % 128:  # "FP8 MoE block scales refined from [128, 128] to [64, 64] to fit the TP-sharded intermediate size 192."
        n = k = 64
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        moe = at + "block_sparse_moe."
        code = "F8_E4M3" if fp8 else "BF16"
        out.update({at + "self_attn.qkv_proj.weight": Parameter(code, (qkv, H)), at + "self_attn.o_proj.weight": Parameter(code, (H, o)),
                    at + "self_attn.q_norm.weight": Parameter("BF16", (HEADS // tp * D,)),
                    at + "self_attn.k_norm.weight": Parameter("BF16", (max(1, KV // tp) * D,)),
                    at + "input_layernorm.weight": Parameter("BF16", (H,)), at + "post_attention_layernorm.weight": Parameter("BF16", (H,)),
                    moe + "e_score_correction_bias": Parameter("F32", (E,)), moe + "gate.weight": Parameter("F32", (E, H)),
                    moe + "experts.routed_experts.w13_weight": Parameter(code, (E, 2 * inter, H)),
                    moe + "experts.routed_experts.w2_weight": Parameter(code, (E, H, inter))})
        if not fp8:
            continue
        out.update({at + "self_attn.qkv_proj.weight_scale_inv": Parameter("F32", (qkv // 128, H // 128)),
                    at + "self_attn.o_proj.weight_scale_inv": Parameter("F32", (H // 128, o // 128)),
                    moe + "experts.routed_experts.w13_weight_scale_inv": Parameter("F32", (E, 2 * inter // n, H // k)),
                    moe + "experts.routed_experts.w2_weight_scale_inv": Parameter("F32", (E, H // n, inter // k))})
        out.update({at + f"self_attn.attn.{s}_scale": Parameter("BF16", ()) for s in ("q", "k", "v", "prob")})
    return out


def rank_of(source, tp, r, name, parameter):
    """What vLLM's own loader puts into a parameter of rank r, from the source's tensors."""
    kv_rank = r * KV // tp if tp > KV else r
    suffix = "_scale_inv" if name.endswith("_scale_inv") else ""
    bits = {key: a for key, (_, a) in source.items()}

    def rows(key, of, i, unit):
        a = bits[key]
        per = a.shape[0] // of
        return a[per * i:per * (i + 1)] if per * of == a.shape[0] else np.repeat(a, unit, 0)[len(a) * unit // of * i:len(a) * unit // of * (i + 1)]

    at = name.split("self_attn.")[0].split("block_sparse_moe.")[0]
    kv_of = min(tp, KV)
    if "qkv_proj" in name:
        return np.concatenate([rows(f"{at}self_attn.{x}_proj.weight{suffix}", tp if x == "q" else kv_of, r if x == "q" else kv_rank, 1) for x in "qkv"])
    if "o_proj" in name:
        a = bits[name]
        return a[:, a.shape[1] // tp * r:a.shape[1] // tp * (r + 1)]
    if "_norm.weight" in name and "self_attn" in name:
        return rows(name, tp if "q_norm" in name else kv_of, r if "q_norm" in name else kv_rank, 1)
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return rows(name, tp, r, 1)
    if ".experts." not in name:
        return bits[name]
    out = []
    for e in range(E):
        def own(w):
            a = bits[f"{at}block_sparse_moe.experts.{e}.{w}.weight{suffix}"]
            if suffix:  # on the engine's grid, or 128 where that is whole
                f = (H // 128) and parameter.shape[2 if w != "w2" else 1] // (H // 128)
                a = np.repeat(np.repeat(a, f, 0), f, 1)
            axis = 1 if w == "w2" else 0
            per = a.shape[axis] // tp
            return np.take(a, range(per * r, per * (r + 1)), axis)
        out.append(own("w2") if "w2_" in name else np.concatenate([own("w1"), own("w3")]))
    return np.stack(out)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("m2"))
    return path, write(path)


def convert(source, folder, *options):
    os.makedirs(folder, exist_ok=True)
    out = os.path.join(str(folder), "packed")
    subprocess.run([CONVERT, source[0], "-o", out, "-q", *options], check=True)
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_block_fp8(source, tmp_path, tp):
    packed = convert(source, tmp_path, "--tp", str(tp))
    want = vllm_parameters(tp, "block_fp8")
    with minimax_packed.open(packed) as c:
        for r in range(tp):
            fills = plan(c.rank(r), want)
            assert {f.parameter for f in fills} == {n for n in want if ".attn." not in n}
            for f in fills:
                a, expected = f.array(), rank_of(source[1], tp, r, f.parameter, want[f.parameter])
                assert a.shape == want[f.parameter].shape == expected.shape, f.parameter
                assert a.tobytes() == expected.tobytes(), (f.parameter, f.how)
                assert f.how == "copy" or f.parameter.endswith("_scale_inv")
            repeated = {f.parameter.split(".")[-1] for f in fills if f.how == "repeat"}
            assert repeated == (set() if I // tp % 128 == 0 else {"w13_weight_scale_inv", "w2_weight_scale_inv"})


def test_bf16_and_shared_kv_heads(source, tmp_path):
    """More ranks than KV heads; a parameter that is wider than what is stored."""
    packed = convert(source, tmp_path, "--tp", "4", "--quant", "bf16")
    want = vllm_parameters(4, "bf16")
    want["model.norm.weight"] = Parameter("F32", (H,))
    with minimax_packed.open(packed) as c:
        fills = {f.parameter: f for f in plan(c.rank(3), want)}
        for name in [n for n in want if "_proj." not in n and ".experts." not in n and n != "model.norm.weight"]:
            assert fills[name].array().tobytes() == rank_of(source[1], 4, 3, name, want[name]).tobytes(), name
        assert set(fills) == set(want) and {f.how for n, f in fills.items() if n != "model.norm.weight"} == {"copy"}
        wide = fills["model.norm.weight"]
        bits = source[1]["model.norm.weight"][1]
        assert wide.how == "widen" and (wide.array() == (bits.astype("u4") << 16).view("f4")).all()
    with minimax_packed.open(packed, ml_dtypes=True) as c:  # the same numbers, whatever type views have
        wide = next(f for f in plan(c.rank(3), want) if f.how == "widen")
        assert (wide.array() == (bits.astype("u4") << 16).view("f4")).all()


@pytest.mark.parametrize("scheme,scale_shape", [("channel_fp8", lambda rows: (rows, 1)), ("int8", lambda rows: (rows, 1))])
def test_per_channel(source, tmp_path, scheme, scale_shape):
    """compressed-tensors' per-channel schemes: weight_scale [rows, 1], of experts [E, rows, 1]."""
    packed = convert(source, tmp_path, "--tp", "2", "--quant", scheme)
    want = vllm_parameters(2, "bf16")
    code = "I8" if scheme == "int8" else "F8_E4M3"
    for name in [n for n in want if "_proj.weight" in n or ".experts." in n]:
        shape = want[name].shape
        want[name] = Parameter(code, shape)
        want[name + "_scale"] = Parameter("F32", (*shape[:-2], *scale_shape(shape[-2])))
    with minimax_packed.open(packed) as c:
        fills = plan(c.rank(1), want)
        assert {f.parameter for f in fills} == set(want)
        for f in fills:
            assert f.how == "copy" and f.array().tobytes() == f.plane.array.tobytes()


def static_scales(source, folder):
    path = folder / "scales.json"
    names = [n[:-len(".weight")] for n, (dtype, _) in source[1].items() if dtype == "F8_E4M3"]
    path.write_text("{" + ", ".join(f'"{n}.activation_scale": {1 + i / 16}' for i, n in enumerate(names)) + "}")
    return ["--act-scales", str(path)]


def test_nvfp4(source, tmp_path):
    """As ModelOpt's quantisation has it: the scale of a whole matrix once for each that was fused, and static scales of activations."""
    packed = convert(source, tmp_path, "--tp", "1", "--quant", "nvfp4", *static_scales(source, tmp_path))
    want = vllm_parameters(1, "bf16")
    for name in [n for n in want if "_proj.weight" in n or ".experts." in n]:
        stem, shape = name[:-len("weight")], want[name].shape
        each = (3,) if "qkv_proj" in name else (1,) if "o_proj" in name else (E, 2) if "w13_" in name else (E,)
        want[name] = Parameter("U8", (*shape[:-1], shape[-1] // 2))
        want[stem + "weight_scale"] = Parameter("F8_E4M3", (*shape[:-1], shape[-1] // 16))
        want[stem + "weight_scale_2"] = want[stem + "input_scale"] = Parameter("F32", each)
    with minimax_packed.open(packed) as c:
        rank = c.rank(0)
        fills = {f.parameter: f for f in plan(rank, want)}
        assert set(fills) == set(want)
        at = "model.layers.1.block_sparse_moe.experts."
        assert (fills[at + "routed_experts.w13_weight_scale_2"].array() == rank[at + "w13_weight_scale_2"].reshape(E, 1)).all()
        assert fills[at + "routed_experts.w13_weight_scale"].how == fills[at + "routed_experts.w13_weight"].how == "copy"
        assert (fills[at + "routed_experts.w13_input_scale"].array() == np.float32(rank.tensor(at + "w13_weight").input_scale)).all()
        name = "model.layers.0.self_attn.o_proj.weight_scale_2"  # a scalar, as ModelOpt stores it
        one = {f.parameter: f for f in plan(rank, {**want, name: Parameter("F32", ())})}[name].array()
        assert one.shape == () and one == rank[name].item()
        with pytest.raises(minimax_packed.Error):
            plan(rank, {**want, name: Parameter("F32", (-1,))})


def test_per_tensor_and_inputs(source, tmp_path):
    """One scale for each matrix that was fused (linear [3], w13 [E, 2], w2 [E]), and static scales of activations."""
    packed = convert(source, tmp_path, "--tp", "2", "--quant", "tensor_wise_fp8", *static_scales(source, tmp_path))
    want = vllm_parameters(2, "bf16")
    for name in [n for n in want if "_proj.weight" in n or ".experts." in n]:
        stem = name[:-len("weight")]
        shape = {"qkv_proj.": (3,), "o_proj.": (1,), "w13_": (E, 2), "w2_": (E,)}[stem.split(".")[-1] or stem.split(".")[-2] + "."]
        want[name] = Parameter("F8_E4M3", want[name].shape)
        want[stem + "weight_scale"] = Parameter("F32", shape)
        want[stem + "input_scale"] = Parameter("F32", shape[:1])
    with minimax_packed.open(packed) as c:
        rank = c.rank(1)
        fills = {f.parameter: f for f in plan(rank, want)}
        assert set(fills) == set(want)
        at = "model.layers.1.block_sparse_moe.experts."
        stored = rank[at + "w13_weight_scale"]
        assert stored.shape == (E, 1, 1) and len(set(stored.ravel())) == E
        got = fills[at + "routed_experts.w13_weight_scale"].array()
        assert (got == stored.reshape(E, 1)).all() and got.shape == (E, 2)
        assert (fills[at + "routed_experts.w2_weight_scale"].array() == rank[at + "w2_weight_scale"].ravel()).all()
        qkv = "model.layers.0.self_attn.qkv_proj."
        assert (fills[qkv + "weight_scale"].array() == rank[qkv + "weight_scale"].item()).all() and fills[qkv + "weight_scale"].array().shape == (3,)
        inputs = fills[at + "routed_experts.w2_input_scale"]
        assert inputs.plane is None and (inputs.array() == np.float32(rank.tensor(at + "w2_weight").input_scale)).all()


def test_kv_scales(source, tmp_path):
    """vLLM makes KV-cache scales in the model's type: BF16 takes an F32 number that it holds, and no other."""
    at = "model.layers.0.self_attn."
    for number, fits in (0.375, True), (0.1, False):
        folder = tmp_path / str(number)
        extra = {at + x + "_scale": ("F32", np.full(1, number, "<f4")) for x in "kv"}
        write(folder, extra)
        packed = convert((str(folder),), tmp_path / f"out-{number}", "--tp", "2")
        want = vllm_parameters(2, "block_fp8")
        with minimax_packed.open(packed) as c:
            if fits:
                fills = {f.parameter: f for f in plan(c.rank(0), want)}
                assert fills[at + "attn.k_scale"].array().view(np.uint16) == 0x3EC0 and fills[at + "attn.k_scale"].array().shape == ()
                assert at + "attn.q_scale" not in fills and at.replace("0", "1") + "attn.k_scale" not in fills
                continue
            with pytest.raises(minimax_packed.Error, match="E_SHAPE.*attn.k_scale is BF16"):
                plan(c.rank(0), want)


def test_refusals(source, tmp_path):
    packed = convert(source, tmp_path, "--tp", "2")
    right = vllm_parameters(2, "block_fp8")
    name = "model.layers.1.self_attn.o_proj.weight"

    def refused(code, text, **changes):
        want = dict(right)
        for key, value in changes.items():
            key = name if key == "at" else key
            if value is None:
                del want[key]
            else:
                want[key] = value
        with minimax_packed.open(packed) as c, pytest.raises(minimax_packed.Error) as e:
            plan(c.rank(0), want)
        assert e.value.code == code and e.value.status == 4 and text in e.value.text, e.value.text

    refused("E_EXTRA", f'"{name}": found no parameter of the engine for it', at=None)
    refused("E_MISSING", "found nothing for this parameter of the engine on rank 0", **{"model.layers.2.norm.weight": Parameter("BF16", (H,))})
    refused("E_SHAPE", "F8_E4M3 [256, 256] of block_fp8", at=Parameter("F8_E4M3", (H, H + 1)))
    refused("E_SHAPE", "is BF16 [256, 256]", at=Parameter("BF16", (H, H)))
    refused("E_SHAPE", "is F32 [2, 1]", **{name + "_scale_inv": Parameter("F32", (2, 1))})  # a coarser grid than is stored
    with minimax_packed.open(packed, ranks=[]) as c:
        check_layout(c.info, 2, 1, 1, "linear")
        for args in (4, 1, 1, "linear"), (2, 2, 1, "linear"), (2, 1, 2, "linear"):
            with pytest.raises(minimax_packed.Error, match="E_PARALLEL.*minimax-convert .* --tp"):
                check_layout(c.info, *args)


def beside_vllm(source, packed, tp, names, folder):
    """Runs vllm_cpu.py with the interpreter that VLLM_PYTHON names."""
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no interpreter that has vllm")
    path = folder / "names.json"
    path.write_text(json.dumps(names))
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([python, os.path.join(here, "vllm_cpu.py"), source, packed, str(tp), str(path)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(minimax_packed.__file__))}, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert done.returncode == 0 and len(lines) == tp, done.stdout[-3000:] + done.stderr[-3000:]
    print(*lines, sep="\n")


@pytest.mark.parametrize("tp", [1, 2])
def test_installed_vllm(source, tmp_path, tp):
    """The names above, and every byte, beside an installed vLLM: its own loader with the source, ours with the packed ranks."""
    names = {n: [p.dtype, list(p.shape)] for n, p in vllm_parameters(tp, "block_fp8").items()}
    beside_vllm(source[0], convert(source, tmp_path, "--tp", str(tp)), tp, names, tmp_path)


@pytest.mark.parametrize("scheme,dialect", [("bf16", None), ("channel_fp8", "ct"), ("int8", "ct"), ("tensor_wise_fp8", "ct"), ("nvfp4", "modelopt")])
def test_installed_vllm_schemes(source, tmp_path, scheme, dialect):
    """The same under other quantisations: its own loader with the packed checkpoint's export to Hugging Face names."""
    static = static_scales(source, tmp_path) if scheme in ("nvfp4", "tensor_wise_fp8") else []
    packed = convert(source, tmp_path, "--tp", "2", "--quant", scheme, *static)
    hf = str(tmp_path / "hf")
    subprocess.run([CONVERT, packed, "-o", hf, "-q", "--layout", "hf", *(["--dialect", dialect] if dialect else [])], check=True)
    beside_vllm(hf, packed, 2, None, tmp_path)


def test_spellings():
    assert spellings("a.experts.w13_weight_scale_inv") == ["a.experts.w13_weight_scale_inv", "a.experts.w13_weight_scale",
                                                           "a.experts.routed_experts.w13_weight_scale_inv",
                                                           "a.experts.routed_experts.w13_weight_scale"]
    assert spellings("model.norm.weight") == ["model.norm.weight"]
