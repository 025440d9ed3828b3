/* Texts that a regular expression or a grammar holds as a whole, as forms (grammar.h). */
#ifndef MM_RUNTIME_CONSTRAIN_WHOLE_TEXT_H
#define MM_RUNTIME_CONSTRAIN_WHOLE_TEXT_H

#include "runtime/constrain/grammar.h"

/* Forms live in the arena; `where` is the field of the request, for messages. NULL with MM_UNSUPPORTED E_SCHEMA naming what is not served
 * or what is too large, MM_BAD_INPUT E_SCHEMA for what is no grammar. */

/* The whole text matches the pattern (text_pattern.h), with or without ^ and $. */
const mm_form *mm_whole_regex(mm_arena *a, const char *pattern, size_t n, const char *where, mm_err *err);
/* GBNF, the grammars of llama.cpp: rules `name ::= alternatives`, of which `root` is the text. Texts in quotes, classes, ".", groups,
 * *, +, ?, {m,n} and comments. Refused by name: left recursion, tokens (<…>), and what is too large. */
const mm_form *mm_whole_grammar(mm_arena *a, const char *text, size_t n, const char *where, mm_err *err);

#endif
