/* A draft next to the target's forward pass, on the same backend and with its embedding and head. */
#ifndef MM_RUNTIME_DRAFT_FORWARD_H
#define MM_RUNTIME_DRAFT_FORWARD_H

#include "runtime/engine/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_draft_forward mm_draft_forward;

/* d NULL: there is none, and context does nothing. */
MM_MUST_USE bool mm_draft_forward_open(mm_draft_forward *f, const mm_ops *ops, mm_backend *b, const mm_dflash *d, mm_err *err);
/* Within a step of the target, after its layers: keys and values of its rows, from the taps. */
void mm_draft_context(const mm_draft_forward *f, const mm_forward *target);
/* A step of its own: spans of rows that begin with a token of their slot at `pos`, masks behind it; all cells before pos are there. Nothing
 * of a slot changes. logits[out_count, vocab_rows]; or id[out_count], the best of each (mm_draft_ops.best), with
 * logits NULL. */
MM_MUST_USE bool mm_draft_block(const mm_draft_forward *f, const mm_forward *target, const mm_batch *batch, float *logits, int32_t *id,
                                mm_err *err);

/* A pass of the chain of an EAGLE-3 draft, the passes before it done with the same slots in the same order: spans of one row, at first
 * a token of the slot at `pos`, whose cells before are there, then what was proposed, a position further each; all rows are wanted.
 * logits[out_count, draft_vocab]; or with step.best the last pass's id[passes, out_count], as mm_draft_ops.best gives them. */
MM_MUST_USE bool mm_draft_chain(const mm_draft_forward *f, const mm_forward *target, const mm_batch *batch, mm_draft_step step,
                                float *logits, int32_t *id, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
