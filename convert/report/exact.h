/* Compares a checkpoint with the output of a conversion of its source: bit for bit where the same program and recipe give the same bits. */
#ifndef MM_CONVERT_EXACT_H
#define MM_CONVERT_EXACT_H

#include "convert/report/compare.h"
#include "convert/write/writer.h"

/* `plan` is that of the source under the recipe of the checkpoint `p`. All failures are MM_INTEGRITY E_SOURCE. */
/* The model, the static scales of activations, what is left out, and the names, sizes and headers of the source's files. */
MM_MUST_USE bool mm_exact_words(const mm_plan *plan, const mm_pack *p, mm_err *err);
/* True if this program gives the weights of tensor i again: they are plain numbers, which every version rounds alike, or it is of the
 * version that packed them and neither importance nor second moments had a part in their rounding. Otherwise only weights that are kept as
 * stored must be exact. */
bool mm_exact_again(const mm_plan *plan, const mm_pack *p, size_t i);
/* Every stored byte of a weight on every rank in the directory: strips that are kept as stored, and all that is given again. */
MM_MUST_USE bool mm_exact_weights(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_err *err);
/* The first rows of each matrix, of a stack its first one, in the finished output `dir` of this plan, packed or unsharded, as far as
 * mm_exact_again says that they are given again, and its companions but for `baked`. MM_USAGE E_RESUME where another source gave them.
 * A download is compared as far as its files are there. */
MM_MUST_USE bool mm_exact_sample(const mm_plan *plan, const char *dir, const mm_stored *stored, const char *baked, unsigned threads,
                                 mm_err *err);
/* The others, by the figures of mm_compare: no weight is further from the source than half a step of its scheme unless it lies beyond the
 * last code or was rounded with error feedback, and no tensor or expert loses more than two thirds of the decibels that the scheme keeps of
 * a Gaussian matrix; those of error feedback lose no more by weights further than half a step. */
MM_MUST_USE bool mm_exact_bounds(const mm_plan *plan, const mm_shards *s, const mm_tensor_error *e, mm_err *err);

/* Checks that the files of a checkpoint are byte copies of those of its source, none of which is missing, and that `baked` is what `bake`
 * makes of its tokenizer.json (NULL: not looked at); the files that the plan writes itself are left out. MM_INTEGRITY E_SOURCE names the
 * first file that differs. */
MM_MUST_USE bool mm_companions_same(const mm_plan *plan, const mm_pack *p, mm_bake_fn *bake, const char *baked, mm_err *err);

/* Checks that the draft of a packed checkpoint is that of the folder `from` (--draft), or without one that of a packed source; *compared is
 * false where neither is there. MM_INTEGRITY E_SOURCE. */
MM_MUST_USE bool mm_exact_draft(const mm_plan *plan, const mm_pack *p, const char *from, bool *compared, mm_err *err);

/* The index of an unsharded checkpoint `made`, whose digests p holds, and whose headers it lists as mm_hf_open proves: its plan, its total
 * and that it names every file. MM_INTEGRITY E_IDX. */
MM_MUST_USE bool mm_exact_index(const mm_hf *made, const mm_pack *p, mm_err *err);
/* Of such a checkpoint; the plan has the same layout and format. Its config and the files that the plan writes. */
MM_MUST_USE bool mm_exact_texts(const mm_plan *plan, const mm_hf *made, const mm_pack *p, mm_err *err);
/* Sets *from_packed: what the two plans store otherwise is there as `packed` has it, with one scheme, grid and static scale for all experts
 * of a layer (mm_plan_options), not as `own` has it. The first file or tensor that differs decides. */
MM_MUST_USE bool mm_exact_from_packed(const mm_plan *own, const mm_plan *packed, const mm_made *made, bool *from_packed, mm_err *err);
/* The static scales of activations that an unsharded checkpoint has, for a plan of it where --act-scales gave them from a file. */
MM_MUST_USE bool mm_exact_input_scales(mm_act_scales *s, const mm_hf *made, mm_err *err);
/* The names, types and shapes of all tensors, and every byte that mm_exact_weights compares. */
MM_MUST_USE bool mm_exact_unsharded(const mm_plan *plan, const mm_hf *made, const mm_pack *p, unsigned threads, mm_err *err);

#endif
