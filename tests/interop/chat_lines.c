/* The chat formats and reply parsers from the command line: a JSON object on each line of stdin, one on stdout for each.
 *
 *   {"op": "render", "format": F, "messages": […], "tools": […], "add_generation_prompt": B, "model_identity": S, …}
 *       {"text": S, "pieces": [[owner, bytes], …], "user_end": bytes, "in_reasoning": B} or {"error": S}; with "tokenizer": PATH also
 * "ids", "user_ids" ("trust_user": B)
 *   {"op": "template", "text": S}     {"format": F}
 *   {"op": "reply", "format": F, "tools": […], "pieces": [[id, S], …], "calls": B, "in_reasoning": B, "append_think": B, "whole": B,
 *   "stopped": B}
 *       {"events": [[kind, call, S], …], "reasoning_tokens": N}
 *
 * Messages are as OpenAI has them; arguments are a string of JSON or an object. */
#include <stdlib.h>
#include <string.h>

#include "formats/body.h"
#include "runtime/chat/reply.h"

typedef struct lines {
  mm_arena arena;
  mm_text out;
  mm_tokenizer *tokenizer;
  mm_err err;
} lines;

static void *capacity(lines *l, size_t count, size_t size) {
  void *p = mm_arena_alloc(&l->arena, count * size + 1, &l->err);
  if (!p) exit(8);
  return p;
}

static mm_str str_of(const mm_value *v) {
  if (!v) return (mm_str){0};
  return v->type == MM_VALUE_STRING ? (mm_str){v->text, v->n} : (mm_str){v->raw, v->raw_n};
}

static bool flag(const mm_value *o, const char *key) {
  const mm_value *v = mm_value_get(o, key);
  return v && v->type == MM_VALUE_BOOL && v->truth;
}

static const char *word(const mm_value *o, const char *key) {
  const mm_value *v = mm_value_get(o, key);
  return v && v->type == MM_VALUE_STRING ? v->text : "";
}

static void read_content(lines *l, const mm_value *v, mm_message *m) {
  if (!v) return;
  m->list = v->type == MM_VALUE_ARRAY;
  mm_chat_part *part = capacity(l, v->count + 1, sizeof *part);
  m->part = part;
  m->part_count = 1;
  part[0] = (mm_chat_part){.text = str_of(v)};
  if (!m->list) return;
  m->part_count = 0;
  for (const mm_value *p = v->first; p; p = p->next)
    if (mm_value_is(mm_value_get(p, "type"), "text"))
      part[m->part_count++] = (mm_chat_part){.text = str_of(mm_value_get(p, "text")), .name = str_of(mm_value_get(p, "name"))};
}

static mm_message read_message(lines *l, const mm_value *v) {
  static const char *const roles[] = {"system", "user", "assistant", "tool", "root"};
  mm_message m = {.reasoning = str_of(mm_value_get(v, "reasoning_content")), .call_id = str_of(mm_value_get(v, "tool_call_id"))};
  for (int i = 0; i < 5; i++)
    if (strcmp(roles[i], word(v, "role")) == 0) m.role = (mm_role)i;
  if (strcmp(word(v, "role"), "developer") == 0) m.role = MM_ROLE_SYSTEM;
  read_content(l, mm_value_get(v, "content"), &m);
  const mm_value *calls = mm_value_get(v, "tool_calls"), *sampled = mm_value_get(v, "sampled");
  mm_chat_call *call = capacity(l, calls ? calls->count : 0, sizeof *call);
  m.call = call;
  for (const mm_value *c = calls ? calls->first : NULL; c; c = c->next) {
    const mm_value *f = mm_value_get(c, "function");
    call[m.call_count++] =
        (mm_chat_call){str_of(mm_value_get(c, "id")), str_of(mm_value_get(f, "name")), str_of(mm_value_get(f, "arguments"))};
  }
  if (!sampled) return m;
  int32_t *id = capacity(l, sampled->count, sizeof *id);
  m.sampled = id;
  m.opening = MM_OPENING_REASONING;
  for (const mm_value *s = sampled->first; s; s = s->next) id[m.sampled_count++] = (int32_t)mm_value_real(s);
  return m;
}

static const mm_chat_tool *read_tools(lines *l, const mm_value *o, size_t *count) {
  const mm_value *tools = mm_value_get(o, "tools");
  mm_chat_tool *tool = capacity(l, tools ? tools->count : 0, sizeof *tool);
  *count = 0;
  for (const mm_value *t = tools ? tools->first : NULL; t; t = t->next) tool[(*count)++].json = (mm_str){t->raw, t->raw_n};
  return tool;
}

static mm_thinking thinking_of(const char *mode) {
  static const char *const words[] = {"", "adaptive", "enabled", "disabled"};
  for (int i = 0; i < 4; i++)
    if (strcmp(words[i], mode) == 0) return (mm_thinking)i;
  exit(2);
}

static mm_conversation read_conversation(lines *l, const mm_value *o) {
  mm_conversation c = {.identity = str_of(mm_value_get(o, "model_identity")),
                       .add_generation_prompt = flag(o, "add_generation_prompt"),
                       .continue_final = flag(o, "continue_final"),
                       .thinking = thinking_of(word(o, "thinking_mode"))};
  const mm_value *list = mm_value_get(o, "messages");
  mm_message *message = capacity(l, list ? list->count : 0, sizeof *message);
  for (const mm_value *m = list ? list->first : NULL; m; m = m->next) message[c.message_count++] = read_message(l, m);
  if (list) c.current_date = str_of(mm_value_get(list->first, "current_date"));
  if (list) c.current_location = str_of(mm_value_get(list->first, "current_location"));
  c.message = message;
  c.tool = read_tools(l, o, &c.tool_count);
  return c;
}

static void put_error(lines *l) {
  mm_text_clear(&l->out);
  mm_text_put(&l->out, "{\"error\": ");
  mm_text_quote_string(&l->out, l->err.text);
  mm_text_put(&l->out, "}");
  l->err = (mm_err){0};
}

/* ---- Rendering ---- */

static void put_ids(lines *l, const mm_prompt *p, const mm_value *o) {
  mm_prompt_tokens tokens;
  if (!l->tokenizer && !(l->tokenizer = mm_tokenizer_open(word(o, "tokenizer"), 1u << 20, &l->err))) return;
  if (!mm_prompt_encode(p, l->tokenizer, flag(o, "trust_user"), &tokens, &l->err)) return;
  mm_text_printf(&l->out, ", \"user_ids\": %zu, \"ids\": [", tokens.user_end);
  for (size_t i = 0; i < tokens.count; i++) mm_text_printf(&l->out, "%s%d", i ? ", " : "", tokens.id[i]);
  mm_text_put(&l->out, "]");
  free(tokens.id);
}

static void render(lines *l, const mm_value *o) {
  const mm_chat_format *f = mm_chat_format_find(word(o, "format"));
  const mm_conversation c = read_conversation(l, o);
  mm_prompt p = {0};
  if (!f) exit(2);
  if (mm_chat_render(f, &c, &p, &l->err)) {
    mm_text_put(&l->out, "{\"text\": ");
    mm_text_quote(&l->out, p.text.p, p.text.n);
    mm_text_printf(&l->out, ", \"in_reasoning\": %s, \"user_end\": %zu, \"pieces\": [", p.in_reasoning ? "true" : "false",
                   p.user_bytes ? p.piece[p.user_pieces].at + p.user_bytes : 0);
    for (size_t i = 0; i < p.count; i++)
      mm_text_printf(&l->out, "%s[%d, %zu]", i ? ", " : "", p.piece[i].sampled ? -1 : (int)p.piece[i].owner,
                     p.piece[i].sampled ? p.piece[i].sampled_count : p.piece[i].n);
    mm_text_put(&l->out, "]");
    if (mm_value_get(o, "tokenizer")) put_ids(l, &p, o);
    mm_text_put(&l->out, "}");
  }
  mm_prompt_close(&p);
}

/* ---- Replies ---- */

static void put_event(void *user, const mm_reply_event *e) {
  static const char *const kind[] = {"reasoning", "content", "call", "arguments", "end", "name again", "arguments again"};
  lines *l = user;
  mm_text_printf(&l->out, "%s[\"%s\", %u, ", l->out.p[l->out.n - 1] == '[' ? "" : ", ", kind[e->kind], e->call);
  mm_text_quote(&l->out, e->text, e->n);
  mm_text_put(&l->out, "]");
}

static void reply(lines *l, const mm_value *o) {
  mm_reply_settings s = {.format = mm_chat_format_find(word(o, "format")),
                         .calls = flag(o, "calls"),
                         .in_reasoning = flag(o, "in_reasoning"),
                         .append_think = flag(o, "append_think"),
                         .sink = put_event,
                         .user = l};
  if (!s.format) exit(2);
  if (mm_value_get(o, "tokenizer") && !l->tokenizer) l->tokenizer = mm_tokenizer_open(word(o, "tokenizer"), 1u << 20, &l->err);
  s.tokenizer = mm_value_get(o, "tokenizer") ? l->tokenizer : NULL;
  s.tool = read_tools(l, o, &s.tool_count);
  mm_text_put(&l->out, "{\"events\": [");
  mm_reply *r = mm_reply_open(&s, &l->err);
  const mm_value *pieces = mm_value_get(o, "pieces");
  bool ok = r != NULL;
  for (const mm_value *p = pieces ? pieces->first : NULL; ok && p; p = p->next)
    ok = mm_reply_push(r, (int32_t)mm_value_real(p->first), p->first->next->text, p->first->next->n, &l->err);
  ok = ok && mm_reply_end(r, flag(o, "whole") ? MM_REPLY_WHOLE : flag(o, "stopped") ? MM_REPLY_STOPPED : MM_REPLY_CUT, &l->err);
  if (ok) mm_text_printf(&l->out, "], \"reasoning_tokens\": %u}", mm_reply_reasoning_tokens(r));
  mm_reply_close(r);
}

static void answer(lines *l, const char *line, size_t n) {
  const mm_value *o = mm_body_parse(&l->arena, line, n, &l->err);
  const mm_value *text = mm_value_get(o, "text");
  mm_text_clear(&l->out);
  if (mm_value_is(mm_value_get(o, "op"), "render")) render(l, o);
  if (mm_value_is(mm_value_get(o, "op"), "reply")) reply(l, o);
  if (mm_value_is(mm_value_get(o, "op"), "template") && text) {
    const mm_chat_format *f = mm_chat_format_of_template(text->text, text->n);
    mm_text_printf(&l->out, "{\"format\": \"%s\"}", f ? f->name : "");
  }
  if (l->err.status != MM_OK) put_error(l);
  puts(l->out.p);
  fflush(stdout);
}

int main(void) {
  lines l = {0};
  char *line = NULL;
  size_t cap = 0;
  for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
    answer(&l, line, (size_t)n);
    mm_arena_close(&l.arena);
    l.arena = (mm_arena){0};
  }
  mm_tokenizer_close(l.tokenizer);
  free(l.out.p);
  free(line);
  return 0;
}
