/* A load of streamed requests (load_client.h). */
#include "runtime/bench/load_client.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "formats/json.h"

#define HEADER_MAX (64u << 10)
#define PROBE_MS   2000
#define LINE_MAX   (16u << 20) /* of an event, or of a GET's body */

typedef enum phase { SENDING, HEADERS, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILERS, BODY /* of known length, or up to the end */, ENDED } phase;

/* A request under way. */
typedef struct flight {
  int fd;
  phase at;
  mm_load_request *r;              /* NULL: a GET, whose body is `line` */
  mm_text out, header, line, data; /* data: of the event that is being read, its lines joined */
  bool begun, has_data;
  size_t sent;
  uint64_t left; /* bytes of the chunk or body; UINT64_MAX: up to the end of the connection */
  int status;
  bool finished; /* [DONE], or usage after a finish reason */
} flight;

typedef struct load {
  const mm_load_client *c;
  struct addrinfo *list, *address; /* of the host, and the one that is taken */
  double start;
} load;

static double since(const load *l) { return mm_now() - l->start; }

/* Some of it may be the server's own words, of any bytes. */
static bool lose(flight *f, const char *reason) {
  if (!*f->r->reason) mm_show(f->r->reason, sizeof f->r->reason, reason);
  f->at = ENDED;
  return false;
}

/* ---- events ---- */

static size_t text_length(const mm_json *o, const char *key) {
  const mm_json *v = mm_json_get(o, key);
  return mm_json_type_of(v) == MM_JSON_STR ? mm_json_str_len(v) : 0;
}

static bool has_text(const mm_json *choice) {
  const mm_json *delta = mm_json_get(choice, "delta");
  return text_length(choice, "text") || text_length(delta, "content") || text_length(delta, "reasoning_content") ||
         text_length(delta, "reasoning") || mm_json_size(mm_json_get(delta, "tool_calls"));
}

static void count(const mm_json *usage, const char *key, uint64_t *to) {
  const mm_json *v = mm_json_get(usage, key);
  if (mm_json_type_of(v) == MM_JSON_INT && mm_json_int(v) >= 0) *to = (uint64_t)mm_json_int(v);
}

static void on_piece(const load *l, flight *f) {
  mm_load_request *r = f->r;
  const double now = since(l);
  if (r->first <= 0)
    r->first = now;
  else if (MM_GROW(r->gap, &r->gap_cap, r->gaps + 1, MM_IGNORED))
    r->gap[r->gaps++] = now - r->last;
  else
    lose(f, "no memory for times");
  r->last = now;
}

static bool on_data(const load *l, flight *f, const char *text, size_t n) {
  if (n == 6 && memcmp(text, "[DONE]", 6) == 0) return f->finished = true;
  mm_json *o = mm_json_parse(text, n, "event", MM_IGNORED);
  if (!o) return lose(f, "an event is no JSON");
  const mm_json *choice = mm_json_at(mm_json_get(o, "choices"), 0), *usage = mm_json_get(o, "usage");
  char reason[160] = "";
  if (mm_json_get(o, "error") && mm_json_type_of(mm_json_get(o, "error")) != MM_JSON_NULL)
    snprintf(reason, sizeof reason, "%.*s", (int)mm_min(n, 150), text);
  if (choice && has_text(choice)) on_piece(l, f);
  if (mm_json_type_of(usage) == MM_JSON_OBJ) count(usage, "prompt_tokens", &f->r->input), count(usage, "completion_tokens", &f->r->output);
  mm_json_free(o);
  return !*reason || lose(f, reason);
}

/* The event is whole, or the body ends within its lines, as where a server leaves the last blank line out. */
static bool end_event(const load *l, flight *f) {
  const bool ok = !f->has_data || on_data(l, f, f->data.p ? f->data.p : "", f->data.n);
  mm_text_clear(&f->data);
  f->has_data = false;
  return ok;
}

/* A line of server-sent events (WHATWG HTML, 9.2), in f->line. */
static bool on_line(const load *l, flight *f) {
  const char *p = f->line.p ? f->line.p : "";
  size_t n = f->line.n;
  while (n && p[n - 1] == '\r') n--;
  if (!f->begun && n >= 3 && memcmp(p, "\xef\xbb\xbf", 3) == 0) p += 3, n -= 3;
  f->begun = true;
  if (!n) return end_event(l, f);
  if (n < 5 || memcmp(p, "data:", 5) != 0) return true;
  const size_t skip = n > 5 && p[5] == ' ' ? 6 : 5;
  if (f->has_data) mm_text_put(&f->data, "\n");
  mm_text_add(&f->data, p + skip, n - skip);
  f->has_data = true;
  return (!f->data.failed && f->data.n <= LINE_MAX) || lose(f, "an event is too long");
}

/* Bytes of the body: lines of events, or all of it. */
static bool on_body(const load *l, flight *f, const char *p, size_t n) {
  if (!f->r->body.n || f->status != 200) {
    mm_text_add(&f->line, p, n);
    return (!f->line.failed && f->line.n <= LINE_MAX) || lose(f, "the body is too long");
  }
  while (n) {
    const char *end = memchr(p, '\n', n);
    const size_t some = end ? (size_t)(end - p) : n;
    mm_text_add(&f->line, p, some);
    if (f->line.failed || f->line.n > LINE_MAX) return lose(f, "an event is too long");
    p += some + (end != NULL), n -= some + (end != NULL);
    if (!end) break;
    if (!on_line(l, f)) return false;
    mm_text_clear(&f->line);
  }
  return true;
}

/* ---- HTTP ---- */

/* The value of a header field in the lower-case block, or NULL. */
static const char *field(const char *block, const char *name) {
  const char *at = strstr(block, name);
  return at ? at + strlen(name) + strspn(at + strlen(name), " \t") : NULL;
}

static bool on_header(flight *f) {
  char *block = f->header.p;
  if (sscanf(block, "HTTP/1.%*1[01] %3d", &f->status) != 1) return lose(f, "the reply is no HTTP/1.1");
  if (f->status / 100 == 1 && f->status != 101) return true; /* an interim reply: the final one follows */
  for (char *c = block; *c; c++)
    if (*c >= 'A' && *c <= 'Z') *c = (char)(*c + 'a' - 'A');
  const char *coding = field(block, "\ntransfer-encoding:"), *length = field(block, "\ncontent-length:");
  f->left = UINT64_MAX;
  if (length) {
    char *end;
    f->left = strtoull(length, &end, 10);
    if (*length < '0' || *length > '9' || !*end || !strchr(" \t\r\n", *end) || f->left == UINT64_MAX)
      return lose(f, "the reply's Content-Length is no number");
  }
  f->at = coding && strncmp(coding, "chunked", 7) == 0 ? CHUNK_SIZE : BODY;
  if (f->at == BODY && f->left == 0) f->at = ENDED;
  return true;
}

/* The end of a line in p[0, n) whose beginning may be in f->header: true when it is complete there, its length in *used. */
static bool whole_line(flight *f, const char *p, size_t n, size_t *used) {
  const char *end = memchr(p, '\n', n);
  *used = end ? (size_t)(end - p) + 1 : n;
  mm_text_add(&f->header, p, *used);
  return end;
}

static bool on_bytes(const load *l, flight *f, const char *p, size_t n) {
  while (n && f->at != ENDED) {
    size_t used = (size_t)mm_min(n, f->left);
    switch (f->at) {
      case HEADERS:
        if (whole_line(f, p, n, &used) && f->header.n >= 4 && memcmp(f->header.p + f->header.n - 4, "\r\n\r\n", 4) == 0) {
          if (!on_header(f)) return false;
          mm_text_clear(&f->header);
        }
        break;
      case CHUNK_SIZE:
        if (whole_line(f, p, n, &used)) {
          char *end;
          f->left = strtoull(f->header.p, &end, 16);
          if (!isxdigit((unsigned char)*f->header.p) || !*end || !strchr(" \t;\r\n", *end) || f->left == UINT64_MAX)
            return lose(f, "a chunk has no size");
          f->at = f->left ? CHUNK : TRAILERS;
          mm_text_clear(&f->header);
        }
        break;
      case CHUNK:
      case BODY:
        if (!on_body(l, f, p, used)) return false;
        if (f->left != UINT64_MAX) f->left -= used;
        if (f->left == 0) f->at = f->at == BODY ? ENDED : CHUNK_END;
        break;
      case CHUNK_END:
      case TRAILERS:
        if (whole_line(f, p, n, &used)) {
          f->at = f->at == CHUNK_END ? CHUNK_SIZE : f->header.n <= 2 ? ENDED : TRAILERS;
          mm_text_clear(&f->header);
        }
        break;
      case SENDING:
      case ENDED: return lose(f, "bytes came before the request was sent");
    }
    if (f->header.failed || f->header.n > HEADER_MAX) return lose(f, "the header is too long");
    p += used, n -= used;
  }
  return true;
}

static bool send_some(flight *f) {
  while (f->sent < f->out.n) {
    const ssize_t n = send(f->fd, f->out.p + f->sent, f->out.n - f->sent, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR || errno == ENOTCONN)) return true;
    if (n < 0) return lose(f, strerror(errno));
    f->sent += (size_t)n;
  }
  f->at = HEADERS;
  return true;
}

static void receive(const load *l, flight *f) {
  char bytes[8192];
  for (;;) {
    const ssize_t n = recv(f->fd, bytes, sizeof bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n < 0) {
      lose(f, strerror(errno));
    } else if (n == 0 && f->at == BODY && f->left == UINT64_MAX) {
      f->at = ENDED;
    } else if (n == 0) {
      lose(f, "the connection ended early");
    }
    if (n <= 0 || !on_bytes(l, f, bytes, (size_t)n) || f->at == ENDED) return;
  }
}

/* ---- flights ---- */

/* A request without a body is a GET. */
static bool open_flight(const load *l, flight *f, mm_load_request *r, const char *path) {
  const mm_load_client *c = l->c;
  const bool six = strchr(c->host, ':');
  const char *method = r->body.n ? "POST" : "GET";
  *f = (flight){.r = r, .fd = socket(l->address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  if (f->fd < 0) return lose(f, strerror(errno));
  mm_text_printf(&f->out, "%s %s HTTP/1.1\r\nHost: %s%s%s:%s\r\nConnection: close\r\n", method, path, six ? "[" : "", c->host,
                 six ? "]" : "", c->port);
  if (c->key) mm_text_printf(&f->out, "Authorization: Bearer %s\r\n", c->key);
  if (r->body.n) mm_text_printf(&f->out, "Content-Type: application/json\r\nContent-Length: %zu\r\n", r->body.n);
  mm_text_put(&f->out, "\r\n");
  if (r->body.n) mm_text_add(&f->out, r->body.p, r->body.n);
  if (f->out.failed) return lose(f, "no memory for the request");
  const int on = 1;
  if (setsockopt(f->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0) return lose(f, strerror(errno));
  return connect(f->fd, l->address->ai_addr, l->address->ai_addrlen) == 0 || errno == EINPROGRESS || lose(f, strerror(errno));
}

static void close_flight(flight *f) {
  mm_load_request *r = f->r;
  if (f->fd >= 0) close(f->fd);
  if (f->status != 200) lose(f, MM_FORMATTED(160, "status %d: %.*s", f->status, (int)mm_min(f->line.n, 120), f->line.p ? f->line.p : ""));
  if (!*r->reason && !f->finished) snprintf(r->reason, sizeof r->reason, "the stream has no [DONE]");
  if (!*r->reason && r->first <= 0) snprintf(r->reason, sizeof r->reason, "the reply has no text");
  if (!*r->reason) {
    r->done = true;
    if (!r->output) r->output = r->gaps + 1;
  }
  MM_FREE(f->out.p, f->header.p, f->line.p, f->data.p);
}

/* One turn of poll over all flights; those that ended are closed, and *n is what is left. */
static bool turn(const load *l, flight *f, struct pollfd *p, size_t *n, double wait, mm_err *err) {
  for (size_t i = 0; i < *n; i++) p[i] = (struct pollfd){.fd = f[i].fd, .events = f[i].at == SENDING ? POLLOUT : POLLIN};
  const int ready = poll(p, *n, (int)(wait * 1e3 + 0.999));
  if (ready < 0 && errno != EINTR) return mm_fail_errno(err, mm_at(NULL, NULL), "poll", errno);
  size_t left = 0;
  for (size_t i = 0; i < *n; i++) {
    int error = 0;
    socklen_t size = sizeof error;
    if (ready > 0 && p[i].revents && f[i].at == SENDING && getsockopt(f[i].fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error)
      lose(&f[i], strerror(error));
    if (ready > 0 && p[i].revents && f[i].at == SENDING) send_some(&f[i]);
    if (ready > 0 && p[i].revents && f[i].at != SENDING && f[i].at != ENDED) receive(l, &f[i]);
    if (f[i].at == ENDED && !*f[i].r->reason && f[i].status == 200 && (!f[i].line.n || on_line(l, &f[i]))) end_event(l, &f[i]);
    if (f[i].at != ENDED && since(l) - f[i].r->sent > l->c->timeout) lose(&f[i], "--timeout has passed");
    if (f[i].at == ENDED)
      close_flight(&f[i]);
    else
      f[left++] = f[i];
  }
  *n = left;
  return true;
}

/* A server listens at the address. */
static bool answers(const struct addrinfo *a) {
  const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  struct pollfd p = {.fd = fd, .events = POLLOUT};
  int error = 0;
  socklen_t size = sizeof error;
  bool ok = fd >= 0 && (connect(fd, a->ai_addr, a->ai_addrlen) == 0 || errno == EINPROGRESS);
  ok = ok && poll(&p, 1, PROBE_MS) == 1 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && !error;
  if (fd >= 0) close(fd);
  return ok;
}

/* Of several addresses, as localhost may have, the first that answers; the first of all where none does. */
static bool find_host(load *l, mm_err *err) {
  const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  const int r = getaddrinfo(l->c->host, l->c->port, &hints, &l->list);
  l->address = l->list;
  for (struct addrinfo *a = l->list; a && l->list->ai_next; a = a->ai_next) {
    if (!answers(a)) continue;
    l->address = a;
    break;
  }
  l->start = mm_now();
  return r == 0 || mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "%s:%s: %s", l->c->host, l->c->port, gai_strerror(r));
}

/* Raises the limit of descriptors to one for each request under way, and some for the program. */
static bool raise_descriptors(size_t flights, mm_err *err) {
  struct rlimit limit;
  const rlim_t wanted = flights + 32;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return true;
  if (limit.rlim_max < wanted)
    return mm_fail(
        err, MM_LIMIT, "E_LIMIT", mm_at(NULL, NULL),
        "found %zu requests at a time, the limit of %llu open files allows %llu; give --max-concurrency, or raise it (ulimit -n)", flights,
        (unsigned long long)limit.rlim_max, (unsigned long long)(limit.rlim_max - mm_min(limit.rlim_max, 32)));
  limit.rlim_cur = wanted;
  return setrlimit(RLIMIT_NOFILE, &limit) == 0 || mm_fail_errno(err, mm_at(NULL, NULL), "setrlimit", errno);
}

bool mm_load_run(const mm_load_client *c, mm_load_request *r, size_t count, double *seconds, mm_err *err) {
  load l = {.c = c};
  size_t next = 0, n = 0;
  const size_t most = (size_t)mm_min(c->concurrency, count);
  flight *f = mm_calloc(most, sizeof *f, err);
  struct pollfd *p = mm_calloc(most, sizeof *p, err);
  bool ok = f && p && raise_descriptors(most, err) && find_host(&l, err);
  while (ok && (next < count || n)) {
    for (; next < count && n < most && r[next].at <= since(&l); next++) {
      r[next].sent = since(&l);
      open_flight(&l, &f[n++], &r[next], c->path);
    }
    double idle = 1;
    if (next < count && n < most) idle = fmin(1, fmax(0, r[next].at - since(&l)));
    ok = turn(&l, f, p, &n, idle, err);
  }
  *seconds = since(&l);
  for (size_t i = 0; i < n; i++) close_flight(&f[i]);
  if (l.list) freeaddrinfo(l.list);
  free(f);
  free(p);
  return ok;
}

char *mm_load_get(const mm_load_client *c, const char *path, size_t *n, mm_err *err) {
  load l = {.c = c};
  flight f;
  size_t left = 1;
  struct pollfd p;
  char *body = NULL;
  mm_load_request r = {0};
  if (!find_host(&l, err)) return NULL;
  bool ok = open_flight(&l, &f, &r, path);
  while (ok && left && since(&l) < c->timeout) {
    p = (struct pollfd){.fd = f.fd, .events = f.at == SENDING ? POLLOUT : POLLIN};
    if (poll(&p, 1, 1000) > 0) {
      if (f.at == SENDING) send_some(&f);
      if (f.at != SENDING && f.at != ENDED) receive(&l, &f);
    }
    left = f.at != ENDED;
  }
  const bool whole = f.at == ENDED && !*r.reason;
  if (whole && f.status == 200 && f.line.p) {
    body = f.line.p, *n = f.line.n, f.line = (mm_text){0};
  } else {
    const bool six = strchr(c->host, ':');
    char text[200];
    snprintf(text, sizeof text, "%s", *r.reason ? r.reason : !whole ? "--timeout has passed" : "found a reply without a body");
    if (whole && f.status != 200) snprintf(text, sizeof text, "found status %d, expected 200", f.status);
    mm_fail(err, MM_IO, "E_IO", mm_at(NULL, NULL), "http://%s%s%s:%s%s: %s", six ? "[" : "", c->host, six ? "]" : "", c->port, path, text);
  }
  close_flight(&f);
  freeaddrinfo(l.list);
  return body;
}
