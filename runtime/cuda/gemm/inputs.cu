/* Inputs of a product: rows as the choice wants them, then the kernel that it names (dispatch.h). */
#include "runtime/cuda/gemm/inputs.h"

#include "runtime/cuda/core/launch.h"

cudaError_t mm_cu_device_here(mm_cu_device *d) {
  *d = {hopper(), 0, (uint32_t)mm_cu_shared_most(), codes_by_mma()};
  return d->hopper ? mm_cu_largest_cluster(&d->cluster) : cudaSuccess;
}

cudaError_t mm_cu_refuse(mm_cu_kernel kernel, const mm_cu_task &q) {
  mm_cu_device d;
  const cudaError_t e = mm_cu_device_here(&d);
  return e != cudaSuccess || mm_cu_takes(&d, kernel, &q) ? e : cudaErrorNotSupported;
}

/* True if both roundings give the same numbers for the same rows. */
static bool same_rounding(const mm_cu_rounding &a, const mm_cu_rounding &b) {
  return a.kind == b.kind && a.fixed == b.fixed && a.whole_k == b.whole_k;
}

bool mm_cu_rounded::open(mm_cu_memory *memory, uint32_t tokens, uint32_t widest, mm_err *err) {
  const uint64_t pitch = mm_round_up(widest, MM_CU_GROUP);
  codes.code = memory->array<uint8_t>(tokens * pitch, err);
  codes.scale = memory->array<float>(tokens * (pitch / MM_CU_GROUP), err);
  rows = memory->array<__nv_bfloat16>((uint64_t)tokens * widest, err);
  return codes.code && codes.scale && rows;
}

bool mm_cu_rounded::open_spans(mm_cu_memory *memory, mm_err *err) {
  if (hopper()) return true;
  spans.sums = memory->array<float>((uint64_t)multiprocessors() * MM_CU_SPAN_SUMS, err);
  spans.counters = memory->array<uint32_t>((uint64_t)multiprocessors() * MM_CU_SPAN_TILES, err);
  return spans.sums && spans.counters;
}

mm_cu_codes mm_cu_rounded::codes_too(const __nv_bfloat16 *x, uint32_t tokens, uint32_t k) {
  return !all_codes || tokens == 1 || k % MM_CU_GROUP != 0 ? mm_cu_codes{} : codes_of(x, tokens, k);
}

mm_cu_codes mm_cu_rounded::codes_of(const __nv_bfloat16 *x, uint32_t tokens, uint32_t k) {
  codes.rows = codes.scale_pitch = tokens, codes.pitch = k, coded = x, coded_how = {MM_ACT_FP8_GROUP};
  return codes;
}

cudaError_t mm_cu_rounded::encode(const __nv_bfloat16 *x, const uint32_t *pick, uint32_t tokens, uint32_t k, const mm_cu_rounding &by,
                                  cudaStream_t s) {
  if (coded == x && !pick && same_rounding(coded_how, by)) return cudaSuccess;
  codes.rows = codes.scale_pitch = tokens, codes.pitch = (uint32_t)mm_round_up(k, MM_CU_GROUP);
  coded = pick ? nullptr : x, coded_how = by;
  return mm_cu_encode(codes, {x, k, pick}, by, s);
}

cudaError_t mm_cu_rounded::round(const __nv_bfloat16 **x, const uint32_t *pick, uint32_t tokens, uint32_t k, const mm_cu_rounding &by,
                                 cudaStream_t s) {
  const __nv_bfloat16 *from = *x;
  *x = rows;
  if (rounded == from && !pick && same_rounding(how, by)) return cudaSuccess;
  rounded = pick ? nullptr : from, how = by;
  return mm_cu_round(rows, tokens, {from, k, pick}, how, s);
}

cudaError_t mm_cu_rounded::prepare(const mm_cu_dispatch &c, const __nv_bfloat16 **x, const uint32_t *pick, uint32_t tokens,
                                   const mm_cu_weight &w, cudaStream_t s) {
  if (c.x == MM_CU_AS_CODES || c.x == MM_CU_AS_ROW_CODES || c.x == MM_CU_AS_MX_CODES)
    return encode(*x, pick, tokens, w.k, *mm_cu_rounding_of(&w), s);
  return c.x == MM_CU_ROUNDED_BEFORE ? round(x, pick, tokens, w.k, *mm_cu_rounds_before(c.kernel, &w), s) : cudaSuccess;
}

cudaError_t mm_cu_rounded::linear(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  const mm_cu_push to = push;
  wrote(a.y), push = {};
  const mm_cu_task q = {&w, nullptr, a.tokens, 0, decode};
  const mm_cu_dispatch c = mm_cu_dispatch_product(&device, &q);
  mm_cu_linear given = a;
  const cudaError_t e = prepare(c, &given.x, a.rows, a.tokens, w, s);
  if (e != cudaSuccess) return e;
  if (given.x != a.x) given.rows = nullptr;
  given.spans = spans;
  pushed = to.epoch && (c.kernel == MM_CU_GEMM_FP8 || c.kernel == MM_CU_GEMM_MX) && w.n % 8 == 0;
  const mm_cu_product coded = {codes, a.y, a.y32, pushed ? to : mm_cu_push{}};
  switch (c.kernel) {
    case MM_CU_GEMM_FP8: return mm_cu_gemm_fp8(w, coded, s);
    case MM_CU_GEMM_MX: return mm_cu_gemm_mx(w, coded, s);
    case MM_CU_SMALL_BATCH_FP8: return mm_cu_small_batch_fp8(w, coded, s);
    case MM_CU_GEMM_CODES: return mm_cu_gemm_codes(w, coded, s);
    case MM_CU_ONE: return mm_cu_one(w, given, s);
    case MM_CU_SMALL_BATCH_WIDENED: return mm_cu_small_batch_widened(w, given, s);
    case MM_CU_DECODE_DENSE: return mm_cu_decode_dense(w, given, s);
    case MM_CU_DECODE_LINEAR: return mm_cu_decode_linear(w, given, s);
    case MM_CU_GEMM_WIDENED: return mm_cu_gemm_widened(w, given, s);
    case MM_CU_GEMM: return mm_cu_gemm(w, given, s);
    default: return cudaErrorNotSupported;
  }
}

bool mm_cu_rounded::is_one(const mm_cu_weight &w, uint32_t tokens) const {
  const mm_cu_task q = {&w, nullptr, tokens, 0, decode};
  return tokens == 1 && mm_cu_dispatch_product(&device, &q).kernel == MM_CU_ONE;
}

cudaError_t mm_cu_rounded::linear_two(const mm_cu_two &a, uint32_t tokens, cudaStream_t s) {
  if (!is_one(a.w[0], tokens) || !mm_cu_are_alike(a.w[0], a.w[1])) {
    const cudaError_t e = linear(a.w[0], {a.x, nullptr, a.y[0], nullptr, tokens}, s);
    return e != cudaSuccess ? e : linear(a.w[1], {a.x, nullptr, a.y[1], nullptr, tokens}, s);
  }
  wrote(a.y[0]), wrote(a.y[1]), push = {}, pushed = false;
  const mm_cu_task q = {&a.w[0], nullptr, tokens, 0, decode};
  mm_cu_two given = a;
  const cudaError_t e = prepare(mm_cu_dispatch_product(&device, &q), &given.x, nullptr, tokens, a.w[0], s);
  return e != cudaSuccess ? e : mm_cu_one_two(given, s);
}

cudaError_t mm_cu_rounded::linear_three(const mm_cu_three &a, cudaStream_t s) {
  wrote(a.y), wrote(a.two.y[0]), wrote(a.two.y[1]), push = {}, pushed = false;
  return mm_cu_one_three(a, s);
}

cudaError_t mm_cu_rounded::gated(const mm_cu_weight &w, const mm_cu_gated_row &a, cudaStream_t s) {
  wrote(a.middle);
  const mm_cu_task q = {&w, nullptr, 1, 0, decode};
  mm_cu_gated_row given = a;
  const cudaError_t e = prepare(mm_cu_dispatch_product(&device, &q), &given.x, nullptr, 1, w, s);
  return e != cudaSuccess ? e : mm_cu_one_gated(w, given, s);
}

cudaError_t mm_cu_rounded::experts(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                   cudaStream_t s) {
  const mm_cu_push to = push;
  wrote(a.y), push = {};
  const mm_cu_task q = {&w13, &w2, a.tokens, r.top_k, decode};
  const mm_cu_dispatch c = mm_cu_dispatch_product(&device, &q);
  mm_cu_experts given = a;
  given.decode = decode;
  const cudaError_t e = prepare(c, &given.x, nullptr, a.tokens, w13, s);
  if (e != cudaSuccess) return e;
  /* codes of middle and their scales take less than its bf16 would, bf16 of pair_out half of its f32: where middle's bf16 comes first,
   * codes lie in the other half */
  const uint32_t pairs = a.tokens * r.top_k;
  uint8_t *const code = c.middle == MM_CU_AS_CODES ? reinterpret_cast<uint8_t *>(a.middle)
                                                   : reinterpret_cast<uint8_t *>(a.pair_out) + (size_t)pairs * w2.n * 2;
  const mm_cu_codes middle = {code, reinterpret_cast<float *>(code + (size_t)pairs * w2.k), pairs, w2.k, pairs};
  pushed = to.epoch && (c.kernel == MM_CU_EXPERTS_FP8 || c.kernel == MM_CU_EXPERTS_MANY);
  if (pushed) given.push = to;
  switch (c.kernel) {
    case MM_CU_EXPERTS_FEW: return mm_cu_experts_few(w13, w2, r, given, s);
    case MM_CU_EXPERTS_FP8:
      return mm_cu_experts_fp8(w13, w2, r, {codes, middle, a.middle, reinterpret_cast<__nv_bfloat16 *>(a.pair_out), a.y, given.push}, s);
    case MM_CU_EXPERTS_CODES: return mm_cu_experts_codes(w13, w2, r, codes, given, s);
    case MM_CU_EXPERTS_ONE: return mm_cu_experts_one(w13, w2, r, given, s);
    case MM_CU_EXPERTS_DECODE: return mm_cu_experts_decode(w13, w2, r, given, s);
    case MM_CU_EXPERTS_MANY: return mm_cu_experts_many(w13, w2, r, given, s);
    case MM_CU_EXPERTS_GEMM: return mm_cu_experts_gemm(w13, w2, r, given, s);
    default: return cudaErrorNotSupported;
  }
}

bool mm_cu_rounded::joins(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_shared &a, uint32_t top_k, uint32_t tokens) const {
  const mm_cu_task q = {&w13, &w2, tokens, top_k, decode};
  return is_one(a.up, tokens) && is_one(a.down, tokens) && mm_cu_dispatch_product(&device, &q).kernel == MM_CU_EXPERTS_ONE &&
         mm_cu_joins_shared(w13, w2, a, top_k);
}

cudaError_t mm_cu_rounded::experts_shared(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                          const mm_cu_shared &shared, cudaStream_t s) {
  wrote(a.y), wrote(shared.middle), push = {}, pushed = false;
  const cudaError_t e = mm_cu_experts_joined(w13, w2, r, a, shared, s);
  if (e != cudaSuccess || mm_cu_joins_down(w2, shared)) return e;
  return linear(shared.down, {shared.middle, nullptr, a.y, nullptr, 1, true}, s);
}

cudaError_t mm_cu_rounded::middle(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                  cudaStream_t s) {
  const mm_cu_task q = {&w13, &w2, a.tokens, r.top_k, decode, true};
  const mm_cu_dispatch c = mm_cu_dispatch_product(&device, &q);
  mm_cu_experts given = a;
  const cudaError_t e = prepare(c, &given.x, nullptr, a.tokens, w13, s);
  if (e != cudaSuccess) return e;
  switch (c.kernel) {
    case MM_CU_EXPERTS_MANY: return mm_cu_experts_many_middle(w13, r, given, s);
    case MM_CU_EXPERTS_GEMM: return mm_cu_experts_middle(w13, r, given, s);
    default: return cudaErrorNotSupported;
  }
}
