/* Results of a step of the CUDA backend, judged against doubles: a row and a head of the last layer's attention by chance, its
 * routing of that row, and all choices of tokens. Caches, projections, router logits and logits are taken as the step has them. */
#ifndef MM_TESTS_OPS_WITNESS_H
#define MM_TESTS_OPS_WITNESS_H

#include "runtime/cuda/backend.h"
#include "runtime/engine/ops.h"
#include "tests/ops/gpu.h"

/* Errors planted in what is compared; each must be found. */
enum witness_plant { WITNESS_NOTHING, WITNESS_ROW, WITNESS_EXPERT, WITNESS_TOKEN };

struct witness {
  const mm_forward *f;
  struct mm_sampler *sampler;
  witness_plant plant = WITNESS_NOTHING;
  uint32_t rows = 0, judged = 0; /* attention's: looked at, and with scores that rounding does not turn over */
  uint32_t routed = 0, chosen = 0, wrong = 0;
  double worst_attention = 0, worst_state = 0; /* errors over what is allowed */
  std::string first;                           /* what was wrong first */

  explicit witness(const mm_forward *forward);
  ~witness();
  /* Judges a batch that just ended. state: the last layer's lightning states before it, or NULL; id[out_count]: what it chose, or NULL. */
  void look(const mm_batch &batch, const float *state, const std::vector<float> *id);

 private:
  struct place {
    uint32_t row, slot, pos, first, start; /* of the span: its first row, the tokens before it */
  };
  bool single(const place &at) const;
  bool find_row(const mm_batch &batch, place *at) const;
  std::vector<double> turned_query(const place &at, uint32_t head) const;
  void look_attention(const place &at);
  void look_lightning(const place &at, const float *state);
  void look_routing(const place &at);
  void look_choices(const mm_batch &batch, const std::vector<float> &id);
  void found(bool ok, const char *what, const place &at, double error);
};

#endif
