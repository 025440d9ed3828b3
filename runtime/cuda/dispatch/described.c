/* Packed matrices as kernel arguments (described.h). */
#include "runtime/cuda/dispatch/described.h"

#include "formats/system/base.h"
#include "loader/stream/landing.h"

static bool unsupported(const mm_packed *w, const char *name, mm_err *err) {
  return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, name),
                 "found scheme %s with scales per [%u, %u]; the cuda backend has no kernel for it", w->scheme->name, w->cell[1].n,
                 w->cell[1].k);
}

static bool find_code(const mm_packed *w, mm_cu_code *code) {
  switch (w->scheme->code) {
    case MM_CODE_PLAIN: *code = MM_CU_BF16; return w->scheme->plane[0].dtype == MM_BF16;
    case MM_CODE_E4M3: *code = MM_CU_E4M3; return true;
    case MM_CODE_INT4:
    case MM_CODE_INT4_OFFSET: *code = MM_CU_INT4; return true;
    case MM_CODE_E2M1: *code = MM_CU_E2M1; return true;
    case MM_CODE_INT8: return false;
  }
  return false;
}

/* Log2 of a cell's extent; 31 for the whole matrix. False unless a power of two. */
static bool cell_log2(uint32_t cell, uint32_t *out) {
  *out = cell == 0 ? 31 : (uint32_t)__builtin_ctz(cell);
  return cell == 0 || (cell & (cell - 1)) == 0;
}

uint32_t mm_cu_bits(mm_cu_code code) { return code == MM_CU_BF16 ? 16 : code == MM_CU_E4M3 ? 8 : 4; }

const mm_cu_rounding *mm_cu_rounding_of(const mm_cu_weight *w) { return w->whole.kind != MM_ACT_KEPT ? &w->whole : &w->rounding; }

size_t mm_cu_scales(const mm_cu_weight *d) {
  const bool bytes = d->scale_kind == MM_CU_NV || d->scale_kind == MM_CU_MX;
  return d->scale_kind == MM_CU_PLAIN ? 0 : (size_t)d->lead * (bytes ? d->n : d->scale_rows) * d->scale_pitch;
}

static bool scales_rows(const mm_act_format *f) { return f->group == 0 || f->scale == MM_F8_E4M3; }

static bool divides_groups(const mm_packed *w) {
  const uint32_t group = mm_act_formats[w->scheme->act].group;
  return group > 0 && w->cut_k % group != 0;
}

bool mm_cu_rounds(const mm_packed *w, const char *name, mm_err *err) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (f->scale != MM_F8_E4M3 || !divides_groups(w)) return true;
  return mm_fail(
      err, MM_UNSUPPORTED, "E_ACT_QUANT", mm_at(NULL, name),
      "found activation quantisation on and ranks whose columns begin at multiples of %u, which divide %s's groups of %u; the cuda "
      "backend publishes largest numbers of rows or of groups to other ranks, not of both; expected off",
      w->cut_k, w->scheme->name, f->group);
}

uint32_t mm_cu_published_largest(const mm_cu_rounding *how) {
  const mm_act_format *f = &mm_act_formats[how->kind];
  return scales_rows(f) ? 1 : mm_cells(how->whole_k, f->group);
}

/* True if scales of w's inputs span columns of several ranks: equal on all, since they exchange their largest magnitudes. */
static bool shares_scales(const mm_packed *w) {
  const mm_act_format *f = &mm_act_formats[w->scheme->act];
  if (w->cut_k == 0 || f->code == MM_CODE_PLAIN) return false;
  return (scales_rows(f) && !(f->fixed && w->input_scale > 0)) || divides_groups(w);
}

bool mm_cu_describe(const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err) {
  *out = (mm_cu_weight){.lead = w->lead, .n = w->n, .k = w->k, .rounding = {.kind = w->scheme->act, .fixed = w->input_scale}};
  if (shares_scales(w)) {
    out->whole = out->rounding, out->rounding = (mm_cu_rounding){.kind = MM_ACT_KEPT};
    out->whole.first_k = w->first_k, out->whole.whole_k = w->whole_k;
  }
  if (!find_code(w, &out->code) || mm_has_zeros(w->scheme)) return unsupported(w, name, err);
  if (w->k % 8 != 0)
    return mm_fail(err, MM_UNSUPPORTED, "E_SCHEME", mm_at(NULL, name),
                   "found %u columns on a rank; the cuda backend expects a multiple of 8 (by another --tp or --ep)", w->k);
  const uint32_t bits = mm_cu_bits(out->code), chunk = 4 * 128 / bits; /* columns of a warp's load */
  out->pitch = mm_round_up((uint64_t)w->k * bits / 8, 16);
  if (w->scheme->plane_count == 1) return true;
  if (!cell_log2(w->cell[1].n, &out->cell_n_log2) || !cell_log2(w->cell[1].k, &out->cell_k_log2)) return unsupported(w, name, err);
  if (out->code == MM_CU_E2M1 || mm_has_exponents(w)) {
    const bool nv = w->scheme->plane_count == 3;
    if (w->cell[1].n != 1 || w->cell[1].k != (nv ? 16 : 32) || (nv && (w->cell[2].n || w->cell[2].k))) return unsupported(w, name, err);
    out->scale_kind = nv ? MM_CU_NV : MM_CU_MX;
    out->scale_rows = w->n, out->scale_pitch = (uint32_t)mm_round_up(mm_cells(w->k, w->cell[1].k), 16);
  } else {
    if (w->cell[1].k != 0 && w->cell[1].k % 8 != 0) return unsupported(w, name, err);
    out->scale_kind = w->cell[1].k % chunk == 0 ? MM_CU_COARSE : MM_CU_FINE;
    out->scale_rows = mm_cells(w->n, w->cell[1].n), out->scale_pitch = mm_cells(w->k, w->cell[1].k);
  }
  return true;
}
