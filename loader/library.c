/* The public face of the library: minimax.h over shards, verify and unshard. */
#define MINIMAX_BUILD
#include "loader/minimax.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/system/file.h"
#include "formats/system/pool.h"
#include "loader/bind.h"
#include "loader/companions.h"
#include "loader/dflash.h"
#include "loader/unshard.h"
#include "loader/verify.h"

_Static_assert(sizeof(minimax_error) == 4096, "callers allocate it");
_Static_assert(sizeof(((mm_err *)0)->text) <= sizeof(((minimax_error *)0)->text), "every text fits");
_Static_assert(sizeof(((mm_err *)0)->code) <= sizeof(((minimax_error *)0)->code), "every code fits");

/* A tensor with what it hands out; the public part comes first, so that a pointer to it is one to the whole. */
typedef struct mm_public_tensor {
  minimax_tensor tensor;
  minimax_plane plane[MM_PACK_PLANES];
  minimax_piece piece[MM_PACK_PIECES];
  mm_packed packed;
} mm_public_tensor;

typedef struct mm_public_rank {
  size_t count;
  mm_public_tensor *tensor; /* in layer order */
} mm_public_rank;

struct minimax_checkpoint {
  mm_shards shards;
  minimax_info info;
  mm_hex plan;
  mm_public_rank *rank; /* [info.ranks] */
  mm_arena arena;
};

/* Copies err to the caller's structure, which may be NULL, and returns its status; 0 if err holds none. */
static int report(minimax_error *out, const mm_err *err) {
  if (!out) return (int)err->status;
  *out = (minimax_error){.status = (int32_t)err->status};
  snprintf(out->code, sizeof out->code, "%s", err->code);
  snprintf(out->text, sizeof out->text, "%s", err->text);
  return (int)err->status;
}

/* Fails where a caller passed NULL for what must be there. */
static bool given(bool all, mm_err *err) {
  if (all) return true;
  mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, NULL), "found a NULL argument, expected a pointer");
  return false;
}

const char *minimax_version(void) { return MM_VERSION; }
void minimax_free(void *p) { free(p); }

/* ---- opening ---- */

/* A field that has its name there too. */
#define OF(from, field) .field = (from)->field

static bool describe_plane(minimax_checkpoint *c, mm_public_tensor *x, const mm_pack_tensor *t, size_t index, unsigned p, mm_err *err) {
  uint32_t rank = x->tensor.rank;
  const mm_shard_plane *at = &c->shards.rank[rank].plane[index * MM_PACK_PLANES + p];
  mm_shape shape = mm_pack_plane_shape(t, p);
  minimax_plane *out = &x->plane[p];
  *out = (minimax_plane){.name = mm_arena_printf(&c->arena, err, "%s%s", t->name, t->plane[p].suffix),
                         .suffix = t->plane[p].suffix,
                         .dtype = mm_dtype_name(t->plane[p].dtype),
                         .data = x->packed.plane[p],
                         .bytes = at->bytes,
                         .dims = shape.rank,
                         .cell = {t->plane[p].cell_n, t->plane[p].cell_k},
                         .file = c->shards.pack.rank[rank].part[at->part].file,
                         .offset = at->offset};
  for (uint32_t i = 0; i < shape.rank && i < 3; i++) out->shape[i] = shape.dim[i];
  return out->name != NULL;
}

static minimax_piece describe_piece(const mm_pack *p, const mm_piece *piece, uint32_t rank) {
  const mm_cut *cut = &p->cut[piece->cut];
  minimax_piece out = {OF(piece, source), OF(piece, rows), OF(piece, local_at), OF(piece, local_rows),
                       .axis = cut->axis == MM_AXIS_NONE   ? 0
                               : cut->axis == MM_AXIS_ROWS ? 1
                                                           : 2};
  if (cut->axis == MM_AXIS_NONE) return out;
  const mm_range *own = &cut->rank[rank % p->tp];
  out.at = own->at;
  out.from = own->from;
  out.count = own->count;
  return out;
}

static bool describe_tensor(minimax_checkpoint *c, uint32_t rank, size_t index, mm_public_tensor *x, mm_err *err) {
  const mm_pack *p = &c->shards.pack;
  const mm_pack_tensor *t = &p->tensor[index];
  x->packed = mm_shards_tensor(&c->shards, rank, index);
  x->tensor = (minimax_tensor){OF(t, name),
                               .scheme = x->packed.scheme->name,
                               .rank = rank,
                               OF(t, stage),
                               OF(t, vector),
                               .matrices = t->lead,
                               .first_matrix = t->lead ? mm_pack_first_lead(p, t, rank) : 0,
                               .whole_matrices = t->whole_lead,
                               OF(t, rows),
                               OF(t, cols),
                               OF(t, whole_cols),
                               .planes = t->plane_count,
                               .pieces = t->piece_count,
                               OF(t, input_scale)};
  for (unsigned i = 0; i < t->piece_count; i++) x->piece[i] = describe_piece(p, &t->piece[i], rank);
  for (unsigned i = 0; i < t->plane_count; i++)
    if (!describe_plane(c, x, t, index, i, err)) return false;
  return true;
}

static bool describe_rank(minimax_checkpoint *c, uint32_t rank, mm_err *err) {
  const mm_pack *p = &c->shards.pack;
  mm_public_rank *r = &c->rank[rank];
  if (!c->shards.rank[rank].plane) return true;
  r->tensor = mm_calloc(p->tensor_count, sizeof *r->tensor, err);
  if (!r->tensor) return false;
  for (size_t i = 0; i < p->tensor_count; i++)
    if (mm_pack_holds(p, &p->tensor[i], rank) && !describe_tensor(c, rank, i, &r->tensor[r->count++], err)) return false;
  return true;
}

static bool describe(minimax_checkpoint *c, mm_err *err) {
  const mm_pack *p = &c->shards.pack;
  const mm_model *m = &p->model;
  if (mm_pack_placed(p))
    return mm_fail(err, MM_UNSUPPORTED, "E_VERSION", mm_at(p->dir, NULL),
                   "found experts placed by --place, which first_matrix cannot say; expected a conversion without it");
  if (p->attn_tp)
    return mm_fail(err, MM_UNSUPPORTED, "E_VERSION", mm_at(p->dir, NULL),
                   "found attention cut for %u of %u ranks by --attn-tp, which minimax_info cannot say; expected a conversion without it",
                   p->attn_tp, p->tp);
  c->plan = mm_digest_hex(&p->plan);
  c->info = (minimax_info){OF(p, dir),     OF(p, tool),  .plan = c->plan.text,      OF(p, quant),  OF(m, architecture), OF(p, tp),
                           OF(p, ep),      OF(p, pp),    .ranks = mm_pack_ranks(p), OF(m, layers), OF(m, hidden),       OF(m, vocab),
                           OF(m, experts), OF(m, top_k), OF(m, intermediate),       OF(m, heads),  OF(m, kv_heads),     OF(m, head_dim)};
  c->rank = mm_calloc(c->info.ranks, sizeof *c->rank, err);
  for (uint32_t r = 0; c->rank && r < c->info.ranks; r++)
    if (!describe_rank(c, r, err)) return false;
  return c->rank != NULL;
}

/* The path from the root, which still names the directory when the process has changed into another. As it was given where no such path
 * leads there: the working directory was removed, is too deep, or lies in one that this user may not search. NULL on failure. */
static const char *from_root(minimax_checkpoint *c, const char *dir, mm_err *err) {
  struct stat given_dir, found;
  if (dir[0] == '/' || stat(dir, &given_dir) != 0) return dir;
  char *here = getcwd(NULL, 0);
  if (!here) return dir;
  const char *path = mm_arena_printf(&c->arena, err, "%s/%s", strcmp(here, "/") == 0 ? "" : here, dir);
  free(here);
  const bool leads = path && strlen(path) + NAME_MAX < PATH_MAX && stat(path, &found) == 0 && mm_same_file(&given_dir, &found);
  return leads || !path ? path : dir;
}

/* rank NULL: every one. */
static minimax_checkpoint *open_some(const char *dir, const uint32_t *rank, size_t count, minimax_error *out) {
  mm_err err = {0};
  if (out) *out = (minimax_error){0};
  minimax_checkpoint *c = given(dir, &err) ? mm_calloc(1, sizeof *c, &err) : NULL;
  const char *path = c ? from_root(c, dir, &err) : NULL;
  bool ok = path && count <= UINT32_MAX &&
            (rank ? mm_shards_open_ranks(&c->shards, path, rank, (uint32_t)count, &err) : mm_shards_open(&c->shards, path, &err)) &&
            mm_bind_check(&c->shards, &err) && describe(c, &err);
  if (ok) return c;
  minimax_close(c);
  if (err.status == MM_OK)
    mm_fail(&err, MM_USAGE, "E_RANKS", mm_at(dir, NULL), "found %zu ranks asked for, expected fewer than 2^32", count);
  report(out, &err);
  return NULL;
}

minimax_checkpoint *minimax_open(const char *dir, minimax_error *err) { return open_some(dir, NULL, 0, err); }

minimax_checkpoint *minimax_open_ranks(const char *dir, const uint32_t *rank, size_t count, minimax_error *err) {
  static const uint32_t none;
  return open_some(rank || count == 0 ? dir : NULL, rank ? rank : &none, count, err);
}

void minimax_close(minimax_checkpoint *c) {
  if (!c) return;
  for (uint32_t r = 0; c->rank && r < c->info.ranks; r++) free(c->rank[r].tensor);
  free(c->rank);
  mm_arena_close(&c->arena);
  mm_shards_close(&c->shards);
  free(c);
}

const minimax_info *minimax_get_info(const minimax_checkpoint *c) { return c ? &c->info : NULL; }

int minimax_verify(const minimax_checkpoint *c, unsigned threads, minimax_error *out) {
  mm_err err = {0};
  if (threads == 0) threads = mm_pool_cpus();
  mm_either_way(given(c, &err) && mm_verify_any_rank(&c->shards.pack, &err) && mm_verify_files(&c->shards.pack, &err) &&
                mm_verify_blocks(&c->shards, threads, &err) && mm_verify_numbers(&c->shards, threads, &err) &&
                mm_dflash_check(&c->shards.pack, true, &err) && mm_shards_unchanged(&c->shards, &err));
  mm_err changed = {0}; /* what another directory of that name has is no damage of the one that was opened */
  const bool blamed = err.status == MM_BAD_INPUT || err.status == MM_INTEGRITY;
  return report(out, blamed && c && !mm_shards_unchanged(&c->shards, &changed) ? &changed : &err);
}

/* ---- tensors of a rank ---- */

int minimax_has_rank(const minimax_checkpoint *c, uint32_t rank) { return c && rank < c->info.ranks && c->rank[rank].tensor != NULL; }

size_t minimax_tensor_count(const minimax_checkpoint *c, uint32_t rank) { return minimax_has_rank(c, rank) ? c->rank[rank].count : 0; }

const minimax_tensor *minimax_tensor_at(const minimax_checkpoint *c, uint32_t rank, size_t i) {
  return i < minimax_tensor_count(c, rank) ? &c->rank[rank].tensor[i].tensor : NULL;
}

const minimax_tensor *minimax_find(const minimax_checkpoint *c, uint32_t rank, const char *name) {
  for (size_t i = 0, n = name ? minimax_tensor_count(c, rank) : 0; i < n; i++) {
    const mm_public_tensor *x = &c->rank[rank].tensor[i];
    if (strcmp(x->tensor.name, name) == 0) return &x->tensor;
    for (unsigned p = 0; p < x->tensor.planes; p++)
      if (strcmp(x->plane[p].name, name) == 0) return &x->tensor;
  }
  return NULL;
}

const minimax_plane *minimax_plane_at(const minimax_tensor *t, uint32_t i) {
  return t && i < t->planes ? &((const mm_public_tensor *)(const void *)t)->plane[i] : NULL;
}

const minimax_piece *minimax_piece_at(const minimax_tensor *t, uint32_t i) {
  return t && i < t->pieces ? &((const mm_public_tensor *)(const void *)t)->piece[i] : NULL;
}

/* Rows [row, row + rows) of `extent`. */
static bool inside(const char *what, const char *name, uint32_t row, uint32_t rows, uint32_t extent, mm_err *err) {
  if (row <= extent && rows <= extent - row) return true;
  return mm_fail(err, MM_USAGE, "E_USAGE", mm_at(NULL, name), "found %s %u to %llu asked for, expected them below %u", what, row,
                 (unsigned long long)row + rows, extent);
}

int minimax_unpack(const minimax_tensor *t, uint32_t matrix, uint32_t row, uint32_t rows, float *out, minimax_error *error) {
  mm_err err = {0};
  const mm_public_tensor *x = (const mm_public_tensor *)(const void *)t;
  if (given(t && (out || rows == 0), &err) && inside("matrix", t->name, matrix, 1, x->packed.lead, &err) &&
      inside("rows", t->name, row, rows, x->packed.n, &err))
    mm_unpack(&x->packed, matrix, row, rows, out);
  return report(error, &err);
}

/* ---- source matrices ---- */

/* A kv_scale of the source stands in two tensors, one after the other, and is one matrix. */
static bool first_of_name(const mm_pack *p, size_t tensor, unsigned piece) {
  return tensor == 0 || strcmp(p->tensor[tensor - 1].piece[0].source, p->tensor[tensor].piece[piece].source) != 0;
}

/* Counts sources; stops at number `wanted`, which *out then is. */
static size_t each_source(const minimax_checkpoint *c, size_t wanted, mm_whole *out) {
  const mm_pack *p = &c->shards.pack;
  size_t n = 0;
  for (size_t i = 0; i < p->tensor_count; i++) {
    const mm_pack_tensor *t = &p->tensor[i];
    uint32_t experts = t->whole_lead ? t->whole_lead : 1;
    for (unsigned j = 0; j < t->piece_count; j++) {
      if (!first_of_name(p, i, j)) continue;
      if (wanted - n < experts) {
        *out = (mm_whole){&c->shards, i, j, (uint32_t)(wanted - n)};
        return wanted;
      }
      n += experts;
    }
  }
  return n;
}

size_t minimax_source_count(const minimax_checkpoint *c) {
  mm_whole none;
  return c ? each_source(c, SIZE_MAX, &none) : 0;
}

char *minimax_source_name(const minimax_checkpoint *c, size_t i, minimax_error *error) {
  mm_err err = {0};
  mm_whole w = {0};
  char name[512], *out = NULL;
  const bool open = given(c, &err);
  if (open) each_source(c, i, &w);
  if (open && !w.s)
    mm_fail(&err, MM_USAGE, "E_USAGE", mm_at(c->info.dir, NULL), "found source %zu asked for, expected less than %zu", i,
            minimax_source_count(c));
  else if (open && !(out = strdup(mm_whole_name(&w, name, sizeof name))))
    mm_fail_memory(&err, sizeof name);
  report(error, &err);
  return out;
}

static bool find_source(const minimax_checkpoint *c, const char *source, mm_whole *w, mm_err *err) {
  if (!given(c && source, err)) return false;
  if (mm_whole_find(&c->shards, source, w)) return true;
  mm_fail(err, MM_USAGE, "E_MISSING", mm_at(c->info.dir, source), "found no source matrix of this name");
  return false;
}

int minimax_source_shape(const minimax_checkpoint *c, const char *source, uint32_t shape[2], minimax_error *error) {
  mm_err err = {0};
  mm_whole w;
  if (given(shape, &err) && find_source(c, source, &w, &err)) {
    shape[0] = mm_whole_rows(&w);
    shape[1] = mm_whole_cols(&w);
  }
  return report(error, &err);
}

int minimax_unshard(const minimax_checkpoint *c, const char *source, uint32_t row, uint32_t rows, float *out, minimax_error *error) {
  mm_err err = {0};
  mm_whole w;
  if (given(out || rows == 0, &err) && find_source(c, source, &w, &err) && inside("rows", source, row, rows, mm_whole_rows(&w), &err))
    mm_either_way(mm_whole_unpack(&w, row, rows, out, &err));
  return report(error, &err);
}

static bool find_grid(const minimax_checkpoint *c, const char *source, uint32_t i, mm_whole *w, minimax_grid *out, mm_err *err) {
  if (!find_source(c, source, w, err)) return false;
  const mm_pack_tensor *t = &c->shards.pack.tensor[w->tensor];
  if (!inside("plane", source, i, 1, t->plane_count, err)) return false;
  const mm_pack_plane *p = &t->plane[i];
  *out = (minimax_grid){.dtype = mm_dtype_name(p->dtype),
                        .suffix = p->suffix,
                        .lines = mm_cells(mm_whole_rows(w), p->cell_n),
                        .width = mm_cells(mm_whole_cols(w), p->cell_k),
                        .cell = {p->cell_n, p->cell_k}};
  out->bytes = (uint64_t)out->lines * out->width * mm_dtype_size(p->dtype);
  return true;
}

int minimax_source_plane(const minimax_checkpoint *c, const char *source, uint32_t i, minimax_grid *out, minimax_error *error) {
  mm_err err = {0};
  mm_whole w;
  mm_either_way(given(out, &err) && find_grid(c, source, i, &w, out, &err));
  return report(error, &err);
}

int minimax_unshard_plane(const minimax_checkpoint *c, const char *source, uint32_t i, void *out, minimax_error *error) {
  mm_err err = {0};
  mm_whole w;
  minimax_grid g;
  if (given(out, &err) && find_grid(c, source, i, &w, &g, &err)) mm_either_way(mm_whole_cells(&w, i, 0, g.lines, out, NULL, NULL, &err));
  return report(error, &err);
}
