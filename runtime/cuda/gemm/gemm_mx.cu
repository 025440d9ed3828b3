/* Products of rows in MXFP8 with weights in MXFP8 on sm_90a, whose tensor cores multiply E4M3 codes and know no scales: powers of two for
 * 32 columns of a row on both sides. Each 32 columns of k are one wgmma into fresh sums, which are scaled and added in f32.
 *
 * A scale of its own for every sum and 32 columns would take two operations a sum: 2,048 issue slots of a scheduler for 128 columns of 128
 * weight rows by 256 rows, which take the tensor cores 1,024 clocks in FP8 and 2,048 in bf16. So weights are wgmma's M side, where a thread
 * has two weight rows, and their scales are the factor of the multiply-add. The rows' scales are taken out of the loop: sums are kept in
 * units of the row's scale so far, and only where that changes are they multiplied once, by a power of two and so exactly. The rows'
 * encoding (encode_mx) gives 128 columns one scale where it can: once in 128 columns then, 640 operations a thread instead of 1,024.
 *
 * A 2-CTA cluster takes a tile: up to 256 rows, and 128 weight rows each. Both blocks' rows come by TMA multicast, half from each. In
 * each block one warp loads codes, kStages steps of 128 columns ahead, and records tiles; two make the rows' factors; two groups of
 * 128 threads multiply 64 weight rows each. A row's bits depend on that row alone: its sums go through the columns in their order, and
 * units change them by powers of two.
 *
 * Experts' products by these tiles were slower than widened ones (RESULTS.md), so that they are not here. */
#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/tensor_map.h"
#include "runtime/cuda/core/weight.cuh"

namespace {

constexpr uint32_t kThreads = 384, kPair = 2, kRows = 256, kHigh = 128, kLine = 128; /* kHigh: weight rows of a block */
constexpr uint32_t kStages = 4, kNotes = 2, kSizes = 4;
/* Units of a row's sums fall by 2^kDrop at most, so that the sums stay finite. */
[[maybe_unused]] constexpr int kDrop = 60;
__host__ __device__ constexpr uint32_t tile_size(uint32_t i) { return (i + 1) * 64; }

struct tile {
  uint32_t first, rows, across;
  bool more;
};
struct note {
  float unit[kRows]; /* of each row's sums at the tile's end */
  tile t;
};
struct stage {
  uint8_t x[kRows * kLine], codes[kHigh * kLine];
};
/* Factors of a row for 32 columns: ratio, of its sums so far; rest, of the products of these columns (bf16). */
struct factors {
  float ratio[4][kRows];
  uint16_t rest[4][kRows];
};
struct shared {
  stage step[kStages];
  factors of[kStages];
  note notes[kNotes];
  uint32_t slow[kStages][2]; /* of half of the rows: ratios of other than the first 32 columns count, and rests; else they are 1 */
  uint64_t full[kStages], empty[kStages], published[kNotes], read[kNotes];
};

struct maps {
  CUtensorMap rows[kSizes], codes; /* boxes of half a tile's rows; of kHigh weight rows */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* Words of four times eight rows of x, of two weight rows' results each (pack2), as 16 bytes of one row of y: of the eight number lane % 4,
 * row lane / 4. */
template <uint32_t N, class Value>
__device__ __forceinline__ uint4 eight_columns(uint32_t n, const Value &value) {
  uint32_t v[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) v[i] = value((n + i) * 4, (n + i) * 8 + threadIdx.x % 4 * 2);
  return rows_of_tokens(v);
}
#endif

struct product_job {
  mm_cu_weight w;
  mm_cu_codes rows; /* scale: words of four exponents for 128 columns */
  mm_cu_product a;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  /* Eight tiles of up to 256 rows meet all weights before the next eight. */
  __device__ tile find(uint32_t index) const {
    const uint32_t tiles = (rows.rows + kRows - 1) / kRows, wide = (w.n + kPair * kHigh - 1) / (kPair * kHigh);
    if (index >= tiles * wide) return {};
    const uint32_t strip = index / (8 * wide), in = index % (8 * wide), tall = min(8u, tiles - strip * 8);
    const uint32_t each = (rows.rows + tiles - 1) / tiles, first = (strip * 8 + in % tall) * each;
    return {first, min(rows.rows - first, each), in / tall, true};
  }
  /* at: the column that the warp's weight rows begin with. */
  template <uint32_t N>
  __device__ __forceinline__ void emit(const float (&acc)[N / 2], const note &now, uint32_t at) const {
    const uint32_t lane = threadIdx.x % 32;
    if (a.y32 || w.n % 8 != 0) {
#pragma unroll
      for (uint32_t i = 0; i < N / 2; i++) {
        const uint32_t of = i / 4 * 8 + lane % 4 * 2 + i % 2, column = at + lane / 4 + i % 4 / 2 * 8;
        if (of >= now.t.rows || column >= w.n) continue;
        const size_t to = (size_t)(now.t.first + of) * w.n + column;
        const float v = acc[i] * now.unit[of];
        if (a.y32) {
          a.y32[to] = v;
        } else {
          a.y[to] = __float2bfloat16_rn(v);
        }
      }
      return;
    }
    __nv_bfloat16 *const besides = a.push.epoch ? a.push.to[*a.push.epoch & 1] : nullptr;
#pragma unroll
    for (uint32_t n = 0; n < N / 8; n += 4) {
#pragma unroll
      for (uint32_t h = 0; h < 2; h++) {
        const uint4 q = eight_columns<N>(
            n, [&](uint32_t i, uint32_t of) { return pack2(acc[i + h * 2] * now.unit[of], acc[i + h * 2 + 1] * now.unit[of + 1]); });
        const uint32_t of = (n + lane % 4) * 8 + lane / 4, column = at + h * 8;
        if (of >= now.t.rows || column >= w.n) continue;
        const size_t to = (size_t)(now.t.first + of) * w.n + column;
        *reinterpret_cast<uint4 *>(a.y + to) = q;
        if (besides) *reinterpret_cast<uint4 *>(besides + to) = q;
      }
    }
  }
#endif
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ __forceinline__ uint32_t size_of(uint32_t rows) { return (rows + 63) / 64 - 1; }
/* 2^(byte j - 127). */
__device__ __forceinline__ float power(uint32_t word, int j) {
  const uint32_t e = word >> 8 * j & 0xff;
  return __uint_as_float(e == 0 ? 0x400000u : e << 23);
}
/* 2^e, 0 below the normal numbers. */
__device__ __forceinline__ float power_of(int e) { return __uint_as_float((uint32_t)max(e + 127, 0) << 23); }

/* A warp posts tile `index`, the n-th of the block. */
__device__ __forceinline__ void post(const product_job &job, shared &sh, uint32_t n, uint32_t index) {
  const uint32_t lane = threadIdx.x % 32;
  note &to = sh.notes[n % kNotes];
  if (n >= kNotes) mbarrier_wait(shared_address(&sh.read[n % kNotes]), (n / kNotes - 1) % 2);
  const tile t = job.find(index);
  if (lane == 0) to.t = t;
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(&sh.published[n % kNotes]));
}

/* A warp: codes of each step, half of the rows into both blocks, and the next tile. */
__device__ __forceinline__ void produce(const product_job &job, shared &sh, const maps &m, uint32_t rank) {
  const uint32_t steps = job.w.k / kLine, pair = blockIdx.x / kPair, pairs = gridDim.x / kPair;
  post(job, sh, 0, pair);
  for (uint32_t n = 0, at = 0;; n++) {
    const tile t = sh.notes[n % kNotes].t;
    if (!t.more) return;
    const uint32_t size = size_of(t.rows), taken = tile_size(size), half = taken / kPair * rank;
    for (uint32_t s = 0; s < steps; s++, at++) {
      const uint32_t full = shared_address(&sh.full[at % kStages]);
      stage &to = sh.step[at % kStages];
      if (at >= kStages) mbarrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
      if (one_lane()) {
        mbarrier_arrive_expect_tx(full, sizeof to.codes + taken * kLine);
        tma_load(shared_address(to.codes), &m.codes, s * kLine, (t.across * kPair + rank) * kHigh, full);
        tma_load_multicast(shared_address(to.x) + half * kLine, &m.rows[size], s * kLine, t.first + half, full);
      }
      __syncwarp();
      if (s == steps / 2) post(job, sh, n + 1, pair + (n + 1) * pairs);
    }
  }
}

/* Two warps: the factors of each step, of half of the rows each. A lane has every 32nd row: the unit of its sums, and the largest scale so
 * far (exponents + 127). */
__device__ __forceinline__ void find_factors(const product_job &job, shared &sh, uint32_t half) {
  constexpr uint32_t kEach = kRows / 64;
  const uint32_t steps = job.w.k / kLine, lane = threadIdx.x % 32, row = half * (kRows / 2) + lane;
  for (uint32_t n = 0, at = 0;; n++) {
    mbarrier_wait(shared_address(&sh.published[n % kNotes]), n / kNotes % 2);
    const tile &t = sh.notes[n % kNotes].t;
    if (!t.more) return;
    uint32_t next[kEach], from[kEach];
    int unit[kEach], most[kEach];
    const uint32_t *words = reinterpret_cast<const uint32_t *>(job.rows.scale) + t.first;
#pragma unroll
    for (uint32_t i = 0; i < kEach; i++) {
      from[i] = min(row + i * 32, t.rows - 1);
      next[i] = words[from[i]];
      unit[i] = most[i] = (int)(next[i] & 0xff);
    }
    for (uint32_t s = 0; s < steps; s++, at++) {
      uint32_t now[kEach];
      if (s + 1 < steps) words += job.rows.scale_pitch;
#pragma unroll
      for (uint32_t i = 0; i < kEach; i++) now[i] = next[i], next[i] = words[from[i]];
      factors &to = sh.of[at % kStages];
      if (at >= kStages) mbarrier_wait(shared_address(&sh.empty[at % kStages]), (at / kStages - 1) % 2);
      bool slow = false;
#pragma unroll
      for (uint32_t i = 0; i < kEach; i++) {
        const int e = (int)(now[i] & 0xff);
        slow |= now[i] != (uint32_t)e * 0x01010101u || e < most[i] - kDrop;
      }
      slow = __any_sync(0xffffffffu, slow);
#pragma unroll
      for (uint32_t i = 0; i < kEach; i++) {
        if (slow) continue;
        const int e = (int)(now[i] & 0xff);
        to.ratio[0][row + i * 32] = power_of(unit[i] - e);
        unit[i] = e, most[i] = max(most[i], e);
      }
#pragma unroll 1
      for (int j = 0; slow && j < 4; j++) {
#pragma unroll
        for (uint32_t i = 0; i < kEach; i++) {
          const int e = (int)(now[i] >> 8 * j & 0xff), to_unit = max(e, most[i] - kDrop);
          to.ratio[j][row + i * 32] = power_of(unit[i] - to_unit);
          to.rest[j][row + i * 32] = (uint16_t)(__float_as_uint(power_of(e - to_unit)) >> 16);
          most[i] = max(most[i], e), unit[i] = to_unit;
        }
      }
      if (s == steps - 1) {
#pragma unroll
        for (uint32_t i = 0; i < kEach; i++) sh.notes[n % kNotes].unit[row + i * 32] = power_of(unit[i] - 127);
      }
      if (lane == 0) sh.slow[at % kStages][half] = slow;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&sh.full[at % kStages]));
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.read[n % kNotes]));
  }
}

/* The two weight rows of a thread: where its warp's codes lie in a step, and their exponents of four times 32 columns, a step ahead. */
struct weight_rows {
  uint32_t line, turn;
  const uint32_t *scale[2];
  uint32_t next[2];

  /* Rows row and row + 8. */
  __device__ __forceinline__ void begin(const mm_cu_weight &w, uint32_t row) {
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      const size_t at = (size_t)min(row + h * 8, w.n - 1) * w.scale_pitch;
      scale[h] = reinterpret_cast<const uint32_t *>(static_cast<const uint8_t *>(w.scale) + at), next[h] = scale[h][0];
    }
  }
};

/* acc of 64 rows += part under the weights' factors. kKind 0: as it is; 1: sums change their unit before; 2: products have a factor too.
 * ratio, rest: addresses of the lane's first of each. */
template <int kKind>
__device__ __forceinline__ void add_part(float *acc, const float (&part)[32], const float (&f)[2], uint32_t ratio, uint32_t rest) {
#pragma unroll
  for (int n = 0; n < 8; n++) {
    float r[2] = {1, 1}, q[2] = {1, 1};
    if (kKind > 0) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r[0]), "=f"(r[1]) : "r"(ratio + n * 32) : "memory");
    if (kKind > 1) {
      uint32_t both;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(both) : "r"(rest + n * 16) : "memory");
      q[0] = low(both), q[1] = high(both);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float &to = acc[n * 4 + i];
      to = fmaf(part[n * 4 + i], kKind > 1 ? f[i / 2] * q[i % 2] : f[i / 2], kKind > 0 ? to * r[i % 2] : to);
    }
  }
}

/* A step whose scales change within its 128 columns, or fall far: one part after the other. of: address of the lane's factors. */
template <int kParts>
__device__ __forceinline__ void multiply_slowly(float *acc, float (&part)[32], uint32_t codes, uint32_t turn, uint64_t x, uint32_t of,
                                                const uint32_t (&scale)[2], const uint32_t (&slow)[2]) {
  const uint32_t rest = of - threadIdx.x % 4 * 4 + sizeof(float) * 4 * kRows;
#pragma unroll 1
  for (uint32_t j = 0; j < 4; j++) {
    uint32_t held[4];
    const float f[2] = {power(scale[0], j), power(scale[1], j)};
    ldmatrix4_at(held, codes + ((j * 2 + threadIdx.x % 32 / 16) ^ turn) * 16);
#pragma unroll
    for (int q = 0; q < kParts; q++) {
      wgmma_begin();
      wgmma_e4m3(part, held, operand_after(x, q * 64 * kLine + j * 32), 0);
      wgmma_commit();
      wgmma_wait<0>(part);
      if (slow[q / 2]) {
        add_part<2>(acc + q * 32, part, f, of + (j * kRows + q * 64) * 4, rest + (j * kRows + q * 64) * 2);
      } else if (j == 0) {
        add_part<1>(acc + q * 32, part, f, of + q * 64 * 4, 0);
      } else {
        add_part<0>(acc + q * 32, part, f, 0, 0);
      }
    }
  }
}

/* d[64, 128] = a[64, 32] · b[128, 32]ᵀ, both e4m3, as wgmma_e4m3. */
__device__ __forceinline__ void wgmma_wide(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MM_R64
               "}, {%64,%65,%66,%67}, %68, p, 1, 1;\n}"
               : MM_F32(d, 0), MM_F32(d, 32)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* A step, 128 rows at a time: the other group multiplies while this one adds. */
template <int kParts>
__device__ __forceinline__ void multiply_wide(float *acc, float (&part)[2][32], uint32_t codes, uint32_t turn, uint64_t x, uint32_t of,
                                              const uint32_t (&scale)[2]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    uint32_t held[4];
    const float f[2] = {power(scale[0], j), power(scale[1], j)};
    ldmatrix4_at(held, codes + ((j * 2 + threadIdx.x % 32 / 16) ^ turn) * 16);
#pragma unroll
    for (int q = 0; q < kParts; q += 2) {
      auto &wide = *reinterpret_cast<float(*)[64]>(&part);
      wgmma_begin();
      wgmma_wide(wide, held, operand_after(x, q * 64 * kLine + j * 32));
      wgmma_commit();
      wgmma_wait<0>(wide);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (j == 0) {
          add_part<1>(acc + (q + h) * 32, part[h], f, of + (q + h) * 64 * 4, 0);
        } else {
          add_part<0>(acc + (q + h) * 32, part[h], f, 0, 0);
        }
      }
    }
  }
}

/* acc[64, N] of a tile, in wgmma's layout; at: the block's steps so far. */
template <uint32_t N>
__device__ __forceinline__ void multiply(float (&acc)[N / 2], shared &sh, const mm_cu_weight &w, weight_rows &rows, uint32_t at) {
  constexpr int kParts = N / 64;
  const uint32_t steps = w.k / kLine, lane = threadIdx.x % 32;
  float part[2][32] = {};
#pragma unroll
  for (uint32_t i = 0; i < N / 2; i++) acc[i] = 0;
  for (uint32_t s = 0; s < steps; s++, at++) {
    stage &step = sh.step[at % kStages];
    const uint32_t codes = shared_address(step.codes) + rows.line, of = shared_address(&sh.of[at % kStages]) + lane % 4 * 8;
    const uint32_t now[2] = {rows.next[0], rows.next[1]};
    mbarrier_wait(shared_address(&sh.full[at % kStages]), at / kStages % 2);
    const uint32_t slow[2] = {uniform(sh.slow[at % kStages][0]), N > 128 ? uniform(sh.slow[at % kStages][1]) : 0};
    const uint64_t x = operand(uniform(shared_address(step.x)));
#pragma unroll
    for (int h = 0; h < 2; h++) rows.next[h] = rows.scale[h][min(s + 1, steps - 1)];
    if (slow[0] | slow[1]) {
      multiply_slowly<kParts>(acc, part[0], codes, rows.turn, x, of, now, slow);
    } else if constexpr (N % 128 == 0) {
      multiply_wide<kParts>(acc, part, codes, rows.turn, x, of, now);
    } else {
      uint32_t held[2][4];
      ldmatrix4_at(held[0], codes + (lane / 16 ^ rows.turn) * 16);
      auto add = [&](int i) { /* part i of the step: its 32 columns, its 64 rows */
                              const int j = i / kParts, q = i % kParts;
                              const float f[2] = {power(now[0], j), power(now[1], j)};
                              if (j == 0) {
                                add_part<1>(acc + q * 32, part[i % 2], f, of + q * 64 * 4, 0);
                              } else {
                                add_part<0>(acc + q * 32, part[i % 2], f, 0, 0);
                              }
      };
#pragma unroll
      for (int i = 0; i < 4 * kParts; i++) {
        const int j = i / kParts, q = i % kParts;
        wgmma_begin();
        wgmma_e4m3(part[i % 2], held[j % 2], operand_after(x, q * 64 * kLine + j * 32), 0);
        wgmma_commit();
        wgmma_wait<1>(part[(i + 1) % 2]);
        if (q == 0 && j < 3) ldmatrix4_at(held[(j + 1) % 2], codes + (((j + 1) * 2 + lane / 16) ^ rows.turn) * 16);
        if (i > 0) add(i - 1);
      }
      wgmma_wait<0>(part[1]);
      add(4 * kParts - 1);
    }
    __syncwarp();
    if (lane < kPair) mbarrier_arrive_cluster(block_address(shared_address(&sh.empty[at % kStages]), lane));
  }
}

/* A group of 128 threads, 16 weight rows to a warp. */
__device__ __forceinline__ void consume(const product_job &job, shared &sh, uint32_t group, uint32_t rank) {
  const uint32_t steps = job.w.k / kLine, lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const uint32_t begin = group * 64 + warp * 16;
  weight_rows rows = {(lane / 8 % 2 * 8 + begin + lane % 8) * kLine, lane % 8, {}, {}};
  bool more = false;
  auto first_row = [&](const tile &t) { return (t.across * kPair + rank) * kHigh + begin; };
  auto begin_tile = [&](uint32_t n) {
    mbarrier_wait(shared_address(&sh.published[n % kNotes]), n / kNotes % 2);
    const tile &t = sh.notes[n % kNotes].t;
    more = t.more;
    if (more) rows.begin(job.w, first_row(t) + lane / 4);
  };
  begin_tile(0);
  for (uint32_t n = 0, at = 0; more; n++, at += steps) {
    const note &now = sh.notes[n % kNotes];
    const uint32_t column = first_row(now.t);
    auto make = [&](auto &acc) {
      multiply<sizeof acc / 2>(acc, sh, job.w, rows, at);
      begin_tile(n + 1);
      job.emit<sizeof acc / 2>(acc, now, column);
    };
    switch (size_of(now.t.rows)) {
      case 0: {
        float acc[32];
        make(acc);
        break;
      }
      case 1: {
        float acc[64];
        make(acc);
        break;
      }
      case 2: {
        float acc[96];
        make(acc);
        break;
      }
      default: {
        float acc[128];
        make(acc);
        break;
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&sh.read[n % kNotes]));
  }
}

#endif

__global__ void MM_PAIR __launch_bounds__(kThreads, 1) product_mx(const __grid_constant__ maps m, const __grid_constant__ product_job job) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t raw[];
  shared &sh = *reinterpret_cast<shared *>(raw);
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; i++)
      mbarrier_init(shared_address(&sh.full[i]), 3), mbarrier_init(shared_address(&sh.empty[i]), kPair * 8);
    for (uint32_t i = 0; i < kNotes; i++)
      mbarrier_init(shared_address(&sh.published[i]), 1), mbarrier_init(shared_address(&sh.read[i]), 10);
  }
  cluster_sync();
  grid_wait_and_launch_next();
  const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), rank = blockIdx.x % kPair;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce(job, sh, m, rank);
    if (threadIdx.x / 32 == 1 || threadIdx.x / 32 == 2) find_factors(job, sh, threadIdx.x / 32 - 1);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(job, sh, group - 1, rank);
  }
  __syncwarp();
  cluster_sync(); /* the other block's last arrivals have come by then too */
#else
  no_such_code();
#endif
}

}  // namespace

cudaError_t mm_cu_gemm_mx(const mm_cu_weight &w, const mm_cu_product &a, cudaStream_t s) {
  maps m;
  cudaError_t e = mm_cu_refuse(MM_CU_GEMM_MX, {&w, nullptr, a.x.rows});
  if (e == cudaSuccess) e = mm_cu_map_boxes(&m.codes, w.data, w.pitch, w.n, kLine, kHigh, CU_TENSOR_MAP_SWIZZLE_128B);
  for (uint32_t i = 0; i < kSizes && e == cudaSuccess; i++)
    e = mm_cu_map_boxes(&m.rows[i], a.x.code, a.x.pitch, a.x.rows, kLine, tile_size(i) / kPair, CU_TENSOR_MAP_SWIZZLE_128B);
  if (e != cudaSuccess) return e;
  const product_job job = {w, a.x, a};
  const uint32_t tiles = ceil_div(a.x.rows, kRows) * ceil_div(w.n, kPair * kHigh);
  return launch(product_mx, kPair * min(tiles, multiprocessors() / kPair), kThreads, sizeof(shared), s, m, job);
}
