/* generation_config.json, and what stands in for it. */
#include "runtime/text/ends.h"

#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define COMPANION_MAX (UINT64_C(16) << 20)

/* The path of a file that the converter copied into the parts' folder, NULL without an error when the source had none. free() it. */
static bool companion_path(const mm_pack *p, const char *name, char **path, mm_err *err) {
  *path = NULL;
  for (size_t i = 0; i < p->file_count; i++) {
    if (strcmp(p->file[i].name, name) != 0) continue;
    return asprintf(path, "%s/%s", p->dir, name) >= 0 || mm_fail_memory(err, strlen(name));
  }
  return true;
}

/* Marks the ids of eos_token_id, one or a list, if the file exists and has it. */
static bool ends_from_file(const mm_pack *pack, const char *name, bool *is_end, bool *found, mm_err *err) {
  uint32_t vocab = pack->model.vocab;
  char *path;
  if (!companion_path(pack, name, &path, err)) return false;
  if (!path) return true;
  mm_json *root = mm_json_load(path, COMPANION_MAX, err);
  const mm_json *eos = mm_json_get(root, "eos_token_id");
  bool ok = root, list = mm_json_type_of(eos) == MM_JSON_ARR;
  size_t count = list ? mm_json_size(eos) : mm_json_type_of(eos) != MM_JSON_NULL;
  for (size_t i = 0; ok && i < count; i++) {
    const mm_json *id = list ? mm_json_at(eos, i) : eos;
    ok = mm_json_type_of(id) == MM_JSON_INT && mm_json_int(id) >= 0 && mm_json_int(id) < vocab;
    if (ok) is_end[mm_json_int(id)] = *found = true;
    char shown[MM_JSON_SHOWN];
    if (!ok)
      mm_fail(err, MM_BAD_INPUT, "E_CFG_RANGE", mm_at(path, NULL), "eos_token_id: found %s, expected ids below %u",
              mm_json_shown(id, shown), vocab);
  }
  mm_json_free(root);
  free(path);
  return ok;
}

bool mm_ends_find(const mm_pack *pack, const mm_tokenizer *t, bool *is_end, mm_err *err) {
  static const char *const files[] = {"generation_config.json", "config.json"};
  static const char *const names[] = {"<end_of_sentence>", "<end_of_document>", "[e~["};
  bool found = false;
  for (size_t i = 0; !found && i < sizeof files / sizeof *files; i++)
    if (!ends_from_file(pack, files[i], is_end, &found, err)) return false;
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

bool mm_ends_defaults(const mm_pack *pack, mm_sampling *out, mm_err *err) {
  char *path;
  if (!companion_path(pack, "generation_config.json", &path, err)) return false;
  if (!path) return true;
  mm_json *root = mm_json_load(path, COMPANION_MAX, err);
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_CFG_TYPE"};
  int64_t k = out->top_k;
  bool ok = root && read_number(root, "temperature", &out->temperature, &c, err) && read_number(root, "top_p", &out->top_p, &c, err) &&
            read_number(root, "min_p", &out->min_p, &c, err) && read_number(root, "repetition_penalty", &out->repetition, &c, err) &&
            (mm_json_type_of(mm_json_get(root, "top_k")) == MM_JSON_NULL || mm_json_need_int(root, "top_k", 0, INT32_MAX, &k, &c, err));
  out->top_k = (uint32_t)k;
  ok = ok && mm_sampling_check(out, 0, err);
  mm_json_free(root);
  free(path);
  return ok;
}
