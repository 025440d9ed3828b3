/* The backend seam: what the forward pass (forward.c, written once) asks of a device. Ops are cut at the fusion points, take no
 * decision on computed values, and neither wait nor allocate, so that the same calls can be captured as a CUDA graph. A backend
 * instance belongs to one tensor-parallel rank; ops that sum over ranks are collective: every rank makes the same calls.
 *
 * Where a stage has groups of ranks with all of attention each (mm_rank_weights.attn_tp), a step's rows are those of the rank's group, and
 * "all ranks" are the group's, but from gather to scatter.
 *
 * Notation: T = rows (tokens) of the step, H = hidden, hpr = heads/attn_tp, kpr = max(1, kv_heads/attn_tp), d = head_dim. */
#ifndef MM_RUNTIME_OPS_H
#define MM_RUNTIME_OPS_H

#include "formats/model.h"
#include "loader/bind.h"
#include "loader/dflash.h"
#include "loader/stream/read_log.h"
#include "runtime/engine/comm.h"
#include "runtime/engine/hold.h"
#include "runtime/engine/pages.h"
#include "runtime/engine/sample.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Consecutive rows [first, first + count) of a step belong to one sequence, whose caches in `slot` hold `pos` tokens already.
 * pos 0 starts from empty caches whatever the slot held. slot -1: a padding row; nothing is read or written for it. */
typedef struct mm_span {
  int32_t slot;
  uint32_t first, count;
  uint32_t pos;
} mm_span;

/* Where the KV caches of the slots lie. begin alone reads it, and does the copies before the step's first op, in every layer. */
typedef struct mm_paging {
  const uint32_t *table; /* [slots, per_slot]: the page of tokens [i·MM_PAGE, (i + 1)·MM_PAGE) of a slot */
  uint32_t per_slot;
  uint32_t copies;
  const mm_page_copy *copy; /* [copies] */
  uint32_t first;           /* number of the rank's first page in table and copy: that of its group (mm_group_rows) */
} mm_paging;

#define MM_ID_SAMPLED (-1) /* as an id: the token sampled after the last row of its slot */

typedef struct mm_batch {
  uint32_t tokens;   /* T ≤ limits.max_tokens */
  const int32_t *id; /* [T], each in [0, vocab) or MM_ID_SAMPLED */
  uint32_t span_count;
  const mm_span *span; /* cover the rows 0 … T-1 in order */
  uint32_t out_count;  /* rows whose logits are wanted */
  const uint32_t *out; /* [out_count], ascending */
  /* [out_count]: how to sample the token after each output row (the random number is that of the token's position), or NULL: no sampling */
  const mm_sampling *sampling;
  /* Set by the engine for backends that read it (mm_ops.cache). NULL: page i of slot s is number s·ceil(max_positions/MM_PAGE) + i. */
  const mm_paging *paging;
} mm_batch;

/* A step where a stage has several groups of ranks with all of attention each (mm_rank_weights.attn_tp). A group's ranks run attention,
 * embedding and head for its own slots' rows; experts and MLPs run the rows of all groups on every rank. */
typedef struct mm_group_rows {
  mm_batch all;          /* the rows of all groups, one group after another */
  const uint32_t *first; /* [groups + 1]: where those of each begin */
} mm_group_rows;

/* Queued steps whose tokens are not collected yet, at most. */
#define MM_QUEUE 4

typedef struct mm_limits {
  uint32_t max_tokens;    /* rows of one step */
  uint32_t slots;         /* sequences with caches */
  uint32_t max_positions; /* tokens of one sequence */
  uint32_t pages;         /* of the KV caches, for all slots together; 0: as many as all slots can fill */
} mm_limits;

/* Pages that the limits allow: limits.pages, or enough for every slot at its longest; MM_USAGE E_LIMITS when those are 2^31 or more. */
MM_MUST_USE bool mm_limits_pages(const mm_limits *l, uint32_t *pages, mm_err *err);

typedef struct mm_backend mm_backend;

/* An activation matrix [max_tokens, width], rows 0 … T-1 in use; storage and number type are the backend's. */
typedef struct mm_act {
  void *data;
  uint32_t width;
} mm_act;

struct mm_calibration;

/* Where a rank runs. */
typedef struct mm_rank_place {
  uint32_t rank;         /* global: stage · tp + tensor-parallel rank (weights->rank) */
  uint32_t local, ranks; /* its number among the ranks of this process, and how many those are */
  uint32_t device;       /* number of its accelerator on this machine */
  bool shared;           /* some two ranks of this process, of whatever stages, have one accelerator (mm_devices_shared) */
} mm_rank_place;

/* How a run computes, the same in every rank; engine, backends and further processes take it whole. */
typedef struct mm_run_options {
  unsigned threads;     /* CPU threads per rank, ≥ 1; no other rank needs as many */
  bool act_quant;       /* the inputs of linears are rounded as their schemes say (mm_scheme.act); else weights alone are quantised */
  bool eager;           /* never replay a recorded step: for debuggers, and to look between ops */
  bool kv_fp8;          /* caches of full attention in e4m3, a scale for each token and head; MM_UNSUPPORTED where there are none */
  bool kv_bf16;         /* caches of full attention in bf16, where f32 is the backend's own type; MM_UNSUPPORTED where there are none */
  bool index_fp8;       /* index keys of sparse layers in e4m3, a scale for each key (mm_cache_ops.index_fp8) */
  uint32_t index_split; /* for rows at positions from this on, each rank of the group scans a part of the index keys, and they exchange
                         * candidates; the blocks are the same; 0: each scans all. Backends may take few rows so, of one process */
  bool input_bf16;      /* inputs of linears but the router and the head are rounded to bf16, where f32 is the backend's own type and the
                         * scheme does not round them otherwise */
  bool pin;             /* each thread stays on a CPU of its own: those of this process in the order of ranks (mm_ops.pins) */
  bool batch_invariant; /* a row's bits must not depend on the other rows of the step; for backends with batch_invariant_on_request */
} mm_run_options;

typedef struct mm_backend_config {
  const mm_model *model;
  const mm_rank_weights *weights;
  mm_limits limits; /* slots and pages of the rank's group */
  mm_comm *comm;    /* the ranks of the stage */
  mm_comm *group;   /* those of the rank's group (mm_rank_weights.attn_tp); NULL: comm */
  mm_rank_place place;
  mm_run_options options;
  struct mm_calibration *calibration; /* NULL, or what the inputs of linears are added to (calibration.h) */
  const bool *never;                  /* [vocab]: ids that are never sampled */
  const mm_dflash *draft;             /* NULL, or the draft whose cells are stored next to the pages' (draft_forward.h); until close */
  const uint32_t *tap;                /* [taps] layers whose output the forward pass copies (mm_forward); need not outlive open */
  uint32_t taps;                      /* ≤ MM_TAPS */
  const mm_shards *verify;            /* digests to check the weights' files against as they are read (mm_ops.weights), or NULL */
  mm_read_log *log;                   /* what is read to load them goes there, or NULL */
  mm_digest checkpoint;               /* mm_pack.text_digest, where weights are held or attached to */
  const char *attach;                 /* the socket of who holds the weights (mm_ops.weights), so that none are read; or NULL */
} mm_backend_config;

#define MM_TAPS 8

/* The memory that a rank will use. */
typedef struct mm_memory_facts {
  uint64_t total, free; /* bytes */
  mm_digest device;     /* the same for ranks that share it, in whichever process */
} mm_memory_facts;

/* Sampling on the device. All NULL in a backend that leaves sampling to the engine: its batches then have neither sampling nor
 * MM_ID_SAMPLED. */
typedef struct mm_sampler_ops {
  /* In place of end: samples a token for each output row from the logits of all ranks, the same one on each, stores it for its slot, and
   * returns without waiting. */
  bool (*sample)(mm_backend *b, mm_err *err);
  /* `sample` in two calls, or both NULL: defer ends the step and leaves its logits on the device until the next begin; sample_deferred
   * samples from them, sampling[count], for all rows or for none. If it fails, nothing is queued. */
  bool (*defer)(mm_backend *b, mm_err *err);
  bool (*sample_deferred)(mm_backend *b, const mm_sampling *sampling, uint32_t count, mm_err *err);
  /* Waits for the oldest step so ended; id[out_count] of it, -1 where no logit was a number; NULL: the ids are not wanted
   * here, but by another rank. Any failure since its begin. */
  bool (*collect)(mm_backend *b, int32_t *id, mm_err *err);
  /* Sets the ids of the slot's tokens to id[count], for penalties; NULL: unknown ids. */
  bool (*load_ids)(mm_backend *b, uint32_t slot, const int32_t *id, uint32_t count, mm_err *err);
  /* Scores the rows of defer instead of sampling them: score[out_count] = -ln of the probability of id target[out_count], in f64; ids that
   * are never sampled have none. Waits. May be NULL. */
  bool (*score)(mm_backend *b, const int32_t *target, double *score, mm_err *err);
  uint32_t samples; /* MM_SAMPLES_…: options that `sample` supports besides temperature, top_p, top_k and seed */
} mm_sampler_ops;

/* Slots that share pages and states. */
typedef struct mm_cache_ops {
  bool pages;     /* reads mm_batch.paging. Otherwise every slot has pages of its own, and nothing is shared */
  bool index_fp8; /* keeps index keys as mm_run_options.index_fp8 asks */
  /* Lightning states of one slot, all layers of this rank together: bytes of them, the same for every slot, 0 without such layers. They are
   * those after the last step; copies, saves and loads take their place in the order of steps. Host memory; save waits. A backend that
   * samples also stores there the ids that the slot holds, and the one sampled last. All NULL where nothing is shared. */
  uint64_t (*bytes)(mm_backend *b);
  bool (*copy)(mm_backend *b, uint32_t to, uint32_t from, mm_err *err);
  bool (*save)(mm_backend *b, uint32_t slot, void *state, mm_err *err);
  bool (*load)(mm_backend *b, uint32_t slot, const void *state, mm_err *err);
  /* Pages in host memory; all NULL in a backend that moves none. Bytes of a page with all that this rank stores in it: keys, values, their
   * scales, index keys, cells of a draft. */
  uint64_t (*page_bytes)(mm_backend *b);
  /* Room for so many pages in host memory, once, before the first move: place p begins p · page_bytes behind what it returns. memory: NULL,
   * or what another rank's call returned, with as many bytes of a page, which this one uses too; that rank frees it at close, after the
   * moves of both. Moves of several ranks do not wait for one another. */
  char *(*pool)(mm_backend *b, uint32_t places, char *memory, mm_err *err);
  /* Copies move[count] in this order, after the steps and moves so far, without waiting. No step reads or writes their pages until `moved`
   * says that they have ended. Numbers rise. */
  bool (*move)(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err);
  /* *oldest: number of the first move that has not ended, UINT64_MAX when all have. wait: until all have. */
  bool (*moved)(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err);
} mm_cache_ops;

/* Weights that arrive while steps run, or stay on the device for other processes; each may be NULL. */
typedef struct mm_weights_ops {
  bool loads; /* reads the weights' files itself, past their mappings: checks mm_backend_config.verify, fills its log */
  /* Called before the ops of layer l: a backend whose weights are still arriving waits here, in its own order, for that layer's, and in
   * experts for those of the routed experts. The calls may wait too, until they know what to wait for. A load that fails ends the
   * step with its error, and every later one; a step that was done before needed nothing of what failed. */
  void (*layer)(mm_backend *b, uint32_t l);
  /* Waits until all weights are there and found good, as a load that goes on after open. */
  bool (*finish_load)(mm_backend *b, mm_err *err);
  /* Weights that stay on the device for other processes: loads a rank's as open would, of which it reads model, weights, place, verify, log
   * and checkpoint, and waits until all are there and found good. *held says where an open with `attach` finds them until release. */
  bool (*hold)(const mm_backend_config *c, mm_held *held, void **memory, mm_err *err);
  void (*release)(void *memory);
} mm_weights_ops;

/* How a step of the draft ends, and which one of a chain it is. */
typedef struct mm_draft_step {
  bool best;             /* by mm_draft_ops.best */
  uint32_t pass, passes; /* of an EAGLE-3 draft's chain: from 0 to below `passes`; else 0 of 0 */
} mm_draft_step;

/* A draft next to the target (mm_backend_config.draft; d = its head_dim). Every rank has all of it, but for the embedding and the head,
 * which are the target's where the draft has none of its own. */
typedef struct mm_draft_ops {
  /* y[T, Σ width] = the columns of x[0], x[1], … */
  void (*concat)(mm_backend *b, mm_act y, const mm_act *x, uint32_t count);
  /* kv[T, 2·kv_heads·d], clobbered: keys and values of the step's rows, into the draft's cells of their positions: k after the norm of
   * each head and RoPE over all of d. Layer 0 comes first in a step. Of EAGLE-3: without a norm; nobody reads
   * those of position 0. */
  void (*store)(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm);
  /* Attention of the rows of each span over the cells before its pos and over one another. qkv is clobbered; o[T, heads·d]. */
  void (*attend)(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);
  /* mm_ops.combine of a branch that every rank has whole: nothing is summed over ranks. */
  void (*combine)(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps);
  /* In place of begin, for a block of the draft: spans of as many rows each, ids in [0, vocab); or for a pass of a chain: spans of one row,
   * all of them outputs, ids in [0, vocab) or, where the pass before ended by best, MM_ID_SAMPLED: what that gave the slot. NULL: begin
   * does. */
  bool (*begin)(mm_backend *b, const mm_batch *batch, mm_draft_step step, mm_err *err);
  /* In place of end: id[out_count], of each output row the target's id with the largest logit that may be chosen, or drawn as
   * batch->sampling says, by the number of the position that the id is for; -1 where no logit was a number. Only the last pass
   * of a chain waits and gives ids: those of all its passes, id[passes, out_count]. The ids chosen for slots stay as they are. id NULL:
   * another rank alone wants them. best NULL: the engine looks through the logits. */
  bool (*best)(mm_backend *b, int32_t *id, mm_err *err);
  uint32_t cell_bytes; /* of a number in a cell */
  /* Of EAGLE-3. A cell has H numbers more, besides the keys and values. */
  /* x[T, H], into the cells of the rows' positions. */
  void (*keep)(mm_backend *b, mm_act x);
  /* y[T, H] = of each row what keep put into the cell of the position before; zeros at position 0. */
  void (*before)(mm_backend *b, mm_act y);
  /* Attention of pass `pass` of a chain, of which each span has one row, `pass` positions behind the chain's first: over the cells of
   * positions from 1 to before the first, and the rows of its slot of the passes so far. qkv is clobbered; o[T, heads·d]. */
  void (*chain)(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv);
  /* Whether there are kernels for it: MM_UNSUPPORTED E_DRAFT, E_SCHEME. NULL: for every one. */
  bool (*takes)(const mm_dflash *d, mm_err *err);
} mm_draft_ops;

/* Linears of one x: y[i][T, n] = x·W[i]ᵀ. */
typedef struct mm_three {
  mm_act y[3];
  const mm_packed *w[3];
} mm_three;

/* Several ops as one, with fewer launches. NULL: one after the other (mm_linear_two, mm_linear_three, mm_experts_shared). */
typedef struct mm_joined_ops {
  /* Two linears of one x. */
  void (*linear_two)(mm_backend *b, mm_act y, const mm_packed *w, mm_act z, const mm_packed *v, mm_act x);
  /* Three: of a sparse layer's attention, then of its index branch. */
  void (*linear_three)(mm_backend *b, mm_three of, mm_act x);
  /* experts, then mlp of the shared expert on top. */
  void (*experts_shared)(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2, const mm_packed *up,
                         const mm_packed *down);
} mm_joined_ops;

/* How mm_rank_ops.gather_routed sends rows. */
typedef struct mm_row_exchange {
  mm_act_quant codes; /* rounded so, as experts round them; MM_ACT_KEPT: as gather sends them, and the rest is 0 */
  uint32_t row_bytes; /* of a row with its selected experts and their weights */
  uint32_t from;      /* rows of all groups from which on decode steps take it */
} mm_row_exchange;

/* Rows that go from rank to rank. */
typedef struct mm_rank_ops {
  /* The rows of x to the next pipeline stage, and from the one before; both NULL in a backend without stages. */
  void (*send)(mm_backend *b, mm_act x);
  void (*receive)(mm_backend *b, mm_act x);
  /* Both NULL in a backend that runs one group of attention alone. Between the two calls ops run the rows of all groups, on all ranks of
   * the stage. gather: to[T of all, H] = the rows of each group. scatter: to[T, H] = this group's rows of Σ_ranks from[T of all, H], in
   * rank order. to and from are distinct; `from` is clobbered by scatter. */
  void (*gather)(mm_backend *b, mm_act to, mm_act from, const mm_group_rows *rows);
  void (*scatter)(mm_backend *b, mm_act to, mm_act from);
  /* gather, and route of layer `layer`, whose experts alone read the rows: each group routes its own, and they may come as codes. to is for
   * that layer's experts then, and holds no rows. Experts give the bits that they give after gather and route. NULL: those two. */
  void (*gather_routed)(mm_backend *b, uint32_t layer, mm_act to, mm_act from, const mm_group_rows *rows, const mm_packed *router,
                        const mm_packed *bias);
  mm_row_exchange (*exchange)(const mm_backend *b); /* of an open backend; NULL where gather_routed is */
  /* Before each begin, where there are several groups: the rows that gather is given, which stay valid until end. NULL: not called. */
  void (*plan)(mm_backend *b, const mm_group_rows *rows);
} mm_rank_ops;

typedef struct mm_ops {
  const char *name; /* the --device word */
  mm_backend *(*open)(const mm_backend_config *c, mm_err *err);
  void (*close)(mm_backend *b);                                         /* accepts NULL */
  bool (*act)(mm_backend *b, uint32_t width, mm_act *out, mm_err *err); /* freed by close */

  /* Starts a step: the batch stays valid until end. */
  bool (*begin)(mm_backend *b, const mm_batch *batch, mm_err *err);
  /* Embedding rows of the batch's ids, summed over ranks: x[T, H]. */
  void (*embed)(mm_backend *b, mm_act x, const mm_packed *table);
  /* y = RMS(x; w, eps): x·rsqrt(mean(x²) + eps)·w, in every op (1 + w) for w under the model's norm_offset. */
  void (*norm)(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps);
  /* y[T, n] = x[T, k]·Wᵀ, x rounded first under act_quant: as a whole row, whatever rank holds which part of it. experts (x by w13, the
   * products by w2) and logits round in the same way. */
  void (*linear)(mm_backend *b, mm_act y, mm_act x, const mm_packed *w);
  /* Full attention of layer `layer`: optional QK norm (mean square over all ranks' heads, or of each head), partial RoPE, KV write, causal
   * softmax; in a sparse layer over the blocks that the select before it selected.
   * qkv[T, (hpr + 2·kpr)·d] is clobbered; o[T, hpr·d]. q_norm and k_norm are NULL without QK norm. */
  void (*gqa)(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);
  /* Lightning attention: SiLU on qkv[T, hpr·3·d] (per head q, k, v), state update, o[T, hpr·d]. qkv is clobbered. */
  void (*lightning)(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv);
  /* y = sigmoid(gate) · RMS(o; w, eps), the mean square over all ranks' heads: y, o, gate [T, hpr·d]. y may be o. */
  void (*gated_norm)(mm_backend *b, mm_act y, mm_act o, mm_act gate, const mm_packed *w, double eps);
  /* Selects top_k experts and their weights for each row of x[T, H]; the backend stores both until the next route. bias may be NULL.
   * Experts of rows that are not padding count as load of the layer's experts. */
  void (*route)(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias);
  /* y = Σ weight · w2(act(w1 x, w3 x)) over the routed experts, times routed_scale: this rank's partial sum. */
  void (*experts)(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2);
  /* h = alpha·residual + beta·Σ_ranks branch (in rank order, identical on all ranks), then n = RMS(h; w, eps). All four are distinct
   * buffers; branch is clobbered. w NULL: n is not wanted. A backend may put it off until the next op, unless `eager`. */
  void (*combine)(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps);
  /* to = from, rows 0 … T-1. */
  void (*copy)(mm_backend *b, mm_act to, mm_act from);
  /* This rank's logits of the batch's `out` rows, fp32: x·headᵀ, x as it is under act_quant too. */
  void (*logits)(mm_backend *b, mm_act x, const mm_packed *head);
  /* Ends the step; any failure since begin is reported here. Copies this rank's logits to out[out_count, vocab_rows] (host);
   * out may be NULL when out_count is 0. */
  bool (*end)(mm_backend *b, float *out, mm_err *err);

  /* Rows [0, rows) of an act as f32, out[rows, width] (host): what the last step left there, which is waited for. */
  bool (*read)(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err);
  /* load[layers, experts] (host): how many rows were routed to each expert since open, by the steps so far, which are waited for. */
  bool (*expert_load)(mm_backend *b, uint64_t *load, mm_err *err);

  /* Bytes read plus written a second by a copy within the device's memory, measured now; NULL where steps do not live there. */
  bool (*copy_rate)(double *rate, mm_err *err);

  bool act_quant; /* can round inputs */
  mm_sampler_ops sampler;
  mm_cache_ops cache;
  mm_weights_ops weights;

  /* The rest may be NULL, 0 or false. */
  /* Both NULL in a backend that runs no extended models (mm_model_extended), which are refused before it is opened.
   * The index branch of a sparse layer, before its gqa: norm of each head, partial RoPE, the write of the key next to K and V, and for each
   * row and index head the blocks to read: its own and those before it (index_local), then those whose largest q·k over positions up to the
   * row's is highest, the lower block first, until there are index_top_k or no more. Kept inside the backend until the next select. q[T,
   * ipr·index_dim] and k[T, index_dim] are clobbered; ipr = max(1, index_heads/attn_tp). */
  void (*select)(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm);
  /* y = w2(act(w1 x, w3 x)) of a dense MLP, or with `add` y += that: this rank's partial sum. */
  void (*mlp)(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add);
  mm_joined_ops joined;
  mm_draft_ops draft; /* all NULL in a backend that runs no drafts */
  bool pins;          /* as mm_run_options.pin asks */
  bool calibration;   /* adds to mm_backend_config.calibration: at each product, or, where calibrate is not NULL, when that is called */
  bool (*calibrate)(mm_backend *b, mm_err *err); /* adds what came together since the last call; between steps. NULL: at each product */
  mm_rank_ops ranks;
  bool experts_cut;                /* runs shards that hold some of the experts (--ep) */
  bool across;                     /* ranks of a stage may be of several processes */
  bool batch_invariant;            /* a row's bits depend on the tokens before it alone: not on cuts, other rows or slots */
  bool batch_invariant_on_request; /* batch_invariant holds if mm_run_options.batch_invariant is set; steps take longer then */
  /* The memory of the device that an open with this config uses, before that takes any or reads a weight. It reads model, weights and place
   * of the config. NULL: caches are as large as the limits say. */
  bool (*memory)(const mm_backend_config *c, mm_memory_facts *out, mm_err *err);
  bool own_memory; /* weights and buffers lie in that memory too; else the page cache has the weights */
  /* Words for the code that runs on the device that was opened first: which kernels, built for what; "" before an open. NULL: nothing to
   * say. */
  const char *(*kernels)(void);
} mm_ops;

static inline void mm_linear_two(const mm_ops *ops, mm_backend *b, mm_act y, const mm_packed *w, mm_act z, const mm_packed *v, mm_act x) {
  if (ops->joined.linear_two) {
    ops->joined.linear_two(b, y, w, z, v, x);
  } else {
    ops->linear(b, y, x, w), ops->linear(b, z, x, v);
  }
}

static inline void mm_linear_three(const mm_ops *ops, mm_backend *b, mm_three of, mm_act x) {
  if (ops->joined.linear_three) {
    ops->joined.linear_three(b, of, x);
  } else {
    ops->linear(b, of.y[0], x, of.w[0]), mm_linear_two(ops, b, of.y[1], of.w[1], of.y[2], of.w[2], x);
  }
}

static inline void mm_experts_shared(const mm_ops *ops, mm_backend *b, mm_act y, mm_act x, const mm_layer_weights *w) {
  if (ops->joined.experts_shared) {
    ops->joined.experts_shared(b, y, x, &w->w13, &w->w2, &w->mlp_up, &w->mlp_down);
  } else {
    ops->experts(b, y, x, &w->w13, &w->w2), ops->mlp(b, y, x, &w->mlp_up, &w->mlp_down, true);
  }
}

extern const mm_ops mm_ops_cpu;
#ifdef MM_CUDA
extern const mm_ops mm_ops_cuda;
#endif
/* The backends that there are, as an option's values; the first is the default. A build without CUDA says so when it is asked. */
#define MM_DEVICES "cpu|cuda"
/* The backend of this name; MM_UNSUPPORTED E_DEVICE naming those that were built. */
const mm_ops *mm_ops_find(const char *name, mm_err *err);
/* Whether the backend has the ops of the model; MM_UNSUPPORTED E_DEVICE. Call it before the backend is opened or asked to hold weights. */
MM_MUST_USE bool mm_ops_run(const mm_ops *ops, const mm_model *m, mm_err *err);
/* MM_UNSUPPORTED E_SCHEME where index_fp8 or index_split is set and the model has no index keys, or the backend keeps none in e4m3. */
MM_MUST_USE bool mm_ops_keep_index(const mm_ops *ops, const mm_model *m, const mm_run_options *o, mm_err *err);
/* Whether it runs the groups of attention that the checkpoint has; MM_UNSUPPORTED E_PARALLEL. Called as mm_ops_run. */
MM_MUST_USE bool mm_ops_run_groups(const mm_ops *ops, const mm_pack *p, mm_err *err);

/* LIST of --devices, one number below 1024 for each rank: free(*device), NULL where list is. MM_USAGE E_USAGE, also where the backend
 * `name` is the CPU, which has none to choose from. Call it before CUDA starts: ranks that share a device set CUDA_DEVICE_MAX_CONNECTIONS,
 * unless the environment has it. */
MM_MUST_USE bool mm_devices_read(const char *name, const char *list, uint32_t ranks, uint32_t **device, mm_err *err);
/* Whether a number comes twice in device[ranks]; NULL: each rank has one of its own. */
bool mm_devices_shared(const uint32_t *device, uint32_t ranks);

/* One step of one rank (forward.c). The acts are opened once per rank. After a step tap[i][T, H] is what layer tap_layer[i] gave the next:
 * the residual stream before the next norm. A head that drafts tokens reads it there, and embeds and ends with the same ops and weights. */
/* Acts of a draft (draft_forward.h); d NULL: there is none. */
struct mm_draft_forward {
  const mm_dflash *d;
  mm_act taps, context, normed, kv, qkv, o;
  mm_act embedded, joined, tap[MM_TAPS]; /* of EAGLE-3 */
};

typedef struct mm_forward {
  const mm_ops *ops;
  mm_backend *backend;
  const mm_model *model;
  const mm_rank_weights *weights;
  mm_act h, n, spare, qkv, o, gate, branch, index_q, index_k;
  mm_act all_n, all_branch;  /* rows of all groups; data NULL where there is one */
  const mm_group_rows *rows; /* of the next step, set by the caller where there are several */
  mm_act tap[MM_TAPS];
  uint32_t tap_layer[MM_TAPS], taps;
  struct mm_draft_forward draft;
  bool deferred_sampling; /* steps without sampling end by defer; sample_deferred comes later */
} mm_forward;
MM_MUST_USE bool mm_forward_open(mm_forward *f, const mm_ops *ops, const mm_backend_config *c, mm_err *err);
void mm_forward_close(mm_forward *f);
/* With batch->sampling the step ends by sample, and logits is not used. A stage that is not the last has no outputs. */
MM_MUST_USE bool mm_forward_step(mm_forward *f, const mm_batch *batch, float *logits, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
