/* Tables that depend on a token's position: RoPE frequencies and the decay of lightning attention, computed once, when a backend opens. */
#ifndef MM_RUNTIME_POSITION_H
#define MM_RUNTIME_POSITION_H

#include "formats/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Angle per position of rotary pair i in [0, rotary_dim/2), which is (x[i], x[i + rotary_dim/2]): theta^(-2i/rotary_dim). Every step
 * is rounded to f32 as in the released code: at position p one ulp of frequency is p ulps of angle, and those are what the weights
 * were trained with. */
float mm_rope_inv_freq(const mm_model *m, uint32_t i);

/* ALiBi slope (Press et al. 2022) of one of `heads` heads: 2^(-8(h+1)/heads) for a power of two; otherwise the slopes of the next
 * lower power of two, then every second slope of the next higher one. */
double mm_lightning_slope(uint32_t heads, uint32_t head);

/* s > 0 of a lightning head: its state shrinks by exp(-s) per token. `head` counts over all ranks, `layer` over all layers. */
double mm_lightning_decay(const mm_model *m, uint32_t layer, uint32_t head);

#ifdef __cplusplus
}
#endif
#endif
