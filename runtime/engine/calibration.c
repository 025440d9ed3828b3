/* Sums over the inputs of linears. */
#include "runtime/engine/calibration.h"

#include <math.h>
#include <stdlib.h>

#include "formats/safetensors.h"

enum { ROWS, MEAN_SQUARE, AMAX, WRITTEN }; /* in file order: the widest type first, so that all are aligned */
static const char *const suffix[] = {".rows", ".mean_square", ".amax"};

/* Inputs of one tensor of the manifest. */
typedef struct inputs {
  uint32_t leads, k; /* k uncut */
  double *square;    /* [leads, k] sums */
  float *amax;       /* [tp, leads] */
  int64_t *rows;     /* [leads] */
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
    MM_FREE(c->in[i].square, c->in[i].amax, c->in[i].rows);
  }
  free(c->in);
  free(c);
}

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

/* The three tensors of in, at their offsets in the file. */
static bool write_inputs(const mm_calibration *c, const inputs *in, const uint64_t offset[WRITTEN], int fd, const char *path, mm_err *err) {
  float *line = mm_calloc(in->k, sizeof *line, err);
  bool ok = line;
  for (uint32_t e = 0; ok && e < in->leads; e++) {
    float amax = 0;
    for (uint32_t r = 0; r < c->s->pack.tp; r++) amax = fmaxf(amax, in->amax[(size_t)r * in->leads + e]);
    for (uint32_t i = 0; i < in->k; i++) line[i] = (float)(in->square[(size_t)e * in->k + i] / (double)(in->rows[e] ? in->rows[e] : 1));
    size_t bytes = in->k * sizeof *line;
    ok = mm_pwrite(fd, path, line, bytes, offset[MEAN_SQUARE] + e * bytes, err) &&
         mm_pwrite(fd, path, &amax, sizeof amax, offset[AMAX] + e * sizeof amax, err);
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
    mm_shape shape = what != MEAN_SQUARE ? mm_shape1(in->leads) : t->lead ? mm_shape2(in->leads, in->k) : mm_shape1(in->k);
    st[(*n)++] = (mm_st_tensor){.name = name, .dtype = what == ROWS ? MM_I64 : MM_F32, .shape = shape};
  }
  return true;
}

bool mm_calibration_write(const mm_calibration *c, int fd, const char *path, mm_err *err) {
  static const struct mm_st_meta meta = {"format", "minimax-calibration"};
  mm_arena names = {0};
  mm_st_tensor *st = mm_calloc(c->s->pack.tensor_count * WRITTEN, sizeof *st, err);
  size_t n = 0, header_bytes;
  bool ok = st;
  for (int what = 0; ok && what < WRITTEN; what++) ok = describe(c, what, st + (size_t)what * n, &n, &names, err);
  void *header = ok ? mm_st_header(st, n * WRITTEN, &meta, 1, 64, &header_bytes, err) : NULL;
  ok = header && mm_pwrite(fd, path, header, header_bytes, 0, err);
  const mm_st_tensor *next = st;
  for (size_t i = 0; ok && i < c->s->pack.tensor_count; i++) {
    if (!given(&c->in[i])) continue;
    ok = write_inputs(c, &c->in[i], (uint64_t[]){next[0].offset, next[n].offset, next[2 * n].offset}, fd, path, err);
    next++;
  }
  free(header);
  free(st);
  mm_arena_close(&names);
  return ok;
}
