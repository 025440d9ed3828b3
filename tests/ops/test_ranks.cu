/* Checkpoints cut for two ranks ($MM_GPU_RANKS, each NAME-2 beside the uncut NAME-1) on two devices, or both on one, beside the CPU: no
 * further from it than one device with the uncut checkpoint is, and recorded steps are launched ones bit for bit. */
#include <string.h>

#include <algorithm>
#include <filesystem>

#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t kPrompt = 64, kDecoded = 14, kSlots = 3;

struct opened {
  mm_shards shards = {};
  side s = {};

  opened(const std::string &dir, const mm_ops *ops, bool eager) {
    static const uint32_t one[] = {0, 0}, two[] = {0, 1};
    mm_err err = {};
    int devices = 0;
    CUDA_OK(cudaGetDeviceCount(&devices));
    must(mm_shards_open(&shards, dir.c_str(), &err), err);
    const mm_model *m = &shards.pack.model;
    mm_engine_config c = {};
    c.ops = ops, c.limits = {kSlots * MM_WHOLE_ROWS, kSlots, 512}, c.threads = 4, c.eager = eager;
    c.device = ops == &mm_ops_cuda ? devices > 1 ? two : one : nullptr;
    s = {mm_engine_open(&shards, &c, &err), m->vocab, m->hidden, m->layers, false};
    if (!s.engine) report_true("ranks: " + dir + ": " + err.text, false);
  }
  ~opened() {
    mm_engine_close(s.engine);
    mm_shards_close(&shards);
  }
  /* Logits of a prompt of each sequence, then of single steps. */
  std::vector<float> run(const std::vector<std::vector<int32_t>> &seq) const {
    std::vector<float> all = feed(s, seq, 0, kPrompt).logits;
    for (uint32_t t = kPrompt; t < kPrompt + kDecoded; t++) {
      const auto one = feed(s, seq, t, 1).logits;
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

/* The median over rows: single rows part at a tie of the router, whatever the arithmetic. */
double typical_error(const std::vector<float> &want, const std::vector<float> &got, uint32_t vocab) {
  std::vector<double> error;
  for (size_t at = 0; at < want.size(); at += vocab)
    error.push_back(relative_error({want.begin() + (long)at, want.begin() + (long)(at + vocab)},
                                   {got.begin() + (long)at, got.begin() + (long)(at + vocab)}));
  std::nth_element(error.begin(), error.begin() + (long)error.size() / 2, error.end());
  return error[error.size() / 2];
}

void check_cut(const std::string &dir) {
  const std::string whole = dir.substr(0, dir.size() - 1) + "1", name = dir.substr(dir.rfind('/') + 1);
  const std::vector<int32_t> text = held_out(name);
  std::vector<std::vector<int32_t>> seq;
  for (uint32_t i = 0; i < kSlots; i++) seq.emplace_back(text.begin() + i * 500, text.begin() + i * 500 + kPrompt + kDecoded);
  const opened cpu(whole, &mm_ops_cpu, false), one(whole, &mm_ops_cuda, false), cut(dir, &mm_ops_cuda, false),
      plain(dir, &mm_ops_cuda, true);
  if (!cpu.s.engine || !one.s.engine || !cut.s.engine || !plain.s.engine) return;
  const auto want = cpu.run(seq), alone = one.run(seq), got = cut.run(seq), launched = plain.run(seq);
  const double limit = 1.5 * typical_error(want, alone, cpu.s.vocab) + 1e-3;
  report("ranks " + name + ": two ranks beside the CPU, no further than one", typical_error(want, got, cpu.s.vocab), limit);
  report_true("ranks " + name + ": recorded steps = launched ones, bit for bit",
              got.size() == launched.size() && !memcmp(got.data(), launched.data(), got.size() * sizeof got[0]));
}

}  // namespace

void test_ranks() {
  const char *dir = getenv("MM_GPU_RANKS");
  if (!dir) {
    printf("ranks: nothing without $MM_GPU_RANKS\n");
    return;
  }
  std::vector<std::string> cut;
  for (const auto &e : std::filesystem::directory_iterator(dir)) {
    const std::string path = e.path().string();
    if (path.back() == '2') cut.push_back(path);
  }
  std::sort(cut.begin(), cut.end());
  for (const std::string &path : cut) check_cut(path);
}
