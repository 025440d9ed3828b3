/* Instructions of sm_90a: mbarriers, TMA (cp.async.bulk), 2-CTA clusters, and warpgroup products (wgmma) on operands in shared memory.
 *
 * Operands are stacks of blocks of 64 bf16 (128 bytes) by any number of rows, 1024-byte aligned; the 16-byte piece c of row r lies at
 * piece c ^ (r % 8) of its row (the 128-byte swizzle). A block serves as [row][k] or, turned, as [k][row]. */
#ifndef MM_CUDA_HOPPER_CUH
#define MM_CUDA_HOPPER_CUH

#include <stdint.h>

/* A kernel whose blocks come in pairs. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MM_PAIR __cluster_dims__(2, 1, 1)
#else
#define MM_PAIR
#endif

__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* L2 cache policy of what a step reads once: it goes first, and what each layer needs again (small weights, tables, code) stays. The number
 * is what createpolicy.fractional.L2::evict_first makes of 1.0; as a constant it costs no registers. */
constexpr uint64_t kReadOnce = 0x12f0000000000000;

/* Byte of 16-byte piece c of row r in a block. */
__device__ __forceinline__ uint32_t swizzled(uint32_t r, uint32_t c) { return r * 128 + (c ^ (r % 8)) * 16; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- mbarriers; an address of shared memory of this block, or of another block of the cluster where said ---- */

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives, and makes the phase wait for so many bytes of TMA copies as well. */
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* barrier: as from block_address. No fence: it orders this thread's shared memory reads, not its stores to the other block. */
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives when this thread's cp.async so far are done. */
__device__ __forceinline__ void mbarrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/* Waits for the end of the phase of this parity; the first phase has parity 0. */
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/* ---- TMA ---- */

/* True in one lane of a warp whose lanes are all here: a TMA instruction issued by it needs no loop over lanes. */
__device__ __forceinline__ bool one_lane() {
  uint32_t one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}

/* The box of a tensor map (a CUtensorMap in constant memory) at (x, y) to shared memory; its bytes count at the barrier. */
__device__ __forceinline__ void tma_load(uint32_t to, const void *map, uint32_t x, uint32_t y, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
               "l"(map), "r"(x), "r"(y), "r"(barrier)
               : "memory");
}
/* The same of what is read once. */
__device__ __forceinline__ void tma_load_once(uint32_t to, const void *map, uint32_t x, uint32_t y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
          to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(kReadOnce)
      : "memory");
}
/* The same into both blocks of a pair, at the same places, where the bytes count at each one's own barrier. */
__device__ __forceinline__ void tma_load_multicast(uint32_t to, const void *map, uint32_t x, uint32_t y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::
          "r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((uint16_t)3)
      : "memory");
}

/* ---- blocks of a cluster, mostly a pair ---- */

/* This block's address as that of block `rank` of the cluster. */
__device__ __forceinline__ uint32_t block_address(uint32_t address, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}
/* TMA copy of this CTA's shared memory to the other CTA of the cluster (to and barrier from block_address), counted at its barrier. */
__device__ __forceinline__ void tma_copy_to_peer(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
/* All threads of both blocks; also makes new mbarriers known to the other block. */
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/* ---- warpgroup products ---- */

/* Fence between ordinary stores to shared memory and the wgmma or TMA that reads them: by the storing thread before its barrier. */
__device__ __forceinline__ void stores_before_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* The compiler computes d before what follows, and uses it after what came before. */
template <int R>
__device__ __forceinline__ void hold(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; i++) asm volatile("" : "+f"(d[i])::"memory");
}
/* Until at most N groups are under way; d: the results that are used next. */
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N, int R>
__device__ __forceinline__ void wgmma_wait(float (&d)[R]) {
  wgmma_wait<N>();
  hold(d);
}

/* v, which all lanes of the warp have. The compiler knows it of the result: what descriptors are made of it stays in uniform registers,
 * where each product else waits for two moves to them. */
__device__ __forceinline__ uint32_t uniform(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }
/* Descriptor of the operand at `address`: groups of eight rows follow one another; turned operands of more than 64 columns continue
 * `block` bytes on. */
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t block = 0) {
  return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(block >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/* The operand so many bytes on. */
__device__ __forceinline__ uint64_t operand_after(uint64_t operand, uint32_t bytes) {
  return (operand & 0xffffffff00000000) | ((uint32_t)operand + (bytes >> 4));
}

#define MM_F8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define MM_F32(d, i) MM_F8(d, i), MM_F8(d, i + 8), MM_F8(d, i + 16), MM_F8(d, i + 24)
/* name(d[N / 2], a, b, add): d[64, N] (+)= a·bᵀ of operands in shared memory; MM_NARROW: N of 8, 16 and 32; what: how wgmma calls them. */
#define MM_NARROW(name, what, turned)                                                  \
  MM_WGMMA(name, 4, "8" what, "%0,%1,%2,%3", "%4, %5, p, 1, 1" turned, "%6", MM_F4(d)) \
  MM_WGMMA(name, 8, "16" what, MM_R8, "%8, %9, p, 1, 1" turned, "%10", MM_F8(d, 0))    \
  MM_WGMMA(name, 16, "32" what, MM_R8 ",%8,%9,%10,%11,%12,%13,%14,%15", "%16, %17, p, 1, 1" turned, "%18", MM_F8(d, 0), MM_F8(d, 8))
#define MM_WGMMA(name, R, shape, results, operands, flag, ...)                                                                        \
  __device__ __forceinline__ void name(float(&d)[R], uint64_t a, uint64_t b, int add) {                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" shape " {" results "}, " operands \
                 ";\n}"                                                                                                               \
                 : __VA_ARGS__                                                                                                        \
                 : "l"(a), "l"(b), "r"(add));                                                                                         \
  }
#define MM_R8    "%0,%1,%2,%3,%4,%5,%6,%7"
#define MM_F4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
// clang-format off
#define MM_R32       "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define MM_R64                                                                                                                         \
  MM_R32                                                                                                                               \
      ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%" \
      "63"
#define MM_R128                                                                                                                      \
  MM_R64                                                                                                                             \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%" \
  "122,%123,%124,%125,%126,%127"
// clang-format on

/* d[64, 64] (+)= a[64, 16] · b[64, 16]ᵀ; d[4n + i]: as mma's d, rows of warp w of the group from 16w, columns from 8n. */
MM_WGMMA(wgmma64, 32, "64k16.f32.bf16.bf16", MM_R32, "%32, %33, p, 1, 1, 0, 0", "%34", MM_F32(d, 0))
/* d[64, 256] (+)= a[64, 16] · b[256, 16]ᵀ. */
MM_WGMMA(wgmma256, 128, "256k16.f32.bf16.bf16", MM_R128, "%128, %129, p, 1, 1, 0, 0", "%130", MM_F32(d, 0), MM_F32(d, 32), MM_F32(d, 64),
         MM_F32(d, 96))
/* d[64, 64] (+)= a[64, 32] · b[64, 32]ᵀ, both e4m3, b in blocks of 128 columns; a in registers, as ldmatrix gives it: of lane (g, t) bytes
 * 4t … 4t+3 of rows g and g+8, then bytes 16 + 4t … of both. */
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" MM_R32
               "}, {%32,%33,%34,%35}, %36, p, 1, 1;\n}"
               : MM_F32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
/* d[64, 64] (+)= a[64, 32] · b[64, 32]ᵀ, both e4m3, in blocks of 128 columns. */
MM_WGMMA(wgmma_e4m3, 32, "64k32.f32.e4m3.e4m3", MM_R32, "%32, %33, p, 1, 1", "%34", MM_F32(d, 0))
/* d[64, 128] (+)= a[64, 16] · b[128, 16]ᵀ. */
MM_WGMMA(wgmma128, 64, "128k16.f32.bf16.bf16", MM_R64, "%64, %65, p, 1, 1, 0, 0", "%66", MM_F32(d, 0), MM_F32(d, 32))
/* d[64, 64] += a[64, 16] · b[16, 64], a in registers as mma's a, b turned. */
__device__ __forceinline__ void wgmma64_turned(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MM_R32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : MM_F32(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
/* The same, 128 columns. */
__device__ __forceinline__ void wgmma128_turned(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MM_R64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
               : MM_F32(d, 0), MM_F32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
/* d[64, 128] += a[16, 64]ᵀ · b[16, 128], both turned. */
__device__ __forceinline__ void wgmma128_turned(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MM_R64 "}, %64, %65, 1, 1, 1, 1, 1;"
               : MM_F32(d, 0), MM_F32(d, 32)
               : "l"(a), "l"(b));
}

#endif
#endif
