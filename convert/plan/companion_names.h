/* The files of a source that go into its outputs with the weights: tokenizer, licence, code. */
#ifndef MM_CONVERT_COMPANION_NAMES_H
#define MM_CONVERT_COMPANION_NAMES_H

#include "convert/plan/plan.h"

#define MM_COMPANION_MAX   (UINT64_C(256) << 20) /* bytes of one */
#define MM_COMPANION_CODE  64                    /* files of code */
#define MM_COMPANION_NAMES 16

/* Copied byte for byte when the source has them, in every layout. */
extern const char *const mm_companion_name[MM_COMPANION_NAMES];
/* True if a file of that name is one of these. */
bool mm_companions_has(const char *name);
/* The source's code, where its config names some: all of it, since the named file may import the others. Packed checkpoints keep it for a
 * later --layout hf. Names of `arena`, in order. */
MM_MUST_USE bool mm_companions_code(const mm_hf *hf, mm_arena *arena, const char *name[MM_COMPANION_CODE], size_t *count, mm_err *err);
/* True if the plan writes a file of that name from memory. */
bool mm_plan_writes(const mm_plan *p, const char *name);

#endif
