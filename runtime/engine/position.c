/* RoPE frequencies and lightning decay: the closed forms of the released models. */
#include "runtime/engine/position.h"

#include <math.h>

float mm_rope_inv_freq(const mm_model *m, uint32_t i) { return 1.0f / powf((float)m->rope_theta, (float)(2 * i) / (float)m->rotary_dim); }

static double power_of_two_slope(uint32_t heads, uint32_t head) { return exp2(-8.0 * (head + 1.0) / heads); }

double mm_lightning_slope(uint32_t heads, uint32_t head) {
  uint32_t below = 1;
  while (below <= heads / 2) below *= 2;
  if (head < below) return power_of_two_slope(below, head);
  return power_of_two_slope(2 * below, 2 * (head - below));
}

double mm_lightning_decay(const mm_model *m, uint32_t layer, uint32_t head) {
  double depth = m->layers > 1 ? (double)layer / (m->layers - 1.0) : 0.0;
  return mm_lightning_slope(m->heads, head) * (1.0 - depth + 1e-5);
}
