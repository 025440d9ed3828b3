/* One unit of conversion: source rows in, the packed bytes of every rank out. */
#ifndef MM_CONVERT_STEP_H
#define MM_CONVERT_STEP_H

#include "convert/plan/plan.h"
#include "convert/decode/decode.h"
#include "convert/write/blocks.h"

/* What one thread needs; bounded by a few times MM_STRIP_BYTES whatever the model. */
typedef struct mm_worker {
  mm_decoder source;
  void *plane[MM_MAX_PLANES]; /* the strip packed, on the scheme's own cells */
  void *slice;                /* one rank's share of a plane */
  float *importance;          /* of the strip's columns */
  float *head;                /* one row of lm_head */
  size_t plane_cap[MM_MAX_PLANES], slice_cap, importance_cap, head_cap;
  mm_put_log log;  /* of the step that ran last; its owner may take the array */
  uint64_t zeroed; /* weights of that step that were not finite and are 0 */
  uint32_t *dead;  /* all-zero lm_head rows that step saw */
  size_t dead_count, dead_cap;
} mm_worker;

void mm_worker_open(mm_worker *w, const mm_hf *hf);
void mm_worker_close(mm_worker *w);

/* Runs step s of the plan; out NULL: nothing is put, what is told of the step is the same. Values that are not finite, and scales that are
 * not positive, are MM_BAD_INPUT with the tensor and the element's offset. */
MM_MUST_USE bool mm_step_run(mm_worker *w, const mm_plan *p, const mm_step *s, mm_blocks *out, mm_err *err);
/* Whether it has rows of lm_head. */
bool mm_step_of_head(const mm_plan *p, const mm_step *s);

#endif
