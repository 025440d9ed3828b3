/* The size of an engine's KV cache: each rank says what it needs and what memory it finds; from all ranks' facts every process computes the
 * same number of pages (loader/stream/capacity.h). */
#include <string.h>

#include "runtime/engine/engine_inside.h"

static mm_demand demand_of(const mm_engine *e) {
  const mm_engine_config *c = &e->config;
  const bool gpu = c->ops->own_memory;
  return (mm_demand){.gpu = gpu,
                     .step_tokens = c->limits.max_tokens,
                     .outs = c->memory.outs,
                     .slots = mm_engine_own_slots(e),
                     .positions = c->limits.max_positions,
                     .taps = c->taps,
                     .cache = c->options.kv_fp8           ? MM_CACHE_FP8
                              : gpu || c->options.kv_bf16 ? MM_CACHE_BF16
                                                          : MM_CACHE_F32,
                     .index_fp8 = c->options.index_fp8,
                     .act_quant = c->options.act_quant,
                     .calibration = c->calibration,
                     .batch_invariant = c->options.batch_invariant,
                     .across = e->here % e->shards->pack.tp != 0,
                     .attached = c->attach};
}

bool mm_engine_measure(rank *r, const mm_backend_config *c, mm_err *err) {
  rank_facts *f = &r->engine->facts[r->index];
  const mm_demand d = demand_of(r->engine);
  if (!mm_rank_memory_of(&f->need, r->engine->model, &r->weights, &d, err)) return false;
  mm_engine_add_draft_memory(&r->engine->config, &f->need);
  if (r->engine->config.memory.least) {
    mm_demand least = d;
    least.outs = r->engine->config.memory.least;
    if (r->engine->config.draft) least.taps = 0; /* they are its */
    if (!mm_rank_memory_of(&f->least, r->engine->model, &r->weights, &least, err)) return false;
  }
  return r->engine->config.ops->memory(c, &f->memory, err);
}

/* Memory that ranks of this run have of rank r's device. */
static mm_device_memory device_of(const mm_engine *e, uint32_t r) {
  const mm_memory_facts *m = &e->facts[r].memory;
  const double usual = e->config.ops->own_memory ? MM_GPU_SHARE : MM_CPU_SHARE, share = e->config.memory.share;
  mm_device_memory on = {.total = m->total, .free = m->free, .share = share > 0 ? share : usual};
  for (uint32_t i = 0; i < mm_pack_ranks(&e->shards->pack); i++) {
    const mm_memory_facts *other = &e->facts[i].memory;
    if (!mm_digest_equal(&other->device, &m->device)) continue;
    on.free = mm_min(on.free, other->free);
    on.ranks++;
  }
  return on;
}

/* The memory that there is, and what takes it, for errors. */
static const char *found_text(char *to, size_t n, const mm_engine *e, uint32_t r, const mm_device_memory *on) {
  const mm_rank_memory *need = &e->facts[r].need;
  const int used = snprintf(to, n, "found %llu bytes free of %llu, of which %g %% may be used", (unsigned long long)on->free,
                            (unsigned long long)on->total, 100 * on->share);
  if (e->config.ops->own_memory && used > 0 && (size_t)used < n)
    snprintf(to + used, n - (size_t)used, ": weights take %llu, buffers %llu, states %llu, the driver and recorded steps %llu",
             (unsigned long long)need->weights, (unsigned long long)need->buffers, (unsigned long long)need->states,
             (unsigned long long)MM_GPU_OVERHEAD);
  else if (need->states && used > 0 && (size_t)used < n)
    snprintf(to + used, n - (size_t)used, ": states take %llu", (unsigned long long)need->states);
  return to;
}

/* Rank r has room for `pages` pages, too few for a sequence. */
static bool refuse_sequence(const mm_engine *e, uint32_t r, uint64_t pages, const mm_device_memory *on, mm_err *err) {
  const mm_demand d = demand_of(e);
  const mm_rank_memory *need = &e->facts[r].need;
  const mm_cache_capacity capacity = mm_cache_capacity_of(need, &d, on);
  const char *length = e->config.memory.length ? e->config.memory.length : "--max-model-len";
  char found[300], change[160] = "";
  found_text(found, sizeof found, e, r, on);
  if (capacity.lack)
    snprintf(change, sizeof change,
             "%llu are lacking without any cache: more ranks (--tp, --pp), --max-num-seqs or --gpu-memory-utilization",
             (unsigned long long)capacity.lack);
  else
    snprintf(change, sizeof change, "%llu are left for the cache: %s of at most %llu, --kv-cache-dtype or --gpu-memory-utilization",
             (unsigned long long)capacity.bytes, length, (unsigned long long)(pages * MM_PAGE));
  return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(e->shards->pack.dir, NULL),
                 "rank %u: a sequence of %u tokens needs %llu bytes of KV cache; %s; %s", r, d.positions,
                 (unsigned long long)(mm_sequence_pages(&d) * need->page), found, change);
}

/* As many pages as were asked for, where a rank cannot have them whatever share is allowed. */
static bool check_given(const mm_engine *e, uint32_t r, const mm_device_memory *on, mm_err *err) {
  const mm_demand d = demand_of(e);
  const mm_rank_memory *need = &e->facts[r].need;
  const uint64_t pages = mm_ceil_div(e->config.limits.pages, e->groups.count),
                 free = on->free / mm_max(1, on->ranks) + (d.attached ? need->weights : 0);
  uint64_t cache, all;
  const uint64_t other = d.gpu ? need->weights + need->buffers : 0; /* a CPU has weights in the page cache */
  const bool counted = mm_mul(pages, need->page, &cache) && mm_add(cache, other, &all) && mm_add(all, need->states, &all);
  if (counted && all <= free) return true;
  char found[300];
  return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(e->shards->pack.dir, NULL),
                 "rank %u: %llu tokens need %llu bytes of KV cache; %s; expected fewer --kv-cache-tokens", r,
                 (unsigned long long)pages * MM_PAGE, (unsigned long long)(counted ? cache : UINT64_MAX),
                 found_text(found, sizeof found, e, r, on));
}

/* Pages that every rank holds, without proposals or with them. */
static uint64_t pages_of(const mm_engine *e, bool without) {
  const mm_demand d = demand_of(e);
  uint64_t pages = mm_most_pages(&d);
  for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++) {
    const mm_device_memory on = device_of(e, r);
    pages = mm_fewer_pages(pages, without ? &e->facts[r].least : &e->facts[r].need, &d, &on);
  }
  return pages;
}

static bool holds_proposals(const mm_engine *e) {
  const mm_demand d = demand_of(e);
  bool holds = true;
  if (!e->config.limits.pages) return mm_proposals_fit(pages_of(e, false), pages_of(e, true), mm_sequence_pages(&d));
  for (uint32_t r = 0; holds && r < mm_pack_ranks(&e->shards->pack); r++) {
    const mm_device_memory on = device_of(e, r);
    holds = check_given(e, r, &on, MM_IGNORED);
  }
  return holds;
}

static void leave_proposals_out(mm_engine *e) {
  mm_engine_config *c = &e->config;
  c->memory.outs = c->memory.least;
  if (c->draft) c->draft = NULL, c->taps = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++) e->facts[r].need = e->facts[r].least;
}

bool mm_engine_fit(mm_engine *e, mm_err *err) {
  if (e->config.memory.least && !holds_proposals(e)) leave_proposals_out(e);
  const mm_demand d = demand_of(e);
  uint64_t pages = mm_min(mm_most_pages(&d), INT32_MAX);
  uint32_t least = 0; /* the rank with the least room */
  for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++) {
    const mm_device_memory on = device_of(e, r);
    if (e->config.limits.pages && !check_given(e, r, &on, err)) return false;
    const uint64_t here = mm_fewer_pages(pages, &e->facts[r].need, &d, &on);
    if (here < pages) pages = here, least = r;
  }
  if (e->config.limits.pages) return true;
  const mm_device_memory on = device_of(e, least);
  if (pages < mm_sequence_pages(&d)) return refuse_sequence(e, least, pages, &on, err);
  e->config.limits.pages = (uint32_t)mm_min(pages, INT32_MAX / e->groups.count) * e->groups.count;
  return true;
}

uint32_t mm_engine_outs(const mm_engine *e) { return e->config.memory.outs; }

mm_engine_cache mm_engine_cache_of(const mm_engine *e) {
  const mm_demand d = demand_of(e);
  mm_engine_cache c = {0};
  if (!e->pages) return c;
  uint64_t page = 0;
  for (uint32_t r = 0; r < mm_pack_ranks(&e->shards->pack); r++) page = mm_max(page, e->facts[r].need.page);
  c.tokens = (uint64_t)mm_pages_count(e->pages) * MM_PAGE, c.bytes = mm_pages_each(e->pages) * page;
  c.sequences = mm_pages_each(e->pages) / mm_sequence_pages(&d) * e->groups.count;
  return c;
}

bool mm_engine_use_of(const mm_engine *e, uint32_t r, mm_engine_use *out) {
  if (!e->pages || r >= mm_pack_ranks(&e->shards->pack)) return false;
  const rank_facts *f = &e->facts[r];
  *out = (mm_engine_use){.total = f->memory.total,
                         .free = f->memory.free,
                         .weights = f->need.weights,
                         .buffers = f->need.buffers,
                         .states = f->need.states,
                         .caches = mm_pages_each(e->pages) * f->need.page};
  return f->memory.total;
}
