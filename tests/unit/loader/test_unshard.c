/* Source matrices out of the shards of several ranks: every one is found by its name and is, to the bit, what was cut; rows from any row
 * on, through cells and through the scheme's unpack; ranks that are not open. */

#include "loader/unshard.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

/* The matrix that was cut into piece p of tensor `name`: one matrix after the other where it is a stack. */
static const float *cut_from(const ref_model *r, const char *name, unsigned p) {
  if (strcmp(name, "model.embed_tokens.weight") == 0) return r->embed;
  if (strcmp(name, "lm_head.weight") == 0) return r->head;
  if (strcmp(name, "model.norm.weight") == 0) return r->norm;
  uint32_t l = 0;
  char end[64];
  assert_int_equal(sscanf(name, "model.layers.%u.%63s", &l, end), 2);
  const ref_layer *w = &r->layer[l];
  const struct {
    const char *end;
    const float *w[3];
  } all[] = {{"input_layernorm.weight", {w->input_norm}},
             {"post_attention_layernorm.weight", {w->post_norm}},
             {"self_attn.qkv_proj.weight", {w->qkv ? w->qkv : w->q, w->k, w->v}},
             {"self_attn.output_gate.weight", {w->gate}},
             {"self_attn.norm.weight", {w->attn_norm}},
             {"self_attn.out_proj.weight", {w->o}},
             {"self_attn.o_proj.weight", {w->o}},
             {"self_attn.q_norm.weight", {w->q_norm}},
             {"self_attn.k_norm.weight", {w->k_norm}},
             {"block_sparse_moe.gate.weight", {w->router}},
             {"block_sparse_moe.e_score_correction_bias", {w->bias}},
             {"block_sparse_moe.experts.w13_weight", {w->w1, w->w3}},
             {"block_sparse_moe.experts.w2_weight", {w->w2}},
             {"self_attn.index_q_proj.weight", {w->index_q}},
             {"self_attn.index_k_proj.weight", {w->index_k}},
             {"self_attn.index_q_norm.weight", {w->index_q_norm}},
             {"self_attn.index_k_norm.weight", {w->index_k_norm}},
             {"mlp.gate_up_proj.weight", {w->mlp_gate, w->mlp_up}},
             {"mlp.down_proj.weight", {w->mlp_down}},
             {"block_sparse_moe.shared_experts.gate_up_proj.weight", {w->mlp_gate, w->mlp_up}},
             {"block_sparse_moe.shared_experts.down_proj.weight", {w->mlp_down}}};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (strcmp(all[i].end, end) == 0) return all[i].w[p];
  fail_msg("no tensor %s", name);
  return NULL;
}

static uint32_t below(uint32_t n) { return (uint32_t)((ref_random() + 1) / 2 * (float)n); }

/* Some rows from some row on, by both readers. */
static void assert_rows(const mm_whole *w, const float *want) {
  const uint32_t rows = mm_whole_rows(w), cols = mm_whole_cols(w);
  float *out = calloc((size_t)rows * cols + 1, sizeof *out);
  for (int i = 0; i < 6; i++) {
    const uint32_t first = i == 0 ? 0 : below(rows), count = i == 0 ? rows : i == 1 ? rows - first : 1 + below(rows - first);
    for (int how = 0; how < 2; how++) {
      mm_err err = {0};
      const size_t n = (size_t)count * cols;
      memset(out, 0, n * sizeof *out);
      out[n] = -7;
      if (!(how ? mm_whole_unpack(w, first, count, out, &err) : mm_whole_cells(w, 0, first, count, out, NULL, NULL, &err)))
        fail_msg("%s", err.text);
      assert_memory_equal(out, want + (size_t)first * cols, n * sizeof *out);
      assert_true(out[n] == -7);
    }
  }
  free(out);
}

TEST(every_matrix) {
  static const uint32_t tps[] = {1, 2, 4, 8};
  static const mm_family family[] = {MM_FAMILY_M1, MM_FAMILY_M2, MM_FAMILY_M3};
  for (int k = 0; k < 12; k++) {
    ref_model ref = ref_build(ref_dims(family[k % 3], false));
    ref_shards *shards = ref_cut(&ref, tps[k / 3]);
    mm_pack *p = &shards->s.pack;
    static char source[256][MM_PACK_PIECES][48];
    for (size_t i = 0; i < p->tensor_count; i++)
      for (unsigned j = 0; j < p->tensor[i].piece_count; j++) {
        snprintf(source[i][j], sizeof source[i][j], p->tensor[i].lead ? "t%zu.{e}.p%u" : "t%zu.p%u", i, j);
        p->tensor[i].piece[j].source = source[i][j];
      }
    for (size_t i = 0; i < p->tensor_count; i++)
      for (unsigned j = 0; j < p->tensor[i].piece_count; j++)
        for (uint32_t e = 0; e < mm_max(p->tensor[i].lead, 1); e++) {
          const mm_pack_tensor *t = &p->tensor[i];
          char name[64], back[64];
          snprintf(name, sizeof name, "t%zu.p%u", i, j);
          if (t->lead) snprintf(name, sizeof name, "t%zu.%u.p%u", i, e, j);
          mm_whole w;
          assert_true(mm_whole_find(&shards->s, name, &w));
          assert_ptr_equal(w.s, &shards->s);
          assert_true(w.tensor == i && w.piece == j && w.expert == e);
          assert_string_equal(mm_whole_name(&w, back, sizeof back), name);
          assert_int_equal(mm_whole_rows(&w), t->piece[j].rows);
          assert_int_equal(mm_whole_cols(&w), t->whole_cols);
          assert_rows(&w, cut_from(&ref, t->name, j) + (size_t)e * t->piece[j].rows * t->whole_cols);
        }
    ref_uncut(shards);
    ref_free(&ref);
  }
}

/* Names that are almost one. */
TEST(no_such_name) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2);
  mm_pack *p = &shards->s.pack;
  for (size_t i = 0; i < p->tensor_count; i++)
    if (p->tensor[i].lead) p->tensor[i].piece[0].source = "m.{e}.w1";
  static const char *const not [] = {"m.5.w1", "m.05.w1",  "m.00.w1",         "m..w1",   "m.w1", "m.-1.w1", "m.0.w",  "m.0.w11",
                                     "n.0.w1", "m.{e}.w1", "m.4294967296.w1", "m.0x.w1", "",     "sourc",   "source1"};
  mm_whole w;
  for (size_t i = 0; i < sizeof not / sizeof *not ; i++)
    if (mm_whole_find(&shards->s, not [i], &w)) fail_msg("found %s", not [i]);
  assert_true(mm_whole_find(&shards->s, "m.0.w1", &w) && w.expert == 0 && mm_whole_find(&shards->s, "m.4.w1", &w) && w.expert == 4);
  assert_true(mm_whole_find(&shards->s, "source", &w));
  ref_uncut(shards);
  ref_free(&ref);
}

/* The second of two ranks is not open: what the first has is read, what it has not is refused with the rank that has it. */
TEST(ranks_not_open) {
  ref_model ref = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *shards = ref_cut(&ref, 2);
  mm_shard_plane *closed = shards->s.rank[1].plane;
  shards->s.rank[1].plane = NULL;
  const mm_pack *p = &shards->s.pack;
  float *out = calloc(4096, sizeof *out);
  for (size_t i = 0; i < p->tensor_count; i++) {
    const mm_whole w = {&shards->s, i, 0, 0};
    const mm_cut *cut = &p->cut[p->tensor[i].piece[0].cut];
    const uint32_t rows = mm_whole_rows(&w), there = cut->axis == MM_AXIS_ROWS ? cut->rank[0].count : cut->axis == MM_AXIS_COLS ? 0 : rows;
    for (int how = 0; how < 2; how++)
      for (uint32_t row = 0; row < rows; row++) {
        mm_err err = {0};
        const bool ok = how ? mm_whole_unpack(&w, row, 1, out, &err) : mm_whole_cells(&w, 0, row, 1, out, NULL, NULL, &err);
        assert_int_equal(ok, row < there);
        if (ok) continue;
        assert_string_equal(err.code, "E_RANKS");
        assert_non_null(strstr(err.text, "found the files of rank 1 not open"));
      }
  }
  free(out);
  shards->s.rank[1].plane = closed;
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
