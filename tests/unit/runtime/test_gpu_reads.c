/* The refusals that the converter foresees are those of the CUDA backend: random matrices of every scheme, on grids that kernels have and
 * on others. No GPU. */
#include <stdlib.h>
#include <string.h>

#include "loader/stream/gpu_reads.h"
#include "runtime/cuda/dispatch/described.h"
#include "tests/unit/unit.h"

static uint64_t state = 1;

static uint32_t below(uint32_t n) {
  state = state * UINT64_C(6364136223846793005) + 1442695040888963407;
  return (uint32_t)(state >> 33) % n;
}

static uint32_t one_of(const uint32_t *from, uint32_t n) { return from[below(n)]; }
#define ONE_OF(...) one_of((const uint32_t[]){__VA_ARGS__}, sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static mm_packed any_matrix(const mm_scheme *s) {
  mm_packed w = {.scheme = s, .lead = 1 + below(3), .n = 8 * (1 + below(40)), .k = ONE_OF(8, 16, 64, 100, 128, 192, 200, 256, 1536, 3072)};
  for (unsigned i = 0; i < s->plane_count; i++) w.cell[i] = s->plane[i].cell;
  if (below(2)) w.cell[1].n = ONE_OF(0, 1, 2, 48, 64, 96, 128);
  if (below(2)) w.cell[1].k = ONE_OF(0, 4, 8, 16, 24, 32, 48, 64, 128);
  if (below(2)) w.cut_k = ONE_OF(8, 16, 24, 32, 64, 96, 128, 192), w.first_k = w.cut_k, w.whole_k = 4 * w.k;
  return w;
}

TEST(test_matrices) {
  uint32_t taken = 0, scheme = 0, rounding = 0, count = 0;
  const uint32_t rounds = getenv("ROUNDS") ? (uint32_t)atoi(getenv("ROUNDS")) : 4000;
  for (size_t i = 0; mm_scheme_at(i); i++) {
    for (uint32_t j = 0; j < rounds; j++, count++) {
      const mm_packed w = any_matrix(mm_scheme_at(i));
      mm_cu_weight d;
      mm_err backend = {0}, foreseen = {0};
      const bool ok = mm_cu_describe(&w, "w", &d, &backend) && mm_cu_rounds(&w, "w", &backend);
      const bool here = mm_gpu_takes_matrix(&w, "w", &foreseen);
      if (ok != here || strcmp(backend.code, foreseen.code) != 0 || backend.status != foreseen.status)
        fail_msg("%s [%u, %u], scales per [%u, %u], cut at %u: found \"%s\", expected \"%s\"", w.scheme->name, w.n, w.k, w.cell[1].n,
                 w.cell[1].k, w.cut_k, foreseen.text, backend.text);
      taken += here, scheme += strcmp(foreseen.code, "E_SCHEME") == 0, rounding += strcmp(foreseen.code, "E_ACT_QUANT") == 0;
    }
  }
  assert_true(taken > count / 20 && scheme > count / 20 && rounding > 20); /* none of the three by rule of the others */
}

int main(void) { return run_unit_tests(NULL, NULL); }
