/* Opening a packed checkpoint for use: what the manifest promises is found in the part headers, then mapped. */
#include "loader/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "formats/safetensors.h"
#include "loader/companions.h"

/* The parts of one rank while they are checked. */
typedef struct opening {
  const mm_pack *pack;
  uint32_t rank;
  mm_shard_rank *out;
  mm_st *st;   /* [part_count] */
  bool **used; /* [part_count][st.count]: named by the manifest */
  uint32_t at; /* the part that the last plane was found in: most often the next one is there too */
  mm_err *err;
} opening;

/* A part says itself whose part it is and of which plan, so that files of two runs, ranks or places never mix. */
static bool check_metadata(const opening *o, const mm_st *st, uint32_t part_index) {
  const mm_hex plan = mm_digest_hex(&o->pack->plan);
  const char *const expected[][2] = {{"format", MM_PACK_FORMAT},
                                     {"version", MM_FORMATTED(16, "%d", mm_pack_version(o->pack))},
                                     {"rank", MM_FORMATTED(16, "%u", o->rank)},
                                     {"tp", MM_FORMATTED(16, "%u", o->pack->tp)},
                                     {"part", MM_FORMATTED(16, "%u", part_index)},
                                     {"plan", plan.text}};
  for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
    const char *found = mm_st_meta_find(st, expected[i][0]);
    if (found && strcmp(found, expected[i][1]) == 0) continue;
    return mm_fail(o->err, MM_INTEGRITY, "E_PART", mm_at(st->path, NULL), "metadata \"%s\": found %s, expected %s", expected[i][0],
                   found ? MM_ESCAPED(128, found) : "nothing", expected[i][1]);
  }
  return true;
}

/* Size against the manifest and against the header before a byte is mapped; one file, not two of the same name. */
static bool open_part(opening *o, uint32_t i) {
  const mm_part *part = &o->pack->rank[o->rank].part[i];
  mm_file f = MM_FILE_NONE;
  mm_st *st = &o->st[i];
  const mm_path path = mm_path_of(o->pack->dir, part->file);
  bool ok = mm_file_open(&f, path.text, o->err) && mm_size_is(path.text, f.size, part->size, o->err) &&
            mm_st_open(st, path.text, MM_INTEGRITY, o->err);
  if (ok && memcmp(&st->id, &f.id, sizeof f.id) != 0)
    ok = mm_fail(o->err, MM_IO, "E_CHANGED", mm_at(path.text, NULL), "the file was changed while it was opened");
  ok = ok && check_metadata(o, st, i) && (o->used[i] = mm_calloc(st->count, sizeof(bool), o->err)) &&
       mm_map_open(&o->out->map[i], &f, path.text, o->err);
  mm_file_close(&f);
  return ok || mm_fail_damaged(o->err, o->err);
}

static bool place_plane(opening *o, const mm_pack_tensor *t, unsigned p, mm_shard_plane *out) {
  size_t parts = o->pack->rank[o->rank].part_count;
  char found[128], expected[128];
  const char *name = MM_FORMATTED(512, "%s%s", t->name, t->plane[p].suffix);
  uint32_t part = o->at;
  const mm_st_tensor *at = part < parts ? mm_st_find(&o->st[part], name) : NULL;
  for (uint32_t i = 0; !at && i < parts; i++) at = mm_st_find(&o->st[part = i], name);
  if (!at)
    return mm_fail(o->err, MM_INTEGRITY, "E_MISSING", mm_at(o->pack->dir, name), "found in no part of rank %u, expected in one", o->rank);
  o->at = part;
  const char *file = o->st[part].path;
  mm_shape shape = mm_pack_plane_shape(t, p);
  if (at->dtype != t->plane[p].dtype || !mm_shape_equal(&at->shape, &shape))
    return mm_fail(o->err, MM_INTEGRITY, "E_SHAPE", mm_at(file, name), "found %s %s, expected %s %s", mm_dtype_name(at->dtype),
                   mm_shape_text(&at->shape, found, sizeof found), mm_dtype_name(t->plane[p].dtype),
                   mm_shape_text(&shape, expected, sizeof expected));
  size_t align = mm_max(1, mm_dtype_size(at->dtype));
  if (at->offset % align != 0)
    return mm_fail(o->err, MM_INTEGRITY, "E_ALIGN", mm_at_offset(file, name, at->offset), "found this offset, expected a multiple of %zu",
                   align);
  o->used[part][at - o->st[part].tensor] = true;
  *out = (mm_shard_plane){.part = part, .offset = at->offset, .bytes = at->bytes};
  return true;
}

static bool place_planes(opening *o) {
  for (size_t i = 0; i < o->pack->tensor_count; i++)
    for (unsigned p = 0; mm_pack_holds(o->pack, &o->pack->tensor[i], o->rank) && p < o->pack->tensor[i].plane_count; p++)
      if (!place_plane(o, &o->pack->tensor[i], p, &o->out->plane[i * MM_PACK_PLANES + p])) return false;
  for (size_t part = 0; part < o->pack->rank[o->rank].part_count; part++)
    for (size_t i = 0; i < o->st[part].count; i++)
      if (!o->used[part][i])
        return mm_fail(o->err, MM_INTEGRITY, "E_EXTRA", mm_at(o->st[part].path, o->st[part].tensor[i].name),
                       "found a tensor that is not in the manifest, expected none");
  return true;
}

static bool open_rank(mm_shards *s, uint32_t rank, mm_err *err) {
  size_t parts = s->pack.rank[rank].part_count;
  opening o = {.pack = &s->pack, .rank = rank, .out = &s->rank[rank], .err = err};
  o.st = mm_calloc(parts, sizeof *o.st, err);
  o.used = mm_calloc(parts, sizeof *o.used, err);
  o.out->map = mm_calloc(parts, sizeof *o.out->map, err);
  o.out->plane = mm_calloc(s->pack.tensor_count * MM_PACK_PLANES, sizeof *o.out->plane, err);
  bool ok = o.st && o.used && o.out->map && o.out->plane;
  for (uint32_t i = 0; ok && i < parts; i++) ok = open_part(&o, i);
  ok = ok && place_planes(&o);
  for (size_t i = 0; i < parts; i++) {
    if (o.st) mm_st_close(&o.st[i]);
    if (o.used) free(o.used[i]);
  }
  free(o.st);
  free(o.used);
  return ok;
}

/* Codes are stored on the scheme's own grid, scales on it or on a finer one. */
static bool same_or_finer(uint32_t stored, uint32_t scheme, bool scale) {
  return stored == scheme || (scale && stored != 0 && (scheme == 0 || scheme % stored == 0));
}

/* Each stored cell lies in one cell of the whole matrix, on every rank: a piece begins with a cell, and local and whole lines differ by
 * whole cells. Codes cannot stand for lines of two ranks: theirs begin and end with a cell. */
static bool cut_along_cells(const mm_pack *pack, const mm_pack_tensor *t, unsigned plane, bool codes, mm_err *err) {
  const uint32_t n = t->plane[plane].cell_n, k = t->plane[plane].cell_k;
  for (unsigned i = 0; i < t->piece_count; i++) {
    const mm_piece *x = &t->piece[i];
    const mm_cut *c = &pack->cut[x->cut];
    const uint32_t cell = c->axis == MM_AXIS_ROWS ? n : k;
    const uint64_t base = c->axis == MM_AXIS_ROWS ? x->local_at : 0;
    if (n > 1 && x->local_at % n != 0)
      return mm_fail(err, MM_INTEGRITY, "E_SCHEME", mm_at(pack->dir, t->name),
                     "plane %u, piece %u: found it at row %u, expected a multiple of its cell's %u rows", plane, i, x->local_at, n);
    for (uint32_t r = 0; c->axis != MM_AXIS_NONE && cell > 1 && r < pack->tp; r++) {
      const mm_range *g = &c->rank[r];
      if (g->count == 0) continue;
      if ((base + g->at) % cell != g->from % cell || (codes && (g->from % cell != 0 || g->count % cell != 0)))
        return mm_fail(
            err, MM_INTEGRITY, "E_SCHEME", mm_at(pack->dir, t->name),
            "plane %u, piece %u, rank %u of its stage: found a cut of %u lines at %u, kept at %llu, expected it along cells of %u", plane,
            i, r, g->count, g->from, (unsigned long long)(base + g->at), cell);
    }
  }
  return true;
}

/* Checks the properties that unpack takes for granted. */
static bool check_scheme(const mm_pack *pack, const mm_pack_tensor *t, mm_err *err) {
  const mm_scheme *s = mm_scheme_find(t->scheme);
  if (!s)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(pack->dir, t->name), "found unknown scheme \"%s\", expected one of this version",
                   MM_ESCAPED(64, t->scheme));
  bool same = t->plane_count == s->plane_count;
  for (unsigned p = 0; same && p < t->plane_count; p++) {
    const mm_pack_plane *a = &t->plane[p];
    const mm_plane *b = &s->plane[p];
    same = a->dtype == b->dtype && strcmp(a->suffix, b->suffix) == 0 && same_or_finer(a->cell_n, b->cell.n, b->scale) &&
           same_or_finer(a->cell_k, b->cell.k, b->scale);
  }
  if (!same) return mm_fail(err, MM_INTEGRITY, "E_SCHEME", mm_at(pack->dir, t->name), "found other planes, expected those of %s", s->name);
  for (unsigned p = 0; p < t->plane_count; p++)
    if (!cut_along_cells(pack, t, p, !s->plane[p].scale, err)) return false;
  return t->input_scale == 0 || mm_act_formats[s->act].fixed ||
         mm_fail(err, MM_INTEGRITY, "E_SCHEME", mm_at(pack->dir, t->name), "found an input_scale, expected none of %s", s->name);
}

/* A grid before cuts is the scheme's or finer, what is stored the same or finer again. */
static bool check_grids(const mm_pack *pack, const mm_pack_tensor *t, mm_err *err) {
  const mm_scheme *s = mm_scheme_find(t->scheme);
  for (unsigned p = 0; p < t->plane_count; p++) {
    const mm_pack_plane *a = &t->plane[p];
    const mm_plane *b = &s->plane[p];
    if (a->grid.known && !(b->scale && same_or_finer(a->grid.n, b->cell.n, true) && same_or_finer(a->grid.k, b->cell.k, true) &&
                           same_or_finer(a->cell_n, a->grid.n, true) && same_or_finer(a->cell_k, a->grid.k, true)))
      return mm_fail(err, MM_INTEGRITY, "E_SCHEME", mm_at(pack->dir, t->name),
                     "found a grid of [%u, %u] over cells of [%u, %u], expected one between them and the %s of [%u, %u]", a->grid.n,
                     a->grid.k, a->cell_n, a->cell_k, s->name, b->cell.n, b->cell.k);
  }
  return true;
}

/* The manifest, with the digests of these ranks or of all (NULL), and room for all ranks. */
static bool open_pack(mm_shards *s, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err) {
  *s = (mm_shards){0};
  if (!mm_archive_refuse(dir, err) || !mm_unpacked_refuse(dir, err)) return false;
  if (rank ? !mm_pack_open_ranks(&s->pack, dir, rank, count, err) : !mm_pack_open(&s->pack, dir, err)) return mm_fail_damaged(err, err);
  for (size_t i = 0; i < s->pack.tensor_count; i++)
    if (!check_scheme(&s->pack, &s->pack.tensor[i], err) || !check_grids(&s->pack, &s->pack.tensor[i], err)) return false;
  return (s->rank = mm_calloc(mm_pack_ranks(&s->pack), sizeof *s->rank, err));
}

static bool open_ranks(mm_shards *s, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err) {
  if (!open_pack(s, dir, rank, count, err)) return false;
  for (uint32_t i = 0; i < count; i++) {
    if (rank[i] >= mm_pack_ranks(&s->pack))
      return mm_fail(err, MM_USAGE, "E_RANKS", mm_at(dir, NULL), "found rank %u, expected less than %u", rank[i], mm_pack_ranks(&s->pack));
    if (!s->rank[rank[i]].plane && !open_rank(s, rank[i], err)) return false;
  }
  return true;
}

bool mm_shards_open_ranks(mm_shards *s, const char *dir, const uint32_t *rank, uint32_t count, mm_err *err) {
  mm_dir d = mm_dir_open(dir);
  return mm_dir_close(&d, dir, open_ranks(s, dir, rank, count, err), err);
}

static bool open_all(mm_shards *s, const char *dir, mm_err *err) {
  if (!open_pack(s, dir, NULL, 0, err)) return false;
  for (uint32_t r = 0; r < mm_pack_ranks(&s->pack); r++)
    if (s->pack.rank[r].part_count > 0 && !open_rank(s, r, err)) return false;
  return true;
}

bool mm_shards_open(mm_shards *s, const char *dir, mm_err *err) {
  mm_dir d = mm_dir_open(dir);
  return mm_dir_close(&d, dir, open_all(s, dir, err), err);
}

bool mm_shards_unchanged(const mm_shards *s, mm_err *err) {
  for (uint32_t r = 0; r < mm_pack_ranks(&s->pack); r++)
    for (size_t i = 0; s->rank[r].map && i < s->pack.rank[r].part_count; i++) {
      mm_mapped at;
      if (!s->rank[r].map[i].data || !mm_map_find(s->rank[r].map[i].data, &at)) continue;
      const mm_file f = {-1, at.size, *at.id};
      if (!mm_file_unchanged(&f, at.path, err)) return false;
    }
  return true;
}

void mm_shards_close(mm_shards *s) {
  for (uint32_t r = 0; s->rank && r < mm_pack_ranks(&s->pack); r++) {
    for (size_t i = 0; s->rank[r].map && i < s->pack.rank[r].part_count; i++) mm_map_close(&s->rank[r].map[i]);
    free(s->rank[r].map);
    free(s->rank[r].plane);
  }
  free(s->rank);
  if (s->copied) munmap(s->copied, s->copied_bytes);
  mm_pack_close(&s->pack);
  *s = (mm_shards){0};
}

mm_packed mm_shards_tensor(const mm_shards *s, uint32_t rank, size_t i) {
  const mm_pack_tensor *t = &s->pack.tensor[i];
  const mm_shard_rank *r = &s->rank[rank];
  mm_packed out = {.scheme = mm_scheme_find(t->scheme),
                   .lead = t->lead ? t->lead : 1,
                   .n = t->rows,
                   .k = t->cols,
                   .tensor = (uint32_t)i,
                   .input_scale = t->input_scale};
  const mm_cut *cut = &s->pack.cut[t->piece[0].cut];
  if (cut->axis == MM_AXIS_COLS) {
    const mm_range *own = &cut->rank[rank % s->pack.tp];
    out.first_k = own->from - own->at; /* padding in front is another rank's */
    out.whole_k = cut->whole;
    for (uint32_t j = 0; j < s->pack.tp; j++) out.cut_k = (uint32_t)mm_gcd(out.cut_k, cut->rank[j].from);
  }
  for (unsigned p = 0; p < t->plane_count; p++) {
    const mm_shard_plane *at = &r->plane[i * MM_PACK_PLANES + p];
    if (r->map) out.plane[p] = at->view ? at->view : r->map[at->part].data + at->offset;
    out.cell[p] = (mm_cell){t->plane[p].cell_n, t->plane[p].cell_k};
  }
  return out;
}
