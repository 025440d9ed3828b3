/* Reading a draft: config, names and shapes, mapping. */
#include "loader/dflash.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "formats/hash.h"
#include "formats/json.h"

/* ---- the config ---- */

enum { DFLASH = 1 << MM_DRAFT_DFLASH, EAGLE3 = 1 << MM_DRAFT_EAGLE3, BOTH = DFLASH | EAGLE3 };

static const struct number {
  const char *key;
  size_t at;
  uint32_t hi;
  int kinds;
} numbers[] = {{"layers", offsetof(mm_dflash_config, layers), MM_DFLASH_LAYERS, BOTH},
               {"hidden", offsetof(mm_dflash_config, hidden), 1 << 16, BOTH},
               {"heads", offsetof(mm_dflash_config, heads), 1 << 10, BOTH},
               {"kv_heads", offsetof(mm_dflash_config, kv_heads), 1 << 10, BOTH},
               {"head_dim", offsetof(mm_dflash_config, head_dim), 1 << 10, BOTH},
               {"intermediate", offsetof(mm_dflash_config, intermediate), 1 << 17, BOTH},
               {"block", offsetof(mm_dflash_config, block), MM_DFLASH_BLOCK, DFLASH},
               {"mask_id", offsetof(mm_dflash_config, mask_id), INT32_MAX, DFLASH},
               {"vocab", offsetof(mm_dflash_config, vocab), INT32_MAX, EAGLE3},
               {"draft_vocab", offsetof(mm_dflash_config, draft_vocab), INT32_MAX, EAGLE3}};
static const struct flag {
  const char *key;
  size_t at;
} flags[] = {{"d2t", offsetof(mm_dflash_config, mapped)},
             {"embed_tokens", offsetof(mm_dflash_config, own_embed)},
             {"fc_norm", offsetof(mm_dflash_config, tap_norms)},
             {"norm_output", offsetof(mm_dflash_config, norm_output)},
             {"norm_before_residual", offsetof(mm_dflash_config, norm_before_residual)}};
enum { NUMBERS = sizeof numbers / sizeof *numbers, FLAGS = sizeof flags / sizeof *flags };

static uint32_t *number_of(const mm_dflash_config *c, size_t i) { return (uint32_t *)(void *)((char *)(uintptr_t)c + numbers[i].at); }
static bool *flag_of(const mm_dflash_config *c, size_t i) { return (bool *)(void *)((char *)(uintptr_t)c + flags[i].at); }
static bool has(const mm_dflash_config *c, size_t i) { return numbers[i].kinds & 1 << c->kind; }

char *mm_dflash_text(const mm_dflash_config *c, mm_err *err) {
  const bool eagle = c->kind == MM_DRAFT_EAGLE3;
  mm_json *o = MM_JSON_NEW({"kind", mm_json_new_str(eagle ? "eagle3" : "dflash")});
  for (size_t i = 0; i < NUMBERS; i++)
    if (has(c, i)) mm_json_put_int(o, numbers[i].key, *number_of(c, i));
  MM_JSON_PUT(o, {"norm_eps", mm_json_new_real(c->norm_eps)}, {"rope_theta", mm_json_new_real(c->rope_theta)});
  mm_json *tap = mm_json_put_list(o, "taps");
  for (uint32_t i = 0; i < c->taps; i++) mm_json_append(tap, mm_json_new_int(c->tap[i]));
  for (size_t i = 0; eagle && i < FLAGS; i++) MM_JSON_PUT(o, {flags[i].key, mm_json_new_bool(*flag_of(c, i))});
  if (c->quant) mm_json_put_text(o, "quant", c->quant->name);
  if (eagle) return mm_json_text(o, false, err);
  mm_json *window = mm_json_put_list(o, "windows"), *causal = mm_json_put_list(o, "causal");
  for (uint32_t l = 0; l < c->layers; l++) {
    mm_json_append(window, mm_json_new_int(c->window[l]));
    mm_json_append(causal, mm_json_new_bool(c->causal[l]));
  }
  return mm_json_text(o, false, err);
}

static bool refuse(mm_err *err, mm_status status, const char *path, const char *what, int64_t found, const char *expected) {
  return mm_fail(err, status, "E_DRAFT", mm_at(path, NULL), "%s: found %lld, expected %s", what, (long long)found, expected);
}

/* Fills count[n ≤ most] of an array's integers below hi. */
static bool read_list(const mm_json *a, const char *key, uint32_t *out, uint32_t n, int64_t hi, const char *path, mm_status status,
                      mm_err *err) {
  for (uint32_t i = 0; i < n; i++) {
    const mm_json *v = mm_json_at(a, i);
    if (mm_json_type_of(v) != MM_JSON_INT || mm_json_int(v) < 0 || mm_json_int(v) >= hi)
      return mm_fail(err, status, "E_DRAFT", mm_at(path, NULL), "%s: found another entry %u, expected an integer from 0 to %lld", key, i,
                     (long long)hi - 1);
    out[i] = (uint32_t)mm_json_int(v);
  }
  return true;
}

static bool read_taps(mm_dflash_config *c, const mm_json *o, const mm_json_ctx *at, mm_status status, mm_err *err) {
  const mm_json *tap = mm_json_need(o, "taps", MM_JSON_ARR, at, err);
  if (!tap) return false;
  c->taps = (uint32_t)mm_min(mm_json_size(tap), MM_DFLASH_TAPS + 1);
  if (!c->taps || c->taps > MM_DFLASH_TAPS) return refuse(err, status, at->file, "taps", c->taps, "1 to 8");
  return read_list(tap, "taps", c->tap, c->taps, MM_MAX_LAYERS, at->file, status, err);
}

/* Windows and causality of a DFlash draft's layers. */
static bool read_layers(mm_dflash_config *c, const mm_json *o, const mm_json_ctx *at, mm_status status, mm_err *err) {
  const mm_json *window = mm_json_need(o, "windows", MM_JSON_ARR, at, err), *causal = mm_json_need(o, "causal", MM_JSON_ARR, at, err);
  if (!window || !causal) return false;
  if (mm_json_size(window) != c->layers || mm_json_size(causal) != c->layers)
    return refuse(err, status, at->file, "windows and causal", (int64_t)mm_json_size(window), "one entry a layer");
  for (uint32_t l = 0; l < c->layers; l++) {
    const mm_json *v = mm_json_at(causal, l);
    if (mm_json_type_of(v) != MM_JSON_BOOL)
      return mm_fail(err, status, "E_DRAFT", mm_at(at->file, NULL), "causal: found another entry %u, expected true or false", l);
    c->causal[l] = mm_json_bool(v);
  }
  return read_list(window, "windows", c->window, c->layers, INT32_MAX, at->file, status, err);
}

static bool read_flags(mm_dflash_config *c, const mm_json *o, const mm_json_ctx *at, mm_err *err) {
  for (size_t i = 0; i < FLAGS; i++) {
    const mm_json *v = mm_json_need(o, flags[i].key, MM_JSON_BOOL, at, err);
    if (!v) return false;
    *flag_of(c, i) = mm_json_bool(v);
  }
  c->block = 1 + MM_EAGLE_CHAIN, c->causal[0] = true;
  return true;
}

const mm_scheme *mm_dflash_scheme(const char *word) {
  const mm_scheme *s = mm_scheme_find(word);
  return s && (strcmp(s->name, "block_fp8") == 0 || strcmp(s->name, "channel_fp8") == 0) ? s : NULL;
}

/* The scheme of the matrices, if the file names one. */
static bool read_quant(mm_dflash_config *c, const mm_json *o, const mm_json_ctx *at, mm_err *err) {
  const char *word;
  if (mm_json_type_of(mm_json_get(o, "quant")) == MM_JSON_NULL) return true;
  if (!mm_json_need_str(o, "quant", &word, at, err)) return false;
  c->quant = mm_dflash_scheme(word);
  return c->quant ||
         mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(at->file, NULL), "quant: found \"%s\", expected %s", word, MM_DFLASH_QUANTS);
}

static bool read_config(mm_dflash_config *c, const mm_json *o, const mm_json_ctx *at, mm_status status, mm_err *err) {
  static const char *const dflash[] = {"kind",    "layers",   "hidden",     "heads", "kv_heads", "head_dim", "intermediate", "block",
                                       "mask_id", "norm_eps", "rope_theta", "taps",  "windows",  "causal",   "quant",        NULL};
  static const char *const eagle[] = {"kind",
                                      "layers",
                                      "hidden",
                                      "heads",
                                      "kv_heads",
                                      "head_dim",
                                      "intermediate",
                                      "vocab",
                                      "draft_vocab",
                                      "norm_eps",
                                      "rope_theta",
                                      "taps",
                                      "d2t",
                                      "embed_tokens",
                                      "fc_norm",
                                      "norm_output",
                                      "norm_before_residual",
                                      "quant",
                                      NULL};
  const char *kind;
  if (!mm_json_need_str(o, "kind", &kind, at, err)) return false;
  c->kind = strcmp(kind, "eagle3") == 0 ? MM_DRAFT_EAGLE3 : MM_DRAFT_DFLASH;
  if (c->kind == MM_DRAFT_DFLASH && strcmp(kind, "dflash") != 0)
    return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(at->file, NULL), "kind: found \"%s\", expected dflash or eagle3", kind);
  if (!mm_json_only_keys(o, c->kind == MM_DRAFT_EAGLE3 ? eagle : dflash, at, err)) return false;
  for (size_t i = 0; i < NUMBERS; i++) {
    int64_t v;
    if (!has(c, i)) continue;
    if (!mm_json_need_int(o, numbers[i].key, strcmp(numbers[i].key, "mask_id") != 0, numbers[i].hi, &v, at, err)) return false;
    *number_of(c, i) = (uint32_t)v;
  }
  return read_quant(c, o, at, err) && mm_json_need_number(o, "norm_eps", &c->norm_eps, at, err) &&
         mm_json_need_number(o, "rope_theta", &c->rope_theta, at, err) && read_taps(c, o, at, status, err) &&
         (c->kind == MM_DRAFT_EAGLE3 ? read_flags(c, o, at, err) : read_layers(c, o, at, status, err));
}

static bool check_config(const mm_dflash_config *c, const char *path, mm_status status, mm_err *err) {
  if (!c->kv_heads || c->heads % c->kv_heads) return refuse(err, status, path, "heads", c->heads, "a multiple of kv_heads");
  if (c->head_dim % 2) return refuse(err, status, path, "head_dim", c->head_dim, "an even number");
  if (c->block < 2) return refuse(err, status, path, "block", c->block, "2 or more");
  if (c->kind == MM_DRAFT_EAGLE3 && c->layers != 1) return refuse(err, MM_UNSUPPORTED, path, "layers of an EAGLE-3 draft", c->layers, "1");
  if (c->kind == MM_DRAFT_EAGLE3 && (c->draft_vocab > c->vocab || (c->draft_vocab < c->vocab && !c->mapped)))
    return refuse(err, status, path, "draft_vocab", c->draft_vocab, "vocab, or fewer ids and d2t");
  for (uint32_t i = 1; i < c->taps; i++)
    if (c->tap[i] <= c->tap[i - 1]) return refuse(err, status, path, "taps", c->tap[i], "ascending layers");
  if (!(c->norm_eps > 0 && c->norm_eps < 1) || !(c->rope_theta >= 1 && c->rope_theta < 1e30))
    return mm_fail(err, status, "E_DRAFT", mm_at(path, NULL),
                   "norm_eps and rope_theta: found %g and %g, expected 0 < eps < 1 <= theta < 1e30", c->norm_eps, c->rope_theta);
  return true;
}

bool mm_dflash_parse(mm_dflash_config *c, const char *text, const char *path, mm_status status, mm_err *err) {
  *c = (mm_dflash_config){0};
  const mm_json_ctx at = {.file = path, .status = status, .code = "E_DRAFT"};
  mm_err reason = {0};
  mm_json *o = mm_json_parse(text, strlen(text), path, &reason);
  if (!o) return status == MM_INTEGRITY ? mm_fail_damaged(err, &reason) : mm_fail_as(err, &reason);
  const bool ok = read_config(c, o, &at, status, err) && check_config(c, path, status, err) && mm_dflash_fits_quant(c, path, status, err);
  mm_json_free(o);
  return ok;
}

bool mm_dflash_fits(const mm_dflash_config *c, const char *path, const mm_model *target, mm_status status, mm_err *err) {
  for (uint32_t l = 0; l < target->layers; l++)
    if (target->attn[l] != MM_ATTN_FULL)
      return refuse(err, MM_UNSUPPORTED, path, "a target whose attention is not full, layer", l, "full attention");
  if (target->norm_offset || target->activation != MM_ACTIVATION_SILU || target->postnorm)
    return refuse(err, MM_UNSUPPORTED, path, "a target with norms or an activation of another kind", 0, "those of MiniMax-M2");
  if (c->hidden != target->hidden) return refuse(err, status, path, "hidden of the draft", c->hidden, "the target's");
  if (c->mask_id >= target->vocab) return refuse(err, status, path, "mask_id", c->mask_id, "an id of the target");
  if (c->kind == MM_DRAFT_EAGLE3 && c->vocab != target->vocab)
    return refuse(err, status, path, "vocab of the draft", c->vocab, "the target's");
  /* What the reference reads after the last layer is normalised; a tap here is not. */
  if (c->tap[c->taps - 1] + 1 >= target->layers)
    return refuse(err, status, path, "the last tap", c->tap[c->taps - 1], "a layer before the target's last");
  return true;
}

/* ---- tensors ---- */

/* Adds a tensor to list[*n]. */
static void add(mm_dflash_tensor *list, uint32_t *n, const char *name, uint32_t rows, uint32_t cols, size_t at) {
  list[*n] = (mm_dflash_tensor){.rows = rows, .cols = cols, .at = at};
  snprintf(list[*n].name, sizeof list->name, "%s", name);
  (*n)++;
}

static void add_of_layer(mm_dflash_tensor *list, uint32_t *n, uint32_t l, const mm_dflash_tensor *t) {
  const char *name = MM_FORMATTED(sizeof t->name + 20, "layers.%u.%.60s", l, t->name);
  add(list, n, name, t->rows, t->cols, offsetof(mm_dflash, layer) + l * sizeof(mm_dflash_layer) + t->at);
  list[*n - 1].scheme = t->scheme;
}

/* All tensors of the draft, in their order: ids first, where they are aligned. */
static uint32_t list_tensors(const mm_dflash_config *c, mm_dflash_tensor list[MM_DFLASH_TENSORS]) {
  const uint32_t H = c->hidden, d = c->head_dim, I = c->intermediate;
  const bool eagle = c->kind == MM_DRAFT_EAGLE3;
  const mm_dflash_tensor each[] = {
      {"input_layernorm.weight", H, 0, offsetof(mm_dflash_layer, input_norm), false, NULL},
      {"post_attention_layernorm.weight", H, 0, offsetof(mm_dflash_layer, post_norm), false, NULL},
      {"self_attn.qkv_proj.weight", (c->heads + 2 * c->kv_heads) * d, eagle ? 2 * H : H, offsetof(mm_dflash_layer, qkv), false, c->quant},
      {"self_attn.o_proj.weight", H, c->heads * d, offsetof(mm_dflash_layer, out), false, c->quant},
      {"self_attn.q_norm.weight", d, 0, offsetof(mm_dflash_layer, q_norm), false, NULL},
      {"self_attn.k_norm.weight", d, 0, offsetof(mm_dflash_layer, k_norm), false, NULL},
      {"mlp.gate_up_proj.weight", 2 * I, H, offsetof(mm_dflash_layer, up), false, c->quant},
      {"mlp.down_proj.weight", H, I, offsetof(mm_dflash_layer, down), false, c->quant}};
  uint32_t n = 0;
  if (c->mapped) add(list, &n, "d2t", c->draft_vocab, 0, offsetof(mm_dflash, d2t)), list[0].ids = true;
  add(list, &n, "fc.weight", H, c->taps * H, offsetof(mm_dflash, fc)), list[n - 1].scheme = c->quant;
  add(list, &n, "hidden_norm.weight", H, 0, offsetof(mm_dflash, context_norm));
  add(list, &n, "norm.weight", H, 0, offsetof(mm_dflash, last_norm));
  if (eagle) add(list, &n, "lm_head.weight", c->draft_vocab, H, offsetof(mm_dflash, head));
  if (c->own_embed) add(list, &n, "embed_tokens.weight", c->vocab, H, offsetof(mm_dflash, embed));
  for (uint32_t i = 0; c->tap_norms && i < c->taps; i++) {
    add(list, &n, MM_FORMATTED(32, "fc_norm.%u.weight", i), H, 0, offsetof(mm_dflash, tap_norm) + i * sizeof(mm_packed));
  }
  for (uint32_t l = 0; l < c->layers; l++)
    for (uint32_t k = 0; k < sizeof each / sizeof *each; k++)
      if (!eagle || (k != 4 && k != 5)) add_of_layer(list, &n, l, &each[k]);
  return n;
}

bool mm_dflash_tensor_at(const mm_dflash_config *c, uint32_t i, mm_dflash_tensor *out) {
  mm_dflash_tensor list[MM_DFLASH_TENSORS];
  if (i >= list_tensors(c, list)) return false;
  *out = list[i];
  return true;
}

bool mm_dflash_stored_at(const mm_dflash_tensor *t, unsigned plane, mm_dtype kept, mm_dflash_stored *out) {
  if (plane >= (t->scheme ? t->scheme->plane_count : 1)) return false;
  const mm_plane *p = t->scheme ? &t->scheme->plane[plane] : NULL;
  *out = (mm_dflash_stored){.dtype = p ? p->dtype : t->ids ? MM_I64 : kept};
  snprintf(out->name, sizeof out->name, "%s%s", t->name, p ? p->suffix : "");
  const uint32_t rows = p ? mm_cells(t->rows, p->cell.n) : t->rows, cols = p ? mm_cells(t->cols, p->cell.k) : t->cols;
  out->shape = cols ? mm_shape2(rows, cols) : mm_shape1(rows);
  return true;
}

uint32_t mm_dflash_widest(const mm_dflash_config *c) {
  mm_dflash_tensor t;
  uint32_t most = 0;
  for (uint32_t i = 0; mm_dflash_tensor_at(c, i, &t); i++)
    if (t.scheme) most = (uint32_t)mm_max(most, t.cols);
  return most;
}

/* Codes are 8 to a load, and keys' and values' rows of qkv begin with a row of scales. */
bool mm_dflash_fits_quant(const mm_dflash_config *c, const char *path, mm_status status, mm_err *err) {
  enum { LOAD = 8 };
  mm_dflash_tensor t;
  for (uint32_t i = 0; mm_dflash_tensor_at(c, i, &t); i++) {
    if (!t.scheme) continue;
    const uint32_t q = t.at >= offsetof(mm_dflash, layer) && strstr(t.name, ".qkv_proj.") ? c->heads * c->head_dim : 0;
    const uint32_t block = t.scheme->plane[1].cell.n;
    if (t.cols % LOAD)
      return mm_fail(err, status, "E_DRAFT", mm_at(path, t.name), "found %u columns, expected a multiple of %u for %s", t.cols, LOAD,
                     t.scheme->name);
    if (q % block)
      return mm_fail(err, status, "E_DRAFT", mm_at(path, t.name), "found %u rows of queries, expected a multiple of %u for %s", q, block,
                     t.scheme->name);
  }
  return true;
}

bool mm_dflash_check_ids(const mm_dflash_config *c, const int64_t *step, const char *path, mm_status status, mm_err *err) {
  for (uint32_t i = 0; i < c->draft_vocab; i++)
    if (step[i] < -(int64_t)i || step[i] >= (int64_t)c->vocab - i)
      return mm_fail(err, status, "E_DRAFT", mm_at(path, "d2t"), "found %lld at %u, expected the step to an id below %u",
                     (long long)step[i], i, c->vocab);
  return true;
}

/* A number of `size` bytes, little endian, that is neither NaN nor infinite: not all bits of its exponent are set. E4M3, of one byte, has
 * NaN alone. */
static bool is_finite(const uint8_t *x, size_t size) {
  uint32_t v = 0;
  if (size == 1) return (*x & 0x7f) != 0x7f;
  for (size_t i = size; i-- > 0;) v = v << 8 | x[i];
  const uint32_t mask = size == 4 ? UINT32_C(0x7f800000) : 0x7f80;
  return (v & mask) != mask;
}

bool mm_dflash_finite(const mm_st_tensor *t, const uint8_t *data, const char *path, mm_status status, uint64_t *found, mm_err *err) {
  const size_t size = mm_dtype_size(t->dtype);
  const bool checked = t->dtype == MM_BF16 || t->dtype == MM_F32 || t->dtype == MM_F8_E4M3;
  for (uint64_t at = 0; checked && at < t->bytes; at += size) {
    if (is_finite(data + t->offset + at, size)) continue;
    if (!found)
      return mm_fail(err, status, "E_NONFINITE", mm_at_offset(path, t->name, t->offset + at),
                     "found NaN or infinity at element %llu, expected finite values", (unsigned long long)(at / size));
    ++*found;
  }
  return true;
}

void mm_dflash_zero(mm_dtype dtype, uint8_t *bytes, uint64_t n) {
  const size_t size = mm_dtype_size(dtype);
  for (uint64_t at = 0; (dtype == MM_BF16 || dtype == MM_F32) && at < n; at += size)
    if (!is_finite(bytes + at, size)) memset(bytes + at, 0, size);
}

/* Ids of the head, which become the target's. */
static bool bind_ids(mm_dflash *d, const mm_st_tensor *t, const mm_dflash_tensor *want, mm_err *err) {
  const mm_shape shape = mm_shape1(want->rows);
  if (t->dtype != MM_I64 || !mm_shape_equal(&t->shape, &shape) || t->offset % sizeof(int64_t))
    return mm_fail(err, MM_INTEGRITY, "E_DRAFT", mm_at(d->st.path, want->name), "found another type or shape, expected I64 [%u], aligned",
                   want->rows);
  const int64_t *step = (const int64_t *)(const void *)(d->map.data + t->offset);
  d->d2t = (mm_packed){.lead = 1, .n = want->rows, .k = 1, .plane = {step}};
  return mm_dflash_check_ids(&d->c, step, d->st.path, MM_INTEGRITY, err);
}

static bool bind_plane(mm_dflash *d, mm_packed *w, const mm_dflash_tensor *want, unsigned plane, mm_err *err) {
  mm_dflash_stored s;
  mm_dflash_stored_at(want, plane, MM_BF16, &s);
  const mm_st_tensor *t = mm_st_find(&d->st, s.name);
  if (!t) return mm_fail(err, MM_INTEGRITY, "E_DRAFT", mm_at(d->st.path, s.name), "found no such tensor, expected one as in its config");
  const mm_scheme *scheme = want->scheme                                ? t->dtype == s.dtype ? want->scheme : NULL
                            : t->dtype == MM_BF16 || t->dtype == MM_F32 ? mm_scheme_plain(t->dtype)
                                                                        : NULL;
  if (!scheme || !mm_shape_equal(&t->shape, &s.shape) || t->offset % mm_dtype_size(t->dtype)) {
    char found[80], expected[80];
    return mm_fail(err, MM_INTEGRITY, "E_DRAFT", mm_at(d->st.path, s.name), "found %s %s, expected %s %s, aligned", mm_dtype_name(t->dtype),
                   mm_shape_text(&t->shape, found, sizeof found), want->scheme ? mm_dtype_name(s.dtype) : "BF16 or F32",
                   mm_shape_text(&s.shape, expected, sizeof expected));
  }
  w->scheme = scheme;
  w->plane[plane] = d->map.data + t->offset;
  w->cell[plane] = scheme->plane[plane].cell;
  return true;
}

/* *count: tensors of the file so far. */
static bool bind(mm_dflash *d, const mm_dflash_tensor *want, uint32_t *count, mm_err *err) {
  const unsigned planes = want->scheme ? want->scheme->plane_count : 1;
  mm_packed *w = (mm_packed *)(void *)((char *)d + want->at);
  *count += planes;
  if (want->ids) {
    const mm_st_tensor *t = mm_st_find(&d->st, want->name);
    return t ? bind_ids(d, t, want, err)
             : mm_fail(err, MM_INTEGRITY, "E_DRAFT", mm_at(d->st.path, want->name), "found no such tensor, expected one as in its config");
  }
  *w = (mm_packed){.lead = 1, .n = want->rows, .k = want->cols ? want->cols : 1};
  for (unsigned p = 0; p < planes; p++)
    if (!bind_plane(d, w, want, p, err)) return false;
  return true;
}

static bool map_file(mm_dflash *d, const char *path, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  const bool ok = mm_file_open(&f, path, err) && mm_map_open(&d->map, &f, path, err);
  mm_file_close(&f);
  return ok;
}

/* The rows of keys and values of the layers' joined projections. */
static void find_kv(mm_dflash *d) {
  for (uint32_t l = 0; l < d->c.layers; l++) {
    mm_dflash_layer *y = &d->layer[l];
    const uint32_t q = d->c.heads * d->c.head_dim;
    y->kv = y->qkv;
    y->kv.n -= q;
    for (unsigned p = 0; p < y->qkv.scheme->plane_count; p++) {
      const mm_cell cell = y->qkv.cell[p];
      const size_t row = mm_cells(y->qkv.k, cell.k) * mm_dtype_size(y->qkv.scheme->plane[p].dtype);
      y->kv.plane[p] = (const char *)y->qkv.plane[p] + q / cell.n * row;
    }
  }
}

bool mm_dflash_open(mm_dflash *d, const char *dir, const mm_model *target, mm_err *err) {
  const mm_path path = mm_path_of(dir, MM_DFLASH_FILE);
  *d = (mm_dflash){0};
  bool ok = mm_file_listed(path.text, err) && mm_st_open(&d->st, path.text, MM_INTEGRITY, err) && map_file(d, path.text, err);
  const char *const text = ok ? mm_st_meta_find(&d->st, MM_DFLASH_KEY) : NULL;
  ok = ok &&
       (text || mm_fail(err, MM_INTEGRITY, "E_DRAFT", mm_at(path.text, NULL), "found no %s in its metadata, expected one", MM_DFLASH_KEY));
  ok = ok && text && mm_dflash_parse(&d->c, text, path.text, MM_INTEGRITY, err) &&
       mm_dflash_fits(&d->c, path.text, target, MM_INTEGRITY, err);
  mm_dflash_tensor t;
  uint32_t count = 0;
  for (uint32_t i = 0; ok && mm_dflash_tensor_at(&d->c, i, &t); i++) ok = bind(d, &t, &count, err);
  if (ok && d->st.count != count) ok = refuse(err, MM_INTEGRITY, path.text, "tensors", (int64_t)d->st.count, "those of its layers alone");
  if (ok) find_kv(d);
  if (!ok) mm_dflash_close(d);
  return ok;
}

bool mm_dflash_verify(const mm_dflash *d, const mm_pack_file *f, mm_err *err) {
  const mm_digest found = mm_sha256(d->map.data, d->map.size);
  return (d->map.size == f->size && mm_digest_equal(&found, &f->sha256)) ||
         mm_fail(err, MM_INTEGRITY, "E_DIGEST", mm_at(d->st.path, NULL), "found other contents, expected the manifest's sha256 %s",
                 mm_digest_hex(&f->sha256).text);
}

/* Scales are such that their scheme has. */
static bool check_scales(const mm_dflash *d, mm_err *err) {
  mm_dflash_tensor t;
  for (uint32_t i = 0; mm_dflash_tensor_at(&d->c, i, &t); i++) {
    const mm_packed *w = (const mm_packed *)(const void *)((const char *)d + t.at);
    const uint64_t scales = t.scheme ? mm_plane_elements(w->n, w->k, w->cell[1]) : 0;
    for (uint64_t j = 0; j < scales; j++) {
      const float v = mm_scale_value(t.scheme->plane[1].dtype, w->plane[1], j);
      if (!mm_scale_allowed(t.scheme, v))
        return mm_fail(err, MM_INTEGRITY, "E_SCALE", mm_at(d->st.path, t.name),
                       "found scale %g at element %llu, expected a positive number", (double)v, (unsigned long long)j);
    }
  }
  return true;
}

bool mm_dflash_check(const mm_pack *p, bool finite, mm_err *err) {
  if (!mm_pack_find_file(p, MM_DFLASH_FILE)) return true;
  mm_dflash *d = mm_calloc(1, sizeof *d, err);
  bool ok = d && mm_dflash_open(d, p->dir, &p->model, err);
  for (size_t i = 0; ok && finite && i < d->st.count; i++)
    ok = mm_dflash_finite(&d->st.tensor[i], d->map.data, d->st.path, MM_INTEGRITY, NULL, err);
  ok = ok && (!finite || check_scales(d, err));
  if (d) mm_dflash_close(d);
  free(d);
  return ok;
}

/* A tensor of mm_dflash_random at `made`, or NULL where its bytes alone are wanted, which are returned. */
static uint64_t make_random(mm_dflash *d, const mm_dflash_tensor *t, uint32_t i, char *made) {
  const mm_scheme *scheme = t->scheme ? t->scheme : mm_scheme_plain(MM_BF16);
  mm_packed w = {.scheme = scheme, .lead = 1, .n = t->rows, .k = t->cols ? t->cols : 1, .random = {.seed = i + 1, .centre = 1}};
  uint64_t bytes = 0;
  for (unsigned p = 0; p < scheme->plane_count; p++) w.cell[p] = scheme->plane[p].cell;
  for (unsigned p = 0; p < scheme->plane_count; p++) {
    const size_t size = t->ids ? sizeof(int64_t) : mm_dtype_size(scheme->plane[p].dtype);
    if (made && !t->ids) mm_random_plane(&w, p, made + bytes); /* ids are those of the target */
    if (made) w.plane[p] = made + bytes;
    bytes += mm_plane_elements(w.n, w.k, w.cell[p]) * size;
  }
  if (made) *(mm_packed *)(void *)((char *)d + t->at) = w;
  return mm_round_up(bytes, sizeof(int64_t));
}

bool mm_dflash_random(mm_dflash *d, const mm_dflash_config *c, mm_err *err) {
  mm_dflash_tensor t;
  *d = (mm_dflash){0};
  d->c = *c;
  uint64_t bytes = 0, at = 0;
  for (uint32_t i = 0; mm_dflash_tensor_at(c, i, &t); i++) bytes += make_random(d, &t, i, NULL);
  char *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return mm_fail_memory(err, bytes);
  d->map = (mm_map){(const uint8_t *)made, bytes};
  for (uint32_t i = 0; mm_dflash_tensor_at(c, i, &t); i++) at += make_random(d, &t, i, made + at);
  find_kv(d);
  return true;
}

void mm_dflash_close(mm_dflash *d) {
  mm_map_close(&d->map);
  mm_st_close(&d->st);
  *d = (mm_dflash){0};
}
