/* From the backward pass to the sums of a calibration. */
#include "runtime/cpu/cpu_fisher.h"

#include <stdlib.h>

#include "runtime/cpu/cpu_gradient.h"

struct mm_cpu_fisher {
  mm_calibration *calibration;
  mm_cpu_gradient *gradient;
  uint64_t seen; /* tokens */
};

mm_cpu_fisher *mm_cpu_fisher_open(const mm_cpu_fisher_config *c, uint64_t *sums, uint64_t *pass, mm_err *err) {
  mm_cpu_fisher *f = mm_calloc(1, sizeof *f, err);
  uint32_t *tensor = mm_calloc(5 * (size_t)c->shards->pack.model.layers, sizeof *tensor, err);
  bool ok = f && tensor && (f->gradient = mm_cpu_gradient_open(c->shards, c->tokens, c->threads, pass, err)) &&
            mm_calibration_gather_fisher(c->calibration, c->rows, tensor, mm_cpu_gradient_linears(f->gradient, tensor), sums, err);
  free(tensor);
  if (!ok) return mm_cpu_fisher_close(f), NULL;
  f->calibration = c->calibration;
  return f;
}

void mm_cpu_fisher_close(mm_cpu_fisher *f) {
  if (!f) return;
  mm_cpu_gradient_close(f->gradient);
  free(f);
}

static void add(void *ctx, const mm_gradient_rows *of) { mm_calibration_add_fisher(ctx, of->w, of->lead, of->dy, of->rows); }

bool mm_cpu_fisher_add(mm_cpu_fisher *f, const int32_t *id, uint32_t count, mm_err *err) {
  const mm_gradient_window w = {.id = id, .count = count, .first = f->seen + 1};
  double log_p;
  f->seen += count;
  return mm_cpu_gradient_run(f->gradient, &w, add, f->calibration, &log_p, err);
}
