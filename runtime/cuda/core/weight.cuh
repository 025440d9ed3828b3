/* Stored weights to bf16 fragments, in registers. A piece is 16 bytes of one row: kPiece consecutive weights along k, widened to
 * kPiece / 2 registers of two neighbours each, exactly (every code is exact in bf16).
 *
 * Pair order of 4-bit codes: the low half of a 32-bit word holds weights 0, 2, 4 and 6 of its eight, the high half 1, 3, 5 and 7 in the
 * same bits, so that shifts and masks give both halves of a register. Pair j of INT4 lies in bits 4j … 4j+3. The pairs of E2M1 have their
 * magnitudes from bits 9, 1, 12 and 4 up and their signs in bits 15, 7, 8 and 0: the first two lie at a distance of eight bits as in an
 * f16, and so do the others after one shift of magnitudes and one of signs. */
#ifndef MM_CUDA_WEIGHT_CUH
#define MM_CUDA_WEIGHT_CUH

#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/kernels.h"

template <mm_cu_code C>
struct codec;

template <>
struct codec<MM_CU_BF16> {
  static constexpr int kPiece = 8;
  static __device__ __forceinline__ void widen(uint32_t out[4], uint4 q) { out[0] = q.x, out[1] = q.y, out[2] = q.z, out[3] = q.w; }
};

/* The seven magnitude bits of e4m3 are the top mantissa and low exponent bits of a bf16 that is 2^-120 times the value, or of an f16 that
 * is 2^-8 times it; subnormals come out right as subnormals. */
template <>
struct codec<MM_CU_E4M3> {
  static constexpr int kPiece = 16;
  static __device__ __forceinline__ uint32_t pair(uint32_t spread) {
    return mul2((spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u), 0x7b807b80u /* 2^120 */);
  }
  static __device__ __forceinline__ void widen(uint32_t out[8], uint4 q) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[2 * i] = pair(__byte_perm(w[i], 0, 0x1404));
      out[2 * i + 1] = pair(__byte_perm(w[i], 0, 0x3424));
    }
  }
#if __CUDA_ARCH__ >= 890
  static __device__ __forceinline__ void halves(uint32_t out[2], uint32_t w) {
    asm("{\n.reg .b16 lo, hi;\n"
        "mov.b32 {lo, hi}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, lo;\n"
        "cvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(out[0]), "=r"(out[1])
        : "r"(w));
  }
#else
  static __device__ __forceinline__ uint32_t half_pair(uint32_t spread) {
    return mul_half2((spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u), 0x5c005c00u /* 2^8 */);
  }
  static __device__ __forceinline__ void halves(uint32_t out[2], uint32_t w) {
    out[0] = half_pair(__byte_perm(w, 0, 0x1404)), out[1] = half_pair(__byte_perm(w, 0, 0x3424));
  }
#endif
};

/* bf16 128 + u has u in its low mantissa bits, f16 1024 + u and 64 + u / 16 too; u = v + 8. */
template <>
struct codec<MM_CU_INT4> {
  static constexpr int kPiece = 32;
  static __device__ __forceinline__ void widen(uint32_t out[16], uint4 q) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
    const bf162 bias = __floats2bfloat162_rn(136.0f, 136.0f);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      uint32_t u = ((w[i / 4] >> (i % 4 * 4)) & 0x000f000fu) | 0x43004300u;
      bf162 v = __hsub2(*reinterpret_cast<bf162 *>(&u), bias);
      out[i] = *reinterpret_cast<uint32_t *>(&v);
    }
  }
  static __device__ __forceinline__ void halves(uint32_t out[4], uint32_t w) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t even = and_or(w >> (i * 4), 0x000f000fu, 0x64006400u), odd = and_or(w >> (i * 4), 0x00f000f0u, 0x64006400u);
      out[i] = fma_half2(even, 0x3c003c00u, 0xe408e408u);    /* -1032 */
      out[i + 1] = fma_half2(odd, 0x2c002c00u, 0xd480d480u); /* / 16 - 72 */
    }
  }
  /* u as subnormal f16: 2^-24 times it in registers 0 and 2, 2^-20 times it in 1 and 3. */
  static __device__ __forceinline__ void offset_halves(uint32_t out[4], uint32_t w) {
    const uint32_t next = w >> 8;
    out[0] = w & 0x000f000fu, out[1] = w & 0x00f000f0u, out[2] = next & 0x000f000fu, out[3] = next & 0x00f000f0u;
  }
};

/* bf16 without the factor 2^126, which the caller multiplies in with the block scale; f16 without 2^14. */
template <>
struct codec<MM_CU_E2M1> {
  static constexpr int kPiece = 32;
  static __device__ __forceinline__ void widen(uint32_t out[16], uint4 q) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 16; i++) {
      if (i % 4 == 0) halves(out + i, w[i / 4]);
      out[i] = (out[i] & 0x80008000u) | (out[i] >> 3 & 0x01c001c0u);
    }
  }
  static __device__ __forceinline__ void halves(uint32_t out[4], uint32_t w) {
    const uint32_t other = select_bits(w << 7, w >> 3, 0x80808080u);
    out[0] = w & 0x8e008e00u, out[1] = w << 8 & 0x8e008e00u;
    out[2] = other & 0x8e008e00u, out[3] = other << 8 & 0x8e008e00u;
  }
};

/* MX: 2^(e - 127), twice in bf16; 2^-127 is subnormal there. */
__device__ __forceinline__ uint32_t exponent_pair(uint32_t e) {
  const uint32_t one = e == 0 ? 0x40 : e << 7;
  return one << 16 | one;
}
/* MX: a register of widened codes times that scale. */
template <mm_cu_code C>
__device__ __forceinline__ uint32_t scaled_by(uint32_t v, uint32_t exponents) {
  return mul2(C == MM_CU_E2M1 ? mul2(v, 0x7e807e80u /* 2^126 */) : v, exponents);
}

/* Block scales that belong to a piece, as they multiply its registers. */
template <mm_cu_code C, mm_cu_scale S>
struct piece_scale {
  static constexpr int kPiece = codec<C>::kPiece;
  float f[S == MM_CU_FINE ? kPiece / 8 : 1];
  uint32_t bits;

  /* row: the first scale element of the piece's row; k0: the piece's first column. */
  __device__ __forceinline__ void load(const mm_cu_weight &w, const void *row, uint32_t k0) {
    if constexpr (S == MM_CU_FINE) {
#pragma unroll
      for (int i = 0; i < kPiece / 8; i++) f[i] = k0 + 8 * i < w.k ? static_cast<const float *>(row)[(k0 + 8 * i) >> w.cell_k_log2] : 0.0f;
    } else if constexpr (S == MM_CU_NV) {
      bits = k0 < w.k ? *reinterpret_cast<const uint16_t *>(static_cast<const uint8_t *>(row) + k0 / 16) : 0;
    } else if constexpr (S == MM_CU_MX) {
      bits = k0 < w.k ? static_cast<const uint8_t *>(row)[k0 / 32] : 0;
    }
  }

  __device__ __forceinline__ void apply(uint32_t v[]) const {
    if constexpr (S == MM_CU_FINE) {
#pragma unroll
      for (int i = 0; i < kPiece / 2; i++) v[i] = pack2(low(v[i]) * f[i / 4], high(v[i]) * f[i / 4]);
    } else if constexpr (S == MM_CU_NV) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        /* e4m3 · 2^-120 as f32 bits, times 2^120 · 2^118; the missing 2^8 is in the weight's global factor. */
        float e = __uint_as_float((bits >> (8 * h) & 0x7f) << 20) * 0x1p120f;
        uint32_t m = pack2(e * 0x1p118f, e * 0x1p118f);
#pragma unroll
        for (int i = 0; i < kPiece / 4; i++) v[h * kPiece / 4 + i] = mul2(v[h * kPiece / 4 + i], m);
      }
    } else if constexpr (S == MM_CU_MX) {
      const uint32_t m = exponent_pair(bits);
#pragma unroll
      for (int i = 0; i < kPiece / 2; i++) v[i] = scaled_by<C>(v[i], m);
    }
  }
};

/* NV, MX: lines of 128 bytes of codes whose scales are 16 bytes. */
template <mm_cu_code C, mm_cu_scale S>
constexpr uint32_t kByteSteps = S == MM_CU_NV     ? 1
                                : C == MM_CU_E4M3 ? 4
                                                  : 2;

struct weight_row {
  uint32_t matrix, row;
};

/* Calls f.template run<code, scale>() for the pair of a weight; cudaErrorNotSupported for a pair without kernels. */
template <class F>
cudaError_t for_scheme(const mm_cu_weight &w, const F &f) {
  switch (w.code) {
    case MM_CU_BF16:
      if (w.scale_kind == MM_CU_PLAIN) return f.template run<MM_CU_BF16, MM_CU_PLAIN>();
      break;
    case MM_CU_E4M3:
      if (w.scale_kind == MM_CU_COARSE) return f.template run<MM_CU_E4M3, MM_CU_COARSE>();
      if (w.scale_kind == MM_CU_FINE) return f.template run<MM_CU_E4M3, MM_CU_FINE>();
      if (w.scale_kind == MM_CU_MX) return f.template run<MM_CU_E4M3, MM_CU_MX>();
      break;
    case MM_CU_INT4:
      if (w.scale_kind == MM_CU_COARSE) return f.template run<MM_CU_INT4, MM_CU_COARSE>();
      if (w.scale_kind == MM_CU_FINE) return f.template run<MM_CU_INT4, MM_CU_FINE>();
      break;
    case MM_CU_E2M1:
      if (w.scale_kind == MM_CU_NV) return f.template run<MM_CU_E2M1, MM_CU_NV>();
      if (w.scale_kind == MM_CU_MX) return f.template run<MM_CU_E2M1, MM_CU_MX>();
      break;
  }
  return cudaErrorNotSupported;
}

#endif
