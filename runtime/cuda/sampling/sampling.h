/* The next token on the device: what rows ask for, done to their logits before (adjust.cu), and the choice (sample_rows.cu,
 * large_sampling.cu). Launch functions as in kernels.h; the rule is that of sample.h, to the bit. */
#ifndef MM_CUDA_CHOOSE_H
#define MM_CUDA_CHOOSE_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "runtime/engine/sample.h"

/* mm_sampling of one output row, and its draw (random_draw.h). */
struct mm_cu_draw {
  float scale = -1; /* mm_draw_scale; negative: greedy */
  uint32_t top_k = 0;
  double top_p = 1;
  uint64_t race = 0;  /* mm_draw_mix(seed, n) */
  uint64_t least = 0; /* mm_draw_share(min_p, MM_DRAW_ONE): masses below it are not drawn; 0: all are */
};
/* The draw of the token at position n of its sequence, n from 1. */
mm_cu_draw mm_cu_draw_of(const mm_sampling *set, uint64_t n);

/* id[rows]: the choices from logits[rows, vocab_rows], -1 where there is none; each is kept in chosen[slots] where its row is the last
 * of its slot. out[rows] names the rows of the step, slot[tokens] is theirs. */
struct mm_cu_choose {
  const float *logits;
  const uint32_t *never; /* [MM_CU_WORDS(vocab)] bit id % 32 of word id / 32: not to be chosen */
  uint32_t vocab, vocab_rows, tokens;
  const uint32_t *out;
  const int32_t *slot;
  const mm_cu_draw *draw; /* [rows] */
  int32_t *id, *chosen;
  unsigned long long *best; /* [rows], and ticket: zero between launches */
  uint32_t *ticket;
  uint32_t *largest; /* [rows, MM_CU_CHOICE_GROUPS(vocab)]: room for draws */
};
#define MM_CU_CHOICE_GROUP         256 /* ids */
#define MM_CU_CHOICE_GROUPS(vocab) (((vocab) + MM_CU_CHOICE_GROUP - 1) / MM_CU_CHOICE_GROUP)
/* The most general sampling among the rows of a step, which decides the launches: greedy; sampling under a small top-k; any sampling. */
enum mm_cu_draws { MM_CU_GREEDY, MM_CU_FEW_DRAWS, MM_CU_DRAWS };
#define MM_CU_FEW_DRAWN 256       /* a top-k of few, at most, */
#define MM_CU_FEW_VOCAB (1 << 19) /* of so many ids at most */
#ifdef __CUDACC__
__host__ __device__ inline bool mm_cu_draws_few(uint32_t top_k, uint32_t vocab) {
  return top_k && top_k <= MM_CU_FEW_DRAWN && top_k < vocab && vocab <= MM_CU_FEW_VOCAB;
}
#endif
mm_cu_draws mm_cu_draws_of(const mm_sampling *set, uint32_t vocab);
cudaError_t mm_cu_choose_tokens(const mm_cu_choose &a, uint32_t rows, mm_cu_draws draws, cudaStream_t s);

/* Options of one output row other than sampling itself. */
struct mm_cu_ask {
  uint32_t mask = 0; /* 1 + its row of mm_cu_asks.mask; 0: all ids are allowed */
  uint32_t bias_first = 0, bias_count = 0;
  float repetition = 1, presence = 0, frequency = 0;
  uint32_t prompt = 0;
  uint32_t seen = 0;     /* 1 + its number among the rows with penalties; 0: it has none */
  uint32_t raw = 0;      /* 1 + its row of mm_cu_asks.raw, where its logits stay as the model gave them; 0: they are not copied */
  uint32_t logprobs = 0; /* 1 + number of likeliest ids with logprobs; 0: no logprobs */
};

#define MM_CU_SEEN         32 /* rows with penalties that are counted at a time */
#define MM_CU_LOGPROBS     (1 + MM_LOGPROBS)
#define MM_CU_WORDS(vocab) (((vocab) + 31) / 32)

/* Options of the rows of a step; all in device memory. */
struct mm_cu_asks {
  const mm_cu_ask *row; /* [rows] */
  const mm_bias *bias;  /* each row's ids once */
  const uint32_t *mask; /* [masks, MM_CU_WORDS(vocab)] */
  float *raw;           /* [raws, vocab] */
  uint32_t *seen;       /* [MM_CU_SEEN, vocab], zero between launches */
  mm_logprob *logprobs; /* [rows, MM_CU_LOGPROBS] */
  const uint32_t *pos;  /* [tokens] */
  const int32_t *ids;   /* [slots, positions] that the slots hold; -1: not known */
  uint32_t positions;
  bool copies, logprobs_wanted; /* some row has a mask or keeps a copy of its logits; some row wants logprobs */
  uint32_t most_bias;           /* of a row */
  uint32_t penalised;           /* rows */
  uint32_t longest;             /* tokens that a penalised row holds, at most */
};
/* Applies the rows' options to the logits before sampling, in place: logits are those of `a`. */
cudaError_t mm_cu_adjust(const mm_cu_choose &a, float *logits, const mm_cu_asks &q, uint32_t rows, cudaStream_t s);
/* Writes logprobs (q.logprobs) of the sampled tokens. */
cudaError_t mm_cu_logprobs(const mm_cu_choose &a, const mm_cu_asks &q, uint32_t rows, cudaStream_t s);

/* score[rows] = -ln of what the softmax of each row gives id target[row], in f64; ids that are not to be chosen have no share. Infinite for
 * one of those, no number where some logit is none. */
cudaError_t mm_cu_score(const mm_cu_choose &a, const int32_t *target, double *score, uint32_t rows, cudaStream_t s);

#endif
