/* OpenAI's chat completions. */

#include "runtime/serve/apis.h"
#include "runtime/serve/content_fields.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/reasoning_fields.h"
#include "runtime/serve/turn.h"

/* ---- The stream ---- */

static void put_head(mm_call *c) {
  mm_text_printf(&c->out, "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion%s\",\"created\":%lld,\"model\":", c->id,
                 c->params.stream ? ".chunk" : "", (long long)c->created);
  mm_openai_put_model(c);
  if (!c->params.stream) mm_text_put(&c->out, ",\"prompt_logprobs\":null"); /* vLLM's clients read it */
}

/* Begins a chunk of a choice, up to its delta. */
static void begin_chunk(mm_choice *ch) {
  put_head(ch->call);
  mm_text_printf(&ch->call->out, ",\"choices\":[{\"index\":%u,\"delta\":", ch->index);
}

/* After the delta; the logprobs of all tokens since the last chunk go along. */
static void end_chunk(mm_choice *ch, const char *finish) {
  mm_call *c = ch->call;
  if (ch->logprobs.n)
    mm_text_printf(&c->out, ",\"logprobs\":{\"content\":[%s],\"refusal\":null}", ch->logprobs.p);
  else
    mm_text_put(&c->out, ",\"logprobs\":null");
  c->out.failed |= ch->logprobs.failed;
  mm_text_clear(&ch->logprobs);
  if (finish)
    mm_text_printf(&c->out, ",\"finish_reason\":\"%s\"", finish);
  else
    mm_text_put(&c->out, ",\"finish_reason\":null");
  if (finish) mm_openai_stop_reason(c, &ch->ending, &c->out);
  mm_openai_end_chunk(ch);
}

static void send_role(mm_choice *ch) {
  begin_chunk(ch);
  mm_text_put(&ch->call->out, "{\"role\":\"assistant\",\"content\":null}");
  end_chunk(ch, NULL);
}

/* Sends a chunk of the delta in ch->text, or without one where `finish` alone is to be said. */
static void send_delta(mm_choice *ch, const char *finish) {
  begin_chunk(ch);
  if (ch->text.n)
    mm_text_add(&ch->call->out, ch->text.p, ch->text.n);
  else
    mm_text_put(&ch->call->out, "{}");
  ch->call->out.failed |= ch->text.failed;
  mm_text_clear(&ch->text);
  end_chunk(ch, finish);
}

static void prefill(mm_choice *ch) { send_delta(ch, NULL); }

/* Under the name that DeepSeek, SGLang and llama.cpp have for it, and that of vLLM and OpenRouter. */
static void put_reasoning(const char *text, size_t n, mm_text *out) {
  mm_text_put(out, "\"reasoning_content\":");
  mm_text_quote(out, text, n);
  mm_text_put(out, ",\"reasoning\":");
  mm_text_quote(out, text, n);
}

static void send_event(mm_turn *t, const mm_reply_event *e) {
  mm_choice *ch = t->choice;
  mm_text *out = &ch->text;
  if (!ch->call->params.stream || e->kind == MM_REPLY_CALL_END) return;
  if (out->n) send_delta(ch, NULL);
  switch (e->kind) {
    case MM_REPLY_REASONING:
      mm_text_put(out, "{");
      put_reasoning(e->text, e->n, out);
      mm_text_put(out, "}");
      if (!ch->closing) send_delta(ch, NULL);
      return;
    case MM_REPLY_CONTENT: mm_text_put(out, "{\"content\":"); break;
    case MM_REPLY_CALL:
      mm_text_printf(out, "{\"tool_calls\":[{\"index\":%u,\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", e->call,
                     t->call[e->call].id);
      break;
    default: mm_text_printf(out, "{\"tool_calls\":[{\"index\":%u,\"function\":{\"arguments\":", e->call);
  }
  mm_text_quote(out, e->text, e->n);
  mm_text_put(out, e->kind == MM_REPLY_CALL ? ",\"arguments\":\"\"}}]}" : e->kind == MM_REPLY_ARGUMENTS ? "}}]}" : "}");
  if (!ch->closing) send_delta(ch, NULL);
}

/* ---- Logprobs ---- */

static void put_logprob(const mm_call *c, const mm_logprob *l, mm_text *out) {
  size_t n = 0;
  const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, l->id, &n);
  mm_text_put(out, "{\"token\":");
  mm_text_quote(out, bytes ? bytes : "", bytes ? n : 0);
  mm_text_put(out, ",\"logprob\":");
  mm_text_real(out, (double)l->logprob);
  mm_text_put(out, ",\"bytes\":[");
  for (size_t i = 0; bytes && i < n; i++) mm_text_printf(out, i ? ",%u" : "%u", (unsigned)(uint8_t)bytes[i]);
  mm_text_put(out, "]");
}

static void add_logprobs(mm_choice *ch, const mm_token *t) {
  const mm_call *c = ch->call;
  mm_text *out = &ch->logprobs;
  if (out->n) mm_text_put(out, ",");
  put_logprob(c, &t->logprobs[0], out);
  mm_text_put(out, ",\"top_logprobs\":[");
  for (uint32_t i = 0; i < c->params.top_logprobs && t->logprobs[1 + i].id >= 0; i++) {
    if (i) mm_text_put(out, ",");
    put_logprob(c, &t->logprobs[1 + i], out);
    mm_text_put(out, "}");
  }
  mm_text_put(out, "]}");
}

/* ---- The request ---- */

static bool read_fields(mm_call *c, mm_turn_settings *set) {
  mm_params *p = &c->params;
  int64_t top = 0;
  bool split = true, include = true, exclude = false;
  if (!mm_field_bool(c, c->body, "logprobs", &p->logprobs) || !mm_field_int(c, c->body, "top_logprobs", 0, MM_LOGPROBS, &top) ||
      !mm_params_limit(c, "max_completion_tokens") || !mm_field_bool(c, c->body, "reasoning_split", &split) ||
      !mm_field_bool(c, c->body, "include_reasoning", &include) || !mm_reasoning_excluded(c, &exclude))
    return false;
  if (exclude && include && mm_value_get(c->body, "include_reasoning"))
    return mm_refuse(c, 400, "include_reasoning", "include_reasoning: contradicts reasoning.exclude");
  if (!split && !include) return mm_refuse(c, 400, "include_reasoning", "include_reasoning: reasoning_split makes the reasoning content");
  if (!split && exclude) return mm_refuse(c, 400, "reasoning", "reasoning.exclude: reasoning_split makes the reasoning content");
  if (top && !p->logprobs) return mm_refuse(c, 400, "top_logprobs", "top_logprobs: logprobs is not true");
  p->top_logprobs = (uint32_t)top;
  set->append_think = !split;
  set->no_reasoning = !include || exclude;
  return true;
}

static bool read_format(mm_call *c, mm_turn_settings *set, mm_err *err) {
  const mm_value *format;
  return mm_field(c, c->body, "response_format", MM_VALUE_OBJECT, &format) &&
         mm_turn_format(c, "response_format", format, &set->content, err) && mm_content_read(c, &set->content, err);
}

static bool begin(mm_call *c, mm_err *err) {
  mm_conversation v;
  mm_tool_rules rules;
  mm_turn_settings set = {.call_prefix = "call_", .event = send_event};
  if (!mm_params_read(c, err) || !read_fields(c, &set) || !read_format(c, &set, err) || !mm_openai_conversation(c, &v, &rules, err))
    return false;
  return mm_turn_prepare(c, &v, &rules, &set, err);
}

static bool start(mm_call *c, mm_err *err) {
  if (!mm_turn_start(c, err)) return false;
  if (!c->params.stream) return true;
  mm_call_stream(c);
  for (uint32_t i = 0; i < c->choices; i++) send_role(&c->choice[i]);
  return true;
}

/* ---- The reply ---- */

static void token(mm_choice *ch, const mm_token *t) {
  if (t->logprobs) add_logprobs(ch, t); /* also of one that a stop string cut */
  mm_turn_token(ch, t);
}

static const char *finish_word(const mm_choice *ch) { return mm_turn_calls(ch->state) ? "tool_calls" : mm_openai_finish(&ch->ending); }

static void ended(mm_choice *ch) {
  int status;
  mm_turn_ended(ch);
  if (!ch->call->params.stream || mm_choice_failure(ch, &status)) return;
  send_delta(ch, finish_word(ch));
}

static void put_calls(const mm_turn *t, mm_text *out) {
  bool first = true;
  mm_text_put(out, ",\"tool_calls\":[");
  for (uint32_t i = 0; i < t->calls; i++) {
    if (!mm_turn_shows(t, i)) continue;
    mm_text_printf(out, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", first ? "" : ",", t->call[i].id);
    first = false;
    mm_text_quote(out, t->call[i].name.p, t->call[i].name.n);
    mm_text_put(out, ",\"arguments\":");
    mm_text_quote(out, t->call[i].arguments.p, t->call[i].arguments.n);
    mm_text_put(out, "}}");
  }
  mm_text_put(out, "]");
}

static void put_choice(mm_call *c, mm_choice *ch) {
  const mm_turn *t = ch->state;
  mm_text *out = &c->out;
  bool calls = false;
  for (uint32_t i = 0; i < t->calls; i++) calls |= mm_turn_shows(t, i);
  mm_text_printf(out, "%s{\"index\":%u,\"message\":{\"role\":\"assistant\",\"content\":", ch->index ? "," : "", ch->index);
  if (calls && !t->content.n)
    mm_text_put(out, "null");
  else
    mm_text_quote(out, t->content.p, t->content.n);
  mm_text_put(out, ",\"refusal\":null");
  if (t->reasoning.n) mm_text_put(out, ",");
  if (t->reasoning.n) put_reasoning(t->reasoning.p, t->reasoning.n, out);
  if (calls) put_calls(t, out);
  mm_text_put(out, "},\"logprobs\":");
  if (c->params.logprobs)
    mm_text_printf(out, "{\"content\":[%s],\"refusal\":null}", ch->logprobs.p ? ch->logprobs.p : "");
  else
    mm_text_put(out, "null");
  out->failed |= ch->logprobs.failed;
  mm_text_printf(out, ",\"finish_reason\":\"%s\"", finish_word(ch));
  mm_openai_stop_reason(c, &ch->ending, out);
  mm_text_put(out, "}");
}

static void finish(mm_call *c) {
  uint32_t reasoning = 0;
  for (uint32_t i = 0; i < c->choices; i++) reasoning += ((mm_turn *)c->choice[i].state)->reasoning_tokens;
  mm_openai_end(c, put_head, put_choice, reasoning);
}

const mm_api mm_api_chat = {.path = "/v1/chat/completions", .prompt = "messages", MM_API_REPLIES, .prefill = prefill};
