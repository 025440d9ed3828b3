/* The blocks that sparse attention reads, where many have the same score and some scores are no numbers: of random sizes, positions and
 * pages, against a ranking of every block with every other. */
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

static void open_fixture(fixture *x, uint32_t block, uint32_t top_k, uint32_t local) {
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
                               .options.threads = 1 + below(3)};
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
    open_fixture(&x, block, top_k, 1 + below(top_k));
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

int main(void) { return run_unit_tests(NULL, NULL); }
