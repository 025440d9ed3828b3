/* Drift of rows of whole models (drift.h). */
#include "tests/ops/drift.h"

#include <math.h>

#include <algorithm>

#include "tests/ops/gpu.h"

/* The median row may be off by so many times what bf16 on the CPU moves it, and a row by so many times that again, or twice what it moves
 * that very row in several tries, or what its weights' kernels may be (bf16 1e-2, others 3e-2), before its routing must explain it. Two
 * logits may differ by as much, of the larger. */
#define NEAR   1.5
#define FAR    5
#define ENOUGH 8 /* rows; a median or a count of fewer says nothing */

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

/* In how many layers, from the first on, each row took the CPU's experts, as did all rows of its sequence before it. Behind those a row is
 * off by what another expert gives, not by rounding. */
static std::vector<uint32_t> together(const routers &r, const fed &cpu, const fed &other, const sequence_of &sequence) {
  const size_t routed = (size_t)r.m->layers * r.m->hidden, rows = cpu.routed.size() / routed;
  std::vector<uint32_t> layers(rows), lowest(rows, r.m->layers); /* lowest: by sequence */
  for (size_t row = 0; row < rows; row++) {
    const departure d = find_departure(r, &cpu.routed[row * routed], &other.routed[row * routed]);
    uint32_t &l = lowest[sequence(row)];
    if (d.any) l = std::min(l, d.layer);
    layers[row] = l;
  }
  return layers;
}
/* By layer: of the first `rows` rows, those that took the CPU's experts in it and below. */
static std::vector<size_t> count_together(const std::vector<uint32_t> &layers, size_t rows, uint32_t all) {
  std::vector<size_t> n(all);
  for (size_t row = 0; row < rows; row++) {
    for (uint32_t l = 0; l < layers[row]; l++) n[l]++;
  }
  return n;
}
/* The same, in the try with the fewest. */
static std::vector<size_t> count_fewest(const noise &moved, size_t rows, uint32_t all) {
  std::vector<size_t> n(all, rows);
  for (const auto &s : moved.stays) {
    const auto in = count_together(s, rows, all);
    for (uint32_t l = 0; l < all; l++) n[l] = std::min(n[l], in[l]);
  }
  return n;
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
double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

noise measure_noise(const routers &router, const fed &cpu, const std::vector<fed> &tries, const sequence_of &sequence) {
  const mm_model *m = router.m;
  const size_t rows = cpu.logits.size() / m->vocab, routed = (size_t)m->layers * m->hidden;
  noise n = {0, {}, {}, std::vector<double>(rows), {}};
  for (auto &m : n.most) m.row.resize(rows), m.logit.resize(rows);
  std::vector<uint32_t> together_in(rows);
  std::vector<double> logits;
  std::vector<std::vector<double>> layer(m->layers);
  for (const fed &t : tries) {
    n.stays.push_back(together(router, cpu, t, sequence));
    for (size_t r = 0; r < rows; r++) {
      const bool same = n.stays.back()[r] == m->layers;
      const double error = row_error(&cpu.logits[r * m->vocab], &t.logits[r * m->vocab], m->vocab);
      double furthest = 0;
      for (size_t i = r * m->vocab; i < (r + 1) * m->vocab; i++) {
        if (std::isfinite(cpu.logits[i])) furthest = std::max(furthest, fabs((double)t.logits[i] - cpu.logits[i]));
      }
      for (int i = 0; i <= same; i++)
        n.most[i].row[r] = std::max(n.most[i].row[r], error), n.most[i].logit[r] = std::max(n.most[i].logit[r], furthest);
      for (uint32_t l = 0; l <= n.stays.back()[r] && l < m->layers; l++) { /* what a layer is given depends on those below alone */
        const float *a = &cpu.routed[r * routed + l * m->hidden], *b = &t.routed[r * routed + l * m->hidden];
        layer[l].push_back(relative_error({a, a + m->hidden}, {b, b + m->hidden}));
      }
      if (!same) continue;
      logits.push_back(error);
      n.row[r] += error * error, together_in[r]++;
    }
  }
  n.logits = median(logits);
  for (size_t r = 0; r < rows; r++) n.row[r] = together_in[r] ? sqrt(n.row[r] / together_in[r]) : 0;
  for (const auto &l : layer) n.layer.push_back(median(l));
  return n;
}

static comparison compare_rows(const routers &r, const fed &cpu, const fed &gpu, const sequence_of &sequence, tied_layers *tied,
                               const noise &moved) {
  const double limit = NEAR * moved.logits, allowed = r.plain ? 1e-2 : 3e-2;
  const uint32_t vocab = r.m->vocab;
  const size_t rows = cpu.logits.size() / vocab, routed = (size_t)r.m->layers * r.m->hidden;
  const tied_layers before = *tied;
  const auto stays = together(r, cpu, gpu, sequence);
  comparison x;
  x.together = count_together(stays, rows, r.m->layers), x.fewest = count_fewest(moved, rows, r.m->layers);
  for (size_t row = 0; row < rows; row++) {
    const float *c = &cpu.logits[row * vocab], *g = &gpu.logits[row * vocab];
    const double error = row_error(c, g, vocab);
    const bool same = stays[row] == r.m->layers;
    if (same && before[sequence(row)] == kNone && moved.row[row] > 0) x.times.push_back(error / moved.row[row]);
    const size_t a = std::max_element(c, c + vocab) - c, b = std::max_element(g, g + vocab) - g;
    x.differ += a != b;
    const departure d = find_departure(r, &cpu.routed[row * routed], &gpu.routed[row * routed]);
    uint32_t &lowest = (*tied)[sequence(row)];
    const bool tie = d.any && d.before <= FAR * NEAR * moved.layer[d.layer], follows = lowest < (d.any ? d.layer : r.m->layers);
    if (tie) lowest = std::min(lowest, d.layer);
    const auto &most = moved.most[same];
    const bool near = error <= std::max({FAR * limit, 2 * most.row[row], allowed});
    const double distance = std::max(2 * std::max(limit * fabs(c[a]), most.logit[row]), allowed * fabs(c[a]));
    if (near && (a == b || c[a] - c[b] <= distance)) continue;
    (error >= 1 || !(tie || follows) ? x.unexplained : tie ? x.ties : x.after)++;
    char text[240];
    snprintf(text, sizeof text,
             "row %zu: error %.1e, in tries %.1e, CPU chooses %zu, GPU %zu, logits %.4f and %.4f, may be apart %.4f: ", row, error,
             most.row[row], a, b, c[a], c[b], distance);
    x.rows.push_back(text + describe(d));
  }
  return x;
}
/* The middle of so many rows. */
static void report_times(const std::string &what, const std::vector<double> &times) {
  if (times.size() >= ENOUGH)
    report(what + ": median of " + std::to_string(times.size()) + " rows with the CPU's experts, over bf16's noise", median(times), NEAR);
}
void compare(const std::string &what, const routers &r, const fed &cpu, const fed &gpu, const sequence_of &sequence, tied_layers *tied,
             const noise &moved, const std::function<noise()> &again, comparison *all) {
  const tied_layers before = *tied;
  comparison x = compare_rows(r, cpu, gpu, sequence, tied, moved);
  if (x.unexplained > 0) *tied = before, x = compare_rows(r, cpu, gpu, sequence, tied, again());
  for (const auto &row : x.rows) printf("     %s: %s\n", what.c_str(), row.c_str());
  report_times(what, x.times);
  char text[240];
  snprintf(text, sizeof text, "%s: %u greedy choices differ; off: %u rows past a near tie of the router, %u after one, %u without cause",
           what.c_str(), x.differ, x.ties, x.after, x.unexplained);
  report_true(text, x.unexplained == 0);
  all->times.insert(all->times.end(), x.times.begin(), x.times.end());
  all->together.resize(r.m->layers), all->fewest.resize(r.m->layers);
  for (uint32_t l = 0; l < r.m->layers; l++) all->together[l] += x.together[l], all->fewest[l] += x.fewest[l];
}

void report_drift(const std::string &what, const comparison &all) {
  report_times(what, all.times);
  std::string counts;
  bool enough = true;
  for (size_t l = 0; l < all.together.size(); l++) {
    counts += ' ' + std::to_string(all.together[l]) + '/' + std::to_string(all.fewest[l]);
    enough &= all.fewest[l] < ENOUGH || 4 * all.together[l] >= all.fewest[l];
  }
  report_true(what + ": rows with the CPU's experts, and in the try of bf16 with the fewest, by layer:" + counts, enough);
}
