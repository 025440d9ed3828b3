/* The backward pass: gradients of the log-likelihood of a window's next ids with respect to the outputs of its linears. In f32, inputs not
 * rounded, on models without extended fields (mm_model_extended) that are not cut. The forward pass is run again from each layer's input,
 * one layer at a time, so that memory holds the inputs of all layers and the activations of one. */
#ifndef MM_CPU_GRADIENT_H
#define MM_CPU_GRADIENT_H

#include "runtime/engine/calibration.h"

typedef struct mm_cpu_gradient mm_cpu_gradient;

/* The checkpoint, which stays open; ids of a window at most; threads, which no bit depends on. MM_UNSUPPORTED E_PARALLEL for a checkpoint
 * that is cut, E_DEVICE for models with other ops, MM_LIMIT E_MEMORY. *bytes: the memory that it takes. */
mm_cpu_gradient *mm_cpu_gradient_open(const mm_shards *s, uint32_t tokens, unsigned threads, uint64_t *bytes, mm_err *err);
void mm_cpu_gradient_close(mm_cpu_gradient *g); /* accepts NULL */

/* The linears that mm_cpu_gradient_run gives, as numbers of the manifest's tensors: tensor[5 · layers] at most. How many. */
uint32_t mm_cpu_gradient_linears(const mm_cpu_gradient *g, uint32_t *tensor);

/* Matrix `lead` of w: inputs x[rows, w->k], and dy[rows, w->n], the gradients with respect to its outputs. Experts: of the rows that were
 * routed to them. */
typedef struct mm_gradient_rows {
  const mm_packed *w;
  uint32_t lead, rows;
  const float *x, *dy;
} mm_gradient_rows;
typedef void mm_gradient_fn(void *ctx, const mm_gradient_rows *of);

/* A window: id[count], and the ids whose log-likelihood after each of them is differentiated: target[count], or with NULL ids that the
 * model's own distribution gives, by the random numbers first, first + 1, … of seed 0 (sample.h). */
typedef struct mm_gradient_window {
  const int32_t *id, *target;
  uint32_t count;
  uint64_t first;
} mm_gradient_window;

/* Gives every linear of every layer to take, the last layer first; not the router and the head. *log_p: the log-likelihood. */
MM_MUST_USE bool mm_cpu_gradient_run(mm_cpu_gradient *g, const mm_gradient_window *w, mm_gradient_fn *take, void *ctx, double *log_p,
                                     mm_err *err);

#endif
