/* Forms of a cache: found again, bounded in memory, and with the masks of forms that are compiled anew. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/constrain/call_form.h"
#include "runtime/constrain/schema.h"
#include "runtime/constrain/whole_text.h"
#include "tests/unit/runtime/lexicon_of.h"

#define VOCAB   2048
#define WORDS   (VOCAB / 32)
#define SCHEMAS 64
#define THREADS 3
#define TOKENS  24

static mm_arena everyday;
static const mm_value *schema[SCHEMAS];
static size_t schemas;

static int open_all(void **state) {
  (void)state;
  mm_err err = {0};
  char *line = NULL;
  size_t cap = 0;
  FILE *f = fopen("tests/data/schemas.json", "rb");
  assert_non_null(f);
  while (schemas < SCHEMAS && getline(&line, &cap, f) > 0) {
    char *text = mm_arena_strndup(&everyday, line, strlen(line), &err);
    const mm_value *v = text && strchr(text, '{') == text
                            ? mm_body_parse(&everyday, text, strcspn(text, "\n") - (text[strcspn(text, "\n") - 1] == ','), &err)
                            : NULL;
    if (v && mm_value_get(v, "schema")) schema[schemas++] = mm_value_get(v, "schema");
  }
  free(line);
  fclose(f);
  assert_true(schemas > 30);
  open_lexicon("tests/data/tiny-m2/tokenizer.json", VOCAB);
  return 0;
}

static int close_all(void **state) {
  mm_arena_close(&everyday);
  return close_lexicon(state);
}

static const mm_value *parse(mm_arena *a, const char *text) {
  mm_err err = {0};
  const mm_value *v = mm_body_parse(a, text, strlen(text), &err);
  if (!v) fail_msg("%s", err.text);
  return v;
}

TEST(forms_are_found_by_all_that_they_are_made_of) {
  mm_err err = {0}, refused = {0};
  mm_arena a = {0};
  mm_form_cache *c = mm_form_cache_open(1 << 20, &err);
  mm_held_forms one = {.cache = c}, two = {.cache = c};
  const mm_chat_tool tool[] = {{.json = {"{\"name\": \"f\"}", 13}}, {.json = {"{\"name\": \"g\"}", 13}}};
  const bool bound[] = {true, false};
  const mm_form *form[16];
  size_t count = 0;
  form[count++] = mm_forms_schema(&one, parse(&a, "{\"type\": \"string\"}"), "schema", &err);
  form[count++] = mm_forms_schema(&one, parse(&a, "{\"type\": \"number\"}"), "schema", &err);
  form[count++] = mm_forms_regex(&one, (mm_str){"[ab]+", 5}, "regex", &err);
  form[count++] = mm_forms_regex(&one, (mm_str){"true", 4}, "regex", &err);
  form[count++] = mm_forms_schema(&one, parse(&a, "true"), "schema", &err);
  form[count++] = mm_forms_grammar(&one, (mm_str){"root ::= \"a\"", 12}, "grammar", &err);
  const mm_call_limits base = {.family = MM_CHAT_M1, .tool = tool, .tools = 2, .bound = bound};
  mm_call_limits calls[8] = {base, base, base, base, base, base, base, base};
  calls[1].family = MM_CHAT_M2;
  calls[2].one_call = true;
  calls[3].place = MM_CALLS_IN_CONTENT;
  calls[4].place = MM_CALLS_IN_REASONING;
  calls[5].only = (mm_str){"g", 1};
  calls[6].tools = 1;
  calls[7].bound = (const bool[]){true, true};
  for (size_t i = 0; i < 8; i++) form[count++] = mm_forms_calls(&one, &calls[i], &err);
  for (size_t i = 0; i < count; i++) {
    if (!form[i]) fail_msg("form %zu: %s", i, err.text);
    for (size_t k = 0; k < i; k++) assert_ptr_not_equal(form[i], form[k]);
  }
  assert_ptr_equal(mm_forms_schema(&two, parse(&a, " {\"type\": \"string\"} "), "other", &err), form[0]);
  assert_ptr_equal(mm_forms_regex(&two, (mm_str){"[ab]+", 5}, "other", &err), form[2]);
  assert_ptr_equal(mm_forms_calls(&two, &calls[5], &err), form[11]);
  assert_null(mm_forms_regex(&two, (mm_str){"(", 1}, "regex", &refused));
  mm_form_cache_stats s = mm_form_cache_read(c);
  assert_int_equal(s.hits, 3);
  assert_int_equal(s.misses, count + 1);
  assert_int_equal(s.forms, count);
  mm_forms_release(&one);
  mm_forms_release(&two);
  mm_forms_release(&two);
  s = mm_form_cache_read(c);
  assert_true(s.forms == count && s.bytes > 0 && s.bytes <= s.bytes_max);
  mm_form_cache_close(c);
  mm_arena_close(&a);
}

/* A form is in memory while a request holds it, whatever the bound; the others go, the least recently used first. */
TEST(memory_has_a_bound) {
  mm_err err = {0};
  mm_arena a = {0};
  const mm_value *v[6];
  for (size_t i = 0; i < 6; i++) v[i] = parse(&a, mm_arena_printf(&a, &err, "{\"const\": %zu}", i));
  mm_form_cache *c = mm_form_cache_open(0, &err);
  mm_held_forms h = {.cache = c}, other = {.cache = c};
  assert_true(mm_forms_schema(&h, v[0], "schema", &err) && mm_forms_schema(&h, v[1], "schema", &err));
  const uint64_t each = mm_form_cache_read(c).bytes / 2;
  assert_ptr_equal(mm_forms_schema(&other, v[0], "schema", &err), mm_forms_schema(&h, v[0], "schema", &err));
  mm_forms_release(&h);
  assert_int_equal(mm_form_cache_read(c).forms, 1);
  mm_forms_release(&other);
  assert_true(!mm_form_cache_read(c).forms && !mm_form_cache_read(c).bytes);
  mm_form_cache_close(c);
  c = mm_form_cache_open(3 * each, &err);
  h = (mm_held_forms){.cache = c};
  for (size_t i = 0; i < 6; i++) {
    assert_non_null(mm_forms_schema(&h, v[i], "schema", &err));
    assert_true(mm_form_cache_read(c).bytes <= 3 * each);
    mm_forms_release(&h);
    assert_non_null(mm_forms_schema(&h, v[0], "schema", &err)); /* used in between, it stays */
    mm_forms_release(&h);
    assert_true(mm_form_cache_read(c).bytes <= 3 * each);
  }
  assert_int_equal(mm_form_cache_read(c).forms, 3);
  assert_int_equal(mm_form_cache_read(c).misses, 6);
  assert_non_null(mm_forms_schema(&h, v[4], "schema", &err));
  assert_int_equal(mm_form_cache_read(c).misses, 6);
  assert_non_null(mm_forms_schema(&h, v[3], "schema", &err)); /* dropped */
  assert_int_equal(mm_form_cache_read(c).misses, 7);
  mm_forms_release(&h);
  mm_form_cache_close(c);
  mm_arena_close(&a);
}

/* ---- Masks ---- */

static uint32_t next_random(uint64_t *seed) {
  *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(*seed >> 33);
}

typedef struct forms {
  mm_tools tools;
  const mm_form *fresh, *cached;
} forms;

/* One of the everyday schemas as a schema or as a tool of one of the formats, or a regular expression or grammar. */
static void compile_both(mm_arena *a, mm_held_forms *h, uint64_t *seed, forms *f) {
  static const char pattern[] = "^(\\d{4}-\\d\\d|[a-f ]+é?)(, .*)?$", grammar[] = "root ::= \"(\" (root | [a-z]*) \")\"";
  const uint32_t which = next_random(seed) % (uint32_t)schemas, way = next_random(seed) % 6;
  const bool bound = next_random(seed) % 4;
  mm_err fresh = {0}, cached = {0};
  *f = (forms){0};
  if (way < 3) {
    mm_call_limits limits = {.family = way == 0 ? MM_CHAT_M1 : way == 1 ? MM_CHAT_M2 : MM_CHAT_M3, .tools = 1, .bound = &bound};
    char *json = mm_arena_printf(a, &fresh, "{\"name\": \"f\", \"parameters\": %.*s}", (int)schema[which]->raw_n, schema[which]->raw);
    const mm_chat_tool tool = {.json = {json, strlen(json)}};
    assert_true(mm_tools_open(&f->tools, &tool, 1, &fresh));
    limits.tool = &tool;
    f->fresh = mm_call_form(a, &(mm_call_rules){.family = limits.family, .tools = &f->tools, .bound = &bound}, &fresh);
    f->cached = mm_forms_calls(h, &limits, &cached);
  } else if (way < 5) {
    f->fresh = mm_schema_compile(a, schema[which], "schema", &fresh);
    f->cached = mm_forms_schema(h, schema[which], "schema", &cached);
  } else if (bound) {
    f->fresh = mm_whole_regex(a, pattern, sizeof pattern - 1, "regex", &fresh);
    f->cached = mm_forms_regex(h, (mm_str){pattern, sizeof pattern - 1}, "regex", &cached);
  } else {
    f->fresh = mm_whole_grammar(a, grammar, sizeof grammar - 1, "grammar", &fresh);
    f->cached = mm_forms_grammar(h, (mm_str){grammar, sizeof grammar - 1}, "grammar", &cached);
  }
  assert_true(!f->fresh == !f->cached && fresh.status == cached.status);
  assert_string_equal(fresh.text, cached.text);
}

/* A reply of noise: at each step both masks have the same bits. */
static void follow_both(const forms *f, uint64_t *seed) {
  mm_err err = {0};
  const mm_section a = {.kind = MM_SECTION_FORM, .form = f->fresh}, b = {.kind = MM_SECTION_FORM, .form = f->cached};
  mm_constraint *fresh = mm_constraint_open(lexicon, &a, 1, &err), *cached = mm_constraint_open(lexicon, &b, 1, &err);
  assert_true(fresh && cached);
  for (int i = 0; i < TOKENS; i++) {
    const uint32_t *mask = mm_constraint_allowed(fresh);
    assert_memory_equal(mask, mm_constraint_allowed(cached), WORDS * sizeof *mask);
    int32_t id = (int32_t)(next_random(seed) % VOCAB);
    while (!(mask[id / 32] >> (id % 32) & 1)) id = (id + 1) % VOCAB;
    if (id == end) break;
    mm_constraint_chosen(fresh, id);
    mm_constraint_chosen(cached, id);
  }
  mm_constraint_close(fresh);
  mm_constraint_close(cached);
}

typedef struct worker {
  pthread_t thread;
  mm_form_cache *cache;
  uint64_t seed;
} worker;

static void *work(void *user) {
  worker *w = user;
  for (int i = 0; i < ROUNDS(60); i++) {
    mm_arena a = {0};
    mm_held_forms h = {.cache = w->cache};
    forms f[2];
    for (int k = 0; k < 2; k++) compile_both(&a, &h, &w->seed, &f[k]);
    for (int k = 0; k < 2; k++) {
      if (f[k].fresh) follow_both(&f[k], &w->seed);
      mm_tools_close(&f[k].tools);
    }
    mm_forms_release(&h);
    mm_arena_close(&a);
  }
  return NULL;
}

/* A pattern that takes some milliseconds. */
static void *hold_one(void *cache) {
  mm_held_forms held = {.cache = cache};
  mm_err err = {0};
  static const char *const pattern = "([a-z]{1,9} ){1,20}";
  const mm_form *f = mm_forms_regex(&held, (mm_str){pattern, strlen(pattern)}, "regex", &err);
  mm_forms_release(&held);
  return f ? cache : NULL;
}

static void *hold_wrong(void *cache) {
  mm_held_forms held = {.cache = cache};
  mm_err err = {0};
  static const char *const pattern = "([a-z]{1,99} ){1,200}(";
  const mm_form *f = mm_forms_regex(&held, (mm_str){pattern, strlen(pattern)}, "regex", &err);
  mm_forms_release(&held);
  return f || strcmp(err.code, "E_SCHEMA") != 0 ? NULL : cache;
}

/* Threads that want the same form at once: one compiles it. One that cannot be compiled fails for each. */
TEST(each_form_is_compiled_once) {
  enum { AT_ONCE = 8, ROUNDS = 20 };
  for (int round = 0; round < ROUNDS; round++) {
    mm_err err = {0};
    mm_form_cache *c = mm_form_cache_open(1 << 20, &err);
    assert_non_null(c);
    pthread_t thread[AT_ONCE];
    for (int wrong = 0; wrong < 2; wrong++) {
      for (int i = 0; i < AT_ONCE; i++) assert_int_equal(pthread_create(&thread[i], NULL, wrong ? hold_wrong : hold_one, c), 0);
      for (int i = 0; i < AT_ONCE; i++) {
        void *result = NULL;
        pthread_join(thread[i], &result);
        assert_ptr_equal(result, c);
      }
    }
    const mm_form_cache_stats s = mm_form_cache_read(c);
    assert_int_equal(s.misses, 1 + AT_ONCE);
    assert_int_equal(s.hits, AT_ONCE - 1);
    assert_int_equal(s.forms, 1);
    mm_form_cache_close(c);
  }
}

/* Threads share a cache that is too small for all forms, so that they are dropped and compiled again meanwhile. */
TEST(masks_are_those_of_forms_without_a_cache) {
  mm_err err = {0};
  worker w[THREADS];
  mm_form_cache *c = mm_form_cache_open(1 << 19, &err);
  for (int i = 0; i < THREADS; i++) {
    w[i] = (worker){.cache = c, .seed = (uint64_t)i + 1};
    assert_int_equal(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(w[i].thread, NULL);
  const mm_form_cache_stats s = mm_form_cache_read(c);
  assert_true(s.hits && s.misses && s.bytes <= s.bytes_max && (SANITIZED || s.misses > s.forms));
  mm_form_cache_close(c);
}

int main(void) { return run_unit_tests(open_all, close_all); }
