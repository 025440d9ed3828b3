/* generation_config.json, and what stands in for it. */
#include "runtime/text/ends.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/json.h"
#include "formats/system/file.h"

#define SETTINGS      "generation_config.json"
#define COMPANION_MAX (UINT64_C(16) << 20)

/* Where the files lie: in a checkpoint, whose manifest lists them, or in the folder of a source. */
typedef struct place {
  const char *dir;
  const mm_pack *pack; /* NULL: a source */
  uint32_t vocab;
} place;

static bool lies_there(const place *at, const char *name) {
  return at->pack ? mm_pack_find_file(at->pack, name) != NULL : access(mm_path_of(at->dir, name).text, F_OK) == 0;
}

/* True if the file holds what the conversion copied. */
static bool is_copied(const mm_pack *pack, const char *name, const char *path) {
  const mm_pack_file *file = mm_pack_find_file(pack, name);
  size_t n = 0;
  char *text = mm_file_slurp(path, COMPANION_MAX, &n, MM_IGNORED);
  const mm_digest found = mm_sha256(text ? text : "", n);
  free(text);
  return file && mm_digest_equal(&found, &file->sha256);
}

bool mm_companion_fail(const mm_pack *pack, const char *name, mm_err *reason, mm_err *err) {
  if (!pack || is_copied(pack, name, mm_path_of(pack->dir, name).text)) return mm_fail_as(err, reason);
  return mm_fail_damaged(err, reason);
}

static mm_json *load_object(const char *path, mm_err *err) {
  mm_json *root = mm_file_listed(path, err) ? mm_json_load(path, COMPANION_MAX, err) : NULL;
  if (!root || mm_json_type_of(root) == MM_JSON_OBJ) return root;
  mm_json_free(root);
  mm_fail(err, MM_BAD_INPUT, "E_CFG_TYPE", mm_at(path, NULL), "found a list, expected an object");
  return NULL;
}

/* Marks the ids of eos_token_id, one or a list, if the file has it. */
static bool ends_from_file(const place *at, const char *name, bool *is_end, bool *found, mm_err *err) {
  const uint32_t vocab = at->vocab;
  const mm_path path = mm_path_of(at->dir, name);
  mm_err reason = {0};
  mm_json *root = load_object(path.text, &reason);
  const mm_json *eos = mm_json_get(root, "eos_token_id");
  bool ok = root, list = mm_json_type_of(eos) == MM_JSON_ARR;
  size_t count = list ? mm_json_size(eos) : mm_json_type_of(eos) != MM_JSON_NULL;
  for (size_t i = 0; ok && i < count; i++) {
    const mm_json *id = list ? mm_json_at(eos, i) : eos;
    ok = mm_json_type_of(id) == MM_JSON_INT && mm_json_int(id) >= 0 && mm_json_int(id) < vocab;
    if (ok) *found = true;
    if (ok && is_end) is_end[mm_json_int(id)] = true;
    if (!ok)
      mm_fail(&reason, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(path.text, NULL), "eos_token_id: found %s, expected ids below %u",
              MM_SHOWN_JSON(id), vocab);
  }
  mm_json_free(root);
  return ok || mm_companion_fail(at->pack, name, &reason, err);
}

static const char *const files[] = {SETTINGS, "config.json"};

/* Those of the first file that has some. */
static bool ends_from_files(const place *at, bool *is_end, bool *found, mm_err *err) {
  for (size_t i = 0; !*found && i < sizeof files / sizeof *files; i++)
    if (lies_there(at, files[i]) && !ends_from_file(at, files[i], is_end, found, err)) return false;
  return true;
}

bool mm_ends_find(const mm_pack *pack, const mm_tokenizer *t, bool *is_end, mm_err *err) {
  static const char *const names[] = {"<end_of_sentence>", "<end_of_document>", "[e~["};
  const place at = {pack->dir, pack, pack->model.vocab};
  bool found = false;
  if (!ends_from_files(&at, is_end, &found, err)) return false;
  for (size_t i = 0; !found && i < sizeof names / sizeof *names; i++) {
    int32_t id = mm_tokenizer_find(t, names[i]);
    if (mm_tokenizer_is_special(t, id)) is_end[id] = true;
  }
  return true;
}

void mm_ends_never(const mm_tokenizer *t, uint32_t vocab, bool *never) {
  size_t n;
  for (uint32_t i = 0; i < vocab; i++) never[i] = !mm_tokenizer_bytes(t, (int32_t)i, &n);
}

static bool read_number(const mm_json *root, const char *key, double *out, const mm_json_ctx *c, mm_err *err) {
  return mm_json_type_of(mm_json_get(root, key)) == MM_JSON_NULL || mm_json_need_number(root, key, out, c, err);
}

/* A range is the file's fault here, not the command line's. */
static bool check_defaults(const mm_sampling *set, const char *path, mm_err *err) {
  mm_err own = {0};
  static const char code[] = "E_SAMPLING: ";
  if (mm_sampling_check(set, 0, &own)) return true;
  const size_t skip = strncmp(own.text, code, sizeof code - 1) == 0 ? sizeof code - 1 : 0;
  return mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(path, NULL), "%s", own.text + skip);
}

static bool read_defaults(const mm_json *root, const char *path, mm_sampling *out, mm_err *err) {
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_CFG_TYPE"}, range = {path, MM_BAD_INPUT, "E_CFG_RANGE"};
  int64_t k = out->top_k;
  if (!read_number(root, "temperature", &out->temperature, &c, err) || !read_number(root, "top_p", &out->top_p, &c, err) ||
      !read_number(root, "min_p", &out->min_p, &c, err) || !read_number(root, "repetition_penalty", &out->repetition, &c, err))
    return false;
  const mm_json *top_k = mm_json_get(root, "top_k"), *repetition = mm_json_get(root, "repetition_penalty");
  if (mm_json_type_of(top_k) != MM_JSON_NULL &&
      (!mm_json_need(root, "top_k", MM_JSON_INT, &c, err) || !mm_json_need_int(root, "top_k", -1, INT32_MAX, &k, &range, err)))
    return false;
  out->top_k = k > 0 ? (uint32_t)k : 0; /* 0 and -1: all ids */
  if (mm_json_type_of(repetition) != MM_JSON_NULL && out->repetition == 0)
    return MM_REFUSE(&range, err, "repetition penalty: found 0, expected 0.001 to 1000");
  return check_defaults(out, path, err);
}

static bool defaults_from_file(const place *at, mm_sampling *out, mm_err *err) {
  const mm_path path = mm_path_of(at->dir, SETTINGS);
  mm_err reason = {0};
  mm_json *root = load_object(path.text, &reason);
  const bool ok = root && read_defaults(root, path.text, out, &reason);
  mm_json_free(root);
  return ok || mm_companion_fail(at->pack, SETTINGS, &reason, err);
}

bool mm_ends_defaults(const mm_pack *pack, mm_sampling *out, mm_err *err) {
  const place at = {pack->dir, pack, pack->model.vocab};
  return !lies_there(&at, SETTINGS) /* the source had none */ || defaults_from_file(&at, out, err);
}

bool mm_ends_check(const char *dir, uint32_t vocab, mm_err *err) {
  const place at = {dir, NULL, vocab};
  bool found = false;
  return ends_from_files(&at, NULL, &found, err);
}

bool mm_ends_check_defaults(const char *dir, mm_err *err) {
  const place at = {dir, NULL, 0};
  mm_sampling set = {.temperature = 1, .top_p = 1, .repetition = 1};
  return !lies_there(&at, SETTINGS) || defaults_from_file(&at, &set, err);
}
