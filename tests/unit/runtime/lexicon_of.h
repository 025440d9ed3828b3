/* A tokenizer and its lexicon in tests. */
#ifndef MM_TESTS_LEXICON_OF_H
#define MM_TESTS_LEXICON_OF_H

#include "runtime/constrain/constrain.h"
#include "tests/unit/unit.h"

static mm_tokenizer *tokenizer;
static mm_lexicon *lexicon;
static int32_t end;

/* Of a tokenizer.json of the M2 family, whose replies end with one token. */
static inline void open_lexicon(const char *path, uint32_t vocab) {
  mm_err err = {0};
  if (!(tokenizer = mm_tokenizer_open(path, vocab, &err))) fail_msg("%s", err.text);
  end = mm_tokenizer_find_added(tokenizer, "[e~[");
  assert_true(end >= 0 && mm_tokenizer_is_special(tokenizer, end));
  if (!(lexicon = mm_lexicon_open(tokenizer, vocab, &end, 1, &err))) fail_msg("%s", err.text);
}

static inline int close_lexicon(void **state) {
  (void)state;
  mm_lexicon_close(lexicon);
  mm_tokenizer_close(tokenizer);
  return 0;
}

#endif
