/* Weights by way of the ring and the arena (load.h) beside the plain way, tensor by tensor: every byte on the device is the same, padding
 * and the spare bytes behind included. Planes of every scheme in odd shapes, in memory and in a file, through rings so small that planes,
 * rows and words are cut anywhere; then the packed checkpoints under $MM_GPU_MODELS as a whole. And how fast it is, from the page cache and
 * from disk, beside the pinned copies and the plain reads of the same run. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "runtime/cuda/load.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

/* ---- the same bytes ---- */

struct named {
  const mm_packed *w;
  std::string name;
};

/* `bytes` of device memory and the 256 behind them. */
static std::vector<uint8_t> bytes_at(const void *p, size_t bytes) {
  std::vector<uint8_t> v(p ? bytes + 256 : 0);
  if (p) CUDA_OK(cudaMemcpy(v.data(), p, v.size(), cudaMemcpyDeviceToHost));
  return v;
}

static bool same_weight(const mm_cu_weight &a, const mm_cu_weight &b) {
  const bool words = a.scale_kind == MM_CU_COARSE || a.scale_kind == MM_CU_FINE;
  const size_t data = (size_t)a.lead * a.n * a.pitch, scale = mm_cu_scales(&a) * (words ? 4 : 1);
  return a.code == b.code && a.scale_kind == b.scale_kind && a.lead == b.lead && a.n == b.n && a.k == b.k && a.pitch == b.pitch &&
         a.scale_rows == b.scale_rows && a.scale_pitch == b.scale_pitch && a.cell_n_log2 == b.cell_n_log2 &&
         a.cell_k_log2 == b.cell_k_log2 && bytes_at(a.data, data) == bytes_at(b.data, data) &&
         bytes_at(a.scale, scale) == bytes_at(b.scale, scale) && bytes_at(a.global, a.lead * 4) == bytes_at(b.global, b.lead * 4);
}

/* What the arena will be given is no zeros by chance. */
static void poison_heap(uint64_t bytes) {
  void *p;
  CUDA_OK(cudaMalloc(&p, bytes));
  CUDA_OK(cudaMemset(p, 0xff, bytes));
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaFree(p));
}

/* Both ways; *read: what the ring read, of all bytes the least that it had to. */
static bool same_load(const std::vector<named> &matrices, const std::vector<named> &vectors, const mm_cu_load_config &config,
                      double *read) {
  mm_err err = {};
  mm_cu_load load;
  mm_cu_memory arena;
  std::vector<mm_cu_weight> weight(matrices.size());
  std::vector<const float *> value(vectors.size());
  for (size_t i = 0; i < matrices.size(); i++) must(load.matrix(matrices[i].w, matrices[i].name.c_str(), &weight[i], &err), err);
  for (size_t i = 0; i < vectors.size(); i++) must(load.values(vectors[i].w, vectors[i].name.c_str(), &value[i], &err), err);
  must(load.start(config, &err), err);
  poison_heap(load.arena_bytes + 256);
  must(load.run(&arena, &err), err);
  uint64_t bytes = 0;
  for (uint64_t b : load.stats.bytes) bytes += b;
  *read = load.file_bytes ? (double)bytes / (double)load.file_bytes : 1;
  bool same = arena.block.size() == 1;
  for (size_t i = 0; i < matrices.size(); i++) {
    mm_cu_memory plain;
    mm_cu_weight w;
    must(mm_cu_upload(&plain, matrices[i].w, matrices[i].name.c_str(), &w, &err), err);
    CUDA_OK(cudaDeviceSynchronize());
    if (same_weight(w, weight[i])) continue;
    printf("  different: %s, %s, %u x [%u, %u]\n", matrices[i].name.c_str(), matrices[i].w->scheme->name, w.lead, w.n, w.k);
    same = false;
  }
  for (size_t i = 0; i < vectors.size(); i++) {
    mm_cu_memory plain;
    float *v;
    const mm_packed *w = vectors[i].w;
    const size_t n = (size_t)w->lead * w->n * w->k * sizeof(float);
    must(mm_cu_upload_f32(&plain, w, &v, &err), err);
    if (bytes_at(v, n) == bytes_at(value[i], n)) continue;
    printf("  different: %s, %s as f32, [%u, %u]\n", vectors[i].name.c_str(), w->scheme->name, w->n, w->k);
    same = false;
  }
  return same;
}

/* ---- odd shapes ---- */

/* Random bytes as elements of a type: numbers are finite, and what is a scale is one. */
static void random_elements(uint8_t *to, uint64_t n, mm_dtype t) {
  for (uint64_t i = 0; i < n; i++) {
    const float f = (float)(g_rng.normal() * exp2(g_rng.below(40) - 20.0));
    const uint16_t half = (uint16_t)(g_rng.next() & 0xbbff); /* an exponent below the largest */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint16_t top = (uint16_t)(bits >> 16);
    switch (t) {
      case MM_F32: memcpy(to + 4 * i, &f, 4); break;
      case MM_BF16: memcpy(to + 2 * i, &top, 2); break;
      case MM_F16: memcpy(to + 2 * i, &half, 2); break;
      default: to[i] = (uint8_t)(g_rng.below(20) ? g_rng.below(255) : 0); break;
    }
  }
}

/* Weights whose planes lie in one buffer, at offsets that their types allow and nothing more. */
struct odd_weights {
  std::vector<mm_packed> packed;
  std::vector<std::vector<uint64_t>> offset;
  std::vector<uint8_t> bytes;
  std::vector<named> matrices, vectors;
  uint32_t made = 0;

  void add(const mm_scheme *s, uint32_t lead, uint32_t n, uint32_t k, bool finer) {
    mm_packed w = {};
    w.scheme = s, w.lead = lead, w.n = n, w.k = k;
    std::vector<uint64_t> at;
    for (unsigned p = 0; p < s->plane_count; p++) {
      w.cell[p] = s->plane[p].cell;
      if (finer && s->plane[p].scale && w.cell[p].n == 128) w.cell[p] = {64, 32};
      const uint64_t size = mm_dtype_size(s->plane[p].dtype), count = lead * mm_plane_elements(n, k, w.cell[p]);
      at.push_back(mm_round_up(bytes.size() + g_rng.below(g_rng.below(4) ? 2 : 9000), size));
      bytes.resize(at.back() + count * size);
      random_elements(&bytes[at.back()], count, s->plane[p].dtype);
    }
    packed.push_back(w), offset.push_back(at);
  }
  /* Every scheme that the backend has kernels for, and as many vectors; the planes begin at `base`, where bytes are or will be. */
  void make() {
    static const char *const others[] = {"bf16", "f16", "f32"};
    for (size_t i = 0; const mm_scheme *s = mm_scheme_at(i); i++) {
      for (int shape = 0; shape < 4; shape++) {
        mm_packed w = {};
        mm_cu_weight d;
        mm_err err = {};
        w.scheme = s, w.lead = 1, w.n = w.k = 256;
        for (unsigned p = 0; p < s->plane_count; p++) w.cell[p] = s->plane[p].cell;
        if (!mm_cu_describe(&w, s->name, &d, &err)) continue;
        add(s, 1 + g_rng.below(3), 1 + g_rng.below(300), 8 * (1 + g_rng.below(90)), shape % 2);
        made++;
      }
    }
    for (int i = 0; i < 12; i++) add(mm_scheme_find(others[i % 3]), 1, 1 + g_rng.below(3000), i < 6 ? 1 : 40, false);
    add(mm_scheme_find("block_fp8"), 1, 64, 384, false); /* a router that some tool has quantised */
  }
  void set(const uint8_t *base) {
    matrices.clear(), vectors.clear();
    for (size_t i = 0; i < packed.size(); i++) {
      for (size_t p = 0; p < offset[i].size(); p++) packed[i].plane[p] = base + offset[i][p];
      (i < made ? matrices : vectors).push_back({&packed[i], "weight " + std::to_string(i)});
    }
  }
};

static std::string scratch_file(const char *name) {
  const char *dir = getenv("MM_LOAD_DIR");
  if (!dir) dir = getenv("TMPDIR");
  return std::string(dir ? dir : "/tmp") + "/" + name;
}

/* A file on disk and in memory. */
struct mapped_file {
  std::string path;
  mm_file file = MM_FILE_NONE;
  mm_map map = {};
  explicit mapped_file(const std::string &p) : path(p) {}
  void open() {
    mm_err err = {};
    must(mm_file_open(&file, path.c_str(), &err) && mm_map_open(&map, &file, path.c_str(), &err), err);
  }
  ~mapped_file() {
    mm_map_close(&map);
    mm_file_close(&file);
    unlink(path.c_str());
  }
};

static void write_all(const std::string &path, const std::vector<uint8_t> &bytes, uint64_t times) {
  FILE *f = fopen(path.c_str(), "wb");
  bool ok = f != nullptr;
  for (uint64_t i = 0; ok && i < times; i++) ok = fwrite(bytes.data(), 1, bytes.size(), f) == bytes.size();
  ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
  if (!ok || fclose(f) != 0) {
    perror(path.c_str());
    exit(1);
  }
}

static void check_odd_shapes() {
  static const mm_cu_load_config rings[] = {{2, 4096, 4096, 1, 1},
                                            {5, 8192, 4096, 3, 2},
                                            {9, 1 << 16, 1 << 14, 4, 4},
                                            {24, 8u << 20, 1u << 20, 0, 6},
                                            {3, 3 * 4096, 2 * 4096, 2, 2}};
  static const mm_read_path paths[] = {MM_READ_PROBE, MM_READ_DIRECT, MM_READ_STREAMS};
  int i = 0;
  for (mm_cu_load_config ring : rings) {
    odd_weights w;
    w.make(), w.set(w.bytes.data());
    double read;
    char what[160];
    snprintf(what, sizeof what, "load: %zu weights, %zu vectors through %u x %zu KiB, from memory = tensor by tensor", w.matrices.size(),
             w.vectors.size(), ring.buffers, ring.chunk >> 10);
    report_true(what, same_load(w.matrices, w.vectors, ring, &read));
    mapped_file f(scratch_file("mm-load-odd"));
    write_all(f.path, w.bytes, 1);
    f.open(), w.set(f.map.data);
    ring.path = paths[i++ % 3];
    snprintf(what, sizeof what, "load: the same through %u x %zu KiB from a file (%s)", ring.buffers, ring.chunk >> 10,
             ring.path == MM_READ_PROBE ? "probed" : mm_read_path_name(ring.path));
    report_true(what, same_load(w.matrices, w.vectors, ring, &read));
  }
}

/* Weights without planes are made on the device, beside others that are read. */
static void check_random() {
  mm_err err = {};
  mm_cu_load load;
  mm_cu_memory arena;
  odd_weights w;
  w.make(), w.set(w.bytes.data());
  const mm_packed *read = w.matrices[0].w;
  mm_packed made = w.packed[1], norm = w.packed[w.made];
  for (const void *&p : made.plane) p = nullptr;
  norm.plane[0] = nullptr;
  mm_cu_weight a, b, c;
  const float *v;
  must(load.matrix(read, "read", &a, &err) && load.matrix(&made, "made", &b, &err) && load.values(&norm, "norm", &v, &err), err);
  must(load.start({}, &err) && load.run(&arena, &err), err);
  mm_cu_memory plain;
  must(mm_cu_upload(&plain, read, "read", &c, &err), err);
  CUDA_OK(cudaDeviceSynchronize());
  const auto codes = bytes_at(b.data, (size_t)b.lead * b.n * b.pitch), numbers = bytes_at(v, (size_t)norm.lead * norm.n * norm.k * 4);
  const size_t zeros = (size_t)std::count(codes.begin(), codes.end() - 256, 0);
  report_true("load: random weights beside read ones", same_weight(a, c) && zeros < codes.size() / 2 && numbers[3] == 0x3f);
}

/* A file that is another one by the time it is loaded, or shorter: an error that names it, and nothing hangs. */
static void check_bad_files() {
  for (int cut = 0; cut < 2; cut++) {
    mapped_file f(scratch_file("mm-load-bad"));
    odd_weights w;
    w.make();
    write_all(f.path, w.bytes, 1);
    f.open(), w.set(f.map.data);
    mm_err err = {};
    mm_cu_load load;
    mm_cu_memory arena;
    std::vector<mm_cu_weight> weight(w.matrices.size());
    for (size_t i = 0; i < weight.size(); i++) must(load.matrix(w.matrices[i].w, "w", &weight[i], &err), err);
    bool ok = true;
    if (!cut) { /* before it is opened again */
      write_all(f.path, {1, 2, 3}, 1);
      ok = load.start({}, &err);
    } else {
      mm_cu_load_config small;
      small.buffers = 2, small.chunk = small.piece = 4096, small.in_flight = 1, small.threads = 1;
      must(load.start(small, &err), err);
      if (truncate(f.path.c_str(), 3 * 4096) != 0) exit(1);
      ok = load.run(&arena, &err);
    }
    report_true(std::string("load: ") + (cut ? "a file cut while it is read" : "another file") + ": " + err.code,
                !ok && strstr(err.text, f.path.c_str()) && !strcmp(err.code, cut ? "E_SHORT_READ" : "E_CHANGED"));
  }
}

/* ---- checkpoints ---- */

static void list_weights(const mm_rank_weights &w, uint32_t layers, std::vector<named> *matrices, std::vector<named> *vectors) {
  const auto add = [](std::vector<named> *to, const mm_packed &p, const std::string &name) {
    if (p.scheme) to->push_back({&p, name});
  };
  add(matrices, w.embed, "embed"), add(matrices, w.head, "head"), add(vectors, w.final_norm, "final norm");
  for (uint32_t l = 0; l < layers; l++) {
    const mm_layer_weights &y = w.layer[l];
    const std::string of = " of layer " + std::to_string(l);
    for (const mm_packed *p : {&y.qkv, &y.out, &y.output_gate, &y.w13, &y.w2}) add(matrices, *p, "matrix" + of);
    for (const mm_packed *p : {&y.input_norm, &y.post_norm, &y.attn_norm, &y.q_norm, &y.k_norm, &y.router_bias, &y.router})
      add(vectors, *p, "vector" + of);
  }
}

static void check_checkpoint(const std::string &dir) {
  mm_err err = {};
  mm_shards shards;
  mm_rank_weights w;
  std::vector<named> matrices, vectors;
  must(mm_shards_open(&shards, dir.c_str(), &err) && mm_bind(&w, &shards, 0, &err), err);
  list_weights(w, shards.pack.model.layers, &matrices, &vectors);
  double read;
  const bool same = same_load(matrices, vectors, {}, &read);
  char what[200];
  snprintf(what, sizeof what, "load %s: %zu matrices, %zu vectors = tensor by tensor, byte for byte; %.4f of the bytes read",
           dir.substr(dir.rfind('/') + 1).c_str(), matrices.size(), vectors.size(), read);
  report_true(what, same);
  mm_bind_close(&w);
  mm_shards_close(&shards);
}

void test_load() {
  check_odd_shapes();
  check_random();
  check_bad_files();
  for (const std::string &dir : model_folders()) check_checkpoint(dir);
}

/* ---- how fast ---- */

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

/* Bytes a second of one thread that reads the first `bytes` past the page cache, 16 MiB at a time; 0 where that cannot be. */
static double direct_rate(const std::string &path, uint64_t bytes) {
  constexpr size_t kRead = (size_t)16 << 20;
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECT);
  if (fd < 0) return 0;
  void *to = aligned_alloc(4096, kRead);
  memset(to, 1, kRead);
  uint64_t done = 0;
  const auto from = clock_type::now();
  for (ssize_t got; done < bytes && (got = pread(fd, to, kRead, (off_t)done)) > 0;) done += (uint64_t)got;
  const double s = since(from);
  free(to), close(fd);
  return (double)done / s;
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
};

static timed time_load(const std::vector<named> &matrices, const std::vector<named> &vectors, const mm_cu_load_config &config) {
  mm_err err = {};
  mm_cu_load load;
  mm_cu_memory arena;
  std::vector<mm_cu_weight> weight(matrices.size());
  std::vector<const float *> value(vectors.size());
  const auto from = clock_type::now();
  for (size_t i = 0; i < matrices.size(); i++) must(load.matrix(matrices[i].w, "w", &weight[i], &err), err);
  for (size_t i = 0; i < vectors.size(); i++) must(load.values(vectors[i].w, "v", &value[i], &err), err);
  must(load.start(config, &err) && load.run(&arena, &err), err);
  return {since(from), load.stats, load.file_bytes};
}

static void print_load(const char *what, const timed &t, const mm_cu_load_config &c, double ceiling, const char *of) {
  char text[200];
  printf("load %s, ring %u x %zu MiB, %u in flight, %u threads, reads of %zu KiB: %.3f s, %.1f GB/s, %.2f of %s (%s)\n", what, c.buffers,
         c.chunk >> 20, c.in_flight, c.threads, c.piece >> 10, t.seconds, (double)t.bytes / t.seconds * 1e-9,
         (double)t.bytes / t.seconds / ceiling, of, mm_read_text(text, sizeof text, &t.stats));
}

/* Only read into the ring, nothing copied. */
static void print_reader_alone(const mapped_file &f, uint64_t bytes, const mm_cu_load_config &c, unsigned threads) {
  mm_err err = {};
  const mm_read_file file = {f.path.c_str(), nullptr, 0, nullptr};
  mm_read_want want = {0, 0, bytes, 0};
  void *ring = mmap(nullptr, c.buffers * c.chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  madvise(ring, c.buffers * c.chunk, MADV_HUGEPAGE);
  memset(ring, 1, c.buffers * c.chunk);
  const mm_reader_config config = {&file, 1, &want, 1, static_cast<uint8_t *>(ring), c.buffers, c.chunk, c.piece, threads, MM_READ_PROBE};
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

/* $MM_LOAD_GB (16) in a file below $MM_LOAD_DIR, $TMPDIR or /tmp. */
void bench_load() {
  const char *gb = getenv("MM_LOAD_GB");
  const uint64_t size = (gb ? strtoull(gb, nullptr, 10) : 16) * 1000000000 / 4096 * 4096, block = (uint64_t)64 << 20;
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
  const mm_cu_load_config rings[] = {{24, 8u << 20, 1u << 20, 16, 6},  {24, 8u << 20, 1u << 20, 8, 6},   {24, 8u << 20, 1u << 20, 12, 6},
                                     {8, 8u << 20, 1u << 20, 12, 3},   {12, 4u << 20, 1u << 19, 12, 6},  {32, 4u << 20, 1u << 20, 16, 8},
                                     {16, 16u << 20, 1u << 20, 16, 4}, {32, 16u << 20, 2u << 20, 16, 6}, {24, 8u << 20, 8u << 20, 16, 6},
                                     {24, 8u << 20, 1u << 18, 16, 6}};
  const mm_cu_load_config usual = rings[0];
  layers m2, int4, nvfp4;
  m2.make(f.map.data, f.map.size, "block_fp8"), int4.make(f.map.data, f.map.size, "w4a16"), nvfp4.make(f.map.data, f.map.size, "nvfp4");
  time_load(m2.matrices, m2.vectors, usual); /* kernels are loaded, clocks are up */
  for (const mm_cu_load_config &c : rings) print_load("block_fp8", time_load(m2.matrices, m2.vectors, c), c, pinned, "pinned");
  print_load("w4a16", time_load(int4.matrices, int4.vectors, usual), usual, pinned, "pinned");
  print_load("nvfp4", time_load(nvfp4.matrices, nvfp4.vectors, usual), usual, pinned, "pinned");
  for (unsigned threads : {1u, 4u, 8u, 16u}) print_reader_alone(f, m2.bytes, usual, threads);
  {
    const size_t few = std::min<size_t>(m2.matrices.size(), 4); /* a layer */
    mm_cu_memory memory;
    mm_err err = {};
    uint64_t bytes = 0;
    const auto from = clock_type::now();
    for (size_t i = 0; i < few; i++) {
      mm_cu_weight w;
      must(mm_cu_upload(&memory, m2.matrices[i].w, "w", &w, &err), err);
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
  const double before = direct_rate(f.path, cold.bytes / 2);
  const timed t = time_load(cold.matrices, cold.vectors, usual);
  const double disk = std::max(before, direct_rate(f.path, cold.bytes / 2));
  if (disk == 0) {
    printf("no O_DIRECT here\n");
    return;
  }
  printf("O_DIRECT, one thread, before and after: %.2f GB/s at best\n", disk * 1e-9);
  print_load("block_fp8 from disk", t, usual, disk, "O_DIRECT");
  printf("page cache afterwards: %s\n", mm_file_cached(f.file.fd, 0, 1 << 20) ? "holds the file's beginning" : "still without the file");
}
