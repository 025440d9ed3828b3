/* Messages by digest, in buckets and in a list by their last use. */
#include "runtime/chat/replay.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/hash.h"
#include "runtime/chat/render.h"

#define BUCKETS 1024

typedef struct entry entry;
struct entry {
  mm_digest key, reasoning;
  entry *chain;         /* in its bucket */
  entry *newer, *older; /* by last use */
  mm_opening opening;
  size_t count;
  int32_t id[];
};

struct mm_replay {
  entry *bucket[BUCKETS];
  entry *newest, *oldest;
  size_t tokens, max_tokens;
};

mm_replay *mm_replay_open(size_t max_tokens, mm_err *err) {
  mm_replay *r = mm_calloc(1, sizeof *r, err);
  if (r) r->max_tokens = max_tokens;
  return r;
}

void mm_replay_close(mm_replay *r) {
  if (!r) return;
  for (entry *e = r->newest, *older; e; e = older) {
    older = e->older;
    free(e);
  }
  free(r);
}

/* ---- What a message is known by ---- */

/* A length before each text, so that no two messages are the same bytes. */
static void put_text(mm_text *out, mm_str s) {
  mm_text_printf(out, "%zu:", s.n);
  mm_text_add(out, s.p ? s.p : "", s.n);
}

static int by_key(const void *a, const void *b) {
  const mm_value *x = *(const mm_value *const *)a, *y = *(const mm_value *const *)b;
  if (x->key_n != y->key_n) return x->key_n < y->key_n ? -1 : 1;
  return memcmp(x->key, y->key, x->key_n);
}

/* A number as clients have it that parsed it: 1.0 is 1, and 0.10 what 0.1 is. Above 2^53, where doubles leave out integers that some
 * clients keep, it is its exact value: its digits between zeros, and a power of ten. */
static void put_number(mm_text *out, const mm_value *v) {
  const double x = mm_value_real(v);
  if (fabs(x) < 0x1p53) {
    mm_text_printf(out, "%.17g,", x + 0.0); /* -0 is 0 */
    return;
  }
  size_t end = 0, last = 0, first = v->n, point = v->n;
  for (; end < v->n && v->text[end] != 'e' && v->text[end] != 'E'; end++) {
    if (v->text[end] == '.') point = end;
    if (v->text[end] < '1' || v->text[end] > '9') continue;
    if (first == v->n) first = end;
    last = end;
  }
  const long exponent = end + 1 < v->n ? strtol(v->text + end + 1, NULL, 10) : 0;
  const long power = exponent < LONG_MAX / 2 ? exponent : LONG_MAX / 2; /* it is no small one; a body has fewer digits than that */
  if (point > end) point = end;
  if (v->text[0] == '-') mm_text_put(out, "-");
  for (size_t i = first; i < end && i <= last; i++)
    if (v->text[i] != '.') mm_text_add(out, v->text + i, 1);
  mm_text_printf(out, "e%ld,", power + (long)point - (long)last - (last < point));
}

/* Recursion is bounded by the depth that mm_body_parse reads. */
bool mm_value_put_parsed(mm_text *out, mm_arena *a, const mm_value *v) {
  if (v->type == MM_VALUE_NUMBER) return put_number(out, v), true;
  if (v->type != MM_VALUE_OBJECT && v->type != MM_VALUE_ARRAY) return mm_tojson(out, v), true;
  const bool object = v->type == MM_VALUE_OBJECT;
  const mm_value **member = mm_arena_alloc(a, (v->count + 1) * sizeof *member, MM_IGNORED);
  size_t n = 0;
  if (!member) return false;
  for (const mm_value *k = v->first; k; k = k->next) member[n++] = k;
  if (object) qsort(member, n, sizeof *member, by_key);
  mm_text_printf(out, "%c%zu:", object ? '{' : '[', n);
  for (size_t i = 0; i < n; i++) {
    if (object) put_text(out, (mm_str){member[i]->key, member[i]->key_n});
    if (!mm_value_put_parsed(out, a, member[i])) return false;
  }
  return true;
}

static bool put_calls(mm_text *out, const mm_message *m) {
  mm_text json = {0};
  mm_arena arena = {0};
  bool ok = true;
  for (size_t i = 0; ok && i < m->call_count; i++) {
    const mm_chat_call *c = &m->call[i];
    mm_err wrong = {0};
    const mm_value *v = c->arguments.n ? mm_body_parse(&arena, c->arguments.p, c->arguments.n, &wrong) : NULL;
    mm_text_clear(&json);
    if (!v) mm_text_put(&json, "{0:");
    ok = c->id.n && (v ? mm_value_put_parsed(&json, &arena, v) : !c->arguments.n) && !json.failed;
    put_text(out, c->id);
    put_text(out, c->name);
    if (ok) put_text(out, (mm_str){json.p, json.n});
  }
  mm_arena_close(&arena);
  free(json.p);
  return ok;
}

/* false: the message has no calls with ids, or they are no JSON. */
static bool key_of(const mm_message *m, mm_digest *key) {
  mm_text text = {0}, all = {0};
  mm_text_put(&text, "");
  for (size_t i = 0; i < m->part_count; i++) mm_text_add(&text, m->part[i].text.p ? m->part[i].text.p : "", m->part[i].text.n);
  bool ok = m->role == MM_ROLE_ASSISTANT && m->call_count && !text.failed;
  if (ok) put_text(&all, mm_strip((mm_str){text.p, text.n}));
  ok = ok && put_calls(&all, m) && !all.failed;
  if (ok) *key = mm_sha256(all.p, all.n);
  free(text.p);
  free(all.p);
  return ok;
}

static mm_digest reasoning_of(const mm_message *m) {
  const mm_str text = mm_strip(m->reasoning);
  return mm_sha256(text.n ? text.p : "", text.n);
}

/* ---- The list and the buckets ---- */

static entry **bucket_of(mm_replay *r, const mm_digest *key) { return &r->bucket[(key->byte[0] | key->byte[1] << 8) % BUCKETS]; }

static void take_out(mm_replay *r, entry *e) {
  if (e == r->newest)
    r->newest = e->older;
  else
    e->newer->older = e->older;
  if (e == r->oldest)
    r->oldest = e->newer;
  else
    e->older->newer = e->newer;
}

static void put_first(mm_replay *r, entry *e) {
  e->newer = NULL;
  e->older = r->newest;
  if (e->older)
    e->older->newer = e;
  else
    r->oldest = e;
  r->newest = e;
}

static void drop(mm_replay *r, entry *e) {
  entry **link = bucket_of(r, &e->key);
  while (*link != e) link = &(*link)->chain;
  *link = e->chain;
  take_out(r, e);
  r->tokens -= e->count;
  free(e);
}

static entry *find(mm_replay *r, const mm_digest *key) {
  entry *e = *bucket_of(r, key);
  while (e && !mm_digest_equal(&e->key, key)) e = e->chain;
  return e;
}

bool mm_replay_add(mm_replay *r, const mm_message *m, const int32_t *id, size_t count, mm_err *err) {
  mm_digest key;
  if (!count || !m->opening || count > r->max_tokens || !key_of(m, &key)) return true;
  entry *e = find(r, &key);
  if (e) drop(r, e);
  while (r->oldest && count > r->max_tokens - r->tokens) drop(r, r->oldest);
  if (!(e = malloc(sizeof *e + count * sizeof *id))) return mm_fail_memory(err, count * sizeof *id);
  *e = (entry){.key = key, .reasoning = reasoning_of(m), .opening = m->opening, .count = count, .chain = *bucket_of(r, &key)};
  memcpy(e->id, id, count * sizeof *id);
  *bucket_of(r, &key) = e;
  put_first(r, e);
  r->tokens += count;
  return true;
}

const int32_t *mm_replay_find(mm_replay *r, const mm_message *m, size_t *count, mm_opening *opening) {
  mm_digest key;
  entry *e = key_of(m, &key) ? find(r, &key) : NULL;
  if (!e) return NULL;
  const mm_digest reasoning = reasoning_of(m);
  if (mm_strip(m->reasoning).n && !mm_digest_equal(&reasoning, &e->reasoning)) return NULL;
  take_out(r, e);
  put_first(r, e);
  *count = e->count;
  *opening = e->opening;
  return e->id;
}
