/* A packed checkpoint against the source it came from: the error of every tensor over its ranks. */
#ifndef MM_CONVERT_COMPARE_H
#define MM_CONVERT_COMPARE_H

#include "convert/plan/plan.h"
#include "loader/shards.h"

/* Error sums of a tensor. Each weight that some rank in the directory holds counts once, however many ranks hold it, so the figures do not
 * depend on the number of ranks. Limit: if ranks are absent, `nonfinite` also counts their weights in rows that are decoded together with
 * rows of a present rank. w: a source weight; v: the packed one. */
typedef struct mm_tensor_error {
  double signal, noise, packed, product; /* Σ w², Σ (v - w)², Σ v², Σ v·w over finite weights */
  double max_abs;                        /* max |v - w| */
  uint64_t count;                        /* elements compared */
  uint64_t clipped;                      /* |v - w| is more than half of the format's largest step: w was beyond the last code */
  uint64_t beyond;                /* of those: v is not the last code, or has the other sign: a wrong code, which no rounding gives */
  double astray;                  /* Σ (v - w)² over those */
  uint64_t flushed;               /* w is not 0, v is */
  uint64_t nonfinite;             /* NaN or infinite in the source (read as 0 under --allow-nonfinite) or in the packed tensor; in no sum */
  double least_scale, most_scale; /* smallest and largest magnitude of the scales; both 0 if there are none */
  uint32_t experts, worst_expert; /* of stacked experts: how many were compared (0: not stacked), and the first one with the least SQNR */
  double worst_db;                /* its SQNR; infinity if it is exact */
  double most_astray;             /* largest share of astray in the signal of an expert, or in that of a row whose scales are not 0 */
  double most_lost;               /* largest max_abs of an expert that is no nearer to its source than zeros */
} mm_tensor_error;

/* 10·log10(signal/noise); infinity without error. */
double mm_sqnr_db(const mm_tensor_error *e);
double mm_rmse(const mm_tensor_error *e);
/* True if a tensor, and each of its experts, is as near to its source as packing by `scheme` leaves it on any version: `moved` weights,
 * which error feedback rounded, keep in each row a third of the decibels that the scheme keeps of a Gaussian matrix or lie within half a
 * step, and are nearer than zeros if scales reach so low; others do both. Otherwise MM_INTEGRITY E_SOURCE. */
MM_MUST_USE bool mm_error_bounded(const mm_tensor_error *e, const mm_scheme *scheme, bool moved, mm_where where, mm_err *err);
/* Cosine of the angle between source and packed tensor; 1 if both are zero. */
double mm_cosine(const mm_tensor_error *e);

/* Checks that the source and its options give the tensors, cuts and grids of the checkpoint: MM_INTEGRITY E_SOURCE names the first
 * difference. */
MM_MUST_USE bool mm_compare_plan(const mm_plan *plan, const mm_shards *s, mm_err *err);
/* Compares every tensor with the source, decoded. Where several ranks hold the same weights, the first rank's are compared:
 * mm_verify_agreement proves that they are equal. `plan` must come from the source with the options of the manifest; a packed checkpoint
 * that it does not describe is MM_INTEGRITY E_SOURCE, naming the first difference. Fills out[tensor_count]; count is 0 where no rank in
 * the directory holds the tensor. */
MM_MUST_USE bool mm_compare(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_tensor_error *out, mm_err *err);

typedef struct mm_error_row {
  const char *name, *scheme; /* of the packed tensor */
  mm_tensor_error e;
  size_t place; /* in the checkpoint's order */
} mm_error_row;

/* An unsharded checkpoint opened as a source, and its digests. */
typedef struct mm_made {
  mm_hf *hf;
  const mm_pack *digests;
} mm_made;

/* The same of an unsharded checkpoint, whose bytes mm_exact_unsharded has compared: `plan` is that of its own source in the same layout. A
 * row for each packed name, so that the experts of a layer are one, as in a packed checkpoint; *rows is allocated, free() it. A tensor that
 * it lacks, or holds in another shape, is MM_INTEGRITY E_SOURCE; a number that is not finite is MM_INTEGRITY E_NONFINITE, unless it was
 * opened to allow that. Scales are not looked at. */
MM_MUST_USE bool mm_compare_unsharded(const mm_plan *plan, const mm_made *made, unsigned threads, mm_error_row **rows, size_t *count,
                                      mm_err *err);

/* --- shared by compare.c and compare_unsharded.c --- */
/* Adds the sums of e. */
void mm_error_merge(mm_tensor_error *to, const mm_tensor_error *e);
/* Counts expert `number` of a stack, whose own sums are in `expert`. */
void mm_error_add_expert(mm_tensor_error *stack, const mm_tensor_error *expert, uint32_t number);
/* Codes before their scale: step, the largest distance of two neighbours (0: the tensor has no scales); top, the smaller magnitude of the
 * two last codes. */
typedef struct mm_code_steps {
  double step, top;
} mm_code_steps;
/* Those of a kind of codes; {0, 0} where codes are the numbers themselves. */
mm_code_steps mm_code_steps_of(mm_code code);
/* Adds n weights of a row: w of the source, v of the packed tensor, scale[n] that v was multiplied with; not read if step is 0. Returns
 * what they add to astray where the scale is not 0. */
double mm_error_add(mm_tensor_error *sum, const float *w, const float *v, const float *scale, uint32_t n, mm_code_steps c);
/* After all of a row was added: w[n] is the whole row of the source, astray the sum of mm_error_add. */
void mm_error_add_row(mm_tensor_error *sum, const float *w, uint32_t n, double astray);

#endif
