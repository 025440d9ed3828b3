/* Kernel rates against the device's own copy rate in the same run. Synthetic weights are made on the device; inputs rotate over more than
 * three times the L2 cache; medians of graph replays. */
#include <algorithm>
#include <memory>

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/sampling/sampling.h"
#include "tests/ops/routing.h"

static double g_copy;

static void row(const char *what, double us, double bytes) {
  printf("%-64s %10.2f us %8.0f GB/s  %.2f of copy\n", what, us, bytes / us * 1e-3, bytes / us * 1e6 / g_copy);
}
static void flops(const char *what, double us, double flop) { printf("%-64s %10.2f us %8.1f TFLOP/s\n", what, us, flop / us * 1e-6); }

struct scheme {
  const char *name;
  mm_cu_code code;
  mm_cu_scale kind;
  uint32_t cell_n_log2, cell_k_log2;
  mm_act_quant rounding = MM_ACT_KEPT; /* of inputs, where the experts' second product rounds its own */
};
static const scheme kBf16 = {"bf16", MM_CU_BF16, MM_CU_PLAIN, 0, 0}, kFp8 = {"block_fp8", MM_CU_E4M3, MM_CU_COARSE, 7, 7},
                    kInt4 = {"int4 g128", MM_CU_INT4, MM_CU_COARSE, 0, 7}, kNv = {"nvfp4", MM_CU_E2M1, MM_CU_NV, 0, 4},
                    kMx = {"mxfp4", MM_CU_E2M1, MM_CU_MX, 0, 5}, kNvRounded = {"nvfp4 rounded", MM_CU_E2M1, MM_CU_NV, 0, 4, MM_ACT_NVFP4},
                    kMx8 = {"mxfp8", MM_CU_E4M3, MM_CU_MX, 0, 5, MM_ACT_MXFP8};

struct bench_weight {
  mm_cu_weight d = {};
  buffer<uint8_t> codes, micro;
  buffer<float> scale, global;
  double matrix_bytes = 0; /* codes and scales of one of the lead matrices */
  bench_weight(const scheme &s, uint32_t lead, uint32_t n, uint32_t k) {
    d.code = s.code, d.scale_kind = s.kind, d.lead = lead, d.n = n, d.k = k, d.rounding.kind = s.rounding;
    const uint32_t bits = s.code == MM_CU_BF16 ? 16 : s.code == MM_CU_E4M3 ? 8 : 4;
    d.pitch = (size_t)k * bits / 8;
    codes.open((size_t)lead * n * d.pitch);
    if (s.code == MM_CU_BF16) {
      fill_random_bf16((__nv_bfloat16 *)codes.p, codes.n / 2, g_rng.below(1 << 30));
    } else {
      fill_random(codes.p, codes.n, g_rng.below(1 << 30));
    }
    d.data = codes.p, matrix_bytes = (double)n * (double)d.pitch;
    d.cell_n_log2 = s.cell_n_log2, d.cell_k_log2 = s.cell_k_log2;
    if (s.kind == MM_CU_PLAIN) return;
    d.scale_rows = (n + (1u << s.cell_n_log2) - 1) >> s.cell_n_log2, d.scale_pitch = (k + (1u << s.cell_k_log2) - 1) >> s.cell_k_log2;
    const size_t cells = (size_t)d.scale_rows * d.scale_pitch;
    if (s.kind == MM_CU_COARSE) {
      scale.open(lead * cells), d.scale = scale.p, matrix_bytes += 4.0 * (double)cells;
      fill_random_float(scale.p, scale.n, 0.001f, 0.002f, g_rng.below(1 << 30));
    } else {
      micro.open(lead * cells), d.scale = micro.p, matrix_bytes += (double)cells;
      if (s.kind == MM_CU_NV) {
        fill_random(micro.p, micro.n, g_rng.below(1 << 30));
        global.open(lead), d.global = global.p;
        fill_random_float(global.p, lead, 1e-3f, 2e-3f, 5);
      } else {
        CUDA_OK(cudaMemset(micro.p, 118, micro.n));
      }
    }
  }
};

static void bench_decode_linear(const scheme &s, uint32_t n, uint32_t k, std::vector<uint32_t> tokens) {
  std::vector<std::unique_ptr<bench_weight>> w;
  double total = 0;
  do w.emplace_back(new bench_weight(s, 1, n, k)), total += w.back()->matrix_bytes;
  while (total < 200e6 || w.size() < 3);
  buffer<__nv_bfloat16> x((size_t)MM_CU_FEW * k), y((size_t)MM_CU_FEW * n);
  fill_random_bf16(x.p, x.n, 7);
  for (uint32_t t : tokens) {
    const int count = (int)w.size() * 4;
    const auto few = t > 1 ? few_linear(w[0]->d, t) : NULL, product = few ? few : plain_linear(w[0]->d, t);
    double us = time_graph(count, [&](cudaStream_t st, int i) {
      CUDA_OK(product(w[(size_t)i % w.size()]->d, {x.p, nullptr, y.p, nullptr, t}, st));
    });
    char what[120];
    snprintf(what, sizeof what, "linear %-9s %u x %u, %.1f MB, T=%u", s.name, n, k, w[0]->matrix_bytes * 1e-6, t);
    row(what, us, w[0]->matrix_bytes);
  }
  for (auto &v : w) v->d.rounding.kind = MM_ACT_FP8_GROUP;
  if (!takes_here(MM_CU_GEMM_FP8, w[0]->d)) return;
  code_buffers codes(MM_CU_FEW, k);
  buffer<__nv_bfloat16> wide((size_t)MM_CU_FEW * k), out((size_t)MM_CU_FEW * n);
  fill_random_bf16(wide.p, wide.n, 8);
  CUDA_OK(mm_cu_encode(codes.d, {wide.p, k, nullptr}, {MM_ACT_FP8_GROUP, 0}, 0));
  for (uint32_t t : {2u, 8u, 16u, 64u}) {
    mm_cu_codes few = codes.d;
    few.rows = t;
    const double us = time_graph((int)w.size() * 4, [&](cudaStream_t st, int i) {
      CUDA_OK(mm_cu_small_batch_fp8(w[(size_t)i % w.size()]->d, {few, out.p, nullptr}, st));
    });
    char what[120];
    snprintf(what, sizeof what, "linear rounded %u x %u, %.1f MB, T=%u", n, k, w[0]->matrix_bytes * 1e-6, t);
    row(what, us, w[0]->matrix_bytes);
  }
}

/* Every token's choices drawn alike from all experts, as a trained router's are: the sorted pairs, and the slots of few tokens. Returns the
 * experts in use. */
static uint32_t draw_pairs(route_buffers *b, uint32_t tokens) {
  const uint32_t experts = b->r.experts, top_k = b->r.top_k;
  std::vector<std::vector<uint32_t>> of(experts);
  for (uint32_t t = 0; t < tokens; t++) {
    for (uint32_t j = 0; j < top_k;) {
      const uint32_t e = g_rng.below(experts);
      if (!of[e].empty() && of[e].back() / top_k == t) continue;
      of[e].push_back(t * top_k + j++);
    }
  }
  std::vector<uint32_t> offset, pair, id((size_t)tokens * top_k);
  for (const auto &pairs : of) offset.push_back((uint32_t)pair.size()), pair.insert(pair.end(), pairs.begin(), pairs.end());
  offset.push_back((uint32_t)pair.size());
  for (uint32_t e = 0; e < experts; e++)
    for (uint32_t p : of[e]) id[p] = e;
  b->id.put(id), b->offset.put(offset), b->pair.put(pair), b->weight.put(std::vector<float>(pair.size(), 1.0f / (float)top_k));
  std::vector<uint32_t> expert, mask;
  for (uint32_t e = 0; e < experts; e++) {
    if (of[e].empty()) continue;
    expert.push_back(e), mask.push_back(0);
    for (uint32_t p : of[e]) mask.back() |= tokens <= MM_CU_DECODE_ROWS ? 1u << p / top_k : 0;
  }
  const uint32_t used = (uint32_t)expert.size();
  if (tokens > MM_CU_DECODE_ROWS) return used;
  expert.resize(b->slot_expert.n), mask.resize(b->slot_tokens.n); /* the places that r names */
  b->used.put({used}), b->slot_expert.put(expert), b->slot_tokens.put(mask);
  b->slot_weight.put(std::vector<float>(b->slot_weight.n, 1.0f / (float)top_k));
  return used;
}

static void experts_rate(const char *model, const scheme &s, uint32_t experts, uint32_t top_k, uint32_t hidden, uint32_t inter,
                         std::vector<uint32_t> tokens, bool grouped = false) {
  bench_weight w13(s, experts, 2 * inter, hidden), w2(s, experts, hidden, inter);
  const int kSets = 16;
  for (uint32_t t : tokens) {
    std::vector<std::unique_ptr<route_buffers>> routes;
    buffer<__nv_bfloat16> router((size_t)experts * hidden), h((size_t)t * hidden), n(h.n);
    buffer<float> norm(hidden);
    buffer<__nv_bfloat16> x((size_t)kSets * t * hidden), y((size_t)t * hidden);
    fill_random_bf16(router.p, router.n, 3), fill_random_float(norm.p, norm.n, 0.5f, 1.5f, 4);
    fill_random_bf16(x.p, x.n, 11);
    const mm_cu_router m = {router.p, false, hidden, nullptr, nullptr};
    double used = 0;
    for (int i = 0; i < kSets; i++) {
      routes.emplace_back(new route_buffers(experts, top_k, t, true, nullptr));
      if (t > 1) {
        used += (double)draw_pairs(routes.back().get(), t) / kSets;
      } else {
        CUDA_OK(mm_cu_route_tokens(m, routes.back()->r, x.p + (size_t)i * t * hidden, t, 0));
        used += top_k / (double)kSets;
      }
    }
    const bool decode_linear = t <= MM_CU_DECODE_ROWS;
    buffer<__nv_bfloat16> middle(
        (decode_linear ? (size_t)std::min(experts, MM_CU_DECODE_ROWS * top_k) * MM_CU_DECODE_ROWS : (size_t)t * top_k) * inter);
    buffer<float> pair_out((size_t)t * top_k * hidden);
    double us = time_graph(
        decode_linear ? kSets : 1,
        [&](cudaStream_t st, int i) {
          mm_cu_experts a = {x.p + (size_t)(i % kSets) * t * hidden, y.p, middle.p, pair_out.p, t};
          CUDA_OK((grouped ? mm_cu_experts_gemm : plain_experts(w13.d, w2.d, t, top_k))(w13.d, w2.d, routes[(size_t)i % kSets]->r, a, st));
        },
        decode_linear ? 30 : 5);
    char what[120];
    const double bytes = used * (w13.matrix_bytes + w2.matrix_bytes);
    snprintf(what, sizeof what, "experts %s %-9s T=%u, %.1f in use, %.0f MB", model, s.name, t, used, bytes * 1e-6);
    if (decode_linear) {
      row(what, us, bytes);
    } else {
      flops(what, us, 6.0 * t * top_k * hidden * inter);
    }
    if (t > 1 && t <= 256 && takes_here(MM_CU_EXPERTS_FEW, w13.d, w2.d, t)) {
      buffer<__nv_bfloat16> stages((size_t)3 * t * top_k * inter);
      us = time_graph(
          decode_linear ? kSets : 1,
          [&](cudaStream_t st, int i) {
            CUDA_OK(mm_cu_experts_few(w13.d, w2.d, routes[(size_t)i]->r, {x.p, y.p, stages.p, pair_out.p, t}, st));
          },
          decode_linear ? 30 : 5);
      snprintf(what, sizeof what, "experts %s %-9s few rows each T=%u, %.1f in use, %.0f MB", model, s.name, t, used, bytes * 1e-6);
      row(what, us, bytes);
    }
    mm_cu_weight up = w13.d, down = w2.d;
    up.rounding.kind = down.rounding.kind = MM_ACT_FP8_GROUP;
    if (takes_here(MM_CU_EXPERTS_FP8, up, down, t)) {
      code_buffers codes(t, hidden), mid(t * top_k, inter);
      CUDA_OK(mm_cu_encode(codes.d, {x.p, hidden, nullptr}, {MM_ACT_FP8_GROUP, 0}, 0));
      us = time_graph(
          decode_linear ? kSets : 1,
          [&](cudaStream_t st, int i) {
            const mm_cu_rounded_experts a = {codes.d, mid.d, nullptr, (__nv_bfloat16 *)pair_out.p, y.p};
            CUDA_OK(mm_cu_experts_fp8(up, down, routes[(size_t)i]->r, a, st));
          },
          decode_linear ? 30 : 5);
      snprintf(what, sizeof what, "experts %s rounded T=%u, %.1f in use, %.0f MB", model, t, used, bytes * 1e-6);
      if (t < 1024) {
        row(what, us, bytes);
      } else {
        flops(what, us, 6.0 * t * top_k * hidden * inter);
      }
    }
    if (&s == &kFp8) {
      us = time_graph(decode_linear ? kSets : 1, [&](cudaStream_t st, int i) {
        CUDA_OK(mm_cu_route_tokens(m, routes[(size_t)i % kSets]->r, x.p + (size_t)(i % kSets) * t * hidden, t, st));
      });
      snprintf(what, sizeof what, "router %s T=%u", model, t);
      row(what, us, (double)experts * hidden * 2);
      if (!decode_linear) continue;
      us = time_graph(kSets, [&](cudaStream_t st, int i) {
        const __nv_bfloat16 *in = x.p + (size_t)(i % kSets) * t * hidden;
        CUDA_OK(mm_cu_combine_route({h.p, n.p, in, in, norm.p, 1.0f, 0.5f, 1e-6f}, m, routes[(size_t)i % kSets]->r, t, st));
      });
      snprintf(what, sizeof what, "residual, norm and router %s T=%u", model, t);
      row(what, us, (double)experts * hidden * 2 + 8.0 * t * hidden);
    }
  }
}

void bench_lightning() {
  const uint32_t heads = 64, d = 128, slots = 256;
  buffer<float> state((size_t)slots * heads * d * d), slope(heads);
  fill_random_float(state.p, state.n, -1, 1, 3);
  fill_random_float(slope.p, heads, 0.01f, 0.9f, 4);
  std::vector<int32_t> slot(2 * slots);
  for (uint32_t i = 0; i < 2 * slots; i++) slot[i] = (int32_t)(i * 37 % slots);
  buffer<int32_t> dslot;
  buffer<uint32_t> pos;
  dslot.put(slot), pos.put(std::vector<uint32_t>(slots, 5));
  {
    buffer<__nv_bfloat16> qkv((size_t)slots * heads * 3 * d), o((size_t)slots * heads * d);
    fill_random_bf16(qkv.p, qkv.n, 9);
    for (uint32_t b : {1u, 4u, 16u, 64u, 256u}) {
      double us = time_graph(b < 64 ? 64 : 8, [&](cudaStream_t st, int i) {
        CUDA_OK(mm_cu_lightning_decode({qkv.p, o.p, state.p, slope.p, heads, d, (size_t)heads * d * d},
                                       {dslot.p + (uint32_t)i * b % slots, pos.p}, b, st));
      });
      char what[120];
      snprintf(what, sizeof what, "lightning decode H=64 D=128 B=%u", b);
      row(what, us, (double)b * heads * d * (8.0 * d + 8));
    }
  }
  for (uint32_t n : {2048u, 8192u, 32768u, 131072u}) {
    buffer<__nv_bfloat16> qkv((size_t)n * heads * 3 * d), o((size_t)n * heads * d);
    buffer<mm_cu_span> span;
    fill_random_bf16(qkv.p, qkv.n, 9);
    span.put({{0, 0, n, 0}});
    double us = time_graph(
        2,
        [&](cudaStream_t st, int) {
          CUDA_OK(mm_cu_lightning_prefill({qkv.p, o.p, state.p, slope.p, heads, d, (size_t)heads * d * d}, span.p, 1, st));
        },
        8);
    char what[120];
    snprintf(what, sizeof what, "lightning prefill H=64 D=128 n=%u, SiLU included", n);
    row(what, us, (double)n * heads * d * 8);
  }
}

/* longest: what the first sequence holds, or 0: `context` as the others. */
static void bench_gqa(const char *model, uint32_t heads, uint32_t batch, uint32_t context, uint32_t longest = 0) {
  const mm_cu_heads h = {heads, 8, 128, 64};
  const uint32_t most = std::max(context, longest);
  const double bytes = ((double)(batch - 1) * context + most) * 8 * 128 * 4;
  const uint32_t sets = (uint32_t)std::max(1.0, std::ceil(200e6 / bytes)), per_slot = (most + MM_CU_PAGE) / MM_CU_PAGE;
  const uint32_t pages = sets * (batch - 1) * ((context + MM_CU_PAGE) / MM_CU_PAGE) + sets * per_slot;
  buffer<__nv_bfloat16> k((size_t)pages * 8 * MM_CU_PAGE * 128), v(k.n), qkv((size_t)batch * (heads + 16) * 128),
      o((size_t)batch * heads * 128);
  fill_random_bf16(k.p, k.n, 1), fill_random_bf16(v.p, v.n, 2), fill_random_bf16(qkv.p, qkv.n, 3);
  std::vector<uint32_t> free(pages), table((size_t)sets * batch * per_slot), pos(batch, context - 1);
  pos[0] = most - 1;
  for (uint32_t i = 0; i < pages; i++) free[i] = i;
  for (uint32_t i = pages - 1; i > 0; i--) std::swap(free[i], free[g_rng.below(i + 1)]);
  for (uint32_t i = 0, next = 0; i < sets * batch; i++) {
    for (uint32_t k = 0; k <= pos[i % batch] / MM_CU_PAGE; k++) table[(size_t)i * per_slot + k] = free[next++];
  }
  std::vector<int32_t> slot(batch * sets);
  for (uint32_t i = 0; i < batch * sets; i++) slot[i] = (int32_t)i;
  buffer<uint32_t> dtable, dpos;
  buffer<int32_t> dslot;
  dtable.put(table), dpos.put(pos), dslot.put(slot);
  const mm_cu_far_plan plan = mm_cu_plan_far(h, batch, most);
  std::vector<uint32_t> first(batch);
  std::vector<uint2> item(mm_cu_gqa_items(h, batch, plan));
  item.resize(mm_cu_gqa_list(h, batch, slot.data(), pos.data(), plan, first.data(), item.data()));
  buffer<uint32_t> dfirst;
  buffer<uint2> ditem;
  mm_cu_far far;
  if (!item.empty()) dfirst.put(first), ditem.put(item), far = {plan, dfirst.p, ditem.p};
  buffer<uint8_t> work(mm_cu_gqa_work(h, batch, plan));
  work.zero();
  const mm_cu_kv kv = {k.p, v.p, dtable.p, per_slot};
  buffer<float> norm((size_t)heads * 128), freq(32);
  fill_random_float(norm.p, norm.n, 0.5f, 1.5f, 4), fill_random_float(freq.p, freq.n, 0.0f, 1.0f, 4);
  const float *weight = heads == 48 ? norm.p : nullptr;
  double us = time_graph(std::max(8, (int)sets), [&](cudaStream_t st, int i) {
    const mm_cu_rows rows = {dslot.p + (uint32_t)i % sets * batch, dpos.p};
    CUDA_OK(mm_cu_gqa_decode(h, rows, kv, {qkv.p, weight, weight, freq.p, 1e-6f, batch}, {qkv.p, o.p, work.p, batch, batch, far}, st));
  });
  char what[160];
  snprintf(what, sizeof what, "qk norm, rope, gqa decode %s B=%u context %u, longest %u, %.0f MB", model, batch, context, most,
           bytes * 1e-6);
  row(what, us, bytes);
}

static void bench_gqa_prefill(uint32_t heads, uint32_t n) {
  const mm_cu_heads h = {heads, 8, 128, 64};
  const uint32_t per_slot = n / MM_CU_PAGE;
  buffer<__nv_bfloat16> k((size_t)n * 1024), v(k.n), qkv((size_t)n * (heads + 16) * 128), o((size_t)n * heads * 128);
  fill_random_bf16(k.p, k.n, 1), fill_random_bf16(v.p, v.n, 2), fill_random_bf16(qkv.p, qkv.n, 3);
  std::vector<uint32_t> table(per_slot);
  std::vector<uint2> tile;
  for (uint32_t i = 0; i < per_slot; i++) table[i] = i;
  for (uint32_t i = 0; i < n; i += MM_CU_TILE) tile.push_back(make_uint2(0, n - MM_CU_TILE - i));
  buffer<uint32_t> dtable;
  buffer<mm_cu_span> span;
  buffer<uint2> dtile;
  dtable.put(table), span.put({{0, 0, n, 0}}), dtile.put(tile);
  double us = time_graph(
      2,
      [&](cudaStream_t st, int) {
        CUDA_OK(mm_cu_gqa_prefill(h, {span.p, dtile.p, (uint32_t)tile.size()}, {k.p, v.p, dtable.p, per_slot}, {qkv.p, o.p, nullptr, n, n},
                                  st));
      },
      5);
  char what[120];
  snprintf(what, sizeof what, "gqa prefill %u/8 x 128, n=%u, causal", heads, n);
  flops(what, us, 2.0 * heads * 128 * (double)n * n);
}

static void rows_rate(uint32_t tokens, uint32_t width) {
  const size_t n = (size_t)tokens * width;
  buffer<__nv_bfloat16> a(n), b(n), c(n), d(n);
  buffer<float> w(width);
  fill_random_bf16(a.p, n, 1), fill_random_bf16(b.p, n, 2), fill_random_bf16(c.p, n, 3), fill_random_float(w.p, width, 0.5f, 1.5f, 4);
  char what[120];
  double us = time_graph(64, [&](cudaStream_t st, int) {
    CUDA_OK(mm_cu_combine_rows({c.p, d.p, a.p, b.p, w.p, 3.5f, 1.0f, 1e-5f}, tokens, width, st));
  });
  snprintf(what, sizeof what, "combine + norm T=%u width %u", tokens, width);
  row(what, us, 8.0 * (double)n);
  us = time_graph(64, [&](cudaStream_t st, int) { CUDA_OK(mm_cu_gated_norm({c.p, a.p, b.p, w.p, 1e-6f, width}, tokens, {}, st)); });
  snprintf(what, sizeof what, "gated norm T=%u width %u", tokens, width);
  row(what, us, 6.0 * (double)n);
  if (width != 8192) return;
  const mm_cu_heads h = {48, 8, 128, 64};
  buffer<__nv_bfloat16> k((size_t)(tokens / MM_CU_PAGE + 1) * 8 * MM_CU_PAGE * 128), v(k.n);
  buffer<int32_t> slot;
  buffer<uint32_t> pos, table;
  buffer<float> norm(6144), freq(32);
  std::vector<uint32_t> at(tokens), pages(tokens / MM_CU_PAGE + 1);
  for (uint32_t i = 0; i < tokens; i++) at[i] = i;
  for (uint32_t i = 0; i < pages.size(); i++) pages[i] = i;
  slot.put(std::vector<int32_t>(tokens, 0)), pos.put(at), table.put(pages);
  fill_random_float(norm.p, norm.n, 0.5f, 1.5f, 4), fill_random_float(freq.p, freq.n, 0.0f, 1.0f, 4);
  us = time_graph(64, [&](cudaStream_t st, int) {
    CUDA_OK(mm_cu_rope(h, {slot.p, pos.p}, {k.p, v.p, table.p, (uint32_t)pages.size()}, {a.p, norm.p, norm.p, freq.p, 1e-6f, tokens}, st));
  });
  snprintf(what, sizeof what, "qk norm + rope + cache write T=%u, 48/8 x 128", tokens);
  row(what, us, 4.0 * (double)n);
}

static void bench_gemm(const scheme &s, uint32_t tokens, uint32_t n, uint32_t k) {
  bench_weight w(s, 1, n, k);
  buffer<__nv_bfloat16> x((size_t)tokens * k), y((size_t)tokens * n);
  fill_random_bf16(x.p, x.n, 7);
  double us = time_graph(
      4,
      [&](cudaStream_t st, int) {
        CUDA_OK(plain_linear(w.d, tokens)(w.d, {x.p, nullptr, y.p, nullptr, tokens}, st));
      },
      6);
  char what[120];
  snprintf(what, sizeof what, "gemm %-9s T=%u %u x %u", s.name, tokens, n, k);
  flops(what, us, 2.0 * tokens * n * k);
}

static void bench_rounded(uint32_t tokens, uint32_t n, uint32_t k, int replays = 6) {
  bench_weight w(kFp8, 1, n, k);
  w.d.rounding.kind = MM_ACT_FP8_GROUP;
  if (!takes_here(MM_CU_GEMM_FP8, w.d)) return;
  buffer<__nv_bfloat16> x((size_t)tokens * k), y((size_t)tokens * n);
  code_buffers codes(tokens, k);
  fill_random_bf16(x.p, x.n, 7);
  char what[120];
  double us = time_graph(
      8,
      [&](cudaStream_t st, int) {
        CUDA_OK(mm_cu_encode(codes.d, {x.p, k, nullptr}, {MM_ACT_FP8_GROUP, 0}, st));
      },
      6);
  snprintf(what, sizeof what, "inputs to codes T=%u, %u columns", tokens, k);
  row(what, us, 3.0 * tokens * k);
  us = time_graph(
      4,
      [&](cudaStream_t st, int) {
        CUDA_OK(mm_cu_gemm_fp8(w.d, {codes.d, y.p, nullptr}, st));
      },
      replays);
  snprintf(what, sizeof what, "gemm rounded   T=%u %u x %u", tokens, n, k);
  flops(what, us, 2.0 * tokens * n * k);
}

void bench_copy() { g_copy = copy_rate(); }
void bench_linear() {
  bench_decode_linear(kFp8, 2048, 3072, {1, 8, 16, 64});
  bench_decode_linear(kFp8, 8192, 3072, {1, 8, 16, 64});
  bench_decode_linear(kFp8, 3072, 6144, {1, 8, 16, 64});
  bench_decode_linear(kFp8, 6144, 8192, {1, 8, 16, 64});
  bench_decode_linear(kFp8, 24576, 6144, {1, 8, 16, 64});
  bench_decode_linear(kBf16, 24576, 6144, {1, 16, 64});
  bench_decode_linear(kBf16, 200064, 3072, {1, 16, 64});
  bench_decode_linear(kFp8, 200064, 3072, {1, 16, 64});
  for (const scheme *s : {&kInt4, &kNv, &kMx})
    bench_decode_linear(*s, 8192, 3072, {1, 8, 16, 64}), bench_decode_linear(*s, 24576, 6144, {1, 8, 16, 32, 64});
  bench_gemm(kBf16, 8192, 8192, 3072);
  bench_gemm(kFp8, 8192, 8192, 3072);
  bench_gemm(kFp8, 64, 8192, 3072);
  bench_rounded(8192, 8192, 3072);
  bench_rounded(8192, 6144, 8192);
  for (uint32_t t : {128u, 256u}) bench_rounded(t, 8192, 3072);
}
void bench_experts() {
  experts_rate("M1", kFp8, 32, 2, 6144, 9216, {1, 4, 16, 64, 256, 8192});
  experts_rate("M2", kFp8, 256, 8, 3072, 1536, {1, 4, 16, 64, 256, 8192});
  for (const scheme *s : {&kInt4, &kNv, &kMx}) experts_rate("M2", *s, 256, 8, 3072, 1536, {1, 4, 16, 64});
}
void bench_products() {
  double flop;
  const double us = time_mma(&flop);
  flops("mma.sync m16n8k16, bf16, from registers", us, flop);
  if (!hopper()) {
    for (const auto &shape : {std::pair(8192u, 3072u), {3072u, 6144u}, {24576u, 6144u}}) {
      for (const scheme *s : {&kBf16, &kFp8, &kInt4, &kNv}) bench_gemm(*s, 8192, shape.first, shape.second);
    }
    return;
  }
  for (const auto &shape : {std::pair(8192u, 3072u), {3072u, 6144u}, {24576u, 6144u}, {6144u, 8192u}})
    bench_rounded(8192, shape.first, shape.second, 400);
}
/* Many tokens, weights only: experts widened by one group of threads and in registers, against products of codes and of bf16. */
void bench_widened() {
  bench_gemm(kBf16, 8192, 8192, 3072);
  bench_rounded(8192, 8192, 3072);
  for (const scheme *s : {&kFp8, &kInt4, &kNv, &kMx}) {
    bench_gemm(*s, 8192, 8192, 3072);
    for (const bool grouped : {true, false}) {
      printf("%s, experts widened %s\n", s->name, grouped ? "by one group" : "in registers");
      experts_rate("M2", *s, 256, 8, 3072, 1536, {256, 512, 2048, 8192}, grouped);
    }
  }
  experts_rate("M2", kNvRounded, 256, 8, 3072, 1536, {512, 8192});
}
/* MXFP8 with rounded inputs: as codes and widened. */
static void mx_rate(uint32_t tokens, uint32_t n, uint32_t k) {
  bench_weight w(kMx8, 1, n, k);
  if (!takes_here(MM_CU_GEMM_MX, w.d)) return;
  buffer<__nv_bfloat16> x((size_t)tokens * k), y((size_t)tokens * n);
  code_buffers codes(tokens, k);
  fill_random_bf16(x.p, x.n, 7);
  CUDA_OK(mm_cu_encode(codes.d, {x.p, k, nullptr}, {MM_ACT_MXFP8, 0}, 0));
  char what[120];
  const double us = time_graph(
      4,
      [&](cudaStream_t st, int) {
        CUDA_OK(mm_cu_gemm_mx(w.d, {codes.d, y.p, nullptr}, st));
      },
      6);
  snprintf(what, sizeof what, "gemm mxfp8 codes T=%u %u x %u", tokens, n, k);
  flops(what, us, 2.0 * tokens * n * k);
  bench_gemm(kMx8, tokens, n, k);
}
void bench_mx() { mx_rate(8192, 9216, 6144), mx_rate(8192, 6144, 8192), mx_rate(512, 9216, 6144), mx_rate(256, 6144, 8192); }
void bench_attention() {
  bench_gqa("M1", 64, 1, 1024);
  bench_gqa("M2", 48, 1, 1024);
  bench_gqa("M2", 48, 1, 8192);
  bench_gqa("M1", 64, 1, 32768);
  bench_gqa("M2", 48, 1, 65536);
  bench_gqa("M2", 48, 32, 4096);
  bench_gqa("M2", 48, 16, 1024);
  bench_gqa("M2", 48, 64, 1024);
  bench_gqa("M2", 48, 16, 32768);
  bench_gqa("M2", 48, 64, 1024, 131072);
  for (uint32_t n : {1u, 2u, 4u, 8u, 16u}) bench_gqa("M2", 48, n, 1024, 131072);
  for (uint32_t n : {2u, 4u, 16u, 64u}) bench_gqa("M2", 48, n, 8192);
  bench_gqa("M2", 48, 4, 1024, 20000);
  for (uint32_t n : {2048u, 8192u, 32768u}) bench_gqa_prefill(48, n);
  bench_gqa_prefill(64, 8192);
}
void bench_rows() {
  rows_rate(1, 3072);
  rows_rate(1, 8192);
  rows_rate(8192, 8192);
}

/* Sampling settings of the rows. Logits of a normal distribution, of which 0.95 is some 17,000 ids; peaked: 40 ids far above them, as
 * where a model knows what comes. Penalties: of the ids of 1,024 positions. */
struct choice_case {
  const char *name;
  bool draws = true;
  uint32_t top_k = 0;
  double top_p = 1;
  bool peaked = false, masks = false, penalties = false;
  uint32_t logprobs = 0; /* logprobs */
};

static void choice_rate(uint32_t rows, const choice_case &c) {
  const uint32_t vocab = 200064, sets = 2, positions = 1024;
  buffer<float> x;
  buffer<mm_cu_row_sampling> draw;
  buffer<uint32_t> never(MM_CU_WORDS(vocab)), out, ticket(rows), largest(rows * MM_CU_SAMPLE_GROUPS(vocab)), mask, pos;
  buffer<uint32_t> seen((size_t)MM_CU_SEEN * vocab);
  buffer<int32_t> slot, id(rows), chosen(rows), held;
  buffer<unsigned long long> best(rows);
  buffer<mm_cu_row_options> option;
  buffer<mm_logprob> logprobs((size_t)rows * MM_CU_LOGPROBS);
  std::vector<float> v = random_float(vocab, 0, 3), all;
  for (uint32_t i = 0; c.peaked && i < 40; i++) v[g_rng.below(vocab)] = 32 - 0.5f * (float)i;
  for (uint32_t i = 0; i < rows * sets; i++) {
    std::rotate(v.begin(), v.begin() + 1 + g_rng.below(vocab - 1), v.end());
    all.insert(all.end(), v.begin(), v.end());
  }
  std::vector<mm_cu_row_sampling> set(rows);
  std::vector<mm_cu_row_options> options(rows);
  std::vector<uint32_t> place(rows), allowed((size_t)rows * MM_CU_WORDS(vocab));
  std::vector<int32_t> slots(rows), ids((size_t)rows * positions);
  for (uint32_t i = 0; i < rows; i++) {
    place[i] = i, slots[i] = (int32_t)i;
    if (c.draws) set[i] = {1.4426950f, c.top_k, c.top_p, 12345u + i};
    if (c.masks) options[i].mask = 1 + i;
    if (c.penalties) options[i].repetition = 1.0001f, options[i].seen = 1 + i;
    options[i].logprobs = c.logprobs;
  }
  for (auto &w : allowed) w = (uint32_t)(g_rng.next() | g_rng.next());
  for (auto &t : ids) t = (int32_t)g_rng.below(vocab);
  x.put(all), draw.put(set), out.put(place), slot.put(slots), mask.put(allowed), held.put(ids), option.put(options);
  pos.put(std::vector<uint32_t>(rows, positions - 1)), never.zero(), best.zero(), ticket.zero(), seen.zero();
  mm_cu_sample_options q = {};
  q.row = option.p, q.mask = mask.p, q.seen = seen.p, q.logprobs = logprobs.p, q.pos = pos.p, q.ids = held.p, q.positions = positions;
  q.copies = c.masks, q.logprobs_wanted = c.logprobs > 0, q.penalised = c.penalties ? rows : 0, q.longest = positions;
  const mm_cu_sampling kind = !c.draws ? MM_CU_GREEDY : mm_cu_small_top_k(c.top_k, vocab) ? MM_CU_SMALL_TOP_K : MM_CU_ANY_SAMPLING;
  const double us = time_graph(8, [&](cudaStream_t st, int i) {
    float *const from = x.p + (size_t)(i % sets) * rows * vocab;
    const mm_cu_sample a = {from, never.p, vocab, vocab, rows, out.p, slot.p, draw.p, id.p, chosen.p, best.p, ticket.p, largest.p};
    CUDA_OK(mm_cu_adjust(a, from, q, rows, st));
    CUDA_OK(mm_cu_sample_tokens(a, rows, kind, st));
    CUDA_OK(mm_cu_logprobs(a, q, rows, st));
  });
  char what[120];
  snprintf(what, sizeof what, "choice of %u rows from %u logits, %s", rows, vocab, c.name);
  row(what, us, 4.0 * rows * vocab);
}

void bench_choice() {
  choice_case both = {"top-k 50, top-p 0.95", true, 50, 0.95}, masks = both, penalties = both, logprobs = both, peaked = both;
  masks.name = "the same under masks", masks.masks = true;
  penalties.name = "the same under penalties", penalties.penalties = true;
  logprobs.name = "the same, 20 logprobs", logprobs.logprobs = MM_CU_LOGPROBS;
  peaked.name = "the same, peaked", peaked.peaked = true;
  for (uint32_t rows : {1u, 16u, 64u, 256u}) {
    choice_rate(rows, {"greedy", false});
    choice_rate(rows, {"top-k 50", true, 50});
    for (const choice_case &c : {both, peaked, masks, penalties, logprobs}) choice_rate(rows, c);
    choice_rate(rows, {"top-p 0.95", true, 0, 0.95});
    choice_rate(rows, {"top-p 0.95, peaked", true, 0, 0.95, true});
    choice_rate(rows, {"draw", true});
    choice_rate(rows, {"draw, peaked", true, 0, 1, true});
  }
}

/* One launch of the dense kernels of one and of several rows, for a profiler. */
void profile_kernels() {
  for (const scheme *s : {&kFp8, &kInt4, &kNv}) {
    bench_weight w(*s, 1, 24576, 6144);
    buffer<__nv_bfloat16> x((size_t)MM_CU_FEW * w.d.k), y((size_t)MM_CU_FEW * w.d.n);
    fill_random_bf16(x.p, x.n, 7);
    for (uint32_t t : {1u, 8u, 64u}) {
      const auto few = t > 1 ? few_linear(w.d, t) : NULL, product = few ? few : plain_linear(w.d, t);
      CUDA_OK(product(w.d, {x.p, nullptr, y.p, nullptr, t}, 0));
      CUDA_OK(cudaDeviceSynchronize());
    }
  }
}
