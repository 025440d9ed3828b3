/* Memory of weights on the device, the order of 4-bit codes there (weight.cuh), random weights, and copies to the host. load.cu copies the
 * weights of files: codes in their stored size, rows padded to 16 bytes, nibbles reordered; scales on their own grid, as f32 unless they
 * are one byte for 16 or 32 columns. */
#include "runtime/cuda/core/upload.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>

#include "runtime/cuda/core/launch.h"
#include "runtime/cuda/core/weight.cuh"

namespace {

/* Nibbles of each word to pair order (weight.cuh); int4 codes become value + 8 by `flip`. */
__global__ void reorder_nibbles(uint32_t *words, size_t n, bool e2m1, uint32_t flip) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    const uint32_t w = words[i] ^ flip;
    uint32_t out = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int pair = k / 2, half = k % 2 * 16, magnitude[4] = {9, 1, 12, 4}, sign[4] = {15, 7, 8, 0};
      const uint32_t code = w >> (4 * k) & 15;
      out |= e2m1 ? ((code & 7) << magnitude[pair] | code >> 3 << sign[pair]) << half : code << (4 * pair + half);
    }
    words[i] = out;
  }
}

/* ---- random weights ---- */

/* [lead, n, k] places that numbers are made for, each the first of `cell` rows and columns, or of the whole extent (0), and where those lie
 * in the uncut weight: places of the same stored cell there get the same number. */
struct random_grid {
  mm_random random;
  uint32_t n, k, first_k;
  mm_cell cell, stored;
};

__device__ uint32_t random_bits(const random_grid &g, size_t i) {
  const size_t each = (size_t)g.n * g.k;
  const uint32_t row = mm_random_row(&g.random, (uint32_t)(i / g.k % g.n) * g.cell.n);
  const uint32_t column = g.first_k + (uint32_t)(i % g.k) * g.cell.k;
  return mm_random_bits(g.random.seed, g.random.first + (uint32_t)(i / each), g.stored.n ? row / g.stored.n : 0,
                        g.stored.k ? column / g.stored.k : 0);
}

__device__ float row_factor(const random_grid &g, size_t i) {
  if (g.random.skew == 0 && g.random.gain == 0) return 1;
  const uint32_t matrix = g.random.first + (uint32_t)(i / ((size_t)g.n * g.k)), row = (uint32_t)(i / g.k % g.n) * g.cell.n;
  return mm_random_factor(&g.random, g.random.seed, matrix, mm_random_row(&g.random, row));
}

__global__ void random_floats(float *p, size_t n, float low, float high, const __grid_constant__ random_grid g) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
    p[i] = row_factor(g, i) * (low + (high - low) * mm_random_share(random_bits(g, i)));
}

/* Words of random codes of 4, 8 or 16 bits (bf16 of magnitude below `most`); zero from word `end` of a row of g.k words on. */
__global__ void random_codes(uint32_t *p, size_t words, uint32_t bits, bool int4, float most, uint32_t end,
                             const __grid_constant__ random_grid g) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x) {
    const uint32_t v = random_bits(g, i);
    if (i % g.k >= end) {
      p[i] = int4 ? 0x88888888u : 0;
    } else if (bits == 16) {
      const float unit = most * row_factor(g, i) * 0x1p-15f;
      const bf162 pair = __floats2bfloat162_rn(unit * (float)(short)v, unit * (float)(short)(v >> 16));
      p[i] = *reinterpret_cast<const uint32_t *>(&pair);
    } else {
      p[i] = bits == 8 ? mm_random_bytes(v) : int4 ? mm_random_int4(v) : v;
    }
  }
}

constexpr int kRandomE4m3Scale = 120; /* E4M3 of 2^8. The kernels scale by 2^-8 (weight.cuh, MM_CU_NV): a loaded weight has 2^8 in its
                                         global factor, a random one here */

/* The generator for a weight (or none) and a filled range. plane: 0 codes, 1 scales, 2 global scales, each a stream of its own. Without a
 * seed the numbers differ each time. */
random_grid grid_of(const mm_packed *w, uint32_t plane, uint32_t n, uint32_t k, mm_cell cell, mm_cell stored, uint32_t first_k) {
  static std::atomic<uint32_t> others;
  random_grid g = {w ? w->random : mm_random{}, n, k, first_k, cell, stored};
  g.random.seed = g.random.seed ? mm_random_seed(g.random.seed, plane) : mm_random_seed(++others, 3);
  return g;
}

bool fill_floats(float *p, size_t n, float low, float high, const random_grid &g, mm_err *err) {
  random_floats<<<1024, 256>>>(p, n, low, high, g);
  return mm_cu_check(cudaGetLastError(), "random_floats", err);
}

uint32_t columns_of(const mm_packed *w) { return w->whole_k ? w->whole_k : w->k; }

/* Under which uniformly random codes have variance 1/k, within a few per cent. */
float random_scale(const mm_packed *w) { return mm_random_scale(w->scheme->code, columns_of(w)); }

bool fill_scales(const mm_packed *w, const mm_cu_weight *d, float *to, mm_err *err) {
  const float scale = random_scale(w);
  const random_grid g = grid_of(w, 1, d->scale_rows, d->scale_pitch, w->cell[1], w->scheme->plane[1].cell, w->first_k);
  return fill_floats(to, mm_cu_scales(d), 0.9f * scale, 1.1f * scale, g, err);
}

}  // namespace

bool mm_cu_random_bits(void *p, size_t bytes, mm_err *err) {
  const random_grid g = grid_of(nullptr, 0, 1, UINT32_MAX, {1, 1}, {1, 1}, 0);
  random_codes<<<1024, 256>>>(static_cast<uint32_t *>(p), bytes / 4, 4, false, 0, UINT32_MAX, g);
  return mm_cu_check(cudaGetLastError(), "random_codes", err);
}

mm_cu_memory::~mm_cu_memory() {
  for (void *p : block) cudaFree(p);
  if (borrowed) cudaIpcCloseMemHandle(borrowed);
  if (connection >= 0) close(connection);
}

void *mm_cu_memory::borrow(const char *socket, mm_held *held, mm_err *err) {
  cudaIpcMemHandle_t handle;
  static_assert(sizeof handle == MM_HOLD_HANDLE, "a holder's word for device memory");
  if (!mm_hold_find(socket, held, &connection, err)) return nullptr;
  memcpy(&handle, held->handle, sizeof handle);
  const cudaError_t e = cudaIpcOpenMemHandle(&borrowed, handle, cudaIpcMemLazyEnablePeerAccess);
  if (!mm_cu_check(e, "cudaIpcOpenMemHandle", err)) borrowed = nullptr;
  return borrowed;
}

void *mm_cu_memory::reserve(uint64_t size, mm_err *err) {
  void *p = nullptr;
  if (!mm_cu_malloc(&p, size + 256, what, err)) return nullptr;
  block.push_back(p), bytes.push_back(size);
  return p;
}

void *mm_cu_memory::alloc(uint64_t size, mm_err *err) {
  void *p = reserve(size, err);
  if (!p) return nullptr;
  /* cudaMemset is asynchronous: without the wait its zeros could overwrite what the first step writes. */
  const bool zero =
      mm_cu_check(cudaMemset(p, 0, size + 256), "cudaMemset", err) && mm_cu_check(cudaStreamSynchronize(0), "cudaMemset", err);
  return zero ? p : nullptr;
}

bool mm_cu_malloc(void **p, uint64_t bytes, const char *what, mm_err *err) {
  const cudaError_t e = cudaMalloc(p, bytes);
  if (e == cudaSuccess) return true;
  *p = nullptr;
  size_t free = 0, total = 0;
  if (e != cudaErrorMemoryAllocation || cudaMemGetInfo(&free, &total) != cudaSuccess) return mm_cu_check(e, "cudaMalloc", err);
  cudaGetLastError(); /* reported here, and not again by the next launch */
  return mm_fail(err, MM_LIMIT, "E_MEMORY", mm_at(NULL, NULL), "cudaMalloc of %llu bytes for %s: %s, found %llu bytes free of %llu",
                 (unsigned long long)bytes, what, cudaGetErrorString(e), (unsigned long long)free, (unsigned long long)total);
}

/* The limit of this process that may be why the driver cannot start, which it calls by other names: of memory, or of the system. */
static const char *limit_of(cudaError_t e, char text[MM_LIMITS_TEXT]) {
  struct rlimit files;
  const bool starts = e == cudaErrorOperatingSystem || e == cudaErrorInitializationError || e == cudaErrorNoDevice ||
                      e == cudaErrorDevicesUnavailable || e == cudaErrorUnknown;
  if (e == cudaErrorMemoryAllocation) return mm_limits_text(text, ENOMEM);
  return starts && getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < 256 ? mm_limits_text(text, EMFILE) : "";
}

bool mm_cu_check(cudaError_t e, const char *what, mm_err *err) {
  if (e == cudaSuccess) return true;
  cudaGetLastError(); /* reported here, and not again by the next launch */
  const bool memory = e == cudaErrorMemoryAllocation;
  int driver = 0; /* the runtime calls a driver that is absent "insufficient" */
  if (e == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
    return mm_fail(err, MM_IO, "E_CUDA", mm_at(NULL, NULL), "found no NVIDIA driver on this machine; --device cpu needs none");
  char text[MM_LIMITS_TEXT], visible[MM_VARIABLE_TEXT];
  const bool hidden = e == cudaErrorNoDevice || e == cudaErrorInvalidDevice;
  return mm_fail(err, memory ? MM_LIMIT : MM_IO, memory ? "E_MEMORY" : "E_CUDA", mm_at(NULL, NULL), "%s: %s%s%s", what,
                 cudaGetErrorString(e), limit_of(e, text), hidden ? mm_variable_text(visible, "CUDA_VISIBLE_DEVICES") : "");
}

cudaError_t mm_cu_reorder(uint8_t *codes, size_t words, const mm_packed *w, cudaStream_t s) {
  const uint32_t flip = w->scheme->code == MM_CODE_INT4 ? 0x88888888u : 0;
  reorder_nibbles<<<1024, 256, 0, s>>>(reinterpret_cast<uint32_t *>(codes), words, w->scheme->code == MM_CODE_E2M1, flip);
  return cudaGetLastError();
}

bool mm_cu_randomise(const mm_packed *w, const mm_cu_weight *d, const mm_cu_places &to, mm_err *err) {
  const uint32_t bits = mm_cu_bits(d->code);
  if (d->scale_kind == MM_CU_NV || d->scale_kind == MM_CU_MX) {
    const int byte = d->scale_kind == MM_CU_NV ? kRandomE4m3Scale : mm_random_exponent(random_scale(w));
    if (!mm_cu_check(cudaMemset(to.scale, byte, mm_cu_scales(d)), "cudaMemset", err)) return false;
  } else if (to.scale && !fill_scales(w, d, static_cast<float *>(to.scale), err)) {
    return false;
  }
  const float global = random_scale(w);
  if (to.global && !fill_floats(to.global, w->lead, global, global, grid_of(w, 2, 1, 1, {}, {}, 0), err)) return false;
  const uint32_t each = 32 / bits, words = (uint32_t)(d->pitch / 4);
  random_codes<<<1024, 256>>>(reinterpret_cast<uint32_t *>(to.data), (size_t)w->lead * w->n * words, bits, d->code == MM_CU_INT4,
                              sqrtf(3.0f / (float)columns_of(w)), w->k / each,
                              grid_of(w, 0, w->n, words, {1, 1}, {1, 1}, w->first_k / each));
  return mm_cu_check(cudaGetLastError(), "random_codes", err);
}

bool mm_cu_randomise_f32(const mm_packed *w, float *to, mm_err *err) {
  const size_t n = (size_t)w->lead * w->n * w->k;
  const float most = sqrtf(3.0f / (float)columns_of(w));
  const random_grid g = grid_of(w, 0, w->n, w->k, {1, 1}, {1, 1}, w->first_k);
  if (w->k == 1) return fill_floats(to, n, w->random.centre - 0.01f, w->random.centre + 0.01f, g, err);
  return fill_floats(to, n, -most, most, g, err);
}

bool mm_cu_unpack(const mm_packed *w, float *to, mm_err *err) {
  std::vector<float> v((size_t)w->lead * w->n * w->k);
  for (uint32_t i = 0; i < w->lead; i++) mm_unpack(w, i, 0, w->n, v.data() + (size_t)i * w->n * w->k);
  return mm_cu_check(cudaMemcpy(to, v.data(), v.size() * sizeof(float), cudaMemcpyHostToDevice), "copy weights", err);
}

bool mm_cu_download(void *out, const void *from, size_t bytes, cudaStream_t s, mm_err *err) {
  return mm_cu_check(cudaStreamSynchronize(s), "step", err) &&
         mm_cu_check(cudaMemcpy(out, from, bytes, cudaMemcpyDeviceToHost), "copy to host", err);
}

bool mm_cu_download_rows(float *out, const __nv_bfloat16 *from, size_t n, cudaStream_t s, mm_err *err) {
  std::vector<uint16_t> bits(n);
  if (!mm_cu_download(bits.data(), from, n * sizeof bits[0], s, err)) return false;
  for (size_t i = 0; i < n; i++) {
    const uint32_t wide = (uint32_t)bits[i] << 16;
    memcpy(&out[i], &wide, sizeof wide);
  }
  return true;
}
