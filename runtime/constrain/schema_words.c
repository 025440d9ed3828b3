/* The keyword that a refusal names. Schemas are rewritten while they are compiled (`if` by `not`, `minimum` under `not` as
 * `exclusiveMaximum`), so what is not served may be a keyword that the request's schema does not have. */
#include <stdio.h>
#include <string.h>

#include "runtime/constrain/schema_inside.h"

/* Keywords that others become, and these, the closest first. */
static const char *const comes_from[][2] = {
    {"exclusiveMaximum", "minimum"},
    {"exclusiveMinimum", "maximum"},
    {"minimum", "exclusiveMaximum"},
    {"maximum", "exclusiveMinimum"},
    {"minLength", "maxLength"},
    {"maxLength", "minLength"},
    {"minItems", "maxItems"},
    {"maxItems", "minItems"},
    {"minProperties", "maxProperties"},
    {"minProperties", "required"},
    {"maxProperties", "minProperties"},
    {"minContains", "maxContains"},
    {"maxContains", "minContains"},
    {"prefixItems", "items"},
    {"prefixItems", "contains"},
    {"items", "unevaluatedItems"},
    {"items", "contains"},
    {"contains", "items"},
    {"properties", "required"},
    {"required", "properties"},
    {"additionalProperties", "patternProperties"},
    {"additionalProperties", "unevaluatedProperties"},
    {"propertyNames", "patternProperties"},
    {"not", "if"},
    {"not", "oneOf"},
    {"not", "patternProperties"},
    {"not", "propertyNames"},
    {"oneOf", "if"},
    {"anyOf", "if"},
    {"anyOf", "dependentRequired"},
    {"anyOf", "dependentSchemas"},
    {"anyOf", "oneOf"},
};

/* Keywords of which many others are made, where none of those above is in the schema. */
static const char *const makers[] = {"not", "oneOf", "if", "contains", "dependentRequired", "dependentSchemas"};

/* Members whose keys are names, not keywords, and members that are values. */
static bool holds_names(const mm_value *m) {
  return mm_value_key_is(m, "properties") || mm_value_key_is(m, "patternProperties") || mm_value_key_is(m, "$defs") ||
         mm_value_key_is(m, "definitions") || mm_value_key_is(m, "dependentSchemas") || mm_value_key_is(m, "dependentRequired");
}

static bool holds_values(const mm_value *m) {
  return mm_value_key_is(m, "enum") || mm_value_key_is(m, "const") || mm_value_key_is(m, "default") || mm_value_key_is(m, "examples");
}

/* Some schema within v has the keyword; `names`: the keys of v itself are none. */
static bool has(const mm_value *v, bool names, const char *keyword) {
  for (const mm_value *m = v->first; m; m = m->next) {
    const bool member = v->type == MM_VALUE_OBJECT && !names;
    if (member && mm_value_key_is(m, keyword)) return true;
    if (!(member && holds_values(m)) && has(m, member && holds_names(m), keyword)) return true;
  }
  return false;
}

void mm_schema_own_keyword(const mm_value *schema, mm_err *err) {
  static const char served[] = "\" is not served", reason[] = "; `if` and `oneOf` need it too";
  char *end = strstr(err->text, served), *start = end;
  while (start && start > err->text && start[-1] != '"') start--;
  char keyword[64], tail[sizeof err->text];
  if (!start || start == err->text || (size_t)(end - start) >= sizeof keyword) return;
  snprintf(keyword, sizeof keyword, "%.*s", (int)(end - start), start);
  if (has(schema, false, keyword)) return;
  const char *own = NULL;
  for (size_t i = 0; !own && i < sizeof comes_from / sizeof *comes_from; i++)
    if (strcmp(comes_from[i][0], keyword) == 0 && has(schema, false, comes_from[i][1])) own = comes_from[i][1];
  for (size_t i = 0; !own && i < sizeof makers / sizeof *makers; i++)
    if (has(schema, false, makers[i])) own = makers[i];
  if (!own) return;
  snprintf(tail, sizeof tail, "%s", end);
  char *more = strstr(tail, reason);
  if (more) *more = 0; /* it is one of these that is named now */
  snprintf(start, sizeof err->text - (size_t)(start - err->text), "%s%s", own, tail);
}

void mm_schema_name_property(mm_str key, mm_err *err) {
  const size_t n = strlen(err->text);
  if (!strstr(err->text, "is not served") && !strstr(err->text, "no value fits")) return; /* a limit of the whole schema */
  snprintf(err->text + n, sizeof err->text - n, "; found in the property \"%s\"", MM_ESCAPED_BYTES(96, key.p, key.n));
}
