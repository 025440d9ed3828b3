/* One rank of several (backend.h). Mean squares over all ranks' heads: each rank's sums of squares, f32, are added over ranks (peers.h),
 * then the rows are multiplied. */
#include "runtime/cuda/backend.h"

#include <stdio.h>

#include "runtime/cuda/launch.h"
#include "runtime/cuda/norm.cuh"
#include "runtime/cuda/peers.h"

namespace {

constexpr uint32_t kThreads = 256;
constexpr double kLimit_s = 4; /* for which kernels wait for another rank */

/* Two stretches of a row, side by side: [0, n[0]) and [n[0], n[0] + n[1]). */
struct stretches {
  uint32_t n[2];
};

/* The block's sum of v, in all threads; part: [kThreads / 32]. */
__device__ float block_sum(float v, float *part) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  for (uint32_t i = 0; i < kThreads / 32; i++) sum += part[i];
  return sum;
}

/* sums[row, 2]: of the squares of each stretch. */
__global__ void __launch_bounds__(kThreads) square_rows(float *sums, const bf16 *x, uint32_t pitch, stretches s) {
  __shared__ float part[kThreads / 32];
  grid_wait_and_launch_next();
  const bf16 *row = x + (size_t)blockIdx.x * pitch;
  for (int i = 0; i < 2; i++) {
    float sum = 0;
    for (uint32_t c = threadIdx.x * 8; c < s.n[i]; c += kThreads * 8) {
      float v[8];
      load8(v, row + c);
      sum = square8(v, sum);
    }
    sum = block_sum(sum, part);
    if (threadIdx.x == 0) sums[2 * blockIdx.x + i] = sum;
    row += s.n[i];
  }
}

/* q and k by their norms. The stretches are this rank's columns of each, `ranks` times as many are normalised together. */
__global__ void __launch_bounds__(kThreads)
    scale_qk(bf16 *x, const float *sums, const float *q_norm, const float *k_norm, float eps, uint32_t pitch, stretches s, uint32_t ranks) {
  grid_wait_and_launch_next();
  bf16 *row = x + (size_t)blockIdx.x * pitch;
  for (int i = 0; i < 2; i++) {
    const float scale = rsqrtf(sums[2 * blockIdx.x + i] / ((float)s.n[i] * (float)ranks) + eps);
    const float *const norm = i ? k_norm : q_norm;
    for (uint32_t c = threadIdx.x * 8; c < s.n[i]; c += kThreads * 8) {
      float v[8], w[8];
      load8(v, row + c);
      load8(w, norm + c);
      scale8(v, scale, w);
      store8(row + c, v);
    }
    row += s.n[i];
  }
}

__global__ void __launch_bounds__(kThreads) gate_rows(const __grid_constant__ mm_cu_gated a, const float *sums, uint32_t ranks) {
  grid_wait_and_launch_next();
  const size_t row = (size_t)blockIdx.x * a.width;
  const float scale = rsqrtf(sums[2 * blockIdx.x] / ((float)a.width * (float)ranks) + a.eps);
  for (uint32_t c = threadIdx.x * 8; c < a.width; c += kThreads * 8) {
    float v[8], w[8], z[8];
    load8(v, a.o + row + c);
    load8(z, a.gate + row + c);
    load8(w, a.w + c);
    scale8(v, scale, w);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= sigmoid(z[j]);
    store8(a.y + row + c, v);
  }
}

/* b->squares of the step's rows, over all ranks. An odd number of rows sums two numbers that nobody reads. */
cudaError_t sum_squares(mm_backend *b, const bf16 *x, uint32_t pitch, stretches n) {
  const cudaError_t e = launch(square_rows, b->rows, kThreads, 0, b->stream, b->squares, x, pitch, n);
  return e != cudaSuccess ? e : mm_cu_peers_sum_f32(b->peers, b->squares, mm_round_up(2 * (uint64_t)b->rows, 4), b->stream);
}

/* Whether each rank may round its columns of w's inputs by itself. */
bool rounds_apart(const mm_packed *w) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (w->whole_k == 0 || f->code == MM_CODE_PLAIN) return true;
  const bool row_scale = f->group == 0 || (f->scale == MM_F8_E4M3), fixed = f->fixed && w->input_scale > 0;
  if (row_scale && !fixed) return false;
  return f->group == 0 || (w->first_k % f->group == 0 && (w->k % f->group == 0 || w->first_k + w->k >= w->whole_k));
}

}  // namespace

bool mm_cu_check_cut_inputs(const mm_backend_config *c, mm_err *err) {
  if (!c->act_quant || c->weights->tp == 1) return true;
  for (uint32_t l = 0; l < c->model->layers; l++) {
    const mm_layer_weights *y = &c->weights->layer[l];
    for (const mm_packed *w : {&y->out, &y->w2}) {
      if (!w->scheme || rounds_apart(w)) continue;
      char name[64];
      snprintf(name, sizeof name, "model.layers.%u", l);
      return mm_fail(
          err, MM_UNSUPPORTED, "E_ACT_QUANT", mm_at(NULL, name),
          "found inputs of scheme %s rounded under scales that columns of %u ranks share; the cuda backend rounds each rank's for "
          "itself, or with --act-quant off none",
          w->scheme->name, c->weights->tp);
    }
  }
  return true;
}

bool mm_cu_open_ranks(mm_backend *b, mm_err *err) {
  const uint32_t ranks = b->c.weights->tp;
  if (ranks == 1) return true;
  if (!b->loading->pinned(err)) return false;
  if (!(b->squares = b->memory.array<float>(2 * (uint64_t)b->c.limits.max_tokens + 4, err))) return false;
  if (!(b->peers = mm_cu_peers_open(b->c.comm, b->c.weights->rank, ranks, kLimit_s, err))) return false;
  mm_cu_peers_load(b->peers, true);
  bool all;
  return mm_cu_peers_meet(b->peers, true, &all); /* none says that it has loaded before all have said that they load */
}

/* A step that failed may have been recorded by some ranks and not by others, and have made room on some: all forget both, so that they
 * meet again wherever one does either. */
bool mm_cu_begin_ranks(mm_backend *b, mm_err *err) {
  if (!b->peers || b->rehearses || !mm_cu_peers_hurt(b->peers)) return true;
  if (!mm_cu_peers_mend(b->peers, err)) return false;
  b->drop_logits();
  bool all;
  if (!mm_cu_peers_meet(b->peers, !b->unrecorded, &all)) return false;
  b->unrecorded = !all;
  return true;
}

cudaError_t mm_cu_sum_ranks(mm_backend *b, bf16 *x, uint32_t width) {
  return b->peers ? mm_cu_peers_sum(b->peers, x, (uint64_t)b->rows * width, b->stream) : cudaSuccess;
}

cudaError_t mm_cu_qk_norm_ranks(mm_backend *b, bf16 *qkv, const float *q_norm, const float *k_norm, float eps) {
  const uint32_t d = b->heads.head_dim, pitch = (b->heads.heads + 2 * b->heads.kv_heads) * d;
  const stretches n = {{b->heads.heads * d, b->heads.kv_heads * d}};
  const cudaError_t e = sum_squares(b, qkv, pitch, n);
  if (e != cudaSuccess) return e;
  return launch(scale_qk, b->rows, kThreads, 0, b->stream, qkv, b->squares, q_norm, k_norm, eps, pitch, n, b->c.weights->tp);
}

cudaError_t mm_cu_gated_norm_ranks(mm_backend *b, const mm_cu_gated &a) {
  const cudaError_t e = sum_squares(b, a.o, a.width, {{a.width, 0}});
  return e != cudaSuccess ? e : launch(gate_rows, b->rows, kThreads, 0, b->stream, a, b->squares, b->c.weights->tp);
}
