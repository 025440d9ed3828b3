/* Tokens of texts and of conversations, and texts of tokens. */
#include <stdlib.h>

#include "runtime/serve/anthropic_messages.h"
#include "runtime/serve/apis.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/responses_input.h"
#include "runtime/serve/turn.h"

/* ---- Texts ---- */

/* A field of other servers' for ids of something else. */
static bool plain(mm_call *c) {
  const mm_value *v = mm_value_get(c->body, "skip_special_tokens");
  return !v || (v->type == MM_VALUE_BOOL && !v->truth) || mm_refuse(c, 400, "skip_special_tokens", "skip_special_tokens: not served here");
}

/* vLLM's form of a token: its entry in the vocabulary, where a character stands for each byte; special tokens are their text. */
static void put_entry(const mm_call *c, int32_t id, mm_text *out) {
  size_t n = 0;
  const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, id, &n);
  mm_text entry = {0};
  if (mm_tokenizer_is_special(c->server->tokenizer, id)) mm_text_add(&entry, bytes, n), n = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t x = mm_byte_character((uint8_t)bytes[i]); /* below U+0200 */
    const char two[] = {(char)(0xc0 | x >> 6), (char)(0x80 | (x & 0x3f))}, one = (char)x;
    mm_text_add(&entry, x < 0x80 ? &one : two, x < 0x80 ? 1 : 2);
  }
  mm_text_quote(out, entry.p ? entry.p : "", entry.n);
  out->failed |= entry.failed;
  free(entry.p);
}

static bool is_utf8(const char *bytes, size_t n) {
  for (size_t i = 0, len; i < n; i += len)
    if (!(len = (uint8_t)bytes[i] < 0x80 ? 1 : mm_utf8_len(bytes + i, n - i))) return false;
  return true;
}

/* llama.cpp's form of a token: the bytes of one that is no UTF-8 by itself are numbers. */
static void put_piece(const mm_call *c, int32_t id, mm_text *out) {
  size_t n = 0;
  const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, id, &n);
  mm_text_printf(out, "{\"id\":%d,\"piece\":", id);
  if (!bytes || is_utf8(bytes, n)) {
    mm_text_quote(out, bytes ? bytes : "", n);
  } else {
    for (size_t i = 0; i < n; i++) mm_text_printf(out, "%c%u", i ? ',' : '[', (unsigned)(uint8_t)bytes[i]);
    mm_text_put(out, "]");
  }
  mm_text_put(out, "}");
}

/* The text of the request, or its conversation as chat completions would continue it. The ids are the caller's to free. */
static bool encode(mm_call *c, int32_t **ids, size_t *n, mm_err *err) {
  const mm_value *text;
  bool special = false, in_reasoning;
  mm_conversation v;
  mm_tool_rules rules;
  mm_prompt_tokens p = {0};
  if (!mm_field(c, c->body, "prompt", MM_VALUE_STRING, &text) || !mm_field_bool(c, c->body, "parse_special", &special)) return false;
  if (text && mm_value_get(c->body, "content")) return mm_refuse(c, 400, "content", "content: not next to prompt");
  if (!text && !mm_field(c, c->body, "content", MM_VALUE_STRING, &text)) return false; /* llama.cpp's name */
  if (text && mm_value_get(c->body, "messages")) return mm_refuse(c, 400, "messages", "messages: not next to a text");
  if (text && !mm_fields_check_text(c)) return false;
  if (text) return mm_tokenizer_encode(c->server->tokenizer, text->text, text->n, special, ids, n, err);
  if (!mm_value_get(c->body, "messages")) return mm_refuse(c, 400, "prompt", "prompt: expected a text, or messages");
  if (!mm_fields_check(c) || !mm_openai_conversation(c, &v, &rules, err) || !mm_turn_encode(c, &v, &p, &in_reasoning, err)) return false;
  *ids = p.id;
  *n = p.count;
  return true;
}

static bool tokenize(mm_call *c, mm_err *err) {
  bool pieces = false, entries = false;
  int32_t *ids = NULL;
  size_t n = 0;
  if (!plain(c) || !mm_field_bool(c, c->body, "with_pieces", &pieces) || !mm_field_bool(c, c->body, "return_token_strs", &entries) ||
      !encode(c, &ids, &n, err))
    return false;
  mm_text_printf(&c->out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", n, c->server->positions);
  for (size_t i = 0; i < n; i++) {
    if (i) mm_text_put(&c->out, ",");
    if (pieces)
      put_piece(c, ids[i], &c->out);
    else
      mm_text_printf(&c->out, "%d", ids[i]);
  }
  mm_text_put(&c->out, entries ? "],\"token_strs\":[" : "],\"token_strs\":null");
  for (size_t i = 0; entries && i < n; i++) {
    if (i) mm_text_put(&c->out, ",");
    put_entry(c, ids[i], &c->out);
  }
  mm_text_put(&c->out, entries ? "]}" : "}");
  free(ids);
  return true;
}

static bool detokenize(mm_call *c, mm_err *err) {
  const mm_value *ids;
  mm_utf8_stream u = {0};
  mm_text text = {0};
  (void)err;
  if (!plain(c)) return false;
  if (!mm_field(c, c->body, "tokens", MM_VALUE_ARRAY, &ids)) return false;
  if (!ids) return mm_refuse(c, 400, "tokens", "tokens: expected a list of ids");
  for (const mm_value *v = ids->first; v; v = v->next) {
    int64_t id;
    size_t n;
    const char *bytes =
        mm_value_int(v, &id) && id >= 0 && id < c->server->vocab ? mm_tokenizer_bytes(c->server->tokenizer, (int32_t)id, &n) : NULL;
    if (!bytes) {
      free(text.p);
      return mm_refuse(c, 400, "tokens", "tokens: found %.*s, expected ids of tokens", (int)mm_min(v->raw_n, 40), v->raw);
    }
    if (n) mm_print_utf8(&u, bytes, n, &text);
  }
  mm_print_utf8(&u, "", 0, &text);
  const int names = mm_value_get(c->body, "model") ? 1 : 2; /* vLLM's name, and llama.cpp's, whose requests have no model */
  for (int i = 0; i < names; i++) {
    mm_text_put(&c->out, i ? ",\"content\":" : "{\"prompt\":");
    mm_text_quote(&c->out, text.p ? text.p : "", text.n);
  }
  mm_text_put(&c->out, "}");
  c->out.failed |= text.failed;
  free(text.p);
  return true;
}

const mm_api mm_api_tokenize = {.path = "/tokenize", .begin = tokenize, .start = mm_call_answer};
const mm_api mm_api_detokenize = {.path = "/detokenize", .begin = detokenize, .start = mm_call_answer};

/* ---- How long a prompt would be ---- */

typedef bool read_conversation(mm_call *c, mm_conversation *v, mm_tool_rules *rules, mm_err *err);

static bool count(mm_call *c, read_conversation *read, mm_err *err) {
  mm_conversation v;
  mm_tool_rules rules;
  mm_prompt_tokens p = {0};
  bool in_reasoning;
  if (!mm_fields_check(c) || !read(c, &v, &rules, err) || !mm_turn_encode(c, &v, &p, &in_reasoning, err)) return false;
  mm_text_put(&c->out, c->api->anthropic ? "{" : "{\"object\":\"response.input_tokens\",");
  mm_text_printf(&c->out, "\"input_tokens\":%zu}", p.count);
  free(p.id);
  return true;
}

static bool count_chat(mm_call *c, mm_err *err) { return count(c, mm_openai_conversation, err); }
static bool count_responses(mm_call *c, mm_err *err) { return count(c, mm_responses_conversation, err); }
static bool count_messages(mm_call *c, mm_err *err) { return count(c, mm_anthropic_conversation, err); }

const mm_api mm_api_count_chat = {.path = "/v1/chat/completions/input_tokens", .begin = count_chat, .start = mm_call_answer};
const mm_api mm_api_count_responses = {
    .path = "/v1/responses/input_tokens", .prompt = "input", .begin = count_responses, .start = mm_call_answer};
const mm_api mm_api_count_messages = {
    .path = "/v1/messages/count_tokens", .begin = count_messages, .start = mm_call_answer, .anthropic = true};
