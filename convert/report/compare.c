/* The error of packed tensors against their source. */
#include "convert/report/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode/decode.h"
#include "convert/plan/fill.h"
#include "formats/system/pool.h"

double mm_sqnr_db(const mm_tensor_error *e) { return e->noise == 0 ? (double)INFINITY : 10 * log10(e->signal / e->noise); }
double mm_rmse(const mm_tensor_error *e) { return e->count == 0 ? 0 : sqrt(e->noise / (double)e->count); }
double mm_cosine(const mm_tensor_error *e) {
  if (e->signal == 0 && e->packed == 0) return 1;
  return e->signal == 0 || e->packed == 0 ? 0 : e->product / sqrt(e->signal) / sqrt(e->packed);
}

/* Rows of which every weight lies within half a step may have lost most decibels: all weights but one that is far larger. */
bool mm_error_bounded(const mm_tensor_error *e, const mm_scheme *scheme, bool moved, mm_where where, mm_err *err) {
  const double least = (double)scheme->sqnr / 3, db = fmin(mm_sqnr_db(e), e->experts ? e->worst_db : (double)INFINITY);
  const double share = fmax(e->astray > 0 ? e->astray / e->signal : 0, e->most_astray), most = pow(10, -least / 10);
  const double lost = fmax(e->noise >= e->signal ? e->max_abs : 0, e->most_lost);
  if (!moved)
    return (e->beyond == 0 && db >= least) ||
           mm_fail(
               err, MM_INTEGRITY, "E_SOURCE", where,
               "found %llu weights further from the source than half a step of %s, and an SQNR of %.2f dB, expected 0 and at least %.2f",
               (unsigned long long)e->beyond, scheme->name, db, least);
  if (lost > (scheme->scale_of == MM_F16 ? 0x1p-24 : 0x1p-120))
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", where, "found weights that are no nearer to the source than zeros, the furthest %.3g off",
                   lost);
  return share <= most * (1 + 1e-4) ||
         mm_fail(
             err, MM_INTEGRITY, "E_SOURCE", where,
             "found %llu weights further from the source than half a step of %s, in a row or matrix %.3g times its squares, expected at "
             "most %.3g",
             (unsigned long long)e->beyond, scheme->name, share, most);
}

typedef struct mm_compare_worker {
  mm_decoder source;
  float *row, *scale; /* of one local row: unpacked, and what it was multiplied with */
  double *astray;     /* of each row of a strip, over the ranks (mm_error_add) */
  size_t row_cap, scale_cap, astray_cap;
} mm_compare_worker;

typedef struct mm_compare_job {
  const mm_plan *plan;
  const mm_shards *s;
  mm_compare_worker *worker;
  mm_tensor_error *sum; /* [step_count]: added up in order at the end, so that the figures are the same every time */
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

bool mm_compare_plan(const mm_plan *plan, const mm_shards *s, mm_err *err) {
  const mm_pack *a = &plan->pack, *b = &s->pack;
  if (a->tensor_count != b->tensor_count)
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(b->dir, NULL), "found %zu tensors, expected %zu from this source", b->tensor_count,
                   a->tensor_count);
  for (size_t i = 0; i < a->tensor_count; i++)
    if (!same_tensor(a, &a->tensor[i], b, &b->tensor[i]))
      return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(b->dir, b->tensor[i].name),
                     "found another tensor, cut or grid, expected that of \"%s\" as this source gives it", a->tensor[i].name);
  return true;
}

mm_code_steps mm_code_steps_of(mm_code code) {
  switch (code) {
    case MM_CODE_E4M3: return (mm_code_steps){32, 448};
    case MM_CODE_E2M1: return (mm_code_steps){2, 6};
    case MM_CODE_INT8: return (mm_code_steps){1, 127};
    case MM_CODE_INT4:
    case MM_CODE_INT4_OFFSET: return (mm_code_steps){1, 7};
    case MM_CODE_PLAIN: break;
  }
  return (mm_code_steps){0, 0};
}

void mm_error_merge(mm_tensor_error *to, const mm_tensor_error *e) {
  bool first = to->most_scale == 0;
  to->signal += e->signal;
  to->noise += e->noise;
  to->packed += e->packed;
  to->product += e->product;
  to->max_abs = fmax(to->max_abs, e->max_abs);
  to->count += e->count;
  to->clipped += e->clipped;
  to->beyond += e->beyond;
  to->astray += e->astray;
  to->flushed += e->flushed;
  to->nonfinite += e->nonfinite;
  to->most_astray = fmax(to->most_astray, e->most_astray);
  if (e->most_scale == 0) return;
  to->least_scale = first ? e->least_scale : fmin(to->least_scale, e->least_scale);
  to->most_scale = fmax(to->most_scale, e->most_scale);
}

void mm_error_add_expert(mm_tensor_error *stack, const mm_tensor_error *expert, uint32_t number) {
  double db = mm_sqnr_db(expert);
  if (expert->noise >= expert->signal) stack->most_lost = fmax(stack->most_lost, expert->max_abs);
  if (expert->astray > 0) stack->most_astray = fmax(stack->most_astray, expert->astray / expert->signal);
  if (stack->experts++ > 0 && db >= stack->worst_db) return;
  stack->worst_expert = number;
  stack->worst_db = db;
}

/* One row: source w, packed v, and the scales v was multiplied with (step is 0 where there are none). */
double mm_error_add(mm_tensor_error *sum, const float *w, const float *v, const float *scale, uint32_t n, mm_code_steps c) {
  const double step = c.step;
  double astray = 0;
  mm_tensor_error row = {.count = n, .least_scale = step > 0 ? fabs((double)scale[0]) : 0};
  for (uint32_t j = 0; j < n; j++) {
    double a = (double)w[j], b = (double)v[j], e = b - a, s = step > 0 ? fabs((double)scale[j]) : 0;
    if (step > 0) {
      row.least_scale = fmin(row.least_scale, s);
      row.most_scale = fmax(row.most_scale, s);
    }
    if (!isfinite(e)) {
      row.nonfinite++;
      continue;
    }
    row.signal += a * a;
    row.noise += e * e;
    row.packed += b * b;
    row.product += a * b;
    row.max_abs = fmax(row.max_abs, fabs(e));
    const bool clipped = step > 0 && fabs(e) > step / 2 * s * (1 + 1e-4); /* ties: v and the quotient were rounded to f32 */
    row.clipped += clipped;
    const bool beyond = clipped && !(fabs(b) >= c.top * s * (1 - 1e-6) && fabs(a) > fabs(b) && signbit(a) == signbit(b));
    row.beyond += beyond;
    row.astray += beyond ? e * e : 0;
    astray += beyond && s > 0 ? e * e : 0;
    row.flushed += a != 0 && b == 0;
  }
  mm_error_merge(sum, &row);
  return astray;
}

void mm_error_add_row(mm_tensor_error *sum, const float *w, uint32_t n, double astray) {
  double signal = 0;
  for (uint32_t i = 0; astray > 0 && i < n; i++) signal += (double)w[i] * (double)w[i];
  if (astray > 0) sum->most_astray = fmax(sum->most_astray, astray / signal);
}

/* Rows of one rank's share: local row `local` + i of entry `lead` holds columns [cols.from, +count) of source row i in `wide`. */
typedef struct mm_shared_rows {
  uint32_t lead, local, rows, whole_cols;
  const float *wide; /* [rows, whole_cols] */
  double *astray;    /* [rows] */
  mm_range cols;
} mm_shared_rows;

static bool add_rank(mm_compare_worker *w, const mm_packed *m, const mm_shared_rows *x, mm_tensor_error *sum, mm_err *err) {
  const mm_code_steps c = mm_code_steps_of(m->scheme->code);
  if (!MM_GROW(w->row, &w->row_cap, m->k, err) || !MM_GROW(w->scale, &w->scale_cap, m->k, err)) return false;
  for (uint32_t i = 0; i < x->rows; i++) {
    mm_unpack(m, x->lead, x->local + i, 1, w->row);
    if (c.step > 0) mm_row_scales(m, x->lead, x->local + i, w->scale);
    const float *from = x->wide + (size_t)i * x->whole_cols + x->cols.from;
    x->astray[i] += mm_error_add(sum, from, w->row + x->cols.at, w->scale + x->cols.at, x->cols.count, c);
  }
  return true;
}

static bool compare_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_compare_job *job = ctx;
  mm_compare_worker *w = &job->worker[worker];
  const mm_step *step = &job->plan->step[item];
  const mm_pack *p = &job->plan->pack;
  const mm_pack_tensor *t = &p->tensor[step->tensor];
  mm_tensor_error *sum = &job->sum[item];
  if (mm_step_idle(job->plan, step)) return true;
  mm_pool_at(t->name);
  for (uint32_t i = 0; i < t->piece_count; i++) {
    if (step->piece != MM_ALL_PIECES && step->piece != i) continue;
    const mm_piece *x = &t->piece[i];
    const mm_cut *cut = &p->cut[x->cut];
    uint32_t from = step->piece == MM_ALL_PIECES ? 0 : step->row, end = step->piece == MM_ALL_PIECES ? x->rows : step->row + step->rows;
    uint32_t unit = mm_plan_strip_rows(job->plan, step->tensor);
    const mm_matrix *matrix = &job->plan->tensor[step->tensor].matrix[step->lead * t->piece_count + i];
    for (uint32_t row = from; row < end; row += unit) {
      uint32_t rows = (uint32_t)mm_min(unit, end - row);
      if (!mm_decode_f32(&w->source, matrix, row, rows, err) || !MM_GROW(w->astray, &w->astray_cap, rows, err)) return false;
      memset(w->astray, 0, rows * sizeof *w->astray);
      uint32_t row_mark = row, col_mark = 0; /* what lies before was compared, or no rank here holds it: ranges ascend */
      for (uint32_t r = 0; r < p->tp; r++) {
        mm_range take = cut->axis == MM_AXIS_ROWS ? cut->rank[r] : (mm_range){0, 0, x->rows};
        mm_range cols = cut->axis == MM_AXIS_COLS ? cut->rank[r] : (mm_range){0, 0, t->whole_cols};
        uint32_t lo = (uint32_t)mm_max(row_mark, take.from), hi = (uint32_t)mm_min(row + rows, take.from + take.count);
        uint32_t skip = (uint32_t)mm_min(cols.count, col_mark > cols.from ? col_mark - cols.from : 0);
        cols = (mm_range){cols.at + skip, cols.from + skip, cols.count - skip};
        if (lo >= hi || cols.count == 0) continue;
        const uint32_t rank = t->stage * p->tp + r, first = mm_pack_first_lead(p, t, rank), index = mm_pack_index(t, step->lead);
        if (job->s->pack.rank[rank].part_count == 0) continue;                /* not in this directory */
        if (t->lead && (index < first || index >= first + t->lead)) continue; /* another rank's expert */
        mm_packed m = mm_shards_tensor(job->s, rank, step->tensor);
        const mm_shared_rows share = {.lead = index - first,
                                      .local = x->local_at + take.at + (lo - take.from),
                                      .rows = hi - lo,
                                      .whole_cols = t->whole_cols,
                                      .wide = w->source.wide + (size_t)(lo - row) * t->whole_cols,
                                      .astray = w->astray + (lo - row),
                                      .cols = cols};
        if (!add_rank(w, &m, &share, sum, err)) return false;
        if (row_mark == row && col_mark == 0) sum->nonfinite += w->source.zeroed;
        if (cut->axis == MM_AXIS_COLS)
          col_mark = cols.from + cols.count;
        else
          row_mark = hi;
      }
      for (uint32_t k = 0; k < rows; k++) mm_error_add_row(sum, w->source.wide + (size_t)k * t->whole_cols, t->whole_cols, w->astray[k]);
    }
  }
  return true;
}

/* Adds the steps of each tensor, and of a stack finds the worst entry: the steps of an entry follow one another. */
static void add_steps(const mm_plan *plan, const mm_tensor_error *sum, mm_tensor_error *out) {
  for (size_t i = 0, next; i < plan->step_count; i = next) {
    const mm_step *s = &plan->step[i];
    mm_tensor_error lead = {0}, *to = &out[s->tensor];
    for (next = i; next < plan->step_count && plan->step[next].tensor == s->tensor && plan->step[next].lead == s->lead; next++)
      mm_error_merge(&lead, &sum[next]);
    mm_error_merge(to, &lead);
    if (plan->pack.tensor[s->tensor].lead && lead.count > 0) mm_error_add_expert(to, &lead, s->lead);
  }
}

bool mm_compare(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_tensor_error *out, mm_err *err) {
  if (!mm_compare_plan(plan, s, err)) return false;
  mm_compare_job job = {.plan = plan, .s = s};
  job.worker = mm_calloc(threads, sizeof *job.worker, err);
  job.sum = mm_calloc(plan->step_count, sizeof *job.sum, err);
  for (unsigned i = 0; job.worker && i < threads; i++) mm_decoder_open(&job.worker[i].source, plan->hf);
  bool ok = job.worker && job.sum && mm_pool_run(threads, plan->step_count, compare_step, &job, err);
  for (unsigned i = 0; job.worker && i < threads; i++) {
    mm_decoder_close(&job.worker[i].source);
    MM_FREE(job.worker[i].row, job.worker[i].scale, job.worker[i].astray);
  }
  memset(out, 0, s->pack.tensor_count * sizeof *out);
  if (ok) add_steps(plan, job.sum, out);
  free(job.sum);
  free(job.worker);
  return ok;
}
