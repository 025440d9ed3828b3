/* Generation settings in a checkpoint's own files: which ids end a reply, and how tokens are drawn unless asked otherwise. */
#ifndef MM_RUNTIME_ENDS_H
#define MM_RUNTIME_ENDS_H

#include "runtime/engine/sample.h"
#include "runtime/text/tokenizer.h"

/* Sets is_end[vocab] for eos_token_id of generation_config.json, else of config.json, else for the known end tokens. MM_BAD_INPUT
 * E_CFG_RANGE for an id of vocab and above, and what reading the files gives. */
MM_MUST_USE bool mm_ends_find(const mm_pack *pack, const mm_tokenizer *t, bool *is_end, mm_err *err);
/* never[vocab]: ids that no token has. */
void mm_ends_never(const mm_tokenizer *t, uint32_t vocab, bool *never);
/* temperature, top_p, top_k, min_p and repetition_penalty of generation_config.json; what it lacks stays as it is. MM_BAD_INPUT E_CFG_TYPE,
 * E_CFG_RANGE. */
MM_MUST_USE bool mm_ends_defaults(const mm_pack *pack, mm_sampling *out, mm_err *err);
/* Fails as a companion's reader did: a fault of the text is damage unless the conversion copied it so. pack NULL: of a source. */
bool mm_companion_fail(const mm_pack *pack, const char *name, mm_err *reason, mm_err *err);
/* Read what mm_ends_find and mm_ends_defaults read, of a source's folder: false where the checkpoint that it gives would be refused. */
MM_MUST_USE bool mm_ends_check(const char *dir, uint32_t vocab, mm_err *err);
MM_MUST_USE bool mm_ends_check_defaults(const char *dir, mm_err *err);

#endif
