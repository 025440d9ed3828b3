/* What extended models (mm_model_extended) add to the backend: buffers, the ops select and mlp, and
 * attention whose heads have norms of their own. All in the step's rows' shape alone, so that steps are
 * recorded as any other. Bits of rows that decode kernels take depend on the number of rows where
 * attention is cut into parts; in batch-invariant steps no row is such a one. */
#include <algorithm>

#include "runtime/cuda/backend.h"

static_assert(MM_DEVICE_SCORE_ROWS == MM_CU_SCORE_ROWS && MM_DEVICE_BLOCK_GROUP == MM_CU_BLOCK_GROUP &&
                  MM_DEVICE_BLOCK_PAIRS == MM_CU_BLOCK_PAIRS,
              "as capacity.h counts");

namespace {

mm_cu_rows places(const mm_backend *b) { return {b->device.slot, b->device.pos}; }
mm_cu_tiles tiles(const mm_backend *b) { return {b->device.span, b->device.tile, b->step.tiles}; }
bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }
const float *values_of(mm_backend *b, const mm_packed *w) { return w ? b->weights.values[w] : nullptr; }

mm_cu_block_lists lists_of(const mm_backend *b, uint32_t layer) {
  if (b->c.model->attn[layer] != MM_ATTN_SPARSE) return {};
  return {b->attention.select.block, b->attention.select.count, b->attention.select.heads, b->attention.select.top_k,
          b->attention.select.size};
}

bool open_select(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const mm_rank_weights *w = b->c.weights;
  if (!std::count(m->attn + w->layer_first, m->attn + w->layer_end, MM_ATTN_SPARSE)) return true;
  mm_cu_select &a = b->attention.select;
  b->memory.what = "buffers of the selection of blocks";
  a.table = b->pages.device_table, a.pages_per_slot = b->pages.per_slot;
  a.heads = (uint32_t)mm_max(1, m->index_heads / mm_attn_tp(w)), a.dim = m->index_dim, a.size = m->index_block;
  a.top_k = m->index_top_k, a.local = m->index_local;
  a.most = (uint32_t)mm_ceil_div(b->c.limits.max_positions, a.size);
  const uint64_t lists = (uint64_t)b->c.limits.max_tokens * a.heads;
  a.score = b->memory.array<float>(mm_cu_score_floats(a.heads, a.most), err);
  a.block = b->memory.array<uint32_t>(lists * a.top_k, err), a.count = b->memory.array<uint32_t>(lists, err);
  if (!a.score || !a.block || !a.count) return false;
  if (b->c.options.kv_fp8 || !mm_cu_wants_by_block(b->heads, a.heads, a.size, a.top_k)) return true;
  b->attention.by_block = b->memory.alloc(mm_cu_by_block_work(b->heads, a.heads, a.top_k, b->c.limits.max_tokens), err);
  return b->attention.by_block;
}

bool open_mlp(mm_backend *b, mm_err *err) {
  uint64_t inter = 0;
  for (uint32_t l = b->c.weights->layer_first; l < b->c.weights->layer_end; l++) inter = mm_max(inter, b->c.weights->layer[l].mlp_down.k);
  if (!inter) return true;
  b->memory.what = "buffers of MLPs";
  const uint64_t tokens = b->c.limits.max_tokens;
  b->mlp.wide = b->memory.array<float>(tokens * mm_max(2 * inter, b->c.model->hidden), err);
  b->mlp.middle = b->memory.array<bf16>(tokens * inter, err);
  return b->mlp.wide && b->mlp.middle;
}

}  // namespace

bool mm_cu_open_extended(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  b->attention.by_head = mm_model_extended(m);
  if (!b->attention.by_head) return true;
  b->experts.route.scale = m->routed_scale > 0 ? (float)m->routed_scale : 1;
  b->experts.route.act = {m->activation == MM_ACTIVATION_SWIGLUOAI, (float)m->act_alpha, (float)m->act_limit, (float)m->act_beta};
  return open_select(b, err) && open_mlp(b, err);
}

cudaError_t mm_cu_do_select(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
  mm_cu_select a = b->attention.select;
  a.q = rows_of(q), a.keys = b->cache[layer].kv.index, a.key_scale = b->cache[layer].kv.index_scale;
  if (b->group && b->c.options.index_split) a.split = {b->group, b->c.model->index_heads, b->c.options.index_split};
  const mm_cu_head_work heads = {rows_of(q),
                                 rows_of(k),
                                 nullptr,
                                 q.width,
                                 k.width,
                                 a.heads,
                                 1,
                                 0,
                                 a.dim,
                                 b->c.model->rotary_dim,
                                 values_of(b, q_norm),
                                 values_of(b, k_norm),
                                 b->attention.inv_freq,
                                 (float)b->c.model->norm_eps,
                                 b->cache[layer].kv.index,
                                 nullptr,
                                 b->pages.device_table,
                                 b->pages.per_slot,
                                 b->step.rows,
                                 b->cache[layer].kv.index_scale,
                                 nullptr};
  const uint32_t singles = mm_cu_singles(b);
  cudaError_t e = mm_cu_place_heads(heads, places(b), b->stream);
  if (e == cudaSuccess && singles) e = mm_cu_select_rows(a, places(b), singles, b->stream);
  return e == cudaSuccess && singles < b->step.rows ? mm_cu_select_tiles(a, tiles(b), b->stream) : e;
}

cudaError_t mm_cu_do_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  const mm_cu_heads &h = b->heads;
  const mm_cu_kv &kv = b->cache[layer].kv;
  bf16 *const k = rows_of(qkv) + (size_t)h.heads * h.head_dim, *const v = k + (size_t)h.kv_heads * h.head_dim;
  const mm_cu_head_work heads = {rows_of(qkv),
                                 k,
                                 v,
                                 qkv.width,
                                 qkv.width,
                                 h.heads,
                                 h.kv_heads,
                                 h.kv_heads,
                                 h.head_dim,
                                 h.rotary_dim,
                                 values_of(b, q_norm),
                                 values_of(b, k_norm),
                                 b->attention.inv_freq,
                                 (float)b->c.model->norm_eps,
                                 kv.k,
                                 kv.v,
                                 b->pages.device_table,
                                 b->pages.per_slot,
                                 b->step.rows,
                                 kv.k_scale,
                                 kv.v_scale};
  const mm_cu_block_lists lists = lists_of(b, layer);
  const uint32_t singles = mm_cu_singles(b), rest = b->step.rows - singles, most = b->c.limits.max_tokens;
  mm_cu_block_job a = {rows_of(qkv), rows_of(o), b->attention.work, 0, singles, most, true};
  cudaError_t e = mm_cu_place_heads(heads, places(b), b->stream);
  if (e == cudaSuccess && singles) e = mm_cu_gqa_blocks(h, places(b), kv, lists, a, b->stream);
  if (e != cudaSuccess || !rest) return e;
  const mm_cu_gqa rows = {rows_of(qkv), rows_of(o), b->attention.work, b->step.rows, most};
  if (!lists.block && h.head_dim != 32) return mm_cu_gqa_prefill(h, tiles(b), kv, rows, b->stream);
  if (mm_cu_takes_by_block(h, kv, lists)) {
    const mm_cu_gqa by_block = {rows.qkv, rows.o, b->attention.by_block, rows.tokens, most};
    return mm_cu_gqa_by_block(h, tiles(b), kv, lists, by_block, b->stream);
  }
  if (mm_cu_takes_block_tiles(h, kv, lists)) return mm_cu_gqa_block_tiles(h, tiles(b), kv, lists, rows, b->stream);
  a.first = singles, a.count = rest, a.split = false;
  return mm_cu_gqa_blocks(h, places(b), kv, lists, a, b->stream);
}

/* A single token's: two launches, in which the activation and the sum with y are. */
static cudaError_t do_one_mlp(mm_backend *b, mm_act y, mm_act x, const mm_cu_weight &up, const mm_cu_weight &down, bool add) {
  const cudaError_t e = b->inputs.gated(up, {rows_of(x), b->mlp.middle, b->experts.route.act}, b->stream);
  return e != cudaSuccess ? e : b->inputs.linear(down, {b->mlp.middle, nullptr, rows_of(y), nullptr, 1, add}, b->stream);
}

cudaError_t mm_cu_do_mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
  const uint32_t inter = down->k;
  if (b->inputs.is_one(b->weights.matrix[up], b->step.rows) && b->inputs.is_one(b->weights.matrix[down], b->step.rows))
    return do_one_mlp(b, y, x, b->weights.matrix[up], b->weights.matrix[down], add);
  cudaError_t e = mm_cu_collect_linear(b, up, rows_of(x), nullptr, b->step.rows);
  if (e == cudaSuccess) e = b->inputs.linear(b->weights.matrix[up], {rows_of(x), nullptr, nullptr, b->mlp.wide, b->step.rows}, b->stream);
  b->inputs.wrote(b->mlp.middle);
  const mm_cu_codes codes = b->inputs.codes_too(b->mlp.middle, b->step.rows, inter);
  if (e == cudaSuccess) e = mm_cu_activate(b->mlp.middle, b->mlp.wide, b->experts.route.act, b->step.rows, inter, codes, b->stream);
  if (e == cudaSuccess) e = mm_cu_collect_linear(b, down, b->mlp.middle, nullptr, b->step.rows);
  const mm_cu_linear second = {b->mlp.middle, nullptr, add ? nullptr : rows_of(y), add ? b->mlp.wide : nullptr, b->step.rows};
  if (e == cudaSuccess) e = b->inputs.linear(b->weights.matrix[down], second, b->stream);
  b->inputs.wrote(y.data);
  return e == cudaSuccess && add ? mm_cu_add_rows(rows_of(y), b->mlp.wide, b->step.rows, y.width, b->stream) : e;
}

static mm_cu_three three_of(mm_backend *b, const mm_three &of, mm_act x) {
  mm_cu_two two = {{b->weights.matrix[of.w[1]], b->weights.matrix[of.w[2]]}, rows_of(x), {rows_of(of.y[1]), rows_of(of.y[2])}};
  return {b->weights.matrix[of.w[0]], rows_of(of.y[0]), two};
}

bool mm_cu_joins_linears(mm_backend *b, const mm_three &of) {
  if (b->step.rows != 1) return false;
  const mm_cu_three a = three_of(b, of, of.y[0]);
  return b->inputs.is_one(a.w, 1) && b->inputs.is_one(a.two.w[0], 1) && mm_cu_joins_three(a);
}

cudaError_t mm_cu_do_linears(mm_backend *b, const mm_three &of, mm_act x) { return b->inputs.linear_three(three_of(b, of, x), b->stream); }

static mm_cu_shared shared_of(mm_backend *b, const mm_packed *up, const mm_packed *down) {
  return {b->weights.matrix[up], b->weights.matrix[down], b->mlp.middle};
}

bool mm_cu_joins_experts(mm_backend *b, const mm_packed *w13, const mm_packed *w2, const mm_packed *up, const mm_packed *down) {
  return b->step.rows == 1 &&
         b->inputs.joins(b->weights.matrix[w13], b->weights.matrix[w2], shared_of(b, up, down), b->experts.route.top_k, b->step.rows);
}

cudaError_t mm_cu_do_experts_shared(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2, const mm_packed *up,
                                    const mm_packed *down) {
  const mm_cu_experts a = {rows_of(x), rows_of(y), b->experts.middle, b->experts.pair_out, 1};
  return b->inputs.experts_shared(b->weights.matrix[w13], b->weights.matrix[w2], b->experts.route, a, shared_of(b, up, down), b->stream);
}
