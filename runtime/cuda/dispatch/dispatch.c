/* The table of kernels (dispatch.h). */
#include "runtime/cuda/dispatch/dispatch.h"

#include <stdio.h>
#include <string.h>

/* The most activations of a single token that fit in shared memory with gemv.cuh's rings and the sums of a few rows, in whole items: of
 * MM_CU_ONE_SHARED, and of what every device has. */
#define ONE_COLUMNS   37000
#define LEAST_COLUMNS 18432 /* w2 of M1: two experts */
static uint32_t one_columns(const mm_cu_device *d) { return d->hopper || d->shared >= MM_CU_ONE_SHARED ? ONE_COLUMNS : LEAST_COLUMNS; }
/* Fewer pairs of token and expert are too few units for the blocks of mm_cu_experts_few. */
#define LEAST_PAIRS 8

typedef bool (*answer)(const mm_cu_device *d, const mm_cu_task *q);

/* Inputs have scales of 128 columns each, of this rank's alone. */
static bool groups(const mm_cu_weight *w) { return w->rounding.kind == MM_ACT_FP8_GROUP; }

bool mm_cu_multiplies_codes(const mm_cu_device *d, const mm_cu_weight *w) {
  const mm_act_format *f = &mm_act_formats[mm_cu_rounding_of(w)->kind];
  const bool rounds = f->code == MM_CODE_E4M3 && f->scale == MM_F32 && (f->group == 0 || groups(w)); /* groups that no cut divides */
  return d->hopper && rounds && w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_COARSE && w->cell_k_log2 >= 7 &&
         (w->cell_n_log2 >= 7 || w->scale_pitch == 1);
}

bool mm_cu_multiplies_blocks(const mm_cu_device *d, const mm_cu_weight *w) {
  return mm_cu_multiplies_codes(d, w) && groups(w) && w->cell_n_log2 >= 7;
}

/* A single token's kernels of these weights hold the code that rounds inputs so, as the schemes have it. */
static bool one_rounds(const mm_cu_weight *w) {
  const mm_act_quant kind = w->rounding.kind;
  switch (w->code) {
    case MM_CU_BF16: return false;
    case MM_CU_E4M3:
      if (w->scale_kind == MM_CU_MX) return kind == MM_ACT_MXFP8 || kind == MM_ACT_FP8_GROUP;
      return mm_act_formats[kind].code == MM_CODE_E4M3;
    case MM_CU_INT4: return mm_act_formats[kind].code == MM_CODE_E4M3 || mm_act_formats[kind].code == MM_CODE_INT8;
    case MM_CU_E2M1: return kind == (w->scale_kind == MM_CU_NV ? MM_ACT_NVFP4 : MM_ACT_MXFP4) || kind == MM_ACT_FP8_GROUP;
  }
  return false;
}

bool mm_cu_rounds_inside(mm_cu_kernel kernel, const mm_cu_weight *w) {
  if (w->rounding.kind == MM_ACT_KEPT) return false;
  return kernel == MM_CU_EXPERTS_FEW || ((kernel == MM_CU_ONE || kernel == MM_CU_EXPERTS_ONE) && one_rounds(w));
}

/* ---- y = x·Wᵀ ---- */

static bool always(const mm_cu_device *d, const mm_cu_task *q) { return (void)d, (void)q, true; }

/* Some cluster's blocks hold the rows in shared memory. */
static bool clusters_fit(const mm_cu_device *d, const mm_cu_task *q, bool codes) {
  const uint32_t rows = q->tokens <= 8 ? 8 : q->tokens <= 16 ? 16 : q->tokens <= 32 ? 32 : 64;
  const uint32_t lines = (uint32_t)mm_ceil_div(q->w->pitch, MM_CU_LINE);
  return q->tokens <= MM_CU_FEW && d->cluster > 0 &&
         mm_cu_cluster_fits(mm_cu_cluster_kind_of(q->w->code, q->w->scale_kind, codes, rows), (uint32_t)mm_ceil_div(lines, d->cluster));
}
static bool takes_codes(const mm_cu_device *d, const mm_cu_task *q) { return mm_cu_multiplies_codes(d, q->w); }
/* mma.sync multiplies w's codes with those of rows under scales of 128 columns, of this rank's alone. */
static bool by_mma(const mm_cu_device *d, const mm_cu_weight *w) {
  return d->codes && groups(w) && w->whole.kind == MM_ACT_KEPT && w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_COARSE &&
         w->cell_k_log2 >= 7 && w->k % 16 == 0;
}
static bool takes_gemm_codes(const mm_cu_device *d, const mm_cu_task *q) { return by_mma(d, q->w); }
static bool takes_small_batch_fp8(const mm_cu_device *d, const mm_cu_task *q) {
  return mm_cu_multiplies_blocks(d, q->w) && clusters_fit(d, q, true);
}
static bool takes_small_batch_widened(const mm_cu_device *d, const mm_cu_task *q) {
  return d->hopper && q->w->scale_kind != MM_CU_FINE && clusters_fit(d, q, false);
}
static bool takes_one(const mm_cu_device *d, const mm_cu_task *q) { return q->tokens == 1 && q->w->k <= one_columns(d); }
bool mm_cu_tile_takes(const mm_cu_weight *w) {
  return w->scale_kind == MM_CU_PLAIN || w->scale_kind == MM_CU_NV || (w->scale_kind == MM_CU_COARSE && w->cell_k_log2 >= 7);
}
static bool takes_decode_dense(const mm_cu_device *d, const mm_cu_task *q) {
  return !d->hopper && q->tokens <= MM_CU_FEW && mm_cu_tile_takes(q->w);
}
static bool takes_decode_linear(const mm_cu_device *d, const mm_cu_task *q) { return (void)d, q->tokens <= MM_CU_DECODE_ROWS; }
/* Both sides have powers of two for 32 columns, in whole lines. */
static bool takes_gemm_mx(const mm_cu_device *d, const mm_cu_task *q) {
  const mm_cu_weight *w = q->w;
  return d->hopper && w->code == MM_CU_E4M3 && w->scale_kind == MM_CU_MX && w->rounding.kind == MM_ACT_MXFP8 &&
         w->whole.kind == MM_ACT_KEPT && w->k % MM_CU_GROUP == 0 && w->scale_pitch % 4 == 0 && w->cell_n_log2 == 0;
}
static bool takes_widened(const mm_cu_device *d, const mm_cu_task *q) { return d->hopper && q->w->code != MM_CU_BF16; }
static bool takes_gemm(const mm_cu_device *d, const mm_cu_task *q) { return !takes_widened(d, q); }

static bool few_rows(const mm_cu_device *d, const mm_cu_task *q) {
  return (void)d, q->tokens > 1 && q->tokens <= (q->decode ? MM_CU_FEW : MM_CU_DECODE_ROWS);
}

static bool many(const mm_cu_device *d, const mm_cu_task *q) { return q->tokens > 1 && !few_rows(d, q); }

/* Few rows of codes in blocks that no cluster holds come by the kernel of many; others come faster as numbers. */
static bool many_codes(const mm_cu_device *d, const mm_cu_task *q) {
  return q->tokens > 1 && (mm_cu_multiplies_blocks(d, q->w) || !few_rows(d, q));
}

/* ---- experts ---- */

static bool several(const mm_cu_device *d, const mm_cu_task *q) { return (void)d, q->tokens > 1; }

/* Codes of the rows between the two products, with row scales, share a buffer with the bf16 results (inputs.cu). */
static bool experts_multiply_codes(const mm_cu_device *d, const mm_cu_task *q) {
  const bool fits = groups(q->w2) || q->w2->k + q->w2->k / 32 <= 2 * q->w2->n;
  return mm_cu_multiplies_codes(d, q->w) && mm_cu_multiplies_codes(d, q->w2) && q->w->n % (2 * MM_CU_GROUP) == 0 &&
         q->w->k >= MM_CU_GROUP && q->w2->n % 8 == 0 && fits;
}
static bool few_takes(const mm_cu_weight *w) {
  return w->code != MM_CU_BF16 && w->scale_kind != MM_CU_FINE && w->k % 32 == 0 && w->n % 2 == 0;
}
static bool takes_experts_few(const mm_cu_device *d, const mm_cu_task *q) {
  return d->hopper && q->tokens > 1 && few_takes(q->w) && few_takes(q->w2);
}
static bool takes_experts_fp8(const mm_cu_device *d, const mm_cu_task *q) { return q->tokens > 1 && experts_multiply_codes(d, q); }
/* Rows between the products become codes in place. */
static bool takes_experts_codes(const mm_cu_device *d, const mm_cu_task *q) {
  return q->tokens > 1 && by_mma(d, q->w) && by_mma(d, q->w2) && q->w2->k % MM_CU_GROUP == 0;
}
/* Not of decode steps with few rows an expert, which decode_tile.cuh takes. */
static bool many_chunked(const mm_cu_device *d, const mm_cu_task *q) {
  return (void)d, !q->middle && q->tokens > (q->decode ? 2 * MM_CU_FEW_EACH : MM_CU_DECODE_ROWS);
}
/* Columns of a single token's activations at most, whole items of each slot counted. */
static uint32_t mixture_columns(const mm_cu_task *q) {
  const uint32_t longest = 1024; /* columns of an item, of 4-bit codes */
  return (uint32_t)mm_max(q->w->k, q->top_k * mm_round_up(q->w2->k, longest));
}
static bool takes_experts_one(const mm_cu_device *d, const mm_cu_task *q) { return q->tokens == 1 && mixture_columns(q) <= one_columns(d); }
static bool many_takes(const mm_cu_weight *w) {
  const bool coarse = w->scale_kind == MM_CU_COARSE || (w->scale_kind == MM_CU_FINE && w->cell_k_log2 >= 6);
  return w->code != MM_CU_BF16 && (coarse || w->scale_kind == MM_CU_NV || w->scale_kind == MM_CU_MX) && w->k % 32 == 0 && w->n % 8 == 0;
}
static bool takes_experts_many(const mm_cu_device *d, const mm_cu_task *q) {
  return d->hopper && q->tokens > 1 && many_takes(q->w) && many_takes(q->w2) && q->w->k == q->w2->n;
}

static bool few_each(const mm_cu_device *d, const mm_cu_task *q) {
  const uint32_t most = !q->decode ? MM_CU_DECODE_ROWS : experts_multiply_codes(d, q) ? MM_CU_FEW : MM_CU_FEW_EACH;
  return !q->middle && q->tokens <= most && q->tokens * q->top_k >= LEAST_PAIRS;
}
static bool many_rows(const mm_cu_device *d, const mm_cu_task *q) { return (void)d, !q->middle && q->tokens > MM_CU_DECODE_ROWS; }
/* Long rows of E4M3 with inputs as they are come faster by stages (M1: 94 us, by fours 104; M2: 42, 41). */
static bool not_by_stages(const mm_cu_device *d, const mm_cu_task *q) {
  return (void)d, q->w->code != MM_CU_E4M3 || q->w->rounding.kind != MM_ACT_KEPT || q->w->pitch <= 4096;
}
/* Without sm_90a grouped products of small tiles read several rows' experts faster than stages do (M2, 16 rows: 1,187 us, by tiles 771). */
static bool by_stages(const mm_cu_device *d, const mm_cu_task *q) { return !q->middle && (d->hopper || q->tokens <= 1); }

/* ---- the table ---- */

/* From the best to the one that takes all: the first that can do it and is worth it is chosen. Launches: of the product, or of experts'
 * up, down and what ends them; `rounds`, before down where a launch rounds its inputs. */
static const struct kernel_row {
  mm_cu_kernel kernel;
  answer takes, worth;
  const char *up, *down, *end, *rounds;
} table[] = {
    {MM_CU_SMALL_BATCH_FP8, takes_small_batch_fp8, few_rows, "small_batch_clusters", NULL, NULL, NULL},
    {MM_CU_GEMM_FP8, takes_codes, many_codes, "product", NULL, NULL, NULL},
    {MM_CU_GEMM_CODES, takes_gemm_codes, many, "gemm_codes", NULL, NULL, NULL},
    {MM_CU_ONE, takes_one, always, "one", NULL, NULL, NULL},
    {MM_CU_SMALL_BATCH_WIDENED, takes_small_batch_widened, few_rows, "small_batch_clusters", NULL, NULL, NULL},
    {MM_CU_DECODE_DENSE, takes_decode_dense, few_rows, "decode_dense", NULL, NULL, NULL},
    {MM_CU_DECODE_LINEAR, takes_decode_linear, always, "decode_linear", NULL, NULL, NULL},
    {MM_CU_GEMM_MX, takes_gemm_mx, many, "product_mx", NULL, NULL, NULL},
    {MM_CU_GEMM_WIDENED, takes_widened, always, "gemm_widened", NULL, NULL, NULL},
    {MM_CU_GEMM, takes_gemm, always, "gemm", NULL, NULL, NULL},
    {MM_CU_EXPERTS_FEW, takes_experts_few, few_each, "lay_rows, experts_few", "lay_rows, experts_few", "sum_pairs", "round_rows"},
    {MM_CU_EXPERTS_FP8, takes_experts_fp8, many_rows, "spread, product", "product", "sum_choices", NULL},
    {MM_CU_EXPERTS_CODES, takes_experts_codes, many_chunked, "grouped_up_codes, encode_placed", "grouped_down_codes", "sum_pairs", NULL},
    {MM_CU_EXPERTS_ONE, takes_experts_one, not_by_stages, "one_experts_up", "one_experts_down", NULL, "round_slots"},
    {MM_CU_EXPERTS_DECODE, takes_decode_linear, by_stages, "experts_up", "experts_down", NULL, "round_slots"},
    {MM_CU_EXPERTS_MANY, takes_experts_many, always, "find_places, lay_tokens, experts_many", "experts_many", "sum_choices", "lay_rounded"},
    {MM_CU_EXPERTS_GEMM, several, always, "grouped_up", "grouped_down", "sum_pairs", "round_rows"},
};

static const struct kernel_row *row_of(mm_cu_kernel kernel) {
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (table[i].kernel == kernel) return &table[i];
  return NULL;
}

/* Kernels are compiled for these pairs. */
static bool has_kernels(const mm_cu_weight *w) {
  switch (w->code) {
    case MM_CU_BF16: return w->scale_kind == MM_CU_PLAIN;
    case MM_CU_E4M3: return w->scale_kind == MM_CU_COARSE || w->scale_kind == MM_CU_FINE || w->scale_kind == MM_CU_MX;
    case MM_CU_INT4: return w->scale_kind == MM_CU_COARSE || w->scale_kind == MM_CU_FINE;
    case MM_CU_E2M1: return w->scale_kind == MM_CU_NV || w->scale_kind == MM_CU_MX;
  }
  return false;
}

bool mm_cu_takes(const mm_cu_device *d, mm_cu_kernel kernel, const mm_cu_task *q) {
  const struct kernel_row *r = row_of(kernel);
  if (!r || (r->down != NULL) != (q->w2 != NULL) || !has_kernels(q->w) || (q->w2 && !has_kernels(q->w2))) return false;
  return r->takes(d, q);
}

const mm_cu_rounding *mm_cu_rounds_before(mm_cu_kernel kernel, const mm_cu_weight *w) {
  if (w->whole.kind != MM_ACT_KEPT) return &w->whole;
  return w->rounding.kind == MM_ACT_KEPT || mm_cu_rounds_inside(kernel, w) ? NULL : &w->rounding;
}

static mm_cu_inputs_are inputs_of(mm_cu_kernel kernel, const mm_cu_weight *w) {
  if (mm_cu_rounding_of(w)->kind == MM_ACT_KEPT) return MM_CU_KEPT;
  if (kernel == MM_CU_GEMM_CODES || kernel == MM_CU_EXPERTS_CODES) return MM_CU_AS_CODES;
  if (kernel == MM_CU_SMALL_BATCH_FP8 || kernel == MM_CU_GEMM_FP8 || kernel == MM_CU_EXPERTS_FP8)
    return groups(w) ? MM_CU_AS_CODES : MM_CU_AS_ROW_CODES;
  if (kernel == MM_CU_GEMM_MX) return MM_CU_AS_MX_CODES;
  return mm_cu_rounds_inside(kernel, w) ? MM_CU_ROUNDED_INSIDE : MM_CU_ROUNDED_BEFORE;
}

mm_cu_dispatch mm_cu_dispatch_product(const mm_cu_device *d, const mm_cu_task *q) {
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    const mm_cu_kernel kernel = table[i].kernel;
    if (!mm_cu_takes(d, kernel, q) || !table[i].worth(d, q)) continue;
    return (mm_cu_dispatch){kernel, inputs_of(kernel, q->w), q->w2 ? inputs_of(kernel, q->w2) : MM_CU_KEPT};
  }
  return (mm_cu_dispatch){MM_CU_NO_KERNEL, MM_CU_KEPT, MM_CU_KEPT};
}

void mm_cu_print_dispatch(const mm_cu_dispatch *c, char *to, size_t size) {
  const struct kernel_row *r = row_of(c->kernel);
  static const char *const made[] = {[MM_CU_ROUNDED_BEFORE] = "round_rows",
                                     [MM_CU_AS_CODES] = "encode",
                                     [MM_CU_AS_ROW_CODES] = "encode_rows",
                                     [MM_CU_AS_MX_CODES] = "encode_mx"};
  const char *part[5] = {made[c->x]};
  to[0] = 0;
  if (!r) return;
  part[1] = r->up,
  part[2] = c->middle == MM_CU_ROUNDED_BEFORE ? r->rounds
            : c->middle == MM_CU_AS_ROW_CODES ? made[c->middle]
                                              : NULL,
  part[3] = r->down, part[4] = r->end;
  for (size_t i = 0, at = 0; i < 5; i++) {
    if (!part[i] || at >= size) continue;
    at += (size_t)snprintf(to + at, size - at, "%s%s", at ? ", " : "", part[i]);
  }
}
