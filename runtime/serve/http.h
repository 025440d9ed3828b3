/* HTTP/1.1 over libevent's loop (no other file includes it): one thread runs the loop, and everything here but mm_http_post belongs to it.
 * Clients that are slow to send or to take, or that leave, cost their own connection alone. */
#ifndef MM_RUNTIME_SERVE_HTTP_H
#define MM_RUNTIME_SERVE_HTTP_H

#include "formats/text.h"

typedef struct mm_http mm_http;
typedef struct mm_exchange mm_exchange; /* one request and its reply */

typedef struct mm_http_config {
  const char *host; /* an address or a name */
  uint16_t port;    /* 0: any free one */
  uint64_t header_max, body_max;
  double read_time;     /* seconds in which a request must arrive whole, and a kept connection must begin its next */
  double write_time;    /* seconds in which a client must take something of what is ready for it */
  uint64_t pending_max; /* bytes of a stream that may wait for its client, and 8 times its request's; beyond, the client is dropped */
  /* A whole request, or one that is refused (mm_exchange_refused). It is ended by mm_exchange_reply or mm_exchange_end, now or later. */
  void (*handle)(void *user, mm_exchange *x);
  void (*failed)(void *user, const mm_err *err); /* connections cannot be accepted; called every ten seconds at most */
  void *user;
} mm_http_config;

/* MM_IO E_IO where the address cannot be bound. */
mm_http *mm_http_open(const mm_http_config *c, mm_err *err);
uint16_t mm_http_port(const mm_http *h); /* the one bound */
/* Connections that are open at a time (any number of them); more wait in the kernel's queue. */
void mm_http_limit(mm_http *h, uint32_t connections);
/* Runs the loop until mm_http_stop. MM_IO when the loop fails. */
MM_MUST_USE bool mm_http_run(mm_http *h, mm_err *err);
void mm_http_stop(mm_http *h);
/* From here on replies end their connections, and mm_http_busy looks at earlier requests alone. New connections are still accepted. */
void mm_http_drain(mm_http *h);
/* A reply is being made, or some of it is not written to its connection yet. */
bool mm_http_busy(const mm_http *h);
uint32_t mm_http_connections(const mm_http *h);         /* open ones */
uint64_t mm_http_replies(const mm_http *h, int status); /* that were begun */
/* After run. Exchanges that have not ended are freed, without a call. Accepts NULL. */
void mm_http_close(mm_http *h);

/* Something to do in the loop. Zero-initialise, set fn and user; it must live until it was done. */
typedef struct mm_task {
  void (*fn)(void *user);
  void *user;
  struct mm_task *next;
  bool queued;
} mm_task;
/* Any thread: t->fn is called in the loop, once for all posts before that call. */
void mm_http_post(mm_http *h, mm_task *t);
/* Does what was posted. The loop does it by itself; for the time after it. */
void mm_http_flush(mm_http *h);
/* Calls fn at each of these signals while the loop runs. The handler that a signal had before comes back when h closes. */
MM_MUST_USE bool mm_http_on_signal(mm_http *h, int signal, void (*fn)(void *user), void *user, mm_err *err);
/* Calls fn every so many seconds. */
MM_MUST_USE bool mm_http_every(mm_http *h, double seconds, void (*fn)(void *user), void *user, mm_err *err);

/* ---- one request ---- */

const char *mm_exchange_method(const mm_exchange *x); /* as it was sent; "-" in a refused request that has none */
const char *mm_exchange_path(const mm_exchange *x);   /* without the query, as it was sent; "-" in a refused request that has none */
const char *mm_exchange_peer(const mm_exchange *x);   /* the client's "ADDRESS:PORT" */
/* The status with which the request is to be refused, and why in words; 0: it is in order. The connection ends with the reply. */
int mm_exchange_refused(const mm_exchange *x, const char **reason);
/* NULL where it was not sent. Borrowed. */
const char *mm_exchange_header(const mm_exchange *x, const char *name);
/* The same of a field that may come several times, counted from 0; NULL: there are not so many. */
const char *mm_exchange_header_at(const mm_exchange *x, const char *name, size_t number);
/* The body, *n bytes, borrowed until the exchange ends; any thread. */
const char *mm_exchange_body(const mm_exchange *x, size_t *n);
/* fn is called when the client leaves before the end, from the loop and never from within a call of this header. Data sent after that is
 * dropped, but the exchange must still be ended. */
void mm_exchange_on_gone(mm_exchange *x, void (*fn)(void *user), void *user);
bool mm_exchange_gone(const mm_exchange *x);
/* A header of the reply, before it starts. */
void mm_exchange_set(mm_exchange *x, const char *name, const char *value);
/* The whole reply (to HEAD: its headers); ends the exchange. */
void mm_exchange_reply(mm_exchange *x, int status, const char *type, const char *body, size_t n);
/* The same for POST, without a copy: body, which is not empty, is emptied and its memory freed when it is sent. */
void mm_exchange_reply_text(mm_exchange *x, int status, const char *type, mm_text *body);
/* A reply in pieces. piece returns false when the client has left or takes too little; then nothing more need be sent. */
void mm_exchange_start(mm_exchange *x, int status, const char *type);
bool mm_exchange_piece(mm_exchange *x, const char *bytes, size_t n);
void mm_exchange_end(mm_exchange *x);

#endif
