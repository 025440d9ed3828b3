/* Packed checkpoints of the tiny models under $MM_GPU_MODELS (a folder of tiny-m1-SCHEME, tiny-m2-SCHEME) on the CUDA backend beside the
 * CPU backend: the same stretches of held-out text, by prefill, in chunks, one by one and batched; logits and greedy choices. Each op of
 * these very steps is computed again from what the GPU's was given (sides.h): that judges the kernels. How far whole rows may drift apart
 * is measured: by as much as the CPU's own do when its ops round to bf16, and where a row departs, the inputs of both sides' routers,
 * recorded on the way, must say that it took other experts at a near tie. And the backend beside itself: recorded steps, batches and queued
 * choices give the bits of plain steps. */
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "runtime/engine.h"
#include "tests/ops/gpu.h"
#include "tests/ops/sides.h"

/* The median row may be off by so many times what bf16 on the CPU moves it, and a row by so many times that again, or twice what it moves
 * that very row in several tries, or what its weights' kernels may be (bf16 1e-2, others 3e-2), before its routing must explain it. Two
 * logits may lie apart by as much, of the larger. */
#define NEAR    1.5
#define FAR     5
#define TRIES   4
#define MANY    20 /* tries that judge; what fewer explain, they would too */
#define ROWS    96
#define DECODED 24

static void must(bool ok, const mm_err &err) {
  if (ok) return;
  fprintf(stderr, "%s\n", err.text);
  exit(1);
}

/* ---- recording what the routers of one side are given ---- */

static std::vector<std::vector<float>> g_routed; /* by layer: [rows, hidden] of the step under way */
static uint32_t g_rows;

template <const mm_ops *base>
static bool recorded_begin(mm_backend *b, const mm_batch *batch, mm_err *err) {
  g_routed.clear(), g_rows = batch->tokens;
  return base->begin(b, batch, err);
}
static void cpu_route(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
  const float *from = static_cast<const float *>(x.data);
  g_routed.emplace_back(from, from + (size_t)g_rows * x.width);
  mm_ops_cpu.route(b, layer, x, router, bias);
}
static void paired_route(mm_backend *b, uint32_t layer, mm_act x, const mm_packed *router, const mm_packed *bias) {
  g_routed.push_back(paired_rows(x, g_rows));
  kPairedOps.route(b, layer, x, router, bias);
}

enum inputs { KEPT, ROUNDED };
static const char *const kInputs[] = {"", ", inputs rounded"};

struct side {
  mm_engine *engine;
  uint32_t vocab, hidden, layers;
  bool records;
};

/* What came out of a step, by row: logits[vocab], and the routers' inputs [layers][hidden]. */
struct fed {
  std::vector<float> logits, routed;
  void append(const fed &f) {
    logits.insert(logits.end(), f.logits.begin(), f.logits.end());
    routed.insert(routed.end(), f.routed.begin(), f.routed.end());
  }
};

/* Feeds ids [first, first + count) of every sequence, sequence i in slot i; all rows wanted. */
static fed feed(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first, uint32_t count) {
  std::vector<int32_t> id;
  std::vector<uint32_t> out;
  std::vector<mm_span> span;
  for (uint32_t i = 0; i < seq.size(); i++) {
    span.push_back({(int32_t)i, (uint32_t)id.size(), count, first});
    for (uint32_t t = 0; t < count; t++) id.push_back(seq[i][first + t]), out.push_back((uint32_t)out.size());
  }
  fed f;
  f.logits.resize(id.size() * s.vocab);
  mm_batch b = {(uint32_t)id.size(), id.data(), (uint32_t)span.size(), span.data(), (uint32_t)out.size(), out.data(), nullptr};
  mm_err err = {};
  must(mm_engine_step(s.engine, &b, f.logits.data(), &err), err);
  for (size_t row = 0; s.records && row < id.size(); row++) {
    for (const auto &layer : g_routed)
      f.routed.insert(f.routed.end(), layer.begin() + row * s.hidden, layer.begin() + (row + 1) * s.hidden);
  }
  return f;
}

/* ---- the routers' view of a row ---- */

struct routers {
  const mm_model *m;
  bool plain; /* no weights of the model are quantised */
  std::vector<router_numbers> layer;
};

/* The first layer in which a row takes other experts on the GPU than on the CPU, if there is one. */
struct departure {
  bool any = false;
  uint32_t layer;
  double gap;    /* on the CPU, between the last expert chosen and the first not chosen */
  double moved;  /* the most that any score differs between the sides there */
  double before; /* relative error of the router's input there: what the row was off by until then */
};

static departure find_departure(const routers &r, const float *cpu, const float *gpu) {
  departure d;
  const uint32_t k = r.m->top_k, hidden = r.m->hidden;
  for (uint32_t l = 0; l < r.m->layers && !d.any; l++, cpu += hidden, gpu += hidden) {
    const auto a = r.layer[l].keys(cpu), b = r.layer[l].keys(gpu);
    auto of_a = best_first(a), of_b = best_first(b);
    const double gap = a[of_a[k - 1]] - a[of_a[k]];
    std::sort(of_a.begin(), of_a.begin() + k), std::sort(of_b.begin(), of_b.begin() + k);
    if (std::equal(of_a.begin(), of_a.begin() + k, of_b.begin())) continue;
    double moved = 0;
    for (uint32_t e = 0; e < a.size(); e++) moved = std::max(moved, fabs(a[e] - b[e]));
    const std::vector<double> want(cpu, cpu + hidden), got(gpu, gpu + hidden);
    d = {true, l, gap, moved, relative_error(want, got)};
  }
  return d;
}

/* By sequence: the lowest layer in which a row compared so far took other experts at a near tie. Later rows of the sequence read what
 * that row left in the caches of the layers above. */
typedef std::vector<uint32_t> tied_layers;
static const uint32_t kNone = UINT32_MAX;

/* Which rows took the CPU's experts everywhere, as did all rows of their sequence before them. The others are off by what another expert
 * gives, not by rounding. */
template <class Sequence>
static std::vector<bool> together(const routers &r, const fed &cpu, const fed &other, const Sequence &sequence) {
  const size_t routed = (size_t)r.m->layers * r.m->hidden, rows = cpu.routed.size() / routed;
  std::vector<bool> same(rows), parted(rows); /* parted: by sequence */
  for (size_t row = 0; row < rows; row++) {
    if (find_departure(r, &cpu.routed[row * routed], &other.routed[row * routed]).any) parted[sequence(row)] = true;
    same[row] = !parted[sequence(row)];
  }
  return same;
}

static std::string describe(const departure &d) {
  if (!d.any) return "the same experts in every layer";
  char text[160];
  snprintf(text, sizeof text, "other experts from layer %u on, gap %.1e, scores moved by %.1e, input off by %.1e", d.layer, d.gap, d.moved,
           d.before);
  return text;
}

/* The errors of a row's logits, ids that exist. */
static double row_error(const float *want, const float *got, uint32_t vocab) {
  std::vector<double> a, b;
  for (uint32_t i = 0; i < vocab; i++) {
    if (std::isfinite(want[i])) a.push_back(want[i]), b.push_back(got[i]);
  }
  return relative_error(a, b);
}
static double median(std::vector<double> v) { /* of none 0 */
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/* What rounding to bf16 alone does to the CPU: to the median row's logits, to its routers' inputs by layer, and to each row in the mean of
 * squares (of rows that stay together, 0 where none did); at most to each row and to any logit of it, in all tries and in those where the
 * row stays together. */
struct noise {
  double logits;
  std::vector<std::vector<bool>> same; /* of each try: the rows that stay together */
  /* Those of the first `rows` rows, in the try with the fewest. */
  size_t fewest(size_t rows) const {
    size_t n = rows;
    for (const auto &s : same) n = std::min(n, (size_t)std::count(s.begin(), s.begin() + (ptrdiff_t)rows, true));
    return n;
  }
  std::vector<double> layer, row;
  struct {
    std::vector<double> row, logit;
  } most[2]; /* all, together */
};
template <class Sequence>
static noise measure_noise(const routers &router, const fed &cpu, const std::vector<fed> &tries, const Sequence &sequence) {
  const mm_model *m = router.m;
  const size_t rows = cpu.logits.size() / m->vocab, routed = (size_t)m->layers * m->hidden;
  noise n = {0, {}, {}, std::vector<double>(rows), {}};
  for (auto &m : n.most) m.row.resize(rows), m.logit.resize(rows);
  std::vector<uint32_t> together_in(rows);
  std::vector<double> logits;
  std::vector<std::vector<double>> layer(m->layers);
  for (const fed &t : tries) {
    const auto same = together(router, cpu, t, sequence);
    n.same.push_back(same);
    for (size_t r = 0; r < rows; r++) {
      const double error = row_error(&cpu.logits[r * m->vocab], &t.logits[r * m->vocab], m->vocab);
      double furthest = 0;
      for (size_t i = r * m->vocab; i < (r + 1) * m->vocab; i++) {
        if (std::isfinite(cpu.logits[i])) furthest = std::max(furthest, fabs((double)t.logits[i] - cpu.logits[i]));
      }
      for (int i = 0; i <= same[r]; i++)
        n.most[i].row[r] = std::max(n.most[i].row[r], error), n.most[i].logit[r] = std::max(n.most[i].logit[r], furthest);
      if (!same[r]) continue;
      logits.push_back(error);
      n.row[r] += error * error, together_in[r]++;
      for (uint32_t l = 0; l < m->layers; l++) {
        const float *a = &cpu.routed[r * routed + l * m->hidden], *b = &t.routed[r * routed + l * m->hidden];
        layer[l].push_back(relative_error({a, a + m->hidden}, {b, b + m->hidden}));
      }
    }
  }
  n.logits = median(logits);
  for (size_t r = 0; r < rows; r++) n.row[r] = together_in[r] ? sqrt(n.row[r] / together_in[r]) : 0;
  for (const auto &l : layer) n.layer.push_back(median(l));
  return n;
}

/* How a side's rows compare with the CPU's. Rows that are far off, or choose another token although the CPU's logits of both lie further
 * apart than they may move, must have taken other experts at a near tie, by scores that until there were off by no more than a row's may
 * be, or follow such a row of their sequence. Rows of a sequence ascend; sequence(row) says whose each is. */
struct comparison {
  std::vector<double> times;       /* rows that still have the CPU's experts: their errors over what rounding does to them */
  size_t together = 0, fewest = 0; /* rows of this side that do, and of the CPU in the try with the fewest */
  uint32_t differ = 0, ties = 0, after = 0, unexplained = 0;
  std::vector<std::string> rows;
};
template <class Sequence>
static comparison compare_rows(const routers &r, const fed &cpu, const fed &gpu, uint32_t vocab, const Sequence &sequence,
                               tied_layers *tied, const noise &moved) {
  const double limit = NEAR * moved.logits, allowed = r.plain ? 1e-2 : 3e-2;
  const size_t rows = cpu.logits.size() / vocab, routed = (size_t)r.m->layers * r.m->hidden;
  const tied_layers before = *tied;
  const auto same = together(r, cpu, gpu, sequence);
  comparison x;
  x.together = (size_t)std::count(same.begin(), same.end(), true), x.fewest = moved.fewest(rows);
  for (size_t row = 0; row < rows; row++) {
    const float *c = &cpu.logits[row * vocab], *g = &gpu.logits[row * vocab];
    const double error = row_error(c, g, vocab);
    if (same[row] && before[sequence(row)] == kNone && moved.row[row] > 0) x.times.push_back(error / moved.row[row]);
    const size_t a = std::max_element(c, c + vocab) - c, b = std::max_element(g, g + vocab) - g;
    x.differ += a != b;
    const departure d = find_departure(r, &cpu.routed[row * routed], &gpu.routed[row * routed]);
    uint32_t &lowest = (*tied)[sequence(row)];
    const bool tie = d.any && d.gap < 2 * d.moved && d.before <= FAR * NEAR * moved.layer[d.layer],
               follows = lowest < (d.any ? d.layer : r.m->layers);
    if (tie) lowest = std::min(lowest, d.layer);
    const auto &most = moved.most[same[row]];
    const bool near = error <= std::max({FAR * limit, 2 * most.row[row], allowed});
    const double apart = std::max(2 * std::max(limit * fabs(c[a]), most.logit[row]), allowed * fabs(c[a]));
    if (near && (a == b || c[a] - c[b] <= apart)) continue;
    (tie ? x.ties : follows ? x.after : x.unexplained)++;
    char text[240];
    snprintf(text, sizeof text,
             "row %zu: error %.1e, in tries %.1e, CPU chooses %zu, GPU %zu, logits %.4f and %.4f, may be apart %.4f: ", row, error,
             most.row[row], a, b, c[a], c[b], apart);
    x.rows.push_back(text + describe(d));
  }
  return x;
}
/* The middle of so many rows; of fewer it says nothing. */
static void report_times(const std::string &what, const std::vector<double> &times) {
  if (times.size() >= 8)
    report(what + ": median of " + std::to_string(times.size()) + " rows with the CPU's experts, over bf16's noise", median(times), NEAR);
}
/* That, reported, and added to `all`; again() gives what more tries do to the CPU. */
template <class Sequence, class Again>
static void compare(const std::string &what, const routers &r, const fed &cpu, const fed &gpu, uint32_t vocab, const Sequence &sequence,
                    tied_layers *tied, const noise &moved, const Again &again, comparison *all) {
  const tied_layers before = *tied;
  comparison x = compare_rows(r, cpu, gpu, vocab, sequence, tied, moved);
  if (x.unexplained > 0) *tied = before, x = compare_rows(r, cpu, gpu, vocab, sequence, tied, again());
  for (const auto &row : x.rows) printf("     %s: %s\n", what.c_str(), row.c_str());
  report_times(what, x.times);
  char text[240];
  snprintf(text, sizeof text, "%s: %u greedy choices differ; off: %u rows past a near tie of the router, %u after one, %u without cause",
           what.c_str(), x.differ, x.ties, x.after, x.unexplained);
  report_true(text, x.unexplained == 0);
  all->times.insert(all->times.end(), x.times.begin(), x.times.end());
  all->together += x.together, all->fewest += x.fewest;
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

static side open_side(const mm_shards *shards, const mm_ops *ops, uint32_t slots, inputs in, bool records, bool kv_fp8 = false,
                      const std::vector<uint32_t> &taps = {}) {
  mm_err err = {};
  mm_engine_config c = {};
  c.tap = taps.data(), c.taps = (uint32_t)taps.size();
  c.ops = ops, c.limits = {slots * ROWS, slots, 512}, c.threads = 8, c.eager = records, c.kv_fp8 = kv_fp8, c.act_quant = in == ROUNDED;
  const mm_model *m = &shards->pack.model;
  side s = {mm_engine_open(shards, &c, &err), m->vocab, m->hidden, m->layers, records};
  must(s.engine != nullptr, err);
  return s;
}

static routers read_routers(const mm_shards *shards) {
  mm_rank_weights w = {};
  mm_err err = {};
  must(mm_bind(&w, shards, 0, &err), err);
  const std::string quant = shards->pack.quant;
  routers r = {&shards->pack.model, quant == "none" || quant == "bf16", {}};
  for (uint32_t l = 0; l < r.m->layers; l++) {
    const mm_layer_weights *y = &w.layer[l];
    r.layer.emplace_back(&y->router, y->router_bias.scheme ? &y->router_bias : nullptr, r.m->router == MM_ROUTER_SIGMOID_BIAS);
  }
  mm_bind_close(&w);
  return r;
}

static void compare_sides(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  static mm_ops cpu_ops = mm_ops_cpu, narrow_ops = kNarrowOps, paired_ops = kPairedOps;
  cpu_ops.begin = recorded_begin<&mm_ops_cpu>, cpu_ops.route = cpu_route;
  narrow_ops.begin = recorded_begin<&kNarrowOps>, narrow_ops.route = cpu_route;
  paired_ops.begin = recorded_begin<&kPairedOps>, paired_ops.route = paired_route;
  const uint32_t slots = (uint32_t)seq.size(), vocab = shards->pack.model.vocab;
  const size_t routed = (size_t)shards->pack.model.layers * shards->pack.model.hidden;
  const side cpu = open_side(shards, &cpu_ops, slots, in, true), gpu = open_side(shards, &paired_ops, slots, in, true),
             narrow = open_side(shards, &narrow_ops, slots, in, true);
  const routers r = read_routers(shards);
  const fed want = feed(cpu, seq, 0, ROWS);
  fed c;
  std::vector<fed> tries, later;
  const auto by_stretch = [](size_t row) { return row / ROWS; };
  const auto by_slot = [=](size_t row) { return row % slots; };
  const auto prefill_noise = [&](size_t n) {
    while (tries.size() < n) tries.push_back(feed(narrow, seq, 0, ROWS));
    return measure_noise(r, want, tries, by_stretch);
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
  compare(name + ": prefill of 3 x 96", r, want, feed(gpu, seq, 0, ROWS), vocab, by_stretch, &tied, moved, more, &all);
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
  compare(name + ": prefill in chunks of 32", r, want, chunks, vocab, by_stretch, &tied, moved, more, &all);
  fed g, alone, steps;
  for (uint32_t t = ROWS; t < ROWS + DECODED; t++) c.append(feed(cpu, seq, t, 1)), g.append(feed(gpu, seq, t, 1));
  compare(
      name + ": decode, 3 at a time", r, c, g, vocab, by_slot, &tied, decode_noise(TRIES), [&] { return decode_noise(MANY); }, &all);
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  alone.logits.assign(want.logits.begin(), want.logits.begin() + (size_t)ROWS * vocab);
  alone.routed.assign(want.routed.begin(), want.routed.begin() + ROWS * routed);
  for (uint32_t t = 0; t < ROWS; t++) steps.append(feed(gpu, one, t, 1));
  compare(name + ": decode from the first token", r, alone, steps, vocab, by_stretch, &first_tied, moved, more, &all);
  report_times(name + ": all four", all.times);
  char text[160]; /* rounding to four bits may leave none */
  snprintf(text, sizeof text, "%s: all four: %zu rows with the CPU's experts (at least a quarter of bf16's on the CPU, %zu)", name.c_str(),
           all.together, all.fewest);
  report_true(text, 4 * all.together >= all.fewest);
  report_paired(name);
  for (const side *s : {&cpu, &gpu, &narrow}) mm_engine_close(s->engine);
}

/* Rows [first, first + count) of every sequence as single steps; logits by step. */
static std::vector<std::vector<float>> feed_steps(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first,
                                                  uint32_t count) {
  std::vector<std::vector<float>> out;
  for (uint32_t t = first; t < first + count; t++) out.push_back(feed(s, seq, t, 1).logits);
  return out;
}

/* A prompt in stretches of whole tiles, beside other sequences, and in one go alone: bit for bit. */
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

/* The same steps launched one by one and replayed, alone in their bucket and beside other sequences: bit for bit. */
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

/* Tokens chosen on the device and fed back there, queued ahead, beside choices made from the logits of plain steps. */
static void check_queue(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const uint32_t n = 3, prompt = 20;
  const side s = open_side(shards, &mm_ops_cuda, n, in, false);
  const std::vector<std::vector<int32_t>> three(seq.begin(), seq.begin() + n);
  std::vector<std::vector<int32_t>> want = three, got(n);
  fed f = feed(s, three, 0, prompt);
  for (uint32_t i = 0; i < n; i++) want[i].resize(prompt);
  for (uint32_t t = 0; t < DECODED; t++) {
    const uint32_t rows = t == 0 ? prompt : 1;
    for (uint32_t i = 0; i < n; i++) {
      const float *l = &f.logits[(size_t)(i * rows + rows - 1) * s.vocab];
      want[i].push_back((int32_t)(std::max_element(l, l + s.vocab) - l));
    }
    f = feed(s, want, prompt + t, 1);
  }
  const std::vector<mm_sampling> greedy(n, {0, 1, 0, 0});
  const std::vector<int32_t> chosen(n, MM_ID_CHOSEN);
  std::vector<int32_t> id, tokens(n);
  std::vector<uint32_t> last, each;
  std::vector<mm_span> span;
  mm_err err = {};
  for (uint32_t i = 0; i < n; i++) {
    span.push_back({(int32_t)i, i * prompt, prompt, 0}), last.push_back((i + 1) * prompt - 1), each.push_back(i);
    id.insert(id.end(), three[i].begin(), three[i].begin() + prompt);
  }
  const mm_batch first = {n * prompt, id.data(), n, span.data(), n, last.data(), greedy.data()};
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

/* Hidden states and the load of experts, by prefill, three sequences at a time and one: replayed steps give those of launched ones, every
 * row counts, and with inputs as they are each layer's median row and most choices are the CPU's. Rounded inputs have too few such rows. */
static void check_taps(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const mm_model *m = &shards->pack.model;
  const std::vector<uint32_t> taps = {m->layers - 1, 0, m->layers / 2};
  const std::vector<std::vector<int32_t>> three(seq.begin(), seq.begin() + 3), one(1, seq[0]);
  enum { PREFILL, MANY_ROWS, ONE_ROW, WAYS };
  static const char *const way[WAYS] = {"prefill", "three rows", "one row"};
  const uint32_t prompt = 32, steps = 6, rows = 3 * prompt + 3 * steps + steps;
  mm_err err = {};
  std::vector<std::vector<float>> hidden[3]; /* of the CPU, of launched and of replayed steps: [way, tap] */
  std::vector<uint64_t> load[3];
  for (int i = 0; i < 3; i++) {
    const side s = open_side(shards, i == 0 ? &mm_ops_cpu : &mm_ops_cuda, 3, in, i == 1, false, taps);
    side plain = s;
    plain.records = false;
    hidden[i].resize(WAYS * taps.size());
    for (uint32_t t = 0; t <= 2 * steps; t++) {
      const int how = t == 0 ? PREFILL : t <= steps ? MANY_ROWS : ONE_ROW;
      feed(plain, how == ONE_ROW ? one : three, t == 0 ? 0 : prompt + t - 1, t == 0 ? prompt : 1);
      const uint32_t n = how == PREFILL ? 3 * prompt : how == MANY_ROWS ? 3 : 1;
      for (uint32_t tap = 0; tap < taps.size(); tap++) {
        std::vector<float> v((size_t)n * m->hidden);
        must(mm_engine_hidden(s.engine, tap, v.data(), &err), err);
        auto &to = hidden[i][how * taps.size() + tap];
        to.insert(to.end(), v.begin(), v.end());
      }
    }
    load[i].resize((size_t)m->layers * m->experts);
    must(mm_engine_expert_load(s.engine, load[i].data(), &err), err);
    mm_engine_close(s.engine);
  }
  report_true(name + ": hidden states and loads of replayed steps = of launched ones, bit for bit",
              hidden[1] == hidden[2] && load[1] == load[2]);
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
  report(name + ": load of experts beside the CPU's, share that differs", moved / ((double)rows * m->top_k * m->layers), 0.03);
  for (size_t i = 0; i < hidden[0].size(); i++) {
    std::vector<double> errors;
    for (size_t at = 0; at < hidden[0][i].size(); at += m->hidden) {
      const float *a = &hidden[0][i][at], *b = &hidden[1][i][at];
      errors.push_back(relative_error({a, a + m->hidden}, {b, b + m->hidden}));
    }
    report(name + ": hidden states behind layer " + std::to_string(taps[i % taps.size()]) + ", " + way[i / taps.size()] + ", median row",
           median(errors), 1.5e-2);
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
    compare_sides(&shards, what, {seq.begin(), seq.begin() + 3}, in);
    check_chunks(&shards, what, seq, in);
    check_buckets(&shards, what, seq, in);
    check_queue(&shards, what, seq, in);
    check_taps(&shards, what, seq, in);
  }
  check_fp8_cache(&shards, name, seq);
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
