/* The automaton's values of JSON. */
#include <stdlib.h>
#include <string.h>

#include "runtime/constrain/grammar_inside.h"

/* ---- Literals ---- */

int mm_literal_compare(const mm_literal *a, const mm_literal *b) {
  const int order = memcmp(a->p, b->p, mm_min(a->n, b->n));
  return order ? order : (a->n > b->n) - (a->n < b->n);
}

static int compare(const void *a, const void *b) { return mm_literal_compare(a, b); }

void mm_literals_sort(mm_form *literals) { qsort(literals->literal, literals->count, sizeof *literals->literal, compare); }

static int compare_places(const void *a, const void *b, void *literal) {
  const mm_literal *l = literal;
  return mm_literal_compare(&l[*(const uint16_t *)a], &l[*(const uint16_t *)b]);
}

void mm_literals_order(mm_form *keys, uint16_t *order) {
  for (uint32_t i = keys->count, end = keys->count, needed = 0; i-- > 0;) {
    if (keys->literal[i].required) end = i + 1, needed++;
    keys->literal[i].needed = (uint16_t)needed;
    keys->literal[i].end = (uint16_t)end;
    order[i] = (uint16_t)i;
  }
  qsort_r(order, keys->count, sizeof *order, compare_places, keys->literal);
  keys->order = order;
}

/* The place among the form's literals of the one that is i-th by its bytes. */
static uint32_t place_of(const mm_form *s, uint32_t i) { return s->order ? s->order[i] : i; }

/* The byte after the first n of the i-th literal in the order of bytes; -1 if the literal has no more bytes. */
static int byte_after(const mm_form *s, uint32_t i, uint32_t n) {
  const mm_literal *l = &s->literal[place_of(s, i)];
  return l->n > n ? (uint8_t)l->p[n] : -1;
}

/* The first of [lo, hi), whose first n bytes are equal, whose next byte is `byte` or more. */
static uint32_t first_from(const mm_form *s, uint32_t lo, uint32_t hi, uint32_t n, int byte) {
  while (lo < hi) {
    const uint32_t middle = lo + (hi - lo) / 2;
    if (byte_after(s, middle, n) < byte)
      lo = middle + 1;
    else
      hi = middle;
  }
  return lo;
}

bool mm_literal_step(mm_grammar_frame *f, uint32_t first, uint32_t end, uint8_t byte) {
  const mm_form *s = f->form;
  const uint32_t lo = f->bytes ? f->from : 0, hi = f->bytes ? f->to : s->count;
  const uint32_t from = first_from(s, lo, hi, f->bytes, byte), to = first_from(s, from, hi, f->bytes, byte + 1);
  uint32_t i = from;
  while (i < to && (place_of(s, i) < first || place_of(s, i) >= end)) i++;
  if (i == to) return false;
  f->from = (uint16_t)from;
  f->to = (uint16_t)to;
  f->bytes++;
  return true;
}

/* One of the literals at places [first, end) is complete; *which is its index in the order of bytes. Complete literals are the shortest
 * of all that begin with the bytes of f. */
static bool literal_whole(const mm_grammar_frame *f, uint32_t first, uint32_t end, uint16_t *which) {
  const mm_form *s = f->form;
  for (uint32_t i = f->from; f->bytes && i < f->to && byte_after(s, i, f->bytes) < 0; i++)
    if (place_of(s, i) >= first && place_of(s, i) < end) return *which = (uint16_t)i, true;
  return false;
}

int mm_literal_place(const mm_grammar_frame *f, uint32_t first, uint32_t end) {
  uint16_t which;
  return literal_whole(f, first, end, &which) ? (int)place_of(f->form, which) : -1;
}

static mm_outcome step_literals(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const uint32_t first = f->count & UINT16_MAX, end = f->count ? f->count >> 16 : f->form->count;
  uint16_t which;
  if (mm_literal_step(f, first, end, byte)) return MM_TAKEN;
  if (!literal_whole(f, first, end, &which)) return MM_BAD;
  g->depth--;
  if (g->depth && g->frame[g->depth - 1].form->unique) g->frame[g->depth - 1].from = (uint16_t)(which + 1);
  return MM_AGAIN;
}

/* ---- Numbers ---- */

int mm_number_next(int phase, uint8_t byte) {
  const bool digit = byte >= '0' && byte <= '9', e = byte == 'e' || byte == 'E';
  switch (phase) {
    case MM_NUMBER_START:
    case MM_NUMBER_MINUS:
      if (byte == '-' && phase == MM_NUMBER_START) return MM_NUMBER_MINUS;
      return !digit ? -1 : byte == '0' ? MM_NUMBER_ZERO : MM_NUMBER_WHOLE;
    case MM_NUMBER_ZERO:
    case MM_NUMBER_WHOLE:
      if (digit && phase == MM_NUMBER_WHOLE) return MM_NUMBER_WHOLE;
      return byte == '.' ? MM_NUMBER_POINT : e ? MM_NUMBER_E : -1;
    case MM_NUMBER_POINT:
    case MM_NUMBER_FRACTION: return digit ? MM_NUMBER_FRACTION : e && phase == MM_NUMBER_FRACTION ? MM_NUMBER_E : -1;
    default: /* MM_NUMBER_E, _SIGN, _EXPONENT */
      if (phase == MM_NUMBER_E && (byte == '+' || byte == '-')) return MM_NUMBER_SIGN;
      return digit ? MM_NUMBER_EXPONENT : -1;
  }
}

static bool number_whole(const mm_grammar_frame *f) {
  return f->phase == MM_NUMBER_ZERO || f->phase == MM_NUMBER_WHOLE || f->phase == MM_NUMBER_FRACTION || f->phase == MM_NUMBER_EXPONENT;
}

/* Whole numbers: no more than 64 bits. f->tail digits so far compare as f->lo with the largest. */
enum { EQUAL, LESS, MORE };

static bool whole_digit(mm_grammar_frame *f, uint8_t digit) {
  static const char largest[] = "9223372036854775807";
  if (f->tail == sizeof largest - 1) return false;
  const bool last = f->tail == sizeof largest - 2;
  const uint8_t limit = last && f->hi ? '8' : (uint8_t)largest[f->tail];
  if (f->lo == EQUAL && digit != limit) f->lo = digit < limit ? LESS : MORE;
  f->tail++;
  return !last || f->lo != MORE;
}

/* Other numbers have only as many digits as a finite double can distinguish. */
static bool real_digit(mm_grammar_frame *f, uint8_t digit, bool exponent) {
  if (exponent) return ++f->hi <= MM_GRAMMAR_EXPONENT;
  if (f->tail || digit != '0') f->tail++;
  return f->tail <= MM_GRAMMAR_SIGNIFICANT;
}

static mm_outcome step_number(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const bool digit = byte >= '0' && byte <= '9', real = f->form->kind == MM_FORM_NUMBER;
  const bool fits = real && f->digits + 4 <= MM_GRAMMAR_DIGITS; /* for what must follow */
  int next = mm_number_next(f->phase, byte);
  if ((next == MM_NUMBER_POINT && (!fits || f->tail >= MM_GRAMMAR_SIGNIFICANT)) || (next == MM_NUMBER_E && !fits)) next = -1;
  if (next >= 0) {
    if (!real && byte == '-') f->hi = 1;
    if (digit && !(real ? real_digit(f, byte, next == MM_NUMBER_EXPONENT) : whole_digit(f, byte))) return MM_BAD;
    f->phase = (uint8_t)next;
    return ++f->digits <= MM_GRAMMAR_DIGITS ? MM_TAKEN : MM_BAD;
  }
  return number_whole(f) ? mm_grammar_pop(g, MM_AGAIN) : MM_BAD;
}

/* The part of a number that the frame holds. */
static mm_decimal_part part_of(const mm_grammar_frame *f) {
  return (mm_decimal_part){.digits = (uint64_t)f->count << 32 | (uint32_t)f->from << 16 | f->to,
                           .places = f->digits,
                           .negative = f->hi,
                           .point = f->phase >= MM_NUMBER_POINT,
                           .begun = f->phase > MM_NUMBER_MINUS};
}

static bool decimal_whole(const mm_grammar_frame *f) {
  const mm_decimal_part p = part_of(f);
  return number_whole(f) && mm_decimal_fits(f->form->decimal, &p);
}

static mm_outcome decimal_digit(mm_grammar_frame *f, uint8_t digit) {
  const mm_decimal *d = f->form->decimal;
  mm_decimal_part p = part_of(f);
  if (f->phase == MM_NUMBER_ZERO || (p.point && p.places == d->places) || p.digits > (UINT64_MAX - 9) / 10) return MM_BAD;
  p.digits = p.digits * 10 + digit;
  p.places += p.point;
  p.begun = true;
  f->phase = p.point ? MM_NUMBER_FRACTION : p.digits ? MM_NUMBER_WHOLE : MM_NUMBER_ZERO;
  f->count = (uint32_t)(p.digits >> 32);
  f->from = (uint16_t)(p.digits >> 16);
  f->to = (uint16_t)p.digits;
  f->digits = p.places;
  return mm_decimal_may_go_on(d, &p) ? MM_TAKEN : MM_BAD;
}

static mm_outcome step_decimal(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_decimal *d = f->form->decimal;
  if (byte >= '0' && byte <= '9') return decimal_digit(f, (uint8_t)(byte - '0'));
  if (byte == '-' && f->phase == MM_NUMBER_START) {
    f->hi = 1;
    f->phase = MM_NUMBER_MINUS;
  } else if (byte == '.' && (f->phase == MM_NUMBER_ZERO || f->phase == MM_NUMBER_WHOLE) && d->places) {
    f->phase = MM_NUMBER_POINT;
  } else {
    return decimal_whole(f) ? mm_grammar_pop(g, MM_AGAIN) : MM_BAD;
  }
  const mm_decimal_part p = part_of(f);
  return mm_decimal_may_go_on(d, &p) ? MM_TAKEN : MM_BAD;
}

/* ---- Strings ---- */

static mm_outcome step_automaton(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_automaton *m = f->form->automaton;
  const uint16_t next = m->next[(size_t)f->count * m->classes + m->class_of[byte]];
  if (next == MM_AUTOMATON_NONE) return MM_BAD;
  f->count = next;
  f->phase = 1;
  if (next == m->last) g->depth--;
  return MM_TAKEN;
}

enum { STRING_START, STRING_TEXT, STRING_ESCAPE, STRING_HEX, STRING_TAIL };

bool mm_character(mm_grammar_frame *f, uint8_t byte) {
  f->lo = 0x80;
  f->hi = 0xbf;
  f->tail = 0;
  if (byte < 0x80) return byte >= 0x20;
  if (byte < 0xc2 || byte > 0xf4) return false;
  f->tail = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
  if (byte == 0xe0) f->lo = 0xa0;
  if (byte == 0xed) f->hi = 0x9f;
  if (byte == 0xf0) f->lo = 0x90;
  if (byte == 0xf4) f->hi = 0x8f;
  return true;
}

bool mm_character_tail(mm_grammar_frame *f, uint8_t byte) {
  const bool ok = byte >= f->lo && byte <= f->hi;
  f->lo = 0x80;
  f->hi = 0xbf;
  f->tail--;
  return ok;
}

static bool string_text(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  if (byte == '"') {
    g->depth--;
    return f->count >= f->form->least;
  }
  if (f->count >= f->form->most) return false;
  f->count++;
  if (byte == '\\') return f->phase = STRING_ESCAPE, true;
  if (!mm_character(f, byte)) return false;
  if (f->tail) f->phase = STRING_TAIL;
  return true;
}

/* \uXXXX without surrogates: what needs two can be written as itself. */
static bool string_hex(mm_grammar_frame *f, uint8_t byte) {
  const bool digit = byte >= '0' && byte <= '9', letter = (byte | 0x20) >= 'a' && (byte | 0x20) <= 'f';
  if (!digit && !letter) return false;
  if (f->tail == 4) f->hi = (byte | 0x20) == 'd';
  if (f->tail == 3 && f->hi && !(byte >= '0' && byte <= '7')) return false;
  if (--f->tail == 0) f->phase = STRING_TEXT;
  return true;
}

static mm_outcome step_string(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  bool ok = false;
  switch (f->phase) {
    case STRING_START:
      ok = byte == '"';
      f->phase = STRING_TEXT;
      break;
    case STRING_TEXT: ok = string_text(g, f, byte); break;
    case STRING_ESCAPE:
      ok = byte && strchr("\"\\/bfnrtu", byte);
      f->phase = byte == 'u' ? STRING_HEX : STRING_TEXT;
      f->tail = 4;
      break;
    case STRING_HEX: ok = string_hex(f, byte); break;
    case STRING_TAIL:
      ok = mm_character_tail(f, byte);
      if (!f->tail) f->phase = STRING_TEXT;
      break;
    default: break;
  }
  return ok ? MM_TAKEN : MM_BAD;
}

bool mm_value_in_string(const mm_grammar_frame *f) { return f->form->kind == MM_FORM_STRING && f->phase == STRING_TEXT; }

/* ---- Objects and arrays ---- */

enum { OPENING, FIRST, NEXT, AFTER_COMMA, KEY, COLON };

uint32_t mm_properties_end(const mm_grammar_frame *f) { return f->count < f->form->count ? f->form->literal[f->count].end : f->count; }

/* Properties [first, end) of which one may come now: the next that is required is the last of them. Bounds of their number leave out those
 * behind which too few are left, and those that are not required where no other has room. */
static void properties_next(const mm_grammar_frame *f, uint32_t *first, uint32_t *end) {
  const mm_form *s = f->form;
  *first = f->count;
  *end = mm_properties_end(f);
  if (*first == *end) return;
  if (f->digits < s->least) *end = (uint32_t)mm_min(*end, s->count + f->digits + 1 - s->least);
  if (s->most != UINT32_MAX && f->digits + s->literal[f->count].needed >= s->most) *first = s->literal[*end - 1].required ? *end - 1 : *end;
}

static bool may_close(const mm_grammar_frame *f) {
  const mm_form *s = f->form;
  if (s->kind != MM_FORM_OBJECT) return f->count >= s->least;
  const uint32_t end = mm_properties_end(f);
  return f->digits >= s->least && (end == f->count || !s->literal[end - 1].required);
}

static bool may_go_on(const mm_grammar_stack *g, const mm_grammar_frame *f) {
  uint32_t first, end;
  if (g->depth == MM_FORM_DEPTH) return false;
  if (f->form->unique && f->from >= f->form->item->count) return false;
  if (f->form->kind != MM_FORM_OBJECT) return f->count < f->form->most;
  properties_next(f, &first, &end);
  return first < end || f->form->item;
}

/* A key that the object does not declare: those that it declares are behind it. */
static mm_outcome begin_other_key(mm_grammar_stack *g) {
  mm_grammar_frame *f = &g->frame[g->depth - 1];
  f->count = f->form->count;
  f->phase = COLON;
  f->space = 0;
  f->tag = 1;
  return mm_grammar_push(g, f->form->key) ? MM_AGAIN : MM_BAD;
}

static mm_outcome begin_property(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  uint32_t first, end;
  properties_next(f, &first, &end);
  const bool other = f->form->item && may_close(f);
  if (other && first == end) return begin_other_key(g);
  mm_grammar_stack *fork = other ? mm_grammar_fork(all, g) : NULL;
  if (fork) begin_other_key(fork);
  f->phase = KEY;
  f->bytes = 0;
  return mm_literal_step(f, first, end, byte) ? MM_TAKEN : MM_BAD;
}

static mm_outcome begin_member(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  static const mm_form any_string = {.kind = MM_FORM_STRING, .most = UINT32_MAX};
  const mm_form *s = f->form;
  if (!may_go_on(g, f)) return MM_BAD;
  if (s->kind == MM_FORM_OBJECT) return begin_property(all, g, f, byte);
  const mm_form *item = s->kind == MM_FORM_MAP ? (s->key ? s->key : &any_string)
                        : f->count < s->count  ? s->literal[f->count].value
                                               : s->item;
  f->count++;
  f->phase = s->kind == MM_FORM_MAP ? COLON : NEXT;
  if (!mm_grammar_push(g, item)) return MM_BAD;
  /* As many literals stay behind as the list needs more items. */
  const uint32_t needed = s->least > f->count ? s->least - f->count : 0;
  if (s->unique) g->frame[g->depth - 1].count = f->from | (item->count - needed) << 16;
  return MM_AGAIN;
}

static mm_outcome step_key(mm_grammar_frame *f, uint8_t byte) {
  uint16_t which;
  uint32_t first, end;
  properties_next(f, &first, &end);
  if (mm_literal_step(f, first, end, byte)) return MM_TAKEN;
  if (!literal_whole(f, first, end, &which)) return MM_BAD;
  f->from = which;
  f->phase = COLON;
  return MM_AGAIN;
}

static mm_outcome step_colon(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  if (byte != ':') return MM_BAD;
  const mm_form *s = f->form;
  const bool declared = s->kind == MM_FORM_OBJECT && !f->tag;
  const uint32_t place = declared ? place_of(s, f->from) : 0;
  const mm_form *value = declared ? s->literal[place].value : s->item;
  if (declared) f->count = place + 1;
  if (declared && (s->least || s->most != UINT32_MAX)) f->digits++;
  f->phase = NEXT;
  f->bytes = f->from = f->to = 0;
  return mm_grammar_push(g, value) ? MM_TAKEN : MM_BAD;
}

static mm_outcome step_container(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const bool array = f->form->kind == MM_FORM_ARRAY;
  switch (f->phase) {
    case OPENING: f->phase = FIRST; return byte == (array ? '[' : '{') && (may_close(f) || may_go_on(g, f)) ? MM_TAKEN : MM_BAD;
    case FIRST:
    case NEXT:
      if (byte == (array ? ']' : '}')) return mm_grammar_pop(g, may_close(f) ? MM_TAKEN : MM_BAD);
      if (f->phase == FIRST) return begin_member(all, g, f, byte);
      if (byte != ',' || f->space || !may_go_on(g, f)) return MM_BAD;
      f->phase = AFTER_COMMA;
      return MM_TAKEN;
    case AFTER_COMMA: return begin_member(all, g, f, byte);
    case KEY: return step_key(f, byte);
    default: return step_colon(g, f, byte);
  }
}

/* ---- All of them ---- */

int mm_first_of(uint8_t byte) {
  switch (byte) {
    case '{': return MM_FIRST_OBJECT;
    case '[': return MM_FIRST_ARRAY;
    case '"': return MM_FIRST_STRING;
    case 't': return MM_FIRST_TRUE;
    case 'f': return MM_FIRST_FALSE;
    case 'n': return MM_FIRST_NULL;
    default: return byte == '-' || (byte >= '0' && byte <= '9') ? MM_FIRST_NUMBER : -1;
  }
}

/* Blanks may stand here. */
static bool between(const mm_grammar_frame *f) {
  switch (f->form->kind) {
    case MM_FORM_OBJECT:
    case MM_FORM_MAP:
    case MM_FORM_ARRAY: return f->phase == NEXT ? may_close(f) : f->phase != KEY && f->phase != COLON;
    case MM_FORM_LITERALS: return !f->form->exact && f->bytes == 0;
    case MM_FORM_AUTOMATON:
    case MM_FORM_UNION: return !f->form->exact && f->phase == 0;
    case MM_FORM_RULE:
    case MM_FORM_CALLS:
    case MM_FORM_ELEMENTS:
    case MM_FORM_VALUE:
    case MM_FORM_FIELDS:
    case MM_FORM_ITEMS:
    case MM_FORM_PROSE: return false;
    default: return f->phase == 0;
  }
}

static mm_outcome blank(mm_grammar_frame *f, bool start, bool one_line, uint8_t byte) {
  if (one_line && byte != ' ' && byte != '\t') return MM_BAD;
  if (byte != ' ' && byte != '\t' && f->space >= (start ? 2 : 1)) return MM_BAD;
  return ++f->space <= MM_GRAMMAR_SPACE ? MM_TAKEN : MM_BAD;
}

/* Each alternative is one more way to read the text. */
static mm_outcome step_union(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f) {
  const mm_form *s = f->form;
  for (uint32_t i = 1; i < s->count; i++) {
    mm_grammar_stack *other = mm_grammar_fork(all, g);
    if (other) other->frame[other->depth - 1] = (mm_grammar_frame){.form = s->literal[i].value};
  }
  *f = (mm_grammar_frame){.form = s->literal[0].value};
  return MM_AGAIN;
}

mm_outcome mm_value_step(mm_grammar *all, mm_grammar_stack *g, uint8_t byte) {
  mm_grammar_frame *f = &g->frame[g->depth - 1];
  if (between(f) && (byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r'))
    return blank(f, g->depth == 1 && f->phase == 0, g->one_line, byte);
  switch (f->form->kind) {
    case MM_FORM_CHOICE: {
      const int first = mm_first_of(byte);
      const mm_form *s = first < 0 ? NULL : f->form->by_first[first];
      if (!s) return MM_BAD;
      *f = (mm_grammar_frame){.form = s};
      return MM_AGAIN;
    }
    case MM_FORM_LITERALS: return step_literals(g, f, byte);
    case MM_FORM_NUMBER:
    case MM_FORM_INTEGER: return step_number(g, f, byte);
    case MM_FORM_STRING: return step_string(g, f, byte);
    case MM_FORM_AUTOMATON: return step_automaton(g, f, byte);
    case MM_FORM_DECIMAL: return step_decimal(g, f, byte);
    case MM_FORM_UNION: return step_union(all, g, f);
    case MM_FORM_RULE: return mm_rule_step(all, g, f, byte);
    case MM_FORM_CALLS:
    case MM_FORM_ELEMENTS:
    case MM_FORM_VALUE:
    case MM_FORM_PROSE: return mm_calls_step(g, f, byte);
    case MM_FORM_FIELDS: return mm_fields_step(g, f, byte);
    case MM_FORM_ITEMS: return mm_items_step(g, f, byte);
    default: return step_container(all, g, f, byte);
  }
}

bool mm_value_accepts(const mm_grammar_frame *f) {
  uint16_t which;
  if (f->form->kind == MM_FORM_LITERALS) return literal_whole(f, 0, f->form->count, &which);
  if (f->form->kind == MM_FORM_DECIMAL) return decimal_whole(f);
  return (f->form->kind == MM_FORM_NUMBER || f->form->kind == MM_FORM_INTEGER) && number_whole(f);
}

bool mm_value_done(const mm_grammar_frame *f) {
  uint16_t which;
  /* The longest of those with these bytes comes last. */
  return f->form->kind == MM_FORM_LITERALS && literal_whole(f, 0, f->form->count, &which) && byte_after(f->form, f->to - 1u, f->bytes) < 0;
}
