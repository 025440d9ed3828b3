/* The inside of mm_lexicon: tries of the words' bytes, and what each word does to a text that it goes on with. */
#ifndef MM_RUNTIME_CONSTRAIN_LEXICON_INSIDE_H
#define MM_RUNTIME_CONSTRAIN_LEXICON_INSIDE_H

#include "runtime/chat/reply.h"
#include "runtime/constrain/constrain.h"
#include "runtime/constrain/grammar.h"

#define MM_TRIE_NONE UINT32_MAX

typedef struct mm_trie_node {
  uint32_t next;  /* the node behind its subtree; the first of its subtree follows it */
  uint32_t text;  /* that ends here, MM_TRIE_NONE: none */
  uint32_t first; /* text of its subtree; of the node behind the last: the number of texts */
  uint16_t depth; /* bytes before this one */
  uint8_t byte;
} mm_trie_node;

typedef struct mm_trie_word {
  int32_t id;
  uint32_t characters; /* of the text before what the trie has of the word */
} mm_trie_word;

/* Texts in the order of their bytes, each with the words that have it. */
typedef struct mm_trie {
  mm_trie_node *node; /* [nodes] */
  uint32_t nodes, texts;
  uint32_t *first;    /* [texts + 1] words of text i: [first[i], first[i + 1]) */
  mm_trie_word *word; /* [first[texts]] */
  bool empty;         /* text 0 is the empty one, which has no node */
} mm_trie;

/* Words that leave the state within a text of one kind, by their characters. */
typedef struct mm_text_words {
  mm_trie_word *word; /* [count] the ones of fewer characters first */
  uint32_t count;
  uint32_t *mask; /* [MM_TEXT_LENGTHS + 1, words_of_mask]: of at most 0, 1, … characters; the last: of any number */
} mm_text_words;
#define MM_TEXT_LENGTHS 32

struct mm_lexicon {
  const mm_tokenizer *tokenizer;
  const int32_t *end;
  uint32_t end_count, words_of_mask, longest;
  uint32_t *ordinary;            /* mask of all words */
  int32_t marker[MM_REPLY_TAGS]; /* ids of the tags that mark the parts of a reply, -1 where a tag is no token */
  int32_t mark;                  /* M3's mark, likewise */
  mm_trie all;
  mm_trie tails;        /* of words that end a string of JSON: what stands behind its quote; the characters are those before */
  mm_trie tagged;       /* words with "<" that are not among prose, and M3's mark */
  mm_text_words string; /* of JSON */
  mm_text_words prose;  /* of an M2 value: with no tag and no beginning of one at the end */
};

/* The words of at most `room` characters, which may be UINT32_MAX; written to mask. */
void mm_text_words_mask(const mm_lexicon *l, const mm_text_words *w, uint32_t longest, uint32_t *mask);

static inline void mm_mask_set(uint32_t *mask, int32_t id) { mask[id / 32] |= UINT32_C(1) << (id % 32); }
static inline bool mm_mask_has(const uint32_t *mask, int32_t id) { return mask[id / 32] >> (id % 32) & 1; }
static inline void mm_mask_clear(uint32_t *mask, int32_t id) { mask[id / 32] &= ~(UINT32_C(1) << (id % 32)); }

#endif
