/* The CUDA backend of ops.h for one rank on one device: weights uploaded at open, caches and buffers allocated there, kernels launched
 * on one stream.
 *
 * A step whose spans are single tokens, or verify rows (step_rows.cu), takes the decode kernels. In a step that has prefill chunks too,
 * they come first and their attention takes the decode kernel; products go by the number of rows. Where every row's output is wanted it is
 * padded with rows of slot -1 to one of a few sizes, up to 256; its calls then depend on that size alone, and all else is read from device
 * memory. At the second such step the ops are collected and captured as a graph; from then on begin uploads the batch, the ops between do
 * nothing, and end or sample replays. Any other step is launched kernel by kernel, and every one once a capture has failed, which is
 * reported.
 *
 * Batch-invariant steps (mm_run_options.batch_invariant) take the prefill kernels for single tokens too, padded with rows of slot -1 to
 * so many that products take the prefill kernels; lightning attention goes token by token. No graph is captured then.
 *
 * Only end and collect wait for the device: a step ended by sample leaves its tokens there, where the next step reads them. */
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.h"
#include "runtime/cuda/core/launch.h"
#include "runtime/engine/random_draw.h"

void mm_cu_note(mm_backend *b, cudaError_t e, const char *what) {
  if (!mm_cu_check(e, what, &b->err) && !b->failed) b->failed = what;
}

namespace {

constexpr auto &check = mm_cu_note;
bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

bool cuda_act(mm_backend *b, uint32_t width, mm_act *out, mm_err *err) {
  b->memory.what = "activations";
  *out = {b->memory.array<bf16>((uint64_t)b->c.limits.max_tokens * width, err), width};
  return out->data != nullptr;
}

/* ---- a step ---- */

/* A later stage makes and gives back memory once it has its rows: until then the devices may not be idle, if earlier ones share them. */
bool receives(const mm_backend *b) { return b->c.weights->layer_first > 0; }
bool grow_logits(mm_backend *b, size_t rows, mm_err *err) {
  return rows <= b->logits.rows || b->dry_runs || mm_cu_make_logits(b, rows, err);
}

/* Sets the kind of the step and its sizes. */
void plan_step(mm_backend *b, const mm_batch *batch) {
  const mm_batch *all = b->groups.count > 1 ? &b->groups.in->all : batch; /* steps of all groups end alike */
  mm_cu_leave_groups(b);
  mm_cu_classify_rows(b, batch);
  b->step.ending = batch->sampling || b->draft.next == DRAFT_BEST ? GREEDY : LOGITS, b->step.options = nullptr, b->sampler.pending = false;
  for (uint32_t i = 0; all->sampling && i < all->out_count; i++) {
    b->step.ending = std::max(b->step.ending, (step_end)(GREEDY + mm_cu_sampling_of(&all->sampling[i], b->sampler.args.vocab)));
    if (mm_sampling_options(&all->sampling[i]) & ~(uint32_t)MM_SAMPLES_MIN_P) b->step.options = batch->sampling;
  }
  if (b->step.options) b->step.ending = LOGITS;
  const uint32_t bucket = b->step.decode && batch->out_count == batch->tokens ? mm_cu_bucket_of(b, batch->tokens) : 0;
  b->step.rows = bucket ? bucket : batch->tokens, b->step.tokens = batch->tokens;
  if (b->c.calibration && b->step.rows == 1)
    b->step.rows = 2; /* a single token's pairs are not sorted, as mm_cu_collect_experts wants them */
  b->step.wanted = batch->out_count, b->step.outs = bucket ? bucket : batch->out_count;
  const bool invariant = b->c.options.batch_invariant && !b->step.draft; /* a reply does not depend on what is proposed */
  if (invariant && b->step.rows) b->step.rows = (uint32_t)mm_max(b->step.rows, kLeastInvariant);
  if (invariant && b->step.outs) b->step.outs = (uint32_t)mm_max(b->step.outs, kLeastInvariant);
  b->step.most_outs = b->step.outs;
  mm_cu_plan_groups(b);
  b->step.spans = batch->span_count, b->step.tiles = 0;
  b->capture.mode = EAGER, b->capture.graph = nullptr;
}

/* Recorded steps of as many rows and outputs launch the same, if they are of one kind: single tokens, verify rows, blocks of the draft, or
 * the same pass of its chain. */
uint32_t kind_of(const current_step &s) { return !s.draft ? s.verifies : 2 + (s.chain.passes ? s.chain.pass : s.outs); }

/* Decides between launching, capturing and replaying: after its buffers have their sizes, since growing one drops captured graphs. */
void plan_mode(mm_backend *b) {
  if (!b->step.decode || (b->step.outs != b->step.rows && !b->step.draft) ||
      b->step.rows > kBuckets[sizeof kBuckets / sizeof *kBuckets - 1])
    return;
  if (b->c.options.eager || b->capture.off || b->dry_runs || (b->groups.count > 1 && !b->groups.fixed)) return;
  b->capture.graph = &b->capture.graphs[{b->step.rows, b->step.ending, kind_of(b->step)}];
  if (b->capture.graph->exec) {
    b->capture.mode = REPLAY;
  } else if (b->capture.graph->seen++ > 0 && !b->loading) {
    b->capture.mode = CAPTURE;
  }
}

/* Writes the batch to pinned memory; returns the bytes behind the arrays. */
size_t fill_batch(mm_backend *b, const mm_batch *batch, const batch_arrays *h) {
  for (uint32_t i = 0; i < batch->span_count; i++) {
    const mm_span *s = &batch->span[i];
    for (uint32_t t = 0; t < s->count; t++)
      h->id[s->first + t] = batch->id[s->first + t], h->slot[s->first + t] = s->slot, h->pos[s->first + t] = s->pos + t;
    if (b->step.decode) continue;
    h->span[i] = {s->slot, s->first, s->count, s->pos};
    if (i < b->step.single_spans) continue;
    for (uint32_t t = 0; t < s->count; t += MM_CU_TILE) h->tile[b->step.tiles++] = make_uint2(i, t);
  }
  auto before = [&](uint2 tile) { return batch->span[tile.x].pos + tile.y; };
  std::sort(h->tile, h->tile + b->step.tiles, [&](uint2 x, uint2 y) { return before(x) != before(y) ? before(x) > before(y) : x.x < y.x; });
  for (uint32_t i = batch->tokens; i < b->step.rows; i++) h->id[i] = 0, h->slot[i] = -1, h->pos[i] = 0;
  mm_cu_fill_groups(b, h);
  const uint64_t next = !b->step.draft || b->step.chain.passes; /* a row of a block proposes the token of its own position */
  for (uint32_t i = 0; i < b->step.outs; i++) {
    h->out[i] = i < batch->out_count ? batch->out[i] : i;
    const bool samples = batch->sampling && i < batch->out_count;
    h->sampling[i] = samples ? mm_cu_row_sampling_of(&batch->sampling[i], h->pos[h->out[i]] + next) : mm_cu_row_sampling{};
  }
  if (b->step.draft) return 0;
  const auto list = b->step.verifies ? mm_cu_gqa_verify_list : mm_cu_gqa_list;
  return list(b->heads, mm_cu_singles(b), h->slot, h->pos, mm_cu_far_now(b), h->first, h->item) * sizeof *h->item;
}

/* Host memory for a step: not that of a step whose tokens are not collected yet, and of the step before only where there is no other. */
step_memory *free_memory(mm_backend *b) {
  step_memory *last = nullptr;
  for (step_memory &m : b->memory_of_step) {
    if (std::find(b->queued.begin(), b->queued.end(), &m) == b->queued.end() && (!last || last == b->step.memory)) last = &m;
  }
  return last;
}

/* The state of the ops between themselves, as at the start of a step. */
void start_ops(mm_backend *b) {
  b->err.status = MM_OK, b->failed = nullptr, b->step.deferred = {}, b->lost = false;
  b->inputs.coded = b->inputs.rounded = nullptr;
  mm_cu_leave_groups(b);
  b->inputs.decode = b->step.decode, b->inputs.all_codes = b->step.draft ? b->weights.draft_codes : b->weights.all_codes;
}

bool cuda_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (b->c.attach && !mm_hold_is_alive(b->c.attach, b->memory.connection, err)) return false;
  if ((!receives(b) && !mm_cu_look_at_load(b, batch, err)) || !mm_cu_begin_ranks(b, err)) return false;
  plan_step(b, batch);
  if (!receives(b) && !grow_logits(b, b->step.most_outs, err)) return false;
  plan_mode(b), start_ops(b), b->capture.ops.clear();
  if (!(b->step.memory = free_memory(b)))
    return mm_fail(err, MM_USAGE, "E_BATCH", mm_at(NULL, NULL), "found %d steps outstanding, expected at most %d", MM_QUEUE + 1, MM_QUEUE);
  batch_arrays host;
  size_t bytes = mm_cu_place_step(b, static_cast<char *>(b->step.memory->block), &host);
  mm_cu_place_step(b, static_cast<char *>(b->device_block), &b->device);
  if (b->dry_runs) {
    fill_batch(b, batch, &host);
    return true;
  }
  if (!mm_cu_check(cudaEventSynchronize(b->step.memory->done), "earlier step", err)) return false;
  bytes += fill_batch(b, batch, &host);
  if (mm_cu_upload_pages(b, batch, err) &&
      mm_cu_check(cudaMemcpyAsync(b->device_block, b->step.memory->block, bytes, cudaMemcpyHostToDevice, b->stream), "copy batch", err) &&
      (!b->peers || mm_cu_peers_settle(b->peers, b->stream, err)))
    return true;
  cudaStreamSynchronize(b->stream); /* kernels may read the step's lists of pages, and its memory is free now */
  return false;
}

constexpr auto &running = mm_cu_running;

/* Launches the deferred ops. */
void catch_up(mm_backend *b) {
  const deferred_residual &d = b->step.deferred;
  if (running(b) && b->groups.from.data) mm_cu_finish_scatter(b);
  if (!running(b) || d.state == RESIDUAL_NONE) return;
  const cudaError_t e = d.state == RESIDUAL_SUMMED ? mm_cu_combine_rows(d.op, b->step.rows, d.width, b->stream)
                        : d.state == RESIDUAL_GROUPS
                            ? mm_cu_combine_scatter(b->peers, b->groups.rows, d.op, b->stream)
                            : mm_cu_combine_ranks(b->group, d.op, b->step.rows, d.width, d.state == RESIDUAL_SENT, b->stream);
  check(b, e, "combine");
  b->step.deferred = {};
}

/* Launches all collected ops. */
void run_collected(mm_backend *b) {
  start_ops(b);
  b->capture.mode = EAGER;
  for (const auto &op : b->capture.ops) op();
  catch_up(b);
}

/* Captures the collected ops as a graph; launches none of them, also after a failure. */
bool record_graph(mm_backend *b) {
  if (!mm_cu_check(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal), "begin capture", &b->err)) return false;
  run_collected(b);
  cudaGraph_t g = nullptr;
  check(b, cudaStreamEndCapture(b->stream, &g), "end capture");
  if (b->err.status == MM_OK) check(b, cudaGraphInstantiate(&b->capture.graph->exec, g, 0), "instantiate graph");
  if (b->err.status == MM_OK) check(b, cudaGraphUpload(b->capture.graph->exec, b->stream), "upload graph");
  if (g) cudaGraphDestroy(g);
  if (b->err.status == MM_OK) return true;
  if (b->capture.graph->exec) cudaGraphExecDestroy(b->capture.graph->exec);
  b->capture.graph->exec = nullptr;
  return false;
}

/* A step that cannot be captured is launched like any other, and so are all after it; no slot loses its state. */
void finish_capture(mm_backend *b) {
  bool recorded = record_graph(b);
  if (b->peers && (!mm_cu_peers_settle(b->peers, b->stream, &b->err) || !mm_cu_peers_barrier(b->peers, recorded, &recorded, &b->err)))
    return; /* all ranks replay or none; and no rank's kernels wait for a rank that instantiates a graph, or whose graph is on its way */
  if (recorded) {
    b->capture.mode = REPLAY;
    return;
  }
  cudaGetLastError();
  fprintf(stderr, "cuda: recording a step of %u rows failed, so steps are launched kernel by kernel from now on: %s\n", b->step.rows,
          b->err.text);
  b->drop_graphs();
  b->capture.graph = nullptr, b->capture.off = true;
  run_collected(b);
}

/* Launches the deferred ops, or the graph. */
void finish_step(mm_backend *b) {
  catch_up(b);
  if (b->capture.mode == CAPTURE) finish_capture(b);
  b->capture.ops.clear();
  if (b->capture.mode == REPLAY && b->err.status == MM_OK) check(b, cudaGraphLaunch(b->capture.graph->exec, b->stream), "launch graph");
}

/* Returns true if nothing failed since begin; else copies the error. */
bool succeeded(const mm_backend *b, mm_err *err) {
  if (b->err.status == MM_OK) return true;
  if (err->status == MM_OK) *err = b->err;
  return false;
}

bool cuda_end(mm_backend *b, float *out, mm_err *err) {
  finish_step(b);
  if (b->dry_runs) return succeeded(b, err);
  const bool here = mm_cu_come_to_end(b, err);
  if (here && b->err.status == MM_OK && b->step.wanted)
    check(b,
          cudaMemcpyAsync(out, mm_cu_logits_of(b).at, (size_t)b->step.wanted * mm_cu_logits_of(b).width * sizeof(float),
                          cudaMemcpyDeviceToHost, b->stream),
          "copy logits");
  check(b, cudaStreamSynchronize(b->stream), "step");
  return succeeded(b, err) && here && mm_cu_loaded(b, err) && (!b->peers || mm_cu_peers_check(b->peers, err));
}

void sample_tokens(mm_backend *b) {
  if (mm_cu_later(b, sample_tokens)) return;
  catch_up(b);
  const uint32_t rows = b->step.decode ? b->step.outs : b->step.wanted;
  if (!running(b) || !rows) return;
  check(b, mm_cu_share_logits(b, rows), "share logits");
  if (b->err.status != MM_OK) return;
  b->sampler.args.tokens = b->step.rows;
  b->sampler.args.out = b->device.out, b->sampler.args.slot = b->device.slot, b->sampler.args.sampling = b->device.sampling;
  check(b, mm_cu_sample_tokens(b->sampler.args, rows, (mm_cu_sampling)(b->step.ending - GREEDY), b->stream), "sample");
}

/* Collective: another rank may abort it. */
void sample_with_options(mm_backend *b, const mm_sampling *sampling) {
  if (!mm_cu_sample_with_options(b, sampling, &b->err)) b->failed = "sample", b->lost = b->err.status == MM_OK;
}

/* Copies the sampled ids to pinned memory; collect returns them. */
bool queue_results(mm_backend *b, mm_err *err) {
  step_memory *m = b->step.memory;
  m->outs = b->step.wanted, m->broken = false;
  const bool here = mm_cu_come_to_end(b, err);
  if (b->err.status == MM_OK && m->outs)
    check(b, cudaMemcpyAsync(m->id, b->sampler.args.id, m->outs * sizeof *m->id, cudaMemcpyDeviceToHost, b->stream), "copy ids");
  if (b->err.status == MM_OK) check(b, cudaEventRecord(m->done, b->stream), "record event");
  if (!succeeded(b, err) || !here) {
    cudaStreamSynchronize(b->stream); /* the batch's upload may be under way, and its memory is free now */
    return false;
  }
  b->queued.push_back(m);
  return true;
}

bool cuda_sample(mm_backend *b, mm_err *err) {
  if (!b->step.options) sample_tokens(b);
  finish_step(b);
  if (b->dry_runs) return succeeded(b, err);
  b->step.memory->logprobs_wanted.clear();
  if (b->step.options && b->err.status == MM_OK && !b->lost) sample_with_options(b, b->step.options);
  return queue_results(b, err);
}

bool cuda_defer(mm_backend *b, mm_err *err) {
  finish_step(b);
  if (b->err.status == MM_OK) check(b, cudaEventRecord(b->step.memory->done, b->stream), "record event");
  b->sampler.pending = !b->lost && succeeded(b, err) && mm_cu_loaded(b, err);
  if (b->sampler.pending) return true;
  if (b->c.comm) mm_comm_abort(b->c.comm); /* as mm_cu_come_to_end */
  cudaStreamSynchronize(b->stream);
  return false;
}

bool cuda_sample_deferred(mm_backend *b, const mm_sampling *sampling, uint32_t count, mm_err *err) {
  b->err.status = MM_OK, b->failed = nullptr, b->lost = false;
  if (!b->sampler.pending || count == 0) b->step.memory = free_memory(b), b->step.wanted = b->step.outs = 0;
  b->sampler.pending = false;
  sample_with_options(b, sampling);
  return queue_results(b, err);
}

/* ---- ops ---- */

constexpr auto &begin_op = mm_cu_begin_op;

/* Lets the kernel of a product of this rank's columns send its rows to the other rank of two, if it can: a combine follows. */
void send_rows(mm_backend *b, bool partial, mm_act y) {
  b->inputs.push = partial && b->group && !b->groups.inside ? mm_cu_push_rows(b->group, b->step.rows, y.width) : mm_cu_push{};
}

mm_cu_rows places(const mm_backend *b) { return {b->device.slot, b->device.pos}; }

void cuda_embed(mm_backend *b, mm_act x, const mm_packed *table) {
  mm_cu_wait_for_weights(b, 0);
  if (mm_cu_later(b, cuda_embed, x, table) || !begin_op(b)) return;
  b->inputs.wrote(x.data);
  const mm_cu_weight &w = b->weights.matrix[table];
  const bool whole = mm_cu_is_whole(b, table), draft = b->step.draft;
  const uint32_t first = whole ? 0 : b->c.weights->vocab_first, rows = whole ? w.n : b->c.weights->vocab_rows;
  const int32_t *const last = draft ? b->draft.last_id : b->sampler.args.last_id;
  const mm_cu_ids ids = {
      b->device.id, b->device.slot, last, first, rows, b->device.pos, draft ? nullptr : b->sampler.ids, b->c.limits.max_positions};
  check(b, mm_cu_embed(rows_of(x), reinterpret_cast<const bf16 *>(w.data), ids, b->step.rows, x.width, b->stream), "embed");
  if (!whole) check(b, mm_cu_sum_ranks(b, rows_of(x), x.width), "sum over ranks");
}

void cuda_receive(mm_backend *b, mm_act x) {
  mm_cu_wait_for_weights(b, 0);
  if (!begin_op(b)) return;
  b->inputs.wrote(x.data);
  if (b->dry_runs) return;
  b->lost = !mm_cu_receive_rows(b, rows_of(x), x.width, &b->err) || !mm_cu_look_at_load(b, nullptr, &b->err) ||
            !grow_logits(b, b->step.most_outs, &b->err);
  if (b->lost) b->failed = "receive";
}

void cuda_send(mm_backend *b, mm_act x) {
  if (begin_op(b) && !b->dry_runs && !mm_cu_send_rows(b, rows_of(x), x.width, &b->err)) b->failed = "send";
}

void cuda_layer(mm_backend *b, uint32_t l) { mm_cu_wait_for_weights(b, mm_cu_group_of_layer(l)); }

void cuda_norm(mm_backend *b, mm_act y, mm_act x, const mm_packed *w, double eps) {
  if (mm_cu_later(b, cuda_norm, y, x, w, eps) || !begin_op(b)) return;
  b->inputs.wrote(y.data);
  check(b, mm_cu_norm(rows_of(y), rows_of(x), b->weights.values[w], (float)eps, b->step.rows, y.width, b->stream), "norm");
}

void cuda_linear(mm_backend *b, mm_act y, mm_act x, const mm_packed *w) {
  if (mm_cu_later(b, cuda_linear, y, x, w) || !begin_op(b)) return;
  check(b, mm_cu_collect_linear(b, w, rows_of(x), nullptr, b->step.rows), "collect");
  send_rows(b, w->cut_k != 0, y);
  check(b, b->inputs.linear(b->weights.matrix[w], {rows_of(x), nullptr, rows_of(y), nullptr, b->step.rows}, b->stream), "linear");
  b->step.sent = b->inputs.pushed ? y.data : nullptr;
}

void cuda_linear_two(mm_backend *b, mm_act y, const mm_packed *w, mm_act z, const mm_packed *v, mm_act x) {
  if (mm_cu_later(b, cuda_linear_two, y, w, z, v, x) || !begin_op(b)) return;
  for (const mm_packed *of : {w, v}) check(b, mm_cu_collect_linear(b, of, rows_of(x), nullptr, b->step.rows), "collect");
  const mm_cu_two two = {{b->weights.matrix[w], b->weights.matrix[v]}, rows_of(x), {rows_of(y), rows_of(z)}};
  check(b, b->inputs.linear_two(two, b->step.rows, b->stream), "linear");
}

void cuda_linear_three(mm_backend *b, mm_three of, mm_act x) {
  if (!mm_cu_joins_linears(b, of)) {
    cuda_linear(b, of.y[0], x, of.w[0]), cuda_linear_two(b, of.y[1], of.w[1], of.y[2], of.w[2], x);
    return;
  }
  if (mm_cu_later(b, cuda_linear_three, of, x) || !begin_op(b)) return;
  check(b, mm_cu_do_linears(b, of, x), "linear");
}

void cuda_select(mm_backend *b, uint32_t layer, mm_act q, mm_act k, const mm_packed *q_norm, const mm_packed *k_norm) {
  if (mm_cu_later(b, cuda_select, layer, q, k, q_norm, k_norm) || !begin_op(b)) return;
  b->inputs.wrote(q.data), b->inputs.wrote(k.data);
  check(b, mm_cu_do_select(b, layer, q, k, q_norm, k_norm), "select");
}

void cuda_gqa(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv, const mm_packed *q_norm, const mm_packed *k_norm) {
  if (mm_cu_later(b, cuda_gqa, layer, o, qkv, q_norm, k_norm) || !begin_op(b)) return;
  b->inputs.wrote(o.data);
  if (b->attention.by_head) {
    check(b, mm_cu_do_gqa(b, layer, o, qkv, q_norm, k_norm), "gqa");
    return;
  }
  const mm_cu_kv &kv = b->cache[layer].kv;
  const float *qn = q_norm ? b->weights.values[q_norm] : nullptr, *kn = k_norm ? b->weights.values[k_norm] : nullptr;
  const uint32_t singles = mm_cu_singles(b), rest = b->step.rows - singles;
  const bool inside = q_norm && b->group && !rest && mm_cu_qk_norm_inside(b);
  if (q_norm && b->group && !inside) {
    check(b, mm_cu_qk_norm_ranks(b, rows_of(qkv), qn, kn, (float)b->c.model->norm_eps), "norm of q and k");
    qn = kn = nullptr;
  }
  mm_cu_qkv p = {rows_of(qkv), qn, kn, b->attention.inv_freq, (float)b->c.model->norm_eps, singles, inside ? b->group : nullptr};
  mm_cu_gqa a = {rows_of(qkv), rows_of(o), b->attention.work, singles, b->c.limits.max_tokens, {}, b->step.verifies};
  if (b->attention.far.items) a.far = {mm_cu_far_now(b), b->device.first, b->device.item};
  if (singles) check(b, mm_cu_gqa_decode(b->heads, places(b), kv, p, a, b->stream), "gqa decode");
  if (!rest) return;
  p.qkv += (size_t)singles * qkv.width, p.tokens = rest, a.tokens = b->step.rows; /* tiles name rows of the whole step */
  check(b, mm_cu_rope(b->heads, {b->device.slot + singles, b->device.pos + singles}, kv, p, b->stream), "rope");
  check(b, mm_cu_gqa_prefill(b->heads, {b->device.span, b->device.tile, b->step.tiles}, kv, a, b->stream), "gqa prefill");
}

void cuda_lightning(mm_backend *b, uint32_t layer, mm_act o, mm_act qkv) {
  if (mm_cu_later(b, cuda_lightning, layer, o, qkv) || !begin_op(b)) return;
  b->inputs.wrote(o.data);
  const layer_cache &c = b->cache[layer];
  const mm_cu_lightning a = {rows_of(qkv), rows_of(o), c.state, c.slope, b->heads.heads, b->heads.head_dim, b->states.per_slot};
  if (b->c.options.batch_invariant) {
    check(b, mm_cu_lightning_rows(a, b->device.span, b->step.spans, b->stream), "lightning rows");
    return;
  }
  const uint32_t singles = mm_cu_singles(b);
  if (singles) check(b, mm_cu_lightning_decode(a, places(b), singles, b->stream), "lightning decode");
  if (singles < b->step.rows)
    check(b, mm_cu_lightning_prefill(a, b->device.span + singles, b->step.spans - singles, b->stream), "lightning prefill");
}

void cuda_gated_norm(mm_backend *b, mm_act y, mm_act o, mm_act gate, const mm_packed *w, double eps) {
  if (mm_cu_later(b, cuda_gated_norm, y, o, gate, w, eps) || !begin_op(b)) return;
  b->inputs.wrote(y.data);
  const mm_cu_gated a = {rows_of(y), rows_of(o), rows_of(gate), b->weights.values[w], (float)eps, y.width};
  if (b->group) {
    check(b, mm_cu_gated_norm_ranks(b, a), "gated norm");
    return;
  }
  const uint32_t rows = b->step.rows;
  check(b, mm_cu_gated_norm(a, rows, b->inputs.codes_too(a.y, rows, y.width), b->stream), "gated norm");
}

void cuda_experts(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2) {
  if (mm_cu_later(b, cuda_experts, y, x, w13, w2) || !begin_op(b)) return;
  mm_cu_wait_for_experts(b);
  if (!running(b)) return;
  const mm_cu_experts a = {rows_of(x), rows_of(y), b->experts.middle, b->experts.pair_out, b->step.rows};
  check(b, mm_cu_collect_experts(b, w13, w2, a), "collect");
  send_rows(b, !b->c.weights->layer[b->experts.layer].mlp_up.scheme, y); /* else the shared expert's come on top */
  check(b, b->inputs.experts(b->weights.matrix[w13], b->weights.matrix[w2], b->experts.route, a, b->stream), "experts");
  b->step.sent = b->inputs.pushed ? y.data : nullptr;
}

void cuda_mlp(mm_backend *b, mm_act y, mm_act x, const mm_packed *up, const mm_packed *down, bool add) {
  if (mm_cu_later(b, cuda_mlp, y, x, up, down, add) || !begin_op(b)) return;
  check(b, mm_cu_do_mlp(b, y, x, up, down, add), "mlp");
}

void cuda_experts_shared(mm_backend *b, mm_act y, mm_act x, const mm_packed *w13, const mm_packed *w2, const mm_packed *up,
                         const mm_packed *down) {
  if (!mm_cu_joins_experts(b, w13, w2, up, down)) {
    cuda_experts(b, y, x, w13, w2), cuda_mlp(b, y, x, up, down, true);
    return;
  }
  if (mm_cu_later(b, cuda_experts_shared, y, x, w13, w2, up, down) || !begin_op(b)) return;
  mm_cu_wait_for_experts(b);
  if (running(b)) check(b, mm_cu_do_experts_shared(b, y, x, w13, w2, up, down), "experts");
}

void cuda_combine(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w, double eps) {
  if (mm_cu_later(b, cuda_combine, h, n, residual, branch, scale, w, eps) || !begin_op(b)) return;
  const bool partial = mm_cu_combines_ranks(b->group, b->step.rows, h.width);
  if (!partial) check(b, mm_cu_sum_ranks(b, rows_of(branch), h.width), "sum over ranks");
  mm_cu_combine a = mm_cu_combine_of(b, h, n, residual, branch, scale, w, eps);
  if (b->groups.count > 1) a.codes = {}, b->inputs.wrote(n.data); /* products read what gather makes of n */
  b->step.deferred = {!partial ? RESIDUAL_SUMMED : b->step.sent_before == branch.data ? RESIDUAL_SENT : RESIDUAL_PARTIAL, a, h.width};
  if (b->c.options.eager) catch_up(b);
}

void cuda_copy(mm_backend *b, mm_act to, mm_act from) {
  if (mm_cu_later(b, cuda_copy, to, from) || !begin_op(b)) return;
  b->inputs.wrote(to.data);
  check(b, mm_cu_copy(rows_of(to), rows_of(from), (size_t)b->step.rows * to.width, b->stream), "copy");
}

void cuda_logits(mm_backend *b, mm_act x, const mm_packed *head) {
  mm_cu_wait_for_weights(b, mm_cu_group_of_head(b->c.model));
  if (mm_cu_later(b, cuda_logits, x, head) || !begin_op(b) || b->step.outs == 0) return;
  check(b, mm_cu_collect_linear(b, head, rows_of(x), b->device.out, b->step.wanted), "collect");
  check(b, b->inputs.linear(b->weights.matrix[head], {rows_of(x), b->device.out, nullptr, mm_cu_logits_of(b).at, b->step.outs}, b->stream),
        "logits");
}

}  // namespace

mm_cu_combine mm_cu_combine_of(mm_backend *b, mm_act h, mm_act n, mm_act residual, mm_act branch, mm_deepnorm scale, const mm_packed *w,
                               double eps) {
  b->inputs.wrote(h.data), b->inputs.wrote(n.data);
  const float *const norm = b->weights.values[w ? w : mm_cu_any_norm(b)];
  return {rows_of(h),        rows_of(n), rows_of(residual),
          rows_of(branch),   norm,       (float)scale.alpha,
          (float)scale.beta, (float)eps, b->inputs.codes_too(rows_of(n), b->step.rows, n.width)};
}

bool mm_cu_begin_op(mm_backend *b) {
  catch_up(b);
  b->step.sent_before = b->step.sent, b->step.sent = nullptr;
  return running(b);
}

bool mm_cu_begin_step(mm_backend *b, const mm_batch *batch, mm_err *err) { return b->draft.next = DRAFT_NONE, cuda_begin(b, batch, err); }

bool mm_cu_begin_draft(mm_backend *b, const mm_batch *batch, mm_draft_step step, mm_err *err) {
  b->draft.next = step.best ? DRAFT_BEST : DRAFT_LOGITS, b->draft.step = step;
  return cuda_begin(b, batch, err);
}

bool mm_cu_best(mm_backend *b, int32_t *id, mm_err *err) {
  mm_cu_do_best(b);
  finish_step(b);
  if (b->dry_runs) return succeeded(b, err);
  const mm_draft_step chain = b->step.chain;
  const bool here = mm_cu_come_to_end(b, err), more = chain.pass + 1 < chain.passes;
  if (here && b->err.status == MM_OK)
    check(b, more ? cudaEventRecord(b->step.memory->done, b->stream) : mm_cu_copy_best(b), "copy choices");
  if (more && here && b->err.status == MM_OK) return true;
  check(b, cudaStreamSynchronize(b->stream), "step");
  if (!succeeded(b, err) || !here || !mm_cu_loaded(b, err) || (b->peers && !mm_cu_peers_check(b->peers, err))) return false;
  if (id) memcpy(id, b->step.memory->id, mm_max(1, chain.passes) * b->step.wanted * sizeof *id);
  return true;
}

const mm_ops mm_ops_cuda = {
    .name = "cuda",
    .open = mm_cu_backend_open,
    .close = mm_cu_backend_close,
    .act = cuda_act,
    .begin = mm_cu_begin_step,
    .embed = cuda_embed,
    .norm = cuda_norm,
    .linear = cuda_linear,
    .gqa = cuda_gqa,
    .lightning = cuda_lightning,
    .gated_norm = cuda_gated_norm,
    .route = mm_cu_route_rows,
    .experts = cuda_experts,
    .combine = cuda_combine,
    .copy = cuda_copy,
    .logits = cuda_logits,
    .end = cuda_end,
    .read = mm_cu_read_rows,
    .expert_load = mm_cu_expert_load,
    .copy_rate = mm_cu_copy_rate,
    .act_quant = true,
    .sampler = {.sample = cuda_sample,
                .defer = cuda_defer,
                .sample_deferred = cuda_sample_deferred,
                .collect = mm_cu_collect_results,
                .load_ids = mm_cu_ids_load,
                .score = mm_cu_score_deferred,
                .samples = MM_SAMPLES_MIN_P | MM_SAMPLES_PENALTIES | MM_SAMPLES_BIAS | MM_SAMPLES_MASK | MM_SAMPLES_LOGPROBS},
    .cache = {true, true, mm_cu_state_bytes, mm_cu_state_copy, mm_cu_state_save, mm_cu_state_load, mm_cu_page_bytes, mm_cu_pool, mm_cu_move,
              mm_cu_moved},
    .weights = {true, cuda_layer, mm_cu_finish_load, mm_cu_hold, mm_cu_release},
    .select = cuda_select,
    .mlp = cuda_mlp,
    .joined = {cuda_linear_two, cuda_linear_three, cuda_experts_shared},
    .draft = {mm_cu_draft_concat, mm_cu_draft_store, mm_cu_draft_attend, mm_cu_draft_combine, mm_cu_begin_draft, mm_cu_best, sizeof(bf16),
              mm_cu_draft_keep, mm_cu_draft_before, mm_cu_draft_chain, mm_cu_takes_draft},
    .calibration = true,
    .calibrate = mm_cu_calibrate,
    .ranks = {.send = cuda_send,
              .receive = cuda_receive,
              .gather = mm_cu_gather,
              .scatter = mm_cu_scatter,
              .gather_routed = mm_cu_gather_routed,
              .exchange = mm_cu_exchange,
              .plan = mm_cu_plan},
    .experts_cut = true,
    .across = true,
    .batch_invariant_on_request = true,
    .memory = mm_cu_memory_facts,
    .own_memory = true,
    .kernels = mm_cu_noted_code,
};
