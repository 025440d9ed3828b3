/* Static scales of activations, from a file that calibration wrote: safetensors with one number (or one for each expert) under a name, or
 * a JSON object of names and numbers. The name is our packed one or the Hugging Face one, with what the number is behind it:
 *
 *   NAME.amax (minimax-eval --collect), STEM.activation_scale (FastDeploy)   largest magnitude
 *   STEM.input_scale (FP8 and ModelOpt checkpoints)                          the scale itself, of the tensor's own scheme
 *   STEM.input_global_scale (compressed-tensors)                             its reciprocal
 *
 * STEM is NAME without ".weight". Matrices of one packed tensor (w1 and w3, q, k and v, the experts of a layer) share the largest of their
 * scales. */
#ifndef MM_CONVERT_ACT_SCALES_H
#define MM_CONVERT_ACT_SCALES_H

#include "convert/model/rule.h"
#include "formats/hash.h"
#include "formats/pack.h"
#include "quant/quant.h"

typedef struct mm_act_number {
  const char *name;
  uint32_t index; /* among those of one name */
  double value;
  bool known; /* it is of a tensor (mm_act_scales_mark) */
} mm_act_number;

typedef struct mm_act_scales {
  const char *path; /* borrowed */
  mm_digest digest;
  size_t count;
  mm_act_number *number; /* sorted by name, then index */
  bool listed;           /* it is JSON: somebody chose its names */
  mm_arena arena;
} mm_act_scales;

/* MM_BAD_INPUT E_ACT_SCALES where a number is negative or not finite, or the file no such one. */
MM_MUST_USE bool mm_act_scales_open(mm_act_scales *s, const char *path, mm_err *err);
/* From numbers that are no file's own, one under each name; `path` is where they were found, for errors as those of a file. */
MM_MUST_USE bool mm_act_scales_make(mm_act_scales *s, const char *path, const mm_act_number *number, size_t count, mm_err *err);
void mm_act_scales_close(mm_act_scales *s); /* accepts a zeroed one */

/* Notes which numbers are of a tensor, of whatever scheme. */
void mm_act_scales_mark(const mm_act_scales *s, const mm_pack_tensor *t, const mm_rule *const *rule, uint32_t layer, uint32_t experts);
/* MM_BAD_INPUT E_ACT_SCALES where the file has an expert, or of minimax-eval or in JSON a layer, that the model has not: it is another
 * model's. Layers past the last of checkpoints may be those of multi-token prediction. In JSON all numbers have to be marked. */
MM_MUST_USE bool mm_act_scales_of_model(const mm_act_scales *s, const mm_model *m, mm_err *err);

/* t->input_scale: the scale of a packed tensor under `scheme`, which can have one (mm_act_format.fixed); MM_BAD_INPUT E_ACT_SCALES where
 * there is none, or other than one for the tensor, for each expert or for each matrix. *without counts experts that calibration never
 * reached. */
MM_MUST_USE bool mm_act_scales_find(const mm_act_scales *s, mm_pack_tensor *t, const mm_rule *const *rule, uint32_t layer, uint32_t experts,
                                    const mm_scheme *scheme, uint64_t *without, mm_err *err);

#endif
