/* Sums over the inputs of linears, and over gradients of their outputs. */
#include "runtime/engine/calibration.h"

#include <math.h>
#include <stdlib.h>

#include "formats/safetensors.h"
#include "formats/system/memory.h"

enum { ROWS, FISHER_ROWS, MEAN_SQUARE, AMAX, MOMENTS, FISHER, KINDS }; /* in file order: the widest type first, so that all are aligned */
static const char *const suffix[] = {".rows", ".fisher_rows", ".mean_square", ".amax", ".moments", ".fisher"};

/* Second moments of the gradients of a tensor's outputs: blocks of rows of its first piece, then of the others. */
typedef struct fisher {
  uint32_t block, blocks; /* rows of a block; blocks of a matrix */
  double *sum;            /* [leads, blocks, triangle(block)]; NULL: not gathered */
  int64_t *rows;          /* [leads] */
} fisher;

/* Inputs of one tensor of the manifest. */
typedef struct inputs {
  uint32_t leads, k; /* k uncut */
  double *square;    /* [leads, k] sums */
  float *amax;       /* [tp, leads] */
  int64_t *rows;     /* [leads] */
  uint32_t block;    /* columns of a block of moments */
  double *moment;    /* [leads, blocks, triangle(block)] sums; NULL: not gathered */
  fisher fisher;
} inputs;

struct mm_calibration {
  const mm_shards *s;
  inputs *in; /* [tensor_count]; vectors have none */
};

mm_calibration *mm_calibration_open(const mm_shards *s, mm_err *err) {
  mm_calibration *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->s = s;
  c->in = mm_calloc(s->pack.tensor_count, sizeof *c->in, err);
  bool ok = c->in;
  for (size_t i = 0; ok && i < s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &s->pack.tensor[i];
    if (t->vector) continue;
    inputs *in = &c->in[i];
    *in = (inputs){.leads = t->lead ? t->lead : 1, .k = t->whole_cols};
    in->square = mm_calloc((size_t)in->leads * in->k, sizeof *in->square, err);
    in->amax = mm_calloc((size_t)in->leads * s->pack.tp, sizeof *in->amax, err);
    in->rows = mm_calloc(in->leads, sizeof *in->rows, err);
    ok = in->square && in->amax && in->rows;
  }
  if (ok) return c;
  mm_calibration_close(c);
  return NULL;
}

void mm_calibration_close(mm_calibration *c) {
  if (!c) return;
  for (size_t i = 0; c->in && i < c->s->pack.tensor_count; i++) {
    MM_FREE(c->in[i].square, c->in[i].amax, c->in[i].rows, c->in[i].moment, c->in[i].fisher.sum, c->in[i].fisher.rows);
  }
  free(c->in);
  free(c);
}

/* ---- second moments ---- */

static size_t triangle(uint32_t block) { return (size_t)block * (block + 1) / 2; }
static size_t moments_of(const inputs *in) { return mm_cells(in->k, in->block) * triangle(in->block); }

bool mm_calibration_gather_moments(mm_calibration *c, uint32_t columns, uint64_t *bytes, mm_err *err) {
  const mm_pack *p = &c->s->pack;
  *bytes = 0;
  if (p->tp > 1)
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL), "found --tp %u; second moments need whole rows: --tp 1", p->tp);
  for (size_t i = 0; i < p->tensor_count; i++) {
    inputs *in = &c->in[i];
    if (!in->square) continue;
    in->block = (uint32_t)mm_min(columns, in->k);
    uint64_t n;
    if (!mm_mul(in->leads, moments_of(in), &n) || !mm_mul(n, sizeof *in->moment, &n) || !mm_add(*bytes, n, bytes))
      return mm_fail_memory(err, UINT64_MAX);
  }
  const uint64_t limit = mm_memory_limit();
  if (*bytes > limit)
    return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(p->dir, NULL),
                   "found %llu bytes of memory, expected at least %llu for second moments in blocks of %u columns",
                   (unsigned long long)limit, (unsigned long long)*bytes, columns);
  for (size_t i = 0; i < p->tensor_count; i++) {
    inputs *in = &c->in[i];
    if (in->square && !(in->moment = mm_calloc(in->leads * moments_of(in), sizeof *in->moment, err))) return false;
  }
  return true;
}

enum { ROWS_AT_ONCE = 4, WIDTH = 4 };
typedef double wide_sum __attribute__((vector_size(8 * WIDTH), aligned(8), may_alias));
typedef float narrow __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define WIDENED(x) __builtin_convertvector(*(const narrow *)(x), wide_sum)

/* Adds the products of `rows` <= 4 inputs x[rows][n] to the triangle of one block. Absent rows are zeros. */
static void add_products(double *sum, const float *const x[ROWS_AT_ONCE], uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const double a = (double)x[0][i], b = (double)x[1][i], c = (double)x[2][i], d = (double)x[3][i];
    uint32_t j = 0;
    for (; j + WIDTH <= i + 1; j += WIDTH) {
      const wide_sum p = WIDENED(x[0] + j), q = WIDENED(x[1] + j), r = WIDENED(x[2] + j), s = WIDENED(x[3] + j);
      *(wide_sum *)(sum + j) += a * p + b * q + (c * r + d * s);
    }
    for (; j <= i; j++) sum[j] += a * (double)x[0][j] + b * (double)x[1][j] + (c * (double)x[2][j] + d * (double)x[3][j]);
    sum += i + 1;
  }
}

/* Vectors: number i is x[pick[i]], or x[i] when pick is NULL, `width` numbers each. */
typedef struct vectors {
  const float *x;
  const uint32_t *pick;
  uint32_t rows, width;
} vectors;

/* Adds the products of numbers [first, first + n) of all vectors to one triangle. */
static void add_block(double *sum, const vectors *v, uint32_t first, uint32_t n) {
  float whole[ROWS_AT_ONCE][MM_MOMENTS_MOST]; /* as they are: a stack may be small */
  const float *const row[ROWS_AT_ONCE] = {whole[0], whole[1], whole[2], whole[3]};
  for (uint32_t t = 0; t < v->rows; t += ROWS_AT_ONCE) {
    for (uint32_t r = 0; r < ROWS_AT_ONCE; r++) {
      const float *from = t + r < v->rows ? v->x + (size_t)(v->pick ? v->pick[t + r] : t + r) * v->width + first : NULL;
      for (uint32_t i = 0; i < n; i++) whole[r][i] = from ? from[i] : 0;
    }
    add_products(sum, row, n);
  }
}

/* Adds inputs of k columns to all blocks of a matrix. */
static void add_moments(const inputs *in, uint32_t lead, const vectors *v) {
  double *sum = in->moment + lead * moments_of(in);
  for (uint32_t k = 0; k < in->k; k += in->block, sum += triangle(in->block)) add_block(sum, v, k, (uint32_t)mm_min(in->block, in->k - k));
}

/* ---- gradients of outputs ---- */

static size_t fisher_of(const fisher *f) { return f->blocks * triangle(f->block); }

bool mm_calibration_gather_fisher(mm_calibration *c, uint32_t rows, const uint32_t *tensor, uint32_t count, uint64_t *bytes, mm_err *err) {
  const mm_pack *p = &c->s->pack;
  *bytes = 0;
  for (uint32_t i = 0; i < count; i++) {
    const mm_pack_tensor *t = &p->tensor[tensor[i]];
    fisher *f = &c->in[tensor[i]].fisher;
    uint64_t n;
    f->block = f->blocks = 0;
    for (unsigned j = 0; j < t->piece_count; j++) f->block = (uint32_t)mm_max(f->block, mm_min(rows, t->piece[j].rows));
    for (unsigned j = 0; j < t->piece_count; j++) f->blocks += mm_cells(t->piece[j].rows, f->block);
    if (!mm_mul(c->in[tensor[i]].leads, fisher_of(f), &n) || !mm_mul(n, sizeof *f->sum, &n) || !mm_add(*bytes, n, bytes))
      return mm_fail_memory(err, UINT64_MAX);
  }
  const uint64_t limit = mm_memory_limit();
  if (*bytes > limit)
    return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(p->dir, NULL),
                   "found %llu bytes of memory, expected at least %llu for moments of gradients in blocks of %u rows",
                   (unsigned long long)limit, (unsigned long long)*bytes, rows);
  for (uint32_t i = 0; i < count; i++) {
    const inputs *in = &c->in[tensor[i]];
    fisher *f = &c->in[tensor[i]].fisher;
    if (!(f->sum = mm_calloc(in->leads * fisher_of(f), sizeof *f->sum, err)) || !(f->rows = mm_calloc(in->leads, sizeof *f->rows, err)))
      return false;
  }
  return true;
}

void mm_calibration_add_fisher(mm_calibration *c, const mm_packed *w, uint32_t lead, const float *dy, uint32_t rows) {
  const mm_pack_tensor *t = &c->s->pack.tensor[w->tensor];
  const fisher *f = &c->in[w->tensor].fisher;
  const vectors v = {dy, NULL, rows, w->n};
  if (!f->sum) return;
  double *sum = f->sum + lead * fisher_of(f);
  for (unsigned j = 0; j < t->piece_count; j++)
    for (uint32_t row = 0; row < t->piece[j].rows; row += f->block, sum += triangle(f->block))
      add_block(sum, &v, t->piece[j].local_at + row, (uint32_t)mm_min(f->block, t->piece[j].rows - row));
  f->rows[lead] += rows;
}

/* ---- sums ---- */

/* Where inputs of matrix `lead` of w go that a rank has. */
typedef struct share {
  double *square; /* of own.from on */
  float *amax;
  mm_range own; /* columns: none where another rank adds them */
} share;

/* Counts the rows, which rank 0 does for all. */
static share share_of(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, uint64_t rows) {
  const mm_pack *p = &c->s->pack;
  const mm_cut *cut = &p->cut[p->tensor[w->tensor].piece[0].cut];
  inputs *in = &c->in[w->tensor];
  mm_range own = {0, 0, rank == 0 ? in->k : 0};
  if (cut->axis == MM_AXIS_COLS) own = cut->rank[rank];
  if (rank == 0) in->rows[lead] += (int64_t)rows;
  return (share){in->square + (size_t)lead * in->k + own.from, &in->amax[(size_t)rank * in->leads + lead], own};
}

void mm_calibration_add(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick,
                        uint32_t rows) {
  const share to = share_of(c, rank, w, lead, rows);
  if (c->in[w->tensor].moment) add_moments(&c->in[w->tensor], lead, &(vectors){x, pick, rows, w->k});
  for (uint32_t t = 0; t < rows; t++) {
    const float *row = x + (size_t)(pick ? pick[t] : t) * w->k + to.own.at;
    for (uint32_t i = 0; i < to.own.count; i++) {
      to.square[i] += (double)row[i] * (double)row[i];
      *to.amax = fmaxf(*to.amax, fabsf(row[i]));
    }
  }
}

void mm_calibration_add_sums(mm_calibration *c, uint32_t rank, const mm_packed *w, uint32_t lead, const mm_calibration_sums *sums) {
  const share to = share_of(c, rank, w, lead, sums->rows);
  for (uint32_t i = 0; i < to.own.count; i++) {
    to.square[i] += sums->square[to.own.at + i];
    *to.amax = fmaxf(*to.amax, sums->amax[to.own.at + i]);
  }
}

/* ---- the file ---- */

static bool any(const int64_t *rows, uint32_t leads) {
  for (uint32_t e = 0; e < leads; e++)
    if (rows[e]) return true;
  return false;
}

/* Whether a tensor of the manifest has this kind of numbers: those of a matrix that was given anything. */
static bool has(const inputs *in, int what) {
  if (what == FISHER || what == FISHER_ROWS) return in->fisher.rows && any(in->fisher.rows, in->leads);
  return in->square && any(in->rows, in->leads) && (what != MOMENTS || in->moment);
}

typedef struct place {
  int fd;
  const char *path;
  mm_where tensor; /* of the checkpoint, whose numbers these are */
} place;

static bool check_numbers(const float *x, size_t n, const place *f, mm_err *err) {
  for (size_t i = 0; i < n; i++)
    if (!isfinite(x[i]))
      return mm_fail(err, MM_INTEGRITY, "E_NONFINITE", f->tensor, "found inputs or gradients of which number %zu is not finite in F32", i);
  return true;
}

/* Writes the means of each matrix's sums over its rows, n numbers each. */
static bool write_means(const double *sum, const int64_t *rows, uint32_t leads, size_t n, uint64_t offset, const place *f, mm_err *err) {
  float *line = mm_calloc(n, sizeof *line, err);
  bool ok = line;
  for (uint32_t e = 0; ok && e < leads; e++, sum += n) {
    const double of = (double)(rows[e] ? rows[e] : 1);
    for (size_t i = 0; i < n; i++) line[i] = (float)(sum[i] / of);
    ok = check_numbers(line, n, f, err) && mm_pwrite(f->fd, f->path, line, n * sizeof *line, offset + e * n * sizeof *line, err);
  }
  free(line);
  return ok;
}

static bool write_amax(const mm_calibration *c, const inputs *in, uint64_t offset, const place *f, mm_err *err) {
  for (uint32_t e = 0; e < in->leads; e++) {
    float amax = 0;
    for (uint32_t r = 0; r < c->s->pack.tp; r++) amax = fmaxf(amax, in->amax[(size_t)r * in->leads + e]);
    if (!check_numbers(&amax, 1, f, err) || !mm_pwrite(f->fd, f->path, &amax, sizeof amax, offset + e * sizeof amax, err)) return false;
  }
  return true;
}

/* One kind of numbers of a tensor, at its offset in the file. */
static bool write_kind(const mm_calibration *c, const inputs *in, int what, uint64_t offset, const place *f, mm_err *err) {
  switch (what) {
    case ROWS: return mm_pwrite(f->fd, f->path, in->rows, in->leads * sizeof *in->rows, offset, err);
    case FISHER_ROWS: return mm_pwrite(f->fd, f->path, in->fisher.rows, in->leads * sizeof *in->rows, offset, err);
    case MEAN_SQUARE: return write_means(in->square, in->rows, in->leads, in->k, offset, f, err);
    case AMAX: return write_amax(c, in, offset, f, err);
    case MOMENTS: return write_means(in->moment, in->rows, in->leads, moments_of(in), offset, f, err);
    default: return write_means(in->fisher.sum, in->fisher.rows, in->leads, fisher_of(&in->fisher), offset, f, err);
  }
}

static mm_shape shape_of(const mm_pack_tensor *t, const inputs *in, int what) {
  const uint64_t blocks = what == FISHER ? in->fisher.blocks
                          : in->moment   ? mm_cells(in->k, in->block)
                                         : 0,
                 many = triangle(what == FISHER ? in->fisher.block : in->block);
  if (what == MEAN_SQUARE) return t->lead ? mm_shape2(in->leads, in->k) : mm_shape1(in->k);
  if (what == MOMENTS || what == FISHER) return t->lead ? (mm_shape){3, {in->leads, blocks, many}} : mm_shape2(blocks, many);
  return mm_shape1(in->leads);
}

/* One kind of tensor for every matrix that has it, in manifest order, behind those of st[*n]. */
static bool describe(const mm_calibration *c, int what, mm_st_tensor *st, size_t *n, mm_arena *names, mm_err *err) {
  for (size_t i = 0; i < c->s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &c->s->pack.tensor[i];
    if (!has(&c->in[i], what)) continue;
    const char *name = mm_arena_printf(names, err, "%s%s", t->name, suffix[what]);
    if (!name) return false;
    st[(*n)++] = (mm_st_tensor){.name = name, .dtype = what <= FISHER_ROWS ? MM_I64 : MM_F32, .shape = shape_of(t, &c->in[i], what)};
  }
  return true;
}

bool mm_calibration_write(const mm_calibration *c, int fd, const char *path, mm_err *err) {
  static const struct mm_st_meta meta = {"format", "minimax-calibration"};
  mm_arena names = {0};
  mm_st_tensor *st = mm_calloc(c->s->pack.tensor_count * KINDS, sizeof *st, err);
  size_t n = 0, header_bytes;
  bool ok = st;
  for (int what = 0; ok && what < KINDS; what++) ok = describe(c, what, st, &n, &names, err);
  void *header = ok ? mm_st_header(st, n, &meta, 1, 64, &header_bytes, err) : NULL;
  ok = header && mm_pwrite(fd, path, header, header_bytes, 0, err);
  const mm_st_tensor *next = st;
  for (int what = 0; ok && what < KINDS; what++)
    for (size_t i = 0; ok && i < c->s->pack.tensor_count; i++) {
      const place f = {fd, path, mm_at(c->s->pack.dir, next->name)};
      if (has(&c->in[i], what)) ok = write_kind(c, &c->in[i], what, (next++)->offset, &f, err);
    }
  free(header);
  free(st);
  mm_arena_close(&names);
  return ok;
}
