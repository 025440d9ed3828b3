/* The order of reads, with random wants of files with and without digests, against a table of all pages and blocks: each that is wanted is
 * taken once and no other; what comes first comes first, else it goes by file and offset; a part that is asked for comes next, whole and
 * alone, whatever of it was taken before. */
#include <stdlib.h>
#include <string.h>

#include "loader/stream/read_order.h"
#include "tests/unit/unit.h"

enum { FILES = 4, WANTS = 60, UNITS = 4000 };

static uint64_t seed = 11;
static uint64_t draw(uint64_t below) {
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (seed >> 20) % below;
}

enum { NOBODYS, LATE, FIRST };

typedef struct fixture {
  mm_read_file file[FILES];
  uint64_t size[FILES], unit[FILES];
  mm_read_want want[WANTS];
  mm_read_list c;
  mm_read_order o;
  uint8_t kind[FILES][UNITS], taken[FILES][UNITS];
} fixture;

static uint64_t end_of(const mm_read_want *w) { return w->offset + w->bytes; }

static void open_group(fixture *x) {
  static const mm_digest digest[1];
  mm_err err = {0};
  memset(x, 0, sizeof *x);
  for (int f = 0; f < FILES; f++) {
    x->unit[f] = draw(2) ? MM_DIRECT : MM_HASH_BLOCK;
    x->file[f].digest = x->unit[f] == MM_HASH_BLOCK ? digest : NULL;
    x->size[f] = x->unit[f] * draw(x->unit[f] == MM_DIRECT ? UNITS - 1 : 40) + 1 + draw(x->unit[f]);
  }
  for (int i = 0; i < WANTS; i++) {
    mm_read_want *w = &x->want[i];
    w->file = (uint32_t)draw(FILES), w->tag = (uint64_t)i;
    w->offset = draw(x->size[w->file]);
    w->bytes = draw(mm_min(x->size[w->file] - w->offset, x->unit[w->file] * (1 + draw(30))) + 1);
    if (draw(2)) w->offset -= w->offset % MM_DIRECT, w->bytes -= w->bytes % MM_DIRECT;
    bool disjoint = w->bytes && draw(2); /* from all others in parts, as tensors are */
    for (int k = 0; k < i; k++)
      disjoint =
          disjoint && !(x->want[k].part && x->want[k].file == w->file && x->want[k].offset < end_of(w) && end_of(&x->want[k]) > w->offset);
    if (disjoint) w->part = draw(3) ? 1 + draw(w->bytes) : w->bytes / (1 + draw(9)) + 1;
    for (uint64_t u = w->offset / x->unit[w->file]; w->bytes && u * x->unit[w->file] < end_of(w); u++) {
      uint8_t *k = &x->kind[w->file][u];
      if (*k < (w->part ? LATE : FIRST)) *k = w->part ? LATE : FIRST;
    }
  }
  x->c = (mm_read_list){x->file, x->size, x->want, WANTS, MM_HASH_BLOCK * (1 + draw(3))};
  assert_true(mm_read_order_open(&x->o, &x->c, &err));
}

/* The next read is right; counts its units that are of a want's bytes [from, to). */
static bool take(fixture *x, mm_read_run *r, const mm_read_want *w, uint64_t from, uint64_t to, uint64_t *units) {
  if (!mm_read_order_take(&x->o, r)) return false;
  const uint64_t unit = x->unit[r->file];
  assert_true(r->bytes > 0 && r->bytes <= x->c.chunk && r->offset % unit == 0);
  assert_true(r->offset + r->bytes <= x->size[r->file] && ((r->offset + r->bytes) % unit == 0 || r->offset + r->bytes == x->size[r->file]));
  for (uint64_t at = r->offset; at < r->offset + r->bytes; at += unit) {
    assert_true(x->kind[r->file][at / unit] != NOBODYS && !x->taken[r->file][at / unit]);
    x->taken[r->file][at / unit] = 1;
    *units += w && w->file == r->file && at < to && at + unit > from;
  }
  for (size_t i = 0; i < WANTS; i++) {
    const mm_read_want *v = &x->want[i];
    const bool inside = v->bytes && v->file == r->file && v->offset < r->offset + r->bytes && end_of(v) > r->offset;
    if (inside) assert_true(i >= r->first && i < r->first + r->count);
    if (i >= r->first && i < r->first + r->count) assert_int_equal(v->file, r->file);
  }
  return true;
}

static void check_all_taken(const fixture *x) {
  for (int f = 0; f < FILES; f++)
    for (int u = 0; u < UNITS; u++) assert_int_equal(x->taken[f][u], x->kind[f][u] != NOBODYS);
  assert_int_equal(x->o.left, 0);
}

TEST(in_order) {
  static fixture x;
  for (int i = 0; i < 200; i++) {
    open_group(&x);
    mm_read_run r, before = {0};
    uint8_t kind_before = FIRST;
    uint64_t sum = 0, hash = 0, none = 0;
    for (bool any = false; take(&x, &r, NULL, 0, 0, &none); any = true, before = r) {
      const uint8_t kind = x.kind[r.file][r.offset / x.unit[r.file]], last = x.kind[r.file][(r.offset + r.bytes - 1) / x.unit[r.file]];
      assert_true(kind <= kind_before && last <= kind);
      if (any && kind == kind_before)
        assert_true(r.file > before.file || (r.file == before.file && r.offset >= before.offset + before.bytes));
      kind_before = last;
      sum += r.bytes, hash += x.file[r.file].digest ? mm_ceil_div(r.bytes, MM_HASH_BLOCK) : 0;
    }
    check_all_taken(&x);
    assert_int_equal(sum, x.o.sum);
    assert_int_equal(hash, x.o.hash);
    mm_read_order_close(&x.o);
  }
}

/* Units of [from, to) that were not taken and do not come first. */
static uint64_t to_come(const fixture *x, uint32_t file, uint64_t from, uint64_t to) {
  uint64_t n = 0;
  for (uint64_t u = from / x->unit[file]; u * x->unit[file] < to; u++) n += x->kind[file][u] == LATE && !x->taken[file][u];
  return n;
}

TEST(as_wanted) {
  static fixture x;
  uint64_t parts = 0, alone = 0;
  for (int i = 0; i < 300; i++) {
    open_group(&x);
    mm_read_run r;
    for (bool more = true; more;) {
      uint64_t none = 0;
      for (uint64_t n = draw(6); more && n > 0; n--) more = take(&x, &r, NULL, 0, 0, &none);
      const mm_read_want *w[3] = {0};
      uint64_t from[3], to[3];
      for (int k = 0; k < 3; k++) {
        w[k] = &x.want[draw(WANTS)];
        if (!w[k]->part || !w[k]->bytes) continue;
        from[k] = w[k]->offset + draw(mm_ceil_div(w[k]->bytes, w[k]->part)) * w[k]->part;
        to[k] = mm_min(end_of(w[k]), from[k] + w[k]->part);
        mm_read_order_prefetch(&x.o, w[k]->file, from[k], to[k] - from[k]);
        if (draw(2)) mm_read_order_prefetch(&x.o, w[k]->file, from[k], to[k] - from[k]); /* twice is once */
      }
      for (int k = 0; k < 3; k++) { /* in the order of asking; what lies side by side may come along */
        if (!w[k]->part || !w[k]->bytes) continue;
        while (to_come(&x, w[k]->file, from[k], to[k])) {
          uint64_t units = 0;
          assert_true(take(&x, &r, w[k], from[k], to[k], &units));
          assert_true(units > 0);
          uint64_t wanted = 0;
          for (int j = k; j < 3; j++)
            for (uint64_t at = r.offset; w[j]->part && w[j]->bytes && w[j]->file == r.file && at < r.offset + r.bytes; at += x.unit[r.file])
              wanted += at < to[j] && at + x.unit[r.file] > from[j];
          assert_true(wanted >= mm_ceil_div(r.bytes, x.unit[r.file])); /* nothing that nobody asked for */
          parts++, alone += units == mm_ceil_div(r.bytes, x.unit[r.file]);
        }
      }
    }
    check_all_taken(&x);
    mm_read_order_close(&x.o);
  }
  assert_true(parts > 1000 && alone > 500);
}

/* As long as a rank of M2: parts of 62 layers are found at once, and what is kept for them is small. */
TEST(large) {
  enum { LAYERS = 62, EXPERTS = 256 };
  const uint64_t part = 2 * 192 * 3072;
  mm_read_file file[LAYERS] = {{0}};
  mm_read_want want[2 * LAYERS];
  uint64_t size[LAYERS], sum = 0;
  mm_err err = {0};
  for (uint32_t l = 0; l < LAYERS; l++) {
    want[2 * l] = (mm_read_want){.file = l, .offset = 8192, .bytes = 5000000, .tag = 2 * l};
    want[2 * l + 1] = (mm_read_want){l, 5009408, EXPERTS * part, 2 * l + 1, part};
    size[l] = 5009408 + EXPERTS * part;
  }
  const mm_read_list c = {file, size, want, 2 * LAYERS, 8 << 20};
  mm_read_order o;
  assert_true(mm_read_order_open(&o, &c, &err));
  assert_true(o.runs < 2 * LAYERS * EXPERTS);
  mm_read_run r;
  for (uint32_t l = 0; l < LAYERS; l++) {
    for (uint32_t e = 7; e < EXPERTS; e += 32) mm_read_order_prefetch(&o, l, 5009408 + e * part, part);
    for (uint32_t e = 7; e < EXPERTS; e += 32) {
      assert_true(mm_read_order_take(&o, &r));
      assert_int_equal(r.file, l);
      assert_int_equal(r.offset, 5009408 + e * part);
      assert_int_equal(r.bytes, part);
      sum += r.bytes;
    }
  }
  while (mm_read_order_take(&o, &r)) sum += r.bytes;
  assert_int_equal(sum, o.sum);
  mm_read_order_close(&o);
}

int main(void) { return run_unit_tests(NULL, NULL); }
