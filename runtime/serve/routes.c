/* From a path to what answers it. */
#include "runtime/serve/routes.h"

#include <string.h>
#include <strings.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/keys.h"

static const char *allowed(const mm_exchange *x) {
  bool keyed;
  const char *path = mm_exchange_path(x);
  return strcmp(path, "*") == 0 ? "GET, HEAD, POST, OPTIONS" : mm_page_find(path, &keyed) ? "GET, HEAD, OPTIONS" : "POST, OPTIONS";
}

/* ---- Refusals ---- */

static bool refuse_path(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(c, 404, NULL, "there is no %.20s %.200s", mm_exchange_method(c->x), mm_exchange_path(c->x));
}

/* A path that is there, asked with another method. */
static bool refuse_method(mm_call *c, mm_err *err) {
  (void)err;
  mm_exchange_set(c->x, "Allow", allowed(c->x));
  return mm_refuse(c, 405, NULL, "%.20s is not for %.200s", mm_exchange_method(c->x), mm_exchange_path(c->x));
}

static bool refuse_origin(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(
      c, 403, NULL,
      "Host or Origin names another machine, and there is no API key: start with --api-key, or --allow-host NAME for that name, "
      "or --allow-origin ORIGIN for that page");
}

/* RFC 9110, section 10.1.1: a list. The first value with a member that is not 100-continue; NULL: there is none. */
static const char *other_expected(const mm_exchange *x) {
  static const char known[] = "100-continue";
  const char *value;
  for (size_t i = 0; (value = mm_exchange_header_at(x, "Expect", i)); i++)
    for (const char *p = value; *(p += strspn(p, ", \t"));) {
      if (strncasecmp(p, known, strlen(known)) != 0) return value;
      p += strlen(known);
      p += strspn(p, " \t");
      if (*p && *p != ',') return value;
    }
  return NULL;
}

static bool refuse_expect(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(c, 417, NULL, "Expect: found %.80s, expected 100-continue", other_expected(c->x));
}

static bool refuse_http(mm_call *c, mm_err *err) {
  const char *reason;
  const int status = mm_exchange_refused(c->x, &reason);
  (void)err;
  return mm_refuse(c, status, NULL, "%s", reason);
}

/* In the form of OpenAI's errors, and of Anthropic's. */
#define REFUSAL(fn, keys)                                                                                                   \
  {                                                                                                                         \
    {.begin = fn, .bodiless = true, .keyless = keys}, { .begin = fn, .bodiless = true, .keyless = keys, .anthropic = true } \
  }
static const mm_api bad_http[2] = REFUSAL(refuse_http, true), no_path[2] = REFUSAL(refuse_path, false),
                    no_method[2] = REFUSAL(refuse_method, false), no_origin[2] = REFUSAL(refuse_origin, false),
                    no_expect[2] = REFUSAL(refuse_expect, false);

/* ---- Paths ---- */

/* /completions is another API of llama.cpp's server, which is not served. */
static const mm_api *api_find(const char *path) {
  static const mm_api *const apis[] = {&mm_api_chat,           &mm_api_completions, &mm_api_responses,
                                       &mm_api_messages,       &mm_api_count_chat,  &mm_api_count_responses,
                                       &mm_api_count_messages, &mm_api_tokenize,    &mm_api_detokenize};
  for (size_t i = 0; i < sizeof apis / sizeof *apis; i++)
    if (strcmp(apis[i]->path, path) == 0 || (mm_path_is_short(path, apis[i]->path) && apis[i] != &mm_api_completions)) return apis[i];
  return NULL;
}

/* OPTIONS: what a path takes, also for a browser that asks before it sends a page's request (a preflight, which carries no key). */
static void answer_options(const mm_server *s, mm_exchange *x) {
  mm_exchange_set(x, "Allow", allowed(x));
  mm_origin_share_methods(&s->origins, x);
  mm_exchange_reply(x, 204, "", "", 0);
}

void mm_routes_handle(void *user, mm_exchange *x) {
  mm_server *s = user;
  const char *path = mm_exchange_path(x), *method = mm_exchange_method(x), *reason;
  bool keyed = false;
  mm_page *page = mm_page_find(path, &keyed);
  const mm_api *api = api_find(path);
  const bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0, form = api && api->anthropic;
  mm_origin_share(&s->origins, x);
  if (mm_exchange_refused(x, &reason))
    mm_call_begin(s, x, &bad_http[form]);
  else if (s->local && !mm_origin_admit(&s->origins, x))
    mm_call_begin(s, x, &no_origin[form]);
  else if ((page || api || strcmp(path, "*") == 0) && strcmp(method, "OPTIONS") == 0)
    answer_options(s, x);
  else if ((page || api) && other_expected(x))
    mm_call_begin(s, x, &no_expect[form]);
  else if (page && get && (!keyed || mm_keys_admit(s->key, s->keys, x)))
    page(s, x);
  else if (api && strcmp(method, "POST") == 0)
    mm_call_begin(s, x, api);
  else
    mm_call_begin(s, x, page || api ? &no_method[form] : &no_path[form]);
}
