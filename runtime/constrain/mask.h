/* Masks of the words that may follow a state of a form. */
#ifndef MM_RUNTIME_CONSTRAIN_MASK_H
#define MM_RUNTIME_CONSTRAIN_MASK_H

#include "runtime/constrain/lexicon_inside.h"

/* The state after some bytes of a word. */
typedef struct mm_path_place {
  uint32_t place; /* in the path: its state, or one that differs in the place of its automaton alone */
  bool in_text;   /* a plain byte leads to the same state */
  bool decided;   /* by */
  mm_automaton_place by;
} mm_path_place;

/* Memory for the states while a mask is made. */
typedef struct mm_mask_path {
  mm_grammar *state; /* [longest + 1] after the bytes of a word */
  mm_path_place *at; /* the same */
  uint32_t *one;     /* [words_of_mask] of one of several ways to read the text */
} mm_mask_path;

/* mask: the words that may follow the state. */
void mm_mask_words(const mm_lexicon *l, const mm_mask_path *p, const mm_grammar *state, uint32_t *mask);

#endif
