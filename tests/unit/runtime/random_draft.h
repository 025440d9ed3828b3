/* For tests: a random draft for the small models of reference.h, written to a directory of its own, and its proposals in double from
 * FORMAT-DRAFT.md. Shares no arithmetic with the runtime. */
#ifndef MM_TESTS_RANDOM_DRAFT_H
#define MM_TESTS_RANDOM_DRAFT_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loader/dflash.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

static inline mm_dflash_config draft_dims(const mm_model *m) {
  return (mm_dflash_config){.layers = 3,
                            .hidden = m->hidden,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 10,
                            .intermediate = 36,
                            .taps = 2,
                            .tap = {0, 1},
                            .block = 8,
                            .mask_id = m->vocab - 3,
                            .norm_eps = 1e-4,
                            .rope_theta = 3e3,
                            .window = {9, 0, 5},
                            .causal = {true, false, false}};
}

/* EAGLE-3, whose head has some ids alone; or 3.1: all ids, embeddings of its own, norms of the taps. */
static inline mm_dflash_config eagle_dims(const mm_model *m, bool later) {
  return (mm_dflash_config){.kind = MM_DRAFT_EAGLE3,
                            .layers = 1,
                            .hidden = m->hidden,
                            .heads = 4,
                            .kv_heads = 2,
                            .head_dim = 10,
                            .intermediate = 36,
                            .taps = 2,
                            .tap = {0, 1},
                            .norm_eps = 1e-4,
                            .rope_theta = 3e3,
                            .vocab = m->vocab,
                            .draft_vocab = later ? m->vocab : m->vocab * 3 / 5,
                            .mapped = !later,
                            .own_embed = later,
                            .tap_norms = later,
                            .norm_output = later,
                            .norm_before_residual = later};
}

/* The same with matrices in E4M3, which have such shapes. */
static inline mm_dflash_config quantised_dims(mm_dflash_config c, const char *scheme) {
  c.head_dim = 32, c.intermediate = 40, c.quant = mm_dflash_scheme(scheme);
  assert_non_null(c.quant);
  return c;
}

/* Weights of the file, each tensor in the order of mm_dflash_tensor_at; none of ids. Of a matrix in E4M3 they are what its codes in `code`
 * and its scales in `scale` stand for. */
typedef struct random_draft {
  mm_dflash_config c;
  char dir[64];
  bool rounds; /* inputs of matrices in E4M3 are rounded to it */
  float *w[MM_DFLASH_TENSORS], *scale[MM_DFLASH_TENSORS];
  uint8_t *code[MM_DFLASH_TENSORS];
} random_draft;

/* The number of an E4M3 code. */
static inline double draft_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double x = ldexp(exponent ? 8 + mantissa : mantissa, (exponent ? exponent : 1) - 10);
  return code & 128 ? -x : x;
}

/* Puts a matrix into the scheme of its tensor. */
static inline void draft_encode(random_draft *r, uint32_t i, const mm_dflash_tensor *t) {
  const mm_cell cell = t->scheme->plane[1].cell;
  const size_t across = mm_cells(t->cols, cell.k), n = (size_t)t->rows * t->cols;
  r->code[i] = malloc(n), r->scale[i] = malloc(mm_cells(t->rows, cell.n) * across * sizeof(float));
  t->scheme->pack(&(mm_pack_args){.w = r->w[i], .n = t->rows, .k = t->cols}, (void *[MM_MAX_PLANES]){r->code[i], r->scale[i]});
  for (size_t j = 0; j < n; j++) {
    const size_t column = j % t->cols, at = j / t->cols / cell.n * across + (cell.k ? column / cell.k : 0);
    const float x = (float)(draft_e4m3(r->code[i][j]) * (double)r->scale[i][at]);
    assert_true(fabsf(x - r->w[i][j]) <= fabsf(r->w[i][j]) * 0x1p-4f + r->scale[i][at] * 0x1p-10f);
    r->w[i][j] = x;
  }
}

/* The target's id of id i of the head, where it has some ids alone. */
static inline int64_t eagle_id(const random_draft *r, int64_t i) { return r->c.mapped ? i + i * 2 / 3 : i; }

static inline void draft_write(const random_draft *r, const char *dir) {
  mm_err err = {0};
  mm_st_tensor t[MM_DFLASH_STORED];
  mm_dflash_stored stored[MM_DFLASH_STORED];
  mm_dflash_tensor want[MM_DFLASH_TENSORS];
  uint32_t n = 0, planes = 0;
  for (; mm_dflash_tensor_at(&r->c, n, &want[n]); n++)
    for (unsigned p = 0; mm_dflash_stored_at(&want[n], p, MM_F32, &stored[planes]); p++, planes++)
      t[planes] = (mm_st_tensor){.name = stored[planes].name, .dtype = stored[planes].dtype, .shape = stored[planes].shape};
  char *text = mm_dflash_text(&r->c, &err);
  assert_non_null(text);
  const struct mm_st_meta meta = {MM_DFLASH_KEY, text};
  size_t bytes;
  void *header = mm_st_header(t, planes, &meta, 1, 4096, &bytes, &err);
  assert_non_null(header);
  FILE *f = fopen(mm_path_of(dir, MM_DFLASH_FILE).text, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(header, 1, bytes, f), bytes);
  for (uint32_t i = 0, at = 0; i < n; i++, at++) {
    for (int64_t k = 0; want[i].ids && k < want[i].rows; k++) {
      const int64_t step = eagle_id(r, k) - k;
      assert_int_equal(fwrite(&step, sizeof step, 1, f), 1);
    }
    if (want[i].scheme) {
      assert_int_equal(fwrite(r->code[i], 1, t[at].bytes, f), t[at].bytes);
      at++;
    }
    if (!want[i].ids) assert_int_equal(fwrite(want[i].scheme ? r->scale[i] : r->w[i], 1, t[at].bytes, f), t[at].bytes);
  }
  assert_int_equal(fclose(f), 0);
  free(header), free(text);
}

static inline random_draft draft_build_as(mm_dflash_config c) {
  random_draft r = {.c = c, .dir = "/tmp/minimax-draft-XXXXXX"};
  assert_non_null(mkdtemp(r.dir));
  mm_dflash_tensor t;
  for (uint32_t i = 0; mm_dflash_tensor_at(&r.c, i, &t); i++) {
    if (!t.ids) r.w[i] = t.cols ? ref_fill((size_t)t.rows * t.cols, 1.5f / sqrtf((float)t.cols), 0) : ref_fill(t.rows, 0.5f, 1);
    if (t.scheme) draft_encode(&r, i, &t);
  }
  draft_write(&r, r.dir);
  return r;
}
static inline random_draft draft_build(const mm_model *m) { return draft_build_as(draft_dims(m)); }

static inline void draft_free(random_draft *r) {
  for (size_t i = 0; i < sizeof r->w / sizeof *r->w; i++) free(r->w[i]), free(r->code[i]), free(r->scale[i]);
  unlink(mm_path_of(r->dir, MM_DFLASH_FILE).text);
  rmdir(r->dir);
}

/* ---- in double ---- */

static inline void draft_product(double *y, const double *x, const float *w, size_t n, size_t k) {
  for (size_t i = 0; i < n; i++) {
    y[i] = 0;
    for (size_t j = 0; j < k; j++) y[i] += (double)w[i * k + j] * x[j];
  }
}

/* x[k] in groups of 128 rounded to the nearest E4M3 numbers, of two the even one, times amax / 448. */
static inline void draft_round(double *x, size_t k) {
  for (size_t from = 0; from < k; from += 128) {
    const size_t to = from + 128 < k ? from + 128 : k;
    double most = 1e-10;
    for (size_t j = from; j < to; j++) most = fmax(most, fabs(x[j]));
    const double scale = (double)((float)most / 448);
    for (size_t j = from; j < to; j++) {
      int exponent;
      (void)frexp(x[j] / scale, &exponent);
      const double step = ldexp(1, (exponent > -5 ? exponent : -5) - 4);
      x[j] = nearbyint(x[j] / scale / step) * step * scale;
    }
  }
}

/* The product of a draft's own matrix. */
static inline void draft_linear(const random_draft *r, double *y, const double *x, const float *w, size_t n, size_t k) {
  double rounded[256];
  memcpy(rounded, x, k * sizeof *x);
  if (r->rounds) draft_round(rounded, k);
  draft_product(y, rounded, w, n, k);
}

static inline void draft_norm(double *y, const double *x, const float *w, size_t n, double eps) {
  double sum = 0;
  for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
  for (size_t i = 0; i < n; i++) y[i] = x[i] / sqrt(sum / (double)n + eps) * (double)w[i];
}

/* Heads in place: norm of each, then RoPE of all columns, halves against each other. */
static inline void draft_heads(double *x, uint32_t heads, uint32_t d, const float *w, uint32_t pos, const mm_dflash_config *c) {
  for (uint32_t h = 0; h < heads; h++, x += d) {
    draft_norm(x, x, w, d, c->norm_eps);
    for (uint32_t i = 0; i < d / 2; i++) {
      const double a = pos * pow(c->rope_theta, -2.0 * i / d), lo = x[i], hi = x[i + d / 2];
      x[i] = lo * cos(a) - hi * sin(a), x[i + d / 2] = hi * cos(a) + lo * sin(a);
    }
  }
}

/* logits[each, vocab] after `id`, which comes after tap rows [pos, taps · H]. */
static inline void draft_expect(const random_draft *r, const ref_model *m, const float *tap, uint32_t pos, int32_t id, uint32_t each,
                                double *logits) {
  const mm_dflash_config *c = &r->c;
  const size_t H = c->hidden, d = c->head_dim, q = c->heads * d, kv = c->kv_heads * d, I = c->intermediate, rows = 1 + each;
  double x[8][64], n[64], y[64], t[128], act[80], sum[8][128], one[8][256];
  double *key = calloc((pos + rows) * kv, sizeof *key), *value = calloc((pos + rows) * kv, sizeof *value);
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < H; j++) x[i][j] = (double)m->embed[(i ? c->mask_id : (uint32_t)id) * H + j];
  for (uint32_t l = 0; l < c->layers; l++) {
    float *const *w = &r->w[3 + 8 * l]; /* input norm, post norm, qkv, o, q norm, k norm, gate and up, down */
    for (uint32_t p = 0; p < pos; p++) {
      for (size_t j = 0; j < c->taps * H; j++) t[j] = (double)tap[p * c->taps * H + j];
      draft_linear(r, y, t, r->w[0], H, c->taps * H);
      draft_norm(n, y, r->w[1], H, c->norm_eps);
      draft_linear(r, &key[p * kv], n, w[2] + q * H, kv, H);
      draft_linear(r, &value[p * kv], n, w[2] + (q + kv) * H, kv, H);
      draft_heads(&key[p * kv], c->kv_heads, c->head_dim, w[5], p, c);
    }
    for (uint32_t i = 0; i < rows; i++) {
      draft_norm(n, x[i], w[0], H, c->norm_eps);
      draft_linear(r, one[i], n, w[2], q + 2 * kv, H);
      draft_heads(one[i], c->heads, c->head_dim, w[4], pos + i, c);
      draft_heads(one[i] + q, c->kv_heads, c->head_dim, w[5], pos + i, c);
      memcpy(&key[(pos + i) * kv], one[i] + q, kv * sizeof *key);
      memcpy(&value[(pos + i) * kv], one[i] + q + kv, kv * sizeof *value);
    }
    for (uint32_t i = 0; i < rows; i++)
      for (uint32_t h = 0; h < c->heads; h++) {
        const size_t g = h / (c->heads / c->kv_heads) * d;
        double all = 0, *o = &sum[i][h * d];
        memset(o, 0, d * sizeof *o);
        for (uint32_t p = 0; p < pos + rows; p++) {
          if ((c->causal[l] && p > pos + i) || (c->window[l] && p + c->window[l] <= pos + i)) continue;
          double score = 0;
          for (size_t j = 0; j < d; j++) score += one[i][h * d + j] * key[p * kv + g + j];
          const double e = exp(score / sqrt((double)d));
          all += e;
          for (size_t j = 0; j < d; j++) o[j] += e * value[p * kv + g + j];
        }
        for (size_t j = 0; j < d; j++) o[j] /= all;
      }
    for (uint32_t i = 0; i < rows; i++) {
      draft_linear(r, y, sum[i], w[3], H, q);
      for (size_t j = 0; j < H; j++) x[i][j] += y[j];
      draft_norm(n, x[i], w[1], H, c->norm_eps);
      draft_linear(r, act, n, w[6], 2 * I, H);
      for (size_t j = 0; j < I; j++) act[j] = act[j] / (1 + exp(-act[j])) * act[I + j];
      draft_linear(r, y, act, w[7], H, I);
      for (size_t j = 0; j < H; j++) x[i][j] += y[j];
    }
  }
  for (uint32_t i = 0; i < each; i++) {
    draft_norm(n, x[i + 1], r->w[2], H, c->norm_eps);
    draft_product(logits + i * m->m.vocab, n, m->head, m->m.vocab, H);
  }
  free(key), free(value);
}

static inline const float *draft_weight(const random_draft *r, const char *name) {
  mm_dflash_tensor t;
  for (uint32_t i = 0; mm_dflash_tensor_at(&r->c, i, &t); i++)
    if (strcmp(t.name, name) == 0) return r->w[i];
  return NULL;
}

/* g = fc · taps of a position, each tap normalised first or not. */
static inline void eagle_taps(const random_draft *r, const float *tap, double *g) {
  const size_t H = r->c.hidden, taps = r->c.taps;
  double *t = calloc(taps * H, sizeof *t);
  for (size_t i = 0; i < taps * H; i++) t[i] = (double)tap[i];
  for (size_t i = 0; r->c.tap_norms && i < taps; i++)
    draft_norm(t + i * H, t + i * H, draft_weight(r, i ? "fc_norm.1.weight" : "fc_norm.0.weight"), H, r->c.norm_eps);
  draft_linear(r, g, t, draft_weight(r, "fc.weight"), H, taps * H);
  free(t);
}

/* Slot i of the draft pairs token i + 1 with the hidden state g of position i, at RoPE position i: its keys and values, and its output,
 * given those of the slots before; `g` becomes what the next token of a chain is given. */
static inline void eagle_slot(const random_draft *r, const float *embed, uint32_t i, int32_t id, double *g, double *key, double *value,
                              double *output) {
  const mm_dflash_config *c = &r->c;
  const size_t H = c->hidden, d = c->head_dim, q = c->heads * d, kv = c->kv_heads * d, I = c->intermediate;
  const float *const qkv = draft_weight(r, "layers.0.self_attn.qkv_proj.weight");
  double x[128], u[64], t[64], all[256], o[128] = {0}, act[80];
  for (size_t j = 0; j < H; j++) t[j] = (double)embed[(size_t)id * H + j];
  draft_norm(x, t, draft_weight(r, "layers.0.input_layernorm.weight"), H, c->norm_eps);
  draft_norm(u, g, draft_weight(r, "hidden_norm.weight"), H, c->norm_eps);
  memcpy(x + H, u, H * sizeof *u);
  draft_linear(r, all, x, qkv, q + 2 * kv, 2 * H);
  for (size_t h = 0; h < c->heads + c->kv_heads; h++)
    for (size_t j = 0; j < d / 2; j++) {
      double *const at = all + h * d;
      const double a = i * pow(c->rope_theta, -2.0 * (double)j / (double)d), lo = at[j], hi = at[j + d / 2];
      at[j] = lo * cos(a) - hi * sin(a), at[j + d / 2] = hi * cos(a) + lo * sin(a);
    }
  memcpy(key + i * kv, all + q, kv * sizeof *key);
  memcpy(value + i * kv, all + q + kv, kv * sizeof *value);
  if (!output) return;
  for (size_t h = 0; h < c->heads; h++) {
    const size_t at = h / (c->heads / c->kv_heads) * d;
    double sum = 0;
    for (uint32_t p = 0; p <= i; p++) {
      double score = 0;
      for (size_t j = 0; j < d; j++) score += all[h * d + j] * key[p * kv + at + j];
      const double e = exp(score / sqrt((double)d));
      sum += e;
      for (size_t j = 0; j < d; j++) o[h * d + j] += e * value[p * kv + at + j];
    }
    for (size_t j = 0; j < d; j++) o[h * d + j] /= sum;
  }
  draft_linear(r, t, o, draft_weight(r, "layers.0.self_attn.o_proj.weight"), H, q);
  for (size_t j = 0; j < H; j++) g[j] = (c->norm_before_residual ? u[j] : g[j]) + t[j];
  draft_norm(u, g, draft_weight(r, "layers.0.post_attention_layernorm.weight"), H, c->norm_eps);
  draft_linear(r, act, u, draft_weight(r, "layers.0.mlp.gate_up_proj.weight"), 2 * I, H);
  for (size_t j = 0; j < I; j++) act[j] = act[j] / (1 + exp(-act[j])) * act[I + j];
  draft_linear(r, t, act, draft_weight(r, "layers.0.mlp.down_proj.weight"), H, I);
  for (size_t j = 0; j < H; j++) g[j] += t[j];
  draft_norm(output, g, draft_weight(r, "norm.weight"), H, c->norm_eps);
  if (c->norm_output) memcpy(g, output, H * sizeof *g);
}

/* logits[each, vocab] of a chain after `id`, which comes after tokens ids[pos] with tap rows [pos, taps · H]; -INFINITY of ids that the
 * head does not have. */
static inline void eagle_expect(const random_draft *r, const ref_model *m, const float *tap, const int32_t *ids, uint32_t pos, int32_t id,
                                uint32_t each, double *logits) {
  const mm_dflash_config *c = &r->c;
  const size_t H = c->hidden, kv = c->kv_heads * c->head_dim;
  const float *const embed = c->own_embed ? draft_weight(r, "embed_tokens.weight") : m->embed;
  double g[64], out[64], *row = calloc(c->draft_vocab, sizeof *row);
  double *key = calloc((pos + each) * kv, sizeof *key), *value = calloc((pos + each) * kv, sizeof *value);
  for (uint32_t i = 0; i + 1 < pos; i++) {
    eagle_taps(r, tap + (size_t)i * c->taps * H, g);
    eagle_slot(r, embed, i, ids[i + 1], g, key, value, NULL);
  }
  eagle_taps(r, tap + (size_t)(pos - 1) * c->taps * H, g);
  for (uint32_t k = 0; k < each; k++) {
    eagle_slot(r, embed, pos - 1 + k, id, g, key, value, out);
    draft_product(row, out, draft_weight(r, "lm_head.weight"), c->draft_vocab, H);
    uint32_t best = 0;
    for (size_t v = 0; v < m->m.vocab; v++) logits[k * m->m.vocab + v] = -INFINITY;
    for (uint32_t v = 0; v < c->draft_vocab; v++) {
      logits[k * m->m.vocab + (size_t)eagle_id(r, v)] = row[v];
      if (row[v] > row[best]) best = v;
    }
    id = (int32_t)eagle_id(r, best);
  }
  free(row), free(key), free(value);
}
#endif
