/* Use of the prefix cache by requests: pages of prompts and replies, and for models with lightning layers the states at
 * the boundaries of a prompt and at the end of its reply. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

#define LOOK_MOST ((uint64_t)8 << 20) /* some milliseconds */

bool mm_reuse_open(mm_scheduler *s, mm_err *err) {
  const uint64_t state_bytes = mm_engine_state_bytes(s->engine);
  if (s->c.offload_bytes && !(s->c.prefix_cache && s->pages))
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                   "found host memory for pages of the prefix cache, and no such cache of pages that slots share");
  s->groups.look_most = LOOK_MOST;
  if (!s->c.prefix_cache || !s->pages) return true;
  if (state_bytes > s->c.cache_bytes)
    return mm_fail(
        err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL),
        "found %llu bytes for the prefix cache's lightning states, expected at least %llu, those of one request; or no such cache",
        (unsigned long long)s->c.cache_bytes, (unsigned long long)state_bytes);
  return (s->page = mm_calloc(mm_pages_per_slot(s->pages), sizeof *s->page, err)) &&
         (s->groups.cache = mm_prefix_cache_open(s->pages, state_bytes, s->c.cache_bytes, err)) && mm_offload_open(s, err);
}

void mm_reuse_close(mm_scheduler *s) {
  mm_offload_close(s);
  mm_prefix_cache_close(s->groups.cache);
  free(s->page);
}

reuse mm_reuse_find(mm_scheduler *s, const job *j, uint32_t group) {
  reuse hit = {0};
  if (!s->groups.cache) return hit;
  hit.tokens = mm_prefix_cache_find(s->groups.cache, group, j->r.salt, j->token, mm_reuse_most(j), s->page, &hit.state);
  for (uint32_t i = 0; i < hit.tokens; i += MM_PAGE) mm_pages_hold(s->pages, s->page[i / MM_PAGE]);
  return hit;
}

static uint32_t had_in(mm_scheduler *s, const job *j, uint32_t group) {
  const uint32_t had = mm_prefix_cache_ready(s->groups.cache, group, j->r.salt, j->token, mm_reuse_most(j));
  s->groups.looked += had;
  return had;
}

uint32_t mm_reuse_longest(mm_scheduler *s, const job *j) {
  uint32_t most = 0;
  for (uint32_t g = 0; s->groups.cache && g < s->groups.count; g++) most = (uint32_t)mm_max(most, had_in(s, j, g));
  return most;
}

void mm_reuse_release(mm_scheduler *s, const reuse *hit) {
  for (uint32_t i = 0; i < hit->tokens; i += MM_PAGE) mm_pages_release(s->pages, s->page[i / MM_PAGE]);
}

bool mm_reuse_stands(const mm_scheduler *s, const reuse *hit) {
  return !hit->state || mm_prefix_cache_has_state(s->groups.cache, hit->state);
}

bool mm_reuse_take(mm_scheduler *s, job *j, const reuse *hit, mm_err *err) {
  j->fed = hit->tokens;
  const uint32_t alike =
      s->lightning && s->groups.cache ? mm_prefix_cache_alike(s->groups.cache, j->r.salt, j->token, mm_reuse_most(j)) : 0;
  if (alike >= j->fed + MM_PAGE && alike < j->r.prompt_count) j->parting = alike;
  return !j->fed || mm_engine_resume(s->engine, (uint32_t)j->slot, s->page, j->token, j->fed, hit->state, err);
}

static const uint32_t *pages_of_slot(const mm_scheduler *s, const job *j) {
  return mm_pages_table(s->pages) + (size_t)j->slot * mm_pages_per_slot(s->pages);
}

/* The states after the slot's last token, which is the job's token[fed - 1]. */
static void keep_state(mm_scheduler *s, const job *j) {
  mm_err err = {0};
  void *state = mm_prefix_cache_put_state(s->groups.cache, j->r.salt, j->token, j->fed, pages_of_slot(s, j));
  if (state && !mm_engine_save(s->engine, (uint32_t)j->slot, state, &err)) mm_reuse_clear(s);
}

/* The first `count` of them, of a model without lightning layers. */
static void keep_tokens(mm_scheduler *s, const job *j, uint32_t count) {
  if (mm_engine_held(s->engine, (uint32_t)j->slot) < j->fed) return; /* the engine has lost what slots held */
  mm_prefix_cache_put(s->groups.cache, j->r.salt, j->token, count, pages_of_slot(s, j));
}

void mm_reuse_keep(mm_scheduler *s, const job *j) {
  if (!s->groups.cache || !j->fed) return;
  if (!s->lightning)
    keep_tokens(s, j, (uint32_t)mm_min(j->fed, j->count));
  else if (j->fed <= j->count && mm_engine_held(s->engine, (uint32_t)j->slot) >= j->fed)
    keep_state(s, j);
}

/* ---- boundaries ---- */

/* The first place after `pos` whose states the request wants kept; 0: none. Without boundaries of its own a prompt is kept for another one
 * like it. */
static uint32_t next_wanted(const job *j, uint32_t pos) {
  for (uint32_t i = 0; i < j->r.boundary_count; i++)
    if (j->r.boundary[i] > pos) return j->r.boundary[i];
  return !j->r.boundary_count && j->r.prompt_count > pos + 1 ? j->r.prompt_count - 1 : 0;
}

/* The same, or the place where its prompt parts from another, where that is before it. */
static uint32_t next_boundary(const job *j, uint32_t pos) {
  const uint32_t wanted = next_wanted(j, pos);
  return j->parting > pos && (!wanted || j->parting < wanted) ? j->parting : wanted;
}

uint32_t mm_reuse_cut(const mm_scheduler *s, const job *j, uint32_t rows) {
  const uint32_t at = s->groups.cache && s->lightning ? next_boundary(j, j->fed) : 0;
  return at ? (uint32_t)mm_min(rows, at - j->fed) : rows;
}

void mm_reuse_boundaries(mm_scheduler *s) {
  for (uint32_t i = 0; s->groups.cache && i < s->slots; i++) {
    job *j = s->slot[i];
    const uint32_t prompt = j ? j->r.prompt_count : 0;
    if (!j || !j->take) continue;
    if (s->lightning && j->fed <= prompt && next_boundary(j, j->fed - 1) == j->fed) mm_reuse_keep(s, j);
    if (s->lightning || j->fed - j->take >= prompt) continue;
    /* One that gave way reads on behind its prompt, in the same chunk. Before its end whole pages are kept, which are not written again. */
    if (j->fed >= prompt)
      keep_tokens(s, j, prompt);
    else if (j->awaited && j->fed >= j->awaited)
      keep_tokens(s, j, j->fed - j->fed % MM_PAGE);
  }
}

/* How many of `most` tokens from the first on are alike. */
static uint32_t alike_of(mm_scheduler *s, const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (most - n >= MM_PAGE && memcmp(a + n, b + n, MM_PAGE * sizeof *a) == 0) n += MM_PAGE;
  while (n < most && a[n] == b[n]) n++;
  s->groups.looked += n;
  return n;
}

/* How far the other's prompt is this one's too, at a place that the cache will have when the other has come to *until; 0 for nowhere.
 * waits: this one will wait for it, so that lightning states are kept where the two part. */
static uint32_t shared_with(mm_scheduler *s, const job *j, job *other, uint32_t had, bool waits, uint32_t *until) {
  const uint32_t alike = alike_of(s, j->token, other->token, (uint32_t)mm_min(mm_reuse_most(j), other->r.prompt_count));
  *until = (uint32_t)mm_min(mm_ceil_div(alike, MM_PAGE) * MM_PAGE, other->r.prompt_count);
  if (!s->lightning) return alike;
  const bool parts =
      alike >= had + MM_PAGE && alike > other->fed && alike < other->r.prompt_count && (!other->parting || other->parting <= other->fed);
  if (parts && waits) other->parting = alike;
  if (parts) return *until = alike;
  *until = 0;
  for (uint32_t at = next_boundary(other, other->fed); at && at <= alike; at = next_boundary(other, at)) *until = at;
  return *until;
}

/* The other keeps its pages once it has so many tokens, and is read as if it had the job's priority, so that nothing between the two holds
 * the job up: for the next step, before which those that wait say so again. */
static void await(const job *j, job *other, uint32_t until) {
  other->awaited = other->awaited ? (uint32_t)mm_min(other->awaited, until) : until;
  if (other->need < j->r.priority) other->need = j->r.priority;
}

/* Groups of attention have pages of their own: a job waits for one that reads in the group that it will run in. */
static bool waits_in_group(const mm_scheduler *s) { return s->groups.count > 1 && !s->offload.on; }

static bool has_free_slot(const mm_scheduler *s, uint32_t group) {
  for (uint32_t i = group; i < s->slots; i += s->groups.count)
    if (!s->slot[i]) return true;
  return false;
}

/* The reader that the job waits for is not there yet, and where groups have pages of their own the job may run next to it. */
static bool reads_on(const mm_scheduler *s, const job *j) {
  uint32_t i = 0;
  while (i < s->slots && !(s->slot[i] && s->slot[i]->ticket == j->duplicate_of)) i++;
  if (i == s->slots || s->slot[i]->fed >= j->duplicate_until) return false;
  if (waits_in_group(s) && !has_free_slot(s, i % s->groups.count)) return false;
  await(j, s->slot[i], j->duplicate_until);
  return true;
}

/* Tokens that are worth a wait for the step that reads them: a page, or nearly all that the job would compute. */
static bool is_much(const job *j, uint32_t shared, uint32_t had) {
  const uint32_t saved = shared > had ? shared - had : 0;
  return saved >= MM_PAGE || (saved >= MM_PAGE / 4 && mm_reuse_most(j) - shared <= saved / 4);
}

static bool same_prompt(const job *a, const job *b) {
  const uint32_t n = a->r.prompt_count;
  return n == b->r.prompt_count && memcmp(a->token, b->token, n * sizeof *a->token) == 0;
}

/* Steps have few rows for a prompt that is scored: choices of one request wait for it, and others are sooner done alone. */
static bool is_slow(const job *j, const job *other) {
  return other->r.score && !(j->r.together && j->r.together == other->r.together && same_prompt(j, other));
}

typedef struct reading {
  job *by; /* NULL: nobody */
  uint32_t shared, until;
} reading;

/* A job in the slots from, from + each, … that reads tokens of this one behind `had` that are worth a wait; waits: as of shared_with. */
static reading reading_of(mm_scheduler *s, const job *j, uint32_t from, uint32_t each, uint32_t had, bool waits) {
  for (uint32_t i = from; i < s->slots; i += each) {
    job *other = s->slot[i];
    if (!other || other == j || other->r.salt != j->r.salt || other->fed >= other->r.prompt_count || is_slow(j, other)) continue;
    reading r = {.by = other};
    r.shared = shared_with(s, j, other, had, false, &r.until);
    if (!is_much(j, r.shared, had)) continue;
    if (waits) shared_with(s, j, other, had, true, &r.until), await(j, other, r.until);
    return r;
  }
  return (reading){0};
}

bool mm_reuse_duplicate(mm_scheduler *s, job *j) {
  if (!s->groups.cache) return false;
  if (reads_on(s, j) || s->groups.looked > s->groups.look_most) return true;
  if (waits_in_group(s)) return false; /* mm_reuse_read_in looks, group by group */
  reading r = reading_of(s, j, 0, 1, 0, false);
  if (r.by) r = reading_of(s, j, 0, 1, mm_reuse_longest(s, j), true);
  if (!r.by) return false;
  j->duplicate_of = r.by->ticket, j->duplicate_until = r.until;
  return true;
}

uint32_t mm_reuse_read_in(mm_scheduler *s, const job *j, uint32_t group) {
  if (!s->groups.cache || s->offload.on) return 0;
  return reading_of(s, j, group, s->groups.count, had_in(s, j, group), false).shared;
}

bool mm_reuse_wait_in(mm_scheduler *s, job *j, uint32_t group) {
  if (!s->groups.cache || s->offload.on) return false;
  const reading r = reading_of(s, j, group, s->groups.count, had_in(s, j, group), true);
  if (r.by) j->duplicate_of = r.by->ticket, j->duplicate_until = r.until;
  return r.by;
}

/* ---- leaving ---- */

uint32_t mm_reuse_evict(mm_scheduler *s, uint32_t group) {
  if (s->offload.on) return mm_offload_evict(s, group);
  const uint32_t before = s->groups.cache ? mm_pages_free_in(s->pages, group) : 0;
  return s->groups.cache && mm_prefix_cache_evict(s->groups.cache, group) ? mm_pages_free_in(s->pages, group) - before : 0;
}

/* The page that the group's one job writes next; UINT32_MAX where it is to be another one. */
static uint32_t next_page(const mm_scheduler *s, uint32_t group) {
  uint32_t i = group;
  while (i < s->slots && !s->slot[i]) i += s->groups.count;
  const uint32_t at = i < s->slots ? s->slot[i]->fed / MM_PAGE : UINT32_MAX;
  return i < s->slots && at < mm_pages_held(s->pages, i) ? mm_pages_table(s->pages)[(size_t)i * mm_pages_per_slot(s->pages) + at]
                                                         : UINT32_MAX;
}

bool mm_reuse_make_way(mm_scheduler *s, uint32_t group) {
  if (!s->groups.cache || !mm_prefix_cache_pages(s->groups.cache, group)) return false;
  const uint32_t page = next_page(s, group);
  if (page != UINT32_MAX && mm_prefix_cache_leave(s->groups.cache, page))
    mm_offload_settle(s);
  else
    mm_prefix_cache_clear_group(s->groups.cache, group);
  return true;
}

void mm_reuse_clear(mm_scheduler *s) {
  if (s->groups.cache) mm_prefix_cache_clear(s->groups.cache);
}
