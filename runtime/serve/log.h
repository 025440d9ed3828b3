/* Lines of the server's log on stderr, as text or JSON. Where nobody reads stderr, a full pipe or a stopped terminal, lines are
 * dropped and counted, and the next line that can be written is preceded by their number: a request never waits for its log. */
#ifndef MM_RUNTIME_SERVE_LOG_H
#define MM_RUNTIME_SERVE_LOG_H

#include "formats/system/base.h"

typedef struct mm_log {
  bool json, quiet; /* quiet: errors alone */
} mm_log;

/* A request that has ended. */
typedef struct mm_log_call {
  const char *id, *peer, *method, *path; /* printable; path: without the query */
  const char *reason;                    /* why it was refused, or NULL */
  const char *trace;                     /* its traceparent, "" for none */
  int status;
  double seconds;
  uint32_t choices, prompt_tokens, cached_tokens, reply_tokens;
} mm_log_call;
void mm_log_request(const mm_log *l, const mm_log_call *c);
/* Logs an error that no client caused; id: the request's, or NULL. */
void mm_log_error(const mm_log *l, const char *id, const mm_err *err);
/* A line about the server itself. */
void mm_log_say(const mm_log *l, const char *fmt, ...) MM_PRINTF(2, 3);
/* Whether a write of 4 KiB to stderr returns at once. Safe in a signal handler. */
bool mm_log_writable(void);

#endif
