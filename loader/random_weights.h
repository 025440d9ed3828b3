/* Weights of a model that no file holds: the shapes, schemes and cuts of mm_bind with random numbers (quant/random.h), made where they are
 * used. The ranks of all cuts hold parts of the same model. */
#ifndef MM_LOADER_RANDOM_WEIGHTS_H
#define MM_LOADER_RANDOM_WEIGHTS_H

#include "loader/bind.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The cut fits the model: as mm_bind wants it, with vocab, heads, experts and columns in whole parts. MM_USAGE E_TP. */
MM_MUST_USE bool mm_random_check(const mm_random_model *r, const mm_model *m, mm_err *err);
/* The weights of rank stage · tp + tensor-parallel rank, without planes: GPU backends make the numbers (mm_packed.random). mm_bind_close
 * frees w->layer, or the caller. MM_USAGE E_TP, MM_LIMIT. */
MM_MUST_USE bool mm_random_weights(const mm_random_model *r, const mm_model *m, uint32_t rank, mm_rank_weights *w, mm_err *err);
/* Gives all of them planes in memory, until mm_bind_close. MM_LIMIT. */
MM_MUST_USE bool mm_random_fill(mm_rank_weights *w, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
