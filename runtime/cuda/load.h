/* The weights of a rank from their files to one arena of the device. Every address follows from the weights' shapes; no weight byte passes
 * the host's processor but on its way into a ring of pinned buffers, from where the copy engine takes it to its place, or to a landing
 * place if kernels are to change it (land.cu). */
#ifndef MM_CUDA_LOAD_H
#define MM_CUDA_LOAD_H

#include <functional>
#include <vector>

#include "loader/reader.h"
#include "runtime/cuda/upload.h"

/* How a load is done; the defaults are what measures best (`gpu bench load`). */
struct mm_cu_load_config {
  uint32_t buffers = 24;          /* of the ring, more than in_flight */
  size_t chunk = (size_t)8 << 20; /* bytes of a buffer */
  size_t piece = (size_t)1 << 20; /* bytes of one read */
  unsigned threads = 0;           /* that read; 0: as many as there are CPUs, 16 at most */
  uint32_t in_flight = 6;         /* chunks whose copies are queued */
  mm_read_path path = MM_READ_PROBE;
};

/* Bytes of one plane of a weight and what is to be done with them. */
struct mm_cu_landing {
  enum how { AS_IS, SPREAD, WIDEN } how = AS_IS; /* copied; rows moved apart to the pitch; numbers to f32 */
  uint64_t at = 0;                               /* in the arena */
  uint64_t bytes = 0;                            /* as stored */
  size_t row = 0, pitch = 0;                     /* SPREAD: bytes */
  mm_dtype from = MM_F32;                        /* WIDEN: BF16, F16, F32, or U8 for e8m0 */
  float factor = 1;                              /* WIDEN */
  const mm_packed *nibbles = nullptr;            /* codes to be put in pair order where they lie */
};
/* What lies at `from` (device memory), bytes [first, first + n) of the plane, as it came from its file, to base + at. A landing that is
 * not AS_IS. */
cudaError_t mm_cu_land(char *base, const mm_cu_landing &l, const void *from, uint64_t first, uint64_t n, cudaStream_t s);
/* After bytes [first, first + n) are there: whatever nibbles are whole now and were not before go into pair order. */
cudaError_t mm_cu_land_nibbles(char *base, const mm_cu_landing &l, uint64_t first, uint64_t n, cudaStream_t s);

struct mm_cu_load {
  ~mm_cu_load();
  mm_cu_load() = default;
  mm_cu_load(const mm_cu_load &) = delete;
  mm_cu_load &operator=(const mm_cu_load &) = delete;

  /* The plan, which needs no device: w becomes *out, whose pointers are set by run. w and out stay where they are until then. Errors as
   * mm_cu_describe. */
  bool matrix(const mm_packed *w, const char *name, mm_cu_weight *out, mm_err *err);
  /* w's values as f32, [lead, n, k]. */
  bool values(const mm_packed *w, const char *name, const float **out, mm_err *err);
  /* Room for `count` numbers. */
  void room(uint64_t count, const __nv_bfloat16 **out);

  /* Reading begins: no device is needed yet. */
  bool start(const mm_cu_load_config &config, mm_err *err);
  /* The arena is made on the current device, and everything lands there; then all pointers are set, and the ring is gone. */
  bool run(mm_cu_memory *memory, mm_err *err);

  uint64_t arena_bytes = 0, file_bytes = 0; /* of the plan */
  mm_read_stats stats = {};                 /* what was read, until all of it was on the device */

 private:
  struct hole {
    uint64_t at, bytes;
  };
  struct pipe;
  uint64_t place(uint64_t bytes, bool zero);
  bool plan_plane(const mm_packed *w, unsigned plane, const char *name, const mm_cu_landing &l, mm_err *err);
  uint32_t source_of(const void *p, uint64_t bytes, uint64_t *offset);
  bool open_ring(mm_err *err);
  bool zero_holes(char *base, cudaStream_t s, mm_err *err);
  bool take(pipe *p, const mm_chunk &c, uint32_t slot, mm_err *err);
  bool stream(pipe *p, mm_err *err);
  bool finish(char *base, mm_err *err);

  mm_cu_load_config config;
  std::vector<mm_cu_landing> landing;
  std::vector<mm_read_want> want; /* the tag is the landing's number */
  std::vector<mm_read_file> file;
  std::vector<const void *> mapping;                          /* of each file; NULL: memory */
  std::vector<hole> holes;                                    /* of the arena, to be zeros */
  std::vector<std::function<void(char *)>> settle;            /* sets pointers into the arena at its address */
  std::vector<std::function<bool(char *, mm_err *)>> by_host; /* what no file has: random numbers, values under quantising schemes */
  uint8_t *ring_map = nullptr, *ring = nullptr;
  size_t ring_bytes = 0;
  mm_reader *reader = nullptr;
};

#endif
