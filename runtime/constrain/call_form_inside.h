/* Shared parts of the forms of calls: call_form_tools.c, and call_form_m3.c for values as elements. */
#ifndef MM_RUNTIME_CONSTRAIN_CALL_FORM_INSIDE_H
#define MM_RUNTIME_CONSTRAIN_CALL_FORM_INSIDE_H

#include "runtime/constrain/call_form.h"

#define TAG_MAX 4000 /* bytes of the name of a tool or parameter */

typedef struct made_value made_value;

typedef struct maker {
  mm_arena *arena;
  const mm_call_rules *rules;
  mm_str tool, parameter; /* at hand, for messages */
  const mm_value *root;   /* M3: the document of the tool's schema */
  made_value *made;       /* M3: values whose form was begun */
  mm_automaton_budget *budget;
  mm_err *err;
} maker;

#define TEXT(s) ((mm_str){s, sizeof(s) - 1})

/* Fails with a message that names the tool and the parameter. */
bool mm_call_unserved(const maker *m, const char *reason);
mm_form *mm_call_new(const maker *m, mm_form_kind kind);
/* Pieces as one literal. */
bool mm_call_join(const maker *m, mm_str before, mm_str name, mm_str after, mm_literal *out);
/* The text of a parameter whose value is of the JSON form and whose schema names these types, 0: none. M3: without lists and objects. */
mm_form *mm_call_value(const maker *m, const mm_form *json, unsigned declared);
/* The JSON form's alternatives by what they begin with. */
void mm_call_spread(const mm_form *json, const mm_form **by_first);

/* M3: the arguments of a tool that are of a JSON form, NULL: of any that are well formed. */
const mm_form *mm_call_fields(maker *m, const mm_form *json);

#endif
