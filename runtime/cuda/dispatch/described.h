/* Stored weights as kernel arguments. No device code: C and C++, in every build. */
#ifndef MM_CUDA_DESCRIBED_H
#define MM_CUDA_DESCRIBED_H

#include "quant/quant.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mm_cu_code {
  MM_CU_BF16,
  MM_CU_E4M3,
  MM_CU_INT4, /* (v & 15) ^ 8, nibbles in pair order (weight.cuh) */
  MM_CU_E2M1  /* in pair order */
} mm_cu_code;

typedef enum mm_cu_scale {
  MM_CU_PLAIN,  /* no scale */
  MM_CU_COARSE, /* f32, k cell a multiple of the piece of a warp (64 for E4M3, 128 for INT4), or the whole row */
  MM_CU_FINE,   /* f32, k cell a multiple of 8 */
  MM_CU_NV,     /* e4m3, one per 16 of a row; scale_pitch a multiple of 16, and scale 16-byte aligned */
  MM_CU_MX      /* e8m0 of E2M1 or E4M3, one per 32 of a row; likewise */
} mm_cu_scale;

/* How the inputs of a product are rounded before it (quant/activation.c): MM_ACT_KEPT, not at all. */
typedef struct mm_cu_rounding {
  mm_act_quant kind;
  float fixed; /* the static scale; 0: none */
  /* Columns [first_k, first_k + k) of rows of whole_k, where scales span columns of other ranks; 0, 0: they do not. */
  uint32_t first_k, whole_k;
  struct mm_cu_whole_rows *ranks; /* fp8.h; where whole_k is not 0 */
} mm_cu_rounding;

/* `lead` matrices [n, k] in device memory: y = x·Wᵀ. */
typedef struct mm_cu_weight {
  mm_cu_code code;
  mm_cu_scale scale_kind;
  uint32_t lead, n, k; /* k % 8 == 0 */
  size_t pitch;        /* bytes from row to row, a multiple of 16; padding codes are zero */
  const uint8_t *data; /* [lead, n, pitch], 16-byte aligned */
  const void *scale;   /* [lead, scale_rows, scale_pitch] elements */
  uint32_t scale_rows, scale_pitch;
  uint32_t cell_n_log2, cell_k_log2; /* of the scale grid; 31: the whole extent */
  const float *global;               /* [lead] further factors, or NULL */
  mm_cu_rounding rounding;           /* of its inputs */
  mm_cu_rounding whole;              /* the same where its whole_k is not 0: always before the product, and `rounding` is KEPT */
} mm_cu_weight;

/* All of *out but its pointers, from w's shape and scheme alone. MM_UNSUPPORTED E_SCHEME, naming tensor and scheme, when no kernel reads
 * it. */
MM_MUST_USE bool mm_cu_describe(const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err);
uint32_t mm_cu_bits(mm_cu_code code);
/* True if its inputs can be rounded. MM_UNSUPPORTED E_ACT_QUANT, naming tensor and scheme, where other ranks' columns forbid it. */
MM_MUST_USE bool mm_cu_rounds(const mm_packed *w, const char *name, mm_err *err);
/* How its inputs are rounded, whether other ranks' columns have a part in it or not. */
const mm_cu_rounding *mm_cu_rounding_of(const mm_cu_weight *w);
/* Largest magnitudes that ranks exchange for each row under such a rounding: one for the row, or one for each group of columns. */
uint32_t mm_cu_published_largest(const mm_cu_rounding *how);
/* Elements of its scales, f32 (COARSE, FINE) or bytes (NV, MX). */
size_t mm_cu_scales(const mm_cu_weight *d);

#ifdef __cplusplus
}
#endif
#endif
