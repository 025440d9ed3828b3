/* The harness's body, and main: `gpu [all|test|bench|profile|count|memory] [SUBJECT …]`, seeded by $MM_SEED. Exits 77 without a GPU. */
#include "tests/ops/gpu.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/cuda/core/upload.h"

rng g_rng;
int g_failures;

uint64_t rng::next() {
  uint64_t z = (s += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double rng::uniform() { return (double)(next() >> 11) * 0x1p-53; }
double rng::normal() { return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform()); }

std::vector<__nv_bfloat16> random_bf16(size_t n, double sigma) {
  std::vector<__nv_bfloat16> v(n);
  for (auto &x : v) x = __float2bfloat16((float)(g_rng.normal() * sigma));
  return v;
}
std::vector<float> random_float(size_t n, double mean, double sigma) {
  std::vector<float> v(n);
  for (auto &x : v) x = (float)(mean + g_rng.normal() * sigma);
  return v;
}

void parallel(uint32_t n, const std::function<void(uint32_t)> &f) {
  std::atomic<uint32_t> next(0);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); i++) {
    threads.emplace_back([&] {
      for (uint32_t j; (j = next++) < n;) f(j);
    });
  }
  for (auto &t : threads) t.join();
}

double relative_error(const std::vector<double> &want, const std::vector<double> &got, const std::vector<double> *size) {
  double d = 0, s = 0;
  for (size_t i = 0; i < want.size(); i++) {
    if (!std::isfinite(got[i])) return INFINITY;
    const double of = size ? (*size)[i] : want[i];
    d += (got[i] - want[i]) * (got[i] - want[i]), s += of * of;
  }
  return sqrt(d / s);
}

/* Seconds since the row before, where they are many: of ranks, one may have waited long for another. */
static std::string slow_row() {
  constexpr double kMany = 2;
  static auto before = std::chrono::steady_clock::now();
  const auto now = std::chrono::steady_clock::now();
  const double seconds = std::chrono::duration<double>(now - before).count();
  before = now;
  char text[32] = "";
  if (seconds > kMany) snprintf(text, sizeof text, " [%.1f s]", seconds);
  return text;
}
void report(const std::string &what, double error, double limit) {
  bool ok = error <= limit;
  if (!ok) g_failures++;
  printf("%-4s %-72s %.2e (limit %.0e)%s\n", ok ? "ok" : "FAIL", what.c_str(), error, limit, slow_row().c_str());
}
void report_true(const std::string &what, bool ok) {
  if (!ok) g_failures++;
  printf("%-4s %s%s\n", ok ? "ok" : "FAIL", what.c_str(), slow_row().c_str());
}

bool same_among_others(uint32_t least, uint32_t most, uint32_t width,
                       const std::function<std::vector<float>(const __nv_bfloat16 *x, uint32_t tokens)> &run) {
  const auto mine = random_bf16(width);
  std::vector<float> first;
  bool same = true;
  for (uint32_t i = 0; i < 12; i++) {
    const uint32_t tokens = i == 0 ? most : i == 1 ? least : least + g_rng.below(most - least + 1), at = g_rng.below(tokens);
    auto x = random_bf16((size_t)tokens * width, i % 2 == 0 ? 1 : 30);
    std::copy(mine.begin(), mine.end(), x.begin() + (size_t)at * width);
    buffer<__nv_bfloat16> dx;
    dx.put(x);
    const auto y = run(dx.p, tokens);
    const size_t n = y.size() / tokens;
    const std::vector<float> row(y.begin() + (ptrdiff_t)(at * n), y.begin() + (ptrdiff_t)((at + 1) * n));
    if (i == 0) first = row;
    same &= row == first;
  }
  return same;
}

decltype(&mm_cu_gemm) plain_linear(const mm_cu_weight &w, uint32_t tokens) {
  if (takes_here(MM_CU_ONE, w, tokens)) return mm_cu_one;
  if (tokens <= MM_CU_DECODE_ROWS) return mm_cu_decode_linear;
  return takes_here(MM_CU_GEMM, w, tokens) ? mm_cu_gemm : mm_cu_gemm_widened;
}

/* With the room for spans that a backend has. */
static cudaError_t decode_dense_in_spans(const mm_cu_weight &w, const mm_cu_linear &a, cudaStream_t s) {
  static buffer<float> sums((size_t)multiprocessors() * MM_CU_SPAN_SUMS);
  static buffer<uint32_t> counters((size_t)multiprocessors() * MM_CU_SPAN_TILES);
  static const cudaError_t zeroed = cudaMemset(counters.p, 0, counters.n * sizeof *counters.p);
  mm_cu_linear given = a;
  given.spans = {sums.p, counters.p};
  return zeroed != cudaSuccess ? zeroed : mm_cu_decode_dense(w, given, s);
}

decltype(&mm_cu_gemm) few_linear(const mm_cu_weight &w, uint32_t tokens) {
  if (takes_here(MM_CU_SMALL_BATCH_WIDENED, w, tokens)) return mm_cu_small_batch_widened;
  return takes_here(MM_CU_DECODE_DENSE, w, tokens) ? decode_dense_in_spans : NULL;
}

decltype(&mm_cu_experts_gemm) plain_experts(const mm_cu_weight &w13, const mm_cu_weight &w2, uint32_t tokens, uint32_t top_k) {
  mm_cu_device d;
  CUDA_OK(mm_cu_device_here(&d));
  const mm_cu_task one = {&w13, &w2, 1, top_k};
  if (tokens == 1 && mm_cu_dispatch_product(&d, &one).kernel == MM_CU_EXPERTS_ONE) return mm_cu_experts_one;
  if (tokens <= MM_CU_DECODE_ROWS) return mm_cu_experts_decode;
  return takes_here(MM_CU_EXPERTS_MANY, w13, w2, tokens) ? mm_cu_experts_many : mm_cu_experts_gemm;
}

bool left_out(double products) {
  const char *const small = getenv("MM_SMALL");
  return small && products > atof(small) * 1e6;
}

double e4m3(uint8_t c) {
  int e = c >> 3 & 15, m = c & 7;
  double v = e == 0 ? m * 0x1p-9 : ldexp(8 + m, e - 10);
  return c & 0x80 ? -v : v;
}
uint8_t nearest_e4m3(float v) {
  uint8_t best = 0;
  for (uint8_t c = 1; c < 0x7f; c++) {
    const double now = fabs(e4m3(c) - fabs((double)v)), then = fabs(e4m3(best) - fabs((double)v));
    if (now < then || (now == then && c % 2 == 0)) best = c;
  }
  return (uint8_t)(best | (std::signbit(v) ? 0x80 : 0));
}
void round_row_to(const mm_cu_rounding &how, float *x, uint32_t k, std::vector<float> *scales) {
  const uint32_t group = how.kind == MM_ACT_FP8_GROUP ? 128 : k;
  for (uint32_t g = 0; g < k; g += group) {
    float *from = x + g, *to = x + std::min(k, g + group), amax = 1e-10f;
    for (float *p = from; p < to; p++) amax = std::max(amax, fabsf(*p));
    const float s = how.kind == MM_ACT_FP8_TENSOR && how.fixed > 0 ? how.fixed : amax / 448.0f;
    for (float *p = from; p < to; p++) *p = (float)e4m3(nearest_e4m3(*p / s)) * s;
    if (scales) scales->push_back(s);
  }
}
void round_row_as(const mm_cu_rounding &how, float *x, uint32_t k) {
  const mm_act_format *f = &mm_act_formats[how.kind];
  std::vector<float> amax(mm_act_amaxes(f, k));
  mm_act_amax(f, x, k, 0, amax.data());
  mm_act_round(f, x, k, 0, amax.data(), how.fixed);
  for (uint32_t j = 0; j < k; j++) x[j] = to_float(__float2bfloat16(x[j]));
}
code_buffers::code_buffers(uint32_t rows, uint32_t k) {
  d.rows = rows, d.pitch = (k + 127) / 128 * 128, d.scale_pitch = rows + 3;
  code.open((size_t)rows * d.pitch), scale.open((size_t)d.pitch / 128 * d.scale_pitch);
  d.code = code.p, d.scale = scale.p;
}

const double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

static uint32_t log2_cell(uint32_t cell) {
  if (cell == 0) return 31;
  uint32_t l = 0;
  while ((1u << l) < cell) l++;
  return l;
}

void put_nibble(uint8_t *row, uint32_t k, uint32_t v, bool e2m1) {
  static const uint8_t kInt4[4] = {0, 4, 8, 12}, kMagnitude[4] = {9, 1, 12, 4}, kSign[4] = {15, 7, 8, 0};
  const uint32_t pair = k % 8 / 2, half = k % 2 * 16;
  uint32_t word;
  memcpy(&word, row + k / 8 * 4, 4);
  if (e2m1) {
    word |= (v & 7) << (kMagnitude[pair] + half) | (v >> 3) << (kSign[pair] + half);
  } else {
    word |= v << (kInt4[pair] + half);
  }
  memcpy(row + k / 8 * 4, &word, 4);
}

void random_weight(test_weight *t, mm_cu_code code, mm_cu_scale kind, uint32_t lead, uint32_t n, uint32_t k, uint32_t cell_n,
                   uint32_t cell_k) {
  mm_cu_weight &d = t->d;
  d = {};
  d.code = code, d.scale_kind = kind, d.lead = lead, d.n = n, d.k = k;
  uint32_t bits = code == MM_CU_BF16 ? 16 : code == MM_CU_E4M3 ? 8 : 4;
  d.pitch = ((size_t)k * bits / 8 + 15) / 16 * 16;
  std::vector<uint8_t> codes((size_t)lead * n * d.pitch, 0), micro;
  std::vector<float> scale, global;
  t->w.assign((size_t)lead * n * k, 0);
  d.cell_n_log2 = 0;
  if (kind == MM_CU_COARSE || kind == MM_CU_FINE) {
    d.cell_n_log2 = log2_cell(cell_n), d.cell_k_log2 = log2_cell(cell_k);
    d.scale_rows = cell_n ? (n + cell_n - 1) / cell_n : 1, d.scale_pitch = cell_k ? (k + cell_k - 1) / cell_k : 1;
    scale.resize((size_t)lead * d.scale_rows * d.scale_pitch);
    for (auto &x : scale) x = (float)(0.01 + 0.02 * g_rng.uniform());
  } else if (kind == MM_CU_NV || kind == MM_CU_MX) {
    uint32_t group = kind == MM_CU_NV ? 16 : 32;
    d.scale_rows = n, d.scale_pitch = ((k + group - 1) / group + 15) / 16 * 16;
    micro.resize((size_t)lead * n * d.scale_pitch);
    const uint32_t least = code == MM_CU_E4M3 ? 117 : 120; /* of E4M3 every fourth exponent is of a wide range */
    const auto exponent = [&] { return code == MM_CU_E4M3 && g_rng.below(4) == 0 ? 92 + g_rng.below(31) : least + g_rng.below(6); };
    for (auto &x : micro) x = (uint8_t)(kind == MM_CU_NV ? g_rng.below(0x7f) : exponent());
  }
  if (kind == MM_CU_NV) {
    for (uint32_t e = 0; e < lead; e++) global.push_back((float)(0.001 + 0.001 * g_rng.uniform()));
  }
  for (uint32_t e = 0; e < lead; e++) {
    for (uint32_t r = 0; r < n; r++) {
      uint8_t *row = codes.data() + ((size_t)e * n + r) * d.pitch;
      for (uint32_t c = 0; c < k; c++) {
        double v = 0;
        if (code == MM_CU_BF16) {
          __nv_bfloat16 b = __float2bfloat16((float)(g_rng.normal() * 0.05));
          memcpy(row + 2 * c, &b, 2);
          v = to_float(b);
        } else if (code == MM_CU_E4M3) {
          do row[c] = (uint8_t)g_rng.next();
          while ((row[c] & 0x7f) == 0x7f);
          v = e4m3(row[c]);
        } else {
          uint32_t q = g_rng.below(16);
          put_nibble(row, c, code == MM_CU_INT4 ? q ^ 8 : q, code == MM_CU_E2M1);
          v = code == MM_CU_INT4 ? (double)((int)(q ^ 8) - 8) : q & 8 ? -kE2m1[q & 7] : kE2m1[q & 7];
        }
        if (kind == MM_CU_COARSE || kind == MM_CU_FINE)
          v *= scale[((size_t)e * d.scale_rows + (r >> d.cell_n_log2)) * d.scale_pitch + (c >> d.cell_k_log2)];
        if (kind == MM_CU_NV) v *= e4m3(micro[((size_t)e * n + r) * d.scale_pitch + c / 16]) * global[e];
        if (kind == MM_CU_MX) v *= ldexp(1, micro[((size_t)e * n + r) * d.scale_pitch + c / 32] - 127);
        t->w[((size_t)e * n + r) * k + c] = (float)v;
      }
    }
  }
  t->codes.put(codes), d.data = t->codes.p;
  if (!scale.empty()) t->scale.put(scale), d.scale = t->scale.p;
  if (!micro.empty()) t->micro.put(micro), d.scale = t->micro.p;
  if (!global.empty()) {
    for (auto &x : global) x *= 256; /* NV: the kernel's share of the block scale's exponent */
    t->global.put(global), d.global = t->global.p;
  }
}

double time_graph(int count, const std::function<void(cudaStream_t, int)> &launch, int replays) {
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t from, to;
  CUDA_OK(cudaStreamCreate(&s));
  CUDA_OK(cudaEventCreate(&from));
  CUDA_OK(cudaEventCreate(&to));
  launch(s, 0); /* attributes are set and modules loaded outside the capture */
  CUDA_OK(cudaStreamSynchronize(s));
  CUDA_OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; i++) launch(s, i);
  CUDA_OK(cudaStreamEndCapture(s, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<float> ms;
  for (int i = 0; i < replays + 3; i++) {
    CUDA_OK(cudaEventRecord(from, s));
    CUDA_OK(cudaGraphLaunch(exec, s));
    CUDA_OK(cudaEventRecord(to, s));
    CUDA_OK(cudaEventSynchronize(to));
    float t;
    CUDA_OK(cudaEventElapsedTime(&t, from, to));
    if (i >= 3) ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaEventDestroy(from));
  CUDA_OK(cudaEventDestroy(to));
  CUDA_OK(cudaStreamDestroy(s));
  return ms[ms.size() / 2] * 1e3 / count;
}

double copy_rate() {
  double rate = 0;
  mm_err err = {};
  if (!mm_cu_copy_rate(&rate, &err)) {
    fprintf(stderr, "%s\n", err.text);
    exit(1);
  }
  printf("device copy, read + write: %.0f GB/s\n", rate * 1e-9);
  return rate;
}

__device__ static uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x;
}
__global__ static void fill_words(uint32_t *p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t v = mix((uint32_t)i * 2654435761u + seed);
    /* no byte may be 0x7f or 0xff: clear the lowest bit of every byte whose low seven are set */
    uint32_t all = v & 0x7f7f7f7fu, bad = ((all + 0x01010101u) & 0x80808080u) >> 7;
    p[i] = v & ~bad;
  }
}
__global__ static void fill_bf16(__nv_bfloat16 *p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t v = mix((uint32_t)i * 2654435761u + seed);
    p[i] = __float2bfloat16(((float)(v & 0xffff) + (float)(v >> 16)) / 32768.0f - 2.0f);
  }
}
__global__ static void fill_float(float *p, size_t n, float low, float high, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = low + (high - low) * (float)mix((uint32_t)i * 2654435761u + seed) * 0x1p-32f;
}
void fill_random(void *p, size_t bytes, uint32_t seed) {
  fill_words<<<1024, 256>>>((uint32_t *)p, bytes / 4, seed);
  CUDA_OK(cudaGetLastError());
}
void fill_random_bf16(__nv_bfloat16 *p, size_t n, uint32_t seed) {
  fill_bf16<<<1024, 256>>>(p, n, seed);
  CUDA_OK(cudaGetLastError());
}
void fill_random_float(float *p, size_t n, float low, float high, uint32_t seed) {
  fill_float<<<1024, 256>>>(p, n, low, high, seed);
  CUDA_OK(cudaGetLastError());
}

/* "devices N", and what they are. */
static int count_devices(int devices) {
  printf("devices %d\n", devices);
  for (int i = 0; i < devices; i++) {
    cudaDeviceProp p = {};
    CUDA_OK(cudaGetDeviceProperties(&p, i));
    printf("device %d: %s, sm_%d%d, %.0f GB\n", i, p.name, p.major, p.minor, (double)p.totalGlobalMem * 1e-9);
  }
  return 0;
}

/* "memory DEVICE FREE TOTAL", in bytes, this process's context not among the free ones. */
static int print_memory(int devices) {
  for (int i = 0; i < devices; i++) {
    size_t free = 0, total = 0;
    CUDA_OK(cudaSetDevice(i));
    CUDA_OK(cudaMemGetInfo(&free, &total));
    printf("memory %d %zu %zu\n", i, free, total);
  }
  return 0;
}

struct subject {
  const char *name;
  void (*test)(), (*bench)();
};
static const subject kSubjects[] = {
    {"load", test_load, bench_load},
    {"pool", nullptr, bench_pool},
    {"peers", test_peers, bench_peers},
    {"across", test_across, bench_across},
    {"groups", test_groups, bench_groups},
    {"linear", test_linear, bench_linear},
    {"codes", test_codes, NULL},
    {"experts", test_experts, bench_experts},
    {"few", test_few_rows, NULL},
    {"shared", test_shared, NULL},
    {"widened", test_widened, bench_widened},
    {"mx", test_mx, bench_mx},
    {"products", NULL, bench_products},
    {"attention", test_attention, bench_attention},
    {"blocks", test_block_attention, NULL},
    {"scan", test_index_split, NULL},
    {"lightning", test_lightning, bench_lightning},
    {"rows", test_rows, bench_rows},
    {"choice", test_choice, bench_choice},
    {"edges", test_edges, NULL},
    {"steps", test_steps, NULL},
    {"forks", test_forks, NULL},
    {"invariant", test_invariant, NULL},
    {"verify", test_proposals, NULL},
    {"draft", test_draft, NULL},
    {"sequences", test_sequences, NULL},
    {"models", test_models, NULL},
    {"rounded", test_rounded, NULL},
    {"extended", test_extended, NULL},
    {"cut", test_cut_rows, NULL},
    {"ranks", test_ranks, NULL},
};

int main(int argc, char **argv) {
  int devices = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); /* ranks that share a device: mm_devices_read */
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);      /* ranks wait for each other: load_kernels_early of backend_open.cu */
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    fprintf(stderr, "gpu: no CUDA device\n");
    return 77;
  }
  const std::string what = argc > 1 ? argv[1] : "all";
  if (what == "count") return count_devices(devices);
  if (what == "memory") return print_memory(devices);
  const char *seed = getenv("MM_SEED");
  g_rng.s = seed ? strtoull(seed, NULL, 10)
                 : (uint64_t)std::chrono::system_clock::now().time_since_epoch().count() * 1000003u + (uint64_t)getpid();
  printf("seed %llu\n", (unsigned long long)g_rng.s);
  auto chosen = [&](const subject &s) { return argc < 3 || std::find(argv + 2, argv + argc, std::string(s.name)) != argv + argc; };
  for (int i = 2; i < argc; i++)
    if (std::none_of(std::begin(kSubjects), std::end(kSubjects), [&](const subject &x) { return !strcmp(x.name, argv[i]); })) {
      fprintf(stderr, "gpu: no subject %s\n", argv[i]);
      return 2;
    }
  if (what == "profile") {
    profile_kernels();
    return 0;
  }
  if (what != "bench") {
    for (const subject &s : kSubjects) {
      if (s.test && chosen(s)) s.test();
    }
    printf("%s: %d failure(s)\n", g_failures ? "FAILED" : "all passed", g_failures);
  }
  if (what != "test") {
    bench_copy();
    for (const subject &s : kSubjects) {
      if (s.bench && chosen(s) && (argc > 2 || s.bench != bench_load)) s.bench(); /* that one writes a large file: only by name */
    }
  }
  return g_failures ? 1 : 0;
}
