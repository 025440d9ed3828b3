/* Compares a manifest with the source that it was made from. */
#ifndef MM_CONVERT_PACKED_AGREES_H
#define MM_CONVERT_PACKED_AGREES_H

#include "convert/source/hf.h"

/* The model of a manifest is that of the config.json in its directory, from which it was made, and its tensors have the pieces that rules
 * of the architecture give them, in their order: MM_INTEGRITY E_CONFIG otherwise. */
MM_MUST_USE bool mm_packed_agrees(const mm_pack *p, const mm_arch *a, const mm_model *config, mm_err *err);
/* The same of the config.json among its companions; one without has nothing to say. */
MM_MUST_USE bool mm_packed_config(const mm_pack *p, mm_err *err);

#endif
