/* The only file that knows MPI. */
#include "convert/report/mpi.h"

#ifdef MM_MPI
#include <mpi.h>

void mm_mpi_start(int *argc, char ***argv, uint32_t *rank, uint32_t *size) {
  int r = 0, n = 1;
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &r);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  *rank = (uint32_t)r;
  *size = (uint32_t)n;
}

bool mm_mpi_all(bool ok) {
  int mine = ok, all = 0;
  MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  return all != 0;
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

bool mm_mpi_all(bool ok) { return ok; }

void mm_mpi_end(void) {}

void mm_mpi_abort(int status) { (void)status; }

#endif
