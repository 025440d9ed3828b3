/* Packed checkpoints of the tiny models under $MM_GPU_MODELS (a folder of tiny-m1-SCHEME, tiny-m2-SCHEME) on the CUDA backend against the
 * CPU backend: the same chunks of held-out text, by prefill, in chunks, one by one and batched; logits and greedy choices. Each op of
 * these very steps is computed again from what the GPU's was given (sides.h): that judges the kernels. With inputs rounded test_rounded.cu
 * compares. How far whole rows may drift
 * is measured: by as much as the CPU's own do when its ops round to bf16, and where a row departs, the inputs of both sides' routers,
 * recorded on the way, must say that it took other experts at a near tie. Also the backend against itself: recorded steps, batches and
 * queued choices give the bits of plain steps. */
#include <algorithm>

#include "tests/ops/gpu.h"
#include "tests/ops/sides.h"
#include "tests/ops/whole.h"

#define TRIES   4  /* of rounding on the CPU */
#define MANY    20 /* tries that judge; what fewer explain, they would too */
#define ROWS    MM_WHOLE_ROWS
#define DECODED 24

static void compare_sides(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const uint32_t slots = (uint32_t)seq.size(), vocab = shards->pack.model.vocab;
  const size_t routed = (size_t)shards->pack.model.layers * shards->pack.model.hidden;
  const side cpu = open_side(shards, recorded_cpu(), slots, in, true), gpu = open_side(shards, recorded_paired(), slots, in, true),
             narrow = open_side(shards, recorded_narrow(), slots, in, true);
  const routers r = read_routers(shards);
  const fed want = feed(cpu, seq, 0, ROWS);
  fed c;
  std::vector<fed> tries, later;
  const auto by_chunk = [](size_t row) { return row / ROWS; };
  const auto by_slot = [=](size_t row) { return row % slots; };
  const auto prefill_noise = [&](size_t n) {
    while (tries.size() < n) tries.push_back(feed(narrow, seq, 0, ROWS));
    return measure_noise(r, want, tries, by_chunk);
  };
  const auto decode_noise = [&](size_t n) {
    while (later.size() < n) {
      fed f;
      feed(narrow, seq, 0, ROWS);
      for (uint32_t t = ROWS; t < ROWS + DECODED; t++) f.append(feed(narrow, seq, t, 1));
      later.push_back(f);
    }
    return measure_noise(r, c, later, by_slot);
  };
  const noise moved = prefill_noise(TRIES);
  const auto more = [&] { return prefill_noise(MANY); };
  comparison all;
  tied_layers tied(slots, kNone), first_tied(1, kNone);
  compare(name + ": prefill of 3 x 96", r, want, feed(gpu, seq, 0, ROWS), by_chunk, &tied, moved, more, &all);
  fed chunks = want;
  for (uint32_t first = 0; first < ROWS; first += 32) {
    const fed part = feed(gpu, seq, first, 32);
    for (uint32_t s = 0; s < slots; s++) {
      const size_t to = (size_t)s * ROWS + first;
      std::copy_n(&part.logits[(size_t)s * 32 * vocab], 32 * vocab, &chunks.logits[to * vocab]);
      std::copy_n(&part.routed[(size_t)s * 32 * routed], 32 * routed, &chunks.routed[to * routed]);
    }
  }
  tied.assign(slots, kNone);
  compare(name + ": prefill in chunks of 32", r, want, chunks, by_chunk, &tied, moved, more, &all);
  fed g, alone, steps;
  for (uint32_t t = ROWS; t < ROWS + DECODED; t++) c.append(feed(cpu, seq, t, 1)), g.append(feed(gpu, seq, t, 1));
  compare(
      name + ": decode, 3 at a time", r, c, g, by_slot, &tied, decode_noise(TRIES), [&] { return decode_noise(MANY); }, &all);
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  alone.logits.assign(want.logits.begin(), want.logits.begin() + (size_t)ROWS * vocab);
  alone.routed.assign(want.routed.begin(), want.routed.begin() + ROWS * routed);
  for (uint32_t t = 0; t < ROWS; t++) steps.append(feed(gpu, one, t, 1));
  compare(name + ": decode from the first token", r, alone, steps, by_chunk, &first_tied, moved, more, &all);
  report_drift(name + ": all four", all);
  report_paired(name, true);
  for (const side *s : {&cpu, &gpu, &narrow}) mm_engine_close(s->engine);
}

/* Rows [first, first + count) of every sequence as single steps; logits by step. */
static std::vector<std::vector<float>> feed_steps(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first,
                                                  uint32_t count) {
  std::vector<std::vector<float>> out;
  for (uint32_t t = first; t < first + count; t++) out.push_back(feed(s, seq, t, 1).logits);
  return out;
}

/* A prompt in chunks of whole tiles, among other sequences, and in one go alone: bit for bit. */
static void check_chunks(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const side s = open_side(shards, &mm_ops_cuda, 3, in, false);
  const auto whole = feed(s, {seq[0]}, 0, ROWS).logits;
  const auto first = feed(s, {seq.begin(), seq.begin() + 3}, 0, 64).logits,
             rest = feed(s, {seq.begin(), seq.begin() + 3}, 64, ROWS - 64).logits;
  const size_t cut = (size_t)64 * s.vocab;
  report_true(name + ": prefill in chunks of 64 among others = whole and alone, bit for bit",
              std::equal(first.begin(), first.begin() + cut, whole.begin()) && std::equal(whole.begin() + cut, whole.end(), rest.begin()));
  mm_engine_close(s.engine);
}

/* The same steps launched one by one and replayed, alone in their bucket and among other sequences: bit for bit. */
static void check_buckets(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const side graphs = open_side(shards, &mm_ops_cuda, 8, in, false), eager = open_side(shards, &mm_ops_cuda, 8, in, true);
  side plain = eager;
  plain.records = false;
  std::vector<std::vector<int32_t>> five(seq.begin(), seq.begin() + 5), eight(seq.begin(), seq.begin() + 8);
  feed(graphs, five, 0, 32), feed(plain, five, 0, 32);
  const auto a = feed_steps(graphs, five, 32, 12), b = feed_steps(plain, five, 32, 12);
  report_true(name + ": 12 replayed steps of 5 sequences = launched ones, bit for bit", a == b);
  feed(graphs, eight, 0, 32);
  const auto c = feed_steps(graphs, eight, 32, 12);
  bool same = true;
  for (size_t t = 0; t < a.size(); t++) same &= std::equal(a[t].begin(), a[t].end(), c[t].begin());
  report_true(name + ": 5 sequences of a bucket of 8 alone = beside 3 more, bit for bit", same);
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  report_true(name + ": 12 replayed steps of 1 sequence = launched ones, bit for bit",
              feed_steps(graphs, one, 44, 12) == feed_steps(plain, one, 44, 12));
  mm_engine_close(graphs.engine);
  mm_engine_close(eager.engine);
}

/* Tokens sampled on the device and fed back there, queued ahead, against samples from the logits of plain steps. */
static void check_queue(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const uint32_t n = 3, prompt = 20;
  const side s = open_side(shards, &mm_ops_cuda, n, in, false);
  const std::vector<std::vector<int32_t>> three(seq.begin(), seq.begin() + n);
  std::vector<std::vector<int32_t>> want = three, got(n);
  const std::vector<mm_sampling> greedy(n, {0, 1, 0, 0});
  const std::vector<int32_t> chosen(n, MM_ID_SAMPLED);
  std::vector<int32_t> id, tokens(n);
  std::vector<uint32_t> last, each;
  std::vector<mm_span> span;
  mm_err err = {};
  for (uint32_t i = 0; i < n; i++) {
    span.push_back({(int32_t)i, i * prompt, prompt, 0}), last.push_back((i + 1) * prompt - 1), each.push_back(i);
    id.insert(id.end(), three[i].begin(), three[i].begin() + prompt), want[i].resize(prompt);
  }
  const mm_batch first = {n * prompt, id.data(), n, span.data(), n, last.data(), greedy.data()};
  mm_batch plain = first; /* the same rows wanted: the head of all 60 is another kernel, which decides near ties otherwise */
  plain.sampling = nullptr;
  fed f;
  f.logits.resize((size_t)n * s.vocab);
  must(mm_engine_step(s.engine, &plain, f.logits.data(), &err), err);
  for (uint32_t t = 0; t < DECODED; t++) {
    for (uint32_t i = 0; i < n; i++) {
      const float *l = &f.logits[(size_t)i * s.vocab];
      want[i].push_back((int32_t)(std::max_element(l, l + s.vocab) - l));
    }
    f = feed(s, want, prompt + t, 1);
  }
  must(mm_engine_queue(s.engine, &first, &err), err);
  for (uint32_t t = 1; t <= DECODED; t++) {
    for (uint32_t i = 0; t < DECODED && i < n; i++) span[i] = {(int32_t)i, i, 1, prompt + t - 1};
    const mm_batch next = {n, chosen.data(), n, span.data(), n, each.data(), greedy.data()};
    if (t < DECODED) must(mm_engine_queue(s.engine, &next, &err), err);
    must(mm_engine_collect(s.engine, tokens.data(), &err), err);
    for (uint32_t i = 0; i < n; i++) got[i].push_back(tokens[i]);
  }
  bool same = true;
  for (uint32_t i = 0; i < n; i++) same &= std::equal(got[i].begin(), got[i].end(), want[i].begin() + prompt);
  report_true(name + ": 24 queued tokens of 3 sequences = choices from logits", same);
  /* steps of no rows, and of padding alone, after ids that only the device knows; the last row again then */
  for (uint32_t rows : {0u, 1u, 3u, 20u}) {
    const std::vector<int32_t> none(rows, 0);
    span.resize(rows);
    for (uint32_t i = 0; i < rows; i++) span[i] = {-1, i, 1, 0};
    const mm_batch empty = {rows, none.data(), rows, span.data(), 0, nullptr, nullptr};
    must(mm_engine_step(s.engine, &empty, nullptr, &err), err);
  }
  report_true(name + ": steps without a sequence change nothing", f.logits == feed(s, want, prompt + DECODED - 1, 1).logits);
  mm_engine_close(s.engine);
}

void check_itself(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  check_chunks(shards, name, seq, in), check_buckets(shards, name, seq, in), check_queue(shards, name, seq, in);
}

static double distance(const std::vector<double> &a, const std::vector<double> &b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); i++) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sqrt(sum);
}
/* Hidden states and the load of experts, by prefill, three sequences at a time and one: replayed steps give those of launched ones, every
 * row counts, and with inputs as they are hidden states lie nearer to the CPU's than to the CPU's of any other row or layer, each
 * layer's median row by each way and most choices are the CPU's. Rounded inputs have too few such rows. With many sequences only the start
 * is taken, so that one that parts from the CPU's at a near tie is a few rows of a median. */
static void check_taps(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const mm_model *m = &shards->pack.model;
  const std::vector<uint32_t> taps = {m->layers - 1, 0, m->layers / 2};
  enum { PREFILL, THREE_ROWS, ONE_ROW, WAYS };
  static const char *const way[WAYS] = {"prefill", "three rows", "one row"};
  const uint32_t prompt = 16, later = 3;   /* steps behind a prompt, and of one row */
  std::vector<int> way_of;                 /* each row's */
  std::vector<std::vector<int32_t>> until; /* the ids up to it */
  mm_err err = {};
  std::vector<std::vector<double>> hidden[3]; /* of the CPU, of launched and of replayed steps: by tap, rows in the order of the steps */
  std::vector<uint64_t> load[3];
  for (int i = 0; i < 3; i++) {
    const side s = open_side(shards, i == 0 ? &mm_ops_cpu : &mm_ops_cuda, 3, in, i == 1, false, taps);
    side plain = s;
    plain.records = false;
    std::vector<float> of[3];
    way_of.clear(), until.clear();
    const auto step = [&](int how, const std::vector<std::vector<int32_t>> &some, uint32_t first, uint32_t count) {
      feed(plain, some, first, count);
      way_of.insert(way_of.end(), some.size() * count, how);
      for (const auto &ids : some) {
        for (uint32_t j = first; j < first + count; j++) until.emplace_back(ids.begin(), ids.begin() + j + 1);
      }
      for (uint32_t tap = 0; tap < taps.size(); tap++) {
        std::vector<float> v(some.size() * count * m->hidden);
        must(mm_engine_hidden(s.engine, tap, v.data(), &err), err);
        of[tap].insert(of[tap].end(), v.begin(), v.end());
      }
    };
    for (size_t first : {0, 3, 5}) {
      const std::vector<std::vector<int32_t>> three(seq.begin() + (ptrdiff_t)first, seq.begin() + (ptrdiff_t)first + 3);
      step(PREFILL, three, 0, prompt);
      for (uint32_t t = 0; t < later; t++) step(THREE_ROWS, three, prompt + t, 1);
    }
    for (const auto &one : seq) {
      for (uint32_t t = 0; t < later; t++) step(ONE_ROW, {one}, t, 1);
    }
    const size_t rows = way_of.size();
    for (const auto &v : of) {
      for (size_t row = 0; row < rows; row++)
        hidden[i].emplace_back(v.begin() + (ptrdiff_t)row * m->hidden, v.begin() + (ptrdiff_t)(row + 1) * m->hidden);
    }
    load[i].resize((size_t)m->layers * m->experts);
    must(mm_engine_expert_load(s.engine, load[i].data(), &err), err);
    mm_engine_close(s.engine);
  }
  report_true(name + ": hidden states and loads of replayed steps = of launched ones, bit for bit",
              hidden[1] == hidden[2] && load[1] == load[2]);
  const size_t rows = way_of.size();
  bool sums = true;
  double moved = 0;
  for (uint32_t l = 0; l < m->layers; l++) {
    uint64_t sum = 0;
    for (size_t e = (size_t)l * m->experts; e < (size_t)(l + 1) * m->experts; e++)
      sum += load[1][e], moved += fabs((double)load[1][e] - (double)load[0][e]);
    sums &= sum == (uint64_t)rows * m->top_k;
  }
  report_true(name + ": every row's choices count as load, in each layer", sums);
  if (in != KEPT) return;
  size_t others = 0;
  for (size_t i = 0; i < hidden[0].size(); i++) {
    const double own = distance(hidden[0][i], hidden[1][i]);
    bool nearest = std::isfinite(own);
    for (size_t j = 0; j < hidden[0].size() && nearest; j++) /* the same row by another way is the same */
      nearest = distance(hidden[0][j], hidden[1][i]) >= own || (i / rows == j / rows && until[i % rows] == until[j % rows]);
    others += !nearest;
  }
  report_true(
      name + ": " + std::to_string(hidden[0].size()) +
          " hidden states, nearest to another row's or layer's of the CPU (at most 1 in 100, past a near tie): " + std::to_string(others),
      100 * others <= hidden[0].size());
  report(name + ": load of experts beside the CPU's, share that differs", moved / ((double)rows * m->top_k * m->layers), 0.03);
  for (size_t tap = 0; tap < taps.size(); tap++) {
    std::vector<double> errors[WAYS];
    for (size_t row = 0; row < rows; row++)
      errors[way_of[row]].push_back(relative_error(hidden[0][tap * rows + row], hidden[1][tap * rows + row]));
    for (int how = 0; how < WAYS; how++)
      report(name + ": hidden states behind layer " + std::to_string(taps[tap]) + ", " + way[how] + ", median row", median(errors[how]),
             1.5e-2);
  }
}

/* An e4m3 cache: three bits of mantissa in every key and value, at most 2^-4 off, about 2.5 % of a head's size. */
static void check_fp8_cache(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq) {
  const side wide = open_side(shards, &mm_ops_cuda, 8, KEPT, false), narrow = open_side(shards, &mm_ops_cuda, 8, KEPT, false, true);
  std::vector<double> want, got;
  for (auto v : feed(wide, seq, 0, 64).logits) want.push_back(v);
  for (auto v : feed(narrow, seq, 0, 64).logits) got.push_back(v);
  for (const auto &step : feed_steps(wide, seq, 64, 8)) want.insert(want.end(), step.begin(), step.end());
  for (const auto &step : feed_steps(narrow, seq, 64, 8)) got.insert(got.end(), step.begin(), step.end());
  std::vector<double> errors;
  for (size_t row = 0; row < want.size() / wide.vocab; row++) {
    std::vector<double> a, b;
    for (size_t i = row * wide.vocab; i < (row + 1) * wide.vocab; i++) {
      if (std::isfinite(want[i])) a.push_back(want[i]), b.push_back(got[i]);
    }
    errors.push_back(relative_error(a, b));
  }
  std::sort(errors.begin(), errors.end());
  report(name + ": e4m3 cache beside bf16, prefill and decode, median row", errors[errors.size() / 2], 3e-2);
  report_true(name + ": e4m3 cache is one", errors[errors.size() / 2] > 0);
  mm_engine_close(wide.engine);
  mm_engine_close(narrow.engine);
}

static void check_model(const std::string &dir, const std::string &name) {
  mm_shards shards = {};
  mm_err err = {};
  must(mm_shards_open(&shards, dir.c_str(), &err), err);
  const std::vector<int32_t> text = held_out(name);
  if (text.size() < ROWS + DECODED) {
    report_true(name + ": held-out ids in tests/data", false);
    return;
  }
  std::vector<std::vector<int32_t>> seq(8);
  for (auto &s : seq) {
    const uint32_t from = g_rng.below((uint32_t)text.size() - ROWS - DECODED);
    s.assign(text.begin() + from, text.begin() + from + ROWS + DECODED);
  }
  for (inputs in : {KEPT, ROUNDED}) {
    const std::string what = name + kInputs[in];
    if (in == KEPT) compare_sides(&shards, what, {seq.begin(), seq.begin() + 3}, in);
    check_chunks(&shards, what, seq, in);
    check_buckets(&shards, what, seq, in);
    check_queue(&shards, what, seq, in);
    check_taps(&shards, what, seq, in);
  }
  check_fp8_cache(&shards, name, seq);
  mm_shards_close(&shards);
}

void test_models() {
  for (const std::string &dir : model_folders()) check_model(dir, dir.substr(dir.rfind('/') + 1));
}
