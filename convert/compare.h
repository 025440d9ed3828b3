/* A packed checkpoint against the source it came from: the error of every tensor, on every rank. */
#ifndef MM_CONVERT_COMPARE_H
#define MM_CONVERT_COMPARE_H

#include "convert/plan.h"
#include "loader/shards.h"

typedef struct mm_tensor_error {
  double signal, noise; /* Σ w², Σ (ŵ - w)² over all ranks */
  double max_abs;       /* max |ŵ - w| */
  uint64_t count;       /* elements compared */
} mm_tensor_error;

/* 10·log10(signal/noise); infinity without error. */
double mm_sqnr_db(const mm_tensor_error *e);

/* Compares every rank's share of every tensor with the source, decoded. `plan` must come from the source with the options of the
 * manifest; a packed checkpoint that it does not describe is MM_INTEGRITY E_SOURCE, naming the first difference. Fills
 * out[tensor_count]. */
bool mm_compare(const mm_plan *plan, const mm_shards *s, unsigned threads, mm_tensor_error *out, mm_err *err);

#endif
