/* Weights of errors, by input channel of a matrix, for the search of its scales: second moments of the channel's activations,
 * from a file of one of these kinds:
 *
 *   safetensors   NAME.mean_square (F32 [k] or [E, k]) and NAME.rows (I64 [1] or [E]): minimax-eval --collect; with --moments also
 *                 NAME.moments (F32 [blocks, triangle] or [E, blocks, triangle]: second_moments.h), with --fisher NAME.fisher of the same
 *                 form and NAME.fisher_rows (I64 [1] or [E])
 *   GGUF          NAME.in_sum2 (F32 [k] or [E, k]) and NAME.counts (F32 [1] or [E]), general.type "imatrix": llama.cpp's llama-imatrix
 *   .dat          the same tool's older form: i32 entries; each i32 length, name, i32 calls, i32 values, F32 values
 *
 * NAME is our packed name, the Hugging Face one (of a single expert, then), or llama.cpp's. Everything is checked before it is used. */
#ifndef MM_CONVERT_IMPORTANCE_H
#define MM_CONVERT_IMPORTANCE_H

#include "convert/model/rule.h"
#include "formats/hash.h"
#include "formats/safetensors.h"
#include "formats/system/file.h"
#include "formats/tensor.h"

/* Sums or means of fewer tokens than this say too little: such a matrix is searched unweighted, and counted. */
#define MM_IMPORTANCE_ROWS 32

/* Blocks of second moments along the diagonal: F32 [matrices, blocks, block (block + 1) / 2]. */
typedef struct mm_moment_blocks {
  uint64_t offset;                  /* in the file; 0: there are none */
  uint64_t rows;                    /* offset of I64 [matrices]: tokens */
  uint32_t matrices, blocks, block; /* block: columns, or rows of the outputs, of a block */
} mm_moment_blocks;

typedef struct mm_importance_entry {
  const char *name;
  uint64_t value, values;           /* offset in the file and number of F32 values, matrix after matrix */
  uint64_t count, counts;           /* of tokens; counts 0: not said */
  mm_dtype count_type;              /* F32 or I64 */
  mm_moment_blocks inputs, outputs; /* second moments of the inputs, and of the gradients with respect to the outputs */
} mm_importance_entry;

typedef struct mm_importance {
  const char *path; /* borrowed */
  mm_file_id id;
  mm_map map;
  const uint8_t *data; /* of the whole file */
  mm_digest digest;
  size_t count;
  mm_importance_entry *entry; /* sorted by name */
  mm_arena arena;
} mm_importance;

/* MM_BAD_INPUT E_IMPORTANCE names file, entry and offset of what is wrong. */
MM_MUST_USE bool mm_importance_open(mm_importance *m, const char *path, mm_err *err);
/* The same from memory, which stays until close; no digest. */
MM_MUST_USE bool mm_importance_parse(mm_importance *m, const char *path, const void *data, uint64_t size, mm_err *err);
/* The file, which is read while weights are packed, still is what it was at open; MM_IO E_CHANGED otherwise. NULL: there is none. */
MM_MUST_USE bool mm_importance_unchanged(const mm_importance *m, mm_err *err);
void mm_importance_close(mm_importance *m); /* accepts a zeroed or half-opened one */

/* MM_BAD_INPUT E_IMPORTANCE where the file has a layer or an expert that the model has not: it is another model's. */
MM_MUST_USE bool mm_importance_of_model(const mm_importance *m, const mm_model *model, mm_err *err);

/* The entry of this name, or NULL. */
const mm_importance_entry *mm_importance_entry_of(const mm_importance *m, const char *name);

typedef enum mm_weighing { MM_WEIGHED, MM_TOO_FEW, MM_NO_ENTRY, MM_WEIGHING_FAILED } mm_weighing;

/* The `cols` values of the matrix that `rule` gives for this layer and expert: *values is where they lie in m->data, unaligned; finite,
 * none negative, not all zero. Other numbers of values than the model implies are an error. */
mm_weighing mm_importance_find(const mm_importance *m, const mm_rule *rule, uint32_t layer, uint32_t expert, uint32_t experts,
                               uint32_t cols, const uint8_t **values, mm_err *err);
/* They become weights of mean 1, none below 1e-4: out[cols]. */
void mm_importance_weights(const uint8_t *values, uint32_t cols, float *out);

/* --- imatrix.c: entries of llama.cpp's files; grows m->entry --- */
MM_MUST_USE bool mm_imatrix_gguf(mm_importance *m, uint64_t size, mm_err *err);
MM_MUST_USE bool mm_imatrix_dat(mm_importance *m, uint64_t size, mm_err *err);

/* --- read_moments.c: NAME.moments and NAME.fisher of the entry, if the file has them --- */
MM_MUST_USE bool mm_second_moments_read(const mm_importance *m, const mm_st *st, mm_importance_entry *e, mm_err *err);

#endif
