/* Sampling with options (biases, masks, penalties, logprobs): the host's side. The options of all rows are packed into one block and
 * uploaded; the kernels of adjust.cu, sample_rows.cu and large_sampling.cu are launched after the pass. Steps without options do not come
 * here. */
#include <string.h>

#include <algorithm>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/engine/random_draw.h"

bool grown::grow(size_t wanted, bool zero, mm_err *err) {
  if (wanted <= bytes) return true;
  close();
  if (!mm_cu_malloc(&p, wanted, "sampling options", err)) return false;
  bytes = wanted;
  return !zero || (mm_cu_check(cudaMemset(p, 0, wanted), "cudaMemset", err) && mm_cu_check(cudaStreamSynchronize(0), "cudaMemset", err));
}

void grown::close() {
  cudaFree(p);
  p = nullptr, bytes = 0;
}

namespace {

/* Offsets in the block: mm_cu_row_sampling and mm_cu_row_options of each row, biases, masks. */
struct options_layout {
  size_t sampling, row, bias, mask, bytes;
};

options_layout lay_options(uint32_t rows, uint32_t biases, uint32_t masks, uint32_t vocab) {
  options_layout at = {};
  auto take = [&](size_t size) {
    const size_t here = at.bytes;
    at.bytes += mm_round_up(size, 256);
    return here;
  };
  at.sampling = take(rows * sizeof(mm_cu_row_sampling)), at.row = take(rows * sizeof(mm_cu_row_options)),
  at.bias = take(biases * sizeof(mm_bias));
  at.mask = take((size_t)masks * MM_CU_WORDS(vocab) * sizeof(uint32_t));
  return at;
}

/* Counts of the rows' options. */
struct options_counts {
  uint32_t biases = 0, most_bias = 0, masks = 0, raws = 0, penalised = 0, longest = 0, logprobs = 0;
  mm_cu_sampling kind = MM_CU_GREEDY;
};

/* Options of one row, and its indices among the rows with the same option. */
mm_cu_row_options options_of(const mm_sampling *s, uint32_t pos, uint32_t vocab, options_counts *n) {
  const uint32_t options = mm_sampling_options(s);
  mm_cu_row_options a;
  if (options & MM_SAMPLES_MASK) a.mask = ++n->masks;
  a.bias_first = n->biases, a.bias_count = s->bias_count;
  n->biases += s->bias_count, n->most_bias = std::max(n->most_bias, s->bias_count);
  if (options & MM_SAMPLES_PENALTIES) {
    a.repetition = s->repetition != 0 ? (float)s->repetition : 1, a.presence = (float)s->presence, a.frequency = (float)s->frequency;
    a.prompt = s->prompt, a.seen = ++n->penalised, n->longest = std::max(n->longest, pos + 1);
  }
  if (options & MM_SAMPLES_LOGPROBS) {
    a.logprobs = 1 + s->top_logprobs, n->logprobs++;
    if (options & (MM_SAMPLES_MASK | MM_SAMPLES_BIAS | MM_SAMPLES_PENALTIES)) a.raw = ++n->raws;
  }
  n->kind = std::max(n->kind, mm_cu_sampling_of(s, vocab));
  return a;
}

void fill_options(const mm_backend *b, const mm_sampling *set, const batch_arrays &h, const options_layout &at, char *block) {
  const size_t words = MM_CU_WORDS(b->sampler.args.vocab);
  mm_cu_row_sampling *const sampling = reinterpret_cast<mm_cu_row_sampling *>(block + at.sampling);
  mm_cu_row_options *const row = reinterpret_cast<mm_cu_row_options *>(block + at.row);
  mm_bias *const bias = reinterpret_cast<mm_bias *>(block + at.bias);
  uint32_t *const mask = reinterpret_cast<uint32_t *>(block + at.mask);
  options_counts n;
  for (uint32_t i = 0; i < b->step.wanted; i++) {
    const uint32_t pos = h.pos[h.out[i]];
    sampling[i] = mm_cu_row_sampling_of(&set[i], pos + UINT64_C(1)), row[i] = options_of(&set[i], pos, b->sampler.args.vocab, &n);
    if (set[i].bias_count) memcpy(bias + row[i].bias_first, set[i].bias, set[i].bias_count * sizeof *bias);
    if (row[i].mask) memcpy(mask + (row[i].mask - 1) * words, set[i].allowed, words * sizeof *mask);
  }
}

/* Room for the counts, on the device and where logprobs go. */
bool grow_options(mm_backend *b, const options_counts &n, size_t block, mm_err *err) {
  const uint32_t vocab = b->sampler.args.vocab;
  step_memory *m = b->step.memory;
  if (!mm_cu_grow_pinned(&m->options, &m->options_cap, block, err) || !b->sampler.options.grow(block, false, err)) return false;
  if (n.penalised && !b->sampler.seen.grow((size_t)MM_CU_SEEN * vocab * sizeof(uint32_t), true, err)) return false;
  if (n.raws && !b->sampler.raw.grow((size_t)n.raws * vocab * sizeof(float), false, err)) return false;
  const size_t logprobs = n.logprobs ? (size_t)b->step.wanted * MM_CU_LOGPROBS : 0;
  return mm_cu_grow_pinned(&m->logprobs, &m->logprobs_cap, logprobs, err) &&
         b->sampler.logprobs.grow(logprobs * sizeof(mm_logprob), false, err);
}

mm_cu_sample_options options_on_device(const mm_backend *b, const options_counts &n, const options_layout &at) {
  const char *const block = static_cast<const char *>(b->sampler.options.p);
  mm_cu_sample_options q = {};
  q.row = reinterpret_cast<const mm_cu_row_options *>(block + at.row), q.bias = reinterpret_cast<const mm_bias *>(block + at.bias);
  q.mask = reinterpret_cast<const uint32_t *>(block + at.mask);
  q.raw = static_cast<float *>(b->sampler.raw.p), q.seen = static_cast<uint32_t *>(b->sampler.seen.p),
  q.logprobs = static_cast<mm_logprob *>(b->sampler.logprobs.p);
  q.pos = b->device.pos, q.ids = b->sampler.ids, q.positions = b->c.limits.max_positions;
  q.copies = n.masks || n.raws, q.logprobs_wanted = n.logprobs, q.most_bias = n.most_bias, q.penalised = n.penalised, q.longest = n.longest;
  return q;
}

cudaError_t launch_sampling(mm_backend *b, const options_counts &n, const options_layout &at) {
  const mm_cu_sample_options q = options_on_device(b, n, at);
  mm_cu_sample a = b->sampler.args;
  a.tokens = b->step.rows, a.out = b->device.out, a.slot = b->device.slot;
  a.sampling = reinterpret_cast<const mm_cu_row_sampling *>(static_cast<const char *>(b->sampler.options.p) + at.sampling);
  cudaError_t e = mm_cu_share_logits(b, b->step.wanted);
  if (e == cudaSuccess) e = mm_cu_adjust(a, const_cast<float *>(a.logits), q, b->step.wanted, b->stream);
  if (e == cudaSuccess) e = mm_cu_sample_tokens(a, b->step.wanted, n.kind, b->stream);
  if (e == cudaSuccess) e = mm_cu_logprobs(a, q, b->step.wanted, b->stream);
  return e;
}

}  // namespace

bool mm_cu_sample_with_options(mm_backend *b, const mm_sampling *set, mm_err *err) {
  step_memory *m = b->step.memory;
  m->logprobs_wanted.clear();
  if (b->step.wanted == 0) /* other groups may have rows, whose barriers are all ranks' */
    return b->groups.count == 1 || (mm_cu_grow_buffers(b, err, [] { return true; }) && mm_cu_peers_settle(b->peers, b->stream, err));
  batch_arrays h;
  mm_cu_place_step(b, static_cast<char *>(m->block), &h);
  options_counts n;
  for (uint32_t i = 0; i < b->step.wanted; i++) options_of(&set[i], h.pos[h.out[i]], b->sampler.args.vocab, &n);
  const options_layout at = lay_options(b->step.wanted, n.biases, n.masks, b->sampler.args.vocab);
  if (!mm_cu_grow_buffers(b, err, [&] { return grow_options(b, n, at.bytes, err); })) return false;
  fill_options(b, set, h, at, m->options);
  if (!mm_cu_check(cudaMemcpyAsync(b->sampler.options.p, m->options, at.bytes, cudaMemcpyHostToDevice, b->stream), "copy sampling", err) ||
      !mm_cu_check(launch_sampling(b, n, at), "sample", err))
    return false;
  for (uint32_t i = 0; n.logprobs && i < b->step.wanted; i++) {
    if (set[i].logprobs && mm_attn_rank(b->c.weights) == 0) m->logprobs_wanted.push_back({i, 1 + set[i].top_logprobs, set[i].logprobs});
  }
  const size_t logprobs = (size_t)b->step.wanted * MM_CU_LOGPROBS * sizeof(mm_logprob);
  if ((n.logprobs || b->groups.count > 1) && b->peers && !mm_cu_peers_settle(b->peers, b->stream, err)) return false;
  return !n.logprobs || mm_cu_check(cudaMemcpyAsync(m->logprobs, b->sampler.logprobs.p, logprobs, cudaMemcpyDeviceToHost, b->stream),
                                    "copy logprobs", err);
}

bool mm_cu_score_deferred(mm_backend *b, const int32_t *target, double *score, mm_err *err) {
  const size_t n = b->sampler.pending ? b->step.wanted : 0;
  b->sampler.pending = false;
  if (n == 0) return true;
  if (!mm_cu_grow_buffers(b, err, [&] { return b->sampler.scores.grow(n * (sizeof *score + sizeof *target), false, err); })) return false;
  double *const out = static_cast<double *>(b->sampler.scores.p);
  int32_t *const ids = reinterpret_cast<int32_t *>(out + n);
  return mm_cu_check(cudaMemcpyAsync(ids, target, n * sizeof *ids, cudaMemcpyHostToDevice, b->stream), "copy targets", err) &&
         mm_cu_check(mm_cu_share_logits(b, (uint32_t)n), "share logits", err) &&
         mm_cu_check(mm_cu_score(b->sampler.args, ids, out, (uint32_t)n, b->stream), "likelihood", err) &&
         (!b->peers || mm_cu_peers_settle(b->peers, b->stream, err)) &&
         mm_cu_check(score ? cudaMemcpyAsync(score, out, n * sizeof *score, cudaMemcpyDeviceToHost, b->stream) : cudaSuccess, "copy scores",
                     err) &&
         mm_cu_check(cudaStreamSynchronize(b->stream), "likelihood", err) && mm_cu_loaded(b, err) &&
         (!b->peers || mm_cu_peers_check(b->peers, err));
}

/* Waits for the step; returns true if it succeeded on all ranks. */
static bool results_good(mm_backend *b, const step_memory *m, mm_err *err) {
  const bool done = mm_cu_check(cudaEventSynchronize(m->done), "step", err) && mm_cu_loaded(b, err);
  if (!b->peers) return done;
  bool here = done && mm_cu_peers_check(b->peers, err), all;
  if (here && (m->broken || mm_comm_failed_now(b->c.comm))) here = mm_comm_root_cause(b->c.comm, err);
  return mm_cu_peers_barrier(b->peers, here, &all, err) && all;
}

bool mm_cu_collect_results(mm_backend *b, int32_t *id, mm_err *err) {
  const step_memory *m = b->queued.front();
  b->queued.pop_front();
  const bool done = results_good(b, m, err);
  if (done && id) memcpy(id, m->id, m->outs * sizeof *id);
  for (size_t i = 0; done && i < m->logprobs_wanted.size(); i++) {
    const mm_cu_logprobs_wanted &t = m->logprobs_wanted[i];
    memcpy(t.to, m->logprobs + (size_t)t.row * MM_CU_LOGPROBS, t.count * sizeof *t.to);
  }
  if (!done) b->queued.clear();
  return done;
}
