/* HTTP over evhttp, and what evhttp leaves open: deadlines of requests that trickle in, a bound on connections, clients that leave while
 * their reply is being made. */
#include "runtime/serve/http.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/http_struct.h>
#include <event2/keyvalq_struct.h>
#include <event2/listener.h>
#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SWEEP_SECONDS 0.25
#define PIPELINED_MAX ((size_t)64 << 10) /* bytes of a next request that may wait behind one that is being answered */
#define READ_ROOM     ((size_t)64 << 10) /* bytes that may be read beyond what a request may have, before its end is seen */
#define TIMERS        8

/* What is known of a descriptor's connection. evhttp tells nobody when it accepts one or closes it; a socket's cookie tells it from a
 * later one of the same number. */
typedef struct connection {
  uint64_t cookie;
  double since; /* when the next request's first byte came; before it, when the connection was first seen or its last reply was done */
  bool begun;   /* that byte came */
  bool busy;    /* a reply is being made */
} connection;

typedef struct timer {
  struct event *event;
  void (*fn)(void *user);
  void *user;
} timer;

struct mm_http {
  mm_http_config c;
  struct event_base *base;
  struct evhttp *server;
  struct evconnlistener *listener; /* the server's; NULL once deaf */
  struct evhttp_bound_socket *bound;
  uint16_t port;
  uint32_t open, accepted; /* connections at the last sweep, and since */
  connection *connection;  /* [descriptors], by number */
  size_t descriptors;
  timer timer[TIMERS];
  unsigned timers;
  int wake; /* eventfd */
  struct event *wake_event;
  pthread_mutex_t lock;
  mm_task *first, **last; /* posted */
  mm_exchange *exchanges;
};

struct mm_exchange {
  mm_http *http;
  struct evhttp_request *request;
  struct evhttp_connection *peer; /* NULL once it left */
  mm_exchange *before, *after;
  void (*gone)(void *user);
  void *user;
  const char *wrong; /* what is against HTTP in it, NULL: nothing */
  bool slow;
};

static struct timeval interval(double seconds) {
  return (struct timeval){.tv_sec = (time_t)seconds, .tv_usec = (suseconds_t)(1e6 * (seconds - floor(seconds)))};
}

/* ---- Connections ---- */

/* The record of a connection on this descriptor, NULL where there is none. */
static connection *connection_of(mm_http *h, int fd) {
  struct sockaddr_storage peer;
  socklen_t n = sizeof peer;
  uint64_t cookie;
  if (fd < 0 || (size_t)fd >= h->descriptors || getpeername(fd, (struct sockaddr *)&peer, &n) != 0) return NULL;
  n = sizeof cookie;
  if (getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &n) != 0) return NULL;
  connection *c = &h->connection[fd];
  if (c->cookie != cookie) *c = (connection){.cookie = cookie, .since = mm_now()};
  return c;
}

static void sweep(void *user) {
  mm_http *h = user;
  const double late = mm_now() - h->c.read_time;
  uint32_t open = 0;
  for (size_t fd = 0; fd < h->descriptors; fd++) {
    const connection *c = connection_of(h, (int)fd);
    if (!c) continue;
    open++;
    if (!c->busy && c->since < late) shutdown((int)fd, SHUT_RDWR); /* evhttp sees the end and closes it */
  }
  h->open = open;
  h->accepted = 0;
  if (h->listener && open < h->c.connections) evconnlistener_enable(h->listener);
}

/* Whose loop this thread runs: a buffer's callback knows its bufferevent alone. */
static _Thread_local mm_http *looping;

/* Bytes came. The first one of a request has all of the read time before it, however long the connection was idle. */
static void note_bytes(int fd) {
  connection *c = looping ? connection_of(looping, fd) : NULL;
  if (!c || c->busy || c->begun) return;
  c->begun = true;
  c->since = mm_now();
}

/* Bytes that no request can have: evhttp keeps a line between chunks, or behind the last one, however long it grows. */
static void grown(struct evbuffer *in, const struct evbuffer_cb_info *info, void *user) {
  struct bufferevent *b = user;
  bufferevent_data_cb read;
  size_t most;
  if (info->n_added && !info->orig_size) note_bytes(bufferevent_getfd(b));
  bufferevent_getcb(b, &read, NULL, NULL, NULL);
  bufferevent_getwatermark(b, EV_READ, NULL, &most);
  if (!read || evbuffer_get_length(in) <= most - READ_ROOM) return; /* without read, a request is being answered: watch */
  shutdown(bufferevent_getfd(b), SHUT_RDWR);
  evbuffer_drain(in, evbuffer_get_length(in)); /* what the kernel has still comes, and then the end */
}

static void read_requests(mm_http *h, struct bufferevent *b) {
  bufferevent_setwatermark(b, EV_READ, 0, (size_t)(h->c.header_max + h->c.body_max) + 2 * READ_ROOM);
}

/* Called by evhttp for each connection that it accepts. */
static struct bufferevent *accepted(struct event_base *base, void *user) {
  mm_http *h = user;
  if (h->open + ++h->accepted >= h->c.connections) evconnlistener_disable(h->listener);
  struct bufferevent *b = bufferevent_socket_new(base, -1, 0);
  struct timeval write = interval(h->c.write_time);
  if (!b) return NULL;
  bufferevent_set_timeouts(b, NULL, &write);
  read_requests(h, b);
  evbuffer_add_cb(bufferevent_get_input(b), grown, b);
  return b;
}

static void replied(struct evhttp_request *r, void *user) {
  mm_http *h = user;
  struct bufferevent *b = evhttp_connection_get_bufferevent(evhttp_request_get_connection(r));
  connection *c = connection_of(h, bufferevent_getfd(b));
  if (c) *c = (connection){.cookie = c->cookie, .since = mm_now()};
  read_requests(h, b);
}

/* ---- Exchanges ---- */

static void forget(mm_exchange *x) {
  if (x->before)
    x->before->after = x->after;
  else
    x->http->exchanges = x->after;
  if (x->after) x->after->before = x->before;
  if (x->peer) evhttp_connection_set_closecb(x->peer, NULL, NULL);
  free(x);
}

static void left(struct evhttp_connection *peer, void *user) {
  mm_exchange *x = user;
  (void)peer;
  x->peer = NULL;
  if (x->gone) x->gone(x->user);
}

/* evhttp stops reading while a request is answered, so it would not see that the client has left; and it ends the process when bytes come
 * then. So bytes are read into a bounded buffer and looked at by nobody until the reply is done. */
static void watch(mm_exchange *x) {
  struct bufferevent *b = evhttp_connection_get_bufferevent(x->peer);
  bufferevent_data_cb write;
  bufferevent_event_cb event;
  void *arg;
  bufferevent_getcb(b, NULL, &write, &event, &arg);
  bufferevent_setcb(b, NULL, write, event, arg);
  bufferevent_setwatermark(b, EV_READ, 0, PIPELINED_MAX);
  bufferevent_enable(b, EV_READ);
  connection *c = connection_of(x->http, bufferevent_getfd(b));
  if (c) c->busy = true;
  evhttp_connection_set_closecb(x->peer, left, x);
}

/* What evhttp lets through although RFC 9112 refuses it, since somebody between might read another message in the same bytes. */
static const char *wrong_with(struct evhttp_request *r) {
  const char *length = NULL;
  if (r->major != 1 || r->minor < 0) {
    r->major = r->minor = 1; /* the reply's */
    return "the version is not one of HTTP/1";
  }
  for (const struct evkeyval *h = evhttp_request_get_input_headers(r)->tqh_first; h; h = h->next.tqe_next) {
    const size_t n = strcspn(h->key, " \t\"(),/:;<=>?@[\\]{}");
    if (n == 0 || h->key[n]) return "the name of a header is not a token";
    if (strcasecmp(h->key, "transfer-encoding") == 0 && strcasecmp(h->value, "chunked") != 0)
      return "Transfer-Encoding: only chunked is served";
    if (strcasecmp(h->key, "content-length") != 0) continue;
    if (!*h->value || h->value[strspn(h->value, "0123456789")] || (length && strcmp(length, h->value) != 0))
      return "Content-Length: expected one number";
    length = h->value;
  }
  return NULL;
}

static void arrived(struct evhttp_request *r, void *user) {
  mm_http *h = user;
  mm_exchange *x = calloc(1, sizeof *x);
  evhttp_request_set_on_complete_cb(r, replied, h);
  if (!x) {
    evhttp_send_error(r, 503, NULL);
    return;
  }
  *x = (mm_exchange){.http = h, .request = r, .peer = evhttp_request_get_connection(r), .wrong = wrong_with(r), .after = h->exchanges};
  if (x->wrong) mm_exchange_set(x, "Connection", "close"); /* nobody knows where the next request begins */
  if (x->after) x->after->before = x;
  h->exchanges = x;
  watch(x);
  h->c.handle(h->c.user, x);
}

const char *mm_exchange_method(const mm_exchange *x) {
  switch (evhttp_request_get_command(x->request)) {
    case EVHTTP_REQ_GET: return "GET";
    case EVHTTP_REQ_POST: return "POST";
    case EVHTTP_REQ_HEAD: return "HEAD";
    case EVHTTP_REQ_PUT: return "PUT";
    case EVHTTP_REQ_DELETE: return "DELETE";
    case EVHTTP_REQ_OPTIONS: return "OPTIONS";
    case EVHTTP_REQ_PATCH: return "PATCH";
    default: return "?";
  }
}

const char *mm_exchange_path(const mm_exchange *x) {
  const struct evhttp_uri *uri = evhttp_request_get_evhttp_uri(x->request);
  const char *path = uri ? evhttp_uri_get_path(uri) : NULL;
  return path && *path ? path : "/";
}

const char *mm_exchange_wrong(const mm_exchange *x) { return x->wrong; }

const char *mm_exchange_header(const mm_exchange *x, const char *name) {
  return evhttp_find_header(evhttp_request_get_input_headers(x->request), name);
}

const char *mm_exchange_body(mm_exchange *x, size_t *n) {
  struct evbuffer *b = evhttp_request_get_input_buffer(x->request);
  *n = evbuffer_get_length(b);
  return *n ? (const char *)evbuffer_pullup(b, -1) : "";
}

void mm_exchange_on_gone(mm_exchange *x, void (*fn)(void *user), void *user) {
  x->gone = fn;
  x->user = user;
}

bool mm_exchange_gone(const mm_exchange *x) { return !x->peer || x->slow; }

void mm_exchange_set(mm_exchange *x, const char *name, const char *value) {
  evhttp_add_header(evhttp_request_get_output_headers(x->request), name, value);
}

void mm_exchange_reply(mm_exchange *x, int status, const char *type, const char *body, size_t n) {
  struct evhttp_request *r = x->request;
  const bool here = x->peer;
  mm_exchange_set(x, "Content-Type", type);
  if (evhttp_request_get_command(r) == EVHTTP_REQ_HEAD) { /* the headers of the reply, no more */
    char length[24];
    snprintf(length, sizeof length, "%zu", n);
    mm_exchange_set(x, "Content-Length", length);
  } else {
    evbuffer_add(evhttp_request_get_output_buffer(r), body, n);
  }
  forget(x);
  if (here)
    evhttp_send_reply(r, status, NULL, NULL);
  else
    evhttp_request_free(r);
}

void mm_exchange_start(mm_exchange *x, int status, const char *type) {
  mm_exchange_set(x, "Content-Type", type);
  if (x->peer) evhttp_send_reply_start(x->request, status, NULL);
}

bool mm_exchange_piece(mm_exchange *x, const char *bytes, size_t n) {
  if (mm_exchange_gone(x)) return false;
  struct evbuffer *b = evbuffer_new();
  if (!b || evbuffer_add(b, bytes, n) != 0)
    x->slow = true;
  else
    evhttp_send_reply_chunk(x->request, b);
  if (b) evbuffer_free(b);
  struct bufferevent *out = evhttp_connection_get_bufferevent(x->peer);
  if (evbuffer_get_length(bufferevent_get_output(out)) > x->http->c.pending_max) x->slow = true;
  if (x->slow) shutdown(bufferevent_getfd(out), SHUT_RDWR);
  return !x->slow;
}

void mm_exchange_end(mm_exchange *x) {
  struct evhttp_request *r = x->request;
  forget(x);
  evhttp_send_reply_end(r);
}

/* ---- The loop ---- */

void mm_http_post(mm_http *h, mm_task *t) {
  pthread_mutex_lock(&h->lock);
  const bool wake = !h->first;
  if (!t->queued) {
    t->queued = true;
    t->next = NULL;
    *h->last = t;
    h->last = &t->next;
  }
  pthread_mutex_unlock(&h->lock);
  const uint64_t one = 1;
  if (wake && write(h->wake, &one, sizeof one) < 0) return; /* the counter is full: the loop is awake */
}

void mm_http_flush(mm_http *h) {
  for (;;) {
    pthread_mutex_lock(&h->lock);
    mm_task *t = h->first;
    if (t) {
      t->queued = false;
      if (!(h->first = t->next)) h->last = &h->first;
    }
    pthread_mutex_unlock(&h->lock);
    if (!t) return;
    t->fn(t->user);
  }
}

static void woken(evutil_socket_t fd, short what, void *user) {
  uint64_t count;
  (void)what;
  if (read((int)fd, &count, sizeof count) < 0 && errno != EAGAIN) return;
  mm_http_flush(user);
}

static void timed(evutil_socket_t fd, short what, void *user) {
  const timer *t = user;
  (void)fd;
  (void)what;
  t->fn(t->user);
}

static bool add_timer(mm_http *h, int signal, double seconds, void (*fn)(void *), void *user, mm_err *err) {
  timer *t = &h->timer[h->timers];
  const struct timeval every = interval(seconds);
  if (h->timers == TIMERS) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "more than %d timers", TIMERS);
  *t = (timer){.event = event_new(h->base, signal ? signal : -1, EV_PERSIST | (signal ? EV_SIGNAL : 0), timed, t), .fn = fn, .user = user};
  if (!t->event || event_add(t->event, signal ? NULL : &every) != 0) return mm_fail_memory(err, sizeof *t);
  h->timers++;
  return true;
}

bool mm_http_on_signal(mm_http *h, int number, void (*fn)(void *user), void *user, mm_err *err) {
  signal(number, SIG_IGN); /* what libevent restores when h closes: one that comes later does not kill what is ending */
  return add_timer(h, number, 0, fn, user, err);
}

bool mm_http_every(mm_http *h, double seconds, void (*fn)(void *user), void *user, mm_err *err) {
  return add_timer(h, 0, seconds, fn, user, err);
}

/* ---- Opening ---- */

static bool bind_address(mm_http *h, mm_err *err) {
  errno = 0;
  h->bound = evhttp_bind_socket_with_handle(h->server, h->c.host, h->c.port);
  if (!h->bound) {
    char what[300];
    snprintf(what, sizeof what, "listen on port %u", h->c.port);
    return mm_fail_errno(err, mm_at(h->c.host, NULL), what, errno ? errno : EADDRNOTAVAIL);
  }
  h->listener = evhttp_bound_socket_get_listener(h->bound);
  struct sockaddr_storage a = {0};
  socklen_t n = sizeof a;
  if (getsockname(evhttp_bound_socket_get_fd(h->bound), (struct sockaddr *)&a, &n) != 0)
    return mm_fail_errno(err, mm_at(h->c.host, NULL), "getsockname", errno);
  in_port_t port = 0;
  if (a.ss_family == AF_INET6) port = ((struct sockaddr_in6 *)&a)->sin6_port;
  if (a.ss_family == AF_INET) port = ((struct sockaddr_in *)&a)->sin_port;
  h->port = ntohs(port);
  return true;
}

static bool open_loop(mm_http *h, mm_err *err) {
  struct event_config *c = event_config_new();
  if (c) {
    event_config_set_flag(c, EVENT_BASE_FLAG_PRECISE_TIMER);
    h->base = event_base_new_with_config(c);
    event_config_free(c);
  }
  h->server = h->base ? evhttp_new(h->base) : NULL;
  if (!h->server) return mm_fail_memory(err, sizeof *h);
  if ((h->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0) return mm_fail_errno(err, mm_at(NULL, NULL), "eventfd", errno);
  h->wake_event = event_new(h->base, h->wake, EV_READ | EV_PERSIST, woken, h);
  if (!h->wake_event || event_add(h->wake_event, NULL) != 0) return mm_fail_memory(err, sizeof *h);
  return true;
}

mm_http *mm_http_open(const mm_http_config *c, mm_err *err) {
  mm_http *h = mm_calloc(1, sizeof *h, err);
  if (!h) return NULL;
  h->c = *c;
  h->wake = -1;
  h->last = &h->first;
  pthread_mutex_init(&h->lock, NULL);
  h->descriptors = (size_t)c->connections + 1024;
  h->connection = mm_calloc(h->descriptors, sizeof *h->connection, err);
  if (h->connection && open_loop(h, err)) {
    evhttp_set_max_headers_size(h->server, (ev_ssize_t)c->header_max);
    evhttp_set_max_body_size(h->server, (ev_ssize_t)c->body_max);
    evhttp_set_flags(h->server, EVHTTP_SERVER_LINGERING_CLOSE);
    evhttp_set_allowed_methods(h->server, 0xffff);
    evhttp_set_bevcb(h->server, accepted, h);
    evhttp_set_gencb(h->server, arrived, h);
    if (bind_address(h, err) && mm_http_every(h, SWEEP_SECONDS, sweep, h, err)) return h;
  }
  mm_http_close(h);
  return NULL;
}

uint16_t mm_http_port(const mm_http *h) { return h->port; }
uint32_t mm_http_connections(const mm_http *h) { return h->open; }

bool mm_http_run(mm_http *h, mm_err *err) {
  looping = h;
  const int status = event_base_dispatch(h->base);
  looping = NULL;
  if (status >= 0) return true;
  return mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "the event loop failed");
}

void mm_http_stop(mm_http *h) { event_base_loopbreak(h->base); }

bool mm_http_busy(mm_http *h) {
  for (size_t fd = 0; fd < h->descriptors; fd++) {
    const connection *c = connection_of(h, (int)fd);
    if (c && c->busy) return true;
  }
  return false;
}

void mm_http_deafen(mm_http *h) {
  if (h->bound) evhttp_del_accept_socket(h->server, h->bound);
  h->bound = NULL;
  h->listener = NULL;
}

void mm_http_close(mm_http *h) {
  if (!h) return;
  for (mm_exchange *x = h->exchanges, *next; x; x = next) {
    next = x->after;
    struct evhttp_request *orphan = x->peer ? NULL : x->request; /* the others are the server's */
    forget(x);
    if (orphan) evhttp_request_free(orphan);
  }
  if (h->server) evhttp_free(h->server);
  for (unsigned i = 0; i < h->timers; i++) event_free(h->timer[i].event);
  if (h->wake_event) event_free(h->wake_event);
  if (h->base) event_base_free(h->base);
  if (h->wake >= 0) close(h->wake);
  pthread_mutex_destroy(&h->lock);
  free(h->connection);
  free(h);
}
