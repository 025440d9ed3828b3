/* An unsharded checkpoint held against what its source gives. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan/card.h"
#include "convert/plan/layout_hf.h"
#include "convert/plan/target_format.h"
#include "convert/report/exact.h"
#include "convert/write/step.h"
#include "formats/system/pool.h"

/* ---- texts ---- */

static bool another(const mm_pack *p, const char *name, const char *what, mm_err *err) {
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(mm_path_of(p->dir, name).text, NULL), "%s", what);
}

/* A config as JSON without its quantization; free() it. */
static char *plain_config(const mm_hf *hf, mm_err *err) {
  mm_json *config = mm_target_format_plain(hf, err);
  return config ? mm_json_text(config, false, err) : NULL;
}

static bool same_config(const mm_plan *plan, const mm_hf *made, const mm_pack *p, mm_err *err) {
  char *found = plain_config(made, err), *expected = plain_config(plan->hf, err);
  bool ok = found && expected;
  if (ok && strcmp(found, expected) != 0)
    ok = another(p, "config.json", "found other keys or values than this source has, its quantization left out", err);
  free(found);
  free(expected);
  return ok;
}

/* A text of the plan among the files, byte for byte. */
static bool same_text(const mm_pack *p, const mm_plan_text *t, mm_err *err) {
  const mm_digest d = mm_sha256(t->text, strlen(t->text));
  for (size_t i = 0; i < p->file_count; i++)
    if (strcmp(p->file[i].name, t->name) == 0 && mm_digest_equal(&p->file[i].sha256, &d)) return true;
  return another(p, t->name, "found another file than this version writes for this source", err);
}

bool mm_exact_texts(const mm_plan *plan, const mm_hf *made, const mm_pack *p, mm_err *err) {
  const bool named = plan->text[0].name != NULL;
  mm_digest digest;
  uint64_t bytes;
  if (!same_config(plan, made, p, err)) return false;
  if (!mm_unsharded_plan(p->dir, &digest, err) || !mm_digest_equal(&digest, &p->plan))
    return another(p, MM_INDEX_NAME, "found another plan than that of the digests", err);
  if (mm_hf_total_wrong(made, &bytes)) return another(p, MM_INDEX_NAME, "found another total_size than that of its tensors", err);
  if (!named) return true;
  if (strcmp(mm_target_format_name(plan->target_format), p->target_format) != 0)
    return another(p, MM_DIGESTS, "found another format of quantization than this source and recipe give", err);
  bool own_file = false;
  for (size_t i = 0; i < MM_PLAN_TEXTS && plan->text[i].name; i++) {
    const mm_plan_text *t = &plan->text[i];
    if (strcmp(t->name, MM_CARD) == 0) continue;
    own_file = own_file || mm_target_format_file(t->name);
    if (strcmp(plan->pack.tool, p->tool) == 0 && !same_text(p, t, err)) return false;
  }
  for (size_t i = 0; !own_file && i < p->file_count; i++)
    if (mm_target_format_file(p->file[i].name)) return another(p, p->file[i].name, "found a file that no conversion writes", err);
  return true;
}

/* ---- static scales of activations ---- */

/* Sets *equal: tensor i of the plan has, in its first piece, the stored scale of its inputs. */
static bool has_input_scale(const mm_plan *plan, const mm_hf *made, uint32_t i, bool *equal, mm_err *err) {
  mm_arena names = {0};
  const float scale = plan->pack.tensor[i].input_scale, expected = plan->tensor[i].naming->reciprocal ? 1 / scale : scale;
  const char *name = plan->layout->name(plan, i, 0, plan->tensor[i].scheme->plane_count, &names, err);
  float found = 0;
  bool ok = name != NULL;
  for (size_t j = 0; ok && j < made->tensor_count; j++) {
    const mm_hf_tensor *t = &made->tensor[j];
    if (strcmp(t->original, name) != 0 || t->bytes != sizeof found) continue;
    mm_hf_reader reader;
    mm_hf_reader_open(&reader, made);
    ok = mm_hf_read(&reader, t, 0, &found, sizeof found, err);
    mm_hf_reader_close(&reader);
    break;
  }
  mm_arena_close(&names);
  *equal = found == expected;
  return ok;
}

bool mm_exact_inputs(mm_plan *plan, const mm_hf *made, mm_err *err) {
  const size_t n = plan->pack.tensor_count;
  float *own = mm_calloc(n + 1, sizeof *own, err);
  if (!own) return false;
  for (size_t i = 0; i < n; i++) own[i] = plan->pack.tensor[i].input_scale;
  mm_plan_join_inputs(plan);
  size_t first = 0;
  while (first < n && plan->pack.tensor[first].input_scale == own[first]) first++;
  bool joint = false;
  const bool ok = first == n || !plan->tensor[first].naming || has_input_scale(plan, made, (uint32_t)first, &joint, err);
  for (size_t i = 0; !joint && i < n; i++) plan->pack.tensor[i].input_scale = own[i];
  free(own);
  return ok;
}

/* ---- tensors ---- */

typedef struct thread_state {
  mm_worker worker;
  mm_hf_reader reader;
  void *found;
  size_t cap;
} thread_state;

typedef struct unsharded_job {
  const mm_plan *plan;
  const mm_pack *p;
  const mm_hf *made;
  const mm_hf_tensor **by_name; /* [made->tensor_count] in order of their names in the files */
  thread_state *state;          /* [threads] */
} unsharded_job;

typedef struct taking {
  const unsharded_job *job;
  thread_state *state;
} taking;

static int by_original(const void *a, const void *b) {
  return strcmp((*(const mm_hf_tensor *const *)a)->original, (*(const mm_hf_tensor *const *)b)->original);
}

static const mm_hf_tensor *find_stored(const unsharded_job *job, const mm_strip *x, unsigned plane, mm_err *err) {
  mm_arena names = {0};
  const mm_layout *layout = job->plan->layout;
  mm_hf_tensor key = {.original = layout->name(job->plan, x->tensor, x->piece, plane, &names, err)}, *at = &key;
  const mm_hf_tensor *const *hit = key.original ? bsearch(&at, job->by_name, job->made->tensor_count, sizeof(void *), by_original) : NULL;
  const mm_shape shape = layout->shape(job->plan, x->tensor, x->piece, plane);
  const mm_hf_tensor *t = hit ? *hit : NULL;
  if (key.original && (!t || t->dtype != x->t->plane[plane].dtype || !mm_shape_equal(&t->shape, &shape))) {
    t = NULL;
    mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(job->p->dir, key.original), "found no such tensor, or another type or shape of it");
  }
  mm_arena_close(&names);
  return t;
}

static bool compare_given(void *ctx, const mm_given *g, mm_err *err) {
  const taking *x = ctx;
  const mm_strip *s = g->strip;
  const mm_hf_tensor *t = find_stored(x->job, s, g->plane, err);
  if (!t) return false;
  if (!s->keep && !mm_exact_again(x->job->plan, x->job->p, s->tensor)) return true;
  if (!mm_grow(&x->state->found, &x->state->cap, g->n, 1, err) || !mm_hf_read(&x->state->reader, t, g->at, x->state->found, g->n, err))
    return false;
  const uint8_t *expected = g->bytes, *found = x->state->found;
  if (memcmp(found, expected, g->n) == 0) return true;
  size_t i = 0;
  while (found[i] == expected[i]) i++;
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at_offset(x->job->made->file[t->file].path, t->original, t->offset + g->at + i),
                 "found byte 0x%02x, expected 0x%02x of this source, %s", found[i], expected[i],
                 s->keep ? "which is kept as stored" : "which is packed so");
}

static bool check_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  unsharded_job *job = ctx;
  taking x = {job, &job->state[worker]};
  const mm_taker to = {compare_given, &x};
  return mm_step_give(&x.state->worker, job->plan, &job->plan->step[item], &to, err);
}

/* The plan names every tensor that is stored, once. */
static bool same_count(const unsharded_job *job, mm_err *err) {
  size_t n = 0;
  for (size_t i = 0; i < job->plan->pack.tensor_count; i++)
    n += (size_t)job->plan->pack.tensor[i].piece_count * job->plan->pack.tensor[i].plane_count;
  return n == job->made->tensor_count || mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(job->p->dir, NULL),
                                                 "found %zu tensors, expected %zu from this source", job->made->tensor_count, n);
}

bool mm_exact_unsharded(const mm_plan *plan, const mm_hf *made, const mm_pack *p, unsigned threads, mm_err *err) {
  if (!plan->text[0].name) return true; /* static scales of activations are not at hand: mm_compare_unsharded decides */
  unsharded_job job = {.plan = plan,
                       .p = p,
                       .made = made,
                       .by_name = mm_calloc(made->tensor_count + 1, sizeof *job.by_name, err),
                       .state = mm_calloc(threads, sizeof *job.state, err)};
  bool ok = job.by_name && job.state && same_count(&job, err);
  for (size_t i = 0; job.by_name && i < made->tensor_count; i++) job.by_name[i] = &made->tensor[i];
  if (job.by_name) qsort(job.by_name, made->tensor_count, sizeof *job.by_name, by_original);
  for (unsigned i = 0; job.state && i < threads; i++) {
    mm_worker_open(&job.state[i].worker, plan->hf);
    mm_hf_reader_open(&job.state[i].reader, made);
  }
  ok = ok && mm_pool_run(threads, plan->step_count, check_step, &job, err);
  for (unsigned i = 0; job.state && i < threads; i++) {
    mm_worker_close(&job.state[i].worker);
    mm_hf_reader_close(&job.state[i].reader);
    free(job.state[i].found);
  }
  MM_FREE(job.by_name, job.state);
  return ok;
}
