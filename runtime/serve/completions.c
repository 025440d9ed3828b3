/* OpenAI's legacy completions: a text or token ids go on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/content_fields.h"
#include "runtime/serve/fields.h"

/* Tokens' entries in the four lists of logprobs. Offsets count characters, as Python does. */
typedef struct lists {
  mm_text token, logprob, top, offset;
} lists;

/* What the replies to a prompt have of it. Its tokens' logprobs come with the first of them. */
typedef struct prompt_shown {
  mm_text echoed; /* its text, where it is echoed */
  lists logged;   /* with `echo` and logprobs */
  mm_text scores; /* prompt_logprobs */
  mm_utf8_stream utf8;
  size_t characters; /* of the tokens that have entries */
} prompt_shown;

typedef struct completions {
  bool echo;
  bool special;       /* control tokens that a prompt's text spells are such */
  bool none;          /* no reply is wanted: its one token is left out */
  lists *logged;      /* [replies] of a whole reply with logprobs, or of a stream's last token in vLLM's form; or NULL */
  size_t *characters; /* [replies] of the text so far */
  size_t *sent;       /* [replies] bytes of the text that are in chunks of a stream */
  uint32_t replies;
  prompt_shown *prompt; /* [prompts] */
  uint32_t prompts;
  mm_constraint **constraint; /* [replies], where something holds them, or NULL */
} completions;

/* ---- Shared with chat ---- */

void mm_print_utf8(mm_utf8_stream *u, const char *bytes, size_t n, mm_text *out) {
  if (!MM_GROW(out->p, &out->cap, out->n + 3 * n + 5, MM_IGNORED)) {
    out->failed = true;
    return;
  }
  out->n += mm_utf8_push(u, bytes, n, out->p + out->n);
}

void mm_openai_stop_reason(const mm_call *c, const mm_ending *end, mm_text *out) {
  const mm_params *p = &c->params;
  bool own = false; /* a token that ends replies without being asked for is none */
  for (uint32_t i = 0; i < p->end_own; i++) own |= p->end[i] == end->end_id;
  mm_text_put(out, ",\"stop_reason\":");
  if (end->stop >= 0)
    mm_text_quote(out, p->stop[end->stop].text, p->stop[end->stop].n);
  else if (end->reason == MM_FINISH_STOP && end->end_id >= 0 && !own)
    mm_text_printf(out, "%d", end->end_id);
  else
    mm_text_put(out, "null");
}

const char *mm_openai_finish(const mm_ending *end) { return end->reason == MM_FINISH_LENGTH ? "length" : "stop"; }

static void put_usage(mm_call *c, const mm_progress *p, uint32_t reasoning) {
  mm_text_printf(&c->out,
                 ",\"usage\":{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%u,"
                 "\"prompt_tokens_details\":{\"cached_tokens\":%u},\"completion_tokens_details\":{\"reasoning_tokens\":%u",
                 p->prompt_tokens, p->reply_tokens, p->prompt_tokens + p->reply_tokens, p->cached_tokens, reasoning);
  mm_call_put_drafts(c, p, &c->out);
  mm_text_put(&c->out, "}}");
}

/* llama.cpp's: the time from a choice's slot to its first token is the prompt's, and the rate of a reply that of the tokens behind it. */
static void put_timings(const mm_choice *ch, mm_text *out) {
  const mm_call *c = ch->call;
  if (!c->params.timings || ch->last <= 0) return;
  const uint32_t prompt = c->prompt_count[ch->index / c->params.n] - ch->cached, more = ch->tokens ? ch->tokens - 1 : 0;
  const double prompt_ms = 1e3 * (ch->first - ch->began), reply_ms = 1e3 * (ch->last - ch->first);
  mm_text_printf(out,
                 ",\"timings\":{\"cache_n\":%u,\"prompt_n\":%u,\"prompt_ms\":%.3f,\"prompt_per_token_ms\":%.3f,\"prompt_per_second\":%.3f,"
                 "\"predicted_n\":%u,\"predicted_ms\":%.3f,\"predicted_per_token_ms\":%.3f,\"predicted_per_second\":%.3f}",
                 ch->cached, prompt, prompt_ms, prompt ? prompt_ms / prompt : 0, prompt_ms > 0 ? 1e3 * prompt / prompt_ms : 0, ch->tokens,
                 reply_ms, more ? reply_ms / more : 0, reply_ms > 0 ? 1e3 * more / reply_ms : 0);
}

void mm_openai_put_progress(const mm_choice *ch, mm_text *out) {
  put_timings(ch, out);
  if (ch->prefilling)
    mm_text_printf(out, ",\"prompt_progress\":{\"total\":%u,\"cache\":%u,\"processed\":%u,\"time_ms\":%.0f}",
                   ch->call->prompt_count[ch->index / ch->call->params.n], ch->cached, ch->prefilled, 1e3 * ch->prefill_seconds);
}

void mm_openai_end(mm_call *c, void (*head)(mm_call *c), void (*put)(mm_call *c, mm_choice *ch), uint32_t reasoning) {
  const mm_progress usage = mm_call_usage(c);
  if (!c->params.stream || c->params.include_usage) {
    head(c);
    mm_text_put(&c->out, ",\"choices\":[");
    for (uint32_t i = 0; !c->params.stream && i < c->choices; i++) put(c, &c->choice[i]);
    mm_text_put(&c->out, "]");
    put_usage(c, &usage, reasoning);
    mm_openai_put_progress(&c->choice[0], &c->out);
    mm_text_put(&c->out, "}");
  }
  if (!c->params.stream) return;
  if (c->params.include_usage) mm_call_event(c, NULL);
  mm_text_put(&c->out, "[DONE]");
  mm_call_event(c, NULL);
  mm_exchange_end(c->x);
}

void mm_openai_put_model(mm_call *c) {
  mm_text_quote_string(&c->out, c->server->name[0]);
  mm_text_put(&c->out, ",\"system_fingerprint\":\"build-" MM_VERSION "\"");
}

void mm_openai_end_chunk(mm_choice *ch) {
  mm_call *c = ch->call;
  const mm_params *p = &c->params;
  const uint32_t prompt = c->prompt_count[ch->index / p->n];
  mm_text_put(&c->out, p->include_usage && !p->running_usage ? "}],\"usage\":null" : p->include_usage ? "}],\"usage\":" : "}]");
  if (p->include_usage && p->running_usage)
    mm_text_printf(&c->out, "{\"prompt_tokens\":%u,\"completion_tokens\":%u,\"total_tokens\":%llu}", prompt, ch->tokens,
                   (unsigned long long)prompt + ch->tokens);
  mm_openai_put_progress(ch, &c->out);
  mm_text_put(&c->out, "}");
  mm_call_event(c, NULL);
}

/* ---- The request ---- */

static void free_lists(lists *l) { MM_FREE(l->token.p, l->logprob.p, l->top.p, l->offset.p); }

static void close_state(void *state) {
  completions *s = state;
  for (uint32_t i = 0; s->logged && i < s->replies; i++) free_lists(&s->logged[i]);
  for (uint32_t i = 0; s->constraint && i < s->replies; i++) mm_constraint_close(s->constraint[i]);
  for (uint32_t i = 0; i < s->prompts; i++) {
    free_lists(&s->prompt[i].logged);
    MM_FREE(s->prompt[i].echoed.p, s->prompt[i].scores.p);
  }
  MM_FREE(s->logged, s->characters, s->sent, s->constraint, s->prompt, s);
}

static bool add_text(mm_call *c, const mm_value *v, mm_err *err) {
  int32_t *ids;
  size_t n;
  const bool special = ((const completions *)c->state)->special;
  return mm_tokenizer_encode(c->server->tokenizer, v->text, v->n, special, &ids, &n, err) && mm_call_add_prompt(c, ids, n, err);
}

static bool add_ids(mm_call *c, const mm_value *list, mm_err *err) {
  int32_t *ids = mm_calloc(list->count + 1, sizeof *ids, err);
  size_t n = 0;
  if (!ids) return false;
  for (const mm_value *v = list->first; v; v = v->next) {
    int64_t id;
    if (!mm_value_int(v, &id) || id < 0 || id >= c->server->vocab) {
      free(ids);
      return mm_refuse(c, 400, "prompt", "prompt: found %.*s, expected ids below %u", (int)mm_min(v->raw_n, 40), v->raw, c->server->vocab);
    }
    ids[n++] = (int32_t)id;
  }
  return mm_call_add_prompt(c, ids, n, err);
}

static bool add_prompt(mm_call *c, const mm_value *v, mm_err *err) {
  if (v->type == MM_VALUE_STRING) return add_text(c, v, err);
  if (v->type == MM_VALUE_ARRAY) return add_ids(c, v, err);
  return mm_refuse(c, 400, "prompt", "prompt: found %s, expected a string or a list", mm_value_word(v));
}

static bool read_prompts(mm_call *c, mm_err *err) {
  const mm_value *v = mm_value_get(c->body, "prompt");
  if (!v) return mm_refuse(c, 400, "prompt", "prompt: expected a text, token ids, or a list of those");
  if (v->type != MM_VALUE_ARRAY || !v->first || v->first->type == MM_VALUE_NUMBER) return add_prompt(c, v, err);
  if (v->count > MM_CHOICES) return mm_refuse(c, 400, "prompt", "prompt: found %zu, at most %d may be given", v->count, MM_CHOICES);
  for (v = v->first; v; v = v->next)
    if (!add_prompt(c, v, err)) return false;
  return true;
}

/* The prompt's text, special tokens too. */
static bool echo_prompts(mm_call *c, completions *s, mm_err *err) {
  for (uint32_t i = 0; i < c->prompts; i++) {
    mm_text *const text = &s->prompt[i].echoed;
    mm_utf8_stream u = {0};
    for (uint32_t j = 0; j < c->prompt_count[i]; j++) {
      size_t n;
      const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, c->prompt[i][j], &n);
      if (bytes && n) mm_print_utf8(&u, bytes, n, text);
    }
    mm_print_utf8(&u, "", 0, text);
    if (text->failed) return mm_fail_memory(err, c->prompt_count[i]);
  }
  return true;
}

static bool read_fields(mm_call *c, completions *s) {
  mm_params *p = &c->params;
  int64_t logprobs = -1, scores = -1;
  if (!mm_field_int(c, c->body, "logprobs", 0, MM_LOGPROBS, &logprobs) ||
      !mm_field_int(c, c->body, "prompt_logprobs", 0, MM_LOGPROBS, &scores) || !mm_field_bool(c, c->body, "echo", &s->echo) ||
      !mm_field_bool(c, c->body, "parse_special", &s->special))
    return false;
  if (s->echo && logprobs >= 0 && p->stream) return mm_refuse(c, 400, "echo", "echo: logprobs of a prompt are not served in a stream");
  if (scores >= 0 && p->stream) return mm_refuse(c, 400, "prompt_logprobs", "prompt_logprobs: not served in a stream");
  p->scores = scores >= 0;
  p->top_scores = p->scores ? (uint32_t)scores : 0;
  p->logprobs = logprobs >= 0;
  p->top_logprobs = p->logprobs ? (uint32_t)logprobs : 0;
  return true;
}

static bool constrain(mm_call *c, completions *s, const mm_content_rule *rule, mm_err *err) {
  mm_turn_sections a = {0};
  if (!mm_content_section(c, rule, &a, err)) return false;
  if (!a.count) return true;
  if (!(s->constraint = mm_calloc(s->replies, sizeof *s->constraint, err))) return false;
  for (uint32_t i = 0; i < s->replies; i++)
    if (!(s->constraint[i] = mm_constraint_open(c->server->lexicon, a.section, a.count, err))) return false;
  return true;
}

static bool begin(mm_call *c, mm_err *err) {
  mm_content_rule rule = {0};
  completions *s = mm_calloc(1, sizeof *s, err);
  if (!s) return false;
  s->special = c->server->trust_user;
  c->state = s;
  c->close_state = close_state;
  const bool some = mm_value_get(c->body, "max_tokens");
  if (!mm_params_read(c, err) || !read_fields(c, s) || !mm_content_read(c, &rule, err) || !read_prompts(c, err)) return false;
  if ((uint64_t)c->prompts * c->params.n > MM_CHOICES) return mm_refuse(c, 400, "n", "n: more than %d replies in all", MM_CHOICES);
  s->replies = c->prompts * c->params.n;
  if (!(s->prompt = mm_calloc(c->prompts, sizeof *s->prompt, err))) return false;
  s->prompts = c->prompts;
  if (s->echo && !echo_prompts(c, s, err)) return false;
  if (!(s->characters = mm_calloc(s->replies, sizeof *s->characters, err))) return false;
  if (!(s->sent = mm_calloc(s->replies, sizeof *s->sent, err))) return false;
  const bool logged = c->params.logprobs && (!c->params.stream || c->server->compat == MM_COMPAT_VLLM);
  if (logged && !(s->logged = mm_calloc(s->replies, sizeof *s->logged, err))) return false;
  if (!some) c->params.max_tokens = 16; /* as OpenAI has it */
  s->none = some && !c->params.max_tokens;
  if (s->none) c->params.max_tokens = 1;
  return constrain(c, s, &rule, err);
}

static void quote_id(const mm_call *c, int32_t id, mm_text *out) {
  size_t n = 0;
  const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, id, &n);
  mm_text_quote(out, bytes ? bytes : "", bytes ? n : 0);
}

/* JSON has no infinity: an id that is never sampled has the number that OpenAI and vLLM have for the least likely ones. */
static void put_logprob(double x, mm_text *out) { mm_text_real(out, isfinite(x) ? x : -9999); }

/* The likeliest tokens, and the token itself, as OpenAI has it, if only as one more. Tokens that are no UTF-8 by themselves are written
 * alike: a key stands once, for the token itself or else for the likeliest. */
static void add_top(const mm_call *c, const mm_token *t, mm_text *out) {
  const mm_logprob *l = t->logprobs; /* l[0] the token itself */
  mm_text name = {0};
  size_t end[MM_LOGPROBS + 2] = {0}; /* name k is [end[k], end[k + 1]) */
  bool written[MM_LOGPROBS + 1] = {0};
  const char *comma = "{";
  uint32_t n = 0;
  for (; n <= c->params.top_logprobs && l[n].id >= 0; n++) quote_id(c, l[n].id, &name), end[n + 1] = name.n;
  for (uint32_t i = 1; i <= n && !name.failed; i++) {
    const uint32_t k = i % n; /* the token itself is the last */
    const size_t own = end[k + 1] - end[k];
    bool there = false;
    for (uint32_t j = 0; j < n; j++) {
      const bool alike = j != k && end[j + 1] - end[j] == own && memcmp(name.p + end[j], name.p + end[k], own) == 0;
      there |= alike && (written[j] || (j == 0 && l[k].id != l[0].id));
    }
    if (there) continue;
    written[k] = true;
    mm_text_put(out, comma);
    comma = ",";
    mm_text_add(out, name.p + end[k], own);
    mm_text_put(out, ":");
    put_logprob((double)l[k].logprob, out);
  }
  mm_text_put(out, "}");
  out->failed |= name.failed;
  free(name.p);
}

static void add_logprobs(const mm_call *c, const mm_token *t, size_t offset, lists *l) {
  const char *comma = l->token.n ? "," : "";
  mm_text_put(&l->token, comma);
  quote_id(c, t->logprobs[0].id, &l->token);
  mm_text_put(&l->logprob, comma);
  put_logprob((double)t->logprobs[0].logprob, &l->logprob);
  mm_text_put(&l->top, comma);
  add_top(c, t, &l->top);
  mm_text_printf(&l->offset, "%s%zu", comma, offset);
}

static size_t characters_of(const char *text, size_t n) {
  size_t count = 0;
  for (size_t i = 0; i < n; i++) count += ((uint8_t)text[i] & 0xc0) != 0x80;
  return count;
}

/* The entry of a prompt's token is made: the characters that it completes come after its offset. */
static void pass_token(const mm_call *c, prompt_shown *p, int32_t id) {
  size_t n;
  const char *bytes = mm_tokenizer_bytes(c->server->tokenizer, id, &n);
  mm_text text = {0};
  if (bytes && n) mm_print_utf8(&p->utf8, bytes, n, &text);
  p->characters += characters_of(text.p ? text.p : "", text.n);
  p->logged.token.failed |= text.failed;
  free(text.p);
}

static prompt_shown *prompt_of(const mm_choice *ch) { return &((completions *)ch->call->state)->prompt[ch->index / ch->call->params.n]; }

/* vLLM's entry of a prompt's token: it and the likeliest, by their ids. The rank of one that is not among these is not known. */
static void add_score(const mm_call *c, const mm_token *t, mm_text *out) {
  const mm_logprob *own = &t->logprobs[0];
  for (uint32_t i = 0; i <= c->params.top_scores; i++) {
    const mm_logprob *l = &t->logprobs[i];
    uint32_t rank = 1;
    if (i && (l->id < 0 || l->id == own->id)) continue;
    while (rank <= t->top && t->logprobs[rank].id != l->id) rank++;
    mm_text_printf(out, "%s\"%d\":{\"logprob\":", i ? "," : ",{", l->id);
    put_logprob((double)l->logprob, out);
    if (rank <= t->top)
      mm_text_printf(out, ",\"rank\":%u,\"decoded_token\":", rank);
    else
      mm_text_put(out, ",\"rank\":null,\"decoded_token\":");
    quote_id(c, l->id, out);
    mm_text_put(out, "}");
  }
  mm_text_put(out, "}");
}

/* A token of the prompt but the first. */
static void scored(void *user, const mm_token *t) {
  const mm_choice *ch = user;
  const completions *s = ch->call->state;
  prompt_shown *p = prompt_of(ch);
  if (ch->call->params.scores) add_score(ch->call, t, &p->scores);
  if (!s->echo || !s->logged) return;
  add_logprobs(ch->call, t, p->characters, &p->logged);
  pass_token(ch->call, p, t->id);
}

static const uint32_t *allow(void *constraint) { return mm_constraint_allowed(constraint); }
static bool chosen(void *constraint, int32_t id) {
  mm_constraint_chosen(constraint, id);
  return !mm_constraint_over(constraint);
}

/* The first token of an echoed prompt has no logprob. */
static void shape(mm_choice *ch, mm_generation_settings *set) {
  const mm_call *c = ch->call;
  completions *s = c->state;
  set->constraint = s->constraint ? s->constraint[ch->index] : NULL;
  set->allow = allow;
  set->chosen = chosen;
  prompt_shown *p = prompt_of(ch);
  const bool logged = s->echo && s->logged;
  if (logged) s->characters[ch->index] = characters_of(p->echoed.p, p->echoed.n);
  if (ch->index % c->params.n || (!logged && !c->params.scores)) return;
  set->scored = scored;
  if (c->params.scores) mm_text_put(&p->scores, "[null");
  if (!logged) return;
  const int32_t first = c->prompt[ch->index / c->params.n][0];
  lists *l = &p->logged;
  quote_id(c, first, &l->token);
  mm_text_put(&l->logprob, "null");
  mm_text_put(&l->top, "null");
  mm_text_put(&l->offset, "0");
  pass_token(c, p, first);
}

static bool start(mm_call *c, mm_err *err) {
  if (!mm_call_start(c, shape, err)) return false;
  if (c->params.stream) mm_call_stream(c);
  return true;
}

/* ---- The reply ---- */

/* One of the four lists, of a prompt and the reply to it. */
static void put_list(const char *name, const mm_text *prompt, const mm_text *reply, mm_text *out) {
  mm_text_put(out, name);
  mm_text_add(out, prompt->p ? prompt->p : "", prompt->n);
  if (prompt->n && reply->n) mm_text_put(out, ",");
  mm_text_add(out, reply->p ? reply->p : "", reply->n);
  out->failed |= prompt->failed || reply->failed;
}

/* prompt: the entries of an echoed one, or none. */
static void put_logprobs(const lists *prompt, const lists *l, mm_text *out) {
  put_list("{\"tokens\":[", &prompt->token, &l->token, out);
  put_list("],\"token_logprobs\":[", &prompt->logprob, &l->logprob, out);
  put_list("],\"top_logprobs\":[", &prompt->top, &l->top, out);
  put_list("],\"text_offset\":[", &prompt->offset, &l->offset, out);
  mm_text_put(out, "]}");
}

static void put_head(mm_call *c) {
  mm_text_printf(&c->out, "{\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":%lld,\"model\":", c->id, (long long)c->created);
  mm_openai_put_model(c);
}

/* One choice of a stream; end NULL: not its last. */
static void put_piece(mm_choice *ch, const char *text, size_t n, const lists *l, const mm_ending *end) {
  mm_call *c = ch->call;
  put_head(c);
  mm_text_printf(&c->out, ",\"choices\":[{\"index\":%u,\"text\":", ch->index);
  mm_text_quote(&c->out, text, n);
  mm_text_put(&c->out, ",\"logprobs\":");
  if (l)
    put_logprobs(&(lists){0}, l, &c->out);
  else
    mm_text_put(&c->out, "null");
  if (end) {
    mm_text_printf(&c->out, ",\"finish_reason\":\"%s\"", mm_openai_finish(end));
    mm_openai_stop_reason(c, end, &c->out);
  } else {
    mm_text_put(&c->out, ",\"finish_reason\":null");
  }
  mm_openai_end_chunk(ch);
}

/* A choice's text behind so many bytes; empty where there is none yet. */
static const char *text_from(const mm_choice *ch, size_t from) { return from < ch->text.n ? ch->text.p + from : ""; }

/* The text since the last piece. */
static void send_piece(mm_choice *ch, const lists *l, const mm_ending *end) {
  const completions *s = ch->call->state;
  const size_t from = s->sent[ch->index];
  s->sent[ch->index] = ch->text.n;
  put_piece(ch, text_from(ch, from), ch->text.n - from, l, end);
}

static void prefill(mm_choice *ch) { put_piece(ch, "", 0, NULL, NULL); }

static void send_echo(mm_choice *ch) {
  const completions *s = ch->call->state;
  if (s->echo) put_piece(ch, prompt_of(ch)->echoed.p, prompt_of(ch)->echoed.n, NULL, NULL);
}

static void token(mm_choice *ch, const mm_token *t) {
  mm_call *c = ch->call;
  completions *s = c->state;
  const bool logged = t->logprobs && c->params.logprobs; /* also of one that a stop string cut */
  const size_t before = ch->text.n, offset = s->characters[ch->index];
  const bool first = ch->tokens == 1;
  if (s->none) ch->tokens = 0; /* it is none of the reply's */
  if (c->params.stream && first) send_echo(ch);
  if (s->none) return;
  if (t->n) mm_print_utf8(&ch->utf8, t->bytes, t->n, &ch->text);
  s->characters[ch->index] += characters_of(text_from(ch, before), ch->text.n - before);
  if (!c->params.stream || ch->closing) {
    if (logged) add_logprobs(c, t, offset, &s->logged[ch->index]);
    return;
  }
  if (ch->text.n == before && !logged) return;
  lists one = {0};
  if (logged) add_logprobs(c, t, offset, &one);
  send_piece(ch, logged ? &one : NULL, NULL);
  free_lists(&one);
}

/* Where no reply is wanted, its one token does not say how it ended. */
static void end_of_none(mm_ending *e) {
  e->progress.reply_tokens = 0;
  if (e->reason != MM_FINISH_STOP) return;
  e->reason = MM_FINISH_LENGTH;
  e->stop = e->end_id = -1;
}

static void ended(mm_choice *ch) {
  mm_call *c = ch->call;
  if (c->params.stream && ch->last <= 0) send_echo(ch);
  const completions *s = c->state;
  const bool said = ch->ending.reason == MM_FINISH_STOP || ch->ending.reason == MM_FINISH_LENGTH;
  if (s->constraint && said && mm_constraint_stuck(s->constraint[ch->index])) {
    mm_refuse(c, 400, NULL, "after %zu bytes of the reply nothing may follow", ch->text.n);
    ch->ending.reason = MM_FINISH_ERROR;
  }
  mm_print_utf8(&ch->utf8, "", 0, &ch->text);
  if (s->none) end_of_none(&ch->ending);
  const lists *l = s->logged && s->logged[ch->index].token.n ? &s->logged[ch->index] : NULL;
  if (c->params.stream) send_piece(ch, l, &ch->ending);
}

static void put_choice(mm_call *c, mm_choice *ch) {
  const completions *s = c->state;
  const prompt_shown *p = prompt_of(ch);
  mm_text whole = {0};
  if (s->echo) mm_text_add(&whole, p->echoed.p, p->echoed.n);
  mm_text_add(&whole, ch->text.p, ch->text.n);
  mm_text_printf(&c->out, "%s{\"index\":%u,\"text\":", ch->index ? "," : "", ch->index);
  mm_text_quote(&c->out, whole.p, whole.n);
  c->out.failed |= whole.failed;
  free(whole.p);
  mm_text_put(&c->out, ",\"logprobs\":");
  if (s->logged)
    put_logprobs(&p->logged, &s->logged[ch->index], &c->out);
  else
    mm_text_put(&c->out, "null");
  mm_text_printf(&c->out, ",\"finish_reason\":\"%s\"", mm_openai_finish(&ch->ending));
  mm_openai_stop_reason(c, &ch->ending, &c->out);
  mm_text_put(&c->out, ",\"prompt_logprobs\":");
  mm_text_add(&c->out, p->scores.n ? p->scores.p : "null", p->scores.n ? p->scores.n : 4);
  mm_text_put(&c->out, p->scores.n ? "]}" : "}");
  c->out.failed |= p->scores.failed;
}

static void finish(mm_call *c) { mm_openai_end(c, put_head, put_choice, 0); }

const mm_api mm_api_completions = {.path = "/v1/completions", .prompt = "prompt", MM_API_REPLIES, .prefill = prefill};
