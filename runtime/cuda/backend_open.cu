/* Opening the CUDA backend: what the device and the model must be, weights, caches and buffers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <mutex>

#include "loader/stream/gpu_reads.h"
#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/load.h"
#include "runtime/engine/position.h"
#include "runtime/engine/random_draw.h"

namespace {

/* Weights on their way into the plan. */
struct weights_plan {
  mm_backend *b;
  mm_cu_load *load;
  uint32_t group;
  mm_cu_whole_rows *ranks; /* those that the next matrices are cut for */

  bool value(const mm_packed *w, const char *name, mm_err *err) const {
    return !w->scheme || load->values(w, name, group, &b->weights.values[w], err);
  }
  /* Weights of a norm, to which 1 is added once they are there if the model says so. */
  bool norm(const mm_packed *w, const char *name, mm_err *err) const {
    if (w->scheme && b->c.model->norm_offset) {
      const float **at = &b->weights.values[w];
      const size_t n = w->n;
      load->after(group, [=](cudaStream_t s) { return mm_cu_add_one(const_cast<float *>(*at), n, s); });
    }
    return value(w, name, err);
  }
  bool matrix(const mm_packed *w, const char *name, mm_err *err) const {
    if (!w->scheme) return true;
    mm_cu_weight *to = &b->weights.matrix[w];
    return load->matrix(w, name, {group, false, 0}, to, err) && settle(w, name, to, err);
  }
  /* The experts of a layer: each expert's codes are a group of their own. */
  bool experts(const mm_packed *w, const char *name, uint32_t l, mm_err *err) const {
    if (!w->scheme) return true;
    mm_cu_weight *to = &b->weights.matrix[w];
    return load->matrix(w, name, {group, true, mm_cu_group_of_experts(b->c.model, l)}, to, err) && settle(w, name, to, err);
  }
  bool settle(const mm_packed *w, const char *name, mm_cu_weight *to, mm_err *err) const {
    to->whole.ranks = ranks;
    if (b->c.options.act_quant && w != &b->c.weights->head) return mm_cu_rounds(w, name, err);
    to->rounding = to->whole = {}; /* the head's inputs stay as they are */
    return true;
  }
  /* A router that is stored as bf16 is read so; another one as f32, and in three pieces of bf16 for many rows. */
  bool router(const mm_packed *w, const char *name, mm_err *err) const {
    if (!w->scheme || (w->scheme->code == MM_CODE_PLAIN && w->scheme->plane[0].dtype == MM_BF16)) return matrix(w, name, err);
    const bf16 **pieces = &b->weights.router[w];
    const float **wide = &b->weights.values[w];
    const size_t n = (size_t)w->n * w->k;
    load->after(group, [=](cudaStream_t s) { return mm_cu_split(const_cast<bf16 *>(*pieces), *wide, n, s); });
    return load->reserve(3 * n, pieces, err) && value(w, name, err);
  }
};

bool plan_layer(weights_plan p, uint32_t l, mm_err *err) {
  const mm_layer_weights *y = &p.b->c.weights->layer[l];
  const bool lightning = p.b->c.model->attn[l] == MM_ATTN_LIGHTNING, dense = p.b->c.model->ffn[l] == MM_FFN_DENSE;
  const char *const up = dense ? "mlp.gate_up_proj.weight" : "block_sparse_moe.shared_experts.gate_up_proj.weight";
  const char *const down = dense ? "mlp.down_proj.weight" : "block_sparse_moe.shared_experts.down_proj.weight";
  char name[96];
  const auto of = [&](const char *part) {
    snprintf(name, sizeof name, "model.layers.%u.%s", l, part);
    return name;
  };
  p.group = mm_cu_group_of_layer(l), p.ranks = &p.b->group_rows;
  bool ok = p.norm(&y->post_norm, of("post_attention_layernorm.weight"), err) && p.norm(&y->attn_norm, of("self_attn.norm.weight"), err) &&
            p.norm(&y->q_norm, of("self_attn.q_norm.weight"), err) && p.norm(&y->k_norm, of("self_attn.k_norm.weight"), err) &&
            p.norm(&y->index_q_norm, of("self_attn.index_q_norm.weight"), err) &&
            p.norm(&y->index_k_norm, of("self_attn.index_k_norm.weight"), err) &&
            p.value(&y->router_bias, of("block_sparse_moe.e_score_correction_bias"), err) &&
            p.matrix(&y->qkv, of("self_attn.qkv_proj.weight"), err) &&
            p.matrix(&y->out, of(lightning ? "self_attn.out_proj.weight" : "self_attn.o_proj.weight"), err) &&
            p.matrix(&y->output_gate, of("self_attn.output_gate.weight"), err) &&
            p.matrix(&y->index_q, of("self_attn.index_q_proj.weight"), err) &&
            p.matrix(&y->index_k, of("self_attn.index_k_proj.weight"), err);
  p.ranks = &p.b->whole_rows;
  ok = ok && p.matrix(&y->mlp_up, of(up), err) && p.matrix(&y->mlp_down, of(down), err) &&
       p.experts(&y->w13, of("block_sparse_moe.experts.w13_weight"), l, err) &&
       p.experts(&y->w2, of("block_sparse_moe.experts.w2_weight"), l, err) && p.router(&y->router, of("block_sparse_moe.gate.weight"), err);
  p.group = l == p.b->c.weights->layer_first ? 0 : mm_cu_group_of_layer(l - 1);
  return ok && p.norm(&y->input_norm, of("input_layernorm.weight"), err);
}

/* Where every weight will lie, by its shape; no device is options. In the order of layers, which is that of the files. */
bool plan_weights(mm_backend *b, mm_cu_load *load, mm_err *err) {
  const mm_rank_weights *w = b->c.weights;
  const uint32_t layers = b->c.model->layers;
  weights_plan p = {b, load, 0, &b->group_rows};
  if (!p.matrix(&w->embed, "model.embed_tokens.weight", err)) return false;
  if (b->weights.matrix[&w->embed].code != MM_CU_BF16)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, "model.embed_tokens.weight"),
                   "found scheme %s; the cuda backend embeds bf16", w->embed.scheme->name);
  for (uint32_t l = w->layer_first; l < w->layer_end; l++) {
    if (!plan_layer(p, l, err)) return false;
  }
  p.group = mm_cu_group_of_layer(layers - 1);
  if (!p.norm(&w->final_norm, "model.norm.weight", err)) return false;
  p.group = mm_cu_group_of_head(b->c.model);
  return p.matrix(&w->head, "lm_head.weight", err);
}

/* Sets the device properties for dispatch, and whether all products of the model take codes in blocks. */
bool settle_inputs(mm_backend *b, mm_err *err) {
  if (!mm_cu_check(mm_cu_device_here(&b->inputs.device), "ask for clusters of blocks", err)) return false;
  b->weights.all_codes = b->c.options.act_quant;
  for (uint32_t l = 0; l < b->c.model->layers; l++) {
    const mm_layer_weights *y = &b->c.weights->layer[l];
    for (const mm_packed *p : {&y->qkv, &y->out, &y->output_gate, &y->mlp_up, &y->mlp_down, &y->w13, &y->w2})
      b->weights.all_codes &= !p->scheme || mm_cu_multiplies_blocks(&b->inputs.device, &b->weights.matrix[p]);
  }
  return true;
}

/* What the size of the cache follows from (loader/stream/capacity.h) is what is allocated here. */
static_assert(MM_DEVICE_DECODE_ROWS == MM_CU_DECODE_ROWS && MM_DEVICE_FEW_EACH == MM_CU_FEW_EACH &&
              MM_DEVICE_LEAST_INVARIANT == kLeastInvariant && MM_DEVICE_SEEN == MM_CU_SEEN && MM_DEVICE_LOGPROBS == MM_CU_LOGPROBS &&
              MM_DEVICE_TILE == MM_CU_GQA_KEYS);
static_assert(MM_GPU_RANKS == MM_CU_PEERS && MM_GPU_HIDDEN == MM_CU_MAX_HIDDEN && MM_GPU_WIDTH == MM_CU_MAX_WIDTH &&
              MM_GPU_EXPERTS == MM_CU_MAX_EXPERTS && MM_GPU_TOP_K == MM_CU_MAX_TOP_K && MM_GPU_GROUP_HEADS == MM_CU_BLOCK_GROUP &&
              MM_GPU_INDEX_HEADS == MM_CU_INDEX_HEADS); /* loader/stream/gpu_reads.h */
static_assert(MM_DEVICE_LARGEST_BUCKET == kBuckets[sizeof kBuckets / sizeof *kBuckets - 1]);

/* Tables under which every slot has pages of its own, until a batch brings others. */
bool open_table(mm_backend *b, mm_err *err) {
  b->memory.what = "tables of pages";
  b->pages.per_slot = (uint32_t)mm_ceil_div(b->c.limits.max_positions, MM_CU_PAGE);
  const uint64_t entries = (uint64_t)b->c.limits.slots * b->pages.per_slot;
  if (entries > UINT32_MAX)
    return mm_fail(err, MM_USAGE, "E_LIMITS", mm_at(NULL, NULL), "found %u slots of %u pages, expected fewer than 2^32 in all",
                   b->c.limits.slots, b->pages.per_slot);
  b->pages.host_table.resize(entries);
  for (uint64_t i = 0; i < entries; i++) b->pages.host_table[i] = (uint32_t)i;
  b->pages.device_table = b->memory.array<uint32_t>(entries, err);
  return b->pages.device_table &&
         mm_cu_check(cudaMemcpy(b->pages.device_table, b->pages.host_table.data(), entries * 4, cudaMemcpyHostToDevice), "copy pages", err);
}

/* Opens the table of arrays that page copies cover. */
bool open_page_work(mm_backend *b, mm_err *err) {
  std::vector<mm_cu_kv> kv;
  for (const layer_cache &c : b->cache) {
    if (c.kv.k) kv.push_back(c.kv);
  }
  mm_cu_kv *const to = b->memory.array<mm_cu_kv>(kv.size(), err);
  const uint32_t token_bytes = b->heads.head_dim * (b->c.options.kv_fp8 ? 1 : 2);
  const uint32_t index_bytes = b->c.model->index_dim * (b->c.options.index_fp8 ? 1 : 2);
  b->pages.work = {b->pages.device_table, to, (uint32_t)kv.size(), b->heads.kv_heads, token_bytes, index_bytes};
  return to && mm_cu_check(cudaMemcpy(to, kv.data(), kv.size() * sizeof kv[0], cudaMemcpyHostToDevice), "copy caches", err);
}

bool open_caches(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const mm_limits *limits = &b->c.limits;
  const uint32_t d = m->head_dim, first_head = mm_attn_rank(b->c.weights) * b->heads.heads;
  uint32_t pages;
  if (!mm_limits_pages(limits, &pages, err) || !open_table(b, err)) return false;
  const uint64_t cells = (uint64_t)pages * b->heads.kv_heads * MM_CU_PAGE;
  const uint64_t cell_bytes = b->c.options.kv_fp8 ? d : 2 * d, plane = mm_round_up(cells * cell_bytes, 256);
  const uint64_t scales = b->c.options.kv_fp8 ? mm_round_up(cells * sizeof(float), 256) : 0;
  const size_t state = (size_t)b->heads.heads * d * d;
  const mm_rank_weights *w = b->c.weights;
  b->states.per_slot = (size_t)std::count(m->attn + w->layer_first, m->attn + w->layer_end, MM_ATTN_LIGHTNING) * state;
  b->memory.what = "lightning states";
  if (b->states.per_slot && !(b->states.data = b->memory.array<float>(limits->slots * b->states.per_slot, err))) return false;
  b->cache.resize(m->layers);
  b->memory.what = "the KV cache";
  const uint64_t caches = 2 * (uint64_t)std::count_if(m->attn + w->layer_first, m->attn + w->layer_end, mm_attn_has_cache);
  const uint64_t sparse = (uint64_t)std::count(m->attn + w->layer_first, m->attn + w->layer_end, MM_ATTN_SPARSE);
  const uint64_t keys = (uint64_t)pages * MM_CU_PAGE, index = mm_round_up(keys * m->index_dim * (b->c.options.index_fp8 ? 1 : 2), 256);
  const uint64_t index_scales = b->c.options.index_fp8 ? mm_round_up(keys * sizeof(float), 256) : 0;
  const uint64_t all = caches * (plane + scales) + sparse * (index + index_scales);
  char *at = caches ? static_cast<char *>(b->memory.alloc(all, err)) : nullptr; /* at once: nothing is rounded */
  if (caches && !at) return false;
  const auto take = [&](uint64_t bytes) { return static_cast<void *>((at += bytes) - bytes); };
  for (uint32_t l = w->layer_first, lightning = 0; l < w->layer_end; l++) {
    layer_cache &c = b->cache[l];
    if (m->attn[l] == MM_ATTN_LIGHTNING) {
      std::vector<float> slope(b->heads.heads);
      for (uint32_t h = 0; h < slope.size(); h++) slope[h] = (float)mm_lightning_decay(m, l, first_head + h);
      c.slope = b->memory.array<float>(slope.size(), err);
      c.state = b->states.data + lightning++ * state;
      if (!c.slope) return false;
      if (!mm_cu_check(cudaMemcpy(c.slope, slope.data(), slope.size() * 4, cudaMemcpyHostToDevice), "copy slopes", err)) return false;
    } else {
      c.kv = {take(plane), take(plane), b->pages.device_table, b->pages.per_slot};
      if (b->c.options.kv_fp8) c.kv.k_scale = static_cast<float *>(take(scales)), c.kv.v_scale = static_cast<float *>(take(scales));
      if (m->attn[l] != MM_ATTN_SPARSE) continue;
      c.kv.index = static_cast<bf16 *>(take(index));
      if (b->c.options.index_fp8) c.kv.index_scale = static_cast<float *>(take(index_scales));
    }
  }
  if (!open_page_work(b, err)) return false;
  std::vector<float> freq(m->rotary_dim / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = mm_rope_inv_freq(m, i);
  b->attention.inv_freq = b->memory.array<float>(freq.size(), err);
  return b->attention.inv_freq &&
         mm_cu_check(cudaMemcpy(b->attention.inv_freq, freq.data(), freq.size() * 4, cudaMemcpyHostToDevice), "copy frequencies", err);
}

bool open_experts(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const uint64_t tokens = b->c.limits.max_tokens, pairs = tokens * m->top_k;
  uint64_t inter = 1, dense = 0;
  for (uint32_t l = 0; l < m->layers; l++) {
    inter = mm_max(inter, b->c.weights->layer[l].w2.k), dense = mm_max(dense, b->c.weights->layer[l].mlp_down.k);
  }
  const uint64_t slots = mm_min(m->experts, MM_CU_DECODE_ROWS * m->top_k);
  mm_cu_memory *y = &b->memory;
  y->what = "buffers of experts";
  b->experts.route = {m->experts,
                      m->top_k,
                      m->router == MM_ROUTER_SIGMOID_BIAS,
                      nullptr,
                      nullptr,
                      y->array<float>(tokens * m->experts, err),
                      y->array<uint32_t>(pairs, err),
                      y->array<float>(pairs, err),
                      y->array<uint32_t>(1, err),
                      y->array<uint32_t>(1, err),
                      y->array<uint32_t>(slots, err),
                      y->array<uint32_t>(slots, err),
                      y->array<float>(slots * MM_CU_DECODE_ROWS, err),
                      y->array<unsigned long long>(MM_CU_MAX_TOP_K, err),
                      y->array<uint32_t>(m->experts + UINT64_C(1), err),
                      y->array<uint32_t>(pairs, err)};
  uint32_t first = b->c.weights->layer_first; /* with experts, if any has */
  while (first + 1 < b->c.weights->layer_end && !b->c.weights->layer[first].w13.scheme) first++;
  const mm_packed *own = &b->c.weights->layer[first].w13;
  if (own->scheme && own->lead < m->experts) b->experts.route.first = b->c.weights->expert_first, b->experts.route.held = own->lead;
  b->experts.router_product = y->array<float>(tokens > MM_CU_DECODE_ROWS ? tokens * 3 * m->experts : 1, err);
  b->experts.middle =
      y->array<bf16>(mm_max(slots * MM_CU_DECODE_ROWS, mm_max(pairs, 3 * mm_min(tokens, MM_CU_FEW_EACH) * m->top_k)) * inter, err);
  b->experts.pair_out = y->array<float>(tokens > 1 ? pairs * m->hidden : 1, err);
  b->experts.load = y->array<unsigned long long>((uint64_t)m->layers * m->experts, err);
  if (!mm_cu_open_placement(b, err)) return false;
  if (!b->c.attach && !mm_cu_check(cudaMallocHost(&b->experts.used, MM_CU_MAX_EXPERTS / 8), "cudaMallocHost", err)) return false;
  uint64_t logprobs = 0;
  for (const auto &w : b->weights.matrix)
    logprobs = mm_max(logprobs, w.second.whole.whole_k ? mm_cu_published_largest(&w.second.whole) : 0);
  b->whole_rows.capacity = mm_round_up(pairs * logprobs, 4);
  b->whole_rows.largest = logprobs ? y->array<float>(b->whole_rows.capacity, err) : nullptr;
  b->group_rows = b->whole_rows;
  const uint32_t of_draft = b->c.draft ? mm_dflash_widest(&b->c.draft->c) : 0;
  const uint32_t widest = (uint32_t)mm_max(mm_max(m->hidden, dense), mm_max(b->heads.heads * b->heads.head_dim, of_draft));
  return err->status == MM_OK && b->inputs.open_spans(y, err) &&
         (!b->c.options.act_quant || b->inputs.open(y, (uint32_t)tokens, widest, err));
}

bool open_batch(mm_backend *b, mm_err *err) {
  const uint32_t rows = b->c.limits.max_tokens;
  b->memory.what = "buffers of attention";
  batch_arrays none;
  const bool by_head = mm_model_extended(b->c.model);
  if (!by_head) b->attention.far = mm_cu_plan_far(b->heads, b->c.limits.slots, b->c.limits.max_positions);
  const size_t slots = b->groups.count > 1 ? mm_round_up(rows * sizeof(int32_t), 256) : 0;
  const size_t bytes =
      slots + mm_cu_place_batch(rows, false, nullptr, &none) + mm_cu_gqa_items(b->heads, rows, b->attention.far) * sizeof(uint2);
  for (step_memory &m : b->memory_of_step) {
    if (!mm_cu_check(cudaMallocHost(&m.block, bytes), "cudaMallocHost", err) ||
        !mm_cu_check(cudaMallocHost(&m.id, rows * sizeof *m.id), "cudaMallocHost", err) ||
        !mm_cu_check(cudaMallocHost(&m.edit, kEdits * sizeof *m.edit), "cudaMallocHost", err) ||
        !mm_cu_check(cudaMallocHost(&m.copy, b->c.limits.slots * sizeof *m.copy), "cudaMallocHost", err) ||
        !mm_cu_check(cudaEventCreateWithFlags(&m.done, cudaEventDisableTiming), "cudaEventCreate", err))
      return false;
  }
  return (b->device_block = b->memory.alloc(bytes, err)) &&
         (b->attention.work =
              b->memory.alloc(by_head ? mm_cu_block_work(b->heads, rows) : mm_cu_gqa_work(b->heads, rows, b->attention.far), err));
}

/* Logits of a row for each slot, so that steps of single tokens find their room; a prompt whose rows are all wanted makes more. */
bool open_logits(mm_backend *b, mm_err *err) {
  uint64_t rows = mm_min(b->c.limits.slots, b->c.limits.max_tokens);
  for (uint32_t n : kBuckets) {
    if (rows > n) continue;
    rows = mm_min(n, b->c.limits.max_tokens);
    break;
  }
  if (b->c.options.batch_invariant) rows = mm_max(rows, kLeastInvariant);
  return mm_cu_make_logits(b, rows, err);
}

bool open_sampler(mm_backend *b, mm_err *err) {
  const uint32_t rows = b->c.limits.max_tokens, vocab = b->c.model->vocab;
  mm_cu_memory *y = &b->memory;
  y->what = "buffers of sampling";
  std::vector<uint32_t> never(MM_CU_WORDS(vocab));
  for (uint32_t i = 0; b->c.never && i < vocab; i++) never[i / 32] |= (uint32_t)(b->c.never[i] != 0) << i % 32;
  uint32_t *mask = y->array<uint32_t>(never.size(), err);
  b->sampler.args.never = mask, b->sampler.args.vocab = vocab,
  b->sampler.args.vocab_rows = mm_attn_tp(b->c.weights) * b->c.weights->vocab_rows;
  b->sampler.args.id = y->array<int32_t>(rows, err), b->sampler.args.last_id = y->array<int32_t>(b->c.limits.slots, err);
  b->sampler.args.best = y->array<unsigned long long>(rows, err), b->sampler.args.ticket = y->array<uint32_t>(rows, err);
  b->sampler.ids = y->array<int32_t>((uint64_t)b->c.limits.slots * b->c.limits.max_positions, err);
  return err->status == MM_OK &&
         mm_cu_check(cudaMemcpy(mask, never.data(), never.size() * sizeof *mask, cudaMemcpyHostToDevice), "copy mask", err);
}

/* ---- what the model and the device must be ---- */

bool check_model(const mm_backend_config *c, mm_err *err) {
  const mm_model *m = c->model;
  const mm_where nowhere = mm_at(NULL, NULL);
  if (!mm_gpu_takes_model(m, c->weights->tp, mm_attn_tp(c->weights), err)) return false;
  const char *const size = m->vocab > MM_DRAW_IDS ? "vocab" : "tokens of a step";
  const uint32_t found = m->vocab > MM_DRAW_IDS ? m->vocab : c->limits.max_tokens,
                 most = m->vocab > MM_DRAW_IDS ? MM_DRAW_IDS : MM_CU_MAX_TOKENS;
  if (found > most)
    return mm_fail(err, MM_UNSUPPORTED, "E_MODEL", nowhere, "found %s %u; the cuda backend has kernels for at most %u", size, found, most);
  return true;
}

/* Each kernel that runs everywhere has a form that MM_CU_SHARED_LEAST is enough for: a device without it is refused before any weight is
 * uploaded. */
bool check_shared(mm_err *err) {
  const size_t most = mm_cu_shared_most(), needs = MM_CU_SHARED_LEAST;
  if (needs <= most) return true;
  int device = 0;
  cudaDeviceProp p = {};
  if (!mm_cu_check(cudaGetDevice(&device), "cudaGetDevice", err) ||
      !mm_cu_check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties", err))
    return false;
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "found device %d, %s, sm_%d%d, with %zu bytes of shared memory for a block; the kernels need %zu (devices from sm_80 on "
                 "have them)",
                 device, p.name, p.major, p.minor, most, needs);
}

/* ---- dry run ---- */

/* A dry run of one step: every launch is checked (mm_cu_judge), none is done. rows: single tokens, or chunks of `each`. */
bool dry_run_step(mm_forward *f, uint32_t rows, uint32_t each, mm_err *err) {
  std::vector<int32_t> id(rows, 0);
  std::vector<uint32_t> out(rows);
  std::vector<mm_span> span;
  for (uint32_t i = 0; i < rows; i += each) span.push_back({0, i, (uint32_t)mm_min(each, rows - i), 0});
  for (uint32_t i = 0; i < rows; i++) out[i] = i;
  const std::vector<mm_sampling> sampling(rows, mm_sampling{1, 0.5, 0, 1});
  mm_backend *b = f->backend;
  const mm_batch batch = {rows, id.data(), (uint32_t)span.size(), span.data(), rows, out.data(), sampling.data()};
  uint32_t of_groups[MM_CU_PEERS + 1]; /* other groups have none */
  for (uint32_t k = 0; k <= b->groups.count; k++) of_groups[k] = k <= b->groups.own ? 0 : rows;
  const mm_group_rows groups = {batch, of_groups};
  f->rows = &groups;
  mm_err first = {};
  mm_cu_forget_lack();
  if (mm_forward_step(f, &batch, nullptr, &first)) return true;
  const char *lack = mm_cu_lack();
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL), "%s in steps of %u rows: %s", b->failed ? b->failed : "a step", rows,
                 *lack ? lack : first.text);
}

/* The same for the page copies before a step that continues in other pages. */
bool dry_run_pages(mm_backend *b, mm_err *err) {
  mm_cu_page_work w = b->pages.work;
  w.edits = kEdits, w.copies = (uint32_t)mm_min(b->c.limits.slots, b->c.limits.max_tokens);
  return mm_cu_check(mm_cu_prepare_pages(w, b->stream), "pages", err);
}

/* Sampling with all options, and with none. */
bool dry_run_sampling(mm_backend *b, mm_err *err) {
  mm_cu_sample_options q = {};
  q.copies = q.logprobs_wanted = true, q.most_bias = b->sampler.args.vocab, q.penalised = 1, q.longest = b->c.limits.max_positions;
  return mm_cu_check(mm_cu_sample_tokens(b->sampler.args, b->c.limits.max_tokens, MM_CU_GREEDY, b->stream), "sample", err) &&
         mm_cu_check(mm_cu_adjust(b->sampler.args, nullptr, q, b->c.limits.max_tokens, b->stream), "adjust", err) &&
         mm_cu_check(mm_cu_logprobs(b->sampler.args, q, b->c.limits.max_tokens, b->stream), "logprobs", err) &&
         mm_cu_check(mm_cu_score(b->sampler.args, nullptr, nullptr, b->c.limits.max_tokens, b->stream), "likelihood", err);
}

/* Whatever a step's launches may ask for, this device and the code built for it have: decode steps of every kind of size, and prefills. The
 * acts are not there yet; their places are never read. It also loads every kernel, so that none is loaded while a step is recorded. */
bool dry_run(mm_backend *b, mm_err *err) {
  mm_forward f = {};
  f.ops = &mm_ops_cuda, f.backend = b, f.model = b->c.model, f.weights = b->c.weights;
  uint32_t qkv = 0;
  for (uint32_t l = 0; l < f.model->layers; l++) qkv = (uint32_t)mm_max(qkv, f.weights->layer[l].qkv.n);
  char *const place = static_cast<char *>(b->device_block);
  mm_act *acts[] = {&f.h, &f.n, &f.spare, &f.branch, &f.qkv, &f.o, &f.gate, &f.index_q, &f.index_k, &f.all_n, &f.all_branch};
  for (uint32_t i = 0; i < sizeof acts / sizeof *acts; i++) *acts[i] = {place + i * 1024, b->c.model->hidden};
  f.qkv.width = qkv, f.o.width = f.gate.width = b->heads.heads * b->heads.head_dim;
  if (b->groups.count == 1) f.all_n = f.all_branch = {};
  mm_cu_place_draft(&f, place);
  f.index_q.width = b->attention.select.heads * b->attention.select.dim, f.index_k.width = b->attention.select.dim;
  float *const logits = b->logits.own;
  b->logits.own = reinterpret_cast<float *>(place), b->dry_runs = mm_cu_dry_run = true;
  const uint32_t most = b->c.limits.max_tokens - mm_cu_group_padding(b);
  bool ok = true;
  for (uint32_t rows : {1u, 2u, 8u, 9u, 16u, 17u, 64u, 65u, 256u, 257u, most}) ok = ok && (rows > most || dry_run_step(&f, rows, 1, err));
  for (uint32_t rows : {2u, 16u, 17u, 64u, 65u, 128u, 513u, most}) ok = ok && (rows > most || dry_run_step(&f, rows, rows, err));
  ok = ok && (most < 3 || dry_run_step(&f, most, 2, err));
  ok = ok && mm_cu_dry_run_draft(&f, 1, err) && mm_cu_dry_run_draft(&f, 9, err) && dry_run_pages(b, err) && dry_run_sampling(b, err);
  b->logits.own = logits, b->dry_runs = mm_cu_dry_run = false;
  b->err.status = MM_OK, b->failed = nullptr, b->step.deferred = {};
  return ok;
}

}  // namespace

/* A span has at least one row, a tile at most 64 of one span. */
size_t mm_cu_place_batch(uint32_t rows, bool decode, char *base, batch_arrays *a) {
  size_t at = 0;
  auto take = [&](size_t size) {
    char *p = base + at;
    at += mm_round_up(rows * size, 256);
    return static_cast<void *>(p);
  };
  a->id = static_cast<int32_t *>(take(4)), a->slot = static_cast<int32_t *>(take(4));
  a->pos = static_cast<uint32_t *>(take(4)), a->out = static_cast<uint32_t *>(take(4));
  a->sampling = static_cast<mm_cu_row_sampling *>(take(sizeof(mm_cu_row_sampling))), a->first = static_cast<uint32_t *>(take(4));
  if (!decode) a->span = static_cast<mm_cu_span *>(take(sizeof(mm_cu_span))), a->tile = static_cast<uint2 *>(take(sizeof(uint2)));
  a->item = reinterpret_cast<uint2 *>(base + at);
  return at;
}

void mm_backend::drop_graphs() {
  for (auto &g : capture.graphs) {
    if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
  }
  capture.graphs.clear();
}

void mm_backend::drop_logits() {
  drop_graphs();
  cudaFree(logits.own);
  if (logits.whole) mm_cu_peers_free(group, logits.whole);
  logits.own = logits.whole = nullptr, logits.rows = 0;
}

void mm_cu_backend_close(mm_backend *b) {
  if (!b) return;
  b->loading.reset();
  if (b->stream) cudaStreamSynchronize(b->stream);
  mm_cu_pool_close(b);
  b->drop_logits(); /* and recorded steps, which NCCL waits for */
  if (b->group != b->peers) mm_cu_peers_close(b->group);
  mm_cu_peers_close(b->peers);
  if (b->stream) cudaStreamDestroy(b->stream);
  for (cudaStream_t s : b->streams_given_up) cudaStreamDestroy(s);
  cudaFreeHost(b->border);
  for (grown *g : {&b->sampler.options, &b->sampler.raw, &b->sampler.seen, &b->sampler.logprobs, &b->sampler.scores}) g->close();
  for (step_memory &m : b->memory_of_step) {
    cudaFreeHost(m.block);
    cudaFreeHost(m.id);
    cudaFreeHost(m.edit);
    cudaFreeHost(m.copy);
    cudaFreeHost(m.options);
    cudaFreeHost(m.logprobs);
    if (m.done) cudaEventDestroy(m.done);
  }
  cudaFreeHost(b->experts.used);
  delete b;
}

/* The rank's device becomes the current one. */
static bool set_device(const mm_rank_place *at, mm_err *err) {
  int n = 0;
  if (!mm_cu_check(cudaGetDeviceCount(&n), "cudaGetDeviceCount", err)) return false;
  if (at->device < (uint32_t)n) return mm_cu_check(cudaSetDevice((int)at->device), "cudaSetDevice", err);
  char visible[MM_VARIABLE_TEXT];
  return mm_fail(err, MM_UNSUPPORTED, "E_DEVICE", mm_at(NULL, NULL),
                 "rank %u is to run on device %u; found %d (--devices names one for each rank)%s", at->rank, at->device, n,
                 mm_variable_text(visible, "CUDA_VISIBLE_DEVICES"));
}

/* The key of this rank's weights on the current device, so far as they are planned. */
static bool key_of(const mm_backend_config *c, const mm_cu_load *load, mm_hold_key *key, mm_err *err) {
  int device = 0;
  cudaDeviceProp p = {};
  if (!mm_cu_check(cudaGetDevice(&device), "cudaGetDevice", err) ||
      !mm_cu_check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties", err))
    return false;
  const mm_rank_weights *w = c->weights;
  *key = {{}, c->checkpoint, w->tp, w->attn_tp ? w->attn_tp : w->tp, c->place.rank, "GPU-", load->layout()};
  strncpy(key->build, mm_version(), sizeof key->build - 1);
  for (size_t i = 0, at = 4; i < sizeof p.uuid.bytes; i++) { /* as nvidia-smi writes it */
    if (i == 4 || i == 6 || i == 8 || i == 10) key->device[at++] = '-';
    at += (size_t)snprintf(key->device + at, sizeof key->device - at, "%02x", (unsigned char)p.uuid.bytes[i]);
  }
  return true;
}

/* Before weights are read that nothing else is counted for. */
static bool check_capacity(const mm_cu_load *load, uint32_t rank, mm_err *err) {
  size_t free = 0, total = 0;
  if (!mm_cu_check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo", err)) return false;
  return load->plan.bytes <= free ||
         mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL),
                 "rank %u: found %llu bytes free of %llu, expected %llu for weights: more ranks (--tp, --pp)", rank,
                 (unsigned long long)free, (unsigned long long)total, (unsigned long long)load->plan.bytes);
}

/* From files, or from who holds them. */
static bool find_weights(mm_backend *b, mm_err *err) {
  if (!b->c.attach) return b->loading->open(&b->memory, err);
  mm_held held = {};
  if (!key_of(&b->c, b->loading.get(), &held.key, err)) return false;
  void *const base = b->memory.borrow(b->c.attach, &held, err);
  return base && b->loading->attach(static_cast<char *>(base), err);
}

bool mm_cu_hold(const mm_backend_config *c, mm_held *held, void **memory, mm_err *err) {
  mm_backend *b = new mm_backend;
  b->c = *c;
  b->loading.reset(new mm_cu_load);
  mm_cu_load_config how;
  how.verify = c->verify, how.rank = c->place.rank, how.log = c->log, how.comm = c->comm;
  cudaIpcMemHandle_t handle;
  const bool ok = plan_weights(b, b->loading.get(), err) && set_device(&c->place, err) && mm_cu_check_device(err) &&
                  key_of(c, b->loading.get(), &held->key, err) && check_capacity(b->loading.get(), c->place.rank, err) &&
                  b->loading->start(how, err) && b->loading->open(&b->memory, err) && b->loading->finish(err) &&
                  mm_cu_check(cudaIpcGetMemHandle(&handle, b->loading->base()), "cudaIpcGetMemHandle", err);
  if (!ok) return mm_cu_backend_close(b), false;
  memcpy(held->handle, &handle, sizeof handle);
  held->bytes = b->loading->plan.bytes;
  *memory = b;
  return true;
}

void mm_cu_release(void *memory) { mm_cu_backend_close(static_cast<mm_backend *>(memory)); }

/* A kernel that is loaded at its first launch may wait until the device is idle, which it is not while another rank's waits for this one:
 * with several ranks all are loaded with the context. Before the process first asks for a device; who did so earlier has to set it. */
static void load_kernels_early() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("CUDA_MODULE_LOADING", "EAGER", 0); });
}

bool mm_cu_memory_facts(const mm_backend_config *c, mm_memory_facts *out, mm_err *err) {
  if (!check_model(c, err)) return false;
  if (c->weights->tp > 1) load_kernels_early();
  int device = 0;
  cudaDeviceProp p = {};
  size_t free = 0, total = 0;
  if (!set_device(&c->place, err) || !mm_cu_check_device(err) || !mm_cu_check(cudaGetDevice(&device), "cudaGetDevice", err) ||
      !mm_cu_check(cudaGetDeviceProperties(&p, device), "cudaGetDeviceProperties", err) ||
      !mm_cu_check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo", err))
    return false;
  *out = {total, free, mm_sha256(&p.uuid, sizeof p.uuid)};
  return true;
}

/* Weights are on their way from their files before the device is options for anything: its own start takes longer than the first of them.
 * They go on arriving after this returns. */
mm_backend *mm_cu_backend_open(const mm_backend_config *c, mm_err *err) {
  if (!check_model(c, err)) return nullptr;
  if (c->weights->tp > 1) load_kernels_early();
  mm_backend *b = new mm_backend;
  const mm_model *m = c->model;
  b->c = *c;
  if (c->calibration) b->c.options.eager = true, b->c.limits.max_tokens = (uint32_t)mm_max(2, c->limits.max_tokens);
  if (c->options.batch_invariant) b->c.limits.max_tokens = (uint32_t)mm_max(kLeastInvariant, c->limits.max_tokens);
  mm_cu_open_groups(b);
  const uint32_t tp = mm_attn_tp(c->weights);
  b->heads = {m->heads / tp, (uint32_t)mm_max(1, m->kv_heads / tp), m->head_dim, m->rotary_dim};
  mm_err first = {};
  b->loading.reset(new mm_cu_load);
  mm_cu_load_config how;
  how.verify = c->verify, how.rank = c->place.rank, how.log = c->log, how.comm = c->comm, how.keep_ring = c->weights->tp > 1;
  bool ok = plan_weights(b, b->loading.get(), &first) && (c->attach || b->loading->start(how, &first)) && set_device(&c->place, &first) &&
            mm_cu_check_device(&first);
  if (ok) mm_cu_note_code();
  mm_read_log_mark(c->log, "device");
  ok = ok && check_shared(&first) &&
       mm_cu_check(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "cudaStreamCreate", &first) && find_weights(b, &first);
  ok = ok && settle_inputs(b, err);
  ok = ok && open_caches(b, &first) && open_experts(b, &first) && open_batch(b, &first) && open_sampler(b, &first) &&
       mm_cu_open_extended(b, &first) && mm_cu_open_draft(b, &first) && mm_cu_open_stage(b, &first) && mm_cu_open_sums(b, &first) &&
       mm_cu_check(cudaStreamSynchronize(0), "open", &first);
  mm_read_log_mark(c->log, "caches");
  ok = ok && mm_cu_open_ranks(b, &first) && mm_cu_open_codes(b, &first) && open_logits(b, &first) && dry_run(b, &first);
  mm_read_log_mark(c->log, "dry run");
  if (ok) return b;
  if (err->status == MM_OK) *err = first;
  mm_cu_backend_close(b);
  return nullptr;
}
