/* A Hugging Face checkpoint as one namespace: config, index, every safetensors header, and weights as matrices whatever file,
 * naming, fusion or encoding they come in. Everything here is checked before a weight byte is read. */
#ifndef MM_CONVERT_HF_H
#define MM_CONVERT_HF_H

#include "convert/model/declared.h"
#include "convert/model/module_groups.h"
#include "convert/model/rule.h"
#include "formats/hash.h"
#include "formats/pack.h"
#include "formats/safetensors.h"
#include "quant/quant.h"

typedef struct mm_hf_file {
  const char *name; /* base name in the index */
  char *path;
  mm_file_id id;
  mm_digest header; /* SHA-256 of the first data_start bytes */
  bool freed;       /* removed after its use, under --delete-source */
} mm_hf_file;

typedef struct mm_hf_tensor {
  const char *name;     /* canonical naming */
  const char *original; /* as in the file */
  uint64_t offset, bytes;
  mm_shape shape;
  mm_dtype dtype;
  uint32_t file;
  uint32_t matrix, plane; /* of a packed source (packed_source.c) */
  bool found;             /* its header entry was seen */
  bool used;
  uint8_t left_out; /* 1 + its entry of mm_arch.left_out, or 0 */
} mm_hf_tensor;

/* The checkpoint's declaration of its quantization, from any of its places (encoding_config.c). Where tensors say more, they are believed.
 */
typedef struct mm_quantization {
  const char *method; /* quant_method or what stands for it; NULL: none is declared */
  const char *path;   /* of the file that declares it */
  mm_cell block;      /* of block FP8; {0, 0}: none is declared */
  bool whole;         /* the block is declared to be null: a matrix has one scale */
  bool block_assumed; /* the block is not declared: it is the only one that fits */
  uint32_t group[4];  /* columns per scale; UINT32_MAX: all of them */
  unsigned groups;    /* 0: nothing is said, or different things for different modules */
  unsigned bits;      /* widths of words' codes, 4 | 8; 0: nothing is said */
  bool zeros, order;  /* every integer matrix has zero points, a g_idx */
  bool gptq, symmetric;
  const mm_module_groups *differing; /* NULL, or the groups of modules that zeros, order and symmetric depend on */
  uint32_t zero_less;                /* GPTQ stores words of zero points less this in each: 1 in its first format, 0 in its second */
  bool less_assumed;                 /* no key says which of the two */
  mm_declared_inputs inputs;
  unsigned kinds, scales; /* mm_declared_kinds of weights, mm_declared_scales of inputs */
  bool e5m2;              /* FP8 codes are declared to be E5M2 */
} mm_quantization;

typedef enum mm_found { MM_FOUND, MM_ABSENT, MM_FAILED } mm_found;

/* One of the rules that share a packed name, for one layer and expert. */
typedef struct mm_rule_piece {
  const mm_rule *const *rules; /* [count] */
  unsigned count, i;
  uint32_t layer, expert;
} mm_rule_piece;

struct mm_hf;
struct mm_hf_reader;
struct mm_matrix;

/* A kind of source: Hugging Face files (hf.c, matrix.c) or a packed checkpoint (packed_source.c). Functions as mm_hf_matrix and so on. */
typedef struct mm_source_kind {
  mm_found (*matrix)(struct mm_hf *hf, const mm_model *m, const mm_rule_piece *p, struct mm_matrix *out, mm_err *err);
  bool (*read)(struct mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, void *buf, size_t n, mm_err *err);
  bool (*stream)(struct mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, uint8_t *buf, size_t n, size_t *skew, mm_err *err);
} mm_source_kind;
extern const mm_source_kind mm_source_files, mm_source_packed;
mm_found mm_files_matrix(struct mm_hf *hf, const mm_model *m, const mm_rule_piece *p, struct mm_matrix *out, mm_err *err);

typedef struct mm_hf {
  const mm_source_kind *kind;
  char *dir;
  char *config_path;
  mm_json *config;
  size_t file_count, tensor_count;
  mm_hf_file *file;
  mm_hf_tensor *tensor; /* sorted by canonical name */
  mm_quantization quantization;
  struct mm_packed_source *packed; /* NULL unless the source is a packed checkpoint, */
  const mm_pack *manifest;         /* and its manifest */
  bool names_only;                 /* opened from the index alone: shapes come from the rules, no weights can be read */
  bool outside_allowed;            /* links may lead anywhere */
  bool nonfinite_allowed;          /* weights that are NaN or infinite are read as 0 */
  struct mm_follow *follow;        /* NULL, or how files are awaited that are being downloaded (convert/decode/follow.h), */
  bool (*await)(const struct mm_hf *hf, uint32_t file, mm_err *err); /* and what waits for one before it is opened */
  bool dry_run; /* only planned: where weights are absent, names_only is what the user may want */
  size_t text_count;
  struct mm_hf_text {
    const char *path;
    mm_file_id id;
  } text[3];           /* config, quantization and index as they were read */
  char *index_text;    /* names stand in it; NULL: there is no index */
  bool total_given;    /* the index has a metadata.total_size */
  uint64_t total_size; /* that, or 0 */
  mm_arena arena;
} mm_hf;

typedef struct mm_hf_options {
  bool allow_outside_links; /* follow symlinks out of the checkpoint and its Hub cache */
  bool names_only;          /* for planning when only config.json and the index are there */
  bool allow_nonfinite;     /* read weights that are NaN or infinite as 0 */
  bool one_thread;          /* read headers with this thread alone */
  bool dry_run;             /* only a plan is wanted */
  bool for_plan;            /* a config that mm_plan_build would refuse is refused before any header is read */
} mm_hf_options;

/* dir is a directory or what mm_source_locate makes one of. */
MM_MUST_USE bool mm_hf_open(mm_hf *hf, const char *dir, const mm_hf_options *o, mm_err *err);
void mm_hf_close(mm_hf *hf);
/* False if names are those of quantised weights and no file describes the quantization. */
bool mm_hf_described(const mm_hf *hf);
/* Types follow from names in BF16 and block FP8 alone: MM_USAGE E_USAGE for other sources, of which only names are known. */
MM_MUST_USE bool mm_hf_types_named(const mm_hf *hf, mm_err *err);
/* Name i of the files that describe a quantization where config.json does not; NULL: there are no more. */
const char *mm_hf_description(size_t i);
/* Puts tensors in order of their canonical names. The second of two of one name (the first is before it); NULL: there are none. */
const mm_hf_tensor *mm_hf_sort(mm_hf *hf);
mm_hf_tensor *mm_hf_find(const mm_hf *hf, const char *canonical);
/* Whether there is one, and the count of its numbers, 0 for one beyond 64 bits. */
bool mm_hf_numbers(const void *hf, const char *canonical, uint64_t *count);
/* Its file and its name there, for a failure. */
/* What the header of file number `file` says of a tensor, t where the index lists it, else NULL: MM_BAD_INPUT if it is not of that file. */
MM_MUST_USE bool mm_hf_listed(const mm_hf *hf, const mm_hf_tensor *t, uint32_t file, const mm_st_tensor *s, mm_err *err);
void mm_hf_take(mm_hf_tensor *t, const mm_st_tensor *s);
static inline mm_where mm_hf_at(const mm_hf *hf, const mm_hf_tensor *t) { return mm_at(hf->file[t->file].path, t->original); }
/* A file of the checkpoint may be a link into its own folder or into the Hub cache's blobs (snapshots/REV/x -> ../../blobs/SHA256); one
 * that leads elsewhere is MM_BAD_INPUT E_FS_OUTSIDE unless that was allowed. A path that cannot be resolved passes: opening it gives the
 * reason. */
MM_MUST_USE bool mm_hf_inside(const mm_hf *hf, const char *path, mm_err *err);
/* A packed checkpoint as a source (packed_source.c): its tensors are the matrices that it was made from, encoded as its schemes store
 * them, gathered from its ranks when they are read. Its bytes are proven by its digests before they are used (MM_INTEGRITY E_DIGEST). */
bool mm_packed_is(const char *dir);
/* Opens all ranks of the directory hf->dir; hf->config_path is set too. Checks the manifest, every header and the companion files. */
MM_MUST_USE bool mm_packed_open(mm_hf *hf, mm_err *err);
void mm_packed_close(mm_hf *hf); /* of any hf */

/* Every file still is what it was at open; MM_IO E_CHANGED otherwise. */
MM_MUST_USE bool mm_hf_unchanged(const mm_hf *hf, mm_err *err);

/* The companion tensors of the codes, where the encoding has them. */
typedef enum mm_companion {
  MM_SCALE,  /* multiplies the codes under each of its cells */
  MM_GLOBAL, /* one number over all scales */
  MM_ZERO,   /* integer codes that stand for 0 */
  MM_ORDER,  /* the group of each column ("g_idx") */
  MM_SMOOTH, /* multiplies each column ("pre_quant_scale") */
  MM_INPUT,  /* static scale of the activations; says nothing about the weights */
  MM_SIDES,  /* rows and columns ("weight_shape"), which words alone leave open */
  MM_COMPANIONS
} mm_companion;

/* The elements of one matrix inside a tensor that may hold more. */
typedef struct mm_source {
  const mm_hf_tensor *tensor; /* NULL: there is none */
  uint64_t at;                /* byte offset of the first element */
  uint64_t line;              /* elements from one line to the next */
} mm_source;

/* One matrix of the model as it lies in the source. */
typedef struct mm_matrix {
  const struct mm_encoding *encoding;
  const mm_hf_tensor *weight; /* of the codes */
  uint64_t at, line;          /* as in mm_source */
  mm_source part[MM_COMPANIONS];
  mm_cell cell;        /* weights under one scale */
  uint32_t rows, cols; /* cols is 1 for a vector */
  bool zeros;          /* declared: it has zero points */
  bool symmetric;      /* declared: all its zero points are the middle code */
  bool reordered;      /* declared: its columns are not in the order of their groups (desc_act) */
  bool positive;       /* its numbers are scales of a KV cache, which divide */
  int32_t steps;       /* of its global scale (mm_global_step); of a source that is not packed from when its tensor is planned */
} mm_matrix;

/* Resolves a piece: by its own name, or inside a source tensor
 * that already has the packed (fused) name. Checks dtype, shape and scale and marks what it takes as used. A packed source has the piece's
 * own name alone, and MM_INTEGRITY E_SHAPE where config.json means other extents. */
static inline mm_found mm_hf_matrix(mm_hf *hf, const mm_model *m, const mm_rule_piece *p, mm_matrix *out, mm_err *err) {
  return hf->kind->matrix(hf, m, p, out, err);
}
/* Fails on tensors nobody used, but for those known to be redundant (rotary and decay buffers, layers past the last). */
MM_MUST_USE bool mm_hf_all_used(const mm_hf *hf, const mm_model *m, mm_err *err);

/* Into p what a's left_out says of the source: prefixes that some tensor has. Of a packed source what its manifest says. */
void mm_hf_left_out(const mm_hf *hf, const mm_arch *a, mm_pack *p);
/* What hides a missing name: a prefix that a tool left on most names, or another tool's own naming; in words behind "; ", or nothing. */
void mm_hf_name_hint(const mm_hf *hf, const char *missing, char *out, size_t cap);

/* The number of unused tensors that are of layers past the last. */
size_t mm_hf_past_last(const mm_hf *hf, const mm_model *m);
/* True if the bytes of all tensors of the index are known, so that its total_size can be compared with them. */
bool mm_hf_total_known(const mm_hf *hf);
/* True if the index states another total than that of all its tensors, whose headers were read; *bytes is the tensors' total. */
bool mm_hf_total_wrong(const mm_hf *hf, uint64_t *bytes);

/* Reads weights for one thread; keeps at most two files open. */
typedef struct mm_hf_reader {
  const mm_hf *hf;
  struct {
    uint32_t file;
    mm_file open;
    int direct; /* O_DIRECT descriptor of the same file, or -1 */
  } slot[2];
  unsigned last;
} mm_hf_reader;
void mm_hf_reader_open(mm_hf_reader *r, const mm_hf *hf);
void mm_hf_reader_close(mm_hf_reader *r);
/* n bytes from byte `at` of tensor t. */
MM_MUST_USE static inline bool mm_hf_read(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, void *buf, size_t n, mm_err *err) {
  return r->hf->kind->read(r, t, at, buf, n, err);
}
/* The same for much data, past the page cache; buf and *skew as mm_file_stream. */
MM_MUST_USE static inline bool mm_hf_stream(mm_hf_reader *r, const mm_hf_tensor *t, uint64_t at, uint8_t *buf, size_t n, size_t *skew,
                                            mm_err *err) {
  *skew = 0;
  return r->hf->kind->stream(r, t, at, buf, n, skew, err);
}

#endif
