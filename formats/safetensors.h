/* The safetensors container (huggingface/safetensors): u64 LE header length, JSON header, data. Reading treats the file
 * as hostile: every range, shape and name is checked before a data byte is touched, and the ranges must tile the data
 * exactly. Writing makes the header of files whose layout the caller fixed. */
#ifndef MM_FORMATS_SAFETENSORS_H
#define MM_FORMATS_SAFETENSORS_H

#include "formats/hash.h"
#include "formats/system/file.h"
#include "formats/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_ST_HEADER_MAX UINT64_C(100000000)

typedef struct mm_st_tensor {
  const char *name; /* NUL-terminated; names holding NUL are refused */
  mm_dtype dtype;
  mm_shape shape;
  uint64_t offset; /* absolute, from the start of the file */
  uint64_t bytes;
} mm_st_tensor;

/* A pair of the header's metadata. */
struct mm_st_meta {
  const char *key, *value;
};

typedef struct mm_st {
  char *path;
  mm_file_id id;
  uint64_t data_start; /* 8 + header length */
  mm_digest header;    /* SHA-256 of what comes before it */
  size_t count;
  mm_st_tensor *tensor; /* sorted by name (strcmp) */
  size_t metadata_count;
  struct mm_st_meta *metadata;
  mm_arena arena;
} mm_st;

/* Reads and checks the header of `path`; the file is closed again afterwards. A file that is something else (Git LFS
 * pointer, HTML, GGUF, ZIP, gzip, pickle, all zeros) is named for what it looks like. `status` is that of a malformed
 * file: MM_BAD_INPUT for a source, MM_INTEGRITY for a packed part. */
MM_MUST_USE bool mm_st_open(mm_st *st, const char *path, mm_status status, mm_err *err);
/* The same on `header` = the file's first bytes (prefix included) when the file is file_size bytes long: for fuzzing and
 * for callers that hold the file open. */
MM_MUST_USE bool mm_st_parse(mm_st *st, const char *path, const void *header, size_t header_bytes, uint64_t file_size, mm_status status,
                             mm_err *err);
void mm_st_close(mm_st *st); /* accepts a zeroed or half-opened one */
/* Binary search; NULL when absent. */
const mm_st_tensor *mm_st_find(const mm_st *st, const char *name);
/* The value of a key of the metadata; NULL when absent. */
const char *mm_st_meta_find(const mm_st *st, const char *key);

/* The header of a new file: tensors in file order (dtype, shape, name; offset and bytes are ignored and recomputed as a
 * dense sequence), metadata pairs, padded with spaces so that data starts on a multiple of `align`. Returns malloc'ed
 * bytes, prefix included, and fills each tensor's offset and bytes. */
void *mm_st_header(mm_st_tensor *tensors, size_t count, const struct mm_st_meta *metadata, size_t metadata_count, uint64_t align, size_t *n,
                   mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
