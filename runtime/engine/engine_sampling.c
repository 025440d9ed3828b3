/* Samples tokens from logits: on the device, or here on the CPU. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/engine_inside.h"

bool mm_engine_resolve(mm_engine *e, mm_batch *batch, mm_err *err) {
  if (!MM_GROW(e->host.id, &e->host.id_cap, batch->tokens, err)) return false;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    for (uint32_t t = s->first; t < s->first + s->count; t++)
      e->host.id[t] = batch->id[t] == MM_ID_SAMPLED ? e->slot[s->slot].sampled_id : batch->id[t];
  }
  batch->id = e->host.id;
  return true;
}

static void defer_rows(mm_engine *e, const mm_batch *batch) {
  const mm_span *s = batch->span;
  for (uint32_t i = 0; i < batch->out_count; i++) {
    const uint32_t row = batch->out[i];
    while (row >= s->first + s->count) s++;
    e->unsampled.row[i] = (output_row){s->slot, s->pos + (row - s->first)};
  }
  e->unsampled.count = batch->out_count;
}

/* The pass; its logits stay here, or on the device that samples. */
static bool run_pass(mm_engine *e, mm_batch *batch, mm_err *err) {
  if (!MM_GROW(e->unsampled.row, &e->unsampled.cap, batch->out_count, err)) return false;
  if (e->device_samples) return mm_engine_run_step(e, batch, NULL, true, err);
  return MM_GROW(e->host.logits, &e->host.logits_cap, batch->out_count * (size_t)e->model->vocab, err) &&
         mm_engine_resolve(e, batch, err) && mm_engine_run_step(e, batch, e->host.logits, false, err);
}

bool mm_engine_forward(mm_engine *e, const mm_batch *given, mm_err *err) {
  mm_batch batch = *given;
  batch.sampling = NULL;
  if (e->device_samples && !e->config.ops->sampler.defer)
    return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                   "found logits that wait for their sampling; device %s samples at once", e->config.ops->name);
  e->unsampled.count = 0;
  if (!mm_engine_prepare(e, &batch, err)) return false;
  const bool done = run_pass(e, &batch, err);
  mm_engine_update_slots(e, &batch, done);
  if (done) defer_rows(e, &batch);
  return done;
}

/* Samples one row; the token becomes the slot's last one if the row is the slot's last. */
static int32_t sample_row(mm_engine *e, const mm_sampling *set, const output_row *row, float *logits) {
  for (size_t v = 0; v < e->model->vocab; v++)
    if (e->never[v]) logits[v] = -INFINITY;
  float *own = logits;
  if (set->logprobs) { /* of what the model said; the adjusted copy lies behind all rows */
    own = e->host.logits + (size_t)e->unsampled.count * e->model->vocab;
    memcpy(own, logits, e->model->vocab * sizeof *own);
  }
  const bool held = row->slot >= 0;
  mm_sample_adjust(e->host.sampler, set, held ? mm_engine_history(e, (uint32_t)row->slot) : NULL, held ? row->pos + 1 : 0, own);
  const int32_t id = mm_sample(e->host.sampler, set, row->pos + UINT64_C(1), own);
  if (set->logprobs) mm_sample_logprobs(e->host.sampler, set, id, logits);
  if (!held || row->pos + 1 != e->slot[row->slot].held) return id;
  e->slot[row->slot].sampled = true;
  e->slot[row->slot].sampled_id = id < 0 ? 0 : id;
  return id;
}

/* Checks that the settings of every row are in range and supported by the device. */
static bool check_sampling(const mm_engine *e, const mm_sampling *sampling, uint32_t n, mm_err *err) {
  if (e->queue.queued - e->queue.collected == MM_QUEUE)
    return mm_engine_refuse(err, "batches queued before batch", e->batches, MM_QUEUE, "less than", MM_QUEUE);
  for (uint32_t i = 0; i < n; i++) {
    if (!mm_sampling_check(&sampling[i], e->model->vocab, err)) return false;
    const uint32_t lacks = e->device_samples ? mm_sampling_options(&sampling[i]) & ~e->config.ops->sampler.samples : 0;
    if (lacks)
      return mm_fail(err, MM_UNSUPPORTED, "E_SAMPLING", mm_at(NULL, NULL), "found %s for row %u; device %s has none",
                     mm_sampling_word(lacks), i, e->config.ops->name);
  }
  return true;
}

static uint32_t next_queued(const mm_engine *e) { return (uint32_t)(e->queue.queued % MM_QUEUE); }

static void note_queued(mm_engine *e, uint32_t outs) {
  const uint32_t at = next_queued(e);
  mm_engine_note_queued(e, at, outs);
  e->queue.queued++;
  e->queue.outstanding[at] = outs, e->queue.pass_of[at] = e->queue.passes;
}

/* The device samples from the logits of the pass before; slots whose last rows are among them can go on with MM_ID_SAMPLED. */
static bool sample_on_device(mm_engine *e, const mm_sampling *sampling, mm_err *err) {
  sampling = mm_engine_sort_sampling(e, sampling, e->unsampled.count, err);
  if (!sampling || !mm_engine_reserve_queued(e, next_queued(e), e->unsampled.count, err) ||
      !mm_engine_run_task(e, &(task){.kind = SAMPLE_DEFERRED, .sample = {sampling, e->unsampled.count}}, err)) {
    e->unsampled.count = 0; /* the device has dropped them */
    return false;
  }
  for (uint32_t i = 0; i < e->unsampled.count; i++) {
    const output_row *row = &e->unsampled.row[i];
    if (row->slot >= 0 && row->pos + 1 == e->slot[row->slot].held) e->slot[row->slot].sampled = true;
  }
  note_queued(e, e->unsampled.count);
  e->unsampled.count = 0;
  return true;
}

bool mm_engine_sample(mm_engine *e, const mm_sampling *sampling, mm_err *err) {
  if (!check_sampling(e, sampling, e->unsampled.count, err)) return false;
  if (e->device_samples) return sample_on_device(e, sampling, err);
  const uint32_t at = (uint32_t)(e->queue.queued % MM_QUEUE), n = e->unsampled.count;
  sampled_tokens *to = &e->host.sampled[at];
  const size_t vocab = e->model->vocab;
  if (!MM_GROW(to->id, &to->cap, n, err) || !MM_GROW(e->host.logits, &e->host.logits_cap, (n + (size_t)1) * vocab, err)) return false;
  for (uint32_t i = 0; i < n; i++) to->id[i] = sample_row(e, &sampling[i], &e->unsampled.row[i], e->host.logits + i * vocab);
  e->unsampled.count = 0;
  e->queue.outstanding[at] = n;
  e->queue.queued++;
  return true;
}

uint32_t mm_engine_samples(const mm_engine *e) { return e->device_samples ? e->config.ops->sampler.samples : UINT32_MAX; }
bool mm_engine_queues(const mm_engine *e) { return e->device_samples; }
bool mm_engine_defers(const mm_engine *e) { return e->device_samples && e->config.ops->sampler.defer; }

bool mm_engine_queue(mm_engine *e, const mm_batch *given, mm_err *err) {
  static const mm_sampling none;
  mm_batch batch = *given;
  if (!batch.sampling && !batch.out_count) batch.sampling = &none; /* which distinguishes a queued step from others */
  if (!check_sampling(e, batch.sampling, batch.out_count, err)) return false;
  if (!e->device_samples) {
    if (!mm_engine_forward(e, given, err)) return false;
    if (mm_engine_sample(e, given->sampling, err)) return true;
    mm_engine_update_slots(e, given, false);
    return false;
  }
  e->unsampled.count = 0;
  if (!mm_engine_reserve_queued(e, next_queued(e), batch.out_count, err) || !mm_engine_prepare(e, &batch, err)) return false;
  const bool done = mm_engine_run_step(e, &batch, NULL, false, err);
  mm_engine_update_slots(e, &batch, done);
  if (done) note_queued(e, batch.out_count);
  return done;
}

static double score_of(const mm_engine *e, const float *logits, int32_t target) {
  double top = -INFINITY, sum = 0;
  for (uint32_t i = 0; i < e->model->vocab; i++)
    if (!e->never[i]) top = fmax(top, logits[i]);
  for (uint32_t i = 0; i < e->model->vocab; i++)
    if (!e->never[i]) sum += exp(logits[i] - top);
  return top + log(sum) - (e->never[target] ? -INFINITY : logits[target]);
}

/* Computes scores from all logits, which a device that cannot score returns. */
static bool score_here(mm_engine *e, const mm_batch *batch, const int32_t *target, double *score, mm_err *err) {
  const size_t vocab = e->model->vocab;
  if (!MM_GROW(e->host.logits, &e->host.logits_cap, batch->out_count * vocab, err) || !mm_engine_step(e, batch, e->host.logits, err))
    return false;
  for (uint32_t i = 0; i < batch->out_count; i++) score[i] = score_of(e, e->host.logits + i * vocab, target[i]);
  return true;
}

bool mm_engine_score(mm_engine *e, const mm_batch *batch, const int32_t *target, double *score, mm_err *err) {
  for (uint32_t i = 0; i < batch->out_count; i++)
    if (target[i] < 0 || (uint32_t)target[i] >= e->model->vocab)
      return mm_engine_refuse(err, "target of output row", i, target[i], "less than", e->model->vocab);
  if (!e->device_samples || !e->config.ops->sampler.score || e->groups.count > 1) return score_here(e, batch, target, score, err);
  if (!mm_engine_forward(e, batch, err)) return false;
  e->unsampled.count = 0;
  if (!MM_GROW(e->score, &e->score_cap, batch->out_count, err)) return false; /* a rank that does not come back may still write there */
  if (!mm_engine_run_task(e, &(task){.kind = SCORE, .score = {target, e->score}}, err)) return false;
  if (!batch->out_count) return true; /* nor has anyone waited */
  memcpy(score, e->score, batch->out_count * sizeof *score);
  e->queue.proven = e->queue.passes;
  return true;
}

bool mm_engine_collect(mm_engine *e, int32_t *id, mm_err *err) {
  if (e->queue.collected == e->queue.queued)
    return mm_engine_refuse(err, "collected after batch", e->batches, 0, "batches queued, at most", MM_QUEUE);
  uint32_t at = (uint32_t)(e->queue.collected++ % MM_QUEUE);
  if (!e->device_samples) {
    if (e->queue.outstanding[at]) memcpy(id, e->host.sampled[at].id, e->queue.outstanding[at] * sizeof *id);
    return true;
  }
  const queued_rows *q = e->groups.count > 1 ? &e->groups.queued[at] : NULL;
  const task t = {.kind = COLLECT, .collected = {q ? q->id : id, q ? q->first : NULL}};
  if (mm_engine_run_task(e, &t, err)) {
    if (q) mm_engine_place_ids(e, at, id);
    e->queue.proven = mm_max(e->queue.proven, e->queue.pass_of[at]);
    return true;
  }
  e->queue.collected = e->queue.queued;
  mm_engine_lose(e, err);
  return false;
}

#define WARM 2 /* steps of a kind until it is recorded */

/* Steps of padding, each twice: sampled greedily, from all ids and from a top-k of one, and with sampling deferred; where the engine
 * samples, with their logits copied to the host. */
static bool warm_steps(mm_engine *e, const mm_batch *batch, mm_sampling *set, int32_t *id, mm_err *err) {
  mm_batch b = *batch;
  b.sampling = set;
  for (int kind = 0; e->device_samples && kind < 3; kind++) {
    for (uint32_t i = 0; i < b.tokens; i++) set[i] = (mm_sampling){.temperature = kind > 0, .top_p = 1, .top_k = kind > 1};
    for (int i = 0; i < WARM; i++)
      if (!mm_engine_queue(e, &b, err) || !mm_engine_collect(e, id, err)) return false;
  }
  for (int i = 0; (!e->device_samples || e->config.ops->sampler.defer) && i < WARM; i++)
    if (!mm_engine_forward(e, &b, err)) return false;
  e->unsampled.count = 0;
  return true;
}

static bool warm_rows(mm_engine *e, uint32_t rows, mm_err *err) {
  mm_sampling *set = mm_calloc(rows, sizeof *set, err);
  mm_span *span = mm_calloc(rows, sizeof *span, err);
  int32_t *id = mm_calloc(2 * (size_t)rows, sizeof *id, err);
  uint32_t *out = mm_calloc(rows, sizeof *out, err);
  bool ok = set && span && id && out;
  for (uint32_t i = 0; ok && i < rows; i++) {
    span[i] = (mm_span){-1, i, 1, 0};
    out[i] = i;
  }
  const mm_batch b = {.tokens = rows, .id = id, .span_count = rows, .span = span, .out_count = rows, .out = out};
  ok = ok && warm_steps(e, &b, set, id + rows, err);
  MM_FREE(set, span, id, out);
  return ok;
}

bool mm_engine_warm(mm_engine *e, const uint32_t *rows, uint32_t n, mm_err *err) {
  if (e->queue.queued > e->queue.collected)
    return mm_engine_refuse(err, "warming after batch", e->batches, (int64_t)(e->queue.queued - e->queue.collected),
                            "batches left to collect, at most", 0);
  for (uint32_t i = 0; i < n; i++) {
    if (rows[i] == 0 || rows[i] > e->config.limits.max_tokens)
      return mm_engine_refuse(err, "rows to warm", i, rows[i], "1 …", e->config.limits.max_tokens);
    if (e->config.ops->sampler.sample && !warm_rows(e, rows[i], err)) return false;
  }
  return true;
}
