/* Batch-invariant rows on the GPU (mm_run_options.batch_invariant): the logits of a token are, bit for bit, the same alone and in any
 * crowd, from single tokens and from chunks cut anywhere, after a fork, and where it goes on from kept pages and states. */
#include <string.h>

#include <algorithm>

#include "runtime/engine/engine.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t SLOTS = 6, ROWS = 600, POSITIONS = 1400; /* ROWS: more than the router's kernels of few rows take */

struct place {
  mm_engine *engine;
  uint32_t vocab;

  place(const mm_shards *shards, bool kv_fp8) : vocab(shards->pack.model.vocab) {
    mm_err err = {};
    mm_engine_config c = {};
    c.ops = &mm_ops_cuda, c.limits = {ROWS, SLOTS, POSITIONS, 0}, c.options.threads = 1, c.options.kv_fp8 = kv_fp8,
    c.options.act_quant = true, c.options.batch_invariant = true;
    must((engine = mm_engine_open(shards, &c, &err)) != nullptr, err);
  }
  place(const place &) = delete;
  place &operator=(const place &) = delete;
  ~place() { mm_engine_close(engine); }

  uint32_t held(uint32_t slot) const { return mm_engine_held(engine, slot); }
  /* The logits of all rows. */
  std::vector<float> step(const std::vector<mm_span> &span, const std::vector<int32_t> &id) {
    mm_err err = {};
    std::vector<uint32_t> out(id.size());
    for (uint32_t i = 0; i < out.size(); i++) out[i] = i;
    const mm_batch b = {(uint32_t)id.size(), id.data(), (uint32_t)span.size(), span.data(), (uint32_t)out.size(), out.data()};
    std::vector<float> logits(out.size() * vocab);
    must(mm_engine_step(engine, &b, logits.data(), &err), err);
    return logits;
  }
};

/* A sequence, and the logits after each of its tokens as they came when it ran alone. */
struct sequence {
  std::vector<int32_t> id;
  std::vector<float> logits;
};

/* From slot 0 of a place where nothing else runs: chunks of `each`. */
sequence alone(place &p, uint32_t n, uint32_t each, const std::vector<int32_t> &begin) {
  sequence s;
  s.id = begin;
  while (s.id.size() < n) s.id.push_back((int32_t)g_rng.below(p.vocab));
  for (uint32_t at = 0; at < n; at += each) {
    const uint32_t count = std::min(each, n - at);
    const auto part = p.step({{0, 0, count, at}}, {s.id.begin() + at, s.id.begin() + at + count});
    s.logits.insert(s.logits.end(), part.begin(), part.end());
  }
  return s;
}

bool same_row(const place &p, const sequence &s, uint32_t at, const float *logits) {
  return memcmp(&s.logits[(size_t)at * p.vocab], logits, p.vocab * sizeof *logits) == 0;
}

/* Steps of the crowd until every slot holds its whole sequence; how many rows differ. single: one token of each slot at a time, at most. */
uint32_t differing(place &p, const std::vector<sequence> &s, bool single) {
  uint32_t wrong = 0;
  for (bool more = true; more;) {
    std::vector<mm_span> span;
    std::vector<int32_t> id;
    more = false;
    const uint32_t first = g_rng.below(SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
      const uint32_t slot = (first + i) % SLOTS, pos = p.held(slot), left = (uint32_t)s[slot].id.size() - pos;
      if (left == 0) continue;
      more = true;
      if (g_rng.below(4) == 0) continue;
      const uint32_t capacity = ROWS - (uint32_t)id.size(),
                     most = single || g_rng.below(2) ? 1 : 1 + g_rng.below(g_rng.below(3) ? 40 : ROWS);
      const uint32_t count = std::min(std::min(left, capacity), most);
      if (count == 0) continue;
      span.push_back({(int32_t)slot, (uint32_t)id.size(), count, pos});
      id.insert(id.end(), s[slot].id.begin() + pos, s[slot].id.begin() + pos + count);
    }
    if (id.empty()) continue;
    const auto logits = p.step(span, id);
    for (const mm_span &x : span) {
      for (uint32_t i = 0; i < x.count; i++) wrong += !same_row(p, s[(size_t)x.slot], x.pos + i, &logits[(size_t)(x.first + i) * p.vocab]);
    }
  }
  return wrong;
}

/* Slot `to` goes on, with the rest of its sequence, from what slot 0 kept of their common beginning of n tokens. */
bool goes_on(place &p, const sequence &s, uint32_t n, uint32_t to, const std::vector<uint32_t> &page, const std::vector<char> &state) {
  mm_err err = {};
  must(mm_engine_resume(p.engine, to, page.data(), s.id.data(), n, state.empty() ? nullptr : state.data(), &err), err);
  bool same = true;
  for (uint32_t at = n, count; at < s.id.size(); at += count) {
    count = std::min((uint32_t)s.id.size() - at, 1 + g_rng.below(30));
    const auto logits = p.step({{(int32_t)to, 0, count, at}}, {s.id.begin() + at, s.id.begin() + at + count});
    for (uint32_t i = 0; i < count; i++) same &= same_row(p, s, at + i, &logits[(size_t)i * p.vocab]);
  }
  mm_engine_drop(p.engine, to);
  return same;
}

bool kept_as_computed(place &p, place &calm, uint32_t n) {
  const sequence a = alone(calm, n + 40, ROWS, {}), b = alone(calm, n + 60, 7, {a.id.begin(), a.id.begin() + n});
  mm_err err = {};
  for (uint32_t at = 0; at < n; at++) p.step({{0, 0, 1, at}}, {a.id[at]}); /* what is kept came from single tokens */
  std::vector<char> state(mm_engine_state_bytes(p.engine));
  if (!state.empty()) must(mm_engine_save(p.engine, 0, state.data(), &err), err);
  mm_pages *const pages = mm_engine_pages(p.engine);
  const uint32_t *const from = mm_pages_table(pages);
  const std::vector<uint32_t> page(from, from + mm_pages_held(pages, 0));
  for (uint32_t x : page) mm_pages_hold(pages, x);
  mm_engine_drop(p.engine, 0);
  const bool same = goes_on(p, a, n, 2, page, state) && goes_on(p, b, n, 5, page, state);
  for (uint32_t x : page) mm_pages_release(pages, x);
  return same;
}

void check_model(const mm_shards *shards, const std::string &name, bool kv_fp8) {
  place calm(shards, kv_fp8), crowd(shards, kv_fp8);
  const std::string what = name + (kv_fp8 ? ", fp8 cache" : "");
  for (bool single : {false, true}) {
    std::vector<sequence> s;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
      const uint32_t n = single ? 20 + g_rng.below(60) : i == 0 ? POSITIONS - 100 : 30 + g_rng.below(500);
      s.push_back(alone(calm, n, i % 3 == 0 ? ROWS : i % 3 == 1 ? 1 : 1 + g_rng.below(100), {})), rows += n;
    }
    const uint32_t wrong = differing(crowd, s, single);
    report_true(what + ": " + std::to_string(rows) + " rows " + (single ? "of single tokens" : "in stretches and single tokens") +
                    " of a crowd, " + std::to_string(wrong) + " other than alone",
                wrong == 0);
    s[0].id[0] = (s[0].id[0] + 1) % (int32_t)crowd.vocab; /* planted: every later row of this sequence has other logits */
    for (uint32_t slot = 0; slot < SLOTS; slot++) mm_engine_drop(crowd.engine, slot);
    const uint32_t found = differing(crowd, s, single);
    report_true(what + ": another first token planted, " + std::to_string(found) + " rows differ", found > s[0].id.size() / 2);
    for (uint32_t slot = 0; slot < SLOTS; slot++) mm_engine_drop(crowd.engine, slot);
  }
  bool kept = true;
  for (uint32_t n : {1u, 63u, 64u, 65u, 130u}) kept &= kept_as_computed(crowd, calm, n);
  report_true(what + ": what goes on from kept pages and states = what is computed anew", kept);
}

}  // namespace

void test_invariant() {
  for (const std::string &folder : model_folders()) {
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, folder.c_str(), &err), err);
    const std::string name = folder.substr(folder.rfind('/') + 1);
    check_model(&shards, name, false);
    if (folder == model_folders().front()) check_model(&shards, name, true);
    mm_shards_close(&shards);
  }
}
