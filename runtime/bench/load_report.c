/* Figures of a load test (load_report.h). */
#include "runtime/bench/load_report.h"

#include <math.h>
#include <stdlib.h>

#include "formats/json.h"

typedef struct series {
  const char *name, *title;
  double *value; /* seconds, sorted */
  size_t count, cap;
} series;
enum { TTFT, TPOT, ITL, E2EL, SERIES };

static bool add(series *s, double v, mm_err *err) {
  if (!MM_GROW(s->value, &s->cap, s->count + 1, err)) return false;
  s->value[s->count++] = v;
  return true;
}

static double percentile(const series *s, double p) {
  if (!s->count) return 0;
  const double at = p / 100 * (double)(s->count - 1);
  const size_t i = (size_t)at;
  return i + 1 < s->count ? s->value[i] + (at - (double)i) * (s->value[i + 1] - s->value[i]) : s->value[i];
}

static double mean(const series *s) {
  double sum = 0;
  for (size_t i = 0; i < s->count; i++) sum += s->value[i];
  return s->count ? sum / (double)s->count : 0;
}

static double deviation(const series *s) {
  double sum = 0;
  const double m = mean(s);
  for (size_t i = 0; i < s->count; i++) sum += (s->value[i] - m) * (s->value[i] - m);
  return s->count ? sqrt(sum / (double)s->count) : 0;
}

static const double shown[] = {50, 90, 95, 99};
#define SHOWN (sizeof shown / sizeof *shown)

typedef struct sums {
  series s[SERIES];
  uint64_t completed, input, output, good;
} sums;

static bool has_goal(const mm_load_goal *g) { return g->ttft > 0 || g->tpot > 0 || g->e2el > 0; }

static bool gather(sums *x, const mm_load_goal *goal, const mm_load_request *r, size_t count, mm_err *err) {
  for (size_t i = 0; i < count; i++) {
    if (!r[i].done) continue;
    const double ttft = r[i].first - r[i].sent, e2el = r[i].last - r[i].sent;
    const double tpot = r[i].output > 1 ? (e2el - ttft) / (double)(r[i].output - 1) : 0;
    x->completed++, x->input += r[i].input, x->output += r[i].output;
    x->good +=
        (goal->ttft <= 0 || ttft <= goal->ttft) && (goal->tpot <= 0 || tpot <= goal->tpot) && (goal->e2el <= 0 || e2el <= goal->e2el);
    if (!add(&x->s[TTFT], ttft, err) || !add(&x->s[E2EL], e2el, err) || (r[i].output > 1 && !add(&x->s[TPOT], tpot, err))) return false;
    for (size_t j = 0; j < r[i].gaps; j++)
      if (!add(&x->s[ITL], r[i].gap[j], err)) return false;
  }
  for (size_t i = 0; i < SERIES; i++)
    if (x->s[i].count) qsort(x->s[i].value, x->s[i].count, sizeof *x->s[i].value, mm_by_real);
  return true;
}

static void put_real(mm_json *o, const char *key, double v) { mm_json_set(o, key, mm_json_new_real(v)); }

static void put_series(mm_json *o, const series *s) {
  const struct {
    const char *word;
    double v;
  } row[] = {{"mean", mean(s)}, {"median", percentile(s, 50)}, {"std", deviation(s)}};
  for (size_t i = 0; i < sizeof row / sizeof *row; i++) put_real(o, MM_FORMATTED(48, "%s_%s_ms", row[i].word, s->name), 1e3 * row[i].v);
  for (size_t i = 0; i < SHOWN; i++) put_real(o, MM_FORMATTED(48, "p%.0f_%s_ms", shown[i], s->name), 1e3 * percentile(s, shown[i]));
}

/* A value for each request, in the order of the requests; those of failed ones are 0, "" or empty. */
static void put_lists(mm_json *o, const mm_load_request *r, size_t count) {
  mm_json *in = mm_json_put_list(o, "input_lens"), *out = mm_json_put_list(o, "output_lens"), *first = mm_json_put_list(o, "ttfts"),
          *gaps = mm_json_put_list(o, "itls"), *reason = mm_json_put_list(o, "errors");
  for (size_t i = 0; i < count; i++) {
    mm_json_append(in, mm_json_new_u64(r[i].input));
    mm_json_append(out, mm_json_new_u64(r[i].done ? r[i].output : 0));
    mm_json_append(first, mm_json_new_real(r[i].done ? r[i].first - r[i].sent : 0));
    mm_json_append(reason, mm_json_new_str(r[i].reason));
    mm_json *g = mm_json_append(gaps, mm_json_new_arr());
    for (size_t j = 0; r[i].done && j < r[i].gaps; j++) mm_json_append(g, mm_json_new_real(r[i].gap[j]));
  }
}

static mm_json *to_json(const mm_load_run_facts *x, const sums *y, const mm_load_request *r, size_t count) {
  mm_json *o = MM_JSON_NEW({"model_id", mm_json_new_path(x->model)}, {"base_url", mm_json_new_path(x->url)},
                           {"endpoint", mm_json_new_str(x->endpoint)}, {"num_prompts", mm_json_new_u64(count)},
                           {"request_rate", x->rate > 0 ? mm_json_new_real(x->rate) : mm_json_new_str("inf")},
                           {"max_concurrency", mm_json_new_u64(x->concurrency)}, {"duration", mm_json_new_real(x->seconds)},
                           {"completed", mm_json_new_u64(y->completed)}, {"failed", mm_json_new_u64(count - y->completed)},
                           {"total_input_tokens", mm_json_new_u64(y->input)}, {"total_output_tokens", mm_json_new_u64(y->output)});
  put_real(o, "request_throughput", (double)y->completed / x->seconds);
  if (has_goal(&x->goal)) put_real(o, "request_goodput", (double)y->good / x->seconds);
  put_real(o, "output_throughput", (double)y->output / x->seconds);
  put_real(o, "total_token_throughput", (double)(y->input + y->output) / x->seconds);
  for (size_t i = 0; i < SERIES; i++) put_series(o, &y->s[i]);
  put_lists(o, r, count);
  return o;
}

static void print(FILE *f, const mm_load_run_facts *x, const sums *y, size_t count) {
  mm_show_to(f, x->model);
  fprintf(f, " at %s%s: %llu of %zu requests in %.2f s, %.3f a second\n", x->url, x->endpoint, (unsigned long long)y->completed, count,
          x->seconds, (double)y->completed / x->seconds);
  if (has_goal(&x->goal)) fprintf(f, "goodput: %.3f requests a second\n", (double)y->good / x->seconds);
  fprintf(f, "tokens: %llu in, %llu out; %.1f out a second, %.1f in all\n", (unsigned long long)y->input, (unsigned long long)y->output,
          (double)y->output / x->seconds, (double)(y->input + y->output) / x->seconds);
  fprintf(f, "%-28s %9s %9s %9s %9s %9s\n", "milliseconds", "mean", "p50", "p90", "p95", "p99");
  for (size_t i = 0; i < SERIES; i++) {
    fprintf(f, "%-28s %9.2f", y->s[i].title, 1e3 * mean(&y->s[i]));
    for (size_t j = 0; j < SHOWN; j++) fprintf(f, " %9.2f", 1e3 * percentile(&y->s[i], shown[j]));
    fputc('\n', f);
  }
}

bool mm_load_report(FILE *f, const mm_load_run_facts *x, const mm_load_request *r, size_t count, bool json, mm_err *err) {
  sums y = {.s = {[TTFT] = {.name = "ttft", .title = "time to first token"},
                  [TPOT] = {.name = "tpot", .title = "time per output token"},
                  [ITL] = {.name = "itl", .title = "time between pieces"},
                  [E2EL] = {.name = "e2el", .title = "whole request"}}};
  bool ok = gather(&y, &x->goal, r, count, err);
  if (ok && json) {
    char *text = mm_json_text(to_json(x, &y, r, count), true, err);
    if (text) fprintf(f, "%s\n", text);
    ok = text;
    free(text);
  } else if (ok) {
    print(f, x, &y, count);
  }
  for (size_t i = 0; i < SERIES; i++) free(y.s[i].value);
  return ok;
}
