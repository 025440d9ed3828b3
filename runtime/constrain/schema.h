/* JSON schemas as forms of JSON (grammar.h), for replies that must follow one.
 *
 * Supported keywords: type (one or several), properties in their order, required, additionalProperties where there are no properties,
 * items, minItems, maxItems, minLength, maxLength, enum, const, anyOf of alternatives that begin differently, oneOf of those that name
 * their types and have no value in common, allOf of one schema, $ref within the document, true and {}. Undeclared properties are not
 * generated. title, description, default, examples, format and $comment say nothing about the text. Everything else is refused by name. */
#ifndef MM_RUNTIME_SERVE_SCHEMA_H
#define MM_RUNTIME_SERVE_SCHEMA_H

#include "formats/body.h"
#include "runtime/constrain/grammar.h"

/* How the JSON value begins whose first character this is, an mm_first. */
int mm_schema_first(char c);
/* Any object, for json_object. */
const mm_form *mm_schema_any_object(void);
/* Forms live in the arena; `where` is the schema's place, for messages. NULL with MM_UNSUPPORTED E_SCHEMA naming the keyword, MM_BAD_INPUT
 * E_SCHEMA for what is no schema. */
const mm_form *mm_schema_compile(mm_arena *a, const mm_value *schema, const char *where, mm_err *err);

#endif
