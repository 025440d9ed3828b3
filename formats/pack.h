/* The packed checkpoint: manifest and part files (FORMAT.md is the description for readers without this source). */
#ifndef MM_FORMATS_PACK_H
#define MM_FORMATS_PACK_H

#include "formats/hash.h"
#include "formats/model.h"
#include "formats/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_PACK_FORMAT     "minimax-packed"
#define MM_PACK_VERSION    1
#define MM_PACK_VERSION2   2 /* of a manifest that declares grids (FORMAT-2.md) */
#define MM_PACK_VERSION3   3 /* of a manifest of an extended model (FORMAT-3.md) */
#define MM_PACK_VERSION4   4 /* of a manifest with placed experts, or groups of attention (FORMAT-4.md) */
#define MM_PACK_VERSION5   5 /* of a manifest with steps of global scales (FORMAT-5.md) */
#define MM_LEFT_OUT_MAX    16
#define MM_MANIFEST        "manifest.json"
#define MM_DIGESTS         "minimax-digests.json" /* lists the files of an unsharded checkpoint and their digests */
#define MM_DIGESTS_WORD    "minimax-digests"
#define MM_MANIFEST_MAX    (UINT64_C(256) << 20)
#define MM_MANIFEST_ENDING "\"sha256\":\"%s\"\n}\n" /* its last bytes: the digest of all before them */
#define MM_SIGNATURE       "model.sig"              /* optional companion of the manifest (loader/archive/signature.h) */
#define MM_ARCHIVE         "archive.json"           /* makes a directory an archive (loader/archive/archive.h) */
#define MM_PACK_PLANES     4
#define MM_PACK_PIECES     3
#define MM_MAX_TP          1024
#define MM_VOCAB_MULTIPLE  64 /* vocabularies are padded to this, as serving engines do */

/* Along the cut axis: local rows (or columns) [at, at + count) of a rank are [from, from + count) of the whole matrix; the rest
 * of the local extent is zero padding. */
typedef struct mm_range {
  uint32_t at, from, count;
} mm_range;

typedef enum mm_axis { MM_AXIS_NONE, MM_AXIS_ROWS, MM_AXIS_COLS } mm_axis; /* NONE: every rank holds all of it */

typedef struct mm_cut {
  mm_axis axis;
  uint32_t whole; /* extent of the uncut matrix along the axis (0 for NONE) */
  uint32_t local; /* extent on every rank (0 for NONE) */
  mm_range *rank; /* [tp], by rank within a stage; NULL for NONE */
} mm_cut;

/* One source matrix (or a stack of them, "{e}" in its name) inside a packed tensor. Pieces lie side by side along rows. */
typedef struct mm_piece {
  const char *source; /* the Hugging Face name it came from, "{e}" standing for the expert */
  uint32_t rows;      /* of the uncut matrix */
  uint32_t local_at;  /* first local row of this piece */
  uint32_t local_rows;
  uint32_t cut; /* index into mm_pack.cut */
} mm_piece;

/* The cells of a plane before cuts, where they are not the scheme's. */
typedef struct mm_pack_grid {
  bool known;
  uint32_t n, k;
} mm_pack_grid;

typedef struct mm_pack_plane {
  const char *suffix;
  mm_dtype dtype;
  uint32_t cell_n, cell_k; /* as in quant.h; 0 = whole extent */
  mm_pack_grid grid;
} mm_pack_plane;

/* The order of the experts of a stack over all ranks, which rank group g holds from index g·lead on. Both are NULL where experts are in
 * order of their ids, else permutations of 0 to whole_lead - 1 and each other's inverse. */
typedef struct mm_expert_order {
  const uint32_t *expert; /* [whole_lead]: the expert at an index */
  const uint32_t *index;  /* [whole_lead]: the index of an expert */
} mm_expert_order;

/* A matrix whose source stored the reciprocal of the scale in plane 2, as another F32 number than the nearest to 1 / scale. */
typedef struct mm_global_step {
  uint32_t expert, piece;
  int32_t steps; /* from the F32 number nearest to 1 / scale to the one that the source stored: 1 or -1 */
} mm_global_step;

typedef struct mm_pack_tensor {
  const char *name; /* without the plane's suffix */
  const char *scheme;
  bool vector;         /* stored as [rows]; cols is 1 */
  uint32_t lead;       /* 0: [rows, cols]; E/ep: [E/ep, rows, cols] */
  uint32_t whole_lead; /* E over all ranks, 0 with lead 0 */
  uint32_t stage;      /* pipeline stage that holds it */
  uint32_t rows, cols; /* on one rank */
  uint32_t whole_cols; /* of the uncut matrix */
  unsigned plane_count, piece_count;
  mm_pack_plane plane[MM_PACK_PLANES];
  mm_piece piece[MM_PACK_PIECES];
  float input_scale; /* static scale of the activations; 0: none */
  mm_expert_order order;
  size_t step_count;
  mm_global_step *step; /* by expert, then by piece */
} mm_pack_tensor;

typedef struct mm_part {
  const char *file; /* plain base name */
  uint64_t size;
  mm_digest root;
  size_t block_count;
  mm_digest *block; /* one per 4 MiB; NULL where its rank's digests were not asked for */
} mm_part;

typedef struct mm_rank_parts {
  size_t part_count;
  mm_part *part;
} mm_rank_parts;

/* A companion file copied byte for byte, or a source file's fingerprint. */
typedef struct mm_pack_file {
  const char *name;
  uint64_t size;
  mm_digest sha256; /* companions: of the file; sources: of the safetensors header (prefix included) */
} mm_pack_file;

/* The draft of an output (--draft, --draft-quant), or nothing. */
typedef struct mm_drafted {
  const char *kind, *quant; /* "dflash" or "eagle3"; a scheme, or "none" */
  uint64_t bytes;           /* of its file; 0: there is none */
  mm_digest digest;         /* of it; zero without one, and in a dry run */
} mm_drafted;

/* Tensors of the source whose names begin with `prefix`: none of them is stored. */
typedef struct mm_left_out {
  const char *prefix;
  uint64_t tensors, bytes;
} mm_left_out;

/* The treatment of a cut inside a scale's block: a finer grid (SPLIT), zeros that fill up each rank (PAD), or refusal of such a cut
 * (ERROR). */
typedef enum mm_align { MM_ALIGN_SPLIT, MM_ALIGN_PAD, MM_ALIGN_ERROR } mm_align;
#define MM_ALIGN_WORDS "split|pad|error"
const char *mm_align_word(mm_align a);
bool mm_align_find(const char *word, mm_align *out); /* false for another word */

/* The reader allocates every string and array in `arena`, and a writer should too: close frees nothing else. */
typedef struct mm_pack {
  char *dir;
  char *tool;  /* "minimax-convert 0.2.0" */
  char *quant; /* the recipe, as --quant reads it */
  mm_align tp_align;
  char *target_format; /* of an unsharded checkpoint whose digests these are: how it is spelt, or "none"; else NULL */
  mm_model model;
  uint32_t tp, ep, pp; /* ranks: pp·tp of them, rank = stage·tp + tensor-parallel rank; ep divides tp */
  uint32_t attn_tp; /* ranks that attention, embedding and head are cut for, a divisor of tp; each group of as many ranks has all of them.
                     * 0: tp, one group (mm_pack_attn_tp) */
  size_t tensor_count, cut_count, source_count, file_count;
  mm_pack_tensor *tensor; /* in layer order; the same on every rank of its stage */
  mm_cut *cut;
  mm_rank_parts *rank; /* [pp·tp] */
  mm_pack_file *source, *file;
  size_t left_out_count;
  mm_left_out left_out[MM_LEFT_OUT_MAX];
  mm_digest text_digest; /* of the manifest's text, which has the digests of all files */
  mm_digest plan;        /* of the plan: also in every part's metadata, so parts of different runs never mix */
  size_t dead_rows;      /* ids whose lm_head row is all zero: never to be sampled */
  uint32_t *dead_row;
  mm_arena arena;
} mm_pack;

static inline uint32_t mm_pack_ranks(const mm_pack *p) { return p->pp * p->tp; }
/* Ranks of a group that has all of attention, and the number of these groups in a stage. */
static inline uint32_t mm_pack_attn_tp(const mm_pack *p) { return p->attn_tp ? p->attn_tp : p->tp; }
static inline uint32_t mm_pack_groups(const mm_pack *p) { return p->tp / mm_pack_attn_tp(p); }
/* True if both are cut by the same options. */
static inline bool mm_pack_same_cut(const mm_pack *a, const mm_pack *b) {
  return a->tp == b->tp && a->ep == b->ep && a->pp == b->pp && a->attn_tp == b->attn_tp && a->tp_align == b->tp_align;
}
/* True if tensor t belongs to a rank. */
static inline bool mm_pack_holds(const mm_pack *p, const mm_pack_tensor *t, uint32_t rank) { return rank / p->tp == t->stage; }
/* The index of a rank's first expert in a stack: tp/ep ranks share the same experts and cut each among them. */
static inline uint32_t mm_pack_first_lead(const mm_pack *p, const mm_pack_tensor *t, uint32_t rank) {
  return rank % p->tp / (p->tp / p->ep) * t->lead;
}

/* The index of an expert in a stack over all ranks: its id, unless experts are placed. */
static inline uint32_t mm_pack_index(const mm_pack_tensor *t, uint32_t expert) { return t->order.index ? t->order.index[expert] : expert; }
/* Sets a stack's order from expert[whole_lead], the experts by index, copied into the arena. *permutes: the list is a permutation; else the
 * order stays as it was. */
MM_MUST_USE bool mm_pack_set_order(mm_pack *p, mm_pack_tensor *t, const uint32_t *expert, bool *permutes, mm_err *err);
/* True if the manifest places experts. */
bool mm_pack_placed(const mm_pack *p);

/* The companion of that name, or NULL. */
const mm_pack_file *mm_pack_find_file(const mm_pack *p, const char *name);
/* The steps of one matrix's global scale; 0 without an entry. */
int32_t mm_pack_steps(const mm_pack_tensor *t, uint32_t expert, uint32_t piece);
/* True if the two were made from files of the same names, sizes and headers. */
bool mm_pack_same_sources(const mm_pack *a, const mm_pack *b);
/* True if the same version of the same program made both, whatever it says of the numbers that the source had (", from gptq"). */
bool mm_pack_same_version(const mm_pack *a, const mm_pack *b);
/* True if no rank that both have is in parts of other sizes. */
bool mm_pack_same_sizes(const mm_pack *a, const mm_pack *b);
/* True if experts lie alike, as far as the two have the same tensors. */
bool mm_pack_same_places(const mm_pack *a, const mm_pack *b);
/* True if the two have the same steps of global scales. */
bool mm_pack_same_steps(const mm_pack_tensor *a, const mm_pack_tensor *b);
/* MM_PACK_VERSION5 where a tensor has steps of global scales, else MM_PACK_VERSION4 where experts are placed or attention has groups of
 * ranks, else MM_PACK_VERSION3 of an extended model, else MM_PACK_VERSION2 where a plane has a grid, else MM_PACK_VERSION: what stands in
 * the manifest and in every part. */
int mm_pack_version(const mm_pack *p);
/* Stored shape of plane p on one rank: [lead?, cells…], or [rows] for a vector. */
mm_shape mm_pack_plane_shape(const mm_pack_tensor *t, unsigned p);
/* The local rows and columns of a piece that are the rank's own; the rest of local_rows x cols is padding. Rows count from the tensor's
 * first. */
typedef struct mm_own {
  uint32_t row, rows, col, cols;
} mm_own;
mm_own mm_pack_own(const mm_pack *p, const mm_pack_tensor *t, unsigned piece, uint32_t rank);
/* True if cell (i, j) of plane `plane` covers a weight of the rank's own, and not padding alone. */
bool mm_pack_covers(const mm_pack *p, const mm_pack_tensor *t, unsigned plane, uint32_t rank, uint32_t i, uint32_t j);
/* The largest divisor of `cell` that is a grid for a piece on every rank of c: the piece, which begins with local row `base` (0 along
 * columns), starts on it, and local and whole positions differ by a multiple of it, so that each stored cell lies in one cell of the whole
 * matrix. Codes, which cannot be repeated, also start and end on it. */
uint32_t mm_cut_grid(const mm_cut *c, uint32_t tp, uint32_t base, uint32_t cell, bool codes);
/* "model-rank-00003-part-00001.safetensors" */
void mm_part_name(char out[64], uint32_t rank, uint32_t part);
/* True if this is the name of a part of any rank, or of a part in an archive, which ends in ".zst". */
bool mm_part_named(const char *name);

/* Reads and checks DIR/manifest.json: everything a reader relies on (ranges inside extents, cuts of tp entries, cells, pieces
 * that tile the rows, base names, digests, counts). MM_INTEGRITY E_MANIFEST; other versions MM_UNSUPPORTED E_VERSION. */
MM_MUST_USE bool mm_pack_open(mm_pack *p, const char *dir, mm_err *err);
/* The same, but only of these ranks are the blocks' digests kept and held against the root of their part; those of others are digests of
 * the right number. Each ends with its own digest. A rank that there is not is nobody's. */
MM_MUST_USE bool mm_pack_open_ranks(mm_pack *p, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err);
/* mm_pack_open from memory (for fuzzing); dir may be any text. */
MM_MUST_USE bool mm_pack_parse(mm_pack *p, const char *dir, const char *text, size_t n, mm_err *err);
void mm_pack_close(mm_pack *p); /* accepts a zeroed or half-opened one */
/* Reads and checks DIR/minimax-digests.json: tool, quant, target format, plan, the part files as those of one rank, sources and files. The
 * file holds no model and no tensor. MM_INTEGRITY E_MANIFEST; other versions MM_UNSUPPORTED E_VERSION. */
MM_MUST_USE bool mm_digests_open(mm_pack *p, const char *dir, mm_err *err);
/* Its text, a deterministic function of *p; free() it. */
char *mm_digests_text(const mm_pack *p, mm_err *err);
/* The manifest's text, a deterministic function of *p; free() it. */
char *mm_pack_text(const mm_pack *p, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
