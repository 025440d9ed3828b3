#!/usr/bin/env python3
"""Two ways to lower the divergence of 4-bit weights, tried on the small checkpoints (figures: quant/RESULTS.md). The first is not in the converter;
the second is, in C and with its own gradients, for minimax-eval --collect --moments --fisher: this is an independent reference for it.

  quality_attempts.py BIN WORK equalise|couple [--models tiny-m1,tiny-m2] [--limit 40] [--threads N] [--only NAME,…]

BIN is the folder of the programs, WORK a folder for files. Needs numpy, ml_dtypes and safetensors; couple also jax and a C compiler. Each row is the
Kullback-Leibler divergence from the unquantised checkpoint on the first --limit held-out windows of 512 ids, its difference from --method gptq, and the
rise of the negative log-likelihood, with standard errors over pairs of windows. All calibrate on the 65 windows behind the first 40.

equalise: each column of w2 and o_proj, and of what follows a norm, is multiplied by a factor, by which the rows of w3 and v_proj or the norm's weights are
divided: the same function, other weights to round. Factor j is h_j^(a/2) / w_j^(b/2), h_j being the mean square of the input, w_j of the column.

couple: --method gptq minimises tr(E H Et), with E the error of a matrix and H the second moments of its inputs, for each row by itself. Here it is
tr(G E H Et), with G the second moments of the gradients of the log-likelihood of ids that the model draws, with respect to the outputs: q, k and v
together, w1 and w3 together. With G = (I + V) C (I + V)t and H = (I + U) D (I + U)t that is the sum of C_i D_j ((I + V)t E (I + U))_ij², so each
weight is rounded after the errors of the rows and columns before it (arXiv 2505.22988). Each code then becomes the best one under all others, six times.
The scales are those of --method gptq."""
import argparse
import ctypes
import json
import os
import shutil
import subprocess
import tempfile

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

WINDOW, SCORED, PRIOR, SCHEME = 512, 40, 64, "w4a16"

ROUND = """
#include <math.h>
#include <stdlib.h>
#include <string.h>
static float nearest(float x, float s) { return s * fminf(fmaxf(rintf(x / s), -8), 7); }
/* v[r][i] of r < i, u[c][j] of c < j; everything in the order of rounding. */
void couple(int n, int k, const float *w, const float *s, const float *v, const float *u, const float *g, const float *h, float *q, int rounds) {
  size_t all = (size_t)n * k;
  float *e = calloc(all, 4), *eh = calloc(all, 4), *r = malloc(4 * k), *x = malloc(4 * k);
  for (int i = 0; i < n; i++) {
    const size_t at = (size_t)i * k;
    memset(r, 0, 4 * k);
    for (int l = 0; l < i; l++)
      if (v[(size_t)l * n + i] != 0) for (int j = 0; j < k; j++) r[j] += v[(size_t)l * n + i] * e[(size_t)l * k + j];
    for (int j = 0; j < k; j++) x[j] = w[at + j] + r[j];
    for (int j = 0; j < k; j++) {
      q[at + j] = nearest(x[j], s[at + j]);
      e[at + j] = w[at + j] - q[at + j];
      for (int c = j + 1; c < k; c++) x[c] += (e[at + j] + r[j]) * u[(size_t)j * k + c];
    }
    for (int c = 0; c < k; c++) for (int j = 0; j < k; j++) eh[at + j] += e[at + c] * h[(size_t)c * k + j];
  }
  for (int turn = 0; turn < rounds; turn++)
    for (int i = 0; i < n; i++) {
      const size_t at = (size_t)i * k;
      const float own = g[(size_t)i * n + i];
      memset(r, 0, 4 * k);
      for (int l = 0; l < n; l++)
        if (g[(size_t)i * n + l] != 0) for (int j = 0; j < k; j++) r[j] += g[(size_t)i * n + l] * eh[(size_t)l * k + j];
      for (int j = 0; j < k; j++) {
        const float best = nearest(q[at + j] + r[j] / (own * h[(size_t)j * k + j]), s[at + j]), d = q[at + j] - best;
        if (d == 0) continue;
        q[at + j] = best;
        for (int c = 0; c < k; c++) eh[at + c] += d * h[(size_t)j * k + c], r[c] += own * d * h[(size_t)j * k + c];
      }
    }
  free(e), free(eh), free(r), free(x);
}
"""


class Model:
    """A small checkpoint, its F32 copy, its second moments and its log-probabilities."""

    def __init__(self, args, name):
        self.args, self.name, self.source = args, name, f"tests/data/{name}"
        self.threads = ["-t", args.threads] if args.threads else []
        self.f32, self.moments, plain = (os.path.join(args.work, f"{name}.{end}") for end in ("f32", "moments", "plain"))
        with open(f"{self.source}/held-out-ids.json", encoding="utf-8") as f:
            self.ids = np.array(json.load(f), "i4")
        with open(f"{self.source}/config.json", encoding="utf-8") as f:
            self.config = json.load(f)
        self.run("minimax-convert", self.source, "-o", self.f32, "--layout", "hf", "--quant", "f32", "--force")
        self.run("minimax-convert", self.source, "-o", plain, "--force")
        if not os.path.exists(self.moments):
            rest = self.moments + ".json"
            with open(rest, "w", encoding="utf-8") as f:
                json.dump(self.ids[SCORED * WINDOW + 1:].tolist(), f)
            self.run("minimax-eval", plain, "--ids", rest, "--act-quant", "off", "--collect", self.moments, "--moments", "512", *self.threads)
        self.plain = list(self.log_p(plain))
        self.weights = load_file(f"{self.f32}/model-00001-of-00001.safetensors")

    def run(self, program, *words):
        subprocess.run([f"{self.args.bin}/{program}", *words, "--quiet"], check=True, stdout=subprocess.DEVNULL)

    def window(self, i):
        return self.ids[i * WINDOW:(i + 1) * WINDOW]

    def log_p(self, packed):
        """log p of every next id, window by window."""
        with tempfile.TemporaryDirectory() as folder:
            for i in range(self.args.limit):
                save_file({"ids.0": self.window(i).copy()}, folder + "/ids")
                self.run("minimax-eval", packed, "--logits", folder + "/logits", "--ids-from", folder + "/ids", "--act-quant", "off", *self.threads)
                x = load_file(folder + "/logits")["logits.0"]
                x = x - x.max(1, keepdims=True)
                yield x - np.log(np.exp(x).sum(1, keepdims=True))

    def packed(self, source, moments):
        out = os.path.join(self.args.work, self.name + ".packed")
        self.run("minimax-convert", source, "-o", out, "--quant", SCHEME, "--method", "gptq", "--importance", moments, "--force")
        return out

    def score(self, packed):
        """KL and the rise of NLL of each pair of windows."""
        kl, nll = [], []
        for i, q in enumerate(self.log_p(packed)):
            p, following = self.plain[i], self.ids[i * WINDOW + 1:(i + 1) * WINDOW + 1]
            kl.append((np.exp(p) * (p - q)).sum(1).mean(dtype="f8"))
            nll.append((p - q)[np.arange(WINDOW), following].mean(dtype="f8"))
        return np.reshape(kl, (-1, 2)).mean(1), np.reshape(nll, (-1, 2)).mean(1)

    def score_weights(self, changed):
        """The same of the F32 copy with other weights."""
        out = os.path.join(self.args.work, self.name + ".changed")
        self.save(out, {**self.weights, **changed})
        self.run("minimax-convert", out, "-o", out + ".packed", "--force")
        return self.score(out + ".packed")

    def save(self, out, weights):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.f32, out, ignore=shutil.ignore_patterns("minimax-digests.json"))
        save_file(weights, out + "/model-00001-of-00001.safetensors")

    def show(self, what, found, base):
        def text(x, digits):
            return f"{x.mean():+.{digits}f} ± {x.std(ddof=1) / len(x) ** 0.5:.{digits}f}"
        kl, nll = found
        print(f"| {self.name} | `{SCHEME}` | {what} | {kl.mean():.5f} | {text(kl - base[0], 5)} | {100 * (kl.mean() / base[0].mean() - 1):+.1f} % "
              f"| {text(nll, 4)} |", flush=True)


# ---- equalise ----

def equalised(m, which, a, b):
    """The scaled copy and its moments."""
    w = {k: v.astype("f4") if "norm" in k or "gate.weight" in k else v.copy() for k, v in m.weights.items()}
    t = {k: v.copy() for k, v in load_file(m.moments).items()}
    c, square = m.config, lambda *names: np.concatenate([w[n] ** 2 for n in names]).mean(0, dtype="f8")

    def inputs(key, e=0):
        return t[key + ".mean_square"].reshape(len(t[key + ".moments"]), -1)[e].astype("f8")

    def factors(h, x):
        h, x = np.maximum(h, 1e-4 * h.mean()), np.maximum(x, 1e-4 * x.mean())
        log = (a * np.log(h) - b * np.log(x)) / 2
        return np.exp(np.clip(log - log.mean(), -np.log(4), np.log(4))).astype("f4")

    def apply(key, columns, s, rows=(), experts=None, shared=None):
        """Columns times s; rows, or a norm's weights, divided by it."""
        of_rows = s if shared is None else shared
        for n in columns:
            w[n] = w[n] * s
        for n in rows:
            w[n] = w[n] / (of_rows if w[n].ndim == 1 else of_rows[:, None])
        i, j = np.tril_indices(len(s))
        for e in range(len(t[key + ".moments"])) if experts is None else [experts]:
            t[key + ".moments"][e].reshape(-1)[:] /= s[i] * s[j]
            t[key + ".mean_square"].reshape(len(t[key + ".moments"]), -1)[e] /= s * s

    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        attn, moe = at + "self_attn.", at + "block_sparse_moe."
        experts = [f"{moe}experts.{e}." for e in range(c["num_local_experts"])]
        if "w2" in which:
            for e, one in enumerate(experts):
                s = factors(inputs(moe + "experts.w2_weight", e), square(one + "w2.weight"))
                apply(moe + "experts.w2_weight", [one + "w2.weight"], s, [one + "w3.weight"], e)
        if "o" in which and attn + "v_proj.weight" in w:
            heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
            mean = lambda x: x.reshape(kv, heads // kv, dim).mean(1).reshape(-1)
            s = factors(mean(inputs(attn + "o_proj.weight")), mean(square(attn + "o_proj.weight")))
            apply(attn + "o_proj.weight", [attn + "o_proj.weight"], np.repeat(s.reshape(kv, 1, dim), heads // kv, 1).reshape(-1),
                  [attn + "v_proj.weight"], None, s)
        if "norm" in which and attn + "out_proj.weight" in w:
            s = factors(inputs(attn + "out_proj.weight"), square(attn + "out_proj.weight"))
            apply(attn + "out_proj.weight", [attn + "out_proj.weight"], s, [attn + "norm.weight"])
        if "norm" in which and not c.get("postnorm"): # tiny-m1 adds the normed inputs, too, so that nothing may change them
            names = [f"{attn}{x}_proj.weight" for x in "qkv"]
            apply(attn + "qkv_proj.weight", names, factors(inputs(attn + "qkv_proj.weight"), square(*names)), [at + "input_layernorm.weight"])
            key, names = moe + "experts.w13_weight", [one + x for one in experts for x in ("w1.weight", "w3.weight")]
            h = np.average([inputs(key, e) for e in range(len(experts))], 0, t[key + ".rows"])
            apply(key, [*names, moe + "gate.weight"], factors(h, square(*names)), [at + "post_attention_layernorm.weight"])
    out = os.path.join(m.args.work, m.name + ".equalised")
    m.save(out, {k: np.ascontiguousarray(v) for k, v in w.items()})
    save_file(t, out + ".moments")
    return out, out + ".moments"


def equalise(m, base):
    for which in ("w2", "o", "norm", "w2 o norm"):
        for a, b in ((.25, 0), (.25, .25), (0, .5)):
            if not m.args.only or which in m.args.only:
                m.show(f"{which}: a {a}, b {b}", m.score(m.packed(*equalised(m, which.split(), a, b))), base)


# ---- couple ----

def forward(jax, w, c, ids, probe=None):
    """Logits, and the inputs of every linear. probe: added to their outputs."""
    jnp, inputs, T = jax.numpy, {}, len(ids)
    H, K, d, eps, m1 = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"], bool(c.get("postnorm"))

    def linear(name, x):
        inputs[name] = x
        return x @ w[name].T + (0 if probe is None else probe[name])

    def norm(x, name):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * w[name]

    def rotated(x):
        n = c["rotary_dim"]
        angle = np.arange(T)[:, None] / c["rope_theta"] ** (np.arange(0, n, 2) / n)
        cos, sin, a, b = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None], x[..., :n // 2], x[..., n // 2:n]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., n:]], -1)

    def softmax_attention(at, x):
        q, k, v = (linear(f"{at}{n}_proj.weight", x) for n in "qkv")
        if not m1:
            q, k = norm(q, at + "q_norm.weight"), norm(k, at + "k_norm.weight")
        q, k = rotated(q.reshape(T, H, d)), jnp.repeat(rotated(k.reshape(T, K, d)), H // K, 1)
        p = jax.nn.softmax(jnp.where(np.tri(T, dtype=bool), jnp.einsum("ihd,jhd->hij", q, k) / d ** 0.5, -1e30), -1)
        return linear(at + "o_proj.weight", jnp.einsum("hij,jhd->ihd", p, jnp.repeat(v.reshape(T, K, d), H // K, 1)).reshape(T, H * d))

    def lightning(at, x, layer):
        q, k, v = jnp.split(jax.nn.silu(linear(at + "qkv_proj.weight", x)).reshape(T, H, 3 * d), 3, -1)
        slope = 2.0 ** (-8 / H * np.arange(1, H + 1)) * (1 - layer / (c["num_hidden_layers"] - 1) + 1e-5)
        decay = np.tri(T) * np.exp(-slope[:, None, None] * np.maximum(np.arange(T)[:, None] - np.arange(T), 0))
        o = jnp.einsum("hij,jhd->ihd", jnp.einsum("ihd,jhd->hij", q, k) * decay.astype("f4"), v).reshape(T, H * d)
        return linear(at + "out_proj.weight", jax.nn.sigmoid(linear(at + "output_gate.weight", x)) * norm(o, at + "norm.weight"))

    def experts(at, x):
        gate = x @ w[at + "gate.weight"].T
        score = jax.nn.softmax(gate, -1) if m1 else jax.nn.sigmoid(gate)
        rank = score if m1 else score + w[at + "e_score_correction_bias"]
        taken = rank >= jax.lax.top_k(rank, c["num_experts_per_tok"])[0][:, -1:]
        share, y = jnp.where(taken, score, 0) / jnp.where(taken, score, 0).sum(-1, keepdims=True), 0
        for e in range(c["num_local_experts"]):
            one = f"{at}experts.{e}."
            y += share[:, e:e + 1] * linear(one + "w2.weight", jax.nn.silu(linear(one + "w1.weight", x)) * linear(one + "w3.weight", x))
        inputs[at] = taken
        return y

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(c["num_hidden_layers"]):
        at, full = f"model.layers.{layer}.", c["attn_type_list"][layer] == 1
        for norm_name, part, kind in (("input_layernorm", "self_attn.", "full_attention" if full else "linear_attention"),
                                      ("post_attention_layernorm", "block_sparse_moe.", "mlp")):
            h = norm(x, f"{at}{norm_name}.weight")
            y = experts(at + part, h) if kind == "mlp" else softmax_attention(at + part, h) if full else lightning(at + part, h, layer)
            x = h * c[f"layernorm_{kind}_alpha"] + y * c[f"layernorm_{kind}_beta"] if m1 else x + y
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T, inputs


def groups_of(weights):
    """{name: linears with the same inputs}, those of a layer that are quantised."""
    groups = {}
    for n in sorted(weights):
        if n.endswith(("_proj.weight", "output_gate.weight", "w1.weight", "w2.weight", "w3.weight")):
            key = n.replace("w3.weight", "w1.weight").replace(".k_proj", ".q_proj").replace(".v_proj", ".q_proj")
            groups.setdefault(key, []).append(n)
    return groups


def gather(m, groups):
    """{name: [sum of x xt, sum of g gt, tokens]} of every group over the calibration windows."""
    import jax
    jnp, kept = jax.numpy, os.path.join(m.args.work, m.name + ".gradients.npz")
    if os.path.exists(kept):
        found = np.load(kept)
        return {k: [found[f"{k} {i}"] for i in range(3)] for k in groups}
    w, total = {k: jnp.asarray(v, "float32") for k, v in m.weights.items()}, None
    error = max(float(np.abs(np.asarray(jax.nn.log_softmax(forward(jax, w, m.config, m.window(i))[0])) - m.plain[i]).max()) for i in range(2))
    assert error < 1e-3, error  # it is the same model

    def sums(w, ids, key):
        drawn = jax.random.categorical(key, forward(jax, w, m.config, ids)[0])

        def likelihood(probe):
            logits, inputs = forward(jax, w, m.config, ids, probe)
            return jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], 1).sum(), inputs
        g, x = jax.grad(likelihood, has_aux=True)({n: jnp.zeros((len(ids), len(w[n]))) for names in groups.values() for n in names})
        out = {}
        for name, names in groups.items():
            inputs, outputs, tokens = x[names[0]], jnp.concatenate([g[n] for n in names], 1), len(ids)
            if ".experts." in name:
                at, e = name.split("experts.")
                taken = x[at][:, int(e.split(".")[0])]
                inputs, tokens = inputs * taken[:, None], taken.sum()
            out[name] = [inputs.T @ inputs, outputs.T @ outputs, tokens]
        return out
    sums, first = jax.jit(sums), SCORED * WINDOW + 1
    for i, at in enumerate(range(first, len(m.ids) - WINDOW + 1, WINDOW)):
        one = sums(w, m.ids[at:at + WINDOW], jax.random.key(i))
        total = one if total is None else jax.tree.map(lambda a, b: a + b, total, one)
    found = {k: [np.asarray(x, "f8") for x in v] for k, v in total.items()}
    np.savez(kept, **{f"{k} {i}": x for k, v in found.items() for i, x in enumerate(v)})
    return found


def mean_of(found, name, which):
    """A group's moments for a token, mixed with those of its layer's experts; where these have columns of their own, with their mean."""
    own, tokens = found[name][which], float(found[name][2])
    if ".experts." not in name:
        return own / tokens
    at, rest = name.split("experts.")
    others = [v for k, v in found.items() if k.startswith(at + "experts.") and k.split(".", 6)[-1] == name.split(".", 6)[-1]]
    layer = sum(x[which] for x in others) / sum(float(x[2]) for x in others)
    if ("w2" in rest) == (which == 0):
        layer = np.eye(len(layer)) * np.trace(layer) / len(layer)
    return (own + PRIOR * layer) / (tokens + PRIOR)


def scales_of(packed):
    """{name: scale of every weight} of a packed checkpoint of one rank."""
    with open(packed + "/manifest.json", encoding="utf-8") as f:
        tensors = json.load(f)["tensors"]
    stored, out = {}, {}
    for n in os.listdir(packed):
        stored.update(load_file(f"{packed}/{n}") if n.endswith(".safetensors") else {})
    for t in tensors:
        if t["scheme"] != SCHEME:
            continue
        lead, plane = max(t["lead"], 1), t["planes"][1]
        of = stored[t["name"] + plane["suffix"]].astype("f4").reshape(lead, t["rows"], -1)
        of = np.repeat(of, plane["cell"][1], 2)[..., :t["whole_cols"]]
        for e in range(lead):
            for p in t["pieces"]:
                out[p["source"].replace("{e}", str(e))] = of[e, p["at"]:p["at"] + p["local_rows"]]
    return out


def factor(a):
    """U of a = (I + U) D (I + U)t, strictly upper."""
    f = np.linalg.cholesky(a[::-1, ::-1])[::-1, ::-1]
    return f / np.diag(f) - np.eye(len(a))


def coupled(m, library, groups, found, scales, mean, block):
    """Weights rounded under (1 - mean) G + mean I, of G the blocks of so many rows."""
    out = {}
    for name, names in groups.items():
        w, s = (np.concatenate([of[n] for n in names]) for of in (m.weights, scales))
        n, k = w.shape
        h, g = mean_of(found, name, 0), mean_of(found, name, 1)
        h, g = h * k / np.trace(h) + 0.01 * np.eye(k), g * n / np.trace(g)
        i = np.arange(n) // (block or n)
        g = (1 - mean) * np.where(i[:, None] == i, g, 0) + mean * np.eye(n)
        rows, cols = (np.argsort(-np.diag(x), kind="stable") for x in (g, h))
        g, h = g[np.ix_(rows, rows)], h[np.ix_(cols, cols)]
        given = [np.ascontiguousarray(x, "f4") for x in (w[np.ix_(rows, cols)], s[np.ix_(rows, cols)], factor(g), factor(h), g, h)]
        q = np.empty((n, k), "f4")
        library.couple(n, k, *[ctypes.c_void_p(x.ctypes.data) for x in (*given, q)], 6)
        whole = np.empty_like(q)
        whole[np.ix_(rows, cols)] = q
        for one in names:
            out[one], whole = whole[:len(m.weights[one])], whole[len(m.weights[one]):]
    return {k: np.ascontiguousarray(v) for k, v in out.items()}


def couple(m, base):
    library = os.path.join(m.args.work, "couple.so")
    subprocess.run(["cc", "-O3", "-march=native", "-ffast-math", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-lm"], input=ROUND.encode(), check=True)
    groups, library = groups_of(m.weights), ctypes.CDLL(library)
    scales, found = scales_of(m.packed(m.f32, m.moments)), gather(m, groups)
    for what, mean, block in (("rows by themselves", 1, 0), ("coupled", .4, 0), ("coupled in blocks of 128 rows", .4, 128), ("coupled in blocks of 16 rows", .4, 16)):
        if not m.args.only or what in m.args.only:
            m.show(what, m.score_weights(coupled(m, library, groups, found, scales, mean, block)), base)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("bin")
    p.add_argument("work")
    p.add_argument("attempt", choices=("equalise", "couple"))
    p.add_argument("--models", default="tiny-m1,tiny-m2")
    p.add_argument("--limit", type=int, default=SCORED)
    p.add_argument("--threads", help="of minimax-eval")
    p.add_argument("--only", type=lambda x: x.split(","))
    args = p.parse_args()
    os.makedirs(args.work, exist_ok=True)
    print("| model | scheme | | KL | less gptq | | NLL less the checkpoint's |\n|---|---|---|---|---|---|---|")
    for name in args.models.split(","):
        m = Model(args, name)
        base = m.score(m.packed(m.f32, m.moments))
        m.show("`--method gptq`", base, base)
        (equalise if args.attempt == "equalise" else couple)(m, base)


assert ml_dtypes.bfloat16  # makes safetensors read BF16
main()
