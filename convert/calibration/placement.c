/* Greedy placement: longest processing time first (Graham 1969), with a limit on the experts of a group. */
#include "convert/calibration/placement.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LOAD_MAX (UINT64_C(64) << 20) /* bytes of a load file */

typedef struct ranked {
  double load;
  uint32_t expert;
} ranked;

/* Largest load first, then the lower id. */
static int by_load(const void *a, const void *b) {
  const ranked *x = a, *y = b;
  if (x->load != y->load) return x->load > y->load ? -1 : 1;
  return (x->expert > y->expert) - (x->expert < y->expert);
}

/* The largest load of a group whose experts are order[g·each …], or in order of their ids (NULL). */
static double fullest(const double *load, const uint32_t *order, uint32_t groups, uint32_t each) {
  double most = 0;
  for (uint32_t g = 0; g < groups; g++) {
    double sum = 0;
    for (uint32_t i = g * each; i < (g + 1) * each; i++) sum += load[order ? order[i] : i];
    most = fmax(most, sum);
  }
  return most;
}

typedef struct placed {
  ranked list[MM_MAX_EXPERTS];
  double sum[MM_MAX_EXPERTS];
  uint32_t held[MM_MAX_EXPERTS];
} placed;

static void place_layer(const double *load, uint32_t groups, uint32_t each, placed *p, uint32_t *order) {
  ranked *list = p->list;
  double *sum = p->sum;
  uint32_t *held = p->held;
  *p = (placed){0};
  for (uint32_t e = 0; e < groups * each; e++) list[e] = (ranked){load[e], e};
  qsort(list, groups * each, sizeof *list, by_load);
  for (uint32_t i = 0; i < groups * each; i++) {
    uint32_t best = groups;
    for (uint32_t g = 0; g < groups; g++)
      if (held[g] < each && (best == groups || sum[g] < sum[best])) best = g;
    order[best * each + held[best]++] = list[i].expert;
    sum[best] += list[i].load;
  }
  for (uint32_t g = 0; g < groups; g++) qsort(order + g * each, each, sizeof *order, mm_by_u32);
}

/* load[layers, experts] of the file, 0 or more each, not all 0. */
static bool read_loads(const mm_json *root, const mm_model *m, const mm_json_ctx *c, double *load, mm_err *err) {
  const mm_json *layers = mm_json_need(root, "load", MM_JSON_ARR, c, err);
  double all = 0;
  if (!layers) return false;
  if (mm_json_size(layers) != m->layers)
    return MM_REFUSE(c, err, "key \"load\": found %zu layers, expected %u of the model", mm_json_size(layers), m->layers);
  for (uint32_t l = 0; l < m->layers; l++) {
    const mm_json *row = mm_json_at(layers, l);
    if (mm_json_type_of(row) != MM_JSON_ARR || mm_json_size(row) != m->experts)
      return MM_REFUSE(c, err, "key \"load\": layer %u: found %zu experts, expected a list of %u", l, mm_json_size(row), m->experts);
    for (uint32_t e = 0; e < m->experts; e++) {
      const mm_json *x = mm_json_at(row, e);
      const mm_json_type type = mm_json_type_of(x);
      const double v = mm_json_number(x);
      if ((type != MM_JSON_INT && type != MM_JSON_REAL) || !isfinite(v) || v < 0 || v > 1e18)
        return MM_REFUSE(c, err, "key \"load\": layer %u: expert %u: found %s, expected a number from 0 to 1e18", l, e, MM_SHOWN_JSON(x));
      load[(size_t)l * m->experts + e] = v, all += v;
    }
  }
  return all > 0 || MM_REFUSE(c, err, "key \"load\": found 0 everywhere, expected the load of some request");
}

static bool read_file(const mm_json *root, const mm_model *m, const mm_json_ctx *c, double *load, mm_err *err) {
  static const char *const keys[] = {"format", "version", "model", "architecture", "load", NULL};
  const char *format, *model, *architecture;
  int64_t version;
  mm_digest digest;
  if (mm_json_type_of(root) != MM_JSON_OBJ) return MM_REFUSE(c, err, "found %s, expected an object", MM_SHOWN_JSON(root));
  if (!mm_json_need_str(root, "format", &format, c, err) || !mm_json_need_int(root, "version", 1, 1, &version, c, err)) return false;
  if (strcmp(format, MM_LOAD_FORMAT) != 0)
    return MM_REFUSE(c, err, "key \"format\": found \"%s\", expected \"%s\"", MM_ESCAPED(64, format), MM_LOAD_FORMAT);
  if (!mm_json_only_keys(root, keys, c, err) || !mm_json_need_str(root, "model", &model, c, err) ||
      !mm_json_need_str(root, "architecture", &architecture, c, err) || !mm_model_digest(m, &digest, err))
    return false;
  const mm_hex own = mm_digest_hex(&digest);
  if (strcmp(model, own.text) != 0)
    return MM_REFUSE(c, err, "found the load of another model (%.64s, %.12s…), expected that of this one (%s, %.12s…)", architecture, model,
                     m->architecture, own.text);
  return read_loads(root, m, c, load, err);
}

bool mm_placement_open(mm_placement *out, mm_pack *p, const char *path, mm_err *err) {
  const mm_model *m = &p->model;
  const mm_json_ctx c = {path, MM_BAD_INPUT, "E_LOAD"};
  const uint32_t each = m->experts / p->ep;
  double sum = 0;
  *out = (mm_placement){0};
  if (p->ep == 1)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found --place without --ep N, expected ranks with experts of their own");
  out->experts = mm_arena_alloc(&p->arena, (size_t)m->layers * m->experts * sizeof *out->experts, err);
  out->moved = mm_arena_alloc(&p->arena, m->layers * sizeof *out->moved, err);
  double *load = mm_calloc((size_t)m->layers * m->experts, sizeof *load, err);
  placed *work = mm_calloc(1, sizeof *work, err);
  mm_json *root = out->experts && out->moved && load && work ? mm_json_load(path, LOAD_MAX, err) : NULL;
  const bool ok = root && read_file(root, m, &c, load, err);
  for (uint32_t l = 0; ok && l < m->layers; l++) {
    const double *own = load + (size_t)l * m->experts;
    uint32_t *order = out->experts + (size_t)l * m->experts;
    place_layer(own, p->ep, each, work, order);
    const double before = fullest(own, NULL, p->ep, each), after = fullest(own, order, p->ep, each);
    out->moved[l] = after < before;
    out->before += before, out->after += fmin(before, after);
    for (uint32_t e = 0; e < m->experts; e++) sum += own[e];
  }
  if (ok) out->before = out->before / sum * p->ep, out->after = out->after / sum * p->ep; /* finite, also where sum is denormal */
  mm_json_free(root);
  free(load), free(work);
  return ok;
}
