/* Steps while weights arrive (load.h): what they wait for, and what becomes of them where it does not come. A rank that fails breaks the
 * meeting before it waits for anything, since kernels of other ranks may wait for some that it has not launched, and its own for theirs. */
#include <vector>

#include "runtime/cuda/backend.h"
#include "runtime/cuda/comm/peers.h"

bool mm_cu_look_at_load(mm_backend *b, const mm_batch *batch, mm_err *err) {
  bool ready = false, padding = batch;
  if (batch && b->groups.count > 1) batch = &b->groups.in->all;
  if (!b->loading || b->dry_runs) return true;
  for (uint32_t i = 0; padding && i < batch->span_count; i++) padding = padding && batch->span[i].slot < 0;
  /* On a device that ranks share, kernels of a load may be queued behind one that waits for the rank that loads. */
  const bool whole = padding || (b->peers && !mm_cu_peers_distinct(b->peers));
  if (!(whole ? b->loading->finish(err) : b->loading->poll(&ready, err))) return false;
  ready |= whole;
  if (b->peers && !mm_cu_peers_barrier(b->peers, ready, &ready, err)) return false;
  if (!ready) return true;
  b->loading.reset();
  if (!b->peers) return true;
  mm_cu_peers_load(b->peers, false);
  return mm_cu_peers_barrier(b->peers, true, &ready, err) && /* no rank's kernels wait for one that unpins memory */
         mm_cu_separate_streams(b, err);
}

bool mm_cu_finish_load(mm_backend *b, mm_err *err) { return !b->loading || b->loading->finish(err); }

/* The load has failed, or another rank has: nothing more is launched in this step. */
static void give_up(mm_backend *b) { b->failed = "load", b->lost = b->err.status == MM_OK; }

void mm_cu_wait_for_weights(mm_backend *b, uint32_t group) {
  if (!b->loading || b->dry_runs || b->lost || b->err.status != MM_OK) return;
  if (!b->loading->wait(group, b->stream, &b->err)) give_up(b);
}

void mm_cu_wait_for_experts(mm_backend *b) {
  if (!b->loading) return;
  const auto list_used = [&] {
    return mm_cu_check(mm_cu_list_used(b->experts.route, b->experts.used, b->step.rows, b->stream), "experts in use", &b->err);
  };
  if (b->dry_runs) {
    list_used();
    return;
  }
  const uint32_t n = b->experts.route.held ? b->experts.route.held : b->experts.route.experts,
                 first = mm_cu_group_of_experts(b->c.model, b->experts.layer);
  const std::vector<uint32_t> all(MM_CU_MAX_EXPERTS / 32, ~0u);
  const bool near = b->loading->is_near(first, n);
  if (!near && (!list_used() || !mm_cu_check(cudaStreamSynchronize(b->stream), "experts in use", &b->err))) return;
  if (!b->loading->wait_for(first, n, near ? all.data() : b->experts.used, b->stream, &b->err)) give_up(b);
}

bool mm_cu_come_to_end(mm_backend *b, mm_err *err) {
  if (!b->lost && b->err.status == MM_OK) return !b->peers || mm_cu_peers_settle(b->peers, b->stream, err);
  if (b->c.comm) mm_comm_abort(b->c.comm);
  return false;
}

/* While a token's experts are chosen, nothing else can be read: the next layer's first weights are. 4 and 8 MB
 * save the same time; 16 MB compete with the experts' own reads. */
mm_cu_ahead mm_cu_ahead_of(mm_backend *b, uint32_t layer) {
  constexpr uint64_t kMost = 6 << 20;
  if (b->step.rows > 1 || layer + 1 >= b->c.weights->layer_end) return {};
  const mm_cu_weight &w = b->weights.matrix[&b->c.weights->layer[layer + 1].qkv];
  return {w.data, (uint32_t)mm_min(kMost, (uint64_t)w.lead * w.n * w.pitch)};
}
