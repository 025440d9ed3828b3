/* Compares a manifest with its source: its model with config.json, and its pieces with the rules of the architecture. The runtime goes by
 * a tensor's name and the order of its pieces, a conversion by the names of the pieces: both must mean the same. */
#include "convert/source/packed_agrees.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/model/kv_rules.h"

#define NO_LAYER    UINT32_MAX
#define PATTERN_MAX 256

/* "model.layers.7.rest" as "model.layers.{l}.rest", and the layer; another name as it is. */
static uint32_t pattern_of(char out[PATTERN_MAX], const char *name) {
  static const char before[] = "model.layers.";
  const size_t n = strlen(before);
  char *end;
  if (strncmp(name, before, n) == 0 && name[n] >= '0' && name[n] <= '9' && (name[n] != '0' || name[n + 1] == '.')) {
    unsigned long layer = strtoul(name + n, &end, 10);
    if (*end == '.' && layer < MM_MAX_LAYERS) {
      snprintf(out, PATTERN_MAX, "%s{l}%s", before, end);
      return (uint32_t)layer;
    }
  }
  snprintf(out, PATTERN_MAX, "%s", name);
  return NO_LAYER;
}

/* Every rule of the tensor's name has its piece, in the table's order. */
static bool check_pieces(const mm_pack *p, const mm_arch *a, const mm_pack_tensor *t, mm_err *err) {
  char ours[PATTERN_MAX], theirs[PATTERN_MAX];
  const uint32_t layer = pattern_of(ours, t->name);
  unsigned n = 0;
  const char *wanted = NULL; /* the rule of piece n */
  bool same = true;
  for (size_t i = 0; same && i < a->rule_count; i++) {
    const mm_rule *r = &a->rule[i];
    if (strcmp(r->ours, ours) != 0 || (layer != NO_LAYER && !mm_rule_applies(r, &p->model, layer))) continue;
    same = n < t->piece_count && pattern_of(theirs, t->piece[n].source) == layer && strcmp(theirs, r->theirs) == 0;
    if (same)
      n++;
    else
      wanted = r->theirs;
  }
  if (n == 0 && same) { /* the scale of a KV cache, or of no use to anyone */
    bool known = false, fits = pattern_of(theirs, t->piece[0].source) == layer && mm_kv_pair(ours, theirs, &known);
    if (!known || (fits && t->piece_count == 1)) return true;
    if (fits) n = 1;
  }
  if (n > 0 && same && n == t->piece_count) return true;
  return mm_fail(err, MM_INTEGRITY, "E_CONFIG", mm_at(mm_path_of(p->dir, MM_MANIFEST).text, t->name), "piece %u: found %s%s, expected %s",
                 n, n < t->piece_count ? "source matrix " : "no more", n < t->piece_count ? t->piece[n].source : "",
                 wanted ? wanted
                 : n    ? "no more"
                        : "another one");
}

/* A key whose value is not that of config.json. */
static bool other_value(const mm_pack *p, const mm_model *config, const char *key, mm_err *err) {
  mm_json *a = mm_model_to_json(&p->model), *b = mm_model_to_json(config);
  if (mm_json_failed(a) || mm_json_failed(b))
    mm_fail_memory(err, sizeof *config);
  else
    mm_fail(err, MM_INTEGRITY, "E_CONFIG", mm_at(mm_path_of(p->dir, MM_MANIFEST).text, NULL),
            "key \"%s\": found %s, expected %s from config.json", key, MM_SHOWN_JSON(mm_json_get(a, key)),
            MM_SHOWN_JSON(mm_json_get(b, key)));
  mm_json_free(a);
  mm_json_free(b);
  return false;
}

bool mm_packed_agrees(const mm_pack *p, const mm_arch *a, const mm_model *config, mm_err *err) {
  const char *key;
  if (!mm_model_same(&p->model, config, &key)) return other_value(p, config, key, err);
  for (size_t i = 0; i < p->tensor_count; i++)
    if (!check_pieces(p, a, &p->tensor[i], err)) return false;
  return true;
}

bool mm_packed_config(const mm_pack *p, mm_err *err) {
  bool ok = false;
  if (!mm_pack_find_file(p, "config.json")) return true;
  const mm_path path = mm_path_of(p->dir, "config.json");
  mm_model m = {0};
  mm_err reason = {0};
  mm_json *config = mm_json_load(path.text, MM_CONFIG_MAX, &reason);
  const mm_arch *arch = config ? mm_arch_find(config, path.text, &reason) : NULL;
  ok = arch && arch->read_config(config, path.text, &m, &reason) && mm_packed_agrees(p, arch, &m, &reason);
  mm_json_free(config);
  if (reason.status == MM_BAD_INPUT || reason.status == MM_UNSUPPORTED) reason.status = MM_INTEGRITY; /* a manifest was made from it */
  if (!ok) mm_fail_as(err, &reason);
  return ok;
}
