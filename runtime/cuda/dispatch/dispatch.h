/* Dispatch of products: the one table that names the kernel for given weights, rows and device. No device code. Attention and the router
 * dispatch in their own files. */
#ifndef MM_CUDA_PRODUCT_CHOICE_H
#define MM_CUDA_PRODUCT_CHOICE_H

#include "runtime/cuda/dispatch/described.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_CU_DECODE_ROWS 16
#define MM_CU_FEW         64
#define MM_CU_FEW_EACH    256 /* rows of a step up to which mm_cu_experts_few is worth it */
#define MM_CU_GROUP       128 /* columns whose inputs are rounded under one scale, as codes */

/* Each has a launch function of its name, which refuses (cudaErrorNotSupported) what mm_cu_takes does not say. */
typedef enum mm_cu_kernel {
  MM_CU_NO_KERNEL,
  /* y = x·Wᵀ */
  MM_CU_GEMM_FP8,
  MM_CU_GEMM_MX,
  MM_CU_SMALL_BATCH_FP8,
  MM_CU_GEMM_CODES,
  MM_CU_ONE,
  MM_CU_SMALL_BATCH_WIDENED,
  MM_CU_DECODE_DENSE,
  MM_CU_DECODE_LINEAR, /* mm_cu_decode_linear */
  MM_CU_GEMM_WIDENED,
  MM_CU_GEMM,
  /* a mixture of experts */
  MM_CU_EXPERTS_FEW,
  MM_CU_EXPERTS_FP8,
  MM_CU_EXPERTS_CODES,
  MM_CU_EXPERTS_ONE,
  MM_CU_EXPERTS_DECODE,
  MM_CU_EXPERTS_MANY,
  MM_CU_EXPERTS_GEMM,
  MM_CU_KERNELS
} mm_cu_kernel;

/* The inputs of a product's rows. */
typedef enum mm_cu_inputs_are {
  MM_CU_KEPT,
  MM_CU_ROUNDED_INSIDE, /* by the kernel */
  MM_CU_ROUNDED_BEFORE, /* by a launch before it, as bf16 */
  MM_CU_AS_CODES,       /* likewise, and multiplied as codes, under scales of 128 columns */
  MM_CU_AS_ROW_CODES,   /* the same under scales of whole rows */
  MM_CU_AS_MX_CODES     /* the same under powers of two of 32 columns */
} mm_cu_inputs_are;

/* Bytes of shared memory with which a single token's kernels have their longest rings (gemv_wide, gemv.cuh). */
#define MM_CU_ONE_SHARED (227 * 1024)

/* Properties of the built code and of the device that dispatch depends on. */
typedef struct mm_cu_device {
  bool hopper;      /* sm_90a */
  uint32_t cluster; /* blocks of the largest cluster of whole multiprocessors, of 2, 4 and 8; 0: none */
  uint32_t shared;  /* bytes of shared memory that a block may have */
  bool codes;       /* products of E4M3 codes by mma.sync: code for sm_89 */
} mm_cu_device;

/* A product that a step asks for. */
typedef struct mm_cu_task {
  const mm_cu_weight *w, *w2; /* of experts: w13 and w2; else w2 is NULL */
  uint32_t tokens, top_k;
  bool decode; /* all rows are single tokens; rows of a prefill keep their bits in chunks of more than 16 */
  bool middle; /* the rows between w13 and w2 are an output too, in the order of sorted pairs; T > 1 */
} mm_cu_task;

typedef struct mm_cu_dispatch {
  mm_cu_kernel kernel;
  mm_cu_inputs_are x, middle; /* of w, and of w2 */
} mm_cu_dispatch;

/* MM_CU_NO_KERNEL: of no weight that mm_cu_describe describes. */
mm_cu_dispatch mm_cu_dispatch_product(const mm_cu_device *d, const mm_cu_task *q);
/* The kernel can do this, whether it is worth it or not. */
bool mm_cu_takes(const mm_cu_device *d, mm_cu_kernel kernel, const mm_cu_task *q);
/* decode_tile.cuh reads it: not FINE or MX, and COARSE cells of whole sums of 128 columns. */
bool mm_cu_tile_takes(const mm_cu_weight *w);
/* The kernel rounds w's inputs itself, as w says: they are given as they are. */
bool mm_cu_rounds_inside(mm_cu_kernel kernel, const mm_cu_weight *w);
/* How w's inputs are rounded before a kernel that takes them as numbers; NULL: not. */
const mm_cu_rounding *mm_cu_rounds_before(mm_cu_kernel kernel, const mm_cu_weight *w);
/* w's codes can be multiplied as they are with codes of rounded rows: sm_90a, E4M3, and scales of whole groups of 128 columns, of the
 * inputs and of w, or of the whole row. */
bool mm_cu_multiplies_codes(const mm_cu_device *d, const mm_cu_weight *w);
/* The same in blocks: groups of 128 columns of the inputs, and of w with 128 rows too. */
bool mm_cu_multiplies_blocks(const mm_cu_device *d, const mm_cu_weight *w);
/* The launches in their order, by their names in a profiler: to[size]. */
void mm_cu_print_dispatch(const mm_cu_dispatch *c, char *to, size_t size);

/* ---- small_batch.cuh's shared memory ---- */

#ifdef __cplusplus
#define MM_CU_CONSTANT constexpr
#else
#define MM_CU_CONSTANT static inline
#endif

enum { MM_CU_BOX = 64, MM_CU_LINE = 128, MM_CU_CLUSTER_CAPACITY = 226 * 1024, MM_CU_CLUSTER_BARRIERS = 392 };

/* Shared memory of a kernel for `rows` rows: groups that multiply; bytes of the rows for 128 bytes of weights, and of their factors; bytes
 * of scales of a stage. */
typedef struct mm_cu_cluster_kind {
  uint32_t rows, turns, x, back, scales;
} mm_cu_cluster_kind;
/* codes: rows are codes too. */
MM_CU_CONSTANT mm_cu_cluster_kind mm_cu_cluster_kind_of(mm_cu_code code, mm_cu_scale scale, bool codes, uint32_t rows) {
  const uint32_t columns = code == MM_CU_BF16 ? 64 : code == MM_CU_E4M3 ? 128 : 256; /* of a line */
  const bool bytes = scale == MM_CU_NV || scale == MM_CU_MX, plain = code == MM_CU_BF16;
  mm_cu_cluster_kind k = {rows, rows >= 32 ? 2u : 3u, columns / 64 * rows * MM_CU_LINE, plain ? 0 : columns / 128 * rows * 8,
                          plain ? 0 : MM_CU_BOX * (bytes ? 16u : 8u)};
  if (codes) k.turns = 2, k.x = rows * MM_CU_LINE, k.back = rows * 4, k.scales = 16;
  return k;
}
/* Bytes of a tile's sums; tiles whose sums there is room for. */
MM_CU_CONSTANT uint32_t mm_cu_sums_bytes(uint32_t rows) { return MM_CU_BOX * (rows + 4) * 4; }
MM_CU_CONSTANT uint32_t mm_cu_sums_sets(uint32_t rows) { return rows == 64 ? 1 : 2; }
/* Bytes of a block that has so many lines of each row, without its stages. */
MM_CU_CONSTANT uint32_t mm_cu_cluster_bytes(mm_cu_cluster_kind k, uint32_t lines) {
  return lines * (k.x + k.back) + (k.turns + 1) * mm_cu_sums_sets(k.rows) * mm_cu_sums_bytes(k.rows) + MM_CU_CLUSTER_BARRIERS;
}
MM_CU_CONSTANT bool mm_cu_cluster_fits(mm_cu_cluster_kind k, uint32_t lines) {
  return mm_cu_cluster_bytes(k, lines) + 2 * k.turns * (MM_CU_BOX * MM_CU_LINE + k.scales) <= MM_CU_CLUSTER_CAPACITY;
}

#ifdef __cplusplus
}
#endif
#endif
