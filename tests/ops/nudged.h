/* The CPU backend with what each op leaves rounded to bf16, as the CUDA backend stores it: how far its numbers are from those of f32 says
 * what the last bits of rows do, where inputs of products are rounded to codes on top. Keys, values and the rows between the products of
 * an MLP stay as they are. */
#ifndef MM_TESTS_NUDGED_H
#define MM_TESTS_NUDGED_H

#include <stdint.h>
#include <string.h>

#include "runtime/engine/ops.h"

namespace nudged {

inline uint32_t rows; /* of every act: limits.max_tokens */

inline void store(mm_act a) {
  float *const x = static_cast<float *>(a.data);
  for (size_t i = 0; i < (size_t)rows * a.width; i++) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x[i], &bits, sizeof bits);
  }
}

inline void embed(mm_backend *b, mm_act x, const mm_packed *table) { mm_ops_cpu.embed(b, x, table), store(x); }
inline void norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) { mm_ops_cpu.norm(b, y, x, w, eps), store(y); }
inline void linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w) { mm_ops_cpu.linear(b, y, x, w), store(y); }
inline void gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  mm_ops_cpu.gqa(b, layer, o, qkv, q_norm, k_norm), store(o);
}
inline void experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  mm_ops_cpu.experts(b, y, x, w13, w2), store(y);
}
inline void combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
  mm_ops_cpu.combine(b, h, n, residual, branch, scale, w, eps), store(h), store(n);
}
inline void mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
  mm_ops_cpu.mlp(b, y, x, up, down, add), store(y);
}
inline void attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  mm_ops_cpu.draft.attend(b, layer, o, qkv, q_norm, k_norm), store(o);
}
inline void combine_whole(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                          double eps) {
  mm_ops_cpu.draft.combine(b, h, n, residual, branch, scale, w, eps), store(h), store(n);
}
inline void chain(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv) { mm_ops_cpu.draft.chain(b, pass, o, qkv), store(o); }

/* Of models whose steps have no other ops. */
inline const mm_ops *ops(uint32_t max_tokens) {
  static mm_ops all;
  all = mm_ops_cpu, rows = max_tokens;
  all.embed = embed, all.norm = norm, all.linear = linear, all.gqa = gqa, all.experts = experts, all.combine = combine, all.mlp = mlp;
  all.draft.attend = attend, all.draft.combine = combine_whole, all.draft.chain = chain;
  return &all;
}

}  // namespace nudged

#endif
