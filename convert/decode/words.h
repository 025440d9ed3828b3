/* Integers in words of I32 as other tools store them, out of a scheme's planes: the rows of encoding_table.c the other way round. */
#ifndef MM_CONVERT_WORDS_H
#define MM_CONVERT_WORDS_H

#include "quant/quant.h"

/* Tensors of integers in words of I32 that are no plane of ours: a matrix is written whole. */
typedef enum mm_words_form {
  MM_WORDS_NONE, /* planes, row after row */
  MM_WORDS_GPTQ, /* on their side: words along columns */
  MM_WORDS_AWQ,  /* on their side: words along rows, in AWQ's order */
  MM_WORDS_CT    /* words along columns; those of zero points along rows */
} mm_words_form;
typedef enum mm_words_role { MM_WORDS_CODES, MM_WORDS_SCALES, MM_WORDS_ZEROS, MM_WORDS_ORDER, MM_WORDS_SHAPE } mm_words_role;

/* A matrix: columns of a group (0: all), its planes on that grid. */
typedef struct mm_words_matrix {
  mm_words_form form;
  uint32_t rows, cols, group;
  const mm_scheme *scheme;
  const void *codes, *scales;
  uint32_t zero_less; /* GPTQ stores zero points less this */
} mm_words_matrix;

mm_shape mm_words_shape(const mm_words_matrix *m, mm_words_role role);
/* All bytes of the tensor of that shape. */
void mm_words_put(const mm_words_matrix *m, mm_words_role role, void *out);

#endif
