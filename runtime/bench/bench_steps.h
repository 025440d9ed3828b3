/* Steps that minimax-bench times, on one rank of a model with random weights: whole passes, single ops of its layers, and the least that
 * they could take. */
#ifndef MM_RUNTIME_BENCH_STEPS_H
#define MM_RUNTIME_BENCH_STEPS_H

#include "runtime/bench/bench_result.h"
#include "runtime/engine/draft_forward.h"

#define MM_BENCH_RANKS 8 /* at most */

typedef struct mm_bench {
  const mm_bench_case *c;
  const mm_ops *ops;
  uint32_t rank, ranks; /* a thread and a GPU each; the first prints */
  uint32_t ep;          /* experts are whole on so many groups of them */
  uint32_t attn_tp;     /* attention is cut for so many: each group of them has sequences of its own (bench_groups.c) */
  unsigned threads;     /* CPU threads of a rank */
  mm_comm *comm;
  uint32_t steps;
  bool kv_fp8, index_fp8, act_quant;
  uint32_t index_split;
  mm_draft_kind kind;           /* of the draft */
  const mm_scheme *draft_quant; /* of its matrices; NULL: BF16 */
  mm_model model;
  mm_rank_weights weights;
  mm_limits limits; /* of a group, but max_tokens */
  mm_forward forward;
  const mm_dflash *draft;         /* NULL, or of the next open: rows of its steps are then alike (mm_bench_drafts) */
  int32_t *id;                    /* [max_tokens] */
  mm_span *span;                  /* [slots] */
  uint32_t *out;                  /* [rows of a decode step] 0, 1, … */
  uint32_t *table;                /* [slots, pages of one]: pages of contexts that are filled in pieces */
  uint32_t *proposed;             /* [rows of a decode step]: those of the draft's pass that propose a token */
  mm_sampling *sampling;          /* [rows of a decode step] greedy */
  float *logits;                  /* of one row, or of all those where the host reads them */
  double *time;                   /* [2 · steps] */
  double copy_rate;               /* bytes read plus written a second */
  uint64_t drawn;                 /* tokens so far */
  uint32_t each;                  /* rows of a decode step for each of its sequences */
  uint32_t turn;                  /* of a step of one op: layers gone through, over all rounds */
  double fresh;                   /* share of the rows of a draft's steps that have another token than a row of their sequence before */
  double reached;                 /* experts of a layer that a decode step's rows chose, on average */
  bool json;                      /* a line of JSON for each result */
  struct mm_bench_groups *groups; /* what the next step's rows are in all groups; NULL: there is one */
} mm_bench;

static inline uint32_t mm_bench_groups_of(const mm_bench *b) { return b->ranks / b->attn_tp; }
/* Every group's rows are as many and of the same kinds as those of the batch, which is this rank's group's. Before each begin. */
MM_MUST_USE bool mm_bench_plan(mm_bench *b, const mm_batch *batch, mm_err *err);
void mm_bench_close_groups(mm_bench *b);

/* Allocates all of it and opens the backend; close accepts a bench that is half open, and leaves it as open wants it. Weights are made
 * once, until mm_bind_close(&b->weights). */
MM_MUST_USE bool mm_bench_open(mm_bench *b, mm_err *err);
void mm_bench_close(mm_bench *b);

/* An op of a layer. */
typedef struct mm_bench_op {
  const char *name;
  bool (*in)(const mm_bench *b, uint32_t layer); /* whether the layer has it */
  void (*run)(mm_bench *b, uint32_t layer);
  double (*bytes)(const mm_bench *b, uint32_t layer, uint32_t rows); /* that it must move */
  uint32_t times; /* that a layer's step has it; 0: a part of another op, or no layer's */
  bool caches;    /* what it reads depends on the context */
} mm_bench_op;

/* Fills the slots [0, rows) with contexts. */
MM_MUST_USE bool mm_bench_fill(mm_bench *b, uint32_t rows, mm_err *err);
/* Greedy steps of `rows` rows, b->each of a sequence, each queued before the one before it is collected, all at the position behind the
 * context; *step_s: the median time from one to the next. Of one op: ROUNDS of it over all layers that have it, instead of the pass; NULL:
 * the pass. */
MM_MUST_USE bool mm_bench_decode(mm_bench *b, const mm_bench_op *o, uint32_t rows, double *step_s, mm_err *err);
/* Steps of b->each rows of `sequences` sequences, before each of them a pass of the draft that proposes for all; nothing is queued ahead.
 * step_s[2]: of both, of the draft's. Rows of a sequence have the same tokens so often that they choose as many experts together as
 * consecutive tokens of text do, or as near to that as random weights come. */
MM_MUST_USE bool mm_bench_drafts(mm_bench *b, uint32_t sequences, double step_s[2], mm_err *err);
MM_MUST_USE bool mm_bench_prefill(mm_bench *b, double *step_s, mm_err *err);
/* Single tokens of `rows` sequences and the first `tokens` tokens of another one: as two steps and as one. step_s[3]: the single tokens,
 * the prefill chunk, both. */
MM_MUST_USE bool mm_bench_mixed(mm_bench *b, uint32_t rows, double step_s[3], mm_err *err);

/* A prompt of `context` tokens of a model with sparse and full layers, in chunks of `tokens`; part_s[3] of a whole prompt: selection of
 * blocks, attention over those, attention of a full layer (bench_attention.c). */
MM_MUST_USE bool mm_bench_attention(mm_bench *b, double part_s[3], mm_err *err);
/* Operations of the products of queries with keys and of weights with values: over chosen blocks, and over all positions. */
void mm_bench_attention_ops(const mm_bench *b, double tokens, double ops[2]);

#define MM_BENCH_ROUNDS 4 /* over the layers, in a step of one op */

/* Times every op for itself, and prints them (bench_ops.c). */
MM_MUST_USE bool mm_bench_measure_ops(mm_bench *b, uint32_t rows, mm_err *err);
/* Fields common to the results of a case. */
mm_bench_result mm_bench_result_of(const mm_bench *b, uint32_t rows);

/* Bytes read plus written a second by copies in the memory where steps live: the device's, or this machine's by all threads. */
MM_MUST_USE bool mm_bench_copy_rate(const mm_ops *ops, unsigned threads, double *rate, mm_err *err);

/* ---- rooflines (roofline.c), of one rank ---- */

/* Rates that bound arithmetic, operations a second: constants, what an H200 reached in large products. Each prefill's line prints them. */
#define MM_BENCH_FP8_RATE       1.5e15
#define MM_BENCH_BF16_RATE      7.5e14
#define MM_BENCH_ATTENTION_RATE 6.5e14

/* Bytes that the attention of a layer must read of its caches, or read and write of its states: sequences at position `context`. Index keys
 * of all positions count for themselves. */
double mm_bench_cache_bytes(const mm_bench *b, uint32_t layer, uint32_t rows, double context);
double mm_bench_index_bytes(const mm_bench *b, uint32_t layer, uint32_t rows, double context);
/* Bytes of rows that a rank sends to others in a decode step of so many rows in all, in the exchanges of its layers: wire[0] as they are;
 * gather[3]: of them those that groups of attention gather, as they are, and what codes would be: FP8 with a scale for 128 numbers, NVFP4
 * with one for 16. */
void mm_bench_wire_bytes(const mm_bench *b, uint32_t rows, double *wire, double gather[3]);
/* Bytes that a decode step must move: weights once, those of experts that were reached, states in and out, caches. */
double mm_bench_decode_bytes(const mm_bench *b, uint32_t rows, double context);
/* Bytes of weights that the draft's pass reads, or the passes of its chain for b->each rows: layers and head. */
double mm_bench_draft_bytes(const mm_bench *b);
/* Seconds of a prefill of so many tokens from an empty cache: of each part the longer of its bytes and its operations. */
double mm_bench_prefill_floor(const mm_bench *b, double tokens);

#endif
