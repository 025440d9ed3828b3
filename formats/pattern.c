/* Compiling patterns to small programs, and running those. */
#include "formats/pattern.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { BYTE, SPLIT, JUMP, BEGIN, END, DONE }; /* what an op does */

/* Jumps are relative, so that a run of ops can be moved and repeated. */
typedef struct mm_pattern_op {
  uint8_t kind;
  int32_t x, y;    /* JUMP: x; SPLIT: both */
  uint64_t set[4]; /* BYTE: which */
} op;

typedef struct compiler {
  const char *text, *at;
  bool glob;
  unsigned nest;
  uint32_t n;
  op op[MM_PATTERN_STATES];
  mm_err *err;
} compiler;

static bool refuse(compiler *c, const char *what) {
  char shown[2 * MM_PATTERN_BYTES];
  return mm_fail(c->err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found %s at byte %zu of pattern \"%s\"", what, (size_t)(c->at - c->text),
                 mm_escape(shown, sizeof shown, c->text, strlen(c->text)));
}

/* ---- ops ---- */

/* Room for `count` ops at `place`; those behind it move. */
static op *insert(compiler *c, uint32_t place, uint32_t count) {
  if (count > MM_PATTERN_STATES - c->n) {
    refuse(c, "too many repetitions");
    return NULL;
  }
  memmove(c->op + place + count, c->op + place, (c->n - place) * sizeof *c->op);
  c->n += count;
  return c->op + place;
}

static bool put(compiler *c, uint32_t place, uint8_t kind, int32_t x, int32_t y) {
  op *o = insert(c, place, 1);
  if (o) *o = (op){.kind = kind, .x = x, .y = y};
  return o;
}

static void add(uint64_t set[4], unsigned byte) { set[byte / 64] |= UINT64_C(1) << byte % 64; }
static bool has(const uint64_t set[4], unsigned byte) { return set[byte / 64] >> byte % 64 & 1; }

static bool put_set(compiler *c, const uint64_t set[4], bool negated) {
  op *o = insert(c, c->n, 1);
  if (!o) return false;
  *o = (op){.kind = BYTE};
  for (unsigned i = 0; i < 4; i++) o->set[i] = negated ? ~set[i] : set[i];
  return true;
}

static bool put_byte(compiler *c, char byte) {
  uint64_t set[4] = {0};
  add(set, (uint8_t)byte);
  return put_set(c, set, false);
}

static bool put_any(compiler *c) { return put_set(c, (const uint64_t[4]){0}, true); }

/* ---- [a-z] ---- */

static const struct {
  const char *name;
  int (*in)(int);
} classes[] = {{"alnum", isalnum}, {"alpha", isalpha}, {"blank", isblank}, {"cntrl", iscntrl}, {"digit", isdigit}, {"graph", isgraph},
               {"lower", islower}, {"print", isprint}, {"punct", ispunct}, {"space", isspace}, {"upper", isupper}, {"xdigit", isxdigit}};

static bool add_class(compiler *c, uint64_t set[4]) {
  const char *name = c->at + 2;
  for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
    size_t n = strlen(classes[i].name);
    if (strncmp(name, classes[i].name, n) != 0 || strncmp(name + n, ":]", 2) != 0) continue;
    for (int b = 0; b < 128; b++)
      if (classes[i].in(b)) add(set, (unsigned)b);
    c->at = name + n + 2;
    return true;
  }
  return refuse(c, "an unknown class");
}

/* One end of a range. */
static bool bound(compiler *c, uint8_t *out) {
  if (c->glob && *c->at == '\\') c->at++;
  if (*c->at == 0) return refuse(c, "no end of \"[\"");
  if (*c->at == '[' && strchr(".=", c->at[1]) && c->at[1]) return refuse(c, "a collating element");
  *out = (uint8_t)*c->at++;
  return true;
}

static bool set_of(compiler *c) {
  uint64_t set[4] = {0};
  c->at++;
  bool negated = *c->at == '^' || (c->glob && *c->at == '!');
  c->at += negated;
  for (const char *first = c->at; *c->at != ']' || c->at == first;) {
    uint8_t lo = 0, hi;
    if (c->at[0] == '[' && c->at[1] == ':') {
      if (!add_class(c, set)) return false;
      continue;
    }
    if (!bound(c, &lo)) return false;
    hi = lo;
    if (c->at[0] == '-' && c->at[1] != ']') {
      c->at++;
      if (!bound(c, &hi)) return false;
    }
    if (lo > hi) return refuse(c, "a range that ends before it begins");
    for (unsigned b = lo; b <= hi; b++) add(set, b);
  }
  c->at++;
  return put_set(c, set, negated);
}

/* ---- expressions ---- */

static bool alternatives(compiler *c);

static bool escaped(compiler *c) {
  char e = *++c->at;
  if (e == 0) return refuse(c, "nothing after \"\\\"");
  if (!isalnum((uint8_t)e)) return put_byte(c, *c->at++);
  uint64_t set[4] = {0};
  bool space = e == 's' || e == 'S';
  if (!space && e != 'w' && e != 'W') return refuse(c, isdigit((uint8_t)e) ? "a backreference" : "an unknown escape");
  for (int b = 0; b < 128; b++)
    if (space ? isspace(b) : isalnum(b) || b == '_') add(set, (unsigned)b);
  c->at++;
  return put_set(c, set, isupper((uint8_t)e));
}

static bool group(compiler *c) {
  if (++c->nest > MM_PATTERN_NEST) return refuse(c, "too many groups inside each other");
  c->at++;
  if (!alternatives(c)) return false;
  if (*c->at != ')') return refuse(c, "no end of a group");
  c->at++;
  c->nest--;
  return true;
}

static bool atom(compiler *c) {
  switch (*c->at) {
    case '(': return group(c);
    case '[': return set_of(c);
    case '\\': return escaped(c);
    case '.': c->at++; return put_any(c);
    case '^': c->at++; return put(c, c->n, BEGIN, 0, 0);
    case '$': c->at++; return put(c, c->n, END, 0, 0);
    case '*':
    case '+':
    case '?':
    case '{': return refuse(c, "nothing to repeat");
    case ')': return refuse(c, "no group to end");
    default: return put_byte(c, *c->at++);
  }
}

static bool number(compiler *c, uint32_t *out) {
  if (!isdigit((uint8_t)*c->at)) return refuse(c, "no number");
  for (*out = 0; isdigit((uint8_t)*c->at) && *out <= MM_PATTERN_REPEAT; c->at++) *out = 10 * *out + (uint32_t)(*c->at - '0');
  return *out <= MM_PATTERN_REPEAT || refuse(c, "too many repetitions");
}

/* The ops from `start` on become one that may be left out, and with `again` one that may come again. */
static bool maybe(compiler *c, uint32_t start, bool again) {
  int32_t n = (int32_t)(c->n - start);
  return put(c, start, SPLIT, 1, n + 1 + again) && (!again || put(c, c->n, JUMP, -(n + 1), 0));
}

/* {m}, {m,}, {m,n}: the ops from `start` on, written out as often. */
static bool repeat(compiler *c, uint32_t start) {
  uint32_t least = 0, most, n = c->n - start;
  c->at++;
  if (!number(c, &least)) return false;
  most = least;
  bool open = *c->at == ',' && *++c->at == '}';
  if (!open && c->at[-1] == ',' && !number(c, &most)) return false;
  if (*c->at != '}') return refuse(c, "no end of \"{\"");
  if (most < least) return refuse(c, "a range that ends before it begins");
  c->at++;
  op *once = malloc((n ? n : 1) * sizeof *once);
  if (!once) return mm_fail_memory(c->err, n * sizeof *once);
  memcpy(once, c->op + start, n * sizeof *once);
  c->n = start;
  bool ok = true;
  for (uint32_t i = 0; ok && i < most + open; i++) {
    uint32_t from = c->n;
    op *to = insert(c, from, n);
    if ((ok = to)) memcpy(to, once, n * sizeof *to);
    if (ok && i >= least) ok = maybe(c, from, open);
  }
  free(once);
  return ok;
}

static bool repeated(compiler *c) {
  uint32_t start = c->n;
  if (!atom(c)) return false;
  for (;;) {
    switch (*c->at) {
      case '*':
        c->at++;
        if (!maybe(c, start, true)) return false;
        break;
      case '?':
        c->at++;
        if (!maybe(c, start, false)) return false;
        break;
      case '+':
        c->at++;
        if (!put(c, c->n, SPLIT, -(int32_t)(c->n - start), 1)) return false;
        break;
      case '{':
        if (!repeat(c, start)) return false;
        break;
      default: return true;
    }
  }
}

static bool alternatives(compiler *c) {
  uint32_t start = c->n;
  while (*c->at && *c->at != '|' && (*c->at != ')' || c->nest == 0))
    if (!repeated(c)) return false;
  if (*c->at != '|') return true;
  c->at++;
  uint32_t n = c->n - start, jump = c->n + 1;
  if (!put(c, start, SPLIT, 1, (int32_t)n + 2) || !put(c, jump, JUMP, 0, 0) || !alternatives(c)) return false;
  c->op[jump].x = (int32_t)(c->n - jump);
  return true;
}

/* ---- globs ---- */

static bool glob(compiler *c) {
  if (!put(c, c->n, BEGIN, 0, 0)) return false;
  while (*c->at) {
    uint32_t start = c->n;
    char b = *c->at;
    bool set = b == '[' && c->at[1] && strchr(c->at + 2, ']'); /* else a bracket like any byte */
    bool ok = b == '*' ? put_any(c) && maybe(c, start, true) : b == '?' ? put_any(c) : set ? set_of(c) : true;
    if (!ok) return false;
    if (b == '*' || b == '?') c->at++;
    if (b == '*' || b == '?' || set) continue;
    c->at += b == '\\' && c->at[1];
    if (!put_byte(c, *c->at++)) return false;
  }
  return put(c, c->n, END, 0, 0);
}

bool mm_pattern_compile(mm_pattern *p, const char *text, mm_arena *a, mm_err *err) {
  compiler *c = mm_calloc(1, sizeof *c, err);
  if (!c) return false;
  c->glob = strncmp(text, "re:", 3) != 0;
  c->text = text;
  c->at = text + (c->glob ? 0 : 3);
  c->err = err;
  bool ok = true;
  if (*c->at == 0) ok = refuse(c, "nothing");
  size_t n = strlen(text);
  if (ok && n > MM_PATTERN_BYTES)
    ok = mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found a pattern of %zu bytes, expected at most %d", n, MM_PATTERN_BYTES);
  ok = ok && (c->glob ? glob(c) : alternatives(c)) && put(c, c->n, DONE, 0, 0);
  if (ok && (p->op = mm_arena_alloc(a, c->n * sizeof *p->op, err))) memcpy(p->op, c->op, c->n * sizeof *p->op);
  p->count = c->n;
  free(c);
  return ok && p->op;
}

/* ---- matching ---- */

/* The ops that are waited at before a byte: each is in the list once. */
typedef struct waiting {
  uint32_t count;
  uint16_t at[MM_PATTERN_STATES];
} waiting;

typedef struct matching {
  const mm_pattern *p;
  uint32_t step;
  uint32_t seen[MM_PATTERN_STATES]; /* the last step that came by */
  uint16_t stack[MM_PATTERN_STATES];
  waiting list[2];
} matching;

static void come_by(matching *m, uint32_t *depth, int64_t at) {
  if (m->seen[at] == m->step) return;
  m->seen[at] = m->step;
  m->stack[(*depth)++] = (uint16_t)at;
}

/* Follows jumps from op `at` to all that wait for a byte; true where the pattern is done. */
static bool follow(matching *m, waiting *to, uint32_t start, bool first, bool last) {
  uint32_t depth = 0;
  come_by(m, &depth, start);
  while (depth > 0) {
    uint32_t at = m->stack[--depth];
    const op *o = &m->p->op[at];
    switch (o->kind) {
      case DONE: return true;
      case BYTE: to->at[to->count++] = (uint16_t)at; break;
      case SPLIT:
        come_by(m, &depth, (int64_t)at + o->y);
        come_by(m, &depth, (int64_t)at + o->x);
        break;
      case JUMP: come_by(m, &depth, (int64_t)at + o->x); break;
      case BEGIN:
        if (first) come_by(m, &depth, (int64_t)at + 1);
        break;
      default:
        if (last) come_by(m, &depth, (int64_t)at + 1);
        break;
    }
  }
  return false;
}

bool mm_pattern_match(const mm_pattern *p, const char *name) {
  matching m;
  m.p = p;
  memset(m.seen, 0, p->count * sizeof *m.seen);
  m.list[0].count = 0;
  for (size_t i = 0;; i++) {
    waiting *now = &m.list[i % 2], *next = &m.list[(i + 1) % 2];
    m.step = (uint32_t)i + 1; /* those that took a byte came by in this step already */
    if (i == 0 || p->op[0].kind != BEGIN)
      if (follow(&m, now, 0, i == 0, name[i] == 0)) return true;
    if (name[i] == 0 || (now->count == 0 && p->op[0].kind == BEGIN)) return false;
    next->count = 0;
    m.step = (uint32_t)i + 2;
    for (uint32_t k = 0; k < now->count; k++)
      if (has(p->op[now->at[k]].set, (uint8_t)name[i]) && follow(&m, next, now->at[k] + 1u, false, name[i + 1] == 0)) return true;
  }
}
