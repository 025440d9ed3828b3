/* QK norm, RoPE, KV pages and attention against doubles: pages are scattered, unused cells hold NaN. */
#include <algorithm>

#include "tests/ops/gpu.h"

struct attention_case {
  mm_cu_heads h;
  bool norm, fp8;        /* QK norm; an e4m3 cache */
  uint32_t chunk = 0;    /* tiles of 16 keys; 0: rows are not cut into chunks */
  bool verifies = false; /* rows of a sequence as verify rows */
};

/* One side (keys or values) of a cache, on both machines. Cells not yet used hold NaN, and NaN scales. */
struct cache_side {
  bool fp8;
  uint32_t d;
  std::vector<__nv_bfloat16> wide;
  std::vector<uint8_t> codes;
  std::vector<float> scale;
  buffer<__nv_bfloat16> dwide;
  buffer<uint8_t> dcodes;
  buffer<float> dscale;

  cache_side(bool is_fp8, size_t cells, uint32_t width) : fp8(is_fp8), d(width) {
    if (fp8) {
      codes.assign(cells * d, 0x7f), scale.assign(cells, NAN);
    } else {
      wide.assign(cells * d, __float2bfloat16(NAN));
    }
  }
  void fill(size_t cell) {
    if (fp8) scale[cell] = (float)(0.002 + 0.008 * g_rng.uniform());
    for (uint32_t i = 0; i < d; i++) {
      if (fp8) {
        codes[cell * d + i] = (uint8_t)(g_rng.below(2) * 0x80 + g_rng.below(0x7f));
      } else {
        wide[cell * d + i] = __float2bfloat16((float)g_rng.normal());
      }
    }
  }
  void put() {
    if (fp8) {
      dcodes.put(codes), dscale.put(scale);
    } else {
      dwide.put(wide);
    }
  }
  void get() {
    if (fp8) {
      codes = dcodes.get(), scale = dscale.get();
    } else {
      wide = dwide.get();
    }
  }
  void *data() { return fp8 ? (void *)dcodes.p : (void *)dwide.p; }
  double at(size_t cell, uint32_t i) const { return fp8 ? e4m3(codes[cell * d + i]) * scale[cell] : to_float(wide[cell * d + i]); }
};

/* The list of a step's rows in chunks, in device memory. */
struct far_list {
  mm_cu_far_plan plan;
  buffer<uint32_t> first;
  buffer<uint2> item;

  far_list(const mm_cu_heads &h, uint32_t chunk, uint32_t slots, uint32_t keys) {
    if (chunk) plan = mm_cu_plan_far(h, slots, keys + 1, chunk);
  }
  mm_cu_far put(const mm_cu_heads &h, const std::vector<int32_t> &slot, const std::vector<uint32_t> &pos, uint32_t rows,
                decltype(&mm_cu_gqa_list) list = mm_cu_gqa_list) {
    if (!plan.items) return {};
    std::vector<uint32_t> at(rows);
    std::vector<uint2> all(mm_cu_gqa_items(h, rows, plan));
    const size_t n = list(h, rows, slot.data(), pos.data(), plan, at.data(), all.data());
    const mm_cu_gqa_cut cut = mm_cu_cut_rows(h, rows, plan);
    for (uint32_t i = 0; i < rows; i++) {
      const uint32_t tiles = pos[i] / MM_CU_GQA_KEYS + 1, parts = (tiles - 1) / cut.part(tiles) + 1;
      if (parts > cut.splits && at[i] + parts > plan.items) report_true("gqa: partial results have the room that was planned", false);
    }
    if (n > all.size()) report_true("gqa: the list of chunks has the room that it asked for", false);
    all.resize(n);
    first.put(at), item.put(all);
    return {plan, first.p, item.p};
  }
};

using output_bits = std::vector<uint16_t>;
static output_bits bits_of(const buffer<__nv_bfloat16> &b) {
  const auto v = b.get();
  return {(const uint16_t *)v.data(), (const uint16_t *)v.data() + v.size()};
}

/* Verify rows as rows of a slot each, whose tables name the same pages: they find the keys that the verify rows have left, and write them
 * again. */
static output_bits as_single_rows(const mm_cu_heads &h, const std::vector<uint32_t> &seq_of, const std::vector<uint32_t> &table,
                                  mm_cu_kv kv, const std::vector<uint32_t> &pos, const mm_cu_qkv &p, mm_cu_gqa a) {
  const uint32_t rows = (uint32_t)pos.size();
  std::vector<int32_t> slot(seq_of.size());
  std::vector<uint32_t> tables;
  for (uint32_t t = 0; t < seq_of.size(); t++) {
    const auto own = table.begin() + (long)(seq_of[t] * kv.pages_per_slot);
    slot[t] = (int32_t)t, tables.insert(tables.end(), own, own + kv.pages_per_slot);
  }
  buffer<int32_t> dslot;
  buffer<uint32_t> dtable, dpos;
  buffer<__nv_bfloat16> o((size_t)rows * h.heads * h.head_dim);
  dslot.put(slot), dtable.put(tables), dpos.put(pos);
  far_list far(h, 0, rows, 0);
  far.plan = a.far.plan;
  kv.table = dtable.p, a.o = o.p, a.verifies = false, a.far = far.put(h, slot, pos, rows);
  CUDA_OK(mm_cu_gqa_decode(h, {dslot.p, dpos.p}, kv, p, a, 0));
  return bits_of(o);
}

/* One step over sequences that hold `before` tokens each and bring `count` more. */
static void check_gqa(const attention_case &c, const std::vector<uint32_t> &before, const std::vector<uint32_t> &count) {
  double keys = 0;
  for (size_t i = 0; i < count.size(); i++) keys += (double)(before[i] + count[i]) * count[i];
  if (left_out(keys * c.h.heads * c.h.head_dim)) return;
  const mm_cu_heads &h = c.h;
  const uint32_t d = h.head_dim, seqs = (uint32_t)before.size(), width = (h.heads + 2 * h.kv_heads) * d;
  uint32_t most = 0, tokens = 0;
  for (uint32_t i = 0; i < seqs; i++) most = std::max(most, before[i] + count[i]), tokens += count[i];
  const uint32_t per_slot = most / MM_CU_PAGE + 1, pages = per_slot * seqs;
  std::vector<uint32_t> table(pages);
  for (uint32_t i = 0; i < pages; i++) table[i] = i;
  for (uint32_t i = pages - 1; i > 0; i--) std::swap(table[i], table[g_rng.below(i + 1)]);

  const size_t cells = (size_t)pages * h.kv_heads * MM_CU_PAGE;
  cache_side k(c.fp8, cells, d), v(c.fp8, cells, d);
  auto cell = [&](uint32_t seq, uint32_t head, uint32_t pos) {
    return ((size_t)table[seq * per_slot + pos / MM_CU_PAGE] * h.kv_heads + head) * MM_CU_PAGE + pos % MM_CU_PAGE;
  };
  for (uint32_t s = 0; s < seqs; s++) {
    for (uint32_t p = 0; p < before[s]; p++) {
      for (uint32_t head = 0; head < h.kv_heads; head++) k.fill(cell(s, head, p)), v.fill(cell(s, head, p));
    }
  }
  auto qkv = random_bf16((size_t)tokens * width);
  auto qn = random_float((size_t)h.heads * d, 1, 0.2), kn = random_float((size_t)h.kv_heads * d, 1, 0.2);
  std::vector<float> freq(h.rotary_dim / 2);
  for (uint32_t i = 0; i < freq.size(); i++) freq[i] = (float)pow(5e6, -2.0 * i / h.rotary_dim);
  std::vector<int32_t> slot;
  std::vector<uint32_t> pos, seq_of;
  std::vector<mm_cu_span> span;
  std::vector<uint2> tile;
  for (uint32_t s = 0; s < seqs; s++) {
    span.push_back({(int32_t)s, (uint32_t)slot.size(), count[s], before[s]});
    for (uint32_t i = 0; i < count[s]; i += MM_CU_TILE) tile.push_back(make_uint2(s, i));
    for (uint32_t i = 0; i < count[s]; i++) slot.push_back((int32_t)s), pos.push_back(before[s] + i), seq_of.push_back(s);
  }

  buffer<__nv_bfloat16> dqkv, o((size_t)tokens * h.heads * d);
  buffer<float> dqn, dkn, dfreq;
  buffer<int32_t> dslot;
  buffer<uint32_t> dpos, dtable;
  buffer<mm_cu_span> dspan;
  buffer<uint2> dtile;
  k.put(), v.put(), dqkv.put(qkv), dqn.put(qn), dkn.put(kn), dfreq.put(freq), dslot.put(slot), dpos.put(pos), dtable.put(table);
  dspan.put(span), dtile.put(tile);
  far_list far(h, c.chunk, seqs, most);
  buffer<uint8_t> work(mm_cu_gqa_work(h, tokens, far.plan));
  if (c.verifies) far.plan = mm_cu_plan_far_rows(far.plan, seqs, tokens);
  work.zero();
  mm_cu_rows rows = {dslot.p, dpos.p};
  mm_cu_kv kv = {k.data(), v.data(), dtable.p, per_slot, k.dscale.p, v.dscale.p};
  const mm_cu_qkv p = {dqkv.p, c.norm ? dqn.p : nullptr, c.norm ? dkn.p : nullptr, dfreq.p, 1e-6f, tokens};
  mm_cu_gqa a = {dqkv.p, o.p, work.p, tokens, tokens, {}, c.verifies};
  const bool decode = c.verifies || *std::max_element(count.begin(), count.end()) == 1;
  if (decode) {
    a.far = far.put(h, slot, pos, tokens, c.verifies ? mm_cu_gqa_verify_list : mm_cu_gqa_list);
    CUDA_OK(mm_cu_gqa_decode(h, rows, kv, p, a, 0));
    o.poison();
    CUDA_OK(mm_cu_gqa_decode(h, rows, kv, p, a, 0)); /* again: the counters must come back to zero */
  } else {
    CUDA_OK(mm_cu_rope(h, rows, kv, p, 0));
    CUDA_OK(mm_cu_gqa_prefill(h, {dspan.p, dtile.p, (uint32_t)tile.size()}, kv, a, 0));
  }
  auto out = o.get();
  k.get(), v.get();
  const bool same = !c.verifies || as_single_rows(h, seq_of, table, kv, pos, p, a) == bits_of(o);

  auto turned = [&](const __nv_bfloat16 *x, const float *w, double scale, uint32_t p, uint32_t i) {
    auto value = [&](uint32_t j) { return (double)to_float(x[j]) * (c.norm ? scale * w[j] : 1.0); };
    const uint32_t half = h.rotary_dim / 2;
    if (i >= h.rotary_dim) return value(i);
    const double angle = (double)((float)p * freq[i % half]);
    return i < half ? value(i) * cos(angle) - value(i + half) * sin(angle) : value(i) * cos(angle) + value(i - half) * sin(angle);
  };
  auto scale_of = [&](const __nv_bfloat16 *x, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += (double)to_float(x[i]) * to_float(x[i]);
    return 1 / sqrt(sum / n + 1e-6);
  };
  std::vector<double> want, got, kv_want, kv_got;
  for (uint32_t t = 0; t < tokens; t++) {
    const __nv_bfloat16 *row = &qkv[(size_t)t * width], *kr = row + h.heads * d;
    const double ks = scale_of(kr, h.kv_heads * d);
    for (uint32_t head = 0; head < h.kv_heads; head++) {
      for (uint32_t i = 0; i < d; i++) {
        const size_t at = cell(seq_of[t], head, pos[t]);
        kv_want.push_back(turned(kr + head * d, &kn[head * d], ks, pos[t], i)), kv_got.push_back(k.at(at, i));
        kv_want.push_back(to_float(kr[(h.kv_heads + head) * d + i])), kv_got.push_back(v.at(at, i));
      }
    }
  }
  const uint32_t step = 1 + tokens / 16, checked = (tokens + step - 1) / step;
  want.resize((size_t)checked * h.heads * d), got.resize(want.size());
  parallel(checked * h.heads, [&](uint32_t job) {
    const uint32_t t = job / h.heads * step, head = job % h.heads, kvh = head / (h.heads / h.kv_heads);
    const __nv_bfloat16 *row = &qkv[(size_t)t * width];
    const double qs = scale_of(row, h.heads * d);
    std::vector<double> q(d), s(pos[t] + 1), sum(d, 0.0);
    double top = -INFINITY, total = 0;
    for (uint32_t i = 0; i < d; i++) q[i] = turned(row + head * d, &qn[head * d], qs, pos[t], i);
    for (uint32_t p = 0; p <= pos[t]; p++) {
      double dot = 0;
      for (uint32_t i = 0; i < d; i++) dot += q[i] * k.at(cell(seq_of[t], kvh, p), i);
      s[p] = dot / sqrt((double)d), top = std::max(top, s[p]);
    }
    for (uint32_t p = 0; p <= pos[t]; p++) {
      const double e = exp(s[p] - top);
      total += e;
      for (uint32_t i = 0; i < d; i++) sum[i] += e * v.at(cell(seq_of[t], kvh, p), i);
    }
    for (uint32_t i = 0; i < d; i++)
      want[(size_t)job * d + i] = sum[i] / total, got[(size_t)job * d + i] = to_float(out[((size_t)t * h.heads + head) * d + i]);
  });
  char what[160];
  snprintf(what, sizeof what, "gqa %s %u/%u heads x %u, %u rows, up to %u keys%s%s%s", decode ? "decode" : "prefill", h.heads, h.kv_heads,
           d, tokens, most, c.norm ? ", qk norm" : "", c.fp8 ? ", fp8 cache" : "", c.chunk ? ", in chunks" : "");
  if (c.verifies) report_true(std::string(what) + ": verify rows = single rows, bit for bit", same);
  report(std::string(what) + ": cache", relative_error(kv_want, kv_got), c.fp8 ? 3e-2 : 3e-3);
  report(what, relative_error(want, got), 1e-2);
}

/* A prompt whose chunks end anywhere gives the same bits as in one go. */
static void check_ranges(const mm_cu_heads &h, bool fp8) {
  if (left_out(1e9)) return;
  const uint32_t tokens = 420, d = h.head_dim, width = (h.heads + 2 * h.kv_heads) * d, pages = tokens / MM_CU_PAGE + 1;
  const size_t cells = (size_t)pages * h.kv_heads * MM_CU_PAGE;
  cache_side k(fp8, cells, d), v(fp8, cells, d);
  k.put(), v.put();
  std::vector<uint32_t> table(pages), pos(tokens);
  for (uint32_t i = 0; i < pages; i++) table[i] = i;
  for (uint32_t i = 0; i < tokens; i++) pos[i] = i;
  std::vector<mm_cu_span> span = {{0, 0, tokens, 0}};
  for (uint32_t end : {5u, 69u, 128u, 233u, 297u, tokens}) {
    const uint32_t first = span.size() == 1 ? 0 : span.back().first + span.back().count;
    span.push_back({0, first, end - first, first});
  }
  std::vector<uint2> tile;
  std::vector<uint32_t> from;
  for (uint32_t s = 0; s < span.size(); s++) {
    from.push_back((uint32_t)tile.size());
    for (uint32_t i = 0; i < span[s].count; i += MM_CU_TILE) tile.push_back(make_uint2(s, i));
  }
  buffer<__nv_bfloat16> qkv, o((size_t)tokens * h.heads * d);
  buffer<float> freq;
  buffer<int32_t> slot;
  buffer<uint32_t> dtable, dpos;
  buffer<mm_cu_span> dspan;
  buffer<uint2> dtile;
  qkv.put(random_bf16((size_t)tokens * width)), freq.put(std::vector<float>(h.rotary_dim / 2, 0.1f));
  slot.put(std::vector<int32_t>(tokens, 0)), dtable.put(table), dpos.put(pos), dspan.put(span), dtile.put(tile);
  const mm_cu_kv kv = {k.data(), v.data(), dtable.p, pages, k.dscale.p, v.dscale.p};
  CUDA_OK(mm_cu_rope(h, {slot.p, dpos.p}, kv, {qkv.p, nullptr, nullptr, freq.p, 1e-6f, tokens}, 0));
  auto attend = [&](uint32_t first, uint32_t count) {
    o.poison();
    CUDA_OK(mm_cu_gqa_prefill(h, {dspan.p, dtile.p + first, count}, kv, {qkv.p, o.p, nullptr, tokens, tokens}, 0));
    auto out = o.get();
    return std::vector<uint16_t>((const uint16_t *)out.data(), (const uint16_t *)out.data() + out.size());
  };
  const auto whole = attend(0, from[1]), parts = attend(from[1], (uint32_t)tile.size() - from[1]);
  char what[120];
  snprintf(what, sizeof what, "gqa prefill %u/%u heads x %u%s: in stretches = whole, bit for bit", h.heads, h.kv_heads, d,
           fp8 ? ", fp8 cache" : "");
  report_true(what, whole == parts);
}

/* One work space under steps of any number of rows: what a step leaves there changes no later one. Each step is compared with the same
 * step in a work space of its own, bit for bit. */
static void check_work_space(const mm_cu_heads &h, bool fp8, uint32_t max_tokens, uint32_t steps, uint32_t chunk) {
  if (left_out(1e9)) return;
  const uint32_t d = h.head_dim, width = (h.heads + 2 * h.kv_heads) * d, per_slot = 8, pages = per_slot * max_tokens;
  const size_t cells = (size_t)pages * h.kv_heads * MM_CU_PAGE;
  buffer<uint8_t> k(cells * d * (fp8 ? 1 : 2)), v(k.n);
  buffer<float> k_scale, v_scale;
  for (auto *b : {&k, &v}) {
    const uint32_t seed = g_rng.below(1u << 30);
    if (fp8) {
      fill_random(b->p, b->n, seed);
    } else {
      fill_random_bf16(reinterpret_cast<__nv_bfloat16 *>(b->p), b->n / 2, seed);
    }
  }
  if (fp8) {
    k_scale.open(cells), v_scale.open(cells);
    fill_random_float(k_scale.p, cells, 0.002f, 0.01f, 1), fill_random_float(v_scale.p, cells, 0.002f, 0.01f, 2);
  }
  std::vector<uint32_t> table(pages), pos(max_tokens);
  std::vector<int32_t> slot(max_tokens);
  for (uint32_t i = 0; i < pages; i++) table[i] = i;
  for (uint32_t i = 0; i < max_tokens; i++) slot[i] = (int32_t)i;
  buffer<__nv_bfloat16> qkv, o((size_t)max_tokens * h.heads * d);
  buffer<float> freq;
  buffer<int32_t> dslot;
  buffer<uint32_t> dtable, dpos;
  qkv.put(random_bf16((size_t)max_tokens * width)), freq.put(std::vector<float>(h.rotary_dim / 2, 0.1f));
  dtable.put(table), dslot.put(slot);
  const mm_cu_kv kv = {k.p, v.p, dtable.p, per_slot, k_scale.p, v_scale.p};
  far_list far(h, chunk, max_tokens, per_slot * MM_CU_PAGE);
  buffer<uint8_t> kept(mm_cu_gqa_work(h, max_tokens, far.plan)), fresh(kept.n);
  kept.zero();
  const auto run = [&](const buffer<uint8_t> &work, uint32_t tokens) {
    o.poison();
    const mm_cu_gqa a = {qkv.p, o.p, work.p, tokens, max_tokens, far.put(h, slot, pos, tokens)};
    CUDA_OK(mm_cu_gqa_decode(h, {dslot.p, dpos.p}, kv, {qkv.p, nullptr, nullptr, freq.p, 1e-6f, tokens}, a, 0));
    const auto out = o.get();
    return std::vector<uint16_t>((const uint16_t *)out.data(), (const uint16_t *)out.data() + (size_t)tokens * h.heads * d);
  };
  uint32_t wrong = 0, moved = 0;
  for (uint32_t i = 0; i < steps; i++) {
    const uint32_t most = i % 3 == 0 ? max_tokens : std::min(max_tokens, 32u);
    const uint32_t tokens = i == 0 ? std::min(8u, max_tokens) : i == 1 ? std::min(24u, max_tokens) : 1 + g_rng.below(most);
    for (auto &p : pos) p = i < 2 ? 200 + g_rng.below(200) : g_rng.below(per_slot * MM_CU_PAGE);
    dpos.put(pos), fresh.zero();
    const auto got = run(kept, tokens);
    const auto in_less = [&] { /* shared memory */
                               const least_shared least;
                               return run(fresh, tokens);
    };
    const auto want = in_less();
    wrong += got != want;
    /* A row's bits hang on its own tokens and the number of rows. */
    const uint32_t same = g_rng.below(tokens);
    for (uint32_t t = 0; t < max_tokens; t++) pos[t] = t == same ? pos[t] : g_rng.below(per_slot * MM_CU_PAGE);
    dpos.put(pos);
    const auto among_others = run(kept, tokens);
    const size_t width_of = (size_t)h.heads * d, at = same * width_of;
    moved += !std::equal(got.begin() + (long)at, got.begin() + (long)(at + width_of), among_others.begin() + (long)at);
  }
  char what[160];
  snprintf(what, sizeof what, "gqa decode %u/%u heads x %u%s%s: of %u steps of 1 to %u rows %u wrong in one work space, %u rows others'",
           h.heads, h.kv_heads, d, fp8 ? ", fp8 cache" : "", chunk ? ", in chunks" : "", steps, max_tokens, wrong, moved);
  report_true(what, wrong == 0 && moved == 0);
}

/* Steps of many rows are not split, and need no room for partial results. */
static void check_work_size(const mm_cu_heads &h) {
  const size_t few = mm_cu_gqa_work(h, 1024), many = mm_cu_gqa_work(h, 8192);
  char what[120];
  snprintf(what, sizeof what, "gqa decode work space of 8,192 rows: %.1f MB, of 1,024 rows %.1f MB", many * 1e-6, few * 1e-6);
  report_true(what, many <= few + (size_t)8192 * h.kv_heads * 4 + 256);
}

/* The keys that blocks of a step read, row by row: every part of a row once, in the room that was asked for; where all blocks run at once
 * and one row is long, no block reads more than a chunk above its share, of eight heads, whose few blocks chunks divide, than a quarter of
 * one. */
static void check_dealing(const mm_cu_heads &h, uint32_t steps) {
  const uint32_t positions = 196608, slots = 16;
  const mm_cu_far_plan plan = mm_cu_plan_far(h, slots, positions);
  bool whole = true, fits = true;
  double worst = 0;
  for (uint32_t step = 0; step < steps; step++) {
    const uint32_t rows = 1 + g_rng.below(slots), longest = g_rng.below(rows);
    std::vector<int32_t> slot(rows);
    std::vector<uint32_t> pos(rows), first(rows);
    for (uint32_t i = 0; i < rows; i++) {
      slot[i] = g_rng.below(16) ? (int32_t)i : -1;
      pos[i] = g_rng.below(step % 4 < 2 ? 1024 : g_rng.below(2) ? positions : 5000);
    }
    if (step % 4 < 2) slot[longest] = (int32_t)longest, pos[longest] = 100000 + g_rng.below(positions - 100000);
    const mm_cu_gqa_cut cut = mm_cu_cut_rows(h, rows, plan);
    const uint32_t blocks = rows * cut.splits;
    std::vector<uint2> item(mm_cu_gqa_items(h, slots, plan), make_uint2(UINT32_MAX, UINT32_MAX));
    fits &= mm_cu_gqa_list(h, rows, slot.data(), pos.data(), plan, first.data(), item.data()) <= item.size();
    std::vector<std::vector<int>> seen(rows);
    std::vector<double> load(blocks);
    double all = 0;
    uint32_t places = 0;
    for (uint32_t i = 0; i < rows; i++) {
      const uint32_t tiles = slot[i] < 0 ? 0 : pos[i] / MM_CU_GQA_KEYS + 1, parts = tiles ? (tiles - 1) / cut.part(tiles) + 1 : 0;
      seen[i].resize(std::max(parts, cut.splits));
      fits &= parts <= cut.splits || (first[i] == places && (places += parts) <= plan.items);
    }
    const auto take = [&](uint32_t b, uint2 what) {
      const uint32_t tiles = slot[what.x] < 0 ? 0 : pos[what.x] / MM_CU_GQA_KEYS + 1, part = cut.part(tiles);
      const double n = std::max(0.0, std::min((double)part, (double)tiles - (double)what.y * part));
      seen[what.x].at(what.y)++, load[b] += n, all += n;
    };
    for (uint32_t b = 0; b < blocks; b++) {
      take(b, make_uint2(b % rows, b / rows));
      for (uint32_t i = 0; i < item[b].y; i++) take(b, item[item[b].x + i]);
    }
    for (const auto &row : seen) whole &= std::all_of(row.begin(), row.end(), [](int n) { return n == 1; });
    if (step % 4 < 2 && cut.unit > 1) worst = std::max(worst, *std::max_element(load.begin(), load.end()) - all / blocks);
  }
  char what[160];
  snprintf(what, sizeof what, "gqa decode %u/%u x %u: %u lists of parts hold each once, within their room", h.heads, h.kv_heads, h.head_dim,
           steps);
  report_true(what, whole && fits);
  snprintf(what, sizeof what, "gqa decode %u/%u x %u: one long row, a block's tiles above its share", h.heads, h.kv_heads, h.head_dim);
  report(what, worst, h.kv_heads == 8 ? 64 : 256);
}

/* Random numbers of verify rows, of up to nine sequences of any length, at the borders of tiles, pages and chunks. */
static void check_verify(bool fp8) {
  const mm_cu_heads tiny = {8, 2, 64, 32}, m1 = {64, 8, 128, 64}, m2 = {48, 8, 128, 64};
  check_gqa({m2, true, fp8, 0, true}, {0}, {MM_CU_VERIFY});
  check_gqa({m2, true, fp8, 8, true}, {5000}, {MM_CU_VERIFY});
  check_gqa({m2, true, fp8, 256, true}, {40000, 900}, {MM_CU_VERIFY, 5});
  check_gqa({m2, true, fp8, 8, true}, {121, 124, 127, 3000}, {8, 8, 8, 2});
  for (uint32_t i = 0; i < 12; i++) {
    std::vector<uint32_t> before(1 + g_rng.below(9)), count(before.size());
    for (auto &n : before) n = g_rng.below(3) ? 64 * g_rng.below(12) + 64 - g_rng.below(10) : g_rng.below(i % 4 ? 300 : 6000);
    for (auto &n : count) n = 1 + g_rng.below(MM_CU_VERIFY);
    check_gqa({i % 3 == 0 ? tiny : i % 3 == 1 ? m1 : m2, i % 3 != 1, fp8, i % 2 ? 8u : 0u, true}, before, count);
  }
}

void test_attention() {
  for (const mm_cu_heads &h : {mm_cu_heads{48, 8, 128, 64}, {64, 8, 128, 64}, {8, 2, 64, 32}, {6, 1, 128, 64}}) check_dealing(h, 400);
  for (bool fp8 : {false, true}) {
    for (uint32_t chunk : {0u, 8u}) {
      check_work_space({48, 8, 128, 64}, fp8, 32, 60, chunk);
      check_work_space({64, 8, 128, 64}, fp8, 300, 40, chunk);
      check_work_space({8, 2, 64, 32}, fp8, 64, 60, chunk);
    }
  }
  check_work_size({48, 8, 128, 64});
  for (bool fp8 : {false, true}) {
    check_verify(fp8);
    const attention_case tiny = {{8, 2, 64, 32}, true, fp8}, m1 = {{64, 8, 128, 64}, false, fp8}, m2 = {{48, 8, 128, 64}, true, fp8};
    check_gqa(tiny, {0, 5, 63, 64, 200}, {1, 1, 1, 1, 1});
    check_gqa(m1, {1000}, {1});
    check_gqa(m2, {3000, 17}, {1, 1});
    check_gqa(m2, std::vector<uint32_t>(40, 100), std::vector<uint32_t>(40, 1));
    check_gqa(m2, {62, 63, 64, 65, 127, 128, 129}, {1, 1, 1, 1, 1, 1, 1}); /* ends of pages and blocks */
    std::vector<uint32_t> ragged(64), longer(20);
    for (auto &n : ragged) n = g_rng.below(4) ? g_rng.below(200) : g_rng.below(2000);
    for (auto &n : longer) n = g_rng.below(4) ? g_rng.below(300) : g_rng.below(9000);
    check_gqa({m2.h, true, fp8, 8}, ragged, std::vector<uint32_t>(64, 1));
    check_gqa({m1.h, false, fp8, 16}, longer, std::vector<uint32_t>(20, 1));
    check_gqa({tiny.h, true, fp8, 8}, ragged, std::vector<uint32_t>(64, 1));
    check_gqa({m2.h, true, fp8, 8}, {127, 128, 129, 5000, 255, 256, 0}, {1, 1, 1, 1, 1, 1, 1}); /* ends of chunks */
    check_gqa({m2.h, true, fp8, 8}, {3000}, {1});
    check_gqa({m2.h, true, fp8, 256}, {40000, 17, 900}, {1, 1, 1}); /* the usual chunk */
    check_gqa({tiny.h, true, fp8, 256}, {30000, 5}, {1, 1});
    check_gqa(tiny, {63, 64, 65, 127, 128, 1}, {1, 2, 65, 64, 129, 63});
    check_gqa(tiny, {0, 5, 64}, {130, 64, 1});
    check_gqa(m1, {0}, {200});
    check_gqa(m2, {70, 0, 3}, {65, 100, 1});
    check_gqa({{9, 3, 128, 64}, true, fp8}, {300, 0, 126}, {129, 64, 3});
    check_gqa(m1, {5000}, {70});
    check_ranges(m2.h, fp8);
    check_ranges({6, 2, 64, 32}, fp8);
  }
}
