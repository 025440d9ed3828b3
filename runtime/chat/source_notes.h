/* Notes about files of a source that this project's runtime does not read: no reason against a conversion, but the output will not run. */
#ifndef MM_RUNTIME_SOURCE_NOTES_H
#define MM_RUNTIME_SOURCE_NOTES_H

#include <stdio.h>

#include "runtime/text/tokenizer.h"

/* Notes a tokenizer.json, settings of generation_config.json and config.json, and a chat template, that lie in `dir` and are refused at a
 * run. */
void mm_source_notes(FILE *f, const char *dir, uint32_t vocab);
/* mm_tokenizer_bake, where a file that is not read gives no image, and a note unless mm_source_notes had it. */
MM_MUST_USE bool mm_tokenizer_bake_noted(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n,
                                         mm_err *err);

#endif
