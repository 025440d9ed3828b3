/* The CPU backend: f32 throughout, weights widened as they are read (cpu_rows.h), or sums of integers under nibbles (cpu_codes.h). Every
 * number is computed in the same order whatever the number of threads and whatever else is in the batch. */
#ifndef MM_RUNTIME_CPU_CPU_BACKEND_H
#define MM_RUNTIME_CPU_CPU_BACKEND_H

#include <stdatomic.h>

#include "formats/system/pool.h"
#include "runtime/cpu/cpu_vectors.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/ops.h"

/* Rows of a weight that one thread takes: while one token passes, a few, and many. Rows of a grid that the loops do not know are unpacked
 * MM_CPU_STRIP at a time. */
enum { MM_CPU_ALONE = 128, MM_CPU_STRIP = 16, MM_CPU_MANY = 64 };

/* Tokens of a step of which the products of all experts are kept, at most. */
enum { MM_CPU_FEW = 64 };

/* Items of an op that one thread takes in order: the next one. In a cache line of its own. */
typedef struct mm_cpu_share {
  _Alignas(64) _Atomic size_t next;
} mm_cpu_share;

/* Weights that the next op reads, for threads that wait to ask memory for (cpu_prefetch.c). */
enum { MM_CPU_PREFETCHES = 4 };
typedef struct mm_cpu_prefetch {
  _Atomic(const uint8_t *) from[MM_CPU_PREFETCHES];
  _Atomic size_t bytes; /* of each */
  _Atomic unsigned count;
  _Atomic size_t next; /* piece to be asked for */
} mm_cpu_prefetch;

/* Cache of one layer, for every slot. */
typedef struct mm_cpu_cache {
  uint32_t state; /* lightning: its place among the states of a slot */
  char *k, *v;    /* full and sparse: [pages, kv_heads, MM_PAGE, d], k after norm and RoPE; f32 or bf16 */
  /* sparse: [pages, MM_PAGE] index keys after norm and RoPE, index_dim numbers each: f32 whatever k and v are, or an f32 scale and then
   * e4m3 (mm_run_options.index_fp8). */
  char *index;
} mm_cpu_cache;

/* Memory that is mapped, and touched as it is used. */
typedef struct mm_cpu_mapped {
  size_t kv_bytes, index_bytes; /* of each k and v, and of each index */
  size_t index_key;             /* bytes of one index key */
  char *pool;                   /* [places, page_bytes] pages in host memory (cpu_moves.c), or NULL */
  size_t pool_bytes;            /* 0: another rank has mapped it */
} mm_cpu_mapped;

/* Cells of a draft, for every page. */
typedef struct mm_cpu_draft {
  uint32_t pages;
  float *k[MM_DFLASH_LAYERS], *v[MM_DFLASH_LAYERS]; /* [pages, kv_heads, MM_PAGE, d] */
  float *turn;                                      /* [max_tokens, d]: cosines, then sines, of the step's rows */
  float *hidden;                                    /* of EAGLE-3: [pages, MM_PAGE, H] */
  float *chain;                                     /* and [slots, MM_EAGLE_CHAIN, 2, kv_heads, d]: keys and values of a chain's rows */
  float *score;                                     /* [threads, score_floats] */
  size_t score_floats;
} mm_cpu_draft;

/* The router's choice in the present layer, and its rows sorted by expert. */
typedef struct mm_cpu_moe {
  float *score;          /* [max_tokens, E] of the router */
  uint32_t *pick;        /* [max_tokens, top_k] experts */
  float *weight;         /* [max_tokens, top_k] */
  const uint32_t *index; /* [E] of the present layer: the index of each expert in the stacks of all ranks; NULL: its id */
  uint32_t *first_pair;  /* [E + 1]: where the (row, expert) pairs of the expert at an index begin */
  uint32_t *pair_row;    /* [max_tokens·top_k] sorted by the expert's index */
  float *pair_weight;    /* [max_tokens·top_k] */
  float *pair_act;       /* [max_tokens·top_k, Ir]: act(w1 x, w3 x) */
  const float **pair_x;  /* [max_tokens·top_k]: inputs of each pair */
  uint32_t *active;      /* [E] experts of this rank that some row chose */
  float *few;            /* [MM_CPU_FEW·top_k, widest of experts]: products of few tokens with the rows of their experts */
  float *term;           /* [tp/ep, max_tokens·top_k, columns]: terms of all pairs, where experts are placed */
  size_t term_floats;
  uint64_t *load; /* [layers, E] rows that chose the expert, since open */
} mm_cpu_moe;

/* Dense MLPs and shared experts. */
typedef struct mm_cpu_mlp_buffers {
  float *up, *act; /* [max_tokens, 2·Ir], [max_tokens, Ir] */
  float *out;      /* [max_tokens, H]: what a shared expert adds */
} mm_cpu_mlp_buffers;

/* Of the scan of index keys that is split over the ranks of a group (mm_run_options.index_split). NULL without. */
typedef struct mm_cpu_candidate {
  float score;
  uint32_t block; /* UINT32_MAX: none */
} mm_cpu_candidate;
typedef struct mm_cpu_index_split {
  float *q;                    /* [ranks, max_tokens, index_heads·index_dim]: the queries of each rank */
  mm_cpu_candidate *own, *all; /* [max_tokens, heads of all ranks, index_top_k] of this rank, and [ranks] of those */
} mm_cpu_index_split;

/* Ranks that ops sum over, and this one's number among them. */
typedef struct mm_cpu_ranks {
  mm_comm *comm;
  uint32_t rank, count;
} mm_cpu_ranks;

/* Groups of attention (mm_rank_weights.attn_tp). */
typedef struct mm_cpu_groups {
  mm_cpu_ranks stage, own; /* of the stage, and of the rank's group in it */
  const mm_batch *batch;   /* the rows of its group in this step, */
  uint32_t first;          /* and where they lie among those of all */
  float *packed;           /* [max_tokens, of a row as codes]: the group's rows on their way (cpu_groups.c); NULL: they go as they are */
  const void *rounded;     /* rows that came as codes: b->rounded and b->amax hold what mm_cpu_round makes of them; NULL: none */
  mm_cpu_index_split index_split;
} mm_cpu_groups;

/* Of the step's outputs. */
typedef struct mm_cpu_outputs {
  float *row;     /* [out_count, vocab_rows], of an EAGLE-3 draft [out_count, draft_vocab] */
  uint32_t width; /* which of them */
  size_t cap;
} mm_cpu_outputs;

struct mm_backend {
  mm_backend_config c;
  mm_cpu_groups groups;
  mm_cpu_ranks ranks;          /* those of the rank's group, from gather to scatter those of the stage */
  uint32_t heads, kv_heads, d; /* on this rank */
  uint32_t index_heads;        /* the same; 0 without sparse layers */
  mm_arena arena;              /* every buffer below but the caches and logits */
  mm_cpu_cache *cache;         /* [layers] */
  mm_cpu_mapped mapped;
  uint32_t kv_size;    /* of a number: 4, or 2 for bf16 */
  uint32_t per_slot;   /* pages of a slot at its longest */
  float *state;        /* [slots, lightning layers, heads, d (key), d (value)] */
  size_t state_floats; /* of one slot */
  float *slope;        /* [layers, heads] */
  float *inv_freq;     /* [rotary_dim/2] */
  float *rope;         /* [max_tokens, rotary_dim]: cosines, then sines, of the step's rows */
  float *vector;       /* a norm weight or router bias */
  float *sums;         /* [max_tokens, 2]: sums of squares */
  mm_cpu_moe moe;
  mm_cpu_mlp_buffers mlp;
  uint32_t *block;      /* [max_tokens, index_heads, index_top_k]: blocks that the last select chose, ascending */
  uint32_t *blocks;     /* [max_tokens, index_heads]: how many */
  mm_cpu_swiglu swiglu; /* of the model */
  float *amax;          /* [max_tokens·top_k, amaxes of the widest row], or scales; this and the next under act_quant only */
  float *rounded;       /* [max_tokens, widest input] */
  const float **row;    /* [max_tokens]: inputs of the present product, as its loops read them */
  float *turned;        /* copies of inputs in another order, with zeros after them, or rounded with their pairs */
  float **scratch;      /* [threads]: sums of a strip, its rows as f32, then mm_cpu_out; attention's pages; the router's keys */
  size_t out_at;
  mm_cpu_share *share; /* [threads] */
  bool ahead;          /* weights do not fit into memory: cpu_ahead.c */
  uint32_t layer;      /* whose ops these are */
  mm_cpu_prefetch prefetch;
  const mm_cpu_vectors *vectors;
  mm_team *team;

  mm_cpu_draft draft; /* nothing without c.draft */

  const mm_batch *batch; /* the rows of ops: the group's, or those of all */
  mm_cpu_outputs logits;
  mm_err err; /* the first failure of this step */
};

/* The page that holds tokens [i·MM_PAGE, (i + 1)·MM_PAGE) of a slot in this step. */
static inline uint32_t mm_cpu_page(const mm_backend *b, uint32_t slot, uint32_t i) {
  const mm_paging *p = b->batch->paging;
  return p ? p->table[(size_t)slot * p->per_slot + i] - p->first : slot * b->per_slot + i;
}
/* Byte of a cache at which token `at` of a page lies, for one kv head. */
static inline size_t mm_cpu_cell(const mm_backend *b, uint32_t page, uint32_t kv_head, uint32_t at) {
  return (((size_t)page * b->kv_heads + kv_head) * MM_PAGE + at) * b->d * b->kv_size;
}
/* Index key of token `at` of a page. */
static inline char *mm_cpu_index_key(const mm_backend *b, const mm_cpu_cache *c, uint32_t page, uint32_t at) {
  return c->index + ((size_t)page * MM_PAGE + at) * b->mapped.index_key;
}
/* The blocks that the last select chose for row t and a kv head of this rank, and how many. */
static inline const uint32_t *mm_cpu_blocks(const mm_backend *b, uint32_t t, uint32_t kv_head, uint32_t *count) {
  const size_t i = (size_t)t * b->index_heads + kv_head * b->index_heads / b->kv_heads;
  *count = b->blocks[i];
  return b->block + i * b->c.model->index_top_k;
}
/* Lightning state of one head: [d, d]. */
static inline float *mm_cpu_state(const mm_backend *b, uint32_t layer, uint32_t slot, uint32_t head) {
  return b->state + slot * b->state_floats + ((size_t)b->cache[layer].state * b->heads + head) * b->d * b->d;
}

static inline float *mm_cpu_row(mm_act a, size_t t) { return (float *)a.data + t * a.width; }

/* fn over `count` items, on the backend's threads when there is enough to do: `work` counts multiplications. */
void mm_cpu_each(mm_backend *b, size_t count, uint64_t work, mm_pool_fn *fn, void *job);
/* The same where each thread goes through a contiguous share of the items, and helps others when its own is done. */
void mm_cpu_each_share(mm_backend *b, size_t count, uint64_t work, mm_pool_fn *fn, void *job);
/* Where the share of thread t begins. */
static inline size_t mm_cpu_share_begin(const mm_backend *b, size_t count, unsigned t) { return count * t / b->c.options.threads; }
/* Shows the calibration, if there is one, what matrix `lead` of w is given: row i is x[pick[i]], or x[i] when pick is NULL. */
void mm_cpu_observe(mm_backend *b, const mm_packed *w, uint32_t lead, const float *x, const uint32_t *pick, uint32_t rows);
/* Inputs of a linear w: x[T, w->k] itself, or a copy rounded as w's scheme says, valid until the next call (cpu_input.c). */
const float *mm_cpu_input(mm_backend *b, mm_act x, const mm_packed *w);
/* The same in place, x[rows, w->k]: codes whose scales are in b->amax, where mm_cpu_form_of says so. Collective where w is cut along k. */
void mm_cpu_round(mm_backend *b, float *x, uint32_t rows, const mm_packed *w);
/* A vector weight as f32[n], valid until the next call. */
const float *mm_cpu_vector(mm_backend *b, const mm_packed *w);
/* The same of a norm: what it multiplies with. */
const float *mm_cpu_norm_vector(mm_backend *b, const mm_packed *w);
/* Heads x[heads, n] by the RMS of each, times w[n]. */
void mm_cpu_norm_heads(float *x, uint32_t heads, uint32_t n, const float *w, double eps);
/* Half-split RoPE in the first 2·half elements of one head. */
void mm_cpu_turn_head(float *x, const float *turn, uint32_t half);
/* out[n] = act(gate[n], up[n]) of the model. */
static inline void mm_cpu_activate(const mm_backend *b, float *out, const float *gate, const float *up, size_t n) {
  if (b->c.model->activation == MM_ACTIVATION_SILU)
    b->vectors->silu(out, gate, up, n);
  else
    b->vectors->swiglu(out, gate, up, n, &b->swiglu);
}
/* Form of the inputs of products with a weight: numbers, pairs that BF16 holds behind them (cpu_rows.h), or integers. */
typedef enum mm_cpu_form {
  MM_FORM_F32,
  MM_FORM_LIMBS,    /* f32 as integers of three bytes, under nibbles, in spans (cpu_codes.h) */
  MM_FORM_BF16,     /* rounded to BF16, or so that BF16 holds them */
  MM_FORM_ROW,      /* codes; the product is multiplied with the row's scale */
  MM_FORM_INTEGERS, /* the same of INT8 under INT8 codes, as bytes and not as pairs */
  MM_FORM_CODES,    /* the same of small integers under nibbles, in spans (cpu_codes.h) */
  MM_FORM_GROUPS    /* codes; each chunk is multiplied with its scale */
} mm_cpu_form;
/* The form for w, of a linear or of experts, by act_quant, input_bf16 and the scheme. */
mm_cpu_form mm_cpu_form_of(const mm_backend *b, const mm_packed *w);
/* Rows 0 … rows - 1 of x[…, w.k], or x[pick[i]], as w's loops read them: copies in b->turned where the order differs, or in
 * another form, whose scales mm_cpu_round left. In row. */
void mm_cpu_ready(mm_backend *b, const float **row, const float *x, const uint32_t *pick, uint32_t rows, const mm_packed *w,
                  mm_cpu_form form);
/* Rows that one thread takes of a weight while one token passes. */
static inline uint32_t mm_cpu_alone(const mm_backend *b) { return b->c.options.threads <= 4 ? MM_CPU_ALONE : MM_CPU_STRIP; }
/* The same of one that meets so many tokens. */
static inline uint32_t mm_cpu_strip(const mm_backend *b, uint32_t tokens) {
  if (b->batch->tokens == 1) return mm_cpu_alone(b);
  return tokens < 4 * MM_CPU_TOKENS ? MM_CPU_STRIP : MM_CPU_MANY;
}
/* y[t·stride + i] = x[t] · row first + i of matrix `lead`, for i below count and t below tokens; each x[t] from mm_cpu_ready. */
typedef struct mm_cpu_part {
  const mm_packed *w;
  uint32_t lead, first, count;
  const float *const *x;
  uint32_t tokens;
  float *y;
  size_t stride;
  mm_cpu_form form;    /* as given to mm_cpu_ready */
  const uint8_t *next; /* codes that this thread reads after these, as far as it knows; NULL where it does not */
} mm_cpu_part;
void mm_cpu_strip_of(mm_backend *b, unsigned worker, const mm_cpu_part *p);
/* Room for what a worker makes of strips: two for each token of a step. */
static inline float *mm_cpu_out(const mm_backend *b, unsigned worker) { return b->scratch[worker] + b->out_at; }
/* y[rows, w.n]: row i is x[pick[i]]·Wᵀ, or x[i]·Wᵀ when pick is NULL; x[…, w.k]. */
void mm_cpu_matmul(mm_backend *b, float *y, const float *x, const uint32_t *pick, uint32_t rows, const mm_packed *w, mm_cpu_form form);

/* Asks the kernel to read matrix `lead` of w, which lies in a mapped file, and returns its bytes; nothing where w has no scheme. */
uint64_t mm_cpu_ahead(const mm_packed *w, uint32_t lead);
/* The same of the experts b->moe.active[0, active), and of what every token reads of layer l + 1: only where b->ahead. */
void mm_cpu_ahead_experts(const mm_backend *b, uint32_t active, const mm_packed *w13, const mm_packed *w2);
void mm_cpu_ahead_layer(mm_backend *b, uint32_t l);
/* The layers' weights of all ranks of the process are more than 7/8 of the memory that it may use. */
bool mm_cpu_ahead_pays(const mm_backend *b);

/* Where one token passes: what comes after matrix w of the present layer; w of the experts b->moe.active[0, active). */
void mm_cpu_prefetch_after(mm_backend *b, const mm_packed *w);
void mm_cpu_prefetch_experts(mm_backend *b, uint32_t active, const mm_packed *w);
/* Asks for one piece more, if there is one: what waiting threads do. */
bool mm_cpu_prefetch_piece(void *prefetch);

void mm_cpu_embed(mm_backend *b, mm_act x, const mm_packed *table);
void mm_cpu_norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps);
void mm_cpu_linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w);
void mm_cpu_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);
/* Scratch that mm_cpu_gqa needs of a worker. */
size_t mm_cpu_attention_floats(const mm_backend *b);
void mm_cpu_lightning(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv);
void mm_cpu_gated_norm(mm_backend *b, mm_act y, mm_act o, mm_act gate, const mm_packed *w, double eps);
/* The experts of a row: pick[top_k], the best first and of equals the lower id, and weight[top_k], which add up to routed_scale or 1.
 * z[E]: the router's products, which become sigmoids where the router has them. bias[E] or NULL; key[E] is scratch. */
void mm_cpu_choose(const mm_model *m, float *z, const float *bias, uint32_t *pick, float *weight, float *key);
/* mm_cpu_route in two: the experts and weights of each row of x; then the lists that the experts read, and the layer's load. */
void mm_cpu_choose_rows(mm_backend *b, mm_act x, const mm_packed *router, const mm_packed *bias);
void mm_cpu_take_choices(mm_backend *b, uint32_t layer);
void mm_cpu_route(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias);
void mm_cpu_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2);
void mm_cpu_select(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm);
void mm_cpu_mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add);
/* Zeroed memory, which the system provides page by page as it is written; munmap frees it. */
void *mm_cpu_map(size_t bytes, mm_err *err);
/* ---- cpu_groups.c: mm_ops.ranks' of the same names ---- */
void mm_cpu_gather(mm_backend *b, mm_act to, mm_act from, const mm_group_rows *rows);
void mm_cpu_scatter(mm_backend *b, mm_act to, mm_act from);
void mm_cpu_gather_routed(mm_backend *b, uint32_t layer, mm_act to, mm_act from, const mm_group_rows *rows, const mm_packed *router,
                          const mm_packed *bias);
mm_row_exchange mm_cpu_exchange(const mm_backend *b);
/* Floats in which a row goes as codes; 0 where rows of some layer's experts do not. */
uint32_t mm_cpu_packed_floats(const mm_backend *b);

/* ---- cpu_moves.c: mm_ops.cache's of the same names ---- */
uint64_t mm_cpu_page_bytes(mm_backend *b);
char *mm_cpu_pool(mm_backend *b, uint32_t places, char *memory, mm_err *err);
void mm_cpu_pool_close(mm_backend *b);
bool mm_cpu_move(mm_backend *b, uint64_t number, const mm_page_move *move, uint32_t count, mm_err *err);
bool mm_cpu_moved(mm_backend *b, bool wait, uint64_t *oldest, mm_err *err);

/* ---- cpu_draft.c ---- */
MM_MUST_USE bool mm_cpu_draft_open(mm_backend *b, mm_err *err);
void mm_cpu_draft_close(mm_backend *b);
void mm_cpu_draft_copy(const mm_backend *b, const mm_paging *p); /* the parts of pages that slots go on from */
void mm_cpu_concat(mm_backend *b, mm_act y, const mm_act *x, uint32_t count);
void mm_cpu_draft_store(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm);
void mm_cpu_eagle_keep(mm_backend *b, mm_act x);
void mm_cpu_eagle_before(mm_backend *b, mm_act y);
void mm_cpu_eagle_chain(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv);
void mm_cpu_draft_attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm);

void mm_cpu_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps);
void mm_cpu_combine_whole(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                          double eps);
void mm_cpu_logits(mm_backend *b, mm_act x, const mm_packed *head);

#endif
