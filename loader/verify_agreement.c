/* Weights that must agree with the manifest and with each other: padding, what several ranks hold, scales over
 * lines of several ranks, rows that are never sampled. */
#include <stdlib.h>
#include <string.h>

#include "formats/system/pool.h"
#include "loader/verify.h"

#define CHUNK (UINT64_C(1) << 20) /* weights unpacked at a time */

static const char *part_file(const mm_shards *s, uint32_t rank) { return s->pack.rank[rank].part[0].file; }

static bool is_open(const mm_shards *s, const mm_pack_tensor *t, uint32_t rank) {
  return mm_pack_holds(&s->pack, t, rank) && s->rank[rank].plane;
}

/* ---- padding ---- */

static bool is_padded(const mm_pack *p, const mm_pack_tensor *t, uint32_t rank) {
  bool padded = false;
  for (unsigned i = 0; i < t->piece_count; i++) {
    mm_own own = mm_pack_own(p, t, i, rank);
    padded = padded || own.rows < t->piece[i].local_rows || own.cols < t->cols;
  }
  return padded;
}

static bool check_padding(const mm_shards *s, uint32_t rank, size_t tensor, mm_err *err) {
  const mm_pack_tensor *t = &s->pack.tensor[tensor];
  mm_packed m = mm_shards_tensor(s, rank, tensor);
  for (unsigned p = 0; is_padded(&s->pack, t, rank) && p < t->plane_count; p++) {
    uint32_t down = mm_cells(m.n, m.cell[p].n), across = mm_cells(m.k, m.cell[p].k);
    size_t size = mm_dtype_size(t->plane[p].dtype);
    for (uint32_t i = 0; i < down; i++)
      for (uint32_t j = 0; j < across; j++) {
        if (mm_pack_covers(&s->pack, t, p, rank, i, j)) continue;
        for (uint64_t e = 0; e < m.lead; e++) {
          const uint8_t *x = (const uint8_t *)m.plane[p] + ((e * down + i) * across + j) * size;
          for (size_t b = 0; b < size; b++)
            if (x[b] != 0)
              return mm_fail(err, MM_INTEGRITY, "E_PADDING", mm_at(part_file(s, rank), t->name),
                             "plane %u, matrix %llu: found a byte that is not zero at row %u, column %u, expected padding", p,
                             (unsigned long long)e, i, j);
        }
      }
  }
  return true;
}

/* ---- copies ---- */

/* Lines of a piece that two ranks hold, along the axis of its cut. */
typedef struct shared {
  const mm_shards *s;
  size_t tensor;
  unsigned piece;
  mm_axis axis;
  uint32_t rank[2], at[2], count; /* first local line on each */
} shared;

/* Rows [row, row + rows) of the piece, of what they share, are equal. */
static bool same_rows(const shared *x, uint32_t lead, uint32_t row, uint32_t rows, float *a, float *b) {
  mm_packed m[2] = {mm_shards_tensor(x->s, x->rank[0], x->tensor), mm_shards_tensor(x->s, x->rank[1], x->tensor)};
  uint32_t first = x->s->pack.tensor[x->tensor].piece[x->piece].local_at, k = m[0].k;
  bool cols = x->axis == MM_AXIS_COLS, same = true;
  mm_unpack(&m[0], lead, first + (cols ? 0 : x->at[0]) + row, rows, a);
  mm_unpack(&m[1], lead, first + (cols ? 0 : x->at[1]) + row, rows, b);
  for (uint32_t i = 0; same && i < rows; i++)
    same = memcmp(a + (size_t)i * k + (cols ? x->at[0] : 0), b + (size_t)i * k + (cols ? x->at[1] : 0),
                  (cols ? x->count : k) * sizeof *a) == 0;
  return same;
}

static bool check_shared(const shared *x, mm_err *err) {
  const mm_pack_tensor *t = &x->s->pack.tensor[x->tensor];
  uint32_t rows = x->axis == MM_AXIS_COLS ? t->piece[x->piece].local_rows : x->count;
  uint32_t unit = (uint32_t)mm_min(rows, mm_max(1, CHUNK / t->cols));
  float *a = mm_calloc((size_t)unit * t->cols, sizeof *a, err), *b = mm_calloc((size_t)unit * t->cols, sizeof *b, err);
  bool ok = a && b;
  for (uint32_t e = 0; ok && e < (t->lead ? t->lead : 1); e++)
    for (uint64_t at = 0; ok && at < rows; at += unit)
      if (!same_rows(x, e, (uint32_t)at, (uint32_t)mm_min(unit, rows - at), a, b))
        ok = mm_fail(err, MM_INTEGRITY, "E_COPIES", mm_at(part_file(x->s, x->rank[1]), t->name),
                     "piece %u, matrix %u, rows from %llu: found other weights than on rank %u, expected the same", x->piece, e,
                     (unsigned long long)at, x->rank[0]);
  free(a);
  free(b);
  return ok;
}

/* Finds the lines of a piece that two ranks share; false if there are none. */
static bool find_shared(shared *x) {
  const mm_piece *piece = &x->s->pack.tensor[x->tensor].piece[x->piece];
  const mm_cut *cut = &x->s->pack.cut[piece->cut];
  mm_range all = {0, 0, piece->local_rows};
  x->axis = cut->axis;
  const mm_range *r[2];
  for (unsigned i = 0; i < 2; i++) r[i] = cut->axis == MM_AXIS_NONE ? &all : &cut->rank[x->rank[i] % x->s->pack.tp];
  uint32_t from = (uint32_t)mm_max(r[0]->from, r[1]->from);
  uint64_t end = mm_min((uint64_t)r[0]->from + r[0]->count, (uint64_t)r[1]->from + r[1]->count);
  if (from >= end) return false;
  x->count = (uint32_t)(end - from);
  for (unsigned i = 0; i < 2; i++) x->at[i] = r[i]->at + (from - r[i]->from);
  return true;
}

/* Compares a rank with the ranks before it that hold some of its lines, up to the first that holds all of them: such ranks are equal among
 * themselves. */
static bool check_copies(const mm_shards *s, uint32_t rank, size_t tensor, mm_err *err) {
  const mm_pack *p = &s->pack;
  const mm_pack_tensor *t = &p->tensor[tensor];
  for (unsigned piece = 0; piece < t->piece_count; piece++) {
    mm_own own = mm_pack_own(p, t, piece, rank);
    for (uint32_t r = t->stage * p->tp; r < rank; r++) {
      shared x = {.s = s, .tensor = tensor, .piece = piece, .rank = {r, rank}};
      if (!is_open(s, t, r) || mm_pack_first_lead(p, t, r) != mm_pack_first_lead(p, t, rank) || !find_shared(&x)) continue;
      if (!check_shared(&x, err)) return false;
      if (x.axis == MM_AXIS_NONE || x.count == (x.axis == MM_AXIS_ROWS ? own.rows : own.cols)) break;
    }
  }
  return true;
}

/* ---- scales over lines of several ranks ---- */

/* A scale whose cell has lines of two ranks: where it stands on each, and how far it goes along the other axis. */
typedef struct split_cell {
  unsigned plane;
  uint32_t at[2], first, end; /* cell along the cut, on each rank; cells along the other axis */
  mm_axis axis;
  uint32_t rank[2];
} split_cell;

/* The cell of this rank's first line, if that is the cell of the last line of a rank before it: the first such rank. */
static bool find_split(const mm_shards *s, const mm_pack_tensor *t, unsigned piece, uint32_t rank, split_cell *x) {
  const mm_pack *p = &s->pack;
  const mm_cut *cut = &p->cut[t->piece[piece].cut];
  if (cut->axis == MM_AXIS_NONE) return false;
  const bool rows = cut->axis == MM_AXIS_ROWS;
  const uint32_t cell = rows ? t->plane[x->plane].cell_n : t->plane[x->plane].cell_k;
  const mm_range *mine = &cut->rank[rank % p->tp];
  for (uint32_t r = t->stage * p->tp; mine->count > 0 && r < rank; r++) {
    const mm_range *other = &cut->rank[r % p->tp];
    if (!is_open(s, t, r) || mm_pack_first_lead(p, t, r) != mm_pack_first_lead(p, t, rank) || other->count == 0) continue;
    if (cell != 0 && (other->from + other->count - 1) / cell != mine->from / cell) continue;
    const uint32_t base = rows ? t->piece[piece].local_at : 0;
    x->axis = cut->axis;
    x->rank[0] = r, x->rank[1] = rank;
    x->at[0] = cell ? (base + other->at + other->count - 1) / cell : 0;
    x->at[1] = cell ? (base + mine->at) / cell : 0;
    const uint32_t across = rows ? t->plane[x->plane].cell_k : t->plane[x->plane].cell_n;
    const uint32_t from = rows ? 0 : t->piece[piece].local_at, count = rows ? t->cols : t->piece[piece].local_rows;
    x->first = across ? from / across : 0;
    x->end = across ? (from + count - 1) / across + 1 : 1;
    return true;
  }
  return false;
}

static bool same_scales(const mm_shards *s, size_t tensor, unsigned piece, const split_cell *x, mm_err *err) {
  const mm_pack_tensor *t = &s->pack.tensor[tensor];
  const mm_packed m[2] = {mm_shards_tensor(s, x->rank[0], tensor), mm_shards_tensor(s, x->rank[1], tensor)};
  const uint64_t down = mm_cells(t->rows, t->plane[x->plane].cell_n), across = mm_cells(t->cols, t->plane[x->plane].cell_k);
  const size_t size = mm_dtype_size(t->plane[x->plane].dtype);
  for (uint64_t e = 0; e < m[0].lead; e++)
    for (uint32_t i = x->first; i < x->end; i++) {
      const uint8_t *v[2];
      for (unsigned k = 0; k < 2; k++) {
        const uint64_t row = x->axis == MM_AXIS_ROWS ? x->at[k] : i, col = x->axis == MM_AXIS_ROWS ? i : x->at[k];
        v[k] = (const uint8_t *)m[k].plane[x->plane] + ((e * down + row) * across + col) * size;
      }
      if (memcmp(v[0], v[1], size) != 0)
        return mm_fail(
            err, MM_INTEGRITY, "E_COPIES", mm_at(part_file(s, x->rank[1]), t->name),
            "plane %u, piece %u, matrix %llu, %s %u: found another scale than on rank %u, expected the same: its cell has lines of "
            "both",
            x->plane, piece, (unsigned long long)e, x->axis == MM_AXIS_ROWS ? "column of cells" : "row of cells", i, x->rank[0]);
    }
  return true;
}

static bool check_split_cells(const mm_shards *s, uint32_t rank, size_t tensor, mm_err *err) {
  const mm_pack_tensor *t = &s->pack.tensor[tensor];
  const mm_scheme *scheme = mm_scheme_find(t->scheme);
  for (unsigned plane = 0; plane < t->plane_count; plane++)
    for (unsigned piece = 0; scheme->plane[plane].scale && piece < t->piece_count; piece++) {
      split_cell x = {.plane = plane};
      if (find_split(s, t, piece, rank, &x) && !same_scales(s, tensor, piece, &x, err)) return false;
    }
  return true;
}

/* ---- rows that are never sampled ---- */

static bool is_listed(const mm_pack *p, uint32_t id) {
  size_t lo = 0, hi = p->dead_rows;
  while (lo < hi) {
    size_t mid = lo + (hi - lo) / 2;
    if (p->dead_row[mid] < id)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo < p->dead_rows && p->dead_row[lo] == id;
}

static bool check_dead_rows(const mm_shards *s, uint32_t rank, size_t tensor, mm_err *err) {
  const mm_pack_tensor *t = &s->pack.tensor[tensor];
  if (strcmp(t->name, "lm_head.weight") != 0) return true;
  const mm_cut *cut = &s->pack.cut[t->piece[0].cut];
  mm_own own = mm_pack_own(&s->pack, t, 0, rank);
  mm_packed m = mm_shards_tensor(s, rank, tensor);
  float *row = mm_calloc(m.k, sizeof *row, err);
  bool ok = row != NULL;
  for (uint32_t i = 0; ok && i < own.rows; i++) {
    uint32_t id = (cut->axis == MM_AXIS_ROWS ? cut->rank[rank % s->pack.tp].from : 0) + i, k = 0;
    mm_unpack(&m, 0, own.row + i, 1, row);
    while (k < m.k && row[k] == 0) k++;
    if ((k == m.k) != is_listed(&s->pack, id))
      ok = mm_fail(err, MM_INTEGRITY, "E_DEAD_ROWS", mm_at(part_file(s, rank), t->name),
                   k == m.k ? "found row %u all zero, expected it in dead_rows" : "found row %u in dead_rows, expected it all zero", id);
  }
  free(row);
  return ok;
}

static bool check_agreement(void *ctx, size_t item, unsigned worker, mm_err *err) {
  (void)worker;
  const mm_shards *s = ctx;
  uint32_t rank = (uint32_t)(item / s->pack.tensor_count);
  size_t tensor = item % s->pack.tensor_count;
  mm_pool_at(s->pack.tensor[tensor].name);
  return !is_open(s, &s->pack.tensor[tensor], rank) || (check_padding(s, rank, tensor, err) && check_copies(s, rank, tensor, err) &&
                                                        check_split_cells(s, rank, tensor, err) && check_dead_rows(s, rank, tensor, err));
}

bool mm_verify_agreement(const mm_shards *s, unsigned threads, mm_err *err) {
  return mm_pool_run(threads, s->pack.tensor_count * mm_pack_ranks(&s->pack), check_agreement, (void *)s, err);
}
