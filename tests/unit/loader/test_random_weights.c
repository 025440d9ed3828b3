/* Random weights: shapes and cuts are those that mm_bind gives of shards, and whatever the cut, the ranks hold parts of the same model. */
#include "loader/random_weights.h"

#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

#define PACKED(y)                                                                                                            \
  {                                                                                                                          \
    &(y)->input_norm, &(y)->post_norm, &(y)->qkv, &(y)->out, &(y)->output_gate, &(y)->attn_norm, &(y)->q_norm, &(y)->k_norm, \
        &(y)->index_q, &(y)->index_k, &(y)->index_q_norm, &(y)->index_k_norm, &(y)->mlp_up, &(y)->mlp_down, &(y)->router,    \
        &(y)->router_bias, &(y)->w13, &(y)->w2                                                                               \
  }
enum { PACKED_COUNT = 18 };

static mm_random_model random_model(const char *linear, const char *experts, uint32_t tp, uint32_t ep, uint32_t pp) {
  return (mm_random_model){mm_scheme_find(linear), mm_scheme_find(experts), mm_scheme_find("bf16"), tp, ep, pp, 0.5f, 0};
}

static mm_rank_weights made(const mm_random_model *r, const mm_model *m, uint32_t rank) {
  mm_rank_weights w;
  mm_err err = {0};
  if (!mm_random_weights(r, m, rank, &w, &err) || !mm_random_fill(&w, &err)) fail_msg("%s", err.text);
  return w;
}

TEST(shapes_of_shards) {
  for (uint32_t c = 0; c < 3 * 4; c++) {
    const uint32_t tp = 1u << c % 4;
    ref_model ref = ref_build(ref_dims((mm_family)(c / 4), false));
    ref_shards *shards = ref_cut(&ref, tp);
    const mm_random_model r = random_model("f32", "f32", tp, 1, 1);
    for (uint32_t rank = 0; rank < tp; rank++) {
      mm_rank_weights bound, w = made(&r, &ref.m, rank);
      mm_err err = {0};
      assert_true(mm_bind(&bound, &shards->s, rank, &err));
      assert_true(bound.expert_first == w.expert_first && bound.layer_end == w.layer_end && bound.rank == w.rank && bound.tp == w.tp);
      for (uint32_t l = 0; l < ref.m.layers; l++) {
        const mm_packed *const a[] = PACKED(&bound.layer[l]), *const b[] = PACKED(&w.layer[l]);
        for (size_t i = 0; i < PACKED_COUNT; i++) {
          assert_int_equal(a[i]->scheme != NULL, b[i]->scheme != NULL);
          if (a[i]->n != b[i]->n || a[i]->k != b[i]->k || a[i]->lead != b[i]->lead || a[i]->first_k != b[i]->first_k ||
              a[i]->whole_k != b[i]->whole_k)
            fail_msg("family %u, tp %u, layer %u, weight %zu: [%u, %u] of %u, expected [%u, %u]", c / 4, tp, l, i, b[i]->n, b[i]->k,
                     b[i]->whole_k, a[i]->n, a[i]->k);
        }
      }
      mm_bind_close(&bound), mm_bind_close(&w);
    }
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* Wide enough for blocks of every scheme, and cut inside them. */
static mm_model wide(mm_family family) {
  mm_model m = ref_dims(family, false);
  m.hidden = 96, m.head_dim = 16, m.rotary_dim = 8, m.experts = 4, m.top_k = 2, m.intermediate = 192, m.vocab = 70, m.layers = 3;
  if (family == MM_FAMILY_M3) m.index_dim = 16, m.dense_intermediate = 64, m.shared_intermediate = 128;
  return m;
}

/* Row `row` of a weight, as f32. */
static const float *row_of(const mm_packed *w, uint32_t lead, uint32_t row) {
  static float out[2][1024];
  static unsigned at;
  mm_unpack(w, lead, row, 1, out[at ^= 1]);
  return out[at];
}

/* Rows [from, from + count) of `whole` are rows [at, …) of the part, in its columns; of matrix `lead` of the part, which is first + lead.
 */
static void same_rows(const mm_packed *whole, const mm_packed *part, uint32_t first, uint32_t from, uint32_t at, uint32_t count) {
  for (uint32_t e = 0; e < part->lead; e++) {
    for (uint32_t i = 0; i < count; i++) {
      const float *a = row_of(whole, first + e, from + i) + part->first_k, *b = row_of(part, e, at + i);
      if (memcmp(a, b, part->k * sizeof *a) != 0) fail_msg("%s: matrix %u, row %u differs", part->scheme->name, first + e, from + i);
    }
  }
}
/* Each of `pieces` equal ranges of rows is cut alike. */
static void same_part(const mm_packed *whole, const mm_packed *part, uint32_t pieces, uint32_t ways, uint32_t number, uint32_t first) {
  const uint32_t each = whole->n / pieces, cut = each / ways;
  assert_int_equal(part->n, pieces * cut);
  for (uint32_t p = 0; p < pieces; p++) same_rows(whole, part, first, p * each + number * cut, p * cut, cut);
}

static void same_layer(const mm_model *m, const mm_layer_weights *a, const mm_layer_weights *b, const mm_random_model *r, uint32_t rank) {
  const uint32_t q = m->heads * m->head_dim, kv = m->kv_heads * m->head_dim, ways = r->tp / r->ep, held = m->experts / r->ep;
  const uint32_t first = rank / ways * held, own = kv / r->tp > m->head_dim ? kv / r->tp : m->head_dim, head = rank * m->kv_heads / r->tp;
  if (a->output_gate.scheme) {
    same_part(&a->qkv, &b->qkv, 1, r->tp, rank, 0), same_part(&a->output_gate, &b->output_gate, 1, r->tp, rank, 0);
    same_part(&a->attn_norm, &b->attn_norm, 1, r->tp, rank, 0);
  } else {
    same_rows(&a->qkv, &b->qkv, 0, rank * q / r->tp, 0, q / r->tp);
    for (uint32_t i = 0; i < 2; i++) same_rows(&a->qkv, &b->qkv, 0, q + i * kv + head * m->head_dim, q / r->tp + i * own, own);
  }
  same_part(&a->out, &b->out, 1, 1, 0, 0);
  if (a->index_q.scheme) same_part(&a->index_k, &b->index_k, 1, 1, 0, 0), same_part(&a->index_k_norm, &b->index_k_norm, 1, 1, 0, 0);
  if (a->mlp_up.scheme) same_part(&a->mlp_up, &b->mlp_up, 2, r->tp, rank, 0), same_part(&a->mlp_down, &b->mlp_down, 1, 1, 0, 0);
  same_part(&a->post_norm, &b->post_norm, 1, 1, 0, 0);
  if (!a->router.scheme) return;
  same_part(&a->router, &b->router, 1, 1, 0, 0);
  same_part(&a->w13, &b->w13, 2, ways, rank % ways, first), same_part(&a->w2, &b->w2, 1, 1, 0, first);
}

TEST(same_model_however_cut) {
  static const uint32_t cuts[][3] = {{2, 1, 1}, {4, 2, 1}, {8, 1, 3}, {2, 2, 2}};
  for (size_t s = 0; mm_scheme_at(s); s++) {
    const mm_model m = wide((mm_family)(s % 3));
    const mm_random_model one = random_model(mm_scheme_at(s)->name, mm_scheme_at((s + 5) % 14)->name, 1, 1, 1);
    mm_rank_weights whole = made(&one, &m, 0);
    const uint32_t *const c = cuts[s % 4];
    const mm_random_model r = {one.linear, one.experts, one.head, c[0], c[1], c[2], one.skew, 0};
    for (uint32_t rank = 0; rank < r.tp * r.pp; rank++) {
      mm_rank_weights w = made(&r, &m, rank);
      for (uint32_t l = w.layer_first; l < w.layer_end; l++) same_layer(&m, &whole.layer[l], &w.layer[l], &r, rank % r.tp);
      const uint32_t rows = whole.head.n - w.vocab_first < w.vocab_rows ? whole.head.n - w.vocab_first : w.vocab_rows;
      if (w.head.scheme) same_rows(&whole.head, &w.head, 0, w.vocab_first, 0, rows);
      mm_bind_close(&w);
    }
    mm_bind_close(&whole);
  }
}

/* Of variance about 1/k in every scheme, whatever k is; routers' rows differ in size under skew alone. */
TEST(size_of_numbers) {
  for (size_t s = 0; mm_scheme_at(s); s++) {
    const mm_random_model r = random_model(mm_scheme_at(s)->name, mm_scheme_at(s)->name, 1, 1, 1);
    const mm_model m = wide(MM_FAMILY_M2);
    mm_rank_weights w = made(&r, &m, 0);
    const mm_packed *const all[] = {&w.layer[1].qkv, &w.layer[1].w2, &w.layer[1].w13};
    for (size_t i = 0; i < 3; i++) {
      double sum = 0, square = 0;
      for (uint32_t row = 0; row < all[i]->n; row++)
        for (uint32_t k = 0; k < all[i]->k; k++) {
          const double x = row_of(all[i], 0, row)[k];
          assert_true(isfinite(x));
          sum += x, square += x * x;
        }
      const double n = (double)all[i]->n * all[i]->k, variance = square / n * all[i]->k;
      if (variance < 0.45 || variance > 2.2 || fabs(sum / n) > 4 * sqrt(square) / n)
        fail_msg("%s: variance %g of 1/k, mean %g", all[i]->scheme->name, variance, sum / n);
    }
    mm_bind_close(&w);
  }
}

/* More than there is memory, and more than 64 bits count. */
TEST(too_large) {
  for (int i = 0; i < 2; i++) {
    mm_model m = wide(MM_FAMILY_M2);
    m.hidden = i ? 1u << 30 : 1u << 20, m.intermediate = i ? 1u << 29 : 1u << 20, m.experts = 1024;
    const mm_random_model r = random_model("f32", "f32", 1, 1, 1);
    mm_rank_weights w;
    mm_err err = {0};
    assert_true(mm_random_weights(&r, &m, 0, &w, &err));
    assert_false(mm_random_fill(&w, &err));
    assert_int_equal(err.status, MM_LIMIT);
    mm_bind_close(&w);
  }
}

TEST(refused) {
  static const struct {
    const char *scheme;
    uint32_t tp, ep, pp;
  } cases[] = {{"bf16", 3, 1, 1}, {"bf16", 4, 3, 1}, {"bf16", 8, 8, 1}, {"bf16", 1, 1, 5}, {"w4a16", 8, 1, 1}};
  const mm_model m = ref_dims(MM_FAMILY_M2, false); /* 5 experts of 40: a rank of 8 has 5 columns, 2.5 bytes */
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const mm_random_model r = random_model(cases[i].scheme, cases[i].scheme, cases[i].tp, cases[i].ep, cases[i].pp);
    mm_err err = {0};
    assert_false(mm_random_check(&r, &m, &err));
    assert_string_equal(err.code, "E_TP");
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
