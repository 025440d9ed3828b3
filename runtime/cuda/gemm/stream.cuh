/* The core of every decode product: at most 16 activation rows against weight rows streamed once from memory.
 *
 * A block takes groups of at most 48 weight rows. A stage is 128 bytes of every row of a group; stages go through a ring in shared memory,
 * filled far ahead by tensor copies (sm_90a) or cp.async. Row r's 16-byte piece c lies at piece c ^ (r % 8), for ldmatrix's banks.
 *
 * The warps share a row's stages in turn, each with its own part of the ring: weight rows are the M side of mma.m16n8k16, tokens its N
 * side. Lane (g, t) of a fragment holds bytes 4t … 4t+3 of a piece of rows g and g+8; which k an mma slot means is free as long as both
 * sides agree, so what ldmatrix gives needs no shuffle. Codes become f16 in registers, exactly; activations become f16 times a power of two
 * of the token and stage. The warps' sums meet in shared memory in a fixed order, which does not depend on the other tokens, so a token's
 * result has the same bits in every batch of its bucket: alone, up to 8, up to 16.
 *
 * A job says what the rows are:
 *   kTokens, kWarps                1, 8 or 16, the most there may be; of a block (stream_plan.warps)
 *   kBoxes                         1, or 2: then a group has a second run of rows, gap() rows behind the first
 *   groups(), rows(group)          the groups; a block takes every gridDim.x-th
 *   segments()                     a row's k axis is so many chunks of w.k
 *   matrix(group, segment)         in which the group's rows lie for that chunk
 *   x(segment, token)              the activations of that chunk, NULL for zeros
 *   tokens(), emit(group, row, token, sum)   sum(b) is the product of the row of run b */
#ifndef MM_CUDA_STREAM_CUH
#define MM_CUDA_STREAM_CUH

#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/weight.cuh"
#include "runtime/cuda/gemm/stream_plan.h"

template <mm_cu_code C, mm_cu_scale S>
struct stream_kind {
  static constexpr int kPiece = codec<C>::kPiece; /* weights of 16 bytes */
  static constexpr int kRegs = kPiece / 8;        /* activation registers that go with a lane's part of a piece */
  static constexpr bool kHalf = C != MM_CU_BF16 && S != MM_CU_FINE;
  /* Power of two that the f16 of the codes lack (codec::halves); the factor of an NV weight holds 2^8 of it already. */
  static constexpr float kFactor = C != MM_CU_E2M1 ? 1.0f : S == MM_CU_NV ? 0x1p6f : 0x1p14f;
};

/* ---- stages ---- */

/* The stages of a warp, in order. */
template <class Job>
struct stream_cursor {
  static constexpr uint32_t kWarps = Job::kWarps;
  const stream_plan &p;
  const Job &job;
  uint32_t group, segment, step;

  __device__ __forceinline__ stream_cursor(const stream_plan &plan, const Job &j)
      : p(plan), job(j), group(blockIdx.x), segment(0), step(threadIdx.x / 32) {
    if (!more()) return;
    if (Job::kTokens > 1) step = first();
    if (step >= p.steps) turn();
  }
  __device__ __forceinline__ bool more() const { return group < job.groups(); }
  /* Several tokens: the matrix, not the segment's number, says which warp comes first: that does not change with their experts. */
  __device__ __forceinline__ uint32_t first() const {
    return (threadIdx.x / 32 + kWarps - job.matrix(group, segment) * p.steps % kWarps) % kWarps;
  }
  /* True if the next stage belongs to another group or segment. */
  __device__ __forceinline__ bool next() {
    step += kWarps;
    if (step < p.steps) return false;
    turn();
    return true;
  }
  /* To the next segment in which the warp has a stage. A single token's warps take all stages of the block in turn. */
  __device__ __forceinline__ void turn() {
    do {
      if (++segment == job.segments()) segment = 0, group += gridDim.x;
      if (!more()) break;
      step = Job::kTokens > 1 ? first() : step - p.steps;
    } while (step >= p.steps);
  }
};

/* The scales of row `in` of a group, from the first of its matrix. */
template <class Job>
__device__ __forceinline__ uint32_t scale_row(const mm_cu_weight &w, const stream_cursor<Job> &at, uint32_t in) {
  const uint32_t run = at.p.run, first = at.job.rows(at.group).first;
  return (min(first + (Job::kBoxes == 2 && in >= run ? in - run + at.job.gap() : in), w.n - 1) >> w.cell_n_log2) * w.scale_pitch;
}
template <class Job>
__device__ __forceinline__ const float *scale_matrix(const mm_cu_weight &w, const stream_cursor<Job> &at) {
  return static_cast<const float *>(w.scale) + (size_t)at.job.matrix(at.group, at.segment) * (w.scale_rows * w.scale_pitch);
}

/* A warp's part of the ring: p.depth places. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct stream_ring {
  static constexpr bool kByteScales = S == MM_CU_NV || S == MM_CU_MX;
  const mm_cu_weight &w;
  const stream_plan &p;
  const stream_source &from;
  const uint32_t codes, scales, full; /* shared addresses of place 0 */
  const uint32_t last_cell;           /* COARSE: column of the scale grid */
  stream_cursor<Job> ahead;           /* the stage to be fetched next */
  uint32_t group, first, row;         /* its group's first row in the matrix, and counted over all matrices */
  const float *matrix;                /* COARSE: its scales, */
  uint32_t line[2];                   /* and there those of rows l and l+32, l the lane */
  uint32_t place = 0, phase = 0;

  __device__ __forceinline__ stream_ring(const mm_cu_weight &weight, const stream_source &source, const stream_plan &plan, const Job &job,
                                         uint32_t shared)
      : w(weight),
        p(plan),
        from(source),
        codes(shared + threadIdx.x / 32 * p.depth * p.code_bytes),
        scales(shared + p.scales + threadIdx.x / 32 * p.depth * p.scale_bytes),
        full(shared + p.barriers + threadIdx.x / 32 * p.depth * 8),
        last_cell((weight.k - 1) >> weight.cell_k_log2),
        ahead(plan, job),
        group(~0u) {
    open();
    find();
    for (uint32_t i = 0; i < p.depth; i++) fetch(i);
  }
  __device__ __forceinline__ void find() {
    if (!ahead.more()) return;
    if (ahead.group != group) {
      group = ahead.group, first = ahead.job.rows(group).first;
      if (S == MM_CU_COARSE) line[0] = scale_row(w, ahead, threadIdx.x % 32), line[1] = scale_row(w, ahead, threadIdx.x % 32 + 32);
    }
    row = ahead.job.matrix(group, ahead.segment) * w.n + first;
    if (S == MM_CU_COARSE) matrix = scale_matrix(w, ahead);
  }
  /* COARSE: the column of the scale grid for a half of the stage. */
  __device__ __forceinline__ uint32_t scale_cell(uint32_t half) const {
    return min((ahead.step * 2 + half) * (4 * codec<C>::kPiece) >> w.cell_k_log2, last_cell);
  }
  /* COARSE: of all rows for the first half of the stage, then for the second. */
  __device__ __forceinline__ void fetch_scales(uint32_t to) const {
    const uint32_t at = scales + to * p.scale_bytes + threadIdx.x % 32 * 4, rows = Job::kBoxes * p.run;
    const float *cell[2] = {matrix + scale_cell(0), matrix + scale_cell(1)};
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      if (i * 32 + threadIdx.x % 32 >= rows) break;
      copy4_to(at + i * 128, cell[0] + line[i]), copy4_to(at + i * 128 + rows * 4, cell[1] + line[i]);
    }
  }
  __device__ __forceinline__ uint32_t scale_at() const { return ahead.step / kByteSteps<C, S> * 16; } /* in a row of byte scales */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  /* racecheck says that this writes what ldmatrix reads and cp.async writes elsewhere. The addresses it names lie in the rings of codes and
   * of scales, where no plan of its launches has a barrier. */
  __device__ __forceinline__ void open() const {
    if (threadIdx.x % 32 == 0) {
      for (uint32_t i = 0; i < p.depth; i++) mbarrier_init(full + i * 8, S == MM_CU_COARSE ? 33 : 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }
  __device__ __forceinline__ void fetch(uint32_t to) {
    if (!ahead.more()) return;
    if (threadIdx.x % 32 == 0) {
      const uint32_t barrier = full + to * 8;
      mbarrier_arrive_expect_tx(barrier, p.fetch_bytes);
#pragma unroll
      for (uint32_t run = 0; run < Job::kBoxes; run++) {
        const uint32_t in = run * p.run, n = row + run * ahead.job.gap();
        tma_load_once(codes + to * p.code_bytes + in * kLine, &from.codes, ahead.step * kLine, n, barrier);
        if (kByteScales) tma_load(scales + to * p.scale_bytes + in * 16, &from.scales, scale_at(), n, barrier);
      }
    }
    if (S == MM_CU_COARSE) {
      fetch_scales(to);
      mbarrier_arrive_copied(full + to * 8);
    }
    if (ahead.next()) find();
  }
  __device__ __forceinline__ void wait() const { mbarrier_wait(full + place * 8, phase); }
#else
  __device__ __forceinline__ void open() const {}
  __device__ __forceinline__ void fetch(uint32_t to) {
    if (ahead.more()) {
      fetch_rows(codes + to * p.code_bytes, w.data, w.pitch, ahead.step * kLine, kLine / 16);
      if (kByteScales) fetch_rows(scales + to * p.scale_bytes, static_cast<const uint8_t *>(w.scale), w.scale_pitch, scale_at(), 1);
      if (S == MM_CU_COARSE) fetch_scales(to);
      if (ahead.next()) find();
    }
    copy_commit();
  }
  /* `pieces` of 16 bytes from byte `at` of the stage's rows; zeros beyond the matrices. */
  __device__ __forceinline__ void fetch_rows(uint32_t to, const uint8_t *data, size_t pitch, uint32_t at, uint32_t pieces) const {
    const uint32_t rows = w.lead * w.n;
    for (uint32_t i = threadIdx.x % 32; i < Job::kBoxes * p.box * pieces; i += 32) {
      const uint32_t c = i % pieces, at_row = i / pieces, run = Job::kBoxes == 2 && at_row >= p.box, r = at_row - run * p.box;
      const uint32_t in = run * p.run + r;
      const uint32_t n = row + run * ahead.job.gap() + r;
      const bool valid = n < rows && at + c * 16 < pitch;
      copy16_to(to + (pieces == 1 ? in * 16 : swizzled(in, c)), valid ? data + n * pitch + at + c * 16 : data, valid);
    }
  }
  __device__ __forceinline__ void wait() const {
    copy_wait<kOtherDepth - 1>();
    __syncwarp();
  }
#endif

  /* The place in use is read: fills it again and moves on. */
  __device__ __forceinline__ void done() {
    __syncwarp();
    fetch(place);
    if (++place == p.depth) place = 0, phase ^= 1;
  }
};

/* ---- activations ---- */

/* Scales and activations for a lane's part of a stage, for tokens g and g+8. */
template <int kPiece, int kHalves>
struct stream_x {
  static constexpr int kRegs = kPiece / 8;
  uint32_t q[kHalves][8][kRegs];
  float back[kHalves][2]; /* inverse scales of tokens 2t and 2t+1, as the product's columns need them */
  const bf16 *row[kHalves];
  uint32_t segment = ~0u; /* of the rows */

  /* The cursor's stage; zeros beyond k or without a row. */
  template <class Job>
  __device__ __forceinline__ void load(const stream_cursor<Job> &at, uint32_t width) {
    if (segment != at.segment) {
      segment = at.segment;
#pragma unroll
      for (int n = 0; n < kHalves; n++) row[n] = at.job.x(segment, threadIdx.x % 32 / 4 + 8 * n);
    }
    const uint32_t first = at.step * 8 * kPiece + threadIdx.x % 4 * (kPiece / 4);
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
      const uint32_t end = row[n] && at.more() ? width : 0;
#pragma unroll
      for (int c = 0; c < 8; c++) {
        const uint32_t k = first + c * kPiece;
        if constexpr (kRegs == 4) {
          const uint4 v = k < end ? __ldcg(reinterpret_cast<const uint4 *>(row[n] + k)) : make_uint4(0, 0, 0, 0);
          q[n][c][0] = v.x, q[n][c][1] = v.y, q[n][c][2] = v.z, q[n][c][3] = v.w;
        } else if constexpr (kRegs == 2) {
          const uint2 v = k < end ? __ldcg(reinterpret_cast<const uint2 *>(row[n] + k)) : make_uint2(0, 0);
          q[n][c][0] = v.x, q[n][c][1] = v.y;
        } else {
          q[n][c][0] = k < end ? __ldcg(reinterpret_cast<const uint32_t *>(row[n] + k)) : 0;
        }
      }
    }
  }
  __device__ __forceinline__ void take(const stream_x &ahead) {
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
#pragma unroll
      for (int i = 0; i < 8 * kRegs; i++) q[n][i / kRegs][i % kRegs] = ahead.q[n][i / kRegs][i % kRegs];
    }
  }
  /* To f16, scaled by the token's largest of the stage. */
  __device__ __forceinline__ void to_half(float factor) {
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
      uint32_t largest = 0;
#pragma unroll
      for (int c = 0; c < 8; c++) {
#pragma unroll
        for (int i = 0; i < kRegs; i++) largest = max2(largest, q[n][c][i] & 0x7fff7fffu);
      }
      largest = max(largest & 0xffffu, largest >> 16);
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const half_scale scale(largest);
#pragma unroll
      for (int c = 0; c < 8; c++) {
#pragma unroll
        for (int i = 0; i < kRegs; i++) q[n][c][i] = scale.convert(q[n][c][i]);
      }
      back[n][0] = __shfl_sync(0xffffffffu, scale.inverse * factor, threadIdx.x % 4 * 8);
      back[n][1] = __shfl_sync(0xffffffffu, scale.inverse * factor, threadIdx.x % 4 * 8 + 4);
    }
  }
};

/* A single token's activations of all segments in shared memory, as the stages' products take them: 16 bytes of each lane t in
 * turn, and behind them the inverse scale of each stage. Only column 0 of the products counts, so lanes with g > 0 hold zeros. */
template <mm_cu_code C, mm_cu_scale S>
struct one_token {
  using kind = stream_kind<C, S>;
  static constexpr uint32_t kBytes = kind::kPiece * 16; /* of a stage */
  uint8_t *const x;
  float *const back;

  __device__ __forceinline__ one_token(uint8_t *shared, const stream_plan &p)
      : x(shared), back(reinterpret_cast<float *>(shared + p.one_stages * kBytes)) {}

  template <class Job>
  __device__ __forceinline__ void fill(const mm_cu_weight &w, const stream_plan &p, const Job &job) const {
    const uint32_t pieces = p.steps * kind::kPiece, total = job.segments() * pieces; /* of eight columns; a warp's belong to one stage, */
    for (uint32_t i = threadIdx.x; i < (total + 31) / 32 * 32; i += blockDim.x) {    /* or half a warp's */
      const uint32_t segment = i / pieces, k = i % pieces * 8;
      const bf16 *row = i < total ? job.x(segment, 0) : nullptr;
      const uint4 v = row && k < w.k ? __ldcg(reinterpret_cast<const uint4 *>(row + k)) : make_uint4(0, 0, 0, 0);
      uint32_t q[4] = {v.x, v.y, v.z, v.w};
      if (kind::kHalf) {
        const uint32_t all = max2(max2(q[0] & 0x7fff7fffu, q[1] & 0x7fff7fffu), max2(q[2] & 0x7fff7fffu, q[3] & 0x7fff7fffu));
        uint32_t largest = max(all & 0xffffu, all >> 16);
#pragma unroll
        for (int m = 1; m < kind::kPiece; m <<= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, m));
        const half_scale scale(largest);
#pragma unroll
        for (int j = 0; j < 4; j++) q[j] = scale.convert(q[j]);
        if (i < total && i % kind::kPiece == 0) back[i / kind::kPiece] = scale.inverse * kind::kFactor;
      }
      if (i >= total) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t column = k % (8 * kind::kPiece) + 2 * j, in = column % kind::kPiece, t = in / (kind::kPiece / 4);
        const uint32_t r = column / kind::kPiece * kind::kRegs + in % (kind::kPiece / 4) / 2;
        *reinterpret_cast<uint32_t *>(x + i / kind::kPiece * kBytes + (r / 4 * 4 + t) * 16 + r % 4 * 4) = q[j];
      }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void load(stream_x<kind::kPiece, 1> &to, uint32_t stage) const {
    if (threadIdx.x % 32 < 4) {
#pragma unroll
      for (int i = 0; i < 2 * kind::kRegs; i++) {
        const uint4 v = *reinterpret_cast<const uint4 *>(x + stage * kBytes + (i * 4 + threadIdx.x % 4) * 16);
        const uint32_t q[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) to.q[0][(4 * i + j) / kind::kRegs][(4 * i + j) % kind::kRegs] = q[j];
      }
    }
    if (kind::kHalf) to.back[0][0] = to.back[0][1] = back[stage];
  }
};

/* ---- scales ---- */

/* The byte scales of rows g and g+8 of a tile, or of row g twice (`second` rows on: 8 or 0): 16 bytes a row, of kByteSteps stages. */
template <mm_cu_code C, mm_cu_scale S>
struct tile_bytes {
  uint32_t word[2][4];
  __device__ __forceinline__ tile_bytes(uint32_t shared, uint32_t second, uint32_t step) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t at = shared + (threadIdx.x % 32 / 4 + h * second) * 16;
      if (S == MM_CU_NV) {
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(word[h][0]), "=r"(word[h][1]), "=r"(word[h][2]), "=r"(word[h][3])
                     : "r"(at)
                     : "memory");
      } else if (S == MM_CU_MX && C == MM_CU_E4M3) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[h][0]) : "r"(at + step % 4 * 4) : "memory");
      } else if (S == MM_CU_MX) {
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(word[h][0]), "=r"(word[h][1]) : "r"(at + step % 2 * 8) : "memory");
      }
    }
  }
  /* NV: of the lane's half of piece c, twice in f16. */
  __device__ __forceinline__ uint32_t half(int h, int c) const {
    const uint32_t byte = threadIdx.x % 4 / 2 * 0x11 + c % 2 * 0x22;
    uint32_t twice[2];
    codec<MM_CU_E4M3>::halves(twice, __byte_perm(word[h][c / 2], 0, byte));
    return twice[0];
  }
  /* MX: of the stage's 32 columns number i. */
  __device__ __forceinline__ float power(int h, int i) const {
    const uint32_t e = word[h][i / 4] >> (i % 4 * 8) & 0xff;
    return __uint_as_float(e == 0 ? 0x00400000u : e << 23);
  }
};

/* ---- products ---- */

template <int kHalves>
struct tile_sum {
  float v[kHalves][4]; /* a single token's: 0 and 2 */
  /* Later code in the program runs after the sums are known, so after their inputs were read. */
  __device__ __forceinline__ void hold(int step) {
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
#pragma unroll
      for (int i = 0; i < 4; i += step) asm volatile("" : "+f"(v[n][i])::"memory");
    }
  }
  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) v[n][i] = 0;
    }
  }
};

/* Codes of piece c, in rows g and g + 8 of tile i, as f16; NV under their scales, FINE as bf16 under theirs. */
template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void widen_piece(uint32_t (&v)[2][stream_kind<C, S>::kRegs], const uint32_t *codes, int c, int i,
                                            const tile_bytes<C, S> &bytes, const mm_cu_weight &w, const stream_cursor<Job> &at) {
  using kind = stream_kind<C, S>;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    codec<C>::halves(v[h], codes[h]);
    if constexpr (S == MM_CU_NV) {
      const uint32_t s = bytes.half(h, c);
#pragma unroll
      for (int j = 0; j < kind::kRegs; j++) v[h][j] = mul_half2(v[h][j], s);
    } else if constexpr (S == MM_CU_FINE) {
      const uint32_t k = (at.step * 8 + c) * kind::kPiece + threadIdx.x % 4 * (kind::kPiece / 4);
      const float f =
          __ldg(scale_matrix(w, at) + scale_row(w, at, i * 16 + h * 8 + threadIdx.x % 32 / 4) + (min(k, w.k - 1) >> w.cell_k_log2));
#pragma unroll
      for (int j = 0; j < kind::kRegs; j++) {
        const float2 wide = __half22float2(*reinterpret_cast<const __half2 *>(&v[h][j]));
        v[h][j] = pack2(wide.x * f, wide.y * f);
      }
    }
  }
}

/* COARSE: scales of rows g and g + 8 of tile i, for each half of the stage. */
template <class Job>
__device__ __forceinline__ void tile_scales(float (&scale)[2][2], uint32_t scales, int i, uint32_t second, const stream_cursor<Job> &at) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const uint32_t from = scales + (i * 16 + h * second + threadIdx.x % 32 / 4) * 4;
    scale[h][0] = shared_float(from), scale[h][1] = shared_float(from + Job::kBoxes * at.p.run * 4);
  }
}

/* acc += one tile of a stage, tile i of the group. codes: the lane's ldmatrix address of the tile's piece 0; scales: of the stage;
 * second: 8, or 0 if the tile's second half lies behind the stage, where the first is read again and its sums are not used. */
template <mm_cu_code C, mm_cu_scale S, int kHalves, class Job>
__device__ __forceinline__ void stream_tile(tile_sum<kHalves> &acc, uint32_t codes, uint32_t scales, int i, uint32_t second,
                                            const mm_cu_weight &w, const stream_cursor<Job> &at,
                                            const stream_x<codec<C>::kPiece, kHalves> &x) {
  using kind = stream_kind<C, S>;
  constexpr int kChains = kHalves == 1 ? 4 : 2; /* of products that wait for each other; chain c belongs to half c / (kChains / 2) */
  tile_sum<kHalves> part[kChains];
#pragma unroll
  for (auto &chain : part) chain.zero();
  const tile_bytes<C, S> bytes(scales + i * 256, second, at.step);
#pragma unroll
  for (int p = 0; p < 4; p++) {
    const int chain = p * kChains / 4;
    uint32_t r[4];
    ldmatrix4_at(r, codes ^ (p * 32));
    if constexpr (C == MM_CU_BF16) {
#pragma unroll
      for (int n = 0; n < kHalves; n++) mma(part[chain].v[n], r, x.q[n][2 * p][0], x.q[n][2 * p + 1][0]);
    } else {
      tile_sum<kHalves> block; /* MX: of 32 columns, a piece of E2M1 or two of E4M3 */
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int c = 2 * p + b;
        uint32_t v[2][kind::kRegs];
        widen_piece<C, S>(v, r + 2 * b, c, i, bytes, w, at);
        if (S == MM_CU_MX && (b == 0 || kind::kPiece == 32)) block.zero();
        tile_sum<kHalves> &to = S == MM_CU_MX ? block : part[chain];
#pragma unroll
        for (int j = 0; j < kind::kRegs; j += 2) {
          const uint32_t a[4] = {v[0][j], v[1][j], v[0][j + 1], v[1][j + 1]};
#pragma unroll
          for (int n = 0; n < kHalves; n++) {
            if constexpr (kind::kHalf) {
              mma_half(to.v[n], a, x.q[n][c][j], x.q[n][c][j + 1]);
            } else {
              mma(to.v[n], a, x.q[n][c][j], x.q[n][c][j + 1]);
            }
          }
        }
        if (S == MM_CU_MX && (b == 1 || kind::kPiece == 32)) {
          const float s[2] = {bytes.power(0, c * kind::kPiece / 32), bytes.power(1, c * kind::kPiece / 32)};
#pragma unroll
          for (int n = 0; n < kHalves; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) part[chain].v[n][j] += block.v[n][j] * s[j / 2];
          }
        }
      }
    }
  }
  float scale[2][2];
  if (S == MM_CU_COARSE) tile_scales(scale, scales, i, second, at);
#pragma unroll
  for (int n = 0; n < kHalves; n++) {
#pragma unroll
    for (int j = 0; j < 4; j += Job::kTokens == 1 ? 2 : 1) {
      const float half[2] = {kChains == 4 ? part[0].v[n][j] + part[1].v[n][j] : part[0].v[n][j],
                             kChains == 4 ? part[2].v[n][j] + part[kChains - 1].v[n][j] : part[1].v[n][j]};
      const float sum = S == MM_CU_COARSE ? half[0] * scale[j / 2][0] + half[1] * scale[j / 2][1] : half[0] + half[1];
      acc.v[n][j] += kind::kHalf ? sum * x.back[n][j % 2] : sum;
    }
  }
}

/* ---- a block ---- */

/* acc to the sums of a warp: [token][row]. */
template <int kTokens, int kHalves>
__device__ __forceinline__ void stream_put(const stream_plan &p, float *sum, const tile_sum<kHalves> (&acc)[kStreamTiles], bool add) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kStreamTiles; i++) {
    if (i >= p.tiles) break;
#pragma unroll
    for (int n = 0; n < kHalves; n++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (kTokens == 1 && (t != 0 || j % 2 != 0)) continue;
        float *to = &sum[(n * 8 + 2 * t + j % 2) * p.sum_pitch + i * 16 + g + j / 2 * 8];
        *to = add ? acc[i].v[n][j] + *to : acc[i].v[n][j];
      }
    }
  }
}
template <int kTokens, int kWarps, class Job>
__device__ __forceinline__ void stream_take(const stream_plan &p, const Job &job, uint32_t group, const float *sum, uint32_t token,
                                            uint32_t row) {
  const row_group rows = job.rows(group);
  if (row >= rows.count) return;
  job.emit(group, rows.first + row, token, [&](uint32_t run) {
    float total = 0;
#pragma unroll
    for (int from = 0; from < kWarps; from++) total += sum[(from * kTokens + token) * p.sum_pitch + run * p.run + row];
    return total;
  });
}

/* The warps' sums of a group, then emit. turn: the block's groups before this one. */
template <class Job, int kHalves>
__device__ __forceinline__ void stream_emit(const stream_plan &p, const Job &job, uint32_t group, uint32_t turn, float *sum,
                                            const tile_sum<kHalves> (&acc)[kStreamTiles]) {
  constexpr int kTokens = Job::kTokens;
  constexpr uint32_t kWarps = Job::kWarps;
  const uint32_t warp = threadIdx.x / 32, each = kTokens * p.sum_pitch;
  if constexpr (kTokens == 1) {
    /* There is room for two groups' sums, so one barrier does; the warps emit in turn while the others go on. */
    sum += turn % 2 * kWarps * each;
    stream_put<1>(p, sum + warp * each, acc, false);
    __syncthreads();
    if (warp == turn % kWarps) {
      for (uint32_t row = threadIdx.x % 32; row < p.run; row += 32) stream_take<1, kWarps>(p, job, group, sum, 0, row);
    }
  } else {
    /* The upper half of the warps first hand theirs to the lower half. */
    constexpr uint32_t kRounds = 2, kKept = kWarps / kRounds;
    __syncthreads(); /* the sums of the group before are read */
#pragma unroll
    for (uint32_t round = 0; round < kRounds; round++) {
      if (warp / kKept != round) stream_put<kTokens>(p, sum + warp % kKept * each, acc, round > 0);
      __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < job.tokens() * p.run; i += 32 * kWarps)
      stream_take<kTokens, kKept>(p, job, group, sum, i / p.run, i % p.run);
  }
}

template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void stream_rows(const mm_cu_weight &w, const stream_source &source, const stream_plan &p, const Job &job) {
  extern __shared__ __align__(1024) uint8_t stream_shared[];
  using kind = stream_kind<C, S>;
  constexpr int kHalves = Job::kTokens == 16 ? 2 : 1;
  constexpr bool kOne = Job::kTokens == 1, kAhead = !kOne && kind::kRegs * kHalves <= 4; /* registers suffice to fetch x a stage ahead */
  const uint32_t lane = threadIdx.x % 32;
  /* ldmatrix: lanes 0-7 address rows 0-7 of a piece, 8-15 rows 8-15 of it, 16-31 the same of the next piece */
  const uint32_t place = swizzled(lane % 8, lane / 16), below = lane / 8 % 2 * kLine;
  stream_ring<C, S, Job> ring(w, source, p, job, shared_address(stream_shared));
  stream_cursor<Job> next(p, job);
  const one_token<C, S> token(stream_shared + p.ones, p);
  float *const sum = reinterpret_cast<float *>(stream_shared + p.sums);
  stream_x<kind::kPiece, kHalves> x = {}, ahead;
  grid_wait();
  if constexpr (kOne) token.fill(w, p, job);
  if (kAhead) ahead.load(next, w.k);
  uint32_t turn = 0;
  for (uint32_t group = blockIdx.x; group < job.groups(); group += gridDim.x, turn++) {
    tile_sum<kHalves> acc[kStreamTiles];
#pragma unroll
    for (auto &a : acc) a.zero();
    while (next.group == group) {
      const stream_cursor<Job> at = next;
      if constexpr (kOne) {
        token.load(x, at.segment * p.steps + at.step);
      } else if (kAhead) {
        x.take(ahead);
      } else {
        x.load(at, w.k);
      }
      next.next();
      if (kAhead) ahead.load(next, w.k);
      if (kind::kHalf && !kOne) x.to_half(kind::kFactor);
      ring.wait();
      const uint32_t codes = ring.codes + ring.place * p.code_bytes + place, scales = ring.scales + ring.place * p.scale_bytes;
#pragma unroll
      for (int i = 0; i < kStreamTiles; i++) {
        if (i >= p.tiles) break;
        const uint32_t second = i * 16 + 8 < Job::kBoxes * p.run ? 8 : 0;
        stream_tile<C, S, kHalves>(acc[i], codes + i * 16 * kLine + second * below, scales, i, second, w, at, x);
      }
#pragma unroll
      for (int i = 0; i < kStreamTiles; i++) acc[i].hold(kOne ? 2 : 1);
      ring.done();
    }
    stream_emit(p, job, group, turn, sum, acc);
  }
}

#endif
