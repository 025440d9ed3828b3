/* system, messages, tools. A user's message with results of tools becomes messages of tools, and one of the user for the rest. */
#include "runtime/serve/anthropic_messages.h"

#include <string.h>

#include "runtime/serve/fields.h"

#define BILLING "x-anthropic-billing-header:"

static bool refuse_type(mm_call *c, const char *field, const mm_value *type) {
  return mm_refuse(c, 400, field, "%s: content of type \"%.60s\" is not served here", field, MM_SHOWN_VALUE(type));
}

/* A text block, or a string. */
static bool add_text(mm_call *c, const char *field, const mm_value *v, mm_chat_part *part, size_t *n) {
  const mm_value *text = v->type == MM_VALUE_STRING ? v : mm_value_get(v, "text");
  if (v->type != MM_VALUE_STRING && !mm_value_is(mm_value_get(v, "type"), "text")) return refuse_type(c, field, mm_value_get(v, "type"));
  if (!text || text->type != MM_VALUE_STRING) return mm_refuse(c, 400, field, "%s: a text block has no text", field);
  part[(*n)++] = (mm_chat_part){.text = mm_str_of(text), .owner = MM_OWNER_USER};
  return true;
}

/* A string, or a list of text blocks; `field` has them. */
static bool read_texts(mm_call *c, const char *field, const mm_value *content, mm_message *m, mm_err *err) {
  if (!content) return true;
  m->list = content->type == MM_VALUE_ARRAY;
  if (!m->list && content->type != MM_VALUE_STRING)
    return mm_refuse(c, 400, field, "%s: found %s as content", field, mm_value_word(content));
  mm_chat_part *part = mm_arena_alloc(&c->arena, (content->count + 1) * sizeof *part, err);
  if (!part) return false;
  m->part = part;
  if (!m->list) return add_text(c, field, content, part, &m->part_count);
  for (const mm_value *v = content->first; v; v = v->next)
    if (!add_text(c, field, v, part, &m->part_count)) return false;
  return true;
}

/* ---- System ---- */

static void strip_billing(mm_message *m) {
  mm_chat_part *part = (mm_chat_part *)m->part; /* the arena's */
  if (!m->part_count || part->text.n < strlen(BILLING) || memcmp(part->text.p, BILLING, strlen(BILLING)) != 0) return;
  const char *end = memchr(part->text.p, '\n', part->text.n);
  const size_t line = end ? (size_t)(end - part->text.p) + 1 : part->text.n;
  part->text.p += line;
  part->text.n -= line;
  if (part->text.n) return;
  m->part++;
  m->part_count--;
}

static bool read_system(mm_call *c, mm_message *m, size_t *n, mm_err *err) {
  const mm_value *system = mm_value_get(c->body, "system");
  if (!system) return true;
  *m = (mm_message){.role = MM_ROLE_SYSTEM};
  if (!read_texts(c, "system", system, m, err)) return false;
  strip_billing(m);
  *n += m->part_count > 0;
  return true;
}

/* ---- Messages ---- */

static bool read_result(mm_call *c, const mm_value *v, mm_message *m, mm_err *err) {
  const mm_value *id;
  if (!mm_field(c, v, "tool_use_id", MM_VALUE_STRING, &id)) return false;
  *m = (mm_message){.role = MM_ROLE_TOOL, .call_id = mm_str_of(id)};
  if (!read_texts(c, "messages", mm_value_get(v, "content"), m, err)) return false;
  if (m->part_count) return true;
  static const mm_chat_part nothing = {.text = {"", 0}, .owner = MM_OWNER_USER};
  m->part = &nothing;
  m->part_count = 1;
  m->list = false;
  return true;
}

/* The user's blocks: results first, as the API wants them, then the text. */
static bool read_user(mm_call *c, const mm_value *content, mm_message *m, size_t *n, mm_err *err) {
  if (content->type != MM_VALUE_ARRAY) return read_texts(c, "messages", content, &m[(*n)++], err);
  const size_t first = *n;
  mm_chat_part *part = mm_arena_alloc(&c->arena, (content->count + 1) * sizeof *part, err);
  size_t parts = 0;
  if (!part) return false;
  for (const mm_value *v = content->first; v; v = v->next) {
    const bool result = mm_value_is(mm_value_get(v, "type"), "tool_result");
    if (result ? !read_result(c, v, &m[(*n)++], err) : !add_text(c, "messages", v, part, &parts)) return false;
  }
  if (parts || *n == first) m[(*n)++] = (mm_message){.role = MM_ROLE_USER, .part = part, .part_count = parts, .list = true};
  return true;
}

static bool read_use(mm_call *c, const mm_value *v, mm_chat_call *call) {
  const mm_value *name = mm_value_get(v, "name"), *input = mm_value_get(v, "input"), *id;
  if (!name || name->type != MM_VALUE_STRING || !name->n) return mm_refuse(c, 400, "messages", "messages: a tool_use block has no name");
  if (input && input->type != MM_VALUE_OBJECT)
    return mm_refuse(c, 400, "messages", "messages: the input of a tool_use block is %s, expected an object", mm_value_word(input));
  if (!mm_field(c, v, "id", MM_VALUE_STRING, &id)) return false;
  *call = (mm_chat_call){.id = mm_str_of(id), .name = mm_str_of(name)};
  if (input) call->arguments = (mm_str){input->raw, input->raw_n};
  return true;
}

/* Thinking of several blocks is joined: `joined` has room for all of the message. */
static bool add_thinking(mm_call *c, const mm_value *v, char *joined, mm_message *m) {
  const mm_value *thinking;
  if (!mm_field(c, v, "thinking", MM_VALUE_STRING, &thinking)) return false;
  const mm_str more = mm_str_of(thinking);
  if (!more.p) return true;
  memcpy(joined + m->reasoning.n, more.p, more.n);
  m->reasoning = (mm_str){joined, m->reasoning.n + more.n};
  return true;
}

static bool read_assistant(mm_call *c, const mm_value *content, mm_message *m, mm_err *err) {
  if (content->type != MM_VALUE_ARRAY) return read_texts(c, "messages", content, m, err);
  mm_chat_part *part = mm_arena_alloc(&c->arena, (content->count + 1) * sizeof *part, err);
  mm_chat_call *call = mm_arena_alloc(&c->arena, (content->count + 1) * sizeof *call, err);
  char *joined = NULL;
  if (!part || !call) return false;
  m->list = true;
  m->part = part;
  m->call = call;
  for (const mm_value *v = content->first; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type");
    bool ok = true;
    if (mm_value_is(type, "thinking"))
      ok = (joined || (joined = mm_arena_alloc(&c->arena, content->raw_n + 1, err))) && add_thinking(c, v, joined, m);
    else if (mm_value_is(type, "tool_use"))
      ok = read_use(c, v, &call[m->call_count++]);
    else if (!mm_value_is(type, "redacted_thinking"))
      ok = add_text(c, "messages", v, part, &m->part_count);
    if (!ok) return false;
  }
  return true;
}

static bool read_messages(mm_call *c, mm_conversation *out, mm_err *err) {
  const mm_value *list;
  size_t most = 1, n = 0;
  if (!mm_field(c, c->body, "messages", MM_VALUE_ARRAY, &list)) return false;
  if (!list || !list->count) return mm_refuse(c, 400, "messages", "messages: expected one message or more");
  for (const mm_value *v = list->first; v; v = v->next) {
    const mm_value *content = mm_value_get(v, "content");
    most += 1 + (content ? content->count : 0);
  }
  mm_message *m = mm_arena_alloc(&c->arena, most * sizeof *m, err);
  if (!m || !read_system(c, m, &n, err)) return false;
  for (const mm_value *v = list->first; v; v = v->next) {
    const mm_value *role = mm_value_get(v, "role"), *content = mm_value_get(v, "content");
    const bool user = mm_value_is(role, "user") || mm_value_is(role, "ctx") || mm_value_is(role, "msg"); /* two of Claude Code's */
    const bool system = mm_value_is(role, "system");
    if (!user && !system && !mm_value_is(role, "assistant"))
      return mm_refuse(c, 400, "messages", "messages: found the role %.60s, expected user, assistant or system", MM_SHOWN_VALUE(role));
    if (!content) return mm_refuse(c, 400, "messages", "messages: a message has no content");
    if (!mm_message_check(c, v, "give blocks of the types thinking and tool_use")) return false;
    m[n] = (mm_message){.role = user ? MM_ROLE_USER : system ? MM_ROLE_SYSTEM : MM_ROLE_ASSISTANT};
    const bool ok = user     ? read_user(c, content, m, &n, err)
                    : system ? read_texts(c, "messages", content, &m[n++], err)
                             : read_assistant(c, content, &m[n++], err);
    if (!ok) return false;
  }
  out->message = m;
  out->message_count = n;
  out->continue_final = m[n - 1].role == MM_ROLE_ASSISTANT;
  out->add_generation_prompt = !out->continue_final;
  return true;
}

/* ---- Tools ---- */

static bool read_choice(mm_call *c, mm_conversation *v, mm_tool_rules *r) {
  const mm_value *choice, *type;
  if (!mm_field(c, c->body, "tool_choice", MM_VALUE_OBJECT, &choice)) return false;
  *r = (mm_tool_rules){0};
  if (!mm_field_bool(c, choice, "disable_parallel_tool_use", &r->one_call)) return false;
  type = mm_value_get(choice, "type");
  const bool named = mm_value_is(type, "tool");
  for (const mm_value *m = choice ? choice->first : NULL; m; m = m->next) {
    const bool other = mm_value_key_is(m, "function") || mm_value_key_is(m, "allowed_tools") || mm_value_key_is(m, "tools");
    if (m->type != MM_VALUE_NULL && (other || (!named && mm_value_key_is(m, "name"))))
      return mm_refuse(c, 400, "tool_choice", "tool_choice: found %s, expected the type tool and a name to choose one", m->key);
  }
  if (!choice || mm_value_is(type, "auto")) return true;
  if (mm_value_is(type, "none")) {
    r->choice = MM_TOOLS_NONE;
    v->tool_count = 0;
    return true;
  }
  if (!mm_value_is(type, "any") && !named)
    return mm_refuse(c, 400, "tool_choice", "tool_choice: found %.60s, expected auto, any, tool or none", MM_SHOWN_VALUE(type));
  return mm_tool_choose(c, v, r, mm_value_is(type, "any"), mm_value_get(choice, "name"), "the type auto, any, none");
}

bool mm_anthropic_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err) {
  *out = (mm_conversation){0};
  return read_messages(c, out, err) && mm_flat_tools(c, out, "input_schema", err) && read_choice(c, out, rules) &&
         mm_template_kwargs(c, out);
}
