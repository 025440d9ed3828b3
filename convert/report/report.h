/* What the user sees of a conversion: the plan, progress while it runs, the summary. */
#ifndef MM_CONVERT_REPORT_H
#define MM_CONVERT_REPORT_H

#include <stdio.h>

#include "convert/write/convert.h"

typedef enum mm_report_style { MM_REPORT_TEXT, MM_REPORT_JSON } mm_report_style;

/* The plan: model, source, what each packed tensor becomes, bytes per rank, exact total. `tensors` lists every packed tensor. */
bool mm_report_plan(FILE *f, const mm_plan *p, mm_report_style style, bool tensors, mm_err *err);

/* A thread that draws progress on stderr: a bar on a terminal, a line every five seconds otherwise. */
typedef struct mm_watch mm_watch;
mm_watch *mm_watch_open(const mm_plan *p, const mm_progress *progress); /* NULL: no thread to be had, nothing is drawn */
void mm_watch_close(mm_watch *w);                                       /* accepts NULL */

typedef struct mm_outcome {
  double seconds;
  uint64_t zeroed; /* mm_progress's */
  mm_digest manifest;
} mm_outcome;
/* The last words: wall time, rates, peak RSS, manifest digest. */
bool mm_report_summary(FILE *f, const mm_plan *p, const mm_outcome *o, mm_report_style style, mm_err *err);

#endif
