/* minimax-worker: ranks of a checkpoint in a further process of the run, started by mpirun. */
#include <signal.h>
#include <stdlib.h>

#include "convert/model/rule.h"
#include "formats/option.h"
#include "runtime/engine/engine.h"
#include "runtime/engine/engine_options.h"

typedef struct worker_args {
  const char *dir, *devices, *dp; /* dp: NULL where not given */
  uint64_t threads;
  mm_dummy dummy;
  bool json, quiet;
} worker_args;

static bool work(void *args, mm_err *err) {
  const worker_args *a = args;
  mm_shards shards = {0};
  mm_engine_config c = {0};
  uint32_t *device = NULL;
  signal(SIGTERM, SIG_IGN); /* launchers signal all processes alike, and a server that drains needs its workers to the last reply */
  signal(SIGINT, SIG_IGN);
  signal(SIGHUP, SIG_IGN);
  signal(SIGXCPU, SIG_IGN); /* the server drains at its own limit */
  bool ok = mm_process_group_find(false, &c.process_group, err);
  if (ok && !c.process_group)
    ok = mm_fail(err, MM_USAGE, "E_MPI", mm_at(NULL, NULL),
                 "found no other process; expected to be started by mpirun together with another program: mpirun -n 1 minimax-run ... : -n "
                 "1 minimax-worker DIR");
  char line[MM_GROUPS_LINE]; /* the first process says it */
  ok = ok && mm_groups_open(&shards, a->dir, &a->dummy, &(mm_groups_request){.word = a->dp}, line, err);
  if (ok) {
    const uint32_t here = mm_process_group_ranks(c.process_group, mm_pack_ranks(&shards.pack));
    c.options.threads = mm_engine_threads(a->threads, here);
    ok = mm_devices_read("cuda", a->devices, here, &device, err);
    c.device = device;
  }
  ok = ok && mm_engine_follow(&shards, &c, err);
  free(device);
  mm_shards_close(&shards);
  return ok;
}

int main(int argc, char **argv) {
  worker_args a = {.dummy = MM_DUMMY_NONE(mm_arch_read)};
  mm_program_stay();
  const mm_option options[] = {
      MM_OPTION_DEVICES(&a.devices),
      MM_OPTION_DP_NUMBER(&a.dp),
      MM_OPTION_THREADS(&a.threads),
      MM_OPTIONS_DUMMY(a.dummy),
      MM_FLAG("json", &a.json, "errors as JSON"),
      MM_FLAG("quiet", &a.quiet, "nothing on stderr but errors and notes of long waits, as always here", .letter = 'q'),
  };
  const mm_program program = {
      MM_PROGRAM("minimax-worker", "run some of a packed checkpoint's ranks in a process of their own", "DIR", 1, 1, options),
      .examples =
          "mpirun -n 1 minimax-run M2-pp2 --device cuda -p \"Hello\" : -n 1 minimax-worker M2-pp2\n"
          "mpirun --host a,b -n 1 minimax-serve M2-pp2 --device cuda : -n 1 minimax-worker M2-pp2\n"
          "mpirun --host a,b,c -n 1 minimax-eval M2-pp3 --text book.txt --device cuda : -n 2 minimax-worker M2-pp3",
      .may_end = mm_process_group_none,
      .epilog =
          "For builds with MPI=1. The first process is minimax-run, minimax-serve or minimax-eval, which is asked and chooses; all others "
          "are\n"
          "this, one a host or several, each with as many ranks, in their order. The options of the first one hold for all but --devices, "
          "--dp\n"
          "and --threads. A process that ends early takes all others with it.\n"
          "Exit status: 0 done, 2 usage, 3 bad input, 4 unsupported, 5 I/O, 6 damaged checkpoint, 8 memory or limit.",
  };
  return mm_program_main(&program, argc, argv, &a.dir, work, &a);
}
