/* The only file that knows MPI. */
#include "convert/report/mpi.h"

#ifdef MM_MPI
#include <mpi.h>
#include <string.h>

void mm_mpi_start(int *argc, char ***argv, uint32_t *rank, uint32_t *size) {
  int r = 0, n = 1;
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
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

void mm_mpi_end(void) { MPI_Finalize(); }

void mm_mpi_abort(int status) {
  int n = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  if (n > 1) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
}

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

void mm_mpi_end(void) {}

void mm_mpi_abort(int status) { (void)status; }

#endif
