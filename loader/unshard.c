/* Finding which rank holds which lines of a source matrix, and copying them. */
#include "loader/unshard.h"

#include <stdlib.h>
#include <string.h>

#define EXPERT "{e}"

static const mm_pack_tensor *tensor_of(const mm_whole *w) { return &w->s->pack.tensor[w->tensor]; }
static const mm_piece *piece_of(const mm_whole *w) { return &tensor_of(w)->piece[w->piece]; }
static const mm_cut *cut_of(const mm_whole *w) { return &w->s->pack.cut[piece_of(w)->cut]; }

uint32_t mm_whole_rows(const mm_whole *w) { return piece_of(w)->rows; }
uint32_t mm_whole_cols(const mm_whole *w) { return tensor_of(w)->whole_cols; }

/* True if `name` is the pattern with a number below `count` for its "{e}". */
static bool matches(const char *pattern, const char *name, uint32_t count, uint32_t *expert) {
  const char *gap = strstr(pattern, EXPERT);
  *expert = 0;
  if (!gap || count == 0) return strcmp(pattern, name) == 0;
  size_t before = (size_t)(gap - pattern), digits;
  if (strncmp(pattern, name, before) != 0) return false;
  digits = strspn(name + before, "0123456789");
  if (digits == 0 || digits > 9 || (digits > 1 && name[before] == '0')) return false;
  *expert = (uint32_t)strtoul(name + before, NULL, 10);
  return *expert < count && strcmp(gap + strlen(EXPERT), name + before + digits) == 0;
}

bool mm_whole_find(const mm_shards *s, const char *source, mm_whole *out) {
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &s->pack.tensor[i];
    uint32_t expert;
    for (unsigned p = 0; p < t->piece_count; p++)
      if (matches(t->piece[p].source, source, t->whole_lead, &expert)) {
        *out = (mm_whole){s, i, p, expert};
        return true;
      }
  }
  return false;
}

char *mm_whole_name(const mm_whole *w, char *out, size_t cap) {
  const char *pattern = piece_of(w)->source, *gap = tensor_of(w)->whole_lead ? strstr(pattern, EXPERT) : NULL;
  if (gap)
    snprintf(out, cap, "%.*s%u%s", (int)(gap - pattern), pattern, w->expert, gap + strlen(EXPERT));
  else
    snprintf(out, cap, "%s", pattern);
  return out;
}

/* Where lines of the matrix lie: local lines [at, at + count) of a rank are lines [from, from + count), along the axis of the cut. */
typedef struct mm_holder {
  uint32_t rank;
  mm_range range;
} mm_holder;

/* The open rank that holds line `line` along the cut's axis. */
static bool find_holder(const mm_whole *w, uint32_t line, mm_holder *out, mm_err *err) {
  const mm_pack *p = &w->s->pack;
  const mm_pack_tensor *t = tensor_of(w);
  const mm_cut *cut = cut_of(w);
  uint32_t absent = UINT32_MAX;
  *out = (mm_holder){0};
  for (uint32_t r = 0; r < p->tp; r++) {
    const uint32_t rank = t->stage * p->tp + r, first = mm_pack_first_lead(p, t, rank), index = mm_pack_index(t, w->expert);
    mm_range all = {0, 0, piece_of(w)->rows}, range = cut->axis == MM_AXIS_NONE ? all : cut->rank[r];
    if (t->lead && (index < first || index - first >= t->lead)) continue;
    if (line < range.from || line - range.from >= range.count) continue;
    *out = (mm_holder){rank, range};
    if (w->s->rank[rank].plane) return true;
    if (absent == UINT32_MAX) absent = rank;
  }
  return mm_fail(err, MM_USAGE, "E_RANKS", mm_at(p->dir, t->name), "found the files of rank %u not open, expected those of every rank",
                 absent == UINT32_MAX ? t->stage * p->tp : absent);
}

static uint32_t local_expert(const mm_whole *w, uint32_t rank) {
  const mm_pack_tensor *t = tensor_of(w);
  return t->lead ? mm_pack_index(t, w->expert) - mm_pack_first_lead(&w->s->pack, t, rank) : 0;
}

/* One plane as a rank stores it, for one expert. */
typedef struct mm_lines {
  uint32_t rank, part;
  uint64_t offset;       /* of its first cell, in the part's file */
  uint32_t down, across; /* cells */
  size_t size;           /* of an element */
} mm_lines;

static mm_lines lines_of(const mm_whole *w, unsigned plane, uint32_t rank) {
  const mm_pack_tensor *t = tensor_of(w);
  const mm_pack_plane *p = &t->plane[plane];
  const mm_shard_plane *at = &w->s->rank[rank].plane[w->tensor * MM_PACK_PLANES + plane];
  mm_lines x = {.rank = rank,
                .part = at->part,
                .down = mm_cells(t->rows, p->cell_n),
                .across = mm_cells(t->cols, p->cell_k),
                .size = mm_dtype_size(p->dtype)};
  x.offset = at->offset + (uint64_t)local_expert(w, rank) * x.down * x.across * x.size;
  return x;
}

/* A reader of one plane. */
typedef struct mm_gather {
  const mm_whole *w;
  unsigned plane;
  mm_unshard_range_fn *seen;
  void *ctx;
  mm_err *err;
} mm_gather;

/* Cells [at, at + count) of the rank's plane, counted row-major. */
static bool copy(const mm_gather *g, const mm_lines *x, uint64_t at, uint64_t count, uint8_t *out) {
  mm_unshard_range s = {g->w->s, x->rank, x->part, x->offset + at * x->size, count * x->size};
  if (g->seen && !g->seen(g->ctx, &s, g->err)) return false;
  memcpy(out, g->w->s->rank[x->rank].map[x->part].data + s.offset, s.bytes);
  return true;
}

/* Cells of `range` from the one at line `line` on: those that begin inside it. */
static uint32_t cells_from(const mm_range *range, uint32_t line, uint32_t cell) {
  return cell == 0 ? 1 : mm_cells(range->from + range->count - line, cell);
}

/* The local cell over whole line `line`. */
static uint32_t local_cell(uint32_t base, const mm_range *range, uint32_t line, uint32_t cell) {
  return cell == 0 ? 0 : (base + range->at + (line - range->from)) / cell;
}

/* Lines that every holder has whole: runs of them at once. */
static bool gather_rows(const mm_gather *g, uint32_t first, uint32_t count, uint8_t *out) {
  const mm_pack_plane *p = &tensor_of(g->w)->plane[g->plane];
  for (uint32_t i = first, end = first + count; i < end;) {
    mm_holder h;
    uint32_t row = i * p->cell_n;
    if (!find_holder(g->w, row, &h, g->err)) return false;
    mm_lines x = lines_of(g->w, g->plane, h.rank);
    uint32_t n = (uint32_t)mm_min(end - i, cells_from(&h.range, row, p->cell_n));
    uint64_t at = (uint64_t)local_cell(piece_of(g->w)->local_at, &h.range, row, p->cell_n) * x.across;
    if (!copy(g, &x, at, (uint64_t)n * x.across, out)) return false;
    out += (uint64_t)n * x.across * x.size;
    i += n;
  }
  return true;
}

/* Lines of which every holder has some columns. */
static bool gather_cols(const mm_gather *g, uint32_t first, uint32_t count, uint8_t *out) {
  const mm_pack_plane *p = &tensor_of(g->w)->plane[g->plane];
  uint32_t across = mm_cells(mm_whole_cols(g->w), p->cell_k), base = piece_of(g->w)->local_at;
  size_t size = mm_dtype_size(p->dtype);
  for (uint32_t j = 0; j < across;) {
    mm_holder h;
    uint32_t col = j * p->cell_k;
    if (!find_holder(g->w, col, &h, g->err)) return false;
    mm_lines x = lines_of(g->w, g->plane, h.rank);
    uint32_t n = (uint32_t)mm_min(across - j, cells_from(&h.range, col, p->cell_k));
    for (uint32_t i = 0; i < count; i++) {
      uint32_t line = p->cell_n ? base / p->cell_n + first + i : 0;
      uint64_t at = (uint64_t)line * x.across + local_cell(0, &h.range, col, p->cell_k);
      if (!copy(g, &x, at, n, out + ((size_t)i * across + j) * size)) return false;
    }
    j += n;
  }
  return true;
}

bool mm_whole_cells(const mm_whole *w, unsigned plane, uint32_t first, uint32_t count, void *out, mm_unshard_range_fn *seen, void *ctx,
                    mm_err *err) {
  mm_gather g = {w, plane, seen, ctx, err};
  return cut_of(w)->axis == MM_AXIS_COLS ? gather_cols(&g, first, count, out) : gather_rows(&g, first, count, out);
}

static bool unpack_rows(const mm_whole *w, uint32_t row, uint32_t rows, float *out, mm_err *err) {
  for (uint32_t at = row, end = row + rows; at < end;) {
    mm_holder h;
    if (!find_holder(w, at, &h, err)) return false;
    uint32_t n = (uint32_t)mm_min(end - at, h.range.from + h.range.count - at);
    mm_packed m = mm_shards_tensor(w->s, h.rank, w->tensor);
    mm_unpack(&m, local_expert(w, h.rank), local_cell(piece_of(w)->local_at, &h.range, at, 1), n, out);
    out += (size_t)n * m.k;
    at += n;
  }
  return true;
}

static bool unpack_cols(const mm_whole *w, uint32_t row, uint32_t rows, float *out, mm_err *err) {
  uint32_t cols = mm_whole_cols(w), local = tensor_of(w)->cols;
  float *line = mm_calloc(local, sizeof *line, err);
  bool ok = line != NULL;
  for (uint32_t col = 0; ok && col < cols;) {
    mm_holder h;
    ok = find_holder(w, col, &h, err);
    if (!ok) break;
    mm_packed m = mm_shards_tensor(w->s, h.rank, w->tensor);
    uint32_t n = h.range.from + h.range.count - col;
    for (uint32_t i = 0; i < rows; i++) {
      mm_unpack(&m, local_expert(w, h.rank), piece_of(w)->local_at + row + i, 1, line);
      memcpy(out + (size_t)i * cols + col, line + local_cell(0, &h.range, col, 1), n * sizeof *line);
    }
    col += n;
  }
  free(line);
  return ok;
}

bool mm_whole_unpack(const mm_whole *w, uint32_t row, uint32_t rows, float *out, mm_err *err) {
  return cut_of(w)->axis == MM_AXIS_COLS ? unpack_cols(w, row, rows, out, err) : unpack_rows(w, row, rows, out, err);
}
