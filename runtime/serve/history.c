/* Histories as the chat formats take them. */
#include "runtime/serve/history.h"

#include <stdlib.h>
#include <string.h>

/* ---- System messages ---- */

static bool has_text(const mm_message *m) {
  for (size_t i = 0; i < m->part_count; i++)
    if (m->part[i].text.n) return true;
  return false;
}

/* The first one has the texts of the first `count`. */
static bool merge(mm_call *c, mm_message *m, size_t count, mm_err *err) {
  size_t most = count, n = 0;
  for (size_t i = 0; i < count; i++) most += m[i].part_count;
  mm_chat_part *part = mm_arena_alloc(&c->arena, most * sizeof *part, err);
  if (!part) return false;
  for (size_t i = 0; i < count; i++) {
    if (!has_text(&m[i])) continue;
    if (n) part[n++] = (mm_chat_part){.text = {"\n\n", 2}, .owner = MM_OWNER_USER};
    for (size_t k = 0; k < m[i].part_count; k++) part[n++] = m[i].part[k];
  }
  m->part = part;
  m->part_count = n;
  m->list = true;
  return true;
}

static bool settle_system(mm_call *c, mm_conversation *v, mm_err *err) {
  mm_message *m = (mm_message *)v->message; /* the arena's */
  size_t first = 0, count = v->message_count;
  if (count && m->role == MM_ROLE_ROOT) m++, count--;
  while (first < count && m[first].role == MM_ROLE_SYSTEM) first++;
  if (first > 1) {
    if (!merge(c, m, first, err)) return false;
    memmove(m + 1, m + first, (count - first) * sizeof *m);
    v->message_count -= first - 1;
    count -= first - 1;
  }
  for (size_t i = 1; i < count; i++)
    if (m[i].role == MM_ROLE_SYSTEM) m[i].role = MM_ROLE_USER, m[i].as_user = true;
  return true;
}

/* ---- Results ---- */

/* A call that results may answer. */
typedef struct id {
  mm_str text;
  size_t place;
} id;

/* The calls of a message, by their ids. */
typedef struct calls {
  const mm_message *message; /* NULL: there is none */
  id *id;                    /* [message->call_count], sorted; NULL: one of them has no id */
  size_t *first;             /* the first of those with an equal id */
  size_t *taken;             /* at the first of equal ids: how many of them have a result */
} calls;

static int by_text(const void *a, const void *b) {
  const id *x = a, *y = b;
  if (x->text.n != y->text.n) return x->text.n < y->text.n ? -1 : 1;
  return x->text.n ? memcmp(x->text.p, y->text.p, x->text.n) : 0;
}

static int by_text_and_place(const void *a, const void *b) {
  const id *x = a, *y = b;
  const int order = by_text(a, b);
  return order ? order : x->place < y->place ? -1 : x->place > y->place;
}

typedef struct result {
  mm_message message;
  size_t call;
} result;

static int by_call(const void *a, const void *b) {
  const result *x = a, *y = b;
  return x->call < y->call ? -1 : x->call > y->call;
}

static bool open_calls(mm_call *c, const mm_message *m, calls *out, mm_err *err) {
  const size_t n = m->call_count;
  *out = (calls){.message = m};
  for (size_t i = 0; i < n; i++)
    if (!m->call[i].id.n) return true;
  out->id = mm_arena_alloc(&c->arena, n * sizeof *out->id, err);
  out->first = mm_arena_alloc(&c->arena, n * sizeof *out->first, err);
  out->taken = mm_arena_alloc(&c->arena, n * sizeof *out->taken, err);
  if (!out->id || !out->first || !out->taken) return false;
  for (size_t i = 0; i < n; i++) out->id[i] = (id){m->call[i].id, i};
  qsort(out->id, n, sizeof *out->id, by_text_and_place);
  for (size_t i = 0; i < n; i++) {
    out->first[i] = i && by_text(&out->id[i - 1], &out->id[i]) == 0 ? out->first[i - 1] : i;
    out->taken[i] = 0;
  }
  return true;
}

static bool refuse_result(mm_call *c, const mm_message *m, const char *reason) {
  const char *field = c->api->prompt ? c->api->prompt : "messages";
  return mm_refuse(c, 400, field, "%s: the result for the call \"%.*s\" %s", field, (int)mm_min(m->call_id.n, 60), m->call_id.p, reason);
}

/* Gives r[i] the call that the i-th result answers: of calls with equal ids the next. */
static bool find_calls(mm_call *c, const calls *k, const mm_message *m, size_t count, result *r) {
  const size_t n = k->message->call_count;
  for (size_t i = 0; i < count; i++) {
    const id wanted = {.text = m[i].call_id}, *found = bsearch(&wanted, k->id, n, sizeof wanted, by_text);
    if (!found) return refuse_result(c, &m[i], "answers no call of the message before it");
    const size_t first = k->first[found - k->id], next = first + k->taken[first]++;
    if (next == n || k->first[next] != first) return refuse_result(c, &m[i], "comes twice");
    r[i] = (result){m[i], k->id[next].place};
  }
  return true;
}

/* The results m[0 … count). Formats show no ids: behind the calls the i-th result is read as that of the i-th call. Where a call or a
 * result has no id, results stay as they came. */
static bool match_results(mm_call *c, const calls *k, mm_message *m, size_t count, mm_err *err) {
  size_t named = 0;
  for (size_t i = 0; i < count; i++) named += m[i].call_id.n > 0;
  if (named && !k->message) return refuse_result(c, m, "follows no message with calls");
  if (named < count || !k->id) return true;
  result *r = mm_arena_alloc(&c->arena, count * sizeof *r, err);
  if (!r || !find_calls(c, k, m, count, r)) return false;
  if (k->message + 1 != m) return true; /* the user spoke in between */
  qsort(r, count, sizeof *r, by_call);
  for (size_t i = 0; i < count; i++) {
    if (r[i].call > i) return refuse_result(c, &r[i].message, "stands behind a call without a result");
    m[i] = r[i].message;
  }
  return true;
}

static bool settle_results(mm_call *c, const mm_conversation *v, mm_err *err) {
  mm_message *m = (mm_message *)v->message; /* the arena's */
  calls k = {0};
  for (size_t i = 0, end; i < v->message_count; i = end) {
    end = i + 1;
    if (m[i].role == MM_ROLE_ASSISTANT) k = (calls){0};
    if (m[i].role == MM_ROLE_ASSISTANT && m[i].call_count && !open_calls(c, &m[i], &k, err)) return false;
    if (m[i].role != MM_ROLE_TOOL) continue;
    while (end < v->message_count && m[end].role == MM_ROLE_TOOL) end++;
    if (!match_results(c, &k, &m[i], end - i, err)) return false;
  }
  return true;
}

bool mm_history_settle(mm_call *c, mm_conversation *v, mm_err *err) {
  const mm_chat_format *format = c->server->format;
  const bool shows_all = format && format->family == MM_CHAT_M1_RELEASED; /* every system message */
  return (shows_all || settle_system(c, v, err)) && settle_results(c, v, err);
}
