/* Objects and lists among the values of enum and const. Members stand in the order of the schema. */

#include "runtime/constrain/schema_inside.h"

static bool exact_scalar(mm_schema_compiler *p, const mm_value *v, mm_form *out) {
  if (!(out->literal = mm_arena_alloc(p->arena, sizeof *out->literal, p->err))) return false;
  if (v->raw_n > UINT16_MAX) return mm_schema_too_many(p, "bytes of a value or key", v->raw_n, UINT16_MAX);
  out->kind = MM_FORM_LITERALS;
  out->count = 1;
  out->literal[0] = (mm_literal){.p = v->raw, .n = v->raw_n};
  return mm_schema_escape_tags(p, &out->literal[0]);
}

static bool exact_members(mm_schema_compiler *p, const mm_value *v, unsigned depth, mm_form *out) {
  const bool object = v->type == MM_VALUE_OBJECT;
  out->kind = object ? MM_FORM_OBJECT : MM_FORM_ARRAY;
  out->closed = object;
  if (!(out->literal = mm_arena_alloc(p->arena, v->count * sizeof *out->literal, p->err))) return false;
  for (const mm_value *m = v->first; m; m = m->next) {
    mm_literal *l = &out->literal[out->count++];
    if (object && !mm_schema_quote_key(p, m->key, m->key_n, l)) return false;
    l->required = true;
    if (!(l->value = mm_schema_exact(p, m, depth + 1))) return false;
  }
  if (!object) return out->least = out->most = out->count, true;
  uint16_t *order = mm_arena_alloc(p->arena, out->count * sizeof *order, p->err);
  if (order) mm_literals_order(out, order);
  return order;
}

const mm_form *mm_schema_exact(mm_schema_compiler *p, const mm_value *v, unsigned depth) {
  mm_form *out = mm_arena_alloc(p->arena, sizeof *out, p->err);
  if (!out || !mm_schema_is_json(p, v)) return NULL;
  if (depth == MM_SCHEMA_DEPTH) return mm_schema_too_many(p, "values within each other", depth + 1, MM_SCHEMA_DEPTH), NULL;
  if ((p->values += 1) > MM_LITERALS) return mm_schema_too_many(p, "values of enum and const in the schema", p->values, MM_LITERALS), NULL;
  *out = (mm_form){.item = &mm_schema_any_value, .most = UINT32_MAX};
  bool ok = true;
  if (v->type != MM_VALUE_OBJECT && v->type != MM_VALUE_ARRAY) {
    ok = exact_scalar(p, v, out);
  } else if (v->count) {
    ok = exact_members(p, v, depth, out);
    if (v->type == MM_VALUE_OBJECT) out->item = NULL;
  } else {
    out->kind = v->type == MM_VALUE_OBJECT ? MM_FORM_MAP : MM_FORM_ARRAY;
    out->most = 0;
  }
  return ok ? out : NULL;
}
