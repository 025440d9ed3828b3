/* Bodies of requests: the JSON reader, schemas, and random walks through what a schema lets through. Strings are regular expressions and
 * grammars too. */
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/constrain/schema.h"
#include "runtime/constrain/whole_text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The body's own bytes as a walk: the automaton takes what it likes of them. */
static void walk(const mm_form *form, const uint8_t *data, size_t size) {
  static mm_grammar_stack more[2][MM_GRAMMAR_MORE];
  mm_grammar g = {.more = more[0]}, next = {.more = more[1]};
  mm_grammar_start(&g, form);
  for (size_t i = 0; i < size && !mm_grammar_done(&g); i++) {
    mm_grammar_copy(&next, &g);
    if (!mm_grammar_step(&next, data[i])) continue;
    mm_grammar_copy(&g, &next);
    if (!mm_grammar_same(&g, &next, 1 + data[i] % 64)) abort();
  }
}

static void whole_texts(const char *text, size_t n) {
  mm_arena a = {0};
  mm_err none[2] = {{0}};
  const mm_form *form[] = {mm_whole_regex(&a, text, n, "regex", &none[0]), mm_whole_grammar(&a, text, n, "grammar", &none[1])};
  for (int i = 0; i < 2; i++) {
    if (!form[i] && none[i].status == MM_OK) abort();
    if (form[i]) walk(form[i], (const uint8_t *)text, n);
  }
  mm_arena_close(&a);
}

/* Every value once; numbers and strings are looked at, and quoted again. */
static void visit(const mm_value *v, mm_text *out) {
  int64_t n;
  if (v->type == MM_VALUE_NUMBER && mm_value_int(v, &n) && mm_value_real(v) > 1e300) abort();
  if (v->type == MM_VALUE_STRING) {
    if (v->text[v->n] != 0) abort();
    mm_text_quote(out, v->text, v->n);
    whole_texts(v->text, v->n);
  }
  size_t count = 0;
  for (const mm_value *m = v->first; m; m = m->next, count++) visit(m, out);
  if (count != v->count) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  mm_arena a = {0};
  mm_err err = {0};
  mm_text out = {0};
  const mm_value *v = mm_body_parse(&a, (const char *)data, size, &err);
  if (!v && err.status == MM_OK) abort();
  if (v) {
    visit(v, &out);
    mm_err refused = {0};
    const mm_form *form = mm_schema_compile(&a, v, "json_schema", &refused);
    if (!form && refused.status == MM_OK) abort();
    if (form) walk(form, data, size);
  }
  free(out.p);
  mm_arena_close(&a);
  return 0;
}
