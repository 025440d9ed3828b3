/* Source matrices put back together from the ranks of a packed checkpoint. */
#ifndef MM_LOADER_UNSHARD_H
#define MM_LOADER_UNSHARD_H

#include "loader/shards.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One source matrix: a piece of a packed tensor, and of a stack one expert. Borrows the shards. */
typedef struct mm_whole {
  const mm_shards *s;
  size_t tensor;   /* index into s->pack.tensor */
  unsigned piece;  /* of the tensor */
  uint32_t expert; /* of all experts; 0 without a stack */
} mm_whole;

/* Rows of the uncut matrix, and its columns (1 for a vector). */
uint32_t mm_whole_rows(const mm_whole *w);
uint32_t mm_whole_cols(const mm_whole *w);
/* Finds the matrix that was called `source` in the source checkpoint, the expert's number standing in its name; false when there is none.
 */
bool mm_whole_find(const mm_shards *s, const char *source, mm_whole *out);
/* The name of the matrix in the source checkpoint, into out. Returns out. */
char *mm_whole_name(const mm_whole *w, char *out, size_t cap);

/* A byte range of one part, as reported to a caller that observes reads. */
typedef struct mm_unshard_range {
  const mm_shards *s;
  uint32_t rank, part;
  uint64_t offset, bytes; /* from the start of the file */
} mm_unshard_range;
typedef bool mm_unshard_range_fn(void *ctx, const mm_unshard_range *x, mm_err *err);

/* Lines [first, first + count) of plane `plane` on its stored grid, as one matrix has them: out[count, cells of mm_whole_cols], elements
 * as stored. `seen`, unless NULL, is called with every byte range before it is copied and may refuse it. MM_USAGE E_RANKS when the files
 * of no rank that has a part of it are open. */
MM_MUST_USE bool mm_whole_cells(const mm_whole *w, unsigned plane, uint32_t first, uint32_t count, void *out, mm_unshard_range_fn *seen,
                                void *ctx, mm_err *err);
/* Rows [row, row + rows) as f32: out[rows, mm_whole_cols]. Errors as above. */
MM_MUST_USE bool mm_whole_unpack(const mm_whole *w, uint32_t row, uint32_t rows, float *out, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
