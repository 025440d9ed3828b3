/* The CUDA backend's state (backend.cu): opened by backend_open.cu, stepped by backend.cu. */
#ifndef MM_CUDA_BACKEND_H
#define MM_CUDA_BACKEND_H

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/core/collect.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/load.h"
#include "runtime/cuda/core/upload.h"
#include "runtime/cuda/gemm/inputs.h"
#include "runtime/cuda/sampling/sampling.h"
#include "runtime/engine/ops.h"

/* One step's batch, as the kernels read it; the same layout in pinned host memory and on the device. */
struct batch_arrays {
  int32_t *id, *slot;
  int32_t *all_slot; /* of the rows of all groups (mm_group_rows); with one group those are the rows, and this is slot */
  uint32_t *pos, *out;
  mm_cu_row_sampling *sampling;
  uint32_t *first; /* of rows in chunks (mm_cu_far), as is what comes last: */
  uint2 *item;
  /* of steps that are not decode steps */
  mm_cu_span *span;
  uint2 *tile;
};

/* A row whose logprobs go to the caller once they are collected. */
struct mm_cu_logprobs_wanted {
  uint32_t row, count;
  mm_logprob *to;
};

/* Device memory that grows on demand. Growing loses its content. */
struct grown {
  void *p = nullptr;
  size_t bytes = 0;
  bool grow(size_t wanted, bool zero, mm_err *err);
  void close();
};

/* The host's side of a step under way. */
struct step_memory {
  void *block = nullptr;      /* pinned; batch_arrays as uploaded */
  int32_t *id = nullptr;      /* pinned; the sampled ids */
  cudaEvent_t done = nullptr; /* id is complete */
  uint32_t outs = 0;
  mm_cu_edit *edit = nullptr;   /* [kEdits] pinned: what the kernels that prepare its pages read */
  mm_page_copy *copy = nullptr; /* [slots] likewise */
  char *options = nullptr;      /* pinned: the sampling options of its rows, as uploaded */
  size_t options_cap = 0;
  mm_logprob *logprobs = nullptr; /* pinned: [outs, MM_CU_LOGPROBS], rows with logprobs */
  size_t logprobs_cap = 0;
  std::vector<mm_cu_logprobs_wanted> logprobs_wanted; /* whose those are */
  bool broken = false;                                /* it was under way when some rank failed: its ids are invalid */
};
constexpr uint32_t kEdits = 4096;         /* of a step's page tables; of more the whole table is uploaded */
constexpr uint32_t kSteps = MM_QUEUE + 1; /* a step may begin while as many as may be are outstanding */

/* Rows that a decode step is padded to, to be recorded. Steps of more rows are launched kernel by kernel: each kernel takes longer than its
 * launch there, and graphs for every number of rows would be without end. */
constexpr uint32_t kBuckets[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};

/* Least number of rows of a batch-invariant step. */
constexpr uint32_t kLeastInvariant = MM_CU_DECODE_ROWS + 1;

/* How a step ends: with its logits, or with ids, sampled by the kernels of the row that needs most (mm_cu_sampling). */
enum step_end { LOGITS, GREEDY, SMALL_TOP_K, ANY_SAMPLING };
static_assert(SMALL_TOP_K == GREEDY + MM_CU_SMALL_TOP_K && ANY_SAMPLING == GREEDY + MM_CU_ANY_SAMPLING);

struct layer_cache {
  float *state, *slope; /* lightning; slot 0's state */
  mm_cu_kv kv;          /* full attention */
};

struct step_graph {
  int seen = 0;
  cudaGraphExec_t exec = nullptr;
};

/* Ops launch their kernels; or are collected for end or sample, which captures them; or do nothing, since a graph of the step exists. */
enum step_mode { EAGER, CAPTURE, REPLAY };

/* A residual and norm that the next op does along, or has done first. */
enum residual_state { RESIDUAL_NONE, RESIDUAL_SUMMED, RESIDUAL_GROUPS, RESIDUAL_PARTIAL, RESIDUAL_SENT };
struct deferred_residual {
  /* PARTIAL: the branch is still this rank's alone; SENT: and the other rank has it; GROUPS: it is the rows of all groups (scatter) */
  residual_state state = RESIDUAL_NONE;
  mm_cu_combine op = {};
  uint32_t width = 0;
};

/* The step under way: its sizes, and what the ops so far have left to do. */
struct current_step {
  uint32_t rows = 0, outs = 0;     /* with padding */
  uint32_t tokens = 0, wanted = 0; /* rows and outputs without it */
  uint32_t most_outs = 0;          /* of all groups, with padding */
  uint32_t spans = 0, tiles = 0;   /* not of decode steps */
  uint32_t singles = 0;            /* rows before the first prefill chunk: attention takes them as a decode step does */
  uint32_t single_spans = 0;       /* whose spans are so many */
  bool decode = false;
  bool draft = false;    /* a block of the draft or a pass of its chain, which take the products of a decode step */
  mm_draft_step chain;   /* which pass; of no passes otherwise */
  bool verifies = false; /* some of those spans have several rows */
  step_end ending = LOGITS;
  const mm_sampling *options =
      nullptr; /* sampling options beyond mm_cu_row_sampling; such rows are sampled after the pass, outside the graph. NULL: none */
  step_memory *memory = nullptr;
  deferred_residual deferred;
  const void *sent = nullptr, *sent_before = nullptr; /* rows that an op, and the op before it, sent as it made them */
};

/* Decode steps as CUDA graphs. */
struct graph_capture {
  step_mode mode = EAGER;
  step_graph *graph = nullptr;                                           /* of the step under way */
  std::vector<std::function<void()>> ops;                                /* CAPTURE: the ops so far */
  std::map<std::tuple<uint32_t, step_end, uint32_t>, step_graph> graphs; /* by rows, ending and kind (kind_of in backend.cu) */
  bool off = false; /* capturing has failed, or rows go to another stage: every step is launched kernel by kernel */
};

/* Weights on the device. */
struct device_weights {
  std::map<const mm_packed *, mm_cu_weight> matrix;
  std::map<const mm_packed *, const float *> values; /* as f32: norms, bias, routers that are not bf16 */
  std::map<const mm_packed *, const bf16 *> router;  /* routers that are not bf16, in pieces (mm_cu_router) */
  std::map<const mm_packed *, mm_cu_sums> sums;      /* of inputs, for c.calibration (collect.h) */
  bool all_codes = false, draft_codes = false;       /* mm_cu_rounded.all_codes of the target's steps, and of the draft's */
};

/* Page tables of the slots (paging.cu). */
struct page_tables {
  uint32_t *device_table = nullptr, per_slot = 0;
  std::vector<uint32_t> host_table; /* [slots, per_slot] what device_table holds after all steps so far */
  bool own = true;                  /* page i of slot s is s * per_slot + i everywhere */
  std::vector<mm_cu_edit> edits;
  mm_cu_page_work work = {}; /* but for the lists */
};

/* Pages in host memory (moves.cu). */
struct host_pool {
  char *memory = nullptr; /* pinned: [places, page_bytes], */
  mm_cu_huge own;         /* where this rank has allocated it */
  size_t page_bytes = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t before = nullptr;                           /* the steps so far */
  std::deque<std::pair<uint64_t, cudaEvent_t>> under_way; /* calls of move that have not ended: their numbers, and when they have */
  std::vector<cudaEvent_t> idle;
};

/* Lightning states. */
struct slot_states {
  float *data = nullptr; /* [slots, lightning layers, heads, d key, d value] */
  size_t per_slot = 0;   /* floats */
};

struct attention_buffers {
  float *inv_freq = nullptr;
  void *work = nullptr;
  mm_cu_far_plan far = {};
  bool by_head = false;     /* an extended model: norms of each head (extended.cu) */
  mm_cu_select select = {}; /* an extended model's, but for q and keys */
  void *by_block = nullptr; /* work space of attention by block (gqa_by_block.cu), where it is wanted */
};

struct expert_buffers {
  mm_cu_route route = {};
  uint32_t layer = 0;       /* that route was last filled for */
  uint32_t *used = nullptr; /* pinned: experts that a step uses while not all are there; [MM_CU_MAX_EXPERTS / 32] bits */
  float *router_product = nullptr;
  bf16 *middle = nullptr; /* rows between w13 and w2 */
  float *pair_out = nullptr;
  unsigned long long *load = nullptr; /* [layers, experts], by index */
  uint32_t *index = nullptr;          /* [layers, experts] the index of each expert (mm_expert_order); NULL: none is placed */
};

/* Of an extended model's MLP. */
struct mlp_buffers {
  float *wide = nullptr; /* [max_tokens, widest of the rows between the products, or hidden] */
  bf16 *middle = nullptr;
};

/* How a step of the draft ends; NONE: the step is the target's. */
enum draft_end { DRAFT_NONE, DRAFT_LOGITS, DRAFT_BEST };

/* Cells, copies of pages and buffers of a draft (draft.cu). */
struct draft_buffers {
  draft_end next = DRAFT_NONE; /* of the step that begins */
  mm_draft_step step = {};     /* the same */
  std::vector<mm_cu_kv> cells; /* [layers]; `index` has what EAGLE-3 keeps besides keys and values, [page][64][H] */
  mm_cu_page_work copies = {}; /* of cells; but for the lists, and without edits */
  float *inv_freq = nullptr;   /* [head_dim / 2] */
  int32_t *last_id = nullptr;  /* [slots]: the target's stays as it is */
  void *work = nullptr;
  /* of EAGLE-3 */
  bf16 *chain = nullptr;     /* [slots, MM_CU_CHAIN, 2, kv_heads, d]: keys and values of the slots' chains */
  uint32_t rows = 0;         /* of a pass at most, with padding */
  float *logits = nullptr;   /* [rows, draft_vocab] */
  int32_t *id = nullptr;     /* [MM_CU_CHAIN, rows]: what each pass chose */
  int32_t *map = nullptr;    /* [draft_vocab] the target's ids; NULL: the head's are */
  uint32_t *never = nullptr; /* mm_cu_sample's, of the head's ids */
};

struct sampler_buffers {
  mm_cu_sample args = {};
  int32_t *ids = nullptr;                     /* [slots, max_positions] that the slots hold */
  grown options, raw, seen, logprobs, scores; /* of steps whose rows have such options (sampling_requests.cu) */
  bool pending = false;                       /* the logits of the step before are not sampled yet */
};

struct logits_buffers {
  float *own = nullptr; /* [rows, vocab_rows] this rank's */
  size_t rows = 0;
  float *whole = nullptr;           /* of several ranks: [rows, ranks · vocab_rows], each rank's columns after another's */
  float *of_rank[MM_CU_PEERS] = {}; /* all ranks' whole */
};

/* Groups of attention, and the step's rows by group, with padding: the same on all ranks of the stage (groups.cu). */
struct group_step {
  uint32_t count = 1, own = 0;                       /* own: this rank's */
  const mm_group_rows *in = nullptr;                 /* without padding */
  mm_cu_group_rows rows = {};                        /* as is, with several: */
  bool decode = false;                               /* all rows are single tokens or verify rows */
  bool fixed = false;                                /* every group has as many rows, of a size that is recorded */
  bool inside = false;                               /* ops run the rows of all groups: those between gather and scatter */
  uint32_t coded_from[2] = {UINT32_MAX, UINT32_MAX}; /* rows of all groups from which on gather_routed sends codes; [1]: of decode steps */
  mm_act to = {}, from = {};                         /* of the scatter before this op, which a combine may do along; or {} */
};

struct mm_backend {
  mm_backend_config c;
  mm_cu_memory memory;
  cudaStream_t stream = nullptr;
  std::vector<cudaStream_t> streams_given_up; /* by mm_cu_separate_streams; they keep their queues until the rank closes */
  bool streams_pending = false;               /* that has failed: the next step tries again */
  std::unique_ptr<mm_cu_load> loading;        /* NULL from the first step on that finds all weights there */
  device_weights weights;

  /* ranks (ranks.cu) and stages (stages.cu) */
  mm_cu_peers *peers = nullptr; /* all ranks of the stage, of a rank of several, as are: */
  mm_cu_peers *group = nullptr; /* those that attention, embedding and head are cut for: all, or the rank's group's; NULL: one */
  group_step groups;
  float *squares = nullptr;                          /* [max_tokens, 2], and room for two more */
  mm_cu_whole_rows whole_rows = {}, group_rows = {}; /* inputs whose scales are of several ranks' columns: the stage's, the group's */
  __nv_bfloat16 *border = nullptr;                   /* pinned, [max_tokens, H]: rows between pipeline stages */

  /* caches of the slots */
  std::vector<layer_cache> cache;
  slot_states states;
  page_tables pages;
  host_pool pool;

  /* work space of the ops */
  mm_cu_heads heads = {};
  mm_cu_rounded inputs;
  attention_buffers attention;
  expert_buffers experts;
  mlp_buffers mlp;
  draft_buffers draft;
  sampler_buffers sampler;
  logits_buffers logits;

  /* steps */
  step_memory memory_of_step[kSteps];
  void *device_block = nullptr;
  batch_arrays device = {};
  std::deque<step_memory *> queued; /* ended by sample, not collected */
  current_step step;
  graph_capture capture;
  bool dry_runs = false; /* ops are judged, and nothing is done (mm_cu_dry_run) */
  mm_err err = {};
  const char *failed = nullptr; /* the op that err is of */
  bool lost = false;            /* a message of another rank did not arrive: nothing more is launched, and that rank reports why */

  void drop_graphs();
  void drop_logits(); /* and the graphs, which hold their place */
};

/* Weights arrive in groups: what a step needs before its first layer; what it needs from layer l on until the next begins, that one's first
 * norm included, whatever experts it chooses; the head; then each expert's codes. */
inline uint32_t mm_cu_group_of_layer(uint32_t l) { return l + 1; }
inline uint32_t mm_cu_group_of_head(const mm_model *m) { return m->layers + 1; }
inline uint32_t mm_cu_group_of_experts(const mm_model *m, uint32_t l) { return m->layers + 2 + l * m->experts; }
/* used[MM_CU_MAX_EXPERTS / 32], pinned: bit e % 32 of used[e / 32] for every expert that some row of the step's routing chooses
 * (used_experts.cu). */
cudaError_t mm_cu_list_used(const mm_cu_route &r, uint32_t *used, uint32_t tokens, cudaStream_t s);

/* The rows that a decode step of this many is padded to; 0: it is not. */
inline uint32_t mm_cu_bucket_of(const mm_backend *b, uint32_t rows) {
  for (uint32_t n : kBuckets) {
    if (rows <= n) return (uint32_t)mm_min(n, b->c.limits.max_tokens);
  }
  return 0;
}

/* Sets the step's kind: which of its rows take the kernels of decode steps (step_rows.cu). */
void mm_cu_classify_rows(mm_backend *b, const mm_batch *batch);
/* Rows [0, singles) are single tokens or verify rows, the rest are prefill chunks. */
inline uint32_t mm_cu_singles(const mm_backend *b) { return b->step.decode ? b->step.rows : b->step.singles; }
/* How attention of those rows is cut. */
inline mm_cu_far_plan mm_cu_far_now(const mm_backend *b) {
  const mm_cu_far_plan &plan = b->attention.far;
  return b->step.verifies ? mm_cu_plan_far_rows(plan, b->c.limits.slots, mm_cu_singles(b)) : plan;
}

/* Arrays of a step inside one block; returns its bytes. Every step's are uploaded before its kernels, so nothing is left of a step whose
 * rows were others. A span has at least one row, a tile at most 64 of one span. */
size_t mm_cu_place_batch(uint32_t rows, bool decode, char *base, batch_arrays *a); /* but for `item`, behind them */
/* The same for the step under way, with the slots of all groups' rows before them. */
size_t mm_cu_place_step(const mm_backend *b, char *base, batch_arrays *a);

/* Pinned memory of a step for n elements, which the steps before have read. Only with a single rank: it may wait for every device. */
template <class T>
bool mm_cu_grow_pinned(T **p, size_t *cap, size_t n, mm_err *err) {
  if (n <= *cap) return true;
  cudaFreeHost(*p);
  *p = nullptr, *cap = 0;
  const size_t capacity = mm_max(n, 64);
  void *memory = nullptr;
  if (!mm_cu_check(cudaMallocHost(&memory, capacity * sizeof(T)), "cudaMallocHost", err)) return false;
  *p = static_cast<T *>(memory), *cap = capacity;
  return true;
}

/* Gathers the logits of the whole vocabulary on every rank, before tokens are sampled or scored from them (ranks.cu). Collective. */
cudaError_t mm_cu_share_logits(mm_backend *b, uint32_t rows);
/* Room for logits of so many rows, in place of what there is; collective. False, and no room on any rank, when some rank finds none. */
MM_MUST_USE bool mm_cu_make_logits(mm_backend *b, size_t rows, mm_err *err);

/* Grows buffers by grow() between a step's kernels and the work that follows them. With several ranks it is a barrier: all have launched
 * before and all have grown theirs after, since an allocation may wait for every device. */
template <class F>
bool mm_cu_grow_buffers(mm_backend *b, mm_err *err, const F &grow) {
  if (!b->peers) return grow();
  if (!mm_cu_peers_pause(b->peers, b->stream, err)) return false;
  const bool made = grow();
  bool all;
  return mm_cu_peers_barrier(b->peers, made, &all, err) && all;
}

/* Samples a token for each wanted row of the step whose logits are there, under all options: launched, not captured. Logprobs
 * go to the step's memory (sampling_requests.cu). */
MM_MUST_USE bool mm_cu_sample_with_options(mm_backend *b, const mm_sampling *set, mm_err *err);
/* mm_sampler_ops.collect and score. */
bool mm_cu_collect_results(mm_backend *b, int32_t *id, mm_err *err);
bool mm_cu_score_deferred(mm_backend *b, const int32_t *target, double *score, mm_err *err);

/* Before the batch's upload: the device's table says for the batch's slots what the batch does, and its copies are made (paging.cu). */
MM_MUST_USE bool mm_cu_upload_pages(mm_backend *b, const mm_batch *batch, mm_err *err);

mm_backend *mm_cu_backend_open(const mm_backend_config *c, mm_err *err);
void mm_cu_backend_close(mm_backend *b); /* accepts NULL */
/* mm_ops.memory. */
MM_MUST_USE bool mm_cu_memory_facts(const mm_backend_config *c, mm_memory_facts *out, mm_err *err);
/* mm_ops.weights.hold and release. */
MM_MUST_USE bool mm_cu_hold(const mm_backend_config *c, mm_held *held, void **memory, mm_err *err);
void mm_cu_release(void *memory);

/* Weights that the router of `layer` asks for ahead (arrivals.cu). */
mm_cu_ahead mm_cu_ahead_of(mm_backend *b, uint32_t layer);

/* ---- ops (backend.cu) ---- */

/* Records what an op's launch returned: after a failure nothing is launched. */
void mm_cu_note(mm_backend *b, cudaError_t e, const char *what);
/* Returns true if ops launch kernels now. After a failure nothing is launched. */
inline bool mm_cu_running(const mm_backend *b) { return b->capture.mode == EAGER && b->err.status == MM_OK && !b->lost; }
/* At the start of an op: whether it launches anything, with all before it launched. */
bool mm_cu_begin_op(mm_backend *b);
/* The sum and the norm of a residual, with what they write noted. */
mm_cu_combine mm_cu_combine_of(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                               double eps);
/* mm_ops.begin, and mm_draft_ops.begin and best. */
bool mm_cu_begin_step(mm_backend *b, const mm_batch *batch, mm_err *err);
bool mm_cu_begin_draft(mm_backend *b, const mm_batch *batch, mm_draft_step step, mm_err *err);
bool mm_cu_best(mm_backend *b, int32_t *id, mm_err *err);
/* True if the op is not launched now: it is collected for a capture, or part of a captured graph. */
template <class... Args>
bool mm_cu_later(mm_backend *b, void (*op)(mm_backend *, Args...), std::common_type_t<Args>... args) {
  if (b->capture.mode == CAPTURE) b->capture.ops.push_back([=] { op(b, args...); });
  return b->capture.mode != EAGER;
}

/* ---- extended models (extended.cu) ---- */

/* Their buffers and rules, after the caches and the experts' buffers; nothing for others. */
MM_MUST_USE bool mm_cu_open_extended(mm_backend *b, mm_err *err);
/* mm_ops.select, gqa and mlp of the step's rows, launched. */
cudaError_t mm_cu_do_select(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm);
cudaError_t mm_cu_do_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);
/* linear_three of a step of one row, where it says that it is one launch. */
bool mm_cu_joins_linears(mm_backend *b, const mm_three &of);
cudaError_t mm_cu_do_linears(mm_backend *b, const mm_three &of, mm_act x);
/* experts_shared of a step of one row, where it says that it launches that. */
bool mm_cu_joins_experts(mm_backend *b, const mm_packed *w13, const mm_packed *w2, const mm_packed *up, const mm_packed *down);
cudaError_t mm_cu_do_experts_shared(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2, const mm_packed *up,
                                    const mm_packed *down);
cudaError_t mm_cu_do_mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add);

/* ---- a draft (draft.cu) ---- */

/* Its weights, cells and buffers, after the caches; nothing without one. */
MM_MUST_USE bool mm_cu_open_draft(mm_backend *b, mm_err *err);
/* mm_draft_ops. */
bool mm_cu_takes_draft(const mm_dflash *d, mm_err *err);
void mm_cu_draft_concat(mm_backend *b, mm_act y, const mm_act *x, uint32_t count);
void mm_cu_draft_store(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm);
void mm_cu_draft_attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);
void mm_cu_draft_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                         double eps);
void mm_cu_do_best(mm_backend *b); /* what best launches */
void mm_cu_draft_keep(mm_backend *b, mm_act x);
void mm_cu_draft_before(mm_backend *b, mm_act y);
void mm_cu_draft_chain(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv);
/* Copies the ids that best chose, of a chain those of all passes, to the step's memory. */
cudaError_t mm_cu_copy_best(mm_backend *b);
/* The draft's acts at `place`, for dry runs; and one of a block, or of a chain, of so many spans. */
void mm_cu_place_draft(mm_forward *f, void *place);
MM_MUST_USE bool mm_cu_dry_run_draft(mm_forward *f, uint32_t spans, mm_err *err);
/* Whether every rank has all of the matrix: the draft's own embeddings. */
inline bool mm_cu_is_whole(const mm_backend *b, const mm_packed *table) { return b->c.draft && table == &b->c.draft->embed; }
/* Where the step's logits are, and how many a row has. */
struct mm_cu_logits_place {
  float *at;
  uint32_t width;
};
inline mm_cu_logits_place mm_cu_logits_of(const mm_backend *b) {
  if (b->step.chain.passes) return {b->draft.logits, b->c.draft->c.draft_vocab};
  return {b->logits.own, b->c.weights->vocab_rows};
}

/* ---- a calibration (calibrate.cu) ---- */

/* Sums of every weight whose inputs are collected, all zero. */
MM_MUST_USE bool mm_cu_open_sums(mm_backend *b, mm_err *err);
/* Adds what linear w is given: rows x[0 … rows), those of slot -1 left out; or x[pick[0 … rows)]. */
cudaError_t mm_cu_collect_linear(mm_backend *b, const mm_packed *w, const __nv_bfloat16 *x, const uint32_t *pick, uint32_t rows);
/* Adds the inputs of experts to the sums: a.x of w13, and the rows between w13 and w2, which are computed here once more, unrounded;
 * a.y, a.middle and a.pair_out are written. T > 1. */
cudaError_t mm_cu_collect_experts(mm_backend *b, const mm_packed *w13, const mm_packed *w2, const mm_cu_experts &a);
/* mm_ops.calibrate. */
bool mm_cu_calibrate(mm_backend *b, mm_err *err);

/* ---- a rank of several, --tp (ranks.cu): rows that are sums over ranks, or whose mean square is ---- */

/* b->peers and room for mean squares, of a rank of several; nothing otherwise. Collective. */
MM_MUST_USE bool mm_cu_open_ranks(mm_backend *b, mm_err *err);
/* Collective, before a rank's kernels first wait for another's: gives ranks on one device streams whose kernels run at the same time
 * (mm_cu_peers_try_streams). MM_UNSUPPORTED E_DEVICE where 64 streams are not enough; the next step then tries as many others. */
MM_MUST_USE bool mm_cu_separate_streams(mm_backend *b, mm_err *err);
/* At a step's begin: after a failure all ranks go on from here. */
MM_MUST_USE bool mm_cu_begin_ranks(mm_backend *b, mm_err *err);

/* All of these do nothing, or what one rank does, without b->group. */

/* x[rows, width] becomes its sum over ranks. */
cudaError_t mm_cu_sum_ranks(mm_backend *b, __nv_bfloat16 *x, uint32_t width);
/* mm_cu_combine_rows of a branch that is summed over ranks, in one kernel and with the bits of two. For few rows, and
 * for many rows over two ranks; for others, for ranks in several processes and without ranks the first returns false. */
bool mm_cu_combines_ranks(const mm_cu_peers *p, uint32_t rows, uint32_t width);
/* sent: the launch before has sent all of a.branch where mm_cu_push_rows said. */
cudaError_t mm_cu_combine_ranks(const mm_cu_peers *p, const mm_cu_combine &a, uint32_t rows, uint32_t width, bool sent, cudaStream_t s);
/* mm_cu_combine_ranks for many rows over two ranks (ranks_prefill.cu). */
cudaError_t mm_cu_combine_many(const mm_cu_peers *p, const mm_cu_combine &a, uint32_t rows, uint32_t width, bool sent, cudaStream_t s);
/* Where a branch of many rows may go as it is made, with nothing exchanged before its combine; nowhere for others. */
mm_cu_push mm_cu_push_rows(const mm_cu_peers *p, uint32_t rows, uint32_t width);
/* The combine of a single token and the routing of a.n, as mm_cu_combine_route gives them, in one kernel (router.cu), for ranks on
 * distinct devices. */
cudaError_t mm_cu_combine_route_ranks(const mm_cu_peers *p, const mm_cu_combine &a, const mm_cu_router &m, const mm_cu_route &r,
                                      cudaStream_t s);
/* Whether attention of the step's single tokens takes QK norm's sums from the other ranks itself (mm_cu_qkv.ranks); only with b->group. */
bool mm_cu_qk_norm_inside(const mm_backend *b);
/* Else: q and k of each row of qkv become their RMS norms over all ranks' heads, rounded to bf16; only with b->group. */
cudaError_t mm_cu_qk_norm_ranks(mm_backend *b, __nv_bfloat16 *qkv, const float *q_norm, const float *k_norm, float eps);
/* mm_cu_gated_norm with the mean square over all ranks' heads; only with b->group. y may be o. */
cudaError_t mm_cu_gated_norm_ranks(mm_backend *b, const mm_cu_gated &a);

/* ---- groups of attention, --attn-tp (groups.cu); all of these do nothing where there is one group ---- */

/* How many there are, and room in limits for the padding of groups without rows. */
void mm_cu_open_groups(mm_backend *b);
/* Rows of a step that padding of groups takes at most. */
uint32_t mm_cu_group_padding(const mm_backend *b);
/* Once the batch is classified: the kind of the step and every group's rows, of which this rank's are the step's. */
void mm_cu_plan_groups(mm_backend *b);
/* The slots of all groups' rows, to h->all_slot. */
void mm_cu_fill_groups(const mm_backend *b, const batch_arrays *h);
/* Ops run the rank's own group's rows again, wherever they were. */
void mm_cu_leave_groups(mm_backend *b);
/* True if the residual and norm of the group's rows may go in one kernel with their scatter, or with a gather where groups are of one rank;
 * as mm_cu_combine_rows with what mm_cu_peers_scatter_rows gives a.branch, which is the rows of all groups here, or before
 * mm_cu_peers_gather_rows of a.n (ranks_groups.cu). */
bool mm_cu_combines_groups(const mm_cu_peers *p, const mm_cu_group_rows &g);
cudaError_t mm_cu_combine_scatter(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_combine &a, cudaStream_t s);
cudaError_t mm_cu_combine_gather(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_combine &a, __nv_bfloat16 *all,
                                 cudaStream_t s);
/* Codes of the rows of all groups, each under scales of 128 columns, from `mine`, the group's rows: as mm_cu_encode makes them. r.id and
 * r.weight hold the choices of the group's rows in their place among all, as indices of all experts, and become those of all rows, as
 * mm_cu_route says; they count as load. to: of all rows and g.width columns, a multiple of 128 (moe/gather_codes.cu). */
cudaError_t mm_cu_peers_gather_codes(const mm_cu_peers *p, const mm_cu_group_rows &g, const mm_cu_codes &to, const mm_cu_route &r,
                                     const __nv_bfloat16 *mine, cudaStream_t s);
/* Bytes that it sends of a row. */
uint32_t mm_cu_code_row_bytes(uint32_t width, uint32_t top_k);
/* Launches a scatter that no combine does along. */
void mm_cu_finish_scatter(mm_backend *b);
/* Ops run the rows of all groups from here on. */
void mm_cu_enter_groups(mm_backend *b);
/* From which numbers of rows on codes are sent (routed_rows.cu); collective, once weights are planned and peers open. */
MM_MUST_USE bool mm_cu_open_codes(mm_backend *b, mm_err *err);
/* mm_ops.route. */
void mm_cu_route_rows(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias);
/* mm_rank_ops. */
void mm_cu_gather_routed(mm_backend *b, uint32_t layer, mm_act to, mm_act from, const mm_group_rows *rows, const mm_packed *router,
                         const mm_packed *bias);
mm_row_exchange mm_cu_exchange(const mm_backend *b);
void mm_cu_plan(mm_backend *b, const mm_group_rows *rows);
void mm_cu_gather(mm_backend *b, mm_act to, mm_act from, const mm_group_rows *rows);
void mm_cu_scatter(mm_backend *b, mm_act to, mm_act from);

/* ---- weights that arrive (arrivals.cu) ---- */

/* Steps before all weights are there wait for them on the way, and are not recorded: on every rank, as long as one has to. A step of
 * padding alone is one that is to be recorded, and waits for all. batch NULL: one that is not. */
MM_MUST_USE bool mm_cu_look_at_load(mm_backend *b, const mm_batch *batch, mm_err *err);
/* Work queued on the stream from here on finds the group loaded; else b->err, or b->lost where another rank has failed. */
void mm_cu_wait_for_weights(mm_backend *b, uint32_t group);
/* The same for the experts selected by the step's rows. The host waits for the router to know them. */
void mm_cu_wait_for_experts(mm_backend *b);
/* mm_ops.weights.finish_load. */
bool mm_cu_finish_load(mm_backend *b, mm_err *err);
/* At the end of a step, before any wait: false unless all ranks are there. A rank that has failed reports it to the others. */
MM_MUST_USE bool mm_cu_come_to_end(mm_backend *b, mm_err *err);
/* A step that ran while weights arrived gives no result before those that it waited for have been found good. */
inline bool mm_cu_loaded(mm_backend *b, mm_err *err) { return !b->loading || b->dry_runs || b->loading->is_sound(err); }

/* ---- mm_ops' of slots (slots.cu) ---- */

uint64_t mm_cu_state_bytes(mm_backend *b);
bool mm_cu_state_copy(mm_backend *b, uint32_t to, uint32_t from, mm_err *err);
bool mm_cu_state_save(mm_backend *b, uint32_t slot, void *state, mm_err *err);
bool mm_cu_state_load(mm_backend *b, uint32_t slot, const void *state, mm_err *err);
bool mm_cu_ids_load(mm_backend *b, uint32_t slot, const int32_t *id, uint32_t count, mm_err *err);
/* The index of each expert of placed layers (mm_expert_order), on the device. */
MM_MUST_USE bool mm_cu_open_placement(mm_backend *b, mm_err *err);
/* mm_ops.read and expert_load. */
bool mm_cu_read_rows(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err);
bool mm_cu_expert_load(mm_backend *b, uint64_t *load, mm_err *err);

/* ---- mm_ops' of pages in host memory (moves.cu) ---- */

uint64_t mm_cu_page_bytes(mm_backend *b);
char *mm_cu_pool(mm_backend *b, uint32_t places, char *memory, mm_err *err);
void mm_cu_pool_close(mm_backend *b);
bool mm_cu_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err);
bool mm_cu_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err);

/* ---- a pipeline stage, --pp (stages.cu): rows go through the host ---- */

/* b->border, where this is not the only stage. Its steps are not recorded. */
MM_MUST_USE bool mm_cu_open_stage(mm_backend *b, mm_err *err);
/* The step's rows x[tokens, width] to the same rank of the next stage, once they are there; or from the one before, zeros behind them. Both
 * wait. False without an error of its own where another rank failed (mm_comm_abort). */
MM_MUST_USE bool mm_cu_send_rows(mm_backend *b, const __nv_bfloat16 *x, uint32_t width, mm_err *err);
MM_MUST_USE bool mm_cu_receive_rows(mm_backend *b, __nv_bfloat16 *x, uint32_t width, mm_err *err);
/* A norm for rows that nobody reads normed: the last of a stage that is not the last one. */
inline const mm_packed *mm_cu_any_norm(const mm_backend *b) { return &b->c.weights->layer[b->c.weights->layer_first].post_norm; }

#endif
