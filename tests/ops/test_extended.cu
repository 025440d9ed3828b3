/* Extended models (mm_model_extended) under $MM_GPU_MODELS on the CUDA backend: each op compared with the CPU's on the very numbers that
 * the GPU's was given, the blocks of each row forced to be the GPU's where a near tie makes them others (sides.h); and the backend compared
 * with itself, bit for bit. Sequences are long enough that most blocks are left out: random ids, no text. */
#include "runtime/cuda/backend.h"
#include "tests/ops/gpu.h"
#include "tests/ops/sides.h"
#include "tests/ops/whole.h"

void read_blocks(const mm_backend *gpu, std::vector<uint32_t> *block, std::vector<uint32_t> *count) {
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemcpy(block->data(), gpu->attention.select.block, block->size() * 4, cudaMemcpyDeviceToHost));
  CUDA_OK(cudaMemcpy(count->data(), gpu->attention.select.count, count->size() * 4, cudaMemcpyDeviceToHost));
}

/* A prompt in chunks, of which the second ends inside a page and a block, then single rows. */
static void check_ops(const mm_shards *shards, const std::string &name, const std::vector<std::vector<int32_t>> &seq, inputs in) {
  const side s = open_side(shards, &kPairedOps, (uint32_t)seq.size(), in, true);
  side plain = s;
  plain.records = false;
  uint32_t at = 0;
  for (const uint32_t count : {96u, 71u, 96u, 96u}) feed(plain, seq, at, count), at += count;
  report_paired(name + ": prompts in chunks" + kInputs[in], true);
  for (uint32_t i = 0; i < 12; i++) feed(plain, seq, at++, 1);
  report_paired(name + ": single rows" + kInputs[in], false);
  const std::vector<std::vector<int32_t>> one(1, seq[0]);
  for (uint32_t t = 0; t < 96; t++) feed(plain, one, t, 1);
  report_paired(name + ": one sequence from its first token" + kInputs[in], false);
  mm_engine_close(s.engine);
}

void test_extended() {
  for (const std::string &folder : model_folders()) {
    mm_shards shards = {};
    mm_err err = {};
    must(mm_shards_open(&shards, folder.c_str(), &err), err);
    const std::string name = folder.substr(folder.rfind('/') + 1);
    if (mm_model_extended(&shards.pack.model)) {
      std::vector<std::vector<int32_t>> seq(8);
      for (auto &ids : seq) {
        for (uint32_t i = 0; i < 400; i++) ids.push_back((int32_t)g_rng.below(shards.pack.model.vocab));
      }
      check_ops(&shards, name, {seq.begin(), seq.begin() + 2}, KEPT);
      check_itself(&shards, name, seq, KEPT);
    }
    mm_shards_close(&shards);
  }
}
