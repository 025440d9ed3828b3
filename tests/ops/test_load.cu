/* Weights by way of the ring and the arena (load.h) against the plain way, tensor by tensor: every byte on the device is the same, padding
 * and the spare bytes behind included. Planes of every scheme in odd shapes, in memory and in a file, through rings so small that planes,
 * rows and words are cut anywhere; then the packed checkpoints under $MM_GPU_MODELS as a whole. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>

#include "runtime/bench/bench_shapes.h"
#include "tests/ops/load_files.h"

/* ---- the same bytes ---- */

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

/* Fills the heap, so that the arena gets no zeros by chance. */
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
  for (size_t i = 0; i < matrices.size(); i++) must(load.matrix(matrices[i].w, matrices[i].name.c_str(), {}, &weight[i], &err), err);
  for (size_t i = 0; i < vectors.size(); i++) must(load.values(vectors[i].w, vectors[i].name.c_str(), 0, &value[i], &err), err);
  must(load.start(config, &err), err);
  poison_heap(load.plan.bytes + (64 << 20));
  must(load.open(&arena, &err) && load.finish(&err), err);
  *read = load.plan.file_bytes ? (double)mm_read_bytes(&load.stats) / (double)load.plan.file_bytes : 1;
  bool same = arena.block.size() == 1;
  for (size_t i = 0; i < matrices.size(); i++) {
    mm_cu_memory plain;
    mm_cu_weight w;
    must(upload_weight(&plain, matrices[i].w, matrices[i].name.c_str(), &w, &err), err);
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
    must(upload_f32(&plain, w, &v, &err), err);
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

/* Weights without planes are made on the device, among others that are read. */
static void check_random() {
  mm_err err = {};
  mm_cu_load load;
  mm_cu_memory arena;
  odd_weights w;
  w.make(), w.set(w.bytes.data());
  const mm_packed *read = w.matrices[0].w;
  mm_packed made = w.packed[1], norm = w.packed[w.made];
  for (const void *&p : made.plane) p = nullptr;
  norm.plane[0] = nullptr, norm.random.centre = 1;
  mm_cu_weight a, b, c;
  const float *v;
  must(load.matrix(read, "read", {}, &a, &err) && load.matrix(&made, "made", {1, false, 0}, &b, &err) &&
           load.values(&norm, "norm", 1, &v, &err),
       err);
  must(load.start({}, &err) && load.open(&arena, &err) && load.finish(&err), err);
  mm_cu_memory plain;
  must(upload_weight(&plain, read, "read", &c, &err), err);
  CUDA_OK(cudaDeviceSynchronize());
  const auto codes = bytes_at(b.data, (size_t)b.lead * b.n * b.pitch), numbers = bytes_at(v, (size_t)norm.lead * norm.n * norm.k * 4);
  const size_t zeros = (size_t)std::count(codes.begin(), codes.end() - 256, 0);
  report_true("load: random weights beside read ones", same_weight(a, c) && zeros < codes.size() / 2 && numbers[3] == 0x3f);
}

/* A weight that nobody stored, as the host reads it back. */
struct made_weight {
  mm_packed w;
  mm_cu_weight d = {};
  std::vector<uint8_t> code, scale;
  mm_cu_memory arena;

  explicit made_weight(mm_packed of) : w(of) {
    mm_err err = {};
    mm_cu_load load;
    w.lead = std::min(w.lead, 3u);
    must(load.matrix(&w, "made", {}, &d, &err) && load.start({}, &err) && load.open(&arena, &err) && load.finish(&err), err);
    code = bytes_at(d.data, (size_t)w.lead * w.n * d.pitch);
    if (d.scale_kind == MM_CU_COARSE) scale = bytes_at(d.scale, mm_cu_scales(&d) * sizeof(float));
  }
  const uint8_t *row(uint32_t matrix, uint32_t i) const { return &code[((size_t)matrix * w.n + i) * d.pitch]; }
  float scale_at(uint32_t matrix, uint32_t i, uint32_t k) const {
    float f;
    memcpy(&f, &scale[4 * (((size_t)matrix * d.scale_rows + (i >> d.cell_n_log2)) * d.scale_pitch + (k >> d.cell_k_log2))], sizeof f);
    return f;
  }
};

/* True if each rank's weight is its part of `whole`. */
static bool is_part(const made_weight &whole, const made_weight &part) {
  const mm_random &r = part.w.random;
  const uint32_t bits = mm_cu_bits(part.d.code);
  bool same = true;
  for (uint32_t e = 0; e < part.w.lead; e++) {
    for (uint32_t i = 0; i < part.w.n; i++) {
      const int s = r.at[2] && i >= r.at[2] ? 2 : r.at[1] && i >= r.at[1];
      const uint32_t from = r.from[s] + i - r.at[s];
      same = same && !memcmp(part.row(e, i), whole.row(r.first + e, from) + (size_t)part.w.first_k * bits / 8, (size_t)part.w.k * bits / 8);
      for (uint32_t k = 0; part.d.scale_kind == MM_CU_COARSE && k < part.w.k; k += 32)
        same = same && part.scale_at(e, i, k) == whole.scale_at(r.first + e, from, part.w.first_k + k);
    }
  }
  return same;
}

/* Models that nobody stored are the same however they are cut. */
static void check_random_cuts() {
  for (const char *model : {"m1", "m2", "m3"}) {
    for (const char *quant : {"bf16", "block_fp8", "w4a16", "nvfp4"}) {
      const auto weights = [&](uint32_t rank, uint32_t tp, uint32_t ep) {
        mm_err err = {};
        const mm_bench_shape shape = {model, 1, 4096, strcmp(quant, "nvfp4") ? quant : "block_fp8", quant, "block_fp8", rank, tp, ep};
        const mm_model m = mm_bench_model(&shape);
        mm_rank_weights w;
        must(mm_bench_weights(&shape, &m, &w, &err), err);
        std::vector<mm_packed> all = {w.embed, w.head, w.layer->qkv, w.layer->out, w.layer->w13, w.layer->w2};
        if (strcmp(model, "m3")) all.push_back(w.layer->router); /* M3's is f32, which is no matrix of the kernels */
        for (const mm_packed *p : {&w.layer->output_gate, &w.layer->index_q, &w.layer->mlp_up, &w.layer->mlp_down})
          if (p->scheme) all.push_back(*p);
        free(w.layer);
        return all;
      };
      const auto whole = weights(0, 1, 1);
      bool same = true;
      for (size_t i = 0; i < whole.size(); i++) {
        const made_weight uncut(whole[i]);
        for (uint32_t tp : {2u, 8u}) {
          for (uint32_t rank : {0u, tp - 1}) same = same && is_part(uncut, made_weight(weights(rank, tp, 1)[i]));
          mm_packed own = weights(tp - 1, tp, tp)[i]; /* the last experts, which `uncut` does not have: its last stands for them */
          same = same && own.random.first + own.lead == whole[i].lead;
          own.random.first = own.random.first ? uncut.w.lead - 1 : 0, own.lead = 1;
          same = same && is_part(uncut, made_weight(own));
        }
      }
      report_true(std::string("load: random weights of two and eight ranks are one's, ") + model + " " + quant, same);
    }
  }
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
    for (size_t i = 0; i < weight.size(); i++) must(load.matrix(w.matrices[i].w, "w", {}, &weight[i], &err), err);
    bool ok = true;
    if (!cut) { /* before it is opened again */
      write_all(f.path, {1, 2, 3}, 1);
      ok = load.start({}, &err);
    } else {
      mm_cu_load_config small;
      small.buffers = 2, small.chunk = small.piece = 4096, small.in_flight = 1, small.threads = 1;
      must(load.start(small, &err), err);
      if (truncate(f.path.c_str(), 3 * 4096) != 0) exit(1);
      ok = load.open(&arena, &err) && load.finish(&err);
    }
    report_true(std::string("load: ") + (cut ? "a file cut while it is read" : "another file") + ": " + err.code,
                !ok && strstr(err.text, f.path.c_str()) && !strcmp(err.code, cut ? "E_SHORT_READ" : "E_CHANGED"));
  }
}

/* Groups that are waited for one after the other, while a slow ring fills: what a stream copies from then on is all there. */
static void check_groups() {
  mm_cu_load_config slow;
  slow.buffers = 3, slow.chunk = slow.piece = 8192, slow.in_flight = 2, slow.threads = 1;
  mapped_file f(scratch_file("mm-load-groups"));
  odd_weights w;
  w.make();
  write_all(f.path, w.bytes, 1);
  f.open(), w.set(f.map.data);
  mm_err err = {};
  mm_cu_memory arena, copies;
  mm_cu_load load;
  const size_t n = w.matrices.size();
  std::vector<mm_cu_weight> weight(n);
  std::vector<uint8_t *> copy(n);
  cudaStream_t s;
  CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (size_t i = 0; i < n; i++) must(load.matrix(w.matrices[i].w, "w", {(uint32_t)i, false, 0}, &weight[i], &err), err);
  bool after = false;
  load.after((uint32_t)n / 2, [&](cudaStream_t) {
    after = true;
    return cudaSuccess;
  });
  must(load.start(slow, &err), err);
  poison_heap(load.plan.bytes + (64 << 20));
  must(load.open(&arena, &err), err);
  bool in_time = true;
  for (size_t i = 0; i < n; i++) {
    const size_t bytes = (size_t)weight[i].lead * weight[i].n * weight[i].pitch;
    must(load.wait((uint32_t)i, s, &err), err);
    in_time = in_time && (i < n / 2 || after);
    must((copy[i] = copies.array<uint8_t>(bytes, &err)) != nullptr, err);
    CUDA_OK(cudaMemcpyAsync(copy[i], weight[i].data, bytes, cudaMemcpyDeviceToDevice, s));
  }
  bool ready = false;
  must(load.finish(&err) && load.poll(&ready, &err), err);
  CUDA_OK(cudaStreamSynchronize(s));
  bool same = true;
  for (size_t i = 0; i < n; i++) {
    const size_t bytes = (size_t)weight[i].lead * weight[i].n * weight[i].pitch;
    mm_cu_memory plain;
    mm_cu_weight want;
    must(upload_weight(&plain, w.matrices[i].w, "w", &want, &err), err);
    const auto a = bytes_at(want.data, bytes), b = bytes_at(copy[i], bytes);
    same = same && std::equal(a.begin(), a.begin() + (long)bytes, b.begin()); /* the copy has no zeros of the arena's behind it */
  }
  CUDA_OK(cudaStreamDestroy(s));
  report_true("load: " + std::to_string(n) + " groups, each whole from its wait on; what is queued after one comes before",
              same && ready && in_time);
}

/* Groups split by matrix, waited for in any order and some of them never, while a slow ring fills. */
static void check_by_matrix() {
  mm_cu_load_config slow;
  slow.buffers = 3, slow.chunk = slow.piece = 8192, slow.in_flight = 2, slow.threads = 1;
  mapped_file f(scratch_file("mm-load-apart"));
  odd_weights w;
  w.make();
  write_all(f.path, w.bytes, 1);
  f.open(), w.set(f.map.data);
  mm_err err = {};
  mm_cu_memory arena, copies;
  mm_cu_load load;
  const uint32_t n = (uint32_t)w.matrices.size();
  std::vector<mm_cu_weight> weight(n);
  std::vector<uint8_t *> copy(n);
  std::vector<uint32_t> order(n), wanted(n);
  cudaStream_t s;
  CUDA_OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  for (uint32_t i = 0; i < n; i++) must(load.matrix(w.matrices[i].w, "w", {i, true, n + 4 * i}, &weight[i], &err), err), order[i] = i;
  for (uint32_t i = n - 1; i > 0; i--) std::swap(order[i], order[g_rng.below(i + 1)]);
  must(load.start(slow, &err), err);
  poison_heap(load.plan.bytes + (64 << 20));
  must(load.open(&arena, &err), err);
  for (uint32_t i : order) {
    const size_t each = (size_t)weight[i].n * weight[i].pitch;
    wanted[i] = g_rng.below(1u << weight[i].lead);
    must(load.wait(i, s, &err) && load.wait_for(n + 4 * i, weight[i].lead, &wanted[i], s, &err), err);
    must((copy[i] = copies.array<uint8_t>(each * weight[i].lead, &err)) != nullptr, err);
    for (uint32_t e = 0; e < weight[i].lead; e++) {
      if (wanted[i] >> e & 1) CUDA_OK(cudaMemcpyAsync(copy[i] + e * each, weight[i].data + e * each, each, cudaMemcpyDeviceToDevice, s));
    }
    must(load.is_sound(&err), err);
  }
  must(load.finish(&err) && load.is_sound(&err), err);
  CUDA_OK(cudaStreamSynchronize(s));
  bool same = load.is_near(0, n) && load.is_near(n, 4 * (n - 1));
  for (uint32_t i = 0; i < n; i++) {
    const size_t each = (size_t)weight[i].n * weight[i].pitch;
    mm_cu_memory plain;
    mm_cu_weight want;
    must(upload_weight(&plain, w.matrices[i].w, "w", &want, &err), err);
    const auto a = bytes_at(want.data, each * weight[i].lead), b = bytes_at(copy[i], each * weight[i].lead);
    for (uint32_t e = 0; e < weight[i].lead; e++)
      same = same && (!(wanted[i] >> e & 1) ||
                      std::equal(a.begin() + (long)(e * each), a.begin() + (long)((e + 1) * each), b.begin() + (long)(e * each)));
  }
  CUDA_OK(cudaStreamDestroy(s));
  report_true("load: matrices of " + std::to_string(n) + " weights, each there from its wait on, in any order", same);
}

/* A load that is ended while it goes on, at every stage: nothing hangs, and nothing is written behind the arena's end. */
static void check_ended() {
  for (int stage = 0; stage < 6; stage++) {
    mapped_file f(scratch_file("mm-load-ended"));
    odd_weights w;
    w.make();
    write_all(f.path, w.bytes, 1);
    f.open(), w.set(f.map.data);
    mm_err err = {};
    mm_cu_memory arena;
    mm_cu_load load;
    mm_cu_load_config slow;
    slow.buffers = 3, slow.chunk = slow.piece = 4096, slow.in_flight = 2, slow.threads = 2;
    std::vector<mm_cu_weight> weight(w.matrices.size());
    for (size_t i = 0; i < weight.size(); i++) must(load.matrix(w.matrices[i].w, "w", {(uint32_t)i, false, 0}, &weight[i], &err), err);
    if (stage > 0) must(load.start(slow, &err), err);
    if (stage > 1) must(load.open(&arena, &err), err);
    if (stage > 2) must(load.wait((uint32_t)(stage - 3), 0, &err), err);
  }
  report_true("load: ended before, while and after it reads", true);
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

/* A byte of a copy is changed: with digests the first step says where, and so does every later one, or already opening does, where the load
 * was faster; without them nobody knows. */
static void check_digests(const std::string &dir) {
  namespace fs = std::filesystem;
  const std::string copy = scratch_file("mm-load-digests"), part = copy + "/model-rank-00000-part-00000.safetensors";
  fs::remove_all(copy);
  fs::copy(dir, copy, fs::copy_options::recursive);
  const uint64_t size = fs::file_size(part);
  bool named = true, good = true, others = true;
  const auto reported = [&](const mm_err &e) {
    return e.status == MM_INTEGRITY && !strcmp(e.code, "E_DIGEST") && strstr(e.text, part.c_str());
  };
  for (int damaged = 0; damaged < 2; damaged++) {
    if (damaged) {
      FILE *file = fopen(part.c_str(), "r+b");
      const long at = (long)(size - 1 - g_rng.below((uint32_t)std::min<uint64_t>(size / 2, 4 << 20)));
      if (!file || fseek(file, at, SEEK_SET) != 0) exit(1);
      const int c = fgetc(file);
      if (fseek(file, at, SEEK_SET) != 0 || fputc(c ^ 1, file) == EOF || fclose(file) != 0) exit(1);
    }
    for (int verify = 0; verify < 2; verify++) {
      mm_err err = {};
      mm_shards shards;
      mm_engine_config c = {};
      c.ops = &mm_ops_cuda, c.limits = {8, 1, 64}, c.options.threads = 1, c.verify = verify;
      must(mm_shards_open(&shards, copy.c_str(), &err), err);
      mm_engine *e = mm_engine_open(&shards, &c, &err);
      if (!e && damaged && verify) {
        named = named && reported(err);
        mm_shards_close(&shards);
        continue;
      }
      must(e != nullptr, err);
      const int32_t id = 1;
      const mm_span span = {0, 0, 1, 0};
      mm_batch batch = {};
      batch.tokens = 1, batch.id = &id, batch.span_count = 1, batch.span = &span;
      for (int step = 0; step < 2; step++) {
        mm_err now = {};
        const bool ok = mm_engine_step(e, &batch, nullptr, &now);
        if (damaged && verify)
          named = named && !ok && reported(now);
        else
          (damaged ? others : good) &= ok;
      }
      mm_engine_close(e);
      mm_shards_close(&shards);
    }
  }
  fs::remove_all(copy);
  report_true("load with digests: a changed byte ends each step with its block's place; a whole checkpoint runs", named && good && others);
}

void test_load() {
  check_odd_shapes();
  check_random();
  check_random_cuts();
  check_bad_files();
  check_groups();
  check_by_matrix();
  check_ended();
  const std::vector<std::string> dirs = model_folders();
  for (const std::string &dir : dirs) check_checkpoint(dir);
  if (!dirs.empty()) check_digests(dirs[0]);
}
