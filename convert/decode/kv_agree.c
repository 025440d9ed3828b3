/* One scale of a KV cache for keys and values next to one of their own. */
#include "convert/decode/kv_agree.h"

#include <string.h>

#include "quant/numbers.h"

static bool read_number(mm_decoder *d, const mm_hf_tensor *t, uint64_t i, float *out, mm_err *err) {
  const size_t each = mm_dtype_size(t->dtype);
  uint32_t stored = 0;
  return mm_hf_read(&d->reader, t, i * each, &stored, each, err) && mm_widen(out, &stored, t->dtype, 1);
}

#define ATTN "model.layers.{l}.self_attn."

/* True for one number, or one for each head, in a type of plain numbers. */
static bool check_form(const mm_hf *hf, const mm_hf_tensor *t, uint32_t heads, uint64_t *n, mm_err *err) {
  char shape[128];
  if (!mm_scheme_plain(t->dtype))
    return mm_fail(err, MM_BAD_INPUT, "E_DTYPE", mm_hf_at(hf, t), "found %s, expected F32, BF16 or F16", mm_dtype_name(t->dtype));
  if (mm_shape_count(&t->shape, n) && (*n == 1 || *n == heads)) return true;
  return mm_fail(err, MM_BAD_INPUT, "E_SHAPE", mm_hf_at(hf, t), "found shape %s, expected one number or one for each of %u heads",
                 mm_shape_text(&t->shape, shape, sizeof shape), heads);
}

static bool same_numbers(mm_decoder *d, const mm_hf_tensor *shared, const mm_hf_tensor *own, uint32_t heads, mm_err *err) {
  const mm_hf *hf = d->reader.hf;
  uint64_t n = 0, m = 0;
  if (!check_form(hf, shared, heads, &n, err) || !check_form(hf, own, heads, &m, err)) return false;
  if (hf->names_only) return true;
  for (uint64_t i = 0; i < n || i < m; i++) {
    float a = 0, b = 0;
    if (!read_number(d, shared, n == 1 ? 0 : i, &a, err) || !read_number(d, own, m == 1 ? 0 : i, &b, err)) return false;
    if (a == b) continue;
    return mm_fail(err, MM_BAD_INPUT, "E_DUP_TENSOR", mm_hf_at(hf, shared),
                   "found %g for the keys and values of head %u, expected %g as \"%s\" has; --kv-scales drop leaves both out", (double)a,
                   (unsigned)i, (double)b, MM_ESCAPED(256, own->original));
  }
  return true;
}

static mm_hf_tensor *find(const mm_hf *hf, const char *pattern, uint32_t layer) {
  char name[256];
  return mm_hf_find(hf, mm_rule_name(name, sizeof name, pattern, layer, 0));
}

bool mm_kv_scales_agree(mm_decoder *d, mm_hf *hf, uint32_t layer, uint32_t heads, bool drop, mm_err *err) {
  static const char *const own[] = {ATTN "k_scale", ATTN "v_scale"};
  mm_hf_tensor *shared = find(hf, ATTN "kv_scale", layer);
  for (size_t i = 0; shared && i < sizeof own / sizeof *own; i++) {
    const mm_hf_tensor *t = find(hf, own[i], layer);
    if (!t) continue;
    shared->used = true;
    if (drop || hf->manifest) continue; /* a packed checkpoint was made from one that agreed */
    if (hf->follow)
      return mm_fail(err, MM_UNSUPPORTED, "E_FOLLOW", mm_hf_at(hf, shared),
                     "found scales of a KV cache twice, whose numbers the plan needs: convert the whole download without --follow");
    if (!same_numbers(d, shared, t, heads, err)) return false;
  }
  return true;
}
