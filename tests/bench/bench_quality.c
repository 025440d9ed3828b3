/* Gains of scale searches in weight space: SQNR of every scheme and search on a Gaussian and a Student-t (5 degrees of freedom)
 * matrix, 1024 x 2048, sigma 0.02, values exact in bf16; then the gains that are asked for. Exit status 1 if a search is worse than
 * absmax or a gain falls short of what the same search gave in an independent measurement by more than 0.06 dB, the
 * spread between samples. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/numbers.h"
#include "quant/quant.h"

enum { N = 1024, K = 2048, SHAPES = 2, SEARCHES = MM_SEARCH_FOUR_SIX + 1 };
static const char *const shape_word[SHAPES] = {"Gaussian", "Student-t"};
static const char *const search_word[SEARCHES] = {"absmax", "mse", "four_six"};

static double uniform(void) { /* (0, 1), splitmix64 */
  static uint64_t state = 1;
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return ((double)((z ^ z >> 31) >> 11) + 0.5) * 0x1p-53;
}
static double gaussian(void) { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()); }
static double student(void) {
  double x = gaussian(), s = 0;
  for (int i = 0; i < 5; i++) s += pow(gaussian(), 2);
  return x / sqrt(s / 5);
}

static float weights[SHAPES][N * K], restored[N * K];

static double sqnr(const float *w, double noise) {
  double signal = 0;
  for (int i = 0; i < N * K; i++) signal += (double)w[i] * (double)w[i];
  return 10 * log10(signal / noise);
}

static double sqnr_of(const mm_scheme *s, mm_search search, const float *w) {
  mm_pack_args a = {.w = w, .n = N, .k = K, .search = search};
  mm_packed m = {.scheme = s, .lead = 1, .n = N, .k = K};
  void *plane[MM_MAX_PLANES] = {0};
  for (int i = 0; i < N * K; i++) a.amax = fmaxf(a.amax, fabsf(w[i]));
  for (unsigned i = 0; i < s->plane_count; i++) {
    m.cell[i] = s->plane[i].cell;
    m.plane[i] = plane[i] = malloc(mm_plane_elements(N, K, m.cell[i]) * mm_dtype_size(s->plane[i].dtype));
    if (!plane[i]) exit(8);
  }
  s->pack(&a, plane);
  mm_unpack(&m, 0, 0, N, restored);
  double noise = 0;
  for (int i = 0; i < N * K; i++) noise += pow((double)w[i] - (double)restored[i], 2);
  for (unsigned i = 0; i < s->plane_count; i++) free(plane[i]);
  return sqnr(w, noise);
}

/* Two rules of other tools that are no search of ours. */
static double amax_of(const float *w, int n) {
  double most = 0;
  for (int i = 0; i < n; i++) most = fmax(most, fabs((double)w[i]));
  return most;
}
static double sqnr_int4_seventh(const float *w) { /* s = amax/7 of 128 */
  double noise = 0;
  for (int g = 0; g < N * K; g += 128) {
    double s = amax_of(w + g, 128) / 7;
    for (int i = g; i < g + 128; i++) noise += pow((double)w[i] - s * rint((double)w[i] / s), 2);
  }
  return sqnr(w, noise);
}
static double sqnr_mxfp4_floor(const float *w) { /* the exponent of amax less 2, of 32 */
  static const double value[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  double noise = 0;
  for (int g = 0; g < N * K; g += 32) {
    double s = ldexp(1, ilogb(amax_of(w + g, 32)) - 2);
    for (int i = g; i < g + 32; i++) {
      double least = (double)INFINITY;
      for (int c = 0; c < 8; c++) least = fmin(least, fabs(fabs((double)w[i]) - value[c] * s));
      noise += least * least;
    }
  }
  return sqnr(w, noise);
}

/* The gain of a search over something, on one shape: what is asked, and what that measurement has for the same two rules. */
static int print_gain(const char *name, int shape, double gain, double wanted, double known) {
  printf("%-42s %-10s %6.2f  %6.2f %-7s %6.2f%s\n", name, shape_word[shape], gain, wanted, gain >= wanted ? "met" : "missed", known,
         gain < known - 0.06 ? "  WORSE" : "");
  return gain < known - 0.06;
}

int main(void) {
  int wrong = 0;
  for (int i = 0; i < N * K; i++) {
    weights[0][i] = mm_bf16_to_f32(mm_f32_to_bf16((float)(0.02 * gaussian())));
    weights[1][i] = mm_bf16_to_f32(mm_f32_to_bf16((float)(0.02 * student())));
  }
  printf("%-16s %-9s", "SQNR, dB", "search");
  for (int d = 0; d < SHAPES; d++) printf(" %10s", shape_word[d]);
  puts("");
  for (size_t i = 0; mm_scheme_at(i); i++) {
    const mm_scheme *s = mm_scheme_at(i);
    double absmax[SHAPES] = {0};
    for (int search = 0; s->code != MM_CODE_PLAIN && search < SEARCHES; search++) {
      if (search != MM_SEARCH_ABSMAX && !(s->searches >> search & 1)) continue;
      printf("%-16s %-9s", s->name, search_word[search]);
      for (int d = 0; d < SHAPES; d++) {
        double db = sqnr_of(s, (mm_search)search, weights[d]);
        if (search == MM_SEARCH_ABSMAX) absmax[d] = db;
        bool worse = search == MM_SEARCH_MSE && db < absmax[d];
        printf(" %10.3f%s", db, worse ? " WORSE" : "");
        wrong += worse;
      }
      puts("");
    }
  }
  printf("\n%-42s %-10s %6s  %6s %-7s %6s\n", "gain, dB", "", "found", "wanted", "", "§4.2");
  const mm_scheme *nvfp4 = mm_scheme_find("nvfp4"), *w4a16 = mm_scheme_find("w4a16"), *mxfp4 = mm_scheme_find("mxfp4");
  static const double known[SHAPES][4] = {{1.37, 0.59, 1.70, 0.19}, {1.02, 0.47, 1.80, 0.26}};
  for (int d = 0; d < SHAPES; d++) {
    const float *w = weights[d];
    double best = sqnr_of(nvfp4, MM_SEARCH_MSE, w);
    wrong += print_gain("nvfp4 mse over absmax", d, best - sqnr_of(nvfp4, MM_SEARCH_ABSMAX, w), 1.3, known[d][0]);
    wrong += print_gain("nvfp4 mse over four_six", d, best - sqnr_of(nvfp4, MM_SEARCH_FOUR_SIX, w), 0.5, known[d][1]);
    wrong += print_gain("w4a16 mse over amax/7", d, sqnr_of(w4a16, MM_SEARCH_MSE, w) - sqnr_int4_seventh(w), 1.6, known[d][2]);
    wrong += print_gain("mxfp4 mse over the floor exponent", d, sqnr_of(mxfp4, MM_SEARCH_MSE, w) - sqnr_mxfp4_floor(w), 0.2, known[d][3]);
  }
  return wrong != 0;
}
