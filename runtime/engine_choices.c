/* Tokens chosen from logits: by the device, or here. */
#include <math.h>
#include <string.h>

#include "runtime/engine_inside.h"

/* A step without sampling, and the choices from its logits. */
static bool step_and_choose(mm_engine *e, const mm_batch *batch, choices *to, mm_err *err) {
  size_t vocab = e->model->vocab;
  if (!mm_grow((void **)&e->choice_logits, &e->choice_logits_cap, batch->out_count * vocab, sizeof *e->choice_logits, err) ||
      !mm_grow((void **)&e->choice_id, &e->choice_id_cap, batch->tokens, sizeof *e->choice_id, err) ||
      !mm_grow((void **)&to->id, &to->cap, batch->out_count, sizeof *to->id, err))
    return false;
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    for (uint32_t t = s->first; t < s->first + s->count; t++)
      e->choice_id[t] = batch->id[t] == MM_ID_CHOSEN ? e->slot[s->slot].chosen : batch->id[t];
  }
  mm_batch plain = *batch;
  plain.id = e->choice_id;
  plain.sampling = NULL;
  if (!mm_engine_run_step(e, &plain, e->choice_logits, err)) return false;
  const mm_span *s = batch->span;
  for (uint32_t i = 0; i < batch->out_count; i++) {
    uint32_t row = batch->out[i];
    while (row >= s->first + s->count) s++;
    float *logits = e->choice_logits + i * vocab;
    for (size_t v = 0; v < vocab; v++)
      if (e->never[v]) logits[v] = -INFINITY;
    to->id[i] = mm_sample(e->sampler, &batch->sampling[i], s->pos + (row - s->first) + UINT64_C(1), logits);
    if (s->slot >= 0) e->slot[s->slot].chosen = to->id[i] < 0 ? 0 : to->id[i]; /* of rows of one slot, the last stays */
  }
  return true;
}

bool mm_engine_queues(const mm_engine *e) { return e->device_chooses; }

bool mm_engine_queue(mm_engine *e, const mm_batch *given, mm_err *err) {
  mm_batch copy = *given, *batch = &copy;
  for (uint32_t i = 0; i < batch->out_count; i++)
    if (!mm_sampling_check(&batch->sampling[i], err)) return false;
  if (e->queued - e->collected == MM_QUEUE)
    return mm_engine_refuse(err, "batches queued before batch", e->batches, MM_QUEUE, "less than", MM_QUEUE);
  if (!mm_engine_prepare(e, batch, err)) return false;
  uint32_t at = (uint32_t)(e->queued % MM_QUEUE);
  bool done = e->device_chooses ? mm_engine_run_step(e, batch, NULL, err) : step_and_choose(e, batch, &e->choices[at], err);
  mm_engine_keep(e, batch, done);
  if (!done) return false;
  e->outstanding[at] = batch->out_count;
  e->queued++;
  return true;
}

bool mm_engine_collect(mm_engine *e, int32_t *id, mm_err *err) {
  if (e->collected == e->queued) return mm_engine_refuse(err, "collected after batch", e->batches, 0, "batches queued, at most", MM_QUEUE);
  uint32_t at = (uint32_t)(e->collected++ % MM_QUEUE);
  if (!e->device_chooses) {
    memcpy(id, e->choices[at].id, e->outstanding[at] * sizeof *id);
    return true;
  }
  e->id = id;
  if (mm_engine_run_task(e, COLLECT, err)) return true;
  e->stepped = false;
  e->collected = e->queued;
  for (uint32_t i = 0; i < e->config.limits.slots; i++) mm_engine_drop(e, i);
  return false;
}
