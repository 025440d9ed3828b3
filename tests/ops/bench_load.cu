/* How fast weights are loaded, from the page cache and from disk, against the pinned copies and the plain reads of the same run; and how
 * fast pinned memory is there. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "formats/system/pool.h"
#include "tests/ops/load_files.h"

using clock_type = std::chrono::steady_clock;
static double since(clock_type::time_point t) { return std::chrono::duration<double>(clock_type::now() - t).count(); }

/* Bytes a second of copies of 8 MiB from registered memory, best of five. */
static double pinned_rate() {
  constexpr size_t kChunk = (size_t)8 << 20, kRing = 16 * kChunk, kTimes = 512;
  void *host = mmap(nullptr, kRing, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(host, kRing, MADV_HUGEPAGE);
  memset(host, 1, kRing);
  char *to;
  cudaStream_t s;
  CUDA_OK(cudaHostRegister(host, kRing, cudaHostRegisterDefault));
  CUDA_OK(cudaMalloc(&to, kRing));
  CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  double best = 0;
  for (int i = 0; i < 5; i++) {
    const auto from = clock_type::now();
    for (size_t k = 0; k < kTimes; k++) {
      const size_t at = k % 16 * kChunk;
      CUDA_OK(cudaMemcpyAsync(to + at, static_cast<char *>(host) + at, kChunk, cudaMemcpyHostToDevice, s));
    }
    CUDA_OK(cudaStreamSynchronize(s));
    best = std::max(best, (double)(kTimes * kChunk) / since(from));
  }
  CUDA_OK(cudaStreamDestroy(s));
  CUDA_OK(cudaFree(to));
  CUDA_OK(cudaHostUnregister(host));
  munmap(host, kRing);
  return best;
}

/* Pinned copies while so many threads read the file from the page cache, as a load's do, into memory that no copy takes: what is left of
 * the link then. */
static void print_pinned_compared(const std::string &path, unsigned threads) {
  constexpr size_t kRead = (size_t)1 << 20;
  const int fd = open(path.c_str(), O_RDONLY);
  std::atomic<bool> stop(false);
  std::atomic<uint64_t> done(0);
  std::vector<std::thread> reading;
  const auto from = clock_type::now();
  for (unsigned i = 0; i < threads; i++)
    reading.emplace_back([&, i] {
      char *to = static_cast<char *>(aligned_alloc(4096, 4 * kRead));
      const uint64_t part = (uint64_t)lseek(fd, 0, SEEK_END) / threads / kRead * kRead;
      for (uint64_t at = 0; part && !stop; at = (at + kRead) % part) {
        const ssize_t got = pread(fd, to + at / kRead % 4 * kRead, kRead, (off_t)(i * part + at));
        if (got > 0) done += (uint64_t)got;
      }
      free(to);
    });
  const double rate = pinned_rate();
  stop = true;
  for (std::thread &t : reading) t.join();
  printf("pinned host to device beside %u threads that read %.1f GB/s of the page cache: %.1f GB/s\n", threads,
         (double)done / since(from) * 1e-9, rate * 1e-9);
  close(fd);
}

/* Bytes a second of so many threads that read the first `bytes` past the page cache, 4 MiB at a time; 0 where that cannot be. */
static double direct_rate(const std::string &path, uint64_t bytes, unsigned threads) {
  constexpr size_t kRead = (size_t)4 << 20;
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0) return 0;
  std::atomic<uint64_t> next(0), done(0);
  std::vector<std::thread> reading;
  const auto from = clock_type::now();
  for (unsigned i = 0; i < threads; i++)
    reading.emplace_back([&] {
      void *to = aligned_alloc(4096, kRead);
      for (uint64_t at; (at = next.fetch_add(kRead)) < bytes;) {
        const ssize_t got = pread(fd, to, kRead, (off_t)at);
        if (got <= 0) break;
        done += (uint64_t)got;
      }
      free(to);
    });
  for (std::thread &t : reading) t.join();
  const double s = since(from);
  close(fd);
  return (double)done / s;
}

/* Rates of one thread and of sixteen. */
static double best_direct(const std::string &path, uint64_t bytes) {
  const double one = direct_rate(path, bytes, 1), many = direct_rate(path, bytes, 16);
  printf("O_DIRECT: %.2f GB/s by one thread, %.2f by 16\n", one * 1e-9, many * 1e-9);
  return std::max(one, many);
}

static double peak_mib() {
  rusage u = {};
  getrusage(RUSAGE_SELF, &u);
  return (double)u.ru_maxrss / 1024;
}

/* Layers of M2's shapes, as many as a file of so many bytes holds. */
struct layers {
  std::vector<mm_packed> packed;
  std::vector<named> matrices, vectors;
  uint64_t bytes = 0;

  bool add(const uint8_t *base, uint64_t size, const char *scheme, uint32_t lead, uint32_t n, uint32_t k) {
    mm_packed w = {};
    w.scheme = mm_scheme_find(scheme), w.lead = lead, w.n = n, w.k = k;
    uint64_t at = bytes;
    for (unsigned p = 0; p < w.scheme->plane_count; p++) {
      w.cell[p] = w.scheme->plane[p].cell, w.plane[p] = base + at;
      at = mm_round_up(at + lead * mm_plane_elements(n, k, w.cell[p]) * mm_dtype_size(w.scheme->plane[p].dtype), 4);
    }
    if (at > size) return false;
    bytes = at, packed.push_back(w);
    return true;
  }
  void make(const uint8_t *base, uint64_t size, const char *scheme) {
    while (add(base, size, scheme, 256, 3072, 3072) && add(base, size, scheme, 256, 3072, 1536) &&
           add(base, size, "block_fp8", 1, 8192, 3072) && add(base, size, "block_fp8", 1, 3072, 6144) &&
           add(base, size, "bf16", 1, 3072, 1) && add(base, size, "bf16", 1, 256, 3072))
      continue;
    for (const mm_packed &w : packed) (w.k == 1 ? vectors : matrices).push_back({&w, "layer"});
  }
};

struct timed {
  double seconds = 0;
  mm_read_stats stats = {};
  uint64_t bytes = 0;
  char times[300] = ""; /* what was done when */
};

static timed time_load(const std::vector<named> &matrices, const std::vector<named> &vectors, const mm_cu_load_config &config) {
  mm_err err = {};
  std::unique_ptr<mm_read_log, void (*)(mm_read_log *)> log(mm_read_log_open(&err), mm_read_log_close);
  mm_cu_load_config c = config;
  c.log = log.get();
  mm_cu_load load;
  mm_cu_memory arena;
  std::vector<mm_cu_weight> weight(matrices.size());
  std::vector<const float *> value(vectors.size());
  const auto from = clock_type::now();
  for (size_t i = 0; i < matrices.size(); i++) must(load.matrix(matrices[i].w, "w", {}, &weight[i], &err), err);
  for (size_t i = 0; i < vectors.size(); i++) must(load.values(vectors[i].w, "v", 0, &value[i], &err), err);
  must(load.start(c, &err) && load.open(&arena, &err) && load.finish(&err), err);
  timed t = {since(from), load.stats, load.plan.file_bytes};
  mm_read_log_times(log.get(), t.times, sizeof t.times);
  return t;
}

static void print_load(const char *what, const timed &t, const mm_cu_load_config &c, double ceiling, const char *of) {
  char text[200];
  printf("load %s, ring %u x %zu MiB, %u in flight, %u threads, reads of %zu KiB: %.3f s, %.1f GB/s, %.2f of %s (%s), %.4f of the bytes\n",
         what, c.buffers, c.chunk >> 20, c.in_flight, c.threads, c.piece >> 10, t.seconds, (double)t.bytes / t.seconds * 1e-9,
         (double)t.bytes / t.seconds / ceiling, of, mm_read_text(text, sizeof text, &t.stats),
         (double)mm_read_bytes(&t.stats) / (double)t.bytes);
  printf("  seconds: %s\n", t.times);
}

/* Only read into the ring, nothing copied. */
static void print_reader_alone(const mapped_file &f, uint64_t bytes, const mm_cu_load_config &c, unsigned threads) {
  mm_err err = {};
  const mm_read_file file = {f.path.c_str(), nullptr, 0, nullptr, nullptr};
  mm_read_want want = {0, 0, bytes, 0, 0};
  void *ring = mmap(nullptr, c.buffers * c.chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(ring, c.buffers * c.chunk, MADV_HUGEPAGE);
  memset(ring, 1, c.buffers * c.chunk);
  const mm_reader_config config = {&file,   1,       &want,         1,      static_cast<uint8_t *>(ring), c.buffers, c.chunk,
                                   c.piece, threads, MM_READ_PROBE, nullptr};
  mm_reader *r = mm_reader_open(&config, &err);
  must(r != nullptr, err);
  mm_chunk chunk;
  for (;;) {
    must(mm_reader_next(r, &chunk, &err), err);
    if (!chunk.data) break;
    mm_reader_release(r);
  }
  const mm_read_stats s = mm_reader_stats(r);
  char text[200];
  printf("reading alone, %u threads: %s\n", threads, mm_read_text(text, sizeof text, &s));
  mm_reader_close(r);
  munmap(ring, c.buffers * c.chunk);
}

/* $MM_LOAD_GB (4: a layer) in a file below $MM_LOAD_DIR, $TMPDIR or /tmp. */
void bench_load() {
  const char *gb = getenv("MM_LOAD_GB");
  const uint64_t size = (gb ? strtoull(gb, nullptr, 10) : 4) * 1000000000 / 4096 * 4096, block = (uint64_t)64 << 20;
  const double pinned = pinned_rate();
  printf("pinned host to device: %.1f GB/s\n", pinned * 1e-9);
  mapped_file f(scratch_file("mm-load-bench"));
  std::vector<uint8_t> random(block);
  for (size_t i = 0; i < block; i += 8) {
    const uint64_t v = g_rng.next();
    memcpy(&random[i], &v, 8);
  }
  write_all(f.path, random, size / block);
  f.open();
  const mm_cu_load_config rings[] = {{8, 8u << 20, 1u << 20, 12, 3},  {24, 8u << 20, 1u << 20, 16, 6}, {24, 8u << 20, 1u << 20, 8, 6},
                                     {8, 8u << 20, 1u << 18, 14, 3},  {16, 4u << 20, 1u << 18, 12, 6}, {12, 8u << 20, 1u << 18, 12, 4},
                                     {16, 16u << 20, 1u << 20, 16, 4}};
  const mm_cu_load_config usual = rings[0];
  layers m2, int4, nvfp4;
  m2.make(f.map.data, f.map.size, "block_fp8"), int4.make(f.map.data, f.map.size, "w4a16"), nvfp4.make(f.map.data, f.map.size, "nvfp4");
  const double before_load = peak_mib();
  time_load(m2.matrices, m2.vectors, usual); /* kernels are loaded, clocks are up */
  printf("host memory of a load: %.0f MiB, of which the ring %zu\n", peak_mib() - before_load, usual.buffers * usual.chunk >> 20);
  for (int i = 0; i < 2; i++)
    for (const mm_cu_load_config &c : rings) print_load("block_fp8", time_load(m2.matrices, m2.vectors, c), c, pinned, "pinned");
  print_load("w4a16", time_load(int4.matrices, int4.vectors, usual), usual, pinned, "pinned");
  print_load("nvfp4", time_load(nvfp4.matrices, nvfp4.vectors, usual), usual, pinned, "pinned");
  for (unsigned threads : {1u, 4u, 8u, 16u}) print_reader_alone(f, m2.bytes, usual, threads);
  for (unsigned threads : {4u, 8u, 12u}) print_pinned_compared(f.path, threads);
  {
    const size_t few = std::min<size_t>(m2.matrices.size(), 4); /* a layer */
    mm_cu_memory memory;
    mm_err err = {};
    uint64_t bytes = 0;
    const auto from = clock_type::now();
    for (size_t i = 0; i < few; i++) {
      mm_cu_weight w;
      must(upload_weight(&memory, m2.matrices[i].w, "w", &w, &err), err);
      bytes += (uint64_t)w.lead * w.n * w.k;
    }
    CUDA_OK(cudaDeviceSynchronize());
    printf("tensor by tensor from the mapping, page cache: %.1f GB/s\n", (double)bytes / since(from) * 1e-9);
  }
  mm_map_close(&f.map); /* pages that are mapped stay in the cache */
  const auto drop = [&] { posix_fadvise(f.file.fd, 0, 0, POSIX_FADV_DONTNEED); };
  drop();
  mm_err err = {};
  must(mm_map_open(&f.map, &f.file, f.path.c_str(), &err), err);
  layers cold;
  cold.make(f.map.data, f.map.size, "block_fp8");
  const double before = best_direct(f.path, cold.bytes / 2);
  const timed t = time_load(cold.matrices, cold.vectors, usual);
  const double disk = std::max(before, best_direct(f.path, cold.bytes / 2));
  if (disk == 0) {
    printf("no O_DIRECT here\n");
    return;
  }
  print_load("block_fp8 from disk", t, usual, disk, "O_DIRECT");
  printf("page cache afterwards: %s\n", mm_file_cached(f.file.fd, 0, 1 << 20) ? "holds the file's beginning" : "still without the file");
}

/* How fast pinned host memory is there, as of a server with --kv-offload: $MM_POOL_GB (8). Huge pages that threads fill, without pinning,
 * are the machine's own limit. */
void bench_pool() {
  const char *gb = getenv("MM_POOL_GB");
  const size_t bytes = (gb ? strtoull(gb, nullptr, 10) : 8) * 1000000000;
  const unsigned threads = mm_pool_cpus();
  const auto seconds = [&](bool pin, unsigned n) {
    mm_cu_huge m;
    mm_err err = {};
    const auto from = clock_type::now();
    must(m.map(bytes, &err) && m.touch(n, &err) && (!pin || m.pin(&err)), err);
    const double took = since(from);
    m.unmap();
    return took;
  };
  const double filled = seconds(false, threads), one = seconds(true, 1), all = seconds(true, threads);
  void *host;
  const auto from = clock_type::now();
  CUDA_OK(cudaHostAlloc(&host, bytes, cudaHostAllocPortable));
  const double plain = since(from);
  CUDA_OK(cudaFreeHost(host));
  printf(
      "%.1f GB of host memory: %u threads fill huge pages in %.2f s; and pinned %.2f s, %.2f x; of one thread %.2f s; cudaHostAlloc %.2f "
      "s\n",
      (double)bytes * 1e-9, threads, filled, all, all / filled, one, plain);
}
