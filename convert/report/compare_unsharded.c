/* The error of an unsharded checkpoint: both it and its source are decoded, matrix by matrix. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode/decode.h"
#include "convert/report/exact.h"
#include "formats/system/pool.h"

/* A matrix in both checkpoints, and what it counts for. */
typedef struct pair {
  const mm_matrix *source;
  mm_matrix made;
  size_t row; /* of the report */
  uint32_t expert;
  const mm_scheme *scheme;
  bool keep;         /* stored as it is in the source */
  bool again, moved; /* its bytes were compared with those of this version; rounded with error feedback */
  mm_tensor_error e;
} pair;

typedef struct job {
  pair *pair;
  mm_decoder *source, *made; /* [threads] */
  uint32_t unit;             /* rows are decoded in multiples of this */
} job;

/* "model.layers.0.block_sparse_moe.experts.17.w1.weight": 17. */
static uint32_t expert_of(const char *name) {
  const char *at = strstr(name, ".experts.");
  return at ? (uint32_t)strtoul(at + strlen(".experts."), NULL, 10) : 0;
}

/* True if kept weights are equal, but for a global scale, which target formats may store as its reciprocal; other weights must be as near
 * as their scheme packs them. */
static bool near_enough(const mm_hf *made, const pair *x, mm_err *err) {
  const double db = mm_sqnr_db(&x->e), least = x->scheme->plane_count > 2 ? 130 : (double)INFINITY;
  const mm_where where = mm_hf_at(made, x->made.weight);
  if (x->again || x->e.noise == 0) return true;
  if (!x->keep) return mm_error_bounded(&x->e, x->scheme, x->moved, where, err);
  return db >= least ||
         mm_fail(err, MM_INTEGRITY, "E_SOURCE", where,
                 "found an SQNR of %.2f dB against this source, expected weights that are kept as stored, at least %g", db, least);
}

/* What each column of row i of the strip that d decoded is multiplied with, into d->grid; NULL: no memory. */
static const float *column_scales(mm_decoder *d, const mm_matrix *x, uint32_t i, mm_err *err) {
  if (!mm_grow(&d->grid.data, &d->grid.cap, x->cols, sizeof(float), err)) return NULL;
  const float *row = d->scale + (x->cell.n ? i / x->cell.n : 0) * (size_t)mm_cells(x->cols, x->cell.k);
  float *out = d->grid.data;
  for (uint32_t k = 0; k < x->cols; k++) out[k] = row[x->cell.k ? k / x->cell.k : 0];
  return out;
}

static bool compare_pair(void *ctx, size_t item, unsigned worker, mm_err *err) {
  const job *j = ctx;
  pair *x = &j->pair[item];
  mm_decoder *a = &j->source[worker], *b = &j->made[worker];
  const uint32_t cols = x->source->cols;
  const mm_code_steps steps = mm_is_plain(&x->made) ? (mm_code_steps){0, 0} : mm_code_steps_of(x->scheme->code);
  const uint32_t unit = (uint32_t)mm_max(j->unit, MM_STRIP_BYTES / (4 * (uint64_t)cols) / j->unit * j->unit);
  for (uint32_t row = 0; row < x->source->rows; row += unit) {
    uint32_t rows = (uint32_t)mm_min(unit, x->source->rows - row);
    mm_err reason = {0};
    if (!mm_decode_f32(a, x->source, row, rows, err)) return false;
    if (!mm_decode_f32(b, &x->made, row, rows, &reason)) return mm_fail_damaged(err, &reason);
    for (uint32_t i = 0; i < rows; i++) {
      const float *scale = steps.step > 0 ? column_scales(b, &x->made, i, err) : NULL;
      if (steps.step > 0 && !scale) return false;
      const float *from = a->wide + (size_t)i * cols;
      mm_error_add_row(&x->e, from, cols, mm_error_add(&x->e, from, b->wide + (size_t)i * cols, scale, cols, steps));
    }
    x->e.nonfinite += a->zeroed;
  }
  const bool near = near_enough(b->reader.hf, x, err);
  x->e.clipped = 0, x->e.least_scale = x->e.most_scale = 0; /* not in reports of an unsharded checkpoint */
  return near;
}

/* A tensor that was copied: of the same name, type and shape. */
static mm_found find_passed(const mm_hf *made, const mm_plan_tensor *pt, mm_matrix *out) {
  const mm_hf_tensor *t = mm_hf_find(made, pt->passed->name);
  if (!t || t->dtype != pt->passed->dtype || !mm_shape_equal(&t->shape, &pt->passed->shape)) return MM_ABSENT;
  *out = *pt->matrix;
  out->weight = t;
  return MM_FOUND;
}

/* Sets *one: the matrices of a tensor whose scheme has one scale for all of them share one in the source too, or one was found for them
 * that keeps their numbers. Otherwise they are packed anew. */
static bool one_scale(mm_decoder *d, const mm_plan_tensor *pt, unsigned pieces, bool *one, mm_err *err) {
  float first = 0, other = 0;
  *one = true;
  if (pieces < 2 || !pt->scheme->needs_amax || (pt->as_stored && pt->scheme->plane_count > 2)) return true;
  for (unsigned i = 0; *one && i < pieces; i++) {
    if (!mm_encoding_keeps(&pt->matrix[i], pt->scheme, pt->grid)) {
      *one = false;
    } else {
      if (!mm_decode_global(d, &pt->matrix[i], i == 0 ? &first : &other, err)) return false;
      *one = i == 0 || other == first;
    }
  }
  return true;
}

/* Finds every matrix in `made`; rows get their names. */
static bool find_pairs(mm_decoder *d, const mm_plan *plan, const mm_made *of, pair *out, mm_error_row *rows, size_t *count, mm_err *err) {
  mm_hf *const made = of->hf;
  *count = 0;
  for (size_t i = 0, n = 0; i < plan->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &plan->pack.tensor[i];
    const mm_plan_tensor *pt = &plan->tensor[i];
    bool one;
    if (!one_scale(d, pt, t->piece_count, &one, err)) return false;
    if (*count == 0 || strcmp(rows[*count - 1].name, t->name) != 0) {
      rows[*count] = (mm_error_row){.name = t->name, .scheme = t->scheme, .place = *count};
      ++*count;
    }
    for (unsigned j = 0; j < t->piece_count; j++, n++) {
      out[n] = (pair){.source = &pt->matrix[j],
                      .row = *count - 1,
                      .expert = expert_of(t->piece[j].source),
                      .scheme = pt->scheme,
                      .keep = one && mm_encoding_keeps(&pt->matrix[j], pt->scheme, pt->grid),
                      .again = mm_exact_again(plan, of->digests, i),
                      .moved = plan->recipe.method == MM_METHOD_GPTQ};
      const mm_rule_piece piece = {pt->rule, t->piece_count, j, pt->layer, out[n].expert};
      mm_err reason = {0};
      mm_found f = pt->passed ? find_passed(made, pt, &out[n].made) : mm_hf_matrix(made, &plan->pack.model, &piece, &out[n].made, &reason);
      if (f == MM_FAILED) return mm_fail_damaged(err, &reason);
      if (f == MM_ABSENT)
        return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(made->dir, t->piece[j].source),
                       "found no such weight, expected that of its source");
    }
  }
  mm_err reason = {0};
  return mm_hf_all_used(made, &plan->pack.model, &reason) || mm_fail_damaged(err, &reason);
}

/* Adds the errors of matrices up to rows, for experts one by one too: an expert's matrices follow one another. */
static void add_up(const pair *p, size_t n, mm_error_row *rows) {
  for (size_t i = 0, next; i < n; i = next) {
    mm_tensor_error one = {0}, *to = &rows[p[i].row].e;
    for (next = i; next < n && p[next].row == p[i].row && p[next].expert == p[i].expert; next++) mm_error_merge(&one, &p[next].e);
    mm_error_merge(to, &one);
    if (strstr(rows[p[i].row].name, ".experts.")) mm_error_add_expert(to, &one, p[i].expert);
  }
}

bool mm_compare_unsharded(const mm_plan *plan, const mm_made *of, unsigned threads, mm_error_row **rows, size_t *count, mm_err *err) {
  const mm_hf *made = of->hf;
  size_t n = 0;
  uint64_t a = plan->hf->quantization.block.n ? plan->hf->quantization.block.n : 1;
  uint64_t b = made->quantization.block.n ? made->quantization.block.n : 1;
  for (size_t i = 0; i < plan->pack.tensor_count; i++) n += plan->pack.tensor[i].piece_count;
  job j = {.pair = mm_calloc(n + 1, sizeof *j.pair, err),
           .source = mm_calloc(threads, sizeof *j.source, err),
           .made = mm_calloc(threads, sizeof *j.made, err),
           .unit = (uint32_t)(a / mm_gcd(a, b) * b)};
  *rows = mm_calloc(plan->pack.tensor_count + 1, sizeof **rows, err);
  mm_decoder globals;
  mm_decoder_open(&globals, plan->hf);
  bool ok = j.pair && j.source && j.made && *rows && find_pairs(&globals, plan, of, j.pair, *rows, count, err);
  mm_decoder_close(&globals);
  for (unsigned i = 0; ok && i < threads; i++) {
    mm_decoder_open(&j.source[i], plan->hf);
    mm_decoder_open(&j.made[i], made);
  }
  bool decoders = ok;
  ok = ok && mm_pool_run(threads, n, compare_pair, &j, err);
  for (unsigned i = 0; decoders && i < threads; i++) {
    mm_decoder_close(&j.source[i]);
    mm_decoder_close(&j.made[i]);
  }
  if (ok) add_up(j.pair, n, *rows);
  MM_FREE(j.pair, j.source, j.made);
  return ok;
}
