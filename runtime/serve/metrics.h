/* Counters of the server and their text for Prometheus. All in the loop's thread. */
#ifndef MM_RUNTIME_SERVE_METRICS_H
#define MM_RUNTIME_SERVE_METRICS_H

#include "formats/text.h"

#define MM_BUCKETS 14
typedef struct mm_histogram {
  uint64_t count[MM_BUCKETS + 1]; /* the last: above all bounds */
  double sum;
} mm_histogram;
void mm_histogram_add(mm_histogram *h, double seconds);
void mm_histogram_count(mm_histogram *h, uint64_t count); /* of one whose values are no seconds */

#define MM_FINISHES 5
typedef struct mm_metrics {
  mm_histogram first_token, between_tokens, whole; /* seconds */
  mm_histogram queue, prefill, decode, inference;  /* seconds of a choice: to its slot, to its first token, to its last; the last two */
  mm_histogram prompt, reply, most, preempted;     /* tokens of a choice, tokens that its reply may have, and how often it gave way */
  mm_histogram choices;                            /* of a request, for each of its prompts */
  uint64_t finished[MM_FINISHES];                  /* choices, by mm_finish */
  double prompt_seconds;                           /* of choices that have a token: from their slots to the first one */
  uint64_t longest;                                /* tokens of a prompt and its reply together, the most so far */
} mm_metrics;

/* --metric-names, in this order. */
typedef enum mm_metric_names { MM_METRICS_OWN, MM_METRICS_VLLM, MM_METRICS_LLAMA, MM_METRICS_NONE } mm_metric_names;

/* One value, and all of m, in Prometheus' text format 0.0.4. type: "counter", "gauge". */
void mm_metrics_value(mm_text *t, const char *name, const char *type, const char *help, double value);
void mm_metrics_write(const mm_metrics *m, mm_text *t);
/* A histogram: count[i] of `buckets` is of values of at most bound[i], count[buckets] of larger ones. */
void mm_metrics_histogram(mm_text *t, const char *name, const char *help, const double *bound, const uint64_t *count, size_t buckets,
                          double sum);
/* Appends the lines of `metrics` to out, each value with the label model_name; with `vllm` also those that vLLM has, under its names. */
void mm_metrics_label(const char *metrics, const char *model, bool vllm, mm_text *out);

#endif
