/* The load test of a server: options, prompts, arrivals. */
#include "runtime/bench/load_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/option.h"
#include "runtime/bench/load_report.h"

#define LENGTH_MAX (1u << 20)
#define SET_MAX    (UINT64_C(2) << 30) /* bytes of --dataset-path */

typedef struct load_args {
  const char *url, *model, *endpoint, *goodput, *dataset;
  uint64_t requests, input, output, vocab, concurrency, seed;
  double ratio, rate, timeout;
  bool stop_at_eos, json, quiet;
} load_args;

/* ---- draws ---- */

static uint64_t draw(uint64_t *state) { /* SplitMix64 (Steele, Lea, Flood 2014) */
  uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static double fraction(uint64_t *state) { return ((double)(draw(state) >> 11) + 0.5) * 0x1p-53; } /* in (0, 1) */

/* A length between (1 - ratio) and (1 + ratio) of n, each as likely. */
static uint64_t length(uint64_t n, double ratio, uint64_t *state) {
  const double low = floor((double)n * (1 - ratio)), high = ceil((double)n * (1 + ratio));
  return (uint64_t)fmax(1, low + floor(fraction(state) * (high - low + 1)));
}

/* ---- requests ---- */

/* A prompt of so many token ids, or in chat of so many words, which are about as many tokens. */
static void put_prompt(mm_text *t, const load_args *a, bool chat, uint64_t n, uint64_t *state) {
  static const char *const words[] = {" one", " two", " red", " day", " sea", " man", " new", " old", " big", " way"};
  if (chat) mm_text_put(t, "\"messages\":[{\"role\":\"user\",\"content\":\"");
  if (!chat) mm_text_put(t, "\"prompt\":[");
  for (uint64_t i = 0; i < n; i++) {
    const uint64_t x = draw(state);
    if (chat)
      mm_text_put(t, words[x % (sizeof words / sizeof *words)]);
    else
      mm_text_printf(t, "%s%llu", i ? "," : "", (unsigned long long)(a->vocab / 8 + x % (a->vocab - a->vocab / 8)));
  }
  mm_text_put(t, chat ? "\"}]" : "]");
}

/* The first question of conversation `i` of a ShareGPT file: [{"conversations": [{"from": "human", "value": TEXT}, …]}, …]; NULL with an
 * error. */
static const char *question(const mm_json *set, const char *path, size_t i, mm_err *err) {
  const mm_json *turn = mm_json_at(mm_json_get(mm_json_at(set, i), "conversations"), 0), *value = mm_json_get(turn, "value");
  const char *text = mm_json_str(value);
  if (text && *text && strlen(text) == mm_json_str_len(value)) return text;
  mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(path, NULL),
          "conversation %zu: found no \"conversations\" that begin with a \"value\" of text without NUL", i);
  return NULL;
}

/* A prompt of the set: each conversation once, in an order by the seed, then again. */
static bool put_question(mm_text *t, const load_args *a, const mm_json *set, size_t *order, size_t i, uint64_t *state, mm_err *err) {
  const size_t n = mm_json_size(set), k = i % n;
  if (k == 0)
    for (size_t j = n; j-- > 1;) { /* Fisher and Yates */
      const size_t other = draw(state) % (j + 1), mine = order[j];
      order[j] = order[other], order[other] = mine;
    }
  const char *text = question(set, a->dataset, order[k], err);
  if (!text) return false;
  const bool chat = strcmp(a->endpoint, "chat") == 0;
  mm_text_put(t, chat ? "\"messages\":[{\"role\":\"user\",\"content\":" : "\"prompt\":");
  mm_text_quote_string(t, text);
  mm_text_put(t, chat ? "}]" : "");
  return true;
}

/* The conversations of --dataset-path, and room for their order; *set is NULL where none is given. */
static bool open_set(const load_args *a, mm_json **set, size_t **order, mm_err *err) {
  *set = NULL;
  if (!a->dataset) return true;
  *set = mm_json_load_list(a->dataset, SET_MAX, err);
  if (!*set) return false;
  const size_t n = mm_json_type_of(*set) == MM_JSON_ARR ? mm_json_size(*set) : 0;
  if (!n)
    return mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(a->dataset, NULL), "expected a list of conversations, as ShareGPT's files have it");
  *order = mm_calloc(n, sizeof **order, err);
  for (size_t i = 0; *order && i < n; i++) (*order)[i] = i;
  return *order;
}

static bool fill_requests(const load_args *a, const char *model, const mm_json *set, size_t *order, mm_load_request *r, mm_err *err) {
  const bool chat = strcmp(a->endpoint, "chat") == 0;
  uint64_t state = a->seed;
  double at = 0;
  for (size_t i = 0; i < a->requests; i++) {
    mm_text *t = &r[i].body;
    const uint64_t in = length(a->input, a->ratio, &state), out = length(a->output, a->ratio, &state);
    mm_text_put(t, "{\"model\":");
    mm_text_quote_string(t, model);
    mm_text_printf(t, ",\"max_tokens\":%llu,\"temperature\":0,\"stream\":true,\"stream_options\":{\"include_usage\":true},%s",
                   (unsigned long long)out, a->stop_at_eos ? "" : "\"ignore_eos\":true,");
    if (!order) put_prompt(t, a, chat, in, &state);
    if (order && !put_question(t, a, set, order, i, &state, err)) return false;
    mm_text_put(t, "}");
    if (t->failed) return mm_fail_memory(err, t->n);
    r[i].at = at;
    if (a->rate > 0) at -= log(fraction(&state)) / a->rate; /* Poisson arrivals */
  }
  return true;
}

static bool make_requests(const load_args *a, const char *model, mm_load_request *r, mm_err *err) {
  mm_json *set;
  size_t *order = NULL;
  const bool ok = open_set(a, &set, &order, err) && fill_requests(a, model, set, order, r, err);
  mm_json_free(set);
  free(order);
  return ok;
}

/* ---- words of the command line ---- */

/* "http://HOST[:PORT]" into two strings of *arena. */
static bool parse_url(const char *url, mm_arena *arena, mm_load_client *c, mm_err *err) {
  static const char http[] = "http://";
  const char *at = url + sizeof http - 1, *host = at, *end;
  bool ok = strncmp(url, http, sizeof http - 1) == 0;
  if (ok && *at == '[') {
    host = at + 1, end = strchr(host, ']');
    ok = end, at = ok ? end + 1 : at;
  } else if (ok) {
    end = host + strcspn(host, ":/"), at = end;
  }
  ok = ok && end > host;
  const char *port = ok && *at == ':' ? at + 1 : "80";
  const size_t n = strspn(port, "0123456789");
  const char *rest = ok && *at == ':' ? port + n : at;
  const unsigned long number = strtoul(port, NULL, 10);
  if (!ok || n == 0 || n > 5 || number == 0 || number > UINT16_MAX || (*rest && strcmp(rest, "/") != 0))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found URL \"%.200s\", expected http://HOST:PORT; TLS is not spoken", url);
  c->host = mm_arena_strndup(arena, host, (size_t)(end - host), err);
  c->port = mm_arena_strndup(arena, port, n, err);
  return c->host && c->port;
}

/* "ttft:500,tpot:50,e2el:20000", in milliseconds. */
static bool parse_goal(const char *text, mm_load_goal *goal, mm_err *err) {
  const char *at = text;
  for (bool ok = true; at && *at; at += *at == ',') {
    char name[8];
    double ms;
    int n = 0;
    ok = sscanf(at, "%7[a-z0-9]:%lf%n", name, &ms, &n) == 2 && isfinite(ms) && ms > 0 && (at[n] == ',' || !at[n]);
    double *to = !ok                         ? NULL
                 : strcmp(name, "ttft") == 0 ? &goal->ttft
                 : strcmp(name, "tpot") == 0 ? &goal->tpot
                 : strcmp(name, "e2el") == 0 ? &goal->e2el
                                             : NULL;
    if (!to)
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                     "--goodput: found \"%.100s\", expected milliseconds as in ttft:500,tpot:50,e2el:20000", text);
    *to = ms * 1e-3, at += n;
  }
  return true;
}

/* The first name that the server gives. */
static const char *served_name(const mm_load_client *c, mm_arena *arena, mm_err *err) {
  size_t n;
  char *text = mm_load_get(c, "/v1/models", &n, err);
  mm_json *o = text ? mm_json_parse(text, n, "/v1/models", err) : NULL;
  const mm_json *id = mm_json_get(mm_json_at(mm_json_get(o, "data"), 0), "id");
  const size_t length = mm_json_type_of(id) == MM_JSON_STR ? mm_json_str_len(id) : 0;
  const char *name = length && !memchr(mm_json_str(id), 0, length) ? mm_arena_strndup(arena, mm_json_str(id), length, err) : NULL;
  if (o && !name) mm_fail(err, MM_IO, "E_IO", mm_at("/v1/models", NULL), "found no name of a model; give --model");
  mm_json_free(o);
  free(text);
  return name;
}

static bool check(const load_args *a, mm_err *err) {
  const struct {
    bool good;
    const char *option, *expected;
    double found;
  } rule[] = {{a->ratio >= 0 && a->ratio < 1, "--range-ratio", "from 0 to less than 1", a->ratio},
              {a->rate >= 0, "--request-rate", "0 or more", a->rate},
              {a->timeout > 0, "--timeout", "more than 0 seconds", a->timeout}};
  for (size_t i = 0; i < sizeof rule / sizeof *rule; i++)
    if (!rule[i].good)
      return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "%s: found %g, expected %s", rule[i].option, rule[i].found,
                     rule[i].expected);
  return true;
}

static bool report(const load_args *a, const mm_load_run_facts *x, const mm_load_request *r, mm_err *err) {
  size_t done = 0;
  const char *reason = NULL;
  for (size_t i = 0; i < a->requests; i++) {
    done += r[i].done;
    if (!r[i].done && !reason) reason = r[i].reason;
  }
  const bool drawn = !a->dataset && reason && strstr(reason, "status 400"), length = drawn && strstr(reason, "context");
  const bool ids = drawn && strcmp(a->endpoint, "completions") == 0;
  if (!done)
    return mm_fail(err, MM_IO, "E_IO", mm_at(a->url, NULL), "no request was completed: %s%s", reason,
                   length ? " (--input-len and --output-len give the lengths)"
                   : ids  ? " (--vocab gives the model's number of tokens)"
                          : "");
  if (reason && !a->quiet) fprintf(stderr, "%zu requests failed, first: %s\n", (size_t)a->requests - done, reason);
  return mm_load_report(stdout, x, r, a->requests, a->json, err);
}

static bool load_test(void *args, mm_err *err) {
  const load_args *a = args;
  mm_arena arena = {0};
  const bool chat = strcmp(a->endpoint, "chat") == 0;
  mm_load_run_facts x = {.url = a->url, .endpoint = chat ? "/v1/chat/completions" : "/v1/completions", .rate = a->rate};
  mm_load_client c = {.path = x.endpoint, .key = getenv("MINIMAX_API_KEY"), .timeout = a->timeout};
  x.concurrency = c.concurrency = (uint32_t)(a->concurrency ? mm_min(a->concurrency, a->requests) : a->requests);
  bool ok = check(a, err) && parse_url(a->url, &arena, &c, err) && parse_goal(a->goodput, &x.goal, err);
  if (ok) ok = (x.model = a->model ? a->model : served_name(&c, &arena, err));
  mm_load_request *r = ok ? mm_calloc(a->requests, sizeof *r, err) : NULL;
  ok = r && make_requests(a, x.model, r, err) && mm_load_run(&c, r, a->requests, &x.seconds, err) && report(a, &x, r, err);
  for (size_t i = 0; r && i < a->requests; i++) MM_FREE(r[i].body.p, r[i].gap);
  free(r);
  mm_arena_close(&arena);
  return ok;
}

static load_args given = {.endpoint = "completions", .requests = 100, .input = 1024, .output = 128, .vocab = 32000, .timeout = 600};

static const mm_option options[] = {
    MM_OPTION(STR, "model", &given.model, "NAME", "the model's name in requests (the first that the server has)"),
    MM_OPTION(STR, "endpoint", &given.endpoint, "WORD", "prompts of random token ids, or conversations of random words (completions)",
              .choices = "completions|chat"),
    MM_OPTION(STR, "dataset-path", &given.dataset, "FILE",
              "prompts from a file of ShareGPT's form: the first text of each conversation, in random order (random prompts)"),
    MM_OPTION(U64, "num-prompts", &given.requests, "N", "requests in all (100)", .lo = 1, .hi = 1 << 20),
    MM_OPTION(U64, "random-input-len", &given.input, "N", "tokens of a prompt, in chat words (1024)", .alias = "input-len", .lo = 1,
              .hi = LENGTH_MAX),
    MM_OPTION(U64, "random-output-len", &given.output, "N", "tokens of a reply at most (128)", .alias = "output-len", .lo = 1,
              .hi = LENGTH_MAX),
    MM_OPTION(REAL, "random-range-ratio", &given.ratio, "X", "lengths are drawn from (1 - X) to (1 + X) of these (0)",
              .alias = "range-ratio"),
    MM_OPTION(U64, "vocab", &given.vocab, "N", "prompts have ids from N/8 up to N (32000)", .lo = 8, .hi = 1 << 24),
    MM_OPTION(REAL, "request-rate", &given.rate, "X", "requests a second, at random times; 0: all at once (0)"),
    MM_OPTION(U64, "max-concurrency", &given.concurrency, "N", "requests under way at most, 0: any number (0)", .hi = 1 << 16),
    MM_OPTION(STR, "goodput", &given.goodput, "GOALS", "also count requests within these milliseconds, as in ttft:500,tpot:50,e2el:20000"),
    MM_OPTION(U64, "seed", &given.seed, "N", "of lengths, prompts and times (0)"),
    MM_OPTION(REAL, "timeout", &given.timeout, "SECONDS", "of a request (600)"),
    MM_FLAG("stop-at-eos", &given.stop_at_eos, "let replies end by themselves; without it they have their full length (ignore_eos)"),
    MM_FLAG("json", &given.json, "one object with the fields of vllm bench serve; errors as JSON"),
    MM_FLAG("quiet", &given.quiet, "no line on failed requests on stderr", .letter = 'q'),
};

const mm_program mm_load_test_program = {
    MM_PROGRAM("minimax-bench serve", "put a load on a server with OpenAI's API, and time its replies", "URL", 1, 1, options),
    .examples =
        "minimax-bench serve http://127.0.0.1:8000 --max-concurrency 16\n"
        "minimax-bench serve http://127.0.0.1:8000 --num-prompts 500 --request-rate 4 --random-input-len 8192 --range-ratio 0.5\n"
        "minimax-bench serve http://127.0.0.1:8000 --goodput ttft:2000,tpot:50 --json",
    .epilog =
        "Any server with /v1/completions or /v1/chat/completions can be measured. MINIMAX_API_KEY in the environment is its key.\n"
        "ttft: from sending to the first text. tpot: the time after it over the other tokens. itl: between pieces. e2el: the whole.\n"
        "Exit status: 0 done, 2 usage, 3 the server's answer is no JSON or the data set not of its form, 5 no request was completed, 8 "
        "memory or limit.",
};

int mm_load_test_main(int argc, char **argv) { return mm_program_main(&mm_load_test_program, argc, argv, &given.url, load_test, &given); }
