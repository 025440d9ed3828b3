/* Calibration: what the linears of a model are given while a text runs through it. Mean squares of the input channels weigh errors when
 * scales are searched (minimax-convert --importance); largest magnitudes become static scales of activations (--act-scales). */
#ifndef MM_RUNTIME_CALIBRATION_H
#define MM_RUNTIME_CALIBRATION_H

#include "loader/shards.h"

typedef struct mm_calibration mm_calibration;

/* Room for every matrix of the checkpoint, 8 bytes for each input channel of each expert. Borrows the shards until close. */
mm_calibration *mm_calibration_open(const mm_shards *s, mm_err *err);
void mm_calibration_close(mm_calibration *c); /* accepts NULL */

/* Adds to the inputs of matrix `lead` of w on this rank: row i is x[pick[i]], or x[i] when pick is NULL; x[…, w->k], as the op before left
 * it, not rounded. Ranks add at the same time, each the columns that it owns; rank 0 alone those that all have. */
void mm_calibration_add(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick,
                        uint32_t rows);

/* Writes a safetensors file. For every matrix NAME that was given anything, k columns uncut, E experts (absent where there are none):
 *   NAME.mean_square  F32 [E, k]       of each channel over the rows; 0 for an expert without rows
 *   NAME.amax         F32 [E] or [1]   largest magnitude
 *   NAME.rows         I64 [E] or [1]   tokens seen */
MM_MUST_USE bool mm_calibration_write(const mm_calibration *c, int fd, const char *path, mm_err *err);

#endif
