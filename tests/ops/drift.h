/* How far the rows of whole models drift between two sides, against what rounding to bf16 alone does, and what the routers of both
 * were given on the way. */
#ifndef MM_TESTS_OPS_DRIFT_H
#define MM_TESTS_OPS_DRIFT_H

#include <functional>

#include "formats/model.h"
#include "tests/ops/sides.h"

/* Outputs of a step, by row: logits[vocab], and the routers' inputs [layers][hidden]. */
struct fed {
  std::vector<float> logits, routed;
  void append(const fed &f) {
    logits.insert(logits.end(), f.logits.begin(), f.logits.end());
    routed.insert(routed.end(), f.routed.begin(), f.routed.end());
  }
};

struct routers {
  const mm_model *m;
  bool plain; /* no weights of the model are quantised */
  std::vector<router_numbers> layer;
};

/* Whose row is: of which sequence. Rows of a sequence ascend. */
typedef std::function<size_t(size_t)> sequence_of;

/* Effect of rounding to bf16 alone on the CPU: to the median row's logits, to its routers' inputs by layer, and to each row in the mean of
 * squares (of rows that stay together, 0 where none did); at most to each row and to any logit of it, in all tries and in those where the
 * row stays together. */
struct noise {
  double logits;
  std::vector<std::vector<uint32_t>> stays; /* of each try: in how many layers a row stays together */
  std::vector<double> layer, row;
  struct {
    std::vector<double> row, logit;
  } most[2]; /* all, together */
};
noise measure_noise(const routers &r, const fed &cpu, const std::vector<fed> &tries, const sequence_of &sequence);

/* How a side's rows compare with the CPU's. Rows that are far off, but by less than themselves, or choose another token although the CPU's
 * logits of both differ by more than they may move, must have taken other experts by scores of an input that until there was off by no
 * more than a row's may be, so at a near tie, or follow such a row of their sequence. */
struct comparison {
  std::vector<double> times;            /* rows that still have the CPU's experts: their errors over what rounding does to them */
  std::vector<size_t> together, fewest; /* by layer: rows of this side that do, and of the CPU in the try with the fewest */
  uint32_t differ = 0, ties = 0, after = 0, unexplained = 0;
  std::vector<std::string> rows;
};

/* By sequence: the lowest layer in which a row compared so far took other experts at a near tie. Later rows of the sequence read what
 * that row left in the caches of the layers above. */
typedef std::vector<uint32_t> tied_layers;
static const uint32_t kNone = UINT32_MAX;

/* Rows of the CPU against those of the GPU, reported and added to `all`; again() gives what more tries do to the CPU. */
void compare(const std::string &what, const routers &r, const fed &cpu, const fed &gpu, const sequence_of &sequence, tied_layers *tied,
             const noise &moved, const std::function<noise()> &again, comparison *all);
/* The middle of all, and of each layer the rows that still have the CPU's experts: at least a quarter as many as in the try of bf16 with
 * the fewest. */
void report_drift(const std::string &what, const comparison &all);

double median(std::vector<double> v); /* of none 0 */

#endif
