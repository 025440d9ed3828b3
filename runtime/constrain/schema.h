/* JSON schemas as forms of JSON (grammar.h), for replies that must follow one. mm_schema_keywords has the keywords that are followed; all
 * others but annotations are refused by name. */
#ifndef MM_RUNTIME_SERVE_SCHEMA_H
#define MM_RUNTIME_SERVE_SCHEMA_H

#include "formats/body.h"
#include "runtime/constrain/grammar.h"

/* How the JSON value begins whose first character this is, an mm_first. */
int mm_schema_first(char c);
/* Any object, for json_object. */
const mm_form *mm_schema_any_object(void);
/* What the value of the form begins with, an mm_first; of no choice. */
int mm_schema_first_of(const mm_form *s);

typedef struct mm_schema_keyword {
  const char *name, *limits; /* limits: what of it is served, for docs/serving.md */
} mm_schema_keyword;
extern const mm_schema_keyword mm_schema_keywords[]; /* that restrict values; the last has no name */
extern const char *const mm_schema_annotations[];    /* that do not; up to NULL */

/* Forms live in the arena; `where` is the schema's place, for messages. NULL with MM_UNSUPPORTED E_SCHEMA naming the keyword, MM_BAD_INPUT
 * E_SCHEMA for what is no schema. */
const mm_form *mm_schema_compile(mm_arena *a, const mm_value *schema, const char *where, mm_err *err);
/* One of several schemas of a request, whose automata have one budget. */
const mm_form *mm_schema_compile_within(mm_arena *a, const mm_value *schema, const char *where, mm_automaton_budget *budget, mm_err *err);

#endif
