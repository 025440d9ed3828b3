/* Reading strips of source matrices. */
#include "convert/decode/decode.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "quant/numbers.h"

void mm_decoder_open(mm_decoder *d, const mm_hf *hf) {
  *d = (mm_decoder){0};
  mm_hf_reader_open(&d->reader, hf);
}

void mm_decoder_close(mm_decoder *d) {
  mm_hf_reader_close(&d->reader);
  MM_FREE(d->buffer, d->scale, d->wide);
  mm_buffer *buffer[] = {&d->stored, &d->grid, &d->codes, &d->zero, &d->order, &d->smooth, &d->words, &d->whole};
  for (size_t i = 0; i < sizeof buffer / sizeof *buffer; i++) free(buffer[i]->data);
}

/* Bits that are all set in exactly the values that are not finite. */
static uint32_t nonfinite_mask(mm_dtype t) {
  return t == MM_F32 ? 0x7f800000u : t == MM_BF16 ? 0x7f80u : t == MM_F16 ? 0x7c00u : 0x7fu /* E4M3: NaN only */;
}

static uint32_t bits_at(const void *data, size_t size, size_t i) {
  return size == 4 ? ((const uint32_t *)data)[i] : size == 2 ? ((const uint16_t *)data)[i] : ((const uint8_t *)data)[i];
}

/* A value that is not finite has all bits of the mask, which end below the sign: added to their lowest they reach it, eight bytes at a
 * time. Blocks are tested whole (a loop that vectorises), then searched. */
size_t mm_first_not_finite(const void *data, mm_dtype t, size_t n) {
  enum { WORDS = 512 };
  const size_t size = mm_dtype_size(t), each = WORDS * sizeof(uint64_t) / size;
  const uint32_t mask = nonfinite_mask(t), lowest = mask & ~(mask - 1);
  const uint64_t spread = size == 4 ? 0x0000000100000001 : size == 2 ? 0x0001000100010001 : 0x0101010101010101;
  const uint64_t masks = mask * spread, lows = lowest * spread, signs = (mask + lowest) * spread;
  for (size_t i = 0; i < n; i += each) {
    uint64_t word[WORDS] = {0}, any = 0;
    memcpy(word, (const uint8_t *)data + i * size, (n - i < each ? n - i : each) * size);
    for (size_t j = 0; j < WORDS; j++) any |= (word[j] & masks) + lows;
    for (size_t j = i; any & signs && j < n; j++)
      if ((bits_at(data, size, j) & mask) == mask) return j;
  }
  return n;
}

/* Fails unless the n values of rows from `row` on are finite; `data` holds them in type t, that of the source or of numbers. */
static bool check_finite(const mm_decoder *d, const mm_matrix *x, uint32_t row, const void *data, mm_dtype t, size_t n, mm_err *err) {
  size_t i = mm_first_not_finite(data, t, n);
  if (i == n) return true;
  const mm_hf_tensor *w = x->weight;
  mm_where where = mm_hf_at(d->reader.hf, w);
  if (x->encoding->codes.span == MM_SPAN_GRID && x->encoding->codes.cell.n * x->encoding->codes.cell.k == 1)
    where.offset = (int64_t)(w->offset + x->at + ((uint64_t)row * x->cols + i) * mm_dtype_size(w->dtype));
  return mm_fail(err, MM_BAD_INPUT, "E_NONFINITE", where, "found NaN or infinity at row %zu, column %zu, expected finite values in %s",
                 row + i / x->cols, i % x->cols, mm_dtype_name(t));
}

/* Scales of a KV cache divide what is stored there. */
static bool settle_positive(const mm_decoder *d, const mm_matrix *x, uint32_t row, size_t n, mm_err *err) {
  const mm_dtype t = x->weight->dtype;
  for (size_t i = 0; i < n; i++) {
    float v = 0;
    if (mm_widen(&v, (const uint8_t *)d->raw + i * mm_dtype_size(t), t, 1) && v > 0 && isfinite(v)) continue;
    return mm_fail(err, MM_BAD_INPUT, "E_Q_SCALE", mm_hf_at(d->reader.hf, x->weight),
                   "found %g at row %zu, expected a positive number; --kv-scales drop leaves these scales out", (double)v, row + i);
  }
  return true;
}

/* The n codes in d->raw: refuses what is not finite, or makes it 0 and counts it. */
static bool settle(mm_decoder *d, const mm_matrix *x, uint32_t row, size_t n, mm_err *err) {
  mm_dtype t = x->weight->dtype;
  if (x->positive) return settle_positive(d, x, row, n, err);
  if (!d->reader.hf->nonfinite_allowed) return check_finite(d, x, row, d->raw, t, n, err);
  const size_t size = mm_dtype_size(t);
  const uint32_t mask = nonfinite_mask(t);
  for (size_t i = mm_first_not_finite(d->raw, t, n); i < n; i++) {
    if ((bits_at(d->raw, size, i) & mask) != mask) continue;
    memset((uint8_t *)d->raw + i * size, 0, size);
    d->zeroed++;
  }
  return true;
}

#define STREAM_MIN ((size_t)256 << 10) /* smaller reads go through the page cache */
#define HUGE_PAGE  ((size_t)2 << 20)

/* Room for n bytes wherever they start inside an aligned window. The old contents are not kept. */
static bool window(mm_decoder *d, size_t n, mm_err *err) {
  size_t want = n + 2 * MM_DIRECT;
  if (want <= d->buffer_cap) return true;
  void *fresh = NULL;
  free(d->buffer);
  d->buffer = NULL;
  d->buffer_cap = 0;
  want = mm_round_up(want, HUGE_PAGE);
  if (posix_memalign(&fresh, HUGE_PAGE, want) != 0) return mm_fail_memory(err, want);
  madvise(fresh, want, MADV_HUGEPAGE); /* fewer pages to hand to the disk */
  d->buffer = fresh;
  d->buffer_cap = want;
  return true;
}

/* n bytes of part p from byte `at`, into a buffer. */
static bool read_buffer(mm_decoder *d, mm_buffer *to, const mm_source *p, uint64_t at, size_t n, mm_err *err) {
  return mm_grow(&to->data, &to->cap, n, 1, err) && mm_hf_read(&d->reader, p->tensor, p->at + at, to->data, n, err);
}

/* Elements [first, first + count) of each of `lines` lines, dense. */
static bool read_lines(mm_decoder *d, mm_buffer *to, const mm_source *p, uint64_t lines, uint64_t first, uint64_t count, mm_err *err) {
  size_t size = mm_dtype_size(p->tensor->dtype), bytes = count * size;
  if (!mm_grow(&to->data, &to->cap, lines * bytes, 1, err)) return false;
  for (uint64_t i = 0; i < lines; i++)
    if (!mm_hf_read(&d->reader, p->tensor, p->at + (i * p->line + first) * size, (uint8_t *)to->data + i * bytes, bytes, err)) return false;
  return true;
}

bool mm_decode_codes(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  const mm_hf_tensor *t = x->weight;
  size_t size = t->dtype == MM_F4 ? 1 : mm_dtype_size(t->dtype); /* F4 is counted in nibbles, read in bytes */
  size_t line = mm_cells(x->cols, x->encoding->codes.cell.k), n = rows * line;
  size_t bytes = n * size, skew = 0;
  uint64_t at = x->at + row * (line * size);
  d->zeroed = 0;
  if (!window(d, bytes, err)) return false;
  if (!(bytes < STREAM_MIN ? mm_hf_read(&d->reader, t, at, d->buffer, bytes, err)
                           : mm_hf_stream(&d->reader, t, at, d->buffer, bytes, &skew, err)))
    return false;
  if (skew % size != 0) { /* a file whose tensors do not start on their own size */
    memmove(d->buffer, d->buffer + skew, bytes);
    skew = 0;
  }
  d->raw = d->buffer + skew;
  for (size_t i = 0; x->encoding->flip && i < bytes; i++) ((uint8_t *)d->raw)[i] ^= x->encoding->flip;
  return x->encoding->code > MM_CODE_E4M3 || settle(d, x, row, n, err);
}

/* ---- scales ---- */

/* The largest number that packers write over a scale of matrix x; a scale whose product with it is not finite is refused. For NVFP4's
 * global scale it is the one of four over six, 256 times 6. 0: any finite scale may be there, since a packed source was proven by digests
 * and may hold large scales over small codes. */
static float scale_top(const mm_encoding *e, bool global) {
  if (e->packed) return 0;
  if (global) return 1536;
  switch (e->code) {
    case MM_CODE_E4M3: return 448;
    case MM_CODE_INT8: return 127;
    case MM_CODE_E2M1: return 6;
    default: return 7;
  }
}

static float scale_value(const void *p, mm_dtype t, size_t i) {
  switch (t) {
    case MM_F32: return ((const float *)p)[i];
    case MM_BF16: return mm_bf16_to_f32(((const uint16_t *)p)[i]);
    case MM_F16: return mm_f16_to_f32(((const uint16_t *)p)[i]);
    case MM_F8_E4M3: return mm_e4m3_value[((const uint8_t *)p)[i]];
    case MM_U32: return mm_scale_value(t, p, i);
    default: return mm_e8m0_to_f32(((const uint8_t *)p)[i]);
  }
}

/* A tensor read as scales: rows [row, +rows) by columns of its cells. */
typedef struct mm_scale_grid {
  uint64_t row, rows, cols;
  bool turned;
  float top; /* scale_top */
} mm_scale_grid;

static float scale_most(const mm_scale_grid *g) { return g->top > 0 ? FLT_MAX / g->top : FLT_MAX; }

static bool is_scale(const mm_scale_grid *g, float v, bool may_be_negative) {
  const float most = may_be_negative && v < 0 ? -v : v;
  return most > 0 && most * (g->top > 0 ? g->top : 1) <= FLT_MAX;
}

/* Where element i of p stands. */
static mm_where at_element(const mm_decoder *d, const mm_source *p, uint64_t i) {
  mm_where at = mm_hf_at(d->reader.hf, p->tensor);
  at.offset = (int64_t)(p->tensor->offset + p->at + i * mm_dtype_size(p->tensor->dtype));
  return at;
}

static bool bad_scale(const mm_decoder *d, const mm_source *p, const mm_scale_grid *g, uint64_t r, uint64_t c, float v,
                      bool may_be_negative, mm_err *err) {
  uint64_t i = g->turned ? c * p->line + g->row + r : (g->row + r) * p->line + c;
  return mm_fail(err, MM_BAD_INPUT, "E_Q_SCALE", at_element(d, p, i),
                 "found scale %g of block row %llu, column %llu, expected a %s number, at most %g", (double)v,
                 (unsigned long long)(g->row + r), (unsigned long long)c, may_be_negative ? "nonzero" : "positive", (double)scale_most(g));
}

/* Scales of a tensor as f32, row-major, each checked. */
static bool read_scales(mm_decoder *d, const mm_source *p, const mm_scale_grid *g, bool may_be_negative, float *out, mm_err *err) {
  size_t size = mm_dtype_size(p->tensor->dtype);
  if (!(g->turned ? read_lines(d, &d->stored, p, g->cols, g->row, g->rows, err)
                  : read_buffer(d, &d->stored, p, g->row * p->line * size, g->rows * g->cols * size, err)))
    return false;
  for (uint64_t r = 0; r < g->rows; r++)
    for (uint64_t c = 0; c < g->cols; c++) {
      float v = scale_value(d->stored.data, p->tensor->dtype, g->turned ? c * g->rows + r : r * g->cols + c);
      if (!is_scale(g, v, may_be_negative)) return bad_scale(d, p, g, r, c, v, may_be_negative, err);
      out[r * g->cols + c] = v;
    }
  return true;
}

/* A tensor that is one scale for all, or over all; as it is stored, and what it multiplies by. */
static bool read_one(mm_decoder *d, const mm_source *p, bool reciprocal, float top, float *stored, float *out, mm_err *err) {
  const mm_scale_grid limited = {0, 1, 1, false, top}, any = {0, 1, 1, false, 0};
  if (!read_scales(d, p, reciprocal ? &any : &limited, false, stored, err)) return false;
  *out = reciprocal ? 1 / *stored : *stored;
  return is_scale(&limited, *out, false) || bad_scale(d, p, &limited, 0, 0, *stored, false, err);
}

static bool read_global(mm_decoder *d, const mm_matrix *x, float *stored, float *out, mm_err *err) {
  const bool global = x->part[MM_GLOBAL].tensor;
  return read_one(d, &x->part[global ? MM_GLOBAL : MM_SCALE], x->encoding->reciprocal, scale_top(x->encoding, global), stored, out, err);
}

bool mm_decode_global(mm_decoder *d, const mm_matrix *x, float *out, mm_err *err) {
  float stored = 0;
  return read_global(d, x, &stored, out, err);
}

bool mm_decode_global_steps(mm_decoder *d, const mm_matrix *x, float *out, int32_t *steps, mm_err *err) {
  float stored = 0;
  if (!read_global(d, x, &stored, out, err)) return false;
  *steps = x->encoding->reciprocal ? (int32_t)(mm_f32_bits(stored) - mm_f32_bits(1 / *out)) : 0;
  return true;
}

bool mm_decode_input(mm_decoder *d, const mm_matrix *x, float *out, mm_err *err) {
  const mm_source *p = &x->part[MM_INPUT];
  uint32_t stored = 0;
  float one = 0;
  *out = 0;
  if (!p->tensor) return true;
  if (!mm_hf_read(&d->reader, p->tensor, p->at, &stored, mm_dtype_size(p->tensor->dtype), err)) return false;
  if (scale_value(&stored, p->tensor->dtype, 0) == 0 && !d->unreached) d->unreached = p->tensor;
  if (scale_value(&stored, p->tensor->dtype, 0) == 0) return true;
  return (d->reached = read_one(d, p, x->encoding->reciprocal, 0, &one, out, err));
}

bool mm_decode_inputs_given(const mm_decoder *d, mm_err *err) {
  return !d->unreached || d->reached ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_SCALE", mm_hf_at(d->reader.hf, d->unreached),
                 "found static scale 0 of activations, as all others, expected a positive number for at least one matrix; --act-scales "
                 "gives others");
}

/* Scales over the rows into d->scale, [cells of rows][cells of columns], times the global one. d->stored keeps them as stored. */
static bool decode_scales(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  const mm_encoding *e = x->encoding;
  mm_scale_grid g = {.row = x->cell.n ? row / x->cell.n : 0,
                     .rows = mm_cells(rows, x->cell.n),
                     .cols = mm_cells(x->cols, x->cell.k),
                     .turned = e->part[MM_SCALE].span == MM_SPAN_TURNED,
                     .top = scale_top(e, false)};
  size_t n = g.rows * g.cols;
  float stored = 1, global = 1;
  if (x->part[MM_GLOBAL].tensor && !read_one(d, &x->part[MM_GLOBAL], e->reciprocal, scale_top(e, true), &stored, &global, err))
    return false;
  if (!MM_GROW(d->scale, &d->scale_cap, n, err) || !read_scales(d, &x->part[MM_SCALE], &g, e->signed_scale, d->scale, err)) return false;
  for (size_t i = 0; x->part[MM_GLOBAL].tensor && i < n; i++) d->scale[i] = e->reciprocal ? d->scale[i] / stored : d->scale[i] * global;
  return true;
}

/* ---- integers with zero points or in words of several rows ---- */

/* The rows and columns that stand next to words are those of the model: of fused pieces, those of one or of all. Read with the first rows.
 */
static bool check_sides(mm_decoder *d, const mm_matrix *x, uint32_t row, mm_err *err) {
  const mm_source *p = &x->part[MM_SIDES];
  if (!p->tensor || row > 0) return true;
  const mm_shape *words = &x->weight->shape; /* [rows, words of a row], of a stack with one more axis in front */
  const int64_t expected[2] = {(int64_t)words->dim[words->rank - 2], x->cols};
  int64_t found[2] = {0};
  for (int i = 0; i < 2; i++) {
    const size_t size = mm_dtype_size(p->tensor->dtype);
    int32_t narrow = 0;
    if (!mm_hf_read(&d->reader, p->tensor, p->at + (size_t)i * size, size == 4 ? (void *)&narrow : &found[i], size, err)) return false;
    if (size == 4) found[i] = narrow;
  }
  mm_where at = mm_hf_at(d->reader.hf, p->tensor);
  at.offset = (int64_t)(p->tensor->offset + p->at);
  return ((found[0] == expected[0] || found[0] == x->rows) && found[1] == expected[1]) ||
         mm_fail(err, MM_BAD_INPUT, "E_Q_SHAPE", at, "found [%lld, %lld] rows and columns, expected [%lld, %lld] of \"%s\"",
                 (long long)found[0], (long long)found[1], (long long)expected[0], (long long)expected[1], x->weight->original);
}

/* Codes into d->codes, one byte each: [rows, cols]. */
static bool read_words(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  const mm_stored_form *f = &x->encoding->codes;
  mm_source p = {x->weight, x->at, x->line};
  size_t size = mm_dtype_size(x->weight->dtype);
  uint64_t lines = f->span == MM_SPAN_TURNED ? mm_cells(x->cols, f->cell.k) : mm_cells(rows + row % f->cell.n, f->cell.n);
  uint64_t width = f->span == MM_SPAN_TURNED ? mm_cells(x->rows, f->cell.n) : mm_cells(x->cols, f->cell.k);
  mm_words w = {.bits = mm_code_bits(x),
                .size = size,
                .line = x->line,
                .turned = f->span == MM_SPAN_TURNED,
                .cell = f->cell,
                .order = x->encoding->order};
  uint32_t skip = 0;
  if (!mm_grow(&d->codes.data, &d->codes.cap, (size_t)rows * x->cols, 1, err)) return false;
  if (w.turned) {
    if (d->whole_of != x->weight || d->whole_at != x->at) {
      d->whole_of = NULL;
      if (!read_buffer(d, &d->whole, &p, 0, ((lines - 1) * x->line + width) * size, err)) return false;
      d->whole_of = x->weight;
      d->whole_at = x->at;
    }
    w.data = d->whole.data;
  } else {
    skip = row / f->cell.n;
    if (!read_buffer(d, &d->stored, &p, skip * x->line * size, lines * x->line * size, err)) return false;
    w.data = d->stored.data;
  }
  mm_words_spread(&w, row - skip * f->cell.n, rows, x->cols, d->codes.data);
  return true;
}

/* Zero points of weights that are declared symmetric, which engines do not read. GPTQ's two formats store zero points that differ by one,
 * and look alike otherwise; those of symmetric weights reveal the format. Under --follow the file that says it may still come. */
static bool check_zeros(const mm_decoder *d, const mm_matrix *x, uint8_t middle, size_t n, mm_err *err) {
  const mm_hf *hf = d->reader.hf;
  const mm_where at = mm_hf_at(hf, x->part[MM_ZERO].tensor);
  const uint8_t *zero = d->zero.data;
  size_t i = 0;
  while (i < n && zero[i] == middle) i++;
  if (!x->symmetric || i == n) return true;
  if (hf->follow && hf->quantization.less_assumed && zero[i] == middle + 1)
    return mm_fail(err, MM_UNSUPPORTED, "E_FOLLOW", at,
                   "found zero points of GPTQ's second format, expected the first, as nothing said otherwise when the plan was made: "
                   "convert the whole download without --follow");
  return mm_fail(err, MM_BAD_INPUT, "E_Q_ZERO", at, "found zero point %u, expected %u of a symmetric quantization%s", zero[i], middle,
                 x->encoding->less ? " (is checkpoint_format right?)" : "");
}

/* Zero points into d->zero, one byte each: [rows, groups]. */
static bool read_zeros(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, uint32_t groups, mm_err *err) {
  const mm_stored_form *f = &x->encoding->part[MM_ZERO];
  const mm_source *p = &x->part[MM_ZERO];
  size_t n = (size_t)rows * groups;
  uint8_t mask = (uint8_t)((1u << mm_code_bits(x)) - 1), middle = (uint8_t)(mask / 2 + 1);
  if (!mm_grow(&d->zero.data, &d->zero.cap, n, 1, err)) return false;
  uint8_t *zero = d->zero.data;
  memset(zero, middle, n);
  if (!p->tensor) return true;
  mm_words w = {
      .bits = mm_code_bits(x), .size = 4, .turned = f->span == MM_SPAN_TURNED, .cell = {f->cell.n, 1}, .order = x->encoding->order};
  uint32_t first = row / w.cell.n, count = mm_cells(row + rows, w.cell.n) - first;
  w.line = w.turned ? count : groups;
  if (!(w.turned ? read_lines(d, &d->stored, p, groups, first, count, err)
                 : read_lines(d, &d->stored, p, 1, (uint64_t)first * groups, (uint64_t)count * groups, err)))
    return false;
  /* The whole word was made smaller, with borrows from one zero point to the next. */
  uint32_t *word = d->stored.data, less = x->encoding->less ? d->reader.hf->quantization.zero_less : 0;
  for (size_t i = 0; i < (size_t)count * groups; i++) word[i] += less * (UINT32_MAX / mask);
  w.data = word;
  mm_words_spread(&w, row - first * w.cell.n, rows, groups, zero);
  return check_zeros(d, x, middle, n, err);
}

/* The group of every column into d->order. */
static bool read_order(mm_decoder *d, const mm_matrix *x, uint32_t groups, mm_err *err) {
  const mm_source *p = &x->part[MM_ORDER];
  if (!mm_grow(&d->order.data, &d->order.cap, x->cols, sizeof(uint32_t), err)) return false;
  uint32_t *order = d->order.data, g = x->cell.k ? x->cell.k : x->cols;
  for (uint32_t k = 0; k < x->cols; k++) order[k] = k / g;
  if (!p->tensor) return true;
  if (!mm_hf_read(&d->reader, p->tensor, p->at, order, x->cols * sizeof *order, err)) return false;
  for (uint32_t k = 0; k < x->cols; k++)
    if (order[k] >= groups)
      return mm_fail(err, MM_BAD_INPUT, "E_Q_ORDER", at_element(d, p, k), "found group %d of column %u, expected 0 to %u",
                     (int32_t)order[k], k, groups - 1);
  return true;
}

static bool decode_integers(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  uint32_t groups = mm_cells(x->cols, x->cell.k);
  uint8_t sign = x->encoding->code == MM_CODE_INT4 ? 8 : 0; /* two's complement to offset binary */
  if (!read_words(d, x, row, rows, err) || !read_zeros(d, x, row, rows, groups, err) || !read_order(d, x, groups, err) ||
      !decode_scales(d, x, row, rows, err))
    return false;
  const uint32_t *order = d->order.data;
  for (uint32_t r = 0; r < rows; r++) {
    const uint8_t *code = (const uint8_t *)d->codes.data + (size_t)r * x->cols, *zero = (const uint8_t *)d->zero.data + (size_t)r * groups;
    const float *scale = d->scale + (size_t)r * groups;
    float *out = d->wide + (size_t)r * x->cols;
    for (uint32_t k = 0; k < x->cols; k++) out[k] = (float)((code[k] ^ sign) - zero[order[k]]) * scale[order[k]];
  }
  return true;
}

/* ---- numbers ---- */

/* Codes in rows of their own under scales: what a packed scheme's unpack reads, on the source's grid. */
static bool decode_grid(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  if (!decode_scales(d, x, row, rows, err) || !mm_decode_codes(d, x, row, rows, err)) return false;
  const bool pairs = x->encoding->code >= MM_CODE_E2M1, zeros = x->part[MM_SCALE].tensor->dtype == MM_U32;
  mm_scheme view = {
      .code = x->encoding->code,
      .plane_count = 2,
      .plane = {{.dtype = MM_U8, .cell = {1, pairs ? 2 : 1}}, {.dtype = zeros ? MM_U32 : MM_F32, .cell = x->cell, .scale = true}}};
  const void *scales = zeros ? d->stored.data : d->scale;
  mm_packed m = {.scheme = &view, .lead = 1, .n = rows, .k = x->cols, .plane = {d->raw, scales}, .cell = {view.plane[0].cell, x->cell}};
  mm_unpack(&m, 0, 0, rows, d->wide);
  return true;
}

static bool apply_smooth(mm_decoder *d, const mm_matrix *x, uint32_t rows, mm_err *err) {
  if (!mm_grow(&d->smooth.data, &d->smooth.cap, x->cols, sizeof(float), err)) return false;
  float *smooth = d->smooth.data;
  if (!read_scales(d, &x->part[MM_SMOOTH], &(mm_scale_grid){.rows = 1, .cols = x->cols}, false, smooth, err)) return false;
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t k = 0; k < x->cols; k++) d->wide[(size_t)r * x->cols + k] *= smooth[k];
  return true;
}

bool mm_decode_f32(mm_decoder *d, const mm_matrix *x, uint32_t row, uint32_t rows, mm_err *err) {
  size_t n = (size_t)rows * x->cols;
  d->zeroed = 0;
  if (!MM_GROW(d->wide, &d->wide_cap, n, err)) return false;
  if (mm_is_plain(x)) return mm_decode_codes(d, x, row, rows, err) && mm_widen(d->wide, d->raw, x->weight->dtype, n);
  return check_sides(d, x, row, err) &&
         (mm_encoding_is_grid(x) ? decode_grid(d, x, row, rows, err) : decode_integers(d, x, row, rows, err)) &&
         (!x->part[MM_SMOOTH].tensor || apply_smooth(d, x, rows, err)) && check_finite(d, x, row, d->wide, MM_F32, n, err);
}

/* ---- planes that are kept ---- */

/* The scheme's scale plane out of scales on a coarser grid, which are repeated. */
static bool repeat(mm_decoder *d, const mm_matrix *x, mm_cell fine, const void *from, size_t size, uint32_t rows, mm_err *err) {
  uint32_t n = mm_cells(rows, fine.n), k = mm_cells(x->cols, fine.k), across = mm_cells(x->cols, x->cell.k);
  if (!mm_grow(&d->grid.data, &d->grid.cap, (size_t)n * k * size, 1, err)) return false;
  for (uint32_t r = 0; r < n; r++)
    for (uint32_t c = 0; c < k; c++) {
      uint32_t i = x->cell.n ? r * fine.n / x->cell.n : 0, j = x->cell.k ? c * fine.k / x->cell.k : 0;
      memcpy((uint8_t *)d->grid.data + ((size_t)r * k + c) * size, (const uint8_t *)from + ((size_t)i * across + j) * size, size);
    }
  return true;
}

/* Large scales may be over small codes: then every number of these rows is looked at. `scales` is plane 1 on the grid of x. */
static bool check_products(mm_decoder *d, const mm_matrix *x, const mm_scheme *s, const void *scales, uint32_t row, uint32_t rows,
                           mm_err *err) {
  enum { LARGEST_CODE = 448 }; /* of all codes */
  const size_t n = (size_t)mm_cells(rows, x->cell.n) * mm_cells(x->cols, x->cell.k);
  float most = 0;
  for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(mm_scale_value(s->plane[1].dtype, scales, i)));
  if (s->plane_count > 2) most *= d->global;
  if (most <= FLT_MAX / (float)LARGEST_CODE / 2) return true;
  const mm_packed m = {.scheme = s,
                       .lead = 1,
                       .n = rows,
                       .k = x->cols,
                       .plane = {d->raw, scales, &d->global},
                       .cell = {s->plane[0].cell, x->cell, s->plane[2].cell}};
  const size_t count = (size_t)rows * x->cols;
  if (!MM_GROW(d->wide, &d->wide_cap, count, err)) return false;
  mm_unpack(&m, 0, 0, rows, d->wide);
  return check_finite(d, x, row, d->wide, MM_F32, count, err);
}

/* The planes of integers in words: codes as the scheme stores them in d->raw, scales and zero points in d->words. */
static bool decode_words(mm_decoder *d, const mm_matrix *x, const mm_scheme *s, uint32_t row, uint32_t rows, mm_err *err) {
  const uint32_t groups = mm_cells(x->cols, x->cell.k);
  const bool int8 = x->encoding->code == MM_CODE_INT8;
  const size_t n = (size_t)rows * groups;
  if (!read_words(d, x, row, rows, err) || !read_zeros(d, x, row, rows, groups, err) || !read_order(d, x, groups, err) ||
      !decode_scales(d, x, row, rows, err) || !mm_grow(&d->words.data, &d->words.cap, n, sizeof(uint32_t), err))
    return false;
  const uint32_t *order = d->order.data, g = x->cell.k ? x->cell.k : x->cols;
  for (uint32_t k = 0; k < x->cols; k++)
    if (order[k] != k / g)
      return mm_fail(
          err, MM_UNSUPPORTED, "E_Q_KEEP", at_element(d, &x->part[MM_ORDER], k),
          "found group %u of column %u, expected %u: columns out of the order of their groups (desc_act), which no packed scheme "
          "holds; expected another --quant",
          order[k], k, k / g);
  uint8_t *code = d->codes.data, *to = code;
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t k = 0; k < x->cols; k += int8 ? 1 : 2) {
      const uint8_t *c = code + (size_t)r * x->cols + k;
      *to++ = (uint8_t)(int8 ? c[0] ^ 0x80 : c[0] | (k + 1 < x->cols ? c[1] << 4 : 0));
    }
  d->raw = code;
  const uint8_t *zero = d->zero.data;
  for (size_t i = 0; i < n; i++) {
    if (mm_has_zeros(s))
      ((uint32_t *)d->words.data)[i] = mm_scale_word(d->scale[i], (int8_t)(int8 ? zero[i] - 128 : zero[i] - 8));
    else if (s->plane[1].dtype == MM_F16)
      ((uint16_t *)d->words.data)[i] = mm_f32_to_f16(d->scale[i]);
    else if (s->plane[1].dtype == MM_BF16)
      ((uint16_t *)d->words.data)[i] = mm_f32_to_bf16(d->scale[i]);
    else
      ((float *)d->words.data)[i] = d->scale[i];
  }
  return true;
}

/* Plane 1 of scheme s on the grid of x, from the scales that decode_scales read, of n cells. Scales without zero points become words of s
 * with zero points of 0, into d->words; other scales stay as they are stored. */
static bool plane_of_scales(mm_decoder *d, const mm_matrix *x, const mm_scheme *s, size_t n, const void **out, mm_err *err) {
  const bool stored = s->plane[1].dtype != MM_F32, zeros = mm_has_zeros(s) && x->part[MM_SCALE].tensor->dtype != MM_U32;
  *out = stored ? d->stored.data : d->scale;
  if (!zeros) return true;
  if (!mm_grow(&d->words.data, &d->words.cap, n, sizeof(uint32_t), err)) return false;
  for (size_t i = 0; i < n; i++) ((uint32_t *)d->words.data)[i] = mm_scale_word(d->scale[i], 0);
  *out = d->words.data;
  return true;
}

bool mm_decode_planes(mm_decoder *d, const mm_matrix *x, const mm_stored_as *as, uint32_t row, uint32_t rows,
                      const void *plane[MM_MAX_PLANES], mm_err *err) {
  const mm_scheme *const s = as->scheme;
  const float global = as->global;
  const mm_plane *p = &s->plane[1];
  const bool words = mm_encoding_is_words(x);
  if (!check_sides(d, x, row, err) || !(words ? decode_words(d, x, s, row, rows, err) : mm_decode_codes(d, x, row, rows, err)))
    return false;
  plane[0] = d->raw;
  if (mm_is_plain(x)) return true;
  if (s->code != x->encoding->code) /* a nibble's two's complement and its offset binary */
    for (size_t i = 0, n = (size_t)rows * mm_cells(x->cols, 2); i < n; i++) ((uint8_t *)d->raw)[i] ^= 0x88;
  if (x->part[MM_GLOBAL].tensor && !mm_decode_global(d, x, &d->global, err)) return false;
  const void *scales = d->words.data;
  const size_t cells = (size_t)mm_cells(rows, x->cell.n) * mm_cells(x->cols, x->cell.k);
  if (!words && !(decode_scales(d, x, row, rows, err) && plane_of_scales(d, x, s, cells, &scales, err))) return false;
  d->regraded =
      x->part[MM_GLOBAL].tensor && d->global != global && !mm_nvfp4_regrade(d->raw, d->stored.data, rows, x->cols, d->global, global);
  d->global = global;
  plane[2] = &d->global;
  mm_scale_grid g = {.row = x->cell.n ? row / x->cell.n : 0, .cols = mm_cells(x->cols, x->cell.k), .top = scale_top(x->encoding, false)};
  for (size_t i = 0; i < cells; i++) {
    float v = mm_scale_value(p->dtype, scales, i);
    if (!mm_scale_allowed(s, v)) return bad_scale(d, &x->part[MM_SCALE], &g, i / g.cols, i % g.cols, v, s->signed_scale, err);
  }
  if (!check_products(d, x, s, scales, row, rows, err)) return false;
  if (!repeat(d, x, as->grid, scales, mm_dtype_size(p->dtype), rows, err)) return false;
  plane[1] = d->grid.data;
  return true;
}

/* Sets *keeps: the numbers of x stay the same under this global scale. */
static bool keeps_under(mm_decoder *d, const mm_matrix *x, const mm_stored_as *as, bool *keeps, mm_err *err) {
  enum { ROWS = 256 };
  const void *plane[MM_MAX_PLANES];
  float own = 0;
  if (!mm_decode_global(d, x, &own, err)) return false;
  *keeps = true;
  for (uint32_t row = 0; *keeps && own != as->global && row < x->rows; row += ROWS) {
    if (!mm_decode_planes(d, x, as, row, (uint32_t)mm_min(ROWS, x->rows - row), plane, err)) return false;
    *keeps = !d->regraded;
  }
  return true;
}

bool mm_decode_common(mm_decoder *d, const mm_matrix *x, unsigned pieces, const mm_scheme *s, mm_cell grid, float *out, mm_err *err) {
  enum { MOST = 8, BELOW = 512 /* E4M3 of the largest numbers would have to lie 512 times higher */ };
  float own[MOST] = {0}, least = INFINITY, most = 0;
  for (unsigned i = 0; i < pieces && i < MOST; i++) {
    if (!mm_decode_global(d, &x[i], &own[i], err)) return false;
    least = fminf(least, own[i]);
    most = fmaxf(most, own[i]);
  }
  for (unsigned p = 0; p < pieces && p < MOST; p++) {
    *out = own[p];
    while (*out > 0 && *out >= least / (float)BELOW) {
      bool keeps = true;
      for (unsigned i = 0; keeps && i < pieces; i++)
        if (!keeps_under(d, &x[i], &(mm_stored_as){s, grid, *out}, &keeps, err)) return false;
      if (keeps) return true;
      *out /= 2;
    }
  }
  return mm_fail(
      err, MM_UNSUPPORTED, "E_Q_KEEP", mm_hf_at(d->reader.hf, x[0].part[MM_GLOBAL].tensor),
      "found global scales of NVFP4 from %g to %g among %u matrices that share one, and no common scale keeps their numbers; "
      "expected another --quant (nvfp4a16 or nvfp4 rounds those under smaller scales again: 31 to 35 dB of SQNR against the source)",
      (double)least, (double)most, pieces);
}
