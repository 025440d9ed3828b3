/* Arguments of a tool call whose format gives text: what JSON they are, by the tool's schema. */
#ifndef MM_RUNTIME_ARGUMENTS_H
#define MM_RUNTIME_ARGUMENTS_H

#include "formats/body.h"
#include "formats/text.h"
#include "runtime/chat/conversation.h"

/* A JSON string's text; absent for other values and NULL. */
static inline mm_str mm_str_of(const mm_value *v) { return v && v->type == MM_VALUE_STRING ? (mm_str){v->text, v->n} : (mm_str){0}; }
static inline mm_str mm_text_str(const mm_text *t) { return (mm_str){t->p ? t->p : "", t->n}; }

/* Types that a JSON schema allows, or-ed; 0: not known. */
enum {
  MM_TYPE_STRING = 1,
  MM_TYPE_INTEGER = 2,
  MM_TYPE_NUMBER = 4,
  MM_TYPE_BOOLEAN = 8,
  MM_TYPE_OBJECT = 16,
  MM_TYPE_ARRAY = 32,
  MM_TYPE_NULL = 64
};

/* The tools of a request. */
typedef struct mm_tools {
  mm_arena arena;
  struct mm_tool_schema *tool; /* [count] */
  size_t count;
} mm_tools;

/* Copies what it needs. MM_BAD_INPUT E_CHAT for a tool that is no JSON object with a name. mm_tools_close accepts a half-opened one. */
MM_MUST_USE bool mm_tools_open(mm_tools *t, const mm_chat_tool *tool, size_t count, mm_err *err);
void mm_tools_close(mm_tools *t);
mm_str mm_tools_name(const mm_tools *t, size_t i);
/* The schema that describes the parameters of a tool, past references; *root: the document of these. NULL: there is none. */
const mm_value *mm_tools_parameters(const mm_tools *t, mm_str tool, const mm_value **root);
/* The types that the schema of a parameter allows: `type`, a list of types, the values of enum and const, anyOf, oneOf, allOf, $ref
 * inside the schema; of a parameter without one, additionalProperties. */
unsigned mm_tools_types(const mm_tools *t, mm_str tool, mm_str parameter);

/* The whole schema of a tool's parameters; NULL: there is none. */
const mm_value *mm_tools_schema(const mm_tools *t, mm_str tool);
/* The types that a schema within the document `root` allows; 0: not known. */
unsigned mm_schema_types(const mm_value *root, const mm_value *schema);
/* The schema of an object's member, and of a list's items, also past $ref, anyOf, oneOf and allOf. NULL: there is none. */
const mm_value *mm_schema_member(const mm_value *root, const mm_value *schema, mm_str key);
const mm_value *mm_schema_items(const mm_value *root, const mm_value *schema);

/* True if the tool's schema has this parameter, or lists no parameters. */
bool mm_tools_may_have(const mm_tools *t, mm_str tool, mm_str parameter);

/* Adds the JSON value that a parameter's text is to `out` (the rules stand in reply.h). */
void mm_arguments_put(mm_text *out, unsigned types, mm_str text);
/* The same of the text of an M3 element without elements in it: null in any case, and empty where null is allowed; without
 * known types true, false and null are what they say; empty where no string is allowed is the empty list or object. */
void mm_arguments_put_element(mm_text *out, unsigned types, mm_str text);
/* Adds the value as it was written, but of equal keys of an object the last value alone, at the place of the first. */
void mm_arguments_put_json(mm_text *out, const mm_value *v);
/* Writes arguments in which an object has a key twice anew, by the same rule. */
void mm_arguments_unite(mm_text *object);
/* JSON that any reader takes: no NaN, no infinity, no byte order mark. The value lives in the arena; NULL: it is none. */
const mm_value *mm_json_strict(mm_arena *a, mm_str text);

#endif
