/* Which output bytes a step fills. The plan alone says so: mm_step_run puts what is listed here and nothing else, so that whoever reads a
 * journal or ends a part can compare what is there with what must be. */
#ifndef MM_CONVERT_FILL_H
#define MM_CONVERT_FILL_H

#include "convert/plan/plan.h"

/* A strip: rows [row, row + rows) of one piece of one stack entry. */
typedef struct mm_strip {
  const mm_plan *plan;
  const mm_pack_tensor *t;
  const mm_plan_tensor *pt;
  const mm_matrix *x;
  uint32_t tensor, lead, piece, row, rows;
  bool keep;   /* the source's codes are stored */
  float group; /* what the entry's pieces share: amax, or the global scale of codes that are kept */
} mm_strip;

/* The strip of a step; the first one when the step takes all pieces. */
mm_strip mm_strip_first(const mm_plan *p, const mm_step *s);
/* The next strip of a step that takes all pieces: false after the last. */
bool mm_strip_next(mm_strip *s);

/* Stored cells along one axis that a rank takes from a strip. Stored cell `to + i` is the scheme's cell `from(i)` of the strip. */
typedef struct mm_run {
  uint32_t to, count;   /* local stored cells */
  uint32_t first, step; /* element of the strip under the first one, elements per stored cell */
  uint32_t cell;        /* elements per cell of the strip's plane; 0 = one for all */
} mm_run;

/* One rank's share of one plane of a strip: whole stored rows, one byte range of the file. */
typedef struct mm_share {
  mm_run rows, cols;
  uint32_t stored_cols;
  uint64_t row_bytes;
  uint64_t at, bytes; /* from the part's data start */
} mm_share;

/* False when the rank takes nothing of it, or is not wanted. */
bool mm_share_of(const mm_strip *s, unsigned plane, uint32_t rank, mm_share *out);
/* The cell of the strip's plane that stored cell i of a run is. */
uint32_t mm_run_cell(const mm_run *r, uint32_t i);
/* A share of a plane into slice[rows.count][stored_cols]: whole stored rows, padding columns zero. */
void mm_share_gather(const mm_share *x, const uint8_t *plane, uint32_t plane_cols, size_t size, uint8_t *slice);
/* Tensor `plane` of a target format's words, all of it, on rank 0. False past the last. */
bool mm_share_words(const mm_strip *s, unsigned plane, mm_share *out);
/* The tensor that is stored with the strip in addition to its planes, on rank 0: a shape or a static scale. False if there is none. */
bool mm_share_companions(const mm_strip *s, mm_share *out);

/* Bytes of a step on one rank, [offset, offset + bytes) from the part's data start. */
typedef bool mm_fill_fn(void *ctx, uint32_t rank, uint64_t offset, uint64_t bytes);
/* Calls fn for all that the step fills on wanted ranks, in the order of mm_step_run; stops with false when fn returns false. */
bool mm_step_fills(const mm_plan *p, const mm_step *s, mm_fill_fn *fn, void *ctx);
/* True if the step fills nothing on wanted ranks. */
bool mm_step_idle(const mm_plan *p, const mm_step *s);

#endif
