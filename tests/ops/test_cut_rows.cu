/* Inputs that are rounded under scales of whole rows, of which each rank has some columns: the numbers that one device makes of whole rows,
 * to the bit. In place, picked, by the slots of a step of few tokens, and laid out for a product; and as codes. */
#include "runtime/cuda/fp8.h"
#include "runtime/cuda/lay_places.h"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t kRows = 48; /* three slots of sixteen tokens */
enum way { PICKED, IN_PLACE, SLOTS, LAID, CODES };
const char *const kWays[] = {"picked", "in place", "slots", "laid out", "codes"};

/* A rank's memory: rows, results and what the kernels read beside them, of whole rows and of this rank's columns. */
struct rows_of {
  const member &m;
  uint32_t k, whole;
  __nv_bfloat16 *all, *own;
  uint32_t *words; /* picks; used; slots' tokens, experts; places */
  float *weight;   /* [kRows], then each expert's factor */

  rows_of(const member &member, uint32_t columns) : m(member), k(columns), whole(columns * member.ranks) {
    all = reinterpret_cast<__nv_bfloat16 *>(m.source), own = all + 2 * (size_t)kRows * whole;
    words = reinterpret_cast<uint32_t *>(own + 2 * (size_t)kRows * k), weight = reinterpret_cast<float *>(words + 256);
  }
  /* Rows of different sizes, whose largest number is in any rank's columns; some zero, some no number. */
  void fill(uint32_t t) const {
    __nv_bfloat16 *const a = reinterpret_cast<__nv_bfloat16 *>(m.host), *const o = a + (size_t)kRows * whole;
    for (uint32_t r = 0; r < kRows; r++) {
      for (uint32_t c = 0; c < whole; c++) {
        float v = number(t, 40, (size_t)r * whole + c) * exp2f((float)(r % 9) * 3 - 12);
        if (r % 11 == 3) v = 0;
        if (r % 13 == 5 && c == (r * 7 + t) % whole) v *= 60;
        if (r % 17 == 6 && c == (r * 5 + t) % whole) v = NAN;
        a[(size_t)r * whole + c] = __float2bfloat16(v);
        if (c / k == m.rank) o[(size_t)r * k + c % k] = a[(size_t)r * whole + c];
      }
    }
    uint32_t *const w = reinterpret_cast<uint32_t *>(o + (size_t)kRows * k);
    for (uint32_t r = 0; r < kRows; r++) w[r] = (r * 5 + 1) % kRows;
    w[64] = 3, w[65] = 0xffffu, w[66] = 0x8421u, w[67] = 0x1u << t % 16, w[68] = 2, w[69] = 0, w[70] = 1; /* used; tokens; experts */
    w[80] = kRows;                                                                                        /* places, behind no offset */
    for (uint32_t r = 0; r < kRows + 3; r++) reinterpret_cast<float *>(w + 256)[r] = number(t, 41, r);
    CUDA_OK(cudaMemcpyAsync(all, a, (size_t)kRows * whole * 2, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaMemcpyAsync(own, o, (size_t)kRows * k * 2, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaMemcpyAsync(words, w, 1024 + (kRows + 3) * 4, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
  }
  static size_t pitch(uint32_t columns) { return mm_round_up(columns, MM_CU_GROUP); }
  /* Scales of codes, by groups, in the half of the memory that is told nothing. */
  float *scales(uint32_t columns) const { return reinterpret_cast<float *>(m.x + kMost / 2) + (columns == whole ? 0 : 1 << 16); }
  /* x[kRows, columns] -> behind it. */
  void round(__nv_bfloat16 *x, uint32_t columns, const mm_cu_rounding &how, way by) const {
    __nv_bfloat16 *const y = x + (size_t)kRows * columns;
    mm_cu_route r = {};
    r.experts = by == LAID ? 0 : 3, r.top_k = 1, r.offset = words + 80;
    r.used = words + 64, r.slot_tokens = words + 65, r.slot_expert = words + 68, r.slot_weight = weight;
    if (by != PICKED) CUDA_OK(cudaMemcpyAsync(y, x, (size_t)kRows * columns * 2, cudaMemcpyDeviceToDevice, m.s));
    switch (by) {
      case PICKED: CUDA_OK(mm_cu_round(y, kRows, {x, columns, words}, how, m.s)); return;
      case IN_PLACE: CUDA_OK(mm_cu_round(y, kRows, {y, columns, nullptr}, how, m.s)); return;
      case SLOTS: CUDA_OK(mm_cu_round_slots(y, columns, r, weight + kRows, how, m.s)); return;
      case LAID: CUDA_OK(mm_cu_lay_rounded(y, how, r, kRows, columns, 32, m.s)); return;
      case CODES: {
        const mm_cu_codes to = {reinterpret_cast<uint8_t *>(y), scales(columns), kRows, (uint32_t)pitch(columns), kRows};
        CUDA_OK(mm_cu_encode(to, {x, columns, nullptr}, how, m.s));
        return;
      }
    }
  }
  /* As above, of codes: zeros behind the last column, and the row's scale at each group. */
  bool same_codes() const {
    uint8_t *const a = reinterpret_cast<uint8_t *>(m.host), *const o = a + kRows * pitch(whole);
    const size_t groups = pitch(k) / MM_CU_GROUP;
    float *const ours = reinterpret_cast<float *>(m.host + kMost / 2), *const theirs = ours + kRows * groups;
    CUDA_OK(cudaMemcpyAsync(a, all + (size_t)kRows * whole, kRows * pitch(whole), cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaMemcpyAsync(o, own + (size_t)kRows * k, kRows * pitch(k), cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaMemcpyAsync(ours, scales(k), kRows * groups * 4, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaMemcpyAsync(theirs, scales(whole), kRows * 4, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    mm_err err = {};
    must(mm_cu_peers_check(m.peers, &err), err);
    bool alike = true;
    for (uint32_t r = 0; r < kRows; r++) {
      alike = alike && !memcmp(o + r * pitch(k), a + r * pitch(whole) + m.rank * k, k);
      for (size_t c = k; c < pitch(k); c++) alike = alike && o[r * pitch(k) + c] == 0;
      for (size_t g = 0; g < groups; g++) alike = alike && !memcmp(&ours[g * kRows + r], &theirs[r], 4);
    }
    m.together();
    return alike;
  }
  bool same() const {
    uint16_t *const a = reinterpret_cast<uint16_t *>(m.host), *const o = a + (size_t)kRows * whole;
    CUDA_OK(cudaMemcpyAsync(a, all + (size_t)kRows * whole, (size_t)kRows * whole * 2, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaMemcpyAsync(o, own + (size_t)kRows * k, (size_t)kRows * k * 2, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    mm_err err = {};
    must(mm_cu_peers_check(m.peers, &err), err);
    bool alike = true;
    for (uint32_t r = 0; r < kRows; r++) alike = alike && !memcmp(o + (size_t)r * k, a + (size_t)r * whole + m.rank * k, k * 2);
    m.together();
    return alike;
  }
};

void check_kind(uint32_t ranks, mm_act_quant kind, uint32_t k, const char *name) {
  for (const way by : {PICKED, IN_PLACE, SLOTS, LAID, CODES}) {
    if ((by == LAID && k % 32) || (by == CODES && (k < MM_CU_GROUP / 2 || (kind != MM_ACT_FP8_TENSOR && kind != MM_ACT_FP8_TOKEN))))
      continue;
    const bool ok = on_ranks(ranks, 20, [&](member *m) {
      const rows_of rows(*m, k);
      mm_cu_whole_rows shared = {m->peers, reinterpret_cast<float *>(m->x), kMost / 8};
      mm_cu_rounding alone = {}, how = {};
      alone.kind = how.kind = kind, how.first_k = m->rank * k, how.whole_k = rows.whole, how.ranks = &shared;
      for (uint32_t t = 0; t < 3; t++) {
        rows.fill(t);
        m->together();
        rows.round(rows.all, rows.whole, alone, by), rows.round(rows.own, k, how, by);
        m->ok = (by == CODES ? rows.same_codes() : rows.same()) && m->ok;
      }
    });
    report_true(
        "whole rows, " + std::string(name) + ", " + std::to_string(ranks) + " ranks of " + std::to_string(k) + " columns, " + kWays[by],
        ok);
  }
}

}  // namespace

void test_cut_rows() {
  for (const uint32_t ranks : {2u, 4u}) {
    check_kind(ranks, MM_ACT_FP8_TENSOR, 320, "a scale a tensor");
    check_kind(ranks, MM_ACT_FP8_TOKEN, 8 * (1 + g_rng.below(90)), "a scale a token"),
        check_kind(ranks, MM_ACT_FP8_TOKEN, 520, "a scale a token");
    check_kind(ranks, MM_ACT_INT8_TOKEN, 256, "INT8");
    check_kind(ranks, MM_ACT_NVFP4, 16 * (1 + g_rng.below(60)), "NVFP4");
    check_kind(ranks, MM_ACT_FP8_GROUP, 192, "groups of 128");
    check_kind(ranks, MM_ACT_FP8_GROUP, 8 * (1 + g_rng.below(90)), "groups of 128");
    check_kind(ranks, MM_ACT_MXFP8, 8 * (1 + g_rng.below(90)), "groups of 32");
  }
  check_kind(8, MM_ACT_FP8_GROUP, 192, "groups of 128");
}
