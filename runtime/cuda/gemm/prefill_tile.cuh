/* A tile of the products of many rows with stored weights on sm_90a (experts_prefill.cu): codes become scaled bf16 in registers and go to
 * the tensor cores as wgmma's M side; up to 256 rows of x are its N side, from shared memory. A code is therefore widened once for 256
 * rows, and never stored wide: 64 columns of 64 weight rows take a group's tensor cores 512 clocks, and each of its warps about 130
 * instructions.
 */
#ifndef MM_CUDA_MANY_CUH
#define MM_CUDA_MANY_CUH

#include "runtime/cuda/gemm/small_batch_rows.cuh"

constexpr uint32_t kGroups = 2, kThreads = 128 * (1 + kGroups), kPair = 2, kRows = 256, kHigh = 64; /* kHigh: weight rows of a box */
constexpr uint32_t kSlots = 5, kLines = 3, kNotes = 2; /* of x, of weights and of tiles: how many at a time */
constexpr uint32_t kSizes = 5;                         /* of tiles: rows of their products. Two of 257 rows and a few more have 144 each. */
__host__ __device__ constexpr uint32_t tile_size(uint32_t i) {
  constexpr uint32_t size[kSizes] = {64, 128, 144, 192, 256};
  return size[i];
}
constexpr uint32_t kLead = 2; /* steps that the first group is ahead, so that one writes results while the other multiplies */

/* Places [first, first + rows) of the sorted order, of one expert; which of the `wide` tiles of its weight rows. more: false beyond
 * the last tile. */
struct many_tile {
  uint32_t expert, first, rows, across;
  bool more;
};
struct many_note {
  alignas(16) float factor[kRows]; /* the weight of the choice, and the matrix's own */
  uint32_t pair[kRows];
  many_tile t;
};
struct many_shared {
  uint8_t x[kSlots][kRows * kLine];
  uint8_t codes[kLines][2][kHigh * kLine];
  many_note note[kNotes];
  uint64_t x_full[kSlots], x_empty[kSlots], codes_full[kLines], codes_empty[kLines], published[kNotes], read[kNotes];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* tiles of lower experts, one across */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// clang-format off
#define MM_R72 MM_R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define MM_R96 MM_R72 ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
// clang-format on
/* d[64, N] += a[64, 16] · b[N, 16]ᵀ in bf16, a in registers as mma's a, b in blocks of 64 columns. */
#define MM_HELD(N, results, operands, ...)                                                                           \
  __device__ __forceinline__ void multiply_held(float(&d)[N / 2], const uint32_t(&a)[4], uint64_t b) {               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" results "}, " operands ", 1, 1, 1, 0;" \
                 : __VA_ARGS__                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
  }
MM_HELD(64, MM_R32, "{%32,%33,%34,%35}, %36", MM_F32(d, 0))
MM_HELD(128, MM_R64, "{%64,%65,%66,%67}, %68", MM_F32(d, 0), MM_F32(d, 32))
MM_HELD(144, MM_R72, "{%72,%73,%74,%75}, %76", MM_F32(d, 0), MM_F32(d, 32), MM_F8(d, 64))
MM_HELD(192, MM_R96, "{%96,%97,%98,%99}, %100", MM_F32(d, 0), MM_F32(d, 32), MM_F32(d, 64))
MM_HELD(256, MM_R128, "{%128,%129,%130,%131}, %132", MM_F32(d, 0), MM_F32(d, 32), MM_F32(d, 64), MM_F32(d, 96))

/* Until at most N groups are under way; a: what the products that are done by then were given, which the compiler may not write before. */
template <int N, int Q>
__device__ __forceinline__ void products_done(uint32_t (&a)[Q][4]) {
  wgmma_wait<N>();
#pragma unroll
  for (int i = 0; i < Q; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) asm volatile("" : "+r"(a[i][j])::"memory");
  }
}

/* Eight codes of a row (E4M3: four) as bf16 pairs, without the factor that E2M1 lacks (weight.cuh). */
template <mm_cu_code C>
__device__ __forceinline__ void widen_word(uint32_t (&v)[codec<C>::kPiece / 8], uint32_t w) {
  if constexpr (C == MM_CU_E4M3) {
    v[0] = codec<C>::pair(__byte_perm(w, 0, 0x1404)), v[1] = codec<C>::pair(__byte_perm(w, 0, 0x3424));
  } else if constexpr (C == MM_CU_INT4) {
    const bf162 bias = __floats2bfloat162_rn(136.0f, 136.0f);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t u = and_or(w >> (i * 4), 0x000f000fu, 0x43004300u);
      const bf162 p = __hsub2(*reinterpret_cast<const bf162 *>(&u), bias);
      v[i] = *reinterpret_cast<const uint32_t *>(&p);
    }
  } else {
    v[0] = and_or(w >> 3, 0x01c001c0u, w & 0x80008000u);
    v[1] = and_or(w << 5, 0x01c001c0u, w << 8 & 0x80008000u);
    v[2] = and_or(w >> 6, 0x01c001c0u, w << 7 & 0x80008000u);
    v[3] = and_or(w << 2, 0x01c001c0u, w << 15 & 0x80008000u);
  }
}

/* Steps of 64 columns of a line, and of a slot of so many rows. A tile has whole lines and slots; behind the last column codes and x are
 * zeros. */
template <mm_cu_code C>
constexpr uint32_t kStepsOf = codec<C>::kPiece / 8;
__device__ constexpr uint32_t slot_steps(uint32_t rows) { return rows <= 64 ? 4 : rows <= 128 ? 2 : 1; }
__device__ __forceinline__ uint32_t steps_of(uint32_t k) { return (k + kPart * 4 - 1) / (kPart * 4) * 4; }

/* The scales of 64 columns of a thread's two rows. COARSE stands for every f32 grid whose cells have 64 columns at least. */
template <mm_cu_code C, mm_cu_scale S>
struct many_scales {
  uint32_t bits[2];

  /* row: the first scale of each row. Behind the last column any that is finite, for codes that are zeros. */
  __device__ __forceinline__ void load(const mm_cu_weight &w, const uint8_t *const (&row)[2], uint32_t step) {
    const uint32_t k = min(step * kPart, w.k - 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (S == MM_CU_COARSE) bits[h] = reinterpret_cast<const uint32_t *>(row[h])[k >> w.cell_k_log2];
      if (S == MM_CU_NV) bits[h] = reinterpret_cast<const uint32_t *>(row[h])[k / kPart];
      if (S == MM_CU_MX) {
        bits[h] = reinterpret_cast<const uint16_t *>(row[h])[k / kPart];
        if (k + 32 >= w.k) bits[h] = (bits[h] & 0xff) | bits[h] << 8; /* what follows the last one may stand for an infinity */
      }
    }
  }
  /* v: of row h, piece q of the 64 columns. */
  template <int R>
  __device__ __forceinline__ void apply(uint32_t (&v)[R], int h, int q) const {
    if constexpr (S == MM_CU_COARSE) { /* as the sum of two bf16, the second of which is zero for scales that are stored as bf16 */
      const float f = __uint_as_float(bits[h]);
      const uint32_t first = pack2(f, f);
      const float rest = f - low(first);
      const uint32_t second = pack2(rest, rest);
#pragma unroll
      for (int i = 0; i < R; i++) v[i] = fma2(v[i], first, mul2(v[i], second));
    } else if constexpr (S == MM_CU_NV) { /* as piece_scale: 2^120 · 2^118, and 2^8 in the matrix's factor */
      const float e = __uint_as_float((bits[h] >> (16 * q + threadIdx.x % 4 / 2 * 8) & 0x7f) << 20) * 0x1p120f;
      const uint32_t m = pack2(e * 0x1p118f, e * 0x1p118f);
#pragma unroll
      for (int i = 0; i < R; i++) v[i] = mul2(v[i], m);
    } else {
      const uint32_t m = exponent_pair(bits[h] >> (q * codec<C>::kPiece / 32 * 8) & 0xff);
#pragma unroll
      for (int i = 0; i < R; i++) v[i] = scaled_by<C>(v[i], m);
    }
  }
};

/* State of a thread for a tile's weights: its place in a line of each box, where its rows' scales begin, and those of the next line. */
template <mm_cu_code C, mm_cu_scale S>
struct many_rows {
  uint32_t line, turn; /* of the row whose address it gives to ldmatrix: byte within both boxes, and row % 8 */
  const uint8_t *scale[2];
  many_scales<C, S> scales[kStepsOf<C>];

  /* row, row + gap: its rows of the matrix. */
  __device__ __forceinline__ void begin(const mm_cu_weight &w, uint32_t matrix, uint32_t row, uint32_t gap) {
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const size_t at = ((size_t)matrix * w.scale_rows + (min(row + h * gap, w.n - 1) >> w.cell_n_log2)) * w.scale_pitch;
      scale[h] = static_cast<const uint8_t *>(w.scale) + at * (S == MM_CU_COARSE ? sizeof(float) : 1);
    }
#pragma unroll
    for (uint32_t i = 0; i < kStepsOf<C>; i++) scales[i].load(w, scale, i);
  }
};

/* acc[64, N] = a tile, in wgmma's layout, a row of either box as consume says. slot and line: those of the block so far. leads: lets the
 * other group begin. A group of wgmma is a step, of more than 144 rows half of one: what registers allow. */
template <mm_cu_code C, mm_cu_scale S, uint32_t N>
__device__ __forceinline__ void multiply_tile(float (&acc)[N / 2], many_shared &sh, const mm_cu_weight &w, many_rows<C, S> &rows,
                                              uint32_t slot, uint32_t line, bool leads) {
  constexpr int kParts = N > 144 ? 2 : 1, kEach = 4 / kParts;                                  /* groups of a step; 16 columns of a group */
  constexpr int kPiece = codec<C>::kPiece, kPieces = kEach * 16 / kPiece, kWords = kPiece / 8; /* of a group; of a piece and row */
  constexpr uint32_t kSlotSteps = slot_steps(N);
  const uint32_t steps = steps_of(w.k), lane = threadIdx.x % 32;
  uint32_t a[2][kEach][4] = {}; /* of a group and the one before: 16 columns, mma's a */
#pragma unroll
  for (uint32_t i = 0; i < N / 2; i++) acc[i] = 0;
  const auto release = [&](uint32_t now) {
    if (lane < kPair) mbarrier_arrive_cluster(block_address(shared_address(&sh.x_empty[now % kSlots]), lane));
  };
  for (uint32_t s = 0; s < steps; line++) {
    const uint32_t stage = line % kLines, codes = shared_address(sh.codes[stage]) + rows.line;
    mbarrier_wait(shared_address(&sh.codes_full[stage]), line / kLines % 2);
#pragma unroll
    for (uint32_t i = 0; i < kStepsOf<C>; i++, s++) {
      const uint32_t at = slot + s / kSlotSteps;
      uint64_t x = 0;
      uint32_t r[4]; /* pieces p and p + 1: piece, row */
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        uint32_t(&now)[kEach][4] = a[(i * kParts + part) % 2];
#pragma unroll
        for (int q = 0; q < kPieces; q++) {
          const int p = part * kPieces + q; /* of the step */
          if (p % 2 == 0) ldmatrix4_at(r, codes + ((i * (64 / kPiece) + p + lane / 16) ^ rows.turn) * 16);
          if (p == 0) { /* while the codes are on their way */
            if (s % kSlotSteps == 0) mbarrier_wait(shared_address(&sh.x_full[at % kSlots]), at / kSlots % 2);
            x = operand(uniform(shared_address(sh.x[at % kSlots]) + s % kSlotSteps * (N * kLine)));
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            uint32_t v[kWords];
            widen_word<C>(v, r[p % 2 * 2 + h]);
            rows.scales[i].apply(v, h, p);
#pragma unroll
            for (int j = 0; j < kWords; j++) now[q * (kPiece / 16) + j / 2][j % 2 * 2 + h] = v[j];
          }
        }
        if (part == kParts - 1)
          rows.scales[i].load(w, rows.scale, s + kStepsOf<C>); /* a line ahead: a step is shorter than the way to memory */
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < kEach; k++) multiply_held(acc, now[k], operand_after(x, (part * kEach + k) * 32));
        wgmma_commit();
        products_done<1>(a[(i * kParts + part + 1) % 2]);
        if (part == kParts - 1 && i == kStepsOf<C> - 1) { /* the products have been given what was read of the line: it is all here */
          __syncwarp();
          if (lane == 0) mbarrier_arrive(shared_address(&sh.codes_empty[stage]));
        }
        if (part == 0 && s > 0 && s % kSlotSteps == 0) release(at - 1);
      }
      if (leads && s == kLead) asm volatile("bar.arrive 1, 256;" ::: "memory");
    }
  }
  wgmma_wait<0>(acc);
  release(slot + (steps - 1) / kSlotSteps);
}

#endif
#endif
