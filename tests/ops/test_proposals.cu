/* Verify rows of whole models on the GPU. A step of 2 to 8 rows of one sequence, each an output, against eight sequences that bring a token
 * each: logits of each row, to the bit, since both have eight rows; then the sequence goes on from where its proposals were wrong. Such
 * steps are recorded, with rows of other sequences and padding among them. Batch-invariant engines are held to the same by test_invariant.
 */
#include <string.h>

#include <algorithm>

#include "runtime/engine/engine.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t ROWS = 8, SLOTS = 9, POSITIONS = 9000;

struct verified {
  mm_engine *engine;
  uint32_t vocab;

  verified(const mm_shards *shards, bool kv_fp8, bool eager) : vocab(shards->pack.model.vocab) {
    mm_err err = {};
    mm_engine_config c = {};
    c.ops = &mm_ops_cuda, c.limits = {256, SLOTS, POSITIONS, 0}, c.options.threads = 1, c.options.kv_fp8 = kv_fp8;
    c.options.eager = eager;
    must((engine = mm_engine_open(shards, &c, &err)) != nullptr, err);
  }
  verified(const verified &) = delete;
  verified &operator=(const verified &) = delete;
  ~verified() { mm_engine_close(engine); }

  /* Logits of all rows. */
  std::vector<float> step(const std::vector<mm_span> &span, const std::vector<int32_t> &id) {
    mm_err err = {};
    std::vector<uint32_t> out(id.size());
    for (uint32_t i = 0; i < out.size(); i++) out[i] = i;
    const mm_batch b = {(uint32_t)id.size(), id.data(), (uint32_t)span.size(), span.data(), (uint32_t)out.size(), out.data()};
    std::vector<float> logits(out.size() * vocab);
    must(mm_engine_step(engine, &b, logits.data(), &err), err);
    return logits;
  }
  /* Tokens [pos, …) of a slot, in a chunk that is no verify rows. */
  void prompt(uint32_t slot, const std::vector<int32_t> &id) {
    for (uint32_t at = 0; at < id.size(); at += 200) {
      const uint32_t n = std::min<uint32_t>(200, (uint32_t)id.size() - at);
      step({{(int32_t)slot, 0, n, at}}, {id.begin() + at, id.begin() + at + n});
    }
  }
  std::vector<int32_t> random(uint32_t n) const {
    std::vector<int32_t> id(n);
    for (auto &x : id) x = (int32_t)g_rng.below(vocab);
    return id;
  }
};

/* The next ROWS tokens of slots 1 … 8, which go on from the same prompt, one a step: [token][vocab], and whether the slots agree. */
std::vector<float> one_by_one(verified &v, uint32_t pos, const std::vector<int32_t> &id, bool *agree) {
  std::vector<float> all;
  for (uint32_t t = 0; t < ROWS; t++) {
    std::vector<mm_span> span;
    for (uint32_t i = 0; i < ROWS; i++) span.push_back({(int32_t)i + 1, i, 1, pos + t});
    const auto got = v.step(span, std::vector<int32_t>(ROWS, id[t]));
    for (uint32_t i = 1; i < ROWS; i++) *agree &= memcmp(&got[0], &got[(size_t)i * v.vocab], v.vocab * sizeof got[0]) == 0;
    all.insert(all.end(), got.begin(), got.begin() + v.vocab);
  }
  return all;
}

/* Rows [from, from + n) of what verify steps gave that differ. */
uint32_t differing(const verified &v, const std::vector<float> &got, const std::vector<float> &want, uint32_t n) {
  uint32_t wrong = 0;
  for (uint32_t t = 0; t < n; t++) wrong += memcmp(&got[(size_t)t * v.vocab], &want[(size_t)t * v.vocab], v.vocab * sizeof got[0]) != 0;
  return wrong;
}

/* A prompt of n tokens in all slots; slot 0 verifies right proposals, wrong ones before that. */
uint32_t wrong_rows(verified &v, uint32_t n, bool *agree) {
  mm_err err = {};
  const auto prompt = v.random(n), next = v.random(ROWS);
  const uint32_t to[] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (uint32_t slot = 0; slot < SLOTS; slot++) mm_engine_drop(v.engine, slot);
  v.prompt(0, prompt);
  must(mm_engine_fork(v.engine, 0, to, ROWS, &err), err);
  const auto want = one_by_one(v, n, next, agree);
  uint32_t wrong = 0;
  for (const uint32_t right : {0u, 3u, 7u, ROWS}) { /* wrong proposals leave cells that the next step writes again */
    auto id = next;
    for (uint32_t i = right; i < ROWS; i++) id[i] = (id[i] + 1) % (int32_t)v.vocab;
    wrong += differing(v, v.step({{0, 0, ROWS, n}}, id), want, right);
  }
  /* Two sequences, of three rows and of four, with a row of padding: eight rows again. */
  mm_engine_drop(v.engine, 1);
  const uint32_t other[] = {1};
  must(mm_engine_fork(v.engine, 0, other, 1, &err), err);
  std::vector<int32_t> id(next.begin(), next.begin() + 3);
  id.insert(id.end(), next.begin(), next.begin() + 4);
  const auto two = v.step({{0, 0, 3, n}, {1, 3, 4, n}}, id);
  wrong += differing(v, two, want, 3);
  wrong += differing(v, {two.begin() + 3 * (long)v.vocab, two.end()}, want, 4);
  return wrong;
}

void check_model(const mm_shards *shards, const std::string &name, bool kv_fp8, bool eager) {
  verified v(shards, kv_fp8, eager);
  uint32_t wrong = 0, prompts = 0;
  bool agree = true;
  for (const uint32_t n : {1u, 9u, 57u, 60u, 63u, 64u, 127u, 250u + g_rng.below(100), 8500u}) wrong += wrong_rows(v, n, &agree), prompts++;
  report_true(name + (kv_fp8 ? ", fp8 cache" : "") + (eager ? ", eager" : "") + ": eight sequences agree", agree);
  report_true(name + (kv_fp8 ? ", fp8 cache" : "") + (eager ? ", eager" : "") + ": verify rows after " + std::to_string(prompts) +
                  " prompts = single rows, bit for bit, " + std::to_string(wrong) + " others",
              wrong == 0);
}

}  // namespace

void test_proposals() {
  for (const std::string &folder : model_folders()) {
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, folder.c_str(), &err), err);
    const std::string name = folder.substr(folder.rfind('/') + 1);
    mm_model *m = &shards.pack.model;
    m->max_positions = POSITIONS; /* attention of the longest is cut into chunks */
    if (!std::count(m->attn, m->attn + m->layers, MM_ATTN_LIGHTNING)) {
      for (const bool kv_fp8 : {false, true}) check_model(&shards, name, kv_fp8, false);
      check_model(&shards, name, false, true);
    }
    mm_shards_close(&shards);
  }
}
