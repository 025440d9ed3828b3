/* A Hugging Face checkpoint of a DFlash or EAGLE-3 draft, and the companion draft.safetensors that is made of it (formats/FORMAT-DRAFT.md).
 */
#ifndef MM_CONVERT_DRAFT_SOURCE_H
#define MM_CONVERT_DRAFT_SOURCE_H

#include "formats/json.h"
#include "formats/pack.h"
#include "loader/dflash.h"

typedef struct mm_draft_source {
  char *dir;
  mm_dflash_config c; /* of the companion that is made: `quant` is what its matrices are put into */
  mm_st st;
  mm_map map;
  bool fused; /* it is the draft of a packed checkpoint: `packed`, and neither st nor map */
  mm_dflash packed;
  bool as_zero;    /* numbers that are not finite are written as 0 */
  uint64_t zeroed; /* how many of them there are, under as_zero */
} mm_draft_source;

/* DIR/config.json and DIR/model.safetensors. Every tensor of the draft is there, as BF16 or F32 of the right shape, and no other but copies
 * of the target's embedding and head next to a DFlash draft and t2d next to an EAGLE-3 one, which are left out: MM_BAD_INPUT E_DRAFT.
 * MM_UNSUPPORTED E_DRAFT for settings that are not served, and for shapes that `quant` does not fit; NULL: matrices stay as they are. */
MM_MUST_USE bool mm_draft_source_open(mm_draft_source *s, const char *dir, const mm_model *target, const mm_scheme *quant, mm_err *err);
/* The draft of a packed checkpoint, proven by its digest, to be put into `quant`. */
MM_MUST_USE bool mm_draft_source_packed(mm_draft_source *s, const mm_pack *from, const mm_scheme *quant, mm_err *err);
/* --draft DIR, --draft-quant WORD and the packed source `from`, each of them or NULL. *given: the draft has to be made, else it is that of
 * `from`, if that has one, byte for byte. MM_USAGE E_USAGE for a word without any draft. */
MM_MUST_USE bool mm_draft_source_find(mm_draft_source *s, bool *given, const char *dir, const char *word, const mm_pack *from,
                                      const mm_model *target, mm_err *err);
void mm_draft_source_close(mm_draft_source *s); /* accepts a zeroed or half-opened one */
/* The tensor of a source under its name or another that such files have; NULL. */
const mm_st_tensor *mm_draft_find(const mm_draft_source *s, const char *name);
/* The layers whose outputs a draft reads: `ids` of its config, named `key`. MM_UNSUPPORTED E_DRAFT for no list of them. */
MM_MUST_USE bool mm_draft_taps(mm_dflash_config *c, const mm_json *ids, const char *key, const mm_json_ctx *at, mm_err *err);
/* The config of an EAGLE-3 draft, whose tensors are known (draft_eagle.c). */
MM_MUST_USE bool mm_draft_eagle_config(mm_draft_source *s, const mm_json *o, const mm_model *target, const mm_json_ctx *at, mm_err *err);

/* The source's tensors under one of the companion's, one above the other. */
#define MM_DRAFT_PIECES 3
typedef struct mm_draft_pieces {
  const mm_st_tensor *piece[MM_DRAFT_PIECES];
  const uint8_t *data; /* of the file that they are in */
  uint32_t count;
} mm_draft_pieces;
MM_MUST_USE bool mm_draft_pieces_of(const mm_draft_source *s, const mm_dflash_tensor *t, mm_draft_pieces *out, mm_err *err);
/* The file that a draft comes from, for errors. */
static inline const char *mm_draft_path(const mm_draft_source *s) { return s->fused ? s->packed.st.path : s->st.path; }

/* ---- the companion (draft_write.c) ---- */

/* Writes the companion below `dirfd` and adds it to the manifest's list: of a draft, where q, k and v become one tensor and gate and up
 * another, or else that of a packed checkpoint, proven by its digest; nothing where neither is there.
 * MM_IO E_CHANGED where its digest is not `planned`. */
MM_MUST_USE bool mm_draft_write(const mm_draft_source *s, const mm_pack *from, const mm_digest *planned, int dirfd, const char *dir,
                                mm_pack *pack, mm_err *err);
/* That file but for its digest, by shapes alone. */
MM_MUST_USE bool mm_draft_describe(const mm_draft_source *s, const mm_pack *from, mm_drafted *out, mm_err *err);
/* The digest of what mm_draft_write would write, zero where that writes none. Of a source, NaN or infinity is MM_BAD_INPUT E_NONFINITE, or
 * with `as_zero` counted, and 0 in what is written. */
MM_MUST_USE bool mm_draft_digest(mm_draft_source *s, bool as_zero, const mm_pack *from, mm_digest *digest, mm_err *err);
/* The finished packed output in `dir` has the draft of that digest, or none where it is zero: else MM_USAGE E_RESUME. */
MM_MUST_USE bool mm_draft_same(const mm_digest *digest, const char *dir, mm_err *err);

#endif
