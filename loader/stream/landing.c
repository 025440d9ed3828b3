/* Planning landings (landing.h). */
#include "loader/stream/landing.h"

#include <stdlib.h>

/* ---- places ---- */

bool mm_landing_place(mm_landing_plan *p, uint64_t bytes, bool zero, uint64_t *at, mm_err *err) {
  uint64_t end;
  if (!mm_add(p->bytes, bytes, &end) || !mm_add(end, 2 * MM_LANDING_ALIGN, &end)) return mm_fail_memory(err, bytes);
  if (!MM_GROW(p->hole, &p->holes_cap, p->holes + 1, err)) return false;
  *at = p->bytes;
  p->bytes = mm_round_up(*at + bytes + MM_LANDING_ALIGN, MM_LANDING_ALIGN);
  const uint64_t from = zero ? *at : *at + bytes;
  const bool joined = p->holes > 0 && p->hole[p->holes - 1].at + p->hole[p->holes - 1].bytes == from;
  if (!joined) p->hole[p->holes++].at = from;
  p->hole[p->holes - 1].bytes = p->bytes - p->hole[p->holes - 1].at;
  return true;
}

static bool add_file(mm_landing_plan *p, const void *origin, mm_read_file f, mm_err *err) {
  if (!MM_GROW(p->file, &p->file_cap, p->files + 1, err) || !MM_GROW(p->origin, &p->origin_cap, p->files + 1, err)) return false;
  p->file[p->files] = f;
  p->origin[p->files++] = origin;
  return true;
}

/* The file that holds a plane; what is in no mapping is a file of its own, in memory. */
static bool find_file(mm_landing_plan *p, const void *plane, uint64_t bytes, uint32_t *file, uint64_t *offset, mm_err *err) {
  mm_mapped m;
  const bool mapped = mm_map_find(plane, &m);
  *offset = mapped ? m.offset : 0;
  for (*file = 0; mapped && *file < p->files; ++*file)
    if (p->origin[*file] == m.data) return true;
  *file = p->files;
  return mapped ? add_file(p, m.data, (mm_read_file){.path = m.path, .id = m.id}, err)
                : add_file(p, NULL, (mm_read_file){.memory = plane, .size = bytes}, err);
}

static bool grow_groups(mm_landing_plan *p, uint32_t group, mm_err *err) {
  if (!MM_GROW(p->left, &p->left_cap, (size_t)group + 1, err) || !MM_GROW(p->full, &p->full_cap, (size_t)group + 1, err)) return false;
  while (p->groups <= group) p->left[p->groups++] = 0;
  return true;
}

static uint64_t parts(const mm_landing *l) { return l->part ? l->bytes / l->part : 1; }

static bool add(mm_landing_plan *p, const mm_packed *w, unsigned plane, const char *name, mm_landing l, mm_err *err) {
  const void *from = w->plane[plane];
  if (!from) return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, name), "found no plane %u", plane);
  if (!MM_GROW(p->landing, &p->landings_cap, p->landings + 1, err) || !MM_GROW(p->want, &p->want_cap, p->landings + 1, err) ||
      !MM_GROW(p->arrived, &p->arrived_cap, p->landings + 1, err) || !grow_groups(p, l.group + (uint32_t)parts(&l) - 1, err))
    return false;
  uint32_t file;
  uint64_t offset;
  if (!find_file(p, from, l.bytes, &file, &offset, err)) return false;
  p->want[p->landings] = (mm_read_want){file, offset, l.bytes, p->landings, l.part};
  p->arrived[p->landings] = 0;
  p->landing[p->landings++] = l;
  p->file_bytes += l.bytes;
  for (uint32_t i = 0; i < parts(&l); i++) p->left[l.group + i] += l.bytes / parts(&l);
  return true;
}

/* ---- weights ---- */

bool mm_landing_layout_of(const mm_packed *w, mm_landing_layout *y) {
  *y = (mm_landing_layout){0};
  switch (w->scheme->code) {
    case MM_CODE_PLAIN: y->bits = 16; break;
    case MM_CODE_E4M3: y->bits = 8; break;
    case MM_CODE_INT8: return false;
    case MM_CODE_INT4:
    case MM_CODE_INT4_OFFSET:
    case MM_CODE_E2M1: y->bits = 4; break;
  }
  if (w->scheme->code == MM_CODE_PLAIN && w->scheme->plane[0].dtype != MM_BF16) return false;
  if (mm_has_zeros(w->scheme)) return false;
  y->pitch = mm_round_up((uint64_t)w->k * y->bits / 8, 16);
  if (w->scheme->plane_count == 1) return true;
  const uint32_t columns = mm_cells(w->k, w->cell[1].k);
  y->byte_scales = w->scheme->code == MM_CODE_E2M1 || mm_has_exponents(w);
  y->scale_pitch = y->byte_scales ? mm_round_up(columns, 16) : columns;
  y->scales = (uint64_t)w->lead * (y->byte_scales ? w->n : mm_cells(w->n, w->cell[1].n)) * y->scale_pitch;
  y->global = y->byte_scales && w->scheme->plane_count == 3;
  y->global_factor = 256; /* the 2^8 that the kernels leave to it */
  return true;
}

static uint64_t stored_bytes(const mm_packed *w, unsigned plane) {
  return w->lead * mm_plane_elements(w->n, w->k, w->cell[plane]) * mm_dtype_size(w->scheme->plane[plane].dtype);
}

static mm_landing codes_of(const mm_packed *w, const mm_landing_layout *y) {
  mm_landing l = {.row = (uint64_t)w->k * y->bits / 8, .pitch = y->pitch, .nibbles = y->bits == 4 ? w : NULL};
  l.bytes = (uint64_t)w->lead * w->n * l.row;
  l.how = l.row == l.pitch ? MM_LAND_AS_IS : MM_LAND_SPREAD;
  return l;
}

static mm_landing scales_of(const mm_packed *w, const mm_landing_layout *y) {
  mm_landing l = {.bytes = stored_bytes(w, 1), .from = w->scheme->plane[1].dtype, .factor = 1};
  if (y->byte_scales) {
    l.row = mm_cells(w->k, w->cell[1].k), l.pitch = y->scale_pitch;
    l.how = l.row == l.pitch ? MM_LAND_AS_IS : MM_LAND_SPREAD;
  } else {
    l.how = l.from == MM_F32 ? MM_LAND_AS_IS : MM_LAND_WIDEN;
  }
  return l;
}

/* True if the codes of each matrix can land without the other matrices' codes. Words of four-bit codes are put in order in place only if
 * rows lie close and begin at a multiple of the word size in the file, since the file is read by whole pages. */
static bool comes_by_matrix(const mm_packed *w, const mm_landing *l) {
  mm_mapped m;
  const uint64_t offset = mm_map_find(w->plane[0], &m) ? m.offset : 0;
  return !l->nibbles || (l->how == MM_LAND_AS_IS && offset % 4 == 0);
}

static bool can_widen(mm_dtype t) { return t == MM_F32 || t == MM_BF16 || t == MM_F16 || t == MM_U8; }

bool mm_landing_matrix(mm_landing_plan *p, const mm_packed *w, const char *name, const mm_landing_layout *y, mm_landing_groups groups,
                       mm_landing_places *out, mm_err *err) {
  const uint32_t group = groups.group;
  mm_landing code = codes_of(w, y), scale = {0};
  mm_landing global = {.how = MM_LAND_WIDEN, .from = MM_F32, .factor = y->global_factor};
  code.group = scale.group = global.group = group;
  if (groups.by_matrix && comes_by_matrix(w, &code)) code.group = groups.each, code.part = code.bytes / w->lead;
  if (!mm_landing_place(p, (uint64_t)w->lead * w->n * y->pitch, code.how == MM_LAND_SPREAD, &code.at, err)) return false;
  if (y->scales) {
    scale = scales_of(w, y);
    scale.group = group;
    if (scale.how == MM_LAND_WIDEN && !can_widen(scale.from))
      return mm_fail(err, MM_BUG, "E_BUG", mm_at(NULL, name), "found scales of type %s", mm_dtype_name(scale.from));
    if (!mm_landing_place(p, y->scales * (y->byte_scales ? 1 : sizeof(float)), scale.how == MM_LAND_SPREAD, &scale.at, err)) return false;
  }
  if (y->global) {
    global.bytes = stored_bytes(w, 2);
    if (!mm_landing_place(p, w->lead * sizeof(float), false, &global.at, err)) return false;
  }
  *out = (mm_landing_places){code.at, scale.at, global.at};
  if (!w->plane[0]) return true;
  return (!y->scales || add(p, w, 1, name, scale, err)) && (!y->global || add(p, w, 2, name, global, err)) && add(p, w, 0, name, code, err);
}

bool mm_landing_values(mm_landing_plan *p, const mm_packed *w, const char *name, uint32_t group, uint64_t *at, bool *lands, mm_err *err) {
  mm_landing l = {.from = w->scheme->plane[0].dtype, .factor = 1, .bytes = stored_bytes(w, 0), .group = group};
  l.how = l.from == MM_F32 ? MM_LAND_AS_IS : MM_LAND_WIDEN;
  *lands = w->plane[0] && w->scheme->code == MM_CODE_PLAIN && can_widen(l.from);
  if (!mm_landing_place(p, (uint64_t)w->lead * w->n * w->k * sizeof(float), false, &l.at, err)) return false;
  *at = l.at;
  if (*lands) return add(p, w, 0, name, l, err);
  l.how = MM_LAND_NOWHERE;
  for (unsigned i = 0; w->plane[0] && i < w->scheme->plane_count; i++) {
    l.bytes = stored_bytes(w, i);
    if (!add(p, w, i, name, l, err)) return false;
  }
  return true;
}

/* ---- digests ---- */

static void find_digests(mm_landing_plan *p, const mm_shards *s, uint32_t rank) {
  for (uint32_t i = 0; i < p->files; i++)
    for (size_t k = 0; p->origin[i] && k < s->pack.rank[rank].part_count; k++)
      if (s->rank[rank].map[k].data == p->origin[i]) p->file[i].digest = s->pack.rank[rank].part[k].block;
}

bool mm_landing_verify(mm_landing_plan *p, const mm_shards *digests, uint32_t rank, mm_err *err) {
  find_digests(p, digests, rank);
  for (uint32_t i = 0; i < p->files; i++)
    if (p->origin[i] && !p->file[i].digest)
      return mm_fail(err, MM_BUG, "E_BUG", mm_at(p->file[i].path, NULL), "found no digests of this file in rank %u", rank);
  return true;
}

void mm_landing_close(mm_landing_plan *p) {
  MM_FREE(p->landing, p->want, p->file, p->origin, p->hole, p->left, p->full, p->arrived);
  *p = (mm_landing_plan){0};
}

/* ---- arriving ---- */

bool mm_landing_find(const mm_landing_plan *p, const mm_chunk *c, size_t want, mm_landing_piece *out) {
  const mm_read_want *w = &p->want[want];
  const uint64_t from = mm_max(w->offset, c->offset), to = mm_min(w->offset + w->bytes, c->offset + c->bytes);
  if (from >= to) return false;
  *out = (mm_landing_piece){w->tag, from - w->offset, to - from, from - c->offset};
  return true;
}

static void take_off(mm_landing_plan *p, uint32_t group, uint64_t bytes) {
  if (bytes && (p->left[group] -= bytes) == 0) p->full[p->fulls++] = group;
}

/* Rows that lie close hold no words but their own, and a word is whole with its last byte: pieces come in order, or cut at words. Rows
 * that were spread to the pitch are put in order with their padding, once all are there. */
void mm_landing_arrive(mm_landing_plan *p, const mm_landing_piece *x, uint64_t *word, uint64_t *words) {
  const mm_landing *l = &p->landing[x->landing];
  p->arrived[x->landing] += x->bytes;
  const bool all = p->arrived[x->landing] == l->bytes, spread = l->how == MM_LAND_SPREAD;
  const uint64_t from = spread ? 0 : x->first / 4, to = spread ? l->bytes / l->row * l->pitch / 4 : (x->first + x->bytes) / 4;
  *word = from;
  *words = l->nibbles && (all || !spread) ? to - from : 0;
  if (l->part == 0) take_off(p, l->group, x->bytes);
  for (uint64_t at = x->first, end = at + x->bytes, next; l->part && at < end; at = next) {
    next = mm_min(end, (at / l->part + 1) * l->part);
    take_off(p, l->group + (uint32_t)(at / l->part), next - at);
  }
}

void mm_landing_prefetch(const mm_landing_plan *p, mm_reader *r, uint32_t first, uint32_t count) {
  for (size_t i = 0; i < p->landings; i++) {
    const mm_read_want *w = &p->want[i];
    const mm_landing *l = &p->landing[w->tag];
    const uint64_t from = mm_max(first, l->group), to = mm_min((uint64_t)first + count, l->group + parts(l));
    if (l->part && from < to) mm_reader_prefetch(r, w->file, w->offset + (from - l->group) * l->part, (to - from) * l->part);
  }
}
