/* The backends that whole models are compared on, in addition to the CPU's and CUDA's own. */
#ifndef MM_TESTS_OPS_SIDES_H
#define MM_TESTS_OPS_SIDES_H

#include <string>
#include <vector>

#include "runtime/engine/ops.h"

/* The CPU backend with every op's result rounded to bf16, which CUDA keeps, up or down by chance: how far such rounding alone moves a row,
 * another time each time. */
extern const mm_ops kNarrowOps;

/* The CUDA backend, eager, and with it the same op again in f32 on the very numbers that the GPU's op got, rows of both compared: no
 * difference adds up from op to op. Norms, attention and its caches are the CPU backend's; products, routing and experts are computed here,
 * where weights need widening only once. */
extern const mm_ops kPairedOps;
/* An act of that backend: the GPU's rows. */
std::vector<float> paired_rows(mm_act a, uint32_t rows);
/* One line on all ops since the last call. With `averages` the mean of all rows of attention and experts too, where rows are many. */
void report_paired(const std::string &what, bool averages);
/* How many rows of ops were off by more than they may be since the last report, which then does not count them. */
size_t take_beyond();

/* The lists of the CUDA backend's last select, of so many as the arrays hold (test_extended.cu). */
void read_blocks(const mm_backend *gpu, std::vector<uint32_t> *block, std::vector<uint32_t> *count);

/* An error for the pairs to find: of the numbers computed here, one code of one row's inputs is off by a step, two rows change places, or
 * one expert is another. */
enum plant { PLANT_NOTHING, PLANT_CODE, PLANT_ROWS, PLANT_EXPERT };
extern plant g_plant;

/* A router as numbers, and the scores by which experts are chosen. */
struct router_numbers {
  std::vector<float> w, bias; /* [experts, hidden], [experts] or empty */
  uint32_t experts, hidden;
  bool sigmoid;
  router_numbers(const mm_packed *w, const mm_packed *bias, bool sigmoid);
  std::vector<double> scores(const float *x) const; /* without the bias */
  std::vector<double> keys(const float *x) const;
};
std::vector<uint32_t> best_first(const std::vector<double> &key);

#endif
