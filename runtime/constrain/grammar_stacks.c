/* The automaton: stacks of values that are not complete, one for each way to read the text. */
#include <string.h>

#include "runtime/constrain/grammar_inside.h"

/* The i-th way to read the text. */
static mm_grammar_stack *way(mm_grammar *g, uint32_t i) { return i ? &g->more[i - 1] : &g->first; }
static const mm_grammar_stack *way_of(const mm_grammar *g, uint32_t i) { return i ? &g->more[i - 1] : &g->first; }

bool mm_grammar_push(mm_grammar_stack *g, const mm_form *s) {
  if (g->depth == MM_FORM_DEPTH) return false;
  g->frame[g->depth++] = (mm_grammar_frame){.form = s};
  return true;
}

void mm_grammar_start(mm_grammar *g, const mm_form *form) {
  mm_grammar_stack *s = &g->first;
  g->count = 1;
  g->lost = false;
  s->depth = s->value = s->named = 0;
  s->one_line = false;
  mm_grammar_push(s, form);
  s->frame[0].to = form->kind == MM_FORM_PROSE && form->least;
}

static void copy_stack(mm_grammar_stack *to, const mm_grammar_stack *from) {
  memcpy(to->frame, from->frame, from->depth * sizeof *from->frame);
  to->depth = from->depth;
  to->value = from->value;
  to->one_line = from->one_line;
  to->named = from->named;
  memcpy(to->names, from->names, from->named);
}

void mm_grammar_copy(mm_grammar *to, const mm_grammar *from) {
  to->count = from->count;
  to->lost = false;
  for (uint32_t i = 0; i < from->count; i++) copy_stack(way(to, i), way_of(from, i));
}

void mm_grammar_way(mm_grammar *to, const mm_grammar *from, uint32_t i) {
  to->count = 1;
  to->lost = false;
  copy_stack(&to->first, way_of(from, i));
}

/* Another way to read the text from here on, which takes the byte at hand after all others. NULL: there are too many. */
mm_grammar_stack *mm_grammar_fork(mm_grammar *all, const mm_grammar_stack *g) {
  if (all->count == MM_GRAMMAR_STACKS || !all->more) {
    all->lost = true;
    return NULL;
  }
  mm_grammar_stack *other = way(all, all->count++);
  copy_stack(other, g);
  return other;
}

/* True if a frame of this form lets the same words of at most `longest` bytes follow with both counts. A byte adds at most one to a
 * count, after it was compared: before the last byte of a word the count has grown by longest - 1 at most. Therefore, as long as count +
 * longest <= least, every comparison with `least` fails and every one with `most` passes; with least <= count and count + longest <=
 * most all pass. */
static bool counts_alike(const mm_form *s, uint32_t x, uint32_t y, uint32_t longest) {
  const uint64_t lo = mm_min(x, y);
  const uint64_t hi = (uint64_t)mm_max(x, y) + longest;
  if (x == y) return true;
  if (s->kind == MM_FORM_FIELDS && !s->any_names) return false;
  /* It counts properties, whose keys differ, or is no number of things. */
  if (s->kind == MM_FORM_OBJECT || s->kind == MM_FORM_ELEMENTS || s->kind == MM_FORM_AUTOMATON || s->kind == MM_FORM_DECIMAL ||
      s->kind == MM_FORM_RULE)
    return false;
  if (s->kind == MM_FORM_ARRAY && lo < s->count) return false; /* the next items have forms of their own */
  return hi <= s->least || (lo >= s->least && hi <= s->most);
}

static bool same_stack(const mm_grammar_stack *a, const mm_grammar_stack *b, uint32_t longest) {
  if (a->depth != b->depth || a->named != b->named || memcmp(a->names, b->names, a->named) != 0) return false;
  for (uint32_t i = a->depth; i-- > 0;) {
    const mm_grammar_frame *x = &a->frame[i], *y = &b->frame[i];
    if (x->form != y->form || x->from != y->from || x->to != y->to || x->bytes != y->bytes || x->phase != y->phase ||
        x->space != y->space || x->digits != y->digits || x->tail != y->tail || x->lo != y->lo || x->hi != y->hi || x->tag != y->tag ||
        x->number != y->number)
      return false;
    if (!counts_alike(x->form, x->count, y->count, longest)) return false;
  }
  return true;
}

bool mm_grammar_same(const mm_grammar *a, const mm_grammar *b, uint32_t longest) {
  if (a->count != b->count) return false;
  for (uint32_t i = 0; i < a->count; i++)
    if (!same_stack(way_of(a, i), way_of(b, i), longest)) return false;
  return true;
}

/* ---- Steps ---- */

static bool step_stack(mm_grammar *all, mm_grammar_stack *g, uint8_t byte) {
  mm_outcome o = MM_AGAIN;
  while (o == MM_AGAIN && g->depth) {
    mm_grammar_frame *f = &g->frame[g->depth - 1];
    const uint8_t space = f->space;
    o = mm_value_step(all, g, byte);
    if (f->space == space) f->space = 0;
  }
  const bool json = g->value && g->depth > g->value;
  return o == MM_TAKEN && (!json || mm_value_step_json(&g->frame[g->value - 1], byte));
}

/* Removes the ways that have become the same as another. */
static void drop_same(mm_grammar *g) {
  uint32_t n = 1;
  for (uint32_t i = 1; i < g->count; i++) {
    uint32_t k = 0;
    while (k < n && !same_stack(way(g, k), way(g, i), UINT32_MAX)) k++;
    if (k < n) continue;
    if (n != i) copy_stack(way(g, n), way(g, i));
    n++;
  }
  g->count = n;
}

void mm_grammar_add(mm_grammar *to, const mm_grammar *from) {
  for (uint32_t i = 0; i < from->count; i++) {
    mm_grammar_stack *other = to->count ? mm_grammar_fork(to, way_of(from, i)) : &to->first;
    if (!to->count) copy_stack(other, way_of(from, i)), to->count = 1;
    drop_same(to);
  }
}

bool mm_grammar_step(mm_grammar *g, uint8_t byte) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < g->count; i++) {
    if (!step_stack(g, way(g, i), byte)) continue;
    if (n != i) copy_stack(way(g, n), way(g, i));
    n++;
  }
  g->count = n;
  if (n > 1) drop_same(g);
  return n;
}

static bool stack_accepts(const mm_grammar_stack *g) {
  const mm_grammar_frame *f = &g->frame[0];
  if (g->depth && f->form->kind == MM_FORM_RULE) return mm_rules_accept(g);
  if (g->depth != 1) return g->depth == 0;
  return f->form->kind >= MM_FORM_CALLS ? mm_calls_accept(f) : mm_value_accepts(f);
}

bool mm_grammar_accepts(const mm_grammar *g) {
  for (uint32_t i = 0; i < g->count; i++)
    if (stack_accepts(way_of(g, i))) return true;
  return false;
}

static bool stack_done(const mm_grammar_stack *g) {
  const mm_grammar_frame *f = &g->frame[0];
  if (g->depth && f->form->kind == MM_FORM_RULE) return mm_rules_done(g);
  if (g->depth != 1) return g->depth == 0;
  return f->form->kind >= MM_FORM_CALLS ? mm_calls_done(f) : mm_value_done(f);
}

bool mm_grammar_done(const mm_grammar *g) {
  for (uint32_t i = 0; i < g->count; i++)
    if (!stack_done(way_of(g, i))) return false;
  return true;
}

/* ---- Within texts ---- */

/* As long as a word of at most `longest` bytes follows, every comparison of the count with the form's bounds comes out the same. */
static bool is_far(const mm_grammar_frame *f, uint32_t longest) {
  const uint64_t most = (uint64_t)f->count + longest;
  return most <= f->form->least || (f->count >= f->form->least && most <= f->form->most);
}

/* The way's value that is open, if it is one whose text is of this kind; tags within the values around it have not begun. */
static const mm_grammar_frame *text_frame(const mm_grammar_stack *s, mm_text_kind kind) {
  const mm_grammar_frame *f = s->depth ? &s->frame[s->depth - 1] : NULL;
  if (!f || (s->value && s->frame[s->value - 1].tag)) return NULL;
  return (kind == MM_TEXT_STRING ? mm_value_in_string(f) : mm_value_in_prose(f)) ? f : NULL;
}

mm_grammar_text mm_grammar_text_of(const mm_grammar *g, uint32_t longest) {
  const mm_grammar_frame *one = g->count == 1 ? text_frame(&g->first, MM_TEXT_PROSE) : NULL;
  mm_grammar_text t = {.kind = MM_TEXT_STRING, .longest = UINT32_MAX};
  if (one) {
    const uint32_t most = one->form->most, left = most == UINT32_MAX ? most : one->count > most ? 0 : most - one->count;
    return (mm_grammar_text){.kind = MM_TEXT_PROSE, .longest = left, .tags = true};
  }
  for (uint32_t i = 0; i < g->count; i++) {
    const mm_grammar_stack *s = way_of(g, i);
    const mm_grammar_frame *f = text_frame(s, MM_TEXT_STRING);
    if (!f || (g->count > 1 && !is_far(f, longest))) return (mm_grammar_text){0};
    t.tags |= s->value > 0;
    if (is_far(f, longest)) continue;
    t.need = f->form->least > f->count ? f->form->least - f->count : 0;
    if (f->form->most != UINT32_MAX) t.longest = f->form->most - f->count;
  }
  return t;
}

bool mm_grammar_plain(mm_grammar *plain, const mm_grammar *g) {
  if (g->count != 1 || !mm_value_in_tag(&g->first)) return false;
  plain->more = NULL;
  mm_grammar_copy(plain, g);
  return mm_value_leave_tag(&plain->first);
}

mm_tag_walk mm_grammar_tag(const mm_grammar *g, uint32_t depth) {
  if (g->count != 1 || g->first.depth != depth) return MM_TAG_ENDS;
  return mm_value_in_tag(&g->first) ? MM_TAG_GOES_ON : MM_TAG_LEFT;
}

bool mm_grammar_end_string(mm_grammar *g, uint32_t more) {
  g->first.frame[g->first.depth - 1].count += more;
  return mm_grammar_step(g, '"');
}

bool mm_grammar_in_text(const mm_grammar *g, uint32_t longest) {
  for (uint32_t i = 0; i < g->count; i++) {
    const mm_grammar_frame *f = text_frame(way_of(g, i), MM_TEXT_STRING);
    if (!f || !is_far(f, longest)) return false;
  }
  return g->count;
}

/* In this state of a rule the next byte alone decides; alone: no rule called it. */
static bool is_decided(const mm_automaton *m, uint32_t at, bool alone) {
  return !m->end || (m->first_call[at] == m->first_call[at + 1] && (alone || m->end[at] == MM_AUTOMATON_GOES_ON));
}

bool mm_grammar_automaton(const mm_grammar *g, mm_automaton_place *p) {
  const mm_grammar_frame *f = g->count == 1 && g->first.depth && !g->first.value ? &g->first.frame[g->first.depth - 1] : NULL;
  if (!f || !f->phase || (f->form->kind != MM_FORM_AUTOMATON && f->form->kind != MM_FORM_RULE)) return false;
  *p = (mm_automaton_place){f->form->automaton, f->count, g->first.depth == 1};
  return is_decided(p->automaton, p->at, p->alone);
}

mm_automaton_step mm_automaton_take(mm_automaton_place *p, uint8_t byte) {
  const mm_automaton *m = p->automaton;
  const uint16_t next = m->next[(size_t)p->at * m->classes + m->class_of[byte]];
  if (next == MM_AUTOMATON_NONE) return MM_AUTOMATON_REFUSES;
  if (next == m->last || !is_decided(m, next, p->alone)) return MM_AUTOMATON_LEAVES;
  p->at = next;
  return MM_AUTOMATON_TAKES;
}

void mm_grammar_set_automaton(mm_grammar *g, uint32_t at) { g->first.frame[g->first.depth - 1].count = at; }
