/* The inputs of linears, between the op that made them and the product: shown to a calibration, rounded as the weight's scheme says. Scales
 * belong to the uncut row: the ranks that hold parts of it find its largest magnitudes together, so that what is rounded to what does not
 * depend on tp. */
#include <string.h>

#include "runtime/calibration.h"
#include "runtime/cpu/cpu_backend.h"

void mm_cpu_observe(mm_backend *b, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick, uint32_t rows) {
  if (b->c.calibration) mm_calibration_add(b->c.calibration, b->c.weights->rank, w, lead, x, pick, rows);
}

void mm_cpu_round(mm_backend *b, float *x, uint32_t rows, const mm_packed *w) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (!b->c.act_quant || f->code == MM_CODE_PLAIN) return;
  uint32_t own = w->whole_k ? (uint32_t)mm_min(w->k, w->whole_k - w->first_k) : w->k; /* beyond it zero padding */
  uint32_t amaxes = mm_act_amaxes(f, w->whole_k ? w->whole_k : w->k);
  memset(b->amax, 0, (size_t)rows * amaxes * sizeof *b->amax);
  for (uint32_t t = 0; t < rows; t++) mm_act_amax(f, x + (size_t)t * w->k, own, w->first_k, b->amax + (size_t)t * amaxes);
  if (w->whole_k) mm_comm_max(b->c.comm, b->c.weights->rank, b->amax, (size_t)rows * amaxes);
  for (uint32_t t = 0; t < rows; t++) mm_act_round(f, x + (size_t)t * w->k, own, w->first_k, b->amax + (size_t)t * amaxes, w->input_scale);
}

const float *mm_cpu_input(mm_backend *b, mm_act x, const mm_packed *w) {
  if (!b->c.act_quant || w->scheme->act == MM_ACT_KEPT) return x.data;
  memcpy(b->rounded, x.data, (size_t)b->batch->tokens * w->k * sizeof *b->rounded);
  mm_cpu_round(b, b->rounded, b->batch->tokens, w);
  return b->rounded;
}
