/* Random sequences of steps on one backend: decode steps, prefills and mixtures of 1 to 300 rows, contexts of 1 to 5,000 tokens, slots that
 * come and go, logits or draws, on layers of M2's and M1's real width in each class of schemes. Each step runs twice: with what the steps
 * before left in the work space, and with the work space as it is when the backend is opened. Logits, choices and lightning states must be
 * the same bits. Equal bits may be wrong alike: in some hundred steps a row and a head of attention or lightning, a row's routing and
 * all choices are compared with doubles (witness.h), and errors planted there must be found. $MM_STEPS: steps of each class (200). */
#include <string.h>

#include <algorithm>
#include <numeric>

#include "runtime/cuda/backend.h"
#include "tests/ops/gpu.h"
#include "tests/ops/witness.h"

namespace {

enum { SLOTS = 300, ROWS = 300, POSITIONS = 5120, LONGEST = 5000, VOCAB = 2048 };

struct sequence_case {
  const char *model, *dense, *experts;
  bool act_quant, kv_fp8;
  bool ends_lightning = false; /* the last layer is lightning, and the first full attention */
};
const sequence_case kCases[] = {
    {"m2", "block_fp8", "block_fp8", true, false}, {"m2", "block_fp8", "block_fp8", false, true},
    {"m2", "bf16", "w4a16", false, false},         {"m2", "nvfp4", "nvfp4", true, false},
    {"m2", "channel_fp8", "mxfp4", true, true},    {"m1", "block_fp8", "block_fp8", true, false},
    {"m1", "block_fp8", "w4a16", false, true},     {"m1", "mxfp8", "nvfp4", true, false, true},
    {"m1", "bf16", "mxfp4", false, false, true},
};

void must(bool ok, const mm_err &err) {
  if (ok) return;
  fprintf(stderr, "%s\n", err.text);
  exit(1);
}

/* ---- layers of real width ---- */

mm_packed weight(const char *scheme, uint32_t lead, uint32_t n, uint32_t k) {
  mm_packed w = {};
  w.scheme = mm_scheme_find(scheme), w.lead = lead, w.n = n, w.k = k;
  for (unsigned i = 0; i < w.scheme->plane_count; i++) w.cell[i] = w.scheme->plane[i].cell;
  return w;
}
mm_packed vector_of(uint32_t n) { return weight("bf16", 1, n, 1); }

/* Two layers: of M1 a lightning and a full one. */
struct wide_model {
  mm_model m = {};
  mm_rank_weights w = {};
  std::vector<mm_layer_weights> layer;

  explicit wide_model(const sequence_case &c) : layer(2) {
    const bool m1 = !strcmp(c.model, "m1");
    const double alpha = m1 ? 3.5565588200778455 : 1;
    m.family = m1 ? MM_FAMILY_M1 : MM_FAMILY_M2, m.router = m1 ? MM_ROUTER_SOFTMAX : MM_ROUTER_SIGMOID_BIAS;
    m.postnorm = m1, m.qk_norm = !m1;
    m.hidden = m1 ? 6144 : 3072, m.layers = 2, m.heads = m1 ? 64 : 48, m.kv_heads = 8, m.head_dim = 128, m.rotary_dim = 64;
    m.experts = m1 ? 32 : 256, m.top_k = m1 ? 2 : 8, m.intermediate = m1 ? 9216 : 1536, m.vocab = VOCAB, m.max_positions = 1 << 20;
    m.rope_theta = m1 ? 1e7 : 5e6, m.norm_eps = m1 ? 1e-5 : 1e-6, m.lightning_norm_eps = 1e-6;
    m.deepnorm_lightning = m.deepnorm_full = m.deepnorm_mlp = {alpha, 1};
    m.attn[0] = m.attn[1] = MM_ATTN_FULL;
    if (m1) m.attn[c.ends_lightning] = MM_ATTN_LIGHTNING;
    const uint32_t q = m.heads * m.head_dim, kv = m.kv_heads * m.head_dim;
    w.tp = 1, w.layer_end = m.layers, w.vocab_rows = VOCAB, w.layer = layer.data();
    w.embed = w.head = weight("bf16", 1, VOCAB, m.hidden), w.final_norm = vector_of(m.hidden);
    for (uint32_t l = 0; l < m.layers; l++) {
      mm_layer_weights *y = &layer[l];
      const bool lightning = m.attn[l] == MM_ATTN_LIGHTNING;
      y->input_norm = y->post_norm = vector_of(m.hidden);
      y->qkv = weight(c.dense, 1, lightning ? 3 * q : q + 2 * kv, m.hidden), y->out = weight(c.dense, 1, m.hidden, q);
      if (lightning) y->output_gate = weight(c.dense, 1, q, m.hidden), y->attn_norm = vector_of(q);
      if (m.qk_norm) y->q_norm = vector_of(q), y->k_norm = vector_of(kv);
      y->router = weight("bf16", 1, m.experts, m.hidden);
      if (m.router == MM_ROUTER_SIGMOID_BIAS) y->router_bias = vector_of(m.experts);
      y->w13 = weight(c.experts, m.experts, 2 * m.intermediate, m.hidden), y->w2 = weight(c.experts, m.experts, m.hidden, m.intermediate);
    }
  }
};

/* ---- what a backend keeps on purpose, and its work space ---- */

__global__ void count_different(const uint32_t *a, const uint32_t *b, size_t n, unsigned long long *count) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    if (a[i] != b[i]) atomicAdd(count, 1ull);
  }
}

struct area {
  void *p;
  size_t bytes;
};

struct work_space {
  std::vector<area> scratch, state;
  std::vector<void *> left, before, after; /* copies: scratch as steps left it; states before a step, and after its first run */
  size_t bytes = 0;
  buffer<unsigned long long> different;

  explicit work_space(mm_backend *b) : different(1) {
    std::vector<const void *> kept = {b->pages.device_table, b->pages.work.kv,        b->sampler.ids, b->attention.inv_freq,
                                      b->sampler.args.never, b->sampler.args.last_id, b->experts.load};
    for (const auto &w : b->weights.matrix) kept.insert(kept.end(), {w.second.data, w.second.scale, w.second.global});
    for (const auto &v : b->weights.values) kept.push_back(v.second);
    for (const auto &v : b->weights.router) kept.push_back(v.second);
    for (uint32_t l = 0; l < b->cache.size(); l++) {
      const layer_cache &c = b->cache[l];
      kept.insert(kept.end(), {c.slope, c.state, c.kv.k, c.kv.v, c.kv.k_scale, c.kv.v_scale});
    }
    if (b->states.data) state.push_back({b->states.data, SLOTS * b->states.per_slot * sizeof(float)});
    for (size_t i = 0; i < b->memory.block.size(); i++) {
      char *const p = static_cast<char *>(b->memory.block[i]), *const end = p + b->memory.bytes[i];
      const bool keep = std::any_of(kept.begin(), kept.end(), [&](const void *k) { return k && k >= p && k < end; });
      if (!keep && p != end) scratch.push_back({p, (size_t)b->memory.bytes[i]});
    }
    scratch.push_back({b->logits.own, b->logits.rows * VOCAB * sizeof(float)});
    for (const area &a : scratch) bytes += a.bytes, left.push_back(copy_of(a));
    for (const area &a : state) before.push_back(copy_of(a)), after.push_back(copy_of(a));
  }
  ~work_space() {
    for (auto *v : {&left, &before, &after}) {
      for (void *p : *v) cudaFree(p);
    }
  }
  static void *copy_of(const area &a) {
    void *p;
    CUDA_OK(cudaMalloc(&p, a.bytes));
    CUDA_OK(cudaMemcpy(p, a.p, a.bytes, cudaMemcpyDeviceToDevice));
    return p;
  }
  static void save(const std::vector<area> &from, const std::vector<void *> &to) {
    for (size_t i = 0; i < from.size(); i++) CUDA_OK(cudaMemcpyAsync(to[i], from[i].p, from[i].bytes, cudaMemcpyDeviceToDevice));
    CUDA_OK(cudaDeviceSynchronize());
  }
  static void restore(const std::vector<area> &to, const std::vector<void *> &from) {
    for (size_t i = 0; i < to.size(); i++) CUDA_OK(cudaMemcpyAsync(to[i].p, from[i], to[i].bytes, cudaMemcpyDeviceToDevice));
    CUDA_OK(cudaDeviceSynchronize());
  }
  void reopen() { /* the work space of a backend just opened */
    for (const area &a : scratch) CUDA_OK(cudaMemsetAsync(a.p, 0, a.bytes));
    CUDA_OK(cudaDeviceSynchronize());
  }
  bool same_states() {
    different.zero();
    for (size_t i = 0; i < state.size(); i++)
      count_different<<<1024, 256>>>(static_cast<uint32_t *>(state[i].p), static_cast<uint32_t *>(after[i]), state[i].bytes / 4,
                                     different.p);
    CUDA_OK(cudaGetLastError());
    return different.get()[0] == 0;
  }
};

/* Caches of sequences that are under way. */
void fill_caches(mm_backend *b) {
  const size_t cells = (size_t)SLOTS * b->pages.per_slot * b->heads.kv_heads * MM_CU_PAGE;
  if (b->states.data) fill_random_float(b->states.data, SLOTS * b->states.per_slot, -0.5f, 0.5f, g_rng.below(1u << 30));
  for (const layer_cache &c : b->cache) {
    for (void *p : {c.kv.k, c.kv.v}) {
      if (!p) continue;
      if (c.kv.k_scale) {
        fill_random(p, cells * b->heads.head_dim, g_rng.below(1u << 30));
      } else {
        fill_random_bf16(static_cast<__nv_bfloat16 *>(p), cells * b->heads.head_dim, g_rng.below(1u << 30));
      }
    }
    for (float *p : {c.kv.k_scale, c.kv.v_scale}) {
      if (p) fill_random_float(p, cells, 0.002f, 0.01f, g_rng.below(1u << 30));
    }
  }
  CUDA_OK(cudaDeviceSynchronize());
}

/* ---- steps ---- */

struct random_step {
  std::vector<int32_t> id;
  std::vector<mm_span> span;
  std::vector<uint32_t> out;
  std::vector<mm_sampling> sampling;
  mm_batch batch;

  random_step(std::vector<uint32_t> *pos) {
    std::vector<int32_t> slot(SLOTS);
    std::iota(slot.begin(), slot.end(), 0);
    for (uint32_t i = 0; i < SLOTS; i++) std::swap(slot[i], slot[i + g_rng.below(SLOTS - i)]);
    const uint32_t kind = g_rng.below(8), most[] = {1, 8, 24, 64, 300};
    const uint32_t singles = kind < 6 ? 1 + g_rng.below(most[g_rng.below(5)]) : 0;
    uint32_t used = 0;
    for (; used < singles && id.size() < ROWS; used++) add(slot[used], 1, pos, g_rng.below(10) == 0);
    const uint32_t chunks = kind < 4 ? 0 : 1 + g_rng.below(4);
    for (uint32_t i = 0; i < chunks && used < SLOTS && id.size() < ROWS; i++, used++)
      add(slot[used], 1 + g_rng.below((uint32_t)(ROWS - id.size())), pos, false);
    const bool all = g_rng.below(5) == 0;
    for (const mm_span &s : span) {
      for (uint32_t r = s.first; s.slot >= 0 && r < s.first + s.count; r++) {
        if (all || r + 1 == s.first + s.count) out.push_back(r);
      }
    }
    const bool draws = g_rng.below(3) == 0;
    for (size_t i = 0; draws && i < out.size(); i++)
      sampling.push_back({g_rng.below(4) ? 0.8 : 0, g_rng.below(2) ? 0.95 : 1, g_rng.below(2) ? 40u : 0u, g_rng.next()});
    batch = {(uint32_t)id.size(),
             id.data(),
             (uint32_t)span.size(),
             span.data(),
             (uint32_t)out.size(),
             out.data(),
             draws && !out.empty() ? sampling.data() : nullptr};
  }
  void add(int32_t slot, uint32_t count, std::vector<uint32_t> *pos, bool padding) {
    uint32_t &at = (*pos)[(size_t)slot];
    if (at + count > LONGEST || g_rng.below(20) == 0) at = 0;
    span.push_back({padding ? -1 : slot, (uint32_t)id.size(), count, padding ? 0 : at});
    for (uint32_t i = 0; i < count; i++) id.push_back((int32_t)g_rng.below(VOCAB));
    if (!padding) at += count;
  }
};

/* Output of a step: logits, or the sampled ids. */
std::vector<float> run(mm_forward *f, const random_step &s) {
  mm_err err = {};
  std::vector<float> out((size_t)s.batch.out_count * (s.batch.sampling ? 1 : VOCAB));
  must(mm_forward_step(f, &s.batch, s.batch.sampling ? nullptr : out.data(), &err), err);
  if (s.batch.sampling) {
    std::vector<int32_t> id(s.batch.out_count);
    must(f->ops->sampler.collect(f->backend, id.data(), &err), err);
    for (size_t i = 0; i < id.size(); i++) out[i] = (float)id[i];
  }
  return out;
}

const char *const kPlants[] = {"", "another row", "another expert", "another token"};

/* The last step again, as it is: each planted error is found. */
void check_planted(const std::string &name, witness *w, const random_step &s, const float *state, const std::vector<float> *id) {
  for (witness_plant p : {WITNESS_ROW, WITNESS_EXPERT, WITNESS_TOKEN}) {
    if (p == WITNESS_TOKEN && !id) continue;
    w->plant = p, w->wrong = 0;
    for (int i = 0; i < 8; i++) w->look(s.batch, state, id);
    report_true(name + ": " + kPlants[p] + " planted, found " + std::to_string(w->wrong) + " times", w->wrong > 0);
  }
  w->plant = WITNESS_NOTHING, w->wrong = 0;
}

void report_witness(const std::string &name, const witness &w) {
  char text[360];
  snprintf(text, sizeof text,
           "%s: beside doubles %u heads of attention (%u by less than 0.3), %u routings, %u choices: %u wrong%s; worst of what is allowed: "
           "attention %.2f, states %.2f",
           name.c_str(), w.rows, w.judged, w.routed, w.chosen, w.wrong, w.first.c_str(), w.worst_attention, w.worst_state);
  report_true(text, w.wrong == 0 && w.routed > 0 && 4 * w.judged >= w.rows);
}

void check_case(const sequence_case &c, uint32_t steps) {
  wide_model wide(c);
  mm_forward f = {};
  mm_err err = {};
  const std::vector<uint8_t> never(VOCAB);
  mm_backend_config config = {};
  config.model = &wide.m, config.weights = &wide.w, config.limits = {ROWS, SLOTS, POSITIONS}, config.options.threads = 1;
  config.options.act_quant = c.act_quant, config.options.kv_fp8 = c.kv_fp8, config.never = reinterpret_cast<const bool *>(never.data());
  must(mm_forward_open(&f, &mm_ops_cuda, &config, &err), err);
  fill_caches(f.backend);
  work_space space(f.backend);
  std::vector<uint32_t> pos(SLOTS);
  for (uint32_t &p : pos) p = g_rng.below(LONGEST);
  uint32_t wrong = 0, numbers = 0, rows = 0;
  std::string first;
  witness doubles(&f);
  const std::string name = std::string(c.model) + ' ' + c.dense + ", experts " + c.experts + (c.act_quant ? ", inputs rounded" : "") +
                           (c.kv_fp8 ? ", fp8 cache" : "");
  bool planted = false;
  for (uint32_t i = 0; i < steps; i++) {
    const random_step s(&pos);
    space.save(space.state, space.before);
    const std::vector<float> left = run(&f, s);
    space.save(space.scratch, space.left), space.save(space.state, space.after);
    space.restore(space.state, space.before), space.reopen();
    const std::vector<float> fresh = run(&f, s);
    const bool same = !memcmp(left.data(), fresh.data(), left.size() * sizeof left[0]) && space.same_states();
    const float *const state = c.ends_lightning ? static_cast<const float *>(space.before[0]) : nullptr;
    if (i % (1 + steps / 201) == 0) doubles.look(s.batch, state, s.batch.sampling ? &fresh : nullptr);
    if (!planted && i >= steps / 2 && doubles.wrong == 0 && !s.out.empty() && (s.batch.sampling || i + 1 == steps))
      planted = true, check_planted(name, &doubles, s, state, s.batch.sampling ? &fresh : nullptr);
    space.restore(space.scratch, space.left);
    if (!same && wrong++ == 0) first = ", first of " + std::to_string(s.batch.tokens) + " rows at step " + std::to_string(i);
    numbers += std::all_of(fresh.begin(), fresh.end(), [](float v) { return isfinite(v); }), rows += s.batch.tokens;
  }
  char text[300];
  snprintf(text, sizeof text, "%s: %u of %u steps of 1 to %d rows (%u in all) differ from a fresh backend's%s; work space %.0f MB",
           name.c_str(), wrong, steps, ROWS, rows, first.c_str(), (double)space.bytes / 1e6);
  report_true(text, wrong == 0 && numbers == steps);
  report_witness(name, doubles);
  mm_forward_close(&f);
}

}  // namespace

void test_sequences() {
  const char *wanted = getenv("MM_STEPS");
  const uint32_t steps = wanted ? (uint32_t)atoi(wanted) : 200;
  for (const sequence_case &c : kCases) check_case(c, steps);
}
