/* The CPU backend's dense MLP: the MLP of a dense layer, or the shared expert next to routed ones. */
#include "runtime/cpu/cpu_backend.h"

void mm_cpu_mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
  const uint32_t tokens = b->batch->tokens;
  const size_t ir = down->k;
  float *const to = add ? b->mlp.out : y.data;
  mm_cpu_observe(b, up, 0, x.data, NULL, tokens);
  mm_cpu_prefetch_after(b, up);
  mm_cpu_matmul(b, b->mlp.up, mm_cpu_input(b, x, up), NULL, tokens, up, mm_cpu_form_of(b, up));
  for (size_t t = 0; t < tokens; t++) mm_cpu_activate(b, b->mlp.act + t * ir, b->mlp.up + t * 2 * ir, b->mlp.up + (t * 2 + 1) * ir, ir);
  mm_cpu_observe(b, down, 0, b->mlp.act, NULL, tokens);
  mm_cpu_round(b, b->mlp.act, tokens, down);
  mm_cpu_prefetch_after(b, down);
  mm_cpu_matmul(b, to, b->mlp.act, NULL, tokens, down, mm_cpu_form_of(b, down));
  for (size_t i = 0; add && i < (size_t)tokens * y.width; i++) ((float *)y.data)[i] += to[i];
}
