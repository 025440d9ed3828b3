/* The plan of a load: where the weights of a rank will lie in one memory range of a device, which bytes of which files go there, and how
 * they are converted on the way. All of it follows from shapes, before a weight byte is read. Devices carry the plan out
 * (runtime/cuda/core/load.cu). */
#ifndef MM_LOADER_LANDING_H
#define MM_LOADER_LANDING_H

#include "loader/shards.h"
#include "loader/stream/reader.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_LANDING_ALIGN 256 /* of every plane, and the zeros behind it at least */

typedef enum mm_landing_how {
  MM_LAND_AS_IS,  /* copied */
  MM_LAND_SPREAD, /* rows spread to the pitch, zeros between */
  MM_LAND_WIDEN,  /* numbers to f32, times the factor */
  MM_LAND_NOWHERE /* only read, so that its digest is checked: the caller takes it from the mapping */
} mm_landing_how;

/* Bytes of one plane and what is to be done with them. */
typedef struct mm_landing {
  mm_landing_how how;
  uint64_t at;              /* in the arena */
  uint64_t bytes;           /* as stored */
  uint64_t row, pitch;      /* SPREAD: bytes */
  mm_dtype from;            /* WIDEN: BF16, F16, F32, or U8 for e8m0 */
  float factor;             /* WIDEN */
  const mm_packed *nibbles; /* four-bit codes, to be put in the device's order where they lie; else NULL */
  uint32_t group;           /* what it arrives with: below mm_landing_plan.groups */
  uint64_t part;            /* or 0; else bytes [i·part, (i + 1)·part) arrive with group + i */
} mm_landing;

typedef struct mm_hole {
  uint64_t at, bytes;
} mm_hole;

/* A zeroed one is empty. Groups: the weights that some point of a step waits for together. */
typedef struct mm_landing_plan {
  uint64_t bytes;      /* of the arena */
  uint64_t file_bytes; /* of all planes as stored */
  mm_landing *landing; /* [landings] */
  mm_read_want *want;  /* [landings] the tag is the landing's number */
  mm_read_file *file;  /* [files] */
  const void **origin; /* [files] the mapping, or NULL for memory */
  mm_hole *hole;       /* [holes] of the arena, to be zeros before anything but an AS_IS landing */
  uint64_t *left;      /* [groups] bytes that have not arrived */
  uint32_t *full;      /* [fulls] groups of which all has, in the order in which that was; none that had nothing to come */
  uint64_t *arrived;   /* [landings] bytes that have: of mm_landing_arrive */
  size_t landings, landings_cap, want_cap, arrived_cap, holes, holes_cap, file_cap, origin_cap, left_cap, full_cap, fulls;
  uint32_t files, groups;
} mm_landing_plan;

/* True if w is E4M3 codes under one E8M0 exponent for 32 columns of a row, its grid not cut finer. */
static inline bool mm_has_exponents(const mm_packed *w) {
  const mm_scheme *s = w->scheme;
  return s->code == MM_CODE_E4M3 && s->plane_count == 2 && s->plane[1].dtype == MM_U8 && w->cell[1].n == 1 && w->cell[1].k == 32;
}

/* How a device stores a matrix's planes. */
typedef struct mm_landing_layout {
  uint32_t bits;        /* of a code: 4, 8 or 16 */
  uint64_t pitch;       /* bytes of a row of codes */
  uint64_t scales;      /* stored, with padding; 0: no scales */
  bool byte_scales;     /* one byte each, in rows of scale_pitch bytes; else f32, as close as they are stored */
  uint64_t scale_pitch; /* the same */
  bool global;          /* a third plane: f32, one for each matrix, times global_factor */
  float global_factor;
} mm_landing_layout;

/* How devices store w: codes as they are stored, in rows padded to 16 bytes, and scales on their grid, as f32 unless there is one byte for
 * each 16 or 32 columns. False for codes that no device reads. */
MM_MUST_USE bool mm_landing_layout_of(const mm_packed *w, mm_landing_layout *y);

/* Places in the arena; unspecified where there is no such plane. */
typedef struct mm_landing_places {
  uint64_t data, scale, global;
} mm_landing_places;

/* Room for `bytes` bytes, zeros (all of them with `zero`, else those behind). */
MM_MUST_USE bool mm_landing_place(mm_landing_plan *p, uint64_t bytes, bool zero, uint64_t *at, mm_err *err);
/* Which group w's planes arrive with; the codes of matrix i with each + i, after all that comes first, or with the others. */
typedef struct mm_landing_groups {
  uint32_t group;
  bool by_matrix;
  uint32_t each;
} mm_landing_groups;
/* Room for the planes of w and, where it has any (w->plane[0]), their way there. MM_BUG for a scheme with scales that are not bytes, f32,
 * bf16 or e8m0. w stays where it is as long as the plan. Four-bit codes whose matrices cannot be put in order one by one arrive together,
 * whatever `groups` says. */
MM_MUST_USE bool mm_landing_matrix(mm_landing_plan *p, const mm_packed *w, const char *name, const mm_landing_layout *y,
                                   mm_landing_groups groups, mm_landing_places *out, mm_err *err);
/* Room for w's values as f32, [lead, n, k]. *lands: whether they come from its plane as it is stored; else they are the caller's to put
 * there. */
MM_MUST_USE bool mm_landing_values(mm_landing_plan *p, const mm_packed *w, const char *name, uint32_t group, uint64_t *at, bool *lands,
                                   mm_err *err);
/* After the last one: what is read of the mapped parts of a rank is hashed, against these digests. */
MM_MUST_USE bool mm_landing_verify(mm_landing_plan *p, const mm_shards *digests, uint32_t rank, mm_err *err);
void mm_landing_close(mm_landing_plan *p);

/* Bytes [first, first + bytes) of a landing, at `from` in a chunk. */
typedef struct mm_landing_piece {
  size_t landing;
  uint64_t first, bytes, from;
} mm_landing_piece;
/* Finds the piece of want i that the chunk holds; false if there is none. */
bool mm_landing_find(const mm_landing_plan *p, const mm_chunk *c, size_t want, mm_landing_piece *out);
/* The piece has arrived. For four-bit codes, words [*word, *word + *words) of four bytes in the arena, from the landing's place on, are
 * whole now and were not before. Groups that it was the last of are added to p->full. */
void mm_landing_arrive(mm_landing_plan *p, const mm_landing_piece *x, uint64_t *word, uint64_t *words);
/* Requests the parts that arrive with groups [first, first + count), as far as they arrive one by one. */
void mm_landing_prefetch(const mm_landing_plan *p, mm_reader *r, uint32_t first, uint32_t count);

#ifdef __cplusplus
}
#endif
#endif
