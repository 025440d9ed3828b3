/* Words and flags in the memory of other devices (peers.cu). */
#ifndef MM_CUDA_PEERS_CUH
#define MM_CUDA_PEERS_CUH

#include <stdint.h>

/* Sixteen bytes go and come as two halves of eight at least: a flag in each half tells that its data is there. */
__device__ __forceinline__ void put_word(uint4 *to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
/* Past the L1 cache, which other devices' writes do not reach. */
__device__ __forceinline__ uint4 get_word(const uint4 *from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
/* Whatever this thread wrote before, and saw of others' writes at a barrier, is seen by whoever sees the flag. */
__device__ __forceinline__ void put_flag(uint32_t *to, uint32_t v) {
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t get_flag(const uint32_t *from) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
/* Host memory that both sides write. */
__device__ __forceinline__ uint32_t get_shared(const uint32_t *from) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ void put_shared(uint32_t *to, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

#endif
