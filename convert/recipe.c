/* Parsing recipes and matching names. */
#include "convert/recipe.h"

#include <fnmatch.h>
#include <regex.h>
#include <stdio.h>
#include <string.h>

#include "formats/hash.h"

#define RECIPE_MAX (UINT64_C(1) << 20)

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

static bool compile(const char *pattern, regex_t *re, mm_err *err) {
  int wrong = regcomp(re, pattern, REG_EXTENDED | REG_NOSUB);
  if (wrong == REG_ESPACE) return mm_fail_memory(err, 0);
  return wrong == 0 || bad(err, "a regular expression that does not compile:", pattern);
}

static bool check_pattern(const char *pattern, mm_err *err) {
  if (strncmp(pattern, "re:", 3) != 0) return *pattern != 0 || bad(err, "an empty pattern", pattern);
  regex_t re;
  if (!compile(pattern + 3, &re, err)) return false;
  regfree(&re);
  return true;
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
  mm_override *o = &r->override[r->count];
  o->pattern = left;
  if (!check_pattern(left, err) || !scheme_word(right, &o->scheme, err)) return false;
  r->count++;
  return true;
}

bool mm_recipe_parse(mm_recipe *r, const char *text, mm_err *err) {
  *r = (mm_recipe){.search = MM_SEARCH_MSE};
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

char *mm_recipe_load(mm_arena *a, const char *path, mm_err *err) {
  static const char *const keys[] = {"default", "search", "rules", NULL}, *const rule_keys[] = {"match", "scheme", NULL};
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_RECIPE"};
  const char *scheme = NULL, *search = "mse";
  mm_json *j = mm_json_load(path, RECIPE_MAX, err);
  bool ok = j && mm_json_only_keys(j, keys, &c, err) && mm_json_need_str(j, "default", &scheme, &c, err) &&
            (!mm_json_get(j, "search") || mm_json_need_str(j, "search", &search, &c, err)) &&
            (!mm_json_get(j, "rules") || mm_json_need(j, "rules", MM_JSON_ARR, &c, err));
  char *line = ok ? mm_arena_printf(a, err, "%s; search=%s", scheme, search) : NULL;
  const mm_json *rules = ok ? mm_json_get(j, "rules") : NULL;
  for (size_t i = 0; line && i < mm_json_size(rules); i++) {
    const char *match = NULL, *word = NULL;
    const mm_json *rule = mm_json_at(rules, i);
    ok = mm_json_only_keys(rule, rule_keys, &c, err) && mm_json_need_str(rule, "match", &match, &c, err) &&
         mm_json_need_str(rule, "scheme", &word, &c, err);
    line = ok ? mm_arena_printf(a, err, "%s; %s=%s", line, match, word) : NULL;
  }
  mm_json_free(j);
  return line;
}

/* *hit: the pattern matches one of the names. Whatever else than a match or none comes back is want of memory. */
static bool match(const char *pattern, const char *const *names, bool *hit, mm_err *err) {
  bool expression = strncmp(pattern, "re:", 3) == 0;
  regex_t re;
  int r = expression ? REG_NOMATCH : FNM_NOMATCH, none = r;
  if (expression && !compile(pattern + 3, &re, err)) return false;
  for (; *names && r == none; names++) r = expression ? regexec(&re, *names, 0, NULL, 0) : fnmatch(pattern, *names, 0);
  if (expression) regfree(&re);
  *hit = r == 0;
  return r == 0 || r == none || mm_fail_memory(err, 0);
}

bool mm_recipe_choose(const mm_recipe *r, mm_kind kind, const char *const *names, const mm_scheme **scheme, mm_err *err) {
  *scheme = kind == MM_KIND_LINEAR || kind == MM_KIND_EXPERT ? r->scheme : NULL;
  for (size_t i = 0; i < r->count; i++) {
    bool hit;
    if (!match(r->override[i].pattern, names, &hit, err)) return false;
    if (hit) *scheme = r->override[i].scheme;
  }
  if ((kind == MM_KIND_KEEP || kind == MM_KIND_KV_SCALE) && *scheme)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, names[0]),
                   "found a pattern that gives it %s, expected norms, routers, biases and KV scales to be kept", (*scheme)->name);
  if (kind == MM_KIND_KV_SCALE && r->kv_scales == MM_KV_F32) *scheme = mm_scheme_plain(MM_F32);
  return true;
}

mm_search mm_recipe_search(const mm_recipe *r, const mm_scheme *scheme) {
  return scheme->searches & 1u << r->search ? r->search : MM_SEARCH_ABSMAX;
}
