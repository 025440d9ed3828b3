/* The model card of an unsharded checkpoint: what it is, from which source, how its weights are stored and how engines load it. */
#ifndef MM_CONVERT_CARD_H
#define MM_CONVERT_CARD_H

#include "convert/plan/plan.h"

#define MM_CARD "README.md"

/* Markdown in the plan's arena, the same for the same plan. `target_format`, the target format, is NULL if nothing is quantised. NULL on
 * want of memory. */
const char *mm_card_text(mm_plan *p, const char *target_format, mm_err *err);
/* Iterates over known faults in readers of a target format (NULL: none) with the plan's schemes: the next sentence from *at = 0 on, NULL
 * past the last. */
const char *mm_card_caveat(const mm_plan *p, const char *target_format, size_t *at);
/* True if auto_map of the source's config names code that the source's directory lacks: name[cap] is then the first such file. */
bool mm_card_lacks(const mm_hf *hf, char *name, size_t cap);

#endif
