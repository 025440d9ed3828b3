/* Second moments of the gradients of the log-likelihood with respect to the outputs of linears, the Fisher information of each linear's
 * outputs: under ids that the model's own distribution gives, so that the text's next ids do not matter (minimax-eval --collect --fisher).
 */
#ifndef MM_CPU_FISHER_H
#define MM_CPU_FISHER_H

#include "runtime/engine/calibration.h"

typedef struct mm_cpu_fisher_config {
  const mm_shards *shards;     /* open until close, as */
  mm_calibration *calibration; /* this one, which the sums go to */
  uint32_t rows;               /* of a block */
  uint32_t tokens;             /* of a window, at most */
  unsigned threads;            /* no bit depends on them */
} mm_cpu_fisher_config;

typedef struct mm_cpu_fisher mm_cpu_fisher;
/* Refusals are those of mm_cpu_gradient_open and mm_calibration_gather_fisher. Bytes of memory: *sums half of which the file takes, *pass.
 */
mm_cpu_fisher *mm_cpu_fisher_open(const mm_cpu_fisher_config *c, uint64_t *sums, uint64_t *pass, mm_err *err);
void mm_cpu_fisher_close(mm_cpu_fisher *f); /* accepts NULL */
/* Adds a window id[count]. The id after token t of all windows so far is drawn with the random number t of seed 0, t from 1 (sample.h). */
MM_MUST_USE bool mm_cpu_fisher_add(mm_cpu_fisher *f, const int32_t *id, uint32_t count, mm_err *err);

#endif
