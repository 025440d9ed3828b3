/* Device code shared by all kernels: bf16 fragments and mma.sync, asynchronous copies, reductions, programmatic dependent launch. */
#ifndef MM_CUDA_DEVICE_CUH
#define MM_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

typedef __nv_bfloat16 bf16;
typedef __nv_bfloat162 bf162;

/* Programmatic dependent launch: a kernel may start while its predecessor runs, as soon as each of its blocks has let it or ended. Every
 * kernel of a step waits (grid_wait) for all that its predecessor wrote before it reads or writes what kernels write, so completion is
 * transitive along the stream. Before that it may read what no kernel of the step writes: weights, the batch, what caches held.
 *
 * A kernel lets the next one start in one of two ways:
 * - early, before it waits itself: for those whose successor reads nothing else before its own wait;
 * - once it has waited: then all that came before this kernel is complete when the next one starts, and that one may read it at once.
 *   experts_down, one_experts_down and experts_few do so, and must follow a kernel of this kind, or one that starts behind such a kernel.
 * README.md has the table of all kernels. */
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_launch_next_early() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_wait_and_launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A block's share of bytes, asked for to the L2 cache by all threads of each of so many blocks. */
__device__ __forceinline__ void prefetch_range(const uint8_t *at, uint32_t bytes, uint32_t block, uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr uint32_t kPiece = 16384;
  if (threadIdx.x > 0) return;
  for (uint32_t i = block * kPiece; i < bytes; i += blocks * kPiece)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at + i), "r"(min(kPiece, bytes - i)) : "memory");
#else
  constexpr uint32_t kPiece = 128;
  for (uint32_t i = (block * blockDim.x + threadIdx.x) * kPiece; i < bytes; i += blocks * blockDim.x * kPiece)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at + i) : "memory");
#endif
}

/* The body of a kernel in code for which it does not exist: hopper() keeps hosts from it, and one that is launched all the same fails. */
__device__ __forceinline__ void no_such_code() { __trap(); }

/* True in the last of `blocks` blocks to arrive, which then sees the earlier writes of the others through the L2 cache. The counter is
 * zero before and after. */
__device__ __forceinline__ bool last_of(uint32_t *counter, uint32_t blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    last = before == blocks - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

__device__ __forceinline__ void copy16(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}
/* As copy16, zeros where !valid; global must still be a mapped address. */
__device__ __forceinline__ void copy16_to(uint32_t shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy16_or_zero(void *shared, const void *global, bool valid) {
  copy16_to((uint32_t)__cvta_generic_to_shared(shared), global, valid);
}
__device__ __forceinline__ void copy4_to(uint32_t shared, const void *global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ float shared_float(uint32_t shared) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory");
  return v;
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* d[16, 8] += a[16, 16] · b[16, 8]. Lane (g, t) = (lane / 4, lane % 4) holds a: rows g and g+8, columns 2t, 2t+1, 2t+8, 2t+9 as
 * {row g low, row g+8 low, row g high, row g+8 high}; b: column g, rows as a's columns; d: {row g, columns 2t, 2t+1}, {row g+8, …}. */
__device__ __forceinline__ void mma(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/* The same with f16 operands. */
__device__ __forceinline__ void mma_half(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void ldmatrix4_at(uint32_t r[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared));
}
__device__ __forceinline__ void ldmatrix4(uint32_t r[4], const void *shared) {
  ldmatrix4_at(r, (uint32_t)__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t r[4], const void *shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((uint32_t)__cvta_generic_to_shared(shared)));
}

__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  bf162 p = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t *>(&p);
}
__device__ __forceinline__ uint32_t pack2_half(float lo, float hi) {
  half2 p = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t *>(&p);
}
/* Two e4m3 as f16, exactly. */
__device__ __forceinline__ uint32_t widen2_half(uint16_t codes) {
  __half2_raw p = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
  return *reinterpret_cast<uint32_t *>(&p);
}
/* Sixteen e4m3 as two 16-byte pieces of f16. */
__device__ __forceinline__ void widen16_half(uint4 out[2], uint4 q) {
  const uint32_t w[4] = {q.x, q.y, q.z, q.w};
  uint32_t v[8];
#pragma unroll
  for (int i = 0; i < 4; i++) v[2 * i] = widen2_half((uint16_t)w[i]), v[2 * i + 1] = widen2_half((uint16_t)(w[i] >> 16));
  out[0] = make_uint4(v[0], v[1], v[2], v[3]), out[1] = make_uint4(v[4], v[5], v[6], v[7]);
}
/* The number of E4M3 nearest to x, ties to even, of magnitude 448 at most; NaN stays. CUDA's conversion is no instruction before sm_89, but
 * a hundred with f64 among them. */
__device__ __forceinline__ float rounded_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
  const __half_raw h = __nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
  return __half2float(*reinterpret_cast<const __half *>(&h));
#else
  const float a = fabsf(x) > 448.0f ? 448.0f : fabsf(x);
  /* steps of 2^-9 below 2^-6, else of an eighth of the power of two at or below a, as those of 1.5 · 2^20 times that power are */
  const float whole = __uint_as_float(max(__float_as_uint(a) & 0x7f800000u, 121u << 23) + (20 << 23) + 0x400000u);
  return copysignf(__fsub_rn(__fadd_rn(a, whole), whole), x);
#endif
}
/* The codes of the nearest to two numbers, the first in the low byte. */
__device__ __forceinline__ uint32_t codes2_e4m3(float a, float b) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
#else
  /* an f16 of 2^-8 times the number has the code's sign in bit 15 and its magnitude from bit 7 up */
  const uint32_t h = pack2_half(rounded_e4m3(a) * 0x1p-8f, rounded_e4m3(b) * 0x1p-8f),
                 one = (h >> 8 & 0x00800080u) | (h >> 7 & 0x007f007fu);
  return (one & 0xffu) | one >> 8;
#endif
}
/* The E4M3 numbers nearest to a and b, as f16, exactly; a in the low half. */
__device__ __forceinline__ uint32_t halves_e4m3(float a, float b) {
#if __CUDA_ARCH__ >= 890
  return widen2_half((uint16_t)codes2_e4m3(a, b));
#else
  return pack2_half(rounded_e4m3(a), rounded_e4m3(b));
#endif
}
/* Eight numbers times `inverse` as e4m3. */
constexpr float kLeastTop = 1e-30f; /* of what has a scale of its own there: 448 / it is finite, and zeros stay zeros */
__device__ __forceinline__ uint2 narrow8_e4m3(const float v[8], float inverse) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = codes2_e4m3(v[2 * i] * inverse, v[2 * i + 1] * inverse);
  return make_uint2(w[0] | w[1] << 16, w[2] | w[3] << 16);
}
__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ uint32_t mul2(uint32_t a, uint32_t b) {
  bf162 p = __hmul2(*reinterpret_cast<bf162 *>(&a), *reinterpret_cast<bf162 *>(&b));
  return *reinterpret_cast<uint32_t *>(&p);
}
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  bf162 p = __hfma2(*reinterpret_cast<bf162 *>(&a), *reinterpret_cast<bf162 *>(&b), *reinterpret_cast<bf162 *>(&c));
  return *reinterpret_cast<uint32_t *>(&p);
}
__device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
  bf162 p = __hmax2(*reinterpret_cast<bf162 *>(&a), *reinterpret_cast<bf162 *>(&b));
  return *reinterpret_cast<uint32_t *>(&p);
}
/* (a & b) | c as one instruction, also for constants b and c. */
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
/* a where mask has ones, b elsewhere, as one instruction. */
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
  return d;
}
__device__ __forceinline__ uint32_t mul_half2(uint32_t a, uint32_t b) {
  __half2 p = __hmul2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b));
  return *reinterpret_cast<uint32_t *>(&p);
}
__device__ __forceinline__ float sum_half2(uint32_t a) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&a));
  return f.x + f.y;
}
__device__ __forceinline__ uint32_t fma_half2(uint32_t a, uint32_t b, uint32_t c) {
  __half2 p = __hfma2(*reinterpret_cast<__half2 *>(&a), *reinterpret_cast<__half2 *>(&b), *reinterpret_cast<__half2 *>(&c));
  return *reinterpret_cast<uint32_t *>(&p);
}
/* bf16 to f16 times the power of two that brings the largest magnitude (its bf16 bits) to 2^14 … 2^15: exact but for numbers below 2^-28
 * of it. */
struct half_scale {
  uint32_t factor; /* two bf16 */
  float inverse;
  __device__ __forceinline__ explicit half_scale(uint32_t largest) {
    const uint32_t power = min(268 - (largest >> 7), 253u);
    factor = power << 23 | power << 7;
    inverse = __uint_as_float((254 - power) << 23);
  }
  __device__ __forceinline__ uint32_t convert(uint32_t pair) const {
    const uint32_t v = mul2(pair, factor);
    uint32_t out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high(v)), "f"(low(v)));
    return out;
  }
};

/* Eight bf16 of a 16-byte piece. */
__device__ __forceinline__ void widen8(float out[8], uint4 q) {
  const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = low(w[i]), out[2 * i + 1] = high(w[i]);
}
/* Eight numbers from a 16-byte aligned place. */
__device__ __forceinline__ void load8(float out[8], const bf16 *from) { widen8(out, *reinterpret_cast<const uint4 *>(from)); }
__device__ __forceinline__ void load8(float out[8], const float *from) {
  const float4 a = reinterpret_cast<const float4 *>(from)[0], b = reinterpret_cast<const float4 *>(from)[1];
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}
__device__ __forceinline__ uint4 narrow8(const float v[8]) {
  return make_uint4(pack2(v[0], v[1]), pack2(v[2], v[3]), pack2(v[4], v[5]), pack2(v[6], v[7]));
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

/* d: four words of eight; afterwards lane t of each four has word t of all. */
__device__ __forceinline__ void turn_words(uint32_t (&d)[4]) {
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    const bool upper = threadIdx.x & m;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & m) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? d[i] : d[i | m], m);
      if (upper) {
        d[i] = got;
      } else {
        d[i | m] = got;
      }
    }
  }
}

/* The 8 x 8 matrix of two bf16 a lane, turned. */
__device__ __forceinline__ uint32_t turn_matrix(uint32_t v) {
  uint32_t to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(v));
  return to;
}

/* v: two bf16 of tokens 2t and 2t + 1 of four times eight, of the weight row lane / 4. Returns, of token lane / 4 of the eight number lane
 * % 4, those of all eight weight rows. */
__device__ __forceinline__ uint4 rows_of_tokens(uint32_t (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = turn_matrix(v[i]);
  turn_words(v);
  return make_uint4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  return v;
}
/* Over the lanes up to this one. */
__device__ __forceinline__ uint32_t warp_sum_through(uint32_t v) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint32_t left = __shfl_up_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 >= d) v += left;
  }
  return v;
}

#endif
