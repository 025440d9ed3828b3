/* Second moments of a calibration file: what is factored for experts that saw no token, one, ten and many, of inputs and of gradients; what
 * is refused of a file that holds other shapes, numbers that are not finite, or no second moments. */
#include <math.h>
#include <stdlib.h>

#include "convert/calibration/second_moments.h"
#include "tests/unit/convert/moments.h"
#include "tests/unit/convert/rules.h"
#include "tests/unit/unit.h"

enum { E = 4, K = 6, T = K * (K + 1) / 2 };
static const int64_t rows[E] = {0, 1, 10, 1000};

/* Entry (i, j) of expert e's moments: of the sum of a multiple of the identity and two squares, 0 where no token was seen. */
static double entry(int e, int i, int j) {
  const double a = sin(1 + i + 2.3 * e), b = sin(1 + j + 2.3 * e), c = cos(2 + 1.7 * i * (e + 1)), d = cos(2 + 1.7 * j * (e + 1));
  return rows[e] ? a * b + c * d + (i == j ? 0.1 + 0.02 * e : 0) : 0;
}

/* A file of one stack, w13 or w2 of layer 1, whose moments have the given shape in the header. */
static bytes file(const char *which, const char *shape, const char *type) {
  char header[900], name[80];
  bytes b = {.n = 0};
  snprintf(name, sizeof name, "model.layers.1.block_sparse_moe.experts.%s_weight", which);
  const int n =
      snprintf(header, sizeof header,
               "{\"%s.rows\":{\"dtype\":\"I64\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
               "\"%s.mean_square\":{\"dtype\":\"F32\",\"shape\":[%d,%d],\"data_offsets\":[%d,%d]},"
               "\"%s.moments\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}}",
               name, E, E * 8, name, E, K, E * 8, E * 8 + E * K * 4, name, type, shape, E * 8 + E * K * 4, E * 8 + E * K * 4 + E * T * 4);
  put_u64(&b, (uint64_t)n);
  put(&b, header, (size_t)n);
  put(&b, rows, sizeof rows);
  for (int e = 0; e < E; e++)
    for (int i = 0; i < K; i++) put_f32(&b, (float)entry(e, i, i));
  for (int e = 0; e < E; e++)
    for (int i = 0; i < K; i++)
      for (int j = 0; j <= i; j++) put_f32(&b, (float)entry(e, i, j));
  return b;
}

static const char whole[] = "[4,1,21]";

/* Opens b and finds the moments of layer 1; false with what is said in err. */
static bool find(mm_second_moments *of, mm_importance *m, const bytes *b, const char *end, uint32_t experts, uint32_t k, mm_err *err) {
  return mm_importance_parse(m, "file", b->at, b->n, err) && mm_second_moments_find(of, m, rule(end), 1, 0, experts, k, err);
}

/* The mixture as the header defines it, of mean diagonal 1 in the mean over the layer's tokens. */
static void check_mix(const char *which, const char *end, bool shared) {
  const bytes b = file(which, whole, "F32");
  mm_importance m;
  mm_second_moments of;
  mm_moment_factors w = {0};
  mm_err err = {0};
  if (!find(&of, &m, &b, end, E, K, &err)) fail_msg("%s", err.text);
  assert_non_null(of.entry);
  double pool[K][K] = {{0}}, mean = 0;
  for (int i = 0; i < K; i++)
    for (int j = 0; j < K; j++)
      for (int e = 0; e < E; e++) pool[i][j] += (double)rows[e] / 1011 * entry(e, i, j);
  for (int i = 0; i < K; i++) mean += pool[i][i] / (double)K;
  const uint32_t turn[] = {3, 0, 1, 2, 2, 0};
  for (size_t n = 0; n < 6; n++) {
    const int e = (int)turn[n];
    if (!mm_moment_factors_find(&w, &of, turn[n], &err)) fail_msg("%s", err.text);
    double diagonal = 0, mix[K][K];
    for (int i = 0; i < K; i++)
      for (int j = 0; j < K; j++)
        mix[i][j] = ((double)rows[e] * entry(e, i, j) + 64 * (shared ? pool[i][j] : i == j ? mean : 0)) / ((double)rows[e] + 64) / mean;
    for (int i = 0; i < K; i++) diagonal += mix[i][i] / (double)K;
    for (uint32_t i = 0; i < K; i++)
      for (uint32_t j = 0; j < K; j++) {
        const double want = mix[w.f.order[i]][w.f.order[j]] + (i == j ? 0.01 * diagonal + 1e-6 : 0);
        assert_true(fabs((double)w.f.moment[i * mm_feedback_stride(K) + j] - want) < 1e-5);
      }
  }
  mm_moment_factors_close(&w);
  mm_importance_close(&m);
}

TEST(few_tokens) {
  check_mix("w13", "experts.{e}.w1.weight", true);
  check_mix("w13", "experts.{e}.w3.weight", true);
  check_mix("w2", "experts.{e}.w2.weight", false);
}

static void refused(const bytes *b, uint32_t experts, uint32_t k, const char *says) {
  mm_importance m = {0};
  mm_second_moments of;
  mm_err err = {0};
  if (find(&of, &m, b, "experts.{e}.w1.weight", experts, k, &err)) fail_msg("taken: %s", says);
  assert_string_equal(err.code, "E_IMPORTANCE");
  if (!strstr(err.text, says) || !strstr(err.text, "w13_weight") || !strstr(err.text, "offset")) fail_msg("%s, not %s", err.text, says);
  mm_importance_close(&m);
}

TEST(other_files) {
  static const char *const shape[] = {"[4,21]",  "[84]",     "[2,2,21]", "[4,21,1]",  "[1,4,21]",
                                      "[4,3,7]", "[2,1,42]", "[1,1,84]", "[4,1,1,21]"};
  bytes b;
  for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
    b = file("w13", shape[i], "F32");
    refused(&b, E, K, ", expected F32 [blocks, b (b + 1) / 2] or");
  }
  b = file("w13", whole, "I32");
  refused(&b, E, K, "found I32 [4, 1, 21], expected F32 [blocks, b (b + 1) / 2] or");
  b = file("w13", whole, "F32");
  refused(&b, E + 1, K, "expected 5 x 6 from the model");
  refused(&b, E, K + 2, "expected 4 x 8 from the model");
  const float odd[] = {NAN, INFINITY, -INFINITY};
  for (size_t i = 0; i < 3; i++) {
    b = file("w13", whole, "F32");
    memcpy(b.at + b.n - (5 + i) * sizeof(float), &odd[i], sizeof(float));
    char where[40];
    snprintf(where, sizeof where, "offset %zu", b.n - (5 + i) * sizeof(float));
    refused(&b, E, K, where);
  }
  b = file("w13", whole, "F32");
  const int64_t none = -1;
  memcpy(b.at + b.n - E * T * 4 - E * K * 4 - sizeof none, &none, sizeof none);
  refused(&b, E, K, "found -1 tokens, expected 0 or more");
}

/* Numbers that no inputs have: the product of two columns is larger than their squares allow. */
TEST(no_second_moments) {
  bytes b = file("w13", whole, "F32");
  mm_importance m;
  mm_second_moments of;
  mm_moment_factors w = {0};
  mm_err err = {0};
  const float large = 100;
  memcpy(b.at + b.n - 3 * sizeof large, &large, sizeof large); /* of the last matrix: row 5, column 3 */
  assert_true(find(&of, &m, &b, "experts.{e}.w1.weight", E, K, &err));
  assert_false(mm_moment_factors_find(&w, &of, 3, &err));
  assert_int_equal(err.status, MM_BAD_INPUT);
  assert_non_null(strstr(err.text, "w13_weight"));
  assert_non_null(strstr(err.text, "no second moments"));
  mm_moment_factors_close(&w);
  mm_importance_close(&m);
}

/* ---- of gradients ---- */

enum { R = 5, PIECES = 2, BLOCKS = 2, T_OUT = R * (R + 1) / 2 }; /* source matrices of 5 and 3 rows, a block each */
static const uint32_t piece_rows[PIECES] = {R, 3};

/* Entry (i, j) of block b of expert e: 0 past the piece's rows. */
static double gradient(int e, int b, int i, int j) {
  if (!rows[e] || i >= (int)piece_rows[b] || j >= (int)piece_rows[b]) return 0;
  return (b + 1) * (cos(i + 0.7 * e) * cos(j + 0.7 * e) + (i == j ? 0.2 + 0.1 * e : 0));
}

/* The file above with moments of gradients. */
static bytes gradient_file(const char *which, const char *shape, const char *type) {
  char header[1400], name[80];
  bytes b = file(which, whole, "F32"), out = {.n = 0};
  uint64_t head;
  memcpy(&head, b.at, sizeof head);
  const int at = (int)(b.n - sizeof head - head);
  snprintf(name, sizeof name, "model.layers.1.block_sparse_moe.experts.%s_weight", which);
  const int n = snprintf(header, sizeof header,
                         "%.*s,\"%s.fisher_rows\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[%d,%d]},"
                         "\"%s.fisher\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%d,%d]}}",
                         (int)head - 1, (const char *)b.at + sizeof head, name, type, E, at, at + E * 8, name, shape, at + E * 8,
                         at + E * 8 + E * BLOCKS * T_OUT * 4);
  put_u64(&out, (uint64_t)n);
  put(&out, header, (size_t)n);
  put(&out, b.at + sizeof head + head, (size_t)at);
  put(&out, rows, sizeof rows);
  for (int e = 0; e < E; e++)
    for (int p = 0; p < BLOCKS; p++)
      for (int i = 0; i < R; i++)
        for (int j = 0; j <= i; j++) put_f32(&out, (float)gradient(e, p, i, j));
  return out;
}

static const char both[] = "[4,2,15]";

static bool find_outputs(mm_second_moments *of, mm_importance *m, const bytes *b, const char *end, uint32_t piece, mm_err *err) {
  mm_second_moments inputs;
  return mm_importance_parse(m, "file", b->at, b->n, err) && mm_second_moments_find(&inputs, m, rule(end), 1, 0, E, K, err) &&
         mm_output_moments_find(of, &inputs, rule(end), piece_rows, PIECES, piece, err);
}

/* Mixed with the layer's as inputs are, made a mean diagonal of 1, then with 0.4 of that mean. */
static void check_outputs(const char *which, const char *end, bool shared) {
  const bytes b = gradient_file(which, both, "I64");
  mm_moment_factors w = {0};
  mm_importance m;
  mm_err err = {0};
  for (uint32_t n = 0; n < 8; n++) {
    const uint32_t piece = n % PIECES, rows_here = piece_rows[piece];
    const int e = (int)(n * 3 % 8 / 2);
    mm_second_moments of;
    if (!find_outputs(&of, &m, &b, end, piece, &err)) fail_msg("%s", err.text);
    assert_non_null(of.entry);
    double pool[R][R] = {{0}}, mean = 0, all = 0, mix[R][R], diagonal = 0;
    for (uint32_t i = 0; i < rows_here; i++)
      for (uint32_t j = 0; j < rows_here; j++)
        for (int x = 0; x < E; x++) pool[i][j] += (double)rows[x] / 1011 * gradient(x, (int)piece, (int)i, (int)j);
    for (uint32_t i = 0; i < rows_here; i++) mean += pool[i][i] / rows_here;
    for (uint32_t i = 0; i < rows_here; i++)
      for (uint32_t j = 0; j < rows_here; j++)
        mix[i][j] = ((double)rows[e] * gradient(e, (int)piece, (int)i, (int)j) + 64 * (shared   ? pool[i][j]
                                                                                       : i == j ? mean
                                                                                                : 0)) /
                    ((double)rows[e] + 64);
    for (uint32_t i = 0; i < rows_here; i++) all += mix[i][i] / rows_here;
    for (uint32_t i = 0; i < rows_here; i++)
      for (uint32_t j = 0; j < rows_here; j++) mix[i][j] = mix[i][j] / all + (i == j ? 0.4 / 0.6 : 0);
    for (uint32_t i = 0; i < rows_here; i++) diagonal += mix[i][i] / rows_here;
    w.set = NULL; /* another file's */
    if (!mm_moment_factors_find(&w, &of, (uint32_t)e, &err)) fail_msg("%s", err.text);
    assert_int_equal(w.f.k, rows_here);
    for (uint32_t i = 0; i < rows_here; i++)
      for (uint32_t j = 0; j < rows_here; j++) {
        const double want = mix[w.f.order[i]][w.f.order[j]] + (i == j ? 0.01 * diagonal + 1e-6 : 0);
        assert_true(fabs((double)w.f.moment[i * mm_feedback_stride(R) + j] - want) < 1e-5);
      }
    mm_importance_close(&m);
  }
  mm_moment_factors_close(&w);
}

TEST(gradients_of_few_tokens) {
  check_outputs("w13", "experts.{e}.w1.weight", false);
  check_outputs("w2", "experts.{e}.w2.weight", true);
}

static void refused_outputs(const bytes *b, const char *says) {
  mm_importance m = {0};
  mm_second_moments of;
  mm_err err = {0};
  if (find_outputs(&of, &m, b, "experts.{e}.w1.weight", 0, &err)) fail_msg("taken: %s", says);
  assert_string_equal(err.code, "E_IMPORTANCE");
  if (!strstr(err.text, says) || !strstr(err.text, "w13_weight") || !strstr(err.text, "offset")) fail_msg("%s, not %s", err.text, says);
  mm_importance_close(&m);
}

TEST(other_gradients) {
  static const char *const shape[] = {"[4,30]", "[120]", "[4,2,3,5]", "[2,4,15]"}, *const model[] = {"[4,10,3]", "[4,5,6]", "[4,1,30]"};
  bytes b;
  for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
    b = gradient_file("w13", shape[i], "I64");
    refused_outputs(&b, "I64 .fisher_rows, expected F32 [blocks, r (r + 1) / 2] or");
  }
  for (size_t i = 0; i + 1 < sizeof model / sizeof *model; i++) {
    b = gradient_file("w13", model[i], "I64");
    refused_outputs(&b, "found moments of gradients of");
  }
  b = gradient_file("w13", model[2], "I64"); /* 30 is no triangle */
  refused_outputs(&b, "I64 .fisher_rows, expected F32 [blocks, r (r + 1) / 2] or");
  b = gradient_file("w13", both, "F64");
  refused_outputs(&b, "and F64 .fisher_rows, expected");
  b = gradient_file("w13", both, "I64");
  const float odd = NAN;
  memcpy(b.at + b.n - 7 * sizeof odd, &odd, sizeof odd);
  refused_outputs(&b, "nan, expected a finite one");
  b = gradient_file("w13", both, "I64");
  const int64_t none = -1;
  memcpy(b.at + b.n - E * BLOCKS * T_OUT * 4 - sizeof none, &none, sizeof none);
  refused_outputs(&b, "found -1 tokens, expected 0 or more");
}

int main(void) { return run_unit_tests(NULL, NULL); }
