/* Prompts that another server computes for this one: their pages are received in places of the pool and put into the prefix cache as
 * entries in host memory, from where the request has them as it has offloaded pages. Where the other side is lost, the prompt is computed
 * here; the report and the statistics say so. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/transfer_inside.h"

bool mm_receive_open(mm_scheduler *s, mm_err *err) {
  if (!s->c.transfer.from) return true;
  mm_receiver *r = s->offload.receiver = mm_calloc(1, sizeof *r, err);
  if (!r) return false;
  *r = (mm_receiver){.s = s};
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->changed, NULL);
  mm_transfer_profile(s, &r->profile);
  mm_prefix_cache_share(s->groups.cache);
  mm_err reason = {0};
  if (!mm_fetch_probe(r, &reason)) {
    if (reason.status == MM_USAGE) return mm_fail_as(err, &reason);
    if (s->c.report) s->c.report(s->c.user, &reason); /* it may come later */
  }
  return mm_fetch_start(r, err);
}

static void free_fetch(mm_receiver *r, mm_fetch *f) {
  for (uint32_t i = 0; i < f->pages; i++)
    if (f->place[i] != UINT32_MAX) mm_prefix_cache_free_place(r->s->groups.cache, f->place[i]);
  r->held -= f->pages - (uint32_t)f->request.from;
  MM_FREE(f->token, f->place, f->state, f);
}

void mm_receive_close(mm_scheduler *s) {
  mm_receiver *r = s->offload.receiver;
  if (!r) return;
  mm_fetch_join(r);
  for (mm_fetch *f = r->first, *next; f; f = next) next = f->next, free_fetch(r, f);
  pthread_cond_destroy(&r->changed);
  pthread_mutex_destroy(&r->lock);
  free(r);
  s->offload.receiver = NULL;
}

/* ---- a prompt is to be computed elsewhere ---- */

static void fall_back(mm_receiver *r, job *j, const mm_err *reason) {
  mm_err line = {0};
  j->fetch.state = FETCH_FAILED;
  r->stats.fallbacks++;
  mm_fail(&line, MM_IO, "E_PREFILL", mm_at(r->s->c.transfer.from, NULL), "a prompt of %u tokens is computed here: %.400s",
          j->r.prompt_count, reason->text);
  if (r->s->c.report) r->s->c.report(r->s->c.user, &line);
}

static mm_fetch *new_fetch(mm_receiver *r, const job *j, uint32_t had, mm_err *err) {
  mm_fetch *f = mm_calloc(1, sizeof *f, err);
  if (!f) return NULL;
  f->request = (mm_wire_request){.salt = j->r.salt, .priority = j->r.priority, .from = had / MM_PAGE, .count = j->r.prompt_count - 1};
  f->pages = (uint32_t)mm_ceil_div(f->request.count, MM_PAGE);
  const uint32_t from = (uint32_t)f->request.from, wanted = f->pages - from;
  if (!(f->token = mm_calloc(f->request.count, sizeof *f->token, err)) || !(f->place = mm_calloc(f->pages, sizeof *f->place, err)) ||
      !mm_prefix_cache_take_places(r->s->groups.cache, f->place + from, wanted)) {
    MM_FREE(f->token, f->place, f);
    return NULL;
  }
  for (uint32_t i = 0; i < from; i++) f->place[i] = UINT32_MAX;
  memcpy(f->token, j->token, f->request.count * sizeof *f->token);
  /* The last ones that lie within what is computed there. */
  for (uint32_t i = j->r.boundary_count; i-- > 0 && f->request.boundaries < MM_WIRE_BOUNDARIES;)
    if (j->r.boundary[i] <= f->request.count) f->boundary[MM_WIRE_BOUNDARIES - ++f->request.boundaries] = j->r.boundary[i];
  memmove(f->boundary, f->boundary + MM_WIRE_BOUNDARIES - f->request.boundaries, f->request.boundaries * sizeof *f->boundary);
  r->held += wanted;
  return f;
}

static void start(mm_receiver *r, job *j, mm_fetch *f) {
  f->job = j;
  f->began = mm_now();
  j->fetch.running = f;
  j->fetch.state = FETCH_RUNS;
  pthread_mutex_lock(&r->lock);
  mm_fetch **at = &r->first;
  while (*at) at = &(*at)->next;
  *at = f;
  pthread_cond_signal(&r->changed);
  pthread_mutex_unlock(&r->lock);
}

/* Another request has this prompt's next page fetched just now. */
static bool fetched_already(mm_receiver *r, const job *j, uint32_t had) {
  bool found = false;
  pthread_mutex_lock(&r->lock);
  for (const mm_fetch *f = r->first; f && !found; f = f->next) {
    const uint32_t most = j->r.prompt_count - 1;
    const uint64_t shared = r->s->lightning ? f->request.count : had + (uint64_t)MM_PAGE; /* states come after its last token alone */
    found = f->job && f->request.salt == j->r.salt && shared <= most && shared <= f->request.count &&
            memcmp(f->token, j->token, shared * sizeof *f->token) == 0;
  }
  pthread_mutex_unlock(&r->lock);
  return found;
}

bool mm_receive_waits(mm_scheduler *s, job *j) {
  mm_receiver *r = s->offload.receiver;
  if (j->fetch.state == FETCH_RUNS) return true;
  if (!r || j->fetch.state != FETCH_NONE || j->turn || j->r.score) return false;
  const uint32_t most = j->r.prompt_count - 1;
  if (most < s->c.transfer.least) return false;
  if (j->fetch.ends == r->ends + 1) return true; /* the one that it waits for has not ended */
  const uint32_t had = most ? mm_prefix_cache_has(s->groups.cache, j->r.salt, j->token, most) : 0;
  r->looks++;
  if (most - had < mm_max(1, s->c.transfer.least)) return false;
  if (fetched_already(r, j, had)) {
    j->fetch.ends = r->ends + 1;
    return true;
  }
  mm_err err = {0};
  j->fetch.had = had;
  if (mm_now() < r->down_until) return fall_back(r, j, &r->down), false;
  const uint64_t places = mm_prefix_cache_counted(s->groups.cache).places, wanted = mm_ceil_div(most, MM_PAGE) - had / MM_PAGE;
  if (wanted > places) {
    mm_fail(&err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "it has %llu pages, and --kv-offload has room for %llu",
            (unsigned long long)wanted, (unsigned long long)places);
    return fall_back(r, j, &err), false;
  }
  if (r->full) return true;
  if ((r->full = mm_offload_spills(s, j, (uint32_t)wanted))) return true;
  mm_fetch *f = new_fetch(r, j, had, &err);
  r->full = !f && (r->held || mm_prefix_cache_moving(s->groups.cache) || mm_offload_copying(s)) && err.status == MM_OK;
  if (r->full) return true; /* for places of other fetches */
  if (!f) {
    mm_fail(&err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "no room in host memory for %llu pages", (unsigned long long)wanted);
    return fall_back(r, j, &err), false;
  }
  start(r, j, f);
  return true;
}

/* ---- it has come, or not ---- */

static void end_fetch(mm_scheduler *s, mm_fetch *f) {
  mm_receiver *r = s->offload.receiver;
  job *j = f->job;
  r->stats.pages_in += f->got;
  r->stats.bytes_in += f->bytes;
  r->stats.wait_seconds += mm_now() - f->began;
  r->ends++;
  if (j) j->fetch.running = NULL, j->fetch.state = FETCH_CAME;
  if (f->lost && j) r->down = f->err, r->down_until = mm_now() + f->silent;
  if (f->ok && !mm_prefix_cache_put_places(s->groups.cache, f->request.salt, f->token, (uint32_t)f->request.count, f->place, &f->state)) {
    mm_fail(&f->err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "the prefix cache has no room for it any more");
    f->ok = false;
  }
  r->stats.fetched += f->ok;
  if (!f->ok && j) fall_back(r, j, &f->err);
  free_fetch(r, f);
}

void mm_receive_poll(mm_scheduler *s) {
  mm_receiver *r = s->offload.receiver;
  if (!r) return;
  r->full = false;
  pthread_mutex_lock(&r->lock);
  for (mm_fetch **at = &r->first; *at;) {
    mm_fetch *f = *at;
    if (!f->ended) {
      at = &f->next;
      continue;
    }
    *at = f->next;
    pthread_mutex_unlock(&r->lock);
    end_fetch(s, f);
    pthread_mutex_lock(&r->lock);
    at = &r->first;
  }
  pthread_mutex_unlock(&r->lock);
}

void mm_receive_leave(job *j) {
  if (!j->fetch.running) return;
  atomic_store(&j->fetch.running->stop, true);
  j->fetch.running->job = NULL;
  j->fetch.running = NULL;
}

void mm_receive_entered(mm_scheduler *s, job *j) {
  mm_receiver *r = s->offload.receiver;
  if (!r || j->fetch.state == FETCH_NONE) return;
  j->cached = (uint32_t)mm_min(j->cached, j->fetch.had);
  if (j->fetch.state != FETCH_CAME || j->fed + 1 >= j->r.prompt_count) return;
  mm_err err = {0};
  mm_fail(&err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "its pages have given way to those of others");
  fall_back(r, j, &err);
}

bool mm_receive_busy(const mm_scheduler *s) {
  mm_receiver *r = s->offload.receiver;
  if (!r) return false;
  pthread_mutex_lock(&r->lock);
  const bool busy = r->first;
  pthread_mutex_unlock(&r->lock);
  return busy;
}

void mm_receive_stats(mm_scheduler *s, mm_transfer_stats *out) {
  *out = (mm_transfer_stats){0};
  if (s->offload.receiver) {
    *out = s->offload.receiver->stats;
    pthread_mutex_lock(&s->offload.receiver->lock);
    for (const mm_fetch *f = s->offload.receiver->first; f; f = f->next) out->running++;
    pthread_mutex_unlock(&s->offload.receiver->lock);
  }
}

void mm_transfer_idle(mm_scheduler *s) {
  bool waits = true;
  const bool sends = mm_send_busy(s, &waits), receives = mm_receive_busy(s);
  if ((!sends && !receives) || !waits) return;
  const struct timespec until = mm_later(0.05);
  pthread_mutex_lock(&s->lock);
  if (!s->offload.poked && !s->incoming) mm_either_way(pthread_cond_clockwait(&s->changed, &s->lock, CLOCK_MONOTONIC, &until) == 0);
  s->offload.poked = false;
  pthread_mutex_unlock(&s->lock);
}
