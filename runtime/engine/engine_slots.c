/* Contents of an engine's slots: batches are checked against them, pages reserved, states moved. */
#include <string.h>

#include "formats/system/memory.h"
#include "runtime/engine/engine_inside.h"

static bool check_ids(const mm_engine *e, const mm_batch *b, const mm_span *s, mm_err *err) {
  for (uint32_t i = s->first; i < s->first + s->count; i++) {
    bool known =
        b->id[i] == MM_ID_SAMPLED ? s->slot >= 0 && e->slot[s->slot].sampled : b->id[i] >= 0 && (uint32_t)b->id[i] < e->model->vocab;
    if (!known) return mm_engine_refuse(err, "id of row", i, b->id[i], "one that was sampled, or less than", e->model->vocab);
  }
  return true;
}

static bool check_slot(mm_engine *e, const mm_span *s, uint32_t i, mm_err *err) {
  const mm_limits *limits = &e->config.limits;
  if (s->slot == -1) return true;
  if (s->slot < 0 || (uint32_t)s->slot >= limits->slots)
    return mm_engine_refuse(err, "slot of span", i, s->slot, "less than", limits->slots);
  if ((uint64_t)s->pos + s->count > limits->max_positions)
    return mm_engine_refuse(err, "last position of span", i, (int64_t)s->pos + s->count, "at most", limits->max_positions);
  slot_state *slot = &e->slot[s->slot];
  if (e->lightning ? s->pos != 0 && s->pos != slot->held : s->pos > slot->held)
    return mm_engine_refuse(err, "position of span", i, s->pos, e->lightning ? "0 or" : "at most", slot->held);
  if (slot->last_batch == e->batches) return mm_engine_refuse(err, "slot of span", i, s->slot, "one span for each slot, of", limits->slots);
  slot->last_batch = e->batches;
  return true;
}

static bool check_batch(mm_engine *e, const mm_batch *b, mm_err *err) {
  e->batches++;
  if (b->tokens > e->config.limits.max_tokens)
    return mm_engine_refuse(err, "rows of batch", e->batches, b->tokens, "at most", e->config.limits.max_tokens);
  uint32_t first = 0;
  for (uint32_t i = 0; i < b->span_count; i++) {
    const mm_span *s = &b->span[i];
    if (s->first != first) return mm_engine_refuse(err, "first row of span", i, s->first, "row", first);
    if (s->count == 0 || s->count > b->tokens - first) return mm_engine_refuse(err, "rows of span", i, s->count, "1 …", b->tokens - first);
    if (!check_slot(e, s, i, err) || !check_ids(e, b, s, err)) return false;
    first += s->count;
  }
  if (first != b->tokens) return mm_engine_refuse(err, "rows in spans of batch", e->batches, first, "all", b->tokens);
  for (uint32_t i = 0; i < b->out_count; i++)
    if (b->out[i] >= b->tokens || (i && b->out[i] <= b->out[i - 1]))
      return mm_engine_refuse(err, "output row", i, b->out[i], "ascending and less than", b->tokens);
  return true;
}

void mm_engine_update_slots(mm_engine *e, const mm_batch *batch, bool done) {
  for (uint32_t i = 0, out = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot < 0) continue;
    slot_state *slot = &e->slot[s->slot];
    slot->held = done ? s->pos + s->count : 0;
    if (!done && e->pages) mm_pages_cut(e->pages, (uint32_t)s->slot, 0);
    while (out < batch->out_count && batch->out[out] + 1 < s->first + s->count) out++;
    slot->sampled = done && batch->sampling && out < batch->out_count && batch->out[out] + 1 == s->first + s->count;
  }
}

/* Gives the slots pages of their own for everything that the batch writes; none if pages are short. */
static bool reserve_pages(mm_engine *e, mm_batch *batch, mm_err *err) {
  uint32_t wants = 0;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot >= 0) e->step_pages.want[wants++] = (mm_page_want){(uint32_t)s->slot, s->pos, s->count};
  }
  batch->paging = &e->paging;
  return mm_pages_reserve(e->pages, e->step_pages.want, wants, e->step_pages.copy, &e->paging.copies, err);
}

bool mm_engine_prepare(mm_engine *e, mm_batch *batch, mm_err *err) {
  batch->paging = NULL;
  if (e->queue.collected < e->queue.lost) return mm_fail_as(err, &e->queue.loss);
  return mm_engine_all_back(e, err) && check_batch(e, batch, err) && (!e->pages || reserve_pages(e, batch, err));
}

/* ---- slots ---- */

void mm_engine_remember(mm_engine *e, const mm_batch *batch) {
  for (uint32_t i = 0; e->host.history && i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    if (s->slot >= 0) memcpy(mm_engine_history(e, (uint32_t)s->slot) + s->pos, batch->id + s->first, s->count * sizeof *batch->id);
  }
}

uint32_t mm_engine_held(const mm_engine *e, uint32_t slot) { return e->slot[slot].held; }

void mm_engine_drop(mm_engine *e, uint32_t slot) {
  e->slot[slot] = (slot_state){.last_batch = e->slot[slot].last_batch};
  if (e->pages) mm_pages_cut(e->pages, slot, 0);
}

void mm_engine_lose(mm_engine *e, const mm_err *reason) {
  for (uint32_t i = 0; i < e->config.limits.slots; i++) mm_engine_drop(e, i);
  e->stepped = false;
  e->unsampled.count = 0;
  e->queue.proven = e->queue.passes;
  e->queue.loss = *reason;
  e->queue.lost = e->queue.queued;
}

mm_pages *mm_engine_pages(mm_engine *e) { return e->pages; }

uint64_t mm_engine_state_bytes(const mm_engine *e) { return e->state_bytes; }

/* Returns true if the backend keeps more of a slot than its pages. */
static bool has_states(const mm_engine *e) { return e->lightning || e->device_samples; }

/* Slots below the limit, and a backend that can share what they hold. */
static bool check_slots(mm_engine *e, const uint32_t *slot, uint32_t n, mm_err *err) {
  if (!mm_engine_all_back(e, err)) return false;
  for (uint32_t i = 0; i < n; i++)
    if (slot[i] >= e->config.limits.slots) return mm_engine_refuse(err, "slot", i, slot[i], "less than", e->config.limits.slots);
  if (e->pages && (!has_states(e) || e->config.ops->cache.copy)) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found slots that share pages; device %s gives each slot its own",
                 e->config.ops->name);
}

/* Refuses an operation on a slot whose last row is still to be sampled. */
static bool check_unsampled(const mm_engine *e, uint32_t slot, mm_err *err) {
  for (uint32_t i = 0; i < e->unsampled.count; i++)
    if (e->unsampled.row[i].slot == (int32_t)slot)
      return mm_engine_refuse(err, "slot to be given what another holds", slot, i, "none of the rows that wait for sampling, of",
                              e->unsampled.count);
  return true;
}

bool mm_engine_fork(mm_engine *e, uint32_t from, const uint32_t *to, uint32_t n, mm_err *err) {
  if (!check_slots(e, &from, 1, err) || !check_slots(e, to, n, err)) return false;
  for (uint32_t i = 0; i < n; i++)
    if (to[i] != from && !check_unsampled(e, to[i], err)) return false;
  for (uint32_t i = 0; i < n; i++)
    if (to[i] % e->groups.count != from % e->groups.count)
      return mm_engine_refuse(err, "group of slot", to[i], to[i] % e->groups.count, "that of the slot to be forked,",
                              from % e->groups.count);
  const slot_state *source = &e->slot[from];
  for (uint32_t i = 0; i < n; i++) {
    if (to[i] == from) continue;
    if (has_states(e) && !mm_engine_run_task(e, &(task){.kind = STATE_COPY, .state = {.to = to[i], .from = from}}, err)) {
      mm_engine_drop(e, to[i]);
      return false;
    }
    if (e->host.history) memcpy(mm_engine_history(e, to[i]), mm_engine_history(e, from), source->held * sizeof *e->host.history);
    mm_pages_map(e->pages, to[i], mm_pages_table(e->pages) + (size_t)from * e->paging.per_slot, mm_pages_held(e->pages, from));
    e->slot[to[i]] = (slot_state){
        .held = source->held, .last_batch = e->slot[to[i]].last_batch, .sampled = source->sampled, .sampled_id = source->sampled_id};
  }
  return true;
}

bool mm_engine_save(mm_engine *e, uint32_t slot, void *state, mm_err *err) {
  if (!check_slots(e, &slot, 1, err)) return false;
  if (!e->slot[slot].held) return mm_engine_refuse(err, "tokens in slot", slot, 0, "at least", 1);
  return !e->lightning || mm_engine_run_task(e, &(task){.kind = STATE_SAVE, .state = {.from = slot, .saved = state}}, err);
}

bool mm_engine_resume(mm_engine *e, uint32_t slot, const uint32_t *page, const int32_t *id, uint32_t tokens, const void *state,
                      mm_err *err) {
  if (!check_slots(e, &slot, 1, err) || !check_unsampled(e, slot, err)) return false;
  const uint32_t count = (uint32_t)mm_ceil_div(tokens, MM_PAGE);
  if (tokens > e->config.limits.max_positions)
    return mm_engine_refuse(err, "tokens for slot", slot, tokens, "at most", e->config.limits.max_positions);
  if (e->lightning && tokens && !state) return mm_engine_refuse(err, "states for slot", slot, 0, "those after token", tokens);
  for (uint32_t i = 0; i < count; i++)
    if (!mm_pages_references(e->pages, page[i]))
      return mm_engine_refuse(err, "page", i, page[i], "one in use, below", mm_pages_count(e->pages));
  for (uint32_t i = 0; i < count; i++)
    if (mm_pages_group_of(e->pages, page[i]) != slot % e->groups.count)
      return mm_engine_refuse(err, "group of page", page[i], mm_pages_group_of(e->pages, page[i]), "that of the slot,",
                              slot % e->groups.count);
  for (uint32_t i = 0; id && i < tokens; i++)
    if (id[i] < 0 || (uint32_t)id[i] >= e->model->vocab)
      return mm_engine_refuse(err, "id of token", i, id[i], "less than", e->model->vocab);
  mm_pages_map(e->pages, slot, page, count);
  for (uint32_t i = 0; e->host.history && i < tokens; i++) mm_engine_history(e, slot)[i] = id ? id[i] : -1;
  e->slot[slot] = (slot_state){.held = tokens, .last_batch = e->slot[slot].last_batch};
  if (!tokens) return true;
  const task states = {.kind = STATE_LOAD, .state = {.to = slot, .given = state}}, ids = {.kind = IDS_LOAD, .ids = {slot, tokens, id}};
  const bool loaded = (!e->lightning || mm_engine_run_task(e, &states, err)) && (!e->device_samples || mm_engine_run_task(e, &ids, err));
  if (!loaded) mm_engine_drop(e, slot);
  return loaded;
}

/* ---- pages in host memory ---- */

uint64_t mm_engine_page_bytes(const mm_engine *e) {
  uint64_t bytes = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++)
    if (mm_engine_rank_group(e, r) == 0) bytes += e->facts[r].page_bytes;
  return bytes;
}

bool mm_engine_pool(mm_engine *e, uint32_t places, mm_err *err) {
  const uint64_t bytes = mm_engine_page_bytes(e), left = mm_memory_left();
  if (!e->pages || !e->config.ops->cache.pool)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "found pages to move to host memory; device %s moves none",
                   e->config.ops->name);
  if (e->processes.group)
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(NULL, NULL), "found %u processes; moving pages to host memory needs 1",
                   e->processes.group->processes);
  if (places > left / mm_max(bytes, 1))
    return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL),
                   "--kv-offload: found %llu bytes (%u pages of %llu), expected at most %llu of host memory, which are free",
                   (unsigned long long)places * bytes, places, (unsigned long long)bytes, (unsigned long long)left);
  for (uint32_t r = 0; r < e->started; r++)
    if (e->facts[r].page_bytes != e->facts[mm_engine_pool_rank(e, r)].page_bytes)
      return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, NULL), "rank %u: found %llu bytes of a page, expected %llu as in the first group", r,
                     (unsigned long long)e->facts[r].page_bytes, (unsigned long long)e->facts[mm_engine_pool_rank(e, r)].page_bytes);
  return mm_engine_run_task(e, &(task){.kind = POOL, .pool = {places, false}}, err) &&
         (e->groups.count == 1 || mm_engine_run_task(e, &(task){.kind = POOL, .pool = {places, true}}, err));
}

/* The first group's ranks have memory of their own, and those of the others the same. */
bool mm_engine_rank_pool(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const task *t = &e->task;
  const bool shared = mm_engine_rank_group(e, r->index) > 0;
  if (shared != t->pool.shared) return true;
  char *const memory = shared ? e->rank[mm_engine_pool_rank(e, r->index)].pool : NULL;
  return (r->pool = e->config.ops->cache.pool(r->forward.backend, t->pool.places, memory, err));
}

/* The moves of pages of the rank's group. */
bool mm_engine_rank_move(rank *r, mm_err *err) {
  const mm_engine *e = r->engine;
  const task *t = &e->task;
  const mm_page_move *move = t->move.move;
  uint32_t count = t->move.count;
  if (e->groups.count > 1) {
    const uint32_t *first = e->groups.moves + mm_engine_rank_group(e, r->index);
    move = e->groups.move + first[0], count = first[1] - first[0];
  }
  return !count || e->config.ops->cache.move(r->forward.backend, t->move.number, move, count, err);
}

uint32_t mm_engine_pool_parts(const mm_engine *e) { return e->started / e->groups.count; }
char *mm_engine_pool_part(const mm_engine *e, uint32_t i, uint64_t *bytes) {
  const uint32_t each = mm_pack_attn_tp(&e->shards->pack), r = i / each * e->shards->pack.tp + i % each;
  *bytes = e->facts[r].page_bytes;
  return e->rank[r].pool;
}
uint32_t mm_engine_ranks(const mm_engine *e) { return e->started; }

bool mm_engine_move(mm_engine *e, const mm_page_move *move, uint32_t count, uint64_t *number, mm_err *err) {
  *number = e->moves++;
  return mm_engine_all_back(e, err) && mm_engine_group_moves(e, move, count, err) &&
         mm_engine_run_task(e, &(task){.kind = MOVE, .move = {*number, move, count}}, err);
}

bool mm_engine_moved(mm_engine *e, bool wait, uint64_t *oldest, mm_err *err) {
  if (!mm_engine_run_task(e, &(task){.kind = MOVED, .wait = wait}, err)) return false;
  *oldest = UINT64_MAX;
  for (uint32_t r = 0; r < e->started; r++) *oldest = mm_min(*oldest, e->rank[r].moving);
  return true;
}
