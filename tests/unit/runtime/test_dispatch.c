/* The table of kernels of the CUDA backend: whatever matrices the registry of schemes makes, every step has one kernel, which can do what
 * it is given; every kernel is chosen somewhere; and the released models' products take those that are written down here. No GPU. */
#include <stdlib.h>
#include <string.h>

#include "runtime/bench/bench_shapes.h"
#include "runtime/cuda/dispatch/dispatch.h"
#include "tests/unit/unit.h"

static const mm_cu_device devices[] = {{true, 8, 227 << 10, false}, {true, 4, 227 << 10, false},  {true, 2, 227 << 10, false},
                                       {true, 0, 227 << 10, false}, {false, 0, 227 << 10, false}, {false, 0, 163 << 10, false},
                                       {false, 0, 99 << 10, false}, {false, 0, 227 << 10, true}};
static uint32_t chosen[MM_CU_KERNELS];

/* ---- what kernels can do, as their own files say it ---- */

/* gemv.cuh: rings of all warps, a token's activations, and the sums of four fours a warp. 3 KiB are left for the routing. */
static bool one_fits(const mm_cu_device *d, const mm_cu_weight *w, uint64_t segments) {
  const bool wide = d->shared >= 227 * 1024;
  const uint64_t piece = w->code == MM_CU_BF16 ? 8 : w->code == MM_CU_E4M3 ? 16 : 32, depth = !wide ? 2 : w->code == MM_CU_E4M3 ? 4 : 3;
  const uint64_t warps = wide ? 16 : w->scale_kind == MM_CU_NV ? 10 : 12;
  const uint64_t scales = w->scale_kind == MM_CU_NV ? 64 : w->scale_kind == MM_CU_COARSE ? 32 : w->scale_kind == MM_CU_MX ? piece : 0;
  const uint64_t items = segments * mm_ceil_div(w->pitch, 512), back = w->code == MM_CU_INT4 && w->scale_kind == MM_CU_COARSE ? 2 : 1;
  return warps * depth * (2048 + 4 * scales) + items * (piece * 64 + 32 * back) + 4 * warps * 4 * 32 <=
         (wide ? 227 * 1024 : 99 * 1024) - 3 * 1024;
}

/* small_batch.cuh: the rows' shares, the sums, two stages for each group. */
static bool cluster_fits(const mm_cu_device *d, const mm_cu_weight *w, uint32_t tokens, bool codes) {
  if (tokens > 64 || d->cluster < 2) return false;
  const uint64_t rows = tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64;
  const uint64_t lines = mm_ceil_div(mm_ceil_div(w->pitch, 128), d->cluster), turns = codes || rows >= 32 ? 2 : 3;
  uint64_t line = 0, scales = 0; /* bytes of rows and factors for a line, of a stage's scales */
  if (codes)
    line = rows * 132, scales = 16;
  else if (w->code == MM_CU_BF16)
    line = rows * 128;
  else
    line = rows * (w->code == MM_CU_E4M3 ? 2 * 128 + 8 : 4 * 128 + 16),
    scales = w->scale_kind == MM_CU_NV || w->scale_kind == MM_CU_MX ? 1024 : 512;
  return lines * line + (turns + 1) * (rows == 64 ? 1 : 2) * 64 * (rows + 4) * 4 + 392 + 2 * turns * (8192 + scales) <= 226 * 1024;
}

static bool whole_rows(const mm_cu_weight *w) {
  const mm_act_quant kind = w->whole.kind != MM_ACT_KEPT ? w->whole.kind : w->rounding.kind;
  return kind == MM_ACT_FP8_TOKEN || kind == MM_ACT_FP8_TENSOR;
}
static bool coded(const mm_cu_weight *w) {
  const bool of_blocks = w->cell_n_log2 >= 7 && w->cell_k_log2 >= 7, of_rows = w->cell_k_log2 >= 7 && w->scale_pitch == 1;
  return w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_COARSE && (of_blocks || of_rows) &&
         (w->rounding.kind == MM_ACT_FP8_GROUP || whole_rows(w));
}
static bool in_blocks(const mm_cu_weight *w) { return coded(w) && w->cell_n_log2 >= 7 && !whole_rows(w); }
/* Codes of w2's inputs have half of the room for two bf16 of a result. */
static bool has_capacity(const mm_cu_weight *w2) { return !whole_rows(w2) || w2->k * 33ull / 32 <= 2 * w2->n; }
static bool few_can(const mm_cu_weight *w) {
  return w->code != MM_CU_BF16 && w->scale_kind != MM_CU_FINE && w->k % 32 == 0 && w->n % 2 == 0;
}
static bool many_can(const mm_cu_weight *w) {
  return w->code != MM_CU_BF16 && w->k % 32 == 0 && w->n % 8 == 0 && (w->scale_kind != MM_CU_FINE || w->cell_k_log2 >= 6);
}

/* decode_tile.cuh: scales of sums of 128 columns, or of each 16 in f16. */
static bool whole_sums(const mm_cu_weight *w) {
  return w->code == MM_CU_BF16 || w->scale_kind == MM_CU_NV || (w->scale_kind == MM_CU_COARSE && w->cell_k_log2 >= 7);
}

/* gemm_mx.cuh: whole lines of 128 columns, of which four scales are a word. */
static bool mx_coded(const mm_cu_weight *w) {
  return w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_MX && w->rounding.kind == MM_ACT_MXFP8 && w->k % 128 == 0 &&
         w->scale_pitch % 4 == 0;
}

/* mma.sync of codes: groups that no rank cuts. */
static bool by_mma(const mm_cu_device *d, const mm_cu_weight *w) {
  return d->codes && w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_COARSE && w->cell_k_log2 >= 7 && w->k % 16 == 0 &&
         w->rounding.kind == MM_ACT_FP8_GROUP && w->whole.kind == MM_ACT_KEPT;
}

static bool can(const mm_cu_device *d, mm_cu_kernel kernel, const mm_cu_task *q) {
  const mm_cu_weight *w = q->w, *w2 = q->w2;
  switch (kernel) {
    case MM_CU_GEMM_FP8: return !w2 && d->hopper && coded(w);
    case MM_CU_GEMM_CODES: return !w2 && by_mma(d, w);
    case MM_CU_EXPERTS_CODES: return w2 && q->tokens > 1 && by_mma(d, w) && by_mma(d, w2) && w2->k % 128 == 0;
    case MM_CU_SMALL_BATCH_FP8: return !w2 && d->hopper && in_blocks(w) && cluster_fits(d, w, q->tokens, true);
    case MM_CU_ONE: return !w2 && q->tokens == 1 && one_fits(d, w, 1);
    case MM_CU_SMALL_BATCH_WIDENED: return !w2 && d->hopper && w->scale_kind != MM_CU_FINE && cluster_fits(d, w, q->tokens, false);
    case MM_CU_DECODE_DENSE: return !w2 && !d->hopper && q->tokens <= 64 && whole_sums(w);
    case MM_CU_DECODE_LINEAR: return !w2 && q->tokens <= 16;
    case MM_CU_GEMM_MX: return !w2 && d->hopper && mx_coded(w);
    case MM_CU_GEMM_WIDENED: return !w2 && d->hopper && w->code != MM_CU_BF16;
    case MM_CU_GEMM: return !w2 && (!d->hopper || w->code == MM_CU_BF16);
    case MM_CU_EXPERTS_FEW: return w2 && d->hopper && q->tokens > 1 && few_can(w) && few_can(w2);
    case MM_CU_EXPERTS_FP8: return w2 && d->hopper && q->tokens > 1 && coded(w) && coded(w2) && w->n % 256 == 0 && has_capacity(w2);
    case MM_CU_EXPERTS_ONE: return w2 && q->tokens == 1 && one_fits(d, w, 1) && one_fits(d, w2, q->top_k);
    case MM_CU_EXPERTS_DECODE: return w2 && q->tokens <= 16;
    case MM_CU_EXPERTS_MANY: return w2 && d->hopper && q->tokens > 1 && many_can(w) && many_can(w2);
    case MM_CU_EXPERTS_GEMM: return w2 && q->tokens > 1;
    case MM_CU_NO_KERNEL:
    case MM_CU_KERNELS: return false;
  }
  return false;
}

/* Kernels that read inputs of this kind: codes are what products of codes read, and no others. */
static bool reads(mm_cu_kernel kernel, mm_cu_inputs_are x) {
  const bool codes = kernel == MM_CU_GEMM_FP8 || kernel == MM_CU_SMALL_BATCH_FP8 || kernel == MM_CU_EXPERTS_FP8 ||
                     kernel == MM_CU_GEMM_CODES || kernel == MM_CU_EXPERTS_CODES;
  const bool rounds = kernel == MM_CU_ONE || kernel == MM_CU_EXPERTS_ONE || kernel == MM_CU_EXPERTS_FEW;
  if (kernel == MM_CU_GEMM_MX || x == MM_CU_AS_MX_CODES) return kernel == MM_CU_GEMM_MX && x == MM_CU_AS_MX_CODES;
  return x == MM_CU_AS_CODES || x == MM_CU_AS_ROW_CODES ? codes : x == MM_CU_ROUNDED_INSIDE ? rounds : !codes;
}

/* ---- all that there can be ---- */

/* True if inputs come as w says: under scales that other ranks have a part in always rounded before. */
static bool comes(const mm_cu_weight *w, mm_cu_inputs_are x) {
  const bool kept = w->rounding.kind == MM_ACT_KEPT;
  if (x == MM_CU_AS_MX_CODES) return w->rounding.kind == MM_ACT_MXFP8;
  if (x == MM_CU_AS_CODES || x == MM_CU_AS_ROW_CODES) return whole_rows(w) == (x == MM_CU_AS_ROW_CODES);
  return w->whole.kind == MM_ACT_KEPT ? (x == MM_CU_KEPT) == kept : kept && x == MM_CU_ROUNDED_BEFORE;
}

static void check(const mm_cu_device *d, mm_cu_task q, const char *what) {
  static const uint32_t more[] = {512, 2048, 8192};
  const uint32_t most = d->shared < 227 << 10 ? 2 : 300 + sizeof more / sizeof *more; /* shared memory decides for a single token alone */
  for (uint32_t i = 0; i <= most; i++) {                                              /* steps of no rows among them */
    if ((i > 20 && i < 62) || (i > 67 && i < 254)) continue;                          /* nothing changes there */
    q.tokens = i <= 300 ? i : more[i - 301];
    for (int how = 0; how < 3; how++) {
      q.decode = how == 0, q.middle = how == 2;
      if (q.middle && (!q.w2 || q.tokens < 2)) continue;
      const mm_cu_dispatch c = mm_cu_dispatch_product(d, &q);
      bool ok = can(d, c.kernel, &q) && mm_cu_takes(d, c.kernel, &q) && reads(c.kernel, c.x) && comes(q.w, c.x);
      ok = ok && (q.w2 ? comes(q.w2, c.middle) && reads(c.kernel, c.middle) : c.middle == MM_CU_KEPT);
      ok = ok && (!q.middle || c.kernel == MM_CU_EXPERTS_MANY || c.kernel == MM_CU_EXPERTS_GEMM);
      if (!ok)
        fail_msg("%s, %u tokens, way %d, sm_90a %d: kernel %d, inputs %d and %d", what, q.tokens, how, d->hopper, c.kernel, c.x, c.middle);
      chosen[c.kernel]++;
    }
  }
}

static void check_one(const mm_packed *w, const mm_packed *w2, uint32_t top_k, bool act, const char *what) {
  mm_err err = {0};
  mm_cu_weight a, b = {0};
  if (!w->scheme || !mm_cu_describe(w, "w", &a, &err) || (w2 && !mm_cu_describe(w2, "w2", &b, &err))) return;
  if (!act) a.rounding = a.whole = b.rounding = b.whole = (mm_cu_rounding){0};
  for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
    check(&devices[i], (mm_cu_task){.w = &a, .w2 = w2 ? &b : NULL, .top_k = top_k}, what);
}

static void test_released_shapes(void **state) {
  (void)state;
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (uint32_t at = 0; at < 2 * 3 * 4; at++) {
      static const char *const models[] = {"m1", "m2", "m3"};
      const bool act = at % 2;
      const char *scheme = mm_scheme_at(i)->name, *model = models[at / 2 % 3];
      const mm_bench_shape s = {model, 8, 200064, scheme, scheme, scheme, 0, 1u << at / 6, 1, 0, 0, 0};
      const mm_model m = mm_bench_model(&s);
      mm_rank_weights w;
      mm_err err = {0};
      assert_true(mm_bench_weights(&s, &m, &w, &err));
      for (uint32_t l = 0; l < 8; l += 7) {
        check_one(&w.layer[l].qkv, NULL, 0, act, scheme), check_one(&w.layer[l].out, NULL, 0, act, scheme);
        check_one(&w.layer[l].output_gate, NULL, 0, act, scheme);
      }
      check_one(&w.layer[0].w13, &w.layer[0].w2, m.top_k, act, scheme);
      check_one(&w.head, NULL, 0, false, scheme);
      free(w.layer);
    }
}

/* Columns and rows that no released model has, grids as fine as cuts make them, rows beyond what one block or cluster holds. */
static void test_odd_shapes(void **state) {
  static const uint32_t ks[] = {8, 16, 96, 136, 328, 1000, 9216, 20480, 18432, 18448, 36992, 37008, 40960},
                        ns[] = {4, 130, 200, 257, 384, 320}, cells[] = {0, 8, 32, 64, 128};
  (void)state;
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (size_t at = 0; at < 11 * 6 * 5; at++) {
      const mm_scheme *s = mm_scheme_at(i);
      const uint32_t k = ks[at % 11], n = ns[at / 11 % 6], cell = cells[at / 66];
      mm_packed w = {.scheme = s, .lead = 16, .n = n, .k = k};
      for (unsigned j = 0; j < s->plane_count; j++) w.cell[j] = s->plane[j].cell;
      if (s->plane_count == 2 && s->code != MM_CODE_E2M1) w.cell[1].k = cell; /* mxfp8 under 32 has exponents, else f32 */
      mm_packed w2 = w;
      check_one(&w, NULL, 0, true, s->name);
      w.n = 2 * n, w2.n = k, w2.k = n;
      check_one(&w, &w2, 1 + (uint32_t)at % 16, true, s->name), check_one(&w, &w2, 2, false, s->name);
    }
}

static void test_all_are_chosen(void **state) {
  (void)state;
  for (int k = MM_CU_NO_KERNEL + 1; k < MM_CU_KERNELS; k++)
    if (!chosen[k]) fail_msg("no step takes kernel %d", k);
  assert_int_equal(chosen[MM_CU_NO_KERNEL], 0);
}

/* Kernels that refuse what none of their code was made for, and fewer pairs than are worth their launch. */
static void test_limits(void **state) {
  const mm_cu_weight w = {.code = MM_CU_INT4, .scale_kind = MM_CU_COARSE, .lead = 8, .n = 256, .k = 256, .pitch = 128};
  mm_cu_task q = {.w = &w, .tokens = 100};
  (void)state;
  assert_false(mm_cu_takes(&devices[0], MM_CU_GEMM, &q));
  assert_true(mm_cu_takes(&devices[4], MM_CU_GEMM, &q));
  assert_false(mm_cu_takes(&devices[0], MM_CU_EXPERTS_MANY, &q)); /* of one matrix */
  q.w2 = &w, q.top_k = 1, q.tokens = 7;
  assert_false(mm_cu_takes(&devices[0], MM_CU_GEMM_WIDENED, &q)); /* of two */
  assert_int_equal(mm_cu_dispatch_product(&devices[0], &q).kernel, MM_CU_EXPERTS_DECODE);
  q.tokens = 8;
  assert_int_equal(mm_cu_dispatch_product(&devices[0], &q).kernel, MM_CU_EXPERTS_FEW);
}

/* A single token's kernels round as the schemes of their weights do, others' inputs come rounded. */
static void test_rounded_inside(void **state) {
  static const struct {
    mm_cu_code code;
    mm_cu_scale scale;
    mm_cu_inputs_are x[MM_ACT_MXFP8 + 1];
  } rows[] = {
      {MM_CU_BF16, MM_CU_PLAIN, {0, 2, 2, 2, 2, 2, 2, 2}}, {MM_CU_E4M3, MM_CU_COARSE, {0, 1, 1, 1, 2, 2, 2, 1}},
      {MM_CU_E4M3, MM_CU_FINE, {0, 1, 1, 1, 2, 2, 2, 1}},  {MM_CU_INT4, MM_CU_COARSE, {0, 1, 1, 1, 1, 2, 2, 1}},
      {MM_CU_INT4, MM_CU_FINE, {0, 1, 1, 1, 1, 2, 2, 1}},  {MM_CU_E2M1, MM_CU_NV, {0, 2, 2, 1, 2, 1, 2, 2}},
      {MM_CU_E2M1, MM_CU_MX, {0, 2, 2, 1, 2, 2, 1, 2}},    {MM_CU_E4M3, MM_CU_MX, {0, 2, 2, 1, 2, 2, 2, 1}},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
    for (int kind = MM_ACT_KEPT; kind <= MM_ACT_MXFP8; kind++) {
      const mm_cu_weight w = {.code = rows[i].code,
                              .scale_kind = rows[i].scale,
                              .lead = 8,
                              .n = 256,
                              .k = 256,
                              .pitch = 256,
                              .rounding = {.kind = (mm_act_quant)kind}};
      const mm_cu_task dense = {.w = &w, .tokens = 1}, experts = {.w = &w, .w2 = &w, .tokens = 1, .top_k = 2};
      const mm_cu_dispatch a = mm_cu_dispatch_product(&devices[0], &dense), b = mm_cu_dispatch_product(&devices[0], &experts);
      if (a.kernel != MM_CU_ONE || b.kernel != MM_CU_EXPERTS_ONE || a.x != rows[i].x[kind] || b.x != a.x || b.middle != a.x)
        fail_msg("row %zu, rounding %d: kernels %d and %d, inputs %d, %d and %d", i, kind, a.kernel, b.kernel, a.x, b.x, b.middle);
    }
}

/* A matrix that no registry makes has none, and is not taken for another. */
static void test_none(void **state) {
  const mm_cu_weight w = {.code = MM_CU_E2M1, .scale_kind = MM_CU_COARSE, .lead = 1, .n = 64, .k = 64, .pitch = 32};
  const mm_cu_task q = {.w = &w, .tokens = 4};
  (void)state;
  assert_int_equal(mm_cu_dispatch_product(&devices[0], &q).kernel, MM_CU_NO_KERNEL);
  assert_false(mm_cu_takes(&devices[0], MM_CU_GEMM_WIDENED, &q));
}

/* ---- what the released models take, written down ---- */

static void test_written_down(void **state) {
  static const struct {
    const char *model, *scheme;
    bool hopper, experts, act, decode;
    uint32_t tokens;
    const char *kernels;
    bool codes; /* of sm_89 */
  } rows[] = {
      {"m2", "block_fp8", true, false, true, true, 1, "one", false},
      {"m2", "block_fp8", true, false, true, true, 64, "encode, small_batch_clusters", false},
      {"m2", "block_fp8", true, false, true, false, 17, "encode, product", false},
      {"m2", "block_fp8", true, false, true, true, 65, "encode, product", false},
      {"m2", "block_fp8", true, false, false, true, 65, "gemm_widened", false},
      {"m2", "channel_fp8", true, false, true, true, 64, "round_rows, small_batch_clusters", false},
      {"m2", "channel_fp8", true, false, true, true, 65, "encode_rows, product", false},
      {"m2", "tensor_wise_fp8", true, false, true, false, 17, "encode_rows, product", false},
      {"m2", "bf16", true, false, true, true, 64, "small_batch_clusters", false},
      {"m2", "bf16", true, false, true, true, 65, "gemm", false},
      {"m2", "mxfp8", true, false, true, true, 1, "one", false},
      {"m2", "mxfp8", true, false, true, true, 64, "round_rows, small_batch_clusters", false},
      {"m2", "mxfp8", true, false, true, true, 65, "encode_mx, product_mx", false},
      {"m2", "mxfp8", false, false, true, true, 16, "round_rows, decode_linear", false},
      {"m2", "nvfp4", false, false, true, true, 17, "round_rows, decode_dense", false},
      {"m2", "nvfp4", false, false, true, false, 17, "round_rows, gemm", false},
      {"m2", "block_fp8", false, false, true, false, 16, "round_rows, decode_dense", false},
      {"m2", "bf16", false, false, true, true, 64, "decode_dense", false},
      {"m2", "bf16", false, false, true, true, 65, "gemm", false},
      {"m2", "block_fp8", true, true, true, true, 1, "one_experts_up, one_experts_down", false},
      {"m2", "block_fp8", true, true, true, true, 64, "lay_rows, experts_few, lay_rows, experts_few, sum_pairs", false},
      {"m2", "block_fp8", true, true, true, true, 65, "encode, spread, product, product, sum_choices", false},
      {"m2", "channel_fp8", true, true, true, true, 64, "lay_rows, experts_few, lay_rows, experts_few, sum_pairs", false},
      {"m1", "channel_fp8", true, true, true, true, 65, "encode_rows, spread, product, encode_rows, product, sum_choices", false},
      {"m2", "tensor_wise_fp8", true, true, true, false, 17, "encode_rows, spread, product, encode_rows, product, sum_choices", false},
      {"m2", "w4a16", true, true, true, true, 256, "lay_rows, experts_few, lay_rows, experts_few, sum_pairs", false},
      {"m2", "w4a16", true, true, true, true, 257, "find_places, lay_tokens, experts_many, experts_many, sum_choices", false},
      {"m2", "w4a16", true, true, true, false, 17, "find_places, lay_tokens, experts_many, experts_many, sum_choices", false},
      {"m2", "nvfp4", true, true, true, true, 1, "one_experts_up, one_experts_down", false},
      {"m2", "nvfp4", true, true, true, false, 300,
       "round_rows, find_places, lay_tokens, experts_many, lay_rounded, experts_many, sum_choices", false},
      {"m2", "mxfp8", true, true, true, true, 1, "one_experts_up, one_experts_down", false},
      {"m2", "mxfp8", true, true, true, true, 256, "lay_rows, experts_few, lay_rows, experts_few, sum_pairs", false},
      {"m2", "mxfp8", true, true, true, false, 64,
       "round_rows, find_places, lay_tokens, experts_many, lay_rounded, experts_many, sum_choices", false},
      {"m1", "block_fp8", true, true, false, true, 1, "experts_up, experts_down", false}, /* long rows, inputs as they are */
      {"m1", "block_fp8", true, true, true, true, 3, "round_rows, experts_up, round_slots, experts_down", false}, /* six pairs */
      {"m1", "block_fp8", true, true, true, true, 4, "lay_rows, experts_few, lay_rows, experts_few, sum_pairs", false},
      {"m1", "block_fp8", false, true, true, true, 1, "one_experts_up, one_experts_down", false},
      {"m1", "block_fp8", false, true, true, true, 2, "round_rows, grouped_up, round_rows, grouped_down, sum_pairs", false},
      {"m1", "block_fp8", false, true, true, true, 17, "round_rows, grouped_up, round_rows, grouped_down, sum_pairs", false},
      {"m2", "block_fp8", false, false, true, true, 64, "round_rows, decode_dense", true},
      {"m2", "block_fp8", false, false, true, true, 65, "encode, gemm_codes", true},
      {"m2", "block_fp8", false, false, true, false, 17, "encode, gemm_codes", true},
      {"m2", "block_fp8", false, false, false, false, 17, "gemm", true}, /* inputs as they are */
      {"m2", "channel_fp8", false, false, true, false, 17, "round_rows, gemm", true},
      {"m2", "block_fp8", false, true, true, true, 512, "round_rows, grouped_up, round_rows, grouped_down, sum_pairs", true},
      {"m2", "block_fp8", false, true, true, true, 513, "encode, grouped_up_codes, encode_placed, grouped_down_codes, sum_pairs", true},
      {"m2", "block_fp8", false, true, true, false, 17, "encode, grouped_up_codes, encode_placed, grouped_down_codes, sum_pairs", true},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const mm_bench_shape s = {rows[i].model, 1, 200064, rows[i].scheme, rows[i].scheme, "bf16", 0, 1, 1, 0, 0, 0};
    const mm_model m = mm_bench_model(&s);
    mm_rank_weights w;
    mm_err err = {0};
    mm_cu_weight a, b;
    char got[200], brief[20];
    assert_true(mm_bench_weights(&s, &m, &w, &err));
    const mm_layer_weights *y = &w.layer[0];
    assert_true(mm_cu_describe(rows[i].experts ? &y->w13 : &y->qkv, "w", &a, &err) && mm_cu_describe(&y->w2, "w2", &b, &err));
    if (!rows[i].act) a.rounding = a.whole = b.rounding = b.whole = (mm_cu_rounding){0};
    const mm_cu_device d = {rows[i].hopper, rows[i].hopper ? 8 : 0, (rows[i].hopper ? 227U : 99U) << 10, rows[i].codes};
    const mm_cu_task q = {&a, rows[i].experts ? &b : NULL, rows[i].tokens, m.top_k, rows[i].decode, false};
    const mm_cu_dispatch c = mm_cu_dispatch_product(&d, &q);
    mm_cu_print_dispatch(&c, got, sizeof got);
    if (strcmp(got, rows[i].kernels) != 0) fail_msg("row %zu: %s, expected %s", i, got, rows[i].kernels);
    mm_cu_print_dispatch(&c, brief, sizeof brief); /* no more than there is room for */
    assert_true(strlen(brief) < sizeof brief && strncmp(brief, got, strlen(brief)) == 0);
    free(w.layer);
  }
}

/* Inputs of w2 whose scales are of columns that other ranks have: how many largest numbers of a row the ranks publish, and kernels
 * that take such inputs as numbers, rounded before. */
static void test_cut_inputs(void **state) {
  static const struct {
    const char *scheme;
    uint32_t tp, ep, published, tokens; /* of M2's 1,536 columns */
    const char *kernels;
  } rows[] = {
      {"block_fp8", 4, 1, 0, 1, "one_experts_up, one_experts_down"},
      {"block_fp8", 8, 1, 12, 1, "one_experts_up, round_slots, one_experts_down"},
      {"block_fp8", 8, 1, 12, 300, "round_rows, find_places, lay_tokens, experts_many, lay_rounded, experts_many, sum_choices"},
      {"channel_fp8", 1, 1, 0, 1, "one_experts_up, one_experts_down"},
      {"channel_fp8", 2, 1, 1, 1, "one_experts_up, round_slots, one_experts_down"},
      {"channel_fp8", 4, 2, 1, 1, "one_experts_up, round_slots, one_experts_down"},
      {"channel_fp8", 4, 4, 0, 1, "one_experts_up, one_experts_down"},
      {"channel_fp8", 2, 1, 1, 300, "encode_rows, spread, product, encode_rows, product, sum_choices"},
      {"w4a8", 8, 4, 1, 64, "lay_rows, experts_few, round_rows, lay_rows, experts_few, sum_pairs"},
      {"nvfp4", 2, 1, 1, 1, "one_experts_up, round_slots, one_experts_down"},
      {"mxfp4", 2, 1, 0, 1, "one_experts_up, one_experts_down"},
      {"w4a16", 2, 1, 0, 1, "one_experts_up, one_experts_down"},
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const mm_bench_shape s = {"m2", 1, 200064, rows[i].scheme, rows[i].scheme, "bf16", 0, rows[i].tp, rows[i].ep, 0, 0, 0};
    const mm_model m = mm_bench_model(&s);
    mm_rank_weights w;
    mm_err err = {0};
    mm_cu_weight a = {0}, b = {0};
    char got[200];
    assert_true(mm_bench_weights(&s, &m, &w, &err));
    assert_true(mm_cu_describe(&w.layer[0].w13, "w13", &a, &err) && mm_cu_describe(&w.layer[0].w2, "w2", &b, &err));
    assert_int_equal(a.whole.whole_k, 0);
    assert_int_equal(b.whole.whole_k, rows[i].published ? 1536 : 0);
    assert_true(!rows[i].published || (b.rounding.kind == MM_ACT_KEPT && mm_cu_published_largest(&b.whole) == rows[i].published));
    const mm_cu_dispatch c = mm_cu_dispatch_product(&devices[0], &(mm_cu_task){&a, &b, rows[i].tokens, m.top_k, true, false});
    mm_cu_print_dispatch(&c, got, sizeof got);
    if (strcmp(got, rows[i].kernels) != 0) fail_msg("row %zu: %s, expected %s", i, got, rows[i].kernels);
    free(w.layer);
  }
}

/* Columns in whole blocks of 128 with padding around what a rank owns: a rank's padded width says nothing of what is cut. */
static void test_padded_inputs(void **state) {
  static const struct {
    const char *scheme;
    uint32_t first_k, k, whole_k, cut_k;
    bool published;
  } rows[] = {
      {"block_fp8", 0, 256, 1536, 192, true},    {"block_fp8", 128, 256, 1536, 192, true}, /* ranks 0 and 1 of --tp 8 */
      {"block_fp8", 384, 256, 1536, 384, false}, {"channel_fp8", 0, 128, 96, 48, true},    {"channel_fp8", 0, 128, 96, 0, false},
      {"block_fp8", 0, 128, 96, 48, true},       {"mxfp8", 0, 128, 96, 32, false},         {"mxfp8", 0, 128, 96, 48, true},
      {"block_fp8", 256, 64, 320, 64, true}, /* the last of five: its own column is on a group, others' are not */
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const mm_bench_shape s = {"m2", 1, 200064, rows[i].scheme, rows[i].scheme, "bf16", 0, 1, 1, 0, 0, 0};
    const mm_model m = mm_bench_model(&s);
    mm_rank_weights w;
    mm_err err = {0};
    mm_cu_weight got = {0};
    assert_true(mm_bench_weights(&s, &m, &w, &err));
    mm_packed p = w.layer[0].w2;
    p.first_k = rows[i].first_k, p.k = rows[i].k, p.whole_k = rows[i].whole_k, p.cut_k = rows[i].cut_k;
    assert_true(mm_cu_describe(&p, "w2", &got, &err));
    if ((got.whole.whole_k != 0) != rows[i].published) fail_msg("row %zu: %u columns told", i, got.whole.whole_k);
    assert_true(got.whole.first_k == (rows[i].published ? rows[i].first_k : 0));
    assert_true(mm_cu_rounds(&p, "w2", &err));
    free(w.layer);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_released_shapes), cmocka_unit_test(test_odd_shapes),
      cmocka_unit_test(test_all_are_chosen),  cmocka_unit_test(test_none),
      cmocka_unit_test(test_limits),          cmocka_unit_test(test_rounded_inside),
      cmocka_unit_test(test_written_down),    cmocka_unit_test(test_cut_inputs),
      cmocka_unit_test(test_padded_inputs),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
