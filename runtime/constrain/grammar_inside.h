/* Shared parts of the automaton: a stack of values that are not complete, and one function for each kind of value. */
#ifndef MM_RUNTIME_CONSTRAIN_GRAMMAR_INSIDE_H
#define MM_RUNTIME_CONSTRAIN_GRAMMAR_INSIDE_H

#include "runtime/constrain/grammar.h"

/* Effect of a byte on the top value of the stack. */
typedef enum mm_outcome {
  MM_BAD,
  MM_TAKEN,
  MM_AGAIN /* the stack changed, and the byte is still to be taken */
} mm_outcome;

bool mm_grammar_push(mm_grammar_stack *g, const mm_form *s);
/* The top value of the stack has ended. */
static inline mm_outcome mm_grammar_pop(mm_grammar_stack *g, mm_outcome outcome) {
  g->depth--;
  return outcome;
}
/* Another way to read the text from here on, which takes the byte at hand after all others. NULL: there are too many. */
mm_grammar_stack *mm_grammar_fork(mm_grammar *all, const mm_grammar_stack *g);
/* The byte for the top value of the stack, of any kind. */
mm_outcome mm_value_step(mm_grammar *all, mm_grammar_stack *g, uint8_t byte);
/* Between two characters of a string of JSON. */
bool mm_value_in_string(const mm_grammar_frame *f);
/* Between two characters of the text of an M2 or M3 value, where no tag and nothing but a string has begun. */
bool mm_value_in_prose(const mm_grammar_frame *f);
/* A tag may have begun in the M2 value that is open. */
bool mm_value_in_tag(const mm_grammar_stack *s);
/* Makes of such a state within a text the one in which those bytes are text and nothing else. False: it is no such state. */
bool mm_value_leave_tag(mm_grammar_stack *s);
/* The text may end with this value of JSON, its lowest; it must. */
bool mm_value_accepts(const mm_grammar_frame *f);
bool mm_value_done(const mm_grammar_frame *f);
/* The mark as a byte of words: MM_REPLY_MARK of the reply's parser. */
#define MM_GRAMMAR_MARK 0xff
/* A mark and "</" are there: what closes a value of elements goes on in the form around it. */
#define MM_MARK_CLOSES 3

/* By what the value begins whose first byte this is, an mm_first; -1: none begins so. */
int mm_first_of(uint8_t byte);
/* The phases of a number, and the one after a byte more; -1: the byte is none of the number's. */
enum {
  MM_NUMBER_START,
  MM_NUMBER_MINUS,
  MM_NUMBER_ZERO,
  MM_NUMBER_WHOLE,
  MM_NUMBER_POINT,
  MM_NUMBER_FRACTION,
  MM_NUMBER_E,
  MM_NUMBER_SIGN,
  MM_NUMBER_EXPONENT
};
int mm_number_next(int phase, uint8_t byte);
/* One of the literals at places [first, end) goes on with this byte after the bytes of f. */
bool mm_literal_step(mm_grammar_frame *f, uint32_t first, uint32_t end, uint8_t byte);
/* One of the literals at places [first, end) is there whole; its place. -1: none. */
int mm_literal_place(const mm_grammar_frame *f, uint32_t first, uint32_t end);
/* One past the last property whose key may come now: the next that is required, it included. */
uint32_t mm_properties_end(const mm_grammar_frame *f);
/* The first byte of a character: f->tail more follow, the next of them within f->lo and f->hi (Unicode, table 3-7). */
bool mm_character(mm_grammar_frame *f, uint8_t byte);
/* One of those. */
bool mm_character_tail(mm_grammar_frame *f, uint8_t byte);

/* MM_FORM_RULE. */
mm_outcome mm_rule_step(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte);
/* The text may end here; must end. All frames are of rules then. */
bool mm_rules_accept(const mm_grammar_stack *g);
bool mm_rules_done(const mm_grammar_stack *g);
/* MM_FORM_FIELDS, _ITEMS. */
mm_outcome mm_fields_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte);
mm_outcome mm_items_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte);
/* MM_FORM_CALLS, _ELEMENTS, _VALUE, _PROSE. */
mm_outcome mm_calls_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte);
bool mm_calls_accept(const mm_grammar_frame *f);
bool mm_calls_done(const mm_grammar_frame *f);
/* A byte of JSON within an M2 value: false where it completes a tag that would end the value. */
bool mm_value_step_json(mm_grammar_frame *value, uint8_t byte);

#endif
