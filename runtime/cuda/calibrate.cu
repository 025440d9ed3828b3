/* The inputs of a step's products, for a calibration (runtime/engine/calibration.h): added up on the device at each product, read when the
 * engine asks. Without one nothing is launched. */
#include <vector>

#include "runtime/cuda/backend.h"
#include "runtime/engine/calibration.h"

namespace {

/* One weight's sums to the calibration; they begin again at zero. */
bool read_sums(mm_backend *b, const mm_packed *w, const mm_cu_sums &of, mm_err *err) {
  const size_t n = (size_t)of.lead * of.k;
  std::vector<double> square(n);
  std::vector<float> amax(n);
  std::vector<unsigned long long> rows(of.lead);
  if (!mm_cu_download(square.data(), of.square, n * sizeof square[0], b->stream, err) ||
      !mm_cu_download(amax.data(), of.amax, n * sizeof amax[0], b->stream, err) ||
      !mm_cu_download(rows.data(), of.rows, of.lead * sizeof rows[0], b->stream, err))
    return false;
  for (uint32_t e = 0; e < of.lead; e++) {
    const mm_calibration_sums sums = {&square[(size_t)e * of.k], &amax[(size_t)e * of.k], rows[e]};
    mm_calibration_add_sums(b->c.calibration, b->c.weights->rank, w, e, &sums);
  }
  return mm_cu_check(cudaMemsetAsync(of.square, 0, n * sizeof square[0], b->stream), "clear sums", err) &&
         mm_cu_check(cudaMemsetAsync(of.amax, 0, n * sizeof amax[0], b->stream), "clear sums", err) &&
         mm_cu_check(cudaMemsetAsync(of.rows, 0, of.lead * sizeof rows[0], b->stream), "clear sums", err);
}

bool open_sums_of(mm_backend *b, const mm_packed *w, mm_err *err) {
  if (!w->scheme) return true;
  const uint32_t lead = b->weights.matrix[w].lead, k = w->k;
  const uint64_t n = (uint64_t)lead * k;
  const mm_cu_sums to = {b->memory.array<double>(n, err), b->memory.array<float>(n, err), b->memory.array<unsigned long long>(lead, err),
                         lead, k};
  b->weights.sums[w] = to;
  return to.square && to.amax && to.rows;
}

}  // namespace

bool mm_cu_open_sums(mm_backend *b, mm_err *err) {
  if (!b->c.calibration) return true;
  b->memory.what = "sums of collected inputs";
  for (uint32_t l = 0; l < b->c.model->layers; l++) {
    const mm_layer_weights *y = &b->c.weights->layer[l];
    for (const mm_packed *w : {&y->qkv, &y->out, &y->output_gate, &y->index_q, &y->index_k, &y->mlp_up, &y->mlp_down, &y->w13, &y->w2}) {
      if (!open_sums_of(b, w, err)) return false;
    }
  }
  return open_sums_of(b, &b->c.weights->head, err);
}

cudaError_t mm_cu_collect_linear(mm_backend *b, const mm_packed *w, const __nv_bfloat16 *x, const uint32_t *pick, uint32_t rows) {
  if (!b->c.calibration) return cudaSuccess;
  return mm_cu_add_inputs(b->weights.sums[w], {x, pick, 1, pick ? nullptr : b->device.slot, nullptr, rows}, b->stream);
}

cudaError_t mm_cu_collect_experts(mm_backend *b, const mm_packed *w13, const mm_packed *w2, const mm_cu_experts &a) {
  if (!b->c.calibration) return cudaSuccess;
  const mm_cu_route &r = b->experts.route;
  cudaError_t e = mm_cu_add_inputs(b->weights.sums[w13], {a.x, r.pair, r.top_k, nullptr, r.offset, 0}, b->stream);
  if (e == cudaSuccess) e = b->inputs.middle(b->weights.matrix[w13], b->weights.matrix[w2], r, a, b->stream);
  return e != cudaSuccess ? e : mm_cu_add_inputs(b->weights.sums[w2], {a.middle, nullptr, 1, nullptr, r.offset, 0}, b->stream);
}

bool mm_cu_calibrate(mm_backend *b, mm_err *err) {
  for (const auto &each : b->weights.sums) {
    if (!read_sums(b, each.first, each.second, err)) return false;
  }
  return true;
}
