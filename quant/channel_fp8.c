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
MM_VERSIONS(pack, (const mm_pack_args *a, void *const plane[MM_MAX_PLANES]), (a, plane))

const mm_scheme mm_scheme_channel_fp8 = {.name = "channel_fp8",
                                         .purpose = "FP8 with a scale a row and one a token, as engines quantise dynamically",
                                         .sqnr = 31.5f,
                                         .synonym = {"fp8_dynamic", "fp8_channel", "wfp8afp8"},
                                         .code = MM_CODE_E4M3,
                                         .act = MM_ACT_FP8_TOKEN,
                                         .plane_count = 2,
                                         .plane = {{"", MM_F8_E4M3, {1, 1}, false}, {"_scale", MM_F32, {1, 0}, true}},
                                         .pack = pack};
