/* The automaton's values of M3's calls: lists and objects as elements. A value ends with the mark and "</"; the form around it knows the
 * name that follows. */
#include <string.h>

#include "runtime/constrain/grammar_inside.h"

enum { TAG, NAME, NAME_TAIL, CLOSE };

/* The list or object ends. */
static mm_outcome leave(mm_grammar_stack *g, bool complete) {
  g->depth--;
  g->frame[g->depth - 1].bytes = MM_MARK_CLOSES;
  return complete ? MM_TAKEN : MM_BAD;
}

/* A byte of the closing tag of an element of this name. */
static bool step_close(mm_grammar_frame *f, const char *name, size_t n, uint8_t byte) {
  static const uint8_t begin[MM_MARK_CLOSES] = {MM_GRAMMAR_MARK, '<', '/'};
  const size_t at = f->bytes++;
  const uint8_t wanted = at < MM_MARK_CLOSES ? begin[at] : at < MM_MARK_CLOSES + n ? (uint8_t)name[at - MM_MARK_CLOSES] : '>';
  if (byte != wanted) return false;
  if (at < MM_MARK_CLOSES + n) return true;
  f->phase = TAG;
  f->bytes = f->from = 0;
  return true;
}

/* ---- Lists ---- */

mm_outcome mm_items_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  static const uint8_t item[] = {MM_GRAMMAR_MARK, '<', 'i', 't', 'e', 'm', '>'};
  const mm_form *s = f->form;
  if (f->phase == CLOSE) return step_close(f, "item", 4, byte) ? MM_TAKEN : MM_BAD;
  if (f->bytes == 2 && byte == '/') return leave(g, f->count >= s->least);
  if (f->bytes == 2 && (f->count >= s->most || g->depth == MM_FORM_DEPTH)) return MM_BAD;
  if (byte != item[f->bytes++]) return MM_BAD;
  if (f->bytes < sizeof item) return MM_TAKEN;
  f->count++;
  f->phase = CLOSE;
  f->bytes = 0;
  return mm_grammar_push(g, s->item) ? MM_TAKEN : MM_BAD;
}

/* ---- Objects with any names ---- */

static mm_outcome step_name(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  if (byte == '>' && g->named > f->to) {
    f->phase = CLOSE;
    f->bytes = f->lo = f->hi = 0;
    return mm_grammar_push(g, f->form->item) ? MM_TAKEN : MM_BAD;
  }
  if (byte <= ' ' || byte == 0x7f || strchr("\"'<>/", byte) || g->named + 4 > MM_GRAMMAR_NAMES || !mm_character(f, byte)) return MM_BAD;
  g->names[g->named++] = (char)byte;
  if (f->tail) f->phase = NAME_TAIL;
  return MM_TAKEN;
}

static mm_outcome step_any(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_form *s = f->form;
  switch (f->phase) {
    case NAME: return step_name(g, f, byte);
    case NAME_TAIL:
      if (!mm_character_tail(f, byte)) return MM_BAD;
      g->names[g->named++] = (char)byte;
      if (!f->tail) f->phase = NAME;
      return MM_TAKEN;
    case CLOSE:
      if (!step_close(f, g->names + f->to, (size_t)(g->named - f->to), byte)) return MM_BAD;
      if (f->phase == TAG) g->named = f->to, f->to = 0;
      return MM_TAKEN;
    default: break;
  }
  if (f->bytes < 2) return byte == (f->bytes++ ? '<' : MM_GRAMMAR_MARK) ? MM_TAKEN : MM_BAD;
  if (byte == '/') return leave(g, f->count >= s->least);
  if (f->count >= s->most || g->depth == MM_FORM_DEPTH) return MM_BAD;
  f->count++;
  f->phase = NAME;
  f->to = g->named;
  return step_name(g, f, byte);
}

/* ---- Objects ---- */

/* The mark and "<" that stand before the name of an element. */
enum { OPENING = 2 };

mm_outcome mm_fields_step(mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_form *s = f->form;
  if (s->any_names) return step_any(g, f, byte);
  if (f->phase == CLOSE) {
    const mm_literal *l = &s->literal[f->count - 1]; /* its name and ">" */
    return step_close(f, l->p, l->n - 1, byte) ? MM_TAKEN : MM_BAD;
  }
  if (f->digits < OPENING) {
    if (f->bytes == OPENING) { /* they are there */
      f->digits = OPENING;
      f->bytes = 0;
    } else {
      return byte == (f->bytes++ ? '<' : MM_GRAMMAR_MARK) ? MM_TAKEN : MM_BAD;
    }
  }
  const uint32_t end = mm_properties_end(f);
  if (!f->bytes && byte == '/') return leave(g, end == f->count || !s->literal[end - 1].required);
  if (f->count == s->count || g->depth == MM_FORM_DEPTH || !mm_literal_step(f, f->count, end, byte)) return MM_BAD;
  const int place = mm_literal_place(f, f->count, end);
  if (place < 0) return MM_TAKEN;
  f->count = (uint32_t)place + 1;
  f->phase = CLOSE;
  f->bytes = f->from = f->to = 0;
  f->digits = 0;
  return mm_grammar_push(g, s->literal[place].value) ? MM_TAKEN : MM_BAD;
}
