/* The format of the M2 family. */
#include <stdlib.h>

#include "runtime/chat/render.h"

#define BEGIN "]~b]"
#define END   "[e~[\n"

/* The system message, if the first one is. */
static const mm_message *system_of(const mm_conversation *c) { return c->message[0].role == MM_ROLE_SYSTEM ? &c->message[0] : NULL; }

static void put_line(mm_renderer *r, const char *label, mm_str text) {
  if (!text.n) return;
  mm_render_own(r, label);
  mm_render_str(r, MM_OWNER_USER, text);
}

static bool put_tools(mm_renderer *r) {
  if (!mm_render_tools(r)) return false;
  mm_render_own(r,
                "\n\nWhen making tool calls, use XML format to invoke tools and pass parameters:\n\n"
                "<minimax:tool_call>\n<invoke name=\"tool-name-1\">\n"
                "<parameter name=\"param-key-1\">param-value-1</parameter>\n"
                "<parameter name=\"param-key-2\">param-value-2</parameter>\n...\n</invoke>\n</minimax:tool_call>");
  return true;
}

static bool put_system(mm_renderer *r) {
  const mm_message *m = system_of(r->c);
  mm_render_own(r, "]~!b[" BEGIN "system\n");
  mm_render_system(r, m);
  if (m) put_line(r, "\nCurrent date: ", r->c->current_date);
  if (m) put_line(r, "\nCurrent location: ", r->c->current_location);
  if (r->c->tool_count && !put_tools(r)) return false;
  mm_render_own(r, END);
  return true;
}

/* ---- Assistants ---- */

static bool put_call(mm_renderer *r, const mm_message *m, const mm_chat_call *call) {
  const mm_value *arguments = mm_render_arguments(r, m, call);
  if (!arguments) return false;
  mm_render_own(r, "<invoke name=\"");
  mm_render_str(r, MM_OWNER_USER, call->name);
  mm_render_own(r, "\">\n");
  for (const mm_value *v = arguments->first; v; v = v->next) {
    mm_render_own(r, "<parameter name=\"");
    mm_prompt_put(r->p, MM_OWNER_USER, v->key, v->key_n);
    mm_render_own(r, "\">");
    if (v->type == MM_VALUE_STRING)
      mm_prompt_put(r->p, MM_OWNER_USER, v->text, v->n);
    else if (!mm_render_json(r, v))
      return false;
    mm_render_own(r, "</parameter>\n");
  }
  mm_render_own(r, "</invoke>\n");
  return true;
}

static bool put_calls(mm_renderer *r, const mm_message *m) {
  if (!m->call_count) return true;
  mm_render_own(r, "\n<minimax:tool_call>\n");
  for (size_t i = 0; i < m->call_count; i++)
    if (!put_call(r, m, &m->call[i])) return false;
  mm_render_own(r, "</minimax:tool_call>");
  return true;
}

/* Where the message begins whose tokens are sampled. */
static void put_opening(mm_renderer *r, mm_opening opening) {
  mm_render_own(r, BEGIN "ai\n<think>\n");
  if (opening == MM_OPENING_CONTENT) mm_render_own(r, "</think>\n\n");
}

/* `current`: after the last user message, where reasoning is kept. `open`: the message goes on. */
static bool put_assistant(mm_renderer *r, const mm_message *m, bool current, bool open) {
  mm_thought t = {.reasoning = m->reasoning, .owner = MM_OWNER_USER};
  if (current && !open && m->sampled_count) {
    put_opening(r, m->opening);
    mm_prompt_put_sampled(r->p, m->sampled, m->sampled_count);
    mm_render_own(r, END);
    return true;
  }
  mm_render_own(r, BEGIN "ai\n");
  if (!m->reasoning.p && !mm_render_thought(r, m, &t)) return false;
  if (t.reasoning.n && current) {
    mm_render_own(r, "<think>\n");
    mm_render_str(r, t.owner, t.reasoning);
    r->p->in_reasoning = open && mm_render_is_empty(m, &t);
    if (!r->p->in_reasoning) mm_render_own(r, "\n</think>\n\n");
  }
  mm_render_content(r, m, &t);
  if (open) return true;
  if (!put_calls(r, m)) return false;
  mm_render_own(r, END);
  return true;
}

/* ---- Tools' answers ---- */

static void put_response(mm_renderer *r, mm_owner owner, mm_str text, const char *end) {
  mm_render_own(r, "\n<response>");
  mm_render_str(r, owner, text);
  mm_render_own(r, end);
}

/* Messages of tools that stand side by side are one. */
static void put_tool(mm_renderer *r, const mm_message *m) {
  const mm_message *end = r->c->message + r->c->message_count;
  if (m == r->c->message || m[-1].role != MM_ROLE_TOOL) mm_render_own(r, BEGIN "tool");
  if (!m->list && !m->part_count) put_response(r, MM_OWNER_USER, (mm_str){0}, "</response>");
  for (size_t i = 0; i < m->part_count; i++) put_response(r, m->part[i].owner, m->part[i].text, m->list ? "\n</response>" : "</response>");
  if (m + 1 == end || m[1].role != MM_ROLE_TOOL) mm_render_own(r, END);
}

/* ---- The conversation ---- */

static bool put_message(mm_renderer *r, const mm_message *m, const mm_message *last_user, bool *called) {
  const mm_message *last = r->c->message + r->c->message_count - 1;
  switch (m->role) {
    case MM_ROLE_USER:
      mm_render_own(r, BEGIN "user\n");
      mm_render_parts(r, m);
      mm_render_own(r, END);
      if (m == last_user) mm_prompt_mark_user(r->p);
      return true;
    case MM_ROLE_ASSISTANT:
      *called = m->call_count > 0;
      return put_assistant(r, m, !last_user || m > last_user, m == last && r->c->continue_final);
    case MM_ROLE_TOOL:
      if (!*called) return mm_render_no_call(r, m);
      put_tool(r, m);
      return true;
    case MM_ROLE_SYSTEM: /* the template shows only the first message's */
    case MM_ROLE_ROOT: break;
  }
  return true;
}

bool mm_render_m2(mm_renderer *r) {
  const mm_conversation *c = r->c;
  const mm_message *last_user = NULL;
  bool called = false;
  for (size_t i = 0; i < c->message_count; i++)
    if (c->message[i].role == MM_ROLE_USER && !c->message[i].as_user) last_user = &c->message[i];
  if (!put_system(r)) return false;
  for (size_t i = system_of(c) != NULL; i < c->message_count; i++)
    if (!put_message(r, &c->message[i], last_user, &called)) return false;
  if (!c->add_generation_prompt) return true;
  r->p->in_reasoning = c->thinking != MM_THINKING_DISABLED;
  r->p->opening = r->p->in_reasoning ? MM_OPENING_REASONING : MM_OPENING_CONTENT;
  put_opening(r, r->p->opening);
  return true;
}
