/* Computations of attention and the activations between the products of rows. As in cpu_rows.h every number is defined to the bit, whatever
 * the machine, the number of threads and the company of other rows: the levels run the same operations.
 *
 * exp(x) is 2^n times a polynomial of degree 7 in x - n·ln 2, within 2 units of the last place for x from -87 to 88; beyond these it is
 * that of the bound, and of what is no number none. */
#ifndef MM_RUNTIME_CPU_CPU_VECTORS_H
#define MM_RUNTIME_CPU_CPU_VECTORS_H

#include "runtime/cpu/cpu_rows.h"

/* out[i] = exp(x[i]); out may be x, here and below. */
typedef void mm_cpu_exp_fn(float *out, const float *x, size_t n);
/* out[i] = x[i] / (1 + exp(-x[i])), times by[i] unless by is NULL. */
typedef void mm_cpu_silu_fn(float *out, const float *x, const float *by, size_t n);
/* out[i] = (clamp(up[i], ±limit) + beta)·g / (1 + exp(-alpha·g)), g = min(gate[i], limit). */
typedef struct mm_cpu_swiglu {
  float alpha, limit, beta;
} mm_cpu_swiglu;
typedef void mm_cpu_swiglu_fn(float *out, const float *gate, const float *up, size_t n, const mm_cpu_swiglu *s);
/* out[i] = x[i]·r·w[i] / (1 + exp(-gate[i])). */
typedef void mm_cpu_gate_fn(float *out, const float *x, float r, const float *w, const float *gate, size_t n);

/* A softmax that is not finished: the largest score so far, the sum of exp(score - top), and o[d] = Σ exp(score - top)·v. */
typedef struct mm_cpu_softmax {
  float top, sum;
} mm_cpu_softmax;
/* A head of a token, q[d] scaled already, that sees the first n of some positions; score: room for MM_CPU_POSITIONS. */
enum { MM_CPU_POSITIONS = 64 };
typedef struct mm_cpu_query {
  const float *q;
  float *o, *score;
  mm_cpu_softmax soft;
  uint32_t n; /* 1 … MM_CPU_POSITIONS */
} mm_cpu_query;
/* Queries meet keys and values of the positions, [n, d] each. */
typedef void mm_cpu_attend_fn(mm_cpu_query *query, uint32_t count, const float *k, const float *v, uint32_t d);

/* One token of one head of lightning attention: S[d, d] = decay·S + k ⊗ v, then o[d] = qᵀ·S. */
typedef void mm_cpu_state_fn(float *S, float *o, const float *q, const float *k, const float *v, uint32_t d, float decay);

typedef float mm_cpu_dot_fn(const float *a, const float *b, uint32_t n);

/* Σ q[i]·code[i] / 256 over E4M3 codes, in the order of mm_cpu_dot. */
typedef float mm_cpu_dot_e4m3_fn(const float *q, const uint8_t *code, uint32_t n);

typedef struct mm_cpu_vectors {
  mm_cpu_rows_fn *const *rows; /* [MM_KINDS], NULL for kinds with limbs, … */
  mm_cpu_rows_fn *codes;       /* … whose x[t] is a row of spans (cpu_codes.h) */
  mm_cpu_dot_fn *dot;
  mm_cpu_exp_fn *exp;
  mm_cpu_silu_fn *silu;
  mm_cpu_swiglu_fn *swiglu;
  mm_cpu_gate_fn *gate;
  mm_cpu_attend_fn *attend;
  mm_cpu_state_fn *state;
  mm_cpu_dot_e4m3_fn *dot_e4m3;
} mm_cpu_vectors;
/* The functions of this machine's level (quant/cpu.h). */
const mm_cpu_vectors *mm_cpu_vectors_here(void);
extern const mm_cpu_vectors mm_cpu_vectors_plain, mm_cpu_vectors_avx2, mm_cpu_vectors_avx512;

#endif
