/* config.json and the index on any bytes: a config that is accepted gives a model that keeps every rule and survives the manifest; an
 * index that is accepted maps each name once, to a file with a plain name. */
#include <stdlib.h>
#include <string.h>

#include "convert/plan/plan.h"
#include "convert/source/index.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_config(const char *text, size_t size) {
  mm_err err = {0};
  mm_model m = {0}, back = {0};
  mm_json *config = mm_json_parse(text, size, "config.json", &err);
  const mm_arch *arch = config ? mm_arch_find(config, "config.json", &err) : NULL;
  bool ok = arch && arch->read_config(config, "config.json", &m, &err);
  if (ok != (err.status == MM_OK)) abort();
  if (ok) {
    if (!mm_model_check(&m, "config.json", MM_BAD_INPUT, "E_CFG_RANGE", &err)) abort();
    mm_json *j = mm_model_to_json(&m);
    if (!j || !mm_model_from_json(&back, j, "manifest.json", &err)) abort();
    mm_json *k = mm_model_to_json(&back);
    char *before = mm_json_dump(j, false), *after = k ? mm_json_dump(k, false) : NULL;
    if (!before || !after || strcmp(before, after) != 0) abort();
    free(before);
    free(after);
    mm_json_free(j);
    mm_json_free(k);
    for (uint32_t tp = 1; tp <= 64; tp *= 2) {
      mm_err infeasible = {0};
      mm_plan_options o = {.tp = tp, .ep = 1, .pp = 1};
      if (mm_cut_feasible(&m, &o, "config.json", &infeasible) != (infeasible.status == MM_OK)) abort();
    }
    char name[64];
    for (size_t i = 0; i < arch->rule_count; i++) mm_rule_name(name, sizeof name, arch->rule[i].theirs, m.layers, m.experts);
  }
  mm_json_free(config);
}

static void fuzz_index(char *text, size_t size) {
  mm_err err = {0};
  mm_hf hf = {0};
  bool ok = mm_index_parse(&hf, "index.json", text, size, &err);
  if (ok != (err.status == MM_OK)) abort();
  for (size_t i = 0; ok && i < hf.tensor_count; i++) {
    if (hf.tensor[i].file >= hf.file_count || (i > 0 && strcmp(hf.tensor[i - 1].name, hf.tensor[i].name) >= 0)) abort();
    const char *name = hf.file[hf.tensor[i].file].name;
    if (!mm_base_name_ok(name, strlen(name))) abort();
  }
  mm_hf_close(&hf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size ? size : 1); /* not one byte more */
  if (!text) abort();
  if (size) memcpy(text, data, size);
  fuzz_config(text, size);
  fuzz_index(text, size);
  free(text);
  return 0;
}
