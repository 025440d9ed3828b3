/* convert/cut: which parallel sizes fit a model, who holds what, and the scale grids of cuts, against loops over every row. */
#include <stdlib.h>
#include <string.h>

#include "convert/plan/plan.h"
#include "tests/unit/unit.h"

static uint64_t seed = 7;
static uint32_t next(uint32_t below) {
  seed = seed * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(seed >> 33) % below;
}

static mm_model model(uint32_t heads, uint32_t kv_heads, uint32_t inter, uint32_t experts, uint32_t vocab) {
  return (mm_model){.hidden = 40,
                    .layers = 3,
                    .heads = heads,
                    .kv_heads = kv_heads,
                    .head_dim = 6,
                    .experts = experts,
                    .intermediate = inter,
                    .vocab = vocab};
}

static void refused(const mm_model *m, uint32_t tp, uint32_t ep, uint32_t pp, const char *says) {
  const mm_plan_options o = {.tp = tp, .ep = ep, .pp = pp};
  mm_err err = {0};
  if (mm_cut_feasible(m, &o, "config.json", &err)) fail_msg("tp %u ep %u pp %u: taken", tp, ep, pp);
  assert_int_equal(err.status, MM_UNSUPPORTED);
  assert_string_equal(err.code, "E_TP");
  if (!strstr(err.text, says)) fail_msg("%s", err.text);
}

TEST(test_feasible) {
  const mm_model m = model(12, 4, 48, 6, 100);
  refused(&m, 5, 1, 1, "found --tp 5, but num_attention_heads 12 is not a multiple of it; expected one of 1, 2, 4, 12");
  refused(&m, 3, 1, 1, "num_key_value_heads 4 neither divides it nor is divided by it");
  refused(&m, 4, 3, 1, "found --ep 3, but --tp 4 and num_local_experts 6 are not both multiples of it");
  refused(&m, 4, 4, 1, "found --ep 4");
  refused(&m, 1, 1, 4, "found --pp 4, but there are 3 layers; expected at most that");
  const mm_model odd = model(12, 4, 30, 6, 100);
  refused(&odd, 4, 1, 1, "intermediate_size 30 is not a multiple of tp/ep 4");
  for (uint32_t tp = 1; tp <= 14; tp++)
    for (uint32_t ep = 1; ep <= 7; ep++) {
      const mm_plan_options o = {.tp = tp, .ep = ep, .pp = 3};
      const bool expected = (tp == 1 || tp == 2 || tp == 4 || tp == 12) && (ep == 1 || ep == 2 || ep == 3 || ep == 6) && tp % ep == 0;
      if (mm_cut_feasible(&m, &o, "config.json", MM_IGNORED) != expected) fail_msg("tp %u ep %u", tp, ep);
    }
}

/* Attention that is cut for fewer ranks must divide them, and the heads; the rest still follows tp. */
TEST(test_feasible_attention) {
  const mm_model m = model(12, 4, 48, 6, 100);
  static const struct {
    uint32_t tp, attn_tp;
    const char *says;
  } bad[] = {{4, 3, "found --attn-tp 3, but --tp 4 is not a multiple of it; expected a divisor"},
             {9, 3, "found --attn-tp 3, but num_key_value_heads 4 neither divides it nor is divided by it"},
             {10, 5, "found --attn-tp 5, but num_attention_heads 12 is not a multiple of it; expected one of 1, 2, 4, 12"},
             {10, 2, "intermediate_size 48 is not a multiple of tp/ep 10"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const mm_plan_options o = {.tp = bad[i].tp, .attn_tp = bad[i].attn_tp, .ep = 1, .pp = 1};
    mm_err err = {0};
    assert_false(mm_cut_feasible(&m, &o, "config.json", &err));
    if (!strstr(err.text, bad[i].says)) fail_msg("%s", err.text);
  }
  const mm_plan_options o = {.tp = 24, .attn_tp = 12, .ep = 3, .pp = 1}; /* tp itself divides no heads */
  assert_true(mm_cut_feasible(&m, &o, "config.json", MM_IGNORED));
}

/* A plan that has only what the cuts need. */
static mm_plan plan_of(mm_model m, uint32_t tp, uint32_t ep) {
  mm_plan p = {.hf = NULL};
  p.pack.model = m;
  p.pack.tp = tp;
  p.pack.ep = ep;
  p.pack.pp = 1;
  return p;
}

static void done(mm_plan *p) {
  free(p->pack.cut);
  mm_arena_close(&p->pack.arena);
}

static const mm_cut *cut(mm_plan *p, mm_divide divide, mm_dim rows, mm_dim cols, mm_align align) {
  const mm_rule r = {.divide = divide, .rows = rows, .cols = cols};
  uint32_t index;
  mm_err err = {0};
  if (!mm_cut_find(p, &r, align, &index, &err)) fail_msg("%s", err.text);
  assert_true(index < p->pack.cut_count);
  return &p->pack.cut[index];
}

static void has(const mm_cut *c, mm_axis axis, uint32_t whole, uint32_t local, uint32_t tp, const uint32_t (*range)[3]) {
  assert_int_equal(c->axis, axis);
  assert_int_equal(c->whole, whole);
  assert_int_equal(c->local, local);
  for (uint32_t r = 0; r < tp; r++) {
    assert_int_equal(c->rank[r].at, range[r][0]);
    assert_int_equal(c->rank[r].from, range[r][1]);
    assert_int_equal(c->rank[r].count, range[r][2]);
  }
}

TEST(test_ranges) {
  mm_plan p = plan_of(model(12, 2, 96, 6, 100), 4, 2);
  assert_int_equal(cut(&p, MM_WHOLE, MM_DIM_Q, MM_DIM_HIDDEN, MM_ALIGN_SPLIT)->axis, MM_AXIS_NONE);
  has(cut(&p, MM_ROWS, MM_DIM_Q, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 72, 18, 4,
      (const uint32_t[][3]){{0, 0, 18}, {0, 18, 18}, {0, 36, 18}, {0, 54, 18}});
  has(cut(&p, MM_COLS, MM_DIM_HIDDEN, MM_DIM_Q, MM_ALIGN_SPLIT), MM_AXIS_COLS, 72, 18, 4,
      (const uint32_t[][3]){{0, 0, 18}, {0, 18, 18}, {0, 36, 18}, {0, 54, 18}});
  /* Two ranks hold each of the two key/value heads. */
  has(cut(&p, MM_KV_ROWS, MM_DIM_KV, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 12, 6, 4,
      (const uint32_t[][3]){{0, 0, 6}, {0, 0, 6}, {0, 6, 6}, {0, 6, 6}});
  /* Two ranks share experts and cut them in two. */
  has(cut(&p, MM_INTER_ROWS, MM_DIM_INTER, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 96, 48, 4,
      (const uint32_t[][3]){{0, 0, 48}, {0, 48, 48}, {0, 0, 48}, {0, 48, 48}});
  has(cut(&p, MM_INTER_COLS, MM_DIM_HIDDEN, MM_DIM_INTER, MM_ALIGN_PAD), MM_AXIS_COLS, 96, 128, 4,
      (const uint32_t[][3]){{0, 0, 48}, {48, 48, 48}, {0, 0, 48}, {48, 48, 48}});
  has(cut(&p, MM_ROWS, MM_DIM_Q, MM_DIM_HIDDEN, MM_ALIGN_PAD), MM_AXIS_ROWS, 72, 18, 4, /* only experts are padded */
      (const uint32_t[][3]){{0, 0, 18}, {0, 18, 18}, {0, 36, 18}, {0, 54, 18}});
  /* 100 rows in multiples of 64 are 128: the last rank has 4 of its 32. */
  has(cut(&p, MM_VOCAB_ROWS, MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 100, 32, 4,
      (const uint32_t[][3]){{0, 0, 32}, {0, 32, 32}, {0, 64, 32}, {0, 96, 4}});
  const size_t count = p.pack.cut_count;
  cut(&p, MM_ROWS, MM_DIM_Q, MM_DIM_HIDDEN, MM_ALIGN_SPLIT); /* found again */
  assert_int_equal(p.pack.cut_count, count);
  assert_int_equal(count, 7);
  done(&p);
  /* Attention and the vocabulary cut for two ranks, and repeated; experts and MLPs for all four. */
  p = plan_of(model(12, 2, 96, 6, 100), 4, 1);
  p.pack.attn_tp = 2, p.pack.model.dense_intermediate = 8;
  has(cut(&p, MM_COLS, MM_DIM_HIDDEN, MM_DIM_Q, MM_ALIGN_SPLIT), MM_AXIS_COLS, 72, 36, 4,
      (const uint32_t[][3]){{0, 0, 36}, {0, 36, 36}, {0, 0, 36}, {0, 36, 36}});
  has(cut(&p, MM_KV_ROWS, MM_DIM_KV, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 12, 6, 4,
      (const uint32_t[][3]){{0, 0, 6}, {0, 6, 6}, {0, 0, 6}, {0, 6, 6}});
  has(cut(&p, MM_VOCAB_ROWS, MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 100, 64, 4,
      (const uint32_t[][3]){{0, 0, 64}, {0, 64, 36}, {0, 0, 64}, {0, 64, 36}});
  has(cut(&p, MM_INTER_ROWS, MM_DIM_INTER, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 96, 24, 4,
      (const uint32_t[][3]){{0, 0, 24}, {0, 24, 24}, {0, 48, 24}, {0, 72, 24}});
  has(cut(&p, MM_ROWS, MM_DIM_DENSE, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 8, 2, 4,
      (const uint32_t[][3]){{0, 0, 2}, {0, 2, 2}, {0, 4, 2}, {0, 6, 2}});
  done(&p);
  p = plan_of(model(12, 4, 96, 6, 60), 3, 1); /* the vocabulary in multiples of 192: two ranks have nothing but padding */
  has(cut(&p, MM_VOCAB_ROWS, MM_DIM_VOCAB, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 60, 64, 3,
      (const uint32_t[][3]){{0, 0, 60}, {0, 60, 0}, {0, 60, 0}});
  done(&p);
  p = plan_of(model(12, 4, 384, 6, 60), 2, 1); /* padded: 192 rows a rank lie in one and a half blocks of 128 */
  has(cut(&p, MM_INTER_ROWS, MM_DIM_INTER, MM_DIM_HIDDEN, MM_ALIGN_PAD), MM_AXIS_ROWS, 384, 256, 2,
      (const uint32_t[][3]){{0, 0, 192}, {64, 192, 192}});
  has(cut(&p, MM_KV_ROWS, MM_DIM_KV, MM_DIM_HIDDEN, MM_ALIGN_SPLIT), MM_AXIS_ROWS, 24, 12, 2,
      (const uint32_t[][3]){{0, 0, 12}, {0, 12, 12}});
  done(&p);
}

TEST(test_equal) {
  mm_range x[2] = {{0, 0, 3}, {0, 3, 3}}, y[2] = {{0, 0, 3}, {0, 3, 3}};
  mm_cut a = {.axis = MM_AXIS_ROWS, .whole = 6, .local = 3, .rank = x}, b = a;
  b.rank = y;
  assert_true(mm_cut_equal(&a, &b, 2));
  y[1].from = 2;
  assert_false(mm_cut_equal(&a, &b, 2));
  assert_true(mm_cut_equal(&a, &b, 1));
  y[1].from = 3;
  b.axis = MM_AXIS_COLS;
  assert_false(mm_cut_equal(&a, &b, 2));
  b = (mm_cut){.axis = MM_AXIS_ROWS, .whole = 7, .local = 3, .rank = y};
  assert_false(mm_cut_equal(&a, &b, 2));
  b = (mm_cut){.axis = MM_AXIS_ROWS, .whole = 6, .local = 4, .rank = y};
  assert_false(mm_cut_equal(&a, &b, 2));
  a = b = (mm_cut){.axis = MM_AXIS_NONE};
  assert_true(mm_cut_equal(&a, &b, 2));
}

/* True if a grid of `d` serves: rows that share a stored cell share one of the whole matrix, wherever a rank's rows lie; codes fill theirs.
 */
static bool serves(const mm_cut *c, uint32_t tp, uint32_t base, uint32_t d, bool codes) {
  if (base % d != 0) return false;
  for (uint32_t r = 0; r < tp; r++) {
    const mm_range *x = &c->rank[r];
    if (x->count == 0) continue;
    if ((base + x->at) % d != x->from % d) return false;
    if (codes && (x->from % d != 0 || x->count % d != 0)) return false;
  }
  return true;
}

static uint32_t finest(const mm_cut *c, uint32_t tp, uint32_t base, uint32_t cell, bool codes) {
  for (uint32_t d = cell; d > 1; d--)
    if (cell % d == 0 && serves(c, tp, base, d, codes)) return d;
  return 1;
}

TEST(test_cells) {
  static const char *const words[] = {"block_fp8", "nvfp4", "w4a16", "mxfp4", "int8", "bf16"};
  static const mm_hf hf = {.dir = "src"};
  unsigned finer = 0, refusals = 0;
  for (int round = 0; round < 4000; round++) {
    const uint32_t tp = 1 + next(4);
    mm_range range[2][4];
    mm_cut cuts[2];
    mm_pack_tensor t = {.name = "t", .piece_count = 1 + (uint8_t)next(2)};
    mm_plan p = {.hf = &hf, .pack = {.tp = tp, .cut = cuts, .cut_count = 2}};
    mm_plan_tensor pt = {.scheme = mm_scheme_find(words[next(6)])};
    const bool cols = next(2);
    const uint32_t step = 1u << next(8);
    for (unsigned j = 0; j < 2; j++) {
      cuts[j] = (mm_cut){.axis = cols ? MM_AXIS_COLS : MM_AXIS_ROWS, .rank = range[j], .local = 2048, .whole = 8192};
      for (uint32_t r = 0; r < tp; r++) range[j][r] = (mm_range){next(3) * step, next(20) * step, next(6) * step};
      t.piece[j] = (mm_piece){.cut = j, .local_at = cols ? 0 : j * (1 + next(10)) * step};
    }
    if (pt.scheme->plane_count > 1) pt.grid = pt.scheme->plane[1].cell;
    const mm_align align = next(4) ? MM_ALIGN_SPLIT : MM_ALIGN_ERROR;
    uint32_t n[MM_MAX_PLANES] = {0}, k[MM_MAX_PLANES] = {0};
    bool ok = true;
    for (unsigned i = 0; i < pt.scheme->plane_count; i++) {
      const mm_plane *plane = &pt.scheme->plane[i];
      const mm_cell cell = i == 1 ? pt.grid : plane->cell;
      n[i] = cell.n;
      k[i] = cell.k;
      for (unsigned j = 0; j < t.piece_count; j++) {
        static const mm_cut none = {.axis = MM_AXIS_NONE};
        if (n[i] > 1) n[i] = finest(cols ? &none : &cuts[j], cols ? 0 : tp, t.piece[j].local_at, n[i], !plane->scale);
        if (k[i] > 1 && cols) k[i] = finest(&cuts[j], tp, 0, k[i], !plane->scale);
      }
      const bool changed = n[i] != cell.n || k[i] != cell.k;
      if (changed && (!plane->scale || align == MM_ALIGN_ERROR)) ok = false;
      finer += changed && ok;
    }
    mm_err err = {0};
    assert_int_equal(mm_cut_cells(&p, &pt, &t, align, &err), ok);
    if (!ok) {
      assert_string_equal(err.code, "E_TP_ALIGN");
      refusals++;
      continue;
    }
    assert_int_equal(t.plane_count, pt.scheme->plane_count);
    for (unsigned i = 0; i < t.plane_count; i++) {
      assert_int_equal(t.plane[i].cell_n, n[i]);
      assert_int_equal(t.plane[i].cell_k, k[i]);
      assert_string_equal(t.plane[i].suffix, pt.scheme->plane[i].suffix);
      assert_int_equal(t.plane[i].dtype, pt.scheme->plane[i].dtype);
    }
  }
  assert_true(finer > 200 && refusals > 200);
  mm_plan_tensor offset = {.scheme = mm_scheme_find("w4a16")};
  mm_pack_tensor t = {.name = "t", .piece_count = 1};
  mm_range padded[] = {{0, 0, 4}, {0, 4, 2}}, whole[] = {{0, 0, 4}, {0, 4, 4}};
  mm_cut cut = {MM_AXIS_COLS, 6, 4, padded};
  mm_plan p = {.hf = &hf, .pack = {.tp = 2, .cut = &cut, .cut_count = 1}};
  mm_err err = {0};
  assert_false(mm_cut_cells(&p, &offset, &t, MM_ALIGN_PAD, &err));
  mm_err none = {0};
  assert_true(mm_cut_cells(&p, &offset, &t, MM_ALIGN_SPLIT, &none));
  cut = (mm_cut){MM_AXIS_COLS, 8, 4, whole};
  assert_true(mm_cut_cells(&p, &offset, &t, MM_ALIGN_PAD, &none));
  cut = (mm_cut){MM_AXIS_ROWS, 6, 4, padded}; /* each padded row has scales of its own, which are 0 */
  assert_true(mm_cut_cells(&p, &offset, &t, MM_ALIGN_PAD, &none));
  assert_non_null(strstr(err.text, "found --tp-align pad, but a zero byte of w4a16 is not zero; expected split"));
}

int main(void) { return run_unit_tests(NULL, NULL); }
