/* The error of a packed checkpoint as a report: JSON, CSV, or a page of HTML with everything in it. */
#ifndef MM_CONVERT_REPORT_ERROR_H
#define MM_CONVERT_REPORT_ERROR_H

#include <stdio.h>

#include "convert/report/compare.h"
#include "formats/json.h"
#include "formats/system/output.h"

typedef struct mm_error_report {
  const char *dir, *source, *quant;
  mm_error_row *row;
  size_t count;
  size_t absent;               /* tensors that no rank in the directory holds: in no row */
  const char *tool;            /* that packed it, or NULL */
  const char *manifest, *plan; /* SHA-256 in hexadecimal, or NULL */
  const mm_json *divergence;   /* of mm_report_divergence_read, or NULL */
  bool unscaled;               /* scales were not looked at: what was clipped and the scales are left out */
} mm_error_report;

/* Rows by SQNR, worst first; exact ones last; equals by name. */
void mm_report_rank(mm_error_report *r);
bool mm_error_exact(const mm_tensor_error *e);
size_t mm_report_exact(const mm_error_report *r); /* how many are */

/* {"checkpoint", "source", "quant", "packed_by", "compared_by", "manifest_sha256", "plan_sha256", "exact_tensors": N,
 * "absent_tensors": N (absent when 0), "divergence": {…} (absent unless read), "tensors": [{"name", "scheme", "count", "sqnr_db" (absent
 * when infinite), …}]}. */
mm_json *mm_report_json(const mm_error_report *r);
/* Self-contained: a verdict first, histograms and a layer x tensor map as inline SVG on scales that are the same in every report, what the
 * figures mean, a table in three orders. No scripts, nothing fetched. False without
 * memory. */
bool mm_report_html(FILE *f, const mm_error_report *r);
#define MM_REPORT_TITLE "Error of a packed checkpoint"

/* Reads the JSON of minimax-eval DIR --against REF: KL divergence and top-1 agreement of a checkpoint with this manifest's digest
 * (hexadecimal). MM_USAGE E_USAGE: of another checkpoint. */
MM_MUST_USE bool mm_report_divergence_read(mm_json **out, const char *path, const char *dir, const char *manifest, mm_err *err);
void mm_report_divergence_html(FILE *f, const mm_json *o, void (*put_text)(FILE *, const char *));

/* Writes a file (formats/system/output.h) in the format that its name ends in, .json, .csv or .html; other endings are MM_USAGE E_USAGE.
 * place->mark is set here: a report of the same format is replaced. */
MM_MUST_USE bool mm_report_write(mm_output_place place, const mm_error_report *r, mm_err *err);
MM_MUST_USE bool mm_report_place_ok(mm_output_place place, mm_err *err); /* the same refusal, before there is anything to write */

#endif
