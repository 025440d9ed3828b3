/* Which kernels a product takes (inputs.h). */
#include "runtime/cuda/inputs.h"

/* Fewer pairs of token and expert are too few units for the blocks of mm_cu_experts_few. */
constexpr uint32_t kLeastPairs = 8;

namespace {

/* The product of inputs that are no codes; few: the rows of a decode step, or of MM_CU_SKINNY at most. */
decltype(&mm_cu_gemm) linear_of(const mm_cu_weight &w, uint32_t tokens, bool few) {
  if (few && mm_cu_takes_few_rows(w)) return mm_cu_skinny_few;
  return tokens <= MM_CU_SKINNY ? mm_cu_skinny : mm_cu_gemm;
}

/* The same of experts; few: mm_cu_experts_few takes these. */
decltype(&mm_cu_experts_gemm) experts_of(uint32_t tokens, bool few) {
  if (few) return mm_cu_experts_few;
  return tokens <= MM_CU_SKINNY ? mm_cu_experts_skinny : mm_cu_experts_gemm;
}

/* Tokens up to which experts may take mm_cu_experts_few. */
uint32_t most_few(bool decode, bool codes_too) {
  if (!decode) return MM_CU_SKINNY;
  return codes_too ? MM_CU_FEW : MM_CU_FEW_EACH;
}

}  // namespace

bool mm_cu_rounded::open(mm_cu_memory *memory, uint32_t tokens, uint32_t widest, mm_err *err) {
  const uint64_t pitch = mm_round_up(widest, MM_CU_GROUP);
  codes.code = memory->array<uint8_t>(tokens * pitch, err);
  codes.scale = memory->array<float>(tokens * (pitch / MM_CU_GROUP), err);
  rows = memory->array<__nv_bfloat16>((uint64_t)tokens * widest, err);
  return codes.code && codes.scale && rows;
}

mm_cu_codes mm_cu_rounded::beside(const __nv_bfloat16 *x, uint32_t tokens, uint32_t k) {
  if (!all_codes || tokens == 1 || k % MM_CU_GROUP != 0) return {};
  codes.rows = codes.scale_pitch = tokens, codes.pitch = k, coded = x;
  return codes;
}

cudaError_t mm_cu_rounded::encode(const __nv_bfloat16 *x, const uint32_t *pick, uint32_t tokens, uint32_t k, cudaStream_t s) {
  if (coded == x && !pick) return cudaSuccess;
  codes.rows = codes.scale_pitch = tokens, codes.pitch = (uint32_t)mm_round_up(k, MM_CU_GROUP);
  coded = pick ? nullptr : x;
  return mm_cu_encode(codes, {x, k, pick}, s);
}

cudaError_t mm_cu_rounded::round(const __nv_bfloat16 **x, const uint32_t *pick, uint32_t tokens, const mm_cu_weight &w, uint32_t columns,
                                 cudaStream_t s) {
  if (w.rounding.kind == MM_ACT_KEPT || (tokens == 1 && mm_cu_rounds_itself(w, columns))) return cudaSuccess;
  const __nv_bfloat16 *from = *x;
  *x = rows;
  if (rounded == from && !pick && how.kind == w.rounding.kind && how.fixed == w.rounding.fixed) return cudaSuccess;
  rounded = pick ? nullptr : from, how = w.rounding;
  return mm_cu_round(rows, tokens, {from, w.k, pick}, how, s);
}

cudaError_t mm_cu_rounded::linear(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  wrote(a.y);
  const bool few = a.tokens > 1 && a.tokens <= (decode ? MM_CU_FEW : MM_CU_SKINNY);
  if (a.tokens > 1 && mm_cu_multiplies_codes(w)) {
    const cudaError_t e = encode(a.x, a.rows, a.tokens, w.k, s);
    const auto product = few ? mm_cu_skinny_fp8 : mm_cu_gemm_fp8;
    return e != cudaSuccess ? e : product(w, {codes, a.y, a.y32}, s);
  }
  mm_cu_linear given = a;
  const cudaError_t e = round(&given.x, a.rows, a.tokens, w, w.k, s);
  if (given.x != a.x) given.rows = nullptr;
  return e != cudaSuccess ? e : linear_of(w, a.tokens, few)(w, given, s);
}

cudaError_t mm_cu_rounded::experts(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                   cudaStream_t s) {
  wrote(a.y);
  const bool codes_too = mm_cu_experts_multiply_codes(w13, w2);
  const uint32_t pairs = a.tokens * r.top_k;
  const bool few = a.tokens > 1 && a.tokens <= most_few(decode, codes_too) && pairs >= kLeastPairs && mm_cu_takes_few(w13, w2);
  if (!few && a.tokens > MM_CU_SKINNY && codes_too) {
    const cudaError_t e = encode(a.x, nullptr, a.tokens, w13.k, s);
    /* codes of middle and their scales take less than its bf16 would, bf16 of pair_out half of its f32 */
    uint8_t *code = reinterpret_cast<uint8_t *>(a.middle);
    const mm_cu_codes middle = {code, reinterpret_cast<float *>(code + (size_t)pairs * w2.k), pairs, w2.k, pairs};
    return e != cudaSuccess ? e : mm_cu_experts_fp8(w13, w2, r, {codes, middle, reinterpret_cast<__nv_bfloat16 *>(a.pair_out), a.y}, s);
  }
  mm_cu_experts given = a;
  if (!few || !mm_cu_few_rounds(w13)) {
    const cudaError_t e = round(&given.x, nullptr, a.tokens, w13, mm_cu_mixture_columns(w13, w2, r.top_k), s);
    if (e != cudaSuccess) return e;
  }
  return experts_of(a.tokens, few)(w13, w2, r, given, s);
}

cudaError_t mm_cu_rounded::middle(const mm_cu_weight &w13, const mm_cu_weight &w2, const mm_cu_route &r, const mm_cu_experts &a,
                                  cudaStream_t s) {
  mm_cu_experts given = a;
  const cudaError_t e = round(&given.x, nullptr, a.tokens, w13, w13.k, s);
  return e != cudaSuccess ? e : mm_cu_experts_middle(w13, w2, r, given, s);
}
