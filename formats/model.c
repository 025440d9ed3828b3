/* The model object of the manifest: one table of fields gives writing, reading and the list of known keys. */
#include "formats/model.h"

#include <float.h>
#include <math.h>
#include <string.h>

typedef enum field_kind { FIELD_NAME, FIELD_WORD, FIELD_BOOL, FIELD_U32, FIELD_U64, FIELD_REAL, FIELD_DEEPNORM } field_kind;

typedef struct field {
  const char *key;
  size_t offset;
  const char *const *words; /* FIELD_WORD: an enum's values by name, NULL-terminated */
  field_kind kind;
  bool more; /* of extended models alone */
} field;

static const char *const family_words[] = {[MM_FAMILY_M1] = "m1", [MM_FAMILY_M2] = "m2", [MM_FAMILY_M3] = "m3", NULL};
static const char *const router_words[] = {[MM_ROUTER_SOFTMAX] = "softmax", [MM_ROUTER_SIGMOID_BIAS] = "sigmoid_bias", NULL};
static const char *const activation_words[] = {[MM_ACTIVATION_SILU] = "silu", [MM_ACTIVATION_SWIGLUOAI] = "swigluoai", NULL};

#define FIELD(name, kind, words) \
  { #name, offsetof(mm_model, name), words, kind, false }
#define MORE(name, kind, words) \
  { #name, offsetof(mm_model, name), words, kind, true }
static const field fields[] = {
    FIELD(architecture, FIELD_NAME, NULL),
    FIELD(family, FIELD_WORD, family_words),
    FIELD(router, FIELD_WORD, router_words),
    FIELD(postnorm, FIELD_BOOL, NULL),
    FIELD(qk_norm, FIELD_BOOL, NULL),
    FIELD(hidden, FIELD_U32, NULL),
    FIELD(layers, FIELD_U32, NULL),
    FIELD(heads, FIELD_U32, NULL),
    FIELD(kv_heads, FIELD_U32, NULL),
    FIELD(head_dim, FIELD_U32, NULL),
    FIELD(rotary_dim, FIELD_U32, NULL),
    FIELD(experts, FIELD_U32, NULL),
    FIELD(top_k, FIELD_U32, NULL),
    FIELD(intermediate, FIELD_U32, NULL),
    FIELD(vocab, FIELD_U32, NULL),
    FIELD(max_positions, FIELD_U64, NULL),
    FIELD(rope_theta, FIELD_REAL, NULL),
    FIELD(norm_eps, FIELD_REAL, NULL),
    FIELD(lightning_norm_eps, FIELD_REAL, NULL),
    FIELD(deepnorm_lightning, FIELD_DEEPNORM, NULL),
    FIELD(deepnorm_full, FIELD_DEEPNORM, NULL),
    FIELD(deepnorm_mlp, FIELD_DEEPNORM, NULL),
    MORE(norm_offset, FIELD_BOOL, NULL),
    MORE(qk_norm_per_head, FIELD_BOOL, NULL),
    MORE(index_heads, FIELD_U32, NULL),
    MORE(index_dim, FIELD_U32, NULL),
    MORE(index_block, FIELD_U32, NULL),
    MORE(index_top_k, FIELD_U32, NULL),
    MORE(index_local, FIELD_U32, NULL),
    MORE(dense_intermediate, FIELD_U32, NULL),
    MORE(shared_intermediate, FIELD_U32, NULL),
    MORE(routed_scale, FIELD_REAL, NULL),
    MORE(activation, FIELD_WORD, activation_words),
    MORE(act_alpha, FIELD_REAL, NULL),
    MORE(act_limit, FIELD_REAL, NULL),
    MORE(act_beta, FIELD_REAL, NULL),
};
#define FIELD_COUNT (sizeof fields / sizeof *fields)

/* A number for each layer, from 0 to `most`. */
typedef struct layer_list {
  const char *key, *expected;
  size_t offset;
  uint8_t most;
  bool more; /* of extended models alone */
} layer_list;
static const layer_list layer_lists[] = {
    {"attn", "0 (lightning), 1 (full) or, in an extended model, 2 (sparse)", offsetof(mm_model, attn), MM_ATTN_SPARSE, false},
    {"ffn", "0 (experts) or 1 (dense)", offsetof(mm_model, ffn), MM_FFN_DENSE, true},
};
#define LIST_COUNT (sizeof layer_lists / sizeof *layer_lists)

/* Each of them is stored as an enum of int's size. */
_Static_assert(sizeof(mm_family) == sizeof(int) && sizeof(mm_router) == sizeof(int) && sizeof(mm_activation) == sizeof(int),
               "words are read and written as int");

static size_t field_size(const field *f) {
  switch (f->kind) {
    case FIELD_WORD: return sizeof(int);
    case FIELD_BOOL: return sizeof(bool);
    case FIELD_U32: return sizeof(uint32_t);
    case FIELD_U64: return sizeof(uint64_t);
    case FIELD_REAL: return sizeof(double);
    case FIELD_DEEPNORM: return sizeof(mm_deepnorm);
    case FIELD_NAME: break;
  }
  return 0;
}

static mm_json *field_to_json(const field *f, const void *at) {
  const mm_deepnorm *d = at;
  switch (f->kind) {
    case FIELD_NAME: return mm_json_new_str(at);
    case FIELD_WORD: return mm_json_new_str(f->words[*(const int *)at]);
    case FIELD_BOOL: return mm_json_new_bool(*(const bool *)at);
    case FIELD_U32: return mm_json_new_int(*(const uint32_t *)at);
    case FIELD_U64: return mm_json_new_u64(*(const uint64_t *)at);
    case FIELD_REAL: return mm_json_new_real(*(const double *)at);
    case FIELD_DEEPNORM: return MM_JSON_NEW({"alpha", mm_json_new_real(d->alpha)}, {"beta", mm_json_new_real(d->beta)});
  }
  return NULL;
}

bool mm_model_extended(const mm_model *m) {
  static const char zero[sizeof(double)];
  for (size_t i = 0; i < FIELD_COUNT; i++)
    if (fields[i].more && memcmp((const char *)m + fields[i].offset, zero, field_size(&fields[i])) != 0) return true;
  for (uint32_t l = 0; l < m->layers && l < MM_MAX_LAYERS; l++)
    if (m->attn[l] == MM_ATTN_SPARSE || m->ffn[l] != MM_FFN_EXPERTS) return true;
  return false;
}

mm_json *mm_model_to_json(const mm_model *m) {
  mm_json *o = mm_json_new_obj();
  const bool more = mm_model_extended(m);
  for (size_t i = 0; i < FIELD_COUNT; i++)
    if (!fields[i].more || more) mm_json_set(o, fields[i].key, field_to_json(&fields[i], (const char *)m + fields[i].offset));
  for (size_t i = 0; i < LIST_COUNT; i++) {
    if (layer_lists[i].more && !more) continue;
    mm_json *list = mm_json_put_list(o, layer_lists[i].key);
    for (uint32_t l = 0; l < m->layers; l++) mm_json_append(list, mm_json_new_int(((const uint8_t *)m + layer_lists[i].offset)[l]));
  }
  return o;
}

static bool read_name(const mm_json *obj, const char *key, char *out, const mm_json_ctx *c, mm_err *err) {
  const char *s;
  if (!mm_json_need_str(obj, key, &s, c, err)) return false;
  size_t n = strlen(s), cap = sizeof((mm_model *)0)->architecture;
  if (n == 0 || n >= cap)
    return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found %zu bytes, expected 1 to %zu", key, n, cap - 1);
  memcpy(out, s, n + 1);
  return true;
}

static bool read_word(const mm_json *obj, const field *f, int *out, const mm_json_ctx *c, mm_err *err) {
  const char *s;
  if (!mm_json_need_str(obj, f->key, &s, c, err)) return false;
  for (int i = 0; f->words[i]; i++) {
    if (strcmp(f->words[i], s) != 0) continue;
    *out = i;
    return true;
  }
  return mm_fail(err, c->status, c->code, mm_at(c->file, NULL), "key \"%s\": found unknown word \"%s\", expected one such as \"%s\"",
                 f->key, MM_ESCAPED(128, s), f->words[0]);
}

static bool read_deepnorm(const mm_json *obj, const char *key, mm_deepnorm *out, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"alpha", "beta", NULL};
  const mm_json *o = mm_json_need(obj, key, MM_JSON_OBJ, c, err);
  return o && mm_json_only_keys(o, keys, c, err) && mm_json_need_number(o, "alpha", &out->alpha, c, err) &&
         mm_json_need_number(o, "beta", &out->beta, c, err);
}

static bool read_field(const mm_json *obj, const field *f, void *at, const mm_json_ctx *c, mm_err *err) {
  int64_t v;
  switch (f->kind) {
    case FIELD_NAME: return read_name(obj, f->key, at, c, err);
    case FIELD_WORD: return read_word(obj, f, at, c, err);
    case FIELD_BOOL: return mm_json_need_bool(obj, f->key, at, c, err);
    case FIELD_U32:
      if (!mm_json_need_int(obj, f->key, 0, UINT32_MAX, &v, c, err)) return false;
      *(uint32_t *)at = (uint32_t)v;
      return true;
    case FIELD_U64:
      if (!mm_json_need_int(obj, f->key, 0, INT64_MAX, &v, c, err)) return false;
      *(uint64_t *)at = (uint64_t)v;
      return true;
    case FIELD_REAL: return mm_json_need_number(obj, f->key, at, c, err);
    case FIELD_DEEPNORM: return read_deepnorm(obj, f->key, at, c, err);
  }
  return false;
}

static bool read_layers(mm_model *m, const mm_json *obj, const layer_list *x, bool more, const mm_json_ctx *c, mm_err *err) {
  const mm_json *list = mm_json_need(obj, x->key, MM_JSON_ARR, c, err);
  if (!list) return false;
  if (mm_json_size(list) != m->layers || m->layers > MM_MAX_LAYERS)
    return MM_REFUSE(c, err, "key \"%s\": found %zu entries, expected one for each of %u layers (at most %d)", x->key, mm_json_size(list),
                     m->layers, MM_MAX_LAYERS);
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_json *j = mm_json_at(list, l);
    const int64_t v = mm_json_int(j), most = more ? x->most : 1;
    if (mm_json_type_of(j) != MM_JSON_INT || v < 0 || v > most)
      return MM_REFUSE(c, err, "key \"%s\": layer %u: found %s, expected %s", x->key, l, MM_SHOWN_JSON(j), x->expected);
    ((uint8_t *)m + x->offset)[l] = (uint8_t)v;
  }
  return true;
}

bool mm_model_from_json(mm_model *m, const mm_json *obj, const char *file, mm_err *err) {
  const mm_json_ctx c = {file, MM_INTEGRITY, "E_MANIFEST"};
  const char *keys[FIELD_COUNT + LIST_COUNT + 1] = {NULL};
  bool more = false;
  memset(m, 0, sizeof *m);
  for (size_t i = 0; i < FIELD_COUNT; i++) more = more || (fields[i].more && mm_json_get(obj, fields[i].key));
  for (size_t i = 0; i < LIST_COUNT; i++) more = more || (layer_lists[i].more && mm_json_get(obj, layer_lists[i].key));
  size_t n = 0;
  for (size_t i = 0; i < FIELD_COUNT; i++)
    if (more || !fields[i].more) keys[n++] = fields[i].key;
  for (size_t i = 0; i < LIST_COUNT; i++)
    if (more || !layer_lists[i].more) keys[n++] = layer_lists[i].key;
  if (!mm_json_only_keys(obj, keys, &c, err)) return false;
  for (size_t i = 0; i < FIELD_COUNT; i++)
    if ((more || !fields[i].more) && !read_field(obj, &fields[i], (char *)m + fields[i].offset, &c, err)) return false;
  for (size_t i = 0; i < LIST_COUNT; i++)
    if ((more || !layer_lists[i].more) && !read_layers(m, obj, &layer_lists[i], more, &c, err)) return false;
  if (more && !mm_model_extended(m)) return MM_REFUSE(&c, err, "found keys of an extended model, all of them 0, expected none");
  return mm_model_check(m, file, c.status, c.code, err);
}

/* The rules of the fields that extended models alone have. */
static bool check_more(const mm_model *m, const mm_json_ctx *c, mm_err *err) {
  bool sparse = false, dense = false;
  for (uint32_t l = 0; l < m->layers; l++) {
    if (m->ffn[l] > MM_FFN_DENSE) return MM_REFUSE(c, err, "ffn: layer %u: found %u, expected 0 or 1", l, m->ffn[l]);
    sparse |= m->attn[l] == MM_ATTN_SPARSE, dense |= m->ffn[l] == MM_FFN_DENSE;
  }
  /* Without such layers their numbers are 0, so that equal models have equal manifests. */
  const struct {
    const char *key;
    uint64_t value, lo, hi;
  } range[] = {
      {"index_heads", m->index_heads, sparse, sparse ? m->kv_heads : 0},
      {"index_dim", m->index_dim, sparse ? m->rotary_dim : 0, sparse ? MM_MAX_HEAD_DIM : 0},
      {"index_block", m->index_block, sparse, sparse ? INT32_MAX : 0},
      {"index_top_k", m->index_top_k, sparse, sparse ? MM_MAX_BLOCKS : 0},
      {"index_local", m->index_local, sparse, m->index_top_k},
      {"index_heads x index_dim", (uint64_t)m->index_heads * m->index_dim, 0, INT32_MAX},
      {"dense_intermediate", m->dense_intermediate, dense, dense ? INT32_MAX / 2 : 0},
      {"shared_intermediate", m->shared_intermediate, 0, INT32_MAX / 2},
  };
  for (size_t i = 0; i < sizeof range / sizeof *range; i++)
    if (range[i].value < range[i].lo || range[i].value > range[i].hi)
      return MM_REFUSE(c, err, "%s: found %llu, expected %llu to %llu", range[i].key, (unsigned long long)range[i].value,
                       (unsigned long long)range[i].lo, (unsigned long long)range[i].hi);
  if (sparse && m->kv_heads % m->index_heads != 0)
    return MM_REFUSE(c, err, "index_heads: found %u, expected a divisor of %u kv heads", m->index_heads, m->kv_heads);
  const bool clamps = m->activation == MM_ACTIVATION_SWIGLUOAI;
  const struct {
    const char *key;
    double value, lo, hi;
  } real[] = {
      {"routed_scale", m->routed_scale, 0, DBL_MAX},
      {"act_alpha", m->act_alpha, clamps ? DBL_MIN : 0, clamps ? DBL_MAX : 0},
      {"act_limit", m->act_limit, clamps ? DBL_MIN : 0, clamps ? DBL_MAX : 0},
      {"act_beta", m->act_beta, clamps ? -DBL_MAX : 0, clamps ? DBL_MAX : 0},
  };
  for (size_t i = 0; i < sizeof real / sizeof *real; i++)
    if (!(real[i].value >= real[i].lo && real[i].value <= real[i].hi))
      return MM_REFUSE(c, err, "%s: found %g, expected %s", real[i].key, real[i].value,
                       real[i].hi == 0    ? "0 with this activation"
                       : real[i].lo < 0   ? "a finite number"
                       : real[i].lo == 0. ? "a finite number from 0 on"
                                          : "a positive number");
  return !m->qk_norm_per_head || m->qk_norm || MM_REFUSE(c, err, "qk_norm_per_head: found true without qk_norm");
}

bool mm_model_check(const mm_model *m, const char *file, mm_status status, const char *code, mm_err *err) {
  const mm_json_ctx c = {file, status, code};
  const bool config = status == MM_BAD_INPUT; /* a user's config.json, whose keys are named otherwise than the manifest's */
  /* Heads, rows and ids are counted in 32 bits (ids in 31) further on; lightning qkv has 3·heads·head_dim rows. */
  const struct {
    const char *ours, *theirs;
    uint64_t value, lo, hi;
  } range[] = {
      {"hidden", "hidden_size", m->hidden, 1, INT32_MAX},
      {"layers", "num_hidden_layers", m->layers, 1, MM_MAX_LAYERS},
      {"heads", "num_attention_heads", m->heads, 1, INT32_MAX},
      {"kv_heads", "num_key_value_heads", m->kv_heads, 1, m->heads},
      {"head_dim", "head_dim", m->head_dim, 1, MM_MAX_HEAD_DIM},
      {"rotary_dim", "rotary_dim", m->rotary_dim, 2, m->head_dim},
      {"experts", "num_local_experts", m->experts, 1, MM_MAX_EXPERTS},
      {"top_k", "num_experts_per_tok", m->top_k, 1, mm_min(m->experts, MM_MAX_TOP_K)},
      {"intermediate", "intermediate_size", m->intermediate, 1, INT32_MAX / 2},
      {"vocab", "vocab_size", m->vocab, 1, INT32_MAX},
      {"max_positions", "max_position_embeddings", m->max_positions, 1, INT64_MAX},
      {"3 x heads x head_dim", "3 x num_attention_heads x head_dim", 3 * (uint64_t)m->heads * m->head_dim, 1, INT32_MAX},
  };
  for (size_t i = 0; i < sizeof range / sizeof *range; i++)
    if (range[i].value < range[i].lo || range[i].value > range[i].hi)
      return MM_REFUSE(&c, err, "%s: found %llu, expected %llu to %llu", config ? range[i].theirs : range[i].ours,
                       (unsigned long long)range[i].value, (unsigned long long)range[i].lo, (unsigned long long)range[i].hi);
  if (m->heads % m->kv_heads != 0)
    return MM_REFUSE(&c, err, "%s: found %u, expected a multiple of %s %u", config ? "num_attention_heads" : "heads", m->heads,
                     config ? "num_key_value_heads" : "kv_heads", m->kv_heads);
  if (m->rotary_dim % 2 != 0) return MM_REFUSE(&c, err, "rotary_dim: found %u, expected an even number", m->rotary_dim);

  const struct {
    const char *ours, *theirs;
    double value;
    bool positive;
  } real[] = {
      {"rope_theta", "rope_theta", m->rope_theta, true},
      {"norm_eps", "rms_norm_eps", m->norm_eps, true},
      {"lightning_norm_eps", "lightning_norm_eps", m->lightning_norm_eps, true},
      {"deepnorm_lightning.alpha", "layernorm_linear_attention_alpha", m->deepnorm_lightning.alpha, false},
      {"deepnorm_lightning.beta", "layernorm_linear_attention_beta", m->deepnorm_lightning.beta, false},
      {"deepnorm_full.alpha", "layernorm_full_attention_alpha", m->deepnorm_full.alpha, false},
      {"deepnorm_full.beta", "layernorm_full_attention_beta", m->deepnorm_full.beta, false},
      {"deepnorm_mlp.alpha", "layernorm_mlp_alpha", m->deepnorm_mlp.alpha, false},
      {"deepnorm_mlp.beta", "layernorm_mlp_beta", m->deepnorm_mlp.beta, false},
  };
  for (size_t i = 0; i < sizeof real / sizeof *real; i++)
    if (!isfinite(real[i].value) || (real[i].positive && real[i].value <= 0))
      return MM_REFUSE(&c, err, "%s: found %g, expected a %s number", config ? real[i].theirs : real[i].ours, real[i].value,
                       real[i].positive ? "positive" : "finite");
  for (uint32_t l = 0; l < m->layers; l++)
    if (m->attn[l] > MM_ATTN_SPARSE) return MM_REFUSE(&c, err, "attn: layer %u: found %u, expected 0, 1 or 2", l, m->attn[l]);
  return check_more(m, &c, err);
}

static bool divides_either(uint32_t a, uint32_t b) { return a % b == 0 || b % a == 0; }

bool mm_model_cuts(const mm_model *m, uint32_t tp, uint32_t attn_tp, uint32_t ep) {
  return m->heads % attn_tp == 0 && divides_either(m->kv_heads, attn_tp) &&
         (m->index_heads == 0 || divides_either(m->index_heads, attn_tp)) && m->dense_intermediate % tp == 0 &&
         m->shared_intermediate % tp == 0 && tp % ep == 0 && m->experts % ep == 0 && m->intermediate % (tp / ep) == 0;
}

bool mm_model_same(const mm_model *a, const mm_model *b, const char **key) {
  for (size_t i = 0; i < FIELD_COUNT; i++) {
    const char *x = (const char *)a + fields[i].offset, *y = (const char *)b + fields[i].offset;
    *key = fields[i].key;
    if (fields[i].kind == FIELD_NAME ? strcmp(x, y) != 0 : memcmp(x, y, field_size(&fields[i])) != 0) return false;
  }
  for (size_t i = 0; i < LIST_COUNT; i++) {
    *key = layer_lists[i].key;
    if (memcmp((const uint8_t *)a + layer_lists[i].offset, (const uint8_t *)b + layer_lists[i].offset, a->layers) != 0) return false;
  }
  return true;
}

bool mm_model_digest(const mm_model *m, mm_digest *out, mm_err *err) {
  char *text = mm_json_text(mm_model_to_json(m), false, err);
  if (!text) return false;
  *out = mm_sha256(text, strlen(text));
  free(text);
  return true;
}
