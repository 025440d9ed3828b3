/* Changes of logits before sampling, by the rule of sample.h: ids that are not allowed, biases, penalties. Launched only where some
 * row has the option; other rows are not changed.
 *
 * Penalties: how often a slot holds each id is counted over the ids themselves, so that a row counts what comes before it and no more,
 * wherever its slot went back to. An id's first reader takes its count, sets it back to zero and writes its logit. */
#include <algorithm>

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/sampling/sampling.h"
#include "runtime/engine/random_draw.h"

namespace {

constexpr uint32_t kThreads = 256, kHeld = UINT32_C(1) << 31;

/* The logits as they were, for logprobs; then -inf where an id is not allowed. */
__global__ void __launch_bounds__(kThreads)
    copy_and_mask(const __grid_constant__ mm_cu_sample a, float *logits, const __grid_constant__ mm_cu_sample_options q) {
  grid_wait_and_launch_next();
  const uint32_t i = blockIdx.y;
  const mm_cu_row_options options = q.row[i];
  float *const x = logits + (size_t)i * a.vocab_rows;
  float *const raw = options.raw ? q.raw + (size_t)(options.raw - 1) * a.vocab : nullptr;
  const uint32_t *const mask = options.mask ? q.mask + (size_t)(options.mask - 1) * MM_CU_WORDS(a.vocab) : nullptr;
  if (!raw && !mask) return;
  for (uint32_t v = blockIdx.x * kThreads + threadIdx.x; v < a.vocab; v += gridDim.x * kThreads) {
    if (raw) raw[v] = x[v];
    if (mask && !(mask[v / 32] >> v % 32 & 1)) x[v] = -INFINITY;
  }
}

__global__ void __launch_bounds__(kThreads)
    add_biases(const __grid_constant__ mm_cu_sample a, float *logits, const __grid_constant__ mm_cu_sample_options q) {
  grid_wait_and_launch_next();
  const mm_cu_row_options options = q.row[blockIdx.y];
  float *const x = logits + (size_t)blockIdx.y * a.vocab_rows;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < options.bias_count; i += gridDim.x * kThreads) {
    const mm_bias bias = q.bias[options.bias_first + i];
    x[bias.id] = mm_draw_add(x[bias.id], bias.add);
  }
}

/* A row with penalties that are counted in this launch: the ids that its slot holds up to it. */
struct held_ids {
  const int32_t *id;
  uint32_t count, *seen;
  mm_cu_row_options options;
};
__device__ bool find_held(const mm_cu_sample &a, const mm_cu_sample_options &q, uint32_t first, held_ids *h) {
  h->options = q.row[blockIdx.y];
  const uint32_t at = h->options.seen - 1 - first; /* of a row without penalties, or of another launch: too large */
  const uint32_t row = a.out[blockIdx.y];
  const int32_t slot = a.slot[row];
  if (h->options.seen == 0 || at >= MM_CU_SEEN || slot < 0) return false;
  h->id = q.ids + (size_t)slot * q.positions, h->count = q.pos[row] + 1, h->seen = q.seen + (size_t)at * a.vocab;
  return true;
}

__global__ void __launch_bounds__(kThreads)
    count_ids(const __grid_constant__ mm_cu_sample a, const __grid_constant__ mm_cu_sample_options q, uint32_t first) {
  grid_wait_and_launch_next();
  held_ids h;
  if (!find_held(a, q, first, &h)) return;
  for (uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < h.count; at += gridDim.x * kThreads) {
    const int32_t id = h.id[at];
    if (id < 0) continue;
    atomicOr(&h.seen[id], kHeld);
    if (at >= h.options.prompt) atomicAdd(&h.seen[id], 1u);
  }
}

__global__ void __launch_bounds__(kThreads)
    penalise(const __grid_constant__ mm_cu_sample a, float *logits, const __grid_constant__ mm_cu_sample_options q, uint32_t first) {
  grid_wait_and_launch_next();
  held_ids h;
  if (!find_held(a, q, first, &h)) return;
  float *const x = logits + (size_t)blockIdx.y * a.vocab_rows;
  for (uint32_t at = blockIdx.x * kThreads + threadIdx.x; at < h.count; at += gridDim.x * kThreads) {
    const int32_t id = h.id[at];
    const uint32_t seen = id < 0 ? 0 : atomicExch(&h.seen[id], 0u);
    if (seen) x[id] = mm_draw_penalty(x[id], h.options.repetition, h.options.presence, h.options.frequency, seen & ~kHeld);
  }
}

}  // namespace

cudaError_t mm_cu_adjust(const mm_cu_sample &a, float *logits, const mm_cu_sample_options &q, uint32_t rows, cudaStream_t s) {
  const unsigned wide = std::min(ceil_div(a.vocab, 4 * kThreads), 64u), longest = std::min(ceil_div(q.longest, kThreads), 64u);
  cudaError_t e = cudaSuccess;
  if (q.copies) e = launch(copy_and_mask, dim3(wide, rows), kThreads, 0, s, a, logits, q);
  if (e == cudaSuccess && q.most_bias)
    e = launch(add_biases, dim3(std::min(ceil_div(q.most_bias, kThreads), 64u), rows), kThreads, 0, s, a, logits, q);
  for (uint32_t first = 0; e == cudaSuccess && first < q.penalised; first += MM_CU_SEEN) {
    e = launch(count_ids, dim3(longest, rows), kThreads, 0, s, a, q, first);
    if (e == cudaSuccess) e = launch(penalise, dim3(longest, rows), kThreads, 0, s, a, logits, q, first);
  }
  return e;
}
