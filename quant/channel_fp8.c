/* channel_fp8: E4M3 codes with one f32 scale per output row: W[n, k] = e4m3(code[n, k]) · scale[n]. The scale is amax/448 of the
 * row, 1 for a zero row; codes are e4m3(w/s) with a true division. A float format's relative error does not depend on the scale,
 * so there is nothing to search. */
#include "quant/tile.h"

MM_INLINE void pack_body(const mm_pack_args *a, void *const plane[MM_MAX_PLANES]) {
  for (uint32_t row = 0; row < a->n; row++) {
    float s = mm_scale_below(mm_row_amax(a, row) / 448.0f, 448);
    if (s == 0) s = 1;
    ((float *)plane[1])[row] = s;
    mm_row_e4m3(a, plane[0], row, s);
  }
}
MM_PACK(pack)

MM_SCHEME(channel_fp8, 31.5f, MM_CODE_E4M3, MM_ACT_FP8_TOKEN, "FP8 with a scale a row and one a token, as engines quantise dynamically",
          MM_PLANES({"", MM_F8_E4M3, {1, 1}, false}, {"_scale", MM_F32, {1, 0}, true}),
          .synonym = {"fp8_dynamic", "fp8_channel", "wfp8afp8"});
