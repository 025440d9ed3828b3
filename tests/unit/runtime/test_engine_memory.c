/* The KV cache sized from memory: over random models, cuts, stages, processes, cache types and memories that differ from rank to rank,
 * every rank of every process has as many pages as the rank with the least room, which has no room for one more; never more than all slots
 * fill; what holds no sequence is refused with what is wanted, what is there and the option. Storage of weights on devices is stated alike
 * by loader/stream/landing.c, which sizes go by, and by runtime/cuda/dispatch/described.c, which kernels go by. */
#include <stdlib.h>
#include <string.h>

#include "loader/stream/landing.h"
#include "runtime/cuda/dispatch/described.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/runtime/threads_fixture.h"
#include "tests/unit/unit.h"

enum { MOST = 8 };

static uint64_t seed = 3;
static uint64_t below(uint64_t n) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (seed >> 20) % n;
}

static mm_memory_facts there[MOST];  /* by rank */
static _Atomic uint32_t pages[MOST]; /* that each was opened with */
static mm_ops ops;

static bool fake_memory(const mm_backend_config *c, mm_memory_facts *out, mm_err *err) {
  (void)err;
  *out = there[c->place.rank];
  return true;
}
static mm_backend *fake_open(const mm_backend_config *c, mm_err *err) {
  pages[c->place.rank] = c->limits.pages;
  mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "sized");
  return NULL;
}

typedef struct process {
  mm_process_group process_group;
  const mm_shards *shards;
  pthread_t thread;
  mm_err err;
} process;
static void *follow(void *arg) {
  process *p = arg;
  const mm_engine_config c = {.ops = &ops, .options.threads = 1, .process_group = &p->process_group};
  if (mm_engine_follow(p->shards, &c, &p->err) && p->err.status == MM_OK) mm_fail(&p->err, MM_OK, "", mm_at(NULL, NULL), "ended");
  return NULL;
}

/* Bytes of one page on a rank, and of its states, from the model alone. */
static uint64_t page_of(const mm_model *m, uint32_t tp, uint32_t first, uint32_t end, int type, bool index_fp8, uint64_t *state) {
  uint64_t page = 0;
  *state = 0;
  const uint64_t kv = m->kv_heads / tp ? m->kv_heads / tp : 1, d = m->head_dim;
  for (uint32_t l = first; l < end; l++) {
    if (m->attn[l] == MM_ATTN_LIGHTNING)
      *state += 4 * (m->heads / tp) * d * d;
    else
      page += 64 * kv * (type == 0 ? 8 * d : type == 1 ? 4 * d : 2 * (d + 4));
    if (m->attn[l] == MM_ATTN_SPARSE)
      page += 64 * (index_fp8 ? m->index_dim + 4 : m->index_dim * (ops.own_memory ? 2 : 4)); /* its index keys */
  }
  return page;
}

/* The memory that every rank may use for pages. */
typedef struct sizing {
  mm_model m;
  uint32_t tp, stage, ranks, processes;
  int type; /* of the cache: f32, bf16, fp8 */
  mm_engine_config c;
} sizing;

static sizing draw_round(void) {
  static const mm_family family[] = {MM_FAMILY_M1, MM_FAMILY_M2, MM_FAMILY_M3};
  sizing r = {.m = ref_dims(family[below(3)], below(2)), .tp = 1u << below(3), .type = (int)below(3)};
  r.stage = below(2) ? 1 + (uint32_t)below(r.m.layers - 1) : 0;
  r.ranks = r.tp * (r.stage ? 2 : 1);
  do r.processes = 1u << below(3);
  while (r.ranks % r.processes);
  ops = mm_ops_cpu, ops.open = fake_open, ops.memory = fake_memory, ops.own_memory = r.type == 2 || below(2), ops.across = true;
  if (ops.own_memory && r.type == 0) r.type = 1;
  r.c = (mm_engine_config){
      .ops = &ops,
      .limits = {.max_tokens = 1 + (uint32_t)below(64), .slots = 1 + (uint32_t)below(20), .max_positions = 64 + (uint32_t)below(4000)},
      .options.threads = 1,
      .options.kv_fp8 = r.type == 2,
      .options.kv_bf16 = r.type == 1,
      .options.index_fp8 = r.m.index_heads && below(2),
      .memory = {.fits = true, .share = below(2) ? 0.3 + 0.1 * (double)below(7) : 0, .length = "--max-model-len"}};
  return r;
}

/* Room for about so many pages on each rank; some share a device. */
static void draw_memory(const sizing *r, uint64_t about) {
  for (uint32_t i = 0; i < r->ranks; i++) {
    uint64_t state;
    const uint64_t page = page_of(&r->m, r->tp, 0, r->m.layers, r->type, r->c.options.index_fp8, &state);
    const uint64_t fixed = (ops.own_memory ? UINT64_C(1600) << 20 : 0) + state * r->c.limits.slots;
    there[i].total = (fixed + page * (about / 2 + below(about + 1))) * 2 + below(1000);
    there[i].free = there[i].total - (ops.own_memory ? below(there[i].total / 4) : 0);
    there[i].device = (mm_digest){{(uint8_t)(below(3) ? i : i / 2)}};
    if (i % 2 && there[i].device.byte[0] == there[i - 1].device.byte[0]) there[i].total = there[i - 1].total;
  }
}

static uint32_t sharing(const sizing *r, uint32_t rank) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < r->ranks; i++) n += there[i].device.byte[0] == there[rank].device.byte[0];
  return n;
}

/* Memory that rank `rank` may use in all, as two numbers that differ by a few MB on GPUs: the formula's own rounding is not repeated
 * here. */
static double usable(const sizing *r, uint32_t rank) {
  const double share = r->c.memory.share > 0 ? r->c.memory.share : ops.own_memory ? 0.9 : 0.5;
  double free = (double)there[rank].free;
  for (uint32_t i = 0; i < r->ranks; i++)
    if (there[i].device.byte[0] == there[rank].device.byte[0] && (double)there[i].free < free) free = (double)there[i].free;
  const double allowed = share * (double)there[rank].total;
  return (ops.own_memory && free < allowed ? free : allowed) / sharing(r, rank);
}

static void check_round(const sizing *r, const ref_shards *shards, const mm_err *err, uint32_t *refused) {
  const uint64_t each = (r->c.limits.max_positions + 63) / 64, most = each * r->c.limits.slots;
  uint64_t least = most;
  for (uint32_t i = 0; i < r->ranks; i++) {
    mm_rank_weights w;
    mm_rank_memory need;
    mm_err none = {0};
    uint64_t state, stored = 0;
    assert_true(mm_bind(&w, &shards->s, i, &none));
    const uint64_t page = page_of(&r->m, r->tp, w.layer_first, w.layer_end, r->type, r->c.options.index_fp8, &state);
    const mm_demand d = {.gpu = ops.own_memory,
                         .step_tokens = r->c.limits.max_tokens,
                         .slots = r->c.limits.slots,
                         .positions = r->c.limits.max_positions,
                         .cache = (mm_cache_type)r->type,
                         .index_fp8 = r->c.options.index_fp8,
                         .across = r->ranks / r->processes % r->tp != 0};
    assert_true(mm_rank_memory_of(&need, &r->m, &w, &d, &none));
    assert_int_equal(need.page, page);
    assert_true(need.states >= state * r->c.limits.slots && need.states <= state * r->c.limits.slots + (4 << 20));
    for (size_t t = 0; t < shards->s.pack.tensor_count && ops.own_memory; t++)
      if (mm_pack_holds(&shards->s.pack, &shards->s.pack.tensor[t], i)) {
        const mm_packed x = mm_shards_tensor(&shards->s, i, t);
        stored += 2 * (uint64_t)x.lead * x.n * x.k; /* at least BF16, here */
      }
    assert_true(need.weights >= stored && need.weights <= 4 * stored + (60 << 20));
    const double fixed = (double)(need.weights + need.buffers + need.states) + (ops.own_memory ? (1 << 30) / sharing(r, i) + (2 << 20) : 0);
    const double capacity = usable(r, i) - fixed;
    least = capacity < 0 ? 0 : page && (double)least > capacity / (double)page ? (uint64_t)(capacity / (double)page) : least;
    mm_bind_close(&w);
  }
  if (least < each) {
    ++*refused;
    assert_string_equal(err->code, "E_MEMORY");
    assert_int_equal(err->status, MM_LIMIT);
    assert_non_null(strstr(err->text, "bytes of KV cache")), assert_non_null(strstr(err->text, "bytes free of"));
    assert_non_null(strstr(err->text, "--gpu-memory-utilization"));
  }
  for (uint32_t i = 0; i < r->ranks; i++)
    if (pages[i] != (least < each ? 0 : least))
      fail_msg("rank %u: %u pages, %llu expected: %s", i, pages[i], (unsigned long long)least, err->text);
}

TEST(random_sizes) {
  uint32_t refused = 0, capped = 0, rounds = 300;
  for (uint32_t n = 0; n < rounds; n++) {
    sizing r = draw_round();
    ref_model ref = ref_build(r.m);
    ref_shards *shards = ref_cut(&ref, r.tp);
    if (r.stage) ref_cut_stages(shards, r.stage);
    draw_memory(&r, 1 + below(3 * (r.c.limits.max_positions / 64 + 1) * r.c.limits.slots));
    process p[MOST];
    for (uint32_t i = 0; i < r.processes; i++) {
      p[i] = (process){.process_group = {i, r.processes, exchange}, .shards = &shards->s};
      if (i) assert_int_equal(pthread_create(&p[i].thread, NULL, follow, &p[i]), 0);
    }
    for (uint32_t i = 0; i < MOST; i++) pages[i] = 0;
    mm_err err = {0};
    r.c.process_group = r.processes > 1 ? &p[0].process_group : NULL;
    assert_null(mm_engine_open(&shards->s, &r.c, &err));
    for (uint32_t i = 1; i < r.processes; i++) pthread_join(p[i].thread, NULL);
    assert_null(post.first);
    check_round(&r, shards, &err, &refused);
    capped += pages[0] == (r.c.limits.max_positions + 63) / 64 * r.c.limits.slots;
    ref_uncut(shards);
    ref_free(&ref);
  }
  if (refused < rounds / 20 || capped < rounds / 20 || refused + capped > rounds * 9 / 10)
    fail_msg("%u refused, %u capped", refused, capped);
}

/* As many pages as were asked for, whatever share is allowed; refused where they are more than is free. */
TEST(given_pages) {
  const mm_model m = ref_dims(MM_FAMILY_M2, false);
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, 1);
  ops = mm_ops_cpu, ops.open = fake_open, ops.memory = fake_memory, ops.own_memory = true;
  mm_engine_config c = {.ops = &ops, .limits = {8, 2, 640, 7}, .options.threads = 1, .memory = {.fits = true, .share = 1e-9}};
  there[0] = (mm_memory_facts){UINT64_C(8) << 30, UINT64_C(6) << 30, {{0}}};
  mm_err err = {0};
  assert_null(mm_engine_open(&shards->s, &c, &err));
  assert_string_equal(err.code, "E_TEST");
  assert_int_equal(pages[0], 7);
  uint64_t state;
  c.limits.pages = (uint32_t)(there[0].free / page_of(&m, 1, 0, m.layers, 1, false, &state)) + 1;
  err = (mm_err){0}, pages[0] = 0;
  assert_null(mm_engine_open(&shards->s, &c, &err));
  assert_string_equal(err.code, "E_MEMORY");
  assert_non_null(strstr(err.text, "--kv-cache-tokens"));
  assert_int_equal(pages[0], 0);
  ref_uncut(shards);
  ref_free(&ref);
}

/* Pages of rank 0, 0 where it is refused, on two ranks of one process or of two. */
static uint32_t pages_with(const ref_shards *shards, mm_limits limits, uint32_t outs, uint32_t least, uint32_t processes) {
  mm_engine_config c = {.ops = &ops, .limits = limits, .options.threads = 1, .memory = {.fits = true, .outs = outs, .least = least}};
  process first = {.process_group = {0, 2, exchange}}, other = {.process_group = {1, 2, exchange}, .shards = &shards->s};
  mm_err err = {0};
  if (processes > 1) {
    c.process_group = &first.process_group;
    assert_int_equal(pthread_create(&other.thread, NULL, follow, &other), 0);
  }
  pages[0] = pages[1] = 0;
  assert_null(mm_engine_open(&shards->s, &c, &err));
  if (processes > 1) pthread_join(other.thread, NULL);
  assert_string_equal(err.code, pages[0] ? "E_TEST" : "E_MEMORY");
  assert_int_equal(pages[0], pages[1]);
  return pages[0];
}

/* Rows of logits that may be left out are left out where the cache does not fit otherwise or would lose more than a quarter. */
TEST(least_rows) {
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.vocab = 4000;
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, 2);
  uint32_t left_out = 0, refused = 0, kept = 0;
  ops = mm_ops_cpu, ops.open = fake_open, ops.memory = fake_memory, ops.own_memory = true, ops.across = true;
  uint64_t low = 0, high = UINT64_C(4) << 30; /* the least memory that holds a sequence lies between */
  while (high - low > 1 << 20) {
    const uint64_t middle = (low + high) / 2;
    for (uint32_t r = 0; r < 2; r++) there[r] = (mm_memory_facts){middle, middle, {{(uint8_t)r}}};
    if (pages_with(shards, (mm_limits){64, 2, 640, 0}, 2, 0, 1))
      high = middle;
    else
      low = middle;
  }
  for (uint32_t n = 0; n < 60; n++) {
    const uint64_t total = low - (1 << 20) + below(4 << 20);
    for (uint32_t r = 0; r < 2; r++) there[r] = (mm_memory_facts){total, n % 3 ? total : total * 9 / 10, {{(uint8_t)r}}};
    const mm_limits limits = {64, 2, 640, n % 3 ? 0 : 10};
    const uint32_t processes = 1 + n % 2;
    const uint32_t all = pages_with(shards, limits, 16, 0, processes), few = pages_with(shards, limits, 2, 0, processes);
    const uint32_t found = pages_with(shards, limits, 16, 2, processes);
    if (found != (4 * all >= 3 * few ? all : few)) fail_msg("round %u: %u pages, %u with all rows, %u with few", n, found, all, few);
    kept += found == all && found, left_out += found && found != all, refused += !found;
  }
  print_message("%u kept, %u left out, %u refused\n", kept, left_out, refused);
  assert_true(kept > 5 && left_out > 5 && refused > 5);
  ref_uncut(shards);
  ref_free(&ref);
}

/* Random weights of every scheme: the two descriptions are one. */
/* An engine that is open says what each rank takes of its device, the same that the size of its cache was computed from. */
TEST(use_of_devices) {
  const mm_model m = ref_dims(MM_FAMILY_M2, false);
  ref_model ref = ref_build(m);
  ref_shards *shards = ref_cut(&ref, 2);
  ops = mm_ops_cpu, ops.memory = fake_memory, ops.own_memory = true;
  mm_engine_config c = {.ops = &ops, .limits = {8, 2, 640, 7}, .options.threads = 1, .memory.fits = true};
  for (uint32_t r = 0; r < 2; r++) there[r] = (mm_memory_facts){(UINT64_C(8) + r) << 30, (UINT64_C(6) + r) << 30, {{(uint8_t)r}}};
  mm_err err = {0};
  mm_engine *e = mm_engine_open(&shards->s, &c, &err);
  assert_non_null(e);
  mm_engine_use use;
  for (uint32_t r = 0; r < 2; r++) {
    uint64_t state, stored = 0;
    assert_true(mm_engine_use_of(e, r, &use));
    assert_int_equal(use.total, there[r].total);
    assert_int_equal(use.free, there[r].free);
    assert_int_equal(use.caches, 7 * page_of(&m, 2, 0, m.layers, 1, false, &state));
    for (size_t t = 0; t < shards->s.pack.tensor_count; t++)
      if (mm_pack_holds(&shards->s.pack, &shards->s.pack.tensor[t], r)) {
        const mm_packed x = mm_shards_tensor(&shards->s, r, t);
        stored += 2 * (uint64_t)x.lead * x.n * x.k;
      }
    assert_true(use.weights >= stored && use.weights <= 4 * stored + (60 << 20) && use.buffers > 0 && use.states == 0);
  }
  assert_false(mm_engine_use_of(e, 2, &use));
  mm_engine_close(e);
  ref_uncut(shards);
  ref_free(&ref);
}

TEST(layouts_agree) {
  size_t schemes = 0, agreed = 0;
  while (mm_scheme_at(schemes)) schemes++;
  for (uint32_t n = 0; n < 5000; n++) {
    mm_packed w = {.scheme = mm_scheme_at(below(schemes)),
                   .lead = 1 + (uint32_t)below(5),
                   .n = 1 + (uint32_t)below(500),
                   .k = 8 * (1 + (uint32_t)below(90))};
    for (unsigned i = 0; i < w.scheme->plane_count; i++) w.cell[i] = w.scheme->plane[i].cell;
    if (w.scheme->code == MM_CODE_E4M3 && below(2)) w.cell[1] = (mm_cell){1u << below(3), 8u << below(4)}; /* as cuts make them */
    mm_cu_weight d;
    mm_landing_layout y;
    mm_err err = {0};
    const bool described = mm_cu_describe(&w, "w", &d, &err), laid = mm_landing_layout_of(&w, &y);
    if (described && !laid) fail_msg("%s has no layout", w.scheme->name);
    if (!described) continue;
    agreed++;
    assert_int_equal(y.bits, mm_cu_bits(d.code));
    assert_int_equal(y.pitch, d.pitch);
    assert_int_equal(y.scales, mm_cu_scales(&d));
    assert_int_equal(y.byte_scales, d.scale_kind == MM_CU_NV || d.scale_kind == MM_CU_MX);
    if (y.scales) assert_int_equal(y.scale_pitch, d.scale_pitch);
    assert_int_equal(y.global, d.scale_kind == MM_CU_NV);
  }
  assert_true(agreed > 1000);
  mm_packed narrow = {.scheme = mm_scheme_at(0), .lead = 1, .n = 8, .k = 12};
  mm_cu_weight d;
  mm_err err = {0};
  assert_false(mm_cu_describe(&narrow, "w", &d, &err));
  assert_non_null(strstr(err.text, "found 12 columns on a rank; the cuda backend expects a multiple of 8"));
}

int main(void) { return run_unit_tests(NULL, NULL); }
