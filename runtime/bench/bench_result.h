/* Results of minimax-bench, as lines of text or of JSON on stdout. */
#ifndef MM_RUNTIME_BENCH_RESULT_H
#define MM_RUNTIME_BENCH_RESULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Figures that a subject measures of one model. */
typedef struct mm_bench_case {
  const char *subject, *model;
  uint32_t layers;
  uint32_t vocab;
  const char *quant, *experts; /* schemes of the attention and of the experts */
  const char *head;            /* of the head */
  uint32_t batch[8];           /* decode steps of so many sequences; 0 ends */
  uint32_t context;            /* tokens that each holds before */
  uint32_t tokens;             /* of a prefill step; 0: none */
  uint32_t dense;              /* first layers of M3 that are dense */
  uint32_t shrink;             /* what widths and experts of the released shapes are divided by; 0: 1 */
  uint32_t verify;             /* rows of a sequence in steps of batch rows, measured next to single tokens; 0: not. For drafts: rows of a
                                * sequence in their steps; 0: 8, 4 and 2 */
} mm_bench_case;

/* Words of a case are those of tables: none has a character that JSON escapes. Seconds and bytes are of one step, or of one layer's op. */
typedef struct mm_bench_result {
  const mm_bench_case *c;
  uint32_t layers, batch; /* that were measured */
  uint32_t each;          /* rows of a decode step for each sequence: of batch / each */
  uint32_t ranks, ep;     /* a GPU each; bytes and floor are those of one. Experts are whole on ep groups of them */
  bool kv_fp8, index_fp8;
  double copy_rate;        /* bytes read plus written a second */
  double seconds, bytes;   /* bytes 0: not known */
  double floor_s;          /* the least that the step could take */
  double reached;          /* experts of a layer that the step chose, on average */
  uint32_t attn_tp;        /* ranks that attention is cut for */
  double wire;             /* bytes of rows that a rank sends in a step; 0: not known */
  double gather[3];        /* of them those that groups of attention gather, and what they would be as codes of FP8 and NVFP4 */
  double rate[3];          /* of a prefill: operations a second that its floor assumes, of FP8 and BF16 products and of attention */
  uint32_t index_split;    /* 0: none */
  const char *draft_quant; /* of drafts: the scheme of the draft's matrices */
} mm_bench_result;

/* Sorts x[n], n > 0. */
double mm_bench_median(double *x, size_t n);
void mm_bench_print_copy(double bytes_per_s, bool json);
void mm_bench_print_op(const mm_bench_result *r, const char *op, bool json);
void mm_bench_print_decode(const mm_bench_result *r, bool json);
void mm_bench_print_prefill(const mm_bench_result *r, bool json);
/* A step that a draft proposes for: r->seconds of it and of the draft's passes, of r->batch rows; r->bytes and r->floor_s of the passes
 * alone; plain_s: of single tokens of as many
 * sequences. chain: the draft is EAGLE-3's. */
void mm_bench_print_drafts(const mm_bench_result *r, double draft_s, double plain_s, bool chain, bool json);
/* part_s: selection, attention over chosen blocks, attention over all; ops: of the last two. */
void mm_bench_print_attention(const mm_bench_result *r, const double part_s[3], const double ops[2], bool json);
/* seconds: of decoding alone, of the prefill chunk alone, of both in one step. */
void mm_bench_print_mixed(const mm_bench_result *r, const double seconds[3], bool json);

#endif
