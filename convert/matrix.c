/* Finding each matrix of the model inside the source, and refusing what does not fit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/hf.h"

#define NAME_MAX_LEN 256

/* Rows of the pieces before `i`, and of all: in units of `unit` rows, each piece rounded up. */
static void extents(const mm_model *m, const mm_rule *const *piece, unsigned pieces, unsigned i, uint32_t unit, uint64_t *before,
                    uint64_t *all) {
  *before = *all = 0;
  for (unsigned p = 0; p < pieces; p++) {
    uint64_t n = mm_ceil_div(mm_dim_extent(piece[p]->rows, m), unit);
    if (p < i) *before += n;
    *all += n;
  }
}

static bool shape_is(const mm_hf *hf, const mm_hf_tensor *t, mm_shape want, const char *code, mm_err *err) {
  if (mm_shape_equal(&t->shape, &want)) return true;
  char found[128], expected[128];
  return mm_fail(err, MM_BAD_INPUT, code, mm_at(hf->file[t->file].path, t->original), "found shape %s, expected %s",
                 mm_shape_text(&t->shape, found, sizeof found), mm_shape_text(&want, expected, sizeof expected));
}

/* Without headers, a tensor has the shape that the model implies and the released dtype. */
static void assume(mm_hf_tensor *t, mm_shape shape, mm_dtype dtype) {
  t->shape = shape;
  t->dtype = dtype;
  if (!mm_shape_bytes(&shape, dtype, &t->bytes)) t->bytes = 0;
}

static bool is_plain(mm_dtype t) { return t == MM_BF16 || t == MM_F16 || t == MM_F32; }

static bool dtype_is_readable(const mm_hf *hf, const mm_hf_tensor *t, const mm_rule *r, mm_err *err) {
  if (is_plain(t->dtype) || (t->dtype == MM_F8_E4M3 && (r->kind == MM_KIND_LINEAR || r->kind == MM_KIND_EXPERT))) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_DTYPE", mm_at(hf->file[t->file].path, t->original), "found %s, expected BF16, F16%s",
                 mm_dtype_name(t->dtype),
                 r->kind == MM_KIND_LINEAR || r->kind == MM_KIND_EXPERT ? ", F32 or F8_E4M3 with block scales" : " or F32");
}

static mm_hf_tensor *scale_of(const mm_hf *hf, const mm_hf_tensor *t) {
  char name[NAME_MAX_LEN + 16];
  snprintf(name, sizeof name, "%s_scale_inv", t->name);
  return mm_hf_find(hf, name);
}

/* The block scale of an FP8 tensor; shape [E?, Σ⌈rows/bn⌉, ⌈cols/bk⌉]. */
static bool find_scale(mm_hf *hf, const mm_model *m, const mm_rule *const *piece, unsigned pieces, unsigned i, uint32_t expert, bool fused,
                       mm_matrix *out, mm_err *err) {
  const mm_hf_tensor *w = out->weight;
  const char *path = hf->file[w->file].path;
  if (hf->block.n == 0)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_CONFIG", mm_at(path, w->original),
                   "found F8_E4M3, but %s declares no quantization_config with weight_block_size", hf->config_path);
  mm_hf_tensor *s = scale_of(hf, w);
  if (!s)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_MISSING", mm_at(path, w->original), "found F8_E4M3 without a scale, expected \"%s_scale_inv\"",
                   w->original);
  uint64_t before = 0, rows = mm_ceil_div(out->rows, hf->block.n), all = rows, cols = mm_ceil_div(out->cols, hf->block.k);
  if (fused) extents(m, piece, pieces, i, hf->block.n, &before, &all);
  mm_shape want = fused && mm_rule_stacks(piece[i]) ? mm_shape3(m->experts, all, cols) : mm_shape2(all, cols);
  if (hf->names_only) assume(s, want, MM_F32);
  if (!shape_is(hf, s, want, "E_Q_SHAPE", err)) return false;
  if (s->dtype != MM_F32 && s->dtype != MM_BF16 && s->dtype != MM_F8_E8M0 && s->dtype != MM_U8)
    return mm_fail(err, MM_BAD_INPUT, "E_Q_DTYPE", mm_at(hf->file[s->file].path, s->original),
                   "found a scale of %s, expected F32, BF16 or F8_E8M0", mm_dtype_name(s->dtype));
  s->used = true;
  out->scale = s;
  out->scale_at = ((fused && mm_rule_stacks(piece[i]) ? expert * all : 0) + before) * cols * mm_dtype_size(s->dtype);
  return true;
}

mm_found mm_hf_matrix(mm_hf *hf, const mm_model *m, const mm_rule *const *piece, unsigned pieces, unsigned i, uint32_t layer,
                      uint32_t expert, mm_matrix *out, mm_err *err) {
  const mm_rule *r = piece[i];
  char name[NAME_MAX_LEN];
  *out = (mm_matrix){.rows = mm_dim_extent(r->rows, m), .cols = mm_dim_extent(r->cols, m)};
  mm_hf_tensor *own = mm_hf_find(hf, mm_rule_name(name, sizeof name, r->theirs, layer, expert)), *whole = NULL;
  bool stacks = mm_rule_stacks(r);
  if (pieces > 1 || stacks) whole = mm_hf_find(hf, mm_rule_name(name, sizeof name, r->ours, layer, 0));
  if (!own && !whole) return MM_ABSENT;
  if (own && whole) {
    mm_fail(err, MM_BAD_INPUT, "E_DUP_TENSOR", mm_at(hf->file[own->file].path, own->original), "found again inside \"%s\" in %s",
            whole->original, hf->file[whole->file].name);
    return MM_FAILED;
  }
  mm_hf_tensor *t = own ? own : whole;
  bool fused = t == whole;
  uint64_t before = 0, all = out->rows;
  if (fused) extents(m, piece, pieces, i, 1, &before, &all);
  mm_shape want = r->cols == MM_DIM_NONE ? mm_shape1(out->rows)
                  : fused && stacks      ? mm_shape3(m->experts, all, out->cols)
                                         : mm_shape2(all, out->cols);
  if (hf->names_only) assume(t, want, r->rows == MM_DIM_EXPERTS ? MM_F32 : scale_of(hf, t) ? MM_F8_E4M3 : MM_BF16);
  if (!shape_is(hf, t, want, "E_SHAPE", err) || !dtype_is_readable(hf, t, r, err)) return MM_FAILED;
  t->used = true;
  out->weight = t;
  out->at = ((fused && stacks ? expert * all : 0) + before) * out->cols * mm_dtype_size(t->dtype);
  if (t->dtype == MM_F8_E4M3 && !find_scale(hf, m, piece, pieces, i, expert, fused, out, err)) return MM_FAILED;
  return MM_FOUND;
}

static bool ends_with(const char *s, const char *end) {
  size_t n = strlen(s), k = strlen(end);
  return n >= k && strcmp(s + n - k, end) == 0;
}

/* Buffers some exports carry and everyone recomputes, and layers past the last (multi-token prediction). */
static bool redundant(const char *name, const mm_model *m) {
  static const char *const buffer[] = {".rotary_emb.inv_freq", ".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"};
  for (size_t i = 0; i < sizeof buffer / sizeof *buffer; i++)
    if (ends_with(name, buffer[i])) return true;
  static const char before[] = "model.layers.";
  if (strncmp(name, before, sizeof before - 1) != 0) return false;
  const char *number = name + sizeof before - 1;
  size_t n = strspn(number, "0123456789");
  return n > 0 && n < 10 && number[0] != '0' && number[n] == '.' && strtoul(number, NULL, 10) >= m->layers;
}

bool mm_hf_all_used(const mm_hf *hf, const mm_model *m, mm_err *err) {
  const mm_hf_tensor *first = NULL;
  size_t more = 0;
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const mm_hf_tensor *t = &hf->tensor[i];
    if (t->used || redundant(t->name, m)) continue;
    if (first) more++;
    if (!first) first = t;
  }
  if (!first) return true;
  bool scale = ends_with(first->name, "_scale_inv");
  return mm_fail(err, MM_BAD_INPUT, scale ? "E_Q_ORPHAN" : "E_UNKNOWN", mm_at(hf->file[first->file].path, first->original),
                 "found %s that this architecture does not have (and %zu more)",
                 scale ? "a scale without its FP8 weight, or a tensor" : "a tensor", more);
}
