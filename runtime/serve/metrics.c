/* Prometheus' text. */
#include "runtime/serve/metrics.h"

#include <stdlib.h>
#include <string.h>

static const double seconds_bound[MM_BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 30, 120};
static const double count_bound[MM_BUCKETS] = {0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 20000, 100000};

static void add(mm_histogram *h, const double *bound, double value) {
  size_t i = 0;
  while (i < MM_BUCKETS && value > bound[i]) i++;
  h->count[i]++;
  h->sum += value;
}

void mm_histogram_add(mm_histogram *h, double seconds) { add(h, seconds_bound, seconds); }
void mm_histogram_count(mm_histogram *h, uint64_t count) { add(h, count_bound, (double)count); }

void mm_metrics_histogram(mm_text *t, const char *name, const char *help, const double *bound, const uint64_t *count, size_t buckets,
                          double sum) {
  uint64_t n = 0;
  mm_text_printf(t, "# HELP minimax_%s %s\n# TYPE minimax_%s histogram\n", name, help, name);
  for (size_t i = 0; i < buckets; i++)
    mm_text_printf(t, "minimax_%s_bucket{le=\"%g\"} %llu\n", name, bound[i], (unsigned long long)(n += count[i]));
  n += count[buckets];
  mm_text_printf(t, "minimax_%s_bucket{le=\"+Inf\"} %llu\nminimax_%s_sum %.9g\nminimax_%s_count %llu\n", name, (unsigned long long)n, name,
                 sum, name, (unsigned long long)n);
}

void mm_metrics_value(mm_text *t, const char *name, const char *type, const char *help, double value) {
  mm_text_printf(t, "# HELP minimax_%s %s\n# TYPE minimax_%s %s\nminimax_%s %.17g\n", name, help, name, type, name, value);
}

void mm_metrics_write(const mm_metrics *m, mm_text *t) {
  static const char *const finish[MM_FINISHES] = {"stop", "length", "cancelled", "deadline", "error"};
  mm_text_put(t, "# HELP minimax_finished_total Choices by how they ended.\n# TYPE minimax_finished_total counter\n");
  for (int i = 0; i < MM_FINISHES; i++)
    mm_text_printf(t, "minimax_finished_total{reason=\"%s\"} %llu\n", finish[i], (unsigned long long)m->finished[i]);
  const struct {
    const char *name, *help;
    const double *bound;
    const mm_histogram *of;
  } h[] = {{"first_token_seconds", "From a request to its first token.", seconds_bound, &m->first_token},
           {"between_tokens_seconds", "From a token to the next.", seconds_bound, &m->between_tokens},
           {"request_seconds", "From a request to the end of its reply.", seconds_bound, &m->whole},
           {"queue_seconds", "From a request to the slot of a choice.", seconds_bound, &m->queue},
           {"prefill_seconds", "From the slot of a choice to its first token.", seconds_bound, &m->prefill},
           {"decode_seconds", "From the first token of a choice to its last.", seconds_bound, &m->decode},
           {"inference_seconds", "From the slot of a choice to its last token.", seconds_bound, &m->inference},
           {"choice_prompt_tokens", "Tokens of the prompt of a choice.", count_bound, &m->prompt},
           {"choice_reply_tokens", "Tokens of the reply of a choice.", count_bound, &m->reply},
           {"choice_max_tokens", "Tokens that the reply of a choice may have.", count_bound, &m->most},
           {"choice_preempted", "Times that a choice gave its place up.", count_bound, &m->preempted},
           {"request_choices", "Choices for a prompt.", count_bound, &m->choices}};
  for (size_t i = 0; i < sizeof h / sizeof *h; i++)
    mm_metrics_histogram(t, h[i].name, h[i].help, h[i].bound, h[i].of->count, MM_BUCKETS, h[i].of->sum);
}

/* ---- Labels, and names of vLLM ---- */

/* Names without the prefix, and what vLLM calls the same. */
static const struct {
  const char *name, *other;
} vllm_name[] = {{"requests_running", "num_requests_running"},
                 {"requests_waiting", "num_requests_waiting"},
                 {"requests_preempted_total", "num_preemptions_total"},
                 {"prompt_tokens_total", "prompt_tokens_total"},
                 {"reply_tokens_total", "generation_tokens_total"},
                 {"cached_tokens_total", "prefix_cache_hits_total"},
                 {"kv_cache_usage", "kv_cache_usage_perc"},
                 {"drafts_total", "spec_decode_num_drafts_total"},
                 {"drafted_tokens_total", "spec_decode_num_draft_tokens_total"},
                 {"accepted_tokens_total", "spec_decode_num_accepted_tokens_total"},
                 {"first_token_seconds", "time_to_first_token_seconds"},
                 {"between_tokens_seconds", "inter_token_latency_seconds"},
                 {"request_seconds", "e2e_request_latency_seconds"},
                 {"queue_seconds", "request_queue_time_seconds"},
                 {"prefill_seconds", "request_prefill_time_seconds"},
                 {"decode_seconds", "request_decode_time_seconds"},
                 {"inference_seconds", "request_inference_time_seconds"},
                 {"choice_prompt_tokens", "request_prompt_tokens"},
                 {"choice_reply_tokens", "request_generation_tokens"},
                 {"choice_max_tokens", "request_params_max_tokens"},
                 {"choice_preempted", "request_num_preemptions"},
                 {"request_choices", "request_params_n"},
                 {"step_tokens", "iteration_tokens_total"}};

#define PREFIX "minimax_"

/* A label's value: a backslash, a quote and a newline are escaped; bytes that are not UTF-8, for which a scrape fails, become U+FFFD. */
static void put_escaped(mm_text *t, const char *s) {
  for (size_t n; *s; s += n) {
    const size_t len = (uint8_t)*s < 0x80 ? 1 : mm_utf8_len(s, strlen(s));
    n = mm_max(len, 1);
    if (*s == '\n')
      mm_text_put(t, "\\n");
    else if (!len)
      mm_text_put(t, "\xef\xbf\xbd");
    else
      mm_text_printf(t, *s == '"' || *s == '\\' ? "\\%.*s" : "%.*s", (int)n, s);
  }
}

/* A line of a value, whose name ends after `name` bytes, with the label, under this prefix and name. */
static void put_value(mm_text *out, const char *prefix, const char *name, size_t name_n, const char *rest, size_t rest_n,
                      const char *model) {
  const bool labelled = *rest == '{';
  mm_text_put(out, prefix);
  mm_text_add(out, name, name_n);
  mm_text_put(out, "{model_name=\"");
  put_escaped(out, model);
  mm_text_put(out, labelled ? "\"," : "\"}");
  mm_text_add(out, rest + labelled, rest_n - labelled);
}

/* The name of vLLM for a metric, or for a part of a histogram; NULL: it has none. *more: bytes behind what the table has. */
static const char *other_name(const char *name, size_t n, size_t *more) {
  static const char *const ends[] = {"", "_bucket", "_sum", "_count"};
  for (size_t i = 0; i < sizeof vllm_name / sizeof *vllm_name; i++)
    for (size_t k = 0; k < sizeof ends / sizeof *ends; k++) {
      const size_t own = strlen(vllm_name[i].name), end = strlen(ends[k]);
      if (own + end != n || memcmp(name, vllm_name[i].name, own) != 0 || memcmp(name + own, ends[k], end) != 0) continue;
      return *more = end, vllm_name[i].other;
    }
  return NULL;
}

/* The line, a comment or a value, under the name of vLLM, if that has one. */
static void put_other(mm_text *out, const char *line, size_t n, const char *model) {
  const size_t comment = *line == '#' ? strlen("# HELP ") : 0, begin = comment + strlen(PREFIX);
  size_t name = 0, more;
  if (n < begin || memcmp(line + comment, PREFIX, strlen(PREFIX)) != 0) return;
  while (begin + name < n && line[begin + name] != ' ' && line[begin + name] != '{') name++;
  const char *other = other_name(line + begin, name, &more);
  if (!other) return;
  mm_text whole = {0};
  mm_text_put(&whole, other);
  mm_text_add(&whole, line + begin + name - more, more);
  mm_text_add(out, line, comment);
  if (comment) {
    mm_text_put(out, "vllm:");
    mm_text_add(out, whole.p, whole.n);
    mm_text_add(out, line + begin + name, n - begin - name);
  } else {
    put_value(out, "vllm:", whole.p, whole.n, line + begin + name, n - begin - name, model);
  }
  out->failed |= whole.failed;
  free(whole.p);
}

void mm_metrics_label(const char *metrics, const char *model, bool vllm, mm_text *out) {
  for (int other = 0; other <= vllm; other++) {
    for (const char *line = metrics; *line;) {
      const size_t n = strcspn(line, "\n") + 1, name = strcspn(line, " {");
      if (other)
        put_other(out, line, n, model);
      else if (*line == '#')
        mm_text_add(out, line, n);
      else
        put_value(out, "", line, name, line + name, n - name, model);
      line += n;
    }
  }
}
