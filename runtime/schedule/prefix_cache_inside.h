/* The prefix cache's inside: prefix_tree.c (the tree), prefix_pool.c (entries in host memory), prefix_disk.c (entries on
 * disk). */
#ifndef MM_RUNTIME_PREFIX_CACHE_INSIDE_H
#define MM_RUNTIME_PREFIX_CACHE_INSIDE_H

#include "runtime/schedule/prefix_cache.h"

typedef struct node node;

/* The states after the first `tokens` tokens of a node's page. */
typedef struct snapshot {
  struct snapshot *next; /* of the node */
  node *node;
  uint64_t used; /* when, in finds and puts */
  uint32_t tokens;
  size_t index; /* in the list of all */
  char *state;
} snapshot;

/* Neighbours in a list of nodes by use. */
typedef struct links {
  node *newer, *older;
} links;

/* A node's page on the device of one group of attention. */
typedef struct resident {
  links links;       /* among the group's pages */
  uint32_t page;     /* or NONE. The parent of a node with a page in a group has one there */
  uint32_t children; /* with a page of the group */
  bool loading;      /* it is being filled, */
  bool relayed;      /* from a page of another group */
} resident;

struct node {
  node *parent, *child;  /* the first of them */
  node *next, *previous; /* among the parent's */
  links links;           /* without a page: of all in the pool, or on disk */
  snapshot *snapshot;
  uint64_t salt;
  uint32_t pages;       /* groups that have a page of it */
  uint32_t place;       /* of the host pool, where there is no page; else NONE */
  uint32_t block;       /* of the disk, where there is neither, or while it is copied to the place or from there; else NONE */
  uint32_t moves;       /* of it, not ended */
  bool fetching;        /* it is about to be given a page */
  bool copied, reading; /* a copy between its place and block has not ended; it is one to the place */
  uint32_t count;
  int32_t token[MM_PAGE]; /* [count] */
  resident in[];          /* [groups] */
};

typedef struct node_list {
  node *newest, *oldest;
} node_list;

/* A move that has not ended. It has a reference to the page. */
typedef struct move {
  node *node; /* NULL: dropped since */
  uint64_t number;
  mm_page_move m;
  uint32_t relay; /* NONE, or a page of another group, with a reference: the place is copied to it when this has ended */
  bool frees;     /* the place is nobody's any more: it is free when this has ended */
} move;

/* Of the host pool. */
typedef struct pool {
  uint32_t places, free_count;
  bool shared;    /* not one device alone reads and writes places: one is free when its moves have ended */
  uint32_t *free; /* [free_count] a stack */
  move *move;     /* [moves], oldest first; the last `listed` are not given to the engine yet */
  uint32_t moves, listed;
  uint32_t relays; /* of them with a page to relay to; move has room for as many more */
  size_t move_cap;
  mm_page_move *list; /* [listed] */
  size_t list_cap;
  node **path; /* [pages of a slot] of a fetch */
  uint32_t *page;
  uint64_t out, in;
} pool;

/* A copy between a place and a block that has not ended. node NULL: dropped since, both are free afterwards. */
typedef struct disk_copy {
  node *node;
  mm_disk_move m;
} disk_copy;

typedef struct disk {
  uint32_t blocks, free_count; /* blocks 0: there is none */
  uint32_t *free;              /* [free_count] a stack */
  disk_copy *copy;             /* [copies]; the last `listed` are not given to the store yet */
  uint32_t copies, listed, leaving;
  size_t copy_cap;
  mm_disk_move *list; /* [listed] */
  size_t list_cap;
  uint64_t out, in, failed;
} disk;

#define NONE UINT32_MAX

/* Pages of one group of attention. */
typedef struct group_pages {
  node_list list;
  uint32_t nodes, leaving; /* with a page; pages on their way out */
} group_pages;

struct mm_prefix_cache {
  mm_pages *pages;
  uint32_t groups;
  uint64_t state_bytes, budget, used;
  node *root;         /* has no page */
  group_pages *group; /* [groups] */
  node_list host, on_disk;
  pool pool;
  disk disk;
  snapshot **snapshot; /* [snapshots] */
  size_t snapshots, snapshot_cap;
  uint64_t uses;
  char *spare; /* the room of a snapshot that went, for the next one: fresh memory costs a fault a page */
};

/* ---- order of use ---- */

#define OFF_DEVICE UINT32_MAX /* in place of a group: the list of the pool, or of the disk */

static inline links *links_of(node *n, uint32_t group) { return group == OFF_DEVICE ? &n->links : &n->in[group].links; }

static inline node_list *list_of(mm_prefix_cache *c, const node *n, uint32_t group) {
  return group != OFF_DEVICE ? &c->group[group].list : n->place != NONE ? &c->host : &c->on_disk;
}

static inline void unlink_node(mm_prefix_cache *c, node *n, uint32_t group) {
  node_list *l = list_of(c, n, group);
  const links *k = links_of(n, group);
  *(k->newer ? &links_of(k->newer, group)->older : &l->newest) = k->older;
  *(k->older ? &links_of(k->older, group)->newer : &l->oldest) = k->newer;
}

static inline void link_newest(mm_prefix_cache *c, node *n, uint32_t group) {
  node_list *l = list_of(c, n, group);
  *links_of(n, group) = (links){.older = l->newest};
  *(l->newest ? &links_of(l->newest, group)->newer : &l->oldest) = n;
  l->newest = n;
}

/* A cached prefix: tokens, the node of the last, and the states after that. */
typedef struct hit {
  uint32_t tokens;
  node *last;
  snapshot *snap;
} hit;

/* ready: only of what is on the group's device. */
hit mm_prefix_find(mm_prefix_cache *c, uint32_t group, bool ready, uint64_t salt, const int32_t *token, uint32_t most);

/* The node gives up its page of the group; what it has elsewhere stays. */
void mm_prefix_give_up_page(mm_prefix_cache *c, node *n, uint32_t group);
/* The node gives up all its memory, and is in no list. */
void mm_prefix_give_up(mm_prefix_cache *c, node *n);
/* The node has the page, to which a reference becomes its own. It has none of that group, and neither place nor block. */
void mm_prefix_give_page(mm_prefix_cache *c, node *n, uint32_t page);
/* A node without children goes, and above it nodes that are then of no use. */
void mm_prefix_drop_leaf(mm_prefix_cache *c, node *n);
/* A node goes with everything below it. */
void mm_prefix_drop_tree(mm_prefix_cache *c, node *n);

/* ---- prefix_pool.c ---- */
/* The moves of a node that goes end without it. */
void mm_prefix_forget_moves(mm_prefix_cache *c, const node *n);
/* A free place, if there is one or an entry of the pool can go. */
bool mm_prefix_find_place(mm_prefix_cache *c);
/* A place is nobody's any more. */
void mm_prefix_free_place(mm_prefix_cache *c, uint32_t place);

/* ---- prefix_disk.c ---- */
/* The node's copy between place and block, if it has one, ends without it, and frees both; else its block, if it has one, is free. Returns
 * true if the place is that copy's. */
bool mm_prefix_leave_disk(mm_prefix_cache *c, node *n);
/* The node, which is on disk, is read into a place; false if there is none. */
bool mm_prefix_read(mm_prefix_cache *c, node *n);

#endif
