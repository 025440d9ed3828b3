/* Attention over selected blocks, op by op: heads (norm of each, RoPE, cells), the selection of blocks, and attention over given lists,
 * each compared with doubles. Pages are scattered, unused cells hold NaN, every number differs from its neighbours. Where scores are whole
 * numbers, so that sums of products are exact and ties are many, lists must be equal; where they are not, no list may hold a block whose
 * score is lower than that of one it leaves out by more than a sum's rounding. Attention is given lists (none depends on the selection's
 * near ties). */
#include <string.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "runtime/cuda/attention/block_attention.h"
#include "runtime/cuda/core/device.cuh"
#include "runtime/cuda/core/fp8.h"
#include "tests/ops/gpu.h"

namespace {

constexpr uint32_t kPage = MM_CU_PAGE;

/* Sequences that hold some tokens and bring more: their rows, and a table of scattered pages. */
struct fixture {
  std::vector<uint32_t> before, count, table, pos, seq;
  std::vector<int32_t> slot;
  std::vector<mm_cu_span> span;
  std::vector<uint2> tile;
  uint32_t per_slot, pages, rows;
  buffer<int32_t> dslot;
  buffer<uint32_t> dpos, dtable;
  buffer<mm_cu_span> dspan;
  buffer<uint2> dtile;

  /* padding: so many rows of slot -1 behind the others. */
  fixture(const std::vector<uint32_t> &held, const std::vector<uint32_t> &brought, uint32_t padding) : before(held), count(brought) {
    uint32_t most = 0;
    for (size_t i = 0; i < held.size(); i++) most = std::max(most, held[i] + brought[i]);
    per_slot = most / kPage + 1, pages = per_slot * (uint32_t)held.size();
    table.resize(pages);
    std::iota(table.begin(), table.end(), 0);
    for (uint32_t i = pages - 1; i > 0; i--) std::swap(table[i], table[g_rng.below(i + 1)]);
    for (uint32_t s = 0; s < held.size(); s++) add((int32_t)s, held[s], brought[s]);
    if (padding) add(-1, 0, padding);
    rows = (uint32_t)slot.size();
    dslot.put(slot), dpos.put(pos), dtable.put(table), dspan.put(span), dtile.put(tile);
  }
  void add(int32_t s, uint32_t from, uint32_t n) {
    for (uint32_t i = 0; i < n; i += MM_CU_TILE) tile.push_back(make_uint2((uint32_t)span.size(), i));
    span.push_back({s, (uint32_t)slot.size(), n, from});
    for (uint32_t i = 0; i < n; i++) slot.push_back(s), pos.push_back(from + i), seq.push_back(s < 0 ? 0 : (uint32_t)s);
  }
  size_t cell(uint32_t s, uint32_t heads, uint32_t head, uint32_t at) const {
    return mm_cu_cell(table[s * per_slot + at / kPage], heads, head) + at % kPage;
  }
  size_t cells(uint32_t heads) const { return (size_t)pages * heads * kPage; }
  uint32_t last(uint32_t s) const { return before[s] + count[s]; }
  mm_cu_rows drows() const { return {dslot.p, dpos.p}; }
  mm_cu_tiles dtiles() const { return {dspan.p, dtile.p, (uint32_t)tile.size()}; }
};

/* A cache [cells, d] whose cells of positions [0, held) of each sequence are filled, the others NaN. whole: small whole numbers. */
std::vector<bf16> filled(const fixture &w, uint32_t heads, uint32_t d, bool whole, bool later) {
  std::vector<bf16> v(w.cells(heads) * d, __float2bfloat16(NAN));
  for (uint32_t s = 0; s < w.before.size(); s++) {
    for (uint32_t p = 0; p < (later ? w.last(s) : w.before[s]); p++) {
      for (uint32_t h = 0; h < heads; h++) {
        for (uint32_t i = 0; i < d; i++)
          v[w.cell(s, heads, h, p) * d + i] = __float2bfloat16(whole ? (float)g_rng.below(5) - 2 : (float)g_rng.normal());
      }
    }
  }
  return v;
}

std::string words(const char *what, uint32_t d, uint32_t heads, const fixture &w) {
  return std::string(what) + " d " + std::to_string(d) + ", " + std::to_string(heads) + " heads, " + std::to_string(w.rows) +
         " rows, up to " + std::to_string(w.last(0));
}

/* The same in e4m3: cells become what their codes stand for, under a scale that is a power of two, so that bf16 holds them. Cells of NaN
 * have codes and scales of NaN. */
struct narrow_cache {
  std::vector<uint8_t> code;
  std::vector<float> scale;
  buffer<uint8_t> dcode;
  buffer<float> dscale;

  narrow_cache(std::vector<bf16> &v, uint32_t d) : code(v.size()), scale(v.size() / d, NAN) {
    for (size_t cell = 0; cell < scale.size(); cell++) {
      float top = 1e-3f;
      bool there = true;
      for (uint32_t i = 0; i < d; i++)
        there &= !std::isnan(to_float(v[cell * d + i])), top = std::max(top, fabsf(to_float(v[cell * d + i])));
      if (there) scale[cell] = exp2f(ceilf(log2f(top / 448)));
      for (uint32_t i = 0; i < d; i++) {
        uint8_t &c = code[cell * d + i];
        c = there ? nearest_e4m3(to_float(v[cell * d + i]) / scale[cell]) : 0x7f;
        if (there) v[cell * d + i] = __float2bfloat16((float)(e4m3(c) * scale[cell]));
      }
    }
    dcode.put(code), dscale.put(scale);
  }
};

/* ---- heads ---- */

struct heads_case {
  uint32_t q_heads, k_heads, v_heads, d, rotary;
  bool norm;
};

/* One head of d numbers as the kernel leaves it. */
std::vector<double> head_ref(const bf16 *x, uint32_t d, const float *norm, const std::vector<float> &freq, uint32_t pos, bool turns) {
  std::vector<double> v(d), y;
  double sum = 0;
  for (uint32_t i = 0; i < d; i++) v[i] = to_float(x[i]), sum += v[i] * v[i];
  for (uint32_t i = 0; norm && i < d; i++) v[i] *= norm[i] / sqrt(sum / d + 1e-6);
  y = v;
  for (uint32_t i = 0; turns && i < freq.size(); i++) {
    const double angle = (double)((float)pos * freq[i]), c = cos(angle), s = sin(angle), a = v[i], b = v[i + freq.size()];
    y[i] = a * c - b * s, y[i + freq.size()] = b * c + a * s;
  }
  return y;
}

void check_heads(const heads_case &c, const fixture &w) {
  const uint32_t d = c.d, q_width = c.q_heads * d, kv_width = (c.k_heads + c.v_heads) * d;
  const auto q = random_bf16((size_t)w.rows * q_width), kv = random_bf16((size_t)w.rows * kv_width);
  const auto qn = random_float(d, 1, 0.3), kn = random_float(d, 1, 0.3);
  std::vector<float> freq(c.rotary / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = (float)pow(5e6, -2.0 * i / c.rotary);
  buffer<bf16> dq, dkv, dkeys(w.cells(c.k_heads) * d), dvalues(w.cells(std::max(1u, c.v_heads)) * d);
  buffer<float> dqn, dkn, dfreq;
  dq.put(q), dkv.put(kv), dqn.put(qn), dkn.put(kn), dfreq.put(freq);
  const mm_cu_head_work a = {dq.p,
                             dkv.p,
                             dkv.p + c.k_heads * d,
                             q_width,
                             kv_width,
                             c.q_heads,
                             c.k_heads,
                             c.v_heads,
                             d,
                             c.rotary,
                             c.norm ? dqn.p : nullptr,
                             c.norm ? dkn.p : nullptr,
                             dfreq.p,
                             1e-6f,
                             dkeys.p,
                             dvalues.p,
                             w.dtable.p,
                             w.per_slot,
                             w.rows};
  CUDA_OK(mm_cu_place_heads(a, w.drows(), 0));
  const auto got_q = dq.get(), keys = dkeys.get(), values = dvalues.get();
  std::vector<double> want, got;
  size_t written = 0, there = 0;
  const auto take = [&](const std::vector<double> &ref, const bf16 *at) {
    want.insert(want.end(), ref.begin(), ref.end());
    for (uint32_t i = 0; i < d; i++) got.push_back(to_float(at[i]));
  };
  bool untouched = true;
  for (uint32_t r = 0; r < w.rows; r++) {
    const bool pads = w.slot[r] < 0;
    for (uint32_t h = 0; h < c.q_heads; h++) {
      const size_t at = (size_t)r * q_width + h * d;
      if (!pads) take(head_ref(&q[at], d, c.norm ? qn.data() : nullptr, freq, w.pos[r], true), &got_q[at]);
      for (uint32_t i = 0; pads && i < d; i++) untouched &= to_float(got_q[at + i]) == to_float(q[at + i]);
    }
    for (uint32_t h = 0; !pads && h < c.k_heads + c.v_heads; h++) {
      const bool key = h < c.k_heads;
      const size_t cell = w.cell(w.seq[r], key ? c.k_heads : c.v_heads, key ? h : h - c.k_heads, w.pos[r]);
      take(head_ref(&kv[(size_t)r * kv_width + h * d], d, key && c.norm ? kn.data() : nullptr, freq, w.pos[r], key),
           (key ? &keys[0] : &values[0]) + cell * d);
      there += d;
    }
  }
  for (const auto *cache : {&keys, &values}) {
    for (const bf16 v : *cache) written += !std::isnan(to_float(v));
  }
  report(words("heads:", d, c.q_heads, w), relative_error(want, got), 4e-3);
  report_true(words("heads: no other cell and no padding is written,", d, c.q_heads, w), untouched && written == there);
}

/* Keys and values in e4m3: their codes stand for them under the scale of their cell, and no other cell or scale is written. */
void check_narrow_heads(const heads_case &c, const fixture &w) {
  const uint32_t d = c.d, q_width = c.q_heads * d, kv_width = 2 * c.k_heads * d;
  const auto q = random_bf16((size_t)w.rows * q_width), kv = random_bf16((size_t)w.rows * kv_width);
  const auto kn = random_float(d, 1, 0.3);
  std::vector<float> freq(c.rotary / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = (float)pow(5e6, -2.0 * i / c.rotary);
  const size_t cells = w.cells(c.k_heads);
  buffer<bf16> dq, dkv;
  buffer<uint8_t> code[2] = {buffer<uint8_t>(cells * d), buffer<uint8_t>(cells * d)};
  buffer<float> dkn, dfreq, scale[2] = {buffer<float>(cells), buffer<float>(cells)};
  dq.put(q), dkv.put(kv), dkn.put(kn), dfreq.put(freq);
  for (int i = 0; i < 2; i++) scale[i].put(std::vector<float>(cells, -1)), code[i].put(std::vector<uint8_t>(cells * d, 0x7f));
  mm_cu_head_work a = {dq.p,      dkv.p,      dkv.p + c.k_heads * d,
                       q_width,   kv_width,   c.q_heads,
                       c.k_heads, c.k_heads,  d,
                       c.rotary,  nullptr,    dkn.p,
                       dfreq.p,   1e-6f,      code[0].p,
                       code[1].p, w.dtable.p, w.per_slot,
                       w.rows,    scale[0].p, scale[1].p};
  CUDA_OK(mm_cu_place_heads(a, w.drows(), 0));
  std::vector<double> want, got;
  size_t written = 0, there = 0;
  const std::vector<uint8_t> codes[2] = {code[0].get(), code[1].get()};
  const std::vector<float> scales[2] = {scale[0].get(), scale[1].get()};
  for (uint32_t r = 0; r < w.rows; r++) {
    for (uint32_t h = 0; w.slot[r] >= 0 && h < 2 * c.k_heads; h++, there++) {
      const bool key = h < c.k_heads;
      const size_t cell = w.cell(w.seq[r], c.k_heads, h % c.k_heads, w.pos[r]);
      const auto ref = head_ref(&kv[(size_t)r * kv_width + h * d], d, key ? kn.data() : nullptr, freq, w.pos[r], key);
      want.insert(want.end(), ref.begin(), ref.end());
      for (uint32_t i = 0; i < d; i++) got.push_back(e4m3(codes[!key][cell * d + i]) * (double)scales[!key][cell]);
    }
  }
  for (const auto &s : scales) {
    for (const float x : s) written += x != -1;
  }
  report(words("heads in e4m3:", d, c.q_heads, w), relative_error(want, got), 4e-2);
  report_true(words("heads in e4m3: no other cell is written,", d, c.q_heads, w), written == there);
}

/* ---- selection ---- */

struct select_case {
  uint32_t heads, d, size, top_k, local;
  bool whole;       /* numbers */
  bool fp8 = false; /* keys in e4m3 */
};

/* The largest q·k of each block before the row's last `local`, in f64. */
std::vector<double> scores_ref(const select_case &c, const fixture &w, uint32_t row, const bf16 *q, const std::vector<bf16> &keys) {
  const uint32_t blocks = w.pos[row] / c.size + 1;
  std::vector<double> score(blocks > c.local ? blocks - c.local : 0, -INFINITY);
  for (uint32_t b = 0; b < score.size(); b++) {
    for (uint32_t p = b * c.size; p < (b + 1) * c.size; p++) {
      const bf16 *const k = &keys[w.cell(w.seq[row], 1, 0, p) * c.d];
      double sum = 0;
      for (uint32_t i = 0; i < c.d; i++) sum += (double)to_float(q[i]) * to_float(k[i]);
      score[b] = std::max(score[b], sum);
    }
  }
  return score;
}

/* Whether the list is that of the scores, near ties left open unless the numbers are whole. */
bool right_list(const select_case &c, uint32_t pos, const std::vector<double> &score, const std::vector<uint32_t> &got) {
  const uint32_t all = pos / c.size + 1, count = std::min(c.top_k, all), forced = all > count ? c.local : all, others = all - forced;
  if (got.size() != count || !std::is_sorted(got.begin(), got.end()) || std::adjacent_find(got.begin(), got.end()) != got.end())
    return false;
  for (uint32_t i = 0; i < forced; i++) {
    if (got[count - forced + i] != others + i) return false;
  }
  std::vector<uint32_t> best(others);
  std::iota(best.begin(), best.end(), 0);
  std::stable_sort(best.begin(), best.end(), [&](uint32_t x, uint32_t y) { return score[x] > score[y]; });
  best.resize(count - forced);
  std::sort(best.begin(), best.end());
  if (std::equal(best.begin(), best.end(), got.begin())) return true;
  if (c.whole) return false;
  double least = INFINITY, most = -INFINITY;
  for (uint32_t b = 0; b < others; b++) {
    const bool taken = std::binary_search(got.begin(), got.end() - forced, b);
    taken ? least = std::min(least, score[b]) : most = std::max(most, score[b]);
  }
  return least >= most - 1e-5 * sqrt((double)c.d) * 4;
}

/* decode: every sequence brings one row. copies: so many pairs of blocks of the first sequence hold the same keys. */
void check_select(const select_case &c, const fixture &w, bool decode, uint32_t copies) {
  double work = 0;
  for (uint32_t r = 0; r < w.rows; r++) work += (double)w.pos[r] * c.heads * c.d;
  if (left_out(work)) return;
  auto keys = filled(w, 1, c.d, c.whole, true);
  const uint32_t whole_blocks = w.last(0) / c.size;
  for (uint32_t i = 0; i < copies && whole_blocks > 2; i++) {
    const uint32_t from = g_rng.below(whole_blocks), to = g_rng.below(whole_blocks);
    for (uint32_t p = 0; p < c.size; p++)
      std::copy_n(&keys[w.cell(0, 1, 0, from * c.size + p) * c.d], c.d, &keys[w.cell(0, 1, 0, to * c.size + p) * c.d]);
  }
  auto q = random_bf16((size_t)w.rows * c.heads * c.d);
  for (auto &x : q) {
    if (c.whole) x = __float2bfloat16((float)g_rng.below(5) - 2);
  }
  const uint32_t most = w.per_slot * kPage / c.size + 1;
  buffer<bf16> dq, dkeys;
  buffer<float> score(mm_cu_score_floats(c.heads, most));
  buffer<uint32_t> block((size_t)w.rows * c.heads * c.top_k), count((size_t)w.rows * c.heads);
  std::optional<narrow_cache> narrow;
  if (c.fp8) narrow.emplace(keys, c.d);
  dq.put(q), dkeys.put(keys);
  mm_cu_select a = {dq.p, dkeys.p, w.dtable.p, w.per_slot, c.heads, c.d, c.size, c.top_k, c.local, score.p, most, block.p, count.p};
  if (narrow) a.keys = reinterpret_cast<const bf16 *>(narrow->dcode.p), a.key_scale = narrow->dscale.p;
  CUDA_OK(decode ? mm_cu_select_rows(a, w.drows(), w.rows, 0) : mm_cu_select_tiles(a, w.dtiles(), 0));
  const auto got = block.get(), counts = count.get();
  std::vector<char> good((size_t)w.rows * c.heads, 0);
  parallel(w.rows * c.heads, [&](uint32_t i) {
    const uint32_t row = i / c.heads;
    if (w.slot[row] < 0) {
      good[i] = counts[i] == 0;
      return;
    }
    const auto want = scores_ref(c, w, row, &q[(size_t)i * c.d], keys);
    good[i] = counts[i] <= c.top_k && right_list(c, w.pos[row], want, {&got[(size_t)i * c.top_k], &got[(size_t)i * c.top_k] + counts[i]});
  });
  report_true(words(decode ? "select, single rows:" : "select, tiles:", c.d, c.heads, w) + ", blocks of " + std::to_string(c.size) +
                  (c.whole ? ", ties" : "") + (c.fp8 ? ", keys in e4m3" : ""),
              std::count(good.begin(), good.end(), 1) == (ptrdiff_t)good.size());
}

/* The same rows as tiles and one by one: the same lists. */
void check_select_alone(const select_case &c, const fixture &w) {
  const auto keys = filled(w, 1, c.d, false, true), q = random_bf16((size_t)w.rows * c.heads * c.d);
  const uint32_t most = w.per_slot * kPage / c.size + 1;
  buffer<bf16> dq, dkeys;
  buffer<float> score(mm_cu_score_floats(c.heads, most));
  dq.put(q), dkeys.put(keys);
  std::vector<uint32_t> list[2];
  for (int i = 0; i < 2; i++) {
    buffer<uint32_t> block((size_t)w.rows * c.heads * c.top_k), count((size_t)w.rows * c.heads);
    block.zero();
    const mm_cu_select a = {dq.p, dkeys.p, w.dtable.p, w.per_slot, c.heads, c.d, c.size, c.top_k, c.local, score.p, most, block.p, count.p};
    CUDA_OK(i ? mm_cu_select_rows(a, w.drows(), w.rows, 0) : mm_cu_select_tiles(a, w.dtiles(), 0));
    list[i] = block.get();
  }
  report_true(words("select: rows of a chunk as single rows, the same lists,", c.d, c.heads, w), list[0] == list[1]);
}

/* ---- attention ---- */

struct blocks_case {
  mm_cu_heads h;
  uint32_t lists, size, top_k; /* lists 0: all positions */
};

/* Blocks that a row might read: its own and some before it, ascending. */
std::vector<uint32_t> some_blocks(uint32_t pos, uint32_t size, uint32_t top_k) {
  std::vector<uint32_t> all(pos / size);
  std::iota(all.begin(), all.end(), 0);
  while (all.size() > top_k - 1) all.erase(all.begin() + g_rng.below((uint32_t)all.size()));
  all.push_back(pos / size);
  return all;
}

void attend_ref(const blocks_case &c, const fixture &w, uint32_t row, uint32_t head, const std::vector<bf16> &qkv,
                const std::vector<bf16> &k, const std::vector<bf16> &v, const std::vector<char> &sees, double *out) {
  const mm_cu_heads &h = c.h;
  const uint32_t d = h.head_dim, kv_head = head / (h.heads / h.kv_heads);
  const bf16 *const q = &qkv[(size_t)row * (h.heads + 2 * h.kv_heads) * d + head * d];
  std::vector<double> s(w.pos[row] + 1, -INFINITY);
  double top = -INFINITY, total = 0;
  for (uint32_t p = 0; p <= w.pos[row]; p++) {
    if (!sees[p]) continue;
    const bf16 *const key = &k[w.cell(w.seq[row], h.kv_heads, kv_head, p) * d];
    s[p] = 0;
    for (uint32_t i = 0; i < d; i++) s[p] += (double)to_float(q[i]) * to_float(key[i]);
    s[p] /= sqrt((double)d), top = std::max(top, s[p]);
  }
  std::fill(out, out + d, 0.0);
  for (uint32_t p = 0; p <= w.pos[row]; p++) {
    if (!sees[p]) continue;
    const double e = exp(s[p] - top);
    total += e;
    for (uint32_t i = 0; i < d; i++) out[i] += e * to_float(v[w.cell(w.seq[row], h.kv_heads, kv_head, p) * d + i]);
  }
  for (uint32_t i = 0; i < d; i++) out[i] /= total;
}

typedef cudaError_t (*tiles_fn)(const mm_cu_heads &, const mm_cu_tiles &, const mm_cu_kv &, const mm_cu_block_lists &, const mm_cu_gqa &,
                                cudaStream_t);

/* o as a kernel of tiles leaves it at its second call, poison where no tile has the row. alone: each row is a span of its own. */
std::vector<bf16> by_tiles(const blocks_case &c, const fixture &w, const mm_cu_kv &kv, const mm_cu_block_lists &l, const bf16 *qkv,
                           bool alone, tiles_fn attend) {
  std::vector<mm_cu_span> span = w.span;
  std::vector<uint2> tile = w.tile;
  if (alone) {
    span.clear(), tile.clear();
    for (uint32_t r = 0; r < w.rows; r++) tile.push_back(make_uint2(r, 0)), span.push_back({w.slot[r], r, 1, w.pos[r]});
  }
  buffer<mm_cu_span> dspan;
  buffer<uint2> dtile;
  buffer<bf16> o((size_t)w.rows * c.h.heads * c.h.head_dim);
  std::vector<uint8_t> capacity(c.lists ? mm_cu_by_block_work(c.h, c.lists, c.top_k, w.rows) : 0, 0xff);
  std::fill(capacity.begin(), capacity.begin() + std::min<size_t>(256, capacity.size()), (uint8_t)0);
  buffer<uint8_t> work;
  work.put(capacity), dspan.put(span), dtile.put(tile);
  for (int again = 0; again < 2; again++) {
    o.poison();
    CUDA_OK(attend(c.h, {dspan.p, dtile.p, (uint32_t)tile.size()}, kv, l, {qkv, o.p, work.p, w.rows, w.rows}, 0));
  }
  return o.get();
}

/* A kernel of tiles compared with `want`, and each row alone with the row among others. */
void check_tiles(const char *what, const blocks_case &c, const fixture &w, const mm_cu_kv &kv, const mm_cu_block_lists &l, const bf16 *qkv,
                 const std::vector<double> &want, tiles_fn attend) {
  const auto whole_rows = by_tiles(c, w, kv, l, qkv, false, attend), single = by_tiles(c, w, kv, l, qkv, true, attend);
  std::vector<double> got;
  for (const bf16 x : whole_rows) got.push_back(to_float(x));
  report(words(what, c.h.head_dim, c.h.heads, w), relative_error(want, got), 6e-3);
  report_true(words(what, c.h.head_dim, c.h.heads, w) + ": rows alone, bit for bit",
              memcmp(whole_rows.data(), single.data(), whole_rows.size() * sizeof single[0]) == 0);
}

void check_blocks(const blocks_case &c, const fixture &w, bool split, bool narrow) {
  const mm_cu_heads &h = c.h;
  const uint32_t d = h.head_dim, width = (h.heads + 2 * h.kv_heads) * d, lists = std::max(1u, c.lists);
  double work = 0;
  for (uint32_t r = 0; r < w.rows; r++) work += (double)w.pos[r] * h.heads * d;
  if (left_out(work)) return;
  const auto qkv = random_bf16((size_t)w.rows * width, 0.7);
  auto k = filled(w, h.kv_heads, d, false, true), v = filled(w, h.kv_heads, d, false, true);
  std::vector<uint32_t> block((size_t)w.rows * lists * std::max(1u, c.top_k), 0xffffffffu), count((size_t)w.rows * lists, 0);
  std::vector<std::vector<char>> sees((size_t)w.rows * lists);
  for (uint32_t i = 0; i < w.rows * lists; i++) {
    const uint32_t row = i / lists, pos = w.pos[row];
    sees[i].assign(pos + 1, c.lists == 0);
    if (c.lists == 0 || w.slot[row] < 0) continue;
    const auto some = some_blocks(pos, c.size, c.top_k);
    std::copy(some.begin(), some.end(), block.begin() + (size_t)i * c.top_k);
    count[i] = (uint32_t)some.size();
    for (const uint32_t b : some) {
      for (uint32_t p = b * c.size; p < std::min((b + 1) * c.size, pos + 1); p++) sees[i][p] = 1;
    }
  }
  buffer<bf16> dqkv, dk, dv, o((size_t)w.rows * h.heads * d);
  buffer<uint32_t> dblock, dcount;
  buffer<uint8_t> capacity(mm_cu_block_work(h, w.rows));
  dqkv.put(qkv), dk.put(k), dv.put(v), dblock.put(block), dcount.put(count), capacity.zero();
  mm_cu_kv kv = {dk.p, dv.p, w.dtable.p, w.per_slot};
  std::optional<narrow_cache> nk, nv;
  if (narrow) {
    nk.emplace(k, d), nv.emplace(v, d);
    kv.k = nk->dcode.p, kv.v = nv->dcode.p, kv.k_scale = nk->dscale.p, kv.v_scale = nv->dscale.p;
  }
  const mm_cu_block_lists l = {c.lists ? dblock.p : nullptr, dcount.p, c.lists, c.top_k, c.size};
  const mm_cu_block_job job = {dqkv.p, o.p, capacity.p, 0, w.rows, w.rows, split};
  for (int again = 0; again < 2; again++) { /* the counters come back to zero */
    o.poison();
    CUDA_OK(mm_cu_gqa_blocks(h, w.drows(), kv, l, job, 0));
  }
  const auto out = o.get();
  std::vector<double> want((size_t)w.rows * h.heads * d), got(want.size());
  parallel(w.rows * h.heads, [&](uint32_t i) {
    const uint32_t row = i / h.heads, head = i % h.heads, kv_head = head / (h.heads / h.kv_heads);
    const uint32_t list = row * lists + (c.lists ? kv_head / (h.kv_heads / c.lists) : 0);
    if (w.slot[row] >= 0) attend_ref(c, w, row, head, qkv, k, v, sees[list], &want[(size_t)i * d]);
  });
  for (size_t i = 0; i < got.size(); i++) got[i] = to_float(out[i]);
  report(words(c.lists ? "attention over blocks:" : "attention over all, in blocks' kernel:", d, h.heads, w) + (split ? ", split" : "") +
             (narrow ? ", e4m3" : ""),
         relative_error(want, got), 6e-3);
  if (split) return;
  if (mm_cu_takes_block_tiles(h, kv, l))
    check_tiles("attention over blocks, tiles of rows:", c, w, kv, l, dqkv.p, want, mm_cu_gqa_block_tiles);
  if (mm_cu_takes_by_block(h, kv, l)) check_tiles("attention by block:", c, w, kv, l, dqkv.p, want, mm_cu_gqa_by_block);
  buffer<bf16> alone((size_t)w.rows * h.heads * d);
  for (uint32_t r = 0; r < w.rows; r++) {
    mm_cu_block_job one = job;
    one.o = alone.p, one.first = r, one.count = 1;
    CUDA_OK(mm_cu_gqa_blocks(h, w.drows(), kv, l, one, 0));
  }
  const auto by_one = alone.get();
  bool same = true;
  for (size_t i = 0; i < out.size(); i++) same &= to_float(out[i]) == to_float(by_one[i]);
  report_true(words("attention over blocks: rows alone, bit for bit,", d, h.heads, w), same);
}

/* ---- dense MLPs ---- */

/* Gates and up values on both sides of the limit, and what comes on top of a row. */
void check_mlp(const mm_cu_activation &act, uint32_t rows, uint32_t inter) {
  const auto wide = random_float((size_t)rows * 2 * inter, 0.3, 4), more = random_float((size_t)rows * inter, 0, 1);
  buffer<float> dwide, dmore;
  buffer<bf16> middle((size_t)rows * inter);
  dwide.put(wide), dmore.put(more);
  CUDA_OK(mm_cu_activate(middle.p, dwide.p, act, rows, inter, {}, 0));
  const auto first = middle.get();
  CUDA_OK(mm_cu_add_rows(middle.p, dmore.p, rows, inter, 0));
  const auto second = middle.get();
  std::vector<double> want[2], got[2];
  for (uint32_t r = 0; r < rows; r++) {
    for (uint32_t i = 0; i < inter; i++) {
      const double l = act.limit, gate = wide[(size_t)r * 2 * inter + i], up = wide[(size_t)r * 2 * inter + inter + i];
      const double g = act.swigluoai ? std::min(gate, l) : gate, u = act.swigluoai ? std::max(-l, std::min(up, l)) + act.beta : up;
      want[0].push_back(u * g / (1 + exp(-(act.swigluoai ? act.alpha : 1) * g)));
      const size_t at = (size_t)r * inter + i;
      got[0].push_back(to_float(first[at])), want[1].push_back((double)to_float(first[at]) + more[at]),
          got[1].push_back(to_float(second[at]));
    }
  }
  const std::string what = std::to_string(rows) + " rows of " + std::to_string(inter) + (act.swigluoai ? ", clamped" : ", SiLU");
  if (inter % MM_CU_GROUP == 0) { /* codes along with the rows */
    code_buffers along(rows, inter), alone(rows, inter);
    CUDA_OK(mm_cu_activate(middle.p, dwide.p, act, rows, inter, along.d, 0));
    const auto again = middle.get();
    CUDA_OK(mm_cu_encode(alone.d, {middle.p, inter, nullptr, {}}, {MM_ACT_FP8_GROUP}, 0));
    const auto code = along.code.get(), wanted_code = alone.code.get();
    const auto scale = along.scale.get(), wanted_scale = alone.scale.get();
    bool same = code == wanted_code && memcmp(scale.data(), wanted_scale.data(), scale.size() * sizeof scale[0]) == 0;
    for (size_t i = 0; i < first.size(); i++) same &= to_float(again[i]) == to_float(first[i]);
    report_true("dense MLP: codes are those of the rows, " + what, same);
  }
  report("dense MLP: activation, " + what, relative_error(want[0], got[0]), 3e-3);
  report("dense MLP: sum, " + what, relative_error(want[1], got[1]), 3e-3);
}

}  // namespace

void test_block_attention() {
  for (const mm_cu_activation &act : {mm_cu_activation{}, mm_cu_activation{true, 1.702f, 7, 1}, mm_cu_activation{true, 1.3f, 3, 0.5f}}) {
    check_mlp(act, 1, 64), check_mlp(act, 5, 12288), check_mlp(act, 70, 224);
  }
  for (const heads_case &c : {heads_case{8, 2, 2, 32, 16, true}, heads_case{2, 1, 0, 32, 16, true}, heads_case{64, 4, 4, 128, 64, true},
                              heads_case{4, 1, 0, 128, 64, true}, heads_case{6, 3, 3, 64, 64, false}, heads_case{20, 5, 5, 64, 32, true}}) {
    check_heads(c, fixture({200, 0, 63, 64, 9000}, {1, 1, 1, 1, 1}, 3));
    check_heads(c, fixture({100, 3, 250}, {70, 1, 33}, 0));
    if (c.v_heads) check_narrow_heads(c, fixture({100, 3, 250}, {70, 1, 33}, 2));
  }
  for (const bool whole : {true, false}) {
    for (const select_case &c :
         {select_case{2, 32, 16, 4, 1, whole, true}, select_case{4, 128, 128, 16, 1, whole, true},
          select_case{3, 64, 48, 5, 2, whole, true}, select_case{2, 32, 16, 4, 1, whole}, select_case{4, 128, 128, 16, 1, whole},
          select_case{1, 128, 128, 16, 2, whole}, select_case{3, 64, 48, 5, 2, whole}, select_case{8, 64, 32, 64, 3, whole},
          select_case{2, 32, 16, 3, 3, whole}}) {
      check_select(c, fixture({c.size * 40 + 7, 0, c.size * c.top_k - 1, c.size * c.top_k, c.size * 9}, {1, 1, 1, 1, 1}, 3), true, 30);
      check_select(c, fixture({c.size * 40 - 4, 0, c.size * c.top_k - 3, c.size * 9}, {8, 7, 8, 1}, 3), true, 30); /* verify rows */
      check_select(c, fixture({c.size * 21 - 30, 0, 5}, {130, 90, 1}, 2), false, 30);
      if (!whole && !c.fp8) check_select_alone(c, fixture({c.size * 21 - 30, 0, 5}, {130, 90, 1}, 0));
    }
  }
  check_select({4, 128, 128, 16, 1, false}, fixture({128 * 1200 + 3}, {1}, 0), true, 100);
  check_select({2, 32, 16, 4, 1, true}, fixture(std::vector<uint32_t>(700, 90), std::vector<uint32_t>(700, 1), 0), true, 0);
  for (const blocks_case &c :
       {blocks_case{{8, 2, 32, 16}, 2, 16, 4}, blocks_case{{64, 4, 128, 64}, 4, 128, 16}, blocks_case{{16, 1, 128, 64}, 1, 128, 16},
        blocks_case{{12, 4, 64, 32}, 2, 48, 5}, blocks_case{{8, 2, 64, 32}, 2, 32, 4}, blocks_case{{16, 2, 128, 64}, 0, 0, 0},
        blocks_case{{8, 2, 32, 16}, 0, 0, 0}}) {
    const uint32_t far = c.size ? c.size * 20 : 1500;
    for (const bool narrow : {false, true}) {
      check_blocks(c, fixture({far + 3, 0, 15, 16, far}, {1, 1, 1, 1, 1}, 3), true, narrow);
      check_blocks(c, fixture({far + 3}, {1}, 0), true, narrow);
      check_blocks(c, fixture({far - 3, 0, 15, far + 60}, {8, 8, 2, 7}, 3), true, narrow); /* verify rows */
      check_blocks(c, fixture({far - 40, 0}, {70, 20}, 2), false, narrow);
    }
  }
  /* By block: rounds of four tiles, of two sequences together; rounds by index head; one round of all. */
  check_blocks({{8, 1, 128, 64}, 1, 128, 64}, fixture({128 * 66 + 5, 40}, {130, 200}, 3), false, false);
  check_blocks({{32, 4, 128, 64}, 2, 128, 64}, fixture({128 * 9 + 5, 40}, {130, 200}, 3), false, false);
  check_blocks({{32, 2, 128, 64}, 1, 128, 3}, fixture({128 * 3 - 40, 500, 0}, {100, 1, 200}, 1), false, false);
}
