/* Byte pair encoding: a vocabulary of byte strings, ranked merges, and the merging of one piece of text. */
#ifndef MM_RUNTIME_BPE_H
#define MM_RUNTIME_BPE_H

#include "formats/system/base.h"

typedef struct mm_bpe_token {
  const char *text; /* n bytes, owned by the arena; NULL: no token has this id */
  size_t n;
} mm_bpe_token;

/* The pair (left, right) becomes `result`; the rank of a merge is its index. */
typedef struct mm_bpe_merge {
  int32_t left, right, result;
} mm_bpe_merge;

typedef struct mm_bpe {
  uint32_t vocab;
  mm_bpe_token *token; /* [vocab] */
  uint32_t *by_text;   /* [text_count] ids sorted by text */
  size_t text_count;
  mm_bpe_merge *merge; /* [merge_count] */
  uint32_t *by_pair;   /* [merge_count] ranks sorted by (left, right) … */
  uint32_t *first;     /* … those of left id i from by_pair[first[i]] up to by_pair[first[i + 1]]; [vocab + 1] */
  size_t merge_count;
  int32_t byte_id[256]; /* filled by the caller: where every piece starts */
  mm_arena texts;
} mm_bpe;

/* Room for ids 0 … vocab-1. */
MM_MUST_USE bool mm_bpe_open(mm_bpe *b, uint32_t vocab, mm_err *err);
/* Accepts a zeroed or half-opened one. With `borrowed` the tables but `token` belong to someone else. */
void mm_bpe_close(mm_bpe *b, bool borrowed);
/* Sorts the tokens put so far for mm_bpe_find; MM_BAD_INPUT E_TOKENIZER naming `file` if two have the same text. */
MM_MUST_USE bool mm_bpe_index_tokens(mm_bpe *b, const char *file, mm_err *err);
/* Sorts `merge` for mm_bpe_encode; the same error if two are of one pair. */
MM_MUST_USE bool mm_bpe_index_merges(mm_bpe *b, const char *file, mm_err *err);
/* The id of exactly these bytes; -1 when absent. */
int32_t mm_bpe_find(const mm_bpe *b, const char *text, size_t n);

/* Memory of one encoding, and its result. Zero-initialise. */
typedef struct mm_bpe_scratch {
  struct mm_bpe_node *node; /* [node_cap] */
  uint64_t *heap;           /* [heap_cap] */
  size_t node_cap, heap_cap, heap_count;
  int32_t *id; /* [count]: the result so far */
  size_t count, cap;
} mm_bpe_scratch;
void mm_bpe_scratch_close(mm_bpe_scratch *s);

MM_MUST_USE bool mm_bpe_emit(mm_bpe_scratch *s, int32_t id, mm_err *err);
/* Appends the ids of a piece of n < 2^31 bytes: the lowest rank merges first, among equals the leftmost, until none applies
 * (Sennrich et al. 2016; order as in GPT-2). O(n log n). */
MM_MUST_USE bool mm_bpe_encode(const mm_bpe *b, mm_bpe_scratch *s, const char *piece, size_t n, mm_err *err);

#endif
