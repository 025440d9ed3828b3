/* Conversations of a file as token ids. */
#include "runtime/chat/transcripts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/system/file.h"
#include "runtime/chat/arguments.h"
#include "runtime/chat/prompt.h"

#define FILE_MAX (UINT64_C(1) << 30) /* bytes of the file */

typedef struct transcripts {
  const mm_chat_format *format;
  const mm_tokenizer *tokenizer;
  int32_t *id;
  size_t count, cap;
} transcripts;

static bool is_text(const mm_value *v) { return v && v->type == MM_VALUE_STRING; }

/* tool_calls as chat completions have them; NULL: none. The format says of what is no JSON object that it is none. */
static bool read_calls(mm_arena *a, const mm_value *calls, mm_message *out, mm_err *err) {
  mm_chat_call *call = mm_arena_alloc(a, (calls ? calls->count + 1 : 1) * sizeof *call, err);
  if (!call) return false;
  out->call = call;
  for (const mm_value *v = calls ? calls->first : NULL; v; v = v->next, call++, out->call_count++) {
    const mm_value *function = mm_value_get(v, "function"), *name = mm_value_get(function, "name"),
                   *arguments = mm_value_get(function, "arguments");
    if (!is_text(name) || !name->n) break;
    const bool object = arguments && arguments->type == MM_VALUE_OBJECT;
    *call = (mm_chat_call){mm_str_of(mm_value_get(v, "id")), mm_str_of(name),
                           object ? (mm_str){arguments->raw, arguments->raw_n} : mm_str_of(arguments)};
    if (arguments && !object && !is_text(arguments)) break;
  }
  return (calls ? calls->type == MM_VALUE_ARRAY && out->call_count == calls->count : true) ||
         mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "expected tool_calls of functions with a name and arguments");
}

static bool read_message(mm_arena *a, const mm_value *m, mm_message *out, mm_err *err) {
  static const char *const word[] = {
      [MM_ROLE_SYSTEM] = "system", [MM_ROLE_USER] = "user", [MM_ROLE_ASSISTANT] = "assistant", [MM_ROLE_TOOL] = "tool"};
  const mm_value *role = mm_value_get(m, "role"), *content = mm_value_get(m, "content"), *thoughts = mm_value_get(m, "reasoning_content"),
                 *calls = mm_value_get(m, "tool_calls");
  mm_chat_part *part = mm_arena_alloc(a, sizeof *part, err);
  size_t i = 0;
  if (!part) return false;
  while (i < sizeof word / sizeof *word && !mm_value_is(role, word[i])) i++;
  if (i == sizeof word / sizeof *word || (!is_text(content) && (content || !calls)))
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                   "expected messages with a role of system, user, assistant or tool and a content that is a text");
  if (mm_value_get(m, "reasoning_details") || mm_value_get(m, "function_call"))
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                   "found reasoning_details or a function_call in a message, expected reasoning_content and tool_calls");
  *part = (mm_chat_part){.text = mm_str_of(content), .owner = MM_OWNER_USER};
  *out = (mm_message){.role = (mm_role)i, .part = part, .part_count = content != NULL};
  if (i == MM_ROLE_TOOL) out->call_id = mm_str_of(mm_value_get(m, "tool_call_id"));
  if (i != MM_ROLE_ASSISTANT)
    return !calls || (calls->type == MM_VALUE_ARRAY && !calls->count) ||
           mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "found tool_calls in a message of the role %s", word[i]);
  if (!thoughts) thoughts = mm_value_get(m, "reasoning");
  if (thoughts && !is_text(thoughts))
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "found a reasoning that is %s, expected a text",
                   mm_value_word(thoughts));
  out->reasoning = mm_str_of(thoughts);
  return read_calls(a, calls, out, err);
}

/* The tools of a conversation, as chat completions have them; NULL: none. */
static bool read_tools(mm_arena *a, const mm_value *tools, mm_conversation *c, mm_err *err) {
  mm_chat_tool *tool = mm_arena_alloc(a, (tools ? tools->count + 1 : 1) * sizeof *tool, err);
  if (!tool) return false;
  c->tool = tool;
  for (const mm_value *v = tools ? tools->first : NULL; v; v = v->next) {
    const mm_value *type = mm_value_get(v, "type"), *of = mm_value_get(v, "function"), *function = of ? of : v,
                   *name = mm_value_get(function, "name"), *parameters = mm_value_get(function, "parameters");
    if ((type && !mm_value_is(type, "function")) || !is_text(name) || !name->n || (parameters && parameters->type != MM_VALUE_OBJECT))
      return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                     "tool %zu: expected a function with a name, and parameters of an object", c->tool_count);
    tool[c->tool_count++].json = (mm_str){v->raw, v->raw_n};
  }
  return !tools || tools->type == MM_VALUE_ARRAY || mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "expected a list of tools");
}

static bool add_ids(transcripts *x, const mm_prompt_tokens *t, mm_err *err) {
  if (!MM_GROW(x->id, &x->cap, x->count + t->count, err)) return false;
  memcpy(x->id + x->count, t->id, t->count * sizeof *t->id);
  x->count += t->count;
  return true;
}

const char *const mm_conversation_unread[] = {"system", "functions", "documents", "thinking", "chat_template", "chat_template_kwargs",
                                              NULL};

/* A likelihood without those keys is another conversation's. */
static bool check_keys(const mm_value *root, mm_err *err) {
  for (const char *const *key = mm_conversation_unread; *key; key++)
    if (mm_value_get(root, *key))
      return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "found %s, which is not read, next to the messages", *key);
  return true;
}

/* One conversation. */
static bool add_line(transcripts *x, mm_arena *a, const mm_value *root, mm_err *err) {
  const mm_value *list = root->type == MM_VALUE_ARRAY ? root : mm_value_get(root, "messages");
  const size_t n = list && list->type == MM_VALUE_ARRAY ? list->count : 0;
  if (!n && list && list->type == MM_VALUE_ARRAY)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "found an empty list of messages, expected a conversation");
  if (!n) return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "expected a list of messages, or an object with \"messages\"");
  mm_message *m = mm_arena_alloc(a, n * sizeof *m, err);
  mm_conversation c = {.message = m, .message_count = n};
  mm_prompt p = {0};
  mm_prompt_tokens tokens = {0};
  bool ok = m && check_keys(root, err) && read_tools(a, mm_value_get(root, "tools"), &c, err);
  for (const mm_value *v = list->first; ok && v; v = v->next) ok = read_message(a, v, m++, err);
  ok = ok && mm_chat_render(x->format, &c, &p, err) && mm_prompt_encode(&p, x->tokenizer, false, &tokens, err) && add_ids(x, &tokens, err);
  mm_prompt_close(&p);
  free(tokens.id);
  return ok;
}

int32_t *mm_text_ids(const mm_pack *pack, const char *path, size_t *count, mm_err *err) {
  size_t n = 0;
  int32_t *id = NULL;
  char *text = mm_file_slurp(path, FILE_MAX, &n, err);
  mm_tokenizer *t = text && mm_no_pointer(text, n, path, err) ? mm_tokenizer_of(pack, err) : NULL;
  bool ok = t && mm_tokenizer_encode(t, text, n, false, &id, count, err);
  mm_tokenizer_close(t);
  free(text);
  if (ok && *count == 0) mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found no text");
  if (ok && *count > 0) return id;
  free(id);
  return NULL;
}

int32_t *mm_transcripts_ids(const mm_pack *pack, const char *path, size_t *count, mm_err *err) {
  size_t n = 0, line = 0;
  mm_tokenizer *t = mm_tokenizer_of(pack, err);
  if (!t) return NULL;
  transcripts x = {.format = mm_chat_format_of_family(pack, err), .tokenizer = t};
  if (!x.format && err->status == MM_OK) x.format = mm_chat_format_of(pack, NULL, err);
  char *text = x.format ? mm_file_slurp(path, FILE_MAX, &n, err) : NULL;
  bool ok = text && mm_no_pointer(text, n, path, err);
  for (char *at = text, *end = text ? text + n : NULL, *next; ok && at < end; at = next) {
    char *newline = memchr(at, '\n', (size_t)(end - at));
    next = newline ? newline + 1 : end;
    line++;
    const size_t length = (size_t)((newline ? newline : end) - at);
    if (strspn(at, " \t\r") >= length) continue; /* up to its newline: what follows is another line's */
    mm_err reason = {0};
    const char *place = MM_FORMATTED(600, "%s: line %zu", path, line);
    mm_arena a = {0};
    const mm_value *root = mm_body_parse(&a, at, length, &reason);
    ok = (root && add_line(&x, &a, root, &reason)) ||
         mm_fail(err, reason.status, reason.code, mm_at(place, NULL), "%s", reason.text + strlen(reason.code) + 2); /* behind its code */
    mm_arena_close(&a);
  }
  free(text);
  mm_tokenizer_close(t);
  if (ok && !x.count) ok = mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found no conversation");
  *count = x.count;
  if (ok) return x.id;
  free(x.id);
  return NULL;
}
