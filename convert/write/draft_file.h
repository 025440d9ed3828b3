/* A Hugging Face checkpoint of a DFlash draft, and the companion draft.safetensors that is made of it (formats/FORMAT-DRAFT.md). */
#ifndef MM_CONVERT_DRAFT_FILE_H
#define MM_CONVERT_DRAFT_FILE_H

#include "formats/pack.h"
#include "loader/dflash.h"

typedef struct mm_draft_source {
  char *dir;
  mm_dflash_config c;
  mm_st st;
  mm_map map;
} mm_draft_source;

/* DIR/config.json and DIR/model.safetensors. Every tensor of the draft is there, as BF16 or F32 of the right shape, and no other but copies
 * of the target's embedding and head, which are left out: MM_BAD_INPUT E_DRAFT. MM_UNSUPPORTED E_DRAFT for settings that are not served. */
MM_MUST_USE bool mm_draft_source_open(mm_draft_source *s, const char *dir, const mm_model *target, mm_err *err);
void mm_draft_source_close(mm_draft_source *s); /* accepts a zeroed or half-opened one */
/* Writes the companion below `dirfd` and says what the manifest lists: q, k and v are one tensor, and gate and up. */
MM_MUST_USE bool mm_draft_source_write(const mm_draft_source *s, int dirfd, const char *dir, mm_pack_file *out, mm_err *err);

#endif
