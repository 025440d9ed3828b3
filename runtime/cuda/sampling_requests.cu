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
  if (!mm_cu_malloc(&p, wanted, "what is asked of logits", err)) return false;
  bytes = wanted;
  return !zero || (mm_cu_check(cudaMemset(p, 0, wanted), "cudaMemset", err) && mm_cu_check(cudaStreamSynchronize(0), "cudaMemset", err));
}

void grown::close() {
  cudaFree(p);
  p = nullptr, bytes = 0;
}

namespace {

/* The block: draws, rows, biases, masks. */
struct ask_layout {
  size_t draw, row, bias, mask, bytes;
};

ask_layout lay_asks(uint32_t rows, uint32_t biases, uint32_t masks, uint32_t vocab) {
  ask_layout at = {};
  auto take = [&](size_t size) {
    const size_t here = at.bytes;
    at.bytes += mm_round_up(size, 256);
    return here;
  };
  at.draw = take(rows * sizeof(mm_cu_draw)), at.row = take(rows * sizeof(mm_cu_ask)), at.bias = take(biases * sizeof(mm_bias));
  at.mask = take((size_t)masks * MM_CU_WORDS(vocab) * sizeof(uint32_t));
  return at;
}

/* Counts of the rows' options. */
struct ask_counts {
  uint32_t biases = 0, most_bias = 0, masks = 0, raws = 0, penalised = 0, longest = 0, logprobs = 0;
  mm_cu_draws draws = MM_CU_GREEDY;
};

/* One row: what is asked, its places among the others of its kind. */
mm_cu_ask ask_of(const mm_sampling *s, uint32_t pos, uint32_t vocab, ask_counts *n) {
  const uint32_t asks = mm_sampling_options(s);
  mm_cu_ask a;
  if (asks & MM_SAMPLES_MASK) a.mask = ++n->masks;
  a.bias_first = n->biases, a.bias_count = s->bias_count;
  n->biases += s->bias_count, n->most_bias = std::max(n->most_bias, s->bias_count);
  if (asks & MM_SAMPLES_PENALTIES) {
    a.repetition = s->repetition != 0 ? (float)s->repetition : 1, a.presence = (float)s->presence, a.frequency = (float)s->frequency;
    a.prompt = s->prompt, a.seen = ++n->penalised, n->longest = std::max(n->longest, pos + 1);
  }
  if (asks & MM_SAMPLES_LOGPROBS) {
    a.logprobs = 1 + s->top_logprobs, n->logprobs++;
    if (asks & (MM_SAMPLES_MASK | MM_SAMPLES_BIAS | MM_SAMPLES_PENALTIES)) a.raw = ++n->raws;
  }
  n->draws = std::max(n->draws, mm_cu_draws_of(s, vocab));
  return a;
}

void fill_asks(const mm_backend *b, const mm_sampling *set, const batch_arrays &h, const ask_layout &at, char *block) {
  const size_t words = MM_CU_WORDS(b->sampler.args.vocab);
  mm_cu_draw *const draw = reinterpret_cast<mm_cu_draw *>(block + at.draw);
  mm_cu_ask *const row = reinterpret_cast<mm_cu_ask *>(block + at.row);
  mm_bias *const bias = reinterpret_cast<mm_bias *>(block + at.bias);
  uint32_t *const mask = reinterpret_cast<uint32_t *>(block + at.mask);
  ask_counts n;
  for (uint32_t i = 0; i < b->step.wanted; i++) {
    const uint32_t pos = h.pos[h.out[i]];
    draw[i] = mm_cu_draw_of(&set[i], pos + UINT64_C(1)), row[i] = ask_of(&set[i], pos, b->sampler.args.vocab, &n);
    if (set[i].bias_count) memcpy(bias + row[i].bias_first, set[i].bias, set[i].bias_count * sizeof *bias);
    if (row[i].mask) memcpy(mask + (row[i].mask - 1) * words, set[i].allowed, words * sizeof *mask);
  }
}

/* Room for the counts, on the device and where logprobs go. */
bool grow_room(mm_backend *b, const ask_counts &n, size_t block, mm_err *err) {
  const uint32_t vocab = b->sampler.args.vocab;
  step_memory *m = b->step.memory;
  if (!mm_cu_grow_pinned(&m->asks, &m->asks_cap, block, err) || !b->sampler.options.grow(block, false, err)) return false;
  if (n.penalised && !b->sampler.seen.grow((size_t)MM_CU_SEEN * vocab * sizeof(uint32_t), true, err)) return false;
  if (n.raws && !b->sampler.raw.grow((size_t)n.raws * vocab * sizeof(float), false, err)) return false;
  const size_t logprobs = n.logprobs ? (size_t)b->step.wanted * MM_CU_LOGPROBS : 0;
  return mm_cu_grow_pinned(&m->logprobs, &m->logprobs_cap, logprobs, err) &&
         b->sampler.logprobs.grow(logprobs * sizeof(mm_logprob), false, err);
}

mm_cu_asks asks_on_device(const mm_backend *b, const ask_counts &n, const ask_layout &at) {
  const char *const block = static_cast<const char *>(b->sampler.options.p);
  mm_cu_asks q = {};
  q.row = reinterpret_cast<const mm_cu_ask *>(block + at.row), q.bias = reinterpret_cast<const mm_bias *>(block + at.bias);
  q.mask = reinterpret_cast<const uint32_t *>(block + at.mask);
  q.raw = static_cast<float *>(b->sampler.raw.p), q.seen = static_cast<uint32_t *>(b->sampler.seen.p),
  q.logprobs = static_cast<mm_logprob *>(b->sampler.logprobs.p);
  q.pos = b->device.pos, q.ids = b->sampler.ids, q.positions = b->c.limits.max_positions;
  q.copies = n.masks || n.raws, q.logprobs_wanted = n.logprobs, q.most_bias = n.most_bias, q.penalised = n.penalised, q.longest = n.longest;
  return q;
}

cudaError_t launch_choice(mm_backend *b, const ask_counts &n, const ask_layout &at) {
  const mm_cu_asks q = asks_on_device(b, n, at);
  mm_cu_choose a = b->sampler.args;
  a.tokens = b->step.rows, a.out = b->device.out, a.slot = b->device.slot;
  a.draw = reinterpret_cast<const mm_cu_draw *>(static_cast<const char *>(b->sampler.options.p) + at.draw);
  cudaError_t e = mm_cu_share_logits(b, b->step.wanted);
  if (e == cudaSuccess) e = mm_cu_adjust(a, const_cast<float *>(a.logits), q, b->step.wanted, b->stream);
  if (e == cudaSuccess) e = mm_cu_choose_tokens(a, b->step.wanted, n.draws, b->stream);
  if (e == cudaSuccess) e = mm_cu_logprobs(a, q, b->step.wanted, b->stream);
  return e;
}

}  // namespace

bool mm_cu_choose_asked(mm_backend *b, const mm_sampling *set, mm_err *err) {
  step_memory *m = b->step.memory;
  m->logprobs_wanted.clear();
  if (b->step.wanted == 0) return true;
  batch_arrays h;
  mm_cu_place_batch(b->step.rows, b->step.decode, static_cast<char *>(m->block), &h);
  ask_counts n;
  for (uint32_t i = 0; i < b->step.wanted; i++) ask_of(&set[i], h.pos[h.out[i]], b->sampler.args.vocab, &n);
  const ask_layout at = lay_asks(b->step.wanted, n.biases, n.masks, b->sampler.args.vocab);
  if (!mm_cu_make_room(b, err, [&] { return grow_room(b, n, at.bytes, err); })) return false;
  fill_asks(b, set, h, at, m->asks);
  if (!mm_cu_check(cudaMemcpyAsync(b->sampler.options.p, m->asks, at.bytes, cudaMemcpyHostToDevice, b->stream), "copy sampling", err) ||
      !mm_cu_check(launch_choice(b, n, at), "choose", err))
    return false;
  for (uint32_t i = 0; n.logprobs && i < b->step.wanted; i++) {
    if (set[i].logprobs && b->c.weights->rank == 0) m->logprobs_wanted.push_back({i, 1 + set[i].top_logprobs, set[i].logprobs});
  }
  const size_t logprobs = (size_t)b->step.wanted * MM_CU_LOGPROBS * sizeof(mm_logprob);
  if (n.logprobs && b->peers && !mm_cu_peers_settle(b->peers, b->stream, err)) return false;
  return !n.logprobs || mm_cu_check(cudaMemcpyAsync(m->logprobs, b->sampler.logprobs.p, logprobs, cudaMemcpyDeviceToHost, b->stream),
                                    "copy logprobs", err);
}
