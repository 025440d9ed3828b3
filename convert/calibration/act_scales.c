/* Reading files of static activation scales, and finding what a packed tensor needs. */
#include "convert/calibration/act_scales.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "quant/numbers.h"

#define FILE_MOST (UINT64_C(16) << 30) /* a checkpoint's own file may be given */
#define JSON_MOST (UINT64_C(64) << 20)

static const struct {
  const char *end; /* behind the weight's name, or in place of its "weight" */
  bool whole, amax, reciprocal;
} kind[] = {
    {.end = ".amax", .whole = true, .amax = true},
    {.end = "activation_scale", .amax = true},
    {.end = "input_scale"},
    {.end = "input_global_scale", .reciprocal = true},
};
enum { KINDS = sizeof kind / sizeof *kind };

static bool known(const char *name) {
  size_t n = strlen(name);
  for (int i = 0; i < KINDS; i++) {
    size_t k = strlen(kind[i].end);
    if (n > k && strcmp(name + n - k, kind[i].end) == 0) return true;
  }
  return false;
}

static bool add(mm_act_scales *s, size_t *cap, const char *name, uint32_t index, double v, uint64_t offset, mm_err *err) {
  if (!(isfinite(v) && v >= 0))
    return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at_offset(s->path, name, offset), "found %g, expected a positive number", v);
  if (v > 0 && !(v >= 0x1p-126 && v <= 0x1p126)) /* so that its reciprocal is no subnormal number either */
    return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at_offset(s->path, name, offset),
                   "found %g, expected a number from 2^-126 to 2^126", v);
  if (!MM_GROW(s->number, cap, s->count + 1, err)) return false;
  const char *own = index ? s->number[s->count - 1].name : mm_arena_strndup(&s->arena, name, strlen(name), err);
  if (!own) return false;
  s->number[s->count++] = (mm_act_number){own, index, v, false};
  return true;
}

static bool read_safetensors(mm_act_scales *s, const uint8_t *data, uint64_t size, mm_err *err) {
  mm_st st = {0};
  size_t cap = 0;
  bool ok = mm_st_parse(&st, s->path, data, (size_t)size, size, MM_BAD_INPUT, err);
  for (size_t i = 0; ok && i < st.count; i++) {
    const mm_st_tensor *t = &st.tensor[i];
    uint64_t n = 0;
    if (!known(t->name)) continue;
    if (!mm_scheme_plain(t->dtype) || !mm_shape_count(&t->shape, &n) || n == 0 || n > 65536)
      ok = mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at_offset(s->path, t->name, t->offset), "found %s, expected F32, BF16 or F16",
                   mm_dtype_name(t->dtype));
    for (uint32_t j = 0; ok && j < n; j++) {
      uint32_t element;
      float v = 0;
      size_t each = mm_dtype_size(t->dtype);
      memcpy(&element, data + t->offset + j * each, each);
      ok = mm_widen(&v, &element, t->dtype, 1) && add(s, &cap, t->name, j, (double)v, t->offset + j * each, err);
    }
  }
  mm_st_close(&st);
  return ok;
}

static bool read_json(mm_act_scales *s, const uint8_t *data, uint64_t size, mm_err *err) {
  if (size > JSON_MOST)
    return mm_fail(err, MM_BAD_INPUT, "E_LIMIT", mm_at(s->path, NULL), "found %llu bytes of JSON, expected at most %llu",
                   (unsigned long long)size, (unsigned long long)JSON_MOST);
  mm_json *j = mm_json_parse((const char *)data, (size_t)size, s->path, err);
  size_t cap = 0;
  s->listed = true;
  bool ok = j;
  void *iter = NULL;
  const char *name;
  const mm_json *v;
  while (ok && mm_json_next(j, &iter, &name, &v)) {
    bool number = mm_json_type_of(v) == MM_JSON_INT || mm_json_type_of(v) == MM_JSON_REAL;
    ok = known(name) && number ? add(s, &cap, name, 0, mm_json_number(v), 0, err)
                               : mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, name),
                                         "found %s, expected a number under a name that ends in amax, activation_scale, input_scale or "
                                         "input_global_scale",
                                         MM_SHOWN_JSON(v));
  }
  mm_json_free(j);
  return ok;
}

/* The length of its header, then a brace; as the first eight bytes of JSON the length would be beyond any file. */
static bool is_safetensors(const uint8_t *data, uint64_t size) {
  uint64_t head;
  if (size <= sizeof head) return false;
  memcpy(&head, data, sizeof head);
  return head <= size - sizeof head && data[sizeof head] == '{';
}

static int by_place(const void *a, const void *b) {
  const mm_act_number *x = a, *y = b;
  int names = strcmp(x->name, y->name);
  return names ? names : (x->index > y->index) - (x->index < y->index);
}

bool mm_act_scales_open(mm_act_scales *s, const char *path, mm_err *err) {
  mm_file f = MM_FILE_NONE;
  mm_map map = {0};
  *s = (mm_act_scales){.path = path};
  bool ok =
      mm_file_open(&f, path, err) &&
      ((f.size > 0 && f.size <= FILE_MOST) || mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(path, NULL),
                                                      "found %llu bytes, expected 1 to 16 GiB", (unsigned long long)f.size)) &&
      mm_map_open(&map, &f, path, err) && (is_safetensors(map.data, map.size) ? read_safetensors : read_json)(s, map.data, map.size, err) &&
      (s->count > 0 ||
       mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(path, NULL),
               "found no scale of activations, expected names that end in amax, activation_scale, input_scale or input_global_scale"));
  if (ok) s->digest = mm_sha256(map.data, map.size);
  if (ok) qsort(s->number, s->count, sizeof *s->number, by_place);
  mm_map_close(&map);
  mm_file_close(&f);
  return ok;
}

bool mm_act_scales_make(mm_act_scales *s, const char *path, const mm_act_number *number, size_t count, mm_err *err) {
  size_t cap = 0;
  bool ok = true;
  *s = (mm_act_scales){.path = path};
  for (size_t i = 0; ok && i < count; i++) ok = add(s, &cap, number[i].name, 0, number[i].value, 0, err);
  if (ok) qsort(s->number, s->count, sizeof *s->number, by_place);
  return ok;
}

void mm_act_scales_close(mm_act_scales *s) {
  free(s->number);
  mm_arena_close(&s->arena);
  *s = (mm_act_scales){0};
}

/* ---- finding ---- */

static int by_key(const void *key, const void *n) {
  const mm_act_number *x = n;
  int names = strcmp(key, x->name);
  return names ? names : 0 - (int)(x->index > 0);
}

bool mm_act_scales_of_model(const mm_act_scales *s, const mm_model *m, mm_err *err) {
  for (size_t i = 0; i < s->count; i++) {
    const char *name = s->number[i].name;
    const bool layer = mm_name_past_layers(name, m), expert = mm_name_past_experts(name, m);
    if (layer ? s->listed || mm_ends_with(name, ".amax") : expert)
      return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, name),
                     "found a scale of another model, expected %u layers of %u experts", m->layers, m->experts);
    if (s->listed && !s->number[i].known)
      return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, name), "found the name of no tensor of this model, expected one");
  }
  return true;
}

/* The name of a weight's number of this kind. */
static void name_of(char out[320], const char *weight, int i) {
  if (kind[i].whole)
    snprintf(out, 320, "%s%s", weight, kind[i].end);
  else
    snprintf(out, 320, "%.*s%s", (int)(strlen(weight) - strlen("weight")), weight, kind[i].end);
}

/* Refuses two kinds of numbers of one weight of which one is another by more than rounding makes it. */
static bool agree(const mm_act_scales *s, const char *name, float v, const char *before, float was, mm_err *err) {
  static const float most = 1.05f;
  return !(v > 0) || !(was > 0) || (v <= most * was && was <= most * v) ||
         mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, name), "found a scale of %g, expected %g as of %s", (double)v,
                 (double)was, MM_ESCAPED(256, before));
}

/* The largest scale under the names of one matrix, or of a stack of `leads` times `pieces`, into *most; *found counts the numbers, zeros
 * left out. */
static bool look(const mm_act_scales *s, const char *weight, const mm_act_format *f, uint32_t leads, unsigned pieces, float *most,
                 uint32_t *found, mm_err *err) {
  char first[320] = "";
  float was = 0;
  for (int i = 0; i < KINDS; i++) {
    char name[320];
    uint32_t count = 0;
    float own = 0;
    name_of(name, weight, i);
    const mm_act_number *n = bsearch(name, s->number, s->count, sizeof *n, by_key);
    for (; n && n < s->number + s->count && strcmp(n->name, name) == 0; n++, count++) {
      float v = (float)n->value;
      if (!(v > 0)) continue;
      own = fmaxf(own, kind[i].amax ? mm_act_scale(f, v) : kind[i].reciprocal ? 1.0f / v : v);
      ++*found;
    }
    if (count > 1 && count != leads && count != leads * pieces)
      return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, name), "found %u scales, expected 1, %u or %u", count, leads,
                     leads * pieces);
    if (!agree(s, name, own, first, was, err)) return false;
    if (own > 0 && !(was > 0)) snprintf(first, sizeof first, "%s", name), was = own;
    *most = fmaxf(*most, own);
  }
  return true;
}

static void mark(const mm_act_scales *s, const char *weight) {
  for (int i = 0; i < KINDS && mm_ends_with(weight, "weight"); i++) {
    char name[320];
    name_of(name, weight, i);
    mm_act_number *n = bsearch(name, s->number, s->count, sizeof *n, by_key);
    for (; n && n < s->number + s->count && strcmp(n->name, name) == 0; n++) n->known = true;
  }
}

void mm_act_scales_mark(const mm_act_scales *s, const mm_pack_tensor *t, const mm_rule *const *rule, uint32_t layer, uint32_t experts) {
  char name[256];
  if (!s->listed) return;
  mark(s, t->name);
  for (uint32_t e = 0; e < (mm_rule_stacks(rule[0]) ? experts : 1); e++)
    for (unsigned i = 0; i < t->piece_count; i++) mark(s, mm_rule_name(name, sizeof name, rule[i]->theirs, layer, e));
}

bool mm_act_scales_find(const mm_act_scales *s, mm_pack_tensor *t, const mm_rule *const *rule, uint32_t layer, uint32_t experts,
                        const mm_scheme *scheme, uint64_t *without, mm_err *err) {
  float *const out = &t->input_scale;
  const mm_act_format *f = &mm_act_formats[scheme->act];
  uint32_t leads = mm_rule_stacks(rule[0]) ? experts : 1, found = 0;
  *out = 0;
  if (!look(s, t->name, f, leads, t->piece_count, out, &found, err)) return false;
  if (found == 0) {
    for (uint32_t e = 0; e < leads; e++) {
      uint32_t own = 0;
      char name[256];
      for (unsigned i = 0; i < t->piece_count; i++)
        if (!look(s, mm_rule_name(name, sizeof name, rule[i]->theirs, layer, e), f, 1, 1, out, &own, err)) return false;
      found += own > 0;
    }
  }
  if (found == 0 || !isfinite(*out) || !(*out > 0))
    return mm_fail(err, MM_BAD_INPUT, "E_ACT_SCALES", mm_at(s->path, t->name),
                   "found no scale for the inputs of this tensor, expected one above 0");
  if (found < leads) *without += leads - found;
  return true;
}
