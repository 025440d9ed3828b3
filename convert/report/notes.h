/* Notes about a source: one line each for parts that a conversion leaves out, assumes or changes although no option asks for it. */
#ifndef MM_CONVERT_NOTES_H
#define MM_CONVERT_NOTES_H

#include "convert/plan/plan.h"

void mm_report_notes(FILE *f, const mm_hf *hf, const mm_plan *p);
/* Notes the files that the output will lack at run time because the source lacks them; `template`: it has a chat template. */
void mm_report_absent(FILE *f, const mm_hf *hf, bool template);

#endif
