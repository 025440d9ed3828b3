/* From a path to what answers it. */
#include "runtime/serve/routes.h"

#include <string.h>

#include "runtime/serve/apis.h"
#include "runtime/serve/keys.h"
#include "runtime/serve/origin.h"

/* A path that is there, asked with another method, or one that is not. */
static bool refuse_path(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(c, 404, NULL, "there is no %s %.200s", mm_exchange_method(c->x), mm_exchange_path(c->x));
}

static bool refuse_method(mm_call *c, mm_err *err) {
  (void)err;
  bool keyed;
  mm_exchange_set(c->x, "Allow", mm_page_find(mm_exchange_path(c->x), &keyed) ? "GET, HEAD" : "POST");
  return mm_refuse(c, 405, NULL, "%s is not for %.200s", mm_exchange_method(c->x), mm_exchange_path(c->x));
}

static bool refuse_origin(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(
      c, 403, NULL,
      "Host or Origin names another machine, and there is no API key: start with --api-key, or --allow-host NAME for that name");
}

static bool refuse_http(mm_call *c, mm_err *err) {
  (void)err;
  return mm_refuse(c, 400, NULL, "%s", mm_exchange_wrong(c->x));
}

static const mm_api bad_http = {.path = "?", .begin = refuse_http, .bodiless = true};
static const mm_api no_path = {.path = "?", .begin = refuse_path, .bodiless = true},
                    no_method = {.path = "?", .begin = refuse_method, .bodiless = true},
                    no_origin = {.path = "?", .begin = refuse_origin, .bodiless = true};

static const mm_api *api_find(const char *path) {
  static const mm_api *const apis[] = {&mm_api_chat,         &mm_api_completions, &mm_api_responses, &mm_api_messages,
                                       &mm_api_count_tokens, &mm_api_tokenize,    &mm_api_detokenize};
  for (size_t i = 0; i < sizeof apis / sizeof *apis; i++)
    if (strcmp(apis[i]->path, path) == 0) return apis[i];
  return NULL;
}

void mm_routes_handle(void *user, mm_exchange *x) {
  mm_server *s = user;
  const char *path = mm_exchange_path(x), *method = mm_exchange_method(x);
  bool keyed = false;
  mm_page *page = mm_page_find(path, &keyed);
  const mm_api *api = api_find(path);
  const bool get = strcmp(method, "GET") == 0 || strcmp(method, "HEAD") == 0;
  if (mm_exchange_wrong(x))
    mm_call_begin(s, x, &bad_http);
  else if (s->local && !mm_origin_admit(s->host, s->hosts, x))
    mm_call_begin(s, x, &no_origin);
  else if (page && get && (!keyed || mm_keys_admit(s->key, s->keys, x)))
    page(s, x);
  else if (api && strcmp(method, "POST") == 0)
    mm_call_begin(s, x, api);
  else
    mm_call_begin(s, x, page || api ? &no_method : &no_path);
}
