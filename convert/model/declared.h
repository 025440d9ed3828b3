/* Descriptions of a quantization: words in them, transformations of the weights, and how the inputs of quantised linears are rounded. */
#ifndef MM_CONVERT_DECLARED_H
#define MM_CONVERT_DECLARED_H

#include "formats/json.h"
#include "formats/system/base.h"
#include "formats/tensor.h"

#define MM_CONFIG_MAX (UINT64_C(16) << 20) /* bytes of a config.json */

/* The string under a key, or NULL, also where it has a NUL. */
const char *mm_declared_word(const mm_json *obj, const char *key);
/* True if w is one of the words of a list, between blanks. */
bool mm_declared_listed(const char *list, const char *w);

/* True if a quantization is described in MLX's way: a group size and bits, without a method. */
bool mm_declared_mlx(const mm_json *j);

/* A config.json without its quantization, whose torch_dtype or dtype, where it has one, names this type; NULL and types of codes leave
 * it. Owned. */
mm_json *mm_declared_plain(const mm_json *config, const mm_dtype *type, mm_err *err);

/* Fails with MM_BAD_INPUT E_Q_CONFIG if ModelOpt's file at `path` (absent: nothing) says another quantization than
 * config.json, whose description is `own`; with what mm_json_load fails with where it cannot be read. Engines read either. */
MM_MUST_USE bool mm_declared_agrees(const mm_json *own, const char *path, mm_err *err);

/* MM_UNSUPPORTED E_Q_TRANSFORM if the description of a file says that the weights were rotated. */
MM_MUST_USE bool mm_declared_unrotated(const char *path, const mm_json *obj, mm_err *err);

/* Kinds of numbers: of weights, and of the inputs of linears, which may be left as they are. */
typedef enum mm_numbers { MM_NUMBERS_PLAIN, MM_NUMBERS_FP8, MM_NUMBERS_INT8, MM_NUMBERS_INT4, MM_NUMBERS_FP4, MM_NUMBERS_COUNT } mm_numbers;

/* Bits 1u << mm_numbers of the inputs of linears whose weights are of this kind; 0: the description leaves them open. */
typedef struct mm_declared_inputs {
  uint8_t of[MM_NUMBERS_COUNT];
} mm_declared_inputs;

/* The inputs that the description says for a method; what it does not say, or says in unknown words, is left open. */
void mm_declared_inputs_read(const mm_json *obj, const char *method, mm_declared_inputs *out);

/* The kinds of a set of inputs, in words: "in FP8 or as they are". */
const char *mm_numbers_words(unsigned set, char out[96]);

#define MM_MODELOPT "modelopt modelopt_fp4 modelopt_mixed" /* methods of its descriptions */

/* Bits 1u << mm_numbers of the weights that ModelOpt's algorithm or all of compressed-tensors' groups declare; 0: of other descriptions, or
 * not all of it is known. */
unsigned mm_declared_kinds(const mm_json *obj, const char *method);

/* How a description says that inputs are scaled, as a set. */
enum { MM_SCALES_STATIC = 1, MM_SCALES_DYNAMIC = 2 };
unsigned mm_declared_scales(const mm_json *obj);

/* Fails with MM_BAD_INPUT E_Q_CONFIG if the file at `path`, which describes words of integers, has another width or group size than
 * config.json, whose description is `own`. */
MM_MUST_USE bool mm_declared_same_words(const mm_json *own, const mm_json *file, const char *path, mm_err *err);

#endif
