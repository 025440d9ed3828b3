/* The tree's nodes are pages: the tokens that one holds, after those of its parent. A node of fewer than MM_PAGE tokens has no children.
 * With lightning layers every leaf has a snapshot. With a host pool, pages leave the device from the leaves on, and come back from the root
 * on. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/prefix_cache_inside.h"

mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err) {
  mm_prefix_cache *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->pages = pages;
  c->state_bytes = state_bytes;
  c->budget = budget;
  return c;
}

/* ---- order of use ---- */

/* A node and those above it were used; the ones above are newer, so that leaves go first. */
static void touch(mm_prefix_cache *c, node *n) {
  for (; n != &c->root; n = n->parent) {
    unlink_node(c, n);
    link_newest(c, n);
  }
}

/* ---- pages and places ---- */

void mm_prefix_give_up(mm_prefix_cache *c, node *n) {
  unlink_node(c, n);
  const bool shared = mm_prefix_leave_disk(c, n);
  if (n->place != NONE && !shared) mm_prefix_free_place(c, n->place);
  if (n->page != NONE) {
    mm_pages_release(c->pages, n->page);
    n->parent->on_device--;
    c->nodes--;
  }
  n->page = n->place = NONE;
  n->loading = false;
}

void mm_prefix_give_page(mm_prefix_cache *c, node *n, uint32_t page) {
  n->page = page;
  n->parent->on_device++;
  c->nodes++;
  link_newest(c, n);
}

/* ---- leaving ---- */

/* A snapshot that no node lists any more. */
static void forget_state(mm_prefix_cache *c, snapshot *s) {
  c->snapshot[s->index] = c->snapshot[--c->snapshots];
  c->snapshot[s->index]->index = s->index;
  c->used -= c->state_bytes;
  free(c->spare);
  c->spare = s->state;
  free(s);
}

static void drop_state(mm_prefix_cache *c, snapshot *s) {
  snapshot **at = &s->node->snapshot;
  while (*at != s) at = &(*at)->next;
  *at = s->next;
  forget_state(c, s);
}

/* Frees a node without children; returns its parent. */
static node *drop_node(mm_prefix_cache *c, node *n) {
  node *parent = n->parent;
  for (snapshot *s; (s = n->snapshot) != NULL;) n->snapshot = s->next, forget_state(c, s);
  *(n->previous ? &n->previous->next : &parent->child) = n->next;
  if (n->next) n->next->previous = n->previous;
  mm_prefix_forget_moves(c, n);
  mm_prefix_give_up(c, n);
  free(n);
  return parent;
}

/* Above a node that went: nodes that are then of no use go. */
static void drop_useless(mm_prefix_cache *c, node *n) {
  while (c->state_bytes && n != &c->root && !n->child && !n->snapshot) n = drop_node(c, n);
}

void mm_prefix_drop_leaf(mm_prefix_cache *c, node *n) { drop_useless(c, drop_node(c, n)); }

void mm_prefix_drop_tree(mm_prefix_cache *c, node *n) {
  node *const top = n->parent;
  for (bool last = false; !last;) {
    node *leaf = n;
    while (leaf->child) leaf = leaf->child;
    last = leaf == n;
    drop_node(c, leaf);
  }
  drop_useless(c, top);
}

void mm_prefix_cache_clear(mm_prefix_cache *c) {
  while (c->root.child) {
    node *n = c->root.child;
    while (n->child) n = n->child;
    mm_prefix_drop_leaf(c, n);
  }
  free(c->spare);
  c->spare = NULL;
}

void mm_prefix_cache_close(mm_prefix_cache *c) {
  if (!c) return;
  mm_prefix_cache_clear(c);
  mm_prefix_cache_issued(c, 0);
  mm_prefix_cache_moved(c, UINT64_MAX);
  MM_FREE(c->snapshot, c->pool.free, c->pool.move, c->pool.list, (void *)c->pool.path, c->pool.page, c->disk.free, c->disk.copy,
          c->disk.list, c);
}

/* ---- finding ---- */

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (n < most && a[n] == b[n]) n++;
  return n;
}

static bool is_ready(const node *n) { return n->page != NONE && !n->loading; }

/* The child that begins most like token[count], of several one on the device; *alike: how many tokens, 0 with NULL. ready: only nodes that
 * are on the device. */
static node *nearest(const node *parent, bool ready, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *alike) {
  node *best = NULL;
  *alike = 0;
  for (node *n = parent->child; n && !(best && *alike == count && is_ready(best)); n = n->next) {
    if (n->salt != salt || n->token[0] != token[0] || (ready && !is_ready(n))) continue;
    const uint32_t same = common(n->token, token, (uint32_t)mm_min(n->count, count));
    if (same > *alike || (same == *alike && best && is_ready(n) && !is_ready(best))) best = n, *alike = same;
  }
  return best;
}

/* The last of the children's snapshots that lies within token[count]; pages that part later may have it in common. */
static snapshot *last_state(const node *parent, bool ready, uint64_t salt, const int32_t *token, uint32_t count) {
  snapshot *best = NULL;
  for (node *n = parent->child; n; n = n->next) {
    if (n->salt != salt || n->token[0] != token[0] || (ready && !is_ready(n))) continue;
    const uint32_t same = common(n->token, token, (uint32_t)mm_min(n->count, count));
    for (snapshot *s = n->snapshot; s; s = s->next)
      if (s->tokens <= same && (!best || s->tokens > best->tokens)) best = s;
  }
  return best;
}

static void use_state(mm_prefix_cache *c, snapshot *s) {
  s->used = ++c->uses;
  touch(c, s->node);
}

hit mm_prefix_find(mm_prefix_cache *c, bool ready, uint64_t salt, const int32_t *token, uint32_t most) {
  hit h = {.last = &c->root};
  node *n = &c->root;
  for (uint32_t at = 0, alike = MM_PAGE; at < most && alike == MM_PAGE; at += MM_PAGE) {
    const uint32_t here = (uint32_t)mm_min(MM_PAGE, most - at);
    snapshot *s = c->state_bytes ? last_state(n, ready, salt, token + at, here) : NULL;
    if (s) h = (hit){at + s->tokens, s->node, s};
    if (!(n = nearest(n, ready, salt, token + at, here, &alike))) break;
    if (!c->state_bytes) h = (hit){at + alike, n, NULL};
  }
  return h;
}

uint32_t mm_prefix_cache_find(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most, uint32_t *page, const void **state) {
  const hit h = mm_prefix_find(c, true, salt, token, most);
  uint32_t at = (uint32_t)mm_ceil_div(h.tokens, MM_PAGE);
  for (const node *n = h.last; n != &c->root; n = n->parent) page[--at] = n->page;
  *state = h.snap ? h.snap->state : NULL;
  if (h.snap)
    use_state(c, h.snap);
  else
    touch(c, h.last);
  return h.tokens;
}

/* ---- keeping ---- */

/* A node with neither page nor place, in no list. */
static node *new_child(node *parent, uint64_t salt, const int32_t *token, uint32_t count) {
  node *n = calloc(1, sizeof *n);
  if (!n) return NULL;
  n->parent = parent;
  n->salt = salt;
  n->page = n->place = n->block = NONE;
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
  n->next = parent->child;
  if (n->next) n->next->previous = n;
  parent->child = n;
  return n;
}

static node *add_child(mm_prefix_cache *c, node *parent, uint64_t salt, const int32_t *token, uint32_t count, uint32_t page) {
  node *n = new_child(parent, salt, token, count);
  if (!n) return NULL;
  mm_pages_hold(c->pages, page);
  mm_prefix_give_page(c, n, page);
  return n;
}

/* A page that holds as many or more of the same tokens replaces the node's page or place. */
static void extend(mm_prefix_cache *c, node *n, const int32_t *token, uint32_t count, uint32_t page) {
  mm_pages_hold(c->pages, page);
  mm_prefix_give_up(c, n);
  mm_prefix_give_page(c, n, page);
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
}

/* The node that holds the last of the tokens; NULL when out of memory: pages added before that stay in the tree. */
static node *put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  node *n = &c->root;
  for (uint32_t at = 0, here, alike; at < count; at += here) {
    here = (uint32_t)mm_min(MM_PAGE, count - at);
    node *child = nearest(n, false, salt, token + at, here, &alike);
    if (child && alike == child->count && (alike < here || child->page == NONE))
      extend(c, child, token + at, here, page[at / MM_PAGE]);
    else if (!child || alike < here)
      child = add_child(c, n, salt, token + at, here, page[at / MM_PAGE]);
    if (!child) {
      if (c->state_bytes && n != &c->root && !n->child && !n->snapshot) mm_prefix_drop_leaf(c, n);
      return NULL;
    }
    n = child;
  }
  touch(c, n);
  return n;
}

void mm_prefix_cache_put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  put(c, salt, token, count, page);
}

static snapshot *new_state(mm_prefix_cache *c) {
  snapshot *s = calloc(1, sizeof *s);
  if (s && (s->state = c->spare ? c->spare : malloc(c->state_bytes))) {
    c->spare = NULL;
    return s;
  }
  free(s);
  return NULL;
}

/* The snapshot of exactly these tokens, or NULL. */
static snapshot *state_at(const mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count) {
  const node *n = &c->root;
  uint32_t at = 0, alike = MM_PAGE;
  for (; n && alike == MM_PAGE && count - at > MM_PAGE; at += MM_PAGE) n = nearest(n, false, salt, token + at, MM_PAGE, &alike);
  snapshot *s = n && alike == MM_PAGE ? last_state(n, false, salt, token + at, count - at) : NULL;
  return s && s->tokens == count - at ? s : NULL;
}

/* The snapshot that was not used for longest goes, with the pages that nothing else needs. */
static void drop_oldest(mm_prefix_cache *c) {
  snapshot *oldest = c->snapshot[0];
  for (size_t i = 1; i < c->snapshots; i++)
    if (c->snapshot[i]->used < oldest->used) oldest = c->snapshot[i];
  node *n = oldest->node;
  drop_state(c, oldest);
  if (!n->snapshot && !n->child) mm_prefix_drop_leaf(c, n);
}

/* The node's snapshot after the first `tokens` tokens of its page. There is room for it in the list and the budget. */
static void add_state(mm_prefix_cache *c, node *n, snapshot *s, uint32_t tokens) {
  s->node = n;
  s->tokens = tokens;
  s->used = ++c->uses;
  s->next = n->snapshot;
  n->snapshot = s;
  s->index = c->snapshots;
  c->snapshot[c->snapshots++] = s;
  c->used += c->state_bytes;
}

void *mm_prefix_cache_put_state(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  if (c->state_bytes > c->budget || !count) return NULL;
  snapshot *s = state_at(c, salt, token, count);
  if (s) {
    use_state(c, s);
    return NULL;
  }
  while (c->used + c->state_bytes > c->budget) drop_oldest(c);
  mm_err err = {0};
  const bool grown = MM_GROW(c->snapshot, &c->snapshot_cap, c->snapshots + 1, &err);
  s = grown ? new_state(c) : NULL;
  node *n = s ? put(c, salt, token, count, page) : NULL;
  if (!n) {
    if (s) free(s->state);
    free(s);
    return NULL;
  }
  add_state(c, n, s, (count - 1) % MM_PAGE + 1);
  return s->state;
}

/* ---- what came from another server ---- */

uint32_t mm_prefix_cache_has(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most) {
  return mm_prefix_find(c, false, salt, token, most).tokens;
}

/* The node that holds the last of the tokens; NULL where a page is missing or out of memory. */
static node *put_in_places(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *place) {
  node *n = &c->root;
  for (uint32_t at = 0, here, alike; at < count; at += here) {
    uint32_t *const from = &place[at / MM_PAGE];
    here = (uint32_t)mm_min(MM_PAGE, count - at);
    node *child = nearest(n, false, salt, token + at, here, &alike);
    if (!child || alike < here) child = *from == NONE ? NULL : new_child(n, salt, token + at, here);
    if (!child) {
      drop_useless(c, n);
      return NULL;
    }
    if (child->page == NONE && child->place == NONE && child->block == NONE) {
      child->place = *from;
      *from = NONE;
      link_newest(c, child);
    }
    n = child;
  }
  touch(c, n);
  return n;
}

bool mm_prefix_cache_put_places(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *place, void **state) {
  mm_err err = {0};
  if (!c->state_bytes) return put_in_places(c, salt, token, count, place);
  if (state_at(c, salt, token, count)) return true;
  if (!*state || c->state_bytes > c->budget) return false;
  while (c->used + c->state_bytes > c->budget) drop_oldest(c);
  snapshot *s = MM_GROW(c->snapshot, &c->snapshot_cap, c->snapshots + 1, &err) ? calloc(1, sizeof *s) : NULL;
  node *n = s ? put_in_places(c, salt, token, count, place) : NULL;
  if (!n) {
    free(s);
    return false;
  }
  s->state = *state;
  *state = NULL;
  add_state(c, n, s, (count - 1) % MM_PAGE + 1);
  return true;
}

uint32_t mm_prefix_cache_pages(const mm_prefix_cache *c) { return c->nodes; }
uint64_t mm_prefix_cache_state_bytes(const mm_prefix_cache *c) { return c->used; }
void mm_prefix_cache_held(const mm_prefix_cache *c, uint32_t *held) {
  for (const node *n = c->device.oldest; n; n = n->newer) held[n->page]++;
  for (uint32_t i = 0; i < c->pool.moves; i++) held[c->pool.move[i].m.page]++;
}
