/* Allocations of the CUDA backend on a fake device, against what the size of the KV cache leaves room for
 * (loader/stream/capacity.h). Part of host.c. */
#ifndef MM_TESTS_HOST_MEMORY_H
#define MM_TESTS_HOST_MEMORY_H

#include "loader/stream/capacity.h"

/* Rows that ask for all that may be asked of them. */
static bool choose_step(mm_engine *e, mm_err *err) {
  static int32_t id[SLOTS], chosen[SLOTS];
  static mm_span span[SLOTS];
  static uint32_t out[SLOTS];
  static mm_sampling set[SLOTS];
  static mm_logprob logprobs[SLOTS][1 + MM_LOGPROBS];
  static const mm_bias bias[] = {{1, 2}, {3, -1}};
  static uint32_t allowed[1 << 16];
  memset(allowed, 0xff, sizeof allowed);
  for (uint32_t i = 0; i < SLOTS; i++) {
    id[i] = (int32_t)i, out[i] = i, span[i] = (mm_span){(int32_t)i, i, 1, 0};
    set[i] = (mm_sampling){.temperature = 1, .top_p = 1, .repetition = 1.1, .bias_count = 2, .bias = bias, .allowed = allowed};
    set[i].top_logprobs = MM_LOGPROBS, set[i].logprobs = logprobs[i];
  }
  return mm_engine_queue(e, &(mm_batch){SLOTS, id, SLOTS, span, SLOTS, out, set, NULL}, err) && mm_engine_collect(e, chosen, err);
}

enum { MOVED_PAGES = 3, MOVED_PLACES = 9 };

/* Other bytes in every place, part and group. */
static void fill_pool(mm_engine *e, uint32_t group) {
  for (uint32_t r = 0; r < mm_engine_pool_parts(e); r++) {
    uint64_t bytes;
    char *at = mm_engine_pool_part(e, r, &bytes);
    for (uint64_t i = 0; i < MOVED_PLACES * bytes; i++) at[i] = (char)((i * i + r + 9 * group + 1) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
  }
}

/* In every part places `from` and `to` hold the same, or not. */
static bool same_places(const mm_engine *e, uint32_t from, uint32_t to, uint32_t count) {
  bool same = true;
  for (uint32_t r = 0; r < mm_engine_pool_parts(e); r++) {
    uint64_t bytes;
    const char *at = mm_engine_pool_part(e, r, &bytes);
    same = same && memcmp(at + from * bytes, at + to * bytes, count * bytes) == 0;
  }
  return same;
}

static bool move_one(mm_engine *e, mm_page_move move, mm_err *err) {
  uint64_t number, oldest;
  return mm_engine_move(e, &move, 1, &number, err) && mm_engine_moved(e, true, &oldest, err) && oldest > number;
}

/* A page of the group goes through place 6 to the first page of another group, whose bytes go to place 7. */
static bool move_across(mm_engine *e, uint32_t from, uint32_t to, mm_err *err) {
  return move_one(e, (mm_page_move){from, 6, false}, err) && move_one(e, (mm_page_move){to, 6, true}, err) &&
         move_one(e, (mm_page_move){to, 7, false}, err) && same_places(e, 0, 7, 1) && !same_places(e, 1, 7, 1);
}

/* Bytes of places that go to pages of a group come back in other places, all of every rank, neighbours copied together or not. */
static bool move_pages(mm_engine *e, mm_err *err) {
  const uint32_t groups = mm_engine_groups(e);
  uint32_t page[4][MOVED_PAGES]; /* of at most four groups */
  uint64_t number, oldest;
  mm_pages *p = mm_engine_pages(e);
  bool ok = mm_engine_pool(e, MOVED_PLACES, err);
  for (uint32_t i = 0; ok && i < groups * MOVED_PAGES; i++) ok = mm_pages_take(p, i / MOVED_PAGES, &page[i / MOVED_PAGES][i % MOVED_PAGES]);
  for (uint32_t g = 0; ok && g < groups; g++) {
    const uint32_t *own = page[g];
    const mm_page_move move[] = {{own[0], 0, true},  {own[1], 1, true},  {own[2], 2, true},
                                 {own[2], 5, false}, {own[1], 4, false}, {own[0], 8, false}};
    fill_pool(e, g);
    ok = mm_engine_move(e, move, 2, &number, err) && mm_engine_move(e, move + 2, 4, &number, err) &&
         mm_engine_moved(e, true, &oldest, err) && oldest > number && same_places(e, 0, 8, 1) && same_places(e, 1, 4, 2) &&
         !same_places(e, 0, 1, 1) && (groups == 1 || move_across(e, own[0], page[(g + 1) % groups][0], err));
  }
  for (uint32_t i = 0; ok && i < groups * MOVED_PAGES; i++) mm_pages_release(p, page[i / MOVED_PAGES][i % MOVED_PAGES]);
  return ok || mm_fail(err, MM_BUG, "E_TEST", mm_at(NULL, NULL), "pages that were moved hold other bytes");
}

/* Allocations, whatever steps ask for, are what the size of the cache leaves room for (loader/stream/capacity.h). */
static void check_memory(const mm_shards *shards, bool kv_fp8, bool collects, const char *what) {
  const bool index_fp8 = kv_fp8 && shards->pack.model.index_heads; /* as the keys and values */
  mm_err err = {0};
  uint64_t counted = 0, kind[4] = {0};
  mm_calibration *c = collects ? mm_calibration_open(shards, &err) : NULL;
  static const uint32_t device[] = {0, 1, 0, 1};
  const mm_engine_config config = {.ops = backend,
                                   .limits = {ROWS, SLOTS, POSITIONS, 0},
                                   .options.threads = 1,
                                   .options.act_quant = !collects,
                                   .options.kv_fp8 = kv_fp8,
                                   .options.index_fp8 = index_fp8,
                                   .device = device,
                                   .calibration = c,
                                   .memory = {.fits = true}};
  const mm_demand d = {.gpu = true,
                       .step_tokens = ROWS,
                       .slots = (uint32_t)mm_ceil_div(SLOTS, mm_pack_groups(&shards->pack)),
                       .positions = POSITIONS,
                       .act_quant = !collects,
                       .calibration = collects,
                       .cache = kv_fp8 ? MM_CACHE_FP8 : MM_CACHE_BF16,
                       .index_fp8 = index_fp8};
  for (uint32_t r = 0; r < mm_pack_ranks(&shards->pack); r++) {
    mm_rank_weights w;
    mm_rank_memory need;
    if (!mm_bind(&w, shards, r, &err) || !mm_rank_memory_of(&need, &shards->pack.model, &w, &d, &err)) abort();
    kind[0] += need.weights, kind[1] += need.buffers, kind[2] += need.states, kind[3] += need.page * mm_most_pages(&d) + (2 << 20);
    mm_bind_close(&w);
  }
  for (int i = 0; i < 4; i++) counted += kind[i];
  fake.ranks = shards->pack.tp, fake.graphs = 0, fake.wrong[0] = 0;
  mm_engine *e = mm_engine_open(shards, &config, &err);
  bool ok = e && mm_engine_cache_of(e).tokens == mm_most_pages(&d) * MM_PAGE * mm_pack_groups(&shards->pack);
  const uint64_t opened = fake_used();
  ok = ok && step(e, 4, false, &err) && step(e, ROWS, true, &err) && (collects || shards->pack.pp > 1 || choose_step(e, &err));
  const uint64_t used = fake_used();
  char reason[700];
  snprintf(reason, sizeof reason,
           "%llu bytes at open, %llu after steps; counted: %llu weights, %llu buffers, %llu states, %llu cache; %.300s",
           (unsigned long long)opened, (unsigned long long)used, (unsigned long long)kind[0], (unsigned long long)kind[1],
           (unsigned long long)kind[2], (unsigned long long)kind[3], err.text);
  report(what, ok && used <= counted && used > kind[3] && counted - used < mm_pack_ranks(&shards->pack) * (UINT64_C(200) << 20), reason);
  close_engine(e, "its calls and its memory");
  mm_calibration_close(c);
}

#endif
