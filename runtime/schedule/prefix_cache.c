/* The tree's nodes are pages: the tokens that one holds, after those of its parent. A node of fewer than MM_PAGE tokens has no children.
 * With lightning layers every leaf has a snapshot. With a host pool, pages leave the device from the leaves on, and come back from the root
 * on. */
#include "runtime/schedule/prefix_cache.h"

#include <stdlib.h>
#include <string.h>

typedef struct node node;

/* The states after the first `tokens` tokens of a node's page. */
typedef struct snapshot {
  struct snapshot *next; /* of the node */
  node *node;
  uint64_t used; /* when, in finds and puts */
  uint32_t tokens;
  size_t place; /* in the list of all */
  char *state;
} snapshot;

struct node {
  node *parent, *child;  /* the first of them */
  node *next, *previous; /* among the parent's */
  node *newer, *older;   /* of all in the same memory, by use */
  snapshot *snapshot;
  uint64_t salt;
  uint32_t page, place;   /* of the device, or of the host pool: one of them is NONE. The parent of a node with a page has one */
  uint32_t on_device;     /* children with a page */
  uint32_t moves;         /* of it, not ended */
  bool loading, fetching; /* its page is being filled; it is about to be given one */
  uint32_t count;
  int32_t token[MM_PAGE]; /* [count] */
};

typedef struct node_list {
  node *newest, *oldest;
} node_list;

/* A move that has not ended. It has a reference to the page. */
typedef struct move {
  node *node; /* NULL: dropped since */
  uint64_t number;
  mm_page_move m;
} move;

/* Of the host pool. */
typedef struct pool {
  uint32_t places, free_count, used;
  uint32_t *free; /* [free_count] a stack */
  move *move;     /* [moves], oldest first; the last `listed` are not given to the engine yet */
  uint32_t moves, listed, leaving;
  size_t move_cap;
  mm_page_move *list; /* [listed] */
  size_t list_cap;
  node **path; /* [pages of a slot] of a fetch */
  uint32_t *page;
  uint64_t out, in;
} pool;

#define NONE UINT32_MAX

struct mm_prefix_cache {
  mm_pages *pages;
  uint64_t state_bytes, budget, used;
  node root; /* has no page */
  node_list device, host;
  pool pool;
  snapshot **snapshot; /* [snapshots] */
  size_t snapshots, snapshot_cap;
  uint64_t uses;
  char *spare;    /* the room of a snapshot that went, for the next one: fresh memory costs a fault a page */
  uint32_t nodes; /* on the device */
};

mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err) {
  mm_prefix_cache *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->pages = pages;
  c->state_bytes = state_bytes;
  c->budget = budget;
  return c;
}

/* ---- order of use ---- */

static node_list *list_of(mm_prefix_cache *c, const node *n) { return n->page == NONE ? &c->host : &c->device; }

static void unlink_node(mm_prefix_cache *c, const node *n) {
  node_list *l = list_of(c, n);
  *(n->newer ? &n->newer->older : &l->newest) = n->older;
  *(n->older ? &n->older->newer : &l->oldest) = n->newer;
}

static void link_newest(mm_prefix_cache *c, node *n) {
  node_list *l = list_of(c, n);
  n->newer = NULL;
  n->older = l->newest;
  *(l->newest ? &l->newest->newer : &l->oldest) = n;
  l->newest = n;
}

/* A node and those above it were used; the ones above are newer, so that leaves go first. */
static void touch(mm_prefix_cache *c, node *n) {
  for (; n != &c->root; n = n->parent) {
    unlink_node(c, n);
    link_newest(c, n);
  }
}

/* ---- pages and places ---- */

/* The node gives up its memory, and is in no list. */
static void give_up(mm_prefix_cache *c, node *n) {
  unlink_node(c, n);
  if (n->page == NONE) {
    c->pool.free[c->pool.free_count++] = n->place;
    c->pool.used--;
  } else {
    mm_pages_release(c->pages, n->page);
    n->parent->on_device--;
    c->nodes--;
  }
  n->page = n->place = NONE;
  n->loading = false;
}

/* The node, which has neither, has the page, to which a reference becomes its own. */
static void give_page(mm_prefix_cache *c, node *n, uint32_t page) {
  n->page = page;
  n->parent->on_device++;
  c->nodes++;
  link_newest(c, n);
}

/* The moves of a node that goes end without it. */
static void forget_moves(mm_prefix_cache *c, const node *n) {
  for (uint32_t i = 0; n->moves && i < c->pool.moves; i++)
    if (c->pool.move[i].node == n) c->pool.move[i].node = NULL;
}

/* ---- leaving ---- */

static void drop_state(mm_prefix_cache *c, snapshot *s) {
  snapshot **at = &s->node->snapshot;
  while (*at != s) at = &(*at)->next;
  *at = s->next;
  c->snapshot[s->place] = c->snapshot[--c->snapshots];
  c->snapshot[s->place]->place = s->place;
  c->used -= c->state_bytes;
  free(c->spare);
  c->spare = s->state;
  free(s);
}

/* The parent of a node without children, which goes. */
static node *drop_node(mm_prefix_cache *c, node *n) {
  node *parent = n->parent;
  while (n->snapshot) drop_state(c, n->snapshot);
  *(n->previous ? &n->previous->next : &parent->child) = n->next;
  if (n->next) n->next->previous = n->previous;
  forget_moves(c, n);
  give_up(c, n);
  free(n);
  return parent;
}

/* Above a node that went: nodes that are then of no use go. */
static void drop_useless(mm_prefix_cache *c, node *n) {
  while (c->state_bytes && n != &c->root && !n->child && !n->snapshot) n = drop_node(c, n);
}

static void drop_leaf(mm_prefix_cache *c, node *n) { drop_useless(c, drop_node(c, n)); }

/* A node goes with everything below it. */
static void drop_tree(mm_prefix_cache *c, node *n) {
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
    drop_leaf(c, n);
  }
  free(c->spare);
  c->spare = NULL;
}

void mm_prefix_cache_close(mm_prefix_cache *c) {
  if (!c) return;
  mm_prefix_cache_clear(c);
  mm_prefix_cache_issued(c, 0);
  mm_prefix_cache_moved(c, UINT64_MAX);
  MM_FREE(c->snapshot, c->pool.free, c->pool.move, c->pool.list, (void *)c->pool.path, c->pool.page, c);
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
  return true;
}

static bool add_move(mm_prefix_cache *c, node *n, uint32_t page, uint32_t place, bool in) {
  pool *p = &c->pool;
  mm_err err = {0};
  if (!MM_GROW(p->move, &p->move_cap, (size_t)p->moves + 1, &err)) return false;
  p->move[p->moves++] = (move){.node = n, .number = UINT64_MAX, .m = {page, place, in}};
  p->listed++;
  n->moves++;
  *(in ? &p->in : &p->out) += 1;
  return true;
}

/* A free place, if there is one or an entry of the pool can go. */
static bool find_place(mm_prefix_cache *c) {
  node *n = c->host.oldest;
  while (!c->pool.free_count && n && (n->child || n->fetching)) n = n->newer;
  if (!c->pool.free_count && n) drop_leaf(c, n);
  return c->pool.free_count > 0;
}

/* The node's page is copied to a place, and is free when that has ended. */
static bool move_out(mm_prefix_cache *c, node *n) {
  pool *p = &c->pool;
  const uint32_t page = n->page;
  if (!p->free_count || !add_move(c, n, page, p->free[p->free_count - 1], false)) return false;
  mm_pages_hold(c->pages, page);
  give_up(c, n);
  n->place = p->free[--p->free_count];
  p->used++;
  p->leaving++;
  link_newest(c, n);
  return true;
}

/* The node's place is copied to the page, to which the caller has a reference that becomes the node's. */
static bool move_in(mm_prefix_cache *c, node *n, uint32_t page) {
  if (!add_move(c, n, page, n->place, true)) return false;
  mm_pages_hold(c->pages, page);
  give_up(c, n);
  give_page(c, n, page);
  n->loading = true;
  return true;
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

void mm_prefix_cache_moved(mm_prefix_cache *c, uint64_t oldest) {
  pool *p = &c->pool;
  uint32_t ended = 0;
  for (; ended < p->moves && p->move[ended].number < oldest; ended++) {
    const move *m = &p->move[ended];
    if (m->node) m->node->moves--;
    if (m->node && m->m.in && m->node->page == m->m.page) m->node->loading = false;
    mm_pages_release(c->pages, m->m.page);
    p->leaving -= !m->m.in;
  }
  p->moves -= ended;
  if (ended) memmove(p->move, p->move + ended, p->moves * sizeof *p->move);
}

bool mm_prefix_cache_moving(const mm_prefix_cache *c) { return c->pool.moves > 0; }
uint32_t mm_prefix_cache_leaving(const mm_prefix_cache *c) { return c->pool.leaving; }

mm_prefix_cache_counts mm_prefix_cache_counted(const mm_prefix_cache *c) {
  return (mm_prefix_cache_counts){c->pool.places, c->pool.used, c->pool.out, c->pool.in};
}

/* The node that was not used for longest of those whose page nobody else needs. Nodes that slots use are skipped and become the newest: the
 * next call does not visit them again. */
static node *oldest_idle(mm_prefix_cache *c) {
  node *stop = c->device.newest;
  for (node *n = c->device.oldest, *newer; n; n = newer) {
    newer = n == stop ? NULL : n->newer;
    if (!n->on_device && !n->moves && mm_pages_references(c->pages, n->page) == 1) return n;
    unlink_node(c, n);
    link_newest(c, n);
  }
  return NULL;
}

bool mm_prefix_cache_evict(mm_prefix_cache *c) {
  /* First the place: an entry that goes for it may take others along. */
  const bool place = c->pool.places && find_place(c);
  node *n = oldest_idle(c);
  if (n && !(place && move_out(c, n))) drop_tree(c, n);
  return n;
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

/* A cached prefix: tokens, the node of the last, and the states after that. */
typedef struct hit {
  uint32_t tokens;
  node *last;
  snapshot *snap;
} hit;

static hit find(mm_prefix_cache *c, bool ready, uint64_t salt, const int32_t *token, uint32_t most) {
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
  const hit h = find(c, true, salt, token, most);
  uint32_t at = (uint32_t)mm_ceil_div(h.tokens, MM_PAGE);
  for (const node *n = h.last; n != &c->root; n = n->parent) page[--at] = n->page;
  *state = h.snap ? h.snap->state : NULL;
  if (h.snap)
    use_state(c, h.snap);
  else
    touch(c, h.last);
  return h.tokens;
}

/* ---- fetching ---- */

static int by_number(const void *a, const void *b) {
  const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

/* A page with a reference for the caller, of another entry if none is free: the copies are made in order. */
static bool make_page(mm_prefix_cache *c, uint32_t *page) {
  if (mm_pages_take(c->pages, page)) return true;
  if (!mm_prefix_cache_evict(c)) return false;
  if (mm_pages_take(c->pages, page)) return true; /* it was not moved */
  *page = c->pool.move[c->pool.moves - 1].m.page;
  mm_pages_hold(c->pages, *page);
  return true;
}

/* Lists moves for path[count], in the order of pages, so that copies of neighbours become one. */
static void fetch_path(mm_prefix_cache *c, node *const *path, uint32_t count) {
  uint32_t *const page = c->pool.page;
  for (uint32_t at = 0, made = 1; at < count && made; at += made) {
    const uint32_t most = (uint32_t)mm_min(count - at, mm_max(1, c->pool.free_count));
    for (made = 0; made < most && make_page(c, &page[made]);) made++;
    qsort(page, made, sizeof *page, by_number);
    for (uint32_t i = 0; i < made; i++) {
      if (move_in(c, path[at + i], page[i])) continue;
      for (; i < made; i++) mm_pages_release(c->pages, page[i]);
      return;
    }
  }
}

uint32_t mm_prefix_cache_fetch(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most, bool start) {
  const hit h = find(c, false, salt, token, most);
  if (!c->pool.places || h.tokens <= find(c, true, salt, token, most).tokens) return 0;
  node **const end = c->pool.path + mm_ceil_div(h.tokens, MM_PAGE), **path = end, *n = h.last;
  for (; n->page == NONE && n != &c->root; n = n->parent) n->fetching = true, *--path = n;
  if (start && path < end) {
    if (n != &c->root) mm_pages_hold(c->pages, n->page); /* its pages stay */
    fetch_path(c, path, (uint32_t)(end - path));
    if (n != &c->root) mm_pages_release(c->pages, n->page);
  }
  for (node **p = path; p < end; p++) (*p)->fetching = false;
  uint32_t loading = 0;
  for (n = h.last; n != &c->root; n = n->parent) loading += n->loading;
  return loading;
}

/* ---- keeping ---- */

static node *add_child(mm_prefix_cache *c, node *parent, uint64_t salt, const int32_t *token, uint32_t count, uint32_t page) {
  node *n = calloc(1, sizeof *n);
  if (!n) return NULL;
  n->parent = parent;
  n->salt = salt;
  n->place = NONE;
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
  n->next = parent->child;
  if (n->next) n->next->previous = n;
  parent->child = n;
  mm_pages_hold(c->pages, page);
  give_page(c, n, page);
  return n;
}

/* A page that holds as many or more of the same tokens replaces the node's page or place. */
static void extend(mm_prefix_cache *c, node *n, const int32_t *token, uint32_t count, uint32_t page) {
  mm_pages_hold(c->pages, page);
  give_up(c, n);
  give_page(c, n, page);
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
}

/* The node that holds the last of the tokens; NULL out of memory, what came before being kept. */
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
      if (c->state_bytes && n != &c->root && !n->child && !n->snapshot) drop_leaf(c, n);
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
  if (!n->snapshot && !n->child) drop_leaf(c, n);
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
  const bool room = MM_GROW(c->snapshot, &c->snapshot_cap, c->snapshots + 1, &err);
  s = room ? new_state(c) : NULL;
  node *n = s ? put(c, salt, token, count, page) : NULL;
  if (!n) {
    if (s) free(s->state);
    free(s);
    return NULL;
  }
  s->node = n;
  s->tokens = (count - 1) % MM_PAGE + 1;
  s->used = ++c->uses;
  s->next = n->snapshot;
  n->snapshot = s;
  s->place = c->snapshots;
  c->snapshot[c->snapshots++] = s;
  c->used += c->state_bytes;
  return s->state;
}

uint32_t mm_prefix_cache_pages(const mm_prefix_cache *c) { return c->nodes; }
uint64_t mm_prefix_cache_state_bytes(const mm_prefix_cache *c) { return c->used; }
void mm_prefix_cache_held(const mm_prefix_cache *c, uint32_t *held) {
  for (const node *n = c->device.oldest; n; n = n->newer) held[n->page]++;
  for (uint32_t i = 0; i < c->pool.moves; i++) held[c->pool.move[i].m.page]++;
}
