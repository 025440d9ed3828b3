/* A draft in a packed checkpoint: the companion draft.safetensors (FORMAT-DRAFT.md). A DFlash draft proposes a block of tokens in one pass;
 * its embedding and head are the target's. An EAGLE-3 draft has one layer, which proposes a token a pass, and a head of its own. */
#ifndef MM_LOADER_DFLASH_H
#define MM_LOADER_DFLASH_H

#include "formats/model.h"
#include "formats/pack.h"
#include "formats/safetensors.h"
#include "quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_DFLASH_FILE   "draft.safetensors"
#define MM_DFLASH_KEY    "minimax_draft" /* of its metadata: the config as JSON */
#define MM_DFLASH_LAYERS 16
#define MM_DFLASH_TAPS   8
#define MM_DFLASH_BLOCK  32
#define MM_EAGLE_CHAIN   7                       /* tokens that an EAGLE-3 draft proposes at most */
#define MM_DFLASH_QUANTS "block_fp8|channel_fp8" /* schemes of its matrices: codes in E4M3, scales in F32 */

typedef enum mm_draft_kind { MM_DRAFT_DFLASH, MM_DRAFT_EAGLE3 } mm_draft_kind;

/* What the metadata says; all numbers are checked against one another and the target. */
typedef struct mm_dflash_config {
  uint32_t layers, hidden, heads, kv_heads, head_dim, intermediate;
  uint32_t taps, tap[MM_DFLASH_TAPS]; /* layers of the target, ascending: the residual stream after each */
  uint32_t block;                     /* rows of a pass: the last token, then masks. EAGLE-3: 1 + MM_EAGLE_CHAIN */
  uint32_t mask_id;
  double norm_eps, rope_theta;
  uint32_t window[MM_DFLASH_LAYERS]; /* positions before a row and its own that it reads, 0: all */
  bool causal[MM_DFLASH_LAYERS];     /* rows of a block do not see those behind them */
  mm_draft_kind kind;
  /* Of EAGLE-3: */
  uint32_t vocab, draft_vocab; /* ids of the target, and of the head */
  bool mapped;                 /* d2t says which ids those are; else they are the first ones */
  bool own_embed;              /* embeddings of its own */
  bool tap_norms;              /* each tap is normalised before fc */
  bool norm_output;            /* a pass is given the output after the last norm of the pass before it; else the one before that norm */
  bool norm_before_residual;   /* the residual is what hidden_norm gives; else what it is given */
  const mm_scheme *quant;      /* of all matrices but the head and the embeddings (MM_DFLASH_QUANTS); NULL: BF16 or F32, as they came */
} mm_dflash_config;

typedef struct mm_dflash_layer {
  mm_packed input_norm, post_norm; /* [H] */
  mm_packed qkv;                   /* [(heads + 2 · kv_heads) · d, H or of EAGLE-3 2 · H], q, then k, then v */
  mm_packed kv;                    /* its rows of k and v */
  mm_packed out;                   /* [H, heads · d] */
  mm_packed q_norm, k_norm;        /* [d]; not of EAGLE-3 */
  mm_packed up, down;              /* [2 · intermediate, H], gate rows, then up rows; [H, intermediate] */
} mm_dflash_layer;

typedef struct mm_dflash {
  mm_dflash_config c;
  mm_packed fc;                       /* [H, taps · H], columns of the first tap first */
  mm_packed context_norm, last_norm;  /* [H] */
  mm_packed tap_norm[MM_DFLASH_TAPS]; /* [H] under tap_norms */
  mm_packed head, embed;              /* [draft_vocab, H]; [vocab, H] under own_embed */
  mm_packed d2t;                      /* under mapped: int64 [draft_vocab], no scheme; id i of the head is the target's i + d2t[i] */
  mm_dflash_layer layer[MM_DFLASH_LAYERS];
  mm_st st;
  mm_map map;
} mm_dflash;

/* Maps DIR/draft.safetensors and checks it against the target: MM_INTEGRITY E_DRAFT for a file that FORMAT-DRAFT.md does not allow,
 * MM_UNSUPPORTED E_DRAFT for a target that has none (norms with an offset, another activation, lightning layers). An absent file is
 * MM_INTEGRITY too, as each that a manifest lists. */
MM_MUST_USE bool mm_dflash_open(mm_dflash *d, const char *dir, const mm_model *target, mm_err *err);
/* The mapped file has the size and the digest of the manifest's entry: else MM_INTEGRITY E_DIGEST. */
MM_MUST_USE bool mm_dflash_verify(const mm_dflash *d, const mm_pack_file *f, mm_err *err);
/* The draft that the manifest lists, if it does, is that of the model; with `finite`, all of its numbers are, and scales are of their
 * schemes: else MM_INTEGRITY E_NONFINITE, E_SCALE. */
MM_MUST_USE bool mm_dflash_check(const mm_pack *p, bool finite, mm_err *err);
void mm_dflash_close(mm_dflash *d); /* accepts a zeroed or half-opened one */
/* The target's id of id i of an EAGLE-3 draft's head. */
static inline int32_t mm_dflash_id(const mm_dflash *d, uint32_t i) {
  return (int32_t)(i + (d->c.mapped ? ((const int64_t *)d->d2t.plane[0])[i] : 0));
}
/* A draft of random weights, made in memory (quant/random.h), for minimax-bench: in BF16, matrices in c->quant where that is set. MM_LIMIT.
 */
MM_MUST_USE bool mm_dflash_random(mm_dflash *d, const mm_dflash_config *c, mm_err *err);

/* The config as the metadata has it; free() it. NULL: out of memory. */
char *mm_dflash_text(const mm_dflash_config *c, mm_err *err);
/* Reads such a text, and checks it alone: `status` is that of one that breaks the rules. */
MM_MUST_USE bool mm_dflash_parse(mm_dflash_config *c, const char *text, const char *path, mm_status status, mm_err *err);
/* Every step[i] of d2t[draft_vocab] leads from i to an id of the target. */
MM_MUST_USE bool mm_dflash_check_ids(const mm_dflash_config *c, const int64_t *step, const char *path, mm_status status, mm_err *err);
/* Columns of the widest matrix under c->quant; 0 without. */
uint32_t mm_dflash_widest(const mm_dflash_config *c);
/* A scheme of MM_DFLASH_QUANTS by its name, or a synonym; NULL for another word. */
const mm_scheme *mm_dflash_scheme(const char *word);
/* The numbers of tensor t of the file `data` are finite: else `status` E_NONFINITE, or with `found` they are added to it. Other types than
 * BF16, F32 and F8_E4M3 are. */
MM_MUST_USE bool mm_dflash_finite(const mm_st_tensor *t, const uint8_t *data, const char *path, mm_status status, uint64_t *found,
                                  mm_err *err);
/* Puts 0 in place of those that are not, among n bytes of whole numbers. */
void mm_dflash_zero(mm_dtype dtype, uint8_t *bytes, uint64_t n);
/* The shapes fit c->quant, if it is set: else `status` E_DRAFT naming the tensor. */
MM_MUST_USE bool mm_dflash_fits_quant(const mm_dflash_config *c, const char *path, mm_status status, mm_err *err);
/* Whether a draft fits the target. */
MM_MUST_USE bool mm_dflash_fits(const mm_dflash_config *c, const char *path, const mm_model *target, mm_status status, mm_err *err);

/* Tensors of a draft: their names and shapes, layer by layer; false past the end. */
#define MM_DFLASH_TENSORS (3 + 8 * MM_DFLASH_LAYERS)
typedef struct mm_dflash_tensor {
  char name[64];
  uint32_t rows, cols;     /* cols 0: a vector */
  size_t at;               /* offsetof in mm_dflash */
  bool ids;                /* a vector of I64 */
  const mm_scheme *scheme; /* that it is stored in; NULL: BF16 or F32, as it came */
} mm_dflash_tensor;
bool mm_dflash_tensor_at(const mm_dflash_config *c, uint32_t i, mm_dflash_tensor *out);
/* What the file has of a tensor: its numbers, or one after another the planes of its scheme. `kept`: the type of one without a scheme.
 * False past the last plane. */
#define MM_DFLASH_STORED (2 * MM_DFLASH_TENSORS)
typedef struct mm_dflash_stored {
  char name[80];
  mm_dtype dtype;
  mm_shape shape;
} mm_dflash_stored;
bool mm_dflash_stored_at(const mm_dflash_tensor *t, unsigned plane, mm_dtype kept, mm_dflash_stored *out);

#ifdef __cplusplus
}
#endif
#endif
