/* Finding the architecture of a config.json, the readers that the families share, and rule names. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert/model/rule.h"

#define ROW(name) &name,
static const mm_arch *const all[] = {MM_ARCH_ROWS};
#undef ROW

/* Recognised, so that nobody gets garbage out of a near miss. */
static const struct {
  const char *name, *model_type, *why;
} refused[] = {
    {"MiniMaxVL01ForConditionalGeneration", "minimaxvl01", "MiniMax-VL-01 (vision tower)"},
};

/* "MiniMax_M1" -> "minimaxm1" */
static void fold(char *out, size_t cap, const char *s) {
  size_t n = 0;
  for (; *s && n + 1 < cap; s++)
    if (*s != '_' && *s != '-') out[n++] = (char)tolower((unsigned char)*s);
  out[n] = 0;
}

static bool listed(const char *const *list, const char *word) {
  for (; *list; list++)
    if (strcmp(*list, word) == 0) return true;
  return false;
}

/* The text of a string that holds no NUL; NULL for everything else. */
static const char *text_of(const mm_json *j) {
  return mm_json_type_of(j) == MM_JSON_STR && strlen(mm_json_str(j)) == mm_json_str_len(j) ? mm_json_str(j) : NULL;
}

/* "A, B or C": every architecture that is converted. */
static void put_names(char *out, size_t cap) {
  size_t n = 0, count = sizeof all / sizeof *all;
  for (size_t i = 0; i < count; i++)
    for (size_t j = 0; all[i]->names[j] && n < cap; j++) {
      const char *between = i + 1 == count && !all[i]->names[j + 1] ? " or " : ", ";
      n += (size_t)snprintf(out + n, cap - n, "%s%s", n == 0 ? "" : between, all[i]->names[j]);
    }
}

static const mm_arch *find(const char *name, const char *type, const char *file, mm_err *err) {
  char folded[64] = "";
  if (type) fold(folded, sizeof folded, type);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    if (name ? strcmp(name, refused[i].name) == 0 : strcmp(folded, refused[i].model_type) == 0) {
      mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "found %s, which this version does not convert", refused[i].why);
      return NULL;
    }
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (name ? listed(all[i]->names, name) : listed(all[i]->model_types, folded)) return all[i];
  char shown[128], known[512] = "";
  mm_escape(shown, sizeof shown, name ? name : type, strlen(name ? name : type));
  put_names(known, sizeof known);
  mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "found %s \"%s\", expected %s", name ? "architecture" : "model_type", shown,
          known);
  return NULL;
}

const mm_arch *mm_arch_find(const mm_json *config, const char *file, mm_err *err) {
  if (mm_json_type_of(config) != MM_JSON_OBJ) {
    mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(file, NULL), "found a value that is not an object, expected a model configuration");
    return NULL;
  }
  const mm_json *a = mm_json_get(config, "architectures");
  const char *type = text_of(mm_json_get(config, "model_type"));
  const char *name = mm_json_type_of(a) == MM_JSON_ARR && mm_json_size(a) == 1 ? text_of(mm_json_at(a, 0)) : NULL;
  if (name) return find(name, type, file, err);
  if (mm_json_type_of(a) == MM_JSON_NULL && type) return find(NULL, type, file, err);
  mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "found no single name in \"architectures\"%s",
          a ? "" : " and no \"model_type\" (is this the model's config.json?)");
  return NULL;
}

const char *mm_arch_name(const mm_arch *a, const mm_json *config) {
  const char *name = text_of(mm_json_at(mm_json_get(config, "architectures"), 0)), *type = text_of(mm_json_get(config, "model_type"));
  char folded[64] = "";
  if (name) return name;
  if (type) fold(folded, sizeof folded, type);
  for (size_t i = 0; a->names[i]; i++)
    if (strcmp(folded, a->model_types[i]) == 0) return a->names[i];
  return a->names[0];
}

#define RANGE(...)   mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL), __VA_ARGS__)
#define FEATURE(...) mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(c.file, NULL), __VA_ARGS__)

/* First key of the list that is present and not null. */
static const mm_json *present(mm_config c, const char *const *keys, const char **key) {
  for (; *keys; keys++) {
    const mm_json *v = mm_json_get(c.obj, *keys);
    if (mm_json_type_of(v) != MM_JSON_NULL) {
      *key = *keys;
      return v;
    }
  }
  return NULL;
}

static bool type_error(mm_config c, const char *key, const mm_json *v, const char *expected, mm_err *err) {
  char found[MM_JSON_SHOWN];
  return mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(c.file, NULL), "key \"%s\": found %s, expected %s", key, mm_json_shown(v, found),
                 expected);
}

static bool u32_value(mm_config c, const char *key, const mm_json *v, uint32_t *out, mm_err *err) {
  if (mm_json_type_of(v) != MM_JSON_INT) return type_error(c, key, v, "an integer", err);
  int64_t n = mm_json_int(v);
  if (n < 1 || n > INT32_MAX) return RANGE("key \"%s\": found %lld, expected 1 to %d", key, (long long)n, INT32_MAX);
  *out = (uint32_t)n;
  return true;
}

bool mm_config_u32(mm_config c, const char *const *keys, uint32_t *out, mm_err *err) {
  const char *key = NULL;
  const mm_json *v = present(c, keys, &key);
  if (!v)
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL), "key \"%s\": found nothing, expected an integer", keys[0]);
  return u32_value(c, key, v, out, err);
}

bool mm_config_u32_or(mm_config c, const char *const *keys, uint32_t *out, mm_err *err) {
  const char *key = NULL;
  const mm_json *v = present(c, keys, &key);
  return !v || u32_value(c, key, v, out, err);
}

bool mm_config_number_or(mm_config c, const char *const *keys, double *out, mm_err *err) {
  const char *key = NULL;
  const mm_json *v = present(c, keys, &key);
  if (!v) return true;
  mm_json_type t = mm_json_type_of(v);
  if (t != MM_JSON_INT && t != MM_JSON_REAL) return type_error(c, key, v, "a number", err);
  *out = mm_json_number(v);
  return isfinite(*out) || RANGE("key \"%s\": found a number that is not finite", key);
}

bool mm_config_bool_or(mm_config c, const char *key, bool *out, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, key);
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  if (mm_json_type_of(v) != MM_JSON_BOOL) return type_error(c, key, v, "true or false", err);
  *out = mm_json_bool(v);
  return true;
}

bool mm_config_must_be(mm_config c, const char *key, bool only, mm_err *err) {
  bool v = only;
  if (!mm_config_bool_or(c, key, &v, err)) return false;
  return v == only || FEATURE("key \"%s\": only %s is supported", key, only ? "true" : "false");
}

bool mm_config_only(mm_config c, const char *key, const char *only, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, key);
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  const char *word = text_of(v);
  if (only && word && strcmp(word, only) == 0) return true;
  return FEATURE("key \"%s\": only %s%s is supported", key, only ? only : "null", only ? " (or its absence)" : "");
}

/* num_local_experts: an int, or one int per layer that all agree. */
static bool experts(mm_config c, mm_model *m, mm_err *err) {
  const char *const keys[] = {"num_local_experts", "num_experts", NULL};
  const char *key = NULL;
  const mm_json *v = present(c, keys, &key);
  if (mm_json_type_of(v) != MM_JSON_ARR) return mm_config_u32(c, keys, &m->experts, err);
  for (size_t i = 0; i < mm_json_size(v); i++) {
    uint32_t n = 0;
    if (!u32_value(c, key, mm_json_at(v, i), &n, err)) return false;
    if (i > 0 && n != m->experts) return FEATURE("key \"%s\": layers differ (%u and %u)", key, m->experts, n);
    m->experts = n;
  }
  if (mm_json_size(v) != m->layers) return RANGE("key \"%s\": found %zu entries, expected %u (layers)", key, mm_json_size(v), m->layers);
  return true;
}

/* rotary_dim, or partial_rotary_factor at top level or inside rope_parameters / rope_scaling. */
static bool rotary(mm_config c, mm_model *m, mm_err *err) {
  static const char *const nested[] = {"rope_parameters", "rope_scaling"};
  static const char *const factor_key[] = {"partial_rotary_factor", NULL}, *const theta_key[] = {"rope_theta", NULL};
  double factor = 0;
  if (!mm_config_number_or(c, factor_key, &factor, err)) return false;
  for (size_t i = 0; i < 2; i++) {
    const mm_json *v = mm_json_get(c.obj, nested[i]);
    if (mm_json_type_of(v) == MM_JSON_NULL) continue;
    if (mm_json_type_of(v) != MM_JSON_OBJ) return type_error(c, nested[i], v, "an object", err);
    mm_config in = {v, c.file};
    if (!mm_config_only(in, "rope_type", "default", err) || !mm_config_only(in, "type", "default", err)) return false;
    if (!mm_config_number_or(in, factor_key, &factor, err) || !mm_config_number_or(in, theta_key, &m->rope_theta, err)) return false;
  }
  if (factor != 0) {
    double dims = factor * m->head_dim;
    if (!(dims >= 2 && dims <= m->head_dim) || dims != floor(dims))
      return RANGE("partial_rotary_factor %g of head_dim %u is no whole number of dimensions", factor, m->head_dim);
    m->rotary_dim = (uint32_t)dims;
  }
  return mm_config_number_or(c, theta_key, &m->rope_theta, err) &&
         mm_config_u32_or(c, (const char *const[]){"rotary_dim", NULL}, &m->rotary_dim, err);
}

/* shared_intermediate_size: an int, a list or absent; only 0 is supported. */
static bool no_shared_expert(mm_config c, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, "shared_intermediate_size");
  size_t n = mm_json_type_of(v) == MM_JSON_ARR ? mm_json_size(v) : 1;
  for (size_t i = 0; i < n; i++) {
    const mm_json *x = mm_json_type_of(v) == MM_JSON_ARR ? mm_json_at(v, i) : v;
    if (mm_json_type_of(x) == MM_JSON_NULL) continue;
    if (mm_json_type_of(x) != MM_JSON_INT) return type_error(c, "shared_intermediate_size", v, "an integer or a list of integers", err);
    if (mm_json_int(x) != 0)
      return FEATURE("key \"shared_intermediate_size\": found %lld, only 0 is supported (no released model has a shared expert)",
                     (long long)mm_json_int(x));
  }
  return true;
}

bool mm_config_common(mm_config c, mm_model *m, mm_err *err) {
#define KEYS(...) (const char *const[]){__VA_ARGS__, NULL}
  uint32_t positions = (uint32_t)m->max_positions;
  m->layers = 0;
  if (!mm_config_u32(c, KEYS("hidden_size"), &m->hidden, err) || !mm_config_u32(c, KEYS("num_hidden_layers"), &m->layers, err) ||
      !mm_config_u32(c, KEYS("num_attention_heads"), &m->heads, err) || !mm_config_u32(c, KEYS("num_key_value_heads"), &m->kv_heads, err) ||
      !mm_config_u32(c, KEYS("intermediate_size"), &m->intermediate, err) ||
      !mm_config_u32(c, KEYS("num_experts_per_tok"), &m->top_k, err) || !mm_config_u32(c, KEYS("vocab_size"), &m->vocab, err) ||
      !mm_config_u32_or(c, KEYS("max_position_embeddings"), &positions, err) || !experts(c, m, err))
    return false;
  m->max_positions = positions;
  if (m->layers > MM_MAX_LAYERS) return RANGE("key \"num_hidden_layers\": found %u, expected at most %d", m->layers, MM_MAX_LAYERS);
  if (m->head_dim == 0) m->head_dim = m->hidden / m->heads;
  if (!mm_config_u32_or(c, KEYS("head_dim"), &m->head_dim, err)) return false;
  if (m->rotary_dim == 0) m->rotary_dim = m->family == MM_FAMILY_M1 ? m->head_dim : m->head_dim / 2;
  if (!rotary(c, m, err) || !mm_config_number_or(c, KEYS("rms_norm_eps"), &m->norm_eps, err)) return false;
  if (!mm_config_only(c, "sliding_window", NULL, err) || !mm_config_must_be(c, "tie_word_embeddings", false, err)) return false;
#undef KEYS
  return true;
}

bool mm_config_plain_mlp(mm_config c, mm_err *err) { return no_shared_expert(c, err) && mm_config_only(c, "hidden_act", "silu", err); }

bool mm_config_layers(mm_config c, const mm_config_list *x, uint32_t layers, uint8_t *out, bool *found, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, x->key);
  *found = mm_json_type_of(v) != MM_JSON_NULL;
  if (!*found) return true;
  if (mm_json_type_of(v) != MM_JSON_ARR) return type_error(c, x->key, v, "a list", err);
  if (mm_json_size(v) != layers)
    return RANGE("key \"%s\": found %zu entries, expected %u (num_hidden_layers)", x->key, mm_json_size(v), layers);
  for (uint32_t l = 0; l < layers; l++) {
    const mm_json *e = mm_json_at(v, l);
    const char *word = text_of(e) ? text_of(e) : "";
    int k = 0;
    while (k < 2 && strcmp(word, x->word[k]) != 0 && !(mm_json_type_of(e) == MM_JSON_INT && mm_json_int(e) == k)) k++;
    if (k == 2) return RANGE("key \"%s\": entry %u is neither 0/\"%s\" nor 1/\"%s\"", x->key, l, x->word[0], x->word[1]);
    out[l] = x->value[k];
  }
  return true;
}

bool mm_config_attn_types(mm_config c, mm_model *m, mm_err *err) {
  const char *key = NULL;
  if (!present(c, (const char *const[]){"attn_type_list", "decoder_attention_types", "layer_types", NULL}, &key)) return true;
  const mm_config_list list = {key, {"linear_attention", "full_attention"}, {MM_ATTN_LIGHTNING, MM_ATTN_FULL}};
  bool found;
  return mm_config_layers(c, &list, m->layers, m->attn, &found, err);
}

uint32_t mm_dim_extent(mm_dim d, const mm_model *m) {
  switch (d) {
    case MM_DIM_NONE: return 1;
    case MM_DIM_HIDDEN: return m->hidden;
    case MM_DIM_VOCAB: return m->vocab;
    case MM_DIM_Q: return m->heads * m->head_dim;
    case MM_DIM_QKV: return 3 * m->heads * m->head_dim;
    case MM_DIM_KV: return m->kv_heads * m->head_dim;
    case MM_DIM_KV_HEADS: return m->kv_heads;
    case MM_DIM_INTER: return m->intermediate;
    case MM_DIM_EXPERTS: return m->experts;
    case MM_DIM_HEAD: return m->head_dim;
    case MM_DIM_INDEX_Q: return m->index_heads * m->index_dim;
    case MM_DIM_INDEX: return m->index_dim;
    case MM_DIM_DENSE: return m->dense_intermediate;
    case MM_DIM_SHARED: return m->shared_intermediate;
  }
  return 0;
}

char *mm_rule_name(char *out, size_t cap, const char *pattern, uint32_t layer, uint32_t expert) {
  size_t n = 0;
  while (*pattern && n + 12 < cap) {
    bool is_layer = pattern[0] == '{' && pattern[1] == 'l' && pattern[2] == '}';
    bool is_expert = pattern[0] == '{' && pattern[1] == 'e' && pattern[2] == '}';
    if (is_layer || is_expert) {
      n += (size_t)snprintf(out + n, cap - n, "%u", is_layer ? layer : expert);
      pattern += 3;
    } else {
      out[n++] = *pattern++;
    }
  }
  out[n] = 0;
  return out;
}

bool mm_rule_stacks(const mm_rule *r) { return strstr(r->theirs, "{e}") && !strstr(r->ours, "{e}"); }

bool mm_rule_applies(const mm_rule *r, const mm_model *m, uint32_t layer) {
  const bool dense = m->ffn[layer] == MM_FFN_DENSE, keys = mm_attn_has_cache(m->attn[layer]);
  switch (r->layers) {
    case MM_ANY_LAYER: return true;
    case MM_LIGHTNING_LAYER: return !keys;
    case MM_FULL_LAYER: return keys;
    case MM_SPARSE_LAYER: return m->attn[layer] == MM_ATTN_SPARSE;
    case MM_EXPERTS_LAYER: return !dense;
    case MM_SHARED_LAYER: return !dense && m->shared_intermediate > 0;
    case MM_DENSE_LAYER: return dense;
  }
  return false;
}
