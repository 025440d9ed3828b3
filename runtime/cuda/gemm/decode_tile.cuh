/* The core of portable products with a few rows of x for each weight row (of decode steps): weights are read once, at the memory's rate,
 * and go from memory to registers.
 *
 * mma.m16n8k16 has 16 weight rows on its M side and eight rows of x on its N side. A lane (g, t) = (lane / 4, lane % 4) reads 16 bytes of
 * weight rows g and g + 8: consecutive codes of a row are then one lane's, and each product of 16 columns takes four of each lane. Columns
 * of x lie in shared memory in that order, so that no code moves between lanes. A step is 128 bytes of each of a warp's 16 rows.
 *
 * Codes become f16 times a power of two by shifts and masks; x is f16 times the power of two of its row in the chunk of columns that
 * shared memory holds (half_scale), as in gemv.cuh. Sums of 128 columns are multiplied by scales in f32, E2M1 by its scales before. BF16
 * weights are multiplied as they are, and x too.
 *
 * Eight warps: kGroups groups of 16 weight rows, each of which 8 / kGroups warps share by steps. Their sums are added in order: a row's
 * bits depend on the shape alone. Jobs are those of gemm.cuh. */
#ifndef MM_CUDA_DECODE_TILE_CUH
#define MM_CUDA_DECODE_TILE_CUH

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"

constexpr uint32_t kTileThreads = 256;

/* kTiles: eights of x's rows; kGroups: sixteens of weight rows; kBlocks: whose registers a multiprocessor holds; kAhead: steps whose codes
 * are on their way. */
template <uint32_t kTileCount, uint32_t kGroupCount, uint32_t kBlockCount = 2,
          uint32_t kStepsAhead = kTileCount<4 ? 3 : 2> struct decode_form {
  static constexpr uint32_t kTiles = kTileCount, kGroups = kGroupCount, kBlocks = kBlockCount, kAhead = kStepsAhead;
  static constexpr uint32_t kRows = 8 * kTiles, kColumns = 16 * kGroups, kSplit = kTileThreads / 32 / kGroups;
  static constexpr uint32_t kMost = (kTiles < 4 ? 3072 : 4096) / kTiles; /* columns of x in shared memory at a time, about */
};

/* What the f16 of codes lack. */
template <mm_cu_code C>
constexpr float kTileFactor = C == MM_CU_E4M3   ? 0x1p8f
                              : C == MM_CU_INT4 ? 0x1p24f
                                                : 0x1p6f;

/* Codes of a step on their way through registers, for weight rows g and g + 8. */
template <mm_cu_code C, mm_cu_scale S>
struct tile_codes {
  static constexpr uint32_t kPiece = codec<C>::kPiece, kStep = 8 * kPiece;
  static constexpr uint32_t kSums = S == MM_CU_COARSE ? kStep / 128 : 1; /* sums of a step with a scale each */
  uint4 q[2][2];                                                         /* [half of the step][row] */
  float f[kSums][2];                                                     /* COARSE */
  uint16_t micro[2][2];                                                  /* NV, of the lane's piece */
};
template <mm_cu_code C, mm_cu_scale S>
constexpr bool kTileTakes = S == MM_CU_COARSE || S == MM_CU_NV || C == MM_CU_BF16; /* mm_cu_tile_takes */

/* Columns of a step of all warps of a group; of x in shared memory at a time, whole turns of a warp's registers. */
template <mm_cu_code C, class Form>
constexpr uint32_t kTurnStep = 8 * codec<C>::kPiece *Form::kSplit;
template <mm_cu_code C, class Form>
constexpr uint32_t kTileChunk = Form::kMost / (kTurnStep<C, Form> * Form::kAhead) * (kTurnStep<C, Form> * Form::kAhead);
/* Columns that shared memory is filled by: a warp's pieces are of one row, whose largest number it finds. */
template <mm_cu_code C, class Form>
constexpr uint32_t kFillStep = C == MM_CU_BF16 || kTurnStep<C, Form> > 256 ? kTurnStep<C, Form> : 256;

/* Bytes of the warps' sums; they lie behind the rows of x, which serve the next tile as well, or of 64 rows in their place. */
template <class Form>
constexpr uint32_t kTileSums = Form::kSplit *Form::kRows *(Form::kColumns + 4) * 4;
template <class Form>
constexpr bool kTileKeepsX = Form::kTiles < 8;

/* INT4 is multiplied as value + 8 (codec::offset_halves), and 8 times the sum of x taken from the products. */
template <mm_cu_code C>
constexpr bool kTileOffset = C == MM_CU_INT4;

/* Shared memory: x[kRows][pitch bytes], the rows' inverse scales and largest magnitudes; kTileOffset: -8 times the sum of 128 columns of x,
 * offsets[chunk / 128][kRows]; sums[kSplit][kRows][kColumns + 4]. */
struct tile_plan {
  uint32_t chunk, pitch, inverse, offsets, sums, shared, span;
};
/* span: columns of a block, whole fill steps; all: w.k and more. */
template <mm_cu_code C, class Form>
tile_plan plan_tile(const mm_cu_weight &w, uint32_t span = UINT32_MAX) {
  static_assert(kTileChunk<C, Form> > 0 && kTileChunk<C, Form> % kFillStep<C, Form> == 0, "whole turns fit");
  static_assert(Form::kRows * (2 * kTileChunk<C, Form> + 72 + kTileChunk<C, Form> / 32) + (kTileKeepsX<Form> ? kTileSums<Form> : 0) <=
                    MM_CU_SHARED_LEAST - 3072,
                "a block fits everywhere");
  tile_plan p;
  p.span = min(span, ceil_div(w.k, kFillStep<C, Form>) * kFillStep<C, Form>);
  p.chunk = min(kTileChunk<C, Form>, p.span);
  p.pitch = 2 * p.chunk + 64, p.inverse = Form::kRows * p.pitch;
  p.offsets = p.inverse + Form::kRows * 8;
  const uint32_t end = p.offsets + (kTileOffset<C> ? p.chunk / 128 * Form::kRows * 4 : 0);
  p.sums = kTileKeepsX<Form> ? end : 0;
  p.shared = max(end, p.sums + kTileSums<Form>);
  return p;
}

/* Where at < end, 16 bytes of two rows that are read once; else nothing. */
__device__ __forceinline__ void load_two(uint4 (&to)[2], const uint8_t *first, const uint8_t *second, uint32_t at, uint32_t end) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.u32 p, %10, %11;\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%8];\n"
      "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%4,%5,%6,%7}, [%9];\n}"
      : "+r"(to[0].x), "+r"(to[0].y), "+r"(to[0].z), "+r"(to[0].w), "+r"(to[1].x), "+r"(to[1].y), "+r"(to[1].z), "+r"(to[1].w)
      : "l"(first), "l"(second), "r"(at), "r"(end));
}
__device__ __forceinline__ void load_two(uint16_t (&to)[2], const uint8_t *first, const uint8_t *second, uint32_t at, uint32_t end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.u32 p, %4, %5;\n@p ld.global.nc.u16 %0, [%2];\n@p ld.global.nc.u16 %1, [%3];\n}"
               : "+h"(to[0]), "+h"(to[1])
               : "l"(first), "l"(second), "r"(at), "r"(end));
}
__device__ __forceinline__ void load_two(float (&to)[2], const uint8_t *first, const uint8_t *second, uint32_t at, uint32_t end) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.u32 p, %4, %5;\n@p ld.global.nc.f32 %0, [%2];\n@p ld.global.nc.f32 %1, [%3];\n}"
               : "+f"(to[0]), "+f"(to[1])
               : "l"(first), "l"(second), "r"(at), "r"(end));
}

/* A warp's weights. Behind a row's end registers keep what they hold, which stands for finite numbers: x is zero there. */
template <mm_cu_code C, mm_cu_scale S, class Form>
struct tile_rows {
  using codes = tile_codes<C, S>;
  const mm_cu_weight &w;
  const uint32_t from, end;         /* columns */
  const uint8_t *row[2], *scale[2]; /* the lane's bytes of the next step; COARSE: the rows' first scales */
  uint32_t byte, column;            /* of the next step: the lane's first byte of a row, the step's first column */

  /* Reads columns [first, to), `first` a multiple of fill steps. */
  __device__ __forceinline__ tile_rows(const mm_cu_weight &weight, uint32_t first, uint32_t to) : w(weight), from(first), end(to) {}
  /* The next step is the first of the job's rows. */
  template <class Job>
  __device__ __forceinline__ void open(const Job &job) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp % Form::kGroups * 16, split = warp / Form::kGroups;
    byte = from / codec<C>::kPiece * 16 + split * 128 + lane % 4 * 16, column = from + split * codes::kStep;
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
      const weight_row at = job.weight(first + r * 8 + lane / 4);
      row[r] = w.data + ((size_t)at.matrix * w.n + at.row) * w.pitch + byte;
      const size_t of = ((size_t)at.matrix * w.scale_rows + (at.row >> w.cell_n_log2)) * w.scale_pitch;
      scale[r] = static_cast<const uint8_t *>(w.scale) + (S == MM_CU_NV ? of + byte / 8 : of * sizeof(float)); /* BF16: not read */
      asm volatile("" : "+l"(row[r]), "+l"(scale[r])); /* else each fetch would compute them again */
    }
  }
  __device__ __forceinline__ void fetch(codes &to) {
    const uint32_t bytes = (end + codec<C>::kPiece - 1) / codec<C>::kPiece * 16; /* no more than a row's pitch */
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      load_two(to.q[h], row[0] + h * 64, row[1] + h * 64, byte + h * 64, bytes);
      if constexpr (S == MM_CU_NV) load_two(to.micro[h], scale[0] + h * 8, scale[1] + h * 8, byte + h * 64, end / 2);
    }
    if constexpr (S == MM_CU_COARSE) {
#pragma unroll
      for (uint32_t i = 0; i < codes::kSums; i++) {
        const uint32_t k = column + i * 128, at = k >> w.cell_k_log2;
        load_two(to.f[i], scale[0] + at * sizeof(float), scale[1] + at * sizeof(float), k, end);
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) row[r] += 128 * Form::kSplit, scale[r] += S == MM_CU_NV ? 16 * Form::kSplit : 0;
    byte += 128 * Form::kSplit, column += codes::kStep * Form::kSplit;
  }
};

/* Registers of a word's f16, as the columns of x lie (tile_piece): E4M3 the odd codes and the even ones, without 2^8. */
template <mm_cu_code C>
__device__ __forceinline__ void tile_halves(uint32_t (&out)[codec<C>::kPiece / 8], uint32_t w) {
  if constexpr (C == MM_CU_E4M3) {
    const uint32_t even = w << 8;
    out[0] = and_or(w, 0x80008000u, (w & 0x7f007f00u) >> 1), out[1] = and_or(even, 0x80008000u, (even & 0x7f007f00u) >> 1);
  } else if constexpr (C == MM_CU_INT4) {
    codec<C>::offset_halves(out, w);
  } else if constexpr (C == MM_CU_E2M1) {
    codec<C>::halves(out, w);
  }
}

/* Two NV scales as pairs of f16, exactly. */
__device__ __forceinline__ void tile_micro(uint32_t (&out)[2], uint32_t two) {
  const uint32_t high = two & 0x7f00u;
  out[0] = mul_half2((two & 0x7fu) * 0x00800080u, 0x5c005c00u /* 2^8 */), out[1] = mul_half2(high << 15 | high >> 1, 0x5c005c00u);
}

/* acc += half a step: x at the lane's row of the first tile. */
template <mm_cu_code C, mm_cu_scale S, class Form>
__device__ __forceinline__ void tile_multiply(float (&acc)[Form::kTiles][4], const uint8_t *x, uint32_t pitch, const uint4 (&q)[2],
                                              const uint16_t (&micro)[2]) {
  constexpr uint32_t kPiece = codec<C>::kPiece, kWord = kPiece / 8;
  uint32_t b[Form::kTiles][kPiece / 2], times[2][2];
#pragma unroll
  for (uint32_t n = 0; n < Form::kTiles; n++) {
#pragma unroll
    for (uint32_t i = 0; i < kPiece / 8; i++) {
      const uint4 v = *reinterpret_cast<const uint4 *>(x + n * 8 * pitch + i * 64);
      b[n][4 * i] = v.x, b[n][4 * i + 1] = v.y, b[n][4 * i + 2] = v.z, b[n][4 * i + 3] = v.w;
    }
  }
  if constexpr (C == MM_CU_BF16) {
#pragma unroll
    for (uint32_t n = 0; n < Form::kTiles; n++) {
      mma(acc[n], (const uint32_t[]){q[0].x, q[1].x, q[0].y, q[1].y}, b[n][0], b[n][1]);
      mma(acc[n], (const uint32_t[]){q[0].z, q[1].z, q[0].w, q[1].w}, b[n][2], b[n][3]);
    }
    return;
  }
  if constexpr (S == MM_CU_NV) tile_micro(times[0], micro[0]), tile_micro(times[1], micro[1]);
  const uint32_t word[2][4] = {{q[0].x, q[0].y, q[0].z, q[0].w}, {q[1].x, q[1].y, q[1].z, q[1].w}};
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t v[2][kWord];
#pragma unroll
    for (uint32_t r = 0; r < 2; r++) {
      tile_halves<C>(v[r], word[r][i]);
      if constexpr (S == MM_CU_NV) {
#pragma unroll
        for (uint32_t j = 0; j < kWord; j++) v[r][j] = mul_half2(v[r][j], times[r][i / 2]);
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < kWord; j += 2) {
      const uint32_t a[4] = {v[0][j], v[1][j], v[0][j + 1], v[1][j + 1]};
#pragma unroll
      for (uint32_t n = 0; n < Form::kTiles; n++) mma_half(acc[n], a, b[n][i * kWord + j], b[n][i * kWord + j + 1]);
    }
  }
}

/* The place of piece i, eight columns, in a row of x: pieces of the four lanes of a half step side by side. */
template <mm_cu_code C>
__device__ __forceinline__ uint4 *tile_piece(uint8_t *row, uint32_t i) {
  constexpr uint32_t kHalf = codec<C>::kPiece / 2, kLane = codec<C>::kPiece / 8; /* pieces of a half step, and of a lane */
  const uint32_t in = i % kHalf;
  return reinterpret_cast<uint4 *>(row) + (i - in + in % kLane * 4 + in / kLane);
}

/* Columns [k0, k0 + p.chunk) of x to shared memory, zeros past w.k, in f16 under the power of two of each row's largest magnitude there.
 * All threads take pieces of all rows in turn. */
template <mm_cu_code C, class Form, class Job>
struct tile_filler {
  static constexpr uint32_t kAtOnce = 4; /* loads of a thread on their way */
  const tile_plan &p;
  const mm_cu_weight &w;
  const Job &job;
  uint8_t *shared;
  uint32_t *largest; /* of each row, zero before; zeros again afterwards */
  uint32_t k0, pieces, all, per;

  __device__ __forceinline__ tile_filler(uint8_t *to, const tile_plan &plan, const mm_cu_weight &weight, const Job &j, uint32_t first,
                                         uint32_t end)
      : p(plan), w(weight), job(j), shared(to), largest(reinterpret_cast<uint32_t *>(to + plan.inverse) + Form::kRows), k0(first) {
    constexpr uint32_t kStep = kFillStep<C, Form>;
    pieces = min(p.chunk, (end - k0 + kStep - 1) / kStep * kStep) / 8, all = job.rows() * pieces;
    per = (1u << 24) / pieces + 1; /* all · pieces < 2^24 */
  }
  __device__ __forceinline__ uint32_t row_of(uint32_t i) const { return i * per >> 24; }
  __device__ __forceinline__ uint4 *place(uint32_t i) const {
    const uint32_t row = row_of(i);
    return tile_piece<C>(shared + row * p.pitch, i - row * pieces);
  }
  __device__ __forceinline__ void load() const {
#pragma unroll 1
    for (uint32_t from = threadIdx.x; from < all; from += kAtOnce * kTileThreads) {
      uint4 v[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; j++) {
        const uint32_t i = from + j * kTileThreads, row = row_of(i), k = k0 + (i - row * pieces) * 8;
        v[j] = i < all && k < w.k ? __ldcg(reinterpret_cast<const uint4 *>(job.x(row) + k)) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; j++) {
        const uint32_t i = from + j * kTileThreads;
        if (i >= all) break;
        const uint4 q = v[j];
        *place(i) = q;
        if (C == MM_CU_BF16) continue;
        const uint32_t both = max2(max2(q.x & 0x7fff7fffu, q.y & 0x7fff7fffu), max2(q.z & 0x7fff7fffu, q.w & 0x7fff7fffu));
        const uint32_t most = __reduce_max_sync(0xffffffffu, max(both & 0xffffu, both >> 16));
        if (threadIdx.x % 32 == 0) atomicMax(&largest[row_of(i)], most);
      }
    }
  }
  /* Piece i's part of the sum of its 128 columns; 16 lanes have them side by side. */
  __device__ __forceinline__ void put_offset(uint32_t i, float sum) const {
#pragma unroll
    for (uint32_t m = 1; m < 16; m <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    const uint32_t row = row_of(i);
    if (i % 16 == 0)
      reinterpret_cast<float *>(shared + p.offsets)[(i - row * pieces) / 16 * Form::kRows + row] = sum * -0x1p-21f; /* 8 · 2^-24 */
  }
  /* What load() brought, by the same threads, to f16 under the row's scale. */
  __device__ __forceinline__ void convert() const {
    if (threadIdx.x < Form::kRows)
      reinterpret_cast<float *>(shared + p.inverse)[threadIdx.x] = half_scale(largest[threadIdx.x]).inverse * kTileFactor<C>;
#pragma unroll 2
    for (uint32_t i = threadIdx.x; i < all; i += kTileThreads) {
      const half_scale scale(largest[row_of(i)]);
      uint4 &to = *place(i);
      uint4 q = to;
      q.x = scale.convert(q.x), q.y = scale.convert(q.y), q.z = scale.convert(q.z), q.w = scale.convert(q.w);
      if constexpr (C == MM_CU_E4M3) {
        q = make_uint4(__byte_perm(q.x, q.y, 0x7632), __byte_perm(q.x, q.y, 0x5410), __byte_perm(q.z, q.w, 0x7632),
                       __byte_perm(q.z, q.w, 0x5410));
      } else if constexpr (C == MM_CU_INT4) {
        q.y = mul_half2(q.y, 0x2c002c00u), q.w = mul_half2(q.w, 0x2c002c00u); /* 2^-4: those codes are 2^4 times as large */
        put_offset(i, sum_half2(q.x) + sum_half2(q.z) + 16 * (sum_half2(q.y) + sum_half2(q.w)));
      }
      to = q;
    }
  }
  /* All threads of the block together; nobody reads x. */
  __device__ __forceinline__ void operator()() const {
    load();
    if constexpr (C != MM_CU_BF16) {
      __syncthreads();
      convert();
    }
    __syncthreads();
    if (C != MM_CU_BF16 && threadIdx.x < Form::kRows) largest[threadIdx.x] = 0; /* and a barrier comes before the next */
  }
};

/* The sums of all warps of each group, to the job. */
template <class Form, class Job>
__device__ __forceinline__ void tile_emit(float *sums, const Job &job, const float (&total)[Form::kTiles][4]) {
  constexpr uint32_t kPitch = Form::kColumns + 4, kSet = Form::kRows * kPitch;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = job.rows();
  __syncthreads(); /* the sums before are read */
#pragma unroll
  for (uint32_t i = 0; i < Form::kTiles * 4; i++) {
    const uint32_t row = i / 4 * 8 + lane % 4 * 2 + i % 2, column = warp % Form::kGroups * 16 + i / 2 % 2 * 8 + lane / 4;
    sums[warp / Form::kGroups * kSet + row * kPitch + column] = total[i / 4][i % 4];
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < rows * Form::kGroups * 4; i += kTileThreads) {
    const uint32_t row = i / (Form::kGroups * 4), column = i / 4 % Form::kGroups * 16 + i % 4 * 2;
    float v[2][2] = {};
#pragma unroll
    for (uint32_t s = 0; s < Form::kSplit; s++) {
      const float *const from = sums + s * kSet + row * kPitch + column;
#pragma unroll
      for (uint32_t n = 0; n < 4; n++) v[n / 2][n % 2] += from[n / 2 * 8 + n % 2];
    }
    job.emit(row, column, v);
  }
}

/* A walk over jobs in order, one for decode_tiles: its job(), next(), and x_of(), which is the same for jobs with the same rows of x. */
template <class Job>
struct one_job {
  const Job &only;
  __device__ __forceinline__ const Job &job() const { return only; }
  __device__ __forceinline__ void next() const {}
  __device__ __forceinline__ uint32_t x_of() const { return 0; }
};

/* A block's tiles, one after another: jobs of the walk, each with job.rows() ≤ Form::kRows; of columns [from, from + p.span) alone. The
 * first weights of a tile are on their way before the products of the tile before it end. */
template <mm_cu_code C, mm_cu_scale S, class Form, class Walk>
struct tile_run {
  using codes = tile_codes<C, S>;
  const mm_cu_weight &w;
  const tile_plan &p;
  Walk walk;
  const uint32_t from, end;
  uint8_t *const shared;
  tile_rows<C, S, Form> rows;
  float total[Form::kTiles][4], inverse[Form::kTiles][2];
  uint32_t filled_of = ~0u; /* x_of() of the rows in shared memory, if those are whole */
  const uint8_t *x;         /* the lane's, of the next step */
  const float *offset;

  __device__ __forceinline__ tile_run(const mm_cu_weight &weight, const tile_plan &plan, const Walk &jobs, uint32_t first, uint8_t *scratch)
      : w(weight), p(plan), walk(jobs), from(first), end(min(weight.k, first + plan.span)), shared(scratch), rows(weight, first, end) {
    if (threadIdx.x < Form::kRows) reinterpret_cast<uint32_t *>(shared + p.inverse)[Form::kRows + threadIdx.x] = 0;
  }
  /* x from `column` of the span on to shared memory, unless it is there. */
  __device__ __forceinline__ void fill(uint32_t column) {
    const uint32_t lane = threadIdx.x % 32, split = threadIdx.x / 32 / Form::kGroups;
    x = shared + lane / 4 * p.pitch + lane % 4 * 16 + split * codes::kStep * 2;
    offset = reinterpret_cast<const float *>(shared + p.offsets) + split * codes::kSums * Form::kRows + lane % 4 * 2;
    if (walk.x_of() == filled_of) return;
    __syncthreads();
    const auto job = walk.job();
    tile_filler<C, Form, decltype(job)>(shared, p, w, job, from + column, end)();
    if (kTileKeepsX<Form> && p.chunk >= p.span) filled_of = walk.x_of();
#pragma unroll
    for (uint32_t n = 0; n < Form::kTiles && C != MM_CU_BF16; n++) {
      const float2 v = reinterpret_cast<const float2 *>(shared + p.inverse)[n * 4 + lane % 4];
      inverse[n][0] = v.x, inverse[n][1] = v.y;
    }
  }
  /* total += sums of half h of a step under its scales; the sums are zeros again. */
  __device__ __forceinline__ void add(float (&acc)[Form::kTiles][4], const codes &now, uint32_t h) {
#pragma unroll
    for (uint32_t n = 0; n < Form::kTiles; n++) {
      const float2 off = kTileOffset<C> ? *reinterpret_cast<const float2 *>(offset + h * Form::kRows + n * 8) : make_float2(0, 0);
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const float times = inverse[n][i % 2] * (S == MM_CU_COARSE ? now.f[codes::kSums == 2 ? h : 0][i / 2] : 1.0f);
        const float sum = kTileOffset<C> ? acc[n][i] + (i % 2 ? off.y : off.x) : acc[n][i];
        total[n][i] = fmaf(sum, times, total[n][i]), acc[n][i] = 0;
      }
    }
  }
  __device__ __forceinline__ void multiply(const codes &now) {
    float acc[Form::kTiles][4] = {};
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
      tile_multiply<C, S, Form>(C == MM_CU_BF16 ? total : acc, x + h * codes::kStep, p.pitch, now.q[h], now.micro[h]);
      if (C != MM_CU_BF16 && (codes::kSums == 2 || h == 1)) add(acc, now, h);
    }
    if (kTileOffset<C>) offset += codes::kSums * Form::kSplit * Form::kRows;
    x += 2 * kTurnStep<C, Form>;
  }
  __device__ __forceinline__ void operator()(uint32_t jobs) {
    const uint32_t steps = (end - from + kTurnStep<C, Form> - 1) / kTurnStep<C, Form>; /* of each warp: products of zeros among them */
    codes ahead[Form::kAhead] = {};
    rows.open(walk.job());
#pragma unroll
    for (uint32_t i = 0; i < Form::kAhead; i++) rows.fetch(ahead[i]);
#pragma unroll 1
    for (; jobs > 0; jobs--) {
#pragma unroll
      for (uint32_t i = 0; i < Form::kTiles * 4; i++) total[i / 4][i % 4] = 0;
      uint32_t filled = 0; /* columns of the chunks so far */
#pragma unroll 1
      for (uint32_t j = 0; j < steps; j += Form::kAhead) {
        if (j * kTurnStep<C, Form> == filled) fill(filled), filled += p.chunk; /* the same in all warps */
        if (j + Form::kAhead >= steps) {                                       /* weights from here on are the next tile's */
          Walk behind = walk;
          behind.next();
          if (jobs > 1) rows.open(behind.job());
        }
#pragma unroll
        for (uint32_t i = 0; i < Form::kAhead; i++) { /* each in registers of its own: a move would wait for the load */
          if (j + i < steps) multiply(ahead[i]);
          rows.fetch(ahead[i]);
        }
      }
      tile_emit<Form>(reinterpret_cast<float *>(shared + p.sums), walk.job(), total);
      walk.next();
    }
  }
};
template <mm_cu_code C, mm_cu_scale S, class Form, class Walk>
__device__ __forceinline__ void decode_tiles(const mm_cu_weight &w, const tile_plan &p, const Walk &walk, uint32_t jobs,
                                             uint32_t from = 0) {
  extern __shared__ uint4 shared_raw[];
  tile_run<C, S, Form, Walk>(w, p, walk, from, reinterpret_cast<uint8_t *>(shared_raw))(jobs);
}

/* A block's tile. */
template <mm_cu_code C, mm_cu_scale S, class Form, class Job>
__device__ __forceinline__ void decode_tile(const mm_cu_weight &w, const tile_plan &p, const Job &job, uint32_t from = 0) {
  decode_tiles<C, S, Form>(w, p, one_job<Job>{job}, 1, from);
}

#endif
