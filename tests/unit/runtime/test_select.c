/* The blocks that sparse attention reads, where many have the same score and some scores are no numbers: of random sizes, positions and
 * pages, against a ranking of every block with every other; index keys in f32 and in e4m3. Then random numbers in e4m3: each key against
 * the same in f32, and the blocks against those that the stored numbers give. */
#include <math.h>

#include "runtime/cpu/cpu_backend.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

enum { LENGTH = 150, SLOTS = 2 };

typedef struct fixture {
  ref_model ref;
  ref_shards *shards;
  mm_rank_weights w;
  mm_comm *comm;
  mm_forward f;
  float key[SLOTS][LENGTH]; /* 1, 0 or -1 of a number, or none */
} fixture;

static uint32_t below(uint32_t n) { return (uint32_t)((ref_random() + 1) / 2 * (float)n); }

/* One channel behind those that RoPE turns decides: a vector of it alone has the same norm whatever its length. */
enum { CHANNEL = 5 };

static void open_fixture(fixture *x, uint32_t block, uint32_t top_k, uint32_t local, bool fp8) {
  mm_err err = {0};
  mm_model m = ref_dims(MM_FAMILY_M3, false);
  m.index_block = block, m.index_top_k = top_k, m.index_local = local;
  *x = (fixture){.ref = ref_build(m), .comm = mm_comm_open(1, &err)};
  x->shards = ref_cut(&x->ref, 1);
  assert_true(mm_bind(&x->w, &x->shards->s, 0, &err));
  const mm_backend_config c = {.model = &x->ref.m,
                               .weights = &x->w,
                               .limits = {.max_tokens = LENGTH, .slots = SLOTS, .max_positions = LENGTH},
                               .comm = x->comm,
                               .options = {.threads = 1 + below(3), .index_fp8 = fp8}};
  if (!mm_forward_open(&x->f, &mm_ops_cpu, &c, &err)) fail_msg("%s", err.text);
}

static void close_fixture(fixture *x) {
  mm_forward_close(&x->f);
  mm_bind_close(&x->w);
  mm_comm_close(x->comm);
  ref_uncut(x->shards);
  ref_free(&x->ref);
}

/* Sign of what a query and a key give: `sign` of the query, k of the key; the norm's weights are the same for all. */
static double score_of(float sign, float k) { return isnan(k) ? -INFINITY : (double)(sign * k); }

static void check_row(const fixture *x, uint32_t row, uint32_t slot, uint32_t pos, const float *sign) {
  const mm_model *m = &x->ref.m;
  const uint32_t blocks = pos / m->index_block + 1;
  for (uint32_t h = 0; h < m->kv_heads; h++) {
    double score[LENGTH + 1];
    uint32_t count, wanted = 0;
    const uint32_t *found = mm_cpu_blocks(x->f.backend, row, h, &count);
    for (uint32_t i = 0; i < blocks; i++) score[i] = blocks - 1 - i < m->index_local ? INFINITY : -INFINITY;
    for (uint32_t t = 0; t <= pos; t++) score[t / m->index_block] = fmax(score[t / m->index_block], score_of(sign[h], x->key[slot][t]));
    for (uint32_t i = 0; i < blocks; i++) {
      uint32_t before = 0;
      for (uint32_t j = 0; j < blocks; j++) before += score[j] > score[i] || (score[j] == score[i] && j < i);
      if (before >= m->index_top_k) continue;
      if (wanted >= count || found[wanted] != i) fail_msg("block %u of %u at position %u, head %u: not read", i, blocks, pos, h);
      wanted++;
    }
    assert_int_equal(count, wanted);
  }
}

/* Both slots' next tokens, a padding row between them, through the op alone. */
static void step(fixture *x, const uint32_t pos[SLOTS], const uint32_t count[SLOTS]) {
  const mm_model *m = &x->ref.m;
  mm_backend *b = x->f.backend;
  mm_err err = {0};
  int32_t id[LENGTH] = {0};
  float sign[LENGTH][2];
  const mm_span span[] = {{0, 0, count[0], pos[0]}, {-1, count[0], 1, 3}, {1, count[0] + 1, count[1], pos[1]}};
  const mm_batch batch = {.tokens = count[0] + 1 + count[1], .id = id, .span_count = 3, .span = span};
  memset(x->f.index_q.data, 0, (size_t)batch.tokens * x->f.index_q.width * sizeof(float));
  memset(x->f.index_k.data, 0, (size_t)batch.tokens * x->f.index_k.width * sizeof(float));
  for (uint32_t i = 0; i < batch.tokens; i++) {
    const uint32_t slot = i > count[0], at = slot ? pos[1] + i - count[0] - 1 : pos[0] + i;
    static const float kind[] = {1, 1, 0, 0, 0, -1, -1, NAN};
    const float key = kind[below(8)];
    if (i != count[0]) x->key[slot][at] = key;
    mm_cpu_row(x->f.index_k, i)[CHANNEL] = key * 1e10f;
    for (uint32_t h = 0; h < 2; h++) {
      sign[i][h] = below(2) ? 1 : -1;
      mm_cpu_row(x->f.index_q, i)[h * m->index_dim + CHANNEL] = sign[i][h] * 1e10f;
    }
  }
  assert_true(mm_ops_cpu.begin(b, &batch, &err));
  mm_ops_cpu.select(b, 1, x->f.index_q, x->f.index_k, &x->w.layer[1].index_q_norm, &x->w.layer[1].index_k_norm);
  const float weight = (1 + x->ref.layer[1].index_q_norm[CHANNEL]) * (1 + x->ref.layer[1].index_k_norm[CHANNEL]);
  assert_true(weight > 0);
  for (uint32_t i = 0; i < count[0]; i++) check_row(x, i, 0, pos[0] + i, sign[i]);
  for (uint32_t i = 0; i < count[1]; i++) check_row(x, count[0] + 1 + i, 1, pos[1] + i, sign[count[0] + 1 + i]);
}

TEST(equal_scores) {
  for (uint32_t round = 0; round < 40; round++) {
    fixture x;
    const uint32_t top_k = 1 + below(8), block = 1 + below(round % 2 ? 5 : 70);
    open_fixture(&x, block, top_k, 1 + below(top_k), below(2));
    uint32_t pos[SLOTS] = {0};
    for (;;) {
      uint32_t count[SLOTS];
      for (uint32_t s = 0; s < SLOTS; s++) count[s] = (uint32_t)mm_min(1 + below(below(2) ? 60 : 3), LENGTH - pos[s]);
      if (!count[0] || !count[1]) break;
      step(&x, pos, count);
      for (uint32_t s = 0; s < SLOTS; s++) pos[s] += count[s];
    }
    close_fixture(&x);
  }
}

/* The value of a code from its bits: 1, 4 and 3 of sign, exponent and mantissa. */
static double value_of(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  return (code & 0x80 ? -1 : 1) * (exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9));
}

/* q·k of every key up to pos, from the stored bytes; the blocks that hold the largest ones are chosen. */
static void check_stored(const fixture *x, const float *q, uint32_t pos) {
  const mm_model *m = &x->ref.m;
  const mm_backend *b = x->f.backend;
  double score[LENGTH + 1], least = INFINITY, other = -INFINITY;
  bool chosen[LENGTH + 1] = {0};
  uint32_t count;
  const uint32_t blocks = pos / m->index_block + 1, *found = mm_cpu_blocks(b, pos, 0, &count);
  for (uint32_t i = 0; i < count; i++) chosen[found[i]] = true;
  for (uint32_t i = 0; i < blocks; i++) score[i] = blocks - 1 - i < m->index_local ? INFINITY : -INFINITY;
  for (uint32_t t = 0; t <= pos; t++) {
    const char *key = mm_cpu_index_key(b, &b->cache[1], t / MM_PAGE, t % MM_PAGE);
    float scale;
    double sum = 0;
    memcpy(&scale, key, sizeof scale);
    for (uint32_t c = 0; c < m->index_dim; c++) sum += (double)q[c] * value_of((uint8_t)key[sizeof scale + c]) * (double)scale;
    score[t / m->index_block] = fmax(score[t / m->index_block], sum);
  }
  for (uint32_t i = 0; i < blocks; i++) {
    if (chosen[i]) least = fmin(least, score[i]);
    if (!chosen[i]) other = fmax(other, score[i]);
  }
  assert_int_equal(count, mm_min(m->index_top_k, blocks));
  if (!(least >= other - 1e-5)) fail_msg("position %u: a block of %g is read, one of %g is not", pos, least, other);
}

/* The largest number of a key has the largest code, exactly; each other is the nearest: half a step away at most. */
static void check_key(const mm_model *m, const char *key, const float *exact) {
  float scale, top = 0;
  memcpy(&scale, key, sizeof scale);
  for (uint32_t c = 0; c < m->index_dim; c++) top = fmaxf(top, fabsf(exact[c]));
  assert_true(fabsf(scale * 448 - top) <= 1e-6f * top);
  for (uint32_t c = 0; c < m->index_dim; c++) {
    const double over = (double)exact[c] / (double)scale, step = ldexp(1, (int)fmax(floor(log2(fabs(over))), -6) - 3);
    assert_true(fabs(over - value_of((uint8_t)key[sizeof scale + c])) <= step / 2 * 1.0001);
  }
}

TEST(e4m3_keys) {
  fixture x, exact;
  mm_err err = {0};
  open_fixture(&x, 9, 4, 1, true);
  open_fixture(&exact, 9, 4, 1, false);
  static int32_t id[LENGTH];
  const mm_span span = {0, 0, LENGTH, 0};
  const mm_batch batch = {.tokens = LENGTH, .id = id, .span_count = 1, .span = &span};
  const size_t n = x.ref.m.index_dim;
  float *const q = x.f.index_q.data, *const k = x.f.index_k.data;
  for (size_t i = 0; i < LENGTH * x.f.index_q.width; i++) ((float *)exact.f.index_q.data)[i] = q[i] = ref_random();
  for (size_t i = 0; i < LENGTH * n; i++) ((float *)exact.f.index_k.data)[i] = k[i] = ref_random();
  for (uint32_t i = 0; i < 2; i++) { /* with the weights of the first: a key follows from them */
    const fixture *f = i ? &exact : &x;
    assert_true(mm_ops_cpu.begin(f->f.backend, &batch, &err));
    mm_ops_cpu.select(f->f.backend, 1, f->f.index_q, f->f.index_k, &x.w.layer[1].index_q_norm, &x.w.layer[1].index_k_norm);
  }
  for (uint32_t t = 0; t < LENGTH; t++) {
    const mm_cpu_cache *c = &x.f.backend->cache[1];
    check_key(&x.ref.m, mm_cpu_index_key(x.f.backend, c, t / MM_PAGE, t % MM_PAGE),
              (const float *)(const void *)mm_cpu_index_key(exact.f.backend, &exact.f.backend->cache[1], t / MM_PAGE, t % MM_PAGE));
    check_stored(&x, mm_cpu_row(x.f.index_q, t), t);
  }
  close_fixture(&x), close_fixture(&exact);
}

int main(void) { return run_unit_tests(NULL, NULL); }
