/* The tree's nodes are pages: the tokens that one holds, after those of its parent. A node of fewer than MM_PAGE tokens has no children.
 * With lightning layers every leaf has a snapshot. */
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
  node *newer, *older;   /* of all, by use */
  snapshot *snapshot;
  uint64_t salt;
  uint32_t page, count;
  int32_t token[MM_PAGE]; /* [count] */
};

struct mm_prefix_cache {
  mm_pages *pages;
  uint64_t state_bytes, budget, used;
  node root; /* has no page */
  node *newest, *oldest;
  snapshot **snapshot; /* [snapshots] */
  size_t snapshots, snapshot_cap;
  uint64_t uses;
  char *spare; /* the room of a snapshot that went, for the next one: fresh memory costs a fault a page */
  uint32_t nodes;
};

mm_prefix_cache *mm_prefix_cache_open(mm_pages *pages, uint64_t state_bytes, uint64_t budget, mm_err *err) {
  mm_prefix_cache *c = mm_calloc(1, sizeof *c, err);
  if (!c) return NULL;
  c->pages = pages;
  c->state_bytes = state_bytes;
  c->budget = budget;
  return c;
}

void mm_prefix_cache_close(mm_prefix_cache *c) {
  if (!c) return;
  mm_prefix_cache_clear(c);
  free(c->snapshot);
  free(c);
}

/* ---- order of use ---- */

static void unlink_node(mm_prefix_cache *c, const node *n) {
  *(n->newer ? &n->newer->older : &c->newest) = n->older;
  *(n->older ? &n->older->newer : &c->oldest) = n->newer;
}

static void link_newest(mm_prefix_cache *c, node *n) {
  n->newer = NULL;
  n->older = c->newest;
  *(c->newest ? &c->newest->newer : &c->oldest) = n;
  c->newest = n;
}

/* A node and those above it were used; the ones above are newer, so that leaves go first. */
static void touch(mm_prefix_cache *c, node *n) {
  for (; n != &c->root; n = n->parent) {
    unlink_node(c, n);
    link_newest(c, n);
  }
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

/* A leaf goes, and above it what is then of no use. */
static void drop_leaf(mm_prefix_cache *c, node *n) {
  do {
    node *parent = n->parent;
    while (n->snapshot) drop_state(c, n->snapshot);
    *(n->previous ? &n->previous->next : &parent->child) = n->next;
    if (n->next) n->next->previous = n->previous;
    unlink_node(c, n);
    mm_pages_release(c->pages, n->page);
    c->nodes--;
    free(n);
    n = parent;
  } while (c->state_bytes && n != &c->root && !n->child && !n->snapshot);
}

bool mm_prefix_cache_evict(mm_prefix_cache *c) {
  /* Nodes that slots use are skipped and become the newest: the next call does not visit them again. */
  node *stop = c->newest;
  for (node *n = c->oldest, *newer; n; n = newer) {
    newer = n == stop ? NULL : n->newer;
    if (!n->child && mm_pages_references(c->pages, n->page) == 1) {
      drop_leaf(c, n);
      return true;
    }
    unlink_node(c, n);
    link_newest(c, n);
  }
  return false;
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

/* ---- finding ---- */

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t most) {
  uint32_t n = 0;
  while (n < most && a[n] == b[n]) n++;
  return n;
}

/* The child that begins most like token[count]; *alike: how many tokens, 0 with NULL. */
static node *nearest(const node *parent, uint64_t salt, const int32_t *token, uint32_t count, uint32_t *alike) {
  node *best = NULL;
  *alike = 0;
  for (node *n = parent->child; n && *alike < count; n = n->next) {
    if (n->salt != salt || n->token[0] != token[0]) continue;
    const uint32_t same = common(n->token, token, (uint32_t)mm_min(n->count, count));
    if (same > *alike) best = n, *alike = same;
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

static void use_state(mm_prefix_cache *c, snapshot *s) {
  s->used = ++c->uses;
  touch(c, s->node);
}

uint32_t mm_prefix_cache_find(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t most, uint32_t *page, const void **state) {
  uint32_t found = 0;
  node *n = &c->root, *last = &c->root;
  snapshot *snap = NULL;
  for (uint32_t at = 0, alike = MM_PAGE; at < most && alike == MM_PAGE; at += MM_PAGE) {
    const uint32_t here = (uint32_t)mm_min(MM_PAGE, most - at);
    snapshot *s = c->state_bytes ? last_state(n, salt, token + at, here) : NULL;
    if (s) {
      snap = s;
      found = at + s->tokens;
    }
    if (!(n = nearest(n, salt, token + at, here, &alike))) break;
    page[at / MM_PAGE] = n->page;
    if (!c->state_bytes) {
      last = n;
      found = at + alike;
    }
  }
  *state = snap ? snap->state : NULL;
  if (snap) {
    page[(found - 1) / MM_PAGE] = snap->node->page;
    use_state(c, snap);
  } else
    touch(c, last);
  return found;
}

/* ---- keeping ---- */

static node *add_child(mm_prefix_cache *c, node *parent, uint64_t salt, const int32_t *token, uint32_t count, uint32_t page) {
  node *n = calloc(1, sizeof *n);
  if (!n) return NULL;
  n->parent = parent;
  n->salt = salt;
  n->page = page;
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
  n->next = parent->child;
  if (n->next) n->next->previous = n;
  parent->child = n;
  mm_pages_hold(c->pages, page);
  link_newest(c, n);
  c->nodes++;
  return n;
}

/* The page that holds more of the same tokens takes the other's place. */
static void extend(mm_prefix_cache *c, node *n, const int32_t *token, uint32_t count, uint32_t page) {
  mm_pages_hold(c->pages, page);
  mm_pages_release(c->pages, n->page);
  n->page = page;
  n->count = count;
  memcpy(n->token, token, count * sizeof *token);
}

/* The node that holds the last of the tokens; NULL out of memory, what came before being kept. */
static node *put(mm_prefix_cache *c, uint64_t salt, const int32_t *token, uint32_t count, const uint32_t *page) {
  node *n = &c->root;
  for (uint32_t at = 0, here, alike; at < count; at += here) {
    here = (uint32_t)mm_min(MM_PAGE, count - at);
    node *child = nearest(n, salt, token + at, here, &alike);
    if (child && alike < here && alike == child->count)
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
  for (; n && alike == MM_PAGE && count - at > MM_PAGE; at += MM_PAGE) n = nearest(n, salt, token + at, MM_PAGE, &alike);
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
  for (const node *n = c->oldest; n; n = n->newer) held[n->page]++;
}
