/* The reference backend's lightning attention, per head with decay s and fp32 state S[key, value]:
 *   S_t = exp(-s)·S_{t-1} + k_t ⊗ v_t,   o_t = q_tᵀ·S_t
 * in blocks of m tokens (Lightning Attention-2, Qin et al. 2024). Token i of a block is i + 1 steps from the incoming state and
 * i - j steps from token j; token j is m - 1 - j steps from the outgoing state. A block of one token is the recurrence itself. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"

typedef struct lightning {
  mm_backend *b;
  uint32_t layer;
  mm_act o, qkv;
} lightning;

/* One block of one head: row i is q, k, v at x + i·stride, its result goes to o + i·o_stride. decay[i] = exp(-s·i), i ≤ m. */
static void run_block(float *S, float *o, size_t o_stride, const float *x, size_t stride, uint32_t m, uint32_t d, const float *decay) {
  for (uint32_t i = 0; i < m; i++) {
    const float *q = x + i * stride;
    float *out = o + i * o_stride;
    memset(out, 0, d * sizeof *out);
    for (uint32_t a = 0; a < d; a++) mm_cpu_axpy(out, decay[i + 1] * q[a], S + (size_t)a * d, d);
    for (uint32_t j = 0; j <= i; j++) {
      const float *k = x + j * stride + d, *v = k + d;
      mm_cpu_axpy(out, decay[i - j] * mm_cpu_dot(q, k, d), v, d);
    }
  }
  for (uint32_t a = 0; a < d; a++) {
    float *row = S + (size_t)a * d;
    for (uint32_t c = 0; c < d; c++) row[c] *= decay[m];
    for (uint32_t j = 0; j < m; j++) {
      const float *k = x + j * stride + d, *v = k + d;
      mm_cpu_axpy(row, decay[m - 1 - j] * k[a], v, d);
    }
  }
}

static bool run_head(void *ctx, size_t head, unsigned worker, mm_err *err) {
  (void)err;
  const lightning *l = ctx;
  const mm_backend *b = l->b;
  uint32_t d = b->d;
  float *decay = b->scratch[worker];
  float s = b->slope[(size_t)l->layer * b->heads + head];
  for (uint32_t i = 0; i <= MM_CPU_BLOCK; i++) decay[i] = expf(-s * (float)i);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *span = &b->batch->span[i];
    if (span->slot < 0) continue;
    float *S = b->cache[l->layer].state + ((size_t)span->slot * b->heads + head) * d * d;
    if (span->pos == 0) memset(S, 0, (size_t)d * d * sizeof *S);
    for (uint32_t t = 0; t < span->count; t += MM_CPU_BLOCK) {
      size_t row = span->first + t;
      const float *x = mm_cpu_row(l->qkv, row) + head * 3 * d;
      float *o = mm_cpu_row(l->o, row) + head * d;
      run_block(S, o, l->o.width, x, l->qkv.width, (uint32_t)mm_min(MM_CPU_BLOCK, span->count - t), d, decay);
    }
  }
  return true;
}

void mm_cpu_lightning(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv) {
  lightning l = {b, layer, o, qkv};
  size_t n = (size_t)b->batch->tokens * qkv.width;
  float *x = qkv.data;
  for (size_t i = 0; i < n; i++) x[i] = mm_cpu_silu(x[i]);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    if (s->slot < 0) memset(mm_cpu_row(o, s->first), 0, (size_t)s->count * o.width * sizeof *x);
  }
  uint64_t work = (uint64_t)b->batch->tokens * b->heads * b->d * (2 * b->d + mm_min(b->batch->tokens, MM_CPU_BLOCK));
  mm_cpu_each(b, b->heads, work, run_head, &l);
}
