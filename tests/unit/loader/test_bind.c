/* Binding: every tensor of a rank finds its place, and one that is absent or has another shape is named. */

#include "loader/bind.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

static const struct {
  mm_family family;
  uint32_t tp;
} cases[] = {{MM_FAMILY_M1, 1}, {MM_FAMILY_M1, 4}, {MM_FAMILY_M2, 2}, {MM_FAMILY_M2, 8}, {MM_FAMILY_M3, 1}, {MM_FAMILY_M3, 8}};

static void find(const mm_packed *p, const mm_shards *s, uint32_t rank, unsigned *seen) {
  if (!p->scheme) return;
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    mm_packed t = mm_shards_tensor(s, rank, i);
    seen[i] += t.plane[0] == p->plane[0] && t.n == p->n && t.k == p->k && t.lead == p->lead;
  }
}

TEST(every_tensor_once) {
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
        const mm_packed *all[] = {&x->input_norm, &x->post_norm, &x->qkv,          &x->out,          &x->output_gate, &x->attn_norm,
                                  &x->q_norm,     &x->k_norm,    &x->router,       &x->router_bias,  &x->w13,         &x->w2,
                                  &x->index_q,    &x->index_k,   &x->index_q_norm, &x->index_k_norm, &x->mlp_up,      &x->mlp_down};
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
  bool pair = strstr(name, shards->s.pack.model.ffn[0] ? "1.block_sparse_moe.experts.w2_weight" : "0.block_sparse_moe.experts.w2_weight") ||
              strstr(name, "embed_tokens");
  if (strcmp(err.code, code) != 0 || (!pair && !strstr(err.text, name))) fail_msg("%s: found %s", name, err.text);
  assert_null(w.layer);
}

TEST(absent_or_misshapen) {
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
TEST(too_small) {
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
  shards->s.pack.model.experts = 4;
  err = (mm_err){0};
  assert_false(mm_bind(&w, &shards->s, 1, &err));
  assert_string_equal(err.code, "E_SHAPE");
  ref_uncut(shards);
  ref_free(&ref);
}

static void not_bound(const ref_shards *shards, const char *code, const char *says) {
  for (uint32_t rank = 0; rank < shards->s.pack.tp; rank++) {
    mm_rank_weights w;
    mm_err err = {0}, all = {0};
    bool bound = mm_bind(&w, &shards->s, rank, &err);
    if (bound) mm_bind_close(&w);
    if (bound && rank + 1 < shards->s.pack.tp) continue; /* of another rank */
    if (bound) fail_msg("not refused: expected %s", says);
    assert_int_equal(err.status, MM_INTEGRITY);
    if (strcmp(err.code, code) != 0 || !strstr(err.text, says)) fail_msg("expected %s, found %s", says, err.text);
    assert_false(mm_bind_check(&shards->s, &all)); /* what is not bound is not proven */
    assert_string_equal(all.text, err.text);
    return;
  }
}

static mm_pack_tensor *tensor(const ref_shards *shards, const char *name) {
  for (size_t i = 0; i < shards->s.pack.tensor_count; i++)
    if (strstr(shards->s.pack.tensor[i].name, name)) return &shards->s.pack.tensor[i];
  fail_msg("no %s", name);
  return NULL;
}

/* Experts wider than the model says, for which a buffer of the model's width is too small. */
TEST(experts_wider_than_the_model) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  for (uint32_t tp = 1; tp <= 2; tp++) {
    ref_shards *shards = ref_cut(&ref, tp);
    shards->s.pack.model.intermediate = tp;
    not_bound(shards, "E_SHAPE", "w2_weight");
    ref_uncut(shards);
  }
  ref_free(&ref);
}

/* Ranges of a cut that no rank has: more padding in front than columns before, another rank's, one column short, one beyond. */
TEST(ranges_of_another_rank) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2);
  static const char *const names[] = {"embed_tokens",
                                      "0.self_attn.qkv_proj",
                                      "1.self_attn.o_proj",
                                      "0.block_sparse_moe.experts.w13",
                                      "1.block_sparse_moe.experts.w2",
                                      "q_norm",
                                      "k_norm",
                                      "lm_head"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    mm_pack_tensor *t = tensor(shards, names[i]);
    for (unsigned p = 0; p < t->piece_count; p++)
      for (uint32_t r = 0; r < 2; r++) {
        mm_cut *c = &shards->s.pack.cut[t->piece[p].cut];
        mm_range *x = &c->rank[r], right = *x;
        *x = (mm_range){1, 0, right.count - 1};
        not_bound(shards, "E_SHAPE", names[i]);
        *x = c->rank[1 - r];
        if (memcmp(x, &right, sizeof right) != 0) not_bound(shards, "E_SHAPE", names[i]);
        *x = (mm_range){right.at, right.from, right.count - 1};
        not_bound(shards, "E_SHAPE", names[i]);
        *x = right;
        c->local++;
        not_bound(shards, "E_SHAPE", names[i]);
        c->local--;
      }
  }
  mm_err err = {0};
  assert_true(mm_bind_check(&shards->s, &err));
  ref_uncut(shards);
  ref_free(&ref);
}

/* A calibration has no room for a vector; a piece more or less is another matrix of the same extents. */
TEST(vectors_and_pieces) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M1, true));
  ref_shards *shards = ref_cut(&ref, 1);
  for (size_t i = 0; i < shards->s.pack.tensor_count; i++) {
    mm_pack_tensor *t = &shards->s.pack.tensor[i], right = *t;
    t->vector = !t->vector;
    not_bound(shards, "E_SHAPE", t->vector ? "found a vector, expected a matrix" : "found a matrix, expected a vector");
    *t = right;
    t->piece_count = t->piece_count % 3 + 1;
    not_bound(shards, "E_SHAPE", right.name);
    *t = right;
    t->piece[0].rows++;
    not_bound(shards, "E_SHAPE", right.name);
    *t = right;
  }
  ref_uncut(shards);
  ref_free(&ref);
}

static void to_stage(const ref_shards *shards, const char *part, uint32_t stage) {
  for (size_t i = 0; i < shards->s.pack.tensor_count; i++)
    if (strstr(shards->s.pack.tensor[i].name, part)) shards->s.pack.tensor[i].stage = stage;
}

/* A rank binds the layers of its stage, and what stands before the first or after the last; a layer on two stages, or behind a later one,
 * a stage without layers and ends in the wrong place are refused. */
TEST(stages) {
  static const struct {
    const char *part;
    uint32_t stage;
  } wrong[] = {{"2.self_attn.o_proj", 0}, {"layers.0.", 1}, {"layers.2.", 2}, {"embed_tokens", 1}, {"lm_head", 0}, {"model.norm", 0}};
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2);
  mm_shards s = shards->s; /* ranks 2 and 3 have the files of 0 and 1 */
  mm_shard_rank rank[] = {s.rank[0], s.rank[1], s.rank[0], s.rank[1]};
  s.rank = rank;
  s.pack.pp = 2;
  for (uint32_t l = 0; l < 2; l++) to_stage(shards, l ? "lm_head" : "model.norm", 1);
  to_stage(shards, "layers.1.", 1), to_stage(shards, "layers.2.", 1);
  for (uint32_t r = 0; r < 4; r++) {
    mm_rank_weights w;
    mm_err err = {0};
    if (!mm_bind(&w, &s, r, &err)) fail_msg("%s", err.text);
    assert_int_equal(w.rank, r % 2);
    assert_int_equal(w.layer_first, r / 2);
    assert_int_equal(w.layer_end, r / 2 ? 3 : 1);
    assert_true(r / 2 ? w.head.scheme && !w.embed.scheme && w.final_norm.scheme : w.embed.scheme && !w.head.scheme);
    for (uint32_t l = 0; l < 3; l++) assert_int_equal(w.layer[l].w2.scheme != NULL, l >= w.layer_first && l < w.layer_end);
    mm_bind_close(&w);
  }
  mm_err proven = {0};
  assert_true(mm_bind_check(&s, &proven));
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const uint32_t right = tensor(shards, wrong[i].part)->stage;
    mm_rank_weights w;
    mm_err err = {0}, all = {0};
    to_stage(shards, wrong[i].part, wrong[i].stage);
    if (i == 1) to_stage(shards, "layers.1.", 0);
    assert_false(mm_bind(&w, &s, 0, &err));
    assert_string_equal(err.code, "E_PARALLEL");
    assert_int_equal(err.status, MM_INTEGRITY);
    assert_false(mm_bind_check(&s, &all));
    to_stage(shards, wrong[i].part, right);
    to_stage(shards, "layers.1.", 1);
  }
  /* Each layer's stage; the ends stand in the first and the last one. */
  static const struct { uint32_t pp, of[3]; } uneven[] = {{2, {1, 1, 1}}, {2, {0, 0, 0}}, {3, {0, 2, 2}}, {3, {0, 0, 1}}, {3, {0, 0, 2}}};
  mm_shard_rank more[6] = {s.rank[0], s.rank[1], s.rank[0], s.rank[1], s.rank[0], s.rank[1]};
  s.rank = more;
  for (size_t i = 0; i < sizeof uneven / sizeof *uneven; i++) {
    static const char *const layer[] = {"layers.0.", "layers.1.", "layers.2."};
    mm_rank_weights w;
    mm_err err = {0}, all = {0};
    s.pack.pp = uneven[i].pp;
    to_stage(shards, "lm_head", s.pack.pp - 1), to_stage(shards, "model.norm", s.pack.pp - 1);
    for (uint32_t l = 0; l < 3; l++) to_stage(shards, layer[l], uneven[i].of[l]);
    assert_false(mm_bind_check(&s, &all));
    assert_string_equal(all.code, "E_PARALLEL");
    assert_int_equal(all.status, MM_INTEGRITY);
    for (uint32_t r = 0; r < 2 * s.pack.pp; r++) {
      err = (mm_err){0};
      assert_false(mm_bind(&w, &s, r, &err));
      assert_string_equal(err.code, "E_PARALLEL");
    }
  }
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
