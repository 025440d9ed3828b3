/* The automaton's tool calls: M1's lines of JSON, M2's elements, whose values are text. */
#include <string.h>

#include "runtime/chat/arguments.h"
#include "runtime/constrain/grammar_inside.h"

/* f->bytes bytes of `text` are there. */
static bool text_step(mm_grammar_frame *f, const char *text, uint8_t byte) { return (uint8_t)text[f->bytes++] == byte; }

/* ---- Calls ---- */

enum { CALLS_BEFORE, CALLS_NEXT, CALLS_AFTER };

static mm_outcome step_calls(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_form *s = f->form;
  if (f->phase != CALLS_NEXT) {
    const char *text = f->phase == CALLS_BEFORE ? s->before : s->after;
    if (!text_step(f, text, byte)) return MM_BAD;
    if (text[f->bytes]) return MM_TAKEN;
    f->phase = CALLS_NEXT;
    f->bytes = 0;
    return MM_TAKEN;
  }
  const uint32_t calls = s->count - s->ends, first = f->count < s->most ? 0 : calls,
                 end = s->ends && f->count >= s->least ? s->count : calls;
  if (!mm_literal_step(f, first, end, byte)) return MM_BAD;
  const int place = mm_literal_place(f, first, end);
  if (place < 0) return MM_TAKEN;
  if ((uint32_t)place == calls) return mm_grammar_pop(g, MM_TAKEN);
  f->count += f->count < UINT32_MAX;
  f->phase = CALLS_AFTER;
  f->bytes = f->from = f->to = 0;
  return mm_grammar_push(g, s->literal[place].value) ? MM_TAKEN : MM_BAD;
}

/* ---- Elements ---- */

enum { ELEMENT_TAG, ELEMENT_NAME, ELEMENT_NAME_TAIL, ELEMENT_HEADER_END, ELEMENT_END };
#define NAME_CHARACTERS 64

static mm_outcome begin_element(mm_grammar_stack *g, mm_grammar_frame *f, uint32_t place) {
  const mm_form *value = f->form->literal[place].value;
  f->bytes = f->from = f->to = 0;
  f->count = f->form->any_names ? 0 : place + 1;
  f->phase = ELEMENT_END;
  return mm_grammar_push(g, value) ? MM_TAKEN : MM_BAD;
}

static mm_outcome step_tag(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const uint32_t end = mm_properties_end(f);
  if (!mm_literal_step(f, f->count, end, byte)) return MM_BAD;
  const int place = mm_literal_place(f, f->count, end);
  if (place < 0) return MM_TAKEN;
  if ((uint32_t)place + 1 == f->form->count) return mm_grammar_pop(g, MM_TAKEN);
  if (!f->form->any_names) return begin_element(g, f, (uint32_t)place);
  f->phase = ELEMENT_NAME;
  f->bytes = f->from = f->to = 0;
  f->count = 0;
  return MM_TAKEN;
}

static mm_outcome step_name(mm_grammar_frame *f, uint8_t byte) {
  if (byte == '"') {
    f->phase = ELEMENT_HEADER_END;
    return f->count ? MM_TAKEN : MM_BAD;
  }
  if (byte <= ' ' || byte == 0x7f || strchr("'<>/", byte) || f->count == NAME_CHARACTERS || !mm_character(f, byte)) return MM_BAD;
  f->count++;
  if (f->tail) f->phase = ELEMENT_NAME_TAIL;
  return MM_TAKEN;
}

static mm_outcome step_elements(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  switch (f->phase) {
    case ELEMENT_TAG: return step_tag(g, f, byte);
    case ELEMENT_NAME: return step_name(f, byte);
    case ELEMENT_NAME_TAIL:
      if (!mm_character_tail(f, byte)) return MM_BAD;
      if (!f->tail) f->phase = ELEMENT_NAME;
      return MM_TAKEN;
    case ELEMENT_HEADER_END:
      if (byte != '>') return MM_BAD;
      f->lo = f->hi = 0;
      return begin_element(g, f, 0);
    default: f->phase = ELEMENT_TAG; return byte == '\n' ? MM_TAKEN : MM_BAD;
  }
}

/* ---- Tags that a value may not spell ---- */

#define PARAMETER_END "</parameter>"
#define INVOKE_END    "</invoke>"
#define PARAMETER     "<parameter name="
/* How much of a tag there is: its bytes, more by this much where another one begins alike. */
enum { AS_INVOKE_END = 20, AS_PARAMETER = 40 };
enum { CLOSED = sizeof PARAMETER_END - 1 };

static uint8_t tag_step(uint8_t tag, uint8_t byte) {
  if (byte == '<') return 1;
  if (tag == 1 && byte == PARAMETER[1]) return AS_PARAMETER + 2;
  if (tag == 2 && byte == INVOKE_END[2]) return AS_INVOKE_END + 3;
  const char *text = tag > AS_PARAMETER ? PARAMETER : tag > AS_INVOKE_END ? INVOKE_END : PARAMETER_END;
  const uint8_t n = tag > AS_PARAMETER ? tag - AS_PARAMETER : tag > AS_INVOKE_END ? tag - AS_INVOKE_END : tag;
  return n && (uint8_t)text[n] == byte ? tag + 1 : 0;
}

static bool tag_forbidden(uint8_t tag) {
  return tag == AS_INVOKE_END + sizeof INVOKE_END - 1 || tag == AS_PARAMETER + sizeof PARAMETER - 1;
}

bool mm_spells_tag(const char *text, size_t n) {
  uint8_t tag = 0;
  for (size_t i = 0; i < n; i++) {
    tag = tag_step(tag, (uint8_t)text[i]);
    if (tag == CLOSED || tag_forbidden(tag)) return true;
  }
  return false;
}

bool mm_value_step_json(mm_grammar_frame *value, uint8_t byte) {
  value->tag = tag_step(value->tag, byte);
  return value->tag != CLOSED && !tag_forbidden(value->tag);
}

/* ---- What else than a string the reader would take a text for (mm_arguments_put) ---- */

/* Words in any case, but the first, null, where it is M2's: f->from has a bit for each that the text may still be, f->bytes is how much of
 * it there is. */
static const char *const words[] = {"null", "true", "yes", "on", "1", "false", "no", "off", "0"};
enum { WORDS = sizeof words / sizeof *words, TRUE_WORDS = 5 };
enum { ALL_WORDS = (1 << WORDS) - 1 };

static mm_first word_first(int word) { return word == 0 ? MM_FIRST_NULL : word < TRUE_WORDS ? MM_FIRST_TRUE : MM_FIRST_FALSE; }

static bool is_blank(uint8_t byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }

/* f->number: one more than the phase; after two digits of the exponent it may be a number, but too long. */
#define NUMBER(phase) (1 + MM_NUMBER_##phase)
enum { NO_NUMBER, NUMBER_EXPONENT_2 = NUMBER(EXPONENT) + 1, NUMBER_LONG };

static uint8_t number_step(mm_grammar_frame *f, uint8_t byte) {
  const bool digit = byte >= '0' && byte <= '9', e = byte == 'e' || byte == 'E', sign = byte == '+' || byte == '-';
  if (digit && f->digits < UINT8_MAX) f->digits++;
  if (f->number == NUMBER_LONG) return digit || e || sign || byte == '.' ? NUMBER_LONG : NO_NUMBER;
  if (digit && f->digits > MM_GRAMMAR_SIGNIFICANT && f->number != NUMBER(ZERO)) return NUMBER_LONG;
  if (f->number >= NUMBER(EXPONENT)) return digit ? f->number + 1 : NO_NUMBER;
  return (uint8_t)(1 + mm_number_next(f->number - 1, byte));
}

static void no_word(mm_grammar_frame *f) {
  f->from = f->to = f->bytes = 0;
  f->number = NO_NUMBER;
  f->digits = 0;
}

/* A byte of the text, which is not a part of a tag any more. f->to: there are blanks behind what it may be. */
static void word_step(mm_grammar_frame *f, uint8_t byte) {
  if (!f->from && !f->number) return;
  const bool begun = f->bytes || f->number > NUMBER(START);
  if (is_blank(byte)) {
    f->to = begun;
    return;
  }
  if (f->to) {
    no_word(f);
    return;
  }
  uint16_t still = 0;
  for (int i = 0; i < WORDS; i++) {
    if (!(f->from & 1u << i) || strlen(words[i]) <= f->bytes) continue;
    const uint8_t folded = (i || f->form->marked) && byte >= 'A' && byte <= 'Z' ? byte | 0x20 : byte;
    if ((uint8_t)words[i][f->bytes] == folded) still |= (uint16_t)(1u << i);
  }
  f->from = still;
  f->bytes = still ? f->bytes + 1 : 0;
  if (f->number) f->number = number_step(f, byte);
  if (!f->number) f->digits = 0;
  if (!f->from && !f->number) no_word(f);
}

static void begin_word(mm_grammar_frame *f) {
  const unsigned types = f->form->types;
  no_word(f);
  if (types & MM_TYPE_NULL) f->from |= 1;
  if (types & MM_TYPE_BOOLEAN) f->from |= ALL_WORDS - 1;
  if (types & (MM_TYPE_NUMBER | MM_TYPE_INTEGER)) f->number = NUMBER(START);
}

/* The text as it is would be taken for a value of another type: *allowed says whether the schema allows that. */
static bool is_other(const mm_grammar_frame *f, bool *allowed) {
  const mm_form *s = f->form, *number = s->by_first[MM_FIRST_NUMBER];
  const bool whole = f->number == NUMBER(ZERO) || f->number == NUMBER(WHOLE),
             real = f->number == NUMBER(FRACTION) || f->number == NUMBER(EXPONENT) || f->number == NUMBER_EXPONENT_2;
  *allowed = false;
  if (f->number == NUMBER_LONG) return true;
  if ((whole && s->types & (MM_TYPE_INTEGER | MM_TYPE_NUMBER)) || (real && s->types & MM_TYPE_NUMBER)) {
    *allowed = number && (number->kind == MM_FORM_NUMBER || (number->kind == MM_FORM_INTEGER && whole));
    return true;
  }
  for (int i = 0; i < WORDS; i++) {
    if (!(f->from & 1u << i) || !f->bytes || strlen(words[i]) != f->bytes) continue;
    *allowed = s->by_first[word_first(i)];
    return true;
  }
  return false;
}

static bool may_close(const mm_grammar_frame *f) {
  bool allowed;
  return is_other(f, &allowed) ? allowed : f->count >= f->form->least && f->count <= f->form->most;
}

/* A text that is too long for a string may still be a word that is allowed. */
static bool may_go_on(const mm_grammar_frame *f) {
  if (f->count <= f->form->most) return true;
  for (int i = 0; i < WORDS; i++)
    if (f->from & 1u << i && f->bytes && f->form->by_first[word_first(i)]) return true;
  return false;
}

/* ---- Values ---- */

enum { VALUE_START, VALUE_TEXT, VALUE_TAIL, VALUE_CLOSE, VALUE_MARKED };

/* A byte that is not the first of a character. */
static bool is_tail(uint8_t byte) { return (byte & 0xc0) == 0x80; }

bool mm_value_in_prose(const mm_grammar_frame *f) {
  return f->form->kind == MM_FORM_VALUE && f->phase == VALUE_TEXT && !f->tag && !f->from && !f->number;
}

static bool text_in_tag(const mm_grammar_frame *f) {
  return f->form->kind == MM_FORM_VALUE && f->phase == VALUE_TEXT && !f->form->marked && f->tag;
}

bool mm_value_in_tag(const mm_grammar_stack *s) {
  return s->depth && (text_in_tag(&s->frame[s->depth - 1]) || (s->value && s->frame[s->value - 1].tag));
}

bool mm_value_leave_tag(mm_grammar_stack *s) {
  mm_grammar_frame *f = s->depth ? &s->frame[s->depth - 1] : NULL;
  if (f && text_in_tag(f)) {
    if (f->tag <= CLOSED) f->count += f->tag;
    no_word(f);
    f->tag = 0;
    return true;
  }
  if (!f || !s->value || !s->frame[s->value - 1].tag || !mm_value_in_string(f)) return false;
  s->frame[s->value - 1].tag = 0;
  return true;
}

static mm_outcome step_text(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const uint8_t waits = f->tag <= CLOSED ? f->tag : 0; /* bytes that are text unless </parameter> is complete */
  if (f->phase == VALUE_TAIL) {
    if (!mm_character_tail(f, byte)) return MM_BAD;
    if (!f->tail) f->phase = VALUE_TEXT;
    return MM_TAKEN;
  }
  if (f->form->marked && byte == MM_GRAMMAR_MARK) return mm_grammar_pop(g, may_close(f) ? MM_AGAIN : MM_BAD);
  f->tag = f->form->marked ? 0 : tag_step(f->tag, byte);
  if (f->tag == CLOSED) return mm_grammar_pop(g, may_close(f) ? MM_TAKEN : MM_BAD);
  if (tag_forbidden(f->tag) || is_tail(byte) || (byte < ' ' && !is_blank(byte)) || (byte >= 0x80 && !mm_character(f, byte))) return MM_BAD;
  if (byte >= 0x80 && f->tail) f->phase = VALUE_TAIL;
  const bool is_waiting = f->tag && f->tag <= CLOSED;
  const bool more = is_waiting && f->tag == waits + 1;
  if (waits && !more) no_word(f);
  if (!is_waiting) word_step(f, byte);
  if (!more) f->count += (uint32_t)waits + (is_waiting ? 0 : 1);
  if (!is_waiting) return may_go_on(f) ? MM_TAKEN : MM_BAD;
  /* The tag ends the value, or there is room for its beginning as text. */
  return may_close(f) || (uint64_t)f->count + f->tag <= f->form->most ? MM_TAKEN : MM_BAD;
}

/* Text that begins as a number does is read as one at its end, so it may be text where its length has no limit, and its number none. */
static bool is_text_or_number(const mm_form *s) {
  const mm_form *number = s->by_first[MM_FIRST_NUMBER];
  const bool any = number && (number->kind == MM_FORM_NUMBER || number->kind == MM_FORM_INTEGER);
  return s->by_first[MM_FIRST_STRING] && (!number || (any && s->most == UINT32_MAX));
}

/* The form of a marked value's elements; NULL: it has none, or nothing more fits on the stack. */
static const mm_form *elements_of(const mm_grammar_stack *g, const mm_form *s) {
  if (g->depth == MM_FORM_DEPTH) return NULL;
  return s->by_first[MM_FIRST_OBJECT] ? s->by_first[MM_FIRST_OBJECT] : s->by_first[MM_FIRST_ARRAY];
}

/* Behind the mark at the start of a marked value, which is nothing or elements. */
static mm_outcome step_marked(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_form *s = f->form, *elements = elements_of(g, s);
  if (f->bytes++ == 1) return byte == '<' ? MM_TAKEN : MM_BAD;
  if (byte == '/') {
    const bool empty = s->empty;
    g->depth--;
    g->frame[g->depth - 1].bytes = MM_MARK_CLOSES;
    return empty ? MM_TAKEN : MM_BAD;
  }
  if (!elements) return MM_BAD;
  *f = (mm_grammar_frame){.form = elements, .bytes = 2};
  return MM_AGAIN;
}

static mm_outcome step_start(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_form *s = f->form;
  const int first = mm_first_of(byte);
  const bool container = !s->marked && (first == MM_FIRST_OBJECT || first == MM_FIRST_ARRAY), number = first == MM_FIRST_NUMBER;
  if (s->marked && byte == MM_GRAMMAR_MARK) {
    if (!s->empty && !elements_of(g, s)) return MM_BAD;
    f->phase = VALUE_MARKED;
    f->bytes = 1;
    return MM_TAKEN;
  }
  if ((container || (number && !is_text_or_number(s))) && s->by_first[first]) {
    f->phase = VALUE_CLOSE;
    g->value = s->marked ? 0 : g->depth;
    return mm_grammar_push(g, s->by_first[first]) ? MM_AGAIN : MM_BAD;
  }
  if (s->item) {
    *f = (mm_grammar_frame){.form = s->item};
    return MM_AGAIN;
  }
  const unsigned json = MM_TYPE_OBJECT | MM_TYPE_ARRAY | MM_TYPE_NUMBER | MM_TYPE_INTEGER;
  if (first == MM_FIRST_OBJECT && s->types & MM_TYPE_OBJECT) return MM_BAD;
  if (first == MM_FIRST_ARRAY && s->types & MM_TYPE_ARRAY) return MM_BAD;
  if (!s->by_first[MM_FIRST_STRING] || (is_blank(byte) && s->types & json)) return MM_BAD;
  f->phase = VALUE_TEXT;
  begin_word(f);
  return MM_AGAIN;
}

static mm_outcome step_value(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  if (f->phase == VALUE_START) return step_start(g, f, byte);
  if (f->phase == VALUE_MARKED) return step_marked(g, f, byte);
  if (f->phase != VALUE_CLOSE) return step_text(g, f, byte);
  g->value = 0;
  if (f->form->marked) return mm_grammar_pop(g, byte == MM_GRAMMAR_MARK ? MM_AGAIN : MM_BAD);
  if (!text_step(f, PARAMETER_END, byte)) return MM_BAD;
  if (f->bytes == CLOSED) g->depth--;
  return MM_TAKEN;
}

/* ---- Prose of M1 ---- */

/* Follows the reply parser's handling of tags: between <think> and </think> tags of calls do not count. f->to is set within <think>.
 * f->from has a bit for each tag of which f->bytes bytes stand at the end. */
static mm_outcome step_prose(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  static const char *const tags[] = {"<think>", "</think>", "<tool_calls>"};
  uint16_t still = 0;
  for (int i = 0; i < 3; i++)
    if (byte == '<' || (f->from & 1u << i && (uint8_t)tags[i][f->bytes] == byte)) still |= (uint16_t)(1u << i);
  f->bytes = byte == '<' ? 1 : still ? f->bytes + 1 : 0;
  f->from = still;
  for (int i = 0; i < 3; i++) {
    if (!(still & 1u << i) || tags[i][f->bytes]) continue;
    f->from = f->bytes = 0;
    if (i == 2 && !f->to) return mm_grammar_push(g, f->form->item) ? MM_TAKEN : MM_BAD;
    if (i < 2) f->to = i == 0;
  }
  return MM_TAKEN;
}

/* ---- All of them ---- */

mm_outcome mm_calls_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  mm_outcome o = MM_BAD;
  switch (f->form->kind) {
    case MM_FORM_CALLS:
      o = step_calls(g, f, byte);
      /* Its JSON is open as long as something stands above it. */
      g->one_line = f->form->one_line && f->phase == CALLS_AFTER && f->bytes == 0;
      return o;
    case MM_FORM_ELEMENTS: return step_elements(g, f, byte);
    case MM_FORM_VALUE: return step_value(g, f, byte);
    default: return step_prose(g, f, byte);
  }
}

bool mm_calls_accept(const mm_grammar_frame *f) {
  const mm_form *s = f->form;
  if (s->kind == MM_FORM_PROSE) return true;
  return s->kind == MM_FORM_CALLS && !s->ends && f->phase == CALLS_NEXT && !f->bytes && f->count >= s->least;
}

bool mm_calls_done(const mm_grammar_frame *f) { return f->form->kind == MM_FORM_CALLS && mm_calls_accept(f) && f->count >= f->form->most; }
