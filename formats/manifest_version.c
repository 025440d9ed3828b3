/* The version of a manifest, and the keys that versions 3 to 5 have in it. */
#include "formats/manifest_version.h"

#include <string.h>

bool mm_manifest_version(const mm_json *root, const char *wanted, int newest, int64_t *version, const mm_json_ctx *c, mm_err *err) {
  const char *format;
  if (mm_json_type_of(root) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found %s, expected an object", MM_SHOWN_JSON(root));
  if (!mm_json_need_str(root, "format", &format, c, err)) return false;
  if (strcmp(format, wanted) != 0)
    return mm_fail(err, MM_UNSUPPORTED, "E_VERSION", mm_at(c->file, NULL), "found format \"%s\", expected \"%s\"", MM_ESCAPED(128, format),
                   wanted);
  if (!mm_json_need_int(root, "version", INT64_MIN, INT64_MAX, version, c, err)) return false;
  if (*version >= MM_PACK_VERSION && *version <= newest) return true;
  return mm_fail(err, MM_UNSUPPORTED, "E_VERSION", mm_at(c->file, NULL), "found format version %lld, expected %s", (long long)*version,
                 newest > MM_PACK_VERSION ? "1, 2, 3, 4 or 5" : "1");
}

bool mm_manifest_right_version(const mm_pack *p, int64_t version, const mm_json_ctx *c, mm_err *err) {
  const int right = mm_pack_version(p);
  if (version == right) return true;
  if (version == MM_PACK_VERSION5 || right == MM_PACK_VERSION5)
    return MM_REFUSE(c, err, "key \"version\": found %lld, expected %d, as tensors have %s global_steps", (long long)version, right,
                     right == MM_PACK_VERSION5 ? "the key" : "no key");
  if (version == MM_PACK_VERSION4 || right == MM_PACK_VERSION4)
    return MM_REFUSE(c, err, "key \"version\": found %lld, expected %d, as %s", (long long)version, right,
                     right != MM_PACK_VERSION4 ? "no experts are placed and attention has no groups"
                     : p->attn_tp              ? "attention has groups of ranks"
                                               : "experts are placed");
  if (version == MM_PACK_VERSION3 || right == MM_PACK_VERSION3)
    return MM_REFUSE(c, err, "key \"version\": found %lld, expected %d, as the model has %s keys of version 3", (long long)version, right,
                     right == MM_PACK_VERSION3 ? "the" : "no");
  return MM_REFUSE(c, err, "key \"version\": found %lld, expected %d, as planes have %s grid", (long long)version, right,
                   version == MM_PACK_VERSION ? "a" : "no");
}

static bool read_entry(mm_pack *p, const mm_json *j, mm_left_out *out, const mm_json_ctx *c, mm_err *err) {
  static const char *const keys[] = {"prefix", "tensors", "bytes", NULL};
  const char *prefix;
  int64_t tensors, bytes;
  if (mm_json_type_of(j) != MM_JSON_OBJ)
    return MM_REFUSE(c, err, "key \"left_out\": found %s, expected a list of objects", MM_SHOWN_JSON(j));
  if (!mm_json_only_keys(j, keys, c, err) || !mm_json_need_str(j, "prefix", &prefix, c, err) ||
      !mm_json_need_int(j, "tensors", 1, UINT32_MAX, &tensors, c, err) || !mm_json_need_int(j, "bytes", 0, INT64_MAX, &bytes, c, err))
    return false;
  if (!prefix[0]) return MM_REFUSE(c, err, "key \"prefix\": found an empty string, expected text");
  *out = (mm_left_out){mm_arena_strndup(&p->arena, prefix, strlen(prefix), err), (uint64_t)tensors, (uint64_t)bytes};
  return out->prefix;
}

bool mm_manifest_left_out(mm_pack *p, const mm_json *root, const mm_json_ctx *c, mm_err *err) {
  const mm_json *list = mm_json_need(root, "left_out", MM_JSON_ARR, c, err);
  if (!list) return false;
  if (mm_json_size(list) > MM_LEFT_OUT_MAX)
    return MM_REFUSE(c, err, "key \"left_out\": found %zu entries, expected at most %d", mm_json_size(list), MM_LEFT_OUT_MAX);
  for (; p->left_out_count < mm_json_size(list); p->left_out_count++) {
    mm_left_out *x = &p->left_out[p->left_out_count];
    if (!read_entry(p, mm_json_at(list, p->left_out_count), x, c, err)) return false;
    if (p->left_out_count > 0 && strcmp(x[-1].prefix, x->prefix) >= 0)
      return MM_REFUSE(c, err, "key \"left_out\": found other prefixes, expected them in ascending order");
  }
  return true;
}

bool mm_manifest_no_left_out(const mm_json *root, const mm_json_ctx *c, mm_err *err) {
  return !mm_json_get(root, "left_out") ||
         MM_REFUSE(c, err, "key \"left_out\": found it, expected none as the model has no keys of version 3");
}

bool mm_manifest_experts(mm_pack *p, mm_pack_tensor *t, const mm_json *j, const mm_json_ctx *c, mm_err *err) {
  uint32_t expert[MM_MAX_EXPERTS];
  bool permutes = true;
  if (!mm_json_get(j, "experts")) return true;
  const mm_json *list = mm_json_need(j, "experts", MM_JSON_ARR, c, err);
  if (!list) return false;
  if (t->lead == t->whole_lead || t->whole_lead > MM_MAX_EXPERTS)
    return MM_REFUSE(c, err, "key \"experts\": found it with %u of %u experts on a rank, expected fewer than all", t->lead, t->whole_lead);
  if (mm_json_size(list) != t->whole_lead)
    return MM_REFUSE(c, err, "key \"experts\": found %zu entries, expected %u", mm_json_size(list), t->whole_lead);
  for (uint32_t i = 0; i < t->whole_lead; i++) {
    const mm_json *e = mm_json_at(list, i);
    const bool valid = mm_json_type_of(e) == MM_JSON_INT && mm_json_int(e) >= 0 && mm_json_int(e) < t->whole_lead;
    expert[i] = valid ? (uint32_t)mm_json_int(e) : UINT32_MAX;
  }
  if (!mm_pack_set_order(p, t, expert, &permutes, err)) return false;
  return permutes || MM_REFUSE(c, err, "key \"experts\": found other numbers, expected each from 0 to %u once", t->whole_lead - 1);
}

/* [expert, piece, steps] into *out. */
static bool read_step(const mm_pack_tensor *t, const mm_json *j, mm_global_step *out, const mm_json_ctx *c, mm_err *err) {
  const uint32_t experts = t->whole_lead ? t->whole_lead : 1;
  int64_t v[3] = {0};
  bool valid = mm_json_type_of(j) == MM_JSON_ARR && mm_json_size(j) == 3;
  for (size_t k = 0; valid && k < 3; k++) {
    valid = mm_json_type_of(mm_json_at(j, k)) == MM_JSON_INT;
    if (valid) v[k] = mm_json_int(mm_json_at(j, k));
  }
  if (!valid || v[0] < 0 || v[0] >= experts || v[1] < 0 || v[1] >= t->piece_count || (v[2] != 1 && v[2] != -1))
    return MM_REFUSE(c, err, "key \"global_steps\": found %s, expected entries of an expert below %u, a piece below %u, and 1 or -1",
                     MM_SHOWN_JSON(j), experts, t->piece_count);
  *out = (mm_global_step){(uint32_t)v[0], (uint32_t)v[1], (int32_t)v[2]};
  return true;
}

bool mm_manifest_global_steps(mm_pack *p, mm_pack_tensor *t, const mm_json *j, const mm_json_ctx *c, mm_err *err) {
  if (!mm_json_get(j, "global_steps")) return true;
  const mm_json *list = mm_json_need(j, "global_steps", MM_JSON_ARR, c, err);
  if (!list) return false;
  if (t->plane_count != 3 || mm_json_size(list) == 0)
    return MM_REFUSE(c, err, "key \"global_steps\": found %zu entries in a tensor of %u planes, expected some in one of 3",
                     mm_json_size(list), t->plane_count);
  t->step = mm_arena_alloc(&p->arena, mm_json_size(list) * sizeof *t->step, err);
  if (!t->step) return false;
  for (; t->step_count < mm_json_size(list); t->step_count++) {
    mm_global_step *s = &t->step[t->step_count];
    if (!read_step(t, mm_json_at(list, t->step_count), s, c, err)) return false;
    if (t->step_count > 0 && (s[-1].expert > s->expert || (s[-1].expert == s->expert && s[-1].piece >= s->piece)))
      return MM_REFUSE(c, err, "key \"global_steps\": found other entries, expected them in ascending order of experts and pieces");
  }
  return true;
}

bool mm_manifest_attn_tp(mm_pack *p, const mm_json *parallel, const mm_json_ctx *c, mm_err *err) {
  int64_t n;
  if (!mm_json_get(parallel, "attn_tp")) return true;
  if (!mm_json_need_int(parallel, "attn_tp", 1, UINT32_MAX, &n, c, err)) return false;
  if (n >= p->tp || p->tp % n != 0)
    return MM_REFUSE(c, err, "key \"attn_tp\": found %lld, expected a divisor of tp %u below it", (long long)n, p->tp);
  p->attn_tp = (uint32_t)n;
  return true;
}
