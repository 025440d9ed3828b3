/* The inputs of linears, between the op that made them and the product: shown to a calibration, rounded as the weight's scheme says. Scales
 * belong to the uncut row: the ranks that hold parts of it find its largest magnitudes together, so that what is rounded to what does not
 * depend on tp. */
#include <string.h>

#include "runtime/cpu/cpu_backend.h"
#include "runtime/cpu/cpu_codes.h"
#include "runtime/engine/calibration.h"

void mm_cpu_observe(mm_backend *b, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick, uint32_t rows) {
  if (b->c.calibration) mm_calibration_add(b->c.calibration, b->c.weights->rank, w, lead, x, pick, rows);
}

typedef struct rounding {
  const mm_backend *b;
  float *x;
  const mm_packed *w;
  mm_cpu_form form;
  uint32_t own, amaxes; /* columns here that are no padding; amaxes of a row */
} rounding;

static bool amax_row(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const rounding *j = ctx;
  float *amax = j->b->amax + t * j->amaxes;
  memset(amax, 0, j->amaxes * sizeof *amax);
  mm_act_amax(&mm_act_formats[j->w->scheme->act], j->x + t * j->w->k, j->own, j->w->first_k, amax);
  return true;
}
mm_cpu_form mm_cpu_form_of(const mm_backend *b, const mm_packed *w) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  mm_cpu_view v;
  if (w->scheme->code == MM_CODE_PLAIN && w->scheme->plane[0].dtype != MM_BF16) return MM_FORM_F32;
  const bool known = w->first_k % MM_LANE == 0 && mm_cpu_view_of(&v, w, 0);
  if (!b->c.options.act_quant || f->code == MM_CODE_PLAIN) {
    if (b->c.options.input_bf16) return MM_FORM_BF16;
    return known && mm_cpu_limbs_kind(&v) != MM_KINDS ? MM_FORM_LIMBS : MM_FORM_F32;
  }
  if (known && mm_cpu_codes_kind(&v, f->code) != MM_KINDS) return MM_FORM_CODES;
  if (f->group && f->scale == MM_F8_E8M0) return MM_FORM_BF16;
  if (f->code == MM_CODE_INT8 && w->scheme->code == MM_CODE_INT8 && w->k <= MM_CPU_MOST_INTEGERS) return MM_FORM_INTEGERS;
  if (!f->group) return MM_FORM_ROW;
  const bool aligned = f->group == MM_CHUNK && w->first_k % MM_CHUNK == 0;
  return aligned && mm_cpu_view_of(&v, w, 0) && v.kind == MM_KIND_E4M3 ? MM_FORM_GROUPS : MM_FORM_F32;
}

static bool round_row(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const rounding *j = ctx;
  const mm_act_format *f = &mm_act_formats[j->w->scheme->act];
  float *amax = j->b->amax + t * j->amaxes, *x = j->x + t * j->w->k;
  if (j->form >= MM_FORM_ROW)
    mm_act_codes(f, x, j->own, j->w->first_k, amax, j->w->input_scale);
  else
    mm_act_round(f, x, j->own, j->w->first_k, amax, j->w->input_scale);
  return true;
}

void mm_cpu_round(mm_backend *b, float *x, uint32_t rows, const mm_packed *w) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (!b->c.options.act_quant || f->code == MM_CODE_PLAIN) return;
  const uint64_t work = (uint64_t)rows * w->k * 8; /* about so many multiplications */
  rounding j = {.b = b, .w = w, .form = mm_cpu_form_of(b, w)};
  j.x = x;
  j.own = w->whole_k ? (uint32_t)mm_min(w->k, w->whole_k - w->first_k) : w->k;
  j.amaxes = mm_act_amaxes(f, w->whole_k ? w->whole_k : w->k);
  mm_cpu_each(b, rows, work, amax_row, &j);
  if (w->whole_k) mm_comm_all_reduce_max(b->ranks.comm, b->ranks.rank, b->amax, (size_t)rows * j.amaxes);
  mm_cpu_each(b, rows, work, round_row, &j);
}

const float *mm_cpu_input(mm_backend *b, mm_act x, const mm_packed *w) {
  if (!b->c.options.act_quant || w->scheme->act == MM_ACT_KEPT) return x.data;
  if (b->groups.rounded == x.data) return b->rounded;
  memcpy(b->rounded, x.data, (size_t)b->batch->tokens * w->k * sizeof *b->rounded);
  mm_cpu_round(b, b->rounded, b->batch->tokens, w);
  return b->rounded;
}
