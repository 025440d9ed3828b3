/* The processes of mpirun (processes.h). Weights and steps know nothing of MPI. */
#include "runtime/engine/processes.h"

#include "formats/system/staging.h"

#ifdef MM_MPI
#include <errno.h>
#include <math.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PIECE  ((size_t)1 << 30) /* of a message: MPI counts in int */
#define SPINS  20000             /* polls for a message before the thread yields the processor */
#define NOTE_S 20                /* of waiting without a limit up to the first note; up to the next twice as many */

enum { FIRST_TURN = 3, MOST_TURNS = 10, TURN_NS = 300000000 }; /* before the abort of a process that fails; the first one has none */

static mm_process_group process_group;
static bool met; /* others may wait for this one */

static void post(MPI_Request **r, const mm_transfer *p, uint32_t n, uint32_t tag, bool out) {
  for (uint32_t i = 0; i < n; i++)
    for (size_t at = 0; at < p[i].n; at += PIECE) {
      const int bytes = (int)mm_min(PIECE, p[i].n - at);
      char *data = (char *)p[i].data + at;
      if (out)
        MPI_Isend(data, bytes, MPI_BYTE, (int)p[i].process, (int)tag, MPI_COMM_WORLD, (*r)++);
      else
        MPI_Irecv(data, bytes, MPI_BYTE, (int)p[i].process, (int)tag, MPI_COMM_WORLD, (*r)++);
    }
}

static size_t pieces(const mm_transfer *p, uint32_t n) {
  size_t all = 0;
  for (uint32_t i = 0; i < n; i++) all += mm_ceil_div(p[i].n, PIECE);
  return all;
}

/* The process of the first unfinished message whose requests begin at *r; UINT32_MAX if all are done. */
static uint32_t find_late(MPI_Request **r, const mm_transfer *p, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    for (size_t at = 0; at < p[i].n; at += PIECE) {
      int done = 0;
      MPI_Request_get_status(*(*r)++, &done, MPI_STATUS_IGNORE);
      if (!done) return p[i].process;
    }
  return UINT32_MAX;
}

/* Aborts all processes: process `late` has timed out, and the others cannot go on without it. */
static void end_all(const mm_process_group *w, uint32_t late, double waited_s) {
  fprintf(stderr, "%s: error: E_RANK: process %u waited %.1f s for process %u: timeout\n", program_invocation_short_name, w->process,
          waited_s, late);
  MPI_Abort(MPI_COMM_WORLD, MM_IO);
}

/* A wait without a limit, in which another process is expected to do something: the user hears of it now and then. */
static void say_late(uint32_t late, double waited_s) {
  char who[32], text[96];
  snprintf(who, sizeof who, "process %u", late);
  snprintf(text, sizeof text, "process %u has waited %.0f s for it: it computes, or hangs", process_group.process, waited_s);
  mm_staging_note(who, text);
}

/* Any failure of MPI's ends all processes: its own way with errors. */
static void exchange(mm_process_group *w, uint32_t tag, const mm_transfer *out, uint32_t outs, const mm_transfer *in, uint32_t ins,
                     double limit_s) {
  const size_t n = pieces(out, outs) + pieces(in, ins);
  MPI_Request some[64], *all = n <= 64 ? some : malloc(n * sizeof *all), *next = all;
  if (!all) MPI_Abort(MPI_COMM_WORLD, MM_LIMIT);
  post(&next, in, ins, tag, false);
  post(&next, out, outs, tag, true);
  int done = 0;
  double from = 0, until = limit_s > 0 ? limit_s : limit_s < 0 ? (double)INFINITY : NOTE_S;
  for (uint32_t i = 0; MPI_Testall((int)n, all, &done, MPI_STATUSES_IGNORE), !done; i++) {
    if (i <= SPINS) continue;
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    if (from == 0) from = mm_now();
    if (mm_now() - from < until) continue;
    next = all;
    const uint32_t late = find_late(&next, in, ins), other = late == UINT32_MAX ? find_late(&next, out, outs) : late;
    if (other == UINT32_MAX) continue;
    if (limit_s > 0) end_all(w, other, limit_s);
    say_late(other, until);
    until *= 2;
  }
  if (all != some) free(all);
}

static volatile sig_atomic_t ending; /* the status of a process that waits for its turn */
static void end_now(int number) {
  (void)number;
  _exit(ending);
}

/* Where several processes abort at once, or end while one aborts, mpirun crashes or hangs now and then: the lowest aborts, and mpirun's
 * SIGTERM ends the others while they wait for their turn. */
static void abort_in_turn(int status) {
  const uint32_t process = process_group.process, turns = process ? (uint32_t)mm_min(FIRST_TURN + process, MOST_TURNS) : 0;
  ending = status;
  signal(SIGTERM, end_now);
  for (uint32_t i = 0; i < turns; i++) nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
  MPI_Abort(MPI_COMM_WORLD, status);
}

static void leave(int status, void *unused) {
  (void)unused;
  if (met) abort_in_turn(status ? status : MM_IO);
  MPI_Finalize();
}

bool mm_process_group_find(bool leads, mm_process_group **w, mm_err *err) {
  *w = NULL;
  if (!mm_has_processes()) return true;
  int provided = 0, process = 0, processes = 1;
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided) != MPI_SUCCESS || provided < MPI_THREAD_MULTIPLE)
    return mm_fail(err, MM_IO, "E_MPI", mm_at(NULL, NULL), "found an MPI without MPI_THREAD_MULTIPLE");
  on_exit(leave, NULL);
  MPI_Comm_rank(MPI_COMM_WORLD, &process);
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  process_group = (mm_process_group){(uint32_t)process, (uint32_t)processes, exchange};
  met = processes > 1;
  if (!met) return true;
  *w = &process_group;
  return leads == (process == 0) || mm_fail(err, MM_USAGE, "E_MPI", mm_at(NULL, NULL),
                                            "found %s as process %d of %d; expected minimax-worker in all but the first (mpirun -n 1 "
                                            "minimax-run ... : -n %d minimax-worker DIR)",
                                            leads ? "another program" : "minimax-worker", process, processes, processes - 1);
}

bool mm_process_group_none(mm_err *err) {
  return !mm_has_processes() || mm_fail(err, MM_USAGE, "E_MPI", mm_at(NULL, NULL),
                                        "found other processes of mpirun, which wait for what this one does; expected none with --help, "
                                        "--version and their like, nor with --against of a checkpoint");
}

void mm_process_group_part(mm_process_group *w) {
  if (w == &process_group) met = false;
}

#else

bool mm_process_group_find(bool leads, mm_process_group **w, mm_err *err) {
  (void)leads;
  *w = NULL;
  return !mm_has_processes() ||
         mm_fail(err, MM_UNSUPPORTED, "E_MPI", mm_at(NULL, NULL),
                 "found other processes of mpirun, which this build cannot speak to; expected none, or a build with MPI=1");
}

bool mm_process_group_none(mm_err *err) { return (void)err, true; } /* such a build has no others that could wait */

void mm_process_group_part(mm_process_group *w) { (void)w; }

#endif
