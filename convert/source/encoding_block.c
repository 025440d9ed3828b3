/* Block FP8 whose configuration does not say how large the blocks are. */
#include <string.h>

#include "convert/source/encoding.h"

enum { SIDES = 11, TAKEN = 7 /* 2^7 = 128 */ };

/* Bits i of sides 2^i that explain `cells` over `extent`. */
static uint32_t sides(uint64_t extent, uint64_t cells) {
  uint32_t out = 0;
  for (unsigned i = 0; i < SIDES; i++)
    if (mm_ceil_div(extent, UINT64_C(1) << i) == cells) out |= 1u << i;
  return out;
}

/* The weight of a block scale "….weight_scale_inv", or NULL. */
static const mm_hf_tensor *scaled(const mm_hf *hf, const mm_hf_tensor *s) {
  char name[320];
  const size_t n = strlen(s->name), tail = strlen("_scale_inv");
  if (!mm_ends_with(s->name, "weight_scale_inv") || n - tail >= sizeof name) return NULL;
  memcpy(name, s->name, n - tail);
  name[n - tail] = 0;
  const mm_hf_tensor *w = mm_hf_find(hf, name);
  return w && w->dtype == MM_F8_E4M3 && w->shape.rank >= 2 && w->shape.rank == s->shape.rank ? w : NULL;
}

void mm_quantization_block(mm_hf *hf) {
  mm_quantization *q = &hf->quantization;
  uint32_t rows = UINT32_MAX, cols = UINT32_MAX;
  size_t count = 0;
  if (hf->names_only || !q->method || strcmp(q->method, "fp8") != 0 || q->whole || q->block.n != 0) return;
  for (size_t i = 0; i < hf->tensor_count; i++) {
    const mm_hf_tensor *s = &hf->tensor[i], *w = scaled(hf, s);
    if (!w || (s->dtype != MM_F32 && s->dtype != MM_BF16)) continue;
    const uint32_t at = s->shape.rank - 2;
    rows &= sides(w->shape.dim[at], s->shape.dim[at]);
    cols &= sides(w->shape.dim[at + 1], s->shape.dim[at + 1]);
    count++;
  }
  if (count == 0 || rows != 1u << TAKEN || cols != 1u << TAKEN) return;
  q->block = (mm_cell){1u << TAKEN, 1u << TAKEN};
  q->block_assumed = true;
}
