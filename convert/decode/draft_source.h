/* A Hugging Face checkpoint of a DFlash or EAGLE-3 draft, and the companion draft.safetensors that is made of it (formats/FORMAT-DRAFT.md).
 */
#ifndef MM_CONVERT_DRAFT_SOURCE_H
#define MM_CONVERT_DRAFT_SOURCE_H

#include "formats/json.h"
#include "formats/pack.h"
#include "loader/dflash.h"

typedef struct mm_draft_source {
  char *dir;
  mm_dflash_config c;
  mm_st st;
  mm_map map;
  bool as_zero;    /* numbers that are not finite are written as 0 */
  uint64_t zeroed; /* how many of them there are, under as_zero */
} mm_draft_source;

/* DIR/config.json and DIR/model.safetensors. Every tensor of the draft is there, as BF16 or F32 of the right shape, and no other but copies
 * of the target's embedding and head next to a DFlash draft and t2d next to an EAGLE-3 one, which are left out: MM_BAD_INPUT E_DRAFT.
 * MM_UNSUPPORTED E_DRAFT for settings that are not served. */
MM_MUST_USE bool mm_draft_source_open(mm_draft_source *s, const char *dir, const mm_model *target, mm_err *err);
void mm_draft_source_close(mm_draft_source *s); /* accepts a zeroed or half-opened one */
/* The tensor of a source under its name or another that such files have; NULL. */
const mm_st_tensor *mm_draft_find(const mm_draft_source *s, const char *name);
/* The layers whose outputs a draft reads: `ids` of its config, named `key`. MM_UNSUPPORTED E_DRAFT for no list of them. */
MM_MUST_USE bool mm_draft_taps(mm_dflash_config *c, const mm_json *ids, const char *key, const mm_json_ctx *at, mm_err *err);
/* The config of an EAGLE-3 draft, whose tensors are known (draft_eagle.c). */
MM_MUST_USE bool mm_draft_eagle_config(mm_draft_source *s, const mm_json *o, const mm_model *target, const mm_json_ctx *at, mm_err *err);
/* Writes the companion below `dirfd` and adds it to the manifest's list: of a draft, where q, k and v become one tensor and gate and up
 * another, or else that of a packed checkpoint, proven by its digest; nothing where neither is there.
 * MM_IO E_CHANGED where its digest is not `planned`. */
MM_MUST_USE bool mm_draft_write(const mm_draft_source *s, const mm_pack *from, const mm_digest *planned, int dirfd, const char *dir,
                                mm_pack *pack, mm_err *err);
/* The digest of what mm_draft_write would write, zero where that writes none. Of a source, NaN or infinity is MM_BAD_INPUT E_NONFINITE, or
 * with `as_zero` counted, and 0 in what is written. */
MM_MUST_USE bool mm_draft_digest(mm_draft_source *s, bool as_zero, const mm_pack *from, mm_digest *digest, mm_err *err);
/* The finished packed output in `dir` has the draft of that digest, or none where it is zero: else MM_USAGE E_RESUME. */
MM_MUST_USE bool mm_draft_same(const mm_digest *digest, const char *dir, mm_err *err);

#endif
