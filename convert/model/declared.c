/* Reading what a quantization's description says of weights and inputs beyond their encoding. */
#include "convert/model/declared.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define BIT(n) (uint8_t)(1u << (n))

const char *mm_declared_word(const mm_json *obj, const char *key) {
  const mm_json *v = mm_json_get(obj, key);
  const char *text = mm_json_str(v);
  return text && strlen(text) == mm_json_str_len(v) ? text : NULL;
}

bool mm_declared_listed(const char *list, const char *w) {
  for (size_t n; *list; list += n + (list[n] == ' ')) {
    n = strcspn(list, " ");
    if (strlen(w) == n && memcmp(list, w, n) == 0) return true;
  }
  return false;
}

bool mm_declared_mlx(const mm_json *j) {
  return mm_json_type_of(j) == MM_JSON_OBJ && !mm_json_get(j, "quant_method") && !mm_json_get(j, "method") &&
         !mm_json_get(j, "quant_algo") && mm_json_type_of(mm_json_get(j, "group_size")) == MM_JSON_INT &&
         mm_json_type_of(mm_json_get(j, "bits")) == MM_JSON_INT;
}

/* A config.json, or its text model's part. */
static void make_plain(mm_json *config, const mm_dtype *type) {
  static const char *const quantization[] = {"quantization_config", "compression_config"}, *const key[] = {"torch_dtype", "dtype"};
  const char *name = !type ? NULL : *type == MM_BF16 ? "bfloat16" : *type == MM_F16 ? "float16" : *type == MM_F32 ? "float32" : NULL;
  for (size_t i = 0; i < 2; i++) {
    mm_json_remove(config, quantization[i]);
    if (name && mm_json_str(mm_json_get(config, key[i]))) mm_json_put_text(config, key[i], name);
  }
}

mm_json *mm_declared_plain(const mm_json *config, const mm_dtype *type, mm_err *err) {
  const mm_json *text = mm_json_get(config, "text_config"); /* has it in some */
  mm_json *out = mm_json_copy(config, err);
  mm_json *own = mm_json_type_of(text) == MM_JSON_OBJ ? mm_json_set(out, "text_config", mm_json_copy(text, err)) : NULL;
  make_plain(out, type), make_plain(own, type);
  return out;
}

/* ---- transformations ---- */

static bool rotated(const char *path, const char *by, mm_err *err) {
  return mm_fail(err, MM_UNSUPPORTED, "E_Q_TRANSFORM", mm_at(path, NULL),
                 "found weights rotated by \"%s\", expected weights that no transformation changed", MM_ESCAPED(64, by));
}

/* True if a value says nothing: null, false, 0, "none", or an empty one. */
static bool says_nothing(const mm_json *v) {
  const char *text = mm_json_str(v);
  switch (mm_json_type_of(v)) {
    case MM_JSON_NULL: return true;
    case MM_JSON_BOOL: return !mm_json_bool(v);
    case MM_JSON_INT: return mm_json_int(v) == 0;
    case MM_JSON_STR: return mm_json_str_len(v) == strlen(text) && (!*text || strcasecmp(text, "none") == 0);
    case MM_JSON_OBJ:
    case MM_JSON_ARR: return mm_json_size(v) == 0;
    default: return false;
  }
}

/* True if a key's value rotates nothing: groups of none, or one that is switched off. */
static bool is_idle(const mm_json *v) {
  static const char *const on[] = {"enable", "enabled"};
  for (size_t i = 0; i < sizeof on / sizeof *on; i++)
    if (mm_json_type_of(mm_json_get(v, on[i])) == MM_JSON_BOOL && !mm_json_bool(mm_json_get(v, on[i]))) return true;
  return says_nothing(v) || (mm_json_size(v) == 1 && mm_json_get(v, "config_groups") && says_nothing(mm_json_get(v, "config_groups")));
}

/* A key under which tools note that weights were rotated: auto-round's, compressed-tensors', GPTQModel's. */
static bool names_rotation(const char *key) {
  static const char *const part[] = {"transform_config", "hadamard", "rotation", "quarot", "spinquant"};
  size_t i = 0;
  while (i < sizeof part / sizeof *part && !strstr(key, part[i])) i++;
  return i < sizeof part / sizeof *part;
}

/* Quark's algorithms: a list, in older versions also a single one. */
static bool no_algorithm(const char *path, const mm_json *v, mm_err *err) {
  const bool list = mm_json_type_of(v) == MM_JSON_ARR;
  for (size_t i = 0, n = list ? mm_json_size(v) : 1; i < n; i++) {
    const char *name = mm_declared_word(list ? mm_json_at(v, i) : v, "name");
    if (name && mm_declared_listed("rotation quarot spinquant svdquant", name)) return rotated(path, name, err);
  }
  return true;
}

bool mm_declared_unrotated(const char *path, const mm_json *obj, mm_err *err) {
  const mm_json *value;
  const char *key;
  void *iter = NULL;
  while (mm_json_next(obj, &iter, &key, &value))
    if (names_rotation(key) && !is_idle(value)) return rotated(path, key, err);
  return no_algorithm(path, mm_json_get(obj, "algo_config"), err) && no_algorithm(path, mm_json_get(obj, "pre_quant_opt_config"), err);
}

/* ---- inputs ---- */

static void declare(mm_declared_inputs *out, mm_numbers weights, mm_numbers inputs) { out->of[weights] |= BIT(inputs); }

/* The kind of "type" and "num_bits", as compressed-tensors and ModelOpt write them. COUNT: another one. */
static mm_numbers kind_of(const mm_json *args) {
  const char *type = mm_declared_word(args, "type");
  const mm_json *bits = mm_json_get(args, "num_bits");
  const int64_t n = mm_json_type_of(bits) == MM_JSON_INT ? mm_json_int(bits) : 0;
  if (!type || (n != 4 && n != 8)) return MM_NUMBERS_COUNT;
  if (strcasecmp(type, "float") == 0) return n == 8 ? MM_NUMBERS_FP8 : MM_NUMBERS_FP4;
  return strcasecmp(type, "int") != 0 ? MM_NUMBERS_COUNT : n == 8 ? MM_NUMBERS_INT8 : MM_NUMBERS_INT4;
}

static void read_groups(const mm_json *obj, mm_declared_inputs *out) {
  const mm_json *groups = mm_json_get(obj, "config_groups"), *group;
  const char *name;
  void *iter = NULL;
  while (mm_json_next(groups, &iter, &name, &group)) {
    const mm_json *weights = mm_json_get(group, "weights"), *inputs = mm_json_get(group, "input_activations");
    const mm_numbers of = kind_of(weights), in = mm_json_type_of(inputs) == MM_JSON_NULL ? MM_NUMBERS_PLAIN : kind_of(inputs);
    if (of == MM_NUMBERS_COUNT || in == MM_NUMBERS_COUNT) continue;
    declare(out, of, in);
    if (of == MM_NUMBERS_INT4 && in != MM_NUMBERS_PLAIN) declare(out, MM_NUMBERS_INT8, in); /* int-quantized stores them in bytes */
  }
}

/* ModelOpt's algorithms, after its export. */
static const struct {
  const char *words;
  mm_numbers weights, inputs;
} algorithm[] = {{"FP8 FP8_PER_CHANNEL_PER_TOKEN MXFP8", MM_NUMBERS_FP8, MM_NUMBERS_FP8},
                 {"FP8_PB_WO", MM_NUMBERS_FP8, MM_NUMBERS_PLAIN},
                 {"NVFP4 NVFP4_AWQ MXFP4", MM_NUMBERS_FP4, MM_NUMBERS_FP4},
                 {"W4A16_NVFP4", MM_NUMBERS_FP4, MM_NUMBERS_PLAIN},
                 {"W4A8_NVFP4_FP8 W4A8_MXFP4_FP8", MM_NUMBERS_FP4, MM_NUMBERS_FP8},
                 {"W4A16_AWQ", MM_NUMBERS_INT4, MM_NUMBERS_PLAIN},
                 {"W4A8_AWQ", MM_NUMBERS_INT4, MM_NUMBERS_FP8},
                 {"W8A16", MM_NUMBERS_INT8, MM_NUMBERS_PLAIN},
                 {"W8A8_SQ_PER_CHANNEL INT8_SQ", MM_NUMBERS_INT8, MM_NUMBERS_INT8}};

static void read_algorithm(const mm_json *obj, mm_declared_inputs *out) {
  const char *word = mm_declared_word(obj, "quant_algo");
  for (size_t i = 0; word && i < sizeof algorithm / sizeof *algorithm; i++)
    if (mm_declared_listed(algorithm[i].words, word)) declare(out, algorithm[i].weights, algorithm[i].inputs);
}

static void read_modelopt(const mm_json *obj, mm_declared_inputs *out) {
  const mm_json *inner = mm_json_get(obj, "quantization"), *layer;
  const mm_json *of = mm_json_type_of(inner) == MM_JSON_OBJ ? inner : obj, *layers = mm_json_get(of, "quantized_layers");
  const char *name;
  void *iter = NULL;
  read_algorithm(of, out);
  while (mm_json_next(layers, &iter, &name, &layer)) read_algorithm(layer, out);
}

/* AutoRound's act_bits, 16 where it says nothing, of integers. */
static void read_auto_round(const mm_json *obj, mm_declared_inputs *out) {
  const mm_json *bits = mm_json_get(obj, "act_bits");
  const char *type = mm_declared_word(obj, "act_data_type");
  if (!type) type = mm_declared_word(obj, "data_type");
  mm_numbers inputs = MM_NUMBERS_PLAIN;
  if (mm_json_type_of(bits) == MM_JSON_INT && mm_json_int(bits) < 16) {
    if (mm_json_int(bits) != 8 || !type) return;
    inputs = strstr(type, "fp") ? MM_NUMBERS_FP8 : MM_NUMBERS_INT8;
  }
  declare(out, MM_NUMBERS_INT4, inputs);
  declare(out, MM_NUMBERS_INT8, inputs);
}

void mm_declared_inputs_read(const mm_json *obj, const char *method, mm_declared_inputs *out) {
  *out = (mm_declared_inputs){{0}};
  if (strcmp(method, "compressed-tensors") == 0) {
    read_groups(obj, out);
  } else if (mm_declared_listed(MM_MODELOPT, method)) {
    read_modelopt(obj, out);
  } else if (strcmp(method, "auto-round") == 0) {
    read_auto_round(obj, out);
  } else if (mm_declared_listed("awq gptq gptq_v2", method) && mm_json_type_of(mm_json_get(obj, "activation")) == MM_JSON_NULL) {
    declare(out, MM_NUMBERS_INT4, MM_NUMBERS_PLAIN);
    declare(out, MM_NUMBERS_INT8, MM_NUMBERS_PLAIN);
  }
}

const char *mm_numbers_words(unsigned set, char out[96]) {
  static const char *const word[] = {"as they are", "in FP8", "in INT8", "in INT4", "in FP4"};
  size_t n = 0;
  *out = 0;
  for (unsigned i = 0; i < MM_NUMBERS_COUNT; i++)
    if (set >> i & 1) n += (size_t)snprintf(out + n, 96 - n, "%s%s", n ? " or " : "", word[i]);
  return out;
}

unsigned mm_declared_scales(const mm_json *obj) {
  const char *word = mm_declared_word(obj, "activation_scheme"), *name;
  const mm_json *groups = mm_json_get(obj, "config_groups"), *group;
  void *iter = NULL;
  unsigned set = !word ? 0 : strcmp(word, "static") == 0 ? MM_SCALES_STATIC : strcmp(word, "dynamic") == 0 ? MM_SCALES_DYNAMIC : 0;
  while (!word && mm_json_next(groups, &iter, &name, &group)) {
    const mm_json *inputs = mm_json_get(group, "input_activations"), *dynamic = mm_json_get(inputs, "dynamic");
    if (mm_json_type_of(inputs) == MM_JSON_OBJ)
      set |= mm_json_type_of(dynamic) == MM_JSON_BOOL && mm_json_bool(dynamic) ? MM_SCALES_DYNAMIC : MM_SCALES_STATIC;
  }
  return set;
}

/* ---- two files ---- */

/* The integer under one of two names of it; a group of whole rows is -1, 0 or null. */
static bool integer(const mm_json *obj, const char *key, const char *other, bool group, int64_t *n) {
  const mm_json *v = mm_json_get(obj, key) ? mm_json_get(obj, key) : mm_json_get(obj, other);
  if (mm_json_type_of(v) != MM_JSON_INT) return false;
  *n = group && mm_json_int(v) <= 0 ? -1 : mm_json_int(v);
  return true;
}

bool mm_declared_same_words(const mm_json *own, const mm_json *file, const char *path, mm_err *err) {
  static const char *const key[][2] = {{"bits", "w_bit"}, {"group_size", "q_group_size"}};
  for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
    int64_t found, expected;
    if (!integer(file, key[i][0], key[i][1], i == 1, &found) || !integer(own, key[i][0], key[i][1], i == 1, &expected)) continue;
    if (found != expected)
      return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL), "key \"%s\": found %lld, expected %lld as config.json says",
                     mm_json_get(file, key[i][0]) ? key[i][0] : key[i][1], (long long)found, (long long)expected);
  }
  return true;
}

/* Bits 1u << mm_numbers of the weights that a description says anything of. */
static unsigned kinds(const mm_declared_inputs *x) {
  unsigned set = 0;
  for (unsigned i = MM_NUMBERS_PLAIN + 1; i < MM_NUMBERS_COUNT; i++) set |= x->of[i] ? 1u << i : 0;
  return set;
}

unsigned mm_declared_kinds(const mm_json *obj, const char *method) {
  const mm_json *groups = mm_json_get(obj, "config_groups"), *group, *inner = mm_json_get(obj, "quantization");
  const char *name, *algo = mm_declared_word(mm_json_type_of(inner) == MM_JSON_OBJ ? inner : obj, "quant_algo");
  void *iter = NULL;
  mm_declared_inputs read;
  const bool groups_say = strcmp(method, "compressed-tensors") == 0;
  if (!groups_say && (!mm_declared_listed(MM_MODELOPT, method) || !algo || strcmp(algo, "MIXED_PRECISION") == 0)) return 0;
  while (groups_say && mm_json_next(groups, &iter, &name, &group)) {
    const mm_json *inputs = mm_json_get(group, "input_activations");
    if (kind_of(mm_json_get(group, "weights")) == MM_NUMBERS_COUNT) return 0;
    if (mm_json_type_of(inputs) != MM_JSON_NULL && kind_of(inputs) == MM_NUMBERS_COUNT) return 0;
  }
  mm_declared_inputs_read(obj, method, &read);
  return kinds(&read);
}

/* ModelOpt's words that can mean the same as a method of config.json. */
static const struct {
  const char *methods, *algos;
} same_as[] = {{"fp8 fbgemm_fp8", "FP8 FP8_PB_WO FP8_PER_CHANNEL_PER_TOKEN FP8_BLOCK_SCALES"}, /* the last is TensorRT-LLM's */
               {"mxfp8", "MXFP8"},
               {"mxfp4", "MXFP4 W4A8_MXFP4_FP8 W4A16_MXFP4 W4A8_MXFP4_MXFP8"},
               {"awq", "W4A16_AWQ W4A8_AWQ"},
               {"gptq gptq_v2", "W4A16_GPTQ W8A16_GPTQ W4A16 W8A16"}};

/* Whether ModelOpt's word says what the description in config.json does. */
static bool same_method(const mm_json *own, const mm_json *file, const char *found, const char *path, mm_err *err) {
  const char *method = mm_declared_word(own, "quant_method"), *algo = mm_declared_word(own, "quant_algo");
  const unsigned kinds = method ? mm_declared_kinds(own, method) : 0, kinds_found = mm_declared_kinds(file, "modelopt");
  char words[96];
  bool same = !algo || strcasecmp(algo, found) == 0;
  for (size_t i = 0; method && i < sizeof same_as / sizeof *same_as; i++)
    same = same && (!mm_declared_listed(same_as[i].methods, method) || mm_declared_listed(same_as[i].algos, found));
  if (!same)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL),
                   "key \"quant_algo\": found \"%s\", expected one that means \"%s\", as config.json says", MM_ESCAPED(64, found),
                   MM_ESCAPED(64, algo ? algo : method));
  return !kinds || !kinds_found || (kinds & kinds_found) ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, NULL),
                 "key \"quant_algo\": found \"%s\", expected one of weights %s, as config.json says", MM_ESCAPED(64, found),
                 mm_numbers_words(kinds, words));
}

bool mm_declared_agrees(const mm_json *own, const char *path, mm_err *err) {
  if (access(path, F_OK) != 0 && errno == ENOENT) return true;
  mm_json *file = mm_json_load(path, MM_CONFIG_MAX, err);
  if (!file) return false;
  const mm_json *inner = mm_json_get(file, "quantization");
  const char *found = mm_declared_word(mm_json_type_of(inner) == MM_JSON_OBJ ? inner : file, "quant_algo");
  const bool same = !found || same_method(own, file, found, path, err);
  mm_json_free(file);
  return same;
}
