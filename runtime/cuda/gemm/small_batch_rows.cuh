/* Products of a few rows with stored weights on sm_90a (experts_small_batch.cu, small_batch_widened.cu): boxes of 64 weight rows by lines
 * of 128 bytes, loaded by TMA with the 128-byte swizzle; codes become f16 in registers, exactly (int4: value + 8), and go to the tensor
 * cores as wgmma's M side. The rows of x are its N side, from shared memory: blocks of 64 columns in f16 under a power of two (inputs
 * rounded here: under their scale) for 128 columns, each piece's columns where the product wants them. bf16 weights are multiplied as they
 * lie, with x as it is. The sum of int4 is of x · (value + 8), less 8 · x: an x that is 10^4 times its row's others and meets a weight of
 * zero leaves about 2^-20 of 8 times itself in that output, which is less than a bf16 keeps of the outputs where the weight is not zero. */
#ifndef MM_CUDA_FEW_CUH
#define MM_CUDA_FEW_CUH

#include "runtime/cuda/core/fp8.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/weight.cuh"

constexpr uint32_t kBox = 64, kLine = 128, kPart = 64, kGroup = 128; /* columns of a block of x, and under one power of two */

template <mm_cu_code C, mm_cu_scale S>
struct few_kind {
  static constexpr bool kPlain = C == MM_CU_BF16;
  static constexpr bool kOffset = C == MM_CU_INT4, kBytes = S == MM_CU_NV || S == MM_CU_MX; /* kBytes: byte scales */
  static constexpr uint32_t kPiece = codec<C>::kPiece, kColumns = 8 * kPiece;               /* columns of 16 bytes, of a line */
  static constexpr uint32_t kGroups = kPlain ? 0 : kColumns / kGroup;
  static constexpr uint32_t kScaleBytes = kBytes ? 16 : kPlain ? 0 : 8; /* of a weight row and line: f32 of each half, or bytes */
  /* Columns whose products the tensor cores sum before those are scaled and added in f32. */
  static constexpr uint32_t kSum = S == MM_CU_MX ? 32 : C == MM_CU_E4M3 ? 64 : 128;
  /* Power of two that the f16 of the codes lack (weight.cuh); the factor of an NV weight holds 2^8 of it already. */
  static constexpr float kFactor = C == MM_CU_INT4 ? 0x1p24f : C != MM_CU_E2M1 ? 1.0f : S == MM_CU_NV ? 0x1p6f : 0x1p14f;
};
template <mm_cu_code C, mm_cu_scale S>
constexpr bool has_few() {
  return S != MM_CU_FINE;
}

/* before[e]: the sum of parts(0) … parts(e - 1), up to all experts. For one warp. */
template <class F>
__device__ __forceinline__ void count_before(uint32_t *before, uint32_t experts, const F &parts) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t below = 0;
  for (uint32_t e0 = 0; e0 < experts; e0 += 32) {
    const uint32_t e = e0 + lane, mine = e < experts ? parts(e) : 0, end = warp_sum_through(mine);
    if (e < experts) before[e] = below + end - mine;
    below += __shfl_sync(0xffffffffu, end, 31);
  }
  if (lane == 0) before[experts] = below;
}

/* ---- rows ---- */

/* f16 numbers of eight columns, and with which 128 columns' sums are multiplied; int4: what is taken off them before. */
struct few_columns {
  uint32_t h[4];
  float2 back;
};
/* Half a warp takes a group of 128 columns, eight a lane. rounds: to E4M3 codes, which are f16 as they are, under the group's scale. */
template <bool kOffset>
__device__ __forceinline__ few_columns convert_columns(uint4 v, bool rounds) {
  const uint32_t lanes = 0xffffu << (threadIdx.x & 16);
  few_columns to = {{v.x, v.y, v.z, v.w}, {}};
  uint32_t most = max2(max2(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu), max2(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu));
#pragma unroll
  for (uint32_t m = 1; m < 16; m *= 2) most = max2(most, __shfl_xor_sync(lanes, most, m));
  most = max(most & 0xffffu, most >> 16);
  if (rounds) {
    const act_scale scale(low(most));
#pragma unroll
    for (int i = 0; i < 4; i++) to.h[i] = widen2_half(scale.codes(low(to.h[i]), high(to.h[i])));
    to.back.x = scale.value;
  } else {
    const half_scale scale(most);
#pragma unroll
    for (int i = 0; i < 4; i++) to.h[i] = scale.convert(to.h[i]);
    to.back.x = scale.inverse;
  }
  if (kOffset) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i % 2) to.h[i] = mul_half2(to.h[i], 0x2c002c00u); /* 2^-4: those codes are 2^4 times as large */
      const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&to.h[i]));
      sum += (i % 2 ? 16.0f : 1.0f) * (f.x + f.y);
    }
#pragma unroll
    for (uint32_t m = 1; m < 16; m *= 2) sum += __shfl_xor_sync(lanes, sum, m);
    to.back.y = sum * 0x1p-21f; /* 8 · 2^-24 */
  }
  return to;
}
/* Place of columns 4·four, 4·four + 1 in a block of 64; the next two are 8 on. Lane t of a fragment holds columns 4t … of a piece of 16, or
 * 8t … of 32, two by two; a product of 16 columns takes the first two of each lane as its columns 2t, 2t + 1 and the next as 2t + 8, 2t
 * + 9. */
template <uint32_t kPiece>
__device__ __forceinline__ uint32_t place_of_four(uint32_t four) {
  return kPiece == 32 ? four / 8 * 32 + four % 2 * 16 + four % 8 / 2 * 2 : four / 4 * 16 + four % 4 * 2;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- products ---- */

/* d[64, N] (+)= a[64, 16] · b[N, 16]ᵀ in f16, a in registers as mma's a, b in blocks of 64 columns. */
__device__ __forceinline__ void multiply_few(float (&d)[4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
      : MM_F4(d)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
      : MM_F8(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"
      : MM_F8(d, 0), MM_F8(d, 8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
__device__ __forceinline__ void multiply_few(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{" MM_R32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
      : MM_F32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
/* The same in bf16, both in blocks of 64 columns. */
MM_NARROW(multiply_few, "k16.f32.bf16.bf16", ", 0, 0")
__device__ __forceinline__ void multiply_few(float (&d)[32], uint64_t a, uint64_t b, int add) { wgmma64(d, a, b, add); }

/* Operands of a stage for a group of 128 threads; codes and x the same numbers in all lanes (uniform). */
struct few_operands {
  uint32_t codes;       /* the box, in shared memory */
  const uint8_t *scale; /* COARSE: f32 [half][row]; byte scales: [row][16] */
  uint32_t x;           /* its columns of the rows, in shared memory: blocks [N][64] */
  const float2 *back;   /* [group][N] */
};

/* out[64, N] += a stage, in wgmma's layout. step: the line's number (kByteSteps lines share 16 scales). done(): the stage is read. */
template <mm_cu_code C, mm_cu_scale S, uint32_t N, class Done>
__device__ __forceinline__ void multiply_box(float (&out)[N / 2], const few_operands &from, uint32_t step, const Done &done) {
  using kind = few_kind<C, S>;
  constexpr uint32_t kBlock = N * kLine; /* of x */
  const uint64_t x = operand(from.x);
  if constexpr (kind::kPlain) {
    const uint64_t w = operand(from.codes);
    wgmma_begin();
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) multiply_few(out, operand_after(w, k * 32), operand_after(x, k * 32), 1);
    wgmma_commit();
    wgmma_wait<0>(out);
    done();
  } else {
    constexpr uint32_t kSums = kind::kColumns / kind::kSum, kEach = 8 / kSums, kRegs = kind::kPiece / 8; /* kEach: pieces of a sum */
    constexpr uint32_t kAtOnce = kSums == 2 ? (N == 64 ? 1 : 2)
                                 : N == 8   ? kSums
                                 : N == 16  ? 4
                                            : 2; /* sums under way: what registers allow */
    static_assert(kAtOnce <= kSums);
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = warp * 16 + lane / 4;
    const uint32_t codes = from.codes + (warp * 16 + lane % 16) * kLine;
    float part[kAtOnce][N / 2];
    uint32_t r[4], two[2] = {}; /* of two pieces; NV: their scales in f16, by half of the rows */
    const auto finish = [&](uint32_t s) {
      float(&sum)[N / 2] = part[s % kAtOnce];
      float f[2] = {kind::kFactor, kind::kFactor};
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        if (S == MM_CU_COARSE) f[h] *= reinterpret_cast<const float *>(from.scale)[s * 2 / kSums * kBox + row + h * 8];
        if (S == MM_CU_MX) {
          const uint32_t e = from.scale[(row + 8 * h) * 16 + step % kByteSteps<C, S> * kSums + s];
          f[h] *= __uint_as_float(max(e << 23, 0x00400000u)); /* e 0: 2^-127 */
        }
      }
#pragma unroll
      for (uint32_t n = 0; n < N / 8; n++) {
        const float4 b = *reinterpret_cast<const float4 *>(&from.back[s * kind::kSum / kGroup * N + n * 8 + lane % 4 * 2]);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
          const float v = kind::kOffset ? sum[n * 4 + j] - (j % 2 ? b.w : b.y) : sum[n * 4 + j];
          out[n * 4 + j] = fmaf(v * f[j / 2], j % 2 ? b.z : b.x, out[n * 4 + j]);
        }
      }
    };
#pragma unroll
    for (uint32_t s = 0; s < kSums; s++) {
      uint32_t a[kEach][2][kRegs]; /* piece, row half */
#pragma unroll
      for (uint32_t i = 0; i < kEach; i++) {
        const uint32_t p = s * kEach + i;
        if (p % 2 == 0) ldmatrix4_at(r, codes + ((p + lane / 16) ^ lane % 8) * 16);
#pragma unroll
        for (uint32_t h = 0; h < 2; h++) {
          if constexpr (kind::kOffset) {
            codec<C>::offset_halves(a[i][h], r[p % 2 * 2 + h]);
          } else {
            codec<C>::halves(a[i][h], r[p % 2 * 2 + h]);
          }
          if constexpr (S == MM_CU_NV) { /* scales of two pieces are widened at once */
            if (p % 2 == 0) {
              uint32_t twice[2];
              const uint32_t four = *reinterpret_cast<const uint32_t *>(&from.scale[(row + 8 * h) * 16 + p * 2]);
              codec<MM_CU_E4M3>::halves(twice, __byte_perm(four, 0, lane % 4 / 2 * 0x11 + 0x20));
              two[h] = twice[0];
            }
            const __half2 both = *reinterpret_cast<const __half2 *>(&two[h]), one = p % 2 ? __high2half2(both) : __low2half2(both);
            const uint32_t scale = *reinterpret_cast<const uint32_t *>(&one);
#pragma unroll
            for (uint32_t j = 0; j < kRegs; j++) a[i][h][j] = mul_half2(a[i][h][j], scale);
          }
        }
      }
      if (s >= kAtOnce) {
        wgmma_wait<kAtOnce - 1>(part[s % kAtOnce]);
        finish(s - kAtOnce);
      }
      wgmma_begin();
#pragma unroll
      for (uint32_t i = 0; i < kEach; i++) {
#pragma unroll
        for (uint32_t j = 0; j < kRegs; j += 2) {
          const uint32_t k = (s * kEach + i) * (kind::kPiece / 16) + j / 2; /* of 16 columns */
          const uint32_t v[4] = {a[i][0][j], a[i][1][j], a[i][0][j + 1], a[i][1][j + 1]};
          multiply_few(part[s % kAtOnce], v, operand_after(x, k / 4 * kBlock + k % 4 * 32), i > 0 || j > 0);
        }
      }
      wgmma_commit();
    }
#pragma unroll
    for (uint32_t s = kSums - kAtOnce; s < kSums; s++) {
      if (s + 1 < kSums && kAtOnce == 2) {
        wgmma_wait<1>(part[s % kAtOnce]);
      } else {
        wgmma_wait<0>(part[s % kAtOnce]);
      }
      finish(s);
    }
    done();
  }
}

#endif
#endif
