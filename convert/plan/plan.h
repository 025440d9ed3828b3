/* The plan: every output byte (file, offset, which source rows fill it) fixed before a weight byte is read. Dry run, exact size,
 * free-space check, parallel writing and every refusal follow from this one object. */
#ifndef MM_CONVERT_PLAN_H
#define MM_CONVERT_PLAN_H

#include "convert/calibration/act_scales.h"
#include "convert/calibration/placement.h"
#include "convert/calibration/second_moments.h"
#include "convert/model/recipe.h"
#include "convert/source/index.h"
#include "formats/pack.h"

#define MM_PART_SIZE (UINT64_C(4) << 30) /* unless an option says another */

typedef struct mm_plan_options {
  const char *quant;               /* a recipe (recipe.h): "none", "bf16", "nvfp4a16; *self_attn*=block_fp8" */
  uint32_t tp, ep, pp;             /* ep divides tp: tp/ep ranks share experts and cut them; pp stages of whole layers */
  uint32_t attn_tp;                /* ranks that attention, embedding and head are cut for, a divisor of tp; 0: tp */
  mm_align align;                  /* what to do where a cut falls inside a scale's block */
  uint64_t part_size;              /* a part ends before it would exceed this (one larger tensor still gets a part of its own); 0: by the
                                    * output's size, so that a source that is freed part by part needs little room (mm_lay_out) */
  const char *ranks;               /* "0,2-5": only these ranks\' files are made; NULL: all */
  const struct mm_layout *layout;  /* NULL: the packed one */
  const char *target_format;       /* target format of the Hugging Face layout, or "none"; NULL: the first that fits */
  const mm_importance *importance; /* weighs searches; NULL: none does */
  const mm_act_scales *act_scales; /* gives static scales of activations; NULL: none */
  const char *load;                /* places experts by this load file; NULL: they stay in order of their ids */
  const mm_pack *placed;           /* places experts as this manifest does; NULL: as `load` says */
  const struct mm_plan *packed;    /* unsharded: tensors take the schemes, grids and static scales of this packed plan; NULL: their own */
  bool allow_unmatched;            /* patterns that match no tensor are taken */
  bool made;                       /* planned again to look at what was made: the two files of its recipe need not be at hand */
} mm_plan_options;

/* Where a stored tensor lies. */
typedef struct mm_place {
  uint64_t offset; /* from the part's data start */
  uint64_t bytes;
} mm_place;

/* How a packed tensor is made; parallel to pack.tensor. In the Hugging Face layout a pack.tensor is a group of source matrices that
 * share their scales' range (q, k, v; w1 and w3 of one expert): its pieces all start at row 0 and each is stored by itself. */
typedef struct mm_plan_tensor {
  const mm_rule *rule[MM_PACK_PIECES];
  const mm_scheme *scheme;
  mm_search search;                      /* how the scheme chooses its scales */
  mm_cell grid;                          /* of the scales (plane 1) before cuts: the scheme's, or that of a source kept as it is */
  const struct mm_target_naming *naming; /* unsharded and quantised: the naming scheme; else NULL */
  uint32_t config_group;                 /* with a naming: columns of a scale as the target's config says it; 0: the whole row */
  const mm_hf_tensor *passed;            /* unsharded: copied byte for byte in its own shape, no part of the text model; else NULL */
  bool as_stored;                        /* the recipe names no scheme for it */
  uint32_t layer;
  uint32_t part;                                  /* index into plan.part */
  mm_place place[MM_PACK_PIECES][MM_PACK_PLANES]; /* packed: all pieces in the first */
  mm_matrix *matrix;                              /* [max(1, lead)][piece_count] */
  mm_tensor_moments moments;                      /* codes are found under them */
  const uint8_t **weights; /* parallel to matrix: mm_importance_weights' values, NULL for none; NULL: none of them has any */
} mm_plan_tensor;

/* A unit of work: rows [row, row + rows) of one piece of one stack entry, or (piece == MM_ALL_PIECES) the whole entry. */
#define MM_ALL_PIECES UINT32_MAX
typedef struct mm_step {
  uint32_t tensor, lead, piece, row, rows;
} mm_step;

/* Weights under one element of a plane before cuts. */
static inline mm_cell mm_plan_cell(const mm_plan_tensor *t, unsigned plane) { return plane == 1 ? t->grid : t->scheme->plane[plane].cell; }

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

/* A file written from memory instead of being copied from the source. */
typedef struct mm_plan_text {
  const char *name, *text;
} mm_plan_text;
#define MM_PLAN_TEXTS 3

/* Reads n bytes at `at` of a part's file of a finished output, as it is or out of an archive; any thread may. */
typedef struct mm_stored {
  bool (*read)(const void *ctx, const mm_part *part, uint64_t at, void *to, uint64_t n, mm_err *err);
  const void *ctx;
} mm_stored;

typedef struct mm_plan {
  const mm_hf *hf;
  mm_recipe recipe;
  mm_pack pack; /* the manifest to be; digests are filled by the writer */
  mm_plan_tensor *tensor;
  uint32_t part_count; /* of all stages */
  uint64_t part_size;  /* the most bytes of a part of more than one tensor */
  mm_plan_part *part;
  bool *wanted; /* [pp·tp] ranks whose files are made */
  const struct mm_layout *layout;
  const char *prefix;                           /* unsharded: of the names of the text model, such as "language_model."; else "" */
  const struct mm_target_format *target_format; /* NULL while nothing unsharded is quantised */
  mm_plan_text text[MM_PLAN_TEXTS]; /* unsharded: config.json, the model card, the target format's own file; name NULL past the end */
  const mm_importance *importance;  /* of the options */
  struct mm_calibrated {
    uint64_t weighed, too_few, no_entry; /* matrices that are searched under --importance, and why others are searched without */
    uint64_t fed_back, no_moments,
        coupled;                /* matrices rounded with error feedback, those whose moments the file lacks; coupled: of the first */
    uint64_t given, ones;       /* matrices whose source has a static scale that is taken, and those where it is exactly 1 */
    uint64_t scaled, unreached; /* tensors with a static scale; experts of theirs that calibration had none for */
  } calibrated;
  size_t step_count;
  mm_step *step;          /* in part order */
  uint64_t source_bytes;  /* weight bytes that will be read */
  uint64_t output_bytes;  /* of all part files, headers included */
  mm_placement placement; /* by a load file; nothing without one */
  mm_drafted draft;       /* that is packed, too */
  /* NULL, or true if a finished output in `dir` has the weights of this source, as far as it looks at them. */
  bool (*gives)(const struct mm_plan *plan, const char *dir, const struct mm_stored *stored, unsigned threads, mm_err *err);
} mm_plan;

static inline bool mm_plan_wants(const mm_plan *p, uint32_t part, uint32_t rank) {
  return p->wanted[p->part[part].stage * p->pack.tp + rank];
}
/* The manifest's entry of a part's file on a wanted rank; rank counts within the stage. */
static inline mm_part *mm_plan_entry(const mm_plan *p, uint32_t part, uint32_t rank) {
  return &p->pack.rank[p->part[part].stage * p->pack.tp + rank].part[p->part[part].number];
}

/* How a layout stores the tensors of a source, by their role. */
typedef struct mm_layout_roles {
  bool joins;       /* pieces that share a packed name (q, k, v; w1, w3) are rows of one tensor; false: each is stored by itself */
  bool stacks;      /* the experts of a layer are one tensor [E, n, k]; false: each is stored by itself */
  bool cuts;        /* each rank has its slice of a tensor; false: there is one rank, which has all of it */
  bool doubles_kv;  /* a scale that k and v share is stored for each; false: once */
  bool keeps_names; /* tensors have the names of the source */
  bool copies;      /* what is no part of the text model is copied in its own shape; false: left out */
} mm_layout_roles;

/* The names and shapes of stored tensors, and their files: packed shards (layout.c), or a checkpoint with Hugging Face names, "unsharded",
 * that transformers, vLLM and SGLang load (layout_hf.c). */
typedef struct mm_layout {
  const char *word, *kind;      /* "hf", of --layout; "unsharded", for people */
  const char *last, *last_kind; /* the file that is written last, such as manifest.json, and its kind: "manifest" */
  const char *digest_key;       /* of that file's digest in a summary: "manifest_sha256" */
  const char *digests;          /* the file of digests that this layout adds, or NULL: the last file has them */
  const char *const *made;      /* companions of the source that this layout makes itself, up to NULL */
  const char *format;           /* of a part's __metadata__ */
  uint64_t code;                /* in a journal */
  mm_layout_roles roles;
  bool target_formats; /* quantised tensors have the names and words of a target format of engines */
  bool extras;         /* a draft and the tokenizer's image may be among its files */
  char *(*name)(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, mm_arena *a, mm_err *err);
  mm_shape (*shape)(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane);
  char *(*file)(mm_plan *p, uint32_t rank, uint32_t number, mm_err *err); /* of a part, in the plan's arena */
  bool (*part)(const char *file, unsigned *rank, unsigned *number);       /* the part that a name begins as, from 0; false: none */
  bool (*digest)(const mm_plan *p, mm_digest *out, mm_err *err);          /* of all that fixes the output but sizes and contents */
  char *(*finish)(const mm_plan *p, mm_err *err);                         /* the text of the last file; free() it */
} mm_layout;
extern const mm_layout mm_layout_packed, mm_layout_hf;

/* Pieces of a tensor that are stored by themselves; joined ones share their tensor. */
static inline uint32_t mm_plan_stored(const mm_plan *p, size_t tensor) {
  return p->layout->roles.joins ? 1 : p->pack.tensor[tensor].piece_count;
}
/* Where a piece's plane lies, or the plane of the tensor that it is joined in. */
static inline const mm_place *mm_plan_place(const mm_plan *p, const mm_plan_tensor *t, uint32_t piece, unsigned plane) {
  return &t->place[p->layout->roles.joins ? 0 : piece][plane];
}

/* Builds the plan or refuses: infeasible tp (MM_UNSUPPORTED E_TP, naming the dimension and the sizes that would do), missing or
 * unknown tensors, mixed encodings. Borrows hf until close. */
MM_MUST_USE bool mm_plan_build(mm_plan *p, mm_hf *hf, const mm_plan_options *o, mm_err *err);
void mm_plan_close(mm_plan *p);

/* --- between the files of the plan --- */
/* Rows of a strip: as many as fit MM_STRIP_BYTES of f32, a multiple of the scheme's strip, of the source's block and of a block of coupled
 * rows; all where a target format's words are no rows of ours. */
#define MM_STRIP_BYTES (UINT64_C(8) << 20)
uint32_t mm_plan_strip_rows(const mm_plan *p, uint32_t tensor);
/* Cuts of the model for this tp, and the stored cells that fit them (cut.c). */
MM_MUST_USE bool mm_cut_feasible(const mm_model *m, const mm_plan_options *o, const char *file, mm_err *err);
MM_MUST_USE bool mm_cut_find(mm_plan *p, const mm_rule *r, mm_align align, uint32_t *index, mm_err *err);
bool mm_cut_equal(const mm_cut *a, const mm_cut *b, uint32_t tp);
MM_MUST_USE bool mm_cut_cells(const mm_plan *p, const mm_plan_tensor *pt, mm_pack_tensor *t, mm_align align, mm_err *err);
/* Parts, offsets, headers, the plan's digest (layout.c). */
MM_MUST_USE bool mm_lay_out(mm_plan *p, uint64_t part_size, mm_err *err);

#endif
