/* Planning reads (read_order.h). A file is read by whole units, pages or blocks that have digests, each unit once: with what comes first
 * where any of its bytes do. The rest is cut where parts of wants meet, so that a part can be had without its neighbours; a unit in which
 * two parts meet is a run of its own. Runs that lie side by side and wait for the same turn are taken together. */
#include "loader/stream/read_order.h"

#include <stdlib.h>

enum { WAITING, WANTED, TAKEN };

static int by_place(const void *a, const void *b) {
  const mm_read_want *x = a, *y = b;
  if (x->file != y->file) return x->file < y->file ? -1 : 1;
  return (x->offset > y->offset) - (x->offset < y->offset);
}

/* Wants [first, end) of a file, which is walked through once for each turn. */
typedef struct walk {
  mm_read_order *o;
  const mm_read_list *c;
  uint32_t file;
  uint64_t size, unit;
  size_t end;
  size_t lo, hi;  /* wants that the next run may have bytes of */
  uint64_t done;  /* what lies before is in a run, or is nobody's */
  size_t earlier; /* late runs: of those that come first, the first that does not end before `done` */
  size_t last;    /* and the end of those of this file */
  bool hashed;
} walk;

static uint64_t down(const walk *w, uint64_t at) { return at - at % w->unit; }
static uint64_t up(const walk *w, uint64_t at) { return mm_min(w->size, mm_round_up(at, w->unit)); }

static bool add_run(walk *w, uint64_t from, uint64_t to, mm_err *err) {
  mm_read_order *o = w->o;
  const mm_read_want *want = w->c->want;
  while (from < to) {
    const uint64_t end = mm_min(to, from + o->most);
    if (!MM_GROW(o->run, &o->cap, o->runs + 1, err)) return false;
    while (w->lo < w->end && want[w->lo].offset + want[w->lo].bytes <= from) w->lo++;
    w->hi = mm_max(w->hi, w->lo);
    while (w->hi < w->end && want[w->hi].offset < end) w->hi++;
    o->run[o->runs++] = (mm_read_run){w->file, from, (size_t)(end - from), w->lo, w->hi - w->lo};
    o->sum += end - from;
    if (w->hashed) o->hash += mm_ceil_div(end - from, MM_HASH_BLOCK);
    from = end;
  }
  return true;
}

/* Adds runs for the bytes of [from, to) that are in no run yet; both ends are multiples of the unit. */
static bool add(walk *w, uint64_t from, uint64_t to, mm_err *err) {
  const mm_read_order *o = w->o;
  from = mm_max(from, w->done);
  if (from >= to) return true;
  w->done = to;
  for (; w->earlier < w->last && from < to; w->earlier++) {
    const uint64_t lo = o->run[w->earlier].offset, hi = lo + o->run[w->earlier].bytes;
    if (hi <= from) continue;
    if (lo >= to) break;
    if (lo > from && !add_run(w, from, lo, err)) return false;
    from = hi;
    if (hi > to) break;
  }
  return from >= to || add_run(w, from, to, err);
}

/* Adds each part's own units, and separately the units that it shares with the next part. */
static bool add_parts(walk *w, const mm_read_want *want, mm_err *err) {
  const uint64_t end = want->offset + want->bytes;
  for (uint64_t from = want->offset; from < end; from += want->part) {
    const uint64_t to = mm_min(end, from + want->part);
    const bool inside = up(w, from) <= down(w, to);
    if (inside && !(add(w, down(w, from), up(w, from), err) && add(w, up(w, from), down(w, to), err))) return false;
    if (!add(w, inside ? down(w, to) : down(w, from), up(w, to), err)) return false;
  }
  return true;
}

/* Adds all wants that come first, or (`late`) all others. Runs of the first turn are as long as they can be. */
static bool add_turn(mm_read_order *o, const mm_read_list *c, bool late, mm_err *err) {
  size_t earlier = 0;
  for (size_t first = 0, end; first < c->wants; first = end) {
    const uint32_t file = c->want[first].file;
    const bool hashed = c->file[file].digest;
    for (end = first; end < c->wants && c->want[end].file == file;) end++;
    walk w = {.o = o, .c = c, .file = file, .size = c->size[file], .unit = hashed ? MM_HASH_BLOCK : MM_DIRECT, .hashed = hashed};
    w.end = end, w.lo = w.hi = first;
    while (late && earlier < o->late && o->run[earlier].file < file) earlier++;
    w.earlier = w.last = earlier;
    while (late && w.last < o->late && o->run[w.last].file == file) w.last++;
    uint64_t from = 0, to = 0;
    for (size_t i = first; i < end; i++) {
      const mm_read_want *x = &c->want[i];
      if (x->bytes == 0 || (x->part > 0) != late) continue;
      if (late && !add_parts(&w, x, err)) return false;
      if (late) continue;
      if (down(&w, x->offset) > to) {
        if (!add(&w, from, to, err)) return false;
        from = down(&w, x->offset);
      }
      to = mm_max(to, up(&w, x->offset + x->bytes));
    }
    if (!add(&w, from, to, err)) return false;
  }
  return true;
}

bool mm_read_order_open(mm_read_order *o, const mm_read_list *c, mm_err *err) {
  *o = (mm_read_order){.most = c->chunk};
  mm_sort(c->want, c->wants, sizeof *c->want, by_place);
  bool ok = add_turn(o, c, false, err);
  o->late = o->runs;
  ok = ok && add_turn(o, c, true, err);
  o->left = o->runs;
  return ok && (o->state = mm_calloc(o->runs + 1, sizeof *o->state, err)) && (o->wanted = mm_calloc(o->runs + 1, sizeof *o->wanted, err));
}

void mm_read_order_close(mm_read_order *o) {
  MM_FREE(o->run, o->state, o->wanted);
  *o = (mm_read_order){0};
}

bool mm_read_order_take(mm_read_order *o, mm_read_run *out) {
  while (o->wanted_from < o->wanted_end && o->state[o->wanted[o->wanted_from]] == TAKEN) o->wanted_from++;
  while (o->next < o->runs && o->state[o->next] == TAKEN) o->next++;
  size_t i = o->wanted_from < o->wanted_end ? o->wanted[o->wanted_from] : o->next;
  if (i == o->runs) return false;
  const uint8_t state = o->state[i];
  *out = o->run[i];
  for (out->bytes = 0; i < o->runs && o->state[i] == state; i++) {
    const mm_read_run *r = &o->run[i];
    const bool consecutive = r->file == out->file && r->offset == out->offset + out->bytes;
    if (!consecutive || out->bytes + r->bytes > o->most) break;
    out->bytes += r->bytes;
    out->count = r->first + r->count - out->first;
    o->state[i] = TAKEN;
    o->left--;
  }
  return true;
}

void mm_read_order_prefetch(mm_read_order *o, uint32_t file, uint64_t offset, uint64_t bytes) {
  size_t lo = o->late, hi = o->runs;
  while (lo < hi) { /* the first run that ends behind the offset */
    const size_t mid = lo + (hi - lo) / 2;
    const mm_read_run *r = &o->run[mid];
    const bool before = r->file < file || (r->file == file && r->offset + r->bytes <= offset);
    if (before)
      lo = mid + 1;
    else
      hi = mid;
  }
  for (; lo < o->runs && o->run[lo].file == file && o->run[lo].offset < offset + bytes; lo++) {
    if (o->state[lo] != WAITING) continue;
    o->state[lo] = WANTED;
    o->wanted[o->wanted_end++] = lo;
  }
}
