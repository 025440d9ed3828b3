/* $dynamicRef (JSON Schema 2020-12, core, 8.2.3.2). A document that has one is copied while it is compiled, once for each list of the parts
 * that lead to a schema: within such a copy every reference leads to one schema. A part is what an $id begins; the first of the list that
 * has the $dynamicAnchor is meant. */
#include <string.h>

#include "runtime/constrain/schema_inside.h"

#define SCOPES_MAX 1024

/* The parts that lead to a schema, the last one first. */
struct mm_schema_scope {
  const mm_schema_scope *outer; /* NULL: none */
  const char *base;
  const mm_schema_scope *next; /* of all scopes */
};

/* A copy of a schema, of a scope. */
struct mm_schema_copy {
  const mm_value *schema, *made;
  const mm_schema_scope *scope;
  mm_schema_copy *next; /* of all copies */
};

/* What the text of a copied reference is: */
typedef struct target {
  const mm_value *schema;
  const mm_schema_scope *scope;
} target;
static const char copied[] = "a reference of a copy";

/* The scope behind a part that is entered. One that was entered before changes nothing: the first is looked for. NULL after an error. */
static const mm_schema_scope *enter(mm_schema_compiler *p, const mm_schema_scope *scope, const char *base) {
  for (const mm_schema_scope *s = scope; s; s = s->outer)
    if (strcmp(s->base, base) == 0) return scope;
  size_t n = 0;
  for (const mm_schema_scope *s = p->scopes; s; s = s->next, n++)
    if (s->outer == scope && strcmp(s->base, base) == 0) return s;
  if (n == SCOPES_MAX) return mm_schema_too_many(p, "ways through schemas with $id", n + 1, SCOPES_MAX), NULL;
  mm_schema_scope *out = mm_arena_alloc(p->arena, sizeof *out, p->err);
  if (!out) return NULL;
  *out = (mm_schema_scope){.outer = scope, .base = base, .next = p->scopes};
  return p->scopes = out;
}

/* The schema that a $dynamicRef means, which leads to `first` if no other part has the anchor. */
static const mm_value *outermost(mm_schema_compiler *p, const mm_value *reference, const mm_value *first, const mm_schema_scope *scope) {
  const char *hash = memchr(reference->text, '#', reference->n);
  const mm_value *anchor = mm_value_get(first, "$dynamicAnchor");
  if (!hash || !anchor || !mm_value_is(anchor, hash + 1)) return first;
  for (; scope; scope = scope->outer) {
    const mm_value *found = mm_schema_dynamic_place(p, scope->base, hash + 1);
    if (found) first = found;
  }
  return first;
}

static const mm_value *copy(mm_schema_compiler *p, const mm_value *schema, const mm_schema_scope *scope);

static bool copy_reference(mm_schema_compiler *p, const mm_value *m, const mm_schema_scope *scope, mm_schema_made *out) {
  const mm_value *schema = mm_schema_follow(p, m);
  target *t = mm_arena_alloc(p->arena, sizeof *t, p->err);
  if (!schema) return p->err->status == MM_OK && mm_schema_wrong(p, "$ref: leads to no schema of this document");
  if (!t) return false;
  if (m->key[1] == 'd') schema = outermost(p, m, schema, scope);
  *t = (target){schema, enter(p, scope, mm_schema_base(p, schema))};
  const mm_value made = {.type = MM_VALUE_STRING, .text = (const char *)t, .raw = copied};
  return t->scope && mm_schema_put(p, out, &made, "$ref");
}

/* A member whose value is a schema, or a list or object of them. */
static bool copy_schemas(mm_schema_compiler *p, const mm_value *m, bool several, const mm_schema_scope *scope, mm_schema_made *out) {
  mm_schema_made list;
  const mm_value *one = several ? NULL : copy(p, m, scope);
  if (!several) return one && mm_schema_put(p, out, one, m->key);
  if (!mm_schema_begin(p, m->type, &list)) return false;
  for (const mm_value *v = m->first; v; v = v->next) {
    mm_value *put = (one = copy(p, v, scope)) ? mm_schema_put(p, &list, one, v->key) : NULL;
    if (!put) return false;
    put->key_n = v->key_n;
  }
  return mm_schema_put(p, out, list.value, m->key);
}

static const mm_value *copy(mm_schema_compiler *p, const mm_value *schema, const mm_schema_scope *scope) {
  mm_schema_made out;
  if (schema->type != MM_VALUE_OBJECT) return schema;
  if (mm_value_get(schema, "$ref") && mm_value_get(schema, "$dynamicRef"))
    return mm_schema_unserved(p, "$dynamicRef", " next to $ref"), NULL;
  if (!(scope = enter(p, scope, mm_schema_base(p, schema))) || !mm_schema_spend(p, schema->count)) return NULL;
  if (!mm_schema_begin(p, MM_VALUE_OBJECT, &out)) return NULL;
  for (const mm_value *m = schema->first; m; m = m->next) {
    const bool reference = mm_value_key_is(m, "$ref") || mm_value_key_is(m, "$dynamicRef");
    bool several, ok;
    if (mm_value_key_is(m, "$defs") || mm_value_key_is(m, "definitions") || mm_value_key_is(m, "$id")) continue;
    if (reference && m->type == MM_VALUE_STRING)
      ok = copy_reference(p, m, scope, &out);
    else if (mm_schema_holds(m, &several))
      ok = copy_schemas(p, m, several, scope, &out);
    else
      ok = mm_schema_put(p, &out, m, NULL);
    if (!ok) return NULL;
  }
  return out.value;
}

const mm_value *mm_schema_copy_of(mm_schema_compiler *p, const mm_value *schema, const mm_schema_scope *scope) {
  size_t n = 0;
  for (const mm_schema_copy *c = p->copies; c; c = c->next, n++)
    if (c->schema == schema && c->scope == scope) return c->made;
  if (n == MM_SCHEMAS_MAX) return mm_schema_too_many(p, "schemas in one", n + 1, MM_SCHEMAS_MAX), NULL;
  mm_schema_copy *c = mm_arena_alloc(p->arena, sizeof *c, p->err);
  const mm_value *made = c ? copy(p, schema, scope) : NULL;
  if (!made) return NULL;
  *c = (mm_schema_copy){.schema = schema, .made = made, .scope = scope, .next = p->copies};
  p->copies = c;
  return made;
}

bool mm_schema_is_copied(const mm_value *reference) { return reference->raw == copied; }

const mm_value *mm_schema_follow_copied(mm_schema_compiler *p, const mm_value *reference) {
  const target *t = (const target *)(const void *)reference->text;
  return mm_schema_copy_of(p, t->schema, t->scope);
}
