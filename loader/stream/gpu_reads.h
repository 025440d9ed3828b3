/* The models and matrices that runtime/cuda computes with: known from shapes, before a device is asked or a weight is read. */
#ifndef MM_LOADER_GPU_READS_H
#define MM_LOADER_GPU_READS_H

#include "loader/bind.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of runtime/cuda; it asserts that they are its own. */
enum {
  MM_GPU_RANKS = 8, /* of a stage */
  MM_GPU_HIDDEN = 6144,
  MM_GPU_WIDTH = 16384, /* of a row that is normed */
  MM_GPU_EXPERTS = 256,
  MM_GPU_TOP_K = 16,
  MM_GPU_GROUP = 8,        /* heads per kv head */
  MM_GPU_GROUP_HEADS = 16, /* the same with norms of each head */
  MM_GPU_INDEX_HEADS = 8,  /* index heads of a rank */
  MM_GPU_INDEX_TILE = 16   /* positions: blocks are multiples */
};

/* For tp ranks of a stage, whose attention is cut for attn_tp. MM_UNSUPPORTED, naming what is found and what the backend takes: E_TP,
 * E_MODEL. */
MM_MUST_USE bool mm_gpu_takes_model(const mm_model *m, uint32_t tp, uint32_t attn_tp, mm_err *err);
/* MM_UNSUPPORTED, naming tensor and scheme: E_SCHEME where no kernel reads the matrix, and E_ACT_QUANT where its inputs cannot be rounded,
 * which is what the backend does unless --act-quant off. True without a scheme. */
MM_MUST_USE bool mm_gpu_takes_matrix(const mm_packed *w, const char *name, mm_err *err);
/* The matrices of a rank; the first that fails. */
MM_MUST_USE bool mm_gpu_takes_rank(const mm_rank_weights *w, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
