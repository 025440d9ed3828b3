/* The weight map of model.safetensors.index.json. */
#ifndef MM_CONVERT_INDEX_H
#define MM_CONVERT_INDEX_H

#include "convert/source/hf.h"

#define MM_INDEX_NAME  "model.safetensors.index.json"
#define MM_SINGLE_NAME "model.safetensors" /* the file of a checkpoint without an index */
#define MM_INDEX_MAX   (UINT64_C(64) << 20)

/* Fills hf->file (names), hf->tensor (original name and file, sorted by name) and hf->total_size from the text of an index. Names stay
 * where they stand in it, terminated there: the text must outlive hf. File names must be plain base names; duplicate tensors and malformed
 * maps are refused. */
MM_MUST_USE bool mm_index_parse(mm_hf *hf, const char *path, char *text, size_t n, mm_err *err);

#endif
