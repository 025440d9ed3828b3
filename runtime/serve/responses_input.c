/* instructions, input, tools. Neighbouring items of the assistant, reasoning, messages and calls, are one message. */
#include "runtime/serve/responses_input.h"

#include <string.h>

#include "runtime/serve/fields.h"

static bool is_of_assistant(const mm_value *v) {
  const mm_value *type = mm_value_get(v, "type");
  return mm_value_is(mm_value_get(v, "role"), "assistant") || mm_value_is(type, "function_call") || mm_value_is(type, "reasoning");
}

/* Adds the texts of content, a string or a list of parts, to part[*n]. */
static bool add_parts(mm_call *c, const mm_value *content, mm_chat_part *part, size_t *n) {
  static const char *const types[] = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"};
  if (!content) return true;
  if (content->type == MM_VALUE_STRING) return part[(*n)++] = (mm_chat_part){.text = mm_str_of(content), .owner = MM_OWNER_USER}, true;
  if (content->type != MM_VALUE_ARRAY) return mm_refuse(c, 400, "input", "input: found %s as content", mm_value_word(content));
  for (const mm_value *v = content->first; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type"), *text = mm_value_get(v, mm_value_is(type, "refusal") ? "refusal" : "text");
    bool known = false;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) known |= mm_value_is(type, types[i]);
    if (!known) return mm_refuse(c, 400, "input", "input: content of type \"%.60s\" is not served here", MM_SHOWN_VALUE(type));
    if (!text || text->type != MM_VALUE_STRING) return mm_refuse(c, 400, "input", "input: a part of content has no text");
    part[(*n)++] = (mm_chat_part){.text = mm_str_of(text), .owner = MM_OWNER_USER};
  }
  return true;
}

static bool is_given(const mm_value *v) { return v && (v->type == MM_VALUE_STRING ? v->n : v->type != MM_VALUE_ARRAY || v->count); }

/* What an item says; reasoning that has no content says its summary. */
static const mm_value *content_of(const mm_value *v) {
  const mm_value *content = mm_value_get(v, "content"), *summary = mm_value_get(v, "summary");
  if (!mm_value_is(mm_value_get(v, "type"), "reasoning") || is_given(content)) return content;
  return is_given(summary) ? summary : NULL;
}

static size_t parts_of(const mm_value *v) {
  const mm_value *content = content_of(v), *output = mm_value_get(v, "output");
  return 1 + (content ? content->count : 0) + (output ? output->count : 0);
}

static bool read_call(mm_call *c, const mm_value *v, mm_chat_call *call, mm_err *err) {
  const mm_value *name = mm_value_get(v, "name"), *id;
  if (!name || name->type != MM_VALUE_STRING || !name->n) return mm_refuse(c, 400, "input", "input: a function_call has no name");
  if (!mm_field(c, v, "call_id", MM_VALUE_STRING, &id)) return false;
  *call = (mm_chat_call){.id = mm_str_of(id), .name = mm_str_of(name)};
  return mm_arguments_read(c, "input", mm_value_get(v, "arguments"), &call->arguments, err);
}

/* The texts of all items of reasoning are joined. */
static bool join(mm_call *c, const mm_chat_part *thought, size_t thoughts, mm_message *m, mm_err *err) {
  size_t n = 0;
  for (size_t i = 0; i < thoughts; i++) n += thought[i].text.n;
  char *joined = mm_arena_alloc(&c->arena, n + 1, err);
  if (!joined) return false;
  m->reasoning = (mm_str){joined, n};
  for (size_t i = 0; i < thoughts; joined += thought[i++].text.n) memcpy(joined, thought[i].text.p, thought[i].text.n);
  return true;
}

static bool refuse_type(mm_call *c, const mm_value *type) {
  return mm_refuse(c, 400, "input", "input: items of type \"%.60s\" are not served here", MM_SHOWN_VALUE(type));
}

/* One message of the assistant from items [v, end). */
static bool read_assistant(mm_call *c, const mm_value *v, const mm_value *end, mm_message *m, mm_err *err) {
  size_t items = 0, parts = 0;
  for (const mm_value *i = v; i != end; i = i->next, items++) parts += parts_of(i);
  mm_chat_part *part = mm_arena_alloc(&c->arena, parts * sizeof *part, err),
               *thought = mm_arena_alloc(&c->arena, parts * sizeof *thought, err);
  mm_chat_call *call = mm_arena_alloc(&c->arena, items * sizeof *call, err);
  size_t thoughts = 0;
  if (!part || !thought || !call) return false;
  *m = (mm_message){.role = MM_ROLE_ASSISTANT, .part = part, .list = true, .call = call};
  for (; v != end; v = v->next) {
    const mm_value *type = mm_value_get(v, "type");
    if (type && !mm_value_is(type, "message") && !mm_value_is(type, "function_call") && !mm_value_is(type, "reasoning"))
      return refuse_type(c, type);
    if (mm_value_is(type, "function_call")) {
      if (!read_call(c, v, &call[m->call_count++], err)) return false;
    } else if (!add_parts(c, content_of(v), mm_value_is(type, "reasoning") ? thought : part,
                          mm_value_is(type, "reasoning") ? &thoughts : &m->part_count)) {
      return false;
    }
  }
  return !thoughts || join(c, thought, thoughts, m, err);
}

static bool read_item(mm_call *c, const mm_value *v, mm_message *m, mm_err *err) {
  const mm_value *type = mm_value_get(v, "type"), *role = mm_value_get(v, "role"), *content = mm_value_get(v, "content"), *id;
  const bool output = mm_value_is(type, "function_call_output");
  mm_chat_part *part = mm_arena_alloc(&c->arena, parts_of(v) * sizeof *part, err);
  if (!part) return false;
  *m = (mm_message){.part = part};
  if (output) {
    m->role = MM_ROLE_TOOL;
    if (!mm_field(c, v, "call_id", MM_VALUE_STRING, &id)) return false;
    m->call_id = mm_str_of(id);
    content = mm_value_get(v, "output");
  } else if (type && !mm_value_is(type, "message")) {
    return refuse_type(c, type);
  } else if (mm_value_is(role, "user")) {
    m->role = MM_ROLE_USER;
  } else if (mm_value_is(role, "system") || mm_value_is(role, "developer")) {
    m->role = MM_ROLE_SYSTEM;
  } else {
    return mm_refuse(c, 400, "input", "input: found %.60s, expected a role: system, developer, user or assistant", MM_SHOWN_VALUE(role));
  }
  m->list = content && content->type == MM_VALUE_ARRAY;
  return add_parts(c, content, part, &m->part_count);
}

static bool read_input(mm_call *c, mm_conversation *out, mm_err *err) {
  const mm_value *input = mm_value_get(c->body, "input"), *instructions;
  if (!mm_field(c, c->body, "instructions", MM_VALUE_STRING, &instructions)) return false;
  const bool list = input && input->type == MM_VALUE_ARRAY;
  if (!list && (!input || input->type != MM_VALUE_STRING)) return mm_refuse(c, 400, "input", "input: expected a text or a list of items");
  mm_message *m = mm_arena_alloc(&c->arena, (input->count + 2) * sizeof *m, err);
  mm_chat_part *part = mm_arena_alloc(&c->arena, 2 * sizeof *part, err);
  size_t n = 0;
  if (!m || !part) return false;
  if (instructions) {
    part[0] = (mm_chat_part){.text = mm_str_of(instructions), .owner = MM_OWNER_USER};
    m[n++] = (mm_message){.role = MM_ROLE_SYSTEM, .part = &part[0], .part_count = 1};
  }
  if (!list) {
    part[1] = (mm_chat_part){.text = mm_str_of(input), .owner = MM_OWNER_USER};
    m[n++] = (mm_message){.role = MM_ROLE_USER, .part = &part[1], .part_count = 1};
  }
  for (const mm_value *v = list ? input->first : NULL; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type");
    const bool message = !type || mm_value_is(type, "message");
    if (message && !mm_message_check(c, v, "give items of the types reasoning and function_call")) return false;
  }
  for (const mm_value *v = list ? input->first : NULL, *end; v; v = end) {
    for (end = v->next; is_of_assistant(v) && end && is_of_assistant(end);) end = end->next;
    if (is_of_assistant(v) ? !read_assistant(c, v, end, &m[n++], err) : !read_item(c, v, &m[n++], err)) return false;
  }
  if (!n) return mm_refuse(c, 400, "input", "input: expected one item or more");
  out->message = m;
  out->message_count = n;
  out->add_generation_prompt = true;
  return true;
}

static bool read_choice(mm_call *c, mm_conversation *v, mm_tool_rules *r, mm_err *err) {
  const mm_value *choice;
  if (!mm_tool_word(c, v, r, &choice, err)) return false;
  return !choice || mm_tool_choose(c, v, r, mm_value_is(choice, "required"), mm_value_get(choice, "name"), "auto, none, required");
}

bool mm_responses_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err) {
  *out = (mm_conversation){0};
  return read_input(c, out, err) && mm_flat_tools(c, out, "parameters", err) && mm_template_kwargs(c, out) &&
         read_choice(c, out, rules, err);
}
