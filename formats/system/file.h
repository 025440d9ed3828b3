/* Files: opening untrusted ones safely, exact reads and writes, mappings, and directories that appear at once.
 * Every call retries EINTR and handles short transfers. Paths in messages are as given. */
#ifndef MM_FORMATS_FILE_H
#define MM_FORMATS_FILE_H

#include <dirent.h>
#include <limits.h>

#include "formats/system/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MM_LFS_POINTER "version https://git-lfs" /* how the text begins that Git LFS keeps in a file's place */

/* Identity of a file at open time; compared again at the end of a run. */
typedef struct mm_file_id {
  uint64_t dev, ino, size;
  int64_t mtime_ns, ctime_ns;
} mm_file_id;

typedef struct mm_file {
  int fd; /* -1 when closed */
  uint64_t size;
  mm_file_id id;
} mm_file;
#define MM_FILE_NONE \
  {                  \
    -1, 0, {         \
      0, 0, 0, 0, 0  \
    }                \
  }

struct stat;
mm_file_id mm_file_id_of(const struct stat *s);
/* True if both describe the same file. */
bool mm_same_file(const struct stat *a, const struct stat *b);
/* O_RDONLY|O_NONBLOCK|O_CLOEXEC|O_NOCTTY, then fstat: anything but a regular file is MM_BAD_INPUT E_FS_TYPE (says what it
 * is); absent is MM_BAD_INPUT E_FS_MISSING; ELOOP is E_FS_TYPE in words; other errors MM_IO. Follows symlinks. */
MM_MUST_USE bool mm_file_open(mm_file *f, const char *path, mm_err *err);
/* A file that a packed checkpoint's manifest lists is there: MM_INTEGRITY E_FS_MISSING or E_FS_TYPE. */
MM_MUST_USE bool mm_file_listed(const char *path, mm_err *err);
void mm_file_close(mm_file *f); /* reading side only: a failed close loses nothing */
/* The file at path still is `id`; MM_IO E_CHANGED otherwise. */
MM_MUST_USE bool mm_file_unchanged(const mm_file *f, const char *path, mm_err *err);
/* A directory while it is read. As it stays open, no directory that takes its name later has its inode. */
typedef struct mm_dir {
  int fd; /* -1: the path named no directory */
} mm_dir;
mm_dir mm_dir_open(const char *path);
/* Closes it. Returns `ok`, unless path names another directory by now, or none: MM_IO E_CHANGED, which takes the place of a failure in
 * *err of MM_BAD_INPUT, MM_INTEGRITY or E_SHORT_READ, as the files may be of two directories. */
MM_MUST_USE bool mm_dir_close(mm_dir *d, const char *path, bool ok, mm_err *err);
/* Exactly n bytes at offset; a short file is MM_IO E_SHORT_READ with the offset. */
MM_MUST_USE bool mm_file_read(const mm_file *f, const char *path, void *buf, size_t n, uint64_t offset, mm_err *err);
/* True if the page cache has all of [offset, offset + n). False, with errno ENOSYS or EPERM, if the kernel does not answer (kernels before
 * 6.5, files of other users). n > 0. */
bool mm_file_cached(int fd, uint64_t offset, uint64_t n);
/* For one pass over much data, without filling the page cache: takes what the cache already holds whole, else reads past it through
 * `direct` (a descriptor with O_DIRECT, or -1 where the file system has none). buf is aligned to MM_DIRECT and has room for n +
 * 2·MM_DIRECT; the bytes start at buf + *skew. Errors as mm_file_read. */
#define MM_DIRECT 4096
MM_MUST_USE bool mm_file_stream(const mm_file *f, int direct, const char *path, uint8_t *buf, size_t n, uint64_t offset, size_t *skew,
                                mm_err *err);
/* Whole regular file of at most max bytes, NUL-terminated beyond *n; free() it. */
char *mm_file_slurp(const char *path, uint64_t max, size_t *n, mm_err *err);

/* A read-only private mapping of a whole file (size > 0). */
typedef struct mm_map {
  const uint8_t *data;
  uint64_t size;
} mm_map;
MM_MUST_USE bool mm_map_open(mm_map *m, const mm_file *f, const char *path, mm_err *err);
void mm_map_close(mm_map *m); /* accepts a zeroed one */
/* Where a mapped byte comes from. */
typedef struct mm_mapped {
  const char *path;      /* as it was given; until the mapping is closed */
  const mm_file_id *id;  /* the same */
  const uint8_t *data;   /* of the whole mapping */
  uint64_t size, offset; /* of the file, and of the byte in it */
} mm_mapped;
/* False where p is in no open mapping. */
bool mm_map_find(const void *p, mm_mapped *out);
/* From now on a mapped page that is not there ends the program with one line and MM_IO: E_CHANGED when the file was cut, else E_IO. */
void mm_map_watch(void);

/* Raises this process's soft limit of descriptors, often 1,024, as far as the hard one allows, so that n threads may have `each`
 * descriptors and all of them `shared`. Returns for how many threads there is room, from 1 to n. */
unsigned mm_file_threads(unsigned n, unsigned each, unsigned shared);
/* Exact write at offset; MM_IO on failure. */
MM_MUST_USE bool mm_pwrite(int fd, const char *path, const void *buf, size_t n, uint64_t offset, mm_err *err);
/* Creates (O_EXCL|O_NOFOLLOW) dir/name below an open directory, mode 0644 & ~umask, read-write; -1 on failure. */
int mm_create_at(int dirfd, const char *dir, const char *name, mm_err *err);
/* Writes, fsyncs and closes a new small file below dirfd. */
MM_MUST_USE bool mm_write_file_at(int dirfd, const char *dir, const char *name, const void *buf, size_t n, mm_err *err);
/* MM_INTEGRITY E_SIZE where a file has another size than it must have. */
MM_MUST_USE bool mm_size_is(const char *path, uint64_t found, uint64_t expected, mm_err *err);
/* False, MM_BAD_INPUT E_JSON, if the n bytes that a text begins with are a Git LFS pointer. */
MM_MUST_USE bool mm_no_pointer(const char *text, size_t n, const char *path, mm_err *err);
/* True for a directory, and for a link to one. */
bool mm_is_dir(const char *path);
/* Lists the open directory `dir` from its start; closedir the result. NULL: MM_IO, "cannot WHAT". `path` is for messages. */
DIR *mm_dir_at(int dir, const char *path, const char *what, mm_err *err);
/* The next name in an open directory but "." and "..", until the next call: NULL in *name at its end. A listing that breaks off is MM_IO,
 * never an end. */
MM_MUST_USE bool mm_dir_next(DIR *d, const char *path, const char **name, mm_err *err);
/* fsync that reports; for a directory EINVAL/ENOTSUP are tolerated. */
MM_MUST_USE bool mm_fsync(int fd, const char *path, bool directory, mm_err *err);
/* ftruncate, again when a signal came between; -1 sets errno. */
int mm_ftruncate(int fd, uint64_t size);
/* True if a lock failed because the file system has no locks (some NFS and Lustre mounts), not because another run holds it. */
bool mm_no_locks(int reason);
/* close that reports. */
MM_MUST_USE bool mm_close(int fd, const char *path, mm_err *err);

/* dir/name. It has room for more than the kernel takes: a path that had to be cut is refused by whatever opens it. */
typedef struct mm_path {
  char text[PATH_MAX + NAME_MAX + 2];
} mm_path;
mm_path mm_path_of(const char *dir, const char *name);
/* The directory that `path` is in, resolved, and the last name of the path; MM_IO where there is no such directory. */
MM_MUST_USE bool mm_path_split(const char *path, char parent[PATH_MAX], char name[PATH_MAX], mm_err *err);
/* True for a plain base name: 1–255 bytes, no '/', '\\', NUL or control byte, not "." or "..". */
bool mm_base_name_ok(const char *name, size_t n);

#ifdef __cplusplus
}
#endif
#endif
