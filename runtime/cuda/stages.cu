/* One pipeline stage of several (backend.h): between stages rows go through pinned memory of the host, two bf16 in the place of a float. */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/device.cuh"

bool mm_cu_open_stage(mm_backend *b, mm_err *err) {
  const mm_rank_weights *w = b->c.weights;
  if (w->layer_first == 0 && w->layer_end == b->c.model->layers) return true;
  b->capture.off = true;
  const size_t n = (size_t)b->c.limits.max_tokens * b->c.model->hidden;
  return mm_cu_check(cudaMallocHost(&b->border, n * sizeof *b->border), "cudaMallocHost", err);
}

bool mm_cu_send_rows(mm_backend *b, const bf16 *x, uint32_t width, mm_err *err) {
  const size_t n = (size_t)b->step.tokens * width;
  if (b->peers && !mm_cu_peers_settle(b->peers, b->stream, err)) return false;
  if (!mm_cu_check(cudaMemcpyAsync(b->border, x, n * sizeof *x, cudaMemcpyDeviceToHost, b->stream), "copy rows", err) ||
      !mm_cu_check(cudaStreamSynchronize(b->stream), "step", err))
    return false;
  mm_comm_send(b->c.comm, b->c.weights->rank, reinterpret_cast<float *>(b->border), n / 2);
  return true;
}

bool mm_cu_receive_rows(mm_backend *b, bf16 *x, uint32_t width, mm_err *err) {
  const size_t n = (size_t)b->step.tokens * width, all = (size_t)b->step.rows * width;
  return mm_comm_receive(b->c.comm, b->c.weights->rank, reinterpret_cast<float *>(b->border), n / 2) &&
         mm_cu_check(cudaMemcpyAsync(x, b->border, n * sizeof *x, cudaMemcpyHostToDevice, b->stream), "copy rows", err) &&
         mm_cu_check(cudaMemsetAsync(x + n, 0, (all - n) * sizeof *x, b->stream), "cudaMemset", err) &&
         (!b->peers || mm_cu_peers_settle(b->peers, b->stream, err));
}
