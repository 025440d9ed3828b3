/* Finding the architecture of a config.json, the readers that the families share, and rule names. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "convert/model/rule.h"
#include "formats/system/file.h"

#define CONFIG_MAX (UINT64_C(16) << 20)

#define ROW(name) &name,
static const mm_arch *const all[] = {MM_ARCH_ROWS};
#undef ROW

/* Recognised, so that nobody gets garbage out of a near miss. */
static const struct {
  const char *name, *model_type, *reason;
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

/* Any other model_type than the family's contradicts the name. Early copies of M2 say "minimax", and M3's text config says "minimax_m2":
 * these decide nothing. */
static bool same_family(const mm_arch *a, const char *name, const char *type, const char *folded, const char *file, mm_err *err) {
  const bool vague = strcmp(folded, "minimax") == 0 || (a == &mm_arch_minimax_m3 && strcmp(folded, "minimaxm2") == 0);
  if (vague || listed(a->model_types, folded)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(file, NULL),
                 "key \"model_type\": found \"%s\", expected the family of \"%s\" in key \"architectures\"", MM_ESCAPED(64, type), name);
}

static const mm_arch *find(const char *name, const char *type, const char *file, mm_err *err) {
  char folded[64] = "";
  if (type) fold(folded, sizeof folded, type);
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
    if (name ? strcmp(name, refused[i].name) == 0 : strcmp(folded, refused[i].model_type) == 0) {
      mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "found %s, expected an architecture that is converted", refused[i].reason);
      return NULL;
    }
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (name ? listed(all[i]->names, name) : listed(all[i]->model_types, folded))
      return name && type && !same_family(all[i], name, type, folded, file, err) ? NULL : all[i];
  char known[512] = "";
  put_names(known, sizeof known);
  mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "found %s \"%s\", expected %s", name ? "architecture" : "model_type",
          MM_ESCAPED(128, name ? name : type), known);
  return NULL;
}

const mm_arch *mm_arch_find(const mm_json *config, const char *file, mm_err *err) {
  if (mm_json_type_of(config) != MM_JSON_OBJ) {
    mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(file, NULL), "found a value that is not an object, expected a model configuration");
    return NULL;
  }
  const mm_json *a = mm_json_get(config, "architectures");
  const mm_json *of = mm_json_get(config, "model_type");
  const char *type = text_of(of);
  const char *name = mm_json_type_of(a) == MM_JSON_ARR && mm_json_size(a) == 1 ? text_of(mm_json_at(a, 0)) : NULL;
  if (name && !type && mm_json_type_of(of) != MM_JSON_NULL) {
    mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(file, NULL), "key \"model_type\": found %s, expected a string without NUL",
            MM_SHOWN_JSON(of));
    return NULL;
  }
  if (name) return find(name, type, file, err);
  if (mm_json_type_of(a) == MM_JSON_NULL && type) return find(NULL, type, file, err);
  mm_fail(err, MM_UNSUPPORTED, "E_ARCH", mm_at(file, NULL), "key \"architectures\": found %s%s, expected one name", MM_SHOWN_JSON(a),
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

bool mm_arch_read(const char *dir, mm_model *m, mm_err *err) {
  const mm_path path = mm_path_of(dir, "config.json");
  mm_json *config = mm_json_load(path.text, CONFIG_MAX, err);
  const mm_arch *a = config ? mm_arch_find(config, path.text, err) : NULL;
  const bool ok = a && a->read_config(config, path.text, m, err);
  mm_json_free(config);
  return ok;
}

#define RANGE(...)   mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(c.file, NULL), __VA_ARGS__)
#define FEATURE(...) mm_fail(err, MM_UNSUPPORTED, "E_CFG_FEATURE", mm_at(c.file, NULL), __VA_ARGS__)

/* The next key of the list from *at on that is present and not null, or NULL. */
static const mm_json *next_present(mm_config c, const char *const *keys, size_t *at, const char **key) {
  while (keys[*at]) {
    *key = keys[(*at)++];
    const mm_json *v = mm_json_get(c.obj, *key);
    if (mm_json_type_of(v) != MM_JSON_NULL) return v;
  }
  return NULL;
}

/* Two keys that mean the same have different values. */
#define CONTRADICT(spec, key, found, expected, other) \
  RANGE("key \"%s\": found " spec ", expected " spec " as in key \"%s\", which means the same", key, found, expected, other)

static bool type_error(mm_config c, const char *key, const mm_json *v, const char *expected, mm_err *err) {
  return mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(c.file, NULL), "key \"%s\": found %s, expected %s", key, MM_SHOWN_JSON(v),
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
  size_t at = 0;
  if (!next_present(c, keys, &at, &key))
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL), "key \"%s\": found nothing, expected an integer", keys[0]);
  return mm_config_u32_or(c, keys, out, err);
}

bool mm_config_u32_or(mm_config c, const char *const *keys, uint32_t *out, mm_err *err) {
  const char *key = NULL, *first = NULL;
  const mm_json *v;
  for (size_t at = 0; (v = next_present(c, keys, &at, &key)); first = first ? first : key) {
    uint32_t n = 0;
    if (!u32_value(c, key, v, &n, err)) return false;
    if (first && n != *out) return CONTRADICT("%u", key, n, *out, first);
    *out = n;
  }
  return true;
}

/* The first place that has a number, and the number. */
typedef struct mm_first_number {
  char key[96];
  double value;
} mm_first_number;

/* Takes the number under a key (of the object `in`, where that is not empty), which must be that of earlier places. */
static bool number_again(mm_config c, const char *in, const char *key, mm_first_number *first, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, key);
  char place[sizeof first->key];
  snprintf(place, sizeof place, "%s%s%s", in, *in ? "." : "", key);
  mm_json_type t = mm_json_type_of(v);
  if (t == MM_JSON_NULL) return true;
  if (t != MM_JSON_INT && t != MM_JSON_REAL) return type_error(c, place, v, "a number", err);
  double x = mm_json_number(v);
  if (!isfinite(x)) return RANGE("key \"%s\": found %g, expected a finite number", place, x);
  if (first->key[0] && x != first->value) return CONTRADICT("%.17g", place, x, first->value, first->key);
  if (!first->key[0]) memcpy(first->key, place, sizeof place);
  first->value = x;
  return true;
}

bool mm_config_number_or(mm_config c, const char *const *keys, double *out, mm_err *err) {
  mm_first_number first = {.key = ""};
  for (; *keys; keys++)
    if (!number_again(c, "", *keys, &first, err)) return false;
  if (first.key[0]) *out = first.value;
  return true;
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
  return v == only || FEATURE("key \"%s\": found %s, only %s is supported", key, v ? "true" : "false", only ? "true" : "false");
}

bool mm_config_only(mm_config c, const char *key, const char *only, mm_err *err) {
  const mm_json *v = mm_json_get(c.obj, key);
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  const char *word = text_of(v);
  if (only && word && strcmp(word, only) == 0) return true;
  return FEATURE("key \"%s\": found %s, only %s%s is supported", key, MM_SHOWN_JSON(v), only ? only : "null",
                 only ? " (or its absence)" : "");
}

/* One int per layer, all of which agree. */
static bool expert_list(mm_config c, const char *key, const mm_json *v, const mm_model *m, uint32_t *out, mm_err *err) {
  for (size_t i = 0; i < mm_json_size(v); i++) {
    uint32_t n = 0;
    if (!u32_value(c, key, mm_json_at(v, i), &n, err)) return false;
    if (i > 0 && n != *out)
      return FEATURE("key \"%s\": found %u in entry %zu, expected %u as in those before, only one number for all layers is supported", key,
                     n, i, *out);
    *out = n;
  }
  if (mm_json_size(v) != m->layers) return RANGE("key \"%s\": found %zu entries, expected %u (layers)", key, mm_json_size(v), m->layers);
  return true;
}

/* num_local_experts: an int or such a list. */
static bool experts(mm_config c, mm_model *m, mm_err *err) {
  const char *const keys[] = {"num_local_experts", "num_experts", NULL};
  const char *key = NULL, *first = NULL;
  const mm_json *v;
  for (size_t at = 0; (v = next_present(c, keys, &at, &key)); first = first ? first : key) {
    uint32_t n = 0;
    if (!(mm_json_type_of(v) == MM_JSON_ARR ? expert_list(c, key, v, m, &n, err) : u32_value(c, key, v, &n, err))) return false;
    if (first && n != m->experts) return CONTRADICT("%u", key, n, m->experts, first);
    m->experts = n;
  }
  return first || mm_config_u32(c, keys, &m->experts, err);
}

/* The RoPE parameters of a config, from all their places. */
typedef struct mm_rope {
  mm_first_number factor, theta;
} mm_rope;

/* A factor with the type "default", which all readers leave alone: transformers, vLLM and SGLang. */
static bool idle_factor(const mm_json *rope, const char *key) {
  const char *a = text_of(mm_json_get(rope, "rope_type")), *b = text_of(mm_json_get(rope, "type"));
  return strcmp(key, "factor") == 0 && ((a && strcmp(a, "default") == 0) || (b && strcmp(b, "default") == 0));
}

/* An object of parameters: {"rope_theta": …}, or {"full_attention": {"rope_theta": …}, …} with one for each type of layer. Lightning
 * attention has no RoPE, so those of "linear_attention" have no effect. */
static bool rope_object(mm_config c, const char *name, const mm_json *v, bool nested, mm_rope *r, mm_err *err) {
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  if (mm_json_type_of(v) != MM_JSON_OBJ) return type_error(c, name, v, "an object", err);
  mm_config in = {v, c.file};
  if (!mm_config_only(in, "rope_type", "default", err) || !mm_config_only(in, "type", "default", err) ||
      !number_again(in, name, "partial_rotary_factor", &r->factor, err) || !number_again(in, name, "rope_theta", &r->theta, err))
    return false;
  const char *key;
  const mm_json *x;
  void *iter = NULL;
  while (mm_json_next(v, &iter, &key, &x)) {
    static const char *const known[] = {"rope_type", "type", "partial_rotary_factor", "rope_theta", NULL};
    const bool full = !nested && strcmp(key, "full_attention") == 0,
               idle = (!nested && strcmp(key, "linear_attention") == 0) || idle_factor(v, key);
    if (full && !rope_object(c, MM_FORMATTED(96, "%s.full_attention", name), x, true, r, err)) return false;
    if (full || idle || listed(known, key) || mm_json_type_of(x) == MM_JSON_NULL) continue;
    const char *shown = MM_ESCAPED(64, key);
    if (mm_json_type_of(x) == MM_JSON_OBJ)
      return FEATURE("key \"%s\": found parameters of \"%s\", only full_attention and linear_attention are supported", name, shown);
    return FEATURE("key \"%s\": found \"%s\", only rope_theta and partial_rotary_factor are supported", name, shown);
  }
  return true;
}

/* partial_rotary_factor and rope_theta, at top level and inside rope_parameters / rope_scaling. */
static bool read_rope(mm_config c, mm_rope *r, mm_err *err) {
  *r = (mm_rope){.factor = {.key = ""}, .theta = {.key = ""}};
  return number_again(c, "", "rope_theta", &r->theta, err) && number_again(c, "", "partial_rotary_factor", &r->factor, err) &&
         rope_object(c, "rope_parameters", mm_json_get(c.obj, "rope_parameters"), false, r, err) &&
         rope_object(c, "rope_scaling", mm_json_get(c.obj, "rope_scaling"), false, r, err);
}

bool mm_config_whole_rope(mm_config c, double *theta, mm_err *err) {
  mm_rope r;
  if (!read_rope(c, &r, err)) return false;
  if (!r.theta.key[0])
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL), "key \"rope_theta\": found nothing, expected a number");
  *theta = r.theta.value;
  return !r.factor.key[0] || r.factor.value == 1 || FEATURE("key \"%s\": found %g, only 1 is supported", r.factor.key, r.factor.value);
}

/* rotary_dim, or partial_rotary_factor and rope_theta from all their places. */
static bool rotary(mm_config c, mm_model *m, mm_err *err) {
  mm_rope r;
  uint32_t own = 0;
  if (!read_rope(c, &r, err) || !mm_config_u32_or(c, (const char *const[]){"rotary_dim", NULL}, &own, err)) return false;
  if (r.theta.key[0]) m->rope_theta = r.theta.value;
  if (own) m->rotary_dim = own;
  if (!r.factor.key[0])
    return m->rotary_dim > 0 || mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL),
                                        "key \"rotary_dim\": found neither it nor partial_rotary_factor, expected an integer");
  double exact = r.factor.value * m->head_dim, dims = round(exact); /* 32 / 96 · 96 is not 32 */
  if (!(dims >= 2 && dims <= m->head_dim) || fabs(exact - dims) > 1e-9 * dims)
    return RANGE("key \"%s\": found %g of head_dim %u, expected a whole number of dimensions, 2 to %u", r.factor.key, r.factor.value,
                 m->head_dim, m->head_dim);
  if (own && own != dims)
    return RANGE("key \"rotary_dim\": found %u, expected %g: key \"%s\" is %.17g of head_dim %u", own, dims, r.factor.key, r.factor.value,
                 m->head_dim);
  m->rotary_dim = (uint32_t)dims;
  return true;
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
  /* The classes of M1 and M2, remote and in transformers 5, turn whole heads where nothing is said. Readers of M3 differ. */
  if (m->rotary_dim == 0 && m->family != MM_FAMILY_M3) m->rotary_dim = m->head_dim;
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
    if (k == 2)
      return RANGE("key \"%s\": found %s in entry %u, expected 0/\"%s\" or 1/\"%s\"", x->key, MM_SHOWN_JSON(e), l, x->word[0], x->word[1]);
    out[l] = x->value[k];
  }
  return true;
}

static const char *const attn_keys[] = {"attn_type_list", "decoder_attention_types", "layer_types", NULL};

bool mm_arch_attn_fits(const mm_arch *a, mm_config c, bool (*has)(const void *ctx, const char *name), const void *ctx, mm_err *err) {
  const char *key;
  size_t at = 0;
  mm_model m = {0};
  if (a != &mm_arch_minimax_m1 || next_present(c, attn_keys, &at, &key)) return true;
  if (!a->read_config(c.obj, c.file, &m, err)) return false;
  for (uint32_t l = 0; l < m.layers; l++) {
    const char *norm = MM_FORMATTED(64, "model.layers.%u.self_attn.norm.weight", l); /* that only lightning attention has, in one form */
    const bool lightning = has(ctx, norm);
    if (lightning == (m.attn[l] == MM_ATTN_LIGHTNING)) continue;
    return mm_fail(err, MM_BAD_INPUT, "E_CFG_MISSING", mm_at(c.file, NULL),
                   "key \"%s\": found %s, expected a list: layer %u is %s attention by default, and the source has %s \"%s\"", attn_keys[0],
                   mm_json_get(c.obj, attn_keys[0]) ? "null" : "nothing", l, lightning ? "full" : "lightning", lightning ? "a" : "no",
                   norm);
  }
  return true;
}

bool mm_config_attn_types(mm_config c, mm_model *m, mm_err *err) {
  static const char *const word[] = {[MM_ATTN_LIGHTNING] = "0/\"linear_attention\"", [MM_ATTN_FULL] = "1/\"full_attention\""};
  const char *key = NULL, *first = NULL;
  for (size_t at = 0; next_present(c, attn_keys, &at, &key); first = first ? first : key) {
    const mm_config_list list = {key, {"linear_attention", "full_attention"}, {MM_ATTN_LIGHTNING, MM_ATTN_FULL}};
    uint8_t type[MM_MAX_LAYERS] = {0};
    bool found;
    if (!mm_config_layers(c, &list, m->layers, type, &found, err)) return false;
    for (uint32_t l = 0; l < m->layers; l++) {
      if (first && type[l] != m->attn[l])
        return RANGE("key \"%s\": found %s in entry %u, expected %s as in key \"%s\", which means the same", key, word[type[l]], l,
                     word[m->attn[l]], first);
      m->attn[l] = type[l];
    }
  }
  return true;
}

uint32_t mm_dim_extent(mm_dim d, const mm_model *m) {
  switch (d) {
    case MM_DIM_NONE: return 1;
    case MM_DIM_HIDDEN: return m->hidden;
    case MM_DIM_VOCAB: return m->vocab;
    case MM_DIM_Q: return m->heads * m->head_dim;
    case MM_DIM_QKV: return 3 * m->heads * m->head_dim;
    case MM_DIM_KV: return m->kv_heads * m->head_dim;
    case MM_DIM_HEADS: return m->heads;
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

/* True if the decimal number at `at` ends with a dot and is `limit` or more. */
static bool number_past(const char *at, uint32_t limit) {
  const size_t n = strspn(at, "0123456789");
  return n > 0 && at[n] == '.' && (n > 9 || strtoul(at, NULL, 10) >= limit);
}

bool mm_name_past_layers(const char *name, const mm_model *m) {
  static const char theirs[] = "model.layers.", llama[] = "blk.";
  const size_t n = strncmp(name, theirs, sizeof theirs - 1) == 0 ? sizeof theirs - 1
                   : strncmp(name, llama, sizeof llama - 1) == 0 ? sizeof llama - 1
                                                                 : 0;
  return n > 0 && number_past(name + n, m->layers);
}

bool mm_name_past_experts(const char *name, const mm_model *m) {
  static const char before[] = ".experts.";
  const char *at = strstr(name, before);
  return at && number_past(at + sizeof before - 1, m->experts);
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
