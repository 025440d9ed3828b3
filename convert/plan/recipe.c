/* Parsing recipes and matching names. */
#include "convert/plan/recipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/hash.h"

static const char *const search_word[] = {[MM_SEARCH_ABSMAX] = "absmax", [MM_SEARCH_MSE] = "mse", [MM_SEARCH_FOUR_SIX] = "four_six", NULL};
static const char *const kv_word[] = {[MM_KV_KEEP] = "keep", [MM_KV_F32] = "f32", [MM_KV_DROP] = "drop", NULL};

static const struct {
  const char *name, *line;
} preset[] = {
    {"experts_nvfp4", "none; *.experts.*=nvfp4a16"},
    {"experts_int4", "none; *.experts.*=w4a16"},
    {"experts_fp8", "none; *.experts.*=block_fp8"},
    {"fp8_attention_nvfp4_experts", "block_fp8; *.experts.*=nvfp4a16"},
    {"fp8_attention_int4_experts", "block_fp8; *.experts.*=w4afp8"},
};

const char *mm_recipe_preset(const char *name) {
  for (size_t i = 0; i < sizeof preset / sizeof *preset; i++)
    if (strcmp(preset[i].name, name) == 0) return preset[i].line;
  return NULL;
}

static bool bad(mm_err *err, const char *what, const char *text) {
  char shown[256];
  return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found %s \"%s\"", what, mm_escape(shown, sizeof shown, text, strlen(text)));
}

static bool scheme_word(const char *word, const mm_scheme **out, mm_err *err) {
  *out = mm_scheme_find(word);
  return *out || strcmp(word, "none") == 0 || bad(err, "unknown scheme", word);
}

/* Spaces around are not part of a field. */
static char *trim(char *s) {
  s += strspn(s, " \t");
  size_t n = strlen(s);
  while (n > 0 && strchr(" \t", s[n - 1])) s[--n] = 0;
  return s;
}

static bool one_of(const char *const *words, const char *word, unsigned *out) {
  for (*out = 0; words[*out]; ++*out)
    if (strcmp(word, words[*out]) == 0) return true;
  return false;
}

static bool digest_word(const char **out, const char *word, mm_err *err) {
  mm_digest d;
  if (*out || !mm_digest_parse(word, strlen(word), &d)) return bad(err, "no digest, or a second one:", word);
  *out = word;
  return true;
}

static bool field(mm_recipe *r, char *text, mm_err *err) {
  char *equals = strrchr(text, '=');
  if (!equals) return bad(err, "no \"=\" in", text);
  *equals = 0;
  char *left = trim(text), *right = trim(equals + 1);
  unsigned choice;
  if (strcmp(left, "search") == 0) {
    if (!one_of(search_word, right, &choice)) return bad(err, "unknown search", right);
    r->search = (mm_search)choice;
    return true;
  }
  if (strcmp(left, "kv_scales") == 0) {
    if (!one_of(kv_word, right, &choice)) return bad(err, "unknown use of KV scales", right);
    r->kv_scales = (mm_kv_scales)choice;
    return true;
  }
  if (strcmp(left, "nonfinite") == 0) {
    r->nonfinite_zero = true;
    return strcmp(right, "zero") == 0 || bad(err, "unknown use of weights that are not finite", right);
  }
  if (strcmp(left, "importance") == 0) return digest_word(&r->importance, right, err);
  if (strcmp(left, "act_scales") == 0) return digest_word(&r->act_scales, right, err);
  if (r->count == MM_RECIPE_PATTERNS)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found more than %d patterns", MM_RECIPE_PATTERNS);
  mm_override *o = &r->override[r->count];
  if (*left == 0) return bad(err, "an empty pattern", left);
  if (!mm_pattern_compile(&o->pattern, left, &r->arena, err) || !scheme_word(right, &o->scheme, err)) return false;
  r->count++;
  return true;
}

bool mm_recipe_parse(mm_recipe *r, const char *text, mm_err *err) {
  *r = (mm_recipe){.search = MM_SEARCH_MSE};
  if (strlen(text) > MM_RECIPE_BYTES)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found a recipe of %zu bytes, expected at most %d", strlen(text),
                   (int)MM_RECIPE_BYTES);
  char *copy = mm_arena_strndup(&r->arena, text, strlen(text), err);
  size_t fields = 1;
  for (const char *p = text; *p; p++) fields += *p == ';';
  r->override = mm_arena_alloc(&r->arena, fields * sizeof *r->override, err);
  if (!copy || !r->override) return false;
  char *save = NULL, *word = strtok_r(copy, ";", &save);
  if (!word) return bad(err, "an empty recipe", text);
  if (!scheme_word(trim(word), &r->scheme, err)) return false;
  while ((word = strtok_r(NULL, ";", &save)))
    if (!field(r, word, err)) return false;
  return true;
}

void mm_recipe_close(mm_recipe *r) {
  mm_arena_close(&r->arena);
  *r = (mm_recipe){0};
}

/* The line to f; false after what is refused. */
static bool put_line(FILE *f, const mm_json *j, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"default", "search", "rules", NULL}, *const rule_keys[] = {"match", "scheme", NULL};
  const char *scheme = NULL, *search = "mse";
  if (!mm_json_only_keys(j, keys, c, err) || !mm_json_need_str(j, "default", &scheme, c, err) ||
      (mm_json_get(j, "search") && !mm_json_need_str(j, "search", &search, c, err)))
    return false;
  fprintf(f, "%s; search=%s", scheme, search);
  const mm_json *rules = mm_json_get(j, "rules");
  if (rules && !mm_json_need(j, "rules", MM_JSON_ARR, c, err)) return false;
  for (size_t i = 0; i < mm_json_size(rules); i++) {
    const char *match = NULL, *word = NULL;
    const mm_json *rule = mm_json_at(rules, i);
    if (!mm_json_only_keys(rule, rule_keys, c, err) || !mm_json_need_str(rule, "match", &match, c, err) ||
        !mm_json_need_str(rule, "scheme", &word, c, err))
      return false;
    fprintf(f, "; %s=%s", match, word);
  }
  return true;
}

char *mm_recipe_load(mm_arena *a, const char *path, mm_err *err) {
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_RECIPE"};
  mm_json *j = mm_json_load(path, MM_RECIPE_BYTES, err);
  char *text = NULL, *line = NULL;
  size_t n = 0;
  FILE *f = j ? open_memstream(&text, &n) : NULL;
  if (j && !f) mm_fail_memory(err, n);
  bool put = f && put_line(f, j, &c, err), whole = f && mm_close_text(f, &text);
  if (put && !whole) mm_fail_memory(err, n);
  if (put && whole) line = mm_arena_strndup(a, text, n, err);
  free(text);
  mm_json_free(j);
  return line;
}

bool mm_recipe_choose(const mm_recipe *r, mm_kind kind, const char *const *names, const mm_scheme **scheme, mm_err *err) {
  *scheme = kind == MM_KIND_LINEAR || kind == MM_KIND_EXPERT ? r->scheme : NULL;
  size_t i = r->count; /* the last pattern that matches wins */
  bool hit = false;
  while (!hit && i-- > 0)
    for (const char *const *name = names; *name && !hit; name++) hit = mm_pattern_match(&r->override[i].pattern, *name);
  if (hit) *scheme = r->override[i].scheme;
  if ((kind == MM_KIND_KEEP || kind == MM_KIND_KV_SCALE) && *scheme)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, names[0]),
                   "found a pattern that gives it %s, expected norms, routers, biases and KV scales to be kept", (*scheme)->name);
  if (kind == MM_KIND_KV_SCALE && r->kv_scales == MM_KV_F32) *scheme = mm_scheme_plain(MM_F32);
  return true;
}

mm_search mm_recipe_search(const mm_recipe *r, const mm_scheme *scheme) {
  return scheme->searches & 1u << r->search ? r->search : MM_SEARCH_ABSMAX;
}
