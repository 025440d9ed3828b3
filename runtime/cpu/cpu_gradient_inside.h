/* The backward pass's state, shared by its files. T = rows of the window, H = hidden, d = head_dim. */
#ifndef MM_CPU_GRADIENT_INSIDE_H
#define MM_CPU_GRADIENT_INSIDE_H

#include "formats/system/pool.h"
#include "quant/products.h"
#include "runtime/cpu/cpu_gradient.h"
#include "runtime/engine/ops.h"

enum {
  MM_GRADIENT_STRIP = 256, /* rows of a weight that are f32 at once */
  MM_GRADIENT_PANEL = 8,   /* rows of a window that a thread takes at once */
  MM_GRADIENT_LOGITS = 32, /* rows of a window whose logits are there at once */
  MM_GRADIENT_QUERIES = 16 /* rows of an attention head whose scores are there at once */
};

/* Rows of one expert: inputs and outputs, outputs of w13, inputs of w2, and their gradients. */
typedef struct mm_gradient_rows_of_expert {
  uint32_t *pair;                 /* [T·top_k]: row·top_k + place among the row's experts */
  float *x, *d_x, *out, *d_out;   /* [T, H] */
  float *up, *d_up, *mid, *d_mid; /* [T, 2·I], [T, I] */
} mm_gradient_rows_of_expert;

struct mm_cpu_gradient {
  const mm_shards *s;
  const mm_model *m;
  mm_rank_weights w;
  mm_team *team;
  mm_sampler *sampler;
  unsigned threads;
  uint32_t tokens;                   /* of a window at most */
  uint32_t inner, qkv;               /* heads·d, widest output of qkv */
  uint32_t T;                        /* rows of the present window */
  float *memory;                     /* all that follows */
  float *h;                          /* [layers + 1, T, H]: inputs of each layer before its norm, and the last one's output */
  float *n1, *mid, *n2;              /* [T, H]: normalised input, after attention, normalised */
  float *dh, *dn, *add;              /* [T, H]: gradients; a branch, or its gradient */
  float *raw, *act;                  /* [T, qkv]: outputs of qkv; as attention takes them */
  float *d_act;                      /* [T, qkv]: gradient of act, then of raw */
  float *o, *y, *gate;               /* [T, inner]: of attention, inputs of the output linear, outputs of the gate */
  float *d_o, *d_gate;               /* [T, inner] */
  float *turn;                       /* [T, rotary_dim]: cosines, then sines */
  float *vector;                     /* [widest]: weights of a norm */
  float *strip, *turned;             /* [MM_GRADIENT_STRIP, widest input], its transpose */
  float *logits;                     /* [MM_GRADIENT_LOGITS, vocab] */
  float *score;                      /* [T, E]: of the router, then their gradients */
  float *weight, *d_weight;          /* [T, top_k] */
  uint32_t *pick;                    /* [T, top_k]: experts */
  mm_gradient_rows_of_expert expert; /* the rows at work */
  float *scratch;                    /* [threads, scratch_floats]: of attention heads */
  uint64_t scratch_floats;
  mm_gradient_fn *take;
  void *ctx;
};

/* ---- cpu_gradient_ops.c ---- */
/* y[rows, n] = x[rows, k]·Wᵀ of matrix `lead`. */
MM_MUST_USE bool mm_gradient_linear(mm_cpu_gradient *g, float *y, const float *x, uint32_t rows, const mm_packed *w, uint32_t lead,
                                    mm_err *err);
/* Gives (x, dy) to take, then dx[rows, k] += dy[rows, n]·W; dx NULL: not wanted. */
MM_MUST_USE bool mm_gradient_linear_back(mm_cpu_gradient *g, float *dx, const mm_gradient_rows *of, mm_err *err);
/* The same of dx alone. */
MM_MUST_USE bool mm_gradient_through(mm_cpu_gradient *g, float *dx, const float *dy, uint32_t rows, const mm_packed *w, uint32_t lead,
                                     mm_err *err);
/* Rows of x[rows, stride], n numbers of each, by their RMS times w[n]. y has the same stride. */
typedef struct mm_gradient_norm {
  uint32_t rows, n;
  size_t stride;
  double eps;
  const float *w;
} mm_gradient_norm;
void mm_gradient_normalise(float *y, const float *x, const mm_gradient_norm *of);
/* dx[i] = or += the gradient that dy has under the norm of x. dx may be dy where it is not added. */
void mm_gradient_normalise_back(float *dx, const float *dy, const float *x, const mm_gradient_norm *of, bool added);
/* The weights of a vector, in g->vector. */
const float *mm_gradient_vector(mm_cpu_gradient *g, const mm_packed *w);

/* ---- cpu_gradient_attention.c ---- */
/* g->add = the branch of attention of g->n1, and what its backward needs. */
MM_MUST_USE bool mm_gradient_attention(mm_cpu_gradient *g, uint32_t layer, mm_err *err);
/* g->add is the gradient of the branch: that of g->n1 is added to g->dn. */
MM_MUST_USE bool mm_gradient_attention_back(mm_cpu_gradient *g, uint32_t layer, mm_err *err);
uint64_t mm_gradient_scratch(const mm_cpu_gradient *g);

/* ---- cpu_gradient_experts.c ---- */
/* The router's experts and weights of g->n2. */
MM_MUST_USE bool mm_gradient_route(mm_cpu_gradient *g, uint32_t layer, mm_err *err);
/* g->add = the branch of the experts of g->n2. */
MM_MUST_USE bool mm_gradient_experts(mm_cpu_gradient *g, uint32_t layer, mm_err *err);
/* g->add is the gradient of the branch: that of g->n2 is added to g->dn. */
MM_MUST_USE bool mm_gradient_experts_back(mm_cpu_gradient *g, uint32_t layer, mm_err *err);

#endif
