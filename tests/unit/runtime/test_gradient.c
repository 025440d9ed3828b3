/* The backward pass of small random models: what it gives of each linear, gradients with respect to its outputs times its inputs, is the
 * derivative of the log-likelihood with respect to a weight, which the f64 reference has as a difference; the same bits for any number of
 * threads; ids that the model draws; what is refused. Then the sums of a calibration. */
#include <unistd.h>

#include "formats/safetensors.h"
#include "runtime/cpu/cpu_fisher.h"
#include "runtime/cpu/cpu_gradient.h"
#include "tests/unit/runtime/reference.h"
#include "tests/unit/unit.h"

enum { T = 23, LINEARS = 64 };

/* What take was given: of each call the sum over rows of dy[i] · x[c] for all i and c. */
typedef struct given {
  uint32_t count, tensor[LINEARS], lead[LINEARS], rows[LINEARS], n[LINEARS], k[LINEARS];
  double *weight[LINEARS];
  float *dy[LINEARS];
} given;

static void take(void *ctx, const mm_gradient_rows *of) {
  given *g = ctx;
  const uint32_t n = of->w->n, k = of->w->k, at = g->count++;
  assert_true(at < LINEARS);
  g->tensor[at] = of->w->tensor, g->lead[at] = of->lead, g->rows[at] = of->rows, g->n[at] = n, g->k[at] = k;
  g->weight[at] = calloc((size_t)n * k, sizeof(double));
  g->dy[at] = malloc((size_t)of->rows * n * sizeof(float));
  memcpy(g->dy[at], of->dy, (size_t)of->rows * n * sizeof(float));
  for (uint32_t t = 0; t < of->rows; t++)
    for (uint32_t i = 0; i < n; i++)
      for (uint32_t c = 0; c < k; c++)
        g->weight[at][(size_t)i * k + c] += (double)of->dy[(size_t)t * n + i] * (double)of->x[(size_t)t * k + c];
}

static void given_close(given *g) {
  for (uint32_t i = 0; i < g->count; i++) free(g->weight[i]), free(g->dy[i]);
  *g = (given){0};
}

static const int32_t *ids(void) {
  static int32_t id[T + 1];
  for (uint32_t t = 0; t <= T; t++) id[t] = (int32_t)((t * t * 3 + t * 7 + 5) % 50);
  return id;
}

/* ln p of the ids under the f64 reference. */
static double log_likelihood(const ref_model *r) {
  ref_state s = ref_start(&r->m, T);
  double sum = 0, *logits = calloc(r->m.vocab, sizeof *logits);
  for (uint32_t t = 0; t < T; t++) {
    double all = 0;
    ref_step(r, &s, ids()[t], logits);
    for (uint32_t v = 0; v < r->m.vocab; v++) all += exp(logits[v]);
    sum += logits[ids()[t + 1]] - log(all);
  }
  free(logits);
  ref_stop(&s);
  return sum;
}

static void run(const ref_shards *s, unsigned threads, const mm_gradient_window *w, given *g, double *log_p) {
  mm_err err = {0};
  uint64_t bytes;
  mm_cpu_gradient *pass = mm_cpu_gradient_open(&s->s, T + 3, threads, &bytes, &err);
  if (!pass || !mm_cpu_gradient_run(pass, w, take, g, log_p, &err)) fail_msg("%s", err.text);
  assert_true(bytes > 0);
  mm_cpu_gradient_close(pass);
}

/* Row i of matrix `lead` of a packed tensor, in the reference's weights. */
static float *weight_row(const ref_model *r, const char *name, uint32_t lead, uint32_t i) {
  const mm_model *m = &r->m;
  const ref_layer *w = &r->layer[strtoul(name + strlen("model.layers."), NULL, 10)];
  const size_t H = m->hidden, I = m->intermediate, q = (size_t)m->heads * m->head_dim, kv = (size_t)m->kv_heads * m->head_dim;
  if (strstr(name, "w13_weight")) return i < I ? w->w1 + (lead * I + i) * H : w->w3 + (lead * I + i - I) * H;
  if (strstr(name, "w2_weight")) return w->w2 + (lead * H + i) * I;
  if (strstr(name, "output_gate")) return w->gate + i * H;
  if (strstr(name, "o_proj") || strstr(name, "out_proj")) return w->o + i * q;
  if (w->qkv) return w->qkv + i * H;
  return i < q ? w->q + i * H : i < q + kv ? w->k + (i - q) * H : w->v + (i - q - kv) * H;
}

static void check_family(mm_family family, bool postnorm) {
  ref_model r = ref_build(ref_dims(family, postnorm));
  ref_shards *s = ref_cut(&r, 1);
  const mm_gradient_window w = {ids(), ids() + 1, T, 1};
  given g = {0};
  double log_p, worst = 0;
  run(s, 2, &w, &g, &log_p);
  const double want = log_likelihood(&r);
  assert_true(fabs(log_p - want) < 1e-5 * fabs(want));
  uint32_t rows = 0, want_rows = 0; /* each expert has those that were routed to it */
  for (uint32_t j = 0; j < g.count; j++) rows += g.rows[j];
  for (uint32_t l = 0; l < r.m.layers; l++) want_rows += T * ((r.m.attn[l] == MM_ATTN_LIGHTNING ? 3 : 2) + 2 * r.m.top_k);
  assert_int_equal(rows, want_rows);
  for (uint32_t j = 0; j < g.count; j++) {
    const char *name = s->s.pack.tensor[g.tensor[j]].name;
    double size = 0;
    for (size_t i = 0; i < (size_t)g.n[j] * g.k[j]; i++) size += g.weight[j][i] * g.weight[j][i] / (g.n[j] * g.k[j]);
    for (uint32_t turn = 0; turn < (SANITIZED ? 1 : 2); turn++) {
      const uint32_t i = (turn * 7919 + j * 31) % g.n[j], c = (turn * 104729 + j * 17) % g.k[j];
      float *at = weight_row(&r, name, g.lead[j], i) + c;
      const float before = *at, step = 0x1p-14f; /* no row takes another expert */
      *at = before + step;
      double up = log_likelihood(&r), distance = (double)*at;
      *at = before - step;
      up -= log_likelihood(&r), distance -= (double)*at;
      *at = before;
      const double found = g.weight[j][(size_t)i * g.k[j] + c], error = fabs(found - up / distance) / sqrt(size);
      worst = fmax(worst, error);
      if (!(error < 1e-4)) fail_msg("%s, matrix %u, %u, %u: %g, expected %g", name, g.lead[j], i, c, found, up / distance);
    }
  }
  print_message("largest difference %.1e of a linear's derivatives\n", worst);
  given again = {0};
  run(s, 3, &w, &again, &log_p);
  assert_int_equal(again.count, g.count);
  for (uint32_t j = 0; j < g.count; j++) assert_memory_equal(again.dy[j], g.dy[j], (size_t)g.rows[j] * g.n[j] * sizeof(float));
  given_close(&g), given_close(&again);
  ref_uncut(s);
  ref_free(&r);
}

TEST(derivatives_of_m1) { check_family(MM_FAMILY_M1, true); }
TEST(derivatives_before_the_norm) { check_family(MM_FAMILY_M1, false); }
TEST(derivatives_of_m2) { check_family(MM_FAMILY_M2, false); }

/* Means of a calibration, under ids that the model draws: those of the gradients that the pass gives, whatever the threads. */
TEST(sums_of_drawn_ids) {
  ref_model r = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *s = ref_cut(&r, 1);
  mm_err err = {0};
  double log_p[2];
  given g = {0}, other = {0};
  const mm_gradient_window first = {ids(), NULL, T, 1}, second = {ids(), NULL, T, T + 1};
  run(s, 1, &first, &g, &log_p[0]);
  run(s, 1, &second, &other, &log_p[1]);
  assert_true(log_p[0] != log_p[1] && log_p[0] > -T * log(50.0) && log_p[1] > -T * log(50.0));
  mm_calibration *c = mm_calibration_open(&s->s, &err);
  const mm_cpu_fisher_config config = {&s->s, c, 128, T, 2};
  uint64_t sums, pass;
  mm_cpu_fisher *f = mm_cpu_fisher_open(&config, &sums, &pass, &err);
  if (!f || !mm_cpu_fisher_add(f, ids(), T, &err) || !mm_cpu_fisher_add(f, ids(), T, &err)) fail_msg("%s", err.text);
  char path[] = "/tmp/gradient.XXXXXX";
  int fd = mkstemp(path);
  mm_st st;
  assert_true(fd >= 0 && mm_calibration_write(c, fd, path, &err) && mm_st_open(&st, path, MM_BAD_INPUT, &err));
  const mm_st_tensor *out = mm_st_find(&st, "model.layers.2.self_attn.o_proj.weight.fisher"),
                     *rows = mm_st_find(&st, "model.layers.2.self_attn.o_proj.weight.fisher_rows"),
                     *qkv = mm_st_find(&st, "model.layers.0.self_attn.qkv_proj.weight.fisher"),
                     *up = mm_st_find(&st, "model.layers.1.block_sparse_moe.experts.w13_weight.fisher");
  assert_true(out && rows && qkv && up && !mm_st_find(&st, "lm_head.weight.fisher"));
  assert_true(out->shape.rank == 2 && out->shape.dim[0] == 1 && out->shape.dim[1] == 24 * 25 / 2);
  assert_true(qkv->shape.rank == 2 && qkv->shape.dim[0] == 3 && qkv->shape.dim[1] == 48 * 49 / 2); /* q has 48 rows, k and v 12 */
  assert_true(up->shape.rank == 3 && up->shape.dim[0] == 5 && up->shape.dim[1] == 2 && up->shape.dim[2] == 40 * 41 / 2);
  float mean[24 * 25 / 2];
  int64_t count = 0;
  assert_true(pread(fd, mean, sizeof mean, (off_t)out->offset) == sizeof mean && pread(fd, &count, 8, (off_t)rows->offset) == 8);
  assert_int_equal(count, 2 * T);
  uint32_t at = 0; /* of the last layer's output linear */
  while (strcmp(s->s.pack.tensor[g.tensor[at]].name, "model.layers.2.self_attn.o_proj.weight") != 0) at++;
  for (uint32_t i = 0; i < 24; i++)
    for (uint32_t j = 0; j <= i; j++) {
      double want = 0;
      for (uint32_t t = 0; t < T; t++)
        want += (double)g.dy[at][t * 24 + i] * (double)g.dy[at][t * 24 + j] +
                (double)other.dy[at][t * 24 + i] * (double)other.dy[at][t * 24 + j];
      assert_true(fabs((double)mean[i * (i + 1) / 2 + j] - want / (2 * T)) < 1e-6 * (1 + fabs(want)));
    }
  mm_st_close(&st);
  close(fd);
  unlink(path);
  mm_cpu_fisher_close(f);
  mm_calibration_close(c);
  given_close(&g), given_close(&other);
  ref_uncut(s);
  ref_free(&r);
}

TEST(refused) {
  ref_model m3 = ref_build(ref_dims(MM_FAMILY_M3, false)), m2 = ref_build(ref_dims(MM_FAMILY_M2, false));
  ref_shards *extended = ref_cut(&m3, 1), *cut = ref_cut(&m2, 2);
  mm_err err = {0};
  uint64_t bytes;
  assert_null(mm_cpu_gradient_open(&extended->s, T, 1, &bytes, &err));
  assert_string_equal(err.code, "E_DEVICE");
  err = (mm_err){0};
  assert_null(mm_cpu_gradient_open(&cut->s, T, 1, &bytes, &err));
  assert_string_equal(err.code, "E_PARALLEL");
  ref_uncut(extended), ref_uncut(cut);
  ref_free(&m3), ref_free(&m2);
}

int main(void) { return run_unit_tests(NULL, NULL); }
