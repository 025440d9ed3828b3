/* Types and shapes of tensors whose headers are not there yet: those of a tensor whose header is, and whose name differs in numbers only
 * ("model.layers.7.…" of "model.layers.0.…"). */
#ifndef MM_CONVERT_FORMS_H
#define MM_CONVERT_FORMS_H

#include "convert/source/hf.h"

typedef struct mm_forms {
  uint32_t *group; /* [tensor_count]: tensors of one name but for the numbers */
  bool *needed;    /* [groups]: a header of it is waited for */
  uint32_t groups;
} mm_forms;

MM_MUST_USE bool mm_forms_open(mm_forms *f, const mm_hf *hf, mm_err *err);
void mm_forms_close(mm_forms *f); /* accepts a zeroed one */
/* *file: the first that has a tensor of a needed group while no header of that group was seen. False: there is none. */
bool mm_forms_lack(const mm_forms *f, const mm_hf *hf, uint32_t *file, mm_err *err);
/* Gives forms to tensors whose headers were not seen. A plain weight whose name is the only one of its kind keeps what it has. */
MM_MUST_USE bool mm_forms_lend(const mm_forms *f, mm_hf *hf, mm_err *err);

#endif
