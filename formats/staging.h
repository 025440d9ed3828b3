/* A new directory that appears at once: filled under another name beside its own, synced, then renamed. What has the final name is
 * complete. */
#ifndef MM_FORMATS_STAGING_H
#define MM_FORMATS_STAGING_H

#include "formats/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mm_staging {
  char *path;           /* ".NAME.WORD.partial" beside the target */
  const char *name;     /* its last component */
  const char *target;   /* borrowed */
  const char *new_name; /* the target's last component */
  int parent, dir;      /* descriptors; -1 when closed */
  mm_arena arena;
} mm_staging;

#define MM_STAGING_NONE \
  { .parent = -1, .dir = -1 }

/* Takes the directory `.NAME.WORD.partial` and empties it of what an earlier, killed run left there. MM_USAGE E_OUTPUT when the target
 * exists or cannot be a directory's name; MM_LOCKED when another run holds it; MM_IO E_SPACE when the file system has not `bytes` to spare.
 * `word` says what is being done, so that only runs of one kind meet. */
bool mm_staging_open(mm_staging *s, const char *target, const char *word, uint64_t bytes, mm_err *err);
/* Syncs the directory, gives it its name and syncs the parent. The files in it were synced by who wrote them. */
bool mm_staging_publish(mm_staging *s, mm_err *err);
void mm_staging_close(mm_staging *s); /* removes what was not published; accepts a half-opened one */

#ifdef __cplusplus
}
#endif
#endif
