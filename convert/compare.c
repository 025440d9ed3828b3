/* The error of packed tensors against their source. */
#include "convert/compare.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode.h"
#include "formats/pool.h"

double mm_sqnr_db(const mm_tensor_error *e) { return e->noise == 0 ? (double)INFINITY : 10 * log10(e->signal / e->noise); }

typedef struct mm_compare_worker {
  mm_decoder source;
  float *row; /* one unpacked local row */
  size_t row_cap;
} mm_compare_worker;

typedef struct mm_compare_job {
  const mm_plan *plan;
  const mm_shards *s;
  mm_compare_worker *worker;
  mm_tensor_error *out;
  pthread_mutex_t lock;
} mm_compare_job;

static bool same_tensor(const mm_pack *p, const mm_pack_tensor *a, const mm_pack *q, const mm_pack_tensor *b) {
  bool same = strcmp(a->name, b->name) == 0 && strcmp(a->scheme, b->scheme) == 0 && a->lead == b->lead && a->whole_lead == b->whole_lead &&
              a->stage == b->stage && a->rows == b->rows && a->cols == b->cols && a->piece_count == b->piece_count &&
              a->plane_count == b->plane_count;
  for (unsigned i = 0; same && i < a->piece_count; i++)
    same = strcmp(a->piece[i].source, b->piece[i].source) == 0 && a->piece[i].local_at == b->piece[i].local_at &&
           mm_cut_equal(&p->cut[a->piece[i].cut], &q->cut[b->piece[i].cut], p->tp);
  for (unsigned i = 0; same && i < a->plane_count; i++)
    same = a->plane[i].cell_n == b->plane[i].cell_n && a->plane[i].cell_k == b->plane[i].cell_k;
  return same;
}

static bool same_plan(const mm_plan *plan, const mm_shards *s, mm_err *err) {
  const mm_pack *a = &plan->pack, *b = &s->pack;
  if (a->tensor_count != b->tensor_count)
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(b->dir, NULL), "found %zu tensors, expected %zu from this source", b->tensor_count,
                   a->tensor_count);
  for (size_t i = 0; i < a->tensor_count; i++)
    if (!same_tensor(a, &a->tensor[i], b, &b->tensor[i]))
      return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(b->dir, b->tensor[i].name),
                     "found another tensor, cut or grid than this source gives (\"%s\")", a->tensor[i].name);
  return true;
}

/* Adds rows of one rank: local row `local` + i holds source row `row` + i, columns [cols.from, +count) of it. */
static bool add_rank(mm_compare_worker *w, const mm_packed *m, uint32_t lead, uint32_t local, const float *wide, uint32_t rows,
                     uint32_t whole_cols, mm_range cols, mm_tensor_error *sum, mm_err *err) {
  if (!mm_grow((void **)&w->row, &w->row_cap, m->k, sizeof *w->row, err)) return false;
  for (uint32_t i = 0; i < rows; i++) {
    m->scheme->unpack(m, lead, local + i, 1, w->row);
    const float *a = wide + (size_t)i * whole_cols + cols.from, *b = w->row + cols.at;
    double signal = 0, noise = 0, most = 0;
    for (uint32_t j = 0; j < cols.count; j++) {
      double e = (double)b[j] - (double)a[j];
      signal += (double)a[j] * (double)a[j];
      noise += e * e;
      most = fmax(most, fabs(e));
    }
    sum->signal += signal;
    sum->noise += noise;
    sum->max_abs = fmax(sum->max_abs, most);
  }
  sum->count += (uint64_t)rows * cols.count;
  return true;
}

static bool compare_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_compare_job *job = ctx;
  mm_compare_worker *w = &job->worker[worker];
  const mm_step *step = &job->plan->step[item];
  const mm_pack *p = &job->plan->pack;
  const mm_pack_tensor *t = &p->tensor[step->tensor];
  mm_tensor_error sum = {0};
  for (uint32_t i = 0; i < t->piece_count; i++) {
    if (step->piece != MM_ALL_PIECES && step->piece != i) continue;
    const mm_piece *x = &t->piece[i];
    const mm_cut *cut = &p->cut[x->cut];
    uint32_t from = step->piece == MM_ALL_PIECES ? 0 : step->row, end = step->piece == MM_ALL_PIECES ? x->rows : step->row + step->rows;
    uint32_t unit = mm_strip_rows(job->plan->hf, job->plan->tensor[step->tensor].scheme, t->whole_cols);
    const mm_matrix *matrix = &job->plan->tensor[step->tensor].matrix[step->lead * t->piece_count + i];
    for (uint32_t row = from; row < end; row += unit) {
      uint32_t rows = (uint32_t)mm_min(unit, end - row);
      if (!mm_decode_f32(&w->source, matrix, row, rows, err)) return false;
      for (uint32_t r = 0; r < p->tp; r++) {
        mm_range take = cut->axis == MM_AXIS_ROWS ? cut->rank[r] : (mm_range){0, 0, x->rows};
        mm_range cols = cut->axis == MM_AXIS_COLS ? cut->rank[r] : (mm_range){0, 0, t->whole_cols};
        uint32_t lo = (uint32_t)mm_max(row, take.from), hi = (uint32_t)mm_min(row + rows, take.from + take.count);
        if (lo >= hi) continue;
        uint32_t rank = t->stage * p->tp + r, first = mm_pack_first_lead(p, t, rank);
        if (job->s->pack.rank[rank].part_count == 0) continue;                          /* not in this directory */
        if (t->lead && (step->lead < first || step->lead >= first + t->lead)) continue; /* another rank's expert */
        mm_packed m = mm_shards_tensor(job->s, rank, step->tensor);
        if (!add_rank(w, &m, step->lead - first, x->local_at + take.at + (lo - take.from),
                      w->source.wide + (size_t)(lo - row) * t->whole_cols, hi - lo, t->whole_cols, cols, &sum, err))
          return false;
      }
    }
  }
  pthread_mutex_lock(&job->lock);
  mm_tensor_error *e = &job->out[step->tensor];
  e->signal += sum.signal;
  e->noise += sum.noise;
  e->max_abs = fmax(e->max_abs, sum.max_abs);
  e->count += sum.count;
  pthread_mutex_unlock(&job->lock);
  return true;
}

bool mm_compare(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_tensor_error *out, mm_err *err) {
  if (!same_plan(plan, s, err)) return false;
  mm_compare_job job = {.plan = plan, .s = s, .out = out, .worker = mm_calloc(threads, sizeof *job.worker, err)};
  if (!job.worker) return false;
  memset(out, 0, s->pack.tensor_count * sizeof *out);
  pthread_mutex_init(&job.lock, NULL);
  for (unsigned i = 0; i < threads; i++) mm_decoder_open(&job.worker[i].source, plan->hf);
  bool ok = mm_pool_run(threads, plan->step_count, compare_step, &job, err);
  for (unsigned i = 0; i < threads; i++) {
    mm_decoder_close(&job.worker[i].source);
    free(job.worker[i].row);
  }
  pthread_mutex_destroy(&job.lock);
  free(job.worker);
  return ok;
}
