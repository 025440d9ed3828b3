/* The hyperparameters of one model, as the converter reads them from a config.json and writes them to the manifest,
 * and as the runtime reads them back. Symbols in brackets are those of the model documentation. */
#ifndef MM_FORMATS_MODEL_H
#define MM_FORMATS_MODEL_H

#include "formats/json.h"
#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Released models have up to 80 layers, 256 experts of which 8 are chosen, and heads of 128. */
#define MM_MAX_LAYERS   1024
#define MM_MAX_EXPERTS  1024
#define MM_MAX_TOP_K    64
#define MM_MAX_HEAD_DIM 1024
#define MM_MAX_BLOCKS   64 /* that a query of sparse attention reads */

/* Where a model comes from: Text-01, M1 and their -hf exports; M2 … M2.7; M3 and M3.1-Flash. What is computed follows from the other
 * fields alone. */
typedef enum mm_family { MM_FAMILY_M1, MM_FAMILY_M2, MM_FAMILY_M3 } mm_family;

/* Sparse attention is full attention over the blocks of positions that its index branch chooses. */
typedef enum mm_attn { MM_ATTN_LIGHTNING = 0, MM_ATTN_FULL = 1, MM_ATTN_SPARSE = 2 } mm_attn;
static inline bool mm_attn_has_cache(uint8_t attn) { return attn != MM_ATTN_LIGHTNING; } /* of keys and values */

typedef enum mm_ffn { MM_FFN_EXPERTS = 0, MM_FFN_DENSE = 1 } mm_ffn;

/* Of a gate g and an up value u. */
typedef enum mm_activation {
  MM_ACTIVATION_SILU,     /* u·g·sigmoid(g) */
  MM_ACTIVATION_SWIGLUOAI /* (clamp(u, ±limit) + beta)·g'·sigmoid(alpha·g'), g' = min(g, limit) */
} mm_activation;

typedef enum mm_router {
  MM_ROUTER_SOFTMAX,     /* softmax over E, top-k, renormalised */
  MM_ROUTER_SIGMOID_BIAS /* sigmoid, chosen by score + bias, weights = unbiased scores renormalised */
} mm_router;

/* h = alpha·residual + beta·branch (1, 1 for M2). */
typedef struct mm_deepnorm {
  double alpha, beta;
} mm_deepnorm;

typedef struct mm_model {
  char architecture[64]; /* as in the config: "MiniMaxM1ForCausalLM" */
  mm_family family;
  mm_router router;
  bool postnorm;         /* true: the residual is the normalised tensor; false: pre-norm */
  bool qk_norm;          /* RMS norm of q over all heads and of k over all kv heads, before RoPE; or per head, below */
  uint32_t hidden;       /* [H] */
  uint32_t layers;       /* [L] ≤ MM_MAX_LAYERS */
  uint32_t heads;        /* [nh] */
  uint32_t kv_heads;     /* [nkv] divides heads */
  uint32_t head_dim;     /* [d] ≤ MM_MAX_HEAD_DIM; heads·head_dim may differ from hidden */
  uint32_t rotary_dim;   /* [dr] even, ≤ head_dim */
  uint32_t experts;      /* [E] ≤ MM_MAX_EXPERTS */
  uint32_t top_k;        /* [k] ≤ experts, MM_MAX_TOP_K */
  uint32_t intermediate; /* [I] per expert */
  uint32_t vocab;        /* [V] */
  uint64_t max_positions;
  double rope_theta, norm_eps;
  double lightning_norm_eps; /* of self_attn.norm: 1e-6 in every reference class */
  mm_deepnorm deepnorm_lightning, deepnorm_full, deepnorm_mlp;
  uint8_t attn[MM_MAX_LAYERS]; /* mm_attn of each absolute layer index */

  /* What follows is 0 in models that have none of it (mm_model_extended). */
  bool norm_offset;             /* every norm multiplies by 1 + weight */
  bool qk_norm_per_head;        /* q_norm and k_norm are [d]; each head has its own mean square */
  uint32_t index_heads;         /* of sparse layers: divides kv_heads; each chooses for kv_heads/index_heads kv heads in a row */
  uint32_t index_dim;           /* of an index head ≤ MM_MAX_HEAD_DIM, ≥ rotary_dim */
  uint32_t index_block;         /* positions of a block; block b begins at position b·index_block */
  uint32_t index_top_k;         /* blocks that a query reads at most ≤ MM_MAX_BLOCKS, the next included */
  uint32_t index_local;         /* the query's own block and those before it that are always read, 1 to index_top_k */
  uint32_t dense_intermediate;  /* of the MLP of dense layers */
  uint32_t shared_intermediate; /* of the shared expert next to the routed ones, whose weight is 1 */
  double routed_scale;          /* the sum of routed experts is multiplied with it; 0: with 1 */
  mm_activation activation;
  double act_alpha, act_limit, act_beta; /* of swigluoai */
  uint8_t ffn[MM_MAX_LAYERS];            /* mm_ffn of each absolute layer index */
} mm_model;

/* Initialisers of a model's norms, the residual plain. */
#define MM_MODEL_NORMS(eps) \
  .norm_eps = (eps), .lightning_norm_eps = 1e-6, .deepnorm_lightning = {1, 1}, .deepnorm_full = {1, 1}, .deepnorm_mlp = {1, 1}

/* Whether a model has any of the fields that a manifest of versions 1 and 2 does not hold (formats/FORMAT-3.md). */
bool mm_model_extended(const mm_model *m);
/* The manifest's "model" object: every field above by its own name, the last ones where one of them is not 0. Owned; a failure
 * stays in it. */
mm_json *mm_model_to_json(const mm_model *m);
/* Reads and checks that object; unknown or missing keys are refused by name (MM_INTEGRITY). Of the last fields all are there or none. */
MM_MUST_USE bool mm_model_from_json(mm_model *m, const mm_json *obj, const char *file, mm_err *err);
/* Range and divisibility rules that hold for every model (heads % kv_heads, top_k ≤ experts, rotary_dim ≤ head_dim,
 * eps > 0, …), status and code given by the caller: E_CFG_RANGE for a config, E_MANIFEST for a manifest. */
MM_MUST_USE bool mm_model_check(const mm_model *m, const char *file, mm_status status, const char *code, mm_err *err);

/* Whether tp ranks can share the model, attn_tp of them its attention, and ep groups its experts: they divide heads, experts and columns;
 * kv heads and index heads divide attn_tp or are divided by it. */
bool mm_model_cuts(const mm_model *m, uint32_t tp, uint32_t attn_tp, uint32_t ep);

/* The file of a server's expert load: an object of this "format", "version" 1, "model" (the model's digest), "architecture" and "load". */
#define MM_LOAD_FORMAT "minimax-expert-load"
/* The digest of the model's hyperparameters, whatever its weights' scheme and cut. */
MM_MUST_USE bool mm_model_digest(const mm_model *m, mm_digest *out, mm_err *err);

/* True if two models are equal in every field; else *key is the first field that differs, by its name in the manifest. */
bool mm_model_same(const mm_model *a, const mm_model *b, const char **key);

#ifdef __cplusplus
}
#endif
#endif
