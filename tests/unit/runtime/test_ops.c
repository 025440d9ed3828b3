/* Every op of the reference backend against the double-precision reference, on one and on several ranks. */
#include <math.h>

#include "tests/unit/runtime/cpu_ranks.h"

#define ROWS 300 /* of a step; more than one block of lightning attention */

static void open_ranks(ranks *r, mm_model m, uint32_t tp, unsigned threads) {
  const mm_backend_config c = {.limits = {.max_tokens = ROWS, .slots = 3, .max_positions = 2 * ROWS}, .options.threads = threads};
  open_backends(r, m, tp, c, 256, false);
}

static mm_act view(mm_act a, uint32_t width) { return (mm_act){a.data, width}; }
static float *row(mm_act a, uint32_t width, uint32_t t) { return (float *)a.data + (size_t)t * width; }

static void close_at(double found, double expected, double scale, const char *what, uint32_t t, uint32_t i) {
  if (!(fabs(found - expected) <= 2e-5 * fmax(1, scale)))
    fail_msg("%s: row %u, %u: found %.8g, expected %.8g", what, t, i, found, expected);
}

static void close_to(double found, double expected, const char *what, uint32_t t, uint32_t i) {
  close_at(found, expected, fabs(expected), what, t, i);
}

static void fill(float *x, size_t n, float scale) {
  for (size_t i = 0; i < n; i++) x[i] = scale * ref_random();
}

/* One span of n rows in slot 0, all outputs unwanted. */
static mm_batch plain(mm_span *span, const int32_t *id, uint32_t n) {
  *span = (mm_span){0, 0, n, 0};
  return (mm_batch){n, id, 1, span, 0, NULL, NULL, NULL};
}

static const int32_t ids[ROWS] = {0, 49, 7, 13, 14, 12, 26, 27, 28, 48, 1, 41, 42, 6};

/* ---- dense ---- */

static const mm_packed *packed;
static void call_linear(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  mm_ops_cpu.linear(r->b[i], view(r->y[i], packed->n), view(r->x[i], packed->k), packed);
}

/* Against the numbers that unpack gives, one row at a time: 37 and 45 end inside every strip and vector. */
TEST(linear) {
  enum { N = 37, K = 45 };
  ranks r;
  open_ranks(&r, ref_dims(MM_FAMILY_M2, false), 1, 3);
  uint16_t bf16[N * K];
  uint8_t fp8[N * K];
  float scale[10 * 5], f32[N * K], w[K];
  for (int i = 0; i < N * K; i++) {
    f32[i] = ref_random();
    bf16[i] = (uint16_t)(0x3e00 + i % 500 + (i % 3 == 0 ? 0x8000 : 0));
    fp8[i] = (uint8_t)(i * 37 % 127 + (i % 5 == 0 ? 128 : 0));
  }
  fill(scale, 50, 0.02f);
  const mm_packed all[] = {
      {.scheme = mm_scheme_find("f32"), .lead = 1, .n = N, .k = K, .plane = {f32}, .cell = {{1, 1}}},
      {.scheme = mm_scheme_find("bf16"), .lead = 1, .n = N, .k = K, .plane = {bf16}, .cell = {{1, 1}}},
      {.scheme = mm_scheme_find("block_fp8"), .lead = 1, .n = N, .k = K, .plane = {fp8, scale}, .cell = {{1, 1}, {4, 9}}},
  };
  for (int s = 0; s < 3; s++)
    for (uint32_t T = 0; T <= 5; T += 5) {
      mm_span span;
      mm_batch batch = plain(&span, ids, T);
      packed = &all[s];
      fill(r.x[0].data, T * K, 1);
      step(&r, &batch, call_linear, NULL, NULL);
      for (uint32_t n = 0; n < N; n++) {
        mm_unpack(packed, 0, n, 1, w);
        for (uint32_t t = 0; t < T; t++) {
          double expected = 0;
          for (uint32_t k = 0; k < K; k++) expected += (double)w[k] * row(r.x[0], K, t)[k];
          close_to(row(r.y[0], N, t)[n], expected, packed->scheme->name, t, n);
        }
      }
    }
  close_ranks(&r);
}

/* The same bits whatever the number of threads: large enough to be shared out. */
TEST(threads_change_nothing) {
  enum { N = 200, K = 48, T = ROWS };
  float *w = ref_fill((size_t)N * K, 1, 0), *x = ref_fill((size_t)T * K, 1, 0), *first = malloc(sizeof(float) * N * T);
  mm_packed p = {.scheme = mm_scheme_find("f32"), .lead = 1, .n = N, .k = K, .plane = {w}, .cell = {{1, 1}}};
  packed = &p;
  for (unsigned threads = 1; threads <= 4; threads++) {
    ranks r;
    open_ranks(&r, ref_dims(MM_FAMILY_M2, false), 1, threads);
    mm_span span;
    mm_batch batch = plain(&span, ids, T);
    memcpy(r.x[0].data, x, sizeof(float) * T * K);
    step(&r, &batch, call_linear, NULL, NULL);
    if (threads == 1) memcpy(first, r.y[0].data, sizeof(float) * N * T);
    assert_memory_equal(first, r.y[0].data, sizeof(float) * N * T);
    close_ranks(&r);
  }
  free(w), free(x), free(first);
}

static void call_embed(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  mm_ops_cpu.embed(r->b[i], view(r->x[i], r->ref.m.hidden), &r->w[i].embed);
}

TEST(embed) {
  for (uint32_t tp = 1; tp <= 8; tp *= 2) {
    ranks r;
    open_ranks(&r, ref_dims(MM_FAMILY_M2, false), tp, 1);
    mm_span span;
    mm_batch batch = plain(&span, ids, 14);
    step(&r, &batch, call_embed, NULL, NULL);
    size_t H = r.ref.m.hidden;
    for (uint32_t i = 0; i < tp; i++)
      for (uint32_t t = 0; t < 14; t++)
        assert_memory_equal(row(r.x[i], (uint32_t)H, t), r.ref.embed + (size_t)ids[t] * H, H * sizeof(float));
    close_ranks(&r);
  }
}

static void call_norm(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  uint32_t H = r->ref.m.hidden;
  mm_ops_cpu.norm(r->b[i], view(r->y[i], H), view(r->x[i], H), &r->w[i].final_norm, 0.01);
}

TEST(norm) {
  ranks r;
  open_ranks(&r, ref_dims(MM_FAMILY_M2, false), 1, 1);
  uint32_t H = r.ref.m.hidden;
  fill(r.x[0].data, 9 * H, 0.3f);
  mm_span span;
  mm_batch batch = plain(&span, ids, 9);
  step(&r, &batch, call_norm, NULL, NULL);
  for (uint32_t t = 0; t < 9; t++) {
    double x[64] = {0}, y[64] = {0};
    for (uint32_t i = 0; i < H; i++) x[i] = row(r.x[0], H, t)[i];
    ref_rms(y, x, r.ref.norm, H, 0.01);
    for (uint32_t i = 0; i < H; i++) close_to(row(r.y[0], H, t)[i], y[i], "norm", t, i);
  }
  close_ranks(&r);
}

/* Post-norm: the residual is where n goes. Pre-norm: the residual is where h goes. */
static void call_combine(ranks *r, uint32_t i, void *ctx) {
  uint32_t H = r->ref.m.hidden;
  mm_act h = view(r->x[i], H), n = view(r->y[i], H);
  mm_ops_cpu.combine(r->b[i], h, n, *(bool *)ctx ? n : h, view(r->z[i], H), (mm_deepnorm){1.8, 0.7}, &r->w[i].layer[1].post_norm, 1e-4);
}

TEST(combine) {
  for (uint32_t tp = 1; tp <= 4; tp *= 4)
    for (int post = 0; post < 2; post++) {
      ranks r;
      open_ranks(&r, ref_dims(MM_FAMILY_M1, true), tp, 1);
      bool postnorm = post;
      uint32_t H = r.ref.m.hidden, T = 7;
      double h[7][64], n[7][64];
      fill(r.x[0].data, T * H, 1);
      fill(r.y[0].data, T * H, 1);
      for (uint32_t i = 0; i < tp; i++) {
        fill(r.z[i].data, T * H, 1);
        memcpy(r.x[i].data, r.x[0].data, T * H * sizeof(float));
        memcpy(r.y[i].data, r.y[0].data, T * H * sizeof(float));
      }
      for (uint32_t t = 0; t < T; t++) {
        for (uint32_t k = 0; k < H; k++) {
          double branch = 0;
          for (uint32_t i = 0; i < tp; i++) branch += row(r.z[i], H, t)[k];
          h[t][k] = 1.8 * row(post ? r.y[0] : r.x[0], H, t)[k] + 0.7 * branch;
        }
        ref_rms(n[t], h[t], r.ref.layer[1].post_norm, H, 1e-4);
      }
      mm_span span;
      mm_batch batch = plain(&span, ids, T);
      step(&r, &batch, call_combine, &postnorm, NULL);
      for (uint32_t t = 0; t < T; t++)
        for (uint32_t k = 0; k < H; k++) {
          close_to(row(r.x[0], H, t)[k], h[t][k], "h", t, k);
          close_to(row(r.y[0], H, t)[k], n[t][k], "n", t, k);
        }
      for (uint32_t i = 1; i < tp; i++) {
        assert_memory_equal(r.x[0].data, r.x[i].data, T * H * sizeof(float));
        assert_memory_equal(r.y[0].data, r.y[i].data, T * H * sizeof(float));
      }
      close_ranks(&r);
    }
}

static void call_gated_norm(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  uint32_t q = r->ref.m.heads / r->tp * r->ref.m.head_dim;
  mm_ops_cpu.gated_norm(r->b[i], view(r->x[i], q), view(r->x[i], q), view(r->y[i], q), &r->w[i].layer[0].attn_norm, 1e-3);
}

TEST(gated_norm) {
  for (uint32_t tp = 1; tp <= 4; tp *= 2) {
    ranks r;
    open_ranks(&r, ref_dims(MM_FAMILY_M1, true), tp, 1);
    uint32_t q = r.ref.m.heads * r.ref.m.head_dim, qr = q / tp, T = 5;
    double o[5][128], g[5][128];
    for (uint32_t t = 0; t < T; t++)
      for (uint32_t i = 0; i < q; i++) {
        o[t][i] = row(r.x[i / qr], qr, t)[i % qr] = ref_random();
        g[t][i] = row(r.y[i / qr], qr, t)[i % qr] = 4 * ref_random();
      }
    mm_span span;
    mm_batch batch = plain(&span, ids, T);
    step(&r, &batch, call_gated_norm, NULL, NULL);
    for (uint32_t t = 0; t < T; t++) {
      ref_rms(o[t], o[t], r.ref.layer[0].attn_norm, q, 1e-3);
      for (uint32_t i = 0; i < q; i++) close_to(row(r.x[i / qr], qr, t)[i % qr], ref_sigmoid(g[t][i]) * o[t][i], "gated norm", t, i);
    }
    close_ranks(&r);
  }
}

static void call_logits(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  mm_ops_cpu.logits(r->b[i], view(r->x[i], r->ref.m.hidden), &r->w[i].head);
}

TEST(logits) {
  static const uint32_t out[] = {1, 2, 6};
  for (uint32_t tp = 1; tp <= 2; tp++) {
    ranks r;
    open_ranks(&r, ref_dims(MM_FAMILY_M2, false), tp, 1);
    uint32_t H = r.ref.m.hidden, rows = r.w[0].vocab_rows;
    fill(r.x[0].data, 7 * H, 1);
    memcpy(r.x[tp - 1].data, r.x[0].data, 7 * H * sizeof(float));
    mm_span span;
    mm_batch batch = plain(&span, ids, 7);
    batch.out_count = 3;
    batch.out = out;
    float *got[2] = {malloc(3 * rows * sizeof(float)), malloc(3 * rows * sizeof(float))};
    step(&r, &batch, call_logits, NULL, got);
    for (uint32_t j = 0; j < 3; j++) {
      double x[64] = {0}, expected[64] = {0};
      for (uint32_t i = 0; i < H; i++) x[i] = row(r.x[0], H, out[j])[i];
      ref_matvec(expected, x, r.ref.head, r.ref.m.vocab, H);
      for (uint32_t v = 0; v < r.ref.m.vocab; v++) close_to(got[v / rows][j * rows + v % rows], expected[v], "logits", j, v);
    }
    free(got[0]), free(got[1]);
    close_ranks(&r);
  }
}

/* ---- attention ---- */

/* Rows of two sequences and of padding, fed over several steps. */
typedef struct feed {
  mm_span span[4];
  uint32_t spans, rows;
} feed;

static const feed feeds[] = {
    {{{1, 0, 290, 0}, {-1, 290, 3, 0}}, 2, 293},                 /* a long prompt, over one block */
    {{{0, 0, 5, 0}, {-1, 5, 1, 9}, {1, 6, 1, 290}}, 3, 7},       /* another next to its decode */
    {{{1, 0, 2, 291}, {0, 2, 261, 5}, {-1, 263, 2, 7}}, 3, 265}, /* both go on */
    {{{1, 0, 3, 0}, {0, 3, 1, 266}}, 2, 4},                      /* slot 1 starts again */
};

typedef struct sequence {
  double *S, *k, *v;
} sequence;

static void call_gqa(ranks *r, uint32_t i, void *ctx) {
  uint32_t layer = *(uint32_t *)ctx, q = r->ref.m.heads / r->tp * r->ref.m.head_dim;
  const mm_layer_weights *w = &r->w[i].layer[layer];
  bool norms = r->ref.m.qk_norm;
  mm_ops_cpu.gqa(r->b[i], layer, view(r->y[i], q), view(r->x[i], w->qkv.n), norms ? &w->q_norm : NULL, norms ? &w->k_norm : NULL);
}

static void call_lightning(ranks *r, uint32_t i, void *ctx) {
  uint32_t layer = *(uint32_t *)ctx, q = r->ref.m.heads / r->tp * r->ref.m.head_dim;
  mm_ops_cpu.lightning(r->b[i], layer, view(r->y[i], q), view(r->x[i], r->w[i].layer[layer].qkv.n));
}

/* Gives every rank its part of one row of the projection, q|k|v over all heads, in the layout of the layer's kind. */
static void hand_out(ranks *r, bool lightning, uint32_t t, const double *all) {
  const mm_model *m = &r->ref.m;
  uint32_t d = m->head_dim, q = m->heads * d, kv = m->kv_heads * d, qr = q / r->tp;
  uint32_t kr = m->kv_heads >= r->tp ? kv / r->tp : d, width = lightning ? 3 * qr : qr + 2 * kr;
  for (uint32_t i = 0; i < r->tp; i++) {
    float *x = row(r->x[i], width, t);
    uint32_t k0 = m->kv_heads >= r->tp ? i * kr : i / (r->tp / m->kv_heads) * d;
    for (uint32_t j = 0; j < width; j++)
      x[j] = (float)(lightning     ? all[i * width + j]
                     : j < qr      ? all[i * qr + j]
                     : j < qr + kr ? all[q + k0 + j - qr]
                                   : all[q + kv + k0 + j - qr - kr]);
  }
}

static void attention(mm_family family, uint32_t layer, uint32_t tp, unsigned threads) {
  ranks r;
  open_ranks(&r, ref_dims(family, true), tp, threads);
  const mm_model *m = &r.ref.m;
  bool lightning = m->attn[layer] == MM_ATTN_LIGHTNING;
  uint32_t d = m->head_dim, q = m->heads * d, kv = m->kv_heads * d, qr = q / tp, width = lightning ? 3 * q : q + 2 * kv;
  sequence seq[2];
  for (int i = 0; i < 2; i++)
    seq[i] = (sequence){calloc(q * d, sizeof(double)), calloc(2 * ROWS * kv, sizeof(double)), calloc(2 * ROWS * kv, sizeof(double))};
  double *expected = calloc((size_t)ROWS * q, sizeof *expected), all[512] = {0};
  for (size_t f = 0; f < sizeof feeds / sizeof *feeds; f++) {
    mm_batch batch = {feeds[f].rows, ids, feeds[f].spans, feeds[f].span, 0, NULL, NULL, NULL};
    for (uint32_t s = 0; s < feeds[f].spans; s++) {
      const mm_span *span = &feeds[f].span[s];
      if (span->slot >= 0 && span->pos == 0) memset(seq[span->slot].S, 0, q * d * sizeof(double));
      for (uint32_t t = span->first; t < span->first + span->count; t++) {
        for (uint32_t i = 0; i < width; i++) all[i] = (float)ref_random() * 2;
        hand_out(&r, lightning, t, all);
        double *o = expected + (size_t)t * q;
        if (span->slot < 0)
          memset(o, 0, q * sizeof *o);
        else if (lightning)
          ref_lightning(m, layer, seq[span->slot].S, o, all);
        else
          ref_gqa(m, &r.ref.layer[layer], seq[span->slot].k, seq[span->slot].v, span->pos + t - span->first, o, all, NULL);
      }
    }
    for (uint32_t i = 0; i < tp; i++) memset(r.y[i].data, 0xff, (size_t)ROWS * qr * sizeof(float)); /* NaN */
    step(&r, &batch, lightning ? call_lightning : call_gqa, &layer, NULL);
    for (uint32_t t = 0; t < feeds[f].rows; t++) {
      double largest = 0; /* sums of many terms: the error goes by them, not by what is left of them */
      for (uint32_t i = 0; i < q; i++) largest = fmax(largest, fabs(expected[(size_t)t * q + i]));
      for (uint32_t i = 0; i < q; i++) close_at(row(r.y[i / qr], qr, t)[i % qr], expected[(size_t)t * q + i], largest, "attention", t, i);
    }
  }
  for (int i = 0; i < 2; i++) free(seq[i].S), free(seq[i].k), free(seq[i].v);
  free(expected);
  close_ranks(&r);
}

TEST(gqa) {
  for (uint32_t tp = 1; tp <= 8; tp *= 2) attention(MM_FAMILY_M2, 1, tp, tp == 1 ? 3 : 1); /* 2 kv heads: replicated from tp 4 on */
  attention(MM_FAMILY_M1, 2, 2, 1);                                                        /* no QK norm */
  attention(MM_FAMILY_M3, 0, 1, 3), attention(MM_FAMILY_M3, 0, 8, 1);                      /* of each head */
}

TEST(lightning) {
  attention(MM_FAMILY_M1, 1, 1, 3);
  attention(MM_FAMILY_M1, 3, 4, 1);
}

/* x with SiLU(x) = y, by Newton's method; y > -0.278. */
static float before_silu(double y) {
  double x = y < 0 ? -0.5 : 1;
  for (int i = 0; i < 100; i++) {
    double s = ref_sigmoid(x);
    x -= (x * s - y) / (s + x * s * (1 - s));
  }
  return (float)x;
}

static void call_vector(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  mm_ops_cpu.lightning(r->b[i], 0, view(r->y[i], 16), view(r->x[i], 48));
}

/* The documented vectors, head dimension 2, s = 0.5 (head 0 of 8, layer 0: 0.500005): every block size gives the same o. Two
 * more queries, without key or value, read the rows of the last state. q, k and v are a quarter of the documented ones, which
 * SiLU could not give. */
TEST(lightning_vector) {
  static const double qkv[7][6] = {{1, 0.5, 0.5, 1, 1, 2},    {0.25, -1, 1, -0.5, 3, -1}, {2, 1, 0.25, 0.25, 0.5, 0.5},
                                   {-0.5, 0.75, -1, 2, 2, 1}, {1, 1, 0.5, 0.5, -1, 1},    {1, 0, 0, 0, 0, 0},
                                   {0, 1, 0, 0, 0, 0}};
  static const double S[2][2] = {{-0.9300183, -0.1483406}, {1.7727476, 2.1412819}};
  const double o[7][2] = {{1, 2},
                          {1.7192857, -1.8114287},
                          {3.8401469, 0.9367218},
                          {3.1648356, 2.5639788},
                          {0.8427293, 1.9929413},
                          {S[0][0] * exp(-0.5) * 4, S[0][1] * exp(-0.5) * 4},
                          {S[1][0] * exp(-1) * 4, S[1][1] * exp(-1) * 4}};
  mm_model m = ref_dims(MM_FAMILY_M1, true);
  m.head_dim = m.rotary_dim = 2;
  for (uint32_t block = 1; block <= 7; block++) {
    ranks r;
    open_ranks(&r, m, 1, 1);
    for (uint32_t pos = 0; pos < 7; pos += block) {
      mm_span span = {0, 0, (uint32_t)mm_min(block, 7 - pos), pos};
      mm_batch batch = {span.count, ids, 1, &span, 0, NULL, NULL, NULL};
      memset(r.x[0].data, 0, 7 * 48 * sizeof(float));
      for (uint32_t t = 0; t < span.count; t++)
        for (int i = 0; i < 6; i++) row(r.x[0], 48, t)[i] = before_silu(qkv[pos + t][i] / (pos + t < 5 ? 4 : 1));
      step(&r, &batch, call_vector, NULL, NULL);
      for (uint32_t t = 0; t < span.count; t++)
        for (uint32_t c = 0; c < 2; c++) close_to(row(r.y[0], 16, t)[c] * 64, o[pos + t][c], "o", pos + t, c);
    }
    close_ranks(&r);
  }
}

/* ---- experts ---- */

typedef struct routing {
  mm_packed router, bias, w13, w2;
} routing;

static void call_moe(ranks *r, uint32_t i, void *ctx) {
  (void)ctx;
  const mm_layer_weights *w = &r->w[i].layer[1];
  mm_act x = view(r->x[i], r->ref.m.hidden);
  mm_ops_cpu.route(r->b[i], 0, x, &w->router, w->router_bias.scheme ? &w->router_bias : NULL);
  mm_ops_cpu.experts(r->b[i], view(r->y[i], r->ref.m.hidden), x, &w->w13, &w->w2);
}

TEST(experts) {
  static const struct {
    mm_family family;
    uint32_t tp;
  } cases[] = {{MM_FAMILY_M1, 1}, {MM_FAMILY_M1, 2}, {MM_FAMILY_M2, 1}, {MM_FAMILY_M2, 4}};
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    ranks r;
    open_ranks(&r, ref_dims(cases[c].family, true), cases[c].tp, 2);
    uint32_t H = r.ref.m.hidden, T = 40;
    fill(r.x[0].data, T * H, 1.5f);
    for (uint32_t i = 0; i < r.tp; i++) memcpy(r.x[i].data, r.x[0].data, T * H * sizeof(float));
    mm_span span;
    mm_batch batch = plain(&span, ids, T);
    step(&r, &batch, call_moe, NULL, NULL);
    for (uint32_t t = 0; t < T; t++) {
      double x[64] = {0}, y[64] = {0};
      for (uint32_t i = 0; i < H; i++) x[i] = row(r.x[0], H, t)[i];
      ref_moe(&r.ref.m, &r.ref.layer[1], y, x, (uint64_t[64]){0});
      for (uint32_t i = 0; i < H; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < r.tp; k++) sum += row(r.y[k], H, t)[i];
        close_to(sum, y[i], "experts", t, i);
      }
    }
    close_ranks(&r);
  }
}

static void call_router(ranks *r, uint32_t i, void *ctx) {
  const routing *w = ctx;
  mm_act x = view(r->x[i], r->ref.m.hidden);
  mm_ops_cpu.route(r->b[i], 0, x, &w->router, w->bias.scheme ? &w->bias : NULL);
  mm_ops_cpu.experts(r->b[i], view(r->y[i], r->ref.m.hidden), x, &w->w13, &w->w2);
}

/* Weights of one row with the given router logits: expert e answers e_e (the unit vector e), so y is the weights. */
static void route(mm_router kind, uint32_t E, uint32_t top_k, const float *z, const float *bias, float *weights) {
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.router = kind;
  m.experts = E;
  m.top_k = top_k;
  m.intermediate = 1;
  ranks r;
  open_ranks(&r, m, 1, 1);
  uint32_t H = m.hidden;
  float router[8 * 24] = {0}, w13[8 * 2 * 24] = {0}, w2[8 * 24] = {0}, one = 1;
  float silu_one = one / (one + expf(-one));
  for (uint32_t e = 0; e < E; e++) {
    router[e * H] = z[e];
    w13[(2 * e) * H] = w13[(2 * e + 1) * H] = 1;
    w2[e * H + e] = 1 / silu_one;
  }
  const mm_scheme *f32 = mm_scheme_find("f32");
  routing w = {{.scheme = f32, .lead = 1, .n = E, .k = H, .plane = {router}, .cell = {{1, 1}}},
               {.scheme = bias ? f32 : NULL, .lead = 1, .n = E, .k = 1, .plane = {bias}, .cell = {{1, 1}}},
               {.scheme = f32, .lead = E, .n = 2, .k = H, .plane = {w13}, .cell = {{1, 1}}},
               {.scheme = f32, .lead = E, .n = H, .k = 1, .plane = {w2}, .cell = {{1, 1}}}};
  mm_span span;
  mm_batch batch = plain(&span, ids, 1);
  memset(r.x[0].data, 0, H * sizeof(float));
  row(r.x[0], H, 0)[0] = 1;
  step(&r, &batch, call_router, &w, NULL);
  memcpy(weights, r.y[0].data, E * sizeof(float));
  close_ranks(&r);
}

static void check_route(mm_router kind, uint32_t E, uint32_t top_k, const float *z, const float *bias, const double *expected) {
  float found[8];
  route(kind, E, top_k, z, bias, found);
  for (uint32_t e = 0; e < E; e++)
    if (!(fabs(found[e] - expected[e]) <= 1e-6)) fail_msg("expert %u: found %.8g, expected %.8g", e, found[e], expected[e]);
}

TEST(routers) {
  const float z[] = {2, -1, 0.5f, 1}, bias[] = {0, 0.6f, 0, -0.5f};
  check_route(MM_ROUTER_SIGMOID_BIAS, 4, 2, z, bias, (const double[]){0.766085, 0.233915, 0, 0});
  check_route(MM_ROUTER_SOFTMAX, 4, 2, z, NULL, (const double[]){0.731059, 0, 0, 0.268941});
  /* The bias decides which experts are selected, not their weights; logits of very different size give finite weights; of equal logits the
   * lower ids are selected. */
  const float far[] = {-300, 200, 199, -300};
  check_route(MM_ROUTER_SOFTMAX, 4, 2, far, NULL, (const double[]){0, 0.7310586, 0.2689414, 0});
  const float equal[] = {0.25f, 0.5f, 0.5f, 0.5f, 0.25f}, flat[] = {0, 0, 0, 0, 0};
  check_route(MM_ROUTER_SOFTMAX, 5, 2, equal, NULL, (const double[]){0, 0.5, 0.5, 0, 0});
  check_route(MM_ROUTER_SIGMOID_BIAS, 5, 3, flat, flat, (const double[]){1 / 3.0, 1 / 3.0, 1 / 3.0, 0, 0});
  check_route(MM_ROUTER_SIGMOID_BIAS, 5, 5, flat, equal, (const double[]){0.2, 0.2, 0.2, 0.2, 0.2});
}

int main(void) { return run_unit_tests(NULL, NULL); }
