/* A world of test_forks.cu: an engine whose slots hold pages, and the steps that it is given. */
#ifndef MM_TESTS_FORKS_FIXTURE_H
#define MM_TESTS_FORKS_FIXTURE_H

#include <string.h>

#include <algorithm>

#include "runtime/cuda/backend.h"
#include "runtime/engine/engine.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t SLOTS = 8, ROWS = 96, POSITIONS = 320;

mm_backend *g_opened; /* by the ops below */
mm_backend *open_seen(const mm_backend_config *c, mm_err *err) { return g_opened = mm_ops_cuda.open(c, err); }

/* ---- an engine and what its slots hold ---- */

struct fixture {
  mm_ops ops = mm_ops_cuda;
  mm_engine *engine;
  mm_backend *backend;
  uint32_t vocab;
  std::vector<uint32_t> held = std::vector<uint32_t>(SLOTS);

  fixture(const mm_shards *shards, uint32_t pages, bool kv_fp8 = false) : vocab(shards->pack.model.vocab) {
    mm_err err = {};
    mm_engine_config c = {};
    ops.open = open_seen;
    c.ops = &ops, c.limits = {ROWS, SLOTS, POSITIONS, pages}, c.options.threads = 1, c.options.kv_fp8 = kv_fp8;
    must((engine = mm_engine_open(shards, &c, &err)) != nullptr, err);
    backend = g_opened;
  }
  fixture(const fixture &) = delete;
  fixture &operator=(const fixture &) = delete;
  ~fixture() { mm_engine_close(engine); }

  void drop(uint32_t slot) { mm_engine_drop(engine, slot), held[slot] = 0; }
  const uint32_t *pages_of(uint32_t slot) const {
    mm_pages *p = mm_engine_pages(engine);
    return mm_pages_table(p) + (size_t)slot * mm_pages_per_slot(p);
  }
};

/* A batch and all that it points to. */
struct step {
  std::vector<int32_t> id;
  std::vector<mm_span> span;
  std::vector<uint32_t> out;

  void add(uint32_t slot, uint32_t pos, const int32_t *ids, uint32_t count) {
    span.push_back({(int32_t)slot, (uint32_t)id.size(), count, pos});
    id.insert(id.end(), ids, ids + count);
  }
  void last_rows() {
    for (const mm_span &s : span) out.push_back(s.first + s.count - 1);
  }
  void all_rows() {
    for (uint32_t i = 0; i < id.size(); i++) out.push_back(i);
  }
  mm_batch batch(const mm_sampling *sampling = nullptr) const {
    return {(uint32_t)id.size(), id.data(), (uint32_t)span.size(), span.data(), (uint32_t)out.size(), out.data(), sampling};
  }
};

std::vector<float> logits_of(fixture &w, const step &s) {
  mm_err err = {};
  const mm_batch b = s.batch();
  std::vector<float> logits(s.out.size() * w.vocab);
  must(mm_engine_step(w.engine, &b, logits.data(), &err), err);
  for (const mm_span &p : s.span) w.held[(size_t)p.slot] = p.pos + p.count;
  return logits;
}

/* One span of one slot; the logits of its last row. */
std::vector<float> feed_slot(fixture &w, uint32_t slot, const std::vector<int32_t> &ids, uint32_t pos, uint32_t count) {
  step s;
  s.add(slot, pos, &ids[pos], count), s.last_rows();
  return logits_of(w, s);
}

bool same_bits(const std::vector<float> &a, const std::vector<float> &b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

std::vector<int32_t> random_ids(uint32_t n, uint32_t below) {
  std::vector<int32_t> ids(n);
  for (int32_t &id : ids) id = (int32_t)g_rng.below(below);
  return ids;
}

}  // namespace

#endif
