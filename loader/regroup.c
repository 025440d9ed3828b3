/* Attention cut for more ranks than the files have it cut for (mm_shards_regroup). A rank's rows of q, k and v, its columns of the output
 * projection, its index heads and its ids lie in the parts of its own file, or of a rank next to it. The pack gets the cuts, rows, columns
 * and cells that a conversion for so many ranks writes; a plane becomes a view of a mapping where its rows lie together there, else a copy.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "formats/system/memory.h"
#include "formats/system/pool.h"
#include "loader/random_weights.h"

#define ALIGN 256 /* of a copied plane, and the bytes behind it at least */

/* One plane of one tensor on one rank. */
typedef struct plane_copy {
  uint32_t rank;
  size_t tensor;
  unsigned plane;
  uint64_t at; /* in the copied memory */
} plane_copy;

typedef struct regrouping {
  mm_shards *s;
  uint32_t ranks, held;         /* of a group: now, and in the files */
  const mm_pack_tensor *before; /* [tensor_count], as the files have them */
  const mm_cut *cut;            /* the files' */
  plane_copy *copy;             /* [copies] */
  size_t copies, copies_cap;
  uint64_t bytes; /* of all copies */
  mm_err *err;
} regrouping;

static bool ends(const char *name, const char *with) {
  const size_t n = strlen(name), k = strlen(with);
  return n >= k && strcmp(name + n - k, with) == 0;
}

/* ---- cuts ---- */

static bool of_vocabulary(const mm_pack_tensor *t) {
  return strcmp(t->name, "model.embed_tokens.weight") == 0 || strcmp(t->name, "lm_head.weight") == 0;
}

/* The heads that a piece's cut goes by; 0 where it does not go by any. */
static uint32_t heads_of(const mm_model *m, const mm_pack_tensor *t, unsigned piece) {
  static const char *const by_head[] = {".self_attn.o_proj.weight", ".self_attn.out_proj.weight", ".self_attn.output_gate.weight",
                                        ".self_attn.norm.weight",   ".self_attn.q_norm.weight",   NULL};
  if (ends(t->name, ".self_attn.qkv_proj.weight")) return piece == 0 ? m->heads : m->kv_heads;
  if (ends(t->name, ".self_attn.k_norm.weight")) return m->kv_heads;
  if (ends(t->name, ".self_attn.index_q_proj.weight")) return m->index_heads;
  for (const char *const *name = by_head; *name; name++)
    if (ends(t->name, *name)) return m->heads;
  return 0;
}

/* The share of rank r of a group: whole heads, one of fewer heads than ranks; ids are padded to a multiple of MM_VOCAB_MULTIPLE and of the
 * ranks. */
static mm_range share_of(const regrouping *g, const mm_cut *c, uint32_t heads, uint32_t r) {
  const uint32_t ranks = g->ranks;
  if (heads) {
    const uint32_t each = c->whole / heads;
    return (mm_range){0, (uint32_t)((uint64_t)r * heads / ranks) * each, (uint32_t)mm_max(1, heads / ranks) * each};
  }
  const uint64_t from = mm_min((uint64_t)r * c->local, c->whole);
  return (mm_range){0, (uint32_t)from, (uint32_t)mm_min(c->local, c->whole - from)};
}

static bool same_cut(const mm_cut *a, const mm_cut *b, uint32_t tp) {
  return a->axis == b->axis && a->whole == b->whole && a->local == b->local && memcmp(a->rank, b->rank, tp * sizeof *a->rank) == 0;
}

/* Finds the cut in the pack, or adds it. The files' own list stays as it is. */
static bool add_cut(const regrouping *g, const mm_cut *c, uint32_t *index) {
  mm_pack *p = &g->s->pack;
  for (*index = 0; *index < p->cut_count; ++*index)
    if (p->cut[*index].axis != MM_AXIS_NONE && same_cut(&p->cut[*index], c, p->tp)) return true;
  mm_cut *all = mm_arena_alloc(&p->arena, (p->cut_count + 1) * sizeof *all, g->err);
  if (!all) return false;
  memcpy(all, p->cut, p->cut_count * sizeof *all);
  all[p->cut_count++] = *c;
  p->cut = all;
  return true;
}

static bool cut_piece(const regrouping *g, mm_pack_tensor *t, unsigned piece) {
  mm_pack *p = &g->s->pack;
  mm_cut c = p->cut[t->piece[piece].cut];
  const uint32_t heads = of_vocabulary(t) ? 0 : heads_of(&p->model, t, piece);
  const uint64_t multiple = MM_VOCAB_MULTIPLE / mm_gcd(MM_VOCAB_MULTIPLE, g->ranks) * g->ranks;
  c.local = heads ? share_of(g, &c, heads, 0).count : (uint32_t)(mm_round_up(c.whole, multiple) / g->ranks);
  if (!(c.rank = mm_arena_alloc(&p->arena, p->tp * sizeof *c.rank, g->err))) return false;
  for (uint32_t r = 0; r < p->tp; r++) c.rank[r] = share_of(g, &c, heads, r % g->ranks);
  if (!add_cut(g, &c, &t->piece[piece].cut)) return false;
  if (c.axis == MM_AXIS_ROWS) t->piece[piece].local_rows = c.local;
  if (c.axis == MM_AXIS_COLS) t->cols = c.local;
  return true;
}

/* Rows, columns and cuts of tensor i; *cuts: there are any. */
static bool cut_tensor(const regrouping *g, size_t i, bool *cuts) {
  mm_pack_tensor *t = &g->s->pack.tensor[i];
  uint32_t rows = 0;
  *cuts = false;
  for (unsigned k = 0; k < t->piece_count; k++) {
    const bool own = of_vocabulary(t) || heads_of(&g->s->pack.model, t, k);
    if (own && g->cut[t->piece[k].cut].axis != MM_AXIS_NONE) {
      *cuts = true;
      if (!cut_piece(g, t, k)) return false;
    }
    t->piece[k].local_at = rows;
    rows += t->piece[k].local_rows;
  }
  if (*cuts) t->rows = rows;
  return true;
}

/* The cells of a plane, as a conversion finds them: the finest that all cuts ask for, of the grid before cuts. */
static bool cut_cells(const regrouping *g, size_t i, unsigned plane) {
  const mm_pack *p = &g->s->pack;
  mm_pack_tensor *t = &g->s->pack.tensor[i];
  const mm_pack_plane *held = &g->before[i].plane[plane];
  const mm_plane *own = &mm_scheme_find(t->scheme)->plane[plane];
  static const mm_cut none = {.axis = MM_AXIS_NONE};
  const uint32_t whole_n = held->grid.known ? held->grid.n : own->cell.n, whole_k = held->grid.known ? held->grid.k : own->cell.k;
  uint32_t n = whole_n, k = whole_k;
  for (unsigned j = 0; j < t->piece_count; j++) {
    const mm_cut *c = &p->cut[t->piece[j].cut];
    if (n > 1) n = mm_cut_grid(c->axis == MM_AXIS_ROWS ? c : &none, p->tp, t->piece[j].local_at, n, !own->scale);
    if (k > 1 && c->axis == MM_AXIS_COLS) k = mm_cut_grid(c, p->tp, 0, k, !own->scale);
  }
  const bool finer = n != whole_n || k != whole_k, inside = (n && held->cell_n % n) || (k && held->cell_k % k);
  if (inside || (finer && (!own->scale || p->tp_align == MM_ALIGN_ERROR)))
    return mm_fail(g->err, MM_UNSUPPORTED, "E_TP_ALIGN", mm_at(p->dir, t->name),
                   "found attention for %u ranks, --dp %u of --tp %u, cut inside a %s cell of %u x %u (the finest grid that fits is %u x "
                   "%u); expected --dp %u, or a conversion %s",
                   g->ranks, p->tp / g->ranks, p->tp, t->scheme, whole_n, whole_k, n, k, p->tp / g->held,
                   own->scale && !inside ? "with --tp-align split" : "for other ranks");
  t->plane[plane].cell_n = n, t->plane[plane].cell_k = k;
  return true;
}

/* ---- places in the files ---- */

/* A line of a plane's tensor in the files: the rank that has it, and its number there. */
typedef struct line {
  uint32_t rank, at;
} line;

/* Line i of rank's new share of a piece, by the files' cut and the new one. False: it is padding behind the last line. */
static bool find_line(const regrouping *g, uint32_t rank, const mm_cut *held, const mm_cut *now, uint32_t i, line *to) {
  const uint32_t tp = g->s->pack.tp, stage = rank / tp * tp, of = rank % tp, first = of / g->held * g->held;
  const uint32_t whole = now->rank[of].from + i;
  for (uint32_t k = 0; k <= g->held; k++) { /* the rank itself, then all whose attention its group of the files has */
    const uint32_t r = k == 0 ? of : first + k - 1;
    const mm_range *y = &held->rank[r];
    if (whole < y->from || whole - y->from >= y->count) continue;
    *to = (line){stage + r, y->at + (whole - y->from)};
    return true;
  }
  return false;
}

/* Bytes of one row of cells as tensor i has them now, or in the files; an element's bytes are the same. */
static size_t row_cells(const mm_pack_tensor *t, unsigned plane) { return mm_cells(t->cols, t->plane[plane].cell_k); }
static size_t element(const mm_pack_tensor *t, unsigned plane) { return mm_dtype_size(t->plane[plane].dtype); }

/* The piece that has local row `row`. */
static unsigned piece_at(const mm_pack_tensor *t, uint32_t row) {
  unsigned k = 0;
  while (k + 1 < t->piece_count && row >= t->piece[k + 1].local_at) k++;
  return k;
}

/* A row of cells in the files, and the tensor's column there that the rank's first one is. */
typedef struct cells_at {
  const uint8_t *row; /* NULL: the rank's row is padding */
  uint32_t column;
} cells_at;

/* The files' cells under row `a` of a plane's cells. */
static bool find_cells(const regrouping *g, const plane_copy *x, uint32_t a, cells_at *to) {
  const mm_pack *p = &g->s->pack;
  const mm_pack_tensor *now = &p->tensor[x->tensor], *held = &g->before[x->tensor];
  const uint32_t row = a * now->plane[x->plane].cell_n, cell_n = held->plane[x->plane].cell_n;
  const unsigned k = piece_at(now, row);
  const mm_cut *c = &g->cut[held->piece[k].cut], *d = &p->cut[now->piece[k].cut];
  line own = {x->rank, 0}, r = {x->rank, row - now->piece[k].local_at};
  const bool columns = c->axis == MM_AXIS_COLS;
  *to = (cells_at){0};
  if (c->axis != MM_AXIS_NONE && !find_line(g, x->rank, c, d, columns ? 0 : r.at, columns ? &own : &r)) return true;
  const uint32_t rank = columns ? own.rank : r.rank;
  const mm_shard_rank *file = &g->s->rank[rank];
  if (!file->plane)
    return mm_fail(g->err, MM_INTEGRITY, "E_MISSING", mm_at(p->dir, now->name),
                   "found none on rank %u, expected one, as rank %u takes some of it under --dp %u", rank, x->rank, p->tp / g->ranks);
  const mm_shard_plane *at = &file->plane[x->tensor * MM_PACK_PLANES + x->plane];
  const size_t cells = cell_n ? (held->piece[k].local_at + r.at) / cell_n : 0;
  *to = (cells_at){file->map[at->part].data + at->offset + cells * row_cells(held, x->plane) * element(now, x->plane), own.at};
  return true;
}

/* ---- planes ---- */

/* A view where all rows lie one behind the other in one mapping, on the same cells; else a copy is planned. */
static bool place_plane(regrouping *g, uint32_t rank, size_t i, unsigned plane) {
  const mm_pack_tensor *now = &g->s->pack.tensor[i], *held = &g->before[i];
  const mm_pack_plane *a = &now->plane[plane], *b = &held->plane[plane];
  const uint32_t rows = mm_cells(now->rows, a->cell_n);
  const size_t each = row_cells(now, plane) * element(now, plane);
  plane_copy x = {rank, i, plane, g->bytes};
  cells_at first = {0}, from;
  bool together = a->cell_n == b->cell_n && a->cell_k == b->cell_k && now->cols == held->cols;
  for (uint32_t r = 0; r < rows; r++) {
    if (!find_cells(g, &x, r, &from)) return false;
    if (r == 0) first = from;
    together = together && from.row && from.row == first.row + r * each;
  }
  if (together) return g->s->rank[rank].plane[i * MM_PACK_PLANES + plane].view = first.row, true;
  g->bytes += mm_round_up(rows * each + ALIGN, ALIGN);
  return MM_GROW(g->copy, &g->copies_cap, g->copies + 1, g->err) && (g->copy[g->copies++] = x, true);
}

/* Each cell's bytes, from the cell of the files that it lies in. */
static bool copy_plane(void *of, size_t item, unsigned worker, mm_err *err) {
  const regrouping *g = of;
  const plane_copy *x = &g->copy[item];
  const mm_pack_tensor *now = &g->s->pack.tensor[x->tensor];
  const size_t each = element(now, x->plane), columns = row_cells(now, x->plane);
  const uint32_t rows = mm_cells(now->rows, now->plane[x->plane].cell_n), cell = now->plane[x->plane].cell_k,
                 held = g->before[x->tensor].plane[x->plane].cell_k;
  uint8_t *to = (uint8_t *)g->s->copied + x->at;
  cells_at from;
  (void)worker;
  (void)err;
  for (uint32_t a = 0; a < rows; a++, to += columns * each) {
    if (!find_cells(g, x, a, &from)) return false;
    if (from.row && cell == held) memcpy(to, from.row + (held ? from.column / held : 0) * each, columns * each);
    for (size_t b = 0; from.row && cell != held && b < columns; b++)
      memcpy(to + b * each, from.row + (from.column + b * cell) / held * each, each);
  }
  return true;
}

/* All copies, by all CPUs; their memory is read-only from then on. */
static bool make_copies(regrouping *g) {
  if (g->bytes > mm_memory_limit()) return mm_fail_memory(g->err, g->bytes);
  if (!g->copies) return true;
  void *at = mmap(NULL, g->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return mm_fail_memory(g->err, g->bytes);
  g->s->copied = at, g->s->copied_bytes = g->bytes;
  if (!mm_pool_run(mm_pool_cpus(), g->copies, copy_plane, g, g->err)) return false;
  for (size_t i = 0; i < g->copies; i++) {
    const plane_copy *x = &g->copy[i];
    g->s->rank[x->rank].plane[x->tensor * MM_PACK_PLANES + x->plane].view = (uint8_t *)at + x->at;
  }
  return mprotect(at, g->bytes, PROT_READ) == 0 || mm_fail_memory(g->err, g->bytes);
}

/* ---- checkpoints ---- */

static bool check_groups(const mm_shards *s, uint32_t groups, mm_err *err) {
  const mm_pack *p = &s->pack;
  const uint32_t made = s->random.linear ? p->tp : mm_pack_groups(p);
  if (groups == 0 || made % groups)
    return mm_fail(err, MM_UNSUPPORTED, "E_PARALLEL", mm_at(p->dir, NULL),
                   "found --dp %u; expected a divisor of %u, the groups of attention that %s has", groups, made,
                   s->random.linear ? "--dummy-tp" : "the checkpoint, made with --tp and --attn-tp,");
  const uint32_t ranks = p->tp / groups;
  return mm_model_cuts(&p->model, p->tp, ranks, p->ep) ||
         mm_fail(err, MM_UNSUPPORTED, "E_TP", mm_at(p->dir, NULL),
                 "found --dp %u, attention for %u ranks; expected ranks that divide %u heads, and %u kv heads (%u index heads) or the "
                 "other way round",
                 groups, ranks, p->model.heads, p->model.kv_heads, p->model.index_heads);
}

static bool regroup_files(regrouping *g) {
  mm_pack *p = &g->s->pack;
  mm_pack_tensor *before = mm_calloc(p->tensor_count, sizeof *before, g->err);
  if (!before) return false;
  memcpy(before, p->tensor, p->tensor_count * sizeof *before);
  g->before = before, g->cut = p->cut;
  bool ok = true, cuts;
  for (size_t i = 0; ok && i < p->tensor_count; i++) {
    ok = cut_tensor(g, i, &cuts);
    for (unsigned k = 0; ok && cuts && k < p->tensor[i].plane_count; k++) ok = cut_cells(g, i, k);
    for (uint32_t r = 0; ok && cuts && r < mm_pack_ranks(p); r++)
      for (unsigned k = 0; ok && g->s->rank[r].plane && mm_pack_holds(p, &p->tensor[i], r) && k < p->tensor[i].plane_count; k++)
        ok = place_plane(g, r, i, k);
  }
  ok = ok && make_copies(g);
  MM_FREE(before, g->copy);
  return ok;
}

bool mm_shards_regroup(mm_shards *s, uint32_t groups, mm_err *err) {
  mm_pack *p = &s->pack;
  if (groups == mm_pack_groups(p)) return true;
  if (!check_groups(s, groups, err)) return false;
  const uint32_t ranks = p->tp / groups;
  regrouping g = {.s = s, .ranks = ranks, .held = mm_pack_attn_tp(p), .err = err};
  if (!s->random.linear && !regroup_files(&g)) return false;
  s->regrouped = true;
  p->attn_tp = s->random.attn_tp = groups == 1 ? 0 : ranks;
  return !s->random.linear || mm_random_check(&s->random, &p->model, err);
}

mm_digest mm_shards_digest(const mm_shards *s) {
  const uint32_t ranks = mm_pack_attn_tp(&s->pack);
  if (!s->regrouped) return s->pack.text_digest;
  mm_sha256_state h;
  mm_sha256_begin(&h);
  mm_sha256_add(&h, &s->pack.text_digest, sizeof s->pack.text_digest);
  mm_sha256_add(&h, &ranks, sizeof ranks);
  return mm_sha256_end(&h);
}
