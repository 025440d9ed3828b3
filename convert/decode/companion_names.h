/* The files of a source that go into its outputs with the weights: tokenizer, licence, code. */
#ifndef MM_CONVERT_COMPANION_NAMES_H
#define MM_CONVERT_COMPANION_NAMES_H

#include "convert/source/hf.h"

#define MM_COMPANION_MAX   (UINT64_C(256) << 20) /* bytes of one */
#define MM_COMPANION_CODE  64                    /* files of code */
#define MM_COMPANION_NAMES 16

/* Copied byte for byte when the source has them, in every layout. */
extern const char *const mm_companion_name[MM_COMPANION_NAMES];
/* True if a file of that name is one of these. */
bool mm_companions_has(const char *name);
/* True if a source's file of that name is code that its config's auto_map may name: "modeling_minimax_m1.py". */
bool mm_code_file(const char *name);
/* The source's code, where its config names some: all of it, since the named file may import the others. Packed checkpoints keep it for a
 * later --layout hf. Names of `arena`, in order. */
MM_MUST_USE bool mm_companions_code(const mm_hf *hf, mm_arena *arena, const char *name[MM_COMPANION_CODE], size_t *count, mm_err *err);
/* Is called for each of these files with its bytes. */
typedef struct mm_companion_seen {
  void (*call)(void *ctx, const char *name, uint64_t size);
  void *ctx;
} mm_companion_seen;
/* Refuses at the start what could not be copied at the end. seen: may be NULL. */
MM_MUST_USE bool mm_companions_check(const mm_hf *hf, const mm_companion_seen *seen, mm_err *err);

#endif
