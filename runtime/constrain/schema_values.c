/* Strings and numbers of a schema: patterns, formats and bounds. */
#include <stdlib.h>
#include <string.h>

#include "formats/text.h"
#include "runtime/constrain/schema_inside.h"

/* ---- Formats ---- */

#define DAY                                                                                                                  \
  "(?:\\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|02-(?:0[1-9]|1\\d|2[0-8]))|" \
  "(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
#define HOUR   "(?:[01]\\d|2[0-3]):[0-5]\\d"
#define TIME   HOUR ":[0-5]\\d(?:\\.\\d{1,6})?(?:Z|[+-]" HOUR ")"
#define LABEL  "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define ATOM   "[A-Za-z0-9_+-]+"
#define OCTET  "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define HEX(n) "[0-9A-Fa-f]{" #n "}"

const mm_schema_format mm_schema_formats[] = {
    {"date", "^(?!0000)" DAY "$"},
    {"date-time", "^(?!0000)" DAY "T" TIME "$"},
    {"time", "^" TIME "$"},
    {"uuid", "^" HEX(8) "-" HEX(4) "-" HEX(4) "-" HEX(4) "-" HEX(12) "$"},
    {"email", "^" ATOM "(?:\\." ATOM ")*@(?:" LABEL "\\.)+[A-Za-z]{2,63}$"},
    {"ipv4", "^" OCTET "(?:\\." OCTET "){3}$"},
    {NULL, NULL},
};

static const char *pattern_of(const mm_value *format) {
  for (const mm_schema_format *f = mm_schema_formats; f->name; f++)
    if (mm_value_is(format, f->name)) return f->pattern;
  return NULL;
}

bool mm_schema_follows_format(const mm_value *format) { return pattern_of(format); }

/* ---- Strings ---- */

static const char none_fits[] = ": no text fits"; /* as automata are refused */

static bool refused(mm_schema_compiler *p, const char *keyword, const char *reason) {
  if (reason && strcmp(reason, none_fits) == 0) p->none = p->err->status == MM_OK;
  return reason && mm_schema_unserved(p, keyword, reason); /* without a reason: for lack of memory */
}

bool mm_schema_has_escapes(const char *pattern, size_t n) {
  static const char *const words[] = {"D", "W", "s", "0", "x00", "u0000", "u{0", "d", "w"};
  const size_t count = sizeof words / sizeof *words - (memmem(pattern, n, "[^", 2) ? 0 : 2); /* the others of \d and \w */
  for (size_t i = 0; i + 1 < n; i++) {
    if (pattern[i] != '\\') continue;
    i++;
    for (size_t k = 0; k < count; k++)
      if (strlen(words[k]) <= n - i && memcmp(pattern + i, words[k], strlen(words[k])) == 0) return true;
  }
  return false;
}

static bool add_pattern(mm_schema_compiler *p, const char *keyword, const char *pattern, size_t n, const mm_text_rule **rules) {
  const char *reason;
  p->escapes |= mm_schema_has_escapes(pattern, n);
  return mm_text_pattern_parse(p->arena, pattern, n, false, rules, &reason, p->err) || refused(p, keyword, reason);
}

static bool add_rule(mm_schema_compiler *p, const mm_text_pattern *n, bool negated, const mm_text_rule **rules) {
  mm_text_rule *r = n ? mm_arena_alloc(p->arena, sizeof *r, p->err) : NULL;
  if (!r) return false;
  *r = (mm_text_rule){n, negated, *rules};
  *rules = r;
  return true;
}

/* The lengths that the rules leave are within least to most. */
static bool lengths_hold(const mm_text_rule *rules, uint32_t least, uint32_t most) {
  bool low = !least, high = most == UINT32_MAX;
  for (const mm_text_rule *r = rules; r; r = r->next) {
    uint32_t lo, hi;
    mm_text_pattern_lengths(r->pattern, &lo, &hi);
    low |= !r->negated && lo >= least;
    high |= !r->negated && hi <= most;
  }
  return low && high;
}

/* The texts that do not match the pattern: those behind whose beginning no text that matches stands. */
static bool add_no_match(mm_schema_compiler *p, const mm_value *pattern, const mm_text_rule **rules) {
  const bool begins = pattern->n && pattern->text[0] == '^';
  mm_text t = {0};
  if (pattern->type != MM_VALUE_STRING) return mm_schema_wrong(p, "pattern: expected a text");
  if (begins && memchr(pattern->text, '|', pattern->n)) return mm_schema_unserved(p, "not", " of a pattern with ^ and |");
  const bool several = memchr(pattern->text, '|', pattern->n);
  mm_text_put(&t, begins ? "^(?!" : several ? "^(?![\\s\\S]*(?:" : "^(?![\\s\\S]*");
  mm_text_add(&t, pattern->text + begins, pattern->n - begins);
  mm_text_put(&t, several ? "))" : ")");
  const bool escapes = p->escapes; /* those written here leave nothing out */
  const bool ok = t.failed ? mm_fail_memory(p->err, t.n) : add_pattern(p, "not", t.p, t.n, rules);
  p->escapes = escapes | mm_schema_has_escapes(pattern->text, pattern->n);
  free(t.p);
  return ok;
}

/* One of the texts. */
static mm_text_pattern *texts_of(mm_schema_compiler *p, const mm_value *texts) {
  mm_text_pattern *all = mm_arena_alloc(p->arena, sizeof *all, p->err);
  if (all) *all = (mm_text_pattern){.kind = MM_PATTERN_CHOICE};
  for (const mm_value *v = texts->first; v && all; v = v->next) {
    mm_text_pattern *one = mm_arena_alloc(p->arena, sizeof *one, p->err);
    mm_literal l = {0};
    if (!one || !mm_schema_quote_key(p, v->text, v->n, &l)) return NULL;
    if (memmem(l.p, l.n, "\\u003c", 6)) return mm_schema_unserved(p, "not", " of a text that holds a tag"), NULL;
    *one = (mm_text_pattern){.kind = MM_PATTERN_BYTES_OF, .text = l.p + 1, .n = l.n - 2, .next = all->first};
    all->first = one;
  }
  return all;
}

/* Texts that are left out, as those with control characters, may fit the rules that no other text fits. To see it takes a part of what
 * the patterns may take. */
static bool fits_others(mm_schema_compiler *p, const mm_text_rule *rules) {
  const char *reason = NULL;
  mm_err err = {0};
  if (p->escapes) return true;
  const mm_automaton_budget part = {p->budget->steps / 8, p->budget->entries / 8};
  mm_automaton_budget left = part;
  const bool none =
      !mm_automaton_build(p->arena, rules, MM_AUTOMATON_WHOLE, &left, &reason, &err) && reason && strcmp(reason, none_fits) == 0;
  p->budget->steps -= part.steps - left.steps;
  p->budget->entries -= part.entries - left.entries;
  return !none;
}

static bool build(mm_schema_compiler *p, const char *keyword, const mm_text_rule *rules, mm_form *out) {
  const char *reason;
  *out = (mm_form){.kind = MM_FORM_AUTOMATON, .most = UINT32_MAX, .rules = rules};
  out->automaton = mm_automaton_build(p->arena, rules, MM_AUTOMATON_JSON, p->budget, &reason, p->err);
  if (out->automaton) return true;
  const bool refuses = refused(p, keyword, reason);
  if (p->none && fits_others(p, rules)) p->narrowed = true, p->fault.beyond = keyword;
  return refuses;
}

/* Finds the form of the same conditions, or makes it. */
static bool text_form(mm_schema_compiler *p, const char *keyword, const mm_text *conditions, const mm_text_rule *rules, mm_form *out) {
  for (size_t i = 0; i < MM_SCHEMA_TEXTS && i < p->texts; i++) {
    const mm_schema_text *t = &p->text[i];
    if (t->n == conditions->n && memcmp(t->conditions, conditions->p, t->n) == 0) return *out = t->form, true;
  }
  if (!build(p, keyword, rules, out)) return false;
  mm_schema_text *t = &p->text[p->texts++ % MM_SCHEMA_TEXTS];
  *t = (mm_schema_text){.conditions = mm_arena_strndup(p->arena, conditions->p, conditions->n, p->err), .n = conditions->n, .form = *out};
  return t->conditions;
}

/* Adds a rule for a condition of the texts, and its words to `conditions`, by which forms are found again. */
static bool add_condition(mm_schema_compiler *p, const mm_value *m, mm_text *conditions, const char **keyword, const mm_text_rule **rules) {
  const bool format = mm_value_key_is(m, "format"), no_match = m->key == mm_schema_no_match, no_text = m->key == mm_schema_no_text;
  const char *text = format ? pattern_of(m) : m->text;
  if (m->type == MM_VALUE_NULL || !(format ? text != NULL : no_match || no_text || mm_value_key_is(m, "pattern"))) return true;
  if (!no_text && m->type != MM_VALUE_STRING) return mm_schema_wrong(p, "pattern: expected a text");
  if (format && !*rules) *keyword = "format";
  if (no_match || no_text) mm_text_put(conditions, no_match ? "not " : "none ");
  for (const mm_value *v = no_text ? m->first : NULL; v; v = v->next) mm_text_add(conditions, v->text, v->n + 1);
  if (no_text)
    return add_rule(p, mm_text_pattern_any(p->arena, 0, UINT32_MAX, p->err), false, rules) && add_rule(p, texts_of(p, m), true, rules);
  mm_text_add(conditions, text, format ? strlen(text) + 1 : m->n + 1);
  if (no_match) return add_no_match(p, m, rules);
  return add_pattern(p, format ? "format" : "pattern", text, format ? strlen(text) : m->n, rules);
}

bool mm_schema_string(mm_schema_compiler *p, const mm_value *schema, mm_form *out) {
  const mm_text_rule *rules = NULL;
  const char *keyword = "pattern";
  mm_text conditions = {0};
  bool ok = true;
  p->escapes = false;
  *out = mm_schema_any_string;
  if (!mm_schema_count(p, schema, "minLength", &out->least) || !mm_schema_count(p, schema, "maxLength", &out->most)) return false;
  if (out->least > out->most) return mm_schema_none(p, "minLength: more than maxLength");
  for (const mm_value *v = schema->first; v && ok; v = v->next) ok = add_condition(p, v, &conditions, &keyword, &rules);
  if (ok && rules) {
    const uint32_t least = out->least, most = out->most;
    if (!lengths_hold(rules, least, most)) {
      mm_text_printf(&conditions, "%u-%u", least, most);
      ok = add_rule(p, mm_text_pattern_any(p->arena, least, most, p->err), false, &rules);
    }
    if (conditions.failed) ok = mm_fail_memory(p->err, conditions.n);
    ok = ok && text_form(p, keyword, &conditions, rules, out);
  }
  free(conditions.p);
  return ok;
}

bool mm_schema_key_matches(mm_schema_compiler *p, const mm_value *pattern, const char *key, size_t n, bool *out) {
  mm_form form;
  mm_text t = {0};
  mm_grammar g = {0};
  for (size_t i = 0; i < n; i++) /* classes are exact within ASCII */
    if (key[i] < ' ') return mm_schema_unserved(p, "patternProperties", " next to a key of other characters than ASCII");
  *out = false;
  if (!mm_schema_pattern(p, "patternProperties", pattern->key, pattern->key_n, &form)) return mm_schema_forget_none(p);
  mm_text_quote(&t, key, n);
  if (t.failed) return mm_fail_memory(p->err, n);
  mm_grammar_start(&g, &form);
  size_t taken = 0;
  while (taken < t.n && mm_grammar_step(&g, (uint8_t)t.p[taken])) taken++;
  *out = taken == t.n;
  free(t.p);
  return true;
}

bool mm_schema_pattern(mm_schema_compiler *p, const char *keyword, const char *pattern, size_t n, mm_form *out) {
  const mm_text_rule *rules = NULL;
  p->escapes = false;
  return add_pattern(p, keyword, pattern, n, &rules) && build(p, keyword, rules, out);
}

const mm_form *mm_schema_other_keys(mm_schema_compiler *p, const mm_form *object, const mm_value *patterns, const mm_value *match) {
  const mm_text_rule *rules = NULL;
  mm_form *out = mm_arena_alloc(p->arena, sizeof *out, p->err);
  mm_text_pattern *all = mm_arena_alloc(p->arena, sizeof *all, p->err);
  if (!out || !all || !add_rule(p, mm_text_pattern_any(p->arena, 0, UINT32_MAX, p->err), false, &rules)) return NULL;
  *all = (mm_text_pattern){.kind = MM_PATTERN_CHOICE};
  p->escapes = false;
  for (uint32_t i = 0; i < object->count; i++) {
    mm_text_pattern *key = mm_arena_alloc(p->arena, sizeof *key, p->err);
    if (!key) return NULL;
    if (memmem(object->literal[i].p, object->literal[i].n, "\\u003c", 6)) /* a tag in it is written so, which is not what is found here */
      return mm_schema_unserved(p, "additionalProperties", " with such a key"), NULL;
    *key =
        (mm_text_pattern){.kind = MM_PATTERN_BYTES_OF, .text = object->literal[i].p + 1, .n = object->literal[i].n - 2, .next = all->first};
    all->first = key;
  }
  if (match && !add_pattern(p, "patternProperties", match->key, match->key_n, &rules)) return NULL;
  for (const mm_value *m = patterns ? patterns->first : NULL; m; m = m->next) {
    if (m == match) continue;
    const mm_value text = {.type = MM_VALUE_STRING, .text = m->key, .n = m->key_n};
    if (!add_no_match(p, &text, &rules)) return NULL;
  }
  const bool named = !all->first || add_rule(p, all, true, &rules); /* a choice has alternatives */
  return named && build(p, "additionalProperties", rules, out) ? out : NULL;
}

/* ---- Numbers ---- */

/* Reads a bound; *there says whether the schema has one. */
static bool bound(mm_schema_compiler *p, const mm_value *schema, const char *key, mm_decimal_bound *out, const mm_decimal_bound **there) {
  const mm_value *v = mm_value_get(schema, key);
  *there = NULL;
  if (!v) return true;
  if (v->type != MM_VALUE_NUMBER) return mm_fail(p->err, MM_BAD_INPUT, "E_SCHEMA", mm_at(p->where, NULL), "%s: expected a number", key);
  if (!mm_schema_whole_alike(v) || !mm_decimal_read(v->text, v->n, out)) return mm_schema_unserved(p, key, " with so many digits");
  *there = out;
  return true;
}

/* A step such as 0.5 or 1.25, whose multiples a double holds exactly: its digits, and how many stand behind the point. */
static bool exact_step(const mm_value *multiple, mm_decimal_bound *step) {
  if (!mm_decimal_read(multiple->text, multiple->n, step) || step->exponent >= 0 || step->exponent < -MM_DECIMAL_DIGITS) return false;
  uint64_t rest = step->digits;
  for (int i = 0; i < -step->exponent; i++, rest /= 5)
    if (rest % 5) return false;
  return true;
}

/* Every whole number is a multiple of this one, 1 / n: in doubles too, where a number of 53 bits by the double next to 1 / n is rounded to
 * a whole one. That holds if the double is off by less than 2^-54 of itself: half of the distance of two doubles is no less. */
static bool divides_whole(const mm_value *multiple) {
  mm_decimal_bound m;
  if (!mm_decimal_read(multiple->text, multiple->n, &m) || m.exponent >= 0 || m.exponent < -MM_DECIMAL_DIGITS) return false;
  uint64_t power = 1;
  for (int i = 0; i < -m.exponent; i++) power *= 10;
  if (!m.digits || power % m.digits) return false;
  const uint64_t count = power / m.digits;
  const long double n = (long double)count, off = (long double)mm_value_real(multiple) * n - 1;
  return off < 0x1.fp-55L && off > -0x1.fp-55L; /* it is computed to 2^-63 */
}

/* No number that is served fits the keywords. If some number does, it is one that is left out. */
static bool no_number(mm_schema_compiler *p, const mm_value *schema, const mm_decimal_bounds *b, bool whole) {
  const mm_value *lower[] = {mm_value_get(schema, "minimum"), mm_value_get(schema, "exclusiveMinimum")};
  const mm_value *upper[] = {mm_value_get(schema, "maximum"), mm_value_get(schema, "exclusiveMaximum")};
  const mm_value last = {.text = whole ? "9223372036854775807" : "999999999999999", .n = whole ? 19 : 15};
  const mm_value first = {.text = whole ? "-9223372036854775808" : "-999999999999999", .n = whole ? 20 : 16};
  const char *beyond = NULL;
  bool any = true;
  for (int i = 0; i < 2; i++) {
    if (lower[i] && (mm_schema_compare_exact(lower[i], &last) >= 0 || mm_schema_compare_exact(lower[i], &first) < 0))
      beyond = lower[i]->key;
    if (upper[i] && (mm_schema_compare_exact(upper[i], &first) <= 0 || mm_schema_compare_exact(upper[i], &last) > 0))
      beyond = upper[i]->key;
    for (int k = 0; k < 2 && lower[i]; k++) any &= !upper[k] || mm_schema_compare_exact(lower[i], upper[k]) <= -(i || k);
  }
  const bool closed = (b->least || b->above) && (b->most || b->below);
  if (!closed && !beyond) beyond = "multipleOf";
  const mm_value *digits = lower[0] ? lower[0] : lower[1]; /* of more than are served */
  if (!whole && !beyond && digits && !mm_value_get(schema, "multipleOf")) beyond = digits->key;
  if (any && beyond) p->narrowed = true, p->fault.beyond = beyond;
  return mm_schema_none(p, "minimum, maximum, multipleOf: no number fits them");
}

bool mm_schema_number(mm_schema_compiler *p, const mm_value *schema, bool whole, mm_form *out) {
  const mm_value *multiple = mm_value_get(schema, "multipleOf");
  mm_decimal_bound at[4];
  mm_decimal_bounds b;
  int64_t step = 1;
  mm_decimal *d;
  *out = (mm_form){.kind = whole ? MM_FORM_INTEGER : MM_FORM_NUMBER};
  if (!bound(p, schema, "minimum", &at[0], &b.least) || !bound(p, schema, "maximum", &at[1], &b.most) ||
      !bound(p, schema, "exclusiveMinimum", &at[2], &b.above) || !bound(p, schema, "exclusiveMaximum", &at[3], &b.below))
    return false;
  if (multiple && multiple->type != MM_VALUE_NUMBER) return mm_schema_wrong(p, "multipleOf: expected a number");
  if (multiple && mm_value_real(multiple) <= 0) return mm_schema_wrong(p, "multipleOf: expected a number above 0");
  mm_decimal_bound fraction = {0};
  const bool parts = multiple && !mm_value_int(multiple, &step) && !(whole && divides_whole(multiple));
  if (parts && (whole || !exact_step(multiple, &fraction)))
    return mm_schema_unserved(p, "multipleOf", " of what is no whole number of 64 bits, nor a number of halves, quarters, eighths");
  if (!multiple && !b.least && !b.most && !b.above && !b.below) return true;
  if (!(d = mm_arena_alloc(p->arena, sizeof *d, p->err))) return false;
  if (!mm_decimal_of(&b, whole || (multiple && !parts), d))
    return mm_schema_unserved(p,
                              b.least   ? "minimum"
                              : b.most  ? "maximum"
                              : b.above ? "exclusiveMinimum"
                                        : "exclusiveMaximum",
                              " with so many digits");
  for (int i = 0; i < 2 && !whole; i++) d->most[i] = mm_min(d->most[i], UINT64_C(1000000000000000) - 1); /* a double holds them */
  if (parts && d->places < -fraction.exponent) return mm_schema_unserved(p, "multipleOf", " with so many digits");
  for (int i = -fraction.exponent; parts && i < d->places; i++) {
    if (fraction.digits > UINT64_MAX / 10) return mm_schema_unserved(p, "multipleOf", " with so many digits");
    fraction.digits *= 10;
  }
  d->step = parts ? fraction.digits : (uint64_t)step;
  *out = (mm_form){.kind = MM_FORM_DECIMAL, .decimal = d};
  return mm_decimal_any(d) || no_number(p, schema, &b, whole);
}

/* a is a multiple of b, but for their signs: 1, or 0; -1: they are too far from each other to say so. */
static int is_multiple(const mm_decimal_bound *a, const mm_decimal_bound *b) {
  uint64_t rest = a->digits % b->digits, step = b->digits;
  if (a->exponent - b->exponent > 1000 || step > UINT64_MAX / 10) return -1;
  for (int i = b->exponent; i < a->exponent; i++) rest = rest * 10 % step;
  if (!a->digits || a->exponent >= b->exponent) return !rest;
  for (int i = a->exponent; i < b->exponent; i++)
    if (!mm_mul(step, 10, &step) || step > a->digits) return 0;
  return a->digits % step == 0;
}

int mm_schema_number_fits(const mm_value *schema, const mm_value *number) {
  static const struct {
    const char *key;
    int side, least; /* the order of the bound's side and the number is so at least */
  } bounds[] = {{"minimum", 1, 0}, {"exclusiveMinimum", 1, 1}, {"maximum", -1, 0}, {"exclusiveMaximum", -1, 1}};
  const mm_value *multiple = mm_value_get(schema, "multipleOf");
  mm_decimal_bound n, step;
  bool exact = true, as_read = true;
  for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
    const mm_value *b = mm_value_get(schema, bounds[i].key);
    if (!b || b->type != MM_VALUE_NUMBER) continue;
    exact &= bounds[i].side * mm_schema_compare_exact(number, b) >= bounds[i].least;
    as_read &= bounds[i].side * mm_schema_compare_read(number, b) >= bounds[i].least;
  }
  if (exact != as_read) return -1;
  if (!exact || !multiple) return exact;
  int64_t whole;
  if (!mm_decimal_read(number->text, number->n, &n) || !mm_decimal_read(multiple->text, multiple->n, &step) || !step.digits) return -1;
  const double x = mm_value_real(number);
  /* A double, and a whole number that is written as one, is what it says. */
  bool known = !(n.digits >> 53) && x <= 0x1p53 && x >= -0x1p53 && (x != 0 || !n.digits);
  if (!known && mm_value_int(number, &whole))
    known = !memchr(number->text, '.', number->n) && !memchr(number->text, 'e', number->n) && !memchr(number->text, 'E', number->n);
  return known ? is_multiple(&n, &step) : -1;
}
