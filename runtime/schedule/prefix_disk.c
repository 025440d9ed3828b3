/* Entries of the prefix cache on disk, and on their way there and back (prefix_cache.h). The least recently used entries leave
 * the pool before their places are needed; each has its place until its copy has ended. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/prefix_cache_inside.h"

bool mm_prefix_cache_disk(mm_prefix_cache *c, uint32_t blocks, mm_err *err) {
  disk *d = &c->disk;
  if (!(d->free = mm_calloc(blocks, sizeof *d->free, err))) return false;
  for (uint32_t i = 0; i < blocks; i++) d->free[i] = blocks - 1 - i;
  d->blocks = d->free_count = blocks;
  mm_prefix_cache_share(c);
  return true;
}

static bool add_copy(mm_prefix_cache *c, node *n, uint32_t place, uint32_t block, bool in) {
  disk *d = &c->disk;
  mm_err err = {0};
  if (!MM_GROW(d->copy, &d->copy_cap, (size_t)d->copies + 1, &err)) return false;
  d->copy[d->copies++] = (disk_copy){n, {place, block, in}};
  d->listed++;
  n->copied = true;
  d->leaving += !in;
  return true;
}

static disk_copy *copy_of(const disk *d, const node *n) {
  uint32_t i = d->copies;
  while (i-- > 0 && d->copy[i].node != n) {}
  return &d->copy[i];
}

bool mm_prefix_leave_disk(mm_prefix_cache *c, node *n) {
  disk *d = &c->disk;
  const bool copied = n->copied;
  if (copied)
    copy_of(d, n)->node = NULL;
  else if (n->block != NONE)
    d->free[d->free_count++] = n->block;
  n->block = NONE;
  n->copied = n->reading = false;
  return copied;
}

bool mm_prefix_read(mm_prefix_cache *c, node *n) {
  pool *p = &c->pool;
  if (!mm_prefix_find_place(c)) return false;
  const uint32_t place = p->free[p->free_count - 1];
  if (!add_copy(c, n, place, n->block, true)) return false;
  p->free_count--;
  unlink_node(c, n, OFF_DEVICE);
  n->place = place;
  n->reading = true;
  link_newest(c, n, OFF_DEVICE);
  return true;
}

/* A free block, if there is one or an entry on disk can go. */
static bool find_block(mm_prefix_cache *c) {
  node *n = c->on_disk.oldest;
  while (!c->disk.free_count && n && (n->child || n->fetching)) n = n->links.newer;
  if (!c->disk.free_count && n) mm_prefix_drop_leaf(c, n);
  return c->disk.free_count > 0;
}

/* Entries stay in memory above those that do. */
static bool can_leave(const node *n) {
  const node *k = n->child;
  while (k && !k->pages && (k->place == NONE || (k->copied && !k->reading))) k = k->next;
  return !k && !n->moves && !n->copied && !n->fetching;
}

/* Lists copies of the least recently used entries until so many places are free, or will be. */
static void spill(mm_prefix_cache *c, uint32_t wanted) {
  disk *d = &c->disk;
  node *n = c->host.oldest;
  while (d->blocks && n && c->pool.free_count + d->leaving < wanted && find_block(c)) {
    for (n = c->host.oldest; n && !can_leave(n);) n = n->links.newer;
    if (!n || !add_copy(c, n, n->place, d->free[d->free_count - 1], false)) return;
    n->block = d->free[--d->free_count];
  }
}

void mm_prefix_cache_spill(mm_prefix_cache *c) { spill(c, c->pool.places / 4 + 1); }

bool mm_prefix_cache_spill_to(mm_prefix_cache *c, uint32_t places) {
  places = (uint32_t)mm_min(places, c->pool.places);
  spill(c, places);
  return c->pool.free_count < places && c->disk.leaving;
}

uint32_t mm_prefix_cache_copies(mm_prefix_cache *c, const mm_disk_move **list) {
  disk *d = &c->disk;
  mm_err err = {0};
  *list = NULL;
  const uint32_t count = d->listed;
  if (!count || !MM_GROW(d->list, &d->list_cap, count, &err)) return 0; /* listed again by the next call */
  for (uint32_t i = 0; i < count; i++) d->list[i] = d->copy[d->copies - count + i].m;
  d->listed = 0;
  *list = d->list;
  return count;
}

/* The node is on disk alone from now on. */
static void settle(mm_prefix_cache *c, node *n) {
  unlink_node(c, n, OFF_DEVICE);
  mm_prefix_free_place(c, n->place);
  n->place = NONE;
  link_newest(c, n, OFF_DEVICE);
}

void mm_prefix_cache_copied(mm_prefix_cache *c, const mm_disk_end *end) {
  disk *d = &c->disk;
  const mm_disk_move *m = &end->move;
  uint32_t i = 0;
  while (d->copy[i].m.place != m->place || d->copy[i].m.block != m->block) i++;
  node *n = d->copy[i].node;
  memmove(&d->copy[i], &d->copy[i + 1], (--d->copies - i) * sizeof *d->copy);
  d->leaving -= !m->in;
  *(!end->ok ? &d->failed : m->in ? &d->in : &d->out) += 1;
  if (!n) {
    mm_prefix_free_place(c, m->place);
    d->free[d->free_count++] = m->block;
    return;
  }
  n->copied = n->reading = false;
  if (!end->ok) {
    mm_prefix_drop_tree(c, n);
  } else if (m->in) {
    n->block = NONE;
    d->free[d->free_count++] = m->block;
  } else {
    settle(c, n);
  }
}

bool mm_prefix_cache_copying(const mm_prefix_cache *c) { return c->disk.copies > 0; }
