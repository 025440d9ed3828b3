/* Connections over libevent: each reads a request (framing.h), has it answered, writes the reply, and reads the next one. Deadlines of
 * requests that trickle in, a bound on connections, clients that leave while their reply is being made. */
#include "runtime/serve/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "runtime/serve/framing.h"
#include "runtime/serve/loop_memory.h"

#define SWEEP_SECONDS  0.1
#define REPORT_SECONDS 10                 /* between reports that no connection can be accepted */
#define READ_MAX       ((size_t)64 << 10) /* bytes read at a time, and bytes of next requests that wait behind one that is being answered */
#define WRITE_MAX      ((size_t)256 << 10) /* bytes written at a time */
#define BACKLOG        1024                /* connections that wait in the kernel */
#define TIMERS         8

typedef enum phase {
  READING,   /* a request, or waiting for one */
  ANSWERING, /* it is in the hands of handle, until mm_exchange_reply or mm_exchange_end */
  WRITING,   /* the rest of its reply */
  DRAINING   /* the last reply is written: what still comes is dropped until the client closes, or it would lose the reply */
} phase;

typedef struct timer {
  struct event *event;
  void (*fn)(void *user);
  void *user;
} timer;

#define STATUSES 600

struct mm_http {
  mm_http_config c;
  struct event_base *base;
  struct evconnlistener *listener;
  uint16_t port;
  uint32_t open;       /* connections */
  double reported;     /* when it was last reported that no connection can be accepted */
  bool full, draining; /* full: the listener is disabled */
  timer timer[TIMERS];
  unsigned timers;
  uint32_t connections; /* at a time, at most */
  int wake;             /* eventfd */
  struct event *wake_event;
  pthread_mutex_t lock;
  mm_task *first, **last; /* posted */
  mm_exchange *exchanges;
  uint64_t replies[STATUSES]; /* by status */
};

/* A connection, and the request on it. It lives until both have ended. */
struct mm_exchange {
  mm_http *http;
  mm_exchange *before, *after;
  struct bufferevent *b; /* NULL: the connection is closed */
  mm_framing in;
  mm_text head; /* headers of the reply, so far */
  char peer[INET6_ADDRSTRLEN + 10];
  phase phase;
  double since; /* READING: when the first byte of the request came, or the connection began to wait for it; DRAINING: when it began to */
  uint64_t dropped; /* bytes, DRAINING */
  bool begun;       /* READING: the first byte of the request has come */
  bool eof;         /* the client sends no more; it may still read */
  bool probed;      /* the first byte of the reply is sent already */
  bool started;     /* the head of the reply is */
  bool keep, chunked, slow;
  bool owed; /* the request came before mm_http_drain */
  void (*gone)(void *user);
  void *user;
};

/* No interval is 0, which libevent takes for none. */
static struct timeval interval(double seconds) {
  seconds = fmin(fmax(seconds, 1e-6), 1e9);
  return (struct timeval){.tv_sec = (time_t)seconds, .tv_usec = (suseconds_t)(1e6 * (seconds - floor(seconds)))};
}

/* ---- Connections ---- */

static struct evbuffer *output(const mm_exchange *x) { return bufferevent_get_output(x->b); }

static void exchange_free(mm_exchange *x) {
  if (x->before)
    x->before->after = x->after;
  else
    x->http->exchanges = x->after;
  if (x->after) x->after->before = x->before;
  if (x->b) bufferevent_free(x->b);
  mm_framing_close(&x->in);
  free(x->head.p);
  free(x);
}

static void resume_accepting(mm_http *h) {
  if (!h->full || h->open >= h->connections) return;
  h->full = false;
  evconnlistener_enable(h->listener);
}

/* Closes the connection. A request that is being answered is still to be ended. */
static void leave(mm_exchange *x) {
  mm_http *h = x->http;
  bufferevent_free(x->b);
  x->b = NULL;
  h->open--;
  resume_accepting(h);
  if (x->phase != ANSWERING)
    exchange_free(x);
  else if (x->gone)
    x->gone(x->user);
}

/* A client that sends no more has left, or waits for its reply: TCP says which when something is sent, and every reply begins with this
 * byte. */
static void probe(mm_exchange *x) {
  if (x->phase != ANSWERING || x->probed || x->started) return;
  x->probed = true;
  bufferevent_write(x->b, "H", 1);
}

static void begin_answer(mm_exchange *x) {
  x->phase = ANSWERING;
  x->owed = !x->http->draining;
  x->keep = x->in.keep && x->in.state == MM_FRAMING_DONE;
  x->http->c.handle(x->http->c.user, x);
  if (x->eof) probe(x);
}

/* Reads what has come of the next request, and has it answered when it is whole. May end the exchange. */
static void advance(mm_exchange *x) {
  struct evbuffer *in = bufferevent_get_input(x->b);
  size_t n;
  while (x->phase == READING && (n = evbuffer_get_contiguous_space(in)) > 0) {
    if (!x->begun) x->since = mm_now();
    x->begun = true;
    evbuffer_drain(in, mm_framing_read(&x->in, (const char *)evbuffer_pullup(in, (ev_ssize_t)n), n));
    if (x->in.state == MM_FRAMING_BODY && x->in.expects && evbuffer_get_length(in) == 0)
      bufferevent_write(x->b, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    if (x->in.state != MM_FRAMING_HEAD) x->in.expects = false;
    if (x->in.state == MM_FRAMING_DONE || x->in.state == MM_FRAMING_REFUSED) begin_answer(x);
  }
  if (x->phase == READING && x->eof) leave(x);
}

/* Drops what has come behind the last reply. */
static void drop_input(mm_exchange *x) {
  struct evbuffer *in = bufferevent_get_input(x->b);
  x->dropped += evbuffer_get_length(in);
  evbuffer_drain(in, evbuffer_get_length(in));
  if (x->eof || x->dropped > x->http->c.header_max + 2 * x->http->c.body_max) leave(x);
}

/* The reply is written. */
static void finish(mm_exchange *x) {
  const bool more = x->in.state == MM_FRAMING_REFUSED || evbuffer_get_length(bufferevent_get_input(x->b)) > 0;
  const bool keep = x->keep;
  mm_framing_next(&x->in);
  mm_text_clear(&x->head);
  x->begun = x->probed = x->started = x->chunked = x->owed = false;
  x->gone = NULL;
  x->since = mm_now();
  x->phase = keep ? READING : DRAINING;
  if (keep) {
    advance(x);
  } else if (!more) {
    leave(x);
  } else {
    shutdown(bufferevent_getfd(x->b), SHUT_WR);
    drop_input(x);
  }
}

static void on_read(struct bufferevent *b, void *user) {
  mm_exchange *x = user;
  (void)b;
  if (x->phase == READING)
    advance(x);
  else if (x->phase == DRAINING)
    drop_input(x);
}

static void on_written(struct bufferevent *b, void *user) {
  mm_exchange *x = user;
  (void)b;
  if (x->phase == WRITING) finish(x);
}

static void on_event(struct bufferevent *b, short what, void *user) {
  mm_exchange *x = user;
  const bool waits = x->phase == ANSWERING || (x->phase == WRITING && evbuffer_get_length(bufferevent_get_output(b)) > 0);
  if (!(what & BEV_EVENT_EOF) || !waits) {
    leave(x); /* it was reset, takes nothing in the write time, or ended between requests */
    return;
  }
  x->eof = true;
  probe(x);
}

/* Checks whether the client of a request that is being answered has left; no read or write would show it meanwhile. An end of its side
 * may stand behind bytes of next requests that are not read yet: the read that comes to it notes it. */
static void look(mm_exchange *x) {
  struct pollfd p = {.fd = bufferevent_getfd(x->b), .events = POLLRDHUP};
  if (evbuffer_get_length(bufferevent_get_input(x->b)) >= READ_MAX) probe(x); /* an end behind these bytes would not be seen */
  if (poll(&p, 1, 0) <= 0) return;
  if (p.revents & (POLLERR | POLLHUP | POLLNVAL))
    leave(x);
  else
    probe(x);
}

/* A part of a request that comes no further is answered (RFC 9110, section 15.5.9). */
static void end_late(mm_exchange *x) {
  mm_framing_late(&x->in);
  begin_answer(x);
}

static void sweep(void *user) {
  mm_http *h = user;
  const double late = mm_now() - h->c.read_time;
  for (mm_exchange *x = h->exchanges, *next; x; x = next) {
    next = x->after;
    if (!x->b) continue;
    if (x->slow) /* where the client sends no more and nothing is left to write, no event comes */
      leave(x);
    else if (x->phase == ANSWERING)
      look(x);
    else if (x->phase == READING && x->begun && x->since < late)
      end_late(x);
    else if (x->phase != WRITING && x->since < late)
      leave(x);
  }
  resume_accepting(h); /* also where descriptors were wanting */
}

/* ---- Accepting ---- */

static void name_peer(mm_exchange *x, const struct sockaddr *a) {
  char address[INET6_ADDRSTRLEN] = "?";
  if (a->sa_family == AF_INET6) {
    const struct sockaddr_in6 *in6 = (const void *)a;
    inet_ntop(AF_INET6, &in6->sin6_addr, address, sizeof address);
    snprintf(x->peer, sizeof x->peer, "[%s]:%u", address, ntohs(in6->sin6_port));
  } else {
    const struct sockaddr_in *in = (const void *)a;
    inet_ntop(AF_INET, &in->sin_addr, address, sizeof address);
    snprintf(x->peer, sizeof x->peer, "%s:%u", address, ntohs(in->sin_port));
  }
}

static void stop_accepting(mm_http *h) {
  h->full = true;
  evconnlistener_disable(h->listener);
}

static void accepted(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *address, int n, void *user) {
  mm_http *h = user;
  mm_exchange *x = calloc(1, sizeof *x);
  struct bufferevent *b = x ? bufferevent_socket_new(h->base, fd, BEV_OPT_CLOSE_ON_FREE) : NULL;
  const struct timeval write = interval(h->c.write_time);
  const int on = 1;
  (void)l, (void)n;
  if (!b) {
    free(x);
    close((int)fd);
    return;
  }
  *x = (mm_exchange){
      .http = h, .b = b, .after = h->exchanges, .since = mm_now(), .in = {.head_max = (size_t)h->c.header_max, .body_max = h->c.body_max}};
  if (x->after) x->after->before = x;
  h->exchanges = x;
  name_peer(x, address);
  setsockopt((int)fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* a token is not to wait for the one before it to arrive */
  bufferevent_set_timeouts(b, NULL, &write);
  bufferevent_setwatermark(b, EV_READ, 0, READ_MAX);
  bufferevent_set_max_single_read(b, READ_MAX);
  bufferevent_set_max_single_write(b, WRITE_MAX);
  bufferevent_setcb(b, on_read, on_written, on_event, x);
  if (++h->open >= h->connections) stop_accepting(h);
  if (bufferevent_enable(b, EV_READ | EV_WRITE) != 0) leave(x);
}

/* Descriptors or memory are wanting: the next sweep tries again. */
static void accept_failed(struct evconnlistener *l, void *user) {
  mm_http *h = user;
  mm_err err = {0};
  (void)l;
  mm_fail_errno(&err, mm_at(NULL, NULL), "accept", errno);
  stop_accepting(h);
  if (h->reported > 0 && mm_now() - h->reported < REPORT_SECONDS) return;
  h->reported = mm_now();
  h->c.failed(h->c.user, &err);
}

/* ---- Requests and replies ---- */

const char *mm_exchange_method(const mm_exchange *x) { return x->in.method ? x->in.method : "-"; }
const char *mm_exchange_path(const mm_exchange *x) { return x->in.path ? x->in.path : "-"; }
const char *mm_exchange_peer(const mm_exchange *x) { return x->peer; }

int mm_exchange_refused(const mm_exchange *x, const char **reason) {
  *reason = x->in.reason;
  return x->in.status;
}

const char *mm_exchange_header(const mm_exchange *x, const char *name) { return mm_framing_find(&x->in, name, 0); }
const char *mm_exchange_header_at(const mm_exchange *x, const char *name, size_t number) { return mm_framing_find(&x->in, name, number); }

const char *mm_exchange_body(const mm_exchange *x, size_t *n) {
  *n = x->in.body.n;
  return *n ? x->in.body.p : "";
}

void mm_exchange_on_gone(mm_exchange *x, void (*fn)(void *user), void *user) {
  x->gone = fn;
  x->user = user;
}

bool mm_exchange_gone(const mm_exchange *x) { return !x->b || x->slow; }

void mm_exchange_set(mm_exchange *x, const char *name, const char *value) { mm_text_printf(&x->head, "%s: %s\r\n", name, value); }

/* For want of memory, or of a client that takes what is sent: what is sent no longer is a reply. */
static void drop(mm_exchange *x) {
  x->slow = true;
  shutdown(bufferevent_getfd(x->b), SHUT_RDWR);
}

/* Sends the head of the reply. length: of its body; SIZE_MAX: not known before its end. */
static void send_head(mm_exchange *x, int status, const char *type, size_t length) {
  const bool bare = status == 204;
  const time_t now = time(NULL);
  struct tm tm;
  char date[40];
  mm_text t = {0};
  x->chunked = length == SIZE_MAX && x->in.minor > 0;
  x->keep &= !x->http->draining && (length != SIZE_MAX || x->chunked);
  strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
  mm_text_printf(&t, "HTTP/1.1 %d %s\r\nDate: %s\r\n", status, mm_framing_reason(status), date);
  if (status >= 0 && status < STATUSES) x->http->replies[status]++;
  if (x->head.n) mm_text_add(&t, x->head.p, x->head.n);
  if (!bare) mm_text_printf(&t, "Content-Type: %s\r\n", type);
  if (x->chunked)
    mm_text_put(&t, "Transfer-Encoding: chunked\r\n");
  else if (length != SIZE_MAX && !bare)
    mm_text_printf(&t, "Content-Length: %zu\r\n", length);
  if (!x->keep || !x->in.minor) mm_text_put(&t, x->keep ? "Connection: keep-alive\r\n" : "Connection: close\r\n");
  mm_text_put(&t, "\r\n");
  x->started = true;
  if (t.failed || x->head.failed || bufferevent_write(x->b, t.p + x->probed, t.n - x->probed) != 0) drop(x);
  free(t.p);
}

/* The reply is whole. */
static void end(mm_exchange *x) {
  x->phase = WRITING;
  x->gone = NULL;
  if (!x->b) exchange_free(x);
}

void mm_exchange_reply(mm_exchange *x, int status, const char *type, const char *body, size_t n) {
  if (x->b) {
    const bool bodiless = status == 204 || strcmp(mm_exchange_method(x), "HEAD") == 0;
    send_head(x, status, type, n);
    if (!bodiless && n && bufferevent_write(x->b, body, n) != 0) drop(x);
  }
  end(x);
}

static void free_text(const void *bytes, size_t n, void *p) {
  (void)bytes;
  (void)n;
  free(p);
}

void mm_exchange_reply_text(mm_exchange *x, int status, const char *type, mm_text *body) {
  if (x->b) {
    send_head(x, status, type, body->n);
    if (evbuffer_add_reference(output(x), body->p, body->n, free_text, body->p) == 0)
      *body = (mm_text){0};
    else
      drop(x);
  }
  end(x);
}

void mm_exchange_start(mm_exchange *x, int status, const char *type) {
  if (x->b) send_head(x, status, type, SIZE_MAX);
}

bool mm_exchange_piece(mm_exchange *x, const char *bytes, size_t n) {
  if (mm_exchange_gone(x)) return false;
  if (!n) return true; /* as a chunk it would be the end */
  struct evbuffer *out = output(x);
  bool ok = !x->chunked || evbuffer_add_printf(out, "%zx\r\n", n) > 0;
  ok = ok && evbuffer_add(out, bytes, n) == 0 && (!x->chunked || evbuffer_add(out, "\r\n", 2) == 0);
  /* Events that repeat a long request come before its client can have taken any. */
  if (!ok || evbuffer_get_length(out) > x->http->c.pending_max + 8 * x->in.body.n) drop(x);
  return !x->slow;
}

void mm_exchange_end(mm_exchange *x) {
  if (x->b && !x->slow && x->chunked && bufferevent_write(x->b, "0\r\n\r\n", 5) != 0) drop(x);
  if (x->b && evbuffer_get_length(output(x)) == 0 && !x->slow) {
    /* All is written: finish comes from the loop, as it does where something is left to write. */
    bufferevent_trigger(x->b, EV_WRITE, BEV_TRIG_DEFER_CALLBACKS | BEV_TRIG_IGNORE_WATERMARKS);
  }
  end(x);
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
  return add_timer(h, number, 0, fn, user, err);
}

bool mm_http_every(mm_http *h, double seconds, void (*fn)(void *user), void *user, mm_err *err) {
  return add_timer(h, 0, seconds, fn, user, err);
}

/* ---- Opening ---- */

/* A socket that listens; -1: none of the addresses can be had, and errno says why the last one cannot. */
static int listen_at(const struct addrinfo *list) {
  int fd = -1;
  const int on = 1;
  for (const struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
    fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) return fd;
    const int reason = errno;
    close(fd);
    errno = reason;
    fd = -1;
  }
  return fd;
}

static bool bind_address(mm_http *h, mm_err *err) {
  const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
  struct addrinfo *list = NULL;
  union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
  } a = {.v6 = {0}};
  socklen_t n = sizeof a;
  char port[8], what[40];
  snprintf(port, sizeof port, "%u", h->c.port);
  snprintf(what, sizeof what, "listen on port %u", h->c.port);
  const int found = getaddrinfo(h->c.host, port, &hints, &list);
  if (found) return mm_fail(err, MM_IO, "E_IO", mm_at(h->c.host, NULL), "%s: found no such address: %s", what, gai_strerror(found));
  errno = 0;
  const int fd = listen_at(list), reason = errno ? errno : EADDRNOTAVAIL;
  freeaddrinfo(list);
  if (fd < 0) return mm_fail_errno(err, mm_at(h->c.host, NULL), what, reason);
  h->listener = evconnlistener_new(h->base, accepted, h, LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC, 0, fd);
  if (!h->listener) {
    close(fd);
    return mm_fail_memory(err, sizeof *h);
  }
  evconnlistener_set_error_cb(h->listener, accept_failed);
  if (getsockname(fd, &a.any, &n) != 0) return mm_fail_errno(err, mm_at(h->c.host, NULL), "getsockname", errno);
  h->port = ntohs(a.any.sa_family == AF_INET6 ? a.v6.sin6_port : a.v4.sin_port);
  return true;
}

static bool open_loop(mm_http *h, mm_err *err) {
  if (!mm_loop_descriptors(err)) return false;
  event_set_mem_functions(mm_loop_malloc, mm_loop_realloc, mm_loop_free);
  struct event_config *c = event_config_new();
  if (c) {
    event_config_set_flag(c, EVENT_BASE_FLAG_PRECISE_TIMER);
    h->base = event_base_new_with_config(c);
    event_config_free(c);
  }
  if (!h->base) return mm_fail_memory(err, sizeof *h);
  if ((h->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0) return mm_fail_errno(err, mm_at(NULL, NULL), "eventfd", errno);
  h->wake_event = event_new(h->base, h->wake, EV_READ | EV_PERSIST, woken, h);
  if (!h->wake_event || event_add(h->wake_event, NULL) != 0) return mm_fail_memory(err, sizeof *h);
  return true;
}

mm_http *mm_http_open(const mm_http_config *c, mm_err *err) {
  mm_http *h = mm_calloc(1, sizeof *h, err);
  if (!h) return NULL;
  h->c = *c;
  h->wake = -1, h->connections = UINT32_MAX;
  h->last = &h->first;
  pthread_mutex_init(&h->lock, NULL);
  if (open_loop(h, err) && bind_address(h, err) && mm_http_every(h, SWEEP_SECONDS, sweep, h, err)) return h;
  mm_http_close(h);
  return NULL;
}

uint16_t mm_http_port(const mm_http *h) { return h->port; }
uint64_t mm_http_replies(const mm_http *h, int status) { return status >= 0 && status < STATUSES ? h->replies[status] : 0; }

uint32_t mm_http_connections(const mm_http *h) { return h->open; }

bool mm_http_run(mm_http *h, mm_err *err) {
  if (event_base_dispatch(h->base) >= 0) return true;
  return mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "the event loop failed");
}

void mm_http_limit(mm_http *h, uint32_t connections) { h->connections = connections; }
void mm_http_stop(mm_http *h) { event_base_loopbreak(h->base); }

void mm_http_drain(mm_http *h) { h->draining = true; }

bool mm_http_busy(const mm_http *h) {
  for (const mm_exchange *x = h->exchanges; x; x = x->after)
    if (x->owed && x->b) return true;
  return false;
}

void mm_http_close(mm_http *h) {
  if (!h) return;
  for (mm_exchange *x = h->exchanges, *next; x; x = next) {
    next = x->after;
    if (x->b && x->phase == WRITING) evbuffer_write(output(x), bufferevent_getfd(x->b)); /* a short reply that has just been made */
    exchange_free(x);
  }
  if (h->listener) evconnlistener_free(h->listener);
  for (unsigned i = 0; i < h->timers; i++) event_free(h->timer[i].event);
  if (h->wake_event) event_free(h->wake_event);
  if (h->base) event_base_free(h->base);
  if (h->wake >= 0) close(h->wake);
  pthread_mutex_destroy(&h->lock);
  free(h);
}
