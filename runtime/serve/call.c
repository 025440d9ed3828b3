/* Requests: from the body to generations, from their tokens to a reply, and what goes wrong in between. */
#include "runtime/serve/call.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "runtime/chat/prompt.h"
#include "runtime/serve/field_table.h"
#include "runtime/serve/keys.h"

#define ASIDE   ((size_t)16 << 10) /* a body of more bytes is read and tokenised outside the loop's thread */
#define LENGTHY ((size_t)1 << 20)  /* so many take a second or more */

/* ---- Refusals ---- */

bool mm_refuse(mm_call *c, int status, const char *param, const char *fmt, ...) {
  if (c->refused) return false;
  char raw[512];
  va_list args;
  va_start(args, fmt);
  vsnprintf(raw, sizeof raw, fmt, args);
  va_end(args);
  c->refused = status;
  if (param) snprintf(c->param, sizeof c->param, "%.*s", (int)strcspn(param, "."), param); /* the request's own field, of one within it */
  mm_show(c->reason, sizeof c->reason, raw);
  return false;
}

static int status_of(const mm_err *err) {
  if (strcmp(err->code, "E_QUEUE") == 0) return 429;
  switch (err->status) {
    case MM_USAGE:
    case MM_BAD_INPUT:
    case MM_UNSUPPORTED: return 400;
    case MM_LIMIT: return strcmp(err->code, "E_LIMIT") == 0 ? 400 : 503;
    default: return 500;
  }
}

/* The APIs' names of an error of this status, and OpenAI's code of it. */
typedef struct naming {
  int status;
  const char *openai, *anthropic, *code;
} naming;

static naming naming_of(int status) {
  static const naming named[] = {
      {401, "authentication_error", "authentication_error", "invalid_api_key"},
      {403, "permission_error", "permission_error", NULL},
      {404, "not_found_error", "not_found_error", "not_found"},
      {413, "invalid_request_error", "request_too_large", "request_too_large"},
      {429, "rate_limit_error", "rate_limit_error", "queue_full"},
      {503, "service_unavailable_error", "overloaded_error", NULL},
      {504, "server_error", "timeout_error", NULL},
  };
  for (size_t i = 0; i < sizeof named / sizeof *named; i++)
    if (named[i].status == status) return named[i];
  return status < 500 ? (naming){status, "invalid_request_error", "invalid_request_error", NULL}
                      : (naming){status, "server_error", "api_error", NULL};
}

void mm_call_error(const mm_call *c, int status, const char *param, const char *text, mm_text *out) {
  const naming n = naming_of(status);
  if (c->api->anthropic) {
    mm_text_printf(out, "{\"type\":\"error\",\"error\":{\"type\":\"%s\",\"message\":", n.anthropic);
    mm_text_quote_string(out, text);
    mm_text_printf(out, "},\"request_id\":\"req_%s\"}", c->id);
    return;
  }
  mm_text_put(out, "{\"error\":{\"message\":");
  mm_text_quote_string(out, text);
  mm_text_printf(
      out, ",\"type\":\"%s\",\"param\":", c->too_long && c->server->compat == MM_COMPAT_LLAMA ? "exceed_context_size_error" : n.openai);
  mm_text_quote_or_null(out, param && *param ? param : NULL);
  mm_text_put(out, ",\"code\":");
  mm_text_quote_or_null(out, c->code ? c->code : n.code);
  if (c->too_long) mm_text_printf(out, ",\"n_prompt_tokens\":%zu,\"n_ctx\":%u", c->too_long, c->server->positions);
  mm_text_put(out, "}}");
}

/* ---- Reports of the load ---- */

#define LOAD_FORM "endpoint-load-metrics-format"

/* A load balancer may send for a report with each reply that is generated (ORCA, which has a third form, BIN, for gRPC). */
static bool read_load_form(mm_call *c) {
  static const char *const form[] = {"TEXT", "JSON"};
  const char *wanted = c->api->token ? mm_exchange_header(c->x, LOAD_FORM) : NULL;
  for (size_t i = 0; wanted && i < sizeof form / sizeof *form; i++)
    if (strcasecmp(wanted, form[i]) == 0) c->load = form[i];
  return !wanted || c->load || mm_refuse(c, 400, NULL, LOAD_FORM ": found \"%.40s\", expected TEXT or JSON", wanted);
}

/* vLLM's two metrics under its names, as they are when the reply begins. */
static void report_load(mm_call *c) {
  mm_scheduler_stats s;
  char value[200];
  if (!c->load || !c->server->scheduler) return;
  mm_scheduler_stats_read(c->server->scheduler, &s);
  snprintf(value, sizeof value,
           *c->load == 'T' ? "TEXT named_metrics.kv_cache_usage_perc=%.6f, named_metrics.num_requests_waiting=%u"
                           : "JSON {\"named_metrics\": {\"kv_cache_usage_perc\": %.6f, \"num_requests_waiting\": %u}}",
           mm_scheduler_cache_usage(&s), s.waiting);
  mm_exchange_set(c->x, "endpoint-load-metrics", value);
}

/* ---- Beginning and ending ---- */

static void call_free(mm_call *c) {
  for (uint32_t i = 0; i < c->prompts; i++) free(c->prompt[i]);
  for (uint32_t i = 0; i < c->choices; i++) {
    free(c->choice[i].text.p);
    free(c->choice[i].logprobs.p);
  }
  if (c->close_state) c->close_state(c->state);
  MM_FREE(c->choice, c->prompt, c->prompt_count, c->out.p, c->echo.p);
  mm_forms_release(&c->forms);
  mm_arena_close(&c->arena);
  c->server->calls--;
  free(c);
}

/* The exchange has ended. */
static void close_call(mm_call *c) {
  mm_metrics *m = &c->server->metrics;
  if (c->choices) mm_histogram_add(&m->whole, mm_now() - c->begun);
  const mm_progress p = mm_call_usage(c);
  const mm_log_call line = {.id = c->id,
                            .peer = c->peer,
                            .method = c->method,
                            .path = c->path,
                            .reason = c->refused ? c->reason : NULL,
                            .trace = c->trace,
                            .status = c->status,
                            .seconds = mm_now() - c->begun,
                            .choices = c->choices,
                            .prompt_tokens = p.prompt_tokens,
                            .cached_tokens = p.cached_tokens,
                            .reply_tokens = p.reply_tokens};
  mm_log_request(&c->server->log, &line);
  call_free(c);
}

static void send_whole(mm_call *c, int status, const char *body, size_t n) {
  c->status = status;
  report_load(c);
  if (status == 429 || status == 503) mm_exchange_set(c->x, "Retry-After", "1");
  if (status == 401) mm_exchange_set(c->x, "WWW-Authenticate", "Bearer");
  mm_exchange_reply(c->x, status, "application/json", body, n);
}

static void reply_refusal(mm_call *c, int status, const char *param, const char *text) {
  mm_text out = {0};
  mm_call_error(c, status, param, text, &out);
  send_whole(c, status, out.failed ? "{}" : out.p, out.failed ? 2 : out.n);
  free(out.p);
}

void mm_call_reply(mm_call *c) {
  if (c->out.failed) {
    reply_refusal(c, 503, NULL, "out of memory");
    return;
  }
  c->status = 200;
  report_load(c);
  mm_exchange_reply_text(c->x, 200, "application/json", &c->out); /* it may have 100 MB: ids of a long text */
}

bool mm_call_answer(mm_call *c, mm_err *err) {
  (void)err;
  mm_call_reply(c);
  return true;
}

void mm_call_stream(mm_call *c) {
  c->streaming = true;
  c->status = 200;
  report_load(c);
  mm_exchange_set(c->x, "Cache-Control", "no-cache");
  mm_exchange_set(c->x, "X-Accel-Buffering", "no");
  mm_exchange_start(c->x, 200, "text/event-stream; charset=utf-8");
}

/* At the end of the server the last tokens come after the scheduler has gone. */
static void cancel(mm_choice *ch) {
  if (ch->generation && ch->call->server->scheduler) mm_generation_cancel(ch->generation);
}

static void cancel_all(mm_call *c) {
  for (uint32_t i = 0; i < c->choices; i++) cancel(&c->choice[i]);
}

void mm_call_event(mm_call *c, const char *event) {
  mm_text t = {0};
  if (event) mm_text_printf(&t, "event: %s\n", event);
  mm_text_put(&t, "data: ");
  mm_text_add(&t, c->out.p, c->out.n);
  mm_text_put(&t, "\n\n");
  if (t.failed || c->out.failed || !mm_exchange_piece(c->x, t.p, t.n)) cancel_all(c);
  free(t.p);
  mm_text_clear(&c->out);
}

mm_progress mm_call_usage(const mm_call *c) {
  mm_progress sum = {0};
  for (uint32_t i = 0; i < c->choices; i++) {
    const mm_progress *p = &c->choice[i].ending.progress;
    sum.reply_tokens += p->reply_tokens;
    sum.drafted += p->drafted;
    sum.accepted += p->accepted;
    if (i % c->params.n) continue; /* choices of one prompt share it */
    sum.prompt_tokens += c->prompt_count[i / c->params.n];
    sum.cached_tokens += p->cached_tokens;
  }
  return sum;
}

void mm_call_put_drafts(const mm_call *c, const mm_progress *usage, mm_text *out) {
  if (c->params.show_drafts) mm_text_printf(out, ",\"num_draft_tokens\":%u,\"num_accepted_tokens\":%u", usage->drafted, usage->accepted);
}

const char *mm_choice_failure(const mm_choice *ch, int *status) {
  switch (ch->ending.reason) {
    case MM_FINISH_ERROR: return *status = 500, "the engine failed; the server's log says how";
    case MM_FINISH_DEADLINE: return *status = 504, "the request's time is over";
    case MM_FINISH_CANCELLED: return *status = 503, "the request was cancelled, the server is about to end";
    default: return *status = 200, NULL;
  }
}

const mm_choice *mm_call_failed(const mm_call *c) {
  int status;
  for (uint32_t i = 0; i < c->choices; i++)
    if (mm_choice_failure(&c->choice[i], &status)) return &c->choice[i];
  return NULL;
}

#define WORDY ((uint64_t)1 << 16) /* tokens and likely ones in a whole reply, of which more are written outside the loop's thread */

/* What a whole reply may have to say of its prompts and tokens. */
static uint64_t words_of(const mm_call *c) {
  const mm_params *p = &c->params;
  uint64_t tokens = mm_call_usage(c).reply_tokens;
  for (uint32_t i = 0; i < c->choices; i++) tokens += c->prompt_count[i / p->n];
  return tokens * (1 + (p->logprobs ? p->top_logprobs : 0) + (p->scores ? p->top_scores : 0));
}

/* In any thread. */
static void write_reply(void *user) {
  mm_call *c = user;
  if (!atomic_load(&c->left)) c->api->finish(c);
}

static void send_reply(void *user) {
  mm_call *c = user;
  const bool left = mm_exchange_gone(c->x);
  mm_call_reply(c);
  if (left) c->status = 499; /* as nginx logs it */
  close_call(c);
}

static void finish_whole(mm_call *c) {
  const uint64_t words = words_of(c);
  if (words > WORDY && c->server->workers) {
    c->job = (mm_job){.fn = write_reply, .done = {.fn = send_reply, .user = c}};
    mm_workers_do(c->server->workers, &c->job, words > 16 * WORDY);
    return;
  }
  write_reply(c);
  send_reply(c);
}

/* Every choice has ended. */
static void finish(mm_call *c) {
  const mm_choice *failed = mm_call_failed(c);
  const bool left = mm_exchange_gone(c->x);
  int status = c->refused;
  const char *text = c->refused ? c->reason : failed ? mm_choice_failure(failed, &status) : NULL;
  if (text && !c->streaming) {
    reply_refusal(c, status, c->refused ? c->param : NULL, text);
  } else if (text) {
    mm_text_clear(&c->out);
    if (c->api->failed) {
      c->api->failed(c, text);
    } else {
      mm_call_error(c, status, c->refused ? c->param : NULL, text, &c->out);
      mm_call_event(c, c->api->anthropic ? "error" : NULL);
    }
    mm_exchange_end(c->x);
    c->status = status;
  } else if (!c->streaming) {
    finish_whole(c);
    return;
  } else {
    c->api->finish(c);
  }
  if (left) c->status = 499;
  close_call(c);
}

static void gone(void *user) {
  mm_call *c = user;
  atomic_store(&c->left, true);
  cancel_all(c);
}

/* ---- Choices ---- */

static void on_prefill(void *user, uint32_t tokens, uint32_t cached) {
  mm_choice *ch = user;
  const double time = mm_now();
  if (ch->prefill_began <= 0) ch->prefill_began = time;
  ch->prefilled = tokens;
  ch->prefill_seconds = time - ch->prefill_began;
  ch->cached = cached;
  ch->prefilling = true;
  if (!ch->call->refused && !mm_exchange_gone(ch->call->x)) ch->call->api->prefill(ch);
  ch->prefilling = false;
}

static void on_token(void *user, const mm_token *t) {
  mm_choice *ch = user;
  const double time = mm_now();
  mm_metrics *m = &ch->call->server->metrics;
  mm_histogram_add(ch->last > 0 ? &m->between_tokens : &m->first_token, time - (ch->last > 0 ? ch->last : ch->call->begun));
  if (ch->last <= 0) {
    ch->first = time;
    ch->began = t->began;
    ch->cached = t->cached;
    m->prompt_seconds += time - t->began;
  }
  ch->last = time;
  ch->tokens++;
  ch->closing = t->last && ch->call->server->compat == MM_COMPAT_VLLM;
  if (!ch->call->refused && !mm_exchange_gone(ch->call->x)) ch->call->api->token(ch, t);
}

/* What the choice's end adds to the metrics. */
static void measure(const mm_choice *ch, const mm_progress *p) {
  const mm_call *c = ch->call;
  mm_metrics *m = &c->server->metrics;
  m->finished[ch->ending.reason]++;
  m->longest = mm_max(m->longest, c->prompt_count[ch->index / c->params.n] + p->reply_tokens);
  mm_histogram_count(&m->prompt, p->prompt_tokens);
  mm_histogram_count(&m->reply, p->reply_tokens);
  mm_histogram_count(&m->most, ch->most);
  mm_histogram_count(&m->preempted, p->preempted);
  if (ch->index % c->params.n == 0) mm_histogram_count(&m->choices, c->params.n);
  if (p->began > 0) mm_histogram_add(&m->queue, p->began - c->begun);
  if (ch->last <= 0) return;
  mm_histogram_add(&m->prefill, ch->first - p->began);
  mm_histogram_add(&m->decode, ch->last - ch->first);
  mm_histogram_add(&m->inference, ch->last - p->began);
}

static void on_done(void *user, const mm_ending *end) {
  mm_choice *ch = user;
  mm_call *c = ch->call;
  ch->ending = *end;
  ch->generation = NULL;
  measure(ch, &end->progress);
  if (end->err) mm_log_error(&c->server->log, c->id, end->err);
  ch->ending.err = NULL;
  int status;
  if (!c->refused && !mm_exchange_gone(c->x) && !mm_choice_failure(ch, &status)) {
    c->api->ended(ch);
    if (c->refused) cancel_all(c); /* nobody reads the other choices */
  }
  if (--c->open == 0) finish(c);
}

bool mm_call_add_prompt(mm_call *c, int32_t *ids, size_t count, mm_err *err) {
  const uint32_t most = c->server->positions;
  size_t cap = c->prompts, cap2 = c->prompts;
  const bool fits = count > 0 && count < most;
  if (!fits || !MM_GROW(c->prompt, &cap, c->prompts + 1, err) || !MM_GROW(c->prompt_count, &cap2, c->prompts + 1, err)) {
    free(ids);
    if (!count) return mm_refuse(c, 400, c->api->prompt, "the prompt is empty");
    if (fits) return false;
    c->code = "context_length_exceeded"; /* agents look for this, or for the words, and then shorten their history */
    c->too_long = count;
    return mm_refuse(c, 400, c->api->prompt,
                     "prompt is too long: %zu tokens > %u maximum; the maximum context length is %u tokens, the reply's included", count,
                     most - 1, most);
  }
  c->prompt[c->prompts] = ids;
  c->prompt_count[c->prompts++] = (uint32_t)count;
  size_t place = 0;
  const char *media = mm_prompt_media(c->server->tokenizer, ids, count, &place);
  if (media)
    return mm_refuse(c, 400, c->api->prompt, "token %zu of the prompt is %s: images and video are not served, text is", place, media);
  return true;
}

static mm_generation_settings settings(const mm_call *c, mm_choice *ch, uint32_t prompt) {
  const mm_params *p = &c->params;
  const uint32_t left = c->server->positions - c->prompt_count[prompt];
  mm_generation_settings set = {
      .request = {.prompt = c->prompt[prompt],
                  .prompt_count = c->prompt_count[prompt],
                  .max_tokens = p->max_tokens ? (uint32_t)mm_min(p->max_tokens, left) : left,
                  .sampling = p->sampling,
                  .stop = p->end,
                  .stop_count = p->end_count,
                  .salt = p->salt,
                  .together = c,
                  .drafts = p->drafts,
                  .priority = p->priority,
                  .reserved = true,
                  .deadline = p->deadline},
      .stop = p->stop,
      .stop_count = p->stop_count,
      .keep_stop = p->include_stop,
      .special = p->special,
      .user = ch,
      .prefill = p->progress && p->stream && c->api->prefill ? on_prefill : NULL,
      .token = on_token,
      .done = on_done,
  };
  set.request.sampling.seed += UINT64_C(0x9e3779b97f4a7c15) * (ch->index % p->n);
  if (p->logprobs || p->scores)
    set.request.sampling.top_logprobs = (uint32_t)mm_max(1, mm_max(p->logprobs ? p->top_logprobs : 0, p->scores ? p->top_scores : 0));
  return set;
}

bool mm_call_start(mm_call *c, void (*shape)(mm_choice *ch, mm_generation_settings *set), mm_err *err) {
  const uint32_t n = c->prompts * c->params.n;
  const uint64_t most = mm_scheduler_capacity(c->server->scheduler);
  if (n > most)
    return mm_refuse(c, 400, c->params.n > 1 ? "n" : c->api->prompt,
                     "%u replies in all, this server takes %llu (--max-num-seqs, --max-queue)", n, (unsigned long long)most);
  if (!(c->choice = mm_calloc(n, sizeof *c->choice, err)) || !mm_scheduler_reserve(c->server->scheduler, n, err)) return false;
  for (uint32_t i = 0; i < n; i++) {
    mm_choice *ch = &c->choice[i];
    *ch = (mm_choice){.call = c, .index = i};
    mm_generation_settings set = settings(c, ch, i / c->params.n);
    if (shape) shape(ch, &set);
    ch->most = set.request.max_tokens;
    if (!(ch->generation = mm_generation_start(c->server->scheduler, c->server->outbox, c->server->tokenizer, &set, err))) {
      mm_scheduler_release(c->server->scheduler, n - i - 1);
      cancel_all(c);
      return false;
    }
    c->choices++;
    c->open++;
  }
  return true;
}

/* ---- From the exchange ---- */

static bool name_known(mm_call *c) {
  const mm_server *s = c->server;
  const mm_value *model = mm_value_get(c->body, "model");
  if (!model || s->any_name) return true;
  if (model->type != MM_VALUE_STRING) return mm_refuse(c, 400, "model", "model: found %s, expected a string", mm_value_word(model));
  for (size_t i = 0; i < s->names; i++)
    if (mm_value_is(model, s->name[i])) return true;
  c->code = "model_not_found";
  return mm_refuse(c, 404, "model", "the model \"%.100s\" is not served here, \"%s\" is", MM_SHOWN_VALUE(model), s->name[0]);
}

static bool parse_body(mm_call *c, mm_err *err) {
  size_t n;
  const char *text = mm_exchange_body(c->x, &n);
  if (!n) return mm_refuse(c, 400, NULL, "the body is empty, expected a JSON object");
  if (!(c->body = mm_body_parse(&c->arena, text, n, err))) return false;
  if (c->body->type != MM_VALUE_OBJECT) return mm_refuse(c, 400, NULL, "the body is %s, expected an object", mm_value_word(c->body));
  return true;
}

/* Reads a small body in the loop's thread. True if the rest is to be done in another one. */
static bool goes_aside(mm_call *c, size_t n) {
  if (n > ASIDE || c->api->bodiless) return n > ASIDE;
  return parse_body(c, &c->err) && mm_field_holds(c->body);
}

/* In any thread. */
static void prepare(void *user) {
  mm_call *c = user;
  if (atomic_load(&c->left)) return; /* nobody reads the answer */
  const bool read = c->api->bodiless || c->body || parse_body(c, &c->err);
  c->begun_well = read && !c->refused && (c->api->bodiless || name_known(c)) && c->api->begin(c, &c->err);
  if (c->begun_well) c->blamed = NULL;
}

/* After prepare, or a refusal before it. */
static void conclude(void *user) {
  mm_call *c = user;
  const mm_err *err = &c->err;
  if (mm_exchange_gone(c->x)) mm_refuse(c, 499, NULL, "the client has left");
  if (c->begun_well && !c->refused && c->api->start(c, &c->err)) {
    if (!c->open) close_call(c); /* answered already */
    return;
  }
  if (!c->refused) {
    const int status = status_of(err);
    if (status >= 500 && strcmp(err->code, "E_DRAINING") != 0) mm_log_error(&c->server->log, c->id, err);
    mm_refuse(c, status, status == 400 ? c->blamed : NULL, "%s", err->text);
  }
  if (!c->open) finish(c);
}

/* vLLM refuses bodies of other types, curl's default among them. */
static bool json_type(mm_call *c) {
  static const char json[] = "application/json";
  const char *type = mm_exchange_header(c->x, "Content-Type");
  if (!type) return mm_refuse(c, 400, NULL, "Content-Type: found none, expected %s", json);
  const size_t n = strcspn(type, ";");
  return (n == strlen(json) && strncasecmp(type, json, n) == 0) ||
         mm_refuse(c, 400, NULL, "Content-Type: found %.80s, expected %s", type, json);
}

/* A body is read as it comes. */
static bool plain_body(mm_call *c) {
  const char *coding;
  for (size_t i = 0; (coding = mm_exchange_header_at(c->x, "Content-Encoding", i)); i++)
    if (*coding && strcasecmp(coding, "identity") != 0)
      return mm_refuse(c, 415, NULL, "Content-Encoding: found %.40s, expected none", coding);
  return true;
}

static bool admitted(mm_call *c) {
  const mm_server *s = c->server;
  if (!c->api->keyless && !mm_keys_admit(s->key, s->keys, c->x)) return mm_refuse(c, 401, NULL, "a valid API key is needed");
  if (c->api->bodiless) return true;
  if (!plain_body(c) || (s->compat == MM_COMPAT_VLLM && !json_type(c))) return false;
  if (s->state == MM_SERVER_LOADING) return mm_refuse(c, 503, NULL, "the model is being loaded");
  if (s->state == MM_SERVER_DRAINING) return mm_refuse(c, 503, NULL, "the server is about to end");
  c->params.sampling = s->defaults;
  c->params.drafts = MM_DRAFTS;
  return read_load_form(c);
}

/* Version 00: "00-", 32, 16 and 2 small hexadecimal digits with - between them, the two ids not all zero. Others are ignored, as it asks.
 */
static bool is_trace(const char *t) {
  static const char form[] = "00-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-xxxxxxxxxxxxxxxx-xx";
  size_t i = 0;
  for (; form[i] && t[i]; i++)
    if (form[i] == 'x' ? !strchr("0123456789abcdef", t[i]) : t[i] != form[i]) return false;
  return !form[i] && !t[i] && strspn(t + 3, "0") < 32 && strspn(t + 36, "0") < 16;
}

void mm_call_begin(mm_server *s, mm_exchange *x, const mm_api *api) {
  mm_call *c = calloc(1, sizeof *c);
  uint8_t random[12] = {0};
  if (!c) {
    mm_exchange_reply(x, 503, "text/plain", "", 0);
    return;
  }
  *c = (mm_call){.server = s, .x = x, .api = api, .forms.cache = s->forms, .begun = mm_now(), .created = (int64_t)time(NULL)};
  snprintf(c->method, sizeof c->method, "%s", mm_exchange_method(x));
  snprintf(c->path, sizeof c->path, "%s", mm_exchange_path(x));
  snprintf(c->peer, sizeof c->peer, "%s", mm_exchange_peer(x));
  const char *trace = mm_exchange_header(x, "traceparent");
  if (trace && !mm_exchange_header_at(x, "traceparent", 1) && is_trace(trace)) snprintf(c->trace, sizeof c->trace, "%s", trace);
  s->calls++;
  if (getrandom(random, sizeof random, 0) != sizeof random) mm_refuse(c, 500, NULL, "no random numbers");
  for (size_t i = 0; i < sizeof random; i++) snprintf(c->id + 2 * i, 3, "%02x", random[i]);
  mm_exchange_set(x, "X-Request-Id", c->id);
  if (api->anthropic) mm_exchange_set(x, "request-id", c->id);
  mm_exchange_on_gone(x, gone, c);
  size_t n = 0;
  if (!c->refused && admitted(c)) {
    mm_exchange_body(x, &n);
    if (goes_aside(c, n)) {
      c->job = (mm_job){.fn = prepare, .done = {.fn = conclude, .user = c}};
      mm_workers_do(s->workers, &c->job, n > LENGTHY);
      return;
    }
    prepare(c);
  }
  conclude(c);
}
