/* The CUDA backend of ops.h for one rank on one device: weights uploaded at open, caches and buffers allocated there, kernels launched
 * on one stream.
 *
 * A step whose spans are single tokens takes the decode kernels. Where every row's output is wanted it is padded with rows of slot -1
 * to one of a few sizes; its calls then depend on that size alone, and all else is read from device memory. So the second such step is
 * captured as a graph, and from then on begin uploads the batch, the ops between do nothing, and end or choose replays. Any other step is
 * launched kernel by kernel.
 *
 * Nothing waits but end and collect: a step ended by choose leaves its choices on the device, where the next one finds them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "runtime/cuda/device.cuh"
#include "runtime/cuda/inputs.h"
#include "runtime/cuda/launch.h"
#include "runtime/cuda/upload.h"
#include "runtime/draw.h"
#include "runtime/ops.h"
#include "runtime/position.h"

namespace {

/* One step's batch, as the kernels read it; the same layout in pinned host memory and on the device. */
struct batch_arrays {
  int32_t *id, *slot;
  uint32_t *pos, *out;
  mm_cu_draw *draw;
  /* of steps that are not decode steps */
  mm_cu_span *span;
  uint2 *tile;
};

/* The host's side of a step under way. */
struct step_memory {
  void *block = nullptr; /* pinned; batch_arrays as uploaded */
  int32_t *id = nullptr; /* pinned; what it chose */
  cudaEvent_t done = nullptr;
  uint32_t outs = 0;
};
constexpr uint32_t kSteps = MM_QUEUE + 1; /* a step may begin while as many as may be are outstanding */

/* Rows that a decode step is padded to. */
constexpr uint32_t kBuckets[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256};

/* What follows the forward pass in a step. */
enum step_end { LOGITS, GREEDY, DRAWS };

struct layer_cache {
  float *state, *slope; /* lightning */
  mm_cu_kv kv;          /* full attention */
};

struct step_graph {
  int seen = 0;
  cudaGraphExec_t exec = nullptr;
};

enum step_mode { EAGER, CAPTURE, REPLAY };

}  // namespace

struct mm_backend {
  mm_backend_config c;
  mm_cu_memory memory;
  cudaStream_t stream = nullptr;
  std::map<const mm_packed *, mm_cu_weight> weight;
  std::map<const mm_packed *, const float *> values; /* as f32: norms, bias, routers that are not bf16 */
  std::map<const mm_packed *, const bf16 *> router;  /* those that are not bf16, in pieces (mm_cu_router) */
  std::vector<layer_cache> cache;
  mm_cu_heads heads = {};
  float *inv_freq = nullptr;
  uint32_t *page_table = nullptr, pages_per_slot = 0;
  void *gqa_work = nullptr;
  mm_cu_route route = {};
  float *route_product = nullptr;
  mm_cu_rounded inputs;
  bf16 *middle = nullptr;
  float *pair_out = nullptr;
  unsigned long long *load = nullptr; /* [layers, experts] */

  step_memory memory_of_step[kSteps];
  void *device_block = nullptr;
  batch_arrays device = {};
  uint64_t steps = 0;
  std::deque<step_memory *> queued; /* ended by choose, not collected */
  mm_cu_choose choice = {};

  float *logits = nullptr;
  size_t logits_rows = 0;

  /* the step under way */
  uint32_t rows = 0, outs = 0;   /* with padding */
  uint32_t wanted = 0;           /* outputs without it */
  uint32_t spans = 0, tiles = 0; /* not of decode steps */
  bool decode = false;
  step_end ending = LOGITS;
  step_memory *step = nullptr;
  step_mode mode = EAGER;
  step_graph *graph = nullptr;
  mm_cu_combine put_off = {}; /* a residual and norm that the next op does along, or has done first; n NULL: none */
  uint32_t put_off_width = 0;
  std::map<std::pair<uint32_t, step_end>, step_graph> graphs; /* by rows and ending */
  mm_err err = {};
};

namespace {

/* Whether an op launches anything now; after a failure, nothing more. */
bool running(const mm_backend *b) { return b->mode != REPLAY && b->err.status == MM_OK; }
void check(mm_backend *b, cudaError_t e, const char *what) { mm_cu_check(e, what, &b->err); }
bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

/* ---- open and close ---- */

bool upload_value(mm_backend *b, const mm_packed *w, mm_err *err) {
  if (!w->scheme) return true;
  const float *p = mm_cu_upload_f32(&b->memory, w, err);
  b->values[w] = p;
  return p != nullptr;
}

bool upload_matrix(mm_backend *b, const mm_packed *w, const char *name, mm_err *err) {
  if (!w->scheme) return true;
  mm_cu_weight *to = &b->weight[w];
  if (!mm_cu_upload(&b->memory, w, name, to, err)) return false;
  if (!b->c.act_quant) to->rounding = {};
  return true;
}

/* A router that is stored as bf16 is read so; another one as f32, and in three pieces of bf16 for many rows. */
bool upload_router(mm_backend *b, const mm_packed *w, const char *name, mm_err *err) {
  if (!w->scheme || (w->scheme->code == MM_CODE_PLAIN && w->scheme->plane[0].dtype == MM_BF16)) return upload_matrix(b, w, name, err);
  if (!upload_value(b, w, err)) return false;
  const size_t n = (size_t)w->n * w->k;
  bf16 *to = b->memory.array<bf16>(3 * n, err);
  b->router[w] = to;
  return to && mm_cu_check(mm_cu_split(to, b->values[w], n, 0), "split router", err);
}

bool upload_weights(mm_backend *b, mm_err *err) {
  const mm_rank_weights *w = b->c.weights;
  if (!upload_matrix(b, &w->embed, "model.embed_tokens.weight", err) || !upload_matrix(b, &w->head, "lm_head.weight", err)) return false;
  if (b->weight[&w->embed].code != MM_CU_BF16)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, "model.embed_tokens.weight"),
                   "found scheme %s; the cuda backend embeds bf16", w->embed.scheme->name);
  if (!upload_value(b, &w->final_norm, err)) return false;
  b->inputs.all_codes = b->c.act_quant;
  for (uint32_t l = 0; l < b->c.model->layers; l++) {
    const mm_layer_weights *y = &w->layer[l];
    char name[64];
    snprintf(name, sizeof name, "model.layers.%u", l);
    const mm_packed *vectors[] = {&y->input_norm, &y->post_norm, &y->attn_norm, &y->q_norm, &y->k_norm, &y->router_bias};
    const mm_packed *matrices[] = {&y->qkv, &y->out, &y->output_gate, &y->w13, &y->w2};
    for (const mm_packed *p : vectors) {
      if (!upload_value(b, p, err)) return false;
    }
    for (const mm_packed *p : matrices) {
      if (!upload_matrix(b, p, name, err)) return false;
      b->inputs.all_codes &= !p->scheme || mm_cu_multiplies_codes(b->weight[p]);
    }
    if (!upload_router(b, &y->router, name, err)) return false;
  }
  return true;
}

bool open_caches(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const mm_limits *limits = &b->c.limits;
  const uint32_t d = m->head_dim, first_head = b->c.weights->rank * b->heads.heads;
  b->pages_per_slot = (uint32_t)mm_ceil_div(limits->max_positions, MM_CU_PAGE);
  const uint64_t pages = (uint64_t)limits->slots * b->pages_per_slot, cells = pages * b->heads.kv_heads * MM_CU_PAGE;
  const uint64_t cell_bytes = b->c.kv_fp8 ? d : 2 * d;
  std::vector<uint32_t> table(pages);
  for (uint64_t i = 0; i < pages; i++) table[i] = (uint32_t)i;
  if (!(b->page_table = b->memory.array<uint32_t>(pages, err))) return false;
  if (!mm_cu_check(cudaMemcpy(b->page_table, table.data(), pages * 4, cudaMemcpyHostToDevice), "copy pages", err)) return false;
  b->cache.resize(m->layers);
  for (uint32_t l = 0; l < m->layers; l++) {
    layer_cache &c = b->cache[l];
    if (m->attn[l] == MM_ATTN_LIGHTNING) {
      std::vector<float> slope(b->heads.heads);
      for (uint32_t h = 0; h < slope.size(); h++) slope[h] = (float)mm_lightning_decay(m, l, first_head + h);
      c.slope = b->memory.array<float>(slope.size(), err);
      c.state = b->memory.array<float>((uint64_t)limits->slots * b->heads.heads * d * d, err);
      if (!c.slope || !c.state) return false;
      if (!mm_cu_check(cudaMemcpy(c.slope, slope.data(), slope.size() * 4, cudaMemcpyHostToDevice), "copy slopes", err)) return false;
    } else {
      c.kv = {b->memory.alloc(cells * cell_bytes, err), b->memory.alloc(cells * cell_bytes, err), b->page_table, b->pages_per_slot};
      if (!c.kv.k || !c.kv.v) return false;
      if (!b->c.kv_fp8) continue;
      c.kv.k_scale = b->memory.array<float>(cells, err), c.kv.v_scale = b->memory.array<float>(cells, err);
      if (!c.kv.k_scale || !c.kv.v_scale) return false;
    }
  }
  std::vector<float> freq(m->rotary_dim / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = mm_rope_inv_freq(m, i);
  b->inv_freq = b->memory.array<float>(freq.size(), err);
  return b->inv_freq && mm_cu_check(cudaMemcpy(b->inv_freq, freq.data(), freq.size() * 4, cudaMemcpyHostToDevice), "copy frequencies", err);
}

bool open_experts(mm_backend *b, mm_err *err) {
  const mm_model *m = b->c.model;
  const uint64_t tokens = b->c.limits.max_tokens, pairs = tokens * m->top_k, inter = b->c.weights->layer[0].w2.k;
  const uint64_t slots = mm_min(m->experts, MM_CU_SKINNY * m->top_k);
  mm_cu_memory *y = &b->memory;
  b->route = {m->experts,
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
              y->array<float>(slots * MM_CU_SKINNY, err),
              y->array<unsigned long long>(MM_CU_MAX_TOP_K, err),
              y->array<uint32_t>(m->experts + UINT64_C(1), err),
              y->array<uint32_t>(pairs, err)};
  b->route_product = y->array<float>(tokens > MM_CU_SKINNY ? tokens * 3 * m->experts : 1, err);
  b->middle = y->array<bf16>(mm_max(slots * MM_CU_SKINNY, mm_max(pairs, 3 * mm_min(tokens, MM_CU_FEW_EACH) * m->top_k)) * inter, err);
  b->pair_out = y->array<float>(tokens > 1 ? pairs * m->hidden : 1, err);
  b->load = y->array<unsigned long long>((uint64_t)m->layers * m->experts, err);
  const uint32_t widest = (uint32_t)mm_max(m->hidden, b->heads.heads * b->heads.head_dim);
  return err->status == MM_OK && (!b->c.act_quant || b->inputs.open(y, (uint32_t)tokens, widest, err));
}

/* The arrays of a step inside one block; returns its bytes. A span has at least one row, a tile at most 64 of one span. */
size_t place_arrays(uint32_t rows, bool decode, char *base, batch_arrays *a) {
  size_t at = 0;
  auto take = [&](size_t size) {
    char *p = base + at;
    at += mm_round_up(rows * size, 256);
    return static_cast<void *>(p);
  };
  a->id = static_cast<int32_t *>(take(4)), a->slot = static_cast<int32_t *>(take(4));
  a->pos = static_cast<uint32_t *>(take(4)), a->out = static_cast<uint32_t *>(take(4));
  a->draw = static_cast<mm_cu_draw *>(take(sizeof(mm_cu_draw)));
  if (decode) return at;
  a->span = static_cast<mm_cu_span *>(take(sizeof(mm_cu_span))), a->tile = static_cast<uint2 *>(take(sizeof(uint2)));
  return at;
}

bool open_batch(mm_backend *b, mm_err *err) {
  const uint32_t rows = b->c.limits.max_tokens;
  batch_arrays none;
  const size_t bytes = place_arrays(rows, false, nullptr, &none);
  for (step_memory &m : b->memory_of_step) {
    if (!mm_cu_check(cudaMallocHost(&m.block, bytes), "cudaMallocHost", err) ||
        !mm_cu_check(cudaMallocHost(&m.id, rows * sizeof *m.id), "cudaMallocHost", err) ||
        !mm_cu_check(cudaEventCreateWithFlags(&m.done, cudaEventDisableTiming), "cudaEventCreate", err))
      return false;
  }
  return (b->device_block = b->memory.alloc(bytes, err)) && (b->gqa_work = b->memory.alloc(mm_cu_gqa_work(b->heads, rows), err));
}

bool open_choice(mm_backend *b, mm_err *err) {
  const uint32_t rows = b->c.limits.max_tokens, vocab = b->c.model->vocab;
  mm_cu_memory *y = &b->memory;
  std::vector<uint8_t> never(vocab);
  for (uint32_t i = 0; b->c.never && i < vocab; i++) never[i] = b->c.never[i];
  uint8_t *mask = y->array<uint8_t>(vocab, err);
  b->choice.never = mask, b->choice.vocab = vocab, b->choice.vocab_rows = b->c.weights->vocab_rows;
  b->choice.id = y->array<int32_t>(rows, err), b->choice.chosen = y->array<int32_t>(b->c.limits.slots, err);
  b->choice.best = y->array<unsigned long long>(rows, err), b->choice.ticket = y->array<uint32_t>(rows, err);
  return err->status == MM_OK && mm_cu_check(cudaMemcpy(mask, never.data(), vocab, cudaMemcpyHostToDevice), "copy mask", err);
}

bool check_model(const mm_backend_config *c, mm_err *err) {
  const mm_model *m = c->model;
  if (c->weights->tp != 1)
    return mm_fail(err, MM_UNSUPPORTED, "E_TP", mm_at(NULL, NULL), "found %u ranks; the cuda backend runs one", c->weights->tp);
  if ((m->head_dim != 64 && m->head_dim != 128) || m->heads / m->kv_heads > 8 || m->experts > MM_CU_MAX_EXPERTS ||
      m->top_k > MM_CU_MAX_TOP_K)
    return mm_fail(
        err, MM_UNSUPPORTED, "E_MODEL", mm_at(NULL, NULL),
        "found head_dim %u, %u heads on %u kv heads, %u experts, top %u; the cuda backend has head_dim 64 or 128, groups of up to 8 "
        "heads, %u experts, top %u",
        m->head_dim, m->heads, m->kv_heads, m->experts, m->top_k, MM_CU_MAX_EXPERTS, MM_CU_MAX_TOP_K);
  return true;
}

void drop_graphs(mm_backend *b) {
  for (auto &g : b->graphs) {
    if (g.second.exec) cudaGraphExecDestroy(g.second.exec);
  }
  b->graphs.clear();
}

void cuda_close(mm_backend *b) {
  if (!b) return;
  drop_graphs(b);
  if (b->stream) cudaStreamDestroy(b->stream);
  cudaFree(b->logits);
  for (step_memory &m : b->memory_of_step) {
    cudaFreeHost(m.block);
    cudaFreeHost(m.id);
    if (m.done) cudaEventDestroy(m.done);
  }
  delete b;
}

mm_backend *cuda_open(const mm_backend_config *c, mm_err *err) {
  if (!check_model(c, err) || !mm_cu_check(cudaSetDevice((int)c->weights->rank), "cudaSetDevice", err)) return nullptr;
  mm_backend *b = new mm_backend;
  const mm_model *m = c->model;
  b->c = *c;
  b->heads = {m->heads / c->weights->tp, (uint32_t)mm_max(1, m->kv_heads / c->weights->tp), m->head_dim, m->rotary_dim};
  mm_err first = {};
  bool ok = mm_cu_check(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking), "cudaStreamCreate", &first) &&
            upload_weights(b, &first) && open_caches(b, &first) && open_experts(b, &first) && open_batch(b, &first) &&
            open_choice(b, &first) && mm_cu_check(cudaDeviceSynchronize(), "upload", &first);
  if (ok) return b;
  if (err && err->status == MM_OK) *err = first;
  cuda_close(b);
  return nullptr;
}

bool cuda_act(mm_backend *b, uint32_t width, mm_act *out, mm_err *err) {
  *out = {b->memory.array<bf16>((uint64_t)b->c.limits.max_tokens * width, err), width};
  return out->data != nullptr;
}

/* ---- a step ---- */

/* The rows that a decode step of this many is padded to, if it can be. */
uint32_t bucket_of(const mm_backend *b, uint32_t rows) {
  for (uint32_t n : kBuckets) {
    if (rows <= n) return (uint32_t)mm_min(n, b->c.limits.max_tokens);
  }
  return rows;
}

bool grow_logits(mm_backend *b, size_t rows, mm_err *err) {
  if (rows <= b->logits_rows) return true;
  drop_graphs(b);
  cudaFree(b->logits);
  b->logits = nullptr, b->logits_rows = 0;
  if (!mm_cu_check(cudaMalloc(&b->logits, rows * b->c.weights->vocab_rows * sizeof(float)), "cudaMalloc", err)) return false;
  b->logits_rows = rows;
  return true;
}

/* What kind of step this is, and its sizes. */
void plan_step(mm_backend *b, const mm_batch *batch) {
  b->decode = batch->tokens > 0 && batch->span_count == batch->tokens;
  b->ending = batch->sampling ? GREEDY : LOGITS;
  for (uint32_t i = 0; batch->sampling && i < batch->out_count; i++) {
    if (batch->sampling[i].temperature > 0) b->ending = DRAWS;
  }
  const bool pads = b->decode && batch->out_count == batch->tokens;
  b->rows = pads ? bucket_of(b, batch->tokens) : batch->tokens;
  b->wanted = batch->out_count, b->outs = pads ? b->rows : batch->out_count;
  b->spans = batch->span_count, b->tiles = 0;
  b->mode = EAGER, b->graph = nullptr;
  if (!pads || b->c.eager) return;
  b->graph = &b->graphs[{b->rows, b->ending}];
  if (b->graph->exec) {
    b->mode = REPLAY;
  } else if (b->graph->seen++ > 0) {
    b->mode = CAPTURE;
  }
}

mm_cu_draw draw_of(const mm_sampling *s, uint32_t pos) {
  if (s->temperature == 0) return {};
  return {mm_draw_scale(s->temperature), s->top_k, s->top_p, mm_draw_mix(s->seed, pos + UINT64_C(1))};
}

void fill_batch(mm_backend *b, const mm_batch *batch, const batch_arrays *h) {
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    for (uint32_t t = 0; t < s->count; t++)
      h->id[s->first + t] = batch->id[s->first + t], h->slot[s->first + t] = s->slot, h->pos[s->first + t] = s->pos + t;
    if (b->decode) continue;
    h->span[i] = {s->slot, s->first, s->count, s->pos};
    for (uint32_t t = 0; t < s->count; t += MM_CU_TILE) h->tile[b->tiles++] = make_uint2(i, t);
  }
  auto before = [&](uint2 tile) { return batch->span[tile.x].pos + tile.y; };
  std::sort(h->tile, h->tile + b->tiles, [&](uint2 x, uint2 y) { return before(x) != before(y) ? before(x) > before(y) : x.x < y.x; });
  for (uint32_t i = batch->tokens; i < b->rows; i++) h->id[i] = 0, h->slot[i] = -1, h->pos[i] = 0;
  for (uint32_t i = 0; i < b->outs; i++) {
    h->out[i] = i < batch->out_count ? batch->out[i] : i;
    h->draw[i] = batch->sampling && i < batch->out_count ? draw_of(&batch->sampling[i], h->pos[h->out[i]]) : mm_cu_draw{};
  }
}

bool cuda_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  b->err.status = MM_OK, b->put_off = {};
  b->inputs.coded = b->inputs.rounded = nullptr;
  plan_step(b, batch), b->inputs.decode = b->decode;
  if (!grow_logits(b, b->outs, err)) return false;
  b->step = &b->memory_of_step[b->steps++ % kSteps];
  if (!mm_cu_check(cudaEventSynchronize(b->step->done), "earlier step", err)) return false;
  batch_arrays host;
  const size_t bytes = place_arrays(b->rows, b->decode, static_cast<char *>(b->step->block), &host);
  place_arrays(b->rows, b->decode, static_cast<char *>(b->device_block), &b->device);
  fill_batch(b, batch, &host);
  if (!mm_cu_check(cudaMemcpyAsync(b->device_block, b->step->block, bytes, cudaMemcpyHostToDevice, b->stream), "copy batch", err))
    return false;
  return b->mode != CAPTURE || mm_cu_check(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "begin capture", err);
}

/* Turns what was captured into a graph; also after a failure, so that the stream can be used again. */
void finish_capture(mm_backend *b) {
  cudaGraph_t g = nullptr;
  check(b, cudaStreamEndCapture(b->stream, &g), "end capture");
  if (b->err.status == MM_OK) check(b, cudaGraphInstantiate(&b->graph->exec, g, 0), "instantiate graph");
  if (g) cudaGraphDestroy(g);
}

/* What was put off is launched now. */
void catch_up(mm_backend *b) {
  if (!running(b) || !b->put_off.n) return;
  check(b, mm_cu_combine_rows(b->put_off, b->rows, b->put_off_width, b->stream), "combine");
  b->put_off = {};
}

/* Whatever the ops left to launch. */
void finish_step(mm_backend *b) {
  catch_up(b);
  if (b->mode == CAPTURE) finish_capture(b);
  if (b->mode != EAGER && b->err.status == MM_OK) check(b, cudaGraphLaunch(b->graph->exec, b->stream), "launch graph");
}

/* True without a failure since begin; else hands it on. */
bool succeeded(const mm_backend *b, mm_err *err) {
  if (b->err.status == MM_OK) return true;
  if (err && err->status == MM_OK) *err = b->err;
  return false;
}

bool cuda_end(mm_backend *b, float *out, mm_err *err) {
  finish_step(b);
  if (b->err.status == MM_OK && b->wanted)
    check(b,
          cudaMemcpyAsync(out, b->logits, (size_t)b->wanted * b->c.weights->vocab_rows * sizeof(float), cudaMemcpyDeviceToHost, b->stream),
          "copy logits");
  check(b, cudaStreamSynchronize(b->stream), "step");
  return succeeded(b, err);
}

bool cuda_choose(mm_backend *b, mm_err *err) {
  if (running(b) && b->outs) {
    b->choice.logits = b->logits, b->choice.tokens = b->rows;
    b->choice.out = b->device.out, b->choice.slot = b->device.slot, b->choice.draw = b->device.draw;
    check(b, mm_cu_choose_tokens(b->choice, b->outs, b->ending == DRAWS, b->stream), "choose");
  }
  finish_step(b);
  step_memory *m = b->step;
  m->outs = b->wanted;
  if (b->err.status == MM_OK && m->outs)
    check(b, cudaMemcpyAsync(m->id, b->choice.id, m->outs * sizeof *m->id, cudaMemcpyDeviceToHost, b->stream), "copy choices");
  if (b->err.status == MM_OK) check(b, cudaEventRecord(m->done, b->stream), "record event");
  if (!succeeded(b, err)) return false;
  b->queued.push_back(m);
  return true;
}

bool cuda_collect(mm_backend *b, int32_t *id, mm_err *err) {
  const step_memory *m = b->queued.front();
  b->queued.pop_front();
  const bool done = mm_cu_check(cudaEventSynchronize(m->done), "step", err);
  if (done) memcpy(id, m->id, m->outs * sizeof *id);
  if (!done) b->queued.clear();
  return done;
}

/* ---- ops ---- */

/* At the start of an op: whether it launches anything, with all before it launched. */
bool begin_op(mm_backend *b) {
  if (!running(b)) return false;
  catch_up(b);
  return true;
}

mm_cu_rows places(const mm_backend *b) { return {b->device.slot, b->device.pos}; }

void cuda_embed(mm_backend *b, mm_act x, const mm_packed *table) {
  if (!begin_op(b)) return;
  b->inputs.wrote(x.data);
  const mm_cu_weight &w = b->weight[table];
  check(b,
        mm_cu_embed(rows_of(x), reinterpret_cast<const bf16 *>(w.data), {b->device.id, b->device.slot, b->choice.chosen}, b->rows, x.width,
                    b->stream),
        "embed");
}

void cuda_norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) {
  if (!begin_op(b)) return;
  b->inputs.wrote(y.data);
  check(b, mm_cu_norm(rows_of(y), rows_of(x), b->values[w], (float)eps, b->rows, y.width, b->stream), "norm");
}

void cuda_linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w) {
  if (!begin_op(b)) return;
  check(b, b->inputs.linear(b->weight[w], {rows_of(x), nullptr, rows_of(y), nullptr, b->rows}, b->stream), "linear");
}

void cuda_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  if (!begin_op(b)) return;
  b->inputs.wrote(o.data);
  const mm_cu_kv &kv = b->cache[layer].kv;
  const float *qn = q_norm ? b->values[q_norm] : nullptr, *kn = k_norm ? b->values[k_norm] : nullptr;
  const mm_cu_qkv p = {rows_of(qkv), qn, kn, b->inv_freq, (float)b->c.model->norm_eps, b->rows};
  const mm_cu_gqa a = {rows_of(qkv), rows_of(o), b->gqa_work, b->rows, b->c.limits.max_tokens};
  if (b->decode) {
    check(b, mm_cu_gqa_decode(b->heads, places(b), kv, p, a, b->stream), "gqa decode");
  } else {
    check(b, mm_cu_rope(b->heads, places(b), kv, p, b->stream), "rope");
    check(b, mm_cu_gqa_prefill(b->heads, {b->device.span, b->device.tile, b->tiles}, kv, a, b->stream), "gqa prefill");
  }
}

void cuda_lightning(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv) {
  if (!begin_op(b)) return;
  b->inputs.wrote(o.data);
  const layer_cache &c = b->cache[layer];
  const mm_cu_lightning a = {rows_of(qkv), rows_of(o), c.state, c.slope, b->heads.heads, b->heads.head_dim};
  const cudaError_t e = b->decode ? mm_cu_lightning_decode(a, places(b), b->rows, b->stream)
                                  : mm_cu_lightning_prefill(a, b->device.span, b->spans, b->stream);
  check(b, e, "lightning");
}

void cuda_gated_norm(mm_backend *b, mm_act y, mm_act o, mm_act gate, const mm_packed *w, double eps) {
  if (!begin_op(b)) return;
  b->inputs.wrote(y.data);
  check(b,
        mm_cu_gated_norm(rows_of(y), rows_of(o), rows_of(gate), b->values[w], (float)eps, b->rows, y.width,
                         b->inputs.beside(rows_of(y), b->rows, y.width), b->stream),
        "gated norm");
}

void cuda_route(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
  if (!running(b)) return;
  const auto narrow = b->weight.find(router);
  const bool wide = narrow == b->weight.end();
  const void *w = wide ? static_cast<const void *>(b->values[router]) : narrow->second.data;
  const mm_cu_router m = {w, wide, x.width, wide ? b->router[router] : nullptr, b->route_product, b->decode};
  b->route.bias = bias ? b->values[bias] : nullptr, b->route.slot = b->device.slot;
  b->route.load = b->load + (size_t)layer * b->route.experts;
  if (b->put_off.n == x.data) {
    check(b, mm_cu_combine_route(b->put_off, m, b->route, b->rows, b->stream), "route");
    b->put_off = {};
  } else {
    catch_up(b);
    check(b, mm_cu_route_tokens(m, b->route, rows_of(x), b->rows, b->stream), "route");
  }
}

void cuda_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  if (!begin_op(b)) return;
  const mm_cu_experts a = {rows_of(x), rows_of(y), b->middle, b->pair_out, b->rows};
  check(b, b->inputs.experts(b->weight[w13], b->weight[w2], b->route, a, b->stream), "experts");
}

void cuda_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
  if (!begin_op(b)) return;
  b->inputs.wrote(h.data), b->inputs.wrote(n.data);
  const mm_cu_combine a = {rows_of(h),        rows_of(n),   rows_of(residual),
                           rows_of(branch),   b->values[w], (float)scale.alpha,
                           (float)scale.beta, (float)eps,   b->inputs.beside(rows_of(n), b->rows, n.width)};
  b->put_off = a, b->put_off_width = h.width;
  if (b->c.eager) catch_up(b);
}

void cuda_copy(mm_backend *b, mm_act to, mm_act from) {
  if (!begin_op(b)) return;
  b->inputs.wrote(to.data);
  check(b, mm_cu_copy(rows_of(to), rows_of(from), (size_t)b->rows * to.width, b->stream), "copy");
}

bool cuda_read(mm_backend *b, mm_act a, uint32_t rows, float *out, mm_err *err) {
  return mm_cu_download_rows(out, rows_of(a), (size_t)rows * a.width, b->stream, err);
}

bool cuda_expert_load(mm_backend *b, uint64_t *load, mm_err *err) {
  return mm_cu_download(load, b->load, b->cache.size() * b->route.experts * sizeof *load, b->stream, err);
}

void cuda_logits(mm_backend *b, mm_act x, const mm_packed *head) {
  if (!begin_op(b) || b->outs == 0) return;
  check(b, b->inputs.linear(b->weight[head], {rows_of(x), b->device.out, nullptr, b->logits, b->outs}, b->stream), "logits");
}

}  // namespace

const mm_ops mm_ops_cuda = {"cuda",          cuda_open,   cuda_close,     cuda_act,        cuda_begin,   cuda_embed,   cuda_norm,
                            cuda_linear,     cuda_gqa,    cuda_lightning, cuda_gated_norm, cuda_route,   cuda_experts, cuda_combine,
                            cuda_copy,       cuda_logits, cuda_end,       cuda_choose,     cuda_collect, cuda_read,    cuda_expert_load,
                            mm_cu_copy_rate, true};
