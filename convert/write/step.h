/* One unit of conversion: source rows in, the packed bytes of every rank out. */
#ifndef MM_CONVERT_STEP_H
#define MM_CONVERT_STEP_H

#include "convert/decode/decode.h"
#include "convert/plan/fill.h"
#include "convert/write/blocks.h"

/* The buffers of one thread; bounded by a few times MM_STRIP_BYTES whatever the model. */
typedef struct mm_worker {
  mm_decoder source;
  void *plane[MM_MAX_PLANES]; /* the strip packed, on the scheme's own cells */
  void *slice;                /* one rank's share of a plane */
  float *importance;          /* of the strip's columns */
  float *head;                /* one row of lm_head */
  size_t plane_cap[MM_MAX_PLANES], slice_cap, importance_cap, head_cap;
  mm_moment_rounding rounding; /* under second moments */
  mm_put_log log;              /* of the step that ran last; its owner may take the array */
  uint64_t zeroed;             /* weights of that step that were not finite and are 0 */
  uint32_t *dead;              /* all-zero lm_head rows that step saw */
  size_t dead_count, dead_cap;
} mm_worker;

void mm_worker_open(mm_worker *w, const mm_hf *hf);
void mm_worker_close(mm_worker *w);

/* Stored bytes of a strip on one rank: [at, at + n) of plane `plane` of its tensor, or of the entry of a stack that the rank has. The
 * number behind the planes stands for the tensor that a target format stores in addition to them. `offset` counts from the data start of
 * the part that the plan lays out. */
typedef struct mm_given {
  const mm_strip *strip;
  unsigned plane;
  uint32_t rank; /* within the stage */
  uint64_t at, offset;
  const void *bytes;
  size_t n;
} mm_given;

/* Takes what a step gives, in the order of its strips, planes and ranks; false fails the step. */
typedef struct mm_taker {
  bool (*take)(void *ctx, const mm_given *g, mm_err *err);
  void *ctx;
} mm_taker;

/* Runs step s of the plan into `to`, as mm_step_run does into files. */
MM_MUST_USE bool mm_step_give(mm_worker *w, const mm_plan *p, const mm_step *s, const mm_taker *to, mm_err *err);
/* Runs step s of the plan; out NULL: nothing is put, and the results about the step are the same. Values that are not finite, and scales
 * that are not positive, are MM_BAD_INPUT with the tensor and the element's offset. */
MM_MUST_USE bool mm_step_run(mm_worker *w, const mm_plan *p, const mm_step *s, mm_blocks *out, mm_err *err);
/* True if the step has rows of lm_head. */
bool mm_step_of_head(const mm_plan *p, const mm_step *s);

#endif
