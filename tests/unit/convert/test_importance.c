/* Importance files: three containers with the same numbers, and what is refused of damaged ones. */
#include <math.h>
#include <stdlib.h>

#include "convert/calibration/importance.h"
#include "tests/unit/convert/moments.h"
#include "tests/unit/convert/rules.h"
#include "tests/unit/unit.h"

/* From memory of exactly that size, so that sanitizers see a byte too far. */
static bool parse(mm_importance *m, const bytes *b, uint8_t **data, mm_err *err) {
  *data = malloc(b->n ? b->n : 1);
  memcpy(*data, b->at, b->n);
  return mm_importance_parse(m, "file", *data, b->n, err);
}

static void check_row(const mm_importance *m, const char *end, uint32_t layer, uint32_t e, unsigned of, uint32_t cols) {
  mm_err err = {0};
  const uint8_t *values = NULL;
  float v;
  if (mm_importance_find(m, rule(end), layer, e, 3, cols, &values, &err) != MM_WEIGHED) fail_msg("%s, %u: %s", end, e, err.text);
  for (uint32_t j = 0; j < cols; j++) {
    memcpy(&v, values + j * sizeof v, sizeof v);
    assert_true(v == moment(of, j));
  }
}

static mm_weighing weighing(const mm_importance *m, const char *end, uint32_t layer, uint32_t e, uint32_t cols, mm_err *err) {
  const uint8_t *values = (const uint8_t *)1;
  mm_weighing w = mm_importance_find(m, rule(end), layer, e, 3, cols, &values, err);
  if (w == MM_TOO_FEW) assert_null(values);
  return w;
}

TEST(three_containers) {
  const bytes file[] = {gguf(), dat(), collected()};
  for (int i = 0; i < 3; i++) {
    mm_importance m;
    mm_err err = {0};
    uint8_t *data;
    if (!parse(&m, &file[i], &data, &err)) fail_msg("file %d: %s", i, err.text);
    check_row(&m, "q_proj.weight", 1, 0, 0, 6);
    check_row(&m, "experts.{e}.w2.weight", 0, 0, 1, 4);
    check_row(&m, "experts.{e}.w2.weight", 0, 2, 3, 4);
    if (i < 2) check_row(&m, "lm_head.weight", 0, 0, 2, 6);
    assert_int_equal(weighing(&m, "experts.{e}.w2.weight", 0, 1, 4, &err), MM_TOO_FEW); /* 31 tokens, or none */
    assert_int_equal(weighing(&m, "q_proj.weight", 0, 0, 6, &err), MM_NO_ENTRY);
    assert_int_equal(weighing(&m, "k_proj.weight", 1, 0, 6, &err), MM_NO_ENTRY);
    assert_int_equal(err.status, MM_OK);
    assert_int_equal(weighing(&m, "q_proj.weight", 1, 0, 5, &err), MM_WEIGHING_FAILED);
    assert_string_equal(err.code, "E_IMPORTANCE");
    assert_non_null(strstr(err.text, "expected 1 x 5"));
    mm_importance_close(&m);
    free(data);
  }
}

/* No file is read beyond its end, and none but the whole one is taken. */
TEST(cut_short) {
  const bytes file[] = {gguf(), dat(), collected()};
  const size_t whole[] = {file[0].n, file[1].n - 15, file[2].n}; /* what a .dat has behind its entries may be missing */
  for (int i = 0; i < 3; i++)
    for (size_t n = 0; n < whole[i]; n++) {
      bytes b = file[i];
      mm_importance m = {0};
      mm_err err = {0};
      uint8_t *data;
      b.n = n;
      if (parse(&m, &b, &data, &err)) fail_msg("file %d is taken with %zu of %zu bytes", i, n, whole[i]);
      assert_int_equal(err.status, MM_BAD_INPUT);
      mm_importance_close(&m);
      free(data);
    }
}

static size_t offset_of(const bytes *b, const char *text) {
  for (size_t i = 0; i + strlen(text) <= b->n; i++)
    if (memcmp(b->at + i, text, strlen(text)) == 0) return i;
  fail_msg("no %s", text);
  return 0;
}

TEST(damaged) {
  static const struct {
    const char *behind; /* bytes are written `skip` bytes behind this text */
    int skip;
    const char *with;
    size_t n;
    const char *says;
  } damage[] = {
      {"GGUF", 0, "\2", 1, "found version 2 of GGUF, expected 3"},
      {"GGUF", 4, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, "expected no more than the file has room for"},
      {"GGUF", 12, "\xff\xff\xff\xff\xff\xff\xff\x7f", 8, "expected no more than the file has room for"},
      {"general.type", 12, "x", 1, "found no general.type \"imatrix\", expected"},
      {"general.alignment", 4, "\x30", 1, "found general.alignment 48, expected a power of two"},
      {"general.alignment", 4, "\0", 1, "found general.alignment 0, expected a power of two"},
      {"imatrix.datasets", 4, "\x09", 1, "found type 9 of a value, expected 0 to 12"},
      {"imatrix.datasets", 8, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, "end of the file"},
      {"flags", 4, "\x0d", 1, "found type 13 of a value, expected 0 to 12"},
      {"flags", 4, "\x0b", 1, "end of the file"},
      {"attn_q.weight.counts", -15, "\0", 1, "NUL byte"},
      {"attn_q.weight.counts", 0, "\5", 1, "found 5 dimensions, expected 1 to 4"},
      {"attn_q.weight.counts", 0, "\0", 1, "1 to 4"},
      {"attn_q.weight.counts", 4, "\0", 1, "found dimension 0, expected"},
      {"attn_q.weight.in_sum2", 12, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, "found dimension 18446744073709551615, expected"},
      {"attn_q.weight.counts", 20, "\x0c", 1, "found type 12, expected 0 (F32)"},
      {"attn_q.weight.in_sum2", 24, "\x80", 1, "expected 64, where the one before it ends"},
      {"output.weight.in_sum2", 4, "\xff", 1, "expected an end within the file"},
      {"attn_q.weight.counts", -6, "kounts", 6, "found no .counts of it"},
      {"output.weight.in_sum2", -7, "in_xxxx", 7, NULL},
  };
  for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
    bytes b = gguf();
    mm_importance m = {0};
    mm_err err = {0};
    uint8_t *data;
    memcpy(b.at + (int)(offset_of(&b, damage[i].behind) + strlen(damage[i].behind)) + damage[i].skip, damage[i].with, damage[i].n);
    bool ok = parse(&m, &b, &data, &err);
    if (ok != !damage[i].says) fail_msg("damage %zu: %s", i, err.text);
    if (!ok && (strcmp(err.code, "E_IMPORTANCE") != 0 || !strstr(err.text, damage[i].says) || !strstr(err.text, "offset")))
      fail_msg("damage %zu: %s, expected %s", i, err.text, damage[i].says);
    mm_importance_close(&m);
    free(data);
  }
}

TEST(pointer) {
  static const char text[] = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n";
  bytes b = {.n = sizeof text - 1};
  memcpy(b.at, text, b.n);
  mm_importance m = {0};
  mm_err err = {0};
  uint8_t *data;
  assert_false(parse(&m, &b, &data, &err));
  assert_string_equal(
      err.text, "E_IMPORTANCE: file: offset 0: found a Git LFS pointer, expected safetensors or an importance matrix: run `git lfs pull`");
  mm_importance_close(&m);
  free(data);
}

/* Values are looked at when they are wanted. */
TEST(no_mean_squares) {
  static const float bad[] = {-1.0f, NAN, INFINITY};
  for (size_t i = 0; i < 3; i++) {
    bytes b = collected();
    mm_importance m;
    mm_err err = {0};
    uint8_t *data;
    memcpy(b.at + b.n - 8 - 4 * sizeof(float), &bad[i], sizeof(float));
    assert_true(parse(&m, &b, &data, &err));
    assert_int_equal(weighing(&m, "q_proj.weight", 1, 0, 6, &err), MM_WEIGHING_FAILED);
    char where[40];
    snprintf(where, sizeof where, "offset %zu", b.n - 8 - 4 * sizeof(float));
    assert_non_null(strstr(err.text, where));
    assert_non_null(strstr(err.text, ((const char *const[]){"found mean square -1, expected", "nan, expected", "inf, expected"})[i]));
    mm_importance_close(&m);
    free(data);
  }
}

/* So are counts of tokens: q_proj's 100 becomes a number that is none. */
TEST(no_counts) {
  static const float counts[] = {-1.0f, NAN, INFINITY};
  const float whole = 100;
  for (size_t i = 0; i < 4; i++) {
    bytes b = i < 3 ? gguf() : collected();
    size_t at = b.n - sizeof(int64_t);
    for (size_t j = 0; i < 3 && j + sizeof whole <= b.n; j += 4)
      if (memcmp(b.at + j, &whole, sizeof whole) == 0 && j < at) at = j;
    if (i < 3)
      memcpy(b.at + at, &counts[i], sizeof *counts);
    else
      memcpy(b.at + at, &(int64_t){-1}, sizeof(int64_t));
    mm_importance m;
    mm_err err = {0};
    uint8_t *data;
    assert_true(parse(&m, &b, &data, &err));
    assert_int_equal(weighing(&m, "q_proj.weight", 1, 0, 6, &err), MM_WEIGHING_FAILED);
    assert_non_null(strstr(err.text, "tokens, expected a finite number from 0 on"));
    mm_importance_close(&m);
    free(data);
  }
}

/* A file of more layers, or with more experts by name, is another model's. */
TEST(other_models) {
  const bytes file[] = {gguf(), dat(), collected()};
  for (int i = 0; i < 3; i++) {
    bytes b = file[i];
    mm_importance m;
    mm_err err = {0};
    uint8_t *data;
    assert_true(parse(&m, &b, &data, &err));
    assert_true(mm_importance_of_model(&m, &(mm_model){.layers = 2, .experts = 3}, &err));
    assert_false(mm_importance_of_model(&m, &(mm_model){.layers = 1, .experts = 3}, &err));
    assert_non_null(strstr(err.text, "found an entry of another model, expected 1 layers of 3 experts"));
    mm_importance_close(&m);
    free(data);
  }
}

TEST(weights) {
  static const float square[] = {0, 1, 7, 4};
  float w[4];
  mm_importance_weights((const uint8_t *)square, 4, w);
  assert_true(w[0] == 1e-4f && w[1] == 1.0f / 3 && w[2] == 7.0f / 3 && w[3] == 4.0f / 3);
}

int main(void) { return run_unit_tests(NULL, NULL); }
