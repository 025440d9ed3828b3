/* The parser of patterns: recursive descent over bytes, with a limit on groups within groups. */
#include "runtime/constrain/text_pattern.h"

#include <stdlib.h>
#include <string.h>

#define GROUPS_MAX  24
#define RANGES_MAX  512 /* of a class */
#define REPEATS_MAX 65535

typedef struct parser {
  mm_arena *arena;
  const char *p, *end;
  unsigned depth;
  bool negated;  /* within a lookahead that must fail */
  bool anchored; /* every alternative begins where the text does, with a ^ or without */
  bool whole;    /* and ends where it does, with a $ or without */
  const char **reason;
  mm_err *err;
} parser;

/* Ranges of a class while it is read. */
typedef struct ranges {
  mm_code_range range[RANGES_MAX];
  uint32_t count;
  bool ascii; /* a complement stays within ASCII: the classes of ECMA-262 and of Python differ beyond it */
  bool wide;  /* what is read is turned round, by a complement or by a lookahead that must fail, and not by both */
} ranges;

static bool refuse(parser *p, const char *reason) {
  if (!*p->reason) *p->reason = reason;
  return false;
}

static mm_text_pattern *new_pattern(parser *p, mm_text_pattern_kind kind) {
  mm_text_pattern *n = mm_arena_alloc(p->arena, sizeof *n, p->err);
  if (n) *n = (mm_text_pattern){.kind = kind};
  return n;
}

static bool at(const parser *p, char c) { return p->p < p->end && *p->p == c; }

static bool take(parser *p, const char *word) {
  const size_t n = strlen(word);
  if ((size_t)(p->end - p->p) < n || memcmp(p->p, word, n) != 0) return false;
  p->p += n;
  return true;
}

/* ---- Classes ---- */

static bool add_range(parser *p, ranges *r, uint32_t first, uint32_t last) {
  if (r->count == RANGES_MAX) return refuse(p, ": a class of so many ranges");
  r->range[r->count++] = (mm_code_range){first, last};
  return true;
}

static int compare_ranges(const void *a, const void *b) {
  const mm_code_range *x = a, *y = b;
  return (x->first > y->first) - (x->first < y->first);
}

/* Sorts the ranges and joins those that touch. */
static void join_ranges(ranges *r) {
  uint32_t n = 0;
  qsort(r->range, r->count, sizeof *r->range, compare_ranges);
  for (uint32_t i = 0; i < r->count; i++) {
    if (n && r->range[i].first <= r->range[n - 1].last + 1)
      r->range[n - 1].last = (uint32_t)mm_max(r->range[n - 1].last, r->range[i].last);
    else
      r->range[n++] = r->range[i];
  }
  r->count = n;
}

/* Adds what is not in `from`, up to the code point `last`. */
static bool add_others(parser *p, ranges *r, ranges *from, uint32_t last) {
  uint32_t next = 0;
  join_ranges(from);
  for (uint32_t i = 0; i < from->count && next <= last; i++) {
    if (from->range[i].first > next && !add_range(p, r, next, (uint32_t)mm_min(from->range[i].first - 1, last))) return false;
    next = from->range[i].last + 1;
  }
  return next > last || add_range(p, r, next, last);
}

/* \d \w \s \D \W \S: the characters that they have in ECMA-262 and in Python; where it is wide, those that they have in either one, but
 * beyond ASCII \d and \w, and \D and \W, are ECMA-262's there. Within a negated lookahead \D and \W are that too. */
static bool add_named(parser *p, ranges *r, char name) {
  static const mm_code_range digits[] = {{'0', '9'}}, words[] = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
                             spaces[] = {{9, 13}, {' ', ' '}},
                             all_spaces[] = {{9, 13},          {28, 32},         {0x85, 0x85},     {0xa0, 0xa0},
                                             {0x1680, 0x1680}, {0x2000, 0x200a}, {0x2028, 0x2029}, {0x202f, 0x202f},
                                             {0x205f, 0x205f}, {0x3000, 0x3000}, {0xfeff, 0xfeff}};
  const char small = (char)(name | 0x20);
  const bool complement = name != small, many = complement != r->wide; /* of spaces: without them there are fewer others */
  const mm_code_range *list = small == 'd' ? digits : small == 'w' ? words : many ? all_spaces : spaces;
  const size_t n = small == 'd' ? 1 : small == 'w' ? 4 : many ? sizeof all_spaces / sizeof *all_spaces : 2;
  ranges own = {.count = (uint32_t)n};
  memcpy(own.range, list, n * sizeof *list);
  if (complement) return add_others(p, r, &own, small == 's' || r->wide || p->negated ? MM_CODE_POINTS - 1 : 127);
  r->ascii = true;
  for (size_t i = 0; i < n; i++)
    if (!add_range(p, r, list[i].first, list[i].last)) return false;
  return true;
}

/* The class is complete: joined, its complement taken if it is negated, without surrogates. */
static mm_text_pattern *end_class(parser *p, ranges *r, bool complement) {
  ranges others = {0}, own = {0};
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_CLASS);
  const ranges *from = r;
  if (complement) {
    if (!add_others(p, &others, r, r->ascii && !p->negated ? 127 : MM_CODE_POINTS - 1)) return NULL;
    from = &others;
  }
  for (uint32_t i = 0; i < from->count; i++) {
    const mm_code_range x = from->range[i];
    if (x.first < 0xd800 && !add_range(p, &own, x.first, (uint32_t)mm_min(x.last, 0xd7ff))) return NULL;
    if (x.last > 0xdfff && !add_range(p, &own, (uint32_t)mm_max(x.first, 0xe000), x.last)) return NULL;
  }
  join_ranges(&own);
  mm_code_range *final = mm_arena_alloc(p->arena, (own.count + 1) * sizeof *final, p->err);
  if (!n || !final) return NULL;
  memcpy(final, own.range, own.count * sizeof *final);
  n->range = final;
  n->count = own.count;
  return n;
}

/* ---- Characters ---- */

static uint32_t character(parser *p) { return mm_utf8_next(&p->p, p->end); }

static bool hex(parser *p, unsigned digits, uint32_t *code) {
  for (*code = 0; digits; digits--) {
    const int digit = p->p < p->end ? mm_hex_digit(*p->p++) : -1;
    if (digit < 0) return refuse(p, ": an escape that is not complete");
    *code = *code << 4 | (uint32_t)digit;
  }
  return true;
}

/* Four digits; two halves of a surrogate pair are one character. */
static bool unit(parser *p, uint32_t *code) {
  if (!hex(p, 4, code)) return false;
  parser next = *p;
  uint32_t low;
  const char *none = "";
  next.reason = &none; /* where no other half follows, this is nothing to refuse */
  if (*code < 0xd800 || *code > 0xdbff || !take(&next, "\\u") || !hex(&next, 4, &low) || low < 0xdc00 || low > 0xdfff) return true;
  *code = 0x10000 + ((*code - 0xd800) << 10 | (low - 0xdc00));
  p->p = next.p;
  return true;
}

static bool unicode(parser *p, uint32_t *code) {
  if (!take(p, "{")) return unit(p, code);
  unsigned digits = 0;
  while (p->p + digits < p->end && p->p[digits] != '}' && digits < 7) digits++;
  if (!digits || digits > 6 || !hex(p, digits, code) || !take(p, "}") || *code >= MM_CODE_POINTS)
    return refuse(p, ": an escape that is not complete");
  return true;
}

static bool control(parser *p, uint32_t *code) {
  const char c = p->p < p->end ? *p->p : 0;
  if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))) return refuse(p, ": an escape that is not complete");
  *code = (uint32_t)c & 31;
  return p->p++, true;
}

/* What follows a backslash, a character: *code. */
static bool escape(parser *p, uint32_t *code) {
  static const char letters[] = "tnrfv0b", codes[] = "\t\n\r\f\v\0\b";
  if (p->p == p->end) return refuse(p, ": a backslash at the end");
  const char c = *p->p;
  const char *letter = c ? strchr(letters, c) : NULL;
  if (c == 'x') return p->p++, hex(p, 2, code);
  if (c == 'u') return p->p++, unicode(p, code);
  if (c == 'c') return p->p++, control(p, code);
  if (c == '0' && p->p + 1 < p->end && p->p[1] >= '0' && p->p[1] <= '9') return refuse(p, ": an octal escape");
  if (letter) return p->p++, *code = (uint32_t)codes[letter - letters], true;
  if (c >= '1' && c <= '9') return refuse(p, ": a reference to a group");
  if (c == 'p' || c == 'P') return refuse(p, ": \\\\p");
  if (c == 'B') return refuse(p, ": \\\\B");
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return refuse(p, ": an escape of a letter that has no meaning");
  *code = character(p);
  return true;
}

static bool is_named(char c) { return c && strchr("dDwWsS", c); }

/* One end of a range in a class, or a class of a name: *named. */
static bool class_atom(parser *p, ranges *r, uint32_t *code, bool *named) {
  *named = false;
  if (!take(p, "\\")) return *code = character(p), true;
  if (p->p < p->end && is_named(*p->p)) return *named = true, add_named(p, r, *p->p++);
  return escape(p, code);
}

static mm_text_pattern *parse_class(parser *p) {
  const bool complement = take(p, "^");
  ranges r = {.wide = complement != p->negated};
  while (!at(p, ']')) {
    uint32_t first, last;
    bool named, end_named;
    if (p->p == p->end) return refuse(p, ": a class without its end"), NULL;
    if (!class_atom(p, &r, &first, &named)) return NULL;
    if (named) continue;
    last = first;
    if (at(p, '-') && p->p + 1 < p->end && p->p[1] != ']') {
      p->p++;
      if (!class_atom(p, &r, &last, &end_named)) return NULL;
      if (end_named) return refuse(p, ": a range that ends in a class"), NULL;
    }
    if (first > last) return refuse(p, ": a range from a larger to a smaller character"), NULL;
    if (!add_range(p, &r, first, last)) return NULL;
  }
  p->p++;
  join_ranges(&r);
  return end_class(p, &r, complement);
}

/* ---- Parts ---- */

static mm_text_pattern *parse_choice(parser *p, bool whole);

static mm_text_pattern *parse_group(parser *p) {
  if (take(p, "?")) {
    if (at(p, '=') || at(p, '!') || take(p, "<=") || take(p, "<!")) return refuse(p, ": a lookaround that is not behind the first ^"), NULL;
    if (take(p, "<")) {
      while (p->p < p->end && *p->p != '>') p->p++;
      if (!take(p, ">")) return refuse(p, ": a group's name without its end"), NULL;
    } else if (!take(p, ":")) {
      return refuse(p, ": such a group"), NULL;
    }
  }
  if (p->depth == GROUPS_MAX) return refuse(p, ": so many groups within groups"), NULL;
  p->depth++;
  mm_text_pattern *n = parse_choice(p, false);
  p->depth--;
  if (n && !take(p, ")")) return refuse(p, ": a group without its end"), NULL;
  return n;
}

static mm_text_pattern *parse_atom(parser *p) {
  ranges r = {.wide = p->negated};
  uint32_t code;
  if (take(p, "(")) return parse_group(p);
  if (take(p, "[")) return parse_class(p);
  if (take(p, ".")) {
    static const mm_code_range all[] = {{0, 9}, {11, 12}, {14, 0x2027}, {0x202a, MM_CODE_POINTS - 1}};
    memcpy(r.range, all, sizeof all);
    r.count = 4;
    return end_class(p, &r, false);
  }
  if (at(p, '^') || at(p, '$')) return refuse(p, ": ^ or $ within it"), NULL;
  if (strchr("*+?{", *p->p)) return refuse(p, ": a quantifier behind nothing"), NULL;
  if (take(p, "\\")) {
    if (p->p < p->end && is_named(*p->p)) return add_named(p, &r, *p->p++) ? (join_ranges(&r), end_class(p, &r, false)) : NULL;
    if (at(p, 'b')) return refuse(p, ": \\\\b"), NULL;
    if (!escape(p, &code)) return NULL;
  } else {
    code = character(p);
  }
  return add_range(p, &r, code, code) ? end_class(p, &r, false) : NULL;
}

static bool number(parser *p, uint32_t *n) {
  const char *begin = p->p;
  for (*n = 0; p->p < p->end && *p->p >= '0' && *p->p <= '9'; p->p++)
    if ((*n = *n * 10 + (uint32_t)(*p->p - '0')) > REPEATS_MAX) return refuse(p, ": a part so many times");
  return p->p > begin;
}

/* {m}, {m,} or {m,n}. */
static bool counted(parser *p, uint32_t *least, uint32_t *most) {
  if (!number(p, least)) return refuse(p, ": { without a number");
  *most = *least;
  if (take(p, ",")) {
    *most = UINT32_MAX;
    if (!at(p, '}') && !number(p, most)) return refuse(p, ": { without a number");
  }
  if (!take(p, "}")) return refuse(p, ": { without its end");
  return *least <= *most || refuse(p, ": a quantifier whose numbers are in disorder");
}

static mm_text_pattern *parse_repeat(parser *p) {
  mm_text_pattern *part = parse_atom(p);
  uint32_t least = 0, most = UINT32_MAX;
  if (!part || p->p == p->end || !strchr("*+?{", *p->p)) return part;
  const char c = *p->p++;
  if (c == '+') least = 1;
  if (c == '?') most = 1;
  if (c == '{' && !counted(p, &least, &most)) return NULL;
  take(p, "?");
  if (p->p < p->end && strchr("*+?{", *p->p)) return refuse(p, ": a quantifier behind a quantifier"), NULL;
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_REPEAT);
  if (!n) return NULL;
  n->first = part;
  n->least = least;
  n->most = most;
  return n;
}

static bool ends_here(const parser *p) { return p->p == p->end || *p->p == '|' || *p->p == ')'; }

/* Puts a part behind those of a sequence. */
static bool put_part(mm_text_pattern *sequence, mm_text_pattern *part) {
  if (!part) return false;
  part->next = sequence->first;
  sequence->first = part;
  return true;
}

static mm_text_pattern *any_text(parser *p) { return mm_text_pattern_any(p->arena, 0, UINT32_MAX, p->err); }

/* An alternative; of the whole pattern: with ^ and $, and any text before and behind it where these lack. */
static mm_text_pattern *parse_sequence(parser *p, bool whole) {
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_SEQUENCE);
  if (!n || (whole && !take(p, "^") && !p->anchored && !put_part(n, any_text(p)))) return NULL;
  while (!ends_here(p)) {
    if (whole && at(p, '$') && (p->p + 1 == p->end || p->p[1] == '|')) break;
    if (!put_part(n, parse_repeat(p))) return NULL;
  }
  return whole && !take(p, "$") && !p->whole && !put_part(n, any_text(p)) ? NULL : n;
}

static mm_text_pattern *parse_choice(parser *p, bool whole) {
  mm_text_pattern *n = new_pattern(p, MM_PATTERN_CHOICE), **last = n ? &n->first : NULL;
  if (!n) return NULL;
  do {
    mm_text_pattern *part = parse_sequence(p, whole);
    if (!part) return NULL;
    *last = part;
    last = &part->next;
  } while (take(p, "|"));
  return n;
}

/* ---- A pattern ---- */

static bool add_rule(parser *p, const mm_text_pattern *n, bool negated, const mm_text_rule **rules) {
  mm_text_rule *rule = n ? mm_arena_alloc(p->arena, sizeof *rule, p->err) : NULL;
  if (!rule) return false;
  *rule = (mm_text_rule){n, negated, *rules};
  *rules = rule;
  return true;
}

/* The first such character outside groups and classes of characters; NULL: there is none. */
static const char *find_outside(const parser *p, char wanted) {
  unsigned open = 0;
  bool class = false;
  for (const char *c = p->p; c < p->end; c++) {
    if (*c == '\\')
      c++;
    else if (class)
      class = *c != ']';
    else if (*c == wanted && !open)
      return c;
    else if (*c == '[')
      class = true;
    else if (*c == '(')
      open++;
    else if (*c == ')')
      open--;
  }
  return NULL;
}

/* A lookahead behind the first ^: a rule of its own. Each of its alternatives begins where the text does. */
static bool parse_lookahead(parser *p, bool negated, const mm_text_rule **rules) {
  parser inner = *p;
  inner.end = find_outside(p, ')'); /* of this group */
  inner.negated = negated;
  inner.anchored = true;
  inner.whole = false;
  if (!inner.end) return refuse(p, ": a group without its end");
  if (!add_rule(p, parse_choice(&inner, true), negated, rules)) return false;
  if (inner.p != inner.end) return refuse(p, ": a ) without its group");
  p->p = inner.end + 1;
  return true;
}

bool mm_text_pattern_parse(mm_arena *a, const char *pattern, size_t n, bool whole, const mm_text_rule **rules, const char **reason,
                           mm_err *err) {
  parser p = {.arena = a, .p = pattern, .end = pattern + n, .anchored = whole, .whole = whole, .reason = reason, .err = err};
  *reason = NULL;
  if (n > MM_PATTERN_BYTES) return refuse(&p, " of so many bytes");
  if (memchr(pattern, 0, n)) return refuse(&p, ": a byte of zero");
  if (n > 4 && (memcmp(p.p, "^(?=", 4) == 0 || memcmp(p.p, "^(?!", 4) == 0)) {
    if (find_outside(&p, '|')) return refuse(&p, ": a lookahead in one of several alternatives");
    p.anchored = take(&p, "^");
    bool negated;
    while ((negated = take(&p, "(?!")) || take(&p, "(?="))
      if (!parse_lookahead(&p, negated, rules)) return false;
  }
  const mm_text_pattern *all = parse_choice(&p, true);
  if (all && p.p != p.end) return refuse(&p, ": a ) without its group");
  return add_rule(&p, all, false, rules);
}

mm_text_pattern *mm_text_pattern_class(mm_arena *a, const mm_code_range *range, uint32_t count, bool complement, const char **reason,
                                       mm_err *err) {
  parser p = {.arena = a, .reason = reason, .err = err};
  ranges r = {0};
  for (uint32_t i = 0; i < count; i++)
    if (!add_range(&p, &r, range[i].first, range[i].last)) return NULL;
  join_ranges(&r);
  return end_class(&p, &r, complement);
}

mm_text_pattern *mm_text_pattern_any(mm_arena *a, uint32_t least, uint32_t most, mm_err *err) {
  static const mm_code_range all[] = {{0, 0xd7ff}, {0xe000, MM_CODE_POINTS - 1}};
  mm_text_pattern *one = mm_arena_alloc(a, sizeof *one, err), *n = one ? mm_arena_alloc(a, sizeof *n, err) : NULL;
  if (!n) return NULL;
  *one = (mm_text_pattern){.kind = MM_PATTERN_CLASS, .range = all, .count = 2};
  *n = (mm_text_pattern){.kind = MM_PATTERN_REPEAT, .first = one, .least = least, .most = most};
  return n;
}

static uint32_t times(uint32_t x, uint32_t y) {
  const uint64_t n = (uint64_t)x * y;
  return x == 0 || y == 0 ? 0 : x == UINT32_MAX || y == UINT32_MAX || n >= UINT32_MAX ? UINT32_MAX : (uint32_t)n;
}

static uint32_t plus(uint32_t x, uint32_t y) { return x >= UINT32_MAX - y ? UINT32_MAX : x + y; }

void mm_text_pattern_lengths(const mm_text_pattern *p, uint32_t *least, uint32_t *most) {
  *least = *most = p->kind == MM_PATTERN_CLASS;
  if (p->kind == MM_PATTERN_CHOICE) *least = UINT32_MAX;
  for (const mm_text_pattern *part = p->first; part; part = part->next) {
    uint32_t lo, hi;
    mm_text_pattern_lengths(part, &lo, &hi);
    if (p->kind == MM_PATTERN_REPEAT) {
      *least = times(lo, p->least);
      *most = times(hi, p->most);
    } else if (p->kind == MM_PATTERN_SEQUENCE) {
      *least = plus(*least, lo);
      *most = plus(*most, hi);
    } else {
      *least = (uint32_t)mm_min(*least, lo);
      *most = (uint32_t)mm_max(*most, hi);
    }
  }
  if (p->kind == MM_PATTERN_BYTES_OF) *least = 0, *most = UINT32_MAX;
}
