/* Sampling on the device: the options are applied to the logits (adjust.cu), then ids are sampled (sample_rows.cu,
 * large_sampling.cu). Launch functions as in kernels.h; the rule is that of sample.h, to the bit. */
#ifndef MM_CUDA_SAMPLING_H
#define MM_CUDA_SAMPLING_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "runtime/engine/sample.h"

/* mm_sampling of one output row as the kernels read it (random_draw.h). */
struct mm_cu_row_sampling {
  float scale = -1; /* mm_draw_scale; negative: greedy */
  uint32_t top_k = 0;
  double top_p = 1;
  uint64_t race = 0;  /* mm_draw_mix(seed, n) */
  uint64_t least = 0; /* mm_draw_share(min_p, MM_DRAW_ONE): masses below it are not sampled; 0: all are */
};
/* For the token at position n of its sequence, n from 1. */
mm_cu_row_sampling mm_cu_row_sampling_of(const mm_sampling *set, uint64_t n);

/* id[rows]: the ids sampled from logits[rows, vocab_rows], -1 where no logit is a number; last_id[slots] is set where the row is the last
 * of its slot. out[rows] names the rows of the step, slot[tokens] is theirs. */
struct mm_cu_sample {
  const float *logits;
  const uint32_t *never; /* [MM_CU_WORDS(vocab)] bit id % 32 of word id / 32: never sampled */
  uint32_t vocab, vocab_rows, tokens;
  const uint32_t *out;
  const int32_t *slot;
  const mm_cu_row_sampling *sampling; /* [rows] */
  int32_t *id, *last_id;
  unsigned long long *best; /* [rows], and ticket: zero between launches */
  uint32_t *ticket;
  uint32_t *largest;  /* [rows, MM_CU_SAMPLE_GROUPS(vocab)]: scratch */
  const int32_t *map; /* [vocab] the id that each stands for, in the race and as it is stored; NULL: itself */
};
#define MM_CU_SAMPLE_GROUP         256 /* ids */
#define MM_CU_SAMPLE_GROUPS(vocab) (((vocab) + MM_CU_SAMPLE_GROUP - 1) / MM_CU_SAMPLE_GROUP)
/* The most general sampling among the rows of a step, which decides the launches: greedy; sampling under a small top-k; any sampling. */
enum mm_cu_sampling { MM_CU_GREEDY, MM_CU_SMALL_TOP_K, MM_CU_ANY_SAMPLING };
#define MM_CU_SMALL_TOP_K_MOST  256       /* a small top-k, at most, */
#define MM_CU_SMALL_TOP_K_VOCAB (1 << 19) /* of so many ids at most */
#ifdef __CUDACC__
__host__ __device__ inline bool mm_cu_small_top_k(uint32_t top_k, uint32_t vocab) {
  return top_k && top_k <= MM_CU_SMALL_TOP_K_MOST && top_k < vocab && vocab <= MM_CU_SMALL_TOP_K_VOCAB;
}
#endif
mm_cu_sampling mm_cu_sampling_of(const mm_sampling *set, uint32_t vocab);
cudaError_t mm_cu_sample_tokens(const mm_cu_sample &a, uint32_t rows, mm_cu_sampling kind, cudaStream_t s);

/* Options of one output row other than sampling itself. */
struct mm_cu_row_options {
  uint32_t mask = 0; /* 1 + its row of mm_cu_sample_options.mask; 0: all ids are allowed */
  uint32_t bias_first = 0, bias_count = 0;
  float repetition = 1, presence = 0, frequency = 0;
  uint32_t prompt = 0;
  uint32_t seen = 0;     /* 1 + its number among the rows with penalties; 0: it has none */
  uint32_t raw = 0;      /* 1 + its row of mm_cu_sample_options.raw, where its logits stay as the model gave them; 0: they are not copied */
  uint32_t logprobs = 0; /* 1 + number of likeliest ids with logprobs; 0: no logprobs */
};

#define MM_CU_SEEN         32 /* rows with penalties that are counted at a time */
#define MM_CU_LOGPROBS     (1 + MM_LOGPROBS)
#define MM_CU_WORDS(vocab) (((vocab) + 31) / 32)

/* Options of the rows of a step; all in device memory. */
struct mm_cu_sample_options {
  const mm_cu_row_options *row; /* [rows] */
  const mm_bias *bias;          /* each row's ids once */
  const uint32_t *mask;         /* [masks, MM_CU_WORDS(vocab)] */
  float *raw;                   /* [raws, vocab] */
  uint32_t *seen;               /* [MM_CU_SEEN, vocab], zero between launches */
  mm_logprob *logprobs;         /* [rows, MM_CU_LOGPROBS] */
  const uint32_t *pos;          /* [tokens] */
  const int32_t *ids;           /* [slots, positions] that the slots hold; -1: not known */
  uint32_t positions;
  bool copies, logprobs_wanted; /* some row has a mask or its logits are copied; some row wants logprobs */
  uint32_t most_bias;           /* of a row */
  uint32_t penalised;           /* rows */
  uint32_t longest;             /* tokens that a penalised row holds, at most */
};
/* Applies the rows' options to the logits before sampling, in place: logits are those of `a`. */
cudaError_t mm_cu_adjust(const mm_cu_sample &a, float *logits, const mm_cu_sample_options &q, uint32_t rows, cudaStream_t s);
/* Writes logprobs (q.logprobs) of the sampled tokens. */
cudaError_t mm_cu_logprobs(const mm_cu_sample &a, const mm_cu_sample_options &q, uint32_t rows, cudaStream_t s);

/* score[rows] = -ln of what the softmax of each row gives id target[row], in f64; ids that are never sampled have no share. Infinite for
 * one of those, no number where some logit is none. */
cudaError_t mm_cu_score(const mm_cu_sample &a, const int32_t *target, double *score, uint32_t rows, cudaStream_t s);

#endif
