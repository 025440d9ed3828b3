/* GPUs by name: their memory, and which of runtime/cuda's kernels run on them. */
#ifndef MM_LOADER_CARDS_H
#define MM_LOADER_CARDS_H

#include "formats/system/base.h"

/* A card, or only a size: then name is NULL and sm is 0. */
typedef struct mm_gpu_card {
  const char *name;
  uint64_t bytes;   /* of its memory, decimal as sold: the device reports as many or more */
  uint32_t sm;      /* compute capability, 10 * major + minor */
  const char *runs; /* the code of a default build that runs there; NULL: none, and `tried` says why */
  const char *tried;
} mm_gpu_card;

/* Card `i` of the table; NULL behind the last. */
const mm_gpu_card *mm_gpu_card_at(size_t i);
/* Reads bytes (80G, 80GB) or a card's name, in any case, without its spaces and hyphens too. MM_USAGE E_USAGE names the cards. */
MM_MUST_USE bool mm_gpu_card_parse(mm_gpu_card *out, const char *text, mm_err *err);

#endif
