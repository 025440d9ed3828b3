/* While one token passes, memory is what bounds most ops, and it is idle while threads wait for one another or for the short ops that one
 * thread does alone. Waiting threads therefore prefetch the first strips of the weights that come next, which then lie in the second or
 * third cache. */
#include "runtime/cpu/cpu_backend.h"

enum { PIECE = 1024, MOST = 512 << 10 }; /* bytes asked for at once, and before one op */

bool mm_cpu_prefetch_piece(void *ctx) {
  mm_cpu_prefetch *s = ctx;
  const size_t each = atomic_load_explicit(&s->bytes, memory_order_relaxed) / PIECE;
  const size_t pieces = each * atomic_load_explicit(&s->count, memory_order_relaxed);
  if (atomic_load_explicit(&s->next, memory_order_relaxed) >= pieces) return false;
  const size_t i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed);
  if (i >= pieces) return false;
  const uint8_t *p = atomic_load_explicit(&s->from[i / each % MM_CPU_PREFETCHES], memory_order_relaxed) + i % each * PIECE;
  for (size_t at = 0; at < PIECE; at += 64) __builtin_prefetch(p + at, 0, 2);
  return true;
}

/* Nothing is read through these pointers: a thread that sees some of the old ones and some of the new ones asks for what is not needed. */
static void publish(mm_cpu_prefetch *s, unsigned count, size_t bytes) {
  atomic_store_explicit(&s->bytes, bytes, memory_order_relaxed);
  atomic_store_explicit(&s->count, count, memory_order_relaxed);
  atomic_store_explicit(&s->next, 0, memory_order_relaxed);
}
static void put(mm_cpu_prefetch *s, unsigned i, const uint8_t *p) { atomic_store_explicit(&s->from[i], p, memory_order_relaxed); }
static size_t strip_bytes(const mm_packed *w, uint32_t rows) { return (size_t)(mm_cpu_row_at(w, 0, rows) - mm_cpu_row_at(w, 0, 0)); }

/* The first rows of each thread's share of these matrices of w, as many bytes of each; lead NULL: of the only one. */
static void first_of_shares(mm_backend *b, const mm_packed *w, const uint32_t *lead, uint32_t leads) {
  const size_t strips = mm_ceil_div(w->n, mm_cpu_alone(b)), count = leads * strips;
  size_t bytes = MOST;
  unsigned shares = 0;
  for (unsigned t = 0; t < b->c.options.threads && shares < MM_CPU_PREFETCHES; t++) {
    const size_t item = mm_cpu_share_begin(b, count, t);
    const uint32_t row = (uint32_t)(item % strips) * mm_cpu_alone(b);
    if (item == mm_cpu_share_begin(b, count, t + 1)) continue; /* an empty share */
    bytes = mm_min(bytes, strip_bytes(w, w->n - row));
    put(&b->prefetch, shares++, mm_cpu_row_at(w, lead ? lead[item / strips] : 0, row));
  }
  publish(&b->prefetch, shares, mm_min(bytes, MOST / mm_max(1, shares)) / PIECE * PIECE);
}

void mm_cpu_prefetch_after(mm_backend *b, const mm_packed *w) {
  const mm_rank_weights *all = b->c.weights;
  const mm_layer_weights *y = &all->layer[b->layer];
  const mm_packed *next = NULL;
  if (b->batch->tokens != 1) return;
  if (w == &y->qkv) next = y->output_gate.scheme ? &y->output_gate : y->index_q.scheme ? &y->index_q : &y->out;
  if (w == &y->index_q) next = &y->index_k;
  if (w == &y->output_gate || w == &y->index_k) next = &y->out;
  if (w == &y->out) next = y->router.scheme ? &y->router : &y->mlp_up;
  if (w == &y->w2 && y->mlp_up.scheme) next = &y->mlp_up;
  if (w == &y->mlp_up) next = &y->mlp_down;
  if (w == &y->mlp_down || (w == &y->w2 && !y->mlp_up.scheme))
    next = b->layer + 1 < all->layer_end ? &all->layer[b->layer + 1].qkv : &all->head;
  if (!next || !next->scheme) {
    publish(&b->prefetch, 0, 0);
    return;
  }
  first_of_shares(b, next, NULL, 1);
}

void mm_cpu_prefetch_experts(mm_backend *b, uint32_t active, const mm_packed *w) {
  if (b->batch->tokens == 1 && active) first_of_shares(b, w, b->moe.active, active);
}
