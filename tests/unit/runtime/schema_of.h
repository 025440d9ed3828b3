/* The form of a schema in tests. */
#ifndef MM_TESTS_SCHEMA_OF_H
#define MM_TESTS_SCHEMA_OF_H

#include <string.h>

#include "runtime/constrain/schema.h"

/* The form lives in the arena; `schema` stays as long. NULL with the error of its compiler. */
static inline const mm_form *compile(mm_arena *a, const char *schema, mm_err *err) {
  const mm_value *v = mm_body_parse(a, schema, strlen(schema), err);
  return v ? mm_schema_compile(a, v, "json_schema", err) : NULL;
}

#endif
