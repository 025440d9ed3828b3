/* Automata of strings: which byte of a JSON string may follow, as a table. Made of conditions that hold together (text_pattern.h).
 *
 * A character has one form alone here: itself, or the short escape of JSON. Control characters without a short escape do not occur. */
#ifndef MM_RUNTIME_CONSTRAIN_AUTOMATON_H
#define MM_RUNTIME_CONSTRAIN_AUTOMATON_H

#include "runtime/constrain/text_pattern.h"

#define MM_AUTOMATON_NONE   UINT16_MAX
#define MM_AUTOMATON_STATES 32768

/* A text of rule number `rule` may stand here, and leads to a state. */
typedef struct mm_automaton_call {
  uint16_t rule, next;
} mm_automaton_call;

typedef enum mm_automaton_end {
  MM_AUTOMATON_GOES_ON,
  MM_AUTOMATON_MAY_END, /* the text may be complete, and may go on */
  MM_AUTOMATON_ENDS     /* it is complete */
} mm_automaton_end;

typedef struct mm_automaton {
  uint8_t class_of[256]; /* bytes of one class lead to the same states */
  uint32_t classes, states;
  const uint16_t *next;          /* [states, classes] from state 0 on; MM_AUTOMATON_NONE: the byte may not follow */
  uint32_t last;                 /* the state in which the text is complete; of MM_AUTOMATON_WHOLE none is ever reached, but: */
  const uint8_t *end;            /* [states] an mm_automaton_end */
  const uint32_t *first_call;    /* [states + 1] calls of state i: [first_call[i], first_call[i + 1]) */
  const mm_automaton_call *call; /* in the order of rules */
} mm_automaton;

typedef enum mm_automaton_form {
  MM_AUTOMATON_JSON, /* a string of JSON, with its quotes */
  MM_AUTOMATON_TEXT, /* the text itself and `</parameter>`; it does not hold "<" */
  MM_AUTOMATON_WHOLE /* the text itself, up to the end of the reply; it does not hold a byte of zero */
} mm_automaton_form;

/* What the automata of a request may still cost. */
typedef struct mm_automaton_budget {
  uint64_t steps;   /* edges and states looked at */
  uint64_t entries; /* of tables, of two bytes */
} mm_automaton_budget;
#define MM_AUTOMATON_BUDGET ((mm_automaton_budget){.steps = 6u << 20, .entries = 4u << 20})

/* The texts that every rule holds of, a negated one not, of least to most characters. NULL with a reason in *why: too large, or no text;
 * or with err. Lives in the arena. */
const mm_automaton *mm_automaton_build(mm_arena *a, const mm_text_rule *rules, mm_automaton_form form, mm_automaton_budget *budget,
                                       const char **reason, mm_err *err);

#endif
