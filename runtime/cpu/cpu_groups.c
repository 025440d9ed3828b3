/* Rows between groups of ranks with all of attention each. Rows that experts alone read go as the codes that the experts would make of
 * them, with the scales of those codes and the experts that the router chose: b->rounded and b->amax then hold for the rows of all groups
 * what mm_cpu_round makes of the rows themselves, bit for bit. A row of codes: a byte or a nibble for each column; scales of the groups,
 * F32 or a byte each; the row's scale, where there is one; ids and weights of the experts. A group of four-bit codes with a number that is
 * NaN goes under a scale of NaN. */
#include <math.h>
#include <string.h>

#include "quant/numbers.h"
#include "runtime/cpu/cpu_backend.h"

/* Where the parts of a row begin, in bytes. */
typedef struct wire {
  const mm_act_format *f;
  uint32_t k, groups, top_k;
  size_t scale, row, choice, end;
} wire;

static wire wire_of(const mm_model *m, const mm_packed *w) {
  wire x = {.f = &mm_act_formats[w->scheme->act], .k = w->k, .top_k = m->top_k};
  x.groups = mm_act_amaxes(x.f, x.k) - 1;
  x.scale = x.f->code == MM_CODE_E2M1 ? (x.k + 1) / 2 : x.k;
  x.row = x.scale + x.groups * (x.f->scale == MM_F32 ? sizeof(float) : 1);
  x.choice = x.row + (!x.groups || x.f->scale == MM_F8_E4M3 ? sizeof(float) : 0);
  x.end = x.choice + x.top_k * (sizeof(uint32_t) + sizeof(float));
  return x;
}
static uint32_t floats_of(const wire *x) { return (uint32_t)mm_ceil_div(x->end, sizeof(float)); }

/* Codes of floats alone have a code for NaN, or scales that may stand for it. */
static bool goes_as_codes(const mm_backend *b, const mm_layer_weights *y) {
  const mm_packed *w = &y->w13;
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (y->mlp_up.scheme || w->whole_k || (f->code != MM_CODE_E4M3 && (f->code != MM_CODE_E2M1 || f->scale == MM_F32))) return false;
  const wire x = wire_of(b->c.model, w);
  return floats_of(&x) <= b->c.model->hidden; /* rows of all groups come in an act of that width */
}

/* Of the first layer of the stage with experts. */
static const mm_packed *any_experts(const mm_backend *b) {
  const mm_rank_weights *w = b->c.weights;
  for (uint32_t l = w->layer_first; l < w->layer_end; l++)
    if (w->layer[l].w13.scheme) return &w->layer[l].w13;
  return NULL;
}

uint32_t mm_cpu_packed_floats(const mm_backend *b) {
  const mm_rank_weights *w = b->c.weights;
  uint32_t most = 0;
  if (b->groups.stage.count == b->groups.own.count || !b->c.options.act_quant || b->c.calibration) return 0;
  for (uint32_t l = w->layer_first; l < w->layer_end; l++) {
    if (!w->layer[l].w13.scheme) continue;
    if (!goes_as_codes(b, &w->layer[l])) return 0;
    const wire x = wire_of(b->c.model, &w->layer[l].w13);
    most = (uint32_t)mm_max(most, floats_of(&x));
  }
  return most;
}

mm_row_exchange mm_cpu_exchange(const mm_backend *b) {
  if (!b->groups.packed) return (mm_row_exchange){.codes = MM_ACT_KEPT};
  const mm_packed *w = any_experts(b);
  const wire x = wire_of(b->c.model, w);
  return (mm_row_exchange){.codes = w->scheme->act, .row_bytes = (uint32_t)x.end};
}

/* ---- a row ---- */

static bool any_nan(const float *x, uint32_t n) {
  bool found = false;
  for (uint32_t i = 0; i < n; i++) found |= isnan(x[i]);
  return found;
}

/* x[k]: codes as numbers, and their scales as mm_act_codes leaves both. */
static void pack_row(const wire *x, uint8_t *to, const float *code, const float *scale) {
  if (x->f->code == MM_CODE_E4M3) {
    for (uint32_t i = 0; i < x->k; i++) to[i] = mm_f32_to_e4m3(code[i]);
  } else {
    memset(to, 0, x->scale);
    for (uint32_t i = 0; i < x->k; i++) to[i / 2] |= (uint8_t)(mm_f32_to_e2m1(code[i]) << i % 2 * 4);
  }
  for (uint32_t g = 0; g < x->groups; g++) {
    const uint32_t first = g * x->f->group, n = (uint32_t)mm_min(x->f->group, x->k - first);
    const bool none = x->f->code == MM_CODE_E2M1 && any_nan(code + first, n);
    if (x->f->scale == MM_F32)
      memcpy(to + x->scale + g * sizeof *scale, &scale[1 + g], sizeof *scale);
    else if (x->f->scale == MM_F8_E4M3)
      to[x->scale + g] = none ? 0x7f : mm_f32_to_e4m3(scale[1 + g]);
    else
      to[x->scale + g] = none ? 0xff : (uint8_t)(mm_f32_bits(scale[1 + g]) >> 23);
  }
  if (x->choice > x->row) memcpy(to + x->row, scale, sizeof *scale);
}

/* times: numbers in place of codes. */
static void unpack_row(const wire *x, const uint8_t *from, float *code, float *scale, bool times) {
  scale[0] = 0;
  if (x->choice > x->row) memcpy(scale, from + x->row, sizeof *scale);
  for (uint32_t g = 0; g < x->groups; g++) {
    if (x->f->scale == MM_F32)
      memcpy(&scale[1 + g], from + x->scale + g * sizeof *scale, sizeof *scale);
    else
      scale[1 + g] = x->f->scale == MM_F8_E4M3 ? mm_e4m3_value[from[x->scale + g]] : mm_e8m0_to_f32(from[x->scale + g]);
  }
  for (uint32_t i = 0; i < x->k; i++)
    code[i] = x->f->code == MM_CODE_E4M3 ? mm_e4m3_value[from[i]] : mm_e2m1_value[from[i / 2] >> i % 2 * 4 & 15];
  for (uint32_t i = 0; i < x->k && times; i++) {
    const float by = !x->groups ? scale[0] : x->f->scale == MM_F8_E4M3 ? scale[1 + i / x->f->group] * scale[0] : scale[1 + i / x->f->group];
    code[i] *= by;
  }
}

/* ---- ops ---- */

static void enter(mm_backend *b, const mm_group_rows *rows) {
  b->batch = &rows->all, b->ranks = b->groups.stage;
  b->groups.first = rows->first[b->groups.stage.rank / b->groups.own.count];
}

static void exchange(mm_backend *b, void *to, const void *from, uint32_t width, const mm_group_rows *rows) {
  const mm_comm_rows part = {rows->first, b->groups.stage.count / b->groups.own.count, width};
  mm_comm_gather_rows(b->groups.stage.comm, b->groups.stage.rank, from, to, &part);
}

void mm_cpu_gather(mm_backend *b, mm_act to, mm_act from, const mm_group_rows *rows) {
  exchange(b, to.data, from.data, to.width, rows);
  enter(b, rows);
}

typedef struct rows_job {
  mm_backend *b;
  wire x;
  const mm_packed *w;
  mm_act from;         /* pack: the group's rows */
  const float *packed; /* unpack: those of all groups */
  bool times;
} rows_job;

/* Row t of the group, which has its experts, to b->groups.packed. */
static bool pack(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const rows_job *j = ctx;
  mm_backend *b = j->b;
  const wire *x = &j->x;
  const uint32_t amaxes = x->groups + 1, top_k = x->top_k;
  float *const amax = b->amax + t * amaxes, *const code = b->rounded + t * x->k;
  uint8_t *const to = (uint8_t *)(b->groups.packed + t * floats_of(x));
  memcpy(code, mm_cpu_row(j->from, t), x->k * sizeof *code);
  memset(amax, 0, amaxes * sizeof *amax);
  mm_act_amax(x->f, code, x->k, 0, amax);
  mm_act_codes(x->f, code, x->k, 0, amax, j->w->input_scale);
  pack_row(x, to, code, amax);
  memcpy(to + x->choice, b->moe.pick + t * top_k, top_k * sizeof *b->moe.pick);
  memcpy(to + x->choice + top_k * sizeof *b->moe.pick, b->moe.weight + t * top_k, top_k * sizeof *b->moe.weight);
  return true;
}

/* Row t of all. Where the exchange was broken off there may be anything: experts are some that there are. */
static bool unpack(void *ctx, size_t t, unsigned worker, mm_err *err) {
  (void)worker, (void)err;
  const rows_job *j = ctx;
  mm_backend *b = j->b;
  const wire *x = &j->x;
  const uint32_t top_k = x->top_k;
  const uint8_t *const row = (const uint8_t *)(j->packed + t * floats_of(x));
  uint32_t *const pick = b->moe.pick + t * top_k;
  unpack_row(x, row, b->rounded + t * x->k, b->amax + t * (x->groups + 1), j->times);
  memcpy(pick, row + x->choice, top_k * sizeof *pick);
  memcpy(b->moe.weight + t * top_k, row + x->choice + top_k * sizeof *pick, top_k * sizeof *b->moe.weight);
  for (uint32_t i = 0; i < top_k; i++) pick[i] = (uint32_t)mm_min(pick[i], b->c.model->experts - 1);
  return true;
}

void mm_cpu_gather_routed(mm_backend *b, uint32_t layer, mm_act to, mm_act from, const mm_group_rows *rows, const mm_packed *router,
                          const mm_packed *bias) {
  if (!b->groups.packed) {
    mm_cpu_gather(b, to, from, rows);
    mm_cpu_route(b, layer, to, router, bias);
    return;
  }
  const mm_packed *w = &b->c.weights->layer[layer].w13;
  rows_job j = {b, wire_of(b->c.model, w), w, from, to.data, mm_cpu_form_of(b, w) < MM_FORM_ROW};
  const uint64_t work = 8 * (uint64_t)j.x.k; /* of a row, about so many multiplications */
  mm_cpu_choose_rows(b, from, router, bias);
  mm_cpu_each(b, b->batch->tokens, work * b->batch->tokens, pack, &j);
  exchange(b, to.data, b->groups.packed, floats_of(&j.x), rows);
  enter(b, rows);
  mm_cpu_each(b, b->batch->tokens, work * b->batch->tokens, unpack, &j);
  mm_cpu_take_choices(b, layer);
  b->groups.rounded = to.data;
}

void mm_cpu_scatter(mm_backend *b, mm_act to, mm_act from) {
  mm_comm_all_reduce_sum(b->groups.stage.comm, b->groups.stage.rank, from.data, (size_t)b->batch->tokens * from.width);
  b->batch = b->groups.batch, b->ranks = b->groups.own, b->groups.rounded = NULL;
  memcpy(to.data, mm_cpu_row(from, b->groups.first), (size_t)b->batch->tokens * to.width * sizeof(float));
}
