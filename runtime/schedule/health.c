/* An engine that fails: after a step that failed and while nothing runs, steps of one token are tried, and requests wait. One that succeeds
 * ends that. Where none does for seconds the engine is lost: a device that fell out, a rank that does not come back, weights whose holder
 * has ended. */
#include "runtime/schedule/scheduler_inside.h"

#define LOST_AFTER  5.0
#define TRIED_EVERY 0.5

/* What a request asked for, or lacked room for, says nothing about the engine. */
static bool is_the_engines(const mm_err *err) {
  return err->status != MM_USAGE && err->status != MM_UNSUPPORTED && err->status != MM_LIMIT;
}

void mm_health_failed(mm_scheduler *s, const mm_err *err) {
  engine_health *h = &s->health;
  if (atomic_load(&h->lost) || !is_the_engines(err)) return;
  pthread_mutex_lock(&s->lock);
  if (h->failed <= 0) h->failed = h->next = mm_now();
  h->error = *err;
  h->queued = s->queued;
  pthread_mutex_unlock(&s->lock);
}

/* A step succeeded, or one was refused for reasons that are not the engine's. */
static void recover(mm_scheduler *s) {
  pthread_mutex_lock(&s->lock);
  s->health.failed = 0;
  pthread_mutex_unlock(&s->lock);
}

void mm_health_good(mm_scheduler *s) {
  const engine_health *h = &s->health;
  if (h->failed > 0 && !atomic_load(&h->lost) && s->collected > h->queued) recover(s);
}

/* A step of one token in a slot that nobody has, which holds nothing afterwards. */
static bool try_step(mm_scheduler *s, mm_err *err) {
  const int32_t id = 0;
  const uint32_t out = 0;
  const mm_span span = {.count = 1};
  const mm_sampling greedy = {.top_p = 1};
  const mm_batch batch = {.tokens = 1, .id = &id, .span_count = 1, .span = &span, .out_count = 1, .out = &out, .sampling = &greedy};
  const bool done = mm_engine_queue(s->engine, &batch, err) && mm_engine_collect(s->engine, s->sampled, err);
  mm_engine_drop(s->engine, 0);
  return done;
}

bool mm_health_check(mm_scheduler *s) {
  engine_health *h = &s->health;
  if (h->failed <= 0 || s->running || s->queued > s->collected) return true;
  if (atomic_load(&h->lost) || mm_now() < h->next) return false;
  mm_err err = {0};
  if (try_step(s, &err) || !is_the_engines(&err)) {
    recover(s);
    return true;
  }
  const double now = mm_now();
  h->next = now + TRIED_EVERY;
  if (now - h->failed < (s->c.lost_after > 0 ? s->c.lost_after : LOST_AFTER)) return false;
  mm_health_failed(s, &err);
  mm_offload_lost(s);
  atomic_store(&h->lost, true);
  return false;
}

bool mm_scheduler_lost(mm_scheduler *s, mm_err *err) {
  if (!atomic_load(&s->health.lost)) return false;
  *err = s->health.error;
  return true;
}

bool mm_scheduler_failing(mm_scheduler *s, mm_err *err) {
  pthread_mutex_lock(&s->lock);
  const bool failing = s->health.failed > 0;
  if (failing) *err = s->health.error;
  pthread_mutex_unlock(&s->lock);
  return failing;
}
