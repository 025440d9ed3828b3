/* The formats of M1: the template that vLLM ships, and the one that M1 was released with. */
#include <string.h>

#include "runtime/chat/render.h"

#define BEGIN "<beginning_of_sentence>"
#define END   "<end_of_sentence>\n"

static bool released(const mm_renderer *r) { return r->format->family == MM_CHAT_M1_RELEASED; }

/* A part of a message that is not a tool's. */
static void put_part(mm_renderer *r, const mm_chat_part *part) {
  mm_render_str(r, part->owner, released(r) ? part->text : mm_strip(part->text));
}

/* A list of parts where the template takes one: they are joined, then trimmed. */
static bool put_joined(mm_renderer *r, const mm_message *m) {
  mm_chat_part part = {0};
  part.text = mm_render_joined(r, m, &part.owner);
  if (part.text.p) put_part(r, &part);
  return part.text.p;
}

/* ---- System and tools ---- */

static bool is_blank(const mm_renderer *r, const mm_message *m) {
  for (size_t i = 0; i < m->part_count; i++)
    if (released(r) ? m->part[i].text.n : mm_strip(m->part[i].text).n) return false;
  return true;
}

/* Released: every system message. Otherwise the first message's, or the default where that is no system's. */
static bool put_system(mm_renderer *r) {
  const mm_conversation *c = r->c;
  const size_t count = released(r) ? c->message_count : 1;
  bool any = false;
  if (!released(r) && c->message[0].role != MM_ROLE_SYSTEM) {
    mm_render_own(r, BEGIN "system ai_setting=assistant\n");
    mm_render_own(r, r->format->identity);
    mm_render_own(r, END);
    return true;
  }
  for (size_t i = 0; i < count; i++) {
    const mm_message *m = &c->message[i];
    if (m->role != MM_ROLE_SYSTEM || is_blank(r, m)) continue;
    if (!any) mm_render_own(r, BEGIN "system ai_setting=assistant\n");
    any = true;
    if (!put_joined(r, m)) return false;
  }
  if (any) mm_render_own(r, END);
  return true;
}

static bool put_tools(mm_renderer *r) {
  if (!r->c->tool_count) return true;
  mm_render_own(r, BEGIN "system tool_setting=tools\nYou are provided with these tools:\n<tools>\n");
  for (size_t i = 0; i < r->c->tool_count; i++) {
    const mm_value *tool = mm_render_object(r, r->c->tool[i].json, "tool", i);
    if (!tool || !mm_render_json(r, tool)) return false;
    mm_render_own(r, "\n");
  }
  mm_render_own(r,
                "</tools>\n\nIf you need to call tools, please respond with <tool_calls></tool_calls> XML tags, and provide tool-name and "
                "json-object of arguments, following the format below:\n<tool_calls>\n");
  mm_render_own(r, released(r) ? "{name: <tool-name-1>, arguments: <args-json-object-1>}"
                               : "{\"name\": <tool-name>, \"arguments\": <args-json-object>}");
  mm_render_own(r, "\n...\n</tool_calls>" END);
  return true;
}

/* ---- Messages ---- */

static bool put_user(mm_renderer *r, const mm_message *m) {
  mm_render_own(r, BEGIN "user name=user\n");
  if (released(r)) {
    if (!put_joined(r, m)) return false;
  } else {
    for (size_t i = 0; i < m->part_count; i++) put_part(r, &m->part[i]);
  }
  mm_render_own(r, END);
  return true;
}

/* Calls stand instead of the content. */
static bool put_calls(mm_renderer *r, const mm_message *m) {
  mm_render_own(r, BEGIN "ai name=assistant\n<tool_calls>\n");
  for (size_t i = 0; i < m->call_count; i++) {
    const mm_value *arguments = mm_render_arguments(r, m, &m->call[i]);
    if (!arguments) return false;
    mm_render_own(r, "{\"name\": \"");
    mm_render_str(r, MM_OWNER_USER, m->call[i].name);
    mm_render_own(r, "\", \"arguments\": ");
    if (!mm_render_json(r, arguments)) return false;
    mm_render_own(r, "}\n");
  }
  mm_render_own(r, "</tool_calls>" END);
  return true;
}

static bool put_assistant(mm_renderer *r, const mm_message *m, bool open) {
  if (m->call_count && !released(r)) return put_calls(r, m);
  mm_render_own(r, BEGIN "ai name=assistant\n");
  for (size_t i = 0; i < m->part_count; i++) put_part(r, &m->part[i]);
  if (!open) mm_render_own(r, END);
  return true;
}

/* The name of the tool that a message is the answer of: the part's own, or that of the call. */
static mm_str tool_name(const mm_renderer *r, const mm_message *m, const mm_chat_part *part) {
  if (part->name.p || !m->call_id.n) return part->name;
  for (const mm_message *before = m; before-- > r->c->message;)
    for (size_t i = 0; i < before->call_count; i++)
      if (before->call[i].id.n == m->call_id.n && memcmp(before->call[i].id.p, m->call_id.p, m->call_id.n) == 0)
        return before->call[i].name;
  return part->name;
}

static void put_tool(mm_renderer *r, const mm_message *m) {
  mm_render_own(r, BEGIN "tool name=tools\n");
  for (size_t i = 0; i < m->part_count; i++) {
    if (released(r)) {
      mm_render_own(r, "tool name: ");
      mm_render_str(r, MM_OWNER_USER, tool_name(r, m, &m->part[i]));
      mm_render_own(r, "\n");
    }
    mm_render_own(r, "tool result: ");
    mm_render_str(r, m->part[i].owner, m->part[i].text);
    mm_render_own(r, "\n\n");
  }
  mm_render_own(r, END);
}

static bool put_message(mm_renderer *r, const mm_message *m) {
  const bool open = r->c->continue_final && m + 1 == r->c->message + r->c->message_count;
  switch (m->role) {
    case MM_ROLE_USER:
      if (!put_user(r, m)) return false;
      mm_prompt_mark_user(r->p);
      return true;
    case MM_ROLE_ASSISTANT: return put_assistant(r, m, open);
    case MM_ROLE_TOOL:
      put_tool(r, m);
      mm_prompt_mark_user(r->p);
      return true;
    case MM_ROLE_SYSTEM:
    case MM_ROLE_ROOT: break;
  }
  return true;
}

bool mm_render_m1(mm_renderer *r) {
  if (r->c->thinking == MM_THINKING_DISABLED)
    return mm_fail(r->err, MM_UNSUPPORTED, "E_CHAT", mm_at(NULL, NULL), "%s has no form for a reply without reasoning", r->format->name);
  mm_render_own(r, "<begin_of_document>");
  if (!put_system(r) || !put_tools(r)) return false;
  for (size_t i = 0; i < r->c->message_count; i++)
    if (!put_message(r, &r->c->message[i])) return false;
  if (r->c->add_generation_prompt) mm_render_own(r, BEGIN "ai name=assistant\n");
  return true;
}
