/* A packed checkpoint held against what its source gives. */
#include "convert/report/exact.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "convert/write/step.h"
#include "formats/system/pool.h"

/* ---- words ---- */

static bool check_sources(const mm_pack *want, const mm_pack *p, mm_err *err) {
  if (p->source_count != want->source_count)
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, NULL),
                   "found fingerprints of %zu source files, expected %zu from this source", p->source_count, want->source_count);
  for (size_t i = 0; i < p->source_count; i++) {
    const mm_pack_file *a = &p->source[i], *b = &want->source[i];
    if (strcmp(a->name, b->name) == 0 && a->size == b->size && mm_digest_equal(&a->sha256, &b->sha256)) continue;
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, NULL),
                   "found the fingerprint %s, %llu bytes, header %s, expected %s, %llu bytes, header %s of this source", a->name,
                   (unsigned long long)a->size, mm_digest_hex(&a->sha256).text, b->name, (unsigned long long)b->size,
                   mm_digest_hex(&b->sha256).text);
  }
  return true;
}

static bool check_left_out(const mm_pack *want, const mm_pack *p, mm_err *err) {
  bool same = p->left_out_count == want->left_out_count;
  for (size_t i = 0; same && i < want->left_out_count; i++) {
    const mm_left_out *a = &p->left_out[i], *b = &want->left_out[i];
    same = strcmp(a->prefix, b->prefix) == 0 && a->tensors == b->tensors && a->bytes == b->bytes;
  }
  return same ||
         mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, NULL),
                 "found other tensors said to be left out than this source's that have no place in a packed checkpoint, expected the same");
}

bool mm_exact_words(const mm_plan *plan, const mm_pack *p, mm_err *err) {
  const mm_pack *want = &plan->pack;
  const char *key;
  if (!p->target_format && !mm_model_same(&p->model, &want->model, &key))
    return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, NULL),
                   "found another model than that of this source, expected the same \"%s\"", key);
  for (size_t i = 0; !plan->recipe.act_scales && i < p->tensor_count; i++)
    if (p->tensor[i].input_scale != want->tensor[i].input_scale)
      return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, p->tensor[i].name),
                     "found input_scale %.9g, expected %.9g from this source", (double)p->tensor[i].input_scale,
                     (double)want->tensor[i].input_scale);
  for (size_t i = 0; i < p->tensor_count; i++)
    if (!mm_pack_same_steps(&p->tensor[i], &want->tensor[i]))
      return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(p->dir, p->tensor[i].name),
                     "found other global_steps than those of this source's global scales, expected the same");
  return (p->target_format || check_left_out(want, p, err)) && check_sources(want, p, err);
}

/* ---- weights ---- */

bool mm_exact_again(const mm_plan *plan, const mm_pack *p, size_t i) {
  if (plan->tensor[i].scheme->code == MM_CODE_PLAIN) return true;
  return strcmp(plan->pack.tool, p->tool) == 0 && plan->recipe.method == MM_METHOD_NEAREST &&
         !(plan->recipe.importance && plan->tensor[i].search != MM_SEARCH_ABSMAX);
}

typedef struct exact_job {
  const mm_plan *plan;
  const mm_shards *s;
  mm_worker *worker; /* [threads] */
} exact_job;

static bool compare_given(void *ctx, const mm_given *g, mm_err *err) {
  const exact_job *job = ctx;
  const mm_pack *p = &job->s->pack;
  const mm_strip *x = g->strip;
  const uint32_t rank = x->t->stage * p->tp + g->rank;
  if (p->rank[rank].part_count == 0 || !(x->keep || mm_exact_again(job->plan, p, x->tensor))) return true;
  const mm_packed m = mm_shards_tensor(job->s, rank, x->tensor);
  const uint8_t *found = (const uint8_t *)m.plane[g->plane] + g->at, *expected = g->bytes;
  if (memcmp(found, expected, g->n) == 0) return true;
  size_t i = 0;
  while (found[i] == expected[i]) i++;
  const mm_shard_plane *at = &job->s->rank[rank].plane[(size_t)x->tensor * MM_PACK_PLANES + g->plane];
  const mm_path path = mm_path_of(p->dir, p->rank[rank].part[at->part].file);
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at_offset(path.text, p->tensor[x->tensor].name, at->offset + g->at + i),
                 "found byte 0x%02x, expected 0x%02x of %s, rows from %u, %s", found[i], expected[i], x->x->weight->original, x->row,
                 x->keep ? "which is kept as stored" : "which is packed so");
}

static bool check_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  exact_job *job = ctx;
  const mm_taker to = {compare_given, job};
  if (mm_step_idle(job->plan, &job->plan->step[item])) return true;
  mm_pool_at(job->plan->pack.tensor[job->plan->step[item].tensor].name);
  return mm_step_give(&job->worker[worker], job->plan, &job->plan->step[item], &to, err);
}

bool mm_exact_weights(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_err *err) {
  exact_job job = {.plan = plan, .s = s, .worker = mm_calloc(threads, sizeof *job.worker, err)};
  if (!job.worker) return false;
  for (unsigned i = 0; i < threads; i++) mm_worker_open(&job.worker[i], plan->hf);
  const bool ok = mm_pool_run(threads, plan->step_count, check_step, &job, err);
  for (unsigned i = 0; i < threads; i++) mm_worker_close(&job.worker[i]);
  free(job.worker);
  return ok;
}

/* ---- bounds ---- */

bool mm_exact_bounds(const mm_plan *plan, const mm_shards *s, const mm_tensor_error *e, mm_err *err) {
  for (size_t i = 0; i < s->pack.tensor_count; i++) {
    const mm_scheme *scheme = plan->tensor[i].scheme;
    if (scheme->code == MM_CODE_PLAIN || e[i].count == 0 || e[i].noise == 0 || mm_exact_again(plan, &s->pack, i)) continue;
    const mm_where where = mm_at(s->pack.dir, s->pack.tensor[i].name);
    const bool moved = plan->recipe.method == MM_METHOD_GPTQ; /* to make up for others' errors */
    if (!mm_error_bounded(&e[i], scheme, moved, where, err)) return false;
  }
  return true;
}
