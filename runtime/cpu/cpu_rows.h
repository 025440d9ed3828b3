/* Products of packed rows with f32 vectors: y = x·Wᵀ with codes widened in registers, never to strips of f32.
 *
 * One number is defined to the bit, whatever the machine, the number of tokens or threads. Columns are taken in chunks of 128, sixteen
 * lanes at a time: lane i of a chunk's partial sum runs through eight columns by fused multiply-adds; the partial sum is then added to the
 * lane's sum under the scale over those columns (where a chunk has several scales along the row, each part at a time); at the end the
 * sixteen lanes are added in a tree, i to i + 8, then + 4, + 2, + 1, and multiplied with the scales that cover the whole row. Columns past
 * the end are zeros. E4M3 codes and scales go through f16, 256 times smaller; the factor is taken back at the end. */
#ifndef MM_RUNTIME_CPU_CPU_ROWS_H
#define MM_RUNTIME_CPU_CPU_ROWS_H

#include <stdatomic.h>

#include "quant/cpu.h"
#include "quant/quant.h"

enum { MM_CHUNK = 128, MM_CPU_TOKENS = 8 }; /* columns of a chunk; tokens that share one widening */
/* From how many tokens on rows are widened to memory, and how many then share one widening. */
enum { MM_CPU_TILED = 12, MM_CPU_MANY_TOKENS = 96 };

/* The number of tokens, of so many left, that share the next widening. */
static inline uint32_t mm_cpu_some(uint32_t left) {
  if (left <= MM_CPU_MANY_TOKENS || left >= 2 * MM_CPU_MANY_TOKENS) return left < MM_CPU_MANY_TOKENS ? left : MM_CPU_MANY_TOKENS;
  return (left / 2 + 5) / 6 * 6; /* two of nearly the same size */
}

/* Pairs of codes and inputs that loops exist for; mm_cpu_kinds has a row for each. */
typedef enum mm_cpu_kind {
  MM_KIND_F32,
  MM_KIND_BF16,
  MM_KIND_F16,
  MM_KIND_E4M3,
  MM_KIND_E4M3_32,     /* several scales a chunk, each over 32 or 64 columns; MXFP8 likewise */
  MM_KIND_E4M3_GROUPS, /* as E4M3, inputs with a scale for each chunk (mm_cpu_scales) */
  MM_KIND_MXFP8,
  MM_KIND_INT8,
  MM_KIND_INT8_CODES, /* as INT8, inputs are INT8 too (mm_cpu_integers) */
  MM_KIND_NVFP4,
  MM_KIND_MXFP4,
  MM_KIND_INT4,
  MM_KIND_INT4_OFFSET,
  MM_KIND_NVFP4_CODES, /* inputs are codes too (cpu_codes.h) */
  MM_KIND_MXFP4_CODES,
  MM_KIND_INT4_CODES,  /* no scales along the row */
  MM_KIND_NVFP4_LIMBS, /* inputs are f32, as integers of three bytes (cpu_codes.h) */
  MM_KIND_MXFP4_LIMBS,
  MM_KIND_INT4_LIMBS,
  MM_KIND_INT4_OFFSET_LIMBS,
  MM_KINDS
} mm_cpu_kind;

/* Order of a chunk's columns in registers once its codes are widened (mm_cpu_column). */
typedef enum mm_cpu_order { MM_ORDER_STORED, MM_ORDER_BF16, MM_ORDER_E4M3, MM_ORDER_INT8, MM_ORDER_NIBBLES } mm_cpu_order;

typedef struct mm_cpu_traits {
  mm_cpu_order order;
  uint32_t chunk_bytes;
  mm_dtype scale;       /* type of the scales along the row, */
  uint32_t scale_bytes; /* 0: the kind has none */
  float factor;         /* by which codes and scales come out too small */
  uint32_t limbs;       /* bytes of an input, where rows of inputs are spans (cpu_codes.h); else 0 */
  bool e2m1;            /* nibbles of spans are E2M1, which are doubled; else INT4 */
} mm_cpu_traits;

static const mm_cpu_traits mm_cpu_kinds[MM_KINDS] = {
    [MM_KIND_F32] = {MM_ORDER_STORED, 4 * MM_CHUNK, .factor = 1},
    [MM_KIND_BF16] = {MM_ORDER_BF16, 2 * MM_CHUNK, .factor = 1},
    [MM_KIND_F16] = {MM_ORDER_STORED, 2 * MM_CHUNK, .factor = 1},
    [MM_KIND_E4M3] = {MM_ORDER_E4M3, MM_CHUNK, MM_F32, 4, .factor = 256},
    [MM_KIND_E4M3_32] = {MM_ORDER_E4M3, MM_CHUNK, MM_F32, 4, .factor = 256},
    [MM_KIND_E4M3_GROUPS] = {MM_ORDER_E4M3, MM_CHUNK, MM_F32, 4, .factor = 256},
    [MM_KIND_MXFP8] = {MM_ORDER_E4M3, MM_CHUNK, MM_U8, 1, .factor = 256},
    [MM_KIND_INT8] = {MM_ORDER_INT8, MM_CHUNK, .factor = 1},
    [MM_KIND_INT8_CODES] = {MM_ORDER_INT8, MM_CHUNK, .factor = 1},
    [MM_KIND_NVFP4] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_F8_E4M3, 1, .factor = 256},
    [MM_KIND_MXFP4] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_U8, 1, .factor = 1},
    [MM_KIND_INT4] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_BF16, 2, .factor = 1},
    [MM_KIND_INT4_OFFSET] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_BF16, 2, .factor = 1},
    [MM_KIND_NVFP4_CODES] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_F8_E4M3, 1, .factor = 64, .limbs = 1, .e2m1 = true},
    [MM_KIND_MXFP4_CODES] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_U8, 1, .factor = 0.25f, .limbs = 1, .e2m1 = true},
    [MM_KIND_INT4_CODES] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_BF16, 2, .factor = 1, .limbs = 1},
    [MM_KIND_NVFP4_LIMBS] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_F8_E4M3, 1, .factor = 256, .limbs = 3, .e2m1 = true},
    [MM_KIND_MXFP4_LIMBS] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_U8, 1, .factor = 1, .limbs = 3, .e2m1 = true},
    [MM_KIND_INT4_LIMBS] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_BF16, 2, .factor = 1, .limbs = 3},
    [MM_KIND_INT4_OFFSET_LIMBS] = {MM_ORDER_NIBBLES, MM_CHUNK / 2, MM_BF16, 2, .factor = 1, .limbs = 3},
};

/* A packed matrix as the loops see it. */
typedef struct mm_cpu_view {
  const mm_packed *w;
  mm_cpu_kind kind;
  const uint8_t *codes; /* of matrix `lead` */
  size_t row_bytes;
  unsigned plane; /* the scale plane whose cells lie along the row; 0: none does */
  uint32_t cell;  /* its columns: a multiple of 128, or 16, 32 or 64 */
  uint32_t lead;
  bool pairs;          /* behind each row of inputs, which BF16 holds exactly, they lie as pairs (mm_cpu_pair) */
  const uint8_t *next; /* where the codes are that this thread reads after those of the rows asked for; NULL: not known */
} mm_cpu_view;

/* Codes of a row of matrix `lead`. */
const uint8_t *mm_cpu_row_at(const mm_packed *w, uint32_t lead, uint32_t row);
/* False where the stored grid is finer or other than the loops know; such rows are unpacked first (mm_cpu_view_f32). */
bool mm_cpu_view_of(mm_cpu_view *v, const mm_packed *w, uint32_t lead);
/* Rows already unpacked: f32 [rows, stride], stride ≥ k and its columns from k to the next multiple of 128 zero. */
void mm_cpu_view_f32(mm_cpu_view *v, const mm_packed *w, const float *rows, uint32_t stride);

/* Columns of x as the loops read them: k to the next multiple of 128. */
static inline uint32_t mm_cpu_padded(uint32_t k) { return (k + MM_CHUNK - 1) / MM_CHUNK * MM_CHUNK; }
MM_INLINE bool mm_cpu_nibbles(mm_cpu_kind k) { return mm_cpu_kinds[k].order == MM_ORDER_NIBBLES; }
MM_INLINE bool mm_cpu_e4m3(mm_cpu_kind k) { return mm_cpu_kinds[k].order == MM_ORDER_E4M3; }
/* The column of a chunk that lane i of its register j has: where codes come to lie when they are widened. BF16: the high and the low
 * halves of 16 words; E4M3: those of 64 bytes, after bytes of each 128 bits were put between others; nibbles: the four of
 * each half of the word i. */
MM_INLINE uint32_t mm_cpu_column(mm_cpu_kind k, uint32_t j, uint32_t i) {
  switch (mm_cpu_kinds[k].order) {
    case MM_ORDER_BF16: return 32 * (j / 2) + 2 * i + (j + 1) % 2;
    case MM_ORDER_E4M3: return 64 * (j / 4) + 16 * (i / 4) + 8 * (j / 2 % 2) + 2 * (i % 4) + (j + 1) % 2;
    case MM_ORDER_INT8: return 64 * (j / 4) + 4 * i + j % 4;
    case MM_ORDER_NIBBLES: return 8 * i + 4 * ((j + 1) % 2) + j / 2;
    case MM_ORDER_STORED: break;
  }
  return 16 * j + i;
}
/* True if a kind's columns are not in order: x is then given in theirs (mm_cpu_turn). */
MM_INLINE bool mm_cpu_turned(mm_cpu_kind k) { return mm_cpu_kinds[k].order != MM_ORDER_STORED; }
/* x[k] as rows of this kind want it: out[padded(k)]. */
void mm_cpu_turn(float *out, const float *x, uint32_t k, mm_cpu_kind kind);
/* A row that mm_cpu_turn gave, room for as much behind it as MM_CPU_INPUT says: its numbers, rounded to BF16, and behind them as pairs,
 * lane i of an even register in the high half of a word and that of the next register in the low half. Numbers below 2^-126 become zeros.
 */
void mm_cpu_pair(float *row, uint32_t k);
/* Floats of such a row with what lies behind it; `padded` columns: pairs, then scales, of the whole row or one a chunk. */
#define MM_CPU_INPUT(padded) ((padded) + (padded) / 2 + (padded) / MM_CHUNK / 16 * 16 + 16)
static inline const float *mm_cpu_scales(const float *row, uint32_t k) { return row + mm_cpu_padded(k) + mm_cpu_padded(k) / 2; }
/* A row that mm_cpu_turn gave of integers from -127 to 127, room behind it as above: behind it come bytes in the order of columns, then
 * what cpu_rows_vnni.c begins a lane with. False where some are none, as no numbers and what stands in padding may be: the row's products
 * must not be numbers then. */
bool mm_cpu_integers(float *row, uint32_t k);
static inline const float *mm_cpu_starts(const float *row, uint32_t k) { return row + mm_cpu_padded(k) + mm_cpu_padded(k) / 4; }
enum { MM_CPU_MOST_INTEGERS = 16384 }; /* columns of which eight lots of 128 · 127 a chunk stay below 2^24 */
/* The nearest in BF16 as f32, ties to even; zero below 2^-126, what is no number stays none. */
float mm_cpu_bf16(float x);

/* y[t · stride + i] is row first + i of v times x[t], for i below `rows` and t below `tokens`; each x[t] has padded(k) columns in the
 * kind's order. `sums` has room for MM_CPU_SUMS(rows) floats, aligned to 64 bytes. */
typedef void mm_cpu_rows_fn(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y,
                            size_t stride, float *sums);
void mm_cpu_rows(const mm_cpu_view *v, uint32_t first, uint32_t rows, const float *const *x, uint32_t tokens, float *y, size_t stride,
                 float *sums);
#define MM_CPU_SUMS(rows) ((size_t)(rows) * (MM_CPU_MANY_TOKENS * 28 + 6 * (MM_CHUNK + 4 * 16)))

/* The product of the scales that cover the whole row; E4M3 codes and scales are 256 times smaller before it. */
float mm_cpu_row_factor(const mm_cpu_view *v, uint32_t row);
/* The factors of so many rows. */
void mm_cpu_row_factors(const mm_cpu_view *v, uint32_t first, uint32_t rows, float *factor);

/* a[n]·b[n] by the same rule. */
float mm_cpu_dot(const float *a, const float *b, uint32_t n);

/* Sanitizers, and compilers that do not optimise, take minutes over the loops as they are: theirs are rolled, one for all kinds, and take
 * fewer tokens at once, to the same bits. */
#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ || __has_feature(address_sanitizer) || !defined __OPTIMIZE__
#define MM_ROLLED 1
#else
#define MM_ROLLED 0
#endif

/* Before a loop over registers; clang unrolls those by itself. */
#if MM_ROLLED || defined __clang__
#define MM_UNROLL
#else
#define MM_UNROLL _Pragma("GCC unroll 8")
#endif
/* Before a loop whose body fills the registers. */
#ifdef __clang__
#define MM_ROLL _Pragma("clang loop unroll(disable)")
#else
#define MM_ROLL _Pragma("GCC unroll 1")
#endif

/* Rows that some machines have in place of those of mm_cpu_vectors_here: of a kind NULL where they have none. */
extern mm_cpu_rows_fn *const *const mm_cpu_rows_vbmi, *const *const mm_cpu_rows_bf16;
extern mm_cpu_rows_fn *const mm_cpu_codes_vnni;
mm_cpu_rows_fn mm_cpu_rows_vnni;

#endif
