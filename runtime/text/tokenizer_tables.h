/* Tables shared by the tokenizer's own files, whatever they were read from. */
#ifndef MM_RUNTIME_TOKENIZER_TABLES_H
#define MM_RUNTIME_TOKENIZER_TABLES_H

#include "formats/system/file.h"
#include "runtime/text/bpe.h"

typedef struct mm_tokenizer mm_tokenizer;

#define MM_ADDED_MAX 255 /* bytes of an added token's text */

/* How an id is recognised in text. Added tokens are looked for first: the verbatim ones, between them those marked "normalized" (no
 * normalizer is accepted, so this order is all that the mark means); what lies between those is ordinary text. */
typedef enum mm_token_level { MM_ORDINARY, MM_NORMALIZED, MM_VERBATIM } mm_token_level;

struct mm_tokenizer {
  mm_bpe bpe;
  uint8_t *level;                      /* [vocab] mm_token_level */
  uint8_t *special;                    /* [vocab] 0 or 1 */
  uint8_t added_start[256];            /* an added token starts with this byte */
  uint8_t added_len[MM_ADDED_MAX + 1]; /* an added token has this length */
  uint32_t pattern;                    /* of mm_split_patterns */
  void *split;                         /* the pattern, compiled */
  mm_map map;                          /* the image that holds the tables; none: they are allocated */
};

/* Split patterns that may run, as tokenizer.json spells them, ended by NULL. An image names one by its place: never reorder. */
extern const char *const mm_split_patterns[];
/* Compiles t->pattern. MM_LIMIT E_SPLIT if PCRE2 does not. */
MM_MUST_USE bool mm_tokenizer_compile(mm_tokenizer *t, const char *path, mm_err *err);

#endif
