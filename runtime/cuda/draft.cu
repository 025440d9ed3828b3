/* A draft next to the target on one device (ops.h, draft_forward.h). Its matrices, in BF16 or quantised, and its norms are copied as the
 * backend opens.
 * Its cells are bf16, laid out as the target's keys and values, in pages of the same numbers; of EAGLE-3 H numbers for each position come
 * on top. Passes of its chain are steps of their own, which are recorded and follow one another without the host: each takes the id that
 * the one before it left on the device. */
#include <math.h>

#include <algorithm>

#include "runtime/cuda/attention/draft_attention.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/core/built.h"
#include "runtime/engine/draft_forward.h"

static_assert(MM_CU_CHAIN == MM_EAGLE_CHAIN, "passes of a chain in the kernels and in the loader");

namespace {

bool is_eagle(const mm_backend *b) { return b->c.draft->c.kind == MM_DRAFT_EAGLE3; }

bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

/* The scales of a matrix, if it has any, under the file's grid. */
bool copy_scales(mm_backend *b, const mm_packed *w, mm_cu_weight *to, mm_err *err) {
  const size_t n = mm_cu_scales(to);
  if (!n) return true;
  float *const scale = b->memory.array<float>(n, err);
  to->scale = scale;
  return scale && mm_cu_check(cudaMemcpy(scale, w->plane[1], n * sizeof *scale, cudaMemcpyHostToDevice), "copy weights", err);
}

/* A matrix, whose rows lie on the device as in the file, but for their pitch. */
bool copy_matrix(mm_backend *b, const mm_packed *w, const char *name, mm_err *err) {
  mm_cu_weight *to = &b->weights.matrix[w];
  if (!mm_cu_describe(w, name, to, err)) return false;
  if (!b->c.options.act_quant) to->rounding = {};
  const size_t row = (size_t)w->k * mm_cu_bits(to->code) / 8;
  void *const data = b->memory.alloc(w->n * to->pitch, err);
  to->data = static_cast<const uint8_t *>(data);
  return data && mm_cu_check(cudaMemcpy2D(data, to->pitch, w->plane[0], row, row, w->n, cudaMemcpyHostToDevice), "copy weights", err) &&
         copy_scales(b, w, to, err);
}

/* Keys' and values' rows of a layer's joined projection, under scales of their own, which kernels want aligned. */
bool share_rows(mm_backend *b, const mm_packed *whole, const mm_packed *part, mm_err *err) {
  mm_cu_weight &to = b->weights.matrix[part];
  to = b->weights.matrix[whole];
  to.data += (size_t)(to.n - part->n) * to.pitch, to.n = part->n;
  to.scale_rows = to.scale_kind == MM_CU_PLAIN ? 0 : mm_cells(part->n, part->cell[1].n);
  return copy_scales(b, part, &to, err);
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
    if (!t.ids && !(t.cols ? copy_matrix(b, w, t.name, err) : copy_vector(b, w, err))) return false;
    if (t.scheme) b->weights.draft_codes = mm_cu_multiplies_blocks(&b->inputs.device, &b->weights.matrix[w]); /* all are alike */
  }
  for (uint32_t l = 0; l < d->c.layers; l++)
    if (!share_rows(b, &d->layer[l].qkv, &d->layer[l].kv, err)) return false;
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
    bf16 *const hidden = v && is_eagle(b) ? b->memory.array<bf16>((uint64_t)pages * MM_CU_PAGE * c.hidden, err) : nullptr;
    if (!v || (is_eagle(b) && !hidden)) return false;
    b->draft.cells.push_back({k, v, b->pages.device_table, b->pages.per_slot, nullptr, nullptr, hidden});
  }
  const size_t bytes = b->draft.cells.size() * sizeof(mm_cu_kv);
  mm_cu_kv *const list = b->memory.array<mm_cu_kv>(b->draft.cells.size(), err);
  b->draft.copies = {b->pages.device_table, list, c.layers, c.kv_heads, c.head_dim * (uint32_t)sizeof(bf16)};
  if (is_eagle(b)) b->draft.copies.index_bytes = c.hidden * (uint32_t)sizeof(bf16);
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

/* Chains, the head's logits and ids, and which of those are the target's, and sampled. */
bool make_chain(mm_backend *b, mm_err *err) {
  const mm_dflash *d = b->c.draft;
  const mm_dflash_config &c = d->c;
  draft_buffers &x = b->draft;
  if (!is_eagle(b)) return true;
  x.rows = (uint32_t)mm_min(b->c.limits.max_tokens, UINT64_C(2) * b->c.limits.slots); /* no bucket is larger */
  x.chain = b->memory.array<bf16>((uint64_t)b->c.limits.slots * MM_CU_CHAIN * 2 * c.kv_heads * c.head_dim, err);
  x.logits = x.chain ? b->memory.array<float>((uint64_t)x.rows * c.draft_vocab, err) : nullptr;
  x.id = x.logits ? b->memory.array<int32_t>((uint64_t)MM_CU_CHAIN * x.rows, err) : nullptr;
  std::vector<int32_t> map(c.draft_vocab);
  std::vector<uint32_t> never(MM_CU_WORDS(c.draft_vocab));
  for (uint32_t i = 0; i < c.draft_vocab; i++) {
    map[i] = mm_dflash_id(d, i);
    never[i / 32] |= (uint32_t)(b->c.never && b->c.never[map[i]]) << i % 32;
  }
  x.never = x.id ? b->memory.array<uint32_t>(never.size(), err) : nullptr;
  x.map = x.never && c.mapped ? b->memory.array<int32_t>(map.size(), err) : nullptr;
  return x.never && (x.map || !c.mapped) &&
         mm_cu_check(cudaMemcpy(x.never, never.data(), never.size() * sizeof never[0], cudaMemcpyHostToDevice), "copy mask", err) &&
         (!x.map || mm_cu_check(cudaMemcpy(x.map, map.data(), map.size() * sizeof map[0], cudaMemcpyHostToDevice), "copy ids", err));
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
  return copy_weights(b, err) && make_cells(b, err) && make_buffers(b, err) && make_chain(b, err);
}

namespace {

struct sources {
  mm_act x[MM_CU_CONCAT];
  uint32_t count;
};

void concat(mm_backend *b, mm_act y, sources of) {
  if (mm_cu_later(b, concat, y, of) || !mm_cu_begin_op(b)) return;
  mm_cu_columns columns = {{}, of.count, of.x[0].width};
  for (uint32_t i = 0; i < of.count; i++) columns.x[i] = rows_of(of.x[i]);
  b->inputs.wrote(y.data);
  mm_cu_note(b, mm_cu_concat(rows_of(y), columns, b->step.rows, b->stream), "concat");
}

}  // namespace

void mm_cu_draft_concat(mm_backend *b, mm_act y, const mm_act *x, uint32_t count) {
  static_assert(MM_DFLASH_TAPS <= MM_CU_CONCAT, "room for all taps");
  sources of = {{}, count};
  std::copy(x, x + count, of.x);
  concat(b, y, of);
}

void mm_cu_draft_store(mm_backend *b, uint32_t layer, mm_act kv, const mm_packed *k_norm) {
  if (mm_cu_later(b, mm_cu_draft_store, layer, kv, k_norm) || !mm_cu_begin_op(b)) return;
  mm_cu_head_work a = heads_of(b, nullptr, rows_of(kv), kv.width, 0, &b->draft.cells[layer]);
  a.k_norm = k_norm ? b->weights.values[k_norm] : nullptr;
  mm_cu_note(b, mm_cu_place_heads(a, {b->device.slot, b->device.pos}, b->stream), "cells of the draft");
}

/* Turns the step's heads and attends; chain: to the rows of `pass`, and the passes before it. */
static void attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const float *q_norm, const float *k_norm, bf16 *chain,
                   uint32_t pass) {
  const mm_dflash_config &c = b->c.draft->c;
  const mm_cu_rows rows = {b->device.slot, b->device.pos};
  mm_cu_head_work a = heads_of(b, rows_of(qkv), rows_of(qkv) + (size_t)c.heads * c.head_dim, qkv.width, c.heads, nullptr);
  a.q_norm = q_norm, a.k_norm = k_norm;
  b->inputs.wrote(o.data), b->inputs.wrote(qkv.data);
  mm_cu_note(b, mm_cu_place_heads(a, rows, b->stream), "heads of the draft");
  const mm_cu_draft_block block = {rows_of(qkv),
                                   rows_of(o),
                                   c.heads,
                                   c.kv_heads,
                                   c.head_dim,
                                   chain ? 1 : b->step.tokens / b->step.spans,
                                   chain ? b->step.rows : b->step.spans,
                                   c.window[layer],
                                   c.causal[layer],
                                   b->draft.cells[layer],
                                   b->draft.work,
                                   chain,
                                   pass,
                                   c.head_dim == MM_CU_GROUP ? b->inputs.codes_too(rows_of(o), b->step.rows, o.width) : mm_cu_codes{}};
  mm_cu_note(b, mm_cu_attend_block(block, rows, b->stream), "attention of the draft");
}

void mm_cu_draft_attend(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  if (mm_cu_later(b, mm_cu_draft_attend, layer, o, qkv, q_norm, k_norm) || !mm_cu_begin_op(b)) return;
  attend(b, layer, o, qkv, b->weights.values[q_norm], b->weights.values[k_norm], nullptr, 0);
}

void mm_cu_draft_chain(mm_backend *b, uint32_t pass, mm_act o, mm_act qkv) {
  if (mm_cu_later(b, mm_cu_draft_chain, pass, o, qkv) || !mm_cu_begin_op(b)) return;
  attend(b, 0, o, qkv, nullptr, nullptr, b->draft.chain, pass);
}

static mm_cu_hidden hidden_of(const mm_backend *b) {
  return {b->draft.cells[0].index, b->pages.device_table, b->pages.per_slot, b->c.draft->c.hidden};
}

void mm_cu_draft_keep(mm_backend *b, mm_act x) {
  if (mm_cu_later(b, mm_cu_draft_keep, x) || !mm_cu_begin_op(b)) return;
  mm_cu_note(b, mm_cu_hidden_keep(hidden_of(b), rows_of(x), {b->device.slot, b->device.pos}, b->step.rows, b->stream),
             "cells of the draft");
}

void mm_cu_draft_before(mm_backend *b, mm_act y) {
  if (mm_cu_later(b, mm_cu_draft_before, y) || !mm_cu_begin_op(b)) return;
  b->inputs.wrote(y.data);
  mm_cu_note(b, mm_cu_hidden_before(hidden_of(b), rows_of(y), {b->device.slot, b->device.pos}, b->step.rows, b->stream),
             "cells of the draft");
}

void mm_cu_draft_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                         double eps) {
  if (mm_cu_later(b, mm_cu_draft_combine, h, n, residual, branch, scale, w, eps)) return;
  const mm_act all = b->groups.from; /* a scatter's, which comes along */
  const bool along = all.data && b->groups.to.data == branch.data && mm_cu_combines_groups(b->peers, b->groups.rows);
  if (along) b->groups.to = b->groups.from = {};
  if (!mm_cu_begin_op(b)) return;
  b->step.deferred = {along ? RESIDUAL_GROUPS : RESIDUAL_SUMMED, mm_cu_combine_of(b, h, n, residual, along ? all : branch, scale, w, eps),
                      h.width};
  if (b->c.options.eager) (void)mm_cu_begin_op(b);
}

void mm_cu_do_best(mm_backend *b) {
  if (mm_cu_later(b, mm_cu_do_best) || !mm_cu_begin_op(b)) return;
  const draft_buffers &x = b->draft;
  const mm_draft_step chain = b->step.chain;
  if (!chain.passes) mm_cu_note(b, mm_cu_share_logits(b, b->step.outs), "share logits");
  if (b->err.status != MM_OK) return;
  mm_cu_sample a = b->sampler.args;
  if (chain.passes) {
    a.logits = x.logits, a.never = x.never, a.map = x.map, a.id = x.id + (size_t)chain.pass * x.rows;
    a.vocab = a.vocab_rows = b->c.draft->c.draft_vocab;
  }
  a.tokens = b->step.rows, a.out = b->device.out, a.slot = b->device.slot, a.sampling = b->device.sampling, a.last_id = x.last_id;
  mm_cu_note(b, mm_cu_sample_tokens(a, b->step.outs, (mm_cu_sampling)(b->step.ending - GREEDY), b->stream), "sample");
}

cudaError_t mm_cu_copy_best(mm_backend *b) {
  const uint32_t passes = b->step.chain.passes;
  const size_t bytes = b->step.wanted * sizeof(int32_t);
  int32_t *const to = b->step.memory->id;
  if (!passes) return cudaMemcpyAsync(to, b->sampler.args.id, bytes, cudaMemcpyDeviceToHost, b->stream);
  return cudaMemcpy2DAsync(to, bytes, b->draft.id, b->draft.rows * sizeof(int32_t), bytes, passes, cudaMemcpyDeviceToHost, b->stream);
}

/* ---- dry run ---- */

void mm_cu_place_draft(mm_forward *f, void *place) {
  const mm_dflash *d = f->backend->c.draft;
  if (!d) return;
  const uint32_t H = d->c.hidden, heads = d->c.heads * d->c.head_dim, kv = 2 * d->c.kv_heads * d->c.head_dim;
  f->draft = {d, {place, d->c.taps * H}, {place, H}, {place, H}, {place, kv}, {place, heads + kv}, {place, heads}};
  f->draft.embedded = {place, H}, f->draft.joined = {place, 2 * H};
  for (uint32_t i = 0; i < d->c.taps; i++) f->tap[i] = f->draft.tap[i] = {place, H};
}

/* A block for each span, or the passes of a chain of a row for each. */
bool mm_cu_dry_run_draft(mm_forward *f, uint32_t spans, mm_err *err) {
  if (!f->draft.d) return true;
  const bool chain = is_eagle(f->backend);
  const uint32_t block = chain ? 1 : f->draft.d->c.block, rows = spans * block;
  if (rows > f->backend->c.limits.max_tokens || (chain && rows > f->backend->c.limits.slots)) return true;
  const std::vector<int32_t> id(rows, 0);
  std::vector<uint32_t> out;
  std::vector<mm_span> span;
  for (uint32_t i = 0; i < spans; i++) span.push_back({0, i * block, block, MM_CU_CHAIN});
  for (uint32_t i = 0; i < rows; i++)
    if (chain || i % block) out.push_back(i);
  const mm_batch batch = {rows, id.data(), spans, span.data(), (uint32_t)out.size(), out.data()};
  mm_err first = {};
  mm_cu_forget_lack();
  bool ok = chain || mm_draft_block(&f->draft, f, &batch, nullptr, nullptr, &first);
  for (uint32_t pass = 0; ok && chain && pass < 2; pass++)
    ok = mm_draft_chain(&f->draft, f, &batch, {true, pass, 2}, nullptr, nullptr, &first);
  const char *lack = mm_cu_lack();
  return ok || mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "%s in a step of the draft: %s",
                       f->backend->failed ? f->backend->failed : "a step", *lack ? lack : first.text);
}
