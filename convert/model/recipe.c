/* Parsing recipes and matching names. */
#include "convert/model/recipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "formats/hash.h"

static const char *const search_word[] = {[MM_SEARCH_ABSMAX] = "absmax", [MM_SEARCH_MSE] = "mse", [MM_SEARCH_FOUR_SIX] = "four_six", NULL};
static const char *const method_word[] = {[MM_METHOD_NEAREST] = "nearest", [MM_METHOD_GPTQ] = "gptq", NULL};
static const char *const kv_word[] = {[MM_KV_KEEP] = "keep", [MM_KV_F32] = "f32", [MM_KV_DROP] = "drop", NULL};

static const mm_preset preset[] = {
    {"experts_nvfp4", "none; *.experts.*=nvfp4a16", "nvfp4a16 for experts, all else as stored"},
    {"experts_int4", "none; *.experts.*=w4a16", "w4a16 for experts, all else as stored"},
    {"experts_fp8", "none; *.experts.*=block_fp8", "block_fp8 for experts, all else as stored"},
    {"fp8_attention_nvfp4_experts", "block_fp8; *.experts.*=nvfp4a16", "block_fp8 for attention, nvfp4a16 for experts"},
    {"fp8_attention_int4_experts", "block_fp8; *.experts.*=w4afp8", "block_fp8 for attention, w4afp8 for experts"},
    {"mxfp8_attention_nvfp4_experts", "mxfp8; *.experts.*=nvfp4a16", "mxfp8 for attention, nvfp4a16 for experts"},
    {"mxfp8_attention_int4_experts", "mxfp8; *.experts.*=w4a16", "mxfp8 for attention, w4a16 for experts"},
};

const mm_preset *mm_preset_at(size_t i) { return i < sizeof preset / sizeof *preset ? &preset[i] : NULL; }

const char *mm_recipe_preset(const char *name) {
  const mm_preset *p;
  for (size_t i = 0; (p = mm_preset_at(i)); i++)
    if (strcmp(p->name, name) == 0) return p->line;
  return NULL;
}

/* Into f, with `between` them. */
static void put_words(FILE *f, const char *between) {
  const mm_scheme *s;
  const mm_preset *p;
  fputs("none", f);
  for (size_t i = 0; (s = mm_scheme_at(i)); i++) fprintf(f, "%s%s", between, s->name);
  for (size_t i = 0; (p = mm_preset_at(i)); i++) fprintf(f, "%s%s", between, p->name);
}

bool mm_recipe_words(char *text, size_t n, mm_err *err) {
  FILE *f = fmemopen(text, n, "w");
  if (!f) return mm_fail_memory(err, n);
  put_words(f, "|");
  const bool written = !ferror(f) && ftell(f) < (long)n;
  return (fclose(f) == 0 && written) || mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "words of --quant: expected at most %zu bytes", n);
}

void mm_recipe_help(FILE *f) {
  const mm_scheme *s;
  const mm_preset *p;
  fprintf(f, "%-17s %5s  %5s  %s\n", "scheme", "bits", "SQNR", "what it is for");
  fprintf(f, "%-17s %5s  %5s  %s\n", "none", "-", "-", "every weight as it is stored, codes and scales too");
  for (size_t i = 0; (s = mm_scheme_at(i)); i++) {
    char db[16] = "-";
    if (s->sqnr > 0) snprintf(db, sizeof db, "%.1f", (double)s->sqnr);
    fprintf(f, "%-17s %5.2f  %5s  %s", s->name, mm_scheme_bits(s) + 1e-6, db, s->purpose);
    for (size_t j = 0; j < sizeof s->synonym / sizeof *s->synonym && s->synonym[j]; j++)
      fprintf(f, "%s%s", j ? ", " : " (also: ", s->synonym[j]);
    fputs(s->synonym[0] ? ")\n" : "\n", f);
  }
  fprintf(f, "\n%-30s %s\n", "preset", "what it is");
  for (size_t i = 0; (p = mm_preset_at(i)); i++) fprintf(f, "%-30s %s (%s)\n", p->name, p->purpose, p->line);
  fputs(
      "\nbits: of a weight, scales included. SQNR: dB of signal over error, of a Gaussian matrix.\n"
      "Norms, routers and biases stay as stored; so do embedding and head where --override or --head does not name them.\n",
      f);
}

/* To two or one digits, as they are printed. */
static void put_figure(mm_json *o, const char *key, double x, double digits) {
  if (x > 0) mm_json_set(o, key, mm_json_new_real(round(x * digits) / digits));
}

static void add_scheme(mm_json *list, const mm_scheme *s) {
  mm_json *o = mm_json_append(list, MM_JSON_NEW({"name", mm_json_new_str(s->name)}));
  put_figure(o, "bits", mm_scheme_bits(s) + 1e-6, 100);
  put_figure(o, "sqnr_db", (double)s->sqnr, 10);
  mm_json_put_text(o, "purpose", s->purpose);
  mm_json *synonyms = mm_json_put_list(o, "synonyms");
  for (size_t j = 0; j < sizeof s->synonym / sizeof *s->synonym && s->synonym[j]; j++)
    mm_json_append(synonyms, mm_json_new_str(s->synonym[j]));
}

char *mm_recipe_help_json(mm_err *err) {
  const mm_scheme *s;
  const mm_preset *p;
  mm_json *o = mm_json_new_obj(), *schemes = mm_json_put_list(o, "schemes"), *presets = mm_json_put_list(o, "presets");
  mm_json_append(schemes, MM_JSON_NEW({"name", mm_json_new_str("none")},
                                      {"purpose", mm_json_new_str("every weight as it is stored, codes and scales too")},
                                      {"synonyms", mm_json_new_arr()}));
  for (size_t i = 0; (s = mm_scheme_at(i)); i++) add_scheme(schemes, s);
  for (size_t i = 0; (p = mm_preset_at(i)); i++)
    mm_json_append(presets, MM_JSON_NEW({"name", mm_json_new_str(p->name)}, {"purpose", mm_json_new_str(p->purpose)},
                                        {"recipe", mm_json_new_str(p->line)}));
  return mm_json_text(o, true, err);
}

/* The context of errors in a recipe's line; a recipe file has its own. */
static const mm_json_ctx in_line = {NULL, MM_USAGE, "E_RECIPE"};

#define SEARCHES "absmax, mse or four_six"
#define METHODS  "nearest or gptq"
#define KV_USES  "keep, f32 or drop"
static bool bad(const mm_json_ctx *c, const char *what, const char *text, const char *expected, mm_err *err) {
  return MM_REFUSE(c, err, "found %s \"%s\", expected %s", what, MM_ESCAPED(256, text), expected);
}

/* "fp8" is one thing in the released models and another in tools. */
static bool unknown_scheme(const char *word, const mm_json_ctx *c, mm_err *err) {
  char *known = NULL;
  size_t n = 0;
  if (strcasecmp(word, "fp8") == 0)
    return MM_REFUSE(c, err,
                     "found \"%s\", which may mean several schemes; expected block_fp8 (as the released FP8 models), channel_fp8 or "
                     "tensor_wise_fp8",
                     word);
  if (mm_recipe_preset(word))
    return MM_REFUSE(
        c, err, "found preset \"%s\" as one of several words, expected it alone (--override adds rules to it) or what it stands for: %s",
        word, mm_recipe_preset(word));
  FILE *f = open_memstream(&known, &n);
  if (f) put_words(f, ", ");
  bool whole = f && mm_close_text(f, &known);
  if (whole)
    MM_REFUSE(c, err, "found unknown scheme \"%s\", expected one of %s (--quant help says more)", MM_ESCAPED(256, word), known);
  else
    mm_fail_memory(err, n);
  free(known);
  return false;
}

static bool scheme_word(const char *word, const mm_scheme **out, const mm_json_ctx *c, mm_err *err) {
  *out = mm_scheme_find(word);
  return *out || strcasecmp(word, "none") == 0 || unknown_scheme(word, c, err);
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

/* Words that are no patterns. */
static const char *const field_word[] = {"search", "method", "kv_scales", "nonfinite", "importance", "act_scales", NULL};

/* The pattern is the text up to its last "=" in a rule. */
static bool option_ok(const char *option, const char *text, bool rule, mm_err *err) {
  const char *left = text, *equals = rule ? strrchr(text, '=') : NULL;
  size_t n = equals ? (size_t)(equals - text) : strlen(text);
  char word[16];
  unsigned field;
  while (n > 0 && strchr(" \t", *left)) left++, n--;
  while (n > 0 && strchr(" \t", left[n - 1])) n--;
  snprintf(word, sizeof word, "%.*s", (int)mm_min(n, sizeof word - 1), left);
  if (!strchr(text, ';') && (n >= sizeof word || !one_of(field_word, word, &field))) return true;
  return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL),
                 "--%s: found \"%s\", expected one pattern without \";\" that is no name of a field; the option may be repeated", option,
                 MM_ESCAPED(256, text));
}

bool mm_recipe_options_ok(const char *option, const char *const *text, size_t count, bool rules, mm_err *err) {
  for (size_t i = 0; i < count; i++)
    if (!option_ok(option, text[i], rules, err)) return false;
  return true;
}

static bool digest_word(const char **out, const char *word, mm_err *err) {
  mm_digest d;
  if (*out || !mm_digest_parse(word, strlen(word), &d))
    return bad(&in_line, "no digest, or a second one:", word, "one digest of a file", err);
  *out = word;
  return true;
}

static bool field(mm_recipe *r, char *text, mm_err *err) {
  char *equals = strrchr(text, '=');
  if (!equals) return bad(&in_line, "no \"=\" in", text, "PATTERN=SCHEME", err);
  *equals = 0;
  char *left = trim(text), *right = trim(equals + 1);
  unsigned choice;
  if (strcmp(left, "search") == 0) {
    if (!one_of(search_word, right, &choice)) return bad(&in_line, "unknown search", right, SEARCHES, err);
    r->search = (mm_search)choice;
    return true;
  }
  if (strcmp(left, "method") == 0) {
    if (!one_of(method_word, right, &choice)) return bad(&in_line, "unknown method", right, METHODS, err);
    r->method = (mm_method)choice;
    return true;
  }
  if (strcmp(left, "kv_scales") == 0) {
    if (!one_of(kv_word, right, &choice)) return bad(&in_line, "unknown use of KV scales", right, KV_USES, err);
    r->kv_scales = (mm_kv_scales)choice;
    return true;
  }
  if (strcmp(left, "nonfinite") == 0) {
    r->nonfinite_zero = true;
    return strcmp(right, "zero") == 0 || bad(&in_line, "unknown use of weights that are not finite", right, "zero", err);
  }
  if (strcmp(left, "importance") == 0) return digest_word(&r->importance, right, err);
  if (strcmp(left, "act_scales") == 0) return digest_word(&r->act_scales, right, err);
  if (r->count == MM_RECIPE_PATTERNS)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found more patterns, expected at most %d", MM_RECIPE_PATTERNS);
  mm_override *o = &r->override[r->count];
  if (*left == 0) return bad(&in_line, "an empty pattern", left, "a name, a glob or re:REGEX", err);
  o->text = left;
  if (!mm_pattern_compile(&o->pattern, left, &r->arena, err) || !scheme_word(right, &o->scheme, &in_line, err)) return false;
  r->count++;
  return true;
}

bool mm_recipe_parse(mm_recipe *r, const char *text, mm_err *err) {
  *r = (mm_recipe){0};
  if (strlen(text) > MM_RECIPE_BYTES)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found a recipe of %zu bytes, expected at most %d", strlen(text),
                   (int)MM_RECIPE_BYTES);
  return mm_recipe_parse_normal(r, text, err);
}

bool mm_recipe_parse_normal(mm_recipe *r, const char *text, mm_err *err) {
  *r = (mm_recipe){.search = MM_SEARCH_MSE};
  for (size_t i = 0, n = strlen(text), left = n, one; i < n; i += one, left -= one)
    if (!(one = mm_utf8_len(text + i, left))) return bad(&in_line, "a recipe that a manifest cannot hold:", text, "UTF-8", err);
  char *copy = mm_arena_strndup(&r->arena, text, strlen(text), err);
  size_t fields = 1;
  for (const char *p = text; *p; p++) fields += *p == ';';
  r->override = mm_arena_alloc(&r->arena, fields * sizeof *r->override, err);
  if (!copy || !r->override) return false;
  char *save = NULL, *word = strtok_r(copy, ";", &save);
  if (!word) return bad(&in_line, "an empty recipe", text, "a scheme", err);
  if (!scheme_word(trim(word), &r->scheme, &in_line, err)) return false;
  while ((word = strtok_r(NULL, ";", &save)))
    if (!field(r, word, err)) return false;
  return true;
}

void mm_recipe_close(mm_recipe *r) {
  mm_arena_close(&r->arena);
  *r = (mm_recipe){0};
}

/* A rule of a file to the line t; false where the line would mean something else by it. */
static bool put_rule(mm_text *t, const mm_json *rule, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"match", "scheme", NULL};
  const char *match = NULL, *word = NULL;
  const mm_scheme *scheme;
  unsigned field;
  if (!mm_json_need_str(rule, "match", &match, c, err) || !mm_json_need_str(rule, "scheme", &word, c, err) ||
      !mm_json_only_keys(rule, keys, c, err) || !scheme_word(word, &scheme, c, err))
    return false;
  const size_t n = strlen(match);
  if (n == 0 || strchr(match, ';') || strchr(" \t", match[0]) || strchr(" \t", match[n - 1]) || one_of(field_word, match, &field))
    return bad(c, "a pattern that is empty, holds \";\", begins or ends with a blank, or is the name of a field:", match, "another one",
               err);
  mm_text_printf(t, "; %s=%s", match, word);
  return true;
}

/* The line to t; false after what is refused. */
static bool put_line(mm_text *t, const mm_json *j, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"default", "search", "method", "kv_scales", "rules", NULL};
  const char *word = NULL, *search = "mse", *method = "nearest", *kv = "keep";
  const mm_scheme *scheme;
  unsigned choice;
  if (mm_json_type_of(j) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found a list, expected an object");
  if (!mm_json_need_str(j, "default", &word, c, err) || !mm_json_only_keys(j, keys, c, err) || !scheme_word(word, &scheme, c, err) ||
      (mm_json_get(j, "search") && !mm_json_need_str(j, "search", &search, c, err)) ||
      (mm_json_get(j, "method") && !mm_json_need_str(j, "method", &method, c, err)) ||
      (mm_json_get(j, "kv_scales") && !mm_json_need_str(j, "kv_scales", &kv, c, err)))
    return false;
  if (!one_of(search_word, search, &choice)) return bad(c, "unknown search", search, SEARCHES, err);
  if (!one_of(method_word, method, &choice)) return bad(c, "unknown method", method, METHODS, err);
  if (!one_of(kv_word, kv, &choice)) return bad(c, "unknown use of KV scales", kv, KV_USES, err);
  mm_text_printf(t, "%s; search=%s; method=%s; kv_scales=%s", word, search, method, kv);
  const mm_json *rules = mm_json_get(j, "rules");
  if (rules && !mm_json_need(j, "rules", MM_JSON_ARR, c, err)) return false;
  for (size_t i = 0; i < mm_json_size(rules); i++)
    if (!put_rule(t, mm_json_at(rules, i), c, err)) return false;
  return true;
}

static const char *scheme_name(const mm_scheme *s) { return s ? s->name : "none"; }

static char *keep(mm_arena *a, const mm_text *t, mm_err *err) {
  return t->failed ? (mm_fail_memory(err, t->n), NULL) : mm_arena_strndup(a, t->p, t->n, err);
}

char *mm_recipe_load(mm_arena *a, const char *path, mm_err *err) {
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_RECIPE"};
  mm_json *j = mm_json_load(path, MM_RECIPE_BYTES, err);
  mm_text t = {0};
  char *line = NULL;
  if (j && put_line(&t, j, &c, err)) line = keep(a, &t, err);
  free(t.p);
  mm_json_free(j);
  return line;
}

char *mm_recipe_line(mm_arena *a, const char *text, mm_err *err) {
  mm_recipe r;
  mm_text t = {0};
  char *line = NULL;
  if (mm_recipe_parse(&r, text, err)) {
    mm_text_put(&t, scheme_name(r.scheme));
    if (r.search != MM_SEARCH_MSE) mm_text_printf(&t, "; search=%s", search_word[r.search]);
    if (r.method != MM_METHOD_NEAREST) mm_text_printf(&t, "; method=%s", method_word[r.method]);
    if (r.kv_scales != MM_KV_KEEP) mm_text_printf(&t, "; kv_scales=%s", kv_word[r.kv_scales]);
    for (size_t i = 0; i < r.count; i++) mm_text_printf(&t, "; %s=%s", r.override[i].text, scheme_name(r.override[i].scheme));
    if (r.importance) mm_text_printf(&t, "; importance=%s", r.importance);
    if (r.act_scales) mm_text_printf(&t, "; act_scales=%s", r.act_scales);
    if (r.nonfinite_zero) mm_text_put(&t, "; nonfinite=zero");
    line = keep(a, &t, err);
  }
  free(t.p);
  mm_recipe_close(&r);
  return line;
}

static bool matches(const mm_pattern *p, const char *const *names, bool *hit, mm_err *err) {
  for (*hit = false; *names && !*hit; names++)
    if (!mm_pattern_match(p, *names, hit, err)) return false;
  return true;
}

bool mm_recipe_choose(mm_recipe *r, mm_kind kind, const char *const *names, const mm_scheme **scheme, mm_err *err) {
  *scheme = kind == MM_KIND_LINEAR || kind == MM_KIND_EXPERT ? r->scheme : NULL;
  bool chosen = false;
  for (size_t i = r->count; i-- > 0;) { /* the last pattern that matches wins; the others are looked at until they have matched something */
    mm_override *o = &r->override[i];
    bool hit = false;
    if (chosen && o->hit) continue;
    if (!matches(&o->pattern, names, &hit, err)) return false;
    if (!hit) continue;
    o->hit = true;
    if (!chosen) *scheme = o->scheme;
    chosen = true;
  }
  if ((kind == MM_KIND_PASS_THROUGH || kind == MM_KIND_KV_SCALE) && *scheme)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, names[0]),
                   "found a pattern that gives it %s, expected norms, routers, biases and KV scales to be kept", (*scheme)->name);
  if (kind == MM_KIND_KV_SCALE && r->kv_scales == MM_KV_F32) *scheme = mm_scheme_plain(MM_F32);
  return true;
}

/* `name` with the expert's id in place of its {e}, in `out`; NULL: it has none, or no room. */
static const char *expert_name(char *out, size_t size, const char *name, uint32_t expert) {
  const char *at = strstr(name, "{e}");
  const int n = at ? snprintf(out, size, "%.*s%u%s", (int)(at - name), name, expert, at + strlen("{e}")) : -1;
  return n >= 0 && (size_t)n < size ? out : NULL;
}

bool mm_recipe_choose_stack(mm_recipe *r, const char *const *names, uint32_t experts, const mm_scheme **scheme, mm_err *err) {
  enum { NAMES = 8 };
  char text[NAMES][256];
  const char *all[2 * NAMES + 1];
  size_t given = 0;
  while (names[given] && given < NAMES) all[given] = names[given], given++;
  for (uint32_t e = 0; e < experts; e++) {
    const mm_scheme *own;
    size_t n = given;
    for (size_t i = 0; i < given; i++) {
      const char *name = expert_name(text[i], sizeof text[i], names[i], e);
      if (name) all[n++] = name;
    }
    all[n] = NULL;
    if (!mm_recipe_choose(r, MM_KIND_EXPERT, all, &own, err)) return false;
    if (e == 0) *scheme = own;
    if (own != *scheme)
      return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, names[0]),
                     "found patterns that give expert 0 %s and expert %u %s, expected one scheme for all experts of a layer",
                     scheme_name(*scheme), e, scheme_name(own));
  }
  return true;
}

bool mm_recipe_all_hit(const mm_recipe *r, mm_err *err) {
  for (size_t i = 0; i < r->count; i++)
    if (!r->override[i].hit)
      return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL),
                     "found pattern \"%s\", which matches no tensor; expected one that does (minimax-inspect lists the names, "
                     "--allow-unmatched takes it)",
                     MM_ESCAPED(2 * MM_PATTERN_BYTES, r->override[i].text));
  return true;
}

mm_search mm_recipe_search(const mm_recipe *r, const mm_scheme *scheme) {
  return scheme->searches & 1u << r->search ? r->search : MM_SEARCH_ABSMAX;
}

char *mm_recipe_text(const mm_recipe *r, mm_err *err) {
  mm_json *j = MM_JSON_NEW({"default", mm_json_new_str(scheme_name(r->scheme))}, {"search", mm_json_new_str(search_word[r->search])});
  if (r->method != MM_METHOD_NEAREST) mm_json_put_text(j, "method", method_word[r->method]);
  mm_json_put_text(j, "kv_scales", kv_word[r->kv_scales]);
  mm_json *rules = mm_json_put_list(j, "rules");
  for (size_t i = 0; i < r->count; i++)
    mm_json_append(rules, MM_JSON_NEW({"match", mm_json_new_str(r->override[i].text)},
                                      {"scheme", mm_json_new_str(scheme_name(r->override[i].scheme))}));
  return mm_json_text(j, true, err);
}

/* ---- a recipe in 64 bits ---- */

/* From the lowest bit: nonfinite_zero, kv_scales, method, search; checks of the rules, of the digests of --act-scales and --importance, of
 * the target format; the scheme of all matrices, by its number in the registry. */
enum { KV_AT = 1, METHOD_AT = 3, SEARCH_AT = 5, RULES_AT = 8, ACT_SCALES_AT = 21, IMPORTANCE_AT = 34, TARGET_AT = 48, SCHEME_AT = 56 };
#define SETTINGS       ((UINT64_C(1) << RULES_AT) - 1)
#define CHECK          UINT64_C(0x1fff) /* of the rules, of a file's digest */
#define WORD(words, i) words[mm_min(i, sizeof(words) / sizeof *(words)-2)]
#define NO_SCHEME      255

static uint64_t check_of(mm_digest d) { return (uint64_t)(d.byte[0] | d.byte[1] << 8) & CHECK; }

static uint64_t text_check(const char *text) { return check_of(mm_sha256(text ? text : "", text ? strlen(text) : 0)); }

static uint64_t rules_check(const mm_recipe *r) {
  mm_sha256_state s;
  mm_sha256_begin(&s);
  for (size_t i = 0; i < r->count; i++) {
    const char *text[] = {r->override[i].text, r->override[i].scheme ? r->override[i].scheme->name : ""};
    for (size_t k = 0; k < 2; k++) mm_sha256_add(&s, text[k], strlen(text[k]) + 1);
  }
  return check_of(mm_sha256_end(&s));
}

uint64_t mm_recipe_code(const mm_recipe *r, const char *target_format) {
  uint64_t scheme = NO_SCHEME;
  for (size_t i = 0; r->scheme && mm_scheme_at(i); i++)
    if (mm_scheme_at(i) == r->scheme) scheme = i;
  const uint64_t checks = (text_check(target_format) & 0xff) << TARGET_AT | text_check(r->importance) << IMPORTANCE_AT |
                          text_check(r->act_scales) << ACT_SCALES_AT | rules_check(r) << RULES_AT;
  return scheme << SCHEME_AT | checks | (uint64_t)r->search << SEARCH_AT | (uint64_t)r->method << METHOD_AT |
         (uint64_t)r->kv_scales << KV_AT | r->nonfinite_zero;
}

static void options_of(uint64_t code, bool scheme, char out[160]) {
  const mm_scheme *s = mm_scheme_at((size_t)(code >> SCHEME_AT)); /* NULL: NO_SCHEME */
  if (scheme)
    snprintf(out, 160, "--quant %s", s ? s->name : "none");
  else
    snprintf(out, 160, "--search %s --method %s --kv-scales %s%s", WORD(search_word, code >> SEARCH_AT & 7),
             WORD(method_word, code >> METHOD_AT & 3), WORD(kv_word, code >> KV_AT & 3), code & 1 ? " --allow-nonfinite" : "");
}

bool mm_recipe_code_differ(uint64_t found_code, uint64_t own_code, char found[160], char own[160]) {
  const uint64_t differ = found_code ^ own_code;
  const bool scheme = differ >> SCHEME_AT;
  options_of(found_code, scheme, found);
  options_of(own_code, scheme, own);
  if (!differ || scheme || differ & SETTINGS) return differ;
  snprintf(found, 160, "%s",
           differ >> RULES_AT & CHECK        ? "other rules (--recipe, --ignore, --override, --head)"
           : differ >> IMPORTANCE_AT & CHECK ? "another --importance, or without it"
           : differ >> ACT_SCALES_AT & CHECK ? "another --act-scales, or without it"
                                             : "another --dialect");
  snprintf(own, 160, "the same");
  return true;
}
