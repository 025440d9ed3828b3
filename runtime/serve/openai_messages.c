/* messages, tools and what goes with them. */
#include "runtime/serve/openai_messages.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/chat/cut_arguments.h"
#include "runtime/chat/replay.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/reasoning_fields.h"

#define MESSAGES_MAX 65536
#define TOOLS_MAX    4096

bool mm_arguments_read(mm_call *c, const char *param, const mm_value *arguments, mm_str *text, mm_err *err) {
  mm_err wrong = {0};
  const bool object = arguments && arguments->type == MM_VALUE_OBJECT;
  if (arguments && !object && arguments->type != MM_VALUE_STRING)
    return mm_refuse(c, 400, param, "%s: the arguments of a call are %s", param, mm_value_word(arguments));
  *text = object ? (mm_str){arguments->raw, arguments->raw_n} : mm_str_of(arguments);
  size_t blank = 0;
  while (blank < text->n && text->p[blank] && strchr(" \n\r\t", text->p[blank])) blank++;
  if (blank == text->n) return *text = (mm_str){0}, true;
  const mm_value *v = mm_body_parse(&c->arena, text->p, text->n, &wrong);
  if (!v && wrong.status != MM_BAD_INPUT) return *err = wrong, false;
  mm_err cut = {0};
  if (!v && mm_arguments_close(&c->arena, *text, text, &cut)) v = mm_body_parse(&c->arena, text->p, text->n, &cut); /* a limit cut it off */
  if (!v && cut.status && cut.status != MM_BAD_INPUT) return *err = cut, false;
  static const char body[] = "E_JSON: body: "; /* the arguments are a text of their own */
  const char *reason = wrong.text + (strncmp(wrong.text, body, sizeof body - 1) == 0 ? sizeof body - 1 : 0);
  if (!v) return mm_refuse(c, 400, param, "%s: the arguments of a call: %s", param, reason);
  if (v->type == MM_VALUE_NULL) return *text = (mm_str){0}, true;
  if (v->type != MM_VALUE_OBJECT) return mm_refuse(c, 400, param, "%s: the arguments of a call are not a JSON object", param);
  return true;
}

/* ---- Content ---- */

static bool part_text(mm_call *c, const mm_value *v, mm_chat_part *out) {
  static const char *const types[] = {"text", "input_text", "output_text", "refusal"};
  *out = (mm_chat_part){.owner = MM_OWNER_USER};
  if (v->type == MM_VALUE_STRING) return out->text = mm_str_of(v), true;
  const mm_value *type = mm_value_get(v, "type"), *text = mm_value_get(v, "text"), *name;
  if (v->type != MM_VALUE_OBJECT) return mm_refuse(c, 400, "messages", "messages: found %s as a part of content", mm_value_word(v));
  if (mm_value_is(type, "refusal")) text = mm_value_get(v, "refusal");
  bool known = !type;
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) known |= mm_value_is(type, types[i]);
  if (!known) return mm_refuse(c, 400, "messages", "messages: content of type \"%.60s\" is not served, text is", MM_SHOWN_VALUE(type));
  if (!text || text->type != MM_VALUE_STRING) return mm_refuse(c, 400, "messages", "messages: a part of content has no text");
  if (!mm_field(c, v, "name", MM_VALUE_STRING, &name)) return false;
  out->text = mm_str_of(text);
  out->name = mm_str_of(name);
  return true;
}

static bool read_content(mm_call *c, const mm_value *content, mm_message *m, mm_err *err) {
  if (!content) return true;
  m->list = content->type == MM_VALUE_ARRAY;
  const size_t count = m->list ? content->count : 1;
  mm_chat_part *part = mm_arena_alloc(&c->arena, (count + 1) * sizeof *part, err);
  if (!part) return false;
  m->part = part;
  m->part_count = count;
  if (content->type == MM_VALUE_STRING) return part_text(c, content, part);
  if (!m->list) return mm_refuse(c, 400, "messages", "messages: found %s as content", mm_value_word(content));
  for (const mm_value *v = content->first; v; v = v->next)
    if (!part_text(c, v, part++)) return false;
  return true;
}

/* ---- Messages ---- */

static bool read_calls(mm_call *c, const mm_value *calls, mm_message *m, mm_err *err) {
  if (!calls) return true;
  if (calls->type != MM_VALUE_ARRAY) return mm_refuse(c, 400, "messages", "messages: tool_calls is %s", mm_value_word(calls));
  mm_chat_call *call = mm_arena_alloc(&c->arena, (calls->count + 1) * sizeof *call, err);
  if (!call) return false;
  m->call = call;
  m->call_count = calls->count;
  for (const mm_value *v = calls->first; v; v = v->next, call++) {
    const mm_value *function = mm_value_get(v, "function"), *name = mm_value_get(function, "name"), *type = mm_value_get(v, "type"), *id;
    if (type && !mm_value_is(type, "function"))
      return mm_refuse(c, 400, "messages", "messages: a call of type \"%.60s\" is not served, function is", MM_SHOWN_VALUE(type));
    if (!name || name->type != MM_VALUE_STRING || !name->n)
      return mm_refuse(c, 400, "messages", "messages: a call has no function with a name");
    if (!mm_field(c, v, "id", MM_VALUE_STRING, &id)) return false;
    *call = (mm_chat_call){.id = mm_str_of(id), .name = mm_str_of(name)};
    if (!mm_arguments_read(c, "messages", mm_value_get(function, "arguments"), &call->arguments, err)) return false;
  }
  return true;
}

static bool read_role(mm_call *c, const mm_value *v, mm_role *out) {
  static const struct {
    const char *word;
    mm_role role;
  } roles[] = {{"system", MM_ROLE_SYSTEM}, {"developer", MM_ROLE_SYSTEM}, {"user", MM_ROLE_USER}, {"assistant", MM_ROLE_ASSISTANT},
               {"tool", MM_ROLE_TOOL},     {"function", MM_ROLE_TOOL},    {"root", MM_ROLE_ROOT}};
  const mm_value *role = mm_value_get(v, "role");
  for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
    if (mm_value_is(role, roles[i].word)) return *out = roles[i].role, true;
  return mm_refuse(c, 400, "messages", "messages: found %.60s, expected a role: system, developer, user, assistant or tool",
                   MM_SHOWN_VALUE(role));
}

/* Lists of reasoning, and the keys of their texts. */
typedef struct thoughts {
  const char *list, *key, *other;
} thoughts;

/* The text of a part; NULL: it has none, as what only its maker can read. */
static bool part_of_thoughts(mm_call *c, const thoughts *t, const mm_value *part, const mm_value **text) {
  *text = mm_value_get(part, t->key);
  if (!*text) *text = mm_value_get(part, t->other);
  if (*text ? (*text)->type == MM_VALUE_STRING : part->type == MM_VALUE_OBJECT && mm_value_get(part, "type")) return true;
  return mm_refuse(c, 400, "messages", "messages: a part of %s has no text", t->list);
}

/* The reasoning as MiniMax's own server and OpenRouter have it, or LiteLLM: a list of objects with a text, which are joined. */
static bool read_thoughts(mm_call *c, const mm_value *v, const thoughts *t, mm_message *m, mm_err *err) {
  const mm_value *list, *text;
  size_t n = 0;
  if (!mm_field(c, v, t->list, MM_VALUE_ARRAY, &list)) return false;
  if (!list || m->reasoning.n) return true;
  for (const mm_value *d = list->first; d; d = d->next) {
    if (!part_of_thoughts(c, t, d, &text)) return false;
    n += text ? text->n : 0;
  }
  char *joined = mm_arena_alloc(&c->arena, n + 1, err);
  if (!joined) return false;
  m->reasoning = (mm_str){joined, n};
  for (const mm_value *d = list->first; d; d = d->next) {
    if (!part_of_thoughts(c, t, d, &text)) return false;
    if (text && text->n) memcpy(joined, text->text, text->n), joined += text->n;
  }
  return true;
}

/* What else a message of the assistant may have said. */
static bool read_other(mm_call *c, const mm_value *v, mm_message *m, mm_err *err) {
  static const char *const unserved[] = {"function_call", "audio"};
  static const thoughts lists[] = {{"reasoning_details", "text", "summary"}, {"thinking_blocks", "thinking", "thinking"}};
  for (size_t i = 0; i < 2; i++)
    if (mm_value_get(v, unserved[i]))
      return mm_refuse(c, 400, "messages", "messages: %s of a message is not served%s", unserved[i], i ? "" : ", tool_calls are");
  const mm_value *refusal, *reasoning, *other;
  if (!mm_field(c, v, "refusal", MM_VALUE_STRING, &refusal) || !mm_field(c, v, "reasoning_content", MM_VALUE_STRING, &reasoning) ||
      !mm_field(c, v, "reasoning", MM_VALUE_STRING, &other))
    return false;
  m->reasoning = mm_str_of(reasoning ? reasoning : other);
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
    if (!read_thoughts(c, v, &lists[i], m, err)) return false;
  return !refusal || m->part_count || read_content(c, refusal, m, err);
}

bool mm_message_check(mm_call *c, const mm_value *v, const char *instead) {
  static const char *const fields[] = {
      "tool_calls",      "function_call", "audio",  "reasoning_content", "reasoning", "reasoning_details", "refusal",
      "thinking_blocks", "tools",         "images", "documents"};
  static const char *const other[] = {"give tools in the request", "texts in its content are", "texts in its content are"};
  const char *field = c->api->prompt ? c->api->prompt : "messages";
  for (const mm_value *m = v->type == MM_VALUE_OBJECT ? v->first : NULL; m; m = m->next) {
    const bool some = m->type == MM_VALUE_STRING ? m->n > 0 : m->type >= MM_VALUE_ARRAY && m->count;
    for (size_t i = 0; some && i < sizeof fields / sizeof *fields; i++)
      if (mm_value_key_is(m, fields[i]))
        return mm_refuse(c, 400, field, "%s: %s is no field of such a message here, %s", field, fields[i], i < 8 ? instead : other[i - 8]);
  }
  return true;
}

/* Fields by which other servers let the reply go on with a message. */
static const char *const goes_on[] = {"prefix", "partial", "continue_final_message"};

static bool read_message(mm_call *c, const mm_value *v, mm_message *m, mm_err *err) {
  if (v->type != MM_VALUE_OBJECT) return mm_refuse(c, 400, "messages", "messages: found %s, expected an object", mm_value_word(v));
  if (!read_role(c, v, &m->role) || !read_content(c, mm_value_get(v, "content"), m, err)) return false;
  const mm_value *id = NULL, *tools;
  if (!mm_field(c, v, "tools", MM_VALUE_ARRAY, &tools)) return false;
  if (tools && tools->count) return mm_refuse(c, 400, "messages", "messages: tools of a message are not served, those of the request are");
  for (size_t i = 0; i < sizeof goes_on / sizeof *goes_on; i++) {
    const mm_value *on = mm_value_get(v, goes_on[i]);
    if (on && on->type == MM_VALUE_BOOL && on->truth)
      return mm_refuse(c, 400, "messages", "messages: %s of a message is not served, continue_final_message of the request is", goes_on[i]);
  }
  if (m->role == MM_ROLE_TOOL && !mm_field(c, v, "tool_call_id", MM_VALUE_STRING, &id)) return false;
  m->call_id = mm_str_of(id);
  if (m->role != MM_ROLE_ASSISTANT) return mm_message_check(c, v, "one of the assistant has it");
  return read_other(c, v, m, err) && read_calls(c, mm_value_get(v, "tool_calls"), m, err);
}

static bool read_messages(mm_call *c, mm_conversation *out, mm_err *err) {
  const mm_value *list;
  if (!mm_field(c, c->body, "messages", MM_VALUE_ARRAY, &list)) return false;
  if (!list || !list->count) return mm_refuse(c, 400, "messages", "messages: expected one message or more");
  if (list->count > MESSAGES_MAX) return mm_refuse(c, 400, "messages", "messages: more than %d", MESSAGES_MAX);
  mm_message *m = mm_arena_alloc(&c->arena, list->count * sizeof *m, err);
  if (!m) return false;
  out->message = m;
  out->message_count = list->count;
  for (const mm_value *v = list->first; v; v = v->next, m++) {
    if (!read_message(c, v, m, err)) return false;
    if (m->role == MM_ROLE_ROOT && m != out->message) return mm_refuse(c, 400, "messages", "messages: a root message is not the first one");
  }
  if (c->server->compat == MM_COMPAT_LLAMA && list->count > 1 && m[-1].role == MM_ROLE_ASSISTANT && m[-2].role == MM_ROLE_ASSISTANT)
    return mm_refuse(c, 400, "messages", "messages: the last two are of the assistant, expected one at most");
  return true;
}

/* ---- Tools ---- */

mm_str mm_tool_name(mm_call *c, const mm_chat_tool *t) {
  const mm_value *v = mm_body_parse(&c->arena, t->json.p, t->json.n, MM_IGNORED), *function = mm_value_get(v, "function");
  return mm_str_of(mm_value_get(function ? function : v, "name"));
}

/* True if one of the tools has this name. */
static bool tools_have(const mm_conversation *v, mm_call *c, mm_str name) {
  for (size_t i = 0; i < v->tool_count; i++) {
    const mm_str own = mm_tool_name(c, &v->tool[i]);
    if (own.n == name.n && memcmp(own.p, name.p, name.n) == 0) return true;
  }
  return false;
}

/* A tool, by its name and by what the prompt says of it. */
typedef struct named {
  mm_str name, json;
} named;

static int compare(mm_str a, mm_str b) {
  const int order = memcmp(a.p, b.p, mm_min(a.n, b.n));
  return order ? order : (a.n > b.n) - (a.n < b.n);
}

static int by_name(const void *a, const void *b) {
  const named *x = a, *y = b;
  const int order = compare(x->name, y->name);
  return order ? order : compare(x->json, y->json);
}

static bool put_parsed(mm_call *c, mm_str json, mm_text *out, mm_err *err) {
  const mm_value *v = mm_body_parse(&c->arena, json.p, json.n, err);
  return v && ((mm_value_put_parsed(out, &c->arena, v) && !out->failed) || mm_fail_memory(err, json.n));
}

static bool say_the_same(mm_call *c, mm_str a, mm_str b, bool *same, mm_err *err) {
  mm_text x = {0}, y = {0};
  const bool ok = put_parsed(c, a, &x, err) && put_parsed(c, b, &y, err);
  *same = ok && x.n == y.n && memcmp(x.p, y.p, x.n) == 0;
  free(x.p);
  free(y.p);
  return ok;
}

/* A call of a name is one of one tool: two of a name are the same tool, whatever their spacing and the order of keys. Sorts them. */
static bool refuse_two_of_a_name(mm_call *c, named *tool, size_t count, mm_err *err) {
  qsort(tool, count, sizeof *tool, by_name);
  for (size_t i = 1; i < count; i++) {
    bool same = true;
    if (!mm_str_equal(tool[i - 1].name, tool[i].name) || mm_str_equal(tool[i - 1].json, tool[i].json)) continue;
    if (!say_the_same(c, tool[i - 1].json, tool[i].json, &same, err)) return false;
    if (!same)
      return mm_refuse(c, 400, "tools", "tools: two of the name \"%s\" differ", MM_ESCAPED_BYTES(128, tool[i].name.p, tool[i].name.n));
  }
  return true;
}

/* The field in which a schema stands as in Anthropic's messages (where that is elsewhere) or in MCP, so that it would not be seen. */
static const char *schema_elsewhere(const mm_value *v, bool anthropic) {
  if (anthropic && mm_value_get(v, "input_schema")) return "input_schema";
  return mm_value_get(v, "inputSchema") ? "inputSchema" : NULL;
}

/* `strict` of a function, which some write next to it, as in responses. */
static bool read_strict(mm_call *c, const mm_value *tool, const mm_value *function, bool *strict) {
  bool outer = false;
  if (!mm_field_bool(c, function, "strict", strict) || !mm_field_bool(c, tool, "strict", &outer)) return false;
  if (mm_value_get(tool, "strict") && mm_value_get(function, "strict") && outer != *strict)
    return mm_refuse(c, 400, "tools", "tools: strict contradicts function.strict");
  *strict |= outer;
  return true;
}

static bool read_tools(mm_call *c, mm_conversation *out, mm_err *err) {
  const mm_value *list;
  if (!mm_field(c, c->body, "tools", MM_VALUE_ARRAY, &list)) return false;
  if (!list || !list->count) return true;
  if (list->count > TOOLS_MAX) return mm_refuse(c, 400, "tools", "tools: more than %d", TOOLS_MAX);
  mm_chat_tool *t = mm_arena_alloc(&c->arena, list->count * sizeof *t, err);
  named *all = mm_arena_alloc(&c->arena, list->count * sizeof *all, err), *one = all;
  if (!t || !all) return false;
  out->tool = t;
  out->tool_count = list->count;
  for (const mm_value *v = list->first; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type"), *function = mm_value_get(v, "function"), *name = mm_value_get(function, "name"),
                   *parameters = mm_value_get(function, "parameters"), *about;
    if (type && !mm_value_is(type, "function"))
      return mm_refuse(c, 400, "tools", "tools: type \"%.60s\" is not served, function is", MM_SHOWN_VALUE(type));
    if (!name || name->type != MM_VALUE_STRING || !name->n) return mm_refuse(c, 400, "tools", "tools: a function has no name");
    const char *misplaced = mm_value_get(v, "parameters") ? "parameters" : schema_elsewhere(v, true);
    if (!misplaced) misplaced = schema_elsewhere(function, true);
    if (misplaced) return mm_refuse(c, 400, "tools", "tools: found %s, expected function.parameters", misplaced);
    if (parameters && parameters->type != MM_VALUE_OBJECT)
      return mm_refuse(c, 400, "tools", "tools: the parameters of a function are %s, expected an object", mm_value_word(parameters));
    *t = (mm_chat_tool){.json = {v->raw, v->raw_n}};
    *one++ = (named){mm_str_of(name), {function->raw, function->raw_n}};
    if (!mm_field(c, function, "description", MM_VALUE_STRING, &about) || !read_strict(c, v, function, &t++->strict)) return false;
  }
  return refuse_two_of_a_name(c, all, list->count, err);
}

/* The member of that key, which may be null. */
static const mm_value *member(const mm_value *object, const char *key) {
  const mm_value *v = object->type == MM_VALUE_OBJECT ? object->first : NULL;
  while (v && !mm_value_key_is(v, key)) v = v->next;
  return v;
}

bool mm_tool_is_hosted(const mm_value *tool) {
  static const char *const types[] = {"apply_patch",
                                      "code_interpreter",
                                      "computer",
                                      "computer_use_preview",
                                      "custom",
                                      "file_search",
                                      "image_generation",
                                      "local_shell",
                                      "mcp",
                                      "namespace",
                                      "programmatic_tool_calling",
                                      "shell",
                                      "tool_search",
                                      "web_search",
                                      "web_search_2025_08_26",
                                      "web_search_preview",
                                      "web_search_preview_2025_03_11"};
  const mm_value *type = mm_value_get(tool, "type");
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (mm_value_is(type, types[i])) return true;
  return false;
}

/* As it stands in the request, for a format. */
#define RAW(v) (v) ? (int)(v)->raw_n : 0, (v) ? (v)->raw : ""

/* The tool's text is what chat's form of the same tool would be: all that it may hold, null too. */
bool mm_flat_tools(mm_call *c, mm_conversation *out, const char *schema, mm_err *err) {
  const mm_value *list;
  const bool anthropic = c->api->anthropic;
  if (!mm_field(c, c->body, "tools", MM_VALUE_ARRAY, &list)) return false;
  if (!list || !list->count) return true;
  if (list->count > TOOLS_MAX) return mm_refuse(c, 400, "tools", "tools: more than %d", TOOLS_MAX);
  mm_chat_tool *t = mm_arena_alloc(&c->arena, list->count * sizeof *t, err);
  named *all = mm_arena_alloc(&c->arena, list->count * sizeof *all, err);
  if (!t || !all) return false;
  for (const mm_value *v = list->first; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type"), *name = mm_value_get(v, "name"), *parameters = mm_value_get(v, schema), *about;
    if (!anthropic && mm_tool_is_hosted(v)) continue;
    if (anthropic ? type && !mm_value_is(type, "custom") : !mm_value_is(type, "function"))
      return mm_refuse(c, 400, "tools", "tools: type \"%.60s\" is not served here", MM_SHOWN_VALUE(type));
    if (!name || name->type != MM_VALUE_STRING || !name->n)
      return mm_refuse(c, 400, "tools", "tools: a %s has no name", anthropic ? "tool" : "function");
    const char *misplaced = mm_value_get(v, "function") ? "function" : schema_elsewhere(v, !anthropic);
    if (!misplaced && anthropic && mm_value_get(v, "parameters")) misplaced = "parameters";
    if (misplaced) return mm_refuse(c, 400, "tools", "tools: found %s, expected %s", misplaced, schema);
    if (parameters && parameters->type != MM_VALUE_OBJECT)
      return mm_refuse(c, 400, "tools", anthropic ? "tools: an input_schema is %s" : "tools: parameters are %s", mm_value_word(parameters));
    if (!mm_field(c, v, "description", MM_VALUE_STRING, &about)) return false;
    const mm_value *shown[] = {member(v, "description"), member(v, schema), member(v, "strict")};
    char *json = mm_arena_printf(&c->arena, err, "{\"type\": \"function\", \"function\": {\"name\": %.*s%s%.*s%s%.*s%s%.*s}}", RAW(name),
                                 shown[0] ? ", \"description\": " : "", RAW(shown[0]), shown[1] ? ", \"parameters\": " : "", RAW(shown[1]),
                                 shown[2] ? ", \"strict\": " : "", RAW(shown[2]));
    if (!json) return false;
    t[out->tool_count] = (mm_chat_tool){.json = {json, strlen(json)}};
    all[out->tool_count] = (named){mm_str_of(name), t[out->tool_count].json};
    if (!mm_field_bool(c, v, "strict", &t[out->tool_count++].strict)) return false;
  }
  out->tool = t;
  return refuse_two_of_a_name(c, all, out->tool_count, err);
}

/* Leaves the tools that the list names, each as in `tools`, and no others. */
static bool allow_tools(mm_call *c, mm_conversation *v, const mm_value *list, mm_err *err) {
  mm_chat_tool *kept = mm_arena_alloc(&c->arena, (v->tool_count + 1) * sizeof *kept, err);
  mm_str *own = mm_arena_alloc(&c->arena, (v->tool_count + 1) * sizeof *own, err);
  bool *allowed = mm_arena_alloc(&c->arena, v->tool_count + 1, err);
  size_t n = 0;
  if (!kept || !own || !allowed) return false;
  for (size_t i = 0; i < v->tool_count; i++) own[i] = mm_tool_name(c, &v->tool[i]), allowed[i] = false;
  for (const mm_value *a = list->first; a; a = a->next) {
    const mm_value *type = mm_value_get(a, "type"), *function = mm_value_get(a, "function"),
                   *name = mm_value_get(function ? function : a, "name");
    bool found = false;
    if (!mm_value_is(type, "function"))
      return mm_refuse(c, 400, "tool_choice", "tool_choice: type \"%.60s\" is not served, function is", MM_SHOWN_VALUE(type));
    for (size_t i = 0; i < v->tool_count; i++)
      if (name && name->type == MM_VALUE_STRING && mm_str_equal(own[i], mm_str_of(name))) allowed[i] = found = true;
    if (!found) return mm_refuse(c, 400, "tool_choice", "tool_choice: there is no tool \"%.100s\"", MM_SHOWN_VALUE(name));
  }
  for (size_t i = 0; i < v->tool_count; i++)
    if (allowed[i]) kept[n++] = v->tool[i];
  v->tool = kept;
  v->tool_count = n;
  return true;
}

/* {"mode": …, "tools": […]}: the mode is a choice, of these tools. */
static bool read_allowed(mm_call *c, mm_conversation *v, const mm_value *choice, mm_tool_rules *r, mm_err *err) {
  const mm_value *nested = mm_value_get(choice, "allowed_tools"), *of = nested ? nested : choice, *mode = mm_value_get(of, "mode"),
                 *list = mm_value_get(of, "tools");
  if (!list || list->type != MM_VALUE_ARRAY || !list->count)
    return mm_refuse(c, 400, "tool_choice", "tool_choice: allowed_tools has no list of tools");
  if (!mm_value_is(mode, "auto") && !mm_value_is(mode, "required"))
    return mm_refuse(c, 400, "tool_choice", "tool_choice: found the mode %.60s, expected auto or required", MM_SHOWN_VALUE(mode));
  if (list->count > TOOLS_MAX) return mm_refuse(c, 400, "tool_choice", "tool_choice: more than %d tools", TOOLS_MAX);
  if (mm_value_is(mode, "required")) r->choice = MM_TOOLS_REQUIRED;
  return allow_tools(c, v, list, err);
}

bool mm_tool_word(mm_call *c, mm_conversation *v, mm_tool_rules *r, const mm_value **other, mm_err *err) {
  const mm_value *choice = mm_value_get(c->body, "tool_choice");
  bool parallel = true;
  *other = NULL;
  if (!mm_field_bool(c, c->body, "parallel_tool_calls", &parallel)) return false;
  *r = (mm_tool_rules){.one_call = !parallel};
  if (!choice || mm_value_is(choice, "auto")) return true;
  if (mm_value_is(choice, "none")) {
    r->choice = MM_TOOLS_NONE;
    v->tool_count = 0;
    return true;
  }
  const mm_value *type = mm_value_get(choice, "type");
  if (mm_value_is(type, "allowed_tools")) return read_allowed(c, v, choice, r, err);
  if (type && !mm_value_is(type, "function"))
    return mm_refuse(c, 400, "tool_choice", "tool_choice: type \"%.60s\" is not served, function is", MM_SHOWN_VALUE(type));
  *other = choice;
  return true;
}

bool mm_tool_choose(mm_call *c, const mm_conversation *v, mm_tool_rules *r, bool required, const mm_value *name, const char *others) {
  if (!v->tool_count) return mm_refuse(c, 400, "tool_choice", "tool_choice: there are no tools");
  r->choice = required ? MM_TOOLS_REQUIRED : MM_TOOLS_NAMED;
  if (required) return true;
  r->name = mm_str_of(name);
  if (!r->name.n) return mm_refuse(c, 400, "tool_choice", "tool_choice: expected %s or the name of a tool", others);
  return tools_have(v, c, r->name) || mm_refuse(c, 400, "tool_choice", "tool_choice: there is no tool \"%.100s\"", r->name.p);
}

static bool read_choice(mm_call *c, mm_conversation *v, mm_tool_rules *r, mm_err *err) {
  const mm_value *choice;
  if (!mm_tool_word(c, v, r, &choice, err)) return false;
  return !choice || mm_tool_choose(c, v, r, mm_value_is(choice, "required"), mm_value_get(mm_value_get(choice, "function"), "name"),
                                   "auto, none, required");
}

/* ---- What templates take ---- */

/* Variables of the templates that are fields of the request here. */
static bool refuse_variables(mm_call *c, const mm_value *kwargs) {
  static const char *const variables[] = {
      "messages", "tools", "custom_tools", "documents", "add_generation_prompt", "continue_final_message"};
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
    if (mm_value_get(kwargs, variables[i]))
      return mm_refuse(c, 400, "chat_template_kwargs", "chat_template_kwargs.%s: give it as a field of the request", variables[i]);
  return true;
}

bool mm_template_kwargs(mm_call *c, mm_conversation *out) {
  const mm_value *kwargs, *identity, *date, *location;
  if (!mm_field(c, c->body, "chat_template_kwargs", MM_VALUE_OBJECT, &kwargs) || !refuse_variables(c, kwargs) ||
      !mm_reasoning_read(c, out) || !mm_field(c, kwargs, "model_identity", MM_VALUE_STRING, &identity) ||
      !mm_field(c, kwargs, "current_date", MM_VALUE_STRING, &date) || !mm_field(c, kwargs, "current_location", MM_VALUE_STRING, &location))
    return false;
  out->identity = mm_str_of(identity);
  out->current_date = mm_str_of(date);
  out->current_location = mm_str_of(location);
  return true;
}

static bool read_template(mm_call *c, mm_conversation *out) {
  bool generation = true;
  if (!mm_template_kwargs(c, out) || !mm_field_bool(c, c->body, "add_generation_prompt", &generation) ||
      !mm_field_bool(c, c->body, "continue_final_message", &out->continue_final))
    return false;
  if (out->continue_final && generation && mm_value_get(c->body, "add_generation_prompt"))
    return mm_refuse(c, 400, "continue_final_message", "continue_final_message and add_generation_prompt exclude each other");
  out->add_generation_prompt = !out->continue_final;
  if (!generation && !out->continue_final) out->add_generation_prompt = false;
  return true;
}

bool mm_openai_conversation(mm_call *c, mm_conversation *out, mm_tool_rules *rules, mm_err *err) {
  *out = (mm_conversation){0};
  return read_messages(c, out, err) && read_tools(c, out, err) && read_choice(c, out, rules, err) && read_template(c, out);
}
