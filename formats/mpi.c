/* The only file that knows MPI. */
#include "formats/mpi.h"

#ifdef MM_MPI
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/hash.h"
#include "formats/system/file.h"
#include "formats/system/memory.h"

static mm_digest arguments; /* all but the program's name */

void mm_mpi_start(int *argc, char ***argv, uint32_t *rank, uint32_t *size) {
  mm_sha256_state s;
  int r = 0, n = 1;
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  mm_sha256_begin(&s);
  for (int i = 1; i < *argc; i++) mm_sha256_add(&s, (*argv)[i], strlen((*argv)[i]) + 1);
  arguments = mm_sha256_end(&s);
  if (r > 0 && !freopen("/dev/null", "w", stdout)) MPI_Abort(MPI_COMM_WORLD, MM_IO);
  *rank = (uint32_t)r;
  *size = (uint32_t)n;
}

bool mm_mpi_all(bool ok, mm_err *err) {
  int size = 1, own = 0, mine, first;
  mm_err said;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &own);
  mine = ok ? size : own;
  MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (first == size) return true;
  memcpy(&said, err, sizeof said);
  MPI_Bcast(&said, sizeof said, MPI_BYTE, first, MPI_COMM_WORLD);
  if (ok) *err = said;
  if (own != 0 && strcmp(said.text, err->text) == 0) *err->text = 0;
  return false;
}

bool mm_mpi_agreed(bool ok, mm_err *err) {
  mm_digest first = arguments;
  mm_err other = {0};
  int own = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &own);
  MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
  const bool same = mm_digest_equal(&first, &arguments) ||
                    mm_fail(&other, MM_USAGE, "E_USAGE", mm_at(NULL, NULL),
                            "found other arguments in process %d of mpirun than in process 0, expected the same in all", own);
  if (mm_mpi_all(same, &other)) return mm_mpi_all(ok, err);
  *err = other;
  return false;
}

/* The file or folder that a path names in this process. One that is not there yet is a name in its folder. */
typedef struct resolved {
  char path[2 * PATH_MAX]; /* "": not even its folder is there, as of a name in the Hub's cache */
  mm_boot machine;
  uint64_t inode; /* equal in all machines that mount one file system, wherever they do */
} resolved;

static void resolve(const char *path, resolved *r) {
  *r = (resolved){.machine = mm_boot_name()};
  char parent[PATH_MAX], name[PATH_MAX];
  struct stat s;
  const bool there = realpath(path, r->path) && stat(r->path, &s) == 0;
  if (there || (mm_path_split(path, parent, name, MM_IGNORED) && stat(parent, &s) == 0)) r->inode = s.st_ino;
  if (!there) snprintf(r->path, sizeof r->path, "%s%s%s", r->inode ? parent : "", r->inode ? "/" : "", r->inode ? name : "");
}

static bool same_file(const resolved *a, const resolved *b) {
  return strcmp(a->path, b->path) == 0 || (a->inode == b->inode && memcmp(&a->machine, &b->machine, sizeof a->machine) != 0);
}

bool mm_mpi_same_paths(const char *const *path, size_t count, mm_err *err) {
  static resolved own, first; /* not on the stack, which may be small; a process calls this once */
  int process = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &process);
  for (size_t i = 0; i < count; i++) {
    if (!path[i] || *path[i] == '/') continue;
    resolve(path[i], &own);
    first = own;
    MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD);
    if (same_file(&own, &first)) continue;
    mm_fail(err, MM_USAGE, "E_USAGE", mm_at(path[i], NULL),
            "found %s in process %d of mpirun, expected %s as in process 0: give absolute paths, or start all in one folder",
            *own.path ? own.path : "nothing", process, *first.path ? first.path : "nothing");
  }
  return mm_mpi_all(err->status == MM_OK, err);
}

void mm_mpi_end(void) { MPI_Finalize(); }

#else

/* NOLINTNEXTLINE(readability-non-const-parameter): the MPI build changes them */
void mm_mpi_start(int *argc, char ***argv, uint32_t *rank, uint32_t *size) {
  (void)argc;
  (void)argv;
  *rank = 0;
  *size = 1;
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the MPI build changes it */
bool mm_mpi_all(bool ok, mm_err *err) {
  (void)err;
  return ok;
}

bool mm_mpi_agreed(bool ok, mm_err *err) { return mm_mpi_all(ok, err); }

bool mm_mpi_same_paths(const char *const *path, size_t count, mm_err *err) {
  (void)path, (void)count;
  return mm_mpi_all(true, err);
}

void mm_mpi_end(void) {}

#endif
