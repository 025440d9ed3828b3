/* Which experts a step uses, for the host: as long as weights arrive it asks for them (load.h). */
#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/moe/route.cuh"

namespace {

constexpr uint32_t kThreads = 256, kWords = MM_CU_MAX_EXPERTS / 32;

/* A single token's experts are chosen here, as the kernel of its experts will choose them. */
__global__ void __launch_bounds__(kThreads) list_used(const __grid_constant__ mm_cu_route r, uint32_t *used, uint32_t tokens) {
  __shared__ uint32_t mask[kWords];
  grid_wait_and_launch_next();
  if (threadIdx.x < kWords) mask[threadIdx.x] = 0;
  __syncthreads();
  const auto mark = [&](uint32_t id) {
    if (id < r.experts) atomicOr(&mask[id / 32], 1u << id % 32);
  };
  if (tokens > 1) {
    for (uint32_t i = threadIdx.x; i < tokens * r.top_k; i += kThreads) mark(r.id[i]);
  } else if (threadIdx.x < 32) {
    const route_choice c = choose_experts(r, 0);
    if (threadIdx.x < r.top_k) mark(own_expert(r, c.id));
  }
  __syncthreads();
  if (threadIdx.x < kWords) used[threadIdx.x] = mask[threadIdx.x];
}

}  // namespace

cudaError_t mm_cu_list_used(const mm_cu_route &r, uint32_t *used, uint32_t tokens, cudaStream_t s) {
  return launch(list_used, 1, kThreads, 0, s, r, used, tokens);
}
