/* Binding: every tensor of a rank finds its place, and one that is absent or has another shape is named. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "loader/bind.h"
#include "tests/unit/runtime/reference.h"

static const struct {
  mm_family family;
  uint32_t tp;
} cases[] = {{MM_FAMILY_M1, 1}, {MM_FAMILY_M1, 4}, {MM_FAMILY_M2, 2}, {MM_FAMILY_M2, 8}};

static void find(const mm_packed *p, const mm_shards *s, uint32_t rank, unsigned *seen) {
  if (!p->scheme) return;
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    mm_packed t = mm_shards_tensor(s, rank, i);
    seen[i] += t.plane[0] == p->plane[0] && t.n == p->n && t.k == p->k && t.lead == p->lead;
  }
}

static void every_tensor_once(void **state) {
  (void)state;
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    ref_model ref = ref_build(ref_dims(cases[c].family, true));
    ref_shards *shards = ref_cut(&ref, cases[c].tp);
    for (uint32_t rank = 0; rank < cases[c].tp; rank++) {
      mm_rank_weights w;
      mm_err err = {0};
      if (!mm_bind(&w, &shards->s, rank, &err)) fail_msg("%s", err.text);
      assert_int_equal(w.rank, rank);
      assert_int_equal(w.tp, cases[c].tp);
      assert_int_equal(w.vocab_first, rank * w.vocab_rows);
      assert_int_equal(w.vocab_rows, w.embed.n);
      unsigned seen[64] = {0};
      find(&w.embed, &shards->s, rank, seen);
      find(&w.head, &shards->s, rank, seen);
      find(&w.final_norm, &shards->s, rank, seen);
      for (uint32_t l = 0; l < ref.m.layers; l++) {
        const mm_layer_weights *x = &w.layer[l];
        const mm_packed *all[] = {&x->input_norm, &x->post_norm, &x->qkv,    &x->out,         &x->output_gate, &x->attn_norm,
                                  &x->q_norm,     &x->k_norm,    &x->router, &x->router_bias, &x->w13,         &x->w2};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) find(all[i], &shards->s, rank, seen);
      }
      for (size_t i = 0; i < shards->s.pack.tensor_count; i++)
        if (seen[i] != 1) fail_msg("%s was bound %u times", shards->s.pack.tensor[i].name, seen[i]);
      mm_bind_close(&w);
    }
    ref_uncut(shards);
    ref_free(&ref);
  }
}

static void refused(const ref_shards *shards, size_t i, const char *code) {
  mm_rank_weights w;
  mm_err err = {0};
  const char *name = shards->s.pack.tensor[i].name;
  if (mm_bind(&w, &shards->s, 0, &err)) fail_msg("%s: not refused", name);
  assert_int_equal(err.status, MM_INTEGRITY);
  /* The first w2 says how wide all experts must be, the embedding how long the head: what disagrees with them may be named. */
  bool pair = strstr(name, "0.block_sparse_moe.experts.w2_weight") || strstr(name, "embed_tokens");
  if (strcmp(err.code, code) != 0 || (!pair && !strstr(err.text, name))) fail_msg("%s: found %s", name, err.text);
  assert_null(w.layer);
}

static void absent_or_misshapen(void **state) {
  (void)state;
  for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
    ref_model ref = ref_build(ref_dims(cases[c].family, true));
    ref_shards *shards = ref_cut(&ref, cases[c].tp);
    for (size_t i = 0; i < shards->s.pack.tensor_count; i++) {
      mm_pack_tensor *t = &shards->s.pack.tensor[i], right = *t;
      char other[] = "another.name";
      t->name = other;
      mm_rank_weights w;
      mm_err err = {0};
      assert_false(mm_bind(&w, &shards->s, 0, &err));
      assert_string_equal(err.code, "E_MISSING");
      assert_non_null(strstr(err.text, right.name));
      *t = right;
      t->rows++;
      refused(shards, i, "E_SHAPE");
      *t = right;
      t->cols++;
      refused(shards, i, "E_SHAPE");
      *t = right;
      t->lead += 2;
      refused(shards, i, "E_SHAPE");
      *t = right;
    }
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* Fewer rows than the ids need, fewer columns than the experts need, ranks that cannot share the heads, or share
 * experts. */
static void too_small(void **state) {
  (void)state;
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2);
  mm_rank_weights w;
  mm_err err = {0};
  shards->s.pack.model.vocab = 500;
  assert_false(mm_bind(&w, &shards->s, 1, &err));
  assert_non_null(strstr(err.text, "embed_tokens"));
  shards->s.pack.model.vocab = ref.m.vocab;
  shards->s.pack.model.intermediate = 42;
  err = (mm_err){0};
  assert_false(mm_bind(&w, &shards->s, 1, &err));
  assert_non_null(strstr(err.text, "w2_weight"));
  shards->s.pack.model.intermediate = ref.m.intermediate;
  shards->s.pack.model.heads = 9;
  err = (mm_err){0};
  assert_false(mm_bind(&w, &shards->s, 1, &err));
  assert_string_equal(err.code, "E_TP");
  shards->s.pack.model.heads = ref.m.heads;
  shards->s.pack.ep = 2; /* experts of other ranks would be missed */
  err = (mm_err){0};
  assert_false(mm_bind(&w, &shards->s, 1, &err));
  assert_string_equal(err.code, "E_PARALLEL");
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(every_tensor_once), cmocka_unit_test(absent_or_misshapen),
                                     cmocka_unit_test(too_small)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
