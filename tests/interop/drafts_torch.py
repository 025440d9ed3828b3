#!/usr/bin/env python3
"""Numbers of DFlash and EAGLE-3 drafts of the published shapes, against torch in f32. The weights are random. The target is a MiniMax-M2 of 62 narrow layers with
the released hidden size and vocabulary, so that taps have their released numbers. minimax-convert --draft packs each draft; draft_logits runs it on the CPU.
drafts_torch_quant.py has the same drafts in the schemes of --draft-quant.

Tapped outputs and the logits of every proposal differ by at most LIMIT of the root mean square of the row, and the proposals are the same ids. The torch code
below follows the published mathematics of the drafts and shares nothing with the runtime. With any one of the mistakes listed below planted in it, the logits
differ by more. (engine_libraries.py has what this needs; it takes 10 GB of disk, 12 GB of memory and 6 minutes.)"""
import copy
import json
import math
import os
import shutil
import subprocess
import sys
import time

from engine_libraries import need

need("numpy", "safetensors", "torch")

import numpy as np
import torch
from safetensors.torch import save_file

BUILD, TMP = os.environ["BUILD"], os.environ["TMPDIR"]
LIMIT = 2e-4
H, VOCAB, LAYERS = 3072, 200064, 62
CUTS = (150, 153, 200)  # tokens that the target has when the draft proposes; the first is longer than the windows
IDS = 201
FIRST = 16384  # ids of the target's head by whose logits a mistake is found

# ---- random weights ----

RANDOM = torch.Generator().manual_seed(46)


def matrix(rows, cols):
    """Outputs are about as large as inputs. BF16, as the released files have it."""
    return (torch.randn(rows, cols, generator=RANDOM) / math.sqrt(cols)).bfloat16()


def vector(n, least=0.5, most=1.5):
    return (torch.rand(n, generator=RANDOM) * (most - least) + least).bfloat16()


def embedding(rows):
    return torch.randn(rows, H, generator=RANDOM).bfloat16()


def mlp(width):
    return {"gate_proj": (width, H), "up_proj": (width, H), "down_proj": (H, width)}


# ---- the target ----

HEADS, KV, D, ROTARY, EXPERTS, TOP, EXPERT_WIDTH = 4, 2, 128, 64, 4, 2, 32
TARGET = {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1] * LAYERS, "head_dim": D, "hidden_act": "silu",
          "hidden_size": H, "intermediate_size": EXPERT_WIDTH, "max_position_embeddings": 196608, "num_attention_heads": HEADS, "num_experts_per_tok": TOP,
          "num_hidden_layers": LAYERS, "num_key_value_heads": KV, "num_local_experts": EXPERTS, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "rotary_dim": ROTARY,
          "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
          "sliding_window": None, "tie_word_embeddings": False, "use_mtp": False, "vocab_size": VOCAB, "torch_dtype": "bfloat16"}


def target_weights():
    w = {"model.embed_tokens.weight": embedding(VOCAB), "lm_head.weight": matrix(VOCAB, H), "model.norm.weight": vector(H)}
    for at in range(LAYERS):
        p = f"model.layers.{at}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = vector(H)
        for name, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
            w[f"{p}self_attn.{name}_proj.weight"] = matrix(rows, H)
        w[p + "self_attn.o_proj.weight"] = matrix(H, HEADS * D)
        w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"] = vector(HEADS * D), vector(KV * D)
        w[p + "block_sparse_moe.gate.weight"] = matrix(EXPERTS, H).float()
        w[p + "block_sparse_moe.e_score_correction_bias"] = torch.rand(EXPERTS, generator=RANDOM) / 4
        for e in range(EXPERTS):
            for name, shape in (("w1", (EXPERT_WIDTH, H)), ("w3", (EXPERT_WIDTH, H)), ("w2", (H, EXPERT_WIDTH))):
                w[f"{p}block_sparse_moe.experts.{e}.{name}.weight"] = matrix(*shape)
    return w


# ---- mathematics ----


def rms(x, weight, eps=1e-6):
    """weight None: no norm, a planted mistake."""
    return x if weight is None else x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()


def linear(x, weight):
    return x @ weight.float().T


def rope(x, position, theta, rotated):
    """The first `rotated` columns of x [T, heads, d], halves against each other."""
    angle = position.double()[:, None] / theta ** (torch.arange(0, rotated, 2).double() / rotated)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    a, b, rest = x[..., :rotated // 2], x[..., rotated // 2:rotated], x[..., rotated:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attention(q, k, v, seen):
    """q [T, heads, d]; k and v [S, kv heads, d]; seen [T, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).flatten(1)


def hidden_states(w, ids):
    """As Hugging Face numbers them: the embeddings, then the output of each layer."""
    x = w["model.embed_tokens.weight"][ids].float()
    at, out = torch.arange(len(ids)), [x]
    for number in range(LAYERS):
        p = f"model.layers.{number}."
        y = rms(x, w[p + "input_layernorm.weight"])
        q, k, v = (linear(y, w[f"{p}self_attn.{n}_proj.weight"]) for n in "qkv")
        q, k = rms(q, w[p + "self_attn.q_norm.weight"]), rms(k, w[p + "self_attn.k_norm.weight"])
        q, k = (rope(m.unflatten(1, (-1, D)), at, TARGET["rope_theta"], ROTARY) for m in (q, k))
        x = x + linear(attention(q, k, v.unflatten(1, (-1, D)), at[:, None] >= at), w[p + "self_attn.o_proj.weight"])
        y, p = rms(x, w[p + "post_attention_layernorm.weight"]), p + "block_sparse_moe."
        score = linear(y, w[p + "gate.weight"]).sigmoid()
        chosen = (score + w[p + "e_score_correction_bias"]).topk(TOP, -1).indices
        share = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
        share = share / share.sum(-1, keepdim=True)
        for e in range(EXPERTS):
            up, gate, down = (w[f"{p}experts.{e}.{n}.weight"] for n in ("w3", "w1", "w2"))
            x = x + share[:, e:e + 1] * linear(torch.nn.functional.silu(linear(y, gate)) * linear(y, up), down)
        out.append(x)
    return out


def feed_forward(x, w, p, post):
    m = rms(x, w[post])
    return x + linear(torch.nn.functional.silu(linear(m, w[p + "mlp.gate_proj.weight"])) * linear(m, w[p + "mlp.up_proj.weight"]), w[p + "mlp.down_proj.weight"])


def dflash(s, w, at, each, target):
    """logits [each, VOCAB] of the proposals behind the token at position `at`."""
    d, rotated, theta = s["head_dim"], s.get("rotated", s["head_dim"]), s["rope_theta"]
    taps = [target.states[n + 1][:at] for n in s["taps"]]
    c = rms(linear(torch.cat(taps, -1), w["fc.weight"]), w["hidden_norm.weight"])
    block = torch.tensor([target.ids[at]] + [s["mask"]] * each)
    behind = torch.arange(at)
    rows = at + s.get("shift", 0) + torch.arange(1 + each)
    x = target.embed[block].float()
    for number in range(s["layers"]):
        p = f"layers.{number}."
        y = rms(x, w[p + "input_layernorm.weight"])
        q, k, v = (linear(y, w[f"{p}self_attn.{n}_proj.weight"]).unflatten(1, (-1, d)) for n in "qkv")
        ck, cv = (linear(c, w[f"{p}self_attn.{n}_proj.weight"]).unflatten(1, (-1, d)) for n in "kv")
        q_norm, k_norm = w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"]
        q = rope(rms(q, q_norm), rows, theta, rotated)
        k = torch.cat((rope(rms(ck, k_norm), behind, theta, rotated), rope(rms(k, k_norm), rows, theta, rotated)))
        window, causal = s["windows"][number]
        back = torch.arange(at, at + 1 + each)[:, None] - torch.arange(at + 1 + each)  # how far a key lies behind a row
        seen = (back < window if window else back > -VOCAB) & (back >= 0 if causal else back > -VOCAB)
        if not s.get("anchor", True):
            seen[1:, at] = False
        x = x + linear(attention(q, k, torch.cat((cv, v)), seen), w[p + "self_attn.o_proj.weight"])
        x = feed_forward(x, w, p, p + "post_attention_layernorm.weight")
    return linear(rms(x, w["norm.weight"])[1:], target.head)


def eagle(s, w, at, each, target):
    """(logits [each, draft vocabulary], ids of the proposals) of the chain behind the token at position `at`. s["cells"] receives the chain's own cells."""
    d, p = s["head_dim"], "midlayer."
    embed = w.get("embed_tokens.weight", target.embed)
    taps = [target.states[n + 1][:at] for n in s["taps"]]
    if s["fc_norm"]:
        taps = [rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps)]

    def inputs(tokens, g, position):
        u = rms(g, w[p + "hidden_norm.weight"])
        x = torch.cat((rms(embed[tokens].float(), w[p + "input_layernorm.weight"]), u), -1)
        q, k, v = (linear(x, w[f"{p}self_attn.{n}_proj.weight"]).unflatten(1, (-1, d)) for n in "qkv")
        q, k = (rope(m, position, s["rope_theta"], s.get("rotated", d)) for m in (q, k))
        return q, k, v, u if s["residual_u"] else g

    # Cell i is of token i + 1 and the taps of token i.
    place, left = torch.arange(at), s.get("left", 1)
    q, k, v, r = inputs(torch.tensor(target.ids[left:left + at]), linear(torch.cat(taps, -1), w["fc.weight"]), place)
    for i, (old_k, old_v) in s.get("kept", {}).items():
        if i < at - 1:
            k[i], v[i] = old_k, old_v
    q, r = q[-1:], r[-1:]
    logits, ids = [], []
    for step in range(each):
        h = r + linear(attention(q, k, v, torch.ones(1, len(k), dtype=torch.bool)), w[p + "self_attn.o_proj.weight"])
        h = feed_forward(h, w, p, p + "post_attention_layernorm.weight")
        out = rms(h, w["norm.weight"])
        logits.append(linear(out, w["lm_head.weight"])[0])
        best = int(logits[-1].argmax())
        ids.append(best + int(w["d2t"][best]) if "d2t" in w else best)
        position = at - 1 + (step + 1) * s.get("advance", 1)
        q, k_new, v_new, r = inputs(torch.tensor(ids[-1:]), out if s["norm_output"] else h, torch.tensor([position]))
        s.setdefault("cells", {})[at + step] = (k_new[0], v_new[0])
        k, v = torch.cat((k, k_new)), torch.cat((v, v_new))
    return torch.stack(logits), ids


# ---- drafts of the published shapes ----


def flash(heads, width, taps, layers=5, block=8, mask=200054, window=0):
    """window: of all layers but the last, which are causal then (vLLM's rule where the config does not say)."""
    windows = [(window, True)] * (layers - 1) * bool(window)
    windows += [(0, False)] * (layers - len(windows))
    config = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": layers, "hidden_size": H, "num_attention_heads": heads, "num_key_value_heads": 8,
              "head_dim": 128, "intermediate_size": width, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "hidden_act": "silu", "vocab_size": VOCAB,
              "block_size": block, "layer_types": ["sliding_attention" if w else "full_attention" for w, _ in windows], "num_target_layers": LAYERS,
              "dflash_config": {"target_layer_ids": taps, "mask_token_id": mask}, **({"sliding_window": window} if window else {})}
    return {"kind": "dflash", "config": config, "taps": taps, "layers": layers, "mask": mask, "windows": windows, "head_dim": 128, "rope_theta": 5e6, "each": block - 1}


def chain(ids=(1, 30, 58), norms=False):
    """EAGLE-3 as trained for M2.5. norms: EAGLE-3.1 with every setting the other way, embeddings of its own, and no ids of taps."""
    config = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": H, "target_hidden_size": H, "num_attention_heads": 24,
              "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "rms_norm_eps": 1e-6, "rope_theta": 5000000, "hidden_act": "silu",
              "vocab_size": VOCAB, "draft_vocab_size": 32000, "norm_output": True}
    config.update({"fc_norm": True, "norm_before_residual": True} if norms else
                  {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}})
    return {"kind": "eagle", "config": config, "taps": list(ids), "fc_norm": norms, "norm_output": norms, "residual_u": norms, "head_dim": 128, "rope_theta": 5e6,
            "each": 7}


DRAFTS = {
    "DFlash of M2.5, four windows": flash(24, 8192, [1, 13, 24, 36, 47, 59], window=128),
    "DFlash of 48 heads, all full": flash(48, 6144, [1, 13, 24, 36, 47, 59]),
    "DFlash L3H5, block 16": flash(24, 8192, [2, 16, 30, 43, 57], layers=3, block=16, mask=200063),
    "EAGLE-3 of M2.5": chain(),
    "EAGLE-3.1, no ids of taps": chain(norms=True),
}


def draft_weights(s):
    c, p = s["config"], "midlayer."
    heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    w = {"fc.weight": matrix(H, len(s["taps"]) * H), "norm.weight": vector(H)}
    if s["kind"] == "eagle":
        rows, width = c["draft_vocab_size"], 2 * H
        w["lm_head.weight"], w[p + "hidden_norm.weight"] = matrix(rows, H), vector(H)
        named = torch.randperm(VOCAB - 1, generator=RANDOM)[:rows].sort().values + 1  # no id is its index
        w["d2t"], w["t2d"] = named - torch.arange(rows), torch.zeros(VOCAB, dtype=torch.bool).scatter(0, named, True)
        if s["fc_norm"]:
            w["embed_tokens.weight"] = embedding(VOCAB)
            w.update({f"fc_norm.{i}.weight": vector(H) for i in range(len(s["taps"]))})
        layers = [p]
    else:
        w["hidden_norm.weight"], width = vector(H), H
        layers = [f"layers.{i}." for i in range(s["layers"])]
    for p in layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            w[f"{p}{name}.weight"] = vector(H)
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            w[f"{p}self_attn.{name}_proj.weight"] = matrix(n * d, width)
        w[p + "self_attn.o_proj.weight"] = matrix(H, heads * d)
        if s["kind"] == "dflash":
            w[p + "self_attn.q_norm.weight"], w[p + "self_attn.k_norm.weight"] = vector(d, 1, 2), vector(d, 1, 2)
        for name, shape in mlp(c["intermediate_size"]).items():
            w[f"{p}mlp.{name}.weight"] = matrix(*shape)
    return w


def mistakes(s, w):
    """(what, settings, weights) of every mistake that is planted in the reference, to be found at the first cut."""
    taps = s["taps"]
    yield "every tap a layer early", {"taps": [t - 1 for t in taps]}, {}
    yield "every tap a layer late", {"taps": [t + 1 for t in taps]}, {}
    for i in range(len(taps)):
        yield f"tap {i} a layer early", {"taps": [t - (n == i) for n, t in enumerate(taps)]}, {}
    yield "taps in descending order", {"taps": taps[::-1]}, {}
    yield "half of the columns turned", {"rotated": 64}, {}
    yield "another rope_theta", {"rope_theta": 1e6}, {}
    for name in w:
        if "norm" in name and ("layers." not in name or "layers.0." in name) and not name.startswith("fc_norm."):
            yield f"no {name}", {}, {name: None}
    if s["kind"] == "dflash":
        yield "block at the position before", {"shift": -1}, {}
        yield "mask rows do not read the anchor", {"anchor": False}, {}
        for i, (window, causal) in enumerate(s["windows"]):
            yield f"layer {i} with causality {not causal}", {"windows": [(n, c != (k == i)) for k, (n, c) in enumerate(s["windows"])]}, {}
            for change in (-1, 1) if window else ():
                yield f"layer {i} with a window of {window + change}", {"windows": [(n + change * (k == i), c) for k, (n, c) in enumerate(s["windows"])]}, {}
        return
    yield "tokens not shifted left", {"left": 0}, {}
    yield "the chain's positions stand still", {"advance": 0}, {}
    for key in ("fc_norm", "norm_output", "residual_u"):
        if key != "fc_norm" or s[key]:
            yield f"{key} {not s[key]}", {key: not s[key]}, {}
    if "embed_tokens.weight" in w:
        yield "embeddings of the target", {"no_embed": True}, {}


# ---- comparison ----


class Target:
    def __init__(self, folder):
        w = target_weights()
        save(folder, TARGET, w)
        self.embed, self.head = w["model.embed_tokens.weight"], w["lm_head.weight"].float()
        self.ids = torch.randperm(VOCAB, generator=RANDOM)[:IDS].tolist()  # each once
        self.states = hidden_states(w, torch.tensor(self.ids))


def save(folder, config, weights):
    os.makedirs(folder)
    save_file(weights, folder + "/model.safetensors")
    with open(folder + "/config.json", "w", encoding="utf-8") as f:
        json.dump(config, f)


def ran(packed, s, each, ids, cuts):
    """Of each cut (taps [taps, rows, H], logits [each, VOCAB], proposals) by the runtime."""
    args = [BUILD + "/tests/interop/draft_logits", packed, str(each), *map(str, cuts)]
    numbers = subprocess.run(args, input=np.array(ids, "<i4").tobytes(), stdout=subprocess.PIPE, check=True).stdout
    held, at, out = 0, 0, []
    for cut in cuts:
        shapes = ((len(s["taps"]), cut - held, H), "<f4"), ((each, VOCAB), "<f4"), ((each,), "<i4")
        parts = []
        for shape, kind in shapes:
            part = np.frombuffer(numbers, kind, math.prod(shape), at).reshape(shape)
            parts.append(torch.from_numpy(part.copy()))
            at += part.nbytes
        out.append(parts)
        held = cut
    assert at == len(numbers), (at, len(numbers))
    return out


def apart(found, wanted):
    """The largest difference in a row, by its root mean square; NaN is infinite."""
    error = (found - wanted).abs().amax(-1) / (wanted * wanted).mean(-1).sqrt()
    return float(error.nan_to_num(math.inf).max())


def proposals(s, w, at, each, target):
    """(logits over VOCAB, -inf of ids that the head does not have, and the ids) of the reference."""
    if s["kind"] == "dflash":
        logits = dflash(s, w, at, each, target)
        return logits, logits.argmax(-1).tolist()
    if s.get("no_embed"):
        w = {k: v for k, v in w.items() if k != "embed_tokens.weight"}
    logits, ids = eagle(s, w, at, each, target)
    return logits, ids


def named(w):
    return w["d2t"] + torch.arange(len(w["d2t"])) if "d2t" in w else slice(None)


def kept_cells(s, w, target):
    """(cut, what, settings, weights) of the mistake that only the second cut shows."""
    cells = {}
    proposals({**s, "cells": cells}, w, CUTS[0], s["each"], target)
    return CUTS[1], "cells of proposals kept", {"kept": cells}, {}


def planted(s, w, target):
    """(cut, what, settings, weights) of every mistake."""
    for mistake in mistakes(s, w):
        yield CUTS[0], *mistake
    if s["kind"] == "eagle":
        yield kept_cells(s, w, target)


def compare(name, s, w, packed, target, wrong, fewer=True):
    """The runtime against the reference, at every cut with all proposals and, if `fewer`, at the last with fewer; then the reference with each mistake of
    `wrong`, by the logits of the first ids."""
    worst_tap = worst = 0
    right, others = {}, []
    for each, cuts in ((s["each"], CUTS), (3, CUTS[-1:]))[:1 + fewer]:
        held = 0
        for cut, (taps, logits, ids) in zip(cuts, ran(packed, s, each, target.ids, cuts)):
            for i, layer in enumerate(s["taps"]):
                worst_tap = max(worst_tap, apart(taps[i], target.states[layer + 1][held:cut]))
            wanted, wanted_ids = proposals(s, w, cut, each, target)
            found = logits[:, named(w)]
            worst = max(worst, apart(found, wanted))
            assert int(logits.isfinite().sum()) == found.numel(), f"{name}: logits of ids that the head does not have"
            others += [(cut, ids.tolist(), wanted_ids)] if ids.tolist() != wanted_ids else []
            right[cut, each], held = found, cut
    print(f"{name}: taps differ by {worst_tap:.1e}, logits by {worst:.1e}, wanted {LIMIT:.0e}; other proposals: {others or 'none'}", flush=True)
    assert max(worst_tap, worst) <= LIMIT and not others, name
    first, errors = copy.copy(target), []
    first.head = target.head[:FIRST]
    for cut, what, settings, weights in wrong:
        logits = proposals({**s, **settings}, {**w, **weights}, cut, s["each"], first)[0]
        errors.append((apart(right[cut, s["each"]][:, :logits.shape[1]], logits), what))
    if not errors:
        return
    print(f"{name}: with each of {len(errors)} mistakes by {min(errors)[0]:.1e} or more ({min(errors)[1]})", flush=True)
    assert min(errors)[0] > LIMIT, f"{name}: a mistake that is not found"


def reference(weights):
    """The weights of a draft as the reference takes them. Those of embeddings stay BF16, since few rows are read."""
    return {k: v.float() if v.dtype == torch.bfloat16 and "embed" not in k else v for k, v in weights.items()}


def converted(work, quant="none"):
    """The packed target with work/draft in a scheme."""
    subprocess.run([BUILD + "/bin/minimax-convert", work + "/target", "-o", work + "/packed", "--draft", work + "/draft", "--draft-quant", quant, "--quant", "none", "-q"],
                   check=True)
    return work + "/packed"


def each_draft(check):
    """Calls check(name, settings, weights, folder of work, target) for every draft whose name has a word of the command line, if there are any."""
    start = time.monotonic()
    work = os.path.join(TMP, "drafts")
    shutil.rmtree(work, ignore_errors=True)
    target = Target(work + "/target")
    wanted = sys.argv[1:]
    for name, s in DRAFTS.items():
        if wanted and not any(x in name for x in wanted):
            continue
        weights = draft_weights(s)
        save(work + "/draft", s["config"], weights)
        check(name, s, weights, work, target)
        shutil.rmtree(work + "/draft")
        print(f"{name}: {time.monotonic() - start:.0f} s since the start", flush=True)
    shutil.rmtree(work)


def as_stored(name, s, weights, work, target):
    own = reference(weights)
    packed = converted(work)
    compare(name, s, own, packed, target, planted(s, own, target))
    shutil.rmtree(packed)


if __name__ == "__main__":
    with torch.no_grad():
        each_draft(as_stored)
