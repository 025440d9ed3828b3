/* Number formats and schemes from the command line, for comparison with other people's libraries.
 *
 *   quant_codes cast FORMAT FIRST STRIDE COUNT >CODES       codes of the f32 with bit patterns FIRST, FIRST + STRIDE, … (modulo 2^32)
 *   quant_codes pack SCHEME SEARCH ROWS COLS <F32 >PLANES   the planes of a matrix, one after the other
 *
 * FORMAT: e4m3 e2m1 bf16. SEARCH: 0 absmax, 1 mse, 2 four_six. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"
#include "quant/quant.h"

enum { CHUNK = 1 << 16 };

static int cast(char **word) {
  uint32_t u = (uint32_t)strtoul(word[1], NULL, 0), stride = (uint32_t)strtoul(word[2], NULL, 0);
  static uint8_t byte[CHUNK];
  static uint16_t half[CHUNK];
  for (uint64_t left = strtoull(word[3], NULL, 0), n; left; left -= n) {
    n = mm_min(left, CHUNK);
    bool wide = strcmp(word[0], "bf16") == 0;
#define EACH(name, to, encode)    \
  if (strcmp(word[0], name) == 0) \
    for (uint64_t i = 0; i < n; i++) to[i] = encode(mm_f32_from_bits(u + (uint32_t)i * stride));
    EACH("e4m3", byte, mm_f32_to_e4m3)
    EACH("e2m1", byte, mm_f32_to_e2m1)
    EACH("bf16", half, mm_f32_to_bf16)
    u += (uint32_t)n * stride;
    if (fwrite(wide ? (void *)half : byte, wide ? 2 : 1, n, stdout) != n) return 5;
  }
  return 0;
}

static void *need(size_t bytes) {
  void *p = malloc(bytes);
  if (!p) exit(8);
  return p;
}

static int pack(char **word) {
  const mm_scheme *s = mm_scheme_find(word[0]);
  mm_pack_args a = {.n = (uint32_t)atoi(word[2]), .k = (uint32_t)atoi(word[3]), .search = (mm_search)atoi(word[1])};
  size_t count = (size_t)a.n * a.k;
  void *plane[MM_MAX_PLANES] = {0};
  if (!s) return 2;
  float *w = need(count * sizeof *w);
  if (fread(w, sizeof *w, count, stdin) != count) exit(3);
  for (size_t i = 0; i < count; i++) a.amax = fmaxf(a.amax, fabsf(w[i]));
  a.w = w;
  for (unsigned i = 0; i < s->plane_count; i++)
    plane[i] = need(mm_plane_elements(a.n, a.k, s->plane[i].cell) * mm_dtype_size(s->plane[i].dtype));
  s->pack(&a, plane);
  for (unsigned i = 0; i < s->plane_count; i++) {
    size_t n = mm_plane_elements(a.n, a.k, s->plane[i].cell);
    if (fwrite(plane[i], mm_dtype_size(s->plane[i].dtype), n, stdout) != n) exit(5);
    free(plane[i]);
  }
  free(w);
  return 0;
}

int main(int argc, char **argv) {
  if (argc == 6 && strcmp(argv[1], "cast") == 0) return cast(argv + 2);
  if (argc == 6 && strcmp(argv[1], "pack") == 0) return pack(argv + 2);
  return 2;
}
