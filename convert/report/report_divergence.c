/* The divergence of a checkpoint's logits in its report: read from the JSON of minimax-eval --against, shown above the weights' errors. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/report/report_error.h"

#define FILE_MAX (UINT64_C(1) << 20) /* bytes of the JSON */

enum { KL, P50, P90, P99, MOST, SHARE, TOKENS, FIGURES };
static const char *const figure[FIGURES] = {"kl", "kl_p50", "kl_p90", "kl_p99", "kl_most", "first_choice_share", "tokens"};
#define ROUNDED 1e-6 /* what sums of doubles leave of a divergence of 0, and of a mean below the largest */

/* What each figure has to be, where x are the numbers; NULL: it is. */
static const char *wrong_figure(const double x[FIGURES], int i) {
  if (!isfinite(x[i])) return "a finite number";
  if (i == TOKENS) return x[i] >= 1 ? NULL : "an integer of at least 1";
  if (i == SHARE) return x[i] >= 0 && x[i] <= 1 ? NULL : "a share from 0 to 1";
  if (x[i] < -ROUNDED) return "a number of at least 0";
  if (i > P50 && x[i] < x[i - 1]) return "a percentile of at least the one below it";
  return i != KL || x[KL] <= x[MOST] + ROUNDED ? NULL : "a mean of at most kl_most";
}

static bool check_figures(const mm_json *o, const char *path, mm_err *err) {
  double x[FIGURES];
  for (int i = 0; i < FIGURES; i++) {
    const mm_json_type type = mm_json_type_of(mm_json_get(o, figure[i]));
    if (type == MM_JSON_NULL)
      return mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(path, NULL),
                     "found no \"%s\", expected the output of minimax-eval --against REF --json", figure[i]);
    x[i] = type == MM_JSON_INT || (type == MM_JSON_REAL && i != TOKENS) ? mm_json_number(mm_json_get(o, figure[i])) : (double)NAN;
  }
  for (int i = 0; i < FIGURES; i++) {
    const char *expected = wrong_figure(x, i);
    if (expected)
      return mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(path, NULL), "key \"%s\": found %s, expected %s", figure[i],
                     MM_SHOWN_JSON(mm_json_get(o, figure[i])), expected);
  }
  return true;
}

bool mm_report_divergence_read(mm_json **out, const char *path, const char *dir, const char *manifest, mm_err *err) {
  mm_json *o = mm_json_load(path, FILE_MAX, err);
  if (!o) return false;
  const mm_json *made = mm_json_get(o, "manifest_sha256");
  const char *lacks = mm_json_type_of(made) != MM_JSON_STR                          ? "manifest_sha256"
                      : mm_json_type_of(mm_json_get(o, "reference")) != MM_JSON_STR ? "reference"
                                                                                    : NULL;
  bool ok;
  if (lacks)
    ok = mm_fail(err, MM_BAD_INPUT, "E_JSON", mm_at(path, NULL),
                 "found no \"%s\", expected the output of minimax-eval --against REF --json", lacks);
  else if (!mm_json_is(made, manifest))
    ok = mm_fail(err, MM_USAGE, "E_USAGE", mm_at(path, NULL),
                 "found the divergence of a checkpoint with manifest %.12s…, expected %.12s… of %s", mm_json_str(made), manifest, dir);
  else
    ok = check_figures(o, path, err);
  if (ok)
    *out = o;
  else
    mm_json_free(o);
  return ok;
}

static double at(const mm_json *o, const char *key) { return mm_json_number(mm_json_get(o, key)); }

void mm_report_divergence_html(FILE *f, const mm_json *o, void (*put_text)(FILE *, const char *)) {
  fputs("<h2>Outputs</h2>\n<dl>\n<dt>reference<dd>", f);
  put_text(f, mm_json_str(mm_json_get(o, "reference")));
  fprintf(
      f,
      "\n<dt>KL divergence<dd>%.6f nats a token on average; p50 %.6f, p90 %.6f, p99 %.6f, largest %.4f\n"
      "<dt>top-1 agreement<dd>%.2f %% of %lld tokens\n</dl>\n"
      "<p>KL divergence is Σ p · ln(p / q) over the vocabulary, p the reference's probability of a token and q this checkpoint's. Top-1 "
      "agreement is the share of positions where both have the same most likely token.</p>\n",
      at(o, "kl"), at(o, "kl_p50"), at(o, "kl_p90"), at(o, "kl_p99"), at(o, "kl_most"), 100 * at(o, "first_choice_share"),
      (long long)mm_json_int(mm_json_get(o, "tokens")));
}
