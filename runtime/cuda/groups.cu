/* Groups of attention (--attn-tp): ops run the rows of the rank's group, and between gather and scatter those of all groups, on all ranks
 * of the stage. Every rank knows the whole step (mm_rank_ops.plan), so all decide alike how many rows each group has with padding, what
 * kind of step it is and how it ends, without asking each other.
 *
 * A step whose rows are all single tokens or verify rows, and all outputs, pads every group to the same size of a recorded step, so that
 * its graph depends on that size alone. In any other step groups have their own number of rows; one without any has a row of padding, and
 * launches what the others launch. */
#include <string.h>

#include <algorithm>

#include "runtime/cuda/backend.h"

void mm_cu_open_groups(mm_backend *b) {
  const mm_rank_weights *w = b->c.weights;
  b->groups.count = w->tp / mm_attn_tp(w), b->groups.own = mm_attn_group(w);
  b->c.limits.max_tokens += mm_cu_group_padding(b);
}

uint32_t mm_cu_group_padding(const mm_backend *b) {
  if (b->groups.count == 1) return 0;
  return b->groups.count * (b->c.options.batch_invariant ? kLeastInvariant : 1);
}

/* Outputs of rows [first, end) of a batch. */
static uint32_t outs_between(const mm_batch *all, uint32_t first, uint32_t end) {
  const uint32_t *const from = std::lower_bound(all->out, all->out + all->out_count, first);
  return (uint32_t)(std::lower_bound(from, all->out + all->out_count, end) - from);
}

void mm_cu_plan(mm_backend *b, const mm_group_rows *rows) { b->groups.in = rows; }

void mm_cu_plan_groups(mm_backend *b) {
  group_step &g = b->groups;
  const mm_group_rows *const in = g.in;
  if (g.count == 1) return;
  const current_step own = b->step;
  mm_cu_classify_rows(b, &in->all);
  const bool decode = b->step.decode, verifies = b->step.verifies;
  b->step = own;
  uint32_t most = 0, outs = 0;
  for (uint32_t k = 0; k < g.count; k++) {
    most = std::max(most, in->first[k + 1] - in->first[k]);
    outs = std::max(outs, outs_between(&in->all, in->first[k], in->first[k + 1]));
  }
  const uint32_t bucket = decode && in->all.out_count == in->all.tokens ? mm_cu_bucket_of(b, most) : 0;
  g.decode = decode, g.fixed = bucket && (uint64_t)bucket * g.count <= b->c.limits.max_tokens;
  const uint32_t least = b->c.options.batch_invariant ? kLeastInvariant : 1;
  g.rows.groups = g.count, g.rows.width = b->c.model->hidden, g.rows.first[0] = 0;
  for (uint32_t k = 0; k < g.count; k++)
    g.rows.first[k + 1] = g.rows.first[k] + (g.fixed ? bucket : std::max(in->first[k + 1] - in->first[k], least));
  current_step &s = b->step;
  s.rows = g.rows.first[g.own + 1] - g.rows.first[g.own];
  s.outs = g.fixed ? bucket : s.wanted ? std::max(s.wanted, b->c.options.batch_invariant ? kLeastInvariant : 0) : 0;
  s.most_outs = g.fixed ? bucket : outs ? std::max(outs, b->c.options.batch_invariant ? kLeastInvariant : 0) : 0;
  if (g.fixed) s.verifies = verifies;
  if ((g.fixed || s.tokens == 0) && !s.decode) s.decode = true, s.singles = 0;
}

size_t mm_cu_place_step(const mm_backend *b, char *base, batch_arrays *a) {
  const group_step &g = b->groups;
  const size_t slots = g.count == 1 ? 0 : mm_round_up(g.rows.first[g.count] * sizeof *a->all_slot, 256);
  const size_t bytes = mm_cu_place_batch(b->step.rows, b->step.decode, base + slots, a);
  a->all_slot = g.count == 1 ? a->slot : reinterpret_cast<int32_t *>(base);
  return slots + bytes;
}

void mm_cu_fill_groups(const mm_backend *b, const batch_arrays *h) {
  const group_step &g = b->groups;
  const mm_group_rows *const in = g.in;
  if (g.count == 1) return;
  std::fill(h->all_slot, h->all_slot + g.rows.first[g.count], -1);
  for (uint32_t i = 0, k = 0; i < in->all.span_count; i++) {
    const mm_span &s = in->all.span[i];
    while (s.first >= in->first[k + 1]) k++;
    std::fill_n(h->all_slot + g.rows.first[k] + (s.first - in->first[k]), s.count, s.slot);
  }
}

void mm_cu_leave_groups(mm_backend *b) {
  group_step &g = b->groups;
  g.to = g.from = {};
  if (!g.inside) return;
  g.inside = false;
  b->step.rows = g.rows.first[g.own + 1] - g.rows.first[g.own];
  b->inputs.decode = b->step.decode;
}

void mm_cu_enter_groups(mm_backend *b) {
  group_step &g = b->groups;
  g.inside = true;
  b->step.rows = g.rows.first[g.count];
  b->inputs.decode = g.decode;
}

static bf16 *rows_of(mm_act a) { return static_cast<bf16 *>(a.data); }

void mm_cu_gather(mm_backend *b, mm_act to, mm_act from, const mm_group_rows *rows) {
  if (mm_cu_later(b, mm_cu_gather, to, from, rows)) return;
  group_step &g = b->groups;
  const deferred_residual d = b->step.deferred;
  const bool along = d.state == RESIDUAL_SUMMED && d.op.n == from.data && !b->group && mm_cu_combines_groups(b->peers, g.rows);
  if (along) b->step.deferred = {};
  if (!mm_cu_begin_op(b)) return;
  b->inputs.wrote(to.data);
  const cudaError_t e = along ? mm_cu_combine_gather(b->peers, g.rows, d.op, rows_of(to), b->stream)
                              : mm_cu_peers_gather_rows(b->peers, g.rows, rows_of(to), rows_of(from), b->stream);
  mm_cu_note(b, e, "gather rows");
  mm_cu_enter_groups(b);
}

void mm_cu_scatter(mm_backend *b, mm_act to, mm_act from) {
  if (mm_cu_later(b, mm_cu_scatter, to, from) || !mm_cu_begin_op(b)) return;
  mm_cu_leave_groups(b);
  b->inputs.wrote(to.data);
  b->groups.to = to, b->groups.from = from;
}

void mm_cu_finish_scatter(mm_backend *b) {
  const mm_act to = b->groups.to, from = b->groups.from;
  b->groups.to = b->groups.from = {};
  mm_cu_note(b, mm_cu_peers_scatter_rows(b->peers, b->groups.rows, rows_of(to), rows_of(from), b->stream), "scatter rows");
}
