/* The automaton's texts of regular expressions and grammars: a frame for each rule that is called and not complete. Where a byte may
 * go on in a rule, begin a called one or come behind the rule's end, each of these is another way to read the text. */
#include "runtime/constrain/grammar_inside.h"

/* The byte may be the first of a text of the called rule: one more way. A rule with nothing behind its call leaves the stack. */
static void begin_call(mm_grammar *all, const mm_grammar_stack *g, const mm_automaton *m, const mm_automaton_call *call, uint8_t byte) {
  const mm_form_rule *rule = &g->frame[g->depth - 1].form->called[call->rule];
  if (!(rule->first[byte / 32] >> (byte % 32) & 1)) return;
  mm_grammar_stack *other = mm_grammar_fork(all, g);
  if (!other) return;
  mm_grammar_frame *f = &other->frame[other->depth - 1];
  f->count = call->next;
  f->phase = 1;
  if (m->end[call->next] == MM_AUTOMATON_ENDS) other->depth--;
  if (!mm_grammar_push(other, &rule->form)) all->count--;
}

mm_outcome mm_rule_step(mm_grammar *all, mm_grammar_stack *g, mm_grammar_frame *f, uint8_t byte) {
  const mm_automaton *m = f->form->automaton;
  const uint32_t at = f->count;
  for (uint32_t i = m->first_call[at]; i < m->first_call[at + 1]; i++) begin_call(all, g, m, &m->call[i], byte);
  /* An empty text of a rule is no call (mm_grammar_rule.empty). */
  if (m->end[at] != MM_AUTOMATON_GOES_ON && f->phase && g->depth > 1) {
    mm_grammar_stack *other = mm_grammar_fork(all, g);
    if (other) other->depth--;
  }
  const uint16_t next = m->next[(size_t)at * m->classes + m->class_of[byte]];
  if (next == MM_AUTOMATON_NONE) return MM_BAD;
  f->count = next;
  f->phase = 1;
  if (m->end[next] == MM_AUTOMATON_ENDS && g->depth > 1) g->depth--;
  return MM_TAKEN;
}

bool mm_rules_accept(const mm_grammar_stack *g) {
  for (uint32_t i = 0; i < g->depth; i++)
    if (g->frame[i].form->automaton->end[g->frame[i].count] == MM_AUTOMATON_GOES_ON) return false;
  return true;
}

bool mm_rules_done(const mm_grammar_stack *g) {
  for (uint32_t i = 0; i < g->depth; i++)
    if (g->frame[i].form->automaton->end[g->frame[i].count] != MM_AUTOMATON_ENDS) return false;
  return true;
}
