/* The checkpoints under $MM_GPU_MODELS with inputs rounded as their schemes say, on the CUDA backend against the CPU's. Rounding turns a
 * difference in the last bit into another code, and another code into other experts: rows of whole models part, so they are not compared
 * one by one.
 *
 * Ops: each is given the very numbers that the GPU's was given, which have the same codes on both sides, so its rows are as near as the
 * products allow (sides.h); $MM_SEEDS sequences (22), a checkpoint after the other. Errors planted in its other numbers must be found.
 * Models: the likelihood of 4,096 tokens of held-out text, off by no more than 2e-3 or four standard errors of the tokens' differences, and
 * where the most likely token is another, how near the CPU's first two lie. The text is fixed: no check of a model passes or fails by
 * chance. */
#include <math.h>

#include <algorithm>

#include "tests/ops/gpu.h"
#include "tests/ops/sides.h"
#include "tests/ops/whole.h"

enum { WINDOW = 512, WINDOWS = 8 };
#define NLL_LIMIT 2e-3
#define NEAR_TIE  0.5 /* logits: the more likely token is at most 1.6 times as likely */
/* Share of tokens with another choice though the CPU's first two differ by more: they went past other experts. Codes of four bits differ by
 * a third, so another one weighs more. */
#define FAR_SHARE      0.005
#define FAR_SHARE_E2M1 0.06

/* Prefills of two sequences and steps of two rows and of one, in the paired engine. */
static void feed_paired(const side &s, const std::vector<int32_t> &text) {
  std::vector<std::vector<int32_t>> seq(2);
  for (auto &x : seq) {
    const uint32_t from = g_rng.below((uint32_t)text.size() - 32);
    x.assign(text.begin() + from, text.begin() + from + 32);
  }
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  feed(s, seq, 0, 20);
  feed(s, seq, 20, 1);
  feed(s, one, 21, 1);
  feed(s, seq, 0, 1);
}

static mm_act_quant act_of(const mm_shards *shards) {
  mm_rank_weights w = {};
  mm_err err = {};
  must(mm_bind(&w, shards, 0, &err), err);
  const mm_act_quant act = w.layer[0].w2.scheme->act;
  mm_bind_close(&w);
  return act;
}

static void check_planted(const side &s, const std::string &name, const std::vector<int32_t> &text, mm_act_quant act) {
  static const char *const what[] = {"", "one code", "two rows", "one expert"};
  /* a step of 8-bit integers is a 127th of the largest: less than rounding to bf16; its codes are compared bit for bit (test_linear.cu) */
  const bool codes = act != MM_ACT_KEPT && act != MM_ACT_INT8_TOKEN;
  for (plant p : {PLANT_CODE, PLANT_ROWS, PLANT_EXPERT}) {
    if (p == PLANT_CODE && !codes) continue;
    g_plant = p;
    feed_paired(s, text);
    g_plant = PLANT_NOTHING;
    const size_t beyond = take_beyond();
    report_true(name + ": " + what[p] + " planted, found in " + std::to_string(beyond) + " rows", beyond > 0);
  }
}

/* The negative log-likelihood of every next token of a window, and the logits' rows. */
static std::vector<float> logits_of(const mm_shards *shards, const mm_ops *ops, const int32_t *ids, uint32_t threads) {
  mm_err err = {};
  mm_engine_config c = {};
  c.ops = ops, c.limits = {WINDOW, 1, WINDOW}, c.options.threads = threads, c.options.act_quant = true;
  mm_engine *e = mm_engine_open(shards, &c, &err);
  must(e != nullptr, err);
  const uint32_t vocab = shards->pack.model.vocab;
  std::vector<float> logits((size_t)WINDOWS * WINDOW * vocab);
  std::vector<uint32_t> out(WINDOW);
  for (uint32_t i = 0; i < WINDOW; i++) out[i] = i;
  for (uint32_t i = 0; i < WINDOWS; i++) {
    const mm_span span = {0, 0, WINDOW, 0};
    const mm_batch b = {WINDOW, ids + (size_t)i * WINDOW, 1, &span, WINDOW, out.data(), nullptr};
    must(mm_engine_step(e, &b, &logits[(size_t)i * WINDOW * vocab], &err), err);
  }
  mm_engine_close(e);
  return logits;
}

static double nll_of(const float *row, uint32_t vocab, int32_t next) {
  double most = -INFINITY, sum = 0;
  for (uint32_t v = 0; v < vocab; v++) most = std::max(most, (double)row[v]);
  for (uint32_t v = 0; v < vocab; v++) sum += exp(row[v] - most);
  return most + log(sum) - row[next];
}

/* coarse: inputs are codes of four bits. */
static void check_likelihood(const mm_shards *shards, const std::string &name, const std::vector<int32_t> &text, bool coarse) {
  const uint32_t vocab = shards->pack.model.vocab;
  const auto cpu = logits_of(shards, &mm_ops_cpu, text.data(), 8), gpu = logits_of(shards, &mm_ops_cuda, text.data(), 1);
  double difference = 0, squares = 0;
  size_t tokens = 0, others = 0, far = 0;
  for (size_t row = 0; row < (size_t)WINDOWS * WINDOW; row++) {
    const float *c = &cpu[row * vocab], *g = &gpu[row * vocab];
    const size_t a = std::max_element(c, c + vocab) - c, b = std::max_element(g, g + vocab) - g;
    others += a != b, far += a != b && c[a] - c[b] > NEAR_TIE;
    if (row % WINDOW == WINDOW - 1) continue;
    const double d = nll_of(g, vocab, text[row + 1]) - nll_of(c, vocab, text[row + 1]);
    difference += d, squares += d * d, tokens++;
  }
  const double error = sqrt(squares) / (double)tokens;
  report(name + ": likelihood of " + std::to_string(tokens) + " tokens, beside the CPU's", fabs(difference / (double)tokens),
         std::max(NLL_LIMIT, 4 * error));
  report(name + ": another choice for " + std::to_string(others) + " tokens, where no near tie, share", (double)far / (WINDOWS * WINDOW),
         coarse ? FAR_SHARE_E2M1 : FAR_SHARE);
}

void test_rounded() {
  const char *wanted = getenv("MM_SEEDS");
  const std::vector<std::string> folders = model_folders();
  const size_t seeds = wanted ? (size_t)atoi(wanted) : 22;
  for (size_t i = 0; i < folders.size(); i++) {
    const std::string name = folders[i].substr(folders[i].rfind('/') + 1) + ", inputs rounded";
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, folders[i].c_str(), &err), err);
    const std::vector<int32_t> text = held_out(name);
    if (text.size() < WINDOW * WINDOWS) {
      report_true(name + ": held-out ids in tests/data", false);
      continue;
    }
    const side s = open_side(&shards, recorded_paired(), 2, ROUNDED, true);
    for (size_t n = i; n < seeds; n += folders.size()) feed_paired(s, text), report_paired(name, false);
    const mm_act_quant act = act_of(&shards);
    check_planted(s, name, text, act);
    mm_engine_close(s.engine);
    if (!wanted) check_likelihood(&shards, name, text, mm_act_formats[act].code == MM_CODE_E2M1);
    mm_shards_close(&shards);
  }
}
