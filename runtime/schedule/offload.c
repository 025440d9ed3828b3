/* Pages of the prefix cache in host memory, and on disk. An entry's page is copied out when others need the device's memory, and back when
 * a request has its tokens; both while steps run. Requests whose pages are on their way wait without a slot. */
#include <stdlib.h>

#include "runtime/schedule/scheduler_inside.h"

#define REPORT_S 10 /* seconds between two failures of the disk that are reported; all are counted */
#define SPILL_S  1  /* that a request waits for copies to the disk before its own pages come back */

/* A number of pages has 32 bits. */
static bool is_counted(uint64_t pages) { return pages > 0 && pages < UINT32_MAX; }

static bool bad_size(const char *option, uint64_t found, uint64_t page, mm_err *err) {
  return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "%s: found %llu bytes, expected from %llu, those of one page, to %llu",
                 option, (unsigned long long)found, (unsigned long long)page, (unsigned long long)page * (UINT32_MAX - 1));
}

/* A file of as many pages as disk_bytes has room for. */
static bool open_disk(mm_scheduler *s, mm_err *err) {
  const uint32_t parts = mm_engine_pool_parts(s->engine);
  const uint64_t blocks = s->c.disk_bytes / mm_max(1, s->own.page_bytes);
  if (!is_counted(blocks)) return bad_size("--kv-offload-disk", s->c.disk_bytes, s->own.page_bytes, err);
  mm_pool_part *part = mm_calloc(parts, sizeof *part, err);
  for (uint32_t i = 0; part && i < parts; i++) part[i].memory = mm_engine_pool_part(s->engine, i, &part[i].bytes);
  s->offload.disk = part ? mm_disk_store_open(s->c.disk_dir, (uint32_t)blocks, part, parts, err) : NULL;
  free(part);
  return s->offload.disk && mm_prefix_cache_disk(s->groups.cache, (uint32_t)blocks, err);
}

bool mm_offload_open(mm_scheduler *s, mm_err *err) {
  const uint64_t page = mm_engine_page_bytes(s->engine), places = page ? s->c.offload_bytes / page : 0;
  if (!s->c.offload_bytes) return true;
  if (page && !is_counted(places)) return bad_size("--kv-offload", s->c.offload_bytes, page, err);
  if (!mm_engine_pool(s->engine, (uint32_t)places, err) || !mm_prefix_cache_offload(s->groups.cache, (uint32_t)places, err)) return false;
  s->own.page_bytes = page;
  s->offload.on = true;
  return !s->c.disk_dir || open_disk(s, err);
}

void mm_offload_close(mm_scheduler *s) {
  mm_offload_wait(s);
  mm_disk_store_close(s->offload.disk);
}

/* Copies that have ended free their pages, and the second halves of those between groups begin. After a failure nobody knows what was
 * copied, and the pages stay taken until the engine says that nothing writes to them. */
static void notice(mm_scheduler *s, bool wait) {
  mm_err err = {0};
  uint64_t oldest;
  if (!s->offload.on || s->offload.moves_failed || !mm_prefix_cache_moving(s->groups.cache)) return;
  if (mm_engine_moved(s->engine, wait, &oldest, &err))
    mm_prefix_cache_moved(s->groups.cache, oldest);
  else
    s->offload.moves_failed = true;
  if (mm_prefix_cache_listed(s->groups.cache)) mm_offload_issue(s);
}

/* The same of the disk, whose failures cost their own entries alone. */
static void notice_disk(mm_scheduler *s, mm_disk_wait wait) {
  mm_disk_end end[64];
  mm_err reason = {0};
  bool failed = false;
  if (!s->offload.disk || !mm_prefix_cache_copying(s->groups.cache)) return;
  for (uint32_t n; (n = mm_disk_store_ended(s->offload.disk, wait, end, sizeof end / sizeof *end, &reason)) > 0; wait = MM_DISK_NOW)
    for (uint32_t i = 0; i < n; i++) {
      mm_prefix_cache_copied(s->groups.cache, &end[i]);
      failed |= !end[i].ok;
    }
  if (!failed || !s->c.report || mm_now() - s->offload.reported < REPORT_S) return;
  s->offload.reported = mm_now();
  s->c.report(s->c.user, &reason);
}

/* No entry is good any more. None was given to a request since: fetches stop at once, and no move counts as ended. */
static void drop_failed(mm_scheduler *s) {
  if (s->offload.moves_failed) {
    mm_prefix_cache_clear(s->groups.cache);
    mm_send_fail(s);
  }
  s->offload.moves_failed = false;
}

void mm_offload_poll(mm_scheduler *s, bool wait) {
  drop_failed(s);
  notice(s, wait);
  notice_disk(s, MM_DISK_NOW);
}

void mm_offload_lost(mm_scheduler *s) {
  if (!s->offload.on) return;
  mm_send_fail(s);
  mm_prefix_cache_clear(s->groups.cache);
  mm_prefix_cache_issued(s->groups.cache, 0);
  mm_prefix_cache_moved(s->groups.cache, UINT64_MAX);
}

bool mm_offload_copying(const mm_scheduler *s) { return s->offload.disk && mm_prefix_cache_copying(s->groups.cache); }

void mm_offload_wait(mm_scheduler *s) {
  drop_failed(s);
  notice(s, true);
  notice_disk(s, s->offload.waits ? MM_DISK_ANY : MM_DISK_READS);
  s->offload.waits = false;
}

/* Gives the disk's threads the copies that the cache has listed. */
static void issue_copies(mm_scheduler *s) {
  mm_err err = {0};
  const mm_disk_move *move;
  const uint32_t count = s->offload.disk ? mm_prefix_cache_copies(s->groups.cache, &move) : 0;
  if (!count || mm_disk_store_move(s->offload.disk, move, count, &err)) return;
  for (uint32_t i = 0; i < count; i++) mm_prefix_cache_copied(s->groups.cache, &(mm_disk_end){move[i], false});
}

void mm_offload_issue(mm_scheduler *s) {
  mm_err err = {0};
  issue_copies(s);
  const mm_page_move *move;
  uint64_t number;
  const uint32_t listed = mm_prefix_cache_listed(s->groups.cache), count = mm_prefix_cache_moves(s->groups.cache, &move);
  if (listed && !count) mm_send_fail(s); /* out of memory: nothing is moved */
  if (!count) return;
  const bool done = mm_engine_move(s->engine, move, count, &number, &err);
  mm_prefix_cache_issued(s->groups.cache, number);
  s->offload.moves_failed |= !done;
}

void mm_offload_settle(mm_scheduler *s) {
  if (!s->offload.on) return;
  mm_offload_issue(s);
  notice(s, true);
}

/* A prompt that the pool cannot hold comes from disk, or from another group, in parts, and pages that have come may go again before the
 * request has its slot, for one that was there sooner. After so many starts what is not there is computed. */
enum { STARTS = 64 };

/* Lets entries go to disk before a fetch begins, which would take their places; true while the job is to wait for those copies. */
static bool spills_first(mm_scheduler *s, job *j, uint32_t group) {
  if (!s->offload.disk) return false;
  if (j->back.spills != j->back.starts + 1) j->back.spills = j->back.starts + 1, j->back.until = mm_now() + SPILL_S;
  if (mm_now() >= j->back.until || !mm_prefix_cache_spill_for(s->groups.cache, group, j->r.salt, j->token, mm_reuse_most(j))) return false;
  issue_copies(s);
  return s->offload.waits = true;
}

bool mm_offload_spills(mm_scheduler *s, job *j, uint32_t places) {
  if (!s->offload.disk) return false;
  if (j->back.until <= 0) j->back.until = mm_now() + SPILL_S;
  if (mm_now() >= j->back.until || !mm_prefix_cache_spill_to(s->groups.cache, places)) return false;
  issue_copies(s);
  return s->offload.waits = true;
}

static mm_prefix_cache_coming fetch(const mm_scheduler *s, const job *j, uint32_t group, bool start) {
  return mm_prefix_cache_fetch(s->groups.cache, group, j->r.salt, j->token, mm_reuse_most(j), start);
}

bool mm_offload_fetch(mm_scheduler *s, job *j, uint32_t group) {
  job_return *b = &j->back;
  if (!s->offload.on || s->offload.moves_failed) return false;
  if (b->turn != j->turn + 1) *b = (job_return){.turn = j->turn + 1};
  for (;;) {
    mm_prefix_cache_coming n = fetch(s, j, group, false);
    if (n.loading || n.reading) return true;
    if (n.there == n.pages || b->starts == STARTS) return false;
    if (spills_first(s, j, group)) return true;
    n = fetch(s, j, group, true);
    const bool any = n.loading || n.reading;
    if (!any && !mm_prefix_cache_moving(s->groups.cache)) return false;
    s->own.fetched += any && !b->any;
    b->any |= any;
    b->starts++;
    mm_offload_issue(s);
    notice(s, false);
    if (!any && mm_prefix_cache_moving(s->groups.cache)) return true; /* for pages of others that are on their way */
  }
}

/* Entries that leave need a place each. Where all are taken and some are on their way to disk, those are waited for, though not long: what
 * is lost at a prompt's beginning takes the rest of it along. */
static void make_place(mm_scheduler *s) {
  if (!s->offload.disk) return;
  mm_prefix_cache_spill(s->groups.cache);
  issue_copies(s);
  if (!mm_prefix_cache_has_place(s->groups.cache)) notice_disk(s, MM_DISK_ANY);
}

void mm_offload_ahead(mm_scheduler *s) {
  if (!s->offload.on) return;
  const uint64_t each = mm_ceil_div(s->c.step_tokens, MM_PAGE) + s->slots;
  const uint64_t wanted = mm_min(2 * each, mm_pages_each(s->pages) / 8);
  for (uint32_t g = 0; g < s->groups.count; g++)
    while ((uint64_t)mm_pages_free_in(s->pages, g) + mm_prefix_cache_leaving(s->groups.cache, g) < wanted) {
      if (s->offload.disk && !mm_prefix_cache_has_place(s->groups.cache)) break; /* later, when there is one */
      if (!mm_prefix_cache_evict(s->groups.cache, g)) break;
    }
  mm_prefix_cache_spill(s->groups.cache);
  mm_offload_issue(s);
}

uint32_t mm_offload_evict(mm_scheduler *s, uint32_t group) {
  const uint32_t before = mm_pages_free_in(s->pages, group), together = (uint32_t)mm_min(64, 1 + mm_pages_each(s->pages) / 16);
  notice(s, true); /* those on their way out are free first */
  if (mm_pages_free_in(s->pages, group) > before) return mm_pages_free_in(s->pages, group) - before;
  make_place(s);
  for (uint32_t i = 0; i < together && mm_prefix_cache_evict(s->groups.cache, group); i++)
    if (s->offload.disk && !mm_prefix_cache_has_place(s->groups.cache)) break;
  mm_offload_settle(s);
  return mm_pages_free_in(s->pages, group) - before;
}
