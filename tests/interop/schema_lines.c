/* Replies to JSON schemas, regular expressions and grammars by a model that writes noise: tokens that the constraint allows, at random.
 * usage: schema_lines TOKENIZER VOCAB. A JSON object on each line of stdin, one on stdout for each:
 *
 *   {"schema": {…} or "regex": S or "grammar": S, "tokens": N, "replies": N, "seed": N, "texts": [S, …]}
 *       {"whole": [S, …], "length": N, "stuck": N, "ms": of compiling, "accepts": [true where a text is whole, …]} or {"error": S}
 *
 * usage: schema_lines --keywords: the keywords that are served, as docs/serving.md lists them. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/body.h"
#include "formats/text.h"
#include "runtime/constrain/constrain.h"
#include "runtime/constrain/schema.h"
#include "runtime/constrain/whole_text.h"

typedef struct noise {
  mm_tokenizer *tokenizer;
  mm_lexicon *lexicon;
  uint32_t vocab;
  int32_t end;
  int32_t *list; /* [vocab] */
  uint64_t seed;
} noise;

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static uint64_t draw(noise *n) {
  n->seed ^= n->seed << 13;
  n->seed ^= n->seed >> 7;
  return n->seed ^= n->seed << 17;
}

/* A token may come next, and, after a while, it ends something. */
static bool wanted(const noise *n, const uint32_t *mask, int32_t id, bool closing) {
  size_t bytes;
  if (mask && !(mask[id / 32] >> (id % 32) & 1)) return false;
  if (!closing) return true;
  const char *text = mm_tokenizer_bytes(n->tokenizer, id, &bytes);
  return id == n->end || (text && bytes && strchr("\"}],:", text[0]));
}

static int32_t pick(noise *n, const uint32_t *mask, bool closing) {
  uint32_t count = 0;
  for (int32_t id = 0; id < (int32_t)n->vocab; id++)
    if (wanted(n, mask, id, closing)) n->list[count++] = id;
  if (!count) return closing ? pick(n, mask, false) : n->end;
  return n->list[draw(n) % count];
}

/* What came of a reply, 'w'hole, 'l'ength or 's'tuck. */
static char generate(noise *n, const mm_form *form, int64_t tokens, mm_text *out, mm_err *err) {
  const mm_section section = {.kind = MM_SECTION_FORM, .form = form};
  mm_constraint *c = mm_constraint_open(n->lexicon, &section, 1, err);
  if (!c) exit(8);
  char what = 'l';
  mm_text_clear(out);
  for (int64_t i = 0; i < tokens && what == 'l'; i++) {
    const uint32_t *mask = mm_constraint_allowed(c);
    const bool closing = draw(n) % (uint64_t)tokens < (uint64_t)(2 * i) || draw(n) % 3 == 0;
    const int32_t id = pick(n, mask, closing);
    if (mm_constraint_stuck(c))
      what = 's';
    else if (id == n->end)
      what = 'w';
    if (what != 'l') break;
    mm_constraint_chosen(c, id);
    size_t bytes;
    const char *text = mm_tokenizer_bytes(n->tokenizer, id, &bytes);
    mm_text_add(out, text, bytes);
  }
  mm_constraint_close(c);
  return what;
}

static int64_t number_of(const mm_value *v, const char *key) {
  int64_t n = 0;
  mm_value_int(mm_value_get(v, key), &n);
  return n;
}

static bool accepts(const mm_form *form, const mm_value *text) {
  static mm_grammar_stack more[MM_GRAMMAR_MORE];
  mm_grammar g = {.more = more};
  mm_grammar_start(&g, form);
  for (size_t i = 0; i < text->n; i++)
    if (!mm_grammar_step(&g, (uint8_t)text->text[i])) return false;
  return mm_grammar_accepts(&g);
}

static const mm_form *compile(mm_arena *a, const mm_value *v, mm_err *err) {
  const mm_value *schema = mm_value_get(v, "schema"), *regex = mm_value_get(v, "regex"), *grammar = mm_value_get(v, "grammar");
  if (regex) return mm_whole_regex(a, regex->text, regex->n, "regex", err);
  if (grammar) return mm_whole_grammar(a, grammar->text, grammar->n, "grammar", err);
  return schema ? mm_schema_compile(a, schema, "json_schema", err) : NULL;
}

static void answer(noise *n, const char *line, size_t len, mm_text *out) {
  mm_err err = {0};
  mm_arena a = {0};
  mm_text reply = {0};
  const mm_value *v = mm_body_parse(&a, line, len, &err), *texts = mm_value_get(v, "texts");
  if (!v) exit(3);
  const double begin = now_ms();
  const mm_form *form = compile(&a, v, &err);
  const double ms = now_ms() - begin;
  if (!form) {
    mm_text_printf(out, "{\"ms\": %.3f, \"error\": ", ms);
    mm_text_quote_string(out, err.text);
    mm_text_put(out, "}");
  } else {
    int64_t length = 0, stuck = 0, whole = 0;
    n->seed = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(number_of(v, "seed") + 1);
    mm_text_put(out, "{\"whole\": [");
    for (int64_t i = 0; i < number_of(v, "replies"); i++) {
      const char what = generate(n, form, number_of(v, "tokens"), &reply, &err);
      length += what == 'l';
      stuck += what == 's';
      if (what != 'w') continue;
      if (whole++) mm_text_put(out, ", ");
      mm_text_quote(out, reply.p ? reply.p : "", reply.n);
    }
    mm_text_printf(out, "], \"length\": %lld, \"stuck\": %lld, \"ms\": %.3f, \"accepts\": [", (long long)length, (long long)stuck, ms);
    for (const mm_value *t = texts ? texts->first : NULL; t; t = t->next)
      mm_text_printf(out, "%s%s", accepts(form, t) ? "true" : "false", t->next ? ", " : "");
    mm_text_put(out, "]}");
  }
  free(reply.p);
  mm_arena_close(&a);
}

static int print_keywords(void) {
  puts("| keyword | |\n|---|---|");
  for (const mm_schema_keyword *k = mm_schema_keywords; k->name; k++) printf("| `%s` | %s |\n", k->name, k->limits);
  printf("| no restriction | ");
  for (const char *const *k = mm_schema_annotations; *k; k++) printf("%s`%s`", k == mm_schema_annotations ? "" : ", ", *k);
  puts(", and keys that begin with `x-` |");
  return 0;
}

int main(int argc, char **argv) {
  static noise n;
  mm_err err = {0};
  mm_text out = {0};
  char *line = NULL;
  size_t cap = 0;
  if (argc == 2 && strcmp(argv[1], "--keywords") == 0) return print_keywords();
  if (argc != 3) return 2;
  n.vocab = (uint32_t)strtoul(argv[2], NULL, 10);
  if (!(n.tokenizer = mm_tokenizer_open(argv[1], n.vocab, &err))) return fprintf(stderr, "%s\n", err.text), 3;
  n.end = mm_tokenizer_find_added(n.tokenizer, "[e~[");
  n.list = calloc(n.vocab, sizeof *n.list);
  n.lexicon = mm_lexicon_open(n.tokenizer, n.vocab, &n.end, 1, &err);
  if (!n.list || !n.lexicon || n.end < 0) return 8;
  for (ssize_t len; (len = getline(&line, &cap, stdin)) > 0;) {
    answer(&n, line, (size_t)len, &out);
    if (out.failed) return 8;
    puts(out.p);
    mm_text_clear(&out);
  }
  mm_lexicon_close(n.lexicon);
  mm_tokenizer_close(n.tokenizer);
  MM_FREE(n.list, line, out.p);
  return 0;
}
