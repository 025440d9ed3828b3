/* The experts of a prefill step whose weights are codes (sm_90a): two grouped products over the sorted pairs (token, choice).
 *
 * Codes become scaled bf16 in registers and go to the tensor cores as wgmma's M side; up to 256 rows of x are its N side, from shared
 * memory. So a code is widened once for 256 rows, and never stored wide: 64 columns of 64 weight rows take a group's tensor cores 512
 * clocks, and each of its warps about 100 instructions. Of fewer rows a tile has 64, 128 or 192.
 *
 * A first kernel copies the rows into the sorted order, each piece's columns where the product wants them (few.cuh). Then pairs of blocks
 * take tiles: up to 256 places of one expert and, each block, twice 64 weight rows: w1's and w3's of the same columns, or 128 of w2. Each
 * block asks the copy engine for half of the rows and has it put into both blocks' memory. One warp asks for rows and for weights (lines
 * of 128 bytes), as far ahead as there is room. Two groups of 128 threads multiply, half of both boxes' weight rows each: a thread has a
 * row of either box, and so gate and up of one column.
 *
 * A row's bits depend on nothing beside it: its sums go through the columns in their order. */
#include "runtime/cuda/few.cuh"
#include "runtime/cuda/fp8.h"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/tensor_map.h"

namespace {

constexpr uint32_t kGroups = 2, kThreads = 128 * (1 + kGroups), kPair = 2, kRows = 256, kHigh = 64; /* kHigh: weight rows of a box */
constexpr uint32_t kRowBox = 32, kSteps = 5, kLines = 3, kNotes = 2; /* of x, of weights and of tiles: how many at a time */

enum phase { UP, DOWN };

/* Places [first, first + rows) of the sorted order, of one expert; which of the `wide` stretches of its weight rows. more: false beyond
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
  uint8_t x[kSteps][kRows * kLine];
  uint8_t codes[kLines][2][kHigh * kLine];
  many_note note[kNotes];
  uint64_t x_full[kSteps], x_empty[kSteps], codes_full[kLines], codes_empty[kLines], told[kNotes], read[kNotes];
  uint32_t before[MM_CU_MAX_EXPERTS + 1]; /* tiles of lower experts, one across */
};

struct many_job {
  mm_cu_weight w;
  mm_cu_route r;
  __nv_bfloat16 *to;    /* UP: middle[place, I]; DOWN: pair_out[pair, H] */
  uint32_t wide, apart; /* tiles across; from the first box's rows to the second's */
  uint32_t piece;       /* UP: the columns of a piece of w2, as whose rows of x middle is laid; 0: it is not */
};

/* ---- rows ---- */

constexpr uint32_t kLayers = 8, kPlaces = 32, kAtOnce = 4; /* warps, places of a block, loads in flight */

/* to[place, k] = x's row of the place's pair, or its own where pair is NULL, each piece's columns as a product's fragments have them: of
 * lane t columns 8t … of 32 (4t … of 16), two by two, side by side (place_of_four). x may be to. */
template <uint32_t kPiece>
__global__ void __launch_bounds__(kLayers * 32)
    lay_many(__nv_bfloat16 *to, const __nv_bfloat16 *x, const uint32_t *pair, const uint32_t *places, uint32_t top_k, uint32_t k) {
  grid_wait_and_launch_next();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x * kPlaces, end = min(*places, block + kPlaces);
  for (uint32_t place = block + warp; place < end; place += kLayers) {
    const uint4 *from = reinterpret_cast<const uint4 *>(x + (size_t)(pair ? pair[place] / top_k : place) * k);
    uint4 *row = reinterpret_cast<uint4 *>(to + (size_t)place * k);
    for (uint32_t first = lane; first < (k / 8 + 31) / 32 * 32; first += kAtOnce * 32) {
      uint4 q[kAtOnce] = {};
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        if (first + i * 32 < k / 8) q[i] = from[first + i * 32];
      }
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; i++) {
        uint32_t v[4] = {q[i].x, q[i].y, q[i].z, q[i].w};
        if constexpr (kPiece == 32) {
          turn_words(v);
        } else {
          const bool odd = lane % 2;
          const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 1);
          if (odd) {
            v[0] = a, v[2] = v[1], v[1] = b;
          } else {
            v[1] = v[2], v[2] = a, v[3] = b;
          }
        }
        if (first + i * 32 < k / 8) row[first + i * 32] = make_uint4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- products ---- */

// clang-format off
#define MM_R96 MM_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
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

/* Steps of 64 columns of a line; of a tile, whole lines: behind the last column codes and x are zeros. */
template <mm_cu_code C>
constexpr uint32_t kStepsOf = codec<C>::kPiece / 8;
template <mm_cu_code C>
__device__ __forceinline__ uint32_t steps_of(uint32_t k) {
  return (k + kPart * kStepsOf<C> - 1) / (kPart * kStepsOf<C>)*kStepsOf<C>;
}

/* The scales of 64 columns of a thread's two rows. COARSE stands for every f32 grid whose cells have 64 columns at least. */
template <mm_cu_scale S>
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
      const uint32_t byte = bits[h] >> (8 * q) & 0xff, e = byte == 0 ? 0x40 : byte << 7, m = e << 16 | e;
#pragma unroll
      for (int i = 0; i < R; i++) v[i] = mul2(mul2(v[i], 0x7e807e80u /* 2^126 */), m);
    }
  }
};

/* What a thread knows of its weights: its place in a line of each box, and where its rows' scales begin. */
struct many_rows {
  uint32_t line, turn; /* of the row whose address it gives to ldmatrix: byte within both boxes, and row % 8 */
  const uint8_t *scale[2];
};

/* acc[64, N] = a tile, in wgmma's layout, a row of either box as consume says. step and line: those of the block so far. */
template <mm_cu_code C, mm_cu_scale S, uint32_t N>
__device__ __forceinline__ void multiply_tile(float (&acc)[N / 2], many_shared &sh, const mm_cu_weight &w, const many_rows &rows,
                                              uint32_t step, uint32_t line) {
  constexpr int kPiece = codec<C>::kPiece, kPieces = 32 / kPiece, kWords = kPiece / 8; /* of half a step; of a piece and row */
  const uint32_t steps = steps_of<C>(w.k), lane = threadIdx.x % 32;
  uint32_t a[2][2][4] = {}; /* of 32 columns and the 32 before: 16 columns, mma's a */
  many_scales<S> scales, next;
  scales.load(w, rows.scale, 0);
#pragma unroll
  for (uint32_t i = 0; i < N / 2; i++) acc[i] = 0;
  const auto release = [&](uint32_t now) {
    if (lane < kPair) barrier_arrive_pair(block_address(shared_address(&sh.x_empty[now % kSteps]), lane));
  };
  for (uint32_t s = 0; s < steps; line++) {
    const uint32_t stage = line % kLines, codes = shared_address(sh.codes[stage]) + rows.line;
    barrier_wait(shared_address(&sh.codes_full[stage]), line / kLines % 2);
#pragma unroll
    for (int i = 0; i < kStepsOf<C>; i++, s++) {
      const uint32_t at = step + s;
      barrier_wait(shared_address(&sh.x_full[at % kSteps]), at / kSteps % 2);
      const uint64_t x = operand(uniform(shared_address(sh.x[at % kSteps])));
      next.load(w, rows.scale, s + 1);
      uint32_t r[4]; /* pieces p and p + 1: piece, row */
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int q = 0; q < kPieces; q++) {
          const int p = half * kPieces + q; /* of the step */
          if (p % 2 == 0) ldmatrix4_at(r, codes + ((i * 2 * kPieces + p + lane / 16) ^ rows.turn) * 16);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            uint32_t v[kWords];
            widen_word<C>(v, r[p % 2 * 2 + h]);
            scales.apply(v, h, p);
#pragma unroll
            for (int j = 0; j < kWords; j++) a[half][q + j / 2][j % 2 * 2 + h] = v[j];
          }
        }
        if (half == 1 && i == kStepsOf<C> - 1) {
          __syncwarp();
          if (lane == 0) barrier_arrive(shared_address(&sh.codes_empty[stage]));
        }
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < 2; k++) multiply_held(acc, a[half][k], operand_after(x, half * 64 + k * 32));
        wgmma_commit();
        products_done<1>(a[1 - half]);
        if (half == 0 && s > 0) release(at - 1);
      }
      scales = next;
    }
  }
  wgmma_wait<0>(acc);
  release(step + steps - 1);
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

/* A tile from its first step to its end. at: the column of the result that the warp's weight rows begin with. */
template <phase kPhase, mm_cu_code C, mm_cu_scale S, uint32_t N>
__device__ __forceinline__ void make_tile(const many_job &job, many_shared &sh, const many_note &note, const many_rows &rows, uint32_t at,
                                          uint32_t step, uint32_t line) {
  const mm_cu_weight &w = job.w;
  const uint32_t lane = threadIdx.x % 32;
  float acc[N / 2];
  multiply_tile<C, S, N>(acc, sh, w, rows, step, line);
#pragma unroll
  for (uint32_t n = 0; n < N / 8; n += 4) {
    const uint32_t token = (n + lane % 4) * 8 + lane / 4; /* whose results the lane writes */
    if (kPhase == UP) {
      const float f = w.global ? w.global[note.t.expert] : 1.0f;
      uint32_t v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const float *d = &acc[(n + i) * 4];
        v[i] = pack2(silu(d[0] * f) * (d[2] * f), silu(d[1] * f) * (d[3] * f));
      }
      const uint4 q = rows_of_tokens(v);
      if (token < note.t.rows && at < w.n / 2) *reinterpret_cast<uint4 *>(job.to + (size_t)(note.t.first + token) * (w.n / 2) + at) = q;
    } else {
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        uint32_t v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
          const float2 f = *reinterpret_cast<const float2 *>(&note.factor[(n + i) * 8 + lane % 4 * 2]);
          v[i] = pack2(acc[(n + i) * 4 + h * 2] * f.x, acc[(n + i) * 4 + h * 2 + 1] * f.y);
        }
        const uint4 q = rows_of_tokens(v);
        const uint32_t column = at + h * kHigh;
        if (token < note.t.rows && column < w.n) *reinterpret_cast<uint4 *>(job.to + (size_t)note.pair[token] * w.n + column) = q;
      }
    }
  }
}

/* ---- roles ---- */

/* A warp. */
__device__ __forceinline__ void count_tiles(many_shared &sh, const many_job &job) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t below = 0;
  for (uint32_t e0 = 0; e0 < job.r.experts; e0 += 32) {
    const uint32_t e = e0 + lane, rows = e < job.r.experts ? job.r.offset[e + 1] - job.r.offset[e] : 0, mine = (rows + kRows - 1) / kRows;
    uint32_t end = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, end, d);
      if (lane >= d) end += left;
    }
    if (e < job.r.experts) sh.before[e] = below + end - mine;
    below += __shfl_sync(0xffffffffu, end, 31);
  }
  if (lane == 0) sh.before[job.r.experts] = below;
  __syncwarp();
}

/* Tiles of an expert follow one another, those of the same weight rows first. */
__device__ __forceinline__ many_tile find_tile(const many_shared &sh, const many_job &job, uint32_t index) {
  if (index >= sh.before[job.r.experts] * job.wide) return {};
  uint32_t e = 0;
  for (uint32_t end = job.r.experts; end - e > 1;) {
    const uint32_t middle = (e + end) / 2;
    (sh.before[middle] * job.wide <= index ? e : end) = middle;
  }
  const uint32_t high = sh.before[e + 1] - sh.before[e], in = index - sh.before[e] * job.wide;
  const uint32_t first = job.r.offset[e] + in % high * kRows;
  return {e, first, min(job.r.offset[e + 1] - first, kRows), in / high, true};
}

/* First weight row of the block's boxes. */
template <phase kPhase>
__device__ __forceinline__ uint32_t first_row(const many_tile &t, uint32_t rank) {
  return (t.across * kPair + rank) * (kPhase == UP ? kHigh : 2 * kHigh);
}

/* A warp notes tile `index`, the n-th of the block. */
template <phase kPhase>
__device__ __forceinline__ void tell(many_shared &sh, const many_job &job, uint32_t n, uint32_t index) {
  const uint32_t lane = threadIdx.x;
  many_note &to = sh.note[n % kNotes];
  if (n >= kNotes) barrier_wait(shared_address(&sh.read[n % kNotes]), (n / kNotes - 1) % 2);
  const many_tile t = find_tile(sh, job, index);
  if (lane == 0) to.t = t;
  if (kPhase == DOWN && t.more) {
    const float global = job.w.global ? job.w.global[t.expert] : 1.0f;
    for (uint32_t i = lane; i < kRows; i += 32) {
      const uint32_t pair = i < t.rows ? job.r.pair[t.first + i] : 0;
      to.pair[i] = pair, to.factor[i] = i < t.rows ? job.r.weight[pair] * global : 0.0f;
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(shared_address(&sh.told[n % kNotes]));
}

/* Of so many rows a tile's products have 64, 128, 192 or 256. */
__device__ __forceinline__ uint32_t rows_taken(uint32_t rows) { return (rows + 63) / 64 * 64; }

/* A warp. */
template <phase kPhase, mm_cu_code C>
__device__ __forceinline__ void produce(many_shared &sh, const many_job &job, const CUtensorMap *rows, const CUtensorMap *codes,
                                        uint32_t rank) {
  const uint32_t steps = steps_of<C>(job.w.k), pair = blockIdx.x / kPair, pairs = gridDim.x / kPair;
  count_tiles(sh, job);
  tell<kPhase>(sh, job, 0, pair);
  for (uint32_t n = 0, at = 0, line = 0;; n++) {
    const many_tile t = sh.note[n % kNotes].t;
    if (!t.more) return;
    const uint32_t taken = rows_taken(t.rows), weight = t.expert * job.w.n + first_row<kPhase>(t, rank);
    for (uint32_t s = 0; s < steps; s++, at++) {
      if (s % kStepsOf<C> == 0) {
        const uint32_t stage = line % kLines, full = shared_address(&sh.codes_full[stage]);
        if (line >= kLines) barrier_wait(shared_address(&sh.codes_empty[stage]), (line / kLines - 1) % 2);
        if (threadIdx.x == 0) {
          barrier_arrive_expecting(full, sizeof sh.codes[stage]);
          for (uint32_t box = 0; box < 2; box++)
            tensor_copy(shared_address(sh.codes[stage][box]), codes, s / kStepsOf<C> * kLine, weight + box * job.apart, full);
        }
        line++;
      }
      const uint32_t stage = at % kSteps, full = shared_address(&sh.x_full[stage]), half = taken / kPair;
      if (at >= kSteps) barrier_wait(shared_address(&sh.x_empty[stage]), (at / kSteps - 1) % 2);
      if (threadIdx.x == 0) {
        barrier_arrive_expecting(full, taken * kLine);
        for (uint32_t i = rank * half; i < (rank + 1) * half; i += kRowBox)
          tensor_copy_pair(shared_address(sh.x[stage]) + i * kLine, rows, s * kLine, t.first + i, full);
      }
      __syncwarp();
      if (s == min(kSteps, steps - 1)) tell<kPhase>(sh, job, n + 1, pair + (n + 1) * pairs);
    }
  }
}

/* A group of 128 threads. A warp's rows i of both boxes: UP, of a laid middle, are the columns that lie side by side in it. */
template <phase kPhase, mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ void consume(many_shared &sh, const many_job &job, uint32_t group, uint32_t rank) {
  const mm_cu_weight &w = job.w;
  const uint32_t steps = steps_of<C>(w.k), lines = steps / kStepsOf<C>;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, begin = group * 32 + warp * 8, piece = job.piece;
  const auto row_of = [&](uint32_t i) {
    return piece ? group * 32 + warp * 8 / piece * piece + i / 2 * (piece / 4) + warp * 8 % piece / 4 + i % 2 : begin + i;
  };
  const uint32_t lent = row_of(lane % 8), mine = row_of(lane / 4);
  many_rows rows = {(lane / 8 % 2 * kHigh + lent) * kLine, lent % 8, {}};
  for (uint32_t n = 0, step = 0, line = 0;; n++, step += steps, line += lines) {
    barrier_wait(shared_address(&sh.told[n % kNotes]), n / kNotes % 2);
    const many_note &note = sh.note[n % kNotes];
    const many_tile t = note.t;
    if (!t.more) return;
    const uint32_t first = first_row<kPhase>(t, rank);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const uint32_t row = min(first + h * job.apart + mine, w.n - 1);
      const size_t at = ((size_t)t.expert * w.scale_rows + (row >> w.cell_n_log2)) * w.scale_pitch;
      rows.scale[h] = static_cast<const uint8_t *>(w.scale) + at * (S == MM_CU_COARSE ? sizeof(float) : 1);
    }
    switch (rows_taken(t.rows)) {
      case 64: make_tile<kPhase, C, S, 64>(job, sh, note, rows, first + begin, step, line); break;
      case 128: make_tile<kPhase, C, S, 128>(job, sh, note, rows, first + begin, step, line); break;
      case 192: make_tile<kPhase, C, S, 192>(job, sh, note, rows, first + begin, step, line); break;
      default: make_tile<kPhase, C, S, 256>(job, sh, note, rows, first + begin, step, line); break;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&sh.read[n % kNotes]));
  }
}

#endif

template <phase kPhase, mm_cu_code C, mm_cu_scale S>
__global__ void MM_PAIR __launch_bounds__(kThreads, 1)
    experts_many(const __grid_constant__ CUtensorMap rows, const __grid_constant__ CUtensorMap codes,
                 const __grid_constant__ many_job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  many_shared &sh = *reinterpret_cast<many_shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSteps; i++)
      barrier_open(shared_address(&sh.x_full[i]), 1), barrier_open(shared_address(&sh.x_empty[i]), kPair * kGroups * 4);
    for (uint32_t i = 0; i < kLines; i++)
      barrier_open(shared_address(&sh.codes_full[i]), 1), barrier_open(shared_address(&sh.codes_empty[i]), kGroups * 4);
    for (uint32_t i = 0; i < kNotes; i++)
      barrier_open(shared_address(&sh.told[i]), 1), barrier_open(shared_address(&sh.read[i]), kGroups * 4);
  }
  pair_sync();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), rank = blockIdx.x % kPair;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<kPhase, C>(sh, job, &rows, &codes, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<kPhase, C, S>(sh, job, group - 1, rank);
  }
  __syncwarp();
  pair_sync(); /* the other block's last steps are told here too */
#else
  no_such_code();
#endif
}

/* One pass over x[place, k] as laid. */
struct many_launch {
  const mm_cu_weight &w;
  const __nv_bfloat16 *x;
  many_job job;
  phase which;
  uint32_t pairs; /* of tokens and choices */
  cudaStream_t s;

  template <mm_cu_code C, mm_cu_scale S>
  cudaError_t run() const {
    if constexpr (C == MM_CU_BF16) {
      return cudaErrorNotSupported;
    } else {
      constexpr mm_cu_scale kScale = S == MM_CU_FINE ? MM_CU_COARSE : S;
      CUtensorMap rows, codes;
      cudaError_t e = mm_cu_map_boxes(&rows, x, 2 * (uint64_t)w.k, pairs, kLine, kRowBox, CU_TENSOR_MAP_SWIZZLE_128B);
      if (e == cudaSuccess) e = mm_cu_map_boxes(&codes, w.data, w.pitch, (uint64_t)w.lead * w.n, kLine, kHigh, CU_TENSOR_MAP_SWIZZLE_128B);
      if (e != cudaSuccess) return e;
      const unsigned tiles = min(pairs, pairs / kRows + job.r.experts) * job.wide; /* the most there can be */
      return launch(which == UP ? experts_many<UP, C, kScale> : experts_many<DOWN, C, kScale>,
                    kPair * min(tiles, multiprocessors() / kPair), kThreads, sizeof(many_shared), s, rows, codes, job);
    }
  }
};

/* Columns of a piece. */
uint32_t piece_of(const mm_cu_weight &w) { return w.code == MM_CU_E4M3 ? 16 : 32; }

/* pair NULL: x's rows are the places already, and may be `to`. */
cudaError_t lay(__nv_bfloat16 *to, const __nv_bfloat16 *x, const uint32_t *pair, const mm_cu_weight &w, const mm_cu_route &r,
                uint32_t pairs, cudaStream_t s) {
  return launch(piece_of(w) == 16 ? lay_many<16> : lay_many<32>, ceil_div(pairs, kPlaces), kLayers * 32, 0, s, to, x, pair,
                r.offset + r.experts, r.top_k, w.k);
}

/* a.middle; piece: laid for w2's pieces of so many columns, or as it is (0). a.pair_out holds the rows. */
cudaError_t up_many(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, uint32_t piece, cudaStream_t s) {
  const uint32_t pairs = a.tokens * r.top_k;
  __nv_bfloat16 *const x = reinterpret_cast<__nv_bfloat16 *>(a.pair_out);
  const cudaError_t e = lay(x, a.x, r.pair, w13, r, pairs, s);
  const many_job job = {w13, r, a.middle, ceil_div(w13.n / 2, kPair * kHigh), w13.n / 2, piece};
  return e != cudaSuccess ? e : for_scheme(w13, many_launch{w13, x, job, UP, pairs, s});
}

bool takes_many(const mm_cu_weight &w) {
  const bool coarse = w.scale_kind == MM_CU_COARSE || (w.scale_kind == MM_CU_FINE && w.cell_k_log2 >= 6);
  return w.code != MM_CU_BF16 && (coarse || w.scale_kind == MM_CU_NV || w.scale_kind == MM_CU_MX) && w.k % 32 == 0 && w.n % 8 == 0;
}

}  // namespace

bool mm_cu_takes_many(const mm_cu_weight &w13, const mm_cu_weight &w2) {
  return hopper() && takes_many(w13) && takes_many(w2) && w13.k == w2.n;
}

cudaError_t mm_cu_experts_many(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s) {
  if (!mm_cu_takes_many(w13, w2)) return cudaErrorNotSupported;
  const uint32_t pairs = a.tokens * r.top_k;
  const bool kept = w2.rounding.kind == MM_ACT_KEPT;
  __nv_bfloat16 *const out = reinterpret_cast<__nv_bfloat16 *>(a.pair_out);
  cudaError_t e = up_many(w13, r, a, kept ? piece_of(w2) : 0, s);
  if (e == cudaSuccess && !kept) e = mm_cu_round(a.middle, pairs, {a.middle, w2.k, nullptr}, w2.rounding, s);
  if (e == cudaSuccess && !kept) e = lay(a.middle, a.middle, nullptr, w2, r, pairs, s);
  const many_job job = {w2, r, out, ceil_div(w2.n, 2 * kPair * kHigh), kHigh, 0};
  if (e == cudaSuccess) e = for_scheme(w2, many_launch{w2, a.middle, job, DOWN, pairs, s});
  return e != cudaSuccess ? e : mm_cu_sum_choices(a.y, out, r, a.tokens, w2.n, s);
}

cudaError_t mm_cu_experts_many_middle(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s) {
  return up_many(w13, r, a, 0, s);
}
