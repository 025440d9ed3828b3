/* Whole models in the tests: sides to compare, what they are fed, and the small checkpoints under $MM_GPU_MODELS. */
#ifndef MM_TESTS_OPS_WHOLE_H
#define MM_TESTS_OPS_WHOLE_H

#include <string>
#include <vector>

#include "runtime/engine/engine.h"
#include "tests/ops/drift.h"

void must(bool ok, const mm_err &err);

enum inputs { KEPT, ROUNDED };
extern const char *const kInputs[];

struct side {
  mm_engine *engine;
  uint32_t vocab, hidden, layers;
  bool records;
};

/* Ops that record what the routers are given: the CPU's, the CPU's in bf16, the pairs (sides.h). */
const mm_ops *recorded_cpu();
const mm_ops *recorded_narrow();
const mm_ops *recorded_paired();

/* Steps of up to MM_WHOLE_ROWS rows of each slot. */
#define MM_WHOLE_ROWS 96
side open_side(const mm_shards *shards, const mm_ops *ops, uint32_t slots, inputs in, bool records, bool kv_fp8 = false,
               const std::vector<uint32_t> &taps = {});
/* Feeds ids [first, first + count) of every sequence, sequence i in slot i; all rows wanted. */
fed feed(const side &s, const std::vector<std::vector<int32_t>> &seq, uint32_t first, uint32_t count);
/* Token ids of the model's held-out text. */
std::vector<int32_t> held_out(const std::string &name);
/* The backend compared with itself, bit for bit: chunks, recorded steps, buckets, queued choices. Eight sequences of more than 96 ids. */
void check_itself(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in);
routers read_routers(const mm_shards *shards);
/* The checkpoints' folders, in order; a line and none without $MM_GPU_MODELS. */
std::vector<std::string> model_folders();

#endif
