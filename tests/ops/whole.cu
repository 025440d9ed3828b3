/* Whole models in the tests (whole.h). */
#include "tests/ops/whole.h"

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/ops/gpu.h"
#include "tests/ops/sides.h"

void must(bool ok, const mm_err &err) {
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

const char *const kInputs[] = {"", ", inputs rounded"};

/* Feeds ids [first, first + count) of every sequence, sequence i in slot i; all rows wanted. */
fed feed(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first, uint32_t count) {
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

/* Token ids of the model's held-out text. */
std::vector<int32_t> held_out(const std::string &name) {
  std::ifstream in("tests/data/" + name.substr(0, 7) + "/held-out-ids.json");
  std::vector<int32_t> ids;
  for (uint32_t i = 0; name.rfind("tiny-m3", 0) == 0 && i < 8192; i++)
    ids.push_back((int32_t)((i * i * 7 + i * 13 + i / 5) % 519)); /* tiny-m3 has no text */
  for (char c; in.get(c);) {
    if (c < '0' || c > '9') continue;
    int32_t v;
    in.unget();
    in >> v;
    ids.push_back(v);
  }
  return ids;
}

side open_side(const mm_shards *shards, const mm_ops *ops, uint32_t slots, inputs in, bool records, bool kv_fp8,
               const std::vector<uint32_t> &taps) {
  mm_err err = {};
  mm_engine_config c = {};
  c.tap = taps.data(), c.taps = (uint32_t)taps.size();
  c.ops = ops, c.limits = {slots * MM_WHOLE_ROWS, slots, 512}, c.options.threads = 8, c.options.eager = records, c.options.kv_fp8 = kv_fp8,
  c.options.act_quant = in == ROUNDED;
  const mm_model *m = &shards->pack.model;
  side s = {mm_engine_open(shards, &c, &err), m->vocab, m->hidden, m->layers, records};
  must(s.engine != nullptr, err);
  return s;
}

routers read_routers(const mm_shards *shards) {
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

const mm_ops *recorded_cpu() {
  static mm_ops ops = mm_ops_cpu;
  ops.begin = recorded_begin<&mm_ops_cpu>, ops.route = cpu_route;
  return &ops;
}
const mm_ops *recorded_narrow() {
  static mm_ops ops = kNarrowOps;
  ops.begin = recorded_begin<&kNarrowOps>, ops.route = cpu_route;
  return &ops;
}
const mm_ops *recorded_paired() {
  static mm_ops ops = kPairedOps;
  ops.begin = recorded_begin<&kPairedOps>, ops.route = paired_route;
  return &ops;
}

std::vector<std::string> model_folders() {
  const char *root = getenv("MM_GPU_MODELS");
  std::vector<std::string> names;
  if (!root) {
    printf("no packed checkpoints: $MM_GPU_MODELS is not set\n");
    return names;
  }
  for (const auto &e : std::filesystem::directory_iterator(root)) names.push_back(e.path().string());
  std::sort(names.begin(), names.end());
  return names;
}
