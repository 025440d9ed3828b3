/* The quantization_config of each target format, from the names that a plan gives its tensors (target_format.h). */
#ifndef MM_CONVERT_TARGET_CONFIG_H
#define MM_CONVERT_TARGET_CONFIG_H

#include "convert/decode/words.h"
#include "convert/plan/plan.h"

typedef struct mm_target_format mm_target_format;

typedef struct mm_target_naming {
  const char *scheme;
  const mm_target_format *target_format;
  const char *suffix[MM_MAX_PLANES]; /* of the scheme's planes, behind the module's name */
  const char *input;                 /* a further suffix, of the inputs' static scale, F32; NULL: the inputs have none */
  mm_dtype words;                    /* the type of the codes, when several of ours make one word of theirs; else the scheme's */
  mm_words_form form;                /* NONE but where the tensors below are no planes of ours */
  uint8_t role[MM_MAX_PLANES];       /* then: mm_words_role of each suffix */
  bool shape;                        /* a further ".weight_shape", I64 [2]: rows and columns */
  bool reciprocal;                   /* the scale of the whole matrix and that of its inputs are stored as 1/scale */
  bool scalar;                       /* they have shape [], not [1] */
  bool offset;                       /* 4-bit codes are stored plus 8, ours are two's complement */
  bool whole_groups;                 /* columns must be a multiple of the scale's group */
  bool any_group;                    /* groups of any size that columns are a multiple of; config is then that of the inputs */
  const char *algorithm;             /* ModelOpt's word */
  const char *config;                /* JSON object: the whole quantization_config but for the modules left out, or one config group */
} mm_target_naming;

/* JSON of compressed-tensors. */
#define FLOAT(bits) "{\"num_bits\": " bits ", \"type\": \"float\", \"symmetric\": true, "
#define INT(bits)   "{\"num_bits\": " bits ", \"type\": \"int\", \"symmetric\": true, "
#define STATIC      "\"dynamic\": false}"
#define DYNAMIC     "\"dynamic\": true}"
#define GROUP(format, weights, inputs) \
  "{\"format\": \"" format "\", \"weights\": " weights ", \"input_activations\": " inputs ", \"output_activations\": null}"

/* Each takes over `list`, the modules that stay as they are. NULL on want of memory. */
mm_json *mm_target_fp8_config(const mm_plan *p, mm_json *list, mm_err *err);
mm_json *mm_target_ct_config(const mm_plan *p, mm_json *list, mm_err *err);
mm_json *mm_target_modelopt_config(const mm_plan *p, mm_json *list, mm_err *err);
/* The same in ModelOpt's own file. */
mm_json *mm_target_modelopt_file(const mm_plan *p, mm_json *list, mm_err *err);
mm_json *mm_target_words_config(const mm_plan *p, mm_json *list, mm_err *err);
/* The modules of a plan that stay as they are. */
mm_json *mm_target_left_out(const mm_plan *p);

#endif
