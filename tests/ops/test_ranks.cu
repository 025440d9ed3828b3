/* Checkpoints cut for several ranks ($MM_GPU_RANKS, each NAME-CUT with the uncut NAME-1: tensors, experts, stages), a device each as far
 * as there are some, else several on one, against the CPU: no further from it than one device with the uncut checkpoint is, and recorded
 * steps are launched ones bit for bit. A step that one rank fails, before it is recorded or when it is, is reported in time, and all go on.
 * In a schedule of MM_STEPS (10,000) steps, of single tokens, chunks and both, the ranks of a stage, or of each of its groups of attention
 * (--attn-tp), hold the same rows to the bit. */
#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>

#include "runtime/cuda/backend.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

namespace {

constexpr uint32_t kPrompt = 64, kDecoded = 14, kSlots = 3;

struct opened {
  mm_shards shards = {};
  side s = {};

  opened(const std::string &dir, const mm_ops *ops, bool eager, bool rounds = false, uint32_t rows = kSlots * MM_WHOLE_ROWS) {
    mm_err err = {};
    int devices = 0;
    CUDA_OK(cudaGetDeviceCount(&devices));
    static uint32_t device[8];
    for (uint32_t r = 0; r < 8; r++) device[r] = r % (uint32_t)devices;
    must(mm_shards_open(&shards, dir.c_str(), &err), err);
    const mm_model *m = &shards.pack.model;
    mm_engine_config c = {};
    c.ops = ops, c.limits = {rows, kSlots, 512 + rows}, c.options.threads = 4, c.options.eager = eager, c.options.act_quant = rounds;
    c.device = ops == &mm_ops_cpu ? nullptr : device;
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

std::atomic<int> g_fails; /* the last rank's next step does */
bool failing_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  if (b->c.place.rank == 1 && g_fails.exchange(0)) return mm_fail(err, MM_IO, "E_TEST", mm_at(NULL, NULL), "this rank fails");
  return mm_ops_cuda.begin(b, batch, err);
}

/* A step of single tokens of every sequence, the `failing`-th of its size, fails on one rank; what comes after is as if it had not been. */
void check_failing(const std::string &dir, const std::vector<std::vector<int32_t>> &seq, const std::vector<float> &want, int failing) {
  mm_ops ops = mm_ops_cuda;
  ops.begin = failing_begin;
  const opened cut(dir, &ops, false);
  if (!cut.s.engine) return;
  std::vector<float> logits((size_t)kSlots * cut.s.vocab);
  mm_err err = {}, failed = {};
  bool reported = false, others = true;
  double took = 0;
  for (int i = 0; i < failing + 3; i++) {
    std::vector<int32_t> id(kSlots);
    std::vector<mm_span> span(kSlots);
    std::vector<uint32_t> out(kSlots);
    for (uint32_t s = 0; s < kSlots; s++) id[s] = seq[s][0], span[s] = {(int32_t)s, s, 1, 0}, out[s] = s;
    const mm_batch b = {kSlots, id.data(), kSlots, span.data(), kSlots, out.data()};
    g_fails = i == failing;
    const auto from = std::chrono::steady_clock::now();
    err = {};
    const bool done = mm_engine_step(cut.s.engine, &b, logits.data(), &err);
    if (i == failing) {
      reported = !done && strcmp(err.code, "E_TEST") == 0, failed = err;
      took = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    } else if (!done) {
      others = false, printf("step %d: %s\n", i, err.text);
    }
  }
  const auto got = others ? cut.run(seq) : std::vector<float>();
  if (!reported) printf("step %d, which one rank fails: %s\n", failing, failed.text);
  for (size_t at = 0; at < got.size(); at++) {
    if (got[at] == want[at]) continue;
    printf("after it row %zu of %zu, id %zu: %.6f, before %.6f\n", at / cut.s.vocab, got.size() / cut.s.vocab, at % cut.s.vocab, got[at],
           want[at]);
    break;
  }
  char text[200];
  snprintf(text, sizeof text, "ranks %s: step %d of its size fails on one rank, told in %.1f s (limit 5), and all go on",
           dir.substr(dir.rfind('/') + 1).c_str(), failing, took);
  report_true(text, reported && took < 5 && got.size() == want.size() && !memcmp(got.data(), want.data(), want.size() * sizeof want[0]));
}

/* Sampling settings of the rows of step t of check_choices. */
std::vector<mm_sampling> sampling_of(uint32_t t, std::vector<mm_logprob> *logprobs) {
  std::vector<mm_sampling> set(kSlots);
  for (uint32_t s = 0; s < kSlots; s++) {
    set[s].top_p = 1;
    if ((s + t) % 3) set[s].temperature = 0.9, set[s].top_p = 0.95, set[s].top_k = t % 2 ? 50 : 0, set[s].seed = 77 + s;
    if (logprobs && t % 4 == 3) set[s].logprobs = &(*logprobs)[(t * kSlots + s) * 4], set[s].top_logprobs = 3;
  }
  return set;
}

/* Steps whose tokens the ranks choose from each other's logits, greedy, drawn and with logprobs, up to two of them outstanding: the ids
 * that the host's rule gives for the logits of the same steps. One engine after the other: kernels of two that wait for each other's
 * devices, each in the other's way, may wait for ever. */
void check_choices(const std::string &name, const opened &logits_of, const opened &chooses, const std::vector<std::vector<int32_t>> &seq) {
  constexpr uint32_t kSteps = 40, kStart = 8;
  mm_err err = {};
  mm_sampler *sampler = mm_sampler_open(logits_of.s.vocab, &err);
  std::vector<std::vector<int32_t>> want, got;
  std::vector<std::vector<float>> logits;
  std::vector<mm_logprob> logprobs(kSteps * kSlots * 4);
  bool ok = sampler != nullptr;
  const auto step = [&](uint32_t t, const std::function<bool(mm_batch *)> &run) {
    std::vector<int32_t> id(kSlots);
    std::vector<mm_span> span(kSlots);
    std::vector<uint32_t> out(kSlots);
    for (uint32_t s = 0; s < kSlots; s++) id[s] = seq[s][kStart + t], span[s] = {(int32_t)s, s, 1, kStart + t}, out[s] = s;
    mm_batch b = {kSlots, id.data(), kSlots, span.data(), kSlots, out.data()};
    ok = ok && run(&b);
  };
  feed(logits_of.s, seq, 0, kStart);
  for (uint32_t t = 0; t < kSteps && ok; t++) {
    logits.emplace_back((size_t)kSlots * logits_of.s.vocab), want.emplace_back(kSlots);
    step(t, [&](mm_batch *b) { return mm_engine_step(logits_of.s.engine, b, logits.back().data(), &err); });
    const auto set = sampling_of(t, nullptr);
    for (uint32_t s = 0; s < kSlots; s++)
      want.back()[s] = mm_sample(sampler, &set[s], kStart + t + UINT64_C(1), &logits.back()[(size_t)s * logits_of.s.vocab]);
  }
  feed(chooses.s, seq, 0, kStart);
  for (uint32_t t = 0; t < kSteps && ok; t++) {
    const auto set = sampling_of(t, &logprobs);
    step(t, [&](mm_batch *b) {
      b->sampling = set.data();
      return mm_engine_queue(chooses.s.engine, b, &err);
    });
    for (uint32_t left = t + 1 == kSteps || t % 3 == 2 ? 0 : t % 3 == 0 ? 1 : 2; ok && got.size() + left <= t;) {
      got.emplace_back(kSlots);
      ok = mm_engine_collect(chooses.s.engine, got.back().data(), &err);
    }
  }
  double worst = 0;
  for (uint32_t t = 3; ok && t < kSteps; t += 4) {
    for (uint32_t s = 0; s < kSlots; s++) {
      const float *row = &logits[t][(size_t)s * logits_of.s.vocab];
      double top = -INFINITY, sum = 0;
      for (uint32_t v = 0; v < logits_of.s.vocab; v++) top = std::max(top, (double)row[v]);
      for (uint32_t v = 0; v < logits_of.s.vocab; v++) sum += exp(row[v] - top);
      const mm_logprob &l = logprobs[(t * kSlots + s) * 4];
      worst = std::max(worst, l.id == want[t][s] ? fabs(l.logprob - (row[l.id] - top - log(sum))) : INFINITY);
    }
  }
  if (!ok) printf("choices: %s\n", err.text);
  mm_sampler_close(sampler);
  report_true(
      "ranks " + name + ": " + std::to_string(kSteps * kSlots) + " choices of the ranks are the host's from their logits, logprobs too",
      ok && want == got && worst < 1e-4);
}

/* The rows before the head that each rank's last step left, [tokens, hidden], by the layer that its stage begins with and its group of
 * attention, which has rows of its own. */
struct rows_of_ranks {
  std::mutex lock;
  std::map<mm_backend *, std::vector<mm_act>> act;
  std::map<std::pair<uint32_t, uint32_t>, std::vector<std::vector<float>>> rows;
  std::atomic<bool> looks{false};
} g_rows;

bool noting_act(mm_backend *b, uint32_t width, mm_act *out, mm_err *err) {
  if (!mm_ops_cuda.act(b, width, out, err)) return false;
  const std::lock_guard<std::mutex> one(g_rows.lock);
  g_rows.act[b].push_back(*out);
  return true;
}
bool noting_end(mm_backend *b, float *logits, mm_err *err) {
  const uint32_t rows = b->step.tokens; /* of this step */
  if (!mm_ops_cuda.end(b, logits, err)) return false;
  if (!g_rows.looks) return true;
  mm_act act[2];
  {
    const std::lock_guard<std::mutex> one(g_rows.lock);
    act[0] = g_rows.act[b][0], act[1] = g_rows.act[b][1]; /* the residual, or what was before it; the normed rows */
  }
  std::vector<float> all;
  for (const mm_act &a : act) {
    std::vector<float> part((size_t)rows * a.width);
    if (!mm_ops_cuda.read(b, a, rows, part.data(), err)) return false;
    all.insert(all.end(), part.begin(), part.end());
  }
  const std::lock_guard<std::mutex> one(g_rows.lock);
  g_rows.rows[{b->c.weights->layer_first, b->groups.own}].push_back(all);
  return true;
}

/* Steps in which the device chooses, two outstanding, and every tenth one whose rows are looked at on all ranks; slots begin anew where
 * they are full. Where attention has groups, a step is of some of the slots: groups are idle in turns. After all of them the sequences give
 * the logits that they gave before. */
void check_alike(const std::string &dir, const std::vector<int32_t> &text, uint32_t steps, const std::vector<std::vector<int32_t>> &seq,
                 const std::vector<float> &before) {
  const std::string name = dir.substr(dir.rfind('/') + 1);
  constexpr uint32_t kMost = 5, kEnd = 512;
  mm_ops ops = mm_ops_cuda;
  ops.act = noting_act, ops.end = noting_end;
  g_rows.act.clear();
  const opened cut(dir, &ops, false);
  if (!cut.s.engine) return;
  mm_err err = {};
  const uint32_t groups = mm_pack_groups(&cut.shards.pack), most_idle = groups > 1 ? kSlots - 1 : 0;
  uint32_t pos[kSlots] = {}, queued = 0, looked = 0, unlike = 0, absent = 0; /* stages or ranks whose rows did not come */
  bool ok = true, other = false;                                             /* rows of other steps differ */
  std::vector<float> logits((size_t)kSlots * kMost * cut.s.vocab), last;
  std::vector<int32_t> chosen(kSlots);
  for (uint32_t t = 0; t < steps && ok; t++) {
    std::vector<int32_t> id;
    std::vector<mm_span> span;
    std::vector<uint32_t> out;
    const uint32_t idle = g_rng.below(1 + most_idle), begin = g_rng.below(kSlots), slots = kSlots - idle;
    for (uint32_t i = 0; i < slots; i++) {
      const uint32_t s = (begin + i) % kSlots;
      const uint32_t count = pos[s] == 0 || g_rng.below(10) == 0 ? 1 + g_rng.below(kMost) : 1;
      if (pos[s] + count > kEnd) pos[s] = 0;
      span.push_back({(int32_t)s, (uint32_t)id.size(), count, pos[s]});
      for (uint32_t k = 0; k < count; k++) id.push_back(text[g_rng.below((uint32_t)text.size())]);
      out.push_back((uint32_t)id.size() - 1), pos[s] += count;
    }
    std::stable_sort(span.begin(), span.end(), [](const mm_span &a, const mm_span &b) { return (a.count > 1) < (b.count > 1); });
    std::vector<int32_t> in;
    for (uint32_t s = 0; s < slots; s++) {
      const uint32_t from = span[s].first;
      span[s].first = (uint32_t)in.size();
      for (uint32_t i = 0; i < span[s].count; i++) in.push_back(id[from + i]);
      out[s] = (uint32_t)in.size() - 1;
    }
    const auto set = sampling_of(t, nullptr);
    mm_batch b = {(uint32_t)in.size(), in.data(), slots, span.data(), slots, out.data()};
    if (t % 10 < 9) {
      b.sampling = set.data();
      ok = mm_engine_queue(cut.s.engine, &b, &err), queued++;
    }
    for (; ok && (queued > 1 || (queued && t % 10 == 9)); queued--) ok = mm_engine_collect(cut.s.engine, chosen.data(), &err);
    if (t % 10 < 9 || !ok) continue;
    g_rows.rows.clear(), g_rows.looks = true;
    ok = mm_engine_step(cut.s.engine, &b, logits.data(), &err);
    g_rows.looks = false, looked++;
    absent += g_rows.rows.size() != cut.shards.pack.pp * groups;
    for (const auto &stage : g_rows.rows) {
      const auto &of = stage.second;
      absent += of.size() != cut.shards.pack.tp / groups;
      for (const auto &rows : of) unlike += rows.size() != of[0].size() || memcmp(rows.data(), of[0].data(), rows.size() * sizeof rows[0]);
      other |= of[0] != last, last = of[0];
    }
  }
  for (; ok && queued; queued--) ok = mm_engine_collect(cut.s.engine, chosen.data(), &err);
  if (!ok) printf("alike: %s\n", err.text);
  const auto after = ok ? cut.run(seq) : std::vector<float>();
  ok = ok && after.size() == before.size() && !memcmp(after.data(), before.data(), after.size() * sizeof after[0]);
  report_true("ranks " + name + ": alike to the bit in " + std::to_string(looked) + " of " + std::to_string(steps) + " steps" +
                  (groups > 1 ? ", idle groups in some" : "") + ", and sequences give what they gave before",
              ok && other && looked == steps / 10 && unlike == 0 && absent == 0);
}

/* A chunk of so many rows that each rank of two has the other's as they are made, or that sums over ranks are one kernel with the
 * residual and norm behind them, against pieces of it that are not of so many, but which the same kernels multiply. */
void check_long(const std::string &dir, const std::vector<int32_t> &text, bool rounds) {
  constexpr uint32_t kRows = 640, kPiece = 160;
  const opened cut(dir, &mm_ops_cuda, false, rounds, kRows);
  if (!cut.s.engine) return;
  const std::vector<std::vector<int32_t>> seq = {{text.begin(), text.begin() + kRows}};
  const auto want = feed(cut.s, seq, 0, kRows).logits;
  std::vector<float> got;
  for (uint32_t t = 0; t < kRows; t += kPiece) {
    const auto piece = feed(cut.s, seq, t, kPiece).logits;
    got.insert(got.end(), piece.begin(), piece.end());
  }
  report_true("ranks " + dir.substr(dir.rfind('/') + 1) + (rounds ? " under rounding" : "") + ": a stretch of " + std::to_string(kRows) +
                  " rows = its pieces, bit for bit",
              got.size() == want.size() && !memcmp(got.data(), want.data(), got.size() * sizeof got[0]));
}

/* A cut checkpoint and the whole one, with inputs kept or rounded: as whole rows are, whatever rank has which columns. */
struct sides_of {
  const opened cpu, one, cut, plain;
  std::vector<float> got;

  sides_of(const std::string &dir, bool rounds)
      : cpu(whole(dir), &mm_ops_cpu, false, rounds),
        one(whole(dir), &mm_ops_cuda, false, rounds),
        cut(dir, &mm_ops_cuda, false, rounds),
        plain(dir, &mm_ops_cuda, true, rounds) {}
  static std::string whole(const std::string &dir) { return dir.substr(0, dir.rfind('-') + 1) + "1"; }
  /* Ranks against the CPU, and recorded steps against launched ones. */
  bool check(const std::string &name, const std::vector<std::vector<int32_t>> &seq) {
    if (!cpu.s.engine || !one.s.engine || !cut.s.engine || !plain.s.engine) return false;
    const auto want = cpu.run(seq), alone = one.run(seq), launched = plain.run(seq);
    got = cut.run(seq);
    const double limit = 1.5 * typical_error(want, alone, cpu.s.vocab) + 1e-3;
    report("ranks " + name + ": ranks beside the CPU, no further than one", typical_error(want, got, cpu.s.vocab), limit);
    report_true("ranks " + name + ": recorded steps = launched ones, bit for bit",
                got.size() == launched.size() && !memcmp(got.data(), launched.data(), got.size() * sizeof got[0]));
    return true;
  }
};

uint32_t g_coded; /* checkpoints whose rows go as codes */
void check_codes(const std::string &dir, const std::vector<int32_t> &text);

void check_cut(const std::string &dir) {
  const std::string name = dir.substr(dir.rfind('/') + 1);
  const std::vector<int32_t> text = held_out(name);
  if (name.find("-dp") != std::string::npos) check_codes(dir, text);
  std::vector<std::vector<int32_t>> seq;
  for (uint32_t i = 0; i < kSlots; i++) seq.emplace_back(text.begin() + i * 500, text.begin() + i * 500 + kPrompt + kDecoded);
  sides_of(dir, true).check(name + " under rounding", seq);
  sides_of s(dir, false);
  if (!s.check(name, seq)) return;
  check_choices(name, s.plain, s.cut, seq);
  for (int failing : {0, 1, 2}) check_failing(dir, seq, s.got, failing);
  const char *const wanted = getenv("MM_STEPS");
  const bool many = name == "tiny-m1-bf16-2" || name == "tiny-m2-block_fp8-2" || name == "tiny-m2-block_fp8-dp2";
  check_alike(dir, text, !many ? 200 : wanted ? (uint32_t)atoi(wanted) : 10000, seq, s.got);
  for (const bool rounds : {false, true}) {
    if (s.cpu.s.hidden >= 1024) check_long(dir, text, rounds);
  }
}

/* A step of some slots' next rows, as many of each; logits of all. */
std::vector<float> next_rows(mm_engine *e, uint32_t slots, uint32_t each, uint32_t pos, const std::vector<int32_t> &text) {
  const uint32_t rows = slots * each;
  std::vector<int32_t> id;
  std::vector<uint32_t> out;
  std::vector<mm_span> span;
  for (uint32_t s = 0; s < slots; s++) {
    span.push_back({(int32_t)s, s * each, each, pos});
    for (uint32_t i = 0; i < each; i++) out.push_back((uint32_t)id.size()), id.push_back(text[(s * 37 + pos + i) % text.size()]);
  }
  std::vector<float> logits((size_t)rows * mm_engine_model(e)->vocab);
  const mm_batch b = {rows, id.data(), slots, span.data(), rows, out.data()};
  mm_err err = {};
  must(mm_engine_step(e, &b, logits.data(), &err), err);
  return logits;
}

/* Rows between groups as codes, of prompts and of decode steps that are recorded, compared with rows as they are: the same logits. */
void check_codes(const std::string &dir, const std::vector<int32_t> &text) {
  constexpr uint32_t kSlotsHere = 80, kRows = 3 * kSlotsHere;
  mm_ops plain = mm_ops_cuda;
  plain.ranks.gather_routed = nullptr;
  mm_err err = {};
  mm_shards shards = {};
  must(mm_shards_open(&shards, dir.c_str(), &err), err);
  int devices = 0;
  CUDA_OK(cudaGetDeviceCount(&devices));
  uint32_t device[8];
  for (uint32_t r = 0; r < 8; r++) device[r] = r % (uint32_t)devices;
  std::vector<float> logits[2];
  uint32_t bytes = 0;
  for (const mm_ops *ops : {&mm_ops_cuda, static_cast<const mm_ops *>(&plain)}) {
    mm_engine_config c = {};
    c.ops = ops, c.limits = {kRows, kSlotsHere, 64}, c.options.threads = 4, c.options.act_quant = true, c.device = device;
    mm_engine *const e = mm_engine_open(&shards, &c, &err);
    must(e, err);
    if (ops == &mm_ops_cuda) bytes = mm_engine_exchange(e).row_bytes;
    std::vector<float> &all = logits[ops == &plain];
    for (const uint32_t slots : {kSlotsHere, 7u, 66u}) {
      uint32_t pos = 0;
      for (const uint32_t each : {slots == 7 ? 12u : 3u, 1u, 1u, 1u, 1u}) { /* chunks; rows like proposals; single tokens */
        const auto some = next_rows(e, slots, each, pos, text);
        all.insert(all.end(), some.begin(), some.end()), pos += each;
      }
    }
    mm_engine_close(e);
  }
  mm_shards_close(&shards);
  const std::string name = "ranks " + dir.substr(dir.rfind('/') + 1) + ": rows between groups as codes";
  if (!bytes) return;
  report_true(name + " of " + std::to_string(bytes) + " bytes = rows as they are, logits bit for bit",
              logits[0].size() == logits[1].size() && !memcmp(logits[0].data(), logits[1].data(), logits[0].size() * sizeof logits[0][0]));
  g_coded++;
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
    if (path.substr(path.rfind('-')) != "-1") cut.push_back(path);
  }
  if (cut.empty()) report_true("ranks: some checkpoint in " + std::string(dir) + " is cut", false);
  std::sort(cut.begin(), cut.end());
  g_coded = 0;
  for (const std::string &path : cut) check_cut(path);
  const bool groups = std::any_of(cut.begin(), cut.end(), [](const std::string &x) { return x.find("-wide-block_fp8-dp2") != x.npos; });
  if (groups && hopper()) report_true("ranks: rows of some checkpoint go as codes", g_coded > 0);
}
