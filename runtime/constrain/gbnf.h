/* Parsed grammars of GBNF: whole_text.h compiles them. */
#ifndef MM_RUNTIME_CONSTRAIN_GBNF_H
#define MM_RUNTIME_CONSTRAIN_GBNF_H

#include "runtime/constrain/text_pattern.h"

#define MM_GBNF_BYTES 65536 /* of a grammar, at most */
#define MM_GBNF_RULES 1024

typedef struct mm_gbnf_reference mm_gbnf_reference;
struct mm_gbnf_reference {
  uint32_t rule;
  const mm_gbnf_reference *next;
};

typedef struct mm_gbnf_rule {
  mm_grammar_rule rule; /* first, so that patterns may point to it */
  const char *name;     /* n bytes */
  size_t n;
  const mm_gbnf_reference *references; /* rules that its pattern names */
  uint32_t patterns;                   /* nodes of its pattern */
  /* While it is compiled: */
  bool open, seen;
  uint32_t size, depth; /* with the rules whose patterns stand in it */
} mm_gbnf_rule;

typedef struct mm_gbnf {
  mm_gbnf_rule *rule; /* [count] in the order of their first mention */
  uint32_t count, root;
} mm_gbnf;

/* Every rule that is named is defined, and there is a root. False with the line and the reason in *why, or, for lack of memory, in err. */
bool mm_gbnf_parse(mm_arena *a, const char *text, size_t n, mm_gbnf *out, const char **reason, mm_err *err);

#endif
