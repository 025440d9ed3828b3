/* Where the last tokens of a sequence stood before: an index of the short token strings (grams) of one sequence, and one of the last
 * replies of all requests. Host only; one owner at a time. Both are bounded, and a lookup takes the same time however long they are. */
#ifndef MM_RUNTIME_SCHEDULE_DRAFT_INDEX_H
#define MM_RUNTIME_SCHEDULE_DRAFT_INDEX_H

#include "formats/system/base.h"

#define MM_GRAM_WINDOW 32768 /* last tokens of a sequence that its index covers */
#define MM_GRAM_MATCH  16    /* equal tokens that are counted at most */

/* Hashes of the grams of 2, 3 and 4 tokens at the end of a sequence of `count` tokens; 0 tokens: none yet. */
typedef struct mm_gram_hash {
  uint32_t count, two, three;
  uint64_t four;
} mm_gram_hash;

/* Grams of 3 and of 2 tokens of one sequence. A place is the number of tokens up to a gram's end. All zero: an empty index. */
typedef struct mm_gram_index {
  uint16_t *head;  /* [2, 2 · size] by length and hash: 1 + the last place with it modulo 65535, 0 for none */
  uint16_t *link;  /* [2, size] by length and place modulo size: head's value before it; in the memory of head */
  uint32_t size;   /* a power of two ≤ MM_GRAM_WINDOW: places that are covered */
  uint32_t next;   /* first place whose grams are not in the index */
  mm_gram_hash at; /* of the sequence as it was last seen */
} mm_gram_index;

/* The last MM_REPLY_TOKENS tokens of replies, each under a salt. */
typedef struct mm_reply_index mm_reply_index;
#define MM_REPLY_TOKENS (1u << 18)

void mm_gram_index_close(mm_gram_index *x);
/* Adds what came since the last call: token[count] is the sequence of that call and more. Returns the place of the earlier match of the
 * last tokens, 0 for none: 3 tokens or more, the longest of the last few, or the last of 8; else the last 2. *matched: equal tokens, at
 * most MM_GRAM_MATCH. Out of memory it covers less. */
uint32_t mm_gram_index_find(mm_gram_index *x, const int32_t *token, uint32_t count, uint32_t *matched);
/* Tokens before two places of token[count] that are equal, at most MM_GRAM_MATCH; 0 < place < count, and count. */
uint32_t mm_copy_match(const int32_t *token, uint32_t count, uint32_t place);
/* Where a text that is being copied goes on: the place near `place` (2 ≤ place < count: where it would go on if nothing had been edited)
 * whose tokens before it match the last ones best, 2 or more of them; of equals the first from `place` on. 0 for none. *matched as above.
 */
uint32_t mm_copy_find(const int32_t *token, uint32_t count, uint32_t place, uint32_t *matched);

mm_reply_index *mm_reply_index_open(mm_err *err);
void mm_reply_index_close(mm_reply_index *x); /* accepts NULL */
/* A reply ended; of a long one its last quarter of MM_REPLY_TOKENS is added. */
void mm_reply_index_add(mm_reply_index *x, uint64_t salt, const int32_t *token, uint32_t count);
/* The tokens after the longest of the latest matches, of 4 tokens or more, within one reply under this salt: next[n ≤ most]. `own` has seen
 * token[count] in a find. *matched as above. */
uint32_t mm_reply_index_find(const mm_reply_index *x, uint64_t salt, const mm_gram_index *own, const int32_t *token, int32_t *next,
                             uint32_t most, uint32_t *matched);
/* Begins to read what both finds of this sequence will, so that the memory of many sequences is waited for once. */
void mm_draft_index_prefetch(mm_gram_index *x, const mm_reply_index *replies, uint64_t salt, const int32_t *token, uint32_t count);
#endif
