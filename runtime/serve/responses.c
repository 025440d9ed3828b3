/* OpenAI's responses: text and function calls, nothing stored. */
#include <string.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/reasoning_fields.h"
#include "runtime/serve/responses_input.h"
#include "runtime/serve/turn.h"

/* ---- Items and the response ---- */

/* The limit of tokens ended the reply. llama.cpp calls such a reply completed. */
static bool limited(const mm_choice *ch) { return ch->ending.reason == MM_FINISH_LENGTH && ch->call->server->compat != MM_COMPAT_LLAMA; }

/* The last item of a reply that a limit or a failure has ended is not complete. An item with another behind it is. */
static bool is_cut(const mm_turn *t, size_t i) {
  int status;
  return i + 1 == t->items && (limited(t->choice) || mm_choice_failure(t->choice, &status));
}

/* An item of the output, whole or as it begins. */
static void put_item(const mm_turn *t, size_t i, bool whole, mm_text *out) {
  const mm_turn_item *item = &t->item[i];
  const char *id = t->choice->call->id, *status = !whole ? "in_progress" : is_cut(t, i) ? "incomplete" : "completed";
  if (item->kind == MM_REPLY_CALL) {
    const mm_turn_call *call = &t->call[item->call];
    if (whole) status = call->ended ? "completed" : "incomplete";
    mm_text_printf(out, "{\"type\":\"function_call\",\"id\":\"fc_%s_%zu\",\"call_id\":\"%s\",\"status\":\"%s\",\"name\":", id, i, call->id,
                   status);
    mm_text_quote(out, call->name.p, call->name.n);
    mm_text_put(out, ",\"arguments\":");
    mm_text_quote(out, call->arguments.p ? call->arguments.p : "", whole ? call->arguments.n : 0);
    mm_text_put(out, "}");
    return;
  }
  const bool thinking = item->kind == MM_REPLY_REASONING;
  if (thinking)
    mm_text_printf(out, "{\"type\":\"reasoning\",\"id\":\"rs_%s_%zu\",\"status\":\"%s\",\"summary\":[],\"content\":[", id, i, status);
  else
    mm_text_printf(out, "{\"type\":\"message\",\"id\":\"msg_%s_%zu\",\"status\":\"%s\",\"role\":\"assistant\",\"content\":[", id, i,
                   status);
  if (whole) {
    mm_text_put(out, thinking ? "{\"type\":\"reasoning_text\",\"text\":"
                              : "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[],\"text\":");
    mm_text_quote(out, (thinking ? t->reasoning.p : t->content.p) + item->from, item->n);
    mm_text_put(out, "}");
  }
  mm_text_put(out, "]}");
}

/* A value of the request as JSON on one line, as events need it: keys once, and null for NaN and Infinity, which a request may hold. */
static void put_value(const mm_value *v, mm_text *out) {
  const bool list = v->type == MM_VALUE_ARRAY;
  if (v->type == MM_VALUE_STRING) {
    mm_text_quote(out, v->text, v->n);
  } else if (v->type == MM_VALUE_NUMBER && (v->text[v->n - 1] < '0' || v->text[v->n - 1] > '9')) {
    mm_text_put(out, "null");
  } else if (!list && v->type != MM_VALUE_OBJECT) {
    mm_text_add(out, v->raw, v->raw_n);
  } else {
    mm_text_put(out, list ? "[" : "{");
    for (const mm_value *m = v->first; m; m = m->next) {
      if (m != v->first) mm_text_put(out, ",");
      if (!list) mm_text_quote(out, m->key, m->key_n);
      if (!list) mm_text_put(out, ":");
      put_value(m, out);
    }
    mm_text_put(out, list ? "]" : "}");
  }
}

static void put_field(const mm_call *c, const char *key, const char *otherwise, mm_text *out) {
  const mm_value *v = mm_value_get(c->body, key);
  mm_text_printf(out, ",\"%s\":", key);
  if (v)
    put_value(v, out);
  else
    mm_text_put(out, otherwise);
}

/* Those that the model sees. */
static void put_tools(const mm_call *c, mm_text *out) {
  const mm_value *v = mm_value_get(c->body, "tools");
  bool first = true;
  mm_text_put(out, ",\"tools\":[");
  for (const mm_value *t = v && v->type == MM_VALUE_ARRAY ? v->first : NULL; t; t = t->next) {
    if (mm_tool_is_hosted(t)) continue;
    if (!first) mm_text_put(out, ",");
    first = false;
    put_value(t, out);
  }
  mm_text_put(out, "]");
}

/* Fields of the request that each response has, written once: they may be long. */
static void write_echo(mm_call *c) {
  put_field(c, "instructions", "null", &c->echo);
  put_field(c, "metadata", "{}", &c->echo);
  put_tools(c, &c->echo);
  put_field(c, "tool_choice", "\"auto\"", &c->echo);
  put_field(c, "parallel_tool_calls", "true", &c->echo);
  put_field(c, "max_output_tokens", "null", &c->echo);
}

static void put_usage(const mm_turn *t, mm_text *out) {
  const mm_progress p = mm_call_usage(t->choice->call);
  mm_text_printf(out,
                 ",\"usage\":{\"input_tokens\":%u,\"input_tokens_details\":{\"cached_tokens\":%u,\"cache_write_tokens\":0},"
                 "\"output_tokens\":%u,\"total_tokens\":%u,\"output_tokens_details\":{\"reasoning_tokens\":%u",
                 p.prompt_tokens, p.cached_tokens, p.reply_tokens, p.prompt_tokens + p.reply_tokens, t->reasoning_tokens);
  mm_call_put_drafts(t->choice->call, &p, out);
  mm_text_put(out, "}}");
}

/* error: why it failed, or NULL. */
static void put_response(mm_call *c, const mm_turn *t, const char *status, const char *error, mm_text *out) {
  const bool done = strcmp(status, "in_progress") != 0, cut = strcmp(status, "incomplete") == 0;
  mm_text_printf(out, "{\"id\":\"resp_%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\",\"error\":", c->id,
                 (long long)c->created, status);
  mm_text_put(out, error ? "{\"code\":\"server_error\",\"message\":" : "null");
  if (error) mm_text_quote_string(out, error);
  mm_text_put(out, error ? "},\"model\":" : ",\"model\":");
  mm_text_quote_string(out, c->server->name[0]);
  mm_text_put(out, cut ? ",\"incomplete_details\":{\"reason\":\"max_output_tokens\"}" : ",\"incomplete_details\":null");
  mm_text_add(out, c->echo.p, c->echo.n);
  out->failed |= c->echo.failed;
  mm_text_put(out, ",\"previous_response_id\":null,\"store\":false,\"temperature\":");
  mm_text_real(out, c->params.sampling.temperature);
  mm_text_put(out, ",\"top_p\":");
  mm_text_real(out, c->params.sampling.top_p);
  mm_text_put(out, ",\"output\":[");
  bool first = true;
  for (size_t i = 0; done && i < t->items; i++) {
    if (t->item[i].kind == MM_REPLY_CALL && !mm_turn_shows(t, t->item[i].call)) continue;
    if (!first) mm_text_put(out, ",");
    first = false;
    put_item(t, i, true, out);
  }
  mm_text_put(out, "]");
  if (done)
    put_usage(t, out);
  else
    mm_text_put(out, ",\"usage\":null");
  mm_text_put(out, "}");
}

/* ---- The stream ---- */

/* Begins an event; its fields follow in c->out. */
static void begin_event(mm_turn *t, const char *type) {
  mm_text_printf(&t->choice->call->out, "{\"type\":\"%s\",\"sequence_number\":%u", type, t->block++);
}

static void end_event(mm_turn *t, const char *type) {
  mm_text_put(&t->choice->call->out, "}");
  mm_call_event(t->choice->call, type);
}

static void send_response(mm_turn *t, const char *type, const char *status, const char *error) {
  mm_call *c = t->choice->call;
  begin_event(t, type);
  mm_text_put(&c->out, ",\"response\":");
  put_response(c, t, status, error, &c->out);
  mm_openai_put_progress(t->choice, &c->out);
  end_event(t, type);
}

static void put_place(const mm_turn *t, size_t i, mm_text *out) {
  const mm_reply_kind kind = t->item[i].kind;
  mm_text_printf(out, ",\"output_index\":%zu,\"item_id\":\"%s_%s_%zu\"", i,
                 kind == MM_REPLY_CALL        ? "fc"
                 : kind == MM_REPLY_REASONING ? "rs"
                                              : "msg",
                 t->choice->call->id, i);
  if (kind != MM_REPLY_CALL) mm_text_put(out, ",\"content_index\":0");
}

static void send_item(mm_turn *t, size_t i, bool whole) {
  const char *type = whole ? "response.output_item.done" : "response.output_item.added";
  mm_text *out = &t->choice->call->out;
  begin_event(t, type);
  mm_text_printf(out, ",\"output_index\":%zu,\"item\":", i);
  put_item(t, i, whole, out);
  end_event(t, type);
}

static void send_part(mm_turn *t, size_t i, bool whole) {
  const char *type = whole ? "response.content_part.done" : "response.content_part.added";
  const mm_turn_item *item = &t->item[i];
  mm_text *out = &t->choice->call->out;
  begin_event(t, type);
  put_place(t, i, out);
  mm_text_put(out, item->kind == MM_REPLY_REASONING ? ",\"part\":{\"type\":\"reasoning_text\",\"text\":"
                                                    : ",\"part\":{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[],\"text\":");
  mm_text_quote(out, whole ? (item->kind == MM_REPLY_REASONING ? t->reasoning.p : t->content.p) + item->from : "", whole ? item->n : 0);
  mm_text_put(out, "}");
  end_event(t, type);
}

/* Nothing more of the item comes. A call that was cut off has its events of the end, as the text of a message has, and the status
 * "incomplete"; a call that went wrong is left out of the response, and its arguments are never done. */
static void close_item(mm_turn *t, size_t i) {
  const mm_turn_item *item = &t->item[i];
  if (item->kind == MM_REPLY_CALL && !mm_turn_shows(t, item->call)) {
    send_item(t, i, true);
    return;
  }
  mm_text *out = &t->choice->call->out;
  const char *type = item->kind == MM_REPLY_CALL        ? "response.function_call_arguments.done"
                     : item->kind == MM_REPLY_REASONING ? "response.reasoning_text.done"
                                                        : "response.output_text.done";
  begin_event(t, type);
  put_place(t, i, out);
  if (item->kind == MM_REPLY_CALL) {
    mm_text_put(out, ",\"name\":");
    mm_text_quote(out, t->call[item->call].name.p, t->call[item->call].name.n);
    mm_text_put(out, ",\"arguments\":");
    mm_text_quote(out, t->call[item->call].arguments.p ? t->call[item->call].arguments.p : "", t->call[item->call].arguments.n);
  } else {
    mm_text_put(out, item->kind == MM_REPLY_REASONING ? ",\"text\":" : ",\"logprobs\":[],\"text\":");
    mm_text_quote(out, (item->kind == MM_REPLY_REASONING ? t->reasoning.p : t->content.p) + item->from, item->n);
  }
  end_event(t, type);
  if (item->kind != MM_REPLY_CALL) send_part(t, i, true);
  send_item(t, i, true);
}

static void send_event(mm_turn *t, const mm_reply_event *e) {
  if (!t->choice->call->params.stream || e->kind == MM_REPLY_CALL_END) return;
  const size_t last = t->items - 1;
  mm_text *out = &t->choice->call->out;
  if (t->sent < t->items) { /* a new item */
    if (t->sent) close_item(t, t->sent - 1);
    t->sent = t->items;
    send_item(t, last, false);
    if (e->kind != MM_REPLY_CALL) send_part(t, last, false);
  }
  if (e->kind == MM_REPLY_CALL) return;
  const char *type = e->kind == MM_REPLY_ARGUMENTS   ? "response.function_call_arguments.delta"
                     : e->kind == MM_REPLY_REASONING ? "response.reasoning_text.delta"
                                                     : "response.output_text.delta";
  begin_event(t, type);
  put_place(t, last, out);
  mm_text_put(out, e->kind == MM_REPLY_CONTENT ? ",\"logprobs\":[],\"delta\":" : ",\"delta\":");
  mm_text_quote(out, e->text, e->n);
  mm_openai_put_progress(t->choice, out);
  end_event(t, type);
}

/* ---- The request ---- */

static bool begin(mm_call *c, mm_err *err) {
  mm_conversation v;
  mm_tool_rules rules;
  mm_turn_settings set = {.call_prefix = "call_", .event = send_event};
  if (!mm_params_read(c, err) || !mm_params_limit(c, "max_output_tokens") || !mm_reasoning_excluded(c, &set.no_reasoning)) return false;
  write_echo(c);
  return mm_turn_format_of(c, "text", &set.content, err) && mm_responses_conversation(c, &v, &rules, err) &&
         mm_turn_prepare(c, &v, &rules, &set, err);
}

static bool start(mm_call *c, mm_err *err) {
  if (!mm_turn_start(c, err)) return false;
  if (!c->params.stream) return true;
  mm_call_stream(c);
  send_response(c->choice[0].state, "response.created", "in_progress", NULL);
  send_response(c->choice[0].state, "response.in_progress", "in_progress", NULL);
  return true;
}

static void prefill(mm_choice *ch) { send_response(ch->state, "response.in_progress", "in_progress", NULL); }

static void token(mm_choice *ch, const mm_token *t) { mm_turn_token(ch, t); }

static void ended(mm_choice *ch) {
  mm_turn *t = ch->state;
  mm_turn_ended(ch);
  if (ch->call->params.stream && t->sent) close_item(t, t->sent - 1);
}

static void finish(mm_call *c) {
  mm_turn *t = c->choice[0].state;
  const bool cut = limited(&c->choice[0]);
  if (c->params.stream) {
    send_response(t, cut ? "response.incomplete" : "response.completed", cut ? "incomplete" : "completed", NULL);
    mm_exchange_end(c->x);
    return;
  }
  put_response(c, t, cut ? "incomplete" : "completed", NULL, &c->out);
}

static void failed(mm_call *c, const char *text) { send_response(c->choice[0].state, "response.failed", "failed", text); }

const mm_api mm_api_responses = {.path = "/v1/responses", .prompt = "input", MM_API_REPLIES, .prefill = prefill, .failed = failed};
