/* The tree's nodes are pages: the tokens that one holds, after those of its parent. A node of fewer than MM_PAGE tokens has no children.
 * With lightning layers every leaf has a snapshot. With a host pool, pages leave a device from the leaves on, and come back from the root
 * on. A page of one group of attention has the bytes of any other's, since the ranks of each have the same layers and heads. */
#include <stdlib.h>
#include <string.h>

#include "runtime/schedule/prefix_cache_inside.h"

/* A node with neither page nor place, in no list. */
static node *new_node(const mm_prefix_cache *c) {
  node *n = calloc(1, sizeof *n + c->groups * sizeof n->in[0]);
  if (!n) return NULL;
  n->place = n->block = NONE;
  for (uint32_t g = 0; g < c->groups; g++) n->in[g].page = NONE;
  return n;
}

mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err) {
  mm_prefix_cache *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->pages = pages;
  c->groups = mm_pages_groups(pages);
  c->state_bytes = state_bytes;
  c->budget = budget;
  c->root = new_node(c);
  if ((c->group = mm_calloc(c->groups, sizeof *c->group, err)) && c->root) return c;
  if (!c->root) mm_fail_memory(err, sizeof *c->root);
  MM_FREE(c->group, c->root, c);
  return NULL;
}

/* ---- order of use ---- */

#define ALL_GROUPS UINT32_MAX

static void use_again(mm_prefix_cache *c, node *n, uint32_t group) {
  unlink_node(c, n, group);
  link_newest(c, n, group);
}

/* A node and those above it were used in a group, or anywhere; the ones above are newer, so that leaves go first. */
static void touch(mm_prefix_cache *c, node *n, uint32_t group) {
  for (; n != c->root; n = n->parent) {
    if (!n->pages) use_again(c, n, OFF_DEVICE);
    for (uint32_t g = 0; n->pages && g < c->groups; g++)
      if (n->in[g].page != NONE && (g == group || group == ALL_GROUPS)) use_again(c, n, g);
  }
}

/* ---- pages and places ---- */

void mm_prefix_give_up_page(mm_prefix_cache *c, node *n, uint32_t group) {
  resident *r = &n->in[group];
  unlink_node(c, n, group);
  mm_pages_release(c->pages, r->page);
  n->parent->in[group].children--;
  c->group[group].nodes--;
  n->pages--;
  r->page = NONE;
  r->loading = r->relayed = false;
}

void mm_prefix_give_up(mm_prefix_cache *c, node *n) {
  if (n->pages) {
    for (uint32_t g = 0; g < c->groups; g++)
      if (n->in[g].page != NONE) mm_prefix_give_up_page(c, n, g);
    return;
  }
  unlink_node(c, n, OFF_DEVICE);
  const bool shared = mm_prefix_leave_disk(c, n);
  if (n->place != NONE && !shared) mm_prefix_free_place(c, n->place);
  n->place = NONE;
}

void mm_prefix_give_page(mm_prefix_cache *c, node *n, uint32_t page) {
  const uint32_t group = mm_pages_group_of(c->pages, page);
  n->in[group].page = page;
  n->parent->in[group].children++;
  c->group[group].nodes++;
  n->pages++;
  link_newest(c, n, group);
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
  while (c->state_bytes && n != c->root && !n->child && !n->snapshot) n = drop_node(c, n);
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
  while (c->root->child) {
    node *n = c->root->child;
    while (n->child) n = n->child;
    mm_prefix_drop_leaf(c, n);
  }
  free(c->spare);
  c->spare = NULL;
}

void mm_prefix_cache_clear_group(mm_prefix_cache *c, uint32_t group) {
  for (node *n; (n = c->group[group].list.oldest) != NULL;) {
    for (node *k = n->child; k; k = k->in[group].page != NONE ? (n = k)->child : k->next) {}
    if (n->pages > 1)
      mm_prefix_give_up_page(c, n, group);
    else
      mm_prefix_drop_tree(c, n);
  }
}

void mm_prefix_cache_close(mm_prefix_cache *c) {
  if (!c) return;
  mm_prefix_cache_clear(c);
  mm_prefix_cache_issued(c, 0);
  mm_prefix_cache_moved(c, UINT64_MAX);
  MM_FREE(c->root, c->group, c->snapshot, c->pool.free, c->pool.move, c->pool.list, (void *)c->pool.path, c->pool.page, c->disk.free,
          c->disk.copy, c->disk.list, c);
}

/* ---- finding ---- */

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (n < most && a[n] == b[n]) n++;
  return n;
}

static bool is_ready(const node *n, uint32_t group) { return n->in[group].page != NONE && !n->in[group].loading; }

/* The child that begins most like token[count], of several one on the group's device; *alike: how many tokens, 0 with NULL. ready: only
 * nodes that are on that device. */
static node *nearest(const node *parent, uint32_t group, bool ready, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *alike) {
  node *best = NULL;
  *alike = 0;
  for (node *n = parent->child; n && !(best && *alike == count && is_ready(best, group)); n = n->next) {
    if (n->salt != salt || n->token[0] != token[0] || (ready && !is_ready(n, group))) continue;
    const uint32_t same = common(n->token, token, (uint32_t)mm_min(n->count, count));
    if (same > *alike || (same == *alike && best && is_ready(n, group) && !is_ready(best, group))) best = n, *alike = same;
  }
  return best;
}

/* The last of the children's snapshots that lies within token[count]; pages that part later may have it in common. */
static snapshot *last_state(const node *parent, uint64_t salt, const int32_t *token, uint32_t count) {
  snapshot *best = NULL;
  for (node *n = parent->child; n; n = n->next) {
    if (n->salt != salt || n->token[0] != token[0]) continue;
    const uint32_t same = common(n->token, token, (uint32_t)mm_min(n->count, count));
    for (snapshot *s = n->snapshot; s; s = s->next)
      if (s->tokens <= same && (!best || s->tokens > best->tokens)) best = s;
  }
  return best;
}

/* The last snapshot within token[count], and the node whose page has the tokens before it: the snapshot's own, or with `ready` one on the
 * group's device, which may be another. */
static hit state_within(const node *parent, uint32_t group, bool ready, uint64_t salt, const int32_t *token, uint32_t count) {
  node *on_device = ready ? nearest(parent, group, true, salt, token, count, &count) : NULL;
  snapshot *s = ready && !on_device ? NULL : last_state(parent, salt, token, count);
  return s ? (hit){s->tokens, ready ? on_device : s->node, s} : (hit){0};
}

static void use_state(mm_prefix_cache *c, snapshot *s, uint32_t group) {
  s->used = ++c->uses;
  touch(c, s->node, group);
}

hit mm_prefix_find(mm_prefix_cache *c, uint32_t group, bool ready, uint64_t salt, const int32_t *token, uint32_t most) {
  hit h = {.last = c->root};
  node *n = c->root;
  for (uint32_t at = 0, alike = MM_PAGE; at < most && alike == MM_PAGE; at += MM_PAGE) {
    const uint32_t here = (uint32_t)mm_min(MM_PAGE, most - at);
    const hit with = c->state_bytes ? state_within(n, group, ready, salt, token + at, here) : (hit){0};
    if (with.snap) h = (hit){at + with.tokens, with.last, with.snap};
    if (!(n = nearest(n, group, ready, salt, token + at, here, &alike))) break;
    if (!c->state_bytes) h = (hit){at + alike, n, NULL};
  }
  return h;
}

uint32_t mm_prefix_cache_find(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most, uint32_t *page,
                              const void **state) {
  const hit h = mm_prefix_find(c, group, true, salt, token, most);
  uint32_t at = (uint32_t)mm_ceil_div(h.tokens, MM_PAGE);
  /* The state's own page, where it can be: while somebody refers to it, the state stays. */
  for (const node *n = h.snap && is_ready(h.snap->node, group) ? h.snap->node : h.last; n != c->root; n = n->parent)
    page[--at] = n->in[group].page;
  *state = h.snap ? h.snap->state : NULL;
  if (h.snap) use_state(c, h.snap, group);
  touch(c, h.last, group);
  return h.tokens;
}

bool mm_prefix_cache_has_state(const mm_prefix_cache *c, const void *state) {
  for (size_t i = 0; i < c->snapshots; i++)
    if (c->snapshot[i]->state == state) return true;
  return false;
}

uint32_t mm_prefix_cache_alike(const mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most) {
  const node *n = c->root;
  uint32_t at = 0;
  for (uint32_t alike = MM_PAGE; n && at < most && alike == MM_PAGE; at += alike)
    n = nearest(n, 0, false, salt, token + at, (uint32_t)mm_min(MM_PAGE, most - at), &alike);
  return at;
}

uint32_t mm_prefix_cache_ready(mm_prefix_cache *c, uint32_t group, uint64_t salt, const int32_t *token, uint32_t most) {
  return mm_prefix_find(c, group, true, salt, token, most).tokens;
}

/* ---- keeping ---- */

static node *new_child(const mm_prefix_cache *c, node *parent, uint64_t salt, const int32_t *token, uint32_t count) {
  node *n = new_node(c);
  if (!n) return NULL;
  n->parent = parent;
  n->salt = salt;
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
  n->next = parent->child;
  if (n->next) n->next->previous = n;
  parent->child = n;
  return n;
}

static node *add_child(mm_prefix_cache *c, node *parent, uint64_t salt, const int32_t *token, uint32_t count, uint32_t page) {
  node *n = new_child(c, parent, salt, token, count);
  if (!n) return NULL;
  mm_pages_hold(c->pages, page);
  mm_prefix_give_page(c, n, page);
  return n;
}

/* A page that holds as many or more of the same tokens becomes the node's. It takes the place of those that hold fewer, and of host memory.
 */
static void extend(mm_prefix_cache *c, node *n, const int32_t *token, uint32_t count, uint32_t page) {
  mm_pages_hold(c->pages, page);
  if (!n->pages || count > n->count) mm_prefix_give_up(c, n);
  mm_prefix_give_page(c, n, page);
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
}

/* The node that holds the last of the tokens; NULL when out of memory: pages added before that stay in the tree. */
static node *put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  const uint32_t group = mm_pages_group_of(c->pages, page[0]);
  node *n = c->root;
  for (uint32_t at = 0, here, alike; at < count; at += here) {
    here = (uint32_t)mm_min(MM_PAGE, count - at);
    node *child = nearest(n, group, false, salt, token + at, here, &alike);
    if (child && alike == child->count && (alike < here || child->in[group].page == NONE))
      extend(c, child, token + at, here, page[at / MM_PAGE]);
    else if (!child || alike < here || (child->pages && child->in[group].page == NONE)) /* longer, but another group's */
      child = add_child(c, n, salt, token + at, here, page[at / MM_PAGE]);
    if (!child) {
      if (c->state_bytes && n != c->root && !n->child && !n->snapshot) mm_prefix_drop_leaf(c, n);
      return NULL;
    }
    n = child;
  }
  touch(c, n, group);
  return n;
}

void mm_prefix_cache_put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  if (count) put(c, salt, token, count, page);
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
  const node *n = c->root;
  uint32_t at = 0, alike = MM_PAGE;
  for (; n && alike == MM_PAGE && count - at > MM_PAGE; at += MM_PAGE) n = nearest(n, 0, false, salt, token + at, MM_PAGE, &alike);
  snapshot *s = n && alike == MM_PAGE ? last_state(n, salt, token + at, count - at) : NULL;
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
    use_state(c, s, ALL_GROUPS);
    put(c, salt, token, count, page); /* of a group that may not have them */
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
  return mm_prefix_find(c, 0, false, salt, token, most).tokens;
}

/* The node that holds the last of the tokens; NULL where a page is missing or out of memory. */
static node *put_in_places(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *place) {
  node *n = c->root;
  for (uint32_t at = 0, here, alike; at < count; at += here) {
    uint32_t *const from = &place[at / MM_PAGE];
    here = (uint32_t)mm_min(MM_PAGE, count - at);
    node *child = nearest(n, 0, false, salt, token + at, here, &alike);
    if (!child || alike < here) child = *from == NONE ? NULL : new_child(c, n, salt, token + at, here);
    if (!child) {
      drop_useless(c, n);
      return NULL;
    }
    if (!child->pages && child->place == NONE && child->block == NONE) {
      child->place = *from;
      *from = NONE;
      link_newest(c, child, OFF_DEVICE);
    }
    n = child;
  }
  touch(c, n, ALL_GROUPS);
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

uint32_t mm_prefix_cache_pages(const mm_prefix_cache *c, uint32_t group) { return c->group[group].nodes; }
uint64_t mm_prefix_cache_state_bytes(const mm_prefix_cache *c) { return c->used; }
void mm_prefix_cache_held(const mm_prefix_cache *c, uint32_t *held) {
  for (uint32_t g = 0; g < c->groups; g++)
    for (const node *n = c->group[g].list.oldest; n; n = n->in[g].links.newer) held[n->in[g].page]++;
  for (uint32_t i = 0; i < c->pool.moves; i++) {
    held[c->pool.move[i].m.page]++;
    if (c->pool.move[i].relay != NONE) held[c->pool.move[i].relay]++;
  }
}
