/* libminimax: packed MiniMax checkpoints (formats/FORMAT.md) for programs that are not this project's.
 *
 *   minimax_error err;
 *   minimax_checkpoint *c = minimax_open("DIR", &err);
 *   const minimax_tensor *t = c ? minimax_find(c, 0, "model.layers.0.block_sparse_moe.experts.w13_weight") : NULL;
 *   const minimax_plane *codes = t ? minimax_plane_at(t, 0) : NULL;   // codes->data points into the mapped file
 *
 * Nothing is copied: a plane's data is a read-only mapping of its file, valid until minimax_close. A file that is cut short while it is
 * mapped ends the program with SIGBUS, as with every mapping.
 *
 * Functions return 0 or a pointer; on failure not 0 or NULL, and *err says why (err may be NULL). Nothing prints, nothing exits. NULL for
 * what must be there is E_USAGE, status 2. Functions that take a const checkpoint may run at the same time on several threads.
 *
 * ABI: within one soname, functions stay, and structs that the library hands out by pointer only grow at their end. minimax_error and
 * minimax_grid, which callers allocate, keep their size. */
#ifndef MINIMAX_H
#define MINIMAX_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(MINIMAX_BUILD)
#define MINIMAX_API __attribute__((visibility("default")))
#else
#define MINIMAX_API
#endif

/* The version of this header; minimax_version() returns that of the library. */
#define MINIMAX_HEADER_VERSION "0.2.0"

/* Why a call failed. `status` is the exit status that the project's programs give: 2 usage, 3 bad input, 4 unsupported, 5 I/O,
 * 6 integrity, 8 memory or limit. `code` is stable ("E_DIGEST", docs/errors.md). `text` is one line: code, file, tensor, offset, what was
 * found and what was expected, escaped for a terminal. */
typedef struct minimax_error {
  int32_t status;
  char code[28];
  char text[4064];
} minimax_error;

typedef struct minimax_checkpoint minimax_checkpoint; /* opaque */

/* The manifest's statements about the whole checkpoint. Strings live until minimax_close. */
typedef struct minimax_info {
  const char *dir;          /* its path from the root; as it was given where none leads there */
  const char *tool;         /* what wrote it: "minimax-convert 0.2.0" */
  const char *quant;        /* the recipe it was made with: "block_fp8" */
  const char *architecture; /* "MiniMaxM2ForCausalLM" */
  const char *plan;         /* digest of everything decided before the first weight, 64 hexadecimal digits */
  uint32_t tp, ep, pp;      /* ranks: pp · tp of them, rank = stage · tp + tensor-parallel rank; ep divides tp */
  uint32_t ranks;
  uint32_t layers, hidden, vocab, experts, top_k, intermediate, heads, kv_heads, head_dim;
} minimax_info;

/* One stored array of a tensor: plane 0 holds codes (or plain numbers), the others scales. The weight at (row i, column k) is the code
 * over it times the scales over it, multiplied in plane order in f32. */
typedef struct minimax_plane {
  const char *name;   /* the tensor's name and the plane's suffix, as in the file */
  const char *suffix; /* "", "_scale_inv", "_scale", "_scale_2" */
  const char *dtype;  /* as safetensors spells it: "F8_E4M3", "BF16", "F32", "U8", "I8", "F16" */
  const void *data;   /* mapped, read-only, row-major, aligned to the size of an element */
  uint64_t bytes;
  uint32_t dims;     /* 1 to 3 */
  uint64_t shape[3]; /* in elements as stored: U8 that holds two nibbles counts once */
  uint32_t cell[2];  /* rows and columns of the tensor's matrix under one element; 0: all of them */
  const char *file;  /* base name of the part that holds it */
  uint64_t offset;   /* of data in that file */
} minimax_plane;

/* One matrix of the source checkpoint (of a stack: one for each expert) inside a tensor. Pieces lie side by side along rows. */
typedef struct minimax_piece {
  const char *source;       /* its name there; "{e}" stands for the expert */
  uint32_t rows;            /* of the uncut matrix */
  uint32_t local_at;        /* first row of the piece in this rank's matrix */
  uint32_t local_rows;      /* rows of it here, padding included */
  uint32_t axis;            /* how ranks share it: 0 every rank has all of it, 1 by rows, 2 by columns */
  uint32_t at, from, count; /* lines at … at + count - 1 here are lines from … from + count - 1 of the uncut matrix (axis 1, 2) */
} minimax_piece;

/* A tensor as one rank holds it: a matrix [rows, cols] as in y = x · Wᵀ, a vector [rows], or a stack of `matrices` experts. */
typedef struct minimax_tensor {
  const char *name;   /* "model.layers.0.self_attn.qkv_proj.weight" */
  const char *scheme; /* "bf16", "block_fp8", … */
  uint32_t rank, stage;
  uint32_t vector;         /* 1: the tensor has one dimension, cols is 1 */
  uint32_t matrices;       /* on this rank; 0: no stack */
  uint32_t first_matrix;   /* the expert that is matrix 0 here */
  uint32_t whole_matrices; /* over all ranks */
  uint32_t rows, cols, whole_cols;
  uint32_t planes, pieces; /* how many */
  float input_scale;       /* static scale of the activations x; 0: none */
} minimax_tensor;

/* "0.2.0", of the library that is loaded. */
MINIMAX_API const char *minimax_version(void);

/* Opens every rank whose files are in DIR. Reads the manifest and every part's header and checks all that they say against each other and
 * against the model; reads no weight. A relative DIR is looked up now: the process may change its working directory afterwards, unless that
 * was removed or cannot be reached from the root. NULL on failure. */
MINIMAX_API minimax_checkpoint *minimax_open(const char *dir, minimax_error *err);
/* The same of `count` ranks alone; files of others may be absent. */
MINIMAX_API minimax_checkpoint *minimax_open_ranks(const char *dir, const uint32_t *rank, size_t count, minimax_error *err);
/* Unmaps everything; all pointers of the checkpoint end. NULL is ignored. */
MINIMAX_API void minimax_close(minimax_checkpoint *c);
MINIMAX_API const minimax_info *minimax_get_info(const minimax_checkpoint *c);

/* Proves every byte of the open ranks and companion files by their digests, that nothing else lies there, that every number is finite and
 * every scale allowed, that padding is zero and ranks hold equal copies. A manifest without a part of any rank is E_RANKS, status 6. Only
 * the program minimax-verify proves that the manifest's model and names of source matrices are those of config.json. A part that was
 * written to or replaced since it was opened is E_CHANGED, status 5. threads 0: as many as CPUs. */
MINIMAX_API int minimax_verify(const minimax_checkpoint *c, unsigned threads, minimax_error *err);

/* Returns 1 if a rank's files are open, else 0 (also for ranks that do not exist). */
MINIMAX_API int minimax_has_rank(const minimax_checkpoint *c, uint32_t rank);
/* Tensors of a rank, in layer order; 0 for one that is not open. */
MINIMAX_API size_t minimax_tensor_count(const minimax_checkpoint *c, uint32_t rank);
/* The i-th of them, or NULL. */
MINIMAX_API const minimax_tensor *minimax_tensor_at(const minimax_checkpoint *c, uint32_t rank, size_t i);
/* By the name of the tensor, or of any of its planes; NULL when the rank has none of that name. */
MINIMAX_API const minimax_tensor *minimax_find(const minimax_checkpoint *c, uint32_t rank, const char *name);
/* Plane and piece i of a tensor, or NULL past the last. */
MINIMAX_API const minimax_plane *minimax_plane_at(const minimax_tensor *t, uint32_t i);
MINIMAX_API const minimax_piece *minimax_piece_at(const minimax_tensor *t, uint32_t i);

/* Dequantises rows [row, row + rows) of matrix `matrix` of this rank's stack (0 without one) into out[rows, cols], f32. */
MINIMAX_API int minimax_unpack(const minimax_tensor *t, uint32_t matrix, uint32_t row, uint32_t rows, float *out, minimax_error *err);

/* Source matrices, each expert by its own name: how many, and the i-th's name, which the caller frees with minimax_free. */
MINIMAX_API size_t minimax_source_count(const minimax_checkpoint *c);
MINIMAX_API char *minimax_source_name(const minimax_checkpoint *c, size_t i, minimax_error *err);
/* Rows and columns (1 for a vector) of the uncut matrix of that name ("model.layers.0.block_sparse_moe.experts.3.w1.weight"). */
MINIMAX_API int minimax_source_shape(const minimax_checkpoint *c, const char *source, uint32_t shape[2], minimax_error *err);
/* Rows [row, row + rows) of it, put together from the ranks and dequantised: out[rows, columns], f32. */
MINIMAX_API int minimax_unshard(const minimax_checkpoint *c, const char *source, uint32_t row, uint32_t rows, float *out,
                                minimax_error *err);
/* Plane i of it as stored, put together: its elements' type, lines and elements of a line, and how many bytes that is. MINIMAX status 2
 * (E_USAGE) past the last plane. */
typedef struct minimax_grid {
  const char *dtype;
  const char *suffix;
  uint32_t lines, width;
  uint32_t cell[2];
  uint64_t bytes;
} minimax_grid;
MINIMAX_API int minimax_source_plane(const minimax_checkpoint *c, const char *source, uint32_t i, minimax_grid *out, minimax_error *err);
/* Writes the bytes that minimax_source_plane describes into out. */
MINIMAX_API int minimax_unshard_plane(const minimax_checkpoint *c, const char *source, uint32_t i, void *out, minimax_error *err);

MINIMAX_API void minimax_free(void *p);

#ifdef __cplusplus
}
#endif
#endif
