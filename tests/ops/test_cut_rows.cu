/* Inputs that are rounded under scales of whole rows, of which each rank has some columns: the numbers that one device makes of whole rows,
 * to the bit. In place, picked, by the slots of a step of few tokens, and laid out for a product; and as codes. Rows of a route are also
 * divided among groups of ranks with other experts, which have them in other places. */
#include "runtime/cuda/core/fp8.h"
#include "runtime/cuda/moe/lay_places.h"
#include "tests/ops/members.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t kTokens = 16, kChoices = 3, kRows = kTokens * kChoices; /* pairs, and three slots of sixteen tokens */
enum way { PICKED, IN_PLACE, CODES, SLOTS, PLACES, PLACED_CODES, LAID };
const char *const kWays[] = {"picked", "in place", "codes", "slots", "places", "codes of places", "laid out"};
bool codes(way by) { return by == CODES || by == PLACED_CODES; }

/* A rank's memory: rows, results and the kernels' other inputs, of whole rows and of this rank's columns. */
struct rows_of {
  const member &m;
  way by;
  uint32_t parts, part, groups, group, whole; /* this rank has this part of the rows of one of so many groups: */
  uint32_t count, from, first, k; /* columns [from, from + count), in room for k from `first` on, where zeros stand around them */
  __nv_bfloat16 *all, *own;
  uint32_t *words;          /* picks; used; slots' tokens, experts; places; pairs; ids */
  float *weight;            /* [kRows], then each expert's factor */
  uint32_t row[kRows] = {}; /* which of all rows stands there; ~0: none */

  rows_of(const member &member, way how, uint32_t columns, uint32_t sides, bool padded)
      : m(member),
        by(how),
        parts(m.ranks / sides),
        part(m.rank % parts),
        groups(sides),
        group(m.rank / parts),
        whole(columns * parts),
        count(columns),
        from(part * columns),
        first(padded ? from / MM_CU_GROUP * MM_CU_GROUP : from),
        k(columns) {
    for (uint32_t p = 0; padded && p < parts; p++)
      k = std::max(k, (uint32_t)mm_round_up((p + 1) * columns, MM_CU_GROUP) - p * columns / MM_CU_GROUP * MM_CU_GROUP);
    all = reinterpret_cast<__nv_bfloat16 *>(m.source), own = all + 2 * (size_t)kRows * whole;
    words = reinterpret_cast<uint32_t *>(own + 2 * (size_t)kRows * k), weight = reinterpret_cast<float *>(words + 256);
  }
  /* The route: each token's choices are of different experts, held by any group; where its pairs stand in this one. */
  void lay(uint32_t *w, uint32_t t) {
    uint32_t *const used = w + 64, *const tokens = w + 65, *const expert = w + 68, *const places = w + 80, *const pair = w + 96,
                    *const id = w + 144;
    for (uint32_t r = 0; r < kRows; r++) w[r] = (r * 5 + 1) % kRows;
    *used = 3, *places = 0, tokens[0] = tokens[1] = tokens[2] = 0, expert[0] = 2, expert[1] = 0, expert[2] = 1;
    for (uint32_t i = 0; i < kRows; i++) {
      const uint32_t p = (i * (group ? 11 : 5) + t) % kRows, token = p / kChoices;
      const bool here = (token * 7 + p * 5 / 3 + t) % groups == group;
      id[p] = here ? (token + p) % kChoices : ~0u;
      if (here) pair[(*places)++] = p;
    }
    for (uint32_t i = *places; i < kRows; i++) pair[i] = i; /* of a step before */
    for (uint32_t r = 0; r < kRows; r++) {
      const uint32_t slot = r / kTokens, token = r % kTokens;
      row[r] = by < SLOTS ? r : by != SLOTS && r < *places ? pair[r] : ~0u;
      for (uint32_t p = token * kChoices; by == SLOTS && p < (token + 1) * kChoices; p++) {
        if (id[p] == expert[slot]) row[r] = p, tokens[slot] |= 1u << token;
      }
    }
  }
  /* Rows of different sizes, whose largest number is in any rank's columns; some zero, some no number. */
  void fill(uint32_t t) {
    __nv_bfloat16 *const a = reinterpret_cast<__nv_bfloat16 *>(m.host), *const o = a + (size_t)kRows * whole;
    uint32_t *const w = reinterpret_cast<uint32_t *>(o + (size_t)kRows * k);
    lay(w, t);
    for (uint32_t i = 0; i < kRows; i++) {
      const uint32_t r = row[i];
      for (uint32_t c = 0; c < whole; c++) {
        float v = number(t, 40, (size_t)r * whole + c) * exp2f((float)(r % 9) * 3 - 12);
        if (r % 11 == 3) v = 0;
        if (r % 13 == 5 && c == (r * 7 + t) % whole) v *= 60;
        if (r % 17 == 6 && c == (r * 5 + t) % whole) v = NAN;
        if (r == ~0u) v = 1e9f * (float)(m.rank + 1); /* a value that must not be published */
        a[(size_t)i * whole + c] = __float2bfloat16(v);
      }
      for (uint32_t c = 0; c < k; c++)
        o[(size_t)i * k + c] = first + c - from < count ? a[(size_t)i * whole + first + c] : __float2bfloat16(0);
    }
    for (uint32_t r = 0; r < kRows + 3; r++) reinterpret_cast<float *>(w + 256)[r] = number(t, 41, r);
    CUDA_OK(cudaMemcpyAsync(all, a, (size_t)kRows * whole * 2, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaMemcpyAsync(own, o, (size_t)kRows * k * 2, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaMemcpyAsync(words, w, 1024 + (kRows + 3) * 4, cudaMemcpyHostToDevice, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
  }
  static size_t pitch(uint32_t columns) { return mm_round_up(columns, MM_CU_GROUP); }
  /* Scales of codes, by groups, in the half of the memory that is not published. */
  float *scales(const __nv_bfloat16 *x) const { return reinterpret_cast<float *>(m.x + kMost / 2) + (x == all ? 0 : 1 << 16); }
  /* Rows that are rounded in place lie behind it. No copy waits in a queue for copies while another rank's kernel waits for this rank. */
  void copy(__nv_bfloat16 *x, uint32_t columns) const {
    if (by != PICKED) CUDA_OK(cudaMemcpyAsync(x + (size_t)kRows * columns, x, (size_t)kRows * columns * 2, cudaMemcpyDeviceToDevice, m.s));
  }
  /* x[kRows, columns] -> behind it. */
  void round(__nv_bfloat16 *x, uint32_t columns, const mm_cu_rounding &how) const {
    __nv_bfloat16 *const y = x + (size_t)kRows * columns;
    mm_cu_route r = {};
    r.top_k = kChoices, r.offset = words + 80, r.pair = words + 96, r.id = words + 144;
    r.used = words + 64, r.slot_tokens = words + 65, r.slot_expert = words + 68, r.slot_weight = weight;
    const mm_cu_placed of = by == PLACES || by == PLACED_CODES ? mm_cu_placed_of(r) : mm_cu_placed{};
    switch (by) {
      case PICKED: CUDA_OK(mm_cu_round(y, kRows, {x, columns, words}, how, m.s)); return;
      case IN_PLACE:
      case PLACES: CUDA_OK(mm_cu_round(y, kRows, {y, columns, nullptr, of}, how, m.s)); return;
      case SLOTS: CUDA_OK(mm_cu_round_slots(y, kTokens, columns, r, weight + kRows, how, m.s)); return;
      case LAID: CUDA_OK(mm_cu_lay_rounded(y, how, r, kTokens, columns, 32, m.s)); return;
      case CODES:
      case PLACED_CODES: {
        const mm_cu_codes to = {reinterpret_cast<uint8_t *>(y), scales(x), kRows, (uint32_t)pitch(columns), kRows};
        CUDA_OK(mm_cu_encode(to, {x, columns, nullptr, of}, how, m.s));
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
    CUDA_OK(cudaMemcpyAsync(ours, scales(own), kRows * groups * 4, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaMemcpyAsync(theirs, scales(all), kRows * 4, cudaMemcpyDeviceToHost, m.s));
    CUDA_OK(cudaStreamSynchronize(m.s));
    mm_err err = {};
    must(mm_cu_peers_check(m.peers, &err), err);
    bool alike = true;
    for (uint32_t r = 0; r < kRows; r++) {
      if (row[r] == ~0u) continue;
      alike = alike && !memcmp(o + r * pitch(k) + from - first, a + r * pitch(whole) + from, count);
      for (uint32_t c = 0; c < pitch(k); c++) alike = alike && (first + c - from < count || o[r * pitch(k) + c] == 0);
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
    for (uint32_t r = 0; r < kRows; r++) {
      const uint16_t *const row = o + (size_t)r * k;
      alike = alike && !memcmp(row + from - first, a + (size_t)r * whole + from, count * 2);
      for (uint32_t c = 0; by != LAID && c < k; c++) alike = alike && (first + c - from < count || !(row[c] & 0x7fff));
    }
    m.together();
    return alike;
  }
};

void check_way(uint32_t ranks, uint32_t groups, bool padded, mm_act_quant kind, uint32_t k, way by, const char *name) {
  const std::string what = "whole rows, " + std::string(name) + ", " + std::to_string(ranks) + " ranks of " + std::to_string(k) +
                           " columns, " + kWays[by] + (groups > 1 ? ", of two groups" : "") + (padded ? ", padded" : "");
  if (getenv("MM_WATCH")) printf("     %s …\n", what.c_str());
  const bool ok = on_ranks(ranks, 20, [&](member *m) {
    rows_of rows(*m, by, k, groups, padded);
    mm_cu_whole_rows shared = {m->peers, reinterpret_cast<float *>(m->x), kMost / 8};
    mm_cu_rounding alone = {}, how = {};
    alone.kind = how.kind = kind, how.first_k = rows.first, how.whole_k = rows.whole, how.ranks = &shared;
    for (uint32_t t = 0; t < 3; t++) {
      m->at = "fill", rows.fill(t), rows.copy(rows.all, rows.whole), rows.copy(rows.own, rows.k);
      CUDA_OK(cudaStreamSynchronize(m->s));
      m->at = "the barrier", m->together();
      m->at = "launch, whole", rows.round(rows.all, rows.whole, alone);
      m->at = "launch, own", rows.round(rows.own, rows.k, how);
      m->at = "results";
      m->ok = (codes(by) ? rows.same_codes() : rows.same()) && m->ok;
    }
  });
  report_true(what, ok);
}
void check_kind(uint32_t ranks, mm_act_quant kind, uint32_t k, const char *name) {
  for (const way by : {PICKED, IN_PLACE, CODES, SLOTS, PLACES, PLACED_CODES, LAID}) {
    if ((by == LAID && k % 32) || (codes(by) && (k < MM_CU_GROUP / 2 || (kind != MM_ACT_FP8_TENSOR && kind != MM_ACT_FP8_TOKEN)))) continue;
    check_way(ranks, 1, false, kind, k, by, name);
    if (ranks > 2 && by >= SLOTS) check_way(ranks, 2, false, kind, k, by, name);
    if (by >= SLOTS && by != LAID && (kind != MM_ACT_NVFP4 || k % 16 == 0))
      check_way(ranks, 1, true, kind, k, by, name); /* --tp-align pad */
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
