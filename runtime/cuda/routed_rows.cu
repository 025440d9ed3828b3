/* Ops that choose experts for rows: route, and gather_routed, in which each group of attention routes its own rows. Their experts' inputs
 * then go as codes, where all experts of the stage multiply codes under scales of 128 columns, in steps of so many rows that they do
 * (dispatch.h); of other steps rows go as bf16. The router takes the kernel of all groups' rows for its group's, so that bits are the same.
 */
#include <algorithm>

#include "runtime/cuda/backend.h"

static bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

/* The router of a layer, whose lists b->experts.route is set to fill. */
static mm_cu_router router_of(mm_backend *b, uint32_t layer, uint32_t k, const mm_packed *router, const mm_packed *bias) {
  const auto narrow = b->weights.matrix.find(router);
  const bool wide = narrow == b->weights.matrix.end();
  const void *w = wide ? static_cast<const void *>(b->weights.values[router]) : narrow->second.data;
  const bf16 *const piece = wide ? b->weights.router[router] : nullptr;
  mm_cu_route &r = b->experts.route;
  r.bias = bias ? b->weights.values[bias] : nullptr, r.slot = b->groups.inside ? b->device.all_slot : b->device.slot;
  r.load = b->experts.load + (size_t)layer * r.experts;
  r.index = b->c.weights->layer[layer].expert_index ? b->experts.index + (size_t)layer * r.experts : nullptr;
  return {w, wide, k, piece, b->experts.router_product, b->c.options.batch_invariant, mm_cu_ahead_of(b, layer)};
}

void mm_cu_route_rows(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
  b->experts.layer = layer;
  if (mm_cu_later(b, mm_cu_route_rows, layer, x, router, bias) || !mm_cu_running(b)) return;
  const mm_cu_router m = router_of(b, layer, x.width, router, bias);
  const deferred_residual &d = b->step.deferred;
  const bool alone = d.state > RESIDUAL_GROUPS && b->step.rows == 1 && mm_cu_peers_distinct(b->group);
  if (d.op.n == x.data && (d.state == RESIDUAL_SUMMED || alone)) {
    mm_cu_note(b,
               alone ? mm_cu_combine_route_ranks(b->group, d.op, m, b->experts.route, b->stream)
                     : mm_cu_combine_route(d.op, m, b->experts.route, b->step.rows, b->stream),
               "route");
    b->step.deferred = {};
  } else if (mm_cu_begin_op(b)) {
    mm_cu_note(b, mm_cu_route_tokens(m, b->experts.route, rows_of(x), b->step.rows, b->stream), "route");
  }
}

/* ---- rows as codes ---- */

/* Experts of a layer take codes of so many rows: the kernel of sm_90a, whose router has one kernel for any number of rows above 16. */
static bool takes_codes(const mm_backend *b, const mm_layer_weights &y, uint32_t rows, bool decode) {
  const mm_cu_weight &w13 = b->weights.matrix.at(&y.w13), &w2 = b->weights.matrix.at(&y.w2);
  const mm_cu_task q = {&w13, &w2, rows, b->c.model->top_k, decode};
  const mm_cu_dispatch c = mm_cu_dispatch_product(&b->inputs.device, &q);
  return !y.mlp_up.scheme && c.kernel == MM_CU_EXPERTS_FP8 && c.x == MM_CU_AS_CODES && w13.whole.kind == MM_ACT_KEPT &&
         b->c.model->hidden % MM_CU_GROUP == 0;
}

/* Least number of rows from which on all layers with experts do; UINT32_MAX: none, or none has experts. */
static uint32_t first_coded(const mm_backend *b, bool decode) {
  const mm_rank_weights *w = b->c.weights;
  for (uint32_t rows : {MM_CU_DECODE_ROWS + 1, MM_CU_FEW + 1}) {
    uint32_t layers = 0, coded = 0;
    for (uint32_t l = w->layer_first; l < w->layer_end; l++) {
      if (!w->layer[l].w13.scheme) continue;
      layers++;
      coded += takes_codes(b, w->layer[l], rows, decode) && takes_codes(b, w->layer[l], MM_CU_MAX_TOKENS, decode);
    }
    if (layers > 0 && coded == layers) return rows;
  }
  return UINT32_MAX;
}

bool mm_cu_open_codes(mm_backend *b, mm_err *err) {
  if (b->groups.count == 1) return true;
  void *all[MM_CU_PEERS];
  for (int decode = 0; decode < 2; decode++) {
    uint32_t &from = b->groups.coded_from[decode];
    if (!mm_cu_peers_exchange_pointers(b->peers, reinterpret_cast<void *>((uintptr_t)first_coded(b, decode)), all, err)) return false;
    from = 0; /* of all ranks the latest: they send alike */
    for (uint32_t r = 0; r < b->c.weights->tp; r++) from = std::max(from, (uint32_t) reinterpret_cast<uintptr_t>(all[r]));
  }
  return true;
}

mm_row_exchange mm_cu_exchange(const mm_backend *b) {
  const uint32_t from = b->groups.coded_from[1];
  if (b->groups.count == 1 || from == UINT32_MAX) return {MM_ACT_KEPT, 0, 0};
  return {MM_ACT_FP8_GROUP, mm_cu_code_row_bytes(b->c.model->hidden, b->c.model->top_k), from};
}

void mm_cu_gather_routed(mm_backend *b, uint32_t layer, mm_act to, mm_act from, const mm_group_rows *rows, const mm_packed *router,
                         const mm_packed *bias) {
  b->experts.layer = layer;
  if (mm_cu_later(b, mm_cu_gather_routed, layer, to, from, rows, router, bias)) return;
  const group_step &g = b->groups;
  const uint32_t all = g.rows.first[g.count], first = g.rows.first[g.own];
  if (all < g.coded_from[g.decode]) {
    mm_cu_gather(b, to, from, rows);
    mm_cu_route_rows(b, layer, to, router, bias);
    return;
  }
  if (!mm_cu_begin_op(b)) return;
  const mm_cu_router m = router_of(b, layer, from.width, router, bias);
  mm_cu_route own = b->experts.route; /* indices of all experts, which the exchange turns into this rank's and counts */
  own.id += (size_t)first * own.top_k, own.weight += (size_t)first * own.top_k, own.held = 0, own.load = nullptr;
  mm_cu_note(b, mm_cu_choose_tokens(m, own, rows_of(from), b->step.rows, all, b->stream), "route");
  mm_cu_enter_groups(b);
  if (b->err.status != MM_OK) return;
  const mm_cu_codes codes = b->inputs.codes_of(rows_of(to), all, to.width);
  mm_cu_note(b, mm_cu_peers_gather_codes(b->peers, g.rows, codes, b->experts.route, rows_of(from), b->stream), "gather codes");
  if (b->err.status == MM_OK) mm_cu_note(b, mm_cu_sort_pairs(b->experts.route, all, b->stream), "route");
}
