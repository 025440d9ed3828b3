/* The files of a directory of the Hugging Face layout, by their origin. */
#ifndef MM_CONVERT_LAYOUT_HF_H
#define MM_CONVERT_LAYOUT_HF_H

#include "convert/plan/plan.h"

/* True if the plan, of any layout, writes a file of that name from memory. */
bool mm_plan_writes(const mm_plan *p, const char *name);
/* True if this layout may write a file of that name, companions excepted. */
bool mm_unsharded_has(const char *file);
/* The plan's digest in the index of a directory that this layout wrote; false for any other directory. */
MM_MUST_USE bool mm_unsharded_plan(const char *dir, mm_digest *plan, mm_err *err);

#endif
