/* The CPU backend's lightning attention, per head with decay s and fp32 state S[key, value]:
 *   S_t = exp(-s)·S_{t-1} + k_t ⊗ v_t,   o_t = q_tᵀ·S_t
 * token by token, so that no bit depends on how a sequence was cut into steps. */
#include <math.h>
#include <string.h>

#include "runtime/cpu/cpu_backend.h"

typedef struct lightning {
  mm_backend *b;
  uint32_t layer;
  mm_act o, qkv;
} lightning;

static bool run_head(void *ctx, size_t head, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const lightning *l = ctx;
  const mm_backend *b = l->b;
  uint32_t d = b->d;
  const float decay = expf(-b->slope[(size_t)l->layer * b->heads + head]);
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *span = &b->batch->span[i];
    if (span->slot < 0) continue;
    float *S = mm_cpu_state(b, l->layer, (uint32_t)span->slot, (uint32_t)head);
    if (span->pos == 0) memset(S, 0, (size_t)d * d * sizeof *S);
    for (size_t t = span->first; t < (size_t)span->first + span->count; t++) {
      float *const q = mm_cpu_row(l->qkv, t) + head * 3 * d, *const k = q + d, *const v = k + d;
      b->vectors->silu(q, q, NULL, (size_t)3 * d);
      b->vectors->state(S, mm_cpu_row(l->o, t) + head * d, q, k, v, d, decay);
    }
  }
  return true;
}

void mm_cpu_lightning(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv) {
  lightning l = {b, layer, o, qkv};
  for (uint32_t i = 0; i < b->batch->span_count; i++) {
    const mm_span *s = &b->batch->span[i];
    if (s->slot < 0) memset(mm_cpu_row(o, s->first), 0, (size_t)s->count * o.width * sizeof(float));
  }
  uint64_t work = (uint64_t)b->batch->tokens * b->heads * b->d * b->d * 3;
  mm_cpu_each(b, b->heads, work, run_head, &l);
}
