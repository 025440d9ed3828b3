#!/usr/bin/env python3
"""train_draft.py MODEL -o DIR: trains an EAGLE-3 head and a DFlash draft for a small MiniMax-M2 checkpoint such as tests/data/tiny-m2.

Writes DIR/eagle3 and DIR/dflash (config.json and model.safetensors in BF16), which minimax-convert takes with --draft. Needs torch alone; a CPU is enough. The
training text is what the model writes itself, from document starts at temperature 1 and then at several; it is saved as DIR/text.json and used again if it is there.

--held-out FILE has token ids of held-out documents. The script continues their beginnings with the model at temperatures 0, 0.7 and 1 and prints how many tokens a
step gives: the model's own token and the leading proposals that equal it, for chains of 3 (EAGLE-3) and blocks of 8 (DFlash), with all proposals in each step; and how
many it would give if the draft proposed the model's own best tokens."""
import argparse
import json
import math
import os
import struct
import time

import torch
import torch.nn.functional as F

CHAIN, BLOCK = 3, 8


# ---- files ----

TYPES = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}


def read_safetensors(path):
    with open(path, "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = bytearray(f.read())
    at = {k: v for k, v in head.items() if k != "__metadata__"}
    return {k: torch.frombuffer(data[slice(*v["data_offsets"])], dtype=TYPES[v["dtype"]]).reshape(v["shape"]) for k, v in at.items()}


def read_model(folder):
    """All tensors in F32; codes of block FP8 times the scales of their 128 x 128 blocks."""
    stored = {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("model-") and name.endswith(".safetensors"):
            stored.update(read_safetensors(os.path.join(folder, name)))
    tensors = {}
    for name, t in stored.items():
        scale = stored.get(name + "_scale_inv")
        tensors[name] = t.float()
        if scale is not None:
            tensors[name] *= scale.repeat_interleave(128, 0)[:t.shape[0]].repeat_interleave(128, 1)[:, :t.shape[1]]
    return tensors


def write_draft(folder, config, tensors):
    """tensors: F32, written as BF16, or int64."""
    os.makedirs(folder, exist_ok=True)
    head, data = {}, b""
    for name, t in tensors.items():
        t = t.detach()
        raw = (t if t.dtype == torch.int64 else t.to(torch.bfloat16).view(torch.int16)).contiguous().numpy().tobytes()
        head[name] = {"dtype": "I64" if t.dtype == torch.int64 else "BF16", "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)


# ---- parts of both models ----

def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta, width):
    """x[B, heads, T, d], positions[T]: the first `width` columns of a head, halves against each other."""
    angle = positions[:, None].double() * theta ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high, rest = x[..., :width // 2], x[..., width // 2:width], x[..., width:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def heads(x, n):
    """[B, T, n · d] as [B, n, T, d]."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


# ---- the model ----

class Target:
    """MiniMax-M2 in F32: attention with joint norms of q and of k, rotation of a part of each head, experts by biased sigmoids."""

    def __init__(self, folder):
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
            c = self.c = json.load(f)
        w = self.w = read_model(folder)
        self.eps, self.layers = c["rms_norm_eps"], []
        for at in range(c["num_hidden_layers"]):
            layer = {k.removeprefix(f"model.layers.{at}."): t for k, t in w.items() if k.startswith(f"model.layers.{at}.")}
            one = [[layer[f"block_sparse_moe.experts.{e}.{x}.weight"] for e in range(c["num_local_experts"])] for x in ("w1", "w3", "w2")]
            layer["up"] = torch.cat((torch.stack(one[0]), torch.stack(one[1])), 1).transpose(1, 2).contiguous()  # [E, H, 2 · I]
            layer["down"] = torch.stack(one[2]).transpose(1, 2).contiguous()  # [E, I, H]
            self.layers.append(layer)

    def attention(self, x, w, past, start):
        c, n = self.c, x.shape[1]
        positions = torch.arange(start, start + n)
        q = norm(F.linear(x, w["self_attn.q_proj.weight"]), w["self_attn.q_norm.weight"], self.eps)
        k = norm(F.linear(x, w["self_attn.k_proj.weight"]), w["self_attn.k_norm.weight"], self.eps)
        q, k, v = heads(q, c["num_attention_heads"]), heads(k, c["num_key_value_heads"]), heads(F.linear(x, w["self_attn.v_proj.weight"]), c["num_key_value_heads"])
        q, k = (rope(t, positions, c["rope_theta"], c["rotary_dim"]) for t in (q, k))
        if past is not None:
            past[0][:, :, start:start + n], past[1][:, :, start:start + n] = k, v
            k, v = past[0][:, :, :start + n], past[1][:, :, :start + n]
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        seen = torch.arange(k.shape[2])[None] <= positions[:, None]
        return F.linear(joined(F.scaled_dot_product_attention(q, k, v, seen)), w["self_attn.o_proj.weight"])

    def experts(self, x, w):
        """All experts of all rows, those that are not chosen by weight 0: few experts, and small."""
        flat, k = x.flatten(0, 1), self.c["num_experts_per_tok"]
        score = F.linear(flat, w["block_sparse_moe.gate.weight"]).sigmoid()
        chosen = (score + w["block_sparse_moe.e_score_correction_bias"]).topk(k).indices
        share = torch.zeros_like(score).scatter(1, chosen, score.gather(1, chosen))
        share = share / share.sum(1, keepdim=True)
        gate, up = torch.matmul(flat, w["up"]).chunk(2, -1)  # [E, rows, I] each
        return torch.einsum("enh,ne->nh", torch.matmul(F.silu(gate) * up, w["down"]), share).view_as(x)

    @torch.no_grad()
    def forward(self, ids, past=None, start=0):
        """ids[B, T] at positions from `start` on: taps[B, T, L - 1, H], the residual after each layer but the last, and logits[B, T, vocab]."""
        h, taps = self.w["model.embed_tokens.weight"][ids], []
        for at, w in enumerate(self.layers):
            h = h + self.attention(norm(h, w["input_layernorm.weight"], self.eps), w, past and past[at], start)
            h = h + self.experts(norm(h, w["post_attention_layernorm.weight"], self.eps), w)
            taps.append(h)
        return torch.stack(taps[:-1], 2), F.linear(norm(h, self.w["model.norm.weight"], self.eps), self.w["lm_head.weight"])

    @torch.no_grad()
    def write(self, prompt, length, temperature, never):
        """prompt[B, P] continued to `length` tokens; temperature(n)[B]: of token n, 0 is greedy. Ids from `never` on are not sampled."""
        c, batch = self.c, prompt.shape[0]
        shape = (batch, c["num_key_value_heads"], length, c["head_dim"])
        past = [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]
        ids, new = torch.zeros(batch, length, dtype=torch.long), prompt
        at = 0
        while at < length:
            ids[:, at:at + new.shape[1]] = new
            logits, at = self.forward(new, past, at)[1][:, -1, :never], at + new.shape[1]
            t = temperature(at)[:, None]
            noise = -torch.empty_like(logits).exponential_().log()
            new = torch.where(t > 0, logits / t.clamp_min(1e-3) + noise, logits).argmax(1, keepdim=True)
        return ids


def check_golden(target, folder):
    """The F32 logits that lie next to the checkpoint."""
    path = os.path.join(folder, "golden.safetensors")
    if os.path.exists(path):
        golden = read_safetensors(path)
        for n in ("17", "64", "300"):
            want = golden["logits." + n]
            worst = (target.forward(golden["ids." + n].long()[None])[1][0, -want.shape[0]:] - want).abs().max().item()
            assert worst < 1e-3, f"logits of {n} tokens are {worst} off"


# ---- drafts ----

def random_weights(shapes):
    made = {}
    for name, shape in shapes.items():
        made[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / math.sqrt(shape[1])
    return {k: t.requires_grad_() for k, t in made.items()}


class Draft:
    def __init__(self, target, size):
        c = target.c
        self.target, self.h, self.eps, self.theta = target, c["hidden_size"], c["rms_norm_eps"], 10000.0
        self.heads, self.kv, self.d, self.mlp = size["heads"], size["kv_heads"], size["head_dim"], size["intermediate"]
        self.taps = list(range(c["num_hidden_layers"] - 1))[-size["taps"]:]
        self.config = {"num_hidden_layers": size["layers"], "hidden_size": self.h, "num_attention_heads": self.heads, "num_key_value_heads": self.kv, "head_dim": self.d,
                       "intermediate_size": self.mlp, "rms_norm_eps": self.eps, "rope_theta": self.theta, "hidden_act": "silu", "vocab_size": c["vocab_size"]}

    def layer_shapes(self, at, inputs):
        q, kv = self.heads * self.d, self.kv * self.d
        shapes = {"input_layernorm": (self.h,), "post_attention_layernorm": (self.h,), "self_attn.q_proj": (q, inputs), "self_attn.k_proj": (kv, inputs),
                  "self_attn.v_proj": (kv, inputs), "self_attn.o_proj": (self.h, q), "mlp.gate_proj": (self.mlp, self.h), "mlp.up_proj": (self.mlp, self.h),
                  "mlp.down_proj": (self.h, self.mlp)}
        return {f"{at}.{k}.weight": s for k, s in shapes.items()}

    def begin(self):
        """Residual branches begin small, and fc with the last tap."""
        with torch.no_grad():
            for name, t in self.w.items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    t *= 0.1
            self.w["fc.weight"] *= 0.1
            self.w["fc.weight"][:, -self.h:] += torch.eye(self.h)
            self.w["norm.weight"].copy_(self.target.w["model.norm.weight"])

    def mlp_of(self, x, at):
        return gated_mlp(x, *(self.w[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")))

    def load(self, folder):
        """The weights of an earlier run with the same sizes."""
        stored = read_safetensors(os.path.join(folder, "model.safetensors"))
        self.w = {k: stored[k].float().view_as(t).requires_grad_() for k, t in self.w.items()}

    def context(self, taps):
        return F.linear(taps[:, :, self.taps].flatten(2), self.w["fc.weight"])


class Eagle(Draft):
    """One Llama layer over [embedding; hidden state], in a chain."""
    name, most = "eagle3", CHAIN

    def __init__(self, target, size, common):
        super().__init__(target, size)
        self.ids = common  # of the model, ascending, for each row of the head
        shapes = {"fc.weight": (self.h, len(self.taps) * self.h), "midlayer.hidden_norm.weight": (self.h,), "norm.weight": (self.h,), "lm_head.weight": (len(common), self.h)}
        self.w = random_weights({**shapes, **self.layer_shapes("midlayer", 2 * self.h)})
        self.begin()
        with torch.no_grad():
            self.w["lm_head.weight"].copy_(target.w["lm_head.weight"][common])

    def passes(self, ids, taps):
        """Logits[B, T, draft vocabulary] of each pass k of the chain of all positions i, given tokens i + 1 to i + 1 + k: they propose token i + 2 + k. Keys of the
        passes before are a position's own."""
        w, n = self.w, ids.shape[1]
        place, g = torch.arange(n), self.context(taps)
        keys, values = [], []
        for k in range(CHAIN):
            token = self.target.w["model.embed_tokens.weight"][ids.roll(-1 - k, 1)]
            x = torch.cat((norm(token, w["midlayer.input_layernorm.weight"], self.eps), norm(g, w["midlayer.hidden_norm.weight"], self.eps)), -1)
            q, key, value = (heads(F.linear(x, w[f"midlayer.self_attn.{m}_proj.weight"]), c) for m, c in (("q", self.heads), ("k", self.kv), ("v", self.kv)))
            q, key = rope(q, place + k, self.theta, self.d), rope(key, place + k, self.theta, self.d)
            keys.append(key.repeat_interleave(self.heads // self.kv, 1))
            values.append(value.repeat_interleave(self.heads // self.kv, 1))
            score = (q @ keys[0].transpose(2, 3)).masked_fill(place[None] > place[:, None], -torch.inf)
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
            p = (torch.cat((score, *own), -1) / math.sqrt(self.d)).softmax(-1)
            out = p[..., :n] @ values[0]
            for j, value in enumerate(values[1:]):
                out = out + p[..., n + j:n + j + 1] * value
            g = g + F.linear(joined(out), w["midlayer.self_attn.o_proj.weight"])
            g = g + self.mlp_of(norm(g, w["midlayer.post_attention_layernorm.weight"], self.eps), "midlayer")
            yield F.linear(norm(g, w["norm.weight"], self.eps), w["lm_head.weight"])

    def loss(self, ids, taps, logits):
        """Cross entropy with the model's own distribution over the ids of the head, a pass the less, the later it is."""
        total, n = 0, ids.shape[1]
        want = logits[..., self.ids].softmax(-1)
        for k, found in enumerate(self.passes(ids, taps)):
            last = n - 1 - k
            total = total - 0.8 ** k * (want[:, 1 + k:] * found[:, :last].log_softmax(-1)).sum(-1).mean()
        return total

    @torch.no_grad()
    def proposals(self, ids, taps):
        """[B, T, CHAIN]: proposals for the tokens from i + 2 on, right as long as all before them are."""
        return torch.stack([self.ids[x.argmax(-1)] for x in self.passes(ids, taps)], -1)

    def save(self, folder):
        c = self.target.c["vocab_size"]
        config = {"architectures": ["LlamaForCausalLMEagle3"], **self.config, "target_hidden_size": self.h, "draft_vocab_size": len(self.ids),
                  "eagle_config": {"eagle_aux_hidden_state_layer_ids": self.taps, "use_aux_hidden_state": True}}
        write_draft(folder, config, self.w if len(self.ids) == c else {**self.w, "d2t": self.ids - torch.arange(len(self.ids))})


class Flash(Draft):
    """Qwen3-like layers over a block [token, mask, …, mask], whose rows see all of the block and cells of what the model read."""
    name, most = "dflash", BLOCK - 1

    def __init__(self, target, size, mask):
        super().__init__(target, size)
        self.mask, self.layers = mask, size["layers"]
        shapes = {"fc.weight": (self.h, len(self.taps) * self.h), "hidden_norm.weight": (self.h,), "norm.weight": (self.h,)}
        for at in range(self.layers):
            shapes.update(self.layer_shapes(f"layers.{at}", self.h))
            shapes.update({f"layers.{at}.self_attn.{x}_norm.weight": (self.d,) for x in "qk"})
        self.w = random_weights(shapes)
        self.begin()

    def project(self, x, at, kind, count, positions):
        y = heads(F.linear(x, self.w[f"layers.{at}.self_attn.{kind}_proj.weight"]), count)
        if kind == "v":
            return y
        return rope(norm(y, self.w[f"layers.{at}.self_attn.{kind}_norm.weight"], self.eps), positions, self.theta, self.d)

    def blocks(self, ids, taps, anchors):
        """Logits[B, A, BLOCK - 1, vocab] of the rows behind each anchor, which propose tokens anchor + 1 to anchor + BLOCK - 1."""
        w, n, count = self.w, ids.shape[1], len(anchors)
        rows = torch.full((ids.shape[0], count, BLOCK), self.mask)
        rows[..., 0] = ids[:, anchors]
        place, block = (anchors[:, None] + torch.arange(BLOCK)).flatten(), torch.arange(count).repeat_interleave(BLOCK)
        seen = torch.cat((torch.arange(n)[None] < anchors[block][:, None], block[None] == block[:, None]), 1)
        context = norm(self.context(taps), w["hidden_norm.weight"], self.eps)
        h = self.target.w["model.embed_tokens.weight"][rows.flatten(1)]
        for at in range(self.layers):
            x = norm(h, w[f"layers.{at}.input_layernorm.weight"], self.eps)
            q = self.project(x, at, "q", self.heads, place)
            k, v = (torch.cat((self.project(context, at, m, self.kv, torch.arange(n)), self.project(x, at, m, self.kv, place)), 2)
                    .repeat_interleave(self.heads // self.kv, 1) for m in "kv")
            h = h + F.linear(joined(F.scaled_dot_product_attention(q, k, v, seen)), w[f"layers.{at}.self_attn.o_proj.weight"])
            h = h + self.mlp_of(norm(h, w[f"layers.{at}.post_attention_layernorm.weight"], self.eps), f"layers.{at}")
        h = h.unflatten(1, (count, BLOCK))[:, :, 1:]
        return F.linear(norm(h, w["norm.weight"], self.eps), self.target.w["lm_head.weight"])

    def loss(self, ids, taps, logits):
        """Cross entropy with the model's distribution of each token given all before it, of random blocks, a row the less, the later it is."""
        anchors = torch.randperm(ids.shape[1] - BLOCK)[:ids.shape[1] // BLOCK] + 1
        found = self.blocks(ids, taps, anchors).log_softmax(-1)
        want = logits[:, anchors[:, None] + torch.arange(BLOCK - 1)].softmax(-1)
        return -((want * found).sum(-1).mean((0, 1)) * 0.8 ** torch.arange(BLOCK - 1)).sum()

    @torch.no_grad()
    def proposals(self, ids, taps):
        """[B, T, BLOCK - 1]: proposals for the tokens from i + 2 on, given token i + 1."""
        n = ids.shape[1]
        found = torch.zeros(ids.shape[0], n, BLOCK - 1, dtype=torch.long)
        for first in range(1, n, 32):
            anchors = torch.arange(first, min(n, first + 32))
            found[:, anchors - 1] = self.blocks(ids, taps, anchors).argmax(-1)
        return found

    def save(self, folder):
        write_draft(folder, {"architectures": ["DFlashDraftModel"], **self.config, "block_size": BLOCK, "is_causal": False,
                             "dflash_config": {"target_layer_ids": self.taps, "mask_token_id": self.mask}}, self.w)


# ---- training ----

def training_text(target, args, path):
    """ids[N, length] that the model wrote: up to a random place at temperature 1, then at one of several."""
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            return torch.tensor(json.load(f))
    parts, began = [], time.time()
    for _ in range(0, args.texts, 64):
        begin = torch.full((64, 1), args.start)
        turn, later = torch.randint(8, args.length // 2, (64,)), torch.tensor([0, 0, 0.5, 1]).repeat(16)
        parts.append(target.write(begin, args.length, lambda n, turn=turn, later=later: torch.where(n < turn, 1, later), args.start))
        print(f"{64 * len(parts)} texts of {args.length} tokens, {time.time() - began:.0f} s", flush=True)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(torch.cat(parts).tolist(), f)
    return torch.cat(parts)


def read_by(target, text):
    """Taps and logits of the whole text in BF16, computed once for both drafts: 5.6 KB a token of tiny-m2."""
    parts, began = [], time.time()
    for ids in text.split(16):
        parts.append([t.bfloat16() for t in target.forward(ids)])
    print(f"taps of {text.numel()} tokens, {time.time() - began:.0f} s", flush=True)
    return [torch.cat(t) for t in zip(*parts)]


def train(draft, text, read, args):
    params = list(draft.w.values())
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.01}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0}]
    adam = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
    began, mean = time.time(), 0
    for step in range(args.steps):
        for group in adam.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / args.steps)) / 2)
        some = torch.randint(len(text), (args.batch,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = draft.loss(text[some], *(t[some].float() for t in read))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1)
        adam.step()
        mean += (loss.item() - mean) / min(step + 1, 50)
        if (step + 1) % 50 == 0:
            print(f"{draft.name}: step {step + 1} of {args.steps}, loss {mean:.3f}, {time.time() - began:.0f} s", flush=True)


def continuations(target, args):
    """Beginnings of the held-out documents, continued: {temperature: ids[B, prompt + reply]}."""
    with open(args.held_out, encoding="utf-8") as f:
        ids = json.load(f)
    starts = [i for i, x in enumerate(ids) if x == args.start]
    prompts = torch.tensor([ids[i:i + args.prompt] for i, end in zip(starts, [*starts[1:], len(ids)]) if end - i >= args.prompt])
    return {t: target.write(prompts, args.prompt + args.reply, lambda _, t=t: torch.full((len(prompts),), t), args.start) for t in (0.0, 0.7, 1.0)}


def tokens_a_step(proposals, most, ids, prompt):
    """Tokens of the replies after the first by the steps that give them, if each step checks `most` proposals: [B, T, most] for the tokens from i + 2 on."""
    steps, given = 0, 0
    for row, proposed in zip(ids.tolist(), proposals.tolist()):
        at = prompt  # the last token that is known; the prompt's pass gave it
        while at + 1 < len(row):
            right = 0
            while right < most and at + 1 + right < len(row) and proposed[at - 1][right] == row[at + 1 + right]:
                right += 1
            gain = min(right + 1, len(row) - 1 - at)
            steps, given, at = steps + 1, given + gain, at + gain
    return given / steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--kind", choices=("eagle3", "dflash"), action="append")
    parser.add_argument("--held-out", default=None, metavar="FILE")
    parser.add_argument("--further", action="store_true", help="begin with the drafts that are in DIR")
    parser.add_argument("--measure", action="store_true", help="do not train: measure the drafts that are in DIR")
    for name, usual in (("texts", 1024), ("length", 192), ("start", 2040), ("mask", 2047), ("steps", 1000), ("batch", 8), ("layers", 3), ("heads", 8), ("kv-heads", 4),
                        ("head-dim", 32), ("intermediate", 512), ("taps", 3), ("draft-vocab", 1024), ("prompt", 64), ("reply", 128), ("threads", 1), ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=usual)
    parser.add_argument("--rate", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    os.makedirs(args.out, exist_ok=True)
    target = Target(args.model)
    check_golden(target, args.model)
    text = training_text(target, args, os.path.join(args.out, "text.json"))
    read = None if args.measure else read_by(target, text)
    tests = continuations(target, args) if args.held_out else {}
    size = {k: getattr(args, k) for k in ("layers", "heads", "kv_heads", "head_dim", "intermediate", "taps")}
    common = torch.bincount(text.flatten(), minlength=target.c["vocab_size"]).argsort(descending=True)[:args.draft_vocab].sort().values
    for kind in args.kind or ("eagle3", "dflash"):
        draft = Eagle(target, {**size, "layers": 1}, common) if kind == "eagle3" else Flash(target, size, args.mask)
        folder = os.path.join(args.out, kind)
        if args.measure or args.further:
            draft.load(folder)
        if not args.measure:
            train(draft, text, read, args)
            draft.save(folder)
        for temperature, ids in tests.items():
            taps, logits = target.forward(ids)
            own = torch.stack([logits.argmax(-1).roll(-1 - k, 1) for k in range(draft.most)], -1)  # as a draft that knew all tokens before
            drafted, limit = (tokens_a_step(x, draft.most, ids, args.prompt) for x in (draft.proposals(ids, taps), own))
            print(f"{kind}, temperature {temperature}: {drafted:.3f} tokens a step; the model's own best tokens: {limit:.3f}", flush=True)


if __name__ == "__main__":
    main()
