/* The size of the KV cache: how many pages a device holds in addition to a rank's weights, buffers and lightning states. All of it follows
 * from shapes, before a weight is read. The engine sizes its cache by it, and minimax-convert --gpu-memory judges by it. */
#ifndef MM_LOADER_CAPACITY_H
#define MM_LOADER_CAPACITY_H

#include "loader/bind.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_PAGE 64 /* tokens of a page of the KV cache, in every backend */

/* Shares of a device's memory that a run may take unless --gpu-memory-utilization says otherwise. A GPU's holds weights, buffers,
 * states, cache and MM_GPU_OVERHEAD. A CPU's holds cache and states alone; the rest is for the weights, which stay in the page cache. */
#define MM_GPU_SHARE 0.9
#define MM_CPU_SHARE 0.5
/* Bytes of a GPU for what no formula counts: the driver's context, the code of kernels, recorded steps, the allocator's rounding. */
#define MM_GPU_OVERHEAD (UINT64_C(1) << 30)

/* Defaults of the engine that minimax-serve opens. */
#define MM_DEFAULT_SLOTS       16
#define MM_DEFAULT_STEP_TOKENS 512
#define MM_DEFAULT_DRAFTS      7 /* tokens proposed for a step of a request, or none: mm_proposals_fit */

typedef enum mm_cache_type { MM_CACHE_F32, MM_CACHE_BF16, MM_CACHE_FP8 /* with an f32 scale for each token and head */ } mm_cache_type;

/* The properties of a run that its need of memory follows from. */
typedef struct mm_demand {
  bool gpu;             /* weights and buffers lie in the device's memory; else only cache and states count */
  uint32_t step_tokens; /* rows of one step */
  uint32_t outs;        /* rows of a step whose logits are wanted at most; 0: all */
  uint32_t slots;       /* sequences with caches */
  uint32_t positions;   /* tokens of one sequence */
  uint32_t taps;        /* layers whose output is kept */
  mm_cache_type cache;
  bool index_fp8; /* index keys in e4m3 with an f32 scale each; else bf16 on a GPU, f32 on a CPU */
  bool act_quant, calibration;
  bool batch_invariant; /* steps are padded, so that the rows of each are computed alike */
  bool across;          /* the ranks of a stage are in several processes */
  bool attached;        /* another process holds the weights in the device's memory */
} mm_demand;

/* Bytes of one rank. */
typedef struct mm_rank_memory {
  uint64_t weights; /* as the device stores them */
  uint64_t buffers; /* of steps, sampling and sums over ranks */
  uint64_t states;  /* of the lightning layers, all slots */
  uint64_t page;    /* of one page of the KV cache, all layers; 0: no layer of the stage keeps any */
} mm_rank_memory;

/* Counts the memory of a bound rank, whose planes are not read and may be NULL. On a GPU weights that no kernel reads count as they are
 * stored. */
MM_MUST_USE bool mm_rank_memory_of(mm_rank_memory *out, const mm_model *m, const mm_rank_weights *w, const mm_demand *d, mm_err *err);

/* A device's memory. */
typedef struct mm_device_memory {
  uint64_t total, free; /* bytes; free: before this run takes any */
  uint32_t ranks;       /* of this run that use it, each an equal part */
  double share;         /* of total, that they may take together */
} mm_device_memory;

/* Bytes that one rank has for its cache, or lacks even without one. */
typedef struct mm_cache_capacity {
  uint64_t bytes, lack;
} mm_cache_capacity;
mm_cache_capacity mm_cache_capacity_of(const mm_rank_memory *r, const mm_demand *d, const mm_device_memory *on);

/* Rows of a step whose logits are wanted at most, with so many proposals in each slot: none are made for models with lightning layers. */
uint32_t mm_outs_of(const mm_model *m, uint64_t slots, uint32_t drafts);

/* Pages of one sequence, and of all slots at their longest. */
static inline uint64_t mm_sequence_pages(const mm_demand *d) { return mm_ceil_div(d->positions, MM_PAGE); }
static inline uint64_t mm_most_pages(const mm_demand *d) { return d->slots * mm_sequence_pages(d); }

/* The ranks share tables of pages, so each has as many as the one with the least room: `pages`, or fewer where this rank holds fewer. The
 * first call is given mm_most_pages. */
uint64_t mm_fewer_pages(uint64_t pages, const mm_rank_memory *r, const mm_demand *d, const mm_device_memory *on);

/* Whether a run that may leave proposals out has them, with so many pages of cache with them and without: where a sequence has its pages,
 * and at most a quarter of the cache is lost. */
static inline bool mm_proposals_fit(uint64_t with, uint64_t without, uint64_t sequence) {
  return with >= sequence && 4 * with >= 3 * without;
}

/* Sizes of runtime/cuda that buffers follow from; it asserts that they are its own. */
enum {
  MM_DEVICE_DECODE_ROWS = 16,      /* rows of the smallest products */
  MM_DEVICE_FEW_EACH = 256,        /* rows of a step whose experts have lists of their own */
  MM_DEVICE_LEAST_INVARIANT = 17,  /* rows that a step is padded to under batch_invariant */
  MM_DEVICE_LARGEST_BUCKET = 256,  /* rows that a recorded step is padded to at most */
  MM_DEVICE_SEEN = 32,             /* rows whose penalties are counted at a time */
  MM_DEVICE_LOGPROBS = 21,         /* logprobs of a row */
  MM_DEVICE_TILE = 16,             /* tokens of a tile of attention */
  MM_DEVICE_CHUNK = 256,           /* tiles that are read by one block at least */
  MM_DEVICE_ITEMS = 2048,          /* chunks that rows are cut into */
  MM_DEVICE_MULTIPROCESSORS = 192, /* of a GPU at most */
  MM_DEVICE_SCORE_ROWS = 512,      /* rows whose blocks are scored at a time */
  MM_DEVICE_BLOCK_PAIRS = 16384,   /* of a row and a block whose results there is room for */
  MM_DEVICE_BLOCK_ROWS = 1024,     /* rows of a round over blocks at most, and of one of a single index head */
  MM_DEVICE_BLOCK_ROWS_HEAD = 4096,
  MM_DEVICE_BLOCK_JOB = 40,   /* bytes of a job and a row that it lists */
  MM_DEVICE_BLOCK_GROUP = 16, /* query heads of a part of a row over blocks */
};

#ifdef __cplusplus
}
#endif
#endif
