/* Whole steps of the CPU backend: the same logits, bit for bit, at every level, with any number of threads and however a prompt is cut
 * (test_ops and golden.sh say that they are right); no thread is made by a step, and none works between steps. */
#include <dirent.h>
#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "quant/cpu.h"
#include "quant/numbers.h"
#include "runtime/cpu/cpu_backend.h"
#include "runtime/engine/engine.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

enum { PROMPT = 75, VOCAB = 50, PADDED = 64 }; /* more than a page */

/* Wide enough that steps are worth threads, and tiles. */
static mm_model dims(mm_family family) {
  mm_model m = ref_dims(family, false);
  m.hidden = 144, m.head_dim = 24, m.rotary_dim = 16, m.intermediate = 136;
  if (m.index_dim) m.index_dim = 20;
  return m;
}

enum { PLANES = 4 * 8 * MM_MAX_PLANES };
typedef struct run {
  ref_shards *shards;
  mm_rank_weights w;
  mm_comm *comm;
  mm_forward f;
  void *plane[PLANES]; /* of matrices that were given codes */
  unsigned planes;
} run;

/* Number formats of a run in addition to the model's f32. */
typedef struct ways {
  mm_family family;
  const char *scheme; /* of the layers' matrices, random codes; NULL: f32 as they are */
  bool kv_bf16, input_bf16, act_quant, index_fp8;
} ways;

/* w as random codes of a scheme that are numbers, scales near one. */
static void recode(run *r, mm_packed *w, const char *scheme) {
  if (!w->scheme) return;
  uint32_t seed = w->n * 31 + w->k;
  w->scheme = mm_scheme_find(scheme);
  for (unsigned i = 0; i < w->scheme->plane_count; i++) {
    const mm_plane *p = &w->scheme->plane[i];
    const size_t n = mm_max(1, w->lead) * mm_plane_elements(w->n, w->k, p->cell), size = mm_dtype_size(p->dtype);
    uint8_t *to = malloc(n * size);
    assert_true(r->planes < PLANES && to);
    for (size_t at = 0; at < n; at++) {
      seed = seed * 1664525u + 1013904223u;
      const float near = (float)(1 + (seed >> 24)) / 1024;
      const uint16_t half = (uint16_t)(mm_f32_to_bf16(near) | (i ? 0 : seed >> 8 & 0x8000));
      if (size == 4) memcpy(to + 4 * at, &near, 4);
      if (size == 2) memcpy(to + 2 * at, &half, 2);
      const uint32_t code = (seed >> 24) % 0x7f | (seed >> 16 & 0x80), scale = p->dtype == MM_U8 ? 122 + (seed >> 30) : 0x28 + (seed >> 29);
      if (size == 1) to[at] = (uint8_t)(i ? scale : code);
    }
    w->cell[i] = p->cell, w->plane[i] = r->plane[r->planes++] = to;
  }
}

static void open_run(run *r, const ref_model *ref, unsigned threads, const ways *with) {
  mm_err err = {0};
  *r = (run){.shards = ref_cut(ref, 1), .comm = mm_comm_open(1, &err)};
  assert_true(mm_bind(&r->w, &r->shards->s, 0, &err));
  for (uint32_t l = 0; with->scheme && l < ref->m.layers; l++) {
    mm_packed *const matrix[] = {&r->w.layer[l].qkv, &r->w.layer[l].out, &r->w.layer[l].w13, &r->w.layer[l].w2};
    for (size_t i = 0; i < 4; i++) recode(r, matrix[i], with->scheme);
  }
  const mm_backend_config c = {.model = &ref->m,
                               .weights = &r->w,
                               .limits = {.max_tokens = PROMPT, .slots = 1, .max_positions = PROMPT},
                               .comm = r->comm,
                               .options.threads = threads,
                               .options.kv_bf16 = with->kv_bf16,
                               .options.act_quant = with->act_quant,
                               .options.input_bf16 = with->input_bf16,
                               .options.index_fp8 = with->index_fp8};
  assert_true(mm_forward_open(&r->f, &mm_ops_cpu, &c, &err));
}
static void close_run(run *r) {
  mm_forward_close(&r->f);
  mm_bind_close(&r->w);
  mm_comm_close(r->comm);
  ref_uncut(r->shards);
  for (unsigned i = 0; i < r->planes; i++) free(r->plane[i]);
}

static int32_t id_at(uint32_t t) { return (int32_t)(t * 7 % VOCAB); }

/* Tokens [pos, pos + count); the last one's logits. */
static void feed(run *r, uint32_t pos, uint32_t count, float *logits) {
  int32_t id[PROMPT];
  mm_err err = {0};
  for (uint32_t t = 0; t < count; t++) id[t] = id_at(pos + t);
  const mm_span span = {0, 0, count, pos};
  const uint32_t out = count - 1;
  const mm_batch batch = {.tokens = count, .id = id, .span_count = 1, .span = &span, .out_count = 1, .out = &out};
  assert_true(mm_forward_step(&r->f, &batch, logits, &err));
}

TEST(same_bits) {
  static const ways with[] = {{MM_FAMILY_M1, NULL, false, false, false, false},       {MM_FAMILY_M1, NULL, true, false, false, false},
                              {MM_FAMILY_M2, NULL, false, false, false, false},       {MM_FAMILY_M2, NULL, true, false, false, false},
                              {MM_FAMILY_M1, "bf16", false, true, true, false},       {MM_FAMILY_M2, "block_fp8", true, true, false, false},
                              {MM_FAMILY_M2, "block_fp8", false, false, true, false}, {MM_FAMILY_M2, "int8", false, false, true, false},
                              {MM_FAMILY_M2, "nvfp4", false, true, true, false},      {MM_FAMILY_M2, "mxfp4", false, false, true, false},
                              {MM_FAMILY_M3, NULL, false, false, false, false},       {MM_FAMILY_M3, "mxfp8", true, false, true, false},
                              {MM_FAMILY_M3, NULL, false, false, false, true}};
  for (size_t i = 0; i < sizeof with / sizeof *with; i++) {
    ref_model ref = ref_build(dims(with[i].family));
    float first[PADDED], logits[PADDED];
    for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++)
      for (uint32_t cut = 1; cut <= PROMPT; cut = cut == 1 ? 38 : cut == 38 ? PROMPT : PROMPT + 1) {
        run r;
        const bool is_first = level == MM_CPU_PLAIN && cut == 1;
        if (SANITIZED && !is_first && (level < mm_cpu_best() || cut != 38)) continue; /* minutes; other builds compare them all */
        mm_cpu_limit(level);
        open_run(&r, &ref, 1 + cut % 4, &with[i]);
        r.f.backend->ahead = cut != 1;                                                  /* as where weights are larger than memory */
        for (uint32_t at = 0, n = cut; at < PROMPT; at += n, n = cut == 38 ? 3 : cut) { /* 38 and then few: they take other loops */
          n = PROMPT - at < n ? PROMPT - at : n;
          feed(&r, at, n, is_first ? first : logits);
        }
        for (uint32_t v = 0; is_first && v < VOCAB; v++)
          if (!isfinite(first[v])) fail_msg("way %zu: logit %u is %g", i, v, (double)first[v]);
        if (!is_first && memcmp(first, logits, VOCAB * sizeof *logits) != 0)
          fail_msg("way %zu, level %d, %u tokens a step, %u threads: other bits", i, (int)level, cut, 1 + cut % 4);
        close_run(&r);
      }
    ref_free(&ref);
  }
  mm_cpu_limit(MM_CPU_BEST);
}

/* Numbers of this process's threads: their count, and their sum. */
static long threads_now(long *sum) {
  DIR *d = opendir("/proc/self/task");
  long count = 0;
  *sum = 0;
  assert_non_null(d);
  for (const struct dirent *e; (e = readdir(d));)
    if (e->d_name[0] != '.') count++, *sum += strtol(e->d_name, NULL, 10);
  closedir(d);
  return count;
}

static double cpu_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The second rank of a process has the CPUs after the first one's threads, and the same bits there. */
TEST(pinned) {
  ref_model ref = ref_build(dims(MM_FAMILY_M2));
  float free_to_go[PADDED], logits[PADDED];
  cpu_set_t before, after;
  mm_err err = {0};
  run r;
  open_run(&r, &ref, 1, &(ways){.family = MM_FAMILY_M2});
  feed(&r, 0, PROMPT, free_to_go);
  mm_backend_config c = r.f.backend->c;
  c.options.pin = true, c.place.local = mm_pool_cpus() - 1, c.place.ranks = mm_pool_cpus();
  mm_forward_close(&r.f);
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  assert_true(mm_forward_open(&r.f, &mm_ops_cpu, &c, &err));
  assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
  size_t last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(last, &before)) last--;
  assert_true(CPU_COUNT(&after) == 1 && CPU_ISSET(last, &after));
  feed(&r, 0, PROMPT, logits);
  assert_memory_equal(logits, free_to_go, VOCAB * sizeof *logits);
  close_run(&r);
  sched_setaffinity(0, sizeof before, &before);
  open_run(&r, &ref, 1, &(ways){.family = MM_FAMILY_M2});
  c.place.local++;
  mm_forward other;
  assert_false(mm_forward_open(&other, &mm_ops_cpu, &c, &err));
  assert_string_equal(err.code, "E_LIMITS");
  close_run(&r);
  ref_free(&ref);
}

TEST(threads_stay_and_sleep) {
  ref_model ref = ref_build(dims(MM_FAMILY_M2));
  float logits[PADDED];
  long sum, sum_after;
  run r;
  open_run(&r, &ref, 3, &(ways){.family = MM_FAMILY_M2});
  const long count = threads_now(&sum);
  assert_true(count >= 3);
  for (int i = 0; i < 20; i++) feed(&r, 0, PROMPT, logits);
  assert_int_equal(threads_now(&sum_after), count);
  assert_true(sum == sum_after);
  double worked = 1;
  for (int tries = 0; tries < 20 && worked >= 0.001;
       tries++) { /* past the looks for another run; what a busy machine takes is charged too */
    const double before = cpu_seconds();
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    worked = cpu_seconds() - before;
  }
  assert_true(worked < 0.001);
  close_run(&r);
  ref_free(&ref);
}

/* Memory prefetched ahead of an op, all of it once: where the first and the second thread begin, and nothing past the end. */
static void check_prefetch(mm_backend *b, const mm_packed *w, uint32_t lead, uint32_t row, unsigned i) {
  const uint8_t *const from = b->prefetch.from[i], *const end = mm_cpu_row_at(w, lead, w->n);
  assert_ptr_equal(from, mm_cpu_row_at(w, lead, row));
  assert_true(b->prefetch.bytes > 0 && from + b->prefetch.bytes <= end);
  const size_t pieces = b->prefetch.bytes * b->prefetch.count / 1024;
  b->prefetch.next = 0;
  for (size_t p = 0; p < pieces; p++) assert_true(mm_cpu_prefetch_piece(&b->prefetch));
  assert_false(mm_cpu_prefetch_piece(&b->prefetch));
}

static void check_halves(mm_backend *b, const mm_packed *w) {
  const uint32_t strips = (w->n + MM_CPU_ALONE - 1) / MM_CPU_ALONE;
  check_prefetch(b, w, 0, 0, 0);
  if (strips > 1) check_prefetch(b, w, 0, strips / 2 * MM_CPU_ALONE, 1);
  assert_int_equal(b->prefetch.count, strips > 1 ? 2 : 1);
}

TEST(next_weights) {
  for (int f = 0; f < 2; f++) {
    const mm_family family = f ? MM_FAMILY_M1 : MM_FAMILY_M2;
    ref_model ref = ref_build(dims(family));
    run r;
    open_run(&r, &ref, 2, &(ways){.family = family});
    mm_backend *b = r.f.backend;
    mm_batch batch = {.tokens = 1};
    mm_team_close(b->team), b->team = NULL; /* nobody asks but this test */
    b->batch = &batch;
    for (b->layer = 0; b->layer < r.w.layer_end; b->layer++) {
      const mm_layer_weights *y = &r.w.layer[b->layer];
      const bool lightning = y->output_gate.scheme, last = b->layer + 1 == r.w.layer_end;
      mm_cpu_prefetch_after(b, &y->qkv);
      check_halves(b, lightning ? &y->output_gate : &y->out);
      if (lightning) mm_cpu_prefetch_after(b, &y->output_gate), check_halves(b, &y->out);
      b->moe.active[0] = 1, b->moe.active[1] = 0;
      mm_cpu_prefetch_experts(b, 2, &y->w13);
      check_prefetch(b, &y->w13, 1, 0, 0), check_prefetch(b, &y->w13, 0, 0, 1);
      mm_cpu_prefetch_experts(b, 2, &y->w2);
      check_prefetch(b, &y->w2, 1, 0, 0), check_prefetch(b, &y->w2, 0, 0, 1);
      mm_cpu_prefetch_after(b, &y->w2);
      check_halves(b, last ? &r.w.head : &r.w.layer[b->layer + 1].qkv);
    }
    b->layer = 0, batch.tokens = 2, b->prefetch.count = 0;
    mm_cpu_prefetch_after(b, &r.w.layer[0].qkv);
    assert_int_equal(b->prefetch.count, 0); /* a prompt is not bounded by memory */
    close_run(&r);
    ref_free(&ref);
  }
}

/* A vector across two lines of the cache is read at half the rate: a prompt took 1.4 times as long. */
TEST(inputs_begin_lines) {
  ref_model ref = ref_build(dims(MM_FAMILY_M2));
  mm_err err = {0};
  run r;
  open_run(&r, &ref, 1, &(ways){.family = MM_FAMILY_M2});
  for (uint32_t width = 16; width <= 256; width += 16) {
    mm_act a;
    assert_true(mm_ops_cpu.act(r.f.backend, width, &a, &err));
    assert_int_equal((uintptr_t)a.data % 64, 0);
  }
  close_run(&r);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
