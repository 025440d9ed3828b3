/* Automata: the rules become one automaton of many states at a time, whose reachable sets are the states of the table. */
#include "runtime/constrain/automaton.h"

#include <stdlib.h>
#include <string.h>

#define NODES_MAX 65536
#define RULES_MAX 64
#define CALLS_MAX 256  /* rules that one rule calls */
#define END_BYTE  0xfe /* stands behind a whole text while its automaton is made; no text has it */
#define NO_NODE   UINT32_MAX

typedef struct node {
  uint32_t free[2]; /* nodes that are reached without a byte */
  uint32_t edges;   /* the first of its edges */
} node;

/* Symbols: bytes, then rules that are called. */
typedef struct edge {
  uint16_t first, last;
  uint32_t to, next;
} edge;

typedef struct rule_nodes {
  bool negated;
  uint32_t first, end, begin, last; /* nodes [first, end); the one at the beginning, the one of a complete text */
} rule_nodes;

/* A state of the table: a set of nodes that have edges, or are the last of a rule. */
typedef struct set {
  uint32_t from, count; /* in the pool */
} set;

typedef struct builder {
  mm_automaton_form form;
  mm_automaton_budget *budget;
  node *node;
  edge *edge;
  uint32_t nodes, edges;
  size_t node_cap, edge_cap;
  rule_nodes rule[RULES_MAX];
  uint32_t rules;
  uint8_t class_of[256];
  uint16_t example[256 + CALLS_MAX]; /* a symbol of each class */
  uint32_t classes, byte_classes;
  const mm_grammar_rule *call[CALLS_MAX]; /* [calls] their symbols are 256, 257, … */
  uint32_t calls;
  uint32_t *pool; /* nodes of all sets */
  size_t pooled, pool_cap;
  set *set;
  uint32_t sets;
  size_t set_cap;
  uint32_t *bucket; /* [bucket_count] sets by their hash, plus one; 0: none */
  size_t bucket_count;
  uint16_t *next; /* [sets, classes] */
  size_t next_cap;
  uint32_t *mark, *list, *stack; /* [nodes] the last set that a node was put in; the set that is made; nodes to look at */
  uint32_t marks, listed, last;  /* sets made; its nodes; the set of complete texts */
  const char **reason;
  mm_err *err;
} builder;

static bool refuse(builder *b, const char *reason) {
  if (!*b->reason) *b->reason = reason;
  return false;
}

static bool spend(builder *b, uint64_t steps) {
  if (b->budget->steps < steps) return b->budget->steps = 0, refuse(b, ", whose automaton is too large");
  b->budget->steps -= steps;
  return true;
}

/* ---- Nodes of a pattern, from its end to its beginning ---- */

static uint32_t new_node(builder *b) {
  if (b->nodes == NODES_MAX) return refuse(b, ", whose automaton is too large"), NO_NODE;
  if (!spend(b, 1) || !MM_GROW(b->node, &b->node_cap, b->nodes + 1, b->err)) return NO_NODE;
  b->node[b->nodes] = (node){{NO_NODE, NO_NODE}, NO_NODE};
  return b->nodes++;
}

static bool add_edge(builder *b, uint32_t from, uint16_t first, uint16_t last, uint32_t to) {
  if (!spend(b, 1) || !MM_GROW(b->edge, &b->edge_cap, b->edges + 1, b->err)) return false;
  b->edge[b->edges] = (edge){first, last, to, b->node[from].edges};
  b->node[from].edges = b->edges++;
  return true;
}

/* A node from which these symbols lead to `to`. */
static uint32_t before(builder *b, uint16_t first, uint16_t last, uint32_t to) {
  const uint32_t n = new_node(b);
  return n != NO_NODE && add_edge(b, n, first, last, to) ? n : NO_NODE;
}

/* Nodes of a class: the one at its beginning, those from which one to three any following bytes lead to its end, and that behind the
 * backslash of an escape. */
typedef struct class_nodes {
  uint32_t begin, tail[4], escape;
} class_nodes;

static uint32_t tail_node(builder *b, class_nodes *c, int bytes) {
  if (bytes && c->tail[bytes] == NO_NODE) {
    const uint32_t rest = tail_node(b, c, bytes - 1);
    c->tail[bytes] = rest == NO_NODE ? NO_NODE : before(b, 0x80, 0xbf, rest);
  }
  return c->tail[bytes];
}

/* Characters whose encodings have the same length and differ in each byte on its own. */
static bool add_bytes(builder *b, class_nodes *c, uint32_t first, uint32_t last, int more) {
  static const uint8_t lead[] = {0, 0xc0, 0xe0, 0xf0};
  uint32_t to = c->tail[0];
  bool full = true;
  for (int i = 0; i < more && to != NO_NODE; i++) {
    const uint8_t lo = (uint8_t)(0x80 | (first >> 6 * i & 0x3f)), hi = (uint8_t)(0x80 | (last >> 6 * i & 0x3f));
    full = full && lo == 0x80 && hi == 0xbf;
    to = full ? tail_node(b, c, i + 1) : before(b, lo, hi, to);
  }
  return to != NO_NODE && add_edge(b, c->begin, (uint8_t)(lead[more] | first >> 6 * more), (uint8_t)(lead[more] | last >> 6 * more), to);
}

/* Splits a range until the bytes of its characters differ each on its own. */
static bool add_characters(builder *b, class_nodes *c, uint32_t first, uint32_t last, int more) {
  for (int i = 1; i <= more; i++) {
    const uint32_t low = (1u << 6 * i) - 1;
    if ((first & ~low) == (last & ~low)) continue;
    if (first & low) return add_characters(b, c, first, first | low, more) && add_characters(b, c, (first | low) + 1, last, more);
    if ((last & low) != low) return add_characters(b, c, first, (last & ~low) - 1, more) && add_characters(b, c, last & ~low, last, more);
  }
  return add_bytes(b, c, first, last, more);
}

/* One character below 0x80. */
static bool add_ascii(builder *b, class_nodes *c, uint8_t code) {
  static const char escaped[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
  const char *escape = code ? strchr(escaped, code) : NULL;
  if (b->form == MM_AUTOMATON_TEXT) {
    if (code == '<' || (code < ' ' && code != '\t' && code != '\n' && code != '\r')) return true;
    return add_edge(b, c->begin, code, code, c->tail[0]);
  }
  if (b->form == MM_AUTOMATON_WHOLE) return code == 0 || add_edge(b, c->begin, code, code, c->tail[0]);
  if (!escape) return code < ' ' || add_edge(b, c->begin, code, code, c->tail[0]);
  if (c->escape == NO_NODE) {
    c->escape = new_node(b);
    if (c->escape == NO_NODE || !add_edge(b, c->begin, '\\', '\\', c->escape)) return false;
  }
  const uint8_t letter = (uint8_t)letters[escape - escaped];
  return add_edge(b, c->escape, letter, letter, c->tail[0]);
}

static bool is_plain(const builder *b, uint32_t code) {
  if (b->form == MM_AUTOMATON_WHOLE) return code && code < 0x80;
  return code >= ' ' && code < 0x80 && (b->form == MM_AUTOMATON_TEXT ? code != '<' : code != '"' && code != '\\');
}

static bool add_class_range(builder *b, class_nodes *c, uint32_t first, uint32_t last) {
  static const uint32_t ends[] = {0x7f, 0x7ff, 0xffff, MM_CODE_POINTS - 1};
  uint32_t code = first;
  while (code <= last && code <= ends[0]) {
    uint32_t end = code;
    while (is_plain(b, code) && end < last && is_plain(b, end + 1)) end++;
    const bool ok = is_plain(b, code) ? add_edge(b, c->begin, (uint8_t)code, (uint8_t)end, c->tail[0]) : add_ascii(b, c, (uint8_t)code);
    if (!ok) return false;
    code = end + 1;
  }
  for (int more = 1; more < 4 && code <= last; more++) {
    if (code > ends[more]) continue;
    const uint32_t end = (uint32_t)mm_min(last, ends[more]);
    if (!add_characters(b, c, code, end, more)) return false;
    code = end + 1;
  }
  return true;
}

static uint32_t class_node(builder *b, const mm_text_pattern *p, uint32_t to) {
  class_nodes c = {.begin = new_node(b), .tail = {to, NO_NODE, NO_NODE, NO_NODE}, .escape = NO_NODE};
  for (uint32_t i = 0; i < p->count && c.begin != NO_NODE; i++)
    if (!add_class_range(b, &c, p->range[i].first, p->range[i].last)) return NO_NODE;
  return c.begin;
}

static uint32_t pattern_node(builder *b, const mm_text_pattern *p, uint32_t to);

/* A node from which each of two others is reached without a byte. */
static uint32_t split(builder *b, uint32_t one, uint32_t other) {
  const uint32_t n = one == NO_NODE || other == NO_NODE ? NO_NODE : new_node(b);
  if (n != NO_NODE) b->node[n].free[0] = one, b->node[n].free[1] = other;
  return n;
}

static uint32_t choice_node(builder *b, const mm_text_pattern *p, uint32_t to) {
  uint32_t all = NO_NODE;
  for (const mm_text_pattern *part = p->first; part; part = part->next) {
    const uint32_t one = pattern_node(b, part, to);
    if (one == NO_NODE) return NO_NODE;
    all = part == p->first ? one : split(b, one, all);
    if (all == NO_NODE) return NO_NODE;
  }
  return all;
}

static uint32_t repeat_node(builder *b, const mm_text_pattern *p, uint32_t to) {
  const uint32_t end = to;
  if (p->most == UINT32_MAX) {
    const uint32_t loop = new_node(b), part = loop == NO_NODE ? NO_NODE : pattern_node(b, p->first, loop);
    if (part == NO_NODE) return NO_NODE;
    b->node[loop].free[0] = part;
    b->node[loop].free[1] = end;
    to = loop;
  } else {
    for (uint32_t i = p->least; i < p->most && to != NO_NODE; i++) to = split(b, pattern_node(b, p->first, to), end);
  }
  for (uint32_t i = 0; i < p->least && to != NO_NODE; i++) to = pattern_node(b, p->first, to);
  return to;
}

static uint32_t text_node(builder *b, const char *text, size_t n, uint32_t to) {
  while (n && to != NO_NODE) n--, to = before(b, (uint8_t)text[n], (uint8_t)text[n], to);
  return to;
}

/* A rule of a grammar: its pattern, or a call, whose text is not empty. */
static uint32_t rule_node(builder *b, const mm_grammar_rule *r, uint32_t to) {
  uint32_t i = 0;
  if (r->dead) return new_node(b);
  if (!r->called) return pattern_node(b, r->pattern, to);
  while (i < b->calls && b->call[i] != r) i++;
  if (i == CALLS_MAX) return refuse(b, ", a rule of which names so many others"), NO_NODE;
  b->call[i] = r;
  b->calls = (uint32_t)mm_max(b->calls, i + 1);
  const uint32_t n = before(b, (uint16_t)(256 + i), (uint16_t)(256 + i), to);
  return r->empty ? split(b, n, to) : n;
}

/* A node from which the texts of the pattern lead to `to`. */
static uint32_t pattern_node(builder *b, const mm_text_pattern *p, uint32_t to) {
  if (!spend(b, 1)) return NO_NODE;
  switch (p->kind) {
    case MM_PATTERN_CLASS: return class_node(b, p, to);
    case MM_PATTERN_SEQUENCE:
      for (const mm_text_pattern *part = p->first; part && to != NO_NODE; part = part->next) to = pattern_node(b, part, to);
      return to;
    case MM_PATTERN_CHOICE: return choice_node(b, p, to);
    case MM_PATTERN_REPEAT: return repeat_node(b, p, to);
    case MM_PATTERN_RULE: return rule_node(b, p->rule, to);
    default: return text_node(b, p->text, p->n, to);
  }
}

static bool add_rule(builder *b, const mm_text_rule *r) {
  if (b->rules == RULES_MAX) return refuse(b, ", with so many conditions");
  rule_nodes *n = &b->rule[b->rules++];
  n->negated = r->negated;
  n->first = b->nodes;
  n->last = new_node(b);
  uint32_t to = n->last;
  const char *const end = b->form == MM_AUTOMATON_JSON ? "\"" : b->form == MM_AUTOMATON_TEXT ? "</parameter>" : "\xfe";
  if (to != NO_NODE) to = text_node(b, end, strlen(end), to);
  if (to != NO_NODE) to = pattern_node(b, r->pattern, to);
  if (to != NO_NODE && b->form == MM_AUTOMATON_JSON) to = text_node(b, "\"", 1, to);
  n->begin = to;
  n->end = b->nodes;
  return to != NO_NODE;
}

/* ---- Sets of nodes ---- */

/* Bytes that no edge distinguishes are one class; each call is one. */
static void classify(builder *b) {
  bool begins[257] = {true};
  for (uint32_t i = 0; i < b->edges; i++)
    if (b->edge[i].first < 256) begins[b->edge[i].first] = begins[b->edge[i].last + 1] = true;
  for (uint32_t i = 0; i < 256; i++) {
    if (begins[i]) b->example[b->classes++] = (uint16_t)i;
    b->class_of[i] = (uint8_t)(b->classes - 1);
  }
  b->byte_classes = b->classes;
  for (uint32_t i = 0; i < b->calls; i++) b->example[b->classes++] = (uint16_t)(256 + i);
}

static bool is_last(const builder *b, uint32_t n) {
  for (uint32_t i = 0; i < b->rules; i++)
    if (b->rule[i].last == n) return true;
  return false;
}

/* Puts a node into the set that is made, and what is reached from it without a byte. */
static bool reach(builder *b, uint32_t n) {
  uint32_t depth = 0;
  if (b->mark[n] == b->marks) return true;
  b->mark[n] = b->marks;
  b->stack[depth++] = n;
  while (depth) {
    const node *x = &b->node[b->stack[--depth]];
    const uint32_t at = (uint32_t)(x - b->node);
    if (!spend(b, 1)) return false;
    if (x->edges != NO_NODE || (x->free[0] == NO_NODE && is_last(b, at))) b->list[b->listed++] = at;
    for (int i = 0; i < 2; i++) {
      if (x->free[i] == NO_NODE || b->mark[x->free[i]] == b->marks) continue;
      b->mark[x->free[i]] = b->marks;
      b->stack[depth++] = x->free[i];
    }
  }
  return true;
}

static void begin_set(builder *b) {
  b->marks++;
  b->listed = 0;
}

static bool holds(const builder *b, uint32_t wanted) {
  for (uint32_t i = 0; i < b->listed; i++)
    if (b->list[i] == wanted) return true;
  return false;
}

/* A set from which no text can be complete: a rule has no node left, or one that must not hold does. *complete: the text is. */
static bool is_dead(const builder *b, bool *complete) {
  *complete = true;
  for (uint32_t i = 0; i < b->rules; i++) {
    const rule_nodes *r = &b->rule[i];
    if (r->negated) {
      if (holds(b, r->last)) return true;
      continue;
    }
    bool any = false;
    for (uint32_t k = 0; k < b->listed && !any; k++) any = b->list[k] >= r->first && b->list[k] < r->end;
    if (!any) return true;
    *complete = *complete && holds(b, r->last);
  }
  return false;
}

static uint64_t hash_of(const uint32_t *list, uint32_t n) {
  uint64_t h = n;
  for (uint32_t i = 0; i < n; i++) h = (h ^ list[i]) * UINT64_C(0x9e3779b97f4a7c15), h ^= h >> 29;
  return h;
}

static bool grow_buckets(builder *b) {
  const size_t want = b->bucket_count ? 2 * b->bucket_count : 256;
  uint32_t *bucket = mm_calloc(want, sizeof *bucket, b->err);
  if (!bucket) return false;
  for (uint32_t i = 0; i < b->sets; i++) {
    size_t at = hash_of(&b->pool[b->set[i].from], b->set[i].count) & (want - 1);
    while (bucket[at]) at = (at + 1) & (want - 1);
    bucket[at] = i + 1;
  }
  free(b->bucket);
  b->bucket = bucket;
  b->bucket_count = want;
  return spend(b, b->pooled + want);
}

/* The place of the set that was made, which may be new; MM_AUTOMATON_NONE: no text can be complete from it. */
static bool place_set(builder *b, uint16_t *place) {
  bool complete;
  *place = MM_AUTOMATON_NONE;
  if (!spend(b, (uint64_t)b->listed * (b->rules + 1))) return false;
  if (!b->listed || is_dead(b, &complete)) return true;
  if (complete) b->list[0] = b->rule[0].last, b->listed = 1; /* nothing follows any of them */
  qsort(b->list, b->listed, sizeof *b->list, mm_by_u32);
  if (2 * (size_t)b->sets >= b->bucket_count && !grow_buckets(b)) return false;
  size_t at = hash_of(b->list, b->listed) & (b->bucket_count - 1);
  for (; b->bucket[at]; at = (at + 1) & (b->bucket_count - 1)) {
    const set *s = &b->set[b->bucket[at] - 1];
    if (s->count != b->listed || memcmp(&b->pool[s->from], b->list, b->listed * sizeof *b->list) != 0) continue;
    return *place = (uint16_t)(b->bucket[at] - 1), true;
  }
  if (b->sets == MM_AUTOMATON_STATES) return refuse(b, ", whose automaton is too large");
  if (!MM_GROW(b->pool, &b->pool_cap, b->pooled + b->listed, b->err) || !MM_GROW(b->set, &b->set_cap, b->sets + 1, b->err)) return false;
  memcpy(&b->pool[b->pooled], b->list, b->listed * sizeof *b->list);
  b->set[b->sets] = (set){(uint32_t)b->pooled, b->listed};
  b->pooled += b->listed;
  b->bucket[at] = b->sets + 1;
  if (complete) b->last = b->sets;
  *place = (uint16_t)b->sets++;
  return spend(b, b->listed);
}

/* Where a symbol of the class leads from the set. */
static bool step_set(builder *b, uint32_t from, uint32_t class, uint16_t *place) {
  const uint16_t symbol = b->example[class];
  uint64_t edges = 1;
  begin_set(b);
  for (uint32_t i = 0; i < b->set[from].count; i++) {
    const node *n = &b->node[b->pool[b->set[from].from + i]];
    for (uint32_t e = n->edges; e != NO_NODE; e = b->edge[e].next, edges++)
      if (symbol >= b->edge[e].first && symbol <= b->edge[e].last && !reach(b, b->edge[e].to)) return false;
  }
  return spend(b, edges) && place_set(b, place);
}

static bool find_sets(builder *b) {
  uint16_t first;
  begin_set(b);
  b->last = NO_NODE;
  for (uint32_t i = 0; i < b->rules; i++)
    if (!reach(b, b->rule[i].begin)) return false;
  if (!place_set(b, &first)) return false;
  if (first == MM_AUTOMATON_NONE) return refuse(b, ": no text fits");
  for (uint32_t i = 0; i < b->sets; i++) {
    const size_t want = (size_t)(i + 1) * b->classes;
    if (b->budget->entries < b->classes) return refuse(b, ", whose automaton is too large");
    b->budget->entries -= b->classes;
    if (!MM_GROW(b->next, &b->next_cap, want, b->err)) return false;
    for (uint32_t k = 0; k < b->classes; k++)
      if (!step_set(b, i, k, &b->next[(size_t)i * b->classes + k])) return false;
  }
  return b->last != NO_NODE || refuse(b, ": no text fits");
}

/* ---- The table ---- */

/* Marks the states from which the text can become complete: from the last one backwards. before[at[s]] … are the states that lead to s. */
static bool mark_alive(builder *b, bool *alive) {
  const size_t entries = (size_t)b->sets * b->classes;
  uint32_t *at = mm_calloc((size_t)b->sets + 2, sizeof *at, b->err), *from = mm_calloc(entries + 1, sizeof *from, b->err),
           *todo = mm_calloc((size_t)b->sets + 1, sizeof *todo, b->err);
  const bool ok = at && from && todo;
  if (ok) {
    uint32_t n = 0;
    for (size_t i = 0; i < entries; i++)
      if (b->next[i] != MM_AUTOMATON_NONE) at[b->next[i] + 2]++;
    for (uint32_t s = 0; s < b->sets; s++) at[s + 2] += at[s + 1];
    for (size_t i = 0; i < entries; i++)
      if (b->next[i] != MM_AUTOMATON_NONE) from[at[b->next[i] + 1]++] = (uint32_t)(i / b->classes);
    alive[b->last] = true;
    todo[n++] = b->last;
    while (n) {
      const uint32_t s = todo[--n];
      for (uint32_t i = at[s]; i < at[s + 1]; i++)
        if (!alive[from[i]]) alive[from[i]] = true, todo[n++] = from[i];
    }
  }
  MM_FREE(at, from, todo);
  return ok;
}

static mm_automaton *make_table(builder *b, mm_arena *a) {
  mm_automaton *m = mm_arena_alloc(a, sizeof *m, b->err);
  bool *alive = mm_calloc((size_t)b->sets + 1, sizeof *alive, b->err);
  uint16_t *place = mm_calloc((size_t)b->sets + 1, sizeof *place, b->err), *next = NULL;
  bool ok = m && alive && place && mark_alive(b, alive);
  if (ok && !alive[0]) ok = refuse(b, ": no text fits");
  if (ok) {
    for (uint32_t s = 0; s < b->sets; s++)
      if (alive[s]) place[s] = (uint16_t)m->states++;
    next = mm_arena_alloc(a, (size_t)m->states * b->classes * sizeof *next, b->err);
  }
  if (next) {
    for (uint32_t s = 0; s < b->sets; s++) {
      for (uint32_t k = 0; alive[s] && k < b->classes; k++) {
        const uint16_t to = b->next[(size_t)s * b->classes + k];
        next[(size_t)place[s] * b->classes + k] = to == MM_AUTOMATON_NONE || !alive[to] ? MM_AUTOMATON_NONE : place[to];
      }
    }
    memcpy(m->class_of, b->class_of, sizeof m->class_of);
    m->classes = b->classes;
    m->next = next;
    m->last = place[b->last];
  }
  MM_FREE(alive, place);
  return next ? m : NULL;
}

/* Which states of a whole text's table end it, and what they call; the byte that stood for the end has no class any more. */
static bool end_whole(builder *b, mm_automaton *m, mm_arena *a) {
  const uint8_t end_class = m->class_of[END_BYTE];
  uint8_t *end = mm_arena_alloc(a, m->states, b->err);
  uint32_t *first = mm_arena_alloc(a, (m->states + (size_t)1) * sizeof *first, b->err);
  size_t count = 0;
  for (size_t i = 0; i < (size_t)m->states * m->classes; i++) count += i % m->classes >= b->byte_classes && m->next[i] != MM_AUTOMATON_NONE;
  mm_automaton_call *call = mm_arena_alloc(a, (count + 1) * sizeof *call, b->err);
  if (!end || !first || !call) return false;
  count = 0;
  for (uint32_t s = 0; s < m->states; s++) {
    const uint16_t *row = m->next + (size_t)s * m->classes;
    bool more = false;
    first[s] = (uint32_t)count;
    for (uint32_t k = 0; k < m->classes; k++) {
      if (row[k] == MM_AUTOMATON_NONE || k == end_class) continue;
      more = true;
      if (k >= b->byte_classes) call[count++] = (mm_automaton_call){b->call[k - b->byte_classes]->number, row[k]};
    }
    end[s] = row[end_class] == MM_AUTOMATON_NONE ? MM_AUTOMATON_GOES_ON : more ? MM_AUTOMATON_MAY_END : MM_AUTOMATON_ENDS;
  }
  first[m->states] = (uint32_t)count;
  m->class_of[END_BYTE] = m->class_of[0xff];
  m->end = end;
  m->first_call = first;
  m->call = call;
  return true;
}

const mm_automaton *mm_automaton_build(mm_arena *a, const mm_text_rule *rules, mm_automaton_form form, mm_automaton_budget *budget,
                                       const char **reason, mm_err *err) {
  builder b = {.form = form, .budget = budget, .reason = reason, .err = err};
  mm_automaton *m = NULL;
  bool ok = true;
  *reason = NULL;
  for (const mm_text_rule *r = rules; r && ok; r = r->next) ok = add_rule(&b, r);
  if (ok) {
    b.mark = mm_calloc(b.nodes, sizeof *b.mark, err);
    b.list = mm_calloc(b.nodes, sizeof *b.list, err);
    b.stack = mm_calloc(b.nodes, sizeof *b.stack, err);
    classify(&b);
    ok = b.mark && b.list && b.stack && find_sets(&b);
  }
  if (ok) m = make_table(&b, a);
  if (m && form == MM_AUTOMATON_WHOLE && !end_whole(&b, m, a)) m = NULL;
  MM_FREE(b.node, b.edge, b.pool, b.set, b.bucket, b.next, b.mark, b.list, b.stack);
  return m;
}
