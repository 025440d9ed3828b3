/* Regular expressions of ECMA-262 as trees, a subset: what JSON schemas write in `pattern`.
 *
 * Served: characters, ".", classes and their ranges, \d \D \w \W \s \S, escapes of control characters and of punctuation, \x \u \u{},
 * groups, alternatives, quantifiers (lazy ones too: they match the same texts), ^ and $ at the two ends of an alternative of the whole
 * pattern, and lookaheads right behind a ^ that begins the pattern. Everything else is refused with its name. */
#ifndef MM_RUNTIME_CONSTRAIN_TEXT_PATTERN_H
#define MM_RUNTIME_CONSTRAIN_TEXT_PATTERN_H

#include "formats/system/base.h"

#define MM_PATTERN_BYTES 4096 /* of a pattern, at most */
#define MM_CODE_POINTS   0x110000

typedef struct mm_code_range {
  uint32_t first, last; /* code points */
} mm_code_range;

typedef enum mm_text_pattern_kind {
  MM_PATTERN_CLASS,    /* one character of some ranges; of no range: none fits */
  MM_PATTERN_SEQUENCE, /* parts one behind the other, the last one first; no part: the empty text */
  MM_PATTERN_CHOICE,   /* one of the parts */
  MM_PATTERN_REPEAT,   /* the only part, least to most times */
  MM_PATTERN_BYTES_OF, /* a text as it is */
  MM_PATTERN_RULE      /* a text of another rule of its grammar (gbnf.h) */
} mm_text_pattern_kind;

typedef struct mm_text_pattern mm_text_pattern;

/* What the automaton of another rule needs to know of a rule. */
typedef struct mm_grammar_rule {
  const mm_text_pattern *pattern;
  bool called; /* it has an automaton of its own, number `number`; else its pattern stands in each place that names it */
  uint16_t number;
  bool empty; /* its text may be empty */
  bool dead;  /* it has no text */
} mm_grammar_rule;

struct mm_text_pattern {
  mm_text_pattern_kind kind;
  const mm_code_range *range; /* [count] ascending, without surrogates */
  uint32_t count;
  const char *text; /* n bytes */
  size_t n;
  mm_text_pattern *first, *next; /* parts, linked by next */
  uint32_t least, most;          /* UINT32_MAX: any number */
  const struct mm_grammar_rule *rule;
};

/* A condition on the whole text. */
typedef struct mm_text_rule mm_text_rule;
struct mm_text_rule {
  const mm_text_pattern *pattern;
  bool negated;
  const mm_text_rule *next;
};

/* Puts the pattern's conditions before those of *rules. whole: the pattern is that of the whole text, with or without ^ and $; else it may
 * stand anywhere in the text. Returns false with the reason in *why, or, for lack of memory, in err. */
bool mm_text_pattern_parse(mm_arena *a, const char *pattern, size_t n, bool whole, const mm_text_rule **rules, const char **reason,
                           mm_err *err);
/* Characters of the texts that fit: the fewest and the most, UINT32_MAX: any number. */
void mm_text_pattern_lengths(const mm_text_pattern *p, uint32_t *least, uint32_t *most);
/* One character of these ranges, or of none of them. Returns NULL with the reason in *why, or, for lack of memory, in err. */
mm_text_pattern *mm_text_pattern_class(mm_arena *a, const mm_code_range *range, uint32_t count, bool complement, const char **reason,
                                       mm_err *err);
/* A character, any, a number of times. */
mm_text_pattern *mm_text_pattern_any(mm_arena *a, uint32_t least, uint32_t most, mm_err *err);

#endif
