/* Byte-level BPE from a Hugging Face tokenizer.json. */
#ifndef MM_RUNTIME_TOKENIZER_H
#define MM_RUNTIME_TOKENIZER_H

#include "formats/pack.h"

typedef struct mm_tokenizer mm_tokenizer;

/* `vocab` bounds every id. MM_BAD_INPUT for a malformed file, MM_UNSUPPORTED for a split pattern or component that is not known. */
mm_tokenizer *mm_tokenizer_open(const char *path, uint32_t vocab, mm_err *err);
/* The tables of an open tokenizer as one block of bytes that mm_tokenizer_map takes back; free(*image). `source` is the digest of the
 * tokenizer.json that they were read from. The same file gives the same bytes. */
MM_MUST_USE bool mm_tokenizer_image(const mm_tokenizer *t, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err);
/* The image of the tokenizer.json at `path`, whose digest is *source. Errors of mm_tokenizer_open. */
MM_MUST_USE bool mm_tokenizer_bake(const char *path, uint32_t vocab, const mm_digest *source, uint8_t **image, size_t *n, mm_err *err);
/* Maps such an image: nothing is parsed or copied, but every table is checked, so that any bytes may come. MM_INTEGRITY E_TOKENIZER for a
 * malformed one, one of another vocabulary or of another tokenizer.json than `source`; MM_UNSUPPORTED for another version. */
mm_tokenizer *mm_tokenizer_map(const char *path, uint32_t vocab, const mm_digest *source, mm_err *err);
/* The tokenizer of a packed checkpoint: its image where it has one, else its tokenizer.json, or that of ids where nothing of the
 * model is stored (--load-format dummy). MM_UNSUPPORTED E_TOKENIZER without a tokenizer.json; MM_INTEGRITY E_SIZE where either was changed
 * since. */
mm_tokenizer *mm_tokenizer_of(const mm_pack *pack, mm_err *err);
/* One of `vocab` ids that no file describes: those below 256 are bytes, each other one is its number as a word. */
mm_tokenizer *mm_tokenizer_of_ids(uint32_t vocab, mm_err *err);
#define MM_TOKENIZER_IMAGE "tokenizer.bin" /* companion of tokenizer.json */
void mm_tokenizer_close(mm_tokenizer *t);  /* accepts NULL */

/* Token ids of n bytes of text (any bytes; invalid UTF-8 is carried through byte tokens). added = true recognises the added
 * tokens' text as such tokens; false encodes them as plain text. free(*ids). MM_LIMIT for want of memory or past 2 GiB. Safe from
 * several threads at once. */
MM_MUST_USE bool mm_tokenizer_encode(const mm_tokenizer *t, const char *text, size_t n, bool added, int32_t **ids, size_t *count,
                                     mm_err *err);
/* The same, where added tokens are recognised only inside these ranges of bytes (ascending, disjoint; a token lies in one of them whole);
 * the rest is ordinary text, and so is what stands between two tokens, as one. */
typedef struct mm_text_range {
  size_t from, to;
} mm_text_range;
MM_MUST_USE bool mm_tokenizer_encode_ranges(const mm_tokenizer *t, const char *text, size_t n, const mm_text_range *range, size_t ranges,
                                            int32_t **ids, size_t *count, mm_err *err);
/* The bytes of one id (borrowed, *n long); NULL for an id without a token. Special tokens give their text. */
const char *mm_tokenizer_bytes(const mm_tokenizer *t, int32_t id, size_t *n);
bool mm_tokenizer_is_special(const mm_tokenizer *t, int32_t id);
/* The character that stands for a byte in byte-level vocabularies: itself where it is printed, else one from U+0100 on. */
uint32_t mm_byte_character(uint8_t byte);
/* The id of an added or ordinary token's exact text; -1 when absent. */
int32_t mm_tokenizer_find(const mm_tokenizer *t, const char *text);
/* The same of added tokens alone, special or not. */
int32_t mm_tokenizer_find_added(const mm_tokenizer *t, const char *text);

#endif
