/* An unsharded checkpoint held against what its source gives. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan/card.h"
#include "convert/plan/finished.h"
#include "convert/plan/layout_hf.h"
#include "convert/plan/target_format.h"
#include "convert/report/exact.h"
#include "convert/write/step.h"
#include "formats/system/pool.h"

/* ---- the index ---- */

static bool is_named(const mm_hf *made, const char *file) {
  size_t i = 0;
  while (i < made->file_count && strcmp(made->file[i].name, file) != 0) i++;
  return i < made->file_count;
}

bool mm_exact_index(const mm_hf *made, const mm_pack *p, mm_err *err) {
  const mm_path path = mm_path_of(p->dir, MM_INDEX_NAME);
  const mm_where at = mm_at(path.text, NULL);
  mm_digest plan;
  uint64_t bytes;
  const bool planned = mm_unsharded_plan(p->dir, &plan, err);
  if (err->status != MM_OK) return false;
  if (!planned || !mm_digest_equal(&plan, &p->plan))
    return mm_fail(err, MM_INTEGRITY, "E_IDX", at, "found plan %s, expected %s of " MM_DIGESTS,
                   planned ? mm_digest_hex(&plan).text : "none", mm_digest_hex(&p->plan).text);
  if (mm_hf_total_wrong(made, &bytes) || !made->total_given)
    return mm_fail(err, MM_INTEGRITY, "E_IDX", at, "found total_size %llu, expected the %llu bytes of its tensors",
                   (unsigned long long)made->total_size, (unsigned long long)bytes);
  for (size_t i = 0; i < p->rank->part_count; i++)
    if (!is_named(made, p->rank->part[i].file))
      return mm_fail(err, MM_INTEGRITY, "E_IDX", at, "found no tensor of %s, expected those that lie in it", p->rank->part[i].file);
  return true;
}

/* ---- texts ---- */

static bool another(const mm_pack *p, const char *name, const char *what, mm_err *err) {
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(mm_path_of(p->dir, name).text, NULL), "%s", what);
}

/* A config as JSON without its quantization, with the plan's type; free() it. */
static char *plain_config(const mm_hf *hf, const mm_plan *plan, mm_err *err) {
  mm_json *config = mm_declared_plain(hf->config, mm_target_format_type(plan), err);
  return config ? mm_json_text(config, false, err) : NULL;
}

static bool same_config(const mm_plan *plan, const mm_hf *made, const mm_pack *p, mm_err *err) {
  char *found = plain_config(made, plan, err), *expected = plain_config(plan->hf, plan, err);
  bool ok = found && expected;
  if (ok && strcmp(found, expected) != 0)
    ok = another(p, "config.json", "found other keys or values than this source has, its quantization left out", err);
  MM_FREE(found, expected);
  return ok;
}

/* Another version may describe the same quantization with keys in another order. */
static bool same_description(const mm_pack *p, const mm_plan_text *t) {
  const char *key = strcmp(t->name, "config.json") == 0 ? "quantization_config" : "quantization";
  mm_json *found = mm_json_load(mm_path_of(p->dir, t->name).text, MM_CONFIG_MAX, MM_IGNORED);
  mm_json *expected = mm_json_parse(t->text, strlen(t->text), t->name, MM_IGNORED);
  const bool same = found && expected && mm_json_same(mm_json_get(found, key), mm_json_get(expected, key));
  mm_json_free(found), mm_json_free(expected);
  return same;
}

bool mm_exact_texts(const mm_plan *plan, const mm_hf *made, const mm_pack *p, mm_err *err) {
  if (!same_config(plan, made, p, err)) return false;
  if (strcmp(mm_target_format_name(plan->target_format), p->target_format) != 0)
    return another(p, MM_DIGESTS, "found another format of quantization than this source and recipe give", err);
  bool own_file = false;
  for (size_t i = 0; i < MM_PLAN_TEXTS && plan->text[i].name; i++) {
    const mm_plan_text *t = &plan->text[i];
    if (strcmp(t->name, MM_CARD) == 0) continue;
    own_file = own_file || mm_target_format_file(t->name);
    if (strcmp(plan->pack.tool, p->tool) != 0 ? !same_description(p, t) : !mm_finished_has_text(p, t))
      return another(p, t->name, "found another description of its quantization than this version writes for this source", err);
  }
  for (size_t i = 0; !own_file && i < p->file_count; i++)
    if (mm_target_format_file(p->file[i].name)) return another(p, p->file[i].name, "found a file that no conversion writes", err);
  return true;
}

/* ---- made from the source, or from a packed checkpoint of it ---- */

static int by_original(const void *a, const void *b) {
  return strcmp((*(const mm_hf_tensor *const *)a)->original, (*(const mm_hf_tensor *const *)b)->original);
}

/* [made->tensor_count] in order of their names in the files; free() it. */
static const mm_hf_tensor **sort_by_original(const mm_hf *made, mm_err *err) {
  const mm_hf_tensor **out = mm_calloc(made->tensor_count + 1, sizeof *out, err);
  for (size_t i = 0; out && i < made->tensor_count; i++) out[i] = &made->tensor[i];
  if (out) qsort(out, made->tensor_count, sizeof *out, by_original);
  return out;
}

static const mm_hf_tensor *find_original(const mm_hf_tensor *const *by_name, size_t n, const char *name) {
  const mm_hf_tensor key = {.original = name}, *at = &key;
  const mm_hf_tensor *const *hit = bsearch(&at, by_name, n, sizeof(void *), by_original);
  return hit ? *hit : NULL;
}

/* Sets *equal: t is the static scale of the inputs of tensor i, as the plan's target format stores it. */
static bool has_input_scale(const mm_plan *plan, const mm_hf *made, const mm_hf_tensor *t, uint32_t i, bool *equal, mm_err *err) {
  const float scale = plan->pack.tensor[i].input_scale, expected = plan->tensor[i].naming->reciprocal ? 1 / scale : scale;
  float found = 0;
  mm_hf_reader reader;
  mm_hf_reader_open(&reader, made);
  const bool ok = t->bytes != sizeof found || mm_hf_read(&reader, t, 0, &found, sizeof found, err);
  mm_hf_reader_close(&reader);
  *equal = found == expected;
  return ok;
}

/* Sets *fits: the first piece of tensor i has the names, types and shapes of the plan, and its static scale of inputs. */
static bool fits_plan(const mm_plan *plan, const mm_hf *made, const mm_hf_tensor *const *by_name, uint32_t i, bool *fits, mm_err *err) {
  mm_arena names = {0};
  const mm_pack_tensor *t = &plan->pack.tensor[i];
  bool ok = true;
  *fits = true;
  for (unsigned k = 0; ok && *fits && k < t->plane_count; k++) {
    const char *name = plan->layout->name(plan, i, 0, k, &names, err);
    const mm_hf_tensor *x = name ? find_original(by_name, made->tensor_count, name) : NULL;
    const mm_shape shape = plan->layout->shape(plan, i, 0, k);
    ok = name != NULL;
    *fits = x && x->dtype == t->plane[k].dtype && mm_shape_equal(&x->shape, &shape);
    if (*fits && plan->tensor[i].naming && t->input_scale > 0 && k == plan->tensor[i].scheme->plane_count)
      ok = has_input_scale(plan, made, x, i, fits, err);
  }
  mm_arena_close(&names);
  return ok;
}

static bool differs(const mm_plan *a, const mm_plan *b, size_t i) {
  const mm_plan_tensor *x = &a->tensor[i], *y = &b->tensor[i];
  return x->scheme != y->scheme || x->grid.n != y->grid.n || x->grid.k != y->grid.k ||
         a->pack.tensor[i].input_scale != b->pack.tensor[i].input_scale;
}

bool mm_exact_from_packed(const mm_plan *own, const mm_plan *packed, const mm_made *of, bool *from_packed, mm_err *err) {
  const mm_hf *made = of->hf;
  const mm_hf_tensor **by_name = sort_by_original(made, err);
  bool fits = true, ok = by_name;
  *from_packed = false;
  for (size_t i = 0; i < MM_PLAN_TEXTS && own->text[i].name && packed->text[i].name; i++)
    if (strcmp(own->text[i].name, MM_CARD) != 0 && strcmp(own->text[i].text, packed->text[i].text) != 0 &&
        mm_finished_has_text(of->digests, &packed->text[i]))
      *from_packed = true;
  for (uint32_t i = 0; ok && fits && !*from_packed && i < own->pack.tensor_count; i++)
    ok = !differs(own, packed, i) ||
         (fits_plan(own, made, by_name, i, &fits, err) && (fits || fits_plan(packed, made, by_name, i, from_packed, err)));
  free(by_name);
  return ok;
}

/* ---- static scales of activations ---- */

/* The stem of a tensor's name that holds such a scale, 0: another tensor. */
static size_t scale_stem(const char *name, bool *reciprocal) {
  static const char *const end[] = {"input_scale", "activation_scale", "input_global_scale"};
  for (size_t i = 0; i < sizeof end / sizeof *end; i++) {
    *reciprocal = i == 2;
    if (mm_ends_with(name, end[i])) return strlen(name) - strlen(end[i]);
  }
  return 0;
}

bool mm_exact_input_scales(mm_act_scales *s, const mm_hf *made, mm_err *err) {
  mm_act_number *number = mm_calloc(made->tensor_count + 1, sizeof *number, err);
  mm_arena names = {0};
  mm_hf_reader reader;
  size_t n = 0;
  bool ok = number;
  mm_hf_reader_open(&reader, made);
  for (size_t i = 0; ok && i < made->tensor_count; i++) {
    const mm_hf_tensor *t = &made->tensor[i];
    bool reciprocal;
    float v = 0;
    const size_t stem = scale_stem(t->name, &reciprocal);
    if (stem == 0 || t->dtype != MM_F32 || t->bytes != sizeof v) continue;
    const char *name = mm_arena_printf(&names, err, "%.*sinput_scale", (int)stem, t->name);
    ok = name && mm_hf_read(&reader, t, 0, &v, sizeof v, err);
    number[n++] = (mm_act_number){name, 0, (double)(reciprocal ? 1 / v : v), false};
  }
  mm_hf_reader_close(&reader);
  mm_err reason = {0};
  ok = ok && (mm_act_scales_make(s, made->dir, number, n, &reason) || mm_fail_damaged(err, &reason));
  mm_arena_close(&names);
  free(number);
  return ok;
}

/* ---- tensors ---- */

typedef struct thread_state {
  mm_worker worker;
  mm_hf_reader reader;
  void *found;
  size_t cap;
} thread_state;

typedef struct unsharded_job {
  const mm_plan *plan;
  const mm_pack *p;
  const mm_hf *made;
  const mm_hf_tensor **by_name; /* [made->tensor_count] in order of their names in the files */
  thread_state *state;          /* [threads] */
} unsharded_job;

typedef struct taking {
  const unsharded_job *job;
  thread_state *state;
} taking;

static const mm_hf_tensor *find_stored(const unsharded_job *job, const mm_strip *x, unsigned plane, mm_err *err) {
  mm_arena names = {0};
  const mm_layout *layout = job->plan->layout;
  const char *name = layout->name(job->plan, x->tensor, x->piece, plane, &names, err);
  const mm_shape shape = layout->shape(job->plan, x->tensor, x->piece, plane);
  const mm_hf_tensor *t = name ? find_original(job->by_name, job->made->tensor_count, name) : NULL;
  if (name && (!t || t->dtype != x->t->plane[plane].dtype || !mm_shape_equal(&t->shape, &shape))) {
    t = NULL;
    mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(job->p->dir, name),
            "found no such tensor, or another type or shape of it, expected that of this source");
  }
  mm_arena_close(&names);
  return t;
}

static bool compare_given(void *ctx, const mm_given *g, mm_err *err) {
  const taking *x = ctx;
  const mm_strip *s = g->strip;
  const mm_hf_tensor *t = find_stored(x->job, s, g->plane, err);
  if (!t) return false;
  if (!s->keep && !mm_exact_again(x->job->plan, x->job->p, s->tensor)) return true;
  if (!mm_grow(&x->state->found, &x->state->cap, g->n, 1, err) || !mm_hf_read(&x->state->reader, t, g->at, x->state->found, g->n, err))
    return false;
  const uint8_t *expected = g->bytes, *found = x->state->found;
  if (memcmp(found, expected, g->n) == 0) return true;
  size_t i = 0;
  while (found[i] == expected[i]) i++;
  return mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at_offset(x->job->made->file[t->file].path, t->original, t->offset + g->at + i),
                 "found byte 0x%02x, expected 0x%02x of this source, %s", found[i], expected[i],
                 s->keep ? "which is kept as stored" : "which is packed so");
}

static bool check_step(void *ctx, size_t item, unsigned worker, mm_err *err) {
  unsharded_job *job = ctx;
  taking x = {job, &job->state[worker]};
  const mm_taker to = {compare_given, &x};
  return mm_step_give(&x.state->worker, job->plan, &job->plan->step[item], &to, err);
}

/* The plan names every tensor that is stored, once. */
static bool same_count(const unsharded_job *job, mm_err *err) {
  size_t n = 0;
  for (size_t i = 0; i < job->plan->pack.tensor_count; i++)
    n += (size_t)job->plan->pack.tensor[i].piece_count * job->plan->pack.tensor[i].plane_count;
  return n == job->made->tensor_count || mm_fail(err, MM_INTEGRITY, "E_SOURCE", mm_at(job->p->dir, NULL),
                                                 "found %zu tensors, expected %zu from this source", job->made->tensor_count, n);
}

bool mm_exact_unsharded(const mm_plan *plan, const mm_hf *made, const mm_pack *p, unsigned threads, mm_err *err) {
  unsharded_job job = {
      .plan = plan, .p = p, .made = made, .by_name = sort_by_original(made, err), .state = mm_calloc(threads, sizeof *job.state, err)};
  bool ok = job.by_name && job.state && same_count(&job, err);
  for (unsigned i = 0; job.state && i < threads; i++) {
    mm_worker_open(&job.state[i].worker, plan->hf);
    mm_hf_reader_open(&job.state[i].reader, made);
  }
  ok = ok && mm_pool_run(threads, plan->step_count, check_step, &job, err);
  for (unsigned i = 0; job.state && i < threads; i++) {
    mm_worker_close(&job.state[i].worker);
    mm_hf_reader_close(&job.state[i].reader);
    free(job.state[i].found);
  }
  MM_FREE(job.by_name, job.state);
  return ok;
}
