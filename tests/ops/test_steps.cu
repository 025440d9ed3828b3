/* How the backend opens and records steps: what it refuses by name before any step, recordings that fail, and how many there are. The
 * program is linked so that cudaGraphInstantiate and cudaMalloc come here first (Makefile). */
#include <string.h>

#include <algorithm>
#include <filesystem>

#include "runtime/cuda/core/launch.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/random_draw.h"
#include "tests/ops/gpu.h"

/* ---- graphs ---- */

static bool g_refuse;    /* graphs are refused */
static unsigned g_made;  /* graphs instantiated, */
static unsigned g_tried; /* and asked for */

extern "C" cudaError_t __real_cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags);
extern "C" cudaError_t __wrap_cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  g_tried++;
  if (g_refuse) return cudaErrorMemoryAllocation;
  g_made++;
  return __real_cudaGraphInstantiate(exec, graph, flags);
}

static uint64_t g_allocated; /* bytes asked for */

extern "C" cudaError_t __real_cudaMalloc(void **p, size_t bytes);
extern "C" cudaError_t __wrap_cudaMalloc(void **p, size_t bytes) {
  __atomic_add_fetch(&g_allocated, bytes, __ATOMIC_SEQ_CST);
  return __real_cudaMalloc(p, bytes);
}

static void must(bool ok, const mm_err &err) {
  if (ok) return;
  fprintf(stderr, "%s\n", err.text);
  exit(1);
}

/* An engine and where its sequences stand. */
struct stepper {
  mm_engine *engine;
  uint32_t vocab;
  std::vector<uint32_t> pos;
  bool few = false; /* every row draws from 20 ids, where they draw; else every other */

  stepper(const mm_shards *shards, uint32_t slots) : vocab(shards->pack.model.vocab), pos(slots, 0) {
    mm_err err = {};
    mm_engine_config c = {};
    c.ops = &mm_ops_cuda, c.limits = {slots, slots, 512}, c.options.threads = 1;
    must((engine = mm_engine_open(shards, &c, &err)) != nullptr, err);
    const int32_t id = 0; /* a step of padding waits for all weights; before they are there nothing is recorded */
    const mm_span padding = {-1, 0, 1, 0};
    mm_batch b = {};
    b.tokens = 1, b.id = &id, b.span_count = 1, b.span = &padding;
    must(mm_engine_step(engine, &b, nullptr, &err), err);
  }
  ~stepper() { mm_engine_close(engine); }

  /* One token for each of the first `rows` slots: its logits, or what was chosen. */
  bool step(uint32_t rows, bool draws, std::vector<float> *logits, std::vector<int32_t> *chosen) {
    std::vector<int32_t> id(rows);
    std::vector<mm_span> span(rows);
    std::vector<uint32_t> out(rows);
    std::vector<mm_sampling> sampling(rows);
    for (uint32_t i = 0; i < rows; i++) {
      id[i] = (int32_t)((i * 7919u + pos[i] * 104729u) % vocab), span[i] = {(int32_t)i, i, 1, pos[i]++}, out[i] = i;
      sampling[i] = {0.8, 0.95, few || i % 2 ? 20u : 0u, i};
    }
    const mm_batch b = {rows, id.data(), rows, span.data(), rows, out.data(), draws ? sampling.data() : nullptr};
    mm_err err = {};
    logits->resize((size_t)rows * vocab), chosen->resize(rows);
    const bool done = draws ? mm_engine_queue(engine, &b, &err) && mm_engine_collect(engine, chosen->data(), &err)
                            : mm_engine_step(engine, &b, logits->data(), &err);
    if (!done) printf("%s\n", err.text);
    return done;
  }
};

/* A step whose recording fails goes on without: no slot is lost, and every step's bits are those of an engine that records. */
static void check_refused_graphs(const mm_shards *shards, const std::string &name, bool draws) {
  stepper plain(shards, 8), refused(shards, 8);
  bool same = true, done = true;
  unsigned tried = 0;
  for (uint32_t i = 0; i < 12; i++) {
    const uint32_t rows = i < 6 ? 5 : 1;
    std::vector<float> want, got;
    std::vector<int32_t> chosen[2];
    done &= plain.step(rows, draws, &want, &chosen[0]);
    g_refuse = true;
    const unsigned before = g_tried;
    done &= refused.step(rows, draws, &got, &chosen[1]);
    g_refuse = false, tried += g_tried - before;
    same &= draws ? chosen[0] == chosen[1] : memcmp(want.data(), got.data(), want.size() * sizeof want[0]) == 0;
    if (!done) break;
  }
  const std::string what = name + (draws ? ": draws" : ": logits") + " where graphs are refused";
  report_true(what + ": every step is done", done);
  report_true(what + " = where they are not, bit for bit", same && tried == 1);
}

/* Choices of queued steps stay theirs, whatever plain steps come before they are collected. */
static void check_outstanding(const mm_shards *shards, const std::string &name) {
  const uint32_t vocab = shards->pack.model.vocab;
  std::vector<int32_t> got[2];
  for (int between = 0; between < 2; between++) {
    stepper s(shards, 4);
    std::vector<float> logits(vocab);
    uint32_t other = 0;
    mm_err err = {};
    for (uint32_t i = 0; i < 12; i++) {
      const int32_t id = i == 0 ? 5 : MM_ID_SAMPLED;
      const uint32_t out = 0;
      const mm_span span = {0, 0, 1, i};
      const mm_sampling sampling = {1.5, 1, 0, 3};
      const mm_batch b = {1, &id, 1, &span, 1, &out, &sampling};
      if (i >= 3) { /* three stay outstanding */
        got[between].push_back(-2);
        must(mm_engine_collect(s.engine, &got[between].back(), &err), err);
      }
      for (uint32_t n = 0; between && n < 1 + i % 5; n++) {
        const int32_t plain = 7;
        const mm_span at = {3, 0, 1, other++};
        const mm_batch p = {1, &plain, 1, &at, 1, &out, nullptr};
        must(mm_engine_step(s.engine, &p, logits.data(), &err), err);
      }
      must(mm_engine_queue(s.engine, &b, &err), err);
    }
    for (int i = 0; i < 3; i++) {
      got[between].push_back(-2);
      must(mm_engine_collect(s.engine, &got[between].back(), &err), err);
    }
  }
  report_true(name + ": choices of queued steps with plain steps between = without", got[0] == got[1]);
}

/* Steps of every number of rows, three times each: as many graphs as there are sizes that steps are padded to, no more. */
static void check_graph_count(const mm_shards *shards, const std::string &name) {
  constexpr uint32_t kMost = 300, kSizes = 13;
  stepper s(shards, kMost);
  const unsigned before = g_made;
  bool done = true;
  std::vector<float> logits;
  std::vector<int32_t> chosen;
  for (uint32_t rows = 1; rows <= kMost && done; rows += rows < 250 ? 7 : 1) {
    for (int i = 0; i < 3 && done; i++) done = s.step(rows, false, &logits, &chosen);
  }
  report_true(
      name + ": steps of 1 to 300 rows recorded as " + std::to_string(g_made - before) + " graphs, at most " + std::to_string(kSizes),
      done && g_made - before <= kSizes && g_made > before);
}

/* Sizes that were warmed are recorded before their first step, and not again. */
static void check_warm(const mm_shards *shards, const std::string &name) {
  stepper s(shards, 16);
  const uint32_t rows[] = {1, 4, 16};
  mm_err err = {};
  const unsigned before = g_made;
  must(mm_engine_warm(s.engine, rows, 3, &err), err);
  const unsigned warmed = g_made - before; /* three sizes, four endings */
  bool done = true;
  std::vector<float> logits;
  std::vector<int32_t> chosen;
  for (uint32_t n : rows) {
    for (int i = 0; i < 4 && done; i++) s.few = i == 3, done = s.step(n, i > 0, &logits, &chosen);
  }
  report_true(name + ": warmed as " + std::to_string(warmed) + " graphs, " + std::to_string(g_made - before - warmed) + " after",
              done && warmed == 12 && g_made - before == 12);
}

/* ---- refusals ---- */

/* A model as the kernels take it, but for what `spoil` does; refused before weights are looked at, by a line that says `word`. */
static void check_refused(const char *word, const std::function<void(mm_model *, mm_backend_config *)> &spoil) {
  mm_model m = {};
  m.hidden = 512, m.heads = 8, m.kv_heads = 2, m.head_dim = 64, m.rotary_dim = 32, m.experts = 8, m.top_k = 2, m.vocab = 1000;
  mm_rank_weights w = {};
  w.tp = 1;
  mm_backend_config c = {};
  c.model = &m, c.weights = &w, c.limits = {16, 4, 64};
  spoil(&m, &c);
  mm_err err = {};
  mm_backend *b = mm_ops_cuda.open(&c, &err);
  report_true("refused at open: " + std::string(err.text), !b && err.status == MM_UNSUPPORTED && strstr(err.text, word));
  mm_ops_cuda.close(b);
}

static void check_refusals() {
  check_refused("hidden 7168", [](mm_model *m, auto *) { m->hidden = 7168; });
  check_refused("hidden 516", [](mm_model *m, auto *) { m->hidden = 516; });
  check_refused("heads x head_dim 32768", [](mm_model *m, auto *) { m->heads = 512, m->kv_heads = 64; });
  check_refused("heads per kv head 9", [](mm_model *m, auto *) { m->heads = 18; });
  check_refused("experts 257", [](mm_model *m, auto *) { m->experts = 257; });
  check_refused("top_k 17", [](mm_model *m, auto *) { m->experts = 32, m->top_k = 17; });
  check_refused("head_dim 96", [](mm_model *m, auto *) { m->head_dim = 96; });
  check_refused("rotary_dim 128", [](mm_model *m, auto *) { m->rotary_dim = 128; });
  check_refused("rotary_dim 24", [](mm_model *m, auto *) { m->rotary_dim = 24; });
  check_refused("vocab 16777217", [](mm_model *m, auto *) { m->vocab = MM_DRAW_IDS + 1; });
  check_refused("tokens of a step 70000", [](mm_model *, auto *c) { c->limits.max_tokens = 70000; });
}

/* Launches that are judged: what this device takes passes and nothing is done; what it lacks is named. */
static void check_judged() {
  const mm_cu_heads h = {48, 8, 128, 64};
  buffer<__nv_bfloat16> o(256);
  const auto run = [&](uint32_t rows) {
    mm_cu_forget_lack();
    mm_cu_dry_run = true;
    const cudaError_t e = mm_cu_gqa_decode(h, {nullptr, nullptr}, {}, {nullptr, nullptr, nullptr, nullptr, 1e-6f, rows},
                                           {nullptr, o.p, nullptr, rows, rows}, 0);
    mm_cu_dry_run = false;
    return e;
  };
  bool ok = run(1) == cudaSuccess && run(300) == cudaSuccess && !*mm_cu_lack();
  ok &= run(70000) == cudaErrorInvalidConfiguration && strstr(mm_cu_lack(), "70000");
  const auto left = o.get();
  for (auto v : left) ok &= std::isnan(to_float(v)); /* poison */
  report_true("a launch is judged, and not done", ok);
}

/* The kernels of sm_90a are chosen where they were built and can run, and nowhere else. A device that no code is for runs PTX of an older
 * one, if there is some, and the words for it say so. */
static void check_built() {
  static const char *const kNames[] = {"none", "plain", "plain, with products of codes", "plain, with dependent launch", "sm_90a"};
  const int archs[] = {__CUDA_ARCH_LIST__};
  int device = 0, major = 0, minor = 0;
  CUDA_OK(cudaGetDevice(&device));
  CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  bool fits = false, newer = false, dependent = false, codes = false;
  for (int a : archs) {
    const bool same = a / 100 == major && a / 10 % 10 <= minor;
    fits |= same, newer |= a / 100 == major && a >= 900, dependent |= a >= 900 && a / 100 < major;
    codes |= a >= 890 && a < 900;
  }
  const mm_cu_built built = mm_cu_built_here();
  char what[200], code[100];
  mm_cu_say_code(code, sizeof code);
  const bool ok = fits                     ? built != MM_CU_BUILT_NONE && newer == (built >= MM_CU_BUILT_DEPENDENT)
                  : strstr(code, "PTX of") ? built == (dependent ? MM_CU_BUILT_DEPENDENT
                                                       : codes   ? MM_CU_BUILT_CODES
                                                                 : MM_CU_BUILT_PLAIN)
                                           : built == MM_CU_BUILT_NONE;
  snprintf(what, sizeof what, "device sm_%d%d: code %s: %s", major, minor, kNames[built], code);
  report_true(what, ok && (built != MM_CU_BUILT_HOPPER || major == 9) && hopper() == (built == MM_CU_BUILT_HOPPER));
}

/* Device memory that an engine of 64 slots of 196,608 positions takes. */
static uint64_t open_bytes(const mm_shards *shards, uint32_t pages) {
  mm_err err = {};
  mm_engine_config c = {};
  c.ops = &mm_ops_cuda, c.limits = {64, 64, 196608, pages}, c.options.threads = 1;
  const uint64_t before = g_allocated;
  mm_engine *e = mm_engine_open(shards, &c, &err);
  must(e != nullptr, err);
  mm_engine_close(e);
  return g_allocated - before;
}

/* Long slots cost the pages that there are, and their table: not their positions. */
static void check_page_memory(const mm_shards *shards, const std::string &name) {
  const mm_model *m = &shards->pack.model;
  const uint32_t few = 64, many = 64 * 64;
  const uint64_t layers = (uint64_t)std::count(m->attn, m->attn + m->layers, MM_ATTN_FULL);
  const double page = 2.0 * 2 * MM_PAGE * m->kv_heads * m->head_dim * (double)layers;
  const double little = (double)open_bytes(shards, few), much = (double)open_bytes(shards, many), pages = (many - few) * page;
  const double whole = 64.0 * 196608 / MM_PAGE * page;
  printf("steps %s: 64 slots of 196,608 positions: %.0f MB with %u pages, %.0f with %u; their pages alone %.0f, of all positions %.0f\n",
         name.c_str(), little * 1e-6, few, much * 1e-6, many, many * page * 1e-6, whole * 1e-6);
  report_true("steps " + name + ": more pages take their own bytes", much - little == pages);
  report_true("steps " + name + ": 64 slots of 196,608 positions in 192 MB beside their pages", much <= many * page + 192e6);
}

void test_steps() {
  check_built();
  check_judged();
  check_refusals();
  const char *root = getenv("MM_GPU_MODELS");
  if (!root) {
    printf("no packed checkpoints: $MM_GPU_MODELS is not set\n");
    return;
  }
  std::vector<std::string> names;
  for (const auto &e : std::filesystem::directory_iterator(root)) names.push_back(e.path().filename().string());
  std::sort(names.begin(), names.end());
  for (size_t i = 0; i < names.size(); i += std::max<size_t>(1, names.size() - 1)) { /* the first and the last */
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, (std::string(root) + "/" + names[i]).c_str(), &err), err);
    check_refused_graphs(&shards, names[i], false);
    check_refused_graphs(&shards, names[i], true);
    check_outstanding(&shards, names[i]);
    check_graph_count(&shards, names[i]);
    check_warm(&shards, names[i]);
    shards.pack.model.max_positions = 196608; /* nothing that is made ready depends on it */
    check_page_memory(&shards, names[i]);
    mm_shards_close(&shards);
  }
}
