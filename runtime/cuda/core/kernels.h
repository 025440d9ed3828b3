/* Host launch functions of the CUDA kernels: device pointers and a stream in, an error out. None allocates, waits or reads device
 * memory, so all can be captured in a graph. Activations are bf16, row-major; T = rows of the step; accumulation is fp32. */
#ifndef MM_CUDA_KERNELS_H
#define MM_CUDA_KERNELS_H

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "runtime/cuda/dispatch/dispatch.h"
#include "runtime/engine/pages.h"

/* ---- which kernel ---- */

/* The current device; asked once of each. */
cudaError_t mm_cu_device_here(mm_cu_device *d);
/* cudaSuccess where the kernel takes it here, cudaErrorNotSupported where it does not. */
cudaError_t mm_cu_refuse(mm_cu_kernel kernel, const mm_cu_task &q);

/* ---- dense ---- */

/* What experts and dense MLPs make of a gate g and an up value u: SiLU(g)·u, or (clamp(u, ±limit) + beta)·g'·sigmoid(alpha·g') with
 * g' = min(g, limit), in f32 before any rounding. */
struct mm_cu_activation {
  bool swigluoai;
  float alpha, limit, beta;
};

/* Room of products whose columns several blocks share (decode_dense.cu): sums[multiprocessors · MM_CU_SPAN_SUMS], and counters, zero before
 * and after, [multiprocessors · MM_CU_SPAN_TILES]. Without it each block has all columns. */
struct mm_cu_spans {
  float *sums;
  uint32_t *counters;
};
#define MM_CU_SPAN_SUMS  32768
#define MM_CU_SPAN_TILES 8

/* y[T, n] = x[rows, k]·Wᵀ; rows NULL: row t of x, else row rows[t]. Exactly one of y and y32 is given. */
struct mm_cu_linear {
  const __nv_bfloat16 *x;
  const uint32_t *rows;
  __nv_bfloat16 *y;
  float *y32;
  uint32_t tokens;
  bool add = false; /* y += the product; a single row's kernel alone */
  mm_cu_spans spans = {};
};
/* A single row. */
cudaError_t mm_cu_one(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
/* The same of one x with two weights that differ in their rows alone, in one launch; not under FINE scales (one_row.cu). */
struct mm_cu_two {
  mm_cu_weight w[2];
  const __nv_bfloat16 *x;
  __nv_bfloat16 *y[2];
};
bool mm_cu_are_alike(const mm_cu_weight &a, const mm_cu_weight &b);
cudaError_t mm_cu_one_two(const mm_cu_two &a, cudaStream_t s);
/* middle[n / 2] of a single row: the activation of a gate, w's first half of rows, and an up value each. */
struct mm_cu_gated_row {
  const __nv_bfloat16 *x;
  __nv_bfloat16 *middle;
  mm_cu_activation act;
};
cudaError_t mm_cu_one_gated(const mm_cu_weight &w, const mm_cu_gated_row &a, cudaStream_t s);
/* T ≤ MM_CU_DECODE_ROWS. */
cudaError_t mm_cu_decode_linear(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
/* T ≤ MM_CU_FEW, in code that is not of sm_90a, of weights that mm_cu_tile_takes. */
cudaError_t mm_cu_decode_dense(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
/* T ≤ MM_CU_FEW (sm_90a, not under FINE scales), the weights read once at the memory's rate, where a cluster of blocks holds the rows. */
cudaError_t mm_cu_small_batch_widened(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
/* The most blocks of such a cluster that the current device has room for; 0: none. */
cudaError_t mm_cu_largest_cluster(uint32_t *blocks);
/* Any T; widened: weights that are codes, on sm_90a, where the other one takes bf16 alone. */
cudaError_t mm_cu_gemm(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);
cudaError_t mm_cu_gemm_widened(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s);

/* The beginning of what a later kernel reads, which a kernel that leaves the memory idle asks for to the L2 cache; bytes: a multiple of 16.
 */
struct mm_cu_ahead {
  const uint8_t *at;
  uint32_t bytes;
};

/* ---- mixture of experts ---- */

#define MM_CU_MAX_HIDDEN  6144 /* columns of the router's input */
#define MM_CU_MAX_EXPERTS 256
#define MM_CU_MAX_TOP_K   16

/* The routing of a step, in device memory, and its rule. */
struct mm_cu_route {
  uint32_t experts, top_k;
  bool sigmoid;        /* scores are sigmoids, else softmax */
  const float *bias;   /* [experts], or NULL: sigmoids are chosen by score + bias */
  const int32_t *slot; /* [T]; rows of slot -1 choose no expert (id ~0); NULL: all rows choose */
  float *logits;       /* [max_tokens, experts] */
  uint32_t *id;        /* [max_tokens, top_k] chosen experts, best first; ~0 where there is none */
  float *weight;       /* [max_tokens, top_k] */
  uint32_t *ticket;    /* [1] zero between launches */
  /* T ≤ MM_CU_DECODE_ROWS: the experts in use, ascending */
  uint32_t *used;        /* [1] */
  uint32_t *slot_expert; /* [min(experts, 16·top_k)] */
  uint32_t *slot_tokens; /* same: bit t set if token t goes there */
  float *slot_weight;    /* [slots, 16] */
  /* T = 1, [MM_CU_MAX_TOP_K]: the slots for w2's kernel, weight << 32 | expert + 1, or ~0 where there is none; 0: not there yet */
  unsigned long long *published;
  /* T > 1: pairs (token, choice) sorted by expert, then token */
  uint32_t *offset;         /* [experts + 1] */
  uint32_t *pair;           /* [max_tokens · top_k] = token · top_k + choice */
  unsigned long long *load; /* [experts], by index: rows that chose each, added to; or NULL */
  /* A rank's own experts are at the indices [first, first + held) of all, and choices of others are left out of all lists: id, offset and
   * what experts' kernels see are numbers among its own. held 0: all are. */
  uint32_t first, held;
  const uint32_t *index = nullptr; /* [experts] the index of each in the stacks of all ranks (mm_expert_order); NULL: its id */
  float scale = 1;                 /* what the weights of a row's choices add up to */
  mm_cu_activation act = {};       /* of all experts */
};

struct mm_cu_router {
  const void *w; /* [experts, k] bf16, or f32 */
  bool wide;     /* f32 */
  uint32_t k;
  const void *piece;    /* f32, T > MM_CU_DECODE_ROWS: w as the sum of three bf16 matrices, [3, experts, k] (mm_cu_split), */
  float *product;       /* and room for [T, 3, experts] */
  bool batch_invariant; /* of more rows than MM_CU_DECODE_ROWS all take one kernel: a row's bits do not depend on how many there are */
  mm_cu_ahead ahead;    /* asked for where a single token's residual comes along */
};
/* w[n] as the sum of three bf16 arrays. */
cudaError_t mm_cu_split(__nv_bfloat16 *to, const float *w, size_t n, cudaStream_t s);
/* r.logits of x[T, k], T > MM_CU_DECODE_ROWS: the first part of mm_cu_route_tokens. */
cudaError_t mm_cu_route_logits(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s);
/* Fills r for x[T, k]: the slot lists for T ≤ MM_CU_DECODE_ROWS, the sorted pairs for T > 1. For a single token it writes the
 * logits alone; mm_cu_experts_one and mm_cu_experts_decode select experts from them and fill in the rest. It clears r.published, so it must
 * run before those kernels. */
cudaError_t mm_cu_route_tokens(const mm_cu_router &m, const mm_cu_route &r, const __nv_bfloat16 *x, uint32_t tokens, cudaStream_t s);

/* Where rows go besides, as they are written: into the memory of the other rank of two, which adds its own to them (backend.h). epoch NULL:
 * nowhere. */
struct mm_cu_push {
  __nv_bfloat16 *to[2]; /* [rows, width]; by the parity of *epoch */
  const uint32_t *epoch;
};

/* y[T, H] = Σ weight · w2(SiLU(w1 x) ⊙ (w3 x)), zeros for rows that choose no expert; the inputs of w2 rounded as it says; x is rounded
 * already. middle: [slots, 16, I] bf16 for T ≤ MM_CU_DECODE_ROWS, [T · top_k, I] for more. */
struct mm_cu_experts {
  const __nv_bfloat16 *x;
  __nv_bfloat16 *y, *middle;
  float *pair_out; /* [T · top_k, H], only for T > MM_CU_DECODE_ROWS */
  uint32_t tokens;
  mm_cu_push push; /* y's rows, by mm_cu_experts_many */
  bool decode;     /* all rows are single tokens: their bits need not be those of other steps */
};
/* A single token, whose x comes as it is where mm_cu_rounds_inside. */
cudaError_t mm_cu_experts_one(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                              cudaStream_t s);
/* T ≤ MM_CU_DECODE_ROWS. */
cudaError_t mm_cu_experts_decode(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                 cudaStream_t s);
/* Any T > 1. */
cudaError_t mm_cu_experts_gemm(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s);
/* Where an expert has a few rows: weights are read once for eight of them. sm_90a, codes of 4 or 8 bits, not under FINE scales, k % 32 ==
 * 0, n even; T > 1; middle: [3, T · top_k, I]; pair_out as for more, in use throughout. x comes as it is where mm_cu_rounds_inside. */
cudaError_t mm_cu_experts_few(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                              cudaStream_t s);
/* For many rows, T > 1, of weights that are codes: sm_90a, scales of 64 columns at least or in bytes, k % 32 == 0, n % 8 == 0. */
cudaError_t mm_cu_experts_many(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                               cudaStream_t s);
/* experts_gemm's and experts_many's a.middle[T · top_k, I] alone, in the order of sorted pairs, not rounded (experts_many leaves the
 * columns in an order of its own); a.pair_out is written too. */
cudaError_t mm_cu_experts_middle(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s);
cudaError_t mm_cu_experts_many_middle(const mm_cu_weight &w13, const mm_cu_route &r, const mm_cu_experts &a, cudaStream_t s);
/* a.y[t, width] = Σ a.pair_out of its choices, in their order; zeros where it has none. */
cudaError_t mm_cu_sum_pairs(const mm_cu_route &r, const mm_cu_experts &a, uint32_t width, cudaStream_t s);

/* ---- attention ---- */

/* Where each row of the step stands, in device memory. */
struct mm_cu_rows {
  const int32_t *slot; /* [T]; -1: padding */
  const uint32_t *pos; /* [T] tokens before this one in its sequence */
};
/* Rows of a sequence that verify proposals: side by side, so many at most. */
#define MM_CU_VERIFY 8
#ifdef __CUDACC__
/* Rows of the same sequence right before this one, whose slot is not -1: their keys and values are of this step. */
__device__ __forceinline__ uint32_t mm_cu_rows_before(const mm_cu_rows &r, uint32_t row) {
  uint32_t n = 0;
#pragma unroll
  for (uint32_t i = 1; i < MM_CU_VERIFY; i++) n += row >= i && r.slot[row - min(i, row)] == r.slot[row];
  return n;
}
#endif

#define MM_CU_PAGE 64
/* One layer's KV cache: pages of 64 positions, [page][kv head][64][d], found through table[slot · pages_per_slot + pos / 64]. Numbers are
 * bf16; with scales (f32, [page][kv head][64], largest magnitude / 448) they are e4m3. */
struct mm_cu_kv {
  void *k, *v;
  const uint32_t *table;
  uint32_t pages_per_slot;
  float *k_scale, *v_scale;
  __nv_bfloat16 *index; /* index keys of a sparse layer, [page][64][index_dim]; else NULL */
  float *index_scale;   /* [page][64]: index has e4m3 in place of bf16, largest magnitude / 448; else NULL */
};
/* Number of the first of the 64 tokens of one kv head in a page. */
__host__ __device__ inline size_t mm_cu_cell(uint32_t page, uint32_t kv_heads, uint32_t head) {
  return ((size_t)page * kv_heads + head) * MM_CU_PAGE;
}
struct mm_cu_heads {
  uint32_t heads, kv_heads, head_dim, rotary_dim; /* head_dim 64 or 128; heads / kv_heads ≤ 8 */
};

/* Before a step: table[edit.at] = edit.page, and the first tokens of pages to their new ones, in every layer. Both lists are read as the
 * kernels run; pinned host memory will do. No copy reads a page that another one writes. */
struct mm_cu_edit {
  uint32_t at, page;
};
struct mm_cu_page_work {
  uint32_t *table;
  const mm_cu_kv *kv; /* [layers] in device memory: those of full attention */
  uint32_t layers, kv_heads;
  uint32_t token_bytes; /* of one head's key, or value; a multiple of 16 */
  uint32_t index_bytes; /* of an index key, where there are any; a multiple of 16 */
  const mm_cu_edit *edit;
  const mm_page_copy *copy;
  uint32_t edits, copies;
};
cudaError_t mm_cu_prepare_pages(const mm_cu_page_work &w, cudaStream_t s);

/* Optional QK norm over all heads (q_norm [heads·d], k_norm [kv_heads·d], f32, or NULL), RoPE with inv_freq[rotary_dim/2], q back in
 * place, k and v into the cache. qkv[T, (heads + 2·kv_heads)·d]. */
struct mm_cu_peers;
struct mm_cu_qkv {
  __nv_bfloat16 *qkv;
  const float *q_norm, *k_norm, *inv_freq;
  float eps;
  uint32_t tokens;
  const mm_cu_peers *ranks = nullptr; /* of gqa_decode: whose columns the norms are over; each has a device of its own */
};
cudaError_t mm_cu_rope(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &a, cudaStream_t s);

/* Contexts are read in chunks of a fixed size at most, so that one long row among short ones does not leave most of the device idle. The
 * host, which knows all positions, assigns the surplus of a long row to blocks that do it after their own. */
#define MM_CU_GQA_KEYS  16 /* of a tile */
#define MM_CU_GQA_WARPS 8  /* of a block; splits are so many tiles, or a multiple */
struct mm_cu_far_plan {
  uint32_t chunk = 0; /* in tiles of 16 tokens, a multiple of MM_CU_GQA_WARPS; 0: no chunks */
  uint32_t items = 0; /* that rows in chunks have at most, together */
  bool even = true;   /* chunks are rounded to whole turns of the blocks */
};
/* chunk: another than the usual, for tests. */
mm_cu_far_plan mm_cu_plan_far(const mm_cu_heads &h, uint32_t slots, uint32_t max_positions, uint32_t chunk = 0);
/* The same room for more rows than slots, each of which may be as long: in larger chunks. Of no more it is the plan itself. */
mm_cu_far_plan mm_cu_plan_far_rows(const mm_cu_far_plan &plan, uint32_t slots, uint32_t rows);
/* In device memory, of mm_cu_gqa_list. */
struct mm_cu_far {
  mm_cu_far_plan plan;
  const uint32_t *first = nullptr; /* [rows] where the row's partial results lie, in items */
  /* of each block (row + rows · split): where its items begin, and how many; then items: row and split, of verify rows row + 65536 · rows
   */
  const uint2 *item = nullptr;
};
/* How a step's rows are cut: a row into as many parts as every row has blocks or, where those would be larger, into chunks. Where all
 * blocks run at once (unit) and the row is long enough, the number of chunks is a multiple of the number of blocks: a part costs as much as
 * MM_CU_GQA_COST tiles, and the added parts may cost a sixteenth of the row. The cut depends on the number of rows and on the row alone. */
#define MM_CU_GQA_COST 25
struct mm_cu_gqa_cut {
  uint32_t splits, chunk, unit;
  /* Tiles of a part of a row of so many. */
  __host__ __device__ uint32_t part(uint32_t tiles) const {
    constexpr uint32_t w = MM_CU_GQA_WARPS;
    const uint32_t even = (tiles + splits * w - 1) / (splits * w) * w;
    if (even <= chunk) return even > w ? even : w;
    uint32_t n = (tiles + chunk - 1) / chunk;
    const uint32_t fair = (n + unit - 1) / unit * unit;
    if ((fair - n) * MM_CU_GQA_COST * 16 <= tiles) n = fair;
    return (tiles + n * w - 1) / (n * w) * w;
  }
};
mm_cu_gqa_cut mm_cu_cut_rows(const mm_cu_heads &h, uint32_t rows, const mm_cu_far_plan &plan);

/* mm_cu_rope, and o[T, heads·d], for rows that are one token each, of a slot one; or, with verifies, up to MM_CU_VERIFY side by side: two
 * launches, and each row has the bits that it has as a slot's only one. work: mm_cu_gqa_work(max_tokens) bytes, zero at first;
 * one for steps of any T ≤ max_tokens, in any order.
 * The cache before each slot's first row is read at once (grid_wait): no kernel may still be writing it. */
struct mm_cu_gqa {
  const __nv_bfloat16 *qkv;
  __nv_bfloat16 *o;
  void *work;
  uint32_t tokens, max_tokens;
  mm_cu_far far = {};
  bool verifies = false;
};
size_t mm_cu_gqa_work(const mm_cu_heads &h, uint32_t max_tokens, const mm_cu_far_plan &plan = {});
/* Parts that every row of a step of so many has blocks for. */
uint32_t mm_cu_gqa_splits(const mm_cu_heads &h, uint32_t rows);
/* For rows at pos (slot -1: padding), all host memory: first[rows], and item[the result], of which mm_cu_gqa_items are the most. A row's
 * parts beyond its blocks go one by one to the block that has least to read. */
size_t mm_cu_gqa_list(const mm_cu_heads &h, uint32_t rows, const int32_t *slot, const uint32_t *pos, const mm_cu_far_plan &plan,
                      uint32_t *first, uint2 *item);
/* The same for verify rows: all parts, none of which a block has by itself, and up to MM_CU_TOGETHER rows of a sequence in one item. */
#define MM_CU_TOGETHER 4
size_t mm_cu_gqa_verify_list(const mm_cu_heads &h, uint32_t rows, const int32_t *slot, const uint32_t *pos, const mm_cu_far_plan &plan,
                             uint32_t *first, uint2 *item);
size_t mm_cu_gqa_items(const mm_cu_heads &h, uint32_t max_tokens, const mm_cu_far_plan &plan);
cudaError_t mm_cu_gqa_decode(const mm_cu_heads &h, const mm_cu_rows &r, const mm_cu_kv &kv, const mm_cu_qkv &p, const mm_cu_gqa &a,
                             cudaStream_t s);

/* A prefill chunk: rows [first, first + count) of one sequence whose cache holds pos tokens before it. */
struct mm_cu_span {
  int32_t slot;
  uint32_t first, count, pos;
};
/* Tile i: rows [first, first + 64) of span[tile[i].x], first = tile[i].y rows into the span; any order, the most keys first is fastest. */
struct mm_cu_tiles {
  const mm_cu_span *span;
  const uint2 *tile;
  uint32_t count;
};
#define MM_CU_TILE 64
/* o for the rows of the tiles; their k and v are in the cache already. A row's bits do not depend on its tile. */
cudaError_t mm_cu_gqa_prefill(const mm_cu_heads &h, const mm_cu_tiles &t, const mm_cu_kv &kv, const mm_cu_gqa &a, cudaStream_t s);

/* Lightning attention of one layer. state [heads][d key][d value] fp32 of slot 0, in place, a slot's state_stride numbers after that of the
 * one before: a multiple of 4. slope[heads]: the decay per token is exp(-slope). qkv[T, heads·3·d] (per head q, k, v) before SiLU; o[T,
 * heads·d]. */
struct mm_cu_lightning {
  const __nv_bfloat16 *qkv;
  __nv_bfloat16 *o;
  float *state;
  const float *slope;
  uint32_t heads, head_dim;
  size_t state_stride;
};
/* States are read at once: no kernel may still be writing them. A slot has one row at most. */
cudaError_t mm_cu_lightning_decode(const mm_cu_lightning &a, const mm_cu_rows &r, uint32_t tokens, cudaStream_t s);
cudaError_t mm_cu_lightning_prefill(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s);
/* The same token by token: a row's bits do not depend on where its chunk begins. */
cudaError_t mm_cu_lightning_rows(const mm_cu_lightning &a, const mm_cu_span *span, uint32_t spans, cudaStream_t s);

/* ---- rows ---- */

#define MM_CU_MAX_WIDTH  16384 /* of a row that is normed */
#define MM_CU_MAX_TOKENS 65535 /* of a step: blocks side by side */

/* Rounded rows (fp8.h). code: [rows, pitch], zeros behind the last column; scale: [pitch / 128, scale_pitch], a group's scales side by
 * side. */
struct mm_cu_codes {
  uint8_t *code; /* 16-byte aligned */
  float *scale;
  uint32_t rows, pitch, scale_pitch; /* pitch a multiple of 128, scale_pitch ≥ rows */
};

/* to[n] = from[n], n % 8 == 0. */
cudaError_t mm_cu_copy(__nv_bfloat16 *to, const __nv_bfloat16 *from, size_t n, cudaStream_t s);

/* x[t] = table[id[t]], where id -1 is last_id[slot[t]]; the table is that of ids [first, first + count). Zeros for others, and for slot -1.
 * kept, unless NULL: kept[slot[t], pos[t]] becomes that id. */
struct mm_cu_ids {
  const int32_t *id, *slot, *last_id;
  uint32_t first, count;
  const uint32_t *pos;
  int32_t *kept; /* [slots, positions] */
  uint32_t positions;
};
cudaError_t mm_cu_embed(__nv_bfloat16 *x, const __nv_bfloat16 *table, const mm_cu_ids &ids, uint32_t tokens, uint32_t width,
                        cudaStream_t s);
/* w[n] += 1. */
cudaError_t mm_cu_add_one(float *w, size_t n, cudaStream_t s);
/* y = RMS(x; w, eps). */
cudaError_t mm_cu_norm(__nv_bfloat16 *y, const __nv_bfloat16 *x, const float *w, float eps, uint32_t tokens, uint32_t width,
                       cudaStream_t s);
/* y = sigmoid(gate) · RMS(o; w, eps). codes, unless nothing: y's too; then width is whole groups. */
struct mm_cu_gated {
  __nv_bfloat16 *y;
  const __nv_bfloat16 *o, *gate; /* [rows, width] */
  const float *w;
  float eps;
  uint32_t width;
};
cudaError_t mm_cu_gated_norm(const mm_cu_gated &a, uint32_t tokens, const mm_cu_codes &codes, cudaStream_t s);
/* h = alpha·residual + beta·branch, n = RMS(h; w, eps); codes likewise n's, T > 1. */
struct mm_cu_combine {
  __nv_bfloat16 *h, *n;
  const __nv_bfloat16 *residual, *branch;
  const float *w;
  float alpha, beta, eps;
  mm_cu_codes codes;
};
cudaError_t mm_cu_combine_rows(const mm_cu_combine &a, uint32_t tokens, uint32_t width, cudaStream_t s);
/* mm_cu_combine and the routing of a.n: for a single token one kernel, whose blocks all read the residual and the branch. h and n must
 * be different buffers from those. */
cudaError_t mm_cu_combine_route(const mm_cu_combine &a, const mm_cu_router &m, const mm_cu_route &r, uint32_t tokens, cudaStream_t s);

/* ---- dense MLPs (mlp.cu) ---- */

/* middle[T, inter] = act(wide[T, 0 … inter), wide[T, inter … 2·inter)), and its codes (mm_cu_combine); inter a multiple of 8. */
cudaError_t mm_cu_activate(__nv_bfloat16 *middle, const float *wide, const mm_cu_activation &act, uint32_t tokens, uint32_t inter,
                           const mm_cu_codes &codes, cudaStream_t s);
/* y[T, width] += add[T, width], one rounding. */
cudaError_t mm_cu_add_rows(__nv_bfloat16 *y, const float *add, uint32_t tokens, uint32_t width, cudaStream_t s);

#endif
