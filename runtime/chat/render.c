/* Rendering: what the formats share. */
#include "runtime/chat/render.h"

#include <stdlib.h>
#include <string.h>

void mm_render_own(mm_renderer *r, const char *text) { mm_prompt_put(r->p, MM_OWNER_TRUSTED, text, strlen(text)); }

void mm_render_str(mm_renderer *r, mm_owner owner, mm_str s) { mm_prompt_put(r->p, owner, s.p, s.n); }

void mm_render_parts(mm_renderer *r, const mm_message *m) {
  for (size_t i = 0; i < m->part_count; i++) mm_render_str(r, m->part[i].owner, m->part[i].text);
}

mm_str mm_render_joined(mm_renderer *r, const mm_message *m, mm_owner *owner) {
  size_t n = 0;
  for (size_t i = 0; i < m->part_count; i++) n += m->part[i].text.n;
  char *all = mm_arena_alloc(&r->arena, n + 1, r->err), *to = all;
  *owner = MM_OWNER_TRUSTED;
  for (size_t i = 0; all && i < m->part_count; i++) {
    to = mempcpy(to, m->part[i].text.n ? m->part[i].text.p : "", m->part[i].text.n);
    if (m->part[i].owner == MM_OWNER_USER) *owner = MM_OWNER_USER;
  }
  return (mm_str){all, n};
}

void mm_render_system(mm_renderer *r, const mm_message *m) {
  if (m && mm_render_has_content(m))
    mm_render_parts(r, m);
  else if (r->c->identity.p)
    mm_render_str(r, MM_OWNER_USER, r->c->identity);
  else
    mm_render_own(r, r->format->identity);
}

bool mm_render_no_call(mm_renderer *r, const mm_message *m) {
  return mm_fail(r->err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                 "message %zu is a tool's, expected an assistant's message with a tool call before it", (size_t)(m - r->c->message));
}

bool mm_render_has_content(const mm_message *m) { return m->list ? m->part_count > 0 : m->part_count && m->part[0].text.n; }

/* The object of a tool's function. */
static const mm_value *function_of(const mm_value *tool) {
  const mm_value *function = mm_value_get(tool, "function");
  return function && function->type == MM_VALUE_OBJECT ? function : tool;
}

bool mm_render_tools(mm_renderer *r) {
  mm_render_own(r,
                "\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
                "Here are the tools available in JSONSchema format:\n\n<tools>\n");
  for (size_t i = 0; i < r->c->tool_count; i++) {
    const mm_value *tool = mm_render_object(r, r->c->tool[i].json, "tool", i);
    if (!tool) return false;
    mm_render_own(r, "<tool>");
    if (!mm_render_json(r, function_of(tool))) return false;
    mm_render_own(r, "</tool>\n");
  }
  mm_render_own(r, "</tools>");
  return true;
}

/* ---- Reasoning within content ---- */

static mm_str strip_newlines(mm_str s) {
  while (s.n && *s.p == '\n') s.p++, s.n--;
  while (s.n && s.p[s.n - 1] == '\n') s.n--;
  return s;
}

/* The last place of a word. */
static const char *last_of(mm_str s, const char *word) {
  const size_t n = strlen(word);
  for (size_t at = s.n < n ? 0 : s.n - n + 1; at > 0; at--)
    if (memcmp(s.p + at - 1, word, n) == 0) return s.p + at - 1;
  return NULL;
}

bool mm_render_thought(mm_renderer *r, const mm_message *m, mm_thought *t) {
  const char *begin = r->format->tags->think, *end = r->format->tags->think_end;
  const mm_str text = mm_render_joined(r, m, &t->owner);
  if (!text.p) return false;
  const char *first = memmem(text.p, text.n, end, strlen(end)), *last = last_of(text, end);
  if (!first || !last) return true;
  t->split = true;
  t->reasoning = strip_newlines((mm_str){text.p, (size_t)(first - text.p)});
  const char *open = last_of(t->reasoning, begin);
  if (open) open += strlen(begin), t->reasoning = (mm_str){open, t->reasoning.n - (size_t)(open - t->reasoning.p)};
  t->reasoning = strip_newlines(t->reasoning);
  last += strlen(end);
  t->content = strip_newlines((mm_str){last, text.n - (size_t)(last - text.p)});
  return true;
}

bool mm_render_is_empty(const mm_message *m, const mm_thought *t) {
  if (t->split) return !t->content.n;
  for (size_t i = 0; i < m->part_count; i++)
    if (m->part[i].text.n) return false;
  return true;
}

void mm_render_content(mm_renderer *r, const mm_message *m, const mm_thought *t) {
  if (t->split)
    mm_render_str(r, t->owner, t->content);
  else
    mm_render_parts(r, m);
}

/* ---- JSON ---- */

static void put_members(mm_text *out, const mm_value *v) {
  const bool object = v->type == MM_VALUE_OBJECT;
  mm_text_put(out, object ? "{" : "[");
  for (const mm_value *m = v->first; m; m = m->next) {
    if (m != v->first) mm_text_put(out, ", ");
    if (object) {
      mm_text_quote(out, m->key, m->key_n);
      mm_text_put(out, ": ");
    }
    mm_tojson(out, m);
  }
  mm_text_put(out, object ? "}" : "]");
}

/* Recursion is bounded by the depth that mm_body_parse reads. */
void mm_tojson(mm_text *out, const mm_value *v) {
  switch (v->type) {
    case MM_VALUE_NULL: mm_text_put(out, "null"); break;
    case MM_VALUE_BOOL: mm_text_put(out, v->truth ? "true" : "false"); break;
    case MM_VALUE_NUMBER: mm_text_add(out, v->text, v->n); break;
    case MM_VALUE_STRING: mm_text_quote(out, v->text, v->n); break;
    case MM_VALUE_ARRAY:
    case MM_VALUE_OBJECT: put_members(out, v); break;
  }
}

bool mm_render_json(mm_renderer *r, const mm_value *v) {
  mm_text text = {0};
  mm_tojson(&text, v);
  const bool ok = !text.failed || mm_fail_memory(r->err, text.n);
  if (ok) mm_prompt_put(r->p, MM_OWNER_USER, text.p, text.n);
  free(text.p);
  return ok;
}

const mm_value *mm_render_object(mm_renderer *r, mm_str json, const char *what, size_t place) {
  mm_err wrong = {0};
  const mm_value *v = json.n ? mm_body_parse(&r->arena, json.p, json.n, &wrong) : mm_body_parse(&r->arena, "{}", 2, &wrong);
  if (v && v->type == MM_VALUE_OBJECT) return v;
  if (v)
    mm_fail(r->err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "%s %zu: found %s, expected a JSON object", what, place, mm_value_word(v));
  else
    mm_fail(r->err, wrong.status, "E_CHAT", mm_at(NULL, NULL), "%s %zu: expected a JSON object: %s", what, place, wrong.text);
  return NULL;
}

const mm_value *mm_render_arguments(mm_renderer *r, const mm_message *m, const mm_chat_call *call) {
  return mm_render_object(r, call->arguments, "arguments of a call in message", (size_t)(m - r->c->message));
}

/* ---- White space ---- */

/* The bytes of the white space, as Python's str.isspace has it, that s begins with; 0: none. */
static size_t space_at(const char *s, size_t n) {
  const uint8_t *b = (const uint8_t *)s;
  if (n >= 1 && ((b[0] >= 0x09 && b[0] <= 0x0d) || (b[0] >= 0x1c && b[0] <= 0x20))) return 1;
  if (n >= 2 && b[0] == 0xc2 && (b[1] == 0x85 || b[1] == 0xa0)) return 2;
  if (n < 3) return 0;
  const uint32_t c = (uint32_t)b[0] << 16 | (uint32_t)b[1] << 8 | b[2];
  const bool quad = c >= 0xe28080 && c <= 0xe2808a; /* U+2000 … U+200A */
  /* U+1680, U+2028, U+2029, U+202F, U+205F, U+3000 */
  return quad || c == 0xe19a80 || c == 0xe280a8 || c == 0xe280a9 || c == 0xe280af || c == 0xe2819f || c == 0xe38080 ? 3 : 0;
}

mm_str mm_strip(mm_str s) {
  for (size_t len; (len = space_at(s.p, s.n)) > 0; s.p += len) s.n -= len;
  for (size_t len = 1; len <= 3 && len <= s.n;) {
    if (space_at(s.p + s.n - len, len) == len) {
      s.n -= len;
      len = 1;
    } else {
      len++;
    }
  }
  return s;
}

/* ---- The way in ---- */

static bool check(mm_renderer *r) {
  const mm_conversation *c = r->c;
  const mm_message *last = c->message_count ? &c->message[c->message_count - 1] : NULL;
  if (!last) return mm_fail(r->err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "found no messages");
  if (c->continue_final && (c->add_generation_prompt || last->role != MM_ROLE_ASSISTANT || last->call_count))
    return mm_fail(r->err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                   "the last message goes on: expected an assistant's without calls, and no generation prompt");
  for (size_t i = 0; r->format->family != MM_CHAT_M3 && i < c->message_count; i++)
    if (c->message[i].role == MM_ROLE_ROOT)
      return mm_fail(r->err, MM_UNSUPPORTED, "E_CHAT", mm_at(NULL, NULL), "%s has no root messages", r->format->name);
  return true;
}

static bool render(mm_renderer *r) {
  switch (r->format->family) {
    case MM_CHAT_M2: return mm_render_m2(r);
    case MM_CHAT_M3: return mm_render_m3(r);
    default: return mm_render_m1(r);
  }
}

bool mm_chat_render(const mm_chat_format *f, const mm_conversation *c, mm_prompt *out, mm_err *err) {
  mm_renderer r = {.format = f, .c = c, .p = out, .err = err};
  bool ok = check(&r) && render(&r);
  if (ok && out->text.failed) ok = mm_fail_memory(err, out->text.n);
  mm_arena_close(&r.arena);
  return ok;
}
