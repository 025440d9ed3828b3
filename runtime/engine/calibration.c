/* Sums over the inputs of linears. */
#include "runtime/engine/calibration.h"

#include <math.h>
#include <stdlib.h>

#include "formats/safetensors.h"
#include "formats/system/memory.h"

enum { ROWS, MEAN_SQUARE, AMAX, MOMENTS, KINDS }; /* in file order: the widest type first, so that all are aligned */
static const char *const suffix[] = {".rows", ".mean_square", ".amax", ".moments"};

/* Inputs of one tensor of the manifest. */
typedef struct inputs {
  uint32_t leads, k; /* k uncut */
  double *square;    /* [leads, k] sums */
  float *amax;       /* [tp, leads] */
  int64_t *rows;     /* [leads] */
  uint32_t block;    /* columns of a block of moments */
  double *moment;    /* [leads, blocks, triangle(block)] sums; NULL: not gathered */
} inputs;

struct mm_calibration {
  const mm_shards *s;
  unsigned kinds; /* of tensors that are written */
  inputs *in;     /* [tensor_count]; vectors have none */
};

mm_calibration *mm_calibration_open(const mm_shards *s, mm_err *err) {
  mm_calibration *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->s = s;
  c->kinds = MOMENTS;
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
    MM_FREE(c->in[i].square, c->in[i].amax, c->in[i].rows, c->in[i].moment);
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
  c->kinds = KINDS;
  return true;
}

enum { ROWS_AT_ONCE = 4 };

/* Adds the products of `rows` <= 4 inputs x[rows][n] to the triangle of one block. Absent rows are zeros. */
static void add_products(double *sum, const double *const x[ROWS_AT_ONCE], uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    const double a = x[0][i], b = x[1][i], c = x[2][i], d = x[3][i];
    for (uint32_t j = 0; j <= i; j++) sum[j] += a * x[0][j] + b * x[1][j] + (c * x[2][j] + d * x[3][j]);
    sum += i + 1;
  }
}

/* Adds `rows` inputs of k columns to all blocks of a matrix. */
static void add_moments(const inputs *in, uint32_t lead, const float *x, const uint32_t *pick, uint32_t rows) {
  double wide[ROWS_AT_ONCE][MM_MOMENTS_MOST];
  const double *const row[ROWS_AT_ONCE] = {wide[0], wide[1], wide[2], wide[3]};
  double *sum = in->moment + lead * moments_of(in);
  for (uint32_t k = 0; k < in->k; k += in->block, sum += triangle(in->block)) {
    const uint32_t n = (uint32_t)mm_min(in->block, in->k - k);
    for (uint32_t t = 0; t < rows; t += ROWS_AT_ONCE) {
      for (uint32_t r = 0; r < ROWS_AT_ONCE; r++) {
        const float *from = t + r < rows ? x + (size_t)(pick ? pick[t + r] : t + r) * in->k + k : NULL;
        for (uint32_t i = 0; i < n; i++) wide[r][i] = from ? (double)from[i] : 0;
      }
      add_products(sum, row, n);
    }
  }
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
  if (c->in[w->tensor].moment) add_moments(&c->in[w->tensor], lead, x, pick, rows);
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

static bool given(const inputs *in) {
  for (uint32_t e = 0; in->square && e < in->leads; e++)
    if (in->rows[e]) return true;
  return false;
}

/* The mean of a matrix's sums, at `offset` of the file. */
static bool write_moments(const inputs *in, uint32_t lead, float *line, uint64_t offset, int fd, const char *path, mm_err *err) {
  const size_t n = triangle(in->block), bytes = n * sizeof *line;
  const double *sum = in->moment + lead * moments_of(in);
  const double rows = (double)(in->rows[lead] ? in->rows[lead] : 1);
  offset += lead * moments_of(in) * sizeof *line;
  for (size_t done = 0; done < moments_of(in); done += n) {
    for (size_t i = 0; i < n; i++) line[i] = (float)(sum[done + i] / rows);
    if (!mm_pwrite(fd, path, line, bytes, offset + done * sizeof *line, err)) return false;
  }
  return true;
}

/* The tensors of in, at their offsets in the file. */
static bool write_inputs(const mm_calibration *c, const inputs *in, const uint64_t offset[KINDS], int fd, const char *path, mm_err *err) {
  float *line = mm_calloc(mm_max(in->k, in->moment ? triangle(in->block) : 0), sizeof *line, err);
  bool ok = line;
  for (uint32_t e = 0; ok && e < in->leads; e++) {
    float amax = 0;
    for (uint32_t r = 0; r < c->s->pack.tp; r++) amax = fmaxf(amax, in->amax[(size_t)r * in->leads + e]);
    for (uint32_t i = 0; i < in->k; i++) line[i] = (float)(in->square[(size_t)e * in->k + i] / (double)(in->rows[e] ? in->rows[e] : 1));
    size_t bytes = in->k * sizeof *line;
    ok = mm_pwrite(fd, path, line, bytes, offset[MEAN_SQUARE] + e * bytes, err) &&
         mm_pwrite(fd, path, &amax, sizeof amax, offset[AMAX] + e * sizeof amax, err) &&
         (!in->moment || write_moments(in, e, line, offset[MOMENTS], fd, path, err));
  }
  free(line);
  return ok && mm_pwrite(fd, path, in->rows, in->leads * sizeof *in->rows, offset[ROWS], err);
}

/* One kind of tensor for every matrix that was given anything, in manifest order; how many into *n. */
static bool describe(const mm_calibration *c, int what, mm_st_tensor *st, size_t *n, mm_arena *names, mm_err *err) {
  *n = 0;
  for (size_t i = 0; i < c->s->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &c->s->pack.tensor[i];
    const inputs *in = &c->in[i];
    if (!given(in)) continue;
    const char *name = mm_arena_printf(names, err, "%s%s", t->name, suffix[what]);
    if (!name) return false;
    const uint64_t blocks = in->moment ? mm_cells(in->k, in->block) : 0, many = triangle(in->block);
    mm_shape shape = what != MEAN_SQUARE ? mm_shape1(in->leads) : t->lead ? mm_shape2(in->leads, in->k) : mm_shape1(in->k);
    if (what == MOMENTS) shape = t->lead ? (mm_shape){3, {in->leads, blocks, many}} : mm_shape2(blocks, many);
    st[(*n)++] = (mm_st_tensor){.name = name, .dtype = what == ROWS ? MM_I64 : MM_F32, .shape = shape};
  }
  return true;
}

bool mm_calibration_write(const mm_calibration *c, int fd, const char *path, mm_err *err) {
  static const struct mm_st_meta meta = {"format", "minimax-calibration"};
  mm_arena names = {0};
  mm_st_tensor *st = mm_calloc(c->s->pack.tensor_count * KINDS, sizeof *st, err);
  size_t n = 0, header_bytes;
  bool ok = st;
  for (int what = 0; ok && what < (int)c->kinds; what++) ok = describe(c, what, st + (size_t)what * n, &n, &names, err);
  void *header = ok ? mm_st_header(st, n * c->kinds, &meta, 1, 64, &header_bytes, err) : NULL;
  ok = header && mm_pwrite(fd, path, header, header_bytes, 0, err);
  const mm_st_tensor *next = st;
  for (size_t i = 0; ok && i < c->s->pack.tensor_count; i++) {
    if (!given(&c->in[i])) continue;
    uint64_t offset[KINDS] = {0};
    for (unsigned what = 0; what < c->kinds; what++) offset[what] = next[what * n].offset;
    ok = write_inputs(c, &c->in[i], offset, fd, path, err);
    next++;
  }
  free(header);
  free(st);
  mm_arena_close(&names);
  return ok;
}
