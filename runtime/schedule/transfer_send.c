/* Pages of prompts that are computed for another server: copied to places of the pool as chunks end, and handed to the thread of the
 * connection. The prompt is an ordinary request: prefix cache, order and preemption are as for all. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/schedule/transfer_inside.h"

void mm_transfer_place(const mm_scheduler *s, uint32_t place, mm_wire_part *part) {
  for (uint32_t i = 0; i < mm_engine_pool_parts(s->engine); i++) {
    uint64_t bytes;
    char *const memory = mm_engine_pool_part(s->engine, i, &bytes);
    part[i] = (mm_wire_part){memory + place * bytes, bytes};
  }
}

void mm_transfer_profile(const mm_scheduler *s, mm_wire_profile *p) {
  const mm_transfer_config *c = &s->c.transfer;
  *p = (mm_wire_profile){{MM_WIRE_VERSION, mm_wire_word(MM_VERSION), mm_wire_word(c->device), mm_wire_word(c->cache),
                          mm_wire_word(c->index), mm_wire_word(c->inputs), c->act_quant, s->c.batch_invariant, mm_engine_ranks(s->engine),
                          MM_PAGE, mm_engine_page_bytes(s->engine), mm_engine_state_bytes(s->engine), mm_engine_groups(s->engine)},
                         c->checkpoint};
}

void mm_transfer_wake(mm_scheduler *s) {
  pthread_mutex_lock(&s->lock);
  s->offload.poked = true;
  pthread_cond_signal(&s->changed);
  pthread_mutex_unlock(&s->lock);
}

/* ---- open and close ---- */

bool mm_send_open(mm_scheduler *s, mm_err *err) {
  if (!s->c.transfer.listen) return true;
  mm_sender *t = s->offload.sender = mm_calloc(1, sizeof *t, err);
  if (!t) return false;
  *t = (mm_sender){.s = s, .fd = -1};
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->changed, NULL);
  mm_transfer_profile(s, &t->profile);
  mm_prefix_cache_share(s->groups.cache);
  const uint32_t places = (uint32_t)mm_min(MM_SEND_PLACES, mm_prefix_cache_counted(s->groups.cache).places / 2);
  if (!places || !mm_prefix_cache_take_places(s->groups.cache, t->place, places))
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
                   "--kv-offload: found %llu bytes, expected at least %llu, those of two pages, to send any",
                   (unsigned long long)s->c.offload_bytes, 2 * (unsigned long long)mm_engine_page_bytes(s->engine));
  t->places = t->free_count = places;
  return (t->fd = mm_wire_listen(s->c.transfer.listen, &t->port, err)) >= 0;
}

bool mm_send_start(mm_scheduler *s, mm_err *err) { return !s->offload.sender || mm_serve_start(s->offload.sender, err); }

void mm_send_stop(mm_scheduler *s, bool drain) {
  if (s->offload.sender) atomic_store(&s->offload.sender->draining, true);
  if (s->offload.sender && !drain) atomic_store(&s->offload.sender->stop, true);
}

void mm_send_close(mm_scheduler *s) {
  mm_sender *t = s->offload.sender;
  if (!t) return;
  atomic_store(&t->draining, true);
  mm_serve_join(t);
  if (t->fd >= 0) close(t->fd);
  pthread_cond_destroy(&t->changed);
  pthread_mutex_destroy(&t->lock);
  free(t);
  s->offload.sender = NULL;
}

uint16_t mm_scheduler_port(const mm_scheduler *s) { return s->offload.sender ? s->offload.sender->port : 0; }

/* ---- pages ---- */

/* Copies pages [next_page, end) out, as far as there are places. Under the lock. */
static void copy_out(mm_scheduler *s, mm_sending *g, const uint32_t *page, uint32_t end, bool kept) {
  mm_sender *t = s->offload.sender;
  for (; g->next_page < end && t->free_count; g->next_page++) {
    const uint32_t place = t->place[t->free_count - 1];
    if (!mm_prefix_cache_copy_out(s->groups.cache, page[g->next_page], place)) return;
    if (kept) mm_pages_release(s->pages, page[g->next_page]);
    t->free_count--;
    t->way[t->ways++] = (sent_page){g, place, g->next_page};
    g->on_way++;
  }
}

static const uint32_t *table_of(const mm_scheduler *s, const job *j) {
  return mm_pages_table(s->pages) + (size_t)j->slot * mm_pages_per_slot(s->pages);
}

/* Pages whose tokens are all computed, or queued: all whole ones, and the last one when the prompt is. */
static uint32_t whole_pages(const job *j) { return j->fed >= j->r.prompt_count ? j->r.send->pages : j->fed / MM_PAGE; }

/* Hands over the pages whose copies have ended. Under the lock. */
static void hand_over(mm_scheduler *s) {
  mm_sender *t = s->offload.sender;
  uint32_t left = 0;
  for (uint32_t i = 0; i < t->ways; i++) {
    const sent_page w = t->way[i];
    if (mm_prefix_cache_place_moves(s->groups.cache, w.place)) {
      t->way[left++] = w;
      continue;
    }
    w.sending->on_way--;
    if (w.sending->aborted || w.sending->failed)
      t->place[t->free_count++] = w.place;
    else
      w.sending->ready[w.sending->ready_count++] = (ready_page){w.place, w.index};
  }
  if (left < t->ways) pthread_cond_broadcast(&t->changed);
  t->ways = left;
}

/* The scheduler's thread needs it no more. Under the lock. */
static void release(mm_scheduler *s, mm_sending *g) {
  if (g->kept && (g->failed || g->aborted))
    for (; g->next_page < g->pages; g->next_page++) mm_pages_release(s->pages, g->page[g->next_page]);
  if (g->on_way || (!g->failed && !g->aborted && g->next_page < g->pages)) return;
  g->released = true;
  pthread_cond_broadcast(&s->offload.sender->changed);
  pthread_mutex_lock(&s->lock);
  s->live--;
  pthread_mutex_unlock(&s->lock);
}

void mm_send_poll(mm_scheduler *s) {
  mm_sender *t = s->offload.sender;
  if (!t) return;
  pthread_mutex_lock(&t->lock);
  hand_over(s);
  for (uint32_t i = 0; i < s->slots; i++) {
    job *j = s->slot[i];
    if (j && j->r.send && !j->r.send->aborted && !j->r.send->kept) copy_out(s, j->r.send, table_of(s, j), whole_pages(j), false);
  }
  for (mm_sending *g = t->first; g; g = g->next) {
    if (g->kept && !g->failed && !g->aborted) copy_out(s, g, g->page, g->pages, true);
    if (g->over && !g->released) release(s, g);
  }
  pthread_mutex_unlock(&t->lock);
  mm_offload_issue(s);
}

void mm_send_fail(mm_scheduler *s) {
  mm_sender *t = s->offload.sender;
  if (!t) return;
  pthread_mutex_lock(&t->lock);
  for (mm_sending *g = t->first; g; g = g->next) {
    if (!g->released) mm_fail(&g->err, MM_IO, "E_IO", mm_at(NULL, NULL), "pages could not be copied out of the device");
    g->failed |= !g->released;
  }
  pthread_mutex_unlock(&t->lock);
}

/* After a step was queued: progress, and states where it computes a prompt's end. */
void mm_send_step(mm_scheduler *s) {
  mm_sender *t = s->offload.sender;
  for (uint32_t i = 0; t && i < s->slots; i++) {
    const job *j = s->slot[i];
    mm_sending *g = j ? j->r.send : NULL;
    if (!g || !j->take) continue;
    mm_err err = {0};
    void *state = NULL;
    const bool ends = s->lightning && j->fed >= j->r.prompt_count && !g->saved;
    const bool ok = !ends || ((state = mm_calloc(1, mm_engine_state_bytes(s->engine), &err)) &&
                              mm_engine_save(s->engine, (uint32_t)j->slot, state, &err));
    pthread_mutex_lock(&t->lock);
    g->computed = (uint32_t)mm_min(j->fed, g->tokens);
    g->saved |= ends;
    if (ends) g->state = state;
    if (!ok) g->failed = mm_fail_as(&g->err, &err) || true;
    pthread_mutex_unlock(&t->lock);
  }
}

void mm_send_leave(mm_scheduler *s, const job *j, bool keep) {
  mm_sending *g = j->r.send;
  if (!g || !keep || g->kept || j->fed < j->r.prompt_count) return;
  const uint32_t *page = table_of(s, j);
  pthread_mutex_lock(&s->offload.sender->lock);
  for (uint32_t i = g->next_page; i < g->pages; i++) mm_pages_hold(s->pages, g->page[i] = page[i]);
  g->kept = true;
  pthread_mutex_unlock(&s->offload.sender->lock);
}

void mm_send_ended(mm_scheduler *s, mm_sending *g, mm_finish reason, const mm_err *err) {
  mm_sender *t = s->offload.sender;
  pthread_mutex_lock(&s->lock);
  s->live++;
  pthread_mutex_unlock(&s->lock);
  pthread_mutex_lock(&t->lock);
  const bool well = (reason == MM_FINISH_LENGTH || reason == MM_FINISH_STOP) && g->kept;
  if (!well && err) mm_fail_as(&g->err, err);
  if (!well) mm_fail(&g->err, MM_IO, "E_PREFILL", mm_at(NULL, NULL), "the prompt was given up");
  g->failed |= !well;
  g->over = true;
  pthread_cond_broadcast(&t->changed);
  pthread_mutex_unlock(&t->lock);
}

void mm_send_stats(mm_scheduler *s, mm_transfer_stats *out) {
  if (!s->offload.sender) return;
  pthread_mutex_lock(&s->offload.sender->lock);
  *out = s->offload.sender->stats;
  pthread_mutex_unlock(&s->offload.sender->lock);
}

bool mm_send_busy(const mm_scheduler *s, bool *waits) {
  mm_sender *t = s->offload.sender;
  if (!t) return false;
  pthread_mutex_lock(&t->lock);
  const bool busy = t->first;
  *waits &= !t->ways;
  pthread_mutex_unlock(&t->lock);
  return busy;
}
