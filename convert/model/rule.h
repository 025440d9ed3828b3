/* Architectures as tables. A rule says "their tensor becomes that tensor of ours, of this shape, cut this way". Two conventions
 * do all the remapping: a placeholder of theirs that is missing in ours becomes a new leading axis (experts stack to
 * [E, rows, cols]); rules that share a name of ours in one layer lie side by side along rows in table order (q|k|v, w1|w3).
 * A checkpoint that already holds our fused tensor is read through the same rule: rows and expert are found inside it. */
#ifndef MM_CONVERT_RULE_H
#define MM_CONVERT_RULE_H

#include "formats/json.h"
#include "formats/model.h"

/* An extent of a matrix, by its meaning. */
typedef enum mm_dim {
  MM_DIM_NONE,     /* no second dimension: a vector */
  MM_DIM_HIDDEN,   /* H */
  MM_DIM_VOCAB,    /* V */
  MM_DIM_Q,        /* nh·d */
  MM_DIM_QKV,      /* 3·nh·d, interleaved per head (lightning) */
  MM_DIM_KV,       /* nkv·d */
  MM_DIM_HEADS,    /* nh */
  MM_DIM_KV_HEADS, /* nkv */
  MM_DIM_INTER,    /* I of one expert */
  MM_DIM_EXPERTS,  /* E */
  MM_DIM_HEAD,     /* d */
  MM_DIM_INDEX_Q,  /* index heads · index dim */
  MM_DIM_INDEX,    /* index dim */
  MM_DIM_DENSE,    /* I of the MLP of dense layers */
  MM_DIM_SHARED    /* I of the shared expert */
} mm_dim;

/* How a tensor is divided over tensor-parallel ranks: tp of them, or for attention, embedding and head attn_tp. */
typedef enum mm_divide {
  MM_WHOLE,      /* every rank holds all of it */
  MM_ROWS,       /* rows in tp equal runs (whole heads) */
  MM_COLS,       /* columns in tp equal runs */
  MM_KV_ROWS,    /* rows by kv head, each as many; head r·nkv/tp, replicated when tp > nkv */
  MM_INDEX_ROWS, /* the same by index head */
  MM_INTER_ROWS, /* rows of an expert; may be padded to whole blocks */
  MM_INTER_COLS, /* columns of an expert, placed as MM_INTER_ROWS */
  MM_VOCAB_ROWS  /* rows, the vocabulary padded to lcm(64, tp) */
} mm_divide;

/* The purpose of a tensor; decides whether a scheme applies to it. */
typedef enum mm_kind {
  MM_KIND_PASS_THROUGH, /* norms, router, bias: always in the source's type */
  MM_KIND_EMBED,        /* embedding and head: in the source's type unless the recipe names them */
  MM_KIND_INDEX,        /* projections of the index branch: the same */
  MM_KIND_LINEAR,       /* projections of attention, of dense MLPs and of shared experts */
  MM_KIND_EXPERT,       /* expert projections */
  MM_KIND_KV_SCALE      /* of a quantised KV cache: as stored, or as --kv-scales says */
} mm_kind;

typedef enum mm_layer_filter {
  MM_ANY_LAYER,
  MM_LIGHTNING_LAYER,
  MM_FULL_LAYER, /* that has keys and values, sparse ones too */
  MM_SPARSE_LAYER,
  MM_EXPERTS_LAYER,
  MM_SHARED_LAYER, /* of routed experts and a shared one */
  MM_DENSE_LAYER
} mm_layer_filter;

typedef struct mm_rule {
  const char *theirs; /* canonical Hugging Face name with {l} and {e} */
  const char *ours;   /* packed name with {l} */
  mm_dim rows, cols;
  mm_divide divide;
  mm_kind kind;
  mm_layer_filter layers;
} mm_rule;

/* Another naming of names: of those that begin with `theirs`, or, where it begins with '.', of those that hold it. */
typedef struct mm_alias {
  const char *theirs, *canonical;
} mm_alias;

typedef struct mm_arch {
  const char *names[8];       /* of `architectures[0]`, NULL-terminated */
  const char *model_types[8]; /* of each of these names, and more of the first; lower case without '_' and '-' */
  /* Fills *m from a config.json already parsed; aliases and defaults of the family. */
  bool (*read_config)(const mm_json *config, const char *file, mm_model *m, mm_err *err);
  const mm_rule *rule;
  size_t rule_count;
  const mm_alias *naming;      /* of the family's names, ended by a row of NULL; or NULL */
  const char *const *left_out; /* how canonical names begin that the packed checkpoint has no place for, in ascending order; or NULL */
} mm_arch;

/* The families, one row each. */
#define MM_ARCH_ROWS ROW(mm_arch_minimax_m1) ROW(mm_arch_minimax_m2) ROW(mm_arch_minimax_m3)
#define ROW(name)    extern const mm_arch name;
MM_ARCH_ROWS
#undef ROW

/* By `architectures[0]`, or model_type where architectures is absent. Known but unsupported models (VL-01) are refused by name,
 * MM_UNSUPPORTED E_ARCH. */
const mm_arch *mm_arch_find(const mm_json *config, const char *file, mm_err *err);

/* `architectures[0]`, or the one of a's names that model_type stands for; for a config in which mm_arch_find found a. */
const char *mm_arch_name(const mm_arch *a, const mm_json *config);

/* The model that DIR/config.json describes. Errors of mm_json_load, mm_arch_find and read_config. */
MM_MUST_USE bool mm_arch_read(const char *dir, mm_model *m, mm_err *err);

/* Elements along a dimension; 1 for MM_DIM_NONE. */
uint32_t mm_dim_extent(mm_dim d, const mm_model *m);
/* The pattern with {l} and {e} replaced into out; an absent placeholder is ignored. Returns out. */
char *mm_rule_name(char *out, size_t cap, const char *pattern, uint32_t layer, uint32_t expert);
/* True if a matrix' name is of a layer ("model.layers.N.", "blk.N.") past the model's last; then of an expert past its last. */
bool mm_name_past_layers(const char *name, const mm_model *m);
bool mm_name_past_experts(const char *name, const mm_model *m);
/* True when theirs has {e} and ours has not. */
bool mm_rule_stacks(const mm_rule *r);
bool mm_rule_applies(const mm_rule *r, const mm_model *m, uint32_t layer);

/* Config readers shared by the families. Each takes a NULL-terminated list of keys that mean the same; those that are present must have
 * the same value (E_CFG_RANGE names both). */
typedef struct mm_config {
  const mm_json *obj;
  const char *file;
} mm_config;
/* Required integer ≥ 1 within u32. */
MM_MUST_USE bool mm_config_u32(mm_config c, const char *const *keys, uint32_t *out, mm_err *err);
/* Optional: leaves *out when absent or null. */
MM_MUST_USE bool mm_config_u32_or(mm_config c, const char *const *keys, uint32_t *out, mm_err *err);
MM_MUST_USE bool mm_config_number_or(mm_config c, const char *const *keys, double *out, mm_err *err);
MM_MUST_USE bool mm_config_bool_or(mm_config c, const char *key, bool *out, mm_err *err);
/* Fails (MM_UNSUPPORTED E_CFG_FEATURE) unless key is absent, null or this. */
MM_MUST_USE bool mm_config_must_be(mm_config c, const char *key, bool only, mm_err *err);
/* One of two words for each layer, or the numbers 0 and 1 in their place, into out[layers]: what value[0 or 1] says. false with *out as it
 * is and *found false where the key is absent or null. */
typedef struct mm_config_list {
  const char *key, *word[2];
  uint8_t value[2];
} mm_config_list;
MM_MUST_USE bool mm_config_layers(mm_config c, const mm_config_list *list, uint32_t layers, uint8_t *out, bool *found, mm_err *err);
/* hidden_size … vocab_size, rope and norm: everything all families share. Defaults must be in *m already. */
MM_MUST_USE bool mm_config_common(mm_config c, mm_model *m, mm_err *err);
/* rope_theta, from all its places, of RoPE that turns whole heads. MM_UNSUPPORTED E_CFG_FEATURE for any other RoPE. */
MM_MUST_USE bool mm_config_whole_rope(mm_config c, double *theta, mm_err *err);
/* Fails where there is a shared expert or an activation other than SiLU. */
MM_MUST_USE bool mm_config_plain_mlp(mm_config c, mm_err *err);
/* Fails (MM_UNSUPPORTED E_CFG_FEATURE) unless key is absent, null or the string `only`. */
MM_MUST_USE bool mm_config_only(mm_config c, const char *key, const char *only, mm_err *err);
/* Where no key of config says which layers are lightning attention, the weights must be of the layers that a takes by default:
 * MM_BAD_INPUT E_CFG_MISSING else. has: whether the source has a tensor of this canonical name. */
MM_MUST_USE bool mm_arch_attn_fits(const mm_arch *a, mm_config c, bool (*has)(const void *ctx, const char *name), const void *ctx,
                                   mm_err *err);
/* attn_type_list, decoder_attention_types, layer_types into m->attn; leaves m->attn when all are absent. */
MM_MUST_USE bool mm_config_attn_types(mm_config c, mm_model *m, mm_err *err);

#endif
