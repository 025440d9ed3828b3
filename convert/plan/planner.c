/* From rules and a source to packed tensors and the steps that fill them. */
#include "convert/plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/decode/kv_agree.h"
#include "convert/model/kv_rules.h"
#include "convert/plan/global_scales.h"
#include "convert/plan/target_format.h"
#include "convert/source/encoding.h"
#include "convert/source/packed_agrees.h"

#define MISSING_MOST 10000 /* tensors counted as missing */

typedef struct mm_planner {
  mm_plan *p;
  mm_hf *hf;
  const mm_arch *arch;
  const mm_plan_options *o;
  const mm_rule *first_layer_rule;
  mm_decoder source; /* for static scales of activations, and global ones */
  mm_err *err;
  size_t tensor_cap, plan_cap, missing;
  char first_missing[256];
} mm_planner;

/* The scheme that `--quant none` stores: the source's own encoding, which must be one for the whole packed tensor. */
static const mm_scheme *as_stored(mm_planner *b, mm_plan_tensor *pt, const mm_pack_tensor *t, size_t matrices) {
  const mm_scheme *s = mm_encoding_scheme(pt->matrix, matrices, t->piece_count);
  if (s) pt->grid = mm_encoding_grid(pt->matrix, matrices, s);
  for (size_t i = 0; i < matrices; i++) {
    const mm_matrix *x = &pt->matrix[i];
    mm_where at = mm_hf_at(b->hf, x->weight);
    if (s && mm_encoding_keeps(x, s, pt->grid)) continue;
    char reason[640];
    if (i == 0)
      mm_fail(b->err, MM_UNSUPPORTED, "E_Q_KEEP", at, "found %s", mm_encoding_unkept(x, reason));
    else
      mm_fail(b->err, MM_UNSUPPORTED, "E_MIXED", at,
              "found %s, which cannot be stored with %s in \"%s\"; expected one encoding per packed tensor (or another --quant)",
              x->encoding->name, s->name, t->name);
    return NULL;
  }
  return s;
}

/* A quantised head or embedding that no rule names becomes BF16, a router F32: engines compute with them so. */
static const mm_scheme *unquantised(const mm_planner *b, const mm_plan_tensor *pt) {
  const mm_kind kind = pt->rule[0]->kind;
  if (b->hf->manifest || mm_is_plain(&pt->matrix[0]) || (kind != MM_KIND_EMBED && kind != MM_KIND_PASS_THROUGH)) return NULL;
  return mm_scheme_plain(kind == MM_KIND_EMBED ? MM_BF16 : MM_F32);
}

/* The grid of a scheme that a recipe names: the source's groups where the scheme keeps all of its integers. */
static mm_cell named_grid(const mm_plan_tensor *pt, size_t matrices) {
  const mm_scheme *s = pt->scheme;
  const mm_cell grid = s->scale_of ? mm_encoding_grid(pt->matrix, matrices, s) : s->plane[1].cell;
  for (size_t i = 0; s->scale_of && i < matrices; i++)
    if (!mm_encoding_keeps(&pt->matrix[i], s, grid)) return s->plane[1].cell;
  return grid;
}

static bool choose(mm_planner *b, mm_plan_tensor *pt, const mm_pack_tensor *t, size_t matrices) {
  const char *names[MM_PACK_PIECES + 2] = {t->name};
  for (unsigned i = 0; i < t->piece_count; i++) names[1 + i] = t->piece[i].source;
  if (!(t->whole_lead ? mm_recipe_choose_stack(&b->p->recipe, names, t->whole_lead, &pt->scheme, b->err)
                      : mm_recipe_choose(&b->p->recipe, pt->rule[0]->kind, names, &pt->scheme, b->err)))
    return false;
  pt->as_stored = !pt->scheme;
  if (!pt->scheme) pt->scheme = unquantised(b, pt);
  if (pt->scheme)
    pt->grid = named_grid(pt, matrices);
  else if (!(pt->scheme = as_stored(b, pt, t, matrices)))
    return false;
  pt->search = mm_recipe_search(&b->p->recipe, pt->scheme);
  return true;
}

/* Unsharded: what the packed tensor has, which is one for all experts of a layer. */
static void take_packed(const mm_planner *b, mm_plan_tensor *pt, mm_pack_tensor *t) {
  const mm_plan *packed = b->o->packed;
  for (size_t i = 0; packed && i < packed->pack.tensor_count; i++) {
    if (strcmp(packed->pack.tensor[i].name, t->name) != 0) continue;
    pt->scheme = packed->tensor[i].scheme;
    pt->grid = packed->tensor[i].grid;
    t->input_scale = packed->pack.tensor[i].input_scale;
    return;
  }
}

/* Importance for the matrices whose scales are searched; first is the expert of the first. */
static bool weigh(mm_planner *b, mm_plan_tensor *pt, const mm_pack_tensor *t, uint32_t first, size_t matrices) {
  struct mm_calibrated *c = &b->p->calibrated;
  if (!b->o->importance || pt->search == MM_SEARCH_ABSMAX) return true;
  pt->weights = mm_arena_alloc(&b->p->pack.arena, matrices * sizeof *pt->weights, b->err);
  for (size_t i = 0; pt->weights && i < matrices; i++) {
    const mm_rule *rule = pt->rule[i % t->piece_count];
    if (mm_encoding_keeps(&pt->matrix[i], pt->scheme, pt->grid)) continue;
    switch (mm_importance_find(b->o->importance, rule, pt->layer, first + (uint32_t)(i / t->piece_count), b->p->pack.model.experts,
                               t->whole_cols, &pt->weights[i], b->err)) {
      case MM_WEIGHED: c->weighed++; break;
      case MM_TOO_FEW: c->too_few++; break;
      case MM_NO_ENTRY: c->no_entry++; break;
      case MM_WEIGHING_FAILED: return false;
    }
  }
  return pt->weights;
}

/* Second moments for the matrices whose codes are found with error feedback; first is the expert of the first. */
static bool feed_back(mm_planner *b, mm_plan_tensor *pt, const mm_pack_tensor *t, uint32_t first, size_t matrices) {
  struct mm_calibrated *c = &b->p->calibrated;
  uint64_t packed = 0;
  if (b->p->recipe.method != MM_METHOD_GPTQ || !b->o->importance || pt->scheme->code == MM_CODE_PLAIN) return true;
  for (size_t i = 0; i < matrices; i++) packed += !mm_encoding_keeps(&pt->matrix[i], pt->scheme, pt->grid);
  if (!mm_tensor_moments_find(&pt->moments, b->o->importance, pt->rule, t, pt->layer, first, b->p->pack.model.experts, b->err))
    return false;
  *(pt->moments.inputs.entry ? &c->fed_back : &c->no_moments) += packed;
  c->coupled += pt->moments.outputs[0].entry ? packed : 0;
  return true;
}

/* The source's own static scale where it means the same to the scheme: the largest of those that share the tensor. */
static bool own_input_scale(mm_planner *b, const mm_plan_tensor *pt, mm_pack_tensor *t, size_t matrices) {
  uint64_t without = 0;
  for (size_t i = 0; i < matrices; i += t->piece_count) {
    float most = 0;
    for (size_t j = i; j < i + t->piece_count; j++) {
      const mm_matrix *x = &pt->matrix[j];
      const mm_scheme *own = x->encoding->scheme ? mm_scheme_find(x->encoding->scheme) : NULL;
      float v = 0;
      if (b->hf->follow && own && own->act == pt->scheme->act && x->part[MM_INPUT].tensor)
        return mm_fail(b->err, MM_UNSUPPORTED, "E_FOLLOW", mm_hf_at(b->hf, x->part[MM_INPUT].tensor),
                       "found a static scale of activations, whose number the plan needs: convert the whole download without --follow");
      if (!b->hf->names_only && own && own->act == pt->scheme->act && !mm_decode_input(&b->source, x, &v, b->err)) return false;
      most = fmaxf(most, v);
      b->p->calibrated.given += v > 0;
      b->p->calibrated.ones += v == 1;
    }
    without += most == 0;
    t->input_scale = fmaxf(t->input_scale, most);
  }
  if (t->input_scale > 0) b->p->calibrated.scaled++, b->p->calibrated.unreached += without;
  return true;
}

/* Unsharded: experts of one layer, whose inputs are the same. */
static bool same_inputs(const mm_plan_tensor *a, const mm_plan_tensor *b) { return a->layer == b->layer && a->rule[0] == b->rule[0]; }

static bool scale_inputs(mm_planner *b, const mm_plan_tensor *pt, mm_pack_tensor *t, size_t matrices) {
  struct mm_calibrated *c = &b->p->calibrated;
  if (b->o->act_scales && !(pt > b->p->tensor && same_inputs(pt - 1, pt)))
    mm_act_scales_mark(b->o->act_scales, t, pt->rule, pt->layer, b->p->pack.model.experts);
  if (!mm_act_formats[pt->scheme->act].fixed || b->o->packed) return true;
  if (!b->o->act_scales) return own_input_scale(b, pt, t, matrices);
  c->scaled++;
  for (const mm_plan_tensor *x = pt; x > b->p->tensor && same_inputs(x - 1, pt); x--)
    if (x[-1].scheme == pt->scheme) { /* unsharded: another expert of the same layer */
      t->input_scale = b->p->pack.tensor[x - 1 - b->p->tensor].input_scale;
      return true;
    }
  return mm_act_scales_find(b->o->act_scales, t, pt->rule, pt->layer, b->p->pack.model.experts, pt->scheme, &c->unreached, b->err);
}

/* Unsharded: experts that calibration never reached take the largest scale of their layer's others of the same scheme. */
static void share_input_scales(mm_plan *p) {
  for (size_t i = 0, end; i < p->pack.tensor_count; i = end) {
    for (end = i + 1; end < p->pack.tensor_count && same_inputs(&p->tensor[end], &p->tensor[i]);) end++;
    for (size_t j = i; j < end; j++) {
      const mm_scheme *s = p->tensor[j].scheme;
      float most = 0;
      if (!mm_act_formats[s->act].fixed || p->pack.tensor[j].input_scale > 0) continue;
      for (size_t k = i; k < end; k++)
        if (p->tensor[k].scheme == s) most = fmaxf(most, p->pack.tensor[k].input_scale);
      p->pack.tensor[j].input_scale = most;
      p->calibrated.unreached += most > 0;
    }
  }
}

/* A calibration file that changes nothing is a mistake of the user's, and refused. */
static bool calibration_used(const mm_planner *b) {
  const struct mm_calibrated *c = &b->p->calibrated;
  if (b->p->recipe.method == MM_METHOD_GPTQ && b->o->importance && c->fed_back == 0)
    return mm_fail(b->err, MM_USAGE, "E_IMPORTANCE", mm_at(b->o->importance->path, NULL),
                   "found no second moments of a matrix that is quantised, which --method gptq needs (minimax-eval --collect --moments)");
  if (b->o->importance && c->weighed == 0 && c->fed_back == 0)
    return mm_fail(b->err, MM_USAGE, "E_IMPORTANCE", mm_at(b->o->importance->path, NULL),
                   "found nothing to weigh: no scale is searched, or the file has no moments of those matrices");
  const mm_model *m = &b->p->pack.model;
  if (b->o->importance && !mm_importance_of_model(b->o->importance, m, b->err)) return false;
  if (b->o->act_scales && !mm_act_scales_of_model(b->o->act_scales, m, b->err)) return false;
  return !b->o->act_scales || c->scaled ||
         mm_fail(b->err, MM_USAGE, "E_ACT_SCALES", mm_at(b->o->act_scales->path, NULL),
                 "found no scheme with static activations, expected tensor_wise_fp8, w4afp8 or nvfp4");
}

static void missing(mm_planner *b, const mm_rule *r, uint32_t layer, uint32_t expert) {
  if (b->missing++ == 0) mm_rule_name(b->first_missing, sizeof b->first_missing, r->theirs, layer, expert);
}

/* Once a tensor is missing, others are only counted, up to a limit: a config may claim any number of experts, and work must not grow with
 * it. */
static bool find_matrices(mm_planner *b, mm_plan_tensor *pt, const mm_pack_tensor *t, uint32_t first, uint32_t leads) {
  mm_matrix only_counted;
  if (b->missing == 0) {
    pt->matrix = mm_arena_alloc(&b->p->pack.arena, (size_t)leads * t->piece_count * sizeof *pt->matrix, b->err);
    if (!pt->matrix) return false;
  }
  for (uint32_t e = 0; e < leads && b->missing < MISSING_MOST; e++)
    for (unsigned i = 0; i < t->piece_count; i++) {
      mm_matrix *x = pt->matrix ? &pt->matrix[e * t->piece_count + i] : &only_counted;
      const mm_rule_piece piece = {pt->rule, t->piece_count, i, pt->layer, first + e};
      mm_found f = mm_hf_matrix(b->hf, &b->p->pack.model, &piece, x, b->err);
      if (f == MM_FAILED) return false;
      if (f == MM_ABSENT) missing(b, pt->rule[i], pt->layer, first + e);
      if (f == MM_FOUND) x->positive = pt->rule[i]->kind == MM_KIND_KV_SCALE && mm_ends_with(pt->rule[i]->ours, "_scale");
    }
  return true;
}

/* Lays the pieces side by side along rows, or each by itself and uncut, and sets the local shape. */
static bool place_pieces(mm_planner *b, const mm_plan_tensor *pt, mm_pack_tensor *t) {
  const mm_model *m = &b->p->pack.model;
  for (unsigned i = 0; i < t->piece_count; i++) {
    mm_piece *x = &t->piece[i];
    mm_rule rule = *pt->rule[i];
    if (!b->p->layout->roles.cuts) rule.divide = MM_WHOLE;
    if (!mm_cut_find(b->p, &rule, b->o->align, &x->cut, b->err)) return false;
    const mm_cut *c = &b->p->pack.cut[x->cut];
    x->rows = mm_dim_extent(pt->rule[i]->rows, m);
    x->local_at = b->p->layout->roles.joins ? t->rows : 0;
    x->local_rows = c->axis == MM_AXIS_ROWS ? c->local : x->rows;
    t->rows += x->local_rows;
    t->whole_cols = mm_dim_extent(pt->rule[i]->cols, m);
    t->cols = c->axis == MM_AXIS_COLS ? c->local : t->whole_cols;
  }
  return true;
}

/* The name with {l} replaced and, in a stack of experts, {e} left standing. */
static const char *source_name(mm_planner *b, const mm_rule *r, uint32_t layer, uint32_t expert) {
  char name[256];
  if (b->p->layout->roles.keeps_names) {
    mm_rule_name(name, sizeof name, r->theirs, layer, expert);
    return mm_arena_printf(&b->p->pack.arena, b->err, "%s%s", b->p->prefix, name);
  }
  const char *at = strstr(r->theirs, "{l}");
  if (!at) return r->theirs;
  return mm_arena_printf(&b->p->pack.arena, b->err, "%.*s%u%s", (int)(at - r->theirs), r->theirs, layer, at + 3);
}

/* Layers in pp runs; what has no layer lies before the first or after the last. */
static uint32_t stage_of(const mm_planner *b, const mm_rule *r, uint32_t layer) {
  const mm_pack *p = &b->p->pack;
  if (strstr(r->theirs, "{l}")) return (uint32_t)((uint64_t)layer * p->pp / p->model.layers);
  return r < b->first_layer_rule ? 0 : p->pp - 1;
}

/* Places the experts of a stack. */
static bool place_experts(mm_planner *b, mm_pack_tensor *t, uint32_t layer) {
  const mm_placement *own = &b->p->placement;
  const uint32_t *order = own->experts && own->moved[layer] ? own->experts + (size_t)layer * t->whole_lead : NULL;
  const mm_pack *as = b->o->placed;
  for (size_t i = 0; as && i < as->tensor_count; i++)
    if (strcmp(as->tensor[i].name, t->name) == 0 && as->tensor[i].whole_lead == t->whole_lead) order = as->tensor[i].order.expert;
  bool permutes;
  return !order || mm_pack_set_order(&b->p->pack, t, order, &permutes, b->err);
}

/* `expert` counts where experts are not stacked. */
static bool add_tensor(mm_planner *b, const mm_rule *const *rules, unsigned pieces, uint32_t layer, uint32_t expert) {
  mm_plan *p = b->p;
  if (!MM_GROW(p->pack.tensor, &b->tensor_cap, p->pack.tensor_count + 1, b->err) ||
      !MM_GROW(p->tensor, &b->plan_cap, p->pack.tensor_count + 1, b->err))
    return false;
  mm_pack_tensor *t = &p->pack.tensor[p->pack.tensor_count];
  mm_plan_tensor *pt = &p->tensor[p->pack.tensor_count];
  *t = (mm_pack_tensor){.piece_count = pieces, .vector = rules[0]->cols == MM_DIM_NONE};
  *pt = (mm_plan_tensor){.layer = layer};
  char name[256];
  mm_rule_name(name, sizeof name, rules[0]->ours, layer, 0);
  t->name = mm_arena_strndup(&p->pack.arena, name, strlen(name), b->err);
  t->whole_lead = mm_rule_stacks(rules[0]) && p->layout->roles.stacks ? p->pack.model.experts : 0;
  t->lead = t->whole_lead / p->pack.ep;
  t->stage = stage_of(b, rules[0], layer);
  if (!t->name || (t->lead && !place_experts(b, t, layer))) return false;
  for (unsigned i = 0; i < pieces; i++) {
    pt->rule[i] = rules[i];
    t->piece[i].source = source_name(b, rules[i], layer, expert);
    if (!t->piece[i].source) return false;
  }
  uint32_t leads = t->whole_lead ? t->whole_lead : 1;
  if (!find_matrices(b, pt, t, expert, leads) || !place_pieces(b, pt, t)) return false;
  if (b->missing) return true; /* reported once, at the end */
  p->pack.tensor_count++;
  if (!choose(b, pt, t, (size_t)leads * pieces) || !mm_plan_global_scales(p, &b->source, pt, t, (size_t)leads * pieces, b->err))
    return false;
  take_packed(b, pt, t);
  t->scheme = pt->scheme->name;
  if (!weigh(b, pt, t, expert, (size_t)leads * pieces) || !feed_back(b, pt, t, expert, (size_t)leads * pieces) ||
      !scale_inputs(b, pt, t, (size_t)leads * pieces))
    return false;
  return mm_cut_cells(p, pt, t, b->o->align, b->err);
}

/* Rules [from, to) for one layer; those that share a packed name become one tensor. */
static bool add_rules(mm_planner *b, size_t from, size_t to, uint32_t layer) {
  const mm_arch *a = b->arch;
  for (size_t i = from; i < to;) {
    const mm_rule *piece[MM_PACK_PIECES];
    unsigned n = 0;
    for (; i < to && n < MM_PACK_PIECES && (n == 0 || strcmp(a->rule[i].ours, piece[0]->ours) == 0); i++)
      if (mm_rule_applies(&a->rule[i], &b->p->pack.model, layer)) piece[n++] = &a->rule[i];
    uint32_t times = n > 0 && !b->p->layout->roles.stacks && mm_rule_stacks(piece[0]) ? b->p->pack.model.experts : n > 0;
    for (uint32_t e = 0; e < times && b->missing < MISSING_MOST; e++)
      if (!add_tensor(b, piece, n, layer, e)) return false;
  }
  return true;
}

static bool add_kv_scales(mm_planner *b, uint32_t layer) {
  const mm_plan *p = b->p;
  const mm_kv_source source = {mm_hf_numbers, b->hf};
  const bool drop = p->recipe.kv_scales == MM_KV_DROP;
  const mm_rule *rule[MM_KV_RULES];
  unsigned n = mm_kv_rules(&source, &p->pack.model, layer, p->layout->roles.doubles_kv, rule);
  if (n > 0 && !mm_kv_scales_agree(&b->source, b->hf, layer, p->pack.model.kv_heads, drop, b->err)) return false;
  for (unsigned i = 0; i < n; i++) {
    char name[256];
    if (drop)
      mm_hf_find(b->hf, mm_rule_name(name, sizeof name, rule[i]->theirs, layer, 0))->used = true;
    else if (!add_tensor(b, &rule[i], 1, layer, 0))
      return false;
  }
  return true;
}

/* ---- unsharded: what is no part of the text model ---- */

/* Finds the prefix of the text model's names and refuses what gives no checkpoint of the release's names. */
static bool find_prefix(mm_planner *b) {
  static const char embedding[] = "model.embed_tokens.weight";
  const mm_hf *hf = b->hf;
  const mm_alias *first = b->arch->naming;
  if (!b->p->layout->roles.keeps_names || !first || !first->theirs) return true;
  const mm_pack *from = hf->manifest;
  if (from && from->left_out_count)
    return mm_fail(b->err, MM_UNSUPPORTED, "E_ARCH", mm_at(hf->dir, NULL),
                   "found --layout hf with a packed checkpoint that leaves out %s*, expected the source that it was made from",
                   from->left_out[0].prefix);
  for (size_t i = 0; i < hf->tensor_count; i++)
    for (const mm_alias *s = first; s->theirs; s++)
      if (s->theirs[0] == '.' && strstr(hf->tensor[i].original, s->theirs))
        return mm_fail(b->err, MM_UNSUPPORTED, "E_ARCH", mm_hf_at(hf, &hf->tensor[i]),
                       "found --layout hf with a name of transformers' own, expected the names of the release (or the packed layout)");
  const mm_hf_tensor *t = mm_hf_find(hf, embedding);
  if (!t || strcmp(t->original, embedding) == 0) return true;
  b->p->prefix = mm_arena_strndup(&b->p->pack.arena, first->theirs, strlen(first->theirs) - strlen(first->canonical), b->err);
  return b->p->prefix;
}

/* A tensor that is copied as it is, as a vector of its elements. */
static bool pass_tensor(mm_planner *b, mm_hf_tensor *t) {
  static const mm_rule rule = {"", "", MM_DIM_NONE, MM_DIM_NONE, MM_WHOLE, MM_KIND_PASS_THROUGH, MM_ANY_LAYER};
  mm_plan *p = b->p;
  uint64_t n = 0;
  const mm_scheme *scheme = mm_scheme_plain(t->dtype);
  if (!scheme || !mm_shape_count(&t->shape, &n) || n == 0 || n > UINT32_MAX / 2)
    return mm_fail(b->err, MM_UNSUPPORTED, "E_DTYPE", mm_hf_at(b->hf, t), "found %s of %llu elements to copy, expected BF16, F16 or F32",
                   mm_dtype_name(t->dtype), (unsigned long long)n);
  if (!MM_GROW(p->pack.tensor, &b->tensor_cap, p->pack.tensor_count + 1, b->err) ||
      !MM_GROW(p->tensor, &b->plan_cap, p->pack.tensor_count + 1, b->err))
    return false;
  mm_pack_tensor *to = &p->pack.tensor[p->pack.tensor_count];
  mm_plan_tensor *pt = &p->tensor[p->pack.tensor_count++];
  const uint32_t rows = (uint32_t)n;
  *to = (mm_pack_tensor){
      .name = t->original, .piece_count = 1, .vector = true, .scheme = scheme->name, .rows = rows, .cols = 1, .whole_cols = 1};
  to->piece[0] = (mm_piece){.source = t->original, .rows = rows, .local_rows = rows};
  *pt = (mm_plan_tensor){.scheme = scheme, .grid = scheme->plane[1].cell, .passed = t, .as_stored = true};
  pt->rule[0] = &rule;
  pt->matrix = mm_arena_alloc(&p->pack.arena, sizeof *pt->matrix, b->err);
  if (!pt->matrix || !mm_cut_find(p, &rule, b->o->align, &to->piece[0].cut, b->err)) return false;
  *pt->matrix = (mm_matrix){.encoding = &mm_encodings[0], .weight = t, .line = 1, .rows = rows, .cols = 1};
  t->used = true;
  return mm_cut_cells(p, pt, to, b->o->align, b->err);
}

static bool pass_tensors(mm_planner *b) {
  for (size_t i = 0; b->p->layout->roles.copies && i < b->hf->tensor_count; i++) {
    if (!b->hf->tensor[i].left_out) continue;
    if (b->hf->names_only)
      return mm_fail(b->err, MM_USAGE, "E_USAGE", mm_hf_at(b->hf, &b->hf->tensor[i]),
                     "found --names-only with a tensor that --layout hf copies in its own shape, which its file says");
    if (!pass_tensor(b, &b->hf->tensor[i])) return false;
  }
  if (b->p->layout->roles.copies) b->p->pack.left_out_count = 0;
  return true;
}

static bool fail_missing(const mm_planner *b) {
  char hint[1024], others[64] = "";
  const size_t more = b->missing - 1;
  mm_hf_name_hint(b->hf, b->first_missing, hint, sizeof hint);
  if (more)
    snprintf(others, sizeof others, " (and %s%zu more %s missing)", b->missing < MISSING_MOST ? "" : "at least ", more,
             more == 1 ? "is" : "are");
  return mm_fail(b->err, MM_BAD_INPUT, "E_MISSING", mm_at(b->hf->dir, b->first_missing), "found no such tensor%s%s", others, hint);
}

static bool add_tensors(mm_planner *b) {
  const mm_arch *a = b->arch;
  size_t first = 0, last = a->rule_count;
  while (!strstr(a->rule[first].theirs, "{l}")) first++;
  while (!strstr(a->rule[last - 1].theirs, "{l}")) last--;
  b->first_layer_rule = &a->rule[first];
  if (!add_rules(b, 0, first, 0)) return false;
  for (uint32_t l = 0; l < b->p->pack.model.layers; l++)
    if (!add_rules(b, first, last, l) || !add_kv_scales(b, l)) return false;
  if (!add_rules(b, last, a->rule_count, 0)) return false;
  if (b->missing == 0) {
    if (!pass_tensors(b) || !mm_decode_inputs_given(&b->source, b->err)) return false;
    share_input_scales(b->p);
    return (b->o->made || b->o->allow_unmatched || mm_recipe_all_hit(&b->p->recipe, b->err)) && calibration_used(b);
  }
  return fail_missing(b);
}

uint32_t mm_plan_strip_rows(const mm_plan *p, uint32_t tensor) {
  const mm_plan_tensor *pt = &p->tensor[tensor];
  const uint32_t cols = p->pack.tensor[tensor].whole_cols, side = p->hf->quantization.block.n;
  if (pt->naming && pt->naming->form) return UINT32_MAX / 2;
  uint32_t unit = mm_scheme_rows(pt->scheme), block = mm_tensor_moments_rows(&pt->moments, side ? side : 1);
  unit = unit / (uint32_t)mm_gcd(unit, block) * block;
  uint64_t rows = MM_STRIP_BYTES / (4 * (uint64_t)cols) / unit * unit;
  return (uint32_t)mm_min(mm_max(rows, unit), UINT32_MAX / 2 / unit * unit);
}

static bool add_step(mm_plan *p, size_t *cap, mm_step s, mm_err *err) {
  if (!MM_GROW(p->step, cap, p->step_count + 1, err)) return false;
  p->step[p->step_count++] = s;
  return true;
}

/* Steps in file order. A scheme that needs the amax of the whole group takes a stack entry at once. */
static bool add_steps(mm_plan *p, mm_err *err) {
  size_t cap = 0;
  for (uint32_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    const mm_scheme *s = p->tensor[i].scheme;
    for (uint32_t n = 0; n < (t->whole_lead ? t->whole_lead : 1); n++) {
      const uint32_t e = t->order.expert ? t->order.expert[n] : n;
      if (s->needs_amax) {
        if (!add_step(p, &cap, (mm_step){i, e, MM_ALL_PIECES, 0, 0}, err)) return false;
        continue;
      }
      uint32_t unit = mm_plan_strip_rows(p, i);
      for (unsigned j = 0; j < t->piece_count; j++)
        for (uint32_t row = 0; row < t->piece[j].rows; row += unit)
          if (!add_step(p, &cap, (mm_step){i, e, j, row, (uint32_t)mm_min(unit, t->piece[j].rows - row)}, err)) return false;
    }
  }
  return true;
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; } /* %u takes blanks and signs */

/* "0,2-5" into p->wanted. */
static bool read_ranks(mm_plan *p, const char *list, mm_err *err) {
  const char *text = list;
  uint32_t all = mm_pack_ranks(&p->pack);
  p->wanted = mm_arena_alloc(&p->pack.arena, all * sizeof *p->wanted, err);
  if (!p->wanted) return false;
  for (uint32_t w = 0; !text && w < all; w++) p->wanted[w] = true;
  while (text && *text) {
    unsigned from, to;
    int n = 0, m = 0;
    if (!is_digit(*text) || sscanf(text, "%9u%n-%9u%n", &from, &n, &to, &m) < 1 || (m && !is_digit(text[n + 1]))) break;
    if (m == 0) to = from;
    text += m ? m : n;
    if (from > to || to >= all || (*text != 0 && *text != ',')) break;
    for (; from <= to; from++) p->wanted[from] = true;
    if (*text++ == 0) return true; /* what follows a comma is a rank */
  }
  return !text || mm_fail(err, MM_USAGE, "E_RANKS", mm_at(NULL, NULL),
                          "--ranks: found \"%s\", expected a list such as 0,2-5 of ranks below %u", list, all);
}

/* The tool's words in a packed source on its origin: ", from QUANT" for each time its numbers were packed again, or nothing. */
static const char *made_from(const mm_pack *from) {
  const char *words = from ? strstr(from->tool, ", from ") : NULL;
  return words ? words : "";
}

/* Records the tool and the recipe. A packed source whose numbers are kept gives the same words as its own source under the same recipe;
 * numbers that are packed a second time are others, and files of the two must not be taken for parts of one run, however often they are
 * cut again. */
static bool add_words(mm_plan *p, const mm_hf *hf, const mm_plan_options *o, mm_err *err) {
  const mm_pack *from = hf->manifest;
  bool kept = from && strcmp(o->quant, "none") == 0;
  const char *quant = kept ? from->quant : o->quant;
  p->pack.quant = mm_arena_strndup(&p->pack.arena, quant, strlen(quant), err);
  p->pack.tool = from && !kept
                     ? mm_arena_printf(&p->pack.arena, err, "minimax-convert %s, from %s%s", MM_VERSION, from->quant, made_from(from))
                     : mm_arena_printf(&p->pack.arena, err, "minimax-convert %s%s", MM_VERSION, made_from(from));
  return p->pack.quant && p->pack.tool;
}

/* GPTQ stores zero points in two formats that look alike. A checkpoint made from the second one records that, also when it is cut again,
 * so that its plan differs from that of the first. Words that are kept record theirs too, to be written so again. */
static bool add_format(mm_plan *p, mm_err *err) {
  bool second = false;
  const mm_pack_tensor *t = p->pack.tensor;
  for (size_t i = 0; !second && i < p->pack.tensor_count; i++)
    second = mm_encoding_second_gptq(p->hf, p->tensor[i].matrix, (size_t)mm_max(1, t[i].whole_lead) * t[i].piece_count);
  const char *form = second ? "gptq_v2" : NULL;
  for (size_t i = 0; !form && i < p->pack.tensor_count; i++)
    if (p->tensor[i].as_stored && p->tensor[i].scheme->scale_of) form = mm_encoding_words_form(p->tensor[i].matrix);
  return !form || (p->pack.tool = mm_arena_printf(&p->pack.arena, err, "%s, from %s", p->pack.tool, form));
}

/* Records the source files; a packed source passes its own list on. */
static bool add_sources(mm_plan *p, const mm_hf *hf, mm_err *err) {
  const mm_pack *from = hf->manifest;
  size_t count = from ? from->source_count : hf->file_count;
  p->pack.source = mm_calloc(count, sizeof *p->pack.source, err);
  if (!p->pack.source) return false;
  p->pack.source_count = count;
  for (size_t i = 0; i < count; i++)
    p->pack.source[i] =
        from ? from->source[i] : (mm_pack_file){.name = hf->file[i].name, .size = hf->file[i].id.size, .sha256 = hf->file[i].header};
  for (size_t i = 0; i < hf->tensor_count; i++)
    if (hf->tensor[i].used) p->source_bytes += hf->tensor[i].bytes;
  return true;
}

bool mm_plan_build(mm_plan *p, mm_hf *hf, const mm_plan_options *o, mm_err *err) {
  *p = (mm_plan){.hf = hf, .layout = o->layout ? o->layout : &mm_layout_packed, .prefix = "", .importance = o->importance};
  mm_planner b = {.p = p, .hf = hf, .o = o, .err = err, .arch = mm_arch_find(hf->config, hf->config_path, err)};
  if (!b.arch || !b.arch->read_config(hf->config, hf->config_path, &p->pack.model, err)) return false;
  if (hf->names_only && !hf->follow && !mm_hf_types_named(hf, err)) return false;
  if (hf->manifest && !mm_packed_agrees(hf->manifest, b.arch, &p->pack.model, err)) return false;
  if (!p->layout->roles.cuts && (o->tp > 1 || o->pp > 1))
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   "found --tp %u --pp %u with --layout hf, whose files are whole: leave both out, engines cut them as they load", o->tp,
                   o->pp);
  if (!find_prefix(&b)) return false;
  if (!mm_cut_feasible(&p->pack.model, o, hf->config_path, err)) return false;
  p->pack.tp = o->tp;
  p->pack.ep = o->ep;
  p->pack.pp = o->pp;
  p->pack.attn_tp = o->attn_tp == o->tp ? 0 : o->attn_tp;
  p->pack.tp_align = o->align;
  mm_hf_left_out(hf, b.arch, &p->pack);
  if (o->load && !mm_placement_open(&p->placement, &p->pack, o->load, err)) return false;
  if (!add_words(p, hf, o, err)) return false;
  if (!mm_recipe_parse_normal(&p->recipe, o->quant, err)) return false;
  if (!o->made && (!p->recipe.importance != !o->importance || !p->recipe.act_scales != !o->act_scales))
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL),
                   "found a digest in a recipe; files are named by --importance and --act-scales");
  if (!o->made && p->recipe.nonfinite_zero != hf->nonfinite_allowed)
    return mm_fail(err, MM_USAGE, "E_RECIPE", mm_at(NULL, NULL), "found nonfinite=zero in a recipe; --allow-nonfinite puts it there");
  if (!o->made && p->recipe.method == MM_METHOD_GPTQ && !o->importance)
    return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                   "found method gptq without --importance FILE, which has second moments (minimax-eval --collect --moments)");
  mm_decoder_open(&b.source, hf);
  bool ok = add_tensors(&b);
  mm_decoder_close(&b.source);
  if (!ok || !mm_hf_all_used(hf, &p->pack.model, err) || !add_format(p, err) || !add_sources(p, hf, err)) return false;
  const bool named = p->layout->target_formats && (!o->made || (o->target_format && (!p->recipe.act_scales || o->act_scales)));
  const char *format = o->target_format && strcmp(o->target_format, "none") != 0 ? o->target_format : NULL;
  if (named && !(mm_target_format_spell(p, format, err) && mm_target_format_texts(p, err))) return false;
  return read_ranks(p, o->ranks, err) && mm_lay_out(p, o->part_size, err) && add_steps(p, err);
}

void mm_plan_close(mm_plan *p) {
  for (uint32_t i = 0; p->part && i < p->part_count; i++)
    for (uint32_t r = 0; p->part[i].file && r < p->pack.tp; r++) free(p->part[i].file[r].header);
  MM_FREE(p->part, p->step, p->tensor);
  mm_recipe_close(&p->recipe);
  free(p->pack.tensor); /* grown while planning; the rest of the pack lies in its arena */
  free(p->pack.cut);
  free(p->pack.source);
  mm_pack_close(&p->pack);
  *p = (mm_plan){0};
}
