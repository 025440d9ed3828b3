/* A sample of a finished output held against its source. */
#include <stdlib.h>
#include <string.h>

#include "convert/decode/follow.h"
#include "convert/report/exact.h"
#include "convert/write/step.h"
#include "formats/system/pool.h"

typedef struct sample_job {
  const mm_plan *plan;
  const char *dir;
  const mm_stored *stored; /* its parts */
  size_t *step, steps;     /* those that are looked at */
  mm_worker *worker;       /* [threads] */
} sample_job;

/* The bytes at their place in the part's file are those that this source gives. */
static bool compare_stored(void *ctx, const mm_given *g, mm_err *err) {
  const sample_job *job = ctx;
  const mm_plan *p = job->plan;
  const uint32_t part = p->tensor[g->strip->tensor].part;
  if (!mm_plan_wants(p, part, g->rank)) return true;
  const mm_part *file = mm_plan_entry(p, part, g->rank);
  uint8_t *found = mm_calloc(g->n, 1, err);
  bool ok = found && job->stored->read(job->stored->ctx, file, p->part[part].file[g->rank].header_bytes + g->offset, found, g->n, err);
  if (ok && memcmp(found, g->bytes, g->n) != 0)
    ok = mm_fail(err, MM_USAGE, "E_RESUME", mm_at(mm_path_of(job->dir, file->file).text, p->pack.tensor[g->strip->tensor].name),
                 "found a finished conversion of another source, whose names, types and sizes are the same; --force replaces it");
  free(found);
  return ok;
}

/* True where the source is complete, or the files of the step's matrices have come and are not freed. */
static bool is_there(const mm_plan *p, const mm_step *s, bool *there, mm_err *err) {
  const uint32_t pieces = p->pack.tensor[s->tensor].piece_count, last = s->piece == MM_ALL_PIECES ? pieces - 1 : s->piece;
  const mm_matrix *entry = &p->tensor[s->tensor].matrix[(size_t)s->lead * pieces];
  bool ok = *there = true;
  if (!p->hf->follow) return true;
  for (uint32_t i = s->piece == MM_ALL_PIECES ? 0 : s->piece; ok && *there && i <= last; i++) {
    ok = mm_follow_look(p->hf, entry[i].weight->file, there, err);
    for (unsigned c = 0; ok && *there && c < MM_COMPANIONS; c++)
      if (entry[i].part[c].tensor) ok = mm_follow_look(p->hf, entry[i].part[c].tensor->file, there, err);
  }
  return ok;
}

static bool sample_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  sample_job *job = ctx;
  const mm_taker to = {compare_stored, job};
  const mm_step *s = &job->plan->step[job->step[item]];
  bool there;
  mm_pool_at(job->plan->pack.tensor[s->tensor].name);
  if (!is_there(job->plan, s, &there, err)) return false;
  return !there || mm_step_give(&job->worker[worker], job->plan, s, &to, err);
}

/* Lists the first step of each piece of a tensor, in a stack of its first matrix. */
static void choose(sample_job *job) {
  const mm_plan *p = job->plan;
  size_t first = 0; /* of the tensor */
  for (size_t i = 0; i < p->step_count; i++) {
    const mm_step *s = &p->step[i];
    const bool begins = i == 0 || s->tensor != s[-1].tensor;
    if (begins) first = i;
    if ((begins || (s->lead == p->step[first].lead && s->piece != s[-1].piece)) && mm_exact_again(p, &p->pack, s->tensor))
      job->step[job->steps++] = i;
  }
}

static bool same_companions(const mm_plan *plan, const char *dir, const char *baked, mm_err *err) {
  mm_pack made = {0};
  mm_err reason = {0};
  bool ok = strcmp(plan->layout->last, MM_MANIFEST) == 0 ? mm_pack_open(&made, dir, err) : mm_digests_open(&made, dir, err);
  if (ok && !mm_companions_same(plan, &made, NULL, baked, &reason))
    ok = reason.status != MM_INTEGRITY ? mm_fail_as(err, &reason)
                                       : mm_fail(err, MM_USAGE, "E_RESUME", mm_at(NULL, NULL),
                                                 "found a finished conversion of another source (%s); --force replaces it", reason.text);
  mm_pack_close(&made);
  return ok;
}

bool mm_exact_sample(const mm_plan *plan, const char *dir, const mm_stored *stored, const char *baked, unsigned threads, mm_err *err) {
  if (!same_companions(plan, dir, baked, err)) return false;
  sample_job job = {.plan = plan,
                    .dir = dir,
                    .stored = stored,
                    .step = mm_calloc(plan->step_count, sizeof *job.step, err),
                    .worker = mm_calloc(threads, sizeof *job.worker, err)};
  bool ok = job.step && job.worker;
  if (ok) choose(&job);
  for (unsigned i = 0; ok && i < threads; i++) mm_worker_open(&job.worker[i], plan->hf);
  const bool opened = ok;
  ok = ok && mm_pool_run(threads, job.steps, sample_step, &job, err);
  for (unsigned i = 0; opened && i < threads; i++) mm_worker_close(&job.worker[i]);
  free(job.step);
  free(job.worker);
  return ok;
}
