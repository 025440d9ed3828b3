/* Recipes of any bytes, as a file and as a line: what is accepted as a file is accepted as a line, and chooses or refuses for every tensor.
 */
#include <string.h>

#include "convert/model/recipe.h"
#include "tests/fuzz/given_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void parse(const char *line) {
  static const char *const names[] = {"model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.self_attn.q_proj.weight", NULL};
  mm_recipe r = {0};
  mm_err err = {0};
  bool ok = mm_recipe_parse(&r, line, &err);
  if (ok != (err.status == MM_OK)) abort();
  for (int kind = 0; ok && kind <= MM_KIND_KV_SCALE; kind++) {
    const mm_scheme *scheme = NULL;
    mm_err refused = {0};
    if (mm_recipe_choose(&r, (mm_kind)kind, names, &scheme, &refused) != (refused.status == MM_OK)) abort();
    if (scheme) mm_recipe_search(&r, scheme);
  }
  mm_recipe_close(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  if (!text) abort();
  if (size) memcpy(text, data, size);
  text[size] = 0;
  parse(text);
  free(text);
  mm_arena arena = {0};
  mm_err err = {0};
  const char *line = mm_recipe_load(&arena, given_file(data, size), &err);
  if (!line && err.status == MM_OK) abort();
  if (line) parse(line);
  mm_arena_close(&arena);
  return 0;
}
