/* Where every plane of every packed tensor lies: parts in layer order, alignment by order alone, headers, exact sizes, the plan's
 * digest. All ranks of a stage have the same shapes, so offsets (from a part's data start) are the same on each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan/plan.h"

#define DATA_ALIGN 4096
/* Parts of a rank where none gives their size. Source files are freed after a part, so one part on all ranks is on the disk twice: 1/32 of
 * the output. */
#define SMALL_PARTS 32

/* Sizes that are multiples of 4 KiB first, then of 256, 16, 4 and 2, then the rest: what comes first keeps the next aligned, and every
 * element begins on a multiple of its own size. */
static const uint64_t align_class[] = {DATA_ALIGN, 256, 16, 4, 2, 1};
#define ALIGN_CLASSES (sizeof align_class / sizeof *align_class)

static size_t class_of(uint64_t bytes) {
  size_t i = 0;
  while (bytes % align_class[i] != 0) i++;
  return i;
}

typedef struct mm_slot { /* one stored tensor of a part: a plane of a tensor, or of one piece of it */
  uint32_t tensor, piece;
  unsigned plane;
} mm_slot;

static bool open_part(mm_plan *p, size_t *cap, uint32_t stage, mm_err *err) {
  if (!MM_GROW(p->part, cap, p->part_count + 1, err)) return false;
  mm_plan_part *x = &p->part[p->part_count];
  *x = (mm_plan_part){.stage = stage, .file = mm_arena_alloc(&p->pack.arena, p->pack.tp * sizeof *x->file, err)};
  if (!x->file) return false;
  if (p->part_count > 0 && x[-1].stage == stage) x->number = x[-1].number + 1;
  p->part_count++;
  return true;
}

/* Sizes every plane. *all: bytes of one rank of each stage. */
static bool size_planes(mm_plan *p, uint64_t *all, mm_err *err) {
  *all = 0;
  for (uint32_t i = 0; i < p->pack.tensor_count; i++)
    for (uint32_t j = 0; j < mm_plan_stored(p, i); j++)
      for (unsigned k = 0; k < p->pack.tensor[i].plane_count; k++) {
        uint64_t *bytes = &p->tensor[i].place[j][k].bytes;
        mm_shape s = p->layout->shape(p, i, j, k);
        if (!mm_shape_bytes(&s, p->pack.tensor[i].plane[k].dtype, bytes) || __builtin_add_overflow(*all, *bytes, all))
          return mm_fail(err, MM_LIMIT, "E_SIZE", mm_at(NULL, p->pack.tensor[i].name),
                         "found a size beyond 64 bits, expected a smaller one");
      }
  return true;
}

/* A part ends with its stage, and before it would exceed part_size. */
static bool fill_parts(mm_plan *p, mm_err *err) {
  uint64_t in_part = 0;
  size_t cap = 0;
  for (uint32_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    uint64_t total = 0;
    for (uint32_t j = 0; j < mm_plan_stored(p, i); j++)
      for (unsigned k = 0; k < t->plane_count; k++) total += p->tensor[i].place[j][k].bytes + 512; /* its share of the header */
    bool fits = p->part_count > 0 && p->part[p->part_count - 1].stage == t->stage && in_part + total <= p->part_size;
    if (!fits && !open_part(p, &cap, t->stage, err)) return false;
    in_part = total + (fits ? in_part : DATA_ALIGN);
    p->tensor[i].part = p->part_count - 1;
  }
  return true;
}

/* The planes that one part stores, in file order. */
static mm_slot *order_part(const mm_plan *p, uint32_t part, size_t *count, mm_err *err) {
  size_t n = 0, all = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].part == part) all += mm_plan_stored(p, i) * p->pack.tensor[i].plane_count;
  mm_slot *slot = mm_calloc(all, sizeof *slot, err);
  if (!slot) return NULL;
  for (size_t class = 0; class < ALIGN_CLASSES; class ++)
    for (uint32_t i = 0; i < p->pack.tensor_count; i++) {
      if (p->tensor[i].part != part) continue;
      for (uint32_t j = 0; j < mm_plan_stored(p, i); j++)
        for (unsigned k = 0; k < p->pack.tensor[i].plane_count; k++)
          if (class_of(p->tensor[i].place[j][k].bytes) == class) slot[n++] = (mm_slot){i, j, k};
    }
  *count = n;
  return slot;
}

static bool make_header(mm_plan *p, uint32_t rank, uint32_t part, mm_st_tensor *st, size_t count, const char *plan, mm_err *err) {
  char text[4][24];
  snprintf(text[0], sizeof text[0], "%d", mm_pack_version(&p->pack));
  snprintf(text[1], sizeof text[1], "%u", p->part[part].stage * p->pack.tp + rank);
  snprintf(text[2], sizeof text[2], "%u", p->pack.tp);
  snprintf(text[3], sizeof text[3], "%u", p->part[part].number);
  const struct mm_st_meta slice[] = {{"version", text[0]}, {"rank", text[1]}, {"tp", text[2]}, {"part", text[3]}};
  struct mm_st_meta meta[6] = {{"format", p->layout->format}};
  size_t meta_count = 1;
  for (size_t i = 0; p->layout->roles.cuts && i < sizeof slice / sizeof *slice; i++) meta[meta_count++] = slice[i];
  meta[meta_count++] = (struct mm_st_meta){"plan", plan};
  mm_plan_file *out = &p->part[part].file[rank];
  out->header = mm_st_header(st, count, meta, meta_count, DATA_ALIGN, &out->header_bytes, err);
  if (!out->header) return false;
  out->size = count ? st[count - 1].offset + st[count - 1].bytes : out->header_bytes;
  mm_plan_entry(p, part, rank)->size = out->size;
  p->output_bytes += out->size;
  return true;
}

static bool lay_part(mm_plan *p, uint32_t part, const char *plan, mm_err *err) {
  size_t count = 0;
  mm_slot *slot = order_part(p, part, &count, err);
  mm_st_tensor *st = slot ? mm_calloc(count, sizeof *st, err) : NULL;
  bool ok = st != NULL;
  uint64_t offset = 0;
  mm_arena names = {0};
  for (size_t i = 0; ok && i < count; i++) {
    mm_place *place = &p->tensor[slot[i].tensor].place[slot[i].piece][slot[i].plane];
    st[i] = (mm_st_tensor){.name = p->layout->name(p, slot[i].tensor, slot[i].piece, slot[i].plane, &names, err),
                           .dtype = p->pack.tensor[slot[i].tensor].plane[slot[i].plane].dtype,
                           .shape = p->layout->shape(p, slot[i].tensor, slot[i].piece, slot[i].plane)};
    place->offset = offset;
    offset += place->bytes;
    ok = st[i].name != NULL;
  }
  for (uint32_t r = 0; ok && r < p->pack.tp; r++) ok = !mm_plan_wants(p, part, r) || make_header(p, r, part, st, count, plan, err);
  mm_arena_close(&names);
  free(st);
  free(slot);
  return ok;
}

static bool name_parts(mm_plan *p, mm_err *err) {
  p->pack.rank = mm_arena_alloc(&p->pack.arena, mm_pack_ranks(&p->pack) * sizeof *p->pack.rank, err);
  if (!p->pack.rank) return false;
  for (uint32_t w = 0; w < mm_pack_ranks(&p->pack); w++) {
    mm_rank_parts *x = &p->pack.rank[w];
    for (uint32_t i = 0; i < p->part_count; i++) x->part_count += p->part[i].stage == w / p->pack.tp;
    x->part = mm_arena_alloc(&p->pack.arena, x->part_count * sizeof *x->part, err);
    if (!x->part) return false;
    for (uint32_t i = 0; i < x->part_count; i++)
      if (!(x->part[i].file = p->layout->file(p, w, i, err))) return false;
  }
  return true;
}

bool mm_lay_out(mm_plan *p, uint64_t part_size, mm_err *err) {
  uint64_t all;
  if (!size_planes(p, &all, err)) return false;
  p->part_size = part_size > 0 ? part_size : mm_max(UINT64_C(1) << 20, mm_min(MM_PART_SIZE, all / SMALL_PARTS));
  if (!fill_parts(p, err) || !name_parts(p, err) || !p->layout->digest(p, &p->pack.plan, err)) return false;
  for (uint32_t w = 0; w < mm_pack_ranks(&p->pack); w++)
    if (!p->wanted[w]) p->pack.rank[w].part_count = 0;
  const mm_hex plan = mm_digest_hex(&p->pack.plan);
  for (uint32_t i = 0; i < p->part_count; i++)
    if (!lay_part(p, i, plan.text, err)) return false;
  return true;
}

static char *packed_name(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, mm_arena *a, mm_err *err) {
  (void)piece;
  return mm_arena_printf(a, err, "%s%s", p->pack.tensor[tensor].name, p->pack.tensor[tensor].plane[plane].suffix);
}

static mm_shape packed_shape(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane) {
  (void)piece;
  return mm_pack_plane_shape(&p->pack.tensor[tensor], plane);
}

static char *packed_file(mm_plan *p, uint32_t rank, uint32_t number, mm_err *err) {
  char name[64];
  mm_part_name(name, rank, number);
  return mm_arena_strndup(&p->pack.arena, name, strlen(name), err);
}

static char *packed_manifest(const mm_plan *p, mm_err *err) { return mm_pack_text(&p->pack, err); }

/* The digest of sources, options, tool, model, tensors and cuts. It is the same whichever ranks are wanted, so files of several runs fit
 * together. */
static bool packed_digest(const mm_plan *p, mm_digest *out, mm_err *err) {
  char *text = packed_manifest(p, err);
  if (!text) return false;
  *out = mm_sha256(text, strlen(text));
  free(text);
  return true;
}

static bool packed_part(const char *file, unsigned *rank, unsigned *number) {
  return sscanf(file, "model-rank-%9u-part-%9u.", rank, number) == 2;
}

static const char *const none_made[] = {NULL};
const mm_layout mm_layout_packed = {.word = "packed",
                                    .kind = "packed",
                                    .last = MM_MANIFEST,
                                    .last_kind = "manifest",
                                    .digest_key = "manifest_sha256",
                                    .made = none_made,
                                    .format = MM_PACK_FORMAT,
                                    .roles = {.joins = true, .stacks = true, .cuts = true, .doubles_kv = true},
                                    .extras = true,
                                    .name = packed_name,
                                    .shape = packed_shape,
                                    .file = packed_file,
                                    .part = packed_part,
                                    .digest = packed_digest,
                                    .finish = packed_manifest};
