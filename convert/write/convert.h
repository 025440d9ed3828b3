/* Carrying out a plan: parts in order, steps of a part on all threads, then hashing, syncing and publishing. */
#ifndef MM_CONVERT_CONVERT_H
#define MM_CONVERT_CONVERT_H

#include <stdatomic.h>

#include "convert/write/writer.h"

/* Shared with whoever watches: written by the workers, read at any time. */
typedef struct mm_convert_progress {
  _Atomic uint64_t read_bytes;    /* source bytes done */
  _Atomic uint64_t kept_bytes;    /* of these, what the run that this one continues had done */
  _Atomic uint64_t written_bytes; /* output bytes of finished parts */
  _Atomic uint64_t zeroed;        /* weights that were not finite and are 0, at the end also of the runs that this one continued */
  _Atomic bool stop;              /* set by a signal handler: workers end with MM_INTERRUPTED */
} mm_convert_progress;

/* On success the target is published and *manifest is its digest. On failure nothing has the final name; an interruption, an I/O or a
 * memory failure, and any failure once all parts are made, leave a staging directory that a later run continues; any other failure leaves
 * nothing. */
MM_MUST_USE bool mm_convert_run(mm_plan *p, const mm_writer_options *o, mm_convert_progress *progress, mm_digest *manifest, mm_err *err);

#endif
