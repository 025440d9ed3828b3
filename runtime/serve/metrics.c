/* Prometheus' text. */
#include "runtime/serve/metrics.h"

static const double bound[MM_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30, 120};

void mm_histogram_add(mm_histogram *h, double seconds) {
  size_t i = 0;
  while (i < MM_BUCKETS && seconds > bound[i]) i++;
  h->count[i]++;
  h->sum += seconds;
}

static void put_histogram(mm_text *t, const char *name, const char *help, const mm_histogram *h) {
  uint64_t sum = 0;
  mm_text_printf(t, "# HELP minimax_%s %s\n# TYPE minimax_%s histogram\n", name, help, name);
  for (size_t i = 0; i < MM_BUCKETS; i++)
    mm_text_printf(t, "minimax_%s_bucket{le=\"%g\"} %llu\n", name, bound[i], (unsigned long long)(sum += h->count[i]));
  sum += h->count[MM_BUCKETS];
  mm_text_printf(t, "minimax_%s_bucket{le=\"+Inf\"} %llu\nminimax_%s_sum %.9g\nminimax_%s_count %llu\n", name, (unsigned long long)sum,
                 name, h->sum, name, (unsigned long long)sum);
}

void mm_metrics_value(mm_text *t, const char *name, const char *type, const char *help, double value) {
  mm_text_printf(t, "# HELP minimax_%s %s\n# TYPE minimax_%s %s\nminimax_%s %.17g\n", name, help, name, type, name, value);
}

void mm_metrics_write(const mm_metrics *m, mm_text *t) {
  static const char *const finish[MM_FINISHES] = {"stop", "length", "cancelled", "deadline", "error"};
  mm_text_put(t, "# HELP minimax_finished_total Choices by how they ended.\n# TYPE minimax_finished_total counter\n");
  for (int i = 0; i < MM_FINISHES; i++)
    mm_text_printf(t, "minimax_finished_total{reason=\"%s\"} %llu\n", finish[i], (unsigned long long)m->finished[i]);
  put_histogram(t, "first_token_seconds", "From a request to its first token.", &m->first_token);
  put_histogram(t, "between_tokens_seconds", "From a token to the next.", &m->between_tokens);
  put_histogram(t, "request_seconds", "From a request to the end of its reply.", &m->whole);
}
