/* Decides which rows of a step take the attention kernels of decode steps: single tokens, and verify rows, which are 2 to MM_CU_VERIFY rows
 * of one sequence, each an output. They are the spans before the first one that is neither. A lightning state advances row by row, so
 * models with lightning layers have no verify rows. */
#include "runtime/cuda/backend.h"

/* Returns true if each row of the span is an output. *at: index of the first output not before the span; outputs ascend, and so must
 * the spans of successive calls. */
static bool all_wanted(const mm_batch *batch, const mm_span &s, uint32_t *at) {
  while (*at < batch->out_count && batch->out[*at] < s.first) ++*at;
  return batch->out_count - *at >= s.count && batch->out[*at] == s.first && batch->out[*at + s.count - 1] == s.first + s.count - 1;
}

void mm_cu_classify_rows(mm_backend *b, const mm_batch *batch) {
  current_step &s = b->step;
  uint32_t rows = 0, at = 0;
  s.single_spans = 0, s.verifies = false, s.draft = b->draft.next != DRAFT_NONE;
  s.chain = s.draft ? b->draft.step : mm_draft_step{};
  if (s.draft) {
    s.decode = true, s.singles = 0;
    return;
  }
  for (; !b->c.options.batch_invariant && s.single_spans < batch->span_count; s.single_spans++) {
    const mm_span &span = batch->span[s.single_spans];
    if (span.count > 1 && (span.count > MM_CU_VERIFY || b->states.per_slot || !all_wanted(batch, span, &at))) break;
    rows += span.count;
    s.verifies = s.verifies || span.count > 1;
  }
  s.decode = batch->tokens > 0 && rows == batch->tokens;
  s.singles = s.decode ? 0 : rows;
}
