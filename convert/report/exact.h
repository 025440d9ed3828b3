/* Compares a checkpoint with the output of a conversion of its source: bit for bit where the same program and recipe give the same bits. */
#ifndef MM_CONVERT_EXACT_H
#define MM_CONVERT_EXACT_H

#include "convert/report/compare.h"
#include "convert/write/writer.h"

/* `plan` is that of the source under the recipe of the checkpoint `p`. All failures are MM_INTEGRITY E_SOURCE. */
/* The model, the static scales of activations, and the names, sizes and headers of the source's files. */
MM_MUST_USE bool mm_exact_words(const mm_plan *plan, const mm_pack *p, mm_err *err);
/* True if this program gives the weights of tensor i again: it is of the version that packed them, from this source, neither importance
 * nor second moments had a part in their rounding. Otherwise only weights that are kept as stored must be exact. */
bool mm_exact_again(const mm_plan *plan, const mm_pack *p, size_t i);
/* Every stored byte of a weight on every rank in the directory: strips that are kept as stored, and all that is given again. */
MM_MUST_USE bool mm_exact_weights(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_err *err);
/* The others, by the figures of mm_compare: no weight is further from the source than half a step of its scheme unless it lies beyond the
 * last code or was rounded with error feedback, and no tensor or expert loses more than two thirds of the decibels that the scheme keeps of
 * a Gaussian matrix. */
MM_MUST_USE bool mm_exact_bounds(const mm_plan *plan, const mm_shards *s, const mm_tensor_error *e, mm_err *err);

#endif
