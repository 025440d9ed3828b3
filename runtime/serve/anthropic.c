/* Anthropic's messages. */

#include "runtime/serve/anthropic_messages.h"
#include "runtime/serve/apis.h"
#include "runtime/serve/fields.h"
#include "runtime/serve/turn.h"

/* ---- Shared by the stream and the whole reply ---- */

/* Under --compat vllm the tokens of the prompt that the prefix cache now has besides are created ones. message_start, with no token of the
 * reply, counts all as input. */
static void put_usage(mm_call *c, const mm_progress *p) {
  const mm_server *s = c->server;
  const bool creates = s->compat == MM_COMPAT_VLLM && p->reply_tokens && mm_scheduler_has_cache(s->scheduler);
  const uint32_t computed = p->prompt_tokens - p->cached_tokens, created = creates ? computed : 0;
  mm_text_printf(&c->out, "{\"input_tokens\":%u,\"cache_creation_input_tokens\":%u,\"cache_read_input_tokens\":%u,\"output_tokens\":%u",
                 computed - created, created, p->cached_tokens, p->reply_tokens);
  mm_call_put_drafts(c, p, &c->out);
  mm_text_put(&c->out, "}");
}

static void put_head(mm_call *c) {
  mm_text_printf(&c->out, "{\"id\":\"msg_%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", c->id);
  mm_text_quote_string(&c->out, c->server->name[0]);
}

/* `"stop_reason":…,"stop_sequence":…` */
static void put_stop(const mm_choice *ch, mm_text *out) {
  const mm_turn *t = ch->state;
  const mm_ending *e = &ch->ending;
  const char *reason = e->reason == MM_FINISH_LENGTH ? "max_tokens"
                       : e->stop >= 0                ? "stop_sequence"
                       : mm_turn_calls(t)            ? "tool_use"
                                                     : "end_turn";
  mm_text_printf(out, "\"stop_reason\":\"%s\",\"stop_sequence\":", reason);
  if (e->stop >= 0)
    mm_text_quote(out, ch->call->params.stop[e->stop].text, ch->call->params.stop[e->stop].n);
  else
    mm_text_put(out, "null");
}

/* ---- The stream: reasoning, text and calls are blocks, one open at a time ---- */

static void close_block(mm_turn *t) {
  mm_call *c = t->choice->call;
  if (!t->open) return;
  if (t->kind == MM_REPLY_REASONING) {
    mm_text_printf(&c->out, "{\"type\":\"content_block_delta\",\"index\":%u,\"delta\":{\"type\":\"signature_delta\",\"signature\":\"%s\"}}",
                   t->block, c->id);
    mm_call_event(c, "content_block_delta");
  }
  mm_text_printf(&c->out, "{\"type\":\"content_block_stop\",\"index\":%u}", t->block);
  mm_call_event(c, "content_block_stop");
  t->open = false;
  t->block++;
}

static void open_block(mm_turn *t, const mm_reply_event *e) {
  mm_call *c = t->choice->call;
  close_block(t);
  t->open = true;
  t->kind = e->kind;
  mm_text_printf(&c->out, "{\"type\":\"content_block_start\",\"index\":%u,\"content_block\":", t->block);
  if (e->kind == MM_REPLY_REASONING) mm_text_put(&c->out, "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}}");
  if (e->kind == MM_REPLY_CONTENT) mm_text_put(&c->out, "{\"type\":\"text\",\"text\":\"\"}}");
  if (e->kind == MM_REPLY_CALL) {
    mm_text_printf(&c->out, "{\"type\":\"tool_use\",\"id\":\"%s\",\"name\":", t->call[e->call].id);
    mm_text_quote(&c->out, e->text, e->n);
    mm_text_put(&c->out, ",\"input\":{}}}");
  }
  mm_call_event(c, "content_block_start");
}

static void send_event(mm_turn *t, const mm_reply_event *e) {
  mm_call *c = t->choice->call;
  if (!c->params.stream || e->kind == MM_REPLY_CALL_END) return;
  const bool arguments = e->kind == MM_REPLY_ARGUMENTS;
  if (e->kind == MM_REPLY_CALL || (!arguments && (!t->open || t->kind != e->kind))) open_block(t, e);
  if (e->kind == MM_REPLY_CALL) return;
  mm_text_printf(&c->out, "{\"type\":\"content_block_delta\",\"index\":%u,\"delta\":", t->block);
  if (arguments)
    mm_text_put(&c->out, "{\"type\":\"input_json_delta\",\"partial_json\":");
  else
    mm_text_put(&c->out,
                e->kind == MM_REPLY_REASONING ? "{\"type\":\"thinking_delta\",\"thinking\":" : "{\"type\":\"text_delta\",\"text\":");
  mm_text_quote(&c->out, e->text, e->n);
  mm_text_put(&c->out, "}}");
  mm_call_event(c, "content_block_delta");
}

static void send_start(mm_call *c) {
  const mm_progress p = {.prompt_tokens = c->prompt_count[0]};
  mm_text_put(&c->out, "{\"type\":\"message_start\",\"message\":");
  put_head(c);
  mm_text_put(&c->out, ",\"content\":[],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
  put_usage(c, &p);
  mm_text_put(&c->out, "}}");
  mm_call_event(c, "message_start");
}

/* ---- The request ---- */

static bool begin(mm_call *c, mm_err *err) {
  mm_conversation v;
  mm_tool_rules rules;
  mm_turn_settings set = {.call_prefix = "toolu_", .event = send_event};
  if (!mm_params_read(c, err) || !mm_params_stop(c, "stop_sequences")) return false;
  if (!c->params.max_tokens) return mm_refuse(c, 400, "max_tokens", "max_tokens: Field required");
  return mm_turn_format_of(c, "output_config", &set.content, err) && mm_anthropic_conversation(c, &v, &rules, err) &&
         mm_turn_prepare(c, &v, &rules, &set, err);
}

static bool start(mm_call *c, mm_err *err) {
  if (!mm_turn_start(c, err)) return false;
  if (!c->params.stream) return true;
  mm_call_stream(c);
  send_start(c);
  return true;
}

/* ---- The reply ---- */

static void token(mm_choice *ch, const mm_token *t) { mm_turn_token(ch, t); }

static void ended(mm_choice *ch) {
  mm_turn_ended(ch);
  if (ch->call->params.stream) close_block(ch->state);
}

static void put_use(const mm_turn_call *call, mm_text *out) {
  mm_text_printf(out, "{\"type\":\"tool_use\",\"id\":\"%s\",\"name\":", call->id);
  mm_text_quote(out, call->name.p, call->name.n);
  mm_text_put(out, ",\"input\":");
  if (call->ended && call->arguments.n)
    mm_text_add(out, call->arguments.p, call->arguments.n);
  else
    mm_text_put(out, "{}"); /* what was cut off is no JSON */
  mm_text_put(out, "}");
}

static void put_blocks(const mm_turn *t, mm_text *out) {
  bool first = true;
  for (size_t i = 0; i < t->items; i++) {
    const mm_turn_item *item = &t->item[i];
    if (item->kind == MM_REPLY_CALL && !mm_turn_shows(t, item->call)) continue;
    if (!first) mm_text_put(out, ",");
    first = false;
    if (item->kind == MM_REPLY_CALL) {
      put_use(&t->call[item->call], out);
      continue;
    }
    const bool thinking = item->kind == MM_REPLY_REASONING;
    mm_text_put(out, thinking ? "{\"type\":\"thinking\",\"thinking\":" : "{\"type\":\"text\",\"text\":");
    mm_text_quote(out, (thinking ? t->reasoning.p : t->content.p) + item->from, item->n);
    if (thinking) mm_text_printf(out, ",\"signature\":\"%s\"", t->choice->call->id);
    mm_text_put(out, "}");
  }
}

static void finish(mm_call *c) {
  const mm_progress usage = mm_call_usage(c);
  const mm_choice *ch = &c->choice[0];
  if (c->params.stream) {
    mm_text_put(&c->out, "{\"type\":\"message_delta\",\"delta\":{");
    put_stop(ch, &c->out);
    mm_text_put(&c->out, "},\"usage\":");
    put_usage(c, &usage);
    mm_text_put(&c->out, "}");
    mm_call_event(c, "message_delta");
    mm_text_put(&c->out, "{\"type\":\"message_stop\"}");
    mm_call_event(c, "message_stop");
    mm_exchange_end(c->x);
    return;
  }
  put_head(c);
  mm_text_put(&c->out, ",\"content\":[");
  put_blocks(ch->state, &c->out);
  mm_text_put(&c->out, "],");
  put_stop(ch, &c->out);
  mm_text_put(&c->out, ",\"usage\":");
  put_usage(c, &usage);
  mm_text_put(&c->out, "}");
}

const mm_api mm_api_messages = {.path = "/v1/messages", .prompt = "messages", MM_API_REPLIES, .anthropic = true};
