/* The CPU backend's dense ops: embedding, norms, matrix products, residuals, logits. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/cpu/cpu_codes.h"

/* Below this many multiplications, waking threads costs more than it saves. */
#define WORTH_THREADS (UINT64_C(1) << 17)

void mm_cpu_each(mm_backend *b, size_t count, uint64_t work, mm_pool_fn *fn, void *job) {
  if (b->c.options.threads > 1 && work >= WORTH_THREADS) {
    mm_either_way(mm_team_run(b->team, count, fn, job, &b->err)); /* end() reports b->err */
    return;
  }
  for (size_t i = 0; i < count; i++) fn(job, i, 0, &b->err);
}

typedef struct shares {
  mm_backend *b;
  mm_pool_fn *fn;
  void *job;
  size_t count;
} shares;

/* There are as many calls as items, so that each finds one. */
static bool next_of_share(void *ctx, size_t call, unsigned worker, mm_err *err) {
  (void)call;
  const shares *s = ctx;
  for (unsigned i = 0; i < s->b->c.options.threads; i++) {
    const unsigned whose = (worker + i) % s->b->c.options.threads;
    const size_t item = atomic_fetch_add_explicit(&s->b->share[whose].next, 1, memory_order_relaxed);
    if (item < mm_cpu_share_begin(s->b, s->count, whose + 1)) return s->fn(s->job, item, worker, err);
  }
  return true;
}

void mm_cpu_each_share(mm_backend *b, size_t count, uint64_t work, mm_pool_fn *fn, void *job) {
  shares s = {b, fn, job, count};
  for (unsigned t = 0; t < b->c.options.threads; t++)
    atomic_store_explicit(&b->share[t].next, mm_cpu_share_begin(b, count, t), memory_order_relaxed);
  mm_cpu_each(b, count, work, next_of_share, &s);
}

const float *mm_cpu_vector(mm_backend *b, const mm_packed *w) {
  mm_unpack(w, 0, 0, w->n, b->vector);
  return b->vector;
}

typedef struct inputs {
  const float **row, *x;
  const uint32_t *pick;
  float *to;          /* [rows, stride] */
  const float *scale; /* [rows, amaxes] */
  const mm_packed *w;
  uint32_t stride, amaxes; /* amaxes: 0 in forms without scales */
  uint32_t scales, wanted; /* those of a row here, and those that its product reads */
  mm_cpu_kind kind;
  mm_cpu_form form;
} inputs;

/* A row under MM_FORM_CODES. A NaN or infinity makes its group's scale, or the row's, NaN. */
static void ready_codes(const inputs *j, float *to, const float *x, const float *scale) {
  const mm_act_format *f = &mm_act_formats[j->w->scheme->act];
  const bool all = mm_cpu_codes((mm_cpu_span *)(void *)to, x, j->w->k, j->kind, scale + 1, j->amaxes - 1, f->group, j->w->first_k);
  *(float *)(uintptr_t)mm_cpu_scales(to, j->w->k) = !all && !f->group ? NAN : f->scale == MM_F8_E8M0 ? 1 : scale[0];
}

static bool ready_row(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const inputs *j = ctx;
  float *to = j->to + t * j->stride;
  const uint32_t k = j->w->k;
  const float *const x = j->x + (size_t)(j->pick ? j->pick[t] : t) * k;
  j->row[t] = to;
  if (j->form == MM_FORM_CODES) {
    ready_codes(j, to, x, j->scale + t * j->amaxes);
    return true;
  }
  if (j->form == MM_FORM_LIMBS) {
    mm_cpu_limbs_of((mm_cpu_span *)(void *)to, x, k, j->kind);
    return true;
  }
  mm_cpu_turn(to, x, k, j->kind);
  float *const scale = (float *)(uintptr_t)mm_cpu_scales(to, k);
  if (j->amaxes) {
    memcpy(scale, j->scale + t * j->amaxes, j->scales * sizeof *to);
    memset(scale + j->scales, 0, (j->wanted - j->scales) * sizeof *to); /* of padding behind the last group */
  }
  if (j->form == MM_FORM_INTEGERS) {
    if (!mm_cpu_integers(to, k)) *scale = NAN;
  } else if (j->form != MM_FORM_F32) {
    mm_cpu_pair(to, k);
  }
  return true;
}

void mm_cpu_ready(mm_backend *b, const float **row, const float *x, const uint32_t *pick, uint32_t rows, const mm_packed *w,
                  mm_cpu_form form) {
  mm_cpu_view v;
  const uint32_t padded = mm_cpu_padded(w->k);
  inputs j = {.row = row, .pick = pick, .to = b->turned, .w = w, .form = form};
  j.x = x;
  j.kind = mm_cpu_view_of(&v, w, 0) ? v.kind : MM_KIND_F32;
  if (form == MM_FORM_CODES) j.kind = mm_cpu_codes_kind(&v, mm_act_formats[w->scheme->act].code);
  if (form == MM_FORM_LIMBS) j.kind = mm_cpu_limbs_kind(&v);
  j.stride = form == MM_FORM_F32 ? padded : form == MM_FORM_LIMBS ? (uint32_t)mm_cpu_limbs_floats(w->k) : MM_CPU_INPUT(padded);
  if (form >= MM_FORM_ROW) {
    j.amaxes = mm_act_amaxes(&mm_act_formats[w->scheme->act], w->whole_k ? w->whole_k : w->k);
    const uint32_t first = form == MM_FORM_GROUPS ? 1 + w->first_k / MM_CHUNK : 0;
    j.scale = b->amax + first;
    j.wanted = form == MM_FORM_GROUPS ? padded / MM_CHUNK : 1;
    j.scales = (uint32_t)mm_min(j.wanted, j.amaxes - first);
  }
  if (form != MM_FORM_F32 || padded != w->k || mm_cpu_turned(j.kind)) {
    mm_cpu_each(b, rows, (uint64_t)rows * w->k, ready_row, &j);
    return;
  }
  for (uint32_t t = 0; t < rows; t++) row[t] = x + (size_t)(pick ? pick[t] : t) * w->k;
}

/* Rows whose grid the loops do not know, as f32 with zeros to the end of a chunk. */
static void unpack_padded(float *strip, const mm_packed *w, uint32_t lead, uint32_t first, uint32_t count, uint32_t padded) {
  mm_unpack(w, lead, first, count, strip);
  if (padded == w->k) return;
  for (uint32_t i = count; i-- > 0;) {
    memmove(strip + (size_t)i * padded, strip + (size_t)i * w->k, w->k * sizeof *strip);
    memset(strip + (size_t)i * padded + w->k, 0, (padded - w->k) * sizeof *strip);
  }
}

/* Products of codes, times the scales of the rows they came from. */
static void scale_rows(const mm_cpu_part *p) {
  for (uint32_t t = 0; t < p->tokens; t++) {
    const float scale = *mm_cpu_scales(p->x[t], p->w->k);
    for (uint32_t i = 0; i < p->count; i++) p->y[t * p->stride + i] *= scale;
  }
}

void mm_cpu_strip_of(mm_backend *b, unsigned worker, const mm_cpu_part *p) {
  float *const sums = b->scratch[worker], *const strip = sums + MM_CPU_SUMS(MM_CPU_MANY);
  const uint32_t padded = mm_cpu_padded(p->w->k);
  mm_cpu_view v;
  if (mm_cpu_view_of(&v, p->w, p->lead)) {
    v.next = p->next, v.pairs = p->form == MM_FORM_BF16 || p->form == MM_FORM_ROW || p->form == MM_FORM_GROUPS;
    if (p->form == MM_FORM_LIMBS) v.kind = mm_cpu_limbs_kind(&v);
    if (p->form == MM_FORM_CODES) v.kind = mm_cpu_codes_kind(&v, mm_act_formats[p->w->scheme->act].code);
    if (p->form == MM_FORM_INTEGERS) v.kind = MM_KIND_INT8_CODES;
    if (p->form == MM_FORM_GROUPS) v.kind = MM_KIND_E4M3_GROUPS;
    mm_cpu_rows(&v, p->first, p->count, p->x, p->tokens, p->y, p->stride, sums);
  } else {
    for (uint32_t at = 0; at < p->count; at += MM_CPU_STRIP) {
      const uint32_t n = (uint32_t)mm_min(MM_CPU_STRIP, p->count - at);
      unpack_padded(strip, p->w, p->lead, p->first + at, n, padded);
      mm_cpu_view_f32(&v, p->w, strip, padded);
      mm_cpu_rows(&v, 0, n, p->x, p->tokens, p->y + at, p->stride, sums);
    }
  }
  if (p->form >= MM_FORM_ROW && p->form != MM_FORM_GROUPS) scale_rows(p);
}

typedef struct matmul {
  mm_backend *b;
  float *y;
  uint32_t rows;
  const mm_packed *w;
  mm_cpu_form form;
} matmul;

static bool matmul_strip(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)err;
  const matmul *j = ctx;
  const uint32_t strip = mm_cpu_strip(j->b, j->rows), first = (uint32_t)item * strip;
  const mm_cpu_part part = {.w = j->w,
                            .first = first,
                            .count = (uint32_t)mm_min(strip, j->w->n - first),
                            .x = j->b->row,
                            .tokens = j->rows,
                            .y = j->y + first,
                            .stride = j->w->n,
                            .form = j->form};
  mm_cpu_strip_of(j->b, worker, &part);
  return true;
}

void mm_cpu_matmul(mm_backend *b, float *y, const float *x, const uint32_t *pick, uint32_t rows, const mm_packed *w, mm_cpu_form form) {
  matmul j = {.b = b, .rows = rows, .w = w, .form = form};
  j.y = y;
  if (rows == 0) return;
  mm_cpu_ready(b, b->row, x, pick, rows, w, form);
  (rows <= MM_CPU_TOKENS ? mm_cpu_each_share : mm_cpu_each)(b, mm_ceil_div(w->n, mm_cpu_strip(b, rows)), (uint64_t)rows * w->n * w->k,
                                                            matmul_strip, &j);
}

void mm_cpu_linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w) {
  mm_cpu_observe(b, w, 0, x.data, NULL, b->batch->tokens);
  mm_cpu_prefetch_after(b, w);
  mm_cpu_matmul(b, y.data, mm_cpu_input(b, x, w), NULL, b->batch->tokens, w, mm_cpu_form_of(b, w));
}

void mm_cpu_logits(mm_backend *b, mm_act x, const mm_packed *head) {
  b->logits.width = head->n;
  mm_cpu_observe(b, head, 0, x.data, b->batch->out, b->batch->out_count);
  mm_cpu_matmul(b, b->logits.row, x.data, b->batch->out, b->batch->out_count, head, MM_FORM_F32);
}

void mm_cpu_embed(mm_backend *b, mm_act x, const mm_packed *table) {
  const mm_rank_weights *w = b->c.weights;
  const bool whole = b->c.draft && table == &b->c.draft->embed; /* which every rank has */
  const uint32_t first = whole ? 0 : w->vocab_first, rows = whole ? table->n : w->vocab_rows;
  for (uint32_t t = 0; t < b->batch->tokens; t++) {
    uint32_t local = (uint32_t)b->batch->id[t] - first; /* wraps to beyond the rows for ids of lower ranks */
    if (local < rows)
      mm_unpack(table, 0, local, 1, mm_cpu_row(x, t));
    else
      memset(mm_cpu_row(x, t), 0, x.width * sizeof(float));
  }
  if (!whole) mm_comm_all_reduce_sum(b->ranks.comm, b->ranks.rank, x.data, (size_t)b->batch->tokens * x.width);
}

const float *mm_cpu_norm_vector(mm_backend *b, const mm_packed *w) {
  mm_cpu_vector(b, w);
  for (uint32_t i = 0; b->c.model->norm_offset && i < w->n; i++) b->vector[i] += 1;
  return b->vector;
}

static void norm_row(float *y, const float *x, const float *w, uint32_t n, double eps) {
  float r = 1.0f / sqrtf(mm_cpu_dot(x, x, n) / (float)n + (float)eps);
  for (uint32_t i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

void mm_cpu_norm_heads(float *x, uint32_t heads, uint32_t n, const float *w, double eps) {
  for (uint32_t h = 0; h < heads; h++) norm_row(x + (size_t)h * n, x + (size_t)h * n, w, n, eps);
}

void mm_cpu_norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) {
  const float *weight = mm_cpu_norm_vector(b, w);
  for (uint32_t t = 0; t < b->batch->tokens; t++) norm_row(mm_cpu_row(y, t), mm_cpu_row(x, t), weight, x.width, eps);
}

void mm_cpu_gated_norm(mm_backend *b, mm_act y, mm_act o, mm_act gate, const mm_packed *w, double eps) {
  const float *weight = mm_cpu_norm_vector(b, w);
  uint32_t n = o.width, T = b->batch->tokens;
  for (uint32_t t = 0; t < T; t++) b->sums[t] = mm_cpu_dot(mm_cpu_row(o, t), mm_cpu_row(o, t), n);
  mm_comm_all_reduce_sum(b->ranks.comm, b->ranks.rank, b->sums, T);
  float whole = (float)n * (float)b->ranks.count;
  for (uint32_t t = 0; t < T; t++) {
    const float *x = mm_cpu_row(o, t), *g = mm_cpu_row(gate, t);
    float *out = mm_cpu_row(y, t), r = 1.0f / sqrtf(b->sums[t] / whole + (float)eps);
    b->vectors->gate(out, x, r, weight, g, n);
  }
}

void mm_cpu_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
  mm_comm_all_reduce_sum(b->ranks.comm, b->ranks.rank, branch.data, (size_t)b->batch->tokens * h.width);
  mm_cpu_combine_whole(b, h, n, residual, branch, scale, w, eps);
}

void mm_cpu_combine_whole(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                          double eps) {
  const float *weight = w ? mm_cpu_norm_vector(b, w) : NULL;
  float alpha = (float)scale.alpha, beta = (float)scale.beta;
  uint32_t H = h.width;
  for (uint32_t t = 0; t < b->batch->tokens; t++) {
    const float *res = mm_cpu_row(residual, t), *add = mm_cpu_row(branch, t);
    float *sum = mm_cpu_row(h, t);
    for (uint32_t i = 0; i < H; i++) sum[i] = alpha * res[i] + beta * add[i];
    if (weight) norm_row(mm_cpu_row(n, t), sum, weight, H, eps);
  }
}
