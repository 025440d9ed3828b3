/* Reads the quantization that a checkpoint declares. The method has to be a supported one, and the weights must not have been changed in a
 * way that their own tensors do not undo; beyond that only the properties that tensors leave open are recorded. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "convert/model/declared.h"
#include "convert/source/encoding.h"

#define GROUP_MAX (1 << 20)
#define UNROTATED "weights that no transformation changed"

typedef struct mm_declared {
  mm_quantization *q;
  mm_hf *hf;
  const mm_json *obj;
  const char *path;
  bool several_groups;         /* modules differ: nothing can be held against one tensor */
  unsigned zeros[2], order[2]; /* integer groups without, and with */
} mm_declared;

static bool bad(const mm_declared *d, const char *key, const mm_json *v, const char *expected, mm_err *err) {
  char found[MM_JSON_SHOWN];
  return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(d->path, NULL), "key \"%s\": found %s, expected %s", key, mm_json_shown(v, found),
                 expected);
}

static bool refuse(const char *path, const char *code, const char *what, const char *word, const char *expected, mm_err *err) {
  return mm_fail(err, MM_UNSUPPORTED, code, mm_at(path, NULL), "found %s \"%s\", expected %s", what, MM_ESCAPED(64, word), expected);
}

/* The string under a key; what is there must be a string, or null. */
static bool read_word(const mm_declared *d, const mm_json *obj, const char *key, const char **out, mm_err *err) {
  const mm_json *v = mm_json_get(obj, key);
  *out = mm_declared_word(obj, key);
  return *out || mm_json_type_of(v) == MM_JSON_NULL || bad(d, key, v, "a string", err);
}

/* Two sides, as a list or in compressed-tensors' older "128x128"; 0, 0: neither. */
static void read_sides(const mm_json *v, int64_t side[2]) {
  const char *text = mm_json_str(v);
  int end = 0;
  if (text && (sscanf(text, "%7" SCNd64 "x%7" SCNd64 "%n", &side[0], &side[1], &end) != 2 || (size_t)end != mm_json_str_len(v)))
    side[0] = 0;
  for (size_t i = 0; i < 2 && mm_json_type_of(v) == MM_JSON_ARR && mm_json_size(v) == 2; i++)
    side[i] = mm_json_type_of(mm_json_at(v, i)) == MM_JSON_INT ? mm_json_int(mm_json_at(v, i)) : 0;
}

static bool read_block(mm_declared *d, const mm_json *v, const char *key, mm_err *err) {
  int64_t side[2] = {0, 0};
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  read_sides(v, side);
  for (size_t i = 0; i < 2; i++)
    if (side[i] < 1 || side[i] > GROUP_MAX) return bad(d, key, v, "two integers from 1 to 1048576", err);
  mm_cell *block = &d->q->block;
  if (block->n != 0 && (block->n != side[0] || block->k != side[1])) return bad(d, key, v, "one block size for all modules", err);
  *block = (mm_cell){(uint32_t)side[0], (uint32_t)side[1]};
  return true;
}

/* A group size; -1, 0 and null stand for whole rows. */
static bool read_group(mm_declared *d, const mm_json *v, const char *key, mm_err *err) {
  mm_json_type t = mm_json_type_of(v);
  if ((t != MM_JSON_NULL && t != MM_JSON_INT) || (t == MM_JSON_INT && (mm_json_int(v) < -1 || mm_json_int(v) > GROUP_MAX)))
    return bad(d, key, v, "an integer from -1 to 1048576", err);
  uint32_t g = t == MM_JSON_INT && mm_json_int(v) > 0 ? (uint32_t)mm_json_int(v) : UINT32_MAX;
  for (unsigned i = 0; i < d->q->groups; i++)
    if (d->q->group[i] == g) return true;
  if (d->q->groups == sizeof d->q->group / sizeof *d->q->group)
    d->several_groups = true;
  else
    d->q->group[d->q->groups++] = g;
  return true;
}

/* A width in bits that some encoding has. `plain`: 16 and 32, which stand for modules that are not quantised, will do too. */
static bool read_bits(const mm_declared *d, const mm_json *obj, const char *key, bool plain, mm_err *err) {
  const mm_json *v = mm_json_get(obj, key);
  if (mm_json_type_of(v) == MM_JSON_NULL) return true;
  if (mm_json_type_of(v) != MM_JSON_INT) return bad(d, key, v, "an integer", err);
  const int64_t n = mm_json_int(v);
  if (n == 4 || n == 8) d->q->bits |= (unsigned)n;
  return n == 4 || n == 8 || (plain && (n == 16 || n == 32)) ||
         mm_fail(err, MM_UNSUPPORTED, "E_Q_METHOD", mm_at(d->path, NULL), "key \"%s\": found %lld, expected 4 or 8", key, (long long)n);
}

/* The same in rules for single modules, and their group sizes: {"NAME": {"bits": 3, "group_size": 64}, …}. */
static bool read_modules(mm_declared *d, const char *key, mm_err *err) {
  const mm_json *rules = mm_json_get(d->obj, key), *rule;
  const char *name;
  void *iter = NULL;
  if (mm_json_type_of(rules) != MM_JSON_NULL && mm_json_type_of(rules) != MM_JSON_OBJ) return bad(d, key, rules, "an object", err);
  while (mm_json_next(rules, &iter, &name, &rule)) {
    const mm_json *group = mm_json_get(rule, "group_size"), *sym = mm_json_get(rule, "sym");
    if (mm_json_type_of(sym) != MM_JSON_NULL && mm_json_type_of(sym) != MM_JSON_BOOL) return bad(d, "sym", sym, "true or false", err);
    if (mm_json_type_of(rule) == MM_JSON_OBJ && !read_bits(d, rule, "bits", true, err)) return false;
    if (mm_json_type_of(group) != MM_JSON_NULL && !read_group(d, group, "group_size", err)) return false;
  }
  return true;
}

/* ---- one reader per family ---- */

/* Two names of one integer: both may stand where they agree. */
static bool agree(const mm_declared *d, const char *key, const char *other, mm_err *err) {
  const mm_json *a = mm_json_get(d->obj, key), *b = mm_json_get(d->obj, other);
  char found[MM_JSON_SHOWN], expected[MM_JSON_SHOWN];
  if (mm_json_type_of(a) != MM_JSON_INT || mm_json_type_of(b) != MM_JSON_INT || mm_json_int(a) == mm_json_int(b)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(d->path, NULL),
                 "key \"%s\": found %s, expected %s as in key \"%s\", which means the same", key, mm_json_shown(a, found),
                 mm_json_shown(b, expected), other);
}

/* The string under a key of older tools, or under "format", as GPTQModel and transformers 5 write it. Both may stand where they agree. */
static bool read_format(const mm_declared *d, const char *older, const char **out, mm_err *err) {
  const char *format;
  char found[MM_JSON_SHOWN], expected[MM_JSON_SHOWN];
  if (!read_word(d, d->obj, older, out, err) || !read_word(d, d->obj, "format", &format, err)) return false;
  if (*out && format && strcasecmp(*out, format) != 0)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(d->path, NULL),
                   "key \"%s\": found %s, expected %s as in key \"format\", which means the same", older,
                   mm_json_shown(mm_json_get(d->obj, older), found), mm_json_shown(mm_json_get(d->obj, "format"), expected));
  if (!*out) *out = format;
  return true;
}

static bool read_awq(mm_declared *d, mm_err *err) {
  const char *version, *key = mm_json_type_of(mm_json_get(d->obj, "q_group_size")) == MM_JSON_NULL ? "group_size" : "q_group_size";
  if (!read_format(d, "version", &version, err)) return false;
  if (version && !mm_declared_listed("gemm GEMM", version)) return refuse(d->path, "E_Q_METHOD", "AWQ version", version, "gemm", err);
  if (!read_bits(d, d->obj, "bits", false, err) || !read_bits(d, d->obj, "w_bit", false, err)) return false;
  if (!agree(d, "w_bit", "bits", err) || !agree(d, "q_group_size", "group_size", err)) return false;
  bool zeros = true;
  if (!mm_config_bool_or((mm_config){d->obj, d->path}, "zero_point", &zeros, err)) return false;
  d->q->symmetric = !zeros;
  return read_group(d, mm_json_get(d->obj, key), key, err);
}

static bool read_rules(mm_declared *d, const mm_json *dynamic, mm_err *err) {
  const mm_declaration own = {&d->hf->arena, d->path, d->q->symmetric, d->q->order};
  return mm_module_groups_rules(&own, dynamic, mm_json_get(d->obj, "extra_config"), &d->q->differing, err);
}

static bool read_gptq(mm_declared *d, mm_err *err) {
  const char *format, *words;
  bool sym = false, desc = false;
  mm_config c = {d->obj, d->path};
  if (!read_format(d, "checkpoint_format", &format, err) || !mm_config_must_be(c, "is_marlin_format", false, err)) return false;
  d->q->less_assumed = !format && strcmp(d->q->method, "gptq") == 0;
  if (!format) format = strcmp(d->q->method, "gptq_v2") == 0 ? "gptq_v2" : "gptq";
  if (strcmp(d->q->method, "gptq_v2") == 0 && strcmp(format, "gptq") == 0)
    return bad(d, "checkpoint_format", mm_json_get(d->obj, "checkpoint_format"), "\"gptq_v2\" as in key \"quant_method\"", err);
  if (!mm_declared_listed("gptq gptq_v2", format))
    return refuse(d->path, "E_Q_METHOD", "GPTQ checkpoint_format", format, "gptq or gptq_v2", err);
  if (!read_word(d, d->obj, "pack_dtype", &words, err)) return false;
  if (words && strcmp(words, "int32") != 0) return refuse(d->path, "E_Q_METHOD", "pack_dtype", words, "int32", err);
  if (!read_bits(d, d->obj, "bits", false, err) || !read_modules(d, "dynamic", err)) return false;
  if (!mm_config_bool_or(c, "sym", &sym, err) || !mm_config_bool_or(c, "desc_act", &desc, err)) return false;
  d->q->gptq = true;
  d->q->zero_less = strcmp(format, "gptq") == 0;
  d->q->symmetric = sym;
  d->q->order = desc;
  if (!read_rules(d, mm_json_get(d->obj, "dynamic"), err)) return false;
  return read_group(d, mm_json_get(d->obj, "group_size"), "group_size", err);
}

static bool read_auto_round(mm_declared *d, mm_err *err) {
  const char *packing;
  if (!read_word(d, d->obj, "packing_format", &packing, err) || !read_bits(d, d->obj, "bits", false, err) ||
      !read_modules(d, "extra_config", err))
    return false;
  if (packing && mm_declared_listed("auto_round:auto_gptq auto_round:gptq", packing)) return read_gptq(d, err);
  if (packing && strcmp(packing, "auto_round:auto_awq") == 0) {
    return read_awq(d, err) && mm_config_bool_or((mm_config){d->obj, d->path}, "sym", &d->q->symmetric, err) && read_rules(d, NULL, err);
  }
  return refuse(d->path, "E_Q_METHOD", "auto-round packing_format", packing ? packing : "",
                "auto_round:auto_gptq, auto_round:gptq or auto_round:auto_awq", err);
}

static bool read_modelopt(mm_declared *d, mm_err *err) {
  static const char algos[] =
      "FP8 FP8_PB_WO FP8_PER_CHANNEL_PER_TOKEN NVFP4 NVFP4_AWQ W4A16_NVFP4 W4A16_AWQ W4A8_AWQ W4A8_NVFP4_FP8 "
      "W4A8_MXFP4_FP8 MXFP4 MXFP8 W8A16 W8A8_SQ_PER_CHANNEL INT8_SQ MIXED_PRECISION";
  const mm_json *inner = mm_json_get(d->obj, "quantization");
  const mm_json *obj = mm_json_type_of(inner) == MM_JSON_OBJ ? inner : d->obj;
  const char *algo = mm_declared_word(obj, "quant_algo");
  if (!algo) return bad(d, "quant_algo", mm_json_get(obj, "quant_algo"), "the name of a quantization", err);
  if (strcmp(algo, "NVFP4_SVD") == 0) return refuse(d->path, "E_Q_TRANSFORM", "SVDQuant's", algo, UNROTATED, err);
  if (!mm_declared_listed(algos, algo)) return refuse(d->path, "E_Q_METHOD", "quant_algo", algo, algos, err);
  if (d->q->block.n == 0) d->q->block = (mm_cell){128, 128}; /* FP8_PB_WO has no other */
  d->several_groups = strcmp(algo, "MIXED_PRECISION") == 0;
  const mm_json *group = mm_json_get(obj, "group_size");
  return mm_json_type_of(group) == MM_JSON_NULL || read_group(d, group, "group_size", err);
}

/* `format`: of the group, or of all. */
static bool read_ct_weights(mm_declared *d, const mm_json *w, const char *format, mm_err *err) {
  const char *strategy;
  mm_module_group group;
  if (mm_json_type_of(w) == MM_JSON_NULL) return true;
  if (!read_word(d, w, "strategy", &strategy, err) || !mm_module_group_read(d->path, w, &group, err)) return false;
  if (strategy && strcasecmp(strategy, "block") == 0 && !read_block(d, mm_json_get(w, "block_structure"), "block_structure", err))
    return false;
  if (!read_bits(d, w, "num_bits", false, err)) return false;
  if (!group.integers) return true;
  if (group.zeros && format && mm_declared_listed("int-quantized naive-quantized", format))
    return refuse(d->path, "E_Q_METHOD", "zero points (\"symmetric\": false) of integers in the format", format, "pack-quantized", err);
  d->zeros[group.zeros]++;
  d->order[group.order]++;
  return read_group(d, mm_json_get(w, "group_size"), "group_size", err);
}

static bool read_compressed_tensors(mm_declared *d, mm_err *err) {
  static const char formats[] =
      "dense float-quantized naive-quantized int-quantized pack-quantized nvfp4-pack-quantized "
      "mxfp4-pack-quantized mxfp8-quantized mixed-precision";
  const char *format, *sparse;
  if (!read_word(d, d->obj, "format", &format, err) || !read_word(d, mm_json_get(d->obj, "sparsity_config"), "format", &sparse, err))
    return false;
  if (format && !mm_declared_listed(formats, format))
    return refuse(d->path, "E_Q_METHOD", "compressed-tensors format", format, formats, err);
  if (sparse && strcmp(sparse, "dense") != 0) return refuse(d->path, "E_Q_METHOD", "compressed-tensors sparsity", sparse, "dense", err);
  const mm_json *groups = mm_json_get(d->obj, "config_groups"), *group;
  const char *name;
  void *iter = NULL;
  if (mm_json_type_of(groups) != MM_JSON_OBJ) return bad(d, "config_groups", groups, "an object", err);
  while (mm_json_next(groups, &iter, &name, &group)) {
    const char *own;
    if (!read_word(d, group, "format", &own, err)) return false;
    if (own && !mm_declared_listed(formats, own)) return refuse(d->path, "E_Q_METHOD", "compressed-tensors format", own, formats, err);
    if (!read_ct_weights(d, mm_json_get(group, "weights"), own ? own : format, err)) return false;
  }
  d->q->zeros = d->zeros[1] > 0 && d->zeros[0] == 0;
  d->q->symmetric = d->zeros[0] > 0 && d->zeros[1] == 0;
  d->q->order = d->order[1] > 0 && d->order[0] == 0;
  if (!(d->zeros[0] && d->zeros[1]) && !(d->order[0] && d->order[1])) return true;
  return (d->q->differing = mm_module_groups_compressed(&(mm_declaration){&d->hf->arena, d->path, false, false}, groups, err));
}

#define PLAIN    "fp8 fbgemm_fp8 mxfp8 mxfp4 w4afp8 quark"
#define MODELOPT MM_MODELOPT
#define GPTQ     "gptq gptq_v2"
#define METHODS  PLAIN " " MODELOPT " awq " GPTQ " auto-round compressed-tensors"
/* read NULL: it says nothing that tensors leave open. */
static const struct {
  const char *methods;
  bool (*read)(mm_declared *d, mm_err *err);
} readers[] = {{PLAIN, NULL},     {MODELOPT, read_modelopt},       {"awq", read_awq},
               {GPTQ, read_gptq}, {"auto-round", read_auto_round}, {"compressed-tensors", read_compressed_tensors}};

static size_t reader_of(const char *method) {
  size_t i = 0;
  while (i < sizeof readers / sizeof *readers && !mm_declared_listed(readers[i].methods, method)) i++;
  return i;
}

/* GPTQModel writes its method under two keys, of which engines read either. */
static bool one_method(const mm_declared *d, mm_err *err) {
  const char *older = mm_declared_word(d->obj, "quant_method"), *newer = mm_declared_word(d->obj, "method");
  const bool read =
      older && newer && reader_of(older) < sizeof readers / sizeof *readers && reader_of(newer) < sizeof readers / sizeof *readers;
  return !read || strcmp(older, newer) == 0 ||
         bad(d, "method", mm_json_get(d->obj, "method"), MM_FORMATTED(96, "\"%s\" as in key \"quant_method\"", older), err);
}

/* Static scales of inputs are the largest input over 448 for FP8, over 2688 for NVFP4. */
static bool one_kind_of_scales(const mm_declared *d, mm_err *err) {
  const unsigned both = 1u << MM_NUMBERS_FP8 | 1u << MM_NUMBERS_FP4, set = d->q->inputs.of[MM_NUMBERS_FP4];
  return (set & both) != both || mm_fail(err, MM_UNSUPPORTED, "E_Q_METHOD", mm_at(d->path, NULL),
                                         "found 4-bit floats with inputs in FP8 next to such with inputs in FP4, expected one of the two");
}

bool mm_quantization_parse(mm_hf *hf, const mm_json *j, const char *path, const char *fallback, mm_err *err) {
  mm_declared d = {.q = &hf->quantization, .hf = hf, .obj = j, .path = path};
  mm_json_ctx ctx = {path, MM_BAD_INPUT, "E_Q_CONFIG"};
  const char *method = fallback;
  if (mm_json_type_of(j) != MM_JSON_OBJ) return bad(&d, "quantization_config", j, "an object", err);
  if (!fallback && mm_declared_mlx(j)) return refuse(path, "E_Q_METHOD", "the quantization of", "MLX", "the original weights", err);
  if (mm_declared_word(j, "quantization"))
    return refuse(path, "E_Q_METHOD", "FastDeploy's quantization", mm_declared_word(j, "quantization"), "quant_method", err);
  const char *key = !mm_json_get(j, "quant_method") && mm_json_get(j, "method") ? "method" : "quant_method"; /* GPTQModel's newer name */
  if ((!fallback || mm_json_get(j, key)) && !mm_json_need_str(j, key, &method, &ctx, err)) return false;
  if (!one_method(&d, err)) return false;
  d.q->method = mm_arena_strndup(&hf->arena, method, strlen(method), err);
  d.q->path = path;
  const mm_json *block = mm_json_get(j, "weight_block_size");
  d.q->whole = block && mm_json_type_of(block) == MM_JSON_NULL;
  if (!d.q->method || !mm_declared_unrotated(path, j, err) || !read_block(&d, block, "weight_block_size", err)) return false;
  const size_t i = reader_of(method);
  if (i == sizeof readers / sizeof *readers) return refuse(path, "E_Q_METHOD", "quant_method", method, "one of " METHODS, err);
  if (readers[i].read && !readers[i].read(&d, err)) return false;
  if (d.several_groups) d.q->groups = 0;
  mm_declared_inputs_read(j, method, &d.q->inputs);
  d.q->kinds = mm_declared_kinds(j, method);
  d.q->scales = strcmp(method, "w4afp8") == 0 ? 0 : mm_declared_scales(j); /* whose scheme is that of dense layers */
  d.q->e5m2 = mm_declared_word(j, "fmt") && strstr(mm_declared_word(j, "fmt"), "e5m2");
  return one_kind_of_scales(&d, err);
}
