/* Who has a slot: requests wait in order of priority, then of how many of their tenant run, then of when they came. Out of slots or pages,
 * those of lower priority and those that came last give way and wait again. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/scheduler_inside.h"

void mm_schedule_join(mm_scheduler *s, job *j) {
  mm_err err = {0};
  if (MM_GROW(s->waiting, &s->waiting_cap, s->waiting_count + 1, &err) && MM_GROW(s->turns.job, &s->turns.cap, s->waiting_count + 1, &err))
    s->waiting[s->waiting_count++] = j;
  else
    mm_scheduler_end(s, j, MM_FINISH_ERROR, &err);
}

/* Ends those that are not to go on; true if the job was one. */
static bool end_if_over(mm_scheduler *s, job *j, double now) {
  const bool late = j->r.deadline > 0 && now >= j->r.deadline;
  if (atomic_load(&j->cancelled))
    mm_scheduler_end(s, j, MM_FINISH_CANCELLED, NULL);
  else if (late)
    mm_scheduler_end(s, j, MM_FINISH_DEADLINE, NULL);
  else if (!j->r.max_tokens)
    mm_scheduler_end(s, j, MM_FINISH_LENGTH, NULL);
  else
    return false;
  return true;
}

/* From the back: an end takes the job out, and the last one takes its place. */
void mm_schedule_end_over(mm_scheduler *s) {
  const double now = mm_now();
  for (size_t i = s->waiting_count; i-- > 0;) end_if_over(s, s->waiting[i], now);
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i]) end_if_over(s, s->slot[i], now);
}

void mm_schedule_leave(mm_scheduler *s, job *j, bool keep) {
  if (j->slot >= 0) {
    mm_send_leave(s, j, keep);
    if (keep) mm_reuse_keep(s, j);
    s->shortage.left++;
    mm_engine_drop(s->engine, (uint32_t)j->slot);
    s->slot[j->slot] = NULL;
    s->running--;
    j->slot = -1;
    return;
  }
  for (size_t i = 0; i < s->waiting_count; i++)
    if (s->waiting[i] == j) s->waiting[i] = s->waiting[--s->waiting_count];
}

void mm_schedule_preempt(mm_scheduler *s, job *j) {
  mm_schedule_leave(s, j, true);
  j->turn++;
  j->fed = j->in_flight = 0;
  s->own.preempted++;
  mm_schedule_join(s, j);
}

job *mm_schedule_victim(const mm_scheduler *s, uint32_t group) {
  job *victim = NULL;
  for (uint32_t i = 0; i < s->slots; i++) {
    job *j = s->slot[i];
    if (!j || (group != MM_ANY_GROUP && group != i % s->groups.count)) continue;
    if (!victim || j->r.priority < victim->r.priority || (j->r.priority == victim->r.priority && j->ticket > victim->ticket)) victim = j;
  }
  return victim;
}

uint32_t mm_schedule_running(const mm_scheduler *s, uint32_t group) {
  uint32_t n = 0;
  for (uint32_t i = group; i < s->slots; i += s->groups.count) n += s->slot[i] != NULL;
  return n;
}

uint64_t mm_schedule_tokens(const mm_scheduler *s, uint32_t group) {
  uint64_t n = 0;
  for (uint32_t i = group; i < s->slots; i += s->groups.count) n += s->slot[i] ? s->slot[i]->count : 0;
  return n;
}

static uint32_t running_of(const mm_scheduler *s, uint64_t salt) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s->slots; i++) n += s->slot[i] && s->slot[i]->r.salt == salt;
  return n;
}

/* x is to have a slot before y. */
static bool is_before(const waiting_job *x, const waiting_job *y) {
  if (x->job->r.priority != y->job->r.priority) return x->job->r.priority > y->job->r.priority;
  return x->runs != y->runs ? x->runs < y->runs : x->job->ticket < y->job->ticket;
}

/* turn[0 … n) is a heap but for its element i. */
static void sift(waiting_job *turn, size_t n, size_t i) {
  for (size_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && is_before(&turn[child + 1], &turn[child])) child++;
    if (!is_before(&turn[child], &turn[i])) return;
    const waiting_job moved = turn[i];
    turn[i] = turn[child], turn[child] = moved;
  }
}

/* Those that wait, in s->turns as a heap by whose turn it is; where no slot is free, those that may push out `victim`. How many. */
static size_t order(mm_scheduler *s, const job *victim) {
  size_t n = 0;
  for (size_t i = 0; i < s->waiting_count; i++) {
    job *j = s->waiting[i];
    if (j->duplicate || (victim && j->r.priority <= victim->r.priority)) continue;
    const bool again = n && s->turns.job[n - 1].job->r.salt == j->r.salt;
    s->turns.job[n] = (waiting_job){j, again ? s->turns.job[n - 1].runs : running_of(s, j->r.salt)};
    n++;
  }
  for (size_t i = n / 2; i-- > 0;) sift(s->turns.job, n, i);
  return n;
}

/* The first of them, which leaves the heap. */
static job *first_of(mm_scheduler *s, size_t *n) {
  job *j = s->turns.job[0].job;
  s->turns.job[0] = s->turns.job[--*n];
  sift(s->turns.job, *n, 0);
  return j;
}

/* Pages for all tokens of the job and the next one. */
static uint64_t pages_of(const job *j) { return mm_ceil_div((uint64_t)j->count + 1, MM_PAGE); }

/* Pages that are marked once `page` is too. */
static uint32_t mark(mm_scheduler *s, uint32_t marked, uint32_t page) {
  uint8_t *byte = &s->mark[page / 8];
  const uint8_t bit = (uint8_t)(1u << page % 8);
  marked += !(*byte & bit);
  *byte |= bit;
  return marked;
}

/* Pages wanted, beyond pages that running jobs hold, by the job (with its cached prefix) and by jobs that run in the group with a priority
 * of `least` or more: a job all of its pages and one to grow, a running one what it was let in with and one to grow. */
static uint64_t wanted(const mm_scheduler *s, const job *j, const reuse *hit, uint32_t group, int64_t least) {
  uint64_t pages = 1 + pages_of(j) - hit->tokens / MM_PAGE;
  for (uint32_t i = group; i < s->slots; i += s->groups.count) {
    if (!s->slot[i] || s->slot[i]->r.priority < least) continue;
    const uint64_t all = pages_of(s->slot[i]), held = mm_pages_held(s->pages, i);
    pages += 1 + (all > held ? all - held : 0);
  }
  return pages;
}

/* Returns true if the job fits together with the jobs that run in the group and whose priority is `least` or more, after its other jobs are
 * preempted and the cache has freed all pages that it shares with none of these. A job that is alone in a group is always admitted; it
 * finds a shortage itself. */
static bool enough(mm_scheduler *s, const job *j, const reuse *hit, uint32_t group, int64_t least) {
  const uint32_t pages = s->pages ? mm_pages_each(s->pages) : 0;
  uint32_t kept = 0, running = 0;
  if (!pages) return true;
  memset(s->mark, 0, mm_ceil_div(mm_pages_count(s->pages), 8));
  for (uint32_t i = group; i < s->slots; i += s->groups.count) {
    if (!s->slot[i] || s->slot[i]->r.priority < least) continue;
    const uint32_t *page = mm_pages_table(s->pages) + (size_t)i * mm_pages_per_slot(s->pages);
    for (uint32_t k = 0; k < mm_pages_held(s->pages, i); k++) kept = mark(s, kept, page[k]);
    running++;
  }
  for (uint32_t i = 0; i < hit->tokens; i += MM_PAGE) kept = mark(s, kept, s->page[i / MM_PAGE]);
  return !running || wanted(s, j, hit, group, least) <= pages - kept;
}

/* Returns true if the job fits together with all jobs that run in the group. The cache frees pages, if that helps. */
static bool fits(mm_scheduler *s, const job *j, const reuse *hit, uint32_t group) {
  if (!s->pages || !mm_schedule_running(s, group)) return true;
  if (!enough(s, j, hit, group, INT64_MIN)) return false;
  while (wanted(s, j, hit, group, INT64_MIN) > mm_pages_free_in(s->pages, group))
    if (!mm_reuse_evict(s, group)) return false;
  return true;
}

/* Of the group; behind the last slot if it has none. */
static uint32_t free_slot(const mm_scheduler *s, uint32_t group) {
  uint32_t i = group;
  while (i < s->slots && s->slot[i]) i += s->groups.count;
  return i;
}

/* Makes a place of one that a job of lower priority has in the group. */
static bool push_out(mm_scheduler *s, const job *j, uint32_t group) {
  job *victim = mm_schedule_victim(s, group);
  if (!victim || victim->r.priority >= j->r.priority) return false;
  mm_schedule_preempt(s, victim);
  return true;
}

/* Those that wait for the job say so again before each step. */
static void clear_awaited(job *j) {
  j->awaited = 0;
  j->need = j->r.priority;
}

/* The job has a slot of the group, and in it what the cache has of its tokens. */
static void enter(mm_scheduler *s, job *j, const reuse *hit, uint32_t group) {
  mm_err err = {0};
  const uint32_t slot = free_slot(s, group);
  mm_schedule_leave(s, j, false);
  j->slot = (int32_t)slot;
  clear_awaited(j);
  s->slot[slot] = j;
  s->running++;
  if (!mm_reuse_take(s, j, hit, &err)) {
    mm_scheduler_end(s, j, MM_FINISH_ERROR, &err);
    return;
  }
  if (j->turn) return;
  j->began = mm_now();
  j->cached = j->fed;
  mm_receive_entered(s, j);
  s->own.prompt_tokens += j->r.prompt_count;
  s->own.cached_tokens += j->cached;
  if (j->r.prefill) j->r.prefill(j->r.user, j->prefilled = j->cached, j->cached);
}

/* Returns true if the job would fit into the group if all its jobs of lower priority were preempted. */
static bool could_fit(mm_scheduler *s, const job *j, uint32_t group) {
  const reuse hit = mm_reuse_find(s, j, group);
  const bool could = enough(s, j, &hit, group, j->r.priority);
  mm_reuse_release(s, &hit);
  return could;
}

#define HELD_S 1 /* that what others gave way with is held for a job whose pages are on their way */

/* The job waits no longer for pages, and computes what has not come. */
static bool waited_enough(const job *j) { return j->back.pushed && j->back.turn == j->turn + 1 && mm_now() >= j->back.held; }

/* Others gave way for the job: pages of its prefix that had no room next to theirs come now. Returns true if it waits for them. */
static bool waits_again(mm_scheduler *s, job *j, uint32_t group) {
  if (!s->offload.on || waited_enough(j) || !mm_offload_fetch(s, j, group)) return false;
  if (!j->back.pushed) j->back.held = mm_now() + HELD_S;
  return j->back.pushed = j->duplicate = true;
}

/* Lets the job into the group, if it fits; with `push`, if it fits when those of lower priority give way. Otherwise nobody does, and the
 * cache keeps what it has. False with j->duplicate: some did, and it waits for pages of its prefix. */
static bool let_into(mm_scheduler *s, job *j, uint32_t group, bool push) {
  bool pushed = false, admit = could_fit(s, j, group) && (free_slot(s, group) < s->slots || (pushed = push && push_out(s, j, group)));
  while (admit) {
    if (pushed && waits_again(s, j, group)) return false;
    reuse hit = mm_reuse_find(s, j, group);
    const bool fitted = fits(s, j, &hit, group), in = fitted && mm_reuse_stands(s, &hit);
    if (in) enter(s, j, &hit, group);
    mm_reuse_release(s, &hit);
    if (in) return true;
    pushed = !fitted && push && push_out(s, j, group);
    admit = fitted || pushed; /* room that took the states it was made for: with those that are left */
  }
  return false;
}

#define FETCHED 16 /* tokens that are fetched count as one that is computed */

/* Tokens that the group would have with the job, and those of the job that it would compute. */
static uint64_t cost_of(mm_scheduler *s, const job *j, uint32_t group) {
  const bool finds = s->groups.cache;
  const uint32_t most = mm_reuse_most(j), read = mm_reuse_read_in(s, j, group);
  const uint32_t ready = read ? read : finds ? mm_prefix_cache_ready(s->groups.cache, group, j->r.salt, j->token, most) : 0;
  const uint32_t had =
      finds && s->offload.on ? (uint32_t)mm_max(ready, mm_prefix_cache_has(s->groups.cache, j->r.salt, j->token, most)) : ready;
  return mm_schedule_tokens(s, group) + (j->count - had) + mm_ceil_div(had - ready, FETCHED);
}

/* The group that costs least and is neither `than` nor before it, as groups are ordered by cost and number; s->groups.count behind the
 * last. */
static uint32_t next_group(mm_scheduler *s, const job *j, uint32_t than) {
  const uint64_t least = than < s->groups.count ? cost_of(s, j, than) : 0;
  uint32_t best = s->groups.count;
  uint64_t best_cost = 0;
  for (uint32_t g = 0; g < s->groups.count; g++) {
    const uint64_t cost = cost_of(s, j, g);
    if (than < s->groups.count && (cost < least || (cost == least && g <= than))) continue;
    if (best == s->groups.count || cost < best_cost) best = g, best_cost = cost;
  }
  return best;
}

/* Returns true if the job waits for pages of its prefix that are on their way into the group, which would let it in. */
static bool waits_for_pages(mm_scheduler *s, job *j, uint32_t group, bool push) {
  const job *victim = mm_schedule_victim(s, group);
  if (!s->offload.on || waited_enough(j) || !could_fit(s, j, group)) return false;
  if (s->groups.count > 1 && free_slot(s, group) >= s->slots && !(push && victim && victim->r.priority < j->r.priority)) return false;
  return j->duplicate = mm_offload_fetch(s, j, group);
}

/* Returns true if the job waits for a prefix of its own that another one reads in the group, which would let it in. */
static bool waits_for_reader(mm_scheduler *s, job *j, uint32_t group) {
  return j->duplicate = free_slot(s, group) < s->slots && could_fit(s, j, group) && mm_reuse_wait_in(s, j, group);
}

/* Lets the job in: into the group with the fewest tokens where it fits, or else into the first where others give way for it. Returns false
 * with j->duplicate where it waits for pages of its prefix. */
static bool let_in(mm_scheduler *s, job *j) {
  if (s->groups.count == 1 && waits_for_pages(s, j, 0, true)) return false;
  if (s->shortage.ticket == j->ticket && s->shortage.at_left == s->shortage.left) return false;
  if (s->groups.count == 1 && let_into(s, j, 0, true)) return true;
  if (j->duplicate) return false;
  for (int push = 0; s->groups.count > 1 && push < 2; push++)
    for (uint32_t g = next_group(s, j, s->groups.count); g < s->groups.count; g = next_group(s, j, g)) {
      if (waits_for_reader(s, j, g) || waits_for_pages(s, j, g, push)) return false;
      if (let_into(s, j, g, push)) return true;
      if (j->duplicate) return false;
    }
  s->shortage.ticket = j->ticket;
  s->shortage.at_left = s->shortage.left;
  return false;
}

void mm_schedule(mm_scheduler *s) {
  mm_schedule_end_over(s);
  for (uint32_t i = 0; i < s->slots; i++)
    if (s->slot[i]) clear_awaited(s->slot[i]);
  mm_offload_poll(s, false);
  mm_send_poll(s);
  mm_receive_poll(s);
  s->groups.looked = 0;
  for (bool more = true; more;) {
    size_t n = order(s, s->running == s->slots ? mm_schedule_victim(s, MM_ANY_GROUP) : NULL);
    for (more = false; n && !more;) {
      job *j = first_of(s, &n);
      j->duplicate = mm_reuse_duplicate(s, j) || mm_receive_waits(s, j);
      if (j->duplicate) continue;
      more = let_in(s, j);
      if (!more && (!j->duplicate || j->back.pushed)) break; /* nobody else takes what it pushed others out of */
    }
  }
  for (size_t i = 0; i < s->waiting_count; i++) s->waiting[i]->duplicate = false;
}
