/* The main loop of a conversion. */
#include "convert/write/convert.h"

#include <stdlib.h>

#include "convert/decode/follow.h"
#include "convert/plan/fill.h"
#include "convert/plan/finished.h"
#include "convert/write/step.h"
#include "formats/system/pool.h"

typedef struct mm_convert_job {
  mm_plan *p;
  mm_writer *out;
  mm_worker *worker; /* [threads] */
  mm_convert_progress *progress;
  size_t first; /* step of item 0 */
  bool ended;   /* all parts of the plan are made */
} mm_convert_job;

static uint64_t step_bytes(const mm_plan *p, const mm_step *s) {
  const mm_pack_tensor *t = &p->pack.tensor[s->tensor];
  const mm_plan_tensor *pt = &p->tensor[s->tensor];
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < t->piece_count; i++) {
    const mm_matrix *x = &pt->matrix[s->lead * t->piece_count + i];
    if (s->piece == MM_ALL_PIECES || s->piece == i)
      bytes += (uint64_t)(s->piece == MM_ALL_PIECES ? x->rows : s->rows) * x->cols * mm_code_bits(x) / 8;
  }
  return bytes;
}

static bool do_item(void *ctx, size_t item, unsigned worker, mm_err *err) {
  mm_convert_job *job = ctx;
  uint32_t step = (uint32_t)(job->first + item);
  const mm_step *s = &job->p->step[step];
  mm_worker *w = &job->worker[worker];
  uint64_t bytes = step_bytes(job->p, s);
  if (atomic_load(&job->progress->stop))
    return mm_fail(err, MM_INTERRUPTED, "E_INTERRUPTED", mm_at(NULL, NULL), "stopped by a signal; --resume continues");
  const bool kept = job->out->skip[step];
  if (kept) atomic_fetch_add(&job->progress->kept_bytes, bytes);
  if (!kept && !mm_step_of_head(job->p, s) && mm_step_idle(job->p, s)) { /* of experts or layers that none of --ranks has */
    atomic_fetch_add(&job->progress->read_bytes, bytes);
    return true;
  }
  /* Which rows of the head are zero no journal says: they are found again. */
  mm_pool_at(job->p->pack.tensor[s->tensor].name);
  if ((!kept || mm_step_of_head(job->p, s)) &&
      (!mm_step_run(w, job->p, s, kept ? NULL : &job->out->blocks, err) || !mm_writer_dead_rows(job->out, w->dead, w->dead_count, err)))
    return false;
  if (!kept) {
    atomic_fetch_add(&job->progress->zeroed, w->zeroed);
    mm_step_entry e = {.step = step, .zeroed = w->zeroed, .put = w->log.put, .put_count = w->log.count};
    w->log = (mm_put_log){0};
    if (!mm_writer_step_done(job->out, &e, bytes, err)) return false;
  }
  atomic_fetch_add(&job->progress->read_bytes, bytes);
  return true;
}

static bool run_item(void *ctx, size_t item, unsigned worker, mm_err *err) {
  const bool ok = do_item(ctx, item, worker, err);
  if (!ok) mm_follow_abandon(((mm_convert_job *)ctx)->p->hf, err); /* others may wait for a file that is hours away */
  return ok;
}

/* Files that no part behind this one needs leave the disk, if the user wants that. */
static bool free_sources(mm_convert_job *job, uint32_t part, unsigned threads, mm_err *err) {
  if (!mm_follow_frees(job->p->hf)) return true;
  for (unsigned i = 0; i < threads; i++) mm_hf_reader_close(&job->worker[i].source.reader);
  return mm_followed_part_done(job->out, part, err);
}

static bool run_parts(mm_convert_job *job, unsigned threads, mm_err *err) {
  mm_plan *p = job->p;
  size_t end = 0;
  for (uint32_t part = 0; part < p->part_count; part++) {
    job->first = end;
    while (end < p->step_count && p->tensor[p->step[end].tensor].part == part) end++;
    if (part % job->out->o.shards != job->out->o.shard) continue;
    bool finished;
    if (!mm_writer_begin_part(job->out, part, &finished, err) || !mm_pool_run(threads, end - job->first, run_item, job, err) ||
        !(finished || mm_writer_end_part(job->out, err)) || !free_sources(job, part, threads, err))
      return false;
    for (uint32_t r = 0; r < p->pack.tp; r++) atomic_fetch_add(&job->progress->written_bytes, p->part[part].file[r].size);
  }
  return true;
}

static bool run_all(mm_convert_job *job, unsigned threads, mm_digest *manifest, mm_err *err) {
  job->worker = mm_calloc(threads, sizeof *job->worker, err);
  if (!job->worker) return false;
  for (unsigned i = 0; i < threads; i++) mm_worker_open(&job->worker[i], job->p->hf);
  bool ok = run_parts(job, threads, err);
  atomic_fetch_add(&job->progress->zeroed, job->out->zeroed); /* of the runs before */
  ok = ok && mm_importance_unchanged(job->p->importance, err);
  job->ended = ok;
  ok = ok && (job->out->o.shards > 1 || mm_writer_publish(job->out, manifest, err));
  for (unsigned i = 0; i < threads; i++) mm_worker_close(&job->worker[i]);
  free(job->worker);
  return ok;
}

/* True for failures after which a later run can continue: all but a wrong input or request while there are weights to convert. */
static bool resumable(mm_status s) {
  return s == MM_INTERRUPTED || s == MM_IO || s == MM_LIMIT || s == MM_BUG || s == MM_USAGE /* a journal that is not believed */;
}

bool mm_convert_run(mm_plan *p, const mm_writer_options *o, mm_convert_progress *progress, mm_digest *manifest, mm_err *err) {
  mm_writer out;
  mm_convert_job job = {.p = p, .out = &out, .progress = progress};
  mm_writer_options with = *o;
  with.threads = mm_file_threads(o->threads, 4, 2 * p->pack.tp); /* two sources and a file of each rank, each also direct */
  bool opened = mm_writer_open(&out, p, &with, err);
  if (opened && out.complete) { /* nothing is left to do */
    atomic_store(&progress->read_bytes, p->source_bytes);
    atomic_store(&progress->kept_bytes, p->source_bytes);
  }
  if (opened && out.complete && o->followed && !mm_followed_end(&out, err)) opened = false;
  bool ok = opened && (out.complete ? mm_finished_digest(p, o->target, manifest, err) : run_all(&job, with.threads, manifest, err));
  if (!ok && err->status == MM_INTERRUPTED) {
    mm_err late = {0}; /* the interruption is reported; without this record more is done again, nothing else */
    mm_either_way(mm_writer_commit(&out, &late));
  }
  mm_writer_close(&out, ok || (opened ? job.ended || p->hf->follow || resumable(err->status) : !out.fresh));
  return ok;
}
