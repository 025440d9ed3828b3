/* A wait for files of a download (--follow): it ends when the program is to stop, or after timeout_s without a change. */
#ifndef MM_CONVERT_FOLLOW_WAIT_H
#define MM_CONVERT_FOLLOW_WAIT_H

#include <stdatomic.h>

#include "formats/system/file.h"

struct mm_hf;

typedef struct mm_follow_options {
  double timeout_s;   /* without a file that is needed, and without any change of the directory */
  double quiet_s;     /* without a change before the companions, which may come last, are copied */
  bool frees;         /* --delete-source */
  const char *target; /* where --resume continues: the headers in its record count, and a finished one needs none. NULL: anew */
  const _Atomic bool *stop;
  void (*waiting)(const char *name); /* called once for each file that the plan waits for; NULL: none is */
} mm_follow_options;

/* Waits until the directory of what the user gave (mm_source_locate) has config.json and the index. *single: it has the one file that needs
 * no index instead, whole, and nothing has come for quiet_s. */
MM_MUST_USE bool mm_follow_texts(const char *given, const mm_follow_options *o, bool *single, mm_err *err);
/* Waits for a file that describes the quantization of hf (mm_hf_described), until it came or nothing else came for quiet_s. *came: hf is to
 * be opened again. */
MM_MUST_USE bool mm_follow_description(const struct mm_hf *hf, const mm_follow_options *o, bool *came, mm_err *err);
typedef struct mm_wait {
  const mm_follow_options *o;
  const char *dir;
  double since;    /* of the last change */
  uint64_t change; /* a number that changes with the directory */
  unsigned polls;
  const char *named;    /* what o->waiting had last */
  char unfinished[256]; /* a temporary name that is there, or "" */
} mm_wait;

/* Sees a change of the directory, of the places where the Hub's clients download to, and of the Hub cache's blobs. */
void mm_wait_look(mm_wait *w);
/* Sleeps once; false when the program is to stop or timeout_s have passed without a change. `what` is waited for. */
MM_MUST_USE bool mm_wait_once(mm_wait *w, const char *what, const char *more, mm_err *err);
/* True if nothing has changed for quiet_s, or for a minute where a temporary name is left. */
bool mm_wait_quiet(const mm_wait *w);
/* True if what changed at that time has not done so for a moment: a file may be copied, then get its times. A time to come says nothing. */
bool mm_wait_still(int64_t changed_ns, double quiet_s);
/* True if a downloader's temporary name stands next to the file. */
bool mm_wait_partial(const char *dir, const char *name);
/* The header of an open file, (*n) bytes to free(), or NULL where the file is not whole yet (err is unset) or not to be read. */
uint8_t *mm_wait_header(const mm_file *f, const char *path, size_t *n, mm_err *err);

#endif
