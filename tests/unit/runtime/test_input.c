/* The reference backend's work between ops: activation quantisation of the inputs of linears and experts, whole and cut over ranks, and
 * what a calibration sees of them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/safetensors.h"
#include "quant/cpu.h"
#include "quant/numbers.h"
#include "tests/unit/quant/rounded.h"
#include "tests/unit/runtime/cpu_ranks.h"

enum { T = 14, N = 11, K = 192, WIDEST = 640 };

static const int32_t ids[T] = {0, 49, 7, 13, 14, 1, 2, 3, 40, 41, 42, 5, 6, 0};
static const mm_span span = {0, 0, T, 0};
static const mm_batch batch = {.tokens = T, .id = ids, .span_count = 1, .span = &span};

static void open_ranks_as(ranks *r, mm_model m, uint32_t tp, bool act_quant, bool input_bf16) {
  const mm_backend_config c = {.limits = {.max_tokens = T, .slots = 1, .max_positions = T},
                               .options.threads = 2,
                               .options.act_quant = act_quant,
                               .options.input_bf16 = input_bf16};
  open_backends(r, m, tp, c, WIDEST, !act_quant);
}
static void open_ranks(ranks *r, mm_model m, uint32_t tp, bool act_quant) { open_ranks_as(r, m, tp, act_quant, false); }

/* y = x·Wᵀ of the rank's w, or, without, the experts of layer 1. */
static void run(ranks *r, uint32_t rank, void *ctx) {
  const mm_packed *w = ctx;
  mm_backend *b = r->b[rank];
  const mm_layer_weights *l = &r->w[rank].layer[1];
  uint32_t hidden = r->ref.m.hidden;
  mm_act x = {r->x[rank].data, w ? w[rank].k : hidden}, y = {r->y[rank].data, w ? w[rank].n : hidden};
  if (w) {
    mm_ops_cpu.linear(b, y, x, &w[rank]);
    return;
  }
  mm_ops_cpu.route(b, 0, x, &l->router, &l->router_bias);
  mm_ops_cpu.experts(b, y, x, &l->w13, &l->w2);
}

/* Buffers wide enough for the linears below: 256 inputs of o_proj, for 192 with padding. */
static mm_model dims(void) {
  mm_model m = ref_dims(MM_FAMILY_M2, false);
  m.head_dim = 32;
  m.intermediate = 40;
  return m;
}

/* y = rounded(x)·Wᵀ, W cut along its columns over tp ranks, the last of which has `padding` columns more than there are. */
static void check_linear(mm_act_quant act, uint32_t tp, uint32_t padding, float fixed) {
  static float x[T * K], w[N * K], part[RANKS][N * K];
  mm_scheme scheme = *mm_scheme_find("f32");
  scheme.act = act;
  mm_packed cut[RANKS];
  ranks r;
  open_ranks(&r, dims(), tp, true);
  uint32_t k = K / tp;
  for (int i = 0; i < T * K; i++) x[i] = ldexpf(ref_random(), i % 7) * (i / K == 1 ? 1e-3f : 1);
  for (int i = 0; i < N * K; i++) w[i] = ref_random();
  for (uint32_t i = 0; i < tp; i++) {
    uint32_t first = i + 1 == tp ? i * k - padding : i * k; /* padding in front, where another rank has its own columns */
    uint32_t wide = i + 1 == tp ? k + padding : k, at = wide - k;
    cut[i] = (mm_packed){.scheme = &scheme, .lead = 1, .n = N, .k = wide, .plane = {part[i]}, .cell = {{1, 1}}, .input_scale = fixed};
    if (tp > 1) cut[i].first_k = first, cut[i].whole_k = K;
    for (uint32_t n = 0; n < N; n++)
      for (uint32_t j = 0; j < wide; j++) part[i][n * wide + j] = j < at ? 0 : w[n * K + first + j];
    for (uint32_t t = 0; t < T; t++)
      for (uint32_t j = 0; j < wide; j++) ((float *)r.x[i].data)[t * wide + j] = j < at ? 0 : x[t * K + first + j];
  }
  step(&r, &batch, run, cut, NULL);
  for (uint32_t t = 0; t < T; t++) {
    double rounded[K];
    ref_round(act, x + (size_t)t * K, K, fixed, rounded);
    for (uint32_t n = 0; n < N; n++) {
      double want = 0, found = 0, size = 0;
      for (uint32_t j = 0; j < K; j++) want += rounded[j] * w[n * K + j], size += fabs(rounded[j] * w[n * K + j]);
      for (uint32_t i = 0; i < tp; i++) found += ((float *)r.y[i].data)[t * N + n];
      if (!(fabs(found - want) <= 1e-6 * size))
        fail_msg("format %d, tp %u, token %u, output %u: found %.9g, expected %.9g", act, tp, t, n, found, want);
    }
  }
  close_ranks(&r);
}

TEST(linear) {
  for (mm_act_quant a = MM_ACT_KEPT; a <= MM_ACT_MXFP8; a++)
    for (uint32_t tp = 1; tp <= RANKS; tp *= 2) {
      check_linear(a, tp, 0, 0);
      check_linear(a, tp, 0, 0.01f);
      if (tp > 1) check_linear(a, tp, 7, 0);
    }
}

/* ---- products with packed weights, inputs as codes or in BF16 ---- */

static uint32_t below(uint32_t n) { return (uint32_t)(fabsf(ref_random()) * 1e6f) % n; }

/* A rank's columns: codes that are numbers, scales near one. */
static mm_packed random_codes(const mm_scheme *s, uint32_t k, uint8_t *plane[MM_MAX_PLANES]) {
  mm_packed w = {.scheme = s, .lead = 1, .n = N, .k = k};
  const uint32_t finer = 1u << below(3);
  for (unsigned i = 0; i < s->plane_count; i++) {
    const mm_plane *p = &s->plane[i];
    w.cell[i] = p->cell;
    if (i && p->cell.k > 32) w.cell[i].k /= finer;
    const size_t n = mm_plane_elements(N, k, w.cell[i]), size = mm_dtype_size(p->dtype);
    w.plane[i] = plane[i] = malloc(n * size);
    for (size_t at = 0; at < n; at++) {
      const float value = i ? 0.1f + fabsf(ref_random()) : ref_random();
      const uint16_t half = p->dtype == MM_F16 ? mm_f32_to_f16(value) : mm_f32_to_bf16(value);
      const uint32_t code = below(0x7f) | below(2) << 7, scale = p->dtype == MM_U8 ? 122 + below(6) : 0x28 + below(16);
      if (size == 4) memcpy(plane[i] + 4 * at, &value, 4);
      if (size == 2) memcpy(plane[i] + 2 * at, &half, 2);
      if (size == 1) plane[i][at] = (uint8_t)(i ? scale : code);
    }
  }
  return w;
}

/* Rows of every size, of zeros, with an infinity, with what is no number. */
enum { ROW_OF_ZEROS = 3, ROW_WITH_NAN = 7, ROW_WITH_INF = 10 };
static void random_rows(float *x, uint32_t k, int largest) {
  for (uint32_t t = 0; t < T; t++)
    for (uint32_t i = 0; i < k; i++) {
      const int size = t == 1 ? -50 : t == 5 ? largest : (int)(i / 16 % 7);
      x[(size_t)t * k + i] = t == ROW_OF_ZEROS ? 0 : ldexpf(ref_random(), size);
    }
  x[(size_t)ROW_WITH_NAN * k + below(k)] = NAN;
  x[(size_t)ROW_WITH_INF * k + below(k)] = below(2) ? INFINITY : -INFINITY;
}

static float nearest_bf16(float x) {
  int e;
  const double m = frexp((double)x, &e);
  return (float)ldexp(nearbyint(ldexp(m, 8)), e - 8);
}

/* A product with codes: what it should give, and of which magnitude its terms are. */
typedef struct coded {
  const mm_scheme *s;
  uint32_t k, tp;
  bool pad, act_quant; /* columns are padded to blocks of 128; inputs are rounded as the scheme says, or to BF16 */
  float fixed, x[T * WIDEST];
  double in[T][WIDEST]; /* as it should be multiplied */
  double want[T][N], size[T][N];
} coded;

static void coded_inputs(coded *c) {
  const mm_dtype type = c->s->plane[0].dtype;
  const bool bf16 = !c->act_quant && type != MM_F16 && type != MM_F32;
  random_rows(c->x, c->k, c->fixed > 0 ? 30 : 90);
  for (uint32_t t = 0; t < T; t++) {
    const float *x = c->x + (size_t)t * c->k;
    ref_round(c->act_quant ? c->s->act : MM_ACT_KEPT, x, c->k, c->fixed, c->in[t]);
    for (uint32_t j = 0; bf16 && j < c->k; j++) c->in[t][j] = nearest_bf16(x[j]);
  }
}

/* Rank i's columns of the weight, and of the inputs. */
static mm_packed coded_rank(coded *c, ranks *r, uint32_t i, uint8_t *plane[MM_MAX_PLANES]) {
  static float w[N * WIDEST];
  const uint32_t count = c->k / c->tp, from = i * count, first = c->pad ? from / 128 * 128 : from, at = from - first;
  const uint32_t wide = c->pad ? (at + count + 127) / 128 * 128 + (count % 128 ? 128 : 0) : count;
  mm_packed p = random_codes(c->s, wide, plane);
  p.input_scale = c->fixed;
  if (c->tp > 1) p.first_k = first, p.whole_k = c->k;
  float *const own = r->x[i].data;
  memset(own, 0, (size_t)T * wide * sizeof *own);
  mm_unpack(&p, 0, 0, N, w);
  for (uint32_t t = 0; t < T; t++) {
    memcpy(own + t * wide + at, c->x + (size_t)t * c->k + from, count * sizeof *own);
    for (uint32_t n = 0; n < N; n++)
      for (uint32_t j = 0; j < count; j++) {
        const double term = c->in[t][from + j] * (double)w[n * wide + at + j];
        c->want[t][n] += term, c->size[t][n] += fabs(term);
      }
  }
  return p;
}

/* The ranks' findings together; the bits of each are those of the plain loops. */
static void check_found(const coded *c, const ranks *r, mm_cpu level) {
  static float plain[RANKS][T * N];
  for (uint32_t t = 0; t < T; t++)
    for (uint32_t n = 0; n < N; n++) {
      const char *wrong = NULL;
      double found = 0;
      for (uint32_t i = 0; i < c->tp; i++) {
        const float y = ((float *)r->y[i].data)[t * N + n], *first = &plain[i][t * N + n];
        if (level == MM_CPU_PLAIN) plain[i][t * N + n] = y;
        if (memcmp(&y, first, sizeof y) != 0 && !(isnan(y) && isnan(*first))) wrong = "other bits than plain loops";
        found += (double)y;
      }
      if (t == ROW_WITH_NAN || (t == ROW_WITH_INF && c->fixed == 0)) {
        if (isfinite(found)) wrong = "a number, where an input is none";
      } else if (t != ROW_WITH_INF && !(fabs(found - c->want[t][n]) <= 1e-6 * c->size[t][n])) {
        wrong = "another number";
      }
      if (wrong)
        fail_msg("%s, k %u, tp %u, padded %d, rounded %d, scale %g, level %d, token %u, output %u: %s: %.9g, expected %.9g", c->s->name,
                 c->k, c->tp, c->pad, c->act_quant, (double)c->fixed, (int)level, t, n, wrong, found, c->want[t][n]);
    }
}

/* y = x·Wᵀ as it is computed with codes, over ranks whose columns are padded or are not: against doubles, the same bits at each level, of
 * each row whatever the others hold. */
TEST(codes) {
  for (uint32_t round = 0; round < 6; round++) {
    static coded c;
    mm_model m = dims();
    ranks r;
    const uint32_t tp = round == 0 ? 4 : 1u << below(4);
    m.hidden = WIDEST;
    open_ranks_as(&r, m, tp, round < 4, round >= 4);
    for (size_t i = 0; mm_scheme_at(i); i++) {
      uint8_t *plane[RANKS][MM_MAX_PLANES];
      mm_packed cut[RANKS];
      c = (coded){.s = mm_scheme_at(i), .tp = tp, .pad = round % 2 == 0, .act_quant = round < 4, .fixed = round == 3 ? 0.01f : 0};
      c.k = round == 0 ? 384 : tp * (1 + below(WIDEST / 2 / tp)); /* 384 over 4: the last rank has a padded block behind the last one */
      coded_inputs(&c);
      for (uint32_t j = 0; j < tp; j++) cut[j] = coded_rank(&c, &r, j, plane[j]);
      for (mm_cpu level = MM_CPU_PLAIN; level <= mm_cpu_best(); level++) {
        mm_cpu_limit(level);
        step(&r, &batch, run, cut, NULL);
        check_found(&c, &r, level);
      }
      for (uint32_t j = 0; j < tp; j++)
        for (unsigned p = 0; p < c.s->plane_count; p++) free(plane[j][p]);
    }
    close_ranks(&r);
  }
  mm_cpu_limit(MM_CPU_BEST);
}

/* logits = x·Wᵀ of the rows wanted: the head's inputs stay as they are whatever its scheme says of inputs. */
static void check_head(mm_act_quant act) {
  static float w[64 * K];
  static const uint32_t out[2] = {4, 1};
  mm_scheme scheme = *mm_scheme_find("f32");
  mm_batch wanted = batch;
  mm_err err = {0};
  float logits[2 * 64];
  ranks r;
  open_ranks(&r, dims(), 1, true);
  const uint32_t n = r.w[0].vocab_rows, k = r.w[0].head.k;
  assert_true(n <= 64 && k <= K);
  scheme.act = act;
  float *x = r.x[0].data;
  for (uint32_t i = 0; i < T * k; i++) x[i] = ldexpf(ref_random(), (int)(i % 7));
  for (uint32_t i = 0; i < n * k; i++) w[i] = ref_random();
  const mm_packed head = {.scheme = &scheme, .lead = 1, .n = n, .k = k, .plane = {w}, .cell = {{1, 1}}, .input_scale = 0.01f};
  wanted.out_count = 2, wanted.out = out;
  assert_true(mm_ops_cpu.begin(r.b[0], &wanted, &err));
  mm_ops_cpu.logits(r.b[0], (mm_act){x, k}, &head);
  assert_true(mm_ops_cpu.end(r.b[0], logits, &err));
  for (uint32_t i = 0; i < 2 * n; i++) {
    double want = 0, size = 0;
    for (uint32_t j = 0; j < k; j++) {
      const double term = (double)x[out[i / n] * k + j] * w[i % n * k + j];
      want += term, size += fabs(term);
    }
    if (!(fabs(logits[i] - want) <= 1e-6 * size)) fail_msg("format %d, logit %u: found %.9g, expected %.9g", act, i, logits[i], want);
  }
  close_ranks(&r);
}

TEST(inputs_of_the_head) {
  for (mm_act_quant a = MM_ACT_KEPT; a <= MM_ACT_MXFP8; a++) check_head(a);
}

/* Summed over the ranks, what the experts of layer 1 give for inputs that do not depend on tp. */
static void run_experts(mm_act_quant up, mm_act_quant down, uint32_t tp, double *out) {
  ranks r;
  ref_seed = 99;
  open_ranks(&r, dims(), tp, true);
  uint32_t hidden = r.ref.m.hidden, own = r.ref.m.intermediate / tp;
  mm_scheme scheme[2] = {*mm_scheme_find("f32"), *mm_scheme_find("f32")};
  scheme[0].act = up, scheme[1].act = down;
  for (uint32_t i = 0; i < T * hidden; i++)
    for (uint32_t j = 0; j < tp; j++) ((float *)r.x[j].data)[i] = sinf((float)(i * i + 1));
  for (uint32_t i = 0; i < tp; i++) {
    mm_layer_weights *l = &r.w[i].layer[1];
    l->w13.scheme = &scheme[0], l->w2.scheme = &scheme[1];
    if (tp > 1) l->w2.first_k = i * own, l->w2.whole_k = own * tp;
  }
  step(&r, &batch, run, NULL, NULL);
  for (uint32_t i = 0; i < T * hidden; i++) {
    out[i] = 0;
    for (uint32_t j = 0; j < tp; j++) out[i] += ((float *)r.y[j].data)[i];
  }
  close_ranks(&r);
}

/* Cut or not, experts round the same numbers to the same codes; both inputs are rounded. */
TEST(experts) {
  enum { OUT = T * 24 };
  for (mm_act_quant a = MM_ACT_FP8_TENSOR; a <= MM_ACT_MXFP8; a++) {
    double off[OUT], up[OUT], down[OUT], on[OUT], cut[OUT], distance[3] = {0};
    run_experts(MM_ACT_KEPT, MM_ACT_KEPT, 1, off);
    run_experts(a, MM_ACT_KEPT, 1, up);
    run_experts(MM_ACT_KEPT, a, 1, down);
    run_experts(a, a, 1, on);
    for (uint32_t tp = 2; tp <= 8; tp *= 2) {
      run_experts(a, a, tp, cut);
      for (int i = 0; i < OUT; i++)
        if (!(fabs(cut[i] - on[i]) <= 3e-6 * fmax(1, fabs(on[i])))) fail_msg("format %d, tp %u: %g, not %g", a, tp, cut[i], on[i]);
    }
    for (int i = 0; i < OUT; i++) {
      distance[0] = fmax(distance[0], fabs(up[i] - off[i]));
      distance[1] = fmax(distance[1], fabs(down[i] - off[i]));
      distance[2] = fmax(distance[2], fabs(on[i] - up[i]));
    }
    for (int i = 0; i < 3; i++) assert_true(distance[i] > 1e-4);
  }
}

/* ---- calibration ---- */

typedef struct sums {
  double square[5][64], amax[5];
  int64_t rows[5];
} sums;

static void add(sums *s, uint32_t e, const double *x, size_t n) {
  s->rows[e]++;
  for (size_t i = 0; i < n; i++) {
    s->square[e][i] += x[i] * x[i];
    s->amax[e] = fmax(s->amax[e], fabs(x[i]));
  }
}

/* One tensor of the file: [5] or [5, k] numbers. */
static const void *written(const mm_st *st, const uint8_t *bytes, const char *name, mm_dtype t, size_t count) {
  const mm_st_tensor *x = mm_st_find(st, name);
  assert_non_null(x);
  assert_int_equal(x->dtype, t);
  assert_int_equal(x->bytes, count * mm_dtype_size(t));
  return bytes + x->offset;
}

static void check_sums(const mm_st *st, const uint8_t *bytes, const char *stem, const sums *s, size_t k) {
  char name[3][96];
  snprintf(name[0], sizeof *name, "%s.mean_square", stem);
  snprintf(name[1], sizeof *name, "%s.amax", stem);
  snprintf(name[2], sizeof *name, "%s.rows", stem);
  const float *mean = written(st, bytes, name[0], MM_F32, 5 * k), *amax = written(st, bytes, name[1], MM_F32, 5);
  const int64_t *rows = written(st, bytes, name[2], MM_I64, 5);
  for (uint32_t e = 0; e < 5; e++) {
    assert_int_equal(rows[e], s->rows[e]);
    if (!(fabs(amax[e] - s->amax[e]) <= 1e-5 * s->amax[e])) fail_msg("%s, expert %u: amax %g, expected %g", stem, e, amax[e], s->amax[e]);
    for (size_t i = 0; i < k; i++) {
      double want = rows[e] ? s->square[e][i] / (double)rows[e] : 0;
      if (!(fabs(mean[e * k + i] - want) <= 1e-5 * want))
        fail_msg("%s, expert %u, %zu: %g, expected %g", stem, e, i, mean[e * k + i], want);
    }
  }
}

/* Two steps through the experts of layer 1, and what their w1, w3 and w2 were given by then. */
TEST(calibration) {
  ranks r;
  sums up = {0}, down = {0};
  mm_err err = {0};
  open_ranks(&r, dims(), 1, false);
  const mm_model *m = &r.ref.m;
  const ref_layer *w = &r.ref.layer[1];
  size_t H = m->hidden, I = m->intermediate;
  for (int turn = 0; turn < 2; turn++) {
    for (uint32_t i = 0; i < T * H; i++) ((float *)r.x[0].data)[i] = 2 * ref_random();
    step(&r, &batch, run, NULL, NULL);
    for (uint32_t t = 0; t < T; t++) {
      double x[64] = {0}, z[64] = {0}, weight[64] = {0}, gate[64] = {0}, top[64] = {0};
      uint32_t pick[64] = {0};
      for (size_t i = 0; i < H; i++) x[i] = ((float *)r.x[0].data)[t * H + i];
      ref_matvec(z, x, w->router, m->experts, H);
      ref_route(m, w->bias, z, pick, weight);
      for (uint32_t j = 0; j < m->top_k; j++) {
        ref_matvec(gate, x, w->w1 + pick[j] * I * H, I, H);
        ref_matvec(top, x, w->w3 + pick[j] * I * H, I, H);
        for (size_t i = 0; i < I; i++) top[i] *= gate[i] * ref_sigmoid(gate[i]);
        add(&up, pick[j], x, H);
        add(&down, pick[j], top, I);
      }
    }
  }
  char path[] = "/tmp/calibration.XXXXXX";
  int fd = mkstemp(path);
  assert_true(fd >= 0 && mm_calibration_write(r.calibration, fd, path, &err));
  mm_st st;
  mm_map map;
  mm_file f = MM_FILE_NONE;
  assert_true(mm_st_open(&st, path, MM_BAD_INPUT, &err) && mm_file_open(&f, path, &err) && mm_map_open(&map, &f, path, &err));
  assert_int_equal(st.count, 6); /* nothing else was given anything */
  check_sums(&st, map.data, "model.layers.1.block_sparse_moe.experts.w13_weight", &up, H);
  check_sums(&st, map.data, "model.layers.1.block_sparse_moe.experts.w2_weight", &down, I);
  mm_map_close(&map);
  mm_file_close(&f);
  mm_st_close(&st);
  close(fd);
  unlink(path);
  close_ranks(&r);
}

/* Sums of rows that a device made are what the rows themselves add, of ranks that hold parts of a row and of those that hold all of it. */
TEST(sums_of_a_device) {
  ranks r;
  mm_err err = {0};
  open_ranks(&r, dims(), 2, false);
  mm_calibration *device = mm_calibration_open(&r.shards->s, &err);
  assert_non_null(device);
  for (uint32_t i = 0; i < r.tp; i++) {
    const mm_layer_weights *y = &r.w[i].layer[1];
    const mm_packed *const some[] = {&y->qkv, &y->out, &y->w13, &y->w2};
    for (size_t n = 0; n < 4; n++) {
      const mm_packed *w = some[n];
      const uint32_t lead = n < 2 ? 0 : 3;
      float x[T * 256], amax[256] = {0};
      double square[256] = {0};
      assert_true(w->k <= 256);
      for (uint32_t t = 0; t < T * w->k; t++) {
        x[t] = (float)(3 * ref_random() + (double)i);
        square[t % w->k] += (double)x[t] * (double)x[t];
        amax[t % w->k] = fmaxf(amax[t % w->k], fabsf(x[t]));
      }
      mm_calibration_add(r.calibration, i, w, lead, x, NULL, T);
      mm_calibration_add_sums(device, i, w, lead, &(mm_calibration_sums){square, amax, T});
    }
  }
  char path[2][32] = {"/tmp/calibration.XXXXXX", "/tmp/calibration.XXXXXX"};
  char bytes[2][1 << 16];
  ssize_t size[2];
  for (int i = 0; i < 2; i++) {
    int fd = mkstemp(path[i]);
    assert_true(fd >= 0 && mm_calibration_write(i ? device : r.calibration, fd, path[i], &err));
    size[i] = pread(fd, bytes[i], sizeof bytes[i], 0);
    assert_true(size[i] > 0 && size[i] < (ssize_t)sizeof bytes[i]);
    close(fd);
    unlink(path[i]);
  }
  assert_true(size[0] == size[1] && memcmp(bytes[0], bytes[1], (size_t)size[0]) == 0);
  mm_calibration_close(device);
  close_ranks(&r);
}

/* A device that cannot is not asked twice. */
TEST(refused) {
  mm_err err = {0};
  mm_ops plain = mm_ops_cpu;
  plain.act_quant = false;
  ref_model ref = ref_build(dims());
  ref_shards *shards = ref_cut(&ref, 1);
  mm_engine_config c = {
      .ops = &plain, .limits = {.max_tokens = T, .slots = 1, .max_positions = T}, .options.threads = 1, .options.act_quant = true};
  assert_null(mm_engine_open(&shards->s, &c, &err));
  assert_string_equal(err.code, "E_ACT_QUANT");
  ref_uncut(shards);
  ref_free(&ref);
}

int main(void) { return run_unit_tests(NULL, NULL); }
