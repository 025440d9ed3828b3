/* minimax-bench's results: every line of JSON is an object with the figures that the line of text has. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/json.h"
#include "runtime/bench/bench_result.h"
#include "tests/unit/unit.h"

static const mm_bench_case c = {"layers", "m2", 8, 2048, "block_fp8", "w4a16", "nvfp4", {4, 16}, 1024, 8192, 0, 0, 0};
static mm_bench_result r = {&c, 8, 16, 1, 1, 1, true, false, 3e12, 2.5e-4, 6e8, 2e-4, 101.5, 1, 0, {0}, {1.5e15, 7.5e14, 6.5e14}, 0, NULL};
static const double difference[3] = {1e-3, 2e-3, 2.5e-3};

static void print(int which, bool json) {
  switch (which) {
    case 0: mm_bench_print_copy(3e12, json); break;
    case 1: mm_bench_print_op(&r, "router", json); break;
    case 2: mm_bench_print_decode(&r, json); break;
    case 3: mm_bench_print_prefill(&r, json); break;
    default: mm_bench_print_mixed(&r, difference, json);
  }
}

static const char decode[] =
    "m2 x 8 block_fp8/w4a16/nvfp4, decode B=16 context 1024 fp8: 250.0 us, 64000.0 tokens/s, 101.5 experts "
    "a layer, 0.600 GB, floor 200.0 us, 1.25 x floor\n";

static const char mixed[] =
    "m2 x 8 block_fp8/w4a16/nvfp4, 16 tokens of context 1024 with a prefill chunk of 8192: 2500.0 us; "
    "alone 1000.0 and 2000.0 us, ratio 0.833\n";

/* The text that print writes to standard output. */
static size_t printed(int which, bool json, char *text, size_t cap) {
  FILE *f = tmpfile();
  int old = dup(1);
  assert_non_null(f);
  assert_true(fflush(stdout) == 0 && dup2(fileno(f), 1) == 1);
  print(which, json);
  assert_true(fflush(stdout) == 0 && dup2(old, 1) == 1);
  rewind(f);
  size_t n = fread(text, 1, cap - 1, f);
  text[n] = 0;
  close(old);
  fclose(f);
  return n;
}

static double figure(const mm_json *o, const char *key) {
  assert_non_null(mm_json_get(o, key));
  return mm_json_number(mm_json_get(o, key));
}

TEST(test_lines) {
  static const char *const text[] = {
      "device copy 3000 GB/s, read + write\n",
      "m2 block_fp8/w4a16/nvfp4 B=16 router: 250.00 us, 600.0 MB, 0.80 of copy, 101.5 experts a layer\n",
      decode,
      ("m2 x 8 block_fp8/w4a16/nvfp4, prefill T=8192: 0.25 ms, 0.03 ms a layer, 32768000 tokens/s, floor 0.20 ms, 0.80 of it; assumed: "
       "FP8 1.50, BF16 0.75, attention 0.65 PFLOP/s\n"),
      mixed,
  };
  for (int i = 0; i < 5; i++) {
    char line[1024];
    mm_err err = {0};
    printed(i, false, line, sizeof line);
    assert_string_equal(line, text[i]);
    size_t n = printed(i, true, line, sizeof line);
    assert_true(n > 0 && strchr(line, '\n') == line + n - 1);
    mm_json *o = mm_json_parse(line, n, "line", &err);
    assert_non_null(o);
    if (i == 0) assert_true(figure(o, "copy_bytes_per_s") == 3e12);
    if (i > 0) assert_string_equal(mm_json_str(mm_json_get(o, "expert_quant")), "w4a16");
    if (i > 0) assert_string_equal(mm_json_str(mm_json_get(o, "head")), "nvfp4");
    if (i > 0) assert_true(figure(o, "seconds") == (i == 4 ? 2.5e-3 : 2.5e-4) && figure(o, "layers") == 8 && figure(o, "tp") == 1);
    if (i == 1) assert_true(figure(o, "of_copy") == 0.8 && figure(o, "bytes") == 6e8 && figure(o, "experts_a_layer") == 101.5);
    if (i == 2) assert_true(figure(o, "tokens_per_s") == 64000 && figure(o, "floor_s") == 2e-4 && mm_json_bool(mm_json_get(o, "kv_fp8")));
    if (i == 3) assert_true(figure(o, "floor_fp8_ops_per_s") == 1.5e15 && figure(o, "floor_bf16_ops_per_s") == 7.5e14);
    if (i == 3) assert_true(figure(o, "floor_attention_ops_per_s") == 6.5e14);
    if (i == 4) assert_true(figure(o, "decode_alone_s") == 1e-3 && figure(o, "prefill_alone_s") == 2e-3);
    mm_json_free(o);
  }
}

TEST(test_ranks) {
  char line[1024];
  r.ranks = r.attn_tp = 2;
  printed(3, false, line, sizeof line);
  assert_int_equal(strncmp(line, "m2, tp 2, x 8 block_fp8/w4a16/nvfp4, prefill", 44), 0);
  printed(2, true, line, sizeof line);
  assert_non_null(strstr(line, "\"tp\":2,\"ep\":1,"));
  r.ep = 2;
  printed(3, false, line, sizeof line);
  assert_int_equal(strncmp(line, "m2, tp 2, ep 2, x 8 block_fp8/w4a16/nvfp4, prefill", 50), 0);
  printed(2, true, line, sizeof line);
  assert_non_null(strstr(line, "\"tp\":2,\"ep\":2,"));
  assert_null(strstr(line, "attn_tp"));
  assert_null(strstr(line, "wire"));
  r.ranks = r.ep = r.attn_tp = 1;
}

/* Of groups of attention the ranks of one, and what a rank sends. */
TEST(test_groups) {
  char line[1024];
  mm_err err = {0};
  r.ranks = 4, r.attn_tp = 2, r.wire = 3e6, r.gather[0] = 1e6, r.gather[1] = 515625, r.gather[2] = 281250;
  printed(2, false, line, sizeof line);
  assert_int_equal(strncmp(line, "m2, tp 4, attn-tp 2, x 8 ", 25), 0);
  assert_non_null(strstr(line, "1.25 x floor, 3.00 MB of rows sent, of them 1.00 gathered (0.52 as FP8, 0.28 as NVFP4)\n"));
  const size_t n = printed(2, true, line, sizeof line);
  mm_json *o = mm_json_parse(line, n, "line", &err);
  assert_non_null(o);
  assert_true(figure(o, "tp") == 4 && figure(o, "attn_tp") == 2 && figure(o, "wire_bytes") == 3e6 && figure(o, "gather_bytes") == 1e6);
  assert_true(figure(o, "gather_fp8_bytes") == 515625 && figure(o, "gather_nvfp4_bytes") == 281250);
  mm_json_free(o);
  r.ranks = r.attn_tp = 1, r.wire = r.gather[0] = 0;
}

TEST(test_median) {
  double odd[] = {5, 1, 4, 2, 3}, even[] = {4, 1, 3, 2}, one[] = {7};
  assert_true(mm_bench_median(odd, 5) == 3 && mm_bench_median(even, 4) == 3 && mm_bench_median(one, 1) == 7);
}

int main(void) { return run_unit_tests(NULL, NULL); }
