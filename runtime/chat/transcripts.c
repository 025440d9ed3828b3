/* Conversations of a file as token ids. */
#include "runtime/chat/transcripts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"
#include "formats/system/file.h"
#include "runtime/chat/prompt.h"

#define FILE_MAX (UINT64_C(1) << 30) /* bytes of the file */

typedef struct transcripts {
  const mm_chat_format *format;
  const mm_tokenizer *tokenizer;
  int32_t *id;
  size_t count, cap;
} transcripts;

static bool read_message(const mm_json *m, mm_message *out, mm_chat_part *part, mm_err *err) {
  static const char *const word[] = {
      [MM_ROLE_SYSTEM] = "system", [MM_ROLE_USER] = "user", [MM_ROLE_ASSISTANT] = "assistant", [MM_ROLE_TOOL] = "tool"};
  const mm_json *role = mm_json_get(m, "role"), *content = mm_json_get(m, "content"), *why = mm_json_get(m, "reasoning_content");
  size_t i = 0;
  if (mm_json_type_of(role) == MM_JSON_STR)
    while (i < sizeof word / sizeof *word && strcmp(word[i], mm_json_str(role)) != 0) i++;
  if (mm_json_type_of(role) != MM_JSON_STR || i == sizeof word / sizeof *word || mm_json_type_of(content) != MM_JSON_STR)
    return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL),
                   "expected messages with a role of system, user, assistant or tool and a content that is a text");
  *part = (mm_chat_part){.text = {mm_json_str(content), mm_json_str_len(content)}, .owner = MM_OWNER_USER};
  *out = (mm_message){.role = (mm_role)i, .part = part, .part_count = 1};
  if (i == MM_ROLE_ASSISTANT && mm_json_type_of(why) == MM_JSON_STR) out->reasoning = (mm_str){mm_json_str(why), mm_json_str_len(why)};
  return true;
}

static bool add_ids(transcripts *x, const mm_prompt_tokens *t, mm_err *err) {
  if (!MM_GROW(x->id, &x->cap, x->count + t->count, err)) return false;
  memcpy(x->id + x->count, t->id, t->count * sizeof *t->id);
  x->count += t->count;
  return true;
}

/* One conversation. */
static bool add_line(transcripts *x, const mm_json *root, mm_err *err) {
  const mm_json *list = mm_json_type_of(root) == MM_JSON_ARR ? root : mm_json_get(root, "messages");
  const size_t n = mm_json_type_of(list) == MM_JSON_ARR ? mm_json_size(list) : 0;
  if (!n) return mm_fail(err, MM_BAD_INPUT, "E_CHAT", mm_at(NULL, NULL), "expected a list of messages, or an object with \"messages\"");
  mm_message *m = mm_calloc(n, sizeof *m, err);
  mm_chat_part *part = mm_calloc(n, sizeof *part, err);
  mm_prompt p = {0};
  mm_prompt_tokens tokens = {0};
  bool ok = m && part;
  for (size_t i = 0; ok && i < n; i++) ok = read_message(mm_json_at(list, i), &m[i], &part[i], err);
  const mm_conversation c = {.message = m, .message_count = n};
  ok = ok && mm_chat_render(x->format, &c, &p, err) && mm_prompt_encode(&p, x->tokenizer, false, &tokens, err) && add_ids(x, &tokens, err);
  mm_prompt_close(&p);
  MM_FREE(m, part, tokens.id);
  return ok;
}

int32_t *mm_text_ids(const mm_pack *pack, const char *path, size_t *count, mm_err *err) {
  size_t n = 0;
  int32_t *id = NULL;
  char *text = mm_file_slurp(path, FILE_MAX, &n, err);
  mm_tokenizer *t = text ? mm_tokenizer_of(pack, err) : NULL;
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
  bool ok = text;
  for (char *at = text, *end = text ? text + n : NULL, *next; ok && at < end; at = next) {
    char *newline = memchr(at, '\n', (size_t)(end - at));
    next = newline ? newline + 1 : end;
    line++;
    const size_t length = (size_t)((newline ? newline : end) - at);
    if (strspn(at, " \t\r\n") >= length) continue;
    char place[600];
    mm_err why = {0};
    snprintf(place, sizeof place, "%s: line %zu", path, line);
    mm_json *root = mm_json_parse(at, length, place, err);
    ok = root && (add_line(&x, root, &why) ||
                  mm_fail(err, why.status, why.code, mm_at(place, NULL), "%s", why.text + strlen(why.code) + 2)); /* behind its code */
    mm_json_free(root);
  }
  free(text);
  mm_tokenizer_close(t);
  if (ok && !x.count) ok = mm_fail(err, MM_BAD_INPUT, "E_IDS", mm_at(path, NULL), "found no conversation");
  *count = x.count;
  if (ok) return x.id;
  free(x.id);
  return NULL;
}
