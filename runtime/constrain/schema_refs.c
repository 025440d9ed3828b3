/* Targets of $ref within one document: schemas with an $id of their own, $anchor, and JSON pointers. Nothing is fetched. */
#include <stdlib.h>
#include <string.h>

#include "runtime/constrain/schema_inside.h"

#define URI_MAX 2048

/* A schema that has a URI, or an anchor within one. */
typedef struct mm_schema_place {
  const char *uri;    /* without a fragment */
  const char *anchor; /* NULL: the schema of the URI itself */
  const mm_value *schema;
  bool dynamic; /* a $dynamicAnchor */
} place;

static bool add_place(mm_schema_compiler *p, const char *uri, const char *anchor, bool dynamic, const mm_value *schema) {
  if (p->places == MM_SCHEMA_PLACES) return mm_schema_too_many(p, "schemas with $id or $anchor", p->places + 1, MM_SCHEMA_PLACES);
  if (!MM_GROW(p->place, &p->place_cap, p->places + 1, p->err)) return false;
  p->place[p->places++] = (place){uri, anchor, schema, dynamic};
  return true;
}

static bool has_scheme(const char *uri, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const char c = uri[i];
    if (c == ':') return i > 0;
    if (!((c | 0x20) >= 'a' && (c | 0x20) <= 'z') && !(i && ((c >= '0' && c <= '9') || c == '+' || c == '-' || c == '.'))) return false;
  }
  return false;
}

/* The n bytes of a reference, without a fragment, as a URI in out[URI_MAX + 1]. False: it has dots or a NUL, or is too long. */
static bool resolve(const char *base, const char *text, size_t n, char *out) {
  if (!n) return memcpy(out, base, strlen(base) + 1);
  if (memchr(text, 0, n)) return false;
  if (n >= 2 && text[0] == '.' && text[1] == '/') text += 2, n -= 2;
  const char *authority = strstr(base, "://"), *from = authority ? authority + 3 : base, *slash = strrchr(from, '/');
  size_t head = 0;
  if (!has_scheme(text, n)) {
    if (memmem(text, n, "./", 2) || (n && text[n - 1] == '.') || (n > 1 && text[0] == '/' && text[1] == '/')) return false;
    if (*base && !authority && has_scheme(base, strlen(base))) return false; /* a name has no parts */
    if (text[0] == '/')
      head = authority ? (size_t)(from - base) + strcspn(from, "/") : 0;
    else if (slash)
      head = (size_t)(slash - base) + 1;
    else if (authority)
      return false;
  }
  if (head + n > URI_MAX) return false;
  memcpy(out, base, head);
  memcpy(out + head, text, n);
  out[head + n] = 0;
  return true;
}

/* An anchor, which a reference can name: a NUL ends none. */
static bool is_anchor(const mm_value *v) { return v && v->type == MM_VALUE_STRING && strlen(v->text) == v->n; }

static size_t before_fragment(const mm_value *v) {
  const char *hash = memchr(v->text, '#', v->n);
  return hash ? (size_t)(hash - v->text) : v->n;
}

/* ---- The walk through all schemas ---- */

typedef enum holds { NO_SCHEMA, A_SCHEMA, SCHEMAS } holds;

static holds what_holds(const mm_value *m) {
  static const char *const maps[] = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", NULL};
  static const char *const lists[] = {"allOf", "anyOf", "oneOf", "prefixItems", "items", NULL};
  static const char *const one[] = {"additionalProperties",
                                    "unevaluatedProperties",
                                    "propertyNames",
                                    "items",
                                    "additionalItems",
                                    "unevaluatedItems",
                                    "contains",
                                    "not",
                                    "if",
                                    "then",
                                    "else",
                                    "contentSchema",
                                    NULL};
  const char *const *list = m->type == MM_VALUE_ARRAY ? lists : maps;
  for (size_t i = 0; list[i]; i++)
    if (mm_value_key_is(m, list[i]) && m->type >= MM_VALUE_ARRAY) return m->type == MM_VALUE_ARRAY || list == maps ? SCHEMAS : A_SCHEMA;
  for (size_t i = 0; one[i] && m->type == MM_VALUE_OBJECT; i++)
    if (mm_value_key_is(m, one[i])) return A_SCHEMA;
  return NO_SCHEMA;
}

static bool add_reference(mm_schema_compiler *p, const mm_value *reference, const char *base) {
  if (!MM_GROW(p->reference, &p->reference_cap, p->references + 1, p->err)) return false;
  p->reference[p->references++] = (mm_schema_reference){reference->text, base};
  return true;
}

/* The base of a schema with an $id. The whole schema may have any. */
static bool begin_document(mm_schema_compiler *p, const mm_value *schema, const mm_value *id, const char **base) {
  char uri[URI_MAX + 1];
  const size_t n = before_fragment(id);
  const bool good = n + 1 >= id->n && resolve(*base, id->text, n, uri) && !(p->old && mm_value_get(schema, "$ref"));
  if (!good) return schema == p->root || mm_schema_unserved(p, "$id", " with a fragment, dots, or a $ref of draft 7 next to it");
  *base = mm_arena_strndup(p->arena, uri, strlen(uri), p->err);
  return *base && (schema == p->root || add_place(p, *base, NULL, false, schema));
}

static bool walk(mm_schema_compiler *p, const mm_value *schema, const char *base) {
  const mm_value *id = mm_value_get(schema, "$id"), *anchor = mm_value_get(schema, "$anchor"), *ref = mm_value_get(schema, "$ref");
  if (schema->type != MM_VALUE_OBJECT) return true;
  if (id && id->type == MM_VALUE_STRING && !begin_document(p, schema, id, &base)) return false;
  if (schema == p->root && !add_place(p, base, NULL, false, schema)) return false;
  if (is_anchor(anchor) && !add_place(p, base, anchor->text, false, schema)) return false;
  anchor = mm_value_get(schema, "$dynamicAnchor");
  if (is_anchor(anchor) && !add_place(p, base, anchor->text, true, schema)) return false;
  if (ref && ref->type == MM_VALUE_STRING && !add_reference(p, ref, base)) return false;
  ref = mm_value_get(schema, "$dynamicRef");
  if (ref && ref->type == MM_VALUE_STRING && !add_reference(p, ref, base)) return false;
  if (p->dynamic && !MM_GROW(p->part, &p->part_cap, p->parts + 1, p->err)) return false;
  if (p->dynamic) p->part[p->parts++] = (mm_schema_part){schema, base};
  for (const mm_value *m = schema->first; m; m = m->next) {
    const holds kind = what_holds(m);
    if (kind == A_SCHEMA && !walk(p, m, base)) return false;
    for (const mm_value *v = kind == SCHEMAS ? m->first : NULL; v; v = v->next)
      if (!walk(p, v, base)) return false;
  }
  return true;
}

static int compare_references(const void *a, const void *b) {
  const uintptr_t x = (uintptr_t)((const mm_schema_reference *)a)->text, y = (uintptr_t)((const mm_schema_reference *)b)->text;
  return (x > y) - (x < y);
}

bool mm_schema_holds(const mm_value *member, bool *several) {
  const holds kind = what_holds(member);
  *several = kind == SCHEMAS;
  return kind != NO_SCHEMA;
}

static int compare_parts(const void *a, const void *b) {
  const uintptr_t x = (uintptr_t)((const mm_schema_part *)a)->schema, y = (uintptr_t)((const mm_schema_part *)b)->schema;
  return (x > y) - (x < y);
}

const char *mm_schema_base(const mm_schema_compiler *p, const mm_value *schema) {
  const mm_schema_part key = {schema, NULL};
  const mm_schema_part *part = p->parts ? bsearch(&key, p->part, p->parts, sizeof key, compare_parts) : NULL;
  return part ? part->base : "";
}

bool mm_schema_find_references(mm_schema_compiler *p) {
  const mm_value *version = mm_value_get(p->root, "$schema");
  p->old = version && version->type == MM_VALUE_STRING && strstr(version->text, "/draft-0");
  p->dynamic = memmem(p->root->raw, p->root->raw_n, "\"$dynamicRef\"", 13);
  if (!walk(p, p->root, "")) return false;
  if (p->parts) qsort(p->part, p->parts, sizeof *p->part, compare_parts);
  if (p->references) qsort(p->reference, p->references, sizeof *p->reference, compare_references);
  return true;
}

/* ---- Following ---- */

/* The only place of the URI and anchor. NULL: there are none, or several. */
static const mm_value *find_place(const mm_schema_compiler *p, const char *uri, const char *anchor) {
  const mm_value *found = NULL;
  for (size_t i = 0; i < p->places; i++) {
    const place *at = &p->place[i];
    if (!at->anchor != !anchor || strcmp(at->uri, uri) != 0 || (anchor && strcmp(at->anchor, anchor) != 0)) continue;
    if (found && found != at->schema) return NULL;
    found = at->schema;
  }
  return found;
}

const mm_value *mm_schema_dynamic_place(const mm_schema_compiler *p, const char *base, const char *anchor) {
  const mm_value *found = NULL;
  for (size_t i = 0; i < p->places; i++) {
    const place *at = &p->place[i];
    if (!at->dynamic || strcmp(at->uri, base) != 0 || strcmp(at->anchor, anchor) != 0) continue;
    if (found && found != at->schema) return NULL;
    found = at->schema;
  }
  return found;
}

const mm_value *mm_schema_follow(mm_schema_compiler *p, const mm_value *reference) {
  if (!reference || reference->type != MM_VALUE_STRING) return NULL;
  if (mm_schema_is_copied(reference)) return mm_schema_follow_copied(p, reference);
  const mm_schema_reference key = {reference->text, NULL};
  const mm_schema_reference *known = p->references ? bsearch(&key, p->reference, p->references, sizeof key, compare_references) : NULL;
  if (!known) return p->places == 1 ? mm_value_follow(p->root, reference) : NULL; /* of what no keyword makes a schema */
  const size_t n = before_fragment(reference);
  char uri[URI_MAX + 1];
  const char *fragment = reference->text + n;
  const size_t length = reference->n - n;
  if (!resolve(known->base, reference->text, n, uri)) return NULL;
  if (length > 1 && fragment[1] != '/') return strlen(fragment) == length ? find_place(p, uri, fragment + 1) : NULL;
  const mm_value *document = find_place(p, uri, NULL);
  const mm_value pointer = {.type = MM_VALUE_STRING, .text = fragment, .n = length};
  return document && length > 1 ? mm_value_follow(document, &pointer) : document;
}
