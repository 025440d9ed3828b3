/* Weights with zero points against their definition, and the words that hold them. */
#include "quant/cpu.h"
#include "tests/unit/quant/weights.h"

/* Zero points and scales of either sign on every grid, of any codes: (code - zero) · scale, rounded once. */
TEST(test_zero_points) {
  enum { N = 5, LEAD = 2, MOST = 700 };
  static const uint32_t group[] = {0, 128, 64, 32, 96, 8, 2};
  static uint8_t codes[LEAD * N * MOST];
  static uint32_t words[LEAD * N * MOST / 2];
  static float out[N * MOST];
  for (size_t i = 0; mm_scheme_at(i); i++)
    for (size_t j = 0; mm_has_zeros(mm_scheme_at(i)) && j < 6 * sizeof group / sizeof *group; j++) {
      const mm_scheme *s = mm_scheme_at(i);
      const uint32_t g = group[j / 6], unit = g ? g : 2, most = MOST / unit - 1;
      const uint32_t k = unit * (1 + (uint32_t)(uniform() * most));
      mm_packed m = {.scheme = s, .lead = LEAD, .n = N, .k = k, .plane = {codes, words}, .cell = {s->plane[0].cell, {1, g}}};
      for (size_t b = 0; b < sizeof codes; b++) codes[b] = (uint8_t)(uniform() * 256);
      for (size_t b = 0; b < sizeof words / sizeof *words; b++)
        words[b] = mm_scale_word((float)gaussian(),
                                 (int8_t)(uniform() * (s->code == MM_CODE_INT8 ? 256 : 16) - (s->code == MM_CODE_INT8 ? 128 : 8)));
      for (uint32_t lead = 0; lead < LEAD; lead++) {
        mm_cpu_limit(lead ? MM_CPU_BEST : MM_CPU_PLAIN);
        mm_unpack(&m, lead, 1, N - 1, out);
        for (uint32_t r = 1; r < N; r++)
          for (uint32_t c = 0; c < k; c++) {
            const size_t at = (size_t)lead * N + r, across = g ? (k + g - 1) / g : 1;
            const uint8_t byte = s->code == MM_CODE_INT8 ? codes[at * k + c] : codes[at * ((k + 1) / 2) + c / 2] >> (c % 2 ? 4 : 0) & 15;
            const uint32_t word = words[at * across + (g ? c / g : 0)];
            const float scale = mm_f32_from_bits(word >> 13 << 13);
            const int zero = (int)(word & 255) < 128 ? (int)(word & 255) : (int)(word & 255) - 256;
            const float want = (float)(((s->code == MM_CODE_INT8 ? (byte ^ 128) - 128 : byte - 8) - zero) * (double)scale);
            if (out[(r - 1) * k + c] != want)
              fail_msg("%s, k %u, group %u: [%u, %u] is %a, expected %a", s->name, k, g, r, c, (double)out[(r - 1) * k + c], (double)want);
          }
      }
    }
}

/* A word gives back every scale that F16 or BF16 has, and every zero point. */
TEST(test_words) {
  for (uint32_t i = 0; i < 65536; i++) {
    const int8_t zero = (int8_t)((int)(i % 256) - 128);
    const float scale[] = {mm_f16_to_f32((uint16_t)i), mm_bf16_to_f32((uint16_t)i)};
    for (int t = 0; t < 2; t++) {
      if (!isfinite(scale[t])) continue;
      const uint32_t word = mm_scale_word(scale[t], zero);
      assert_true(mm_f32_bits(mm_scale_value(MM_U32, &word, 0)) == mm_f32_bits(scale[t]) && mm_zero_value(&word, 0) == zero);
    }
  }
}

int main(void) { return run_unit_tests(NULL, NULL); }
