/* Rows of groups as kernels between ranks take them (ranks_groups.cu, moe/gather_codes.cu). */
#ifndef MM_CUDA_RANKS_GROUPS_CUH
#define MM_CUDA_RANKS_GROUPS_CUH

#include "runtime/cuda/comm/peers.cuh"

/* A launch takes rows [from, from + most) of each group. */
struct row_job {
  mm_cu_group_rows g;
  uint32_t each; /* ranks of a group */
  uint32_t from, most;

  __host__ __device__ uint32_t rows(uint32_t k) const {
    const uint32_t n = g.first[k + 1] - g.first[k];
    return n <= from ? 0 : n - from < most ? n - from : most;
  }
  /* Units of `size` numbers: how many the rows of group k are, and where they begin in the rows of all. */
  __host__ __device__ uint32_t units(uint32_t k, uint32_t size) const { return rows(k) * (g.width / size); }
  __host__ __device__ size_t begin(uint32_t k, uint32_t size) const { return ((size_t)g.first[k] + from) * (g.width / size); }
};

/* The part of n units that the i-th rank of its group sends. */
struct part_of {
  uint32_t first, n;
  __device__ part_of(uint32_t all, uint32_t ranks, uint32_t i) {
    const uint32_t share = (all + ranks - 1) / ranks;
    first = min(i * share, all), n = min(share, all - first);
  }
};

/* Rows of the group with the most. */
inline uint32_t most_rows(const mm_cu_group_rows &g) {
  uint32_t most = 0;
  for (uint32_t k = 0; k < g.groups; k++) most = max(most, g.first[k + 1] - g.first[k]);
  return most;
}

inline bool group_rows_fit(const peer_view &c, const mm_cu_group_rows &g) {
  return g.groups > 1 && c.ranks % g.groups == 0 && g.width && g.width % 8 == 0 && g.width <= MM_CU_MAX_HIDDEN && most_rows(g) > 0;
}

#endif
