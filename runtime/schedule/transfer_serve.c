/* The connections of a server that computes prompts for others (transfer.h): each thread takes one at a time. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "runtime/schedule/transfer_inside.h"

#define LOOK_S   0.05 /* between looks whether the peer is there */
#define REPORT_S 1    /* between two failures that are reported */

/* The scheduler's thread answers the sampled token's call with false: the prompt is all that is wanted. */
static bool no_token(void *user, int32_t id, const mm_logprob *logprobs, const mm_progress *progress) {
  (void)user, (void)id, (void)logprobs, (void)progress;
  return false;
}

typedef struct connection {
  mm_sender *t;
  mm_wire wire;
  mm_sending sending;
  int32_t *token; /* [request.count], then u32[request.boundaries] */
} connection;

static void prompt_ended(void *user, mm_finish reason, const mm_progress *progress, const mm_err *err) {
  connection *c = user;
  (void)progress;
  mm_send_ended(c->t->s, &c->sending, reason, err);
}

static void say_error(connection *c, const mm_err *reason) {
  mm_err none = {0};
  mm_wire_part part = {(void *)reason->text, mm_min(strlen(reason->text), MM_WIRE_TEXT)};
  mm_either_way(mm_wire_send(&c->wire, MM_WIRE_ERROR, &part, 1, &none));
}

static void report(mm_sender *t, const mm_err *err) {
  pthread_mutex_lock(&t->lock);
  const bool now = mm_now() - t->reported >= REPORT_S;
  if (now) t->reported = mm_now();
  pthread_mutex_unlock(&t->lock);
  if (now && t->s->c.report && !atomic_load(&t->stop)) t->s->c.report(t->s->c.user, err);
}

/* ---- one prompt ---- */

static void return_place(mm_sender *t, uint32_t place) {
  pthread_mutex_lock(&t->lock);
  t->place[t->free_count++] = place;
  pthread_mutex_unlock(&t->lock);
  mm_transfer_wake(t->s);
}

/* The oldest page that lies in a place; else waits a little for one. */
static bool next_page(connection *c, ready_page *p, bool *finished) {
  mm_sender *t = c->t;
  mm_sending *g = &c->sending;
  pthread_mutex_lock(&t->lock);
  const struct timespec until = mm_later(LOOK_S);
  for (int late = 0; (!g->ready_count || g->failed) && !g->released && !late;)
    late = pthread_cond_clockwait(&t->changed, &t->lock, CLOCK_MONOTONIC, &until);
  const bool found = g->ready_count > 0 && !g->failed;
  if (found) {
    *p = g->ready[0];
    memmove(g->ready, g->ready + 1, --g->ready_count * sizeof *g->ready);
  }
  *finished = g->released && !found;
  pthread_mutex_unlock(&t->lock);
  return found;
}

static bool send_page(connection *c, ready_page p, mm_err *err) {
  mm_sender *t = c->t;
  const uint32_t parts = mm_engine_pool_parts(t->s->engine);
  uint64_t index = p.index;
  mm_wire_part *part = mm_calloc(parts + (size_t)1, sizeof *part, err);
  if (part) part[0] = (mm_wire_part){&index, sizeof index}, mm_transfer_place(t->s, p.place, part + 1);
  const bool ok = part && mm_wire_send(&c->wire, MM_WIRE_PAGE, part, parts + 1, err);
  free(part);
  return_place(t, p.place);
  if (!ok) return false;
  pthread_mutex_lock(&t->lock);
  t->stats.pages_out++;
  t->stats.bytes_out += mm_engine_page_bytes(t->s->engine);
  pthread_mutex_unlock(&t->lock);
  return true;
}

static bool send_beat(connection *c, double *beaten, mm_err *err) {
  if (mm_now() - *beaten < MM_WIRE_BEAT_S) return true;
  pthread_mutex_lock(&c->t->lock);
  uint64_t computed = c->sending.computed;
  pthread_mutex_unlock(&c->t->lock);
  *beaten = mm_now();
  return mm_wire_send(&c->wire, MM_WIRE_BEAT, &(mm_wire_part){&computed, sizeof computed}, 1, err);
}

/* All pages as they come, then the states. False: the connection is to be given up, err says why. */
static bool send_all(connection *c, mm_err *err) {
  mm_sending *g = &c->sending;
  double beaten = mm_now();
  for (bool finished = false; !finished;) {
    ready_page p = {0};
    if (next_page(c, &p, &finished) && !send_page(c, p, err)) return false;
    if (!finished && !send_beat(c, &beaten, err)) return false;
    if (mm_wire_ended(&c->wire) || atomic_load(&c->t->stop))
      return mm_fail(err, MM_IO, "E_PREFILL", mm_at(c->wire.name, NULL), "the side that decodes has left");
  }
  if (g->failed) return mm_fail_as(err, &g->err);
  const uint64_t bytes = mm_engine_state_bytes(c->t->s->engine);
  if (bytes && !mm_wire_send(&c->wire, MM_WIRE_STATE, &(mm_wire_part){g->state, bytes}, 1, err)) return false;
  pthread_mutex_lock(&c->t->lock);
  c->t->stats.bytes_out += bytes;
  pthread_mutex_unlock(&c->t->lock);
  return mm_wire_send(&c->wire, MM_WIRE_DONE, NULL, 0, err);
}

static void link_sending(connection *c) {
  pthread_mutex_lock(&c->t->lock);
  c->sending.next = c->t->first;
  c->t->first = &c->sending;
  c->t->stats.sending++;
  pthread_mutex_unlock(&c->t->lock);
}

/* Its places are free, and the scheduler's thread knows it no more. */
static void unlink_sending(connection *c, bool submitted, bool ok) {
  mm_sender *t = c->t;
  mm_sending *g = &c->sending;
  pthread_mutex_lock(&t->lock);
  g->aborted |= !ok;
  pthread_mutex_unlock(&t->lock);
  if (submitted) mm_transfer_wake(t->s);
  pthread_mutex_lock(&t->lock);
  while (submitted && !g->released) pthread_cond_wait(&t->changed, &t->lock);
  while (g->ready_count) t->place[t->free_count++] = g->ready[--g->ready_count].place;
  mm_sending **at = &t->first;
  while (*at != g) at = &(*at)->next;
  *at = g->next;
  t->stats.sending--;
  *(ok ? &t->stats.sent : &t->stats.dropped) += 1;
  pthread_mutex_unlock(&t->lock);
  MM_FREE(g->state, g->page);
}

static bool compute(connection *c, const mm_wire_request *q, mm_err *err) {
  mm_scheduler *s = c->t->s;
  mm_sending *g = &c->sending;
  uint64_t ticket = 0;
  *g = (mm_sending){.from = (uint32_t)q->from,
                    .next_page = (uint32_t)q->from,
                    .pages = (uint32_t)mm_ceil_div(q->count, MM_PAGE),
                    .tokens = (uint32_t)q->count};
  if (!(g->page = mm_calloc(g->pages, sizeof *g->page, err))) return false;
  const mm_request r = {.prompt = c->token,
                        .prompt_count = g->tokens,
                        .max_tokens = 1,
                        .sampling = {.top_p = 1},
                        .boundary = (const uint32_t *)c->token + q->count,
                        .boundary_count = (uint32_t)q->boundaries,
                        .salt = q->salt,
                        .priority = (int)q->priority,
                        .user = c,
                        .token = no_token,
                        .done = prompt_ended,
                        .send = g};
  link_sending(c);
  const bool submitted = mm_scheduler_submit(s, &r, &ticket, err), ok = submitted && send_all(c, err);
  if (submitted && !ok) mm_scheduler_cancel(s, ticket);
  unlink_sending(c, submitted, ok);
  return ok;
}

/* ---- a connection ---- */

static bool exchange_hello(connection *c, mm_err *err) {
  mm_wire_profile peer;
  if (!mm_wire_expect(&c->wire, MM_WIRE_HELLO, &peer, sizeof peer, err)) return false;
  return mm_wire_send(&c->wire, MM_WIRE_HELLO, &(mm_wire_part){&c->t->profile, sizeof c->t->profile}, 1, err) &&
         mm_wire_same(&peer, &c->t->profile, c->wire.name, err);
}

static bool read_request(connection *c, mm_wire_request *q, mm_err *err) {
  const uint64_t most = mm_engine_limits(c->t->s->engine)->max_positions;
  mm_wire_head head;
  if (!mm_wire_head_read(&c->wire, &head, err)) return false;
  if (head.kind != MM_WIRE_REQUEST || head.bytes < sizeof *q + sizeof *c->token ||
      head.bytes > sizeof *q + (most + MM_WIRE_BOUNDARIES) * sizeof *c->token || head.bytes % sizeof *c->token)
    return mm_wire_unexpected(&c->wire, &head, err);
  const uint64_t numbers = (head.bytes - sizeof *q) / sizeof *c->token;
  if (!(c->token = mm_calloc(numbers, sizeof *c->token, err))) return false;
  const mm_wire_part part[] = {{q, sizeof *q}, {c->token, numbers * sizeof *c->token}};
  if (!mm_wire_body_read(&c->wire, &head, part, 2, err)) return false;
  return (q->count >= 1 && q->count <= most && q->boundaries <= MM_WIRE_BOUNDARIES && q->count + q->boundaries == numbers &&
          q->from < mm_ceil_div(q->count, MM_PAGE) && q->priority >= INT32_MIN && q->priority <= INT32_MAX) ||
         mm_wire_unexpected(&c->wire, &head, err);
}

static void serve_connection(mm_sender *t, int fd) {
  mm_err err = {0};
  mm_wire_request q = {0};
  connection *c = mm_calloc(1, sizeof *c, &err);
  if (!c) {
    close(fd);
    return;
  }
  c->t = t;
  c->wire = (mm_wire){.fd = fd, .timeout = t->s->c.transfer.timeout, .name = "connection of a server that decodes", .stop = &t->stop};
  bool greeted = false, ok = false;
  if ((greeted = exchange_hello(c, &err)) && read_request(c, &q, &err)) ok = compute(c, &q, &err);
  if (!ok && !(greeted && !c->token && mm_wire_closed(&c->wire))) { /* a peer that only says hello has no complaint */
    say_error(c, &err);
    mm_wire_finish(&c->wire);
    report(t, &err);
  }
  mm_wire_close(&c->wire);
  free(c->token);
  free(c);
}

static void *serve_connections(void *arg) {
  mm_sender *t = arg;
  while (!atomic_load(&t->draining)) {
    struct pollfd p = {.fd = t->fd, .events = POLLIN};
    if (poll(&p, 1, 100) <= 0) continue;
    const int fd = accept4(t->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0)
      serve_connection(t, fd);
    else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
      nanosleep(&(struct timespec){0, 100000000}, NULL); /* the connection waits until there are descriptors again */
  }
  return NULL;
}

bool mm_serve_start(mm_sender *t, mm_err *err) {
  for (int failed; t->threads < MM_SEND_THREADS; t->threads++)
    if ((failed = pthread_create(&t->thread[t->threads], NULL, serve_connections, t)) != 0)
      return mm_fail_thread(err, "start a thread that sends pages", failed);
  return true;
}

void mm_serve_join(mm_sender *t) {
  for (uint32_t i = 0; i < t->threads; i++) pthread_join(t->thread[i], NULL);
}
