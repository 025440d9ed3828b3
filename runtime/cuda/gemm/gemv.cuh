/* Matrix-vector products of a decode step of one token: weight rows, each read once from memory, times one row of activations.
 *
 * Units: a four is four weight rows; block i takes fours i, i + p.blocks, …, so that all blocks read neighbouring addresses at a time. An
 * item is 512 bytes of each row of a four, 16 of each lane. A block's items, four after four, are divided evenly among its warps; a warp
 * copies its next Ring::kDepth - 1 items to shared memory while it multiplies one, and the block has no barrier between its first item and
 * its last. A chunk is 64 bytes of a row, chunk g of an item's eight: the columns of lanes 4g … 4g+3. A segment is w.k columns, padded to
 * 128; segments follow one another without a gap, so that an item may hold the end of one and several short ones.
 *
 * The product is mma.m16n8k16. Lanes 4g … 4g+3 hold chunk g of one row as row g of the M side, that of another row as row g+8, and the
 * activations of the same chunk as column g of the N side. Each lane therefore needs only the activations of its own columns, and no
 * weight moves between lanes. Of the 16 x 8 sums only those of row g or g+8 and column g are used: lane 4g + g/2 holds both. Codes become
 * f16 in registers, exactly (int4: value + 8); activations are f16 times a power of two of the chunk, or codes under its scale. BF16
 * weights, and FINE ones once scaled, are multiplied as bf16 with activations as they are. A row's sums are added in an
 * order that depends on the shape alone.
 *
 * A job says what the rows are:
 *   fours(), segments()         numbers of fours, and of segments of a row's k axis
 *   at(…), source(four, segment)  matrix and first row of the four in that segment; their weight
 *   gap(), behind()             rows from a four's first row to its second; from its first to its third
 *   x(segment), times(segment)  the activations, and the factor of their products
 *   rounds()                    true: activations are rounded to E4M3 in groups of 128
 *   factor(segment)             the factor of activations that are rounded in another way
 *   emit(four, sum[4])          takes the sums of the rows */
#ifndef MM_CUDA_GEMV_CUH
#define MM_CUDA_GEMV_CUH

#include "runtime/cuda/core/fp8.cuh"
#include "runtime/cuda/core/hopper.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/round.cuh"
#include "runtime/cuda/core/weight.cuh"

constexpr uint32_t kFour = 4;
constexpr int kGemvRegisters = 80; /* a thread's: leaves registers for the small kernels that run before and after */

struct four_place {
  uint32_t matrix, first, rows; /* rows: 1 to 4 of the four exist */
};
struct gemv_source {
  const uint8_t *data;
  const void *scale;
  __device__ __forceinline__ explicit gemv_source(const mm_cu_weight &w) : data(w.data), scale(w.scale) {}
};

template <mm_cu_code C, mm_cu_scale S>
struct gemv_kind {
  static constexpr uint32_t kLane = codec<C>::kPiece; /* columns of 16 bytes */
  static constexpr uint32_t kUnit = 128 / kLane;      /* lanes of 128 columns */
  static constexpr uint32_t kX = kLane / 8;           /* 16-byte pieces of a lane's activations */
  static constexpr bool kHalf = C != MM_CU_BF16 && S != MM_CU_FINE;
  /* INT4 is multiplied as value + 8, which masks alone bring to f16 (codec::offset_halves); 8 times the sum of a chunk's activations is
   * taken from its products. The sum is then stored next to the chunk's inverse scale. Activations of 2^118 and more overflow. */
  static constexpr bool kOffset = C == MM_CU_INT4 && kHalf;
  static constexpr uint32_t kBack = kOffset ? 2 : 1; /* floats of a chunk */
  /* Bytes of a row's scales in an item: f32 of its eight chunks, or those of its codes. */
  static constexpr uint32_t kScales = S == MM_CU_COARSE ? 32 : S == MM_CU_NV ? 64 : S == MM_CU_MX ? kLane : 0;
  static constexpr uint32_t kCodes = kFour * 512, kItem = kCodes + kFour * kScales;
  /* Power of two missing from the codes' f16 (codec::halves); the factor of an NV weight holds 2^8 of it already. */
  static constexpr float kFactor = kOffset ? 0x1p24f : C != MM_CU_E2M1 || S == MM_CU_MX ? 1.0f : 0x1p6f;
  /* E4M3 under MX: a chunk of 64 columns has two scales, so the lanes of a quad share 32 columns, eight each, and then the other 32. */
  static constexpr bool kByScale = C == MM_CU_E4M3 && S == MM_CU_MX;
  /* The half of a chunk that lanes 4g … 4g+3 read first: alternates every two g, so that their banks do not conflict. */
  static __device__ __forceinline__ uint32_t first_half(uint32_t quad) { return quad / 2 % 2; }
};

/* Warps of a block, items of a warp's ring (more than three make 4-bit codes slower), and shared memory of a block, at least kLeast: more
 * than half of a multiprocessor's. Otherwise, while earlier kernels end, two blocks may run on one multiprocessor and none on another,
 * which takes up to half as long again. */
template <mm_cu_code C, mm_cu_scale S>
struct gemv_wide {
  static constexpr uint32_t kWarps = 16, kDepth = C == MM_CU_E4M3 ? 4 : 3, kLeast = 113 * 1024 + 128, kMost = 224 * 1024;
};
/* Fits every device; dispatch.c has the limit of columns. */
template <mm_cu_code C, mm_cu_scale S>
struct gemv_least {
  static constexpr uint32_t kWarps = S == MM_CU_NV ? 10 : 12, kDepth = 2, kLeast = 50 * 1024, kMost = 96 * 1024;
  static_assert(kMost + 3072 <= MM_CU_SHARED_LEAST && kWarps * 32 > MM_CU_MAX_EXPERTS,
                "with the routing of a token; threads beyond it load activations");
};
/* Returns true if the device takes gemv_wide. */
inline bool gemv_wide_here() { return hopper() || mm_cu_shared_most() >= MM_CU_ONE_SHARED; }

/* Sizes of a launch and offsets in its shared memory. */
struct gemv_plan {
  uint32_t warps;         /* of a block */
  uint32_t blocks, lanes; /* blocks of the product; lanes of a row's segment, each of 16 bytes */
  uint32_t start;         /* first block of the product in a launch of two products */
  uint32_t per_lane;      /* 2^32 / lanes, rounded up: divides numbers below 2^16 */
  uint32_t touched;       /* fours that a warp has items of, at most */
  uint32_t x, back, sums, shared;
  bool rounds; /* kRound: the inputs are not rounded yet */
  rounder how; /* gemv_rounder */

  __device__ __forceinline__ uint32_t block() const { return blockIdx.x - start; }
};

/* Takes the given number of blocks, one for each multiprocessor; more where the sums of so many fours would not fit. */
template <mm_cu_code C, mm_cu_scale S, class Ring>
gemv_plan plan_gemv(const mm_cu_weight &w, uint32_t fours, uint32_t segments, uint32_t blocks = multiprocessors()) {
  constexpr uint32_t kWarps = Ring::kWarps, kSums = kWarps * kFour * 32;
  gemv_plan p;
  p.warps = kWarps;
  p.lanes = ceil_div(w.k, 128) * gemv_kind<C, S>::kUnit;
  p.per_lane = (uint32_t)(((UINT64_C(1) << 32) + p.lanes - 1) / p.lanes);
  const uint32_t items = ceil_div(segments * p.lanes, 32);
  p.x = kWarps * Ring::kDepth * gemv_kind<C, S>::kItem;
  p.back = p.x + items * codec<C>::kPiece * 64, p.sums = p.back + items * 32 * gemv_kind<C, S>::kBack;
  p.blocks = min(fours, max(blocks, ceil_div(fours, ((Ring::kMost - p.sums) / kSums - 3) * kWarps)));
  p.touched = (ceil_div(fours, p.blocks) * items + kWarps - 1) / kWarps / items + 2;
  p.shared = max(p.sums + p.touched * kSums, Ring::kLeast);
  p.start = 0, p.rounds = w.rounding.kind != MM_ACT_KEPT, p.how = rounder_of(w.rounding);
  return p;
}

/* A kernel that rounds these inputs itself does so before it converts them. */
template <mm_cu_code C, mm_cu_scale S>
bool gemv_rounds(const mm_cu_weight &w, mm_cu_kernel kernel) {
  const bool converts = gemv_kind<C, S>::kHalf && w.rounding.kind == MM_ACT_FP8_GROUP;
  return mm_cu_rounds_inside(kernel, &w) && !converts;
}

/* Kernels that make several products contain one way of rounding for each scheme (mm_cu_rounds_joined): gemv_rounder, or under COARSE
 * scales gemv_convert's groups of 128. */
template <mm_cu_scale S>
constexpr bool kJoinedRounds = S == MM_CU_NV || S == MM_CU_MX;

/* As copy16_to; also prefetches the rest of the 128-byte line to the L2 cache. !valid: reads nothing, stores zeros. */
__device__ __forceinline__ void copy16_line(uint32_t shared, const void *global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0),
               "l"(kReadOnce)
               : "memory");
}

/* kBytes: 4 or 8. !valid: reads nothing, stores zeros. */
template <int kBytes>
__device__ __forceinline__ void copy_few_to(uint32_t shared, const void *global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(valid ? kBytes : 0) : "memory");
}

/* The segment of a four's lane `at`, and the lane's index there. */
struct gemv_place {
  uint32_t segment, lane;
  __device__ __forceinline__ gemv_place(const gemv_plan &p, uint32_t at) {
    segment = __umulhi(at, p.per_lane), lane = at - segment * p.lanes;
  }
};

/* Copies a warp's items, one a call, to shared memory; `left` are to come. */
template <mm_cu_code C, mm_cu_scale S, class Job>
struct gemv_fetch {
  using kind = gemv_kind<C, S>;
  /* A lane copies kCopy bytes of one row's scales, those of kCopied lanes; kCopies lanes copy all scales of a row in an item. */
  static constexpr uint32_t kCopy = kind::kScales == 64 ? 8 : 4, kCopies = kind::kScales ? kind::kScales / kCopy : 1,
                            kCopied = 32 / kCopies;
  const mm_cu_weight &w;
  const Job &job;
  const gemv_plan &p;
  const uint32_t each, gap, behind; /* items of a four; bytes */
  const uint32_t most;              /* lanes that have codes of a segment */
  uint32_t left, four, item, rows = 0;
  uint32_t lane, copied = 0;                       /* in the segment: of the lane's codes; of its scales, in kCopied lanes */
  const uint8_t *from = nullptr, *scale = nullptr; /* the lane's part of the first row; of the scales, its segment's row */

  __device__ __forceinline__ gemv_fetch(const mm_cu_weight &weight, const Job &j, const gemv_plan &plan, uint32_t count, uint32_t first,
                                        uint32_t in, uint32_t items)
      : w(weight),
        job(j),
        p(plan),
        each(items),
        gap(j.gap() * (uint32_t)weight.pitch),
        behind(j.behind() * (uint32_t)weight.pitch),
        most(min((uint32_t)weight.pitch / 16, plan.lanes)),
        left(count),
        four(first),
        item(in),
        lane(plan.lanes) {}
  /* Finds the lane's segment. Past the last segment: its rows, with a lane index past their end, so that nothing is read. */
  __device__ __forceinline__ void find() {
    const uint32_t own = threadIdx.x % 32, last = job.segments() - 1;
    const gemv_place at(p, item * 32 + own);
    const four_place to = job.at(four, min(at.segment, last));
    rows = to.rows, lane = at.segment > last ? p.lanes : at.lane;
    const gemv_source source = job.source(four, min(at.segment, last));
    from = source.data + ((size_t)to.matrix * w.n + to.first) * w.pitch + at.lane * 16;
    if constexpr (kind::kScales > 0) {
      const gemv_place part(p, item * 32 + own % kCopies * kCopied);
      const four_place of = job.at(four, min(part.segment, last));
      const uint32_t r = min(own / kCopies, of.rows - 1), n = of.first + r % 2 * job.gap() + r / 2 * job.behind();
      const uint8_t *base = static_cast<const uint8_t *>(job.source(four, min(part.segment, last)).scale);
      copied = part.lane / kCopied;
      if (S == MM_CU_COARSE) {
        scale = base + ((size_t)of.matrix * w.scale_rows + (n >> w.cell_n_log2)) * w.scale_pitch * 4;
      } else {
        scale = base + ((size_t)of.matrix * w.n + n) * w.scale_pitch;
      }
    }
  }
  /* Copies the lane's part of the next item to shared memory at `to`. own: the lane. */
  __device__ __forceinline__ void operator()(uint32_t to, uint32_t own) {
    if (left) {
      if (lane >= p.lanes || (kind::kScales > 0 && copied * kCopied >= p.lanes)) find();
      const bool some = lane < most;
      const uint8_t *second = from + behind;
      copy16_line(to + own * 16, from, some);
      copy16_line(to + own * 16 + 512, from + gap, some && rows > 1);
      copy16_line(to + own * 16 + 1024, second, some && rows > 2);
      copy16_line(to + own * 16 + 1536, second + gap, some && rows > 3);
      if constexpr (S == MM_CU_COARSE) {
        constexpr uint32_t kColumns = C == MM_CU_INT4 ? 7 : 6; /* log2 of a quad's, which a cell is a multiple of */
        const uint32_t cell = copied >> (w.cell_k_log2 - kColumns);
        copy4_to(to + kind::kCodes + own * 4, scale + min(cell, w.scale_pitch - 1) * 4);
      } else if constexpr (kind::kScales > 0) {
        if (kFour * kCopies == 32 || own < kFour * kCopies)
          copy_few_to<kCopy>(to + kind::kCodes + own * kCopy, scale + copied * kCopy, copied * kCopy < w.scale_pitch);
      }
      left--, from += 512, lane += 32, copied += kCopies;
      if (++item == each) item = 0, four += p.blocks, lane = p.lanes;
    }
    copy_commit();
  }
};

/* ---- activations ---- */

extern __shared__ __align__(16) uint8_t gemv_shared[];

/* Activations are stored to shared memory as pieces of eight columns and converted there, which keeps the code short: each layer fetches it
 * again. Piece q of a lane of item c lies at x[(c · kX + q) · 32 + lane]; kByScale: its piece of the half that
 * it takes first, then of the other one. */
template <mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ uint4 *gemv_piece(const gemv_plan &p, uint32_t i) {
  using kind = gemv_kind<C, S>;
  const uint32_t in = i % (32 * kind::kX);
  uint4 *const item = reinterpret_cast<uint4 *>(gemv_shared + p.x) + (i - in);
  if (kind::kByScale) return item + (in / 4 % 2 ^ kind::first_half(in / 8)) * 32 + in / 8 * 4 + in % 4;
  return item + in % kind::kX * 32 + in / kind::kX;
}

/* Pieces of a segment, whole units of 16, and of all items. */
template <mm_cu_code C, mm_cu_scale S>
__device__ __forceinline__ uint32_t gemv_pieces(const gemv_plan &p) {
  return p.lanes * gemv_kind<C, S>::kX;
}
template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ uint32_t gemv_all_pieces(const gemv_plan &p, const Job &job) {
  return (job.segments() * p.lanes + 31) / 32 * 32 * gemv_kind<C, S>::kX;
}

/* Rounds pieces to the numbers of their codes times job.factor(segment), in bf16, as launches before the product write them (encode.cu). */
template <mm_cu_code C, mm_cu_scale S>
struct gemv_rounder {
  rounder how;
  uint32_t *most; /* largest magnitude of each 16 pieces */
  uint32_t each, segment = ~0u;
  float row = 1; /* the segment's scale */

  __device__ __forceinline__ explicit gemv_rounder(const gemv_plan &p)
      : how(p.how), most(reinterpret_cast<uint32_t *>(gemv_shared + p.sums)), each(gemv_pieces<C, S>(p)) { /* before there are sums */
    if (S == MM_CU_NV) how.format = {MM_CODE_E2M1, 16, MM_F8_E4M3, true};
    if (S == MM_CU_MX) how.format = {C == MM_CU_E2M1 ? MM_CODE_E2M1 : MM_CODE_E4M3, 32, MM_F8_E8M0, false};
  }
  /* Finds the largest magnitudes of the pieces that threads from `first` on have stored: before operator() if scales are of rows. */
  template <class Job>
  __device__ __forceinline__ void find_largest(const gemv_plan &p, const Job &job, uint32_t first) const {
    const uint32_t total = gemv_all_pieces<C, S>(p, job), step = blockDim.x - first;
    if (!how.needs_row()) return;
#pragma unroll 1
    for (uint32_t i = threadIdx.x - first; i < total; i += step) { /* total and the step are multiples of 32 */
      float own = fmaxf(0.0f, largest8(*gemv_piece<C, S>(p, i)));
#pragma unroll
      for (uint32_t m = 1; m < 16; m <<= 1) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, m));
      if (i % 16 == 0) most[i / 16] = __float_as_uint(own);
    }
    asm volatile("bar.sync 2, %0;" ::"r"(step) : "memory");
  }
  /* Sets the scale of the row of piece i; called by the 16 lanes of a unit together. */
  __device__ __forceinline__ void find_row(uint32_t i, uint32_t of) {
    uint32_t top = 0;
    if (!__any_sync(0xffffffffu, of != segment)) return;
    segment = of;
    if (how.needs_row()) {
#pragma unroll 1
      for (uint32_t j = i % 16; j < each / 16; j += 16) top = max(top, most[of * (each / 16) + j]);
#pragma unroll
      for (uint32_t m = 1; m < 16; m <<= 1) top = max(top, __shfl_xor_sync(0xffffffffu, top, m));
    }
    row = how.row_scale(__uint_as_float(top));
  }
  /* Rounds piece i, whose columns are q; called by whole warps. */
  template <class Job>
  __device__ __forceinline__ uint4 operator()(const Job &job, uint32_t i, uint4 q) {
    const uint32_t of = min(i / each, job.segments() - 1);
    float scale = 1, own = 1, v[8];
    if (how.whole_row()) find_row(i, of), scale = row;
    if (how.format.group) {
      own = largest8(q);
#pragma unroll 1
      for (uint32_t m = 1; m < how.format.group / 8; m <<= 1) own = fmaxf(own, __shfl_xor_sync(0xffffffffu, own, m));
      scale = how.group_scale(own, scale);
    }
    if (own == 0) return q; /* zeros stay so */
    widen8(v, q);
    const auto to_numbers = [&](mm_code code) {
      how.format.code = code;
      how.to_numbers(v, scale);
    };
    if (C == MM_CU_E2M1) {
      to_numbers(MM_CODE_E2M1);
    } else if (C == MM_CU_INT4 && how.format.code == MM_CODE_INT8) {
      to_numbers(MM_CODE_INT8);
    } else {
      to_numbers(MM_CODE_E4M3);
    }
    const float factor = job.factor(of);
#pragma unroll
    for (float &x : v) x *= factor;
    return narrow8(v);
  }
};

/* Converts the pieces that the calling thread has stored (threadIdx.x - first + j · step) to what the product multiplies. back: the inverse
 * scales of each item's eight chunks, times job.times(segment), each with its offset under kOffset. Called by whole warps. */
template <mm_cu_code C, mm_cu_scale S, bool kRound, class Job>
__device__ __forceinline__ void gemv_convert(const gemv_plan &p, const Job &job, uint32_t first) {
  using kind = gemv_kind<C, S>;
  gemv_rounder<C, S> rounded(p);
  const bool rounds = kRound && p.rounds;
  if (!kind::kHalf && !kRound) return;
  if (rounds) rounded.find_largest(p, job, first);
  constexpr uint32_t kChunkPieces = kind::kLane / 2; /* pieces of a chunk */
  float *const back = reinterpret_cast<float *>(gemv_shared + p.back);
  const uint32_t each = gemv_pieces<C, S>(p), total = gemv_all_pieces<C, S>(p, job);
#pragma unroll(kRound ? 1 : 2)
  for (uint32_t i = threadIdx.x - first; i < total; i += blockDim.x - first) { /* total and the step are multiples of 32 */
    uint4 &place = *gemv_piece<C, S>(p, i);
    const uint4 v = rounds ? rounded(job, i, place) : place;
    if (!kind::kHalf) {
      place = v;
      continue;
    }
    uint32_t q[4] = {v.x, v.y, v.z, v.w};
    const uint32_t all = max2(max2(q[0] & 0x7fff7fffu, q[1] & 0x7fff7fffu), max2(q[2] & 0x7fff7fffu, q[3] & 0x7fff7fffu));
    uint32_t largest = max(all & 0xffffu, all >> 16);
    float inverse;
    if (!kRound && job.rounds()) { /* to codes of 128 columns, which are f16 as they are */
#pragma unroll
      for (uint32_t m = 1; m < 16; m <<= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, m));
      const act_scale scale(low(largest));
#pragma unroll
      for (int c = 0; c < 4; c++) q[c] = scale.halves(low(q[c]), high(q[c]));
      inverse = scale.value;
    } else {
#pragma unroll
      for (uint32_t m = 1; m < kChunkPieces; m <<= 1) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, m));
      const half_scale scale(largest);
#pragma unroll
      for (int c = 0; c < 4; c++) q[c] = scale.convert(q[c]);
      inverse = scale.inverse;
    }
    if constexpr (kind::kOffset) {
      q[1] = mul_half2(q[1], 0x2c002c00u), q[3] = mul_half2(q[3], 0x2c002c00u); /* 2^-4: those codes are 2^4 times as large */
      float sum = 0;
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float2 f = __half22float2(*reinterpret_cast<const __half2 *>(&q[c]));
        sum += (c % 2 ? 16.0f : 1.0f) * (f.x + f.y);
      }
#pragma unroll
      for (uint32_t m = 1; m < kChunkPieces; m <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
      if (i % kChunkPieces == 0) back[i / kChunkPieces * 2 + 1] = sum * 0x1p-21f; /* 8 · 2^-24 */
    }
    if (i % kChunkPieces == 0)
      back[i / kChunkPieces * kind::kBack] = inverse * (kind::kFactor * job.times(min(i / each, job.segments() - 1)));
    place = make_uint4(q[0], q[1], q[2], q[3]);
  }
}

/* Loads and converts all activations, by threads from `first` on, a multiple of 32. */
template <mm_cu_code C, mm_cu_scale S, bool kRound, class Job>
__device__ __forceinline__ void gemv_fill(const mm_cu_weight &w, const gemv_plan &p, const Job &job, uint32_t first) {
  constexpr uint32_t kAtOnce = 4; /* loads in flight of a thread */
  const uint32_t each = gemv_pieces<C, S>(p), total = gemv_all_pieces<C, S>(p, job), step = blockDim.x - first;
#pragma unroll 1
  for (uint32_t from = threadIdx.x - first; from < total; from += kAtOnce * step) {
    uint4 v[kAtOnce];
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; j++) {
      const uint32_t i = from + j * step, segment = i / each, k = (i - segment * each) * 8;
      v[j] = segment < job.segments() && k < w.k ? __ldcg(reinterpret_cast<const uint4 *>(job.x(segment) + k)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; j++) {
      if (from + j * step < total) *gemv_piece<C, S>(p, from + j * step) = v[j];
    }
  }
  gemv_convert<C, S, kRound>(p, job, first);
}

/* ---- products ---- */

__device__ __forceinline__ float exponent_value(uint32_t e) { return __uint_as_float(e == 0 ? 0x00400000u : e << 23); }

/* MX of E2M1: the factor that brings a lane's f16 codes to the largest scale of lanes 4g … 4g+3, in both halves, and that scale. */
struct quad_power {
  uint32_t half;
  float most;
  __device__ __forceinline__ explicit quad_power(uint32_t e) {
    uint32_t top = max(e, __shfl_xor_sync(0xffffffffu, e, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const int field = 29 + (int)e - (int)top; /* of 2^14 and less */
    const uint32_t h = field > 0 ? (uint32_t)field << 10 : field > -10 ? 0x200u >> -field : 0;
    half = h << 16 | h;
    most = exponent_value(top);
  }
};

/* acc += the products of the item at `item` and the activations at x and back; only lanes 4g + g/2 hold sums. FINE: `place` has the rows of
 * the scales, `k` is the lane's first column. */
template <mm_cu_code C, mm_cu_scale S, class Job>
__device__ __forceinline__ void gemv_add(float (&acc)[kFour], const uint8_t *item, const uint4 *x, const float *back, const mm_cu_weight &w,
                                         const Job &job, const four_place &place, uint32_t k) {
  using kind = gemv_kind<C, S>;
  constexpr int kWord = kind::kLane / 8; /* registers of a word of codes */
  const uint32_t lane = threadIdx.x % 32;
  const uint8_t *const scale = item + kind::kCodes;
  const float inverse = kind::kHalf ? back[0] : 1.0f, offset = kind::kOffset ? back[kind::kBack - 1] : 0.0f;
  uint32_t b[kind::kX * 4];
#pragma unroll
  for (uint32_t q = 0; q < kind::kX; q++) {
    const uint4 v = x[q * 32];
    b[4 * q] = v.x, b[4 * q + 1] = v.y, b[4 * q + 2] = v.z, b[4 * q + 3] = v.w;
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    uint32_t word[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint8_t *const codes = item + (h * 2 + r) * 512;
      if constexpr (kind::kByScale) {
        const uint8_t *const own = codes + lane / 4 * 64 + lane % 4 * 8;
        const uint2 front = *reinterpret_cast<const uint2 *>(own + kind::first_half(lane / 4) * 32),
                    back = *reinterpret_cast<const uint2 *>(own + (kind::first_half(lane / 4) ^ 1) * 32);
        word[r][0] = front.x, word[r][1] = front.y, word[r][2] = back.x, word[r][3] = back.y;
      } else {
        const uint4 code = reinterpret_cast<const uint4 *>(codes)[lane];
        word[r][0] = code.x, word[r][1] = code.y, word[r][2] = code.z, word[r][3] = code.w;
      }
    }
    float d[2][4] = {}, f[2] = {inverse, inverse}, power[2][2]; /* d: of the words in turn; kByScale: of the two halves */
    uint32_t times[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t row = h * 2 + r;
      if constexpr (S == MM_CU_NV)
        codec<MM_CU_E4M3>::halves(times[r], __byte_perm(reinterpret_cast<const uint16_t *>(scale)[row * 32 + lane], 0, 0x1100));
      if constexpr (kind::kByScale) {
        const uint32_t two = reinterpret_cast<const uint16_t *>(scale)[row * 8 + lane / 4], swap = kind::first_half(lane / 4) * 8;
        power[r][0] = exponent_value(two >> swap & 0xff), power[r][1] = exponent_value(two >> (8 - swap) & 0xff);
      } else if constexpr (S == MM_CU_MX) {
        const quad_power e(scale[row * 32 + lane]);
        times[r][0] = times[r][1] = e.half, f[r] *= e.most;
      }
      if constexpr (S == MM_CU_COARSE) f[r] *= reinterpret_cast<const float *>(scale)[row * 8 + lane / 4];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (C == MM_CU_BF16) {
        if (i % 2) continue;
        const uint32_t a[4] = {word[0][i], word[1][i], word[0][i + 1], word[1][i + 1]};
        mma(d[i / 2], a, b[i], b[i + 1]);
      } else {
        uint32_t v[2][kWord];
#pragma unroll
        for (int r = 0; r < 2; r++) {
          if constexpr (kind::kOffset) {
            codec<C>::offset_halves(v[r], word[r][i]);
          } else {
            codec<C>::halves(v[r], word[r][i]);
          }
          if constexpr (S == MM_CU_NV || (S == MM_CU_MX && !kind::kByScale)) {
#pragma unroll
            for (int j = 0; j < kWord; j++) v[r][j] = mul_half2(v[r][j], times[r][i / 2]);
          } else if constexpr (S == MM_CU_FINE) {
            const uint32_t n = min(place.first + r * job.gap() + h * job.behind(), w.n - 1);
            const float s =
                __ldg(static_cast<const float *>(w.scale) + ((size_t)place.matrix * w.scale_rows + (n >> w.cell_n_log2)) * w.scale_pitch +
                      (min(k + i * (kind::kLane / 4), w.k - 1) >> w.cell_k_log2));
#pragma unroll
            for (int j = 0; j < kWord; j++) {
              const float2 wide = __half22float2(*reinterpret_cast<const __half2 *>(&v[r][j]));
              v[r][j] = pack2(wide.x * s, wide.y * s);
            }
          }
        }
#pragma unroll
        for (int j = 0; j < kWord; j += 2) {
          const uint32_t a[4] = {v[0][j], v[1][j], v[0][j + 1], v[1][j + 1]};
          if constexpr (kind::kHalf) {
            mma_half(d[kind::kByScale ? i / 2 : i % 2], a, b[i * kWord + j], b[i * kWord + j + 1]);
          } else {
            mma(d[i % 2], a, b[i * kWord + j], b[i * kWord + j + 1]);
          }
        }
      }
    }
    const bool odd = threadIdx.x & 4; /* g % 2: the column within the lane's two */
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float part[2] = {odd ? d[0][2 * r + 1] : d[0][2 * r], odd ? d[1][2 * r + 1] : d[1][2 * r]};
      if (kind::kByScale) part[0] *= power[r][0], part[1] *= power[r][1];
      const float sum = part[0] + part[1];
      acc[h * 2 + r] += (kind::kOffset ? sum - offset : sum) * (kind::kHalf ? f[r] : 1.0f);
    }
  }
}

/* ---- a block ---- */

/* Adds the sums of the block's fours over its warps and emits them. span: of each warp the first and the last four that it has items of. */
template <class Ring, class Job>
__device__ __forceinline__ void gemv_emit(const gemv_plan &p, const Job &job, const uint2 *span, uint32_t mine, uint32_t each) {
  const float *const sums = reinterpret_cast<const float *>(gemv_shared + p.sums);
  for (uint32_t i = threadIdx.x / 8; i < (mine + 3) / 4 * 4; i += 4 * Ring::kWarps) { /* eight threads a four, one a chunk */
    float total[kFour] = {};
#pragma unroll 1
    for (uint32_t from = i * each * Ring::kWarps / max(mine * each, 1); from < Ring::kWarps; from++) { /* begins at or before the four */
      const uint2 s = span[from];
      if (i < s.x && s.x <= s.y) break;
      if (i < s.x || i > s.y) continue; /* has none, or ends before it */
      const float4 v = reinterpret_cast<const float4 *>(sums)[(from * p.touched + i - s.x) * 8 + threadIdx.x % 8];
      total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
    }
#pragma unroll
    for (uint32_t j = 0; j < kFour; j++) {
#pragma unroll
      for (uint32_t m = 1; m < 8; m <<= 1) total[j] += __shfl_xor_sync(0xffffffffu, total[j], m);
    }
    if (i < mine && threadIdx.x % 8 == 0) job.emit(i * p.blocks + p.block(), total);
  }
}

/* The whole product. ready(): called once the copies of the first weights are issued; returns when the activations lie in shared memory. */
template <mm_cu_code C, mm_cu_scale S, class Ring, class Job, class Ready>
__device__ __forceinline__ void gemv_rows(const mm_cu_weight &w, const gemv_plan &p, const Job &job, const Ready &ready) {
  using kind = gemv_kind<C, S>;
  constexpr uint32_t kWarps = Ring::kWarps, kRing = Ring::kDepth * kind::kItem;
  const uint4 *const x = reinterpret_cast<const uint4 *>(gemv_shared + p.x);
  const float *const back = reinterpret_cast<const float *>(gemv_shared + p.back);
  float *const sums = reinterpret_cast<float *>(gemv_shared + p.sums);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const uint32_t fours = job.fours(), mine = fours > p.block() ? (fours - p.block() - 1) / p.blocks + 1 : 0;
  const uint32_t each = (job.segments() * p.lanes + 31) / 32, items = mine * each;
  const uint32_t first = items * warp / kWarps, end = items * (warp + 1) / kWarps;
  const uint32_t before = first / max(each, 1); /* fours of the block */
  __shared__ uint2 span[kWarps];                /* of each warp, the first and the last of the block's fours that it has items of */
  if (lane == 0) span[warp] = first < end ? make_uint2(before, (end - 1) / each) : make_uint2(1, 0);
  uint32_t four = before * p.blocks + p.block(), in = first - before * each, left = end - first;
  gemv_fetch<C, S, Job> fetch(w, job, p, left, four, in, each);
  const uint8_t *const ring = gemv_shared + warp * kRing, *item = ring;
  uint32_t free = shared_address(ring);
  float *sum = sums + (warp * p.touched * 8 + g) * kFour; /* of this chunk, of the warp's fours one after another */
  float acc[kFour] = {};
  const uint4 *at = x + in * (kind::kX * 32) + lane;
  const float *inverse = back + (in * 8 + g) * kind::kBack;
  uint32_t ahead = Ring::kDepth - 1; /* items to fetch before the first is multiplied; in the loop, so that the code exists once */
#pragma unroll 1
  while (true) {
    if (ahead == 0) {
      if (!left) break;
      copy_wait<Ring::kDepth - 2>();
      __syncwarp(); /* the scales are complete, and all lanes have read the item before */
    }
    fetch(free, lane);
    if (ahead > 0) {
      free += kind::kItem;
      if (--ahead == 0) ready();
      continue;
    }
    free = shared_address(item);
    four_place place = {};
    uint32_t k = 0;
    if (S == MM_CU_FINE) {
      const gemv_place in_row(p, in * 32 + lane);
      place = job.at(four, min(in_row.segment, job.segments() - 1)), k = in_row.lane * kind::kLane;
    }
    gemv_add<C, S>(acc, item, at, inverse, w, job, place, k);
    item += kind::kItem, at += kind::kX * 32, inverse += 8 * kind::kBack;
    if (item == ring + kRing) item = ring;
    if (++in == each) in = 0, four += p.blocks, at = x + lane, inverse = back + g * kind::kBack;
    if (--left && in) continue;
    if (lane % 4 == g / 2) *reinterpret_cast<float4 *>(sum) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    sum += 8 * kFour;
#pragma unroll
    for (float &a : acc) a = 0;
  }
  __syncthreads();
  gemv_emit<Ring>(p, job, span, mine, each);
}

#endif
