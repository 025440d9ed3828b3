/* Quantised checkpoints as other engines read them: the names of each scheme's planes and their entries in config.json. A table has one row
 * for every scheme of a target format:
 *
 *   fp8       transformers' FineGrainedFP8 and, of block_fp8, DeepSeek's, vLLM's and SGLang's: quant_method "fp8"
 *   ct        compressed-tensors: one config group per scheme
 *   modelopt  NVIDIA Model Optimizer, with hf_quant_config.json next to config.json
 *   gptq      GPTQ's words, as GPTQModel and AutoRound write them
 *   awq       AutoAWQ's words */
#ifndef MM_CONVERT_TARGET_FORMAT_H
#define MM_CONVERT_TARGET_FORMAT_H

#include "convert/plan/target_config.h"

/* Chooses the target format called `word` (NULL: the first that has every scheme of the plan) and names the planes of every tensor by it.
 * A scheme that the format lacks is MM_UNSUPPORTED E_DIALECT, naming tensor, scheme and format. */
MM_MUST_USE bool mm_target_format_spell(mm_plan *p, const char *word, mm_err *err);
/* Fills p->text: the source's config.json with the quantization_config of the plan's schemes, and the target format's own file. Every
 * module that is not quantised is listed by its full name, which every engine's way of matching (exact, substring, glob, suffix)
 * understands. */
MM_MUST_USE bool mm_target_format_texts(mm_plan *p, mm_err *err);
/* The one type of all linears' weights or codes; NULL: they have several schemes. */
const mm_dtype *mm_target_format_type(const mm_plan *p);
/* A matrix of the plan as words of its naming; without its planes. */
mm_words_matrix mm_target_words_of(const mm_plan *p, uint32_t tensor, uint32_t piece);
/* Its word; "none" for NULL. */
const char *mm_target_format_name(const mm_target_format *d);
/* True if a target format has a config file of that name. */
bool mm_target_format_file(const char *name);
/* Turns the scale of a whole matrix, or codes ([bytes]), into what the naming stores; leaves all other planes. steps: of a global scale
 * that is stored as its reciprocal (mm_global_step). */
void mm_target_format_scale(const mm_target_naming *s, const mm_scheme *scheme, unsigned plane, int32_t steps, void *stored, size_t bytes);

#endif
