/* Packed checkpoints of the tiny models under $MM_GPU_MODELS (a folder of tiny-m1-SCHEME, tiny-m2-SCHEME) on the CUDA backend beside the
 * CPU backend: the same stretches of held-out text, by prefill, in chunks, one by one and batched; logits and greedy choices. */
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runtime/engine.h"
#include "tests/ops/gpu.h"

/* bf16 activations through the layers of a tiny model against f32 ones: the median row. A row whose routing was a near tie takes another
 * expert and lands far off; those are counted on their own. */
#define ROW_LIMIT 1e-2
#define FAR_ROW   5e-2
#define FAR_SHARE 0.05
#define ROWS      96
#define DECODED   24

struct side {
  mm_engine *engine;
  uint32_t vocab;
};

static void must(bool ok, const mm_err &err) {
  if (ok) return;
  fprintf(stderr, "%s\n", err.text);
  exit(1);
}

/* Feeds ids [first, first + count) of every slot's sequence; logits of all rows. */
static std::vector<float> feed(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first, uint32_t count) {
  std::vector<int32_t> id;
  std::vector<uint32_t> out;
  std::vector<mm_span> span;
  for (uint32_t i = 0; i < seq.size(); i++) {
    span.push_back({(int32_t)i, (uint32_t)id.size(), count, first});
    for (uint32_t t = 0; t < count; t++) id.push_back(seq[i][first + t]), out.push_back((uint32_t)out.size());
  }
  std::vector<float> logits(id.size() * s.vocab);
  mm_batch b = {(uint32_t)id.size(), id.data(), (uint32_t)span.size(), span.data(), (uint32_t)out.size(), out.data()};
  mm_err err = {};
  must(mm_engine_step(s.engine, &b, logits.data(), &err), err);
  return logits;
}

/* Median row error, rows far off, and greedy choices: the GPU's may differ only where the CPU's logits of both choices lie within
 * twice ROW_LIMIT of the larger. */
static void compare(const std::string &what, const std::vector<float> &cpu, const std::vector<float> &gpu, uint32_t vocab) {
  const size_t rows = cpu.size() / vocab;
  std::vector<double> error(rows);
  uint32_t differ = 0, unexplained = 0, far = 0;
  for (size_t row = 0; row < rows; row++) {
    const float *c = &cpu[row * vocab], *g = &gpu[row * vocab];
    std::vector<double> want, got;
    for (uint32_t i = 0; i < vocab; i++) {
      if (std::isfinite(c[i])) want.push_back(c[i]), got.push_back(g[i]); /* the others are ids that do not exist */
    }
    error[row] = relative_error(want, got);
    far += error[row] > FAR_ROW;
    const size_t a = std::max_element(c, c + vocab) - c, b = std::max_element(g, g + vocab) - g;
    if (a == b) continue;
    differ++;
    if (error[row] <= FAR_ROW && c[a] - c[b] > 2 * ROW_LIMIT * fabs(c[a])) {
      unexplained++;
      printf("     %s: row %zu: CPU chooses %zu, GPU %zu; CPU logits %.4f and %.4f, row error %.1e\n", what.c_str(), row, a, b, c[a], c[b],
             error[row]);
    }
  }
  std::sort(error.begin(), error.end());
  char text[200];
  snprintf(text, sizeof text, "%s: %u greedy choices differ, %u beyond the error", what.c_str(), differ, unexplained);
  report(what + ": median row", error[rows / 2], ROW_LIMIT);
  report(what + ": share of rows far off", (double)far / (double)rows, FAR_SHARE);
  report_true(text, unexplained == 0);
}

/* Token ids of the model's held-out text. */
static std::vector<int32_t> held_out(const std::string &name) {
  std::ifstream in("tests/data/" + name.substr(0, 7) + "/held-out-ids.json");
  std::vector<int32_t> ids;
  for (char c; in.get(c);) {
    if (c < '0' || c > '9') continue;
    int32_t v;
    in.unget();
    in >> v;
    ids.push_back(v);
  }
  return ids;
}

static side open_side(const mm_shards *shards, const mm_ops *ops, uint32_t slots) {
  mm_err err = {};
  mm_engine_config c = {};
  c.ops = ops, c.limits = {slots * ROWS, slots, 512}, c.threads = 4;
  side s = {mm_engine_open(shards, &c, &err), shards->pack.model.vocab};
  must(s.engine != nullptr, err);
  return s;
}

static void check_model(const std::string &dir, const std::string &name) {
  mm_shards shards = {};
  mm_err err = {};
  must(mm_shards_open(&shards, dir.c_str(), &err), err);
  const uint32_t vocab = shards.pack.model.vocab, slots = 3;
  side cpu = open_side(&shards, &mm_ops_cpu, slots), gpu = open_side(&shards, &mm_ops_cuda, slots);
  const std::vector<int32_t> text = held_out(name);
  if (text.size() < ROWS + DECODED) {
    report_true(name + ": held-out ids in tests/data", false);
    return;
  }
  std::vector<std::vector<int32_t>> seq(slots);
  for (auto &s : seq) {
    const uint32_t from = g_rng.below((uint32_t)text.size() - ROWS - DECODED);
    s.assign(text.begin() + from, text.begin() + from + ROWS + DECODED);
  }
  const std::vector<float> want = feed(cpu, seq, 0, ROWS), whole = feed(gpu, seq, 0, ROWS);
  compare(name + ": prefill of 3 x 96", want, whole, vocab);
  std::vector<float> chunks(want.size());
  for (uint32_t first = 0; first < ROWS; first += 32) {
    const auto part = feed(gpu, seq, first, 32);
    for (uint32_t s = 0; s < slots; s++)
      std::copy_n(&part[(size_t)s * 32 * vocab], 32 * vocab, &chunks[((size_t)s * ROWS + first) * vocab]);
  }
  compare(name + ": prefill in chunks of 32", want, chunks, vocab);
  std::vector<float> c, g;
  for (uint32_t t = ROWS; t < ROWS + DECODED; t++) {
    const auto a = feed(cpu, seq, t, 1), b = feed(gpu, seq, t, 1);
    c.insert(c.end(), a.begin(), a.end()), g.insert(g.end(), b.begin(), b.end());
  }
  compare(name + ": decode, 3 at a time", c, g, vocab);
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  std::vector<float> steps, alone(want.begin(), want.begin() + (size_t)ROWS * vocab);
  for (uint32_t t = 0; t < ROWS; t++) {
    const auto b = feed(gpu, one, t, 1);
    steps.insert(steps.end(), b.begin(), b.end());
  }
  compare(name + ": decode from the first token", alone, steps, vocab);
  mm_engine_close(cpu.engine);
  mm_engine_close(gpu.engine);
  mm_shards_close(&shards);
}

void test_models() {
  const char *root = getenv("MM_GPU_MODELS");
  if (!root) {
    printf("no packed checkpoints: $MM_GPU_MODELS is not set\n");
    return;
  }
  std::vector<std::string> names;
  for (const auto &e : std::filesystem::directory_iterator(root)) names.push_back(e.path().filename().string());
  std::sort(names.begin(), names.end());
  for (const auto &n : names) check_model(std::string(root) + "/" + n, n);
}
