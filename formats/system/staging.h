/* A new directory that appears at once: filled under another name in the same parent directory, synced, then renamed. A directory with the
 * final name is complete. Nothing is removed but what the caller's program wrote: files that a user puts into the target or into the
 * staging directory while a run works are never deleted.
 *
 * Replacing a directory needs RENAME_EXCHANGE. Where the file system has none (NFS, CephFS, some FUSE), the old one steps aside to
 * `.NAME.partial.old` and the new one takes its name. `.NAME.partial.replaced` lists what the old one held when the run began; it is
 * written before the first of these renames, so that the next run finishes or takes back what a crash left between them. */
#ifndef MM_FORMATS_STAGING_H
#define MM_FORMATS_STAGING_H

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A file of the directory to be replaced, as it was when the run began. */
typedef struct mm_staged_file {
  const char *name;
  uint64_t ino, size;
  int64_t mtime_ns, ctime_ns;
} mm_staged_file;

/* The state of the target's name: unused, an empty directory, or a directory with files. */
typedef enum mm_target { MM_TARGET_ABSENT, MM_TARGET_EMPTY, MM_TARGET_FULL } mm_target;

typedef struct mm_staging {
  char *path;         /* ".NAME.partial", or ".NAME.partial-WORD", in the parent directory of the target; absolute */
  const char *name;   /* its last component */
  const char *target; /* borrowed */
  char *new_name;     /* the target's last component */
  char *list, *aside; /* ".replaced" and ".old" behind the name */
  char *mark;         /* ".mark" behind the name */
  int parent, dir;    /* descriptors; -1 when closed. dir holds the lock */
  bool made;          /* this run created the directory */
  mm_target found;
  uint64_t old_ino; /* of the directory that is replaced, and its files */
  mm_staged_file *old;
  size_t old_count;
  mm_arena arena;
} mm_staging;

/* Receives notes for the user that are no failures: one line each, escaped. None until it is set; mm_program_start sets it. */
void mm_staging_notes(void (*reported)(const char *line));

/* Whether mpirun or the like started this process and others, by the environment that Open MPI, and others by PMI, set. */
bool mm_has_processes(void);

#define MM_STAGING_NONE \
  { .parent = -1, .dir = -1 }

/* Names what belongs to `target` and opens its parent. `word` is of the program, so that only runs of one kind meet; NULL for the
 * converter. MM_USAGE E_OUTPUT when it cannot be a directory's name. */
MM_MUST_USE bool mm_staging_name(mm_staging *s, const char *target, const char *word, mm_err *err);
/* MM_USAGE E_OUTPUT when the target is, holds or lies in the directory `source`, by whatever path or mount, or lies in any checkpoint or
 * next to the weights of a download. */
MM_MUST_USE bool mm_staging_outside(const mm_staging *s, const char *source, mm_err *err);
/* 1 if the open directory `parent` is, or lies in, the directory `dir` or one of its directories, by any path or mount; 0 if not; -1 if
 * that cannot be found out (errno). */
int mm_lies_in(int parent, const char *dir);
/* The same for any packed, unsharded or archived checkpoint, whose list of files has a file of ours: minimax-verify refuses what it does
 * not list. */
int mm_in_checkpoint(int parent);
/* True if the open directory itself holds Hugging Face's files of a model: config.json, and an index or model.safetensors. */
bool mm_holds_weights(int dir);
/* MM_USAGE E_OUTPUT where an attribute (chattr), a mount or the sticky bit of the open folder keeps this user from giving `name` there to
 * another file or directory. name: NULL or absent for a new one; path: what the user called it. */
MM_MUST_USE bool mm_may_rename(int parent, const char *name, const char *path, mm_err *err);
/* True if `name` in the open folder is absent, or a regular file that begins with `text`, or is a beginning of it, or of zeros, as a run
 * leaves one that is killed or loses its power. Nothing else was made by a run. */
bool mm_staging_begins(int parent, const char *name, const char *text);
/* MM_USAGE E_OUTPUT where names next to the target that runs use hold what none made. */
MM_MUST_USE bool mm_staging_usable(const mm_staging *s, mm_err *err);
/* Finishes or takes back a replacement that a run died in. MM_LOCKED while it is at work. */
MM_MUST_USE bool mm_staging_recover(mm_staging *s, mm_err *err);
/* Looks at the target: s->found, and what it holds. MM_USAGE E_OUTPUT for what is no directory, and for a mount point. */
MM_MUST_USE bool mm_staging_look(mm_staging *s, mm_err *err);
/* Makes and locks the staging directory; `shared` runs meet in it. MM_USAGE E_OUTPUT when the folder's sticky bit or an attribute (chattr)
 * keeps this user from replacing what has the target's name. MM_LOCKED when another run holds it. Where the file system has no
 * locks, a note says that nothing keeps a second run away. */
MM_MUST_USE bool mm_staging_take(mm_staging *s, bool shared, mm_err *err);
/* Removes the files in the staging directory whose names are ours(ctx, name). Anything else is MM_USAGE E_OUTPUT, and stays. */
MM_MUST_USE bool mm_staging_clear(const mm_staging *s, bool (*ours)(const void *ctx, const char *name), const void *ctx, mm_err *err);
/* MM_IO E_SPACE when the staging directory's file system has not `bytes` to spare. */
MM_MUST_USE bool mm_staging_capacity(const mm_staging *s, uint64_t bytes, mm_err *err);
/* Syncs the directory, gives it its name and syncs the parent. The files in it were synced by who wrote them. Where s->found is
 * MM_TARGET_FULL, removes what mm_staging_look saw in the old directory; if that holds anything else by now, it stays as `NAME.kept`,
 * and a note says so. MM_IO E_OUTPUT when the target is not what was found at the start: the staging directory stays. */
MM_MUST_USE bool mm_staging_publish(mm_staging *s, mm_err *err);
void mm_staging_close(mm_staging *s); /* keeps what is staged; accepts a half-opened one */

/* --- for programs that begin anew each time: a mark file next to the staging directory says that they made it --- */

/* Runs mm_staging_name, _apart from `source`, _look, _take, _clear of a killed run's files, _room. MM_USAGE E_OUTPUT when the target
 * exists (an empty directory may), or the staging directory was not made by a run of this kind. */
MM_MUST_USE bool mm_staging_open(mm_staging *s, const char *target, const char *word, const char *source, uint64_t bytes,
                                 bool (*ours)(const void *ctx, const char *name), const void *ctx, mm_err *err);
/* After mm_staging_open: removes the mark, and what was not published. */
void mm_staging_discard(mm_staging *s, bool (*ours)(const void *ctx, const char *name), const void *ctx);

/* --- between staging.c and replaced.c --- */
#define MM_REPLACED_HEAD "minimax-replaced 1" /* of the list of a replaced directory's files */
void mm_staging_note(const char *path, const char *text);
MM_MUST_USE bool mm_staging_exchange(mm_staging *s, mm_err *err);
/* MM_USAGE E_OUTPUT where an overlay file system is known to refuse mm_staging_exchange; true where that is not known. own: NULL where the
 * staging directory is locked for this run alone, else the run's own directory in it, which it has locked; a failure removes it if it is
 * empty. */
MM_MUST_USE bool mm_staging_may_exchange(const mm_staging *s, const char *own, mm_err *err);

#ifdef __cplusplus
}
#endif
#endif
