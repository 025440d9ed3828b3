/* Pages of the prefix cache in host memory. An entry's page is copied out when others need the device's memory, and back when a request
 * has its tokens; both while steps run. Requests whose pages are on their way wait without a slot. */
#include <stdlib.h>

#include "runtime/schedule/scheduler_inside.h"

bool mm_offload_open(mm_scheduler *s, mm_err *err) {
  const uint64_t page = mm_engine_page_bytes(s->engine), places = page ? s->c.offload_bytes / page : 0;
  if (!s->c.offload_bytes) return true;
  if (page && (!places || places >= UINT32_MAX))
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
                   "found %llu bytes of host memory for pages of the prefix cache, expected at least %llu, those of one page",
                   (unsigned long long)s->c.offload_bytes, (unsigned long long)page);
  if (!mm_engine_pool(s->engine, (uint32_t)places, err) || !mm_prefix_cache_offload(s->cache, (uint32_t)places, err)) return false;
  s->own.page_bytes = page;
  return s->offload = true;
}

/* Copies that have ended free their pages. After a failure nobody knows what was copied, and the pages stay taken until the engine says
 * that nothing writes to them. */
static void notice(mm_scheduler *s, bool wait) {
  mm_err err = {0};
  uint64_t oldest;
  if (!s->offload || !mm_prefix_cache_moving(s->cache)) return;
  if (mm_engine_moved(s->engine, wait, &oldest, &err))
    mm_prefix_cache_moved(s->cache, oldest);
  else
    s->moves_failed = true;
}

void mm_offload_poll(mm_scheduler *s) {
  notice(s, false);
  /* No entry is good. A request that was just found one has entered by now, and no other was yet given one that was copied. */
  if (s->moves_failed) mm_prefix_cache_clear(s->cache);
  s->moves_failed = false;
}

void mm_offload_wait(mm_scheduler *s) { notice(s, true); }

/* Gives the engine the moves that the cache has listed. */
static void issue(mm_scheduler *s) {
  mm_err err = {0};
  const mm_page_move *move;
  uint64_t number;
  const uint32_t count = mm_prefix_cache_moves(s->cache, &move);
  if (!count) return;
  const bool done = mm_engine_move(s->engine, move, count, &number, &err);
  mm_prefix_cache_issued(s->cache, number);
  s->moves_failed |= !done;
}

bool mm_offload_fetch(mm_scheduler *s, job *j) {
  if (!s->offload || j->r.score || s->moves_failed) return false;
  const bool start = j->fetched != j->turn + 1;
  const uint32_t loading = mm_prefix_cache_fetch(s->cache, j->r.salt, j->token, j->count - 1, start);
  if (!loading || !start) return loading;
  j->fetched = j->turn + 1;
  s->own.fetched++;
  issue(s);
  notice(s, false);
  return mm_prefix_cache_fetch(s->cache, j->r.salt, j->token, j->count - 1, false);
}

void mm_offload_ahead(mm_scheduler *s) {
  if (!s->offload) return;
  const uint64_t each = mm_ceil_div(s->c.step_tokens, MM_PAGE) + s->slots;
  const uint64_t wanted = mm_min(2 * each, mm_pages_count(s->pages) / 8);
  while ((uint64_t)mm_pages_free(s->pages) + mm_prefix_cache_leaving(s->cache) < wanted)
    if (!mm_prefix_cache_evict(s->cache)) break;
  issue(s);
}

uint32_t mm_offload_evict(mm_scheduler *s) {
  const uint32_t before = mm_pages_free(s->pages);
  if (!mm_prefix_cache_moving(s->cache)) {
    const uint32_t together = (uint32_t)mm_min(64, 1 + mm_pages_count(s->pages) / 16);
    for (uint32_t i = 0; i < together && mm_prefix_cache_evict(s->cache); i++) {}
    issue(s);
  }
  notice(s, true);
  return mm_pages_free(s->pages) - before;
}
