/* Entries of the prefix cache in a pool of host memory, and on their way there and back (prefix_cache.h). */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/prefix_cache_inside.h"

void mm_prefix_forget_moves(mm_prefix_cache *c, const node *n) {
  for (uint32_t i = 0; n->moves && i < c->pool.moves; i++)
    if (c->pool.move[i].node == n) c->pool.move[i].node = NULL;
}

/* ---- the host pool ---- */

bool mm_prefix_cache_offload(mm_prefix_cache *c, uint32_t places, mm_err *err) {
  pool *p = &c->pool;
  const size_t pages = mm_pages_per_slot(c->pages);
  if (!(p->free = mm_calloc(places, sizeof *p->free, err)) || !(p->path = mm_calloc(pages, sizeof(node *), err)) ||
      !(p->page = mm_calloc(pages, sizeof *p->page, err)))
    return false;
  /* Leaves leave first: their places come after those of their parents, as their pages do. */
  for (uint32_t i = 0; i < places; i++) p->free[i] = i;
  p->places = p->free_count = places;
  p->shared |= c->groups > 1;
  return true;
}

/* There is room for it. The caller's reference to the page becomes the move's. */
static void list_move(mm_prefix_cache *c, move m) {
  pool *p = &c->pool;
  m.number = UINT64_MAX;
  p->move[p->moves++] = m;
  p->listed++;
  if (m.node) m.node->moves++;
  if (m.node) *(m.m.in ? &p->in : &p->out) += 1;
}

/* Lists a copy of the page to the place, or back; a page of another group to be relayed to, or NONE. Each gains a reference. */
static bool add_move(mm_prefix_cache *c, node *n, mm_page_move m, uint32_t relay) {
  pool *p = &c->pool;
  mm_err err = {0};
  if (!MM_GROW(p->move, &p->move_cap, (size_t)p->moves + p->relays + 2, &err)) return false;
  mm_pages_hold(c->pages, m.page);
  if (relay != NONE) mm_pages_hold(c->pages, relay), p->relays++;
  if (!m.in && relay == NONE) c->group[mm_pages_group_of(c->pages, m.page)].leaving++;
  list_move(c, (move){.node = n, .m = m, .relay = relay});
  return true;
}

/* Copies of the device are made in order, so that a place may be given away while some are left; those of others are not. */
void mm_prefix_free_place(mm_prefix_cache *c, uint32_t place) {
  pool *p = &c->pool;
  for (uint32_t i = p->moves; p->shared && i-- > 0;)
    if (p->move[i].m.place == place) {
      p->move[i].frees = true;
      return;
    }
  p->free[p->free_count++] = place;
}

/* Entries that have a place below this one, which is in the pool. */
static bool has_places_below(const node *n) {
  const node *k = n->child;
  while (k && k->place == NONE) k = k->next;
  return k;
}

bool mm_prefix_find_place(mm_prefix_cache *c) {
  node *n = c->host.oldest;
  while (!c->pool.free_count && n && (n->fetching || n->copied || (c->pool.shared && n->moves) || has_places_below(n))) n = n->links.newer;
  if (!c->pool.free_count && n) mm_prefix_drop_tree(c, n);
  return c->pool.free_count > 0;
}

/* The node's one page, of this group, is copied to a place, and is free when that has ended. */
static bool move_out(mm_prefix_cache *c, node *n, uint32_t group) {
  pool *p = &c->pool;
  if (!p->free_count || !add_move(c, n, (mm_page_move){n->in[group].page, p->free[p->free_count - 1], false}, NONE)) return false;
  mm_prefix_give_up_page(c, n, group);
  n->place = p->free[--p->free_count];
  link_newest(c, n, OFF_DEVICE);
  return true;
}

/* The node's place is copied to the page, to which the caller has a reference that becomes the node's. */
static bool move_in(mm_prefix_cache *c, node *n, uint32_t page) {
  if (!add_move(c, n, (mm_page_move){page, n->place, true}, NONE)) return false;
  mm_prefix_give_up(c, n);
  mm_prefix_give_page(c, n, page);
  n->in[mm_pages_group_of(c->pages, page)].loading = true;
  return true;
}

/* The first group on whose device the node's page is whole; NONE: there is none. */
static uint32_t whole_in(const mm_prefix_cache *c, const node *n) {
  uint32_t g = 0;
  while (g < c->groups && (n->in[g].page == NONE || n->in[g].loading)) g++;
  return g < c->groups ? g : NONE;
}

/* Another group's page of the node is copied to a place, and from there to this page, as move_in's. */
static bool relay_in(mm_prefix_cache *c, node *n, uint32_t page) {
  pool *p = &c->pool;
  if (!mm_prefix_find_place(c)) return false;
  const uint32_t place = p->free[p->free_count - 1];
  if (!add_move(c, n, (mm_page_move){n->in[whole_in(c, n)].page, place, false}, page)) return false;
  p->free_count--;
  mm_prefix_give_page(c, n, page);
  resident *r = &n->in[mm_pages_group_of(c->pages, page)];
  r->loading = r->relayed = true;
  return true;
}

/* The first half of a relay has ended. Without the node, or when that has another page by now, the second is not wanted. */
static void relay_on(mm_prefix_cache *c, const move *m) {
  pool *p = &c->pool;
  p->relays--;
  if (m->node && m->node->in[mm_pages_group_of(c->pages, m->relay)].page == m->relay) {
    list_move(c, (move){.node = m->node, .m = {m->relay, m->m.place, true}, .relay = NONE, .frees = true});
    return;
  }
  mm_pages_release(c->pages, m->relay);
  p->free[p->free_count++] = m->m.place;
}

uint32_t mm_prefix_cache_moves(mm_prefix_cache *c, const mm_page_move **list) {
  pool *p = &c->pool;
  mm_err err = {0};
  *list = NULL;
  if (!p->listed) return 0;
  if (!MM_GROW(p->list, &p->list_cap, p->listed, &err)) {
    mm_prefix_cache_clear(c); /* nothing was copied: no entry is good */
    mm_prefix_cache_issued(c, 0);
    return 0;
  }
  for (uint32_t i = 0; i < p->listed; i++) p->list[i] = p->move[p->moves - p->listed + i].m;
  *list = p->list;
  return p->listed;
}

void mm_prefix_cache_issued(mm_prefix_cache *c, uint64_t number) {
  pool *p = &c->pool;
  for (; p->listed; p->listed--) p->move[p->moves - p->listed].number = number;
}

/* The node's page is filled. */
static void end_loading(const mm_prefix_cache *c, const move *m) {
  resident *r = m->node && m->m.in ? &m->node->in[mm_pages_group_of(c->pages, m->m.page)] : NULL;
  if (r && r->page == m->m.page) r->loading = r->relayed = false;
}

void mm_prefix_cache_moved(mm_prefix_cache *c, uint64_t oldest) {
  pool *p = &c->pool;
  uint32_t ended = 0;
  for (; ended < p->moves && p->move[ended].number < oldest; ended++) {
    const move m = p->move[ended];
    if (m.node) m.node->moves--;
    end_loading(c, &m);
    mm_pages_release(c->pages, m.m.page);
    if (m.relay != NONE)
      relay_on(c, &m);
    else if (!m.m.in)
      c->group[mm_pages_group_of(c->pages, m.m.page)].leaving--;
    if (m.frees) p->free[p->free_count++] = m.m.place;
  }
  p->moves -= ended;
  if (ended) memmove(p->move, p->move + ended, p->moves * sizeof *p->move);
}

void mm_prefix_cache_share(mm_prefix_cache *c) { c->pool.shared = true; }

bool mm_prefix_cache_take_places(mm_prefix_cache *c, uint32_t *place, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (mm_prefix_find_place(c)) {
      place[i] = c->pool.free[--c->pool.free_count];
      continue;
    }
    while (i-- > 0) mm_prefix_free_place(c, place[i]);
    return false;
  }
  qsort(place, count, sizeof *place, mm_by_u32);
  return true;
}

void mm_prefix_cache_free_place(mm_prefix_cache *c, uint32_t place) { mm_prefix_free_place(c, place); }

bool mm_prefix_cache_copy_out(mm_prefix_cache *c, uint32_t page, uint32_t place) {
  return add_move(c, NULL, (mm_page_move){page, place, false}, NONE);
}

bool mm_prefix_cache_place_moves(const mm_prefix_cache *c, uint32_t place) {
  uint32_t i = c->pool.moves;
  while (i-- > 0 && c->pool.move[i].m.place != place) {}
  return i != UINT32_MAX;
}

uint32_t mm_prefix_cache_listed(const mm_prefix_cache *c) { return c->pool.listed; }

bool mm_prefix_cache_has_place(const mm_prefix_cache *c) { return c->pool.free_count > 0; }
bool mm_prefix_cache_moving(const mm_prefix_cache *c) { return c->pool.moves > 0; }
uint32_t mm_prefix_cache_leaving(const mm_prefix_cache *c, uint32_t group) { return c->group[group].leaving; }

mm_prefix_cache_counts mm_prefix_cache_counted(const mm_prefix_cache *c) {
  const pool *p = &c->pool;
  const disk *d = &c->disk;
  return (mm_prefix_cache_counts){.places = p->places,
                                  .offloaded = p->places - p->free_count,
                                  .out = p->out,
                                  .in = p->in,
                                  .blocks = d->blocks,
                                  .on_disk = d->blocks - d->free_count,
                                  .written = d->out,
                                  .read = d->in,
                                  .failed = d->failed};
}

/* The node that was not used for longest of those whose page in the group nobody else needs. Nodes that slots use are skipped and become
 * the newest: the next call does not visit them again. */
static node *oldest_idle(mm_prefix_cache *c, uint32_t group) {
  const node_list *l = &c->group[group].list;
  const node *stop = l->newest;
  for (node *n = l->oldest, *newer; n; n = newer) {
    const resident *r = &n->in[group];
    newer = n == stop ? NULL : r->links.newer;
    if (!r->children && !n->moves && mm_pages_references(c->pages, r->page) == 1) return n;
    unlink_node(c, n, group);
    link_newest(c, n, group);
  }
  return NULL;
}

/* The node gives up its page in the group: to another group that has the entry, to a place, or with the entry. */
static void leave_page(mm_prefix_cache *c, node *n, uint32_t group, bool place) {
  if (n->pages > 1)
    mm_prefix_give_up_page(c, n, group);
  else if (!(place && move_out(c, n, group)))
    mm_prefix_drop_tree(c, n);
}

bool mm_prefix_cache_evict(mm_prefix_cache *c, uint32_t group) {
  node *n = oldest_idle(c, group);
  bool place = false;
  if (n && n->pages == 1 && c->pool.places) { /* first the place: an entry that goes for it may take others along, all of the group's too */
    const uint32_t before = mm_pages_free_in(c->pages, group);
    place = mm_prefix_find_place(c);
    if (mm_pages_free_in(c->pages, group) > before) return true;
    n = oldest_idle(c, group);
  }
  if (n) leave_page(c, n, group, place);
  return n;
}

static node *node_of(const mm_prefix_cache *c, uint32_t group, uint32_t page) {
  node *n = c->group[group].list.oldest;
  while (n && n->in[group].page != page) n = n->in[group].links.newer;
  return n;
}

bool mm_prefix_cache_leave(mm_prefix_cache *c, uint32_t page) {
  const uint32_t group = mm_pages_group_of(c->pages, page);
  node *n = node_of(c, group, page);
  if (!n || n->in[group].children || n->moves) return false;
  const bool place = n->pages == 1 && c->pool.places && mm_prefix_find_place(c);
  n = node_of(c, group, page); /* it may have gone with an entry that went for the place */
  if (n) leave_page(c, n, group, place);
  return true;
}

/* ---- fetching ---- */

/* A page with a reference for the caller, of another entry if none is free: the copies of a device are made in order. */
static bool make_page(mm_prefix_cache *c, uint32_t group, uint32_t *page) {
  if (mm_pages_take(c->pages, group, page)) return true;
  if (!mm_prefix_cache_evict(c, group)) return false;
  if (mm_pages_take(c->pages, group, page)) return true; /* it was not moved */
  *page = c->pool.move[c->pool.moves - 1].m.page;
  mm_pages_hold(c->pages, *page);
  return true;
}

/* Lists moves for path[count], in the order of pages, so that copies of neighbours become one. */
static void fetch_path(mm_prefix_cache *c, uint32_t group, node *const *path, uint32_t count) {
  uint32_t *const page = c->pool.page;
  for (uint32_t at = 0, made = 1; at < count && made; at += made) {
    const uint32_t most = (uint32_t)mm_min(count - at, mm_max(1, c->pool.free_count));
    for (made = 0; made < most && make_page(c, group, &page[made]);) made++;
    qsort(page, made, sizeof *page, mm_by_u32);
    for (uint32_t i = 0; i < made; i++) {
      node *n = path[at + i];
      if (n->pages ? relay_in(c, n, page[i]) : move_in(c, n, page[i])) continue;
      for (; i < made; i++) mm_pages_release(c->pages, page[i]);
      return;
    }
  }
}

/* The node is in the pool, or on another group's device, and copies of it can begin. The ranks of different groups do not wait for one
 * another's copies: those to a place have to have ended. */
static bool can_fetch(const mm_prefix_cache *c, const node *n) {
  if (n->pages) return whole_in(c, n) != NONE;
  return n->place != NONE && !n->reading && !(n->moves && c->groups > 1);
}

/* Starts what brings path[count] nearer: entries on disk are read, and those before them that can be fetched go to the device. */
static void start_path(mm_prefix_cache *c, uint32_t group, node *const *path, uint32_t count) {
  uint32_t ready = 0;
  while (ready < count && can_fetch(c, path[ready])) ready++;
  for (uint32_t i = ready; i < count; i++)
    if (!path[i]->pages && path[i]->place == NONE && !mm_prefix_read(c, path[i])) break;
  fetch_path(c, group, path, ready);
}

/* Copies of the node have to end before it can be fetched. */
static bool comes_nearer(const mm_prefix_cache *c, const node *n, uint32_t group) {
  if (n->in[group].page != NONE) return n->in[group].relayed;
  return n->reading || ((n->pages || n->place != NONE) && n->moves && !can_fetch(c, n));
}

mm_prefix_cache_coming mm_prefix_cache_fetch(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most,
                                             bool start) {
  mm_prefix_cache_coming coming = {0};
  const hit h = mm_prefix_find(c, group, false, salt, token, most);
  if (!c->pool.places || h.tokens <= mm_prefix_find(c, group, true, salt, token, most).tokens) return coming;
  node **const end = c->pool.path + mm_ceil_div(h.tokens, MM_PAGE), **path = end, *n = h.last;
  for (; n != c->root && n->in[group].page == NONE; n = n->parent) n->fetching = true, *--path = n;
  if (start && path < end) {
    if (n != c->root) mm_pages_hold(c->pages, n->in[group].page); /* its pages stay */
    start_path(c, group, path, (uint32_t)(end - path));
    if (n != c->root) mm_pages_release(c->pages, n->in[group].page);
  }
  for (node **p = path; p < end; p++) (*p)->fetching = false;
  for (n = h.last; n != c->root; n = n->parent) {
    coming.pages++;
    coming.there += n->in[group].page != NONE;
    coming.loading += n->in[group].loading;
    coming.reading += comes_nearer(c, n, group);
  }
  return coming;
}

bool mm_prefix_cache_spill_for(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most) {
  const hit h = mm_prefix_find(c, group, false, salt, token, most);
  const uint32_t spare = mm_pages_free_in(c->pages, group);
  uint32_t pages = 0, wanted = 0;
  if (!c->disk.blocks || h.tokens <= mm_prefix_find(c, group, true, salt, token, most).tokens) return false;
  for (node *n = h.last; n != c->root && n->in[group].page == NONE; n = n->parent) {
    n->fetching = true;
    wanted += n->place == NONE;
    pages++;
  }
  const bool waits = mm_prefix_cache_spill_to(c, wanted + (pages > spare ? pages - spare : 0));
  for (node *n = h.last; n != c->root && n->in[group].page == NONE; n = n->parent) n->fetching = false;
  return waits;
}
