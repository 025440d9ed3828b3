/* Reference of load.cu: one tensor at a time, from host memory, with a copy that waits. */
#include <string.h>

#include "quant/numbers.h"
#include "tests/ops/load_files.h"

namespace {

/* Codes copied as they are stored, then put in pair order. */
bool copy_codes(const mm_packed *w, const mm_cu_weight *d, uint8_t *to, mm_err *err) {
  const uint32_t bits = mm_cu_bits(d->code);
  const size_t row = (size_t)w->k * bits / 8, rows = (size_t)w->lead * w->n;
  if (!mm_cu_check(cudaMemcpy2D(to, d->pitch, w->plane[0], row, row, rows, cudaMemcpyHostToDevice), "copy weights", err)) return false;
  return bits != 4 || mm_cu_check(mm_cu_reorder(to, rows * d->pitch / 4, w, 0), "reorder_nibbles", err);
}

float scale_value(const mm_packed *w, size_t i) {
  switch (w->scheme->plane[1].dtype) {
    case MM_F32: return static_cast<const float *>(w->plane[1])[i];
    case MM_BF16: {
      const uint32_t bits = (uint32_t) static_cast<const uint16_t *>(w->plane[1])[i] << 16;
      float f;
      memcpy(&f, &bits, sizeof f);
      return f;
    }
    case MM_F16: return mm_f16_to_f32(static_cast<const uint16_t *>(w->plane[1])[i]);
    default: { /* e8m0 */
      const uint8_t e = static_cast<const uint8_t *>(w->plane[1])[i];
      const uint32_t bits = e == 0 ? 0x00400000u : (uint32_t)e << 23;
      float f;
      memcpy(&f, &bits, sizeof f);
      return f;
    }
  }
}

bool copy_float_scales(const mm_packed *w, const mm_cu_weight *d, float *to, mm_err *err) {
  std::vector<float> scale(mm_cu_scales(d));
  for (size_t i = 0; i < scale.size(); i++) scale[i] = scale_value(w, i);
  return mm_cu_check(cudaMemcpy(to, scale.data(), scale.size() * sizeof(float), cudaMemcpyHostToDevice), "copy scales", err);
}

bool copy_byte_scales(const mm_packed *w, const mm_cu_weight *d, uint8_t *to, mm_err *err) {
  const size_t row = mm_cells(w->k, w->cell[1].k), rows = (size_t)w->lead * w->n;
  return mm_cu_check(cudaMemcpy2D(to, d->scale_pitch, w->plane[1], row, row, rows, cudaMemcpyHostToDevice), "copy scales", err);
}

/* The last f32 plane of NVFP4, one per matrix, with the 2^8 that the kernels leave to it. */
bool copy_globals(const mm_packed *w, float *to, mm_err *err) {
  std::vector<float> global(w->lead);
  for (uint32_t i = 0; i < w->lead; i++) global[i] = static_cast<const float *>(w->plane[2])[i] * 256.0f;
  return mm_cu_check(cudaMemcpy(to, global.data(), global.size() * sizeof(float), cudaMemcpyHostToDevice), "copy scales", err);
}

bool copy_planes(const mm_packed *w, const mm_cu_weight *d, const mm_cu_places &to, mm_err *err) {
  const bool floats = d->scale_kind == MM_CU_COARSE || d->scale_kind == MM_CU_FINE;
  if (to.scale && !(floats ? copy_float_scales(w, d, static_cast<float *>(to.scale), err)
                           : copy_byte_scales(w, d, static_cast<uint8_t *>(to.scale), err)))
    return false;
  return (!to.global || copy_globals(w, to.global, err)) && copy_codes(w, d, to.data, err);
}

}  // namespace

bool upload_weight(mm_cu_memory *memory, const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err) {
  if (!mm_cu_describe(w, name, out, err)) return false;
  mm_cu_places to = {};
  const bool floats = out->scale_kind == MM_CU_COARSE || out->scale_kind == MM_CU_FINE;
  if (!(to.data = memory->array<uint8_t>((size_t)w->lead * w->n * out->pitch, err))) return false;
  if (out->scale_kind != MM_CU_PLAIN && !(to.scale = memory->alloc(mm_cu_scales(out) * (floats ? sizeof(float) : 1), err))) return false;
  if (out->scale_kind == MM_CU_NV && !(to.global = memory->array<float>(w->lead, err))) return false;
  out->data = to.data, out->scale = to.scale, out->global = to.global;
  return copy_planes(w, out, to, err);
}

bool upload_f32(mm_cu_memory *memory, const mm_packed *w, float **out, mm_err *err) {
  const size_t n = (size_t)w->lead * w->n * w->k;
  return (*out = memory->array<float>(n, err)) && mm_cu_unpack(w, *out, err);
}
