/* A DFlash draft next to the target on one device (ops.h, draft_forward.h). Its matrices, in BF16, and its norms are copied as the backend
 * opens. Its cells are bf16, laid out as the target's keys and values, in pages of the same numbers. */
#include <math.h>
#include <string.h>

#include "runtime/cuda/attention/draft_attention.h"
#include "runtime/cuda/backend.h"

namespace {

bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

/* A matrix of BF16, whose rows lie on the device as in the file. */
bool copy_matrix(mm_backend *b, const mm_packed *w, const char *name, mm_err *err) {
  mm_cu_weight *to = &b->weights.matrix[w];
  if (!mm_cu_describe(w, name, to, err)) return false;
  void *const data = b->memory.reserve(w->n * to->pitch, err);
  to->data = static_cast<const uint8_t *>(data);
  return data && mm_cu_check(cudaMemcpy(data, w->plane[0], w->n * to->pitch, cudaMemcpyHostToDevice), "copy weights", err);
}

bool copy_vector(mm_backend *b, const mm_packed *w, mm_err *err) {
  float *const to = b->memory.array<float>(w->n, err);
  b->weights.values[w] = to;
  return to && mm_cu_unpack(w, to, err);
}

bool copy_weights(mm_backend *b, mm_err *err) {
  const mm_dflash *d = b->c.draft;
  mm_dflash_tensor t;
  b->memory.what = "weights of the draft";
  for (uint32_t i = 0; mm_dflash_tensor_at(&d->c, i, &t); i++) {
    const mm_packed *w = reinterpret_cast<const mm_packed *>(reinterpret_cast<const char *>(d) + t.at);
    if (!(t.cols ? copy_matrix(b, w, t.name, err) : copy_vector(b, w, err))) return false;
  }
  for (uint32_t l = 0; l < d->c.layers; l++) {
    const mm_packed *of = &d->layer[l].kv;
    mm_cu_weight &kv = b->weights.matrix[of];
    kv = b->weights.matrix[&d->layer[l].qkv];
    kv.data += (size_t)(kv.n - of->n) * kv.pitch, kv.n = of->n;
  }
  return true;
}

bool make_cells(mm_backend *b, mm_err *err) {
  const mm_dflash_config &c = b->c.draft->c;
  uint32_t pages;
  if (!mm_limits_pages(&b->c.limits, &pages, err)) return false;
  b->memory.what = "cells of the draft";
  const uint64_t numbers = (uint64_t)pages * c.kv_heads * MM_CU_PAGE * c.head_dim;
  for (uint32_t l = 0; l < c.layers; l++) {
    bf16 *const k = b->memory.array<bf16>(numbers, err), *const v = k ? b->memory.array<bf16>(numbers, err) : nullptr;
    if (!v) return false;
    b->draft.cells.push_back({k, v, b->pages.device_table, b->pages.per_slot});
  }
  const size_t bytes = b->draft.cells.size() * sizeof(mm_cu_kv);
  mm_cu_kv *const list = b->memory.array<mm_cu_kv>(b->draft.cells.size(), err);
  b->draft.copies = {b->pages.device_table, list, c.layers, c.kv_heads, c.head_dim * (uint32_t)sizeof(bf16)};
  return list && mm_cu_check(cudaMemcpy(list, b->draft.cells.data(), bytes, cudaMemcpyHostToDevice), "copy caches", err);
}

bool make_buffers(mm_backend *b, mm_err *err) {
  const mm_dflash_config &c = b->c.draft->c;
  const uint64_t tokens = b->c.limits.max_tokens;
  std::vector<float> freq(c.head_dim / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = (float)pow(c.rope_theta, -2.0 * i / c.head_dim);
  b->memory.what = "buffers of the draft";
  b->draft.inv_freq = b->memory.array<float>(freq.size(), err);
  b->draft.last_id = b->memory.array<int32_t>(b->c.limits.slots, err);
  b->draft.work = b->memory.alloc(mm_cu_draft_work(), err);
  b->mlp.wide = b->memory.array<float>(tokens * mm_max(2 * c.intermediate, c.hidden), err);
  b->mlp.middle = b->memory.array<bf16>(tokens * c.intermediate, err);
  return b->draft.inv_freq && b->draft.last_id && b->draft.work && b->mlp.wide && b->mlp.middle &&
         mm_cu_check(cudaMemcpy(b->draft.inv_freq, freq.data(), freq.size() * sizeof freq[0], cudaMemcpyHostToDevice), "copy frequencies",
                     err);
}

/* q and k heads of a row: k and v begin at `k`. cells: where keys and values go; NULL: keys stay, and values are not touched. */
mm_cu_head_work heads_of(const mm_backend *b, bf16 *q, bf16 *k, uint32_t pitch, uint32_t q_heads, const mm_cu_kv *cells) {
  const mm_dflash_config &c = b->c.draft->c;
  mm_cu_head_work a = {};
  a.q = q, a.k = k, a.v = k + c.kv_heads * c.head_dim, a.q_pitch = a.kv_pitch = pitch;
  a.q_heads = q_heads, a.k_heads = c.kv_heads, a.v_heads = cells ? c.kv_heads : 0, a.dim = a.rotary_dim = c.head_dim;
  a.inv_freq = b->draft.inv_freq, a.eps = (float)c.norm_eps;
  a.keys = cells ? cells->k : nullptr, a.values = cells ? cells->v : nullptr;
  a.table = b->pages.device_table, a.pages_per_slot = b->pages.per_slot, a.tokens = b->step.rows;
  return a;
}

}  // namespace

bool mm_cu_open_draft(mm_backend *b, mm_err *err) {
  if (!b->c.draft) return true;
  const mm_dflash_config &c = b->c.draft->c;
  if ((c.head_dim != 32 && c.head_dim != 64 && c.head_dim != 128) || c.intermediate % 8 != 0)
    return mm_fail(err, MM_UNSUPPORTED, "E_DRAFT", mm_at(b->c.draft->st.path, NULL),
                   "found heads of %u columns and an MLP of %u; the cuda backend has kernels for 32, 64 and 128, and multiples of 8",
                   c.head_dim, c.intermediate);
  return copy_weights(b, err) && make_cells(b, err) && make_buffers(b, err);
}

namespace {

struct taps {
  const mm_act *x; /* of mm_forward, as long as the backend */
  uint32_t count;
};

void concat(mm_backend *b, mm_act y, taps of) {
  if (mm_cu_later(b, concat, y, of) || !mm_cu_begin_op(b)) return;
  mm_cu_columns columns = {{}, of.count, of.x[0].width};
  for (uint32_t i = 0; i < of.count; i++) columns.x[i] = rows_of(of.x[i]);
  b->inputs.wrote(y.data);
  mm_cu_note(b, mm_cu_concat(rows_of(y), columns, b->step.rows, b->stream), "concat");
}

}  // namespace

void mm_cu_draft_concat(mm_backend *b, mm_act y, const mm_act *x, uint32_t count) { concat(b, y, {x, count}); }

void mm_cu_draft_store(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm) {
  if (mm_cu_later(b, mm_cu_draft_store, layer, kv, k_norm) || !mm_cu_begin_op(b)) return;
  mm_cu_head_work a = heads_of(b, nullptr, rows_of(kv), kv.width, 0, &b->draft.cells[layer]);
  a.k_norm = b->weights.values[k_norm];
  mm_cu_note(b, mm_cu_place_heads(a, {b->device.slot, b->device.pos}, b->stream), "cells of the draft");
}

void mm_cu_draft_attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  if (mm_cu_later(b, mm_cu_draft_attend, layer, o, qkv, q_norm, k_norm) || !mm_cu_begin_op(b)) return;
  const mm_dflash_config &c = b->c.draft->c;
  const mm_cu_rows rows = {b->device.slot, b->device.pos};
  mm_cu_head_work a = heads_of(b, rows_of(qkv), rows_of(qkv) + (size_t)c.heads * c.head_dim, qkv.width, c.heads, nullptr);
  a.q_norm = b->weights.values[q_norm], a.k_norm = b->weights.values[k_norm];
  b->inputs.wrote(o.data), b->inputs.wrote(qkv.data);
  mm_cu_note(b, mm_cu_place_heads(a, rows, b->stream), "heads of the draft");
  const mm_cu_draft_block block = {rows_of(qkv),    rows_of(o),
                                   c.heads,         c.kv_heads,
                                   c.head_dim,      b->step.tokens / b->step.spans,
                                   b->step.spans,   c.window[layer],
                                   c.causal[layer], b->draft.cells[layer],
                                   b->draft.work};
  mm_cu_note(b, mm_cu_attend_block(block, rows, b->stream), "attention of the draft");
}

void mm_cu_draft_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                         double eps) {
  if (mm_cu_later(b, mm_cu_draft_combine, h, n, residual, branch, scale, w, eps) || !mm_cu_begin_op(b)) return;
  b->step.deferred = {RESIDUAL_SUMMED, mm_cu_combine_of(b, h, n, residual, branch, scale, w, eps), h.width};
  if (b->c.options.eager) (void)mm_cu_begin_op(b);
}

void mm_cu_do_best(mm_backend *b) {
  if (mm_cu_later(b, mm_cu_do_best) || !mm_cu_begin_op(b)) return;
  mm_cu_note(b, mm_cu_share_logits(b, b->step.outs), "share logits");
  if (b->err.status != MM_OK) return;
  mm_cu_sample a = b->sampler.args;
  a.tokens = b->step.rows, a.out = b->device.out, a.slot = b->device.slot, a.sampling = b->device.sampling, a.last_id = b->draft.last_id;
  mm_cu_note(b, mm_cu_sample_tokens(a, b->step.outs, MM_CU_GREEDY, b->stream), "sample");
}
