/* Files of weights for tests and benchmarks of loading. */
#ifndef MM_TESTS_OPS_LOAD_FILES_H
#define MM_TESTS_OPS_LOAD_FILES_H

#include <unistd.h>

#include "runtime/cuda/core/load.h"
#include "tests/ops/gpu.h"
#include "tests/ops/whole.h"

struct named {
  const mm_packed *w;
  std::string name;
};

/* Below $MM_LOAD_DIR, $TMPDIR or /tmp. */
inline std::string scratch_file(const char *name) {
  const char *dir = getenv("MM_LOAD_DIR");
  if (!dir) dir = getenv("TMPDIR");
  return std::string(dir ? dir : "/tmp") + "/" + name;
}

/* A file on disk and in memory. */
struct mapped_file {
  std::string path;
  mm_file file = MM_FILE_NONE;
  mm_map map = {};
  explicit mapped_file(const std::string &p) : path(p) {}
  void open() {
    mm_err err = {};
    must(mm_file_open(&file, path.c_str(), &err) && mm_map_open(&map, &file, path.c_str(), &err), err);
  }
  ~mapped_file() {
    mm_map_close(&map);
    mm_file_close(&file);
    unlink(path.c_str());
  }
};

inline void write_all(const std::string &path, const std::vector<uint8_t> &bytes, uint64_t times) {
  FILE *f = fopen(path.c_str(), "wb");
  bool ok = f != nullptr;
  for (uint64_t i = 0; ok && i < times; i++) ok = fwrite(bytes.data(), 1, bytes.size(), f) == bytes.size();
  ok = ok && fflush(f) == 0 && fsync(fileno(f)) == 0;
  if (!ok || fclose(f) != 0) {
    perror(path.c_str());
    exit(1);
  }
}

/* Copies a weight to the device, or its values as f32: the reference of load.cu (upload_weight.cu). */
MM_MUST_USE bool upload_weight(mm_cu_memory *memory, const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err);
MM_MUST_USE bool upload_f32(mm_cu_memory *memory, const mm_packed *w, float **out, mm_err *err);

#endif
