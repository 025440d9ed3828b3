/* The table of schemes: one row each. */
#include <strings.h>

#include "quant/quant.h"

#define SCHEMES(ROW)   \
  ROW(bf16)            \
  ROW(f16)             \
  ROW(f32)             \
  ROW(block_fp8)       \
  ROW(tensor_wise_fp8) \
  ROW(channel_fp8)     \
  ROW(mxfp8)           \
  ROW(int8)            \
  ROW(nvfp4)           \
  ROW(nvfp4a16)        \
  ROW(mxfp4)           \
  ROW(w4a16) ROW(w4afp8) ROW(w4a8) ROW(w4a16_f16) ROW(w4a16_zero) ROW(w4a16_zero_bf16) ROW(w8a16_f16) ROW(w8a16_zero) ROW(w8a16_zero_bf16)

#define DECLARE(name) extern const mm_scheme mm_scheme_##name;
SCHEMES(DECLARE)

#define ADDRESS(name) &mm_scheme_##name,
static const mm_scheme *const schemes[] = {SCHEMES(ADDRESS) NULL};

static bool goes_by(const mm_scheme *s, const char *name) {
  if (strcasecmp(name, s->name) == 0) return true;
  for (size_t i = 0; i < sizeof s->synonym / sizeof *s->synonym && s->synonym[i]; i++)
    if (strcasecmp(name, s->synonym[i]) == 0) return true;
  return false;
}

const mm_scheme *mm_scheme_find(const char *name) {
  for (size_t i = 0; schemes[i]; i++)
    if (goes_by(schemes[i], name)) return schemes[i];
  return NULL;
}

const mm_scheme *mm_scheme_at(size_t i) { return i < sizeof schemes / sizeof *schemes ? schemes[i] : NULL; }

double mm_scheme_bits(const mm_scheme *s) {
  enum { ROWS = 3072 };
  double bytes = 0;
  for (unsigned i = 0; i < s->plane_count; i++)
    bytes += (double)mm_plane_elements(ROWS, ROWS, s->plane[i].cell) * (double)mm_dtype_size(s->plane[i].dtype);
  return 8 * bytes / (double)ROWS / (double)ROWS;
}

const mm_scheme *mm_scheme_plain(mm_dtype t) {
  for (size_t i = 0; schemes[i]; i++)
    if (schemes[i]->code == MM_CODE_PLAIN && schemes[i]->plane[0].dtype == t) return schemes[i];
  return NULL;
}
