/* State of slots other than pages (ops.h): lightning states, the ids that they hold, the id sampled last. The stream keeps all of it in
 * the order of steps, and no kernel of a step overtakes its batch's upload. */
#include <string.h>

#include "runtime/cuda/backend.h"

/* Slot `to` of p[slots, n] becomes what `from` is. */
template <class T>
static bool copy_slot(mm_backend *b, T *p, size_t n, uint32_t to, uint32_t from, mm_err *err) {
  return to == from || n == 0 ||
         mm_cu_check(cudaMemcpyAsync(p + to * n, p + from * n, n * sizeof *p, cudaMemcpyDeviceToDevice, b->stream), "copy a slot", err);
}

uint64_t mm_cu_state_bytes(mm_backend *b) { return b->states.per_slot * sizeof *b->states.data; }

bool mm_cu_state_copy(mm_backend *b, uint32_t to, uint32_t from, mm_err *err) {
  return copy_slot(b, b->states.data, b->states.per_slot, to, from, err) &&
         copy_slot(b, b->sampler.ids, b->c.limits.max_positions, to, from, err) && copy_slot(b, b->sampler.args.last_id, 1, to, from, err);
}

bool mm_cu_state_save(mm_backend *b, uint32_t slot, void *state, mm_err *err) {
  return mm_cu_download(state, b->states.data + slot * b->states.per_slot, mm_cu_state_bytes(b), b->stream, err) && mm_cu_loaded(b, err);
}

/* Waits, so that the caller's memory is its own again. */
bool mm_cu_state_load(mm_backend *b, uint32_t slot, const void *state, mm_err *err) {
  return mm_cu_check(
             cudaMemcpyAsync(b->states.data + slot * b->states.per_slot, state, mm_cu_state_bytes(b), cudaMemcpyHostToDevice, b->stream),
             "copy states", err) &&
         mm_cu_check(cudaStreamSynchronize(b->stream), "copy states", err);
}

bool mm_cu_ids_load(mm_backend *b, uint32_t slot, const int32_t *id, uint32_t count, mm_err *err) {
  int32_t *const to = b->sampler.ids + (size_t)slot * b->c.limits.max_positions;
  if (!id) return mm_cu_check(cudaMemsetAsync(to, 0xff, count * sizeof *to, b->stream), "set ids", err);
  return mm_cu_check(cudaMemcpyAsync(to, id, count * sizeof *to, cudaMemcpyHostToDevice, b->stream), "copy ids", err) &&
         mm_cu_check(cudaStreamSynchronize(b->stream), "copy ids", err);
}

bool mm_cu_read_rows(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err) {
  return mm_cu_download_rows(out, static_cast<const __nv_bfloat16 *>(a.data), (size_t)rows * a.width, b->stream, err);
}

bool mm_cu_open_placement(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  std::vector<uint32_t> index((size_t)m->layers * m->experts);
  bool placed = false;
  for (uint32_t l = 0; l < m->layers; l++) {
    const uint32_t *own = b->c.weights->layer[l].expert_index;
    if (own) memcpy(&index[(size_t)l * m->experts], own, m->experts * sizeof *own), placed = true;
  }
  if (!placed) return true;
  b->experts.index = b->memory.array<uint32_t>(index.size(), err);
  return b->experts.index && mm_cu_check(cudaMemcpy(b->experts.index, index.data(), index.size() * sizeof index[0], cudaMemcpyHostToDevice),
                                         "copy places of experts", err);
}

bool mm_cu_expert_load(mm_backend *b, uint64_t *load, mm_err *err) {
  const uint32_t n = b->experts.route.experts;
  if (!mm_cu_download(load, b->experts.load, b->cache.size() * n * sizeof *load, b->stream, err)) return false;
  std::vector<uint64_t> counted(n); /* by index */
  for (size_t l = 0; l < b->cache.size(); l++) {
    const uint32_t *index = b->c.weights->layer[l].expert_index;
    if (!index) continue;
    memcpy(counted.data(), load + l * n, n * sizeof *load);
    for (uint32_t e = 0; e < n; e++) load[l * n + e] = counted[index[e]];
  }
  return true;
}
