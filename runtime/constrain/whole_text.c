/* Compiles regular expressions and grammars. A rule's pattern stands in each place that names it, so that one automaton decides on the next
 * byte, unless the rule contains itself or is large: such rules have automata of their own, which are called. */
#include "runtime/constrain/whole_text.h"

#include <stdio.h>

#include "runtime/constrain/gbnf.h"

#define SIZE_MAX_INLINE 2000 /* patterns of a rule that stands in another */
#define DEPTH_MAX       16   /* of rules that stand in each other */

static void unserved(const char *where, const char *what, mm_err *err) {
  mm_fail(err, MM_UNSUPPORTED, "E_SCHEMA", mm_at(where, NULL), "not served: %s", what);
}

/* ---- Regular expressions ---- */

const mm_form *mm_whole_regex(mm_arena *a, const char *pattern, size_t n, const char *where, mm_err *err) {
  mm_automaton_budget budget = MM_AUTOMATON_BUDGET;
  const mm_text_rule *rules = NULL;
  const char *reason;
  mm_form *form = mm_arena_alloc(a, sizeof *form, err);
  if (!form) return NULL;
  *form = (mm_form){.kind = MM_FORM_RULE, .exact = true};
  if (mm_text_pattern_parse(a, pattern, n, true, &rules, &reason, err)) {
    form->automaton = mm_automaton_build(a, rules, MM_AUTOMATON_WHOLE, &budget, &reason, err);
    if (form->automaton) return form;
  }
  if (!reason) return NULL;
  unserved(where, MM_FORMATTED(256, "a pattern%s", reason), err);
  return NULL;
}

/* ---- What rules are ---- */

typedef struct compiler {
  mm_arena *arena;
  mm_gbnf g;
  mm_automaton_budget budget;
  mm_form_rule *called; /* [count] by their numbers; the root is the first */
  mm_gbnf_rule **rule;  /* [count] the same */
  uint32_t count;
  const char *where;
  mm_err *err;
} compiler;

static bool refuse(compiler *c, const mm_gbnf_rule *r, const char *what) {
  unserved(c->where, MM_FORMATTED(256, "the rule \"%.*s\"%s", (int)mm_min(r->n, 80), r->name, what), c->err);
  return false;
}

/* The pattern has an empty text (empty), or any text at all, as far as is known of the rules. */
static bool has_text(compiler *c, const mm_text_pattern *p, bool empty) {
  bool all = true, any = false;
  if (c->budget.steps) c->budget.steps--;
  if (p->kind == MM_PATTERN_RULE) return empty ? p->rule->empty : !p->rule->dead;
  if (p->kind == MM_PATTERN_CLASS) return !empty && p->count;
  if (p->kind == MM_PATTERN_BYTES_OF) return !empty || !p->n;
  if (p->kind == MM_PATTERN_REPEAT && !p->least) return true;
  for (const mm_text_pattern *part = p->first; part; part = part->next) {
    const bool has = has_text(c, part, empty);
    all &= has;
    any |= has;
  }
  return p->kind == MM_PATTERN_CHOICE ? any : all;
}

/* empty and dead of all rules: what is found of one may change the others. */
static bool find_texts(compiler *c) {
  for (uint32_t i = 0; i < c->g.count; i++) c->g.rule[i].rule.dead = true;
  for (bool more = true; more;) {
    more = false;
    for (uint32_t i = 0; i < c->g.count; i++) {
      mm_grammar_rule *r = &c->g.rule[i].rule;
      const bool empty = r->empty || has_text(c, r->pattern, true), dead = r->dead && !has_text(c, r->pattern, false);
      more |= empty != r->empty || dead != r->dead;
      r->empty = empty;
      r->dead = dead;
    }
    if (!c->budget.steps) return refuse(c, &c->g.rule[c->g.root], ": too large");
  }
  return !c->g.rule[c->g.root].rule.dead || refuse(c, &c->g.rule[c->g.root], " has no text that ends");
}

/* Finds the rules that are called: those that contain themselves, at the place where that is found, and large ones. */
static void find_called(compiler *c, mm_gbnf_rule *r) {
  r->seen = r->open = true;
  r->size = r->patterns;
  for (const mm_gbnf_reference *f = r->references; f; f = f->next) {
    mm_gbnf_rule *other = &c->g.rule[f->rule];
    if (other->open) other->rule.called = true;
    if (!other->seen) find_called(c, other);
    const bool stands = !other->rule.called;
    r->size += stands ? other->size : 1;
    if (stands) r->depth = (uint32_t)mm_max(r->depth, 1 + other->depth);
  }
  r->open = false;
  if (r->size > SIZE_MAX_INLINE || r->depth > DEPTH_MAX) r->rule.called = true;
}

/* ---- Automata ---- */

static bool build(compiler *c, mm_gbnf_rule *r) {
  const char *reason = NULL;
  const mm_text_rule rule = {.pattern = r->rule.pattern};
  mm_form *form = &c->called[r->rule.number].form;
  *form = (mm_form){.kind = MM_FORM_RULE, .exact = true, .called = c->called};
  form->automaton = mm_automaton_build(c->arena, &rule, MM_AUTOMATON_WHOLE, &c->budget, &reason, c->err);
  return form->automaton || (reason && refuse(c, r, reason));
}

/* The bytes that texts of the rule begin with: those of its automaton, and of the rules that this calls first. */
static bool find_first(compiler *c, mm_gbnf_rule *r) {
  mm_form_rule *own = &c->called[r->rule.number];
  const mm_automaton *m = own->form.automaton;
  if (r->open) return refuse(c, r, " begins with itself (left recursion)");
  if (r->seen) return true;
  r->seen = r->open = true;
  for (uint32_t byte = 0; byte < 256; byte++)
    if (m->next[m->class_of[byte]] != MM_AUTOMATON_NONE) own->first[byte / 32] |= UINT32_C(1) << (byte % 32);
  for (uint32_t i = 0; i < m->first_call[1]; i++) {
    if (!find_first(c, c->rule[m->call[i].rule])) return false;
    for (int k = 0; k < 8; k++) own->first[k] |= c->called[m->call[i].rule].first[k];
  }
  r->open = false;
  return true;
}

static bool number_rules(compiler *c) {
  c->g.rule[c->g.root].rule.called = true;
  c->rule = mm_arena_alloc(c->arena, c->g.count * sizeof *c->rule, c->err);
  c->called = mm_arena_alloc(c->arena, c->g.count * sizeof *c->called, c->err);
  if (!c->rule || !c->called) return false;
  c->rule[c->count++] = &c->g.rule[c->g.root];
  for (uint32_t i = 0; i < c->g.count; i++) {
    mm_gbnf_rule *r = &c->g.rule[i];
    const bool wanted = i != c->g.root && r->seen && r->rule.called && !r->rule.dead;
    r->seen = r->open = false;
    if (!wanted) continue;
    r->rule.number = (uint16_t)c->count;
    c->rule[c->count++] = r;
  }
  return true;
}

const mm_form *mm_whole_grammar(mm_arena *a, const char *text, size_t n, const char *where, mm_err *err) {
  compiler c = {.arena = a, .budget = MM_AUTOMATON_BUDGET, .where = where, .err = err};
  const char *reason = NULL;
  const bool parsed = mm_gbnf_parse(a, text, n, &c.g, &reason, err);
  if (!parsed && reason) mm_fail(err, MM_BAD_INPUT, "E_SCHEMA", mm_at(where, NULL), "%s", reason);
  if (!parsed || !find_texts(&c)) return NULL;
  find_called(&c, &c.g.rule[c.g.root]);
  if (!number_rules(&c)) return NULL;
  for (uint32_t i = 0; i < c.count; i++)
    if (!build(&c, c.rule[i])) return NULL;
  for (uint32_t i = 0; i < c.count; i++)
    if (!find_first(&c, c.rule[i])) return NULL;
  return &c.called[0].form;
}
