/* The log. */
#include "runtime/serve/log.h"

#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "formats/text.h"

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Begins a line with the time. */
static void begin_line(const mm_log *l, mm_text *t) {
  const double at = now();
  const time_t seconds = (time_t)at;
  struct tm tm;
  char stamp[32];
  gmtime_r(&seconds, &tm);
  strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &tm);
  mm_text_printf(t, l->json ? "{\"time\":\"%s.%03dZ\"" : "%s.%03dZ", stamp, (int)((at - (double)seconds) * 1e3));
}

static atomic_ullong dropped; /* lines since the last one that was written */

static void end_line(const mm_log *l, mm_text *t) {
  mm_text_put(t, l->json ? "}\n" : "\n");
  if (t->failed || !mm_log_writable())
    atomic_fetch_add(&dropped, 1);
  else
    fwrite(t->p, 1, t->n, stderr); /* in one write: stderr is not buffered */
  free(t->p);
}

static void say_dropped(const mm_log *l) {
  const unsigned long long n = mm_log_writable() ? atomic_exchange(&dropped, 0) : 0;
  if (!n) return;
  mm_text t = {0};
  begin_line(l, &t);
  mm_text_printf(&t, l->json ? ",\"message\":\"log: %llu lines dropped, nobody read them\"" : " log: %llu lines dropped, nobody read them",
                 n);
  end_line(l, &t);
}

bool mm_log_writable(void) {
  struct pollfd p = {.fd = STDERR_FILENO, .events = POLLOUT};
  return poll(&p, 1, 0) != 0;
}

void mm_log_request(const mm_log *l, const mm_log_call *c) {
  if (l->quiet) return;
  say_dropped(l);
  mm_text t = {0};
  begin_line(l, &t);
  if (l->json) {
    mm_text_printf(&t, ",\"request\":\"%s\",\"peer\":\"%s\",\"method\":", c->id, c->peer);
    mm_text_quote_string(&t, c->method);
    mm_text_put(&t, ",\"path\":");
    mm_text_quote_string(&t, c->path);
    mm_text_printf(&t,
                   ",\"status\":%d,\"seconds\":%.6f,\"prompt_tokens\":%u,\"cached_tokens\":%u,\"reply_tokens\":%u,"
                   "\"choices\":%u",
                   c->status, c->seconds, c->prompt_tokens, c->cached_tokens, c->reply_tokens, c->choices);
    if (*c->trace) mm_text_printf(&t, ",\"traceparent\":\"%s\"", c->trace);
    if (c->reason) mm_text_put(&t, ",\"error\":");
    if (c->reason) mm_text_quote_string(&t, c->reason);
  } else {
    mm_text_printf(&t, " %s %s %s %s %d %.3fs", c->id, c->peer, c->method, c->path, c->status, c->seconds);
    if (c->choices) mm_text_printf(&t, " prompt %u (%u cached), reply %u", c->prompt_tokens, c->cached_tokens, c->reply_tokens);
    if (*c->trace) mm_text_printf(&t, " traceparent %s", c->trace);
    if (c->reason) mm_text_printf(&t, ": %s", c->reason);
  }
  end_line(l, &t);
}

/* The text, after the request's id where there is one. */
static void put_line(const mm_log *l, const char *id, const char *key, const char *text) {
  say_dropped(l);
  mm_text t = {0};
  begin_line(l, &t);
  if (l->json) {
    if (id) mm_text_printf(&t, ",\"request\":\"%s\"", id);
    mm_text_printf(&t, ",\"%s\":", key);
    mm_text_quote_string(&t, text);
  } else {
    mm_text_printf(&t, " %s%s%s", id ? id : "", id ? " error: " : "", text);
  }
  end_line(l, &t);
}

void mm_log_error(const mm_log *l, const char *id, const mm_err *err) { put_line(l, id, "error", err->text); }

void mm_log_say(const mm_log *l, const char *fmt, ...) {
  if (l->quiet) return;
  char text[1024];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  put_line(l, NULL, "message", text);
}
