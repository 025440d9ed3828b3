/* The connections of a server that has its prompts computed elsewhere (transfer.h): each thread fetches one prompt at a time, and writes
 * its pages into the places that the scheduler gave. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/transfer_inside.h"

#define PROGRESS_LIMITS 6 /* times the timeout, without a page or a token more: the peer hangs */

/* Beats show progress; what has not moved for long is given up. */
typedef struct progress {
  uint64_t computed;
  double moved;
} progress;

static mm_wire wire_of(const mm_receiver *r, atomic_bool *stop) {
  return (mm_wire){.fd = -1, .timeout = r->s->c.transfer.timeout, .name = r->s->c.transfer.from, .stop = stop};
}

static bool say_hello(mm_receiver *r, mm_wire *w, mm_err *err) {
  mm_wire_profile peer;
  return mm_wire_connect(w, w->name, err) && mm_wire_send(w, MM_WIRE_HELLO, &(mm_wire_part){&r->profile, sizeof r->profile}, 1, err) &&
         mm_wire_expect(w, MM_WIRE_HELLO, &peer, sizeof peer, err) && mm_wire_same(&peer, &r->profile, w->name, err);
}

bool mm_fetch_probe(mm_receiver *r, mm_err *err) {
  atomic_bool stop = false;
  mm_wire w = wire_of(r, &stop);
  const bool ok = say_hello(r, &w, err);
  mm_wire_close(&w);
  return ok;
}

/* ---- one prompt ---- */

static bool read_page(mm_receiver *r, mm_fetch *f, mm_wire *w, const mm_wire_head *head, mm_err *err) {
  const uint32_t parts = mm_engine_pool_parts(r->s->engine);
  const uint64_t next = f->request.from + f->got;
  uint64_t index = 0;
  if (next >= f->pages || head->bytes != sizeof index + mm_engine_page_bytes(r->s->engine)) return mm_wire_unexpected(w, head, err);
  mm_wire_part *part = mm_calloc(parts + (size_t)1, sizeof *part, err);
  if (!part) return false;
  part[0] = (mm_wire_part){&index, sizeof index};
  mm_transfer_place(r->s, f->place[next], part + 1);
  const bool ok = mm_wire_body_read(w, head, part, parts + 1, err);
  free(part);
  if (!ok || index != next) return ok ? mm_wire_unexpected(w, head, err) : false;
  f->got++;
  f->bytes += mm_engine_page_bytes(r->s->engine);
  return true;
}

static bool read_state(mm_receiver *r, mm_fetch *f, mm_wire *w, const mm_wire_head *head, mm_err *err) {
  const uint64_t bytes = mm_engine_state_bytes(r->s->engine);
  if (!bytes || f->state || head->bytes != bytes || f->request.from + f->got != f->pages) return mm_wire_unexpected(w, head, err);
  if (!(f->state = mm_calloc(1, bytes, err))) return false;
  f->bytes += bytes;
  return mm_wire_body_read(w, head, &(mm_wire_part){f->state, bytes}, 1, err);
}

static bool read_beat(mm_fetch *f, mm_wire *w, const mm_wire_head *head, progress *p, mm_err *err) {
  uint64_t computed;
  if (!mm_wire_body_read(w, head, &(mm_wire_part){&computed, sizeof computed}, 1, err)) return false;
  if (computed > f->request.count) return mm_wire_unexpected(w, head, err);
  if (computed > p->computed) p->computed = computed, p->moved = mm_now();
  return mm_now() - p->moved < PROGRESS_LIMITS * w->timeout ||
         mm_fail(err, MM_IO, "E_PREFILL", mm_at(w->name, NULL), "%llu of %llu tokens computed, and no more for %g s",
                 (unsigned long long)p->computed, (unsigned long long)f->request.count, PROGRESS_LIMITS * w->timeout);
}

/* One message; *done after the last. */
static bool read_message(mm_receiver *r, mm_fetch *f, mm_wire *w, progress *p, bool *done, mm_err *err) {
  mm_wire_head head;
  if (!mm_wire_head_read(w, &head, err)) return false;
  switch ((mm_wire_kind)head.kind) {
    case MM_WIRE_BEAT: return read_beat(f, w, &head, p, err);
    case MM_WIRE_PAGE: p->moved = mm_now(); return read_page(r, f, w, &head, err);
    case MM_WIRE_STATE: p->moved = mm_now(); return read_state(r, f, w, &head, err);
    case MM_WIRE_ERROR: return mm_wire_refused(w, &head, err);
    case MM_WIRE_DONE:
      *done = f->request.from + f->got == f->pages && (f->state || !mm_engine_state_bytes(r->s->engine));
      if (!*done) return mm_wire_unexpected(w, &head, err);
      return mm_wire_body_read(w, &head, NULL, 0, err);
    case MM_WIRE_HELLO:
    case MM_WIRE_REQUEST: return mm_wire_unexpected(w, &head, err);
  }
  return false;
}

static bool fetch(mm_receiver *r, mm_fetch *f, mm_err *err) {
  mm_wire w = wire_of(r, &f->stop);
  const mm_wire_part request[] = {{&f->request, sizeof f->request},
                                  {f->token, f->request.count * sizeof *f->token},
                                  {f->boundary, f->request.boundaries * sizeof *f->boundary}};
  progress p = {.moved = mm_now()};
  const bool greeted = say_hello(r, &w, err);
  bool ok = greeted && mm_wire_send(&w, MM_WIRE_REQUEST, request, 3, err), done = false;
  while (ok && !done) ok = read_message(r, f, &w, &p, &done, err);
  f->silent = mm_now() - p.moved;
  f->lost = !ok && (!greeted || f->silent >= w.timeout);
  mm_wire_close(&w);
  return ok;
}

/* Fetches that have not begun end with one whose other side was lost: each would wait as long for nothing. Under the lock. */
static void end_with(mm_receiver *r, mm_fetch *f, bool ok, const mm_err *err) {
  f->ok = ok;
  f->err = *err;
  f->ended = true;
  for (mm_fetch *g = r->first; g && f->lost && !atomic_load(&f->stop); g = g->next)
    if (!g->begun) {
      g->begun = g->ended = g->lost = true;
      g->silent = f->silent;
      g->err = *err;
    }
}

mm_fetch *mm_fetch_next(const mm_receiver *r) {
  mm_fetch *next = NULL;
  for (mm_fetch *f = r->first; f; f = f->next)
    if (!f->begun && (!next || f->request.priority > next->request.priority)) next = f;
  return next;
}

static void *fetch_prompts(void *arg) {
  mm_receiver *r = arg;
  pthread_mutex_lock(&r->lock);
  while (!r->closing) {
    mm_fetch *f = mm_fetch_next(r);
    if (!f) {
      pthread_cond_wait(&r->changed, &r->lock);
      continue;
    }
    f->begun = true;
    pthread_mutex_unlock(&r->lock);
    mm_err err = {0};
    const bool ok = fetch(r, f, &err);
    pthread_mutex_lock(&r->lock);
    end_with(r, f, ok, &err);
    pthread_mutex_unlock(&r->lock);
    mm_transfer_wake(r->s);
    pthread_mutex_lock(&r->lock);
  }
  pthread_mutex_unlock(&r->lock);
  return NULL;
}

bool mm_fetch_start(mm_receiver *r, mm_err *err) {
  for (int failed; r->threads < MM_FETCH_THREADS; r->threads++)
    if ((failed = pthread_create(&r->thread[r->threads], NULL, fetch_prompts, r)) != 0)
      return mm_fail_thread(err, "start a thread that receives pages", failed);
  return true;
}

void mm_fetch_join(mm_receiver *r) {
  pthread_mutex_lock(&r->lock);
  r->closing = true;
  for (mm_fetch *f = r->first; f; f = f->next) atomic_store(&f->stop, true);
  pthread_cond_broadcast(&r->changed);
  pthread_mutex_unlock(&r->lock);
  for (uint32_t i = 0; i < r->threads; i++) pthread_join(r->thread[i], NULL);
}
