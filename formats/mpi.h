/* Processes of one conversion on a shared file system. Built with MPI=1 they are started by mpirun; otherwise there is one. */
#ifndef MM_MPI_H
#define MM_MPI_H

#include "formats/system/base.h"

/* To be called first in main. Of several processes the first alone keeps its standard output. */
void mm_mpi_start(int *argc, char ***argv, uint32_t *rank, uint32_t *size);
/* Waits for all processes; true when every one of them passed true. Otherwise *err is set in all of them, that of the first that failed in
 * those that did not. The first process has its words, for all that failed alike; the others have none (mm_err.text). */
bool mm_mpi_all(bool ok, mm_err *err);
/* The same, and MM_USAGE E_USAGE where a process was started with other arguments than the first: they would not meet again. */
MM_MUST_USE bool mm_mpi_agreed(bool ok, mm_err *err);
/* The same for paths that are relative: MM_USAGE E_USAGE where one is another file or folder in this process than in the first, as their
 * working directories differ. Every process passes as many, NULL where one is not given. */
MM_MUST_USE bool mm_mpi_same_paths(const char *const *path, size_t count, mm_err *err);
void mm_mpi_end(void);

#endif
