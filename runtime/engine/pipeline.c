/* Pipeline stages: what a rank of one stage sends, the same rank of the next receives, through shared memory or by messages between
 * processes; and the end of a step, after which no process waits for this one. */
#include <string.h>

#include "runtime/engine/comm_inside.h"

#define BORDER_TAG 256               /* + a rank: rows to it from the stage before. An all-reduce's tag: 1 + the stage's number */
#define PIECE      ((size_t)1 << 22) /* of rows to another process, so that a failed one can take them in without room for all */

void mm_comm_link(mm_comm *from, mm_comm *to) {
  from->next = to;
  to->before = from;
}

/* Rows to the rank of stage `to` in another process, their size first: 0 where there will be none. */
static void send_to_process(mm_comm *to, uint32_t rank, float *x, uint64_t n) {
  const uint32_t tag = BORDER_TAG + to->stage * to->ranks + rank, process = mm_comm_process(to, rank);
  to->process_group->exchange(to->process_group, tag, &(mm_transfer){process, &n, sizeof n}, 1, NULL, 0, 0);
  for (uint64_t at = 0; at < n; at += PIECE)
    to->process_group->exchange(to->process_group, tag, &(mm_transfer){process, x + at, mm_min(PIECE, n - at) * sizeof *x}, 1, NULL, 0, 0);
}

/* Receives rows from the stage before in another process; x NULL: discards them. Returns false if the sender has no rows. */
static bool receive_from_process(mm_comm *c, uint32_t rank, float *x) {
  static float unwanted[PIECE]; /* what several ranks take in and nobody reads */
  const uint32_t tag = BORDER_TAG + c->stage * c->ranks + rank, process = mm_comm_process(c->before, rank);
  uint64_t n = 0;
  c->received[rank] = true;
  c->process_group->exchange(c->process_group, tag, NULL, 0, &(mm_transfer){process, &n, sizeof n}, 1, 0);
  for (uint64_t at = 0; at < n; at += PIECE)
    c->process_group->exchange(c->process_group, tag, NULL, 0,
                               &(mm_transfer){process, x ? x + at : unwanted, mm_min(PIECE, n - at) * sizeof *x}, 1, 0);
  return n > 0;
}

void mm_comm_send(mm_comm *c, uint32_t rank, float *x, size_t n) {
  mm_comm *to = c->next;
  if (n == 0) return;
  if (!mm_comm_is_here(to, rank)) {
    if (mm_comm_aborted(c)) return;
    c->sent[rank] = true;
    send_to_process(to, rank, x, n);
    return;
  }
  pthread_mutex_lock(&to->lock);
  to->mailbox[rank] = x;
  pthread_cond_broadcast(&to->turn);
  while (to->mailbox[rank] && !to->aborted) pthread_cond_wait(&to->turn, &to->lock);
  to->mailbox[rank] = NULL;
  pthread_mutex_unlock(&to->lock);
}

bool mm_comm_receive(mm_comm *c, uint32_t rank, float *x, size_t n) {
  if (n == 0) return true;
  if (!mm_comm_is_here(c->before, rank)) {
    const bool came = receive_from_process(c, rank, x);
    if (!came) mm_comm_abort(c);
    return came;
  }
  pthread_mutex_lock(&c->lock);
  while (!c->mailbox[rank] && !c->aborted) pthread_cond_wait(&c->turn, &c->lock);
  const bool came = c->mailbox[rank];
  if (came) memcpy(x, c->mailbox[rank], n * sizeof *x);
  c->mailbox[rank] = NULL;
  pthread_cond_broadcast(&c->turn);
  pthread_mutex_unlock(&c->lock);
  return came;
}

bool mm_comm_leave(mm_comm *c, bool borders, bool late, mm_err *err) {
  pthread_mutex_lock(&c->lock);
  const bool last = ++c->left == c->here;
  pthread_mutex_unlock(&c->lock);
  if (!c->process_group || !last) return true;
  for (uint32_t r = c->first; borders && r < c->first + c->here; r++) {
    if (c->next && !mm_comm_is_here(c->next, r) && !c->sent[r]) send_to_process(c->next, r, NULL, 0);
    if (c->before && !mm_comm_is_here(c->before, r) && !c->received[r]) receive_from_process(c, r, NULL);
  }
  const double limit_s = mm_comm_timeout(c);
  if (c->here < c->ranks && !c->failure_known) mm_comm_agree(c, late && limit_s > 0 ? MM_LATE_S : limit_s);
  return !c->no_memory || mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "out of memory for numbers of other processes");
}
