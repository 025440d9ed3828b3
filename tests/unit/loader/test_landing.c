/* Plans of landings: random weights of every scheme, in a file and in memory, read through rings of any size and put down by the plan, byte
 * for byte as the layout says; places are disjoint and aligned, holes are the bytes between them; a group has arrived with its last byte
 * and not before, and early once it was prefetched, where it is split by matrix. The expected bytes are computed here from the planes
 * alone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "loader/stream/landing.h"
#include "tests/unit/unit.h"

#define WEIGHTS 30
#define GROUPS  5
#define LEADS   3
#define ALL     (GROUPS + LEADS * WEIGHTS) /* groups: split by matrix, from GROUPS on */
#define BYTES   (UINT64_C(14) << 20)       /* of the file */

static uint64_t seed = 7;
static uint64_t draw(uint64_t below) {
  if (below == 0) abort();
  seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (seed >> 20) % below;
}

typedef struct item {
  mm_packed w;
  mm_landing_layout y;
  mm_landing_places at;
  mm_landing_groups groups;
  bool values, lands;
} item;

typedef struct fixture {
  char path[300];
  uint8_t *bytes; /* of the file; [BYTES] */
  uint64_t used;
  mm_file file;
  mm_map map;
  item item[WEIGHTS];
  mm_landing_plan plan;
  uint8_t *want, *got; /* [plan.bytes] the arena */
} fixture;

/* ---- weights ---- */

/* Room in the file for a plane: as close as its type allows, or with a gap. */
static uint64_t lay(fixture *x, uint64_t bytes, size_t element) {
  const uint64_t at = mm_round_up(x->used + draw(3) * draw(3000), element);
  assert_true(at + bytes <= BYTES);
  x->used = at + bytes;
  return at;
}

static mm_landing_layout layout_of(const mm_packed *w) {
  const mm_scheme *s = w->scheme;
  mm_landing_layout y = {.bits = s->plane[0].cell.k == 2 ? 4 : (uint32_t)(8 * mm_dtype_size(s->plane[0].dtype))};
  y.pitch = mm_round_up((uint64_t)w->k * y.bits / 8, draw(2) ? 16 : 4);
  if (s->plane_count == 1) return y;
  y.byte_scales =
      s->plane[1].dtype != MM_F32 && s->plane[1].dtype != MM_BF16 && s->plane[1].dtype != MM_F16 && (s->plane[1].dtype != MM_U8 || draw(2));
  y.scale_pitch = mm_round_up(mm_cells(w->k, w->cell[1].k), y.byte_scales ? 16 : 1);
  y.scales = (uint64_t)w->lead * mm_cells(w->n, w->cell[1].n) * y.scale_pitch;
  y.global = s->plane_count == 3, y.global_factor = 256;
  return y;
}

static void make_item(fixture *x, item *t, bool in_file) {
  size_t schemes = 0;
  while (mm_scheme_at(schemes)) schemes++;
  mm_packed *w = &t->w;
  const bool small = draw(3) == 0;
  *t = (item){.groups = {(uint32_t)draw(GROUPS), draw(2), (uint32_t)(GROUPS + LEADS * (t - x->item))}, .values = small};
  do w->scheme = mm_scheme_at(draw(schemes));
  while (w->scheme->plane_count > 3 || mm_has_zeros(w->scheme) ||
         (w->scheme->plane_count == 1 && !small && w->scheme->plane[0].dtype != MM_BF16));
  w->lead = 1 + (uint32_t)draw(LEADS), w->n = 1 + (uint32_t)draw(small ? 60 : 400), w->k = 8 * (1 + (uint32_t)draw(small ? 4 : 60));
  for (unsigned p = 0; p < w->scheme->plane_count; p++) {
    w->cell[p] = w->scheme->plane[p].cell;
    const size_t size = mm_dtype_size(w->scheme->plane[p].dtype);
    const uint64_t bytes = w->lead * mm_plane_elements(w->n, w->k, w->cell[p]) * size;
    const uint64_t at = lay(x, bytes, size);
    w->plane[p] = (in_file ? x->map.data : x->bytes) + at;
  }
  t->y = layout_of(w);
}

/* Floats are small and finite, so that widening them has one answer. */
static void fill(fixture *x) {
  for (uint64_t i = 0; i < BYTES; i++) x->bytes[i] = (uint8_t)(draw(256) & (i % 2 ? 0xbf : 0xff));
  for (uint64_t i = 0; i + 4 <= BYTES; i += 4) x->bytes[i + 3] &= 0xbf;
}

static void open_group(fixture *x, bool in_file) {
  mm_err err = {0};
  const char *tmp = getenv("TMPDIR");
  snprintf(x->path, sizeof x->path, "%s/landing.XXXXXX", tmp ? tmp : "/tmp");
  const int fd = mkstemp(x->path);
  assert_true(fd >= 0);
  x->bytes = malloc(BYTES);
  fill(x);
  assert_int_equal(write(fd, x->bytes, BYTES), BYTES);
  close(fd);
  assert_true(mm_file_open(&x->file, x->path, &err) && mm_map_open(&x->map, &x->file, x->path, &err));
  for (int i = 0; i < WEIGHTS; i++) make_item(x, &x->item[i], in_file);
}

static void close_group(fixture *x) {
  mm_landing_close(&x->plan);
  mm_map_close(&x->map);
  mm_file_close(&x->file);
  unlink(x->path);
  MM_FREE(x->bytes, x->want, x->got);
}

/* ---- what must become of them, from the planes alone ---- */

/* For the device's order of nibbles: a word goes through it once and whole, or it is another. */
static uint32_t turned(uint32_t w) { return (w ^ 0x88888888u) * 2654435761u + 1; }

static void turn(uint8_t *codes, uint64_t word, uint64_t words) {
  for (uint64_t i = word; i < word + words; i++) {
    uint32_t w;
    memcpy(&w, codes + 4 * i, 4);
    w = turned(w);
    memcpy(codes + 4 * i, &w, 4);
  }
}

static void put_rows(uint8_t *to, uint64_t pitch, const void *from, uint64_t row, uint64_t rows) {
  memset(to, 0, rows * pitch);
  for (uint64_t i = 0; i < rows; i++) memcpy(to + i * pitch, (const uint8_t *)from + i * row, row);
}

static float number(mm_dtype t, const void *plane, uint64_t i) {
  uint16_t h;
  if (t != MM_F16) return mm_scale_value(t, plane, i);
  memcpy(&h, (const uint8_t *)plane + 2 * i, 2);
  const int e = h >> 10 & 31, m = h & 1023;
  float v = (float)(e ? 1024 + m : m);
  for (int k = e ? e : 1; k < 25; k++) v *= 0.5f;
  for (int k = 25; k < e; k++) v *= 2.0f;
  return h & 0x8000 ? -v : v;
}

static void put_numbers(uint8_t *to, mm_dtype t, const void *plane, uint64_t n, float factor) {
  for (uint64_t i = 0; i < n; i++) {
    const float v = number(t, plane, i) * factor;
    memcpy(to + 4 * i, &v, 4);
  }
}

static void expect_item(fixture *x, const item *t) {
  const mm_packed *w = &t->w;
  const mm_scheme *s = w->scheme;
  const uint64_t rows = (uint64_t)w->lead * w->n, row = (uint64_t)w->k * t->y.bits / 8;
  if (t->values) {
    if (t->lands) put_numbers(x->want + t->at.data, s->plane[0].dtype, w->plane[0], rows * w->k, 1);
    return;
  }
  put_rows(x->want + t->at.data, t->y.pitch, w->plane[0], row, rows);
  if (t->y.bits == 4) turn(x->want + t->at.data, 0, rows * t->y.pitch / 4);
  if (t->y.scales && t->y.byte_scales)
    put_rows(x->want + t->at.scale, t->y.scale_pitch, w->plane[1], mm_cells(w->k, w->cell[1].k), rows);
  else if (t->y.scales)
    put_numbers(x->want + t->at.scale, s->plane[1].dtype, w->plane[1], t->y.scales, 1);
  if (t->y.global) put_numbers(x->want + t->at.global, MM_F32, w->plane[2], w->lead, t->y.global_factor);
}

/* ---- carrying the plan out ---- */

static void land(const mm_landing *l, uint8_t *arena, const uint8_t *from, uint64_t first, uint64_t n) {
  uint8_t *to = arena + l->at;
  const size_t size = mm_dtype_size(l->from);
  switch (l->how) {
    case MM_LAND_AS_IS: memcpy(to + first, from, n); break;
    case MM_LAND_NOWHERE: break;
    case MM_LAND_SPREAD:
      for (uint64_t i = 0; i < n; i++) to[(first + i) / l->row * l->pitch + (first + i) % l->row] = from[i];
      break;
    case MM_LAND_WIDEN:
      assert_true(first % size == 0 && n % size == 0);
      put_numbers(to + first / size * 4, l->from, from, n / size, l->factor);
      break;
  }
}

/* Bytes that each group waits for; what arrives of one is taken off, and *full counts those that have all. */
typedef struct waiting {
  uint64_t left[ALL];
  size_t full;
} waiting;

static void expect_all(const mm_landing_plan *p, waiting *v) {
  *v = (waiting){.full = 0};
  for (size_t i = 0; i < p->landings; i++) {
    const mm_landing *l = &p->landing[i];
    for (uint64_t k = 0; l->part && k * l->part < l->bytes; k++) v->left[l->group + k] += l->part;
    if (l->part == 0) v->left[l->group] += l->bytes;
  }
}

static void take_off(const mm_landing_plan *p, waiting *v, const mm_landing_piece *t) {
  const mm_landing *l = &p->landing[t->landing];
  const uint64_t part = l->part ? l->part : l->bytes, end = t->first + t->bytes;
  for (uint64_t k = 0; k * part < end; k++) {
    const uint64_t from = mm_max(t->first, k * part), to = mm_min(end, (k + 1) * part), group = l->group + k;
    if (from >= to || (v->left[group] -= to - from) > 0) continue;
    assert_true(v->full < p->fulls);
    assert_int_equal(p->full[v->full], group);
    v->full++;
  }
  assert_int_equal(v->full, p->fulls);
}

/* A group that is split by matrix, or ALL. */
static uint32_t want_some(const fixture *x, mm_reader *r, const waiting *v) {
  const item *t = &x->item[draw(WEIGHTS)];
  const uint32_t group = t->groups.each + (uint32_t)draw(t->w.lead);
  if (v->left[group] == 0) return ALL;
  mm_landing_prefetch(&x->plan, r, group, 1);
  return group;
}

static void carry_out(fixture *x) {
  mm_landing_plan *p = &x->plan;
  mm_err err = {0};
  const size_t piece = (size_t)MM_DIRECT << draw(4), chunk = piece * (1 + draw(3));
  const uint32_t buffers = (uint32_t)(2 + draw(4));
  uint8_t *ring = aligned_alloc(MM_DIRECT, buffers * chunk);
  uint64_t seen = 0, timeout = 0; /* chunks that what was asked for may take */
  uint32_t wanted = ALL;
  waiting v;
  expect_all(p, &v);
  const mm_reader_config c = {p->file, p->files, p->want, p->landings, ring, buffers, chunk, piece, 2, MM_READ_PROBE, NULL};
  mm_reader *r = mm_reader_open(&c, &err);
  if (!r) fail_msg("%s", err.text);
  memset(x->got, 0xEE, p->bytes);
  for (size_t i = 0; i < p->holes; i++) memset(x->got + p->hole[i].at, 0, p->hole[i].bytes);
  for (mm_chunk k; mm_reader_next(r, &k, &err) && k.data; mm_reader_release(r)) {
    for (size_t i = k.first; i < k.first + k.count; i++) {
      mm_landing_piece t;
      uint64_t word, words;
      if (!mm_landing_find(p, &k, i, &t)) continue;
      const mm_landing *l = &p->landing[t.landing];
      land(l, x->got, k.data + t.from, t.first, t.bytes);
      mm_landing_arrive(p, &t, &word, &words);
      if (words) turn(x->got + l->at, word, words);
      take_off(p, &v, &t);
      seen += t.bytes;
    }
    uint64_t firsts = 0; /* a page that comes first may have bytes of what was asked for */
    for (uint32_t g = 0; g < GROUPS; g++) firsts += v.left[g];
    if (wanted < ALL && v.left[wanted] > 0 && firsts == 0) assert_true(timeout-- > 0);
    if (wanted == ALL || v.left[wanted] == 0) {
      wanted = want_some(x, r, &v);
      timeout = wanted < ALL ? buffers + 4 + v.left[wanted] / (chunk > 2 * MM_DIRECT ? chunk - 2 * MM_DIRECT : MM_DIRECT) * 2 : 0;
    }
  }
  if (err.status != MM_OK) fail_msg("%s", err.text);
  assert_int_equal(seen, p->file_bytes);
  mm_reader_close(r);
  free(ring);
}

/* ---- tests ---- */

static void make_plan(fixture *x) {
  mm_err err = {0};
  mm_landing_plan *p = &x->plan;
  for (int i = 0; i < WEIGHTS; i++) {
    item *t = &x->item[i];
    const bool ok = t->values ? mm_landing_values(p, &t->w, "v", t->groups.group, &t->at.data, &t->lands, &err)
                              : mm_landing_matrix(p, &t->w, "m", &t->y, t->groups, &t->at, &err);
    if (!ok) fail_msg("%s", err.text);
  }
  x->want = calloc(p->bytes, 1);
  x->got = malloc(p->bytes);
  assert_true(x->want && x->got);
}

/* One byte of each landing's extent and of each hole, and nothing twice: every byte of the arena is one or the other. Values that somebody
 * else puts are neither. */
static void check_cover(const fixture *x) {
  const mm_landing_plan *p = &x->plan;
  uint8_t *cover = calloc(p->bytes, 1);
  for (size_t i = 0; i < p->holes; i++)
    for (uint64_t k = 0; k < p->hole[i].bytes; k++) cover[p->hole[i].at + k]++;
  for (size_t i = 0; i < p->landings; i++) {
    const mm_landing *l = &p->landing[i];
    assert_int_equal(l->at % MM_LANDING_ALIGN, 0);
    if (l->how == MM_LAND_SPREAD || l->how == MM_LAND_NOWHERE) continue; /* a hole before, or nobody's */
    const uint64_t n = l->how == MM_LAND_WIDEN ? l->bytes / mm_dtype_size(l->from) * 4 : l->bytes;
    for (uint64_t k = 0; k < n; k++) cover[l->at + k]++;
    for (uint64_t k = n; k < n + MM_LANDING_ALIGN; k++) assert_int_equal(cover[l->at + k], 1);
  }
  for (int i = 0; i < WEIGHTS; i++) {
    const item *t = &x->item[i];
    for (uint64_t k = 0; t->values && !t->lands && k < (uint64_t)t->w.lead * t->w.n * t->w.k * 4; k++) cover[t->at.data + k]++;
  }
  for (uint64_t i = 0; i < p->bytes; i++) assert_int_equal(cover[i], 1);
  free(cover);
}

TEST(all_lands) {
  for (int i = 0; i < 40; i++) {
    fixture x = {.file = MM_FILE_NONE};
    open_group(&x, i % 4 > 0);
    make_plan(&x);
    check_cover(&x);
    carry_out(&x);
    for (int k = 0; k < WEIGHTS; k++) expect_item(&x, &x.item[k]);
    for (int k = 0; k < WEIGHTS; k++) {
      const item *t = &x.item[k];
      if (t->values && !t->lands) memset(x.got + t->at.data, 0, (uint64_t)t->w.lead * t->w.n * t->w.k * 4);
    }
    assert_memory_equal(x.got, x.want, x.plan.bytes);
    close_group(&x);
  }
}

/* Groups split by matrix: codes of whole words; four-bit ones where they begin at a word in the file and lie close. */
TEST(split_by_matrix) {
  fixture x = {.file = MM_FILE_NONE};
  mm_err err = {0};
  open_group(&x, true);
  for (int what = 0; what < 5; what++) { /* bf16; four bits; at an odd place; rows with gaps, of four bits and of bf16 */
    const mm_scheme *s = mm_scheme_find(what == 0 || what == 4 ? "bf16" : "w4a16");
    const mm_landing_layout y = {.bits = s->plane[0].cell.k == 2 ? 4 : 16,
                                 .pitch = (s->plane[0].cell.k == 2 ? 600u : 2400u) + (what > 2 ? 16u : 0)};
    mm_packed w = {.scheme = s, .lead = 7, .n = 3, .k = 1200, .plane = {x.map.data + 8192 + (what == 2)}};
    w.cell[0] = s->plane[0].cell;
    mm_landing_plan p = {0};
    mm_landing_places at;
    assert_true(mm_landing_matrix(&p, &w, "w", &y, (mm_landing_groups){1, true, 5}, &at, &err));
    const bool by_matrix = what < 2 || what == 4;
    assert_int_equal(p.groups, by_matrix ? 12 : 2);
    assert_int_equal(p.want[0].part, by_matrix ? p.landing[0].bytes / 7 : 0);
    for (uint32_t g = 0; g < p.groups; g++)
      assert_int_equal(p.left[g], by_matrix ? (g >= 5 ? p.want[0].part : 0) : g == 1 ? p.file_bytes : 0);
    mm_landing_close(&p);
  }
  close_group(&x);
}

int main(void) { return run_unit_tests(NULL, NULL); }
