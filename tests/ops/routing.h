/* The routing lists, and routers to fill them with. */
#ifndef MM_TESTS_OPS_ROUTING_H
#define MM_TESTS_OPS_ROUTING_H

#include <algorithm>

#include "tests/ops/gpu.h"

struct route_buffers {
  buffer<float> logits, weight, slot_weight;
  buffer<unsigned long long> published;
  buffer<uint32_t> id, ticket, used, slot_expert, slot_tokens, offset, pair;
  mm_cu_route r = {};
  route_buffers(uint32_t experts, uint32_t top_k, uint32_t tokens, bool sigmoid, const float *bias) {
    uint32_t slots = std::min(experts, MM_CU_DECODE_ROWS * top_k), pairs = tokens * top_k;
    logits.open((size_t)tokens * experts), weight.open(pairs), id.open(pairs), ticket.open(1), ticket.zero();
    used.open(1), slot_expert.open(slots), slot_tokens.open(slots), slot_weight.open((size_t)slots * MM_CU_DECODE_ROWS);
    published.open(MM_CU_MAX_TOP_K), offset.open(experts + 1), pair.open(pairs);
    r = {experts,  top_k,  sigmoid,       bias,          nullptr,       logits.p,    id.p,     weight.p,
         ticket.p, used.p, slot_expert.p, slot_tokens.p, slot_weight.p, published.p, offset.p, pair.p};
  }
};

/* A router as bf16 or f32, by chance. */
struct router_weight {
  std::vector<float> w;
  buffer<float> wide, product;
  buffer<__nv_bfloat16> narrow, piece;
  mm_cu_router d = {};
  router_weight(uint32_t experts, uint32_t k, uint32_t tokens) {
    const auto rounded = random_bf16((size_t)experts * k, 1 / sqrt((double)k));
    d = {nullptr, g_rng.below(2) == 0, k};
    if (d.wide) {
      w = random_float((size_t)experts * k, 0, 1 / sqrt((double)k)), wide.put(w), d.w = wide.p;
      piece.open(3 * w.size()), d.piece = piece.p, product.open((size_t)tokens * 3 * experts), d.product = product.p;
      CUDA_OK(mm_cu_split(piece.p, wide.p, w.size(), 0));
    } else {
      for (auto v : rounded) w.push_back(to_float(v));
      narrow.put(rounded), d.w = narrow.p;
    }
  }
};

#endif
