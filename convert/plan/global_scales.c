/* Global scales of NVFP4 that are kept. compressed-tensors stores the reciprocal of the scale that is packed. Of six F32 numbers about one
 * is not the reciprocal of its reciprocal: the steps to it are in the plan, so that --layout hf gives it back. */
#include "convert/plan/global_scales.h"

#include <math.h>

static bool kept(const mm_plan_tensor *pt, size_t matrices) {
  for (size_t i = 0; i < matrices; i++)
    if (!mm_encoding_keeps(&pt->matrix[i], pt->scheme, pt->grid)) return false;
  return true;
}

/* Reads the global scales of matrices that share one. Where theirs differ by powers of two one almost always keeps their numbers (the
 * writer proves it); where they differ otherwise all numbers are tried now. */
static bool share(mm_decoder *source, const mm_plan_tensor *pt, mm_matrix *x, unsigned pieces, mm_err *err) {
  bool same = true, alike = true;
  float first = 0, own = 0;
  int power;
  for (unsigned j = 0; j < pieces; j++) {
    if (!mm_decode_global_steps(source, &x[j], &own, &x[j].steps, err)) return false;
    if (j == 0) first = own;
    same = same && own == first;
    alike = alike && frexp((double)own, &power) == frexp((double)first, &power);
  }
  for (unsigned j = 0; !same && j < pieces; j++) x[j].steps = 0;
  return alike || !pt->as_stored || mm_decode_common(source, x, pieces, pt->scheme, pt->grid, &own, err);
}

bool mm_plan_global_scales(mm_plan *p, mm_decoder *source, mm_plan_tensor *pt, mm_pack_tensor *t, size_t matrices, mm_err *err) {
  const mm_hf *hf = p->hf;
  size_t count = 0;
  if (!pt->scheme->needs_amax || pt->scheme->plane_count != 3 || !kept(pt, matrices)) return true;
  for (size_t i = 0; hf->follow && i < matrices; i++)
    if (pt->matrix[i].encoding->reciprocal)
      return mm_fail(err, MM_UNSUPPORTED, "E_FOLLOW", mm_hf_at(hf, pt->matrix[i].part[MM_GLOBAL].tensor),
                     "found the reciprocal of a global scale, whose number the plan needs: convert the whole download without --follow");
  if (hf->names_only || (hf->follow && !pt->as_stored)) return true; /* its files may not be there */
  for (size_t i = 0; !hf->manifest && i < matrices; i += t->piece_count)
    if (!share(source, pt, &pt->matrix[i], t->piece_count, err)) return false;
  for (size_t i = 0; i < matrices; i++) count += pt->matrix[i].steps != 0;
  if (count == 0) return true;
  t->step = mm_arena_alloc(&p->pack.arena, count * sizeof *t->step, err);
  for (size_t i = 0; t->step && i < matrices; i++)
    if (pt->matrix[i].steps != 0)
      t->step[t->step_count++] = (mm_global_step){(uint32_t)(i / t->piece_count), (uint32_t)(i % t->piece_count), pt->matrix[i].steps};
  return t->step;
}
