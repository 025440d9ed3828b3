/* Calls of tools by a model that writes noise: tokens that the constraint allows, at random, parsed by the reply's parser.
 * usage: call_lines TOKENIZER VOCAB. A JSON object on each line of stdin, one on stdout for each:
 *
 *   {"format": S, "tools": [{"json": {…}, "strict": B}, …], "must": B, "only": S, "one_call": B, "tokens": N, "seed": N, "likely": [[S, N],
 * …]}
 *       {"finish": "end", "length" or "stuck", "calls": [[name, arguments, ended], …], "content": S} or {"error": S}
 *
 * likely: texts of tokens that come N times as often as others. */
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "runtime/chat/reply.h"
#include "runtime/constrain/call_form.h"
#include "runtime/constrain/constrain.h"

#define CALLS_MAX 512

typedef struct call {
  mm_text name, arguments;
  bool ended;
} call;

typedef struct noise {
  mm_tokenizer *tokenizer;
  mm_lexicon *lexicon;
  uint32_t vocab;
  int32_t end, begin, close;
  uint32_t *weight; /* [vocab] */
  uint64_t seed;
  call call[CALLS_MAX];
  uint32_t calls;
  mm_text content;
} noise;

static uint64_t draw(noise *n) {
  n->seed ^= n->seed << 13;
  n->seed ^= n->seed >> 7;
  return n->seed ^= n->seed << 17;
}

static bool flag(const mm_value *o, const char *key) {
  const mm_value *v = mm_value_get(o, key);
  return v && v->type == MM_VALUE_BOOL && v->truth;
}

static int64_t whole(const mm_value *v) {
  int64_t n = 0;
  return mm_value_int(v, &n) ? n : 0;
}

static void on_event(void *user, const mm_reply_event *e) {
  noise *n = user;
  if (e->kind == MM_REPLY_CALL && n->calls < CALLS_MAX) n->calls++;
  call *c = n->calls ? &n->call[n->calls - 1] : NULL;
  if (e->kind == MM_REPLY_CALL) mm_text_add(&c->name, e->text, e->n);
  if (e->kind == MM_REPLY_ARGUMENTS) mm_text_add(&c->arguments, e->text, e->n);
  if (e->kind == MM_REPLY_CALL_END) c->ended = true;
  if (e->kind == MM_REPLY_CONTENT) mm_text_add(&n->content, e->text, e->n);
}

/* One of the allowed tokens, by weight. */
static int32_t pick(noise *n, const uint32_t *mask) {
  uint64_t sum = 0;
  for (uint32_t id = 0; id < n->vocab; id++)
    if (!mask || mask[id / 32] >> (id % 32) & 1) sum += n->weight[id];
  if (!sum) return n->end;
  uint64_t at = draw(n) % sum;
  for (uint32_t id = 0; id < n->vocab; id++) {
    if (mask && !(mask[id / 32] >> (id % 32) & 1)) continue;
    if (at < n->weight[id]) return (int32_t)id;
    at -= n->weight[id];
  }
  return n->end;
}

/* The sections of runtime/serve/turn_sections.c, without a reasoning. */
static uint32_t sections_of(const noise *n, const mm_chat_format *f, bool must, mm_arena *a, const mm_form *calls, mm_section *s,
                            mm_err *err) {
  if (!f->tags->call_token) {
    s[0] = (mm_section){.kind = MM_SECTION_FORM, .form = must ? calls : mm_call_prose(a, calls, false, err)};
    return 1;
  }
  s[0] = (mm_section){.kind = must ? MM_SECTION_TOKEN : MM_SECTION_FREE, .id = n->begin};
  s[1] = (mm_section){.kind = MM_SECTION_FORM, .form = calls};
  s[1].again = f->tags->marked && !must;
  s[2] = (mm_section){.kind = MM_SECTION_TOKEN, .id = n->close, .again = !must};
  return f->tags->marked ? 2 : 3;
}

static const char *generate(noise *n, const mm_section *s, uint32_t sections, mm_reply *r, int64_t tokens, mm_err *err) {
  mm_constraint *c = mm_constraint_open(n->lexicon, s, sections, err);
  if (!c) exit(8);
  const char *finish = "length";
  for (int64_t i = 0; i < tokens; i++) {
    const int32_t id = pick(n, mm_constraint_allowed(c));
    if (mm_constraint_stuck(c))
      finish = "stuck";
    else if (id == n->end)
      finish = "end";
    if (*finish != 'l') break;
    mm_constraint_chosen(c, id);
    size_t bytes;
    const char *text = mm_tokenizer_bytes(n->tokenizer, id, &bytes);
    if (!mm_reply_push(r, id, text, bytes, err)) exit(8);
  }
  if (!mm_reply_end(r, *finish == 'e', err)) exit(8);
  mm_constraint_close(c);
  return finish;
}

static void weigh(noise *n, const mm_value *likely) {
  for (uint32_t id = 0; id < n->vocab; id++) {
    size_t bytes;
    const char *text = mm_tokenizer_bytes(n->tokenizer, (int32_t)id, &bytes);
    n->weight[id] = text && bytes ? 1 : 0;
    for (const mm_value *v = likely ? likely->first : NULL; v; v = v->next)
      if (text && v->first->n == bytes && memcmp(v->first->text, text, bytes) == 0) n->weight[id] = (uint32_t)whole(v->first->next);
  }
}

static void put_result(noise *n, const char *finish, mm_text *out) {
  mm_text_printf(out, "{\"finish\": \"%s\", \"calls\": [", finish);
  for (uint32_t i = 0; i < n->calls; i++) {
    mm_text_put(out, i ? ", [" : "[");
    mm_text_quote(out, n->call[i].name.p, n->call[i].name.n);
    mm_text_put(out, ", ");
    mm_arguments_unite(&n->call[i].arguments);
    mm_text_quote(out, n->call[i].arguments.n ? n->call[i].arguments.p : "", n->call[i].arguments.n);
    mm_text_put(out, n->call[i].ended ? ", true]" : ", false]");
    free(n->call[i].name.p);
    free(n->call[i].arguments.p);
    n->call[i] = (call){0};
  }
  mm_text_put(out, "], \"content\": ");
  mm_text_quote(out, n->content.n ? n->content.p : "", n->content.n);
  mm_text_put(out, "}");
  mm_text_clear(&n->content);
  n->calls = 0;
}

static void answer(noise *n, const char *line, size_t len, mm_text *out) {
  mm_err err = {0};
  mm_arena a = {0};
  mm_tools tools = {0};
  const mm_value *v = mm_body_parse(&a, line, len, &err), *list = mm_value_get(v, "tools"), *only = mm_value_get(v, "only");
  if (!list) exit(3);
  const mm_chat_format *format = mm_chat_format_find(mm_value_get(v, "format")->text);
  if (!format) exit(2);
  const bool token = format->tags->call_token, must = flag(v, "must");
  if (token) n->begin = mm_tokenizer_find_added(n->tokenizer, format->tags->call_token);
  n->close = mm_tokenizer_find_added(n->tokenizer, format->tags->calls_end);
  mm_chat_tool *tool = mm_arena_alloc(&a, list->count * sizeof *tool, &err);
  bool *bound = mm_arena_alloc(&a, list->count * sizeof *bound, &err);
  size_t i = 0;
  if (!tool || !bound) exit(8);
  for (const mm_value *t = list->first; t; t = t->next, i++) {
    const mm_value *json = mm_value_get(t, "json");
    tool[i] = (mm_chat_tool){.json = {json->raw, json->raw_n}, .strict = flag(t, "strict")};
    bound[i] = must || tool[i].strict;
  }
  if (!mm_tools_open(&tools, tool, list->count, &err)) exit(3);
  const mm_call_rules rules = {.family = format->family,
                               .tools = &tools,
                               .bound = bound,
                               .only = only ? (mm_str){only->text, only->n} : (mm_str){0},
                               .one_call = flag(v, "one_call"),
                               .begun = token || !must};
  const mm_form *calls = mm_call_form(&a, &rules, &err);
  if (!calls) {
    mm_text_put(out, "{\"error\": ");
    mm_text_quote_string(out, err.text);
    mm_text_put(out, "}");
  } else {
    mm_section s[3];
    const uint32_t sections = sections_of(n, format, must, &a, calls, s, &err);
    const mm_reply_settings set = {
        .format = format, .tokenizer = n->tokenizer, .tools = &tools, .calls = true, .only_calls = must, .sink = on_event, .user = n};
    mm_reply *r = mm_reply_open(&set, &err);
    if (!r) exit(8);
    n->seed = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)(whole(mm_value_get(v, "seed")) + 1);
    weigh(n, mm_value_get(v, "likely"));
    put_result(n, generate(n, s, sections, r, whole(mm_value_get(v, "tokens")), &err), out);
    mm_reply_close(r);
  }
  mm_tools_close(&tools);
  mm_arena_close(&a);
}

int main(int argc, char **argv) {
  static noise n;
  mm_err err = {0};
  mm_text out = {0};
  char *line = NULL;
  size_t cap = 0;
  if (argc != 3) return 2;
  n.vocab = (uint32_t)strtoul(argv[2], NULL, 10);
  if (!(n.tokenizer = mm_tokenizer_open(argv[1], n.vocab, &err))) return fprintf(stderr, "%s\n", err.text), 3;
  n.end = mm_tokenizer_find_added(n.tokenizer, "[e~[");
  if (n.end < 0) n.end = mm_tokenizer_find_added(n.tokenizer, "<end_of_sentence>");
  n.weight = calloc(n.vocab, sizeof *n.weight);
  n.lexicon = mm_lexicon_open(n.tokenizer, n.vocab, &n.end, 1, &err);
  if (!n.weight || !n.lexicon || n.end < 0) return 8;
  for (ssize_t len; (len = getline(&line, &cap, stdin)) > 0;) {
    answer(&n, line, (size_t)len, &out);
    if (out.failed) return 8;
    puts(out.p);
    fflush(stdout);
    mm_text_clear(&out);
  }
  mm_lexicon_close(n.lexicon);
  mm_tokenizer_close(n.tokenizer);
  MM_FREE(n.weight, n.content.p, line, out.p);
  return 0;
}
