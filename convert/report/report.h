/* The output of a conversion for its user: the plan, progress while it runs, the summary. */
#ifndef MM_CONVERT_REPORT_H
#define MM_CONVERT_REPORT_H

#include <stdio.h>

#include "convert/report/events.h"
#include "convert/report/footprint.h"
#include "convert/write/convert.h"

typedef enum mm_report_style { MM_REPORT_TEXT, MM_REPORT_JSON } mm_report_style;

/* The plan: model, source, what each packed tensor becomes, bytes of the ranks by kind, exact total, KV cache; and the verdict, where one
 * was asked for. `tensors` lists every packed tensor. */
MM_MUST_USE bool mm_report_plan(FILE *f, const mm_plan *p, const mm_verdict *v, mm_report_style style, bool tensors, mm_err *err);

/* A thread that draws progress on stderr (a bar on a terminal, a line every five seconds otherwise) where `drawn`, and puts an event every
 * second where `events` is not NULL. */
typedef struct mm_watch mm_watch;
mm_watch *mm_watch_open(const mm_plan *p, const mm_convert_progress *progress, mm_events *events,
                        bool drawn); /* NULL: no thread to be had */
void mm_watch_close(mm_watch *w);    /* accepts NULL */

typedef struct mm_convert_outcome {
  double seconds;
  uint64_t zeroed, kept; /* mm_convert_progress's */
  bool resumed;          /* what was kept is said, even if it is nothing */
  mm_digest manifest;
} mm_convert_outcome;
/* The events of a run: the plan as it begins, the summary or the error as it ends. */
void mm_report_begin(mm_events *e, const mm_plan *p, const mm_verdict *v);
void mm_report_done(mm_events *e, const mm_plan *p, const mm_convert_outcome *o);
void mm_report_failed(mm_events *e, const mm_err *reason);
/* The last words: wall time, what was kept, rates, peak RSS, manifest digest. */
MM_MUST_USE bool mm_report_summary(FILE *f, const mm_plan *p, const mm_convert_outcome *o, mm_report_style style, mm_err *err);

#endif
