/* For tests: a random DFlash draft for the small models of reference.h, written to a directory of its own, and its proposals in double from
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

/* Weights of the file, each tensor in the order of mm_dflash_tensor_at. */
typedef struct random_draft {
  mm_dflash_config c;
  char dir[64];
  float *w[3 + 8 * MM_DFLASH_LAYERS];
} random_draft;

static inline void draft_write(const random_draft *r, const char *dir) {
  mm_err err = {0};
  mm_st_tensor t[3 + 8 * MM_DFLASH_LAYERS];
  mm_dflash_tensor want[3 + 8 * MM_DFLASH_LAYERS];
  uint32_t n = 0;
  for (; mm_dflash_tensor_at(&r->c, n, &want[n]); n++)
    t[n] = (mm_st_tensor){
        .name = want[n].name, .dtype = MM_F32, .shape = want[n].cols ? mm_shape2(want[n].rows, want[n].cols) : mm_shape1(want[n].rows)};
  char *text = mm_dflash_text(&r->c, &err);
  assert_non_null(text);
  const struct mm_st_meta meta = {MM_DFLASH_KEY, text};
  size_t bytes;
  void *header = mm_st_header(t, n, &meta, 1, 4096, &bytes, &err);
  assert_non_null(header);
  FILE *f = fopen(mm_path_of(dir, MM_DFLASH_FILE).text, "wb");
  assert_non_null(f);
  assert_int_equal(fwrite(header, 1, bytes, f), bytes);
  for (uint32_t i = 0; i < n; i++) assert_int_equal(fwrite(r->w[i], 1, t[i].bytes, f), t[i].bytes);
  assert_int_equal(fclose(f), 0);
  free(header), free(text);
}

static inline random_draft draft_build(const mm_model *m) {
  random_draft r = {.c = draft_dims(m), .dir = "/tmp/minimax-draft-XXXXXX"};
  assert_non_null(mkdtemp(r.dir));
  mm_dflash_tensor t;
  for (uint32_t i = 0; mm_dflash_tensor_at(&r.c, i, &t); i++)
    r.w[i] = t.cols ? ref_fill((size_t)t.rows * t.cols, 1.5f / sqrtf((float)t.cols), 0) : ref_fill(t.rows, 0.5f, 1);
  draft_write(&r, r.dir);
  return r;
}

static inline void draft_free(random_draft *r) {
  for (size_t i = 0; i < sizeof r->w / sizeof *r->w; i++) free(r->w[i]);
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
  double x[8][64], n[64], y[64], t[128], act[80], sum[8][64], one[8][160];
  double *key = calloc((pos + rows) * kv, sizeof *key), *value = calloc((pos + rows) * kv, sizeof *value);
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < H; j++) x[i][j] = (double)m->embed[(i ? c->mask_id : (uint32_t)id) * H + j];
  for (uint32_t l = 0; l < c->layers; l++) {
    float *const *w = &r->w[3 + 8 * l]; /* input norm, post norm, qkv, o, q norm, k norm, gate and up, down */
    for (uint32_t p = 0; p < pos; p++) {
      for (size_t j = 0; j < c->taps * H; j++) t[j] = (double)tap[p * c->taps * H + j];
      draft_product(y, t, r->w[0], H, c->taps * H);
      draft_norm(n, y, r->w[1], H, c->norm_eps);
      draft_product(&key[p * kv], n, w[2] + q * H, kv, H);
      draft_product(&value[p * kv], n, w[2] + (q + kv) * H, kv, H);
      draft_heads(&key[p * kv], c->kv_heads, c->head_dim, w[5], p, c);
    }
    for (uint32_t i = 0; i < rows; i++) {
      draft_norm(n, x[i], w[0], H, c->norm_eps);
      draft_product(one[i], n, w[2], q + 2 * kv, H);
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
      draft_product(y, sum[i], w[3], H, q);
      for (size_t j = 0; j < H; j++) x[i][j] += y[j];
      draft_norm(n, x[i], w[1], H, c->norm_eps);
      draft_product(act, n, w[6], 2 * I, H);
      for (size_t j = 0; j < I; j++) act[j] = act[j] / (1 + exp(-act[j])) * act[I + j];
      draft_product(y, act, w[7], H, I);
      for (size_t j = 0; j < H; j++) x[i][j] += y[j];
    }
  }
  for (uint32_t i = 0; i < each; i++) {
    draft_norm(n, x[i + 1], r->w[2], H, c->norm_eps);
    draft_product(logits + i * m->m.vocab, n, m->head, m->m.vocab, H);
  }
  free(key), free(value);
}
#endif
