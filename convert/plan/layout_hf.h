/* The unsharded layout: a checkpoint with Hugging Face names, "model-00001-of-00003.safetensors" in layer order and an index, that
 * transformers, vLLM and SGLang load. Each piece of a plan's tensor is stored by itself. */
#ifndef MM_CONVERT_LAYOUT_HF_H
#define MM_CONVERT_LAYOUT_HF_H

#include "convert/plan/plan.h"

/* Name and shape under which plane `plane` of a piece is stored. */
char *mm_unsharded_name(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane, mm_arena *a, mm_err *err);
mm_shape mm_unsharded_shape(const mm_plan *p, uint32_t tensor, uint32_t piece, unsigned plane);
/* "model-00001-of-00003.safetensors" for part 0 of 3. */
char *mm_unsharded_file(mm_plan *p, uint32_t part, mm_err *err);
/* Digest of all that fixes the output: sources, options, tool, names, types, shapes, files, config. */
MM_MUST_USE bool mm_unsharded_digest(const mm_plan *p, mm_digest *out, mm_err *err);
/* The text of model.safetensors.index.json: exact total_size, the plan's digest, the weight map in file order. free() it. */
char *mm_unsharded_index(const mm_plan *p, mm_err *err);
/* Whether a source's file of that name is code that its config's auto_map may name: "modeling_minimax_m1.py". */
bool mm_code_file(const char *name);
/* Whether a file of that name may be written by this layout, beside companions. */
bool mm_unsharded_has(const char *file);
/* The plan's digest in the index of a directory that this layout wrote; false for any other directory. */
MM_MUST_USE bool mm_unsharded_plan(const char *dir, mm_digest *plan, mm_err *err);

#endif
