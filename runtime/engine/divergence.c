/* Divergence of the logits of a checkpoint from those of a reference: mean, nearest-rank percentiles, agreement of the likeliest ids. */
#include "runtime/engine/divergence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "formats/option.h"
#include "loader/companions.h"

/* log Σ exp of a row, and its largest entry. */
static double log_sum(const float *x, uint32_t n, uint32_t *best) {
  double sum = 0;
  *best = 0;
  for (uint32_t i = 1; i < n; i++)
    if (x[i] > x[*best]) *best = i;
  for (uint32_t i = 0; i < n; i++) sum += exp((double)x[i] - (double)x[*best]);
  return (double)x[*best] + log(sum);
}

bool mm_divergence_add(mm_divergence *d, const float *reference, const float *measured, uint32_t vocab) {
  uint32_t ours, theirs;
  double theirs_sum = log_sum(reference, vocab, &theirs), ours_sum = log_sum(measured, vocab, &ours), kl = 0;
  for (uint32_t i = 0; i < vocab; i++) {
    double p = (double)reference[i] - theirs_sum;
    if (p > -(double)INFINITY) kl += exp(p) * (p - ((double)measured[i] - ours_sum));
  }
  if (!isfinite(theirs_sum) || !isfinite(kl)) return false; /* a reference without a distribution adds nothing to kl */
  d->sum += kl;
  d->agree += ours == theirs;
  d->kl[d->tokens++] = kl;
  return true;
}

/* The least of the sorted divergences that p % of them do not exceed. */
static double percentile(const mm_divergence *d, uint64_t p) { return d->kl[(d->tokens * p + 99) / 100 - 1]; }

bool mm_divergence_print(const mm_divergence *d, const mm_divergence_of *of, bool json, mm_err *err) {
  mm_hex manifest;
  const double mean = d->sum / (double)d->tokens, agree = (double)d->agree / (double)d->tokens;
  qsort(d->kl, d->tokens, sizeof *d->kl, mm_by_real);
  const double p50 = percentile(d, 50), p90 = percentile(d, 90), p99 = percentile(d, 99), most = percentile(d, 100);
  if (!json) {
    printf("KL %.6f nats a token (p50 %.6f, p90 %.6f, p99 %.6f, largest %.4f), same first choice at %.2f %% of %llu tokens in %llu %s\n",
           mean, p50, p90, p99, most, 100 * agree, (unsigned long long)d->tokens, (unsigned long long)of->count, of->unit);
    return true;
  }
  if (of->pack && !mm_manifest_hex(of->pack, &manifest, err)) return false;
  mm_json *o = MM_JSON_NEW({"checkpoint", mm_json_new_path(of->checkpoint)}, {"reference", mm_json_new_path(of->reference)});
  if (of->pack) mm_json_put_text(o, "manifest_sha256", manifest.text);
  MM_JSON_PUT(o, {"kl", mm_json_new_real(mean)}, {"kl_p50", mm_json_new_real(p50)}, {"kl_p90", mm_json_new_real(p90)},
              {"kl_p99", mm_json_new_real(p99)}, {"kl_most", mm_json_new_real(most)}, {"first_choice_share", mm_json_new_real(agree)},
              {"tokens", mm_json_new_u64(d->tokens)}, {of->unit, mm_json_new_u64(of->count)});
  return mm_program_json(o, false, err);
}
