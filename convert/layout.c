/* Where every plane of every packed tensor lies: parts in layer order, alignment by order alone, headers, exact sizes, the plan's
 * digest. All ranks of a stage have the same shapes, so offsets (from a part's data start) are the same on each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "convert/plan.h"

#define DATA_ALIGN 4096

/* Sizes that are multiples of 4 KiB first, then of 256, of 16, then the rest: what comes first keeps the next aligned. */
static unsigned align_class(uint64_t bytes) { return bytes % DATA_ALIGN == 0 ? 0 : bytes % 256 == 0 ? 1 : bytes % 16 == 0 ? 2 : 3; }

typedef struct mm_slot { /* one plane of one tensor inside a part */
  uint32_t tensor;
  unsigned plane;
  uint64_t bytes;
} mm_slot;

static bool plane_bytes(const mm_plan *p, uint32_t tensor, unsigned plane, uint64_t *bytes, mm_err *err) {
  const mm_pack_tensor *t = &p->pack.tensor[tensor];
  mm_shape s = mm_pack_plane_shape(t, plane);
  return mm_shape_bytes(&s, t->plane[plane].dtype, bytes) ||
         mm_fail(err, MM_LIMIT, "E_SIZE", mm_at(NULL, t->name), "found a size beyond 64 bits");
}

static bool open_part(mm_plan *p, size_t *cap, uint32_t stage, mm_err *err) {
  if (!mm_grow((void **)&p->part, cap, p->part_count + 1, sizeof *p->part, err)) return false;
  mm_plan_part *x = &p->part[p->part_count];
  *x = (mm_plan_part){.stage = stage, .file = mm_arena_alloc(&p->pack.arena, p->pack.tp * sizeof *x->file, err)};
  if (!x->file) return false;
  if (p->part_count > 0 && x[-1].stage == stage) x->number = x[-1].number + 1;
  p->part_count++;
  return true;
}

/* A part ends with its stage, and before it would exceed part_size. */
static bool fill_parts(mm_plan *p, uint64_t part_size, mm_err *err) {
  uint64_t in_part = 0;
  size_t cap = 0;
  for (uint32_t i = 0; i < p->pack.tensor_count; i++) {
    const mm_pack_tensor *t = &p->pack.tensor[i];
    uint64_t total = 0;
    for (unsigned j = 0; j < t->plane_count; j++) {
      uint64_t bytes = 0;
      if (!plane_bytes(p, i, j, &bytes, err)) return false;
      p->tensor[i].lead_bytes[j] = bytes / (t->lead ? t->lead : 1);
      total += bytes + 512; /* its share of the header */
    }
    bool fits = p->part_count > 0 && p->part[p->part_count - 1].stage == t->stage && in_part + total <= part_size;
    if (!fits && !open_part(p, &cap, t->stage, err)) return false;
    in_part = total + (fits ? in_part : DATA_ALIGN);
    p->tensor[i].part = p->part_count - 1;
  }
  return true;
}

/* The planes of one part in file order. */
static mm_slot *order_part(const mm_plan *p, uint32_t part, size_t *count, mm_err *err) {
  size_t n = 0, all = 0;
  for (size_t i = 0; i < p->pack.tensor_count; i++)
    if (p->tensor[i].part == part) all += p->pack.tensor[i].plane_count;
  mm_slot *slot = mm_calloc(all, sizeof *slot, err);
  if (!slot) return NULL;
  for (unsigned class = 0; class < 4; class ++)
    for (uint32_t i = 0; i < p->pack.tensor_count; i++) {
      if (p->tensor[i].part != part) continue;
      for (unsigned j = 0; j < p->pack.tensor[i].plane_count; j++) {
        uint64_t bytes = p->tensor[i].lead_bytes[j] * (p->pack.tensor[i].lead ? p->pack.tensor[i].lead : 1);
        if (align_class(bytes) == class) slot[n++] = (mm_slot){i, j, bytes};
      }
    }
  *count = n;
  return slot;
}

static bool make_header(mm_plan *p, uint32_t rank, uint32_t part, mm_st_tensor *st, size_t count, const char *plan, mm_err *err) {
  char text[4][24];
  snprintf(text[0], sizeof text[0], "%d", MM_PACK_VERSION);
  snprintf(text[1], sizeof text[1], "%u", p->part[part].stage * p->pack.tp + rank);
  snprintf(text[2], sizeof text[2], "%u", p->pack.tp);
  snprintf(text[3], sizeof text[3], "%u", p->part[part].number);
  const struct mm_st_meta meta[] = {{"format", MM_PACK_FORMAT}, {"version", text[0]}, {"rank", text[1]}, {"tp", text[2]},
                                    {"part", text[3]},          {"plan", plan}};
  mm_plan_file *out = &p->part[part].file[rank];
  out->header = mm_st_header(st, count, meta, sizeof meta / sizeof *meta, DATA_ALIGN, &out->header_bytes, err);
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
    const mm_pack_tensor *t = &p->pack.tensor[slot[i].tensor];
    const mm_pack_plane *plane = &t->plane[slot[i].plane];
    st[i] = (mm_st_tensor){.name = mm_arena_printf(&names, err, "%s%s", t->name, plane->suffix),
                           .dtype = plane->dtype,
                           .shape = mm_pack_plane_shape(t, slot[i].plane)};
    p->tensor[slot[i].tensor].offset[slot[i].plane] = offset;
    offset += slot[i].bytes;
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
    for (uint32_t i = 0; i < x->part_count; i++) {
      char name[64];
      mm_part_name(name, w, i);
      x->part[i].file = mm_arena_strndup(&p->pack.arena, name, strlen(name), err);
      if (!x->part[i].file) return false;
    }
  }
  return true;
}

/* The digest covers everything but sizes and contents: sources, options, tool, model, tensors, cuts. It is the same whichever ranks are
 * wanted, so files of several runs fit together. */
static bool plan_digest(mm_plan *p, mm_err *err) {
  char *text = mm_pack_text(&p->pack, err);
  bool ok = text && mm_sha256(text, strlen(text), &p->pack.plan, err);
  free(text);
  return ok;
}

bool mm_layout(mm_plan *p, uint64_t part_size, mm_err *err) {
  if (!fill_parts(p, part_size, err) || !name_parts(p, err) || !plan_digest(p, err)) return false;
  for (uint32_t w = 0; w < mm_pack_ranks(&p->pack); w++)
    if (!p->wanted[w]) p->pack.rank[w].part_count = 0;
  char plan[MM_HEX_LEN + 1];
  mm_digest_hex(&p->pack.plan, plan);
  for (uint32_t i = 0; i < p->part_count; i++)
    if (!lay_part(p, i, plan, err)) return false;
  return true;
}
