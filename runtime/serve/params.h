/* How a request wants its reply to be generated: what the APIs share. */
#ifndef MM_RUNTIME_SERVE_PARAMS_H
#define MM_RUNTIME_SERVE_PARAMS_H

#include "formats/body.h"
#include "runtime/serve/generation.h"

#define MM_CHOICES  128
#define MM_BIAS_MAX 1024

typedef struct mm_params {
  mm_sampling sampling;
  uint32_t max_tokens; /* 0: as many as there is room for */
  uint32_t n;
  mm_stop stop[MM_STOPS];
  uint32_t stop_count;
  const int32_t *end; /* [end_count] ids that end the reply */
  uint32_t end_count;
  uint32_t end_own;      /* the first so many are the checkpoint's */
  bool logprobs;         /* wanted; sampling.top_logprobs is at least 1 then */
  uint32_t top_logprobs; /* alternatives to return */
  bool scores;           /* the same of the prompt's tokens */
  uint32_t top_scores;
  bool stream, include_usage, running_usage, include_stop, special; /* running_usage: in every chunk, of its choice alone */
  uint64_t salt;
  uint32_t drafts;  /* proposals for one step, at most */
  bool timings;     /* replies have llama.cpp's, of the first choice; chunks of their own */
  bool progress;    /* streams have llama.cpp's reports of the prompt's progress */
  bool show_drafts; /* usage has how many there were and how many were right */
  int priority;
  double deadline;
} mm_params;

#endif
