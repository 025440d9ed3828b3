/* The plan: every output byte (file, offset, which source rows fill it) fixed before a weight byte is read. Dry run, exact size,
 * free-space check, parallel writing and every refusal follow from this one object. */
#ifndef MM_CONVERT_PLAN_H
#define MM_CONVERT_PLAN_H

#include "convert/hf.h"
#include "convert/recipe.h"
#include "formats/pack.h"

typedef enum mm_align { MM_ALIGN_SPLIT, MM_ALIGN_PAD, MM_ALIGN_ERROR } mm_align;

typedef struct mm_plan_options {
  const char *quant;   /* a recipe (recipe.h): "none", "bf16", "nvfp4a16; *self_attn*=block_fp8" */
  uint32_t tp, ep, pp; /* ep divides tp: tp/ep ranks share experts and cut them; pp stages of whole layers */
  mm_align align;      /* what to do where a cut falls inside a scale's block */
  uint64_t part_size;  /* a part ends before it would exceed this (one larger tensor still gets a part of its own) */
  const char *ranks;   /* "0,2-5": only these ranks\' files are made; NULL: all */
} mm_plan_options;

/* How a packed tensor is made; parallel to pack.tensor. */
typedef struct mm_plan_tensor {
  const mm_rule *rule[MM_PACK_PIECES];
  const mm_scheme *scheme;
  mm_search search; /* how the scheme chooses its scales */
  uint32_t layer;
  uint32_t part;                       /* index into plan.part */
  uint64_t offset[MM_PACK_PLANES];     /* from the part's data start */
  uint64_t lead_bytes[MM_PACK_PLANES]; /* of one matrix of the stack, stored, on one rank */
  mm_matrix *matrix;                   /* [max(1, lead)][piece_count] */
} mm_plan_tensor;

/* A unit of work: rows [row, row + rows) of one piece of one stack entry, or (piece == MM_ALL_PIECES) the whole entry. */
#define MM_ALL_PIECES UINT32_MAX
typedef struct mm_step {
  uint32_t tensor, lead, piece, row, rows;
} mm_step;

/* One part on one rank. Header bytes include the length prefix. */
typedef struct mm_plan_file {
  void *header;
  size_t header_bytes;
  uint64_t size; /* of the file */
} mm_plan_file;

/* One part: a file on every rank of its stage. */
typedef struct mm_plan_part {
  uint32_t stage, number; /* number within the stage, as in the file names */
  mm_plan_file *file;     /* [tp] */
} mm_plan_part;

typedef struct mm_plan {
  const mm_hf *hf;
  mm_recipe recipe;
  mm_pack pack; /* the manifest to be; digests are filled by the writer */
  mm_plan_tensor *tensor;
  uint32_t part_count; /* of all stages */
  mm_plan_part *part;
  bool *wanted; /* [pp·tp] ranks whose files are made */
  size_t step_count;
  mm_step *step;         /* in part order */
  uint64_t source_bytes; /* weight bytes that will be read */
  uint64_t output_bytes; /* of all part files, headers included */
} mm_plan;

static inline bool mm_plan_wants(const mm_plan *p, uint32_t part, uint32_t rank) {
  return p->wanted[p->part[part].stage * p->pack.tp + rank];
}
/* The manifest's entry of a part's file on a wanted rank; rank counts within the stage. */
static inline mm_part *mm_plan_entry(const mm_plan *p, uint32_t part, uint32_t rank) {
  return &p->pack.rank[p->part[part].stage * p->pack.tp + rank].part[p->part[part].number];
}

/* Builds the plan or refuses: infeasible tp (MM_UNSUPPORTED E_TP, naming the dimension and the sizes that would do), missing or
 * unknown tensors, mixed encodings. Borrows hf until close. */
bool mm_plan_build(mm_plan *p, mm_hf *hf, const mm_plan_options *o, mm_err *err);
void mm_plan_close(mm_plan *p);

/* --- between the files of the plan --- */
/* Rows of a strip: as many as fit MM_STRIP_BYTES of f32, a multiple of the scheme's strip and of the source's block. */
#define MM_STRIP_BYTES (UINT64_C(8) << 20)
uint32_t mm_strip_rows(const mm_hf *hf, const mm_scheme *s, uint32_t cols);
/* True when the source's bytes are stored as they are (codes copied, scales widened to f32). */
bool mm_plan_copies(const mm_scheme *s, const mm_matrix *x, const mm_hf *hf);
/* Cuts of the model for this tp, and the stored cells that fit them (cut.c). */
bool mm_cut_feasible(const mm_model *m, const mm_plan_options *o, const char *file, mm_err *err);
bool mm_cut_find(mm_plan *p, const mm_rule *r, mm_align align, uint32_t *index, mm_err *err);
bool mm_cut_equal(const mm_cut *a, const mm_cut *b, uint32_t tp);
bool mm_cut_cells(const mm_plan *p, mm_pack_tensor *t, const mm_scheme *s, mm_align align, mm_err *err);
/* Parts, offsets, headers, the plan's digest (layout.c). */
bool mm_layout(mm_plan *p, uint64_t part_size, mm_err *err);

#endif
