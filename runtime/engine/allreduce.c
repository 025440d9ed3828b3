/* All-reduce and all-gather of tensor-parallel ranks: in shared memory, and with ranks of other processes by exchanges of messages.
 *
 * Between processes there is nothing but exchanges in an order that all know, and each says first whether the sender is well. A process
 * whose ranks have failed makes the exchange that the others come to next, says so in it, and is done (mm_comm_leave); a process that hears
 * it aborts and makes no more exchanges of that step either. Every exchange therefore has its partner, whatever fails where. */
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/comm_inside.h"

/* Sends mine[bytes] to the stage's other processes and receives theirs: `each` bytes of a rank, by ranks; or, each 0, as many
 * of a process, by processes. */
static void exchange(mm_comm *c, void *mine, size_t bytes, void *theirs, size_t each, double limit_s) {
  const uint32_t first = mm_comm_process(c, 0), last = mm_comm_process(c, c->ranks - 1), most = last - first + 1;
  mm_transfer out[most], in[most];
  uint32_t n = 0;
  for (uint32_t p = first; p <= last; p++) {
    uint32_t from, count;
    mm_comm_ranks(c, p, &from, &count);
    if (p == c->process_group->process) continue;
    out[n] = (mm_transfer){p, mine, bytes};
    in[n++] =
        each ? (mm_transfer){p, (char *)theirs + from * each, count * each} : (mm_transfer){p, (char *)theirs + (p - first) * bytes, bytes};
  }
  c->process_group->exchange(c->process_group, 1 + c->stage, out, n, in, n, limit_s);
}

bool mm_comm_agree(mm_comm *c, double limit_s) {
  uint32_t mine = mm_comm_aborted(c) || c->no_memory, theirs[c->ranks];
  memset(theirs, 0, sizeof theirs);
  exchange(c, &mine, sizeof mine, theirs, 0, limit_s);
  for (uint32_t i = 0; i < c->ranks; i++) mine |= theirs[i];
  if (!mine) return true;
  c->failure_known = c->failed_before = true;
  mm_comm_abort(c);
  return false;
}

/* By one rank of each process, while the others wait: fills x (sums) or gathered with n bytes of each rank of the other processes. */
static void exchange_parts(mm_comm *c, bool sums, size_t n) {
  const double limit_s = mm_comm_timeout(c);
  c->no_memory = !MM_GROW(c->message, &c->message_cap, mm_max(n * c->ranks, 1), MM_IGNORED);
  if (!mm_comm_agree(c, limit_s)) return;
  for (uint32_t r = c->first; n && r < c->first + c->here; r++)
    memcpy(c->message + r * n, sums ? (const void *)c->x[r] : c->gathered[r], n);
  exchange(c, c->message + c->first * n, c->here * n, c->message, n, limit_s);
  for (uint32_t r = 0; r < c->ranks; r++) {
    if (mm_comm_is_here(c, r)) continue;
    if (sums)
      c->x[r] = (float *)(void *)(c->message + r * n);
    else
      c->gathered[r] = c->message + r * n;
  }
}

static float add(float a, float b) { return a + b; }
static float largest(float a, float b) { return a > b ? a : b; }

/* Each rank reduces its own range of elements and hands the result to all: every element is reduced once, so all ranks hold the same bits.
 */
static void reduce(mm_comm *c, uint32_t rank, float *x, size_t n, float (*op)(float, float)) {
  if (c->ranks == 1) return;
  c->x[rank] = x;
  if (!mm_comm_barrier(c, rank, 0)) return;
  if (c->here < c->ranks) {
    if (rank == c->first) exchange_parts(c, true, n * sizeof *x);
    mm_comm_barrier_end(c); /* not before exchange_parts is done with x, whatever fails meanwhile */
    if (!mm_comm_barrier(c, rank, 0)) return;
  }
  size_t from = n * (rank - c->first) / c->here, to = n * (rank - c->first + 1) / c->here;
  for (size_t i = from; i < to; i++) {
    float v = c->x[0][i];
    for (uint32_t r = 1; r < c->ranks; r++) v = op(v, c->x[r][i]);
    for (uint32_t r = c->first; r < c->first + c->here; r++) c->x[r][i] = v;
  }
  mm_comm_barrier_end(c);
}

void mm_comm_all_reduce_sum(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, add); }
void mm_comm_all_reduce_max(mm_comm *c, uint32_t rank, float *x, size_t n) { reduce(c, rank, x, n, largest); }

bool mm_comm_gather(mm_comm *c, uint32_t rank, const void *mine, const void **all) {
  c->gathered[rank] = mine;
  if (!mm_comm_barrier(c, rank, mm_comm_gather_timeout(c))) return false;
  for (uint32_t r = 0; r < c->ranks; r++) all[r] = c->gathered[r];
  mm_comm_barrier_end(c);
  return true;
}

bool mm_comm_all_gather(mm_comm *c, uint32_t rank, const void *mine, void *all, size_t n) {
  c->gathered[rank] = mine;
  if (!mm_comm_barrier(c, rank, mm_comm_gather_timeout(c))) return false;
  if (c->here < c->ranks) {
    if (rank == c->first) exchange_parts(c, false, n);
    mm_comm_barrier_end(c);
    if (!mm_comm_barrier(c, rank, 0)) return false;
  }
  for (uint32_t r = 0; r < c->ranks; r++) memcpy((char *)all + r * n, c->gathered[r], n);
  mm_comm_barrier_end(c);
  return true;
}

void mm_comm_gather_rows(mm_comm *c, uint32_t rank, const float *mine, float *all, const mm_comm_rows *rows) {
  c->gathered[rank] = mine;
  if (!mm_comm_barrier(c, rank, 0)) return;
  for (uint32_t g = 0; g < rows->groups; g++) /* of each group the first rank's */
    memcpy(all + rows->first[g] * rows->width, c->gathered[g * (c->ranks / rows->groups)],
           (rows->first[g + 1] - rows->first[g]) * rows->width * sizeof *all);
  mm_comm_barrier_end(c);
}
