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

typedef struct id {
  mm_str text;
  size_t place;
} id;

static int by_text(const void *a, const void *b) {
  const id *x = a, *y = b;
  if (x->text.n != y->text.n) return x->text.n < y->text.n ? -1 : 1;
  return x->text.n ? memcmp(x->text.p, y->text.p, x->text.n) : 0;
}

typedef struct result {
  mm_message message;
  size_t call, place;
} result;

static int by_call(const void *a, const void *b) {
  const result *x = a, *y = b;
  if (x->call != y->call) return x->call < y->call ? -1 : 1;
  return x->place < y->place ? -1 : x->place > y->place;
}

/* m[0] calls, m[1 … count] answer. Nothing is moved where it is not certain which call each answers. */
static bool order_results(mm_call *c, mm_message *m, size_t count, mm_err *err) {
  const size_t calls = m->call_count;
  id *ids = mm_arena_alloc(&c->arena, calls * sizeof *ids, err);
  result *r = mm_arena_alloc(&c->arena, count * sizeof *r, err);
  if (!ids || !r) return false;
  for (size_t i = 0; i < calls; i++) ids[i] = (id){m->call[i].id, i};
  qsort(ids, calls, sizeof *ids, by_text);
  for (size_t i = 0; i + 1 < calls; i++)
    if (by_text(&ids[i], &ids[i + 1]) == 0) return true;
  for (size_t i = 0; i < count; i++) {
    const id wanted = {.text = m[1 + i].call_id}, *found = bsearch(&wanted, ids, calls, sizeof *ids, by_text);
    if (!found) return true;
    r[i] = (result){m[1 + i], found->place, i};
  }
  qsort(r, count, sizeof *r, by_call);
  for (size_t i = 0; i < count; i++) m[1 + i] = r[i].message;
  return true;
}

static bool settle_results(mm_call *c, const mm_conversation *v, mm_err *err) {
  mm_message *m = (mm_message *)v->message; /* the arena's */
  for (size_t i = 0, end; i < v->message_count; i = end) {
    end = i + 1;
    if (m[i].role != MM_ROLE_ASSISTANT || m[i].call_count < 2) continue;
    while (end < v->message_count && m[end].role == MM_ROLE_TOOL) end++;
    if (end > i + 2 && !order_results(c, &m[i], end - i - 1, err)) return false;
  }
  return true;
}

bool mm_history_settle(mm_call *c, mm_conversation *v, mm_err *err) {
  const mm_chat_format *format = c->server->format;
  const bool shows_all = format && format->family == MM_CHAT_M1_RELEASED; /* every system message */
  return (shows_all || settle_system(c, v, err)) && settle_results(c, v, err);
}
