/* tensor_wise_fp8: E4M3 codes under one f32 scale for the whole matrix: W = e4m3(code) · scale. The scale is amax/448 of the
 * fusion group, because engines multiply w1|w3 and q|k|v with one scale; 1 for a zero matrix. Codes are e4m3(w/s) with a true
 * division. A float format's relative error does not depend on the scale, so there is nothing to search. */
#include "quant/tile.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  float s = mm_scale_below(a->amax / 448.0f, 448);
  if (s == 0) s = 1;
  *(float *)plane[1] = s;
  for (uint32_t row = 0; row < a->n; row++) mm_row_e4m3(a, plane[0], row, s);
}
MM_PACK(pack)

MM_SCHEME(tensor_wise_fp8, 31.5f, MM_CODE_E4M3, MM_ACT_FP8_TENSOR, "FP8 with one scale a matrix; with --act-scales one for its inputs too",
          MM_PLANES({"", MM_F8_E4M3, {1, 1}, false}, {"_scale", MM_F32, {0, 0}, true}), .synonym = {"fp8_tensor"}, .needs_amax = true);
