/* Compares a directory that has the target's name with the output that a run would make: only then the program reports "done". */
#ifndef MM_CONVERT_FINISHED_H
#define MM_CONVERT_FINISHED_H

#include "convert/plan/plan.h"

/* dir is an output of plan p (by its digest), archived or not. It holds the same ranks and parts (else MM_USAGE E_RESUME) and is whole
 * (else MM_INTEGRITY): with `hash` every block and companion has the manifest's digest, without it files have their sizes. The unsharded
 * layout has no digests: its index, texts, sizes and headers are compared with the plan's. With `hash` its weights are
 * those of the source as far as the plan's `gives` looks at them (else MM_USAGE E_RESUME). Files that are not of the output are not looked
 * at. */
MM_MUST_USE bool mm_finished_check(const mm_plan *p, const char *dir, bool archived, bool hash, unsigned threads, mm_err *err);

/* Fails with MM_USAGE E_RESUME: the finished output in dir, which is not of this plan or archived where this one is not to be, or the other
 * way round, differs by the options that the line names. */
bool mm_finished_other(const mm_plan *p, const char *dir, mm_err *err);
/* True if a text of a plan is among the files of a finished output, byte for byte. */
bool mm_finished_has_text(const mm_pack *is, const mm_plan_text *t);
/* True if the directory is an output of this program, in either layout: *plan is its plan, *archived is true for an archive, *extra names
 * the first file that is not of the output. */
bool mm_finished_ours(const char *path, mm_digest *plan, bool *archived, mm_err *extra, mm_err *err);

/* The digest of its manifest, or of what the layout has in its place. */
MM_MUST_USE bool mm_finished_digest(const mm_plan *p, const char *dir, mm_digest *out, mm_err *err);

#endif
