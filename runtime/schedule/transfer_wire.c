/* The protocol's messages (transfer_wire.h): sockets that do not block, waits with limits, digests. Nothing that a peer sends is taken
 * unchecked. */
#include "runtime/schedule/transfer_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SLICE_MS    100
#define PIECE       (1 << 18) /* bytes of a call */
#define FINISH_S    0.5
#define LEAST_BYTES 1e6 /* a second, of a message */

static const char magic[4] = "mmkv";
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are sent as they lie in memory");
_Static_assert(sizeof(mm_wire_head) == 48 && sizeof(mm_wire_request) == 40 && sizeof(mm_wire_profile) == 8 * MM_WIRE_FACTS + 32,
               "no padding is sent");

/* ---- what both have in common ---- */

static const struct fact {
  const char *name;
  bool word;
} facts[MM_WIRE_FACTS] = {{"version of the protocol", false},
                          {"release", true},
                          {"--device", true},
                          {"--kv-cache-dtype", true},
                          {"type of index keys", true},
                          {"--input-dtype", true},
                          {"--act-quant (1: on)", false},
                          {"--batch-invariant (1: on)", false},
                          {"ranks", false},
                          {"tokens of a page", false},
                          {"bytes of a page, cells of drafts included,", false},
                          {"bytes of lightning states", false},
                          {"groups of attention (--attn-tp, --dp)", false}};

uint64_t mm_wire_word(const char *text) {
  uint64_t word = 0;
  memcpy(&word, text, mm_min(strlen(text), sizeof word));
  return word;
}

static const char *fact_text(char to[24], uint64_t value, bool word) {
  char text[9] = {0};
  memcpy(text, &value, sizeof value);
  if (word) return mm_escape(to, 24, text, strlen(text));
  snprintf(to, 24, "%llu", (unsigned long long)value);
  return to;
}

bool mm_wire_same(const mm_wire_profile *peer, const mm_wire_profile *own, const char *name, mm_err *err) {
  char found[24], expected[24];
  for (uint32_t i = 0; i < MM_WIRE_FACTS; i++)
    if (peer->fact[i] != own->fact[i])
      return mm_fail(err, MM_USAGE, "E_PREFILL", mm_at(name, NULL), "%s: found %s there, expected %s as here", facts[i].name,
                     fact_text(found, peer->fact[i], facts[i].word), fact_text(expected, own->fact[i], facts[i].word));
  return mm_digest_equal(&peer->checkpoint, &own->checkpoint) ||
         mm_fail(err, MM_USAGE, "E_PREFILL", mm_at(name, NULL),
                 "found another checkpoint there: a manifest of digest %.16s…, expected %.16s…", mm_digest_hex(&peer->checkpoint).text,
                 mm_digest_hex(&own->checkpoint).text);
}

/* ---- addresses ---- */

/* Splits HOST:PORT or [HOST]:PORT. */
static bool split_address(const char *address, char host[256], const char **port) {
  const char *colon = strrchr(address, ':'), *begin = address, *end = colon;
  if (!colon || !colon[1] || strspn(colon + 1, "0123456789") != strlen(colon + 1) || strtoul(colon + 1, NULL, 10) > UINT16_MAX)
    return false;
  if (*begin == '[' && end > begin && end[-1] == ']') begin++, end--;
  const size_t n = (size_t)(end - begin);
  if (!n || n > 255) return false;
  memcpy(host, begin, n);
  host[n] = 0;
  *port = colon + 1;
  return true;
}

static struct addrinfo *find_address(const char *address, mm_err *err) {
  const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV};
  struct addrinfo *list = NULL;
  char host[256];
  const char *port;
  if (!split_address(address, host, &port)) {
    mm_fail(err, MM_USAGE, "E_USAGE", mm_at(address, NULL), "found no address of the form HOST:PORT");
    return NULL;
  }
  const int reason = getaddrinfo(host, port, &hints, &list);
  if (reason) mm_fail(err, MM_IO, "E_IO", mm_at(address, NULL), "find the address: %s", gai_strerror(reason));
  return reason ? NULL : list;
}

static bool wait_for(const mm_wire *w, short events, double until, const char *what, mm_err *err) {
  for (;;) {
    struct pollfd p = {.fd = w->fd, .events = events};
    const double left = until - mm_now();
    if (atomic_load(w->stop)) return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "nobody waits for it any more");
    if (left <= 0) return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "%s: not within %g s", what, w->timeout);
    const int n = poll(&p, 1, (int)mm_min(SLICE_MS, (uint64_t)(left * 1e3) + 1));
    if (n < 0 && errno != EINTR) return mm_fail_errno(err, mm_at(w->name, NULL), "poll", errno);
    if (n > 0) return true;
  }
}

static bool connect_to(mm_wire *w, const struct addrinfo *a, mm_err *err) {
  const int on = 1;
  int reason = 0;
  socklen_t n = sizeof reason;
  if ((w->fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) < 0)
    return mm_fail_errno(err, mm_at(w->name, NULL), "socket", errno);
  bool ok = connect(w->fd, a->ai_addr, a->ai_addrlen) == 0;
  if (!ok && errno != EINPROGRESS) mm_fail_errno(err, mm_at(w->name, NULL), "connect", errno);
  if (!ok && errno == EINPROGRESS && wait_for(w, POLLOUT, mm_now() + w->timeout, "connect", err)) {
    if (getsockopt(w->fd, SOL_SOCKET, SO_ERROR, &reason, &n) != 0) reason = errno;
    ok = !reason || mm_fail_errno(err, mm_at(w->name, NULL), "connect", reason);
  }
  if (ok) setsockopt(w->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (!ok) mm_wire_close(w);
  return ok;
}

bool mm_wire_connect(mm_wire *w, const char *address, mm_err *err) {
  struct addrinfo *list = find_address(address, err);
  bool ok = false;
  for (const struct addrinfo *a = list; a && !ok; a = a->ai_next) {
    mm_err own = {0};
    ok = connect_to(w, a, &own);
    if (!ok && !a->ai_next) mm_fail_as(err, &own);
  }
  if (list) freeaddrinfo(list);
  return ok;
}

static int listen_at(const struct addrinfo *a, const char *address, uint16_t *port, mm_err *err) {
  const int on = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
  } own = {.v6 = {0}};
  socklen_t n = sizeof own;
  if (fd < 0) return mm_fail_errno(err, mm_at(address, NULL), "socket", errno), -1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0 && getsockname(fd, &own.any, &n) == 0) {
    *port = ntohs(own.any.sa_family == AF_INET6 ? own.v6.sin6_port : own.v4.sin_port);
    return fd;
  }
  mm_fail_errno(err, mm_at(address, NULL), "listen", errno);
  close(fd);
  return -1;
}

int mm_wire_listen(const char *address, uint16_t *port, mm_err *err) {
  struct addrinfo *list = find_address(address, err);
  const int fd = list ? listen_at(list, address, port, err) : -1;
  if (list) freeaddrinfo(list);
  return fd;
}

void mm_wire_close(mm_wire *w) {
  if (w->fd >= 0) close(w->fd);
  w->fd = -1;
}

/* ---- bytes ---- */

static bool closed(const mm_wire *w, mm_err *err) {
  return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "found the connection closed, expected more of it");
}

static bool write_bytes(const mm_wire *w, const char *at, size_t n, double until, mm_err *err) {
  while (n) {
    const ssize_t done = send(w->fd, at, mm_min(n, PIECE), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (done > 0) {
      at += done, n -= (size_t)done;
      continue;
    }
    if (done < 0 && (errno == EPIPE || errno == ECONNRESET)) return closed(w, err);
    if (done < 0 && errno != EAGAIN && errno != EINTR) return mm_fail_errno(err, mm_at(w->name, NULL), "send", errno);
    const double late = mm_now() + w->timeout;
    if (!wait_for(w, POLLOUT, late < until ? late : until, "send a message", err)) return false;
  }
  return true;
}

/* sum: NULL, or the digest that the bytes are added to while they are in the cache, and the system receives more. */
static bool read_bytes(const mm_wire *w, char *at, size_t n, double until, mm_sha256_state *sum, mm_err *err) {
  double heard = mm_now();
  while (n) {
    const ssize_t done = recv(w->fd, at, mm_min(n, PIECE), MSG_DONTWAIT);
    if (done > 0) {
      if (sum) mm_sha256_add(sum, at, (size_t)done);
      at += done, n -= (size_t)done;
      heard = mm_now();
      continue;
    }
    if (done == 0 || errno == ECONNRESET) return closed(w, err);
    if (errno != EAGAIN && errno != EINTR) return mm_fail_errno(err, mm_at(w->name, NULL), "receive", errno);
    const double late = heard + w->timeout;
    if (!wait_for(w, POLLIN, late < until ? late : until, "receive a message", err)) return false;
  }
  return true;
}

bool mm_wire_ended(const mm_wire *w) {
  char byte;
  return recv(w->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
}

bool mm_wire_closed(const mm_wire *w) {
  char byte;
  return recv(w->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

void mm_wire_finish(mm_wire *w) {
  char bytes[4096];
  mm_err none = {0};
  if (w->fd < 0 || shutdown(w->fd, SHUT_WR) != 0) return;
  for (const double until = mm_now() + FINISH_S; wait_for(w, POLLIN, until, "end", &none);)
    if (recv(w->fd, bytes, sizeof bytes, MSG_DONTWAIT) <= 0) return;
}

/* ---- messages ---- */

static double limit_of(const mm_wire *w, uint64_t bytes) { return mm_now() + w->timeout + (double)bytes / LEAST_BYTES; }

static void begin_digest(mm_sha256_state *sum, const mm_wire_head *head) {
  mm_sha256_begin(sum);
  mm_sha256_add(sum, &head->kind, sizeof head->kind);
  mm_sha256_add(sum, &head->bytes, sizeof head->bytes);
}

bool mm_wire_send(mm_wire *w, mm_wire_kind kind, const mm_wire_part *part, uint32_t parts, mm_err *err) {
  mm_wire_head head = {.kind = kind};
  mm_sha256_state sum;
  memcpy(head.magic, magic, sizeof magic);
  for (uint32_t i = 0; i < parts; i++) head.bytes += part[i].bytes;
  begin_digest(&sum, &head);
  for (uint32_t i = 0; i < parts; i++) mm_sha256_add(&sum, part[i].data, part[i].bytes);
  head.digest = mm_sha256_end(&sum);
  const double until = limit_of(w, head.bytes);
  bool ok = write_bytes(w, (const char *)&head, sizeof head, until, err);
  for (uint32_t i = 0; i < parts && ok; i++) ok = write_bytes(w, part[i].data, part[i].bytes, until, err);
  return ok;
}

bool mm_wire_head_read(mm_wire *w, mm_wire_head *head, mm_err *err) {
  if (!read_bytes(w, (char *)head, sizeof *head, limit_of(w, sizeof *head), NULL, err)) return false;
  return (memcmp(head->magic, magic, sizeof magic) == 0 && head->kind >= MM_WIRE_HELLO && head->kind <= MM_WIRE_ERROR) ||
         mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "found bytes that begin no message; is another service there?");
}

bool mm_wire_body_read(mm_wire *w, const mm_wire_head *head, const mm_wire_part *part, uint32_t parts, mm_err *err) {
  const double until = limit_of(w, head->bytes);
  mm_sha256_state sum;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < parts; i++) bytes += part[i].bytes;
  if (bytes != head->bytes)
    return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "found a message of kind %u with %llu bytes, expected %llu", head->kind,
                   (unsigned long long)head->bytes, (unsigned long long)bytes);
  begin_digest(&sum, head);
  for (uint32_t i = 0; i < parts; i++)
    if (!read_bytes(w, part[i].data, part[i].bytes, until, &sum, err)) return false;
  const mm_digest found = mm_sha256_end(&sum);
  return mm_digest_equal(&found, &head->digest) ||
         mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "found a message of kind %u that is not what its digest says", head->kind);
}

bool mm_wire_refused(mm_wire *w, const mm_wire_head *head, mm_err *err) {
  char text[MM_WIRE_TEXT];
  if (head->bytes > sizeof text) return mm_wire_unexpected(w, head, err);
  if (!mm_wire_body_read(w, head, &(mm_wire_part){text, head->bytes}, 1, err)) return false;
  return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "it says: %s", MM_ESCAPED_BYTES(2 * MM_WIRE_TEXT, text, head->bytes));
}

bool mm_wire_unexpected(const mm_wire *w, const mm_wire_head *head, mm_err *err) {
  return mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "found a message of kind %u and %llu bytes, which does not belong there",
                 head->kind, (unsigned long long)head->bytes);
}

bool mm_wire_expect(mm_wire *w, mm_wire_kind kind, void *data, size_t bytes, mm_err *err) {
  mm_wire_head head;
  if (!mm_wire_head_read(w, &head, err)) return false;
  if (head.kind == MM_WIRE_ERROR) return mm_wire_refused(w, &head, err);
  if (head.kind != kind) return mm_wire_unexpected(w, &head, err);
  return mm_wire_body_read(w, &head, &(mm_wire_part){data, bytes}, 1, err);
}
