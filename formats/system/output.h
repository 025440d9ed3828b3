/* One file that an option names: written under a temporary name in the same directory, synced, then renamed over it. A file with the final
 * name is complete, and the file that had the name before stays until then. FIFOs, terminals and the program's own stdout are written to
 * directly, where the writer needs no seeking.
 *
 * One rule holds for every such file: it is none of the program's inputs and lies in none of its input directories nor in any checkpoint,
 * by whatever path, link or mount, nor next to the weights of a download (mm_holds_weights); and it replaces (or extends) only an empty
 * file or one that this program made, as its beginning shows, unless force allows any file. The temporary file is no input either. */
#ifndef MM_FORMATS_OUTPUT_H
#define MM_FORMATS_OUTPUT_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the files of a program begin: a text that only quotes their format is none of them. */
typedef struct mm_output_mark {
  const char *head; /* what the file holds from byte `at` on */
  const char *text; /* and within its first or last 64 KiB; NULL: nothing more */
  unsigned at;
} mm_output_mark;

typedef struct mm_output_place {
  const char *path;         /* as given */
  const char *const *input; /* [inputs] files and directories that are read; NULL entries do not count */
  size_t inputs;
  const mm_output_mark *mark; /* [marks] a file of this program has one of them */
  size_t marks;
  bool force;            /* replaces any regular file that is no input */
  bool stream;           /* written from start to end, so that a FIFO will do */
  bool (*stopped)(void); /* whether to wait no longer for a FIFO's reader; NULL: a signal ends the program */
} mm_output_place;
#define MM_OUTPUT_MARKS(list) .mark = (list), .marks = sizeof(list) / sizeof *(list)
#define MM_OUTPUT_INPUTS(...) \
  .input = (const char *const[]){__VA_ARGS__}, .inputs = sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)

typedef struct mm_output {
  int fd, parent, into; /* -1 when closed; into: where the final name is, if not in parent */
  const char *path;     /* where the bytes go, for messages */
  char *name, *staged;
  bool direct;                /* no rename */
  const mm_output_mark *mark; /* [marks] a file of the name is replaced only where it has one, or is empty; NULL: any file is */
  size_t marks;
  mm_arena arena;
} mm_output;
#define MM_OUTPUT_NONE \
  { .fd = -1, .parent = -1, .into = -1 }

/* Refuses before the work what mm_output_open would refuse: MM_USAGE E_OUTPUT for a directory, a device or, without stream, a FIFO or
 * terminal; for an input, a path in an input directory or a checkpoint, or a file that the rule above protects. MM_IO if there is no such
 * directory. */
MM_MUST_USE bool mm_output_check(const mm_output_place *p, mm_err *err);
/* The rule's part for what is no file, such as a socket: MM_USAGE E_OUTPUT for a path in the directory `input` or a
 * checkpoint. */
MM_MUST_USE bool mm_output_outside(const char *path, const char *input, mm_err *err);
/* The same rule for a directory that may be replaced: no input is a file in it, or a link to one. MM_USAGE E_OUTPUT names it. */
MM_MUST_USE bool mm_output_dir_check(const char *dir, const char *const *input, size_t inputs, mm_err *err);
/* Opens the file itself, for lines that are appended; a new one is made. A FIFO that nobody reads is waited for, and a note says so;
 * MM_INTERRUPTED when `stopped` ends that. */
MM_MUST_USE bool mm_output_append(int *fd, const mm_output_place *p, mm_err *err);
/* Opens `.NAME.partial-PROGRAM` in the directory of the path (a killed run's file is replaced; MM_LOCKED while another run writes it), or
 * the target itself if it takes the bytes directly. */
MM_MUST_USE bool mm_output_open(mm_output *o, const mm_output_place *p, mm_err *err);
/* The same with the two directories open (taken over, also on failure): `staged` in `parent` becomes `name` in `into`. The place's path
 * is for messages. */
MM_MUST_USE bool mm_output_open_at(mm_output *o, const mm_output_place *p, int parent, const char *staged, int into, const char *name,
                                   mm_err *err);
/* Syncs, closes and renames. After a failure nothing is left of it. */
MM_MUST_USE bool mm_output_publish(mm_output *o, mm_err *err);
void mm_output_discard(mm_output *o); /* accepts a published or half-opened one */

#ifdef __cplusplus
}
#endif
#endif
