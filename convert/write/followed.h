/* Writing the output of a checkpoint that is being downloaded: files that are not needed any more are freed after each part, and the
 * plan's digest, which needs every file's header, is put into the parts at the end. */
#ifndef MM_CONVERT_FOLLOWED_H
#define MM_CONVERT_FOLLOWED_H

#include "convert/write/writer.h"

/* Where the target is the finished output of this plan: gives the plan the digest that it has with the manifest's sources. */
MM_MUST_USE bool mm_followed_published(mm_writer *w, mm_err *err);
/* Opens the record of sources, with the staging directory taken. */
MM_MUST_USE bool mm_followed_begin(mm_writer *w, mm_err *err);
/* Part `part` and those before it are on disk and journaled. No reader has a file open. */
MM_MUST_USE bool mm_followed_part_done(mm_writer *w, uint32_t part, mm_err *err);
/* Waits for what has not come, then gives plan, manifest and every part the digest that a plan from all headers has. */
MM_MUST_USE bool mm_followed_finish(mm_writer *w, mm_err *err);
/* The target is complete: frees the other files and removes the record. */
MM_MUST_USE bool mm_followed_end(mm_writer *w, mm_err *err);
/* Removes a record, of any run. */
void mm_followed_forget(const mm_writer *w);

#endif
