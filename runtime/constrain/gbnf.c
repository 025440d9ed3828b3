/* The parser of GBNF: recursive descent, with a limit on groups within groups. */
#include "runtime/constrain/gbnf.h"

#include <string.h>

#define GROUPS_MAX  24
#define RANGES_MAX  512
#define REPEATS_MAX 65535

typedef struct parser {
  mm_arena *arena;
  const char *text, *p, *end;
  mm_gbnf *out;
  mm_gbnf_rule *now; /* the rule that is read */
  unsigned depth;
  const char **reason;
  mm_err *err;
} parser;

/* "line N: what", NULL. */
static void *refuse(parser *p, const char *what) {
  unsigned line = 1;
  if (*p->reason) return NULL;
  for (const char *c = p->text; c < p->p; c++) line += *c == '\n';
  const char *text = mm_arena_printf(p->arena, p->err, "line %u: %s", line, what);
  if (text) *p->reason = text;
  return NULL;
}

static void *refuse_name(parser *p, const char *what, const char *name, size_t n) {
  return refuse(p, MM_FORMATTED(160, "%s \"%.*s\"", what, (int)mm_min(n, 80), name));
}

static bool at(const parser *p, char c) { return p->p < p->end && *p->p == c; }

static bool take(parser *p, const char *word) {
  const size_t n = strlen(word);
  if ((size_t)(p->end - p->p) < n || memcmp(p->p, word, n) != 0) return false;
  p->p += n;
  return true;
}

/* Blanks and comments; lines too, where the rule cannot end. */
static void skip(parser *p, bool lines) {
  for (; p->p < p->end; p->p++) {
    if (*p->p == '#')
      while (p->p < p->end && *p->p != '\n') p->p++;
    if (p->p == p->end || !(*p->p == ' ' || *p->p == '\t' || (lines && (*p->p == '\n' || *p->p == '\r')))) return;
  }
}

static bool is_of_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

static mm_text_pattern *new_pattern(parser *p, mm_text_pattern_kind kind) {
  mm_text_pattern *n = mm_arena_alloc(p->arena, sizeof *n, p->err);
  if (!n) return NULL;
  *n = (mm_text_pattern){.kind = kind};
  p->now->patterns++;
  return n;
}

/* ---- Names ---- */

static bool read_name(parser *p, const char **name, size_t *n) {
  *name = p->p;
  while (p->p < p->end && is_of_name(*p->p)) p->p++;
  *n = (size_t)(p->p - *name);
  return *n || refuse(p, "expected a rule's name");
}

/* The rule of this name; it may be defined later. */
static mm_gbnf_rule *find_rule(parser *p, const char *name, size_t n) {
  mm_gbnf *g = p->out;
  for (uint32_t i = 0; i < g->count; i++)
    if (g->rule[i].n == n && memcmp(g->rule[i].name, name, n) == 0) return &g->rule[i];
  if (g->count == MM_GBNF_RULES) return refuse(p, "found more than 1024 rules");
  g->rule[g->count] = (mm_gbnf_rule){.name = name, .n = n};
  return &g->rule[g->count++];
}

static mm_text_pattern *parse_reference(parser *p) {
  const char *name;
  size_t n;
  mm_text_pattern *out = new_pattern(p, MM_PATTERN_RULE);
  mm_gbnf_reference *r = mm_arena_alloc(p->arena, sizeof *r, p->err);
  const mm_gbnf_rule *rule = out && r && read_name(p, &name, &n) ? find_rule(p, name, n) : NULL;
  if (!rule) return NULL;
  *r = (mm_gbnf_reference){(uint32_t)(rule - p->out->rule), p->now->references};
  p->now->references = r;
  out->rule = &rule->rule;
  return out;
}

/* ---- Characters ---- */

static bool hex(parser *p, unsigned digits, uint32_t *code) {
  for (*code = 0; digits; digits--, p->p++) {
    const int digit = p->p < p->end ? mm_hex_digit(*p->p) : -1;
    if (digit < 0) return refuse(p, "an escape that is not complete");
    *code = *code << 4 | (uint32_t)digit;
  }
  return *code < MM_CODE_POINTS || refuse(p, "an escape of no character");
}

/* A character, or an escape of one; the text is JSON's, and therefore valid UTF-8. */
static bool character(parser *p, uint32_t *code) {
  static const char letters[] = "trn\\\"[]-^", codes[] = "\t\r\n\\\"[]-^";
  if (!take(p, "\\")) return *code = mm_utf8_next(&p->p, p->end), true;
  const char c = p->p < p->end ? *p->p++ : 0, *letter = c ? strchr(letters, c) : NULL;
  if (c == 'x') return hex(p, 2, code);
  if (c == 'u') return hex(p, 4, code);
  if (c == 'U') return hex(p, 8, code);
  return letter ? (*code = (uint32_t)codes[letter - letters], true) : refuse(p, "an unknown escape") != NULL;
}

static mm_text_pattern *parse_text(parser *p) {
  mm_text_pattern *out = new_pattern(p, MM_PATTERN_BYTES_OF);
  const char *close = p->p;
  while (close < p->end && *close != '"' && *close != '\n') close += *close == '\\' ? 2 : 1;
  if (close >= p->end || *close == '\n') return refuse(p, "a text without its end");
  char *text = mm_arena_alloc(p->arena, (size_t)(close - p->p) + 4, p->err); /* an escape is longer than its character */
  if (!out || !text) return NULL;
  while (p->p < close) {
    uint32_t code = 0;
    if (!character(p, &code)) return NULL;
    if (code == 0 || (code >= 0xd800 && code < 0xe000)) return refuse(p, "a character that no text has");
    out->n += mm_utf8_put(text + out->n, code);
    p->now->patterns++;
  }
  p->p = close + 1;
  out->text = text;
  return out;
}

static mm_text_pattern *parse_class(parser *p) {
  mm_code_range range[RANGES_MAX];
  uint32_t count = 0;
  const char *begin = p->p;
  const bool complement = take(p, "^");
  while (!at(p, ']')) {
    uint32_t first = 0, last;
    if (p->p == p->end || *p->p == '\n') return p->p = begin, refuse(p, "a class without its end");
    if (!character(p, &first)) return NULL;
    last = first;
    if (at(p, '-') && p->p + 1 < p->end && p->p[1] != ']') {
      p->p++;
      if (!character(p, &last)) return NULL;
    }
    if (first > last) return refuse(p, "a range from a larger to a smaller character");
    if (count == RANGES_MAX) return refuse(p, "a class of so many ranges");
    range[count++] = (mm_code_range){first, last};
  }
  p->p++;
  p->now->patterns += 1 + count;
  return mm_text_pattern_class(p->arena, range, count, complement, p->reason, p->err);
}

/* ---- Parts ---- */

static mm_text_pattern *parse_choice(parser *p, bool group);

static mm_text_pattern *parse_group(parser *p) {
  if (p->depth == GROUPS_MAX) return refuse(p, "so many groups within groups");
  p->depth++;
  skip(p, true);
  mm_text_pattern *n = parse_choice(p, true);
  p->depth--;
  if (n && !take(p, ")")) return refuse(p, "a group without its end");
  return n;
}

static mm_text_pattern *parse_atom(parser *p) {
  static const mm_code_range none[1];
  if (take(p, "\"")) return parse_text(p);
  if (take(p, "[")) return parse_class(p);
  if (take(p, "(")) return parse_group(p);
  if (take(p, ".")) return p->now->patterns++, mm_text_pattern_class(p->arena, none, 0, true, p->reason, p->err);
  if (at(p, '<') || at(p, '!')) return refuse(p, "tokens (<...>) are not served");
  if (p->p < p->end && is_of_name(*p->p)) return parse_reference(p);
  return refuse(p, "expected a text, a class, a group or a rule's name");
}

static bool number(parser *p, uint32_t *n) {
  const char *begin = p->p;
  for (*n = 0; p->p < p->end && *p->p >= '0' && *p->p <= '9'; p->p++)
    if ((*n = *n * 10 + (uint32_t)(*p->p - '0')) > REPEATS_MAX) return refuse(p, "a part so many times");
  return p->p > begin;
}

/* {m}, {m,}, {,n} or {m,n}, of which { is read. */
static bool counted(parser *p, uint32_t *least, uint32_t *most) {
  skip(p, true);
  const bool some = number(p, least);
  if (*p->reason) return false;
  *most = *least;
  skip(p, true);
  if (take(p, ",")) {
    skip(p, true);
    if (!number(p, most)) *most = UINT32_MAX;
    if (*p->reason) return false;
    skip(p, true);
  } else if (!some) {
    return refuse(p, "{ without a number");
  }
  if (!take(p, "}")) return refuse(p, "{ without its end");
  return *least <= *most || refuse(p, "a repetition whose numbers are in disorder");
}

static mm_text_pattern *parse_repeat(parser *p) {
  mm_text_pattern *part = parse_atom(p);
  for (skip(p, p->depth > 0); part && p->p < p->end && strchr("*+?{", *p->p); skip(p, p->depth > 0)) {
    uint32_t least = 0, most = UINT32_MAX;
    const char c = *p->p++;
    if (c == '+') least = 1;
    if (c == '?') most = 1;
    if (c == '{' && !counted(p, &least, &most)) return NULL;
    mm_text_pattern *n = new_pattern(p, MM_PATTERN_REPEAT);
    if (!n) return NULL;
    n->first = part;
    n->least = least;
    n->most = most;
    part = n;
  }
  return part;
}

/* An alternative, which may be empty. */
static mm_text_pattern *parse_sequence(parser *p) {
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_SEQUENCE);
  while (n && p->p < p->end && !strchr("|)\r\n", *p->p)) {
    mm_text_pattern *part = parse_repeat(p);
    if (!part) return NULL;
    part->next = n->first;
    n->first = part;
  }
  return n;
}

/* Behind an alternative: another one follows, on this line or, since no rule begins so, on a later one. */
static bool take_bar(parser *p) {
  const char *here = p->p;
  skip(p, true);
  if (take(p, "|")) return true;
  p->p = here;
  return false;
}

static mm_text_pattern *parse_choice(parser *p, bool group) {
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_CHOICE), **last = n ? &n->first : NULL;
  if (!n) return NULL;
  do {
    skip(p, true);
    mm_text_pattern *part = parse_sequence(p);
    if (!part) return NULL;
    *last = part;
    last = &part->next;
  } while (take_bar(p));
  skip(p, group);
  return n;
}

/* ---- A grammar ---- */

static bool parse_rule(parser *p) {
  const char *name;
  size_t n;
  if (!read_name(p, &name, &n) || !(p->now = find_rule(p, name, n))) return false;
  if (p->now->rule.pattern) return refuse_name(p, "a second rule", name, n);
  skip(p, false);
  if (!take(p, "::=")) return refuse_name(p, "no ::= behind the name", name, n);
  skip(p, true);
  p->now->rule.pattern = parse_choice(p, false);
  if (!p->now->rule.pattern) return false;
  skip(p, false);
  return p->p == p->end || at(p, '\n') || at(p, '\r') || refuse(p, "expected the end of the rule");
}

bool mm_gbnf_parse(mm_arena *a, const char *text, size_t n, mm_gbnf *out, const char **reason, mm_err *err) {
  parser p = {.arena = a, .text = text, .p = text, .end = text + n, .out = out, .reason = reason, .err = err};
  *reason = NULL;
  *out = (mm_gbnf){.root = UINT32_MAX};
  if (n > MM_GBNF_BYTES) return *reason = "found more than 65,536 bytes", false;
  if (memchr(text, 0, n)) return *reason = "found a byte of zero", false;
  if (!(out->rule = mm_arena_alloc(a, MM_GBNF_RULES * sizeof *out->rule, err))) return false;
  for (skip(&p, true); p.p < p.end; skip(&p, true))
    if (!parse_rule(&p)) return false;
  for (uint32_t i = 0; i < out->count; i++) {
    const mm_gbnf_rule *r = &out->rule[i];
    if (!r->rule.pattern) return refuse_name(&p, "no rule", r->name, r->n);
    if (r->n == 4 && memcmp(r->name, "root", 4) == 0) out->root = i;
  }
  return out->root != UINT32_MAX || refuse(&p, "no rule \"root\"");
}
