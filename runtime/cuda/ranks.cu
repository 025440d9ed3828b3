/* One rank of several (backend.h). Mean squares over all ranks' heads: each rank's sums of squares, f32, are added over ranks (peers.h),
 * then the rows are multiplied. For few rows one kernel does all of it, and likewise the residual to which a sum is added: a block
 * for each row sends its part to all ranks, waits for theirs and continues, with the bits of separate kernels. */
#include "runtime/cuda/backend.h"

#include <stdio.h>

#include <algorithm>

#include "runtime/cuda/comm/peers.cuh"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/row.cuh"

namespace {

constexpr uint32_t kThreads = 256;
constexpr int kSharedQueues = 8; /* CUDA's default; kernels that share a hardware queue run one after the other */
constexpr double kLimit_s = 4;   /* for which kernels wait for another rank */
/* Blocks of a kernel of up to 384 threads, and of up to 768, that wait for other ranks; rows of few numbers, a block each. */
constexpr uint32_t kWaitingBlocks = 96, kWideBlocks = 48, kNarrowRows = 128;

/* Two ranges of a row, side by side: [0, n[0]) and [n[0], n[0] + n[1]). */
struct chunks {
  uint32_t n[2];
};

/* The block's sum of v, in all threads; part: [kThreads / 32]. */
__device__ float block_sum(float v, float *part) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
  for (uint32_t i = 0; i < kThreads / 32; i++) sum += part[i];
  return sum;
}

/* The sum of squares of each range, in all threads; part as above. The order of additions is own_work::squares' (attention/own_token.cuh):
 * a row has the same bits whichever of the two kernels normalises it. */
__device__ void square_row(float sum[2], const bf16 *row, chunks s, float *part) {
  static_assert(kThreads == MM_CU_GQA_WARPS * 32, "a thread adds the same pieces there");
  sum[0] = sum[1] = 0;
  for (uint32_t c = threadIdx.x * 8; c < s.n[0] + s.n[1]; c += kThreads * 8) {
    float v[8];
    load8(v, row + c);
    const float piece = square8(v);
    if (c < s.n[0]) {
      sum[0] += piece;
    } else {
      sum[1] += piece;
    }
  }
  for (int i = 0; i < 2; i++) sum[i] = block_sum(sum[i], part);
}

/* A lane for each rank: the two sums of the block's row become those over all ranks, in all threads. */
__device__ void add_ranks(float sum[2], const peer_view &c, uint32_t epoch) {
  __shared__ float total[2];
  if (threadIdx.x < 32) {
    const uint32_t r = threadIdx.x, flag = epoch + 1, parity = epoch & 1;
    uint2 mine = make_uint2(__float_as_uint(sum[0]), __float_as_uint(sum[1]));
    if (r < c.ranks && r != c.rank) {
      put_word(c.word(r, parity, c.rank) + blockIdx.x, make_uint4(mine.x, flag, mine.y, flag));
      peer_timeout p(c);
      mine = p.word(c.word(c.rank, parity, r) + blockIdx.x, flag, r);
    }
    __syncwarp();
    float t[2] = {};
    for (uint32_t k = 0; k < c.ranks; k++) {
      const float x = __uint_as_float(__shfl_sync(0xffffffffu, mine.x, (int)k)),
                  y = __uint_as_float(__shfl_sync(0xffffffffu, mine.y, (int)k));
      t[0] = k == 0 ? x : t[0] + x, t[1] = k == 0 ? y : t[1] + y;
    }
    if (r == 0) total[0] = t[0], total[1] = t[1];
  }
  __syncthreads();
  sum[0] = total[0], sum[1] = total[1];
}

/* sums[row, 2]: sums of squares of each range. */
__global__ void __launch_bounds__(kThreads) square_rows(float *sums, const bf16 *x, uint32_t pitch, chunks s) {
  __shared__ float part[kThreads / 32];
  grid_wait_and_launch_next();
  float sum[2];
  square_row(sum, x + (size_t)blockIdx.x * pitch, s, part);
  if (threadIdx.x < 2) sums[2 * blockIdx.x + threadIdx.x] = threadIdx.x ? sum[1] : sum[0];
}

/* q and k by their norms. The ranges are this rank's columns of each, `ranks` times as many are normalised together. */
struct qk_norms {
  bf16 *x;
  const float *q_norm, *k_norm;
  float eps;
  uint32_t pitch;
  chunks s;
};

__device__ void scale_qk_row(const qk_norms &a, const float sum[2], uint32_t ranks) {
  bf16 *row = a.x + (size_t)blockIdx.x * a.pitch;
  for (int i = 0; i < 2; i++) {
    const float scale = rsqrtf(sum[i] / ((float)a.s.n[i] * (float)ranks) + a.eps);
    const float *const norm = i ? a.k_norm : a.q_norm;
    for (uint32_t c = threadIdx.x * 8; c < a.s.n[i]; c += kThreads * 8) {
      float v[8], w[8];
      load8(v, row + c);
      load8(w, norm + c);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], __fmul_rn(scale, w[j])); /* as attention of a single token does */
      store8(row + c, v);
    }
    row += a.s.n[i];
  }
}

__global__ void __launch_bounds__(kThreads) scale_qk(const __grid_constant__ qk_norms a, const float *sums, uint32_t ranks) {
  grid_wait_and_launch_next();
  scale_qk_row(a, sums + 2 * blockIdx.x, ranks);
}

__global__ void __launch_bounds__(kThreads) reduce_scale_qk(const __grid_constant__ peer_view c, const __grid_constant__ qk_norms a) {
  __shared__ float part[kThreads / 32];
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch;
  float sum[2];
  square_row(sum, a.x + (size_t)blockIdx.x * a.pitch, a.s, part);
  add_ranks(sum, c, epoch);
  scale_qk_row(a, sum, c.ranks);
  peer_end(c, epoch);
}

__device__ void gate_row(const mm_cu_gated &a, float sum, uint32_t ranks) {
  const size_t row = (size_t)blockIdx.x * a.width;
  const float scale = rsqrtf(sum / ((float)a.width * (float)ranks) + a.eps);
  for (uint32_t c = threadIdx.x * 8; c < a.width; c += kThreads * 8) {
    float v[8], w[8], z[8];
    load8(v, a.o + row + c);
    load8(z, a.gate + row + c);
    load8(w, a.w + c);
    scale8(v, scale, w);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= sigmoid(z[j]);
    store8(a.y + row + c, v);
  }
}

__global__ void __launch_bounds__(kThreads) gate_rows(const __grid_constant__ mm_cu_gated a, const float *sums, uint32_t ranks) {
  grid_wait_and_launch_next();
  gate_row(a, sums[2 * blockIdx.x], ranks);
}

__global__ void __launch_bounds__(kThreads) reduce_gate_rows(const __grid_constant__ peer_view c, const __grid_constant__ mm_cu_gated a) {
  __shared__ float part[kThreads / 32];
  peer_begin(c);
  const uint32_t epoch = c.counters->epoch;
  float sum[2];
  square_row(sum, a.o + (size_t)blockIdx.x * a.width, {{a.width, 0}}, part);
  add_ranks(sum, c, epoch);
  gate_row(a, sum[0], c.ranks);
  peer_end(c, epoch);
}

/* The rows' norms over ranks fit one kernel, whose blocks wait at once. */
bool narrow_rows(const mm_backend *b) { return b->step.rows <= kNarrowRows && mm_cu_peers_small(b->group, b->step.rows, b->step.rows); }

/* b->squares of the step's rows, over all ranks. An odd number of rows sums two numbers that nobody reads. */
cudaError_t sum_squares(mm_backend *b, const bf16 *x, uint32_t pitch, chunks n) {
  const cudaError_t e = launch(square_rows, b->step.rows, kThreads, 0, b->stream, b->squares, x, pitch, n);
  return e != cudaSuccess ? e : mm_cu_peers_sum_f32(b->group, b->squares, mm_round_up(2 * (uint64_t)b->step.rows, 4), b->stream);
}

__device__ __forceinline__ uint4 get_piece(const bf16 *from) { return *reinterpret_cast<const uint4 *>(from); }

/* A thread for eight columns, as combine_rows has for few rows. Few rows have several blocks each: a block sends and writes its share of
 * the columns, since a multiprocessor sends slowly, and sums all of them, since summing is faster than exchanging sums. Of many rows a
 * block has several, and sends all of them before it waits for the first. */
__global__ void __launch_bounds__(MM_CU_MAX_HIDDEN / 8)
    reduce_combine(const __grid_constant__ peer_view c, const __grid_constant__ mm_cu_combine a, uint32_t rows, uint32_t width,
                   uint32_t blocks) {
  __shared__ float part[2][MM_CU_MAX_HIDDEN / 256]; /* rows take turns: who writes one again has met all that read it */
  const uint32_t first = blockIdx.x / blocks, step = gridDim.x / blocks, column = threadIdx.x * 8;
  const bool inside = column < width, own_share = threadIdx.x / 32 % blocks == blockIdx.x % blocks, sends = inside && own_share;
  const auto at = [&](uint32_t row) { return (size_t)row * width + column; };
  const auto word = [&](uint32_t row) { return (row * width + column) / 8; };
  float w[8] = {};
  if (c.distinct_devices) grid_launch_next_early();
  if (inside) load8(w, a.w + column);
  grid_wait();
  const peer_turn turn = turn_of(c);
  uint4 own = make_uint4(0, 0, 0, 0), residual = own;
  if (inside) own = get_piece(a.branch + at(first)), residual = get_piece(a.residual + at(first));
  if (sends) send_branch(c, turn, own, word(first));
  for (uint32_t row = first + step; row < rows; row += step)
    if (sends) send_branch(c, turn, get_piece(a.branch + at(row)), word(row));
  empty_branches(c, turn);
  for (uint32_t row = first, i = 0; row < rows; row += step, i++) {
    float v[8] = {};
    if (inside && i > 0) own = get_piece(a.branch + at(row)), residual = get_piece(a.residual + at(row));
    if (inside) {
      mix8(v, a, residual, sum_branches(c, turn, own, word(row)));
      if (own_share) store8(a.h + at(row), v);
    }
    float *const sums = part[i % 2];
    const float sum = warp_sum(square8(v));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    const float scale = norm_scale(sums, (width + 255) / 256, width, a.eps);
    if (sends) {
      scale8(v, scale, w);
      const uint4 q = narrow8(v);
      *reinterpret_cast<uint4 *>(a.n + at(row)) = q;
      if (a.codes.code) encode8(a.codes, row, column, q);
    }
  }
  branch_end(c, turn, rows * width / 8);
}

}  // namespace

/* Ranks on one device wait for each other in kernels, which have to run at the same time. */
static bool may_run_together(const mm_backend *b, mm_err *err) {
  const char *blocking = getenv("CUDA_LAUNCH_BLOCKING"), *queues = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const bool blocks = blocking && atoi(blocking) != 0, few = queues && atoi(queues) < kSharedQueues;
  if (!b->c.place.shared || (!blocks && !few)) return true;
  char text[MM_VARIABLE_TEXT];
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "rank %u: found ranks on one device, whose kernels have to run at the same time%s, expected %s", b->c.weights->rank,
                 mm_variable_text(text, blocks ? "CUDA_LAUNCH_BLOCKING" : "CUDA_DEVICE_MAX_CONNECTIONS"),
                 blocks ? "none" : "8 to 32 or none");
}

bool mm_cu_open_ranks(mm_backend *b, mm_err *err) {
  const mm_rank_weights *w = b->c.weights;
  if (w->tp == 1) return true;
  if (!may_run_together(b, err)) return false;
  if (!b->loading->pinned(err)) return false;
  b->memory.what = "sums over ranks";
  if (!(b->squares = b->memory.array<float>(2 * (uint64_t)b->c.limits.max_tokens + 4, err))) return false;
  const uint64_t rows_bytes = (uint64_t)b->c.limits.max_tokens * b->c.model->hidden * sizeof(bf16);
  const bool one = b->groups.count == 1;
  if (!(b->peers = mm_cu_peers_open(b->c.comm, w->rank, w->tp, b->c.place.shared, one ? rows_bytes : 0, kLimit_s, err))) return false;
  if (one) b->group = b->peers;
  if (!b->group && mm_attn_tp(w) > 1 &&
      !(b->group = mm_cu_peers_open_group(b->peers, b->c.group, mm_attn_rank(w), mm_attn_tp(w), rows_bytes, err)))
    return false;
  b->whole_rows.peers = b->peers, b->group_rows.peers = b->group;
  mm_cu_peers_load(b->peers, true);
  bool all;
  return mm_cu_peers_barrier(b->peers, true, &all, err); /* none says that it has loaded before all have said that they load */
}

bool mm_cu_separate_streams(mm_backend *b, mm_err *err) {
  constexpr int kTries = 64;
  bool late = false, all = mm_cu_peers_distinct(b->peers);
  b->streams_pending = true;
  for (int i = 0; i < kTries && !all; i++) {
    if (!mm_cu_peers_settle(b->peers, b->stream, err) || !mm_cu_peers_try_streams(b->peers, b->stream, &late, &all, err)) return false;
    if (all || !late) continue;
    cudaStream_t another = nullptr;
    if (!mm_cu_check(cudaStreamCreateWithFlags(&another, cudaStreamNonBlocking), "cudaStreamCreate", err)) return false;
    b->streams_given_up.push_back(b->stream);
    b->stream = another;
  }
  b->streams_pending = !all;
  if (all) return true;
  for (cudaStream_t s : b->streams_given_up) cudaStreamDestroy(s); /* the next step's tries take as many again */
  b->streams_given_up.clear();
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "rank %u: found ranks on one device whose kernels do not run at the same time, whichever of %d streams they have: "
                 "--devices, one for each rank",
                 b->c.weights->rank, kTries);
}

/* A step that failed may have been recorded by some ranks and not by others, and have made room on some: all forget both, so that they
 * meet again wherever one does either. */
bool mm_cu_begin_ranks(mm_backend *b, mm_err *err) {
  if (!b->peers || b->dry_runs || !mm_comm_failed(b->c.comm)) return true;
  for (step_memory *m : b->queued) m->broken = true;
  if (!mm_cu_check(cudaStreamSynchronize(b->stream), "step", err)) return false;
  void *queued[MM_CU_PEERS]; /* how many steps each rank has queued, + 1: the one that failed there is not among them */
  b->drop_graphs();          /* which hold pointers that the reset frees */
  if ((b->group && b->group != b->peers && !mm_cu_peers_reset(b->group, err)) || !mm_cu_peers_reset(b->peers, err) ||
      !mm_cu_peers_exchange_pointers(b->peers, reinterpret_cast<void *>(b->queued.size() + 1), queued, err))
    return false;
  const uintptr_t least = reinterpret_cast<uintptr_t>(*std::min_element(queued, queued + b->c.weights->tp));
  while (b->queued.size() >= least) b->queued.pop_back();
  if (b->c.weights->layer_first > 0) {
    b->logits.rows = 0; /* their memory is given back once rows are here: that waits for a device where the stage before is under way */
  } else {
    b->drop_logits();
  }
  bool all;
  if (!mm_cu_peers_barrier(b->peers, !b->capture.off, &all, err)) return false;
  b->capture.off = !all;
  return !b->streams_pending || mm_cu_separate_streams(b, err);
}

/* On all ranks or on none, since they meet here; and no rank's kernels wait for one whose device frees memory. */
bool mm_cu_make_logits(mm_backend *b, size_t rows, mm_err *err) {
  const mm_rank_weights *w = b->c.weights;
  const uint32_t ranks = mm_attn_tp(w), first = mm_attn_group(w) * ranks;
  const size_t bytes = rows * w->vocab_rows * sizeof(float), all_bytes = bytes * ranks;
  const size_t groups = rows * MM_CU_SAMPLE_GROUPS(b->c.model->vocab) * sizeof(uint32_t); /* scratch of sampling, behind the logits */
  b->drop_logits();
  bool made = mm_cu_malloc(reinterpret_cast<void **>(&b->logits.own), b->group ? bytes : bytes + groups, "logits", err);
  if (b->group)
    made =
        made && mm_cu_peers_malloc(b->group, reinterpret_cast<void **>(&b->logits.whole), all_bytes + groups, "logits of all ranks", err);
  float *const all_logits = b->group ? b->logits.whole : b->logits.own;
  if (b->peers) {
    void *all[MM_CU_PEERS];
    if (!mm_cu_peers_exchange_pointers(b->peers, made ? all_logits : nullptr, all, err)) made = false;
    for (uint32_t r = 0; r < w->tp; r++) made = made && all[r];
    for (uint32_t r = 0; made && r < ranks; r++) b->logits.of_rank[r] = static_cast<float *>(all[first + r]);
  }
  if (!made) b->drop_logits();
  b->logits.rows = made ? rows : 0;
  b->sampler.args.logits = made ? all_logits : nullptr;
  b->sampler.args.largest = made ? reinterpret_cast<uint32_t *>(all_logits + all_bytes / sizeof(float)) : nullptr;
  return made;
}

cudaError_t mm_cu_share_logits(mm_backend *b, uint32_t rows) {
  if (!b->group || rows == 0) return cudaSuccess;
  return mm_cu_peers_all_gather(b->group, b->logits.of_rank, b->logits.own, rows, b->c.weights->vocab_rows, b->stream);
}

cudaError_t mm_cu_sum_ranks(mm_backend *b, bf16 *x, uint32_t width) {
  return b->group ? mm_cu_peers_sum(b->group, x, (uint64_t)b->step.rows * width, b->stream) : cudaSuccess;
}

bool mm_cu_combines_ranks(const mm_cu_peers *p, uint32_t rows, uint32_t width) {
  const uint64_t words = (uint64_t)rows * width / 4;
  return p && width <= MM_CU_MAX_HIDDEN && (mm_cu_peers_small(p, rows, words) || mm_cu_peers_many(p, words));
}

cudaError_t mm_cu_combine_ranks(const mm_cu_peers *p, const mm_cu_combine &a, uint32_t rows, uint32_t width, bool sent, cudaStream_t s) {
  if (!mm_cu_combines_ranks(p, rows, width) || width % 8 != 0 || !codes_fit(a.codes, rows, width)) return cudaErrorInvalidValue;
  if (!mm_cu_peers_small(p, rows, (uint64_t)rows * width / 4)) return mm_cu_combine_many(p, a, rows, width, sent, s);
  /* Only where no block writes data that another block of its row reads, and where all fit on the device at once. */
  const bool several = mm_cu_peers_distinct(p) && rows <= 8 && a.h != a.residual && a.h != a.branch && a.n != a.residual && a.n != a.branch;
  const unsigned blocks = !several ? 1 : width > 4096 ? 6 : rows > 1 ? 3 : 1;
  /* All blocks wait at once, and leave another stage's on the same devices room to do so too. */
  const unsigned each = ceil_div(rows, width > 3072 ? kWideBlocks : kWaitingBlocks);
  return launch(reduce_combine, ceil_div(rows, each) * blocks, ceil_div(width, 256) * 32, 0, s, mm_cu_peers_view(p), a, rows, width,
                blocks);
}

/* Not where another stage's kernels may wait on the same device, nor where words lie in the host's memory, which every block would read.
 * Rows of --batch-invariant have their bits from one kernel, however many of a prompt are with them. */
bool mm_cu_qk_norm_inside(const mm_backend *b) {
  return !b->c.options.batch_invariant && !b->border && mm_cu_peers_distinct(b->group) && !mm_cu_peers_hosted(b->group) &&
         mm_cu_peers_small(b->group, b->step.rows, b->step.rows);
}

cudaError_t mm_cu_qk_norm_ranks(mm_backend *b, bf16 *qkv, const float *q_norm, const float *k_norm, float eps) {
  const uint32_t d = b->heads.head_dim, pitch = (b->heads.heads + 2 * b->heads.kv_heads) * d;
  const qk_norms a = {qkv, q_norm, k_norm, eps, pitch, {{b->heads.heads * d, b->heads.kv_heads * d}}};
  if (narrow_rows(b)) return launch(reduce_scale_qk, b->step.rows, kThreads, 0, b->stream, mm_cu_peers_view(b->group), a);
  const cudaError_t e = sum_squares(b, qkv, pitch, a.s);
  return e != cudaSuccess ? e : launch(scale_qk, b->step.rows, kThreads, 0, b->stream, a, b->squares, mm_attn_tp(b->c.weights));
}

cudaError_t mm_cu_gated_norm_ranks(mm_backend *b, const mm_cu_gated &a) {
  if (narrow_rows(b)) return launch(reduce_gate_rows, b->step.rows, kThreads, 0, b->stream, mm_cu_peers_view(b->group), a);
  const cudaError_t e = sum_squares(b, a.o, a.width, {{a.width, 0}});
  return e != cudaSuccess ? e : launch(gate_rows, b->step.rows, kThreads, 0, b->stream, a, b->squares, mm_attn_tp(b->c.weights));
}
